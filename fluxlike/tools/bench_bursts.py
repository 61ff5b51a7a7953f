"""What `bench all_reduce --suite resnet50` measures: many reductions in flight, as a training step has them.

MXNet's authors found NCCL best for one reduction and slow for 50 or 150 in a row, which is what a ResNet-50 asks for: 157 keys, two
thirds of them of 2048 elements or fewer. A *burst* is so many tensors, each of one key's size and with memory of its own, that are
all reduced in place before anything else happens. Those of 1, 50 and 150 keys are spread evenly over all 157, sorted by size; then
comes the whole model.

`torch` is dist.all_reduce, one call each; `torch_coalesced` the same within torch's coalescing manager, which hands the list to
NCCL as one group; `each` is fluxlike.all_reduce_, one call each; `list` one call of it for all. Without GPUs torch's are gloo's.

As all work in place, and call after call, what they leave is the sum times a power of the number of ranks; the values are judged,
the power is not. The error is that of the key where it is largest, so that none can hide behind the others.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

import fluxlike

from . import bench_reduce
from .bench_peers import Peers
from .bench_problems import SAMPLE_COLUMNS, SAMPLE_ROWS, sane_error
from .bench_reduce import Algorithm, AllReduce, Reached
from .bench_report import Result

PEERS = ("torch", "torch_coalesced")
#: Bytes to which torch's allocator aligns a tensor, and so a key here.
ALIGN = 512


class Burst(NamedTuple):
    """Elements of each tensor."""

    keys: tuple[int, ...]

    def __str__(self) -> str:
        return f"{len(self.keys)} of {sum(self.keys):,} elements"


def resnet50(units: Sequence[int] = (3, 4, 6, 3), first: int = 64, classes: int = 1000) -> tuple[int, ...]:
    """Elements of each key of MXNet's ResNet-50 (version 2), in the order of its layers; or of a smaller one."""
    keys = [3, 3, first * 3 * 7 * 7, first, first]
    channels = first
    for stage, count in enumerate(units):
        narrow, wide = first << stage, 4 * first << stage
        for unit in range(count):
            keys += [channels, channels, narrow * channels, narrow, narrow, narrow * narrow * 9, narrow, narrow, wide * narrow]
            keys += [] if unit else [wide * channels]
            channels = wide
    return (*keys, channels, channels, classes * channels, classes)


def spread(keys: Sequence[int], count: int) -> Burst:
    """``count`` of the keys, evenly over their sizes."""
    ordered = sorted(keys)
    return Burst(tuple(ordered[(2 * i + 1) * len(ordered) // (2 * count)] for i in range(count)))


_KEYS, _FEW = resnet50(), resnet50((1,), 4, 10)
BURSTS = {
    "resnet50": (*(spread(_KEYS, count) for count in (1, 50, 150)), Burst(_KEYS)),
    "resnet50-toy": (spread(_FEW, 1), spread(_FEW, 5)),  # small enough for the interpreter
}


class Report(bench_reduce.Report):
    """All bursts of one mode."""

    PEERS: ClassVar = PEERS
    judged = "list"

    def moved(self, size: Any) -> float:
        return 2 * (self.ranks - 1) / self.ranks * sum(size.keys) * self.itemsize

    def columns(self) -> Sequence[str]:
        return ("reductions", *super().columns()[1:])

    def behind(self, result: Result) -> float | None:
        return self.derived(result).get("list", Reached()).over_best

    def compared(self) -> list[str]:
        """Where a list stands against the peers, and against one call each."""
        lines = []
        for result in self.results:
            times = self.times(result)
            ours = times.get("list")
            ratios = [f"{ms / ours:.2f}× {name}" for name, ms in times.items() if ours and ms and name != "list"]
            if ratios:
                lines.append(f"list at {result.shape}: {', '.join(ratios)}")
        return lines

    def draw(self, figure: Any) -> None:
        """Time over the number of reductions, a group of bars each."""
        figure.set_size_inches(8, 4.5)
        axes = figure.subplots()
        methods = [row.method for row in self.results[0].rows]
        width = 0.8 / len(methods)
        for i, method in enumerate(methods):
            heights = [(self.times(result).get(method) or 0.0) * 1e3 for result in self.results]
            axes.bar([j - 0.4 + width * (i + 0.5) for j in range(len(heights))], heights, width, label=method)
        axes.set_yscale("log")
        axes.set_xticks(range(len(self.results)), [str(result.shape) for result in self.results], fontsize=8)
        axes.set_ylabel("µs until all are reduced")
        axes.set_title(self.title(), fontsize=9)
        axes.legend(fontsize=8)


class Bursts(AllReduce):
    """Tensors on this rank, and the sums over the ranks of a sample of each."""

    OURS, ON_REQUEST = ("each", "list"), ()
    ON_GPUS = ON_CPUS = UNBOUNDED = PEERS
    IN_PLACE = (*PEERS, *OURS)
    REPORT = Report
    SUITES: ClassVar = BURSTS

    def __init__(self, shape: Any, dtype: torch.dtype, device: torch.device, peers: Peers) -> None:
        self.dtype, self.device, self.peers, self.terms, self.buffer = dtype, device, peers, 1, None
        self.generator = torch.Generator(device=device).manual_seed(1234 + peers.rank)
        step = ALIGN // dtype.itemsize
        starts = [0]
        for elements in shape.keys:
            starts.append(starts[-1] + -(-elements // step) * step)
        self.x = self.random(starts[-1]) * (2**-10 if dtype is torch.float16 else 1)  # as `AllReduce`
        self.out = self.empty(starts[-1])
        self.tensors = [self.out[start : start + n] for start, n in zip(starts[:-1], shape.keys, strict=True)]
        choice = torch.Generator().manual_seed(5)  # the same sample on every rank
        each = max(1, SAMPLE_ROWS * SAMPLE_COLUMNS // len(shape.keys))
        picked = [start + torch.randperm(n, generator=choice)[:each] for start, n in zip(starts[:-1], shape.keys, strict=True)]
        self.picked = torch.cat(picked).to(device)
        self.sampled = [len(some) for some in picked]
        self.truth = peers.add(self.x[self.picked].double())

    @classmethod
    def unfit(cls, size: Any, ranks: int) -> str | None:
        return None

    def context(self, schedule: str) -> "_Calls":
        return _Calls(self.out, self.tensors, schedule)

    def run_torch(self) -> torch.Tensor:
        for tensor in self.tensors:
            dist.all_reduce(tensor)
        return self.out

    def run_torch_coalesced(self) -> torch.Tensor:
        with dist.distributed_c10d._coalescing_manager():
            for tensor in self.tensors:
                dist.all_reduce(tensor)
        return self.out

    def judge(self, method: str, result: torch.Tensor) -> tuple[float, float]:
        got, truth = self.sample(method, result)
        of_keys = torch.stack([some.mean() for some in (got - truth).square().split(self.sampled)])
        error = of_keys.max().sqrt().item() / truth.square().mean().sqrt().item()
        return error, sane_error(self.dtype, self.peers.size, self.terms)


class _Calls(Algorithm):
    """Our calls for a burst, in the form of the contexts of the other operations."""

    def __init__(self, out: torch.Tensor, tensors: list[torch.Tensor], how: str) -> None:
        super().__init__(out, "auto")
        self.tensors, self.how = tensors, how

    def reduce(self) -> torch.Tensor:
        if self.how == "list":
            fluxlike.all_reduce_(self.tensors)
        else:
            for tensor in self.tensors:
                fluxlike.all_reduce_(tensor)
        return self.x

"""What `bench all_reduce` measures, and how it reports: latency over size, against NCCL and torch's own kernels.

Sizes are bytes of one rank's tensor. `torch` is dist.all_reduce (NCCL), in place as everybody calls it; `torch_one_shot` and
`torch_two_shot` are torch.ops.symm_mem's, on a tensor in symmetric memory. Two of these three add up again in each call, so that
what they leave is the sum times a power of the number of ranks; the values are judged, the power is not. In the timings they go on
with that, in the end with infinities.

Bus bandwidth is 2·(R−1)/R · size / time, what each rank must at least send (and receive) while all reduce parts of it; the limit
T* is that at the rate of the wire.
"""

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

import fluxlike

from ..ops import trees
from ..ops.all_reduce import ALGORITHMS, KIND
from ..ops.exchange import EpochContext
from ..runtime import world
from ..runtime.wording import counted
from . import bench_report
from .bench_peers import Peers
from .bench_problems import SAMPLE_COLUMNS, SAMPLE_ROWS, Problem
from .bench_report import NONE, TOLERATED, Result

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
#: auto may be this much slower than the best of the algorithms before the summary says so.
CLOSE = 1.05
PEERS = ("torch", "torch_one_shot", "torch_two_shot")


class Size(NamedTuple):
    """Bytes of the tensor of each rank."""

    nbytes: int

    def __str__(self) -> str:
        unit = max((u for u in UNITS if self.nbytes % UNITS[u] == 0), key=UNITS.__getitem__)
        return f"{self.nbytes // UNITS[unit]} {unit}B"


def parse_sizes(text: str) -> list[Size]:
    """16K,1M,… ; ValueError names the part that is no size."""
    sizes = []
    for part in text.split(","):
        digits = part.strip().upper().removesuffix("B").rstrip()
        unit = digits[-1:] if digits[-1:].isalpha() else ""
        digits = digits.removesuffix(unit).rstrip()
        if unit not in UNITS or not digits.isdecimal() or not int(digits):
            raise ValueError(f"{part.strip()!r} is not a size; write bytes, as 4096, 16K or 1M, and commas between sizes")
        sizes.append(Size(int(digits) * UNITS[unit]))
    return sizes


SIZES: dict[str, tuple[Size, ...]] = {
    "headline": tuple(parse_sizes("16K,64K,128K,256K,512K,1M,2M,4M,8M,16M,32M,64M")),
    "sweep": tuple(Size(1 << i) for i in range(10, 29)),
    "toy": tuple(parse_sizes("512,4K,10K")),  # small enough for the interpreter
}


@dataclass(frozen=True)
class Reached:
    """What follows from the median times of one size; None where a time that it needs is missing."""

    bus_gb_s: float | None = None
    speedup: float | None = None  # over NCCL
    over_best: float | None = None  # speed over the best of `PEERS`
    over_limit: float | None = None  # T / T*


class Report(bench_report.Report):
    """All sizes of one mode."""

    PEERS: ClassVar[tuple[str, ...]] = PEERS
    #: What auto is compared with.
    FIXED: ClassVar[tuple[str, ...]] = ALGORITHMS

    def moved(self, size: Any) -> float:
        """Bytes that a rank must send."""
        return 2 * (self.ranks - 1) / self.ranks * float(size.nbytes)

    def limit(self, result: Result) -> float | None:
        return self.moved(result.shape) / (bench_report.WIRE_GB_S * 1e9) * 1e3

    def derived(self, result: Result) -> dict[str, Any]:
        times, limit = self.times(result), self.limit(result)
        torch_ms = times.get("torch")
        best = min((ms for name in self.PEERS if (ms := times.get(name)) is not None), default=None)
        return {
            name: Reached()
            if ms is None
            else Reached(
                bus_gb_s=self.moved(result.shape) / (ms * 1e-3) / 1e9,
                speedup=None if torch_ms is None else torch_ms / ms,
                over_best=None if best is None else best / ms,
                over_limit=ms / limit if limit else None,
            )
            for name, ms in times.items()
        }

    def columns(self) -> Sequence[str]:
        return ("size", "method", "µs", "min–max", "bus GB/s", "× torch", "× best peer", "T/T*", "host µs", "error/allowed")

    def cells(self, row: bench_report.Row, derived: Any) -> list[str]:
        us = [ms * 1e3 for ms in row.rounds_ms]
        return [
            row.status if row.status != "ok" else bench_report.cell(row.ms and row.ms * 1e3, ".4g"),
            f"{min(us):.4g}–{max(us):.4g}" if us else NONE,
            bench_report.cell(derived.bus_gb_s, ".0f"),
            bench_report.cell(derived.speedup, ".2f"),
            bench_report.cell(derived.over_best, ".2f"),
            bench_report.cell(derived.over_limit, ".2f"),
        ]

    def behind(self, result: Result) -> float | None:
        return self.derived(result).get("auto", Reached()).over_best

    def compared(self) -> list[str]:
        """Where auto stands against the peers, and against what it could have chosen."""
        against = {str(r.shape): ratio for r in self.results if (ratio := self.behind(r)) is not None}
        chosen: dict[str, float] = {}
        for result in self.results:
            times = self.times(result)
            auto, fixed = times.get("auto"), [ms for name in self.FIXED if (ms := times.get(name)) is not None]
            if auto is not None and fixed:
                chosen[str(result.shape)] = auto / min(fixed)
        lines = []
        if against:
            worst = min(against, key=lambda size: against[size])
            ahead = sum(ratio >= TOLERATED for ratio in against.values())
            lines.append(
                f"auto against the best of {', '.join(self.PEERS)}: at least {TOLERATED}× on {ahead} of "
                f"{counted(len(against), 'size')}, worst {against[worst]:.2f}× at {worst}"
            )
        if chosen:
            worst = max(chosen, key=lambda size: chosen[size])
            near = sum(ratio <= CLOSE for ratio in chosen.values())
            lines.append(
                f"auto against the best algorithm: within {CLOSE}× on {near} of {counted(len(chosen), 'size')}, "
                f"worst {chosen[worst]:.2f}× at {worst}"
            )
        return lines

    def drawable(self) -> str | None:
        return None if any(row.ms for result in self.results for row in result.rows) else "no plot: it needs times"

    def draw(self, figure: Any) -> None:
        """Latency over size, both on log axes, a line a method."""
        figure.set_size_inches(9, 5.5)
        axes = figure.subplots()
        for method in [row.method for row in self.results[0].rows]:
            points = [(result.shape.nbytes, ms * 1e3) for result in self.results if (ms := self.times(result).get(method))]
            if points:
                axes.plot(*zip(*points, strict=True), "--s" if method in self.PEERS else "-o", markersize=3, label=method)  # type: ignore[misc]
        sizes = [result.shape for result in self.results]
        axes.plot([s.nbytes for s in sizes], [(self.limit(r) or 0) * 1e3 for r in self.results], "k:", label="limit T*")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks([s.nbytes for s in sizes], [str(s) for s in sizes], rotation=45, ha="right", fontsize=8)
        axes.set_ylabel("µs a call")
        axes.grid(alpha=0.3)
        axes.set_title(self.title(), fontsize=9)
        axes.legend(fontsize=8, ncols=2)


# the problem


class AllReduce(Problem):
    """A tensor on this rank, and the sum over the ranks of a sample of it."""

    OURS: ClassVar[tuple[str, ...]] = (*ALGORITHMS, "auto")
    ON_GPUS: ClassVar[tuple[str, ...]] = PEERS
    ON_CPUS: ClassVar[tuple[str, ...]] = ("torch",)
    ON_REQUEST: ClassVar[tuple[str, ...]] = ("trees",)
    UNBOUNDED: ClassVar[tuple[str, ...]] = PEERS
    #: Methods whose every call adds up again what the last one has left.
    IN_PLACE: ClassVar[tuple[str, ...]] = PEERS
    REPORT: ClassVar[type[bench_report.Report]] = Report
    SUITES: ClassVar[Mapping[str, Sequence[Any]]] = SIZES
    LARGEST: ClassVar[str] = "32M"

    @staticmethod
    def parse(text: str) -> list[Any]:
        return list(parse_sizes(text))

    @staticmethod
    def work(shape: Any) -> int:
        return int(shape.nbytes)

    def __init__(self, size: Size, dtype: torch.dtype, device: torch.device, peers: Peers) -> None:
        self.dtype, self.device, self.peers = dtype, device, peers
        self.generator = torch.Generator(device=device).manual_seed(1234 + peers.rank)
        elements = size.nbytes // dtype.itemsize
        # fp16 ends at 65504, and sums of sums grow
        self.x = self.random(elements) * (2**-10 if dtype is torch.float16 else 1)
        self.out = self.empty(elements)
        self.buffer: torch.Tensor | None = None
        choice = torch.Generator().manual_seed(5)  # the same sample on every rank
        self.picked = torch.randperm(elements, generator=choice)[: SAMPLE_ROWS * SAMPLE_COLUMNS].to(device)
        self.truth = peers.add(self.x[self.picked].double())
        self.terms = 1

    @classmethod
    def unfit(cls, size: Any, ranks: int) -> str | None:
        return f"{size.nbytes} bytes are no multiple of 4" if size.nbytes % 4 else None

    def context(self, schedule: str) -> "Algorithm":
        return Algorithm(self.x, schedule)

    def ours(self, context: Any) -> torch.Tensor:
        return context.reduce()  # type: ignore[no-any-return]

    def spoil(self) -> None:
        """Fresh values where torch works in place."""
        self.out.copy_(self.x)
        if self.buffer is not None:
            self.buffer.copy_(self.x)
        torch.full_like(self.x, math.nan)

    def know_torch(self) -> None:
        self.spoil()
        super().know_torch()

    def run_torch(self) -> torch.Tensor:
        dist.all_reduce(self.out)
        return self.out

    def symmetric(self) -> tuple[torch.Tensor, str]:
        """A copy of x in torch's symmetric memory, made at first use, and the name of the group. Collective."""
        group = dist.group.WORLD
        assert group is not None
        if self.buffer is None:
            memory = importlib.import_module("torch.distributed._symmetric_memory")
            self.buffer = memory.empty(self.x.numel(), dtype=self.dtype, device=self.device).copy_(self.x)
            memory.rendezvous(self.buffer, group)
        return self.buffer, group.group_name

    def run_torch_one_shot(self) -> torch.Tensor:
        buffer, name = self.symmetric()
        return torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", name)  # type: ignore[no-any-return]

    def run_torch_two_shot(self) -> torch.Tensor:
        buffer, name = self.symmetric()
        return torch.ops.symm_mem.two_shot_all_reduce_(buffer, "sum", name)  # type: ignore[no-any-return]

    def sample(self, method: str, result: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        got, truth = result[self.picked].double(), self.truth
        if method in self.IN_PLACE:
            grown = got.square().mean().sqrt().item() / truth.square().mean().sqrt().item()
            if math.isfinite(grown) and grown > 0 and self.peers.size > 1:
                truth = truth * self.peers.size ** max(0, round(math.log(grown, self.peers.size)))
        return got, truth


class Algorithm:
    """One of our algorithms, in the form of the contexts of the other operations. ``run``: makes the call; ``op``: which it is."""

    def __init__(
        self, x: torch.Tensor, algo: str, op: str = KIND.name, run: Callable[[torch.Tensor, str], Any] | None = None
    ) -> None:
        self.x, self.algo, self.op, self._run = x, algo, op, run or _all_reduce

    def reduce(self) -> Any:
        return self._run(self.x, self.algo)

    @property
    def last_path(self) -> str:
        this = world.current()  # others may be open, too, that graphs hold
        kept = this.cached.get((trees.KEPT_AS if self.algo == "trees" else self.op, this.control.name))
        return "" if kept is None else str(kept.last_path)

    def check(self) -> None:
        for context in self._contexts():
            context.check()

    def close(self) -> None:
        """The memory stays for other calls."""

    @staticmethod
    def _contexts() -> list[EpochContext]:
        return [context for context in world.current().contexts if isinstance(context, EpochContext)]


def _all_reduce(x: torch.Tensor, algo: str) -> Any:
    return fluxlike.all_reduce(x, algo=algo)

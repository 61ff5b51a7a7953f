"""What `bench` measures of reduce_scatter, all_gather, reduce and broadcast: latency over size, against NCCL.

Sizes are bytes of all parts together: of the tensor that is reduced, or of the one that is gathered or sent. `torch` is
dist.reduce_scatter_tensor, dist.all_gather_into_tensor, dist.reduce and dist.broadcast, into memory that is there. Ours make a new
tensor. Root is rank 0, on which dist.reduce adds the others' parts again in each call.

Bus bandwidth is what a rank must at least send or receive over the time: (R−1)/R · size, or where one rank has all of it, size.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist

import fluxlike

from ..ops.collectives import ALGORITHMS, ROOTED
from . import bench_reduce
from .bench_peers import Peers
from .bench_problems import SAMPLE_COLUMNS, SAMPLE_ROWS
from .bench_reduce import Algorithm, AllReduce, Size

ROOT = 0


class Report(bench_reduce.Report):
    """All sizes of one mode."""

    PEERS: ClassVar = ("torch",)
    FIXED: ClassVar = ROOTED

    def moved(self, size: Any) -> float:
        part = 0 if self.op in ("reduce", "broadcast") else 1 / self.ranks
        return float(size.nbytes) * (1 - part) if self.ranks > 1 else 0.0


class Collective(AllReduce):
    """The operands of one of them on this rank, and a sample of what the result should be."""

    OURS: ClassVar[tuple[str, ...]] = (*ALGORITHMS, "auto")
    ON_GPUS: ClassVar[tuple[str, ...]] = ("torch",)
    UNBOUNDED: ClassVar[tuple[str, ...]] = ("torch",)
    ON_REQUEST: ClassVar[tuple[str, ...]] = ()
    IN_PLACE: ClassVar[tuple[str, ...]] = ()
    REPORT: ClassVar = Report
    OP: ClassVar[str]
    run: ClassVar[Callable[..., Any]]

    def __init__(self, size: Size, dtype: torch.dtype, device: torch.device, peers: Peers) -> None:
        super().__init__(size, dtype, device, peers)
        self.part = self.x.numel() // peers.size
        choice = torch.Generator().manual_seed(6)
        #: A sample of each part.
        self.inside = torch.randperm(self.part, generator=choice)[: SAMPLE_ROWS * SAMPLE_COLUMNS].to(device)
        self.prepare()

    def prepare(self) -> None:
        """Operands and truth that are not those of all_reduce."""

    @classmethod
    def unfit(cls, size: Any, ranks: int) -> str | None:
        unit = 4 * ranks
        return f"{size.nbytes} bytes are no multiple of {unit}, which is 4 for each rank" if size.nbytes % unit else None

    def context(self, schedule: str) -> Algorithm:
        return Algorithm(self.x, schedule, self.OP, type(self).run)


class OfParts(Collective):
    """A result of another size than the operand's, which torch writes as a whole."""

    def spoil(self) -> None:
        self.out.fill_(torch.nan)
        torch.full_like(self.out, torch.nan)


class ReduceScatter(OfParts):
    OP = "reduce_scatter"

    @staticmethod
    def run(x: torch.Tensor, algo: str) -> Any:
        return fluxlike.reduce_scatter(x, algo=algo)

    def prepare(self) -> None:
        self.out = self.empty(self.part)
        sums = self.peers.add(self.x.view(self.peers.size, self.part)[:, self.inside].double())
        self.picked, self.truth = self.inside, sums[self.peers.rank]

    def run_torch(self) -> torch.Tensor:
        dist.reduce_scatter_tensor(self.out, self.x)
        return self.out


class AllGather(OfParts):
    OP = "all_gather"

    @staticmethod
    def run(x: torch.Tensor, algo: str) -> Any:
        return fluxlike.all_gather(x, algo=algo)

    def prepare(self) -> None:
        self.x = self.x[: self.part].clone()
        self.out = self.empty(self.part * self.peers.size)
        self.picked = torch.cat([self.inside + rank * self.part for rank in range(self.peers.size)])
        self.truth = torch.cat(self.peers.gather(self.x[self.inside].float().cpu())).double().to(self.device)

    def run_torch(self) -> torch.Tensor:
        dist.all_gather_into_tensor(self.out, self.x)
        return self.out


class Rooted(Collective):
    """What one rank has all of."""

    OURS: ClassVar[tuple[str, ...]] = (*ROOTED, "auto")

    @classmethod
    def unfit(cls, size: Any, ranks: int) -> str | None:
        return AllReduce.unfit(size, ranks)  # nobody has a part of it


class Reduce(Rooted):
    OP = "reduce"

    @staticmethod
    def run(x: torch.Tensor, algo: str) -> Any:
        return fluxlike.reduce(x, ROOT, algo=algo)

    def run_torch(self) -> torch.Tensor:
        if self.device.type == "cpu":  # gloo leaves sums of some on the others, and is not timed
            self.out.copy_(self.x)
        dist.reduce(self.out, ROOT)
        return self.out

    def sample(self, method: str, result: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if self.peers.rank != ROOT:  # where ours have none, and NCCL leaves what it likes
            missing = method != "torch" and result is not None
            return torch.full_like(self.truth, torch.nan) if missing else self.truth, self.truth
        assert result is not None
        got, own = result[self.picked].double(), self.x[self.picked].double()
        others = self.truth - own
        if method != "torch":
            return got, self.truth
        # each call adds the others' parts again
        times = max(1.0, round((((got - own) * others).sum() / others.square().sum()).item()))
        return got, own + times * others


class Broadcast(Rooted):
    OP = "broadcast"

    @staticmethod
    def run(x: torch.Tensor, algo: str) -> Any:
        return fluxlike.broadcast(x, ROOT, algo=algo)

    def prepare(self) -> None:
        mine = self.x[self.picked].float().cpu()
        self.truth = self.peers.gather(mine)[ROOT].double().to(self.device)

    def spoil(self) -> None:
        super().spoil()
        if self.peers.rank != ROOT:
            self.out.fill_(torch.nan)

    def run_torch(self) -> torch.Tensor:
        dist.broadcast(self.out, ROOT)
        return self.out


KINDS: dict[str, type[Collective]] = {kind.OP: kind for kind in (ReduceScatter, AllGather, Reduce, Broadcast)}

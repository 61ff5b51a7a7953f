"""The shapes that `bench` knows, and one shape on this rank: operands, the ways to compute it, the truth on a sample."""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

import fluxlike

from ..ops import sequential
from ..ops.ag_gemm import AGGemmContext
from ..ops.all_reduce import ALGORITHMS
from ..ops.context import SCHEDULES, Context
from ..ops.gemm_rs import GemmRSContext
from ..runtime import world
from .bench_peers import Failed, Lost, Peers
from .bench_report import Report, Shape

SAMPLE_ROWS, SAMPLE_COLUMNS = 256, 512
TOLERANCE = 1.5
#: Values of a sample below which their errors say little of what is usual.
FEW = 64

Call = Callable[[], torch.Tensor]


def _shapes(text: str) -> tuple[Shape, ...]:
    return tuple(parse_shapes(text.replace(" ", ",")))


def parse_shapes(text: str) -> list[Shape]:
    """MxNxK,MxNxK… of the whole problem; ValueError names the part that is none."""
    shapes = []
    for part in text.split(","):
        sizes = part.strip().lower().replace("×", "x").split("x")
        if len(sizes) != 3 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
            raise ValueError(f"{part.strip()!r} is not a shape; write MxNxK with whole numbers above 0, and commas between shapes")
        shapes.append(Shape(*map(int, sizes)))
    return shapes


def _model(hidden: int, inner: int, up: int) -> dict[str, tuple[Shape, ...]]:
    """An MLP: the down-projection for gemm_rs, the ``up`` projections into it (with gate: two) for ag_gemm."""
    tokens = [1 << i for i in range(4, 15)]
    return {
        "gemm_rs": tuple(Shape(m, hidden, inner) for m in tokens),
        "ag_gemm": tuple(Shape(m, up * inner, hidden) for m in tokens),
    }


def _attention(op: str) -> tuple[Shape, ...]:
    """What Llamas of 8, 70 and 405 billion parameters project in attention: queries, keys and values for ag_gemm, all with one
    gather, and what comes out for gemm_rs.
    """
    tokens, more = (16, 64, 256, 1024, 2048, 4096, 8192), 0 if op == "gemm_rs" else 2 * 1024  # keys and values of eight heads
    return tuple(Shape(m, hidden + more, hidden) for hidden in (4096, 8192, 16384) for m in tokens)


SUITES: dict[str, dict[str, tuple[Shape, ...]]] = {
    "headline": {
        "gemm_rs": _shapes(
            "8192x8192x28672 8192x8192x8192 4096x8192x28672 2048x8192x28672 1024x8192x28672 "
            "8192x12288x49152 4096x12288x49152 8192x4096x14336 4096x4096x14336"
        ),
        "ag_gemm": _shapes(
            "8192x57344x8192 2048x57344x8192 1024x57344x8192 512x57344x8192 8192x28672x4096 4096x49152x12288 8192x16384x8192"
        ),
    },
    "eight": {
        "gemm_rs": _shapes("8192x8192x28672 4096x8192x28672 8192x12288x49152 8192x4096x14336"),
        "ag_gemm": _shapes("8192x57344x8192 8192x28672x8192 2048x57344x8192 8192x49152x12288"),
    },
    "decode": {
        "gemm_rs": tuple(Shape(m, 8192, 28672) for m in (16, 64, 256, 512)),
        "ag_gemm": tuple(Shape(m, 57344, 8192) for m in (16, 64, 256, 512)),
    },
    "small-m": {
        "gemm_rs": _shapes(
            "64x8192x28672 256x8192x28672 512x8192x28672 256x4096x14336 512x4096x14336 1024x4096x14336 2048x4096x14336"
        ),
        "ag_gemm": tuple(Shape(m, n, k) for n, k in ((57344, 8192), (28672, 4096)) for m in (64, 128, 256, 512)),
    },
    "llama-8b": _model(4096, 14336, up=2),
    "llama-70b": _model(8192, 28672, up=2),
    "llama-405b": _model(16384, 53248, up=2),
    "gpt3-175b": _model(12288, 49152, up=1),
    "qwen-72b": _model(8192, 29568, up=2),
    "attention": {op: _attention(op) for op in ("gemm_rs", "ag_gemm")},
    # small enough for the interpreter
    "toy": {"gemm_rs": _shapes("64x48x64 8x32x128 128x96x64"), "ag_gemm": _shapes("64x48x64 8x128x32 128x64x96")},
}


def indivisible(ranks: int, **sizes: int) -> str | None:
    """Which of these sizes cannot be split over the ranks, if any."""
    bad = [f"{name}={size}" for name, size in sizes.items() if size % ranks]
    rule = "the operations take such sizes, the tools measure those that R divides: give others"
    return f"R={ranks} does not divide {' and '.join(bad)}; {rule}" if bad else None


def sane_error(dtype: torch.dtype, ranks: int, k: int) -> float:
    """What torch itself must keep to: it rounds at each step of its ring and may split K."""
    return torch.finfo(dtype).eps * math.sqrt(ranks) + _sums(k)


def allowed_error(torch_error: float, dtype: torch.dtype, ranks: int, k: int) -> float:
    """The root mean square error that a result may have: `TOLERANCE` times torch's, or that of the roundings if it is larger.

    One rounding of the result costs about 0.2 of eps; the fp32 sums of K terms, up to √K of theirs.
    """
    return TOLERANCE * max(min(torch_error, sane_error(dtype, ranks, k)), (torch.finfo(dtype).eps + _sums(k)) / 4)


def _sums(k: int) -> float:
    return torch.finfo(torch.float32).eps * math.sqrt(k)


class Problem(ABC):
    """One shape on this rank: operands, buffers, the ways to compute it, and the truth on a sample of the result."""

    #: Methods of this library, whose contexts `context` makes; the others, for GPUs and without.
    OURS: ClassVar[tuple[str, ...]] = (*(name for name in SCHEDULES if name != "auto"), "auto")
    ON_GPUS: ClassVar[tuple[str, ...]] = ("gemm", "torch", "async_tp")
    ON_CPUS: ClassVar[tuple[str, ...]] = ("reference",)
    #: Methods of ours that run only if they are named: few rows by torch's product or in one kernel; those that are ``auto``
    #: between nodes, by `NodesContext.together`; calls that name no context, by whether they say the sizes of all; and `ANEW`.
    ON_REQUEST: ClassVar[tuple[str, ...]] = ()
    #: Others that run only if they are named, but for those of `ON_GPUS` on GPUs and of `ON_CPUS` without.
    PEERS_ON_REQUEST: ClassVar[tuple[str, ...]] = ()
    BETWEEN_NODES: ClassVar[Mapping[str, bool]] = {}
    WITHOUT_CONTEXT: ClassVar[Mapping[str, bool]] = {}
    #: Methods in which ranks wait for each other without a deadline of ours: if one raises on some ranks only, the rest are stuck.
    UNBOUNDED: ClassVar[tuple[str, ...]] = ("torch", "async_tp", "reference")
    REPORT: ClassVar[type[Report]] = Report
    #: The keys under which the context of `WITHOUT_CONTEXT` is kept.
    kept_by: ClassVar[Collection[Any]] = ()
    #: Shapes by the name of their suite.
    SUITES: ClassVar[Mapping[str, Sequence[Any]]]
    #: What the interpreter does in some ten minutes, as --shapes has it.
    LARGEST: ClassVar[str] = "2048x2048x2048"
    out: torch.Tensor
    terms: int  # of each sum on one rank

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device, peers: Peers) -> None:
        self.shape, self.dtype, self.device, self.peers, self.terms = shape, dtype, device, peers, shape.k
        self.generator = torch.Generator(device=device).manual_seed(1234 + peers.rank)
        self.choice = torch.Generator().manual_seed(5)  # the same sample on every rank
        self.pick_rows(shape.m)

    @staticmethod
    def parse(text: str) -> list[Any]:
        """From the text of --shapes; ValueError names the part that is none."""
        return list(parse_shapes(text))

    @staticmethod
    def work(shape: Any) -> int:
        """What the time in the interpreter grows with."""
        return int(shape.m * shape.n * shape.k)

    @classmethod
    @abstractmethod
    def unfit(cls, shape: Any, ranks: int) -> str | None:
        """Why a shape cannot be split over the ranks, if it cannot."""

    def pick_rows(self, m: int) -> None:
        """Which rows of the whole are looked at, and which of a rank's, of which all have as many."""
        share, ranks = m // self.peers.size, self.peers.size
        self.picked = torch.randperm(share, generator=self.choice)[: max(1, SAMPLE_ROWS // ranks)].to(self.device)
        self.rows = torch.cat([self.picked + rank * share for rank in range(ranks)])

    def columns(self, n: int) -> torch.Tensor:
        return torch.randperm(n, generator=self.choice)[:SAMPLE_COLUMNS].to(self.device)

    def random(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.generator, device=self.device, dtype=self.dtype)

    def empty(self, *size: int) -> torch.Tensor:
        return torch.empty(*size, device=self.device, dtype=self.dtype)

    def call(self, method: str, context: Any) -> Call:
        if context is not None:
            return lambda: self.ours(context)
        return getattr(self, f"run_{method}")  # type: ignore[no-any-return]

    @abstractmethod
    def context(self, schedule: str) -> Any: ...

    def on_request(self, method: str, make: Callable[[str], Any]) -> Any:
        """The context that ``make`` makes for a method, also one of `ON_REQUEST`. ValueError: one node, where it is for several."""
        if method in self.WITHOUT_CONTEXT:
            return Kept(self.kept_by, self.WITHOUT_CONTEXT[method])
        context = make("auto" if method in (*self.BETWEEN_NODES, ANEW) else method)
        if method == ANEW:
            context.recall = lambda key: None
        if method in self.BETWEEN_NODES:
            if not hasattr(context, "together"):
                context.close()
                raise ValueError(f"{method!r} is for ranks on several nodes, or of a host that FLUXLIKE_VIRTUAL_NODES=2 splits")
            context.together = self.BETWEEN_NODES[method]
        return context

    def chosen(self, context: Any) -> dict[str, Any] | None:
        """How calls of this shape are made on a context, if by a `Choice`: for records, as rules and tables change."""
        found = context.context if isinstance(context, Kept) else context
        if not isinstance(found, Context) or found.transport == "stream_k":
            return None
        return found.choose(found.problem(*self.shape)).as_json()

    @abstractmethod
    def ours(self, context: Any) -> torch.Tensor: ...

    @abstractmethod
    def run_torch(self) -> torch.Tensor: ...

    @abstractmethod
    def sample(self, method: str, result: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(the sampled part of ``result``, what it should be), fp64."""

    def spoil(self) -> None:
        """Make what no method has written yet recognisable, so that none passes with the result of the one before.

        The second line is for results that are allocated anew: the allocator gives the block of that size out again.
        """
        self.out.fill_(math.nan)
        torch.full_like(self.out, math.nan)

    def know_torch(self) -> None:
        """Measure torch's own error, against which all are judged. Collective."""
        self.torch_error = 0.0
        error, _ = self.judge("torch", self.run_torch())
        self.torch_error = error

    def judge(self, method: str, result: torch.Tensor) -> tuple[float, float]:
        """(error, allowed error) on this rank, as shares of the true values' size; NaN is never allowed.

        Few values may all happen to be near zero, below their parts, or torch's near the truth: they are held to what is usual.
        """
        got, truth = self.sample(method, result)
        ranks, k, few = self.peers.size, self.terms, truth.numel() < FEW
        size = max(truth.square().mean().sqrt().item(), math.sqrt(k * ranks) if few else 0.0)
        error = (got - truth).square().mean().sqrt().item() / size
        if method in ("torch", "gemm"):
            return error, sane_error(self.dtype, ranks, k) * (TOLERANCE if few else 1.0)
        return error, allowed_error(math.inf if few else self.torch_error, self.dtype, ranks, k)


def judged(kind: type[Problem], shape: Any, dtype: torch.dtype, device: torch.device, peers: Peers) -> Problem:
    """A problem that knows torch's own error. Collective: Failed if it cannot be made, Lost if torch failed on some ranks only."""
    problem: Problem = peers.attempt(lambda: kind(shape, dtype, device, peers))
    try:
        peers.attempt(problem.know_torch)
    except Failed as failure:
        if not failure.everywhere:
            raise Lost(f"torch failed on some ranks only, and the others wait for them: {failure}") from failure
        raise
    return problem


class Kept:
    """The context that calls share which name none, as a method's. ``by``: its kind or, between nodes, its operation."""

    def __init__(self, by: Collection[Any], says: bool) -> None:
        self.by, self.says = by, says

    @property
    def context(self) -> Any:
        return next((context for key, context in world.current().cached.items() if key[0] in self.by), None)

    @property
    def last_path(self) -> str:
        return "" if self.context is None else str(self.context.last_path)

    def check(self) -> None:
        if self.context is not None:
            self.context.check()

    def close(self) -> None:
        """It stays for other calls."""


#: How calls between nodes are made, and those without a context.
_WAYS = {"apart": False, "together": True}
_SAID = {"unsaid": False, "said": True}
#: ``auto``, but what is known of calls like the last one is not used: see `ops.again`.
ANEW = "anew"


class GemmRS(Problem):
    kept_by = GemmRSContext, "gemm_rs"
    ON_REQUEST, BETWEEN_NODES, WITHOUT_CONTEXT = (sequential.TORCH, sequential.FUSED, *_WAYS, *_SAID, ANEW), _WAYS, _SAID
    SUITES: ClassVar = {name: suite["gemm_rs"] for name, suite in SUITES.items()}

    @classmethod
    def unfit(cls, shape: Any, ranks: int) -> str | None:
        return indivisible(ranks, M=shape.m, K=shape.k)

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device, peers: Peers) -> None:
        super().__init__(shape, dtype, device, peers)
        (m, n, k), ranks = shape, peers.size
        self.x, self.weight = self.random(m, k // ranks), self.random(n, k // ranks)
        self.product, self.out = self.empty(m, n), self.empty(m // ranks, n)
        self.cols = self.columns(n)
        self.local = self.x[self.rows].double() @ self.weight[self.cols].double().T
        mine = len(self.picked)
        self.total = peers.add(self.local)
        self.truth = self.total[peers.rank * mine : (peers.rank + 1) * mine]

    def context(self, schedule: str) -> Any:
        make = functools.partial(fluxlike.create_gemm_rs_context, *self.shape, self.dtype)
        return self.on_request(schedule, lambda schedule: make(schedule=schedule))

    def ours(self, context: Any) -> torch.Tensor:
        if isinstance(context, Kept):
            return fluxlike.gemm_rs(self.x, self.weight, out=self.out, k=self.shape.k if context.says else None)
        return fluxlike.gemm_rs(self.x, self.weight, context, out=self.out)

    def spoil(self) -> None:
        super().spoil()
        self.product.fill_(math.nan)

    def run_gemm(self) -> torch.Tensor:
        return torch.matmul(self.x, self.weight.T, out=self.product)

    def run_torch(self) -> torch.Tensor:
        self.run_gemm()
        if self.device.type == "cpu":  # gloo lacks it for 16 bits; rounded partial sums, as in a ring
            total = self.product.float()
            dist.all_reduce(total)
            return self.out.copy_(total.chunk(self.peers.size)[self.peers.rank])
        dist.reduce_scatter_tensor(self.out, self.product)
        return self.out

    def run_async_tp(self) -> torch.Tensor:
        name = dist.group.WORLD.group_name  # type: ignore[union-attr]
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(self.x, self.weight.T, "sum", 0, name)  # type: ignore[no-any-return]

    def run_reference(self) -> torch.Tensor:
        return fluxlike.reference.gemm_rs(self.x, self.weight, out=self.out)  # type: ignore[no-any-return]

    def sample(self, method: str, result: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if method == "gemm":
            return result[self.rows][:, self.cols].double(), self.local
        return result[self.picked][:, self.cols].double(), self.truth


class AGGemm(Problem):
    kept_by = AGGemmContext, "ag_gemm"
    ON_REQUEST, BETWEEN_NODES, WITHOUT_CONTEXT = (sequential.TORCH, sequential.FUSED, *_WAYS, *_SAID, ANEW), _WAYS, _SAID
    SUITES: ClassVar = {name: suite["ag_gemm"] for name, suite in SUITES.items()}

    @classmethod
    def unfit(cls, shape: Any, ranks: int) -> str | None:
        return indivisible(ranks, M=shape.m, N=shape.n)

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device, peers: Peers) -> None:
        super().__init__(shape, dtype, device, peers)
        (m, n, k), ranks = shape, peers.size
        self.x, self.weight = self.random(m // ranks, k), self.random(n // ranks, k)
        self.gathered, self.out = self.empty(m, k), self.empty(m, n // ranks)
        self.cols = self.columns(n // ranks)
        shards = peers.gather(self.x[self.picked].float().cpu())
        self.truth = torch.cat(shards).to(device).double() @ self.weight[self.cols].double().T

    def context(self, schedule: str) -> Any:
        make = functools.partial(fluxlike.create_ag_gemm_context, *self.shape, self.dtype)
        return self.on_request(schedule, lambda schedule: make(schedule=schedule))

    def ours(self, context: Any) -> torch.Tensor:
        if isinstance(context, Kept):
            return fluxlike.ag_gemm(self.x, self.weight, n=self.shape.n if context.says else None, out=self.out)  # type: ignore[no-any-return]
        return fluxlike.ag_gemm(self.x, self.weight, context, out=self.out)  # type: ignore[no-any-return]

    def run_gemm(self) -> torch.Tensor:
        return torch.matmul(self.gathered, self.weight.T, out=self.out)

    def run_torch(self) -> torch.Tensor:
        if self.device.type == "cpu":
            dist.all_gather(list(self.gathered.chunk(self.peers.size)), self.x)
        else:
            dist.all_gather_into_tensor(self.gathered, self.x)
        return self.run_gemm()

    def run_async_tp(self) -> torch.Tensor:
        name = dist.group.WORLD.group_name  # type: ignore[union-attr]
        return torch.ops.symm_mem.fused_all_gather_matmul(self.x, [self.weight.T], 0, name)[1][0]  # type: ignore[no-any-return]

    def run_reference(self) -> torch.Tensor:
        return fluxlike.reference.ag_gemm(self.x, self.weight)  # type: ignore[no-any-return]

    def sample(self, method: str, result: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return result[self.rows][:, self.cols].double(), self.truth


class GemmAR(GemmRS):
    """As gemm_rs, with the whole sum on every rank."""

    OURS = (*ALGORITHMS, "auto")
    ON_REQUEST, BETWEEN_NODES, WITHOUT_CONTEXT = ("one_shot/fused", "two_shot/fused"), {}, {}
    ON_GPUS = ("gemm", "torch")
    UNBOUNDED = ("torch", "reference")
    SUITES: ClassVar = {
        "headline": _shapes(
            "16x8192x28672 64x8192x28672 256x8192x28672 512x8192x28672 64x4096x14336 256x4096x14336 512x4096x14336"
        ),
        "decode": SUITES["decode"]["gemm_rs"],
        "toy": SUITES["toy"]["gemm_rs"],
    }

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device, peers: Peers) -> None:
        super().__init__(shape, dtype, device, peers)
        self.out = self.empty(shape.m, shape.n)
        self.truth = self.total

    def pick_rows(self, m: int) -> None:
        """Of all: they are nobody's, and may be fewer than ranks."""
        self.picked = self.rows = torch.randperm(m, generator=self.choice)[:SAMPLE_ROWS].to(self.device)

    @classmethod
    def unfit(cls, shape: Any, ranks: int) -> str | None:
        return indivisible(ranks, K=shape.k)

    def context(self, schedule: str) -> Any:
        algo, _, product = schedule.partition("/")
        product = product or ("auto" if schedule == "auto" else "torch")  # else one_shot would be what auto is
        return fluxlike.create_gemm_ar_context(self.shape.m, self.shape.n, self.dtype, algo=algo, product=product)

    def ours(self, context: Any) -> torch.Tensor:
        return fluxlike.gemm_ar(self.x, self.weight, context, out=self.out)

    def run_torch(self) -> torch.Tensor:
        dist.all_reduce(self.run_gemm())
        return self.product

    def run_reference(self) -> torch.Tensor:
        return fluxlike.reference.gemm_ar(self.x, self.weight, out=self.out)  # type: ignore[no-any-return]

    def sample(self, method: str, result: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return result[self.rows][:, self.cols].double(), self.local if method == "gemm" else self.truth


#: The operations whose contexts have schedules, for `tune` and `trace`, too.
PROBLEMS: dict[str, type[Problem]] = {"gemm_rs": GemmRS, "ag_gemm": AGGemm}

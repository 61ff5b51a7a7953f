"""Calls whose right answer is known: small whole numbers in, float64 sums of them out.

Every rank can make the inputs of all ranks from the seeds, so the expected values need no communication.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from ranks import device, exact, ints, rows_slice

import fluxlike

TRANSPORTS = ("copy_engine", "in_kernel")
SCHEDULES = (*TRANSPORTS, "stream_k", "decomposed", "sequential")
#: Those of fp32.
IN_FP32 = tuple(name for name in SCHEDULES if name != "decomposed")
#: Those in which torch multiplies.
TORCH = ("decomposed", "sequential")
#: Those whose copies the copy engine makes.
COPIES = ("copy_engine", "decomposed")


def schedules(dtype: torch.dtype) -> tuple[str, ...]:
    """Those that there are for a dtype."""
    return IN_FP32 if dtype == torch.float32 else SCHEDULES


def launches(op: str, schedule: str, m: int, ranks: int, rank: int, gathered: bool = False, weights: int = 1) -> int:
    """Kernels that a call launches."""
    if schedule not in ("sequential", "decomposed"):
        return weights + gathered
    if ranks == 1:
        return 0
    if schedule == "sequential":
        return 1
    if op == "gemm_rs":
        return 2  # the credits, and the sum
    sources = [s for s in range(ranks) if s != rank and rows_slice(m, ranks, s) != slice(m, m)]
    return len(sources) + 2  # the credits, and the end


def make_weight(n: int, k: int, dtype: torch.dtype, seed: int, transposed: bool) -> torch.Tensor:
    """[N, K] on the device, row-major or the transposed view of [K, N]; the values depend on the seed only."""
    weight = ints((n, k), dtype, seed)
    return (weight.T.contiguous().T if transposed else weight).to(device())


def same(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Equal to the float64 ``expected``, value by value."""
    assert tuple(actual.shape) == tuple(expected.shape), f"{what}: shape {tuple(actual.shape)}"
    got = actual.double().cpu()
    if not torch.equal(got, expected):
        wrong = (got != expected).nonzero()
        first = tuple(wrong[0].tolist())
        raise AssertionError(
            f"{what}: {len(wrong)} of {expected.numel()} values differ, first at {first}: {got[first]:g}, "
            f"not {expected[first]:g}; rows {sorted({i for i, _ in wrong.tolist()})[:8]} …"
        )


def poison(ctx, group) -> None:
    """NaN into the slots of a new context, before any rank makes a call."""
    ctx.data.fill_(float("nan"))
    if ctx.exchange is not None:
        ctx.exchange.data.fill_(0xFF)  # of every dtype a NaN
    ctx.check()
    dist.barrier(group)


@dataclass
class RSCase:
    """The inputs of one gemm_rs on all ranks and the rows that each rank shall get."""

    m: int
    n: int
    ks: list[int]  # K of each rank
    dtype: torch.dtype
    seed: int
    bias: bool = False
    transposed: bool = False

    def inputs(self, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        seed, k = self.seed * 1000, self.ks[rank]
        x = ints((self.m, k), self.dtype, seed + 2 * rank + 1).to(device())
        w = make_weight(self.n, k, self.dtype, seed + 2 * rank + 2, self.transposed)
        b = ints((self.n,), self.dtype, seed, -4, 4, 1.0).to(device()) if self.bias else None
        return x, w, b

    def expected(self, rank: int) -> torch.Tensor:
        total = torch.zeros(self.m, self.n, dtype=torch.float64, device=device())
        for source in range(len(self.ks)):
            x, w, b = (None if t is None else t.double() for t in self.inputs(source))
            total += x @ w.T
            exact(x.abs() @ w.abs().T, dtype=self.dtype)
        if b is not None:
            total += b
        exact(total, dtype=self.dtype)
        return total.cpu()[rows_slice(self.m, len(self.ks), rank)]

    def check(self, ctx, group, schedule: str = "", **how) -> None:
        """The call, the reference, and what the context says of the call."""
        rank = dist.get_rank(group)
        what = f"gemm_rs M={self.m} N={self.n} K={self.ks} {self.dtype} bias={self.bias} transposed={self.transposed}"
        what = f"{what} {schedule} {how}"
        x, w, b = self.inputs(rank)
        before = dict(ctx.stats)
        y = fluxlike.gemm_rs(x, w, ctx, bias=b, **how)
        expected = self.expected(rank)
        assert y.dtype == self.dtype and y.device == device() and y.is_contiguous(), what
        same(y, expected, what)
        same(fluxlike.reference.gemm_rs(x, w, bias=b, group=group), expected, f"reference {what}")
        ran = int(self.m > 0 and self.n > 0)
        assert ctx.stats["calls"] - before["calls"] == ran, what
        assert ctx.stats["launches"] - before["launches"] == ran * launches("gemm_rs", schedule, self.m, len(self.ks), rank), what
        if ran:
            assert ctx.last_path.split("/")[0] == schedule, f"{what}: took {ctx.last_path}"
            # Every rank sends to the owners of rows; rank 0 owns the first and does not send to itself.
            copies = len(self.ks) > 1 and schedule in COPIES and (rank > 0 or self.m > 1)
            assert (ctx.stats["copies"] > before["copies"]) == copies, what


@dataclass
class AGCase:
    """The inputs of one ag_gemm on all ranks, the gathered input, and the result of each rank."""

    m: int
    ns: list[int]  # N of each rank
    k: int
    dtype: torch.dtype
    seed: int
    bias: bool = False
    transposed: bool = False

    def inputs(self, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        seed, n = self.seed * 1000, self.ns[rank]
        x = ints((self.m, self.k), self.dtype, seed + 1)
        shard = x[rows_slice(self.m, len(self.ns), rank)].contiguous().to(device())
        w = make_weight(n, self.k, self.dtype, seed + rank + 2, self.transposed)
        b = ints((n,), self.dtype, seed - rank, -4, 4, 1.0).to(device()) if self.bias else None
        return shard, w, b

    def whole(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The gathered input, and the result of each rank."""
        x = ints((self.m, self.k), self.dtype, self.seed * 1000 + 1).double().to(device())
        results = []
        for rank in range(len(self.ns)):
            _, w, b = (None if t is None else t.double() for t in self.inputs(rank))
            results.append(x @ w.T if b is None else x @ w.T + b)
        exact(*results, dtype=self.dtype)
        return x.cpu(), [result.cpu() for result in results]

    def check(self, ctx, group, schedule: str, return_gathered: bool) -> None:
        rank = dist.get_rank(group)
        what = f"ag_gemm M={self.m} N={self.ns} K={self.k} {self.dtype} bias={self.bias} transposed={self.transposed}"
        what = f"{what} {schedule} gathered={return_gathered}"
        shard, w, b = self.inputs(rank)
        before = dict(ctx.stats)
        z = fluxlike.ag_gemm(shard, w, ctx, bias=b, m=self.m, return_gathered=return_gathered)
        z, gathered = z if return_gathered else (z, None)
        x, expected = self.whole()
        assert z.dtype == self.dtype and z.device == device() and z.is_contiguous(), what
        same(z, expected[rank], what)
        ref, ref_gathered = fluxlike.reference.ag_gemm(shard, w, bias=b, group=group, m=self.m, return_gathered=True)
        same(ref, expected[rank], f"reference {what}")
        same(ref_gathered, x, f"gathered by the reference {what}")
        if gathered is not None:
            same(gathered, x, f"gathered {what}")
        ran = int(self.m > 0 and self.k > 0)
        assert ctx.stats["calls"] - before["calls"] == ran, what
        launched = ran * launches("ag_gemm", schedule, self.m, len(self.ns), rank, return_gathered)
        assert ctx.stats["launches"] - before["launches"] == launched, what
        if ran:
            assert ctx.last_path.split("/")[0] == schedule, f"{what}: took {ctx.last_path}"
            copies = len(self.ns) > 1 and schedule in COPIES and len(shard) > 0
            assert (ctx.stats["copies"] > before["copies"]) == copies, what

"""The schedule "sequential": one product by cuBLAS and one exchange kernel, one after the other. Its design record.

Nothing is overlapped, for where there is little to hide: with few rows a product lasts tens of microseconds, of which reading the
weight is most, and a trip of `kernels.exchange` some four. Cutting the product into what each rank needs first, and signals for
each piece, cost more than they hide. Measured: docs/performance.md, "Few rows". And fp32, whose products take 14 times as long.

    gemm_rs   partial = x · Wᵀ  [M, N], rounded to the dtype;  y = reduce_scatter(partial)
              both in one kernel, `kernels.fused`, on GPUs and for up to 64 rows whose operands can be read so
    ag_gemm   gathered = all_gather(x)  [M, K];  z = gathered · Wᵀ (+ bias)
              both in one kernel alike, with wide weights for up to 256; of several weights the first, and torch multiplies the
              others

The exchange has a context of its own inside that of the operation (`memory`), with its own count of calls. The protocol is that of
`kernels.exchange`; the product and the exchange are ordered by the stream, and so are the calls, so that the scratch between the
two needs no signal. It can be captured in CUDA graphs, as torch's products can.

Numerics: products as in `ops.decomposed`; those of fp32 at IEEE precision unless torch's switches let it use TF32
(``torch.set_float32_matmul_precision``), and as exact as torch.matmul's of the same operands. gemm_rs rounds every partial sum
to the dtype, the own one too, adds them in fp32 in the order of the ranks, and rounds once more. A bias belongs to the owner of the
rows: those are computed again, with it, since adding it behind the product would round twice. ag_gemm rounds once, behind the bias.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..kernels.tiles import cdiv
from ..runtime import racecheck
from ..runtime.control import ControlGroup
from . import again, exchange, fused
from .exchange import ExchangeContext, Kind
from .group import Prepared, Told, told

if TYPE_CHECKING:
    from .context import Context

NAME = "sequential"
#: It, with the product by torch, or with both in one kernel, which is refused where that cannot be. In a group of one nothing is
#: exchanged, and torch multiplies.
TORCH, FUSED = f"{NAME}/torch", f"{NAME}/fused"
#: Bytes of all parts up to which auto may choose it, and has memory for it, but in fp32.
LIMIT = 16 << 20


def limit(dtype: torch.dtype) -> int:
    """`LIMIT`; in fp32 none: torch multiplies three times as fast as kernels of ours, and there is a few per cent to hide."""
    return sys.maxsize if dtype == torch.float32 else LIMIT


def memory(op: str, control: ControlGroup, nbytes: int) -> ExchangeContext:
    """What the exchanges of calls need whose parts have up to ``nbytes``; larger ones go in pieces. Collective."""
    kind = Kind(op, scatter=op == "gemm_rs", gather=op == "ag_gemm")
    part = min(nbytes, kind.most(control.size, "words"))
    return ExchangeContext(kind, control, max(1, cdiv(part, exchange.WORDS * 4)), 1)


class Plan(NamedTuple):
    """How calls of one kind are made."""

    #: The partial sums [M, N], or the gathered input [M, K].
    scratch: torch.Tensor
    #: Rows of a full chunk.
    full: int
    #: Launches of the exchange, and the element at which each begins; none in a group of one.
    launches: list[tuple[int, Prepared]]
    call: Told
    #: Of a call in one kernel, its launch, in place of all else.
    fused: Prepared | None = None


def scatter(
    ctx: "Context", x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor, full: int
) -> Plan:
    """For calls of gemm_rs, on GPUs in one kernel where that is possible on this rank."""
    m, n = len(x), len(weight)
    inner = ctx.exchange
    if inner is not None and _may_be_fused(ctx) and _is_fit(ctx, fused.unfit(inner, x, weight, bias, y, full)):
        launch = fused.launch(inner, x, weight, bias, y, full)
        return Plan(y, full, [], told(FUSED, M=m, N=n, by=NAME), launch)
    return plan(ctx, m, n, y, full, M=m, N=n)


def gather(
    ctx: "Context",
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    results: Sequence[torch.Tensor],
    m: int,
    full: int,
) -> Plan:
    """For calls of ag_gemm; on GPUs the gather and the first product in one kernel where that is possible on this rank."""
    k, x = x.shape[1], x.contiguous()
    if ctx.exchange is not None and _may_be_fused(ctx) and (ctx.schedule == FUSED or fused.gains(m, weights[0])):
        whole, parts = ctx.scratch[: m * k].view(m, k), _pieces(ctx, m, k, full)
        operands = weights[0], biases[0], results[0]
        unfit = fused.gather_unfit(ctx.exchange, whole, *operands)
        if x.data_ptr() % again.ALIGNED:
            unfit = f"x does not lie at a multiple of {again.ALIGNED} bytes"
        elif len(parts) > 1:
            unfit = f"x, {m * k} elements of all ranks, goes in {len(parts)} pieces"
        if _is_fit(ctx, unfit):
            launch = fused.gather_launch(ctx.exchange, x, ctx.scratch, m, *operands, parts[0][1])
            return Plan(whole, full, [], told(FUSED, M=m, K=k, by=NAME), launch)
    return plan(ctx, m, k, x, full, M=m, K=k)


def _may_be_fused(ctx: "Context") -> bool:
    assert ctx.exchange is not None
    return ctx.schedule != TORCH and (ctx.schedule == FUSED or fused.is_usual(ctx.exchange))


def _is_fit(ctx: "Context", unfit: str | None) -> bool:
    """Whether nothing is in the way; ValueError if something is where no other way is allowed."""
    if unfit and ctx.schedule == FUSED:
        raise ValueError(f"{ctx.op}: this context has schedule={FUSED!r}, and {unfit}; make one with schedule={NAME!r} or 'auto'")
    return not unfit


def _pieces(ctx: "Context", m: int, columns: int, full: int) -> list[tuple[int, exchange.Parts]]:
    """What each launch of an exchange takes of ``m`` rows in all, ``full`` a chunk, and where that begins."""
    assert ctx.exchange is not None
    width = full * columns
    return list(exchange.pieces(ctx.exchange.kind, m * columns, width, width, "words", ctx.dtype.itemsize, ctx.size))


def plan(ctx: "Context", m: int, columns: int, part: torch.Tensor, full: int, **sizes: int) -> Plan:
    """For calls of ``sizes`` whose exchange is of ``m`` rows in all, ``full`` a chunk; ``part``: the tensor of this rank's rows."""
    scratch = ctx.scratch[: m * columns].view(m, columns)
    call = ctx.telling(NAME, None, **sizes)
    if ctx.size == 1:
        return Plan(scratch, full, [], call)
    assert ctx.exchange is not None
    x, y = (scratch, part) if ctx.exchange.kind.scatter else (part, scratch)
    x, y, pieces = x.view(-1), y.view(-1), _pieces(ctx, m, columns, full)
    launches = [(start, exchange.launch_for(ctx.exchange, "words", x[start:], y[start:], parts, "sum")) for start, parts in pieces]
    return Plan(scratch, full, launches, call)


def _exchange(plan: Plan, x: torch.Tensor, y: torch.Tensor) -> None:
    for start, launch in plan.launches:
        launch((x.view(-1)[start:], y.view(-1)[start:]) if start else (x, y))


def gemm_rs(
    ctx: "Context", plan: Plan, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor
) -> None:
    """A call of `ops.gemm_rs`."""
    with ctx.begin(plan.call):
        if plan.fused is not None:
            plan.fused((x, weight, y) if bias is None else (x, weight, y, bias))
            return
        if ctx.size == 1:
            ctx.multiply(x, weight, y, bias)
            return
        ctx.multiply(x, weight, plan.scratch)
        if bias is not None:
            start = ctx.rank * plan.full
            ctx.multiply(x[start : start + len(y)], weight, plan.scratch[start : start + len(y)], bias)
        _exchange(plan, plan.scratch, y)


def ag_gemm(
    ctx: "Context",
    plan: Plan,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: list[torch.Tensor | None],
    results: list[torch.Tensor],
    gathered: torch.Tensor | None,
) -> None:
    """A call of `ops.ag_gemm`."""
    whole = plan.scratch
    with ctx.begin(plan.call):
        x = x.contiguous()
        if plan.fused is not None:
            plan.fused((x, weights[0], results[0]) if biases[0] is None else (x, weights[0], results[0], biases[0]))
            weights, biases, results = weights[1:], biases[1:], results[1:]
        elif ctx.size == 1:
            whole = x
        else:
            _exchange(plan, x, whole)
        for w, bias, z in zip(weights, biases, results, strict=True):
            ctx.multiply(whole, w, z, bias)
        if gathered is not None:
            racecheck.host_read(whole)
            gathered.copy_(whole)

"""GEMM + AllReduce: y = all_reduce(x · weightᵀ), on all ranks; for tensor-parallel layers without sequence parallelism.

Meant for few rows, as in decoding. Two ways, which meet on the wire, so that each rank takes the one that it can:

    torch    one product by torch (cuBLAS), then one kernel of `ops.all_reduce` out of this context's memory into the result.
             Nothing is overlapped; `ops.sequential` says why.
    fused    both in one kernel, for few rows that go by one_shot or two_shot (`kernels.fused`).
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

from ..kernels.tiles import cdiv
from ..runtime import racecheck
from . import again, all_reduce, fused, tiling, validate
from .context import check_arguments, kept
from .dispatcher import by_op
from .exchange import ExchangeContext, Kind
from .group import Prepared, Told, resolve, told
from .refusals import Refusing, check_context

KIND = Kind("gemm_ar", scatter=True, gather=True)
PRODUCTS = ("auto", "torch", "fused")


class GemmARContext(ExchangeContext):
    """Memory for calls up to ``max_m`` rows and ``n`` columns; any K."""

    watched = (*ExchangeContext.watched, "partial")
    shown = ("max_m", "n", "dtype", "algo", "product")

    def __init__(
        self, max_m: int, n: int, dtype: torch.dtype, group: dist.ProcessGroup | None, algo: str = "auto", product: str = "auto"
    ) -> None:
        control = resolve(group)
        error = check_arguments("gemm_ar", {"max_m": max_m, "n": n}, dtype, "auto") or all_reduce.check_algorithm("gemm_ar", algo)
        error = error or _check_product(product, algo, dtype, max_m)
        with control.lock:
            control.agree("create_gemm_ar_context", (max_m, n, str(dtype), algo, product), error)
            self.max_m, self.n, self.dtype, self.product = max_m, n, dtype, product
            self.algo = "one_shot" if product == "fused" and algo == "auto" else algo
            super().__init__(KIND, control, *all_reduce.room(max_m * n, dtype, control.size, self.algo))
        self.maker = "fluxlike.create_gemm_ar_context"

    def take(self) -> None:
        super().take()
        #: The partial sums of this rank.
        self.partial = self.lasting(self.max_m * self.n, dtype=self.dtype)


def create_gemm_ar_context(
    max_m: int,
    n: int,
    dtype: torch.dtype = torch.bfloat16,
    group: dist.ProcessGroup | None = None,
    algo: str = "auto",
    product: str = "auto",
) -> GemmARContext:
    """Memory and signals for `gemm_ar`. Collective over ``group``: every rank passes the same arguments.

    Args:
        max_m: most rows of x in a call. n: most columns of the result. dtype: torch.bfloat16, torch.float16 or torch.float32, of x,
            weight and the result. group: the tensor-parallel group; the one given to init if None.
        algo: how the partial sums are exchanged, one of `all_reduce`'s "one_shot", "two_shot", "bulk", or "auto".
        product: "torch", one product by torch and then the exchange; "fused", both in one kernel of ours, up to 64 rows of bfloat16
            or float16, with algo "one_shot" (or "auto", which it then is) or "two_shot"; or "auto", fused on GPUs where that is
            expected to be faster. A fused call needs M · N, by two_shot M / R · N, to be a multiple of 1024, N, K / R and the
            strides of x and weight to be ones of 16, a row-major weight, and addresses that are multiples of 16 bytes; and of more
            than 32 rows, N above 32 for each multiprocessor. Else "auto" goes by torch.

    Raises:
        ValueError, on all ranks: bad arguments, or, as a CallMismatch, not those of another rank. RuntimeError: no init, or the
            heap is full.
    """
    return GemmARContext(tiling.number(max_m), tiling.number(n), dtype, group, algo, product)


def gemm_ar(
    x: torch.Tensor,
    weight: torch.Tensor,
    ctx: GemmARContext | None = None,
    *,
    bias: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Σ_ranks x · weightᵀ (+ bias), on all ranks.

    Args:
        x: [M, K / R], rows contiguous (stride 1 along K). weight: [N, K / R], row-major or the transposed view of a row-major
            [K / R, N]. Same dtype as the context. K / R may differ from rank to rank.
        ctx: a context of `create_gemm_ar_context`; None keeps one for each (group, dtype) that grows collectively.
        bias: [N], the same on all ranks, added once. group: the tensor-parallel group when ctx is None. out: [M, N], row-major, to
            write into.

    Returns:
        [M, N], the same bits on all ranks and on every repeat; a new tensor unless ``out`` is given.

    Numerics: products accumulate in fp32, as torch's settings have it (``torch.backends.cuda.matmul``); each rank's is rounded to
    the dtype, that of the first rank behind the bias; their sum is made in fp32 in the order of the ranks and rounded once.

    Gradients and torch.compile: as for `gemm_rs`, by ``torch.ops.fluxlike.gemm_ar``, which takes neither ``ctx`` nor ``out``. Every
    rank is to go on with the same y, so dy is the same on all ranks and the backward needs no exchange: dx = dy · weight,
    dweight = dyᵀ · x, dbias = the column sums of dy.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit; ranks that make different calls or disagree on M or N,
            as a CallMismatch.
        RuntimeError: no init, closed context.
        PeerTimeout: a wait of an earlier call ran out (CPU heap: of this call).
    """
    if by_op(ctx, out, x, weight, bias):
        from . import library

        return library.gemm_ar(x, weight, bias, group, ctx, out)
    return call(x, weight, ctx, bias, group, out)


def call(
    x: torch.Tensor,
    weight: torch.Tensor,
    ctx: GemmARContext | None = None,
    bias: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`gemm_ar`, which autograd does not see."""
    if ctx is not None and type(ctx) is not GemmARContext:
        check_context("gemm_ar", ctx, GemmARContext, group)
    control = resolve(group) if ctx is None else ctx.control
    seen = again.signature((x, weight, bias, out))
    with Refusing("gemm_ar", control), control.lock:
        found = again.find(GemmARContext, GemmARContext, ctx, group, control, seen, x, () if out is None else (out,))
        if found is not None:
            made, known, (y,) = found
            _make(made, known.plan, x, weight, bias, y)
            return y
        validate.operands("gemm_ar", x, weight, bias)
        m, n = x.shape[0], weight.shape[0]
        if ctx is None:
            ctx = kept("gemm_ar", GemmARContext, control, x.dtype, {"max_m": m, "n": n}, group)
        validate.call("gemm_ar", ctx, group, x, {"M": (m, ctx.max_m, "max_m"), "N": (n, ctx.n, "n")})
        y = validate.output("gemm_ar", out, (m, n), x, weight, bias)
        if m == 0 or n == 0:
            ctx.record(M=m, N=n)
            return y
        plan = _plan(ctx, x, weight, bias, y)
        _make(ctx, plan, x, weight, bias, y)
        again.remember(ctx, seen, (x, weight, bias, out), (0, plan), [y])
        return y


def _check_product(product: str, algo: str, dtype: torch.dtype, max_m: int) -> ValueError | None:
    """The error of a context that cannot be."""
    if product not in PRODUCTS:
        return ValueError(f"gemm_ar: product={product!r} is not one of {', '.join(map(repr, PRODUCTS))}")
    if product != "fused":
        return None
    if algo == "bulk":
        return ValueError(f"gemm_ar: product='fused' has algo='one_shot' or 'two_shot', not {algo!r}; name one, or product='torch'")
    misfit = fused.misfit(dtype, max_m)
    return ValueError(f"gemm_ar: product='fused' {misfit}; leave it 'auto'") if misfit else None


class _Plan(NamedTuple):
    """How calls of one kind are made."""

    call: Told
    #: Where the product of this rank goes, and the launches that add those of all, each with its first element.
    partial: torch.Tensor | None
    launches: list[tuple[int, Prepared]]
    #: Of a fused call, its only launch, in place of all of them.
    fused: Prepared | None = None


def _plan(ctx: GemmARContext, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor) -> _Plan:
    m, n = y.shape
    algo = all_reduce.choose(y.nbytes, ctx.size) if ctx.algo == "auto" else ctx.algo
    full = m if algo == "one_shot" else cdiv(m, ctx.size)
    unfit = fused.unfit(ctx, x, weight, bias, y, full) if ctx.size > 1 and algo != "bulk" else "it goes otherwise"
    if y.nbytes > all_reduce.most_bytes(ctx.size, algo):
        unfit = unfit or "it goes in pieces"
    if ctx.product == "fused" and unfit and ctx.size > 1:
        raise ValueError(f"gemm_ar: this context has product='fused', and {unfit}; make one with product='auto' or 'torch'")
    if not unfit and (ctx.product == "fused" or (ctx.product == "auto" and fused.is_usual(ctx))):
        launch = fused.launch(ctx, x, weight, None if ctx.rank else bias, y, full)
        return _Plan(told(f"{algo}/fused", M=m, N=n), None, [], launch)
    call = told(f"{algo}/torch", M=m, N=n)
    if ctx.size == 1:
        return _Plan(call, None, [])
    partial, launches, most = ctx.partial[: m * n].view(m, n), [], all_reduce.most_bytes(ctx.size, algo) // ctx.dtype.itemsize
    for start in range(0, m * n, most):
        piece = partial.view(-1)[start : start + most], y.view(-1)[start : start + most]
        row = all_reduce.blocks_of([len(piece[0])], algo, ctx.dtype, ctx.size)
        launches.append((start, all_reduce.planned(ctx, [piece], algo, "sum", row).launch))
    return _Plan(call, partial, launches)


def _make(
    ctx: GemmARContext, plan: _Plan, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor
) -> None:
    with ctx.begin(plan.call):
        if plan.fused is not None:
            plan.fused((x, weight, y) if bias is None or ctx.rank else (x, weight, y, bias))
            return
        partial = y if plan.partial is None else plan.partial
        if x.shape[1] == 0:
            racecheck.host_write(partial)
            partial.copy_(torch.zeros_like(partial) if bias is None or ctx.rank else bias.expand_as(partial))
        else:
            ctx.multiply(x, weight, partial, None if ctx.rank else bias)
        for start, launch in plan.launches:
            launch((partial.view(-1)[start:], y.view(-1)[start:]) if start else (partial, y))

"""GEMM + AllReduce: y = all_reduce(x · weightᵀ), on all ranks; for tensor-parallel layers without sequence parallelism.

Meant for few rows, as in decoding. Two ways, which meet on the wire, so that each rank takes the one that it can:

    torch    one product by torch (cuBLAS), then one kernel of `ops.all_reduce` out of this context's memory into the result.
             Nothing is overlapped; `ops.sequential` says why.
    fused    both in one kernel, for up to `ROWS` rows that go by one_shot (`kernels.gemm_ar`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..kernels.gemm_ar import gemm_ar_fused_kernel
from ..kernels.tiles import cdiv
from ..runtime import racecheck
from . import again, all_reduce, exchange, tiling, validate
from .context import check_arguments
from .exchange import ExchangeContext, Kind
from .group import Prepared, Told, resolve, told, wants_gradient
from .keeping import alike, kept
from .refusals import Refusing, check_context

KIND = Kind("gemm_ar", scatter=True, gather=True)
PRODUCTS = ("auto", "torch", "fused")
#: Rows up to which a call may be fused, and elements of which its sizes and strides must be multiples.
ROWS, WHOLE = 64, 16
#: Bytes of shared memory that programs of the fused kernel may take of a multiprocessor; on GPUs that are not named, `SMALL`.
SHARED, SMALL = {(8, 0): 160 << 10, (9, 0): 200 << 10, (10, 0): 200 << 10, (10, 3): 200 << 10}, 96 << 10


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
            self.algo = "one_shot" if product == "fused" else algo
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
            or float16, with algo "one_shot" (or "auto", which it then is); or "auto", fused on GPUs where that is expected to be
            faster. A fused call needs M · N to be a multiple of 1024, N, K / R and the strides of x and weight to be ones of
            16, a row-major weight, and addresses that are multiples of 16 bytes; else "auto" goes by torch.

    Raises:
        ValueError: bad or disagreeing arguments, on all ranks together. RuntimeError: no init, or the heap is full.
    """
    return GemmARContext(max_m, n, dtype, group, algo, product)


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
    if torch.compiler.is_compiling() or wants_gradient(x, weight, bias):
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
            key, sizes = (GemmARContext, control.name, x.dtype), {"max_m": max(m, 1), "n": max(n, 1)}

            def make(wanted: dict[str, int]) -> GemmARContext:
                alike("gemm_ar", control, sizes)
                return GemmARContext(wanted["max_m"], wanted["n"], x.dtype, group)

            ctx = kept(key, control, sizes, make, tiling.MAX_SIZE)
        validate.call("gemm_ar", ctx, group, x, {"M": (m, ctx.max_m, "max_m"), "N": (n, ctx.n, "n")})
        y = validate.output("gemm_ar", out, (m, n), x, weight, bias)
        if m == 0 or n == 0:
            ctx.record(M=m, N=n)
            return y
        plan = _plan(ctx, x, weight, bias, y)
        _make(ctx, plan, x, weight, bias, y)
        again.remember(ctx, seen, (x, weight, bias, out), (0, plan), [y])
        return y


class Tile(NamedTuple):
    """Of a fused call: rows that a program has room for, its columns, the depth of a step, and how it is compiled."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int


def tile_of(capability: tuple[int, int], m: int, n: int, programs: int) -> Tile | None:
    """The tile for M rows and N columns on a GPU with so many multiprocessors; None where the kernel is not for such a call.

    Wide tiles read x less often, and narrow ones are at least half as many as there are multiprocessors; with more rows than
    columns, x would come from the L2 cache for longer than W from memory (docs/measured/2026-11-27-gemm_ar-fused.md). More than
    two programs on a multiprocessor would not all run at once, which `kernels.gemm_ar` relies on.
    """
    rows = max(16, 1 << (m - 1).bit_length())
    columns = 64 if 2 * cdiv(n, 64) > programs else 32
    tiles = cdiv(n, columns)
    if rows > columns or tiles > exchange.MOST:
        return None
    if capability == tiling.CPU:  # where all programs are alive together
        return Tile(rows, columns, 64, 1, 1)
    if tiles > exchange.OVER * programs:
        return None
    depth, over = 128, 1 if tiles <= programs else exchange.OVER
    stages = SHARED.get(capability, SMALL) // (2 * (rows + columns) * depth * over)
    return Tile(rows, columns, depth, 4, min(stages, 8)) if stages > 1 else None


def _check_product(product: str, algo: str, dtype: torch.dtype, max_m: int) -> ValueError | None:
    """The error of a context that cannot be."""
    if product not in PRODUCTS:
        return ValueError(f"gemm_ar: product={product!r} is not one of {', '.join(map(repr, PRODUCTS))}")
    if product != "fused":
        return None
    if algo not in ("auto", "one_shot"):
        return ValueError(f"gemm_ar: product='fused' has algo='one_shot', not {algo!r}; name that, or product='torch'")
    if dtype == torch.float32 or max_m > ROWS:
        wrong = "torch.float32" if dtype == torch.float32 else f"max_m={max_m}"
        return ValueError(f"gemm_ar: product='fused' is for 16 bits, and max_m up to {ROWS}, not for {wrong}; leave it 'auto'")
    return None


def _unfit(
    ctx: GemmARContext, algo: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor
) -> str | None:
    """Why a call cannot be fused."""
    (m, k), n = x.shape, len(weight)
    if ctx.dtype == torch.float32 or algo != "one_shot":
        return f"the call is of {ctx.dtype} by {algo}"
    executor = ctx.world.executor
    if tile_of(executor.capability, m, n, executor.programs) is None:
        return f"M={m}, N={n} are too many for it"
    if m * n % (2 * exchange.WORDS):  # one_shot sends whole blocks, and waits for them
        return f"M · N = {m * n} is no multiple of {2 * exchange.WORDS}"
    if k == 0 or n % WHOLE or k % WHOLE:
        return f"N={n} and K={k} of this rank are no multiples of {WHOLE}"
    if weight.stride(1) != 1 or weight.stride(0) % WHOLE or (m > 1 and x.stride(0) % WHOLE):
        return f"strides {weight.stride()} of weight and {x.stride()} of x are not 1 and a multiple of {WHOLE}"
    if any(t.data_ptr() % again.ALIGNED or t.is_neg() for t in (x, weight, y, bias) if t is not None):
        return f"an operand is a view that negates, or does not lie at a multiple of {again.ALIGNED} bytes"
    return None


def _fused(
    ctx: GemmARContext, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor
) -> Prepared:
    """The launch of a fused call, planned at most once."""
    (m, k), n, executor = x.shape, len(weight), ctx.world.executor
    tile = tile_of(executor.capability, m, n, executor.programs)
    assert tile is not None
    biased = bias is not None and ctx.rank == 0
    constants = dict(R=ctx.size, S=1 << (ctx.size - 1).bit_length(), BM=tile.bm, BN=tile.bn, BK=tile.bk, BIAS=biased)
    constants |= dict(B=min(exchange.WORDS, tile.bm * tile.bn // 2), WORDS=exchange.WORDS, MOST=exchange.MOST)
    stride = x.stride(0) if m > 1 else k  # that of a single row says nothing
    args: tuple = (x, weight, y, bias if biased else ctx.ctl, ctx.epochs, ctx.ctl)
    args += (m, n, k, stride, weight.stride(0), ctx.words, ctx.offsets["slots"], ctx.rank)
    varying: Sequence[int] = (0, 1, 2, 3) if biased else (0, 1, 2)
    key = "fused", m, n, k, stride, weight.stride(0), biased

    def make() -> Prepared:
        return ctx.prepare(gemm_ar_fused_kernel, cdiv(n, tile.bn), args, constants, tile, tuple(varying))

    made: Prepared = ctx.plan(key, make)[1]
    return made


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
    unfit = "the group has one rank" if ctx.size == 1 else _unfit(ctx, algo, x, weight, bias, y)
    if ctx.product == "fused" and unfit and ctx.size > 1:
        raise ValueError(f"gemm_ar: this context has product='fused', and {unfit}; make one with product='auto' or 'torch'")
    if not unfit and (ctx.product == "fused" or (ctx.product == "auto" and ctx.world.executor.capability != tiling.CPU)):
        return _Plan(told(f"{algo}/fused", M=m, N=n), None, [], _fused(ctx, x, weight, bias, y))
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
    ctx.begin(plan.call)
    with ctx.begun():
        if plan.fused is not None:
            plan.fused((x, weight, y, bias) if bias is not None and ctx.rank == 0 else (x, weight, y))
            return
        partial = y if plan.partial is None else plan.partial
        if x.shape[1] == 0:
            racecheck.host_write(partial)
            partial.copy_(torch.zeros_like(partial) if bias is None or ctx.rank else bias.expand_as(partial))
        else:
            ctx.multiply(x, weight, partial, None if ctx.rank else bias)
        for start, launch in plan.launches:
            launch((partial.view(-1)[start:], y.view(-1)[start:]) if start else (partial, y))

"""GEMM + ReduceScatter: y = reduce_scatter(x · weightᵀ) with the communication hidden under the product.

Read with `kernels/gemm_rs.py`, which holds the protocol.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from triton.tools.tensor_descriptor import TensorDescriptor

from ..kernels.gemm_rs import gemm_rs_kernel
from ..kernels.gemm_rs_stream_k import gemm_rs_stream_k_kernel
from ..kernels.tiles import cdiv, chunk_rows, rows_of
from ..runtime.control import ControlGroup
from . import again, decomposed, nodes, sequential, tiling, tuning, validate, waves
from .context import Context, check_arguments, kept
from .dispatcher import by_op
from .group import Prepared, Told, resolve
from .nodes_context import NodesContext
from .refusals import Refusing, beside_capture, check_context


class GemmRSContext(Context):
    """Slots for the partial sums of calls up to ``max_m`` rows and ``n`` columns; any K."""

    maker = "fluxlike.create_gemm_rs_context"
    watched = (*Context.watched, "local", "own")

    def __init__(
        self,
        max_m: int,
        n: int,
        dtype: torch.dtype,
        group: dist.ProcessGroup | ControlGroup | None,
        schedule: str = "auto",
        k: int | None = None,
        k_here: int = 0,
    ) -> None:
        control = resolve(group)
        error = check_arguments("gemm_rs", {"max_m": max_m, "n": n, "k": 1 if k is None else k}, dtype, schedule)
        with control.lock:
            control.agree("create_gemm_rs_context", (max_m, n, k, str(dtype), schedule), error)
            self.max_m, self.n = max_m, n
            # What K is like decides how calls are made, which the ranks must do alike; a call's own K may differ between them.
            self.k = k if k is not None else sum(control.gather(k_here, "create_gemm_rs_context: K"))
            rows = tiling.round_up(chunk_rows(max_m, control.size), 128 * tiling.MAX_SUBS)
            # of stream_k, a chunk may begin and end inside a tile
            flags = (cdiv(rows, tiling.MIN_TILE) + 1) * cdiv(n, tiling.MIN_TILE)
            data, exchanged = rows * tiling.round_up(n, 16), chunk_rows(max_m, control.size) * n
            super().__init__("gemm_rs", control, dtype, schedule, flags, control.size * data, control.size * exchanged)

    def take(self) -> None:
        super().take()
        #: Of the copy engine: the partial sums that it takes to their owners.
        copies = self.schedule in ("auto", "copy_engine", decomposed.NAME) and self.size > 1
        self.local = self.lasting(self.set_elements if copies else 16, dtype=self.dtype)
        #: Of stream_k: this rank's partial sum of its own rows.
        own = self.set_elements // self.size if self.schedule == "stream_k" else 16
        self.own = self.lasting(own, dtype=torch.float32)


def create_gemm_rs_context(
    max_m: int,
    n: int,
    k: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    group: dist.ProcessGroup | None = None,
    schedule: str = "auto",
) -> GemmRSContext | NodesContext:
    """Memory and signals for `gemm_rs`. Collective over ``group``: every rank passes the same arguments.

    Args:
        max_m: most rows of x in a call. n: most columns of the result.
        k: what K of the whole problem is like, for a schedule that suits it; calls may have any K. None: as if K were large.
        dtype: torch.bfloat16, torch.float16 or torch.float32, of x, weight and the result.
        group: the tensor-parallel group; the one given to init if None.
        schedule: who carries the partial sums: "copy_engine" (the GPU's copy engines, beside the kernel), "in_kernel" (the
            kernel's own stores to the peer), or "auto": what was measured, else expected, to be faster (docs/tune.md).
            Two that leave the products to cuBLAS, from which auto chooses, too: "sequential", for few rows, and for float32: one
            product, then one exchange kernel, or both in one kernel up to 64 rows, as "sequential/torch" and "sequential/fused" do
            always (`ops.sequential`); "decomposed", not in float32: one product a chunk, each chunk by the copy engine
            (`ops.decomposed`). And one that auto does not choose: "stream_k", in-kernel, with the product cut into equal shares of
            k-steps (`kernels.gemm_rs_stream_k`).

    Raises:
        ValueError, on all ranks: bad arguments, or, as a CallMismatch, not those of another rank. RuntimeError: no init, or the
            heap is full.
    """
    max_m, n, k = map(tiling.number, (max_m, n, k))
    if resolve(group).spans:
        return NodesContext("gemm_rs", resolve(group), dtype, schedule, max_m=max_m, n=n, k=k)
    return tuning.context(lambda: GemmRSContext(max_m, n, dtype, group, schedule, k), (max_m, n, k), lambda ctx: _sample(ctx, k))


def _sample(ctx: GemmRSContext, k: int | None) -> Callable[[], torch.Tensor]:
    """A call as large as the context is made for, to be measured."""
    operand, depth = tuning.random(ctx.device, ctx.dtype), cdiv(k or 0, ctx.size)
    x, weight = operand(ctx.max_m, depth), operand(ctx.n, depth)
    return lambda: gemm_rs(x, weight, ctx)


def gemm_rs(
    x: torch.Tensor,
    weight: torch.Tensor,
    ctx: GemmRSContext | NodesContext | None = None,
    *,
    bias: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    out: torch.Tensor | None = None,
    k: int | None = None,
) -> torch.Tensor:
    """This rank's rows of Σ_ranks x · weightᵀ (+ bias), as ``reduce_scatter(x @ weight.T)`` would give them.

    Args:
        x: [M, K / R], rows contiguous (stride 1 along K). weight: [N, K / R], row-major or the transposed view of a row-major
            [K / R, N]. Same dtype as the context. K / R may differ from rank to rank.
        ctx: a context of `create_gemm_rs_context`; None keeps one for each (group, dtype) that grows collectively.
        bias: [N], added once. group: the tensor-parallel group when ctx is None. out: [rows, N], row-major, to write into.
        k: K, the columns of all ranks together, the same on all of them: for the schedule that suits it. None: the context's, which
            is that of the first call where ctx is None.

    Returns:
        [rows, N]: the rows of this rank as torch.chunk splits M; a new tensor unless ``out`` is given.

    Numerics: products and the sum over ranks in fp32, the sum in a fixed order (own rank, then r+1, r+2, …); partial sums of
    the other ranks travel in the dtype; one rounding of the sum. The same bits on every repeat. Where torch multiplies
    (``ctx.last_path`` has "/torch"), or one kernel multiplies and exchanges ("/fused"), see `ops.sequential` and
    `ops.decomposed`. In float32 "auto" mostly has torch
    multiply on GPUs, at IEEE precision unless torch's switches allow TF32.

    Gradients and torch.compile: where an input wants a gradient, or under the compiler, the call goes by the custom op
    ``torch.ops.fluxlike.gemm_rs`` (see `ops.library`), which takes neither ``ctx`` nor ``out``. The backward is an ag_gemm on the
    same group, so all ranks must go backward, too. A second derivative is a RuntimeError where it is asked for. Other calls do not
    pay for it: they do not go through torch's dispatcher, unless one of its modes looks on (make_fx, FlopCounterMode, fake tensors)
    or x is on the meta device.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit; ranks that make different calls or disagree on M or N,
            as a CallMismatch.
        RuntimeError: no init, closed context.
        PeerTimeout: a wait of an earlier call ran out (CPU heap: of this call).
    """
    if by_op(ctx, out, x, weight, bias):
        from . import library

        return library.gemm_rs(x, weight, bias, group, ctx, out, k)
    return call(x, weight, ctx, bias, group, out, k)


def call(
    x: torch.Tensor,
    weight: torch.Tensor,
    ctx: Any = None,
    bias: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    out: torch.Tensor | None = None,
    k: int | None = None,
) -> torch.Tensor:
    """`gemm_rs`, which autograd does not see."""
    if ctx is not None and type(ctx) is not GemmRSContext:
        check_context("gemm_rs", ctx, (GemmRSContext, NodesContext), group)
    control = resolve(group) if ctx is None else ctx.control
    k = tiling.number(k)
    seen = again.signature((x, weight, bias, out), k)
    with Refusing("gemm_rs", control), control.lock:
        kind, by = (NodesContext, "gemm_rs") if control.spans else (GemmRSContext, GemmRSContext)
        found = again.find(kind, by, ctx, group, control, seen, x, () if out is None else (out,))
        if found is not None:
            made, known, (y,) = found
            if control.spans:
                nodes.make_gemm_rs(made, x, weight, bias, y, k)
            else:
                _make(made, known.number, known.plan, x, weight, bias, y)
            return y
        validate.operands("gemm_rs", x, weight, bias)
        validate.whole("gemm_rs", "k", k, x.shape[1])
        m, n = x.shape[0], weight.shape[0]
        if control.spans:
            return nodes.gemm_rs(control, ctx, x, weight, bias, group, out, k, seen)
        if ctx is None:
            ctx = kept("gemm_rs", GemmRSContext, control, x.dtype, {"max_m": m, "n": n}, group, k_here=x.shape[1])
        validate.call("gemm_rs", ctx, group, x, {"M": (m, ctx.max_m, "max_m"), "N": (n, ctx.n, "n")})
        full = chunk_rows(m, ctx.size)
        y = validate.output("gemm_rs", out, (rows_of(m, ctx.size, ctx.rank, full), n), x, weight, bias)
        planned = run(ctx, x, weight, bias, y, full, k)
        if planned is not None:
            again.remember(ctx, seen, (x, weight, bias, out), planned, [y])
        return y


def run(
    ctx: GemmRSContext,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    full: int,
    whole: int | None = None,
) -> tuple[int, Any] | None:
    """A call of checked operands, whose rows go to the ranks of ``ctx``: all, or of several nodes those of one.

    ``full``: rows of a full chunk; ``whole``: K of all ranks of the node, if the caller says it. Returns what
    `GroupContext.plan` has for calls with such operands, if there is anything.
    """
    m, n = x.shape[0], weight.shape[0]
    with ctx.control.lock:
        if m == 0 or n == 0:
            ctx.record(M=m, N=n)
            return None
        if x.shape[1] == 0:  # this rank adds nothing, but its peers wait for its partial sums
            x, weight = x.new_zeros(m, 16), weight.new_zeros(n, 16)
        kinds = full, whole, tiling.kind(x), tiling.kind(weight), tiling.kind(bias), tiling.kind(y)
        planned = ctx.plan(kinds, lambda: _plan(ctx, x, weight, bias, y, full, whole))
        _make(ctx, *planned, x, weight, bias, y)
        return planned


class _Plan(NamedTuple):
    """What a call does, for all calls with tensors of these kinds. ``launches`` and ``copies``: for each of the two slot sets."""

    tile: tiling.Tiling
    #: Whether x, and the weight, must be copied to where the kernel can read them.
    padded: tuple[bool, ...]
    launches: list[Prepared]
    copies: list[Callable[[], None]]
    call: Told


def _make(
    ctx: GemmRSContext,
    number: int,
    plan: "_Plan | sequential.Plan | decomposed.Scatter",
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
) -> None:
    """A call that is planned."""
    if isinstance(plan, sequential.Plan):
        sequential.gemm_rs(ctx, plan, x, weight, bias, y)
        return
    if isinstance(plan, decomposed.Scatter):
        decomposed.gemm_rs(ctx, number, plan, x, weight, bias, y)
        return
    if plan.copies:
        beside_capture(ctx.op, ctx.world.executor, ctx.engine)
    with ctx.start(plan.call) as slot:
        x, weight = tiling.padded((x, weight), plan.padded)
        tensors = x, tiling.stored(weight)[0], y if bias is None else bias, y, y
        if plan.copies:
            ctx.overlapped(lambda: plan.launches[slot](tensors), (number, slot), plan.copies[slot])
        else:
            plan.launches[slot](tensors)


def _plan(
    ctx: GemmRSContext,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    full: int,
    whole: int | None,
) -> _Plan | sequential.Plan | decomposed.Scatter:
    if ctx.schedule == "stream_k":
        return _plan_stream_k(ctx, x, weight, bias, y, full, whole)
    (m, k), n, ranks, rank = x.shape, weight.shape[0], ctx.size, ctx.rank
    rows = y.shape[0]
    chosen = ctx.choose(ctx.problem(m, n, ctx.k if whole is None else whole, full))
    transport, subs = chosen.transport, chosen.subs
    if transport == sequential.NAME:
        return sequential.scatter(ctx, x, weight, bias, y, full)
    if transport == decomposed.NAME:
        return decomposed.scatter(ctx, m, bias, y, full, _queue_copies)
    tile, padded = tiling.readable(chosen.tile, ctx.world.executor.capability, full, x, weight)
    x, weight = tiling.padded((x, weight), padded)
    ld = tiling.round_up(n, 16)
    unit_tiles_m = cdiv(cdiv(full, tile.bm), subs)
    pitch = unit_tiles_m * subs * tile.bm
    half = [tile.bm, tile.bn // 2]
    local: Any = ctx.local
    result: Any = y
    if tile.tma and transport == "copy_engine":
        local = TensorDescriptor(ctx.local, [ranks * pitch, ld], [ld, 1], [tile.bm, tile.bn])
    tma_out = tile.tma and tiling.is_tma_aligned(y)
    if tma_out:
        result = tiling.descriptor(y, half)
    stored, kn = tiling.stored(weight)
    unit_tiles = unit_tiles_m * cdiv(n, tile.bn)
    programs = ctx.programs(unit_tiles * subs * ranks)
    remote, own = unit_tiles * subs * (ranks - 1), unit_tiles * subs if rows else 0
    shared, _ = waves.scatter(waves.of_context(ctx), tile, transport, remote, own, unit_tiles_m * subs, k)
    args = (
        *tiling.operands(tile, x, weight), y if bias is None else bias, result, y, local, ctx.data, ctx.ready, ctx.work, ctx.parts,
        ctx.full, ctx.flags, ctx.ctl,
        m, n, k, tiling.pitch(x), tiling.pitch(stored), ld, ctx.set_elements, ctx.max_flags,
        full, rows, pitch, shared.cut, shared.lanes, rank,
    )  # fmt: skip
    constants = dict(
        R=ranks, S=subs, BM=tile.bm, BN=tile.bn, BK=tile.bk, GROUP_M=tile.group_m, COPY_ENGINE=transport == "copy_engine",
        TMA=tile.tma, TMA_OUT=tma_out, VEC=tiling.is_vectorised(n, k, x, weight), W_IS_KN=kn,
        BIAS=bias is not None, SHARED=shared.cut > 0, TRACE=ctx.trace is not None, maxnreg=tiling.registers(tile.warps),
    )  # fmt: skip
    launches = [ctx.prepare(gemm_rs_kernel, programs, (*args, slot), constants, tile, (0, 1, 2, 3, 4)) for slot in (0, 1)]
    copies: list[Callable[[], None]] = []
    if transport == "copy_engine" and ranks > 1:
        unit_rows = unit_tiles_m * tile.bm
        copies = [partial(_queue_copies, ctx, m, full, pitch, ld, subs, unit_rows, unit_tiles, slot) for slot in (0, 1)]
    return _Plan(tile, padded, launches, copies, _told(ctx, transport, tile, m, n, whole))


def _told(ctx: GemmRSContext, transport: str, tile: tiling.Tiling, m: int, n: int, whole: int | None) -> Told:
    """Ranks that say different K may cut their chunks differently."""
    return ctx.telling(transport, tile, M=m, N=n, **({} if whole is None else {"K": whole}))


def _plan_stream_k(
    ctx: GemmRSContext, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor, full: int,
    whole: int | None,
) -> _Plan:  # fmt: skip
    (m, k), n, ranks = x.shape, weight.shape[0], ctx.size
    capability = ctx.tuned.capability
    tile = tiling.choose_stream_k(capability, x.dtype, m, n)
    tile, padded = tiling.readable(tile, capability, m, x, weight)
    x, weight = tiling.padded((x, weight), padded)
    stored, kn = tiling.stored(weight)
    args = (
        *tiling.operands(tile, x, weight), y if bias is None else bias, y, ctx.own, ctx.work, ctx.parts, ctx.data,
        ctx.flags, ctx.ctl,
        m, n, k, tiling.pitch(x), tiling.pitch(stored), tiling.round_up(n, 16), ctx.set_elements, ctx.max_flags,
        full, y.shape[0], full, ctx.rank,
    )  # fmt: skip
    constants = dict(
        R=ranks, BM=tile.bm, BN=tile.bn, BK=tile.bk, GROUP_M=tile.group_m, SUM_ROWS=tiling.SUM_ROWS,
        TMA=tile.tma, VEC=tiling.is_vectorised(n, k, x, weight), W_IS_KN=kn, BIAS=bias is not None,
        maxnreg=tiling.registers(tile.warps),
    )  # fmt: skip
    validate.countable_steps("gemm_rs", m, n, k, tile)
    programs = ctx.programs(cdiv(m, tile.bm) * cdiv(n, tile.bn) * cdiv(k, tile.bk))
    prepared = ctx.prepare(gemm_rs_stream_k_kernel, programs, args, constants, tile, (0, 1, 2, 3))

    def launch(tensors: Sequence[torch.Tensor]) -> None:
        prepared(tensors[:4])  # the other kernel has the result twice

    return _Plan(tile, padded, [launch, launch], [], _told(ctx, "stream_k", tile, m, n, whole))


def _queue_copies(
    ctx: GemmRSContext, m: int, full: int, pitch: int, ld: int, subs: int, unit_rows: int, unit_tiles: int, slot: int
) -> None:
    """A unit at a time, in the order in which the kernel computes them: wait for its tiles, copy, signal its owner."""
    itemsize = ctx.dtype.itemsize
    for unit in range((ctx.size - 1) * subs):
        owner, sub = (ctx.rank + 1 + unit // subs) % ctx.size, unit % subs
        counter = ctx.ready.data_ptr() + 4 * unit
        ctx.engine.wait(counter, unit_tiles)
        ctx.engine.write(counter, 0)
        rows = min(unit_rows, rows_of(m, ctx.size, owner, full) - sub * unit_rows)
        if rows > 0:
            ctx.copy(
                ctx.peer_data(owner, slot * ctx.set_elements + (ctx.rank * pitch + sub * unit_rows) * ld), ld * itemsize,
                ctx.local.data_ptr() + (owner * pitch + sub * unit_rows) * ld * itemsize, ld * itemsize,
                ld * itemsize, rows, ctx.peer_full(owner, slot, sub),
            )  # fmt: skip

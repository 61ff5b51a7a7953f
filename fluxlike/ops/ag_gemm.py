"""AllGather + GEMM: z = all_gather(x_shard) · weightᵀ with the communication hidden under the product.

Read with `kernels/ag_gemm.py`, which holds the protocol.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from triton.tools.tensor_descriptor import TensorDescriptor

from ..kernels.ag_gemm import ag_collect_kernel, ag_gemm_kernel
from ..kernels.tiles import cdiv, chunk_rows, rows_of
from ..runtime.control import ControlGroup
from ..runtime.errors import CallMismatch
from . import ag_gemm_stream_k, again, choice, decomposed, fused, keeping, nodes, sequential, tiling, tuning, validate, waves
from .context import Context, check_arguments, kept
from .dispatcher import by_op
from .group import Prepared, Told, resolve
from .nodes_context import NodesContext
from .refusals import Refusing, beside_capture, check_context

#: A gather beside another launch goes by the copy engine if a shard has so many bytes.
BESIDE_FROM = 4 << 20


class AGGemmContext(Context):
    """Slots for the gathered input of calls up to ``max_m`` rows and ``k`` columns."""

    maker = "fluxlike.create_ag_gemm_context"
    watched = (*Context.watched, "pushed")

    def __init__(
        self,
        max_m: int,
        k: int,
        dtype: torch.dtype,
        group: dist.ProcessGroup | ControlGroup | None,
        schedule: str = "auto",
        n: int | None = None,
        n_here: int = 0,
    ) -> None:
        control = resolve(group)
        error = check_arguments("ag_gemm", {"max_m": max_m, "n": 1 if n is None else n, "k": k}, dtype, schedule)
        with control.lock:
            control.agree("create_ag_gemm_context", (max_m, n, k, str(dtype), schedule), error)
            self.max_m, self.k = max_m, k
            # What N is like decides how calls are made, which the ranks must do alike; a call's own N may differ.
            self.n = n if n is not None else sum(control.gather(n_here, "create_ag_gemm_context: N"))
            rows = chunk_rows(max_m, control.size)
            flags = cdiv(rows, tiling.MIN_TILE)
            data = control.size * rows * tiling.round_up(k, 16)
            super().__init__("ag_gemm", control, dtype, schedule, flags, data, control.size * rows * k)

    def between(self) -> int:
        """Also the rows that tiles read behind those that are there."""
        gathers = self.dtype != torch.float32 and self.schedule != sequential.TORCH and fused.has_wide(self.tuned.capability)
        found = super().between()
        return max(found, fused.rows_read(self.max_m) * self.k) if found and gathers else found

    def take(self) -> None:
        super().take()
        self.pushed = self.lasting(self.max_flags, dtype=torch.int32, make=torch.zeros)

    def operands(self, tile: tiling.Tiling, x: torch.Tensor, weight: torch.Tensor, full: int, ld: int) -> tuple[Any, ...]:
        """What kernels read: the shard and the gathered input, each by blocks and by elements, and the weight."""
        gathered: Any = self.data
        if tile.tma:
            shape, strides = [2, self.size * full, x.shape[1]], [self.set_elements, ld, 1]
            gathered = TensorDescriptor(self.data, shape, strides, [1, tile.bm, tile.bk])
        by_blocks, weight = tiling.operands(tile, x, weight)
        return by_blocks, x, gathered, self.data, weight


def create_ag_gemm_context(
    max_m: int,
    n: int,
    k: int,
    dtype: torch.dtype = torch.bfloat16,
    group: dist.ProcessGroup | None = None,
    schedule: str = "auto",
) -> AGGemmContext | NodesContext:
    """Memory and signals for `ag_gemm`. Collective over ``group``: every rank passes the same arguments.

    Args:
        max_m: most rows of the gathered input. n: what N of the whole problem is like, for a schedule that suits it; the weights
            of a call may have any N.
        k: most columns of the input. dtype: torch.bfloat16, torch.float16 or torch.float32, of input, weights and result.
        group: the tensor-parallel group; the one given to init if None.
        schedule: who carries the shards: "copy_engine", "in_kernel", or "auto": what was measured, else expected, to be faster
            (docs/tune.md). Two that leave the products to cuBLAS, from which auto chooses, too: "sequential", for few rows, and
            for float32: one exchange kernel, then the products, or both in one kernel up to 256 rows, as "sequential/torch" and
            "sequential/fused" do always (`ops.sequential`); "decomposed", not in float32: shards by the copy engine,
            products beside them (`ops.decomposed`). And one that auto does not choose: "stream_k", in-kernel, with the product cut
            into equal shares of k-steps (`kernels.ag_gemm_stream_k`).

    Raises:
        ValueError, on all ranks: bad arguments, or, as a CallMismatch, not those of another rank. RuntimeError: no init, or the
            heap is full.
    """
    max_m, n, k = map(tiling.number, (max_m, n, k))
    if resolve(group).spans:
        return NodesContext("ag_gemm", resolve(group), dtype, schedule, max_m=max_m, n=n, k=k)
    return tuning.context(lambda: AGGemmContext(max_m, k, dtype, group, schedule, n), (max_m, n, k), _sample)


def _sample(ctx: AGGemmContext) -> Callable[[], torch.Tensor]:
    """A call as large as the context is made for, to be measured."""
    operand = tuning.random(ctx.device, ctx.dtype)
    x, weight = operand(rows_of(ctx.max_m, ctx.size, ctx.rank), ctx.k), operand(cdiv(ctx.n, ctx.size), ctx.k)
    return lambda: ag_gemm(x, weight, ctx, m=ctx.max_m)  # type: ignore[no-any-return]


def ag_gemm(
    x_shard: torch.Tensor,
    weight: torch.Tensor | Sequence[torch.Tensor],
    ctx: AGGemmContext | NodesContext | None = None,
    *,
    bias: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    group: dist.ProcessGroup | None = None,
    return_gathered: bool = False,
    m: int | None = None,
    n: int | None = None,
    out: torch.Tensor | Sequence[torch.Tensor] | None = None,
) -> Any:
    """all_gather(x_shard) · weightᵀ (+ bias): every rank gets all M rows for its own columns.

    Args:
        x_shard: [rows of this rank, K], rows contiguous. weight: [N / R, K], row-major or the transposed view of a row-major
            [K, N / R]; or a list of such (one gather, one result each). N / R may differ from rank to rank.
        ctx: a context of `create_ag_gemm_context`; None keeps one for each (group, dtype) that grows collectively.
        bias: [N / R], or a list with one (or None) a weight. group: the tensor-parallel group when ctx is None.
        return_gathered: also return the gathered input [M, K].
        m: M, the rows of all ranks together. Needed when the ranks' shards differ: then they must be as torch.chunk splits M.
            Default: R × the rows of this shard.
        n: N, the columns of all ranks and weights together, the same on all ranks: for the schedule that suits it. None: the
            context's, which is that of the first call where ctx is None.
        out: [M, N / R], row-major, to write into; for a list of weights a list, one each.

    Returns:
        z [M, N / R], or a list of them for a list of weights; with ``return_gathered`` the pair (z, gathered). New tensors, but
        for those of ``out``.

    Numerics: fp32 accumulation, one rounding; the same bits on every repeat. Where torch multiplies (``ctx.last_path`` has
    "/torch"; where it has "/fused", by all weights but the first), it is as torch's settings have it: see `ops.sequential` and
    `ops.decomposed`. In float32 "auto" mostly has torch multiply on GPUs, at IEEE precision unless torch's switches allow TF32.

    Gradients and torch.compile: as `gemm_rs` says. The backward is a gemm_rs, with the shard gathered again beneath it if a
    weight wants a gradient; with ``return_gathered`` the gathered input is kept instead, and itself carries no gradient.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit; ranks that make different calls or disagree on M or K,
            as a CallMismatch.
        RuntimeError: no init, closed context.
        PeerTimeout: a wait of an earlier call ran out (CPU heap: of this call).
    """
    if by_op(ctx, out, x_shard, weight, bias):
        from . import library

        return library.ag_gemm(x_shard, weight, bias, group, m, ctx, return_gathered, n, out)
    return call(x_shard, weight, ctx, bias, group, return_gathered, m, n, out)


def call(
    x_shard: torch.Tensor,
    weight: torch.Tensor | Sequence[torch.Tensor],
    ctx: Any = None,
    bias: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    group: dist.ProcessGroup | None = None,
    return_gathered: bool = False,
    m: int | None = None,
    n: int | None = None,
    out: torch.Tensor | Sequence[torch.Tensor] | None = None,
) -> Any:
    """`ag_gemm`, which autograd does not see."""
    try:
        return _call(x_shard, weight, ctx, bias, group, return_gathered, m, n, out)
    except CallMismatch as error:
        if m is None:
            keeping.may_lack_m(error, "M")
        raise


def _call(
    x_shard: torch.Tensor,
    weight: torch.Tensor | Sequence[torch.Tensor],
    ctx: Any,
    bias: torch.Tensor | Sequence[torch.Tensor | None] | None,
    group: dist.ProcessGroup | None,
    return_gathered: bool,
    m: int | None,
    n: int | None,
    out: torch.Tensor | Sequence[torch.Tensor] | None,
) -> Any:
    if ctx is not None and type(ctx) is not AGGemmContext:
        check_context("ag_gemm", ctx, (AGGemmContext, NodesContext), group)
    control = resolve(group) if ctx is None else ctx.control
    m, n = tiling.number(m), tiling.number(n)
    with Refusing("ag_gemm", control), control.lock:
        weights, biases = validate.listed(weight, bias)
        outs = validate.listed_out(out, weight)
        seen = again.signature((x_shard, *weights, *biases, *outs), m, n, 2 * len(weights) + return_gathered)
        kind, by = (NodesContext, "ag_gemm") if control.spans else (AGGemmContext, AGGemmContext)
        found = again.find(kind, by, ctx, group, control, seen, x_shard, outs)
        if found is not None:
            made, known, results = found
            gathered = results.pop() if return_gathered else None
            if control.spans:
                nodes.make_ag_gemm(made, x_shard, weights, biases, results, gathered, n)
            else:
                _make(made, known.plan, x_shard, [x_shard, *weights], biases, results, gathered)
            return _returned(weight, results, gathered)
        weights, biases, m = validate.gathered_operands(x_shard, weight, bias, m, control)
        k, columns = x_shard.shape[1], sum(w.shape[0] for w in weights)
        validate.whole("ag_gemm", "n", n, columns)
        if control.spans:
            results = validate.outputs(outs, m, x_shard, weights, biases)
            gathered = x_shard.new_empty(m, k) if return_gathered else None
            nodes.ag_gemm(control, ctx, x_shard, weights, biases, group, results, gathered, n, outs, seen)
            return _returned(weight, results, gathered)
        if ctx is None:
            sizes = {"max_m": m, "k": k}
            here = columns or cdiv(k, control.size)  # a rank without columns may be one of which none has any
            ctx = kept("ag_gemm", AGGemmContext, control, x_shard.dtype, sizes, group, n_here=here)
        validate.call("ag_gemm", ctx, group, x_shard, {"M": (m, ctx.max_m, "max_m"), "K": (k, ctx.k, "k")})
        results = validate.outputs(outs, m, x_shard, weights, biases)
        gathered = x_shard.new_empty(m, k) if return_gathered else None
        if m and k:
            planned = _run(ctx, x_shard, weights, biases, results, gathered, chunk_rows(m, ctx.size), n)
            every = results if gathered is None else [*results, gathered]
            again.remember(ctx, seen, (x_shard, *weights, *biases, *outs), planned, every)
        else:
            empty(ctx, m, k, biases, results)
    return _returned(weight, results, gathered)


def _returned(weight: Any, results: list[torch.Tensor], gathered: torch.Tensor | None) -> Any:
    """What the caller gets, as ``weight`` and ``return_gathered`` ask for it."""
    result = results[0] if isinstance(weight, torch.Tensor) else results
    return result if gathered is None else (result, gathered)


def rows_of_a_node(
    ctx: AGGemmContext,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    results: list[torch.Tensor],
    gathered: torch.Tensor | None,
    full: int,
    whole: int | None = None,
) -> None:
    """A call, of checked operands, for the rows of one node of a group that spans several.

    ``full``: rows of a full chunk; ``whole``: N of all ranks of the node, if the caller says it.
    """
    m, k = results[0].shape[0], x.shape[1]
    with ctx.control.lock:
        if m and k:
            _run(ctx, x, weights, biases, results, gathered, full, whole)
        else:
            empty(ctx, m, k, biases, results)


def empty(ctx: AGGemmContext, m: int, k: int, biases: list[torch.Tensor | None], results: list[torch.Tensor]) -> None:
    """A call without rows, or with nothing to add up: the peers know of it, and the bias is all there is."""
    ctx.record(M=m, K=k)
    for z, b in zip(results, biases, strict=True):
        z.copy_(torch.zeros_like(z) if b is None else b.expand_as(z))


def gather_beside(
    launch: Callable[[], None], x_shard: torch.Tensor, *, group: dist.ProcessGroup | None = None, m: int | None = None
) -> torch.Tensor:
    """all_gather(x_shard) [M, K] while ``launch`` runs: a call on the same group that uses no kept context of ag_gemm.

    Shards from 4 MiB on go by copy engines, which start before ``launch`` and take no multiprocessor from it; smaller ones are
    pushed before it. Either way ``launch`` waits for none of this, and only the copy out of the heap comes after it.
    """
    control = resolve(group)
    nothing = x_shard.new_empty(0, x_shard.shape[1])
    if control.spans:  # what crosses the network takes no multiprocessor, but this rank must take part in it
        launch()
        return call(x_shard, nothing, group=group, return_gathered=True, m=m)[1]  # type: ignore[no-any-return]
    _, _, m = validate.gathered_operands(x_shard, nothing, None, m, control)
    k = x_shard.shape[1]
    with control.lock:
        sizes = {"max_m": m, "k": k}
        ctx = kept("ag_gemm", AGGemmContext, control, x_shard.dtype, sizes, group, n_here=cdiv(k, control.size))
        validate.call("ag_gemm", ctx, group, x_shard, {"M": (m, ctx.max_m, "max_m"), "K": (k, ctx.k, "k")})
        gathered = x_shard.new_empty(m, k)
        if m and k:
            _run(ctx, x_shard, [nothing], [None], [x_shard.new_empty(m, 0)], gathered, chunk_rows(m, ctx.size), None, launch)
        else:
            ctx.record(M=m, K=k)
            launch()
    return gathered


class _Plan(NamedTuple):
    """What a call does, for all calls with tensors of these kinds. In the inner lists one for each of the two slot sets."""

    tile: tiling.Tiling
    #: Whether the shard, and each weight, must be copied to where the kernel can read them.
    padded: tuple[bool, ...]
    #: For each weight.
    launches: list[list[Prepared]]
    #: Of the gathered input, out of the heap.
    collects: list[Prepared]
    copies: list[Callable[[torch.Tensor], None]]
    call: Told


def _run(
    ctx: AGGemmContext,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    results: list[torch.Tensor],
    gathered: torch.Tensor | None,
    full: int,
    whole: int | None,
    beside: Callable[[], None] | None = None,
) -> tuple[int, Any]:
    """``full``, ``whole``: see `rows_of_a_node`. ``beside``: what else is launched while the shards are on their way.

    Returns what `GroupContext.plan` has for calls with such tensors.
    """
    rows, k = x.shape
    # a rank without rows or without columns has no tile that reads them, but a descriptor must be of something
    shard = x if rows else x.new_zeros(1, k)
    operands: Sequence[torch.Tensor] = [shard, *[w if w.shape[0] else w.new_zeros(1, k) for w in weights]]
    kinds = full, whole, rows, gathered is None, beside is None, *[tiling.kind(t) for t in (*operands, *biases, *results)]
    planned = ctx.plan(kinds, lambda: _plan(ctx, rows, operands, biases, results, gathered, full, whole, beside is not None))
    _make(ctx, planned[1], x, operands, biases, results, gathered, beside)
    return planned


def _make(
    ctx: AGGemmContext,
    plan: _Plan | sequential.Plan | decomposed.Gather,
    x: torch.Tensor,
    operands: Sequence[torch.Tensor],
    biases: list[torch.Tensor | None],
    results: list[torch.Tensor],
    gathered: torch.Tensor | None,
    beside: Callable[[], None] | None = None,
) -> None:
    """A call that is planned. ``operands``: the shard ``x`` and the weights, with a row of zeros for what is empty."""
    if isinstance(plan, sequential.Plan):
        sequential.ag_gemm(ctx, plan, x, operands[1:], biases, results, gathered)
        return
    if isinstance(plan, decomposed.Gather):
        decomposed.ag_gemm(ctx, plan, x, operands[1:], biases, results, gathered)
        return
    if plan.copies:
        beside_capture(ctx.op, ctx.world.executor, ctx.engine)
    with ctx.start(plan.call) as slot:
        shard, *operands = tiling.padded(operands, plan.padded)

        def launch(i: int) -> None:
            z, bias = results[i], biases[i]
            plan.launches[i][slot]((shard, shard, tiling.stored(operands[i])[0], z if bias is None else bias, z, z))
            if beside is not None:
                beside()

        if plan.copies:
            # the first launch alone: what follows may have to compile, and the peers wait for this shard
            ctx.overlapped(lambda: launch(0), None, lambda: plan.copies[slot](shard))
        else:
            launch(0)
        for i in range(1, len(results)):
            launch(i)
        if gathered is not None:
            plan.collects[slot]((shard, gathered))


def _plan(
    ctx: AGGemmContext,
    rows: int,
    operands: Sequence[torch.Tensor],
    biases: list[torch.Tensor | None],
    results: list[torch.Tensor],
    gathered: torch.Tensor | None,
    full: int,
    whole: int | None,
    beside: bool,
) -> _Plan | sequential.Plan | decomposed.Gather:
    if ctx.schedule == "stream_k":
        return _plan_stream_k(ctx, rows, operands, biases, results, gathered, full, whole)
    m, k = results[0].shape[0], operands[0].shape[1]
    ld = tiling.round_up(k, 16)
    problem = ctx.problem(m, ctx.n if whole is None else whole, k, full)
    if beside:  # a push by the kernel has no product of its own to hide under
        large = full * ld * ctx.dtype.itemsize >= BESIDE_FROM
        chosen = choice.choose(problem, "copy_engine" if large else "in_kernel", {})
    else:
        chosen = ctx.choose(problem)
    transport, subs = chosen.transport, chosen.subs
    if transport == sequential.NAME:
        return sequential.gather(ctx, operands[0][:rows], operands[1:], biases, results, m, full)
    if transport == decomposed.NAME:
        return decomposed.gather(ctx, rows, m, k, full, _copies)
    tile = choice.for_columns(problem, chosen, max(z.shape[1] for z in results))
    tile, padded = tiling.readable(tile, problem.capability, full, *operands)
    shard, *weights = tiling.padded(operands, padded)
    launches = []
    for i, (w, bias, z) in enumerate(zip(weights, biases, results, strict=True)):
        last = i == len(weights) - 1 and gathered is None
        launches.append(_gemms(ctx, shard, w, bias, z, chosen, tile, rows, full, ld, i, last))
    collects = [] if gathered is None else _collects(ctx, shard, gathered, transport, tile, full, ld, subs)
    copies: list[Callable[[torch.Tensor], None]] = []
    if transport == "copy_engine" and ctx.size > 1:
        copies = [_copies(ctx, rows, full, ld, subs, tile.bm, slot) for slot in (0, 1)]
    return _Plan(tile, padded, launches, collects, copies, _told(ctx, transport, tile, m, k, whole))


def _told(ctx: AGGemmContext, transport: str, tile: tiling.Tiling, m: int, k: int, whole: int | None) -> Told:
    """Ranks that say different N may cut their shards differently."""
    return ctx.telling(transport, tile, M=m, K=k, **({} if whole is None else {"N": whole}))


def _plan_stream_k(
    ctx: AGGemmContext,
    rows: int,
    operands: Sequence[torch.Tensor],
    biases: list[torch.Tensor | None],
    results: list[torch.Tensor],
    gathered: torch.Tensor | None,
    full: int,
    whole: int | None,
) -> _Plan:
    m, ld, capability = results[0].shape[0], tiling.round_up(operands[0].shape[1], 16), ctx.tuned.capability
    tile = tiling.choose_stream_k(capability, ctx.dtype, m, max(z.shape[1] for z in results))
    tile, padded = tiling.readable(tile, capability, m, *operands)
    operands = tiling.padded(operands, padded)
    launches = ag_gemm_stream_k.launches(ctx, tile, operands, biases, results, gathered is None, rows, full, ld)
    collects = [] if gathered is None else _collects(ctx, operands[0], gathered, "stream_k", tile, full, ld, 1)
    return _Plan(tile, padded, launches, collects, [], _told(ctx, "stream_k", tile, m, operands[0].shape[1], whole))


def _gemms(
    ctx: AGGemmContext, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, z: torch.Tensor, chosen: choice.Choice,
    tile: tiling.Tiling, rows: int, full: int, ld: int, number: int, last: bool,
) -> list[Prepared]:  # fmt: skip
    """The launches of the product with weight ``number``, for each slot set; ``tile``: the chosen one as this rank can read it."""
    (m, n), k, ranks = z.shape, x.shape[1], ctx.size
    # a TMA store writes whole tiles: only where no tile reaches into the rows of the next rank
    tma_out = tile.tma and full % tile.bm == 0 and m == ranks * full and tiling.is_tma_aligned(z)
    stored, kn = tiling.stored(w)
    pushers = chosen.pushers if number == 0 and ranks > 1 and chosen.transport == "in_kernel" else 0
    deal, _ = waves.gather(waves.of_context(ctx), tile, pushers, rows, full, n, k)
    args = (
        *ctx.operands(tile, x, w, full, ld), z if bias is None else bias,
        tiling.descriptor(z, [tile.bm, tile.bn]) if tma_out else z, z,
        ctx.ready, ctx.pushed, ctx.work, ctx.parts, ctx.full, ctx.flags, ctx.ctl,
        m, n, k, tiling.pitch(x), tiling.pitch(stored), ld, ctx.set_elements, ctx.max_flags,
        full, rows, number, int(last), *deal[1:4], *deal.shared, ctx.rank,
    )  # fmt: skip
    constants = dict(
        R=ranks, S=chosen.subs, BM=tile.bm, BN=tile.bn, BK=tile.bk, GROUP_M=tile.group_m,
        PUSH_BM=tiling.push_rows(tile, x), PUSH_BK=waves.PUSH_COLUMNS, COPY_ENGINE=chosen.transport == "copy_engine",
        TMA=tile.tma, TMA_OUT=tma_out, VEC=tiling.is_vectorised(n, k, x, w), W_IS_KN=kn,
        BIAS=bias is not None, SHARED=deal.shared.cut > 0, TRACE=ctx.trace is not None,
    )  # fmt: skip
    return [ctx.prepare(ag_gemm_kernel, deal.programs, (*args, slot), constants, tile, (0, 1, 4, 5, 6, 7)) for slot in (0, 1)]


def _collects(
    ctx: AGGemmContext, x: torch.Tensor, gathered: torch.Tensor, transport: str, tile: tiling.Tiling, full: int, ld: int, subs: int
) -> list[Prepared]:
    """Launches that copy the gathered input out of the heap, which ends the call: from then on the peers may write there again."""
    m, k = gathered.shape
    args = (
        x, ctx.data, gathered, ctx.full, ctx.flags, ctx.ctl, m, k, tiling.pitch(x), ld, ctx.set_elements, ctx.max_flags,
        full, ctx.rank,
    )  # fmt: skip
    constants = dict(
        R=ctx.size,
        S=subs,
        BM=tile.bm,
        COPY_BM=64,
        COPY_BK=256,
        COPY_ENGINE=transport == "copy_engine",
        VEC=tiling.is_vectorised(16, k, x, x),
    )
    programs = ctx.programs(cdiv(full, tile.bm) * ctx.size)
    return [ctx.prepare(ag_collect_kernel, programs, (*args, slot), constants, tile, (0, 2)) for slot in (0, 1)]


def _copies(ctx: AGGemmContext, rows: int, full: int, ld: int, subs: int, bm: int, slot: int) -> Callable[[torch.Tensor], None]:
    """What queues, once the kernel has the peers' credits: a shard to r-1, r-2, …, each copy followed by its flag there.

    All but where a shard lies is worked out here, once.
    """
    itemsize, unit_rows = ctx.dtype.itemsize, cdiv(cdiv(full, bm), subs) * bm
    steps: list[tuple[int, int, int, int]] = []  # the first row, rows, where they go, and their flag
    for step in range(1, ctx.size):
        peer = (ctx.rank - step) % ctx.size
        for sub in range(subs):
            first = sub * unit_rows
            to = ctx.peer_data(peer, slot * ctx.set_elements + (ctx.rank * full + first) * ld)
            if rows > first:
                steps.append((first, min(unit_rows, rows - first), to, ctx.peer_full(peer, slot, sub)))

    def queue(x: torch.Tensor) -> None:
        ready, source, pitch = ctx.ready.data_ptr(), x.data_ptr(), tiling.pitch(x) * itemsize
        ctx.engine.wait(ready, 1)
        ctx.engine.write(ready, 0)
        for first, height, to, flag in steps:
            ctx.copy(to, ld * itemsize, source + first * pitch, pitch, x.shape[1] * itemsize, height, flag)

    return queue

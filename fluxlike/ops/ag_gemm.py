"""AllGather + GEMM: z = all_gather(x_shard) · weightᵀ with the communication hidden under the product.

Read with `kernels/ag_gemm.py`, which holds the protocol.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from triton.tools.tensor_descriptor import TensorDescriptor

from ..kernels.ag_gemm import ag_collect_kernel, ag_gemm_kernel
from ..kernels.tiles import cdiv, chunk_rows
from . import tiling, validate
from .context import Context, check_arguments, kept, resolve

#: In-kernel push: a row of tiles is sent in so many pieces, each with a flag of its own.
PIECES = 4


class AGGemmContext(Context):
    """Slots for the gathered input of calls up to ``max_m`` rows and ``k`` columns."""

    maker = "fluxlike.create_ag_gemm_context"
    # 4×H200, N=57344, K=8192, µs, copy engine against in-kernel: shards of 4 MiB 431 : 481, of 8 MiB 752 : 828
    copy_engine_from = 4 << 20

    def __init__(
        self, max_m: int, k: int, dtype: torch.dtype, group: dist.ProcessGroup | None, schedule: str, n: int | None = None
    ) -> None:
        control = resolve(group)
        error = check_arguments("ag_gemm", {"max_m": max_m, "n": 1 if n is None else n, "k": k}, dtype, schedule)
        with control.lock:
            control.agree("create_ag_gemm_context", (max_m, n, k, str(dtype), schedule), error)
            self.max_m, self.k = max_m, k
            rows = chunk_rows(max_m, control.size)
            flags = cdiv(rows, tiling.MIN_TILE) * PIECES
            super().__init__("ag_gemm", control, dtype, schedule, flags, control.size * rows * tiling.round_up(k, 16))


def create_ag_gemm_context(
    max_m: int,
    n: int,
    k: int,
    dtype: torch.dtype = torch.bfloat16,
    group: dist.ProcessGroup | None = None,
    schedule: str = "auto",
) -> AGGemmContext:
    """Memory and signals for `ag_gemm`. Collective over ``group``: every rank passes the same arguments.

    Args:
        max_m: most rows of the gathered input. n: columns of the whole problem; the weights of a call may have others.
        k: most columns of the input. dtype: torch.bfloat16, torch.float16 or torch.float32, of input, weights and result.
        group: the tensor-parallel group; the one given to init if None.
        schedule: who carries the shards: "copy_engine", "in_kernel", or "auto" (copy engine from 4 MiB a shard on).

    Raises:
        ValueError: bad or disagreeing arguments, on all ranks together. RuntimeError: no init, or the heap is full.
    """
    return AGGemmContext(max_m, k, dtype, group, schedule, n)


def ag_gemm(
    x_shard: torch.Tensor,
    weight: torch.Tensor | Sequence[torch.Tensor],
    ctx: AGGemmContext | None = None,
    *,
    bias: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    group: dist.ProcessGroup | None = None,
    return_gathered: bool = False,
    m: int | None = None,
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

    Returns:
        z [M, N / R], or a list of them for a list of weights; with ``return_gathered`` the pair (z, gathered). New tensors.

    Numerics: fp32 accumulation, one rounding; the same bits on every repeat.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit; ranks that make different calls or disagree on M or K.
        RuntimeError: no init, closed context.
        PeerTimeout: a wait of an earlier call ran out (CPU heap: of this call).
    """
    validate.context("ag_gemm", ctx, AGGemmContext)
    control = resolve(group) if ctx is None else ctx.control
    weights, biases, m = validate.gathered_operands(x_shard, weight, bias, m, control)
    k = x_shard.shape[1]
    with control.lock:
        if ctx is None:
            ctx = kept(AGGemmContext, control, x_shard.dtype, {"max_m": max(m, 1), "k": max(k, 1)}, group)
        validate.call("ag_gemm", ctx, group, x_shard, {"M": (m, ctx.max_m, "max_m"), "K": (k, ctx.k, "k")})
        results = [x_shard.new_empty(m, w.shape[0]) for w in weights]
        gathered = x_shard.new_empty(m, k) if return_gathered else None
        if m and k:
            _run(ctx, x_shard, weights, biases, results, gathered)
        else:
            ctx.record(M=m, K=k)
            for z, b in zip(results, biases, strict=True):
                z.copy_(torch.zeros_like(z) if b is None else b.expand_as(z))
    result: Any = results[0] if isinstance(weight, torch.Tensor) else results
    return (result, gathered) if return_gathered else result


def _run(
    ctx: AGGemmContext,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    results: list[torch.Tensor],
    gathered: torch.Tensor | None,
) -> None:
    m, k, ranks = results[0].shape[0], x.shape[1], ctx.size
    full = chunk_rows(m, ranks)
    ld = tiling.round_up(k, 16)
    transport = ctx.choose(full * ld * x.element_size())
    capability = ctx.world.executor.capability
    tile = tiling.choose(capability, x.dtype, full, max(w.shape[0] for w in weights))
    # a rank without rows or without columns has no tile that reads them, but a descriptor must be of something
    shard = x if x.shape[0] else x.new_zeros(1, k)
    weights = [w if w.shape[0] else w.new_zeros(1, k) for w in weights]
    tile, (shard, *weights) = tiling.readable(tile, capability, full, shard, *weights)
    subs = 1
    slot = ctx.begin(transport, tile, M=m, K=k)

    def launch(i: int) -> None:
        last = i == len(weights) - 1 and gathered is None
        _launch_gemm(
            ctx, shard, weights[i], biases[i], results[i], transport, tile, x.shape[0], ld, subs, slot, first=i == 0, last=last
        )

    if transport == "copy_engine" and ranks > 1:
        # the first launch alone: what follows may have to compile, and the peers wait for this shard
        ctx.overlapped(lambda: launch(0), lambda: _queue_copies(ctx, shard, x.shape[0], m, ld, subs, tile.bm, slot))
    else:
        launch(0)
    for i in range(1, len(weights)):
        launch(i)
    if gathered is not None:
        _collect(ctx, shard, gathered, transport, tile, ld, subs, slot)


def _launch_gemm(
    ctx: AGGemmContext, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, z: torch.Tensor, transport: str,
    tile: tiling.Tiling, rows: int, ld: int, subs: int, slot: int, *, first: bool, last: bool,
) -> None:  # fmt: skip
    (m, n), k, ranks = z.shape, x.shape[1], ctx.size
    full = chunk_rows(m, ranks)
    operands: list[Any] = [x, x, ctx.data, ctx.data, w]
    if tile.tma:
        gathered = TensorDescriptor(ctx.data, [2, ranks * full, k], [ctx.set_elements, ld, 1], [1, tile.bm, tile.bk])
        operands = [
            tiling.descriptor(x, [tile.bm, tile.bk]), x, gathered, ctx.data, tiling.descriptor(w, [tile.bn, tile.bk])
        ]  # fmt: skip
    # a TMA store writes whole tiles: only where no tile reaches into the rows of the next rank
    tma_out = tile.tma and full % tile.bm == 0 and m == ranks * full and tiling.is_tma_aligned(z)
    stored, kn = tiling.stored(w)
    args = (
        *operands, z if bias is None else bias, tiling.descriptor(z, [tile.bm, tile.bn]) if tma_out else z,
        ctx.ready, ctx.full, ctx.flags, ctx.ctl,
        m, n, k, tiling.pitch(x), tiling.pitch(stored), ld, ctx.set_elements, ctx.max_flags,
        full, rows, int(bias is not None), int(first and ranks > 1), int(last), ctx.rank, slot,
    )  # fmt: skip
    constants = dict(
        R=ranks, S=subs, BM=tile.bm, BN=tile.bn, BK=tile.bk, GROUP_M=tile.group_m, PIECES=PIECES,
        PUSH_BM=_push_rows(ctx), PUSH_BK=256, COPY_ENGINE=transport == "copy_engine",
        TMA=tile.tma, TMA_OUT=tma_out, VEC=tiling.is_vectorised(n, k, x, w), W_IS_KN=kn,
    )  # fmt: skip
    ctx.launch(ag_gemm_kernel, cdiv(full, tile.bm) * ranks * cdiv(n, tile.bn), args, constants, tile)


def _collect(
    ctx: AGGemmContext, x: torch.Tensor, gathered: torch.Tensor, transport: str, tile: tiling.Tiling, ld: int, subs: int, slot: int
) -> None:
    """Copy the gathered input out of the heap, which ends the call: from then on the peers may write there again."""
    m, k = gathered.shape
    full = chunk_rows(m, ctx.size)
    args = (
        x, ctx.data, gathered, ctx.full, ctx.flags, ctx.ctl, m, k, tiling.pitch(x), ld, ctx.set_elements, ctx.max_flags,
        full, ctx.rank, slot,
    )  # fmt: skip
    constants = dict(
        R=ctx.size,
        S=subs,
        BM=tile.bm,
        PIECES=PIECES,
        COPY_BM=_push_rows(ctx),
        COPY_BK=256,
        COPY_ENGINE=transport == "copy_engine",
        VEC=tiling.is_vectorised(16, k, x, x),
    )
    ctx.launch(ag_collect_kernel, cdiv(full, tile.bm) * ctx.size, args, constants, tile)


def _push_rows(ctx: AGGemmContext) -> int:
    """Rows of a block that moves by vector stores: under the interpreter a block costs the same whatever its size."""
    return 64 if ctx.device.type == "cpu" else 16


def _queue_copies(ctx: AGGemmContext, x: torch.Tensor, rows: int, m: int, ld: int, subs: int, bm: int, slot: int) -> None:
    """Once the kernel has the peers' credits: this shard to r-1, r-2, …, each copy followed by its flag there."""
    k = x.shape[1]
    full, itemsize = chunk_rows(m, ctx.size), x.element_size()
    unit_rows = cdiv(cdiv(full, bm), subs) * bm
    ctx.engine.wait(ctx.ready.data_ptr(), 1)
    ctx.engine.write(ctx.ready.data_ptr(), 0)
    for step in range(1, ctx.size):
        peer = (ctx.rank - step) % ctx.size
        for sub in range(subs):
            height = min(unit_rows, rows - sub * unit_rows)
            if height > 0:
                ctx.copy(
                    ctx.peer_data(peer, slot * ctx.set_elements + (ctx.rank * full + sub * unit_rows) * ld), ld * itemsize,
                    x.data_ptr() + sub * unit_rows * tiling.pitch(x) * itemsize, tiling.pitch(x) * itemsize,
                    k * itemsize, height, ctx.peer_full(peer, (slot * ctx.size + ctx.rank) * subs + sub),
                )  # fmt: skip

"""Launches of ag_gemm with schedule "stream_k": the product is cut into equal shares of k-steps. See its kernel."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..kernels import stream_k
from ..kernels.ag_gemm_stream_k import ag_gemm_stream_k_kernel
from ..kernels.tiles import cdiv, longest_lag
from . import choice, cost, tiling, validate, waves
from .group import Prepared

if TYPE_CHECKING:
    from .ag_gemm import AGGemmContext


def launches(
    ctx: "AGGemmContext",
    tile: tiling.Tiling,
    operands: Sequence[torch.Tensor],
    biases: list[torch.Tensor | None],
    results: list[torch.Tensor],
    ends: bool,
    rows: int,
    full: int,
    ld: int,
) -> list[list[Prepared]]:
    """For each weight, the launch for each slot set. ``operands``: the shard, the weights; ``ends``: the last one ends the call."""
    shard, *weights = operands
    for w in weights:
        validate.countable_steps("ag_gemm", results[0].shape[0], w.shape[0], w.shape[1], tile)
    found = []
    for i, (w, bias, z) in enumerate(zip(weights, biases, results, strict=True)):
        last = ends and i == len(weights) - 1
        found.append([_launch(ctx, shard, w, bias, z, tile, rows, full, ld, i, last)] * 2)
    return found


def _launch(
    ctx: "AGGemmContext", x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, z: torch.Tensor,
    tile: tiling.Tiling, rows: int, full: int, ld: int, number: int, last: bool,
) -> Prepared:  # fmt: skip
    """The launch of a product with weight ``number``, cut into equal shares of k-steps."""
    (m, n), k, ranks = z.shape, x.shape[1], ctx.size
    tma_out = tile.tma and tiling.is_tma_aligned(z)
    piece = [tile.bm, min(tile.bn, stream_k.PIECE.value)]
    stored, kn = tiling.stored(w)
    programs = ctx.world.executor.programs
    pushers, pieces, lag = 0, 0, 0
    if number == 0 and ranks > 1 and rows > 0:
        pushers, pieces, lag = _push_beside(tile, programs, ctx.rank * full, rows, m, n, k, ranks, x.element_size())
    args = (
        *ctx.operands(tile, x, w, full, ld), z if bias is None else bias, tiling.descriptor(z, piece) if tma_out else z,
        ctx.pushed, ctx.work, ctx.parts, ctx.flags, ctx.ctl,
        m, n, k, tiling.pitch(x), tiling.pitch(stored), ld, ctx.set_elements, ctx.max_flags,
        full, rows, number, int(last), pushers, pieces, lag, ctx.rank,
    )  # fmt: skip
    constants = dict(
        R=ranks, BM=tile.bm, BN=tile.bn, BK=tile.bk, GROUP_M=tile.group_m,
        PUSH_BM=tiling.push_rows(tile, x), PUSH_BK=waves.PUSH_COLUMNS, TMA=tile.tma, TMA_OUT=tma_out,
        VEC=tiling.is_vectorised(n, k, x, w), W_IS_KN=kn, BIAS=bias is not None,
        maxnreg=tiling.registers(tile.warps),
    )  # fmt: skip
    launch = ctx.prepare(ag_gemm_stream_k_kernel, programs, args, constants, tile, (0, 1, 4, 5, 6))
    return lambda tensors: launch(tensors[:5])  # the other kernel has the result twice


def _push_beside(
    tile: tiling.Tiling, programs: int, start: int, rows: int, m: int, n: int, k: int, ranks: int, itemsize: int
) -> tuple[int, int, int]:
    """Who pushes the shard: (programs that do, pieces of a row of tiles, k-steps of the own tiles that they have fewer).

    All programs where no tile is of this shard only, as then there is nothing else to do.
    """
    own_end = cdiv(m, tile.bm) if start + rows == m else (start + rows) // tile.bm
    steps = max(own_end - cdiv(start, tile.bm), 0) * cdiv(n, tile.bn) * cdiv(k, tile.bk)
    rows_of_tiles = cdiv(rows, tile.bm)
    wanted = min(choice.PUSHERS[0], max(1, programs // 2)) if steps else programs
    pieces = max(1, min(cdiv(wanted, rows_of_tiles), cdiv(k, waves.PUSH_COLUMNS)))
    pushers = min(wanted, rows_of_tiles * pieces)
    if pushers == programs:
        return pushers, pieces, 0
    seconds = rows * k * itemsize * (ranks - 1) / cost.PUSH_RATE
    lag = round(seconds * cost.GEMM_RATE / (programs * 2 * tile.bm * tile.bn * tile.bk))
    return pushers, pieces, min(lag, longest_lag(programs, steps, pushers))

"""Stream-K: the product cut into equal shares of k-steps, for problems of a few waves of tiles or less.

Method: Osama, Merrill, Cecka, Garland, Owens, "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix
Multiplication on the GPU", PPoPP 2023. The k-steps of all tiles, one tile after the other, are cut into shares of equal size, one a
program (`tiles.share_start`). A program then has the end of one tile, whole tiles, and the beginning of another. Who has the
beginning finishes the tile: it adds the *parts* of the programs behind it, fp32 and in the order of k, which were the first thing
that they did. So a program has one part at most in each round of shares, and who finishes a tile seldom waits.

A part lies in ``work`` as blocks of PIECE columns or fewer, the same ones for who stores and who loads, and is announced by a word
of ``parts``. Programs wait for each other, so all of them must run at once: a launch has no more than one a multiprocessor.
"""

import triton
import triton.language as tl

from .blocks import add_bias, halves, store_block
from .sync import WAIT_PART, wait

#: Columns of a block on its way from the accumulator to memory, at most: a whole tile in another layout would not fit in registers.
PIECE = tl.constexpr(64)
#: Launches of a call, one a weight, that a stamp can tell apart.
LAUNCHES = tl.constexpr(1 << 16)


@triton.jit
def _at(work, part, column, BM: tl.constexpr, BN: tl.constexpr, TILE: tl.constexpr):
    """Where the block of columns ``column`` … of a part of a tile of BM × TILE lies, as pointers."""
    inside = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    return work + part.to(tl.int64) * (BM * TILE) + column * BM + inside


@triton.jit
def keep_part(value, work, part, column, BM: tl.constexpr, BN: tl.constexpr, TILE: tl.constexpr):
    """Store columns ``column`` … of a part. Another multiprocessor reads it, so the level-1 cache is passed by."""
    if BN > PIECE:
        left, right = halves(value, BM, BN)
        keep_part(left, work, part, column, BM, BN // 2, TILE)
        keep_part(right, work, part, column + BN // 2, BM, BN // 2, TILE)
    else:
        tl.store(_at(work, part, column, BM, BN, TILE), value, cache_modifier=".cg")


@triton.jit
def wait_parts(parts, first, last, step, stamp, ctl, rank, R: tl.constexpr):
    """Until parts ``first``, ``first`` + ``step``, … ``last`` of one tile are there."""
    for part in range(first, last + 1, step):
        wait(parts + part, stamp, ctl, rank, WAIT_PART, rank, R)


@triton.jit
def add_parts(value, work, first, last, step, column, BM: tl.constexpr, BN: tl.constexpr, TILE: tl.constexpr):
    """value + columns ``column`` … of parts ``first``, ``first`` + ``step``, … ``last``. BN ≤ PIECE."""
    for part in range(first, last + 1, step):
        value += tl.load(_at(work, part, column, BM, BN, TILE), cache_modifier=".cg")
    return value


@triton.jit
def store_tile(
    value, work, first_part, last_part, step, bias, out, row, tile_column, column, M, N,
    BM: tl.constexpr, BN: tl.constexpr, TILE: tl.constexpr, TMA_OUT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Columns ``column`` … of a tile at (row, tile_column), with its parts and the bias added, to out [M, N]."""
    if BN > PIECE:
        left, right = halves(value, BM, BN)
        store_tile(
            left, work, first_part, last_part, step, bias, out, row, tile_column, column, M, N,
            BM, BN // 2, TILE, TMA_OUT, BIAS,
        )  # fmt: skip
        store_tile(
            right, work, first_part, last_part, step, bias, out, row, tile_column, column + BN // 2, M, N,
            BM, BN // 2, TILE, TMA_OUT, BIAS,
        )  # fmt: skip
    else:
        value = add_parts(value, work, first_part, last_part, step, column, BM, BN, TILE)
        value = add_bias(value, bias, tile_column + column, N, BN, BIAS).to(bias.dtype.element_ty)
        if TMA_OUT:
            out.store([row, tile_column + column], value)
        else:
            store_block(out, value, row, tile_column + column, M, N, N, BM, BN)

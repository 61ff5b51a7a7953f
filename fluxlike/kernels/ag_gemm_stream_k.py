"""AllGather + GEMM for few rows: Stream-K, one persistent kernel. This docstring is its design record.

It computes what `ag_gemm` computes, with the same slots, credits and call numbers, and pushes the shards as that does in-kernel;
read that record first. What differs is how the product is cut: tiles from all M rows, so that one may hold rows of several shards
and the weight is read once for each row of tiles and no more; and equal shares of k-steps (`stream_k`), where whole waves would
leave the last one mostly empty.

Order of work:

1. The first ``pushers`` programs push the shard to all ranks, this one among them: tiles that hold rows of several shards read
   all of them from the slots.
2. The tiles with rows of this shard only, read in place from x. Those who push have ``lag`` k-steps fewer. If there are none, all
   programs push.
3. The other tiles, beginning behind this shard, as the shards arrive.

Shapes as in `ag_gemm`, and ``work`` [2·programs, BM·BN], the parts of tiles, fp32.

Protocol; every signal names the wait it pairs with, (C) and (D) live in `sync`:

* (A) ``flags[r, row of tiles of the shard] = epoch`` (release) at every rank, from `ag_gemm.push_shard` → ``wait`` for
  ``>= epoch`` of a tile that holds such rows. Never reset.
* (B) ``parts[number] = stamp`` (release) by a program that had not the beginning of a tile → ``wait`` of the one that had. Of this
  GPU only. The stamp tells calls apart, and the launches of one call.
* (C) the credits: before anything is sent, each peer has finished the call that last used this slot set.
* (D) the end of the call: the last program of the last launch advances the epoch and gives the credits.

Numerics. fp32 accumulation, parts of a tile added in the order of k, one rounding. Shares depend on sizes and the number of
programs only, so repeats give the same bits.
"""

import triton
import triton.language as tl

from .ag_gemm import push_shard
from .blocks import load_a, load_b, multiply_add, sixteens, vectorised
from .lang import is_interp, tma_acquire, used_rows
from .stream_k import LAUNCHES, keep_part, store_tile, wait_parts
from .sync import EPOCH, WAIT_SHARD, finish, is_last_program, publish_set, wait, wait_credits
from .tiles import grouped, late_of, late_start


@triton.jit
def wait_tile(flags, ctl, M, epoch, rank, tile_m, chunk_rows, max_flags, R: tl.constexpr, BM: tl.constexpr):
    """(A): wait for all rows of row of tiles ``tile_m``.

    The rows of tiles of all shards one after the other: those with rows of this tile follow each other.
    """
    height = tl.cdiv(chunk_rows, BM)
    first = tile_m * BM
    last = tl.minimum(first + BM, M) - 1
    first = first // chunk_rows * height + first % chunk_rows // BM
    last = last // chunk_rows * height + last % chunk_rows // BM
    wait(flags + first // height * max_flags + first % height, epoch, ctl, rank, WAIT_SHARD, first // height, R)
    for place in range(first + 1, last + 1):
        wait(flags + place // height * max_flags + place % height, epoch, ctl, rank, WAIT_SHARD, place // height, R)


@triton.jit
def shares(
    x, gathered, gathered_ptr, w, bias, out, work, parts, flags, ctl,
    M, N, K, stride_x, stride_w, ld, set_elements, max_flags, chunk_rows, rows, rank, slot, epoch, stamp,
    first, height, late, lag,
    R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, OWN: tl.constexpr,
    TMA: tl.constexpr, TMA_OUT: tl.constexpr, W_IS_KN: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """This program's share of the ``height`` rows of tiles from ``first`` on. OWN: they are of this shard only, and read from x."""
    program = tl.program_id(0)
    tiles_n = tl.cdiv(N, BN)
    k_tiles = tl.cdiv(K, BK)
    steps = height * tiles_n * k_tiles
    count = tl.maximum(tl.minimum(tl.num_programs(0), steps), 1)
    begin = tl.minimum(late_start(program, count, steps, late, lag), steps)
    end = tl.minimum(late_start(program + 1, count, steps, late, lag), steps)
    for tile in range(begin // k_tiles, tl.cdiv(end, k_tiles)):
        tile_m, tile_n = grouped(tile, height, tiles_n, GROUP_M)
        tile_m = (first + tile_m) % tl.cdiv(M, BM)
        k_begin = tl.maximum(begin - tile * k_tiles, 0)
        k_end = tl.minimum(end - tile * k_tiles, k_tiles)
        if not OWN:
            wait_tile(flags, ctl, M, epoch, rank, tile_m, chunk_rows, max_flags, R, BM)
        tma_acquire(TMA)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(k_begin, k_end):
            if OWN:
                a = load_a(x, tile_m * BM - rank * chunk_rows, k * BK, rows, K, stride_x, BM, BK, TMA)
            elif TMA:
                if is_interp():
                    used_rows(M - tile_m * BM)
                a = tl.reshape(gathered.load([slot, tile_m * BM, k * BK]), (BM, BK))
            else:
                a = load_a(gathered_ptr + slot.to(tl.int64) * set_elements, tile_m * BM, k * BK, M, K, ld, BM, BK, False)
            b = load_b(w, tile_n * BN, k * BK, N, K, stride_w, BN, BK, TMA, W_IS_KN)
            acc = multiply_add(a, b, acc)
        if OWN:
            part = program
        else:
            part = tl.num_programs(0) + program
        if k_begin > 0:
            keep_part(acc, work, part, 0, BM, BN, BN)
            publish_set(parts + part, stamp, TMA_OUT)  # (B)
        else:
            last = part - program + late_of((tile + 1) * k_tiles - 1, count, steps, late, lag)
            wait_parts(parts, part + 1, last, 1, stamp, ctl, rank, R)  # (B)
            store_tile(
                acc, work, part + 1, last, 1, bias, out, tile_m * BM, tile_n * BN, 0, M, N, BM, BN, BN, TMA_OUT, BIAS
            )  # fmt: skip


_NUMBERS = ["M", "N", "K", "stride_x", "stride_w", "ld", "set_elements", "max_flags"]
_NUMBERS += ["chunk_rows", "rows", "launch", "last_launch", "pushers", "pieces", "lag", "rank"]


@triton.jit(do_not_specialize=_NUMBERS)
def ag_gemm_stream_k_kernel(
    x, x_ptr, gathered, gathered_ptr, w, bias, out, pushed, work, parts, flags, ctl,
    M, N, K, stride_x, stride_w, ld, set_elements, max_flags,
    chunk_rows, rows, launch, last_launch, pushers, pieces, lag, rank,
    R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    PUSH_BM: tl.constexpr, PUSH_BK: tl.constexpr,
    TMA: tl.constexpr, TMA_OUT: tl.constexpr, VEC: tl.constexpr, W_IS_KN: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """One product of the gathered input. With TMA, x, gathered, w (and out with TMA_OUT) are descriptors, else pointers.

    ``launch``: number of this launch in its call; the first pushes. ``rows``: of this rank's shard; ``max_flags``: flags a source
    has; ``set_elements``: from one slot set to the other.
    """
    N, K, stride_x, stride_w = vectorised(N, K, stride_x, stride_w, VEC)
    ld = sixteens(ld)
    set_elements = sixteens(set_elements)
    epoch = tl.load(ctl + EPOCH) + 1
    stamp = epoch * LAUNCHES + launch
    slot = (epoch & 1).to(tl.int32)
    if tl.program_id(0) < pushers:
        wait_credits(ctl, slot, rank, R)  # (C)
        push_shard(
            x_ptr, gathered_ptr, pushed, flags, ctl, epoch, slot, rank, rows, K, stride_x, ld, set_elements, chunk_rows,
            pushers, pieces, max_flags, 0, R, BM, PUSH_BM, PUSH_BK, True, False,
        )  # fmt: skip

    # the rows of tiles with rows of this shard only; M may end inside the last one
    tiles_m = tl.cdiv(M, BM)
    start = rank * chunk_rows
    own_first = tl.cdiv(start, BM)
    own_end = tl.where(start + rows == M, tiles_m, (start + rows) // BM)
    own_height = tl.where(rows > 0, tl.maximum(own_end - own_first, 0), 0)
    shares(
        x, gathered, gathered_ptr, w, bias, out, work, parts, flags, ctl,
        M, N, K, stride_x, stride_w, ld, set_elements, max_flags, chunk_rows, rows, rank, slot, epoch, stamp,
        own_first, own_height, pushers, lag,
        R, BM, BN, BK, GROUP_M, True, TMA, TMA_OUT, W_IS_KN, BIAS,
    )  # fmt: skip
    shares(
        x, gathered, gathered_ptr, w, bias, out, work, parts, flags, ctl,
        M, N, K, stride_x, stride_w, ld, set_elements, max_flags, chunk_rows, rows, rank, slot, epoch, stamp,
        own_first + own_height, tiles_m - own_height, 0, 0,
        R, BM, BN, BK, GROUP_M, False, TMA, TMA_OUT, W_IS_KN, BIAS,
    )  # fmt: skip
    if last_launch != 0:
        if is_last_program(ctl, TMA):
            finish(ctl, slot, rank, epoch, R)  # (D)

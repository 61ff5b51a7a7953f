"""GEMM + ReduceScatter for few rows: Stream-K, one persistent kernel. This docstring is its design record.

It computes what `gemm_rs` computes, with the same slots, credits and call numbers; read that record first. What differs is how the
work is cut. With few rows a rank there are fewer tiles than multiprocessors, or a few more; tiles of one chunk only would be mostly
empty, and whole waves of them would leave much of the GPU idle. So

* tiles are cut from all M rows; one tile may hold rows of several owners, and its rows are *scattered* to them;
* the k-steps of all tiles, one after the other, are cut into equal shares, one a program (`stream_k`).

Order of work, each with all programs:

1. the tiles without rows of this rank, beginning behind its chunk: what must travel;
2. the tiles with rows of this rank, which cover the way of what travels;
3. the sum: this rank's rows, in blocks over all programs.

Shapes, on rank r of R::

    x      [M, K_r]               W      [N, K_r] (or stored as [K_r, N])            out    [rows, N]
    stage  [2, R·pitch, ld]       slot sets for the other ranks' partial sums, in the dtype; rows [s·pitch, …) are of source s
    own    [pitch, ld]            this rank's partial sum, fp32
    work   [2·programs, BM·BN]    parts of tiles, fp32; of program p in phase i: number i·programs + p

Protocol; every signal names the wait it pairs with, (C) and (D) live in `sync`:

* (A) ``parts[number] = epoch`` (release) by a program that had not the beginning of a tile → ``wait`` of the one that had. It is of
  this GPU only. A part of the next call overwrites this one's when the launch that read it has ended: calls of a context follow
  each other on a stream.
* (B) ``flags[r, tile] = epoch`` (release) at each owner of rows in the tile, this rank among them → ``wait`` in the sum. The tile
  numbers of an owner begin with the tile that holds its first row.
* (C) the credits: before its first store to a slot set, a call waits until each peer has finished the call that last used it.
* (D) the end of the call: the last program advances the epoch and gives the credits.

Programs wait for each other in (A) and (B), so all of them must run at once: there is one a multiprocessor at most.

Numerics as in `gemm_rs`: own partial in fp32, the others rounded to the dtype for the way, sum in the order own (with the bias),
r+1, r+2, …. Within a partial the parts are added in the order of k. Shares depend on sizes and the number of programs only, so
repeats give the same bits.
"""

import triton
import triton.language as tl

from .blocks import add_bias, halves, load_a, load_b, multiply_add, sixteens, vectorised
from .stream_k import PIECE, add_parts, keep_part, wait_parts
from .sync import EPOCH, WAIT_PARTIAL, finish, is_last_program, peer_address, publish_set, wait, wait_credits
from .tiles import grouped, share_of, share_start


@triton.jit
def _store_rows(to, value, row, column, rows, ld, BM: tl.constexpr, BN: tl.constexpr):
    """A block of which only the rows that fall to 0 … rows-1 are stored; ``row`` may be negative."""
    r = row + tl.arange(0, BM)
    c = column + tl.arange(0, BN)
    inside = (r[:, None] >= 0) & (r[:, None] < rows) & (c[None, :] < ld)
    tl.store(to + r[:, None].to(tl.int64) * ld + c[None, :], value, mask=inside)


@triton.jit
def scatter(
    value, work, first_part, last_part, own, stage_ptr, ctl, row, tile_column, column, M, slot, rank, chunk_rows, pitch, ld,
    set_elements, R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Columns ``column`` … of a tile at (row, tile_column): with its parts added, the rows go to slot ``rank`` of their owners.

    Those of this rank stay, in fp32.
    """
    if BN > PIECE:
        left, right = halves(value, BM, BN)
        scatter(
            left, work, first_part, last_part, own, stage_ptr, ctl, row, tile_column, column, M, slot, rank, chunk_rows, pitch,
            ld, set_elements, R, BM, BN // 2, TILE,
        )  # fmt: skip
        scatter(
            right, work, first_part, last_part, own, stage_ptr, ctl, row, tile_column, column + BN // 2, M, slot, rank, chunk_rows,
            pitch, ld, set_elements, R, BM, BN // 2, TILE,
        )  # fmt: skip
    else:
        value = add_parts(value, work, first_part, last_part, 1, column, BM, BN, TILE)
        slot_start = slot.to(tl.int64) * set_elements + rank.to(tl.int64) * pitch * ld
        for owner in range(row // chunk_rows, (tl.minimum(row + BM, M) - 1) // chunk_rows + 1):
            rows = tl.minimum(chunk_rows, M - owner * chunk_rows)
            if owner == rank:
                _store_rows(own, value, row - owner * chunk_rows, tile_column + column, rows, ld, BM, BN)
            else:
                there = peer_address(stage_ptr, ctl, rank, owner) + slot_start
                sent = value.to(stage_ptr.dtype.element_ty)
                _store_rows(there, sent, row - owner * chunk_rows, tile_column + column, rows, ld, BM, BN)


@triton.jit
def _load_rows(at, row, column, rows, ld, BM: tl.constexpr, BN: tl.constexpr):
    """The counterpart of `_store_rows`, in fp32; zero outside."""
    r = row + tl.arange(0, BM)
    c = column + tl.arange(0, BN)
    inside = (r[:, None] >= 0) & (r[:, None] < rows) & (c[None, :] < ld)
    return tl.load(at + r[:, None].to(tl.int64) * ld + c[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def add_own(
    own, stage_ptr, bias, out, flags, ctl, N, epoch, slot, rank, rows, chunk_rows, pitch, ld, set_elements, max_flags,
    R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SUM_ROWS: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """The sum over ranks of this rank's rows, in blocks of SUM_ROWS × BN, column after column as they were computed.

    The blocks are cut from all M rows, as the tiles are, so that each lies in one tile.
    """
    tiles_n = tl.cdiv(N, BN)
    start = rank * chunk_rows
    first = start // SUM_ROWS
    blocks_m = tl.where(rows > 0, (start + rows - 1) // SUM_ROWS + 1 - first, 0)
    stage = stage_ptr + slot.to(tl.int64) * set_elements
    for block in range(tl.program_id(0), blocks_m * tiles_n, tl.num_programs(0)):
        tile_n = block // blocks_m
        row = (first + block % blocks_m) * SUM_ROWS
        number = (row // BM - start // BM) * tiles_n + tile_n
        for step in tl.static_range(R):  # (B)
            source = (rank + step) % R
            wait(flags + source * max_flags + number, epoch, ctl, rank, WAIT_PARTIAL, source, R)
        row -= start
        column = tile_n * BN
        acc = add_bias(_load_rows(own, row, column, rows, ld, SUM_ROWS, BN), bias, column, N, BN, BIAS)
        for step in tl.static_range(1, R):
            slot_of = stage + ((rank + step) % R).to(tl.int64) * pitch * ld
            acc += _load_rows(slot_of, row, column, rows, ld, SUM_ROWS, BN)
        r = row + tl.arange(0, SUM_ROWS)
        c = column + tl.arange(0, BN)
        inside = (r[:, None] >= 0) & (r[:, None] < rows) & (c[None, :] < N)
        tl.store(out + r[:, None].to(tl.int64) * N + c[None, :], acc.to(out.dtype.element_ty), mask=inside)


_NUMBERS = ["M", "N", "K", "stride_x", "stride_w", "ld", "set_elements", "max_flags"]
_NUMBERS += ["chunk_rows", "rows", "pitch", "rank"]


@triton.jit(do_not_specialize=_NUMBERS)
def gemm_rs_stream_k_kernel(
    x, w, bias, out, own, work, parts, stage_ptr, flags, ctl,
    M, N, K, stride_x, stride_w, ld, set_elements, max_flags,
    chunk_rows, rows, pitch, rank,
    R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, SUM_ROWS: tl.constexpr,
    TMA: tl.constexpr, VEC: tl.constexpr, W_IS_KN: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """One call. With TMA, x and w are descriptors, else pointers; sizes in elements.

    ``rows``: of this rank's chunk; ``max_flags``: flags a source has; ``set_elements``: from one slot set to the other.
    """
    N, K, stride_x, stride_w = vectorised(N, K, stride_x, stride_w, VEC)
    ld = sixteens(ld)
    set_elements = sixteens(set_elements)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    epoch = tl.load(ctl + EPOCH) + 1
    slot = (epoch & 1).to(tl.int32)
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    k_tiles = tl.cdiv(K, BK)
    own_first = rank * chunk_rows // BM
    own_height = tl.where(rows > 0, (rank * chunk_rows + rows - 1) // BM + 1 - own_first, 0)
    wait_credits(ctl, slot, rank, R)  # (C)

    for phase in range(2):
        first = own_first + tl.where(phase == 0, own_height, 0)
        height = tl.where(phase == 0, tiles_m - own_height, own_height)
        steps = height * tiles_n * k_tiles
        shares = tl.maximum(tl.minimum(programs, steps), 1)
        begin = tl.minimum(share_start(program, shares, steps), steps)
        end = tl.minimum(share_start(program + 1, shares, steps), steps)
        for tile in range(begin // k_tiles, tl.cdiv(end, k_tiles)):
            tile_m, tile_n = grouped(tile, height, tiles_n, GROUP_M)
            tile_m = (first + tile_m) % tiles_m
            k_begin = tl.maximum(begin - tile * k_tiles, 0)
            k_end = tl.minimum(end - tile * k_tiles, k_tiles)
            acc = tl.zeros((BM, BN), tl.float32)
            for k in range(k_begin, k_end):
                a = load_a(x, tile_m * BM, k * BK, M, K, stride_x, BM, BK, TMA)
                b = load_b(w, tile_n * BN, k * BK, N, K, stride_w, BN, BK, TMA, W_IS_KN)
                acc = multiply_add(a, b, acc)
            part = phase * programs + program
            if k_begin > 0:
                keep_part(acc, work, part, 0, BM, BN, BN)
                publish_set(parts + part, epoch, False)  # (A)
            else:
                last_part = phase * programs + share_of((tile + 1) * k_tiles - 1, shares, steps)
                wait_parts(parts, part + 1, last_part, 1, epoch, ctl, rank, R)  # (A)
                row = tile_m * BM
                scatter(
                    acc, work, part + 1, last_part, own, stage_ptr, ctl, row, tile_n * BN, 0, M, slot, rank, chunk_rows, pitch, ld,
                    set_elements, R, BM, BN, BN,
                )  # fmt: skip
                for owner in range(row // chunk_rows, (tl.minimum(row + BM, M) - 1) // chunk_rows + 1):
                    number = (tile_m - owner * chunk_rows // BM) * tiles_n + tile_n
                    publish_set(peer_address(flags, ctl, rank, owner) + rank * max_flags + number, epoch, False)  # (B)

    add_own(
        own, stage_ptr, bias, out, flags, ctl, N, epoch, slot, rank, rows, chunk_rows, pitch, ld, set_elements, max_flags,
        R, BM, BN, SUM_ROWS, BIAS,
    )  # fmt: skip
    if is_last_program(ctl, False):
        finish(ctl, slot, rank, epoch, R)  # (D)

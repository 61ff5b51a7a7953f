"""AllGather + GEMM in one persistent kernel.

draft
"""

import triton
import triton.language as tl

from .blocks import load_a, load_b, store_block
from .lang import tma_acquire
from .sync import EPOCH, WAIT_SHARD, finish, is_last_program, peer_address, publish_set, wait, wait_credits
from .tiles import own_tile, remote_tile


@triton.jit
def push_shard(
    x, gathered_ptr, flags, ctl, epoch, slot, rank, rows, K, stride_x, ld, slot_stride, chunk_rows, tiles_m, max_pieces,
    R: tl.constexpr, BM: tl.constexpr, PIECES: tl.constexpr, PUSH_BM: tl.constexpr, PUSH_BK: tl.constexpr,
):  # fmt: skip
    """This rank's rows to every peer's slot ``rank``, by vector stores; the nearest consumer first.

    A task is one PIECE (a range of columns) of one row of tiles for one peer; each has a flag of its own at the peer, so
    that a tile waits for just the rows it reads and the tasks are many enough to keep every program busy.
    """
    per_peer = tiles_m * PIECES
    width = tl.cdiv(tl.cdiv(K, PIECES), PUSH_BK) * PUSH_BK
    for task in range(tl.program_id(0), per_peer * (R - 1), tl.num_programs(0)):
        peer = (rank + R - 1 - task // per_peer) % R
        tile_m = (task % per_peer) // PIECES
        piece = task % PIECES
        there = peer_address(gathered_ptr, ctl, rank, peer) + slot.to(tl.int64) * slot_stride + rank.to(tl.int64) * chunk_rows * ld
        first = piece * width
        last = tl.minimum(first + width, K)
        for row in range(tile_m * BM, tl.minimum(tile_m * BM + BM, rows), PUSH_BM):
            for k in range(first, last, PUSH_BK):
                r = row + tl.arange(0, PUSH_BM)
                ks = k + tl.arange(0, PUSH_BK)
                inside = (r[:, None] < rows) & (ks[None, :] < last)
                block = tl.load(x + r[:, None].to(tl.int64) * stride_x + ks[None, :], mask=inside)
                tl.store(there + r[:, None].to(tl.int64) * ld + ks[None, :], block, mask=inside)
        flag = peer_address(flags, ctl, rank, peer) + rank * max_pieces + tile_m * PIECES + piece
        publish_set(flag, epoch, False)


@triton.jit
def end_call(full, ctl, M, epoch, slot, rank, chunk_rows, unit_rows, R: tl.constexpr, S: tl.constexpr, COPY_ENGINE: tl.constexpr):
    """The last program takes back the copy engines' flags of this call and gives the credits.

    It waits for every flag first: a rank without columns has no tile that waits, and a flag that arrived after its reset
    would be taken for one of a later call.
    """
    if is_last_program(ctl):
        if COPY_ENGINE:
            for step in range(1, R):
                source = (rank + step) % R
                for unit in range(S):
                    flag = full + (slot * R + source) * S + unit
                    valid = M - source * chunk_rows - unit * unit_rows
                    wait(flag, tl.where(valid > 0, 1, 0), ctl, rank, WAIT_SHARD, source, R)
                    tl.store(flag, 0)
        finish(ctl, slot, rank, epoch, R)


@triton.jit
def wait_rows(full, flags, ctl, M, epoch, slot, rank, source, tile_m, unit, chunk_rows, max_pieces, R: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, PIECES: tl.constexpr, COPY_ENGINE: tl.constexpr):  # fmt: skip
    """Wait for the rows of tile row ``tile_m`` of ``source``'s shard; (A) in the protocol above."""
    valid = M - source * chunk_rows - tile_m * BM
    if COPY_ENGINE:
        wait(full + (slot * R + source) * S + unit, tl.where(valid > 0, 1, 0), ctl, rank, WAIT_SHARD, source, R)
    else:
        flag = flags + source * max_pieces + tile_m * PIECES
        for piece in tl.static_range(PIECES):
            wait(flag + piece, tl.where(valid > 0, epoch, 0), ctl, rank, WAIT_SHARD, source, R)


@triton.jit(do_not_specialize=["rank", "slot", "rows", "chunk_rows"])
def ag_gemm_kernel(
    x, x_ptr, gathered, gathered_ptr, w, bias, out, go, full, flags, ctl,
    M, N, K, stride_x, stride_w, stride_out, ld, slot_stride, max_pieces,
    chunk_rows, rows, rank, slot,
    R: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    PIECES: tl.constexpr, PUSH_BM: tl.constexpr, PUSH_BK: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    COPY_ENGINE: tl.constexpr, TMA: tl.constexpr, TMA_OUT: tl.constexpr, W_IS_KN: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    epoch = tl.load(ctl + EPOCH) + 1
    if not COPY_ENGINE:
        slot = (epoch & 1).to(tl.int32)
    tiles_n = tl.cdiv(N, BN)
    unit_rows = tl.cdiv(tl.cdiv(chunk_rows, BM), S) * BM
    unit_tiles_m = unit_rows // BM
    per_chunk = unit_tiles_m * S * tiles_n
    k_tiles = tl.cdiv(K, BK)
    dtype = x_ptr.dtype.element_ty
    if FIRST and R > 1:
        if COPY_ENGINE:
            if program == 0:
                wait_credits(ctl, slot, rank, R)
                publish_set(go, 1, False)
        else:
            wait_credits(ctl, slot, rank, R)
            push_shard(
                x_ptr, gathered_ptr, flags, ctl, epoch, slot, rank, rows, K, stride_x, ld, slot_stride, chunk_rows,
                tl.cdiv(rows, BM), max_pieces, R, BM, PIECES, PUSH_BM, PUSH_BK,
            )  # fmt: skip

    own_tiles = tl.where(rows > 0, per_chunk, 0)
    done = program - programs
    for tile in tl.range(program, own_tiles, programs, flatten=True):
        tile_m, tile_n, unit = own_tile(tile, unit_tiles_m, tiles_n, GROUP_M)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(k_tiles):
            a = load_a(x, tile_m * BM, k * BK, rows, K, stride_x, BM, BK, TMA)
            b = load_b(w, tile_n * BN, k * BK, N, K, stride_w, BN, BK, TMA, W_IS_KN)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        done += programs
        tile_m, tile_n, unit = own_tile(done, unit_tiles_m, tiles_n, GROUP_M)
        if HAS_BIAS:
            columns = tile_n * BN + tl.arange(0, BN)
            acc += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
        if TMA_OUT:
            out.store([rank * chunk_rows + tile_m * BM, tile_n * BN], acc.to(dtype))
        else:
            here = out + rank.to(tl.int64) * chunk_rows * stride_out
            store_block(here, acc.to(dtype), tile_m * BM, tile_n * BN, rows, N, stride_out, BM, BN)

    remote_tiles = per_chunk * (R - 1)
    first = (program - own_tiles % programs + programs) % programs
    done = first - programs
    for tile in tl.range(first, remote_tiles, programs, flatten=True):
        source, tile_m, tile_n, unit = remote_tile(tile, rank, unit_tiles_m, tiles_n, R, S, GROUP_M)
        wait_rows(full, flags, ctl, M, epoch, slot, rank, source, tile_m, unit % S, chunk_rows, max_pieces, R, S, BM, PIECES, COPY_ENGINE)
        tma_acquire(TMA)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(k_tiles):
            if TMA:
                a = tl.reshape(gathered.load([slot, source * chunk_rows + tile_m * BM, k * BK]), (BM, BK))
            else:
                there = gathered_ptr + slot.to(tl.int64) * slot_stride
                a = load_a(there, source * chunk_rows + tile_m * BM, k * BK, M, K, ld, BM, BK, False)
            b = load_b(w, tile_n * BN, k * BK, N, K, stride_w, BN, BK, TMA, W_IS_KN)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        done += programs
        source, tile_m, tile_n, unit = remote_tile(done, rank, unit_tiles_m, tiles_n, R, S, GROUP_M)
        if HAS_BIAS:
            columns = tile_n * BN + tl.arange(0, BN)
            acc += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
        if TMA_OUT:
            out.store([source * chunk_rows + tile_m * BM, tile_n * BN], acc.to(dtype))
        else:
            here = out + source.to(tl.int64) * chunk_rows * stride_out
            valid = tl.minimum(chunk_rows, M - source * chunk_rows)
            store_block(here, acc.to(dtype), tile_m * BM, tile_n * BN, valid, N, stride_out, BM, BN)

    if LAST:
        end_call(full, ctl, M, epoch, slot, rank, chunk_rows, unit_rows, R, S, COPY_ENGINE)


@triton.jit(do_not_specialize=["rank", "slot", "chunk_rows"])
def ag_collect_kernel(
    x, gathered, out, full, flags, ctl, M, K, stride_x, ld, slot_stride, max_pieces, chunk_rows, rank, slot,
    R: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, PIECES: tl.constexpr, COPY_BM: tl.constexpr, COPY_BK: tl.constexpr,
    COPY_ENGINE: tl.constexpr,
):  # fmt: skip
    """The gathered input out of the slots into the caller's tensor out [M, K], after the products; then the call ends.

    A kernel and not a copy by the host, because an in-kernel call chooses its slot set on the device.
    """
    epoch = tl.load(ctl + EPOCH) + 1
    if not COPY_ENGINE:
        slot = (epoch & 1).to(tl.int32)
    tiles_m = tl.cdiv(chunk_rows, BM)
    unit_tiles_m = tl.cdiv(tiles_m, S)
    for task in range(tl.program_id(0), tiles_m * R, tl.num_programs(0)):
        source = (rank + task // tiles_m) % R
        tile_m = task % tiles_m
        there = gathered + slot.to(tl.int64) * slot_stride + source.to(tl.int64) * chunk_rows * ld
        pitch = ld
        if source == rank:
            there = x
            pitch = stride_x
        else:
            wait_rows(full, flags, ctl, M, epoch, slot, rank, source, tile_m, tile_m // unit_tiles_m, chunk_rows, max_pieces, R, S, BM, PIECES, COPY_ENGINE)
        rows = tl.minimum(chunk_rows, M - source * chunk_rows)
        here = out + source.to(tl.int64) * chunk_rows * K
        for row in range(tile_m * BM, tl.minimum(tile_m * BM + BM, rows), COPY_BM):
            for k in range(0, K, COPY_BK):
                r = row + tl.arange(0, COPY_BM)
                ks = k + tl.arange(0, COPY_BK)
                inside = (r[:, None] < rows) & (ks[None, :] < K)
                block = tl.load(there + r[:, None].to(tl.int64) * pitch + ks[None, :], mask=inside)
                tl.store(here + r[:, None].to(tl.int64) * K + ks[None, :], block, mask=inside)
    end_call(full, ctl, M, epoch, slot, rank, chunk_rows, unit_tiles_m * BM, R, S, COPY_ENGINE)

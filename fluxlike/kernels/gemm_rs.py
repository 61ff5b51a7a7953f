"""GEMM + ReduceScatter in one persistent kernel.

draft
"""

import triton
import triton.language as tl

from .blocks import halves, load_a, load_b, store_block
from .lang import tma_acquire
from .sync import (
    EPOCH,
    SCRATCH,
    WAIT_PARTIAL,
    finish,
    is_last_program,
    peer_address,
    publish_add,
    publish_set,
    wait,
    wait_credits,
)
from .tiles import own_tile, remote_tile


@triton.jit
def add_partials(acc, stage, slot, pitch, row, column, rank, rows, N, ld, slot_stride, R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TMA: tl.constexpr):
    for step in tl.static_range(1, R):
        source = (rank + step) % R
        if TMA:
            acc += tl.reshape(stage.load([slot, source * pitch + row, column]), (BM, BN)).to(tl.float32)
        else:
            r = row + tl.arange(0, BM)
            c = column + tl.arange(0, BN)
            at = stage + slot.to(tl.int64) * slot_stride + (source * pitch + r)[:, None].to(tl.int64) * ld + c[None, :]
            acc += tl.load(at, mask=(r[:, None] < rows) & (c[None, :] < N), other=0.0).to(tl.float32)
    return acc


@triton.jit(do_not_specialize=["rank", "slot", "rows", "chunk_rows", "pitch"])
def gemm_rs_kernel(
    x, w, bias, out, local, stage, stage_ptr, ready, full, flags, ctl,
    M, N, K, stride_x, stride_w, ld, slot_stride, max_tiles,
    chunk_rows, rows, pitch, rank, slot,
    R: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    COPY_ENGINE: tl.constexpr, TMA: tl.constexpr, TMA_OUT: tl.constexpr, W_IS_KN: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    epoch = tl.load(ctl + EPOCH) + 1
    if not COPY_ENGINE:
        slot = (epoch & 1).to(tl.int32)
    unit_tiles_m = pitch // (BM * S)
    tiles_n = tl.cdiv(N, BN)
    per_chunk = unit_tiles_m * S * tiles_n
    k_tiles = tl.cdiv(K, BK)
    dtype = stage_ptr.dtype.element_ty
    if R > 1:
        wait_credits(ctl, slot, rank, R)
    remote_tiles = per_chunk * (R - 1)
    done = program - programs
    if COPY_ENGINE:
        previous = (ctl + SCRATCH).to(tl.pointer_type(tl.int32), bitcast=True)
    else:
        previous = ctl + SCRATCH
    for tile in tl.range(program, remote_tiles, programs, flatten=True):
        owner, tile_m, tile_n, unit = remote_tile(tile, rank, unit_tiles_m, tiles_n, R, S, GROUP_M)
        row = owner * chunk_rows + tile_m * BM
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(k_tiles):
            a = load_a(x, row, k * BK, M, K, stride_x, BM, BK, TMA)
            b = load_b(w, tile_n * BN, k * BK, N, K, stride_w, BN, BK, TMA, W_IS_KN)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        # recomputed so that the pipelined loop carries one number and not four
        done += programs
        owner, tile_m, tile_n, unit = remote_tile(done, rank, unit_tiles_m, tiles_n, R, S, GROUP_M)
        if COPY_ENGINE:
            publish_add(previous, TMA)
            if TMA:
                local.store([owner * pitch + tile_m * BM, tile_n * BN], acc.to(dtype))
            else:
                store_block(local, acc.to(dtype), owner * pitch + tile_m * BM, tile_n * BN, R * pitch, N, ld, BM, BN)
            previous = ready + unit
        else:
            publish_set(previous, epoch, False)
            there = peer_address(stage_ptr, ctl, rank, owner) + slot.to(tl.int64) * slot_stride + rank.to(tl.int64) * pitch * ld
            valid = tl.minimum(chunk_rows, M - owner * chunk_rows)
            store_block(there, acc.to(dtype), tile_m * BM, tile_n * BN, valid, N, ld, BM, BN)
            previous = peer_address(flags, ctl, rank, owner) + rank * max_tiles + tile_m * tiles_n + tile_n
    if R > 1:
        if COPY_ENGINE:
            publish_add(previous, TMA)
        else:
            publish_set(previous, epoch, False)

    own_tiles = tl.where(rows > 0, per_chunk, 0)
    first = (program - remote_tiles % programs + programs) % programs
    done = first - programs
    for tile in tl.range(first, own_tiles, programs, flatten=True):
        tile_m, tile_n, unit = own_tile(tile, unit_tiles_m, tiles_n, GROUP_M)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(k_tiles):
            a = load_a(x, rank * chunk_rows + tile_m * BM, k * BK, M, K, stride_x, BM, BK, TMA)
            b = load_b(w, tile_n * BN, k * BK, N, K, stride_w, BN, BK, TMA, W_IS_KN)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        done += programs
        tile_m, tile_n, unit = own_tile(done, unit_tiles_m, tiles_n, GROUP_M)
        row = tile_m * BM
        column = tile_n * BN
        for step in tl.static_range(1, R):
            source = (rank + step) % R
            if COPY_ENGINE:
                wait(full + (slot * R + source) * S + unit, tl.where(row < rows, 1, 0), ctl, rank, WAIT_PARTIAL, source, R)
            else:
                wait(flags + source * max_tiles + tile_m * tiles_n + tile_n, tl.where(row < rows, epoch, 0), ctl, rank, WAIT_PARTIAL, source, R)
        tma_acquire(TMA)
        if HAS_BIAS:
            columns = column + tl.arange(0, BN)
            acc += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
        left, right = halves(acc, BM, BN)
        left = add_partials(left, stage, slot, pitch, row, column, rank, rows, N, ld, slot_stride, R, BM, BN // 2, TMA)
        if TMA_OUT:
            out.store([row, column], left.to(dtype))
        else:
            store_block(out, left.to(dtype), row, column, rows, N, N, BM, BN // 2)
        right = add_partials(right, stage, slot, pitch, row, column + BN // 2, rank, rows, N, ld, slot_stride, R, BM, BN // 2, TMA)
        if TMA_OUT:
            out.store([row, column + BN // 2], right.to(dtype))
        else:
            store_block(out, right.to(dtype), row, column + BN // 2, rows, N, N, BM, BN // 2)

    if is_last_program(ctl):
        if COPY_ENGINE:
            for source in range(R):
                for unit in range(S):
                    tl.store(full + (slot * R + source) * S + unit, 0)
        finish(ctl, slot, rank, epoch, R)

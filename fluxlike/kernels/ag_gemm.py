"""AllGather + GEMM in one persistent kernel. This docstring is its design record.

What it computes, on rank r of R, with W = weight::

    x      [rows, K]     this rank's rows of the input, chunk r as torch.chunk splits M
    W      [N_r, K]      this rank's rows of the weight (or the same stored as [K, N_r])
    out    [M, N_r]      all_gather(x) · Wᵀ (+ bias [N_r])

Order of work. A program takes its tiles of the own shard first, read in place from x, then those of shards r+1, r+2, …, r-1 as
they arrive in this rank's slot set ``gathered`` [2, R·chunk_rows, ld] (ld: K rounded up to 16). By copies every owner s sends to
s-1 first, then s-2, …: the order in which the consumers want it, and at any time every rank receives from a different one. A push
by the kernel goes to all peers at once, a row of tiles after the other.

The last wave. Where whole tiles would leave much of the GPU idle in the end, the last ``cut`` of them are shared by all programs:
their k-steps, one tile after the other, in equal shares, as `stream_k` has it. So a call takes the waves that it has, not the next
whole number, and the pushers, who have ``lag`` steps fewer, need not be a whole number of tiles behind the others.

Who carries the shards:

* COPY_ENGINE: program 0 collects the credits and lets the side stream go; copy engines push the shard to the peers, each copy
  followed by the peer's ``full`` word. The credits are not waited for by the stream itself, because a stream wait cannot run out
  and this kernel always ends.
* else: the first ``pushers`` programs push the shard by vector stores while the others begin with the own shard; then they join
  in (`tiles.dealt`). A row of tiles has one flag, set when the last of its pieces is there.

Protocol; every signal names the wait it pairs with, (C) and (D) live in `sync`:

* (A) COPY_ENGINE: ``full[slot, r, sub] = 1`` at the peer, by this rank's side stream after its copy → ``wait_rows``. The last
  program resets the words of its slot set, when the programs of the call have seen all of them (of a rank without columns no tile
  waits, so it waits for them itself). Else: ``flags[r, row of tiles] = epoch`` (release) at the peer → ``wait_rows`` for ``>=
  epoch``. Never reset.
* (B) ``go = 1`` (release) by program 0 → cuStreamWaitValue32 of this rank's side stream, which resets it to 0.
* (C) the credits: before anything is sent, each peer has finished the call that last used this slot set.
* (D) the end of the call: the last program advances the epoch and gives the credits.
* (E) ``parts[program] = stamp`` (release) by a program that had not the beginning of a tile → ``wait_parts`` of the one that had.
  Of this GPU only; the stamp tells calls apart, and the launches of one call. All programs must run at once: there is one a
  multiprocessor at most. A program gives its part before it waits for another's, so they do not wait in a circle.

Soundness is argued as in `gemm_rs`: written only after (C), read only after (A), words reset before (D).

Several weights share one gather: one launch each; the first sends, the last ends the call. ``ag_collect_kernel`` copies the
gathered input out for the caller; it then is the launch that ends the call.

Numerics. fp32 accumulation, one rounding; nothing depends on the order of arrival. Parts are added in the order of k, and shares
depend on sizes and the number of programs only, so repeats give the same bits.

Measured: docs/performance.md.
"""

import triton
import triton.language as tl

from .blocks import add_bias, load_a, load_b, multiply_add, sixteens, store_block, vectorised
from .lang import drain_stores, is_interp, tma_acquire, used_rows
from .stream_k import LAUNCHES, keep_part, store_tile, wait_parts
from .sync import (
    EPOCH,
    WAIT_SHARD,
    finish,
    full_flag,
    is_last_program,
    peer_address,
    publish_set,
    reset,
    wait,
    wait_credits,
)
from .tiles import dealt, lane_share, late_of, own_tile, remote_tile, turns_before
from .trace import COMPUTED, CREDITS, END, ENDING, GO, SIGNAL, STORED, WAITS, record, record_begin, record_program


@triton.jit
def push_shard(
    x, gathered_ptr, pushed, flags, ctl, epoch, slot, rank, rows, K, stride_x, ld, set_elements, chunk_rows, pushers, pieces,
    max_flags, tasks, R: tl.constexpr, BM: tl.constexpr, PUSH_BM: tl.constexpr, PUSH_BK: tl.constexpr, SELF: tl.constexpr,
    TRACE: tl.constexpr,
):  # fmt: skip
    """This rank's rows to slot ``rank`` of every peer, and SELF of its own, by vector stores of programs 0 … pushers-1. Sends (A).

    A task is one of the ``pieces`` (a range of columns) of one row of tiles, read once and stored to all peers. The program
    that ends the last piece of a row of tiles, counted in ``pushed``, sets the row's flag at the peers. The loads are
    pipelined, because beside a GEMM they take far longer than on an idle GPU. ``tasks``: row of the first in what is traced.
    """
    width = tl.cdiv(tl.cdiv(K, pieces), PUSH_BK)
    slot_start = slot.to(tl.int64) * set_elements + rank.to(tl.int64) * chunk_rows * ld
    for task in range(tl.program_id(0), tl.cdiv(rows, BM) * pieces, pushers):
        record_begin(ctl, tasks + task, tl.program_id(0), R, TRACE)
        tile_m = task // pieces
        first = task % pieces * width
        across = tl.minimum(width, tl.cdiv(K, PUSH_BK) - first)
        for block in tl.range(0, across * (BM // PUSH_BM), num_stages=4):
            r = tile_m * BM + block // across * PUSH_BM + tl.arange(0, PUSH_BM)
            ks = (first + block % across) * PUSH_BK + tl.arange(0, PUSH_BK)
            inside = (r[:, None] < rows) & (ks[None, :] < K)
            value = tl.load(x + r[:, None].to(tl.int64) * stride_x + ks[None, :], mask=inside)
            for step in tl.static_range(0 if SELF else 1, R):
                there = peer_address(gathered_ptr, ctl, rank, (rank + R - step) % R) + slot_start
                tl.store(there + r[:, None].to(tl.int64) * ld + ks[None, :], value, mask=inside)
        record(ctl, tasks + task, STORED, R, TRACE)
        drain_stores(False)
        if tl.atomic_add(pushed + tile_m, 1, sem="acq_rel", scope="sys") == pieces - 1:
            tl.store(pushed + tile_m, 0)
            for step in tl.static_range(0 if SELF else 1, R):
                flag = peer_address(flags, ctl, rank, (rank + R - step) % R) + rank * max_flags + tile_m
                publish_set(flag, epoch, False)
            record(ctl, tasks + task, SIGNAL, R, TRACE)


@triton.jit
def end_call(
    full, ctl, M, epoch, slot, rank, chunk_rows, unit_rows, seen,
    R: tl.constexpr, S: tl.constexpr, COPY_ENGINE: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """The last program takes back the copy engines' flags of this call and gives the credits.

    ``seen``: the programs have waited for every flag. A rank without columns has no tile that waits, and a flag that arrived after
    its reset would be taken for one of a later call.
    """
    if is_last_program(ctl, TMA):
        if COPY_ENGINE:
            if not seen:
                for step in range(1, R):
                    source = (rank + step) % R
                    for unit in range(S):
                        flag = full_flag(full, slot, source, unit, R)
                        valid = M - source * chunk_rows - unit * unit_rows
                        wait(flag, tl.where(valid > 0, 1, 0), ctl, rank, WAIT_SHARD, source, R)
            reset(full, slot, R)
        finish(ctl, slot, rank, epoch, R)  # (D)


@triton.jit
def wait_rows(
    full, flags, ctl, M, epoch, slot, rank, source, tile_m, unit, chunk_rows, max_flags,
    R: tl.constexpr, BM: tl.constexpr, COPY_ENGINE: tl.constexpr,
):  # fmt: skip
    """(A): wait for the rows of row of tiles ``tile_m`` of ``source``'s shard; not for this rank's own."""
    valid = tl.where(source == rank, 0, M - source * chunk_rows - tile_m * BM)
    if COPY_ENGINE:
        wait(full_flag(full, slot, source, unit, R), tl.where(valid > 0, 1, 0), ctl, rank, WAIT_SHARD, source, R)
    else:
        wait(flags + source * max_flags + tile_m, tl.where(valid > 0, epoch, 0), ctl, rank, WAIT_SHARD, source, R)


@triton.jit
def load_gathered(
    gathered, gathered_ptr, slot, source, tile_m, k, M, K, ld, set_elements, chunk_rows,
    BM: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Block [BM, BK] of row of tiles ``tile_m`` of ``source``'s shard. The next rows are of a shard that was not waited for."""
    last_row = tl.minimum(source * chunk_rows + chunk_rows, M)
    if TMA:
        if is_interp():
            used_rows(last_row - source * chunk_rows - tile_m * BM)
        return tl.reshape(gathered.load([slot, source * chunk_rows + tile_m * BM, k]), (BM, BK))
    else:
        there = gathered_ptr + slot.to(tl.int64) * set_elements
        return load_a(there, source * chunk_rows + tile_m * BM, k, last_row, K, ld, BM, BK, False)


@triton.jit
def share_tiles(
    x, gathered, gathered_ptr, w, bias, out_ptr, work, parts, full, flags, ctl,
    M, N, K, stride_x, stride_w, ld, set_elements, max_flags, chunk_rows, rows, rank, slot, epoch, stamp,
    own_tiles, unit_tiles_m, tiles_n, first, cut, lanes, late, lag, trace_parts,
    R: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    COPY_ENGINE: tl.constexpr, TMA: tl.constexpr, TMA_OUT: tl.constexpr, W_IS_KN: tl.constexpr, BIAS: tl.constexpr,
    TRACE: tl.constexpr,
):  # fmt: skip
    """This program's share of the ``cut`` tiles from number ``first`` on, the last of all: other ranks', or with R = 1 the own."""
    program = tl.program_id(0)
    k_tiles = tl.cdiv(K, BK)
    lane, shares, steps, begin, end = lane_share(program, tl.num_programs(0), cut, lanes, k_tiles, late, lag)
    for place in range(begin // k_tiles, tl.cdiv(end, k_tiles)):
        k_begin = tl.maximum(begin - place * k_tiles, 0)
        k_end = tl.minimum(end - place * k_tiles, k_tiles)
        number = first + place * lanes + lane
        trace_row = tl.where(k_begin > 0, trace_parts + program, number)
        record_begin(ctl, trace_row, program, R, TRACE)
        if R == 1:
            source = rank
            tile_m, tile_n, unit = own_tile(number, unit_tiles_m, tiles_n, S, GROUP_M)
        else:
            source, tile_m, tile_n, unit = remote_tile(number - own_tiles, rank, unit_tiles_m, tiles_n, R, S, GROUP_M, True)
        wait_rows(
            full, flags, ctl, M, epoch, slot, rank, source, tile_m, unit % S, chunk_rows, max_flags, R, BM, COPY_ENGINE
        )  # fmt: skip
        record(ctl, trace_row, WAITS + 1, R, TRACE)
        tma_acquire(TMA)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(k_begin, k_end):
            if R == 1:
                a = load_a(x, tile_m * BM, k * BK, rows, K, stride_x, BM, BK, TMA)
            else:
                a = load_gathered(
                    gathered, gathered_ptr, slot, source, tile_m, k * BK, M, K, ld, set_elements, chunk_rows, BM, BK, TMA
                )  # fmt: skip
            b = load_b(w, tile_n * BN, k * BK, N, K, stride_w, BN, BK, TMA, W_IS_KN)
            acc = multiply_add(a, b, acc)
        record(ctl, trace_row, COMPUTED, R, TRACE)
        if k_begin > 0:
            keep_part(acc, work, program, 0, BM, BN, BN)
            publish_set(parts + program, stamp, TMA_OUT)  # (E)
        else:
            last = late_of((place + 1) * k_tiles - 1, shares, steps, late, lag) * lanes + lane
            wait_parts(parts, program + lanes, last, lanes, stamp, ctl, rank, R)  # (E)
            here = out_ptr + source.to(tl.int64) * chunk_rows * N
            valid = tl.minimum(chunk_rows, M - source * chunk_rows)
            store_tile(
                acc, work, program + lanes, last, lanes, bias, here, tile_m * BM, tile_n * BN, 0, valid, N, BM, BN, BN, False, BIAS
            )  # fmt: skip
        record(ctl, trace_row, STORED, R, TRACE)


_NUMBERS = ["M", "N", "K", "stride_x", "stride_w", "ld", "set_elements", "max_flags"]
_NUMBERS += ["chunk_rows", "rows", "launch", "last_launch", "pushers", "pieces", "head_start", "cut", "lanes", "late", "lag"]
_NUMBERS += ["rank", "slot"]


@triton.jit(do_not_specialize=_NUMBERS)
def ag_gemm_kernel(
    x, x_ptr, gathered, gathered_ptr, w, bias, out, out_ptr, go, pushed, work, parts, full, flags, ctl,
    M, N, K, stride_x, stride_w, ld, set_elements, max_flags,
    chunk_rows, rows, launch, last_launch, pushers, pieces, head_start, cut, lanes, late, lag, rank, slot,
    R: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    PUSH_BM: tl.constexpr, PUSH_BK: tl.constexpr,
    COPY_ENGINE: tl.constexpr, TMA: tl.constexpr, TMA_OUT: tl.constexpr, VEC: tl.constexpr, W_IS_KN: tl.constexpr,
    BIAS: tl.constexpr, SHARED: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """One product of the gathered input. With TMA, x, gathered, w (and out with TMA_OUT) are descriptors, else pointers.

    ``launch``: number of this launch in its call; the first sends. ``rows``: of this rank's shard; ``max_flags``: flags a source
    has; ``set_elements``: from one slot set to the other. SHARED: ``cut`` is not 0. With TRACE it writes down what happens when
    (`trace`).
    """
    N, K, stride_x, stride_w = vectorised(N, K, stride_x, stride_w, VEC)
    ld = sixteens(ld)
    set_elements = sixteens(set_elements)
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
    me = per_chunk * R + program  # the row of this program in what is traced
    record_program(ctl, me, R, TRACE)
    if (launch == 0) & (R > 1):  # it sends
        if COPY_ENGINE:
            if program == 0:
                wait_credits(ctl, slot, rank, R)  # (C)
                record(ctl, me, CREDITS, R, TRACE)
                publish_set(go, 1, False)  # (B)
                record(ctl, me, GO, R, TRACE)
        elif program < pushers:
            wait_credits(ctl, slot, rank, R)  # (C)
            record(ctl, me, CREDITS, R, TRACE)
            push_shard(
                x_ptr, gathered_ptr, pushed, flags, ctl, epoch, slot, rank, rows, K, stride_x, ld, set_elements, chunk_rows,
                pushers, pieces, max_flags, per_chunk * R + programs, R, BM, PUSH_BM, PUSH_BK, False, TRACE,
            )  # fmt: skip

    own_tiles = tl.where(rows > 0, per_chunk, 0)
    whole = own_tiles + per_chunk * (R - 1)  # tiles that one program computes
    if SHARED:
        whole -= cut
    own_end = turns_before(tl.minimum(own_tiles, whole), program, programs, pushers, head_start)
    done = turns_before(0, program, programs, pushers, head_start) - 1
    for turn in tl.range(done + 1, own_end, flatten=True):
        tile = dealt(turn, program, programs, pushers, head_start)
        tile_m, tile_n, unit = own_tile(tile, unit_tiles_m, tiles_n, S, GROUP_M)
        record_begin(ctl, tile, program, R, TRACE)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(k_tiles):
            a = load_a(x, tile_m * BM, k * BK, rows, K, stride_x, BM, BK, TMA)
            b = load_b(w, tile_n * BN, k * BK, N, K, stride_w, BN, BK, TMA, W_IS_KN)
            acc = multiply_add(a, b, acc)
        done += 1
        tile = dealt(done, program, programs, pushers, head_start)
        tile_m, tile_n, unit = own_tile(tile, unit_tiles_m, tiles_n, S, GROUP_M)
        record(ctl, tile, COMPUTED, R, TRACE)
        acc = add_bias(acc, bias, tile_n * BN, N, BN, BIAS)
        if TMA_OUT:
            out.store([rank * chunk_rows + tile_m * BM, tile_n * BN], acc.to(dtype))
        else:
            here = out + rank.to(tl.int64) * chunk_rows * N
            store_block(here, acc.to(dtype), tile_m * BM, tile_n * BN, rows, N, N, BM, BN)
        record(ctl, tile, STORED, R, TRACE)

    end = turns_before(whole, program, programs, pushers, head_start)
    done = own_end - 1
    for turn in tl.range(own_end, end, flatten=True):
        tile = dealt(turn, program, programs, pushers, head_start) - own_tiles
        source, tile_m, tile_n, unit = remote_tile(tile, rank, unit_tiles_m, tiles_n, R, S, GROUP_M, True)
        record_begin(ctl, own_tiles + tile, program, R, TRACE)
        wait_rows(
            full, flags, ctl, M, epoch, slot, rank, source, tile_m, unit % S, chunk_rows, max_flags,
            R, BM, COPY_ENGINE,
        )  # fmt: skip
        record(ctl, own_tiles + tile, WAITS + 1, R, TRACE)
        tma_acquire(TMA)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(k_tiles):
            a = load_gathered(
                gathered, gathered_ptr, slot, source, tile_m, k * BK, M, K, ld, set_elements, chunk_rows, BM, BK, TMA
            )  # fmt: skip
            b = load_b(w, tile_n * BN, k * BK, N, K, stride_w, BN, BK, TMA, W_IS_KN)
            acc = multiply_add(a, b, acc)
        done += 1
        tile = dealt(done, program, programs, pushers, head_start) - own_tiles
        source, tile_m, tile_n, unit = remote_tile(tile, rank, unit_tiles_m, tiles_n, R, S, GROUP_M, True)
        record(ctl, own_tiles + tile, COMPUTED, R, TRACE)
        acc = add_bias(acc, bias, tile_n * BN, N, BN, BIAS)
        if TMA_OUT:
            out.store([source * chunk_rows + tile_m * BM, tile_n * BN], acc.to(dtype))
        else:
            here = out + source.to(tl.int64) * chunk_rows * N
            valid = tl.minimum(chunk_rows, M - source * chunk_rows)
            store_block(here, acc.to(dtype), tile_m * BM, tile_n * BN, valid, N, N, BM, BN)
        record(ctl, own_tiles + tile, STORED, R, TRACE)

    if SHARED:
        share_tiles(
            x, gathered, gathered_ptr, w, bias, out_ptr, work, parts, full, flags, ctl,
            M, N, K, stride_x, stride_w, ld, set_elements, max_flags, chunk_rows, rows, rank, slot, epoch,
            epoch * LAUNCHES + launch, own_tiles, unit_tiles_m, tiles_n, whole, cut, lanes, late, lag,
            per_chunk * R + programs + tl.cdiv(rows, BM) * pieces,
            R, S, BM, BN, BK, GROUP_M, COPY_ENGINE, TMA, TMA_OUT, W_IS_KN, BIAS, TRACE,
        )  # fmt: skip
    record(ctl, me, ENDING, R, TRACE)
    if last_launch != 0:
        end_call(full, ctl, M, epoch, slot, rank, chunk_rows, unit_rows, N > 0, R, S, COPY_ENGINE, TMA)
    record(ctl, me, END, R, TRACE)


@triton.jit(do_not_specialize=["M", "K", "stride_x", "ld", "set_elements", "max_flags", "chunk_rows", "rank", "slot"])
def ag_collect_kernel(
    x, gathered, out, full, flags, ctl, M, K, stride_x, ld, set_elements, max_flags, chunk_rows, rank, slot,
    R: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, COPY_BM: tl.constexpr, COPY_BK: tl.constexpr,
    COPY_ENGINE: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """The gathered input out of the slots into the caller's tensor out [M, K], after the products; then the call ends.

    A kernel and not a copy by the host, because an in-kernel call chooses its slot set on the device.
    """
    _, K, stride_x, _ = vectorised(16, K, stride_x, 16, VEC)
    ld = sixteens(ld)
    set_elements = sixteens(set_elements)
    epoch = tl.load(ctl + EPOCH) + 1
    if not COPY_ENGINE:
        slot = (epoch & 1).to(tl.int32)
    tiles_m = tl.cdiv(chunk_rows, BM)
    unit_tiles_m = tl.cdiv(tiles_m, S)
    for task in range(tl.program_id(0), tiles_m * R, tl.num_programs(0)):
        source = (rank + task // tiles_m) % R
        tile_m = task % tiles_m
        there = gathered + slot.to(tl.int64) * set_elements + source.to(tl.int64) * chunk_rows * ld
        pitch = ld
        if source == rank:
            there = x
            pitch = stride_x
        else:
            wait_rows(
                full, flags, ctl, M, epoch, slot, rank, source, tile_m, tile_m // unit_tiles_m, chunk_rows, max_flags,
                R, BM, COPY_ENGINE,
            )  # fmt: skip
        rows = tl.minimum(chunk_rows, M - source * chunk_rows)
        here = out + source.to(tl.int64) * chunk_rows * K
        for row in range(tile_m * BM, tl.minimum(tile_m * BM + BM, rows), COPY_BM):
            for k in range(0, K, COPY_BK):
                r = row + tl.arange(0, COPY_BM)
                ks = k + tl.arange(0, COPY_BK)
                inside = (r[:, None] < rows) & (ks[None, :] < K)
                block = tl.load(there + r[:, None].to(tl.int64) * pitch + ks[None, :], mask=inside)
                tl.store(here + r[:, None].to(tl.int64) * K + ks[None, :], block, mask=inside)
    end_call(full, ctl, M, epoch, slot, rank, chunk_rows, unit_tiles_m * BM, True, R, S, COPY_ENGINE, False)

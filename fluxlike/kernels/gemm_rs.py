"""GEMM + ReduceScatter in one persistent kernel. This docstring is its design record.

What it computes, on rank r of R, with W = weight::

    x      [M, K_r]      this rank's columns of the input
    W      [N, K_r]      this rank's columns of the weight (or the same stored as [K_r, N])
    out    [rows, N]     chunk r, as torch.chunk splits M, of  Σ_s x_s · W_sᵀ (+ bias [N])

Order of work. A program (one a multiprocessor) takes tiles program, program + P, … of the other ranks' chunks, in the order
r+1, r+2, …, r-1, then the tiles of the own chunk. What must travel is computed first, every rank sends to a different owner
at any time, and the own chunk gives the wire time to deliver what the sum needs.

The last wave. Where whole tiles would leave much of the GPU idle in the end, the last ``cut`` own tiles are shared by all
programs: their k-steps in equal shares, as `stream_k` has it. Who has the beginning of a tile adds the parts of the others, then
the partials.

Where partial sums travel. Rank r's partial of chunk d goes to rank d's *slot* r: rows [r·pitch, r·pitch + rows_d) of slot set
``slot`` of d's ``stage`` [2, R·pitch, ld]. pitch: rows of a chunk rounded up to whole tiles; ld: N rounded up to 16, so that slots
can always be read and written in whole vectors.

* COPY_ENGINE: tiles are stored to ``local`` [R·pitch, ld] on this GPU and counted in ``ready[unit]``; a side stream waits for
  the count, lets a copy engine push the unit into the owner's slot and writes the owner's ``full`` word (`ops.gemm_rs`).
* else: the tile is stored straight into the owner's slot, by vector stores, and its flag set there.

Protocol; every signal names the wait it pairs with, (C) and (D) are shared by both transports and live in `sync`:

* (A) ``ready[unit] += n`` (release) by each program that has n tiles of the unit, behind the last of them → cuStreamWaitValue32
  on this rank's side stream, which resets it to 0. The stream wait cannot run out, but this kernel always ends, and then every unit
  is counted.
* (B) COPY_ENGINE: ``full[slot, r, sub] = 1`` at the owner, by this rank's side stream after its copy → ``wait`` in the own
  phase. The last program of the call resets the words of its slot set, when all its tiles have seen them.
  Else: ``flags[r, tile] = epoch`` (release) at the owner → ``wait`` for ``>= epoch`` in the own phase. Never reset.
* (C) the credits: before its first store to a slot set, a call waits until each peer has finished the call that last used it.
* (D) the end of the call: the last program advances the epoch and gives the credits.
* (E) ``parts[program] = epoch`` (release) by a program that had not the beginning of a tile → ``wait_parts`` of the one that had.
  Of this GPU only. All programs must run at once: there is one a multiprocessor at most. A program gives its part before it
  waits for another's, so they do not wait in a circle.

Why it is sound. A slot is written only after (C), so after its last reader is done; it is read only after (B), so after its
writer is done. (B)'s words are reset before (D), and written again only after (C) of a later call. Flags are never reset, so
one that is too large means only that its writer is further on; it then has written this call's tile as well, to a slot set that
it may not touch again before (D) of this call. All numbers are on the device, so calls may be replayed by a CUDA graph; the
copy engine's slot set is frozen at capture and only the credits make that right: a graph with an odd number of calls waits, once
a replay, for its peers to have finished the last call.

The deferred signal. A tile is published while the *next* one is computed: by then its store has drained, so the drain costs
nothing. COPY_ENGINE: behind PUBLISH_AFTER steps of the next main loop, a few microseconds, as the store is a local one; published
after the main loop, the copies would begin a whole tile later, 40 µs at 4096×4096×14336 on four ranks. And once a unit, not once a
tile: the release holds up the products for some 2 µs, by the traces of four H200s. Else after each main loop: stores to a peer may
take as long as that, and a release that must wait for them keeps its warps from their products. There the first publication of a
program goes to a word that nobody reads: they are all alike.

Numerics. fp32 accumulation; own partial in fp32, the others rounded to the dtype for the way; sum in the order own (its parts in
the order of k), r+1, r+2, …, with the bias added to the own partial, all in fp32 and rounded once. The order depends on the rank,
the sizes and the number of programs only, so repeats give the same bits.

Hazards met, kept away by the code: ``tl.debug_barrier`` in a flattened loop loses pipelining (`lang.cta_barrier`); TMA stores are
drained explicitly (`lang.drain_stores`); an integer argument that equals 1 would become a constant on one rank only, and each
that is a multiple of 16 another variant to compile: none is specialised (``do_not_specialize``), and VEC says at once that all
sizes and strides are multiples of 16.

Measured: docs/performance.md.
"""

import triton
import triton.language as tl

from .blocks import add_bias, halves, load_a, load_b, multiply_add, sixteens, store_block, vectorised
from .stream_k import PIECE, add_parts, keep_part, wait_parts
from .sync import (
    EPOCH,
    SCRATCH,
    WAIT_PARTIAL,
    finish,
    full_flag,
    is_last_program,
    peer_address,
    publish_add,
    publish_set,
    reset,
    wait,
    wait_credits,
)
from .tiles import dealt_between, lane_share, own_tile, remote_tile, share_of
from .trace import COMPUTED, CREDITS, END, ENDING, SIGNAL, STORED, WAITS, record, record_begin, record_program


@triton.jit
def slot_start(source, pitch, ld, R: tl.constexpr):
    """Elements from the start of a slot set to the slot of rank ``source`` modulo R."""
    return (source % R).to(tl.int64) * pitch * ld


@triton.jit
def add_partials(
    acc, stage, slot, pitch, row, column, rank, rows, ld, set_elements, R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """acc + the peers' partials of the block at (row, column) of this rank's chunk, in the order r+1, r+2, ….

    Not by TMA, of which one load would wait for the other: those of up to three ranks are on their way together.
    """
    r = row + tl.arange(0, BM)
    columns = column + tl.arange(0, BN)
    inside = (r[:, None] < rows) & (columns[None, :] < ld)
    at = r[:, None].to(tl.int64) * ld + columns[None, :]
    stage += slot.to(tl.int64) * set_elements
    for step in tl.static_range(1, R, 3):
        a = tl.load(stage + slot_start(rank + step, pitch, ld, R) + at, mask=inside, other=0.0)
        if step + 1 < R:
            b = tl.load(stage + slot_start(rank + step + 1, pitch, ld, R) + at, mask=inside, other=0.0)
        if step + 2 < R:
            c = tl.load(stage + slot_start(rank + step + 2, pitch, ld, R) + at, mask=inside, other=0.0)
        acc += a.to(tl.float32)
        if step + 1 < R:
            acc += b.to(tl.float32)
        if step + 2 < R:
            acc += c.to(tl.float32)
    return acc


@triton.jit
def publish_unit(ready, tile, per_unit, program, programs, TMA: tl.constexpr):
    """(A): this program has stored its tiles of the unit of ``tile``."""
    unit = tile // per_unit
    publish_add(ready + unit, dealt_between(unit * per_unit, (unit + 1) * per_unit, program, programs), TMA)


@triton.jit
def wait_partials(
    full, flags, ctl, epoch, slot, rank, rows, row, unit, number, max_flags, traced,
    R: tl.constexpr, COPY_ENGINE: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """(B): wait for the peers' partials of own tile ``number``, which begins at ``row`` of the chunk, in sub-chunk ``unit``."""
    for step in tl.static_range(1, R):
        source = (rank + step) % R
        if COPY_ENGINE:
            signal = full_flag(full, slot, source, unit, R)
            wait(signal, tl.where(row < rows, 1, 0), ctl, rank, WAIT_PARTIAL, source, R)
        else:
            signal = flags + source * max_flags + number
            wait(signal, tl.where(row < rows, epoch, 0), ctl, rank, WAIT_PARTIAL, source, R)
        record(ctl, traced, WAITS + step, R, TRACE)


@triton.jit
def finish_piece(
    value, work, first_part, last_part, lanes, bias, out_ptr, stage, slot, pitch, row, tile_column, column, rank, rows, N, ld,
    set_elements, R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TILE: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Columns ``column`` … of a tile at (row, tile_column) of the own chunk: its parts, bias and partials added, and stored.

    The partials of one rank after the other: with three under way, as in `add_partials`, registers do not suffice.
    """
    if BN > PIECE:
        left, right = halves(value, BM, BN)
        finish_piece(
            left, work, first_part, last_part, lanes, bias, out_ptr, stage, slot, pitch, row, tile_column, column, rank, rows, N,
            ld, set_elements, R, BM, BN // 2, TILE, BIAS,
        )  # fmt: skip
        finish_piece(
            right, work, first_part, last_part, lanes, bias, out_ptr, stage, slot, pitch, row, tile_column, column + BN // 2, rank,
            rows, N, ld, set_elements, R, BM, BN // 2, TILE, BIAS,
        )  # fmt: skip
    else:
        value = add_parts(value, work, first_part, last_part, lanes, column, BM, BN, TILE)
        column += tile_column
        value = add_bias(value, bias, column, N, BN, BIAS)
        r = row + tl.arange(0, BM)
        columns = column + tl.arange(0, BN)
        inside = (r[:, None] < rows) & (columns[None, :] < ld)
        for step in tl.static_range(1, R):
            at = stage + slot.to(tl.int64) * set_elements + slot_start(rank + step, pitch, ld, R)
            value += tl.load(at + r[:, None].to(tl.int64) * ld + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        store_block(out_ptr, value.to(out_ptr.dtype.element_ty), row, column, rows, N, N, BM, BN)


@triton.jit
def share_own_tiles(
    x, w, bias, out_ptr, stage, work, parts, full, flags, ctl,
    M, N, K, stride_x, stride_w, ld, set_elements, max_flags, chunk_rows, rows, pitch, rank, slot, epoch,
    unit_tiles_m, tiles_n, first, cut, lanes, traced_tiles, traced_parts,
    R: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    COPY_ENGINE: tl.constexpr, TMA: tl.constexpr, W_IS_KN: tl.constexpr, BIAS: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """This program's share of the last ``cut`` own tiles, from number ``first`` on."""
    program = tl.program_id(0)
    k_tiles = tl.cdiv(K, BK)
    lane, shares, steps, begin, end = lane_share(program, tl.num_programs(0), cut, lanes, k_tiles, 0, 0)
    for place in range(begin // k_tiles, tl.cdiv(end, k_tiles)):
        k_begin = tl.maximum(begin - place * k_tiles, 0)
        k_end = tl.minimum(end - place * k_tiles, k_tiles)
        tile = first + place * lanes + lane
        tile_m, tile_n, unit = own_tile(tile, unit_tiles_m, tiles_n, S, GROUP_M)
        row = tile_m * BM
        traced = tl.where(k_begin > 0, traced_parts + program, traced_tiles + tile)
        record_begin(ctl, traced, program, R, TRACE)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(k_begin, k_end):
            a = load_a(x, rank * chunk_rows + row, k * BK, M, K, stride_x, BM, BK, TMA)
            b = load_b(w, tile_n * BN, k * BK, N, K, stride_w, BN, BK, TMA, W_IS_KN)
            acc = multiply_add(a, b, acc)
        record(ctl, traced, COMPUTED, R, TRACE)
        if k_begin > 0:
            keep_part(acc, work, program, 0, BM, BN, BN)
            publish_set(parts + program, epoch, TMA)  # (E)
        else:
            last = share_of((place + 1) * k_tiles - 1, shares, steps) * lanes + lane
            wait_partials(
                full, flags, ctl, epoch, slot, rank, rows, row, unit, tile_m * tiles_n + tile_n, max_flags, traced,
                R, COPY_ENGINE, TRACE,
            )  # fmt: skip
            wait_parts(parts, program + lanes, last, lanes, epoch, ctl, rank, R)  # (E)
            finish_piece(
                acc, work, program + lanes, last, lanes, bias, out_ptr, stage, slot, pitch, row, tile_n * BN, 0, rank, rows, N, ld,
                set_elements, R, BM, BN, BN, BIAS,
            )  # fmt: skip
        record(ctl, traced, STORED, R, TRACE)


#: Steps of a main loop in which the store of a tile to this GPU's memory is expected to complete; the publication waits for it.
PUBLISH_AFTER = tl.constexpr(6)

_NUMBERS = ["M", "N", "K", "stride_x", "stride_w", "ld", "set_elements", "max_flags"]
_NUMBERS += ["chunk_rows", "rows", "pitch", "cut", "lanes", "rank", "slot"]


@triton.jit(do_not_specialize=_NUMBERS)
def gemm_rs_kernel(
    x, w, bias, out, out_ptr, local, stage, ready, work, parts, full, flags, ctl,
    M, N, K, stride_x, stride_w, ld, set_elements, max_flags,
    chunk_rows, rows, pitch, cut, lanes, rank, slot,
    R: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr,
    COPY_ENGINE: tl.constexpr, TMA: tl.constexpr, TMA_OUT: tl.constexpr, VEC: tl.constexpr, W_IS_KN: tl.constexpr,
    BIAS: tl.constexpr, SHARED: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """One call. With TMA, x, w, local (and out with TMA_OUT) are descriptors, else pointers; sizes in elements.

    ``rows``: of this rank's chunk; ``max_flags``: flags a source has; ``set_elements``: from one slot set to the other. SHARED:
    ``cut`` is not 0. With TRACE it writes down what happens when (`trace`).
    """
    N, K, stride_x, stride_w = vectorised(N, K, stride_x, stride_w, VEC)
    ld = sixteens(ld)
    set_elements = sixteens(set_elements)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    epoch = tl.load(ctl + EPOCH) + 1
    if not COPY_ENGINE:
        previous = ctl + SCRATCH
        slot = (epoch & 1).to(tl.int32)
    unit_tiles_m = pitch // (BM * S)
    tiles_n = tl.cdiv(N, BN)
    per_unit = unit_tiles_m * tiles_n
    per_chunk = per_unit * S
    k_tiles = tl.cdiv(K, BK)
    dtype = stage.dtype.element_ty
    me = per_chunk * R + program  # the row of this program in what is traced
    record_program(ctl, me, R, TRACE)
    # Copies are queued behind each other, so none begins before the first unit is counted, and one program of that suffices
    if (not COPY_ENGINE) | (program == tl.minimum(programs, per_unit) - 1):
        wait_credits(ctl, slot, rank, R)  # (C)
    record(ctl, me, CREDITS, R, TRACE)

    # ---- the other ranks' chunks ------------------------------------------------------------------------------------
    remote_tiles = per_chunk * (R - 1)
    publish_at = tl.minimum(k_tiles, PUBLISH_AFTER) - 1
    done = program - programs
    for tile in tl.range(program, remote_tiles, programs, flatten=True):
        owner, tile_m, tile_n, unit = remote_tile(tile, rank, unit_tiles_m, tiles_n, R, S, GROUP_M, not COPY_ENGINE)
        row = owner * chunk_rows + tile_m * BM
        record_begin(ctl, tile, program, R, TRACE)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(k_tiles):
            a = load_a(x, row, k * BK, M, K, stride_x, BM, BK, TMA)
            b = load_b(w, tile_n * BN, k * BK, N, K, stride_w, BN, BK, TMA, W_IS_KN)
            acc = multiply_add(a, b, acc)
            if COPY_ENGINE:
                if k == publish_at:
                    if (done >= 0) & (done // per_unit != (done + programs) // per_unit):
                        publish_unit(ready, done, per_unit, program, programs, TMA)  # (A)
                        record(ctl, done, SIGNAL, R, TRACE)
        # computed again rather than carried: the pipelined loop runs ahead of the epilogue
        done += programs
        owner, tile_m, tile_n, unit = remote_tile(done, rank, unit_tiles_m, tiles_n, R, S, GROUP_M, not COPY_ENGINE)
        record(ctl, done, COMPUTED, R, TRACE)
        if COPY_ENGINE:
            if TMA:
                local.store([owner * pitch + tile_m * BM, tile_n * BN], acc.to(dtype))
            else:
                store_block(local, acc.to(dtype), owner * pitch + tile_m * BM, tile_n * BN, R * pitch, ld, ld, BM, BN)
        else:
            publish_set(previous, epoch, False)  # (B)
            record(ctl, done - programs, SIGNAL, R, TRACE)
            there = peer_address(stage, ctl, rank, owner) + slot.to(tl.int64) * set_elements + slot_start(rank, pitch, ld, R)
            valid = tl.minimum(chunk_rows, M - owner * chunk_rows)
            store_block(there, acc.to(dtype), tile_m * BM, tile_n * BN, valid, ld, ld, BM, BN)
            previous = peer_address(flags, ctl, rank, owner) + rank * max_flags + tile_m * tiles_n + tile_n
        record(ctl, done, STORED, R, TRACE)
    if R > 1:
        if COPY_ENGINE:
            if done >= 0:
                publish_unit(ready, done, per_unit, program, programs, TMA)  # (A)
                record(ctl, done, SIGNAL, R, TRACE)
        else:
            publish_set(previous, epoch, False)  # (B)
            record(ctl, done, SIGNAL, R, TRACE)

    # ---- the own chunk ----------------------------------------------------------------------------------------------
    own_tiles = tl.where(rows > 0, per_chunk, 0)
    if SHARED:
        own_tiles -= cut
    first = (program - remote_tiles % programs + programs) % programs
    done = first - programs
    for tile in tl.range(first, own_tiles, programs, flatten=True):
        tile_m, tile_n, unit = own_tile(tile, unit_tiles_m, tiles_n, S, GROUP_M)
        record_begin(ctl, remote_tiles + tile, program, R, TRACE)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(k_tiles):
            a = load_a(x, rank * chunk_rows + tile_m * BM, k * BK, M, K, stride_x, BM, BK, TMA)
            b = load_b(w, tile_n * BN, k * BK, N, K, stride_w, BN, BK, TMA, W_IS_KN)
            acc = multiply_add(a, b, acc)
        done += programs
        tile_m, tile_n, unit = own_tile(done, unit_tiles_m, tiles_n, S, GROUP_M)
        row = tile_m * BM
        column = tile_n * BN
        record(ctl, remote_tiles + done, COMPUTED, R, TRACE)
        wait_partials(
            full, flags, ctl, epoch, slot, rank, rows, row, unit, tile_m * tiles_n + tile_n, max_flags, remote_tiles + done,
            R, COPY_ENGINE, TRACE,
        )  # fmt: skip
        # by halves, so that accumulator and partial fit in registers together
        left, right = halves(acc, BM, BN)
        HALF: tl.constexpr = BN // 2
        left = add_bias(left, bias, column, N, HALF, BIAS)
        left = add_partials(left, stage, slot, pitch, row, column, rank, rows, ld, set_elements, R, BM, HALF)
        if TMA_OUT:
            out.store([row, column], left.to(dtype))
        else:
            store_block(out, left.to(dtype), row, column, rows, N, N, BM, HALF)
        column += HALF
        right = add_bias(right, bias, column, N, HALF, BIAS)
        right = add_partials(right, stage, slot, pitch, row, column, rank, rows, ld, set_elements, R, BM, HALF)
        if TMA_OUT:
            out.store([row, column], right.to(dtype))
        else:
            store_block(out, right.to(dtype), row, column, rows, N, N, BM, HALF)
        record(ctl, remote_tiles + done, STORED, R, TRACE)

    if SHARED:
        share_own_tiles(
            x, w, bias, out_ptr, stage, work, parts, full, flags, ctl,
            M, N, K, stride_x, stride_w, ld, set_elements, max_flags, chunk_rows, rows, pitch, rank, slot, epoch,
            unit_tiles_m, tiles_n, own_tiles, cut, lanes, remote_tiles, per_chunk * R + programs,
            R, S, BM, BN, BK, GROUP_M, COPY_ENGINE, TMA, W_IS_KN, BIAS, TRACE,
        )  # fmt: skip

    # ---- the end of the call ----------------------------------------------------------------------------------------
    me = tl.cdiv(pitch, BM) * tiles_n * R + tl.program_id(0)  # as above, and not kept since
    record(ctl, me, ENDING, R, TRACE)
    if is_last_program(ctl, TMA):
        if COPY_ENGINE:
            reset(full, slot, R)
        if COPY_ENGINE or TRACE:  # where registers are too short to keep it all the way here
            epoch = tl.load(ctl + EPOCH) + 1
            if not COPY_ENGINE:
                slot = (epoch & 1).to(tl.int32)
        finish(ctl, slot, rank, epoch, R)  # (D)
    record(ctl, me, END, R, TRACE)

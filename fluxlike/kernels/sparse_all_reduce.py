"""All-reduce of rows of a sparse table. This docstring is the design record.

What it computes: each rank s brings entries (id, row of D elements), in any order, ids more than once. On every rank, for each id
that any rank has, in ascending order: y[id] = Σ_s wire(Σ of the entries of rank s with that id), sums in fp32, in the order of the
entries and of the ranks, rounded once to the dtype of y. ``wire`` rounds to the dtype that travels, the own part, too.

Before the launch all ranks know the ids of all (`ops.sparse_index`): a *slot* is the place of an id among the distinct ones of a
rank, its *union row* the place among those of all ranks. So values go straight to where they are read, and only once.

Memory on the heap of each rank: *staging*, for each source rank ``room`` rows of PITCH elements of the wire's dtype, row i for
its slot i. Flags, one for each K slots (a *chunk*) of a source: R rows for (A), then R rows for (B), CHUNKS in each.

A slot of more than HOT entries is *hot*. Its sum must be made one entry after the other, and one program can keep only so many
loads in flight: in front of the launch `sparse_sums_kernel` adds up the hot slots, each by as many programs as it takes blocks of
few columns, into ``sums``. As each of them has more than HOT entries, row begin // HOT is its own. Where ids are drawn by Zipf's
law, the first ones share a chunk, whose program made all others wait for 3 ms at 50 000 ids a rank.

Programs are of three kinds, the first ones first in the launch:

push     takes chunks of the own slots: sums the entries of each, rounds, stores the row into its staging on all ranks that read
         it, itself too; then sets the chunk's flag there (A).
reduce   OWNED only: an id that c ≥ 2 ranks have is owned by one of those, by turns. Takes chunks of own slots; of the owned ones it
         waits for the rows of the others (A), adds them, stores the result into y and into its own staging at the peers; then
         sets the chunk's second flag there (B).
drain    takes units of U union rows: waits for all chunks that they need (A, B), adds the rows of all ranks, and stores to y. With
         OWNED each row of y is one row of staging, so it is copied, by asynchronous loads of which several are under way.

Without OWNED every rank adds all rows itself: c rows travel to R - 1 ranks. With it c - 1 travel to the owner and R - 1 away, so
no value crosses the wire more than once to an owner and once back, and an id of one rank goes to each other once, as it must.

Protocol and proofs

* (A), (B): ``_publish`` (release) of the flag at every rank, behind the program's stores; ``wait`` (acquire) in front of the loads.
  Every chunk in which a rank has a slot gets its flags, whether or not a row of it travels; no other chunk is waited for.
* A program waits only for programs of the kinds before its own, and pushers wait for nobody. Programs start in the order of
  their numbers, so no launch needs to have all of them running at once.
* Flags hold numbers of calls, which only grow; these come from ``epochs``, as in `exchange`.
* Staging has one set. Between the launches of two calls, each rank has exchanged ids, by a release and an acquire of each rank with
  each other, behind its earlier launch: who has the ids of a call knows that all are through the call before, and may write.
* Staging of slot i of source s at rank r is written by s only: by its pushers, or if it owns the id by its reducers at the peers
  and by its pushers at itself. So there is one writer for each row and call.
* x and y are different memory, y's rows are written by one program each.

Sizes: a chunk of 16 rows of 8 KB is 128 KB a peer, so that its release, a trip over the wire, is little beside its stores; a unit
of 64 rows has a few chunks to wait for. With owners a rank gets c - 1 rows, or one, of each id, never more than a ring all-reduce
of the whole table, so there is no dense way beside this one.

Measured: docs/sparse_all_reduce.md.
"""

import triton
import triton.language as tl

from .elements import AVG, advance, average
from .lang import drain_stores
from .sparse_index import NONE, NOWHERE
from .sync import WAIT_PARTIAL, WAIT_RESULT, at_peer, peer_address, wait

#: Entries of one id that are loaded together: their sum is made one after the other, as its order is given.
AHEAD = tl.constexpr(4)
#: How many entries a slot has that is not hot. Of a hot one, entries that are added in a turn, and turns whose entries, and then
#: their values, are on their way, by asynchronous copies: ptxas keeps no more than four plain loads under way, to spare registers.
HOT = tl.constexpr(32)
HOT_TURN = tl.constexpr(4)
HOT_STAGES = tl.constexpr(12)
#: Tiles of rows that are copied which are under way.
COPY_STAGES = tl.constexpr(3)
_NO_SLOT = tl.constexpr(2**31 - 1)


@triton.jit
def _row_of(rows, columns, D: tl.constexpr, BC: tl.constexpr):
    """fp32: the elements at ``rows`` + ``columns``. Unmasked where the columns are whole blocks; see `sum_entries`."""
    if D % BC == 0:
        return tl.load(rows + columns).to(tl.float32)
    else:
        return tl.load(rows + columns, mask=columns < D, other=0.0).to(tl.float32)


@triton.jit
def _within(rows, columns, D: tl.constexpr, BC: tl.constexpr):
    """The mask [rows, columns] of a tile; of its rows only where the columns are whole blocks."""
    if D % BC == 0:
        return tl.broadcast_to(rows, (rows.shape[0], BC))
    else:
        return rows & (columns < D)[None, :]


@triton.jit
def sum_entries(values, order, begin, end, columns, D: tl.constexpr, BC: tl.constexpr):
    """fp32 [rows, columns]: sums of the entries order[begin … end - 1] of each row, in that order; 0 where there are none.

    There is an entry, of some slot. Behind its last one a row loads that again, and does not add it: ptxas puts loads under a mask
    one behind the other, each with its latency, and those without it together.
    """
    last = tl.maximum(end - 1, 0)
    entry = tl.load(order + tl.minimum(begin, last))
    total = _row_of(values + entry[:, None] * D, columns[None, :], D, BC)
    total = tl.where((begin < end)[:, None], total, 0.0)
    most = tl.max(end - begin)
    for turn in range(1, most, AHEAD):
        for step in tl.static_range(AHEAD):
            entry = tl.load(order + tl.minimum(begin + turn + step, last))
            part = _row_of(values + entry[:, None] * D, columns[None, :], D, BC)
            total = tl.where(begin[:, None] + turn + step < end[:, None], total + part, total)
    return total


@triton.jit
def _sum_of_one(values, order, begin, end, columns, D: tl.constexpr, BC: tl.constexpr):
    """fp32 [columns]: the sum of the entries order[begin … end - 1], of which there is one at least, in that order."""
    total = _row_of(values + tl.load(order + begin) * D, columns, D, BC)
    for turn in tl.range(begin + 1, end, HOT_TURN, num_stages=HOT_STAGES):
        for step in tl.static_range(HOT_TURN):
            entry = tl.load(order + tl.minimum(turn + step, end - 1))
            part = _row_of(values + entry * D, columns, D, BC)
            total = tl.where(turn + step < end, total + part, total)
    return total


@triton.jit
def sparse_sums_kernel(
    values, order, starts, meta, sums, D: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr
):  # fmt: skip
    """sums [entries / HOT, D]: of each hot slot the sum of its entries, in row begin // HOT. Programs: a multiple of D / BC."""
    parts = tl.cdiv(D, BC)
    columns = tl.program_id(0) % parts * BC + tl.arange(0, BC)
    group, groups = tl.program_id(0) // parts, tl.num_programs(0) // parts
    count = tl.load(meta + 1).to(tl.int32)
    lane = tl.arange(0, BS)
    for start in range(0, count, groups * BS):
        slot = start + group + groups * lane  # hot slots that follow each other go to different programs
        begin = tl.load(starts + slot, mask=slot < count, other=0)
        end = tl.load(starts + slot + 1, mask=slot < count, other=0)
        left = (end - begin > HOT).to(tl.int32)
        while tl.max(left) > 0:
            at = tl.min(tl.where(left > 0, lane, BS))
            first, last = tl.sum(tl.where(lane == at, begin, 0)), tl.sum(tl.where(lane == at, end, 0))
            total = _sum_of_one(values, order, first, last, columns, D, BC)
            tl.store(sums + (first // HOT).to(tl.int64) * D + columns, total, mask=columns < D)
            left = tl.where(lane == at, 0, left)


@triton.jit
def _publish(flag, value, ctl, rank, R: tl.constexpr, S: tl.constexpr):
    """Release: what this program stored so far is complete, then ``flag`` of every rank, this one too, is ``value``."""
    drain_stores(False)
    peer = tl.arange(0, S)
    theirs = at_peer(flag, ctl, rank, tl.where(peer < R, peer, rank))
    tl.atomic_xchg(theirs, tl.zeros((S,), tl.int64) + value, mask=peer < R, sem="release", scope="sys")


@triton.jit
def _wait_chunks(flags, slots, epoch, ctl, rank, what: tl.constexpr, source, R: tl.constexpr, K: tl.constexpr):
    """Acquire the chunks of these slots of ``source``, which follow each other; -1 for none.

    The first wait is there in any case, so that the lint sees one in front of the loads; without slots it is for 0.
    """
    last = tl.max(slots)
    first = tl.minimum(tl.min(tl.where(slots >= 0, slots, _NO_SLOT)), tl.maximum(last, 0)) // K
    wait(flags + first, tl.where(last >= 0, epoch, 0), ctl, rank, what, source, R)
    for chunk in range(first + 1, tl.maximum(last, 0) // K + 1):
        wait(flags + chunk, epoch, ctl, rank, what, source, R)


@triton.jit
def _add(total, begun, staging, slots, reads, columns, PITCH: tl.constexpr):
    """``total`` with the staged rows of one source, where it ``reads`` them, and whether anything was added so far."""
    rows = staging + slots.to(tl.int64)[:, None] * PITCH + columns[None, :]
    part = tl.load(rows, mask=reads[:, None] & (columns < PITCH)[None, :], other=0.0).to(tl.float32)
    total = tl.where(reads[:, None], tl.where(begun[:, None], total + part, part), total)
    return total, begun | reads


@triton.jit
def _push(
    values, order, starts, sums, targets, staging, flags, ctl, epoch, count, room, rank, program, pushers,
    R: tl.constexpr, S: tl.constexpr, D: tl.constexpr, PITCH: tl.constexpr, K: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    mine = staging + rank.to(tl.int64) * room * PITCH
    for chunk in range(program, tl.cdiv(count, K), pushers):
        for tile in range(0, K, BR):
            slot = chunk * K + tile + tl.arange(0, BR)
            there = slot < count
            begin = tl.load(starts + slot, mask=there, other=0)
            end = tl.load(starts + slot + 1, mask=there, other=0)
            hot = end - begin > HOT
            target = tl.load(targets + slot, mask=there, other=-1)
            for column in range(0, PITCH, BC):
                columns = column + tl.arange(0, BC)
                row = sum_entries(values, order, begin, tl.where(hot, begin, end), columns, D, BC)
                if tl.max(hot.to(tl.int32)) > 0:
                    made = sums + (begin // HOT).to(tl.int64)[:, None] * D + columns[None, :]
                    mask = hot[:, None] & (columns < D)[None, :]
                    row = tl.where(mask, tl.load(made, mask=mask, other=0.0), row)
                row = row.to(staging.dtype.element_ty)
                at = slot.to(tl.int64)[:, None] * PITCH + columns[None, :]
                for step in tl.static_range(R):
                    peer = (rank + step) % R
                    goes = there & ((target < 0) | (target == peer))
                    mask = goes[:, None] & (columns < PITCH)[None, :]
                    tl.store(peer_address(mine, ctl, rank, peer) + at, row, mask=mask)
        _publish(flags + rank * CHUNKS + chunk, epoch, ctl, rank, R, S)  # (A)


@triton.jit
def _reduce(
    y, place, slots, owners, staging, flags, ctl, epoch, count, room, rank, program, reducers,
    R: tl.constexpr, S: tl.constexpr, D: tl.constexpr, PITCH: tl.constexpr, K: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    CHUNKS: tl.constexpr, OP: tl.constexpr,
):  # fmt: skip
    source_rows = room.to(tl.int64) * PITCH
    mine = staging + rank.to(tl.int64) * source_rows
    for chunk in range(program, tl.cdiv(count, K), reducers):
        slot = chunk * K + tl.arange(0, K)
        row = tl.load(place + slot, mask=slot < count, other=0)
        owned = (slot < count) & (tl.load(owners + row, mask=slot < count, other=-1) == rank)
        if tl.max(owned.to(tl.int32)) > 0:
            for peer in range(R):
                awaited = tl.load(slots + row * R + peer, mask=owned, other=-1)
                _wait_chunks(flags + peer * CHUNKS, awaited, epoch, ctl, rank, WAIT_PARTIAL, peer, R, K)  # (A)
            for tile in range(0, K, BR):
                slot_ = chunk * K + tile + tl.arange(0, BR)
                row_ = tl.load(place + slot_, mask=slot_ < count, other=0)
                owned_ = (slot_ < count) & (tl.load(owners + row_, mask=slot_ < count, other=-1) == rank)
                for column in range(0, PITCH, BC):
                    columns = column + tl.arange(0, BC)
                    total = tl.zeros((BR, BC), tl.float32)
                    begun = slot_ < 0
                    for source in tl.static_range(R):
                        theirs = tl.load(slots + row_ * R + source, mask=owned_, other=-1)
                        total, begun = _add(total, begun, staging + source * source_rows, theirs, theirs >= 0, columns, PITCH)
                    if OP == AVG:
                        total = average(total, R)
                    result = total.to(y.dtype.element_ty)
                    at = slot_.to(tl.int64)[:, None] * PITCH + columns[None, :]
                    mask = owned_[:, None] & (columns < PITCH)[None, :]
                    for step in tl.static_range(1, R):
                        tl.store(peer_address(mine, ctl, rank, (rank + step) % R) + at, result, mask=mask)
                    there = row_.to(tl.int64)[:, None] * D + columns[None, :]
                    tl.store(y + there, result, mask=owned_[:, None] & (columns < D)[None, :])
        _publish(flags + (R + rank) * CHUNKS + chunk, epoch, ctl, rank, R, S)  # (B)


@triton.jit
def _copy_rows(
    y, staged, owners, staging, start, union, rows,
    R: tl.constexpr, D: tl.constexpr, PITCH: tl.constexpr, U: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, OP: tl.constexpr,
):  # fmt: skip
    """The U rows of y from ``start`` on, but those that this rank owns; rows behind the union become 0."""
    for column in range(0, D, BC):
        columns = column + tl.arange(0, BC)
        for tile in tl.range(0, U, BR, num_stages=COPY_STAGES):
            row = start + tile + tl.arange(0, BR)
            at = tl.load(staged + row, mask=row < union, other=NONE)
            here = (row < rows) & (at != NOWHERE)
            there = tl.maximum(at, 0).to(tl.int64)[:, None] * PITCH + columns[None, :]
            block = tl.load(staging + there, mask=_within((at >= 0)[:, None], columns, D, BC), other=0.0)
            if OP == AVG:  # an owner has divided its sums
                owner = tl.load(owners + row, mask=row < union, other=0)
                block = tl.where((owner < 0)[:, None], average(block.to(tl.float32), R), block.to(tl.float32))
            to = y + row.to(tl.int64)[:, None] * D + columns[None, :]
            tl.store(to, block.to(y.dtype.element_ty), mask=_within(here[:, None], columns, D, BC))


@triton.jit
def _drain(
    y, slots, owners, staged, staging, flags, ctl, epoch, union, rows, room, rank, program, drainers,
    R: tl.constexpr, D: tl.constexpr, PITCH: tl.constexpr, K: tl.constexpr, U: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    CHUNKS: tl.constexpr, OWNED: tl.constexpr, OP: tl.constexpr,
):  # fmt: skip
    source_rows = room.to(tl.int64) * PITCH
    for unit in range(program, tl.cdiv(rows, U), drainers):
        row = unit * U + tl.arange(0, U)
        owner = tl.load(owners + row, mask=row < union, other=-1)
        for peer in range(R):
            slot = tl.load(slots + row * R + peer, mask=row < union, other=-1)
            direct = tl.where(owner < 0, slot, -1)
            _wait_chunks(flags + peer * CHUNKS, direct, epoch, ctl, rank, WAIT_PARTIAL, peer, R, K)  # (A)
            if OWNED:
                reduced = tl.where((owner == peer) & (owner != rank), slot, -1)
                _wait_chunks(flags + (R + peer) * CHUNKS, reduced, epoch, ctl, rank, WAIT_RESULT, peer, R, K)  # (B)
        if OWNED:
            _copy_rows(y, staged, owners, staging, unit * U, union, rows, R, D, PITCH, U, BR, BC, OP)
        else:
            for tile in range(0, U, BR):
                row_ = unit * U + tile + tl.arange(0, BR)
                there = row_ < union
                for column in range(0, D, BC):
                    columns = column + tl.arange(0, BC)
                    total = tl.zeros((BR, BC), tl.float32)
                    begun = row_ < 0
                    for source in tl.static_range(R):
                        slot_ = tl.load(slots + row_ * R + source, mask=there, other=-1)
                        total, begun = _add(total, begun, staging + source * source_rows, slot_, slot_ >= 0, columns, PITCH)
                    if OP == AVG:
                        total = average(total, R)
                    to = y + row_.to(tl.int64)[:, None] * D + columns[None, :]
                    tl.store(to, total.to(y.dtype.element_ty), mask=_within((row_ < rows)[:, None], columns, D, BC))


@triton.jit(do_not_specialize=["rows", "room", "rank", "pushers", "reducers"])
def sparse_all_reduce_kernel(
    values, order, starts, sums, targets, place, slots, owners, staged, meta, y, staging, flags, epochs, ctl,
    rows, room, rank, pushers, reducers,
    R: tl.constexpr, S: tl.constexpr, D: tl.constexpr, PITCH: tl.constexpr, K: tl.constexpr, U: tl.constexpr, BR: tl.constexpr,
    BC: tl.constexpr, CHUNKS: tl.constexpr, OWNED: tl.constexpr, OP: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """One call over ``values`` [entries, D] and the ids in ``order``; ``y`` [rows, D].

    order [entries], starts [capacity + 1]: the entries of slot i are order[starts[i] … starts[i + 1] - 1]. sums: see
    `sparse_sums_kernel`. targets [capacity]: the rank that reads the row of an own slot, -1 if all do. place [capacity]: union rows
    of the own slots. slots [union, R]: slots of the union rows, -1 where a rank has none. owners [union]: the rank that adds a row
    up, -1 if all do. staged [union], with OWNED: the row of staging that a row of y is, NOWHERE if this rank adds it up.
    meta: number of union rows, of own slots. ``rows``: of y, if there are more than union rows; those behind become 0.
    ``room``: rows of staging for each source. K slots a chunk, U union rows a unit, BR × BC elements a tile; BR divides K and U.
    CHUNKS: flags of a source. S: R rounded up to a power of two. The first ``pushers`` programs push, the next ``reducers``
    reduce. MOST: programs that a launch may have.
    """
    program = tl.program_id(0)
    epoch = tl.load(epochs + program) + 1
    union = tl.load(meta).to(tl.int32)
    count = tl.load(meta + 1).to(tl.int32)
    if program < pushers:
        _push(
            values, order, starts, sums, targets, staging, flags, ctl, epoch, count, room, rank, program, pushers,
            R, S, D, PITCH, K, BR, BC, CHUNKS,
        )  # fmt: skip
    elif program < pushers + reducers:
        if OWNED:
            _reduce(
                y, place, slots, owners, staging, flags, ctl, epoch, count, room, rank, program - pushers, reducers,
                R, S, D, PITCH, K, BR, BC, CHUNKS, OP,
            )  # fmt: skip
    else:
        first = pushers + reducers
        _drain(
            y, slots, owners, staged, staging, flags, ctl, epoch, union, tl.maximum(rows, union), room, rank, program - first,
            tl.num_programs(0) - first, R, D, PITCH, K, U, BR, BC, CHUNKS, OWNED, OP,
        )  # fmt: skip
    advance(epochs, ctl, epoch, MOST)

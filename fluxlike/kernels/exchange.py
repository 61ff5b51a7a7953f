"""Exchange of parts: reduce-scatter, all-gather, both (all-reduce), or those of one rank (reduce, broadcast). The design record.

Each rank owns a part of the data, of equally many blocks; ROOTED: all of it belongs to one rank, the root. What is done with it:

SCATTER  Each rank pushes the part of each owner to it; the owner waits for all of them and reduces them in fp32, in the order of
         the ranks, rounded once. So the bits are the same on every repeat, and by every algorithm but trees.
GATHER   Each owner pushes its part, as it is or as SCATTER has made it, to all ranks, which wait for all parts.

reduce_scatter is SCATTER, all_gather GATHER, all_reduce is both; reduce is SCATTER and broadcast GATHER, ROOTED (`relay` has the
same for large tensors of several ranks).

words    Blocks are of B `words` of 32 bits, which are their own flags. Each trip is the data's alone. Floats only.
bulk     Blocks are of B elements, and have a flag: the number of the last call for which the block has come. Each trip is the
         data's and then the signal's, of any dtype.

Blocks go over as wholes; behind the end of a part they hold zeros. A program takes blocks program, program + P, … of each part,
where P programs are launched. In bulk it pushes all of them before it waits for one. Words it does in turns: push one block of
each part, reduce the one that it pushed `AHEAD` turns before, take the result of the one before that. So results go one way while
parts still go the other, and no copy of results is left at the end: on two H200s 32 MB of all_reduce take 100 µs, and 114 one
after the other (docs/measured/2026-11-26-exchange.md).

Memory, on the heap of each rank: two sets, by the parity of the call, of ROWS rows [capacity] of blocks. SCATTER takes from each
other rank into a row of its own; GATHER from each other owner into a row behind those, ROOTED into one row. In bulk ranks have rows
for themselves, too, which nobody writes: without these the kernel spills for lists on four ranks. There is such memory for words
and for elements; the flags, as they only grow, have no sets, but a row for each rank that writes them, ROOTED, too: of two roots,
one after the other, the first one's flag may come behind the second one's, and would set it back.

Of one tensor, the part of rank d begins at d · ``chunk``. A list (of all_reduce) has a ``table`` of int64: addresses of the inputs
[T], of the results [T], their elements [T], then for each block the number of its tensor [G] and its first element there [G]. So
many small tensors take one launch, and are not copied together.

Protocol and proofs

* Memory for words is empty when a call begins to write there: the context has made it so, and every word that comes is read and
  then emptied by the call that it is for. So a reader needs nothing but the word. In bulk ``publish_set…`` (release) of a block's
  flags, behind its stores, pairs with ``wait`` or ``pull`` (acquire) of it, in front of its loads: (A) parts, (B) results.
* Numbers come from ``epochs``, one for each program that a launch may have, which are all equal between launches: a program reads
  its own, and at its end advances its own and those that are P, 2P, … further on. So no program reads what another of the same
  launch writes, and no atomic is needed.
* A word, or a block, may be overwritten when its reader is done, and has emptied it. In each call every rank takes at least one
  block from every other, as each part has one, if only of zeros. So when rank r is through call n, each peer has begun call n, and
  has ended call n-1, as its launches follow each other. Call n+1 writes where call n-1 did: free.
* ROOTED, a rank does not hear of all others in each call, so there are credits: (C) in front of its pushes a rank waits until
  their readers have ended the call that used this set before, as ``finish`` of the last program there says. Numbers are the
  control block's, and the last program advances them.
* The layout of blocks may change from call to call, as what a call has used is empty at its end, and the rest was.
* Programs wait for programs of the same index on other ranks only, in a turn for what those have pushed in an earlier one, in front
  of their own wait there. So no launch needs to have all its programs running at once. (C) waits for earlier launches.
* x and y may be the same: a program writes only blocks that it has sent before.
"""

import triton
import triton.language as tl

from .elements import AVG, advance, average, combine, load_payload, place_in_part, reduce_words, row_from, row_of, store_payload
from .sync import (
    CONSUMED,
    EPOCH,
    LAST_USE,
    WAIT_CREDIT,
    WAIT_PARTIAL,
    WAIT_RESULT,
    finish,
    head_of,
    is_last_program,
    peer_address,
    publish_set,
    publish_set_to_all,
    pull,
    wait,
)
from .words import put, receive, receive_from, sendable


@triton.jit
def owner_at(step: tl.constexpr, rank, root, R: tl.constexpr, ROOTED: tl.constexpr):
    """The owner of another part: in step 1 … R-1 one rank each, or, ROOTED, in step 1 the root."""
    if ROOTED:
        owner = root
    else:
        owner = (rank + step) % R
    return owner


@triton.jit
def share(rank, part, root, ROOTED: tl.constexpr):
    """Blocks of this rank's part, and of each other owner's that is not this rank."""
    own, others = part, part
    if ROOTED:
        own = tl.where(rank == root, part, 0)
        others = part - own
    return own, others


@triton.jit
def wait_readers(ctl, slot, rank, root, R: tl.constexpr, SCATTER: tl.constexpr):
    """Wait until those to whom this rank pushes have ended the call that used this set before: (C). ROOTED only."""
    if (rank == root) != SCATTER:
        last = tl.load(ctl + LAST_USE + slot)
        for step in tl.static_range(1, 2 if SCATTER else R):
            peer = owner_at(step, rank, root, R, SCATTER)
            wait(head_of(ctl, rank) + CONSUMED + peer, last, ctl, rank, WAIT_CREDIT, peer, R)


@triton.jit
def begin(epochs, ctl, rank, root, R: tl.constexpr, SCATTER: tl.constexpr, ROOTED: tl.constexpr):
    """The number of this call, once its set may be written."""
    if ROOTED:
        epoch = tl.load(ctl + EPOCH) + 1
        wait_readers(ctl, (epoch & 1).to(tl.int32), rank, root, R, SCATTER)  # (C)
    else:
        epoch = tl.load(epochs + tl.program_id(0)) + 1
    return epoch


@triton.jit
def end(epochs, ctl, rank, epoch, R: tl.constexpr, ROOTED: tl.constexpr, MOST: tl.constexpr):
    """The end of the call for this program."""
    if ROOTED:
        if is_last_program(ctl, False):
            finish(ctl, (epoch & 1).to(tl.int32), rank, epoch, R)  # (C)
    else:
        advance(epochs, ctl, epoch, MOST)


@triton.jit
def of_rank(slots, row, own, source: tl.constexpr, rank, B: tl.constexpr):
    """A block of rank ``source`` in fp32: what it has sent, or of this rank ``own``."""
    at = tl.arange(0, B)
    sent = tl.load(tl.multiple_of(slots + source * row + at, 16), mask=(at >= 0) & (source != rank), other=0.0)
    return tl.where(source == rank, own, sent.to(tl.float32))


#: Turns between what a program pushes and what it waits for in exchange. With many blocks a trip takes less than one; two gained
#: nothing on two H200s.
AHEAD = tl.constexpr(1)

_NUMBERS = ["tensors", "n", "chunk", "width", "part", "root", "capacity", "offset", "rank"]


@triton.jit(do_not_specialize=_NUMBERS)
def exchange_words_kernel(
    x, y, table, epochs, ctl, tensors, n, chunk, width, part, root, capacity, offset, rank,
    R: tl.constexpr, S: tl.constexpr, SCATTER: tl.constexpr, GATHER: tl.constexpr, ROOTED: tl.constexpr, OP: tl.constexpr,
    WIDTH: tl.constexpr, B: tl.constexpr, MANY: tl.constexpr, VEC: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """One call over parts of ``part`` blocks. x is all parts if SCATTER, else the own one; y all if GATHER, else the own one.

    Of one tensor, a part has ``width`` elements from owner · ``chunk`` on, and the last ones end at ``n``; of a list, x and y only
    say the dtype. ``capacity``: blocks of a row. S: R rounded up to a power of two. WIDTH: elements of a word. MANY: a list; VEC:
    see `elements.place`. MOST: programs that a launch may have.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    epoch = begin(epochs, ctl, rank, root, R, SCATTER, ROOTED)
    row = capacity.to(tl.int64) * B
    results: tl.constexpr = R - 1 if SCATTER else 0
    steps: tl.constexpr = 2 if ROOTED else R
    own, others = share(rank, part, root, ROOTED)
    rows: tl.constexpr = results + ((1 if ROOTED else R - 1) if GATHER else 0)
    here = row_of(ctl, rank, offset, epoch, 0, row, rows)
    reduced: tl.constexpr = AHEAD if SCATTER else 0
    taken: tl.constexpr = reduced + AHEAD
    turns = tl.cdiv(tl.maximum(tl.maximum(own, others) - program, 0), programs)
    for turn in range(turns + (taken if GATHER else reduced)):
        if SCATTER:
            block = program + turn * programs
            if block < others:
                for step in tl.static_range(1, steps):
                    owner = owner_at(step, rank, root, R, ROOTED)
                    there = row_of(ctl, owner, offset, epoch, row_from(rank, owner), row, rows)
                    source, left = place_in_part(
                        x, table, tensors, part, 0, n, chunk, width, owner, block, R, False, B * WIDTH, MANY, VEC
                    )  # fmt: skip
                    put(there + block * B, sendable(load_payload(source, left, WIDTH, B)), B)
        block = program + (turn - reduced) * programs
        if (block >= program) & (block < own):
            source, left = place_in_part(
                x, table, tensors, part, 0, n, chunk, width, rank, block, R, not SCATTER, B * WIDTH, MANY, VEC
            )  # fmt: skip
            mine = load_payload(source, left, WIDTH, B)
            if SCATTER:
                got = receive(here + block * B, row, mine, ctl, rank, WAIT_PARTIAL, R, S, B)
                mine = reduce_words(got, x.dtype.element_ty, OP, R, S, WIDTH)
            if GATHER:
                mine = sendable(mine)  # here, too: the same bits on all ranks
                for step in tl.static_range(1, R):
                    peer = (rank + step) % R
                    number = results + (0 if ROOTED else row_from(rank, peer))
                    put(row_of(ctl, peer, offset, epoch, number, row, rows) + block * B, mine, B)
            result, left = place_in_part(
                y, table, tensors, part, 1, n, chunk, width, rank, block, R, not GATHER, B * WIDTH, MANY, VEC
            )  # fmt: skip
            store_payload(result, left, mine, WIDTH, B)
        if GATHER:
            block = program + (turn - taken) * programs
            if (block >= program) & (block < others):
                for step in tl.static_range(1, steps):
                    owner = owner_at(step, rank, root, R, ROOTED)
                    from_owner = here + (results + (0 if ROOTED else row_from(owner, rank))) * row
                    got = receive_from(from_owner + block * B, owner, ctl, rank, WAIT_RESULT, R, B)
                    result, left = place_in_part(
                        y, table, tensors, part, 1, n, chunk, width, owner, block, R, False, B * WIDTH, MANY, VEC
                    )  # fmt: skip
                    store_payload(result, left, got, WIDTH, B)
    end(epochs, ctl, rank, epoch, R, ROOTED, MOST)


@triton.jit(do_not_specialize=_NUMBERS)
def exchange_bulk_kernel(
    x, y, table, data, flags, epochs, ctl, tensors, n, chunk, width, part, root, capacity, rank,
    R: tl.constexpr, S: tl.constexpr, SCATTER: tl.constexpr, GATHER: tl.constexpr, ROOTED: tl.constexpr, OP: tl.constexpr,
    B: tl.constexpr, MANY: tl.constexpr, VEC: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """The same with blocks of B elements and flags; else the arguments of `exchange_words_kernel`."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    epoch = begin(epochs, ctl, rank, root, R, SCATTER, ROOTED)
    row = capacity.to(tl.int64) * B
    results: tl.constexpr = R if SCATTER else 0
    steps: tl.constexpr = 2 if ROOTED else R
    own, others = share(rank, part, root, ROOTED)
    rows: tl.constexpr = results + ((1 if ROOTED else R) if GATHER else 0)
    here = data + (epoch & 1) * rows * row
    at = tl.arange(0, B)
    if SCATTER:
        for block in range(program, others, programs):
            for step in tl.static_range(1, steps):
                owner = owner_at(step, rank, root, R, ROOTED)
                source, left = place_in_part(x, table, tensors, part, 0, n, chunk, width, owner, block, R, False, B, MANY, VEC)
                values = tl.load(source + at, mask=at < left, other=0)
                tl.store(tl.multiple_of(peer_address(here + rank * row + block * B, ctl, rank, owner) + at, 16), values)
            if ROOTED:
                publish_set(peer_address(flags, ctl, rank, root) + rank * capacity + block, epoch, False)  # (A)
            else:
                publish_set_to_all(flags + rank * capacity + block, epoch, ctl, rank, R, S)  # (A)
    for block in range(program, own, programs):
        if SCATTER:
            for step in tl.static_range(1, R):
                source = (rank + step) % R
                wait(flags + source * capacity + block, epoch, ctl, rank, WAIT_PARTIAL, source, R)  # (A)
        mine, left = place_in_part(x, table, tensors, part, 0, n, chunk, width, rank, block, R, not SCATTER, B, MANY, VEC)
        reduced = tl.load(mine + at, mask=at < left, other=0)
        if SCATTER:
            kept = reduced.to(tl.float32)
            total = of_rank(here + block * B, row, kept, 0, rank, B)
            for source in tl.static_range(1, R):
                total = combine(total, of_rank(here + block * B, row, kept, source, rank, B), OP)
            if OP == AVG:
                total = average(total, R)
            reduced = total.to(x.dtype.element_ty)
        if GATHER:
            number = results + (0 if ROOTED else rank)
            for step in tl.static_range(1, R):
                there = peer_address(here + number * row + block * B, ctl, rank, (rank + step) % R)
                tl.store(tl.multiple_of(there + at, 16), reduced)
            publish_set_to_all(flags + (results + rank) * capacity + block, epoch, ctl, rank, R, S)  # (B)
        result, left = place_in_part(y, table, tensors, part, 1, n, chunk, width, rank, block, R, not GATHER, B, MANY, VEC)
        tl.store(result + at, reduced, mask=at < left)
    if GATHER:
        for step in tl.static_range(1, steps):
            owner = owner_at(step, rank, root, R, ROOTED)
            number = results + (0 if ROOTED else owner)
            for block in range(program, others, programs):
                slot, flag = here + number * row + block * B, flags + (results + owner) * capacity + block
                reduced = pull(slot, flag, epoch, ctl, rank, WAIT_RESULT, owner, R, B)  # (B)
                result, left = place_in_part(y, table, tensors, part, 1, n, chunk, width, owner, block, R, False, B, MANY, VEC)
                tl.store(result + at, reduced, mask=at < left)
    end(epochs, ctl, rank, epoch, R, ROOTED, MOST)

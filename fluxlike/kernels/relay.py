"""reduce and broadcast in two trips: no rank's port carries the tensor more than once. The design record.

By `exchange` a root takes the whole tensor from each other rank, or pushes it to each: its port carries it R-1 times. Here each of
the R-1 others owns a part of ``part`` blocks of B words (`words`: data that is its own flag; floats only), and the root none:

reduce     Each rank pushes the part of each owner to it (A). The owner reduces in fp32, in the order of the ranks, rounded once,
           and pushes the result to the root (B).
broadcast  The root pushes each owner its part (A). The owner pushes that to the other owners (B).

So each rank sends and receives the tensor once at most, whatever R is, for one trip more. It is van de Geijn's broadcast (scatter
and all-gather) and Rabenseifner's reduce, but that the root owns nothing: with a part of its own it would carry up to 2(R-1)/R of
the tensor. On four H100s `exchange` takes 535 µs for 64 MB of reduce, this 233, NCCL 210 (docs/measured/2026-11-26-relay.md).

A program takes blocks program, program + P, … of each part, in turns as `exchange` does: push one block of each part (A), pass on
the own one of `AHEAD` turns before (B), take what others have passed on before that.

Memory is that of `exchange` for words: two sets, by the parity of the call, each of R-1 rows of a part, without gaps. In broadcast
a row is for the part of one owner, the own one from the root; in reduce an owner has a row for each source, and the root one for
each owner. Calls of this kernel and of `exchange` may follow each other:

* Both leave the set that they have used empty, so its layout is each call's own. Their calls have one number.
* No rank hears of all others in each call, so there are credits: (C) in front of its pushes each rank waits until all others have
  ended the call that used this set before, as ``finish`` of the last program says in both kernels.
* Programs wait for programs of the same index on other ranks only: in a turn (A) waits for nothing, (B) for (A) of an earlier turn,
  and what comes last for (B) of an earlier one. So no launch needs to have all its programs running at once.
"""

import triton
import triton.language as tl

from .elements import load_payload, place_in_part, reduce_words, row_from, store_payload
from .exchange import AHEAD
from .sync import BASES, EPOCH, WAIT_PARTIAL, WAIT_RESULT, finish, is_last_program, wait_credits
from .words import put, receive, receive_from, sendable


@triton.jit
def row_in(ctl, peer, start, number, row):
    """Row ``number``, of ``row`` words, of those that begin ``start`` bytes behind the block of ``peer``, as mapped here."""
    return (tl.load(ctl + BASES + peer) + start).to(tl.pointer_type(tl.int32)) + number * row


@triton.jit
def place_of(tensor, ctl, n, chunk, part, number, block, R: tl.constexpr, B: tl.constexpr, VEC: tl.constexpr):
    """`place_in_part` of a block of B elements of part ``number``, of one tensor."""
    return place_in_part(tensor, ctl, 1, part, 0, n, chunk, chunk, number, block, R, False, B, False, VEC)


@triton.jit(do_not_specialize=["n", "chunk", "part", "root", "capacity", "offset", "rank"])
def relay_words_kernel(
    x, y, ctl, n, chunk, part, root, capacity, offset, rank,
    R: tl.constexpr, S: tl.constexpr, REDUCE: tl.constexpr, OP: tl.constexpr,
    WIDTH: tl.constexpr, B: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """One call over ``n`` elements: R-1 parts of ``part`` blocks, owner d's from element ``chunk`` · `row_from` (d, root) on.

    x: broadcast reads it on the root only. y: reduce writes it on the root only. ``capacity``: blocks of a set; both sets lie at
    ``offset`` bytes of each rank's block of the heap. R: 2 or more. S: R rounded up to a power of two. WIDTH: elements of a word.
    VEC: see `elements.place`.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    epoch = tl.load(ctl + EPOCH) + 1
    slot = (epoch & 1).to(tl.int32)
    wait_credits(ctl, slot, rank, R)  # (C)
    start = offset + slot.to(tl.int64) * capacity * B * 4
    row = part.to(tl.int64) * B
    own = row_from(rank, root)  # number of this rank's part; the root has none
    turns = tl.cdiv(tl.maximum(part - program, 0), programs)
    for turn in range(turns + 2 * AHEAD):
        block = program + turn * programs
        if (block < part) & ((rank == root) | REDUCE):
            for step in tl.static_range(1, R):
                owner = (rank + step) % R
                if owner != root:
                    number = row_from(owner, root)
                    source, left = place_of(x, ctl, n, chunk, part, number, block, R, B * WIDTH, VEC)
                    words = sendable(load_payload(source, left, WIDTH, B))
                    if REDUCE:
                        number = row_from(rank, owner)
                    else:  # here, too: the same bits on all ranks
                        result, left = place_of(y, ctl, n, chunk, part, number, block, R, B * WIDTH, VEC)
                        store_payload(result, left, words, WIDTH, B)
                    put(row_in(ctl, owner, start, number, row) + block * B, words, B)  # (A)
        block = program + (turn - AHEAD) * programs
        if (block >= program) & (block < part) & (rank != root):
            if REDUCE:
                source, left = place_of(x, ctl, n, chunk, part, own, block, R, B * WIDTH, VEC)
                mine = load_payload(source, left, WIDTH, B)
                here = row_in(ctl, rank, start, 0, row) + block * B
                got = receive(here, row, mine, ctl, rank, WAIT_PARTIAL, R, S, B)  # (A)
                words = sendable(reduce_words(got, x.dtype.element_ty, OP, R, S, WIDTH))
                put(row_in(ctl, root, start, own, row) + block * B, words, B)  # (B)
            else:
                words = receive_from(row_in(ctl, rank, start, own, row) + block * B, root, ctl, rank, WAIT_RESULT, R, B)  # (A)
                for step in tl.static_range(1, R):
                    peer = (rank + step) % R
                    if peer != root:
                        put(row_in(ctl, peer, start, own, row) + block * B, words, B)  # (B)
                result, left = place_of(y, ctl, n, chunk, part, own, block, R, B * WIDTH, VEC)
                store_payload(result, left, words, WIDTH, B)
        block = program + (turn - 2 * AHEAD) * programs
        if (block >= program) & (block < part) & ((rank == root) == REDUCE):
            for step in tl.static_range(1, R):
                owner = (rank + step) % R
                if owner != root:
                    number = row_from(owner, root)
                    there = row_in(ctl, rank, start, number, row) + block * B
                    words = receive_from(there, owner, ctl, rank, WAIT_RESULT, R, B)  # (B)
                    result, left = place_of(y, ctl, n, chunk, part, number, block, R, B * WIDTH, VEC)
                    store_payload(result, left, words, WIDTH, B)
    if is_last_program(ctl, False):
        finish(ctl, slot, rank, epoch, R)  # (C)

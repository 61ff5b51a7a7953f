"""The tables of ids that `sparse_all_reduce` reads, made on the device. This docstring is the design record.

A rank's ids, sorted, become its *slots*: one for each distinct id. The slots' ids of all ranks, sorted, become the *union rows*.
Both are the same task: number the distinct keys of a sorted list, which ends in keys that are none (END). The list is cut into
blocks of B keys, one a program. A block must know how many distinct keys are in front of it, therefore two launches, between which
the stream orders:

count    Each block counts its first ones of equal keys, and the keys that are none of the END. It fills what the next launch
         leaves open.
slots    (of a rank) or rows (of the union): each block adds up the counts of those in front of it and writes what its keys say.
owners   Of the union rows, once they are all written: who adds up which, and where this rank finds the sum.

So there are no atomics, nothing waits for another program, and each word is written by one program, or by several alike: repeats
give the same bits. By torch the same took some fifty operations, for which a GPU waits: a call with 1000 ids a rank took 1.4 ms.

What the tables hold is said in `ops.sparse_index`.
"""

import triton
import triton.language as tl

#: Words of a rank's message in front of its ids.
HEAD = tl.constexpr(4)
#: What `_staged` says of rows that are in no row of staging.
NONE, NOWHERE = tl.constexpr(-1), tl.constexpr(-2)


@triton.jit
def _block(keys, number, END: tl.constexpr, B: tl.constexpr):
    """Of this program's block: the places, the keys, and the keys in front of them; -1 in front of the first."""
    at = tl.program_id(0) * B + tl.arange(0, B)
    key = tl.load(keys + at, mask=at < number, other=END)
    before = tl.load(keys + at - 1, mask=(at > 0) & (at < number), other=-1)
    return at, key, before


@triton.jit
def _numbers(first, counts, BLOCKS: tl.constexpr):
    """The number of each key's distinct one, in all blocks; and how many there are in all."""
    blocks = tl.arange(0, BLOCKS)
    count = tl.load(counts + blocks, mask=blocks < tl.num_programs(0), other=0)
    in_front = tl.sum(tl.where(blocks < tl.program_id(0), count, 0))
    return in_front + tl.cumsum(first.to(tl.int32), 0) - 1, tl.sum(count)


@triton.jit
def _fill(words, length, value, B: tl.constexpr):
    for start in range(tl.program_id(0) * B, length, tl.num_programs(0) * B):
        at = start + tl.arange(0, B)
        tl.store(words + at, tl.zeros((B,), words.dtype.element_ty) + value, mask=at < length)


@triton.jit(do_not_specialize=["number", "length", "value", "rest"])
def sparse_index_count_kernel(
    keys, counts, words, ends, number, length, value, rest, END: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    """counts [2, programs]: of each block, distinct keys, keys but END. ``words`` [length] are ``value``, ``ends`` [rest] END."""
    _, key, before = _block(keys, number, END, B)
    tl.store(counts + tl.program_id(0), tl.sum(((key != before) & (key != END)).to(tl.int32)))
    tl.store(counts + tl.num_programs(0) + tl.program_id(0), tl.sum((key != END).to(tl.int32)))
    _fill(words, length, value, B)
    _fill(ends, rest, END, B)


@triton.jit
def _last(keys, counts, BLOCKS: tl.constexpr):
    """The last key that is not END, and how many there are; 0 if there are none."""
    blocks = tl.arange(0, BLOCKS)
    size = tl.sum(tl.load(counts + tl.num_programs(0) + blocks, mask=blocks < tl.num_programs(0), other=0))
    return tl.load(keys + size - 1, mask=size > 0, other=0), size


@triton.jit(do_not_specialize=["number", "capacity", "rows"])
def sparse_index_slots_kernel(
    keys, counts, starts, message, number, capacity, rows, END: tl.constexpr, B: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """starts [capacity + 1] and message [HEAD + capacity] of the sorted ``keys`` [number] of this rank.

    message: the number of distinct keys, whether (1) there are some below 0 or not below ``rows``, words without a meaning, keys.
    """
    at, key, before = _block(keys, number, END, B)
    first = (key != before) & (key != END)
    slot, count = _numbers(first, counts, BLOCKS)
    tl.store(message + HEAD + slot, key, mask=first & (slot < capacity))
    tl.store(starts + slot, at, mask=first & (slot <= capacity))
    # the first END is where the entries of the last slot end
    ends = (key == END) & (before != END) & (at < number)
    tl.store(starts + slot + 1, at, mask=ends & (slot + 1 <= capacity))
    if tl.program_id(0) == 0:
        last, size = _last(keys, counts, BLOCKS)
        least = tl.load(keys, mask=size > 0, other=0)
        tl.store(message, count.to(message.dtype.element_ty))
        tl.store(message + 1, ((least < 0) | (last >= rows)).to(message.dtype.element_ty))


@triton.jit(do_not_specialize=["number", "capacity", "rank"])
def sparse_index_rows_kernel(
    keys, entries, counts, messages, ids, slots, place, meta, number, capacity, rank,
    R: tl.constexpr, END: tl.constexpr, B: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """ids [number], slots [number, R], place [capacity] and meta [4] of the sorted ``keys`` [number] of all ranks' messages.

    entries [number]: where each key stands in them, rank · capacity + slot. slots are -1 where nothing is written.
    """
    at, key, before = _block(keys, number, END, B)
    there = key != END
    first = (key != before) & there
    row, union = _numbers(first, counts, BLOCKS)
    entry = tl.load(entries + at, mask=at < number, other=0)
    source, slot = (entry // capacity).to(tl.int32), (entry % capacity).to(tl.int32)
    tl.store(ids + row, key.to(tl.int64), mask=first)
    tl.store(slots + row * R + source, slot, mask=there)
    tl.store(place + slot, row, mask=there & (source == rank))
    # behind the union stands its last id again and again
    last, _ = _last(keys, counts, BLOCKS)
    tl.store(ids + at, tl.zeros((B,), tl.int64) + last.to(tl.int64), mask=(at >= union) & (at < number))
    if tl.program_id(0) == 0:
        row_words = (HEAD + capacity).to(tl.int64)
        most = tl.load(messages).to(tl.int64)
        outside = (tl.load(messages + 1) == 1).to(tl.int64)
        for peer in tl.static_range(1, R):
            most = tl.maximum(most, tl.load(messages + peer * row_words).to(tl.int64))
            outside = tl.where(tl.load(messages + peer * row_words + 1) == 1, peer + 1, outside)
        own = tl.load(messages + rank * row_words).to(tl.int64)
        tl.store(meta, union.to(tl.int64))
        tl.store(meta + 1, tl.minimum(own, capacity.to(tl.int64)))
        tl.store(meta + 2, most)
        tl.store(meta + 3, outside)


@triton.jit
def _owner(slots, row, inside, R: tl.constexpr, OWNED: tl.constexpr):
    """Who adds up each of these union rows: of the ranks that have its id, if several have, one by turns; else -1."""
    number = tl.zeros_like(row)
    owner = number - 1
    if OWNED:
        for source in tl.static_range(R):
            number += (tl.load(slots + row * R + source, mask=inside, other=-1) >= 0).to(tl.int32)
        turn = row % tl.maximum(number, 1)
        seen = tl.zeros_like(row)
        for source in tl.static_range(R):
            has = tl.load(slots + row * R + source, mask=inside, other=-1) >= 0
            owner = tl.where(has & (seen == turn) & (number > 1), source, owner)
            seen += has.to(tl.int32)
    return owner


@triton.jit
def _staged(slots, row, inside, owner, room, rank, R: tl.constexpr):
    """The row of staging that holds each of these union rows; NOWHERE for those that ``rank`` owns, NONE for no union row."""
    staged = tl.zeros_like(row) + NONE
    for source in tl.static_range(R):
        slot = tl.load(slots + row * R + source, mask=inside, other=-1)
        staged = tl.where((slot >= 0) & ((owner < 0) | (owner == source)), source * room + slot, staged)
    return tl.where(owner == rank, NOWHERE, staged)


@triton.jit(do_not_specialize=["number", "capacity", "room", "rank"])
def sparse_index_owners_kernel(
    slots, place, meta, owners, staged, targets, number, capacity, room, rank, R: tl.constexpr, OWNED: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    """owners [number] of the union rows, with OWNED also staged [number]; targets [capacity] of the own slots."""
    at = tl.program_id(0) * B + tl.arange(0, B)
    owner = _owner(slots, at, at < number, R, OWNED)
    tl.store(owners + at, owner, mask=at < number)
    if OWNED:
        tl.store(staged + at, _staged(slots, at, at < number, owner, room, rank, R), mask=at < number)
    own = at < tl.load(meta + 1).to(tl.int32)
    row = tl.load(place + at, mask=own, other=0)
    tl.store(targets + at, _owner(slots, row, own, R, OWNED), mask=at < capacity)

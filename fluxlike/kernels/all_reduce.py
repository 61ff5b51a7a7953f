"""All-reduce by pushes. This docstring is the design record.

What it computes, on every rank: y[i] = op over ranks s of x_s[i]; op is sum, average or maximum, in fp32, in the order of the
ranks, rounded once. So all ranks have the same bits, and have them again on every repeat and by every algorithm.

What is reduced is one tensor or a list of them, cut into blocks. Blocks go over as wholes; behind the end of a tensor they hold
zeros. A program takes blocks program, program + P, …, where P programs are launched.

one_shot  A rank pushes all blocks to all peers, waits for theirs and reduces all of them itself: one trip, (R-1)·n sent.
two_shot  Rank d owns part d of the blocks, which hold R equal parts. Each rank pushes part d to d; d waits for all, reduces, and
          pushes the result to all: two trips, 2·(R-1)/R·n sent.
bulk      two_shot with signals beside the data: half the bytes, but each trip is the data's and then the signal's.

In one_shot and two_shot blocks are of B `words`: 32 bits of payload, two elements of 16 bits, with the call's number above them.
In bulk they are of B elements, and have a flag, the number of the last call for which the block has come.

Memory, on the heap of each rank: two sets, by the parity of the call, of two halves [R, capacity] of blocks. The first half takes
what is to be reduced, from each source into a row of its own; the second half takes results, from each owner into its row. There
is such memory for words and for elements; the flags, as they only grow, have two halves and no sets.

A list has a ``table`` of int64: addresses of the inputs [T], of the results [T], their elements [T], then for each block the
number of its tensor [G] and its first element there [G]. So many small tensors take one launch, and are not copied together.

Protocol and proofs

* A reader knows a word by its number, so nothing else is signalled, and nothing is reset. In bulk ``publish_set`` (release) of a
  block's flag, behind its stores, pairs with ``wait`` (acquire) for it, in front of its loads: (A) parts, (B) results.
* Numbers come from ``epochs``, one for each program that a launch may have, which are all equal between launches: a program reads
  its own, and at its end advances its own and those that are P, 2P, … further on. So no program reads what another of the same
  launch writes, and no atomic is needed.
* A word, or a block, may be overwritten when its reader is done. In each call every rank takes at least one block from every
  other, as each part has one. So when rank r is through call n, each peer has begun call n, and has ended call n-1, as its launches
  follow each other. Call n+1 writes where call n-1 did: free.
* A word is a word in every layout, so whatever an earlier call left in it has an earlier number. Numbers return after 2³² calls; a
  word would have to lie untouched for exactly so long.
* Programs wait for programs of the same index on other ranks only, which push before they wait: first all parts, then the reduced
  one. So no launch needs to have all its programs running at once.
* x and y may be the same: a program writes only blocks that it has sent before.
"""

import triton
import triton.language as tl

from .sync import BASES, EPOCH, WAIT_PARTIAL, WAIT_RESULT, peer_address, publish_set, wait
from .words import put, receive, receive_from, with_number

SUM = tl.constexpr(0)
AVG = tl.constexpr(1)
MAX = tl.constexpr(2)


@triton.jit
def place(
    tensor, table, tensors, blocks, which: tl.constexpr, n, block, B: tl.constexpr, MANY: tl.constexpr, VEC: tl.constexpr
):  # fmt: skip
    """Where a block is: pointer to its first element, and how many there are from there on. ``which``: 0 for x, 1 for y.

    VEC: elements of which all sizes are multiples, and of a list all addresses, so that blocks move in vectors.
    """
    if MANY:
        number = tl.load(table + 3 * tensors + block)
        first = tl.load(table + 3 * tensors + blocks + block) // B * B
        size = tl.load(table + 2 * tensors + number)
        nbytes: tl.constexpr = VEC * tensor.dtype.element_ty.primitive_bitwidth // 8
        start = (tl.load(table + which * tensors + number) // nbytes * nbytes).to(tensor.dtype)
    else:
        first = block.to(tl.int64) * B
        size = n
        start = tensor
    return start + first, size // VEC * VEC - first


@triton.jit
def load_payload(x, left, WIDTH: tl.constexpr, B: tl.constexpr):
    """The B words from ``x`` on, as int32: WIDTH elements each, of which ``left`` are there; zeros behind them."""
    at = tl.arange(0, WIDTH * B)
    values = tl.load(x + at, mask=at < left, other=0.0)
    if WIDTH == 1:
        words = values.to(tl.int32, bitcast=True)
    else:
        low, high = tl.split(tl.reshape(values.to(tl.int16, bitcast=True), (B, 2)))
        words = (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)
    return words


@triton.jit
def store_payload(y, left, words, WIDTH: tl.constexpr, B: tl.constexpr):
    """The inverse of `load_payload`."""
    at = tl.arange(0, WIDTH * B)
    element = y.dtype.element_ty
    if WIDTH == 1:
        values = words.to(element, bitcast=True)
    else:
        halves = tl.join(words.to(tl.int16), (words >> 16).to(tl.int16))
        values = tl.reshape(halves, (2 * B,)).to(element, bitcast=True)
    tl.store(y + at, values, mask=at < left)


@triton.jit
def unpack(words, element: tl.constexpr, WIDTH: tl.constexpr):
    """Words as fp32: the elements of the low and of the high bits, the same where there is but one."""
    if WIDTH == 1:
        low = words.to(tl.float32, bitcast=True)
        high = low
    else:
        low = words.to(tl.int16).to(element, bitcast=True).to(tl.float32)
        high = (words >> 16).to(tl.int16).to(element, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def pack(low, high, element: tl.constexpr, WIDTH: tl.constexpr):
    """The inverse of `unpack`, rounded."""
    if WIDTH == 1:
        words = low.to(tl.int32, bitcast=True)
    else:
        words = low.to(element).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        words |= high.to(element).to(tl.int16, bitcast=True).to(tl.int32) << 16
    return words


@triton.jit
def combine(a, b, OP: tl.constexpr):
    if OP == MAX:
        c = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    else:
        c = a + b
    return c


@triton.jit
def reduce_words(words, element: tl.constexpr, OP: tl.constexpr, R: tl.constexpr, S: tl.constexpr, WIDTH: tl.constexpr):
    """The words [B] of the result out of those [B, S] of the ranks, in the order of the ranks."""
    column = tl.arange(0, S)[None, :]
    payload = words.to(tl.int32)
    low, high = unpack(tl.sum(tl.where(column == 0, payload, 0), axis=1), element, WIDTH)
    for source in tl.static_range(1, R):
        more_low, more_high = unpack(tl.sum(tl.where(column == source, payload, 0), axis=1), element, WIDTH)
        low = combine(low, more_low, OP)
        high = combine(high, more_high, OP)
    if OP == AVG:
        low = low / R
        high = high / R
    return pack(low, high, element, WIDTH)


@triton.jit
def of_rank(slots, row, own, source: tl.constexpr, rank, B: tl.constexpr):
    """A block of rank ``source`` in fp32: what it has sent, or of this rank ``own``."""
    at = tl.arange(0, B)
    sent = tl.load(tl.multiple_of(slots + source * row + at, 16), mask=(at >= 0) & (source != rank), other=0.0)
    return tl.where(source == rank, own, sent.to(tl.float32))


@triton.jit
def row_of(ctl, peer, offset, epoch, number, row, R: tl.constexpr):
    """Row ``number`` of ``row`` words of ``peer``'s set for this call, as mapped here; all lie at ``offset`` bytes of its block."""
    words = (tl.load(ctl + BASES + peer) + offset).to(tl.pointer_type(tl.int64))
    return words + ((epoch & 1) * 2 * R + number) * row


@triton.jit
def advance(epochs, ctl, epoch, MOST: tl.constexpr):
    """The end of a call for this program: it advances its own number, and those of programs that the launch does not have.

    All its threads have read the number by now: each wait ends with a maximum over all of them.
    """
    program = tl.program_id(0)
    theirs = program + tl.num_programs(0) * tl.arange(0, MOST)
    tl.store(epochs + theirs, tl.zeros((MOST,), tl.int64) + epoch, mask=theirs < MOST)
    if program == 0:
        tl.store(ctl + EPOCH, epoch)


_NUMBERS = ["tensors", "n", "blocks", "capacity", "offset", "rank"]


@triton.jit(do_not_specialize=_NUMBERS)
def all_reduce_one_shot_kernel(
    x, y, table, epochs, ctl, tensors, n, blocks, capacity, offset, rank,
    R: tl.constexpr, S: tl.constexpr, OP: tl.constexpr, WIDTH: tl.constexpr,
    B: tl.constexpr, MANY: tl.constexpr, VEC: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """One call over ``blocks`` blocks; of one tensor its ``n`` elements are at x and y, else x and y only say the dtype.

    ``capacity``: blocks of a row. S: R rounded up to a power of two. WIDTH: elements of a word. MANY: a list; VEC: see
    `place`. MOST: programs that a launch may have.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    epoch = tl.load(epochs + program) + 1
    row = capacity.to(tl.int64) * B
    for block in range(program, blocks, programs):
        source, left = place(x, table, tensors, blocks, 0, n, block, B * WIDTH, MANY, VEC)
        mine = with_number(load_payload(source, left, WIDTH, B), epoch)
        for step in tl.static_range(1, R):
            put(row_of(ctl, (rank + step) % R, offset, epoch, rank, row, R) + block * B, mine, B)
    here = row_of(ctl, rank, offset, epoch, 0, row, R)
    for block in range(program, blocks, programs):
        source, left = place(x, table, tensors, blocks, 0, n, block, B * WIDTH, MANY, VEC)
        mine = with_number(load_payload(source, left, WIDTH, B), epoch)
        got = receive(here + block * B, row, mine, epoch, ctl, rank, WAIT_PARTIAL, R, S, B)
        result, left = place(y, table, tensors, blocks, 1, n, block, B * WIDTH, MANY, VEC)
        store_payload(result, left, reduce_words(got, x.dtype.element_ty, OP, R, S, WIDTH), WIDTH, B)
    advance(epochs, ctl, epoch, MOST)


@triton.jit(do_not_specialize=_NUMBERS)
def all_reduce_two_shot_kernel(
    x, y, table, epochs, ctl, tensors, n, blocks, capacity, offset, rank,
    R: tl.constexpr, S: tl.constexpr, OP: tl.constexpr, WIDTH: tl.constexpr,
    B: tl.constexpr, MANY: tl.constexpr, VEC: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """One call over ``blocks`` blocks, a multiple of R; the arguments of `all_reduce_one_shot_kernel`."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    epoch = tl.load(epochs + program) + 1
    row = capacity.to(tl.int64) * B
    part = blocks // R
    for step in tl.static_range(1, R):
        owner = (rank + step) % R
        there = row_of(ctl, owner, offset, epoch, rank, row, R)
        for block in range(program, part, programs):
            source, left = place(x, table, tensors, blocks, 0, n, owner * part + block, B * WIDTH, MANY, VEC)
            put(there + block * B, with_number(load_payload(source, left, WIDTH, B), epoch), B)
    here = row_of(ctl, rank, offset, epoch, 0, row, R)
    for block in range(program, part, programs):
        source, left = place(x, table, tensors, blocks, 0, n, rank * part + block, B * WIDTH, MANY, VEC)
        mine = with_number(load_payload(source, left, WIDTH, B), epoch)
        got = receive(here + block * B, row, mine, epoch, ctl, rank, WAIT_PARTIAL, R, S, B)
        reduced = reduce_words(got, x.dtype.element_ty, OP, R, S, WIDTH)
        for step in tl.static_range(1, R):
            put(row_of(ctl, (rank + step) % R, offset, epoch, R + rank, row, R) + block * B, with_number(reduced, epoch), B)
        result, left = place(y, table, tensors, blocks, 1, n, rank * part + block, B * WIDTH, MANY, VEC)
        store_payload(result, left, reduced, WIDTH, B)
    for step in tl.static_range(1, R):
        owner = (rank + step) % R
        for block in range(program, part, programs):
            reduced = receive_from(here + (R + owner) * row + block * B, owner, epoch, ctl, rank, WAIT_RESULT, R, B)
            result, left = place(y, table, tensors, blocks, 1, n, owner * part + block, B * WIDTH, MANY, VEC)
            store_payload(result, left, reduced.to(tl.int32), WIDTH, B)
    advance(epochs, ctl, epoch, MOST)


@triton.jit(do_not_specialize=_NUMBERS)
def all_reduce_bulk_kernel(
    x, y, table, data, flags, epochs, ctl, tensors, n, blocks, capacity, rank,
    R: tl.constexpr, OP: tl.constexpr, B: tl.constexpr, MANY: tl.constexpr, VEC: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """One call over ``blocks`` blocks of B elements, a multiple of R; else the arguments of `all_reduce_one_shot_kernel`."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    epoch = tl.load(epochs + program) + 1
    row = capacity.to(tl.int64) * B
    here = data + (epoch & 1) * 2 * R * row
    at = tl.arange(0, B)
    part = blocks // R
    for step in tl.static_range(1, R):
        owner = (rank + step) % R
        for block in range(program, part, programs):
            source, left = place(x, table, tensors, blocks, 0, n, owner * part + block, B, MANY, VEC)
            values = tl.load(source + at, mask=at < left, other=0.0)
            tl.store(tl.multiple_of(peer_address(here + rank * row + block * B, ctl, rank, owner) + at, 16), values)
            publish_set(peer_address(flags, ctl, rank, owner) + rank * capacity + block, epoch, False)  # (A)
    for block in range(program, part, programs):
        for step in tl.static_range(1, R):
            source = (rank + step) % R
            wait(flags + source * capacity + block, epoch, ctl, rank, WAIT_PARTIAL, source, R)  # (A)
        mine, left = place(x, table, tensors, blocks, 0, n, rank * part + block, B, MANY, VEC)
        own = tl.load(mine + at, mask=at < left, other=0.0).to(tl.float32)
        total = of_rank(here + block * B, row, own, 0, rank, B)
        for source in tl.static_range(1, R):
            total = combine(total, of_rank(here + block * B, row, own, source, rank, B), OP)
        if OP == AVG:
            total = total / R
        reduced = total.to(x.dtype.element_ty)
        for step in tl.static_range(1, R):
            there = peer_address(here + (R + rank) * row + block * B, ctl, rank, (rank + step) % R)
            tl.store(tl.multiple_of(there + at, 16), reduced)
        for step in tl.static_range(1, R):
            publish_set(peer_address(flags, ctl, rank, (rank + step) % R) + (R + rank) * capacity + block, epoch, False)  # (B)
        result, left = place(y, table, tensors, blocks, 1, n, rank * part + block, B, MANY, VEC)
        tl.store(result + at, reduced, mask=at < left)
    for step in tl.static_range(1, R):
        owner = (rank + step) % R
        for block in range(program, part, programs):
            wait(flags + (R + owner) * capacity + block, epoch, ctl, rank, WAIT_RESULT, owner, R)  # (B)
            reduced = tl.load(tl.multiple_of(here + (R + owner) * row + block * B + at, 16))
            result, left = place(y, table, tensors, blocks, 1, n, owner * part + block, B, MANY, VEC)
            tl.store(result + at, reduced, mask=at < left)
    advance(epochs, ctl, epoch, MOST)

"""All-reduce in one trip: everything to everybody. This docstring is the design record.

What it computes, on every rank: y[i] = op over ranks s of x_s[i]; op is sum, average or maximum, in fp32, in the order of the
ranks, rounded once. So all ranks have the same bits, and have them again on every repeat and by every algorithm but trees.

A rank pushes all blocks to all peers, waits for theirs and reduces all of them itself: one trip, (R-1)·n sent. In two trips, with
fewer bytes: `exchange`, with which this kernel shares its memory, its rows and its count of calls; what is said there of words, of
programs and of what may be overwritten holds here, too. Over trees: `trees`.
"""

import triton
import triton.language as tl

from .elements import advance, load_payload, place, reduce_words, row_from, row_of, store_payload
from .sync import WAIT_PARTIAL
from .words import put, receive, sendable


@triton.jit(do_not_specialize=["tensors", "n", "blocks", "capacity", "offset", "rank"])
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
        mine = sendable(load_payload(source, left, WIDTH, B))
        for step in tl.static_range(1, R):
            peer = (rank + step) % R
            put(row_of(ctl, peer, offset, epoch, row_from(rank, peer), row, 2 * (R - 1)) + block * B, mine, B)
    here = row_of(ctl, rank, offset, epoch, 0, row, 2 * (R - 1))
    for block in range(program, blocks, programs):
        source, left = place(x, table, tensors, blocks, 0, n, block, B * WIDTH, MANY, VEC)
        mine = sendable(load_payload(source, left, WIDTH, B))
        got = receive(here + block * B, row, mine, ctl, rank, WAIT_PARTIAL, R, S, B)
        result, left = place(y, table, tensors, blocks, 1, n, block, B * WIDTH, MANY, VEC)
        store_payload(result, left, reduce_words(got, x.dtype.element_ty, OP, R, S, WIDTH), WIDTH, B)
    advance(epochs, ctl, epoch, MOST)

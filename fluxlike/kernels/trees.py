"""All-reduce over trees. This docstring is the design record.

What it computes, on every rank: y[i] = op over ranks of x_s[i]; op is sum, average or maximum. Each tree spans all ranks; block b
goes over tree b mod T, where there are T. On the way up a rank adds, in fp32, what its children have sent to its own block, the
last of them first, and pushes the sum to its parent, in fp32: nothing is rounded. The root rounds once and pushes the result to its
children, in the dtype of x, and they to theirs. So all ranks have the same bits, and have them again on every repeat; the order is
the trees', so they may differ from those of the other algorithms.

Roles: of an even number of programs the first half goes up, block by block, and the other half comes down. So both directions are
in use at once, and blocks follow each other through the levels without waiting for all of what is before them.

``steps`` has for each tree C + 3 int64: this rank's parent (-1 at the root), the row that is this rank's at its parent, how many
children it has, and those, in order. C: the most children that a rank has in a tree.

Memory, on the heap of each rank: C rows [capacity] of blocks of fp32 for what children send, and one row of blocks for what the
parent sends. Flags have the same C + 1 rows; they only grow.

Protocol and proofs

* The flag that ``push`` sets behind a block's stores (release) pairs with the wait of ``pull`` (acquire) in front of its loads:
  (A) up, at the parent, (B) down, at the child.
* Numbers of calls come from ``epochs``; see `exchange`.
* A block may be overwritten when its reader is done; one set is enough, whatever the trees of the calls before. Up: a rank that is
  through a call has a result for each block, and each was added up of all that children had sent for it. Down: a rank has a result
  for its children only once they have sent theirs for it in this call, so they have ended those before.
* A program that goes up waits for programs of the same index on other ranks only, and those at leaves for none. One that comes
  down waits for a program of the same index on its parent, or of a lower one, which goes up, if that is the root. Programs begin
  in the order of their indices, so no launch needs to have all its programs running at once.
* x and y may be the same: a result comes only behind what this rank has sent.
"""

import triton
import triton.language as tl

from .elements import AVG, advance, average, combine, place
from .sync import WAIT_PARTIAL, WAIT_RESULT, pull, push


@triton.jit(do_not_specialize=["trees", "tensors", "n", "blocks", "capacity", "rank"])
def all_reduce_trees_kernel(
    x, y, table, steps, partials, results, flags, epochs, ctl, trees, tensors, n, blocks, capacity, rank,
    R: tl.constexpr, C: tl.constexpr, OP: tl.constexpr, B: tl.constexpr, MANY: tl.constexpr, VEC: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """One call over ``blocks`` blocks of B elements and ``trees`` trees; else the arguments of `all_reduce_one_shot_kernel`.

    ``partials``: memory for what comes up, of fp32; ``results``: for what comes down, of the dtype of x.
    """
    program = tl.program_id(0)
    half = tl.num_programs(0) // 2
    climbs = program < half
    epoch = tl.load(epochs + program) + 1
    row = capacity.to(tl.int64) * B
    last = flags + C * capacity.to(tl.int64)
    at = tl.arange(0, B)
    for block in range(program % half, blocks, half):
        node = steps + block % trees * (C + 3)
        parent = tl.load(node)
        children = tl.load(node + 2)
        total = tl.zeros((B,), tl.float32)
        if climbs:
            source, left = place(x, table, tensors, blocks, 0, n, block, B, MANY, VEC)
            total = tl.load(source + at, mask=at < left, other=0.0).to(tl.float32)
            for turn in range(children):
                child = children - 1 - turn  # leaves are first to send
                slot, flag, peer = partials + child * row + block * B, flags + child * capacity + block, tl.load(node + 3 + child)
                total = combine(total, pull(slot, flag, epoch, ctl, rank, WAIT_PARTIAL, peer, R, B), OP)  # (A)
            if parent >= 0:
                mine = tl.load(node + 1)
                push(partials + mine * row + block * B, total, flags + mine * capacity + block, epoch, ctl, rank, parent, B)  # (A)
            elif OP == AVG:
                total = average(total, R)
        elif parent >= 0:
            total = pull(results + block * B, last + block, epoch, ctl, rank, WAIT_RESULT, parent, R, B).to(tl.float32)  # (B)
        if climbs == (parent < 0):
            reduced = total.to(x.dtype.element_ty)
            for child in range(children):
                push(results + block * B, reduced, last + block, epoch, ctl, rank, tl.load(node + 3 + child), B)  # (B)
            result, left = place(y, table, tensors, blocks, 1, n, block, B, MANY, VEC)
            tl.store(result + at, reduced, mask=at < left)
    advance(epochs, ctl, epoch, MOST)

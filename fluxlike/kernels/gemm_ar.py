"""GEMM + AllReduce of few rows in one kernel. This docstring is the design record.

What it computes, on every rank: y = Σ_ranks x · Wᵀ (+ bias), x [M, K] and W [N, K] of the rank, M ≤ 64.

With few rows a product lasts as long as its weight takes to come from memory. Each program has BN columns of y, so BN rows of W,
and reads them from end to end; together they are as fast as memory, which cuBLAS is not at all of these sizes. What a program
has is then a part of the result on every rank: it pushes it to all peers, as words that are their own flag, takes theirs, and adds
them in fp32 in the order of the ranks, rounded once. No launch and no trip through memory is between product and exchange.

On the wire this is a call of `all_reduce.all_reduce_one_shot_kernel`: the same rows, in which the word of elements i and i + 1 of
y lies at place i / 2, and the same count of calls; the blocks of that kernel are all whole, as M · N is a multiple of theirs.
What is said there and in `exchange` of what may be overwritten holds here. So
each rank is free to make its part of a call by this kernel, or by torch's product and that one: a weight that is stored otherwise
on one rank is that rank's affair.

Programs wait for words that other programs push there: by tiles here, by blocks where a rank has the other kernel. Every program
has pushed before it waits, and all of a launch run at once: there are no more than multiprocessors take (`ops.gemm_ar`). So
nobody waits for a program that waits for a place.

What is computed is W · xᵀ: tensor cores of Hopper take 64 rows at least, which W has, and few columns, which the rows of x are
then. Products are summed in fp32, the bias of the first rank is added, and the sum rounded to the dtype, as torch's product
in front of an all-reduce would be.
"""

import triton
import triton.language as tl

from .blocks import add_bias, load_a, load_b, vectorised
from .elements import SUM, advance, pack, reduce_words, row_from, row_of
from .sync import WAIT_PARTIAL
from .words import put_at, sendable, take_words


@triton.jit
def piece(words, number: tl.constexpr, PIECES: tl.constexpr, B: tl.constexpr):
    """B words from number · B on."""
    if PIECES == 1:
        part = words
    else:
        at = tl.arange(0, PIECES)[:, None]
        part = tl.sum(tl.where(at == number, tl.reshape(words, (PIECES, B)), 0), axis=0)
    return part


@triton.jit
def places(number: tl.constexpr, column, M, N, BN: tl.constexpr, B: tl.constexpr):
    """Where the words of a piece of a tile are among those of y, and which are there at all."""
    at = number * B + tl.arange(0, B)
    row, pair = at // (BN // 2), at % (BN // 2)
    return row.to(tl.int64) * (N // 16 * 8) + column // 16 * 8 + pair, (row < M) & (pair < (N - column) // 16 * 8)


@triton.jit(do_not_specialize=["M", "N", "K", "stride_x", "stride_w", "capacity", "offset", "rank"])
def gemm_ar_fused_kernel(
    x, w, y, bias, epochs, ctl, M, N, K, stride_x, stride_w, capacity, offset, rank,
    R: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, B: tl.constexpr, WORDS: tl.constexpr,
    BIAS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """One call; a program for every BN columns. N, K and strides are multiples of 16, addresses of 16 bytes, y has no gaps.

    ``capacity``: blocks, of WORDS words each, of a row of the exchange. S: R rounded up to a power of two. B: words of a piece of
    a tile. MOST: programs that a launch may have.
    """
    program = tl.program_id(0)
    epoch = tl.load(epochs + program) + 1
    N, K, stride_x, stride_w = vectorised(N, K, stride_x, stride_w, True)
    column = program * BN
    acc = tl.zeros((BN, BM), tl.float32)
    for k in range(0, K, BK):
        a = load_a(x, 0, k, M, K, stride_x, BM, BK, False)
        b = load_b(w, column, k, N, K, stride_w, BN, BK, False, False)
        acc = tl.dot(b.T, a.T, acc)
    element: tl.constexpr = y.dtype.element_ty
    pieces: tl.constexpr = BM * BN // 2 // B
    low, high = tl.split(tl.reshape(add_bias(acc.T, bias, column, N, BN, BIAS), (BM * BN // 2, 2)))
    words = sendable(pack(low, high, element, 2))
    pitch = capacity.to(tl.int64) * WORDS
    for number in tl.static_range(pieces):
        mine = piece(words, number, pieces, B)
        at, inside = places(number, column, M, N, BN, B)
        for step in tl.static_range(1, R):
            peer = (rank + step) % R
            there = row_of(ctl, peer, offset, epoch, row_from(rank, peer), pitch, 2 * (R - 1))
            put_at(tl.multiple_of(there + at, 16), inside, mine)
    here = row_of(ctl, rank, offset, epoch, 0, pitch, 2 * (R - 1))
    source = tl.arange(0, S)[None, :]
    for number in tl.static_range(pieces):
        mine = piece(words, number, pieces, B)
        at, inside = places(number, column, M, N, BN, B)
        theirs = inside[:, None] & (source != rank) & (source < R)
        pointers = tl.multiple_of(here + row_from(source, rank) * pitch + at[:, None], [16, 1])
        own, sources = tl.broadcast_to(mine[:, None], (B, S)), tl.broadcast_to(source, (B, S))
        got = take_words(pointers, theirs, own, sources, ctl, rank, WAIT_PARTIAL, R)
        result = reduce_words(got, element, SUM, R, S, 2)
        tl.store(tl.multiple_of(y.to(tl.pointer_type(tl.int32), bitcast=True) + at, 16), result, mask=inside)
    advance(epochs, ctl, epoch, MOST)

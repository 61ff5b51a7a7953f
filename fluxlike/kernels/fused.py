"""GEMM + AllReduce, GEMM + ReduceScatter and AllGather + GEMM of few rows, each in one kernel. The design record.

``product_fused_kernel`` computes Σ_ranks x · Wᵀ (+ bias), x [M, K] and W [N, K] of the rank, M ≤ 64; on every rank all rows,
y [M, N], or the rank's own chunk of them, y [M / R, N].

With few rows a product lasts as long as its weight takes to come from memory. Each program has BN columns of y, so BN rows of W,
and reads them from end to end; together they are as fast as memory, which cuBLAS is not at all of these sizes. What a program
has is then a part of the result on every rank: it pushes it to the peers, as words that are their own flag, takes theirs, and adds
them in fp32 in the order of the ranks, rounded once. No launch and no trip through memory is between product and exchange, and the
host makes one launch where it made two calls.

    one shot      everything goes to everybody, and every rank adds it
    SCATTER       each rank's rows go to it, which adds them (GEMM + ReduceScatter)
    and GATHER    and pushes the sums to everybody, in rows behind the others; each takes those of its columns

On the wire this is a call of `all_reduce.all_reduce_one_shot_kernel` or, SCATTER, of `exchange.exchange_words_kernel`: the same
rows, in which the word of elements i and i + 1 of a part lies at place i / 2, and the same count of calls; the blocks of those
kernels are all whole, as parts are multiples of theirs. What is said there of what may be overwritten holds here. So each rank is
free to make its part of a call by this kernel, or by torch's product and that one: a weight that is stored otherwise on one rank is
that rank's affair.

Programs wait for words that other programs push there: by tiles here, by blocks where a rank has the other kernel. Every program
pushes its product before it waits, and all of a launch run at once: there are no more than multiprocessors take (`ops.fused`). So
nobody waits for a program that waits for a place. Sums follow when the words of a whole column are there, which are in blocks all
over a part; in the other kernel a program takes the first sums in its third turn, so that has two at most (`ops.fused`), and pushes
all that it has before.

What is computed is W · xᵀ: tensor cores of Hopper take 64 rows at least, which W has, and few columns, which the rows of x are
then. Products are summed in fp32, a bias is added (by the first rank, or by the owner of rows), and the sum rounded to the dtype,
as torch's product in front of an exchange would be.

``gather_fused_kernel`` computes z = x · Wᵀ (+ bias), x [M, K] of the shards of all ranks and W [N, K] of the rank. Its programs
first exchange the shards, as `exchange.exchange_words_kernel` does and may on other ranks, into ``gathered`` [M, K] in own memory.
A multiprocessor has one or two of them, where it has four of that kernel's; so each takes several blocks at once, and waits once
for what all peers send of them. Those that had something to exchange arrive at a counter, ``gate``; all wait until as many have,
and then each multiplies its BN columns. The gate needs no reset, as it only grows: each program knows in ``arrived`` how many had
come when the last call ended, as it knows the number of the call. That the last to come says so by a word of its own took 0.2 to
2.0 µs longer (docs/measured/2026-11-28-waits.md). Nothing guards ``gathered`` between calls, as these follow each other on the
stream. More than 64 rows are read by TMA, TMA: there each program reads as much of x, from the L2 cache, as of W, and by pointers
took up to 36 % longer (docs/measured/2026-11-28-wide.md). Of more than 128, REST, those behind are a product of their own by the
same rows of W, as a tile of 256 takes as long for 129 rows as for 256. To ask for the first lines of W while the shards are on
their way, that they come to the L2 cache, gained nothing, and more of them cost.
"""

import triton
import triton.language as tl

from .blocks import add_bias, load_a, load_b, store_block, vectorised
from .elements import SUM, advance, keep, pack, reduce_words, row_from, row_of, size_of_part
from .lang import tma_acquire
from .sync import WAIT_GATHERED, WAIT_PARTIAL, WAIT_RESULT, publish_add, wait
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
def places(number: tl.constexpr, first, rows, column, N, BN: tl.constexpr, B: tl.constexpr):
    """Where the words of a piece of a tile are among those of a part, ``rows`` rows from ``first`` on, and which are in it."""
    at = number * B + tl.arange(0, B)
    row, pair = at // (BN // 2) - first, at % (BN // 2)
    inside = (row >= 0) & (row < rows) & (pair < (N - column) // 16 * 8)
    return row.to(tl.int64) * (N // 16 * 8) + column // 16 * 8 + pair, inside


@triton.jit
def product(
    x, w, bias, column, first, rows, M, N, K, stride_x, stride_w,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """x · Wᵀ, a tile [BM, BN] in fp32; with the bias in ``rows`` rows from ``first`` on. TMA: x and w are descriptors."""
    acc = tl.zeros((BN, BM), tl.float32)
    for k in range(0, K, BK):
        a = load_a(x, 0, k, M, K, stride_x, BM, BK, TMA)
        b = load_b(w, column, k, N, K, stride_w, BN, BK, TMA, False)
        acc = tl.dot(b.T, a.T, acc)
    tile = acc.T
    if BIAS:
        row = tl.arange(0, BM)[:, None]
        tile = tl.where((row >= first) & (row < first + rows), add_bias(tile, bias, column, N, BN, BIAS), tile)
    return tile


@triton.jit
def two_products(
    x, behind, w, bias, column, N, K,
    BM: tl.constexpr, REST: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """x · Wᵀ (+ bias) in fp32, tiles [BM, BN] and [REST, BN]: of the rows of x, and of those behind them. All are descriptors."""
    acc = tl.zeros((BN, BM), tl.float32)
    rest = tl.zeros((BN, REST), tl.float32)
    for k in range(0, K, BK):
        a = w.load([column, k])
        acc = tl.dot(a, x.load([0, k]).T, acc)
        rest = tl.dot(a, behind.load([0, k]).T, rest)
    return add_bias(acc.T, bias, column, N, BN, BIAS), add_bias(rest.T, bias, column, N, BN, BIAS)


@triton.jit(do_not_specialize=["M", "N", "K", "stride_x", "stride_w", "capacity", "offset", "rank"])
def product_fused_kernel(
    x, w, y, bias, epochs, ctl, M, N, K, stride_x, stride_w, capacity, offset, rank,
    R: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, B: tl.constexpr, WORDS: tl.constexpr,
    SCATTER: tl.constexpr, GATHER: tl.constexpr, BIAS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """One call; a program for every BN columns. N, K and strides are multiples of 16, addresses of 16 bytes, y has no gaps.

    ``capacity``: blocks, of WORDS words each, of a row of the exchange. S: R rounded up to a power of two. B: words of a piece of
    a tile. SCATTER: R divides M. GATHER: y is all rows, not the own chunk. MOST: programs that a launch may have.
    """
    program = tl.program_id(0)
    epoch = tl.load(epochs + program) + 1
    N, K, stride_x, stride_w = vectorised(N, K, stride_x, stride_w, True)
    column = program * BN
    rows = M // R if SCATTER else M
    own = rank * rows if SCATTER else 0
    sets: tl.constexpr = 2 * (R - 1) if GATHER else R - 1  # rows of a set
    element: tl.constexpr = y.dtype.element_ty
    pieces: tl.constexpr = BM * BN // 2 // B
    first = 0 if GATHER else own
    tile = product(x, w, bias, column, first, M if GATHER else rows, M, N, K, stride_x, stride_w, BM, BN, BK, False, BIAS)
    low, high = tl.split(tl.reshape(tile, (BM * BN // 2, 2)))
    words = sendable(pack(low, high, element, 2))
    pitch = capacity.to(tl.int64) * WORDS
    for number in tl.static_range(pieces):
        mine = piece(words, number, pieces, B)
        for step in tl.static_range(1, R):
            peer = (rank + step) % R
            at, inside = places(number, peer * rows if SCATTER else 0, rows, column, N, BN, B)
            there = row_of(ctl, peer, offset, epoch, row_from(rank, peer), pitch, sets)
            put_at(tl.multiple_of(there + at, 16), inside, mine)
    here = row_of(ctl, rank, offset, epoch, 0, pitch, sets)
    source = tl.arange(0, S)[None, :]
    y = y.to(tl.pointer_type(tl.int32), bitcast=True)
    start = (tl.zeros((), tl.int64) + own - first) * (N // 16 * 8)
    for number in tl.static_range(pieces):
        mine = piece(words, number, pieces, B)
        at, inside = places(number, own, rows, column, N, BN, B)
        theirs = inside[:, None] & (source != rank) & (source < R)
        pointers = tl.multiple_of(here + row_from(source, rank) * pitch + at[:, None], [16, 1])
        kept, sources = tl.broadcast_to(mine[:, None], (B, S)), tl.broadcast_to(source, (B, S))
        got = take_words(pointers, theirs, kept, sources, ctl, rank, WAIT_PARTIAL, R)
        result = reduce_words(got, element, SUM, R, S, 2)
        if SCATTER and GATHER:
            result = sendable(result)  # here, too: the same bits on all ranks
            for step in tl.static_range(1, R):
                peer = (rank + step) % R
                there = row_of(ctl, peer, offset, epoch, R - 1 + row_from(rank, peer), pitch, sets)
                put_at(tl.multiple_of(there + at, 16), inside, result)
        tl.store(tl.multiple_of(y + start + at, 16), result, mask=inside)
    if SCATTER and GATHER:
        for number in tl.static_range(pieces):
            at, inside = places(number, 0, M, column, N, BN, B)
            owner = (number * B + tl.arange(0, B)) // (BN // 2) // rows
            begin = here + (R - 1 + row_from(owner, rank)) * pitch - owner.to(tl.int64) * rows * (N // 16 * 8)
            none = tl.zeros((B,), tl.int32)
            got = take_words(tl.multiple_of(begin + at, 16), inside & (owner != rank), none, owner, ctl, rank, WAIT_RESULT, R)
            tl.store(tl.multiple_of(y + at, 16), got, mask=inside & (owner != rank))
    advance(epochs, ctl, epoch, MOST)


@triton.jit
def held(owner, n, chunk, width):
    """Words of the part of ``owner``; ``n``, ``chunk`` and ``width`` are elements of 16 bits, and multiples of 16."""
    return size_of_part(owner, n, chunk, width) // 16 * 8


@triton.jit
def words_of(gathered, owner, chunk):
    """Where the words of the part of ``owner`` begin."""
    return gathered.to(tl.pointer_type(tl.int32), bitcast=True) + owner.to(tl.int64) * (chunk // 16 * 8)


@triton.jit
def gather(
    x, gathered, epoch, ctl, n, chunk, width, part, lot, capacity, offset, rank,
    R: tl.constexpr, S: tl.constexpr, B: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Exchange the parts of all ranks: each program takes ``lot`` blocks at once, and every so many behind those of the others."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    pitch = capacity.to(tl.int64) * WORDS
    sent, at = part * WORDS, tl.arange(0, B)  # blocks that are sent are whole
    x = x.to(tl.pointer_type(tl.int32), bitcast=True)
    for start in range(program * lot, part, programs * lot):
        word = start * WORDS + at
        inside = (at < lot * WORDS) & (word < sent)
        own = inside & (word < held(rank, n, chunk, width))
        mine = sendable(tl.load(tl.multiple_of(x + word, 16), mask=own, other=0))
        for step in tl.static_range(1, R):
            peer = (rank + step) % R
            there = row_of(ctl, peer, offset, epoch, row_from(rank, peer), pitch, R - 1)
            put_at(tl.multiple_of(there + word, 16), inside, mine)
        tl.store(tl.multiple_of(words_of(gathered, rank, chunk) + word, 16), mine, mask=own)
    here = row_of(ctl, rank, offset, epoch, 0, pitch, R - 1)
    step = tl.arange(0, S)[None, :] + 1
    source = (rank + step) % R
    for start in range(program * lot, part, programs * lot):
        word = start * WORDS + at[:, None]
        inside = (at[:, None] < lot * WORDS) & (word < sent) & (step < R)
        pointers = tl.multiple_of(here + row_from(source, rank) * pitch + word, [16, 1])
        none, sources = tl.zeros((B, S), tl.int32), tl.broadcast_to(source, (B, S))
        got = take_words(pointers, inside, none, sources, ctl, rank, WAIT_RESULT, R)
        places = tl.multiple_of(words_of(gathered, source, chunk) + word, [16, 1])
        tl.store(places, got, mask=inside & (word < held(source, n, chunk, width)))


@triton.jit(do_not_specialize=[
    "n", "chunk", "width", "part", "lot", "M", "N", "K", "stride_w", "capacity", "offset", "rank"
])  # fmt: skip
def gather_fused_kernel(
    x, gathered, read, behind, w, z, bias, gate, arrived, epochs, ctl,
    n, chunk, width, part, lot, M, N, K, stride_w, capacity, offset, rank,
    R: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, REST: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    B: tl.constexpr, WORDS: tl.constexpr, TMA: tl.constexpr, BIAS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """One call; a program for every BN columns. N, K and stride_w are multiples of 16, addresses of 16 bytes.

    x: this rank's part of what is exchanged; ``n``, ``chunk``, ``width``, ``part`` and ``capacity`` as in
    `exchange.exchange_words_kernel`, of blocks of WORDS words, and multiples of 16 where they are elements. ``lot``: blocks that a
    program takes at once; B: words that it has room for, a power of two; S: R - 1 rounded up to one. ``read``: ``gathered`` once
    more; TMA: the descriptor of its first BM rows, ``behind`` that of the REST rows behind them, if any, and w is one.
    """
    program = tl.program_id(0)
    epoch = tl.load(epochs + program) + 1
    writers = tl.minimum(tl.cdiv(part, lot), tl.num_programs(0))
    all_in = tl.load(arrived + program) + writers
    gather(x, gathered, epoch, ctl, n, chunk, width, part, lot, capacity, offset, rank, R, S, B, WORDS)
    if program < writers:
        publish_add(gate, 1, False)
    wait(gate, all_in, ctl, rank, WAIT_GATHERED, rank, R)
    tma_acquire(TMA)
    N, K, stride_w, _ = vectorised(N, K, stride_w, 16, True)
    column = program * BN
    if REST > 0:
        tile, rest = two_products(read, behind, w, bias, column, N, K, BM, REST, BN, BK, BIAS)
        store_block(z, rest.to(z.dtype.element_ty), BM, column, M, N, N, REST, BN)
    else:
        tile = product(read, w, bias, column, 0, M, M, N, K, K, stride_w, BM, BN, BK, TMA, BIAS)
    store_block(z, tile.to(z.dtype.element_ty), 0, column, M, N, N, BM, BN)
    advance(epochs, ctl, epoch, MOST)
    keep(arrived, all_in, MOST)

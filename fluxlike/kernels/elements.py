"""What the kernels of all-reduce and its family share: where blocks are, elements in words, sums, the count of calls."""

import triton
import triton.language as tl

from .lang import cta_barrier
from .sync import BASES, EPOCH

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
def size_of_part(owner, n, chunk, width):
    """Elements from owner · ``chunk`` to owner · ``chunk`` + ``width``, or ``n`` if that is less."""
    first = owner.to(tl.int64) * chunk
    return tl.maximum(tl.minimum(first + width, n) - first, 0)


@triton.jit
def place_in_part(
    tensor, table, tensors, part, which: tl.constexpr, n, chunk, width, owner, block,
    R: tl.constexpr, OWN: tl.constexpr, B: tl.constexpr, MANY: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """`place` of a block of the part of rank ``owner``: of a list ``part`` blocks, of one tensor `size_of_part`. OWN: ``tensor``
    is that part alone.
    """
    if MANY:
        start, left = place(tensor, table, tensors, part * R, which, n, owner * part + block, B, MANY, VEC)
    else:
        start = tensor + block.to(tl.int64) * B
        if not OWN:
            start += owner.to(tl.int64) * chunk // VEC * VEC
        left = size_of_part(owner, n, chunk, width) // VEC * VEC - block.to(tl.int64) * B
    return start, left


@triton.jit
def load_payload(x, left, WIDTH: tl.constexpr, B: tl.constexpr):
    """The B words from ``x`` on, as int32: WIDTH elements each, of which ``left`` are there; zeros behind them."""
    at = tl.arange(0, WIDTH * B)
    values = tl.load(x + at, mask=at < left, other=0)
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
def average(total, R: tl.constexpr):
    """``total`` (fp32) over R, rounded once.

    Triton's division is PTX's div.full, which may be off by two units in the last place. By a power of two it is exact (GPUs gave
    the exact bits for 2 and 4), and a product with the reciprocal makes Triton 3.6 spill in `sparse_all_reduce`.
    """
    if R & (R - 1) == 0:
        total = total / R
    else:
        total = tl.div_rn(total, R * 1.0)
    return total


@triton.jit
def reduce_words(words, element: tl.constexpr, OP: tl.constexpr, R: tl.constexpr, S: tl.constexpr, WIDTH: tl.constexpr):
    """The words [B] of the result out of those [B, S] of the ranks, in the order of the ranks."""
    column = tl.arange(0, S)[None, :]
    low, high = unpack(tl.sum(tl.where(column == 0, words, 0), axis=1), element, WIDTH)
    for source in tl.static_range(1, R):
        more_low, more_high = unpack(tl.sum(tl.where(column == source, words, 0), axis=1), element, WIDTH)
        low = combine(low, more_low, OP)
        high = combine(high, more_high, OP)
    if OP == AVG:
        low = average(low, R)
        high = average(high, R)
    return pack(low, high, element, WIDTH)


@triton.jit
def row_from(source, reader):
    """Number of the row for what comes from ``source`` to ``reader``, which has none for itself."""
    return source - (source > reader).to(tl.int32)


@triton.jit
def row_of(ctl, peer, offset, epoch, number, row, ROWS: tl.constexpr):
    """Row ``number`` of ``row`` words of ``peer``'s set for this call, as mapped here; all lie at ``offset`` bytes of its block.

    ROWS: of a set.
    """
    words = (tl.load(ctl + BASES + peer) + offset).to(tl.pointer_type(tl.int32))
    return words + ((epoch & 1) * ROWS + number) * row


@triton.jit
def advance(epochs, ctl, epoch, MOST: tl.constexpr):
    """The end of a call for this program: it advances its own number, and those of programs that the launch does not have.

    The barrier: a program that has waited for nobody, as one that comes down at the root of a tree, may have threads that have not
    read the number yet.
    """
    cta_barrier()
    keep(epochs, epoch, MOST)
    if tl.program_id(0) == 0:
        tl.store(ctl + EPOCH, epoch)


@triton.jit
def keep(numbers, number, MOST: tl.constexpr):
    """What this program, and those that the launch does not have in its place, find in ``numbers`` in the next launch."""
    theirs = tl.program_id(0) + tl.num_programs(0) * tl.arange(0, MOST)
    tl.store(numbers + theirs, tl.zeros((MOST,), tl.int64) + number, mask=theirs < MOST)

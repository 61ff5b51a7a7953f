"""Blocks of the matrices: loads and stores shared by the operations, by TMA descriptor or by pointers.

TMA needs a base address, and strides, that are multiples of 16 bytes; the pointer form takes anything and is also what GPUs
before Hopper use. Offsets are 64-bit: a matrix may hold more than 2**31 elements.
"""

import triton
import triton.language as tl


@triton.jit
def vectorised(N, K, stride_x, stride_w, VEC: tl.constexpr):
    """The same numbers, known to the compiler as multiples of 16 if VEC: blocks then move in 16-byte vectors."""
    if VEC:
        return sixteens(N), sixteens(K), sixteens(stride_x), sixteens(stride_w)
    else:
        return N, K, stride_x, stride_w


@triton.jit
def sixteens(number):
    """A multiple of 16, so that the compiler sees it: ``tl.multiple_of`` does nothing for a kernel's own argument."""
    return number // 16 * 16


@triton.jit
def load_a(x, row, k, M, K, stride_x, BM: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr):
    """Block [BM, BK] of the left operand x [M, K]; zero outside."""
    if TMA:
        return x.load([row, k])
    else:
        rows = row + tl.arange(0, BM)
        ks = k + tl.arange(0, BK)
        at = x + rows[:, None].to(tl.int64) * stride_x + ks[None, :]
        return tl.load(at, mask=(rows[:, None] < M) & (ks[None, :] < K), other=0.0)


@triton.jit
def load_b(w, column, k, N, K, stride_w, BN: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr, W_IS_KN: tl.constexpr):
    """Block [BK, BN] of the right operand, from w stored as [N, K] or, W_IS_KN, as [K, N]; zero outside."""
    if TMA:
        if W_IS_KN:
            return w.load([k, column])
        else:
            return w.load([column, k]).T
    else:
        columns = column + tl.arange(0, BN)
        ks = k + tl.arange(0, BK)
        inside = (ks[:, None] < K) & (columns[None, :] < N)
        if W_IS_KN:
            return tl.load(w + ks[:, None].to(tl.int64) * stride_w + columns[None, :], mask=inside, other=0.0)
        else:
            return tl.load(w + columns[None, :].to(tl.int64) * stride_w + ks[:, None], mask=inside, other=0.0)


@triton.jit
def multiply_add(a, b, acc):
    """acc + a · b, all sums in fp32.

    fp32 operands go through plain multiply-adds, one chain of them a result: over the whole of K its error would be twice that
    of cuBLAS, which adds several shorter ones. So each block's chain starts at zero and the blocks are added. Subtracting the
    negative keeps the compiler from making one chain again: it folds ``acc + dot`` into the dot.
    """
    if a.dtype == tl.float32:
        return acc - tl.dot(-a, b, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def add_bias(acc, bias, column, N, BN: tl.constexpr, BIAS: tl.constexpr):
    """acc [BM, BN] + bias [N] from ``column`` on, if there is one.

    Known when compiled: a load that is masked off still brings zeros into the layout of acc, which costs a tile 0.7 µs of an H200.
    """
    if BIAS:
        columns = column + tl.arange(0, BN)
        return acc + tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    else:
        return acc


@triton.jit
def halves(acc, BM: tl.constexpr, BN: tl.constexpr):
    """Left and right half of a tile."""
    return tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def store_block(out, value, row, column, rows, N, ld, BM: tl.constexpr, BN: tl.constexpr):
    """Masked store of a block to out [rows, N] with row stride ld."""
    r = row + tl.arange(0, BM)
    c = column + tl.arange(0, BN)
    tl.store(out + r[:, None].to(tl.int64) * ld + c[None, :], value, mask=(r[:, None] < rows) & (c[None, :] < N))

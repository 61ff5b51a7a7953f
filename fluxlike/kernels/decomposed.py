"""The signals of the schedule "decomposed", around products that are not ours, and its sum over ranks.

`ops.decomposed` has the record: what is queued where, which signal pairs with which wait, and why it is sound.
"""

import triton
import triton.language as tl

from .ag_gemm import end_call
from .blocks import add_bias, sixteens, store_block, vectorised
from .gemm_rs import add_partials
from .sync import (
    EPOCH,
    WAIT_PARTIAL,
    WAIT_SHARD,
    finish,
    full_flag,
    is_last_program,
    reset,
    wait,
    wait_credits,
)


@triton.jit(do_not_specialize=["slot", "rank"])
def decomposed_credits_kernel(ctl, slot, rank, R: tl.constexpr):
    """What the stream holds behind this may let copies go to the peers' slots. One program."""
    wait_credits(ctl, slot, rank, R)  # (C)


@triton.jit(do_not_specialize=["slot", "rank", "first", "number"])
def ag_gemm_decomposed_arrived_kernel(full, ctl, slot, rank, first, number, R: tl.constexpr):
    """What the stream holds behind this may read the shards of ``number`` ranks from ``first`` on. One program."""
    for source in range(first, first + number):
        wait(full_flag(full, slot, source, 0, R), 1, ctl, rank, WAIT_SHARD, source, R)  # (B)


@triton.jit(do_not_specialize=["M", "chunk_rows", "slot", "rank"])
def ag_gemm_decomposed_end_kernel(full, ctl, M, chunk_rows, slot, rank, R: tl.constexpr):
    """The call ends: nothing reads its slots any more. One program."""
    end_call(full, ctl, M, tl.load(ctl + EPOCH) + 1, slot, rank, chunk_rows, chunk_rows, False, R, 1, True, False)  # (D)


_NUMBERS = ["N", "ld", "set_elements", "chunk_rows", "rows", "rank", "slot"]


@triton.jit(do_not_specialize=_NUMBERS)
def gemm_rs_decomposed_sum_kernel(
    own, stage, bias, out, full, ctl, N, ld, set_elements, chunk_rows, rows, rank, slot,
    R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, VEC: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """out [rows, N] = own [rows, ld] + bias + the peers' partial sums in ``stage``, in fp32, rounded once; then the call ends.

    The order is own, bias, r+1, r+2, …. Any number of programs: they wait for peers only.
    """
    N, _, _, _ = vectorised(N, 16, 16, 16, VEC)
    ld = sixteens(ld)
    set_elements = sixteens(set_elements)
    epoch = tl.load(ctl + EPOCH) + 1
    for step in tl.static_range(1, R):  # (B)
        source = (rank + step) % R
        wait(full_flag(full, slot, source, 0, R), tl.where(rows > 0, 1, 0), ctl, rank, WAIT_PARTIAL, source, R)
    blocks_n = tl.cdiv(N, BN)
    for block in range(tl.program_id(0), tl.cdiv(rows, BM) * blocks_n, tl.num_programs(0)):
        row = block // blocks_n * BM
        column = block % blocks_n * BN
        r = row + tl.arange(0, BM)
        c = column + tl.arange(0, BN)
        at = own + r[:, None].to(tl.int64) * ld + c[None, :]
        acc = tl.load(at, mask=(r[:, None] < rows) & (c[None, :] < N), other=0.0).to(tl.float32)
        acc = add_bias(acc, bias, column, N, BN, BIAS)
        acc = add_partials(acc, stage, slot, chunk_rows, row, column, rank, rows, ld, set_elements, R, BM, BN)
        store_block(out, acc.to(out.dtype.element_ty), row, column, rows, N, N, BM, BN)
    if is_last_program(ctl, False):
        reset(full, slot, R)
        finish(ctl, slot, rank, epoch, R)  # (D)

"""The sum of what comes from all nodes. `ops.nodes` has the record."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["this"])
def sum_over_nodes_kernel(
    parts, own, bias, out, number, columns, pitch, this, J: tl.constexpr, B: tl.constexpr, BIAS: tl.constexpr
):  # fmt: skip
    """out [number] = the sum of J rows of ``parts``, ``pitch`` elements apart, in fp32, in their order, rounded once.

    In the place of row ``this`` stands ``own``. With BIAS that [columns] is added last, in each row of so many elements.
    """
    pitch = pitch // 16 * 16  # a multiple, so that the compiler sees it
    for block in range(tl.program_id(0), tl.cdiv(number, B), tl.num_programs(0)):
        at = block.to(tl.int64) * B + tl.arange(0, B)
        inside = at < number
        acc = tl.zeros((B,), tl.float32)
        for node in tl.static_range(J):
            row = tl.where(node == this, own, parts + tl.full((), node, tl.int64) * pitch)
            acc += tl.load(row + at, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            acc += tl.load(bias + at % columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)

"""What Triton makes of operands and their types, where the interpreter asks, without the work where it changes nothing.

Most operations of a kernel are between numbers of one kind, or with a constant: addresses, masks, loop counters. Triton promotes,
casts and broadcasts them by rules for all kinds, and makes types anew for each, in Python: a third of the time of interpreting.
"""

from typing import Any

import triton.language as tl
from triton.language.semantic import TritonSemantic

#: Two operands of one of these, or one and a number that fits, are computed as they are.
_PLAIN = frozenset(map(id, (tl.int32, tl.int64, tl.float32)))
_INT32 = range(-(2**31), 2**31)


def _fits(number: Any, dtype: tl.dtype) -> bool:
    """Whether a constant takes the kind of the tensor beside it, by Triton's rules and without a word of theirs."""
    if type(number) is int:
        return number in _INT32
    return type(number) is float and dtype is tl.float32


class Semantic(TritonSemantic):  # type: ignore[misc]
    """Triton's, with a shorter way to what it says."""

    def binary_op_type_checking_impl(
        self, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False, arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> tuple[Any, Any]:  # fmt: skip
        left, right = type(lhs) is tl.tensor, type(rhs) is tl.tensor
        if left and right:
            plain = id(rhs.dtype) in _PLAIN
            if plain and lhs.dtype is rhs.dtype:
                # shapes are made once (`interpreter._extents`), so equal ones are the same
                return (lhs, rhs) if lhs.shape is rhs.shape else self.broadcast_impl_value(lhs, rhs)
            if plain and allow_lhs_ptr and rhs.dtype is not tl.float32 and lhs.dtype.is_ptr():
                return self.broadcast_impl_value(lhs, rhs)  # type: ignore[no-any-return]
        elif arithmetic_check and (left or right):
            kind = lhs.dtype if left else rhs.dtype
            if id(kind) in _PLAIN and _fits(rhs if left else lhs, kind):
                constant = self.scalar_constant(rhs if left else lhs, dtype=kind)
                return self.broadcast_impl_value(*((lhs, constant) if left else (constant, rhs)))  # type: ignore[no-any-return]
        return super().binary_op_type_checking_impl(  # type: ignore[no-any-return]
            lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        )


# types of blocks, made once

_made_by_triton = tl.block_type.__init__
_known: dict[tuple[int, tuple[int, ...]], dict[str, Any]] = {}
#: They are there for good, and so are their ids.
_SCALARS = {id(member): member for member in vars(tl).values() if type(member) is tl.dtype}


def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """``tl.block_type.__init__``."""
    key = id(element_ty), tuple(shape)
    if key[0] not in _SCALARS or not key[1] or any(type(extent) is not int for extent in key[1]):
        _made_by_triton(self, element_ty, shape)
        return
    known = _known.get(key)
    if known is None:
        _made_by_triton(self, element_ty, shape)
        known = _known[key] = dict(vars(self))
    vars(self).update(known)

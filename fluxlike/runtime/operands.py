"""What Triton makes of operands and their types, where the interpreter asks, without the work that changes nothing; and bfloat16.

Most operations of a kernel are between numbers of one kind, or with a constant: addresses, masks, loop counters. Triton promotes,
casts and broadcasts them by rules for all kinds, and makes types anew for each, in Python: a third of the time of interpreting.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as stock
from triton.language.semantic import TritonSemantic

from .rewriting import plain

#: Two operands of one of these, or one and a number that fits, are computed as they are.
_PLAIN = frozenset(map(id, (tl.int32, tl.int64, tl.float32)))
_INT32 = range(-(2**31), 2**31)
_INTEGERS = frozenset(map(id, (tl.int32, tl.int64)))
_WHOLE = _INTEGERS | {id(tl.int1)}
#: What of whole numbers is cast by numpy as Triton does, and to what.
_CAST = _WHOLE | {id(tl.int16)}
_MADE = {id(tl.int16): np.int16, id(tl.int32): np.int32, id(tl.int64): np.int64, id(tl.float32): np.float32}


# bfloat16, kept by the interpreter as its bits in uint16


def widen(bits: np.ndarray) -> np.ndarray:
    """float32 values of bfloat16 bits; exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """bfloat16 bits of float values, to nearest, ties to even, as GPUs and torch round."""
    values = np.asarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    tie_to_even = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + np.uint32(0x7FFF) + tie_to_even) >> np.uint32(16)).astype(np.uint16)
    nan = np.isnan(values)
    return np.where(nan, np.uint16(0x7FC0), rounded) if nan.any() else rounded


# operands


class _Handle(stock.TensorHandle):  # type: ignore[misc]
    """What is made here, whose elements are no wider than their kind: without Triton's look at that for each."""

    def __init__(self, data: Any, dtype: Any) -> None:
        self.data, self.dtype = data, dtype
        self.attr: dict[str, Any] = {}


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
                return self.broadcast_impl_value(lhs, rhs)
            if plain and allow_lhs_ptr and rhs.dtype is not tl.float32 and lhs.dtype.is_ptr():
                return self.broadcast_impl_value(lhs, rhs)
        elif arithmetic_check and (left or right):
            kind = lhs.dtype if left else rhs.dtype
            if id(kind) in _PLAIN and _fits(rhs if left else lhs, kind):
                constant = self.scalar_constant(rhs if left else lhs, dtype=kind)
                return self.broadcast_impl_value(*((lhs, constant) if left else (constant, rhs)))
        return super().binary_op_type_checking_impl(  # type: ignore[no-any-return]
            lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        )

    def broadcast_impl_value(self, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        # shapes are made once (`_extents`), so equal ones are the same
        if lhs.shape is rhs.shape:
            return lhs, rhs
        left, right = lhs.type.is_block(), rhs.type.is_block()
        if left and not right:
            return lhs, _spread(rhs, lhs.type)
        if right and not left:
            return _spread(lhs, rhs.type), rhs
        return super().broadcast_impl_value(lhs, rhs)  # type: ignore[no-any-return]

    def cast(self, input: Any, dst_ty: Any, fp_downcast_rounding: str | None = None) -> Any:
        kind, given = dst_ty.scalar, input.dtype
        if given is kind:
            return input
        if fp_downcast_rounding is not None:
            return super().cast(input, dst_ty, fp_downcast_rounding)
        if id(kind) in _MADE and id(given) in _CAST:
            values = input.handle.data.astype(_MADE[id(kind)])
        elif given is tl.bfloat16 and kind is tl.float32:
            values = widen(input.handle.data)
        elif given is tl.float32 and kind is tl.bfloat16:
            values = narrow(input.handle.data)
        elif given is tl.int64 and type(kind) is tl.pointer_type:
            values = input.handle.data.view(np.uint64)
        else:
            return super().cast(input, dst_ty)
        return tl.tensor(_Handle(values, kind), input.type.with_element_ty(kind) if input.type.is_block() else kind)


def _spread(scalar: Any, form: Any) -> Any:
    """A tensor of one element in each place of a block like ``form``."""
    given = scalar.handle
    spread = np.full(form.shape, given.data, given.data.dtype)
    return tl.tensor(_Handle(spread, given.dtype), form.with_element_ty(scalar.dtype))


# operators of tensors, by numpy at once


def _quotient(a: Any, b: Any) -> Any:
    """As C divides: towards zero."""
    return (a - np.fmod(a, b)) // b


#: What Triton's interpreter calls in the end for operands of these kinds.
_DIRECT: dict[str, tuple[Callable[[Any, Any], Any], frozenset[int]]] = {
    "add": (np.add, _PLAIN),
    "sub": (np.subtract, _PLAIN),
    "mul": (np.multiply, _PLAIN),
    "floordiv": (_quotient, _INTEGERS),
    "mod": (np.fmod, _INTEGERS),
    "and": (np.bitwise_and, _WHOLE),
    "or": (np.bitwise_or, _WHOLE),
}
_COMPARED = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal}
#: Of these, a constant beside a tensor follows other rules.
_BITS = ("and", "or")


def operators(usual: dict[str, Callable]) -> dict[str, Callable]:
    """Shorter ways to the same results, where there are any, for the operators of tensors ``usual`` by name: ``__add__``, …"""
    found: dict[str, Callable] = {}
    for name, (apply, kinds) in (_DIRECT | {name: (apply, _PLAIN) for name, apply in _COMPARED.items()}).items():
        for swapped in (False, True):
            full = f"__{'r' if swapped else ''}{name}__"
            if full in usual:
                found[full] = _operator(usual[full], apply, kinds, name in _COMPARED, name not in _BITS, swapped)
                if name == "add":
                    found[full] = _shifted(found[full])
    return found


def _operator(
    usual: Callable, apply: Callable[[Any, Any], Any], kinds: frozenset[int], compares: bool, constants: bool, swapped: bool
) -> Callable:
    def operator(self: Any, other: Any) -> Any:
        kind = self.dtype
        if id(kind) not in kinds:
            return usual(self, other)
        left = self.handle.data
        if type(other) is tl.tensor:
            if other.dtype is not kind:
                if id(kind) not in _INTEGERS or id(other.dtype) not in _INTEGERS:
                    return usual(self, other)
                kind = tl.int64
            right = other.handle.data
        else:
            right = other.value if type(other) is tl.constexpr else other
            if not constants or not _fits(right, kind):
                return usual(self, other)
        form = _form(self, other)
        if form is None:
            return usual(self, other)
        values = apply(right, left) if swapped else apply(left, right)
        element = tl.int1 if compares else kind
        if form.scalar is not element:
            form = form.with_element_ty(element) if form.is_block() else element
        return tl.tensor(_Handle(values, kind), form)

    return operator


def _shifted(usual: Callable) -> Callable:
    """The sum of a pointer and a number; of others the ``usual`` one."""

    def operator(self: Any, other: Any) -> Any:
        kind = self.dtype
        if type(kind) is not tl.pointer_type:
            return usual(self, other)
        if type(other) is tl.tensor:
            if id(other.dtype) not in _INTEGERS:
                return usual(self, other)
            offset = other.handle.data.astype(np.uint64)
        else:
            offset = other.value if type(other) is tl.constexpr else other
            if type(offset) is not int or offset not in _INT32:
                return usual(self, other)
            offset = np.uint64(offset % 2**64)
        form = _form(self, other)
        if form is None:
            return usual(self, other)
        width = np.uint64(max(1, kind.element_ty.primitive_bitwidth // 8))
        return tl.tensor(_Handle(self.handle.data + width * offset, kind), form)

    return operator


def _form(tensor: Any, other: Any) -> Any:
    """The type of ``tensor`` broadcast to the shape of ``other`` too, where numpy does that as Triton does, else None."""
    form = tensor.type
    if tensor.handle.data.ndim == 0:  # of a sum over a whole block
        return None
    # shapes are made once (`_extents`), so equal ones are the same
    if type(other) is not tl.tensor or other.shape is tensor.shape:
        return form
    if other.handle.data.ndim == 0:
        return None
    if not other.type.is_block():
        return form
    if not form.is_block():
        return other.type.with_element_ty(form)
    left, right = tensor.handle.data.shape, other.handle.data.shape
    if len(left) != len(right) or any(a != b and a != 1 and b != 1 for a, b in zip(left, right, strict=True)):
        return None
    return tl.block_type(tensor.dtype, [max(a, b) for a, b in zip(left, right, strict=True)])


# types of blocks, made once: nobody changes them

_made_by_triton = tl.block_type.__init__
_known: dict[tuple[int, tuple[int, ...], tuple[type, ...]], dict[str, Any]] = {}
#: They are there for good, and so are their ids.
_SCALARS = {id(member): member for member in vars(tl).values() if type(member) is tl.dtype}
_related: dict[tuple[int, str], Any] = {}  # by types' names, as Triton's own tuples take long to hash


def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """``tl.block_type.__init__``."""
    extents = tuple(shape)
    key = id(element_ty), extents, tuple(map(type, extents))  # by types, too: 4.0 is 4
    known = _known.get(key)
    if known is None:
        _made_by_triton(self, element_ty, shape)
        if id(element_ty) in _SCALARS and all(type(extent) is int for extent in extents):
            _known[key] = dict(vars(self))
    else:
        vars(self).update(known)


def with_element_ty(self: Any, scalar_ty: Any) -> Any:
    """``tl.block_type.with_element_ty``."""
    key = id(scalar_ty), self.name
    found = _related.get(key)
    if found is None:
        found = tl.block_type(scalar_ty, self.shape)
        if key[0] in _SCALARS:
            _related[key] = found
    return found


# what Triton makes anew for every value, a fifth of the time of a launch: made once


@functools.cache
def _extents(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """``shape`` and ``numel`` of a tensor as constants."""
    return tl.tuple([tl.constexpr(extent) for extent in shape]), tl.constexpr(math.prod(shape))


_NO_EXTENTS = _extents(())
_extents_of: dict[str, tuple[Any, Any]] = {}  # by types' names, as Triton's own tuples take long to hash


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    """``tl.tensor.__init__``."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    found = _extents_of.get(type.name) if type.is_block() else _NO_EXTENTS
    if found is None:
        found = _extents_of[type.name] = _extents(tuple(type.shape))
    self.shape, self.numel = found


def _equal_types(self: Any, other: Any) -> bool:
    """``tl.dtype.__eq__``."""
    other = plain(other)
    return isinstance(other, tl.dtype) and self.name == other.name


_scalar_np_dtype = functools.cache(stock._get_np_dtype)


def _np_dtype(type: Any) -> np.dtype:
    """``triton.runtime.interpreter._get_np_dtype``."""
    scalar = type.scalar
    return np.dtype(np.uint64) if scalar.is_ptr() else _scalar_np_dtype(scalar)


def lighter() -> list[tuple[Any, str, Any]]:
    """What is replaced by these, and by the types of blocks, as `interpreter._patches`; not what does otherwise in this Triton."""
    found = [(tl.dtype, "__eq__", _equal_types), (stock, "_get_np_dtype", _np_dtype)]
    found += [(tl.block_type, "__init__", init_block_type), (tl.block_type, "with_element_ty", with_element_ty)]
    made, ours = tl.tensor(None, tl.block_type(tl.int32, [2, 4])), object.__new__(tl.tensor)
    _init_tensor(ours, made.handle, made.type)
    attributes = [{name: str(value) for name, value in vars(tensor).items()} for tensor in (made, ours)]
    return [*found, (tl.tensor, "__init__", _init_tensor)] if attributes[0] == attributes[1] else found

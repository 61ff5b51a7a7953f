"""The short ways of `runtime.operands` end where Triton's do."""

import itertools

import numpy as np
import pytest
import slow
import triton.language as tl
import triton.runtime.interpreter as stock
from triton.language.semantic import TritonSemantic

from fluxlike.runtime import interpreter, operands

TYPES = (tl.int1, tl.int8, tl.int16, tl.int32, tl.uint32, tl.int64, tl.float16, tl.bfloat16, tl.float32, tl.float64)
TYPES += (tl.pointer_type(tl.float32),)
SHAPES = ((), (4,), (1, 4), (2, 4), (2, 1))
NUMBERS = (0, -3, 2**31 - 1, 2**31, -(2**31), 2**40, True, 0.5, tl.constexpr(2))
#: Of what calls it: additions, comparisons, bit operations, divisions.
USES = ((True, True), (False, False, True), (False, False, False), (False, False, True, True))


def block(dtype, shape):
    values = np.arange(1, 1 + int(np.prod(shape))).reshape(shape or (1,)).astype(stock._get_np_dtype(dtype))
    return tl.tensor(stock.TensorHandle(values, dtype), tl.block_type(dtype, list(shape)) if shape else dtype)


def said(semantic, left, right, use):
    """Types and values of the two operands, or the error."""
    try:
        found = semantic.binary_op_type_checking_impl(left, right, *use)
    except Exception as problem:
        return type(problem), str(problem)
    return [(str(t.type), str(t.dtype), [plain(n) for n in t.shape], t.handle.data.dtype, t.handle.data.tolist()) for t in found]


def plain(value):
    return getattr(value, "value", value)


def compared(pairs):
    short, long = operands.Semantic(interpreter.builder), TritonSemantic(interpreter.builder)
    errors = 0
    for left, right in pairs:
        for use in USES:
            theirs = said(long, left, right, use)
            assert said(short, left, right, use) == theirs, (left, right, use)
            errors += isinstance(theirs, tuple)
    return errors


def test_two_tensors():
    with interpreter._patched():
        blocks = [block(dtype, shape) for dtype in TYPES for shape in SHAPES]
        assert compared(itertools.product(blocks, blocks)) > 0


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # of 2^40, by both
def test_a_tensor_and_a_number():
    with interpreter._patched():
        blocks = [block(dtype, shape) for dtype in TYPES for shape in SHAPES]
        pairs = list(itertools.product(blocks, NUMBERS))
        assert compared(pairs) > 0 and compared((number, tensor) for tensor, number in pairs) > 0


def outcome(operation, *operands):
    """Type and values, and the kind that the interpreter notes, or the error."""
    try:
        with np.errstate(all="ignore"):
            made = operation(*operands)
    except Exception as problem:
        return type(problem), str(problem)
    shape, data = [plain(n) for n in made.shape], made.handle.data
    assert stock._validate_np_data_size(data, made.handle.dtype)  # Triton asks that of each value, `operands` of none of its own
    return str(made.type), str(made.dtype), shape, str(made.handle.dtype), data.dtype, str(data.tolist())  # NaN, too


OPERATORS = [f"__{side}{name}__" for name in ("add", "sub", "mul", "floordiv", "mod", "and", "or") for side in ("", "r")]
OPERATORS += [f"__{name}__" for name in ("lt", "le", "gt", "ge", "eq", "ne")]
#: Of each way to a result one; these are quick.
FIRST = ["__add__", "__radd__", "__floordiv__", "__mod__", "__and__", "__lt__"]
OTHERS = [name for name in OPERATORS if hasattr(tl.tensor, name) and name not in FIRST]


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("name", slow.behind(len(FIRST), FIRST + OTHERS))
def test_operators(name):
    usual = interpreter._bind(vars(tl.tensor)[name])
    with interpreter._patched():
        short = vars(tl.tensor)[name]
        assert short.__module__ == operands.__name__
        blocks = [block(dtype, shape) for dtype in TYPES for shape in SHAPES]
        blocks.append(tl.tensor(stock.TensorHandle(np.array(7, np.int32), tl.int32), tl.int32))  # as a sum leaves it
        blocks.append(tl.tensor(stock.TensorHandle(np.array([-7], np.int32), tl.int32), tl.int32))
        results = 0
        for left, right in itertools.product(blocks, [*blocks, *NUMBERS]):
            theirs = outcome(usual, left, right)
            assert outcome(short, left, right) == theirs, (left, right)
            results += len(theirs) > 2
        assert results > 50


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_casts(dtype):
    short, long = operands.Semantic(interpreter.builder), TritonSemantic(interpreter.builder)
    with interpreter._patched():
        for kind, shape in itertools.product(TYPES, SHAPES):
            signs = (1, -1) if dtype.is_int_signed() and dtype is not tl.int1 else (1,)
            for rounding, sign in itertools.product((None, "rtne"), signs):
                given = block(dtype, shape)
                if sign < 0:
                    np.negative(given.handle.data, out=given.handle.data)
                assert outcome(short.cast, given, kind, rounding) == outcome(long.cast, given, kind, rounding), (kind, shape)


def test_nothing_is_done_where_nothing_is_to_be_done():
    with interpreter._patched():
        left, right = block(tl.int32, (2, 4)), block(tl.int32, (2, 4))
        made = interpreter._semantic.binary_op_type_checking_impl(left, right, True, True)
        assert made[0] is left and made[1] is right


@pytest.mark.parametrize("shape", ([4], [2, 4], [8, tl.constexpr(2)], tl.tuple([2, 8]), tl.tuple([tl.constexpr(4)])), ids=str)
def test_types_of_blocks_that_are_known(shape):
    for dtype in TYPES:
        right = vars(tl.block_type(dtype, shape))
        for _ in range(2):
            made = object.__new__(tl.block_type)
            operands.init_block_type(made, dtype, shape)
            assert vars(made) == right and made.element_ty is dtype
    for bad in ([], [3], [4.0]):
        with pytest.raises((TypeError, ValueError)):
            operands.init_block_type(object.__new__(tl.block_type), tl.int32, bad)


def test_a_value_wider_than_its_kind_is_refused():
    with interpreter._patched(), pytest.raises(ValueError, match="itemsize"):
        stock.TensorHandle(np.zeros(4, np.int64), tl.int32)


def test_types_with_another_element():
    usual = tl.block_type.with_element_ty
    with interpreter._patched():
        for dtype, other, shape in itertools.product(TYPES, TYPES, ([4], [2, 4], [4, 2])):
            given = tl.block_type(dtype, shape)
            for _ in range(2):
                made = given.with_element_ty(other)
                assert vars(made) == vars(usual(given, other)) and made.element_ty is other and vars(given)["element_ty"] is dtype


def test_one_element_in_each_place_of_a_block():
    """Also of the outcome of a comparison, which the interpreter notes as of the kind that was compared."""
    with interpreter._patched():
        for scalar in (*(block(dtype, ()) for dtype in TYPES), block(tl.int32, ()) < 5):
            short = operands.Semantic(interpreter.builder).broadcast_impl_value(scalar, block(tl.float32, (2, 4)))[0]
            long = TritonSemantic(interpreter.builder).broadcast_impl_value(scalar, block(tl.float32, (2, 4)))[0]
            assert outcome(lambda made: made, short)[:4] == outcome(lambda made: made, long)[:4]
            assert short.handle.data.tolist() == long.handle.data.tolist() and short.handle.data.dtype == scalar.handle.data.dtype

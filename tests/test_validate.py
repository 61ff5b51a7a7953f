"""The checks of a call's tensors and sizes at their edges: the last that passes and the first that does not. Without ranks."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import forward_ad

from fluxlike.ops import tiling, validate
from fluxlike.runtime import world

BF16 = torch.bfloat16
CPU = torch.device("cpu")


def test_what_has_a_byte_in_common():
    """An ``out`` is refused for each place where a byte of it is one of an operand's, and for no other, as between rows."""
    matrices = [
        *((3, columns, pitch, 1) for columns in (1, 4) for pitch in (0, 2, 4, 9)),  # expanded, overlapping, close, apart
        *((columns, 3, 1, pitch) for columns in (1, 4) for pitch in (0, 2, 4, 9)),  # their transposes
        *((2, 3, 9, 1), (3, 2, 1, 9)),
        *((1, 4, 5, 1), (4, 1, 1, 5), (4, 1, 5, 7), (1, 4, 5, 7), (1, 1, 5, 7)),
        *((0, 4, 4, 1), (4, 0, 1, 1)),
    ]
    memory = torch.zeros(64, dtype=BF16)
    for sizes in (*matrices, (4, 1), (1, 5), (0, 1)):
        shape, strides = sizes[: len(sizes) // 2], sizes[len(sizes) // 2 :]
        t = memory.as_strided(shape, strides, 20)
        has = set(torch.arange(64).as_strided(shape, strides, 20).flatten().tolist())
        for start in range(60):
            for number in (0, 1, 4):
                right = not has.isdisjoint(range(start, start + number))
                assert validate.overlaps(memory[start : start + number], t) is right, (shape, strides, start, number)


def test_how_operands_may_lie():
    """What has one row, one column or no element has strides that say nothing; with two they do."""
    memory = torch.zeros(64)
    for size, stride, right in ((0, 3, True), (1, 3, True), (2, 3, False), (2, 1, True), (2, 0, False)):
        assert validate.is_one_row(memory.as_strided((size,), (stride,))) is right, (size, stride)
    lies = {
        (3, 4, 4, 1): (True, True),
        (3, 4, 9, 1): (True, True),
        (3, 4, 1, 3): (True, False),  # transposed, as only a weight may be
        (3, 4, 1, 9): (True, False),
        (3, 4, 9, 2): (False, False),
        (2, 2, 9, 2): (False, False),
        (3, 1, 9, 2): (True, True),
        (1, 4, 9, 2): (True, False),
        (0, 4, 9, 2): (True, True),
        (3, 0, 9, 2): (True, True),
    }
    for (rows, columns, *strides), (weight, x) in lies.items():
        t = memory.as_strided((rows, columns), strides)
        assert validate.is_in_rows_or_columns(t) is weight, (rows, columns, strides)
        with contextlib.nullcontext() if x else pytest.raises(ValueError, match="its rows must be contiguous"):
            validate.in_rows("gemm_rs", t)


def test_sizes_up_to_their_limits():
    """Of an operand, of all ranks together, of a context, and of the steps that stream_k counts."""
    validate.countable("gemm_rs", "M", tiling.MAX_SIZE)
    with pytest.raises(ValueError, match=f"M={tiling.MAX_SIZE + 1} is more than {tiling.MAX_SIZE}, up to which kernels count"):
        validate.countable("gemm_rs", "M", tiling.MAX_SIZE + 1)
    for fine in (None, 7, 8, tiling.MAX_SIZE):
        validate.whole("gemm_rs", "k", fine, 7)
    too_large = tiling.MAX_SIZE + 1
    for bad, why in ((6, "is less than the 7 of"), (True, "is not a whole"), (7.0, "is not a whole"), (too_large, "is more than")):
        with pytest.raises(ValueError, match=f"gemm_rs: k={bad} {why}"):
            validate.whole("gemm_rs", "k", bad, 7)
    tile = tiling.choose_stream_k((9, 0), torch.float32, 1 << 16, 1 << 16)
    m, n, k = tile.bm << 10, tile.bn << 10, tile.bk << 10
    for fine in ((m - tile.bm, n, k), (m, n - tile.bn, k), (m, n, k - tile.bk)):
        validate.countable_steps("gemm_rs", *fine, tile)
    with pytest.raises(ValueError, match=f"are {1 << 30} steps of .*counts less than {1 << 30}"):
        validate.countable_steps("gemm_rs", m, n, k - tile.bk + 1, tile)
    x, asked = torch.zeros(2, 2), []
    ctx = SimpleNamespace(dtype=torch.float32, raise_if_failed=lambda: asked.append("failed?"))
    validate.call("gemm_rs", ctx, None, x, {"M": (8, 8, "max_m"), "N": (3, 4, "n")})
    assert asked
    for m, n, says in ((9, 4, "M=9 is more than the context's max_m=8"), (8, 5, "N=5 is more than the context's n=4")):
        with pytest.raises(ValueError, match=says):
            validate.call("gemm_rs", ctx, None, x, {"M": (m, 8, "max_m"), "N": (n, 4, "n")})


def test_operands_of_a_call(monkeypatch):
    """Each is looked at, and the rows of all ranks together: those of one alone may be few enough."""
    monkeypatch.setattr(world, "current", lambda: SimpleNamespace(device=CPU))
    x, w, b = torch.zeros(3, 8), torch.zeros(4, 8), torch.zeros(4)
    for size, rank, m in ((1, 0, 3), (4, 0, 12), (4, 3, 12), (4, 3, None), (4, 0, 10), (2, 1, 7)):
        assert validate.gathered_operands(x, w, b, m, SimpleNamespace(size=size, rank=rank)) == ([w], [b], m or 12)
    for size, rank, m in ((1, 0, 2), (1, 0, 4), (4, 3, 11), (4, 0, 13), (2, 1, 8), (2, 1, 5)):
        with pytest.raises(ValueError, match=f"this rank holds 3 of m={m} rows, and torch.chunk gives rank {rank} of {size} "):
            validate.gathered_operands(x, w, b, m, SimpleNamespace(size=size, rank=rank))
    many = x[:1].expand(1 << 29, 8)
    with pytest.raises(ValueError, match=f"ag_gemm: M={1 << 31} is more than"):
        validate.gathered_operands(many, w, b, None, SimpleNamespace(size=4, rank=0))
    most = x[:1, :1].expand(tiling.MAX_SIZE + 1, 1)
    for name, operands in (("M", (most, w[:, :1])), ("N", (x[:, :1], most))):
        with pytest.raises(ValueError, match=f"gemm_rs: {name}={tiling.MAX_SIZE + 1} is more"):
            validate.operands("gemm_rs", *operands, None)
    with pytest.raises(ValueError, match="x has strides"):
        validate.operands("gemm_rs", torch.zeros(8, 3).T, w, b)
    with forward_ad.dual_level():
        for i, name in enumerate(("x", "weight", "bias")):
            given = [forward_ad.make_dual(t, torch.ones_like(t)) if i == j else t for j, t in enumerate((x, w, b))]
            with pytest.raises(ValueError, match=f"gemm_rs: {name} has a tangent"):
                validate.operands("gemm_rs", *given)


def test_a_context_of_another_operation():
    """Of a class that several operations have, as those of groups on several nodes."""
    of_nodes = type("NodesContext", (), {"op": "ag_gemm"})
    validate.context("ag_gemm", of_nodes(), of_nodes)
    validate.context("gemm_rs", None, of_nodes)
    for ctx, found in ((of_nodes(), "ag_gemm"), (SimpleNamespace(op="gemm_rs"), "gemm_rs"), (3, "int")):
        with pytest.raises(ValueError, match=f"gemm_rs: ctx is of '{found}', it must come from fluxlike.create_gemm_rs_context"):
            validate.context("gemm_rs", ctx, of_nodes)


def test_addresses():
    """Elements lie at multiples of their size, of every dtype that kernels read as such; others are moved as bytes."""
    room = bytearray(64)
    for dtype in (BF16, torch.float16, torch.float32, torch.int64, torch.complex64):
        for at in range(dtype.itemsize + 1):
            t = torch.frombuffer(room, dtype=dtype, offset=at, count=4)
            if dtype not in validate.DTYPES or t.data_ptr() % dtype.itemsize == 0:
                validate.readable("all_gather", "x", t, 1, CPU)
            else:
                with pytest.raises(ValueError, match=f"begins at address {t.data_ptr():#x}, no multiple of the {dtype.itemsize} "):
                    validate.readable("all_gather", "x", t, 1, CPU)
    validate.readable("all_gather", "x", torch.zeros(0, 4), 2, CPU)  # at no address


def test_every_out_has_memory_of_its_own():
    """Of all weights, biases and other results, the last ones too; and autograd is told that it is written."""
    memory = torch.zeros(256)
    x, *weights = (memory[16 * i : 16 * i + 16].view(4, 4) for i in range(4))
    biases = [memory[64 + 16 * i : 68 + 16 * i] for i in range(3)]
    outs = [memory[112 + 16 * i : 128 + 16 * i].view(4, 4) for i in range(3)]
    assert validate.outputs(outs, 4, x, weights, biases) == outs
    assert [t.shape for t in validate.outputs([], 5, x, weights, biases)] == [(5, 4)] * 3
    at_biases = [memory[start : start + 16].view(4, 4) for start in (64, 80, 96)]
    for name, taken in (("x", [x]), ("weight", weights), ("bias", at_biases), ("another out", outs[:2])):
        for where in taken:
            with pytest.raises(ValueError, match=f"out overlaps {name} in memory"):
                validate.outputs([*outs[:2], where], 4, x, weights, biases)
    for name, where in (("x", x), ("weight", weights[0]), ("bias", memory[67:83].view(4, 4))):
        with pytest.raises(ValueError, match=f"out overlaps {name} in memory"):
            validate.output("gemm_rs", where, (4, 4), x, weights[0], biases[0])
    apart = [torch.zeros(4, 4) for _ in range(2)]
    before = [t._version for t in apart]
    validate.outputs(apart, 4, x, weights[:2], biases[:2])
    validate.output("gemm_rs", apart[0], (4, 4), x, weights[0], None)
    assert [t._version - version for t, version in zip(apart, before, strict=True)] == [2, 1]

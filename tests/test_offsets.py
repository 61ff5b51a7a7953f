"""Elements more than 2**31 elements from the first: on a CPU, in memory of which only the pages in use exist."""

import mmap
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from cases import TRANSPORTS
from fuzz_calls import product
from ranks import ints, rows_slice, run_ranks

import fluxlike
from fluxlike.ops import tiling
from fluxlike.runtime import cuda, driver

#: Fits 32 bits, twice it does not. TMA takes the first, pointers the second.
PITCHES = (2**30 + 64, 2**30 + 63)


def far_apart(rows: int, columns: int, pitch: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Small whole numbers in rows that are ``pitch`` elements apart."""
    nbytes = rows * pitch * dtype.itemsize
    # private, and not reserved: a page exists once it is written to
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000))
    view = torch.frombuffer(memory, dtype=dtype).as_strided((rows, columns), (pitch, 1))
    view.copy_(ints((rows, columns), dtype, seed))
    return view


def far_operands(group, op, schedule, pitch):
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    m, n, k, dtype = 3 * size, 5, 40, torch.float32
    for transposed in (False, True):
        xs = [far_apart(m, k, pitch, dtype, source) for source in range(size)]
        ws = [far_apart(*((k, n) if transposed else (n, k)), pitch, dtype, 10 + source) for source in range(size)]
        ws = [w.T if transposed else w for w in ws]
        assert tiling.pitch(xs[0]) * (m - 1) >= 2**31
        if op == "gemm_rs":
            with fluxlike.create_gemm_rs_context(m, n, dtype=dtype, group=group, schedule=schedule) as ctx:
                y = fluxlike.gemm_rs(xs[rank], ws[rank], ctx)
                path = ctx.last_path
            whole = sum(product(x.double(), w.double()) for x, w in zip(xs, ws, strict=True))
            right = whole[rows_slice(m, size, rank)]
        else:
            shard = xs[0][rows_slice(m, size, rank)]
            with fluxlike.create_ag_gemm_context(m, n, k, dtype, group, schedule) as ctx:
                y, gathered = fluxlike.ag_gemm(shard, ws[rank], ctx, return_gathered=True)
                path = ctx.last_path
            assert torch.equal(gathered, xs[0])
            right = product(xs[0].double(), ws[rank].double())
        assert torch.equal(y.double(), right), f"{op} {schedule} transposed={transposed}"
        assert path == f"{schedule}/{'tma' if pitch % 16 == 0 else 'pointer'}"


@pytest.mark.parametrize("pitch", PITCHES)
@pytest.mark.parametrize("schedule", TRANSPORTS)
@pytest.mark.parametrize("op", ("gemm_rs", "ag_gemm"))
def test_rows_far_apart(op, schedule, pitch):
    run_ranks(far_operands, 2, op=op, schedule=schedule, pitch=pitch)


def test_what_tma_can_address():
    memory = torch.zeros(1 << 12, dtype=torch.bfloat16)
    fits = {
        (8, 16, 16, 1): True,
        (8, 16, 24, 1): True,
        (8, 16, 20, 1): False,  # not a multiple of 16 bytes
        (8, 16, 8, 1): False,  # rows that overlap
        (8, 16, 0, 1): False,
        (16, 8, 1, 16): True,  # transposed
        (16, 8, 1, 8): False,
        (0, 16, 16, 1): False,
    }
    for (rows, columns, *strides), right in fits.items():
        assert tiling.is_tma_aligned(memory.as_strided((rows, columns), strides)) is right, (rows, columns, strides)
    assert not tiling.is_tma_aligned(memory[1:].as_strided((8, 16), (16, 1)))
    huge = torch.empty(2, 1, dtype=torch.bfloat16, device="meta").as_strided((2, 16), (2**39, 1))
    assert not tiling.is_tma_aligned(huge) and tiling.is_tma_aligned(huge.as_strided((2, 16), (2**39 - 8, 1)))


def test_how_a_matrix_lies():
    """Of a single row the pitch says nothing, nor of a single column the stride in it; of two they do."""
    memory = torch.zeros(1 << 7)
    lies = {
        (5, 1, 3, 7): (False, 3),
        (5, 2, 1, 8): (True, 8),
        (5, 2, 8, 1): (False, 8),
        (2, 5, 7, 1): (False, 7),
        (1, 5, 7, 1): (False, 16),  # which TMA takes
        (1, 17, 7, 1): (False, 32),
        (5, 1, 1, 7): (False, 1),
    }
    for (rows, columns, *strides), (transposed, pitch) in lies.items():
        kept, turned = tiling.stored(memory.as_strided((rows, columns), strides))
        assert (turned, tiling.pitch(kept)) == (transposed, pitch), (rows, columns, strides)


def test_another_alignment_is_another_kind():
    """What was planned for aligned operands may read whole vectors; to the next 16 bytes all is alike."""
    memory = torch.zeros(64, dtype=torch.bfloat16)
    kinds = [tiling.kind(memory[start : start + 8]) for start in range(9)]
    assert len(set(kinds)) == 8 and kinds[0] == kinds[8] and tiling.kind(None) is None


@pytest.mark.parametrize("transposed", (False, True))
def test_what_tma_cannot_address_is_copied_or_read_by_pointers(transposed):
    memory = torch.arange(9 * 13, dtype=torch.bfloat16)
    odd = memory.view(13, 9).T if transposed else memory.view(9, 13)
    even = torch.zeros(16, 16, dtype=torch.bfloat16)
    hopper = tiling.WIDE
    assert hopper.tma and not tiling.is_tma_aligned(odd)
    tile, which = tiling.readable(hopper, (9, 0), tiling.SMALL_ROWS + 1, odd, even)
    first, second = tiling.padded((odd, even), which)
    assert tile == hopper and second is even
    assert tiling.is_tma_aligned(first) and torch.equal(first, odd) and first.stride().index(1) == odd.stride().index(1)
    for capability, rows in (((9, 0), tiling.SMALL_ROWS), (tiling.CPU, 4096)):
        tile, which = tiling.readable(hopper, capability, rows, odd, even)
        operands = tiling.padded((odd, even), which)
        assert not tile.tma and operands[0] is odd and operands[1] is even
    (low,) = tiling.fitting((9, 0), torch.bfloat16, tiling.SMALL_ROWS, 4096)
    by_pointers = replace(low, bk=64, warps=8, stages=3, tma=False)
    assert tiling.readable(low, (9, 0), tiling.SMALL_ROWS, odd, even) == (by_pointers, ())
    assert tiling.readable(low, (9, 0), tiling.SMALL_ROWS, even, even) == (low, ())


@pytest.mark.parametrize("rows", (1, 4096))
def test_what_is_read_by_pointers_anyway_stays_as_it_is(rows):
    """Not copied, and not in the steps of 64 that half a type has: those of fp32 need more shared memory than some GPUs have."""
    odd = torch.zeros(9, 13)
    for tile in (tiling.FP32, *tiling.fitting((8, 9), torch.bfloat16, rows, 4096)):
        assert tiling.readable(tile, (8, 9), rows, odd, odd) == (tile, ())


@pytest.mark.parametrize(
    ("asked", "calls"),
    (
        ((1000, 64, 2000, 64, 64, 3), [(1000, 2000, 192)]),
        ((1000, 80, 2000, 96, 64, 1), [(1000, 2000, 64)]),
        ((1000, 80, 2000, 96, 64, 3), [(1000, 80, 2000, 96, 64, 3)]),
        ((1000, 80, 2000, 0, 64, 2), [(1000, 2000, 64), (1080, 2000, 64)]),
        ((1000, 80, 2000, 32, 64, 2), [(1000, 2000, 64), (1080, 2032, 64)]),
        ((1000, 80, 2000, 2**31, 64, 2), [(1000, 2000, 64), (1080, 2000 + 2**31, 64)]),
        ((1000, 2**31, 2000, 80, 64, 2), [(1000, 2000, 64), (1000 + 2**31, 2080, 64)]),
    ),
)
def test_what_a_copy_of_rows_becomes(asked, calls, monkeypatch):
    """CUDA's 2D copy takes neither rows that overlap nor pitches of 2**31 bytes."""
    made = []
    for name in ("copy", "copy_2d"):
        monkeypatch.setattr(driver, name, lambda stream, *how: made.append(how))
    engine = object.__new__(cuda.CudaCopyEngine)
    engine.raw, engine._batch = 0, []
    engine.copy(*asked)
    assert made == calls

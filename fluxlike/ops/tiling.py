"""Which tile shape a call gets, and how its operands are read.

Tiles are also the unit of the in-kernel signals, so every rank of a call must choose the same ``bm`` and ``bn``: `choose` looks
only at what the ranks have in common. Whether a rank reads its operands by TMA is its own affair (`readable`).
"""

import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ..kernels import sync
from ..kernels.tiles import cdiv

#: Rows of tiles and columns of tiles are never lower or narrower than this; the signal regions are sized by it.
MIN_TILE = 32
#: No side of an operand may be longer: kernels count rows, columns and what they round up to in 32 bits.
MAX_SIZE = 2**31 - 2**16
#: Bytes from row to row that a TMA descriptor cannot hold any more.
MAX_TMA_PITCH = 2**40
#: At most so many sub-chunks a chunk.
MAX_SUBS: int = sync.MAX_SUBS.value
#: Up to so many rows to cut tiles from, on GPUs, a call uses low tiles (and reads unaligned operands by pointers).
SMALL_ROWS = 64
#: Elements of a part of a tile, the largest that stream_k has, and rows of its blocks of the sum over ranks.
PART, SUM_ROWS = 128 * 256, 16
CPU = (0, 0)
#: Of most GPUs of compute capability 9.0. Where one has fewer, stream_k's tiles are chosen less well, but by all ranks alike.
MULTIPROCESSORS = 132
#: Rate of a multiprocessor on tiles of 128 columns against 256: on an H200 the median of 49 products of up to eight waves was 0.98
#: for `HALF`, of 0.89 to 1.04, less with more waves, and 0.70 with three stages (docs/measured/2026-11-29-half-tiles.md).
NARROW, SHALLOW = 0.97, 0.67
#: Of 64 rows against 128: fitted to calls of few rows, in which other things than products take time; with many rows it is 0.9.
LOW = 0.52


def number(value: Any) -> Any:
    """A whole number of another kind, as numpy's, as one of Python's; whatever else it is, checks have a say in it."""
    if value is None or isinstance(value, (int, torch.SymInt, torch.Tensor)):  # a tensor may lie on a GPU, and be waited for
        return value
    if not hasattr(value, "__index__"):  # dynamo of torch 2.11 lets no TypeError of the next line be caught
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value


@dataclass(frozen=True)
class Tiling:
    """Tile of C, depth of a step, and how the kernel is compiled. ``tma``: operands come by TMA descriptor."""

    bm: int
    bn: int
    bk: int
    group_m: int
    warps: int
    stages: int
    tma: bool

    def __str__(self) -> str:
        return f"{self.bm}x{self.bn}x{self.bk}/{self.warps}w{self.stages}s"


#: Of Hopper. Half the columns take half the time for a step, so more steps must be under way; with as few warps, as each then has
#: as large a part of the tile. Where that would spill registers, as stores by element would, on eight: THIN, at 0.86 of the rate.
WIDE, HALF = Tiling(128, 256, 64, 8, 8, 3, True), Tiling(128, 128, 64, 8, 4, 5, True)
THIN, BLACKWELL = replace(HALF, warps=8, stages=4), replace(HALF, warps=8, stages=3)
#: Of fp32: of twelve on an H100 the best with few rows; with many, two are up to 18 % faster (docs/measured/2026-11-26-fp32.md).
FP32 = Tiling(64, 128, 16, 8, 4, 3, False)


def rate(tile: Tiling) -> float:
    """Operations a second of a multiprocessor inside such tiles, against those inside of 128×256."""
    narrow = NARROW if tile.stages > 3 else SHALLOW
    return (1.0 if tile.bn >= 256 else narrow) * (1.0 if tile.bm >= 128 else LOW)


def is_large(capability: tuple[int, int]) -> bool:
    """GPUs with TMA and 227 KB of shared memory for a program: Hopper and the Blackwell of servers; 12.x has 99 KB."""
    return (9, 0) <= capability < (12, 0)


def registers(warps: int, programs: int = 1) -> int:
    """``maxnreg`` of a kernel of which a multiprocessor has so many programs: ptxas might spill some to make room for more."""
    return min(255, 65536 // (32 * warps * programs))


def fitting(capability: tuple[int, int], dtype: torch.dtype, chunk_rows: int, n: int) -> tuple[Tiling, ...]:
    """The tilings for chunks of ``chunk_rows`` rows and ``n`` columns, of which `choice.usual` takes the faster one.

    128×256×64 with 8 warps and three stages is the best one where it fills the GPU, and 128×128 where that leaves less of the last
    wave empty; both need the shared memory of compute capability 9.0 (213 KB). GPUs that are not `is_large` get 96 KB or less, and
    no TMA. fp32 is computed at IEEE precision, so on plain multiply-adds and not on tensor cores: small tiles.
    """
    small = chunk_rows <= SMALL_ROWS
    if capability == CPU:
        return (Tiling(32 if chunk_rows <= 32 else 64, 32 if n <= 32 else 64, 64, 4, 1, 1, True),)
    if dtype == torch.float32:
        return (FP32,)
    if is_large(capability):
        if small:
            return (Tiling(64, 128, 128, 8, 4, 4, True),)
        half = HALF if capability == (9, 0) else BLACKWELL
        if n % 16:  # element-wise stores of a ragged result spill registers at 256 columns, too
            return (THIN if capability == (9, 0) else BLACKWELL,)
        return (WIDE, half) if n > 128 else (half,)
    return (Tiling(64 if small else 128, 128, 64 if capability == (8, 0) else 32, 8, 8, 3, False),)


def choose_stream_k(capability: tuple[int, int], dtype: torch.dtype, m: int, n: int) -> Tiling:
    """The tiling of a product whose k-steps are shared out: it need not fill the GPU, and holds rows of several ranks.

    Wide tiles where there are enough of them that each is cut once or twice: a part of one takes a microsecond or two to pass on.
    """
    if capability == CPU:
        return Tiling(32 if m <= 64 else 64, 32 if n <= 32 else 64, 64, 4, 1, 1, True)
    if dtype == torch.float32:
        return Tiling(64, 64, 32, 8, 8, 3, False)
    if m <= SMALL_ROWS:
        if is_large(capability):
            return Tiling(64, 128, 128, 8, 4 if capability == (9, 0) else 8, 4, True)
        return Tiling(64, 128, 64 if capability == (8, 0) else 32, 8, 8, 3, False)
    if capability == (9, 0):
        tiles = cdiv(m, 128) * cdiv(n, 256)
        return WIDE if n % 16 == 0 and tiles >= MULTIPROCESSORS // 2 - 2 else THIN
    if is_large(capability):
        return BLACKWELL
    return Tiling(128, 128, 32, 8, 8, 3, False)


def readable(
    tile: Tiling, capability: tuple[int, int], tiled_rows: int, *operands: torch.Tensor
) -> tuple[Tiling, tuple[bool, ...]]:
    """The tiling, and which operands must be `padded`, such that the kernel can read them. Tiles are cut from ``tiled_rows`` rows.

    Where K or N forbids TMA there are two ways, and the faster one was measured on H200s (bf16, N=8192, K=7169 a rank, µs):
    pointers against a copy to an aligned pitch: M=64 (K=3585) 141 against 264, M=256 277 against 315, M=2048 2200 against 556,
    M=8192 (K=2049) 2622 against 712. So low tiles read by pointers and all others copy: x each time, the weight as well; a
    caller who pads the weight's K to a multiple of 8 once saves that.
    """
    if not tile.tma or all(is_tma_aligned(t) for t in operands):
        return tile, ()
    if capability == CPU:
        return replace(tile, tma=False), ()
    if tiled_rows <= SMALL_ROWS:
        return replace(tile, bk=64, warps=8, stages=3, tma=False), ()
    return tile, tuple(not is_tma_aligned(t) for t in operands)


def padded(operands: Sequence[torch.Tensor], which: Sequence[bool]) -> Sequence[torch.Tensor]:
    """The operands, with copies that TMA can address of those that `readable` says."""
    return [pitched(t) if pad else t for t, pad in zip(operands, which, strict=True)] if which else operands


def kind(t: torch.Tensor | None) -> Hashable:
    """What a launch depends on of a tensor: all but its address and its elements, and for the dtype, which is the context's."""
    return None if t is None else (t.shape, t.stride(), t.data_ptr() % 16)


def stored(t: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """A matrix as it lies in memory, row by row, and whether that is its transpose."""
    return (t, False) if is_row_major(t) else (t.T, True)


def is_row_major(t: torch.Tensor) -> bool:
    """Stored row by row; else it must be the transposed view of such a matrix."""
    return t.stride(1) == 1 or t.shape[1] <= 1


def pitch(rows: torch.Tensor) -> int:
    """Elements from row to row of a stored matrix; for a single row any number is right, so one that suits TMA."""
    return rows.stride(0) if rows.shape[0] > 1 else round_up(rows.shape[1], 16)


def is_tma_aligned(t: torch.Tensor) -> bool:
    """A TMA descriptor can address it: base and pitch are multiples of 16 bytes, rows do not overlap, no side is empty."""
    if t.numel() == 0 or t.data_ptr() % 16 != 0:
        return False
    rows = stored(t)[0]
    step = pitch(rows)
    return (step * t.element_size()) % 16 == 0 and rows.shape[1] <= step < MAX_TMA_PITCH // t.element_size()


def descriptor(t: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """The TMA descriptor of a matrix that `is_tma_aligned`, for blocks [rows, columns] of t; transposed ones as stored."""
    rows, transposed = stored(t)
    return TensorDescriptor(rows, list(rows.shape), [pitch(rows), 1], block[::-1] if transposed else block)


def operands(tile: Tiling, x: torch.Tensor, weight: torch.Tensor) -> tuple[Any, Any]:
    """What a kernel gets for x and the weight, by which it reads blocks of them: descriptors or, without TMA, the tensors."""
    if not tile.tma:
        return x, weight
    return descriptor(x, [tile.bm, tile.bk]), descriptor(weight, [tile.bn, tile.bk])


def pitched(t: torch.Tensor) -> torch.Tensor:
    """A copy of a matrix whose stored rows start at multiples of 16 elements."""
    rows, transposed = stored(t)
    copy = rows.new_empty(rows.shape[0], round_up(rows.shape[1], 16))[:, : rows.shape[1]]
    copy.copy_(rows)
    return copy.T if transposed else copy


def is_vectorised(n: int, k: int, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """N, K and the pitches are multiples of 16 elements, so that pointer loads and stores move whole vectors."""
    return all(value % 16 == 0 for value in (n, k, pitch(x), pitch(stored(weight)[0])))


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def push_rows(tile: Tiling, x: torch.Tensor) -> int:
    """Rows of the blocks of 256 columns that move by vector stores: 128 bytes a thread, or registers are spilled."""
    return 16 * tile.warps // x.element_size() if x.is_cuda else tile.bm

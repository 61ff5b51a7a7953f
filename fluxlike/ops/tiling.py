"""Which tile shape a call gets: one frozen table entry, chosen from the device, the dtype and the sizes."""

from dataclasses import dataclass

import torch

#: Rows of tiles and columns of tiles are never lower or narrower than this; the signal regions are sized by it.
MIN_TILE = 32
#: At most so many sub-chunks a chunk.
MAX_SUBS = 4


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


def choose(capability: tuple[int, int], dtype: torch.dtype, chunk_rows: int, n: int, aligned: bool) -> Tiling:
    """The tiling for chunks of ``chunk_rows`` rows and ``n`` columns. ``aligned``: TMA may be used on the operands.

    128×256×64 with 8 warps and three stages beat cuBLAS on every large shape of an H200; it needs the shared memory of
    compute capability 9.0 (213 KB). 16-bit tiles below that use pointers and 96 KB. fp32 is computed at IEEE precision, so
    on plain multiply-adds and not on tensor cores: small tiles.
    """
    if capability == (0, 0):
        return Tiling(32 if chunk_rows <= 32 else 64, 32 if n <= 32 else 64, 64, 4, 1, 1, aligned)
    if dtype == torch.float32:
        return Tiling(64, 64, 32, 8, 4, 3, False)
    if capability >= (9, 0) and aligned:
        if chunk_rows <= 64:
            return Tiling(64, 128, 128, 8, 4, 4, True)
        wide = n > 128 and n % 16 == 0  # element-wise stores of a ragged result spill registers at 256 columns
        return Tiling(128, 256 if wide else 128, 64, 8, 8, 3, True)
    if capability >= (9, 0) or capability == (8, 0):
        return Tiling(64 if chunk_rows <= 64 else 128, 128, 64, 8, 8, 3, False)
    return Tiling(64 if chunk_rows <= 64 else 128, 128, 32, 8, 8, 3, False)


def is_tma_aligned(t: torch.Tensor) -> bool:
    """A matrix with unit stride in one dimension that a TMA descriptor can address: 16-byte base and pitch, no empty side."""
    pitch = max(t.stride()) if min(t.shape) > 1 else t.shape[-1]
    return t.numel() > 0 and t.data_ptr() % 16 == 0 and (pitch * t.element_size()) % 16 == 0


def is_vectorised(n: int, k: int, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """N, K and the pitches are multiples of 16 elements, so that pointer loads and stores move whole vectors."""
    return all(value % 16 == 0 for value in (n, k, x.stride(0), max(weight.stride())))


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple

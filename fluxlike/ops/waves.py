"""How the last wave of tiles is shared, where whole tiles would leave much of the GPU idle in the end.

A persistent kernel takes tiles in waves, one a program. Of the last wave, only some programs have one. There the last ``cut`` tiles
are cut along K and their steps shared by all programs (`kernels.stream_k`), if that is expected to be worth it.
"""

from typing import NamedTuple

import torch

from ..kernels.tiles import cdiv, longest_lag
from . import cost, tiling
from .tiling import Tiling


class Shared(NamedTuple):
    """``cut`` tiles, in ``lanes`` that are cut alike; the first ``late`` shares of a lane have ``lag`` k-steps fewer."""

    cut: int = 0
    lanes: int = 1
    late: int = 0
    lag: int = 0


def last_height(rows_of_tiles: int, group_m: int) -> int:
    """Rows of tiles in the last group of `tiles.grouped`."""
    return rows_of_tiles % group_m or group_m


def share(
    behind: int, most: int, programs: int, height: int, k_tiles: int, cost_steps: float, late: int = 0, lag: int = 0
) -> tuple[Shared, float]:
    """How ``behind`` tiles, the last ones, are shared, and how many k-steps that takes; `Shared()` if it cannot be.

    Args:
        behind: tiles that are left behind whole waves; ``most``: up to so many may be cut.
        height: rows of tiles in the last group. A lane is such a row, or two of them, where more programs are of use then: tiles
            of one column are cut at the same steps, so that a block of the weight is read from memory once for them.
        cost_steps: what sharing costs. late: programs that come ``lag`` k-steps behind the others.
    """
    best: tuple[Shared, float] = Shared(), float("inf")
    for lanes in (height, height // 2) if height % 2 == 0 else (height,):
        cut = tiling.round_up(behind, lanes)
        shares, steps, late_shares = programs // lanes, cut // lanes * k_tiles, cdiv(late, lanes)
        if 0 < cut <= most and late_shares < shares:
            less = min(lag, longest_lag(shares, steps, late_shares)) if late else 0
            takes = cdiv(steps + late_shares * less, shares) + cost_steps
            best = min(best, (Shared(cut, lanes, late_shares, less), takes), key=lambda found: found[1])
    return best


def cost_steps(op: str, tile: Tiling, dtype: torch.dtype, capability: tuple[int, int]) -> float:
    """k-steps that sharing costs; on a CPU, where speed is no matter, none."""
    if not cost.may_share(capability, dtype):
        return float("inf")
    return 0.0 if capability == tiling.CPU else cost.SHARING[op] / cost.step_seconds(tile, dtype)

"""How the tiles of a launch are spread over its programs, and how the last wave of them is shared.

A persistent kernel takes tiles in waves, one a program. Of the last wave, only some programs have one, and whole tiles would leave
the rest of the GPU idle. There the last ``cut`` tiles are cut along K and their steps shared by all programs (`kernels.stream_k`),
if that is expected to be worth it.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch

from ..kernels.tiles import cdiv, longest_lag
from . import cost, tiling
from .tiling import Tiling

if TYPE_CHECKING:
    from .choice import Problem
    from .context import Context

#: Columns of a block that ag_gemm's kernels push.
PUSH_COLUMNS = 256


class Shared(NamedTuple):
    """``cut`` tiles, in ``lanes`` that are cut alike; the first ``late`` shares of a lane have ``lag`` k-steps fewer."""

    cut: int = 0
    lanes: int = 1
    late: int = 0
    lag: int = 0


class Deal(NamedTuple):
    """How the tiles of a launch of ag_gemm are spread, as `kernels.ag_gemm` and `kernels.tiles.dealt` have it.

    ``pushers`` programs push the shard, a row of tiles in so many ``pieces``, while the others take tiles for ``head_start`` turns.
    """

    programs: int
    pushers: int
    pieces: int
    head_start: int
    shared: Shared


class Launch(NamedTuple):
    """What the shares of a launch depend on besides its sizes. ``programs``: that run at a time."""

    op: str
    capability: tuple[int, int]
    dtype: torch.dtype
    ranks: int
    programs: int


def of_context(ctx: "Context") -> Launch:
    """On this GPU."""
    return Launch(ctx.op, ctx.tuned.capability, ctx.dtype, ctx.size, ctx.world.executor.programs)


def steps(problem: "Problem", tile: Tiling, transport: str, pushers: int, columns: int) -> float:
    """k-steps one after the other of a call in such tiles, on a rank with full chunks and ``columns`` columns."""
    launch = Launch(problem.op, problem.capability, problem.dtype, problem.ranks, problem.programs)
    if problem.op == "ag_gemm":
        return gather(launch, tile, pushers if problem.ranks > 1 else 0, problem.rows, problem.rows, columns, problem.k)[1]
    rows_of_tiles = cdiv(problem.rows, tile.bm)
    own = rows_of_tiles * cdiv(columns, tile.bn)
    depth = cdiv(problem.k or cost.LARGE_K, problem.ranks)
    return scatter(launch, tile, transport, own * (problem.ranks - 1), own, rows_of_tiles, depth)[1]


def gather(launch: Launch, tile: Tiling, pushers: int, rows: int, full: int, n: int, k: int) -> tuple[Deal, float]:
    """Of ag_gemm, for ``rows`` of this rank, ``full`` of a full shard; and its k-steps. ``pushers``: those of the choice, or 0."""
    ranks, k_tiles = launch.ranks, cdiv(k, tile.bk)
    own, remote = (cdiv(full, tile.bm) * cdiv(n, tile.bn) * there for there in (int(rows > 0), ranks - 1))
    programs, pieces, push = max(1, min(launch.programs, own + remote)), 0, 0
    if pushers:
        programs = launch.programs
        # where the own shard has fewer tiles than there are programs, those without one push
        wanted, rows_of_tiles = min(max(pushers, programs - own), max(1, programs // 2)), cdiv(rows, tile.bm)
        pieces = max(1, min(cdiv(wanted, max(1, rows_of_tiles)), cdiv(k, PUSH_COLUMNS)))
        pushers = min(wanted, rows_of_tiles * pieces)
        step = cost.step_seconds(tile, launch.dtype)
        push = round(rows * k * launch.dtype.itemsize * (ranks - 1) / cost.PUSH_RATE / step)  # k-steps that it takes
    early = programs - pushers
    own_turns = cdiv(own, early) if pushers and early else 0
    # whole tiles only: the pushers sit out one turn at least
    head_start = min(max(round(push / max(1, k_tiles)), 1), own_turns)
    took = (head_start + cdiv(own + remote - head_start * early, programs)) * k_tiles
    # or the last wave shared
    ahead = min(push // max(1, k_tiles), own_turns)
    turns, behind = divmod(max(own + remote - ahead * early, 0), programs)
    height = _last_height(cdiv(full, tile.bm) * max(ranks - 1, 1), tile.group_m)
    most, lag = remote if ranks > 1 else own, push - ahead * k_tiles
    costs = _cost_steps(launch, tile, "in_kernel" if pushers else "copy_engine")
    shared, last = share(behind, most, programs, height, k_tiles, costs, pushers, lag)
    if (ahead + turns) * k_tiles + last < took:
        return Deal(programs, pushers, pieces, ahead, shared), (ahead + turns) * k_tiles + last
    return Deal(programs, pushers, pieces, head_start, Shared()), took


def scatter(
    launch: Launch, tile: Tiling, transport: str, remote: int, own: int, rows_of_tiles: int, k: int
) -> tuple[Shared, float]:
    """Of gemm_rs, with so many tiles of other ranks and own ones; and its k-steps. ``rows_of_tiles``: of a chunk."""
    k_tiles, height = cdiv(k, tile.bk), _last_height(rows_of_tiles, tile.group_m)
    programs = max(1, min(launch.programs, remote + own))
    turns, behind = divmod(remote + own, programs)
    shared, last = share(behind, own, programs, height, k_tiles, _cost_steps(launch, tile, transport))
    if last < k_tiles:
        return shared, turns * k_tiles + last
    return Shared(), (turns + int(behind > 0)) * k_tiles


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
    lag = lag if late else 0
    for lanes in (height, height // 2) if height % 2 == 0 else (height,):
        cut = tiling.round_up(behind, lanes)
        shares, steps, late_shares = programs // lanes, cut // lanes * k_tiles, cdiv(late, lanes)
        if 0 < cut <= most and late_shares < shares:
            less = min(lag, longest_lag(shares, steps, late_shares))
            # what is not made up for by shorter shares, they are behind in the end, too
            takes = cdiv(steps + late_shares * less, shares) + lag - less + cost_steps
            best = min(best, (Shared(cut, lanes, late_shares, less), takes), key=lambda found: found[1])
    return best


def _last_height(rows_of_tiles: int, group_m: int) -> int:
    """Rows of tiles in the last group of `tiles.grouped`."""
    return rows_of_tiles % group_m or group_m


def _cost_steps(launch: Launch, tile: Tiling, transport: str) -> float:
    """k-steps that sharing costs; on a CPU, where speed is no matter, none."""
    if not cost.may_share(launch.capability, launch.dtype):
        return float("inf")
    if launch.capability == tiling.CPU:
        return 0.0
    return cost.sharing(launch.op, transport, tile) / cost.step_seconds(tile, launch.dtype)

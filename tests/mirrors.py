"""Python mirrors of device functions of `fluxlike.kernels.tiles`, for properties of many cases; test_tiles.py holds them to those.

The mirrors that tools use, too, are beside the device functions.
"""

from fluxlike.kernels.tiles import cdiv


def dealt_between(first: int, end: int, program: int, programs: int) -> int:
    """Mirror of `dealt_between`."""
    behind = programs - 1 - program
    return (end + behind) // programs - (first + behind) // programs


def dealt(turn: int, program: int, programs: int, late: int, head_start: int) -> int:
    """Mirror of `dealt`."""
    early = programs - late
    place = program + early if program < late else program - late
    if turn < head_start:
        return turn * early + place
    return head_start * early + (turn - head_start) * programs + place


def turns_before(tile: int, program: int, programs: int, late: int, head_start: int) -> int:
    """Mirror of `turns_before`."""
    early = programs - late
    place = program + early if program < late else program - late
    head = head_start if program < late else min(cdiv(max(tile - place, 0), max(early, 1)), head_start)
    return head + cdiv(max(tile - head_start * early - place, 0), programs)


def share_start(share: int, shares: int, steps: int) -> int:
    """Mirror of `share_start`."""
    return share * steps // shares


def share_of(step: int, shares: int, steps: int) -> int:
    """Mirror of `share_of`."""
    return ((step + 1) * shares - 1) // steps


def late_start(share: int, shares: int, steps: int, late: int, lag: int) -> int:
    """Mirror of `late_start`."""
    return share_start(share, shares, steps + late * lag) - lag * min(share, late)


def late_of(step: int, shares: int, steps: int, late: int, lag: int) -> int:
    """Mirror of `late_of`."""
    behind = share_of(step + lag * late, shares, steps + late * lag)
    return behind if behind >= late else share_of(step, shares, max(steps - lag * (shares - late), 1))


def lane_share(
    program: int, programs: int, cut: int, lanes: int, k_tiles: int, late: int = 0, lag: int = 0
) -> tuple[int, int, int, int, int]:
    """Mirror of `lane_share`."""
    share, steps = program // lanes, cut // lanes * k_tiles
    shares = max(min(programs // lanes, steps), 1)
    begin, end = (min(late_start(s, shares, steps, late, lag), steps) for s in (share, share + 1))
    return program % lanes, shares, steps, begin, end

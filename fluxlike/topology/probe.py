"""Link rates by measurement: copies between every two GPUs."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from .matrix import PCIE, LinkMatrix

#: (source, target, bytes) -> seconds of one copy from GPU source to GPU target.
CopySeconds = Callable[[int, int, int], float]
NBYTES = 256 << 20
REPEATS = 5
#: Copies get less than the links' nominal rate; below this part of it something is wrong with the link.
FAIR = 0.6
NAMES = {"pcie": "PCIe", "host": "a path through the host"}


def probe(copy_seconds: CopySeconds, n: int, nbytes: int = NBYTES, repeats: int = REPEATS) -> list[list[float]]:
    """[n][n] GB/s: the median of some copies after one that does not count, in the slower of the two directions."""

    def rate(source: int, target: int) -> float:
        copy_seconds(source, target, nbytes)
        return nbytes / statistics.median(copy_seconds(source, target, nbytes) for _ in range(repeats)) / 1e9

    measured = [[0.0] * n for _ in range(n)]
    for i in range(n):
        for j in range(i):
            measured[i][j] = measured[j][i] = min(rate(i, j), rate(j, i))
    return measured


def probed(matrix: LinkMatrix, measured: Sequence[Sequence[float]]) -> LinkMatrix:
    """The matrix with what was measured: in place of the rates of PCIe and host, which are assumptions, and of NVLinks that reach
    less than `FAIR` of theirs, which the notes name. Other NVLinks keep their nominal rates, so that alike ones stay alike.

    An NVLink that is no faster than paths of a slower kind counts as one of those, so that plans do not prefer it for its kind.
    Only pairs are measured one by one, so not what a port can do.
    """
    n = len(matrix)
    if [len(row) for row in measured] != [n] * n:
        raise ValueError(f"measured has rows of {[len(row) for row in measured]} entries; it must be a square of {n}, as the links")
    bandwidth, kind = [list(row) for row in matrix.bandwidth], [list(row) for row in matrix.kind]
    notes = list(matrix.notes)
    rates = {(i, j): float(f"{measured[i][j]:.2g}") for i in range(n) for j in range(i) if kind[i][j]}
    slower = {name: max([r for (i, j), r in rates.items() if matrix.kind[i][j] == name], default=PCIE) for name in ("pcie", "host")}
    for (i, j), seen in rates.items():
        nominal, other = bandwidth[i][j], ""
        if kind[i][j] not in slower:
            if seen >= FAIR * nominal:
                continue
            other = next((name for name in ("host", "pcie") if seen <= slower[name]), "")
            notes.append(
                f"GPUs {j} and {i}: {seen:g} GB/s measured where {nominal:g} are nominal; the measured ones are taken"
                + (f", and as that is what {NAMES[other]} may have, it counts as such a path" if other else "")
            )
        bandwidth[i][j] = bandwidth[j][i] = seen
        kind[i][j] = kind[j][i] = other or kind[i][j]
    return replace(
        matrix,
        bandwidth=tuple(map(tuple, bandwidth)),
        kind=tuple(map(tuple, kind)),
        port=(),
        unit=0.0,
        notes=tuple(notes),
    )


def torch_copies(torch: Any) -> CopySeconds:
    """Copies by torch, timed by events in the source's stream, in which torch queues a copy between GPUs."""
    buffers: dict[int, Any] = {}

    def buffer(device: int, nbytes: int) -> Any:
        if device not in buffers or buffers[device].numel() < nbytes:
            buffers[device] = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{device}")
        return buffers[device][:nbytes]

    def copy_seconds(source: int, target: int, nbytes: int) -> float:
        data, place = buffer(source, nbytes), buffer(target, nbytes)
        torch.cuda.synchronize(source)
        torch.cuda.synchronize(target)
        with torch.cuda.device(source):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            place.copy_(data, non_blocking=True)
            end.record()
            end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    return copy_seconds

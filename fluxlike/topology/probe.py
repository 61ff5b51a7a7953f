"""Link rates by measurement: copies between every two GPUs."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from .matrix import LinkMatrix

#: (source, target, bytes) -> seconds of one copy from GPU source to GPU target.
CopySeconds = Callable[[int, int, int], float]
NBYTES = 256 << 20
REPEATS = 5
#: Copies get less than the links' nominal rate; below this part of it something is wrong with the link.
FAIR = 0.6


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

    Only pairs are measured one by one, so not what a port can do.
    """
    n = len(matrix)
    if [len(row) for row in measured] != [n] * n:
        raise ValueError(f"measured has rows of {[len(row) for row in measured]} entries; it must be a square of {n}, as the links")
    bandwidth = [list(row) for row in matrix.bandwidth]
    notes = list(matrix.notes)
    for i in range(n):
        for j in range(i):
            if not matrix.kind[i][j]:
                continue
            nominal, seen = bandwidth[i][j], float(f"{measured[i][j]:.2g}")
            if matrix.kind[i][j] in ("pcie", "host"):
                bandwidth[i][j] = bandwidth[j][i] = seen
            elif seen < FAIR * nominal:
                notes.append(f"GPUs {j} and {i}: {seen:g} GB/s measured where {nominal:g} are nominal; the measured ones are taken")
                bandwidth[i][j] = bandwidth[j][i] = seen
    return replace(matrix, bandwidth=tuple(map(tuple, bandwidth)), port=(), unit=0.0, notes=tuple(notes))


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

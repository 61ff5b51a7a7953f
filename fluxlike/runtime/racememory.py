"""Which memory the race checker checks, under which names, and which cells of its tables belong to an address."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from .control import ControlGroup
from .heap import Free, Segment, first_fit, give, take
from .racereport import Name
from .raceshadow import BOTH, EVEN, GRANULE, LOCAL_BYTES, ODD, Area, Shadow


@dataclass(frozen=True)
class Range:
    """Addresses of this process whose accesses are checked."""

    start: int
    end: int
    area: int
    granule: int
    rank: int


class Place(NamedTuple):
    """Granules that an access touches, and which of their bytes: `BOTH`, or one."""

    known: Range
    granules: np.ndarray
    halves: int


class Memory:
    """The checked memory, as this process has it mapped."""

    def __init__(self, shadow: Shadow, control: ControlGroup) -> None:
        self.shadow, self.rank = shadow, control.rank
        self._ranges: list[Range] = []
        self._starts: list[int] = []
        self._names: list[Name] = []
        self.shadow.areas.append(Area(LOCAL_BYTES, control))
        self._local_free: Free = [(0, LOCAL_BYTES)]

    def add_segment(self, segment: Segment, control: ControlGroup) -> None:
        """Check a segment of the heap. Collective."""
        area = Area(segment.nbytes, control)
        self.shadow.areas.append(area)
        for rank, address in enumerate(segment.addresses):
            self._add(Range(address, address + segment.nbytes, len(self.shadow.areas) - 1, rank * area.granules_each, rank))

    def _add(self, new: Range) -> None:
        at = bisect.bisect(self._starts, new.start)
        self._starts.insert(at, new.start)
        self._ranges.insert(at, new)

    def watch(self, name: str, tensor: torch.Tensor) -> None:
        """Name a part of the heap, or check a local buffer from now on under this name."""
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(
                f"watch({name!r}): the race checker watches contiguous CPU tensors, this one is on {tensor.device} with shape "
                f"{tuple(tensor.shape)} and strides {tensor.stride()}; watch the buffer that it is a view of"
            )
        start, nbytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        if nbytes == 0:
            return
        known = self._range_of(start)
        if self.reaches(start, start + nbytes) and (known is None or start + nbytes > known.end):
            raise ValueError(
                f"watch({name!r}): some of its {nbytes} bytes are watched already, and others are not; unwatch the buffer that has "
                "those first, also if its memory was freed in the meantime"
            )
        if known is None:
            size = _room(start, nbytes)
            place = first_fit([[self._local_free]], size)
            if place is None:
                raise RuntimeError(
                    f"watch({name!r}): the race checker watches at most {LOCAL_BYTES >> 20} MiB of local buffers a rank, and these "
                    f"{size} bytes do not fit beside what is watched; unwatch what is done with, or check a smaller problem"
                )
            self._local_free = take(self._local_free, place[1], size)
            area = self.shadow.areas[0]
            known = Range(start, start + nbytes, 0, self.rank * area.granules_each + place[1] // GRANULE, self.rank)
            with self.shadow:
                numbers = area.forget(known.granule, size // GRANULE)
                self.shadow.forget_signals(numbers)
            self._add(known)
        first = self._byte_of(known, start)
        self._names.append((known.area, first, first + nbytes - 1, name))

    def unwatch(self, tensor: torch.Tensor) -> None:
        """The memory goes back to where it came from: forget its name and, of a local buffer, its history."""
        start = tensor.data_ptr()
        known = self._range_of(start)
        if known is None or tensor.numel() == 0:
            return
        first = self._byte_of(known, start)
        self._names = [entry for entry in self._names if entry[:2] != (known.area, first)]
        if known.area == 0:
            at = self._ranges.index(known)
            del self._ranges[at], self._starts[at]
            offset = known.granule % self.shadow.areas[0].granules_each * GRANULE
            self._local_free = give(self._local_free, offset, _room(known.start, known.end - known.start))

    def _byte_of(self, known: Range, address: int) -> int:
        """Which byte of a rank's part of the area it is; an odd address is an odd byte."""
        granule = known.granule % self.shadow.areas[known.area].granules_each
        return (granule - known.start // GRANULE) * GRANULE + address

    def _range_of(self, address: int) -> Range | None:
        at = bisect.bisect(self._starts, address) - 1
        return self._ranges[at] if at >= 0 and address < self._ranges[at].end else None

    def reaches(self, start: int, end: int) -> bool:
        """Whether memory from ``start`` up to ``end`` has checked parts."""
        at = bisect.bisect_left(self._starts, end) - 1
        return at >= 0 and self._ranges[at].end > start

    def locate(self, addresses: np.ndarray, size: int) -> list[Place]:
        """Where elements of ``size`` bytes at ``addresses`` are in the tables; memory that is not checked left out."""
        found: list[Place] = []
        while len(addresses):
            known = self._range_of(int(addresses[0]))
            if known is None:  # up to the next range
                at = bisect.bisect(self._starts, int(addresses[0]))
                if at == len(self._starts):
                    above = addresses[addresses < addresses[0]]
                    # a block that goes backwards in memory; the rest of it may be checked
                    addresses = above if len(above) < len(addresses) else addresses[:0]
                    continue
                low, high = int(addresses[0]), self._starts[at]
                addresses = addresses[(addresses < low) | (addresses >= high)]
                continue
            inside = (addresses >= known.start) & (addresses < known.end)
            mine = addresses if inside.all() else addresses[inside]
            found += _places(known, mine.astype(np.int64), size)
            addresses = addresses[:0] if mine is addresses else addresses[~inside]
        return found


def _room(start: int, nbytes: int) -> int:
    """Bytes of the area of local buffers that a buffer takes."""
    return -(-(start % GRANULE + nbytes) // 16) * 16


def _places(known: Range, addresses: np.ndarray, size: int) -> list[Place]:
    """The granules of elements in a range; of elements of one byte those first that are touched whole."""
    granules = addresses // GRANULE + (known.granule - known.start // GRANULE)
    if size == GRANULE:
        return [Place(known, granules, BOTH)]
    if size > GRANULE:
        return [Place(known, (granules[:, None] + np.arange(size // GRANULE)).reshape(-1), BOTH)]
    odd = addresses % GRANULE == 1
    first, second = np.unique(granules[~odd]), np.unique(granules[odd])
    whole = np.intersect1d(first, second, assume_unique=True)
    first, second = (np.setdiff1d(part, whole, assume_unique=True) for part in (first, second))
    return [Place(known, part, halves) for part, halves in ((whole, BOTH), (first, EVEN), (second, ODD)) if len(part)]

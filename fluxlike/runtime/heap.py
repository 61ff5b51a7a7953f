"""The symmetric heap: one interface over NVSHMEM (GPUs) and shared memory (CPUs).

Memory comes in *segments* that every rank of the world makes together (an NVSHMEM allocation is collective over all of them).
*Blocks* are cut out of segments by the ranks of one group, at an offset that is free on all of them; two groups that make
and close contexts at different times therefore do not disturb each other.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from .control import ControlGroup
from .errors import PeerTimeout

ALIGN = 512


def shown(nbytes: int) -> str:
    """A size for people."""
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{-(-nbytes >> 10)} KiB"


class Segment(Protocol):
    nbytes: int
    local: torch.Tensor
    addresses: list[int]

    def view(self, index: int) -> torch.Tensor: ...
    def close(self) -> None: ...


@dataclass
class Block:
    """``nbytes`` at the same offset on every rank of a group.

    ``indices``: the group's ranks, each by its place among those who share the heap. ``addresses``: where each rank's bytes are
    mapped here; 0 if not.
    """

    segment_index: int
    segment: Segment
    offset: int
    nbytes: int
    indices: list[int]
    addresses: list[int] = field(init=False)

    def __post_init__(self) -> None:
        starts = [self.segment.addresses[rank] for rank in self.indices]
        self.addresses = [start and start + self.offset for start in starts]

    @property
    def local(self) -> torch.Tensor:
        """This rank's bytes, uint8 [nbytes]."""
        return self.segment.local[self.offset : self.offset + self.nbytes]

    def view(self, index: int) -> torch.Tensor:
        """The bytes of rank ``index`` of the group, uint8 [nbytes]."""
        return self.segment.view(self.indices[index])[self.offset : self.offset + self.nbytes]


Free = list[tuple[int, int]]


class SymmetricHeap:
    """Segments of the ranks that share memory, and the free ranges in them, of this rank.

    Those are the world, or of one on several nodes without NVSHMEM this rank's node: `World.sharing`.
    """

    def __init__(
        self, make_segment: Callable[[int, ControlGroup], Segment], sharing: ControlGroup, nbytes: int,
        connect: Callable[[], ControlGroup] | None = None,
    ) -> None:  # fmt: skip
        """Collective over ``sharing``. ``connect``: makes connections of its ranks on which nothing else meets."""
        self._make, self._sharing, self._connect = make_segment, sharing, connect or (lambda: sharing)
        self.segments: list[Segment] = []
        self._free: list[Free] = []
        self._lock, self._growing = threading.Lock(), threading.Lock()
        #: Where the ranks meet to grow it; made when they first do.
        self._meeting: ControlGroup | None = None
        self._add(nbytes, sharing)

    def _add(self, nbytes: int, control: ControlGroup) -> None:
        segment = self._make(nbytes, control)
        with self._lock:
            self.segments.append(segment)
            self._free.append([(0, segment.nbytes)])

    def _grow(self, nbytes: int) -> None:
        """Collective over all who share it. Two threads that grow it for two groups may be on each rank in another order: one that
        is first here may meet the other one there, and both need a segment, so each is as large as what is wanted most.
        """
        with self._growing:
            if self._meeting is None:
                self._meeting = self._connect()
            self._add(max(self._meeting.gather(nbytes, "growing the symmetric heap")), self._meeting)

    def _try_to_grow(self, nbytes: int, together: ControlGroup) -> Exception | None:
        """`_grow`, and the error if it failed on any rank of ``together``: of two that cross, one may have failed for each rank."""
        error: Exception | None = None
        try:
            self._grow(nbytes)
        except PeerTimeout:
            raise
        except RuntimeError as problem:
            error = problem
        said = [text for text in together.gather(error and str(error), "growing the symmetric heap") if text]
        return error or (RuntimeError(said[0]) if said else None)

    def allocate(self, nbytes: int, control: ControlGroup, indices: list[int]) -> Block:
        """Collective over ``control``: the same offset on all its ranks; ``indices``: see `Block`. The bytes are not cleared.

        A group that is the whole world makes a new segment when no range is left, and so do the parts on each node of such a
        group, which allocate together; a sub-group cannot, since that is collective over the world: RuntimeError with the remedy.
        """
        nbytes = -(-nbytes // ALIGN) * ALIGN
        everyone = control if control.ranks == self._sharing.ranks else control.whole
        can_grow = everyone.ranks == self._sharing.ranks
        together = everyone if can_grow else control
        failure: Exception | None = None
        while True:
            place = first_fit(control.gather(self._free, "allocating on the symmetric heap"), nbytes)
            fits = place is not None if together is control else all(together.gather(place is not None, "allocating on the nodes"))
            if can_grow and not fits:
                if failure is not None:
                    raise failure
                failure = self._try_to_grow(max(nbytes, self.segments[0].nbytes), together)
                continue
            if place is None:
                raise RuntimeError(
                    f"the symmetric heap ({shown(self.nbytes)} a rank) has no {shown(nbytes)} free for the group of ranks "
                    f"{control.ranks}, and growing it takes every rank of the world; pass a larger heap_bytes to fluxlike.init, "
                    "set FLUXLIKE_HEAP_BYTES, or close contexts"
                )
            # Another thread, for another group, may have taken the range since: then all ranks of this one look again.
            taken, everywhere = self._take(*place, nbytes), False
            try:
                everywhere = all(together.gather(taken, "taking it"))
            finally:
                if taken and not everywhere:
                    self._give(*place, nbytes)
            if everywhere:
                return Block(place[0], self.segments[place[0]], place[1], nbytes, indices)

    def _take(self, index: int, offset: int, nbytes: int) -> bool:
        with self._lock:
            free = any(start <= offset and offset + nbytes <= start + size for start, size in self._free[index])
            self._free[index] = take(self._free[index], offset, nbytes) if free else self._free[index]
            return free

    def _give(self, index: int, offset: int, nbytes: int) -> None:
        with self._lock:
            self._free[index] = give(self._free[index], offset, nbytes)

    def free(self, block: Block) -> None:
        """Give a block back. The caller has made sure that no rank of its group uses it any more."""
        self._give(block.segment_index, block.offset, block.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of this rank in all segments."""
        return sum(segment.nbytes for segment in self.segments)

    @property
    def in_use(self) -> int:
        """Bytes of them that belong to a block."""
        return self.nbytes - sum(size for free in self._free for _, size in free)

    def close(self) -> None:
        """Collective over the world, newest segment first."""
        while self.segments:
            self.segments.pop().close()
        self._free.clear()


def free_on_all(free_of_ranks: list[list[Free]]) -> list[Free]:
    """Of each segment what is free on every rank, in order."""
    segments: list[Free] = []
    for first, *others in zip(*free_of_ranks, strict=False):  # a rank may be about to grow
        common = first
        for free in others:
            common = [
                (max(a, c), min(a + b, c + d) - max(a, c)) for a, b in common for c, d in free if min(a + b, c + d) > max(a, c)
            ]
        segments.append(sorted(common))
    return segments


def first_fit(free_of_ranks: list[list[Free]], nbytes: int) -> tuple[int, int] | None:
    """The first (segment, offset) where ``nbytes`` are free on every rank, or None. The same answer on every rank."""
    for index, common in enumerate(free_on_all(free_of_ranks)):
        for offset, size in common:
            if size >= nbytes:
                return index, offset
    return None


def take(free: Free, offset: int, nbytes: int) -> Free:
    """``free`` without [offset, offset + nbytes), which must lie in one of its ranges."""
    left: Free = []
    for start, size in free:
        if start <= offset and offset + nbytes <= start + size:
            left += [(start, offset - start), (offset + nbytes, start + size - offset - nbytes)]
        else:
            left.append((start, size))
    return sorted((start, size) for start, size in left if size)


def give(free: Free, offset: int, nbytes: int) -> Free:
    """``free`` with [offset, offset + nbytes), neighbours joined."""
    joined: Free = []
    for start, size in sorted([*free, (offset, nbytes)]):
        if joined and joined[-1][0] + joined[-1][1] == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((start, size))
    return joined

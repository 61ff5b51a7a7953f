"""Lists of tensors that one launch takes where they lie: how they are cut into launches, and the table that a launch reads.

A *table* is int64 words on the device, as `kernels.exchange` says: where each tensor lies, then how long each is and which blocks
are whose. Only the first change from call to call. A list of gradients has fifty thousand of the others, which would take
the host longer to make and to copy than the GPU to reduce the list: so they stay there, and what is copied in a call are the
addresses, if they are not those of the call before. A graph copies its own in each replay; then eager calls always do, too.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..kernels.tiles import cdiv


class Span(NamedTuple):
    """What one launch takes of a list: tensors number ``first`` to ``last``, but of the first those elements from ``start`` on and
    of the last those in front of ``end``."""

    first: int
    last: int
    start: int
    end: int

    def of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of flat tensors."""
        some = list(tensors[self.first : self.last + 1])
        some[-1] = some[-1][: self.end]
        some[0] = some[0][self.start :]
        return some

    def places(self, addresses: Sequence[int], itemsize: int) -> list[int]:
        """Where they begin, if the whole tensors begin at ``addresses``."""
        some = list(addresses[self.first : self.last + 1])
        some[0] += self.start * itemsize
        return some


def cut(sizes: Sequence[int], itemsize: int, most: int, block: int) -> list[Span]:
    """A list in launches of at most ``most`` bytes, a multiple of ``block``; a tensor that is larger goes in several.

    Each takes whole blocks of ``block`` bytes of memory and of what is sent, however small it is: it counts as that many. So
    a piece in the middle of a tensor has a launch for itself, and only the first of a launch may begin in the middle of one.
    """
    spans: list[Span] = []
    room = 0
    for number, size in enumerate(sizes):
        for start in range(0, size, elements := most // itemsize):
            end = min(start + elements, size)
            nbytes = cdiv((end - start) * itemsize, block) * block
            if nbytes > room or not spans:
                spans.append(Span(number, number, start, end))
                room = most
            else:
                spans[-1] = spans[-1]._replace(last=number, end=end)
            room -= nbytes
    return spans


def layout(sizes: Sequence[int], elements: int, blocks: int) -> list[int]:
    """Elements of each tensor, then of each block its tensor, then its first element there; blocks behind all are empty."""
    places = [(number, first) for number, size in enumerate(sizes) for first in range(0, size, elements)]
    places += [(0, cdiv(sizes[0], elements) * elements)] * (blocks - len(places))
    return [*sizes, *[number for number, _ in places], *[first for _, first in places]]


class Table:
    """The table of a launch: ``words``, of which all but the addresses are ``stays``. ``captured`` lasts as long as graphs may."""

    def __init__(self, executor: Any, words: torch.Tensor, stays: list[int], captured: list[torch.Tensor]) -> None:
        self.words, self._executor, self._captured = words, executor, captured
        self._stays, self._is_whole = stays, False
        self._in_graphs = False
        self._there: list[int] | None = None

    def set(self, addresses: list[int]) -> None:
        """It has these addresses, of all inputs and then of all results, for the next launch on the current stream."""
        words = addresses if self._is_whole else addresses + self._stays
        if self._executor.is_capturing():  # nothing is there before a replay
            self._captured += self._executor.fill(self.words, words), self.words
            self._in_graphs, self._there = True, None
            return
        if addresses != self._there:
            self._executor.fill(self.words, words)
            self._stays, self._is_whole = [], True
            self._there = None if self._in_graphs else addresses
        self._executor.in_use(self.words)

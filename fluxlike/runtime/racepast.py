"""What a signal had published at each of its last values: a wait takes over what came with the value that it waits for.

By the time a wait looks at its word, signals later than the awaited one may have come, and in another run they may not have. What
those published is no promise of the program. So where the race checker is told what a wait waits for (`lang.awaits`, a stream
wait), it takes over only what every value that would have ended the wait had published, whichever it met this time. A value that is
there from the start ends a wait, too, and publishes nothing.
"""

from __future__ import annotations

import numpy as np

#: So many values of a word are kept; what was published with one before them counts as published with the oldest.
DEPTH = 8


def fields(signals: int, width: int) -> list[tuple[str, type, tuple[int, ...]]]:
    """The shared tables of so many words, whose clocks count ``width`` threads."""
    return [
        ("kept", np.int32, (signals,)),  # how many values; -1: it is not known what some values published
        ("values", np.int64, (signals, DEPTH)),
        ("past", np.int32, (signals, DEPTH, width)),  # the clock at system scope, once a value was there
    ]


class Past:
    """The history of signals in the shared tables. All methods are called with the tables locked."""

    header: np.ndarray
    kept: np.ndarray
    values: np.ndarray
    past: np.ndarray
    system: np.ndarray

    def turned(self, number: int, before: int, after: int) -> None:
        """The word of a signal went from one value to another, and `system` has what is published there now."""
        kept = int(self.kept[number])
        if kept < 0:
            return
        if kept == 0 or self.values[number, kept - 1] != before:  # unknown who wrote it
            known = self.system[0, number] if kept else 0
            self.values[number, 0], self.past[number, 0], kept = before, known, 1
        if after < before:  # signals grow: one that is lower begins anew
            kept = 0
        if kept == DEPTH:
            self.values[number, :-1], self.past[number, :-1] = self.values[number, 1:].copy(), self.past[number, 1:].copy()
            kept -= 1
        self.values[number, kept], self.past[number, kept] = after, self.system[0, number]
        self.kept[number] = kept + 1

    def promised(self, number: int, want: int) -> np.ndarray | None:
        """What a wait until the word is ``want`` or more may rely on; None if that is not known.

        Of the threads beyond the first bank, which are programs of large grids, no past is kept: what is published now counts.
        """
        met = np.flatnonzero(self.values[number, : max(0, int(self.kept[number]))] >= want)
        if not len(met):
            return None
        known: np.ndarray = self.past[number, met].min(axis=0)
        banks = int(self.header[6])
        return known if banks == 1 else np.concatenate([known, self.system[1:banks, number].reshape(-1)])

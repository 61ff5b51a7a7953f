"""What each rank of a group does, where the others can read it: ranks that do different things are told so, and by whom.

Calls meet through signals in memory and nobody compares them: if one rank multiplies other sizes than its peers, or is at another
call, kernels wait for what never comes or take what was meant for another. So every rank writes what it does on a *board* in
host memory that all ranks of the group map, and looks at the boards of the others before it launches anything.

A board is a ring of *entries*, one for each thing that the rank did on the group: its number, a line of text, whether it was a
call or a meeting (an agreement on the host: making or closing a context), and a checksum over all texts so far. All ranks of a
group do the same in the same order, so entries of the same number must be equal, byte by byte. Equal checksums also say that
everything before was equal, therefore a look at one entry a peer is enough, and one that was overwritten is not missed for long.

*Who sees a difference.* Each rank writes its entry, then reads the others': of two ranks that differ, the one that writes later
sees it. It raises `CallMismatch` instead of launching, and ends the waits of the others, which then look here for the reason.

*Broken boards.* A rank that was told of a failure on this group (of any kind) is `frozen`: it writes and compares no more, since
ranks that fail stop at different places. What it wrote before is still true. The next meeting brings all ranks to the same
number again.

*Refused calls.* A rank that refuses a call by an error of its own writes that, too. Peers that have made theirs by then, it sees,
and is frozen; those that make theirs later see it, and are told. So if it comes to a meeting next, as to make a new context, it
need not be told that they differ there, and waits for those that are; in its next call it is told by `CallMismatch`.

Nothing here is exact about memory order across processors: an entry that differs is read again, later, before it counts.
"""

import contextlib
import itertools
import os
import struct
import threading
import time
import zlib
from dataclasses import dataclass
from typing import Any, Protocol

from . import shm
from .control import ControlGroup
from .errors import CallMismatch, heard, mismatch, untraced

CALL, MEETING = 0, 1
#: Entries of a ring. A GPU's host may be as many launches ahead of another's as the driver queues, about a thousand.
RING = 1024
_TEXT = 176
_ENTRY = struct.Struct(f"<qIi{_TEXT}s")
# words: number of the last entry, process, its start time, frozen, has ended its connections
_NUMBER, _PID, _SINCE, _FROZEN, _LEFT = range(5)
_HEADER = 64
_BOARD = _HEADER + RING * _ENTRY.size
_SETTLE_S = 2e-3
_AHEAD = 16  # entries that a rank can write between a meeting and the next
_REFUSED = "that this rank refused by an error of its own"


class Member(Protocol):
    def stop(self, error: Exception) -> None: ...


#: number of the last entry, checksum, frozen, contexts made, whether the last that it did was to refuse a call
State = tuple[int, int, bool, int, bool]


@dataclass(frozen=True)
class Difference:
    """Ranks ``a`` and ``b`` (of the group) did different things as the same number; ``kind`` of the last that b did."""

    a: int
    b: int
    texts: tuple[str, str]
    kind: int


class CallBoard:
    """This rank's view of the boards of a group. Making it is collective. Calls and meetings hold `ControlGroup.lock`."""

    def __init__(self, control: ControlGroup) -> None:
        self._ranks, self._me, self._name = control.ranks, control.rank, control.name
        self._memory, fd = shm.share(control.size * _BOARD, control, "the call boards")
        os.close(fd)
        self._starts = [rank * _BOARD for rank in range(control.size)]
        words = memoryview(self._memory).cast("q")
        self._heads = [words[start // 8 : (start + _HEADER) // 8] for start in self._starts]
        self._peers = [
            (rank, self._heads[rank], self._starts[rank] + _HEADER) for rank in range(control.size) if rank != control.rank
        ]
        self._compared = [0] * control.size  # the number up to which a peer that is behind is known to be equal
        mine = self._heads[control.rank]
        mine[_PID], mine[_SINCE] = os.getpid(), _process(os.getpid())[1]
        self._number = self._floor = self._chain = 0
        self._entry = b""
        self._fence = threading.Lock()
        self.frozen = False
        #: Whether the last that this rank did was to refuse a call, and it saw no peer that had made it.
        self._refused = False
        #: Whether the error of the last meeting is of a call that this rank refused, by an error that told it.
        self.knows = False
        #: Contexts made so far on this group, the same number on all ranks.
        self.made = 0
        #: How often the ranks have been brought into step again, the same number on all of them.
        self.mended = 0
        #: How the ranks got out of step: calls without a context may be of different ones until a program makes or closes one.
        self.apart: CallMismatch | None = None
        #: The open contexts of the group; all of them fail when its ranks are out of step.
        self.members: list[Member] = []

    # -- writing and comparing ------------------------------------------------------------------------------------------

    def call(self, text: str) -> None:
        """This rank makes a call. Raises CallMismatch if another rank does something else in its place."""
        self._refused = False
        if not self.frozen:
            self._write(text, CALL)
            found = self._look()
            if found is not None:
                raise self._error(found)

    def refuse(self, op: str) -> None:
        """This rank has refused a call of ``op``, and raises why."""
        with contextlib.suppress(CallMismatch):
            self.call(f"a call of {op} {_REFUSED}")
        self._refused = not self.frozen

    def goes_on(self) -> None:
        """This rank makes a call, and meets the others in it: of what it refused before, it is told now."""
        self._refused = False

    def meet(self, text: str) -> None:
        """This rank comes to a meeting. Raises CallMismatch if another makes a call instead, and so will not come."""
        if not self.frozen:
            self._write(text, MEETING)
            error = self.absence()
            if error is not None:
                raise error

    def absence(self) -> CallMismatch | None:
        """While this rank waits at a meeting: the error when another makes a call instead. One that makes the call that this rank
        refused is told so itself, and comes then.
        """
        found = None if self.frozen else self._look()
        if found is None or found.kind != CALL or (self._refused and found.texts[0].endswith(_REFUSED)):
            return None
        return self._error(found)

    def awaits(self) -> bool:
        """While this rank is at a meeting: whether a peer is still behind that is in step, was told of no failure, and may come."""
        here = [self.frozen or head[_NUMBER] >= self._number or head[_FROZEN] or head[_LEFT] for _, head, _ in self._peers]
        return not all(here) and self._look() is None

    def leave(self) -> None:
        """This rank ends its connections to the others, and will not come to a meeting."""
        self._heads[self._me][_LEFT] = 1

    def diagnose(self) -> CallMismatch | None:
        """Why a wait may have failed: the difference between two ranks that is on the boards, if there is one."""
        nobody = [False] * len(self._ranks)
        found = self._pairs([self._last(rank) for rank in range(len(self._ranks))], nobody, nobody)
        return None if found is None else self._error(found)

    def _pairs(self, last: list[int], told: list[bool], refusing: list[bool]) -> Difference | None:
        """The first two ranks that differ, as far as their ``last`` entries, one of which must be told: it neither was ``told``
        before nor has refused there what the other did."""
        for a, b in itertools.combinations(range(len(self._ranks)), 2):
            found = None if told[a] and told[b] else self._differ(a, b, min(last[a], last[b]))
            if found is not None and not all(
                told[rank] or (refusing[rank] and text.endswith(_REFUSED)) for rank, text in zip((a, b), found.texts, strict=True)
            ):
                return found
        return None

    def _write(self, text: str, kind: int) -> None:
        line = text.encode()
        if len(line) > _TEXT:  # what differs may stand in the part that is left out
            line = line[: _TEXT - 10] + b"..%08x" % zlib.crc32(line)
        self._chain = zlib.crc32(line, self._chain)
        self._number += 1
        self._entry = _ENTRY.pack(self._number, self._chain, kind, line)
        at = self._starts[self._me] + _HEADER + self._number % RING * _ENTRY.size
        self._memory[at : at + _ENTRY.size] = self._entry
        self._heads[self._me][_NUMBER] = self._number
        # Locking is a full fence: of two ranks that write and then look at the same time, one must see the other's entry.
        with self._fence:
            pass

    def _look(self) -> Difference | None:
        """`_differ` for this rank and each peer, quick where nothing differs."""
        memory, size, ours = self._memory, _ENTRY.size, self._starts[self._me] + _HEADER
        for peer, head, start in self._peers:
            theirs = head[_NUMBER]
            if theirs >= self._number:
                at = start + self._number % RING * size
                if memory[at : at + size] == self._entry:
                    continue
            elif theirs == self._compared[peer]:
                continue
            else:
                at = theirs % RING * size
                if memory[start + at : start + at + size] == memory[ours + at : ours + at + size]:
                    self._compared[peer] = theirs
                    continue
            found = self._differ(self._me, peer, min(theirs, self._number))
            if found is not None:
                return found
        return None

    def _last(self, rank: int) -> int:
        return self._heads[rank][_NUMBER]

    def _read(self, rank: int, number: int) -> tuple[Any, ...] | None:
        """(number, checksum, kind, text) of an entry, or None if it is not there or not any more."""
        at = self._starts[rank] + _HEADER + number % RING * _ENTRY.size
        entry = _ENTRY.unpack_from(self._memory, at)
        return entry if entry[0] == number else None

    def _differ(self, a: int, b: int, number: int) -> Difference | None:
        """Where the histories of two ranks part, as far as both are known and up to entry ``number``."""
        if number <= self._floor:
            return None
        for pause in (0, _SETTLE_S, _SETTLE_S):
            time.sleep(pause) if pause else None
            ours, theirs = self._read(a, number), self._read(b, number)
            if ours is None or theirs is None or ours == theirs:
                return None
        for earlier in range(number - 1, max(self._floor, number - RING), -1):
            before = self._read(a, earlier), self._read(b, earlier)
            if None in before or before[0] == before[1]:
                break
            ours, theirs = before
        assert ours is not None and theirs is not None
        newest = self._read(b, self._last(b))
        return Difference(a, b, (_text(ours), _text(theirs)), newest[2] if newest else CALL)

    def _error(self, found: Difference | str) -> CallMismatch:
        """The error of a difference, behind `stop`."""
        what = found
        if isinstance(found, Difference):
            (a, b), (ours, theirs) = (self._ranks[found.a], self._ranks[found.b]), found.texts
            what = f"rank {a} is at '{ours}' and rank {b} at '{theirs}'"
            if ours == theirs:
                what = f"ranks {a} and {b} have made different calls before '{ours}'"
        error = mismatch(str(what), self._ranks)
        heard(error, self._name)
        self.stop(error)
        return error

    def stop(self, error: CallMismatch) -> None:
        """The ranks are out of step, as ``error`` says: end this rank's contexts, and the waits of all ranks in them."""
        self.freeze()
        self.apart = untraced(error)
        for member in list(self.members):
            member.stop(self.apart)

    def freeze(self) -> None:
        """A call of this rank has failed: no more is written or compared until the next meeting of all ranks."""
        self.frozen = True
        self._heads[self._me][_FROZEN] = 1

    def all_told(self) -> bool:
        """Whether every other rank has been told of a failure since it last met the others."""
        return all(head[_FROZEN] for _, head, _ in self._peers)

    # -- meetings -------------------------------------------------------------------------------------------------------

    def state(self) -> State:
        """What ranks that meet tell each other: where they stood before."""
        return self._number, self._chain, self.frozen, self.made, self._refused

    def settle(self, states: list[State], what: set[str]) -> None:
        """All ranks are here and said their `state` and what they came for: bring them into step if they are not.

        Raises CallMismatch on all of them if a rank made other calls than another and has not been told so.
        """
        equal = len({state[:2] for state in states}) == 1
        refused, self._refused, self.knows = self._refused, False, False
        if equal and len(what) == 1 and not any(frozen for _, _, frozen, *_ in states):
            return
        error: CallMismatch | None = None
        # A rank that is not frozen has written that it came here. All must judge alike, therefore not by what the boards say by
        # now, nor by entries that a rank which is through here may overwrite.
        last = [number + (not frozen) for number, _, frozen, *_ in states]
        told, refusing = [frozen for _, _, frozen, *_ in states], [refusing for *_, refusing in states]
        if not equal:
            near = max(last) - min(last) < RING - _AHEAD
            found: Difference | str | None = self._pairs(last, told, refusing) if near else None
            if found is None and not any(told) and not any(refusing):
                found = f"the ranks have made different calls before '{what.pop()}'"
            if found is not None:
                error = self._error(found)
                self.knows = refused and isinstance(found, Difference) and any(text.endswith(_REFUSED) for text in found.texts)
            elif refused and near and (known := self._pairs(last, *[[False] * len(states)] * 2)) is not None:
                self._error(known)  # its own has told it, but it still has contexts that the others' have ended
        self.mended += 1
        self._number = self._floor = max(last)
        self._chain, self.made, self.frozen = 0, max(made for _, _, _, made, _ in states), False
        self._heads[self._me][_FROZEN] = 0
        self._heads[self._me][_NUMBER] = self._number
        if error is not None:
            raise error

    # -- people ---------------------------------------------------------------------------------------------------------

    def gone(self) -> list[int]:
        """The ranks of the group, by their number in it, whose process has ended."""
        return [peer for peer, *_ in self._peers if self._process_state(peer) == ""]

    def where(self, peer: int) -> str:
        """A sentence on what a peer does that this rank waits for."""
        state, mine, theirs = self._process_state(peer), self._last(self._me), self._last(peer)
        entry = self._read(peer, theirs)
        last = f"'{_text(entry)}'" if entry else "nothing yet"
        name = f"Rank {self._ranks[peer]}"
        if state == "":
            name += ", whose process has ended,"
        elif state in "Tt":
            name += ", whose process is stopped by a signal or a debugger,"
        if self._heads[peer][_FROZEN]:
            return f"{name} has met with a failure on this group; the last that it did before: {last}."
        if theirs < mine:
            return f"{name} has not come this far; the last that it did on this group: {last}."
        return f"{name} {'has come this far, too' if theirs == mine else 'is further on'}: {last}."

    def _process_state(self, peer: int) -> str:
        """The state letter of /proc of a peer's process, "" when it has ended."""
        head = self._heads[peer]
        state, since = _process(head[_PID])
        return "" if state in "ZX" or since != head[_SINCE] else state


def _text(entry: tuple[Any, ...]) -> str:
    return entry[3].rstrip(b"\0").decode(errors="replace")


def _process(pid: int) -> tuple[str, int]:
    """State and start time of a process; the latter tells it from another that has got its number."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # the kernel cuts the name of a program anywhere, also within a character
            fields = file.read().rsplit(b")", 1)[1].decode().split()
        return fields[0], int(fields[19])
    except (FileNotFoundError, ProcessLookupError):
        return "X", 0


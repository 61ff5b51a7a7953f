"""The race checker: finds accesses to shared memory that no signal orders, whether or not they went wrong this time.

A test that looks at results finds a missing wait if it is lucky, and a missing *release* never: the machine that runs the
test may order more than the program asked for. This checker does not look at results. It keeps vector clocks: for each logical
thread the part of every other thread's past that is known to have happened before, and holds each access against the ones that
the same memory has seen. What is not ordered is a race, found on the first run.

*Threads.* Each program of a grid, the host thread of each rank, and the copy engines of each rank (all contexts' together are one
thread). Programs of one rank run one at a time on a CPU, but count as concurrent, as they are on a GPU. A grid may have
`racethreads.MAX_PROGRAMS` of them.

*What orders.*

==========================  ============================================================================================
program order               within a thread
a launch, its end           host → programs; programs → host
release → acquire           on the same word: an atomic with release (or acq_rel) publishes what its thread knows, a later
                            one with acquire takes it over. Relaxed atomics do neither, but do not hide an earlier release.
scope                       "sys" everywhere; "gpu" within one rank; "cta" nowhere, because a program knows its own past anyhow
a compare-and-swap that     reads only: it may acquire, and publishes nothing
fails
plain store to a signal     ends what was published there, as in the C++ model
queueing a copy             host → this job and the later ones; the jobs of one queue in order
stream wait                 acquire at *system* scope: the copy engine is outside the GPU, and "gpu" scope does not reach it
stream write                release at system scope that replaces what was published there: it is a store, not an atomic
joining the side stream     copy engine → host
host agreement              everyone → everyone in the group (`ControlGroup.gather`, on which all else is built), and the
                            collectives of torch.distributed that nobody leaves before everybody came (`racehooks.MEETINGS`)
==========================  ============================================================================================

*What races.* Two accesses from different threads to a common byte, unordered, one of them a write. Two atomics never race; an
atomic and a plain access do. Memory of the heap and what `watch` names is checked, other memory is not; atomics on other memory
still order.

The first race ends the run: the rank whose access came second raises `RaceError`, the others do when they next wait. The shared
tables are `raceshadow`, what is checked `racememory`, the places where accesses are noticed `racehooks` and, of the host,
`racehost`; with the checker off none of those hooks exists. What a run comes to when the process ends is `raceverdict`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from . import racereport, raceverdict
from .control import ControlGroup
from .errors import RaceError
from .heap import Segment
from .racememory import Place
from .racereport import ATOMIC, READ, STORE
from .raceshadow import ATOMICS, CLOCK, GRANULE, KIND, NEXT, READS, RING, SIGNAL, SITE, TID, WRITE, Part
from .racethreads import Thread, Threads

_OTHER_WORDS = 1 << 16
#: Atomics of larger blocks are no signals that anyone waits for one by one.
_SIGNALS_AT_ONCE = 64
_PART = 1 << 20  # bytes of an access of the host that are judged at once; even
#: What an access can race with.
_AGAINST = {READ: (WRITE, ATOMICS), STORE: (WRITE, READS, ATOMICS), ATOMIC: (WRITE, READS)}


class Done(NamedTuple):
    """What came of an atomic on a block of words."""

    result: Any
    #: which words it wrote; None: all. One that it did not write, as a compare-and-swap that fails does not, was only read
    wrote: np.ndarray | None = None
    #: the numbers in the words before and after it, if they are numbers that signals count in
    before: np.ndarray | None = None
    after: np.ndarray | None = None


class Checker(Threads):
    """The checker of one process; made and ended by `start` and `stop`."""

    def __init__(self, control: ControlGroup) -> None:
        self.control = control
        super().__init__(control)
        self._others: dict[int, list[np.ndarray]] = {}
        self._blind = threading.local()
        self.where: Callable[[], str] = lambda: "the host"
        #: What takes away, one by one, the hooks through which it is told of accesses.
        self.undo: list[Callable[[], None]] = []

    def is_blind(self) -> bool:
        """Whether this thread is inside `unseen`."""
        return getattr(self._blind, "yes", False)

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        before, self._blind.yes = self.is_blind(), True
        try:
            yield
        finally:
            self._blind.yes = before

    # -- accesses -------------------------------------------------------------------------------------------------------

    def access(self, addresses: np.ndarray, size: int, kind: int) -> None:
        """A plain read or write, by the current thread, of elements of ``size`` bytes."""
        places = self.locate(addresses, size)
        if places and not self.shadow.is_mine:
            with self.shadow:
                self._raise_if_stopped()
                thread = self._acting()
                site = self.shadow.site("a copy" if thread is self.engine else self.where())
                for place in places:
                    self._judge(thread, site, place, kind)

    def span(self, address: int, pitch: int, width: int, rows: int, kind: int) -> None:
        """A plain read or write of ``rows`` rows of ``width`` bytes."""
        self._rows(address + np.arange(rows, dtype=np.int64) * pitch, width, kind)

    def strided(self, tensor: torch.Tensor, kind: int) -> None:
        """A plain read or write of a tensor, in whatever order its elements lie in memory."""
        size = tensor.element_size()
        dims = sorted((stride * size, extent) for stride, extent in zip(tensor.stride(), tensor.shape, strict=True) if extent > 1)
        dims = [dim for dim in dims if dim[0] > 0]  # an expanded one is read over and over
        width = size
        while dims and dims[0][0] == width:
            width *= dims.pop(0)[1]
        starts = np.array([tensor.data_ptr()], np.int64)
        for stride, extent in dims:
            starts = (starts + np.arange(extent, dtype=np.int64)[:, None] * stride).reshape(-1)
        self._rows(starts, width, kind)

    def _rows(self, starts: np.ndarray, width: int, kind: int) -> None:
        """An access to ``width`` bytes from each of ``starts`` on, a part at a time: their addresses are more than they."""
        step = 1 if width % GRANULE or (starts % GRANULE).any() else GRANULE
        rows = max(1, _PART // max(width, 1))
        for first in range(0, len(starts), rows):
            for begin in range(0, width, _PART):
                part = np.arange(begin, min(width, begin + _PART), step)
                self.access((starts[first : first + rows, None] + part).reshape(-1), step, kind)

    def _judge(self, thread: Thread, site: int, place: Place, kind: int) -> None:
        """Hold an access against the past of its granules, then make it part of it."""
        if len(place.granules) == 0:
            return
        area = self.shadow.areas[place.known.area]
        if thread.program >= 0:
            self.shadow.header[5] = 1
        parts = area.parts(place.granules, place.halves)
        for table, granules, _ in parts:
            cells = table[granules]
            for column in _AGAINST[kind]:
                for number in _distinct(cells[:, column]):
                    for record in self.shadow.chain(number):
                        if record[TID] != thread.tid and record[CLOCK] > thread.clock[record[TID]]:
                            self._report(thread, site, kind, record, place.known.area, self._racing(parts, column, record))
            if kind == STORE:
                table[granules, :SIGNAL] = (self._record(thread, site, kind), 0, 0)
                self._end_signals(cells if table is area.cells else area.cells[granules])
            else:
                column = READS if kind == READ else ATOMICS
                table[granules, column] = self._joined(thread, site, kind, cells[:, column])

    def _racing(self, parts: list[Part], column: int, record: tuple[int, ...]) -> np.ndarray:
        """The bytes of an area that ``record`` is known to have touched."""
        found = []
        for table, granules, halves in parts:
            numbers = table[granules, column]
            for number in _distinct(numbers):
                if any(r[:NEXT] == record[:NEXT] for r in self.shadow.chain(number)):
                    found += [granules[numbers == number] * GRANULE + half for half in halves]
        return np.concatenate(found)

    def _joined(self, thread: Thread, site: int, kind: int, old: np.ndarray) -> np.ndarray | int:
        """What cells lead to after a read or an atomic, which led to ``old`` before."""
        distinct, generation = _distinct(old), self.shadow.generation
        chains = [self.shadow.chain(number) for number in distinct]
        self.shadow.reserve(sum(map(len, chains)) + len(chains))
        there = self.shadow.generation == generation
        new = [self._extended(thread, site, kind, n if there else 0, c) for n, c in zip(distinct, chains, strict=True)]
        return new[0] if len(new) == 1 else np.array(new, np.uint32)[np.searchsorted(distinct, old)]

    def _end_signals(self, cells: np.ndarray) -> None:
        """A plain store over a signal: who acquires it from now on acquires nothing."""
        if cells[:, SIGNAL].any():
            self.shadow.forget_signals(np.unique(cells[:, SIGNAL]))

    def _record(self, thread: Thread, site: int, kind: int) -> int:
        """The number of an access that stands alone."""
        self.shadow.reserve(1)
        key = (site, kind, int(thread.clock[thread.tid]), self.shadow.generation)
        number = thread.recent.get(key)
        if number is None:
            number = self.shadow.record((thread.tid, int(thread.clock[thread.tid]), site, 0, thread.program, kind))
            thread.recent[key] = number
        return number

    def _extended(self, thread: Thread, site: int, kind: int, number: int, chain: list[tuple[int, ...]]) -> int:
        """``chain`` with this access, without those that happened before it. ``number`` of the chain, if it is still there."""
        stay = [r for r in chain if r[TID] != thread.tid and r[CLOCK] > thread.clock[r[TID]]]
        if not stay:
            return self._record(thread, site, kind)
        mine = (thread.tid, int(thread.clock[thread.tid]), site)
        following = 0
        if number and len(stay) >= len(chain) - 1:  # with many programs chains are long, and change by one thread at a time
            if any(r[: SITE + 1] == mine and r[KIND] == kind for r in chain):
                return number
            if len(stay) == len(chain):
                following = number
            elif chain[0] != stay[0]:
                following = chain[0][NEXT]
        if not following:
            for record in reversed(stay):
                following = self.shadow.record((*record[:NEXT], following, *record[NEXT + 1 :]))
        return self.shadow.record((*mine, following, thread.program, kind))

    # -- signals --------------------------------------------------------------------------------------------------------

    def atomic(
        self, addresses: np.ndarray, size: int, order: int, scope: int, act: Callable[[], Done], poll: bool = False
    ) -> Any:
        """An atomic on words at ``addresses``, which ``act`` does. ``poll``: it writes what is there, so it is no signal for
        reports; a release it may be all the same.
        """
        with self.shadow:
            self._raise_if_stopped()
            thread, site = self._acting(), self.shadow.site(self.where())
            places = self.locate(addresses, size)
            for place in places:
                self._judge(thread, site, place, ATOMIC)
            done = act()
            given = addresses if done.wrote is None else addresses[done.wrote]
            published = places if done.wrote is None else self.locate(given, size)
            looked = poll and scope == 2
            if order & 1 and scope and not looked:  # before it publishes: an atomic that does both hands on what it acquires
                self._acquire(thread, places, addresses, size, scope)
            if order & 2 and scope:
                for *clocks, numbers in self._words(published, given, size):
                    for table in clocks[:scope]:
                        banks = thread.clock.reshape(-1, 1, self.shadow.width)
                        table[: len(banks), numbers] = np.maximum(table[: len(banks), numbers], banks)
            if not poll:
                self._turned(given, size, order, scope, done)
            promised = self._promised(thread, addresses, size, done) if looked else None
            if order & 1 and promised is not None:
                self._learn(thread, promised)
            elif order & 1 and looked:
                self._acquire(thread, places, addresses, size, scope)
            if not poll and len(given):
                for known, granules, _ in published:
                    if len(granules) == max(1, size // GRANULE):
                        self._remember(thread, known.area, int(granules[0]), order, scope, site)
            if len(given) and (order & 2 or not poll):
                self._tick(thread)
            return done.result

    def _acquire(self, thread: Thread, places: list[Place], addresses: np.ndarray, size: int, scope: int) -> None:
        """The thread knows what is published at these words."""
        for *clocks, numbers in self._words(places, addresses, size):
            for table in clocks[:scope]:
                banks = table[: len(thread.clock) // self.shadow.width, numbers]
                np.maximum(thread.clock, banks.max(axis=1).reshape(-1), out=thread.clock)

    def _turned(self, addresses: np.ndarray, size: int, order: int, scope: int, done: Done) -> None:
        """Words were written by an atomic: what each had published when, for the waits that say what they wait for.

        Words that are no signals, as numbers that are summed by relaxed atomics, do not become any by that.
        """
        if done.before is None or done.after is None or (order & 2 and scope == 1) or len(addresses) > _SIGNALS_AT_ONCE:
            for place in self.locate(addresses, size):
                numbers = self.shadow.areas[place.known.area].cells[place.granules, SIGNAL]
                self.shadow.kept[numbers[numbers > 0]] = -1
            return
        for address, before, after in zip(addresses, done.before, done.after, strict=True):
            number = self._signal(int(address), size)
            if number and before != after:  # else it adds to what is published, and nothing to what came with the value
                self.shadow.turned(number, int(before), int(after))

    def _promised(self, thread: Thread, addresses: np.ndarray, size: int, done: Done) -> np.ndarray | None:
        """What this look at a word tells its thread, if that said what it waits for: nothing yet, or what it waits for."""
        if thread.awaits is None or len(addresses) != 1 or thread.awaits[0] != int(addresses[0]) or done.before is None:
            return None
        want = thread.awaits[1]
        if done.before[0] < want:
            return np.zeros(0, np.int32)
        thread.awaits = None
        number = self._signal(int(addresses[0]), size)
        return self.shadow.promised(number, want) if number else None

    def _signal(self, address: int, size: int) -> int:
        """The number of the signal at a word, or 0: no atomic has published or acquired there, or it is not checked."""
        places = self.locate(np.array([address]), size)
        return int(self.shadow.areas[places[0].known.area].cells[places[0].granules[0], SIGNAL]) if places else 0

    def _words(self, places: list[Place], addresses: np.ndarray, size: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """The clocks of the words at ``places``, at gpu scope and at system scope; of one that is not checked this process's."""
        if not places:
            return [self._other(address) for address in np.unique(addresses).tolist()]
        first = [(self.shadow.areas[known.area], granules[:: max(1, size // GRANULE)]) for known, granules, _ in places]
        return [(self.shadow.gpu[self.rank], self.shadow.system, self.shadow.signal_numbers(*words)) for words in first]

    def _other(self, address: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Clocks of a word that is not checked; it is this process's own."""
        if len(self._others) >= _OTHER_WORDS:
            self._others.clear()
        width = self.shadow.width
        gpu, system = self._others.get(address, [np.zeros((0, 1, width), np.int32)] * 2)
        if len(gpu) * width < self.shadow.counted:
            more = ((0, self.shadow.counted // width - len(gpu)), (0, 0), (0, 0))
            gpu, system = self._others[address] = [np.pad(gpu, more), np.pad(system, more)]
        return gpu, system, np.zeros(1, np.int64)

    def _remember(self, thread: Thread, area: int, granule: int, order: int, scope: int, site: int) -> None:
        shadow = self.shadow
        at = int(shadow.signals[thread.tid]) % RING
        shadow.ring[thread.tid, at] = (area, granule, thread.clock[thread.tid], order + 4 * scope, site)
        shadow.signals[thread.tid] += 1

    def stream_wait(self, address: int, value: int, met: Callable[[], bool]) -> bool:
        """The copy engine looks at a word; True, and an acquire at system scope, if it is ``value`` or more, as it waits for."""
        with self.shadow:
            self._raise_if_stopped()
            if not met():
                return False
            thread, site = self.engine, self.shadow.site("a stream wait")
            self._reach(thread, self.shadow.counted)
            for place in self.locate(np.array([address]), 4):
                self._judge(thread, site, place, ATOMIC)
                number = self.shadow.signal_numbers(self.shadow.areas[place.known.area], place.granules[:1])[0]
                known = self.shadow.promised(int(number), value)
                if known is None:
                    known = self.shadow.system[: self.shadow.counted // self.shadow.width, number].reshape(-1)
                self._learn(thread, known)
            return True

    def stream_write(self, address: int, value: int, act: Callable[[], int]) -> None:
        """The copy engine, or another stream of the host's, sets a word to ``value``: a release at system scope, by a store.

        ``act`` does it, and gives what was there.
        """
        with self.shadow:
            thread, site, before = self._acting(), self.shadow.site("a stream write"), act()
            for place in self.locate(np.array([address]), 4):
                self._judge(thread, site, place, ATOMIC)
                number = self.shadow.signal_numbers(self.shadow.areas[place.known.area], place.granules[:1])
                self.shadow.withdraw_signals(number)
                banks = thread.clock.reshape(-1, 1, self.shadow.width)
                for table in (self.shadow.gpu[self.rank], self.shadow.system):
                    table[: len(banks), number] = banks
                self._remember(thread, place.known.area, int(place.granules[0]), 2, 2, site)
                self.shadow.turned(int(number[0]), before, value)
            self._tick(thread)

    # -- the report -----------------------------------------------------------------------------------------------------

    def _raise_if_stopped(self) -> None:
        by = self.shadow.stopped_by
        if by == self.rank + 1:  # by another thread of this process
            raise RaceError(self.shadow.stop_text())
        if by:
            raise RaceError(f"rank {self.control.ranks[self.rank]} stops, because of this race:\n{self.shadow.stop_text()}")

    def _report(self, thread: Thread, site: int, kind: int, record: tuple[int, ...], area: int, where: np.ndarray) -> None:
        second = racereport.Access(thread.tid, thread.program, kind, site)
        low, high = int(where.min()), int(where.max())
        message = racereport.text(self.shadow, self.control.ranks, self._names, area, low, high, record, second)
        self.shadow.stop(self.rank, message)
        raise RaceError(message)

    def close(self) -> None:
        """Notice nothing any more."""
        while self.undo:
            self.undo.pop()()
        self.shadow.close()


def _distinct(numbers: np.ndarray) -> list[int]:
    """The different values, quickly where there is one, as nearly always."""
    first = numbers[0]
    return [int(first)] if (numbers == first).all() else np.unique(numbers).tolist()


_checker: Checker | None = None


def active() -> Checker | None:
    """The checker, if this run is checked."""
    return _checker


def start(control: ControlGroup) -> Checker:
    """Make the checker, on all ranks of ``control``; `racehooks.start` also makes it see. Collective."""
    global _checker
    stop()
    _checker = Checker(control)
    raceverdict.opened(_checker.shadow)
    return _checker


def stop() -> None:
    """End checking; harmless when there is none."""
    global _checker
    if _checker is not None:
        raceverdict.closing()
        _checker.close()
        _checker = None


def add_segment(segment: Segment, control: ControlGroup) -> None:
    """Check a segment of the heap, if this run is checked. Collective."""
    if _checker is not None:
        _checker.add_segment(segment, control)


def watch(name: str, tensor: torch.Tensor) -> None:
    """Check ``tensor``, a local buffer that other threads use, too, under ``name``; of a part of the heap, say its name in reports.

    Does nothing when the checker is off. A local buffer must be given up with `unwatch` before its memory is freed. ``tensor``: on
    the CPU, contiguous, any dtype; ValueError if it is not, or watched in part. RuntimeError if the checker has no room for it.
    """
    if _checker is not None:
        _checker.watch(name, tensor)


def unwatch(tensor: torch.Tensor) -> None:
    """End what `watch` began."""
    if _checker is not None:
        _checker.unwatch(tensor)


def awaits(address: int, want: int) -> None:
    """The running program looks at the word at ``address`` from now on until it is ``want`` or more; that is all it relies on."""
    if _checker is not None:
        _checker.current().awaits = (address, want)


def used_rows(rows: int) -> None:
    """The running program uses only the first ``rows`` rows of the block that it loads next by a descriptor."""
    if _checker is not None:
        _checker.current().used_rows = max(0, rows)


def unseen() -> contextlib.AbstractContextManager[None]:
    """What the host does by torch inside is no access: a look at a word that may change meanwhile, and orders nothing."""
    return contextlib.nullcontext() if _checker is None else _checker.unseen()


def host_write(tensor: torch.Tensor) -> None:
    """The host writes ``tensor`` by means that the checker does not see; call it next to the write."""
    if _checker is not None:
        _checker.strided(tensor, STORE)


def host_read(tensor: torch.Tensor) -> None:
    """The host reads ``tensor`` by means that the checker does not see; call it next to the read."""
    if _checker is not None:
        _checker.strided(tensor, READ)

"""The logical threads that the race checker tells apart: what each knows, and how launches, jobs and meetings tell them more."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from . import programs
from .control import ControlGroup
from .heap import Free, first_fit, give, take
from .racememory import Memory
from .racereport import ENGINE, FIRST_PROGRAM, HOST
from .raceshadow import BANKS, WIDTH, Shadow

MAX_PROGRAMS = BANKS * WIDTH - FIRST_PROGRAM


@dataclass
class Thread:
    """A logical thread of this rank: what it knows (``clock``), and how reports call it."""

    tid: int
    clock: np.ndarray
    program: int = -1
    kernel: str = ""
    #: record numbers of its accesses since its last signal, by place and kind
    recent: dict[tuple[int, int, int, int], int] = field(default_factory=dict)
    #: rows that count of its next descriptor load, if it said so
    used_rows: int | None = None
    #: the word that it waits for, and from which value on it goes on, if it said so
    awaits: tuple[int, int] | None = None


class Threads(Memory):
    """The threads of this process, and those of its grids."""

    def __init__(self, control: ControlGroup) -> None:
        super().__init__(Shadow(control), control)
        self._ticks = np.zeros(BANKS * self.shadow.width, np.int32)
        self.host, self.engine = self._thread(HOST), self._thread(ENGINE)
        self._on_engine = threading.local()
        self._turns: dict[tuple[int, ...], int] = {}
        self._numbers: Free = [(FIRST_PROGRAM, MAX_PROGRAMS)]  # of threads, for programs: those that no running grid has

    def _thread(self, number: int) -> Thread:
        thread = Thread(self.shadow.thread(self.rank, number), np.zeros(self.shadow.counted, np.int32))
        self._tick(thread)
        return thread

    def _tick(self, thread: Thread) -> None:
        """What the thread does from now on is not part of what it has just made known."""
        self._ticks[thread.tid] += 1
        thread.clock[thread.tid] = self._ticks[thread.tid]
        thread.recent.clear()

    def _learn(self, thread: Thread, clock: np.ndarray) -> None:
        """The thread knows what ``clock`` says, too; any rank may have counted more threads than this one."""
        self._reach(thread, len(clock))
        np.maximum(thread.clock[: len(clock)], clock, out=thread.clock[: len(clock)])

    @staticmethod
    def _reach(thread: Thread, threads: int) -> None:
        if len(thread.clock) < threads:
            thread.clock = np.pad(thread.clock, (0, threads - len(thread.clock)))

    def current(self) -> Thread:
        program = programs.current()
        if program is not None:
            return program.checked
        return self.engine if getattr(self._on_engine, "yes", False) else self.host

    def _acting(self) -> Thread:
        """The thread that does something now. The shadow is locked."""
        thread = self.current()
        self._reach(thread, self.shadow.counted)
        return thread

    def fork(self, grid: programs.Grid) -> None:
        """A launch begins."""
        x, y, z = grid.dims
        with self.shadow:
            place = first_fit([[self._numbers]], x * y * z)
            if place is None:
                beside = ", beside those of other threads" if x * y * z <= MAX_PROGRAMS else ""
                raise RuntimeError(
                    f"the race checker follows at most {MAX_PROGRAMS} programs of a grid, and {grid.name} is launched with "
                    f"{x * y * z}{beside}; launch fewer, each of which does several tiles (as fluxlike's kernels do), or a "
                    "smaller problem"
                )
            self._numbers = take(self._numbers, place[1], x * y * z)
            self.shadow.count(place[1] + x * y * z - 1)
            self._reach(self.host, self.shadow.counted)
            for program in grid.queue:
                i, j, k = program.pid
                number = i + x * (j + y * k)
                thread = Thread(self.shadow.thread(self.rank, place[1] + number), self.host.clock.copy(), number, grid.name)
                self._tick(thread)
                program.checked = thread
                grid.checked.append(thread)
            self._tick(self.host)

    def join(self, grid: programs.Grid) -> None:
        """A launch is over."""
        with self.shadow:
            for thread in grid.checked:
                self._learn(self.host, thread.clock)
            first = self.shadow.number_of(grid.checked[0].tid)
            self._numbers = give(self._numbers, first, len(grid.checked))

    def publish(self) -> np.ndarray:
        """What the host thread knows, for the other ranks of an agreement."""
        known = self.host.clock.copy()
        self._tick(self.host)
        return known

    def learn(self, clocks: list[list[int] | None]) -> None:
        """What the host threads of an agreement knew."""
        for clock in clocks:
            if clock is not None and len(clock) % self.shadow.width == 0 and len(clock) <= len(self._ticks):
                self._learn(self.host, np.array(clock, self.host.clock.dtype))

    @contextlib.contextmanager
    def meeting(self, ranks: tuple[int, ...]) -> Iterator[None]:
        """A collective of these ranks, as torch has them, that nobody leaves before everybody has come.

        What they know goes by two words in turn: nobody can come to the next meeting but one while another has not left this one.
        """
        turn = self._turns[ranks] = 1 - self._turns.get(ranks, 0)
        with self.shadow:
            word = self.shadow.meeting_word(hash((*ranks, turn)))
            known = self.publish().reshape(-1, 1, self.shadow.width)
            table = self.shadow.system
            table[: len(known), word] = np.maximum(table[: len(known), word], known)
        yield
        with self.shadow:
            self._learn(self.host, self.shadow.system[: self.shadow.counted // self.shadow.width, word].reshape(-1))

    def queued(self) -> np.ndarray:
        """What a job of the copy engine may rely on that is ordered behind the host: its past."""
        return self.publish()

    def begin_job(self, known: np.ndarray | None) -> None:
        """What this thread does from now on is the copy engine's; ``known``: of `queued`, or None for a job that is not ordered."""
        self._on_engine.yes = True
        if known is not None:
            with self.shadow:  # the engines of two contexts are two threads of the process
                self._learn(self.engine, known)

    def join_engine(self) -> None:
        with self.shadow:
            self._learn(self.host, self.engine.clock)
            self._tick(self.engine)

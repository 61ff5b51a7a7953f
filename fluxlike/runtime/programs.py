"""The programs of one interpreted grid: all alive together, one running; nothing here knows Triton.

On a GPU the programs of a persistent kernel are resident together, so one may wait for another. Here each gets a thread when
it needs one and a single baton goes round; see `Grid`.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import env
from .errors import PeerTimeout

_BRIEF = 16  # Memory operations between two yields up to which a program that stored nothing counts as spinning.
_LOOKS = 32  # In a row at words, without a yield, beyond which a program waits by a loop of its own.
_NAP_MIN = 50e-6  # Seconds.
_STOP_PATIENCE = 5.0  # Seconds for the programs of a failed grid to reach their next memory operation.

#: The race checker, while there is one: ``fork(grid)`` before the programs of a launch, ``join(grid)`` after them.
observer: Any = None
#: Seconds of a `nap` of who has not waited for long. May be set: longer naps leave more of the machine to other ranks.
longest_nap = 1e-3
_NAP_LATE = 20e-3  # of who has


class _Local(threading.local):
    program: Any = None  # that this thread interprets; memory operations look here
    inside = False  # `interpreter.run`, from its first to its last change


_local = _Local()


@dataclass(frozen=True)
class Schedule:
    """How the programs of a grid take turns; for tests that look for a schedule which breaks a protocol.

    With a ``seed``, the next program is drawn at random where otherwise they go round. ``jitter`` is the probability of
    a switch before a memory operation; where there is no program to switch to, up to ``delay`` seconds are slept, so
    that a grid of one program, too, loses step with its peers in other processes.
    """

    seed: int | None = None
    jitter: float = 0.0
    delay: float = 0.0


_schedule = Schedule()
_launches = itertools.count()


def configure(schedule: Schedule | None = None) -> Schedule:
    """Use ``schedule`` (None: the default one) for the runs that follow; returns the one used so far.

    Runs after the same `configure` with the same seed take the same turns, each run its own: the launches are counted.
    """
    global _schedule, _launches
    previous, _schedule = _schedule, schedule or Schedule()
    _launches = itertools.count()
    return previous


class Stopped(BaseException):
    """Unwinds a program whose grid has failed elsewhere."""


class Program:
    """One program of a grid: where it stands in the grid, and the lock it sleeps on while others have the baton."""

    def __init__(self, grid: Grid, pid: tuple[int, int, int]) -> None:
        self.grid, self.pid = grid, pid
        self.started = False
        self.baton = threading.Lock()
        self.baton.acquire()
        self.operations, self.effect = 0, False  # since its last yield
        self.looks, self.since = 0, 0.0  # at words, with nothing else between; when the first of these was
        self.checked: Any = None  # what the race checker knows of it


class Grid:
    """The programs of one launch. All are alive together, one runs: the holder of the baton.

    A thread is made only when a program yields to one that has not begun; a thread whose program is done begins the
    next one itself. A grid without waits therefore runs in the caller's thread from beginning to end. Whatever is not
    running and not done is in ``queue``; only the holder of the baton touches it.
    """

    def __init__(self, name: str, body: Callable[[], Any], dims: tuple[int, int, int], schedule: Schedule) -> None:
        self.name, self.body, self.dims, self.schedule = name, body, dims, schedule
        self.random: random.Random | None = None
        if schedule.seed is not None or schedule.jitter:
            launch = next(_launches)
            self.random = random.Random(None if schedule.seed is None else f"{schedule.seed}:{launch}")
        x, y, z = dims
        self.queue = [Program(self, (i, j, k)) for k in range(z) for j in range(y) for i in range(x)]
        self.holder: Program | None = None
        self.spinning: set[Program] = set()
        self.napped = 0.0  # since a program found something to do
        self.failure: tuple[Program | None, BaseException] | None = None
        self.threads: list[threading.Thread] = []
        self.done = threading.Event()
        self.checked: list[Any] = []  # the race checker's, one a program

    def run(self) -> None:
        watching = observer
        if watching is not None:
            watching.fork(self)
        try:
            self._work(self._next())
            self.done.wait()
        except BaseException as error:  # Ctrl-C while no program runs in this thread.
            self._fail(None, error)
            self.done.wait(_STOP_PATIENCE)
        deadline = time.monotonic() + _STOP_PATIENCE
        for thread in self.threads:
            if thread.ident is not None:  # else it was not to be had
                thread.join(max(0.0, deadline - time.monotonic()))
        if watching is not None:
            watching.join(self)
        if self.failure is None:
            return
        program, cause = self.failure
        if program is None or not isinstance(cause, Exception) or getattr(type(cause), "fluxlike_passthrough", False):
            raise cause
        raise RuntimeError(f"{self.name}, program {program.pid}: {type(cause).__name__}: {cause}") from cause

    def switch(self, me: Program) -> bool:
        """Give the baton away and come back with it; False when there is nobody to give it to."""
        if not self.queue:
            return False
        other = self._next()
        self.queue.append(me)
        self.holder = other
        try:
            if other.started:
                other.baton.release()
            else:
                self._begin(other, me)
            me.baton.acquire()
        except BaseException as error:  # Ctrl-C: stop the others, then unwind when it is this program's turn.
            self._fail(me, error)
            if self.holder is not me and not me.baton.acquire(timeout=_STOP_PATIENCE):
                self.queue.remove(me)
            raise
        if self.failure is not None:
            raise Stopped
        return True

    def _begin(self, other: Program, me: Program) -> None:
        """Give the baton to one that has no thread yet. Where there is none to be had, ``me`` keeps it."""
        thread = threading.Thread(target=self._work, args=(other,), daemon=True)
        self.threads.append(thread)
        try:
            thread.start()
        except RuntimeError:
            self.queue.remove(me)
            self.queue.append(other)
            self.holder = me
            raise

    def spin(self, me: Program) -> bool:
        """`switch` for a wait that found nothing; naps first if all programs do nothing but that.

        The ranks of a CPU machine outnumber its cores, and the one that could end the wait needs the core.
        """
        if self.failure is not None:
            raise Stopped
        if not self.queue:
            return False
        if me.effect or me.operations > _BRIEF:
            self.spinning.clear()
            self.napped = 0.0
        me.operations, me.effect = 0, False
        self.spinning.add(me)
        if len(self.spinning) > len(self.queue):
            self.napped += nap(self.napped)
            self.spinning.clear()
        return self.switch(me)

    def before_memory(self, me: Program, effect: bool, look: bool) -> None:
        if self.failure is not None:
            raise Stopped
        me.operations += 1
        me.effect = me.effect or effect
        if not look:
            me.looks = 0
        else:
            self._looks(me)
        if self.random is not None and self.random.random() < self.schedule.jitter:
            self.spinning.discard(me)
            if not self.switch(me) and self.schedule.delay:
                time.sleep(self.random.random() * self.schedule.delay)

    def _looks(self, me: Program) -> None:
        """A wait by a loop of the kernel's own yields nowhere: who ends it must have a turn. It ends at the limit of all waits."""
        me.looks += 1
        if me.looks == 1:
            me.since = time.monotonic()
        elif me.looks > _LOOKS:
            if time.monotonic() - me.since > env.timeout_s():
                raise PeerTimeout(
                    f"{self.name}, program {me.pid}: a loop of the kernel's own has looked at words by atomics for "
                    f"{env.timeout_s():g} s and done nothing else; who signals them must be alive, and FLUXLIKE_TIMEOUT_S sets the "
                    "limit"
                )
            if not self.spin(me):
                time.sleep(_NAP_MIN)

    def _next(self) -> Program:
        drawn = self.random is not None and self.schedule.seed is not None
        return self.queue.pop(self.random.randrange(len(self.queue)) if drawn and self.random else 0)

    def _fail(self, program: Program | None, error: BaseException) -> None:
        self.failure = self.failure or (program, error)

    def _work(self, program: Program | None) -> None:
        """Run programs in this thread until the baton goes to one that has a thread already, or none is left."""
        while program is not None:
            program.started = True
            self.holder = _local.program = program
            try:
                if self.failure is None:
                    with np.errstate(all="ignore"):  # A GPU does not warn of overflow.
                        self.body()
            except Stopped:
                pass
            except BaseException as error:
                self._fail(program, error)
            _local.program = None
            self.spinning.clear()
            if not self.queue:
                return self.done.set()
            program = self._next()
            if program.started:
                self.holder = program
                return program.baton.release()
        return None


def nap(waited: float) -> float:
    """Sleep between two looks of a wait that has lasted so many seconds; returns how long.

    A part of what it has lasted: 50 µs to 1 ms at first, and behind 50 ms a fiftieth, up to 20 ms, as each look takes from the
    ranks that are waited for.
    """
    seconds = min(max(_NAP_MIN, waited / 4), max(longest_nap, min(waited / 50, _NAP_LATE)))
    time.sleep(seconds)
    return seconds


def before_memory(effect: bool, look: bool = False) -> None:
    """Runs ahead of each memory operation: the place to stop, and the place where a `Schedule` may switch.

    ``look``: an atomic that writes what is there.
    """
    program = running()
    program.grid.before_memory(program, effect, look)


def yield_program() -> bool:
    """Let another program of the same grid run; for a wait under the interpreter to call on every turn.

    False at once if there is no other program: then nothing in this process can end the wait, and the caller should
    sleep. True after the others had their turn; if all of them only waited, this has taken a `nap`.
    """
    program = current()
    if program is None:
        return False
    program.looks = 0
    return program.grid.spin(program)


def current() -> Program | None:
    """The program that this thread interprets, if it does."""
    return _local.program  # type: ignore[no-any-return]


def running() -> Program:
    """The program that this thread interprets; only called while it does."""
    return _local.program  # type: ignore[no-any-return]


def refuse_inside(what: str) -> None:
    """RuntimeError where this thread is inside a kernel, whose place another cannot take: a signal came, and its handler calls."""
    if _local.inside or _local.program is not None:
        raise RuntimeError(
            f"{what} was called from inside a kernel that is being interpreted, as by the handler of a signal, which may come at "
            "any time; let the handler note that it came, and make the call behind the one that it interrupts"
        )


def run_grid(name: str, body: Callable[[], Any], dims: tuple[int, int, int]) -> None:
    """Call ``body`` once as each program of a grid of ``dims``, under the schedule in force."""
    Grid(name, body, dims, _schedule).run()

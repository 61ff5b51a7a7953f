"""Ranks for the tests of the race checker's tables: one process plays all of them, and memory is only numbers.

`Ranks` makes a checker for each rank, as `racecheck.start` would in processes of their own, and lets a test act as any program of
any of them. Nothing is loaded or stored: the checker is told of accesses, and says whether they race. `checked_alone` and
`host_scenes` are for what really runs, in one process and in two.
"""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.distributed as dist

import fluxlike
from fluxlike.ops.context import Context
from fluxlike.ops.group import resolve
from fluxlike.runtime import env, programs, racecheck, racehooks
from fluxlike.runtime.errors import RaceError
from fluxlike.runtime.racecheck import Checker, Done
from fluxlike.runtime.racereport import READ, STORE

RELAXED, ACQUIRE, RELEASE, ACQ_REL = range(4)
CTA, GPU, SYS = range(3)
BYTES = 1 << 16
WORD, OTHER_WORD, DATA = 0, 8, 1024  # offsets on a rank's heap
A0, A1, B0, B1 = (0, 0), (0, 1), (1, 0), (1, 1)  # programs of rank 0 and of rank 1
HOST_A, HOST_B = (0, None), (1, None)


class Control:
    """A rank's end of agreements between the threads of this process, which play the ranks."""

    def __init__(self, rank, size, meeting, said):
        self.rank, self.size, self.ranks = rank, size, list(range(size))
        self._meeting, self._said = meeting, said

    def gather(self, value, what):
        self._said[self.rank] = value
        self._meeting.wait()
        all_of_them = list(self._said)
        self._meeting.wait()
        return all_of_them

    def agree(self, what, arguments, error=None):
        assert error is None, error
        self.gather(arguments, what)

    def barrier(self, what):
        self.gather(None, what)


class Segment:
    """Memory of every rank, by its addresses only."""

    def __init__(self, ranks, nbytes=BYTES):
        self.nbytes = nbytes
        self.addresses = [0x10_0000 * (rank + 1) for rank in range(ranks)]


class Ranks:
    def __init__(self, size):
        meeting, said = threading.Barrier(size), [None] * size
        controls = [Control(rank, size, meeting, said) for rank in range(size)]
        self.segment = Segment(size)

        def make(control):
            checker = Checker(control)
            checker.add_segment(self.segment, control)
            return checker

        with ThreadPoolExecutor(size) as pool:  # making one is collective
            self.checkers = list(pool.map(make, controls))
        self.grids = [None] * size
        self.words = {}

    def launch(self, rank, count=2):
        """The programs of a grid on ``rank`` begin."""
        self.grids[rank] = grid = programs.Grid("kernel", lambda: None, (count, 1, 1), programs.Schedule())
        self.checkers[rank].fork(grid)

    def end(self, rank):
        self.checkers[rank].join(self.grids[rank])
        self.grids[rank] = None

    @contextlib.contextmanager
    def acting(self, rank, program=None):
        """As a program of ``rank``, or as its host."""
        programs._local.program = None if program is None else self.grids[rank].queue[program]
        try:
            yield self.checkers[rank]
        finally:
            programs._local.program = None

    def at(self, owner, offset):
        return self.segment.addresses[owner] + offset

    def touch(self, kind, me, owner, offset=DATA, nbytes=64, element=4):
        """``me`` (rank, program or None) reads or writes ``nbytes`` of ``owner``."""
        with self.acting(*me) as checker:
            checker.access(self.at(owner, offset) + np.arange(0, nbytes, element, dtype=np.uint64), element, kind)

    def read(self, me, owner, *place, **how):
        self.touch(READ, me, owner, *place, **how)

    def write(self, me, owner, *place, **how):
        self.touch(STORE, me, owner, *place, **how)

    def atomic(self, me, owner, order, scope=SYS, offset=WORD, poll=False, wrote=None, numbers=()):
        with self.acting(*me) as checker:
            words = np.array([self.at(owner, offset)], np.uint64)
            done = Done("done", None if wrote is None else np.array([wrote]), *numbers)
            return checker.atomic(words, 8, order, scope, lambda: done, poll)

    def signal(self, me, owner, order=RELEASE, scope=SYS, offset=WORD):
        assert self.atomic(me, owner, order, scope, offset) == "done"

    def wait(self, me, owner, order=ACQUIRE, scope=SYS, offset=WORD):
        self.atomic(me, owner, order, scope, offset, poll=True)

    def count(self, me, owner, value, order=RELEASE, scope=SYS, offset=WORD):
        """A signal that sets a word to ``value``."""
        before, self.words[owner, offset] = self.words.get((owner, offset), 0), value
        self.atomic(me, owner, order, scope, offset, numbers=(np.array([before]), np.array([value])))

    def wait_for(self, me, owner, want, offset=WORD):
        """One look at a word by a wait until it is ``want`` or more; whether it is."""
        there = self.words.get((owner, offset), 0)
        with self.acting(*me) as checker:
            checker.current().awaits = (self.at(owner, offset), want)
        self.atomic(me, owner, ACQUIRE, SYS, offset, poll=True, numbers=(np.array([there]), np.array([there])))
        return there >= want

    def swap(self, me, owner, met, order=ACQ_REL, offset=WORD):
        """A compare-and-swap; ``met``: it found what it compares with, and wrote."""
        assert self.atomic(me, owner, order, offset=offset, wrote=met) == "done"

    def close(self):
        for checker in self.checkers:
            checker.close()


@contextlib.contextmanager
def checked_alone():
    """The checker on in this process, as its only rank: for kernels that are really run, on watched memory."""
    control = Control(0, 1, threading.Barrier(1), [None])
    executor = type("Executor", (), {"copy_engine": None, "write": None})()
    racehooks.start(control, executor)
    try:
        yield
    finally:
        racecheck.stop()


# ranks of their own, for what the hosts do


def host_scenes(group, names):
    """How each scene ended on this rank: "", or the report."""
    said = {}
    env.put("FLUXLIKE_RACECHECK", "1")
    pair, single = dist.new_group([0, 1]), dist.new_group([0])
    for name in names:
        fluxlike.init(heap="shm", heap_bytes=1 << 20)
        try:
            with Context("words", resolve(None), torch.float32, "in_kernel", flags=1, data=1) as ctx:
                said[name] = _scene(ctx, name, pair, single)
        except RaceError as error:
            said[name] = str(error)
        finally:
            fluxlike.finalize()
    return said


def _scene(ctx, name, pair, single):
    """Rank 0 writes a word of its own; later, as the clock has it, rank 1 writes or reads it. Do they meet in between?"""
    word = ctx.block.view(0)[ctx.offsets["data"] :][:4].view(torch.float32)
    store, mine = dist.distributed_c10d._get_default_store(), torch.ones(1)
    if ctx.rank == 0:
        word.fill_(1)
        store.set(name, "")
    else:
        store.wait([name])
    both = [torch.ones(1), torch.ones(1)]
    {
        "barrier": dist.barrier,
        "monitored_barrier": dist.monitored_barrier,
        "all_reduce": lambda: dist.all_reduce(mine),
        "all_reduce of nothing": lambda: dist.all_reduce(mine[:0]),
        "all_gather of nothing": lambda: dist.all_gather([t[:0] for t in both], mine[:0]),
        "all_gather": lambda: dist.all_gather(both, mine),
        "all_gather_object": lambda: dist.all_gather_object([None, None], 1),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.ones(2), mine),
        "async": lambda: dist.all_reduce(mine, async_op=True).wait(),
        "sub-group": lambda: dist.barrier(group=pair),
        "a group of another": lambda: dist.barrier(group=single),
    }.get(name, lambda: None)()
    if ctx.rank == 1 and "item" in name:
        word.item()
    elif ctx.rank == 1:
        word[0] = 2
    return ""

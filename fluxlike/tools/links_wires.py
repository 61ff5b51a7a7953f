"""Emulated links: on the CPU heap, what a kernel pushes to a peer arrives when a machine's link would have brought it.

`slowed(matrix, slowdown)` puts this rank on a machine of `topology`: rank i is its GPU i. Inside, a kernel's stores and exchanges
to the memory of a peer do not happen at once. They are queued at the link, and a thread carries each out when it is due: after
those in front of it, its bytes over the link's GB/s, and a trip; a release, which tells of data, later by what a signal takes. All
times are ``slowdown`` times as long as the machine's, so that the interpreter's own time is small beside them.

Who shares what: an NVLink is one pair's, in each direction. A path over a switch, PCIe or the host takes the sender's port and
then the receiver's, of which each GPU has one in each direction, for as long as the GB/s of the path say. (The planner lets all
GPUs share the one host, so this is kinder to what goes through it.) A receiver's port that is busy keeps no sender's busy: there
is room in between.

What it is not: computing takes no time of the model, only the interpreter's; a program does not stall until its own stores have
arrived, as a release makes it do on a GPU, where others go on meanwhile. Copy engines and loads from peers are not slowed; the
kernels of the all-reduce family have neither.

The kernels know nothing of it: the hooks sit in the interpreter's builder object, as the race checker's do, and go at the end.
"""

import contextlib
import fcntl
import functools
import heapq
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as stock

from ..ops.exchange import SIGNAL, TRIP
from ..runtime import interpreter, programs, racecheck, shm, world
from ..runtime.wording import counted
from ..topology import LinkMatrix

_XCHG = stock._ir.ATOMIC_OP.XCHG
_RELEASES = (stock._ir.MEM_SEMANTIC.RELEASE, stock._ir.MEM_SEMANTIC.ACQUIRE_RELEASE)
#: Seconds of Python's turns between threads: those that bring what is due must not wait for the interpreter's.
_TURN = 2e-4
#: Seconds of the machine for which programs that all wait leave its processors to the other ranks, at most.
_NAP = 5e-8

Gate = tuple[str, int, int]


def gates(matrix: LinkMatrix, source: int, target: int) -> tuple[Gate, Gate | None]:
    """What a transfer takes, one after the other: the link, or the sender's port and the receiver's."""
    kind = matrix.kind[source][target]
    if not kind:
        raise ValueError(
            f"{matrix.name or 'the matrix'} has no path from GPU {source} to {target}; all ranks must reach all others"
        )
    if kind == "nvlink":
        return (kind, source, target), None
    return ("port out", source, source), ("port in", target, target)


class _Packet(NamedTuple):
    peer: int
    seconds: float  # at a gate
    late: float  # from the last gate on
    deliver: Callable[[], Any]


class Wires:
    """The links that leave this rank. Made and closed by all ranks together.

    ``sent``: bytes that have been pushed to each rank, flags included.
    """

    def __init__(self, matrix: LinkMatrix, slowdown: float) -> None:
        this = world.current()
        self.matrix, self.slowdown, self.rank, self.size = matrix, slowdown, this.rank, this.size
        self.gates = {peer: gates(matrix, self.rank, peer) for peer in range(this.size) if peer != self.rank}
        self.sent = [0] * this.size
        memory, self._fd = shm.share(8 * this.size, this.control, "the ports of emulated links")
        #: Until when each rank's receiving port is taken.
        self._ports = np.frombuffer(memory, dtype=np.float64)
        self._free: dict[Gate, float] = {}
        self._due: list[tuple[float, int, bool, _Packet]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._open, self._error = True, None  # type: tuple[bool, BaseException | None]
        self._thread = threading.Thread(target=self._run, name="fluxlike-links", daemon=True)
        self._thread.start()

    def send(self, peer: int, nbytes: int, release: bool, deliver: Callable[[], Any]) -> None:
        """``deliver`` once a transfer of ``nbytes`` that begins now would be there."""
        if self._error is not None:
            raise RuntimeError("emulated links failed") from self._error
        first, second = self.gates[peer]
        self.sent[peer] += nbytes
        seconds = nbytes / (self.matrix.bandwidth[self.rank][peer] * 1e9) * self.slowdown
        packet = _Packet(peer, seconds, (TRIP + release * SIGNAL) * self.slowdown, deliver)
        with self._changed:
            free = self._free[first] = max(time.monotonic(), self._free.get(first, 0.0)) + seconds
            self._push(free if second else free + packet.late, second is not None, packet)

    def _push(self, due: float, at_port: bool, packet: _Packet) -> None:
        heapq.heappush(self._due, (due, next(self._numbers), at_port, packet))
        self._changed.notify()

    def _run(self) -> None:
        try:
            while (found := self._next()) is not None:
                due, at_port, packet = found
                if at_port:
                    arrived = self._through_port(due, packet)
                    with self._changed:
                        self._push(arrived + packet.late, False, packet)
                else:
                    packet.deliver()
        except BaseException as error:  # the next send, or close, tells
            self._error = error

    def _next(self) -> tuple[float, bool, _Packet] | None:
        """The next that is due, once it is; None at the end."""
        with self._changed:
            while self._open or self._due:
                left = self._due[0][0] - time.monotonic() if self._due else None
                if left is not None and left <= 0:
                    due, _, at_port, packet = heapq.heappop(self._due)
                    return due, at_port, packet
                self._changed.wait(left)
        return None

    def _through_port(self, due: float, packet: _Packet) -> float:
        """When a packet that has left this rank's port is through the receiver's, in the order of those that come."""
        fcntl.lockf(self._fd, fcntl.LOCK_EX)
        try:
            through = max(self._ports[packet.peer] + packet.seconds, due)
            self._ports[packet.peer] = through
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)
        return float(through)

    def close(self) -> None:
        """Bring what is still on its way."""
        with self._changed:
            self._open = False
            self._changed.notify()
        self._thread.join()
        os.close(self._fd)
        if self._error is not None:
            raise RuntimeError("emulated links failed") from self._error


class _Operations:
    """The interpreter's stores and atomics, with those to peers handed to the wires."""

    def __init__(self, wires: Wires, builder: Any) -> None:
        self.wires, self.builder, self.plain = wires, builder, type(builder)
        self.segments = 0
        self.starts, self.ends, self.ranks = (np.empty(0, np.uint64),) * 3

    def _owners(self, addresses: np.ndarray) -> np.ndarray:
        """The rank in whose heap each address lies; this rank for all other memory."""
        heap = world.current().heap
        if len(heap.segments) != self.segments:  # it may grow
            self.segments = len(heap.segments)
            places = sorted((start, start + s.nbytes, r) for s in heap.segments for r, start in enumerate(s.addresses))
            self.starts, self.ends, self.ranks = np.array(places, np.uint64).T
        place = np.searchsorted(self.starts, addresses, side="right").astype(np.int64) - 1
        inside = (place >= 0) & (addresses < self.ends[place])
        return np.where(inside, self.ranks[place], self.wires.rank)

    def _split(self, pointers: Any, mask: Any) -> Iterator[tuple[int, Any, int]]:
        """Each rank that is written to, with the mask of what is, and its bytes."""
        owners, size = self._owners(pointers.data), max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        keep = np.broadcast_to(mask.data, owners.shape)
        for rank in np.unique(owners[keep]):
            theirs = keep & (owners == rank)
            yield int(rank), stock.TensorHandle(theirs, tl.int1), int(theirs.sum()) * size

    def create_masked_store(self, pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        for rank, theirs, nbytes in self._split(pointers, mask):
            if rank == self.wires.rank:
                self.plain.create_masked_store(self.builder, pointers, value, theirs, *rest, **named)
            else:
                programs.before_memory(effect=True)
                store = stock.InterpreterBuilder.create_masked_store
                act = functools.partial(store, self.builder, pointers, value, theirs, *rest, **named)
                self.wires.send(rank, nbytes, False, act)

    def create_atomic_rmw(self, op: Any, pointers: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
        parts = list(self._split(pointers, mask))
        if all(rank == self.wires.rank for rank, *_ in parts):
            return self.plain.create_atomic_rmw(self.builder, op, pointers, value, mask, sem, scope)
        if op != _XCHG:
            raise RuntimeError(f"emulated links carry stores and exchanges only, not an atomic {op} of a peer's memory")
        for rank, theirs, nbytes in parts:
            programs.before_memory(effect=True)
            exchange = stock.InterpreterBuilder.create_atomic_rmw
            act = functools.partial(exchange, self.builder, op, pointers, value, theirs, sem, scope)
            if rank == self.wires.rank:
                act()
            else:
                self.wires.send(rank, nbytes, sem in _RELEASES, act)
        return stock.TensorHandle(np.zeros_like(value.data), value.dtype.scalar)  # what was there: no kernel asks


_HOOKED = ("create_masked_store", "create_atomic_rmw")


@contextlib.contextmanager
def slowed(matrix: LinkMatrix, slowdown: float) -> Iterator[Wires]:
    """Emulate the links of ``matrix``, which has a GPU for each rank, for the kernels that run inside. Collective over the world.

    ValueError for a matrix of another size, or without a path between two ranks; RuntimeError on GPUs and under the race checker.
    """
    this = world.current()
    if this.executor.name != "shm":
        raise RuntimeError(f"links are emulated on the CPU heap only, and this is {this.executor.name!r}; use heap='shm'")
    if racecheck.active() is not None:
        raise RuntimeError(
            "links cannot be emulated under the race checker, which watches the same operations; unset FLUXLIKE_RACECHECK"
        )
    if len(matrix) != this.size:
        has = f"the matrix has {counted(len(matrix), 'GPU')} for {counted(this.size, 'rank')}"
        raise ValueError(f"{has}; give matrix.part(range({this.size}))")
    wires = Wires(matrix, slowdown)
    builder = interpreter.builder
    operations = _Operations(wires, builder)
    turn, nap = sys.getswitchinterval(), programs.longest_nap
    this.control.barrier("emulated links begin")
    try:
        sys.setswitchinterval(_TURN)
        programs.longest_nap = max(nap, _NAP * slowdown)
        for name in _HOOKED:
            setattr(builder, name, getattr(operations, name))
        yield wires
    finally:
        for name in _HOOKED:
            delattr(builder, name)
        programs.longest_nap = nap
        sys.setswitchinterval(turn)
        wires.close()

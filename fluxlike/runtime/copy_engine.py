"""Copies to peers beside kernels: the copy engines of a GPU, through CUDA stream memory operations. On a CPU, see `cpu`."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import driver
from .streams import Order, Own, current

log = logging.getLogger("fluxlike")

#: Bytes from row to row that a 2D copy takes (CU_DEVICE_ATTRIBUTE_MAX_PITCH on every GPU so far).
MAX_PITCH = 2**31 - 1
#: Graphs of copies that a context keeps.
GRAPHS = 128


class Apart:
    """A wait for the whole device fails while any stream of it is captured, and ends the capture, whichever threads they are of.

    So nothing is captured here during a wait of ours, and such a wait begins behind a capture.
    """

    def __init__(self) -> None:
        self._lock, self._waiting = threading.Lock(), 0

    @contextlib.contextmanager
    def waits(self) -> Iterator[None]:
        with self._lock:
            self._waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting -= 1

    @contextlib.contextmanager
    def captures(self) -> Iterator[bool]:
        """Whether a capture may begin; it may last as long as the ``with``."""
        with self._lock:
            yield not self._waiting


apart = Apart()


class CudaCopyEngine:
    """A side stream whose copies the GPU's copy engines do, gated by words in memory.

    Memory operations between two copies go to the stream as one batch, which spares the host calls and the stream pauses.
    ``wait`` blocks the stream until a word is at least a value: without a deadline, so it may only be a word that this
    rank's own kernel writes (its waits are bounded, so it always ends). All addresses and values are plain numbers and are
    frozen when a CUDA graph is captured.

    Jobs that come again are queued as one graph of their own, which takes less of the host's time, if the memory that they name
    is there as long as the engine is. A graph knows what it copies from: launched when that was freed, or is another allocation
    at the same address, it ends the process.

    Calls fork the stream off the caller's and join it, but a fork takes the host two calls of the driver and is seldom needed:
    jobs begin with a wait for a word that the kernel of their own call sets, behind all that the caller's stream held, and that
    they reset. So the first call of an engine forks (its words may just be being made), those in a capture do (or they would not
    be part of it), and all behind a capture: when that graph is replayed, its kernel sets the same words, at a time unknown here,
    and jobs of a later call that are not behind it would go on by those.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own = Own(device, priority=-1)
        self._batch: list[bytes] = []
        self.raw = self._own.raw
        self._order = Order(device)
        #: Whether the stream has had a job, and whether a graph has one: see above.
        self._begun, self.captured = False, False
        #: None for what could not be made one.
        self._graphs: dict[Any, int | None] = {}
        self._once: set[Any] = set()

    def fork(self) -> None:
        self._from = current(self._device)
        self.captured = self.captured or torch.cuda.is_current_stream_capturing()
        if self.captured or not self._begun:
            self._order(self._from, self.raw)
        self._begun = True

    def join(self) -> None:
        try:
            self._flush()
        finally:
            self._order(self.raw, self._from)

    def queue(self, key: Any, jobs: Callable[[], None]) -> None:
        """Queue what ``jobs`` queues: the same for the same ``key``, in memory that lasts; None if that cannot be said."""
        known = self._graphs.get(key)
        if known is None or torch.cuda.is_current_stream_capturing():
            jobs()
            self._flush()
        else:
            driver.launch_graph(known, self.raw)

    def remember(self, key: Any, jobs: Callable[[], None]) -> None:
        """Jobs have been queued: when that is done for the second time, keep them as a graph.

        Only then, when nothing waits for the host any more: to make a graph may take a while, or wait for the device.
        """
        if key is None or key in self._graphs or torch.cuda.is_current_stream_capturing():
            return
        if key not in self._once:
            self._once = {*([] if len(self._once) > GRAPHS else self._once), key}
            return
        with apart.captures() as may:
            if may:
                self._once.remove(key)
                self._capture(key, jobs)

    def _capture(self, key: Any, jobs: Callable[[], None]) -> None:
        if len(self._graphs) >= GRAPHS:
            self._forget(next(iter(self._graphs)))

        def queue() -> None:
            jobs()
            self._flush()

        self._graphs[key] = None
        try:
            self._graphs[key] = driver.captured(self.raw, queue)
        except RuntimeError as problem:  # as when another thread of the program waited for the device; the copies are queued
            log.warning("copies of a call go on being queued one by one, which takes the host longer: %s", problem)
            self._batch.clear()

    def _forget(self, key: Any) -> None:
        graph = self._graphs.pop(key)
        if graph is not None:
            driver.destroy_graph(graph)

    def close(self) -> None:
        """Free the graphs, and the stream; the device is done with them."""
        for key in list(self._graphs):
            self._forget(key)
        self._own.give_back()

    def abandon(self) -> None:
        """No job comes any more, and the device may not be done: the graphs stay, and the stream."""
        self._own.keep()

    def wait(self, address: int, value: int) -> None:
        """Go on once the 32-bit word at ``address`` is at least ``value``."""
        self._batch.append(driver.wait_operation(address, value))

    def write(self, address: int, value: int) -> None:
        """Set the 32-bit word at ``address``, after and ordered behind all that was queued before."""
        self._batch.append(driver.write_operation(address, value))

    def stamp(self) -> torch.cuda.Event:
        """The time when all that was queued before is done; for `CudaExecutor.nanoseconds`. Not for jobs that become a graph."""
        self._flush()
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._own.stream)
        return event

    def _flush(self) -> None:
        if self._batch:
            batch, self._batch = self._batch, []  # nothing of what the driver refuses is left to the next call
            driver.batch(self.raw, batch)

    def copy(self, to: int, pitch_to: int, source: int, pitch_source: int, width: int, rows: int) -> None:
        """Copy ``rows`` rows of ``width`` bytes."""
        self._flush()
        if pitch_to == pitch_source == width:
            width, rows = width * rows, 1
        if rows == 1 or pitch_source < width or max(pitch_to, pitch_source) > MAX_PITCH:
            # row by row what a 2D copy refuses: rows that overlap, as of an expanded tensor, and rows too far apart
            for row in range(rows):
                driver.copy(self.raw, to + row * pitch_to, source + row * pitch_source, width)
            return
        driver.copy_2d(self.raw, to, pitch_to, source, pitch_source, width, rows)

"""Launches and copies on a CPU: the interpreter for kernels, a thread for the copy engine."""

import ctypes
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import env, interpreter, shm
from .control import ControlGroup
from .errors import untraced
from .heap import Segment
from .launches import Launch, Streamless


class CpuCopyEngine:
    """The copy engine of a machine without one: a thread that does waits, writes and copies in the order queued.

    A launch returns when the kernel is done, so the copies must be queued before it: the kernel waits for what the peers'
    copy engines bring while this thread serves theirs.
    """

    def __init__(self) -> None:
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._cancelled = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="fluxlike-copy-engine", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # Ctrl-C, when it may have begun: nobody would end it
            self._jobs.put(None)
            raise

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not self._cancelled.is_set():
                try:
                    job()
                except BaseException as error:  # handed to the caller by join
                    self._error = error
                    self._cancelled.set()

    def fork(self) -> None:
        """Launches are synchronous: what came before is done."""

    def join(self, stuck: Callable[[float], Exception | None]) -> None:
        """Wait until all that was queued is done; ``stuck(seconds so far)`` gives the error when that cannot be any more."""
        done = threading.Event()
        self._jobs.put(done.set)
        since = time.monotonic()
        while not done.wait(0.02) and not self._cancelled.is_set():
            error = stuck(time.monotonic() - since)
            if error is not None:
                self.cancel()
                raise error
        self.raise_cause()
        if self._error is not None:
            raise RuntimeError("the copy engine thread failed") from self._error

    def raise_cause(self) -> None:
        """Raise what ended a job, if it is one of fluxlike's own errors: it is the cause of whatever else went wrong."""
        if self._error is not None and getattr(type(self._error), "fluxlike_passthrough", False):
            raise untraced(self._error)

    def cancel(self) -> None:
        """Give up what is queued: the kernel that would satisfy its waits has failed."""
        self._cancelled.set()

    def close(self) -> None:
        self.abandon()
        self._thread.join(5)

    def abandon(self) -> None:
        """No job comes any more: the thread ends, and is not waited for."""
        self._cancelled.set()
        self._jobs.put(None)

    def wait(self, address: int, value: int) -> None:
        self._queue(lambda: self._wait(address, value))

    def write(self, address: int, value: int) -> None:
        self._queue(lambda: self._write(address, value))

    def copy(self, to: int, pitch_to: int, source: int, pitch_source: int, width: int, rows: int) -> None:
        self._queue(lambda: self._copy(to, pitch_to, source, pitch_source, width, rows))

    def stamp(self) -> list[int]:
        """When what was queued so far is done, this holds the time; for `CpuExecutor.nanoseconds`."""
        reading: list[int] = []
        self._queue(lambda: reading.append(time.monotonic_ns()))
        return reading

    # What the thread does; a subclass may look on.

    def _queue(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def _wait(self, address: int, value: int) -> None:
        pause = 5e-5
        while not self._met(address, value) and not self._cancelled.is_set():
            time.sleep(pause)
            pause = min(pause * 1.5, 1e-3)

    def _met(self, address: int, value: int) -> bool:
        return bool(shm.word(address)[0] >= value)

    def _write(self, address: int, value: int) -> None:
        shm.word(address)[0] = value

    def _copy(self, to: int, pitch_to: int, source: int, pitch_source: int, width: int, rows: int) -> None:
        for row in range(rows):
            if self._cancelled.is_set():  # by an interrupt, behind which the program may free what is copied
                return
            ctypes.memmove(to + row * pitch_to, source + row * pitch_source, width)


#: Told of every launch, with the arguments of `CpuExecutor.launch`; the lint's.
observer: Callable[[Any, tuple, dict, int, int], None] | None = None


class CpuExecutor(Streamless):
    """One process of a machine without GPUs."""

    name = "shm"
    default_heap_bytes = shm.DEFAULT_BYTES
    capability = (0, 0)

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.programs = env.cpu_programs()
        #: Makes the copy engine of a context; the race checker has one of its own.
        self.copy_engine: Callable[[], CpuCopyEngine] = CpuCopyEngine

    def start(self, control: ControlGroup) -> None:
        """Nothing to start."""

    def in_use(self, t: torch.Tensor) -> None:
        """What is done with it is done."""

    def stop(self) -> None:
        """Nothing to stop: segments are anonymous memory."""

    def make_segment(self, nbytes: int, control: ControlGroup) -> Segment:
        return shm.ShmSegment(nbytes, control)

    def launch(self, kernel: Any, programs: int, args: tuple, constants: dict, warps: int, stages: int) -> None:
        if observer is not None:
            observer(kernel, args, constants, warps, stages)
        interpreter.run(kernel, (programs,), *args, **constants)

    def prepare(
        self, kernel: Any, programs: int, args: Sequence[Any], constants: dict, warps: int, stages: int, varying: tuple[int, ...]
    ) -> Launch:  # fmt: skip
        return Launch(self, kernel, programs, args, constants, warps, stages, varying)

    def multiply(self, a: torch.Tensor, w: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        """out = a · wᵀ (+ bias), added in fp32 and rounded once to the dtype of ``out``."""
        product = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        torch.mm(a.float(), w.float().T, out=product)  # this form is one that autocast leaves alone
        out.copy_(product if bias is None else product.add_(bias))

    def write(self, address: int, value: int) -> None:
        """Set the 32-bit word at ``address``, behind all that was launched before."""
        shm.word(address)[0] = value

    def fill(self, table: torch.Tensor, words: list[int]) -> torch.Tensor:
        """Copy int64 words to the front of ``table``. Returns the memory that they come from."""
        given = torch.tensor(words, dtype=torch.int64, device=self.device)
        table[: len(words)] = given
        return given

    def read_later(self, t: torch.Tensor) -> Callable[[], list[Any]]:
        """What ``t`` holds now, as the host gets it once it asks."""
        values = t.tolist()
        return lambda: values

    def post(self, addresses: list[int], value: int) -> None:
        """Set the 32-bit words at ``addresses`` on any rank, now."""
        for address in addresses:
            shm.word(address)[0] = value

    def synchronize(self) -> None:
        """Launches are synchronous."""

    def stamp(self) -> list[int]:
        """The time now; for `nanoseconds`."""
        return [time.monotonic_ns()]

    def nanoseconds(self, since: list[int], until: list[int]) -> int:
        """From one stamp to another, of this executor or of its copy engines."""
        return until[0] - since[0]

    def overlapped(
        self,
        engine: CpuCopyEngine,
        launch: Callable[[], None],
        key: Any,
        queue: Callable[[], None],
        stuck: Callable[[float], Exception | None],
        then: Callable[[], None] = lambda: None,
    ) -> None:
        engine.fork()
        queue()
        try:
            launch()
            then()
            engine.join(stuck)
        except BaseException:
            engine.cancel()
            engine.raise_cause()
            raise

"""Launches on a GPU, by Triton and straight through the driver, its streams, and what a context needs of it."""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from triton import knobs

from . import driver, env, nvshmem, streams
from .control import ControlGroup
from .copy_engine import CudaCopyEngine, apart
from .direct import DirectLaunch, NotKnown
from .heap import Segment
from .launches import Lanes, Launch

log = logging.getLogger("fluxlike")

_AS_IT_IS = contextlib.nullcontext()


class CudaLanes(Lanes):
    """The tail of a product on one stream leaves multiprocessors idle, which the next one, on the other, begins to use.

    What is allocated on the other stream goes back to torch for that stream once it is dropped, also while a stream still reads it
    that it was joined to. So the other one begins behind all of those, not only behind the one that calls next; in a capture, whose
    memory is the graph's, behind those of the capture. That keeps such memory from this stream; from others, and from being
    unmapped, only `CudaExecutor.in_use` does.
    """

    captured = False

    def __init__(self, executor: "CudaExecutor") -> None:
        self._executor, self._device = executor, executor.device
        self._own, self._order = streams.Own(self._device), streams.Order(self._device)
        self._other, self.raw = self._own.stream, self._own.raw
        #: Streams of callers since the other one last began behind all of them, each with the capture that it was part of, or 0.
        self._callers: set[tuple[int, int]] = set()

    @contextlib.contextmanager
    def forked(self) -> Iterator[None]:
        with self._executor.current():
            current, capture = streams.current(self._device), self._executor.capture()
            self.captured = self.captured or capture != 0
            self._order(current, self.raw)
            self._follow(current, capture)
        try:
            yield
        finally:  # also after an error: what the other stream works on may be freed
            with self._executor.current():
                now = streams.current(self._device)
                # ids may be started on another one, which the caller has ordered before this one already
                for stream in (current, now) if now != current else (current,):
                    self._callers.add((stream, self._join(stream)))

    def _follow(self, current: int, capture: int) -> None:
        """The other stream begins behind all callers of this capture, or of none, and so behind ``current``, which it is by now."""
        left = set()
        for caller, then in self._callers - {(current, capture)}:
            now = driver.capture_of(caller)
            if now == then == capture:
                self._order(caller, self.raw)
            elif then == 0 or now == then:  # what waits for a stream that is being captured would become part of its graph
                left.add((caller, then))
        self._callers = left

    def of(self, turn: int) -> contextlib.AbstractContextManager[Any]:
        if not turn % 2:
            return _AS_IT_IS
        return streams.Switched(self._other) if self._executor.is_current() else self._elsewhere()

    @contextlib.contextmanager
    def _elsewhere(self) -> Iterator[None]:
        """Where another device is current, as in a new thread: `torch.cuda.stream` alone would make a CUDA context on that one."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._other):
            yield

    def wait(self) -> None:
        with self._executor.current():
            self._join(streams.current(self._device))

    def _join(self, stream: int) -> int:
        """``stream`` waits for the other one, but not where a graph is captured of one of the two alone: a graph cannot wait for
        what is outside of it, nor for what is in one whose capture has ended. Returns the capture of ``stream``, or 0."""
        capture = driver.capture_of(stream)
        if driver.capture_of(self.raw) == capture:
            self._order(self.raw, stream)
        return capture


class CudaPuts:
    """A side stream of puts to other nodes. Between GPUs of one host NVSHMEM copies; else a kernel of its own rings the network
    card, which must find a place beside a product: therefore the priority.
    """

    captured = False

    def __init__(self, executor: "CudaExecutor") -> None:
        self._executor, self._device = executor, executor.device
        self._own, self._order = streams.Own(self._device, priority=-1), streams.Order(self._device)
        self.raw = self._own.raw

    def put(self, to: int, source: int, nbytes: int, signal: int, more: int, pe: int) -> None:
        """`nvshmem.put`, behind what the current stream holds now and before what it holds behind `join`."""
        with self._executor.current():
            self.captured = self.captured or torch.cuda.is_current_stream_capturing()
            self._order(streams.current(self._device), self.raw)
            nvshmem.put(to, source, nbytes, signal, more, pe, self.raw)

    def join(self) -> None:
        with self._executor.current():
            self._order(self.raw, streams.current(self._device))

    def add(self, address: int, pe: int) -> None:
        """Add one to a word of another node's, behind what the current stream holds."""
        with self._executor.current():
            nvshmem.signal(address, 1, pe, streams.current(self._device), add=True)

    def close(self) -> None:
        """No put comes any more, and the device is done with those that came."""
        self._own.give_back()

    def abandon(self) -> None:
        """No put comes any more, but one may be under way for ever, so nobody is to have the stream again."""
        self._own.keep()

    def quiet(self) -> None:
        """What was queued here, on the current stream and of abort words is complete at the other nodes, once these are done."""
        if not self._executor.one_host:  # where GPUs write to each other that is so without
            with self._executor.current():
                for stream in (self.raw, streams.current(self._device), self._executor.far_posts):
                    nvshmem.quiet(stream)


class CudaLaunch(Launch):
    """The first time through Triton, then straight through the driver."""

    _direct: DirectLaunch | None = None
    _known = True

    def __call__(self, tensors: Sequence[torch.Tensor]) -> bool:
        if self._direct is None or _is_profiled():
            compiled = self.launched(tensors)
            if self._direct is None and self._known:
                self._look_at(compiled, tensors)
            return False
        if self._executor.is_current():  # without a ``with``, which takes the host two calls more for each launch
            self._direct(tensors)
        else:
            with torch.cuda.device(self._executor.device):
                self._direct(tensors)
        return True

    def _look_at(self, compiled: Any, tensors: Sequence[torch.Tensor]) -> None:
        try:
            self._direct = DirectLaunch(compiled, self._programs, self.arguments(tensors), self.varying, self._executor.device)
        except NotKnown as problem:
            self._known = False
            log.warning("launches go through Triton, which takes the host longer: %s", problem)


def _is_profiled() -> bool:
    """Whether somebody listens to Triton's launches, before or after them."""
    before: Any = knobs.runtime.launch_enter_hook
    behind: Any = knobs.runtime.launch_exit_hook
    return bool(getattr(before, "calls", before) or getattr(behind, "calls", behind))


def check_places(ranks: Sequence[int], said: Sequence[tuple[str, int]]) -> None:
    """ValueError if more ranks are on a GPU than FLUXLIKE_RANKS_PER_GPU; ``said``: of each the GPU, and that."""
    gpus, most = [gpu for gpu, _ in said], said[0][1]
    for rank, (gpu, theirs) in zip(ranks, said, strict=True):
        if theirs != most:
            raise ValueError(f"FLUXLIKE_RANKS_PER_GPU is {most} on rank {ranks[0]} and {theirs} on rank {rank}; set one on all")
        if gpus.count(gpu) > most:
            together = [other for other, its in zip(ranks, gpus, strict=True) if its == gpu]
            raise ValueError(
                f"ranks {together} are on one GPU ({gpu}), and FLUXLIKE_RANKS_PER_GPU is {most}; call "
                "torch.cuda.set_device(LOCAL_RANK) before fluxlike.init, or, for tests with fewer GPUs than ranks, set "
                f"FLUXLIKE_RANKS_PER_GPU={len(together)}"
            )


def warn_of_places(said: Sequence[tuple[str, int]]) -> None:
    """Where no two of all ranks share a GPU, and said to."""
    gpus, most = [gpu for gpu, _ in said], said[0][1]
    if most > 1 and len(set(gpus)) == len(gpus):
        log.warning(
            "FLUXLIKE_RANKS_PER_GPU is %d and every rank has a GPU to itself, of which kernels use 1/%d; unset it", most, most
        )


class CudaExecutor:
    """One GPU: where kernels are launched and what the context needs of the device."""

    name = "nvshmem"
    default_heap_bytes = nvshmem.DEFAULT_BYTES

    def __init__(self, device: torch.device) -> None:
        if env.racecheck():
            raise RuntimeError("FLUXLIKE_RACECHECK=1 works on the CPU heap only: use fluxlike.init(heap='shm'), or unset it")
        self.device = device
        self._lanes: dict[Hashable, CudaLanes] = {}
        #: Kernels that NVSHMEM knows.
        self._known: set[str] = set()
        #: Of each thread, whether the driver knows its context there.
        self._threads = threading.local()
        properties = torch.cuda.get_device_properties(device)
        #: Of a kernel's grid. Ranks that share a GPU leave room on it: copies inside of a GPU are kernels, for which those that
        #: fill it do wait.
        self.programs = max(1, properties.multi_processor_count // env.ranks_per_gpu())
        self.capability, self.gpu = (properties.major, properties.minor), str(properties.uuid)
        if self.capability < (8, 0):
            raise RuntimeError(
                f"{properties.name} has compute capability {properties.major}.{properties.minor}; fluxlike needs 8.0 or newer "
                "(A100, H100 and later), or fluxlike.init(heap='shm') with CPU tensors"
            )

    def start(self, control: ControlGroup) -> None:
        if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0") and control.rank == 0 and control.size > 1:
            log.warning(
                "CUDA_LAUNCH_BLOCKING is set: a launch ends when its kernel does, and kernels of schedule copy_engine wait for "
                "copies that are queued behind it, so these calls end in PeerTimeout; unset it, or make contexts with "
                "schedule='in_kernel'"
            )
        said = control.gather((self.gpu, env.ranks_per_gpu()), "fluxlike.init: GPUs")
        check_places(control.ranks, said)
        if control.rank == 0 and env.ranks_per_gpu() > 1 and control.size == dist.get_world_size():
            warn_of_places(said)
        self.one_host = len(control.nodes) == env.virtual_nodes()
        nvshmem.start(self.device, control, self.one_host)
        self._context, self._threads.known = driver.context(), True
        # Not one of torch's streams: those are shared, and what `post` ends may be what such a stream waits for.
        self._posts, self.far_posts = driver.make_stream(), driver.make_stream()

    def stop(self) -> None:
        with self.current():
            driver.destroy_stream(self._posts)
            driver.destroy_stream(self.far_posts)
            nvshmem.stop()

    def make_segment(self, nbytes: int, control: ControlGroup) -> Segment:
        return nvshmem.NvshmemSegment(nbytes, control, self.current)

    def launch(self, kernel: Any, programs: int, args: tuple, constants: dict, warps: int, stages: int) -> Any:
        """Through Triton, which compiles what it does not know; returns what was compiled."""
        with self.current():  # Triton launches on the current device, which the caller may have changed
            if "extern_libs" in constants:
                self.ready(kernel, args, constants, warps, stages)
            return kernel[(programs,)](*args, **constants, num_warps=warps, num_stages=stages)

    def ready(self, kernel: Any, args: Sequence[Any], constants: dict, warps: int, stages: int) -> None:
        """Compile and load a kernel that calls NVSHMEM, and let it do so; a capture is too late for that."""
        with self.current():
            compiled = kernel.warmup(*args, grid=(1,), **constants, num_warps=warps, num_stages=stages)
            if compiled.hash not in self._known:
                compiled.run  # noqa: B018 - Triton loads a kernel when that is asked for
                nvshmem.make_known(int(compiled.module))
                self._known.add(compiled.hash)

    def prepare(
        self, kernel: Any, programs: int, args: Sequence[Any], constants: dict, warps: int, stages: int, varying: tuple[int, ...]
    ) -> Launch:  # fmt: skip
        return CudaLaunch(self, kernel, programs, args, constants, warps, stages, varying)

    def copy_engine(self) -> CudaCopyEngine:
        with self.current():
            return CudaCopyEngine(self.device)

    def puts(self) -> CudaPuts:
        with self.current():
            return CudaPuts(self)

    def device_library(self) -> Path | None:
        """The library by which kernels put to other nodes, if it is there."""
        return nvshmem.device_library(self.capability)

    def lanes(self, users: Hashable) -> CudaLanes:
        """The same ones for the same ``users``, who take turns: torch keeps memory for cuBLAS for each stream that multiplied."""
        if users not in self._lanes:
            with self.current():
                self._lanes[users] = CudaLanes(self)
        return self._lanes[users]

    def multiply(self, a: torch.Tensor, w: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        """out = a · wᵀ (+ bias) by cuBLAS, as torch is set to use it, on the current stream. The rows of ``out`` may lie apart.

        The forms with ``out`` are those that autocast leaves alone.
        """
        if bias is None:
            torch.mm(a, w.T, out=out)
        else:
            torch.addmm(bias, a, w.T, out=out)

    def write(self, address: int, value: int) -> None:
        """Set the 32-bit word at ``address`` behind all that the current stream holds. It takes no multiprocessor.

        A release at system scope: the default of such a write is that those before it are seen first.
        """
        with self.current():
            raw = streams.current(self.device)
            driver.write_value(raw, address, value)

    def lasting(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What ``make`` makes on the current stream: a tensor that is there beyond the call, whoever wants its memory back then.

        The first run of what `torch.compile` makes CUDA graphs of takes all memory of its thread from the graphs' pool, and
        nothing but results may stay there. So another thread makes it; in a capture, which other threads' CUDA calls would
        end, this one.
        """
        if self.is_capturing():
            return make()
        stream = torch.cuda.current_stream(self.device)

        def away() -> torch.Tensor:
            torch.cuda.set_device(self.device)  # a thread begins on the first one, and would leave a CUDA context there
            with torch.cuda.stream(stream):
                return make()

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(away).result()

    def in_use(self, t: torch.Tensor) -> None:
        """Its memory is not taken from what the current stream holds, whichever stream it was allocated on."""
        t.record_stream(torch.cuda.current_stream(self.device))

    def report(self, words: int) -> torch.Tensor:
        """Host memory that a kernel can write and the host can read without synchronising."""
        return torch.zeros(words, dtype=torch.int64, device="cpu", pin_memory=True)

    def fill(self, table: torch.Tensor, words: list[int]) -> torch.Tensor:
        """Copy int64 words to the front of ``table``, behind all that the current stream holds. Returns the memory that they come
        from, which a graph copies in each replay."""
        pinned = torch.tensor(words, dtype=torch.int64, device="cpu", pin_memory=True)
        table[: len(words)].copy_(pinned, non_blocking=True)
        return pinned

    def read_later(self, t: torch.Tensor) -> Callable[[], list[Any]]:
        """What ``t`` holds behind what the current stream holds now, as the host gets it once it asks, and only then waits."""
        pinned = torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=True).copy_(t, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(self.device))

        def read() -> list[Any]:
            copied.synchronize()
            return pinned.tolist()  # type: ignore[no-any-return]

        return read

    def post(self, addresses: list[int], value: int) -> None:
        """Set the 32-bit words at ``addresses`` on any rank, now: past whatever this GPU has queued and waits for."""
        with self.current():
            for address in addresses:
                driver.write_value(self._posts, address, value)
            driver.synchronize(self._posts)

    def post_to(self, pes: list[int], address: int, value: int) -> None:
        """`post` to ranks of other nodes, by a symmetric 64-bit word. Not waited for: it may need a place on a full GPU."""
        with self.current():
            for pe in pes:
                nvshmem.signal(address, value, pe, self.far_posts, add=False)

    def synchronize(self) -> None:
        with apart.waits():
            torch.cuda.synchronize(self.device)

    def stamp(self) -> torch.cuda.Event:
        """The time when all that the current stream holds so far is done; for `nanoseconds`."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def nanoseconds(self, since: torch.cuda.Event, until: torch.cuda.Event) -> int:
        """From one stamp to another, of this executor or of its copy engines; both are in the past."""
        return round(since.elapsed_time(until) * 1e6)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def capture(self) -> int:
        """The number of the capture that the current stream is part of, or 0."""
        return driver.capture_of(streams.current(self.device)) if self.is_capturing() else 0

    def is_beside_capture(self, *sides: streams.Side) -> bool:
        """Whether one of these is part of a capture that the current stream is not part of, as that of another thread: what would
        be queued there could not be outside of it, and CUDA would end the capture.
        """
        held = [side.raw for side in sides if side.captured]  # seldom any
        if not held:
            return False
        with self.current():
            return any(driver.capture_of(raw) not in (0, self.capture()) for raw in held)

    def on_same_stream(self, last: Any) -> Any:
        """Order this call behind the context's last one when the caller has changed streams; returns today's stream.

        During capture the caller orders: a captured stream must not wait for one outside the graph. Nor does a call wait for a
        stream that another thread is capturing by now: it would become part of that graph. What that stream held is done, as
        `torch.cuda.graph` waits for the device before it begins.
        """
        raw = streams.current(self.device)
        if last is not None and last[0] == raw:
            return last
        if last is not None and self.is_capturing():
            return last
        current = torch.cuda.current_stream(self.device)
        if last is not None:
            with self.current():
                captured = driver.is_capturing(last[0])
            if not captured:
                current.wait_stream(last[1])
        return None if self.is_capturing() else (raw, current)

    def overlapped(
        self,
        engine: CudaCopyEngine,
        launch: Callable[[], None],
        key: Any,
        queue: Callable[[], None],
        stuck: Callable[[float], Exception | None],
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Run ``launch`` on the current stream and the copies that ``queue`` queues beside it; both end here.

        The launch comes first: it returns at once, and the kernel starts while the copies are queued. ``then`` is what follows
        ``launch`` with the copies still beside it; they must not wait for it.
        ``key`` is that of `CudaCopyEngine.queue`. ``stuck`` is for hosts that do the copies themselves; here the stream waits
        only for a kernel that ends.
        """
        with self.current():  # the driver's copies go by the current device
            engine.fork()
            try:
                launch()
                engine.queue(key, queue)
                then()
            finally:  # also after an error, or an interrupt between two copies: what is copied may be freed
                engine.join()
            engine.remember(key, queue)

    def current(self) -> Any:
        """A ``with`` in which this device is current. It seldom is not: a thread starts on device 0."""
        return _AS_IT_IS if self.is_current() else torch.cuda.device(self.device)

    def is_current(self) -> bool:
        """Whether this device is current; if so, the driver's calls of this thread go to it from now on.

        CUDA's runtime gives a thread its context with the first call that needs one; the driver, which is called here, does not.
        """
        if torch._C._cuda_getDevice() != self.device.index:
            return False
        if not getattr(self._threads, "known", False):
            driver.set_context(self._context)
            self._threads.known = True
        return True

"""What `soak` asks of the machine: lateness, load, streams, graphs, and what memory the process holds. A CPU, and a GPU on top."""

import contextlib
import ctypes
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..runtime import world

MIB = 1 << 20
Sample = dict[str, float]


class Machine:
    """One rank on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator(device=device)
        self._load = self._make_load(64)
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def _make_load(self, n: int) -> tuple[torch.Tensor, ...]:
        a, b = (torch.randn(n, n, generator=self.generator, device=self.device).to(torch.bfloat16) for _ in range(2))
        return a, b, torch.empty_like(a)

    def work(self, products: int) -> None:
        """Queue so many large products: the clocks of a GPU that works are lower than those of one that waits."""
        a, b, c = self._load
        for _ in range(products):
            torch.mm(a, b, out=c)

    def delay(self, where: str, seconds: float) -> None:
        """Come late, on the host or in the stream."""
        if where == "host":
            time.sleep(seconds)

    @contextlib.contextmanager
    def stream(self, index: int) -> Iterator[None]:
        """What is queued inside goes to stream ``index`` (0: the usual one), behind all that was queued before."""
        yield

    def settle(self) -> None:
        """Wait until all that was queued is done."""

    def sample(self) -> Sample:
        """What this process holds now; what allocators keep for later is given back first."""
        gc.collect()
        if self._trim is not None:
            self._trim(0)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        heap = world.current().heap
        return {
            "host MiB": pages * os.sysconf("SC_PAGE_SIZE") / MIB,
            "file descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "heap in use MiB": heap.in_use / MIB,
            "heap MiB": heap.nbytes / MIB,
        }


class Gpu(Machine):
    """One rank on its GPU. The calls of a rank are in one order, whatever streams they are on, as the operations ask."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
        self._last = self._streams[0]
        for index in (1, 2, 0):  # cuBLAS takes memory at its first product on a stream
            with self.stream(index):
                self.work(1)
        # cycles of torch.cuda._sleep a second
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.cuda._sleep(20_000_000)
        end.record()
        torch.cuda.synchronize()
        self._cycles = 20_000_000 / max(start.elapsed_time(end) / 1e3, 1e-3)

    def _make_load(self, n: int) -> tuple[torch.Tensor, ...]:
        return super()._make_load(8192)

    def delay(self, where: str, seconds: float) -> None:
        super().delay(where, seconds)
        if where == "device":
            torch.cuda._sleep(int(seconds * self._cycles))

    @contextlib.contextmanager
    def stream(self, index: int) -> Iterator[None]:
        stream = self._streams[index]
        if stream != self._last:
            stream.wait_stream(self._last)
            self._last = stream
        with torch.cuda.stream(stream):
            yield

    def settle(self) -> None:
        torch.cuda.synchronize()

    def sample(self) -> Sample:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        found = super().sample()
        # What was asked for: the blocks handed out for it may be up to 1 MiB larger, by what is free at the time.
        asked = torch.cuda.memory_stats()["requested_bytes.all.current"]
        return found | {"device requested MiB": asked / MIB, "device used MiB": (total - free) / MIB}


class Graph:
    """Calls captured in a CUDA graph, with the operands that they read and the results that every replay writes again."""

    def __init__(self, operands: Any, calls: int, call: Callable[[], list[torch.Tensor]]) -> None:
        self.operands = operands
        self.launches = 0  # kernels of the library in it
        self._graph = torch.cuda.CUDAGraph()
        # thread_local: what other threads do meanwhile (NCCL's watchdog asks for events) is no concern of this capture
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self.results = [call() for _ in range(calls)]

    def replay(self) -> None:
        self._graph.replay()

    def reset(self) -> None:
        """Give its memory back."""
        self.results.clear()
        self._graph.reset()


def compiled() -> int:
    """Kernels of the operations that Triton has compiled, or loaded from its cache, in this process: as many as it holds."""
    files = [module for name, module in sys.modules.items() if name.startswith("fluxlike.kernels.")]
    kernels = {thing for file in files for name, thing in vars(file).items() if name.endswith("_kernel")}
    return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

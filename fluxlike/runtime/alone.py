"""A world of one process that plays one rank of several, on a machine with one GPU, or none.

Its peers are this rank's own memory, every signal that it may wait for is there before it asks, and nothing is copied to anybody.
So a call takes what the kernel takes that waits for nobody: its product, and what signals, waits and sums cost beside it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from . import driver, world
from .cpu import CpuExecutor
from .cuda import CudaExecutor
from .dry import DryEngine, DryWorld
from .heap import SymmetricHeap


class AloneSegment:
    """Memory that all ranks of the world have in common."""

    def __init__(self, nbytes: int, control: Any) -> None:
        self.nbytes = nbytes
        self.local = torch.zeros(nbytes, dtype=torch.uint8, device=world.current().device)
        self.addresses = [self.local.data_ptr()] * control.size

    def view(self, index: int) -> torch.Tensor:
        return self.local

    def close(self) -> None:
        """Freed with the tensor."""


class _Engine(DryEngine):
    """Copies nothing; when that was, as `ops.trace` asks, is as the executor has it."""

    def __init__(self, executor: Any) -> None:
        self.stamp = executor.stamp


class _NoCopies:
    """What an executor does where copies are left out."""

    def overlapped(
        self, engine: Any, launch: Callable[[], None], key: Any, queue: Callable[[], None], stuck: Any,
        then: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        queue()  # counted, on an engine that copies nothing
        launch()
        then()

    def post(self, addresses: list[int], value: int) -> None:
        """Nobody is to be told."""


class AloneGpu(_NoCopies, CudaExecutor):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        torch.cuda.synchronize(device)  # the driver has a context from here on
        self._context, self._threads.known = driver.context(), True

    def copy_engine(self) -> Any:
        return _Engine(self)


class AloneCpu(_NoCopies, CpuExecutor):
    def __init__(self) -> None:
        super().__init__()
        self.copy_engine = lambda: _Engine(self)  # type: ignore[assignment,return-value]


class AloneWorld(DryWorld):
    """`World` of ``ranks`` ranks, of which this process is rank 0."""

    def __init__(self, executor: Any, ranks: int) -> None:
        super().__init__((0, 0), ranks, 0, 1)
        self.executor, self.device = executor, executor.device


@contextmanager
def playing(ranks: int) -> Iterator[torch.device]:
    """Between init and finalize of such a world, on the current GPU or, without one, the CPU, which it gives. They may be nested.

    Raises RuntimeError where this process is a rank of a world that is none of these.
    """
    before: Any = world._world
    if not isinstance(before, AloneWorld | None):
        raise RuntimeError("this process is a rank of fluxlike already; play one in a process that has not called fluxlike.init")
    cuda = torch.cuda.is_available()
    made = AloneWorld(AloneGpu(torch.device("cuda", torch.cuda.current_device())) if cuda else AloneCpu(), ranks)
    world._world = made  # type: ignore[assignment]
    try:
        made.heap = SymmetricHeap(AloneSegment, made.control, 1 << 20)  # type: ignore[arg-type]
        yield made.device
    finally:
        for ctx in list(made.contexts):
            ctx.close()
        world._world = before  # type: ignore[assignment]

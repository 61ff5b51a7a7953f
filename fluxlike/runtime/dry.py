"""A world without machines: operations run on tensors without memory, and what they would launch is recorded.

What a call launches (which kernel, tile, constants, pointers or descriptors) depends on its arguments and on the GPU's compute
capability. Here that can be asked for any GPU and any number of ranks, in one process.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import world
from .heap import SymmetricHeap
from .launches import Launch, Streamless

DEVICE = torch.device("meta")


class DryTensor(torch.Tensor):
    """A tensor on device "meta" that answers as one on a GPU would."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    def data_ptr(self) -> int:
        return (1 << 40) + int(self.storage_offset()) * self.itemsize


def tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An operand of a dry call."""
    return torch.empty(shape, dtype=dtype, device=DEVICE).as_subclass(DryTensor)


class Record(NamedTuple):
    """One launch, as `executor.launch` gets it, and the contexts that were open."""

    kernel: Any
    args: tuple
    constants: dict[str, Any]
    warps: int
    stages: int
    contexts: list[Any]


class DryBoard:
    """`CallBoard` of ranks that never differ."""

    def __init__(self) -> None:
        self.made = self.mended = 0
        self.apart: None = None
        self.members: list[Any] = []

    def call(self, text: str) -> None:
        """All make it."""

    def refuse(self, op: str) -> None:
        """All refuse it."""

    def goes_on(self) -> None:
        """So do all."""

    def freeze(self) -> None:
        """Nobody compares."""

    def diagnose(self) -> None:
        """They do not differ."""

    def gone(self) -> list[int]:
        return []

    def where(self, peer: int) -> str:
        return "There is no such process."


class DryControl:
    """`ControlGroup` of ranks that all say the same, on so many nodes."""

    name = "dry"
    is_forked = False

    def __init__(self, rank: int, size: int, nodes: int = 1) -> None:
        self.rank, self.size, self.ranks, each = rank, size, list(range(size)), size // nodes
        self.lock, self.board = threading.RLock(), DryBoard()
        self.nodes = [self.ranks[node * each : (node + 1) * each] for node in range(nodes)]
        self.node, self.spans, self.spanning, self.refused, self.between = rank // each, nodes > 1, 0, 0, 0
        self.local = DryControl(rank % each, each) if self.spans else self
        self.whole = self
        self.local.whole = self

    def gather(self, value: Any, what: str) -> list[Any]:
        return [value] * self.size

    def agree(self, what: str, arguments: Any, error: Exception | None = None) -> None:
        if error is not None:
            raise error

    def barrier(self, what: str) -> None:
        """Nobody to wait for."""

    def part(self, what: str) -> tuple[bool, None]:
        return True, None


class DrySegment:
    def __init__(self, nbytes: int, control: Any) -> None:
        self.nbytes, self.local = nbytes, torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
        self.addresses = [0] * control.size

    def view(self, index: int) -> torch.Tensor:
        return self.local

    def close(self) -> None:
        """No memory to free."""


class DryEngine:
    """A copy engine that copies nothing, and has no stream that a graph could have."""

    captured = False

    def wait(self, address: int, value: int) -> None: ...
    def write(self, address: int, value: int) -> None: ...
    def copy(self, to: int, pitch_to: int, source: int, pitch_source: int, width: int, rows: int) -> None: ...


class DryPuts:
    """Puts that put nothing, and credits that nobody gets; ``made``, ``added``: with what arguments."""

    def __init__(self) -> None:
        self.made: list[tuple[int, int, int, int, int, int]] = []
        self.added: list[tuple[int, int]] = []

    def put(self, to: int, source: int, nbytes: int, signal: int, more: int, pe: int) -> None:
        self.made.append((to, source, nbytes, signal, more, pe))

    def join(self) -> None:
        """Nothing is under way."""

    close = abandon = join

    def add(self, address: int, pe: int) -> None:
        self.added.append((address, pe))

    def quiet(self) -> None:
        """Nothing is under way."""


class DryExecutor(Streamless):
    """A GPU of the given compute capability that runs nothing."""

    name = "dry"
    device = DEVICE
    programs = 128
    one_host = True
    library: Path | None = None

    def __init__(self, capability: tuple[int, int], owner: "DryWorld") -> None:
        self.capability, self._owner = capability, owner
        self.records: list[Record] = []

    def launch(self, kernel: Any, programs: int, args: tuple, constants: dict, warps: int, stages: int) -> None:
        self.records.append(Record(kernel, args, constants, warps, stages, list(self._owner.contexts)))

    def prepare(self, *launch: Any) -> Launch:
        return Launch(self, *launch)

    def in_use(self, t: torch.Tensor) -> None:
        """Nothing uses it."""

    def copy_engine(self) -> DryEngine:
        return DryEngine()

    def puts(self) -> DryPuts:
        return DryPuts()

    def device_library(self) -> Path | None:
        return self.library

    def ready(self, *launch: Any) -> None:
        """Nothing is loaded."""

    def fill(self, table: torch.Tensor, words: list[int]) -> torch.Tensor:
        return table

    def read_later(self, t: torch.Tensor) -> Callable[[], list[int]]:
        return lambda: [0] * t.numel()

    def synchronize(self) -> None:
        """Nothing runs."""

    def multiply(self, a: torch.Tensor, w: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        """No launch of a kernel of ours."""

    def write(self, address: int, value: int) -> None:
        """No memory."""

    def overlapped(
        self, engine: Any, launch: Callable[[], None], key: Any, queue: Callable[[], None], stuck: Any,
        then: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        launch()
        queue()
        then()


class DryWorld:
    """`World` of ``ranks`` ranks on ``nodes`` nodes, seen from ``rank``."""

    is_forked = False

    def __init__(self, capability: tuple[int, int], ranks: int, rank: int, nodes: int) -> None:
        self.control = DryControl(rank, ranks, nodes)
        self.rank, self.size, self.device = rank, ranks, DEVICE
        self.contexts: list[Any] = []
        self.cached: dict[Any, Any] = {}
        self.ahead: list[Any] = []
        self.executor = DryExecutor(capability, self)
        self.heap = SymmetricHeap(DrySegment, self.control, 1 << 20)  # type: ignore[arg-type]

    def control_of(self, group: Any) -> DryControl:
        return group if isinstance(group, DryControl) else self.control

    def indices(self, control: Any) -> list[int]:
        return control.ranks

    def raise_if_forked(self) -> None:
        """It is not."""


@contextmanager
def recording(
    capability: tuple[int, int], ranks: int = 4, rank: int = 1, nodes: int = 1, library: Path | None = None
) -> Iterator[list[Record]]:
    """Between init and finalize of a dry world; its calls take operands made by `tensor`. Gives the launches so far.

    ``library``: by which kernels put to other nodes.
    """
    before, dry = world._world, DryWorld(capability, ranks, rank, nodes)
    dry.executor.library = library
    world._world = dry  # type: ignore[assignment]
    try:
        yield dry.executor.records
    finally:
        world._world = before

"""What the operations on parts of tensors share: memory, and launches of the kernels of `kernels/exchange.py`."""

from typing import Any, NamedTuple

import torch

from ..kernels import elements, exchange
from ..runtime.control import ControlGroup
from .group import GroupContext, Prepared, kept

OPS = {"sum": elements.SUM, "avg": elements.AVG, "max": elements.MAX}
#: Words of a block, where two a thread are a vector, and bytes of one that is signalled.
WORDS, BULK = 512, 8 << 10
#: Programs of a launch at most.
MOST = 64
#: Bytes of payload in all parts that one launch takes at most; more go in several.
PIECE = 16 << 20
#: What a trip to a peer takes beyond its bytes, a signal behind them, and the rate of bytes, flags included: assumptions, not
#: measured yet.
TRIP, SIGNAL, RATE = 2e-6, 1e-6, 300e9


class Kind(NamedTuple):
    """An operation; see `kernels.exchange`."""

    name: str
    scatter: bool = False
    gather: bool = False
    rooted: bool = False

    def rows(self, ranks: int) -> int:
        """Rows of a set on each rank."""
        return ranks * self.scatter + (1 if self.rooted else ranks) * self.gather


class Parts(NamedTuple):
    """Of one tensor: elements of all parts, from part to part, of a part at most; and blocks of each."""

    n: int
    chunk: int
    width: int
    blocks: int


class Compiled(NamedTuple):
    """See `group.Compiled`."""

    warps: int = 8
    stages: int = 1


class EpochContext(GroupContext):
    """A context whose kernels count calls by the numbers of their programs, ``epochs``."""

    watched: tuple[str, ...] = ("head", "ctl", "flags", "data", "epochs")
    payload = ("data",)
    signals = ("head", "flags")

    def __init__(self, op: str, control: ControlGroup, regions: dict[str, int]) -> None:
        """Collective. ``regions``: see `GroupContext`; "flags" and "data" among them."""
        self.maker = f"fluxlike.{op}"
        super().__init__(op, control, regions)
        self.flags, self.data = self.region("flags", torch.int64), self.region("data", torch.uint8)
        self.epochs = torch.zeros(MOST, dtype=torch.int64, device=self.device)
        #: Tables of lists in CUDA graphs, which copy them to the GPU each time.
        self._captured: list[torch.Tensor] = []

    def table(self, words: list[int]) -> torch.Tensor:
        """Words for a kernel, on the device once it runs."""
        table, kept = self.world.executor.upload(words)
        if self.world.executor.is_capturing():
            self._captured.append(kept)
        return table


class ExchangeContext(EpochContext):
    """Memory for what the ranks of a group exchange, one call after the other.

    ``words``, ``bulk``: blocks that a row has room for, of words and of bytes that are signalled.
    """

    watched = (*EpochContext.watched, "slots")

    def __init__(self, kind: Kind, control: ControlGroup, words: int, bulk: int) -> None:
        """Collective."""
        self.kind, self.words, self.bulk, rows = kind, words, bulk, kind.rows(control.size)
        regions = {"slots": 2 * rows * words * WORDS * 8, "flags": rows * bulk * 8, "data": 2 * rows * bulk * BULK}
        super().__init__(kind.name, control, regions)
        self.slots = self.region("slots", torch.int64)
        self.made(kind.name, self.watched)

    def prepared(
        self, algo: str, x: torch.Tensor, y: torch.Tensor, parts: Parts, op: str, vector: int, root: int = -1, tensors: int = 1,
        table: torch.Tensor | None = None,
    ) -> Prepared:  # fmt: skip
        """A launch for "words" or "bulk", which takes tensors in place of x and y, and of a list (``tensors``) a table."""
        constants: dict[str, Any] = dict(R=self.size, SCATTER=self.kind.scatter, GATHER=self.kind.gather, ROOTED=self.kind.rooted)
        constants |= dict(OP=OPS[op], MANY=table is not None, VEC=vector, MOST=MOST)
        sizes = (tensors, *parts, root)
        args: tuple = (x, y, self.ctl if table is None else table)
        if algo == "bulk":
            kernel: Any = exchange.exchange_bulk_kernel
            args += (self.data.view(x.dtype), self.flags, self.epochs, self.ctl, *sizes, self.bulk, self.rank)
            constants |= dict(B=BULK // x.element_size())
        else:
            kernel = exchange.exchange_words_kernel
            args += (self.epochs, self.ctl, *sizes, self.words, self.offsets["slots"], self.rank)
            constants |= dict(B=WORDS, S=1 << (self.size - 1).bit_length(), WIDTH=4 // x.element_size())
        programs = max(1, min(MOST, self.world.executor.programs, parts.blocks))
        return self.prepare(kernel, programs, args, constants, Compiled(), (0, 1) if table is None else (0, 1, 2))


def context(kind: Kind, control: ControlGroup, algo: str, blocks: int) -> ExchangeContext:
    """The context of an operation on a group, with room for rows of so many blocks; see `kept`."""

    def make(wanted: dict[str, int]) -> ExchangeContext:
        return ExchangeContext(kind, control, **wanted)

    bulk = algo == "bulk"
    sizes = {"words": 1 if bulk else blocks, "bulk": blocks if bulk else 1}
    return kept((kind.name, control.name), control, sizes, make, 1 << 31)


def block(algo: str, itemsize: int) -> int:
    """Elements of a block."""
    return (BULK if algo in ("bulk", "trees") else WORDS * 4) // itemsize

"""What the operations on parts of tensors share: memory, and launches of the kernels of `kernels/exchange.py` and `relay.py`."""

import functools
import math
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ..kernels import elements, exchange, relay
from ..kernels.tiles import cdiv
from ..kernels.words import EMPTY
from ..runtime.control import ControlGroup
from . import lists, tiling
from .group import GroupContext, Prepared
from .keeping import kept

OPS = {"sum": elements.SUM, "avg": elements.AVG, "max": elements.MAX}
#: Words of a block, where four a thread are a vector, and bytes of one that is signalled.
WORDS, BULK = 512, 8 << 10
#: Programs of a launch at most, and on each multiprocessor where nothing else is said: others work while one waits.
MOST, OVER = 512, 2
#: Bytes of a set at most, so two of them on the heap for each kind; what does not fit goes in several launches, of which each costs
#: some 5 µs more on two H200s (docs/measured/2026-11-26-sets.md).
SET = 64 << 20
#: Seconds of any launch, of a trip to a peer beyond its bytes, of a signal behind them; and bytes a second that a rank pushes, in
#: words. Fitted to all_reduce on four H200s (docs/measured/2026-11-22-all_reduce-R4.md).
START, TRIP, SIGNAL, WORD_RATE = 1.4e-6, 2.3e-6, 2.15e-6, 330e9
#: What credits add to a call: of 16 KB to or from a root, over the halves of all_reduce (docs/measured/2026-11-26-four-h100.md).
CREDITS = 2e-6
#: Bytes a second that a root takes in from all in words, and what two trips to it cost beyond trips, bytes and credits, which those
#: from it do not (docs/measured/2026-11-26-relay.md).
ROOT_RATE, TO_ROOT = 375e9, 2.5e-6


class Kind(NamedTuple):
    """An operation; see `kernels.exchange`, and of one that is ``rooted``, where it goes in two trips, `kernels.relay`."""

    name: str
    scatter: bool = False
    gather: bool = False
    rooted: bool = False

    def rows(self, ranks: int, algo: str) -> int:
        """Rows of a set on each rank: for what comes from each other, in bulk from itself, too."""
        sources = ranks if algo == "bulk" else max(ranks - 1, 1)
        return sources * self.scatter + (1 if self.rooted else sources) * self.gather

    def relayed(self, algo: str) -> bool:
        """Whether parts belong to all ranks but the root, which `kernels.relay` passes on."""
        return self.rooted and algo == "two_shot"

    def most(self, ranks: int, algo: str) -> int:
        """Bytes of a part in one launch at most, and of those rows: a power of two, as `kept` would round it up to one."""
        return 1 << ((SET // self.rows(ranks, algo)).bit_length() - 1)


class Parts(NamedTuple):
    """Of one tensor: elements of all parts, from part to part, of a part at most; and blocks of each."""

    n: int
    chunk: int
    width: int
    blocks: int


class Compiled(NamedTuple):
    """A `group.HowCompiled` of exchanges."""

    warps: int
    stages: int = 1
    #: Programs on a multiprocessor.
    over: int = OVER

    @property
    def registers(self) -> int:
        """``maxnreg``: ptxas would spill some to make room for more programs than a launch has."""
        return tiling.registers(self.warps, self.over)


OF_WORDS, OF_BULK = Compiled(warps=4, over=4), Compiled(warps=8)


class EpochContext(GroupContext):
    """A context whose kernels count calls by the numbers of their programs, ``epochs``."""

    watched: tuple[str, ...] = ("head", "ctl", "flags", "data", "epochs")
    payload = ("data",)
    signals = ("head", "flags")

    def __init__(self, op: str, control: ControlGroup, regions: dict[str, int]) -> None:
        """Collective. ``regions``: see `GroupContext`; "flags" and "data" among them."""
        self.maker = f"fluxlike.{op}"
        #: Tables of lists in CUDA graphs, and the addresses that these copy there.
        self._captured: list[torch.Tensor] = []
        super().__init__(op, control, regions)

    def take(self) -> None:
        super().take()
        self.flags, self.data = self.region("flags", torch.int64), self.region("data", torch.uint8)
        self.epochs = self.lasting(MOST, dtype=torch.int64, make=torch.zeros)

    def programs(self, tiles: int, over: int = OVER) -> int:
        """Programs of a launch over so many blocks."""
        return max(1, min(MOST, over * self.world.executor.programs, tiles))

    def table(self, tensors: int, stays: list[int]) -> lists.Table:
        """The table of a launch over a list of so many."""
        with torch.inference_mode(False):  # else no call outside of that mode could write to it
            words = self.lasting(2 * tensors + len(stays), dtype=torch.int64)
        return lists.Table(self.world.executor, words, stays, self._captured)


class ExchangeContext(EpochContext):
    """Memory for what the ranks of a group exchange, one call after the other.

    ``words``, ``bulk``: blocks that a row has room for, of words and of bytes that are signalled.
    """

    watched = (*EpochContext.watched, "slots", "arrived")
    shown: tuple[str, ...] = ("op", "words", "bulk")

    def __init__(self, kind: Kind, control: ControlGroup, words: int, bulk: int) -> None:
        """Collective."""
        self.kind, self.words, self.bulk = kind, words, bulk
        flags = (kind.scatter + kind.gather) * control.size * bulk
        slots, data = words * WORDS * 4 * kind.rows(control.size, "words"), bulk * BULK * kind.rows(control.size, "bulk")
        regions = {"slots": 2 * slots, "flags": flags * 8, "data": 2 * data}
        super().__init__(kind.name, control, regions)
        self.made(kind.name)

    def take(self) -> None:
        super().take()
        self.slots = self.region("slots", torch.int32).fill_(EMPTY.value)
        #: As `epochs`, for `kernels.fused`: how many programs have come to its gate.
        self.arrived = self.lasting(MOST, dtype=torch.int64, make=torch.zeros)

    def prepared(
        self, algo: str, x: torch.Tensor, y: torch.Tensor, parts: Parts, op: str, vector: int, root: int = -1, tensors: int = 1,
        table: torch.Tensor | None = None,
    ) -> Prepared:  # fmt: skip
        """A launch of `kernels.exchange` or `kernels.relay`, which takes tensors in place of x and y.

        ``tensors``: of a list, which takes a table, too.
        """
        kind, room = self.kind, self.bulk if algo == "bulk" else self.words
        if blocks_of_row(kind, algo, parts.blocks, self.size) > room:  # it would write over what lies behind its rows
            raise RuntimeError(f"{kind.name}: a part has {parts.blocks} blocks, and there is room for {room}; please report it")
        if kind.relayed(algo):
            return self._relayed(x, y, parts, op, vector, root)
        constants: dict[str, Any] = dict(SCATTER=kind.scatter, GATHER=kind.gather, ROOTED=kind.rooted)
        constants |= dict(R=self.size, S=1 << (self.size - 1).bit_length(), OP=OPS[op])
        constants |= dict(MANY=table is not None, VEC=vector, MOST=MOST)
        sizes = (tensors, *parts, root)
        args: tuple = (x, y, self.ctl if table is None else table)
        if algo == "bulk":
            kernel: Any = exchange.exchange_bulk_kernel
            args += (self.data.view(x.dtype), self.flags, self.epochs, self.ctl, *sizes, self.bulk, self.rank)
            constants |= dict(B=BULK // x.element_size())
        else:
            kernel = exchange.exchange_words_kernel
            args += (self.epochs, self.ctl, *sizes, self.words, self.offsets["slots"], self.rank)
            constants |= dict(B=WORDS, WIDTH=4 // x.element_size())
        compiled = OF_BULK if algo == "bulk" else OF_WORDS
        constants |= dict(maxnreg=compiled.registers)
        programs = self.programs(parts.blocks, compiled.over)
        return self.prepare(kernel, programs, args, constants, compiled, (0, 1))

    def _relayed(self, x: torch.Tensor, y: torch.Tensor, parts: Parts, op: str, vector: int, root: int) -> Prepared:
        room = self.words * self.kind.rows(self.size, "words")
        args = (x, y, self.ctl, parts.n, parts.chunk, parts.blocks, root, room, self.offsets["slots"], self.rank)
        constants = dict(R=self.size, S=1 << (self.size - 1).bit_length(), REDUCE=self.kind.scatter, OP=OPS[op])
        constants |= dict(WIDTH=4 // x.element_size(), B=WORDS, VEC=vector)
        constants |= dict(maxnreg=OF_WORDS.registers)
        programs = self.programs(parts.blocks, OF_WORDS.over)
        return self.prepare(relay.relay_words_kernel, programs, args, constants, OF_WORDS, (0, 1))


def context(kind: Kind, control: ControlGroup, algo: str, blocks: int, said: dict[str, Any]) -> ExchangeContext:
    """The context of an operation on a group, with room for parts of so many blocks; see `kept`. ``said``: of the call's record."""

    def make(wanted: dict[str, int]) -> ExchangeContext:
        # else each would push to where it has its own memory
        control.agree(f"fluxlike.{kind.name}", [f"{name}={value}" for name, value in said.items()])
        return ExchangeContext(kind, control, **wanted)

    bulk, blocks = algo == "bulk", blocks_of_row(kind, algo, blocks, control.size)
    sizes = {"words": 1 if bulk else blocks, "bulk": blocks if bulk else 1}
    return kept((kind.name, control.name), control, sizes, make, 1 << 31)


def recorded(elements: int, dtype: torch.dtype, **named: Any) -> dict[str, Any]:
    """What the record of a call says, which the ranks must have alike; ``named``: what the caller named."""
    return dict(elements=elements, dtype=str(dtype).removeprefix("torch."), **named)


@functools.lru_cache(1024)
def listed(sizes: tuple[int, ...]) -> str:
    """The sizes of a list in their order, as a short text that no other list has; made once, as lists come again."""
    text = "+".join(map(str, sizes))
    return text if len(text) <= 40 else f"{text[:30]}..{zlib.crc32(text.encode()):08x}"


def seconds(nbytes: int, ranks: int) -> float:
    """What one trip of parts of ``nbytes``, in words, is expected to take, with its launch."""
    return START + TRIP + nbytes * (ranks - 1) / WORD_RATE


def rooted_seconds(kind: Kind, nbytes: int, ranks: int) -> float:
    """The same of ``nbytes`` from each other rank to a root, or from it to each.

    A root pushes to one after the other. What comes to it comes from all, and the trips beside the bytes.
    """
    least, carried = START + TRIP + CREDITS, nbytes * (ranks - 1)
    return max(least, carried / ROOT_RATE) if kind.scatter else least + carried / WORD_RATE


def relay_seconds(kind: Kind, nbytes: int) -> float:
    """The same of ``nbytes`` in all, to their owners, and from them on."""
    return START + 2 * TRIP + CREDITS + TO_ROOT * kind.scatter + nbytes / WORD_RATE


def blocks_of_row(kind: Kind, algo: str, blocks: int, ranks: int) -> int:
    """Blocks that a row must have room for where parts have ``blocks``: relayed, a set is cut into rows as each call needs them."""
    return cdiv((ranks - 1) * blocks, kind.rows(ranks, algo)) if kind.relayed(algo) else blocks


def pieces(kind: Kind, n: int, chunk: int, width: int, algo: str, itemsize: int, ranks: int) -> Iterator[tuple[int, Parts]]:
    """Launches for parts of ``width`` elements, of ``n`` in all, ``chunk`` from one to the next: first element, parts.

    Relayed, these are all ``n``, and parts are those of a launch.
    """
    elements = block(algo, itemsize)
    most = max(kind.most(ranks, algo) // (elements * itemsize), 1) * elements
    if kind.relayed(algo):
        owners = ranks - 1
        most = max(most * kind.rows(ranks, algo) // (elements * owners), 1) * elements * owners
        for start in range(0, width, most):
            left = min(most, width - start)
            blocks = cdiv(left, elements * owners)
            yield start, Parts(left, blocks * elements, blocks * elements, blocks)
        return
    for start in range(0, width, most):
        yield start, Parts(n - start, chunk, width - start, cdiv(min(most, width - start), elements))


def launch_for(
    ctx: ExchangeContext, algo: str, x: torch.Tensor, y: torch.Tensor, parts: Parts, op: str, root: int = -1
) -> Prepared:
    """The launch for tensors like x and y, planned at most once."""
    vector = math.gcd(16 // x.element_size(), parts.n, parts.chunk)
    key = algo, op, x.dtype, parts, root, vector, x.data_ptr() % 16, y.data_ptr() % 16
    made: Prepared = ctx.plan(key, lambda: ctx.prepared(algo, x, y, parts, op, vector, root))[1]
    return made


def block(algo: str, itemsize: int) -> int:
    """Elements of a block."""
    return (BULK if algo in ("bulk", "trees") else WORDS * 4) // itemsize

"""All-reduce in one kernel, without a barrier: `all_reduce` and `all_reduce_`.

Read with `kernels/all_reduce.py`, which holds the protocol.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..kernels import all_reduce as kernels
from ..kernels.tiles import cdiv
from ..runtime import world
from ..runtime.control import ControlGroup
from . import validate
from .context import DTYPES
from .group import GroupContext, Prepared, kept, resolve

Pair = tuple[torch.Tensor, torch.Tensor]

OPS = {"sum": kernels.SUM, "avg": kernels.AVG, "max": kernels.MAX}
ALGORITHMS = ("one_shot", "two_shot", "bulk")
#: Words of a block, where two a thread are a vector, and bytes of one that is signalled.
WORDS, BULK = 512, 8 << 10
#: Programs of a launch at most.
MOST = 64
#: Bytes of payload that one launch reduces at most; more go in several.
PIECE = 16 << 20
#: What a trip to a peer takes beyond its bytes, a signal behind them, and the rate of bytes, flags included: assumptions, not
#: measured yet.
TRIP, SIGNAL, RATE = 2e-6, 1e-6, 300e9


class Compiled(NamedTuple):
    """See `group.Compiled`."""

    warps: int = 8
    stages: int = 1


class AllReduceContext(GroupContext):
    """Memory for what the ranks of a group reduce, one call after the other.

    ``words``, ``bulk``: blocks that a row has room for, of words and of bytes that are signalled.
    """

    maker = "fluxlike.all_reduce"
    watched = ("head", "ctl", "flags", "slots", "data", "epochs")
    payload = ("data",)
    signals = ("head", "flags")

    def __init__(self, control: ControlGroup, words: int, bulk: int) -> None:
        """Collective."""
        self.words, self.bulk, rows = words, bulk, 2 * control.size
        regions = {"slots": 2 * rows * words * WORDS * 8, "flags": rows * bulk * 8, "data": 2 * rows * bulk * BULK}
        super().__init__("all_reduce", control, regions)
        self.slots, self.flags = self.region("slots", torch.int64), self.region("flags", torch.int64)
        self.data = self.region("data", torch.uint8)
        self.epochs = torch.zeros(MOST, dtype=torch.int64, device=self.device)
        #: Tables of lists in CUDA graphs, which copy them to the GPU each time.
        self._captured: list[torch.Tensor] = []
        self.made("all_reduce", self.watched)

    def table(self, words: list[int]) -> torch.Tensor:
        """Words for a kernel, on the device once it runs."""
        table, kept = self.world.executor.upload(words)
        if self.world.executor.is_capturing():
            self._captured.append(kept)
        return table


def all_reduce(
    x: torch.Tensor | Sequence[torch.Tensor], group: dist.ProcessGroup | None = None, op: str = "sum", algo: str = "auto"
) -> Any:
    """The element-wise sum, average or maximum of ``x`` over the ranks, on all of them.

    Args:
        x: bfloat16, float16 or float32, of any shape, the same on all ranks; a copy is made of one that is not contiguous. Or a
            list of such tensors of one dtype: they are reduced by one launch, where they lie.
        group: the ranks; those given to init if None. op: "sum", "avg" or "max" (NaN if any rank has it).
        algo: "one_shot" (everything to everybody: one trip), "two_shot" (reduce-scatter and all-gather: two trips, fewer bytes),
            "bulk" (the same with signals beside the data, for large tensors), or "auto", the one that is expected to be fastest.

    Returns:
        A new tensor, or a list of them, contiguous, with the shape and dtype of x.

    Numerics: computed in fp32 in the order of the ranks and rounded once; the same bits on all ranks, on every repeat, and by every
    algorithm. Without gradients.

    Raises:
        ValueError: dtypes, devices, names that do not fit; ranks that make different calls. RuntimeError: no init.
        PeerTimeout: a wait of an earlier call ran out (CPU heap: of this call).
    """
    xs = _checked(x, op, algo)
    ys = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in xs]
    _run([t.contiguous() for t in xs], ys, group, op, algo)
    return ys[0] if isinstance(x, torch.Tensor) else ys


def all_reduce_(
    x: torch.Tensor | Sequence[torch.Tensor], group: dist.ProcessGroup | None = None, op: str = "sum", algo: str = "auto"
) -> Any:
    """`all_reduce` in place: writes into ``x``, which must be contiguous, and returns it."""
    xs = _checked(x, op, algo)
    for t in xs:
        if not t.is_contiguous():
            raise ValueError(f"all_reduce_: x has strides {t.stride()}; it must be contiguous, or use all_reduce")
    _run(xs, xs, group, op, algo)
    return x


def _checked(x: Any, op: str, algo: str) -> list[torch.Tensor]:
    """The tensors of a call, as a list."""
    if op not in OPS:
        raise ValueError(f"all_reduce: op={op!r} is not one of {', '.join(map(repr, OPS))}")
    if algo not in ("auto", *ALGORITHMS):
        raise ValueError(f"all_reduce: algo={algo!r} is not one of {', '.join(map(repr, ('auto', *ALGORITHMS)))}")
    xs = [x] if isinstance(x, torch.Tensor) else list(x) if isinstance(x, (list, tuple)) else [x]
    device = world.current().device
    for t in xs:
        validate.readable("all_reduce", "x", t, None, device)
        if t.dtype not in DTYPES:
            raise ValueError(f"all_reduce: x has dtype {t.dtype}, it must be bfloat16, float16 or float32; use x.to(torch.float32)")
        if t.dtype != xs[0].dtype:
            raise ValueError(f"all_reduce: a list with {xs[0].dtype} and {t.dtype}; reduce tensors of one dtype at a time")
    return xs


def _run(xs: list[torch.Tensor], ys: list[torch.Tensor], group: dist.ProcessGroup | None, op: str, algo: str) -> None:
    control = resolve(group)
    with control.lock, torch.no_grad():
        some = [(x.view(-1), y.view(-1)) for x, y in zip(xs, ys, strict=True) if x.numel()]
        if not some:
            _context(control, 1, 1).record(elements=0)
        for pieces in _launches(some, PIECE):
            _launch(control, pieces, op, algo)


def _context(control: ControlGroup, words: int, bulk: int) -> AllReduceContext:
    def make(wanted: dict[str, int]) -> AllReduceContext:
        return AllReduceContext(control, **wanted)

    return kept(("all_reduce", control.name), control, {"words": words, "bulk": bulk}, make, 1 << 31)


def _launches(pairs: list[Pair], most: int) -> list[list[Pair]]:
    """Pairs of flat tensors in launches of at most ``most`` bytes; a tensor that is larger goes in several."""
    launches: list[list[Pair]] = [[]]
    room = most
    for x, y in pairs:
        for start in range(0, x.numel(), elements := most // x.element_size()):
            piece = x[start : start + elements], y[start : start + elements]
            nbytes = piece[0].numel() * x.element_size()
            if nbytes > room:
                launches.append([])
                room = most
            launches[-1].append(piece)
            room -= nbytes
    return [launch for launch in launches if launch]


class _Plan(NamedTuple):
    launch: Prepared
    #: Of a list: the last three parts of the kernel's table.
    layout: list[int]


def _launch(control: ControlGroup, pairs: list[Pair], op: str, algo: str) -> None:
    """One launch: of one tensor, or of several."""
    sizes, dtype = tuple(x.numel() for x, _ in pairs), pairs[0][0].dtype
    if algo == "auto":
        algo = choose(sum(sizes) * dtype.itemsize, control.size)
    elements = (BULK if algo == "bulk" else WORDS * 4) // dtype.itemsize
    blocks = sum(cdiv(size, elements) for size in sizes)
    row = blocks if algo == "one_shot" else cdiv(blocks, control.size)
    ctx = _context(control, 1 if algo == "bulk" else row, row if algo == "bulk" else 1)
    places = [t.data_ptr() // t.element_size() for pair in pairs for t in pair]
    # of one tensor the launch itself sees the address
    vector = math.gcd(16 // dtype.itemsize, *sizes, *(places if len(pairs) > 1 else []))
    ctx.begin(algo, elements=sum(sizes), tensors=len(sizes), op=op, dtype=str(dtype).removeprefix("torch."))
    key = algo, op, dtype, sizes, vector, *([t.data_ptr() % 16 for t in pairs[0]] if len(pairs) == 1 else [])
    total = blocks if algo == "one_shot" else row * control.size
    _, plan = ctx.plan(key, lambda: _plan(ctx, pairs, algo, op, total, elements, vector))
    x, y = pairs[0]
    if len(pairs) == 1:
        plan.launch((x, y))
    else:
        words = [t.data_ptr() for t, _ in pairs] + [t.data_ptr() for _, t in pairs] + plan.layout
        plan.launch((x, y, ctx.table(words)))


def _plan(ctx: AllReduceContext, pairs: list[Pair], algo: str, op: str, blocks: int, elements: int, vector: int) -> _Plan:
    x, y = pairs[0]
    many, layout, table = len(pairs) > 1, [], ctx.ctl
    if many:
        layout = _layout([x.numel() for x, _ in pairs], elements, blocks)
        table = torch.empty(2 * len(pairs) + len(layout), dtype=torch.int64, device=ctx.device)
    constants: dict[str, Any] = dict(R=ctx.size, OP=OPS[op], MANY=many, VEC=vector, MOST=MOST)
    sizes = (len(pairs), x.numel(), blocks)
    args: tuple
    if algo == "bulk":
        kernel: Any = kernels.all_reduce_bulk_kernel
        args = (x, y, table, ctx.data.view(x.dtype), ctx.flags, ctx.epochs, ctx.ctl, *sizes, ctx.bulk, ctx.rank)
        constants |= dict(B=elements)
    else:
        kernel = kernels.all_reduce_one_shot_kernel if algo == "one_shot" else kernels.all_reduce_two_shot_kernel
        args = (x, y, table, ctx.epochs, ctx.ctl, *sizes, ctx.words, ctx.offsets["slots"], ctx.rank)
        constants |= dict(B=WORDS, S=1 << (ctx.size - 1).bit_length(), WIDTH=4 // x.element_size())
    programs = max(1, min(MOST, ctx.world.executor.programs, blocks if algo == "one_shot" else blocks // ctx.size))
    return _Plan(ctx.prepare(kernel, programs, args, constants, Compiled(), (0, 1, 2) if many else (0, 1)), layout)


def _layout(sizes: Sequence[int], elements: int, blocks: int) -> list[int]:
    """Elements of each tensor, then of each block its tensor, then its first element there; blocks behind all are empty."""
    places = [(number, first) for number, size in enumerate(sizes) for first in range(0, size, elements)]
    places += [(0, cdiv(sizes[0], elements) * elements)] * (blocks - len(places))
    return [*sizes, *[number for number, _ in places], *[first for _, first in places]]


def choose(nbytes: int, ranks: int) -> str:
    """The algorithm that is expected to be fastest for ``nbytes`` of payload; words take twice as many."""
    part = nbytes * (ranks - 1) / ranks
    seconds = {
        "one_shot": TRIP + 2 * part * ranks / RATE,
        "two_shot": 2 * TRIP + 2 * 2 * part / RATE,
        "bulk": 2 * (TRIP + SIGNAL) + 2 * part / RATE,
    }
    return min(seconds, key=lambda algo: seconds[algo])

"""All-reduce in one kernel, without a barrier: `all_reduce` and `all_reduce_`.

Read with `kernels/exchange.py`, which holds the protocol, and `kernels/all_reduce.py`.
"""

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version

from ..kernels.all_reduce import all_reduce_one_shot_kernel
from ..kernels.tiles import cdiv
from ..runtime import world
from ..runtime.control import ControlGroup
from . import again, exchange, lists, trees, validate
from .dispatcher import makes_graph
from .exchange import MOST, OF_WORDS, OPS, TRIP, WORD_RATE, WORDS, ExchangeContext, Kind, Parts
from .group import Prepared, Told, resolve, told
from .refusals import Refusing, reduction, without_gradient

Pair = tuple[torch.Tensor, torch.Tensor]

KIND = Kind("all_reduce", scatter=True, gather=True)
ALGORITHMS = ("one_shot", "two_shot", "bulk")
#: Those of auto: on two H200s bulk was slower than two_shot at every size (docs/measured/2026-11-26-exchange.md).
AUTO = ALGORITHMS[:2]
#: Bytes beyond which auto takes no one_shot. Two ranks send as much either way, but two_shot receives while it sends.
ONE_SHOT = 2 << 20


def all_reduce(
    x: torch.Tensor | Sequence[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    op: validate.Reduction = "sum",
    algo: str = "auto",
) -> Any:
    """The element-wise sum, average or maximum of ``x`` over the ranks, on all of them.

    Args:
        x: bfloat16, float16 or float32, of any shape, the same on all ranks; a copy is made of one that is not contiguous. Or a
            list of such tensors of one dtype: they are reduced by one launch, where they lie.
        group: the ranks; those given to init if None. op: "sum", "avg" or "max" (NaN if any rank has it), or
            torch's ReduceOp.SUM, AVG or MAX.
        algo: "one_shot" (everything to everybody: one trip), "two_shot" (reduce-scatter and all-gather: two trips, fewer bytes),
            "bulk" (the same with signals beside the data), or "auto", the one of the first two that is expected to be faster; or
            "trees", for GPUs that are not all alike: over the trees that `fluxlike.topology.plan_trees` plans for
            FLUXLIKE_TOPOLOGY or, without it, for this machine; one up to FLUXLIKE_TREE_ARRAY_BOUND elements, beyond one for each
            rank. The ranks agree on the plan when they first use it, and again when a larger call needs more memory. All ranks must
            name the same, as with op.

    Returns:
        A new tensor, or a list of them, contiguous, with the shape and dtype of x.

    Numerics: computed in fp32 in the order of the ranks and rounded once; the same bits on all ranks, on every repeat, and by every
    algorithm but "trees". There sums travel up in fp32 and are added in the order of the tree, and the root rounds once: the same
    bits on all ranks and on every repeat, but perhaps not those of the other algorithms. Without gradients.

    Raises:
        ValueError: dtypes, devices, names that do not fit; no tensors; ranks that make different calls, as a CallMismatch; with
            "trees", a topology that is of another number of GPUs, or not the same on all ranks.
        RuntimeError: no init; "trees" without a topology or a GPU.
        PeerTimeout: a wait of an earlier call ran out (CPU heap: of this call).
    """
    op = op if isinstance(op, str) else reduction("all_reduce", op, group)
    if makes_graph():
        from . import library_collectives

        return library_collectives.all_reduce(x, group, op, algo)
    seen = _signature(x)
    control = resolve(group)
    with Refusing("all_reduce", control):
        without_gradient("all_reduce", x)
        y = _again(seen, x, control, op, algo, in_place=False)
        if y is not None:
            return y
        xs = _checked("all_reduce", x, op, algo)
        ys = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in xs]
        _run([t.contiguous() for t in xs], ys, control, op, algo, seen)
    return ys[0] if isinstance(x, torch.Tensor) else ys


def all_reduce_(
    x: torch.Tensor | Sequence[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    op: validate.Reduction = "sum",
    algo: str = "auto",
) -> Any:
    """`all_reduce` in place: writes into ``x``, which must be contiguous, and returns it. Tensors of a list may not overlap.

    Autograd does not see it: gradients go past it, of which a warning tells.
    """
    op = op if isinstance(op, str) else reduction("all_reduce_", op, group)
    if makes_graph():
        from . import library_collectives

        return library_collectives.all_reduce_(x, group, op, algo)
    seen = _signature(x)
    control = resolve(group)
    with Refusing("all_reduce_", control):
        without_gradient("all_reduce_", x, in_place=True)
        if _again(seen, x, control, op, algo, in_place=True) is not None:
            return x
        xs = _checked("all_reduce_", x, op, algo)
        for t in xs:
            validate.contiguous("all_reduce_", t)
        _apart(xs, [t.data_ptr() for t in xs])
        _run(xs, xs, control, op, algo, seen)
    increment_version(xs)  # autograd, which may have saved them, does not see what a kernel writes
    return x


def _signature(x: Any) -> again.Signature | None:
    return again.signature((x,)) if isinstance(x, torch.Tensor) else again.signature_of_list(x)


def _again(seen: again.Signature | None, x: Any, control: ControlGroup, op: str, algo: str, in_place: bool) -> Any:
    """The result of a call that came again, of one tensor or of a list; None if nothing is known of such calls."""
    if seen is None or type(op) is not str or type(algo) is not str:
        return None
    with control.lock:
        found = again.find_kept((KIND.name, control.name), (op, algo, in_place, *seen.key))
        if found is None:
            return None
        ctx, known = found
        if not isinstance(x, torch.Tensor):
            return _all_again(ctx, known.plan, seen.addresses, x, in_place)
        if len(known.plan.made) > 1:
            all_of_it = _all_again(ctx, known.plan, seen.addresses, [x], in_place)
            return all_of_it and all_of_it[0]
        ys = [x] if in_place else again.results(known, seen, x)
        if ys is None:
            return None
        ((call, plan, _),) = known.plan.made
        with ctx.begin(call):
            plan.launch((x, ys[0]))
    if in_place:
        increment_version(x)
    return ys[0]


def _all_again(
    ctx: ExchangeContext, known: "_Calls", addresses: list[int], xs: Sequence[torch.Tensor], in_place: bool
) -> Sequence[torch.Tensor] | None:
    """The results of a list; None if memory for a new one lies as none did before."""
    ys, to = xs, addresses
    if in_place:
        if addresses != known.apart:
            _apart(xs, addresses)
            known.apart = addresses
    else:
        ys = [torch.empty_like(x) for x in xs]  # which are contiguous
        to = [y.data_ptr() for y in ys]
        if any(address % again.ALIGNED for address in to):
            return None
    itemsize = xs[0].element_size()
    for call, plan, span in known.made:
        with ctx.begin(call):
            x, y = xs[span.first], ys[span.first]
            if plan.table is not None:
                plan.table.set(span.places(addresses, itemsize) + span.places(to, itemsize))
            elif span.end - span.start < x.numel():
                x, y = x.view(-1)[span.start : span.end], y.view(-1)[span.start : span.end]
            plan.launch((x, y))
    if in_place:
        increment_version(xs)
    return ys


def _apart(xs: Sequence[torch.Tensor], addresses: Sequence[int]) -> None:
    """No two tensors of a list that is written to have memory in common."""
    itemsize = xs[0].element_size()
    places = sorted([(address, n, i) for i, address in enumerate(addresses) if (n := xs[i].numel())])
    for (start, n, i), (other, _, j) in itertools.pairwise(places):
        if other < start + n * itemsize:
            raise ValueError(
                f"all_reduce_: x[{i}] and x[{j}] overlap in memory (x[{j}] begins {other - start} bytes behind x[{i}]), "
                "and each is written while the other is read; name memory once, or use all_reduce"
            )


def _checked(name: str, x: Any, op: str, algo: str) -> list[torch.Tensor]:
    """The tensors of a call of ``name``, as a list."""
    validate.reduction(name, op)
    error = check_algorithm(name, algo, "trees")
    if error is not None:
        raise error
    xs = validate.some(name, x)
    device = world.current().device
    for i, t in enumerate(xs):
        which = "x" if t is x else f"x[{i}]"
        if t is None:
            raise ValueError(f"{name}: {which} is None; leave out parameters without a gradient, the same ones on all ranks")
        validate.readable(name, which, t, None, device)
        validate.summable(name, t, which)
        if t.dtype != xs[0].dtype:
            raise ValueError(f"{name}: a list with {xs[0].dtype} and {t.dtype}; reduce tensors of one dtype at a time")
    return xs


def check_algorithm(name: str, algo: Any, *more: str) -> ValueError | None:
    """The error of a name that is no algorithm."""
    known = ("auto", *ALGORITHMS, *more)
    return None if algo in known else ValueError(f"{name}: algo={algo!r} is not one of {', '.join(map(repr, known))}")


def _run(
    xs: list[torch.Tensor],
    ys: list[torch.Tensor],
    control: ControlGroup,
    op: str,
    algo: str,
    seen: again.Signature | None,
) -> None:
    """``seen``: of the call, if others like it may follow."""
    with control.lock, torch.no_grad():
        some = [(x.view(-1), y.view(-1)) for x, y in zip(xs, ys, strict=True) if x.numel()]
        if not some:
            said = exchange.recorded(0, xs[0].dtype, op=op, algo=algo)
            exchange.context(KIND, control, "bulk", 1, said).record(**said)
            return
        flat, results = zip(*some, strict=True)
        sizes = [x.numel() for x in flat]
        most = trees.PIECE if algo == "trees" else most_bytes(control.size, algo)
        contexts, made = [], []
        for span in lists.cut(sizes, flat[0].element_size(), most, exchange.BULK):
            pairs = list(zip(span.of(flat), span.of(results), strict=True))
            ctx, call, plan = _launch(control, pairs, op, algo, sum(sizes))
            contexts.append(ctx)
            made.append(_Made(call, plan, span))
        # trees have other memory; a call has one context, unless that had to grow on the way; and x where the caller has it
        if seen is None or algo == "trees" or len(set(contexts)) > 1 or [x.data_ptr() for x in xs] != seen.addresses:
            return
        in_place = xs[0] is ys[0]
        seen = seen._replace(key=(op, algo, in_place, *seen.key))
        again.remember(contexts[0], seen, (), (0, _Calls(made)), [] if in_place else ys)


class _Plan(NamedTuple):
    launch: Prepared
    #: Of several tensors.
    table: lists.Table | None


class _Made(NamedTuple):
    """A launch of a call, and what of the call's tensors it is for."""

    call: Told
    plan: _Plan
    span: lists.Span


@dataclass
class _Calls:
    """What came of a call."""

    made: list[_Made]
    #: Addresses of tensors, written in place, that were seen to have no memory in common.
    apart: list[int] | None = None


def _launch(
    control: ControlGroup, pairs: list[Pair], op: str, algo: str, of: int
) -> tuple[trees.TreeContext | ExchangeContext, Told, _Plan]:
    """One launch: of one tensor, or of several. ``of``: elements of the whole call. Returns what it was made of."""
    sizes, dtype = tuple(x.numel() for x, _ in pairs), pairs[0][0].dtype
    said = exchange.recorded(sum(sizes), dtype, op=op, algo=algo)
    if len(sizes) > 1:
        said |= dict(tensors=len(sizes), sizes=exchange.listed(sizes))
    if algo == "auto":
        whole = 4 * exchange.WORDS * blocks_of(sizes, "one_shot", dtype, 1)  # what a list sends by words, in whole blocks
        algo = choose(whole if len(sizes) > 1 else sum(sizes) * dtype.itemsize, control.size)
    row = blocks_of(sizes, algo, dtype, control.size)
    ctx = trees.context(control, row, said) if algo == "trees" else exchange.context(KIND, control, algo, row, said)
    several = isinstance(ctx, trees.TreeContext) and of > ctx.bound
    call = told(algo, **said)
    with ctx.begin(call):
        return ctx, call, queue(ctx, pairs, algo, op, row, several)


def blocks_of(sizes: Sequence[int], algo: str, dtype: torch.dtype, ranks: int) -> int:
    """Blocks of tensors of so many elements, all of them or, where each rank owns a part, those of a part."""
    elements = exchange.block(algo, dtype.itemsize)
    blocks = sum(cdiv(size, elements) for size in sizes)
    return blocks if algo in ("one_shot", "trees") else cdiv(blocks, ranks)


def queue(ctx: trees.TreeContext | ExchangeContext, pairs: list[Pair], algo: str, op: str, row: int, several: bool) -> _Plan:
    """The launch of a call that has begun, made and returned; ``row``: `blocks_of`."""
    plan = planned(ctx, pairs, algo, op, row, several)
    if plan.table is not None:
        plan.table.set([x.data_ptr() for x, _ in pairs] + [y.data_ptr() for _, y in pairs])
    plan.launch(pairs[0])
    return plan


def planned(
    ctx: trees.TreeContext | ExchangeContext, pairs: list[Pair], algo: str, op: str, row: int, several: bool = False
) -> _Plan:
    """The launch for tensors like these, planned at most once."""
    sizes, dtype = tuple(x.numel() for x, _ in pairs), pairs[0][0].dtype
    elements = exchange.block(algo, dtype.itemsize)
    places = [t.data_ptr() // t.element_size() for pair in pairs for t in pair]
    # of one tensor the launch itself sees the address
    vector = math.gcd(16 // dtype.itemsize, *sizes, *(places if len(pairs) > 1 else []))
    key = algo, several, op, dtype, sizes, vector, *([t.data_ptr() % 16 for t in pairs[0]] if len(pairs) == 1 else [])
    made: _Plan = ctx.plan(key, lambda: _plan(ctx, pairs, algo, several, op, row, elements, vector))[1]
    return made


def _plan(
    ctx: trees.TreeContext | ExchangeContext, pairs: list[Pair], algo: str, several: bool, op: str, row: int, elements: int,
    vector: int,
) -> _Plan:  # fmt: skip
    """``row``: blocks of all tensors, or of each rank's part of them."""
    x, y = pairs[0]
    table = words = None
    if len(pairs) > 1:
        blocks = row if algo in ("one_shot", "trees") else row * ctx.size
        table = ctx.table(len(pairs), lists.layout([x.numel() for x, _ in pairs], elements, blocks))
        words = table.words
    if isinstance(ctx, trees.TreeContext):
        return _Plan(ctx.prepared(x, y, several, row, op, vector, len(pairs), words), table)
    if algo != "one_shot":
        chunk = row * elements
        parts = Parts(x.numel(), chunk, chunk, row)
        way = "bulk" if algo == "bulk" else "words"
        return _Plan(ctx.prepared(way, x, y, parts, op, vector, tensors=len(pairs), table=words), table)
    constants: dict[str, Any] = dict(R=ctx.size, OP=OPS[op], MANY=table is not None, VEC=vector, MOST=MOST)
    constants |= dict(B=WORDS, S=1 << (ctx.size - 1).bit_length(), WIDTH=4 // x.element_size())
    sizes = (len(pairs), x.numel(), row, ctx.words, ctx.offsets["slots"], ctx.rank)
    args = (x, y, ctx.ctl if words is None else words, ctx.epochs, ctx.ctl, *sizes)
    constants |= dict(maxnreg=OF_WORDS.registers)
    programs = ctx.programs(row, OF_WORDS.over)
    return _Plan(ctx.prepare(all_reduce_one_shot_kernel, programs, args, constants, OF_WORDS, (0, 1)), table)


def most_bytes(ranks: int, algo: str) -> int:
    """Bytes of all parts that one launch takes at most, in whole blocks."""
    return max(KIND.most(ranks, algo) * ranks // exchange.BULK, 1) * exchange.BULK


def room(elements: int, dtype: torch.dtype, ranks: int, algo: str) -> tuple[int, int]:
    """Blocks in a row, of words and of bulk, for any call of up to ``elements``."""
    if ranks == 1:  # nothing is exchanged
        return 1, 1
    rows = dict.fromkeys(ALGORITHMS, 1)
    most = min(elements, most_bytes(ranks, algo) // dtype.itemsize)
    for name in AUTO if algo == "auto" else (algo,):
        # the algorithms follow each other as sizes grow, so each needs most where the next one begins
        after = AUTO[AUTO.index(name) + 1 :] if algo == "auto" else ()
        last = bisect.bisect_left(range(most), True, key=lambda n: choose((n + 1) * dtype.itemsize, ranks) in after)
        largest = most if algo == name else last
        rows[name] = max(1, blocks_of([largest], name, dtype, ranks))
    return max(rows["one_shot"], rows["two_shot"]), rows["bulk"]


def choose(nbytes: int, ranks: int) -> str:
    """The algorithm that is expected to be fastest for ``nbytes``."""
    part = nbytes * (ranks - 1) / ranks
    one_shot, two_shot = TRIP + part * ranks / WORD_RATE, 2 * TRIP + 2 * part / WORD_RATE
    return "one_shot" if nbytes <= ONE_SHOT and one_shot <= two_shot else "two_shot"

"""`reduce_scatter`, `all_gather`, `reduce` and `broadcast`, each in one kernel, without a barrier.

Read with `kernels/exchange.py`, which holds the protocol, and `kernels/relay.py`. What they have in common:

group: the ranks; those given to init if None. ``algo``: "words" (one trip, of words whose bits say that they have come, so nothing
else is signalled; for bfloat16, float16 and float32, and of their NaNs one comes as another), "bulk" (signals beside the data, for
any dtype); of reduce and broadcast "two_shot", too (words in two trips, by way of the other ranks, so that the root's port carries
the tensor once, where in one trip it carries it for each of them; where there is but one rank, the same as words); or "auto": words
where they can be, which were faster at every size on two H200s and four H100s (docs/measured/2026-11-26-exchange.md and
2026-11-26-four-h100.md), in two trips where the bytes are expected to cost more than a trip does (2026-11-26-relay.md).

A tensor that is not contiguous is copied first. Calls end when their own data is there, may follow each other at once, and may be
captured in CUDA graphs. Without gradients. Memory is taken on first use, and again for larger calls, which the ranks do together.

Raises:
    ValueError: dtypes, devices, names that do not fit; ranks that make different calls, as a CallMismatch. RuntimeError: no init.
    PeerTimeout: a wait of an earlier call ran out (CPU heap: of this call).
"""

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..kernels.tiles import cdiv, rows_of
from ..runtime import world
from ..runtime.control import ControlGroup
from . import again, exchange, keeping, tiling, validate
from .context import DTYPES
from .dispatcher import makes_graph
from .exchange import Kind
from .group import Prepared, Told, resolve, told
from .refusals import Refusing, reduction, without_gradient

REDUCE_SCATTER = Kind("reduce_scatter", scatter=True)
ALL_GATHER = Kind("all_gather", gather=True)
REDUCE = Kind("reduce", scatter=True, rooted=True)
BROADCAST = Kind("broadcast", gather=True, rooted=True)
ALGORITHMS = ("words", "bulk")
#: Of reduce and broadcast.
ROOTED = ("words", "two_shot", "bulk")


def reduce_scatter(
    x: torch.Tensor, group: dist.ProcessGroup | None = None, op: validate.Reduction = "sum", algo: str = "auto"
) -> torch.Tensor:
    """This rank's rows of the element-wise sum, average or maximum of ``x`` over the ranks.

    Args:
        x: [M, …], bfloat16, float16 or float32, of the same shape on all ranks.
        op: "sum", "avg" or "max" (NaN if any rank has it), or torch's ReduceOp of that name.
        group: the ranks; those given to init if None.
        algo: "words", "bulk" or "auto". What these are, and the errors: the docstring of `fluxlike.ops.collectives`.

    Returns:
        A new tensor [rows, …]: the rows of this rank when M rows are split as torch.chunk splits, so M need not be a multiple of
        the number of ranks, and the last ranks may get fewer rows or none.

    Numerics: added in fp32 in the order of the ranks and rounded once: the bits of `all_reduce`, on every repeat.
    """
    op = op if isinstance(op, str) else reduction("reduce_scatter", op, group)
    if makes_graph():
        from . import library_collectives

        return library_collectives.reduce_scatter(x, group, op, algo)
    seen = _signature(x, op, algo)
    control = resolve(group)
    with Refusing("reduce_scatter", control):
        without_gradient("reduce_scatter", x)
        made = _again(REDUCE_SCATTER, control, x, seen)
        if made is not None:
            return made[0]
        with torch.no_grad():
            _check("reduce_scatter", x, 1, algo, op)
            x = x.contiguous()
            y = x.new_empty(rows_of(x.shape[0], control.size, control.rank), *x.shape[1:])
            _run(REDUCE_SCATTER, control, x, y, _chunk(x, x.shape[0], control.size), x.numel(), op, algo, seen=seen)
    return y


def all_gather(x: torch.Tensor, group: dist.ProcessGroup | None = None, m: int | None = None, algo: str = "auto") -> torch.Tensor:
    """The rows of all ranks, in their order, on all ranks.

    Args:
        x: [rows, …], of any dtype, with the same rows on all ranks unless m is given.
        m: the rows of all ranks, split as torch.chunk splits m rows, as `reduce_scatter` leaves them: then the last ranks may have
            fewer rows or none.
        group: the ranks; those given to init if None. algo: "words" (bfloat16, float16 and float32 only), "bulk" or "auto". What
            these are, and the errors: the docstring of `fluxlike.ops.collectives`.

    Returns:
        A new tensor [m, …].
    """
    if makes_graph():
        from . import library_collectives

        return library_collectives.all_gather(x, group, m, algo)
    control = resolve(group)
    try:
        with Refusing("all_gather", control):
            without_gradient("all_gather", x)
            return _all_gather(x, control, m, algo)
    except ValueError as error:  # CallMismatch, too
        if m is None:
            keeping.may_lack_m(error, "part")
        raise


def _all_gather(x: torch.Tensor, control: ControlGroup, m: int | None, algo: str) -> torch.Tensor:
    m = tiling.number(m)
    seen = _signature(x, m, algo)
    made = _again(ALL_GATHER, control, x, seen)
    if made is not None:
        return made[0]
    with torch.no_grad():
        _check("all_gather", x, 1, algo)
        x = x.contiguous()
        m = x.shape[0] * control.size if m is None else m
        if not isinstance(m, int) or isinstance(m, bool) or m < 0 or rows_of(m, control.size, control.rank) != x.shape[0]:
            raise ValueError(
                f"all_gather: x has {x.shape[0]} rows, which are not those of rank {control.rank} of {control.size} when "
                f"torch.chunk splits m={m!r} rows; pass the rows of all ranks as m, or leave it out if all have as many"
            )
        y = x.new_empty(m, *x.shape[1:])
        _run(ALL_GATHER, control, x, y, _chunk(y, m, control.size), y.numel(), "sum", algo, seen=seen)
    return y


def reduce(
    x: torch.Tensor, root: int, group: dist.ProcessGroup | None = None, op: validate.Reduction = "sum", algo: str = "auto"
) -> torch.Tensor | None:
    """The element-wise sum, average or maximum of ``x`` over the ranks, on rank ``root`` only.

    Args:
        x: bfloat16, float16 or float32, of any shape, the same on all ranks.
        root: the rank in the group that gets the result.
        op: "sum", "avg" or "max" (NaN if any rank has it), or torch's ReduceOp of that name.
        group: the ranks; those given to init if None.
        algo: "words", "two_shot", "bulk" or "auto". What these are, and the errors: the docstring of `fluxlike.ops.collectives`.

    Returns:
        On root a new tensor like x, on the other ranks None.

    Numerics: those of `reduce_scatter`.
    """
    op = op if isinstance(op, str) else reduction("reduce", op, group)
    if makes_graph():
        from . import library_collectives

        return library_collectives.reduce(x, root, group, op, algo)
    root = tiling.number(root)
    seen = _signature(x, root, op, algo)
    control = resolve(group)
    with Refusing("reduce", control):
        without_gradient("reduce", x)
        made = _again(REDUCE, control, x, seen)
        if made is not None:
            return made[0] if made else None
        with torch.no_grad():
            _check("reduce", x, 0, algo, op)
            x = x.contiguous()
            check_root("reduce", root, control.size)
            y = torch.empty_like(x) if control.rank == root else None
            _run(REDUCE, control, x, x if y is None else y, 0, x.numel(), op, algo, root, seen)
    return y


def broadcast(x: torch.Tensor, root: int, group: dist.ProcessGroup | None = None, algo: str = "auto") -> torch.Tensor:
    """A copy of rank ``root``'s ``x`` on all ranks.

    Args:
        x: of any shape and dtype, the same on all ranks; what it holds matters on root only.
        root: the rank in the group whose tensor it is. group: the ranks; those given to init if None.
        algo: "words", "two_shot" (both for bfloat16, float16 and float32 only), "bulk" or "auto". What these are, and the errors:
            the docstring of `fluxlike.ops.collectives`.

    Returns:
        A new tensor like x.
    """
    if makes_graph():
        from . import library_collectives

        return library_collectives.broadcast(x, root, group, algo)
    root = tiling.number(root)
    seen = _signature(x, root, algo)
    control = resolve(group)
    with Refusing("broadcast", control):
        without_gradient("broadcast", x)
        made = _again(BROADCAST, control, x, seen)
        if made is not None:
            return made[0]
        with torch.no_grad():
            _check("broadcast", x, 0, algo)
            x = x.contiguous()
            check_root("broadcast", root, control.size)
            y = torch.empty_like(x)
            _run(BROADCAST, control, x, y, 0, x.numel(), "sum", algo, root, seen)
    return y


class _Call(NamedTuple):
    """How a call of one launch is made; ``dtype``: as what it takes the tensors, where not as they are."""

    told: Told
    launch: Prepared
    dtype: torch.dtype | None


def _signature(x: Any, *said: Any) -> again.Signature | None:
    """Of a call with ``x``, and names and sizes that the caller said."""
    if not isinstance(x, torch.Tensor) or any(type(word) not in (str, int, type(None)) for word in said):
        return None
    seen = again.signature((x,))
    if seen is None or x.is_complex():  # which may be conjugated
        return None
    return seen._replace(key=(*said, *seen.key))


def _again(kind: Kind, control: ControlGroup, x: torch.Tensor, seen: again.Signature | None) -> list[torch.Tensor] | None:
    """The results of a call that came again, none or one; None if nothing is known of such calls."""
    if seen is None:
        return None
    with control.lock:
        found = again.find_kept((kind.name, control.name), seen.key)
        if found is None:
            return None
        ctx, known = found
        results = again.results(known, seen, x)
        if results is None:
            return None
        call: _Call = known.plan
        tensors = x, results[0] if results else x
        if call.dtype is not None:
            if x.storage_offset() * x.element_size() % call.dtype.itemsize:  # of memory that begins elsewhere
                return None
            tensors = tensors[0].view(-1).view(call.dtype), tensors[1].view(-1).view(call.dtype)
        with ctx.begin(call.told):
            call.launch(tensors)
    return results


def _check(name: str, x: Any, dims: int, algo: str, op: str | None = None) -> None:
    """A tensor of ``dims`` dimensions or more; with an ``op``, of numbers."""
    if op is not None:
        validate.reduction(name, op)
    known = ("auto", *(ROOTED if name in (REDUCE.name, BROADCAST.name) else ALGORITHMS))
    if algo not in known:
        raise ValueError(f"{name}: algo={algo!r} is not one of {', '.join(map(repr, known))}")
    validate.readable(name, "x", x, None, world.current().device)
    if algo in ("words", "two_shot") and x.dtype not in DTYPES:
        raise ValueError(f"{name}: algo={algo!r} is for bfloat16, float16 and float32, and x has dtype {x.dtype}; use algo='bulk'")
    if op is not None:
        validate.summable(name, x)
    if x.is_conj():
        raise ValueError(f"{name}: x is a lazily conjugated view, whose memory has other numbers; use x.resolve_conj()")
    if dims:
        check_has_rows(name, x)


def check_has_rows(name: str, x: torch.Tensor) -> None:
    if x.dim() == 0:
        raise ValueError(f"{name}: x has no dimensions, and its first is the one that is shared out; use x.reshape(1)")


def check_root(name: str, root: Any, ranks: int) -> None:
    if not isinstance(root, int) or isinstance(root, bool) or not 0 <= root < ranks:
        raise ValueError(f"{name}: root={root!r} is no rank of the group; name one by its rank in it, from 0 to {ranks - 1}")


def _chunk(whole: torch.Tensor, m: int, ranks: int) -> int:
    """Elements of the first rank's rows of m."""
    return cdiv(m, ranks) * (whole.numel() // m if m else 0)


def _run(
    kind: Kind, control: ControlGroup, x: torch.Tensor, y: torch.Tensor, chunk: int, n: int, op: str, algo: str, root: int = -1,
    seen: again.Signature | None = None,
) -> None:  # fmt: skip
    """``n`` elements in all, cut into as many launches as needed. ``chunk``: from the part of a rank to that of the next.

    ``seen``: of the call, if others like it may follow.
    """
    said = exchange.recorded(n, x.dtype, algo=algo)
    said |= (dict(root=root) if kind.rooted else dict(part=chunk)) | (dict(op=op) if kind.scatter else {})
    if algo == "auto":
        algo = _chosen(kind, n * x.element_size(), control.size) if x.dtype in DTYPES else "bulk"
    if control.size == 1 and kind.relayed(algo):
        algo = "words"  # there is nobody to pass anything on, or to send it to
    given, result, nbytes = x, y, x.element_size()
    x, y = x.view(-1), y.view(-1)
    if kind.gather:
        x, y = raw(x, y, chunk)
    itemsize = x.element_size()
    n, chunk = n * nbytes // itemsize, chunk * nbytes // itemsize
    width = n if kind.rooted else chunk
    call, made = told(algo, **said), []
    with control.lock:
        if n == 0:
            exchange.context(kind, control, "bulk", 1, said).record(**said)
        for start, parts in exchange.pieces(kind, n, chunk, width if n else 0, algo, itemsize, control.size):
            ctx = exchange.context(kind, control, algo, parts.blocks, said)
            with ctx.begin(call):
                here = x[start:], y[start:]
                launch = exchange.launch_for(ctx, algo, *here, parts, op, root)
                launch(here)
                made.append((ctx, launch))
        # of one launch for x where the caller has it
        if seen is not None and len(made) == 1 and given.data_ptr() == seen.addresses[0]:
            ctx, launch = made[0]
            dtype = x.dtype if x.dtype != given.dtype else None
            again.remember(ctx, seen, (), (0, _Call(call, launch, dtype)), [] if result is given else [result])


def _chosen(kind: Kind, nbytes: int, ranks: int) -> str:
    """What is expected to be fastest for floats of ``nbytes`` in all: the same on all ranks."""
    if kind.rooted and exchange.relay_seconds(kind, nbytes) < exchange.rooted_seconds(kind, nbytes, ranks):
        return "two_shot"
    return "words"


def raw(x: torch.Tensor, y: torch.Tensor, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same memory as whole numbers, as wide as sizes and addresses allow, up to a word.

    Ranks may choose otherwise: what travels is the same.
    """
    size = x.element_size()
    places = [t.storage_offset() * size for t in (x, y)] + [t.data_ptr() for t in (x, y)]
    width = math.gcd(4, chunk * size, x.numel() * size, y.numel() * size, *places)
    dtype = {4: torch.int32, 2: torch.int16, 1: torch.uint8}[width]
    return x.view(dtype), y.view(dtype)

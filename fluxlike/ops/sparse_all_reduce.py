"""All-reduce of sparse tensors, as gradients of embeddings are: `sparse_all_reduce_` and `sparse_all_reduce`.

Read with `kernels/sparse_all_reduce.py`, which holds the protocol, and `sparse_index`, which finds out who has which ids.
"""

import ctypes
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version

from ..kernels import sparse_all_reduce as kernels
from ..kernels.tiles import cdiv, chunk_rows, rows_of
from ..runtime import world
from ..runtime.control import ControlGroup
from . import exchange, sparse_index, tiling, validate
from .exchange import MOST, OF_BULK, OPS, OVER, Compiled, EpochContext, ExchangeContext, Kind
from .group import resolve
from .keeping import in_step, kept
from .refusals import Refusing, beside_capture, check_context
from .sparse_arguments import MOST_ROWS, NAME, SCATTER, check, check_ids, countable, wire_of
from .sparse_index import HEAD, ROW, room

#: Elements of a tile, columns of one at most, slots of a chunk and union rows of a unit at least.
TILE, COLUMNS, CHUNK, UNIT = 4096, 2048, 16, 64
#: Entries that a slot may have without being hot. Of sums of hot slots: columns of a program, slots that it looks at together.
HOT, SUM_COLUMNS, SUM_SLOTS = kernels.HOT.value, 128, 256
OF_SUMS = Compiled(warps=2, over=8)
#: Of the programs of a launch, the parts that push and that reduce; the others drain.
PUSHERS, REDUCERS = 3 / 8, 1 / 4
#: Rows of staging are of a multiple of so many elements, but where they are narrow.
WIDE, NARROW = 16, 64


class Shapes(NamedTuple):
    """How a table of so many columns is cut up."""

    pitch: int
    rows: int
    columns: int
    chunk: int
    unit: int

    @classmethod
    def of(cls, width: int) -> "Shapes":
        columns = min(1 << (width - 1).bit_length(), COLUMNS)
        # of 64 columns a whole tile, with the pointers of 64 rows, spills registers
        rows = TILE // (2 * NARROW) if columns == NARROW else max(1, min(1024, TILE // columns))
        pitch = width if width < NARROW else tiling.round_up(width, WIDE)
        return cls(pitch, rows, columns, max(CHUNK, rows), max(UNIT, rows))


class Pending(NamedTuple):
    """Ids whose exchange is under way."""

    ids: torch.Tensor
    capacity: int
    local: sparse_index.Local
    table: sparse_index.Table
    #: meta, on the host.
    read: Callable[[], list[int]]
    #: Ends the fork of the stream on which it runs.
    joined: ExitStack
    #: The number of the capture whose graph has it, or 0.
    capture: int


class SparseAllReduceContext(EpochContext):
    """Memory for calls on tables of ``width`` columns, with up to ``rows`` distinct ids on a rank.

    Made by ``fluxlike.create_sparse_all_reduce_context``. ``last_path``: "owned" if the ranks share the sums of ids that several
    have, "direct" if each makes all of them.
    """

    shown = ("rows", "width", "dtype", "wire")
    _pending: Pending | None = None

    def __init__(self, control: ControlGroup, rows: int, width: int, dtype: torch.dtype, wire: torch.dtype) -> None:
        """Collective."""
        self.rows, self.width, self.dtype, self.wire = rows, width, dtype, wire
        self.shapes, ranks = Shapes.of(width), control.size
        self.chunks = cdiv(self.rows, self.shapes.chunk)
        staging = ranks * room(rows) * self.shapes.pitch * wire.itemsize
        super().__init__(NAME, control, {"flags": 8 * 2 * ranks * self.chunks, "data": staging})
        self.maker = f"fluxlike.create_{NAME}_context"
        #: Whether ids of several ranks have owners: two ranks save nothing, another dtype on the wire would round twice.
        self.owned = ranks > 2 and wire is dtype
        #: Of `fluxlike.nn.Embedding`: when ids may go ahead.
        self.ahead: Any = None
        #: Rows of the table, where the context is for one.
        self.table_rows: int | None = None
        nbytes = (HEAD + self.rows) * 8
        kind = Kind(NAME, gather=True)
        self.ids = ExchangeContext(kind, control, 1, cdiv(min(nbytes, kind.most(ranks, "bulk")), exchange.BULK))
        self.inner.append(self.ids)
        self.made(f"{NAME}, {width} columns, {str(dtype).removeprefix('torch.')}")

    def take(self) -> None:
        super().take()
        self.staging = self.data.view(self.wire)
        self._lanes = self.world.executor.lanes((NAME, self.control.name))
        self._no_sums = self.lasting(1, self.width, dtype=torch.float32)
        #: Calls so far whose ids were not those that had been started; on the device, and as the host has heard of them.
        self._unlike = self.lasting(1, dtype=torch.int64, make=torch.zeros)
        self._differs = self.world.executor.report(1)
        self._differed = ctypes.c_int64.from_address(self._differs.data_ptr())

    # -- ids ------------------------------------------------------------------------------------------------------------

    def start_indices(self, ids: torch.Tensor) -> None:
        """Begin the exchange of the ids of the next call, so in the forward pass; beside what the current stream holds next, up to
        the next call of fluxlike that waits for peers, which begins behind it.

        Args:
            ids: int64 or int32, of any shape: those of the next gradient, in its order, as the input of an embedding is. They must
                not be changed before that call. Collective, as the call is.

        Raises:
            ValueError: dtypes, too many ids; a second start without a call between.
        """
        with Refusing(NAME, self.control), self.control.lock:
            check_ids(ids, self, self._pending is not None)
            self._pending = self.exchange(ids.reshape(-1), self.rows, self.table_rows)  # type: ignore[arg-type]

    def cancel_indices(self) -> None:
        """Forget ids that were started, as their gradient will not come. On all ranks alike."""
        with self.control.lock:  # a thread may be in a call, also of another table, whose lanes are the same
            pending, self._pending = self._pending, None
            if pending is not None:
                pending.joined.close()

    def exchange(self, ids: torch.Tensor, capacity: int, table_rows: int, scatter: bool = False) -> Pending:
        """Queue the exchange of ``ids``, beside what the current stream holds next until the fork is joined.

        ``scatter``: each rank gets its part of the table only.
        """
        beside_capture(NAME, self.world.executor, self._lanes)
        self.record(**({"scatter": 1} if scatter else {}), n=table_rows, ids=capacity)  # short: a text has 176 characters
        joined = ExitStack()
        try:
            self._stream = self.world.executor.on_same_stream(self._stream)
            ahead = tuple(self.world.ahead)
            joined.enter_context(self._lanes.forked())
            with self._lanes.of(1), torch.no_grad():
                for other in ahead:
                    other()
                local = sparse_index.local(self, ids, capacity, sparse_index.key_dtype(table_rows), table_rows)
                messages = torch.empty(self.size, local.message.numel(), dtype=local.message.dtype, device=self.device)
                self._gather(local.message, messages)
                if scatter:
                    table = sparse_index.shard(self, messages, chunk_rows(table_rows, self.size))
                else:
                    table = sparse_index.table(self, messages, self.owned)
                capture = self.world.executor.capture()
                read = list if capture else self.world.executor.read_later(table.meta)
        except BaseException as error:
            joined.close()
            self._broken(error)
            raise

        def wait() -> None:
            if self.world.executor.capture() == capture:  # a captured stream cannot wait for one outside, nor the reverse
                self._lanes.wait()

        self.world.ahead.append(wait)
        joined.callback(self.world.ahead.remove, wait)
        return Pending(ids, capacity, local, table, read, joined, capture)

    def _gather(self, x: torch.Tensor, y: torch.Tensor) -> None:
        if self.size == 1:
            y.copy_(x)
            return
        x, y, n = x.view(torch.int32), y.view(-1).view(torch.int32), x.numel() * x.element_size() // 4
        for start, parts in exchange.pieces(self.ids.kind, n * self.size, n, n, "bulk", 4, self.size):
            here = x[start:], y[start:]
            exchange.launch_for(self.ids, "bulk", *here, parts, "sum")(here)

    def pending_of(self, ids: torch.Tensor, capacity: int, table_rows: int, scatter: bool = False) -> Pending:
        """The exchange of these ids: that which was started with them, or one that begins now."""
        capture, pending = self.world.executor.capture(), self._pending
        name = SCATTER if scatter else NAME
        if pending is not None and pending.capture != capture:
            where = "before the CUDA graph of their gradient"
            if pending.capture:
                where = f"in {'another CUDA graph than their gradient' if capture else 'a CUDA graph and their gradient is not'}"
            raise ValueError(f"{name}: ids were started {where}; call start_indices where that is, or cancel_indices first")
        self._pending = None
        if pending is None:
            pending = self.exchange(ids, capacity, table_rows, scatter)
        else:
            if pending.ids.numel() != ids.numel():
                pending.joined.close()
                raise ValueError(
                    f"{name}: ids that were started: {pending.ids.numel()}, entries of the gradient: {ids.numel()}; start those "
                    "of the gradient, in its order"
                )
        pending.joined.close()
        if not capture:  # a graph keeps its memory to itself, and in there the lanes see to it
            for made in (pending.local.order, pending.local.starts, *pending.table):  # on the stream of the exchange
                self.world.executor.in_use(made)
        if pending.ids is not ids:
            self._unlike.add_((pending.ids != ids).any())  # it only grows: the host may not look before a later call is right
            self.world.executor.in_use(pending.ids)  # of another stream, perhaps, and nobody else may hold them
            self._differs.copy_(self._unlike, non_blocking=True)
        return pending

    def failure(self) -> Exception | None:
        if self._error is None and self._differed.value:
            with self.control.lock:
                self._error = ValueError(
                    f"{NAME}: a gradient had other ids than were started for it, so its result is wrong on all ranks; start "
                    f"those of the gradient, in its order. {self.remedy}"
                )
                self.board.freeze()
            self._release()
        return super().failure()

    # -- values ---------------------------------------------------------------------------------------------------------

    def run(self, pending: Pending, values: torch.Tensor, rows: int, op: str, owned: bool, padded: bool) -> torch.Tensor:
        """The values of the union rows, and if ``padded`` zeros up to ``rows``: [rows, width]. ``owned``: ids have owners."""
        y = torch.empty(rows, self.width, dtype=self.dtype, device=self.device)
        local, table = pending.local, pending.table
        entries = local.order, local.starts
        if len(values) > HOT:  # where no slot is hot, nothing is written or read
            sums = torch.empty(cdiv(len(values), HOT), self.width, dtype=torch.float32, device=self.device)
            summed = [values, *entries, table.meta, sums]
            self.plan(("sums", *[t.data_ptr() % 16 for t in summed]), lambda: self._prepared_sums(summed))[1](summed)
        else:
            sums = self._no_sums
        tensors = [values, *entries, sums, table.targets, table.place, table.slots, table.owners, table.staged, table.meta, y]
        most = rows if padded else 0
        key = op, most, pending.capacity, owned, *[t.data_ptr() % 16 for t in tensors]
        self.plan(key, lambda: self._prepared(tensors, most, pending.capacity, op, owned))[1](tensors)
        return y

    def _prepared_sums(self, tensors: Sequence[torch.Tensor]) -> Any:
        parts = cdiv(self.width, SUM_COLUMNS)
        groups = max(1, OF_SUMS.over * self.world.executor.programs // parts)
        constants = dict(D=self.width, BC=SUM_COLUMNS, BS=SUM_SLOTS, maxnreg=OF_SUMS.registers)
        return self.prepare(kernels.sparse_sums_kernel, parts * groups, tensors, constants, OF_SUMS, tuple(range(len(tensors))))

    def _prepared(self, tensors: Sequence[torch.Tensor], rows: int, capacity: int, op: str, owned: bool) -> Any:
        programs = max(3, min(MOST, OVER * self.world.executor.programs))
        pushers = max(1, int(programs * PUSHERS))
        reducers = max(1, int(programs * REDUCERS)) if owned else 0
        shapes = self.shapes
        constants: dict[str, Any] = dict(R=self.size, S=1 << (self.size - 1).bit_length(), D=self.width, PITCH=shapes.pitch)
        constants |= dict(K=shapes.chunk, U=shapes.unit, BR=shapes.rows, BC=shapes.columns, CHUNKS=self.chunks)
        constants |= dict(OWNED=owned, OP=OPS[op], MOST=MOST, maxnreg=OF_BULK.registers)
        args = (*tensors, self.staging, self.flags, self.epochs, self.ctl, rows, room(capacity), self.rank, pushers, reducers)
        return self.prepare(kernels.sparse_all_reduce_kernel, programs, args, constants, OF_BULK, tuple(range(len(tensors))))

    def drop(self) -> None:
        self.cancel_indices()
        super().drop()


def create_sparse_all_reduce_context(
    shape: Sequence[int],
    max_nnz: int,
    dtype: torch.dtype = torch.float32,
    group: dist.ProcessGroup | None = None,
    wire_dtype: torch.dtype | str | None = None,
) -> SparseAllReduceContext:
    """Memory for the gradients of one table, for training loops; collective over ``group``.

    Args:
        shape: of the table, [N] or [N, …].
        max_nnz: entries that a rank's gradient has at most. dtype: of the values. group: the ranks; those of init if None.
        wire_dtype: see `sparse_all_reduce_`.

    Returns:
        A context for ``ctx=`` of `sparse_all_reduce_`, whose ``start_indices(ids)`` exchanges ids ahead of their gradient.

    Raises:
        ValueError: sizes or dtypes, or ranks that pass others. RuntimeError: no init, no memory.
    """
    control = resolve(group)
    error: Exception | None = None
    shape = tuple(shape) if isinstance(shape, Sequence) else (shape,)  # a number is [N], as for torch.empty
    try:
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{NAME}: dtype={dtype!r} is not torch.bfloat16, torch.float16 or torch.float32")
        wire = wire_of(dtype, wire_dtype)
        shape, max_nnz = tuple(map(tiling.number, shape)), tiling.number(max_nnz)
        sizes = [*shape, max_nnz]
        if len(sizes) < 2 or any(not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in sizes):
            raise ValueError(f"{NAME}: shape={shape}, max_nnz={max_nnz!r}: all sizes must be whole numbers above 0")
        if shape[0] > MOST_ROWS:
            raise ValueError(f"{NAME}: shape={shape}: a table has {MOST_ROWS} rows at most; split it")
        countable(control.size, max_nnz)
    except ValueError as problem:
        error = problem
    control.agree(f"fluxlike.create_{NAME}_context", [*map(str, shape), str(max_nnz), str(dtype), str(wire_dtype)], error)
    ctx = SparseAllReduceContext(control, max_nnz, math.prod(shape[1:]), dtype, wire)
    ctx.table_rows = shape[0]
    return ctx


def sparse_all_reduce_(
    x: torch.Tensor,
    op: validate.Reduction = "sum",
    group: dist.ProcessGroup | None = None,
    mode: str = "exact",
    *,
    ctx: SparseAllReduceContext | None = None,
    max_nnz: int | None = None,
    wire_dtype: torch.dtype | str | None = None,
) -> torch.Tensor:
    """The sum or average of sparse tensors over the ranks, in place: x becomes the result, with new indices and values.

    Args:
        x: sparse COO, bfloat16, float16 or float32, of the same shape and sparse_dim on all ranks, coalesced or not, with up to
            2³⁰ entries, also none.
        op: "sum" or "avg" (over all ranks), or torch's ReduceOp of that name. group: the ranks; those given to init if None.
        mode: "exact": the result is coalesced: ids in ascending order, each once. The host learns how many they are, and waits for
            the exchange of ids, not for values. "padded": nothing waits, so that it can be captured in a CUDA graph. The result has
            ``ranks · max_nnz`` entries: behind the ids come entries of zeros with the last id again. It is not marked as coalesced.
        ctx: of `create_sparse_all_reduce_context`; one is kept for each (group, width, dtype) if None, and grows.
        max_nnz: "padded" without ctx: entries of x at most, the same on all ranks.
        wire_dtype: the dtype in which values travel, if not that of x: torch.bfloat16, or "bf16", halves the bytes of float32;
            torch.float32, or "fp32", keeps sums of equal ids in 16 bits exact. With a ctx it is that of the ctx.

    Returns:
        x.

    Numerics: entries of one id are added in fp32 in their order, rounded to the dtype that travels, added in fp32 in the order of
    the ranks, divided by their number for "avg", and rounded once: the same bits on all ranks and on every repeat, those of
    `fluxlike.reference.sparse_all_reduce`. Without gradients.

    Raises:
        ValueError: layout, dtype, device, names; too many entries. RuntimeError: no init; "exact" in a graph capture.
        CallMismatch (a ValueError), on all ranks: ranks pass other shapes, dtypes or options. PeerTimeout: a wait ran out.
    """
    # indices and values are inference tensors where x is one, and only there
    with torch.inference_mode(isinstance(x, torch.Tensor) and x.is_inference()):
        x.data = _call(x, op, group, mode, ctx, max_nnz, wire_dtype)
        increment_version(x)  # autograd, which may have saved it, does not see that it has other entries
    return x


def sparse_all_reduce(
    x: torch.Tensor,
    op: validate.Reduction = "sum",
    group: dist.ProcessGroup | None = None,
    mode: str = "exact",
    *,
    ctx: SparseAllReduceContext | None = None,
    max_nnz: int | None = None,
    wire_dtype: torch.dtype | str | None = None,
) -> torch.Tensor:
    """`sparse_all_reduce_` into a new tensor."""
    return _call(x, op, group, mode, ctx, max_nnz, wire_dtype)


def sparse_reduce_scatter(
    x: torch.Tensor,
    op: validate.Reduction = "sum",
    group: dist.ProcessGroup | None = None,
    mode: str = "exact",
    *,
    max_nnz: int | None = None,
    wire_dtype: torch.dtype | str | None = None,
) -> torch.Tensor:
    """This rank's rows of `sparse_all_reduce`, for tables whose rows are spread over the ranks.

    Args:
        x: sparse COO with sparse_dim=1, of the shape [N, …] of the whole table; else as in `sparse_all_reduce_`, as are the others.

    Returns:
        A new sparse tensor [rows, …], whose ids count from the first row of this rank: the rows when N rows are split as
        torch.chunk splits, so the last ranks may have fewer or none. Values travel once, to the rank that has their row.

    Numerics, errors: those of `sparse_all_reduce_`.
    """
    return _call(x, op, group, mode, None, max_nnz, wire_dtype, scatter=True)


def _call(
    x: Any, op: Any, group: dist.ProcessGroup | None, mode: str, ctx: SparseAllReduceContext | None, max_nnz: int | None,
    wire_dtype: torch.dtype | str | None, scatter: bool = False,
) -> torch.Tensor:  # fmt: skip
    op = validate.named(op)
    if "torch._dynamo" not in sys.modules:
        return call(x, op, group, mode, ctx, max_nnz, wire_dtype, scatter)
    # Dynamo leaves a function with sparse tensors alone, but would compile those that it calls, which are ours.
    from . import library_collectives

    return library_collectives.sparse_call(x, op, group, mode, ctx, max_nnz, wire_dtype, scatter)


def call(
    x: Any, op: str, group: dist.ProcessGroup | None, mode: str, ctx: SparseAllReduceContext | None, max_nnz: int | None,
    wire_dtype: torch.dtype | str | None, scatter: bool,
) -> torch.Tensor:  # fmt: skip
    """`sparse_all_reduce`, which torch.compile does not see."""
    if ctx is not None and type(ctx) is not SparseAllReduceContext:
        check_context(NAME, ctx, SparseAllReduceContext, group)
    control = resolve(group) if ctx is None else ctx.control
    max_nnz = tiling.number(max_nnz)
    name = SCATTER if scatter else NAME
    with torch.no_grad(), Refusing(name, control), control.lock:
        wire = check(x, op, mode, ctx, group, max_nnz, wire_dtype, name)
        width = math.prod(x.shape[x.sparse_dim() :])
        if ctx is None:
            ctx = _context(control, x._nnz() if mode == "exact" else max_nnz, mode, width, x.dtype, wire)  # type: ignore[arg-type]
        made = _padded(ctx, x, op, max_nnz, scatter) if mode == "padded" else _exact(ctx, x, op, scatter)
    with torch.no_grad():
        return _result(x, *made)


def _context(
    control: ControlGroup, entries: int, mode: str, width: int, dtype: torch.dtype, wire: torch.dtype
) -> SparseAllReduceContext:
    """The context of calls without one. The first call agrees on its size; "exact" calls learn with the ids if it must grow."""

    def make(wanted: dict[str, int]) -> SparseAllReduceContext:
        return SparseAllReduceContext(control, wanted["rows"], width, dtype, wire)

    key = (NAME, control.name, width, dtype, wire)
    known = world.current().cached.get(key)
    if known is not None and mode == "exact" and known.fits({}):
        return known  # type: ignore[no-any-return]
    if mode == "exact" and not world.current().executor.is_capturing():
        in_step(control)
        entries = max(control.gather(entries, f"sizing {NAME} of {width} columns, {dtype}, {wire} on the wire"))
    most = countable(control.size, entries)
    return kept(key, control, {"rows": max(entries, ROW)}, make, most)  # type: ignore[no-any-return]


#: What a call comes to: ids, values, whether they are coalesced, and the context where they are those of this rank's rows.
Made = tuple[torch.Tensor, torch.Tensor, bool, SparseAllReduceContext | None]


def _result(
    x: torch.Tensor, ids: torch.Tensor, values: torch.Tensor, coalesced: bool, shard_of: SparseAllReduceContext | None
) -> torch.Tensor:
    """The sparse tensor like x, or like this rank's rows of it."""
    dims, indices, shape = x.shape[: x.sparse_dim()], [], x.shape
    if shard_of is not None:
        rows = rows_of(shape[0], shard_of.size, shard_of.rank)
        if rows == 0:  # where not even the padding has a place
            ids, values = ids[:0], values[:0]
        shape = torch.Size([rows, *shape[1:]])
    for dim in reversed(range(1, len(dims))):
        indices.append(ids % dims[dim])
        ids = ids // dims[dim]
    indices.append(ids)
    values = values.view(values.shape[0], *x.shape[x.sparse_dim() :])
    return torch.sparse_coo_tensor(
        torch.stack(indices[::-1]), values, shape, device=x.device, is_coalesced=coalesced, check_invariants=False
    )  # fmt: skip


def _summed(
    ctx: SparseAllReduceContext, pending: Pending, x: torch.Tensor, values: torch.Tensor, rows: int, op: str, mode: str,
    scatter: bool,
) -> torch.Tensor:
    """`run` of a call whose ids have been exchanged."""
    owned = ctx.owned and not scatter
    dims = ["x".join(map(str, part)) for part in (x.shape[: x.sparse_dim()], x.shape[x.sparse_dim() :])]
    path = "scatter" if scatter else "owned" if owned else "direct"
    with ctx.begin(path, op=op, mode=mode, shape=":".join(dims)):
        return ctx.run(pending, values, rows, op, owned, mode == "padded")


def _exact(ctx: SparseAllReduceContext, x: torch.Tensor, op: str, scatter: bool) -> Made:
    name = SCATTER if scatter else NAME
    if ctx.world.executor.is_capturing():
        raise RuntimeError(f"{name}: mode='exact' waits for the number of ids, which a graph capture cannot; use mode='padded'")
    ids, values, table_rows = sparse_index.entries_of(x)
    pending = ctx.pending_of(ids, ctx.rows, table_rows, scatter)
    union, _, most, outside = pending.read()
    if outside:  # on all ranks, as below
        raise ValueError(
            f"{name}: rank {ctx.group_ranks[outside - 1]} has ids below 0 or not below {table_rows}, the rows of the table, so no "
            "rank goes on; torch.sparse.check_sparse_tensor_invariants.enable() finds where such a tensor is made"
        )
    if most > ctx.rows:  # on all ranks: they have read the same
        ctx = _context(ctx.control, most, "padded", ctx.width, ctx.dtype, ctx.wire)
        pending = ctx.pending_of(ids, ctx.rows, table_rows, scatter)
        union = pending.read()[0]
    y = _summed(ctx, pending, x, values, union, op, "exact", scatter)
    return pending.table.ids[:union], y, True, ctx if scatter else None


def _padded(ctx: SparseAllReduceContext, x: torch.Tensor, op: str, max_nnz: int | None, scatter: bool) -> Made:
    ids, values, table_rows = sparse_index.entries_of(x)
    capacity = ctx.rows if max_nnz is None else max_nnz
    pending = ctx.pending_of(ids, capacity, table_rows, scatter)
    y = _summed(ctx, pending, x, values, ctx.size * capacity, op, "padded", scatter)
    return pending.table.ids, y, False, ctx if scatter else None

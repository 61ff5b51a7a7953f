"""Which rank has which ids, for the kernel of `kernels/sparse_all_reduce.py`, without a word from the host.

The *slots* of a rank are its distinct ids in ascending order, the *union rows* those of all ranks. `local` finds the slots, whose
ids are exchanged; `table` merges the ids of all ranks: torch sorts, `kernels/sparse_index.py` does the rest. Sizes are those of the
capacity, not of the ids, so nothing synchronises, and all of it can be captured in a CUDA graph. The same on every repeat.
"""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..kernels import sparse_index as kernels
from ..kernels.tiles import cdiv
from .exchange import Compiled
from .group import Prepared
from .tiling import round_up

if TYPE_CHECKING:
    from .group import GroupContext

#: Words of a rank's message in front of its ids.
HEAD = kernels.HEAD.value
#: Each rank has a multiple of so many rows of staging.
ROW = 16
#: A multiple of which lists of entries have keys.
ROOM = 256
#: Keys of a block at least, and blocks of a list at most.
BLOCK, BLOCKS = 1024, 4096
_COMPILED = Compiled(warps=4)


class Local(NamedTuple):
    """The entries of this rank; see `sparse_all_reduce_kernel`."""

    #: Entries in the order of their ids, those of one id in the order in which they came: int64, [entries] or longer.
    order: torch.Tensor
    #: Where the entries of each slot begin in it, and those of the last one end: int32 [capacity + 1].
    starts: torch.Tensor
    #: What the other ranks need: [HEAD + capacity], the number of distinct ids, whether some are outside of the table, and those
    #: that there is room for.
    message: torch.Tensor


class Table(NamedTuple):
    """The union, as this rank needs it; see `sparse_all_reduce_kernel`."""

    #: int64 [ranks · capacity]: the ids in ascending order, the last one again and again behind them (0 where there is none).
    ids: torch.Tensor
    #: int32 [ranks · capacity, ranks].
    slots: torch.Tensor
    #: int32 [capacity].
    targets: torch.Tensor
    #: int32 [capacity].
    place: torch.Tensor
    #: int32 [ranks · capacity].
    owners: torch.Tensor
    #: int32 [ranks · capacity] where ids have owners.
    staged: torch.Tensor
    #: int64 [4]: ids of the union, slots of this rank, the most distinct ids that any rank has; 1 + a rank that has ids outside of
    #: the table, or 0.
    meta: torch.Tensor


def entries_of(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Ids [entries], values [entries, width], and the rows of the table; several sparse dimensions count as one."""
    indices, values, dims = x._indices(), x._values(), x.shape[: x.sparse_dim()]
    ids = indices[0]
    if len(dims) > 1:  # what is outside of one dimension would be another row, and no id outside of the table
        outside = (ids < 0) | (ids >= dims[0])
        for dim in range(1, len(dims)):
            outside |= (indices[dim] < 0) | (indices[dim] >= dims[dim])
            ids = ids * dims[dim] + indices[dim]
        ids = ids.masked_fill(outside, -1)
    return ids, values.reshape(values.shape[0], math.prod(x.shape[x.sparse_dim() :])).contiguous(), math.prod(dims)


def room(capacity: int) -> int:
    """Rows of staging of each rank."""
    return round_up(capacity, ROW)


def key_dtype(rows: int) -> torch.dtype:
    """What holds ids below ``rows`` and one more, for the end of a list."""
    return torch.int32 if rows < torch.iinfo(torch.int32).max else torch.int64


def _bucket(entries: int) -> int:
    """A length for lists of so many ids, one for many numbers of them: what is launched for a length is kept."""
    step = max(ROOM, (1 << entries.bit_length()) // 8)
    return max(cdiv(entries, step), 1) * step


def _blocks(number: int) -> tuple[int, int, int]:
    """Keys of a block, number of blocks, and that rounded up to a power of two."""
    block = max(BLOCK, 1 << (cdiv(number, BLOCKS) - 1).bit_length())
    blocks = cdiv(number, block)
    return block, blocks, 1 << (blocks - 1).bit_length()


def _end(dtype: torch.dtype) -> int:
    """What is no id and stands behind all."""
    return torch.iinfo(dtype).max


def local(ctx: "GroupContext", ids: torch.Tensor, capacity: int, dtype: torch.dtype, rows: int) -> Local:
    """The slots of ``ids`` [entries], of which those beyond ``capacity`` are left out; as keys of ``dtype``.

    ``rows``: of the table; ids outside of it become -1 or ``rows``, so that none looks like another id.
    """
    number, end = _bucket(ids.numel()), _end(dtype)
    padded = torch.empty(number, dtype=dtype, device=ids.device)
    padded[: ids.numel()].copy_(ids.clamp(-1, min(rows, torch.iinfo(ids.dtype).max)))
    padded[ids.numel() :].fill_(end)
    keys, order = torch.sort(padded, stable=True)
    block, programs, blocks = _blocks(number)
    counts = torch.empty(2 * programs, dtype=torch.int32, device=ids.device)
    starts = torch.empty(capacity + 1, dtype=torch.int32, device=ids.device)
    message = torch.empty(HEAD + capacity, dtype=dtype, device=ids.device)
    tensors = keys, counts, starts, message

    def launches() -> list[Prepared]:
        kinds: tuple[tuple[Any, tuple[int, ...], dict[str, int]], ...] = (
            (kernels.sparse_index_count_kernel, (number, capacity + 1, number, HEAD + capacity), {}),
            (kernels.sparse_index_slots_kernel, (number, capacity, rows), {"BLOCKS": blocks}),
        )
        return [
            ctx.prepare(kernel, programs, (*tensors, *sizes), dict(END=end, B=block, **more), _COMPILED, (0, 1, 2, 3))
            for kernel, sizes, more in kinds
        ]

    for launch in ctx.plan(("local", number, capacity, dtype, rows), launches)[1]:
        launch(tensors)
    return Local(order, starts, message)


def shard(ctx: "GroupContext", messages: torch.Tensor, chunk: int) -> Table:
    """`table` of the ids that belong to this rank, as ids below ``chunk``: id i belongs to rank i // chunk, who alone reads it."""
    ids, end, rank = messages[:, HEAD:], _end(messages.dtype), ctx.rank
    # the end of a list is behind all, and what is behind it would wrap in the dtype of the ids
    mine = (ids >= rank * chunk) & (ids < min((rank + 1) * chunk, end))
    kept = torch.cat([messages[:, :HEAD], torch.where(mine, ids - rank * chunk, end)], 1)
    targets = (messages[rank, HEAD:] // chunk).clamp(0, ctx.size - 1)  # also of ids outside of the table
    return table(ctx, kept, False)._replace(targets=targets.to(torch.int32))


def table(ctx: "GroupContext", messages: torch.Tensor, owned: bool) -> Table:
    """The union of the ids in ``messages`` [ranks, HEAD + capacity]. ``owned``: ids of several ranks get owners."""
    ranks, capacity = messages.shape[0], messages.shape[1] - HEAD
    number, end = ranks * capacity, _end(messages.dtype)
    keys, entries = torch.sort(messages[:, HEAD:].reshape(-1), stable=True)
    block, programs, blocks = _blocks(number)
    words = lambda *shape: torch.empty(shape, dtype=torch.int32, device=messages.device)  # noqa: E731
    counts, slots, targets, place = words(2 * programs), words(number, ranks), words(capacity), words(capacity)
    owners, staged = words(number), words(number if owned else 1)
    ids, meta = (torch.empty(n, dtype=torch.int64, device=messages.device) for n in (number, 4))
    tensors = (
        (keys, counts, slots, keys),
        (keys, entries, counts, messages, ids, slots, place, meta),
        (slots, place, meta, owners, staged, targets),
    )

    def launches() -> list[Prepared]:
        kinds = (
            (kernels.sparse_index_count_kernel, (number, number * ranks, -1, 0), dict(END=end, B=block)),
            (kernels.sparse_index_rows_kernel, (number, capacity, ctx.rank), dict(R=ranks, END=end, B=block, BLOCKS=blocks)),
            (kernels.sparse_index_owners_kernel, (number, capacity, room(capacity), ctx.rank), dict(R=ranks, OWNED=owned, B=block)),
        )
        return [
            ctx.prepare(kernel, programs, (*args, *sizes), constants, _COMPILED, tuple(range(len(args))))
            for args, (kernel, sizes, constants) in zip(tensors, kinds, strict=True)
        ]

    for launch, args in zip(ctx.plan(("table", capacity, messages.dtype, owned), launches)[1], tensors, strict=True):
        launch(args)
    return Table(ids, slots, targets, place, owners, staged, meta)

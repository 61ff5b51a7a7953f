"""Which rank has which ids, for the kernel of `kernels/sparse_all_reduce.py`: by torch, without a word from the host.

The *slots* of a rank are its distinct ids in ascending order, the *union rows* those of all ranks. `local` finds the slots, whose
ids are exchanged; `table` merges the ids of all ranks. Sizes are those of the capacity, not of the ids, so nothing synchronises,
and all of it can be captured in a CUDA graph. All results are the same on every repeat: writes to one place all write the same, but
for places behind the end, which nobody reads.
"""

import math
from typing import NamedTuple

import torch

#: Words of a rank's message in front of its ids: their number, and none.
HEAD = 4


class Local(NamedTuple):
    """The entries of this rank; see `sparse_all_reduce_kernel`."""

    #: Entries in the order of their ids, those of one id in the order in which they came: int64 [entries].
    order: torch.Tensor
    #: Where the entries of each slot begin in it: int32 [capacity + 2], the last one for nothing.
    starts: torch.Tensor
    #: What the other ranks need: [HEAD + capacity], the number of distinct ids and those that there is room for.
    message: torch.Tensor


class Table(NamedTuple):
    """The union, as this rank needs it; see `sparse_all_reduce_kernel`."""

    #: int64 [ranks · capacity]: the ids in ascending order, the last one again and again behind them (0 where there is none).
    ids: torch.Tensor
    #: int32 [ranks · capacity + 1, ranks].
    slots: torch.Tensor
    #: int32 [capacity].
    targets: torch.Tensor
    #: int32 [capacity + 1].
    place: torch.Tensor
    #: int32 [ranks · capacity].
    owners: torch.Tensor
    #: int64 [4]: ids of the union, slots of this rank, the most distinct ids that any rank has, ids that at least two ranks have.
    meta: torch.Tensor


def entries_of(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Ids [entries], values [entries, width], and the rows of the table; several sparse dimensions count as one."""
    indices, values, dims = x._indices(), x._values(), x.shape[: x.sparse_dim()]
    ids = indices[0]
    for dim in range(1, len(dims)):
        ids = ids * dims[dim] + indices[dim]
    return ids, values.reshape(values.shape[0], math.prod(x.shape[x.sparse_dim() :])).contiguous(), math.prod(dims)


def key_dtype(rows: int) -> torch.dtype:
    """What holds ids below ``rows`` and one more, for the end of a list."""
    return torch.int32 if rows < torch.iinfo(torch.int32).max else torch.int64


def local(ids: torch.Tensor, capacity: int) -> Local:
    """The slots of ``ids`` [entries], of which those beyond ``capacity`` are left out."""
    device = ids.device
    keys, order = torch.sort(ids, stable=True)
    entries = ids.numel()
    first = torch.ones_like(keys, dtype=torch.bool)
    first[1:] = keys[1:] != keys[:-1]
    slot = torch.cumsum(first, 0) - 1
    at = slot.clamp_max(capacity)
    message = torch.full((HEAD + capacity + 1,), torch.iinfo(ids.dtype).max, dtype=ids.dtype, device=device)
    message.scatter_(0, at + HEAD, keys)
    message[0:1] = slot[-1:] + 1 if entries else 0
    starts = torch.full((capacity + 2,), entries, dtype=torch.int32, device=device)
    position = torch.arange(entries, dtype=torch.int32, device=device)
    starts.scatter_(0, torch.where(first & (slot <= capacity), slot, capacity + 1), position)
    return Local(order, starts, message[: HEAD + capacity])


def shard(messages: torch.Tensor, rank: int, chunk: int) -> Table:
    """`table` of the ids that belong to this rank, as ids below ``chunk``: id i belongs to rank i // chunk, who alone reads it."""
    ids, end = messages[:, HEAD:], torch.iinfo(messages.dtype).max
    mine = (ids >= rank * chunk) & (ids < (rank + 1) * chunk)  # the end of a list is behind all
    kept = torch.cat([messages[:, :HEAD], torch.where(mine, ids - rank * chunk, end)], 1)
    return table(kept, rank, False)._replace(targets=(messages[rank, HEAD:] // chunk).to(torch.int32))


def table(messages: torch.Tensor, rank: int, owned: bool) -> Table:
    """The union of the ids in ``messages`` [ranks, HEAD + capacity]. ``owned``: ids of several ranks get owners."""
    ranks, capacity = messages.shape[0], messages.shape[1] - HEAD
    rows, device, end = ranks * capacity, messages.device, torch.iinfo(messages.dtype).max
    keys, entry = torch.sort(messages[:, HEAD:].reshape(-1), stable=True)
    there = keys != end
    first = there.clone()
    first[1:] &= keys[1:] != keys[:-1]
    row = torch.cumsum(first, 0) - 1
    source, slot = entry // capacity, (entry % capacity).to(torch.int32)
    ids = torch.zeros(rows + 1, dtype=torch.int64, device=device)
    ids.scatter_(0, torch.where(there, row, rows), keys.to(torch.int64))
    union = row[-1:] + 1
    last = torch.where(there, keys, 0).max()
    ids = torch.where(torch.arange(rows, device=device) < union, ids[:rows], last)
    slots = torch.full(((rows + 1) * ranks,), -1, dtype=torch.int32, device=device)
    slots.scatter_(0, torch.where(there, row * ranks + source, rows * ranks), slot)
    slots = slots.view(rows + 1, ranks)
    place = torch.zeros(capacity + 1, dtype=torch.int32, device=device)
    place.scatter_(0, torch.where(there & (source == rank), slot.to(torch.int64), capacity), row.to(torch.int32))
    has = slots[:rows] >= 0
    number = has.sum(1, dtype=torch.int32)
    if owned:
        turn = torch.arange(rows, dtype=torch.int32, device=device) % number.clamp_min(1)
        owner = (has & (has.cumsum(1, dtype=torch.int32) == (turn + 1)[:, None])).to(torch.int32).argmax(1)
        owners = torch.where(number > 1, owner, -1).to(torch.int32)
    else:
        owners = torch.full((rows,), -1, dtype=torch.int32, device=device)
    counts = messages[:, 0].to(torch.int64)
    own = counts[rank : rank + 1].clamp_max(capacity)
    targets = owners[place[:capacity]]
    return Table(ids, slots, targets, place, owners, torch.cat([union, own, counts.max().view(1), (number > 1).sum().view(1)]))

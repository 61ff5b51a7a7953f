"""What `ops.sparse_index` finds out, by torch alone on any device: for the bench's account of bytes, and for tests to compare."""

import torch

from ..kernels.sparse_index import NONE, NOWHERE
from ..ops.sparse_index import HEAD, Local, Table, room


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
    read = has & (owners < 0)[:, None] | (torch.arange(ranks, device=device) == owners[:, None])
    at = (torch.arange(ranks, device=device) * room(capacity) + slots[:rows]).to(torch.int32)
    staged = torch.where(read, at, NONE.value).amax(1)
    staged = torch.where(owners == rank, NOWHERE.value, staged)
    meta = torch.cat([union, own, counts.max().view(1), torch.zeros_like(union)])
    return Table(ids, slots, targets, place, owners, staged, meta)

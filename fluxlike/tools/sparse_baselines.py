"""What people do today in place of `sparse_all_reduce`, over torch.distributed; for `bench`, to be compared with.

gloo        copy to the host, gloo's own all-reduce of sparse tensors, copy back.
dense       to_dense, an all-reduce of the whole table, the rows that are not zero.
horovod     all-gather ids and values, coalesce: what Horovod does, and most that is written by hand.
v1 … v6     gather the distinct ids to rank 0, which merges and broadcasts them; place the rows into the union's, all-reduce those.
            The versions differ in how they find the places: v1 a loop with nonzero, v2 a loop with where, v3 that loop in a CUDA
            graph, v4 one comparison of all with all, v5 a kernel in which each lane looks for one id, v6 a kernel that looks for a
            few ids with all lanes, from the first place on where they can be, and stops when it has found them.
searchsorted  the same with torch.searchsorted, as both lists are in order.

Each takes an uncoalesced tensor with sparse_dim=1 and dense_dim=1, and returns ids in ascending order and their values.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from ..runtime import world

Found = tuple[torch.Tensor, torch.Tensor]
#: Ids of a program of v5 and of v6, and ids of the union that one turn looks at.
LANES, FEW, TILE = 32, 64, 256


def gloo(x: torch.Tensor, group: dist.ProcessGroup) -> Found:
    """``group``: of gloo."""
    host = x.coalesce().to("cpu", copy=True)  # of one entry coalesce() makes no new values, and these are summed in place
    dist.all_reduce(host, group=group)
    total = host.coalesce().to(x.device)
    return total.indices()[0], total.values()


def dense(x: torch.Tensor) -> Found:
    whole = x.to_dense()
    dist.all_reduce(whole)
    ids = whole.abs().amax(1).nonzero().squeeze(1)
    return ids, whole[ids]


def horovod(x: torch.Tensor) -> Found:
    ranks = dist.get_world_size()
    sizes = torch.empty(ranks, dtype=torch.int64, device=x.device)
    dist.all_gather(list(sizes.split(1)), torch.tensor([x._nnz()], device=x.device))
    entries = sizes.tolist()
    ids = _gathered(x._indices()[0].contiguous(), entries)
    values = _gathered(x._values().contiguous(), entries)
    total = torch.sparse_coo_tensor(ids[None], values, x.shape, check_invariants=False).coalesce()
    return total.indices()[0], total.values()


def _gathered(mine: torch.Tensor, entries: list[int]) -> torch.Tensor:
    whole = mine.new_empty(sum(entries), *mine.shape[1:])
    if len(set(entries)) == 1 and mine.is_cuda:
        dist.all_gather_into_tensor(whole, mine)
        return whole
    most = max(entries)
    padded = torch.cat([mine, mine.new_zeros(most - len(mine), *mine.shape[1:])])
    parts = [torch.empty_like(padded) for _ in entries]
    dist.all_gather(parts, padded)
    return torch.cat([part[:count] for part, count in zip(parts, entries, strict=True)], out=whole)


# -- through the union: v1 … v6 --------------------------------------------------------------------------------------------


def padded_ids(ids: torch.Tensor) -> torch.Tensor:
    """This rank's distinct ids, and -1 up to the number that the rank with the most has."""
    counts = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=ids.device)
    counts[dist.get_rank()] = len(ids)
    dist.all_reduce(counts)
    return torch.nn.functional.pad(ids, (0, int(counts.max()) - len(ids)), value=-1)


def union_of(ids: torch.Tensor) -> torch.Tensor:
    """The ids of all ranks in ascending order, merged by rank 0."""
    first = dist.get_rank() == 0
    parts = [torch.empty_like(ids) for _ in range(dist.get_world_size())] if first else None
    dist.gather(ids, parts)
    number = torch.zeros((), dtype=torch.int64, device=ids.device)
    union = ids
    if parts is not None:
        union = torch.cat(parts).unique()
        union = union[union != -1]
        number.fill_(len(union))
    dist.broadcast(number, 0)
    if not first:
        union = ids.new_empty(int(number))
    dist.broadcast(union, 0)
    return union


def through_union(x: torch.Tensor, places: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Found:
    """``places(ids, union)``: where in the union each of these ids is."""
    x = x.coalesce()
    ids = x.indices()[0]
    union = union_of(padded_ids(ids))
    rows = torch.zeros(len(union), x.shape[1], dtype=x.dtype, device=x.device)
    rows[places(ids, union)] = x.values()
    dist.all_reduce(rows)
    return union, rows


def by_nonzero(ids: torch.Tensor, union: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.nonzero(union == one)[0] for one in ids]) if len(ids) else ids


def by_where(ids: torch.Tensor, union: torch.Tensor) -> torch.Tensor:
    found = torch.zeros_like(ids)
    for place, one in zip(torch.arange(len(union), device=ids.device), union, strict=True):
        torch.where(ids == one, place, found, out=found)
    return found


class ByGraph:
    """`by_where` in a CUDA graph, for lists of one size; longer or shorter ones make it anew."""

    def __init__(self) -> None:
        self.graph: Any = None
        self.sizes = 0, 0

    def __call__(self, ids: torch.Tensor, union: torch.Tensor) -> torch.Tensor:
        if not ids.is_cuda:
            return by_where(ids, union)
        if self.graph is None or (len(ids), len(union)) != self.sizes:
            self.sizes = len(ids), len(union)
            self.ids, self.union = ids.clone(), union.clone()
            by_where(self.ids, self.union[:2])  # what loads kernels cannot be captured
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.found = by_where(self.ids, self.union)
        self.ids.copy_(ids)
        self.union.copy_(union)
        self.graph.replay()
        return self.found


def by_comparison(ids: torch.Tensor, union: torch.Tensor) -> torch.Tensor:
    return (ids[None] == union[:, None]).max(0)[1] if len(ids) else ids


@triton.jit
def lanes_kernel(ids, union, found, number, size, LANES: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each lane looks through all of the union for one id."""
    at = tl.program_id(0) * LANES + tl.arange(0, LANES)
    mine = tl.load(ids + at, mask=at < number, other=-1)
    place = tl.zeros((LANES,), tl.int64)
    for start in range(0, size, TILE):
        there = start + tl.arange(0, TILE)
        other = tl.load(union + there, mask=there < size, other=-2)
        place = tl.maximum(place, tl.max(tl.where(mine[:, None] == other[None, :], there[None, :], 0), axis=1).to(tl.int64))
    tl.store(found + at, place, mask=at < number)


@triton.jit
def few_kernel(ids, union, found, number, size, FEW: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """All lanes look for FEW ids, from the first tile on where one can be, until all are found: no id is before its own place."""
    at = tl.program_id(0) * FEW + tl.arange(0, FEW)
    mine = tl.load(ids + at, mask=at < number, other=-1)
    wanted = tl.minimum(number - tl.program_id(0) * FEW, FEW)
    place = tl.zeros((FEW,), tl.int64) - 1
    start = tl.program_id(0) * FEW // TILE * TILE
    while wanted > 0:
        there = start + tl.arange(0, TILE)
        other = tl.load(union + there, mask=there < size, other=-2)
        matches = mine[:, None] == other[None, :]
        place = tl.maximum(place, tl.max(tl.where(matches, there[None, :], -1), axis=1).to(tl.int64))
        start += TILE
        wanted = tl.where(start < size, wanted - tl.sum(tl.sum(matches.to(tl.int32), axis=1), axis=0), 0)
    tl.store(found + at, place, mask=at < number)


def _launched(kernel: Any, each: int, constants: dict[str, int], ids: torch.Tensor, union: torch.Tensor) -> torch.Tensor:
    found = torch.empty(len(ids), dtype=torch.int64, device=ids.device)
    if len(ids):
        args = (ids.contiguous(), union, found, len(ids), len(union))
        world.current().executor.launch(kernel, -(-len(ids) // each), args, constants, 8, 1)
    return found


by_lanes = functools.partial(_launched, lanes_kernel, LANES, dict(LANES=LANES, TILE=TILE))
by_few = functools.partial(_launched, few_kernel, FEW, dict(FEW=FEW, TILE=TILE))


def by_search(ids: torch.Tensor, union: torch.Tensor) -> torch.Tensor:
    return torch.searchsorted(union, ids)


def versions() -> dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    """How each version finds the places."""
    return {
        "v1": by_nonzero, "v2": by_where, "v3": ByGraph(), "v4": by_comparison, "v5": by_lanes, "v6": by_few,
        "searchsorted": by_search,
    }  # fmt: skip

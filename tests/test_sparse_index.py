"""The tables of ids: those by torch for ids that anybody can place, those by kernels against them."""

from types import SimpleNamespace

import pytest
import slow
import torch
import torch.distributed as dist
from ranks import device, run_ranks

import fluxlike
from fluxlike.ops import keeping, sparse_all_reduce, sparse_index
from fluxlike.tools import sparse_tables


def test_the_last_rows_of_a_table_that_int32_just_holds(monkeypatch):
    """Where the rows of the last rank end, one more than an id may be: in the dtype of the ids that number is a negative one."""
    rows, ranks = 2**31 - 4, 8
    assert sparse_index.key_dtype(rows) == torch.int32
    chunk = -(-rows // ranks)
    ids = [0, chunk - 1, chunk, 7 * chunk - 1, 7 * chunk, rows - 1]
    messages = torch.tensor([[0] * sparse_index.HEAD + ids] * ranks, dtype=torch.int32)
    monkeypatch.setattr(sparse_index, "table", lambda ctx, kept, owned: SimpleNamespace(_replace=lambda targets: (kept, targets)))
    end = torch.iinfo(torch.int32).max
    wanted = {0: [0, chunk - 1] + 4 * [end], 6: 3 * [end] + [chunk - 1, end, end], 7: 4 * [end] + [0, rows - 1 - 7 * chunk]}
    for rank, mine in wanted.items():
        kept, targets = sparse_index.shard(SimpleNamespace(rank=rank, size=ranks), messages, chunk)
        assert kept[0, sparse_index.HEAD :].tolist() == mine and targets.tolist() == [0, 0, 1, 6, 7, 7]


def test_kept_memory_is_no_larger_than_kernels_count(monkeypatch):
    """What a call has is checked, and what is kept for it is rounded up: but not beyond that."""
    made = []

    def context(control, rows, *args):
        made.append(rows)
        return SimpleNamespace(keep=lambda: None)

    control = SimpleNamespace(name="a", size=6, gather=lambda value, what: [value], board=None, local=SimpleNamespace(board=None))
    this = SimpleNamespace(cached={}, executor=SimpleNamespace(is_capturing=lambda: False))
    for module in (sparse_all_reduce.world, keeping.world):
        monkeypatch.setattr(module, "current", lambda: this)
    monkeypatch.setattr(sparse_all_reduce, "SparseAllReduceContext", context)
    for entries in (30_000_000, 40_000_000):
        this.cached.clear()
        sparse_all_reduce._context(control, entries, "exact", 8, torch.float32, torch.float32)
    assert made == [2**25, 51_128_986]
    assert made[-1] * 6 * 6 < 2**31 < 2**26 * 6 * 6


def test_tables_by_torch():
    here = [sparse_tables.local(torch.tensor(ids, dtype=torch.int32), 4) for ids in ([7, 2, 7, 5], [5], [2, 9, 5])]
    assert here[0].order.tolist() == [1, 3, 0, 2] and here[0].starts[:4].tolist() == [0, 1, 2, 4]
    messages = torch.stack([each.message for each in here])
    assert messages[:, 0].tolist() == [3, 1, 3]
    table = sparse_tables.table(messages, 2, True)
    assert table.ids.tolist() == [2, 5, 7] + [9] * 9 and table.meta.tolist() == [4, 3, 3, 0]
    assert table.slots[:5].tolist() == [[0, -1, 0], [1, 0, 1], [2, -1, -1], [-1, -1, 2], [-1, -1, -1]]
    assert table.staged[:5].tolist() == [0, 16, 2, 34, -1]  # each rank has 16 rows
    assert sparse_tables.table(messages, 1, True).staged[:5].tolist() == [0, -2, 2, 34, -1]
    assert table.owners[:5].tolist() == [0, 1, -1, -1, -1] and table.place[:3].tolist() == [0, 1, 3]


#: Entries, capacity, rows of the table: none, one, with room and without, more distinct ids than fit, a list without an end.
LISTS = ((0, 8, 50), (1, 8, 50), (40, 64, 50), (64, 64, 500), (300, 64, 500), (256, 256, 500), (30, 8, 6))


def drawn(entries, rows, seed):
    return torch.randint(0, rows, (entries,), generator=torch.Generator().manual_seed(seed)).to(device())


def as_by_torch(group, block, dtype):
    """Lists of one block and of many; the second rank has half as many entries."""
    rank, size, dtype = dist.get_rank(group), dist.get_world_size(group), getattr(torch, dtype)
    before, sparse_index.BLOCK = sparse_index.BLOCK, block
    try:
        with fluxlike.create_sparse_all_reduce_context((500, 3), 64, group=group) as ctx:
            for entries, capacity, rows in LISTS:
                ids = [drawn(entries if r != 1 else entries // 2, rows, r + entries) for r in range(size)]
                rights = [sparse_tables.local(mine.to(dtype), capacity) for mine in ids]
                right, got = rights[rank], sparse_index.local(ctx, ids[rank], capacity, dtype, rows)
                head, there = sparse_index.HEAD, min(int(right.message[0]), capacity)
                assert got.message[:2].tolist() == [int(right.message[0]), 0]
                assert torch.equal(got.message[head:], right.message[head:])
                assert torch.equal(got.order[: len(ids[rank])], right.order)
                assert torch.equal(got.starts[: there + 1], right.starts[: there + 1])
                messages = torch.stack([each.message for each in rights])
                for owned in (False, True):
                    right, got = sparse_tables.table(messages, rank, owned), sparse_index.table(ctx, messages, owned)
                    assert torch.equal(got.meta, right.meta) and torch.equal(got.ids, right.ids)
                    assert torch.equal(got.slots, right.slots[:-1]) and torch.equal(got.owners, right.owners)
                    assert not owned or torch.equal(got.staged, right.staged)
                    own = int(right.meta[1])
                    assert torch.equal(got.place[:own], right.place[:own]) and torch.equal(got.targets[:own], right.targets[:own])
    finally:
        sparse_index.BLOCK = before


@pytest.mark.parametrize("dtype", ("int32", "int64"))
@pytest.mark.parametrize("block", slow.behind(1, [16, 1024]))
@pytest.mark.parametrize("ranks", (2, 3))
def test_tables_by_kernels(ranks, block, dtype):
    run_ranks(as_by_torch, ranks, block=block, dtype=dtype)


def test_lists_of_many_lengths_are_few_lists():
    """So that what is launched for one is kept for others; and none is a quarter longer than its ids."""
    lengths = [sparse_index._bucket(entries) for entries in range(100_000)]
    assert all(n >= entries for entries, n in enumerate(lengths)) and lengths == sorted(lengths)
    assert all(n <= 1.25 * entries for entries, n in enumerate(lengths) if entries > 2048) and len(set(lengths)) < 60
    for number in (1, 1024, 1025, 50_000, 5_000_000):
        block, blocks, power = sparse_index._blocks(number)
        assert blocks * block >= number > (blocks - 1) * block and blocks <= min(power, sparse_index.BLOCKS) < 2 * blocks + 4096

"""Parts, rows and launches of what ranks exchange, without ranks: what has room, and that every element is sent once."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from fluxlike.ops import all_reduce, exchange
from fluxlike.ops.collectives import ALL_GATHER, BROADCAST, REDUCE, REDUCE_SCATTER

#: For each kind, rows that a set has on each of four ranks: in words, in two trips, in bulk.
ROWS = {
    REDUCE_SCATTER: (3, 3, 4),
    ALL_GATHER: (3, 3, 4),
    all_reduce.KIND: (6, 6, 8),
    REDUCE: (3, 3, 4),
    BROADCAST: (1, 1, 1),
}


@pytest.mark.parametrize("kind", ROWS, ids=lambda kind: kind.name)
def test_rows_of_a_set(kind):
    """From each other rank, in bulk from itself, too; what comes from a root comes from nobody else."""
    algos = "words", "two_shot", "bulk"
    assert tuple(kind.rows(4, algo) for algo in algos) == ROWS[kind]
    assert all(kind.rows(1, algo) > 0 for algo in algos), "a rank alone has a row, which it does not use"
    assert [kind.relayed(algo) for algo in algos] == [False, kind.rooted, False]
    for ranks, algo in itertools.product((1, 2, 3, 4, 7, 8), algos):
        most = kind.most(ranks, algo)
        assert most & (most - 1) == 0 and most * kind.rows(ranks, algo) <= exchange.SET < 2 * most * kind.rows(ranks, algo)


@pytest.mark.parametrize("kind", ROWS, ids=lambda kind: kind.name)
def test_pieces_of_parts(kind, monkeypatch):
    """In one trip each launch takes the next elements of every part, as many as a row has room for; what is left is known."""
    monkeypatch.setattr(exchange, "SET", 64 << 10)
    assert exchange.block("trees", 4) == exchange.block("bulk", 4)
    for algo, itemsize, ranks, width in itertools.product(("words", "bulk"), (2, 4), (1, 2, 3), (1, 2047, 40_000)):
        n, elements, end = ranks * width - 1, exchange.block(algo, itemsize), 0
        assert elements * itemsize == (8192 if algo == "bulk" else 2048)
        room = kind.most(ranks, algo)
        for start, parts in exchange.pieces(kind, n, width, width, algo, itemsize, ranks):
            assert start == end and parts == (n - start, width, width - start, parts.blocks)
            end = min(start + parts.blocks * elements, width)
            assert 0 < parts.blocks * elements * itemsize <= max(room, elements * itemsize)
            assert end == width or parts.blocks * elements * itemsize == room, "the launch is as large as it may be"
            assert (parts.blocks - 1) * elements < width - start
        assert end == width


def test_rows_are_as_long_as_calls_need():
    """In two trips the parts of all owners are laid out over the rows of a set, the last of which may be shorter."""
    for ranks, blocks in itertools.product((2, 3, 4, 8), (1, 2, 5)):
        for kind, algo in itertools.product(ROWS, ("words", "two_shot", "bulk")):
            asked = exchange.blocks_of_row(kind, algo, blocks, ranks)
            if not kind.relayed(algo):
                assert asked == blocks
                continue
            rows = kind.rows(ranks, algo)
            assert (asked - 1) * rows < (ranks - 1) * blocks <= asked * rows


def test_lists_have_names_of_their_own():
    """Also long ones, of which only a part is shown."""
    lists = [(1, 2), (12,), (1, 2, 3), tuple(range(100, 140)), (*range(100, 139), 140)]
    names = [exchange.listed(sizes) for sizes in lists]
    assert len(set(names)) == len(lists) and names[0] == "1+2" and all(len(name) <= 40 for name in names)


def test_launches_are_for_an_alignment():
    """A launch reads vectors as long as sizes and addresses of both tensors allow, and is not taken for other ones."""
    keys, planned = [], []
    ctx = SimpleNamespace(prepared=lambda *how: planned.append(how), plan=lambda key, make: (keys.append(key), make()))
    memory = torch.zeros(256)
    even, odd = memory[:64], memory[1:65]
    for x, y in ((even, even), (odd, even), (even, odd), (even.bfloat16(), even.bfloat16())):
        exchange.launch_for(ctx, "words", x, y, exchange.Parts(64, 16, 16, 1), "sum")
    for n, chunk in ((63, 16), (64, 15), (62, 16), (64, 18)):
        exchange.launch_for(ctx, "words", even, even, exchange.Parts(n, chunk, 16, 1), "sum")
    assert len(set(keys)) == len(keys)
    assert [how[5] for how in planned] == [4, 4, 4, 8, 1, 1, 2, 2]

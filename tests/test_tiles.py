"""The tile orders and the protocols that rest on them, as properties: every tile once, every wait met, no cycle.

Pure Python on the mirrors of the device functions, and one test that the mirrors say what the device functions say.
"""

import itertools
from collections import Counter
from collections.abc import Iterator

import mirrors
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxlike.kernels import tiles
from fluxlike.runtime import interpreter

RANKS = st.integers(1, 8)
SUBS = st.integers(1, 4)
SIDE = st.integers(1, 7)  # in tiles
GROUP = st.integers(1, 9)
PROGRAMS = st.integers(1, 9)


@given(m=st.integers(0, 500), ranks=st.integers(1, 17))
def test_rows_are_split_as_torch_chunk_splits_them(m, ranks):
    parts = [len(part) for part in torch.arange(m).chunk(ranks)] if m else []
    rows = [tiles.rows_of(m, ranks, rank) for rank in range(ranks)]
    assert rows == parts + [0] * (ranks - len(parts))
    assert sum(rows) == m
    assert max(rows) == tiles.chunk_rows(m, ranks)


@given(tiles_m=st.integers(1, 12), tiles_n=st.integers(1, 12), group=GROUP)
def test_grouped_is_a_permutation_in_bands_of_group_rows(tiles_m, tiles_n, group):
    order = [tiles.py_grouped(tile, tiles_m, tiles_n, group) for tile in range(tiles_m * tiles_n)]
    assert sorted(order) == [(row, column) for row in range(tiles_m) for column in range(tiles_n)]
    bands = [row // group for row, _ in order]
    assert bands == sorted(bands), "a band of rows was left before it was done"


@given(ranks=RANKS, subs=SUBS, unit_tiles_m=SIDE, tiles_n=SIDE, group=GROUP, merged=st.booleans())
def test_every_tile_once_and_units_in_order(ranks, subs, unit_tiles_m, tiles_n, group, merged):
    per_unit = unit_tiles_m * tiles_n  # what the host waits for, per unit: cdiv(cdiv(chunk, BM), S) · cdiv(N, BN)
    chunk = {(row, column) for row in range(unit_tiles_m * subs) for column in range(tiles_n)}
    for rank in range(ranks):
        count = per_unit * subs * (ranks - 1)
        order = [tiles.py_remote_tile(t, rank, unit_tiles_m, tiles_n, ranks, subs, group, merged) for t in range(count)]
        assert len(set(order)) == count
        by_owner = {owner: set() for owner in range(ranks) if owner != rank}
        for owner, row, column, _ in order:
            by_owner[owner].add((row, column))
        assert all(seen == chunk for seen in by_owner.values())
        assert Counter(unit for *_, unit in order) == dict.fromkeys(range((ranks - 1) * subs), per_unit)
        if not merged:
            assert [unit for *_, unit in order] == sorted(unit for *_, unit in order), "a unit is sent before it is whole"
        rows = [unit * unit_tiles_m + row % unit_tiles_m for _, row, _, unit in order]
        assert [row // group for row in rows] == sorted(row // group for row in rows) or not merged
        for owner, row, _, unit in order:
            assert owner == (rank + 1 + unit // subs) % ranks and unit % subs == row // unit_tiles_m
        own = [tiles.py_own_tile(t, unit_tiles_m, tiles_n, subs, group) for t in range(per_unit * subs)]
        assert {(row, column) for row, column, _ in own} == chunk and len(set(own)) == len(own)
        assert all(unit == row // unit_tiles_m for row, _, unit in own)
        assert [row // group for row, *_ in own] == sorted(row // group for row, *_ in own)


@given(ranks=st.integers(2, 8), subs=SUBS, unit_tiles_m=SIDE, tiles_n=SIDE, group=GROUP, merged=st.booleans())
def test_at_every_step_each_rank_sends_to_another_owner(ranks, subs, unit_tiles_m, tiles_n, group, merged):
    for t in range(unit_tiles_m * tiles_n * subs * (ranks - 1)):
        owners = [tiles.py_remote_tile(t, r, unit_tiles_m, tiles_n, ranks, subs, group, merged)[0] for r in range(ranks)]
        assert sorted(owners) == list(range(ranks)), f"tile {t} goes to {owners}"
        assert all(owner != rank for rank, owner in enumerate(owners)), "the own chunk is not sent"


@given(steps=st.integers(1, 300), programs=PROGRAMS, late=st.integers(0, 8), lag=st.integers(0, 40))
def test_shares_are_equal_and_whole(steps, programs, late, lag):
    """Each step in one share, none is empty, and `late_of` finds it: nobody waits for a part that no one has."""
    shares = min(programs, steps)
    late = min(late, shares - 1)
    lag = min(lag, tiles.longest_lag(shares, steps, late))
    starts = [mirrors.late_start(share, shares, steps, late, lag) for share in range(shares + 1)]
    sizes = [end - start for start, end in itertools.pairwise(starts)]
    assert (starts[0], starts[-1]) == (0, steps) and min(sizes) >= 1
    equal = [size + lag * (share < late) for share, size in enumerate(sizes)]
    assert max(equal) - min(equal) <= 1
    for step in range(steps):
        share = mirrors.late_of(step, shares, steps, late, lag)
        assert starts[share] <= step < starts[share + 1]
    if not lag:
        assert starts == [mirrors.share_start(share, shares, steps) for share in range(shares + 1)]
        assert all(mirrors.late_of(step, shares, steps, 0, 0) == mirrors.share_of(step, shares, steps) for step in range(steps))


@given(k_tiles=st.integers(1, 9), count=st.integers(1, 12), programs=PROGRAMS, late=st.integers(0, 8), lag=st.integers(0, 40))
def test_every_tile_of_shared_steps_is_finished_by_one_program(k_tiles, count, programs, late, lag):
    """As the kernels have it: of each tile one program has the beginning, and all behind it up to the end have kept a part."""
    steps = count * k_tiles
    shares = min(programs, steps)
    late = min(late, shares - 1)
    lag = min(lag, tiles.longest_lag(shares, steps, late))
    finished, kept = Counter(), Counter()
    waited: list[int] = []
    for program in range(shares):
        begin, end = (mirrors.late_start(share, shares, steps, late, lag) for share in (program, program + 1))
        for tile in range(begin // k_tiles, tiles.cdiv(end, k_tiles)):
            if begin > tile * k_tiles:
                kept[program] += 1
            else:
                finished[tile] += 1
                waited += range(program + 1, mirrors.late_of((tile + 1) * k_tiles - 1, shares, steps, late, lag) + 1)
    assert finished == dict.fromkeys(range(count), 1)
    assert all(times == 1 for times in kept.values()), "a program has one place for a part"
    assert sorted(waited) == sorted(kept), "a part is not added, or twice"


DEAL = {"programs": PROGRAMS, "late": st.integers(0, 9), "head_start": st.integers(0, 5), "own": st.integers(0, 40)}


@given(how=st.fixed_dictionaries(DEAL), remote=st.integers(0, 60))
def test_every_tile_is_dealt_once_and_own_ones_first(how, remote):
    programs, late, head_start, own = how["programs"], how["late"], how["head_start"], how["own"]
    if late >= programs:
        late, head_start = programs, 0
    dealt = []
    for program in range(programs):
        deal = (program, programs, late, head_start)
        turns = [mirrors.turns_before(tile, *deal) for tile in (0, own, own + remote)]
        assert turns == sorted(turns) and turns[0] == (head_start if program < late else 0)
        mine = [mirrors.dealt(turn, *deal) for turn in range(turns[0], turns[2])]
        assert mine == sorted(mine)
        assert all(tile < own for tile in mine[: turns[1] - turns[0]]) and all(tile >= own for tile in mine[turns[1] - turns[0] :])
        dealt += mine
    assert sorted(dealt) == list(range(own + remote))


@triton.jit
def say_deal(out, tile, turn, program, programs, late, head_start):
    tl.store(out, tiles.turns_before(tile, program, programs, late, head_start))
    tl.store(out + 1, tiles.dealt(turn, program, programs, late, head_start))


@settings(max_examples=60)
@given(how=st.fixed_dictionaries(DEAL), data=st.data())
def test_mirrors_of_the_deal(how, data):
    programs, late, head_start = how["programs"], how["late"], how["head_start"]
    if late >= programs:
        late, head_start = programs, 0
    program = data.draw(st.integers(0, programs - 1))
    deal = (program, programs, late, head_start)
    turn = data.draw(st.integers(head_start if program < late else 0, 12))
    out = torch.full((2,), -1, dtype=torch.int32)
    interpreter.run(say_deal, 1, out, how["own"], turn, *deal)
    assert out.tolist() == [mirrors.turns_before(how["own"], *deal), mirrors.dealt(turn, *deal)]


@triton.jit
def say_shares(out, share, step, shares, steps, late, lag):
    tl.store(out, tiles.late_start(share, shares, steps, late, lag))
    tl.store(out + 1, tiles.late_of(step, shares, steps, late, lag))
    tl.store(out + 2, tiles.share_of(step, shares, steps))


@settings(max_examples=40)
@given(data=st.data(), shares=st.integers(1, 200), steps=st.integers(200, 2**30), late=st.integers(0, 16))
def test_mirrors_of_the_shares(data, shares, steps, late):
    late = min(late, shares - 1)
    lag = data.draw(st.integers(0, min(tiles.longest_lag(shares, steps, late), 2**20)))
    share, step = data.draw(st.integers(0, shares)), data.draw(st.integers(0, steps - 1))
    out = torch.full((3,), -1, dtype=torch.int32)
    interpreter.run(say_shares, 1, out, share, step, shares, steps, late, lag)
    how = (shares, steps, late, lag)
    assert out.tolist() == [mirrors.late_start(share, *how), mirrors.late_of(step, *how), mirrors.share_of(step, shares, steps)]


@triton.jit
def say_dealt_between(out, first, end, program, programs):
    tl.store(out, tiles.dealt_between(first, end, program, programs))


@given(first=st.integers(0, 40), height=st.integers(0, 40), programs=st.integers(1, 12), data=st.data())
def test_dealt_between_counts_the_tiles_of_a_program(first, height, programs, data):
    program, out = data.draw(st.integers(0, programs - 1)), torch.full((1,), -1, dtype=torch.int32)
    interpreter.run(say_dealt_between, 1, out, first, first + height, program, programs)
    taken = [tile for tile in range(first, first + height) if tile % programs == program]
    assert out.item() == mirrors.dealt_between(first, first + height, program, programs) == len(taken)


@triton.jit
def say_tiles(
    out, tile, rank, unit_tiles_m, tiles_n, R: tl.constexpr, S: tl.constexpr, GROUP_M: tl.constexpr, MERGED: tl.constexpr
):  # fmt: skip
    owner, row, column, unit = tiles.remote_tile(tile, rank, unit_tiles_m, tiles_n, R, S, GROUP_M, MERGED)
    own_row, own_column, sub = tiles.own_tile(tile % (unit_tiles_m * tiles_n * S), unit_tiles_m, tiles_n, S, GROUP_M)
    g_row, g_column = tiles.grouped(tile % (unit_tiles_m * tiles_n), unit_tiles_m, tiles_n, GROUP_M)
    tl.store(out + 0, owner)
    tl.store(out + 1, row)
    tl.store(out + 2, column)
    tl.store(out + 3, unit)
    tl.store(out + 4, own_row)
    tl.store(out + 5, own_column)
    tl.store(out + 6, sub)
    tl.store(out + 7, g_row)
    tl.store(out + 8, g_column)


@settings(max_examples=60)
@given(data=st.data(), ranks=st.integers(2, 8), subs=SUBS, unit_tiles_m=SIDE, tiles_n=SIDE, group=GROUP, merged=st.booleans())
def test_mirrors_say_what_the_device_functions_say(data, ranks, subs, unit_tiles_m, tiles_n, group, merged):
    tile = data.draw(st.integers(0, unit_tiles_m * tiles_n * subs * (ranks - 1) - 1))
    rank = data.draw(st.integers(0, ranks - 1))
    out = torch.full((9,), -1, dtype=torch.int32)
    interpreter.run(say_tiles, 1, out, tile, rank, unit_tiles_m, tiles_n, R=ranks, S=subs, GROUP_M=group, MERGED=merged)
    per_unit = unit_tiles_m * tiles_n
    assert tuple(out.tolist()) == (
        *tiles.py_remote_tile(tile, rank, unit_tiles_m, tiles_n, ranks, subs, group, merged),
        *tiles.py_own_tile(tile % (per_unit * subs), unit_tiles_m, tiles_n, subs, group),
        *tiles.py_grouped(tile % per_unit, unit_tiles_m, tiles_n, group),
    )


# The protocols. A model of each op says what every program and every copy engine does, in order, as signals given and
# signals waited for, in the words of the kernels' docstrings. Counters only grow while a call lasts, so whether all
# come to their end does not depend on who goes first: if one order of steps ends, there is no cycle.

Step = tuple[str, tuple, int]  # ("give", signal, 1), ("wait", signal, least value) or ("clear", signal, 0)


def play(actors: dict[tuple, Iterator[Step]]) -> tuple[Counter, list]:
    """Let every actor go as far as it can until none can; returns the signals and who is stuck on what."""
    signals: Counter = Counter()
    at: dict[tuple, Step | None] = {actor: next(steps, None) for actor, steps in actors.items()}
    moved = True
    while moved:
        moved = False
        for actor, steps in actors.items():
            while (step := at[actor]) is not None and (step[0] != "wait" or signals[step[1]] >= step[2]):
                if step[0] == "give":
                    signals[step[1]] += step[2]
                elif step[0] == "clear":
                    signals[step[1]] = 0
                moved = True
                at[actor] = next(steps, None)
    return signals, [(actor, step) for actor, step in at.items() if step is not None]


class Model:
    """One rank's programs and copy engine over several calls, for M rows and tiles of one row."""

    def __init__(self, m, ranks, subs, tiles_n, group, programs, copy_engine, calls, lost=None):
        self.m, self.ranks, self.subs, self.tiles_n, self.group = m, ranks, subs, tiles_n, group
        self.programs, self.copy_engine, self.calls, self.lost = programs, copy_engine, calls, lost
        self.full = tiles.chunk_rows(m, ranks)
        self.unit_rows = tiles.cdiv(self.full, subs)
        self.per_chunk = self.unit_rows * subs * tiles_n

    def give(self, *signal, count: int = 1) -> Iterator[Step]:
        if signal[: len(self.lost or ())] != self.lost or not self.lost:
            yield "give", signal, count

    def rows(self, owner: int, sub: int) -> int:
        return min(self.unit_rows, tiles.rows_of(self.m, self.ranks, owner) - sub * self.unit_rows)

    def actors(self) -> dict[tuple, Iterator[Step]]:
        found = {}
        for rank in range(self.ranks):
            for program in range(self.programs):
                found[rank, program] = self.program(rank, program)
            if self.copy_engine and self.ranks > 1:
                found[rank, "engine"] = self.engine(rank)
        return found

    def credits(self, rank: int, call: int) -> Iterator[Step]:
        if call >= 2:  # two slot sets in turn
            for step in range(1, self.ranks):
                yield "wait", ("credit", rank, (rank + step) % self.ranks), call - 1

    def end(self, rank: int, call: int) -> Iterator[Step]:
        """Every program arrives; the last one gives the credits. Then the launch is over for all of them."""
        yield from self.give("arrived", rank, call)

    def last(self, rank: int, call: int) -> Iterator[Step]:
        yield "wait", ("arrived", rank, call), self.programs
        for step in range(1, self.ranks):
            yield from self.give("credit", (rank + step) % self.ranks, rank)
        yield "give", ("done", rank, call), 1

    def program(self, rank: int, program: int) -> Iterator[Step]:
        for call in range(self.calls):
            yield from self.call(rank, program, call)
            yield from self.end(rank, call)
            if program == 0:
                yield from self.last(rank, call)
            yield "wait", ("done", rank, call), 1
            if self.copy_engine and self.ranks > 1:
                yield "wait", ("queue", rank, call), 1

    def call(self, rank: int, program: int, call: int) -> Iterator[Step]:
        raise NotImplementedError

    def engine(self, rank: int) -> Iterator[Step]:
        raise NotImplementedError


class ReduceScatter(Model):
    def call(self, rank, program, call):
        previous, per_unit = None, self.unit_rows * self.tiles_n
        if not self.copy_engine or program == min(self.programs, per_unit) - 1:
            yield from self.credits(rank, call)
        remote = self.per_chunk * (self.ranks - 1)
        for tile in range(program, remote, self.programs):
            owner, row, column, unit = tiles.py_remote_tile(
                tile, rank, self.unit_rows, self.tiles_n, self.ranks, self.subs, self.group, not self.copy_engine
            )
            if not self.copy_engine:
                if previous:
                    yield from self.give(*previous)
                previous = ("tile", owner, rank, call, row, column)
            elif tile + self.programs >= remote or (tile + self.programs) // per_unit != unit:
                count = mirrors.dealt_between(unit * per_unit, (unit + 1) * per_unit, program, self.programs)
                yield from self.give("ready", rank, call, unit, count=count)
        if previous:
            yield from self.give(*previous)
        rows = tiles.rows_of(self.m, self.ranks, rank)
        first = (program - remote % self.programs + self.programs) % self.programs
        for tile in range(first, self.per_chunk if rows else 0, self.programs):
            row, column, sub = tiles.py_own_tile(tile, self.unit_rows, self.tiles_n, self.subs, self.group)
            for step in range(1, self.ranks):
                source = (rank + step) % self.ranks
                if row < rows and self.copy_engine:
                    yield "wait", ("full", rank, source, call, sub), 1
                elif row < rows:
                    yield "wait", ("tile", rank, source, call, row, column), 1

    def engine(self, rank):
        for call in range(self.calls):
            for unit in range((self.ranks - 1) * self.subs):
                owner, sub = (rank + 1 + unit // self.subs) % self.ranks, unit % self.subs
                yield "wait", ("ready", rank, call, unit), self.unit_rows * self.tiles_n
                yield "clear", ("ready", rank, call, unit), 0
                if self.rows(owner, sub) > 0:
                    yield from self.give("full", owner, rank, call, sub)
            yield "give", ("queue", rank, call), 1


class AllGather(Model):
    def call(self, rank, program, call):
        if program == 0 or not self.copy_engine:
            yield from self.credits(rank, call)
        if self.copy_engine and program == 0 and self.ranks > 1:
            yield from self.give("go", rank, call)
        rows = tiles.rows_of(self.m, self.ranks, rank)
        late, head_start = 0, 0
        if not self.copy_engine and self.ranks > 1:
            late, head_start = self.late(rows)
            for row in range(program, rows if program < late else 0, late or 1):
                for step in range(1, self.ranks):
                    yield from self.give("row", (rank - step) % self.ranks, rank, call, row)
        own = self.per_chunk if rows else 0
        how = (program, self.programs, late, head_start)
        end = mirrors.turns_before(own + self.per_chunk * (self.ranks - 1), *how)
        for turn in range(mirrors.turns_before(own, *how), end):
            tile = mirrors.dealt(turn, *how) - own
            source, row, _, unit = tiles.py_remote_tile(
                tile, rank, self.unit_rows, self.tiles_n, self.ranks, self.subs, self.group, True
            )
            if row < tiles.rows_of(self.m, self.ranks, source):
                if self.copy_engine:
                    yield "wait", ("full", rank, source, call, unit % self.subs), 1
                else:
                    yield "wait", ("row", rank, source, call, row), 1

    def late(self, rows: int) -> tuple[int, int]:
        """Programs that push, and the turns that they sit out."""
        pushers = min(self.group, self.programs, rows)  # any number will do; the group's is at hand
        return pushers, 2 if pushers < self.programs else 0

    def engine(self, rank):
        for call in range(self.calls):
            yield "wait", ("go", rank, call), 1
            yield "clear", ("go", rank, call), 0
            for step in range(1, self.ranks):
                for sub in range(self.subs):
                    if self.rows(rank, sub) > 0:
                        yield from self.give("full", (rank - step) % self.ranks, rank, call, sub)
            yield "give", ("queue", rank, call), 1


MODEL = {
    "m": st.integers(1, 14),
    "ranks": st.integers(1, 5),
    "subs": st.integers(1, 3),
    "tiles_n": st.integers(1, 3),
    "group": st.integers(1, 4),
    "programs": st.integers(1, 4),
    "copy_engine": st.booleans(),
}


@pytest.mark.parametrize("op", (ReduceScatter, AllGather))
@settings(max_examples=80)
@given(how=st.fixed_dictionaries(MODEL))
def test_every_wait_is_met_and_no_cycle(op, how):
    model = op(calls=4, **how)
    signals, stuck = play(model.actors())
    assert not stuck, f"{how}: {stuck[:3]}"
    # Nothing is left counted in the words that a later call uses again.
    assert not any(value for (kind, *_), value in signals.items() if kind in ("ready", "go"))
    # A flag is set once: a copy engine's word must be 0 or 1 when its call resets it.
    assert all(value == 1 for (kind, *_), value in signals.items() if kind in ("full", "tile", "row"))


@pytest.mark.parametrize(
    ("op", "copy_engine", "lost"),
    (
        (ReduceScatter, True, ("ready", 1, 2, 0)),
        (ReduceScatter, True, ("full", 0, 1, 1)),
        (ReduceScatter, False, ("tile", 2, 0, 3)),
        (ReduceScatter, True, ("credit", 0, 2)),
        (ReduceScatter, False, ("arrived", 1, 0)),
        (AllGather, True, ("go", 2, 1)),
        (AllGather, True, ("full", 1, 2, 3)),
        (AllGather, False, ("row", 0, 1, 2)),
        (AllGather, False, ("credit", 2, 1)),
    ),
)
def test_every_signal_of_the_model_is_needed(op, copy_engine, lost):
    """The check above can fail: without any one kind of signal somebody is stuck."""
    model = op(m=9, ranks=3, subs=2, tiles_n=2, group=2, programs=2, copy_engine=copy_engine, calls=4, lost=lost)
    assert play(model.actors())[1]

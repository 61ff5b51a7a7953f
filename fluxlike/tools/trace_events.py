"""What the words of a traced call mean: spans of programs and of transfers, and how much of a rank's time went where."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..kernels import trace as kernel
from ..kernels.tiles import cdiv, py_own_tile, py_remote_tile
from ..ops.trace import Traced, task_count, tile_count

#: Kinds of spans in a program's lane, in the order of legends; "tile" and "push" hold others or stand alone.
KINDS = ("compute", "wait", "store", "push", "end")
_BEGIN, _PLACE, _COMPUTED, _STORED, _SIGNAL = (
    word.value for word in (kernel.BEGIN, kernel.PLACE, kernel.COMPUTED, kernel.STORED, kernel.SIGNAL)
)
_WAITS, _CREDITS, _GO, _ENDING, _END = (
    word.value for word in (kernel.WAITS, kernel.CREDITS, kernel.GO, kernel.ENDING, kernel.END)
)


class Span(NamedTuple):
    """From ``begin`` to ``end``, in nanoseconds of the host's clock; an instant if they are equal.

    ``chunk``: whose tile it belongs to, if it is of one.
    """

    kind: str
    name: str
    begin: int
    end: int
    chunk: int | None = None


@dataclass
class Program:
    """A program of the kernel: its whole life, what it did (no two of a kind overlap), its tiles, and the signals that it gave."""

    number: int
    multiprocessor: int
    begin: int
    end: int
    spans: list[Span] = field(default_factory=list)
    tiles: list[Span] = field(default_factory=list)
    signals: list[Span] = field(default_factory=list)

    def total(self, kind: str) -> int:
        """Nanoseconds spent with ``kind``."""
        return sum(span.end - span.begin for span in self.spans if span.kind == kind)


@dataclass
class Timeline:
    """A rank's call. ``transfers``: for each lane, as "to rank 2", what was under way; ``step``: of its clock, in nanoseconds."""

    rank: int
    programs: list[Program]
    transfers: dict[str, list[Span]]
    step: int

    @property
    def begin(self) -> int:
        return min(program.begin for program in self.programs)

    @property
    def end(self) -> int:
        ends = [span.end for lane in self.transfers.values() for span in lane]
        return max([program.end for program in self.programs] + ends)


class _Tile(NamedTuple):
    """A tile that a call must compute: its number, whose chunk, which row and column of tiles."""

    number: int
    chunk: int
    row: int
    column: int

    def __str__(self) -> str:
        return f"tile ({self.row},{self.column}) of chunk {self.chunk}"


def schedule(facts: dict[str, Any]) -> Iterator[_Tile]:
    """The tiles of a call, in the order in which they are dealt."""
    ranks, subs, rank, group = facts["R"], facts["S"], facts["rank"], facts["GROUP_M"]
    tiles_n = cdiv(facts["N"], facts["BN"])
    per_chunk = tile_count(facts) // ranks
    unit_tiles_m = per_chunk // tiles_n // subs if tiles_n else 0
    own = per_chunk if facts["rows"] > 0 else 0
    remote = per_chunk * (ranks - 1)
    own_first = facts["op"] == "ag_gemm"
    merged = own_first or not facts["COPY_ENGINE"]
    for tile in range(own):
        row, column, _ = py_own_tile(tile, unit_tiles_m, tiles_n, subs, group)
        yield _Tile(tile if own_first else remote + tile, rank, row, column)
    for tile in range(remote):
        chunk, row, column, _ = py_remote_tile(tile, rank, unit_tiles_m, tiles_n, ranks, subs, group, merged)
        yield _Tile(own + tile if own_first else tile, chunk, row, column)


def timeline(traced: Traced) -> Timeline:
    """The call of a rank. RuntimeError if the kernel has left out a tile: then its times are not those of this schedule."""
    facts, ahead = traced.facts, traced.clock.offset
    words = [[value - ahead if i != _PLACE and value else value for i, value in enumerate(row)] for row in traced.times.tolist()]
    tiles = tile_count(facts)
    programs = [
        Program(number, row[_PLACE] - 1, row[_BEGIN], row[_END])
        for number, row in enumerate(words[tiles : tiles + facts["programs"]])
    ]
    for program, row in zip(programs, words[tiles:], strict=False):
        _own_spans(program, row)
    transfers: dict[str, list[Span]] = {}
    by_program: dict[int, list[_Tile]] = {program.number: [] for program in programs}
    for tile in schedule(facts):
        row = words[tile.number]
        if not (row[_BEGIN] and row[_COMPUTED] and row[_STORED] and 0 < row[_PLACE] <= len(programs)):
            raise RuntimeError(f"{facts['op']}: rank {facts['rank']} has no times of {tile}: {row}; trace a call of this version")
        by_program[row[_PLACE] - 1].append(tile)
    for program in programs:
        _tile_spans(program, [(tile, words[tile.number]) for tile in by_program[program.number]], facts, transfers)
    tasks, parts = tiles + len(programs), tiles + len(programs) + task_count(facts)
    _pushes(programs, words[tasks:parts], facts, transfers)
    _parts(programs, words[parts:], facts)
    transfers = {lane: list(_merged(spans)) for lane, spans in transfers.items()}
    for peer, sub, nbytes, begin, end in traced.copies:
        chunk = peer if facts["op"] == "gemm_rs" else facts["rank"]
        part = f", part {sub}" if facts["S"] > 1 else ""
        name = f"copy of chunk {chunk}{part}, {nbytes / 2**20:.3g} MiB"
        transfers.setdefault(f"copies to rank {peer}", []).append(Span("copy", name, begin - ahead, end - ahead))
    ordered = {lane: sorted(transfers[lane], key=lambda span: span.begin) for lane in sorted(transfers)}
    for program in programs:
        program.spans.sort(key=lambda span: (span.begin, span.end))
    return Timeline(facts["rank"], programs, ordered, _step(words))


def _own_spans(program: Program, row: Sequence[int]) -> None:
    """What a program did beside its tiles."""
    if row[_CREDITS]:
        program.spans.append(Span("wait", "wait for the peers' credits", row[_BEGIN], row[_CREDITS]))
    if row[_GO]:
        program.signals.append(Span("signal", "go, to the copy engine", row[_GO], row[_GO]))
    program.spans.append(Span("end", "end of the call", row[_ENDING], row[_END]))


def _tile_spans(
    program: Program, tiles: list[tuple[_Tile, list[int]]], facts: dict[str, Any], transfers: dict[str, list[Span]]
) -> None:
    """The tiles of a program, one after the other: a pipelined loop begins one before the last is done, which is not shown."""
    rank, ranks = facts["rank"], facts["R"]
    scatters = facts["op"] == "gemm_rs"
    tiles.sort(key=lambda pair: pair[1][_BEGIN])
    waits: list[Span] = []
    for tile, row in tiles:
        since = row[_COMPUTED if scatters else _BEGIN]
        for step in range(1, ranks):
            if row[_WAITS + step]:
                source = (rank + step) % ranks if scatters else tile.chunk
                waits.append(Span("wait", f"wait for rank {source}", since, row[_WAITS + step]))
                since = row[_WAITS + step]
    until = 0
    for tile, row in tiles:
        begin = max(row[_BEGIN], until)
        program.spans += _without(Span("compute", f"products of {tile}", begin, row[_COMPUTED], tile.chunk), waits)
        stored = max([row[_COMPUTED], *row[_WAITS + 1 : _WAITS + ranks]])
        until = row[_STORED]
        sent = scatters and tile.chunk != rank
        what = "send" if sent and not facts["COPY_ENGINE"] else "sum and store" if scatters and not sent else "store"
        program.spans.append(Span("store", f"{what} {tile}", stored, until, tile.chunk))
        program.tiles.append(Span("tile", str(tile), begin, until))
        if row[_SIGNAL]:
            program.signals.append(Span("signal", f"signal of {tile}", row[_SIGNAL], row[_SIGNAL]))
        if what == "send":
            transfers.setdefault(f"stores to rank {tile.chunk}", []).append(Span("copy", str(tile), stored, until))
    program.spans += waits


def _without(span: Span, holes: Iterable[Span]) -> Iterator[Span]:
    """The parts of a span that lie in none of ``holes``, which do not overlap each other."""
    begin = span.begin
    for hole in sorted(holes, key=lambda hole: hole.begin):
        if hole.end > begin and hole.begin < span.end:
            if hole.begin > begin:
                yield span._replace(begin=begin, end=hole.begin)
            begin = hole.end
    if begin < span.end:
        yield span._replace(begin=begin)


def _merged(spans: Sequence[Span]) -> Iterator[Span]:
    """Stores of several programs that overlap, as one span: viewers want no others in a lane."""
    for begin, end in union(spans):
        names = [span.name for span in spans if begin <= span.begin <= end]
        yield Span("copy", names[0] if len(names) == 1 else f"{len(names)} that overlap", begin, end)


def _pushes(
    programs: list[Program], rows: Sequence[Sequence[int]], facts: dict[str, Any], transfers: dict[str, list[Span]]
) -> None:
    """The tasks in which ag_gemm pushes a shard from its kernel."""
    for task, row in enumerate(rows):
        program, pieces = programs[row[_PLACE] - 1], facts["pieces"]
        part = f", part {task % pieces}" if pieces > 1 else ""
        name = f"push row of tiles {task // pieces}{part}"
        program.spans.append(Span("push", name, row[_BEGIN], row[_STORED]))
        transfers.setdefault("stores to all ranks", []).append(Span("copy", name, row[_BEGIN], row[_STORED]))
        if row[_SIGNAL]:
            text = f"signal of row of tiles {task // pieces}"
            program.signals.append(Span("signal", text, row[_SIGNAL], row[_SIGNAL]))


def _parts(programs: list[Program], rows: Sequence[Sequence[int]], facts: dict[str, Any]) -> None:
    """The parts of shared tiles that programs give to those that finish them."""
    for program, row in zip(programs, rows, strict=False):
        if not row[_PLACE]:
            continue
        arrived = row[_WAITS + 1] if facts["R"] > 1 else 0
        waits = [Span("wait", "wait for the rows of a shared tile", row[_BEGIN], arrived)] if arrived else []
        program.spans += [*waits, *_without(Span("compute", "part of a shared tile", row[_BEGIN], row[_COMPUTED]), waits)]
        program.spans.append(Span("store", "part of a shared tile", row[_COMPUTED], row[_STORED]))
        program.tiles.append(Span("tile", "part of a shared tile", row[_BEGIN], row[_STORED]))


def _step(words: Sequence[Sequence[int]]) -> int:
    """The smallest difference of two times: the clock of a GPU may go in steps of a microsecond."""
    times = sorted({value for row in words for i, value in enumerate(row) if value and i != _PLACE})
    return min((later - sooner for sooner, later in itertools.pairwise(times)), default=0)


class Summary(NamedTuple):
    """A rank's call in numbers.

    ``microseconds``: from the first program's begin to the last one's end. ``compute``, ``wait``, ``store``, ``push``: shares, 0
    to 1, of the time of all programs. ``wait_us``, ``most_wait_us``: µs that a program waits, the mean and the most.
    ``transfer_us``: µs in which at least one transfer is under way; ``hidden``: of these the share, 0 to 1, in which some program
    computes, or None if nothing was transferred.
    """

    rank: int
    microseconds: float
    compute: float
    wait: float
    store: float
    push: float
    wait_us: float
    most_wait_us: float
    transfer_us: float
    hidden: float | None

    def __str__(self) -> str:
        text = (
            f"rank {self.rank}: {self.microseconds:.1f} µs, products {self.compute:.0%}, waits {self.wait:.0%} "
            f"({self.wait_us:.1f} µs exposed a program, at most {self.most_wait_us:.1f}), stores {self.store + self.push:.0%}"
        )
        if self.hidden is not None:
            text += f"; transfers {self.transfer_us:.1f} µs, {self.hidden:.0%} under products"
        return text


def summary(line: Timeline) -> Summary:
    """What a rank's time went into: ``print(summary(timeline(recorder.read())))`` is a line about it.

    Args:
        line: of `timeline`, in nanoseconds, with one program at least.

    Raises:
        ValueError: no programs.
    """
    begin, end = line.begin, max(program.end for program in line.programs)
    whole = max(1, end - begin)
    share = {kind: sum(p.total(kind) for p in line.programs) / (whole * len(line.programs)) for kind in KINDS}
    waits = [program.total("wait") / 1e3 for program in line.programs]
    moving = union(span for lane in line.transfers.values() for span in lane)
    busy = union(span for program in line.programs for span in program.spans if span.kind == "compute")
    moved = sum(b - a for a, b in moving)
    return Summary(
        line.rank, whole / 1e3, share["compute"], share["wait"], share["store"], share["push"],
        sum(waits) / len(waits), max(waits), moved / 1e3, overlap(moving, busy) / moved if moved else None,
    )  # fmt: skip


def union(spans: Iterable[Span]) -> list[tuple[int, int]]:
    """The times at which at least one of ``spans`` is under way."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted((span.begin, span.end) for span in spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def overlap(some: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]) -> int:
    """Nanoseconds in both of two unions."""
    total = at = 0
    for begin, end in some:
        while at < len(others) and others[at][1] <= begin:
            at += 1
        for a, b in others[at:]:
            if a >= end:
                break
            total += min(end, b) - max(begin, a)
    return total

"""Tracing: what kernels write down is the schedule, each event once and in order, and the files say so. What it costs: test_ptx."""

import ctypes
import dataclasses
import importlib.util
import itertools
import json
import sys
import threading
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import mirrors
import pytest
import torch
import torch.distributed as dist
from cases import AGCase, RSCase
from ranks import TORCHRUN, device, run_fresh, run_ranks

import fluxlike
from fluxlike.kernels import trace as kernel
from fluxlike.kernels.tiles import cdiv
from fluxlike.ops import choice
from fluxlike.ops import trace as tracing
from fluxlike.runtime import world
from fluxlike.tools import once, trace_events, trace_report
from fluxlike.tools import trace as tool
from fluxlike.tools.bench_report import Shape
from fluxlike.tools.trace_events import Program, Span, Timeline

OPS = ("gemm_rs", "ag_gemm")
SCHEDULES = tool.SCHEDULES[1:]
RANKS = 3
M, N, K = 3 * 100, 130, 72  # two rows and, by the width of tiles, two or three columns of tiles a chunk, ragged
BEGIN, PLACE, COMPUTED, STORED, SIGNAL, WAITS = (
    word.value for word in (kernel.BEGIN, kernel.PLACE, kernel.COMPUTED, kernel.STORED, kernel.SIGNAL, kernel.WAITS)
)
CREDITS, GO, ENDING, END = (word.value for word in (kernel.CREDITS, kernel.GO, kernel.ENDING, kernel.END))


# what the kernels write


def traced_calls(group, op: str, schedule: str, rows: int = M) -> tuple[tracing.Traced, int]:
    """The last of three calls, of other sizes, all of them right, and how often its kernel looked at the clock (on a CPU)."""
    size, plain, readings = dist.get_world_size(group), kernel.host_time, []

    def counted(_semantic=None):
        readings.append(1)
        return plain()

    counted.__triton_builtin__ = True  # type: ignore[attr-defined]
    if op == "gemm_rs":
        ctx: Any = fluxlike.create_gemm_rs_context(M, N, dtype=torch.float32, group=group, schedule=schedule)
    else:
        ctx = fluxlike.create_ag_gemm_context(M, N, K, dtype=torch.float32, group=group, schedule=schedule)

    def call(seed: int, rows: int) -> None:
        if op == "gemm_rs":
            RSCase(rows, N, [K] * size, torch.float32, seed).check(ctx, group, schedule)
        else:
            AGCase(rows, [N] * size, K, torch.float32, seed).check(ctx, group, schedule, return_gathered=False)

    with ctx:
        call(0, rows)  # not traced
        trace = tracing.begin(ctx)
        with pytest.raises(RuntimeError, match="no kernel that can be traced was launched"):
            trace.read()
        call(1, rows)
        call(2, rows // 3)
        for times in trace._known.values():
            times.fill_(5)  # what an earlier call left, and this one may not write: which part of a push is the last is chance
        kernel.host_time = counted
        try:
            call(3, rows)
        finally:
            kernel.host_time = plain
        found = trace.read()
    return found, len(readings)


@pytest.fixture(scope="module", params=list(itertools.product(OPS, SCHEDULES)), ids=lambda pair: "-".join(pair))
def calls(request) -> list[tuple[tracing.Traced, int]]:
    op, schedule = request.param
    return run_ranks(traced_calls, RANKS, op=op, schedule=schedule)


def dealt(facts: dict[str, Any]) -> dict[int, int]:
    """The program of each tile; of a shared one, that which finishes it."""
    total, programs = sum(1 for _ in trace_events.schedule(facts)), facts["programs"]
    whole, lanes = total - facts["cut"], max(facts["lanes"], 1)
    late, head_start = facts["pushers"], facts["head_start"]
    found = {}
    for turn, program in itertools.product(range(total + head_start), range(programs)):
        if turn >= head_start or program >= late:
            found[mirrors.dealt(turn, program, programs, late, head_start)] = program
    found = {tile: program for tile, program in found.items() if tile < whole}
    k_tiles = cdiv(facts["K"], facts["BK"])
    for program in range(programs if facts["cut"] else 0):
        lane, _, _, begin, end = mirrors.lane_share(program, programs, facts["cut"], lanes, k_tiles, facts["late"], facts["lag"])
        found |= {whole + place * lanes + lane: program for place in range(cdiv(begin, k_tiles), cdiv(end, k_tiles))}
    return found


def signals(facts: dict[str, Any], tile: int) -> bool:
    """Whether a program of gemm_rs signals behind a tile for another rank: each, or the last of a unit that is copied."""
    per_chunk = tracing.tile_count(facts) // facts["R"]
    per_unit, following = per_chunk // facts["S"], tile + facts["programs"]
    return not facts["COPY_ENGINE"] or following >= per_chunk * (facts["R"] - 1) or following // per_unit != tile // per_unit


def tiles_of_a_chunk(facts: dict[str, Any]) -> list[tuple[int, int]]:
    """Row and column of each."""
    return list(itertools.product(range(cdiv(M // RANKS, facts["BM"])), range(cdiv(N, facts["BN"]))))


def words_of(traced: tracing.Traced) -> list[list[int]]:
    return traced.times.tolist()


def test_every_tile_is_there_once_and_in_order(calls) -> None:
    for traced, _ in calls:
        facts, words = traced.facts, words_of(traced)
        tiles = {tile.number: tile for tile in trace_events.schedule(facts)}
        assert sorted(tiles) == list(range(tracing.tile_count(facts))) and len(tiles_of_a_chunk(facts)) >= 4
        everywhere = ((chunk, *place) for chunk in range(RANKS) for place in tiles_of_a_chunk(facts))
        assert Counter((tile.chunk, tile.row, tile.column) for tile in tiles.values()) == Counter(everywhere)
        by_program = dealt(facts)
        for number, tile in tiles.items():
            row, own = words[number], tile.chunk == facts["rank"]
            waits = [word for word in row[WAITS + 1 : WAITS + RANKS] if word]
            assert row[PLACE] - 1 == by_program[number]
            if facts["op"] == "ag_gemm":
                assert len(waits) == (0 if own else 1) and row[SIGNAL] == 0
                order = [row[BEGIN], *waits, row[COMPUTED], row[STORED]]
            else:
                assert len(waits) == (RANKS - 1 if own else 0) and (row[SIGNAL] > 0) == (not own and signals(facts, number))
                order = [row[BEGIN], row[COMPUTED], *waits, row[STORED], *([row[SIGNAL]] if row[SIGNAL] else [])]
            assert order[0] > 0 and order == sorted(order), f"{tile}: {row}"


def test_programs(calls) -> None:
    for traced, readings in calls:
        facts, words, total = traced.facts, words_of(traced), tracing.tile_count(traced.facts)
        by_program, programs, scatters = dealt(facts), facts["programs"], facts["op"] == "gemm_rs"
        assert programs > 1
        for program, row in enumerate(words[total : total + programs]):
            mine = [words[number] for number in by_program if by_program[number] == program]
            inside = [min(tile[BEGIN] for tile in mine), max(tile[STORED] for tile in mine)] if mine else []
            order = [row[BEGIN], *inside, row[ENDING], row[END]]
            assert order == sorted(order) and row[PLACE] > 0
            sends = scatters or program < (1 if facts["COPY_ENGINE"] else facts["pushers"])
            assert (row[CREDITS] > 0) == sends and (not sends or row[BEGIN] <= row[CREDITS] <= row[ENDING])
            assert (row[GO] > 0) == (not scatters and facts["COPY_ENGINE"] == 1 and program == 0)
        tasks, parts = words[total + programs :][: tracing.task_count(facts)], words[total + programs + tracing.task_count(facts) :]
        assert len(parts) == (programs if facts["cut"] else 0)
        assert all(not any(row) or 0 < row[BEGIN] <= row[COMPUTED] <= row[STORED] for row in parts)
        pushed = 0 if facts["COPY_ENGINE"] or scatters else 2  # rows of tiles
        assert len(tasks) == pushed * facts["pieces"] and sum(row[SIGNAL] > 0 for row in tasks) == pushed
        assert all(0 < row[BEGIN] <= row[STORED] for row in tasks)
        if not TORCHRUN:  # on a CPU
            happened = sum(1 for row in words for column, value in enumerate(row) if value and column != PLACE)
            in_vain = programs if scatters and not facts["COPY_ENGINE"] else 0  # the first deferred signal of each is of no tile
            assert happened + in_vain == readings


def test_a_wait_ends_after_what_it_waits_for_was_sent(calls) -> None:
    """Across ranks, by one clock."""
    lines = {traced.facts["rank"]: (traced, {t.number: t for t in trace_events.schedule(traced.facts)}) for traced, _ in calls}
    checked = 0
    for rank, (traced, tiles) in lines.items():
        for number, tile in tiles.items():
            for step, seen in enumerate(words_of(traced)[number][WAITS + 1 : WAITS + RANKS], 1):
                if not seen:
                    continue
                source = (rank + step) % RANKS if traced.facts["op"] == "gemm_rs" else tile.chunk
                other, others = lines[source]
                allowed = traced.clock.error + other.clock.error
                if other.copies:
                    sent = min(copy[3] for copy in other.copies if copy[0] == rank)
                    allowed += other.clock.copies_error
                elif traced.facts["op"] == "gemm_rs":
                    same = next(t for t in others.values() if (t.chunk, t.row, t.column) == (rank, tile.row, tile.column))
                    sent = words_of(other)[same.number][STORED]
                else:
                    first = tracing.tile_count(other.facts) + other.facts["programs"]
                    sent = words_of(other)[first + tile.row * other.facts["pieces"]][STORED]
                assert 0 < sent - other.clock.offset <= seen - traced.clock.offset + allowed
                checked += 1
    assert checked == RANKS * (RANKS - 1) * len(tiles_of_a_chunk(calls[0][0].facts))


def test_copies(calls) -> None:
    for traced, _ in calls:
        facts = traced.facts
        peers = {(facts["rank"] + step) % RANKS for step in range(1, RANKS)}
        if not facts["COPY_ENGINE"]:
            assert traced.copies == []
            continue
        assert {peer for peer, *_ in traced.copies} == peers and len(traced.copies) == RANKS - 1
        width = K if facts["op"] == "ag_gemm" else 144  # slots have a pitch of whole vectors
        for _, sub, nbytes, begin, end in traced.copies:
            assert sub == 0 and nbytes == 100 * width * 4 and 0 < begin <= end
        assert all(a[4] <= b[3] for a, b in itertools.pairwise(sorted(traced.copies, key=lambda copy: copy[3])))


def report_of(calls) -> trace_report.Report:
    facts = calls[0][0].facts
    path = f"{'copy_engine' if facts['COPY_ENGINE'] else 'in_kernel'}/tma"
    lines = [trace_events.timeline(traced) for traced, _ in calls]
    clocks = [traced.clock for traced, _ in calls]
    took = {"traced": 12.0, "untraced": 11.5}
    return trace_report.Report(facts["op"], Shape(M, N, K), "float32", path, lines, clocks, took, {"commit": "abc"})


def test_the_json(calls, tmp_path) -> None:
    report = report_of(calls)
    saved = json.loads(report.save(tmp_path).read_text())
    assert [file.name for file in tmp_path.iterdir()] == [f"{report.name}.json"] and report.name.split("-")[3] == "float32"
    assert [clock["rank"] for clock in saved["otherData"]["clocks_ns"]] == [0, 1, 2]
    events = saved["traceEvents"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(processes.values()) == [f"rank {rank}" for rank in range(RANKS)]
    for rank, (process, (traced, _)) in enumerate(zip(processes, calls, strict=True)):
        mine = [name for (pid, _), name in lanes.items() if pid == process]
        assert sum(name.startswith("program ") for name in mine) == traced.facts["programs"]
        kind = "copies to rank" if traced.facts["COPY_ENGINE"] else "stores to"
        assert sum(name.startswith(kind) for name in mine) >= 1
        tiles = [e["name"] for e in events if e.get("cat") == "tile" and e["pid"] == process]
        assert sorted(tiles) == sorted(str(tile) for tile in trace_events.schedule(traced.facts))
        waits = {e["name"] for e in events if e.get("cat") == "wait" and e["pid"] == process}
        assert waits == {f"wait for rank {peer}" for peer in range(RANKS) if peer != rank} | {"wait for the peers' credits"}
        assert (traced.facts["op"] == "gemm_rs") == any(e["name"].startswith("signal of tile") for e in events)


def test_spans_of_a_lane_lie_in_each_other_or_apart(calls) -> None:
    """As viewers want it."""
    for line in report_of(calls).ranks:
        for program in line.programs:
            spans = [*program.tiles, *program.spans]
            for a, b in itertools.combinations(sorted(spans, key=lambda span: (span.begin, -span.end)), 2):
                assert b.begin >= a.end or b.end <= a.end, (a, b)
            assert all(program.begin <= span.begin <= span.end <= program.end for span in spans)
            assert sum(program.total(kind) for kind in trace_events.KINDS) <= program.end - program.begin
        for lane in line.transfers.values():
            assert all(a.end <= b.begin for a, b in itertools.pairwise(lane))


def test_times_of_another_schedule_are_refused(calls) -> None:
    traced = calls[0][0]
    times = traced.times.clone()
    times[4, COMPUTED] = 0
    with pytest.raises(RuntimeError, match="has no times of tile"):
        trace_events.timeline(traced._replace(times=times))


def untraceable(group) -> str:
    """What is said of a context whose kernels note no times."""
    with fluxlike.create_gemm_ar_context(M, N, group=group) as ctx, pytest.raises(ValueError) as refused:
        tracing.begin(ctx)
    return str(refused.value)


def in_and_out(group) -> None:
    """A traced call in inference mode, and one outside of it."""
    x, w = (torch.ones(8, 8, device=device()) for _ in range(2))
    with fluxlike.create_gemm_rs_context(8, 8, 8, torch.float32, group, "in_kernel") as ctx:
        trace = tracing.begin(ctx)
        with torch.inference_mode():
            fluxlike.gemm_rs(x, w, ctx)
        fluxlike.gemm_rs(x, w, ctx)
        trace.read()


def test_in_inference_mode_and_outside() -> None:
    run_ranks(in_and_out, 2)


def test_what_cannot_be_traced_is_refused() -> None:
    for said in run_ranks(untraceable, 2):
        assert said.startswith("trace.begin: ") and "cannot be traced; give a context of create_gemm_rs_context or" in said


def two_transports(group) -> list[list[int]]:
    """Parts of a chunk that a call by the copy engine copies, and one without in the same context."""
    found = []
    with fluxlike.create_gemm_rs_context(M, N, dtype=torch.float32, group=group, schedule="auto") as ctx:
        trace = tracing.begin(ctx)
        possible = choice.candidates(ctx.problem(M, N, 2 * K))
        for schedule, subs in (("copy_engine", 2), ("in_kernel", 1)):
            ctx.use(next(one for one in possible if (one.transport, one.subs) == (schedule, subs)))
            RSCase(M, N, [K] * 2, torch.float32, 1).check(ctx, group, schedule)
            traced = trace.read()
            found.append([sub for _, sub, *_ in traced.copies])
            lanes = trace_events.timeline(traced).transfers
            assert list(lanes) == [f"{'copies' if subs == 2 else 'stores'} to rank {1 - ctx.rank}"]
        with ctx.begin("sequential/torch", M=M, N=N):
            """Auto makes such a call on GPUs only."""
        with pytest.raises(RuntimeError, match=r"was launched in the last call, .* \(the last call: sequential/torch\); make"):
            trace.read()
    return found


def test_copies_are_those_of_the_last_call() -> None:
    assert run_ranks(two_transports, 2) == [[[0, 1], []]] * 2


@pytest.mark.parametrize(("op", "schedule"), list(zip(OPS, SCHEDULES, strict=True)))
def test_a_rank_without_rows(op, schedule) -> None:
    """Of three ranks the last has none: no tiles of its own, and nobody waits for its shard."""
    found = run_ranks(traced_calls, RANKS, op=op, schedule=schedule, rows=4)
    for rank, (traced, _) in enumerate(found):
        tiles = tracing.tile_count(traced.facts)
        done = sum(row[COMPUTED] > 0 for row in words_of(traced)[:tiles])
        assert done == (tiles if rank < 2 else tiles // 3 * 2)
        spans = [span.name for program in trace_events.timeline(traced).programs for span in program.tiles]
        assert sum(name.startswith("tile") for name in spans) == done


# the tool


def tool_runs(group, out: str) -> list[int]:
    """Exit statuses: all is well; a result is wrong on one rank; all is well; the ranks do not divide the second shape."""
    found = [tool.main(["gemm_rs", "--shapes", "64x48x32", "--schedule", "copy_engine", "--out", out, "--calls", "1"])]
    right = fluxlike.gemm_rs

    def wrong(*args, **named):
        y = right(*args, **named)
        open_contexts.append(len(world.current().contexts))
        return y.add_(1) if dist.get_rank() == 1 else y

    open_contexts: list[int] = []
    fluxlike.gemm_rs = wrong
    found.append(tool.main(["gemm_rs", "--shapes", "64x32x32,64x48x32", "--out", out]))
    fluxlike.gemm_rs = right
    assert len(open_contexts) >= 2 and len(set(open_contexts)) == 1, f"a shape that failed keeps its memory: {open_contexts}"
    found.append(tool.main(["ag_gemm", "--shapes", "64x48x32", "--schedule", "in_kernel", "--out", out]))
    with pytest.raises(SystemExit) as leaving:
        tool.main(["ag_gemm", "--shapes", "64x32x32,63x48x32", "--schedule", "in_kernel", "--out", out])
    return [*found, leaving.value.code]


def test_the_tool(tmp_path) -> None:
    outcomes = run_fresh(tool_runs, 2, out=str(tmp_path / "new" / "place"))
    assert all(outcome.ok for outcome in outcomes), outcomes
    assert [outcome.value for outcome in outcomes] == [[0, 1, 0, 2]] * 2
    files = {path.name for path in (tmp_path / "new" / "place").iterdir()}
    names = {"gemm_rs-64x48x32-R2-copy_engine", "ag_gemm-64x48x32-R2-in_kernel"}
    assert {file for file in files if file.endswith(".json")} == {f"{name}.json" for name in names}
    pictures = {file for file in files if file.endswith(".png")}
    if importlib.util.find_spec("matplotlib"):
        assert pictures == {f"{name}.png" for name in names}
    for picture in pictures:
        assert (tmp_path / "new" / "place" / picture).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("argv", (["gemm"], ["gemm_rs", "--calls", "0"], ["gemm_rs", "--shapes", "64x"]))
def test_arguments(argv, capsys, monkeypatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")  # the others are silent
    with pytest.raises(SystemExit) as leaving:
        tool.parse(argv)
    assert leaving.value.code == 2 and capsys.readouterr().err


@pytest.mark.skipif(TORCHRUN, reason="the ranks are those that there are")
@pytest.mark.parametrize(
    ("more", "said"),
    (
        (["--shapes", "96x48x32,64x48x32"], "--shapes: 64×48×32: R=3 does not divide M=64;"),
        ([], "--shapes: 8192×57344×8192: R=3 does not divide M=8192 and N=57344;"),
    ),
    ids=("given", "usual"),
)
def test_sizes_that_the_ranks_do_not_divide(more, said, capsys, monkeypatch) -> None:
    """Refused before ranks meet, also where they are the usual ones of GPUs; one rank says so."""
    monkeypatch.setattr(once, "GRACE_S", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: not more)
    monkeypatch.setenv("WORLD_SIZE", "3")
    for local in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", local)
        with pytest.raises(SystemExit) as leaving:
            tool.main(["ag_gemm", *more, "--out", ""])
        err = capsys.readouterr().err
        assert leaving.value.code == 2 and (said in err if local == "0" else err == ""), err


# arithmetic


def span(begin: int, end: int, kind: str = "compute") -> Span:
    return Span(kind, kind, begin, end)


def test_holes() -> None:
    cut = lambda *holes: [(s.begin, s.end) for s in trace_events._without(span(10, 50), [span(a, b) for a, b in holes])]  # noqa: E731
    assert cut() == [(10, 50)]
    assert cut((20, 30)) == [(10, 20), (30, 50)]
    assert cut((30, 40), (0, 15)) == [(15, 30), (40, 50)]
    assert cut((0, 9), (60, 70)) == [(10, 50)]
    assert cut((5, 55)) == []


def test_overlap() -> None:
    some = trace_events.union([span(0, 10), span(5, 20), span(30, 40)])
    assert some == [(0, 20), (30, 40)]
    assert trace_events.overlap(some, [(15, 35)]) == 10
    assert trace_events.overlap(some, [(0, 1), (2, 3), (39, 50)]) == 3
    assert trace_events.overlap([(0, 5)], []) == 0


def test_stores_of_several_programs_share_a_lane() -> None:
    merged = list(trace_events._merged([span(5, 9, "b"), span(0, 6, "a"), span(20, 30, "c")]))
    assert [(s.name, s.begin, s.end) for s in merged] == [("2 that overlap", 0, 9), ("c", 20, 30)]


def test_summary() -> None:
    """Two programs of 100 µs; the transfer takes 40, of which 30 are under products."""
    spans = [[span(0, 60_000), span(60_000, 80_000, "wait")], [span(10_000, 50_000), span(50_000, 60_000, "store")]]
    programs = [Program(i, 0, 0, 100_000, each) for i, each in enumerate(spans)]
    told = trace_events.summary(Timeline(1, programs, {"copies to rank 0": [span(30_000, 70_000, "copy")]}, 1))
    assert (told.rank, told.microseconds, told.compute, told.wait, told.store) == (1, 100, 0.5, 0.1, 0.05)
    assert (told.wait_us, told.most_wait_us, told.transfer_us, told.hidden) == (10, 20, 40, 0.75)
    assert "10.0 µs exposed" in str(told) and "75% under products" in str(told)


def test_what_is_said(tmp_path, monkeypatch) -> None:
    lines = [Timeline(rank, [Program(0, 0, 0, 100_000, [span(0, 60_000)])], {}, 1) for rank in range(3)]
    clocks = [tracing.Clock(0, 0, 0)] * 3
    took = {"traced": 12.0, "untraced": 11.5}
    report = trace_report.Report("gemm_rs", Shape(M, N, K), "float32", "in_kernel/tma", lines, clocks, took, {})
    first, *rest, last = report.lines()
    assert first == "gemm_rs 300×130×72, R=3, float32, in_kernel/tma, 1 program a rank" and len(rest) == 3
    assert rest[1].startswith("  rank 1: 100.0 µs, products 60%, waits 0% (0.0 µs exposed a program, at most 0.0), stores 0%")
    assert last == "  a call takes 12.0 µs traced, 11.5 µs untraced"
    skewed = dataclasses.replace(report, clocks=[tracing.Clock(5, error, 0) for error in (1000, 3000, 2000)])
    assert skewed.lines()[-1].endswith("; times of one rank against another's ± 5.0 µs")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install matplotlib" in (trace_report.plot(report, tmp_path / "y.png") or "")
    assert not (tmp_path / "y.png").exists()


# the clock of a GPU


class FakeGpu:
    """A GPU whose clock is ``AHEAD`` of the host's, and which answers as `read_clocks` does."""

    AHEAD = 7_000_000_000
    device = SimpleNamespace(type="cuda")

    def __init__(self, answers: bool = True) -> None:
        self.answers, self.thread = answers, None

    def now(self) -> int:
        return time.monotonic_ns() + self.AHEAD

    def report(self, words: int) -> torch.Tensor:
        return torch.zeros(words, dtype=torch.int64)

    def launch(self, launched, programs, args, constants, warps, stages) -> None:
        assert launched is kernel.read_clocks and programs == 1
        (address,), rounds = args, constants["ROUNDS"]
        words = (ctypes.c_int64 * (1 + rounds)).from_address(address)

        def run() -> None:
            for i in range(rounds if self.answers else 0):
                while words[0] <= i:
                    time.sleep(0)
                words[1 + i] = self.now()

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def synchronize(self) -> None:
        self.thread.join()

    def stamp(self) -> list[int]:
        if self.thread is not None:
            self.thread.join()
        return [self.now()]

    def nanoseconds(self, since: list[int], until: list[int]) -> int:
        return until[0] - since[0]


def test_the_clock_of_a_gpu() -> None:
    gpu = FakeGpu()
    clock, stamp, at = tracing._clock(gpu)
    assert abs(clock.offset - gpu.AHEAD) <= clock.error < 1e8
    assert abs(at - stamp[0]) <= clock.copies_error + 1 and clock.copies_error < 1e8


def test_a_gpu_that_does_not_answer(monkeypatch) -> None:
    monkeypatch.setattr(tracing, "PATIENCE", 1000)
    with pytest.raises(RuntimeError, match="did not answer within"):
        tracing._clock(FakeGpu(answers=False))


def test_us_of_a_call(monkeypatch):
    """Of calls back to back, behind one that does not count, on the slowest rank."""
    now, made = 0.0, []
    peers = SimpleNamespace(
        rank=0, size=1, barrier=lambda: None, attempt=lambda action: action(), slowest=lambda action: 2 * action()
    )

    def ours(context):
        nonlocal now
        now += 0.25
        made.append(now)

    problem = SimpleNamespace(spoil=lambda: None, ours=ours, judge=lambda name, result: (0.0, 1.0))
    monkeypatch.setattr(tool.time, "perf_counter", lambda: now)
    tracer = tool.Tracer(tool.parse(["gemm_rs", "--calls", "4", "--out", ""]), peers, torch.device("cpu"))
    assert tracer.time(problem, SimpleNamespace(check=lambda: None)) == 2 * 0.25e6 and len(made) == 5

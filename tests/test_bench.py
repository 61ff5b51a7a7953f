"""The bench: its arithmetic, its shapes, its report; and that it finds what is wrong, on ranks that are made to fail.

Nothing here is about speed. Where the GPU's half of the code is run on a CPU, `FakeCuda` stands in for streams and graphs.
"""

import contextlib
import itertools
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ranks
import torch

import fluxlike

pytest.importorskip("rich")

from fluxlike.tools import bench, bench_problems, bench_reduce, bench_report
from fluxlike.tools.bench_peers import Failed, Lost, Peers
from fluxlike.tools.bench_problems import parse_shapes
from fluxlike.tools.bench_reduce import Size, parse_sizes
from fluxlike.tools.bench_report import Report, Result, Row, Shape, Voice

ROOT = Path(__file__).resolve().parents[1]
BIG = Shape(8192, 8192, 28672)


# arithmetic


def test_wire_bytes():
    assert bench_report.wire_bytes("gemm_rs", Shape(100, 20, 7), 4, 2) == 3 / 4 * 100 * 20 * 2
    assert bench_report.wire_bytes("ag_gemm", Shape(100, 20, 7), 4, 4) == 3 / 4 * 100 * 7 * 4
    assert bench_report.wire_bytes("gemm_rs", Shape(100, 20, 7), 1, 2) == 0
    assert bench_report.wire_bytes("gemm_ar", Shape(100, 20, 7), 4, 2) == 2 * 3 / 4 * 100 * 20 * 2


def test_the_limit_is_the_product_or_the_wire():
    wire = 7 / 8 * 8192 * 8192 * 2 / 360e9 * 1e3
    assert bench_report.limit_ms("gemm_rs", BIG, 8, 2, 1.0) == 1.0
    assert bench_report.limit_ms("gemm_rs", BIG, 8, 2, 0.1) == pytest.approx(wire)
    assert bench_report.limit_ms("gemm_rs", BIG, 8, 2, None) is None


def test_efficiency():
    assert bench_report.efficiency(1.0, 1.0, 1.5) == 1
    assert bench_report.efficiency(1.5, 1.0, 1.5) == 0
    assert bench_report.efficiency(1.1, 1.0, 1.5) == pytest.approx(0.8)
    assert bench_report.efficiency(0.9, 1.0, 1.5) > 1
    assert bench_report.efficiency(1.1, 1.0, 1.0) is None


def test_derived():
    found = bench_report.derive("gemm_rs", BIG, 4, 2, {"gemm": 1.4, "torch": 1.8, "auto": 1.5, "async_tp": None})
    assert found["auto"].speedup == pytest.approx(1.2)
    assert found["auto"].efficiency == pytest.approx(0.75)
    assert found["auto"].over_limit == pytest.approx(1.5 / 1.4)
    assert found["auto"].tflops == pytest.approx(2 * 8192 * 8192 * 28672 / 4 / 1.5e-3 / 1e12)
    assert found["async_tp"] == bench_report.Derived()
    alone = bench_report.derive("gemm_rs", BIG, 4, 2, {"auto": 1.5})["auto"]
    assert alone.tflops and (alone.speedup, alone.efficiency, alone.over_limit) == (None, None, None)


def test_against_peers_takes_the_better_one():
    assert bench_report.against_peers({"torch": 2.0, "async_tp": 1.0, "auto": 1.25}) == pytest.approx(0.8)
    assert bench_report.against_peers({"torch": 2.0, "async_tp": None, "auto": 1.25}) == pytest.approx(1.6)
    assert bench_report.against_peers({"auto": 1.25}) is None


def test_the_median_is_the_figure():
    assert Row("x", rounds_ms=[5.0, 1.0, 2.0]).ms == 2.0
    assert Row("x").ms is None


@pytest.mark.parametrize(("ms", "calls"), ((0.001, 50), (0.4, 50), (1.0, 20), (2.0, 10), (100.0, 5), (0.0, 50)))
def test_iters(ms, calls):
    assert bench.auto_iters(ms) == calls


def test_every_method_is_first_last_and_behind_others():
    turns = [bench.in_turn("abcd", turn) for turn in range(4)]
    assert all(sorted(turn) == list("abcd") for turn in turns) and len({turn[0] for turn in turns}) > 1
    followed = {(a, b) for turn in turns for a, b in itertools.pairwise(turn)}
    assert all(len({a for a, b in followed if b == name}) > 1 for name in "abcd")
    assert bench.in_turn([], 3) == []


def test_budget():
    now = 100.0
    budget = bench.Budget(30, clock=lambda: now)
    assert not budget.spent()
    now = 129.9
    assert not budget.spent()
    now = 130.0
    assert budget.spent()
    assert not bench.Budget(None, clock=lambda: now).spent()
    assert bench.Budget(0, clock=lambda: now).spent()


def test_failed_says_who():
    some = Failed([None, "ValueError: no", None])
    assert str(some) == "rank 1: ValueError: no" and not some.everywhere
    assert str(Failed(["A: x", "A: x"])) == "every rank: A: x" and Failed(["A: x", "A: x"]).everywhere
    assert str(Failed(["A: x", "B: y"])) == "rank 0: A: x (and 1 more)"
    assert str(Failed(["PeerTimeout: x", "B: y"])) == "rank 1: B: y (and 1 more)"


# shapes


def test_models():
    for name, hidden, inner, up in (
        ("llama-8b", 4096, 14336, 2),
        ("llama-70b", 8192, 28672, 2),
        ("llama-405b", 16384, 53248, 2),
        ("gpt3-175b", 12288, 49152, 1),
        ("qwen-72b", 8192, 29568, 2),
    ):
        suite = bench_problems.SUITES[name]
        assert [s.m for s in suite["gemm_rs"]] == [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
        assert {s[1:] for s in suite["gemm_rs"]} == {(hidden, inner)}
        assert {s[1:] for s in suite["ag_gemm"]} == {(up * inner, hidden)}
        assert [s.m for s in suite["ag_gemm"]] == [s.m for s in suite["gemm_rs"]]


def test_named_suites():
    headline, eight, decode = (bench_problems.SUITES[name] for name in ("headline", "eight", "decode"))
    assert len(headline["gemm_rs"]) == 9 and len(headline["ag_gemm"]) == 7
    assert BIG in headline["gemm_rs"] and Shape(512, 57344, 8192) in headline["ag_gemm"]
    assert len(eight["gemm_rs"]) == len(eight["ag_gemm"]) == 4
    assert Shape(8192, 4096, 14336) in eight["gemm_rs"] and Shape(8192, 49152, 12288) in eight["ag_gemm"]
    assert [s.m for s in decode["gemm_rs"]] == [16, 64, 256, 512] == [s.m for s in decode["ag_gemm"]]
    for name, suite in bench_problems.SUITES.items():
        assert set(suite) == set(bench_problems.PROBLEMS) == set(bench.KINDS) - {"all_reduce", "gemm_ar", "sparse_all_reduce"}
        for op, shapes in suite.items():
            assert len(set(shapes)) == len(shapes)
            for world in (1, 2, 4, 8):
                assert not [s for s in shapes if bench.KINDS[op].unfit(s, world)], (name, op, world)


def test_what_cannot_be_split():
    rs, ag, ar, reduce, sparse = bench.KINDS.values()
    assert sparse.unfit(None, 7) is None
    assert ar.unfit(Shape(15, 5, 16), 4) is None and ar.unfit(Shape(16, 16, 10), 4) == "R=4 does not divide K=10"
    assert rs.unfit(Shape(16, 5, 16), 4) is None
    assert ag.unfit(Shape(16, 16, 5), 4) is None
    assert rs.unfit(Shape(16, 16, 10), 4) == "R=4 does not divide K=10"
    assert ag.unfit(Shape(15, 10, 16), 4) == "R=4 does not divide M=15 and N=10"
    assert reduce.unfit(Size(12), 5) is None and reduce.unfit(Size(6), 2) == "6 bytes are no multiple of 4"


def test_sizes():
    assert parse_sizes("512, 16K,3 mb,1G") == [Size(512), Size(16 << 10), Size(3 << 20), Size(1 << 30)]
    assert [str(Size(n)) for n in (100, 1024, 1536, 3 << 20, 1 << 30)] == ["100 B", "1 KB", "1536 B", "3 MB", "1 GB"]
    for text in ("", "16K,", "K", "1.5M", "-4", "0", "4T", "16x16"):
        with pytest.raises(ValueError, match=re.escape(repr(text.split(",")[-1]))):
            parse_sizes(text)
    assert bench_reduce.SIZES["sweep"][0] == Size(1 << 10) and bench_reduce.SIZES["sweep"][-1] == Size(256 << 20)


@pytest.mark.parametrize("text", ("", "64", "64x32", "64x32x16x8", "64x32x0", "64x-3x16", "64x3.5x16", "8x8x8,", "axbxc"))
def test_a_bad_shape_is_named(text):
    bad = text.split(",")[-1]
    with pytest.raises(ValueError, match=re.escape(repr(bad))):
        parse_shapes(text)


# the command line


def test_defaults():
    on_gpus, on_cpus = bench.parse(["gemm_rs"], cuda=True), bench.parse(["gemm_rs"], cuda=False)
    assert on_gpus.suite == "headline" and on_cpus.suite == "toy"
    assert on_gpus.modes == ["eager"] and on_gpus.rounds == 7 and on_gpus.iters is None
    ours = ["copy_engine", "in_kernel", "sequential", "stream_k", "decomposed", "auto"]
    assert on_gpus.methods == ["gemm", "torch", "async_tp", *ours]
    assert on_cpus.methods == ["reference", *ours]
    assert bench.parse(["gemm_rs", "--graph"], cuda=True).modes == ["graph"]
    assert bench.parse(["gemm_rs", "--graph", "--eager"], cuda=True).modes == ["eager", "graph"]
    assert bench.parse(["ag_gemm", "--methods", "auto,torch"], cuda=True).methods == ["torch", "auto"]
    reduce = bench.parse(["all_reduce", "--shapes", "4K,1M"], cuda=True)
    assert reduce.methods == ["torch", "torch_one_shot", "torch_two_shot", "one_shot", "two_shot", "bulk", "auto"]
    assert reduce.shapes == [Size(4096), Size(1 << 20)]
    assert bench.parse(["all_reduce"], cuda=False).methods == ["torch", "one_shot", "two_shot", "bulk", "auto"]
    assert bench.parse(["all_reduce", "--suite", "sweep"], cuda=True).suite == "sweep"


@pytest.mark.parametrize(
    ("options", "says"),
    (
        (["--rounds", "0"], "at least one"),
        (["--iters", "many"], "'?many'?"),
        (["--iters", "0"], "above 0"),
        (["--graph"], "needs GPUs"),
        (["--methods", "auto,magic"], "'magic' is not one of reference"),
        (["--methods", "torch"], "'torch' is not one of"),
        (["--shapes", "64x32"], "'64x32' is not a shape"),
        (["--suite", "llama-8b"], "use --suite toy"),
        (["--suite", "toy", "--shapes", "8x8x8"], "not allowed with"),
        (["--suite", "unknown"], "invalid choice"),
        (["--suite", "sweep"], "use --suite toy"),
    ),
)
def test_a_useless_command_line(options, says, capsys, monkeypatch):
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as end:
            bench.parse(["gemm_rs", *options], cuda=False)
        assert end.value.code == 2
        said = capsys.readouterr().err
        assert re.search(says, said) if rank == "0" else said == ""


def test_without_rich(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(bench.command.importlib.util, "find_spec", lambda name: None)
    assert bench.main(["gemm_rs", "--shapes", "8x8x8"]) == 2
    assert capsys.readouterr().err.strip().endswith("run: python -m pip install rich matplotlib")


@pytest.mark.skipif(ranks.TORCHRUN, reason="is about a process without ranks")
def test_without_torchrun(monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert bench.main(["gemm_rs", "--shapes", "8x8x8"]) == 1
    assert "scripts/launch.sh" in capsys.readouterr().err
    assert not fluxlike.is_initialized()


# the report


def made_up(**changes):
    rows = [
        Row("gemm", rounds_ms=[1.3, 1.4, 1.5], error=0.001, allowed=0.002),
        Row("torch", rounds_ms=[1.7, 1.8, 1.9], host_us=31.0),
        Row("async_tp", status="failed", note="every rank: RuntimeError: [bold]not here[/bold]"),
        Row("in_kernel", status="WRONG", note="error nan", error=math.nan, allowed=0.002),
        Row("auto", rounds_ms=[2.0, 1.99, 2.01], path="copy_engine/tma", **changes),
    ]
    stamp = {"gpu": "a GPU", "date": "today"}
    left_out = [{"shape": "1×1×1", "why": "too small"}]
    return Report("gemm_rs", "custom", 4, "eager", "bfloat16", 2, {"rounds": 3}, stamp, [Result(BIG, rows)], left_out)


def test_the_table_is_whole_in_a_log(capsys):
    voice = Voice(loud=True)
    voice.report([made_up()], None)
    said = capsys.readouterr().out
    assert "…" not in said
    line = next(line for line in said.splitlines() if re.match(r"\s+auto ", line))
    cells = ("2", "1.99–2.01", "0.90", "-0.50", "1.43", "copy_engine/tma; behind the best peer (0.90×)")
    assert all(cell in line for cell in cells), line
    assert re.search(r"gemm .* 1\.4 +1\.3–1\.5 .* 0\.50", said)
    assert re.search(r"in_kernel +WRONG .*error nan", said)
    assert "RuntimeError: [bold]not here[/bold]" in said
    assert "at least 0.98× on 0 of 1 shapes, worst 0.90× at 8192×8192×28672" in said
    assert "WRONG: in_kernel at 8192×8192×28672" in said and "left out: 1×1×1: too small" in said


def test_only_rank_0_speaks(capsys):
    voice = Voice(loud=False)
    voice.say("something")
    with voice.progress(3) as advance:
        advance()
    assert capsys.readouterr().out == ""


def test_json(tmp_path):
    report = made_up(host_us=55.5)
    path = report.save(tmp_path)
    assert path.name == "gemm_rs-custom-R4-eager.json" and list(tmp_path.iterdir()) == [path]
    read = json.loads(path.read_text())
    [shape] = read["shapes"]
    assert (shape["m"], shape["n"], shape["k"], shape["limit_ms"]) == (*BIG, 1.4)
    auto = shape["methods"]["auto"]
    assert auto["ms"] == {"median": 2.0, "min": 1.99, "max": 2.01, "rounds": [2.0, 1.99, 2.01]}
    assert auto["speedup"] == pytest.approx(0.9) and auto["host_us"] == 55.5
    wrong = shape["methods"]["in_kernel"]
    assert wrong["status"] == "WRONG" and wrong["error"] is None and wrong["ms"] is None
    assert read["environment"]["gpu"] == "a GPU" and read["left_out"][0]["why"] == "too small"


def test_the_stamp():
    stamp = bench_report.environment(["gemm_rs", "--shapes", "a b"])
    assert stamp["fluxlike"] == fluxlike.__version__
    assert stamp["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert stamp["command"] == "python -m fluxlike bench gemm_rs --shapes 'a b'"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", stamp["date"])


def test_the_stamp_tells_no_paths(monkeypatch):
    monkeypatch.setenv("FLUXLIKE_LOG", "INFO")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/some/where")
    assert bench_report.environment([])["variables"].get("FLUXLIKE_LOG") == "INFO"
    assert "/some/where" not in json.dumps(bench_report.environment([]))


def test_plot(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    bars, marks = [], []
    from matplotlib.axes import Axes

    draw, mark = Axes.bar, Axes.hlines
    monkeypatch.setattr(Axes, "bar", lambda self, x, h, *a, **k: (bars.append((k["label"], h)), draw(self, x, h, *a, **k))[1])
    monkeypatch.setattr(Axes, "hlines", lambda self, y, *a, **k: (marks.append(y), mark(self, y, *a, **k))[1])
    assert bench_report.plot(made_up(), path) is None
    assert path.read_bytes().startswith(b"\x89PNG")
    assert bars == [("auto", [pytest.approx(0.9)])] and marks == [pytest.approx(1.8 / 1.4)]


def test_no_plot(tmp_path, monkeypatch):
    report = made_up()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "matplotlib is missing" in bench_report.plot(report, tmp_path / "plot.png")
    report.results[0].rows[1].rounds_ms = []
    assert "times of torch" in bench_report.plot(report, tmp_path / "plot.png")
    assert not list(tmp_path.iterdir())


def latencies():
    """A report of all_reduce on four ranks: auto takes the wrong algorithm for the first size, and is slow at the second."""
    times = {"torch": (20, 64), "torch_two_shot": (10, 51), "one_shot": (5, 90), "bulk": (8, 40), "auto": (8, 80)}
    results = [
        Result(size, [Row(name, rounds_ms=[t[i] / 1e3], path="bulk" if name == "auto" else "") for name, t in times.items()])
        for i, size in enumerate((Size(128 << 10), Size(8 << 20)))
    ]
    return bench_reduce.Report("all_reduce", "custom", 4, "graph", "bfloat16", 2, {}, {"gpu": "a GPU"}, results)


def test_latencies(capsys, tmp_path):
    report = latencies()
    Voice(loud=True).report([report], tmp_path)
    said = capsys.readouterr().out
    first, second = (line for line in said.splitlines() if re.match(r"\s+auto ", line))
    assert all(cell in first for cell in (" 8 ", "2.50", "1.25", " 25 ", "bulk")) and "behind" not in first, first
    assert all(cell in second for cell in (" 80 ", "0.80", "157", "behind the best peer (0.64×)")), second
    assert "at least 0.98× on 1 of 2 sizes, worst 0.64× at 8 MB" in said
    assert "within 1.05× on 0 of 2 sizes, worst 2.00× at 8 MB" in said
    read = json.loads((tmp_path / "all_reduce-custom-R4-graph.json").read_text())
    assert [shape["nbytes"] for shape in read["shapes"]] == [128 << 10, 8 << 20]
    assert read["shapes"][0]["methods"]["auto"]["over_best"] == pytest.approx(10 / 8)
    assert read["shapes"][0]["limit_ms"] == pytest.approx(1.5 * (128 << 10) / 360e9 * 1e3)
    pytest.importorskip("matplotlib")
    assert (tmp_path / "all_reduce-custom-R4-graph.png").read_bytes().startswith(b"\x89PNG")
    for result in report.results:
        result.rows = [Row("auto")]
    assert bench_report.plot(report, tmp_path / "other.png") == "no plot: it needs times"


# on ranks


class FakeCuda:
    """What `bench` uses of torch.cuda, on a CPU. A graph keeps the calls made while it is captured and repeats them."""

    recording = None
    replays = True

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = time.perf_counter()

        def elapsed_time(self, end):
            return (end.at - self.at) * 1e3

    class CUDAGraph:
        def __init__(self):
            self.calls, self.gone = [], False

        def replay(self):
            assert not self.gone
            for call in self.calls if FakeCuda.replays else []:
                call()

        def reset(self):
            self.gone = True

    @staticmethod
    @contextlib.contextmanager
    def graph(graph):
        FakeCuda.recording = graph
        yield
        FakeCuda.recording = None

    @classmethod
    def install(cls):
        for name in ("Event", "CUDAGraph", "graph"):
            setattr(torch.cuda, name, getattr(cls, name))
        torch.cuda.synchronize = torch.cuda.empty_cache = lambda: None
        make = bench_problems.Problem.call

        def recorded(problem, method, context):
            call = make(problem, method, context)

            def run():
                if cls.recording is not None:
                    cls.recording.calls.append(call)
                return call()

            return run

        bench_problems.Problem.call = recorded
        bench.HOST_CALLS, bench.WARM_MS, bench.WARM_CALLS, bench.GRAPH_CALLS = 2, 0.01, 1, 2


def run_shape(group, argv, sabotage=None, cuda=False, shape=(16, 32, 64)):
    """({mode: rows}, whether anything was bad) of one shape, with something broken, or with the GPU's half of the code."""
    fluxlike.init(heap="shm")
    if cuda:
        FakeCuda.install()
    if sabotage:
        sabotage()
    run = bench.Bench(bench.parse(argv, cuda), Peers(), torch.device("cpu"))
    run.cuda, run.rounds = cuda, run.asked.rounds if cuda else 1
    found = run.shape(shape if isinstance(shape, Size) else Shape(*shape))
    fluxlike.finalize()
    return {mode: {row.method: row for row in result.rows} for mode, result in found.items()}, run.bad


def one_value_off():
    """On rank 1 only, and only in one of the schedules."""
    honest = fluxlike.gemm_rs

    def gemm_rs(x, weight, ctx, **options):
        y = honest(x, weight, ctx, **options)
        if ctx.schedule == "in_kernel" and torch.distributed.get_rank() == 1:
            y[3] = y[2]
        return y

    fluxlike.gemm_rs = gemm_rs


def nothing_written():
    fluxlike.gemm_rs = lambda x, weight, ctx, out: out


def nothing_reduced():
    """By ours; torch's is as it is."""
    fluxlike.all_reduce = lambda x, algo: torch.empty_like(x)


def nothing_written_ag():
    fluxlike.ag_gemm = lambda x, weight, ctx: x.new_empty(16, 16)


def raises_on_rank_1():
    honest = fluxlike.gemm_rs

    def gemm_rs(x, weight, ctx, **options):
        if ctx.schedule == "copy_engine" and torch.distributed.get_rank() == 1:
            raise RuntimeError("out of ideas")
        return honest(x, weight, ctx, **options)

    fluxlike.gemm_rs = gemm_rs


def async_tp_raises_on_rank_1():
    """On rank 0 it was started and waits in a stream, as far as the host can tell."""

    def run(problem):
        if torch.distributed.get_rank() == 1:
            raise RuntimeError("out of ideas")
        return problem.out

    bench_problems.GemmRS.run_async_tp = run


def dead_replays():
    FakeCuda.replays = False


def values(outcomes):
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
    return [outcome.value for outcome in outcomes]


def test_a_wrong_value_on_one_rank_is_seen_by_all():
    for found, bad in values(ranks.run_fresh(run_shape, 2, argv=["gemm_rs"], sabotage=one_value_off)):
        rows = found["eager"]
        assert bad and rows["in_kernel"].status == "WRONG" and "ranks [1]" in rows["in_kernel"].note
        assert rows["in_kernel"].error > 10 * rows["copy_engine"].error
        assert [rows[name].status for name in ("reference", "copy_engine", "auto")] == ["ok"] * 3


@pytest.mark.parametrize(("op", "sabotage"), (("gemm_rs", nothing_written), ("ag_gemm", nothing_written_ag)))
def test_nobody_passes_with_the_result_of_the_one_before(op, sabotage):
    for found, bad in values(ranks.run_fresh(run_shape, 2, argv=[op], sabotage=sabotage)):
        rows = found["eager"]
        assert bad and {rows[name].status for name in bench_problems.Problem.OURS} == {"WRONG"} and rows["reference"].status == "ok"


def test_nobody_passes_with_the_sum_of_the_one_before():
    for found, bad in values(ranks.run_fresh(run_shape, 2, argv=["all_reduce"], sabotage=nothing_reduced, shape=Size(4096))):
        rows = found["eager"]
        assert bad and {rows[name].status for name in bench_reduce.AllReduce.OURS} == {"WRONG"} and rows["torch"].status == "ok"


def test_an_exception_on_one_rank_reaches_all():
    env = {"FLUXLIKE_TIMEOUT_S": "3"}
    argv = ["gemm_rs", "--methods", "auto,copy_engine,in_kernel"]
    for found, bad in values(ranks.run_fresh(run_shape, 2, env, timeout=90, argv=argv, sabotage=raises_on_rank_1)):
        rows = found["eager"]
        assert bad and rows["copy_engine"].status == "failed" and rows["copy_engine"].note.startswith("rank 1: ")
        assert rows["auto"].status == rows["in_kernel"].status == "ok"


def test_a_run_that_cannot_go_on_ends_on_all_ranks():
    argv = ["gemm_rs", "--methods", "async_tp,auto"]
    outcomes = ranks.run_fresh(run_shape, 2, argv=argv, cuda=True, sabotage=async_tp_raises_on_rank_1)
    assert [outcome.error for outcome in outcomes] == [Lost.__name__] * 2, "\n".join(map(str, outcomes))
    assert all("async_tp" in outcome.message and "rank 1: RuntimeError: out of ideas" in outcome.message for outcome in outcomes)


def test_times_and_graphs():
    argv = ["gemm_rs", "--eager", "--graph", "--rounds", "3", "--iters", "2", "--methods", "gemm,torch,async_tp,in_kernel,auto"]
    for found, bad in values(ranks.run_fresh(run_shape, 2, timeout=120, argv=argv, cuda=True)):
        assert not bad, found
        for mode, rows in found.items():
            assert rows["async_tp"].status == "failed" and rows["async_tp"].note.startswith("every rank: ")
            for name in ("gemm", "torch", "in_kernel", "auto"):
                row = rows[name]
                assert row.status == "ok" and len(row.rounds_ms) == 3 and row.ms > 0 and row.iters == 2, (mode, row)
                assert (row.host_us is not None) == (mode == "eager")
                assert row.path.startswith("in_kernel/") == (name in ("in_kernel", "auto"))


def test_sizes_timed():
    argv = ["all_reduce", "--rounds", "2", "--iters", "2"]
    for found, bad in values(ranks.run_fresh(run_shape, 2, timeout=120, argv=argv, cuda=True, shape=Size(512))):
        assert not bad, found
        for mode, rows in found.items():
            assert rows.pop("torch_one_shot").note.startswith("every rank: ") and rows.pop("torch_two_shot").status == "failed"
            for name, row in rows.items():
                assert row.status == "ok" and len(row.rounds_ms) == 2 and 0 < row.error <= row.allowed, (mode, row)
                assert row.path.startswith({"torch": "", "auto": "one_shot"}.get(name, name))


def test_sums_on_all_ranks():
    argv = ["gemm_ar", "--eager", "--rounds", "2", "--iters", "2"]
    for found, bad in values(ranks.run_fresh(run_shape, 2, timeout=120, argv=argv, cuda=True)):
        assert not bad, found
        assert list(found["eager"]) == ["gemm", "torch", "one_shot", "two_shot", "bulk", "auto"]
        for name, row in found["eager"].items():
            assert row.status == "ok" and 0 < row.error <= row.allowed, row
            assert row.path == {"gemm": "", "torch": "", "auto": "one_shot/torch"}.get(name, f"{name}/torch")


def test_a_graph_that_does_nothing_is_wrong():
    argv = ["gemm_rs", "--eager", "--graph", "--rounds", "1", "--methods", "gemm,torch"]
    for found, bad in values(ranks.run_fresh(run_shape, 2, timeout=120, argv=argv, cuda=True, sabotage=dead_replays)):
        assert bad
        assert {row.status for row in found["graph"].values()} == {"WRONG"}
        assert {row.status for row in found["eager"].values()} == {"ok"}
        assert not any(row.rounds_ms for row in found["graph"].values())


def run_all(group, argv):
    """(exit status, what is in the JSON) of a whole run; the last rank believes that all the time in the world is left."""
    fluxlike.init(heap="shm")
    asked = bench.parse(argv, cuda=False)
    run = bench.Bench(asked, Peers(), torch.device("cpu"))
    if torch.distributed.get_rank() == 1:
        run.budget = bench.Budget(None)
    status = run.run(argv)
    fluxlike.finalize()
    return status, json.loads(next(Path(asked.out).glob("*.json")).read_text())


def test_rank_0_decides_when_time_is_up(tmp_path):
    argv = ["gemm_rs", "--shapes", "9x8x8,8x8x8", "--seconds", "0", "--out", str(tmp_path)]
    for status, read in values(ranks.run_fresh(run_all, 2, argv=argv)):
        assert status == 0 and read["shapes"] == []
        assert [item["why"] for item in read["left_out"]] == ["R=2 does not divide M=9", "0 seconds have passed"]


def launch(*arguments):
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "TRITON_INTERPRET")}
    places = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ |= {"FLUXLIKE_PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(places)}
    command = ["bash", str(ROOT / "scripts" / "launch.sh"), "--nproc", "2", "-m", "fluxlike", "bench", *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=280)


@pytest.mark.slow
@pytest.mark.skipif(ranks.TORCHRUN, reason="starts its own ranks")
@pytest.mark.parametrize("op", bench_problems.PROBLEMS)
def test_toy(op, tmp_path):
    done = launch(op, "--suite", "toy", "--rounds", "1", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    read = json.loads((tmp_path / f"{op}-toy-R2-eager.json").read_text())
    assert read["ranks"] == 2 and read["environment"]["command"].endswith(f"--rounds 1 --out {tmp_path}")
    assert [Shape(s["m"], s["n"], s["k"]) for s in read["shapes"]] == list(bench_problems.SUITES["toy"][op])
    for shape in read["shapes"]:
        assert list(shape["methods"]) == list(bench.methods(bench.KINDS[op], cuda=False))
        for name, facts in shape["methods"].items():
            assert facts["status"] == "ok" and 0 < facts["error"] <= facts["allowed"] < 0.01
            assert facts["ms"] is None and facts["tflops"] is None
            wanted = {"reference": "", "auto": "in_kernel"}.get(name, name)
            assert facts["path"].partition("/")[0] == wanted
    assert f"{op}, suite toy, R=2, bfloat16, eager" in done.stdout
    assert f"[3/3] {op} {bench_problems.SUITES['toy'][op][2]}" in done.stdout
    assert "…" not in done.stdout and len(re.findall(r"copy_engine/tma", done.stdout)) == 3
    assert "no plot: it needs times of torch" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(ranks.TORCHRUN, reason="starts its own ranks")
def test_toy_sizes(tmp_path):
    done = launch("all_reduce", "--suite", "toy", "--rounds", "1", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    read = json.loads((tmp_path / "all_reduce-toy-R2-eager.json").read_text())
    assert [shape["nbytes"] for shape in read["shapes"]] == [size.nbytes for size in bench_reduce.SIZES["toy"]]
    for shape in read["shapes"]:
        assert all(facts["status"] == "ok" and facts["ms"] is None for facts in shape["methods"].values())


# on GPUs


@pytest.mark.gpu
def test_sizes_on_gpus():
    argv = ["all_reduce", "--eager", "--graph", "--rounds", "2"]
    world = int(os.environ.get("WORLD_SIZE", ranks.POOL_SIZE))
    for found, bad in ranks.run_ranks(run_on_gpus, world, makes_groups=True, argv=argv, shape=Size(256 << 10)):
        assert not bad
        for mode, rows in found.items():
            for row in rows.values():
                assert row.status == "ok" and len(row.rounds_ms) == 2 and 0 < row.ms < 10, (mode, row)


def run_on_gpus(group, argv, shape=None):
    run = bench.Bench(bench.parse(argv, cuda=True), Peers(), ranks.device())
    found = run.shape(shape or Shape(1024, 2048, 4096))
    return {mode: {row.method: row for row in result.rows} for mode, result in found.items()}, run.bad


@pytest.mark.gpu
@pytest.mark.parametrize("op", bench_problems.PROBLEMS)
def test_on_gpus(op):
    argv = [op, "--eager", "--graph", "--rounds", "2"]
    world = int(os.environ.get("WORLD_SIZE", ranks.POOL_SIZE))
    for found, bad in ranks.run_ranks(run_on_gpus, world, makes_groups=True, argv=argv):
        assert not bad
        for mode, rows in found.items():
            for name in ("gemm", "torch", *bench_problems.Problem.OURS):
                row = rows[name]
                assert row.status == "ok" and len(row.rounds_ms) == 2 and 0 < row.ms < 100, (mode, row)
            assert rows["gemm"].ms < rows["torch"].ms
            assert all(rows[name].path.startswith(name) for name in ("copy_engine", "in_kernel"))

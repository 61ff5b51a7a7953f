"""The bench: its arithmetic, its shapes, its command line. Its report: test_bench_report. On ranks: test_bench_ranks."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
import torch

import fluxlike

pytest.importorskip("rich")

from fluxlike.ops import tuning
from fluxlike.tools import (
    bench,
    bench_arguments,
    bench_bursts,
    bench_problems,
    bench_reduce,
    bench_report,
    links,
    once,
    soak,
    trace,
    tune,
)
from fluxlike.tools.bench_bursts import Burst
from fluxlike.tools.bench_peers import Failed
from fluxlike.tools.bench_problems import parse_shapes
from fluxlike.tools.bench_reduce import Size, parse_sizes
from fluxlike.tools.bench_report import Result, Row, Shape

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
    for names in ("", "a", "ab", "abcd", "abcdefgh", "abc", "abcde", "abcdefghi"):
        turns = [tuning.in_turn(names, turn) for turn in range(-1, len(names) - 1)]
        assert all(sorted(turn) == list(names) for turn in turns)
        assert len({turn[0] for turn in turns}) == len({turn[-1] for turn in turns}) == len(names) or len(names) % 2
        followed = [pair for turn in turns for pair in itertools.pairwise(turn)]
        assert len(names) % 2 or len(set(followed)) == len(followed) == len(names) * (len(names) - 1), "each behind each, once"
        # the first five rounds, which is what most records have
        for name in names:
            before = [a for turn in turns[:5] for a, b in itertools.pairwise(turn) if b == name]
            assert len(set(before)) >= len(before) - len(names) % 2, f"{name} of {names} stood behind {before}"


class Alone:
    """The peers of one rank."""

    rank, size = 0, 1

    def barrier(self):
        pass

    def gather(self, value):
        return [value]

    def attempt(self, action):
        return action()

    slowest = attempt


@pytest.mark.parametrize("mode", ("eager", "graph"))
def test_times_of_a_call(mode, monkeypatch):
    """ms a call, also of a replay of several; µs of the host; the methods take turns, each as often as fills a timing."""
    seconds, timed, host = {"a": 0.001, "b": 0.002, "c": 0.004, "d": 0.4}, [], iter(range(100))

    def time_calls(call, calls, cuda, settle):
        timed.append((call(), calls))
        return seconds[timed[-1][0]]

    monkeypatch.setattr(bench.tuning, "timed", time_calls)
    monkeypatch.setattr(bench.time, "perf_counter", lambda: float(next(host)))
    monkeypatch.setattr(bench, "WARM_MS", 0.0)
    monkeypatch.setattr(bench, "WARM_LONG_MS", 0.0)
    asked = bench.parse(["gemm_rs", "--shapes", "8x8x8", "--rounds", "4", f"--{mode}"], cuda=True)
    asked.methods = []
    run = bench.Bench(asked, Alone(), torch.device("cpu"))
    run.cuda, run.rounds = True, 4
    for name in ("synchronize", "settle", "capture", "check"):
        monkeypatch.setattr(run, name, lambda *args: None)
    rows = run.measure(mode, None, [bench.Method(name, Row(name), call=lambda name=name: name) for name in seconds])
    calls = bench.GRAPH_CALLS if mode == "graph" else 1
    assert {row.method: row.rounds_ms for row in rows} == {name: [1e3 * s / calls] * 4 for name, s in seconds.items()}
    assert timed[:4] == [(name, bench.WARM_CALLS) for name in seconds]
    turns = [tuning.in_turn("abcd", turn) for turn in range(4)]
    assert [name for name, _ in timed[4:]] == list(itertools.chain(*turns)) and timed[4:8] != timed[8:12]
    assert dict(timed[4:]) == {"a": 20, "b": 10, "c": 5, "d": 5} == {row.method: row.iters for row in rows}
    assert {row.host_us for row in rows} == ({1e6 / bench.HOST_CALLS} if mode == "eager" else {None})


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


def test_attention():
    suite = bench_problems.SUITES["attention"]
    assert {s[1:] for s in suite["gemm_rs"]} == {(n, n) for n in (4096, 8192, 16384)}
    assert {s[1:] for s in suite["ag_gemm"]} == {(6144, 4096), (10240, 8192), (18432, 16384)}
    assert {s.m for op in suite.values() for s in op} == {16, 64, 256, 1024, 2048, 4096, 8192}


def test_named_suites():
    headline, eight, decode = (bench_problems.SUITES[name] for name in ("headline", "eight", "decode"))
    assert len(headline["gemm_rs"]) == 9 and len(headline["ag_gemm"]) == 7
    assert BIG in headline["gemm_rs"] and Shape(512, 57344, 8192) in headline["ag_gemm"]
    assert len(eight["gemm_rs"]) == len(eight["ag_gemm"]) == 4
    assert Shape(8192, 4096, 14336) in eight["gemm_rs"] and Shape(8192, 49152, 12288) in eight["ag_gemm"]
    assert [s.m for s in decode["gemm_rs"]] == [16, 64, 256, 512] == [s.m for s in decode["ag_gemm"]]
    others = {"all_reduce", "gemm_ar", "sparse_all_reduce", "reduce_scatter", "all_gather", "reduce", "broadcast"}
    for name, suite in bench_problems.SUITES.items():
        assert set(suite) == set(bench_problems.PROBLEMS) == set(bench_arguments.KINDS) - others
        for op, shapes in suite.items():
            assert len(set(shapes)) == len(shapes)
            for world in (1, 2, 4, 8):
                assert not [s for s in shapes if bench_arguments.KINDS[op].unfit(s, world)], (name, op, world)


def test_what_cannot_be_split():
    rs, ag, ar, reduce, sparse, part = (
        bench_arguments.KINDS[op] for op in ("gemm_rs", "ag_gemm", "gemm_ar", "all_reduce", "sparse_all_reduce", "all_gather")
    )
    assert part.unfit(Size(24), 3) is None and part.unfit(Size(24), 4) == "24 bytes are no multiple of 16, which is 4 for each rank"
    assert sparse.unfit(None, 7) is None
    assert ar.unfit(Shape(15, 5, 16), 4) is None and ar.unfit(Shape(16, 16, 10), 4).startswith("R=4 does not divide K=10;")
    assert rs.unfit(Shape(16, 5, 16), 4) is None
    assert ag.unfit(Shape(16, 16, 5), 4) is None
    assert rs.unfit(Shape(16, 16, 10), 4).startswith("R=4 does not divide K=10;")
    assert ag.unfit(Shape(15, 10, 16), 4).startswith("R=4 does not divide M=15 and N=10;")
    assert reduce.unfit(Size(12), 5) is None and reduce.unfit(Size(6), 2) == "6 bytes are no multiple of 4"


def test_what_one_rank_has_all_of_is_not_split():
    for op in ("reduce", "broadcast"):
        unfit = bench_arguments.KINDS[op].unfit
        assert unfit(Size(100), 3) is None and unfit(Size(6), 3) == "6 bytes are no multiple of 4"


def test_sizes():
    assert parse_sizes("512, 16K,3 mb,1G") == [Size(512), Size(16 << 10), Size(3 << 20), Size(1 << 30)]
    assert [str(Size(n)) for n in (100, 1024, 1536, 3 << 20, 1 << 30)] == ["100 B", "1 KB", "1536 B", "3 MB", "1 GB"]
    for text in ("", "16K,", "K", "1.5M", "-4", "0", "4T", "16x16"):
        with pytest.raises(ValueError, match=re.escape(repr(text.split(",")[-1]))):
            parse_sizes(text)
    assert bench_reduce.SIZES["sweep"][0] == Size(1 << 10) and bench_reduce.SIZES["sweep"][-1] == Size(256 << 20)


@pytest.mark.parametrize(("op", "least"), (("reduce_scatter", 0.75), ("all_gather", 0.75), ("reduce", 1.0), ("broadcast", 1.0)))
def test_what_collectives_move(op, least):
    times = {"torch": 2.0, "words": 1.0, "bulk": 1.5, "auto": 1.5}
    rows = [Row(name, rounds_ms=[ms]) for name, ms in times.items()]
    report = bench_arguments.KINDS[op].REPORT(op, "custom", 4, "graph", "bfloat16", 2, {}, {}, [Result(Size(1 << 30), rows)])
    reached = report.derived(report.results[0])
    assert reached["words"].bus_gb_s == pytest.approx(least * (1 << 30) / 1e6) and reached["words"].speedup == 2.0
    assert "worst 1.33× at 1 GB" in report.compared()[0] and "worst 1.50× at 1 GB" in report.compared()[1]


def test_bursts():
    keys = bench_bursts.resnet50()
    assert len(keys) == 157 and sum(keys) == 25_549_486 and max(keys) == 2_359_296
    few, some, most, whole = bench_bursts.BURSTS["resnet50"]
    assert [len(burst.keys) for burst in (few, some, most, whole)] == [1, 50, 150, 157]
    assert few == Burst((512,)) and sorted(whole.keys) == sorted(keys) and str(some) == "50 of 8,489,667 elements"
    assert len(set(some.keys)) > 10 and set(some.keys) <= set(most.keys) | {3} <= set(keys)
    assert bench_arguments.kind_of("all_reduce", "resnet50") is bench_bursts.Bursts
    for suite in ("headline", None):
        assert bench_arguments.kind_of("all_reduce", suite) is bench_reduce.AllReduce


@pytest.mark.parametrize("text", ("", "64", "64x32", "64x32x16x8", "64x32x0", "64x-3x16", "64x3.5x16", "8x8x8,", "axbxc"))
def test_a_bad_shape_is_named(text):
    bad = text.split(",")[-1]
    with pytest.raises(ValueError, match=re.escape(repr(bad))):
        parse_shapes(text)


@pytest.mark.parametrize("mode", ("eager", "graph"))
@pytest.mark.parametrize("ms, rounds", ((0.49, 7), (0.5, 20)))
def test_rounds_of_long_calls(mode, ms, rounds, monkeypatch):
    """Where a GPU comes to its limit of power they last for some time, which is that of replays in a graph."""
    calls, iters = bench.GRAPH_CALLS if mode == "graph" else 1, 4
    times, warm = {"fast": ms * calls, "slow": 10 * ms * calls}, 3.0 * ms * calls
    monkeypatch.setattr(bench, "WARM_MS", 0.0)
    monkeypatch.setattr(bench, "WARM_LONG_MS", warm)
    monkeypatch.setattr(bench, "TIMED_LONG_MS", 19.5 * sum(times.values()) * (iters + 1))
    run = bench.Bench(
        bench.parse(["gemm_rs", "--shapes", "8x8x8", "--methods", "gemm", "--iters", str(iters)], cuda=True),
        Alone(),
        torch.device("cpu"),
    )
    run.cuda, run.rounds, timed = True, 7, []
    for name in ("synchronize", "settle", "capture", "check", "host_us"):
        monkeypatch.setattr(run, name, lambda *args: None)
    monkeypatch.setattr(run, "time", lambda method, calls: timed.append(method.name) or times[method.name])
    rows = run.measure(mode, None, [bench.Method(name, Row(name)) for name in times])
    assert {row.method: row.rounds_ms for row in rows} == {name: [t / calls] * rounds for name, t in times.items()}
    assert len(timed) == 2 * (1 + (ms >= 0.5) + rounds)  # the first, once more to warm up, the rounds


# the command line


def test_a_method_for_machines_without_gpus(capsys):
    with pytest.raises(SystemExit) as end:
        bench.parse(["gemm_rs", "--methods", "auto,reference"], cuda=True)
    assert end.value.code == 2 and "'reference' is for machines without GPUs; give some of gemm, torch" in capsys.readouterr().err


#: How the ranks are spread, as torchrun and the user say it, and on how many nodes that is.
SPREADS = [({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, 2), ({"FLUXLIKE_VIRTUAL_NODES": "2"}, 2), ({"WORLD_SIZE": "4"}, 0)]
SPREADS += [({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "FLUXLIKE_VIRTUAL_NODES": "2"}, 4), ({}, 0)]
SPREADS += [({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, 1)]


@pytest.mark.parametrize("op", ("all_reduce", "sparse_all_reduce", "gemm_ar", "gemm_rs"))
@pytest.mark.parametrize(("spread", "nodes"), SPREADS)
def test_operations_that_stay_on_one_node(op, spread, nodes, monkeypatch, capsys):
    """Refused before anything starts; where nobody says on how many nodes the ranks are, fluxlike.init finds out."""
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "FLUXLIKE_VIRTUAL_NODES", "LOCAL_RANK", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in spread.items():
        monkeypatch.setenv(name, value)
    if nodes < 2 or op == "gemm_rs":
        between = ["--methods", "apart"] if op == "gemm_rs" and nodes != 1 else []
        assert bench.parse([op, *between], cuda=False).methods
    else:
        with pytest.raises(SystemExit) as end:
            bench.parse([op], cuda=False)
        assert end.value.code == 2 and f"the ranks are on {nodes} nodes, and bench {op} works on one; " in capsys.readouterr().err


def test_defaults():
    on_gpus, on_cpus = bench.parse(["gemm_rs"], cuda=True), bench.parse(["gemm_rs"], cuda=False)
    assert on_gpus.suite == "headline" and on_cpus.suite == "toy"
    assert on_gpus.modes == ["eager"] and on_gpus.rounds is None and on_gpus.iters is None
    ours = ["copy_engine", "in_kernel", "sequential", "decomposed", "stream_k", "auto"]
    assert on_gpus.methods == ["gemm", "torch", "async_tp", *ours]
    assert on_cpus.methods == ["reference", *ours]
    assert bench.parse(["gemm_rs", "--graph"], cuda=True).modes == ["graph"]
    assert bench.parse(["gemm_rs", "--graph", "--eager"], cuda=True).modes == ["eager", "graph"]
    assert bench.parse(["ag_gemm", "--methods", "auto,torch"], cuda=True).methods == ["torch", "auto"]
    in_fp32 = bench.parse(["ag_gemm", "--dtype", "float32"], cuda=True)
    assert in_fp32.methods == [name for name in on_gpus.methods if name != "decomposed"]
    assert "'decomposed' is not for dtype=torch.float32" in in_fp32.left_out["decomposed"] and not on_gpus.left_out
    reduce = bench.parse(["all_reduce", "--shapes", "4K,1M"], cuda=True)
    assert reduce.methods == ["torch", "torch_one_shot", "torch_two_shot", "one_shot", "two_shot", "bulk", "auto"]
    assert reduce.shapes == [Size(4096), Size(1 << 20)]
    assert bench.parse(["all_reduce"], cuda=False).methods == ["torch", "one_shot", "two_shot", "bulk", "auto"]
    assert bench.parse(["all_reduce", "--suite", "sweep"], cuda=True).suite == "sweep"
    assert bench.parse(["all_reduce", "--methods", "trees,auto"], cuda=True).methods == ["auto", "trees"]
    for op in ("reduce_scatter", "all_gather", "reduce", "broadcast"):
        methods = ["torch", "words", *["two_shot"] * (op in ("reduce", "broadcast")), "bulk", "auto"]
        assert bench.parse([op], cuda=True).methods == bench.parse([op], cuda=False).methods == methods
    bursts = bench.parse(["all_reduce", "--suite", "resnet50"], cuda=True)
    assert bursts.methods == ["torch", "torch_coalesced", "each", "list"]
    assert bench.parse(["all_reduce", "--suite", "resnet50-toy", "--methods", "list"], cuda=False).methods == ["list"]


@pytest.mark.parametrize(
    ("options", "says"),
    (
        (["--rounds", "0"], "at least one"),
        (["--iters", "many"], "'?many'?"),
        (["--seconds", "nan"], "nan is not a number of seconds"),
        (["--seconds=-1"], "-1 is not a number of seconds"),
        (["--iters", "0"], "above 0"),
        (["--graph"], "needs GPUs"),
        (["--methods", "auto,magic"], "'magic' is not one of reference"),
        (["--methods", "torch"], "'torch' needs a GPU; give some of reference"),
        (["--methods", "torch,async_tp,magic"], "'magic' is not one of"),
        (["--methods", "auto,apart"], "'apart' is for ranks on several nodes, and these are on one; start it over --nnodes"),
        (["--methods", ""], "'' is not one of"),
        (["--shapes", ""], "'' is not a shape"),
        (["--methods", "decomposed", "--dtype", "float32"], "is not for dtype=torch.float32"),
        (["--shapes", "64x32"], "'64x32' is not a shape"),
        (["--suite", "llama-8b"], "use --suite toy"),
        (["--suite", "toy", "--shapes", "8x8x8"], "not allowed with"),
        (["--suite", "unknown"], "invalid choice"),
        (["--suite", "sweep"], "is none of gemm_rs's"),
        (["--shapes", "8x8x8,8192x8192x28672"], "8192×8192×28672 would take hours"),
        (["--suite", "resnet50-toy"], "is none of gemm_rs's"),
    ),
)
def test_a_useless_command_line(options, says, capsys, monkeypatch):
    monkeypatch.setattr(once, "GRACE_S", 0)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as end:
            bench.parse(["gemm_rs", *options], cuda=False)
        assert end.value.code == 2
        said = capsys.readouterr().err
        assert re.search(says, said) if rank == "0" else said == ""


@pytest.mark.parametrize("op", bench_arguments.KINDS)
def test_shapes_for_the_interpreter(op, capsys):
    """As much as is said to be possible is, and the largest of the suite for GPUs is not."""
    kind = bench_arguments.KINDS[op]
    fits = (*kind.parse(kind.LARGEST), *kind.SUITES["toy"])
    assert bench.parse([op, "--shapes", kind.LARGEST], cuda=False).shapes == [fits[0]]
    with pytest.raises(SystemExit):
        bench.command.refuse_large(once.Parser(), [*fits, max(kind.SUITES["headline"], key=kind.work)], False, kind)
    assert f"without GPUs {kind.LARGEST} is the most" in capsys.readouterr().err


def test_shapes_of_trace_for_the_interpreter(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        trace.parse(["gemm_rs", "--shapes", "8192x8192x28672"])
    assert "would take hours" in capsys.readouterr().err


@pytest.mark.parametrize("said", ("x", "", "0"))
def test_a_number_of_ranks_that_is_none(said, capsys, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", said)
    with pytest.raises(SystemExit) as end:
        trace.parse(["gemm_rs", "--shapes", "8x8x8"])
    assert end.value.code == 2 and f"WORLD_SIZE={said!r} is not a whole number above 0; unset it" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(ranks.TORCHRUN, reason="starts its own ranks")
def test_a_complaint_of_a_rank_that_comes_late(tmp_path):
    """The launcher ends all ranks once one has ended: the others leave rank 0 the time to say why."""
    (tmp_path / "sitecustomize.py").write_text("import os, time\ntime.sleep(3 * (os.environ.get('RANK') == '0'))\n")
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "TRITON_INTERPRET")}
    places = os.pathsep.join([str(tmp_path), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ |= {"FLUXLIKE_PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": places}
    command = ["bash", str(ROOT / "scripts" / "launch.sh"), "--nproc", "2", "-m", "fluxlike", "bench", "gemm_rs", "--rounds", "0"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=250)
    assert done.returncode and done.stderr.count("--rounds 0 is below 1") == 1, done.stderr


def test_without_rich(monkeypatch, capsys):
    """The package may be missing on the second host only, so its first rank says so, too."""
    monkeypatch.setattr(once, "GRACE_S", 0)
    monkeypatch.setattr(bench.command.importlib.util, "find_spec", lambda name: None)
    for rank, local in (("0", "0"), ("1", "1"), ("2", "0"), ("3", "1")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", local)
        assert bench.main(["gemm_rs", "--shapes", "8x8x8"]) == 2
        said = capsys.readouterr().err.strip()
        assert said.endswith("run: python -m pip install rich matplotlib") if local == "0" else said == ""


@pytest.mark.skipif(ranks.TORCHRUN, reason="is about a process without ranks")
def test_without_torchrun(monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert bench.main(["gemm_rs", "--shapes", "8x8x8"]) == 2
    assert "scripts/launch.sh" in capsys.readouterr().err
    assert not fluxlike.is_initialized()


@pytest.mark.parametrize("tool", ("bench", "soak", "trace", "tune", "links"))
def test_where_nothing_can_be_written(tool, tmp_path, capsys, monkeypatch):
    """It is found before anything is measured, by the rank that writes, and said once."""
    (tmp_path / "file").write_text("")
    out = str(tmp_path / "file" / "out")
    parse = {
        "bench": lambda: bench.parse(["gemm_rs", "--out", out], cuda=False),
        "soak": lambda: soak.parse(["--minutes", "600", "--out", out]),
        "trace": lambda: trace.parse(["gemm_rs", "--out", out]),
        "tune": lambda: tune.parse(["gemm_rs", "--out", out], cuda=False),
        "links": lambda: links.parse(["--json", out]),
    }[tool]
    option = "--json" if tool == "links" else "--out"
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert getattr(parse(), option[2:]) == out
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as end:
        parse()
    asked = "tune gemm_rs" if tool == "tune" else tool
    said = capsys.readouterr().err
    assert end.value.code == 2 and f"{asked}: error: {option} {out}: no file can be made in " in said and "name a folder" in said
    if tool in ("tune", "links"):  # which write one file
        out = str(tmp_path)
        with pytest.raises(SystemExit):
            parse()
        assert f"{option} {out}: it is a folder" in capsys.readouterr().err
        out = str(tmp_path / "new" / "out")
        assert getattr(parse(), option[2:]) == out and not any((tmp_path / "new").iterdir())
        return
    out = str(tmp_path / "new" / "out")
    assert parse().out == out and not any((tmp_path / "new" / "out").iterdir())

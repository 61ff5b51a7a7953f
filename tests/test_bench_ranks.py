"""The bench on ranks: that it finds what is wrong, on ranks that are made to fail; its toy suites; its times on GPUs.

Nothing here is about speed. Where the GPU's half of the code is run on a CPU, `FakeCuda` stands in for streams and graphs.
"""

import contextlib
import functools
import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import ranks
import test_calls
import test_whole_sizes
import torch
import torch.distributed as dist

import fluxlike

pytest.importorskip("rich")

from fluxlike.ops import validate
from fluxlike.ops.all_reduce import KIND
from fluxlike.runtime import world
from fluxlike.tools import bench, bench_arguments, bench_bursts, bench_collectives, bench_problems, bench_reduce
from fluxlike.tools.bench_bursts import Burst
from fluxlike.tools.bench_peers import Failed, Lost, Peers
from fluxlike.tools.bench_reduce import Algorithm, Size
from fluxlike.tools.bench_report import Shape

ROOT = Path(__file__).resolve().parents[1]
LOOKS: list[str] = []


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
    found = run.shape(Shape(*shape) if type(shape) is tuple else shape)
    fluxlike.finalize()
    return {mode: {row.method: row for row in result.rows} for mode, result in found.items()}, run.bad


def agreements(group):
    """What the ranks have in common of numbers that differ, and of an action that fails on one."""
    peers = Peers()
    found = peers.slowest(lambda: 1.0 + peers.rank), peers.add(torch.tensor([1.0 + peers.rank])).item(), peers.gather(peers.rank)
    try:
        peers.slowest(lambda: 1.0 / peers.rank)
    except Failed as failure:
        return *found, str(failure)


def test_the_slowest_rank_counts():
    world = int(os.environ.get("WORLD_SIZE", ranks.POOL_SIZE))
    for most, total, everyone, failure in ranks.run_ranks(agreements, world, makes_groups=True):
        assert (most, total, everyone) == (world, world * (world + 1) / 2, list(range(world)))
        assert failure == "rank 0: ZeroDivisionError: float division by zero"


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
    fluxlike.gemm_rs = fluxlike.ag_gemm = lambda x, weight, ctx, out: out


def nothing_reduced():
    """By ours; torch's is as it is."""
    fluxlike.all_reduce = lambda x, algo: torch.empty_like(x)


def smallest_forgotten():
    """By ours, in lists: one of 3 elements."""
    honest = fluxlike.all_reduce_

    def all_reduce_(x):
        return honest(sorted(x, key=len)[1:]) if isinstance(x, list) else honest(x)

    fluxlike.all_reduce_ = all_reduce_


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


@pytest.mark.parametrize("op", ("gemm_rs", "ag_gemm"))
def test_nobody_passes_with_the_result_of_the_one_before(op):
    for found, bad in values(ranks.run_fresh(run_shape, 2, argv=[op], sabotage=nothing_written)):
        rows = found["eager"]
        assert bad and {rows[name].status for name in bench_problems.Problem.OURS} == {"WRONG"} and rows["reference"].status == "ok"


def test_nobody_passes_with_the_sum_of_the_one_before():
    for found, bad in values(ranks.run_fresh(run_shape, 2, argv=["all_reduce"], sabotage=nothing_reduced, shape=Size(4096))):
        rows = found["eager"]
        assert bad and {rows[name].status for name in bench_reduce.AllReduce.OURS} == {"WRONG"} and rows["torch"].status == "ok"


def every_collective(group):
    """Each of them timed as on GPUs; and when ours write nothing, or reduce returns something where there is nothing."""
    fluxlike.init(heap="shm")
    device, honest = torch.device("cpu"), {op: getattr(fluxlike, op) for op in bench_collectives.KINDS}
    rows = {"reduce_scatter": lambda n: n // group.size(), "all_gather": lambda n: n * group.size()}
    for op in honest:
        run = bench.Bench(bench.parse([op, "--rounds", "1"], False), Peers(), device)
        elements = rows.get(op, int)
        setattr(fluxlike, op, lambda x, *root, algo, n=elements: torch.empty(n(x.numel()), dtype=x.dtype))
        found = {row.method: row.status for row in run.shape(Size(4096))["eager"].rows}
        assert run.bad and found == dict.fromkeys(bench_collectives.KINDS[op].OURS, "WRONG") | {"torch": "ok"}, (op, found)
        setattr(fluxlike, op, honest[op])
    FakeCuda.install()
    for op in honest:
        run = bench.Bench(bench.parse([op, "--rounds", "2", "--iters", "2"], True), Peers(), device)
        run.cuda, run.rounds = True, 2
        for mode, result in run.shape(Size(4096)).items():
            for row in result.rows:
                assert row.status == "ok" and len(row.rounds_ms) == 2 and row.error <= row.allowed, (op, mode, row)
                assert row.path == {"torch": "", "auto": "words"}.get(row.method, row.method), (op, mode, row)
        assert not run.bad
    fluxlike.finalize()


def test_collectives():
    values(ranks.run_fresh(every_collective, 2, timeout=120))


def test_no_key_hides_behind_the_others():
    argv = ["all_reduce", "--suite", "resnet50-toy"]
    shape = Burst((3000, 70, 3, 500))
    for found, bad in values(ranks.run_fresh(run_shape, 2, argv=argv, sabotage=smallest_forgotten, shape=shape)):
        assert bad and {name: row.status == "ok" for name, row in found["eager"].items()} == {
            "torch": True, "torch_coalesced": True, "each": True, "list": False,
        }  # fmt: skip


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
                assert (row.choice or {}).get("transport", "") == row.path.partition("/")[0], row


@pytest.mark.slow
@pytest.mark.parametrize("op", ("gemm_rs", "ag_gemm"))
def test_ways_between_nodes(op):
    """Named, they are what they say; on one node, of which no launcher tells here, they say what they are for."""
    argv = [op, "--rounds", "1", "--methods", "apart,together,auto"]
    for nodes in (2, 1):
        for found, bad in values(ranks.run_fresh(run_shape, 2, {"FLUXLIKE_VIRTUAL_NODES": str(nodes)}, argv=argv)):
            rows = found["eager"]
            assert bad == (nodes == 1) and rows["auto"].status == "ok"
            if nodes == 1:
                assert all("FLUXLIKE_VIRTUAL_NODES=2" in rows[name].note for name in ("apart", "together"))
            else:
                paths = {name: row.path for name, row in rows.items()}
                assert paths["together"].endswith("/together") and paths["apart"].startswith("nodes/"), paths
                assert not paths["apart"].endswith("/together")
    assert bench_arguments.methods(bench_problems.GemmRS, True)[-1] == "auto", "only if they are named"


@pytest.mark.parametrize("op", ("gemm_rs", "ag_gemm", "gemm_ar"))
def test_few_rows_in_one_kernel_or_not(op):
    ways = ("one_shot", "two_shot") if op == "gemm_ar" else ("sequential",)
    methods = [f"{way}{how}" for how in ("" if op == "gemm_ar" else "/torch", "/fused") for way in ways]
    argv = [op, "--rounds", "1", "--methods", ",".join(methods)]
    for found, bad in values(ranks.run_fresh(run_shape, 2, argv=argv, shape=(32, 64, 64))):
        paths = [(row.path, row.status) for row in found["eager"].values()]
        assert not bad and paths == [(f"{way}/{how}", "ok") for how in ("torch", "fused") for way in ways], paths


def kept_for_other_sizes():
    """Contexts of calls that name none, in whose table calls of `run_shape`'s sizes go by the copy engine, and others do not."""
    make = functools.partial(torch.zeros, dtype=torch.bfloat16)
    fluxlike.gemm_rs(make(16, 64), make(32, 64))
    fluxlike.ag_gemm(make(8, 64), make(32, 64))
    for op in ("gemm_rs", "ag_gemm"):
        test_whole_sizes.mark(test_calls.kept_context(op, dist.group.WORLD, torch.bfloat16), 16, 32, 64)


def count_looks():
    """Operands are looked at in `LOOKS`; at the end each rank says how often."""
    looked = validate.operands
    validate.operands = lambda *args: LOOKS.append(args[0]) or looked(*args)


def run_and_count(group, argv):
    """How often calls of each method were looked at."""
    counts = {}
    for method in argv[-1].split(","):
        LOOKS.clear()
        found, bad = run_shape(group, [*argv[:-1], method], None if counts else count_looks)
        assert not bad and found["eager"][method].status == "ok"
        counts[method] = len(LOOKS)
    return counts


def test_calls_as_if_each_were_the_first():
    for outcome in ranks.run_fresh(run_and_count, 2, argv=["ag_gemm", "--rounds", "1", "--methods", "auto,anew"]):
        assert outcome.ok, str(outcome)
        assert outcome.value["auto"] == 1 and outcome.value["anew"] > 4, outcome.value


@pytest.mark.parametrize("op", ("gemm_rs", "ag_gemm"))
def test_calls_without_a_context(op):
    argv = [op, "--rounds", "1", "--methods", "said,unsaid"]
    for found, bad in values(ranks.run_fresh(run_shape, 2, argv=argv, sabotage=kept_for_other_sizes)):
        rows = found["eager"]
        assert not bad and all(row.status == "ok" for row in rows.values()), rows
        assert rows["said"].path.startswith(test_whole_sizes.SAID) and rows["unsaid"].path.startswith(test_whole_sizes.OWN), rows


def test_calls_between_nodes_without_a_context():
    argv = ["gemm_rs", "--rounds", "1", "--methods", "said,unsaid,auto"]
    for found, bad in values(ranks.run_fresh(run_shape, 2, {"FLUXLIKE_VIRTUAL_NODES": "2"}, argv=argv)):
        assert not bad and all(row.path.startswith("nodes/") for row in found["eager"].values()), found


def test_sizes_timed():
    argv = ["all_reduce", "--rounds", "2", "--iters", "2"]
    for found, bad in values(ranks.run_fresh(run_shape, 2, timeout=120, argv=argv, cuda=True, shape=Size(512))):
        assert not bad, found
        for mode, rows in found.items():
            assert rows.pop("torch_one_shot").note.startswith("every rank: ") and rows.pop("torch_two_shot").status == "failed"
            for name, row in rows.items():
                assert row.status == "ok" and len(row.rounds_ms) == 2 and 0 < row.error <= row.allowed, (mode, row)
                assert row.path.startswith({"torch": "", "auto": "one_shot"}.get(name, name))


@pytest.mark.slow
def test_bursts_timed():
    argv = ["all_reduce", "--suite", "resnet50", "--eager", "--graph", "--rounds", "2", "--iters", "1"]
    shape = Burst((3, 700, 64))
    for found, bad in values(ranks.run_fresh(run_shape, 2, timeout=120, argv=argv, cuda=True, shape=shape)):
        assert not bad, found
        for mode, rows in found.items():
            assert list(rows) == ["torch", "torch_coalesced", "each", "list"]
            for name, row in rows.items():
                assert row.status == "ok" and len(row.rounds_ms) == 2 and 0 < row.error <= row.allowed, (mode, row)
                assert row.path == ("one_shot" if name in ("each", "list") else "")


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
    """(exit status, what was said, what is in the JSON) of a whole run; the last rank believes that all the time in the world
    is left."""
    status, said, out = run_whole(group, argv)
    return status, said, json.loads(next(Path(out).glob("*.json")).read_text())


def run_whole(group, argv):
    """(exit status, what was said, the folder) of such a run."""
    fluxlike.init(heap="shm")
    asked = bench.parse(argv, cuda=False)
    run = bench.Bench(asked, Peers(), torch.device("cpu"))
    if torch.distributed.get_rank() == 1:
        run.budget = bench.Budget(None)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        status = run.run(argv)
    fluxlike.finalize()
    return status, said.getvalue(), asked.out


def test_rank_0_decides_when_time_is_up(tmp_path):
    """And a run that has measured nothing is no success: what a script reads of it is the exit status."""
    argv = ["gemm_rs", "--shapes", "9x8x8,8x8x8", "--seconds", "0", "--out", str(tmp_path)]
    told = []
    for status, said, read in values(ranks.run_fresh(run_all, 2, argv=argv)):
        assert status == 1 and read["shapes"] == []
        assert [item["why"].partition(";")[0] for item in read["left_out"]] == ["R=2 does not divide M=9", "0 seconds have passed"]
        told.append(said.count("nothing was measured"))
        assert "results were checked" not in said
    assert told == [1, 0]


@pytest.mark.slow
def test_toy_bursts(tmp_path):
    argv = ["all_reduce", "--suite", "resnet50-toy", "--rounds", "1", "--out", str(tmp_path)]
    for status, said, read in values(ranks.run_fresh(run_all, 2, argv=argv)):
        assert status == 0 and read["suite"] == "resnet50-toy" and "nothing was measured" not in said
        assert [shape["keys"] for shape in read["shapes"]] == [list(b.keys) for b in bench_bursts.BURSTS["resnet50-toy"]]
        for shape in read["shapes"]:
            assert all(facts["status"] == "ok" and facts["ms"] is None for facts in shape["methods"].values())


def run_without_room(group, argv):
    with contextlib.redirect_stderr(io.StringIO()) as complaints:
        status, said, _ = run_whole(group, argv)
    return status, said, complaints.getvalue()


def test_files_that_cannot_be_written(tmp_path):
    """The run goes on to its table, and complains once a file."""
    name = "gemm_rs-custom-R2-eager.json"
    (tmp_path / name).mkdir()
    argv = ["gemm_rs", "--shapes", "8x8x8,8x8x16", "--methods", "copy_engine", "--rounds", "1", "--out", str(tmp_path)]
    (status, said, complaints), other = values(ranks.run_fresh(run_without_room, 2, argv=argv))
    assert status == 1 and other[:2] == (0, "") and said.count("8×8×16") == 2 and "written" not in said
    assert complaints.startswith(f"bench: {tmp_path / name} cannot be written: ") and complaints.count("\n") == 1
    assert list(tmp_path.iterdir()) == [tmp_path / name]


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
        assert list(shape["methods"]) == list(bench_arguments.methods(bench_arguments.KINDS[op], cuda=False))
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
@pytest.mark.alone
@pytest.mark.parametrize("op", ("all_reduce", *bench_collectives.KINDS))
def test_sizes_on_gpus(op):
    if ranks.RANKS_PER_GPU > 1:
        pytest.skip("torch's symmetric memory refuses two ranks on one GPU")
    argv = [op, "--eager", "--graph", "--rounds", "2"]
    world = int(os.environ.get("WORLD_SIZE", ranks.POOL_SIZE))
    for found, bad in ranks.run_ranks(run_on_gpus, world, makes_groups=True, argv=argv, shape=Size(256 << 10)):
        assert not bad
        for mode, rows in found.items():
            for row in rows.values():
                assert row.status == "ok" and len(row.rounds_ms) == 2 and 0 < row.ms < 10, (mode, row)


@pytest.mark.gpu
@pytest.mark.alone
def test_bursts_on_gpus():
    if ranks.RANKS_PER_GPU > 1:
        pytest.skip("NCCL goes by sockets between ranks of one GPU, hundreds of milliseconds a burst")
    argv = ["all_reduce", "--suite", "resnet50", "--eager", "--graph", "--rounds", "2"]
    world = int(os.environ.get("WORLD_SIZE", ranks.POOL_SIZE))
    shape = bench_bursts.BURSTS["resnet50"][1]
    for found, bad in ranks.run_ranks(run_on_gpus, world, makes_groups=True, argv=argv, shape=shape):
        assert not bad
        for mode, rows in found.items():
            for row in rows.values():
                assert row.status == "ok" and len(row.rounds_ms) == 2 and 0 < row.ms < 100, (mode, row)


def run_on_gpus(group, argv, shape=None):
    run = bench.Bench(bench.parse(argv, cuda=True), Peers(), ranks.device())
    found = run.shape(shape or Shape(1024, 2048, 4096))
    return {mode: {row.method: row for row in result.rows} for mode, result in found.items()}, run.bad


@pytest.mark.gpu
@pytest.mark.alone
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


def paths(group):
    """The path of a method is of its own last call: not of a context that a graph holds, nor of who called behind its capture."""
    fluxlike.init(heap="shm", heap_bytes=64 << 20)
    for algo, n in (("one_shot", 64), ("bulk", 1 << 16)):
        fluxlike.all_reduce(torch.ones(n), algo=algo)
        this = world.current()
        this.cached[KIND.name, this.control.name].captured = algo == "one_shot"
    assert len(Algorithm._contexts()) == 2 and Algorithm(torch.ones(1), "bulk").last_path == "bulk"
    peers = SimpleNamespace(attempt=lambda act: act(), gather=lambda said: [said])
    problem = SimpleNamespace(judge=lambda name, result: (0.0, 1.0), chosen=lambda context: None)
    for graph, path in ((None, "another"), (object(), "mine")):
        row = SimpleNamespace(path="mine", error=0.0, allowed=1.0)
        how = dict(call=lambda: None, spoil=lambda: None, row=row, context=SimpleNamespace(last_path="another"), graph=graph)
        bench.Bench.check(SimpleNamespace(settle=lambda _: None, peers=peers), problem, SimpleNamespace(name="m", **how))
        assert row.path == path
    fluxlike.finalize()


@pytest.mark.skipif(ranks.TORCHRUN, reason="makes its own ranks")
def test_the_path_is_of_the_method_s_own_call():
    for outcome in ranks.run_fresh(paths, 2):
        assert outcome.ok, str(outcome)

"""The soak: its plan, its digests, its judgement of results and of memory; and that a run finds what is made to go wrong.

`FakeCuda` stands in for streams and graphs where the GPU's half of the code runs on a CPU.
"""

import contextlib
import io
import itertools
import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import ranks
import torch
import torch.distributed as dist

import fluxlike
from fluxlike.ops.tiling import MIN_TILE
from fluxlike.runtime import world
from fluxlike.tools import command, once, soak, soak_check, soak_machine, soak_plan, soak_report
from fluxlike.tools.soak_plan import CPU, GPU, Signature

ROOT = Path(__file__).resolve().parents[1]
SEEDS = range(3)
KINDS = soak_plan.kinds(0)


# the plan


def bursts(seed, count, size=4, profile=GPU):
    return list(itertools.islice(soak_plan.bursts(seed, size, profile), count))


def test_the_plan_follows_from_the_seed():
    assert bursts(5, 40) == bursts(5, 40)
    one, other = ([(step.mode, step.repeats, step.late) for burst in bursts(seed, 40) for step in burst.steps] for seed in (5, 6))
    assert one != other
    assert soak_plan.signatures(5, 4, GPU) == soak_plan.signatures(5, 4, GPU) != soak_plan.signatures(6, 4, GPU)


def test_groups():
    assert soak_plan.groups(1) == [[0]] and soak_plan.groups(3) == [[0, 1, 2]]
    assert soak_plan.groups(5) == [[0, 1, 2, 3, 4], [0, 1], [2, 3, 4]]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("profile", (GPU, CPU), ids=("gpu", "cpu"))
def test_the_pool_has_some_of_everything(profile, seed):
    pool = soak_plan.signatures(seed, 4, profile)
    assert [s.index for s in pool] == list(range(len(pool)))
    kinds = {(place, *kind) for place in range(3) for kind in soak_plan.kinds(place)}
    assert {op for _, op, _ in kinds} == set(soak_plan.OPS) and {kind[1:] for kind in kinds} == set(KINDS)
    assert {(s.place, s.op, s.schedule) for s in pool} == kinds
    assert {s.dtype for s in pool} == set(soak_plan.DTYPES)
    for name in ("bias", "transposed", "uneven"):
        for op in soak_plan.OVERLAPPED:
            assert {getattr(s, name) for s in pool if s.op == op} == {True, False}, name
        assert not any(getattr(s, name) for s in pool if s.op in soak_plan.COLLECTIVES)
    sparse = [s for s in pool if s.op == soak_plan.SPARSE]
    assert {s.uneven for s in sparse} == {True, False} and {s.reduction for s in sparse} == {"sum", "avg"}
    assert not any(s.bias or s.transposed for s in sparse)
    ag = [s for s in pool if s.op == "ag_gemm"]
    assert {s.weights for s in ag} == {1, 2, 3} and {s.gathered for s in ag} == {True, False}
    assert {s.reduction for s in pool if s.op in soak_plan.SUMS} == {"sum", "avg", "max"}
    assert {s.reduction for s in pool if s.op in ("gemm_rs", "gemm_ar", "all_gather", "broadcast")} == {"sum"}
    assert any(s.m < 4 for s in pool), "no call leaves a rank without rows"
    assert any(s.m % 4 and s.m > MIN_TILE for s in pool) and any(s.n % 16 for s in pool)
    graphed = {(s.place, s.op, s.schedule) for s in pool if s.graphed}
    assert graphed == ({kind for kind in kinds if kind[1:] != soak_plan.WAITS} if profile is GPU else set())
    if profile is GPU:
        large = [s for s in pool if s.m * s.n * s.k >= 8192 * 4096 * 14336]
        assert {s.op for s in large} == set(soak_plan.OVERLAPPED) and all(s.dtype == "bfloat16" and s.place == 0 for s in large)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_steps_have_some_of_everything(seed):
    pool, steps = soak_plan.signatures(seed, 4, GPU), [step for burst in bursts(seed, 2000) for step in burst.steps]
    assert [step.number for step in steps] == list(range(len(steps)))
    kinds = {(s.signature.op, s.signature.schedule, s.mode) for s in steps}
    no_graph = {(*soak_plan.WAITS, mode) for mode in soak_plan.GRAPH_MODES}
    assert kinds == {(*kind, mode) for kind in KINDS for mode in soak_plan.MODES} - no_graph
    repeated = {(s.signature.index, s.data) for s in steps}
    assert repeated == set(itertools.product(range(len(pool)), range(GPU.data)))
    assert {s.delay for s in steps} == set(GPU.delays) and {s.load for s in steps} == set(GPU.loads)
    assert {s.late for s in steps} == {0, 1, 2, 3} and {s.late for s in steps if s.signature.place} == {0, 1}
    assert {s.repeats for s in steps} == {1, 2, 3, 4} and {s.signature.graph_calls for s in steps if s.mode == "graph"} == {1, 2, 3}
    assert [s.number for s in steps if s.reference] == list(range(0, len(steps), 10))
    assert {s.given for s in steps if s.signature.op == "gemm_rs"} == {True, False}
    assert all(s.signature.op == "gemm_rs" and s.mode in ("eager", "stream") for s in steps if s.given)
    assert all(s.signature.graphed for s in steps if s.mode in soak_plan.GRAPH_MODES)


def test_a_burst_replays_a_graph_in_one_step_only():
    for burst in bursts(0, 2000):
        replayed = [step.signature.index for step in burst.steps if step.mode in soak_plan.GRAPH_MODES]
        assert len(set(replayed)) == len(replayed)


def test_contexts_are_large_enough_and_all_are_made_again():
    pool = soak_plan.signatures(1, 4, GPU)
    sizes = soak_plan.context_sizes(pool)
    for s in pool:
        if s.schedule == "kept" or s.op in (*soak_plan.COLLECTIVES, soak_plan.SPARSE):
            assert s.context is None
        else:
            assert all(size >= need for size, need in zip(sizes[s.context], (s.m, s.n, s.k), strict=True))
    remade = [burst.remake for burst in bursts(1, 8 * len(sizes))]
    assert {key for key in remade if key} == set(sizes) and sum(key is not None for key in remade) == len(sizes)


def test_the_warm_up_runs_everything_and_judges_each_once():
    pool = soak_plan.signatures(2, 2, GPU)
    steps = [step for burst in soak_plan.warm_up(pool, GPU) for step in burst.steps]
    assert {(s.signature.index, s.data) for s in steps} == set(itertools.product(range(len(pool)), range(GPU.data)))
    assert len(steps) == len(pool) * GPU.data and sum(s.reference for s in steps) == len(pool)


def test_the_calls_of_a_step():
    step = bursts(0, 1)[0].steps[0]
    for mode, calls in (("eager", 4), ("stream", 4), ("graph", 8), ("mixed", 13)):
        assert replace(step, signature=replace(step.signature, index=1), mode=mode, repeats=4).calls == calls


def test_find():
    steps = [step for burst in bursts(3, 30) for step in burst.steps]
    assert [soak_plan.find(3, 4, GPU, number) for number in (0, 17, 40)] == [steps[0], steps[17], steps[40]]


# digests


def test_a_digest_sees_every_bit(monkeypatch):
    monkeypatch.setattr(soak_check, "_PART", 3)
    values = torch.randn(3, 7).to(torch.bfloat16)
    whole = soak_check.digest([values]).tolist()
    assert soak_check.digest([values.clone()]).tolist() == whole
    seen = {tuple(whole)}
    for bit in range(8 * 2 * values.numel()):
        changed = values.clone()
        changed.view(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8
        seen.add(tuple(soak_check.digest([changed]).tolist()))
    assert len(seen) == 1 + 8 * 2 * values.numel()


def test_a_digest_sees_order_and_signs():
    values = torch.randn(64, 32)
    whole = soak_check.digest([values]).tolist()
    assert soak_check.digest([values.flip(0)]).tolist() != whole
    assert soak_check.digest([-values]).tolist() != whole
    assert soak_check.digest([torch.cat((-values[:2], values[2:]))]).tolist() != whole
    assert soak_check.digest([values[:32], values[32:]]).tolist() == whole  # the bytes are the same
    assert soak_check.digest([values[:0], values]).tolist() == whole
    assert soak_check.digest([values[:0]]).tolist() == [0, 0]


# the reference


RS = Signature(0, 0, "gemm_rs", "auto", "bfloat16", 37, 40, 64, True, False, False, 1, False, False)
AG = replace(RS, op="ag_gemm", weights=2, gathered=True, uneven=True)


def judged(group, signature, change):
    """Whether the results of the reference pass after ``change`` on the last rank."""
    control = world.current().control_of(group)
    operands = soak_check.Operands(signature, control.size, control.rank, torch.device("cpu"))
    operands.fill(torch.Generator(), 7 + control.rank)
    if signature.op in (*soak_plan.COLLECTIVES, soak_plan.SPARSE):
        results = soak_check.call(signature, operands, None, group, None)
    elif signature.op == "gemm_ar":
        results = [fluxlike.gemm_ar(operands.x, operands.weights[0], bias=operands.biases[0], group=group)]
    elif signature.op == "gemm_rs":
        results = [fluxlike.reference.gemm_rs(operands.x, operands.weights[0], bias=operands.biases[0], group=group)]
    else:
        zs, gathered = fluxlike.reference.ag_gemm(
            operands.x, operands.weights, bias=operands.biases, group=group, m=signature.m, return_gathered=True
        )
        results = [*zs, gathered]
    if change and control.rank == control.size - 1:
        which, value = change
        assert results[which].numel()
        results[which][-1, -1] += value
    error, allowed, largest, most = soak_check.judge(signature, operands, results, control, 1)
    return error <= allowed and largest <= most


CHANGES = ((RS, None, True), (RS, (0, 1.0), False), (RS, (0, math.nan), False))
CHANGES += ((AG, None, True), (AG, (0, 1.0), False), (AG, (1, math.inf), False), (AG, (2, 0.01), False))

PLAIN = replace(RS, index=1, schedule="auto", bias=False, transposed=False)
OTHERS = (replace(RS, op="gemm_ar"), *(replace(PLAIN, op=op) for op in soak_plan.COLLECTIVES))
OTHERS += tuple(replace(PLAIN, op=op, reduction=how) for op in ("all_reduce", "reduce_scatter", "reduce") for how in ("avg", "max"))
for other in (*OTHERS, replace(PLAIN, op="all_reduce", weights=3)):
    CHANGES += ((other, None, True), (other, (other.weights - 1, 0.5), False))
EXACT = replace(PLAIN, op=soak_plan.SPARSE, schedule="exact", k=200, uneven=True)
CHANGES += ((EXACT, (0, -1), False),)  # an id; what padded has last is padding
for other in (EXACT, replace(EXACT, schedule="padded", uneven=False, reduction="avg")):
    CHANGES += ((other, None, True), (other, (1, 0.5), False))


@pytest.mark.parametrize(("signature", "change", "right"), CHANGES)
def test_one_wrong_value_is_seen_by_all_ranks(signature, change, right):
    assert ranks.run_ranks(judged, 2, signature=signature, change=change) == [right] * 2


# memory


def test_growth():
    samples = [{"threads": 4.0 + (i == 1), "host MiB": 100.0 + i} for i in range(20)]
    found = soak_report.growth(samples)
    assert found["threads"] == {"first": 5.0, "last": 4.0, "allowed": 2}
    assert found["host MiB"] == {"first": 104.0, "last": 119.0, "allowed": 48.0}
    assert soak_report.growth([{"host MiB": 4000.0}] * 8)["host MiB"]["allowed"] == 120.0
    assert soak_report.growth(samples[:7]) == {}


def test_the_rank_that_grew_most():
    calm, grown = ({"threads": {"first": 4.0, "last": last, "allowed": 2}} for last in (5.0, 9.0))
    assert soak_report.worst_of([calm, grown, calm]) == {"threads": grown["threads"] | {"rank": 1}}


def test_a_rank_that_may_grow_more_hides_none_that_may_not():
    sizes = ((4000.0, 4100.0, 120.0), (1000.0, 1060.0, 48.0))
    large, small = ({"host MiB": dict(zip(("first", "last", "allowed"), size, strict=True))} for size in sizes)
    assert soak_report.worst_of([large, small]) == {"host MiB": small["host MiB"] | {"rank": 1}}


# runs


SMALL = replace(
    CPU,
    shapes={"even": ((16, 16, 16),), "ragged": ((5, 10, 12),), soak_plan.FEW: ((16, 64, 32),)},
    world=(("even", "ragged"),),
    half=(("even", "ragged"),),
    data=1,
    longest=3,
    remake_every=2,
)


class FakeCuda:
    """What `soak` uses of torch.cuda, on a CPU. A graph keeps the calls made while it is captured and repeats them."""

    recording = None
    replays = True
    current = None

    class Stream:
        behind = None

        def wait_stream(self, other):
            self.behind = other

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            pass

        def elapsed_time(self, end):
            return 10.0

    class CUDAGraph:
        def __init__(self):
            self.calls, self.gone = [], False

        def replay(self):
            assert not self.gone
            for again, results in self.calls if FakeCuda.replays else []:
                for result, new in zip(results, again(), strict=True):
                    result.copy_(new)

        def reset(self):
            self.gone = True

    @staticmethod
    @contextlib.contextmanager
    def graph(graph, capture_error_mode):
        FakeCuda.recording = graph
        yield
        FakeCuda.recording = None

    @classmethod
    @contextlib.contextmanager
    def stream(cls, stream):
        """Work goes to a new stream only behind what was queued to the last one."""
        assert stream is cls.current or stream.behind is cls.current, "two streams without order"
        cls.current = stream
        yield

    @classmethod
    def install(cls):
        cls.current = cls.Stream()
        fakes = {
            "current_stream": lambda: cls.current, "synchronize": lambda: None, "empty_cache": lambda: None,
            "mem_get_info": lambda: (1 << 30, 1 << 34), "memory_allocated": lambda: 1 << 20, "_sleep": lambda cycles: None,
        }  # fmt: skip
        for name in ("Stream", "Event", "CUDAGraph", "graph", "stream"):
            fakes[name] = getattr(cls, name)
        for name, fake in fakes.items():
            setattr(torch.cuda, name, fake)
        honest = soak.call

        def recorded(*args):
            results = honest(*args)
            if cls.recording is not None:
                cls.recording.calls.append((lambda: honest(*args), results))
            return results

        soak.call = recorded


class SmallGpu(soak_machine.Gpu):
    def _make_load(self, n):
        return soak_machine.Machine._make_load(self, 16)


def after(calls, change):
    """The operation gives ``change(result)`` on rank 1 from its call number ``calls`` on."""
    honest, made = fluxlike.gemm_rs, itertools.count(1)

    def gemm_rs(*args, **options):
        y = honest(*args, **options)
        if dist.get_rank() == 1 and next(made) >= calls:
            change(y)
        return y

    fluxlike.gemm_rs = gemm_rs


def one_bit(y):
    y.view(torch.uint8)[-1, -1] ^= 1


def wrong_bit(run):
    after(1 + len(soak_plan.SCHEDULES), one_bit)  # behind the warm-up


def wrong_from_the_start(run):
    after(1, lambda y: y.mul_(1.25))


def leaks(run):
    """Files of rank 1, and contexts that are made again but not closed, of both."""
    after(1, lambda y: os.dup(0))
    run.sample_s = 0
    honest = run.remake

    def remake(key, ballast):
        run.make_context(key)
        honest(key, ballast)

    run.remake = remake


def dead_replays(run):
    FakeCuda.replays = False


#: Graphs and streams, as FakeCuda has them.
FAKE = replace(SMALL, modes=GPU.modes, delays=GPU.delays)


def small_run(group, sabotage=None, count=3, argv=(), cuda=False):
    """(exit status, what was printed, the failures) of a run of ``count`` bursts."""
    fluxlike.init(heap="shm", heap_bytes=16 << 20)
    if cuda:
        FakeCuda.install()
    profile = FAKE if cuda else SMALL
    machine = (SmallGpu if cuda else soak_machine.Machine)(torch.device("cpu"))
    run = soak.Soak(soak.parse(["--minutes", "1000", *argv]), machine, profile)
    plan = run.plan
    run.plan = lambda: itertools.islice(plan(), count)
    if sabotage:
        sabotage(run)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        status = run.run(["--minutes", "1000"])
    fluxlike.finalize()
    return status, said.getvalue(), run.failures


def values(outcomes):
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
    return [outcome.value for outcome in outcomes]


def remakes_all(run):
    warm_up = run.warm_up

    def then():
        said = warm_up()
        for key in list(run.contexts):
            before = run.launches()
            run.remake(key, 8)
            assert run.launches() == before, key
        return said

    run.warm_up = then


def test_launches_of_contexts_that_are_made_again_count_once():
    assert [status for status, *_ in values(ranks.run_fresh(small_run, 2, sabotage=remakes_all, count=1))] == [0, 0]


def test_a_file_that_cannot_be_written_comes_behind_the_table(tmp_path):
    (tmp_path / "soak-R2.json").mkdir()
    (status, said, _), (other, *_) = values(ranks.run_fresh(small_run, 2, count=1, argv=["--out", str(tmp_path)]))
    assert status == 1 and other == 0 and said.rstrip().endswith("failures 0")


def test_a_wrong_bit_is_found_and_told_with_its_step():
    (status, said, failures), (other, silence, theirs) = values(ranks.run_fresh(small_run, 2, sabotage=wrong_bit))
    assert status == other == 1 and failures == theirs and failures
    # the bit is seen in the bits of each call, and may be in a step's comparison with the reference, which all ranks tell of
    number, first = next((i, failure) for i, failure in enumerate(failures, 1) if failure["which"].startswith("eager call"))
    assert first["ranks"].keys() == {1} and first["step"]["signature"]["op"] == "gemm_rs" and first["step"]["number"] >= 0
    assert "its bits are not those of the first run" in first["ranks"][1]
    step = soak_plan.find(0, 2, SMALL, first["step"]["number"])
    assert f"FAILURE {number}, {first['burst']}: eager call " in said and f"  {step}\n" in said
    assert f"launch.sh --nproc 2 -m fluxlike soak --seed 0 --only {step.number} --minutes" in said
    assert f"failures {len(failures)}\n" in said and silence == ""


def test_a_result_that_is_always_wrong_is_found_by_the_reference():
    for status, _, failures in values(ranks.run_fresh(small_run, 2, sabotage=wrong_from_the_start, count=0, timeout=120)):
        pool = [s.index for s in soak_plan.signatures(0, 2, SMALL) if s.op == "gemm_rs"]
        assert status == 1 and [f["step"]["signature"]["index"] for f in failures] == pool
        assert {f["which"] for f in failures} == {"against the reference"} and all(f["step"]["number"] == -1 for f in failures)


@pytest.mark.slow
def test_what_grows_is_a_failure():
    (status, said, failures), (other, *_) = values(ranks.run_fresh(small_run, 2, sabotage=leaks, count=14))
    assert status == other == 1 and not failures
    grown = {"file descriptors": "1", "threads": "", "heap in use MiB": ""}  # the threads are those of the contexts
    assert said.endswith(f"failures 0, grown: {', '.join(grown)}\n"), said
    for line in said[said.index("largest value") :].splitlines()[1:-2]:
        what = line[:22].strip()
        assert line.endswith(f"{grown.get(what, '')}  GROWN") == (what in grown), line


def counted(said):
    """{operation and schedule: calls of each mode, and of all} of a table."""
    rows = [line.split() for line in said.splitlines() if line.startswith(tuple(soak_plan.OPS))]
    return {(row[0], row[1]): [int(number) for number in row[2:]] for row in rows}


@pytest.mark.parametrize(
    ("size", "cuda", "count"),
    (pytest.param(4, False, 4, marks=pytest.mark.slow, id="halves"), pytest.param(2, True, 5, id="graphs")),
)
def test_a_run_without_a_fault(size, cuda, count):
    plan = bursts(0, count, size, FAKE if cuda else SMALL)
    steps = [step for burst in plan for step in burst.steps]
    assert {step.mode for step in steps} == (set(soak_plan.MODES) if cuda else {"eager"})
    assert {step.signature.place for step in steps} == ({0, 1, 2} if size == 4 else {0}) and any(b.remake for b in plan)
    for rank, (status, said, failures) in enumerate(values(ranks.run_fresh(small_run, size, cuda=cuda, timeout=120, count=count))):
        assert status == 0 and not failures, said
        if rank == 0:
            table = counted(said)
            assert table.keys() == set(KINDS)
            for kind in KINDS:
                calls = [
                    sum(s.calls for s in steps if (s.signature.op, s.signature.schedule) == kind and s.mode in modes)
                    for modes in (*([mode] for mode in (sorted(soak_plan.MODES) if cuda else ["eager"])), soak_plan.MODES)
                ]
                assert table[kind] == calls, said
            graphs = len(KINDS) - 1 if cuda else 0
            assert f"{graphs} graphs" in said and "memory was not judged" in said


def interrupted(run):
    """Twice, as by a terminal and the launcher; another rank's Ctrl-C alone ends nothing."""
    honest, soaks, rank = run.play, run.soak, dist.get_rank()

    def play(burst):
        honest(burst)
        if run.bursts == 1 - rank:
            for _ in range(2 - rank):
                os.kill(os.getpid(), signal.SIGINT)

    def soak_behind_the_warm_up(plan):
        run.play = play
        soaks(plan)

    run.soak = soak_behind_the_warm_up


def test_ctrl_c_ends_a_run_behind_its_burst(tmp_path):
    argv = ("--out", str(tmp_path))
    (status, said, failures), (other, *_) = values(ranks.run_fresh(small_run, 2, sabotage=interrupted, count=9, argv=argv))
    read = json.loads((tmp_path / "soak-R2.json").read_text())
    assert status == other == 0 and not failures and read["bursts"] == 2 and read["interrupted"] and read["ok"]
    assert "s of warm-up, ended by a signal\n" in said


def test_the_third_signal_is_as_ever():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), command.wishes_to_end() as wishes:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        assert wishes == [signal.SIGINT] * 2
        signal.raise_signal(signal.SIGINT)
    with command.wishes_to_end() as wishes:
        signal.raise_signal(signal.SIGTERM)
    assert wishes == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) == before


def test_a_graph_that_does_nothing_is_found():
    step = next(
        s for b in bursts(0, 99, 2, replace(SMALL, modes=GPU.modes, delays=GPU.delays)) for s in b.steps if s.mode == "graph"
    )
    argv = ["--only", str(step.number)]
    for status, _, failures in values(ranks.run_fresh(small_run, 2, sabotage=dead_replays, cuda=True, count=1, argv=argv)):
        assert status == 1 and {f["step"]["number"] for f in failures} == {step.number}
        calls = {f"replay {turn}, call {i} of the graph" for turn in range(step.repeats) for i in range(step.signature.graph_calls)}
        assert {f["which"] for f in failures} == {*calls, "against the reference"}


def test_a_step_far_on_is_announced(monkeypatch):
    told = []
    monkeypatch.setattr(soak_plan, "find", lambda seed, ranks, profile, number: bursts(0, 1, 2, SMALL)[0].steps[0])
    for only in (1000, 10_000_000):
        asked = SimpleNamespace(seed=0, only=only)
        soak.Soak.plan(SimpleNamespace(asked=asked, ranks=2, profile=SMALL, say=told.append, pool=range(1000)))
    assert told == ["making the plan as far as step 10000000, which takes some 40 s"]


def main_with_an_error(group):
    after(10, lambda y: y.no_such_method())
    return soak.main(["--minutes", "1000"])


def test_an_exception_on_one_rank_ends_all():
    outcomes = ranks.run_fresh(main_with_an_error, 2, {"FLUXLIKE_TIMEOUT_S": "30"}, expect_dead=(0, 1), timeout=120)
    assert [outcome.exit for outcome in outcomes] == [1, 1], "\n".join(map(str, outcomes))
    assert "no_such_method" in outcomes[1].trace and "soak: rank 1, calling Step(number=" in outcomes[1].trace


@pytest.mark.parametrize(
    ("options", "says"),
    (((), "--minutes"), (("--minutes", "-1"), "from 0 on"), (("--minutes", "1", "--limit", "0"), "--limit 0 must be 1 or more")),
)
def test_a_useless_command_line(options, says, capsys, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(once, "GRACE_S", 0)
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as end:
            soak.parse(list(options))
        assert end.value.code == 2
        said = capsys.readouterr().err
        assert says in said if rank == "0" else said == ""


@pytest.mark.slow
@pytest.mark.skipif(ranks.TORCHRUN, reason="starts its own ranks")
def test_from_the_command_line(tmp_path):
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "TRITON_INTERPRET")}
    places = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ |= {"FLUXLIKE_PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(places)}
    arguments = ["-m", "fluxlike", "soak", "--minutes", "0.05", "--out", str(tmp_path)]
    command = ["bash", str(ROOT / "scripts" / "launch.sh"), "--nproc", "2", *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    read = json.loads((tmp_path / "soak-R2.json").read_text())
    assert read["ok"] and read["failures"] == [] and read["heap"] == "shm"
    assert read["environment"]["command"].startswith("python -m fluxlike soak --minutes 0.05")
    assert read["compared_bitwise"] == read["calls"] == sum(read["calls_by_kind"].values()) > 0
    assert read["launches"] >= 2 * read["calls"] and read["compared_with_reference"] >= 1
    kinds = len(KINDS)
    assert read["warm_up"]["calls"] == 2 * kinds and read["warm_up"]["judged"] == kinds
    assert done.stdout.rstrip().endswith("soak-R2.json") and "\nfailures 0\n" in done.stdout

"""Tuned choices on ranks, which agree on one table; FLUXLIKE_TUNE=on, by which they measure, and how. `test_tune` has the files."""

import logging
import os
import tempfile

import pytest
import torch
import torch.distributed as dist
from cases import AGCase, RSCase
from ranks import run_fresh

import fluxlike
from fluxlike.ops import choice, tuned, tuning
from fluxlike.ops.choice import Problem
from fluxlike.ops.tuned import Entry, Machine
from fluxlike.runtime import cpu, env, world

BF16 = torch.bfloat16


def differing_caches(group):
    """Each rank has files of its own: rank 0's is what counts, for all. The last rank's is broken."""
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ["FLUXLIKE_CACHE_DIR"] += str(rank)
    os.environ["FLUXLIKE_TUNE"] = "off" if rank == 1 else "cached"
    rs, ag = RSCase(64, 48, [32] * size, BF16, 1, bias=True), AGCase(64, [32] * size, 48, BF16, 2)
    wanted = {0: "copy_engine", 1: "in_kernel"}.get(rank, "copy_engine")
    entries = []
    for op, shape in (("gemm_rs", (64, 48, 32 * size)), ("ag_gemm", (64, 32 * size, 48))):
        problem = Problem(op, (0, 0), env.cpu_programs(), size, BF16, *shape)
        made = [c for c in choice.candidates(problem) if c.transport == wanted]
        entries.append(Entry(problem, max(made, key=lambda c: (c.subs, c.tile.group_m, c.tile.bm * (1 - 2 * (rank % 2)))), 1.0))
    path = tuned.store(Machine("shm", (0, 0), env.cpu_programs()), entries)
    if rank == size - 1:
        path.write_text("{")
    fluxlike.init(heap="shm", heap_bytes=16 << 20)
    taken = []
    for op, case in (("gemm_rs", rs), ("ag_gemm", ag)):
        make = getattr(fluxlike, f"create_{op}_context")
        shape = (64, 48, 32 * size) if op == "gemm_rs" else (64, 32 * size, 48)
        with make(*shape, dtype=BF16) as ctx:
            for _ in range(2):
                case.check(ctx, group, "copy_engine", *([] if op == "gemm_rs" else [True]))
            taken.append(str(ctx.choose(ctx.problem(*shape))))
    fluxlike.finalize()
    return taken, [str(e.choice) for e in entries]


def test_ranks_with_different_caches_agree():
    outcomes = run_fresh(differing_caches, 3, {"FLUXLIKE_TIMEOUT_S": "20"})
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
    assert all(outcome.value[0] == outcomes[0].value[1] for outcome in outcomes)
    assert outcomes[1].value[1] != outcomes[0].value[1]


def bad_value(group):
    fluxlike.init(heap="shm", heap_bytes=16 << 20)
    os.environ["FLUXLIKE_TUNE"] = "maybe" if dist.get_rank() == 0 else "on"
    with pytest.raises(ValueError, match="FLUXLIKE_TUNE='maybe'"):
        fluxlike.create_gemm_rs_context(64, 48, 64)
    os.environ["FLUXLIKE_TUNE"] = "off"
    os.environ["FLUXLIKE_TORCH_PRODUCTS"] = str(dist.get_rank())
    for make in (fluxlike.create_gemm_rs_context, fluxlike.create_ag_gemm_context):
        with pytest.raises(ValueError, match=r"FLUXLIKE_TORCH_PRODUCTS is \[0, 1\] on the ranks .* alike on all"):
            make(64, 48, 64)
    with pytest.raises(ValueError, match="FLUXLIKE_TORCH_PRODUCTS is"):  # in a call that makes its context, too
        fluxlike.gemm_rs(torch.ones(8, 8), torch.ones(8, 8))
    os.environ["FLUXLIKE_TORCH_PRODUCTS"] = "0"
    with fluxlike.create_gemm_rs_context(64, 48, 64) as ctx:
        assert not ctx.problem(64, 48, 64).torch_products
    fluxlike.finalize()


def tuned_at_creation(group, sabotage):
    """Tuned once; the calls after that are as ever. ``sabotage``: on one rank every launch of one kind of tile fails."""
    rank, size = dist.get_rank(), dist.get_world_size()
    fluxlike.init(heap="shm", heap_bytes=16 << 20)
    launches, launch = [], cpu.CpuExecutor.launch

    def watched(self, kernel, programs, args, constants, warps, stages):
        launches.append(constants["GROUP_M"])
        if sabotage and rank == 1 and constants["GROUP_M"] == 8:
            raise RuntimeError("out of resource: shared memory")
        launch(self, kernel, programs, args, constants, warps, stages)

    cpu.CpuExecutor.launch = watched
    tuning.MOST = 4
    state = torch.get_rng_state()
    found = []
    for op, shape in (("gemm_rs", (32, 32, 16 * size)), ("ag_gemm", (32, 32 * size, 16))):
        make = getattr(fluxlike, f"create_{op}_context")
        counts = []
        for _ in range(2):
            before = len(launches)
            with make(*shape, dtype=BF16) as ctx:
                counts.append(len(launches) - before)
                assert ctx.stats["calls"] == 0 and list(ctx.tuned.table) == [shape]
                made = ctx.tuned.table[shape]
                case = RSCase(32, 32, [16] * size, BF16, 1) if op == "gemm_rs" else AGCase(32, [32] * size, 16, BF16, 1)
                case.check(ctx, group, made.transport, *([] if op == "gemm_rs" else [False]))
        assert counts[0] > 4 and counts[1] == 0, counts
        for other in ({"schedule": "in_kernel"}, {"dtype": torch.float32, "schedule": "copy_engine"}):
            before = len(launches)
            make(*shape, **{"dtype": BF16} | other).close()
            assert len(launches) == before, "what the caller has decided is not tuned"
        found.append(str(made))
    before = len(launches)
    fluxlike.create_gemm_rs_context(48, 32).close()  # K is not known
    fluxlike.create_ag_gemm_context(48, None, 32).close()  # N is not
    assert len(launches) == before and torch.equal(torch.get_rng_state(), state)
    machine = tuned.machine_of(world.current().executor)
    kept = [str(made) for op in ("gemm_rs", "ag_gemm") for made in tuned.known(machine, op, BF16, size).values()]
    fluxlike.finalize()
    return found, kept


def no_operands(group):
    """Rank 1 has no memory for what is to be measured."""
    fluxlike.init(heap="shm", heap_bytes=16 << 20)
    if dist.get_rank() == 1:
        tuning.random = refused
    before = world.current().heap.in_use
    with pytest.raises(RuntimeError, match="of the test"):
        fluxlike.create_gemm_rs_context(64, 48, 64, dtype=BF16)
    assert (world.current().heap.in_use, world.current().contexts) == (before, [])
    os.environ["FLUXLIKE_TUNE"] = "off"
    assert fluxlike.all_reduce(torch.ones(2)).tolist() == [2, 2]
    fluxlike.finalize()


def refused(*_):
    raise torch.OutOfMemoryError("of the test")


def test_a_rank_without_memory_for_what_is_measured():
    for outcome in run_fresh(no_operands, 2, {"FLUXLIKE_TUNE": "on"}, grace=10):
        assert outcome.ok, str(outcome)


def unkept(group):
    """Rank 0 cannot write to its cache: what was measured is used nevertheless, and of the measuring nothing is left."""
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    tuned.log.addHandler(handler)
    fluxlike.init(heap="shm", heap_bytes=16 << 20)
    tuning.MOST, before = 1, world.current().heap.in_use
    with fluxlike.create_gemm_rs_context(32, 32, 32, dtype=BF16) as ctx:
        assert list(ctx.tuned.table) == [(32, 32, 32)]
    assert (world.current().heap.in_use, world.current().contexts) == (before, [])
    assert [("M, N, K = (32, 32, 32) is not kept: " in text) for text in said] == [True] * (dist.get_rank() == 0), said
    fluxlike.finalize()


def test_a_cache_that_cannot_be_written():
    for outcome in run_fresh(unkept, 2, {"FLUXLIKE_TUNE": "on", "FLUXLIKE_CACHE_DIR": "/proc/fluxlike"}, grace=10):
        assert outcome.ok, str(outcome)


def nowhere(group):
    """Rank 0 is where there is no directory any more, and the cache is told by a relative path."""
    fluxlike.init(heap="shm", heap_bytes=16 << 20)
    if dist.get_rank() == 0:
        gone = tempfile.mkdtemp()
        os.chdir(gone)
        os.rmdir(gone)
    with pytest.raises(ValueError, match=r"cannot be looked for \(.*FLUXLIKE_CACHE_DIR to a directory by its absolute path"):
        fluxlike.create_gemm_rs_context(64, 48, 64)
    fluxlike.finalize()


def test_a_cache_that_is_nowhere():
    for outcome in run_fresh(nowhere, 2, {"FLUXLIKE_CACHE_DIR": "cache"}, grace=10):
        assert outcome.ok, str(outcome)


def test_a_wrong_value_is_an_error_on_all_ranks():
    assert all(outcome.ok for outcome in run_fresh(bad_value, 2))


@pytest.mark.parametrize("sabotage", (pytest.param(False, marks=pytest.mark.slow), True))
def test_on_tunes_when_a_context_is_made(sabotage):
    outcomes = run_fresh(tuned_at_creation, 2, {"FLUXLIKE_TUNE": "on", "FLUXLIKE_TIMEOUT_S": "20"}, sabotage=sabotage)
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
    found, kept = outcomes[0].value
    assert outcomes[1].value[0] == found == kept and len(found) == 2
    assert not sabotage or not any("group 8" in made for made in found)


# measuring


@pytest.mark.parametrize("cuda", (False, True))
def test_seconds_of_a_call(cuda, monkeypatch):
    """On GPUs between two events, whose times are in ms, behind a call that does not count; else by the host's clock."""
    now, made = 0.0, []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = now

        def elapsed_time(self, end):
            return (end.at - self.at) * 1e3

    def call():
        nonlocal now
        now += 0.5
        made.append(now)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(tuning.time, "perf_counter", lambda: now)
    assert tuning.timed(call, 4, cuda, lambda: made.append("settled")) == 0.5
    assert len(made) == (6 if cuda else 4) and (made[-1] == "settled") == cuda


def test_the_median_of_the_slowest_rank_counts(monkeypatch):
    """Of choices that take turns; one that fails on a rank is left out."""
    seconds = {"quick": iter((9.0, 9.0, 5.0, 1.0, 2.0, 4.0, 3.0)), "uneven": iter((9.0, 9.0, *5 * (1.0,))), "broken": iter((9.0,))}
    order = []

    class Control:
        def gather(self, value, what):
            slower = (value[0] + 2.0, "") if trials.used == "uneven" else value
            return [value, slower, (0.0, "out of ideas" if trials.used == "broken" else "")]

        def agree(self, what, value, error):
            assert error is None

    class Ctx:
        control, op, device = Control(), "gemm_rs", torch.device("cpu")

        def use(self, made):
            trials.used = made
            order.append(made)

        def check(self):
            pass

        def close(self):
            pass

    monkeypatch.setattr(tuning, "timed", lambda *args: next(seconds[trials.used]))
    trials = tuning._Trials(Ctx(), Ctx, lambda ctx: lambda: None)
    trials._cuda = True
    assert trials.measure(list(seconds)) == {"quick": 3.0, "uneven": 3.0}
    assert order[:5] == ["quick", "quick", "uneven", "uneven", "broken"]
    turns = [tuning.in_turn(["quick", "uneven"], turn) for turn in range(tuning.ROUNDS)]
    assert order[5:] == [made for turn in turns for made in turn] and turns[0] != turns[1], "each behind the other one"

"""Calls of gemm_rs and ag_gemm that follow each other: whose the results are, which contexts they use, how auto makes them.

As in test_ops, whole numbers that are exact in the dtype are compared with equality.
"""

import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from cases import AGCase, RSCase, launches, poison, same, schedules
from ranks import device, rows_slice, run_fresh, run_ranks

import fluxlike
from fluxlike.ops import choice, keeping
from fluxlike.runtime import cpu, interpreter, world

DTYPES = ("bfloat16", "float16", "float32")


def sizes_of_kept(group):
    """Which sizes the contexts of calls without one are made for."""
    control, tried = world.current().control_of(group), []

    def kept(least=0, **sizes):
        def make(wanted):
            tried.append(wanted)
            if wanted["m"] * wanted["n"] > least > 0:
                raise RuntimeError("no memory")
            state = SimpleNamespace(**wanted, closed=False, captured=False, label="the last one", close=lambda: None)
            state.fits = lambda sizes: all(getattr(state, name) >= size for name, size in sizes.items())
            state.unseen_failure = state.keep = lambda: None
            return state

        return keeping.kept("of a test", control, sizes, make, 1000)

    try:
        assert kept(m=5, n=600) is kept(m=8, n=700) and tried.pop() == {"m": 8, "n": 1000} and not tried
        kept(m=100, n=3)
        assert tried.pop() == {"m": 128, "n": 1000} and not tried, "of each size the largest"
        kept(1024, m=129, n=3)
        assert tried == [{"m": 256, "n": 1000}, {"m": 256, "n": 4}], "and if there is no memory for that, of this call"
    finally:
        world.current().cached.pop("of a test")


def test_sizes_of_the_contexts_that_are_kept():
    run_ranks(sizes_of_kept, 2)


def back_to_back(group, dtype, turns, jitter):
    """Calls follow each other with nothing between them, on four contexts in turn; looked at only at the end."""
    dtype, size, rank = getattr(torch, dtype), dist.get_world_size(group), dist.get_rank(group)
    shapes = ((100, 40, 30), (64, 64, 64), (3, 9, 17), (100, 40, 30), (33, 1, 64), (100, 64, 5), (1, 2, 3), (99, 63, 9))
    contexts = [
        (make(100, 64, 64, dtype, group, schedule), schedule)
        for make in (fluxlike.create_gemm_rs_context, fluxlike.create_ag_gemm_context)
        for schedule in schedules(dtype)
    ]
    previous = interpreter.configure(jitter and interpreter.Schedule(seed=rank + 1, jitter=0.02, delay=2e-3))
    cases, results = [], []
    try:
        for turn in range(turns):
            for place, (ctx, schedule) in enumerate(contexts):
                m, n, k = shapes[(turn + place) % len(shapes)]
                if ctx.op == "gemm_rs":
                    case = RSCase(m, n, [k] * size, dtype, 10 * turn + place, bias=turn % 2 == 0)
                else:
                    case = AGCase(m, [n] * size, k, dtype, 10 * turn + place, transposed=turn % 2 == 0)
                cases.append((case, f"turn {turn} {ctx.op} {m, n, k} {schedule} jitter={bool(jitter)}"))
                results.append(case.inputs(rank))
        for turn in range(turns):
            for place, (ctx, schedule) in enumerate(contexts):
                at = turn * len(contexts) + place
                x, w, b = results[at]
                if ctx.op == "gemm_rs":
                    results[at] = fluxlike.gemm_rs(x, w, ctx, bias=b)
                else:
                    results[at] = fluxlike.ag_gemm(x, w, ctx, bias=b, m=cases[at][0].m)
                assert ctx.last_path.startswith(schedule), cases[at][1]
    finally:
        interpreter.configure(previous)
    for (case, what), result in zip(cases, results, strict=True):
        same(result, case.expected(rank) if isinstance(case, RSCase) else case.whole()[1][rank], what)
    for place, (ctx, schedule) in enumerate(contexts):
        rows = [shapes[(turn + place) % len(shapes)][0] for turn in range(turns)]
        assert ctx.stats["calls"] == turns, schedule
        assert ctx.stats["launches"] == sum(launches(ctx.op, schedule, m, size, rank) for m in rows), schedule
        ctx.close()


@pytest.mark.parametrize("jitter", (False, True), ids=("plain", "jitter"))
@pytest.mark.parametrize(("world", "dtype"), ((2, "float16"), (3, "float32"), (4, "bfloat16")))
def test_back_to_back_calls_of_changing_shapes(world, dtype, jitter):
    run_ranks(back_to_back, world, dtype=dtype, turns=7, jitter=jitter)


REPEATS = 3


def repeats(group, dtype):
    """The same bits again and again, whatever the order in which programs and ranks came."""
    dtype, size, rank = getattr(torch, dtype), dist.get_world_size(group), dist.get_rank(group)
    generator = torch.Generator().manual_seed(rank)
    m, n, k = 90, 70, 100
    x, w = (torch.randn(s, k, generator=generator).to(dtype).to(device()) for s in (m, n))
    shard = x[rows_slice(m, size, rank)].contiguous()
    for schedule in schedules(dtype):
        with (
            fluxlike.create_gemm_rs_context(m, n, dtype=dtype, group=group, schedule=schedule) as rs,
            fluxlike.create_ag_gemm_context(m, n, k, dtype=dtype, group=group, schedule=schedule) as ag,
        ):
            first = None
            for turn in range(REPEATS):
                how = interpreter.Schedule(seed=turn, jitter=0.05, delay=1e-3) if turn else None
                previous = interpreter.configure(how)
                try:
                    now = (fluxlike.gemm_rs(x, w, rs), fluxlike.ag_gemm(shard, w, ag, m=m))
                finally:
                    interpreter.configure(previous)
                assert rs.last_path.startswith(schedule) and ag.last_path.startswith(schedule)
                first = first or now
                for op, a, b in zip(("gemm_rs", "ag_gemm"), first, now, strict=True):
                    assert torch.equal(a, b), f"{op} {schedule} {dtype}: other bits at repeat {turn}"
            for ctx in (rs, ag):
                assert ctx.stats["launches"] == REPEATS * launches(ctx.op, schedule, m, size, rank)


@pytest.mark.parametrize("dtype", ("bfloat16", *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in DTYPES[1:])))
def test_repeats_give_the_same_bits(dtype):
    run_ranks(repeats, 4, dtype=dtype)


def ownership(group):
    """What a call returns is the caller's: outside the heap, untouched by later calls, free to be overwritten."""
    size, rank, dtype = dist.get_world_size(group), dist.get_rank(group), torch.bfloat16
    for schedule in schedules(dtype):
        with (
            fluxlike.create_gemm_rs_context(64, 48, dtype=dtype, group=group, schedule=schedule) as rs,
            fluxlike.create_ag_gemm_context(64, 48, 32, dtype=dtype, group=group, schedule=schedule) as ag,
        ):
            kept = []
            for seed in range(6):
                rs_case = RSCase(61, 48, [32] * size, dtype, seed)
                ag_case = AGCase(61, [48] * size, 32, dtype, seed)
                x, w, _ = rs_case.inputs(rank)
                shard, v, _ = ag_case.inputs(rank)
                y = fluxlike.gemm_rs(x, w, rs)
                z, gathered = fluxlike.ag_gemm(shard, v, ag, m=61, return_gathered=True)
                for name, t in (("y", y), ("z", z), ("gathered", gathered)):
                    for ctx in (rs, ag):
                        for index, base in enumerate(ctx.block.addresses):
                            inside = base <= t.data_ptr() < base + ctx.block.nbytes
                            assert not inside or not t.numel(), f"{name} lies on the heap of rank {index}"
                for t in (x, w, shard, v):
                    t.fill_(float("nan"))
                kept.append((rs_case, y.clone(), y, ag_case, z.clone(), z, gathered.clone(), gathered))
                if seed % 2:
                    for t in (y, z, gathered):
                        t.fill_(float("nan"))
            for seed, (rs_case, y, y_there, ag_case, z, z_there, gathered, g_there) in enumerate(kept):
                what = f"call {seed} {schedule}"
                same(y, rs_case.expected(rank), what)
                same(z, ag_case.whole()[1][rank], what)
                same(gathered, ag_case.whole()[0], what)
                for then, now in ((y, y_there), (z, z_there), (gathered, g_there)):
                    assert now.isnan().all() if seed % 2 else torch.equal(then, now), f"{what}: changed afterwards"
            assert rs.last_path.startswith(schedule) and ag.last_path.startswith(schedule)


def test_results_belong_to_the_caller():
    run_ranks(ownership, 4)


def kept_context(op: str, group, dtype):
    ranks = dist.get_process_group_ranks(group)
    found = [
        ctx
        for ctx in world.current().cached.values()
        if ctx.op == op and ctx.group_ranks == ranks and ctx.dtype == dtype and not ctx.closed
    ]
    assert len(found) == 1, f"{len(found)} kept contexts for {op} {ranks} {dtype}"
    return found[0]


def without_context(group, dtype):
    """Calls without a context share one, which grows when it must and only then."""
    dtype, size, rank = getattr(torch, dtype), dist.get_world_size(group), dist.get_rank(group)
    grown = {"gemm_rs": [], "ag_gemm": []}
    fast = ("in_kernel", "sequential") if device().type == "cuda" else ("in_kernel",)
    shapes = ((5, 7, 9), (40, 30, 20), (3, 30, 2), (41, 8, 33), (100, 64, 33), (0, 1, 1), (5, 7, 9))
    for seed, (m, n, k) in enumerate(shapes):
        rs = RSCase(m, n, [k] * size, dtype, seed, bias=True)
        x, w, b = rs.inputs(rank)
        same(fluxlike.gemm_rs(x, w, bias=b, group=group), rs.expected(rank), f"gemm_rs {m, n, k} without context")
        ag = AGCase(m, [n] * size, k, dtype, seed)
        shard, w, _ = ag.inputs(rank)
        same(fluxlike.ag_gemm(shard, w, group=group, m=m), ag.whole()[1][rank], f"ag_gemm {m, n, k} without context")
        for op, seen in grown.items():
            ctx = kept_context(op, group, dtype)
            if m:
                assert ctx.last_path.split("/")[0] in fast, f"{op} {m, n, k}: auto took {ctx.last_path}"
            if not any(ctx is other for other in seen):
                seen.append(ctx)
    for op, seen in grown.items():
        assert 1 <= len(seen) <= 4, f"{op}: {len(seen)} contexts for seven calls"
        assert all(ctx.closed for ctx in seen[:-1]), f"{op}: a context that was outgrown is still open"
        assert seen[-1].max_m >= 100


@pytest.mark.parametrize(("world", "dtype"), ((1, "float32"), (3, "bfloat16"), (4, "float16")))
def test_calls_without_a_context(world, dtype):
    run_ranks(without_context, world, dtype=dtype)


def auto_schedule(group):
    """In one context some calls go by the copy engine and some in the kernel."""
    size, dtype = dist.get_world_size(group), torch.bfloat16
    with (
        fluxlike.create_gemm_rs_context(64, 64, dtype=dtype, group=group) as rs,
        fluxlike.create_ag_gemm_context(64, 64, 64, dtype=dtype, group=group) as ag,
    ):
        poison(rs, group)
        poison(ag, group)
        assert rs.schedule == ag.schedule == "auto"
        for ctx in (rs, ag):  # by itself it would take so large chunks only that the interpreter takes minutes
            for m, transport in ((64, "copy_engine"), (6, "in_kernel")):
                problem = ctx.problem(m, 64, 0 if ctx is rs else 64)
                ctx.tuned.table[problem.shape] = choice.usual(problem, transport)
        for seed, (m, expected) in enumerate(((64, "copy_engine"), (6, "in_kernel")) * 4):
            RSCase(m, 64, [64] * size, dtype, seed).check(rs, group, expected)
            AGCase(m, [64] * size, 64, dtype, seed).check(ag, group, expected, return_gathered=False)


@pytest.mark.parametrize("world", (2, 3))
def test_auto_chooses_each_call_for_itself_within_a_context(world):
    run_ranks(auto_schedule, world)


def odd_choices(group):
    """Calls made in ways that no rule comes to: each transport, cut, number of pushers and shape of a tile of the candidates."""
    size, dtype = dist.get_world_size(group), torch.bfloat16
    m, n, k = 128 * size, 80, 24
    with (
        fluxlike.create_gemm_rs_context(m, n, k * size, dtype=dtype, group=group) as rs,
        fluxlike.create_ag_gemm_context(m, n * size, k, dtype=dtype, group=group) as ag,
    ):
        poison(rs, group)
        poison(ag, group)
        for ctx, problem in ((rs, rs.problem(m, n, k * size)), (ag, ag.problem(m, n * size, k))):
            made = {}
            for one in choice.candidates(problem):
                tile = one.tile
                made.setdefault((one.transport, one.subs, one.pushers), one)
                made.setdefault((one.transport, tile.bm, tile.bn, tile.stages), one)
                made[tile.group_m] = one  # and one of those that are expected to be slow
            assert len(made) >= 10
            for seed, used in enumerate(dict.fromkeys(made.values())):
                ctx.use(used)
                rows = m - seed % 2 * (size + 5)  # the last chunk is lower, or all are
                if ctx is rs:
                    RSCase(rows, n, [k] * size, dtype, seed, bias=True).check(ctx, group, used.transport)
                elif choice.why_not(ctx.problem(rows, n * size, k), used) is None:
                    ns = [n - 8 * rank for rank in range(size)]
                    AGCase(rows, ns, k, dtype, seed).check(ctx, group, used.transport, return_gathered=used.subs > 1)
    by_name = fluxlike.create_gemm_rs_context(m, n, dtype=dtype, group=group, schedule="stream_k")
    with by_name as ctx, pytest.raises(ValueError, match="makes every call in one way"):
        ctx.choose(ctx.problem(m, n, k))


def odd_choices_with_slow_copies(group):
    """On a CPU copies are so fast that a tile which does not wait for its part finds it there; here it would not."""
    copy = cpu.CpuCopyEngine._copy

    def late(*how):
        time.sleep(0.01)
        copy(*how)

    cpu.CpuCopyEngine._copy = late
    try:
        odd_choices(group)
    finally:
        cpu.CpuCopyEngine._copy = copy


@pytest.mark.parametrize("world", (2, pytest.param(3, marks=pytest.mark.slow)))
def test_any_candidate_gives_the_right_numbers(world):
    run_ranks(odd_choices_with_slow_copies, world)


def outgrown(group):
    """A graph will run in the memory of the context that it has captured, also when calls have got a larger one since."""
    fluxlike.init(heap="shm", heap_bytes=16 << 20)
    this = world.current()
    calls = {
        "gemm_rs": lambda m: fluxlike.gemm_rs(torch.ones(m, 8), torch.ones(8, 8)),
        "all_reduce": lambda m: fluxlike.all_reduce(torch.ones(1000 * m), algo="one_shot"),
    }
    first = {}
    for name, act in calls.items():

        def kept(name=name):
            return next(ctx for ctx in this.cached.values() if ctx.op == name)

        act(4)
        first[name] = old = kept()
        this.executor.is_capturing = lambda: True
        act(4)
        this.executor.is_capturing = lambda: False
        assert act(16)[0].eq(16 if name == "gemm_rs" else 2).all()
        new = kept()
        assert new is not old and not old.closed, f"{name}: the context of a graph was closed"
        act(64)
        assert kept() is not new and new.closed and not old.closed, f"{name}: of the second there was no graph"
        act(4)
    assert fluxlike.gemm_rs(torch.ones(4, 8), torch.ones(8, 8), first["gemm_rs"]).eq(16).all()  # as a replay would
    this.executor.is_capturing = lambda: group.rank() == 1
    calls["gemm_rs"](4)
    this.executor.is_capturing = lambda: False
    with pytest.raises(ValueError, match=r"replacing context .* 'captured': "):
        calls["gemm_rs"](256)
    fluxlike.finalize()
    assert all(ctx.closed for ctx in first.values())


def test_a_context_that_a_graph_captured_stays():
    for outcome in run_fresh(outgrown, 2):
        assert outcome.ok, str(outcome)


def managers(group):
    for make in (fluxlike.create_gemm_rs_context, fluxlike.create_ag_gemm_context):
        with make(16, 16, 16, torch.float32, group) as ctx:
            assert not ctx.closed
            k = 16 if ctx.op == "ag_gemm" else ctx.k
            sizes = f"max_m=16, n=16, k={k}, dtype=torch.float32, schedule=auto, ranks={ctx.group_ranks}"
            assert repr(ctx) == f"<{type(ctx).__name__} {sizes}, open>"
        assert ctx.closed and repr(ctx).endswith(", closed>")
        ctx.close()
        try:
            with make(16, 16, 16, torch.float32, group) as ctx:
                raise KeyError("of the caller")
        except KeyError:
            pass
        assert ctx.closed, "left open by an exception"


@pytest.mark.parametrize("world", (1, 4))
def test_context_managers_close(world):
    run_ranks(managers, world)


def in_and_out_of_inference_mode(group):
    """A context may be made in inference mode and used outside of it, as a served model that is trained afterwards does."""
    size, dtype = dist.get_world_size(group), torch.bfloat16
    for schedule in schedules(dtype):
        for made, used in ((True, False), (False, True)):
            with torch.inference_mode(made):
                rs = fluxlike.create_gemm_rs_context(16, 16, 16 * size, dtype=dtype, group=group, schedule=schedule)
                ag = fluxlike.create_ag_gemm_context(16, 16 * size, 16, dtype=dtype, group=group, schedule=schedule)
            with rs, ag:
                for seed, inference in enumerate((made, used, made)):
                    with torch.inference_mode(inference):
                        RSCase(16, 16, [16] * size, dtype, seed).check(rs, group, schedule)
                        AGCase(16, [16] * size, 16, dtype, seed).check(ag, group, schedule, return_gathered=True)


def test_in_and_out_of_inference_mode():
    run_ranks(in_and_out_of_inference_mode, 2)

"""What only a GPU shows: CUDA graphs, streams, tiles of full size, waits that run out on the device. Under launch.sh."""

import contextlib
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from cases import SCHEDULES, TORCH, AGCase, RSCase, launches, same
from ranks import device, exact, ints, rows_slice, run_ranks

import fluxlike
from fluxlike.ops import all_reduce, collectives

pytestmark = pytest.mark.gpu
WORLDS = (2, 4)


def path(schedule: str) -> str:
    """What `last_path` says of a call with operands that TMA can address."""
    return f"{schedule}/{'torch' if schedule in TORCH else 'tma'}"


def contexts(group, schedule, m, n, k, dtype=torch.bfloat16):
    rs = fluxlike.create_gemm_rs_context(m, n, dtype=dtype, group=group, schedule=schedule)
    return rs, fluxlike.create_ag_gemm_context(m, n, k, dtype=dtype, group=group, schedule=schedule)


def full_tiles(group, schedule):
    """128×256 tiles, several a program, ragged and not; both layouts of the weight."""
    size = dist.get_world_size(group)
    rs, ag = contexts(group, schedule, 4200, 1100, 400)
    for seed, (m, n, k) in enumerate(((4096, 1024, 384), (4200, 1024, 384), (4096, 1040, 331), (4099, 1037, 328))):
        for transposed in (False, True):
            RSCase(m, n, [k] * size, torch.bfloat16, seed, bias=transposed, transposed=transposed).check(rs, group, schedule)
            AGCase(m, [n] * size, k, torch.bfloat16, seed, bias=transposed, transposed=transposed).check(
                ag, group, schedule, return_gathered=transposed
            )
            assert rs.last_path == ag.last_path == path(schedule)
    rs.check()
    ag.check()
    rs.close()
    ag.close()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("world", WORLDS)
def test_full_tiles(world, schedule):
    run_ranks(full_tiles, world, schedule=schedule)


def graphs(group, schedule):
    """An odd number of calls a graph, replayed an odd number of times on changing inputs, eager calls of others in between."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    m, n, k = 520, 384, 256
    rs, ag = contexts(group, schedule, m, n, k)
    rs_case, ag_case = (
        (lambda seed: RSCase(m, n, [k] * size, torch.bfloat16, seed)),
        (lambda seed: AGCase(m, [n] * size, k, torch.bfloat16, seed)),
    )
    x, w, _ = rs_case(0).inputs(rank)
    shard, v, _ = ag_case(0).inputs(rank)

    def calls():
        return [fluxlike.gemm_rs(x, w, rs) for _ in range(3)], fluxlike.ag_gemm(shard, v, ag, m=m, return_gathered=True)

    def load(seed):
        for target, source in zip(
            (x, w, shard, v), (*rs_case(seed).inputs(rank)[:2], *ag_case(seed).inputs(rank)[:2]), strict=True
        ):
            target.copy_(source)

    def check(results, seed, what):
        ys, (z, gathered) = results
        whole, expected = ag_case(seed).whole()
        for i, y in enumerate(ys):
            same(y, rs_case(seed).expected(rank), f"{what}: gemm_rs {i} {schedule}")
        same(z, expected[rank], f"{what}: ag_gemm {schedule}")
        same(gathered, whole, f"{what}: gathered {schedule}")

    check(calls(), 0, "before the capture")
    torch.cuda.synchronize()
    before = rs.stats["launches"]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = calls()
    assert rs.stats["launches"] == before + 3 * launches("gemm_rs", schedule, m, size, rank) and rs.last_path == path(schedule)
    for seed in range(1, 8):
        load(seed)
        graph.replay()
        if seed % 3 == 0:  # right behind a replay, and of other numbers: what goes on by the replay's signals would show
            graph.replay()
            load(seed + 10)
            check(calls(), seed + 10, f"eager beside replay {seed}")
        check(captured, seed, f"replay {seed}")
    rs.check()
    ag.check()
    rs.close()
    ag.close()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("world", WORLDS)
def test_graphs(world, schedule):
    run_ranks(graphs, world, schedule=schedule)


def collective_graphs(group):
    """Each collective by each algorithm in one graph, lists as well; replays on changing inputs, eager calls in between."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    shapes, ways = ((5,), (3000,), (2 * size + 1, 700)), (*all_reduce.ALGORITHMS, "trees")
    m, rows = shapes[2][0], rows_slice(shapes[2][0], size, rank)
    weight = ints((64, 700), torch.bfloat16, 7, density=0.02).to(device())

    def given(seed, of):
        return [ints(shape, torch.bfloat16, 100 * seed + 10 * i + of, -8, 8).to(device()) for i, shape in enumerate(shapes)]

    xs = given(0, rank)
    mine = xs[2][rows].clone()

    def load(seed):
        for target, source in zip(xs, given(seed, rank), strict=True):
            target.copy_(source)
        mine.copy_(xs[2][rows])

    def calls():
        made = {f"{algo} list": fluxlike.all_reduce(list(xs), group, algo=algo) for algo in ways}
        made |= {f"{algo} max": [fluxlike.all_reduce(x, group, "max", algo) for x in xs] for algo in ways}
        for algo in collectives.ALGORITHMS:
            made[f"{algo} reduce_scatter"] = [fluxlike.reduce_scatter(xs[2], group, algo=algo)]
            made[f"{algo} all_gather"] = [fluxlike.all_gather(mine, group, m, algo)]
        for algo in collectives.ROOTED:
            made[f"{algo} reduce"] = [fluxlike.reduce(xs[1], size - 1, group, algo=algo)]
            made[f"{algo} broadcast"] = [fluxlike.broadcast(xs[0], 0, group, algo)]
        return made | {"gemm_ar": [fluxlike.gemm_ar(xs[2], weight, group=group)]}

    def expected(seed):
        parts = [given(seed, of) for of in range(size)]
        together = [torch.stack(tensors).double() for tensors in zip(*parts, strict=True)]
        total = [t.sum(0) for t in together]
        exact(total[2].abs() @ weight.double().abs().T)
        return {
            "list": total,
            "max": [t.amax(0) for t in together],
            "reduce_scatter": [total[2][rows]],
            "all_gather": [torch.cat([parts[of][2][rows_slice(m, size, of)] for of in range(size)]).double()],
            "reduce": [total[1] if rank == size - 1 else None],
            "broadcast": [parts[0][0].double()],
            "gemm_ar": [total[2] @ weight.double().T],
        }

    def check(made, seed, what):
        right = expected(seed)
        for name, ys in made.items():
            for i, (y, e) in enumerate(zip(ys, right[name.split()[-1]], strict=True)):
                assert (y is None) == (e is None), f"{what}: {name}"
                if y is not None:
                    same(y, e.cpu(), f"{what}: {name}, tensor {i}")

    def part_of(three):
        return [three[0], three[1], three[2][:size]]

    def check_part(ys, seed, what):
        for i, (y, e) in enumerate(zip(ys, part_of(expected(seed)["max"]), strict=True)):
            same(y, e.cpu(), f"{what}: another list, tensor {i}")

    check(calls(), 0, "before the capture")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = calls()
        new = fluxlike.all_reduce(part_of(xs), group, "max")  # of sizes that no call had
    for seed in range(1, 6):
        load(seed)
        graph.replay()
        if seed % 2 == 0:
            check(calls(), seed, f"eager beside replay {seed}")
            for _ in range(2):  # by the table of the graph, which leaves its own addresses there
                fresh = [x.clone() for x in part_of(xs)]
                check_part(fluxlike.all_reduce_(fresh, group, "max"), seed, f"eager beside replay {seed}")
        check(captured, seed, f"replay {seed}")
        check_part(new, seed, f"replay {seed}")


@pytest.mark.parametrize("world", WORLDS)
def test_collective_graphs(world):
    run_ranks(collective_graphs, world)


def no_growth_in_a_capture(group):
    # wider than any call without a context before this test, whose context would do
    x, w = torch.zeros(16, 32, device=device()), torch.zeros(2**18, 32, device=device())
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="run this call once before the capture"), torch.cuda.graph(graph):
        fluxlike.gemm_rs(x, w, group=group)


def test_no_growth_in_a_capture():
    run_ranks(no_growth_in_a_capture, 2)


def streams(group, schedule):
    """Calls on changing streams, back to back, with the ranks out of step."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    rs, ag = contexts(group, schedule, 512, 256, 256)
    others = [torch.cuda.Stream() for _ in range(2)]
    kept = []
    for call in range(12):
        stream = (torch.cuda.current_stream(), *others)[call % 3]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            if call % size == rank:
                torch.cuda._sleep(20_000_000)
            case, other = RSCase(512, 256, [256] * size, torch.bfloat16, call), AGCase(512, [256] * size, 256, torch.bfloat16, call)
            x, w, _ = case.inputs(rank)
            shard, v, _ = other.inputs(rank)
            kept.append((case, other, fluxlike.gemm_rs(x, w, rs), fluxlike.ag_gemm(shard, v, ag), x, w, shard, v))
    torch.cuda.synchronize()
    for call, (case, other, y, z, *_) in enumerate(kept):
        same(y, case.expected(rank), f"gemm_rs call {call} {schedule}")
        same(z, other.whole()[1][rank], f"ag_gemm call {call} {schedule}")
    for ctx in (rs, ag):  # all but the first call of each slot set; where the epoch counts sets, a launch is the same for both
        each = launches(ctx.op, schedule, 512, size, rank)
        assert ctx.stats["direct"] == (11 if schedule in ("stream_k", "sequential") else 10) * each, ctx.stats
    rs.close()
    ag.close()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_streams(schedule):
    run_ranks(streams, 4, schedule=schedule)


def side_streams(group):
    """No side stream is one of those that torch hands out to everybody, which are 32 of a priority."""
    with contextlib.ExitStack() as made:
        sides = set()
        for _ in range(3):
            ctx = made.enter_context(fluxlike.create_gemm_rs_context(64, 64, group=group))
            sides |= {ctx.engine.raw, ctx.lanes.raw}
        assert len(sides) == 4, "an engine each, and lanes of the group"
        torchs = {torch.cuda.Stream(priority=priority).cuda_stream for priority in (0, -1) for _ in range(64)}
        assert not sides & torchs
        # memory of such a stream can be had, marked as used by another, and captured
        with ctx.lanes.forked(), ctx.lanes.of(1):
            t = torch.ones(1 << 20, device=device())
        t.record_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), ctx.lanes.forked(), ctx.lanes.of(1):
            t += 1
        graph.replay()
        assert t.sum().item() == 2 << 20


def test_side_streams():
    run_ranks(side_streams, 2)


@contextlib.contextmanager
def beside_a_capture(group, schedule):
    """A stream that is to be captured; two calls of which nothing is left to be loaded or made, on it and on the default stream;
    ``in_thread(stream, calls)``, for the results that another thread has there; ``right(results, what)``, which compares them.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    rs, ag = contexts(group, schedule, 512, 256, 256)
    case, other = RSCase(512, 256, [256] * size, torch.bfloat16, 1), AGCase(512, [256] * size, 256, torch.bfloat16, 1)
    (x, w, _), (shard, v, _) = case.inputs(rank), other.inputs(rank)
    torch.cuda.synchronize()
    captured = torch.cuda.Stream()
    both = (lambda: fluxlike.gemm_rs(x, w, rs)), (lambda: fluxlike.ag_gemm(shard, v, ag))

    def on(stream, calls):
        torch.cuda.set_device(device())
        with torch.cuda.stream(stream):
            return [call() for call in calls]

    def right(results, what):
        y, z = results
        same(y, case.expected(rank), f"gemm_rs{what} {schedule}")
        same(z, other.whole()[1][rank], f"ag_gemm{what} {schedule}")

    with ThreadPoolExecutor(1) as thread:

        def in_thread(stream, calls):
            return thread.submit(on, stream, calls).result()

        for stream in (torch.cuda.default_stream(), captured, captured):  # what is loaded or made once must not be so in a capture
            in_thread(stream, both)
        yield captured, both, in_thread, right
    for ctx in (rs, ag):
        ctx.check()
        ctx.close()


def calls_beside_a_capture(group, schedule):
    """While one thread captures a stream on which another one's calls were made, this one makes more: they are not in the graph."""
    with beside_a_capture(group, schedule) as (captured, both, in_thread, right):
        graph, usual, count = torch.cuda.CUDAGraph(), torch.cuda.default_stream(), torch.zeros(1, device=device())
        with torch.cuda.graph(graph, stream=captured, capture_error_mode="thread_local"):
            count += 1
            results = in_thread(usual, both)
        torch.cuda.synchronize()
        right(results, " beside a capture")
        graph.replay()
        assert count.item() == 1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_calls_beside_a_capture(schedule):
    run_ranks(calls_beside_a_capture, 2, schedule=schedule)


def refused_beside_a_capture(group, schedule):
    """While one thread captures calls, those of another on the same contexts are refused, and the graph is whole."""
    with beside_a_capture(group, schedule) as (captured, both, in_thread, right):
        graph, usual = torch.cuda.CUDAGraph(), torch.cuda.default_stream()
        with torch.cuda.graph(graph, stream=captured, capture_error_mode="thread_local"):
            replayed = [call() for call in both]
            for call in both:
                with pytest.raises(RuntimeError, match="a CUDA graph is being captured of calls that have a side stream in common"):
                    in_thread(usual, [call])
        for y in replayed:
            y.zero_()
        graph.replay()
        torch.cuda.synchronize()
        for results in (replayed, in_thread(usual, both)):
            right(results, ", and a refused call beside its capture")


@pytest.mark.parametrize("schedule", ("copy_engine", "decomposed"))
def test_calls_of_a_side_stream_are_refused_beside_its_capture(schedule):
    run_ranks(refused_beside_a_capture, 2, schedule=schedule)


def limited_contexts(seconds, *how):
    """`contexts` whose kernels have this limit, whatever it is for what comes later."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLUXLIKE_TIMEOUT_S", seconds)
        return contexts(*how)


def absent_rank(group, schedule, op, silent):
    """The last rank makes one call less: the others' waits end, their error says who and what, and all goes on.

    Silent, it is missed when the limit is over; else it closes the context, and with that all know.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    for ctx in contexts(group, schedule, 256, 256, 256):  # what is done once only takes longer than the limit
        ctx.close()
    rs, ag = limited_contexts("2" if silent else "60", group, schedule, 256, 256, 256)
    ctx = rs if op == "gemm_rs" else ag
    case = (
        RSCase(256, 256, [256] * size, torch.bfloat16, 1) if op == "gemm_rs" else AGCase(256, [256] * size, 256, torch.bfloat16, 1)
    )
    x, w, _ = case.inputs(rank)
    call = getattr(fluxlike, op)
    call(x, w, ctx)
    ctx.check()
    since = time.monotonic()
    if rank < size - 1:
        call(x, w, ctx)
        with pytest.raises(fluxlike.PeerTimeout if silent else ValueError, match=op) as caught:
            ctx.check()
        assert ("Rank 1 has not come this far" if silent else "rank 1 at 'closing context") in str(caught.value)
        with pytest.raises(type(caught.value), match=op):
            call(x, w, ctx)
        rs.close()
        ag.close()
    else:
        time.sleep(5 if silent else 1)
        with pytest.raises(ValueError, match="closing context"):
            rs.close()
        ag.close()
    assert time.monotonic() - since < 30
    with fluxlike.create_gemm_rs_context(64, 64, group=group, schedule="in_kernel") as good:
        RSCase(64, 64, [32] * size, torch.bfloat16, 2).check(good, group, "in_kernel")
    return rows_slice(4, size, rank).start


@pytest.mark.alone
@pytest.mark.parametrize("silent", (True, False))
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("op", ["gemm_rs", "ag_gemm"])
def test_absent_rank(op, schedule, silent):
    run_ranks(absent_rank, 2, schedule=schedule, op=op, silent=silent)


def every_program_gives_up(group, op, schedule, rounds):
    """The last rank does not come to a call in which every program of the others has to wait for it; what ends them differs.

    In odd rounds the limit, in even ones the other rank, which closes the context: words and clocks are read by each thread, and
    each round is another chance for threads of one program to see them differ.
    """
    m, n, k = 4096, 4096, 256
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    x, w, _ = (
        RSCase(m, n, [k] * size, torch.bfloat16, 1) if op == "gemm_rs" else AGCase(m, [n] * size, k, torch.bfloat16, 1)
    ).inputs(rank)
    call = getattr(fluxlike, op)
    for turn in range(rounds):
        silent = turn % 2 == 1
        rs, ag = limited_contexts("1.5" if silent else "60", group, schedule, m, n, k)  # the first round compiles the kernels
        ctx, other = (rs, ag) if op == "gemm_rs" else (ag, rs)
        call(x, w, ctx)
        ctx.check()
        since = time.monotonic()
        if rank < size - 1:
            call(x, w, ctx)
            with pytest.raises(fluxlike.PeerTimeout if silent else ValueError, match=op):
                ctx.check()
            ctx.close()
        else:
            time.sleep(2.5 if silent else 0.2)
            with pytest.raises(ValueError, match="closing context"):
                ctx.close()
        other.close()
        assert time.monotonic() - since < 20


@pytest.mark.alone
@pytest.mark.parametrize("schedule", [schedule for schedule in SCHEDULES if schedule != "decomposed"])
@pytest.mark.parametrize("op", ["gemm_rs", "ag_gemm"])
def test_every_program_gives_up(op, schedule):
    run_ranks(every_program_gives_up, 2, op=op, schedule=schedule, rounds=4)


def large(group, op, schedule, m, n, k):
    """Sampled rows against float64, where x, the gathered input, the slots or the result hold more than 2**31 elements."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    mine = rows_slice(m, size, rank)
    generator = torch.Generator(device()).manual_seed(rank)
    rows = m if op == "gemm_rs" else mine.stop - mine.start
    x = torch.randint(-1, 2, (rows, k), generator=generator, device=device(), dtype=torch.int8).to(torch.bfloat16)
    # so few entries that no sum over K and the ranks leaves ±256, where bfloat16 is exact
    w = ints((n, k), torch.bfloat16, rank, density=min(1.0, 64 / k)).to(device())
    sampled = torch.randint(0, m, (256,), generator=torch.Generator().manual_seed(1))
    sampled[:size], sampled[size : 2 * size] = (torch.arange(size) * m // size), m - 1 - torch.arange(size)
    owned = torch.tensor([i for i, row in enumerate(sampled.tolist()) if mine.start <= row < mine.stop], device=device())
    at = sampled.to(device())
    if op == "gemm_rs":
        expected = x[at].double() @ w.double().T
        dist.all_reduce(expected, group=group)
        with fluxlike.create_gemm_rs_context(m, n, group=group, schedule=schedule) as ctx:
            results = [(fluxlike.gemm_rs(x, w, ctx)[at[owned] - mine.start], expected[owned])]
            assert x.numel() > 2**31 or ctx.set_elements > 2**31
            ctx.check()
    else:
        whole = torch.zeros(len(sampled), k, dtype=torch.float64, device=device())
        whole[owned] = x[at[owned] - mine.start].double()
        dist.all_reduce(whole, group=group)
        with fluxlike.create_ag_gemm_context(m, n, k, group=group, schedule=schedule) as ctx:
            z, gathered = fluxlike.ag_gemm(x, w, ctx, m=m, return_gathered=True)
            assert gathered.numel() > 2**31 or z.numel() > 2**31
            results = [(z[at], whole @ w.double().T), (gathered[at], whole)]
            ctx.check()
    assert ctx.last_path == path(schedule)
    for got, right in results:
        assert right.abs().max() <= 256
        same(got, right.cpu(), f"{op} {schedule} {m, n, k}")


@pytest.mark.alone
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("op", ("gemm_rs", "ag_gemm"))
@pytest.mark.parametrize(("m", "n", "k"), ((1_048_639, 64, 2112), (65_600, 32_801, 64)))
def test_more_than_2_to_the_31_elements(op, schedule, m, n, k):
    # the whole world: only that may grow the heap, here to 9 GiB a context; at most about 40 GiB of a GPU are used
    run_ranks(large, int(os.environ["WORLD_SIZE"]), op=op, schedule=schedule, m=m, n=n, k=k)


def rows_that_overlap(group, schedule):
    """Expanded rows, and windows over one row: TMA and the 2D copy take neither, the call does."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    m, n, k = 256 * size, 128, 128
    memory = ints((1, 2 * m + k), torch.bfloat16, rank, density=0.5).to(device())
    rs, ag = contexts(group, schedule, m, n, k)
    w = ints((n, k), torch.bfloat16, 9).to(device())
    for step in (0, 2):
        x = memory.as_strided((m, k), (step, 1))
        case = RSCase(m, n, [k] * size, torch.bfloat16, 1)
        other, v, _ = case.inputs(rank)
        for left, right in ((x, v), (other, memory.as_strided((n, k), (step, 1)))):
            expected = left.double() @ right.double().T
            dist.all_reduce(expected, group=group)
            same(fluxlike.gemm_rs(left, right, rs), expected[rows_slice(m, size, rank)].cpu(), f"gemm_rs step {step}")
        shard = x[: m // size]
        parts = [torch.empty(m // size, k, dtype=torch.bfloat16, device=device()) for _ in range(size)]
        dist.all_gather(parts, shard.contiguous(), group=group)
        z, gathered = fluxlike.ag_gemm(shard, w, ag, return_gathered=True)
        same(gathered, torch.cat(parts).double().cpu(), f"gathered step {step}")
        same(z, (torch.cat(parts).double() @ w.double().T).cpu(), f"ag_gemm step {step}")
    rs.close()
    ag.close()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rows_that_overlap(schedule):
    run_ranks(rows_that_overlap, 2, schedule=schedule)

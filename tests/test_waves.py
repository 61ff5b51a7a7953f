"""The last wave of tiles, shared by all programs: what the host plans for it, and calls in which it is shared."""

import dataclasses
import functools
from collections import Counter

import mirrors
import pytest
import slow
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from cases import TRANSPORTS, AGCase, RSCase, poison
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks

import fluxlike
from fluxlike.kernels import tiles
from fluxlike.ops import cost, tiling, waves
from fluxlike.runtime import interpreter, world

H200 = (9, 0)


@given(
    behind=st.integers(0, 140), more=st.integers(-20, 400), programs=st.integers(1, 140), height=st.integers(1, 16),
    k_tiles=st.integers(1, 200), late=st.integers(0, 40), lag=st.integers(0, 300),
)  # fmt: skip
def test_a_shared_wave_can_be_run(behind, more, programs, height, k_tiles, late, lag):
    """Each step of the tiles has one program; each tile one that finishes it, which waits for the parts that are given."""
    most = max(behind + more, 0)
    shared, takes = waves.share(behind, most, programs, height, k_tiles, 0.0, late, lag)
    if shared == waves.Shared():
        assert takes == float("inf")
        return
    assert behind <= shared.cut <= most and shared.cut < behind + shared.lanes and shared.cut % shared.lanes == 0
    assert shared.lanes in (height, height // 2)
    found: Counter = Counter()
    finished: Counter = Counter()
    most_steps, parts, waited = 0, Counter(), Counter()
    for program in range(programs):
        lane, shares, steps, begin, end = mirrors.lane_share(
            program, programs, shared.cut, shared.lanes, k_tiles, shared.late, shared.lag
        )
        most_steps = max(most_steps, end - begin + (lag if program < late else 0))
        for place in range(begin // k_tiles, tiles.cdiv(end, k_tiles)):
            found[lane, place] += min(end - place * k_tiles, k_tiles) - max(begin - place * k_tiles, 0)
            if begin > place * k_tiles:
                parts[program] += 1
            else:
                finished[lane, place] += 1
                last = mirrors.late_of((place + 1) * k_tiles - 1, shares, steps, shared.late, shared.lag) * shared.lanes + lane
                waited.update(range(program + shared.lanes, last + 1, shared.lanes))
    assert found == {(lane, place): k_tiles for lane in range(shared.lanes) for place in range(shared.cut // shared.lanes)}
    assert finished == dict.fromkeys(found, 1) and all(count == 1 for count in parts.values())
    assert waited == parts, "a part is not added, or twice, or nobody gives it"
    assert most_steps <= takes


@triton.jit
def say_lane_share(out, program, programs, cut, lanes, k_tiles, late, lag):
    lane, shares, steps, begin, end = tiles.lane_share(program, programs, cut, lanes, k_tiles, late, lag)
    tl.store(out, lane)
    tl.store(out + 1, shares)
    tl.store(out + 2, steps)
    tl.store(out + 3, begin)
    tl.store(out + 4, end)


@settings(max_examples=40)
@given(
    data=st.data(), programs=st.integers(1, 140), height=st.integers(1, 8), columns=st.integers(1, 20), k_tiles=st.integers(1, 90),
    late=st.integers(0, 8), lag=st.integers(0, 50),
)  # fmt: skip
def test_the_mirror_of_a_lane_share(data, programs, height, columns, k_tiles, late, lag):
    program = data.draw(st.integers(0, programs - 1))
    shares = max(min(programs // height, columns * k_tiles), 1)
    late = min(late, shares - 1)
    lag = min(lag, tiles.longest_lag(shares, columns * k_tiles, late))
    how = (program, programs, columns * height, height, k_tiles, late, lag)
    out = torch.full((5,), -1, dtype=torch.int32)
    interpreter.run(say_lane_share, 1, out, *how)
    assert tuple(out.tolist()) == mirrors.lane_share(*how)


def deal(m: int, n: int, k: int, ranks: int, pushers: int, rows: int | None = None, capability=H200, programs: int = 132):
    """What a launch of ag_gemm on a GPU would be; n of a rank."""
    full = tiles.chunk_rows(m, ranks)
    launch = waves.Launch("ag_gemm", capability, torch.bfloat16, ranks, programs)
    return waves.gather(launch, tiling.WIDE, pushers if ranks > 1 else 0, full if rows is None else rows, full, n, k)[0]


def test_waves_of_an_h200():
    """3.4 waves are shared, 3.9 and 7.8 are not worth it, 27.2 are; few steps never."""
    cuts = {(m, n, k): deal(m, n // 4, k, 4, 0).shared.cut for m, n, k in (
        (1024, 57344, 8192), (1024, 57344, 512), (8192, 16384, 8192), (8192, 57344, 8192), (4096, 49152, 12288), (2048, 57344, 8192)
    )}  # fmt: skip
    assert list(cuts.values()) == [54, 0, 0, 20, 84, 0]
    assert deal(1024, 57344 // 4, 8192, 4, 0, capability=(8, 0)).shared == waves.Shared(), "not measured there"


def test_what_pushers_are_behind_counts():
    """As one H200 that plays a rank of four took it, whole → shared: 171 → 272 and 197 → 205 µs, and 341 → 278 and 178 → 153."""
    shapes = (2048, 10240, 8192), (2048, 28672, 4096), (1024, 18432, 16384), (2048, 15360, 5120)
    assert [deal(m, n // 4, k, 4, 16).shared.cut for m, n, k in shapes] == [0, 0, 12, 108]
    assert [deal(m, n // 4, k, 4, 0).shared.cut for m, n, k in shapes] == [28, 52, 12, 0]


#: (M, N and K of a rank, ranks, pushers of the choice): pushers, pieces of a row of tiles, turns meanwhile.
PUSHES = {
    (2048, 2560, 8192, 4, 16): (66, 17, 1),  # half of the programs, as the own tiles are fewer
    (8192, 7168, 8192, 8, 24): (24, 3, 3),
    (1024, 4608, 16384, 4, 16): (66, 33, 0),  # the last wave is shared
    (4000, 2048, 7000, 4, 16): (66, 9, 1),
    (65536, 256, 8192, 4, 16): (16, 1, 2),
    (256, 256, 300, 2, 16): (2, 2, 1),  # no more than there are columns for
    (256, 256, 200, 2, 16): (1, 1, 1),
    (512, 0, 512, 2, 16): (4, 2, 0),  # ranks that have no columns push as well
    (512, 256, 512, 1, 16): (0, 0, 0),
}


def test_who_pushes():
    assert {shape: tuple(deal(*shape)[1:4]) for shape in PUSHES} == PUSHES
    few = [tuple(deal(512, 256, 512, 2, 16, programs=programs)[:4]) for programs in (1, 2, 3)]
    assert few == [(1, 1, 1, 0), (2, 1, 1, 1), (3, 1, 1, 1)], "somebody has to push, and somebody else to compute"
    assert deal(512, 256, 512, 2, 16, rows=0).pushers == 0, "there is nothing to push"
    tiles_of = [deal(200, 300, 512, 1, 0, rows=rows).programs for rows in (0, 1, 200)]
    assert tiles_of == [1, 4, 4], "tiles that are not whole count, too"


def test_a_gemm_rs_with_copies_shares_less():
    """For it two H100s took 69 to 188 µs, and 41 to 180 where kernels store to the peer. By sizes of the whole problem."""
    shapes = ((4096, 8192, 28672), (4096, 12288, 49152), (2048, 12288, 49152), (8192, 8192, 28672), (8192, 12288, 49152))
    cuts = {}
    for transport in ("copy_engine", "in_kernel"):
        launch = waves.Launch("gemm_rs", H200, torch.bfloat16, 2, 132)
        for m, n, k in shapes:
            height, own = m // 256, m // 256 * (n // 256)
            cuts[transport, m, n] = waves.scatter(launch, tiling.WIDE, transport, own, own, height, k // 2)[0].cut
    assert list(cuts.values()) == [0, 0, 0, 0, 36, 0, 84, 0, 68, 36]


@given(
    tiles_m=st.integers(1, 12), tiles_n=st.integers(0, 40), k=st.integers(1, 9000), ranks=st.integers(1, 8),
    pushers=st.sampled_from((0, 16, 24, 32)), without=st.booleans(), programs=st.sampled_from((1, 2, 7, 66, 132)),
    capability=st.sampled_from((H200, tiling.CPU)),
)  # fmt: skip
def test_every_tile_of_ag_gemm_is_whole_or_shared(tiles_m, tiles_n, k, ranks, pushers, without, programs, capability):
    """Of all that a rank has to compute, by whoever pushes; own tiles are shared in a group of one rank only."""
    rows = 0 if without and ranks > 1 else tiles_m * 128
    made = deal(tiles_m * 128 * ranks, tiles_n * 256, k, ranks, pushers, rows, capability, programs)
    own, remote = (tiles_m * tiles_n * there for there in (int(rows > 0), ranks - 1))
    whole = own + remote - made.shared.cut
    assert whole >= (own if ranks > 1 else 0) and made.pushers <= made.programs
    if pushers and ranks > 1 and rows:
        assert 1 <= made.pushers <= max(1, programs // 2) and 1 <= made.pieces <= tiles.cdiv(k, waves.PUSH_COLUMNS)
    assert (made.head_start - 1) * (made.programs - made.pushers) < max(own, 1), "a turn without own tiles"
    taken: list[int] = []
    for program in range(made.programs):
        how = (program, made.programs, made.pushers, made.head_start)
        taken += [mirrors.dealt(turn, *how) for turn in range(mirrors.turns_before(0, *how), mirrors.turns_before(whole, *how))]
    assert sorted(taken) == list(range(whole))


def replayed(case, ctx, rank: int) -> None:
    """Two calls in a CUDA graph, whose numbers come from the device, give the bits of a call outside of it."""
    x, w, b = case.inputs(rank)
    call = fluxlike.gemm_rs if isinstance(case, RSCase) else functools.partial(fluxlike.ag_gemm, m=case.m)
    wanted, graph = call(x, w, ctx, bias=b), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [call(x, w, ctx, bias=b) for _ in range(2)]
    for _ in range(3):
        graph.replay()
        assert all(torch.equal(y, wanted) for y in found)
    ctx.check()


def calls_that_share(group, op, schedule, programs, columns):
    """Exact calls of two sizes, of which each shares, as parts that programs gave show; ``columns``: of tiles, on a CPU."""
    dtype, size, rank = torch.float16, dist.get_world_size(group), dist.get_rank(group)  # it holds the larger sums
    executor = world.current().executor
    before, costs, rate = executor.programs, dict(cost.SHARING), cost.PUSH_RATE
    on_cpu = executor.name == "shm"
    # (rows of a chunk, columns of a rank's result): not whole tiles either
    shapes = ((128, 64 * columns, 320), (120, 64 * columns - 8, 250)) if on_cpu else ((512, 8704, 512), (500, 8624, 1040))
    previous = interpreter.configure(interpreter.Schedule(seed=rank + 1, jitter=0.02, delay=1e-3))
    try:
        cost.SHARING |= dict.fromkeys(cost.SHARING, 0.0)
        cost.PUSH_RATE = 1e12 if size == 4 else 600e9  # who pushes is a few steps behind, which shorter shares make up for
        if on_cpu:
            executor.programs = programs
        for seed, (rows, n, k) in enumerate(shapes):
            m = rows * size - (7 if seed else 0)
            if op == "gemm_rs":
                ctx = fluxlike.create_gemm_rs_context(m, n, k * size, dtype, group, schedule)
                case = RSCase(m, n, [k] * size, dtype, seed, bias=bool(seed))
            else:
                ctx = fluxlike.create_ag_gemm_context(m, n * size, k, dtype, group, schedule)
                case = AGCase(m, [n] * size, k, dtype, seed, bias=bool(seed))
            with ctx:
                poison(ctx, group)
                chosen = ctx.choose(ctx.problem(m, n if op == "gemm_rs" else n * size, k * size if op == "gemm_rs" else k))
                ctx.use(dataclasses.replace(chosen, tile=dataclasses.replace(chosen.tile, group_m=4)))
                assert not ctx.parts.any()
                for _ in range(2):
                    case.check(ctx, group, schedule, **({} if op == "gemm_rs" else {"return_gathered": False}))
                if not on_cpu:
                    replayed(case, ctx, rank)
                given = ctx.parts[ctx.parts != 0]
                assert len(given) and (given == given.max()).all(), f"{op} {schedule}: no program gave a part of a tile"
    finally:
        interpreter.configure(previous)
        executor.programs = before
        cost.SHARING |= costs
        cost.PUSH_RATE = rate


@pytest.mark.parametrize("schedule", TRANSPORTS)
@pytest.mark.parametrize("op", ["gemm_rs", "ag_gemm"])
@pytest.mark.parametrize(("size", "programs", "columns"), slow.behind(2, [(2, 6, 2), (4, 11, 3), (1, 6, 4), (3, 10, 2)]))
def test_calls_that_share_their_last_wave(op, schedule, size, programs, columns):
    """In lanes of two programs each."""
    run_ranks(calls_that_share, size, op=op, schedule=schedule, programs=programs, columns=columns)

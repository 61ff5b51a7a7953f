"""gemm_rs and ag_gemm give the right numbers: whole numbers that are exact in the dtype, compared with equality.

The expected values are computed in float64 from the inputs of all ranks, which every rank can make from the seeds; the
plain-torch reference of the package is held to the same values. The slots on the heap are filled with NaN first, so
that reading what nobody wrote shows. Each body makes many calls, because starting one costs more than the call.
"""

import time
from dataclasses import replace

import numpy as np
import pytest
import slow
import torch
import torch.distributed as dist
from cases import TRANSPORTS, AGCase, RSCase, launches, poison, same, schedules
from ranks import LARGE_WORLDS, device, rows_slice, run_ranks

import fluxlike
from fluxlike.ops import choice, tiling
from fluxlike.runtime import interpreter, world

WORLDS = (1, 2, 3, 4, *LARGE_WORLDS)
DTYPES = ("bfloat16", "float16", "float32")


def worlds_by_dtypes(dtypes):
    """Every world with every dtype; but for one dtype a world, and all dtypes among them, the quick run leaves them out."""
    pairs = [(world, dtype) for world in WORLDS for dtype in dtypes]
    return [pytest.param(*pair, marks=() if is_first(*pair, dtypes) else pytest.mark.slow) for pair in pairs]


def is_first(world, dtype, dtypes=DTYPES):
    return dtype == dtypes[(4 - world) % len(dtypes)]


def shapes_of(world, dtype):
    """All shapes in one dtype a world; in the others, which lead to the same lines but for casts, another third of them each."""
    shapes = NICE + UGLY + EMPTY
    return shapes if is_first(world, dtype) else shapes[(world + DTYPES.index(dtype)) % 3 :: 3]


NICE = ((128, 128, 64), (256, 128, 128))
#: M, N, K that are no multiples of a tile or of the ranks, or smaller than either.
UGLY = ((200, 136, 72), (37, 70, 50), (130, 65, 33), (3, 33, 20), (5, 1, 7), (7, 9, 1), (1, 1, 1), (1, 64, 64))
EMPTY = ((0, 8, 8), (8, 0, 8), (8, 8, 0), (0, 0, 0))

MAX_M, MAX_N, MAX_K = 256, 136, 128


def rs_matrix(group, dtype, cases):
    dtype, size = getattr(torch, dtype), dist.get_world_size(group)
    for flip, schedule in enumerate(schedules(dtype)):
        with fluxlike.create_gemm_rs_context(MAX_M, MAX_N, dtype=dtype, group=group, schedule=schedule) as ctx:
            poison(ctx, group)
            for seed, (m, n, k) in enumerate(cases):
                # Of the four pairs with the layout two here, two under the other schedule; large cases take time.
                for bias in (False, True) if m * n < 10000 else (bool((seed + flip) % 2),):
                    case = RSCase(m, n, [k] * size, dtype, seed, bias=bias, transposed=bias ^ bool(flip % 2))
                    case.check(ctx, group, schedule)


@pytest.mark.parametrize(("world", "dtype"), worlds_by_dtypes(DTYPES))
def test_gemm_rs(world, dtype):
    run_ranks(rs_matrix, world, dtype=dtype, cases=shapes_of(world, dtype))


def rs_uneven_k(group, dtype):
    dtype, size = getattr(torch, dtype), dist.get_world_size(group)
    for schedule in schedules(dtype):
        with fluxlike.create_gemm_rs_context(MAX_M, MAX_N, dtype=dtype, group=group, schedule=schedule) as ctx:
            poison(ctx, group)
            for seed, ks in enumerate(([0, 33, 64, 7], [40, 0, 1, 128], [5, 64, 9, 0], [0, 0, 0, 3], [64, 33, 64, 40])):
                RSCase(75, 40, [*ks, 7, 0, 65, 1][:size], dtype, seed, bias=seed % 2 == 0).check(ctx, group, schedule)


@pytest.mark.parametrize(("world", "dtype"), worlds_by_dtypes(("bfloat16", "float32")))
def test_gemm_rs_with_another_k_on_each_rank(world, dtype):
    run_ranks(rs_uneven_k, world, dtype=dtype)


def rs_stream_k(group, dtype, programs):
    """Few rows and much K, so that tiles are cut, at other places by another number of programs; ranks and programs out of step."""
    dtype, size, rank = getattr(torch, dtype), dist.get_world_size(group), dist.get_rank(group)
    executor = world.current().executor
    before = executor.programs
    previous = interpreter.configure(interpreter.Schedule(seed=rank + 1, jitter=0.02, delay=1e-3))
    shapes = ((1, 33, 500), (16, 64, 450), (64, 40, 400), (130, 130, 300), (7, 136, 450), (64, 40, 400), (256, 64, 64))
    try:
        if executor.name == "shm":
            executor.programs = programs
        with fluxlike.create_gemm_rs_context(MAX_M, MAX_N, dtype=dtype, group=group, schedule="stream_k") as ctx:
            poison(ctx, group)
            for seed, (m, n, k) in enumerate(shapes):
                RSCase(m, n, [k // size] * size, dtype, seed, bias=seed % 2 == 0).check(ctx, group, "stream_k")
    finally:
        interpreter.configure(previous)
        executor.programs = before


@pytest.mark.parametrize(
    ("world", "dtype", "programs"),
    ((1, "float32", 5), (2, "bfloat16", 3), (3, "float32", 1), (3, "float32", 7), (4, "bfloat16", 9)),
)
def test_gemm_rs_with_equal_shares(world, dtype, programs):
    run_ranks(rs_stream_k, world, dtype=dtype, programs=programs)


def cut(ctx, case, subs: int) -> None:
    """Let the next call, ``case``, send its chunks in so many parts, which by itself only large calls do."""
    usual = choice.usual(ctx.problem(case.m, case.n, 0), "copy_engine")
    ctx.use(replace(usual, subs=subs))


def rs_changing_sub_chunks(group, turns):
    """Calls that cut their chunks differently overlap in time: each rank is late in turn, nobody waits in between."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    how = interpreter.Schedule(seed=rank + 1, jitter=0.02, delay=2e-3)
    previous = interpreter.configure(how)
    try:
        with fluxlike.create_gemm_rs_context(MAX_M, MAX_N, group=group, schedule="copy_engine") as ctx:
            poison(ctx, group)
            cases = [RSCase(256 - turn, 64, [16] * size, torch.bfloat16, turn) for turn in range(turns)]
            inputs = [case.inputs(rank) for case in cases]
            results = []
            for turn, (x, w, _) in enumerate(inputs):
                cut(ctx, cases[turn], (1, 4, 2, 1)[turn % 4])
                if turn % size == rank:
                    time.sleep(0.02)
                results.append(fluxlike.gemm_rs(x, w, ctx))
            for turn, (case, y) in enumerate(zip(cases, results, strict=True)):
                same(y, case.expected(rank), f"turn {turn}")
    finally:
        interpreter.configure(previous)


@pytest.mark.parametrize("world", (2, 3, 4))
def test_gemm_rs_with_changing_sub_chunks(world):
    run_ranks(rs_changing_sub_chunks, world, turns=20)


def rs_sub_chunks(group, subs):
    size = dist.get_world_size(group)
    with fluxlike.create_gemm_rs_context(MAX_M, MAX_N, group=group, schedule="copy_engine") as ctx:
        poison(ctx, group)
        for seed, (m, n, k) in enumerate((*NICE, (200, 136, 72), (37, 70, 50), (3, 33, 20), (256, 64, 16), (256, 64, 16))):
            copies = ctx.stats["copies"]
            case = RSCase(m, n, [k] * size, torch.bfloat16, seed, bias=seed % 2 == 0)
            cut(ctx, case, subs)
            case.check(ctx, group, "copy_engine")
            if m == 256:
                assert ctx.stats["copies"] - copies == min(subs, -(-256 // size // ctx_tile(size))) * (size - 1)


def ctx_tile(size: int) -> int:
    """Rows of a tile of a call with 256 rows."""
    executor = world.current().executor
    return tiling.fitting(executor.capability, torch.bfloat16, -(-256 // size), 64)[0].bm


@pytest.mark.parametrize("subs", (2, 4))
@pytest.mark.parametrize("world", (2, 3))
def test_gemm_rs_in_sub_chunks(world, subs):
    run_ranks(rs_sub_chunks, world, subs=subs)


def rs_out(group, dtype):
    dtype, size, rank = getattr(torch, dtype), dist.get_world_size(group), dist.get_rank(group)
    for schedule in schedules(dtype):
        with fluxlike.create_gemm_rs_context(MAX_M, MAX_N, dtype=dtype, group=group, schedule=schedule) as ctx:
            poison(ctx, group)
            for seed, (m, n, k) in enumerate(((128, 128, 64), (37, 70, 50), (1, 8, 3))):
                case = RSCase(m, n, [k] * size, dtype, seed, bias=True)
                x, w, b = case.inputs(rank)
                mine = rows_slice(m, size, rank)
                around = torch.full((m + 2, n), float("nan"), dtype=dtype, device=device())
                out = around[1 : 1 + mine.stop - mine.start]
                y = fluxlike.gemm_rs(x, w, ctx, bias=b, out=out)
                what = f"out= M={m} N={n} {schedule}"
                assert y is out, what
                same(out, case.expected(rank), what)
                assert around[0].isnan().all() and around[1 + len(out) :].isnan().all(), f"{what}: wrote beside out"
                assert ctx.last_path.startswith(schedule), what
                out.fill_(float("nan"))
                fluxlike.reference.gemm_rs(x, w, ctx, bias=b, out=out)
                same(out, case.expected(rank), f"reference {what}")


@pytest.mark.parametrize("dtype", slow.behind(1, DTYPES))
def test_gemm_rs_into_out(dtype):
    run_ranks(rs_out, 3, dtype=dtype)


def ag_out(group, dtype):
    """One weight, and a list of two; nothing is written beside what is given, and what was gathered is new."""
    dtype, size, rank = getattr(torch, dtype), dist.get_world_size(group), dist.get_rank(group)
    for schedule in (*schedules(dtype), "sequential"):
        with fluxlike.create_ag_gemm_context(MAX_M, MAX_N, MAX_K, dtype, group, schedule) as ctx:
            poison(ctx, group)
            for seed, (m, n, k) in enumerate(((128, 128, 64), (37, 70, 50), (1, 8, 3))):
                case = AGCase(m, [n] * size, k, dtype, seed, bias=True)
                shard, w, b = case.inputs(rank)
                gathered, whole = case.whole()
                around = torch.full((2, m + 2, n), float("nan"), dtype=dtype, device=device())
                outs = list(around[:, 1:-1])
                for op in (fluxlike.ag_gemm, fluxlike.reference.ag_gemm):
                    what = f"{op.__module__} out= M={m} N={n} {schedule}"
                    assert op(shard, w, ctx, bias=b, m=m, out=outs[0]) is outs[0], what
                    same(outs[0], whole[rank], what)
                    assert around[1].isnan().all(), what
                    results, seen = op(shard, [w, w], ctx, bias=[None, b], m=m, return_gathered=True, out=outs)
                    assert all(z is out for z, out in zip(results, outs, strict=True)), what
                    same(seen, gathered, what), same(outs[1], whole[rank], what)
                    same(outs[0].double() + b.double(), whole[rank], what)
                    assert around[:, [0, -1]].isnan().all(), f"{what}: wrote beside out"
                    assert ctx.last_path.startswith(schedule), what
                    around.fill_(float("nan"))


@pytest.mark.parametrize("dtype", slow.behind(1, DTYPES))
def test_ag_gemm_into_out(dtype):
    run_ranks(ag_out, 3, dtype=dtype)


def sliced(t: torch.Tensor, left: int, right: int) -> torch.Tensor:
    """The same values as a slice of a wider tensor of NaN."""
    wide = torch.full((t.shape[0], left + t.shape[1] + right), float("nan"), dtype=t.dtype, device=t.device)
    inner = wide[:, left : left + t.shape[1]]
    inner.copy_(t)
    return inner


def views(group, dtype):
    dtype, size, rank = getattr(torch, dtype), dist.get_world_size(group), dist.get_rank(group)
    for schedule in (*TRANSPORTS, "decomposed") if dtype == torch.bfloat16 else ("in_kernel", "stream_k"):
        with (
            fluxlike.create_gemm_rs_context(MAX_M, MAX_N, dtype=dtype, group=group, schedule=schedule) as rs,
            fluxlike.create_ag_gemm_context(MAX_M, MAX_N, MAX_K, dtype=dtype, group=group, schedule=schedule) as ag,
        ):
            poison(rs, group)
            poison(ag, group)
            shapes = ((72, 48, 64), (70, 33, 20), (1, 16, 64), (1, 64, 16), (4, 1, 64), (9, 16, 1), (1, 1, 1))
            for seed, (m, n, k) in enumerate(shapes):
                case = RSCase(m, n, [k] * size, dtype, seed)
                gathered, expected = AGCase(m, [n] * size, k, dtype, seed).whole()
                # Pitches and bases that a TMA descriptor takes, and others.
                for turn, (left, right) in enumerate(((0, 64), (0, 3), (64, 0), (1, 0))):
                    for transposed in (False, True) if m < 9 else (bool((turn + seed) % 2),):
                        what = f"views {(m, n, k)} {left}+{right} transposed={transposed} {schedule} {dtype}"
                        x, w, _ = case.inputs(rank)
                        w = sliced(w.T, left, right).T if transposed else sliced(w, left, right)
                        y = fluxlike.gemm_rs(sliced(x, left, right), w, rs)
                        same(y, case.expected(rank), f"gemm_rs {what}")
                        shard, w, _ = AGCase(m, [n] * size, k, dtype, seed).inputs(rank)
                        w = sliced(w.T, left, right).T if transposed else sliced(w, left, right)
                        z, seen = fluxlike.ag_gemm(sliced(shard, left, right), w, ag, m=m, return_gathered=True)
                        same(z, expected[rank], f"ag_gemm {what}")
                        same(seen, gathered, f"gathered {what}")
                        assert rs.last_path.startswith(schedule) and ag.last_path.startswith(schedule), what


@pytest.mark.parametrize("dtype", ("bfloat16", pytest.param("float32", marks=pytest.mark.slow)))
def test_slices_as_operands(dtype):
    run_ranks(views, 2, dtype=dtype)


def ag_matrix(group, dtype, cases):
    dtype, size = getattr(torch, dtype), dist.get_world_size(group)
    for flip, schedule in enumerate(schedules(dtype)):
        with fluxlike.create_ag_gemm_context(MAX_M, MAX_N, MAX_K, dtype, group, schedule) as ctx:
            poison(ctx, group)
            for seed, (m, n, k) in enumerate(cases):
                for bias in (False, True) if m * n < 10000 else (bool((seed + flip) % 2),):
                    case = AGCase(m, [n] * size, k, dtype, seed, bias=bias, transposed=bias ^ bool(flip))
                    case.check(ctx, group, schedule, return_gathered=bool((seed + bias) % 2))


@pytest.mark.parametrize(("world", "dtype"), worlds_by_dtypes(DTYPES))
def test_ag_gemm(world, dtype):
    run_ranks(ag_matrix, world, dtype=dtype, cases=shapes_of(world, dtype))


def ag_uneven_n(group, dtype):
    dtype, size = getattr(torch, dtype), dist.get_world_size(group)
    for schedule in schedules(dtype):
        with fluxlike.create_ag_gemm_context(MAX_M, MAX_N, MAX_K, dtype, group, schedule) as ctx:
            poison(ctx, group)
            for seed, ns in enumerate(([1, 70, 33, 64], [0, 20, 0, 65], [64, 0, 7, 0], [9, 5, 0, 0])):
                AGCase(75, [*ns, 3, 0, 2, 1][:size], 40, dtype, seed, bias=seed % 2 == 0).check(ctx, group, schedule, seed == 2)


@pytest.mark.parametrize(("world", "dtype"), worlds_by_dtypes(("bfloat16", "float32")))
def test_ag_gemm_with_another_n_on_each_rank(world, dtype):
    run_ranks(ag_uneven_n, world, dtype=dtype)


def ag_several(group, dtype):
    dtype, size, rank = getattr(torch, dtype), dist.get_world_size(group), dist.get_rank(group)
    for schedule in schedules(dtype):
        with fluxlike.create_ag_gemm_context(MAX_M, MAX_N, MAX_K, dtype, group, schedule) as ctx:
            poison(ctx, group)
            shapes = ((72, 64, (64, 16)), (33, 20, (7, 40, 1)), (2, 5, (3,)), (40, 8, (0, 9)), (6, 0, (4, 5)))
            for m, k, widths in shapes:
                cases = [
                    AGCase(m, [n + r for r in range(size)], k, dtype, 3, bias=i % 2 == 1, transposed=i % 2 == 0)
                    for i, n in enumerate(widths)
                ]
                shard = cases[0].inputs(rank)[0]
                # The same seeds for each weight of a call would hide a mix-up, so each is turned by its place.
                weights = [case.inputs(rank)[1].roll(i, 0) for i, case in enumerate(cases)]
                biases = [case.inputs(rank)[2] for case in cases]
                x = cases[0].whole()[0]
                what = f"weights {widths} M={m} K={k} {dtype} {schedule}"
                before = dict(ctx.stats)
                for form in (list, tuple):
                    zs, gathered = fluxlike.ag_gemm(shard, form(weights), ctx, bias=form(biases), m=m, return_gathered=True)
                    assert isinstance(zs, list) and len(zs) == len(weights), what
                    reference = fluxlike.reference.ag_gemm(shard, weights, ctx, bias=biases, m=m)
                    for z, ref, w, b in zip(zs, reference, weights, biases, strict=True):
                        expected = x @ w.double().cpu().T + (0 if b is None else b.double().cpu())
                        same(z, expected, what)
                        same(ref, expected, f"reference {what}")
                    same(gathered, x, f"gathered {what}")
                zs = fluxlike.ag_gemm(shard, weights, ctx, m=m)
                for z, w in zip(zs, weights, strict=True):
                    same(z, x @ w.double().cpu().T, f"without bias {what}")
                if k:
                    assert ctx.last_path.startswith(schedule), what
                    assert ctx.stats["calls"] - before["calls"] == 3, what
                    launched = [launches("ag_gemm", schedule, m, size, rank, gathered, len(weights)) for gathered in (1, 1, 0)]
                    assert ctx.stats["launches"] - before["launches"] == sum(launched), what


@pytest.mark.parametrize(("world", "dtype"), slow.behind(1, [(3, "float16"), (2, "float32"), (4, "bfloat16")]))
def test_ag_gemm_with_several_weights(world, dtype):
    run_ranks(ag_several, world, dtype=dtype)


def ag_without_m(group):
    """Equal shards need no m; unequal ones do, and say so before anything is sent."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    with fluxlike.create_ag_gemm_context(64, 16, 32, torch.float32, group, "in_kernel") as ctx:
        case = AGCase(8 * size, [16] * size, 32, torch.float32, 5)
        shard, w, _ = case.inputs(rank)
        same(fluxlike.ag_gemm(shard, w, ctx), case.whole()[1][rank], "m left out")
        same(fluxlike.reference.ag_gemm(shard, w, ctx), case.whole()[1][rank], "m left out of the reference")
        assert ctx.last_path.startswith("in_kernel")


def test_ag_gemm_takes_m_from_equal_shards():
    run_ranks(ag_without_m, 3)


def numbers_of_numpy(group):
    """Sizes and roots that numpy has made are as good as Python's, with gradients, too; what is no whole number is not."""
    size, number = dist.get_world_size(group), np.int64
    x, w = torch.ones(8, 8, device=device()), torch.ones(8, 8, device=device())
    fp32 = dict(dtype=x.dtype, group=group)
    with (
        fluxlike.create_gemm_rs_context(number(8), np.int32(8), number(16), **fp32) as rs,
        fluxlike.create_ag_gemm_context(number(16), number(8), number(8), **fp32) as ag,
        fluxlike.create_gemm_ar_context(number(8), np.uint8(8), **fp32) as ar,
        fluxlike.create_sparse_all_reduce_context((number(8), number(2)), number(4), x.dtype, group),
    ):
        assert {type(size) for size in (rs.max_m, rs.n, rs.k, ag.max_m, ag.k, ar.max_m, ar.n)} == {int}
        for operand in (x, x.clone().requires_grad_()):
            y = fluxlike.gemm_rs(operand, w, group=group, k=number(8 * size))
            assert torch.equal(y, torch.full_like(x[: 8 // size], 8.0 * size))
            z = fluxlike.ag_gemm(operand, w, group=group, m=number(8 * size), n=number(8 * size))
            assert torch.equal(z, torch.full_like(x.repeat(size, 1), 8.0))
    assert torch.equal(fluxlike.all_gather(x, group, m=number(8 * size)), x.repeat(size, 1))
    assert torch.equal(fluxlike.broadcast(x, number(1), group), x)
    assert (fluxlike.reduce(x, np.int16(0), group) is None) == (dist.get_rank(group) != 0)
    for wrong in (np.float64(1), np.bool_(True), torch.tensor(1)):
        with pytest.raises(ValueError, match="root="):
            fluxlike.broadcast(x, wrong, group)


def test_whole_numbers_of_numpy():
    run_ranks(numbers_of_numpy, 2)

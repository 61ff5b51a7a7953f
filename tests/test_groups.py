"""Tensor-parallel groups inside a larger world: two pairs of ranks side by side, and the world around them."""

import itertools
import threading
import time

import pytest
import torch
import torch.distributed as dist
from cases import AGCase, RSCase, poison, schedules
from ranks import TORCHRUN, run_fresh, run_ranks

import fluxlike
from fluxlike.runtime import world

LAYOUTS = {"blocks": ((0, 1), (2, 3)), "stripes": ((0, 2), (1, 3)), "unequal": ((0, 1, 2), (3,))}
_made: dict[str, list] = {}


def my_group(layout: str):
    """This rank's group of a layout and its place; the groups are made once in a process, by all ranks."""
    if layout not in _made:
        _made[layout] = [dist.new_group(list(ranks)) for ranks in LAYOUTS[layout]]
    rank = dist.get_rank()
    place = next(i for i, ranks in enumerate(LAYOUTS[layout]) if rank in ranks)
    return _made[layout][place], place


def side_by_side(group, layout, dtype):
    """Contexts of other sizes and numbers, made and closed at other times in each group, with world calls between."""
    mine, place = my_group(layout)
    dtype, size = getattr(torch, dtype), dist.get_world_size(mine)
    seeds = itertools.count(1000 * place)
    m, n, k = ((90, 40, 30), (33, 100, 64))[place]
    how = [schedule for schedule in schedules(dtype) if schedule != "stream_k"]
    with fluxlike.create_gemm_rs_context(64, 48, dtype=dtype, group=group, schedule="in_kernel") as everyone:
        for schedule in how:
            rs = fluxlike.create_gemm_rs_context(m, n, dtype=dtype, group=mine, schedule=schedule)
            poison(rs, mine)
            assert rs.group_ranks == list(LAYOUTS[layout][place]) and rs.size == size
            extra = []
            for turn in range(4):
                RSCase(61, 48, [20] * 4, dtype, turn, bias=True).check(everyone, group, "in_kernel")
                if place == 0 or turn % 2:
                    for _ in range(1 + place):
                        RSCase(m - turn, n, [k] * size, dtype, next(seeds)).check(rs, mine, schedule)
                if turn == 2 * place:
                    for _ in range(2 - place):
                        extra.append(fluxlike.create_ag_gemm_context(m, n, k, dtype, mine, schedule))
                        poison(extra[-1], mine)
                for ctx in extra:
                    AGCase(m, [n] * size, k, dtype, next(seeds)).check(ctx, mine, schedule, turn % 2 == 0)
                if turn == 2 and place == 1:
                    rs.close()
                    rs = fluxlike.create_gemm_rs_context(m, n, dtype=dtype, group=mine, schedule=schedule)
                    poison(rs, mine)
            for ctx in (rs, *extra):
                ctx.close()
        assert everyone.stats["calls"] == 4 * len(how)


@pytest.mark.parametrize(("layout", "dtype"), (("blocks", "bfloat16"), ("stripes", "float32"), ("unequal", "float16")))
def test_groups_side_by_side(layout, dtype):
    run_ranks(side_by_side, 4, makes_groups=True, layout=layout, dtype=dtype)


def same_rank_in_two_groups(group):
    """A rank is in a row group and a column group of a mesh, and calls on both by turns; without contexts, too."""
    rows, row = my_group("blocks")
    columns, column = my_group("stripes")
    for seed in range(3):
        for mine, place in ((rows, row), (columns, 2 + column)):
            case = RSCase(20 + place, 16, [9 + place] * 2, torch.float32, 10 * place + seed)
            rank = dist.get_rank(mine)
            x, w, _ = case.inputs(rank)
            y = fluxlike.gemm_rs(x, w, group=mine)
            assert torch.equal(y.double().cpu(), case.expected(rank)), f"group {place}, call {seed}"
            ag = AGCase(20 + place, [16] * 2, 9, torch.float32, 10 * place + seed)
            shard, w, _ = ag.inputs(rank)
            z = fluxlike.ag_gemm(shard, w, group=mine, m=ag.m)
            assert torch.equal(z.double().cpu(), ag.whole()[1][rank]), f"ag_gemm of group {place}, call {seed}"


def test_a_rank_in_two_groups():
    run_ranks(same_rank_in_two_groups, 4, makes_groups=True)


def share(mine, part: float):
    """A context that takes about ``part`` of the heap; the data is 2 · rows · K elements of four bytes on each rank."""
    rows = int(part * world.current().heap.segments[0].nbytes / (2 * 64 * 4))
    return fluxlike.create_ag_gemm_context(rows, 8, 64, torch.float32, mine, "in_kernel")


def exhaust(group):
    """One pair asks for more than there is and is told so together; the other pair does not notice."""
    mine, place = my_group("blocks")
    segments = len(world.current().heap.segments)
    case = RSCase(30, 20, [10] * 2, torch.float32, place)
    with fluxlike.create_gemm_rs_context(30, 20, dtype=torch.float32, group=mine, schedule="copy_engine") as ctx:
        for turn in range(3):
            if place == turn % 2:
                try:
                    share(mine, 1.5)
                except RuntimeError as error:
                    told = str(error)
                else:
                    raise AssertionError("a context larger than the heap was made")
                for word in ("MiB", str(list(LAYOUTS["blocks"][place])), "heap_bytes", "FLUXLIKE_HEAP_BYTES", "close"):
                    assert word in told, f"{word!r} is not in: {told}"
            case.check(ctx, mine, "copy_engine")
    assert len(world.current().heap.segments) == segments, "a group grew the heap of the world"


def test_a_full_heap_is_an_error_for_a_group():
    run_ranks(exhaust, 4, makes_groups=True)


def reuse(group):
    """Contexts that fit once only, again and again: each pair with sizes and numbers of its own."""
    mine, place = my_group("stripes")
    for turn in range(3 + 2 * place):
        with share(mine, (0.6, 0.45)[place] + 0.02 * turn) as ctx:
            AGCase(19, [8] * 2, 30, torch.float32, turn).check(ctx, mine, "in_kernel", False)
    with share(mine, 0.3) as one, share(mine, 0.3) as other:
        for ctx in (other, one):
            AGCase(19, [8] * 2, 30, torch.float32, 7).check(ctx, mine, "in_kernel", True)


def test_closing_gives_the_space_back():
    run_ranks(reuse, 4, makes_groups=True)


def grow(group):
    """The world's contexts grow the heap; a pair may then use the new segment, too, but cannot grow it."""
    fluxlike.init(heap="shm", heap_bytes=1 << 20)
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rank = dist.get_rank()
    mine = halves[rank // 2]
    try:
        fluxlike.create_ag_gemm_context(8192, 8, 64, torch.float32, mine)
        raise AssertionError("a pair grew the heap")
    except RuntimeError as error:
        assert "heap_bytes" in str(error)
    with fluxlike.create_ag_gemm_context(8192, 8, 64, torch.float32, schedule="copy_engine") as ctx:
        assert len(world.current().heap.segments) == 2
        AGCase(70, [8] * 4, 64, torch.float32, 0).check(ctx, group, "copy_engine", False)
    with fluxlike.create_ag_gemm_context(8000, 8, 64, torch.float32, mine, "in_kernel") as ctx:
        AGCase(70, [8] * 2, 64, torch.float32, 1).check(ctx, mine, "in_kernel", False)
    fluxlike.finalize()


def test_the_world_grows_the_heap():
    for outcome in run_fresh(grow, 4):
        assert outcome.ok, str(outcome)


def uneven_membership(group):
    """Ranks that are members of other numbers of torch groups can still be in one group of the library."""
    for ranks in ([0], [0, 1], [2]):
        dist.new_group(ranks)
    fluxlike.init(heap="shm", heap_bytes=4 << 20)
    pair = dist.new_group([1, 2])
    if dist.get_rank() > 0:
        with fluxlike.create_gemm_rs_context(20, 10, dtype=torch.float32, group=pair, schedule="in_kernel") as ctx:
            RSCase(20, 10, [5] * 2, torch.float32, 3).check(ctx, pair, "in_kernel")
    fluxlike.finalize()


def test_members_of_other_numbers_of_groups():
    for outcome in run_fresh(uneven_membership, 3, {"FLUXLIKE_TIMEOUT_S": "20"}):
        assert outcome.ok, str(outcome)


def crossed(group):
    """Two groups of the same ranks: on each rank another one is the first to be connected, to grow the heap, and to be closed.

    Their names are others on each rank, as those of split groups may be.
    """
    rank = dist.get_rank(group)
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for number, mine in enumerate(groups):
        mine._set_group_name(f"{number} of rank {rank}")
    fluxlike.init(heap="shm", heap_bytes=1 << 20)
    sums: dict[int, float] = {}
    grown: list[int] = []
    failed: dict[int, str] = {}

    def reduce(which):
        sums[which] = fluxlike.all_reduce(torch.full((4,), 10.0**which), group=groups[which])[0].item()

    def grow(which):
        size = 1024 if which else 512  # both are more than the heap has
        fluxlike.create_gemm_rs_context(size, size, group=groups[which])
        grown.append(which)

    def overgrow(which):
        try:
            fluxlike.create_gemm_rs_context(*(16384, 16384) if which else (1024, 1024), group=groups[which])
        except RuntimeError as error:
            failed[which] = str(error)

    limit, make = 1 << 28, world.current()._make_segment

    def limited(nbytes, control):
        if sum(s.nbytes for s in world.current().heap.segments) + nbytes > limit:
            raise RuntimeError("no more memory")
        return make(nbytes, control)

    world.current().heap._make = limited
    for act in (reduce, grow, overgrow):
        dist.barrier()
        threads = [threading.Timer(0.5 * (rank ^ which), act, (which,)) for which in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sums == {0: 2, 1: 20} and sorted(grown) == [0, 1], (sums, grown)
    assert failed.get(1) == "no more memory", failed
    world.current().contexts.sort(key=lambda context: context.control.key, reverse=rank > 0)
    since = time.monotonic()
    fluxlike.finalize()
    assert time.monotonic() - since < 10
    return sorted(failed)


@pytest.mark.skipif(TORCHRUN, reason="starts fluxlike itself")
def test_groups_of_the_same_ranks():
    first, second = run_fresh(crossed, 2, {"FLUXLIKE_TIMEOUT_S": "15"}, heap="shm", timeout=90)
    assert first.ok and second.ok and first.value == second.value, f"{first}\n{second}"


def refused_in_one(group):
    """A call that a pair refuses is none of the world's, whose ranks are still in step, also where autograd would record it."""
    mine, place = my_group("blocks")
    x, w = torch.ones(4, 8, requires_grad=True), torch.ones(8, 8)
    with fluxlike.create_gemm_rs_context(8, 8, dtype=x.dtype, group=mine) as ctx:
        if place == 0:
            for bad in (x, x.detach().half()):
                with pytest.raises(ValueError, match="autograd records" if bad is x else "float16"):
                    fluxlike.gemm_rs(bad, w, ctx)
        assert torch.equal(fluxlike.gemm_rs(x.detach(), w, ctx), torch.full((2, 8), 16.0))
    with fluxlike.create_gemm_rs_context(8, 8, dtype=x.dtype, group=group) as ctx:
        assert torch.equal(fluxlike.gemm_rs(x.detach(), w, ctx), torch.full((1, 8), 32.0))


@pytest.mark.skipif(TORCHRUN, reason="of CPU tensors")
def test_a_call_that_one_group_refuses():
    run_ranks(refused_in_one, 4)


def leaves_out(group):
    if dist.get_rank(group) == 1:
        pytest.skip("of the test")


def test_a_body_that_one_rank_skips():
    """So does every rank, also those that are not in its group, or they would be at another test than the others from here on."""
    with pytest.raises(pytest.skip.Exception, match="of the test"):
        run_ranks(leaves_out, 2)
    assert len(run_ranks(dist.get_rank, 2)) == 2

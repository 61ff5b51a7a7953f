"""Calls that come again: which are taken for known, which are looked at anew, and that both are right."""

import itertools

import pytest
import torch
import torch.distributed as dist
from cases import AGCase, RSCase, same
from ranks import device, rows_slice, run_ranks
from test_calls import kept_context
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad

import fluxlike
from fluxlike.ops import again, all_reduce, choice, exchange, validate
from fluxlike.runtime import world

M, N, K = 26, 32, 48
BF16 = torch.bfloat16
SCHEDULES = ("in_kernel", "copy_engine", "sequential", "decomposed", "stream_k")


class Looks:
    """How often a call's operands are looked at."""

    def __enter__(self):
        self.count, self.before = 0, validate.operands

        def operands(*args):
            self.count += 1
            self.before(*args)

        validate.operands = operands
        return self

    def __exit__(self, *error):
        validate.operands = self.before

    def since(self):
        count, self.count = self.count, 0
        return count


def forget(group):
    """Close what the calls of other tests have left: they may have been like those here."""
    ranks = dist.get_process_group_ranks(group)
    for ctx in list(world.current().cached.values()):
        if ctx.group_ranks == ranks and not ctx.closed:
            ctx.close()


def inputs(group, biased=False):
    """One case of each operation, with whole numbers."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    rs, ag = RSCase(M, N, [K // size] * size, BF16, 1, bias=biased), AGCase(M, [N // size] * size, K, BF16, 2, bias=biased)
    return rs, rs.inputs(rank), rs.expected(rank), ag, ag.inputs(rank), ag.whole()[1][rank]


def faked(group):
    """Calls on real tensors under a FakeTensorMode, made before or not: what they make has no memory. Those that have a form for
    that give results alike; the others are refused."""
    rows = {"gemm_rs": 8 // dist.get_world_size(group), "ag_gemm": 8 * dist.get_world_size(group), "gemm_ar": 8}
    x = torch.ones(8, 8, device=device())
    ids = torch.tensor([[1, 2]], device=device())
    acts = {
        "all_reduce": lambda: fluxlike.all_reduce(x, group),
        "all_reduce of a list": lambda: fluxlike.all_reduce([x, x], group),
        "gemm_rs": lambda: fluxlike.gemm_rs(x, x, group=group),
        "ag_gemm": lambda: fluxlike.ag_gemm(x, x, group=group),
        "gemm_ar": lambda: fluxlike.gemm_ar(x, x, group=group),
        "broadcast": lambda: fluxlike.broadcast(x, 0, group),
        "reduce_scatter": lambda: fluxlike.reduce_scatter(x, group),
        "sparse_all_reduce": lambda: fluxlike.sparse_all_reduce(torch.sparse_coo_tensor(ids, x[:2], (8, 8)), group=group),
    }
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for turn in range(2):
        for name, act in acts.items():
            if name in rows:
                with mode:
                    y = act()
                assert type(y) is FakeTensor and y.shape == (rows[name], 8)
            else:
                with mode, pytest.raises(ValueError, match=f"{name.split()[0]}: .*FakeTensorMode"):
                    act()
            if turn == 0:
                first, second = act(), act()
                assert type(first) is type(second)
    with mode:
        ctx = fluxlike.create_gemm_rs_context(8, 8, dtype=x.dtype, group=group)
    assert torch.equal(fluxlike.gemm_rs(x, x, ctx), torch.full((4, 8), 16.0, device=x.device))
    with mode:
        ctx.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="of the host alone")
def test_calls_under_a_fake_mode():
    run_ranks(faked, 2)


def every_schedule(group):
    """On contexts: the second call alike is not looked at, one of another kind is; each has its own numbers."""
    rank = dist.get_rank(group)
    for biased in (False, True):
        _, (x, w, b), y, _, (shard, v, c), z = inputs(group, biased)
        for schedule in SCHEDULES:
            with (
                fluxlike.create_gemm_rs_context(M, N, K, group=group, schedule=schedule) as rs,
                fluxlike.create_ag_gemm_context(M, N, K, group=group, schedule=schedule) as ag,
                Looks() as looks,
            ):
                out = torch.empty(y.shape, dtype=BF16, device=x.device)
                for turn in range(4):
                    x2, shard2, times = x, shard, 1
                    if turn >= 2:  # in other memory, and other numbers where no bias is added to them
                        times = 1 if biased else -1
                        x2, shard2 = times * x, times * shard
                    same(fluxlike.gemm_rs(x2, w, rs, bias=b), times * y, f"{schedule} {rank}")
                    assert fluxlike.gemm_rs(x2, w, rs, bias=b, out=out.fill_(7)) is out
                    same(out, times * y, f"{schedule} {rank} out")
                    same(fluxlike.ag_gemm(shard2, v, ag, bias=c, m=M), times * z, f"{schedule} {rank}")
                    (one, two), all_rows = fluxlike.ag_gemm(shard2, [v, v], ag, bias=[c, c], m=M, return_gathered=True)
                    same(one, times * z, schedule), same(two, times * z, schedule)
                    assert all_rows.shape == (M, K)
                    there, more = one.fill_(7), [two.fill_(7), torch.full_like(one, 7)]
                    assert fluxlike.ag_gemm(shard2, v, ag, bias=c, m=M, out=there) is there
                    fluxlike.ag_gemm(shard2, [v, v], ag, bias=[c, c], m=M, return_gathered=True, out=more)
                    for written in (there, *more):
                        same(written, times * z, f"{schedule} {rank} out")
                    assert looks.since() == (2 + 1 + 2 + 1 + 2 if turn == 0 else 0), (schedule, turn)
                    assert rs.stats["calls"] == 2 * (turn + 1) and ag.last_path.startswith(schedule)


def test_every_schedule():
    run_ranks(every_schedule, 2)


def with_all_reduce(group):
    """gemm_ar, by every algorithm, in one launch and in two, with a context and without."""
    forget(group)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for biased in (False, True):
        case = RSCase(M, N, [K // size] * size, BF16, 1, bias=biased)
        (x, w, b), y = case.inputs(rank), torch.cat([case.expected(other) for other in range(size)])
        out = torch.empty(y.shape, dtype=BF16, device=x.device)
        many = {"one_shot": 1, "two_shot": 1, "bulk": 1, "auto": 1, "pieces": 2}
        for algo, launches in many.items():
            usual = all_reduce.most_bytes
            if algo == "pieces":
                all_reduce.most_bytes = lambda ranks, algo: M * N
            made = fluxlike.create_gemm_ar_context(M, N, group=group, algo=algo if launches == 1 else "two_shot")
            with made as ctx, Looks() as looks:
                for turn in range(3):
                    times = -1 if turn == 2 and not biased else 1
                    for given in (ctx, None) if algo == "auto" else (ctx,):
                        where = {"group": group} if given is None else {}
                        same(fluxlike.gemm_ar(times * x, w, given, bias=b, **where), times * y, algo)
                        assert fluxlike.gemm_ar(times * x, w, given, bias=b, out=out.fill_(7), **where) is out
                        same(out, times * y, algo)
                        assert looks.since() == (2 if turn == 0 else 0), (algo, turn)
                assert ctx.stats["launches"] == 6 * launches and ctx.stats["calls"] == 6
            all_reduce.most_bytes = usual
        kept_context("gemm_ar", group, BF16).close()


def test_gemm_ar():
    run_ranks(with_all_reduce, 2)


def all_reduces(group):
    """By every algorithm, in place or not; a call of another op, algorithm, shape or place is looked at."""
    forget(group)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    readable, looks = validate.readable, []
    validate.readable = lambda *args: looks.append(args[0]) or readable(*args)
    try:
        for algo in ("auto", "one_shot", "two_shot", "bulk"):
            for turn in range(3):
                x = torch.arange(60.0, device=device()).view(3, 20).to(BF16) + rank + turn
                total = sum(torch.arange(60.0).view(3, 20) + other + turn for other in range(size)).double()
                most = (torch.arange(60.0).view(3, 20) + size - 1 + turn).double()
                same(fluxlike.all_reduce(x, group, algo=algo), total, algo)
                same(fluxlike.all_reduce(x, group, "max", algo=algo), most, algo)
                same(fluxlike.all_reduce(x.T, group, algo=algo), total.T, algo)  # a copy is made of it, each time
                same(fluxlike.all_reduce(x[1:], group, algo=algo), total[1:], algo)
                version = x._version
                assert fluxlike.all_reduce_(x, group, algo=algo) is x and x._version > version
                same(x, total, algo)
                expected = 5 if turn == 0 else 1
                assert len(looks) == expected, (algo, turn, looks)
                looks.clear()
        for wrong in ("median", ["sum"], None):
            with pytest.raises(ValueError, match="op="):
                fluxlike.all_reduce(x, group, wrong)
        with pytest.raises(ValueError, match="algo="):
            fluxlike.all_reduce(x, group, algo="fast")
        with pytest.raises(ValueError, match="dtype"):
            fluxlike.all_reduce(x.long(), group)
    finally:
        validate.readable = readable
    ctx = world.current().cached["all_reduce", world.current().control_of(group).name]
    assert ctx._again, "nothing was known"
    ctx.close()
    x = torch.ones(3, 20, dtype=BF16, device=device())
    same(fluxlike.all_reduce(x, group), torch.full((3, 20), float(size)).double(), "in a new context")


def test_all_reduce():
    run_ranks(all_reduces, 2)


def all_reduces_of_lists(group):
    """Lists that come again, in one launch or several, in place or not; of other sizes, places or ways they are looked at."""
    forget(group)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    readable, looks = validate.readable, []
    validate.readable = lambda *args: looks.append(args[0]) or readable(*args)
    usual, exchange.SET = exchange.SET, exchange.BULK  # of BF16 4096 elements
    sizes = (40, 7), (5000, 9), (3,)
    try:
        for algo in ("one_shot", "two_shot", "bulk"):
            for some, turn in itertools.product(sizes, range(4)):
                start = 4 * (turn == 3)  # the first begins at another address
                memory = [torch.zeros(n + 4, dtype=BF16, device=device()) for n in some]
                xs = [t[start : start + n] for t, n in zip(memory, some, strict=True)]
                total = []
                for i, x in enumerate(xs):
                    base = torch.arange(len(x)) % 50 + turn + i
                    x.copy_(base + rank)
                    total.append(sum(base + other for other in range(size)).double())
                for given in (xs, tuple(xs)):
                    ys = fluxlike.all_reduce(given, group, algo=algo)
                    for y, right in zip(ys, total, strict=True):
                        same(y, right, f"{algo} {some} {turn}")
                versions = [x._version for x in xs]
                assert fluxlike.all_reduce_(xs, group, algo=algo) is xs
                assert all(x._version > version for x, version in zip(xs, versions, strict=True))
                for x, right, t in zip(xs, total, memory, strict=True):
                    same(x, right, f"{algo} {some} {turn} in place")
                    assert not t[:start].any() and not t[start + len(x) :].any()
                assert len(looks) == (2 * len(xs) if turn in (0, 3) else 0), (algo, some, turn, looks)
                looks.clear()
            for mode in (True, False):  # a list that is first seen in inference mode
                with torch.inference_mode(mode):
                    some = [torch.full((n,), 1.0 + rank, dtype=BF16, device=device()) for n in (50, 60)]
                    for y in fluxlike.all_reduce(some, group, algo=algo):
                        same(y.clone(), torch.full(y.shape, 3.0).double(), f"{algo}, inference mode: {mode}")
            looks.clear()
            xs = [torch.ones(n, dtype=BF16, device=device()) for n in sizes[0]]
            whole = torch.ones(47, dtype=BF16, device=device())
            with pytest.raises(ValueError, match="overlap in memory"):
                fluxlike.all_reduce_([whole[:40], whole[32:39]], group, algo=algo)
            with pytest.raises(ValueError, match="one dtype"):
                fluxlike.all_reduce_([xs[0], xs[1].float()], group, algo=algo)
            looks.clear()
    finally:
        validate.readable, exchange.SET = readable, usual


def test_all_reduce_of_lists():
    run_ranks(all_reduces_of_lists, 2)


def large_ones(group):
    """One tensor of several launches, which come again together."""
    forget(group)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    usual, exchange.SET = exchange.SET, exchange.BULK
    try:
        for turn in range(3):
            base = torch.arange(9000) % 60 + turn
            x = (base + rank).to(BF16).to(device()).view(90, 100)
            total = sum(base + other for other in range(size)).double().view(90, 100)
            same(fluxlike.all_reduce(x, group), total, "a new tensor")
            same(fluxlike.all_reduce_(x, group), total, "in place")
    finally:
        exchange.SET = usual
    ctx = world.current().cached["all_reduce", world.current().control_of(group).name]
    assert [len(known.plan.made) for known in ctx._again.values()] == [3, 3]


def test_large_all_reduce():
    run_ranks(large_ones, 2)


def others(group):
    """The collectives of one trip, of which some take tensors as whole numbers; and what is refused behind a call like it."""
    forget(group)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    readable, looks = validate.readable, []
    validate.readable = lambda *args: looks.append(args[0]) or readable(*args)
    rows = rows_slice(5, size, rank)
    try:
        floats = (BF16, ("auto", "words", "two_shot", "bulk")), (torch.float32, ("auto", "bulk"))
        for dtype, algos in (*floats, (torch.int16, ("auto",))):
            for algo, turn in itertools.product(algos, range(3)):
                base = torch.arange(60).view(5, 12) + turn
                x, every = (base + rank).to(dtype).to(device()), [(base + other).double() for other in range(size)]
                same(fluxlike.broadcast(x, 1, group, algo=algo), every[1], f"broadcast {algo}")
                calls = 1
                if algo != "two_shot":
                    same(fluxlike.all_gather(x, group, algo=algo), torch.cat(every), f"all_gather {algo}")
                    shared = torch.cat([every[other][rows_slice(5, size, other)] for other in range(size)])
                    same(fluxlike.all_gather(x[rows], group, 5, algo), shared, f"all_gather of 5 rows, {algo}")
                    calls += 2
                if dtype != torch.int16 and algo != "two_shot":
                    same(fluxlike.reduce_scatter(x, group, algo=algo), sum(every)[rows], f"reduce_scatter {algo}")
                    same(fluxlike.reduce_scatter(x, group, "max", algo), every[-1][rows], f"reduce_scatter {algo}")
                    calls += 2
                if dtype != torch.int16:
                    for root in (0, 1):
                        y = fluxlike.reduce(x, root, group, algo=algo)
                        assert (y is None) == (rank != root)
                        if y is not None:
                            same(y, sum(every), f"reduce {algo}")
                    calls += 2
                assert len(looks) == (calls if turn == 0 else 0), (dtype, algo, turn, looks)
                looks.clear()
        x = torch.arange(60.0, device=device()).view(5, 12).to(BF16)
        odd = torch.empty(61, dtype=BF16, device=device())[1:].view(5, 12).copy_(x)  # no two of its elements are a word
        twisted = torch.arange(60.0, device=device()).view(12, 5).T.to(torch.complex64)
        for _ in range(2):
            same(fluxlike.broadcast(odd, 0, group), x.double().cpu(), "at an odd place")
            same(fluxlike.broadcast(x.T, 0, group), x.T.double().cpu(), "a copy of it is sent")
            assert torch.equal(fluxlike.broadcast(twisted, 0, group), twisted)
            with pytest.raises(ValueError, match="conjugated"):
                fluxlike.broadcast(twisted.conj(), 0, group)
            if device().type == "cpu":  # where memory may begin anywhere: this view cannot be taken for whole words
                memory = torch.empty(256, dtype=torch.uint8)
                shift = -memory.data_ptr() % 16 + 14
                moved = torch.frombuffer(memory.numpy()[shift:], dtype=BF16)[1:61].view(5, 12).copy_(x)
                assert moved.data_ptr() % 16 == 0 and moved.storage_offset() == 1
                same(fluxlike.broadcast(x, 0, group), x.double(), "as any other")
                same(fluxlike.broadcast(moved, 0, group), x.double(), "of memory that begins elsewhere")
            for root in (True, size, 1.0):
                with pytest.raises(ValueError, match="root="):
                    fluxlike.broadcast(x, root, group)
            with pytest.raises(ValueError, match="op="):
                fluxlike.reduce(x, 0, group, ["sum"])
            with pytest.raises(ValueError, match="m="):
                fluxlike.all_gather(x, group, True)
    finally:
        validate.readable = readable


def test_other_collectives():
    run_ranks(others, 2)


def kept(group):
    """Without a context: the kept one, also where it was made anew for larger calls, by the path of the first call or another."""
    forget(group)
    _, (x, w, _), y, _, (shard, v, _), z = inputs(group)
    for _ in range(2):
        with Looks() as looks:
            for turn in range(3):
                same(fluxlike.gemm_rs(x, w, group=group), y, "gemm_rs")
                same(fluxlike.ag_gemm(shard, v, group=group, m=M), z, "ag_gemm")
                found = looks.since()
                assert found == (2 if turn == 0 else 0), (found, turn)
            before = kept_context("gemm_rs", group, BF16)
            much = before.max_m + 1
            fluxlike.gemm_rs(x[:1].expand(much, -1).contiguous(), w, group=group)
            assert kept_context("gemm_rs", group, BF16) is not before and before.closed
            looks.since()
            same(fluxlike.gemm_rs(x, w, group=group), y, "gemm_rs in a larger context")
            assert looks.since() == 1
            kept_context("gemm_rs", group, BF16).close()
            same(fluxlike.gemm_rs(x, w, group=group), y, "gemm_rs after its context was closed")
            assert looks.since() == 1
            capturing, executor = world.current().executor.is_capturing, world.current().executor
            assert not kept_context("gemm_rs", group, BF16).captured
            executor.is_capturing = lambda: True  # as a CUDA graph does it
            same(fluxlike.gemm_rs(x, w, group=group), y, "captured")
            executor.is_capturing = capturing
            context = kept_context("gemm_rs", group, BF16)
            assert looks.since() == 0 and context.captured
            context.captured = False
            context._mended -= 1  # as if its ranks had been out of step since it was made
            same(fluxlike.gemm_rs(x, w, group=group), y, "after all are in step again")
            assert looks.since() == 1 and context.closed
            for op in ("gemm_rs", "ag_gemm"):
                kept_context(op, group, BF16).close()


def test_kept_contexts():
    run_ranks(kept, 2)


def told(group):
    """What is wrong with a call that is like an earlier one is told as if it were the first."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    _, (x, w, _), y, _, (shard, v, _), z = inputs(group)
    out = torch.empty(y.shape, dtype=BF16, device=x.device)
    with (
        fluxlike.create_gemm_rs_context(M, N, K, group=group) as rs,
        fluxlike.create_ag_gemm_context(M, N, K, group=group) as ag,
    ):

        def again_right():
            same(fluxlike.gemm_rs(x, w, rs), y, "gemm_rs")
            same(fluxlike.gemm_rs(x, w, rs, out=out), y, "gemm_rs")
            same(fluxlike.gemm_rs(x, w, rs, k=K), y, "gemm_rs")
            same(fluxlike.ag_gemm(shard, v, ag, m=M), z, "ag_gemm")
            same(fluxlike.ag_gemm(shard, v, ag, m=M, out=room[0]), z, "ag_gemm")
            for written in fluxlike.ag_gemm(shard, [v, v], ag, m=M, out=list(room)):
                same(written, z, "ag_gemm")

        room = torch.zeros(2, *z.shape, dtype=BF16, device=x.device)
        flat = room.view(-1)
        across = flat[z.numel() - 8 :][: z.numel()].view(z.shape)
        again_right()
        buffer = torch.empty(max(x.numel(), out.numel()) + out.numel(), dtype=BF16, device=x.device)
        inside = buffer[: x.numel()].view_as(x).copy_(x)
        over = buffer[x.numel() - 8 : x.numel() - 8 + out.numel()].view_as(out)
        aside = buffer[x.numel() :][: out.numel()].view_as(out)
        with Looks() as looks:
            same(fluxlike.gemm_rs(inside, w, rs, out=aside), y, "an out right behind x")
            assert looks.since() == 0
        behind = buffer[1 : 1 + x.numel()].view_as(x).copy_(x)
        last = buffer[x.numel() :][: out.numel()].view_as(out)  # begins at its last element
        for _ in range(2):
            same(fluxlike.gemm_rs(behind, w, rs, out=out), y, "an out elsewhere")
        assert last.data_ptr() % again.ALIGNED == out.data_ptr() % again.ALIGNED, "the call below would not be known"
        bad = [
            (lambda: fluxlike.gemm_rs(behind, w, rs, out=last), "overlaps x"),
            (lambda: fluxlike.gemm_rs(x.float(), w, rs), "dtype"),
            (lambda: fluxlike.gemm_rs(x.tolist(), w, rs), "list"),
            (lambda: fluxlike.gemm_rs(torch._neg_view(x), w, rs), "negated"),
            (lambda: fluxlike.gemm_rs(x.to_sparse(), w, rs), "layout|plain|dense"),
            (lambda: fluxlike.gemm_rs(x[:, :-1], w, rs), "second sizes"),
            (lambda: fluxlike.gemm_rs(x.T.contiguous().T, w, rs), "strides"),
            (lambda: fluxlike.gemm_rs(inside, w, rs, out=over), "overlaps x"),
            (lambda: fluxlike.gemm_rs(x, w, rs, out=out.clone().requires_grad_()), "requires_grad"),
            (lambda: fluxlike.gemm_rs(x, w, rs, out=out[:, :-1]), "out is"),
            (lambda: fluxlike.gemm_rs(x, w, rs, k=True), "whole number"),
            (lambda: fluxlike.gemm_rs(x, w, rs, k=float(K)), "whole number"),
            (lambda: fluxlike.gemm_rs(x, w, ag), "create_gemm_rs_context"),
            (lambda: fluxlike.gemm_rs(x, w, rs, group=3), "group"),
            (lambda: fluxlike.ag_gemm(shard, v, ag, m=float(M)), "whole number"),
            (lambda: fluxlike.ag_gemm(shard, v, ag, m=M + size), "of m="),
            (lambda: fluxlike.ag_gemm(shard, v, ag, bias=1.0, m=M), "bias"),
            (lambda: fluxlike.ag_gemm(shard, [v, 3], ag, m=M), "weight"),
            (lambda: fluxlike.ag_gemm(shard, [v, v], ag, m=M, out=[room[0], room[0]]), "overlaps another out"),
            (lambda: fluxlike.ag_gemm(shard, [v, v], ag, m=M, out=[room[0], across]), "overlaps another out"),
            (lambda: fluxlike.ag_gemm(shard, [flat[: v.numel()].view_as(v), v], ag, m=M, out=list(room)), "overlaps weight"),
            (lambda: fluxlike.ag_gemm(flat[: shard.numel()].view_as(shard), v, ag, m=M, out=room[0]), "overlaps x"),
            (lambda: fluxlike.ag_gemm(shard, [v, v], ag, m=M, out=[room[0], room[1].detach().requires_grad_()]), "requires_grad"),
            (lambda: fluxlike.ag_gemm(shard, [v, v], ag, m=M, out=[room[0], 3]), "out is int"),
            (lambda: fluxlike.ag_gemm(shard, [v, v], ag, m=M, out=room[0]), "a list of 2, one a weight"),
            (lambda: fluxlike.ag_gemm(shard, v, ag, m=M, out=[room[0]]), "it must be a tensor"),
        ]
        for call, words in bad:
            for _ in range(2):
                with pytest.raises(ValueError, match=words):
                    call()
            again_right()
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            with pytest.raises(ValueError, match="tangent"):
                fluxlike.gemm_rs(dual, w, rs)
        version = out._version
        again_right()
        assert out._version > version, "autograd, which may have saved it, is not told that it was written"
        shifted = torch.empty(x.numel() + 1, dtype=BF16, device=x.device)[1:].view_as(x)
        kinds = ((x, w), None), ((shifted, w), None), ((x, w), K), ((x, w, None), None)
        keys = {again.signature(*kind).key for kind in kinds}
        assert len(keys) == 4, rank
    for call in (lambda: fluxlike.gemm_rs(x, w, rs, out=out), lambda: fluxlike.ag_gemm(shard, v, ag, m=M)):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_what_is_wrong_is_told():
    run_ranks(told, 2)


def other_plans(group):
    """What is known goes with the plans: where calls are made otherwise, they are planned anew."""
    _, (x, w, _), y, *_ = inputs(group)
    with fluxlike.create_gemm_rs_context(M, N, K, group=group) as rs:
        paths = []
        for transport in ("in_kernel", "copy_engine", None, "copy_engine"):
            problem = rs.problem(M, N, K)
            rs.use(None if transport is None else choice.usual(problem, transport))
            for _ in range(2):
                same(fluxlike.gemm_rs(x, w, rs), y, str(transport))
            paths.append(rs.last_path.split("/")[0])
        assert paths[0] == "in_kernel" and paths[1] == paths[3] == "copy_engine", paths
        with Looks() as looks:
            rs.forget_plans()
            same(fluxlike.gemm_rs(x, w, rs), y, "forgotten")
            assert looks.since() == 1


def test_other_plans():
    run_ranks(other_plans, 2)


def elsewhere(group):
    """Results where torch's own allocators put none: such a call is looked at each time, as its plan may be another."""
    _, (x, w, _), y, *_ = inputs(group)
    honest = {name: getattr(torch.Tensor, name) for name in ("new_empty", "new_empty_strided")}

    def unaligned(t, shape, *strides, **how):
        return honest["new_empty"](t, torch.Size(shape).numel() + 1, **how)[1:].view(shape)

    def give(way):
        for name, new in honest.items():
            setattr(torch.Tensor, name, way or new)

    with fluxlike.create_gemm_rs_context(M, N, K, group=group) as rs, Looks() as looks:
        give(unaligned)
        try:
            for turn in range(4):
                if turn == 2:
                    give(None)
                    same(fluxlike.gemm_rs(x, w, rs), y, "now it is known")
                    give(unaligned)
                    assert looks.since() == 1
                same(fluxlike.gemm_rs(x, w, rs), y, f"turn {turn}")
                assert looks.since() == 1, turn
        finally:
            give(None)


def test_results_that_are_not_aligned():
    run_ranks(elsewhere, 2)


def many(group):
    """A context keeps so many plans, and no more of calls than it keeps plans."""
    _, (x, w, _), *_ = inputs(group)
    with fluxlike.create_gemm_rs_context(M, N, K, group=group) as rs:
        for said in range(K, K + 300):
            rs._again[said] = rs._plans[said] = None
        fluxlike.gemm_rs(x, w, rs)
        assert len(rs._again) == len(rs._plans) == 1
    assert not rs._again, "it would keep its context"
    assert world.current().device == device()


def test_many_kinds():
    run_ranks(many, 2)

"""Groups that span nodes: FLUXLIKE_VIRTUAL_NODES makes several of this host, between which there are messages only."""

import itertools
import os
import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from cases import AGCase, RSCase, same
from emulated_puts import start
from faults import HEAPS
from ranks import device, run_fresh

import fluxlike
from fluxlike.ops import choice, cost, validate
from fluxlike.ops.nodes_context import NodesContext
from fluxlike.runtime import nodes, world

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: M of 4 ranks: even; torch.chunk leaves the last rank fewer rows, or none, or the last node none; fewer rows than ranks.
ROWS = (16, 40, 15, 13, 9, 4, 2, 1, 0)
#: Whether a call is given a context, and whether it is made of all nodes' rows together; None: as the model has it.
WAYS = ((True, True), (True, False), (False, None))
#: Who puts messages: the host, kernels, or kernels that must think that the other node is far.
PUTS = ("host", "auto", "far")
#: The heap, and the same; "letters": nobody, as there are none on a machine without GPUs, where puts are emulated.
HEAPS_AND_PUTS = (("shm", "letters"), *(("shm", puts) for puts in PUTS))
HEAPS_AND_PUTS += tuple(pytest.param("nvshmem", puts, marks=pytest.mark.gpu) for puts in PUTS)


def by_kernels(ctx):
    """Messages that kernels have put."""
    return getattr(ctx.messages, "by_kernels", 0)


def right(group, puts):
    """Both operations, with and without a context, all kinds of operands, back to back; what crossed the border."""
    this = start(puts)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    count = len(this.control.nodes)
    for dtype in DTYPES[:1] if size == 4 else DTYPES[1:]:
        with (
            fluxlike.create_gemm_rs_context(40, 24, dtype=dtype) as rs,
            fluxlike.create_ag_gemm_context(40, 24, 32, dtype=dtype) as ag,
        ):
            for seed, m in enumerate(ROWS):
                odd = seed % 2 == 1
                case = RSCase(m, 24 - 5 * odd, [20 + 4 * r for r in range(size)], dtype, seed, bias=odd, transposed=seed % 3 == 0)
                x, w, b = case.inputs(rank)
                before = rs.stats["bytes"]
                for ctx, together in WAYS:
                    rs.together = together
                    what = f"gemm_rs {m} {dtype} together={together}"
                    same(fluxlike.gemm_rs(x, w, rs if ctx else None, bias=b), case.expected(rank), what)
                    assert not ctx or rs.last_path.endswith("/together") == bool(together and m), rs.last_path
                others = [places for node, places in enumerate(this.control.nodes) if node != this.control.node]
                sent = sum(rows(m, size, places[this.control.local.rank]) for places in others)
                assert rs.stats["bytes"] - before == 2 * sent * case.n * dtype.itemsize
                other = AGCase(m, [16 + 3 * r for r in range(size)], 32 - 7 * odd, dtype, seed, bias=odd, transposed=odd)
                shard, v, c = other.inputs(rank)
                whole, results = other.whole()
                before = ag.stats["bytes"]
                for ctx, together in WAYS:
                    ag.together = together
                    z, gathered = fluxlike.ag_gemm(shard, v, ag if ctx else None, bias=c, m=m, return_gathered=True)
                    same(z, results[rank], f"ag_gemm {m} {dtype} together={together}")
                    same(gathered, whole, f"gathered {m} {dtype} together={together}")
                    assert not ctx or ag.last_path.endswith("/together") == bool(together and m), ag.last_path
                assert ag.stats["bytes"] - before == 2 * (count - 1) * shard.numel() * dtype.itemsize
                ag.together = bool(seed % 2)
                several = fluxlike.ag_gemm(shard, [v, v[:5]], ag, m=m)
                same(several[0] if c is None else several[0] + c, results[rank], "several")
                same(several[1], several[0].double().cpu()[:, :5], "several")
                if puts == "letters":  # of puts, see `test_puts`
                    apart = shard.new_zeros(len(shard), 2 * shard.shape[1])[:, : shard.shape[1]].copy_(shard)
                    same(fluxlike.ag_gemm(apart, v, ag, bias=c, m=m), results[rank], "rows that lie apart")
            assert rs.last_path.startswith("nodes/") and ag.last_path.startswith("nodes/")
            assert rs.inner.size == ag.inner.size == size // count
            for ctx in (rs, ag):
                sent, every = by_kernels(ctx), ctx.stats["calls"] * (count - 1)
                some = this.executor.name != "shm" and puts == "auto"  # those of calls that are made together
                assert 0 < sent < every if some else sent == every * (puts == "far"), f"{sent} of {every} messages by kernels"
    fluxlike.finalize()
    return this.node_of


def rows(m, size, rank):
    full = -(-m // size)
    return max(0, min(full, m - rank * full))


def of_nodes():
    """Ranks, nodes, heap and who puts: a quick run has every way of two nodes of two, and one where nodes have one rank each."""
    for ranks, parts in ((4, 2), (2, 2), (4, 4)):
        for given in HEAPS_AND_PUTS:
            heap, puts = getattr(given, "values", given)
            quick = parts == 2 and (ranks == 4 or puts == "auto")
            marks = [pytest.mark.gpu] * (heap == "nvshmem") + [pytest.mark.slow] * (not quick)
            yield pytest.param(ranks, parts, heap, puts, marks=marks)


@pytest.mark.parametrize(("ranks", "parts", "heap", "puts"), list(of_nodes()))
def test_two_operations(ranks, parts, heap, puts):
    outcomes = run_fresh(right, ranks, env={"FLUXLIKE_VIRTUAL_NODES": str(parts)}, heap=heap, timeout=200, puts=puts)
    for outcome in outcomes:
        assert outcome.ok, str(outcome)
        assert outcome.value == [rank * parts // ranks for rank in range(ranks)]


def rule(op, n, k, nodes_and_ranks, rate, schedule="auto", latency_alone=cost.PUT):
    """A context of H100s by what `is_together` looks at; ``n``, ``k``: of one node."""
    (count, local), memory = nodes_and_ranks, cost.MEMORY_RATES["NVIDIA H100 80GB HBM3"]

    def problem(m, n, k, full):
        return choice.Problem(op, (9, 0), 132, local, torch.bfloat16, m, n, k, True, count, memory)

    made = object.__new__(NodesContext)
    made.op, made.dtype, made.schedule, made.together, made._faster = op, torch.bfloat16, schedule, None, {}
    made.nodes, made.size = range(count), count * local
    made.messages = SimpleNamespace(rate=rate, latency=cost.PUT, latency_alone=latency_alone)
    made.inner = SimpleNamespace(
        size=local, n=n, k=k, max_m=1024, problem=problem, choose=lambda p: choice.choose(p, "auto", {}),
        tuned=SimpleNamespace(memory=memory),
    )  # fmt: skip
    return lambda m, whole=None: made.is_together(m, -(-m // made.size), whole)


@pytest.mark.parametrize("rate", (cost.COPY_RATE, cost.NETWORK_RATE))
def test_few_rows_are_multiplied_once(rate):
    """Where most of a product is the reading of its weight, which each node's product does again."""
    for op, n, k in (("ag_gemm", 28672, 8192), ("gemm_rs", 8192, 14336)):
        for places in ((2, 1), (2, 2), (4, 8)):
            together = rule(op, n, k, places, rate)
            assert together(64) and together(128), (op, places)
            assert not together(0) and not together(1025), "there is memory for so many rows"
            assert not rule(op, n, k, places, rate, "stream_k")(64)
    assert rule("ag_gemm", 0, 8192, (2, 1), rate)(64), "a context that does not know N"


#: µs in a CUDA graph, node by node and together, two H100s as two nodes: docs/measured/2026-11-25-puts.md.
MEASURED = {
    ("ag_gemm", 28672, 8192): {16: (343, 180), 64: (344, 190), 128: (358, 191), 256: (359, 227), 512: (433, 383), 1024: (718, 816)},
    ("ag_gemm", 14336, 4096): {64: (103, 64), 256: (108, 71), 512: (117, 121)},
    ("gemm_rs", 8192, 14336): {64: (179, 98), 128: (180, 100), 256: (188, 115), 512: (211, 201), 1024: (355, 406)},
    ("gemm_rs", 4096, 7168): {64: (67, 42), 128: (70, 39), 256: (65, 44), 512: (75, 59)},
}


@pytest.mark.parametrize("shape", MEASURED)
def test_together_where_that_was_faster(shape):
    together = rule(*shape, (2, 1), cost.COPY_RATE, latency_alone=cost.PUT_BY_KERNEL)
    assert {m: together(m) for m in MEASURED[shape]} == {m: whole < apart for m, (apart, whole) in MEASURED[shape].items()}


def test_together_by_the_size_that_a_call_says():
    """And not by the context's, nor by that of the call before."""
    places, rows = (2, 1), (64, 288, 352, 416, 512, 1024)
    for op, narrow, wide in (("gemm_rs", (8192, 1024), (8192, 14336)), ("ag_gemm", (3584, 8192), (28672, 8192))):
        said = 1 if op == "gemm_rs" else 0
        by_itself = {shape: [rule(op, *shape, places, cost.COPY_RATE)(m) for m in rows] for shape in (narrow, wide)}
        assert by_itself[narrow] != by_itself[wide], op
        ctx = rule(op, *narrow, places, cost.COPY_RATE)
        for _ in range(2):
            assert [ctx(m) for m in rows] == by_itself[narrow]
            assert [ctx(m, wide[said]) for m in rows] == by_itself[wide]


def every_schedule(group):
    start()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for schedule in ("copy_engine", "in_kernel", "sequential", "stream_k", "decomposed"):
        with (
            fluxlike.create_gemm_rs_context(12, 16, schedule=schedule) as rs,
            fluxlike.create_ag_gemm_context(12, 16, 16, schedule=schedule) as ag,
        ):
            for m, together in itertools.product((12, 9, 5), (False, True)):
                rs.together = ag.together = together
                case, other = RSCase(m, 16, [16] * size, torch.bfloat16, m), AGCase(m, [16] * size, 16, torch.bfloat16, m)
                x, w, _ = case.inputs(rank)
                same(fluxlike.gemm_rs(x, w, rs), case.expected(rank), f"gemm_rs {schedule} {m}")
                shard, v, _ = other.inputs(rank)
                same(fluxlike.ag_gemm(shard, v, ag, m=m), other.whole()[1][rank], f"ag_gemm {schedule} {m}")
            assert rs.last_path.split("/")[1] == ag.last_path.split("/")[1] == schedule
    for make in (fluxlike.create_gemm_rs_context, fluxlike.create_ag_gemm_context):
        with pytest.raises(ValueError, match="'decomposed' is not for dtype"):
            make(12, 16, 16, dtype=torch.float32, schedule="decomposed")
    before = os.environ.get("FLUXLIKE_TORCH_PRODUCTS", "1")
    os.environ["FLUXLIKE_TORCH_PRODUCTS"] = str(world.current().control.node)  # the nodes differ, the ranks of each do not
    said = [int(places[0] != 0) for places in world.current().control.nodes for _ in places]
    with pytest.raises(ValueError, match=f"FLUXLIKE_TORCH_PRODUCTS is {re.escape(str(said))} on the ranks"):
        fluxlike.create_gemm_rs_context(12, 16)
    os.environ["FLUXLIKE_TORCH_PRODUCTS"] = before
    os.environ["FLUXLIKE_PUTS"] = "card" if rank == size - 1 else "auto"
    with pytest.raises(ValueError, match="FLUXLIKE_PUTS='card' is not one of host, device, auto"):
        fluxlike.create_gemm_rs_context(12, 16)
    os.environ["FLUXLIKE_PUTS"] = "auto"
    with fluxlike.create_gemm_rs_context(12, 16) as rs, fluxlike.create_ag_gemm_context(12, 16, 16) as ag:
        assert rs.device == ag.device == world.current().device
    for algo in ("auto", "trees"):
        with pytest.raises(ValueError, match="on 2 nodes, and only gemm_rs and ag_gemm go from node to node; use a group of"):
            fluxlike.all_reduce(torch.ones(4, device=device()), algo=algo)
    fluxlike.finalize()


def grows(group):
    """Contexts that span nodes and need more than the heap has: the messages', and that of each node."""
    this = start()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    before = len(this.heap.segments)
    with fluxlike.create_gemm_rs_context(4096, 4096) as rs, fluxlike.create_ag_gemm_context(4096, 64, 4096) as ag:
        assert len(this.heap.segments) > before
        case, other = RSCase(37, 16, [16] * size, torch.bfloat16, 1), AGCase(37, [16] * size, 16, torch.bfloat16, 2)
        x, w, _ = case.inputs(rank)
        same(fluxlike.gemm_rs(x, w, rs), case.expected(rank), "gemm_rs")
        shard, v, _ = other.inputs(rank)
        same(fluxlike.ag_gemm(shard, v, ag, m=37), other.whole()[1][rank], "ag_gemm")
    fluxlike.finalize()


@pytest.mark.parametrize("heap", HEAPS)
def test_the_heap_grows(heap):
    for outcome in run_fresh(grows, 2, env={"FLUXLIKE_VIRTUAL_NODES": "2"}, heap=heap, timeout=120):
        assert outcome.ok, str(outcome)


def by_turns(group, puts):
    """Calls of the same sizes, made together and node by node, by one context."""
    start(puts)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    case, other = RSCase(64, 16, [16] * size, torch.bfloat16, 1), AGCase(64, [16] * size, 16, torch.bfloat16, 2)
    (x, w, _), (shard, v, _) = case.inputs(rank), other.inputs(rank)
    rows, columns = case.expected(rank), other.whole()[1][rank]
    with fluxlike.create_gemm_rs_context(64, 16) as rs, fluxlike.create_ag_gemm_context(64, 16, 16) as ag:
        for turn, together in enumerate((False, False, True, True, True, False, True)):  # each slot both ways, one behind the other
            rs.together = ag.together = together
            same(fluxlike.gemm_rs(x, w, rs), rows, f"gemm_rs {turn}")
            shard.neg_()  # what came before is not right any more
            z = fluxlike.ag_gemm(shard, v, ag, m=64)
            same(z if turn % 2 else -z, columns, f"ag_gemm {turn}")
        rs.check(), ag.check()
    fluxlike.finalize()


@pytest.mark.parametrize(("heap", "puts"), HEAPS_AND_PUTS)
def test_together_and_not_by_turns(heap, puts):
    for outcome in run_fresh(by_turns, 4, env={"FLUXLIKE_VIRTUAL_NODES": "4"}, heap=heap, timeout=120, puts=puts):
        assert outcome.ok, str(outcome)


def again(group, puts):
    """Calls that come again are not looked at, and give what the first gave; what is wrong with one is told as ever."""
    start(puts)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    # an even split, so that N of ag_gemm can be left out
    rs_case, ag_case = RSCase(16, 24, [16] * size, DTYPES[0], 1), AGCase(16, [8] * size, 32, DTYPES[0], 2)
    (x, w, _), (shard, v, _) = rs_case.inputs(rank), ag_case.inputs(rank)
    y, z = rs_case.expected(rank), ag_case.whole()[1][rank]
    out, outs = torch.empty(y.shape, dtype=x.dtype, device=x.device), torch.empty(2, *z.shape, dtype=x.dtype, device=x.device)
    looks, operands = [], validate.operands
    validate.operands = lambda *args: looks.append(args[0]) or operands(*args)
    rs, ag = fluxlike.create_gemm_rs_context(40, 24), fluxlike.create_ag_gemm_context(40, 24, 32)
    for together, sign in itertools.product((None, True, False), (1, -1)):
        rs.together = ag.together = together  # also between calls that are alike
        a, b = sign * x, sign * shard
        for given, other in ((rs, ag), (None, None)):
            same(fluxlike.gemm_rs(a, w, given), sign * y, "gemm_rs")
            assert fluxlike.gemm_rs(a, w, given, out=out.fill_(7)) is out
            same(out, sign * y, "gemm_rs, out")
            same(fluxlike.ag_gemm(b, v, other), sign * z, "ag_gemm")
            results, gathered = fluxlike.ag_gemm(b, [v, v], other, return_gathered=True, out=list(outs.fill_(7)))
            for t in (*results, *outs):
                same(t, sign * z, "ag_gemm, out")
            same(gathered, sign * ag_case.whole()[0], "gathered")
    assert looks == 2 * (2 * ["gemm_rs"] + 3 * ["ag_gemm"])
    over = torch.zeros(x.numel() + out.numel(), dtype=x.dtype, device=x.device)
    inside = over[: x.numel()].view_as(x).copy_(x)
    bad = [
        (lambda: fluxlike.gemm_rs(inside, w, rs, out=over[8:][: out.numel()].view_as(out)), "overlaps x"),
        (lambda: fluxlike.gemm_rs(x, w, rs, out=out.clone().requires_grad_()), "requires_grad"),
        (lambda: fluxlike.gemm_rs(x.float(), w, rs), "dtype"),
        (lambda: fluxlike.gemm_rs(x, w, ag), "create_gemm_rs_context"),
        (lambda: fluxlike.ag_gemm(shard, [v, v], ag, out=[outs[0], outs[0]]), "overlaps another out"),
    ]
    for call, words in bad:
        with pytest.raises(ValueError, match=words):
            call()
    same(fluxlike.gemm_rs(x, w, rs), y, "gemm_rs")
    rs.close(), ag.close()
    for call in (lambda: fluxlike.gemm_rs(x, w, rs), lambda: fluxlike.ag_gemm(shard, v, ag)):
        with pytest.raises(RuntimeError, match="this context is closed"):
            call()
    fluxlike.finalize()
    for call in (lambda: fluxlike.gemm_rs(x, w), lambda: fluxlike.ag_gemm(shard, v)):
        with pytest.raises(RuntimeError, match=r"fluxlike\.init"):
            call()
    validate.operands = operands


@pytest.mark.parametrize(("heap", "puts"), HEAPS_AND_PUTS)
def test_calls_that_come_again(heap, puts):
    for outcome in run_fresh(again, 2, {"FLUXLIKE_VIRTUAL_NODES": "2"}, heap=heap, timeout=120, puts=puts):
        assert outcome.ok, str(outcome)


def captured(group, schedule, together, puts):
    """Calls in a CUDA graph of an odd number of calls, so that replays use one slot after itself, between eager calls."""
    start(puts)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    case, other = RSCase(45, 24, [20] * size, torch.bfloat16, 3), AGCase(45, [16] * size, 32, torch.bfloat16, 4)
    (x, w, _), (shard, v, _) = case.inputs(rank), other.inputs(rank)
    rows, columns = case.expected(rank), other.whole()[1][rank]
    with (
        fluxlike.create_gemm_rs_context(45, 24, schedule=schedule) as rs,
        fluxlike.create_ag_gemm_context(45, 16, 32, schedule=schedule) as ag,
    ):
        rs.together = ag.together = together
        for _ in range(3):
            fluxlike.gemm_rs(x, w, rs), fluxlike.ag_gemm(shard, v, ag, m=45)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [(fluxlike.gemm_rs(x, w, rs), fluxlike.ag_gemm(shard, v, ag, m=45)) for _ in range(3)]
        for turn in range(4):
            for y, z in results:
                y.zero_(), z.zero_()
            graph.replay()
            for y, z in (*results, (fluxlike.gemm_rs(x, w, rs), fluxlike.ag_gemm(shard, v, ag, m=45))):
                same(y, rows, f"gemm_rs {turn}")
                same(z, columns, f"ag_gemm {turn}")
        assert [ctx.last_path.endswith("/together") for ctx in (rs, ag)] == [together] * 2
        assert [by_kernels(ctx) > 0 for ctx in (rs, ag)] == [puts == "far" or (puts == "auto" and together)] * 2
        rs.check(), ag.check()
    fluxlike.finalize()


CAPTURED = (("auto", "host"), ("auto", "far"), ("copy_engine", "auto"), ("in_kernel", "auto"), ("decomposed", "auto"))


@pytest.mark.gpu
@pytest.mark.parametrize(("schedule", "puts"), CAPTURED)
@pytest.mark.parametrize("together", (False, True))
@pytest.mark.parametrize(("ranks", "parts"), ((4, 2), (2, 2)))
def test_cuda_graphs(ranks, parts, together, schedule, puts):
    env, how = {"FLUXLIKE_VIRTUAL_NODES": str(parts)}, {"schedule": schedule, "together": together, "puts": puts}
    for outcome in run_fresh(captured, ranks, env, heap="nvshmem", timeout=120, **how):
        assert outcome.ok, str(outcome)


def model(group):
    """Gradients of both operations; what does not go from node to node."""
    start()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    make = torch.Generator().manual_seed(1)
    x, up, down = (torch.randn(*shape, generator=make).to(device()) for shape in ((13, 8), (16, 8), (8, 16)))
    full = -(-13 // size)
    mine, part = slice(rank * full, (rank + 1) * full), slice(rank * 4, rank * 4 + 4)
    leaves = [t.detach().clone().requires_grad_() for t in (x[mine], up[part], down[:, part])]
    shard, a, b = leaves
    y = fluxlike.gemm_rs(torch.relu(fluxlike.ag_gemm(shard, a, m=13)), b)
    y.square().sum().backward()
    whole = [t.double().requires_grad_() for t in (x, up, down)]
    z = torch.relu(whole[0] @ whole[1].T) @ whole[2].T
    z.square().sum().backward()
    torch.testing.assert_close(y.double(), z[mine], rtol=1e-4, atol=1e-3)
    expected = whole[0].grad[mine], whole[1].grad[part], whole[2].grad[:, part]
    for leaf, right in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad.double(), right, rtol=1e-4, atol=1e-2)
    column = torch.ones(1, 2, device=device()).T  # contiguous, says torch, with strides of 1 and 2
    assert (fluxlike.ag_gemm(column, torch.ones(3, 1, device=device()), m=2 * size) == 1).all()
    with pytest.raises(ValueError, match="are on 2 nodes, and only gemm_rs and ag_gemm go from node to node"):
        fluxlike.all_reduce(x)
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    torch.testing.assert_close(fluxlike.all_reduce(x, pair), 2 * x)
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    with pytest.raises(ValueError, match="M=13 is more than the context's max_m=8"):
        fluxlike.gemm_rs(x, up, fluxlike.create_gemm_rs_context(8, 16, dtype=torch.float32, group=across))
    with pytest.raises(RuntimeError, match=r"has no .* MiB free for the group of ranks"):  # no world, so the heap does not grow
        fluxlike.create_gemm_rs_context(8192, 4096, dtype=torch.float32, group=across)
    torch.testing.assert_close(fluxlike.gemm_rs(x, up, group=across), (2 * x @ up.T)[rank // 2 * 7 : rank // 2 * 7 + 7])
    fluxlike.finalize()


@pytest.mark.parametrize("heap", HEAPS)
def test_in_a_model(heap):
    for outcome in run_fresh(model, 4, env={"FLUXLIKE_VIRTUAL_NODES": "2"}, heap=heap, timeout=120):
        assert outcome.ok, str(outcome)


def checked(group):
    with pytest.raises(ValueError, match="FLUXLIKE_RACECHECK=1 checks the ranks of one node"):
        start()


def test_the_race_checker_is_for_one_node():
    for outcome in run_fresh(checked, 2, env={"FLUXLIKE_VIRTUAL_NODES": "2", "FLUXLIKE_RACECHECK": "1"}):
        assert outcome.ok, str(outcome)


def by_any_default(group):
    """Sums are in fp32 whatever torch's default dtype is."""
    start()
    x, w = torch.full((8, 16), 3e4, device=device()), torch.ones(8, 16, device=device())
    expected = fluxlike.reference.gemm_rs(x, w).double().cpu()
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        same(fluxlike.gemm_rs(x, w), expected, f"by default {dtype}")


@pytest.mark.parametrize("heap", HEAPS)
def test_the_default_dtype_is_no_matter(heap):
    for outcome in run_fresh(by_any_default, 2, env={"FLUXLIKE_VIRTUAL_NODES": "2"}, heap=heap):
        assert outcome.ok, str(outcome)


@pytest.mark.parametrize(
    ("ranks", "heap"), ((4, "shm"), *(pytest.param(ranks, "nvshmem", marks=pytest.mark.gpu) for ranks in (2, 4)))
)
def test_every_schedule(ranks, heap):
    for outcome in run_fresh(every_schedule, ranks, env={"FLUXLIKE_VIRTUAL_NODES": "2"}, heap=heap, timeout=120):
        assert outcome.ok, str(outcome)


def some_of_them(group):
    """What the launcher says of a host, against what is there: all ranks raise together, and may begin again."""
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ["WORLD_SIZE"] = str(size)
    pairs = [dist.new_group([0, 1]), dist.new_group([2])]
    for local, who, fits in (
        (str(size), None, True),
        ("", None, True),
        (str(size), pairs[rank // 2], True),  # of some ranks there may be fewer on a host
        ("2", pairs[rank // 2], True),
        ("1" if rank == 1 else str(size), None, False),
        ("1" if rank < 2 else "3", pairs[rank // 2], rank == 2),
        ("4", None, False),
        ("many", None, False),
    ):
        os.environ["LOCAL_WORLD_SIZE"] = local
        try:
            fluxlike.init(who, heap="shm", heap_bytes=1 << 20)
            said = ""
            fluxlike.finalize()
        except ValueError as error:
            said = str(error)
        assert fits == (not said), (local, said)
        assert fits or ("LOCAL_WORLD_SIZE=" in said and "start all ranks of a host by one torchrun" in said)
        assert ("is not a whole number" in said) == (local == "many"), said


def test_the_launcher_s_word_is_compared_with_what_is_there():
    for outcome in run_fresh(some_of_them, 3, timeout=120):
        assert outcome.ok, str(outcome)


def test_nodes_of_ranks():
    assert nodes.number(["a"] * 4, 1) == [0, 0, 0, 0]
    assert nodes.number(["a"] * 4, 2) == [0, 0, 1, 1]
    assert nodes.number(["b", "b", "a", "a"], 2) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="FLUXLIKE_VIRTUAL_NODES=3 does not divide the 4 ranks"):
        nodes.number(["a"] * 4, 3)
    assert nodes.of_group([0, 0, 1, 1], [4, 5, 6, 7]) == [[0, 1], [2, 3]]
    assert nodes.of_group([5, 5], [0, 1]) == [[0, 1]]
    for bad in ([0, 1, 0, 1], [0, 0, 1], [0, 1, 1]):
        with pytest.raises(ValueError, match="as many ranks on each"):
            nodes.of_group(bad, list(range(len(bad))))

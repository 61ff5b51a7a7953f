"""sparse_all_reduce: bit by bit against the reference; ids of all kinds, dtypes, modes, contexts, many calls; training."""

import contextlib
import copy
import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import TORCHRUN, device, divided, rows_slice, run_fresh, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fluxlike
from fluxlike.nn import embedding as embedding_file
from fluxlike.ops import sparse_all_reduce as op_file
from fluxlike.ops.sparse_hook import CONTEXT
from fluxlike.runtime import programs, world

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def gradient(ids, shape, dtype=torch.float32, seed=0, dims=1):
    """Entries at ``ids`` with random values, as autograd leaves them: in any order, ids more than once."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn((len(ids), *shape[dims:]), generator=generator).to(dtype)
    indices = torch.tensor([ids], dtype=torch.int64) if dims == 1 else torch.tensor(ids).reshape(len(ids), dims).T
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True).to(device())


def bits(t):
    return t.contiguous().view({2: torch.int16, 4: torch.int32}[t.dtype.itemsize])


def same(got, right, what=""):
    assert got.is_coalesced() and got.shape == right.shape and got.dtype == right.dtype, what
    assert torch.equal(got.indices(), right.indices()), what
    assert torch.equal(bits(got.values()), bits(right.values())), what


def same_padded(got, right, entries, what=""):
    """The result of mode="padded" against that of "exact"."""
    union = right._nnz()
    ids, values = got._indices(), got._values()
    assert got._nnz() == entries and not got.is_coalesced(), what
    assert torch.equal(ids[:, :union], right.indices()) and torch.equal(bits(values[:union]), bits(right.values())), what
    assert not values[union:].any() and (ids[:, union:] == (ids[:, union - 1 : union] if union else 0)).all(), what


FINE = dict(TILE=32, COLUMNS=8, CHUNK=4, UNIT=8)


def fine(body):
    """Small tiles for contexts that are made in a body: so a few rows are many chunks."""

    @functools.wraps(body)
    def run(group, **how):
        before = {name: getattr(op_file, name) for name in FINE}
        vars(op_file).update(FINE)
        try:
            return body(group, **how)
        finally:
            vars(op_file).update(before)

    return run


def small(group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    ids = [[3, 1, 3, 7, 1, 3], [], [7, 0, 3], [3, 3, 9]][rank]
    x = gradient(ids, (10, 5), seed=rank)
    y = fluxlike.sparse_all_reduce(x, group=group)
    same(y, fluxlike.reference.sparse_all_reduce(x, group=group))
    assert y.indices().tolist() == [[1, 3, 7], [1, 3, 7], [0, 1, 3, 7], [0, 1, 3, 7, 9]][size - 1 : size]
    assert fluxlike.sparse_all_reduce_(x, "avg", group) is x
    assert torch.equal(x.values(), divided(y.values(), size))
    context = world.current().cached[op_file.NAME, world.current().control_of(group).name, 5, x.dtype, x.dtype]
    assert context.last_path == ("owned" if size > 2 else "direct")


def in_inference(group):
    """In place a tensor stays what it is: made in inference mode or not, wherever the call is."""
    made = {}
    for mode in (True, False):
        with torch.inference_mode(mode):
            made[mode] = [gradient([2, 2, 0], (4, 3)) for _ in range(2)]
    right = fluxlike.reference.sparse_all_reduce(made[False][0], group=group)
    for mode, tensors in made.items():
        for where, x in zip((True, False), tensors, strict=True):
            version = 0 if mode else x._version
            with torch.inference_mode(where):
                assert fluxlike.sparse_all_reduce_(x, group=group) is x
            what = f"made in {mode}, called in {where}"
            assert mode or x._version > version, "autograd, which may have saved it, is not told that it was written"
            assert x.is_inference() == x.values().is_inference() == mode, what
            assert "nnz=2" in repr(x), what
            same(x, right, what)


def test_inference_mode():
    run_ranks(in_inference, 2)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_small(ranks):
    run_ranks(small, ranks)


def kinds(group):
    """Dtypes, operations, wires, one and several dimensions of ids and of values."""
    rank = dist.get_rank(group)
    many = [[2, 5, 2, 2, 8], [8, 5], [5, 2, 2, 0, 8]][rank]
    shapes = [((9,), many, 1), ((9, 2, 3), many, 1), ((3, 4, 5), [[i % 3, i % 4] for i in many], 2)]
    for seed, (dtype, (shape, ids, dims)) in enumerate(zip(DTYPES, shapes, strict=True)):
        for op, wire in (("avg", None), ("sum", torch.bfloat16), ("sum", "fp32")):
            x = gradient(ids, shape, dtype, 10 * seed + rank, dims)
            right = fluxlike.reference.sparse_all_reduce(x, op, group, wire_dtype=wire)
            what = f"{dtype} {shape} {op} {wire}"
            same(fluxlike.sparse_all_reduce(x, op, group, wire_dtype=wire), right, what)
            if seed != 1:
                y = fluxlike.sparse_all_reduce(x, op, group, "padded", max_nnz=7, wire_dtype=wire)
                same_padded(y, right, 7 * dist.get_world_size(group), what)


@pytest.mark.parametrize("ranks", [2, 3])
def test_kinds(ranks):
    run_ranks(kinds, ranks)


def hot(group):
    """Ids that come once, up to HOT times, just above it and much more often; hot slots side by side and apart, in blocks of 4."""
    rank, before = dist.get_rank(group), (op_file.SUM_COLUMNS, op_file.SUM_SLOTS)
    op_file.SUM_COLUMNS, op_file.SUM_SLOTS = 32, 4
    try:
        times = [1, op_file.HOT, op_file.HOT + 1, 3 * op_file.HOT + 5, 2, 1, 1, 1, 1, 70 + rank, 1, op_file.HOT + 2]
        ids = torch.arange(len(times)).repeat_interleave(torch.tensor(times))
        ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(rank))].tolist()
        for dtype, width in ((torch.float32, 70), (torch.bfloat16, 3)):
            x = gradient(ids, (12, width), dtype, rank)
            x._values()[ids.index(3)] = -0.0
            same(fluxlike.sparse_all_reduce(x, "avg", group), fluxlike.reference.sparse_all_reduce(x, "avg", group), str(dtype))
        x = gradient([11] * (op_file.HOT + 1), (12, 2))  # minus zero is what sums of it are
        x._values().fill_(-0.0)
        assert torch.signbit(fluxlike.sparse_all_reduce(x, "sum", group).values()).all()
    finally:
        op_file.SUM_COLUMNS, op_file.SUM_SLOTS = before


@pytest.mark.parametrize("ranks", [1, 3])
def test_ids_that_come_often(ranks):
    run_ranks(hot, ranks)


def truth():
    """The reference against a sum that anybody can read."""
    x = torch.sparse_coo_tensor([[4, 1, 4]], [[1.0, 2.0], [4.0, -0.0], [0.5, 8.0]], (6, 2), check_invariants=True)
    ids, rows = fluxlike.reference.sequential_sum(x._indices()[0], x._values())
    assert ids.tolist() == [1, 4] and rows.tolist() == [[4.0, 0.0], [1.5, 10.0]]
    assert torch.signbit(rows[0, 1])


def test_reference():
    truth()


#: Tables of one row, of some, and of more than 32 bits count.
TABLES = st.sampled_from([1, 5, 90, 2**33])
WIDTHS = st.sampled_from([0, 1, 3, 16, 70])


@st.composite
def calls(draw, most):
    """Rows and width of a table, and the ids of each rank; some of them in common, some ranks without any."""
    rows, width = draw(TABLES), draw(WIDTHS)
    ids = st.integers(0, rows - 1) | st.integers(0, min(rows, 6) - 1)
    lists = st.lists(ids, max_size=most) | st.just([])
    return dict(shape=(rows, width) if width else (rows,), ids=draw(st.lists(lists, min_size=4, max_size=4)))


@fine
def any_ids(group, shape, ids, op, seed):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    x = gradient(ids[rank], shape, seed=seed + rank)
    right = fluxlike.reference.sparse_all_reduce(x, op, group)
    y = fluxlike.sparse_all_reduce(x, op, group)
    same(y, right)
    same(fluxlike.sparse_all_reduce(x.coalesce(), op, group), fluxlike.reference.sparse_all_reduce(x.coalesce(), op, group))
    same_padded(fluxlike.sparse_all_reduce(x, op, group, "padded", max_nnz=41), right, 41 * size)
    return y.indices().tolist(), bits(y.values()).tolist()


@settings(max_examples=8, derandomize=True)
@given(call=calls(40), ranks=st.integers(1, 4), op=st.sampled_from(["sum", "avg"]), seed=st.integers(0, 1000))
def test_any_ids(call, ranks, op, seed):
    results = run_ranks(any_ids, ranks, op=op, seed=seed, **call)
    assert all(result == results[0] for result in results)


@fine
def mixed(group, count, jitter=True):
    """Calls back to back, with ids and tables that change, and ranks that are late; repeats have the same bits."""
    rank = dist.get_rank(group)
    previous = programs.configure(programs.Schedule(seed=rank + 1, jitter=0.02, delay=1e-3) if jitter else None)
    try:
        for call in range(count):
            generator = torch.Generator().manual_seed(10 * call + rank)
            entries = int(torch.randint(0, 40, (), generator=generator))
            ids = torch.randint(0, (30, 200)[call % 2], (entries,), generator=generator).tolist()
            x = gradient(ids, (200, (3, 9)[call % 3 // 2]), seed=call)
            mode = dict(mode="padded", max_nnz=64) if call % 4 == 3 else {}
            results = [fluxlike.sparse_all_reduce(x, group=group, **mode) for _ in range(2)]
            assert torch.equal(bits(results[0]._values()), bits(results[1]._values())), call
            right = fluxlike.reference.sparse_all_reduce(x, group=group)
            same_padded(results[0], right, 64 * group.size()) if mode else same(results[0], right, call)
    finally:
        programs.configure(previous)


def test_calls_back_to_back():
    run_ranks(mixed, 3, count=4)


def grows(group):
    """One rank has more ids than there is room for; another has many entries of few ids, for which there is."""
    rank = dist.get_rank(group)
    rows = []
    for entries, distinct in ((5, 5), (70, 70), (300, 90), (7, 7)):
        ids = [i % distinct for i in range(entries)] if rank == 1 else [3, 3]
        x = gradient(ids, (100, 2), seed=rank)
        same(fluxlike.sparse_all_reduce(x, group=group), fluxlike.reference.sparse_all_reduce(x, group=group))
        cached = world.current().cached
        rows.append(cached[op_file.NAME, world.current().control_of(group).name, 2, x.dtype, x.dtype].rows)
    assert rows[1:] == [128, 128, 128] and rows[0] <= 128, rows


def test_growth():
    run_ranks(grows, 2)


def embedding(ids, weight, seed):
    """The gradient of a weighted sum of an embedding's rows."""
    rows = torch.nn.functional.embedding(ids, weight, sparse=True)
    (rows * torch.randn(rows.shape, generator=torch.Generator().manual_seed(seed)).to(device())).sum().backward()
    x, weight.grad = weight.grad, None
    return x


def ahead(group):
    """A context for a table: ids go ahead of the gradient; a forward without backward; what does not fit is told."""
    rank = dist.get_rank(group)
    weight = torch.zeros(50, 4, device=device(), requires_grad=True)
    with fluxlike.create_sparse_all_reduce_context(weight.shape, 12, group=group) as ctx:
        ctx.data.fill_(0xFF)  # NaN where nobody has written
        ctx.check()
        dist.barrier(group)
        for call in range(4):
            ids = torch.randint(0, 50, (3, 4), generator=torch.Generator().manual_seed(10 * call + rank)).to(device())
            ctx.start_indices(ids)
            if call == 1:
                with pytest.raises(ValueError, match="started already"):
                    ctx.start_indices(ids)
                ctx.cancel_indices()
            x = embedding(ids, weight, call)
            right = fluxlike.reference.sparse_all_reduce(x, group=group)
            if call == 2:
                same_padded(fluxlike.sparse_all_reduce(x, group=group, mode="padded", ctx=ctx), right, ctx.size * ctx.rows)
            else:
                same(fluxlike.sparse_all_reduce_(x, group=group, ctx=ctx), right)
            assert ctx._pending is None


def test_ids_ahead():
    run_ranks(ahead, 3)


def checked(group):
    fluxlike.init(heap="shm")
    mixed(group, count=3, jitter=False)
    ahead(group)
    fluxlike.finalize()


@pytest.mark.skipif(TORCHRUN, reason="makes its own ranks")
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_no_race(ranks):
    for outcome in run_fresh(checked, ranks, {"FLUXLIKE_RACECHECK": "1"}, measure="kernels"):
        assert outcome.ok, str(outcome)


def captured(group):
    """mode="padded" without a word from the host, and in a CUDA graph, replayed with other ids."""
    rank = dist.get_rank(group)
    weight = torch.zeros(5000, 64, device=device(), requires_grad=True)
    with fluxlike.create_sparse_all_reduce_context(weight.shape, 300, group=group) as ctx:
        inputs = torch.zeros(300, dtype=torch.int64, device=device())
        values = torch.randn(300, 64, generator=torch.Generator().manual_seed(rank)).to(device())

        def call():
            ctx.start_indices(inputs)
            x = torch.sparse_coo_tensor(inputs[None], values, weight.shape, check_invariants=False)
            return fluxlike.sparse_all_reduce(x, "avg", group, "padded", ctx=ctx)

        call()  # compiles
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = call()
        for seed in range(3):
            inputs.copy_(torch.randint(0, 5000, (300,), generator=torch.Generator().manual_seed(10 * seed + rank)))
            values.add_(1)
            graph.replay()
            ctx.check()
            x = torch.sparse_coo_tensor(inputs[None], values, weight.shape)
            same_padded(y, fluxlike.reference.sparse_all_reduce(x, "avg", group), ctx.size * ctx.rows, seed)


@pytest.mark.gpu
def test_padded_waits_for_nothing():
    run_ranks(captured, 2)


@fine
def scatters(group):
    """Rows of a table that are split evenly, unevenly, and so that the last ranks have none."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for seed, shape in enumerate([(12, 3), (13,), (2, 3)]):
        ids = torch.randint(0, shape[0], (9 * (rank != 1),), generator=torch.Generator().manual_seed(10 * seed + rank)).tolist()
        x = gradient(ids, shape, seed=seed + rank)
        whole = fluxlike.reference.sparse_all_reduce(x, "avg", group)
        rows = rows_slice(shape[0], size, rank)
        mine = (whole.indices()[0] >= rows.start) & (whole.indices()[0] < rows.stop)
        y = fluxlike.sparse_reduce_scatter(x, "avg", group)
        assert y.is_coalesced() and y.shape == (rows.stop - rows.start, *shape[1:])
        assert torch.equal(y.indices() + rows.start, whole.indices()[:, mine])
        assert torch.equal(bits(y.values()), bits(whole.values()[mine]))
        z = fluxlike.sparse_reduce_scatter(x, "avg", group, "padded", max_nnz=10)
        assert torch.equal(z.to_dense(), y.to_dense()) and z._nnz() == (10 * size if y.shape[0] else 0)
    assert world.current().cached[op_file.NAME, world.current().control_of(group).name, 3, x.dtype, x.dtype].last_path == "scatter"
    with pytest.raises(ValueError, match="sparse_dim=2; it must be 1"):
        fluxlike.sparse_reduce_scatter(torch.zeros(2, 2, device=device()).to_sparse(), group=group)


@pytest.mark.parametrize("ranks", [2, 3])
def test_reduce_scatter(ranks):
    run_ranks(scatters, ranks)


class Words(nn.Module):
    """A sparse table, and a dense layer behind it."""

    def __init__(self, table):
        super().__init__()
        self.table, self.out = table, nn.Linear(4, 2)

    def forward(self, ids):
        return self.out(self.table(ids).mean(1))


def trained(group, make, optimizer, hook):
    """Weights after steps on data that differ between the ranks; in the third step gradients are accumulated."""
    torch.manual_seed(0)
    rank = dist.get_rank(group)
    model = Words(make())
    ddp = DistributedDataParallel(model, process_group=group)
    if hook:
        ddp.register_comm_hook(group, fluxlike.sparse_allreduce_hook)
    steps = [optimizer(model.table.parameters()), torch.optim.SGD(model.out.parameters(), lr=0.1)]
    for step in range(4):
        for _ in range(1 + (step == 2)):
            ids = torch.randint(0, 20, (3, 5), generator=torch.Generator().manual_seed(10 * step + rank))
            with ddp.no_sync() if step == 2 and not _ else contextlib.nullcontext():
                ddp(ids).square().sum().backward()
        for each in steps:
            each.step()
            each.zero_grad()
    return [p.detach().clone() for p in model.parameters()], model


def trains(group):
    """SparseAdam and SGD with momentum come to the weights that they come to with gloo, with ids ahead and with ids behind."""
    for optimizer in (lambda p: torch.optim.SparseAdam(p, 0.05), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)):
        right, _ = trained(group, lambda: nn.Embedding(20, 4, sparse=True), optimizer, False)
        plain, _ = trained(group, lambda: nn.Embedding(20, 4, sparse=True), optimizer, True)
        ahead, model = trained(group, lambda: fluxlike.nn.Embedding(20, 4, 30, group), optimizer, True)
        for a, b, c in zip(right, plain, ahead, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-7)
            assert torch.equal(c, b)
        assert model.table.context.stats["calls"] == 4 and model.table.context._pending is None
        model.table.close()


@pytest.mark.skipif(TORCHRUN, reason="compares with gloo")
def test_training():
    run_ranks(trains, 2)


def in_order(table, ddp, order, zero):
    """Steps of a schedule: forward of a batch, or backward of one, with its reduction. The gradients, as dense tables."""
    rank, found, losses = dist.get_rank(), [], {}
    for step in order:
        if step[0] == "f":
            name = step[1]
            ids = torch.tensor([ord(name) % 7, ord(name) % 5 + rank], device=device())
            losses[name] = ddp(ids).square().sum()
        elif step[0] == "z":
            zero()
        else:
            sum(losses.pop(one) for one in step[1:]).backward()
            found.append(table.weight.grad.to_dense().clone())
            zero()
    return found


#: f: forward, b: backward of these together, z: zero_grad only. And how many of the reductions found ids that had gone ahead.
ORDERS = {
    "in turn": (("fa", "ba", "fb", "bb", "fc", "bc"), 3),
    "one forward ahead": (("fa", "fb", "ba", "fc", "bb", "fd", "bc", "bd", "fe", "be"), 1),
    "two together": (("fa", "fb", "bab", "fc", "bc"), 1),
    "zeroed between": (("fa", "ba", "fb", "z", "fc", "bbc", "fd", "bd"), 2),
    "one that is dropped": (("fa", "ba", "fx", "fb", "bb", "fc", "bc", "fd", "bd", "fe", "be"), 2),
}


def orders(group, which, tie):
    order, ahead = ORDERS[which]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedding_file, "FORGOTTEN", 3)
        in_both(group, order, ahead, tie)


def in_both(group, order, ahead, tie):
    results, started = [], []
    for ours in (False, True):
        torch.manual_seed(0)
        kind, how = (fluxlike.nn.Embedding, dict(max_ids=16, group=group)) if ours else (nn.Embedding, dict(sparse=True))
        kind = functools.partial(kind, 20, 4, device=device(), **how)
        table, out = kind(), nn.Linear(4, 2).to(device())
        model = nn.Sequential(table, out)
        if tie:  # by weight: each forward goes through the other one of the two
            other = kind()
            other.weight = table.weight
            model = Turns(table, other, out)
        ddp = DistributedDataParallel(model, process_group=group)
        ddp.register_comm_hook(group, fluxlike.sparse_allreduce_hook)
        if ours:
            pending_of = table.context.pending_of

            def noted(*args, context=table.context, pending_of=pending_of):
                started.append(context._pending is not None)
                return pending_of(*args)

            table.context.pending_of = noted
        results.append(in_order(table, ddp, order, lambda ddp=ddp: ddp.zero_grad()))
    assert len(results[0]) == len(results[1])
    for plain, mine in zip(*results, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-6, atol=1e-7)
    assert sum(started) == ahead, started
    table.close()
    ddp(torch.tensor([1, 2], device=device())).sum().backward()  # its ids go with the values now
    assert table.weight.grad._nnz() > 0


def averages_over_all(group):
    """The hook without a group: over all ranks, as torch's for dense buckets, though fluxlike knows fewer."""
    rank = dist.get_rank()
    alone = [dist.new_group([r]) for r in range(dist.get_world_size())][rank]
    fluxlike.init(alone, heap="shm", heap_bytes=16 << 20)

    def gradient():
        ddp = DistributedDataParallel(nn.Embedding(4, 1, sparse=True))
        ddp.register_comm_hook(None, fluxlike.sparse_allreduce_hook)
        ddp(torch.tensor([rank])).sum().backward()
        return ddp.module.weight.grad.to_dense().flatten().tolist()

    with pytest.raises(ValueError, match=r"outside the group given to fluxlike\.init"):
        gradient()
    fluxlike.finalize()
    fluxlike.init(heap="shm", heap_bytes=16 << 20)
    assert gradient() == [0.5, 0.5, 0, 0]
    fluxlike.finalize()


@pytest.mark.skipif(TORCHRUN, reason="it begins fluxlike anew")
def test_the_hook_without_a_group_averages_over_all_ranks():
    for outcome in run_fresh(averages_over_all, 2):
        assert outcome.ok, str(outcome)


class Turns(nn.Module):
    """Embeddings that take turns, and what is behind them."""

    def __init__(self, one, other, out):
        super().__init__()
        self.one, self.other, self.out, self._turn = one, other, out, itertools.cycle((one, other))

    def forward(self, ids):
        return self.out(next(self._turn)(ids))


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("which", ORDERS)
def test_ids_go_ahead_only_of_their_own_gradient(which, tie):
    run_ranks(orders, 2, which=which, tie=tie)


def replaced(group):
    """A state that replaces the parameter: ids go ahead as before."""
    table = fluxlike.nn.Embedding(20, 4, 16, group)
    table.load_state_dict({"weight": torch.ones(20, 4, device=device())}, assign=True)
    for _ in range(3):
        table(torch.tensor([1, 2], device=device())).sum().backward()
        assert table.context._pending is not None
        fluxlike.sparse_all_reduce_(table.weight.grad, "avg", group, ctx=getattr(table.weight, CONTEXT))
        table.weight.grad = None
    for _ in range(100):  # that are never reduced are counted, and not kept
        table(torch.tensor([1], device=device()))
    assert len(table.context.ahead._open) == 1
    with pytest.raises(TypeError, match="make one, with max_ids, and load the weights"):
        fluxlike.nn.Embedding.from_pretrained(torch.zeros(4, 2))
    table.close()


def test_embedding_of_another_tensor():
    run_ranks(replaced, 2)


def compiled(group):
    """A compiled model starts the ids in its forward; that is left out of what is compiled, and it is not compiled anew."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    table = fluxlike.nn.Embedding(16, 4, 8, group, device=device())
    fast = torch.compile(lambda ids: table(ids).sum(), backend="aot_eager")
    for step in range(6):
        ids = torch.arange(5, device=device()) + step + dist.get_rank(group)
        fast(ids).backward()
        assert table.context._pending.ids.tolist() == ids.tolist()
        x = fluxlike.sparse_all_reduce_(table.weight.grad, "avg", group, ctx=table.context)
        assert x.indices()[0].tolist() == list(range(step, step + 4 + dist.get_world_size(group)))
        table.weight.grad = None
    assert len(counters["graph_break"]) <= 1 and counters["stats"]["unique_graphs"] <= 3, counters
    table.close()


def test_embedding_in_a_compiled_model():
    run_ranks(compiled, 2)


def forwards(group):
    """When ids go ahead: not in evaluation; once a gradient; without what is padding; not if there are no such rows."""
    table = fluxlike.nn.Embedding(9, 2, 8, group, padding_idx=3, device=device())
    ids = torch.tensor([1, 3, 2, 3], device=device())
    with torch.no_grad():
        table(ids)
    assert table.context._pending is None
    table(ids)  # no gradient comes of it, which is not known before it is forgotten
    for _ in range(embedding_file.FORGOTTEN):
        table(ids).sum().backward()
        assert table.context._pending is None
        fluxlike.sparse_all_reduce_(table.weight.grad, "avg", group, ctx=table.context)
        table.weight.grad = None
    table(ids).sum().backward()
    assert table.context._pending.ids.tolist() == [1, 2]
    x = fluxlike.sparse_all_reduce_(table.weight.grad, "avg", group, ctx=table.context)
    assert x.indices().tolist() == [[1, 2]] and (x.values() == 1).all()
    table(torch.tensor([5, 3, 1], device=device())).sum().backward()  # added to what was reduced: entries beside those of the ids
    assert table.context._pending is None
    x = fluxlike.sparse_all_reduce_(table.weight.grad, "avg", group, ctx=table.context)
    assert x.indices().tolist() == [[1, 2, 5]] and x.values()[:, 0].tolist() == [2, 1, 1]
    table.zero_grad(set_to_none=False)  # what is kept has no entries
    table(ids).sum().backward()
    assert table.context._pending.ids.tolist() == [1, 2]
    x = fluxlike.sparse_all_reduce_(table.weight.grad, "avg", group, ctx=table.context, wire_dtype="fp32")  # as the context has it
    assert x.indices().tolist() == [[1, 2]] and (x.values() == 1).all()
    table.weight.grad = None
    with pytest.raises(TypeError, match="cannot be copied or pickled; make another one, and load the state_dict of this one"):
        copy.deepcopy(table)
    with pytest.raises(ValueError, match=r"would become torch\.float16; make it with dtype=torch\.float16, or close it first"):
        nn.Sequential(table).half()
    assert table.weight.dtype == table.float().weight.dtype == torch.float32
    table.eval()(ids)  # as one rank alone may do it
    assert table.context._pending is None
    table.train()
    if device().type == "cpu":  # GPUs do not survive it
        with pytest.raises(IndexError):
            table(torch.tensor([1, 9]))
        assert table.context._pending is None
    # no ids on one rank; many dimensions, and only padding; two forward passes before one backward pass
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    many = torch.tensor([[8, 3], [0, 8], [5, 3]], device=device())
    for batches in ([many.T if rank else many[:0]], [many if rank else many[:, :0] + 3], [ids[:2], many[::2].int()]):
        table.weight.grad = None
        sum(table(each).sum() for each in batches).backward()
        assert (table.context._pending is None) == (len(batches) > 1)
        right = table.weight.grad.to_dense()
        dist.all_reduce(right, group=group)
        x = fluxlike.sparse_all_reduce_(table.weight.grad, "avg", group, ctx=table.context)
        assert torch.equal(x.to_dense(), right / size)
    table.weight.grad = None
    with pytest.raises(ValueError, match="9 ids are more than max_ids=8; make the Embedding with a larger max_ids"):
        table(torch.arange(9, device=device()).where(torch.arange(9, device=device()) != 3, 0))
    table.close()
    assert table.half().weight.dtype == torch.float16, "no memory is left that it would have to fit"
    with pytest.raises(ValueError, match="max_nnz=0: all sizes must be whole numbers above 0"):
        fluxlike.nn.Embedding(9, 2, 0, group, device=device())
    # what torch refuses on one rank, all hear of
    for wrong in (dict(embedding_dim=-1), dict(dtype=torch.int32), dict(padding_idx=9), dict(embedding_dim="2")):
        options = dict(num_embeddings=9, embedding_dim=2) | (wrong if rank == 1 else {})
        with pytest.raises(ValueError, match="Embedding: " if rank == 1 else "rank 1 failed, so no rank goes on: Embedding: "):
            fluxlike.nn.Embedding(**options, max_ids=8, group=group)


def test_embedding():
    run_ranks(forwards, 2)


def test_a_forward_that_is_differentiated_twice_is_one():
    ahead, x = embedding_file._Ahead(), torch.ones((), requires_grad=True)
    twice, not_yet = 2 * x, 3 * x
    ahead.forward(twice, 0)
    for _ in range(2):
        twice.backward(retain_graph=True)
    ahead.forward(not_yet, 0)
    assert not ahead.is_first(1), "the second time was taken for the other one"
    not_yet.backward()
    assert ahead.is_first(1)

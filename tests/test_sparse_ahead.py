"""Ids that go ahead of their gradient wait for those of the peers: other calls that wait begin behind them, on all GPUs alike."""

import contextlib
import copy
import threading

import pytest
import torch
import torch.distributed as dist
from ranks import device, run_ranks
from test_sparse_all_reduce import embedding, same

import fluxlike
from fluxlike.runtime import world


def ordered(group):
    """What waits for peers is behind ids that go ahead, which wait for them as well, until these are used or forgotten."""
    this, rank = world.current(), dist.get_rank(group)
    waits = []
    x, weight = torch.ones(8, 4, device=device()), torch.zeros(50, 4, device=device(), requires_grad=True)
    ids = torch.arange(3 + rank, device=device())
    with (
        fluxlike.create_sparse_all_reduce_context(weight.shape, 12, group=group) as ctx,
        fluxlike.create_sparse_all_reduce_context((9, 2), 4, group=group) as other,
        fluxlike.create_gemm_rs_context(8, 8, dtype=x.dtype, group=group) as product,
    ):
        for table in (ctx, other):
            wait = table._lanes.wait
            table._lanes = copy.copy(table._lanes)
            table._lanes.wait = lambda wait=wait, table=table: [waits.append(table), wait()]

        def waited(act):
            waits.clear()
            act()
            return list(waits)

        def reduced():
            fluxlike.sparse_all_reduce(embedding(ids, weight, 0), group=group, ctx=ctx)

        def multiplied():
            fluxlike.gemm_rs(x, x, product)

        assert waited(multiplied) == []
        assert waited(lambda: ctx.start_indices(ids)) == []
        assert waited(multiplied) == waited(lambda: fluxlike.all_reduce(x, group)) == [ctx]
        assert waited(lambda: other.start_indices(ids[:2])) == [ctx]
        assert waited(multiplied) == [ctx, other]
        assert waited(reduced) == [other]
        assert waited(multiplied) == [other]
        other.cancel_indices()
        assert waited(multiplied) == []
        ctx.start_indices(ids)
    assert this.ahead == []


@pytest.mark.parametrize("ranks", (2, 3))
def test_what_waits_is_behind_ids_ahead(ranks):
    run_ranks(ordered, ranks)


def told_to_torch(group):
    """What the exchange of ids makes, and the launches on the caller's stream read, is freed while they may not be done."""
    executor, rank = world.current().executor, dist.get_rank(group)
    told, taken, in_use = [], [], executor.in_use
    weight = torch.zeros(50, 4, device=device(), requires_grad=True)
    with fluxlike.create_sparse_all_reduce_context(weight.shape, 12, group=group) as ctx:
        run = ctx.run
        ctx.run = lambda pending, *args: [taken.append(pending), run(pending, *args)][1]
        executor.in_use = lambda t: [told.append(t), in_use(t)]
        try:
            for start in (False, True):
                ids = torch.arange(3 + rank, device=device())
                if start:
                    ctx.start_indices(ids)
                fluxlike.sparse_all_reduce(embedding(ids, weight, 0), group=group, ctx=ctx)
                *_, pending = taken
                for made in (pending.local.order, pending.local.starts, *pending.table):
                    assert any(made is other for other in told)
                told.clear()
        finally:
            executor.in_use = in_use


def test_memory_of_the_ids_is_told_to_torch():
    run_ranks(told_to_torch, 2)


def beside_products(group):
    """Ids go ahead of products that take all multiprocessors and wait for peers, in both ways, again and again."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    weight = torch.zeros(200_000, 8, device=device(), requires_grad=True)
    m = 1024 * size
    x, w = torch.randn(m, 512, device=device()).bfloat16(), torch.randn(4096, 512, device=device()).bfloat16()

    def products():
        return fluxlike.gemm_rs(x, w, group=group), fluxlike.ag_gemm(x[: m // size], w, group=group)

    alone = [y.clone() for y in products()]
    plain = fluxlike.reference.gemm_rs(x, w, group=group), fluxlike.reference.ag_gemm(x[: m // size], w, group=group)
    torch.testing.assert_close(alone, list(plain), rtol=2e-2, atol=0.5)
    with fluxlike.create_sparse_all_reduce_context(weight.shape, 60_000, group=group) as ctx:
        for turn in range(20):
            ids = torch.randint(0, 200_000, (60_000,), generator=torch.Generator().manual_seed(size * turn + rank)).to(device())
            if (turn + rank) % 2:
                torch.cuda._sleep(2_000_000)  # the GPUs come to it one after the other
            ctx.start_indices(ids)
            beside = products()
            grad = embedding(ids, weight, turn)
            same(fluxlike.sparse_all_reduce(grad, group=group, ctx=ctx), fluxlike.reference.sparse_all_reduce(grad, group=group))
            assert all(torch.equal(y, wanted) for y, wanted in zip(beside, alone, strict=True)), turn


def apart_from_their_graph(group):
    """Ids that are started where no graph has them, and a gradient that one has, or the reverse, are refused, and can go on."""
    executor, rank = world.current().executor, dist.get_rank(group)
    weight = torch.zeros(50, 4, device=device(), requires_grad=True)
    ids, usual = torch.arange(3 + rank, device=device()), executor.capture
    with fluxlike.create_sparse_all_reduce_context(weight.shape, 12, group=group) as ctx, pytest.MonkeyPatch.context() as patch:

        def reduced(capturing):
            patch.setattr(executor, "capture", lambda: int(capturing))
            try:
                return fluxlike.sparse_all_reduce(embedding(ids, weight, 0), group=group, mode="padded", ctx=ctx).to_dense()
            finally:
                patch.setattr(executor, "capture", usual)

        whole = reduced(False)
        with pytest.MonkeyPatch.context() as beside:
            beside.setattr(executor, "is_beside_capture", lambda *sides: ctx._lanes in sides)
            with pytest.raises(RuntimeError, match="sparse_all_reduce: a CUDA graph is being captured of calls"):
                ctx.start_indices(ids)
        ctx.start_indices(ids)
        with pytest.raises(ValueError, match="ids were started before the CUDA graph of their gradient; call start_indices"):
            reduced(True)
        assert torch.equal(reduced(False), whole)
        ctx.start_indices(ids)
        ctx._pending = ctx._pending._replace(capture=2)
        with pytest.raises(ValueError, match="ids were started in a CUDA graph and their gradient is not"):
            reduced(False)
        with pytest.raises(ValueError, match="ids were started in another CUDA graph than their gradient"):
            reduced(True)
        ctx.cancel_indices()
        assert torch.equal(reduced(False), whole)


def test_ids_ahead_of_another_graph():
    run_ranks(apart_from_their_graph, 2)


def left_in_a_graph(group):
    """Ids whose gradient does not come in the graph that has them, or that were started before one: later graphs go on without."""
    rank = dist.get_rank(group)
    weight, x = torch.zeros(50, 4, device=device(), requires_grad=True), torch.ones(64, 64, device=device()).bfloat16()
    ids = torch.arange(3 + rank, device=device())
    with (
        fluxlike.create_sparse_all_reduce_context(weight.shape, 12, group=group) as ctx,
        fluxlike.create_gemm_rs_context(64, 64, group=group) as product,
    ):
        grad = embedding(ids, weight, 0)
        values, where = grad._values().clone(), grad._indices().clone()

        def reduced(start):
            if start:
                ctx.start_indices(ids)
            with torch.sparse.check_sparse_tensor_invariants(enable=False):
                made = torch.sparse_coo_tensor(where, values, weight.shape)
            return fluxlike.sparse_all_reduce(made, group=group, mode="padded", ctx=ctx)

        whole, multiplied = reduced(True).to_dense(), fluxlike.gemm_rs(x, x, product)
        graphs, results = [torch.cuda.CUDAGraph() for _ in range(4)], []
        for turn, graph in enumerate(graphs):
            if turn == 3:
                ctx.start_indices(ids)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                if turn == 0:
                    ctx.start_indices(ids)
                elif turn > 1:
                    ctx.cancel_indices()
                    results.append(reduced(turn == 2))
                results.append(fluxlike.gemm_rs(x, x, product))
        for graph in graphs:
            graph.replay()
        torch.cuda.synchronize()
        for y in results:
            assert torch.equal(*((y.to_dense(), whole) if y.is_sparse else (y, multiplied)))
        ctx.check()
        product.check()
        assert torch.equal(reduced(True).to_dense(), whole)


class Asked:
    """A lock; ``asks`` is called when another thread than this one is about to take it."""

    def __init__(self, lock, asks):
        self.lock, self.asks, self.mine = lock, asks, threading.get_ident()

    def __enter__(self):
        if threading.get_ident() != self.mine:
            self.asks()
        return self.lock.__enter__()

    def __exit__(self, *error):
        return self.lock.__exit__(*error)


def cancelled_by_a_thread(group):
    """Tables of a group have their lanes in common: no thread joins those of one while another one forks those of the other."""
    ids, order, came = torch.arange(3, device=device()), [], threading.Event()

    def comes(what):
        order.append(what)
        came.set()

    with (
        fluxlike.create_sparse_all_reduce_context((50, 4), 12, group=group) as ctx,
        fluxlike.create_sparse_all_reduce_context((9, 2), 4, group=group) as other,
        pytest.MonkeyPatch.context() as patch,
    ):
        thread, forked = threading.Thread(target=other.cancel_indices), ctx._lanes.forked

        @contextlib.contextmanager
        def forked_beside():
            thread.start()
            assert came.wait(60)
            order.append("forked")
            with forked():
                yield

        other.start_indices(ids)
        other._pending.joined.callback(comes, "joined")
        patch.setattr(ctx._lanes, "forked", forked_beside)
        patch.setattr(ctx.control, "lock", Asked(ctx.control.lock, lambda: comes("waits")))
        ctx.start_indices(ids)
        thread.join(60)
        assert order == ["waits", "forked", "joined"] and other._pending is None and ctx._pending is not None
        ctx.cancel_indices()


def test_ids_that_a_thread_cancels():
    run_ranks(cancelled_by_a_thread, 2)


@pytest.mark.gpu
def test_ids_that_are_left_in_a_graph():
    run_ranks(left_in_a_graph, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", (2, 3, 4))  # on two, no order could end in a wait of all for each other
def test_ids_ahead_of_products(ranks):
    run_ranks(beside_products, ranks)


def transformed(group):
    """Transforms of torch.func see torch's Embedding; what begins outside of them goes on."""
    ids = torch.tensor([1, 2, 2], device=device())
    table = fluxlike.nn.Embedding(9, 4, 8, group, device=device())

    def total(weight):
        return torch.func.functional_call(table, {"weight": weight}, (ids,)).sum()

    slope = torch.func.grad(total)(table.weight.detach())
    assert slope.coalesce().indices().tolist() == [[1, 2]]
    assert torch.equal(torch.vmap(lambda i: table(i).sum())(ids), table.weight[ids].sum(1))
    assert table.context._pending is None
    table(ids).sum().backward()
    x = fluxlike.sparse_all_reduce_(table.weight.grad, "avg", group, ctx=table.context)
    assert x.indices().tolist() == [[1, 2]]
    table.close()


def test_an_embedding_in_transforms_of_torch_func():
    run_ranks(transformed, 2)

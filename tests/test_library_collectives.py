"""torch.ops.fluxlike.* of the all_reduce family: schemas, fakes, and that compiled programs make the calls that eager ones make."""

import pytest
import torch
import torch.distributed as dist
from ranks import device, run_ranks

import fluxlike
from fluxlike.ops import library, library_collectives
from fluxlike.runtime import world


def numbers(rows, columns, rank):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(10 * rows + rank)).to(device())


def opchecks(group):
    rank, size, name = dist.get_rank(group), dist.get_world_size(group), library.name_of(group)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    x, shard = numbers(5, 3, rank), numbers(3 - rank, 3, 0)
    for op, args in (
        (library_collectives.all_reduce_op, ([x], "sum", "auto", name)),
        (library_collectives.all_reduce_op, ([x, x[0]], "max", "bulk", name)),
        (library_collectives.reduce_scatter_op, (x, "avg", "auto", name)),
        (library_collectives.all_gather_op, (x.int(), library.EVEN, "auto", name)),
        (library_collectives.all_gather_op, (shard, 2 * size + 1, "words", name)),
        (library_collectives.broadcast_op, (x.T, 1, "auto", name)),
    ):
        result = torch.library.opcheck(op, args, test_utils=checks)
        assert set(result.values()) == {"SUCCESS"}, f"{op} {result}"


def test_opcheck():
    run_ranks(opchecks, 2)


def step(x, group, m):
    """Every operation; also of what nobody uses, twice the same, and in place of what a program has and of what it was given."""
    fluxlike.all_reduce(x + 1, group)
    fluxlike.broadcast(x, 0, group)
    fluxlike.reduce_scatter(x, group)
    fluxlike.all_gather(x, group)
    y = fluxlike.all_reduce(x, group) + fluxlike.all_reduce(x, group, op="avg")
    fluxlike.all_reduce_(y, group)
    a, (b, c) = y * 2, fluxlike.all_reduce([y, y[0]], group, algo="bulk")
    a, b = fluxlike.all_reduce_([a, b], group)
    rows = fluxlike.reduce_scatter(a, group, op="max")
    whole = fluxlike.all_gather(rows, group, m) + fluxlike.broadcast(b, 1, group).relu() + c
    fluxlike.all_reduce_(x, group)
    return whole, x.sin(), fluxlike.all_gather(c, group)


def beside_graphs(group):
    """Calls that are no ops: the graphs end around them, and the library is not compiled with them."""
    rank = dist.get_rank(group)
    x = numbers(5, 3, rank)
    ids = torch.tensor([[1, 2 + rank]], device=device())

    def sparse():
        return torch.sparse_coo_tensor(ids, x[:2], (5, 3))

    for call in (
        lambda t: fluxlike.reduce(t * 2, 0, group),
        lambda t: t + fluxlike.sparse_all_reduce(sparse(), group=group).to_dense(),
        lambda t: t + fluxlike.sparse_all_reduce_(sparse(), group=group).to_dense(),
        lambda t: t + fluxlike.sparse_reduce_scatter(sparse(), group=group).to_dense().sum(),
    ):
        torch._dynamo.reset()
        got, right = torch.compile(call, backend="aot_eager")(x), call(x)
        assert got is right is None or torch.equal(got, right)
    with pytest.raises(Exception, match="no custom op; call it outside"):
        torch.compile(lambda t: fluxlike.reduce(t, 0, group), backend="aot_eager", fullgraph=True)(x)


def test_calls_that_no_graph_keeps():
    run_ranks(beside_graphs, 2)


def total_calls():
    return sum(context.stats["calls"] for context in world.current().cached.values())


def compiled(group, backend, sizes):
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1  # the ranks may have no children
    torch._inductor.config.fx_graph_cache = torch._functorch.config.enable_autograd_cache = False
    torch._dynamo.reset()
    fast = torch.compile(step, fullgraph=True, backend=backend, dynamic=len(sizes) > 1)
    for m in sizes:
        for wants in (False, True)[: 1 + (m == sizes[-1])]:
            results = []
            for run in (step, fast):
                x = numbers(m, 3, dist.get_rank(group)).requires_grad_(wants)
                run(x.detach().clone(), group, m)  # contexts are made
                before = total_calls()
                with torch.no_grad() if wants else torch.enable_grad():
                    results.append(([*run(x, group, m), x.detach()], total_calls() - before))
            (right, calls), (got, compiled_calls) = results
            assert calls == compiled_calls, f"eager made {calls} calls, compiled {compiled_calls}"
            for a, b in zip(got, right, strict=True):
                assert a.requires_grad == b.requires_grad and a.is_contiguous()
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    x = numbers(4, 3, 0).requires_grad_()
    y = torch.compile(lambda t: fluxlike.all_reduce(t, group), fullgraph=True, backend=backend)(x)
    assert not y.requires_grad and not fluxlike.all_reduce(x, group).requires_grad
    for call, says in (
        (lambda t: fluxlike.all_reduce([], group), "without tensors"),
        (lambda t: fluxlike.all_reduce({"x": t}, group), "x is dict, it must be a tensor or a list of tensors"),
        (lambda t: fluxlike.all_reduce_({"x": t}, group), "x is dict, it must be a tensor or a list of tensors"),
        (lambda t: fluxlike.all_reduce_(t.T, group), "must be contiguous"),
        (lambda t: fluxlike.broadcast(t, True, group), "root=True is no rank"),
        (lambda t: fluxlike.all_gather(t, group, "8"), "m='8'"),
        (lambda t: fluxlike.all_gather(t[0, 0], group), "all_gather: x has no dimensions"),
        (lambda t: fluxlike.reduce_scatter(t[0, 0], group), "reduce_scatter: x has no dimensions"),
        (lambda t: fluxlike.reduce_scatter(t.int(), group), "x has dtype torch.int32"),
    ):
        with pytest.raises(Exception, match=says):
            torch.compile(call, backend=backend)(x.detach())
    return calls


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "sizes"), (("aot_eager", (4, 7)), ("inductor", (6,))))
def test_compiled_makes_every_call(backend, sizes):
    run_ranks(compiled, 2, backend=backend, sizes=sizes)


class Module(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, x):
        return self.call(x)


def traced(group):
    """Graphs of torch.jit.trace and make_fx have the calls, not their results; what is no op says so, and none breaks a context."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    x = numbers(4, 3, dist.get_rank(group))
    sparse = x.to_sparse()
    makers = [lambda call: torch.jit.trace(call, (x,), check_trace=False)]
    makers += [lambda call, kind=kind: make_fx(call, tracing_mode=kind)(x) for kind in ("real", "symbolic")]
    for make in makers:
        for call in (
            lambda t: fluxlike.all_reduce(t, group),
            lambda t: fluxlike.all_reduce([t, 2 * t], group, "max")[1],
            lambda t: fluxlike.all_reduce_(t + 1, group),
            lambda t: fluxlike.reduce_scatter(t, group),
            lambda t: fluxlike.all_gather(t, group),
            lambda t: fluxlike.broadcast(t, 1, group),
        ):
            right = call(2 * x)
            assert torch.equal(make(call)(2 * x), right)
        for call, says in (
            (lambda t: fluxlike.reduce(t, 0, group) or t, "reduce: torch.export, torch.jit.trace and make_fx would"),
            (lambda t: fluxlike.all_gather(t[0, 0], group), "all_gather: x has no dimensions"),
            (lambda t: fluxlike.sparse_all_reduce(sparse, "sum", group), "sparse_all_reduce: torch.export, torch"),
        ):
            with pytest.raises(ValueError, match=says):
                make(call)
    with FakeTensorMode(), pytest.raises(ValueError, match=r"sparse_all_reduce: .*; call it outside of that$"):
        fluxlike.sparse_all_reduce(sparse, "sum", group)
    table = fluxlike.nn.Embedding(9, 2, 8, group, device=device())
    ids = torch.arange(3, device=device())
    assert torch.equal(torch.jit.trace(table, (ids,), check_trace=False)(ids + 1), table(ids + 1))
    for strict in (True, False):
        assert torch.equal(torch.export.export(table, (ids,), strict=strict).module()(ids + 1), table(ids + 1))
    table.close()
    for call in (lambda t: fluxlike.reduce(t, 0, group) or t, lambda t: fluxlike.sparse_all_reduce(sparse, "sum", group)):
        with pytest.raises(ValueError, match=r"reduce: torch\.export, torch\.jit\.trace and make_fx would"):
            torch.export.export(Module(call), (x,), strict=False)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning", "ignore:.*torch.jit.trace:FutureWarning")
def test_traced_graphs_have_the_calls():
    run_ranks(traced, 2)


def met_in_a_trace(group):
    """The ranks of a group meet for the first time in a call that is traced: what they say to each other is in no graph."""
    from torch.fx.experimental.proxy_tensor import make_fx

    x = numbers(4, 3, dist.get_rank(group))
    sparse, ranks = x.to_sparse(), list(range(dist.get_world_size(group)))
    for make in (
        lambda call: make_fx(call)(x),
        lambda call: torch.jit.trace(call, (x,), check_trace=False),
        lambda call: torch.export.export(Module(call), (x,), strict=False).module(),
    ):
        new = dist.new_group(ranks)
        graph = make(lambda t: fluxlike.all_reduce(t, new))  # noqa: B023 (it is called at once)
        assert torch.equal(graph(2 * x), fluxlike.all_reduce(2 * x, group))
    new = dist.new_group(ranks)
    with pytest.raises(ValueError, match="as it is no custom op"):
        torch.export.export(Module(lambda t: fluxlike.sparse_all_reduce(sparse, "sum", new)), (x,), strict=False)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning", "ignore:.*torch.jit.trace:FutureWarning")
def test_a_group_that_meets_in_a_trace():
    run_ranks(met_in_a_trace, 4, makes_groups=True)

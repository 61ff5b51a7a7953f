"""K of gemm_rs and N of ag_gemm of all ranks, as callers say them: calls are made as suits these, by whatever way they come.

A table has another transport for the sizes that are said than for those of the context, so `last_path` tells by which a call went.
"""

import pytest
import torch
import torch.distributed as dist
from cases import AGCase, RSCase, same
from ranks import device, run_fresh, run_ranks
from test_calls import kept_context

import fluxlike
from fluxlike import nn
from fluxlike.ops import choice
from fluxlike.runtime import world

#: Of the whole problem, by two ranks.
M, N, K = 24, 32, 48
BF16 = torch.bfloat16
OWN, SAID = "in_kernel", "copy_engine"


def mark(ctx, m, n, k):
    """A call of these sizes goes by the copy engine, and one of the context's own in the kernel."""
    ctx.tuned.table.clear()
    own = (m, n, ctx.k) if ctx.op == "gemm_rs" else (m, ctx.n, k)  # what a call is taken for that says nothing
    for sizes, transport in ((own, OWN), ((m, n, k), SAID)):
        problem = ctx.problem(*sizes)
        assert problem.shape not in ctx.tuned.table, "the context's own sizes are others"
        ctx.tuned.table[problem.shape] = choice.usual(problem, transport)
    ctx.forget_plans()


def took(ctx):
    return ctx.last_path.split("/")[0]


def contexts(group):
    """With a context, which has sizes of its own, and calls in turn that say others, and none."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    case, other = RSCase(M, N, [K // size] * size, BF16, 1), AGCase(M, [N // size] * size, K, BF16, 2)
    (x, w, _), (shard, v, _) = case.inputs(rank), other.inputs(rank)
    with (
        fluxlike.create_gemm_rs_context(M, N, 2 * K, group=group) as rs,
        fluxlike.create_ag_gemm_context(M, 2 * N, K, group=group) as ag,
    ):
        mark(rs, M, N, K)
        mark(ag, M, N, K)
        for k, n, expected in ((None, None, OWN), (K, N, SAID), (None, None, OWN), (2 * K, 2 * N, OWN), (K, N, SAID)):
            same(fluxlike.gemm_rs(x, w, rs, k=k), case.expected(rank), f"gemm_rs {k}")
            same(fluxlike.ag_gemm(shard, v, ag, n=n, m=M), other.whole()[1][rank], f"ag_gemm {n}")
            assert took(rs) == took(ag) == expected, (k, rs.last_path, ag.last_path)
        assert torch.equal(fluxlike.reference.gemm_rs(x, w, rs, k=K), fluxlike.gemm_rs(x, w, rs, k=K))
        assert torch.equal(fluxlike.reference.ag_gemm(shard, v, ag, n=N), fluxlike.ag_gemm(shard, v, ag, n=N))


def test_calls_on_a_context():
    run_ranks(contexts, 2)


def kept(group):
    """New kept contexts, made by calls of larger sizes."""
    size = dist.get_world_size(group)
    make = lambda *shape: torch.zeros(*shape, device=device(), dtype=BF16)  # noqa: E731
    ranks, products = dist.get_process_group_ranks(group), ("gemm_rs", "ag_gemm")
    for ctx in [ctx for ctx in world.current().cached.values() if ctx.op in products and ctx.group_ranks == ranks]:
        ctx.close()
    fluxlike.gemm_rs(make(M, 64), make(64, 64), group=group)
    fluxlike.ag_gemm(make(M // size, 64), make(64, 64), group=group)
    rs, ag = (kept_context(op, group, BF16) for op in ("gemm_rs", "ag_gemm"))
    assert rs.k == ag.n == 64 * size
    return rs, ag


def operands(group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(rank)
    draw = lambda *shape: torch.randint(-2, 3, shape, device=device()).to(BF16)  # noqa: E731
    return draw(M, K // size), draw(N, K // size), draw(M // size, K), draw(N // size, K)


def calls(group):
    """Without a context, plain, and by the custom op: recorded, and compiled; every one in forward and backward."""
    rs, ag = kept(group)
    x, w, shard, v = operands(group)
    mark(rs, M, N, K)
    mark(ag, M, N, K)
    for k, n, expected in ((None, None, OWN), (K, N, SAID)):
        ways = {
            "plain": (fluxlike.gemm_rs, fluxlike.ag_gemm),
            "compiled": tuple(torch.compile(f, backend="aot_eager", fullgraph=True) for f in (fluxlike.gemm_rs, fluxlike.ag_gemm)),
        }
        for way, (gemm_rs, ag_gemm) in ways.items():
            y, z = gemm_rs(x, w, group=group, k=k), ag_gemm(shard, v, group=group, n=n)
            assert took(rs) == took(ag) == expected, (way, k, rs.last_path, ag.last_path)
            assert torch.equal(y, fluxlike.reference.gemm_rs(x, w, group=group)), way
            assert torch.equal(z, fluxlike.reference.ag_gemm(shard, v, group=group)), way
    gradients(group, rs, ag)
    rs.close(), ag.close()  # the next calls make others, with the tables that they should have


def gradients(group, rs, ag):
    """The backward of each is the other, of N or K columns."""
    x, w, shard, v = operands(group)
    mark(ag, M, K, N)  # of gemm_rs: dy has N columns, and dx K
    mark(rs, M, K, N)
    for weights in (False, True):
        for said, expected in ((False, OWN), (True, SAID)):
            leaf, part = x.clone().requires_grad_(), shard.clone().requires_grad_()
            w.requires_grad_(weights)
            v.requires_grad_(weights)
            fluxlike.gemm_rs(leaf, w, group=group, k=K if said else None).sum().backward()
            assert took(ag) == expected, (weights, said, ag.last_path)
            fluxlike.ag_gemm(part, v, group=group, n=N if said else None).sum().backward()
            assert took(rs) == expected, (weights, said, rs.last_path)
            assert leaf.grad is not None and part.grad is not None


def test_calls_without_a_context():
    run_ranks(calls, 2)


def layers(group):
    """The layers say them by themselves."""
    rs, ag = kept(group)
    x, _, shard, _ = operands(group)
    up = nn.ColumnParallelLinear(K, (N // 2, N // 2), group=group, device=device(), dtype=BF16)
    down = nn.RowParallelLinear(K, N, group=group, device=device(), dtype=BF16)
    mark(ag, M, N, K)
    mark(rs, M, N, K)
    with torch.no_grad():
        up(shard)
        down(x)
    assert took(ag) == took(rs) == SAID, (ag.last_path, rs.last_path)
    rs.close(), ag.close()


def test_layers():
    run_ranks(layers, 2)


def watched(ctx):
    """The transports of its calls."""
    seen, start = [], ctx.start
    ctx.start = lambda call: seen.append(call.path.split("/")[0]) or start(call)
    return seen


def between_nodes(group):
    """A node has its part of them: each call inside it goes by that."""
    fluxlike.init(heap="shm", heap_bytes=16 << 20)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    nodes = len(world.current().control.nodes)
    case, other = RSCase(M, N, [K // size] * size, BF16, 1), AGCase(M, [N // size] * size, K, BF16, 2)
    (x, w, _), (shard, v, _) = case.inputs(rank), other.inputs(rank)
    with fluxlike.create_gemm_rs_context(M, N, 4 * K) as rs, fluxlike.create_ag_gemm_context(M, 4 * N, K) as ag:
        by = {ctx: watched(ctx.inner) for ctx in (rs, ag)}
        for together, rows in ((False, M // nodes), (True, M)):
            mark(rs.inner, rows, N, K // nodes)
            mark(ag.inner, rows, N // nodes, K)
            rs.together = ag.together = together
            for k, n, expected in ((None, None, OWN), (K, N, SAID)):
                same(fluxlike.gemm_rs(x, w, rs, k=k), case.expected(rank), f"gemm_rs {k}")
                same(fluxlike.ag_gemm(shard, v, ag, n=n, m=M), other.whole()[1][rank], f"ag_gemm {n}")
                calls = 1 if together else nodes
                assert by[rs] == by[ag] == [expected] * calls, (together, k, by)
                by[rs].clear(), by[ag].clear()
    fluxlike.finalize()


def test_between_nodes():
    for outcome in run_fresh(between_nodes, 4, {"FLUXLIKE_VIRTUAL_NODES": "2"}):
        assert outcome.ok, str(outcome)


def other_sizes(group):
    """Ranks that say different ones are told, as they might cut their chunks differently."""
    rank = dist.get_rank(group)
    x, w, shard, v = operands(group)
    for op, words in (("gemm_rs", (f"K={K}", f"K={2 * K}")), ("ag_gemm", (f"N={N}", f"N={2 * N}"))):
        with (
            fluxlike.create_gemm_rs_context(M, N, group=group, schedule=OWN) as rs,
            fluxlike.create_ag_gemm_context(M, N, K, group=group, schedule=OWN) as ag,
        ):
            with pytest.raises(ValueError, match="the same sizes") as error:
                if op == "gemm_rs":
                    fluxlike.gemm_rs(x, w, rs, k=K << rank)
                else:
                    fluxlike.ag_gemm(shard, v, ag, n=N << rank)
                rs.check(), ag.check()  # who comes first has made its call on a GPU, and is told here
            assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.alone
def test_ranks_that_say_different_sizes():
    run_ranks(other_sizes, 2)

"""Gradients of the operations: what they are, which there are, and what autograd and autocast see of calls."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import same
from faults import works
from ranks import device, ints, rows_slice, run_ranks
from torch.utils.checkpoint import checkpoint

import fluxlike
from fluxlike.ops import ag_gemm as ag
from fluxlike.ops import gemm_rs as rs
from fluxlike.ops import library
from fluxlike.runtime import world


def numbers(shape, seed, dtype=torch.float32):
    """Whole numbers whose products and sums in these tests are exact in float32."""
    return ints(shape, dtype, seed, -2, 2, 1.0).to(device())


def leaf(t):
    return t.clone().requires_grad_()


def rs_gradients(group, cases):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for seed, (m, n, k, wants) in enumerate(cases):
        mine = rows_slice(m, size, rank)
        xs = [numbers((m, k), seed * 100 + r) for r in range(size)]
        ws = [numbers((n, k), seed * 100 + 10 + r) for r in range(size)]
        b, dy = numbers((n,), seed * 100 + 20), numbers((m, n), seed * 100 + 21)
        whole = [leaf(t.double()) for t in (torch.cat(xs, 1), torch.cat(ws, 1), b)]
        F.linear(*whole).backward(dy.double())
        part = slice(rank * k, rank * k + k)
        expected = [whole[0].grad[:, part], whole[1].grad[:, part], whole[2].grad]
        inputs = [t.requires_grad_(w in wants) for t, w in zip((xs[rank].clone(), ws[rank].clone(), b.clone()), "xwb", strict=True)]
        y = fluxlike.gemm_rs(inputs[0], inputs[1], bias=inputs[2], group=group)
        assert y.requires_grad == bool(wants)
        assert not fluxlike.reference.gemm_rs(inputs[0], inputs[1], bias=inputs[2], group=group).requires_grad
        with torch.no_grad():
            same(y, F.linear(*whole).cpu()[mine], f"y, {m, n, k} {wants}")
            assert torch.equal(y, fluxlike.gemm_rs(inputs[0], inputs[1], bias=inputs[2], group=group))
        y.backward(dy[mine])
        for name, t, grad in zip("xwb", inputs, expected, strict=True):
            assert (t.grad is not None) == (name in wants)
            if t.grad is not None:
                same(t.grad, grad.cpu(), f"gradient of {name}, {m, n, k} {wants}")


def ag_gradients(group, cases):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for seed, (m, ns, k, wants, gathered) in enumerate(cases):
        mine = rows_slice(m, size, rank)
        x = numbers((m, k), seed * 100)
        ws = [[numbers((n, k), seed * 100 + 10 * i + r + 1) for i, n in enumerate(ns)] for r in range(size)]
        bs = [[numbers((n,), seed * 100 + 50 + 10 * i + r) for i, n in enumerate(ns)] for r in range(size)]
        dzs = [[numbers((m, n), seed * 100 + 80 + 5 * i + r) for i, n in enumerate(ns)] for r in range(size)]
        whole_x = leaf(x.double())
        whole = [[(leaf(w.double()), leaf(b.double())) for w, b in zip(ws[r], bs[r], strict=True)] for r in range(size)]
        for r in range(size):
            for (w, b), dz in zip(whole[r], dzs[r], strict=True):
                F.linear(whole_x, w, b).backward(dz.double())
        shard = x[mine].clone().requires_grad_("x" in wants)
        mine_w = [w.clone().requires_grad_("w" in wants) for w in ws[rank]]
        mine_b = [b.clone().requires_grad_("b" in wants) for b in bs[rank]]
        zs = fluxlike.ag_gemm(shard, mine_w, bias=mine_b, group=group, m=m, return_gathered=gathered)
        if gathered:
            zs, all_of_x = zs
            assert torch.equal(all_of_x, x) and not all_of_x.requires_grad
        assert not any(z.requires_grad for z in fluxlike.reference.ag_gemm(shard, mine_w, bias=mine_b, group=group, m=m))
        torch.autograd.backward(zs, dzs[rank])
        what = f"{m, ns, k} {wants} gathered={gathered}"
        assert (shard.grad is not None) == ("x" in wants), what
        if "x" in wants:
            same(shard.grad, whole_x.grad[mine].cpu(), f"gradient of x, {what}")
        for (w, b), t, u in zip(whole[rank], mine_w, mine_b, strict=True):
            assert (t.grad is not None) == ("w" in wants) and (u.grad is not None) == ("b" in wants), what
            if "w" in wants:
                same(t.grad, w.grad.cpu(), f"gradient of w, {what}")
            if "b" in wants:
                same(u.grad, b.grad.cpu(), f"gradient of b, {what}")


@pytest.mark.parametrize("world", (1, 2, 3, 4))
def test_gradients_of_gemm_rs(world):
    cases = [(24, 20, 16, "xwb"), (37, 17, 9, "xwb"), (3, 8, 5, "xwb"), (16, 8, 8, "x"), (10, 8, 8, "w"), (12, 8, 8, "b")]
    cases.append((0, 4, 4, "xw"))
    run_ranks(rs_gradients, world, cases=cases if world == 2 else cases[:3])


@pytest.mark.parametrize("world", (1, 2, 3, 4))
def test_gradients_of_ag_gemm(world):
    cases = [
        (24, [20], 16, "xwb", False), (37, [17, 6], 9, "xwb", False), (3, [8], 5, "xwb", True), (18, [4, 4, 8], 8, "xw", True),
        (16, [8], 8, "x", False), (10, [8], 8, "w", False), (12, [8], 8, "b", False), (0, [4], 4, "xw", False),
    ]  # fmt: skip
    run_ranks(ag_gradients, world, cases=cases if world == 2 else cases[:3])


def some_are_used(group):
    """Their weights have no gradient, as torch's; those of frozen weights want none; for what was gathered no zeros are made."""
    from torch.utils._python_dispatch import TorchDispatchMode

    made = []

    class Zeros(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            y = op(*args, **(kwargs or {}))
            if "zeros" in op.name():
                made.append(tuple(y.shape))
            return y

    rank, size = dist.get_rank(group), dist.get_world_size(group)
    x, u, v = numbers((3 * size, 8), 1), numbers((4, 8), 2), numbers((6, 8), 3)
    shard, *weights = (leaf(t) for t in (x[3 * rank : 3 * rank + 3], u, v))
    zs, _ = fluxlike.ag_gemm(shard, weights, group=group, return_gathered=True)
    with Zeros():
        zs[1].sum().backward()
    assert (3 * size, 8) not in made and made.count((3 * size, 4)) == 1, made
    whole, right = leaf(x.double()), leaf(v.double())
    (whole @ right.T).sum().backward()
    same(shard.grad, (size * whole.grad).cpu()[3 * rank : 3 * rank + 3], "x")
    same(weights[1].grad, right.grad.cpu(), "of the one that is used")
    assert weights[0].grad is None
    made.clear()
    z = fluxlike.ag_gemm(shard.detach(), weights, group=group)[1]
    with Zeros():
        z.sum().backward()
    assert not made, "nobody reads them where the input wants no gradient"
    same(weights[1].grad, 2 * right.grad.cpu(), "of the one that is used, twice")
    frozen = [leaf(u), v.clone(), leaf(v)]
    for b, wants in ((None, [True, False, True]), ([None, leaf(numbers((6,), 4)), None], [True, True, True])):
        zs = fluxlike.ag_gemm(x[3 * rank : 3 * rank + 3], frozen, bias=b, group=group)
        assert [z.requires_grad for z in zs] == wants
    torch.autograd.backward([zs[0].sum(), zs[1].sum()])
    assert torch.equal(b[1].grad, torch.full((6,), 3.0 * size).to(b[1])) and frozen[2].grad is None
    same(frozen[0].grad, x.double().cpu().sum(0).expand(4, 8), "beside a frozen one")


@pytest.mark.parametrize("world", (1, 2))
def test_results_that_nobody_uses(world):
    run_ranks(some_are_used, world)


def hooked(group):
    """A hook of a weight whose result nobody uses: as those of weights that an operator of torch's has together."""
    x, seen = numbers((2, 8), 1), []
    ours, theirs = ([leaf(numbers((4, 8), seed)) for seed in (2, 3)] for _ in range(2))
    for weights in (ours, theirs):
        weights[1].register_hook(seen.append)
    fluxlike.ag_gemm(x, ours, group=group)[0].sum().backward()
    (x @ torch._foreach_mul(theirs, 1.0)[0].T).sum().backward()
    assert seen == [None, None] and ours[1].grad is theirs[1].grad is None
    assert ours[0].grad is not None and theirs[0].grad is not None


def test_hooks_of_weights_that_nobody_uses():
    run_ranks(hooked, 2)


def on_some_ranks(group, says_k):
    """x wants a gradient on rank 0 only, so the others gather for their weights alone: the calls are alike for all that."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    limit, ag.BESIDE_FROM = ag.BESIDE_FROM, 1  # what is gathered beside another call goes by another transport than this
    try:
        for m, n, k, dtype in ((8, 8, 8, torch.float32), (37, 24, 40, torch.bfloat16), (256, 64, 128, torch.float32)):
            mine, dy = rows_slice(m, size, rank), numbers((m, n), 7, dtype)
            x, w = numbers((m, k), 1 + rank, dtype).requires_grad_(rank == 0), leaf(numbers((n, k), 5 + rank, dtype))
            fluxlike.gemm_rs(x, w, group=group, k=size * k if says_k else None).backward(dy[mine])
            assert (x.grad is not None) == (rank == 0)
            assert x.grad is None or torch.equal(x.grad, (dy.double() @ w.double()).to(dtype))
            assert torch.equal(w.grad, dy.T @ x)
    finally:
        ag.BESIDE_FROM = limit


@pytest.mark.parametrize("says_k", (False, True))
def test_an_input_that_wants_a_gradient_on_some_ranks(says_k):
    run_ranks(on_some_ranks, 3, says_k=says_k)


def twice_of_a_bias(group):
    """Nothing is kept for a bias alone, so two losses may go through it, one behind the other."""
    size = dist.get_world_size(group)
    x, w = numbers((2 * size, 8), 1), numbers((4, 8), 2)
    for op, rows in ((fluxlike.gemm_rs, 2 * size), (fluxlike.gemm_ar, 2 * size), (fluxlike.ag_gemm, 2 * size * size)):
        b = leaf(numbers((4,), 3))
        y = op(x, w, bias=b, group=group)
        for _ in range(2):
            y.sum().backward()
        assert torch.equal(b.grad, torch.full_like(b, 2.0 * rows)), op.__name__


def test_backwards_of_a_bias_alone():
    run_ranks(twice_of_a_bias, 2)


def second_derivatives(group):
    """They are refused, whatever the gradient is of; first ones that could have had them are right, and so is the rest."""
    size = dist.get_world_size(group)
    x, w, p = (leaf(numbers(shape, seed)) for shape, seed in (((4 * size, 8), 1), ((8, 8), 2), ((1,), 3)))
    calls = {
        "gemm_rs": lambda: fluxlike.gemm_rs(x, w, group=group),
        "gemm_ar": lambda: fluxlike.gemm_ar(x, w, group=group),
        "ag_gemm": lambda: fluxlike.ag_gemm(x, w, group=group),
        "ag_gemm of two": lambda: torch.cat(fluxlike.ag_gemm(x, [w, w[:3]], group=group), 1),
        "ag_gemm that keeps": lambda: fluxlike.ag_gemm(x, w, group=group, return_gathered=True)[0],
    }
    for name, call in calls.items():
        for wanted in ([x, w], [x], [w]):
            for times in (1, 2):  # of a gradient that depends on nothing, and of one that depends on the result
                firsts = torch.autograd.grad(call().pow(times).sum(), wanted)
                kept = torch.autograd.grad(call().pow(times).sum(), wanted, create_graph=True)
                assert all(torch.equal(a, b) for a, b in zip(firsts, kept, strict=True)), name
                for grad in kept:
                    with pytest.raises(RuntimeError, match=f"{name[:7]} has no second derivative.*create_graph"):
                        grad.sum().backward(retain_graph=True)
        for of, wanted in ((x, w), (w, x), (x, x), (w, w)):  # also where one gradient is asked for, which others lead around
            (grad,) = torch.autograd.grad(call().square().sum(), of, create_graph=True)
            with pytest.raises(RuntimeError, match=f"{name[:7]} has no second derivative.*create_graph"):
                torch.autograd.grad(grad.sum() + wanted.sum(), wanted)
        (grad,) = torch.autograd.grad(checkpoint(call, use_reentrant=False).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="has no second derivative"):
            grad.sum().backward()
        first = torch.autograd.grad(call().sum(), [x])[0]
        _, of_p = torch.autograd.grad((call() * p).sum(), [x, p], create_graph=True)
        of_p.backward()  # the first derivative of the call
        assert torch.equal(x.grad, first), name
        x.grad = None


def test_there_are_no_second_derivatives():
    run_ranks(second_derivatives, 2)


def beside_copies(group):
    """Shards that copy engines carry are on their way while the gemm_rs of the backward runs."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    x, dz, w = numbers((37, 16), 1), numbers((37, 24), 2 + rank), numbers((24, 16), 9)
    mine = rows_slice(37, size, rank)
    assert torch.equal(ag.gather_beside(lambda: None, x[rows_slice(34, size, rank)], group=group, m=34), x[:34])
    ctx = world.current().cached[ag.AGGemmContext, library.name_of(group), torch.float32]
    before, seen = dict(ctx.stats), []
    real = rs.call

    def spying(*args, **kwargs):
        seen.append(ctx.stats["launches"])
        return real(*args, **kwargs)

    limit, ag.BESIDE_FROM = ag.BESIDE_FROM, 1
    rs.call = spying
    try:
        dx, gathered = library.gemm_rs_gather_op(dz, w.T, x[mine], 37, library.name_of(group), None)
    finally:
        rs.call = real
        ag.BESIDE_FROM = limit
    same(dx, sum(numbers((37, 24), 2 + r).double() @ w.double() for r in range(size))[mine].cpu(), "gemm_rs beside a gather")
    assert torch.equal(gathered, x)
    assert ctx.last_path.startswith("copy_engine") and ctx.stats["copies"] > before["copies"]
    assert seen == [before["launches"] + 1], "the gather began before gemm_rs"
    assert ctx.stats["launches"] == before["launches"] + 2, "and ended after it"


@pytest.mark.parametrize("world", (2, 3))
def test_the_gather_of_a_backward_is_beside_its_product(world):
    run_ranks(beside_copies, world)


def disagreeing(group):
    """One rank freezes its weight, so its backward is another call than that of the others: all are told."""
    from fluxlike.runtime.errors import CallMismatch

    rank = dist.get_rank(group)
    x, w = torch.randn(4, 16, device=device()), torch.randn(8, 16, device=device())
    z = fluxlike.ag_gemm(leaf(x), w.requires_grad_(rank > 0), group=group)
    control = world.current().cached[ag.AGGemmContext, library.name_of(group), torch.float32].control
    with pytest.raises(CallMismatch, match=r"ag_gemm.*gemm_rs|gemm_rs.*ag_gemm"):
        z.sum().backward()
        for ctx in world.current().contexts:  # on a GPU the call is only queued by now
            if ctx.control is control and ctx.in_step():  # not one that failed in a test before, nor of other ranks
                ctx.check()
    works(group)
    w.requires_grad_()
    w.grad = None
    fluxlike.ag_gemm(leaf(x), w, group=group).sum().backward()
    assert w.grad is not None


def test_ranks_that_want_other_gradients():
    run_ranks(disagreeing, 3)


def met_in_a_backward(group):
    """The ranks of a group meet for the first time in calls that are compiled with their backward: not while that is traced."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    size, rank = dist.get_world_size(group), dist.get_rank(group)
    x, w, mode = numbers((4 * size, 8), rank), numbers((6, 8), size + rank), FakeTensorMode()
    for eager, op in (
        (fluxlike.gemm_rs, lambda x, w, name: torch.ops.fluxlike.gemm_rs(x, w, None, name, None)),
        (fluxlike.ag_gemm, lambda x, w, name: torch.ops.fluxlike.ag_gemm(x, [w], [], library.EVEN, False, name, None)[0]),
    ):
        new = dist.new_group(list(range(size)))
        fakes = [leaf(mode.from_tensor(t)) for t in (x, w)]
        with mode:
            op(*fakes, new.group_name).sum().backward()
            eager(*fakes, group=new).sum().backward()
        assert [t.grad.shape for t in fakes] == [x.shape, w.shape]
        assert new.group_name not in world.current()._controls, eager
        torch._dynamo.reset()
        grads = []
        for call in (torch.compile(eager, fullgraph=True, backend="aot_eager"), eager):
            leaves = leaf(x), leaf(w)
            call(*leaves, group=new).square().sum().backward()
            grads.append([t.grad for t in leaves])
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True)), eager


def test_a_group_that_meets_in_a_backward():
    run_ranks(met_in_a_backward, 4, makes_groups=True)


def of_reference():
    return [getattr(fluxlike.reference, name) for name in ("gemm_rs", "ag_gemm", "gemm_ar")]


def autocast_on(group):
    """Operands of one dtype are multiplied in that, also where autocast would take another, and so are those of a backward."""
    size = dist.get_world_size(group)
    ops = [fluxlike.gemm_rs, fluxlike.ag_gemm, fluxlike.gemm_ar]
    for dtype in (torch.float32, torch.float16):
        x, w, v = (torch.randn(*s, device=device()).to(dtype) for s in ((4 * size, 8), (6, 8), (3, 8)))
        for op in [*ops, *of_reference()]:
            expected = op(x, w, group=group)
            with torch.autocast(device().type, torch.bfloat16):
                assert torch.equal(op(x, w, group=group), expected), op
        for op, weights in [*((op, w) for op in ops), (fluxlike.ag_gemm, [w, v])]:
            grads = []
            for on in (False, True):
                leaves = [leaf(x), leaf(w), leaf(v)]
                with torch.autocast(device().type, torch.bfloat16, enabled=on):
                    y = op(leaves[0], leaves[1] if weights is w else leaves[1:], group=group)
                    torch.autograd.backward(y, [t.detach() for t in y] if isinstance(y, list) else y.detach())
                grads.append([t.grad for t in leaves if t.grad is not None])
            assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True)), f"{op}, {dtype}"


def test_autocast_changes_nothing():
    run_ranks(autocast_on, 2)


def overwritten(group):
    """Backward after a call has written to what autograd has saved is torch's error, not a wrong gradient."""
    size = dist.get_world_size(group)
    x, w = torch.randn(4 * size, 8, device=device()), torch.randn(6, 8, device=device())
    writes = [
        lambda y: fluxlike.all_reduce_(y, group),
        lambda y: fluxlike.all_reduce_([torch.zeros(3, device=device()), y], group),
        lambda y: fluxlike.gemm_rs(x, w, out=y, group=group),
        lambda y: fluxlike.gemm_ar(x.view(4, -1)[:, :8].contiguous(), w, out=y, group=group),
        lambda y: fluxlike.ag_gemm(x[:4].narrow(0, 0, 4 // size), w, out=y, group=group),
        lambda y: fluxlike.ag_gemm(x[: 4 // size], [w, w], out=[torch.zeros_like(y), y], group=group),
    ]
    for write in writes:
        a = leaf(torch.randn(4, 6, device=device()))
        y = a.exp()
        loss = y.sum()
        write(y.detach())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    for call in (fluxlike.gemm_rs, fluxlike.ag_gemm):  # whose weight is not kept where x has no gradient
        weight = leaf(w)
        y = call(x, weight, group=group)
        with torch.no_grad():
            weight.mul_(0.5)
        y.sum().backward()
        assert weight.grad.abs().sum() > 0
    entries = torch.tensor([[0, 2], [3, 1]], device=device()), torch.ones(2, device=device())
    table = torch.sparse_coo_tensor(*entries, (5, 4), check_invariants=False)
    loss = torch.sparse.mm(table, leaf(torch.randn(4, 3, device=device()))).sum()
    fluxlike.sparse_all_reduce_(table, group=group)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_autograd_sees_what_calls_write():
    run_ranks(overwritten, 2)

"""torch.ops.fluxlike: schemas, fakes, and what compilers and transforms may do with calls that other ranks wait for."""

import contextlib
import importlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import device, run_ranks
from test_gradients import leaf, numbers

import fluxlike
from fluxlike.ops import library
from fluxlike.runtime import world

# schemas and compilers


def opchecks(group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    name = library.name_of(group)
    make = torch.Generator().manual_seed(rank)

    def new(*shape):
        return torch.randn(*shape, generator=make).to(device()).requires_grad_()

    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    cases = [
        (library.gemm_rs_op, (new(4 * size, 8), new(6, 8), new(6), name, None)),
        (library.ag_gemm_op, (new(4, 8), [new(6, 8), new(2, 8)], [new(6), new(2)], library.EVEN, False, name, 8 * size)),
        (library.ag_gemm_op, (new(2 - rank, 8), [new(6, 8)], [], 3, True, name, None)),
    ]
    for op, args in cases:
        result = torch.library.opcheck(op, args, test_utils=checks)
        assert set(result.values()) == {"SUCCESS"}, result
    plain = [t.detach() for t in (new(4 * size, 8), new(6, 8), new(4, 3))]
    torch.library.opcheck(library.gemm_rs_gather_op, (*plain, 4 * size, name, None), test_utils=checks)


def test_opcheck():
    run_ranks(opchecks, 2)


def block(x, up, down, group, m):
    h = fluxlike.ag_gemm(x, up, group=group)
    fluxlike.gemm_rs(h, down, group=group)  # nobody uses these, and every rank takes part in them
    fluxlike.gemm_ar(h, down, group=group)
    return fluxlike.gemm_rs(h, down, group=group) + fluxlike.gemm_rs(h, down, group=group)


def turned(x, up, down, group, m):
    """Inductor leaves what is made contiguous here as it was computed: in columns."""
    rows = (x.T.contiguous() * 2).relu().T.contiguous()
    h = fluxlike.ag_gemm(rows, up, group=group, m=m)
    y = fluxlike.gemm_rs((up.sin() @ h.T.new_ones(16, h.shape[0])).relu().T.contiguous() + h, down, group=group)
    return (y.T * 3).relu().T


def activated(x, up, down, group, m):
    return fluxlike.gemm_rs(F.gelu(fluxlike.ag_gemm(x, up, group=group, m=m)), down, group=group)


def total_calls():
    return sum(context.stats["calls"] for context in world.current().cached.values())


def compiled(group, backend, function, sizes, dynamic):
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1  # the ranks may have no children
    # Caches of graphs would not see a change of the ops' effects.
    torch._inductor.config.fx_graph_cache = torch._functorch.config.enable_autograd_cache = False
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    torch._dynamo.reset()
    function = {"block": block, "activated": activated, "turned": turned}[function]
    fast = torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)
    up, down = (leaf(torch.randn(24, 16, generator=torch.Generator().manual_seed(rank + i)).to(device())) for i in (0, 50))
    down = leaf(down.detach().T.contiguous())

    def step(run, x, m):
        leaves = [leaf(x), up, down]
        for t in leaves:
            t.grad = None
        before = total_calls()
        y = run(*leaves, group, m)
        forward = total_calls() - before
        y.square().sum().backward()
        with torch.no_grad():
            z = run(*leaves, group, m)
        return [y.detach(), z, *[t.grad for t in leaves]], (forward, total_calls() - before)

    for m in sizes:
        x = torch.randn(m, 16, generator=torch.Generator().manual_seed(m)).to(device()).chunk(size)[rank]
        step(function, x, m)  # the contexts are made
        expected, calls = step(function, x, m)
        step(fast, x, m)
        got, compiled_calls = step(fast, x, m)
        assert calls == compiled_calls, f"eager made {calls} calls, forward and in all, compiled {compiled_calls}"
        for a, b in zip(got, expected, strict=True):
            # of the largest, as sums of large terms may be small: torch's own gelu is off by 1e-6 on some processors
            torch.testing.assert_close(a, b, rtol=0, atol=2e-6 * b.abs().max().item())
    return calls


def compiled_around(group):
    """A call with a context or `out` of the caller's is none of a graph: that ends before it, and says why where it may not."""
    torch._dynamo.reset()
    size = dist.get_world_size(group)
    x, w = numbers((2 * size, 8), 1), numbers((8, 8), 2)
    with contextlib.ExitStack() as made:
        rs = made.enter_context(fluxlike.create_gemm_rs_context(2 * size, 8, dtype=x.dtype, group=group))
        ag = made.enter_context(fluxlike.create_ag_gemm_context(2 * size, 8, 8, dtype=x.dtype, group=group))
        ar = made.enter_context(fluxlike.create_gemm_ar_context(2 * size, 8, dtype=x.dtype, group=group))
        z, y = torch.empty(2 * size, 8, device=device()), torch.empty(2, 8, device=device())
        calls = (
            lambda x, w: fluxlike.gemm_rs(x + 1, w, rs) + 1,
            lambda x, w: fluxlike.gemm_rs(x + 1, w, rs, out=y) + 1,
            lambda x, w: fluxlike.ag_gemm(x[:2] + 1, w, ag, return_gathered=True)[1] + 1,
            lambda x, w: fluxlike.ag_gemm(x[:2] + 1, w, group=group, out=z) + 1,
            lambda x, w: fluxlike.gemm_ar(x + 1, w, ar) + 1,
        )
        for call in calls:
            with pytest.raises(torch._dynamo.exc.Unsupported, match=r"ctx= and out= are for calls outside of torch\.compile"):
                torch.compile(call, backend="eager", fullgraph=True)(x, w)
            torch._dynamo.reset()
            fast = torch.compile(call, backend="eager")
            assert torch.equal(fast(x, w), call(x, w))
            with pytest.raises(ValueError, match="is given to a call that autograd records"):
                fast(x, leaf(w))


def test_compiled_around_a_context():
    run_ranks(compiled_around, 2)


@pytest.mark.slow
def test_compiled_makes_every_call():
    calls = run_ranks(compiled, 2, backend="aot_eager", function="block", sizes=[8], dynamic=None)
    assert calls == [(5, 14)] * 2


@pytest.mark.slow
def test_compiled_by_inductor_makes_every_call():
    """Also of what nobody uses, and of two that are the same."""
    calls = run_ranks(compiled, 2, backend="inductor", function="block", sizes=[8], dynamic=None)
    assert calls == [(5, 14)] * 2


@pytest.mark.slow
def test_rows_that_inductor_lays_out():
    run_ranks(compiled, 2, backend="inductor", function="turned", sizes=[8], dynamic=None)


@pytest.mark.slow
def test_compiled_for_any_number_of_rows():
    run_ranks(compiled, 2, backend="aot_eager", function="activated", sizes=[8, 11, 20], dynamic=True)


@pytest.mark.slow
def test_compiled_with_what_inductor_fuses():
    run_ranks(compiled, 2, backend="inductor", function="activated", sizes=[8, 16], dynamic=True)


def test_every_op_keeps_its_place():
    """An op that a compiler may drop or move would leave the other ranks waiting."""
    from torch._higher_order_ops.effects import _EffectType, _get_effect

    importlib.import_module("fluxlike.ops.library_collectives")  # it is loaded when the first of its calls is compiled
    names = [name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("fluxlike::")]
    assert {"gemm_rs", "ag_gemm", "gemm_rs_gather", "gemm_ar", "all_reduce", "broadcast"} <= set(names)
    kept = {name: _get_effect(getattr(torch.ops.fluxlike, name).default) for name in names}
    assert set(kept.values()) == {_EffectType.ORDERED}, kept


# transforms of torch.func


def transformed(group):
    """What would lose a derivative, or cannot be read, is an error that says so."""
    from torch.autograd import forward_ad
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    size = dist.get_world_size(group)
    x, w = torch.randn(4 * size, 8, device=device()), torch.randn(6, 8, device=device())
    mesh, learned = DeviceMesh.from_group(group, device().type), leaf(w)
    for op in (fluxlike.gemm_rs, fluxlike.ag_gemm, fluxlike.gemm_ar):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, x)
            for operands in ((dual, w), (x, forward_ad.make_dual(w, w)), (dual, learned)):
                with pytest.raises(ValueError, match=r"forward-mode.*would be lost"):
                    op(*operands, group=group)
            op(x, w, group=group)
            op(x, learned, group=group)
        with pytest.raises(ValueError, match=r"no memory of its own.*torch\.func"):
            torch.func.vmap(lambda t, op=op: op(t, w, group=group))(x[None])
        with pytest.raises(ValueError, match=r"no memory of its own.*torch\.func|forward-mode"):
            torch.func.jvp(lambda t, op=op: op(t, w, group=group), (x,), (x,))
        with pytest.raises(ValueError, match="forward-mode"):  # as with the weight of a layer
            torch.func.jvp(lambda t, op=op, learned=learned: op(t, learned, group=group), (x,), (x,))
        for transform in (torch.func.grad, torch.func.jacrev):
            with pytest.raises(ValueError, match=r"inside of a transform of torch\.func.*use loss\.backward"):
                transform(lambda t, op=op: op(t, w, group=group).sum())(x)
        if op is fluxlike.gemm_rs:
            wants = leaf(x)
            y = op(wants, w, group=group)
            with pytest.raises(ValueError, match=r"gemm_rs: several gradients at once \(is_grads_batched=True"):
                torch.autograd.grad(y, wants, y.new_ones(3, *y.shape), is_grads_batched=True)
        closed_over(x, lambda op=op: op(x, w, group=group))
        spread = distribute_tensor(w, mesh, [Replicate()])
        for operands in ((x, leaf(spread)), (distribute_tensor(x, mesh, [Replicate()]), leaf(w))):
            with pytest.raises(ValueError, match=r"is a DTensor.*to_local"):
                op(*operands, group=group)


def closed_over(x, call):
    """Calls inside of transforms of torch.func that have nothing to do with their operands."""

    def inside(t):
        got.append(call())
        return t.sum()

    for _ in range(2):  # the second is known, and not looked at
        for transform in (torch.func.grad, torch.func.functionalize):
            got = []
            with pytest.raises(ValueError, match=r"called inside a transform of torch\.func \(as grad, jvp or functionalize\)"):
                transform(inside)(x)
        expected = call()
        torch.func.vmap(inside)(x)
        for found, right in zip(*(y if isinstance(y, list) else [y] for y in (got[0], expected)), strict=True):
            assert torch.equal(found.to_dense(), right.to_dense())


def transformed_reductions(group):
    x = torch.arange(24.0, device=device()).view(6, 4) + dist.get_rank(group)
    closed_over(x, lambda: fluxlike.all_reduce(x, group=group))
    closed_over(x, lambda: fluxlike.all_reduce([x, x[:3]], group=group))
    table = torch.sparse_coo_tensor([[1, 1, 3]], [1.0, 2.0, 3.0], (5,), check_invariants=False).to(device())
    closed_over(x, lambda: fluxlike.sparse_all_reduce(table, group=group))


def test_reductions_inside_of_transforms():
    run_ranks(transformed_reductions, 2)


def test_transforms_and_tensors_that_calls_cannot_see_through():
    run_ranks(transformed, 2)

"""fluxlike.nn: what would give wrong numbers without a word: weights changed in between, another rank's layer, a forward lost."""

import io
import types

import pytest
import torch
import torch.distributed as dist
from ranks import device, run_ranks
from test_nn import HIDDEN, INNER, close, model, on_device, parallel
from torch import nn
from torch._dynamo import compiled_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import fluxlike

CHANGED = "a weight was changed in place between a forward and its backward"


def styled(group, **how):
    """A block of styles, this rank's part of its input, and that of a row-parallel layer."""
    mesh = DeviceMesh.from_group(group, device().type)
    size, rank = mesh.size(), dist.get_rank(group)
    x = torch.randn(2, 4 * size, HIDDEN, generator=torch.Generator().manual_seed(5), device="cpu").to(device())
    return parallel(model(), mesh, **how), x.chunk(size, 1)[rank].clone(), torch.randn(2, 4 * size, INNER // size)


def refused(y):
    """The backward of y is, on all ranks, before any of them sends."""
    with pytest.raises(RuntimeError, match=CHANGED):
        y.sum().backward()


@on_device
def made_of_plain_ones(group):
    plain = nn.Linear(8, 8)
    for kind in (fluxlike.nn.ColumnParallelLinear, fluxlike.nn.RowParallelLinear):
        ours = kind.from_linear(plain, group=group)
        memory = [{p.untyped_storage().data_ptr() for p in layer.parameters()} for layer in (plain, ours)]
        assert not memory[0] & memory[1], f"what changes a {kind.__name__} changes the layer that it was made of"


def test_a_layer_shares_nothing_with_the_plain_one():
    run_ranks(made_of_plain_ones, 2)


@on_device
def changed_weights(group, shared):
    """By the changes that torch counts, of layers of all styles, also where the weight itself is frozen."""
    ours, shard, narrow = styled(group, shared=shared)
    shard.requires_grad_(), narrow.requires_grad_()
    state = {name: value.clone() for name, value in ours.state_dict().items()}
    changes = (
        lambda layer: layer.weight.mul_(2),
        lambda layer: layer.weight.copy_(layer.weight + 1),
        lambda layer: ours.load_state_dict(state),
        lambda layer: torch.optim.SGD([layer.weight], 0.1, foreach=False).step(),
    )
    for layer, of, x in ((ours.gate, ours, shard), (ours.up, ours, shard), (ours.down, ours.down, narrow)):
        for change in changes:
            of(x).sum().backward()  # so that the optimizer has a gradient
            y = of(x)
            with torch.no_grad():
                change(layer)
            refused(y)
    ours.requires_grad_(False)
    y = ours(shard)
    ours.up.weight.mul_(2)
    refused(y)


@pytest.mark.parametrize("shared", (False, True))
def test_weights_that_are_changed_before_a_backward(shared):
    run_ranks(changed_weights, 2, shared=shared)


@on_device
def changed_where_it_does_no_harm(group):
    """What a backward does not read: a bias, the weight of a product whose input wants no gradient, one that was cast."""
    ours, shard, narrow = styled(group)
    y = ours.gate(shard)
    with torch.no_grad():
        ours.gate.weight.mul_(2)
    y.sum().backward()
    y = ours.down(narrow.requires_grad_())
    expected = torch.autograd.grad(y.sum(), narrow, retain_graph=True)[0]
    with torch.no_grad():
        ours.down.bias.mul_(2)
    close(torch.autograd.grad(y.sum(), narrow)[0], expected, "behind a change of the bias")
    with torch.autocast(device().type, torch.bfloat16):
        y = ours.down(narrow)
    expected = torch.autograd.grad(y.sum(), narrow, retain_graph=True)[0]
    with torch.no_grad():
        ours.down.weight.mul_(2)
    assert torch.equal(torch.autograd.grad(y.sum(), narrow)[0], expected)


def test_what_a_backward_does_not_read_may_be_changed():
    run_ranks(changed_where_it_does_no_harm, 2)


@on_device
def left_over(group):
    """What a layer has left for its partner is not taken behind a change of the weights, even where nothing drops it."""
    ours, shard, _ = styled(group, shared=True)
    with torch.no_grad():
        ours.gate(shard)
        ours.up.weight.mul_(2)
        with pytest.raises(ValueError, match="up was called with weights that were changed since gate was called; layers"):
            ours.up(shard)
        z = ours.up(shard)  # the refusal has dropped it
        ours.gate(shard)
        close(z, fluxlike.ag_gemm(shard.flatten(0, 1), ours.up.weight.to_local(), bias=ours.up.bias.to_local(), group=group)
              .unflatten(0, (dist.get_world_size(group), *shard.shape[:2])).movedim(0, 1).flatten(1, 2), "up")  # fmt: skip


def test_what_waits_is_not_taken_behind_a_change_of_weights():
    run_ranks(left_over, 2)


@on_device
def put_in_place(group):
    """Nor where other weights stand in the place of those, as by torch.func, or where they, or the input, want gradients by now."""
    ours, shard, _ = styled(group, shared=True)
    for parameter in ours.parameters():
        parameter.requires_grad_(False)
    zeros = {name: torch.zeros_like(p) for name, p in ours.up.named_parameters()}
    right, before = (ours.gate(shard), ours.up(shard))[1], ours.up.weight

    def by_others():
        return torch.func.functional_call(ours.up, zeros, (shard,))

    def replaced():
        ours.up.weight = nn.Parameter(zeros["weight"])
        return ours.up(shard)

    def wanting():
        ours.up.weight.requires_grad_()
        return ours.up(shard)

    for change in (by_others, replaced, wanting):
        ours.gate(shard)
        with pytest.raises(ValueError, match="up was called with weights that were changed since gate was called"):
            change()
        ours.up.weight = before
        before.requires_grad_(False)
    ours.gate(shard)
    with pytest.raises(ValueError, match="up was called with a tensor that was changed since gate was called"):
        ours.up(shard.requires_grad_())
    shard.requires_grad_(False)
    assert torch.equal((ours.gate(shard), ours.up(shard))[1], right)
    assert not ours.gate.shared.states and ours.gate.shared.input is None


def test_what_waits_is_not_taken_by_other_weights():
    run_ranks(put_in_place, 2)


@on_device
def of_another_rank(group):
    """A layer that another rank has pickled has that rank's part of the weights."""
    rank, linear = dist.get_rank(group), nn.Linear(HIDDEN, INNER)
    ours, _, _ = styled(group)
    for layer in (
        fluxlike.nn.ColumnParallelLinear.from_linear(linear, group=group),
        fluxlike.nn.RowParallelLinear.from_linear(linear, group=group),
        ours.gate,
        ours.down,
    ):
        file = io.BytesIO()
        torch.save(layer, file)
        files = [None] * dist.get_world_size(group)
        dist.all_gather_object(files, file.getvalue(), group)
        assert type(torch.load(io.BytesIO(files[rank]), weights_only=False)) is type(layer)
        other = (rank + 1) % len(files)
        with pytest.raises(ValueError, match=f"rank {other} of its group has pickled it, .* and this is rank {rank}; let each"):
            torch.load(io.BytesIO(files[other]), weights_only=False)


def test_a_layer_that_another_rank_has_pickled():
    run_ranks(of_another_rank, 2)


class Adapted(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


class Named(nn.Linear):
    pass


class Called(nn.Linear):
    def __call__(self, x):
        return super().__call__(x) + 1


def with_more():
    """Layers with more than their weights, and what that is."""
    kinds = "forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"
    layers = [nn.Linear(4, 4) for _ in range(6)]
    for linear, kind in zip(layers, kinds, strict=False):
        getattr(linear, f"register_{kind}")(lambda *_: None)
    layers[4].weight.register_hook(lambda grad: grad)
    layers[5].bias.register_post_accumulate_grad_hook(lambda p: None)
    yield from (("hooks", linear) for linear in layers)
    yield "parametrizations", torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))


@on_device
def own_forward(group):
    """What a layer of another forward does beside its product is not dropped without a word."""
    patched = nn.Linear(4, 4)
    patched.forward = types.MethodType(Adapted.forward, patched)
    for made in (fluxlike.nn.ColumnParallelLinear, fluxlike.nn.RowParallelLinear):
        for linear, says in (
            (Adapted(4, 4), "a layer is a Adapted, it must be an nn.Linear with nn.Linear's own forward"),
            (Called(4, 4), "a layer is a Called, it must be an nn.Linear with nn.Linear's own forward"),
            (patched, "a layer is a Linear with a forward of its own, it must be"),
            (nn.LazyLinear(4), "a layer is a LazyLinear without weights; call it once before"),
        ):
            with pytest.raises(ValueError, match=says):
                made.from_linear(linear, group=group)
        for has, linear in with_more():
            with pytest.raises(ValueError, match=rf"a layer has {has} \(.*\), which the one made of it, of this rank's part,"):
                made.from_linear(linear, group=group)
        loaded = nn.LazyLinear(4)
        loaded.load_state_dict(nn.Linear(4, 4).state_dict())
        with pytest.raises(ValueError, match="a layer is a LazyLinear without weights; call it once before"):
            made.from_linear(loaded, group=group)
        loaded(torch.ones(1, 4))
        assert made.from_linear(loaded, group=group).tp_size == 2
        assert made.from_linear(Named(4, 4), group=group).tp_size == 2
    with pytest.raises(ValueError, match=r"fluxlike.nn.ColwiseParallel: a layer is a LazyLinear without weights; call it"):
        parallelize_module(nn.LazyLinear(4), DeviceMesh.from_group(group, device().type), fluxlike.nn.ColwiseParallel())


def test_a_linear_with_a_forward_of_its_own():
    run_ranks(own_forward, 2)


@on_device
def made_otherwise(group):
    """Layers whose weight or bias is made of other parameters are refused by the styles, and left as they are."""
    utils = torch.nn.utils
    makes = (
        utils.parametrizations.weight_norm,
        utils.weight_norm,
        utils.spectral_norm,
        lambda linear: prune.l1_unstructured(linear, "weight", 0.5),
        lambda linear: prune.l1_unstructured(linear, "bias", 0.5),
    )
    mesh = DeviceMesh.from_group(group, device().type)
    for make in makes:
        for style in (fluxlike.nn.ColwiseParallel(), fluxlike.nn.RowwiseParallel()):
            linear = make(nn.Linear(4, 4))
            before = type(linear), [type(p) for p in linear.parameters()]
            with pytest.raises(ValueError, match=r"of the module is no parameter of its own, as under .*; take that off before"):
                parallelize_module(linear, mesh, style)
            assert (type(linear), [type(p) for p in linear.parameters()]) == before
        both = nn.ModuleDict({"plain": nn.Linear(4, 4), "made": make(nn.Linear(4, 4))})
        with pytest.raises(ValueError, match=r"SharedGather: .* no parameter of its own"):
            parallelize_module(both, mesh, fluxlike.nn.SharedGather("plain", "made"))
        assert type(both["plain"]) is nn.Linear
    why = r"weight is \(.*(Shard|Replicate).*\), it must be .* as the style has made it; take off what makes it"
    for make in makes[:2]:  # behind the plan; torch's norm has another layout, which one goes by its version
        with pytest.raises(ValueError, match=why):
            make(parallelize_module(nn.Linear(4, 4), mesh, fluxlike.nn.RowwiseParallel()))(torch.ones(4, 2))


def test_a_linear_whose_weight_is_made_of_others():
    run_ranks(made_otherwise, 2)


@on_device
def changed_beside(group):
    """Seen behind an addition in place; nothing is raised in compiled autograd, checkpoints, and where hooks keep copies."""
    ours, shard, narrow = styled(group)
    narrow.requires_grad_(), shard.requires_grad_()
    y = ours.down(narrow)
    y += 1
    with torch.no_grad():
        ours.down.weight.mul_(2)
    refused(y)

    expected = torch.autograd.grad(ours(shard).sum(), shard)[0]
    y = ours(shard).sum()
    with compiled_autograd._enable(torch.compile(backend="eager")):
        close(torch.autograd.grad(y, shard)[0], expected, "compiled autograd")

    def write(layer, _):
        with torch.no_grad():
            layer.weight.mul_(1)  # counts as a change, and is done again where the forward is

    hook = ours.down.register_forward_pre_hook(write)
    for reentrant in (False, True):
        y = checkpoint(ours, shard, use_reentrant=reentrant)
        y.sum().backward()
        close(shard.grad, expected, f"a checkpoint, {reentrant=}")
        shard.grad = None
    hook.remove()
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda kept: kept):
        y = ours.down(narrow)
    expected = torch.autograd.grad(y.sum(), narrow, retain_graph=True)[0]
    write(ours.down, None)
    ours.down.weight.detach().mul_(2)
    close(torch.autograd.grad(y.sum(), narrow)[0], expected, "what hooks keep")


def test_changes_beside_other_things():
    run_ranks(changed_beside, 2)

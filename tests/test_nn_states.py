"""fluxlike.nn: states put into layers, copies on disk, the meta device, modes of dispatch."""

import copy
import io
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from ranks import device, run_ranks
from test_nn import HIDDEN, INNER, Sharded, close, model, on_device, parallel
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as torchs
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.flop_counter import FlopCounterMode

import fluxlike


def both(group):
    """The block of layers, and that of styles; x whole and this rank's part of it."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    mesh = DeviceMesh.from_group(group, device().type)
    x = torch.randn(2, 4 * size, HIDDEN, generator=torch.Generator().manual_seed(5), device="cpu").to(device())
    return [Sharded(model(), group, 1, False), parallel(model(), mesh, shared=True)], x, x.chunk(size, 1)[rank]


@on_device
def as_they_were(group):
    """What is frozen stays so; the weights are rank 0's, or each rank's own where torch is told that these are alike."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    mesh = DeviceMesh.from_group(group, device().type)
    whole = model().requires_grad_(False)
    for learns in (whole.gate.bias, whole.up.weight, whole.down.weight):
        learns.requires_grad_()
    wants = {name: p.requires_grad for name, p in whole.named_parameters()}
    ours = Sharded(whole, group, 1, False)
    assert [p.requires_grad for p in ours.gate_up.weights] == [False, True]
    assert [p.requires_grad for p in ours.gate_up.biases] == [True, False]
    assert ours.down.weight.requires_grad and not ours.down.bias.requires_grad
    assert {name: p.requires_grad for name, p in parallel(whole, mesh, shared=True).named_parameters()} == wants
    for style in (fluxlike.nn.ColwiseParallel, fluxlike.nn.RowwiseParallel):
        for source, value in ((0, 0), (None, rank)):
            linear = nn.Linear(size, size)
            for parameter in linear.parameters():
                nn.init.constant_(parameter, rank)
            parallelize_module(linear, mesh, style(), src_data_rank=source)
            assert all(p.to_local().eq(value).all() for p in linear.parameters()), (style.__name__, source)


def test_layers_take_weights_as_they_are():
    run_ranks(as_they_were, 2)


@on_device
def replaced_parameters(group):
    """What is put in the place of a style's DTensor is refused: whole weights, of which each rank would make a sum's every part."""
    mesh = DeviceMesh.from_group(group, device().type)
    _, _, shard = both(group)
    ours = parallel(model(), mesh)
    ours.load_state_dict(model().state_dict(), assign=True)
    with pytest.raises(ValueError, match=r"weight is a plain tensor.*set_model_state_dict"):
        ours(shard)
    for name, layer, x in (("Colwise", "gate", shard), ("Rowwise", "down", torch.randn(2, 4, INNER // mesh.size()))):
        ours = parallel(model(), mesh)
        tied = DTensor.from_local(getattr(model(), layer).weight.detach(), mesh, [Replicate()])
        getattr(ours, layer).weight = nn.Parameter(tied)
        with pytest.raises(ValueError, match=rf"{name}Parallel: weight is \(Replicate\(\),\)"):
            getattr(ours, layer)(x)


def test_parameters_in_another_layout_are_refused():
    run_ranks(replaced_parameters, 2)


@on_device
def on_other_ranks(group):
    """A DTensor over other ranks is refused, also where its layout is what the style wants; over the same ones it is not."""
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    alike = DeviceMesh.from_group(mesh["tp"].get_group(), device().type)
    ours, whole = parallel(model(), mesh["tp"], local=False), model()
    tokens = torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(4), device="cpu").to(device())
    narrow, gate, down = torch.randn(8, INNER), ours.gate, ours.down
    for other, layout in ((mesh["dp"], [Shard(0)]), (mesh["dp"], [Replicate()]), (mesh, [Shard(0), Shard(0)])):
        with pytest.raises(ValueError, match=r"ColwiseParallel: the input is a DTensor on DeviceMesh.*must have the same ranks"):
            gate(distribute_tensor(tokens, other, layout))
    with pytest.raises(ValueError, match=r"RowwiseParallel: the input is a DTensor on DeviceMesh\(\(dp=2\).*from_local"):
        down(distribute_tensor(narrow, mesh["dp"], [Shard(1)]))
    for layout in (Shard(0), Replicate()):
        z = gate(distribute_tensor(tokens, alike, [layout]))
        close(z, whole.gate(tokens).chunk(2, 1)[mesh["tp"].get_local_rank()], "a mesh of the same ranks")
    gate.weight = nn.Parameter(distribute_tensor(whole.gate.weight.detach(), mesh["dp"], [Shard(0)]))
    with pytest.raises(ValueError, match=r"ColwiseParallel: weight is a DTensor on DeviceMesh\(\(dp=2\)"):
        gate(distribute_tensor(tokens, mesh["tp"], [Shard(0)]))


def test_tensors_that_are_spread_over_other_ranks_are_refused():
    run_ranks(on_other_ranks, 4, makes_groups=True)


@on_device
def pickled(group):
    models, x, shard = both(group)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for ours in models:
        file = io.BytesIO()
        torch.save(ours, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
        assert type(other) is type(ours) and isinstance(getattr(other, "gate", nn.Linear(1, 1)), nn.Linear)
        close(other(shard), model()(x).chunk(size, 1)[rank], "pickled")


def test_models_can_be_pickled():
    run_ranks(pickled, 2)


def compiled_in_place(group):
    """Copies of layers that were compiled in place compute with their own weights."""
    mesh = DeviceMesh.from_group(group, device().type)
    with device():  # not around what is compiled
        column = fluxlike.nn.ColumnParallelLinear(HIDDEN, INNER, group=group)
        row = fluxlike.nn.RowParallelLinear(INNER, HIDDEN, group=group)
        styled, wide, narrow = parallel(model(), mesh), torch.randn(2, 4, HIDDEN), torch.randn(2, 4, INNER // 2)
    torch._dynamo.reset()
    for layer, x in ((column, wide), (row, narrow), (styled.gate, wide), (styled.down, narrow)):
        layer.compile(backend="eager")
        expected, file = layer(x), io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
            close(other(x), expected, "a copy")
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter.zero_()
            assert not other(x).any(), f"a copy of {type(layer).__name__}, whose weights are zero"


def test_copies_of_layers_that_were_compiled():
    run_ranks(compiled_in_place, 2)


class Doubled(nn.Module):
    """A parametrization, of each element alone."""

    def forward(self, weight):
        return 2 * weight


@on_device
def parametrized(group):
    """Copies of layers whose weights are made of others, which torch lets nobody pickle."""
    mesh = DeviceMesh.from_group(group, device().type)
    _, _, shard = both(group)
    styled, shared = parallel(model(), mesh), parallel(model(), mesh, shared=True)
    row = fluxlike.nn.RowParallelLinear(INNER, HIDDEN, group=group)
    narrow = torch.randn(2, 4, INNER // 2)
    made = (styled, styled.down, shard), (styled, styled.gate, shard), (shared, shared.up, shard), (row, row, narrow)
    for whole, layer, given in made:
        nn.utils.parametrize.register_parametrization(layer, "weight", Doubled())
        expected, other = whole(given), copy.deepcopy(whole)
        close(other(given), expected, "a copy")
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        assert torch.equal(whole(given), expected) and not torch.equal(other(given), expected), "a copy has weights of its own"


def test_copies_of_layers_that_are_parametrized():
    run_ranks(parametrized, 2)


@on_device
def elsewhere(group):
    """The name of a group is that of another one in another job."""
    row = fluxlike.nn.RowParallelLinear(4, 8, group=group)
    state = row.__getstate__()
    name, ranks, place = state["group"]
    other = object.__new__(type(row))
    unlike = (f"one of ranks {ranks}", (name, [*ranks, 99], place)), ("not there", ("no such group", ranks, place))
    for found, group_here in unlike:
        with pytest.raises(ValueError, match=re.escape(found) + ".*make the groups in the same order.*state_dict"):
            other.__setstate__(state | {"group": group_here})
    other.__setstate__(state)
    assert other.group is group


def test_a_layer_s_group_is_of_the_same_ranks_where_it_is_loaded():
    run_ranks(elsewhere, 2)


@on_device
def ended_between(group):
    """A forward that ended behind the first of the layers that share a gather: copies of the model are without what it left."""
    mesh = DeviceMesh.from_group(group, device().type)
    _, x, shard = both(group)
    ours = parallel(model(), mesh, shared=True)
    ours.gate(ours.norm(shard))  # of what a graph has made
    file = io.BytesIO()
    torch.save(ours, file)
    again = copy.deepcopy(ours)
    assert not again.gate.shared.waiting and again.gate.shared.input is None
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    close(again(shard), model()(x).chunk(size, 1)[rank], "a copy")


def test_a_forward_that_was_ended_leaves_a_model_that_can_be_copied():
    run_ranks(ended_between, 2)


def called_alone(group):
    """What a layer that was called alone leaves for the others is not what they give after the weights have changed."""
    mesh, made = DeviceMesh.from_group(group, device().type), []
    with device():
        _, _, shard = both(group)
        ours, right = parallel(model(), mesh, shared=True), parallel(model(), mesh)
    ours.norm = right.norm = nn.Identity()  # the layers are called with one tensor all the time

    def counted(graph, _):
        made.append(graph)
        return graph

    torch._dynamo.reset()
    for one in (ours, copy.deepcopy(ours)):
        for run in (one, torch.compile(one, backend=counted, fullgraph=True)):
            for _ in range(2):
                one.up(shard)
                with torch.no_grad():
                    for mine, theirs in zip(one.parameters(), right.parameters(), strict=True):
                        mine.copy_(theirs.mul_(1.25))
                close(run(shard), right(shard), "after a call of one layer")
    assert len(made) == 1, len(made)


def test_layers_that_share_a_gather_compute_with_the_weights_of_their_call():
    run_ranks(called_alone, 2)


def cast_otherwise(group):
    """Layers that share a gather must be called under one state of autocast, by which each has its dtype."""
    mesh = DeviceMesh.from_group(group, device().type)
    with device():
        _, _, shard = both(group)
        ours, right = parallel(model(), mesh, shared=True), parallel(model(), mesh)
    half = torch.autocast(device().type, torch.bfloat16)
    said = r"up was called with torch\.autocast on or off, or of another dtype, unlike gate; layers"
    for first, second in ((True, False), (False, True)):
        with torch.autocast(device().type, torch.bfloat16, enabled=first):
            ours.gate(shard)
        with torch.autocast(device().type, torch.bfloat16, enabled=second), pytest.raises(ValueError, match=said):
            ours.up(shard)
    with half:
        assert torch.equal(ours.gate(shard), right.gate(shard)) and torch.equal(ours.up(shard), right.up(shard))
    ours.bfloat16(), right.bfloat16()  # where it changes nothing
    shard = shard.bfloat16()
    with half:
        ours.gate(shard)
    assert torch.equal(ours.up(shard), right.up(shard))
    torch._dynamo.reset()
    with half:
        assert torch.equal(torch.compile(ours, fullgraph=True, backend="eager")(shard), ours(shard))


def test_layers_that_share_a_gather_and_autocast():
    run_ranks(cast_otherwise, 2)


def copied_alone(group):
    """A copy of one layer that still belongs to the others' gather says so; one by deepcopy has copies of the others."""
    with device():
        models, _, shard = both(group)
    gate = models[1].gate
    expected = gate(shard)
    with pytest.raises(ValueError, match=r"none of gate, up, which share a gather.*use copy\.deepcopy"):
        copy.copy(gate)(shard)
    assert torch.equal(copy.deepcopy(gate)(shard), expected)


def test_a_copy_of_one_of_the_layers_that_share_a_gather():
    run_ranks(copied_alone, 2)


def traced(group):
    """What torch.jit.trace cannot do is said, for layers and styles; a call that needs no sizes of all ranks is in the trace."""
    with device():
        models, _, shard = both(group)
        w = torch.randn(6, HIDDEN)
    for ours in models:
        with pytest.raises(ValueError, match=r"ag_gemm: torch\.jit\.trace makes tensors of sizes.*torch\.compile or torch\.export"):
            torch.jit.trace(ours, (shard,), check_trace=False)
    program = torch.jit.trace(lambda x: fluxlike.ag_gemm(x, w, group=group), (shard[0],), check_trace=False)
    assert torch.equal(program(shard[1]), fluxlike.ag_gemm(shard[1], w, group=group))


def test_what_jit_traces():
    run_ranks(traced, 2)


def blocks(group):
    """Blocks that are compiled one by one, as of long models, share what is compiled: their layers are of one class, copies too."""
    mesh, made = DeviceMesh.from_group(group, device().type), []
    with device():
        _, _, shard = both(group)
        ours = [parallel(model(), mesh) for _ in range(4)]

    def counted(graph, _):
        made.append(graph)
        return graph

    assert len({type(one.gate) for one in (*ours, copy.deepcopy(ours[0]))}) == 1
    torch._dynamo.reset()
    for one in ours:
        with torch.no_grad():
            torch.compile(one, backend=counted, fullgraph=True)(shard)
    assert len(made) == 1, len(made)


def test_equal_blocks_are_compiled_once():
    run_ranks(blocks, 2)


@on_device
def misfits(group):
    layer = fluxlike.nn.ColumnParallelLinear(HIDDEN, 8, group=group)
    with pytest.raises(ValueError, match=r"m=5 is for inputs \[tokens, features\], and this one is \[1, 3, "):
        layer(torch.zeros(1, 3, HIDDEN), m=5)
    doubles = fluxlike.nn.RowParallelLinear(HIDDEN, 8, group=group, dtype=torch.float64)
    with torch.autocast(device().type, torch.bfloat16), pytest.raises(ValueError, match="float64"):
        doubles(torch.zeros(4, HIDDEN // 2, dtype=torch.float64))
    for ours in (layer, fluxlike.nn.RowParallelLinear(HIDDEN * group.size(), 8, group=group)):
        for dtype in (torch.complex64, torch.int64):  # which torch's autocast leaves alone, and nn.Linear refuses
            with torch.autocast(device().type, torch.bfloat16), pytest.raises(ValueError, match=f"the input has dtype {dtype} and"):
                ours(torch.ones(4, HIDDEN, dtype=dtype))


def test_what_does_not_fit_a_layer_is_said():
    run_ranks(misfits, 2)


@on_device
def laid_out(group):
    """What column-parallel layers return is contiguous, as nn.Linear's, also where a rank has one step of each sequence."""
    size, rank = group.size(), group.rank()
    mesh, whole = DeviceMesh.from_group(group, device().type), model()
    x = torch.randn(3, size, HIDDEN, generator=torch.Generator().manual_seed(5), device="cpu").to(device())
    shard = x.chunk(size, 1)[rank]
    layer = fluxlike.nn.ColumnParallelLinear.from_linear(whole.gate, group=group)
    results = [layer(shard)]
    for shared in (False, True):
        results.append(parallel(model(), mesh, shared=shared).gate(shard))
    colwise = fluxlike.nn.ColwiseParallel(use_local_output=False)
    spread = parallelize_module(model(), mesh, {"gate": colwise, "down": torchs.RowwiseParallel()})
    h = spread.gate(shard)
    close(spread.down(h), whole.down(whole.gate(x)), "torch's style behind it")  # which takes a DTensor for what it says it is
    for z in (*results, h.to_local()):
        assert z.is_contiguous(), z.stride()
        close(z.view(3 * size, -1), whole.gate(x).chunk(size, 2)[rank].flatten(0, 1), "as rows")


def test_results_are_laid_out_as_those_of_linear_layers():
    run_ranks(laid_out, 2)


@on_device
def featureless(group):
    """Layers without input features give the bias, as nn.Linear does."""
    size, rank, x = group.size(), group.rank(), torch.empty(2, group.size(), 0, requires_grad=True)
    linear = nn.utils.skip_init(nn.Linear, 0, 2 * size, device=device())  # there is nothing to draw
    nn.init.uniform_(linear.bias)
    mesh = DeviceMesh.from_group(group, device().type)
    column = fluxlike.nn.ColumnParallelLinear.from_linear(linear, group=group)
    row = fluxlike.nn.RowParallelLinear.from_linear(linear, group=group)
    for style, layer, part in ((fluxlike.nn.ColwiseParallel, column, x[:, :1]), (fluxlike.nn.RowwiseParallel, row, x)):
        for ours in (layer, parallelize_module(copy.deepcopy(linear), mesh, style())):
            y = ours(part)
            bias = linear.bias.chunk(size)[rank] if layer is column else linear.bias
            close(y, bias.expand_as(y), style.__name__)
            y.sum().backward()
            assert y.shape[:2] == (2, size if layer is column else 1)


def test_layers_without_features():
    run_ranks(featureless, 2)


@on_device
def on_meta(group):
    """Shapes can be asked for on the meta device; weights that were left there are an error, not what memory holds."""
    mesh = DeviceMesh.from_group(group, device().type)
    models, _, shard = both(group)
    for ours in [*models, parallel(model(), mesh)]:
        empty = ours.to("meta")
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                y = empty(shard.to("meta"))
                assert y.is_meta and y.shape == shard.shape
        with pytest.raises(ValueError, match="gemm: weight is on meta, x on"):
            getattr(empty, "gate", getattr(empty, "gate_up", None))(shard)
        down = empty.down.weight
        down = down.to_local() if isinstance(down, DTensor) else down
        for call in (fluxlike.gemm_rs, fluxlike.gemm_ar):
            with pytest.raises(ValueError, match="weight is on meta, x on"):
                call(torch.randn(4, down.shape[1]), down)
    x, w = torch.randn(4 * group.size(), 6, requires_grad=True), torch.randn(8, 6)
    for call in (fluxlike.gemm_rs, fluxlike.gemm_ar, fluxlike.ag_gemm):
        with pytest.raises(ValueError, match="bias is on meta, x on"):
            call(x, w, bias=torch.empty(8, device="meta"))


def test_the_meta_device():
    run_ranks(on_meta, 2)


def counted(group):
    """The products of all ranks' layers are those of the whole model to FlopCounterMode, forward and backward."""
    with device():
        models, x, shard = both(group)
    for ours in models:
        for grad in (True, False):
            counts = []
            for run, given in ((model(), x), (ours, shard)):
                with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(grad):
                    y = run(given)
                    if grad:
                        y.sum().backward()
                counts.append(counter.get_total_flops())
            assert counts[0] == counts[1] * group.size() > 0, counts


def test_products_are_counted():
    run_ranks(counted, 2)


def looked_on(group):
    """Modes of dispatch see calls that want no gradient: shapes come of fakes, and graphs have the calls, not their results."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    with device():
        x, w = torch.randn(4 * group.size(), HIDDEN), torch.randn(6, HIDDEN)
    mode = FakeTensorMode()
    fakes, metas = [mode.from_tensor(t) for t in (x, w)], [t.to("meta") for t in (x, w)]
    for call, rows in ((fluxlike.gemm_rs, 4), (fluxlike.ag_gemm, len(x) * group.size()), (fluxlike.gemm_ar, len(x))):
        with mode:
            shapes = [call(*fakes, group=group).shape]
        shapes += [call(*fakes, group=group).shape, call(*metas, group=group).shape]
        assert shapes == [(rows, 6)] * 3, call
        for kind in ("real", "symbolic"):
            graph = make_fx(partial(call, group=group), tracing_mode=kind)(x, w)
            assert torch.equal(graph(x * 2, w), call(x * 2, w, group=group)), f"{call}, {kind}"
    with device():  # a mode of torch's functions, which is none of dispatch
        ctx = fluxlike.create_gemm_ar_context(len(x), 6, torch.float32, group)
    with pytest.raises(ValueError, match=r"ctx= is given to a call that.* is compiled or traced"):
        make_fx(lambda t: fluxlike.gemm_ar(t, w, ctx))(x)
    with FlopCounterMode(display=False):  # one that makes no graph
        assert torch.equal(fluxlike.gemm_ar(x, w, ctx), fluxlike.gemm_ar(x, w, group=group))
    ctx.close()


def test_modes_of_dispatch_see_calls():
    run_ranks(looked_on, 2)


@on_device
def drawn_under_fsdp(group):
    """The usual way: on the meta device, sharded, then memory, then values."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    tp = mesh["tp"].get_group()

    class Block(nn.Sequential):
        def __init__(self, where=None):
            column = fluxlike.nn.ColumnParallelLinear(HIDDEN, [INNER], group=tp, device=where)
            super().__init__(column, fluxlike.nn.RowParallelLinear(INNER, HIDDEN, group=tp, device=where))

        def forward(self, x):
            return self[1](F.silu(self[0](x)[0]))

    torch.manual_seed(1)
    right = Block()
    ours = Block("meta")
    fully_shard(ours, mesh=mesh["dp"])
    ours.to_empty(device=device())
    torch.manual_seed(1)
    for layer in ours:
        layer.reset_parameters()
    for mine, plain in zip(ours.parameters(), right.parameters(), strict=True):
        assert isinstance(mine, DTensor) and torch.equal(mine.full_tensor(), plain)
    x = torch.randn(2, 4, HIDDEN, generator=torch.Generator(device()).manual_seed(2))
    close(ours(x), right(x), "under FSDP2")


def test_layers_are_drawn_under_fsdp():
    run_ranks(drawn_under_fsdp, 4, makes_groups=True)


@on_device
def clipped(group):
    """With norms under torch's SequenceParallel all parameters are DTensors, and the norm of all gradients is the unsharded one."""
    mesh = DeviceMesh.from_group(group, device().type)
    _, x, shard = both(group)
    ours = parallelize_module(parallel(model(), mesh), mesh, {"norm": torchs.SequenceParallel(use_local_output=True)})
    totals = []
    for run, given in ((ours, shard), (model(), x)):
        run(given).square().sum().backward()
        total = torch.nn.utils.clip_grad_norm_(run.parameters(), 1.0)
        totals.append(total.full_tensor() if isinstance(total, DTensor) else total)
    close(*totals, "norm of all gradients")


def test_gradients_are_clipped():
    run_ranks(clipped, 2)


@on_device
def inputs(group):
    """What has not arrived yet, is not contiguous, or is of inference mode; and layers that were frozen before they were spread."""
    models, x, shard = both(group)
    mesh, rank, size = DeviceMesh.from_group(group, device().type), dist.get_rank(group), dist.get_world_size(group)
    whole = model()
    with torch.no_grad():
        right = whole(x).chunk(size, 1)[rank]
        for ours in models:
            late = functional.all_reduce(shard, "sum", group)
            assert isinstance(late, functional.AsyncCollectiveTensor)
            gate = ours.gate_up if isinstance(ours, Sharded) else ours.gate
            close(gate(late)[0], gate(functional.wait_tensor(late).clone())[0], "what has not arrived")
            turned = shard[:1].transpose(1, 2).contiguous().transpose(1, 2)
            close(gate(turned)[0], gate(shard[:1])[0], "features that are not contiguous")
    for ours in models:
        gate = ours.gate_up if isinstance(ours, Sharded) else ours.gate
        gradients = []
        for view in (lambda t: t.view(shard.shape), lambda t: t.mul(1).view(shard.shape)):  # to multiply waits
            leaf = shard.flatten(0, 1).clone().requires_grad_()
            parts = functional.all_gather_tensor_autograd(leaf, 0, group)[: leaf.shape[0]]
            gate(view(parts))[0].square().sum().backward()
            gradients.append(leaf.grad)
        close(*gradients, "the gradient of what has not arrived")
    with torch.inference_mode():
        for ours in models:
            close(ours(shard.clone()), right, "inference mode")
    whole.requires_grad_(False)
    for ours in (Sharded(whole, group, 1, False), parallel(whole, mesh)):
        assert not any(parameter.requires_grad for parameter in ours.parameters())


def test_inputs_of_other_kinds():
    run_ranks(inputs, 2)

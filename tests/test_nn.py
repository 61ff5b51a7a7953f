"""fluxlike.nn: layers and parallel styles against the unsharded model, alone, under FSDP2 and compiled."""

import copy
import functools
import os
import types

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import ROOT, TORCHRUN, device, run_fresh, run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import fluxlike

HIDDEN, INNER = 12, 16


def on_device(body):
    """What the body makes lies on this rank's device."""

    @functools.wraps(body)
    def run(group, **how):
        with device():
            return body(group, **how)

    return run


class Feed(nn.Module):
    """A block that uses every kind of layer: two that share an input, a sum over ranks, a norm on what is spread."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.gate, self.up = nn.Linear(HIDDEN, INNER, bias), nn.Linear(HIDDEN, INNER, bias)
        self.down = nn.Linear(INNER, HIDDEN, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Sharded(nn.Module):
    """Feed of fluxlike's layers."""

    def __init__(self, whole: Feed, group: dist.ProcessGroup, dim: int, save_gathered: bool) -> None:
        super().__init__()
        self.norm = copy.deepcopy(whole.norm)
        self.gate_up = fluxlike.nn.ColumnParallelLinear.from_linear(
            whole.gate, whole.up, group=group, sequence_dim=dim, save_gathered=save_gathered
        )
        self.down = fluxlike.nn.RowParallelLinear.from_linear(whole.down, group=group, sequence_dim=dim)

    def forward(self, x: torch.Tensor, m: int | None = None) -> torch.Tensor:
        gate, up = self.gate_up(self.norm(x), m)
        return x + self.down(F.silu(gate) * up)


def model(bias: bool = True) -> Feed:
    torch.manual_seed(3)
    return Feed(bias).to(device())


def close(actual, expected, what):
    a, b = actual.detach().double(), expected.detach().double()
    torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5, msg=lambda m: f"{what}: {m}")


def part_of(t, dim, size, rank):
    """What torch.chunk gives a rank, which may be nothing."""
    parts = t.chunk(size, dim)
    return parts[rank] if rank < len(parts) else t.narrow(dim, 0, 0)


def layers(group, shapes):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for shape, dim, save_gathered in shapes:
        what = f"{shape} along {dim}"
        whole = model().double()
        x = torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(5)).to(device())
        all_of_x = x.double().requires_grad_()
        y = whole(all_of_x)
        y.square().sum().backward()
        ours = Sharded(model(), group, dim, save_gathered)
        ours = copy.deepcopy(ours)
        shard = part_of(x, dim, size, rank).clone().requires_grad_()
        z = ours(shard, x.shape[0] if x.dim() == 2 else None)
        close(z, part_of(y, dim, size, rank), what)
        z.square().sum().backward()
        close(shard.grad, part_of(all_of_x.grad, dim, size, rank), f"gradient of x, {what}")
        for i, linear in enumerate((whole.gate, whole.up)):
            close(ours.gate_up.weights[i].grad, linear.weight.grad.chunk(size)[rank], f"gradient of gate, up {what}")
            close(ours.gate_up.biases[i].grad, linear.bias.grad.chunk(size)[rank], f"gradient of their bias, {what}")
        close(ours.down.weight.grad, whole.down.weight.grad.chunk(size, 1)[rank], f"gradient of down, {what}")
        close(ours.down.bias.grad, whole.down.bias.grad, f"gradient of the bias of down, {what}")


@pytest.mark.parametrize("world", (2, 4))
def test_layers(world):
    shapes = [((2, 12), 1, False), ((13,), 0, False), ((8, 3), 0, True), ((1, 8), 1, True), ((3,), 0, False)]
    run_ranks(layers, world, shapes=shapes if world == 2 else shapes[:2])


@on_device
def layer_draws(group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(1)
    plain = [nn.Linear(8, 4 * size), nn.Linear(4 * size, 8, bias=False)]
    after = torch.rand(1)
    torch.manual_seed(1)
    column = fluxlike.nn.ColumnParallelLinear(8, 4 * size, group=group)
    row = fluxlike.nn.RowParallelLinear(4 * size, 8, bias=False, group=group)
    assert torch.equal(torch.rand(1), after)
    assert torch.equal(column.weights[0], plain[0].weight.chunk(size)[rank])
    assert torch.equal(column.biases[0], plain[0].bias.chunk(size)[rank])
    assert torch.equal(row.weight, plain[1].weight.chunk(size, 1)[rank]) and row.bias is None
    assert "in_features=8" in repr(column) and f"tp_size={size}" in repr(row)
    x = torch.randn(2, 3, 8)
    with torch.autocast(device().type, torch.bfloat16):
        z = column(x.to(device()))
    assert z.dtype == torch.bfloat16 and z.shape == (2, 3 * size, 4)


def test_a_layer_is_the_plain_one_of_the_same_seed():
    run_ranks(layer_draws, 2)


@on_device
def handled(group):
    """What is done to layers and to linear layers under a style: drawn again, saved, cast, frozen; and without gradients."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    rank, size = dist.get_rank(group), dist.get_world_size(group)
    mesh = DeviceMesh.from_group(group, device().type)
    # drawn again, after nothing was there
    torch.manual_seed(1)
    drawn = [nn.Linear(HIDDEN, INNER), nn.Linear(HIDDEN, 2 * INNER), nn.Linear(INNER, HIDDEN)]
    empty = [
        fluxlike.nn.ColumnParallelLinear(HIDDEN, [INNER, 2 * INNER], group=group, device="meta").to_empty(device=device()),
        fluxlike.nn.RowParallelLinear(INNER, HIDDEN, group=group, device="meta").to_empty(device=device()),
    ]
    torch.manual_seed(1)
    for layer in empty:
        layer.reset_parameters()
    want = [*(linear.weight.chunk(size)[rank] for linear in drawn[:2]), *(linear.bias.chunk(size)[rank] for linear in drawn[:2])]
    want += [drawn[2].weight.chunk(size, 1)[rank], drawn[2].bias]
    for got, part in zip((p for layer in empty for p in layer.parameters()), want, strict=True):
        assert torch.equal(got, part) and got.requires_grad
    style = parallel(Feed().to("meta"), mesh).to_empty(device=device())
    for layer in (style.gate, style.up, style.down):
        layer.reset_parameters()
        assert all(p.to_local().isfinite().all() for p in layer.parameters())
    # whole states, of the plain model and back; of a layer this rank's part
    whole, whole_state = model(), StateDictOptions(full_state_dict=True)
    torch.manual_seed(7)
    theirs = Feed().state_dict()
    set_model_state_dict(style, dict(theirs), options=whole_state)  # which puts DTensors into it
    whole.load_state_dict(theirs)
    for name, t in get_model_state_dict(style, options=whole_state).items():
        assert rank or torch.equal(t.cpu(), theirs[name].cpu()), name  # rank 0 has it
    sharded, other = Sharded(whole, group, 1, False), Sharded(model(), group, 1, False)
    other.load_state_dict(sharded.state_dict())
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        other.down.load_state_dict(whole.down.state_dict())
    # without gradients, in another dtype, frozen
    x = torch.randn(2, 4 * size, HIDDEN, generator=torch.Generator(device()).manual_seed(2))
    shard = x.chunk(size, 1)[rank]
    for ours in (style, other):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                close(ours(shard), whole(x).chunk(size, 1)[rank], mode.__name__)
        half, right = copy.deepcopy(ours).to(torch.bfloat16), copy.deepcopy(whole).to(torch.bfloat16)
        y = right(x.bfloat16()).chunk(size, 1)[rank]
        torch.testing.assert_close(half(shard.bfloat16()), y, rtol=2e-2, atol=2e-2)
        ours.requires_grad_(False)
        leaf, plain = shard.clone().requires_grad_(), x.clone().requires_grad_()
        ours(leaf).sum().backward()
        whole(plain).sum().backward()
        close(leaf.grad, plain.grad.chunk(size, 1)[rank], "frozen")
        assert all(p.grad is None and not p.requires_grad for p in ours.parameters())


def draws(group):
    mesh = DeviceMesh.from_group(group, device().type)
    DTensor.from_local(torch.zeros(2, device=device()), mesh, [Shard(0)]).uniform_()


def test_what_is_done_to_layers():
    if TORCHRUN:  # with the first DTensor that draws, torch sends the state of rank 0 to all ranks, also those beyond the group
        run_ranks(draws, int(os.environ["WORLD_SIZE"]))
    run_ranks(handled, 2)


def parallel(whole: Feed, mesh: DeviceMesh, dim: int = 1, local: bool = True, shared: bool = False) -> Feed:
    column = fluxlike.nn.ColwiseParallel(input_layouts=Shard(dim))
    down = {"down": fluxlike.nn.RowwiseParallel(output_layouts=Shard(dim), use_local_output=local)}
    if shared:
        style = fluxlike.nn.SharedGather("gate", "up", input_layouts=Shard(dim))
        return parallelize_module(parallelize_module(whole, mesh, style), mesh, down)
    return parallelize_module(whole, mesh, {"gate": column, "up": column} | down)


def styled(group, shapes):
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    mesh = DeviceMesh.from_group(group, device().type)
    for shape, dim in shapes:
        whole = model().double()
        x = torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(5)).to(device())
        all_of_x = x.double().requires_grad_()
        y = whole(all_of_x)
        y.square().sum().backward()
        ours = parallel(model(), mesh, dim, shared=len(shape) == 2)
        assert isinstance(ours.gate, nn.Linear)
        ours = copy.deepcopy(ours)
        shard = x.chunk(size, dim)[rank].clone().requires_grad_()
        z = ours(shard)
        close(z, y.chunk(size, dim)[rank], shape)
        z.square().sum().backward()
        close(shard.grad, all_of_x.grad.chunk(size, dim)[rank], shape)
        for name, plain in whole.named_parameters():
            if not name.startswith("norm"):
                grad = dict(ours.named_parameters())[name].grad
                assert isinstance(grad, DTensor)
                close(grad.full_tensor(), plain.grad, f"gradient of {name}, {shape}")
        assert set(ours.state_dict()) == set(whole.state_dict())
    # DTensors in and out: any layout comes in, tokens of any number
    ours = parallel(model(), mesh, 0, local=False)
    whole = model()
    tokens = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(6)).to(device())
    for layout in (Shard(0), Replicate()):
        x = DTensor.from_local(tokens, mesh, [Replicate()]).redistribute(mesh, [layout])
        h = F.silu(ours.gate(x))
        y = ours.down(h)
        assert isinstance(y, DTensor) and y.placements == (Shard(0),) and y.shape == tokens.shape
        close(y.full_tensor(), whole.down(F.silu(whole.gate(tokens))), "DTensor")
    ours = parallel(model(), mesh, 1, local=False)
    y = ours.down(DTensor.from_local(torch.ones(2, 4 * size, INNER, device=device()), mesh, [Replicate()]))
    assert y.shape == (2, 4 * size, HIDDEN) and y.stride() == (4 * size * HIDDEN, HIDDEN, 1), "those of the whole, not of a part"


#: Before 2.12 DTensor.to_local makes zeros of a gradient that is not there.
ZEROS_OF_DTENSORS = torch.__version__.startswith(("2.10.", "2.11."))


def some_take_part(group):
    """Of layers that share a gather, one that nobody uses has no gradient, and what a frozen one gives wants none."""
    rank, mesh = dist.get_rank(group), DeviceMesh.from_group(group, device().type)
    feed = parallelize_module(model(), mesh, fluxlike.nn.SharedGather("gate", "up", input_layouts=Shard(1)))
    x = torch.ones(2, 6, HIDDEN, device=device()).chunk(2, 1)[rank]
    gate, _ = feed.gate(x), feed.up(x)
    gate.square().sum().backward()
    assert all(p.grad is not None for p in feed.gate.parameters())
    for p in feed.up.parameters():
        assert not p.grad.to_local().any() if ZEROS_OF_DTENSORS else p.grad is None
    feed.gate.requires_grad_(False)
    assert [feed.gate(x).requires_grad, feed.up(x).requires_grad] == [False, True]
    wants = x.clone().requires_grad_()
    assert feed.gate(wants).requires_grad and feed.up(wants).requires_grad


def test_layers_of_one_gather_that_take_no_part():
    run_ranks(some_take_part, 2)


def test_styles():
    run_ranks(styled, 2, shapes=[((2, 12), 1), ((8, 3), 0), ((6,), 0)])


def test_styles_of_four_ranks():
    run_ranks(styled, 4, shapes=[((2, 12), 1)])


def two_dimensional(group):
    """Data parallel by FSDP2 around tensor parallel by the styles: some steps of training as one process does them."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    whole, ours = model(), parallel(model(), mesh["tp"], shared=True)
    fully_shard(ours, mesh=mesh["dp"])
    dp, tp = mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank()
    mine, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (ours, whole))
    for step in range(3):
        x = torch.randn(4, 8, HIDDEN, generator=torch.Generator().manual_seed(step)).to(device())
        loss = whole(x).square().sum() / 2
        loss.backward()
        part = ours(x.chunk(2)[dp].chunk(2, 1)[tp]).square().sum()  # FSDP2 makes the mean over dp
        part.backward()
        for p in ours.norm.parameters():  # each rank has seen its tokens only
            dist.all_reduce(p.grad.to_local(), group=mesh["tp"].get_group())
        total = part.detach() / 2
        dist.all_reduce(total)
        close(total, loss, f"loss of step {step}")
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for name, plain in whole.named_parameters():
        close(dict(ours.named_parameters())[name].full_tensor(), plain, name)


def test_fsdp_around_tensor_parallel():
    run_ranks(two_dimensional, 4, makes_groups=True)


def saved_bytes(run, parameters):
    """Bytes that autograd keeps of a forward, but for the parameters; and the forward's result."""
    kept = {}

    def pack(t):
        storage = (t._local_tensor if isinstance(t, DTensor) else t).untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = run()
    own = {(p.to_local() if isinstance(p, DTensor) else p).untyped_storage().data_ptr() for p in parameters}
    return sum(nbytes for start, nbytes in kept.items() if start not in own), result


@on_device
def memory(group):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    size = dist.get_world_size(group)
    mesh = DeviceMesh.from_group(group, device().type)
    plan = {name: ColwiseParallel(input_layouts=Shard(1)) for name in ("gate", "up")}
    plan["down"] = RowwiseParallel(output_layouts=Shard(1))
    theirs, ours = parallelize_module(model(), mesh, plan), parallel(model(), mesh)
    shard = torch.randn(2, 4, HIDDEN)
    of_ours, y = saved_bytes(lambda: ours(shard.requires_grad_()), ours.parameters())
    of_torch, z = saved_bytes(lambda: theirs(shard.requires_grad_()), theirs.parameters())
    close(y, z, "torch's styles")
    # torch keeps the gathered input of each column-parallel layer, these the shard, which the norm has, too
    assert of_ours <= of_torch - (size - 1) * shard.nbytes
    column = fluxlike.nn.ColumnParallelLinear(HIDDEN, INNER, group=group)
    wide = fluxlike.nn.ColumnParallelLinear(HIDDEN, INNER, group=group, save_gathered=True)
    assert saved_bytes(lambda: column(shard), column.parameters())[0] == shard.nbytes
    assert saved_bytes(lambda: wide(shard), wide.parameters())[0] == shard.nbytes * size
    row = fluxlike.nn.RowParallelLinear(INNER, HIDDEN, group=group)
    h = torch.randn(2, 4 * size, INNER // size, device=device()).requires_grad_()
    assert saved_bytes(lambda: row(h), row.parameters())[0] == h.nbytes


def test_what_is_kept_for_the_backward():
    run_ranks(memory, 2)


def compiled(group):
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1
    mesh = DeviceMesh.from_group(group, device().type)
    torch._dynamo.reset()
    for ours in (parallel(model(), mesh, shared=True), Sharded(model(), group, 1, False)):
        fast = torch.compile(ours, fullgraph=True, backend="aot_eager")
        x = torch.randn(2, 4, HIDDEN, device=device())
        results = []
        for run in (ours, fast, fast):
            y = run(x)
            y.square().sum().backward()
            results.append([y, *[p.grad for p in ours.parameters()]])
            ours.zero_grad()
        for got in results[1:]:
            for a, b in zip(got, results[0], strict=True):
                a, b = (t.to_local() if isinstance(t, DTensor) else t for t in (a, b))
                close(a, b, "compiled")


def test_compiled_models():
    run_ranks(compiled, 2)


def checkpointed(group):
    """Forwards that are run again in the backward; the second run ends where nothing more is to be kept."""
    from torch.utils.checkpoint import checkpoint

    mesh = DeviceMesh.from_group(group, device().type)
    ours = parallel(model(), mesh, shared=True)
    x = torch.randn(2, 4, HIDDEN, device=device())

    def halves(x):
        return F.silu(ours.gate(x)).sum(), ours.up(x).sum()

    for run in (ours, halves):
        grads = []
        for again in (False, True, True):
            ours.zero_grad()
            y = checkpoint(run, x, use_reentrant=False) if again else run(x)
            (sum(y) if isinstance(y, tuple) else y.square().sum()).backward()
            grads.append([p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in ours.parameters()])
        for got in grads[1:]:
            for a, b in zip(got, grads[0], strict=True):
                assert (a is None and b is None) or torch.equal(a, b)


def test_activation_checkpoints():
    run_ranks(checkpointed, 2)


# errors


@on_device
def refused(group):
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    mesh = DeviceMesh.from_group(group, device().type)
    layers, linear = fluxlike.nn, nn.Linear(8, 2 * size + 1)
    column, row = (kind(2 * size, 2 * size, group=group) for kind in (layers.ColumnParallelLinear, layers.RowParallelLinear))
    colwise, rowwise = layers.ColwiseParallel(), layers.RowwiseParallel()

    def uneven(x):
        whole = DTensor.from_local(x, mesh, [Replicate()])
        return parallelize_module(nn.Linear(8, 2 * size), mesh, colwise)(whole.redistribute(mesh, [Shard(1)]))

    def patched(linear):
        linear.forward = lambda x: x  # as libraries do that hook into models
        return linear

    class Odd(nn.Linear):
        def forward(self, x):
            return -super().forward(x)

    wrong = [
        ("out_features=5 is not a multiple of the 2 ranks", lambda: layers.ColumnParallelLinear(8, 2 * size + 1, group=group)),
        ("out_features=5 is not a multiple", lambda: layers.ColumnParallelLinear.from_linear(linear, group=group)),
        ("in_features=5 is not a multiple of the 2 ranks", lambda: layers.RowParallelLinear(2 * size + 1, 8, group=group)),
        ("0 layers with in_features", lambda: layers.ColumnParallelLinear(8, [], group=group)),
        ("0 layers with in_features", lambda: layers.ColumnParallelLinear.from_linear(group=group)),
        ("2 layers with in_features [8, 4]", lambda: layers.ColumnParallelLinear.from_linear(
            nn.Linear(8, size), nn.Linear(4, size), group=group)),
        ("it must be a torch process group", lambda: layers.ColumnParallelLinear(8, size, group=mesh)),
        ("a rank that is not in the group", lambda: layers.RowParallelLinear(size, 8, group=dist.GroupMember.NON_GROUP_MEMBER)),
        ("sequence_dim=-2 is not a dimension", lambda: layers.ColumnParallelLinear(8, size, group=group, sequence_dim=-2)),
        ("sequence_dim='1' is not a dimension", lambda: layers.RowParallelLinear(size, 8, group=group, sequence_dim="1")),
        ("and sequence_dim=3", lambda: layers.RowParallelLinear(size, 8, group=group, sequence_dim=3)(torch.randn(2, 2, 1))),
        ("ColumnParallelLinear: the input has dtype torch.float32 and the layer's weight torch.bfloat16; they must be the same",
         lambda: column.bfloat16()(torch.randn(2, 2, 2 * size))),
        ("(2, 2, 5) and in_features=4; its last size must be 4", lambda: column.float()(torch.randn(2, 2, 2 * size + 1))),
        ("(2, 2, 4) and in_features=4, of which each of the 2 ranks takes 2; its last size must be 2",
         lambda: layers.RowParallelLinear(2 * size, 8, group=group)(torch.randn(2, 2, 2 * size))),
        ("the mesh has 2 dimensions", lambda: colwise._apply(nn.Linear(8, 8), types.SimpleNamespace(ndim=2))),
        ("some of the layers have a bias", lambda: layers.ColumnParallelLinear.from_linear(
            nn.Linear(8, size), nn.Linear(8, size, bias=False), group=group)),
        ("out_features=5 is not a multiple", lambda: parallelize_module(nn.Linear(8, 5), mesh, colwise)),
        ("in_features=5 is not a multiple", lambda: parallelize_module(nn.Linear(5, 8), mesh, rowwise)),
        ("is a LayerNorm", lambda: parallelize_module(nn.LayerNorm(8), mesh, colwise)),
        ("is a Odd", lambda: parallelize_module(Odd(8, 8), mesh, colwise)),
        ("a Linear with a forward of its own", lambda: parallelize_module(patched(nn.Linear(8, 8)), mesh, colwise)),
        ("torch.distributed.tensor.parallel.ColwiseParallel", lambda: layers.ColwiseParallel(input_layouts=Replicate())),
        ("torch.distributed.tensor.parallel.RowwiseParallel", lambda: layers.RowwiseParallel(output_layouts=Shard(-1))),
        ("is not Shard(-1), the features", lambda: layers.RowwiseParallel(input_layouts=Replicate())),
        ("the sequence, is not a multiple of the 2 ranks", lambda: row(torch.randn(2, 2 * size + 1, 2))),
        ("the sequence, is not a multiple of the 2 ranks", lambda: uneven(torch.randn(2, 2 * size + 1, 8))),
        ("one before the last", lambda: column(torch.randn(2 * size))),
        ("this rank holds", lambda: column(torch.randn(3, 2 * size), m=100)),
        ("ctx= is given", lambda: fluxlike.gemm_rs(torch.randn(4, 2), row.weight, ctx=object(), group=group)),
        ("out= is given", lambda: fluxlike.gemm_rs(torch.randn(4, 2), row.weight, out=torch.empty(2, 2 * size), group=group)),
        ("name two or more", lambda: layers.SharedGather("gate")),
        ("ModuleDict has no 'up'; names are of layers in", lambda: parallelize_module(
            nn.ModuleDict({"gate": nn.Linear(4, size)}), mesh, layers.SharedGather("gate", "up"))),
        ("gate and up are one layer, which would be called twice", lambda: parallelize_module(
            nn.ModuleDict(dict.fromkeys(("gate", "up"), nn.Linear(4, size))), mesh, layers.SharedGather("gate", "up"))),
        ("gate and gate are one layer", lambda: parallelize_module(
            nn.ModuleDict({"gate": nn.Linear(4, size)}), mesh, layers.SharedGather("gate", "gate"))),
        ("gate has in_features=4 and up in_features=8", lambda: parallelize_module(
            nn.ModuleDict({"gate": nn.Linear(4, size), "up": nn.Linear(8, size)}), mesh, layers.SharedGather("gate", "up"))),
        ("Conv1d, it must be an nn.Linear", lambda: layers.ColumnParallelLinear.from_linear(nn.Conv1d(1, 1, 1), group=group)),
        ("list, it must be an nn.Linear", lambda: layers.RowParallelLinear.from_linear([nn.Linear(2, 2)], group=group)),
        ("as from_linear(*layers)", lambda: layers.ColumnParallelLinear.from_linear([nn.Linear(2, 2)], group=group)),
        ("weight is ParameterList, it must be a tensor, or a list", lambda: fluxlike.ag_gemm(
            torch.randn(2, 4), column.weights, group=group)),
        ("weight is ParameterList, it must be a tensor, or a list", lambda: fluxlike.ag_gemm(
            torch.randn(2, 4).requires_grad_(), column.weights, group=group)),
        ("it must be a tensor of 2 dimensions; pass one", lambda: fluxlike.gemm_rs(torch.randn(4, 2), [row.weight], group=group)),
        ("x is list", lambda: fluxlike.gemm_rs([1.0], row.weight, group=group)),
        ("x is NoneType", lambda: fluxlike.gemm_ar(None, row.weight, group=group)),
        ("x is (4,), it must be a tensor of 2 dimensions", lambda: fluxlike.gemm_rs(torch.randn(4), row.weight, group=group)),
        ("x is (), it must be a tensor of 2 dimensions", lambda: fluxlike.ag_gemm(
            torch.tensor(4.0), column.weights[0], group=group)),
        ("its rows must be contiguous", lambda: fluxlike.gemm_rs(torch.randn(2, 4).T, row.weight, group=group)),
        ("bias is float", lambda: fluxlike.ag_gemm(torch.randn(2, 4), column.weights[0], bias=1.0, group=group)),
        ("m=-1 is not a number of rows", lambda: fluxlike.ag_gemm(torch.randn(2, 4), column.weights[0], m=-1, group=group)),
        ("their second sizes (K) must be equal", lambda: fluxlike.gemm_rs(torch.randn(4, 3), row.weight, group=group)),
        ("give at least one weight", lambda: fluxlike.ag_gemm(torch.randn(2, 4).requires_grad_(), [], group=group)),
    ]  # fmt: skip
    ours = parallel(model(), mesh, shared=True)
    x = torch.randn(2, 2, HIDDEN)
    ours.gate(x)
    with pytest.raises(ValueError, match=r"up was called with another tensor than gate; layers that.* which no hook of"):
        ours.up(x.clone())
    ours.up(x)
    with pytest.raises(ValueError, match="gate was called with a tensor that was changed since up was called with"):
        ours.gate(x.mul_(2))
    with torch.no_grad():
        ours.up(x)
    with pytest.raises(ValueError, match="gate was called with gradients on or off, unlike up; layers"):
        ours.gate(x)
    ours.up(x)
    ours.gate(x)
    ours.up(x)
    with pytest.raises(ValueError, match="gate was called with another tensor than up"):
        ours.gate(ours.up(x))
    board = fluxlike.runtime.world.current().control_of(group).board
    before = board._number
    for message, call in wrong:
        with pytest.raises(ValueError) as caught:
            call()
        assert message in str(caught.value), f"rank {rank}: {caught.value}"
    for number in range(before + 1, board._number + 1):  # an error does not come after the peers were told of a call
        assert "that this rank refused" in board._read(board._me, number)[3].decode()


def test_errors():
    run_ranks(refused, 2)


@pytest.mark.skipif(TORCHRUN, reason="the ranks have called init")
def test_layers_before_init():
    for make in (fluxlike.nn.ColumnParallelLinear, fluxlike.nn.RowParallelLinear):
        with pytest.raises(RuntimeError, match=r"call fluxlike.init\(\) on every rank first"):
            make(8, 8)


@on_device
def captured(group):
    """A model that must make or grow a context in a graph capture, forward or backward, says what to do."""
    executor = fluxlike.runtime.world.current().executor
    column = fluxlike.nn.ColumnParallelLinear(HIDDEN, INNER, group=group)
    row = fluxlike.nn.RowParallelLinear(INNER, HIDDEN, group=group)
    x = torch.randn(2, 4, HIDDEN, device=device())
    row(column(x)).sum().backward()
    executor.is_capturing = lambda: True
    try:
        row(column(x)).sum().backward()  # nothing has to grow
        y = column(x)
        wide = fluxlike.nn.RowParallelLinear(INNER, 4096, bias=False, group=group)
        for call in (lambda: column(torch.randn(2, 2048, HIDDEN, device=device())), lambda: wide(y)):
            with pytest.raises(RuntimeError, match="run this call once before the capture"):
                call()
    finally:
        del executor.is_capturing
    row(column(x)).sum().backward()


def test_growing_in_a_capture():
    run_ranks(captured, 2)


def readme(group, code):
    exec(code, {"__name__": "__readme__"})


def test_the_readme_runs():
    section = (ROOT / "README.md").read_text().split("## Use it in your model")[1]
    code = section.split("```python\n")[1].split("```")[0]
    assert len(code.splitlines()) <= 30
    for outcome in run_fresh(readme, 2, code=code):
        assert outcome.ok, outcome

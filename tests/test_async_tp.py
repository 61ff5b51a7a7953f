"""AsyncTP: the graphs of models under torch's own parallel styles, on ag_gemm and gemm_rs."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from async_tp_graphs import GRAPHS, K, N
from ranks import device, ints, run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fluxlike.nn.async_tp import AsyncTP
from fluxlike.ops import ag_gemm as ag
from fluxlike.ops import gemm_rs as rs

HIDDEN, INNER, HEAD = 12, 16, 4


class Feed(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(HIDDEN, INNER, bias), nn.Linear(HIDDEN, INNER, bias)
        self.down = nn.Linear(INNER, HIDDEN, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(HIDDEN, INNER, bias) for _ in range(3))
        self.o = nn.Linear(INNER, HIDDEN, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = torch.softmax(q @ k.transpose(-1, -2) / HEAD**0.5, -1)
        return self.o((scores @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)])
        self.attention, self.feed = Attention(bias), Feed(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.feed(self.norms[1](x))


def block(mesh: DeviceMesh, dim: int, bias: bool, once: bool) -> Block:
    """``once``: one gather before the layers that share it, as torchtitan has it, not one in each of them."""
    torch.manual_seed(3)
    whole, spread = Block(bias), Shard(dim)
    taken = Replicate() if once else spread
    column, row = ColwiseParallel(input_layouts=taken), RowwiseParallel(output_layouts=spread, use_local_output=False)
    plan = {f"norms.{i}": SequenceParallel(sequence_dim=dim) for i in range(2)}
    for name, columns, rows in (("attention", "qkv", "o"), ("feed", ("gate", "up"), "down")):
        plan[name] = PrepareModuleInput(input_layouts=spread, desired_input_layouts=taken)
        plan |= {f"{name}.{c}": column for c in columns} | {f"{name}.{rows}": row}
    plan[""] = PrepareModuleInput(input_layouts=spread, desired_input_layouts=spread)
    return parallelize_module(whole.to(mesh.device_type), mesh, plan)


def plainly(tp, graphs=None):
    """A backend that runs the graphs of forward and backward as the pass leaves them, without a compiler of kernels.

    ``graphs``: a list for copies of those with collectives, as they were before.
    """
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    def compiler(module, inputs):
        for node in module.graph.nodes:  # as inductor does
            if node.target is torch.ops.aten.view.default:
                node.target = torch.ops.aten.reshape.default
        if (of := torch._guards.TracingContext.get().fw_metadata) and "tangents_1" not in {n.name for n in module.graph.nodes}:
            first = of.num_mutated_inp_runtime_indices
            next(reversed(module.graph.nodes)).meta["user_visible_output_idxs"] = list(range(first, first + of.num_outputs))
        if graphs is not None and "_c10d_functional" in str(module.graph):
            graphs.append(copy.deepcopy(module.graph))
        tp(module.graph)
        module.recompile()
        return make_boxed_func(module.forward)

    return aot_autograd(
        fw_compiler=compiler, partition_fn=min_cut_rematerialization_partition, decompositions=select_decomp_table()
    )


def close(actual, expected, what):
    a, b = (t.full_tensor() if isinstance(t, DTensor) else t for t in (actual, expected))
    torch.testing.assert_close(a.detach().double(), b.detach().double(), rtol=2e-5, atol=2e-5, msg=lambda m: f"{what}: {m}")


def numbers(shape, seed):
    """Whole numbers whose products and sums in these tests are exact in float32."""
    return ints(shape, torch.float32, seed, -2, 2, 1.0).to(device())


def compilable():
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1  # the ranks may have no children
    torch._inductor.config.fx_graph_cache = torch._functorch.config.enable_autograd_cache = False
    torch._dynamo.reset()


@contextlib.contextmanager
def calls():
    """The calls of the operations on this rank meanwhile: a list of their names."""
    kept, made = (ag.call, rs.call), []
    ag.call = lambda *args: made.append("ag_gemm") or kept[0](*args)
    rs.call = lambda *args, **named: made.append("gemm_rs") or kept[1](*args, **named)
    try:
        yield made
    finally:
        ag.call, rs.call = kept


# models


def of_torch(graph):
    """How many calls torch's own pass makes of the collectives of a graph."""
    import torch.distributed._symmetric_memory as symmetric
    from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass

    kept = dist.is_nccl_available, symmetric.is_symm_mem_enabled_for_group
    dist.is_nccl_available, symmetric.is_symm_mem_enabled_for_group = (lambda: True), (lambda name: True)
    try:
        micro_pipeline_tp_pass(graph)
    finally:
        dist.is_nccl_available, symmetric.is_symm_mem_enabled_for_group = kept
    return sum("symm_mem.fused" in str(node.target) for node in graph.nodes)


def trained(group, cases, inductor=False):
    """A step of the replaced model is one of the whole model; what was found, what replaced, what torch's pass replaces."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    mesh = DeviceMesh.from_group(group, device().type)
    counts = []
    for shape, dim, bias, once in cases:
        compilable()
        what = f"{shape} along {dim}, bias={bias}, once={once}"
        torch.manual_seed(3)
        whole = Block(bias).double().to(device())
        x = torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(5)).to(device())
        all_of_x = x.double().requires_grad_()
        y = whole(all_of_x)
        y.square().sum().backward()
        model, tp, graphs = block(mesh, dim, bias, once), AsyncTP(), []
        how = {"options": tp.options} if inductor else {"backend": plainly(tp, graphs)}
        fast = torch.compile(model, fullgraph=True, **how)
        shard = x.chunk(size, dim)[rank].clone().requires_grad_()
        with calls() as made:
            z = fast(shard).to_local()
            z.square().sum().backward()
        close(z, y.chunk(size, dim)[rank], what)
        close(shard.grad, all_of_x.grad.chunk(size, dim)[rank], what)
        for name, plain in whole.named_parameters():
            close(dict(model.named_parameters())[name].grad, plain.grad, f"gradient of {name}, {what}")
        assert len(made) == tp.replaced, f"{made} is made of {tp.replaced} collectives, {what}"
        assert [r.kind for r in tp.graphs] == ["forward", "backward"] and not any(r.left for r in tp.graphs), str(tp)
        found = [(r.gathers, r.scatters, r.replaced_products, r.products) for r in tp.graphs]
        counts.append((found, [of_torch(graph) for graph in graphs]))
    return counts


#: all_gather, reduce_scatter, products replaced, products: of the block's forward and backward.
TWICE, ONCE = [(2, 2, 7, 7), (2, 5, 7, 14)], [(2, 2, 7, 7), (2, 2, 7, 14)]


def test_a_block_trained():
    """Also: torch's pass replaces none that has a bias, and no sum of products, which a gather for several layers comes back as."""
    cases = [((2, 8), 1, True, False), ((8, 2), 0, False, True)]
    for counts in run_ranks(trained, 2, cases=cases):
        assert counts == [(TWICE, [0, 7]), (ONCE, [4, 2])]


@pytest.mark.slow
def test_blocks_trained():
    for world, cases, expected in (
        (2, [((2, 8), 1, False, False), ((1, 8), 1, True, False)], [TWICE, TWICE]),
        (4, [((2, 8), 1, True, True)], [ONCE]),
    ):
        for counts in run_ranks(trained, world, cases=cases, timeout=300):
            assert [found for found, _ in counts] == expected


@pytest.mark.slow
def test_a_block_trained_by_inductor():
    for counts in run_ranks(trained, 2, cases=[((2, 8), 1, True, True)], inductor=True, timeout=600):
        assert counts == [(ONCE, [])]


# graphs


def operands(name, group, rows=None):
    shape, rank = GRAPHS[name][0], dist.get_rank(group)
    if rows is not None:
        shape = (*shape[:-2], rows, shape[-1])
    x, w, v, u = (numbers(s, 10 * i + rank) for i, s in enumerate([shape, (N, K), (N, K), (K, N)]))
    return x, w, v, u, numbers((N,), 77 + rank)


def traced(function, given, group):
    """What inductor gets of a function without gradients."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad():
        module = make_fx(lambda *t: function(*t, group), select_decomp_table(), "fake")(*given)
    module.graph.eliminate_dead_code()
    return module


def as_list(result):
    return result if isinstance(result, list) else [result]


def by_name(graph):
    """The arguments that may be left out, given by name."""
    for node in graph.nodes:
        if node.target in (torch.ops.aten.cat.default, torch.ops.aten.slice.Tensor, torch.ops.aten.split.Tensor):
            names = [argument.name for argument in node.target._schema.arguments]
            node.args, node.kwargs = node.args[:1], dict(zip(names[1:], node.args[1:], strict=False))


def replaced(group, names):
    """What the graphs compute is what they did before; and what was found, replaced and why not is what the table says."""
    named = [name for name in ("batch", "slices", "a batch scattered") if name in names]
    for name, rename in [*((name, False) for name in names), *((name, True) for name in named)]:
        _, function, found, expected, why = GRAPHS[name]
        given, tp = operands(name, group), AsyncTP()
        module = traced(function, given, group)
        if rename:
            by_name(module.graph)
        with torch.no_grad():
            before = module(*(t.clone() for t in given))
            tp(module.graph)
            module.recompile()
            with calls() as made:
                after = module(*(t.clone() for t in given))
        (report,) = tp.graphs
        text = f"{name}: {tp}\n{module.graph}"
        assert (tp.found, tp.replaced) == (found, expected) and len(made) == expected, text
        assert len(report.left) == found - expected and why in " ".join(report.left.values()), text
        assert (found > expected) == ("_c10d_functional" in text), text
        assert expected or "with_effects" not in text, text
        for actual, wanted in zip(as_list(after), as_list(before), strict=True):
            close(actual, wanted, name)
        assert len(storages(after)) >= len(storages(before)), f"{name}: results that were apart are one"


def storages(result):
    return {t.untyped_storage().data_ptr() for t in as_list(result) if t.numel()}


def sized(group, names):
    """One graph for all lengths of a sequence."""
    for name in names:
        function, tp = GRAPHS[name][1], AsyncTP()
        compilable()
        fast = torch.compile(lambda *t, function=function: function(*t, group), fullgraph=True, backend=plainly(tp))
        for rows in (4, 6, 10):
            x, *rest = operands(name, group, rows)
            if name == "first of three":
                x = x.movedim(1, 0).contiguous()
            torch._dynamo.mark_dynamic(x, 0 if name == "first of three" else x.dim() - 2)
            with torch.no_grad():
                for actual, wanted in zip(as_list(fast(x, *rest)), as_list(function(x, *rest, group)), strict=True):
                    close(actual, wanted, name)
        assert len(tp.graphs) == 1 and tp.replaced == tp.found == 1, f"{name}: {tp}"


def test_graphs():
    run_ranks(replaced, 2, names=list(GRAPHS))


@pytest.mark.slow
def test_graphs_of_four_ranks():
    run_ranks(replaced, 4, names=list(GRAPHS))


#: In 2.11 and 2.12, dynamo does not trace an all_gather_tensor along another dimension than the first.
GATHERS_ANY_DIMENSION = tuple(map(int, torch.__version__.split(".")[:2])) not in ((2, 11), (2, 12))


@pytest.mark.slow
def test_graphs_of_any_size():
    several = ["several, some with a bias, and the gathered", "no features", "no columns"] if GATHERS_ANY_DIMENSION else []
    run_ranks(sized, 2, names=[*several, "slices", "its bias", "first of three", "no features scattered", "no columns scattered"])


def undone(group):
    """A graph that cannot be replaced, which shows when a call is there already, is left as it was."""

    class Seen(AsyncTP):
        def __call__(self, graph):
            super().__call__(graph)
            assert "fluxlike" not in str(graph), graph

    compilable()
    tp, function = Seen(), GRAPHS["slices"][1]
    fast = torch.compile(lambda *t: function(*t, group), fullgraph=True, backend=plainly(tp))
    given = operands("slices", group)
    for dim in (0, 1):
        torch._dynamo.mark_dynamic(given[0], dim)
    with torch.no_grad():
        close(fast(*given), function(*given, group), "undone")
    assert "more than one of the sizes" in str(tp) and tp.replaced == 0, str(tp)


def test_what_cannot_be_replaced_stays():
    run_ranks(undone, 2)

"""AsyncTP: what the calls that it puts in keep of the program: their order, its tensors, and operands as inductor lays them out."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from async_tp_graphs import GRAPHS, K, gathered, scattered
from ranks import run_ranks
from test_async_tp import calls, close, compilable, numbers, operands, traced
from torch._higher_order_ops.effects import with_effects
from torch._inductor.fx_passes import pad_mm
from torch.distributed import _functional_collectives as functional

import fluxlike
from fluxlike.nn import async_tp, patterns
from fluxlike.nn.async_tp import AsyncTP

# pads


def unaligned(group, force):
    """Inductor pads products where a measurement of each rank's says so; here it would on rank 0 only, and on CPUs too."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    x, w, v, u = (numbers(s, i) for i, s in enumerate([(4 * size, 6), (10, 6), (10, 6), (6, 10)]))
    leaves = [t.clone().requires_grad_() for t in (x[4 * rank : 4 * rank + 4], w, v, u)]

    def program(x, w, v, u):  # what goes into the silu is kept for the backward
        y = functional.all_gather_tensor_autograd(x, 0, group)
        return functional.reduce_scatter_tensor_autograd((F.silu(y @ w.T) * (y @ v.T)) @ u.T, "sum", 0, group)

    compilable()
    tp = AsyncTP()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pad_mm, "check_device", lambda a, b: True)
        patch.setattr(pad_mm, "has_triton", lambda: True, raising=False)  # not every torch looks for it there
        fast = torch.compile(program, fullgraph=True, options=tp.options | {"force_shape_pad": force and rank == 0})
        y = fast(*leaves)
        y.square().sum().backward()
    assert (tp.found, tp.replaced) == (4, 4), str(tp)
    plain = [t.detach().clone().requires_grad_() for t in leaves]
    right = program(*plain)
    right.square().sum().backward()
    for name, got, want in zip("yxwvu", (y, *(t.grad for t in leaves)), (right, *(t.grad for t in plain)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("force", (False, True))
def test_no_product_is_padded(force):
    run_ranks(unaligned, 2, force=force)


def told(group):
    """A pass that is set for all of inductor has a word on pads, once."""
    from torch._inductor import config

    with pytest.MonkeyPatch.context() as patch:
        said = []
        patch.setattr(async_tp, "PADDED_ON", ("cpu", "cuda"))
        patch.setattr(async_tp.log, "warning", lambda text, *args: said.append(text % args))
        given = operands("rows", group)
        for padding, words in ((False, 0), (True, 1)):
            tp = AsyncTP()
            with config.patch(shape_padding=padding):
                for _ in range(2):
                    tp(traced(GRAPHS["rows"][1], given, group).graph)
            assert tp.replaced == 2 and len(said) == words
    assert "torch._inductor.config.shape_padding = False" in said[0]


def test_pads_are_warned_of():
    run_ranks(told, 2)


# effects


def ordered(group):
    """Calls of the pass among calls by hand, through inductor: all are made, in the order of the program, on all ranks."""
    x, w, _, u, _ = operands("rows", group)

    def program(x, w, u):
        y = scattered(F.gelu(gathered(x, 0, group) @ w.T) @ u.T, 0, group)
        z = fluxlike.ag_gemm(x, w, group=group)  # nobody uses it, and every rank takes part in it
        return scattered((z := fluxlike.ag_gemm(x + 1, w, group=group)) @ u.T, 0, group) + y, fluxlike.gemm_rs(z, u, group=group)

    compilable()
    tp = AsyncTP()
    fast = torch.compile(program, fullgraph=True, options=tp.options)
    with torch.no_grad(), calls() as made:
        after = fast(x, w, u)
    with torch.no_grad():
        for actual, wanted in zip(after, program(x, w, u), strict=True):
            close(actual, wanted, "ordered")
    assert tp.replaced == tp.found == 3, str(tp)
    return made


def test_calls_keep_their_order_in_inductor():
    assert run_ranks(ordered, 2) == [["ag_gemm", "gemm_rs", "ag_gemm", "ag_gemm", "gemm_rs", "gemm_rs"]] * 2


def apart(group):
    """The gathered tensor, beside the whole that the program has made of it, which is a copy also where the same rows are."""
    ranks = dist.get_world_size(group)

    def program(x, w):
        y = functional.all_gather_tensor_autograd(x, 0, group)
        return F.linear(torch.cat(y.chunk(ranks), 1), w), y

    compilable()
    tp, found = AsyncTP(), []
    for run in (program, torch.compile(program, fullgraph=True, options=tp.options)):
        x, w = (numbers(shape, 7).requires_grad_() for shape in ((1, 4, K), (8, K)))
        z, y = run(x, w)
        y.detach().mul_(0)  # the caller's own by now
        z.sum().backward()
        found.append((z, w.grad, x.grad))
    assert tp.replaced >= 1, str(tp)
    for actual, wanted in zip(*found, strict=True):
        close(actual, wanted, "apart")


def test_what_is_gathered_and_its_whole_are_two_tensors():
    run_ranks(apart, 2)


def laid_out(group):
    """Operands that are parts of what inductor lays out with its channels last, which the graph has in rows."""
    x, v = numbers((4, K, K), 7 + dist.get_rank(group)), numbers((K, K), 3)

    def program(x, v):
        h = F.conv2d(x[None], v[:4, :4, None, None])[0]
        z = F.linear(gathered(h[3], 0, group), h[0], h[1][0])
        return z, scattered(F.linear(v, h[2], h[1][1]), 0, group), fluxlike.gemm_ar(v, h[0], bias=h[1][0], group=group)

    compilable()
    tp = AsyncTP()
    with torch.no_grad():
        after = torch.compile(program, fullgraph=True, options=tp.options)(x, v)
        for actual, wanted in zip(after, program(x, v), strict=True):
            close(actual, wanted, "laid out")
    assert tp.replaced == tp.found == 2, str(tp)
    for run in (fluxlike.gemm_rs, fluxlike.ag_gemm, fluxlike.gemm_ar):  # what nobody but the program lays out is refused still
        w = numbers((2 * K, 2 * K), 5).requires_grad_()
        for given, why in (((w[::2, ::2], w[0, :K]), "weight has strides"), ((w[:K, :K], w[0, ::2]), "bias is")):
            with pytest.raises(ValueError, match=why):
                run(v, given[0], bias=given[1], group=group)


def test_inductor_lays_out_weights_and_biases():
    run_ranks(laid_out, 2)


def threaded(group):
    """A token goes through all calls; what nobody uses stays, and equal calls stay two."""
    from torch._functorch.compile_utils import fx_graph_cse

    def program(x, w, v, u, b, group):
        return [gathered(x, 0, group) @ w.T, *(scattered(x @ w.T, 0, group) for _ in range(2))]

    graph = traced(program, operands("rows", group), group).graph
    tp = AsyncTP()
    tp(graph)
    nodes = [n for n in graph.nodes if n.target is torch.ops.higher_order.with_effects]
    assert [n.args[1].name() for n in nodes] == ["fluxlike::ag_gemm", "fluxlike::gemm_rs", "fluxlike::gemm_rs"] and tp.replaced == 3
    for before, node in zip([None, *nodes], nodes, strict=False):
        token = node.args[0]
        assert token.target is torch.ops.prims._make_token.default if before is None else token.args == (before, 0)
    assert sum(n.target is torch.ops.prims._make_token.default for n in graph.nodes) == 1
    merged = fx_graph_cse(graph)
    assert sum(n.target is torch.ops.higher_order.with_effects for n in merged.nodes) == 3
    (output,) = graph.find_nodes(op="output")
    output.args = ([],)
    graph.eliminate_dead_code()
    assert sum(n.target is torch.ops.higher_order.with_effects for n in graph.nodes) == 3


def test_the_token():
    run_ranks(threaded, 2)


def waiting(group):
    """Collectives that nobody waits for, or that a weight comes behind which must stay where it is, stay."""
    size, name, c10d = dist.get_world_size(group), group.group_name, torch.ops._c10d_functional
    programs = {
        "its result is never waited for": lambda x, w, v, u, b, g: c10d.reduce_scatter_tensor(x @ w.T, "sum", size, name),
        "taken before it has been waited for": lambda x, w, v, u, b, g: c10d.all_gather_into_tensor(x, size, name) @ w.T,
        "which cannot come before the gather": lambda x, w, v, u, b, g: gathered(x, 0, g) @ torch.rand_like(w).T,
    }
    for why, program in programs.items():
        tp = AsyncTP()
        tp(traced(program, operands("rows", group), group).graph)
        (report,) = tp.graphs
        assert (tp.found, tp.replaced) == (1, 0) and why in " ".join(report.left.values()), str(tp)


def test_what_nobody_waits_for_stays():
    run_ranks(waiting, 2)


def keeping(group):
    """A call returns what it gathers where something else than its products takes that, and only there."""
    for name, kept in (("rows", False), ("batch", False), ("several, some with a bias, and the gathered", True)):
        module = traced(GRAPHS[name][1], operands(name, group), group)
        AsyncTP()(module.graph)
        put_in = [n.args[2:] for n in module.graph.nodes if n.target is with_effects and "ag_gemm" in str(n.args[1])]
        assert [arguments[4] for arguments in put_in] == [kept], name


def test_what_is_gathered_is_kept_for_others():
    run_ranks(keeping, 2)


def test_a_scalar_has_no_rows():
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(lambda x: [x.view(1), x.view(()).view(1, 1)], tracing_mode="fake")(torch.ones(1)).graph
    views = [node for node in graph.nodes if node.target is torch.ops.aten.view.default]
    assert [patterns.keeps_rows(view) for view in views] == [True, False, False]

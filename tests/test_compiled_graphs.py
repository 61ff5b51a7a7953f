"""torch.compile with CUDA graphs of torch's own, as mode="reduce-overhead" records them. Under launch.sh."""

import pytest
import test_async_tp
import test_library
import test_nn
import torch
import torch.distributed as dist
from ranks import device, run_ranks
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh

import fluxlike

pytestmark = pytest.mark.gpu
STEPS = 7


def functions(group):
    """The operations themselves, with one of the all_reduce family behind them."""
    rank = dist.get_rank(group)
    up, down = (torch.randn(24, 16, generator=torch.Generator().manual_seed(rank + i)).to(device()) / 16 for i in (0, 50))
    leaves = [up.requires_grad_(), down.T.contiguous().requires_grad_()]

    def run(x):
        y = test_library.activated(x, *leaves, group, None)
        return y + fluxlike.all_reduce(y.detach().square().mean(), group)

    return run, leaves, 16


def layers(group):
    model = test_nn.Sharded(test_nn.model(), group, 1, False).to(device())
    return model, list(model.parameters()), test_nn.HIDDEN


def styles(group):
    model = test_nn.parallel(test_nn.model().to(device()), DeviceMesh.from_group(group, device().type))
    return model, list(model.parameters()), test_nn.HIDDEN


def async_tp(group):
    model = test_async_tp.block(DeviceMesh.from_group(group, device().type), 1, True, False)
    return lambda x: model(x).to_local(), list(model.parameters()), test_async_tp.HIDDEN


def step(run, leaves, x):
    """Copies of the result and of the gradients, which the next replay overwrites."""
    torch.compiler.cudagraph_mark_step_begin()
    for leaf in leaves:
        leaf.grad = None
    x = x.clone().requires_grad_()
    y = run(x)
    y.square().sum().backward()
    grads = [g.to_local() if hasattr(g, "to_local") else g for g in (leaf.grad for leaf in leaves)]
    return [t.detach().clone() for t in (y, x.grad, *grads)]


def replayed(group, make):
    """The first steps make the contexts and are recorded; the others replay, on changing inputs, with eager steps in between."""
    test_async_tp.compilable()
    counters.clear()
    run, leaves, features = make(group)
    tp = fluxlike.nn.AsyncTP()
    how = {"options": {**tp.options, "triton.cudagraphs": True}} if make is async_tp else {"mode": "reduce-overhead"}
    fast, made = torch.compile(run, fullgraph=True, **how), []
    for seed in range(STEPS):
        x = torch.randn(2, 8, features, generator=torch.Generator().manual_seed(10 * seed + dist.get_rank(group))).to(device())
        x = x.flatten(0, 1) if make is functions else x
        first = test_library.total_calls()
        expected = step(run, leaves, x)
        before = test_library.total_calls()
        got = step(fast, leaves, x)
        made.append(test_library.total_calls() - before)
        for i, (a, b) in enumerate(zip(got, expected, strict=True)):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=lambda m: f"step {seed}, {i}: {m}")  # noqa: B023
    assert counters["inductor"]["cudagraph_skips"] == 0, counters["inductor"]
    recorded = tp.replaced if make is async_tp else before - first  # of the others, as many as a plain step makes
    assert made[1] == recorded > 0 and made[3:] == [0] * (STEPS - 3), made
    assert make is not async_tp or not any(report.left for report in tp.graphs), str(tp)


@pytest.mark.parametrize("make", (functions, layers, styles, async_tp))
def test_replays(make):
    run_ranks(replayed, 2, make=make)

"""torch.compile with CUDA graphs of torch's own, as mode="reduce-overhead" records them, under launch.sh; and without, anywhere."""

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


def stepped(group, make, graphs):
    """Steps on changing inputs, with eager ones in between, make as many calls as plain ones, or none where graphs are replayed.

    The first steps make the contexts and are recorded.
    """
    test_async_tp.compilable()
    counters.clear()
    run, leaves, features = make(group)
    tp, how, plain = fluxlike.nn.AsyncTP(), dict(mode="reduce-overhead") if graphs else dict(backend="aot_eager"), run
    if make is async_tp:  # a pass of inductor's; a step that is not compiled makes no call
        how = dict(options=tp.options | {"triton.cudagraphs": graphs})
        plain = torch.compile(run, fullgraph=True, options=fluxlike.nn.AsyncTP().options) if graphs else None
    fast, made = torch.compile(run, fullgraph=True, **how), []

    def counted(run, x):
        before = test_library.total_calls()
        results = step(run, leaves, x)
        made.append(test_library.total_calls() - before)
        return results

    for seed in range(STEPS):
        x = torch.randn(2, 8, features, generator=torch.Generator().manual_seed(10 * seed + dist.get_rank(group))).to(device())
        x = x.flatten(0, 1) if make is functions else x
        expected = step(run, leaves, x)
        for i, (a, b) in enumerate(zip(counted(fast, x), expected, strict=True)):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=lambda m: f"step {seed}, {i}: {m}")  # noqa: B023
    assert counters["inductor"]["cudagraph_skips"] == 0, counters["inductor"]
    counted(plain or fast, x)
    *first, plainly = made
    assert first[1] == plainly > 0 and first[3:] == [0 if graphs else plainly] * (STEPS - 3), made
    assert make is not async_tp or (tp.replaced and not any(report.left for report in tp.graphs)), str(tp)


MAKES = (functions, layers, styles, async_tp)


@pytest.mark.gpu
@pytest.mark.parametrize("make", MAKES)
def test_replays(make):
    run_ranks(stepped, 2, make=make, graphs=True)


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKES)
def test_steps(make):
    """Without graphs, so that on the CPU heap, too, it is known how many calls a step makes."""
    run_ranks(stepped, 2, make=make, graphs=False)

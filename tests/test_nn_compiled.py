"""fluxlike.nn in what is compiled: activation checkpoints, and tokens whose number changes."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import device, run_ranks
from test_nn import HIDDEN, Sharded, close, model, on_device, parallel, part_of
from test_nn_states import both
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fluxlike.nn import ColwiseParallel, RowwiseParallel

CALLS = [torch.ops.fluxlike.ag_gemm.default, torch.ops.fluxlike.gemm_rs.default]


def like_eager(ours, shard, kept):
    """A checkpoint of a block, compiled, which keeps what the operators ``kept`` make, has the gradients of the block as it is."""
    keep = partial(create_selective_checkpoint_contexts, kept)
    fast = torch.compile(lambda x: checkpoint(ours, x, use_reentrant=False, context_fn=keep), fullgraph=True, backend="aot_eager")
    grads = []
    for run in (ours, fast):
        ours.zero_grad()
        run(shard).square().sum().backward()
        grads.append([p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in ours.parameters()])
    for a, b in zip(*grads, strict=True):
        close(a, b, "a checkpoint, compiled")


@on_device
def compiled_checkpoints(group):
    """What the docs say: a checkpoint in what is compiled keeps the results of the calls, and makes the rest again."""
    mesh = DeviceMesh.from_group(group, device().type)
    models, _, shard = both(group)
    torch._dynamo.reset()
    for ours in (models[0], parallel(model(), mesh)):
        like_eager(ours, shard, CALLS)


def test_checkpoints_in_what_is_compiled():
    run_ranks(compiled_checkpoints, 2)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, 3)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@on_device
def compiled_attention(group):
    """What the docs say: such a checkpoint with torch's attention keeps that, too."""
    torch.manual_seed(0)
    columns = {name: ColwiseParallel() for name in "qkv"}
    ours = parallelize_module(Attention(), DeviceMesh.from_group(group, device().type), columns | {"o": RowwiseParallel()})
    x = torch.randn(2, 4 * dist.get_world_size(group), HIDDEN)
    torch._dynamo.reset()
    attends = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    like_eager(ours, x.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)].clone(), [*CALLS, attends])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the operator is that of CPUs")
def test_attention_in_such_checkpoints():
    run_ranks(compiled_attention, 2)


def compiled_tokens(group):
    """What the docs say: tokens of changing number, which the ranks do not share evenly, in one graph for any number of them."""
    mesh = DeviceMesh.from_group(group, device().type)
    with device():
        whole, styled, ours = model(), parallel(model(), mesh, local=False), Sharded(model(), group, 0, False)
    whole.norm = styled.norm = ours.norm = nn.Identity()
    torch._dynamo.reset()
    styled, ours = (torch.compile(one, fullgraph=True, backend="aot_eager", dynamic=True) for one in (styled, ours))
    with torch._functorch.config.patch(donated_buffer=not torch.__version__.startswith(("2.10.", "2.11."))):
        any_number(whole, styled, ours, mesh)


def any_number(whole, styled, ours, mesh):
    size, rank = mesh.size(), mesh.get_local_rank()
    for tokens in (7, 8, 6, 5, 2, 3):
        x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens)).to(device()).requires_grad_()
        y = whole(x)
        y.square().sum().backward()
        spread = distribute_tensor(x.detach(), mesh, [Shard(0)]).requires_grad_()
        z = styled(spread)
        z.to_local().square().sum().backward()
        close(z.full_tensor(), y, f"{tokens} tokens")
        close(spread.grad.full_tensor(), x.grad, f"gradient of {tokens} tokens")
        close(ours(spread.detach().to_local(), tokens), part_of(y, 0, size, rank), f"{tokens} tokens of a layer")


@pytest.mark.slow
def test_tokens_of_changing_number_in_what_is_compiled():
    run_ranks(compiled_tokens, 2)

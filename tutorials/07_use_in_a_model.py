"""Tutorial 7: tensor and sequence parallelism in a model that knows nothing of it.

The model is a transformer block in plain torch: nn.Linear, nn.LayerNorm, no rank anywhere. parallelize_module shards its weights,
and three lines of plan put its linear layers on ag_gemm and gemm_rs::

    x [B, S/R, D] - norm - wq, wk, wv: one ag_gemm -> [B, S, D/R] - attention of heads/R heads - wo: gemm_rs -> [B, S/R, D]
    x [B, S/R, D] - norm - w1, w3:     one ag_gemm -> [B, S, I/R] - silu(·) · ·                - w2: gemm_rs -> [B, S/R, D]

Between the layers a rank holds its part of the sequence, and norms and residuals work on that alone. Inside, it holds the whole
sequence and its part of the heads, or of the inner size: attention needs no communication of its own.

What calls what, forward and backward:

* SharedGather makes wq, wk and wv one ag_gemm: one gather, three products. Its backward is one gemm_rs, and the input is
  gathered again for the gradients of the weights: beneath it by copy engines, or, of shards below 4 MiB as these, in front of it by
  a kernel. What is kept of the forward is the shard.
* RowwiseParallel makes wo a gemm_rs. Its backward is an ag_gemm, whose gathered input also gives the gradient of the weight.
* The norms' weights are the same on all ranks, but each rank sees its tokens only: their gradients are summed over the ranks by
  hand here. (torch's SequenceParallel style does it with DTensors.)

The check: the unsharded model, which every rank trains beside it on all tokens, from the same weights. Loss by loss they must
agree and, at the end, in what each weight has learnt: to 0.1 % on a CPU, on GPUs, whose float32 attention may be rounder, to 1 %.

Run: bash scripts/launch.sh tutorials/07_use_in_a_model.py [--steps N] [--compile]
"""

import argparse
import copy
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import fluxlike
from fluxlike.nn import RowwiseParallel, SharedGather
from fluxlike.tools import command, turns
from fluxlike.tools.once import Parser, positive

DIM, INNER, HEAD = 32, 64, 4


class Block(nn.Module):
    """A transformer block as anyone writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM) for _ in range(4))
        self.w1, self.w3, self.w2 = nn.Linear(DIM, INNER), nn.Linear(DIM, INNER), nn.Linear(INNER, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        # as many heads as there are here: all of them, or this rank's
        q, k, v = (w(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(heads.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


def sharded(model: Block, mesh: DeviceMesh) -> Block:
    """The plan. Two shared gathers in one module: a style each."""
    for style in (SharedGather("wq", "wk", "wv"), SharedGather("w1", "w3")):
        parallelize_module(model, mesh, style)
    return parallelize_module(model, mesh, {"wo": RowwiseParallel(), "w2": RowwiseParallel()})


def kinds(model: Block) -> list[dict[str, list[nn.Parameter]]]:
    """Parameters that are sharded, and those that are not: an optimizer that updates many at once, as on GPUs, mixes no kinds."""
    parameters = list(model.parameters())
    groups = [[p for p in parameters if isinstance(p, DTensor) == spread] for spread in (True, False)]
    return [{"params": group} for group in groups if group]


def sum_of_norms(model: Block, mesh: DeviceMesh) -> None:
    """Add up the gradients of the parameters that are not sharded."""
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            dist.all_reduce(parameter.grad, group=mesh.get_group())


def main(args: argparse.Namespace) -> int:
    rank, size = dist.get_rank(), dist.get_world_size()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(kind, (size,), mesh_dim_names=("tp",))
    torch.manual_seed(0)  # the same weights and tokens on all ranks
    whole = Block().to(kind)
    model = sharded(copy.deepcopy(whole), mesh["tp"])
    run = torch.compile(model, fullgraph=True, backend="inductor" if kind == "cuda" else "aot_eager") if args.compile else model
    ours, plain = (torch.optim.SGD(kinds(m), lr=0.05, foreach=True) for m in (model, whole))
    start, off = [p.detach().clone() for p in whole.parameters()], []
    for step in range(args.steps):
        x, target = (torch.randn(2, args.tokens, DIM, device=kind) for _ in range(2))
        expected = (whole(x) - target).square().sum() / target.numel()
        expected.backward()
        plain.step()
        plain.zero_grad()

        shard, goal = (t.chunk(size, 1)[rank] for t in (x, target))
        loss = (run(shard) - goal).square().sum() / target.numel()
        loss.backward()
        sum_of_norms(model, mesh["tp"])
        ours.step()
        ours.zero_grad()

        total = loss.detach()
        dist.all_reduce(total)  # each rank has the loss of its tokens
        off.append(((total - expected.detach()).abs() / expected.detach()).item())
        if rank == 0:
            print(f"step {step}: loss {total:.6f}, of the unsharded model {expected:.6f}")
    learnt = [(theirs - before).norm() for theirs, before in zip(whole.parameters(), start, strict=True)]
    least = 0.01 * torch.stack(learnt).max()  # attention does not depend on the bias of wk, which learns nothing but rounding
    for mine, theirs, change in zip(model.parameters(), whole.parameters(), learnt, strict=True):
        mine = mine.full_tensor() if isinstance(mine, DTensor) else mine
        off.append(((mine - theirs).norm() / torch.maximum(change, least)).item())
    failed = torch.tensor(float(not all(one < args.tolerance for one in off)))  # NaN is below nothing
    dist.all_reduce(failed)
    if rank == 0:
        verdict = "check FAILED" if failed.item() else "check passed"
        found = f"losses, and what weights have learnt, differ by at most {100 * max(off):.2g} % on rank 0"
        print(f"{verdict}: after {args.steps} steps {found}")
    return int(failed.item() > 0)


if __name__ == "__main__":
    parser = Parser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=16, help="length of a sequence")
    parser.add_argument("--tolerance", type=float, default=1e-2 if torch.cuda.is_available() else 1e-3)
    parser.add_argument("--compile", action="store_true", help="torch.compile the sharded model")
    args = parser.parse_args()
    positive(parser, args, ("steps", "tokens"))
    turns.refuse_uneven(parser, args, ("tokens",))
    if DIM // HEAD % command.ranks():
        parser.error(f"{command.ranks()} ranks do not divide the {DIM // HEAD} heads; give another --nproc to launch.sh")
    fluxlike.init()
    try:
        status = main(args)
    finally:
        fluxlike.finalize()
    sys.exit(status)

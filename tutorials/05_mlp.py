"""Tutorial 5: a two-layer MLP as a model uses it.

Tensor and sequence parallelism in one picture, R ranks, T tokens, hidden size H, inner size I:

    x_shard [T/R, H] --- up: ag_gemm, weight [I/R, H] ---> h [T, I/R] --- gelu --- down: gemm_rs, weight [H, I/R] ---> [T/R, H]
                         gathers the tokens                                        sums over ranks, scatters the tokens

Between the layers of a model the tokens are spread over the ranks, inside a layer the weights are. The result has the form
of the input, so layers follow each other, and no rank ever holds [T, H] of the result. The bias of `up` is sharded with its
weight; that of `down` belongs to the sum and is added once, by every rank to its own rows.

The contexts are made once, for the largest number of tokens; a call may bring fewer, any number of them. The tokens are
split as torch.chunk splits them: with 37 tokens on 4 ranks 10, 10, 10 and 7, and 1 token leaves three ranks with none. Such
a rank takes part all the same: its columns of `up` are wanted, and its peers wait for its partial sums and its credits.

The signals are those of tutorial 3 (down) and tutorial 4 (up). Each context has its own signals and slots, so a rank may begin
the next layer while its neighbour still finishes this one.

On GPUs the step is also captured in a CUDA graph. A graph repeats its launches with the same arguments, addresses and
numbers for ever; it works because the number of the call is counted on the device (tutorial 1). New input is copied to where
the captured call read it, and the first, uncaptured calls have compiled the kernels.

The check: the unsharded MLP in fp32, which every rank computes for itself, for its rows. The error may be at most 1.5 times
that of the same sharded MLP in plain torch, in the same 16-bit format; a replayed graph must give the bits of the call.

Run: bash scripts/launch.sh tutorials/05_mlp.py [--hidden H] [--inner I] [--tokens T …]
"""

import argparse
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fluxlike
from fluxlike.kernels.tiles import chunk_rows, rows_of
from fluxlike.tools.once import Parser, positive

GPU = {"hidden": [4096], "inner": [14336], "tokens": [4096, 1000, 1, 37, 4096]}
CPU = {"hidden": [96], "inner": [192], "tokens": [64, 37, 1, 64]}
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renamed both
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ColumnParallel(nn.Module):
    """All tokens · this rank's columns. Input: the tokens of this rank."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, max_tokens: int) -> None:
        super().__init__()
        rank, size, (inner, hidden) = dist.get_rank(), dist.get_world_size(), weight.shape
        columns = slice(rank * chunk_rows(inner, size), (rank + 1) * chunk_rows(inner, size))
        self.weight = nn.Parameter(weight[columns].clone(), requires_grad=False)
        self.bias = nn.Parameter(bias[columns].clone(), requires_grad=False)
        self.ctx = fluxlike.create_ag_gemm_context(max_tokens, inner, hidden, dtype=weight.dtype)

    def forward(self, x_shard: torch.Tensor, tokens: int) -> torch.Tensor:
        return fluxlike.ag_gemm(x_shard, self.weight, self.ctx, bias=self.bias, m=tokens)


class RowParallel(nn.Module):
    """The sum over ranks of their columns · their part of the weight. Output: the tokens of this rank."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, max_tokens: int) -> None:
        super().__init__()
        rank, size, (hidden, inner) = dist.get_rank(), dist.get_world_size(), weight.shape
        columns = slice(rank * chunk_rows(inner, size), (rank + 1) * chunk_rows(inner, size))
        self.weight = nn.Parameter(weight[:, columns].clone(), requires_grad=False)
        self.bias = nn.Parameter(bias.clone(), requires_grad=False)
        self.ctx = fluxlike.create_gemm_rs_context(max_tokens, hidden, dtype=weight.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fluxlike.gemm_rs(x, self.weight, self.ctx, bias=self.bias)


def in_torch(x: torch.Tensor, tokens: int, up: ColumnParallel, down: RowParallel) -> torch.Tensor:
    """The same sharded MLP, each step after the other."""
    size, rows = dist.get_world_size(), x.shape[0]
    full = chunk_rows(tokens, size)
    gathered = x.new_empty(full * size, x.shape[1])
    all_gather(gathered, F.pad(x, (0, 0, 0, full - rows)))
    y = x.new_empty(full, x.shape[1])
    reduce_scatter(y, F.gelu(F.linear(gathered, up.weight, up.bias)) @ down.weight.T)
    return y[:rows] + down.bias


def replays_are_right(x: torch.Tensor, tokens: int, up: ColumnParallel, down: RowParallel) -> bool:
    """Capture one step, replay it with new inputs, and compare bits with the uncaptured step."""
    graph, fixed, good = torch.cuda.CUDAGraph(), x.clone(), True
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = down(F.gelu(up(fixed, tokens)))
    for turn in range(5):
        fixed.copy_(x * 0.5**turn)
        graph.replay()
        good &= torch.equal(y, down(F.gelu(up(fixed, tokens))))  # graph and plain calls may alternate
    return good


@torch.no_grad()
def main(args: argparse.Namespace) -> int:
    rank, size, dtype = dist.get_rank(), dist.get_world_size(), torch.bfloat16
    hidden, inner, most = args.hidden[0], args.inner[0], max(args.tokens)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    make = {"generator": torch.Generator(device).manual_seed(0), "device": device, "dtype": dtype}  # the same on all ranks
    w1, b1 = torch.randn(inner, hidden, **make) / hidden**0.5, torch.randn(inner, **make)
    w2, b2 = torch.randn(hidden, inner, **make) / inner**0.5, torch.randn(hidden, **make)
    up, down = ColumnParallel(w1, b1, most), RowParallel(w2, b2, most)
    faults, errors = [], []
    for step, tokens in enumerate(args.tokens):
        x = torch.randn(tokens, hidden, **make)
        start, rows = rank * chunk_rows(tokens, size), rows_of(tokens, size, rank)
        shard = x[start : start + rows]
        y = down(F.gelu(up(shard, tokens)))
        inside = F.gelu(F.linear(x.float(), w1.float(), b1.float()))
        exact = F.linear(inside, w2.float(), b2.float())[start : start + rows]
        pair = [F.pad((r.float() - exact).abs().flatten(), (0, 1)).amax() for r in (y, in_torch(shard, tokens, up, down))]
        error = torch.stack(pair)  # of this rank; 0 where it has no tokens
        dist.all_reduce(error, op=dist.ReduceOp.MAX)
        errors.append(error.tolist())
        if rank == 0:
            ours, torchs = errors[-1]
            paths = f"paths {up.ctx.last_path}, {down.ctx.last_path}"
            print(f"step {step}: {tokens} tokens, largest error {ours:.3g} (in torch {torchs:.3g}), {paths}")
    ours, torchs = (max(of_steps) for of_steps in zip(*errors, strict=True))  # one token alone says too little
    if not ours <= 1.5 * torchs:
        faults.append(f"error {ours:.3g} is more than 1.5 × torch's {torchs:.3g}")
    if device.type == "cuda" and not replays_are_right(shard, tokens, up, down):
        faults.append("a replayed graph gave other bits than the call")
    for layer in (up, down):
        layer.ctx.check()
        layer.ctx.close()
    said: list[list[str]] = [[] for _ in range(size)]
    dist.all_gather_object(said, faults)
    found = "; ".join(f"rank {r}: {fault}" for r, theirs in enumerate(said) for fault in theirs)
    if rank == 0:
        print(f"check FAILED: {found}" if found else f"check passed: {len(args.tokens)} steps agree with the unsharded MLP")
    return int(bool(found))


if __name__ == "__main__":
    parser = Parser()
    for name, default in (GPU if torch.cuda.is_available() else CPU).items():
        parser.add_argument(f"--{name}", type=int, nargs="+" if name == "tokens" else 1, default=default)
    args = parser.parse_args()
    positive(parser, args, CPU)
    fluxlike.init()
    try:
        status = main(args)
    finally:
        fluxlike.finalize()
    sys.exit(status)

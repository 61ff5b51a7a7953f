"""Tutorial 11: the prefill of a model of 70 billion parameters, against torch with NCCL and torch's async TP.

A stack of decoder layers in the shape of Llama 70B: hidden 8192, inner 28672, 64 heads of 128 for queries and 8 for keys and
values, RMSNorm, SwiGLU, causal attention; only the rotary embedding is left out. One sequence of 8192 tokens goes through it, in
inference mode, tensor- and sequence-parallel::

    x [M/R, H] - norm - column(qkv) -> [M, (64 + 2·8)·128/R] - attention of 64/R heads - row(o)    -> [M/R, H]   + x
    x [M/R, H] - norm - column(gate and up) -> [M, 2·I/R]    - silu(gate) · up         - row(down) -> [M/R, H]   + x

`column` gathers the tokens and multiplies, `row` multiplies, sums over ranks and scatters the tokens. All the rest is the same
code, on the same weights, which lie as all of the ways want them: qkv in one matrix, gate and up in one. The ways:

    torch       all_gather_into_tensor, then matmul; matmul, then reduce_scatter_tensor
    async TP    torch.ops.symm_mem.fused_all_gather_matmul and fused_matmul_reduce_scatter (GPUs only)
    ours        fluxlike.ag_gemm and fluxlike.gemm_rs, with a context for each of the four products, which all layers share
    no transfer the same products on what happens to be there: what is left if communication cost nothing. A bound, not a way

The check: the stack in float32, by torch and NCCL. The error of each way may be at most 1.5 times that of `torch`.

Times: the ways take turns (`fluxlike.tools.turns`); medians of the rounds, of the slowest rank, over the number of layers. By
default all 80 layers, or as many as fit. On the CPU heap a toy runs, and times are not reported.

Run: bash scripts/launch.sh tutorials/11_prefill_70b.py [--layers L] [--tokens M] [--rounds N] [--out FILE] …
"""

import argparse
import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

import fluxlike
from fluxlike.tools import turns
from fluxlike.tools.once import Parser, positive, writable

GPU = {"tokens": 8192, "hidden": 8192, "inner": 28672, "heads": 64, "kv_heads": 8, "layers": 0, "rounds": 7}
CPU = {"tokens": 64, "hidden": 64, "inner": 128, "heads": 8, "kv_heads": 4, "layers": 2, "rounds": 1}
MOST, OF_MEMORY = 80, 0.7  # layers of the model; the share of the free memory that their weights may take
DTYPE = torch.bfloat16
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renamed both
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Layer(NamedTuple):
    """Weights of this rank, as nn.Linear has them."""

    norms: torch.Tensor  # [2, H]
    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Way(NamedTuple):
    column: Product
    row: Product


def shapes(args: argparse.Namespace, ranks: int) -> dict[str, tuple[int, int]]:
    hidden, inner = args.hidden, args.inner // ranks
    heads, shared = hidden // ranks, hidden // args.heads * args.kv_heads // ranks
    return {"qkv": (heads + 2 * shared, hidden), "o": (hidden, heads), "gate_up": (2 * inner, hidden), "down": (hidden, inner)}


def attention(qkv: torch.Tensor, args: argparse.Namespace, ranks: int) -> torch.Tensor:
    """[M, the heads of this rank] -> the same of the queries: one sequence, causal."""
    heads = qkv.unflatten(-1, (-1, args.hidden // args.heads)).transpose(0, 1).unsqueeze(0)
    q, k, v = heads.split([n // ranks for n in (args.heads, args.kv_heads, args.kv_heads)], 1)
    if q.dtype is torch.float32:  # for which torch shares heads only in the form that has all scores in memory
        k, v = (t.repeat_interleave(args.heads // args.kv_heads, 1) for t in (k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return y.squeeze(0).transpose(0, 1).flatten(1)


def forward(way: Way, layers: list[Layer], args: argparse.Namespace, x: torch.Tensor) -> torch.Tensor:
    """x: the tokens of this rank [M/R, H]."""
    ranks = dist.get_world_size()
    for layer in layers:
        y = F.rms_norm(x, x.shape[-1:], layer.norms[0].to(x.dtype), 1e-5)
        x = x + way.row(attention(way.column(y, layer.qkv), args, ranks), layer.o)
        y = F.rms_norm(x, x.shape[-1:], layer.norms[1].to(x.dtype), 1e-5)
        gate, up = way.column(y, layer.gate_up).chunk(2, -1)
        x = x + way.row(F.silu(gate) * up, layer.down)
    return x


def in_torch() -> Way:
    """For float32 x the weights are made float32, one at a time."""
    ranks = dist.get_world_size()

    def column(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        whole = x.new_empty(ranks * x.shape[0], x.shape[1])
        all_gather(whole, x)
        return F.linear(whole, weight.to(x.dtype))

    def row(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = x.new_empty(x.shape[0] // ranks, weight.shape[0])
        reduce_scatter(y, F.linear(x, weight.to(x.dtype)))
        return y

    return Way(column, row)


def async_tp() -> Way:
    importlib.import_module("torch.distributed._symmetric_memory")  # defines the ops
    ops, name = torch.ops.symm_mem, dist.group.WORLD.group_name
    return Way(
        lambda x, weight: ops.fused_all_gather_matmul(x, [weight.T], 0, name)[1][0],
        lambda x, weight: ops.fused_matmul_reduce_scatter(x, weight.T, "sum", 0, name),
    )


def ours(args: argparse.Namespace, contexts: dict[str, Any]) -> Way:
    """``contexts``: gets one for each product, by its name. A call finds its own by the shape of the weight."""
    ranks, m, of = dist.get_world_size(), args.tokens, shapes(args, dist.get_world_size())
    for name in ("qkv", "gate_up"):
        contexts[name] = fluxlike.create_ag_gemm_context(m, ranks * of[name][0], args.hidden, dtype=DTYPE)
    for name in ("o", "down"):
        contexts[name] = fluxlike.create_gemm_rs_context(m, args.hidden, ranks * of[name][1], dtype=DTYPE)
    columns, rows = ({of[name]: contexts[name] for name in names} for names in (("qkv", "gate_up"), ("o", "down")))
    return Way(
        lambda x, weight: fluxlike.ag_gemm(x, weight, columns[tuple(weight.shape)]),
        lambda x, weight: fluxlike.gemm_rs(x, weight, rows[tuple(weight.shape)]),
    )


def no_transfer(args: argparse.Namespace, x: torch.Tensor) -> Way:
    whole, rows = x.repeat(dist.get_world_size(), 1), x.shape[0]
    return Way(lambda x, weight: F.linear(whole, weight), lambda x, weight: F.linear(x, weight)[:rows])


def make(args: argparse.Namespace, device: torch.device) -> tuple[torch.Tensor, list[Layer]]:
    """This rank's tokens, and random weights that keep the size of what goes through them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    of = shapes(args, ranks)
    if args.layers == 0:
        free = torch.tensor([torch.cuda.mem_get_info()[0]], device=device)
        dist.all_reduce(free, op=dist.ReduceOp.MIN)
        args.layers = max(1, min(MOST, int(OF_MEMORY * free.item()) // (DTYPE.itemsize * sum(n * k for n, k in of.values()))))
    normal = partial(torch.randn, generator=torch.Generator(device).manual_seed(rank), device=device, dtype=DTYPE)
    depth = {"qkv": args.hidden, "o": args.hidden, "gate_up": args.hidden, "down": args.inner}
    layers = []
    for _ in range(args.layers):
        weights = {name: normal(*of[name]).mul_(depth[name] ** -0.5) for name in of}
        layers.append(Layer(norms=1 + normal(2, args.hidden) / 8, **weights))
    return normal(args.tokens // ranks, args.hidden), layers


def errors(ways: dict[str, Way], layers: list[Layer], args: argparse.Namespace, x: torch.Tensor) -> dict[str, float]:
    """The root mean square of each way's deviation from the stack in float32, over that of the latter, of all ranks."""
    exact = forward(in_torch(), layers, args, x.float())
    squares = [(forward(way, layers, args, x).float() - exact).square().sum() for way in ways.values()]
    total = torch.stack([*squares, exact.square().sum()])
    dist.all_reduce(total)
    return dict(zip(ways, (total[:-1] / total[-1]).sqrt().tolist(), strict=True))


@torch.inference_mode()
def main(args: argparse.Namespace) -> int:
    rank, ranks, cuda = dist.get_rank(), dist.get_world_size(), torch.cuda.is_available()
    say = print if rank == 0 else lambda *_: None
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    x, layers = make(args, device)
    contexts: dict[str, Any] = {}
    ways = {"torch": in_torch(), "ours": ours(args, contexts)}
    if cuda:
        ways["async TP"] = async_tp()
    else:
        say("torch's async TP needs GPUs: left out")
    found = errors(ways, layers, args, x)
    paths = {name: ctx.last_path for name, ctx in contexts.items()}
    say(f"{args.layers} layers, {args.tokens} tokens, {ranks} ranks; ours by " + ", ".join(f"{n}: {p}" for n, p in paths.items()))
    calls = {name: partial(forward, way, layers, args, x) for name, way in {**ways, "no transfer": no_transfer(args, x)}.items()}
    rounds = turns.in_turns(calls, args.rounds)
    ms = {name: turns.median([t / args.layers for t in times]) for name, times in rounds.items()}
    if cuda:
        for name, each in ms.items():
            say(f"{name:<12} {each:8.3f} ms a layer   torch / this = {ms['torch'] / each:.3f}")
    else:
        say("the times are those of an interpreter and mean nothing")
    for ctx in contexts.values():
        ctx.check()
        ctx.close()
    good = all(error <= 1.5 * found["torch"] for error in found.values())  # NaN is not
    text = ", ".join(f"{name} {error:.2g}" for name, error in found.items())
    say(f"check {'passed' if good else 'FAILED'}: against float32 the ways are off by {text}; allowed is 1.5 × torch's")
    if args.out and rank == 0:
        sizes = {name: getattr(args, name) for name in GPU}
        facts = {"ranks": ranks, "dtype": "bfloat16", "sizes": sizes, "ms_a_layer": ms, "rounds_ms": rounds, "errors": found}
        turns.record(Path(args.out), "tutorials/11_prefill_70b.py", {**facts, "paths": paths})
    return int(not good)


if __name__ == "__main__":
    parser = Parser()
    for name, default in (GPU if torch.cuda.is_available() else CPU).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", metavar="FILE", help="write a record there, as JSON")
    args = parser.parse_args()
    turns.refuse_uneven(parser, args, ("kv_heads", "tokens", "inner"))
    turns.refuse_heads(parser, args)
    positive(parser, args, CPU.keys() - {"layers"})
    writable(parser, args.out, file=True)
    if args.layers < (0 if torch.cuda.is_available() else 1):
        parser.error(f"--layers {args.layers}: 0 is as many as a GPU has memory for; without GPUs give a number above 0")
    fluxlike.init()
    try:
        status = main(args)
    finally:
        fluxlike.finalize()
    sys.exit(status)

"""Tutorial 12: a compiled model under torch's own parallel styles, as it is, with torch's pass and with AsyncTP.

The model is decoder layers in the shape of Llama 70B under torch's ColwiseParallel, RowwiseParallel and SequenceParallel: a gather
in front of attention and of feed-forward, a scatter behind each, no line of fluxlike. Compiled, it is graphs in which all_gather
stands before matrix products and reduce_scatter behind them. Three ways to compile it:

    plain       as it is: transfer, then product
    torch       ``torch._inductor.config._micro_pipeline_tp``: torch's pass, which puts in torch.ops.symm_mem.fused_… (GPUs only)
    AsyncTP     ``options=fluxlike.nn.AsyncTP(even=True).options``: ours, which puts in ag_gemm and gemm_rs

torch's pass knows fewer forms of gather and scatter than AsyncTP. So that it finds as many as it can, the activations are
[S, B, D], spread along dimension 0, layers that share an input share one gather, and there are no biases.

What is told of each way: the collectives that are left in the graphs of the forward and the backward of a step, and of a forward
without gradients; and the times of a step and of such a forward, in turn (`fluxlike.tools.turns`), medians of the slowest rank,
over the number of layers. And what AsyncTP says of itself: what it found in each graph, and what it replaced.

The check: results and gradients against the same model in a wider dtype, uncompiled. Their errors may be 1.5 times those of the
model uncompiled in its own dtype, and AsyncTP must leave no collective. On the CPU heap a toy takes a step in float32, on graphs
without a compiler of kernels; times are not reported.

Run: bash scripts/launch.sh tutorials/12_async_tp.py [--layers L] [--tokens S] [--rounds N] [--out FILE] …
"""

import argparse
import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import fluxlike
from fluxlike.nn import AsyncTP
from fluxlike.tools import turns
from fluxlike.tools.once import Parser, positive, writable

GPU = {"tokens": 8192, "hidden": 8192, "inner": 28672, "heads": 64, "kv_heads": 8, "layers": 2, "rounds": 7}
CPU = {"tokens": 16, "hidden": 32, "inner": 64, "heads": 8, "kv_heads": 4, "layers": 1, "rounds": 1}
ALLOWED = 1.5  # times the error of the model uncompiled
COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor")


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.head = args.hidden // args.heads
        self.q, self.o = (nn.Linear(args.hidden, args.hidden, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(args.hidden, args.kv_heads * self.head, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head)).permute(1, 2, 0, 3) for w in (self.q, self.k, self.v))
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.permute(2, 0, 1, 3).flatten(2))


class Feed(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(args.hidden, args.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(args.inner, args.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(args.hidden), Norm(args.hidden)
        self.attention, self.feed = Attention(args), Feed(args)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


def spread(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    """torch's own styles; the first layer takes this rank's tokens as a plain tensor."""
    rows, whole = Shard(0), Replicate()
    plan: dict[str, Any] = {"0": PrepareModuleInput(input_layouts=rows, desired_input_layouts=rows)}
    for i in range(len(model)):
        plan |= {f"{i}.norm{n}": SequenceParallel(sequence_dim=0) for n in (1, 2)}
        plan |= {f"{i}.{n}": PrepareModuleInput(input_layouts=rows, desired_input_layouts=whole) for n in ("attention", "feed")}
        plan |= {f"{i}.{name}": ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v", "feed.gate", "feed.up")}
        row = RowwiseParallel(output_layouts=rows, use_local_output=False)
        plan |= {f"{i}.{name}": row for name in ("attention.o", "feed.down")}
    return parallelize_module(model, mesh, plan)


class Left(CustomGraphPass):
    """Runs behind the other passes: counts the collectives that are in each graph."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.counts.append(sum(any(name in str(node.target) for name in COLLECTIVES) for node in graph.nodes))

    def uuid(self) -> None:
        """Keeps inductor from its cache: no pass sees a graph that comes from there."""


def ways(cuda: bool, group: dist.ProcessGroup) -> dict[str, dict[str, Any]]:
    """The options of torch.compile."""
    always = {} if cuda else {"fallback_by_default": True, "compile_threads": 1}
    found = {"plain": {}, "AsyncTP": AsyncTP(even=True).options}
    if cuda:
        symmetric = importlib.import_module("torch.distributed._symmetric_memory")
        symmetric.enable_symm_mem_for_group(group.group_name)
        found["torch"] = {"_micro_pipeline_tp": True}
    return {name: {**always, **options, "post_grad_custom_post_pass": Left()} for name, options in found.items()}


def forward(run: Callable, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return run(x).to_local()


def trained(run: Callable, model: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    y = run(x).to_local()
    y.backward(dy)
    return y.detach()


def off(found: list[torch.Tensor], right: list[torch.Tensor]) -> list[float]:
    """Of each the deviation of this rank's part, over the size of ``right``: 2-norms."""
    return [((a - b).norm() / b.norm()).item() for a, b in zip(found, right, strict=True)]


def results(run: Callable, model: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """Of a step the result and the gradients, and on GPUs of a forward alone the result; this rank's parts, in a wide dtype."""
    found = [trained(run, model, x, dy), *[p.grad for p in model.parameters()]]
    if x.is_cuda:
        found.append(forward(run, x))
    parts = [t if not isinstance(t, DTensor) else t.full_tensor() if t.placements[0].is_partial() else t.to_local() for t in found]
    return [part.to(torch.promote_types(part.dtype, torch.float32)).clone() for part in parts]


def main(args: argparse.Namespace) -> int:
    rank, ranks, cuda = dist.get_rank(), dist.get_world_size(), torch.cuda.is_available()
    say = print if rank == 0 else lambda *_: None
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    dtype, exact = (torch.bfloat16, torch.float32) if cuda else (torch.float32, torch.float64)
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("tp",))["tp"]
    torch.manual_seed(0)  # the same weights on all ranks
    with device:
        model = spread(nn.Sequential(*[Layer(args) for _ in range(args.layers)]).to(dtype), mesh)
        generator = torch.Generator(device).manual_seed(rank + 1)
        x, dy = (torch.randn(args.tokens // ranks, 1, args.hidden, generator=generator, dtype=dtype) for _ in range(2))
    right = results(model.to(exact), model, x.to(exact), dy.to(exact))
    noise = off(results(model.to(dtype), model, x, dy), right)
    options = ways(cuda, mesh.get_group())
    if not cuda:
        say("torch's pass needs GPUs: left out")
    runs = {name: torch.compile(model, fullgraph=True, options=how) for name, how in options.items()}
    faults, left = [], {}
    for name, run in runs.items():
        errors = off(results(run, model, x, dy), right)
        worst = max(mine / max(its, torch.finfo(dtype).eps) for mine, its in zip(errors, noise, strict=True))
        left[name] = options[name]["post_grad_custom_post_pass"].counts
        say(f"{name:<8} collectives in the graphs: {left[name]}; largest error, over that of the model uncompiled: {worst:.2f}")
        faults += [f"{name} is off by {worst:.3g} times what the model uncompiled is"] * (not worst <= ALLOWED)
    if not (left["AsyncTP"] and left["plain"]):
        faults.append("torch has compiled no graph behind which collectives were counted")
    if any(left["AsyncTP"]):
        faults.append(f"AsyncTP leaves {left['AsyncTP']} of {left['plain']} collectives")
    if ranks > 1 and not all(left["plain"]):
        faults.append(f"without it there are {left['plain']} collectives, in some graph none: there was nothing to replace")
    say(str(options["AsyncTP"]["post_grad_custom_pre_pass"]))
    kinds = {"step": lambda run: partial(trained, run, model, x, dy)}
    if cuda:
        kinds["forward"] = lambda run: partial(forward, run, x)
    rounds = {kind: turns.in_turns({name: of(run) for name, run in runs.items()}, args.rounds) for kind, of in kinds.items()}
    ms = {kind: {n: turns.median([t / args.layers for t in times]) for n, times in each.items()} for kind, each in rounds.items()}
    for kind, each in ms.items() if cuda else ():
        for name, one in each.items():
            say(f"{kind:<8} {name:<8} {one:8.3f} ms a layer   plain / this = {each['plain'] / one:.3f}")
    said: list[list[str]] = [[] for _ in range(ranks)]
    dist.all_gather_object(said, faults)
    found = "; ".join(f"rank {r}: {fault}" for r, theirs in enumerate(said) for fault in theirs)
    say(f"check FAILED: {found}" if found else "check passed: AsyncTP left no collective, and results and gradients are right")
    if args.out and rank == 0:
        sizes = {name: getattr(args, name) for name in GPU}
        facts = {"ranks": ranks, "dtype": str(dtype).removeprefix("torch."), "sizes": sizes, "collectives": left, "faults": found}
        turns.record(Path(args.out), "tutorials/12_async_tp.py", {**facts, "ms_a_layer": ms, "rounds_ms": rounds})
    return int(bool(found))


if __name__ == "__main__":
    parser = Parser()
    for name, default in (GPU if torch.cuda.is_available() else CPU).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", metavar="FILE", help="write a record there, as JSON")
    args = parser.parse_args()
    turns.refuse_uneven(parser, args, ("kv_heads", "tokens", "inner"))
    turns.refuse_heads(parser, args)
    positive(parser, args, CPU)
    writable(parser, args.out, file=True)
    fluxlike.init()
    try:
        status = main(args)
    finally:
        fluxlike.finalize()
    sys.exit(status)

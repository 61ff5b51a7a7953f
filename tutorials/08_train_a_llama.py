"""Tutorial 8: train a Llama of Hugging Face's transformers, tensor- and sequence-parallel, without a change to it.

Needs ``pip install transformers``, which is no requirement of fluxlike: without it the tutorial says so and does nothing.

transformers' own tensor parallelism replicates the activations between the layers. Here they are spread along the sequence, and
the transfers of attention, feed-forward and lm_head are part of a gemm_rs or ag_gemm. What the plan must see to is that the
model's own code takes shapes from its activations (``hidden_states.shape[:-1]``, then ``q.view(…)``): a plain shard would have
the wrong ones. So the activations are DTensors, whose shape is that of the whole::

    embed_tokens    torch's RowwiseParallel: tokens in, the residual stream out, a DTensor along the sequence, Shard(1)
    norms           torch's SequenceParallel: DTensor in and out; sums the gradients of their weights over the ranks by itself
    q, k, v_proj    SharedGather: DTensor in, plain out: all tokens and this rank's heads, as the attention wants them
    o_proj          RowwiseParallel: plain in, DTensor out
    gate, up_proj   SharedGather;   down_proj   RowwiseParallel
    lm_head         ColwiseParallel: the logits are a DTensor along the vocabulary, and loss_parallel never gathers them

On GPUs products and attention are in bfloat16, by torch.autocast, and weights, norms and the loss in float32. The text is made up:
a token is followed by one of four others, so the loss falls from log(vocabulary) towards log(4) = 1.39.

The check: runs without sharding, which every rank makes beside it from the same weights on the same tokens: *exact*, all in
float32, and for bfloat16 also *plain*, in bfloat16 as the sharded run. What plain is off by is the noise of the dtype, and the
sharded run may be off by three times that: it rounds the sums over the ranks on their way, which alone makes √2 of it, and two
draws of noise differ. That goes for the losses of all steps, as a root mean square, and for each parameter's gradient in the first
step. There a wrong one shows that the losses would hide: AdamW makes up for a factor. In float32, without noise, TOLERANCE is
allowed.

Run: bash scripts/launch.sh tutorials/08_train_a_llama.py [--layers L] [--steps N] [--tokens T] [--dtype D] [--out DIR] …
"""

import argparse
import copy
import os
import sys
import time
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as torchs
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

import fluxlike
from fluxlike.nn import ColwiseParallel, RowwiseParallel, SharedGather
from fluxlike.tools import turns
from fluxlike.tools.once import Parser, positive, writable

GPU = {"hidden": 1024, "inner": 2816, "layers": 4, "heads": 16, "vocabulary": 4096, "batch": 4, "tokens": 1024, "steps": 200}
CPU = {"hidden": 32, "inner": 64, "layers": 2, "heads": 8, "vocabulary": 64, "batch": 2, "tokens": 8, "steps": 2}
FOLLOWERS, TIMES_THE_NOISE, RATE = 4, 3.0, 1e-3
TOLERANCE = 1e-4  # relative, of float32 and its order of sums


def sharded(model: Any, mesh: DeviceMesh) -> Any:
    """The plan for any number of layers."""
    down = RowwiseParallel(use_local_output=False)
    plan = {
        "model.embed_tokens": torchs.RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
        ),
        "model.layers.*.input_layernorm": torchs.SequenceParallel(),
        "model.layers.*.self_attn": SharedGather("q_proj", "k_proj", "v_proj"),
        "model.layers.*.self_attn.o_proj": down,
        "model.layers.*.post_attention_layernorm": torchs.SequenceParallel(),
        "model.layers.*.mlp": SharedGather("gate_proj", "up_proj"),
        "model.layers.*.mlp.down_proj": down,
        "model.norm": torchs.SequenceParallel(),
        "lm_head": ColwiseParallel(use_local_output=False),
    }
    return parallelize_module(model, mesh, plan)


def text(args: argparse.Namespace) -> torch.Tensor:
    """[steps, batch, tokens + 1], the same on all ranks: random walks over a random graph."""
    generator = torch.Generator().manual_seed(1)
    follows = torch.randint(args.vocabulary, (args.vocabulary, FOLLOWERS), generator=generator)
    walk = [torch.randint(args.vocabulary, (args.steps, args.batch), generator=generator)]
    for _ in range(args.tokens):
        walk.append(follows[walk[-1], torch.randint(FOLLOWERS, walk[0].shape, generator=generator)])
    return torch.stack(walk, -1)


class Run:
    """One of the models that are trained beside each other."""

    def __init__(self, model: Any, dtype: torch.dtype, kind: str) -> None:
        self.model, self.dtype, self.kind = model, dtype, kind
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        self.losses: list[float] = []

    def backward(self, tokens: torch.Tensor) -> None:
        is_spread = isinstance(next(self.model.parameters()), DTensor)
        autocast = torch.autocast(self.kind, self.dtype, enabled=self.dtype is not torch.float32)
        with loss_parallel() if is_spread else nullcontext():
            with autocast:
                logits = self.model(tokens[:, :-1]).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
        self.losses.append((loss.full_tensor() if is_spread else loss).item())

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self) -> dict[str, torch.Tensor]:
        grads = {name: p.grad for name, p in self.model.named_parameters()}
        return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items()}


def off(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Root mean square of the deviation, over that of ``exact``."""
    return ((actual - exact).double().square().mean() / exact.double().square().mean()).sqrt().item()


def allowed(noise: float) -> float:
    return max(TIMES_THE_NOISE * noise, TOLERANCE)


def gradient_faults(runs: dict[str, Run]) -> list[str]:
    """The parameters whose gradients are off by more than they may be; says by how much the worst is."""
    ours, plain, exact = (run.gradients() for run in (runs["sharded"], runs.get("plain", runs["exact"]), runs["exact"]))
    found = {name: (off(ours[name], exact[name]), off(plain[name], exact[name])) for name in exact}
    worst = max(found, key=lambda name: found[name][0] / allowed(found[name][1]))
    if dist.get_rank() == 0:
        print(f"gradients of step 0: of {worst} off by {found[worst][0]:.2g}, by noise {found[worst][1]:.2g}")
    return [f"the gradient of {name} is off by {mine:.2g}" for name, (mine, noise) in found.items() if not mine <= allowed(noise)]


def record(runs: dict[str, Run], args: argparse.Namespace, facts: dict[str, Any], out: Path) -> None:
    """The losses as JSON and, where matplotlib is there, as a picture."""
    ranks, losses = dist.get_world_size(), {name: run.losses for name, run in runs.items()}
    sizes = {name: getattr(args, name) for name in GPU}
    name = f"llama-{args.dtype}-R{ranks}"
    facts = {"ranks": ranks, "dtype": args.dtype, "sizes": sizes, "learning_rate": RATE, **facts, "losses": losses}
    turns.record(out / f"{name}.json", "tutorials/08_train_a_llama.py", facts)
    if find_spec("matplotlib") is None:
        print("no picture: matplotlib is missing; python -m pip install matplotlib")
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    curves, noise = figure.subplots(1, 2)
    for (label, values), style in zip(losses.items(), ("-", "--", ":"), strict=False):
        curves.plot(values, style, label=label)
    for label in [label for label in losses if label != "exact"]:
        noise.semilogy([abs(a - b) or None for a, b in zip(losses[label], losses["exact"], strict=True)], label=label, lw=0.8)
    curves.set_ylabel("loss")
    noise.set_ylabel("difference to the loss of exact")
    for axes in (curves, noise):
        axes.set_xlabel("step")
        axes.legend()
    figure.suptitle(f"{args.layers} layers of {args.hidden}, {args.dtype}, {ranks} ranks", fontsize=10)
    figure.savefig(out / f"{name}.png", dpi=150)


def main(args: argparse.Namespace) -> int:
    from transformers import LlamaConfig, LlamaForCausalLM

    rank, size = dist.get_rank(), dist.get_world_size()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(kind, (size,), mesh_dim_names=("tp",))
    config = LlamaConfig(
        hidden_size=args.hidden, intermediate_size=args.inner, num_hidden_layers=args.layers, num_attention_heads=args.heads,
        num_key_value_heads=args.heads // 2, vocab_size=args.vocabulary, max_position_embeddings=args.tokens, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)  # the same weights on all ranks
    whole = LlamaForCausalLM(config).to(kind, torch.float32)
    dtype = getattr(torch, args.dtype)
    runs = {"sharded": Run(sharded(copy.deepcopy(whole), mesh["tp"]), dtype, kind)}
    if dtype is not torch.float32:
        runs["plain"] = Run(copy.deepcopy(whole), dtype, kind)
    runs["exact"] = Run(whole, torch.float32, kind)
    faults, since = [], time.perf_counter()
    for step, tokens in enumerate(text(args).to(kind)):
        for run in runs.values():
            run.backward(tokens)
        if step == 0:
            faults += gradient_faults(runs)
        for run in runs.values():
            run.step()
        if rank == 0 and (step % max(1, args.steps // 10) == 0 or step == args.steps - 1):
            print(f"step {step}: loss {', '.join(f'{run.losses[-1]:.6f} {name}' for name, run in runs.items())}")
    seconds = time.perf_counter() - since
    losses = {name: torch.tensor(run.losses, dtype=torch.float64) for name, run in runs.items()}
    ours, exact = losses["sharded"], losses["exact"]
    deviation, noise = off(ours, exact), off(losses.get("plain", exact), exact)
    if not deviation <= allowed(noise):
        faults.append(f"the losses are off by {deviation:.2g}, by noise {noise:.2g}")
    if args.steps >= 100 and not ours[-10:].mean() < ours[0] - 1:
        faults.append(f"the loss fell only from {ours[0]:.3g} to {ours[-10:].mean():.3g}")
    said: list[list[str]] = [[] for _ in range(size)]
    dist.all_gather_object(said, faults)
    found = "; ".join(f"rank {r}: {fault}" for r, theirs in enumerate(said) for fault in theirs)
    if rank == 0:
        passed = f"check passed: in {args.steps} steps the losses are off by {deviation:.2g}, by noise {noise:.2g}"
        print(f"check FAILED: {found}" if found else passed)
        if args.out:
            record(runs, args, {"off": deviation, "noise": noise, "seconds": seconds, "faults": found}, Path(args.out))
    return int(bool(found))


if __name__ == "__main__":
    if find_spec("transformers") is None:
        print("not run: this tutorial needs transformers; pip install transformers")
        sys.exit(0)
    parser = Parser()
    for name, default in (GPU if torch.cuda.is_available() else CPU).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--out", metavar="DIR", help="write the losses there, as JSON and as a picture")
    args, size = parser.parse_args(), int(os.environ.get("WORLD_SIZE", "1"))
    positive(parser, args, CPU)
    writable(parser, args.out)
    if args.heads < 2 or any(n % size for n in (args.heads // 2, args.inner, args.vocabulary, args.tokens)):
        parser.error(f"half of --heads, --inner, --vocabulary and --tokens must be multiples of the {size} ranks; pass others")
    fluxlike.init()
    try:
        status = main(args)
    finally:
        fluxlike.finalize()
    sys.exit(status)

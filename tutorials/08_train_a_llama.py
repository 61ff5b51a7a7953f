"""Tutorial 8: train a Llama of Hugging Face's transformers, tensor- and sequence-parallel, without a change to it.

Needs ``pip install transformers``, which is no requirement of fluxlike: without it the tutorial says so and does nothing.

transformers' own tensor parallelism replicates the activations between the layers. Here they are spread along the sequence, and
every transfer is hidden under a product of gemm_rs or ag_gemm. What the plan must see to is that the model's own code takes
shapes from its activations (``hidden_states.shape[:-1]``, then ``q.view(…)``): a plain shard would have the wrong ones. So the
activations are DTensors, whose shape is that of the whole::

    embed_tokens    torch's RowwiseParallel: tokens in, the residual stream out, a DTensor along the sequence, Shard(1)
    norms           torch's SequenceParallel: DTensor in and out; sums the gradients of their weights over the ranks by itself
    q, k, v_proj    SharedGather: DTensor in, plain out: all tokens and this rank's heads, as the attention wants them
    o_proj          RowwiseParallel: plain in, DTensor out
    gate, up_proj   SharedGather;   down_proj   RowwiseParallel
    lm_head         ColwiseParallel: the logits are a DTensor along the vocabulary, and loss_parallel never gathers them

The check: the unsharded model, which every rank trains beside it from the same weights on the same tokens: the loss of each step.

Run: bash scripts/launch.sh tutorials/08_train_a_llama.py [--layers L] [--steps N] [--tokens T]
"""

import argparse
import copy
import sys
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as torchs
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

import fluxlike
from fluxlike.nn import ColwiseParallel, RowwiseParallel, SharedGather


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


def main(args: argparse.Namespace) -> int:
    from transformers import LlamaConfig, LlamaForCausalLM

    rank, size = dist.get_rank(), dist.get_world_size()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(kind, (size,), mesh_dim_names=("tp",))
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=args.layers, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=64, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)  # the same weights and tokens on all ranks
    whole = LlamaForCausalLM(config).to(kind)
    model = sharded(copy.deepcopy(whole), mesh["tp"])
    ours, plain = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, whole))
    tokens = torch.randint(config.vocab_size, (2, args.tokens + 1), device=kind)
    inputs, labels = tokens[:, :-1], tokens[:, 1:].flatten()
    worst = 0.0
    for step in range(args.steps):
        expected = F.cross_entropy(whole(inputs).logits.flatten(0, 1), labels)
        expected.backward()
        with loss_parallel():
            loss = F.cross_entropy(model(inputs).logits.flatten(0, 1), labels)
            loss.backward()
        for optimizer in (ours, plain):
            optimizer.step()
            optimizer.zero_grad()
        total = loss.full_tensor().item()
        worst = max(worst, abs(total - expected.item()))
        if rank == 0:
            print(f"step {step}: loss {total:.6f}, of the unsharded model {expected.item():.6f}")
    failed = torch.tensor(float(not worst < args.tolerance))
    dist.all_reduce(failed)
    if rank == 0:
        verdict = "check FAILED" if failed.item() else "check passed"
        print(f"{verdict}: in {args.steps} steps the losses differ by at most {worst:.2g} on rank 0")
    return int(failed.item() > 0)


if __name__ == "__main__":
    if find_spec("transformers") is None:
        print("not run: this tutorial needs transformers; pip install transformers")
        sys.exit(0)
    fluxlike.init()
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8, help="length of a sequence, a multiple of the ranks")
    parser.add_argument("--tolerance", type=float, default=1e-2 if torch.cuda.is_available() else 1e-4)
    try:
        status = main(parser.parse_args())
    finally:
        fluxlike.finalize()
    sys.exit(status)

"""The checks of a call's tensors: each error says what is wrong, the value, the rule and the remedy."""

from typing import Any

import torch
import torch.distributed as dist

from ..kernels.tiles import rows_of
from ..runtime import world
from ..runtime.control import ControlGroup
from . import tiling
from .context import DTYPES, Context


def context(op: str, ctx: Any, kind: type[Context]) -> None:
    """ctx is None or a context of this operation."""
    if ctx is not None and not isinstance(ctx, kind):
        found = getattr(ctx, "op", type(ctx).__name__)
        raise ValueError(f"{op}: ctx is of {found!r}, it must come from fluxlike.create_{op}_context")


def gathered_operands(
    x_shard: torch.Tensor, weight: Any, bias: Any, m: int | None, control: ControlGroup
) -> tuple[list[torch.Tensor], list[torch.Tensor | None], int]:
    """The operands of ag_gemm: the weights and biases as lists of one length, and M, which the shard must fit."""
    weights = list(weight) if isinstance(weight, (list, tuple)) else [weight]
    biases = list(bias) if isinstance(bias, (list, tuple)) else [bias] * len(weights)
    if not weights or len(biases) != len(weights):
        raise ValueError(
            f"ag_gemm: {len(weights)} weights and {len(biases)} biases; give at least one weight, and a bias or None for each"
        )
    for w, b in zip(weights, biases, strict=True):
        operands("ag_gemm", x_shard, w, b)
    rows, ranks = x_shard.shape[0], control.size
    m = rows * ranks if m is None else m
    if m < 0 or rows_of(m, ranks, control.rank) != rows:
        raise ValueError(
            f"ag_gemm: this rank holds {rows} of m={m} rows, and torch.chunk gives rank {control.rank} of {ranks} "
            f"{rows_of(max(m, 0), ranks, control.rank)}; split the rows as torch.chunk does and pass m, the rows of all ranks"
        )
    return weights, biases, m


def operands(op: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """x [M, K], weight [N, K], bias [N]: dtypes, devices, shapes and strides."""
    device = world.current().device
    for name, t, dims in (("x", x, 2), ("weight", weight, 2), ("bias", bias, 1)):
        if t is None and name == "bias":
            continue
        if not isinstance(t, torch.Tensor) or t.dim() != dims:
            shape = tuple(t.shape) if isinstance(t, torch.Tensor) else type(t).__name__
            raise ValueError(f"{op}: {name} is {shape}, it must be a tensor of {dims} dimensions; use .reshape or .flatten")
        if t.device != device:
            raise ValueError(f"{op}: {name} is on {t.device}, this rank's heap is on {device}; use {name}.to({str(device)!r})")
    if x.dtype not in DTYPES:
        raise ValueError(f"{op}: x has dtype {x.dtype}, it must be bfloat16, float16 or float32; use x.to(torch.bfloat16)")
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.dtype != x.dtype:
            raise ValueError(f"{op}: {name} has dtype {t.dtype}, x {x.dtype}; they must be the same, use {name}.to({x.dtype})")
    if x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"{op}: x is {tuple(x.shape)} and weight {tuple(weight.shape)}, their second sizes (K) must be equal; weight is "
            "[N, K] as in torch.nn.Linear, so pass weight.T if it is [K, N]"
        )
    if bias is not None and (bias.shape[0] != weight.shape[0] or (bias.stride(0) != 1 and bias.shape[0] > 1)):
        raise ValueError(
            f"{op}: bias is {tuple(bias.shape)} with stride {bias.stride()}; it must be [{weight.shape[0]}] (N), contiguous"
        )
    if x.numel() and x.stride(1) != 1 and x.shape[1] > 1:
        raise ValueError(f"{op}: x has strides {x.stride()}, its rows must be contiguous (stride 1 along K); use x.contiguous()")
    if weight.numel() and not tiling.is_row_major(weight) and weight.stride(0) != 1 and weight.shape[0] > 1:
        raise ValueError(
            f"{op}: weight has strides {weight.stride()}, it must be row-major or the transposed view of a row-major tensor; use "
            "weight.contiguous()"
        )


def call(op: str, ctx: Context, group: dist.ProcessGroup | None, x: torch.Tensor, sizes: dict[str, tuple[int, int, str]]) -> None:
    """The call fits the context: state, group, dtype, and each size (value, limit, name of the limit)."""
    ctx.raise_if_failed()
    if group is not None and dist.get_process_group_ranks(group) != ctx.group_ranks:
        raise ValueError(
            f"{op}: group has ranks {dist.get_process_group_ranks(group)} and the context {ctx.group_ranks}; pass one of them, or "
            "a context of that group"
        )
    if x.dtype != ctx.dtype:
        raise ValueError(f"{op}: x has dtype {x.dtype} and the context {ctx.dtype}; make a context with dtype={x.dtype}")
    for name, (value, limit, argument) in sizes.items():
        if value > limit:
            raise ValueError(
                f"{op}: {name}={value} is more than the context's {argument}={limit}; make a context with {argument}={value}"
            )


def output(op: str, out: torch.Tensor | None, shape: tuple[int, int], like: torch.Tensor) -> torch.Tensor:
    """``out`` checked, or a new tensor."""
    if out is None:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    if tuple(out.shape) != shape or out.dtype != like.dtype or out.device != like.device or not out.is_contiguous():
        raise ValueError(
            f"{op}: out is {tuple(out.shape)} {out.dtype} on {out.device} with strides {out.stride()}, it must be {shape} "
            f"{like.dtype} on {like.device}, row-major; leave it out to get a new tensor"
        )
    return out

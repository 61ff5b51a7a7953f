"""The operations in plain torch.distributed, with the signatures and errors of the fast ones: for tests, and to read.

They use the host freely and hide nothing. Sums over ranks are made in fp32, so they are also a little more exact than
``torch.matmul`` + ``reduce_scatter_tensor`` in a 16-bit dtype. They are without gradients: results want none, whatever the inputs.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..kernels.tiles import rows_of
from ..runtime.control import ControlGroup
from . import validate
from .group import resolve


@torch.no_grad()
def gemm_ar(
    x: torch.Tensor,
    weight: torch.Tensor,
    ctx: Any = None,
    *,
    bias: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`fluxlike.gemm_ar` by one fp32 product and one fp32 all-reduce."""
    validate.operands("gemm_ar", x, weight, bias)
    control = resolve(group) if ctx is None else ctx.control
    return validate.output("gemm_ar", out, (x.shape[0], weight.shape[0]), x, weight, bias).copy_(_total(x, weight, bias, control))


@torch.no_grad()
def gemm_rs(
    x: torch.Tensor,
    weight: torch.Tensor,
    ctx: Any = None,
    *,
    bias: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`fluxlike.gemm_rs` by one fp32 product, one fp32 all-reduce and a slice."""
    validate.operands("gemm_rs", x, weight, bias)
    control = resolve(group) if ctx is None else ctx.control
    m, n = x.shape[0], weight.shape[0]
    rows = rows_of(m, control.size, control.rank)
    y = validate.output("gemm_rs", out, (rows, n), x, weight, bias)
    start = control.rank * -(-m // control.size)
    return y.copy_(_total(x, weight, bias, control)[start : start + rows])


def _total(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, control: ControlGroup) -> torch.Tensor:
    """Σ_ranks x · weightᵀ (+ bias) in fp32, on all ranks."""
    total = x.float() @ weight.float().T
    dist.all_reduce(total, group=control.group)
    return total if bias is None else total + bias.float()


@torch.no_grad()
def ag_gemm(
    x_shard: torch.Tensor,
    weight: torch.Tensor | Sequence[torch.Tensor],
    ctx: Any = None,
    *,
    bias: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    group: dist.ProcessGroup | None = None,
    return_gathered: bool = False,
    m: int | None = None,
) -> Any:
    """`fluxlike.ag_gemm` by one all-gather of shards padded to equal size and one product a weight."""
    control = resolve(group) if ctx is None else ctx.control
    weights, biases, m = validate.gathered_operands(x_shard, weight, bias, m, control)
    full = -(-m // control.size)
    padded = x_shard.new_zeros(full, x_shard.shape[1])
    padded[: x_shard.shape[0]] = x_shard
    parts = [torch.empty_like(padded) for _ in range(control.size)]
    dist.all_gather(parts, padded, group=control.group)
    gathered = torch.cat(parts)[:m]
    results = []
    for w, b in zip(weights, biases, strict=True):
        z = gathered.float() @ w.float().T
        results.append((z if b is None else z + b.float()).to(x_shard.dtype))
    result: Any = results[0] if isinstance(weight, torch.Tensor) else results
    return (result, gathered) if return_gathered else result

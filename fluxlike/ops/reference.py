"""The operations in plain torch.distributed, with the signatures and errors of the fast ones: for tests, and to read.

They use the host freely and hide nothing. Sums over ranks are made in fp32, so they are also a little more exact than
``torch.matmul`` + ``reduce_scatter_tensor`` in a 16-bit dtype. They are without gradients: results want none, whatever the inputs.
What one rank does wrong, and sizes that differ between ranks, are an error on all.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..kernels.tiles import chunk_rows, rows_of
from ..runtime.control import ControlGroup
from . import validate
from .ag_gemm import AGGemmContext
from .exchange import EpochContext
from .gemm_ar import GemmARContext
from .gemm_rs import GemmRSContext
from .group import resolve
from .nodes_context import NodesContext
from .sparse_arguments import NAME, check
from .sparse_index import entries_of


def _plainly(run: Callable[..., Any]) -> Callable[..., Any]:
    """Without gradients, and in the dtypes that are written, whatever autocast takes elsewhere."""

    @functools.wraps(run)
    def plain(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), torch._C._DisableAutocast():  # type: ignore[attr-defined]
            return run(*args, **kwargs)

    return plain


@_plainly
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

    def check(_: ControlGroup) -> tuple[Any, torch.Tensor]:
        validate.operands("gemm_ar", x, weight, bias)
        m, n = _fitting("gemm_ar", ctx, group, x, weight)
        return (m, n), validate.output("gemm_ar", out, (m, n), x, weight, bias)

    control, y = _checked("gemm_ar", ctx, GemmARContext, group, x, "M, N", check)
    return y.copy_(_total(x, weight, bias, control))


@_plainly
def gemm_rs(
    x: torch.Tensor,
    weight: torch.Tensor,
    ctx: Any = None,
    *,
    bias: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    out: torch.Tensor | None = None,
    k: int | None = None,
) -> torch.Tensor:
    """`fluxlike.gemm_rs` by one fp32 product, one fp32 all-reduce and a slice."""

    def check(control: ControlGroup) -> tuple[Any, torch.Tensor]:
        validate.operands("gemm_rs", x, weight, bias)
        validate.whole("gemm_rs", "k", k, x.shape[1])
        m, n = _fitting("gemm_rs", ctx, group, x, weight)
        return (m, n), validate.output("gemm_rs", out, (rows_of(m, control.size, control.rank), n), x, weight, bias)

    control, y = _checked("gemm_rs", ctx, (GemmRSContext, NodesContext), group, x, "M, N", check)
    start = control.rank * chunk_rows(x.shape[0], control.size)
    return y.copy_(_total(x, weight, bias, control)[start : start + len(y)])


def _checked(
    op: str, ctx: Any, kind: Any, group: Any, x: Any, sizes: str, check: Callable[[ControlGroup], tuple[Any, Any]]
) -> tuple[ControlGroup, Any]:
    """The group of a call and what ``check`` makes of its operands, beside the ``sizes`` that all ranks must have.

    All ranks raise if one finds an error, or if they differ.
    """
    if not hasattr(ctx, "control"):  # of what is no context nobody knows whose call it is
        validate.context(op, ctx, kind)
    control = ctx.control if hasattr(ctx, "control") else resolve(group)
    said, made, error = (), None, None
    try:
        validate.context(op, ctx, kind)
        said, made = check(control)
    except (RuntimeError, ValueError) as problem:
        error = problem
    control.agree(f"reference.{op}: {sizes}, dtype", (*said, str(getattr(x, "dtype", None))), error)
    return control, made


def _fitting(op: str, ctx: Any, group: Any, x: torch.Tensor, weight: torch.Tensor) -> tuple[int, int]:
    """M and N of a call that fits its context, if it has one."""
    m, n = x.shape[0], weight.shape[0]
    if ctx is not None:
        validate.call(op, ctx, group, x, {"M": (m, ctx.max_m, "max_m"), "N": (n, ctx.n, "n")})
    return m, n


def _total(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, control: ControlGroup) -> torch.Tensor:
    """Σ_ranks x · weightᵀ (+ bias) in fp32, on all ranks."""
    total = x.float() @ weight.float().T
    dist.all_reduce(total, group=control.group)
    return total if bias is None else total + bias.float()


@_plainly
def ag_gemm(
    x_shard: torch.Tensor,
    weight: torch.Tensor | Sequence[torch.Tensor],
    ctx: Any = None,
    *,
    bias: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    group: dist.ProcessGroup | None = None,
    return_gathered: bool = False,
    m: int | None = None,
    n: int | None = None,
    out: torch.Tensor | Sequence[torch.Tensor] | None = None,
) -> Any:
    """`fluxlike.ag_gemm` by one all-gather of shards padded to equal size and one product a weight."""

    def check(control: ControlGroup) -> tuple[Any, Any]:
        weights, biases, rows = validate.gathered_operands(x_shard, weight, bias, m, control)
        k = x_shard.shape[1]
        validate.whole("ag_gemm", "n", n, sum(w.shape[0] for w in weights))
        if ctx is not None:
            validate.call("ag_gemm", ctx, group, x_shard, {"M": (rows, ctx.max_m, "max_m"), "K": (k, ctx.k, "k")})
        results = validate.outputs(validate.listed_out(out, weight), rows, x_shard, weights, biases)
        return (rows, k), (weights, biases, rows, results)

    control, checked = _checked("ag_gemm", ctx, (AGGemmContext, NodesContext), group, x_shard, "M, K", check)
    weights, biases, m, results = checked
    full = chunk_rows(m, control.size)
    padded = x_shard.new_zeros(full, x_shard.shape[1])
    padded[: x_shard.shape[0]] = x_shard
    parts = [torch.empty_like(padded) for _ in range(control.size)]
    dist.all_gather(parts, padded, group=control.group)
    gathered = torch.cat(parts)[:m]
    for z, w, b in zip(results, weights, biases, strict=True):
        product = gathered.float() @ w.float().T
        z.copy_(product if b is None else product + b.float())
    result: Any = results[0] if isinstance(weight, torch.Tensor) else results
    return (result, gathered) if return_gathered else result


@_plainly
def sparse_all_reduce(
    x: torch.Tensor,
    op: validate.Reduction = "sum",
    group: dist.ProcessGroup | None = None,
    mode: str = "exact",
    *,
    ctx: Any = None,
    max_nnz: int | None = None,
    wire_dtype: torch.dtype | str | None = None,
) -> torch.Tensor:
    """`fluxlike.sparse_all_reduce` by all-gathers of ids and values, and sums made entry by entry; always as mode="exact", which
    refuses ids outside of the table."""
    how: str = validate.named(op)

    def checked(control: ControlGroup) -> tuple[Any, torch.dtype]:
        wire = check(x, how, mode, ctx, group, max_nnz, wire_dtype)
        return (tuple(x.shape), x.sparse_dim(), how, mode, str(wire)), wire

    control, wire = _checked(NAME, ctx, EpochContext, group, x, "shape, sparse_dim, op, mode, wire_dtype", checked)
    dims = x.sparse_dim()
    ids, values, table_rows = entries_of(x)
    total, seen, outside = values.new_zeros(0, values.shape[1], dtype=torch.float32), ids.new_zeros(0), None
    for source in range(control.size):
        theirs, rows = _sent(ids, source, control), _sent(values, source, control)
        if outside is None and ((theirs < 0) | (theirs >= table_rows)).any():
            outside = control.ranks[source]
        distinct, part = sequential_sum(theirs, rows.float())
        union = torch.cat([seen, distinct]).unique()
        grown = total.new_zeros(len(union), total.shape[1])
        grown[torch.searchsorted(union, seen)] = total
        new, at = torch.isin(distinct, seen, invert=True), torch.searchsorted(union, distinct)
        part = part.to(wire).float()
        grown[at] = torch.where(new[:, None], part, grown[at] + part)
        total, seen = grown, union
    if outside is not None:  # on all ranks
        raise ValueError(f"{NAME}: rank {outside} has ids below 0 or not below {table_rows}, the rows of the table")
    if how == "avg":
        total /= torch.tensor(float(control.size), device=x.device)  # by a number of the host's, torch multiplies on GPUs
    result = total.to(x.dtype)
    indices = torch.stack(torch.unravel_index(seen, x.shape[:dims]))
    return torch.sparse_coo_tensor(
        indices, result.view(len(result), *x.shape[dims:]), x.shape, device=x.device, is_coalesced=True, check_invariants=False
    )


def _sent(t: torch.Tensor, source: int, control: ControlGroup) -> torch.Tensor:
    """Rank ``source``'s tensor, of any number of rows."""
    rows = torch.tensor([t.shape[0]], device=t.device)
    dist.broadcast(rows, control.ranks[source], control.group)
    got = t.clone() if source == control.rank else t.new_empty(int(rows), *t.shape[1:])
    dist.broadcast(got, control.ranks[source], control.group)
    return got


def sequential_sum(ids: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The distinct ids in ascending order, and of each the sum of its rows, made one by one in the order in which they come."""
    keys, order = torch.sort(ids, stable=True)
    distinct, slot, counts = torch.unique_consecutive(keys, return_inverse=True, return_counts=True)
    turn = torch.arange(len(keys), device=ids.device) - (counts.cumsum(0) - counts)[slot]
    total = rows.new_zeros(len(distinct), rows.shape[1])
    for number in range(int(counts.max()) if len(counts) else 0):
        now = turn == number
        part = rows[order[now]]
        total[slot[now]] = part if number == 0 else total[slot[now]] + part
    return distinct, total

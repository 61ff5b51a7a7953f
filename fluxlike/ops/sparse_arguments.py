"""The arguments of `sparse_all_reduce` and of its reference: what is refused."""

import math
from typing import Any

import torch

from ..runtime import world
from ..runtime.wording import counted
from . import tiling, validate
from .context import DTYPES
from .exchange import EpochContext
from .sparse_index import ROW

NAME = "sparse_all_reduce"
SCATTER = "sparse_reduce_scatter"
MODES = ("exact", "padded")
#: Entries on a rank up to which the kernels' 32-bit numbers of keys, and of the steps from block to block, hold.
MOST_ENTRIES = 1 << 30
#: Rows of a table: ids are int64, and the largest of these ends a list of them.
MOST_ROWS = 2**63 - 2
#: Names of what may travel.
WIRES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def too_many(entries: int, most: int, name: str = NAME) -> str:
    """The message of more entries than fit."""
    return f"{name}: {entries} entries are more than max_nnz={most}; pass a larger max_nnz on all ranks"


def wire_of(dtype: Any, wire: Any, name: str = NAME) -> torch.dtype:
    """The dtype that travels."""
    if dtype not in DTYPES:
        raise ValueError(f"{name}: x has dtype {dtype}, it must be bfloat16, float16 or float32; use x.to(torch.float32)")
    named: Any = WIRES.get(wire, wire) if isinstance(wire, str) else wire
    if wire is not None and named not in DTYPES:
        raise ValueError(
            f"{name}: wire_dtype={wire!r} is not torch.bfloat16, torch.float16 or torch.float32, nor one of "
            f"{', '.join(map(repr, WIRES))}"
        )
    return dtype if named is None else named


def countable(ranks: int, entries: int) -> int:
    """The most entries of a rank that the kernels' arithmetic holds: their loops go one step beyond ranks² as many."""
    most = min(tiling.MAX_SIZE // (ranks * (ranks + 1)) - ROW, MOST_ENTRIES)
    if entries > most:
        raise ValueError(f"{NAME}: {entries} entries on a rank are more than {most}, up to which kernels count; split the table")
    return most


def check(x: Any, op: str, mode: str, ctx: Any, group: Any, max_nnz: Any, wire_dtype: Any, name: str = NAME) -> torch.dtype:
    """The dtype that travels in a call of ``name`` with these arguments; ValueError for those that do not fit."""
    validate.context(name, ctx, EpochContext)
    validate.outside_of_traces(name)
    validate.new_tensors_have_memory(name)
    if op not in ("sum", "avg"):
        raise ValueError(f"{name}: op={op!r} is not one of 'sum', 'avg'")
    if mode not in MODES:
        raise ValueError(f"{name}: mode={mode!r} is not one of {', '.join(map(repr, MODES))}")
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{name}: x is {type(x).__name__}, it must be a sparse COO tensor")
    if x.layout is not torch.sparse_coo:
        remedy = "fluxlike.all_reduce_" if x.layout is torch.strided else "x.to_sparse_coo()"
        raise ValueError(f"{name}: x has layout {x.layout}, it must be torch.sparse_coo; use {remedy}")
    device = world.current().device
    if x.device != device:
        raise ValueError(f"{name}: x is on {x.device}, this rank's heap is on {device}; use x.to({str(device)!r})")
    width, rows = math.prod(x.shape[x.sparse_dim() :]), math.prod(x.shape[: x.sparse_dim()])
    if 0 in x.shape or x.sparse_dim() == 0:
        raise ValueError(
            f"{name}: x is {tuple(x.shape)} with sparse_dim={x.sparse_dim()}, it has no rows, or they have no elements to add"
        )
    if rows > MOST_ROWS:
        raise ValueError(
            f"{name}: x is {tuple(x.shape)} with sparse_dim={x.sparse_dim()}: a table has {MOST_ROWS} rows at most; split it"
        )
    if max_nnz is not None and (not isinstance(max_nnz, int) or isinstance(max_nnz, bool) or max_nnz < 1):
        raise ValueError(f"{name}: max_nnz={max_nnz!r} is not a whole number above 0")
    if name == SCATTER and x.sparse_dim() != 1:
        raise ValueError(f"{name}: x has sparse_dim={x.sparse_dim()}; it must be 1, as rows are spread by their id")
    if x._nnz() > MOST_ENTRIES:
        raise ValueError(f"{name}: x has {x._nnz()} entries, more than {MOST_ENTRIES}, up to which kernels count; use x.coalesce()")
    wire = wire_of(x.dtype, wire_dtype, name)
    if ctx is not None:
        fits(ctx, x, width, group, None if wire_dtype is None else wire, max_nnz)
        return ctx.wire  # type: ignore[no-any-return]
    if mode == "padded":
        if max_nnz is None:
            raise ValueError(f"{name}: mode='padded' needs max_nnz, the entries of x at most, or a ctx")
        if x._nnz() > max_nnz:
            raise ValueError(too_many(x._nnz(), max_nnz, name))
    return wire


def check_ids(ids: Any, ctx: Any, started: bool) -> None:
    """ValueError if these ids cannot go ahead of their gradient. ``started``: others have."""
    validate.outside_of_traces(NAME)
    validate.new_tensors_have_memory(NAME)
    if ctx.table_rows is None:
        raise ValueError(f"{NAME}: only a context of fluxlike.create_{NAME}_context takes ids ahead of their gradient")
    if started:
        raise ValueError(f"{NAME}: ids were started already and their gradient has not come; call sparse_all_reduce_ with it")
    if not isinstance(ids, torch.Tensor) or ids.layout is not torch.strided:
        found = ids.layout if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise ValueError(f"{NAME}: ids are {found}, they must be a dense tensor of int64 or int32; use torch.tensor or to_dense()")
    if ids.dtype not in (torch.int64, torch.int32) or ids.device != ctx.device:
        raise ValueError(f"{NAME}: ids are {ids.dtype} on {ids.device}, they must be int64 or int32 on {ctx.device}; use ids.to")
    if ids.numel() > ctx.rows:
        raise ValueError(too_many(ids.numel(), ctx.rows))


def fits(ctx: Any, x: torch.Tensor, width: int, group: Any, wire: Any, max_nnz: int | None) -> None:
    """x goes with the caller's context."""
    validate.same_group(NAME, ctx, group)
    if (x.shape[0], width, x.dtype) != (ctx.table_rows, ctx.width, ctx.dtype) or x.sparse_dim() != 1:
        raise ValueError(
            f"{NAME}: x is {tuple(x.shape)} {x.dtype} with sparse_dim={x.sparse_dim()}, the context is for "
            f"{counted(ctx.table_rows, 'row')} of {counted(ctx.width, 'element')} {ctx.dtype} with sparse_dim=1; make one for this "
            "table"
        )
    if max_nnz is not None or (wire is not None and wire is not ctx.wire):
        raise ValueError(f"{NAME}: max_nnz and wire_dtype are those of the context; leave them out")
    if x._nnz() > ctx.rows:
        raise ValueError(too_many(x._nnz(), ctx.rows))

"""The all_reduce family as custom ops of torch, ``torch.ops.fluxlike.*``: what torch.compile sees of it. Read with `library`.

`fluxlike.all_reduce`, `all_reduce_`, `reduce_scatter`, `all_gather` and `broadcast` come here by themselves when they are compiled,
or traced by torch.jit.trace or make_fx.
They make no gradients, there as elsewhere: their results want none, whatever the inputs.

All ops are registered with an ordered effect, as those of `library` are, so that no call is dropped, merged or moved. Torch gives
no op such an effect that writes to an argument. So there is no op for `all_reduce_`: compiled, it is ``all_reduce`` and a copy, and
tensors of a list that overlap are not found, as addresses are not known then.

`reduce`, whose result not all ranks have, and the sparse operations are no ops: the graph ends before such a call and goes on
behind it. Where a graph cannot end, as in a trace, they are refused.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

from . import all_reduce as ar
from . import collectives, sparse_all_reduce, tiling, validate
from .library import EVEN, group_of, name_of, rows_here, tensors, whole
from .refusals import leaving_out


@torch.library.custom_op("fluxlike::all_reduce", mutates_args=())
def all_reduce_op(xs: Sequence[torch.Tensor], op: str, algo: str, group_name: str) -> list[torch.Tensor]:
    """Of one tensor, too."""
    return ar.all_reduce(list(xs), group_of(group_name), op, algo)  # type: ignore[no-any-return]


@all_reduce_op.register_fake
def _(xs: Sequence[torch.Tensor], op: str, algo: str, group_name: str) -> list[torch.Tensor]:
    return [x.new_empty(x.shape) for x in xs]


@torch.library.custom_op("fluxlike::reduce_scatter", mutates_args=())
def reduce_scatter_op(x: torch.Tensor, op: str, algo: str, group_name: str) -> torch.Tensor:
    return collectives.reduce_scatter(x, group_of(group_name), op, algo)


@reduce_scatter_op.register_fake
def _(x: torch.Tensor, op: str, algo: str, group_name: str) -> torch.Tensor:
    return x.new_empty(rows_here(x.shape[0], group_name), *x.shape[1:])


@torch.library.custom_op("fluxlike::all_gather", mutates_args=())
def all_gather_op(x: torch.Tensor, m: int, algo: str, group_name: str) -> torch.Tensor:
    """``m``: rows of all ranks, EVEN if all have as many."""
    return collectives.all_gather(x, group_of(group_name), whole(x, m, group_name), algo)


@all_gather_op.register_fake
def _(x: torch.Tensor, m: int, algo: str, group_name: str) -> torch.Tensor:
    return x.new_empty(whole(x, m, group_name), *x.shape[1:])


@torch.library.custom_op("fluxlike::broadcast", mutates_args=())
def broadcast_op(x: torch.Tensor, root: int, algo: str, group_name: str) -> torch.Tensor:
    return collectives.broadcast(x, root, group_of(group_name), algo)


@broadcast_op.register_fake
def _(x: torch.Tensor, root: int, algo: str, group_name: str) -> torch.Tensor:
    return x.new_empty(x.shape)


for _op in (all_reduce_op, reduce_scatter_op, all_gather_op, broadcast_op):
    _register_effectful_op(_op._opoverload, _EffectType.ORDERED)


# -- what the functions of fluxlike come to -------------------------------------------------------------------------------


def all_reduce(x: Any, group: dist.ProcessGroup | None, op: str, algo: str) -> Any:
    with leaving_out("all_reduce", group):
        xs = validate.some("all_reduce", x)
        tensors("all_reduce", [("x", t, None) for t in xs])
    ys = all_reduce_op([t.detach() for t in xs], op, algo, name_of(group))
    return ys if isinstance(x, (list, tuple)) else ys[0]


def all_reduce_(x: Any, group: dist.ProcessGroup | None, op: str, algo: str) -> Any:
    with leaving_out("all_reduce_", group):
        xs = validate.some("all_reduce_", x)
        tensors("all_reduce_", [("x", t, None) for t in xs])
        for t in xs:
            validate.contiguous("all_reduce_", t)
    for t, y in zip(xs, all_reduce(xs, group, op, algo), strict=True):
        t.detach().copy_(y)
    return x


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup | None, op: str, algo: str) -> torch.Tensor:
    with leaving_out("reduce_scatter", group):
        tensors("reduce_scatter", [("x", x, None)])
        collectives.check_has_rows("reduce_scatter", x)
    return reduce_scatter_op(x.detach(), op, algo, name_of(group))


def all_gather(x: torch.Tensor, group: dist.ProcessGroup | None, m: Any, algo: str) -> torch.Tensor:
    with leaving_out("all_gather", group):
        m = m if torch.compiler.is_compiling() else tiling.number(m)
        tensors("all_gather", [("x", x, None)])
        collectives.check_has_rows("all_gather", x)
        if m is not None and (not isinstance(m, (int, torch.SymInt)) or isinstance(m, bool) or m < 0):
            raise ValueError(
                f"all_gather: m={m!r} is no number of rows; pass those of all ranks, or leave it out if all have as many"
            )
    return all_gather_op(x.detach(), EVEN if m is None else m, algo, name_of(group))


def broadcast(x: torch.Tensor, root: Any, group: dist.ProcessGroup | None, algo: str) -> torch.Tensor:
    with leaving_out("broadcast", group):
        root = root if torch.compiler.is_compiling() else tiling.number(root)
        tensors("broadcast", [("x", x, None)])
        if not isinstance(root, int) or isinstance(root, bool):  # the rest is for the call to see: dynamo cannot ask a group
            raise ValueError(f"broadcast: root={root!r} is no rank of the group; name one by its rank in it, from 0")
    return broadcast_op(x.detach(), root, algo, name_of(group))


# -- what stays outside of graphs -----------------------------------------------------------------------------------------

_WHY = "it is no custom op; call it outside of what is compiled with fullgraph=True"


@functools.partial(torch.compiler.disable, reason=f"fluxlike.reduce: {_WHY}")
def reduce(x: torch.Tensor, root: Any, group: dist.ProcessGroup | None, op: str, algo: str) -> torch.Tensor | None:
    with leaving_out("reduce", group):
        validate.outside_of_traces("reduce")
    return collectives.reduce(x, root, group, op, algo)


sparse_call = torch.compiler.disable(sparse_all_reduce.call, reason=f"fluxlike.sparse_*: {_WHY}")

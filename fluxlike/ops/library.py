"""The operations as custom ops of torch, ``torch.ops.fluxlike.*``: what autograd and torch.compile see of them.

A schema cannot carry a group or a context. It carries the group's name ("" for the group given to fluxlike.init), and the
call uses the context that is kept for that group. `fluxlike.gemm_rs` and `fluxlike.ag_gemm` come here by themselves when an
input wants a gradient, when they are compiled, and where else torch must see them (`dispatcher`); nobody need call an op by
hand. The all_reduce family: `library_collectives`.

Gradients. Each operation is the other's backward::

    y = gemm_rs(x, w, b)     dx = all_gather(dy) · w      an ag_gemm that also returns the gathered dy,
                             dw = gathered dyᵀ · x, db = its column sums: local products
    z = ag_gemm(s, w, b)     ds = reduce_scatter(dz · w)  a gemm_rs; beside it s is gathered again,
                             dw = dzᵀ · gathered s, db = column sums of dz: local products

    y = gemm_ar(x, w, b)     dx = dy · w, dw = dyᵀ · x, db = column sums of dy: local, as dy is the same on all ranks

So both transfers of a backward go with its first product, hidden under it but for a shard below 4 MiB, which is pushed in front
of it (`ag_gemm.gather_beside`), and the second product has all it needs in local memory. The forward of ag_gemm saves its shard,
not the gathered input, R times as large; ``return_gathered`` keeps that and spares the second gather. Several weights of one
gather have one gemm_rs in the backward, of their concatenation. db of gemm_rs is the whole gradient on every rank, with the same
bits, as its bias is the same on all ranks. There are no second derivatives: of what is written above autograd would see a part
only, and leave the rest out without a word.

Other ranks wait for each call, so a compiler may neither drop, merge nor reorder calls. The ops are registered with an
ordered effect: torch threads a token through them, which keeps all of them in their order, on every rank the same.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import register_flop_formula

from ..kernels.tiles import rows_of
from ..runtime import world
from . import ag_gemm as ag
from . import gemm_ar as ar
from . import gemm_rs as rs
from . import tiling, validate
from .context import kept
from .group import resolve
from .refusals import Refusing, leaving_out

#: M of an ag_gemm to which all ranks bring as many rows: dynamo cannot ask a group for its size, but a call can.
EVEN = -1


def name_of(group: dist.ProcessGroup | None) -> str:
    """What a schema carries for a group."""
    if group is None:
        return ""
    if not torch.compiler.is_compiling():
        world.check_group(group)
    return group.group_name


def group_of(name: str) -> dist.ProcessGroup | None:
    """The group that `name_of` named. RuntimeError if there is none of that name, of which torch says no more than that."""
    try:
        return dist.distributed_c10d._resolve_process_group(name) if name else None  # type: ignore
    except RuntimeError:
        raise RuntimeError(
            f"the torch group {name!r} has ended, by torch.distributed.destroy_process_group, or is one of another job, where a "
            "graph was made; use one that is there, and end groups behind their last calls, backward passes among them"
        ) from None


def _place(name: str) -> tuple[int, int]:
    """Size of a group and this rank's place in it; without the connections that a fake tensor must not make."""
    group = group_of(name) or world.current().group
    return group.size(), group.rank()


def rows_here(m: Any, name: str) -> Any:
    """Rows of this rank of m. An even split is asked for first, so that a symbolic m keeps a simple shape, alike on all ranks."""
    ranks, rank = _place(name)
    return m // ranks if m % ranks == 0 else rows_of(m, ranks, rank)


def whole(x_shard: torch.Tensor, m: Any, name: str) -> Any:
    """The rows of all ranks."""
    return x_shard.shape[0] * _place(name)[0] if m == EVEN else m


def _together(op: str, x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]) -> None:
    """What a fake checks: with one left on the meta device, torch would take what the fake returns for the result."""
    for name, given in (("weight", weights), ("bias", biases)):
        for t in given:
            if t is not None and t.device != x.device:
                raise ValueError(f"{op}: {name} is on {t.device}, x on {x.device}; they must be on the same; load it, or use .to")


def _once(op: str, backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """``backward``, whose results raise where autograd, which was told to create a graph, goes through them."""
    why = (
        f"fluxlike.{op} has no second derivative, and one is asked for: of a gradient that was made with create_graph=True; use "
        "torch's products and collectives where a loss depends on gradients"
    )

    @functools.wraps(backward)
    def once(ctx: Any, grads: Any) -> tuple[Any, ...]:
        again = torch.is_grad_enabled()
        # a backward has the dtypes of its forward, also where autocast is on around it
        with torch.no_grad(), torch._C._DisableAutocast():  # type: ignore[attr-defined]
            if not again:
                return backward(ctx, grads)
            ctx = _Read(ctx)
            results = backward(ctx, grads)
        # Of all that the results come from: autograd that is asked for one gradient leaves out what does not lead there.
        sources = [t for t in (*ctx.saved_tensors, *pytree.tree_leaves(grads)) if isinstance(t, torch.Tensor) and t.requires_grad]
        leaves, spec = pytree.tree_flatten(results)
        made = [t for t in leaves if isinstance(t, torch.Tensor)]
        refusing = iter(_Refusing.apply(why, len(made), *made, *sources))  # type: ignore[no-untyped-call]
        return pytree.tree_unflatten([next(refusing) if isinstance(t, torch.Tensor) else t for t in leaves], spec)  # type: ignore

    return once


class _Read:
    """What a forward saved, whose tensors are asked for once: those of a checkpoint may not be asked for again."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx

    @functools.cached_property
    def saved_tensors(self) -> Any:
        return self._ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


class _Refusing(torch.autograd.Function):
    """The first ``count`` tensors, made of the others, which no gradient goes through."""

    @staticmethod
    def forward(ctx: Any, why: str, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.why = why
        return tuple([t.view_as(t) for t in tensors[:count]])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise RuntimeError(ctx.why)


def _saved(ctx: Any) -> Any:
    """What a forward saved: nothing if only a bias wants a gradient, whose backward may be made again then, as that of torch."""
    wants_x, wants_weights, *_ = ctx.needs_input_grad
    wants = wants_x or (any(wants_weights) if isinstance(wants_weights, list) else wants_weights)
    return ctx.saved_tensors if wants else (None, None)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x, its rows as kernels read them: inductor lays out what it computes as it likes, also what the graph makes contiguous.

    Calls that are not compiled are refused such an x before they come here.
    """
    return x.contiguous() if x.dim() == 2 and x.shape[1] > 1 and x.stride(1) != 1 else x


def _weight(weight: torch.Tensor) -> torch.Tensor:
    """As `_rows`, of a weight: it may be a part of what inductor lays out, such as a convolution's channels, which it puts last."""
    return weight if weight.dim() != 2 or validate.is_in_rows_or_columns(weight) else weight.contiguous()


def _bias(bias: Any) -> Any:
    """As `_weight`; None is none."""
    return bias if bias is None or bias.dim() != 1 or validate.is_one_row(bias) else bias.contiguous()


# -- gemm_rs --------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("fluxlike::gemm_rs", mutates_args=())
def gemm_rs_op(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group_name: str, k: int | None
) -> torch.Tensor:
    """``k``: K of all ranks, if the caller says it."""
    return rs.call(_rows(x), _weight(weight), bias=_bias(bias), group=group_of(group_name), k=k)


@gemm_rs_op.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group_name: str, k: int | None) -> torch.Tensor:
    _together("gemm_rs", x, [weight], [bias])
    return x.new_empty(rows_here(x.shape[0], group_name), weight.shape[0])


def _save_gemm_rs(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, _, ctx.group_name, ctx.whole = inputs
    ctx.m = x.shape[0]
    ctx.save_for_backward(x if weight.requires_grad else None, weight if x.requires_grad else None)


def _gemm_rs_backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    wants_x, wants_weight, wants_bias, *_ = ctx.needs_input_grad
    validate.no_batch("gemm_rs", dy)
    with leaving_out("ag_gemm", group_of(ctx.group_name)):  # a checkpoint computes anew what it saved, and there may be no memory
        x, weight = _saved(ctx)
        dy = dy.contiguous()  # not left to `_rows`: where that has no memory, nobody is told
        # without a gradient of x the same call, of no columns: on other ranks x may want one
        weights = [weight.T] if wants_x else [dy.new_empty(0, dy.shape[1])]
    # its columns are those that x has on all ranks
    results = ag_gemm_op(dy, weights, [], ctx.m, wants_weight or wants_bias, ctx.group_name, ctx.whole)
    dx = results[0] if wants_x else None
    dw = results[-1].T @ x if wants_weight else None
    db = results[-1].sum(0) if wants_bias else None
    return dx, dw, db, None, None


gemm_rs_op.register_autograd(_once("gemm_rs", _gemm_rs_backward), setup_context=_save_gemm_rs)


# -- ag_gemm --------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("fluxlike::ag_gemm", mutates_args=())
def ag_gemm_op(
    x_shard: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    m: int,
    return_gathered: bool,
    group_name: str,
    n: int | None,
) -> list[torch.Tensor]:
    """``biases``: one a weight, or none at all. ``m``: rows of all ranks, EVEN if all have as many. ``n``: N of all ranks, if the
    caller says it.

    The gathered input comes last; without weights it is all there is.
    """
    group = group_of(group_name)
    m, x_shard = whole(x_shard, m, group_name), _rows(x_shard)
    if not weights:
        with Refusing("ag_gemm", resolve(group)):
            return [ag.gather_beside(lambda: None, x_shard, group=group, m=m)]
    weights, biases = [_weight(w) for w in weights], [_bias(b) for b in biases]
    results = ag.call(x_shard, weights, None, biases or None, group, return_gathered, m, n)
    return [*results[0], results[1]] if return_gathered else results


@ag_gemm_op.register_fake
def _(
    x_shard: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    m: int,
    return_gathered: bool,
    group_name: str,
    n: int | None,
) -> list[torch.Tensor]:
    _together("ag_gemm", x_shard, weights, biases)
    m = whole(x_shard, m, group_name)
    columns = [w.shape[0] for w in weights] + [x_shard.shape[1]] * (return_gathered or not weights)
    return [x_shard.new_empty(m, width) for width in columns]


def _save_ag_gemm(ctx: Any, inputs: Any, output: Any) -> None:
    x_shard, weights, biases, _, ctx.kept, ctx.group_name, ctx.whole = inputs
    ctx.m = output[0].shape[0]
    ctx.columns, ctx.like = [w.shape[0] for w in weights], {"dtype": x_shard.dtype, "device": x_shard.device}
    # As with products of torch, one by one: what nobody uses gives its weight no gradient (nor zeros of the size of what was
    # gathered, which nobody reads), and one of which nothing wants a gradient has none.
    ctx.set_materialize_grads(False)
    of_each = zip(output, weights, biases or [None] * len(weights), strict=False)
    still = [] if x_shard.requires_grad else [z for z, *of in of_each if not any(t is not None and t.requires_grad for t in of)]
    ctx.mark_non_differentiable(*still, *([output[-1]] if ctx.kept else []))
    source = None
    if any(w.requires_grad for w in weights):
        source = output[-1] if ctx.kept else x_shard
    ctx.save_for_backward(source, *(w if x_shard.requires_grad else None for w in weights))


def _ag_gemm_backward(ctx: Any, grads: list[torch.Tensor | None]) -> tuple[Any, ...]:
    wants_x, wants_weights, wants_biases, *_ = ctx.needs_input_grad
    regather = any(wants_weights) and not ctx.kept
    calls = "gemm_rs" if wants_x else "ag_gemm" if regather else None
    with contextlib.nullcontext() if calls is None else leaving_out(calls, group_of(ctx.group_name)):  # as above
        source, *weights = _saved(ctx)
        grads = grads[: len(ctx.columns)]  # behind them the one of what was gathered
        dzs = [None if dz is None else dz.contiguous() for dz in grads]
        if wants_x:
            of_all = [torch.zeros(ctx.m, n, **ctx.like) if dz is None else dz for dz, n in zip(dzs, ctx.columns, strict=True)]
            dz = of_all[0] if len(of_all) == 1 else torch.cat(of_all, 1)
            weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    gathered, dx = source, None
    if wants_x:
        if regather:
            dx, gathered = gemm_rs_gather_op(dz, weight.T, source, ctx.m, ctx.group_name, ctx.whole)
        else:
            dx = gemm_rs_op(dz, weight.T, None, ctx.group_name, ctx.whole)
    elif regather:
        gathered = ag_gemm_op(source, [], [], ctx.m, True, ctx.group_name, None)[0]
    dws = [dz.T @ gathered if wanted and dz is not None else None for dz, wanted in zip(dzs, wants_weights, strict=True)]
    dbs = [dz.sum(0) if wanted and dz is not None else None for dz, wanted in zip(dzs, wants_biases, strict=False)]
    return dx, dws, dbs, None, None, None, None


ag_gemm_op.register_autograd(_once("ag_gemm", _ag_gemm_backward), setup_context=_save_ag_gemm)


# -- the backward of ag_gemm ----------------------------------------------------------------------------------------------


@torch.library.custom_op("fluxlike::gemm_rs_gather", mutates_args=())
def gemm_rs_gather_op(
    x: torch.Tensor, weight: torch.Tensor, shard: torch.Tensor, m: int, group_name: str, k: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """gemm_rs(x, weight), and all_gather(shard) beside it: see `ag_gemm.gather_beside`."""
    group = group_of(group_name)
    control = resolve(group)
    with Refusing("gemm_rs", control), control.lock:
        x, weight, shard, y = _rows(x), _weight(weight), _rows(shard), []
        # made now: the peers, too, must be free to meet when a context is made
        ctx = None
        if not control.spans:
            sizes = {"max_m": x.shape[0], "n": weight.shape[0]}
            ctx = kept("gemm_rs", rs.GemmRSContext, control, x.dtype, sizes, group, k_here=x.shape[1])
        named = group if control.spans else None  # what is known of a call that comes again is not looked for where both are named
        gathered = ag.gather_beside(lambda: y.append(rs.call(x, weight, ctx, group=named, k=k)), shard, group=group, m=m)
    return y[0], gathered


@gemm_rs_gather_op.register_fake
def _(
    x: torch.Tensor, weight: torch.Tensor, shard: torch.Tensor, m: int, group_name: str, k: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(rows_here(x.shape[0], group_name), weight.shape[0]), shard.new_empty(m, shard.shape[1])


# -- gemm_ar --------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("fluxlike::gemm_ar", mutates_args=())
def gemm_ar_op(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group_name: str) -> torch.Tensor:
    return ar.call(_rows(x), _weight(weight), bias=_bias(bias), group=group_of(group_name))


@gemm_ar_op.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group_name: str) -> torch.Tensor:
    _together("gemm_ar", x, [weight], [bias])
    return x.new_empty(x.shape[0], weight.shape[0])


def _save_gemm_ar(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, *_ = inputs
    ctx.save_for_backward(x if weight.requires_grad else None, weight if x.requires_grad else None)


def _gemm_ar_backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    x, weight = _saved(ctx)
    wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
    return dy @ weight if wants_x else None, dy.T @ x if wants_weight else None, dy.sum(0) if wants_bias else None, None


gemm_ar_op.register_autograd(_once("gemm_ar", _gemm_ar_backward), setup_context=_save_gemm_ar)


for _op in (gemm_rs_op, ag_gemm_op, gemm_rs_gather_op, gemm_ar_op):
    _register_effectful_op(_op._opoverload, _EffectType.ORDERED)


# -- what torch's FlopCounterMode counts: products of this rank -----------------------------------------------------------


@register_flop_formula([torch.ops.fluxlike.gemm_rs, torch.ops.fluxlike.gemm_rs_gather, torch.ops.fluxlike.gemm_ar])
def _flops(x: Any, weight: Any, *_: Any, **__: Any) -> Any:
    return 2 * x[0] * x[1] * weight[0]


@register_flop_formula(torch.ops.fluxlike.ag_gemm)
def _flops_of_ag_gemm(x_shard: Any, weights: Any, *_: Any, out_shape: Any, **__: Any) -> Any:
    return 2 * out_shape[0][0] * x_shard[1] * sum(w[0] for w in weights)


# -- what fluxlike.gemm_rs, ag_gemm and gemm_ar come to --------------------------------------------------------------------

#: Where they are compiled with what a graph has no place for: it ends before them, or with fullgraph=True says why it cannot.
_WHY = "ctx= and out= are for calls outside of torch.compile: compiled ones use the context kept for their group, and new tensors"
_gemm_rs, _gemm_ar, _ag_gemm = (torch.compiler.disable(call, reason=_WHY) for call in (rs.gemm_rs, ar.gemm_ar, ag.ag_gemm))


def gemm_rs(x: torch.Tensor, weight: torch.Tensor, bias: Any, group: Any, ctx: Any, out: Any, k: Any) -> torch.Tensor:
    if torch.compiler.is_compiling() and not (ctx is None and out is None):
        return _gemm_rs(x, weight, ctx, bias=bias, group=group, out=out, k=k)
    with _refusing("gemm_rs", ctx, group):
        _no("gemm_rs", ctx=ctx, out=out)
        k = k if torch.compiler.is_compiling() else tiling.number(k)
        tensors("gemm_rs", [("x", x, 2), ("weight", weight, 2), ("bias", bias, 1)])
        validate.whole("gemm_rs", "k", k, x.shape[1])
    return gemm_rs_op(x, weight, bias, name_of(group), k)


def gemm_ar(x: torch.Tensor, weight: torch.Tensor, bias: Any, group: Any, ctx: Any, out: Any) -> torch.Tensor:
    if torch.compiler.is_compiling() and not (ctx is None and out is None):
        return _gemm_ar(x, weight, ctx, bias=bias, group=group, out=out)
    with _refusing("gemm_ar", ctx, group):
        _no("gemm_ar", ctx=ctx, out=out)
        tensors("gemm_ar", [("x", x, 2), ("weight", weight, 2), ("bias", bias, 1)])
    return gemm_ar_op(x, weight, bias, name_of(group))


def ag_gemm(
    x_shard: torch.Tensor, weight: Any, bias: Any, group: Any, m: Any, ctx: Any, return_gathered: bool, n: Any, out: Any
) -> Any:
    if torch.compiler.is_compiling() and not (ctx is None and out is None):
        return _ag_gemm(
            x_shard, weight, ctx, bias=bias, group=group, return_gathered=return_gathered, m=m, n=n, out=out
        )  # fmt: skip
    with _refusing("ag_gemm", ctx, group):
        _no("ag_gemm", ctx=ctx, out=out)
        m, n = (m, n) if torch.compiler.is_compiling() else (tiling.number(m), tiling.number(n))
        weights, biases = validate.listed(weight, bias)
        tensors("ag_gemm", [("x", x_shard, 2), *[("weight", w, 2) for w in weights], *[("bias", b, 1) for b in biases]])
        if m is not None and (not isinstance(m, (int, torch.SymInt)) or isinstance(m, bool) or m < 0):
            raise ValueError(
                f"ag_gemm: m={m!r} is not a number of rows; pass those of all ranks, or leave it out if all have as many"
            )
        validate.whole("ag_gemm", "n", n, sum(w.shape[0] for w in weights))
        if all(b is None for b in biases):
            biases = []
        else:  # a list of an op holds tensors only
            biases = [w.new_zeros(w.shape[0]) if b is None else b for w, b in zip(weights, biases, strict=True)]
    results = ag_gemm_op(x_shard, weights, biases, EVEN if m is None else m, return_gathered, name_of(group), n)
    result = results[: len(weights)] if isinstance(weight, (list, tuple)) else results[0]
    return (result, results[-1]) if return_gathered else result


def _refusing(op: str, ctx: Any, group: Any) -> Any:
    """`leaving_out` of a call, on the group of its context; what is compiled is not there yet."""
    return leaving_out(op, group if torch.compiler.is_compiling() else getattr(ctx, "control", None) or group)


def tensors(op: str, operands: list[tuple[str, Any, int | None]]) -> None:
    """What the dispatcher would find first, and say less of; all else is checked by the call itself."""
    for name, t, dims in operands:
        if t is None and name == "bias":
            continue
        if not isinstance(t, torch.Tensor) or (dims is not None and t.dim() != dims):
            validate.readable(op, name, t, dims, world.current().device)
        if isinstance(t, DTensor):
            raise ValueError(f"{op}: {name} is a DTensor; pass {name}.to_local(); the styles of fluxlike.nn take DTensors")
    if not torch.compiler.is_compiling():
        given = [(name, t) for name, t, _ in operands]
        validate.no_tangents(op, given)  # the op itself gets its operands without them
        validate.no_transforms(op, given)
        if operands[0][2] == 2:
            validate.in_rows(op, operands[0][1])
        for name, t in given:
            if name == "weight":
                validate.in_rows_or_columns(op, t)
            elif name == "bias" and t is not None:
                validate.one_row(op, t, t.shape[0])


def _no(op: str, **arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(
                f"{op}: {name}= is given to a call that autograd records, or that is compiled or traced; such a call uses the "
                f"context kept for its group, and new tensors; leave {name} out, or call under torch.no_grad() and outside of "
                "torch.compile"
            )

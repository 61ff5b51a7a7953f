"""Calls that this rank leaves out, for their arguments or for want of memory, and what the other ranks learn of it.

They may have begun theirs, and wait. If this rank said nothing, they would take its next call of the same sizes for the one that it
left out, and all results from then on would be of different calls. So it makes an entry on the board of its node in place of the
call, and counts it, for what it says to other nodes in its next one. If all of them leave theirs out, whatever the reasons, entries
and counts are the same, and they are still in step.
"""

import contextlib
import warnings
from typing import Any

import torch
import torch.distributed as dist

from ..runtime import faking, programs
from ..runtime.control import ControlGroup
from ..runtime.errors import heard, is_heard
from . import validate
from .dispatcher import wants_gradient
from .group import resolve


class Refusing:
    """A ``with`` around a call: what raises in it before it has begun, an interrupt, too, leaves it out.

    The peers of one that has begun have heard of its error in another way, and so they have where it is known or agreed on. What
    they have heard of is not told again; so one may be inside another, of what is in front of the call.
    """

    __slots__ = ("_control", "_op")  # one is made in every call

    def __init__(self, op: str, control: ControlGroup) -> None:
        self._op, self._control = op, control

    def __enter__(self) -> None:
        programs.refuse_inside(self._op)  # before there is anything to tell

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None or is_heard(error, self._control.name) or self._control.is_forked:
            return
        _tell(self._op, self._control)
        heard(error, self._control.name)


def leaving_out(op: str, where: ControlGroup | dist.ProcessGroup | None) -> contextlib.AbstractContextManager[None]:
    """`Refusing`, for what torch.compile may trace: what raises then is not told, as it is at another time on each rank.

    Before torch 2.13 a backward that is traced does not know it, but has tensors without memory. Nor does it connect the group.
    """
    return contextlib.nullcontext() if torch.compiler.is_compiling() or faking.is_on() else Refusing(op, resolve(where))


def _tell(op: str, control: ControlGroup) -> None:
    """This rank has refused a call of ``op``, and is about to say why."""
    with control.lock, control.local.lock:
        control.refused += 1
        control.between += 1
        if control.local.board is not None:
            control.local.board.refuse(op)


def check_context(op: str, ctx: Any, kind: Any, group: dist.ProcessGroup | None) -> None:
    """`validate.context` of a call of ``op``. Of what is none, with no group beside it, nobody knows whose call it is."""
    where = getattr(ctx, "control", group)
    with contextlib.nullcontext() if where is None else leaving_out(op, where):
        validate.context(op, ctx, kind)


def beside_capture(op: str, executor: Any, *sides: Any) -> None:
    """RuntimeError if a CUDA graph without this call is being captured, as by another thread, that has a side stream of it."""
    if executor.is_beside_capture(*sides):
        raise RuntimeError(
            f"{op}: a CUDA graph is being captured of calls that have a side stream in common with this one, which is on a stream "
            "that is not part of the graph; make calls on one context, and on one group those of schedule 'decomposed' and sparse "
            "ones, on streams of the graph, or when the capture has ended"
        )


def reduction(op: str, name: Any, group: dist.ProcessGroup | None) -> str:
    """`validate.reduction` of a call of ``op``, in front of all else that it does."""
    with leaving_out(op, group):
        return validate.reduction(op, name)


def without_gradient(op: str, x: Any, in_place: bool = False) -> None:
    """Warn where ``op``, which makes no gradients, cuts them off: what is in front of it would not be trained.

    ``in_place``: where it writes into what has a graph behind it, whose gradients would be of what was there before.
    """
    if not wants_gradient(x):
        return
    if in_place and not any(getattr(t, "grad_fn", None) for t in (x if isinstance(x, (list, tuple)) else [x])):
        return
    how = "goes past the call as if it were not there" if in_place else "does not come through the result"
    warnings.warn(
        f"fluxlike.{op} makes no gradients, and x wants one, which {how}. If it need not, pass x.detach(); gemm_rs, ag_gemm and "
        "gemm_ar, and the layers of fluxlike.nn, make gradients",
        stacklevel=3,
    )

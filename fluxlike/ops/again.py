"""Calls that come again: one with tensors like those of an earlier call on its context is neither checked nor planned anew.

An eager model makes the same few calls thousands of times, and what few rows cost is the host's time. All that the checks of
`validate` and the plan of a call depend on, but for where its tensors lie, is its `signature`; a context keeps what came of it
with its plans. What lies elsewhere in each call, an ``out`` above all, is looked at in each call.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from ..runtime import world
from ..runtime.control import ControlGroup

#: Bytes of which the addresses of new tensors are multiples.
ALIGNED = 16


class Known(NamedTuple):
    """What came of a call: number and plan of `GroupContext.plan`, and the shapes of new results."""

    number: int
    plan: Any
    shapes: tuple[torch.Size, ...]


def signature(tensors: Sequence[torch.Tensor | None], *said: int | None) -> tuple[Any, ...] | None:
    """Of a call with these tensors, and sizes that the caller said; None: nothing is known of such calls."""
    if forward_ad._current_level >= 0:
        return None
    found: list[Any] = []
    try:
        for t in tensors:
            if t is None:
                found.append(None)
                continue
            address = t.data_ptr()
            if address == 0:  # empty, or a wrapper
                return None
            found += t.shape, t.stride(), t.dtype, t.device, t.layout, t.is_neg(), address % ALIGNED
    except (AttributeError, RuntimeError, TypeError):  # no tensor, or none with strides and memory: `validate` says so
        return None
    for size in said:
        if size is not None and type(size) is not int:
            return None
    return (*found, *said)


def find(kind: Any, ctx: Any, group: Any, control: ControlGroup, seen: tuple[Any, ...] | None) -> tuple[Any, Known] | None:
    """The context of a call, ``ctx`` or the one that is kept, and what it knows of ``seen``. Hold `ControlGroup.lock`."""
    if seen is None or (ctx is not None and group is not None):
        return None
    this = world.current()
    context: Any = this.cached.get((kind, control.name, seen[2])) if ctx is None else ctx
    if type(context) is not kind:
        return None
    known = context.recall(seen)
    if known is None or (ctx is None and not context.in_step()):
        return None
    if ctx is None and not context.captured:
        context.captured = this.executor.is_capturing()
    return context, known


def results(
    known: Known, x: torch.Tensor, out: torch.Tensor | None = None, read: Sequence[torch.Tensor | None] = ()
) -> list[torch.Tensor] | None:
    """What the call writes to: ``out``, which none of ``read`` overlaps, or new tensors. None: `validate` has something to say."""
    if out is not None:
        return [out] if _is_apart(out, read) else None
    made = []
    for shape in known.shapes:
        t = x.new_empty(shape)
        if t.data_ptr() % ALIGNED:  # not where torch's own allocators begin, and a plan is for an alignment
            return None
        made.append(t)
    return made


def _is_apart(out: torch.Tensor, read: Sequence[torch.Tensor | None]) -> bool:
    if out.requires_grad:
        return False
    start = out.data_ptr()
    end = start + out.nbytes
    for t in read:
        if t is not None:
            first = t.data_ptr()
            # of what `validate.operands` lets pass, no element is in front of the first
            last = first + t.element_size() * (1 + sum([(size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True)]))
            if first < end and start < last:
                return False
    increment_version(out)  # see `validate.output`
    return True

"""Calls that come again: one with tensors like those of an earlier call on its context is neither checked nor planned anew.

An eager model makes the same few calls thousands of times, and few rows take the host longer than the GPU. All that the checks of
`validate` and the plan of a call depend on, but for where its tensors lie, is its `Signature`; a context keeps what came of it
with its plans. What lies elsewhere in each call, an ``out`` above all, is looked at in each call.
"""

import operator
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from ..runtime import faking, world
from ..runtime.control import ControlGroup

#: Bytes of which the addresses of new tensors are multiples.
ALIGNED = 16


class Signature(NamedTuple):
    """``key``: what calls that are alike have in common. ``addresses``: of the tensors that are there, in their order."""

    key: tuple[Any, ...]
    addresses: list[int]


class Known(NamedTuple):
    """What came of a call: number and plan of `GroupContext.plan`, and shape and strides of its results.

    ``spans``: bytes from the first element of each tensor to the last, in the order of `Signature.addresses`.
    """

    number: int
    plan: Any
    results: tuple[tuple[torch.Size, tuple[int, ...]], ...]
    spans: tuple[int, ...]


def signature(tensors: Sequence[torch.Tensor | None], *said: int | None) -> Signature | None:
    """Of a call with these tensors, and sizes that the caller said; None: nothing is known of such calls."""
    if forward_ad._current_level >= 0 or faking.is_on() or faking.is_transformed():
        return None
    key: list[Any] = []
    addresses = []
    try:
        for t in tensors:
            if t is None:
                key.append(None)
                continue
            address = t.data_ptr()
            if address == 0:  # empty, or a wrapper
                return None
            addresses.append(address)
            key += t.shape, t.stride(), t.dtype, t.device, t.is_neg(), address % ALIGNED
    except (AttributeError, RuntimeError, TypeError):  # no tensor, or no dense one, with strides and memory: `validate` says so
        return None
    for size in said:
        if size is not None and type(size) is not int:
            return None
    return Signature((*key, *said), addresses)


#: What is asked of each tensor of a list; mapped, as there may be hundreds.
_address, _elements = torch.Tensor.data_ptr, torch.Tensor.numel
_dtype, _device = operator.attrgetter("dtype"), operator.attrgetter("device")


def signature_of_list(tensors: Any) -> Signature | None:
    """`signature` of a list, or tuple, of tensors of one dtype that have elements and are contiguous; None of any other.

    Not of their shapes, which such a call does not depend on.
    """
    if forward_ad._current_level >= 0 or faking.is_on() or faking.is_transformed() or not isinstance(tensors, (list, tuple)):
        return None
    try:
        addresses, sizes = list(map(_address, tensors)), tuple(map(_elements, tensors))
        dtypes, devices = set(map(_dtype, tensors)), set(map(_device, tensors))
        plain = all(map(torch.Tensor.is_contiguous, tensors)) and not any(map(torch.Tensor.is_neg, tensors))
    except (AttributeError, RuntimeError, TypeError):
        return None
    if not plain or 0 in addresses or 0 in sizes or len(dtypes) != 1 or len(devices) != 1:
        return None
    return Signature((*dtypes, *devices, sizes, tuple([address % ALIGNED for address in addresses])), addresses)


def remember(
    context: Any,
    seen: Signature | None,
    tensors: Sequence[torch.Tensor | None],
    planned: tuple[int, Any],
    results: Sequence[torch.Tensor],
) -> None:
    """The call with these tensors has been made, as ``planned``, and wrote ``results``."""
    # a plan is for an alignment, and torch's own allocators have this one
    if seen is None or any(t.data_ptr() % ALIGNED for t in results):
        return
    read = [t for t in tensors if t is not None]
    spans = [t.element_size() * (1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))) for t in read]
    context.remember(seen.key, Known(*planned, tuple([(t.shape, t.stride()) for t in results]), tuple(spans)))


def find(
    kind: Any, kept_by: Hashable, ctx: Any, group: Any, control: ControlGroup, seen: Signature | None, x: torch.Tensor,
    outs: Sequence[torch.Tensor],
) -> tuple[Any, Known, list[torch.Tensor]] | None:  # fmt: skip
    """The context of a call with a product, ``ctx`` or the one that is kept, what it knows of such calls, and `results`.

    ``kept_by``: with what the name of the kept one begins. None: the call is to be looked at. Hold `ControlGroup.lock`.
    """
    if seen is None or (ctx is not None and group is not None):
        return None
    if ctx is None:
        found = find_kept((kept_by, control.name, seen.key[2]), seen.key)
    else:
        known = ctx.recall(seen.key) if type(ctx) is kind else None
        found = None if known is None else (ctx, known)
    made = None if found is None else results(found[1], seen, x, outs)
    return None if found is None or made is None else (*found, made)


def find_kept(name: Hashable, key: Hashable) -> tuple[Any, Known] | None:
    """The context that `keeping.kept` has by that name, and what it knows by that key."""
    this = world.current()
    context: Any = this.cached.get(name)
    if context is None:
        return None
    found = context.recall(key)
    if found is None or not context.in_step():
        return None
    if not context.captured:
        context.captured = this.executor.is_capturing()
    return context, found


def results(found: Known, seen: Signature, x: torch.Tensor, outs: Sequence[torch.Tensor] = ()) -> list[torch.Tensor] | None:
    """What the call writes to: ``outs``, the last of its signature, and new tensors. None: `validate` has something to say."""
    if outs and not _are_apart(outs, found, seen):
        return None
    made = list(outs)
    for shape, strides in found.results[len(made) :]:
        try:
            t = x.new_empty_strided(shape, strides)  # in half the time of new_empty
        except RuntimeError:  # no memory: the whole way raises that, too, and tells the other ranks
            return None
        if t.data_ptr() % ALIGNED:
            return None
        made.append(t)
    return made


def _are_apart(outs: Sequence[torch.Tensor], found: Known, seen: Signature) -> bool:
    """Whether this call may write to ``outs``: as far as addresses tell, none has a byte of another, or of what is read."""
    addresses, spans = seen.addresses, found.spans
    for i, out in enumerate(outs, len(addresses) - len(outs)):
        if out.requires_grad:
            return False
        start, end = addresses[i], addresses[i] + spans[i]
        for first, span in zip(addresses[:i], spans, strict=False):
            if first < end and start < first + span:
                return False
    increment_version(outs)  # see `validate.output`
    return True

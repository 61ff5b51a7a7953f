"""The contexts of calls that name none: made when first called for, grown, kept until finalize."""

import re
from collections.abc import Callable, Hashable
from typing import Any

import torch

from ..runtime import world
from ..runtime.control import ControlGroup
from ..runtime.errors import CallMismatch, PeerTimeout, untraced
from ..runtime.wording import counted

#: For who calls ag_gemm or all_gather with a shard of other rows than another rank's.
M_UNSAID = "without m=, M is the rows of a rank times the ranks: pass m= where ranks have different rows"


def may_lack_m(error: ValueError, size: str) -> None:
    """A note on an error of a call without m=, if it tells of ranks whose ``size`` differs: m= may be missing."""
    said = str(error)
    if M_UNSAID not in said and len(set(re.findall(rf"\b{size}=(\d+)", said))) > 1:
        error.add_note(M_UNSAID)


def alike(op: str, control: ControlGroup, sizes: dict[str, int], dtype: torch.dtype) -> None:
    """CallMismatch on all ranks if they make a call of different ``sizes`` or another ``dtype``, before a context is made for it.
    Collective."""
    shown = [f"{name.removeprefix('max_').upper()}={size}" for name, size in sizes.items()]
    said = control.gather(", ".join([*shown, str(dtype)]), f"making a context for {op}")
    for rank, theirs in zip(control.ranks, said, strict=True):
        if theirs != said[0]:
            rule = "they must be the same on all ranks"
            if op == "ag_gemm":
                rule += f"; {M_UNSAID}"
            raise CallMismatch(f"{op}: rank {control.ranks[0]} calls it with {said[0]} and rank {rank} with {theirs}; {rule}")


def as_many(op: str, control: ControlGroup) -> None:
    """CallMismatch on all ranks if one has made more calls between nodes than another, as behind one that it refused. Collective.

    Else ranks whose calls have failed would go on with different ones.
    """
    made = control.gather(control.between, f"{op}: calls so far")
    for rank, theirs in zip(control.ranks, made, strict=True):
        if theirs != made[0]:
            raise CallMismatch(
                f"{op}: rank {control.ranks[0]} has made {counted(made[0], 'call')} between nodes since a context was made for "
                f"them, and rank {rank} {theirs}, with those that it refused; all ranks of a group must make the same calls, in "
                "the same order. Call fluxlike.finalize and fluxlike.init on all ranks, or make new contexts and pass them"
            )


def in_step(control: ControlGroup) -> None:
    """Raise again how the ranks of a node got out of step, unless a program has made or closed a context since.

    They were told in different calls. If they met in the making of a context for their next ones, as if nothing had been, these
    would be different ones, too.
    """
    if control.local.board is not None:
        control.local.board.goes_on()
    if control.board is not None and control.board.apart is not None:
        control.catch_up()
        raise untraced(control.board.apart)


def kept(
    key: Hashable,
    control: ControlGroup,
    sizes: dict[str, int],
    make: Callable[[dict[str, int]], Any],
    most: int,
    agree: Callable[[], None] = lambda: None,
) -> Any:
    """The context that a call without one uses: one for each ``key``, made or grown collectively by ``make``.

    ``agree`` raises on all ranks if they make different calls; it is collective, and comes before what is there is closed.

    Sizes are rounded up to a power of two, up to ``most``, so that a model with changing lengths settles quickly. Growing
    synchronises with the other ranks and allocates, which a graph capture cannot: RuntimeError with the remedy.

    A context that calls have outgrown is closed, unless a CUDA graph has captured calls of it: replays use its memory, so it stays
    open until finalize, beside the new one. The ranks must all have captured such calls, or none: else ValueError on all.

    The new one is for the largest of each size, which no one call may have had; if there is no memory for that, for this call.
    """
    this = world.current()
    context = this.cached.get(key)
    capturing = this.executor.is_capturing()
    if context is not None and context.fits(sizes):
        context.captured |= capturing
        return context
    if capturing:
        raise RuntimeError(
            f"a context for {sizes} must be made, which a CUDA graph capture cannot do; run this call once before the capture, or "
            "pass a context of fluxlike.create_…_context"
        )
    in_step(control)
    agree()
    own = wanted = {name: min(1 << max(size - 1, 0).bit_length(), most) for name, size in sizes.items()}
    if context is not None and not context.closed:
        wanted = {name: max(size, getattr(context, name)) for name, size in wanted.items()}
        this.executor.synchronize()
        # raised on all ranks: those that closed it well would wait for the others in making the new one
        failure = context.unseen_failure()
        control.agree(f"replacing {context.label}", wanted | {"captured": context.captured}, failure)
        if not context.captured:
            context.close()
    try:
        context = make(wanted)
    except PeerTimeout:
        raise
    except RuntimeError:  # raised on all ranks alike
        if own == wanted:
            raise
        context = make(own)
    this.cached[key] = context
    context.keep()
    return context

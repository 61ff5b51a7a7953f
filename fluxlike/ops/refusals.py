"""Calls that this rank refuses for their arguments, or has no memory for, and what the other ranks learn of it.

They may have begun theirs, and wait. If this rank said nothing, they would take its next call of the same sizes for the one that it
refused, and all results from then on would be of different calls. So it makes an entry on the board of its node in place of the
call, and counts it, for what it says to other nodes in its next one. If all of them refuse theirs, whatever the reasons, entries
and counts are the same, and they are still in step.
"""

import warnings
from contextlib import suppress
from typing import Any

from ..runtime.control import ControlGroup
from ..runtime.errors import CallMismatch, PeerTimeout
from .group import wants_gradient


def tell(op: str, control: ControlGroup) -> None:
    """This rank has refused a call of ``op``, and is about to say why."""
    with control.lock, control.local.lock, suppress(CallMismatch):
        control.refused += 1
        if control.local.board is not None:
            control.local.board.call(f"a call of {op} that this rank refused by an error of its own")


class Refusing:
    """A ``with`` for what a call does before it begins: what raises there, an interrupt, too, leaves the call out.

    Behind the look at calls that come again. Of one that has begun an error has frozen the board, so nothing more is entered.
    """

    def __init__(self, op: str, control: ControlGroup) -> None:
        self._op, self._control = op, control

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None and not isinstance(error, CallMismatch | PeerTimeout):
            tell(self._op, self._control)


def without_gradient(op: str, x: Any) -> None:
    """Warn where ``op``, which makes no gradients, cuts them off: what is in front of it would not be trained."""
    if wants_gradient(x):
        warnings.warn(
            f"fluxlike.{op} makes no gradients, and x wants one, which does not come through the result. If it need not, pass "
            "x.detach(); gemm_rs, ag_gemm and gemm_ar, and the layers of fluxlike.nn, make gradients",
            stacklevel=3,
        )

"""The errors of the library. What the caller did wrong is a ValueError, what the machine lacks a RuntimeError."""

import copy
from typing import TypeVar

_HEARD = "heard_by"
_Error = TypeVar("_Error", bound=BaseException)


def untraced(error: _Error) -> _Error:
    """A copy of ``error``, and of its causes, that has not been raised: to be kept, and of what is kept to be raised.

    A traceback has the frames that the error has passed, and they what their callers worked with; each time that the same one is
    raised it gets longer.
    """
    first = _copied(error)
    made: BaseException = first
    cause, seen = error.__cause__, {id(error)}
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        made.__cause__ = made = _copied(cause)
        cause = cause.__cause__
    return first


def _copied(error: _Error) -> _Error:
    try:
        made = copy.copy(error)
    except Exception:  # its class is made of something else than its args
        made = type(error).__new__(type(error), *error.args)
        made.__dict__.update(error.__dict__)
    made.args, made.__suppress_context__ = error.args, error.__suppress_context__
    for name, value in error.__dict__.items():  # of which each has its own: notes, and who has heard of it
        if isinstance(value, list | set):
            made.__dict__[name] = copy.copy(value)
    return made


def heard(error: BaseException, group: str) -> None:
    """The ranks of a group, by its name, know that this one fails with ``error``; what it passes on its way need not tell them."""
    error.__dict__.setdefault(_HEARD, set()).add(group)


def is_heard(error: BaseException, group: str) -> bool:
    """Whether they know."""
    groups: set[str] | None = getattr(error, _HEARD, None)
    # of which no group is known all ranks raise
    return isinstance(error, (PeerTimeout, CallMismatch)) if groups is None else group in groups


class PeerTimeout(RuntimeError):
    """A wait for another rank ran out, or that rank is gone. The message names op, ranks, what, expected and seen."""

    #: The interpreter hands such an exception to the caller as it is, without wrapping it.
    fluxlike_passthrough = True

    def __init__(self, message: str, told: int = 0) -> None:
        """``told``: 0 where this rank waited for the one that is missing, 1 where a rank of another node has told it to give up
        and names the cause, 2 where one of its own node has. Of two that a rank has, the lesser says more.
        """
        super().__init__(message)
        self.told = told


class CallMismatch(ValueError):
    """The ranks of a group do different things: other calls, other sizes, another order. The message says who does what."""

    fluxlike_passthrough = True
    #: Whether all ranks had met when they found that they differ, so that each of them raises now, and none comes once more.
    met = False


def mismatch(what: str, ranks: list[int]) -> CallMismatch:
    """The error of a group of ``ranks`` that differ in ``what``."""
    return CallMismatch(
        f"{what}; all ranks of a group must make the same calls, with the same sizes, in the same order. Close the contexts "
        f"of the group of ranks {ranks} and make new ones; calls without a context work again after that, or after "
        "fluxlike.finalize and fluxlike.init on all ranks"
    )


class RaceError(RuntimeError):
    """FLUXLIKE_RACECHECK=1: two accesses to the same memory that nothing orders. The message names both."""

    fluxlike_passthrough = True

"""The errors of the library. What the caller did wrong is a ValueError, what the machine lacks a RuntimeError."""

_HEARD = "heard_by"


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


class RaceError(RuntimeError):
    """FLUXLIKE_RACECHECK=1: two accesses to the same memory that nothing orders. The message names both."""

    fluxlike_passthrough = True

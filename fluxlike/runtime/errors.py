"""The errors of the library. What the caller did wrong is a ValueError, what the machine lacks a RuntimeError."""

_HEARD = "fluxlike_peers_have_heard"


def heard(error: BaseException) -> None:
    """The other ranks have been told that this rank fails with ``error``; whatever it passes on its way up need not tell them."""
    setattr(error, _HEARD, True)


def is_heard(error: BaseException) -> bool:
    """Whether they have; those of PeerTimeout and CallMismatch come from them, or reach them in other ways."""
    return isinstance(error, (PeerTimeout, CallMismatch)) or hasattr(error, _HEARD)


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

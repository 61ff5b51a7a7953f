"""How contexts come to be and are held: made whole or not at all, on all ranks alike, and closed once."""

import contextlib
from collections.abc import Iterator
from typing import Any, Self

import torch

from ..runtime import faking, programs, world
from ..runtime.control import ControlGroup
from ..runtime.errors import CallMismatch, PeerTimeout


class Making(type):
    """How contexts are made: whole, or not at all.

    They outlive the call that makes them: tensors made in inference mode could not be written to outside of it, and those made
    under a fake one have no memory.
    """

    def __call__(cls, *args: Any, **named: Any) -> Any:
        programs.refuse_inside(f"the making of a {cls.__name__}")
        with torch.inference_mode(False), faking.off():
            context: Any = object.__new__(cls)  # type: ignore[arg-type]
            try:
                context.__init__(*args, **named)
            except BaseException as error:
                out_of_step = isinstance(error, (PeerTimeout, CallMismatch)) and not getattr(error, "met", False)
                if isinstance(error, (RuntimeError, ValueError)) and not out_of_step:
                    context.unmake()
                elif context not in getattr(getattr(context, "world", None), "contexts", ()):  # else finalize closes it
                    context.abandon()
                raise
            return context


@contextlib.contextmanager
def taking(op: str, control: ControlGroup) -> Iterator[None]:
    """In here a rank takes memory for a context that is its own; if one has too little, that is raised on all. Collective."""
    error: Exception | None = None
    try:
        yield
    except (RuntimeError, ValueError) as problem:
        error = problem
    except MemoryError as problem:
        error = RuntimeError(f"{op}: this process can take no more memory")
        error.__cause__ = problem
    control.agree(f"{op}: memory of each rank", None, error)


class Held(metaclass=Making):
    """What the ranks of a group have memory in common for, until it is closed: on one node, or on several."""

    #: The ranks of the group, as the world counts them, and this one's place among them.
    group_ranks: list[int]
    rank: int
    closed: bool
    #: What of it people want to see: sizes, dtype, how calls are made.
    shown: tuple[str, ...] = ()
    #: What to do when a call has failed; it ends the message.
    remedy = "Close the context and make a new one"

    def keep(self) -> None:
        """It is of calls without a context, so no program has it to close."""
        self.remedy = "Call fluxlike.finalize and fluxlike.init on all ranks, as calls without a context share one"

    def close(self) -> None:
        """Collective, and harmless when called again."""
        raise NotImplementedError

    def unmake(self) -> None:
        """The making has failed, on all ranks alike: what there is by now goes back, as nobody could close it."""

    def abandon(self) -> None:
        """It cannot be closed, as a peer or the device may still write to it: threads end, and the memory of the heap stays."""

    def __repr__(self) -> str:
        # of one that is half made, too
        said = "".join([f"{name}={getattr(self, name, None)}, " for name in self.shown])
        state = "closed" if getattr(self, "closed", True) else "open"
        return f"<{type(self).__name__} {said}ranks={getattr(self, 'group_ranks', None)}, {state}>"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{type(self).__name__} has memory that the ranks share, so it cannot be copied or pickled; make another one for the "
            "copy, and of a module that holds one copy the state_dict"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Close it. What that finds out is raised, or logged beside the error that is on its way."""
        try:
            self.close()
        except (ValueError, PeerTimeout) as problem:  # a mismatch, or what the last calls came to
            if error is None:
                raise
            world.log.warning("rank %d: %s", self.group_ranks[self.rank], problem)

"""What a wait of a kernel does on the CPU heap when it fails: it lets others run, and ends when it cannot be met."""

import threading
import time
from typing import TYPE_CHECKING

from ..kernels import lang
from ..runtime import programs, racecheck

if TYPE_CHECKING:
    from .group import GroupContext

#: The open contexts by the addresses of their control blocks.
by_ctl: dict[int, "GroupContext"] = {}
#: When the wait that a thread is in began.
_waits: dict[int, float] = {}
#: Threads whose wait knows that another rank has given up.
_told: set[int] = set()


def on_spin(want: int, seen: int, what: int, peer: int, ctl: int, turn: int) -> None:
    """One turn of a failed wait on the CPU heap: let others run, and end the wait when it cannot be met."""
    context = by_ctl[ctl]
    me = threading.get_ident()
    if turn == 0:
        _waits[me] = time.monotonic()
        _told.discard(me)
    if not programs.yield_program():
        programs.nap(time.monotonic() - _waits[me])
    if me not in _told and context.gave_up() not in (0, context.rank + 1):
        _told.add(me)  # what that rank published before it gave up may have come since the last look: one more
        return
    if me in _told:
        raise context.give_up(what, peer, want, seen)
    waited = time.monotonic() - _waits[me]
    if turn % 32 == 31:
        mismatch = context.board.diagnose()
        if mismatch is not None:
            raise mismatch
        gone = ", ".join(str(context.group_ranks[rank]) for rank in context.board.gone())
        if gone:
            raise context.give_up(what, peer, want, seen, f"rank(s) {gone} died. ", waited)
    if waited > context.limit_of(what):
        raise context.give_up(what, peer, want, seen)


lang.set_spin_hook(on_spin)
lang.set_used_rows_hook(racecheck.used_rows)
lang.set_awaits_hook(racecheck.awaits)

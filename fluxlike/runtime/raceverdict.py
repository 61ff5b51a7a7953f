"""What a checked process comes to in the end: a race that the program caught, or nothing checked at all, is no success.

`racecheck.start` and `stop` tell it of the checker's tables. ``python -m fluxlike racecheck`` asks for the `verdict` when the
program is over. If FLUXLIKE_RACECHECK=1 was there before the program began, the end of the process asks. A program that sets the
variable itself judges itself, as tutorial 6 does.
"""

import atexit
import multiprocessing
import os
import sys

from . import env
from .raceshadow import Shadow

_PROCESS = os.getpid()

_open: Shadow | None = None
_started = False
_kernels = False
_report = ""
_said = False


def opened(shadow: Shadow) -> None:
    """A checker has started."""
    global _open, _started
    _open, _started = shadow, True


def closing() -> None:
    """The checker's tables are about to go: keep what they say, of all ranks."""
    global _open, _kernels, _report
    if _open is not None:
        _kernels = _kernels or _open.kernels_seen
        _report = _report or (_open.stop_text() if _open.stopped_by else "")
    _open = None


def verdict(is_rank: bool) -> str:
    """What is wrong with a program that ended as if all were well; "" if nothing. ``is_rank``: it should have been checked."""
    global _said
    closing()
    if _said:
        return ""
    if _report:
        said = f"the program went on after a race:\n{_report}\nAfter it, what is read and written means nothing: mend it first."
    elif _started and not _kernels:
        said = (
            "nothing was checked: no kernel of any rank touched memory that is checked. Between fluxlike.init and finalize call an "
            "operation, launch a kernel of yours through a Context, or name what your kernels share with racecheck.watch."
        )
    elif is_rank and not _started:
        said = (
            'nothing was checked: the program never called fluxlike.init in this process. Call fluxlike.init(heap="shm") in every '
            "rank, and start the ranks by scripts/launch.sh or torchrun."
        )
    else:
        return ""
    _said = True
    return f"fluxlike racecheck: {said} This process does not end with status 0."


def _end() -> None:
    """The end of a process that was started with the variable set. An exit handler has no other way to a status."""
    if hasattr(sys, "last_value") or os.getpid() != _PROCESS:  # an exception's status is not 0; a forked child is no rank
        return
    said = verdict(is_rank="RANK" in os.environ and multiprocessing.parent_process() is None)
    if said:
        print(said, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


if env.get("FLUXLIKE_RACECHECK") == "1":
    atexit.register(_end)

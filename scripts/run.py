"""What launch.sh starts: torchrun, which ends as the rank that failed did, and says in one line which that was.

By itself torchrun ends with status 1 and a traceback of its own below what the rank said.
"""

import logging
import signal
import sys
import tempfile
from typing import Any

#: What it logs of an end, a line a rank, before the error: the line of ours says it.
SAID = ("Sending process %s closing signal", "failed (exitcode: %s)")


def first(failures: dict[int, Any]) -> int:
    """The rank that failed by itself: the others are ended by SIGTERM, often within the second that the times are told in."""
    return min(failures, key=lambda rank: (failures[rank].exitcode == -signal.SIGTERM, failures[rank].timestamp))


def name_of(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def misplaced(arguments: list[str]) -> None:
    """A word about what looks like an option of launch.sh and is one of the program, behind whose name it stands."""
    target, *of_program = arguments[arguments.index("--") + 1 :]
    for name in dict.fromkeys(argument.partition("=")[0] for argument in of_program):
        if name in ("--nproc", "--nnodes", "--rdzv"):
            print(f"launch.sh: {name} is given to {target}; to be launch.sh's it must stand before it", file=sys.stderr)


def main(arguments: list[str]) -> int:
    misplaced(arguments)
    try:
        return launched(arguments)
    except KeyboardInterrupt:  # while torch is imported, or torchrun waits for other hosts
        return end(f"ended by {name_of(signal.SIGINT)}", 128 + signal.SIGINT)


def launched(arguments: list[str]) -> int:
    """The exit status."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    logger.addFilter(lambda record: not str(record.msg).startswith(SAID))
    try:
        with tempfile.TemporaryDirectory(prefix="fluxlike-launch-") as folder:  # torchrun leaves its own behind
            run.main([f"--log-dir={folder}", *arguments])
    except ChildFailedError as error:
        rank = first(error.failures)
        status = error.failures[rank].exitcode
        if status == 128 + signal.SIGPIPE:  # nobody reads what it prints, and that is all there is to say
            return status
        if status < 0:
            return end(f"rank {rank} was killed by {name_of(-status)}", 128 - status)
        return end(f"rank {rank} ended with status {status}; what it said is above", status)
    except SignalException as error:
        return end(f"ended by {name_of(error.sigval)}", 128 + error.sigval)
    return 0


def end(why: str, status: int) -> int:
    print(f"launch.sh: {why}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

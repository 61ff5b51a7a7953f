"""What is the same on all ranks is said by one of each host: complaints about a command line, and help.

Imports nothing of weight: `racecheck` runs programs that may set variables before they import Triton.
"""

import argparse
import contextlib
import errno
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from ..runtime import env

#: Seconds in which the first rank of a host says why all end, as it may have begun later; of a busy machine they are few. The
#: launcher ends all ranks as soon as one has ended, so nobody waits for them to pass.
GRACE_S = 60.0


def is_first() -> bool:
    """Of each host, as a command line or a missing package need be wrong on one host only."""
    return os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0"


def speaks() -> bool:
    """Whether this rank says why all end, or all of its host; the others leave it time to."""
    if is_first():
        return True
    time.sleep(GRACE_S)
    return False


def cannot_print(error: BaseException) -> bool:
    """Whether an error is that what this process prints cannot be written: who reads has left, or the disk is full."""
    of_writes = errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO
    if not isinstance(error, OSError) or error.errno not in of_writes or error.filename is not None:
        return False
    try:
        stdout = sys.stdout.fileno()
    except (OSError, ValueError, AttributeError):  # no file
        return False
    try:
        os.write(stdout, b"\n")
    except OSError:
        return True
    return False


class Parser(argparse.ArgumentParser):
    """Complains and helps once a host, not once a rank."""

    def print_help(self, file: Any = None) -> None:
        if is_first():
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        if speaks():
            super().error(message)
        sys.exit(2)


@contextlib.contextmanager
def ends_what_it_began() -> Iterator[None]:
    """In here SIGTERM and SIGHUP raise SystemExit, so that processes and folders do not outlive this; a second one ends it as ever.

    But for signals that are heeded or ignored already, as under nohup. In the main thread.
    """

    def as_ever() -> None:
        for number in mine:
            signal.signal(number, signal.SIG_DFL)

    def end(number: int, frame: object) -> NoReturn:
        as_ever()
        sys.exit(128 + number)

    mine = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
    for number in mine:
        signal.signal(number, end)
    try:
        yield
    finally:
        as_ever()


def positive(parser: argparse.ArgumentParser, asked: argparse.Namespace, names: Iterable[str]) -> None:
    """Ends the process if one of these numbers of ``asked``, or one in these lists, is below 1."""
    for name in names:
        value = getattr(asked, name)
        least = min(value) if isinstance(value, list) else value
        if least < 1:
            parser.error(f"--{name} {least} is below 1; give at least one")


#: What to do about ranks on several nodes.
ONE_NODE = "start it on the ranks of one node, without --nnodes and FLUXLIKE_VIRTUAL_NODES"


def nodes(parser: argparse.ArgumentParser) -> int:
    """On how many nodes the launcher and the environment put the ranks; 0 where neither says."""
    everyone, here = os.environ.get("WORLD_SIZE", ""), os.environ.get("LOCAL_WORLD_SIZE", "")
    try:
        parts = env.virtual_nodes()
    except ValueError as error:
        parser.error(str(error))
    if everyone.isdecimal() and here.isdecimal() and int(here):
        return max(1, int(everyone) // int(here)) * parts
    return parts if parts > 1 else 0


def on_one_node(parser: argparse.ArgumentParser, what: str) -> None:
    """Ends the process if the ranks are on several nodes, before a program of theirs begins; ``what`` works on one."""
    count = nodes(parser)
    if count > 1:
        parser.error(f"the ranks are on {count} nodes, and {what} works on one; {ONE_NODE}")


def by_itself(parser: argparse.ArgumentParser, what: str) -> None:
    """Ends the process if a launcher has started others beside it: all would measure at once, and each what the others leave it."""
    count = os.environ.get("WORLD_SIZE", "1")
    if count != "1":
        parser.error(f"{what} in one process, and WORLD_SIZE={count}; start it by python, without scripts/launch.sh or torchrun")


def different(parser: argparse.ArgumentParser, asked: argparse.Namespace, names: Iterable[str]) -> None:
    """Ends the process if two of these files to be written are one, which only the later of them would be in."""
    seen: dict[str, str] = {}
    for name in names:
        path = getattr(asked, name)
        other = seen.setdefault(os.path.realpath(path), name) if path else name
        if other != name:
            parser.error(f"--{other} and --{name} are both {path}; name a file for each")


def writable(
    parser: argparse.ArgumentParser, out: str | None, option: str = "--out", file: bool = False, replaced: bool = False
) -> None:
    """Makes the folder ``out``, or that of the ``file``, on the rank that writes; ends the process if no file can be made there,
    before hours are spent. ``replaced``: what is there is, so that it may be a file only, and no pipe or device.
    """
    if out and os.environ.get("RANK", "0") == "0":
        folder = os.path.dirname(os.path.realpath(out)) if file else out  # of what a link points to
        try:
            if file and os.path.isdir(out):
                raise IsADirectoryError("it is a folder; name a file")
            if replaced and os.path.exists(out) and not os.path.isfile(out):
                raise OSError("it is no regular file, and would be replaced; name one, or one that is not there yet")
            os.makedirs(folder, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            system = f"no file can be made in {folder}: {error.strerror}; name a folder that you may write to"
            parser.error(f"{option} {out}: {error if error.errno is None else system}")

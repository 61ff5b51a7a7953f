"""What the command lines of the tools share that scripts/launch.sh starts on every rank."""

import argparse
import contextlib
import importlib.util
import io
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

import fluxlike

from ..runtime import world
from .bench_peers import Lost
from .bench_problems import SUITES, Problem
from .once import ONE_NODE, speaks
from .once import Parser as Parser  # for the tools, too
from .once import writable as writable


def add_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")


def seconds(text: str) -> float:
    """A time, as the type of an argument."""
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds from 0 on")
    return number


def add_shapes(
    parser: argparse.ArgumentParser,
    more: str = "",
    suites: Iterable[str] = SUITES,
    written: str = "MxNxK,MxNxK… of the whole problem",
) -> None:
    """``--suite`` and ``--shapes``, of which one may be given; `read_shapes` and `choose_suite` make them ready.

    ``written``: how shapes are, for the help.
    """
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--suite", choices=list(suites), help=f"{more}default: headline on GPUs, toy without")
    which.add_argument("--shapes", help=f"instead of a suite: {written}")


def read_shapes(parser: argparse.ArgumentParser, asked: argparse.Namespace, kind: type[Problem] = Problem) -> None:
    """``asked.shapes`` from text to what it says; ends the process if it is no list of shapes."""
    if asked.shapes is not None:
        try:
            asked.shapes = kind.parse(asked.shapes)
        except ValueError as error:
            parser.error(f"--shapes: {error}")


def choose_suite(parser: argparse.ArgumentParser, asked: argparse.Namespace, cuda: bool, kind: type[Problem]) -> None:
    """`read_shapes`, and a suite where neither was asked for; ends the process if this machine cannot do it."""
    read_shapes(parser, asked, kind)
    if asked.shapes:
        refuse_large(parser, asked.shapes, cuda, kind)
    elif asked.suite is None:
        asked.suite = "headline" if cuda else "toy"
    elif asked.suite not in kind.SUITES:
        parser.error(f"--suite {asked.suite} is none of {asked.op}'s, which are {', '.join(kind.SUITES)}")
    elif not asked.suite.endswith("toy") and not cuda:
        toy = max((name for name in kind.SUITES if name.endswith("toy")), key=len)
        parser.error(f"--suite {asked.suite} would take days in the interpreter; without GPUs use --suite {toy}, or small --shapes")


def refuse_large(parser: argparse.ArgumentParser, shapes: Iterable[Any], cuda: bool, kind: type[Problem]) -> None:
    """Ends the process if one of ``shapes`` would keep the interpreter for hours, in which it prints nothing."""
    most = kind.work(kind.parse(kind.LARGEST)[0])
    for shape in shapes:
        if not cuda and kind.work(shape) > most:
            parser.error(f"--shapes: {shape} would take hours in the interpreter; without GPUs {kind.LARGEST} is the most")


def ranks() -> int:
    """How many there are, as the launcher says; of a process group that is there already, its own. ValueError: it says none."""
    if dist.is_initialized():
        return dist.get_world_size()
    said = os.environ.get("WORLD_SIZE", "1")
    if not said.isdecimal() or not int(said):
        raise ValueError(f"WORLD_SIZE={said!r} is not a whole number above 0; unset it, and start the ranks by scripts/launch.sh")
    return int(said)


def refuse_uneven(parser: argparse.ArgumentParser, shapes: Iterable[Any], kind: type[Problem]) -> None:
    """Ends the process if the ranks do not divide one of ``shapes``, before they meet."""
    try:
        count = ranks()
    except ValueError as error:
        parser.error(str(error))
    for shape in shapes:
        why = kind.unfit(shape, count)
        if why is not None:
            parser.error(f"--shapes: {shape}: {why}")


def lacks_rich(tool: str, install: str = "rich") -> bool:
    """Whether rich is not there, with which ``tool`` prints; said once a host. ``install``: what to tell pip."""
    if importlib.util.find_spec("rich") is not None:
        return False
    if speaks():
        print(f"{tool} needs the package rich; run: python -m pip install {install}", file=sys.stderr)
    return True


class Outlet(io.FileIO):
    """Standard output of a rank, which goes nowhere once its reader has left, as `| head` does, or its disk is full.

    Ranks wait for each other: one that ended by the error would leave the others with one of their connections.
    """

    #: The status to end with since then, or 0.
    left = 0

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            Outlet.left = 128 + signal.SIGPIPE if isinstance(error, BrokenPipeError) else 1
            if Outlet.left == 1:
                print(f"what this prints cannot be written: {error.strerror}; direct it to where there is room", file=sys.stderr)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)


@contextlib.contextmanager
def outlet() -> Iterator[None]:
    """In here standard output is an `Outlet`, if it is this process's own."""
    own = sys.stdout
    if own is not sys.__stdout__ or not isinstance(own, io.TextIOWrapper):
        yield
        return
    own.flush()
    raw = io.BufferedWriter(Outlet(own.fileno(), "w", closefd=False))
    sys.stdout = io.TextIOWrapper(raw, encoding=own.encoding, errors=own.errors, line_buffering=own.line_buffering)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout = own


def run(tool: str, work: Callable[[], int], explain: Callable[[BaseException], str | None], heap_bytes: int | None = None) -> int:
    """fluxlike.init, ``work``, fluxlike.finalize: the exit status.

    ``explain``: what to say of an exception of ``work`` after which this process ends at once, because an orderly end would wait
    for ranks that wait for this one; None for one that goes on to the caller. The launcher ends the others. The status is as of a
    program that SIGPIPE ends where nobody reads any more, and 1 where what it prints cannot be written.
    """
    try:
        fluxlike.init(heap_bytes=heap_bytes)
    except (RuntimeError, ValueError) as error:
        if str(error).startswith(world.NOT_LAUNCHED):
            how = (f"{launcher} -m fluxlike {tool} …" for launcher in ("bash scripts/launch.sh", "torchrun --nproc-per-node N"))
            print(f"{tool} runs on all ranks; start it by {' or '.join(how)}", file=sys.stderr)
            return 2
        print(f"{tool}: {error}", file=sys.stderr)
        return 1
    try:
        with outlet():
            status = work()
    except Exception as error:
        said = explain(error)
        if said is None:
            raise
        print(f"{tool}: {said}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)
    fluxlike.finalize()
    return Outlet.left or status


@contextlib.contextmanager
def wishes_to_end() -> Iterator[list[int]]:
    """In here Ctrl-C and SIGTERM are wishes: they are written down in what this gives, and the tool ends when it can.

    Two of them, as the launcher passes on to its ranks what a terminal has sent to these, too; one more ends the process, as ever.
    """
    came: list[int] = []
    before: dict[int, Any] = {}

    def as_ever() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def wish(number: int, frame: object) -> None:
        came.append(number)
        if len(came) == 2:
            as_ever()

    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, wish) or signal.SIG_DFL
    try:
        yield came
    finally:
        as_ever()


def spans_nodes(tool: str) -> bool:
    """Whether the ranks are on several nodes, where ``tool`` has no work; said once. After fluxlike.init."""
    control = world.current().control
    if control.spans and control.rank == 0:
        where = f"the ranks are on {len(control.nodes)} nodes, and {tool} works on one"
        print(f"{tool}: {where}; {ONE_NODE}", file=sys.stderr, flush=True)
    return control.spans


def lost(error: BaseException) -> str | None:
    """For `run`: of a tool that measures, and can go on no more."""
    return f"{error}; nothing more can be measured" if isinstance(error, Lost) else None


def arguments(argv: Sequence[str] | None) -> Sequence[str]:
    """What the tool was called with."""
    return sys.argv[1:] if argv is None else argv

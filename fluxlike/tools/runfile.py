"""Run a Python file as Python itself would, from inside a tool."""

import argparse
import os
import runpy
import sys
import traceback

from . import once


def arguments(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    """Add FILE and its own arguments to a tool's."""
    parser.add_argument("file", metavar="FILE", nargs=nargs, help="the program; it calls fluxlike.init and uses CPU tensors")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="the program's own arguments")


def run(file: str, args: list[str], tool: str = "") -> int:
    """The exit status of the program; ends the ``tool`` with status 2 where the program had to be started by a launcher."""
    sys.argv = [file, *args]
    sys.path[0] = os.path.dirname(os.path.abspath(file))  # as Python does when it runs a file
    try:
        runpy.run_path(file, run_name="__main__")
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or 0
        print(leaving.code, file=sys.stderr)
        return 1
    except SyntaxError as error:
        if error.filename != file:  # of a module that the program imports
            raise
        if once.speaks():
            traceback.print_exception(error.with_traceback(None))  # as Python does, which has no frames to show either
        sys.exit(1)
    except RuntimeError as error:
        from ..runtime.world import NOT_LAUNCHED  # not before the program, which may set variables before it imports Triton

        if not str(error).startswith(NOT_LAUNCHED):
            raise
        print(f"{tool}: {error}", file=sys.stderr)
        sys.exit(2)
    return 0

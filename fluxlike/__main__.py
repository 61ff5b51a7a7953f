"""`python -m fluxlike TOOL …`: the tools, each imported only when it is asked for."""

import argparse
import importlib
import os
import signal
import sys

from . import __version__
from .tools.once import Parser, cannot_print, speaks

# tool: what it does. The tool's module is fluxlike.tools.<tool>; its `main(argv)` returns the exit status.
TOOLS = {
    "doctor": "what this machine has, what fluxlike would use, and what to mend",
    "bench": "how fast the operations are, against torch and against the limit",
    "tune": "find the fastest schedule and tiles for some shapes on this machine, and keep them",
    "topo": "how the GPUs are linked, and the trees planned for it",
    "model": "what gemm_rs and ag_gemm would take on more GPUs and nodes, by discrete events",
    "links": "all_reduce on the CPU, by emulated links of machines that are not there",
    "alone": "what calls cost beside their product, on one GPU that plays one rank of several",
    "trace": "what every program of every rank does when, in one call",
    "lint": "compile kernels for GPUs that are not there, and find what is wrong in the machine code",
    "racecheck": "run a program on the CPU heap and find accesses that no signal orders",
    "soak": "random calls for a long time, every result checked",
}


def main(argv: list[str] | None = None) -> int:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started this; what tools print, or others say of them, goes nowhere
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that has ASCII only gets a ? for an arrow, and no traceback
    width = max(map(len, TOOLS))
    parser = Parser(
        prog="python -m fluxlike",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="tools:\n" + "\n".join(f"  {name:<{width}}  {what}" for name, what in TOOLS.items()),
    )
    parser.add_argument("--version", action="version", version=f"fluxlike {__version__}")
    parser.add_argument("tool", choices=list(TOOLS), metavar="TOOL", help="one of the tools below; TOOL --help says more")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="the tool's own arguments")
    if not (sys.argv[1:] if argv is None else argv):
        if speaks():
            parser.print_help(sys.stderr)  # an error's usage would leave the tools out
        return 2
    asked = parser.parse_args(argv)
    try:
        status: int = importlib.import_module(f"fluxlike.tools.{asked.tool}").main(asked.args)
        sys.stdout.flush()
    except OSError as error:
        if not cannot_print(error):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # to where Python's end flushes what is left
        if isinstance(error, BrokenPipeError):  # who reads has left, as `| head` does
            return 128 + signal.SIGPIPE  # as of a program that the signal ends
        print(f"{parser.prog} {asked.tool}: what it prints cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return status


if __name__ == "__main__":
    try:
        ended = main()
    except KeyboardInterrupt:  # Ctrl-C is no fault; Python then ends itself by the signal, which shells know as status 130
        sys.excepthook = lambda *_: None
        raise
    sys.exit(ended)

"""`python -m fluxlike racecheck FILE [ARGS]`: run a program with the race checker on. See docs/racecheck.md.

    bash scripts/launch.sh -m fluxlike racecheck tutorials/02_push_tiles.py --calls 3

It sets the variable and runs the file; all else happens in `runtime.racecheck`. Every rank must be started this way. A program that
ends well after a race that it caught, or in which nothing was checked, ends with status 1 all the same; of one without a race, rank
0 says so.
"""

import importlib
import os
import sys

from ..runtime import env, raceverdict
from . import once, runfile


def main(argv: list[str]) -> int:
    if argv[:1] == ["--cost"]:
        return importlib.import_module(".racecheck_cost", __package__).main(argv[1:])  # type: ignore[no-any-return]
    parser = once.Parser(
        prog="python -m fluxlike racecheck",
        description="Runs a program on the CPU heap and finds accesses that no signal orders. See docs/racecheck.md.",
        epilog="Instead of a program, --cost measures what the checker costs; --cost --help says more.",
    )
    runfile.arguments(parser)
    asked = parser.parse_args(argv)
    if not os.path.isfile(asked.file):
        parser.error(f"there is no file {asked.file}")
    once.on_one_node(parser, "racecheck")
    env.put("FLUXLIKE_RACECHECK", "1")
    status = runfile.run(asked.file, asked.args, "racecheck")
    problem = raceverdict.verdict(is_rank=True)
    if problem:
        print(problem, file=sys.stderr)
    elif not status and os.environ.get("RANK", "0") == "0":  # what is found on any rank is known to all
        print("racecheck: no race found", flush=True)
    return status or int(bool(problem))

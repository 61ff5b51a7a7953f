"""`python -m fluxlike racecheck FILE [ARGS]`: run a program with the race checker on. See docs/racecheck.md.

    bash scripts/launch.sh -m fluxlike racecheck tutorials/02_push_tiles.py --calls 3

It sets the variable and runs the file; all else happens in `runtime.racecheck`. Every rank must be started this way.
"""

import argparse
import os
import runpy
import sys

from ..runtime import env


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m fluxlike racecheck", description=__doc__.splitlines()[0])
    parser.add_argument("file", metavar="FILE", help="the program; it calls fluxlike.init and uses CPU tensors")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="the program's own arguments")
    asked = parser.parse_args(argv)
    if not os.path.isfile(asked.file):
        parser.error(f"there is no file {asked.file}")
    env.put("FLUXLIKE_RACECHECK", "1")
    sys.argv = [asked.file, *asked.args]
    sys.path[0] = os.path.dirname(os.path.abspath(asked.file))  # as Python does when it runs a file
    try:
        runpy.run_path(asked.file, run_name="__main__")
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or 0
        print(leaving.code, file=sys.stderr)
        return 1
    return 0

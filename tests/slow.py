"""Which slow tests a run has: with FLUXLIKE_TEST_SLOW=n of each n one, of n commits in a row each time another.

Slow tests take more than half of a whole run, and nearly each is one of many alike: a mutant, a kernel for one more GPU, another
number of ranks. So .ci/run has an eighth of them (n = 8), and all that are about a file which the last `RECENT` commits changed:
what the mark names by patterns, as `slow("fluxlike/tools/lint/*.py")`, or else the test's own. Where these are more than `MOST`, as
behind a change to what all kernels need, about so many of them, or an eighth: who changes that runs all. One of `slow(ALWAYS)`
always runs.
"""

import fnmatch
import functools
import os
import subprocess
import zlib
from collections.abc import Collection, Sequence
from typing import Any

import pytest
from ranks import ROOT

RECENT = 20
#: In one pytest.
MOST = 50
#: Whatever was changed.
ALWAYS = "*"


def behind(quick: int, values: Sequence[Any]) -> list[Any]:
    """Parameters alike enough that the first few do for a quick run; those behind are slow."""
    rest = [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow) for value in values[quick:]]
    return [*values[:quick], *rest]


def share() -> int:
    """FLUXLIKE_TEST_SLOW, checked; 1 for all."""
    text = os.environ.get("FLUXLIKE_TEST_SLOW") or "1"
    if not text.isdecimal() or int(text) < 1:
        raise pytest.UsageError(f"FLUXLIKE_TEST_SLOW={text!r} must be a whole number above 0: of so many slow tests one runs")
    return int(text)


@functools.cache
def history() -> tuple[int, tuple[str, ...]] | None:
    """How many commits there are, and the files that the last ones changed; None where there is no git to ask."""

    def git(*asked: str) -> list[str]:
        return subprocess.run(["git", *asked], cwd=ROOT, text=True, capture_output=True, check=True).stdout.splitlines()

    try:
        return int(git("rev-list", "--count", "HEAD")[0]), tuple(git("log", f"-{RECENT}", "--format=", "--name-only"))
    except (OSError, subprocess.CalledProcessError):
        return None


def is_due(name: str, n: int, commits: int) -> bool:
    """Whether it is the turn of the test called so, of each n, behind so many commits."""
    return (zlib.crc32(name.encode()) + commits) % n == 0


def is_about(files: Collection[str], changed: Sequence[str]) -> bool:
    return any(fnmatch.filter(changed, pattern) for pattern in files)


def others(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Those that are left for other commits; none, where nobody knows what was changed."""
    n = share()
    known = history() if n > 1 else None
    if known is None:
        return set()
    commits, changed = known
    asked: dict[pytest.Item, list[str]] = {}
    for item in items:
        marks = list(item.iter_markers("slow"))
        files = [name for mark in marks for name in mark.args] or [os.path.relpath(item.path, ROOT)]
        if marks and ALWAYS not in files:
            asked[item] = files
    about = {item for item, files in asked.items() if is_about(files, changed)}
    few = min(n, max(1, -(-len(about) // MOST)))
    return {item for item in asked if not is_due(item.nodeid, few if item in about else n, commits)}

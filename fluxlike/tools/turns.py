"""What the tutorials that measure whole models share: several ways to do the same, timed in turn, and the record of it.

As in `bench`: a chip that has just idled runs faster than a busy one, so the ways take turns, in another order each round, after a
round that does not count. A round's time is that of the slowest rank. On the CPU heap each way runs once and there is no time.
"""

import argparse
import json
import os
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..ops import tuning
from . import command
from .bench_peers import Peers
from .bench_report import environment

#: Milliseconds of one timing, at least; one call if it takes longer.
ENOUGH_MS = 200.0


def refuse_uneven(parser: argparse.ArgumentParser, args: argparse.Namespace, names: Sequence[str]) -> None:
    """Ends the process, before ranks meet, if they do not divide all of the sizes of ``args`` with these names."""
    ranks = command.ranks()
    if any(getattr(args, name) % ranks for name in names):
        sizes = ", ".join(f"--{name} {getattr(args, name)}" for name in names)
        parser.error(f"{ranks} ranks do not divide all of {sizes}; give others, or another --nproc to launch.sh")


def refuse_heads(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """The same if the sizes of ``args`` are of no attention whose queries share heads of keys and values."""
    if min(args.heads, args.kv_heads) < 1 or args.heads % args.kv_heads or args.hidden % args.heads:
        sizes = f"--hidden {args.hidden} of --heads {args.heads} of --kv_heads {args.kv_heads}"
        parser.error(f"{sizes}: each must be above 0 and a multiple of the next; give others")


def in_turns(ways: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """ms a call of each way in each round, on the slowest rank; empty lists without GPUs. Collective."""
    cuda, peers = torch.cuda.is_available(), Peers()
    settle = torch.cuda.synchronize if cuda else lambda: None

    def once(way: Callable[[], Any], calls: int) -> float:
        settle()
        peers.barrier()
        return peers.slowest(lambda: tuning.timed(way, calls, cuda, settle) * 1e3)

    first = {name: once(way, 1) for name, way in ways.items()}
    if not cuda:
        return {name: [] for name in ways}
    calls = {name: max(1, round(ENOUGH_MS / max(ms, 1e-3))) for name, ms in first.items()}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(-1, rounds):
        for name in tuning.in_turn(list(ways), turn):
            ms = once(ways[name], calls[name])
            if turn >= 0:
                found[name].append(ms)
    return found


def median(ms: list[float]) -> float | None:
    return statistics.median(ms) if ms else None


def record(path: Path, script: str, facts: Mapping[str, Any]) -> None:
    """Write ``facts`` of a run of ``script``, and the environment, as JSON. For rank 0."""
    stamp = environment([])
    ranks = ["--nproc", os.environ["LOCAL_WORLD_SIZE"]] if "LOCAL_WORLD_SIZE" in os.environ else []
    stamp["command"] = shlex.join(["bash", "scripts/launch.sh", *ranks, script, *sys.argv[1:]])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**facts, "environment": stamp}, indent=1) + "\n", encoding="utf-8")

"""`python -m fluxlike links [TOPOLOGY …]`: all_reduce on machines that are not there, by links that are emulated on the CPU heap.

    bash scripts/launch.sh --nproc 8 -m fluxlike links p3.16xlarge nvswitch-8 --json links.json

Rank i is GPU i of each machine; with fewer ranks than GPUs it is the machine of the first ones. For each size and algorithm:

* *on paper*: the bytes of each pair over the GB/s of what they take (`links_wires.gates`), the busiest of these, and the trips that
  follow each other. As if whole tensors went at once: blocks that follow each other hide some of the trips, and wait for others.
* *emulated*: the shipped kernels, run by the interpreter, with every push delayed as `links_wires` says; wall-clock time of the
  slowest rank over ``slowdown``, the median of the rounds. Each result is compared with the sum.

Before that the call is timed without links, which is the interpreter's own time, and ``slowdown`` is such that this is no more than
``--share`` of the time on paper.

`tree` is algo="trees" with one tree for all, `trees` with one for each rank.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

import fluxlike

from ..ops import trees
from ..ops.exchange import SIGNAL, TRIP
from ..runtime import env, world
from ..runtime.wording import counted
from ..topology import LinkMatrix, Tree, load, plan_trees
from . import command, once, topo
from .bench_reduce import parse_sizes
from .links_wires import Gate, gates, slowed

ALGORITHMS = ("one_shot", "two_shot", "bulk", "tree", "trees")
#: FLUXLIKE_TREE_ARRAY_BOUND, up to which a tensor goes over one tree.
BOUNDS = {"tree": 1 << 62, "trees": 0}


@dataclass
class Row:
    """An algorithm on a machine at a size; times in µs of the machine."""

    topology: str
    nbytes: int
    algo: str
    paper_us: float
    emulated_us: float
    rounds_us: list[float]
    slowdown: float
    interpreter_s: float
    busiest_bytes: int  # of a pair of ranks, in one direction


def pushed(algo: str, nbytes: float, itemsize: int, ranks: int, plan: Sequence[Tree]) -> list[list[float]]:
    """Bytes that each rank pushes to each other one. ``plan``: the trees, for "tree" and "trees"."""
    each = {"one_shot": 1.0, "two_shot": 2 / ranks, "bulk": 2 / ranks}.get(algo, 0.0) * nbytes
    found = [[each * (i != j) for j in range(ranks)] for i in range(ranks)]
    for tree in plan if algo in BOUNDS else ():
        for parent, child in tree.edges:
            found[child][parent] += nbytes / len(plan) * 4 / itemsize  # sums, in fp32
            found[parent][child] += nbytes / len(plan)
    return found


def hops(algo: str, plan: Sequence[Tree]) -> int:
    """Trips that follow each other."""
    return 2 * max(tree.height for tree in plan) if algo in BOUNDS else 1 if algo == "one_shot" else 2


def on_paper(matrix: LinkMatrix, algo: str, nbytes: float, itemsize: int, plan: Sequence[Tree]) -> float:
    """Seconds: those of the busiest link or port, and the trips."""
    busy: dict[Gate, float] = {}
    for i, row in enumerate(pushed(algo, nbytes, itemsize, len(matrix), plan)):
        for j, count in enumerate(row):
            for gate in gates(matrix, i, j) if count else ():
                if gate is not None:
                    busy[gate] = busy.get(gate, 0.0) + count / (matrix.bandwidth[i][j] * 1e9)
    signals = 0 if algo in ("one_shot", "two_shot") else SIGNAL
    return max(busy.values(), default=0.0) + hops(algo, plan) * (TRIP + signals)


def machine_of(name: str, ranks: int) -> LinkMatrix:
    """The first GPUs of a machine, one a rank. ValueError if there are not as many, or one that does not reach all others."""
    whole = load(name)
    if ranks < 2:
        raise ValueError("one rank has no links; start two or more: bash scripts/launch.sh --nproc 2 -m fluxlike links")
    if len(whole) < ranks:
        raise ValueError(f"{name} has {counted(len(whole), 'GPU')} for {ranks} ranks; start as many ranks as it has GPUs, or fewer")
    matrix = whole.part(range(ranks))
    for source in range(ranks):
        for target in range(source):
            gates(matrix, source, target)
    return matrix


def forget_trees() -> None:
    """The next call over trees makes its plan anew. Collective."""
    this = world.current()
    context = this.cached.pop((trees.KEPT_AS, this.control.name), None)
    if context is not None:
        context.close()


class Emulation:
    """One machine: what its matrix is for these ranks, and runs on it."""

    def __init__(self, name: str, share: float, rounds: int, dtype: torch.dtype) -> None:
        this = world.current()
        self.name, self.share, self.rounds, self.dtype = name, share, rounds, dtype
        env.put("FLUXLIKE_TOPOLOGY", name)
        self.matrix = machine_of(name, this.size)

    def row(self, algo: str, nbytes: int) -> Row:
        """Run it. RuntimeError if a result is wrong."""
        size, itemsize = world.current().size, self.dtype.itemsize
        plan = plan_trees(self.matrix, 1 if algo == "tree" else size)
        if algo in BOUNDS:
            forget_trees()
            env.put("FLUXLIKE_TREE_ARRAY_BOUND", str(BOUNDS[algo]))
        generator = torch.Generator().manual_seed(world.current().rank)
        x = torch.randint(-4, 5, (nbytes // itemsize,), generator=generator).to(self.dtype)  # sums are exact
        right = self.summed(x)
        self.call(x, algo, right)  # makes memory and plans
        plain = self.call(x, algo, right)
        paper = on_paper(self.matrix, algo, nbytes, itemsize, plan)
        slowdown = plain / (self.share * paper)
        with slowed(self.matrix, slowdown) as wires:
            us = [self.call(x, algo, right) / slowdown * 1e6 for _ in range(self.rounds)]
        busiest = max(map(max, self.gathered(wires.sent))) // self.rounds
        return Row(self.name, nbytes, algo, paper * 1e6, statistics.median(us), us, slowdown, plain, busiest)

    @staticmethod
    def gathered(value: Any) -> list[Any]:
        return world.current().control.gather(value, "emulating links")

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        total = x.to(torch.float32, copy=True)
        torch.distributed.all_reduce(total)
        return total.to(self.dtype)

    def call(self, x: torch.Tensor, algo: str, right: torch.Tensor) -> float:
        """Seconds of a call on the slowest rank."""
        world.current().control.barrier("emulating links")
        since = time.monotonic()
        y = fluxlike.all_reduce(x, algo="trees" if algo in BOUNDS else algo)
        spent = time.monotonic() - since
        wrong = [rank for rank, same in enumerate(self.gathered(torch.equal(y, right))) if not same]
        if wrong:
            raise RuntimeError(f"{algo} on {self.name} gave a wrong sum on ranks {wrong}")
        return max(self.gathered(spent))


def table(rows: Sequence[Row]) -> list[str]:
    """Markdown: a line a machine and size, a column an algorithm."""
    algos = list(dict.fromkeys(row.algo for row in rows))
    lines = ["| µs, emulated (on paper) | " + " | ".join(f"`{algo}`" for algo in algos) + " |", "|---|" + "--:|" * len(algos)]
    by_place: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        by_place.setdefault((row.topology, row.nbytes), {})[row.algo] = row
    for (name, nbytes), found in by_place.items():
        cells = [f"{found[a].emulated_us:.1f} ({found[a].paper_us:.1f})" if a in found else "" for a in algos]
        lines.append(f"| {name}, {nbytes if nbytes % 1024 else f'{nbytes >> 10} K'}B | " + " | ".join(cells) + " |")
    return lines


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.Parser(
        prog="python -m fluxlike links",
        description="Runs all_reduce on the CPU heap by emulated links of machines that are not there.",
        epilog="Exit status: 1 if a call failed or its file could not be made after all; 2 for wrong arguments, such as a path "
        "where no file can be made, or where GPUs are seen or ranks are on several nodes. What is emulated, and what not, is in "
        "fluxlike/tools/links_wires.py.",
    )
    which = "presets or JSON files (p3.16xlarge and nvswitch-8); of each the first GPUs, one a rank"
    parser.add_argument("topologies", nargs="*", default=["p3.16xlarge", "nvswitch-8"], help=which)
    parser.add_argument("--sizes", default="64K,256K,1M", help="bytes of each rank's tensor (64K,256K,1M)")
    parser.add_argument("--algos", default=",".join(ALGORITHMS), help=f"some of {','.join(ALGORITHMS)} (all); tree: one for all")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="float32")
    parser.add_argument("--share", type=float, default=0.1, help="of the interpreter's own time in the emulated one (0.1)")
    parser.add_argument("--rounds", type=int, default=1, help="timed calls of each algorithm (1)")
    parser.add_argument("--programs", type=int, default=16, help="programs of a kernel, as FLUXLIKE_CPU_PROGRAMS (16)")
    parser.add_argument("--json", metavar="FILE", help="write the figures")
    asked = parser.parse_args(argv)
    for name in asked.topologies:
        try:
            machine_of(name, command.ranks())  # before those in front of it have been measured, for minutes
        except ValueError as error:
            parser.error(str(error))
    asked.algos = asked.algos.split(",")
    unknown = [name for name in asked.algos if name not in ALGORITHMS]
    if unknown:
        parser.error(f"--algos: {', '.join(map(repr, unknown))} is not one of {', '.join(ALGORITHMS)}")
    once.positive(parser, asked, ["rounds"])
    if not 0 < asked.share <= 1:
        parser.error(f"--share {asked.share:g} is not above 0 and at most 1; give such a number")
    if not 1 <= asked.programs <= 64:
        parser.error(f"--programs {asked.programs} is not from 1 to 64, as FLUXLIKE_CPU_PROGRAMS must be; give such a number")
    try:
        asked.sizes = [size.nbytes for size in parse_sizes(asked.sizes)]
    except ValueError as error:
        parser.error(f"--sizes: {error}")
    uneven = [nbytes for nbytes in asked.sizes if nbytes % 4]
    if uneven:
        parser.error(f"--sizes: {uneven[0]} bytes are no multiple of 4; give such a number")
    command.writable(parser, asked.json, "--json", file=True)
    return asked


def main(argv: list[str] | None = None) -> int:
    asked = parse(argv)
    if torch.cuda.is_available():
        print("links: links are emulated on the CPU heap only; hide the GPUs by CUDA_VISIBLE_DEVICES=''", file=sys.stderr)
        return 2
    stamp = topo.stamp(command.arguments(argv), "links") | {"machine": f"CPU heap, emulated links; {topo.processor()}"}
    env.put("FLUXLIKE_CPU_PROGRAMS", str(asked.programs))

    def work() -> int:
        if command.spans_nodes("links"):
            return 2
        rows = []
        first = world.current().rank == 0
        for name in asked.topologies:
            machine = Emulation(name, asked.share, asked.rounds, getattr(torch, asked.dtype))
            for nbytes in asked.sizes:
                for algo in asked.algos:
                    rows.append(machine.row(algo, nbytes))
                    if first:
                        r = rows[-1]
                        times = f"{r.emulated_us:.1f} µs emulated, {r.paper_us:.1f} on paper"
                        print(f"{name}, {nbytes} bytes, {algo}: {times}; slowed down {r.slowdown:.2g} times", flush=True)
        if first:
            print("\n".join(table(rows)))
            if asked.json:
                facts = {"ranks": world.current().size, "dtype": asked.dtype, "share": asked.share, "trip_s": TRIP}
                facts |= {"signal_s": SIGNAL, "programs": asked.programs}
                topo.write(asked.json, {"environment": stamp, "protocol": facts, "rows": [asdict(row) for row in rows]})
        return 0

    return command.run("links", work, lambda error: str(error) if isinstance(error, (OSError, RuntimeError, ValueError)) else None)

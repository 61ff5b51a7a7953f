"""`python -m fluxlike topo`: how the GPUs of a machine are linked, and the trees planned for it. See docs/topology.md."""

import argparse
import importlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..topology import Cost, LinkMatrix, Tree, current, load, measure, plan_trees, presets, probe
from ..topology.plan import OBJECTIVES
from . import topo_report


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m fluxlike topo",
        description="Prints how GPUs are linked and the trees planned for that.",
        epilog=f"presets: {', '.join(presets.NAMES)}, nvswitch-N, ring-N. More in docs/topology.md.",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("topology", nargs="?", help="a preset or a JSON file (FLUXLIKE_TOPOLOGY, else this machine's GPUs)")
    what.add_argument("--all", action="store_true", help="every preset, by each objective, as a table")
    parser.add_argument("--k", type=int, help="number of trees (one for each GPU)")
    parser.add_argument("--roots", help="their roots, as 0,3 (0 to k - 1)")
    parser.add_argument("--objective", choices=OBJECTIVES, default="minmax")
    parser.add_argument("--link-usage-penalty", type=float, default=0.7, help="mxnet: what a use leaves of a link's weight (0.7)")
    parser.add_argument("--backtrack", action="store_true", help="mxnet: search every tree instead of clustering")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--probe", action="store_true", help="measure copies between this machine's GPUs")
    parser.add_argument("--save", metavar="FILE", help="write the matrix, for FLUXLIKE_TOPOLOGY")
    parser.add_argument("--json", metavar="FILE", help="write matrix, trees and figures")
    parser.add_argument("--png", metavar="FILE", help="draw both; needs matplotlib")
    asked = parser.parse_args(argv)
    if asked.all and (asked.probe or asked.save or asked.png or asked.k or asked.roots):
        parser.error("--all plans the presets as they are; of the other options it takes --seed and --json")
    if asked.probe and asked.topology:
        parser.error(f"--probe measures this machine's GPUs, not {asked.topology!r}; leave out one of them")
    try:
        asked.roots = [int(root) for root in asked.roots.split(",")] if asked.roots else None
    except ValueError:
        parser.error(f"--roots {asked.roots!r} is no list of numbers, such as 0,3")
    return asked


def probed() -> LinkMatrix:
    """This machine's GPUs, with copies measured. RuntimeError without GPUs."""
    matrix = LinkMatrix.detect()
    torch = importlib.import_module("torch")
    return probe.probed(matrix, probe.probe(probe.torch_copies(torch), len(matrix)))


def planned(matrix: LinkMatrix, **options: Any) -> tuple[list[Tree], Cost, float]:
    """The trees, what they cost, and the processor seconds that planning took."""
    since = time.process_time()
    trees = plan_trees(matrix, **options)
    seconds = time.process_time() - since
    return trees, measure(matrix, trees), seconds


def as_json(trees: Sequence[Tree], cost: Cost, seconds: float) -> dict[str, Any]:
    return {
        "depth": cost.depth, "load": round(cost.load, 4), "least": round(cost.least, 4), "weight": round(cost.weight, 4),
        "gb_s": round(cost.gb_s, 2), "most_edges_at_a_gpu": max(cost.ports), "plan_s": round(seconds, 3),
        "weights": [round(tree.weight, 4) for tree in trees],
        "trees": [{"root": tree.root, "levels": tree.steps} for tree in trees],
    }  # fmt: skip


def everything(seed: int, arguments: Sequence[str], out: str | None) -> None:
    """A table of all presets by all methods; the same as JSON with the trees."""
    methods: dict[str, dict[str, Any]] = {
        "minmax": {}, "mxnet": {"objective": "mxnet"}, "mxnet, backtrack": {"objective": "mxnet", "backtrack": True},
    }  # fmt: skip
    rows = []
    for name in presets.NAMES:
        for method, options in methods.items():
            found = planned(LinkMatrix.preset(name), seed=seed, **options)
            rows.append({"preset": name, "method": method} | as_json(*found))
    print("\n".join(topo_report.table(rows)))
    if out:
        write(out, {"environment": stamp(arguments), "rows": rows})


def stamp(arguments: Sequence[str]) -> dict[str, Any]:
    """When, where and with what; without what only matters for GPUs where there is none."""
    from .bench_report import environment

    said = environment(arguments, "topo")
    return {key: value for key, value in said.items() if value and (said["gpu"] or not key.startswith("clocks"))}


def write(path: str, data: dict[str, Any]) -> None:
    """JSON, with each row of the outermost lists on a line."""
    parts = []
    for key, value in data.items():
        text = json.dumps(value, ensure_ascii=False)
        if isinstance(value, list):
            text = "[\n" + ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in value) + "\n ]"
        parts.append(f" {json.dumps(key)}: {text}")
    Path(path).write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")
    print(f"written: {path}")


def one(asked: argparse.Namespace, arguments: Sequence[str]) -> None:
    matrix = probed() if asked.probe else load(asked.topology) if asked.topology else current()
    print("\n".join(topo_report.matrix_lines(matrix)), flush=True)
    if asked.save:
        matrix.save(asked.save)
        print(f"written: {asked.save}")
    options = {
        "k": asked.k, "objective": asked.objective, "link_usage_penalty": asked.link_usage_penalty,
        "backtrack": asked.backtrack, "seed": asked.seed, "roots": asked.roots,
    }  # fmt: skip
    trees, cost, seconds = planned(matrix, **options)
    print("\n".join(topo_report.plan_lines(asked.objective, trees, cost, seconds)), flush=True)
    if asked.json:
        found = as_json(trees, cost, seconds)
        write(asked.json, {"environment": stamp(arguments), "matrix": matrix.as_json(), "options": options} | found)
    if asked.png:
        print(topo_report.draw(matrix, trees, cost, Path(asked.png)) or f"written: {asked.png}")


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    asked = parse(argv)
    try:
        if asked.all:
            everything(asked.seed, arguments, asked.json)
        else:
            one(asked, arguments)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"topo: {error}", file=sys.stderr)
        return 1
    return 0

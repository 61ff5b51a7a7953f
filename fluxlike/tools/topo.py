"""`python -m fluxlike topo`: how the GPUs of a machine are linked, and the trees planned for it. See docs/topology.md."""

import argparse
import contextlib
import importlib
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..topology import Cost, LinkMatrix, Tree, detect, load, measure, plan_trees, presets, probe
from ..topology.matrix import named, names_file
from ..topology.plan import MOST, OBJECTIVES
from . import once, topo_report

#: Trees that are asked for at most: one for each GPU of the largest preset. A search, and what it prints, grows with their number.
MOST_TREES = 1024


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = once.Parser(
        prog="python -m fluxlike topo",
        description="Prints how GPUs are linked and the trees planned for that.",
        epilog=f"presets: {', '.join((*presets.NAMES, *presets.NUMBERED))}; trees are planned for up to {MOST} GPUs, or for more "
        "on one switch. Exit status: 1 if this machine's GPUs cannot be looked at, or a file could not be made after all; 2 for "
        "wrong arguments, such as a path where no file can be made, or a topology that cannot be read or has no plan. More in "
        "docs/topology.md.",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("topology", nargs="?", help="a preset or a JSON file (FLUXLIKE_TOPOLOGY, else this machine's GPUs)")
    what.add_argument("--all", action="store_true", help="every preset, by each objective, as a table")
    parser.add_argument("--random", metavar="N", type=int, default=0, help="with --all: and N random machines of 8 GPUs, and of 16")
    parser.add_argument("--k", type=int, help="number of trees (one for each GPU)")
    parser.add_argument("--roots", help="their roots, as 0,3 (0 to k - 1)")
    parser.add_argument("--objective", choices=OBJECTIVES, default="minmax")
    parser.add_argument("--link-usage-penalty", type=float, default=0.7, help="mxnet: what a use leaves of a link's weight (0.7)")
    parser.add_argument("--backtrack", action="store_true", help="mxnet: search every tree instead of clustering")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--probe", action="store_true", help="measure copies between this machine's GPUs")
    parser.add_argument("--save", metavar="FILE", type=matrix_file, help="write the matrix, for FLUXLIKE_TOPOLOGY")
    parser.add_argument("--json", metavar="FILE", help="write matrix, trees and figures")
    parser.add_argument("--png", metavar="FILE", type=picture, help="draw both; needs matplotlib")
    asked = parser.parse_args(argv)
    names = ("probe", "save", "png", "k", "roots", "objective", "link_usage_penalty", "backtrack")
    if asked.all and any(getattr(asked, name) != parser.get_default(name) for name in names):
        parser.error("--all plans the presets as they are; of the other options it takes --random, --seed and --json")
    if asked.objective != "mxnet" and (asked.backtrack or asked.link_usage_penalty != parser.get_default("link_usage_penalty")):
        parser.error("--backtrack and --link-usage-penalty are for --objective mxnet; add it, or leave them out")
    if asked.random < 0:
        parser.error(f"--random {asked.random} is below 0; give a number of machines")
    if asked.random and not asked.all:
        parser.error(f"--random {asked.random} adds to the table of --all; give that, too, or leave it out")
    if asked.probe and asked.topology:
        parser.error(f"--probe measures this machine's GPUs, not {asked.topology!r}; leave out one of them")
    if asked.probe:
        once.by_itself(parser, "--probe copies")
    try:
        asked.roots = [int(root) for root in asked.roots.split(",")] if asked.roots is not None else None
    except ValueError:
        parser.error(f"--roots {asked.roots!r} is no list of numbers, such as 0,3")
    if asked.k is not None and asked.k > MOST_TREES:
        parser.error(f"--k {asked.k} is above {MOST_TREES} trees; give that or less, or leave it out for one for each GPU")
    if asked.roots is not None and len(asked.roots) > MOST_TREES:
        parser.error(f"--roots names {len(asked.roots)}, above {MOST_TREES} trees; name that many or fewer")
    once.different(parser, asked, ("save", "json", "png"))
    for name in ("save", "json", "png"):
        once.writable(parser, getattr(asked, name), f"--{name}", file=True)
    return asked


def matrix_file(name: str) -> str:
    """As the type of an argument: what FLUXLIKE_TOPOLOGY takes for a file."""
    if not names_file(name):
        raise argparse.ArgumentTypeError(f"FLUXLIKE_TOPOLOGY would take {name!r} for a preset; name it {name}.json, or ./{name}")
    return name


def picture(path: str) -> str:
    """As the type of an argument: not what matplotlib would write under another name, with .png behind it, or not at all."""
    folder = path.endswith("/") or Path(path).is_dir()
    if folder or not Path(path).suffix.strip("."):
        wanted = Path(path) / "picture.png" if folder else f"{path.rstrip('.')}.png"
        what = "a folder" if folder else "without a format"
        raise argparse.ArgumentTypeError(f"{path!r} is {what}; name a file, such as {wanted}")
    known = picture_formats()
    if known and Path(path).suffix[1:].lower() not in known:
        raise argparse.ArgumentTypeError(f"{path!r}: matplotlib writes no {Path(path).suffix}; take one of {', '.join(known)}")
    return path


def picture_formats() -> list[str]:
    """Those that matplotlib writes; none where it is missing, which is said when there is something to draw."""
    try:
        backends = importlib.import_module("matplotlib.backend_bases")
    except ImportError:
        return []
    return sorted(backends.FigureCanvasBase.get_supported_filetypes())


def probed() -> LinkMatrix:
    """This machine's GPUs, with copies measured. RuntimeError without GPUs."""
    matrix = detect.detect("leave out --probe, which measures copies between the GPUs of a machine")
    torch = importlib.import_module("torch")
    return probe.probed(matrix, probe.probe(probe.torch_copies(torch), len(matrix)))


def matrix_of(name: str | None) -> LinkMatrix:
    """What is named here, else by FLUXLIKE_TOPOLOGY, else this machine's GPUs. RuntimeError without all of them."""
    if name is not None:
        return load(name)
    return named() or detect.detect(f"{detect.REMEDY}, or name a preset: python -m fluxlike topo p3.16xlarge")


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


def random_machine(n: int, rng: random.Random) -> LinkMatrix:
    """Connected, of single and double NVLinks: a random tree, and each other link with a chance that is drawn first."""
    chance = rng.random()
    codes = [[0] * n for _ in range(n)]
    for i in range(1, n):
        for j in {rng.randrange(i), *(j for j in range(i) if rng.random() < chance)}:
            codes[i][j] = codes[j][i] = rng.choice((2, 3))
    return LinkMatrix.from_array(codes)


def on_random(n: int, count: int, seed: int) -> dict[str, Any]:
    """How long minmax takes on random machines, and how far it is from the bound, which need not be reachable."""
    rng = random.Random(f"{seed} {n}")
    found = [planned(random_machine(n, rng), seed=seed) for _ in range(count)]
    ratios = [cost.load / cost.least for _, cost, _ in found]
    return {
        "gpus": n, "machines": count, "at_the_bound": sum(cost.optimal for _, cost, _ in found),
        "load_over_bound_mean": round(statistics.fmean(ratios), 3), "load_over_bound_max": round(max(ratios), 3),
        "plan_s_max": round(max(seconds for *_, seconds in found), 3),
    }  # fmt: skip


def everything(seed: int, count: int, arguments: Sequence[str], out: str | None) -> None:
    """A table of all presets by all methods, and figures of random machines; the same as JSON with the presets' trees."""
    methods: dict[str, dict[str, Any]] = {
        "minmax": {}, "mxnet": {"objective": "mxnet"}, "mxnet, backtrack": {"objective": "mxnet", "backtrack": True},
    }  # fmt: skip
    rows = []
    for name in presets.NAMES:
        for method, options in methods.items():
            found = planned(LinkMatrix.preset(name), seed=seed, **options)
            rows.append({"preset": name, "method": method} | as_json(*found))
    print("\n".join(topo_report.table(rows)))
    randoms = [on_random(n, count, seed) for n in (8, 16) if count]
    for row in randoms:
        print(", ".join(f"{key.replace('_', ' ')} {value}" for key, value in row.items()))
    if out:
        write(out, {"environment": stamp(arguments), "rows": rows, "random": randoms})


def stamp(arguments: Sequence[str], tool: str = "topo") -> dict[str, Any]:
    """When, where and with what; without what only matters for GPUs where there is none."""
    from .bench_report import environment

    said = environment(arguments, tool)
    return {"machine": processor()} | {k: v for k, v in said.items() if v and (said["gpu"] or not k.startswith("clocks"))}


def processor() -> str:
    """The model of the processor that planned, which the plan times depend on."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def write(path: str, data: dict[str, Any]) -> None:
    """JSON, with each row of the outermost lists on a line. ValueError if a number is none that JSON has."""
    parts = []
    for key, value in data.items():
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        if isinstance(value, list):
            text = "[\n" + ",\n".join(f"  {json.dumps(row, ensure_ascii=False, allow_nan=False)}" for row in value) + "\n ]"
        parts.append(f" {json.dumps(key)}: {text}")
    # an argument that is no text in this locale, as a path may be, has halves of characters, which JSON escapes alike
    Path(path).write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8", errors="backslashreplace")
    print(f"written: {path}")


def one(asked: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Matrix and plan of one machine; the exit status."""
    matrix = probed() if asked.probe else matrix_of(asked.topology)
    options = {
        "k": asked.k, "objective": asked.objective, "link_usage_penalty": asked.link_usage_penalty,
        "backtrack": asked.backtrack, "seed": asked.seed, "roots": asked.roots,
    }  # fmt: skip
    trees, cost, seconds = planned(matrix, **options)  # first, as it may refuse, below a matrix of which nobody would see it
    print("\n".join(topo_report.matrix_lines(matrix)), flush=True)
    if asked.save:
        matrix.save(asked.save)
        print(f"written: {asked.save}")
    print("\n".join(topo_report.plan_lines(asked.objective, trees, cost, seconds)), flush=True)
    if asked.json:
        found = as_json(trees, cost, seconds)
        write(asked.json, {"environment": stamp(arguments), "matrix": matrix.as_json(), "options": options} | found)
    if asked.png:
        why = topo_report.draw(matrix, trees, cost, Path(asked.png))
        if why:
            print(f"topo: {why}", file=sys.stderr)
            return 1
        print(f"written: {asked.png}")
    return 0


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    asked = parse(argv)
    try:
        if asked.all:
            everything(asked.seed, asked.random, arguments, asked.json)
            return 0
        return one(asked, arguments)
    except (OSError, RuntimeError, ValueError) as error:
        if once.cannot_print(error):
            raise
        print(f"topo: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1

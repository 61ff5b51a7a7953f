"""`python -m fluxlike model OP`: what gemm_rs or ag_gemm is expected to take on more GPUs and nodes than there are here.

    python -m fluxlike model gemm_rs --nodes 1,2,4,8,16,32,64,128 --plot nodes.png
    python -m fluxlike model ag_gemm --check docs/measured/2026-11-21-ag_gemm-headline-R4.json

Each shape on each number of nodes, under both schedules; how, and what is left out, is in `model_events`. The constants are those
of four H200s on NVLink (`ops.cost`); nothing about networks has been measured. ``--check``: instead, copy_engine against records of
`bench`, of bfloat16 in one node.

* time, exposed: seconds of the call, and what of them torch's product alone would not take.
* E: 1 − exposed / (torch − product): 1 is communication fully hidden, 0 is torch with NCCL, below 0 is slower than that.
"""

import argparse
import importlib
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..kernels.tiles import cdiv
from ..ops import choice, validate
from ..runtime.wording import counted
from . import command, once, topo
from .bench_records import check, record_in, recorded, told
from .bench_report import cell, efficiency, nodes_of
from .model_events import OPS, SCHEDULES, Call, Cluster, Prediction, gemm_seconds, group_call, predict, torch_seconds

#: Rows of the cases on two nodes that others have published, with N and K of `published`.
PUBLISHED = (4096, 8192, 16384, 32768, 65536)
MOST = 1024
#: Rates and times that are given, in their units: with others sums are infinite, or differences nothing.
SLOWEST, FASTEST = 1e-6, 1e9
#: Bits a second in a Gbit/s, bytes a second in a GB/s.
GIGA = 1e9
#: Where the picture of E ends below.
LOWEST = -1.0
#: What a check has no use for: the records say how many GPUs and which shapes, all in one node, and it prints a table only.
UNCHECKED = ("nodes", "gpus_per_node", "net_gbps", "net_us", "shapes", "json", "plot")


@dataclass(frozen=True)
class Row:
    cluster: Cluster
    call: Call
    made: Prediction


@dataclass(frozen=True)
class Compared:
    """A shape of a record: seconds of ``name`` ("gemm", "torch", "copy_engine") as measured and by the model."""

    ranks: int
    call: Call
    name: str
    measured: float
    model: float

    @property
    def off(self) -> float:
        return self.model / self.measured - 1


def published(op: str) -> list[Call]:
    n, k = (12288, 49152) if op == "gemm_rs" else (49152, 12288)
    return [Call(op, m, n, k) for m in PUBLISHED]


def predicted(cluster: Cluster, nodes: Sequence[int], calls: Sequence[Call]) -> Iterator[Row]:
    """Each call on each number of nodes, under each schedule; on one node there is but one."""
    for call in calls:
        for count in nodes:
            here = replace(cluster, nodes=count)
            for schedule in SCHEDULES if count > 1 else SCHEDULES[:1]:
                yield Row(here, call, predict(here, call, schedule))


def compare(record: dict[str, Any], cluster: Cluster) -> Iterator[Compared]:
    """What was measured in one node, of the methods that the model has."""
    here = replace(cluster, nodes=1, gpus=record["ranks"])
    for shape in record["shapes"]:
        call = Call(record["op"], shape["m"], shape["n"], shape["k"])
        possible(call, here.ranks)
        model = {"gemm": gemm_seconds(here, call), "torch": torch_seconds(here, call)}
        problem, copies = call.problem(here, here.ranks), shape["methods"].get("copy_engine", {})
        made = recorded(copies, choice.usual(problem, "copy_engine"), problem)
        if made is not None:
            model["copy_engine"] = group_call(here, call, made=made)[1]
        for name, seconds in model.items():
            if shape["methods"].get(name, {}).get("status") == "ok" and shape["methods"][name]["ms"] is not None:
                measured = shape["methods"][name]["ms"]["median"] / 1e3
                yield Compared(record["ranks"], call, name, measured, seconds)


def unlike(record: dict[str, Any]) -> str:
    """Why a record's calls are not those that `compare` models, or nothing."""
    if record["dtype"] != "bfloat16":
        return f"is of {record['dtype']}, and the model's product of bfloat16; give records of bfloat16"
    nodes = nodes_of(record["environment"])
    return f"was measured on {nodes} nodes, and --check is of calls in one; give records of one node" if nodes > 1 else ""


def compared(op: str, paths: Sequence[Path], cluster: Cluster) -> list[Compared]:
    """`compare` of those records that are of ``op``, and a line for each other one.

    ValueError names a file that is no record of bench, or one of calls that the model does not have.
    """
    found: list[Compared] = []
    for path in paths:
        with told(path):
            record = record_in(path)
            other = "" if record["op"] == op else str(record["op"])
            if not other:
                check(record)
            why = "" if other else unlike(record)
            found += [] if other or why else compare(record, cluster)
        if why:
            raise ValueError(f"{path} {why}")
        if other:
            print(f"model: {path} is passed over: it is of {other}, not of {op}", file=sys.stderr)
    if not found:
        raise ValueError(f"no record of {op} with times in {', '.join(map(str, paths))}")
    return found


# what is printed


def table(rows: Sequence[Row]) -> list[str]:
    """Markdown."""
    lines = ["| M×N×K | nodes | GPUs | schedule | calls by | time, ms | product | torch | exposed | E | to other nodes, MB a GPU |"]
    lines.append("|---|--:|--:|---|---|--:|--:|--:|--:|--:|--:|")
    for row in rows:
        made, call, cluster = row.made, row.call, row.cluster
        cells = [f"{call.m}×{call.n}×{call.k}", str(cluster.nodes), str(cluster.ranks)]
        cells += [made.schedule if cluster.nodes > 1 else "one node", made.path]
        cells += [f"{seconds * 1e3:.3f}" for seconds in (made.seconds, made.gemm, made.torch, made.exposed)]
        cells += ["" if made.efficiency is None else f"{made.efficiency:.2f}", f"{made.network / 1e6:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def check_lines(found: Sequence[Compared]) -> list[str]:
    """Markdown: a line a shape, and how far off the model is at all."""
    names = list(dict.fromkeys(one.name for one in found))
    lines = ["| GPUs, M×N×K, µs measured (model) | " + " | ".join([*names, "E"]) + " |", "|---|" + "--:|" * (len(names) + 1)]
    by_call: dict[tuple[int, Call], dict[str, Compared]] = {}
    for one in found:
        by_call.setdefault((one.ranks, one.call), {})[one.name] = one
    for (ranks, call), methods in by_call.items():
        parts = [methods.get(name) for name in names]
        cells = [f"{p.measured * 1e6:.0f} ({p.model * 1e6:.0f}, {p.off:+.1%})" if p else "" for p in parts]
        if len(methods) == 3:
            both = zip(*((one.measured, one.model) for one in methods.values()), strict=True)
            cells.append("{} ({})".format(*(cell(efficiency(ours, gemm, torch), ".2f") for gemm, torch, ours in both)))
        lines.append(f"| {ranks}, {call.m}×{call.n}×{call.k} | " + " | ".join(cells) + " |")
    for name in names:
        off = [abs(one.off) for one in found if one.name == name]
        shapes = counted(len(off), "shape")
        lines.append(f"{name}: off by {statistics.median(off):.1%} in the median of {shapes}, by {max(off):.1%} at most")
    return lines


def draw(rows: Sequence[Row], path: Path) -> str | None:
    """E over nodes, a colour a shape, hierarchical solid and flat dashed. Returns a reason where it cannot be drawn."""
    try:
        figure_module = importlib.import_module("matplotlib.figure")
        colours = importlib.import_module("matplotlib").colormaps["viridis"]
    except ImportError:
        return "no plot: matplotlib is missing; python -m pip install matplotlib"
    if all(row.made.efficiency is None for row in rows):
        return "no plot: there is no E where one GPU has nothing to exchange; ask for more --nodes or --gpus-per-node"
    calls = list(dict.fromkeys(row.call for row in rows))
    figure = figure_module.Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots()
    for number, call in enumerate(calls):
        for schedule, style in (("hierarchical", "-"), ("flat", "--")):
            mine = [row for row in rows if row.call == call and (row.made.schedule == schedule or row.cluster.nodes == 1)]
            points = [(row.cluster.nodes, row.made.efficiency) for row in mine if row.made.efficiency is not None]
            if not points:
                continue
            label = f"M={call.m}" if style == "-" else None
            axes.plot(*zip(*points, strict=True), style, marker="o", ms=3, color=colours(number / max(1, len(calls))), label=label)
    counts = sorted({row.cluster.nodes for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_ylim(LOWEST, 1.2)
    axes.axhline(0, color="#45505c", linewidth=0.8)
    first = rows[0]
    axes.set_xlabel(f"nodes of {counted(first.cluster.gpus, 'GPU')}")
    axes.set_ylabel("E (1: hidden, 0: torch)")
    what = f"{first.call.op}, N={first.call.n}, K={first.call.k}, by the model"
    axes.set_title(f"{what}; solid hierarchical, dashed flat", fontsize=10)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    print(f"written: {path}")
    return None


def as_json(row: Row) -> dict[str, Any]:
    made, cluster = row.made, row.cluster
    figures = {"seconds": made.seconds, "exposed": made.exposed, "E": made.efficiency, "gemm": made.gemm, "torch": made.torch}
    where = {"nodes": cluster.nodes, "gpus": cluster.ranks, "schedule": made.schedule, "path": made.path}
    return asdict(row.call) | where | figures | {"network_bytes": made.network}


def possible(call: Call, ranks: int) -> None:
    """ValueError if the operations refuse a call on so many ranks, which they do only where a side of an operand is too long.

    Any other size from 1 on is one that a call may have: of fewer rows or columns than ranks some ranks have none.
    """
    split = {"N": call.n, "K/R": cdiv(call.k, ranks)} if call.op == "gemm_rs" else {"N/R": cdiv(call.n, ranks), "K": call.k}
    for name, size in {"M": call.m, **split}.items():
        validate.countable(f"{call.m}x{call.n}x{call.k}", name, size)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.Parser(
        prog="python -m fluxlike model",
        description="Predicts gemm_rs and ag_gemm on clusters that are not there, by discrete events.",
        epilog="Exit status: 1 if a file could not be made after all; 2 for wrong arguments, such as a path where no file can be "
        "made, or records that cannot be read or are of calls that are not modelled. What is modelled, and what not, is in "
        "docs/nodes.md. Rates are of one GPU, in one direction.",
    )
    parser.add_argument("op", choices=OPS)
    parser.add_argument("--nodes", default="1,2,4,8", help="numbers of nodes, as 1,2,4 (1,2,4,8)")
    parser.add_argument("--gpus-per-node", type=int, default=8, metavar="L")
    parser.add_argument("--nvlink-gbps", type=float, default=8 * Cluster.nvlink / GIGA, help="Gbit/s (2720: 340 GB/s, of an H200)")
    parser.add_argument("--net-gbps", type=float, default=8 * Cluster.net / GIGA, help="Gbit/s of each GPU's network card (400)")
    parser.add_argument("--net-us", type=float, default=Cluster.message * 1e6, help="of a message without its bytes (10)")
    parser.add_argument("--tflops", type=float, default=Cluster.rate / 1e12, help="of torch's bf16 product (690, of a hot H200)")
    parser.add_argument("--shapes", help="MxNxK,… of the whole problem (the published cases of two nodes)")
    parser.add_argument("--json", metavar="FILE", help="write the figures")
    parser.add_argument("--plot", metavar="FILE", type=topo.picture, help="draw E over nodes; needs matplotlib")
    parser.add_argument("--check", metavar="RECORD", nargs="+", type=Path, help="instead, copy_engine against records of bench")
    asked = parser.parse_args(argv)
    beside = [name for name in UNCHECKED if getattr(asked, name) != parser.get_default(name)]
    if asked.check and beside:
        parser.error(f"--check prints how records of one node compare; leave out --{beside[0].replace('_', '-')}")
    for name in ("gpus_per_node", "nvlink_gbps", "net_gbps", "tflops"):
        if not 0 < getattr(asked, name) < math.inf:
            parser.error(f"--{name.replace('_', '-')} {getattr(asked, name):g} must be above 0 and finite")
    if not 0 <= asked.net_us < math.inf:
        parser.error(f"--net-us {asked.net_us:g} must not be below 0, and finite")
    for name, least in (("nvlink_gbps", SLOWEST), ("net_gbps", SLOWEST), ("tflops", SLOWEST), ("net_us", 0)):
        given = getattr(asked, name)
        if not least <= given <= FASTEST:
            parser.error(f"--{name.replace('_', '-')} {given:g} is of no machine; give one from {least:g} to {FASTEST:g}")
    try:
        asked.nodes = list(dict.fromkeys(int(count) for count in asked.nodes.split(",")))
    except ValueError:
        parser.error(f"--nodes {asked.nodes!r} is no list of numbers, such as 1,2,4")
    wrong = [count for count in asked.nodes if not 1 <= count * asked.gpus_per_node <= MOST]
    if wrong:
        parser.error(f"--nodes {wrong[0]} of {asked.gpus_per_node} GPUs are not 1 to {MOST} GPUs; ask for as many")
    command.read_shapes(parser, asked)
    asked.calls = [Call(asked.op, p.m, p.n, p.k) for p in asked.shapes] if asked.shapes else published(asked.op)
    try:
        for call in asked.calls:
            possible(call, asked.gpus_per_node * min(asked.nodes))
    except ValueError as error:
        parser.error(f"--shapes: {error}")
    once.different(parser, asked, ("json", "plot"))
    for name in ("json", "plot"):
        command.writable(parser, getattr(asked, name), f"--{name}", file=True)
    return asked


def main(argv: list[str] | None = None) -> int:
    asked = parse(argv)
    cluster = Cluster(
        gpus=asked.gpus_per_node, nvlink=asked.nvlink_gbps * GIGA / 8, net=asked.net_gbps * GIGA / 8,
        rate=asked.tflops * 1e12, message=asked.net_us / 1e6,
    )  # fmt: skip
    if asked.check:
        try:
            found = compared(asked.op, asked.check, cluster)
        except ValueError as error:
            print(f"model: {error}", file=sys.stderr)
            return 2
        print("\n".join(check_lines(found)))
        return 0
    rows = list(predicted(cluster, asked.nodes, asked.calls))
    rates = f"NVLink {cluster.nvlink / GIGA:g} GB/s, network {cluster.net / GIGA:g} GB/s a GPU, {cluster.rate / 1e12:g} TFLOP/s"
    print("\n".join([f"{asked.op} by the model: {rates}", *table(rows)]))
    facts = {"cluster": asdict(cluster), "rows": [as_json(row) for row in rows]}
    try:
        if asked.json:
            topo.write(asked.json, {"environment": topo.stamp(command.arguments(argv), "model")} | facts)
        why = draw(rows, Path(asked.plot)) if asked.plot else None
    except OSError as error:
        if once.cannot_print(error):
            raise
        why = str(error)
    if why:
        print(f"model: {why}", file=sys.stderr)
    return 1 if why else 0

"""What `topo` prints and draws: matrices, trees, a table of plans. matplotlib is imported where it is used."""

import importlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..runtime.wording import counted
from ..topology import Cost, LinkMatrix, Tree
from ..topology.graph import Graph

KINDS = {"nvlink": "NV", "nvswitch": "SW", "pcie": "PCIe", "host": "host", "": "-"}


def matrix_lines(matrix: LinkMatrix) -> list[str]:
    """The GB/s between every two GPUs, with their kind, and the notes."""
    n = len(matrix)
    by = "by NVLink (NV), NVSwitch (SW), PCIe or through the host"
    lines = [f"{matrix.name or 'links'}: {counted(n, 'GPU')}; GB/s in one direction, {by}"]
    rows = [["", *(f"GPU{j}" for j in range(n)), "port"]]
    for i in range(n):
        cells = [f"{KINDS[matrix.kind[i][j]]} {matrix.bandwidth[i][j]:g}" if matrix.kind[i][j] else "-" for j in range(n)]
        cells[i] = "X"
        rows.append([f"GPU{i}", *cells, f"{matrix.port[i]:g}"])
    widths = [max(len(row[column]) for row in rows) for column in range(n + 2)]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return lines + [f"note: {note}" for note in matrix.notes]


def plan_lines(objective: str, trees: Sequence[Tree], cost: Cost, seconds: float) -> list[str]:
    """What the trees cost, and each of them: its edges level by level, as a broadcast goes."""
    best = "which no trees can beat" if cost.optimal else f"none can be below {cost.least:g}"
    busy = ", ".join(cost.bottlenecks[:6]) + (" and others" if len(cost.bottlenecks) > 6 else "")
    lines = [
        f"{objective}: {counted(len(trees), 'tree')} of depth {cost.depth}, planned in {seconds:.2f} s",
        f"  highest load {cost.load:g} ({best}), at {busy or 'nothing'}",
        f"  weight {cost.weight:g}, at most {max(cost.ports)} edges at a GPU; {cost.gb_s:.1f} GB/s of all-reduced data on paper",
    ]
    for tree in trees:
        steps = " | ".join(" ".join(f"{parent}→{child}" for parent, child in step) for step in tree.steps)
        lines.append(f"  root {tree.root}, weight {tree.weight:g}: {steps}")
    return lines


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Plans as Markdown."""
    lines = ["| topology | method | depth | load | no less than | weight | most edges at a GPU | GB/s on paper | plan, s |"]
    lines.append("|---|---|--:|--:|--:|--:|--:|--:|--:|")
    for row in rows:
        figures = [row[key] for key in ("depth", "load", "least", "weight", "most_edges_at_a_gpu", "gb_s", "plan_s")]
        lines.append(f"| {row['preset']} | {row['method']} | " + " | ".join(f"{figure:.4g}" for figure in figures) + " |")
    return lines


# the picture


def draw(matrix: LinkMatrix, trees: Sequence[Tree], cost: Cost, path: Path) -> str | None:
    """The links that a plan may use, as wide as they are fast, with their loads; then each tree in a colour, the numbers of its
    levels at its edges. Returns a reason instead of writing a file where it cannot be drawn."""
    try:
        figure_module = importlib.import_module("matplotlib.figure")
        colours = importlib.import_module("matplotlib").colormaps["tab10"]
    except ImportError:
        return "no picture: matplotlib is missing; python -m pip install matplotlib"
    graph = Graph(matrix)
    places = [(math.sin(2 * math.pi * i / graph.n), math.cos(2 * math.pi * i / graph.n)) for i in range(graph.n)]
    columns = min(5, 1 + len(trees))
    rows = math.ceil((1 + len(trees)) / columns)
    figure = figure_module.Figure(figsize=(2.7 * columns, 2.9 * rows + 0.6), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    _draw_links(panels[0], graph, places, trees, cost)
    for number, (axes, tree) in enumerate(zip(panels[1:], trees, strict=False)):
        _draw_tree(axes, graph, places, tree, colours(number % 10))
    for axes in panels:
        axes.set_axis_off()
        axes.set_aspect("equal")
    figure.suptitle(f"{matrix.name}: {counted(len(trees), 'tree')}, depth {cost.depth}, highest load {cost.load:g}", fontsize=11)
    figure.savefig(path, dpi=90)
    return None


def _draw_links(axes: Any, graph: Graph, places: Sequence[tuple[float, float]], trees: Sequence[Tree], cost: Cost) -> None:
    used = Counter((min(edge), max(edge)) for tree in trees for edge in tree.edges)
    fastest = min(graph.cost[i][j] for i, j in graph.links) if graph.links else 1.0
    for i, j in graph.links:
        width = max(0.4, 4 * fastest / graph.cost[i][j])
        loaded = used[i, j] * graph.cost[i][j] >= cost.load * (1 - 1e-9) > 0
        axes.plot(*zip(places[i], places[j], strict=True), color="#e45756" if loaded else "#9aa5b1", linewidth=width, zorder=1)
    _draw_gpus(axes, places, None)
    axes.set_title("links, the busiest in red", fontsize=8)


def _draw_tree(axes: Any, graph: Graph, places: Sequence[tuple[float, float]], tree: Tree, colour: Any) -> None:
    for i, j in graph.links:
        axes.plot(*zip(places[i], places[j], strict=True), color="#e5e8eb", linewidth=0.6, zorder=0)
    for (parent, child), level in zip(tree.edges, tree.levels, strict=True):
        (x, y), (u, v) = places[parent], places[child]
        axes.annotate("", (u, v), (x, y), arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 1.8, "shrinkA": 7, "shrinkB": 7})
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
        axes.text(0.45 * x + 0.55 * u, 0.45 * y + 0.55 * v, str(level), fontsize=6, ha="center", va="center", bbox=box, zorder=4)
    _draw_gpus(axes, places, (tree.root, colour))
    axes.set_title(f"root {tree.root}, weight {tree.weight:g}", fontsize=8)


def _draw_gpus(axes: Any, places: Sequence[tuple[float, float]], root: tuple[int, Any] | None) -> None:
    for i, (x, y) in enumerate(places):
        chosen = root is not None and root[0] == i
        axes.scatter([x], [y], s=150, color=root[1] if chosen and root else "white", edgecolors="#45505c", zorder=3)
        axes.text(x, y, str(i), fontsize=8, ha="center", va="center", color="white" if chosen else "black", zorder=5)
    axes.set_xlim(-1.2, 1.2)
    axes.set_ylim(-1.2, 1.2)

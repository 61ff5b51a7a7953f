"""`bench OP --plot-records FILES…`: time over the number of ranks, from the JSON files of several runs of `bench OP --out DIR`."""

import contextlib
import importlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .bench_report import nodes_of, sharing_of

#: Of a record's shape, what was measured or follows from its sizes.
DERIVED = ("limit_ms", "methods", "union", "bytes")
#: panel: method: (ranks, ms, …) in ascending order of ranks.
Panels = dict[str, dict[str, list[tuple[int, float]]]]


@contextlib.contextmanager
def told(path: str | Path) -> Iterator[None]:
    """Whatever is wrong inside with a record from ``path``, or with the file, becomes a ValueError that names it."""
    try:
        yield
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is no record of bench: {what}; give JSON files that bench --out has written") from error


def panels(records: Sequence[dict[str, Any]]) -> Panels:
    """The median times of what was measured with at least two numbers of ranks: a panel a shape, dtype, mode, GPU,
    number of nodes and of ranks on a GPU, as a line through points of two machines would show what no machine does.

    ValueError: two records have another time for the same.
    """
    found: dict[str, dict[str, dict[int, float]]] = {}
    for record in records:
        stamp = record["environment"]
        nodes, sharing = nodes_of(stamp), sharing_of(stamp)
        some = [f"{nodes} nodes" if nodes > 1 else "", f"{sharing} ranks each" if sharing > 1 else ""]
        where = ", ".join(filter(None, [stamp["gpu"] or "no GPU", *some]))
        for shape in record["shapes"]:
            sizes = "×".join(str(value) for key, value in shape.items() if key not in DERIVED)
            panel = found.setdefault(f"{sizes}, {record['dtype']}, {record['mode']}, {where}", {})
            for method, facts in shape["methods"].items():
                if facts["ms"] is None:
                    continue
                points, ranks, ms = panel.setdefault(method, {}), record["ranks"], facts["ms"]["median"]
                if points.setdefault(ranks, ms) != ms:
                    raise ValueError(f"two records have times of {method} at {sizes} on {ranks} ranks; leave one of them out")
    return {
        name: {method: sorted(points.items()) for method, points in panel.items()}
        for name, panel in found.items()
        if len({ranks for points in panel.values() for ranks in points}) > 1
    }


def read(op: str, paths: Sequence[str]) -> list[dict[str, Any]]:
    """The records; ValueError names a file that is none of ``op``."""
    records = []
    for path in paths:
        with told(path):
            record = json.loads(Path(path).read_text(encoding="utf-8"))
            known = record["op"] == op
            if known:
                panels([record])
        if not known:
            raise ValueError(f"{path} is a record of {record['op']!r}, not of {op}; give records of {op}")
        records.append(record)
    return records


def draw(found: Panels, figure: Any) -> None:
    """A panel beside the other, ms over ranks, a line a method."""
    figure.set_size_inches(5 * len(found), 4.5)
    for axes, (name, methods) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True):
        for method, points in methods.items():
            axes.plot(*zip(*points, strict=True), "-o", markersize=3, label=method)
        axes.set_xticks(sorted({ranks for points in methods.values() for ranks, _ in points}))
        axes.set_yscale("log")
        axes.set_xlabel("ranks")
        axes.set_ylabel("ms a call")
        axes.set_title(name, fontsize=8)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, ncols=2)


def plot(op: str, paths: Sequence[str], out: str) -> int:
    """Draw the records into ``out``/OP-ranks.png; the exit status."""
    try:
        found = panels(read(op, paths))
    except ValueError as error:
        print(f"bench: {error}")
        return 2
    if not found:
        print("no plot: no shape of these records has times of two numbers of ranks")
        return 1
    try:
        figure = importlib.import_module("matplotlib.figure").Figure(layout="constrained")
    except ImportError:
        print("no plot: matplotlib is missing; python -m pip install matplotlib")
        return 1
    draw(found, figure)
    path = Path(out) / f"{op}-ranks.png"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as error:
        print(f"bench: {path} cannot be written: {error}; name another folder with --out")
        return 1
    print(f"written: {path}")
    return 0

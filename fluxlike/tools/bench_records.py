"""`bench OP --plot-records FILES…`: time over the number of ranks, from the JSON files of several runs of `bench OP --out DIR`."""

import contextlib
import importlib
import json
import reprlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..ops import choice
from .bench_report import nodes_of, sharing_of

#: Of a record's shape, what was measured or follows from its sizes.
DERIVED = ("limit_ms", "methods", "union", "bytes")
#: The most that a record may say: ranks, elements of a side of a product, and ms of a call, of which a ns is the least.
MOST_RANKS, LONGEST, LEAST_MS, MOST_MS = 1024, 1 << 31, 1e-6, 1e9
PRODUCTS = ("gemm_rs", "ag_gemm", "gemm_ar")
NAMES: dict[type, str] = {dict: "object", list: "list", str: "text"}
DTYPES, MODES = ("bfloat16", "float16", "float32"), ("eager", "graph")
#: panel: method: (ranks, ms, …) in ascending order of ranks.
Panels = dict[str, dict[str, list[tuple[int, float]]]]


@contextlib.contextmanager
def told(path: str | Path) -> Iterator[None]:
    """Whatever is wrong inside with a record from ``path``, or with the file, becomes a ValueError that names it."""
    try:
        yield
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is no record of bench: {what}; give JSON files that bench --out has written") from error


def record_in(path: str | Path) -> dict[str, Any]:
    """What is in a file that is to be a record; `check` looks at the rest."""
    record: dict[str, Any] = _kind(json.loads(Path(path).read_text(encoding="utf-8")), "all of it", dict)
    return record


def check(record: dict[str, Any]) -> None:
    """ValueError names a field whose value bench never writes, before anything is made of it."""
    stamp = _kind(record["environment"], "environment", dict)
    _whole(record["ranks"], "ranks", MOST_RANKS)
    for name in ("nodes", "multiprocessors"):
        if stamp.get(name) is not None:  # older records do not say nodes, and without a GPU there are no multiprocessors
            _whole(stamp[name], f"environment.{name}")
    if stamp.get("gpu") is not None:
        _kind(stamp["gpu"], "environment.gpu", str)
    for name, known in (("dtype", DTYPES), ("mode", MODES)):
        if record[name] not in known:
            raise ValueError(f"{name} is {record[name]!r}, which is none of {', '.join(known)}")
    shapes = _kind(record["shapes"], "shapes", list)
    if not shapes:
        raise ValueError("shapes is [], and there must be one at least")
    for number, shape in enumerate(shapes):
        _check_shape(record["op"], _kind(shape, f"shapes[{number}]", dict), f"shapes[{number}]")


def _check_shape(op: str, shape: dict[str, Any], where: str) -> None:
    sizes = {name: size for name, size in shape.items() if name not in DERIVED}
    if op in PRODUCTS:
        sizes |= {name: shape[name] for name in ("m", "n", "k")}
    for name, size in sizes.items():
        if name in ("m", "n", "k"):
            _whole(size, f"{where}.{name}", LONGEST)
        elif not isinstance(size, (str, list)):  # how ids are drawn, and the sizes of many tensors
            _whole(size, f"{where}.{name}")
    for method, facts in _kind(shape["methods"], f"{where}.methods", dict).items():
        ms, name = _kind(facts, f"{where}.methods.{method}", dict)["ms"], f"{where}.methods.{method}.ms"
        if facts.get("choice") is not None:
            _kind(facts["choice"], f"{where}.methods.{method}.choice", dict)
        median = _kind(ms, name, dict)["median"] if ms is not None else 1.0
        if isinstance(median, bool) or not isinstance(median, (int, float)) or not LEAST_MS <= median <= MOST_MS:
            raise ValueError(f"{name}.median is {median!r}, which is no number from {LEAST_MS:g} to {MOST_MS:g}")


def recorded(facts: dict[str, Any], usual: choice.Choice, problem: choice.Problem) -> choice.Choice | None:
    """How the calls of a method were made, if the record says it, else ``usual``. None, and a line, if no call is made so today."""
    if facts.get("choice") is None:
        return usual
    try:
        made = choice.from_json(facts["choice"], problem)
        if made.transport == usual.transport:
            return made
        why = f"it is one of {made.transport}"
    except ValueError as error:
        why = str(error)
    where = f"{problem.op} {problem.m}x{problem.n}x{problem.k} by {usual.transport}"
    print(f"{where} is left out, as the choice in the record is none of today: {why}; measure it again", file=sys.stderr)
    return None


def _kind(value: Any, name: str, kind: type) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {reprlib.repr(value)}, which is no {NAMES[kind]}")
    return value


def _whole(value: Any, name: str, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= (most or value):
        raise ValueError(f"{name} is {reprlib.repr(value)}, which is no whole number from 1 {f'to {most}' if most else 'on'}")


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
            record = record_in(path)
            known = record["op"] == op
            if known:
                check(record)
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
        print(f"bench: {error}", file=sys.stderr)
        return 2
    if not found:
        print("bench: no plot: no shape of these records has times of two numbers of ranks", file=sys.stderr)
        return 1
    try:
        figure = importlib.import_module("matplotlib.figure").Figure(layout="constrained")
    except ImportError:
        print("bench: no plot: matplotlib is missing; python -m pip install matplotlib", file=sys.stderr)
        return 1
    draw(found, figure)
    path = Path(out) / f"{op}-ranks.png"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as error:
        print(f"bench: {path} cannot be written: {error}; name another folder with --out", file=sys.stderr)
        return 1
    print(f"written: {path}")
    return 0

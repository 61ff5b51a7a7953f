"""A trace as people see it: the lines, the JSON for ui.perfetto.dev and chrome://tracing, the picture."""

import importlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..ops.trace import Clock
from ..runtime.wording import counted
from .bench_report import Shape, ranks_name
from .trace_events import KINDS, Span, Timeline, summary

#: Lanes of transfers come behind those of programs. Numbers of processes and lanes begin at 1, since 0 is the idle one to viewers.
FIRST_TRANSFER = 100_000
COLOURS = {"compute": "#4c78a8", "wait": "#e45756", "store": "#72b7b2", "push": "#b279a2", "end": "#bab0ac", "copy": "#f58518"}
WORDS = {"compute": "products", "end": "end of the call", "copy": "transfers"}


@dataclass
class Report:
    """One call of all ranks. ``took``: µs of a call back to back with others, "untraced" and "traced"."""

    op: str
    shape: Shape
    dtype: str
    path: str
    ranks: list[Timeline]
    clocks: list[Clock]
    took: dict[str, float]
    environment: dict[str, Any]

    @property
    def name(self) -> str:
        m, n, k = self.shape
        return f"{self.op}-{m}x{n}x{k}-{ranks_name(len(self.ranks), self.dtype, self.environment)}-{self.path.split('/')[0]}"

    @property
    def origin(self) -> int:
        return min(line.begin for line in self.ranks)

    def lines(self) -> list[str]:
        """What is said of the call."""
        programs = len(self.ranks[0].programs)
        head = f"{self.op} {self.shape}, R={len(self.ranks)}, {self.dtype}, {self.path}, {counted(programs, 'program')} a rank"
        last = f"  a call takes {self.took['traced']:.1f} µs traced, {self.took['untraced']:.1f} µs untraced"
        errors = sorted(clock.error for clock in self.clocks)[-2:]
        if any(errors):
            last += f"; times of one rank against another's ± {sum(errors) / 1e3:.1f} µs"
        return [head, *(f"  {summary(line)}" for line in self.ranks), last]

    def as_json(self) -> dict[str, Any]:
        """The trace event format: a process a rank, a thread a program and a thread for the transfers to each peer; times in µs."""
        events: list[dict[str, Any]] = []
        for line in self.ranks:
            events += _events(line, self.origin)
        other = {
            "op": self.op, "shape": self.shape._asdict(), "dtype": self.dtype, "path": self.path, "us_a_call": self.took,
            "summary": [summary(line)._asdict() for line in self.ranks],
            "clocks_ns": [
                {"rank": line.rank, **clock._asdict(), "step": line.step}
                for line, clock in zip(self.ranks, self.clocks, strict=True)
            ],
            "environment": self.environment,
        }  # fmt: skip
        return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": other}

    def save(self, directory: Path) -> Path:
        """The JSON, whole or not at all."""
        path = directory / f"{self.name}.json"
        scratch = path.with_suffix(".json.part")
        scratch.write_text(json.dumps(self.as_json(), allow_nan=False) + "\n", encoding="utf-8")
        os.replace(scratch, path)
        return path


def _events(line: Timeline, origin: int) -> Iterator[dict[str, Any]]:
    process = 1 + line.rank
    yield _named("process_name", process, 0, f"rank {line.rank}")
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
    lanes: list[tuple[int, str, Iterable[Span]]] = []
    for program in line.programs:
        name = f"program {program.number} on multiprocessor {program.multiprocessor}"
        # a span that holds others must come first where both begin at once
        lanes.append((1 + program.number, name, [*program.tiles, *program.spans, *program.signals]))
    lanes += [(FIRST_TRANSFER + i, name, spans) for i, (name, spans) in enumerate(line.transfers.items())]
    for number, name, spans in lanes:
        yield _named("thread_name", process, number, name)
        yield {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": number, "args": {"sort_index": number}}
        for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
            yield _event(span, process, number, origin)


def _named(kind: str, process: int, lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": lane, "args": {"name": name}}


def _event(span: Span, process: int, lane: int, origin: int) -> dict[str, Any]:
    event = {"name": span.name, "cat": span.kind, "pid": process, "tid": lane, "ts": (span.begin - origin) / 1e3}
    if span.kind == "signal":
        return event | {"ph": "i", "s": "t"}
    return event | {"ph": "X", "dur": (span.end - span.begin) / 1e3}


# the picture


def plot(report: Report, path: Path) -> str | None:
    """Per rank the programs, and under them the transfers; a reason instead of a file where it cannot be drawn."""
    try:
        figure_module = importlib.import_module("matplotlib.figure")
        patches = importlib.import_module("matplotlib.patches")
    except ImportError:
        return "no picture: matplotlib is missing; python -m pip install matplotlib"
    ranks = report.ranks
    programs = len(ranks[0].programs)
    height = min(4.5, 1.5 + 0.12 * programs)
    figure = figure_module.Figure(figsize=(13, 1.2 + height * len(ranks)), layout="constrained")
    rows: Sequence[Any] = figure.subplots(len(ranks), 1, sharex=True, squeeze=False)[:, 0]
    drawn: set[str] = set()
    for axes, line in zip(rows, ranks, strict=True):
        drawn |= _draw(axes, line, report.origin)
        axes.set_title(str(summary(line)), fontsize=9, loc="left")
    rows[-1].set_xlim(0, (max(line.end for line in ranks) - report.origin) / 1e3)
    rows[-1].set_xlabel("µs")
    handles = [patches.Patch(color=COLOURS[kind], label=WORDS.get(kind, kind)) for kind in (*KINDS, "copy") if kind in drawn]
    figure.legend(handles=handles, ncols=len(handles), fontsize=8, loc="outside lower center")
    place = " · ".join(str(report.environment[key]) for key in ("gpu", "commit", "date") if report.environment.get(key))
    figure.suptitle(f"{report.op} {report.shape}, R={len(ranks)}, {report.dtype}, {report.path}\n{place}", fontsize=10)
    figure.savefig(path, dpi=150)
    return None


def _draw(axes: Any, line: Timeline, origin: int) -> set[str]:
    """The lanes of a rank; the kinds of spans that it has."""
    programs = len(line.programs)
    tall = max(1.0, programs / 16)  # of a lane of transfers
    thick = 0.9 if programs <= 24 else 1.0  # of a program's; gaps between many would make a pattern
    bars: dict[str, list[tuple[float, float, float, float]]] = {}
    for program in line.programs:
        for span in program.spans:
            bars.setdefault(span.kind, []).append(_bar(span, origin, program.number, thick))
    for i, lane in enumerate(line.transfers.values()):
        for span in lane:
            bars.setdefault(span.kind, []).append(_bar(span, origin, programs + (i + 0.3) * tall, 0.8 * tall))
    collections = importlib.import_module("matplotlib.collections")
    for kind in (*KINDS, "copy"):
        boxes = [[(x, y), (x + w, y), (x + w, y + h), (x, y + h)] for x, y, w, h in bars.get(kind, [])]
        axes.add_collection(collections.PolyCollection(boxes, facecolors=COLOURS[kind], linewidths=0))
    axes.set_ylim(programs + (len(line.transfers) + 0.5) * tall, -0.5)
    ends = sorted({0, programs - 1})
    places = [number + 0.45 for number in ends] + [programs + (i + 0.7) * tall for i in range(len(line.transfers))]
    axes.set_yticks(places, [*(f"program {number}" for number in ends), *line.transfers], fontsize=7)
    return set(bars)


def _bar(span: Span, origin: int, y: float, height: float) -> tuple[float, float, float, float]:
    return (span.begin - origin) / 1e3, y, (span.end - span.begin) / 1e3, height

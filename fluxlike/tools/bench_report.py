"""What `bench` makes of its times: derived numbers, the table, the JSON with its environment stamp, the plot.

rich and matplotlib are imported where they are used, since the library itself needs neither.
"""

import contextlib
import datetime
import importlib
import importlib.metadata
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from .. import __version__
from ..runtime.wording import counted

#: What a GPU gets out of its links in one direction: copies of tens of MB to a peer reach 350 to 390 GB/s on H200s.
WIRE_GB_S = 360.0
#: auto may be this much slower than the best peer before its row says so.
TOLERATED = 0.98
PEERS = ("torch", "async_tp")
NONE = "–"
#: What the columns that need words mean, of all operations.
MEANINGS = {
    "E": "communication hidden, 1: all of it, 0: as torch",
    "T/T*": "time over the least that product and wire take",
    "error/allowed": "above 1 is WRONG",
}


class Shape(NamedTuple):
    """The whole problem: C[m, n] = A[m, k] · Wᵀ."""

    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.m}×{self.n}×{self.k}"


@dataclass
class Row:
    """One method on one shape in one mode."""

    method: str
    status: str = "ok"  # "WRONG": not timed; "failed": raised
    note: str = ""
    path: str = ""  # what a context says it did
    choice: dict[str, Any] | None = None  # `choice.Choice.as_json`, of calls that go by one
    error: float | None = None  # root mean square of the deviation, over that of the true values; worst rank
    allowed: float | None = None
    rounds_ms: list[float] = field(default_factory=list)  # empty: not timed
    iters: int = 0  # calls (eager) or replays (graph) of one timing
    host_us: float | None = None

    @property
    def ms(self) -> float | None:
        return statistics.median(self.rounds_ms) if self.rounds_ms else None


@dataclass(frozen=True)
class Derived:
    """What follows from the median times of one shape; None where a time that it needs is missing."""

    tflops: float | None = None  # of one GPU
    speedup: float | None = None  # over torch
    efficiency: float | None = None  # E: 1 is communication fully hidden, 0 is torch
    over_limit: float | None = None  # T / T*


@dataclass
class Result:
    """One shape in one mode."""

    shape: Any  # `Shape`, or what another operation has instead
    rows: list[Row]


def wire_bytes(op: str, shape: Shape, ranks: int, itemsize: int) -> float:
    """Bytes that one rank must send (and receive): partial sums for the others' rows, its shard or its sums to all others."""
    width = shape.k if op == "ag_gemm" else shape.n
    return (2 if op == "gemm_ar" else 1) * (ranks - 1) / ranks * shape.m * width * itemsize


def limit_ms(op: str, shape: Shape, ranks: int, itemsize: int, gemm_ms: float | None) -> float | None:
    """T*: no schedule can be faster than the product alone, nor than the wire."""
    if gemm_ms is None:
        return None
    return max(gemm_ms, wire_bytes(op, shape, ranks, itemsize) / (WIRE_GB_S * 1e9) * 1e3)


def efficiency(ms: float, gemm_ms: float, torch_ms: float) -> float | None:
    """E = 1 − (t − t_gemm) / (t_torch − t_gemm); None where torch exposes nothing."""
    exposed = torch_ms - gemm_ms
    return 1 - (ms - gemm_ms) / exposed if exposed > 0 else None


def derive(op: str, shape: Shape, ranks: int, itemsize: int, times: Mapping[str, float | None]) -> dict[str, Derived]:
    """For each method's median time in ms (None: not timed) what follows from it."""
    gemm, torch = times.get("gemm"), times.get("torch")
    limit = limit_ms(op, shape, ranks, itemsize, gemm)
    found = {}
    for method, ms in times.items():
        if ms is None:
            found[method] = Derived()
            continue
        found[method] = Derived(
            tflops=2.0 * shape.m * shape.n * shape.k / ranks / (ms * 1e-3) / 1e12,
            speedup=None if torch is None else torch / ms,
            efficiency=None if torch is None or gemm is None else efficiency(ms, gemm, torch),
            over_limit=None if limit is None else ms / limit,
        )
    return found


def against_peers(times: Mapping[str, float | None]) -> float | None:
    """Speed of auto over the best of torch and async TP; above 1 is faster."""
    peers = [ms for name in PEERS if (ms := times.get(name)) is not None]
    auto = times.get("auto")
    return min(peers) / auto if peers and auto is not None else None


def nodes_of(stamp: Mapping[str, Any]) -> int:
    """How many nodes the ranks of a record were on; older ones say only into how many a host was split."""
    return stamp.get("nodes") or int(stamp.get("variables", {}).get("FLUXLIKE_VIRTUAL_NODES") or 1)


def sharing_of(stamp: Mapping[str, Any]) -> int:
    """How many ranks of a record shared a GPU; without GPUs the variable means nothing."""
    if stamp.get("gpu", "") is None:
        return 1
    return int(stamp.get("variables", {}).get("FLUXLIKE_RANKS_PER_GPU") or 1)


def ranks_name(ranks: int, dtype: str, stamp: Mapping[str, Any]) -> str:
    """A part of a file's name, R4 of most: with what else the same command is run with, so that no run replaces another's file."""
    nodes, sharing = nodes_of(stamp), sharing_of(stamp)
    parts = [f"R{ranks}", f"nodes{nodes}" if nodes > 1 else "", f"shared{sharing}" if sharing > 1 else ""]
    return "-".join(filter(None, [*parts, dtype if dtype != "bfloat16" else ""]))


@dataclass
class Report:
    """All results of one mode, and how they were got."""

    #: The method that `behind` is about.
    judged: ClassVar[str] = "auto"

    op: str
    suite: str
    ranks: int
    mode: str
    dtype: str
    itemsize: int
    protocol: dict[str, Any]
    environment: dict[str, Any]
    results: list[Result] = field(default_factory=list)
    left_out: list[dict[str, str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.op}-{self.suite}-{ranks_name(self.ranks, self.dtype, self.environment)}-{self.mode}"

    def times(self, result: Result) -> dict[str, float | None]:
        return {row.method: row.ms for row in result.rows}

    def derived(self, result: Result) -> dict[str, Any]:
        return derive(self.op, result.shape, self.ranks, self.itemsize, self.times(result))

    def limit(self, result: Result) -> float | None:
        return limit_ms(self.op, result.shape, self.ranks, self.itemsize, self.times(result).get("gemm"))

    def as_json(self) -> dict[str, Any]:
        shapes = []
        for result in self.results:
            derived = self.derived(result)
            methods = {}
            for row in result.rows:
                ms = row.rounds_ms
                spread = {"median": row.ms, "min": min(ms), "max": max(ms), "rounds": ms} if ms else None
                facts = asdict(row) | {"ms": spread} | asdict(derived[row.method])
                for name in ("method", "rounds_ms"):
                    del facts[name]
                methods[row.method] = facts
            shapes.append({**result.shape._asdict(), "limit_ms": self.limit(result), "methods": methods})
        head = {key: getattr(self, key) for key in ("op", "suite", "ranks", "mode", "dtype", "protocol", "environment", "left_out")}
        return _finite(head | {"shapes": shapes})

    # what is particular to products; other operations have reports of their own

    def columns(self) -> Sequence[str]:
        """The heads of the table but the last; `cells` gives what stands between the second and the last two."""
        return ("M×N×K", "method", "ms", "min–max", "TFLOP/s", "× torch", "E", "T/T*", "host µs", "error/allowed")

    def cells(self, row: Row, derived: Any) -> list[str]:
        ms = row.rounds_ms
        return [
            row.status if row.status != "ok" else cell(row.ms, ".4g"),
            f"{min(ms):.4g}–{max(ms):.4g}" if ms else NONE,
            cell(derived.tflops, ".0f"),
            cell(derived.speedup, ".2f"),
            cell(derived.efficiency, ".2f"),
            cell(derived.over_limit, ".2f"),
        ]

    def behind(self, result: Result) -> float | None:
        """Speed of auto over the best peer."""
        return against_peers(self.times(result))

    def compared(self) -> list[str]:
        """Where auto stands."""
        ratios = {str(r.shape): ratio for r in self.results if (ratio := self.behind(r)) is not None}
        if not ratios:
            return []
        worst = min(ratios, key=lambda shape: ratios[shape])
        ahead = sum(ratio >= TOLERATED for ratio in ratios.values())
        return [
            f"auto against the best of {' and '.join(PEERS)}: at least {TOLERATED}× on {ahead} of {counted(len(ratios), 'shape')}, "
            f"worst {ratios[worst]:.2f}× at {worst}"
        ]

    def title(self) -> str:
        stamp = self.environment
        place = " · ".join(str(stamp[key]) for key in ("gpu", "commit", "date") if stamp.get(key))
        return f"{self.op}, {self.suite}, R={self.ranks}, {self.dtype}, {self.mode}\n{place}"

    def drawable(self) -> str | None:
        """Why there is nothing to draw, if so."""
        return None if any(self.times(result).get("torch") for result in self.results) else "no plot: it needs times of torch"

    def draw(self, figure: Any) -> None:
        """Speed-up over torch, a bar a method, with the limit marked."""
        drawn = [(result, times) for result in self.results if (times := self.times(result)).get("torch")]
        methods = [m for m in drawn[0][1] if m not in ("gemm", "torch") and any(times.get(m) for _, times in drawn)]
        width = 0.8 / max(1, len(methods))
        figure.set_size_inches(max(6.0, 1.5 + 0.35 * (len(methods) + 1) * len(drawn)), 4.5)
        axes = figure.subplots()
        for i, method in enumerate(methods):
            heights = [self.derived(result)[method].speedup or 0.0 for result, _ in drawn]
            axes.bar([j - 0.4 + width * (i + 0.5) for j in range(len(drawn))], heights, width, label=method)
        for j, (result, times) in enumerate(drawn):
            limit = self.limit(result)
            if limit:
                label = "limit T*" if j == 0 else None
                axes.hlines((times["torch"] or 0.0) / limit, j - 0.42, j + 0.42, colors="black", linewidth=1.5, label=label)
        axes.axhline(1.0, color="grey", linewidth=0.8, linestyle="--", label="torch")
        axes.set_xticks(range(len(drawn)), [str(result.shape) for result, _ in drawn], rotation=30, ha="right", fontsize=8)
        axes.set_ylabel("speed-up over torch")
        axes.set_title(self.title(), fontsize=9)
        axes.legend(fontsize=8, ncols=4)

    def save(self, directory: Path) -> Path:
        """The JSON; whole or not at all, so that it can be written again after each shape."""
        path = directory / f"{self.name}.json"
        scratch = path.with_suffix(".json.part")
        try:
            scratch.write_text(json.dumps(self.as_json(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
            os.replace(scratch, path)
        except OSError:
            with contextlib.suppress(OSError):
                scratch.unlink()
            raise
        return path


def _finite(value: Any) -> Any:
    """The same with None for what JSON has no word for (a wrong result may well have an error of NaN)."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# the table


def cell(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)


def _note(row: Row, behind: float | None, judged: str) -> str:
    parts = [row.path, row.note]
    if row.method == judged and behind is not None and behind < TOLERATED:
        parts.append(f"behind the best peer ({behind:.2f}×)")
    return "; ".join(filter(None, parts))


def table(report: Report) -> Any:
    """A rich table: a row a method, a section a shape."""
    rich_table, box = importlib.import_module("rich.table"), importlib.import_module("rich.box")
    title = f"{report.op}, suite {report.suite}, R={report.ranks}, {report.dtype}, {report.mode}"
    made = rich_table.Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, head in enumerate(report.columns()):
        made.add_column(head, justify="left" if i < 2 else "right", overflow="fold")
    made.add_column("", overflow="fold")
    for result in report.results:
        derived, behind = report.derived(result), report.behind(result)
        for i, row in enumerate(result.rows):
            known = row.error is not None and row.allowed
            made.add_row(
                str(result.shape) if i == 0 else "",
                row.method,
                *report.cells(row, derived[row.method]),
                cell(row.host_us, ".0f"),
                f"{row.error / row.allowed:.2f}" if known else NONE,  # type: ignore[operator]
                importlib.import_module("rich.text").Text(_note(row, behind, report.judged)),
                end_section=i == len(result.rows) - 1,
            )
    return made


def legend(report: Report) -> str:
    """What the figures are, or why there are few."""
    if report.environment.get("gpu", "") is None:
        return f"no GPU: results were checked (error/allowed: {MEANINGS['error/allowed']}); times of an interpreter mean nothing"
    meanings = [f"{head}: {MEANINGS[head]}" for head in report.columns() if head in MEANINGS]
    return "; ".join([*meanings, "docs/performance.md says more"])


def summary(report: Report) -> list[str]:
    """What the figures are, where auto stands, and all that is wrong or was left out, one line each."""
    lines = [legend(report), *report.compared()] if report.results else []
    for result in report.results:
        lines += [f"{row.status}: {row.method} at {result.shape}: {row.note}" for row in result.rows if row.status != "ok"]
    lines += [f"left out: {item['shape']}: {item['why']}" for item in report.left_out]
    return lines


def plot(report: Report, path: Path) -> str | None:
    """The picture of a report; a reason instead of a file where there is none to draw."""
    why = report.drawable()
    if why is not None:
        return why
    try:
        figure_module = importlib.import_module("matplotlib.figure")
    except ImportError:
        return "no plot: matplotlib is missing; python -m pip install matplotlib"
    figure = figure_module.Figure(layout="constrained")
    report.draw(figure)
    figure.savefig(path, dpi=150)
    return None


# the stamp

_PACKAGES = ("torch", "triton", "numpy", *(f"{n}-cu{c}" for n in ("nvshmem4py", "nvidia-nvshmem", "nvidia-nccl") for c in (12, 13)))
_VARIABLES = ("FLUXLIKE_", "NVSHMEM_", "NCCL_", "TRITON_", "TORCH_SYMM_MEM_", "CUDA_VISIBLE_DEVICES")


def _output(*command: str) -> str | None:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20)
        if done.returncode == 0:
            return done.stdout.strip()
    return None


def clocks() -> list[str]:
    """What nvidia-smi says of each GPU at this moment."""
    asked = "index,clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu"
    return (_output("nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader") or "").splitlines()


def _commit() -> str | None:
    """The commit of the package's own repository, if it runs from one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    commit = _output("git", "-C", str(root), "rev-parse", "--short=12", "HEAD")
    changed = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no", "--", "fluxlike")
    return f"{commit} with changes" if commit and changed else commit


def environment(arguments: Iterable[str], tool: str = "bench") -> dict[str, Any]:
    """Everything without which a figure is not a figure. Variables whose value is a path are left out."""
    import torch

    from ..runtime import world

    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    cuda = torch.cuda.is_available()
    driver = (_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "").splitlines()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "fluxlike": __version__,
        "commit": _commit(),
        "command": shlex.join(["python", "-m", "fluxlike", tool, *arguments]),
        "python": platform.python_version(),
        "versions": versions,
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "multiprocessors": torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count if cuda else None,
        "nodes": len(world.current().control.nodes) if world.is_initialized() else None,
        "driver": driver[0] if driver else None,
        "cuda": torch.version.cuda,
        "clocks_fields": "index, SM, SM at most, memory, power, power limit, temperature",
        "clocks_before": clocks(),
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES) and os.sep not in v},
    }


def headline(rows: Sequence[Row]) -> str:
    """One shape in a few words, for the progress line."""
    times = {row.method: row.ms for row in rows}
    bad = [f"{row.method} {row.status}" for row in rows if row.status != "ok"]
    torch = times.get("torch")
    parts = [
        f"{name} {ms:.4g} ms" + (f" ({torch / ms:.2f}×)" if torch and name != "torch" else "")
        for name, ms in times.items()
        if ms is not None
    ]
    return ", ".join(parts + bad) or f"{counted(len(rows), 'method')} right"


class Voice:
    """What rank 0 prints; the other ranks are silent. A log file gets plain lines, wide enough for the whole table."""

    def __init__(self, loud: bool) -> None:
        self.console: Any = None
        self.unwritten: set[str] = set()
        #: Files that were there before, and those that this run has written.
        self.replaced: set[Path] = set()
        self._begun: set[Path] = set()
        if loud:
            terminal = sys.stdout.isatty()
            self.console = importlib.import_module("rich.console").Console(width=None if terminal else 200)

    def say(self, text: str) -> None:
        if self.console is not None:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def progress(self, total: int) -> Any:
        """A bar on a terminal; elsewhere the lines of the shapes are the progress."""
        if self.console is None or not self.console.is_terminal:
            yield lambda: None
            return
        with importlib.import_module("rich.progress").Progress(console=self.console, transient=True) as bar:
            task = bar.add_task("shapes", total=total)
            yield lambda: bar.advance(task)

    def save(self, report: Report, out: Path) -> Path | None:
        """The JSON that was written; None, which is said, if it could not be, after which the run goes on to its table."""
        path = out / f"{report.name}.json"
        if path not in self._begun and path.exists():
            self.replaced.add(path)
        self._begun.add(path)
        try:
            return report.save(out)
        except OSError as error:
            self._unwritten(path, error)
            return None

    def draw(self, report: Report, path: Path) -> bool:
        """The picture; whether it could be written, if there is one."""
        try:
            self.say(plot(report, path) or f"written: {path}")
        except OSError as error:
            self._unwritten(path, error)
            return False
        return True

    def _unwritten(self, path: Path, error: OSError) -> None:
        if str(path) not in self.unwritten:  # once a file, which is tried again after each shape
            print(f"bench: {path} cannot be written: {error}; name another folder with --out", file=sys.stderr, flush=True)
        self.unwritten.add(str(path))

    def report(self, reports: Any, out: Path | None) -> bool:
        """The tables, and the files of them; whether all were written."""
        whole = True
        for report in reports:
            self.say("")
            # a narrow terminal wraps whole lines, which reads better than columns of three letters
            self.console.width = max(self.console.width, 130)
            if report.results:
                self.console.print(table(report))
            for line in summary(report):
                self.say(line)
            if out:
                path = self.save(report, out)
                if path:
                    self.say(f"written: {path}{', in place of the one that was there' if path in self.replaced else ''}")
                whole = bool(self.draw(report, out / f"{report.name}.png") and path and whole)
        return whole

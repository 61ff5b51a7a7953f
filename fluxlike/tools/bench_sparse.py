"""What `bench sparse_all_reduce` measures, and how it reports: sparse gradients of a table, against `sparse_baselines`.

A table is NxDxk, as 5000000x2048x50000: rows, columns, entries of each rank's gradient, whose ids are drawn alike (uniform), or
with ``:zipf`` behind it by their rank (a = 1). A call goes from the uncoalesced gradient to a result that can be used.

Bytes are those of values that must come to a rank, R: the rows of other ranks' ids (`bound`), which no way can go below; `in` and
`out` are what `sparse_all_reduce` moves, on the rank with the most. The limit T* is `bound` at the rate of the wire; for
bf16_wire the bytes are those of values in bf16.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

import fluxlike

from ..runtime.wording import counted
from . import bench_report, sparse_baselines, sparse_tables
from .bench_peers import Peers
from .bench_problems import SAMPLE_COLUMNS, SAMPLE_ROWS, Problem
from .bench_report import NONE, Result

VERSIONS = ("v1", "v2", "v3", "v4", "v5", "v6", "searchsorted")


class Table(NamedTuple):
    rows: int
    columns: int
    entries: int
    sampling: str = "uniform"

    def __str__(self) -> str:
        return f"{self.rows}×{self.columns}×{self.entries} {self.sampling}"

    def ids(self, rank: int) -> torch.Tensor:
        """Of one rank's gradient, on the CPU; all ranks can make those of all."""
        generator = torch.Generator().manual_seed(1234 + rank)
        if self.sampling == "uniform":
            return torch.randint(0, self.rows, (self.entries,), generator=generator)
        drawn = torch.rand(self.entries, generator=generator, dtype=torch.float64)
        return ((self.rows + 1) ** drawn - 1).long().clamp_(0, self.rows - 1)


def parse_tables(text: str) -> list[Table]:
    """NxDxk,NxDxk:zipf… ; ValueError names the part that is none."""
    tables = []
    for part in text.split(","):
        sizes, _, sampling = part.strip().lower().replace("×", "x").partition(":")
        numbers = sizes.split("x")
        if len(numbers) != 3 or not all(n.isdecimal() and int(n) for n in numbers) or sampling not in ("", "uniform", "zipf"):
            raise ValueError(f"{part.strip()!r} is no table; write NxDxk, as 5000000x2048x50000, and :zipf behind it if so drawn")
        rows, columns, entries = map(int, numbers)
        tables.append(Table(rows, columns, entries, sampling or "uniform"))
    return tables


class Traffic(NamedTuple):
    """Rows of values, on the rank with the most. union: distinct ids of all ranks."""

    union: int
    bound: int
    rows_in: int
    rows_out: int


@functools.cache
def traffic(table: Table, ranks: int) -> Traffic:
    """What `sparse_all_reduce` moves of this table, and the least that comes in by any way."""
    capacity = table.entries
    messages = torch.stack([sparse_tables.local(table.ids(rank), capacity).message for rank in range(ranks)])
    found = sparse_tables.table(messages, 0, ranks > 2)
    union = int(found.meta[0])
    has, owner = found.slots[:union] >= 0, found.owners[:union]
    many, least, rows_in, rows_out = has.sum(1), [], [], []
    for rank in range(ranks):
        mine, owns, direct = has[:, rank], owner == rank, owner < 0
        least.append(int((many > mine).sum()))  # somebody else has it
        come = torch.where(direct, many - mine.int(), torch.where(owns, many - 1, 1))
        go = torch.where(direct, mine * (ranks - 1), torch.where(owns, ranks - 1, mine.int()))
        rows_in.append(int(come.sum()))
        rows_out.append(int(go.sum()))
    return Traffic(union, max(least), max(rows_in), max(rows_out))


SUITES: dict[str, tuple[Table, ...]] = {
    "headline": tuple(parse_tables("5000000x2048x50000,5000000x2048x50000:zipf,5000000x2048x10000,250000x512x50000:zipf")),
    "sparsity": tuple(Table(5_000_000, 2048, entries) for entries in (1000, 3000, 10_000, 25_000, 50_000)),
    "toy": tuple(parse_tables("64x8x12,500x3x40:zipf")),  # small enough for the interpreter
}


@dataclass(frozen=True)
class Reached:
    """What follows from the median times of one table."""

    gb_s: float | None = None
    speedup: float | None = None  # over the Horovod scheme
    over_limit: float | None = None  # T / T*


class Report(bench_report.Report):
    judged = "exact"

    def limit(self, result: Result, method: str = "") -> float | None:
        return self.nbytes(result, traffic(result.shape, self.ranks).bound, method) / (bench_report.WIRE_GB_S * 1e9) * 1e3

    def nbytes(self, result: Result, rows: int, method: str = "") -> int:
        # else a method that sends half the bytes would seem faster than its wire
        itemsize = torch.bfloat16.itemsize if method == "bf16_wire" else self.itemsize
        return rows * int(result.shape.columns) * itemsize

    def derived(self, result: Result) -> dict[str, Any]:
        times, least = self.times(result), traffic(result.shape, self.ranks).bound
        horovod, found = times.get("horovod"), {}
        for name, ms in times.items():
            limit = self.limit(result, name)
            found[name] = Reached() if ms is None else Reached(
                gb_s=self.nbytes(result, least, name) / (ms * 1e-3) / 1e9,
                speedup=None if horovod is None else horovod / ms,
                over_limit=ms / limit if limit else None,
            )  # fmt: skip
        return found

    def as_json(self) -> dict[str, Any]:
        said = super().as_json()
        for shape, result in zip(said["shapes"], self.results, strict=True):
            moved = traffic(result.shape, self.ranks)
            shape["union"] = moved.union
            shape["bytes"] = {name: self.nbytes(result, rows) for name, rows in moved._asdict().items() if name != "union"}
        return said

    def columns(self) -> Sequence[str]:
        return ("N×D×k", "method", "ms", "min–max", "bound GB/s", "× horovod", "T/T*", "host µs", "error/allowed")

    def cells(self, row: bench_report.Row, derived: Any) -> list[str]:
        ms = row.rounds_ms
        return [
            row.status if row.status != "ok" else bench_report.cell(row.ms, ".4g"),
            f"{min(ms):.4g}–{max(ms):.4g}" if ms else NONE,
            bench_report.cell(derived.gb_s, ".0f"),
            bench_report.cell(derived.speedup, ".2f"),
            bench_report.cell(derived.over_limit, ".2f"),
        ]

    def behind(self, result: Result) -> float | None:
        """Speed of exact over the best of the others."""
        times = self.times(result)
        others = [ms for name in SparseAllReduce.ON_GPUS if (ms := times.get(name)) is not None]
        exact = times.get("exact")
        return min(others) / exact if others and exact is not None else None

    def compared(self) -> list[str]:
        """The bytes of each table."""
        lines = []
        for result in self.results:
            moved = traffic(result.shape, self.ranks)
            most, least, out = (self.nbytes(result, rows) / 1e6 for rows in (moved.rows_in, moved.bound, moved.rows_out))
            share = f", {most / least:.3f} of the bound" if least else ""
            text = f"MB of values in {most:.4g} ({least:.4g} at least{share}), out {out:.4g}"
            lines.append(f"{result.shape}: {counted(moved.union, 'id')} in all; {text}")
        return lines

    def lines(self) -> dict[tuple[int, int, str], list[Result]]:
        """Results that differ by their entries only, of two and more tables, in ascending order."""
        found: dict[tuple[int, int, str], list[Result]] = {}
        for result in self.results:
            if any(row.ms for row in result.rows):
                table = result.shape
                found.setdefault((table.rows, table.columns, table.sampling), []).append(result)
        return {key: sorted(some, key=lambda result: result.shape.entries) for key, some in found.items() if len(some) > 1}

    def drawable(self) -> str | None:
        why = "no plot: it needs times of tables that differ by their entries only; --suite sparsity has some"
        return None if self.lines() else why

    def draw(self, figure: Any) -> None:
        """Time over the entries of a rank's gradient, both on log axes: a panel a table, a line a method."""
        panels = self.lines()
        figure.set_size_inches(max(7, 5 * len(panels)), 4.5)
        for axes, ((rows, columns, sampling), results) in zip(
            figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
        ):
            for method in dict.fromkeys(row.method for result in results for row in result.rows):
                points = [(result.shape.entries, ms) for result in results if (ms := self.times(result).get(method))]
                if points:
                    style = "-o" if method in SparseAllReduce.OURS else "--s"
                    axes.plot(*zip(*points, strict=True), style, markersize=3, label=method)
            limits = [(result.shape.entries, limit) for result in results if (limit := self.limit(result))]
            if limits:  # none on one rank
                axes.plot(*zip(*limits, strict=True), "k:", label="limit T*")
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_xlabel(f"entries of a rank, of {rows} rows of {columns}, {sampling}")
            axes.set_ylabel("ms a call")
            axes.grid(alpha=0.3)
            axes.legend(fontsize=7, ncols=2)
        figure.suptitle(self.title(), fontsize=9)


# the problem


class SparseAllReduce(Problem):
    """A gradient on this rank, and the sum over the ranks of a sample of its rows."""

    OURS = ("exact", "padded", "bf16_wire")
    ON_GPUS, ON_CPUS = ("horovod", "searchsorted", "v6", "v5"), ("horovod", "searchsorted", "gloo", "dense", *VERSIONS[:6])
    #: Which take seconds a call, or tens of GB, at the sizes of the headline.
    PEERS_ON_REQUEST = ("gloo", "dense", "v1", "v2", "v3", "v4")
    UNBOUNDED = ("horovod", "gloo", "dense", *VERSIONS)
    REPORT, SUITES, LARGEST = Report, SUITES, "1000000x64x65536"

    @staticmethod
    def parse(text: str) -> list[Any]:
        return list(parse_tables(text))

    @staticmethod
    def work(shape: Any) -> int:
        return int(shape.columns * shape.entries)

    @classmethod
    def unfit(cls, shape: Any, ranks: int) -> str | None:
        return None

    def __init__(self, shape: Table, dtype: torch.dtype, device: torch.device, peers: Peers) -> None:
        self.table, self.dtype, self.device, self.peers, self.terms = shape, dtype, device, peers, peers.size
        self.generator = torch.Generator(device=device).manual_seed(1234 + peers.rank)
        ids = shape.ids(peers.rank).to(device)
        values = self.random(shape.entries, shape.columns)
        self.x = torch.sparse_coo_tensor(ids[None], values, (shape.rows, shape.columns), check_invariants=False)
        self.match = sparse_baselines.versions()
        union = torch.cat([shape.ids(rank) for rank in range(peers.size)]).unique()
        choice = torch.Generator().manual_seed(5)  # the same sample on every rank
        self.picked = union[torch.randperm(len(union), generator=choice)[:SAMPLE_ROWS]].to(device)
        self.cols = torch.randperm(shape.columns, generator=choice)[:SAMPLE_COLUMNS].to(device)
        here = torch.isin(ids, self.picked)
        part = torch.zeros(len(self.picked), len(self.cols), dtype=torch.float64, device=device)
        order = self.picked.argsort()
        places = order[torch.searchsorted(self.picked[order], ids[here])]
        self.truth = peers.add(part.index_add_(0, places, values[here][:, self.cols].double()))
        self.out = torch.empty(1, device=device)

    def context(self, schedule: str) -> "_Method":
        return _Method(self.x, schedule)

    def ours(self, context: Any) -> torch.Tensor:
        return self.usable(*context.reduce())

    @staticmethod
    def usable(ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The values; their ids hang on them."""
        values.ids = ids  # type: ignore[attr-defined]
        return values

    def spoil(self) -> None:
        for rows in (traffic(self.table, self.peers.size).union, self.table.entries * self.peers.size):
            torch.full((rows, self.x.shape[1]), math.nan, dtype=self.dtype, device=self.device)

    def know_torch(self) -> None:
        self.torch_error = 0.0
        self.torch_error, _ = self.judge("torch", self.run_torch())

    def run_torch(self) -> torch.Tensor:
        return self.usable(*sparse_baselines.horovod(self.x))

    run_horovod = run_torch

    def run_gloo(self) -> torch.Tensor:
        return self.usable(*sparse_baselines.gloo(self.x, self.peers.group))

    def run_dense(self) -> torch.Tensor:
        return self.usable(*sparse_baselines.dense(self.x))

    def call(self, method: str, context: Any) -> Any:
        if method in VERSIONS:
            return lambda: self.usable(*sparse_baselines.through_union(self.x, self.match[method]))
        return super().call(method, context)

    def sample(self, method: str, result: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.searchsorted(result.ids, self.picked).clamp_max(max(len(result) - 1, 0))  # type: ignore[attr-defined]
        got = result[places][:, self.cols].double()
        wrong = result.ids[places] != self.picked  # type: ignore[attr-defined]
        return got.masked_fill(wrong[:, None], math.nan), self.truth

    def judge(self, method: str, result: torch.Tensor) -> tuple[float, float]:
        error, allowed = super().judge(method, result)
        rounding = torch.finfo(torch.bfloat16).eps if method == "bf16_wire" else 0
        return error, max(allowed, rounding)


class _Method:
    """One of our modes, in the form of the contexts of the other operations."""

    def __init__(self, x: torch.Tensor, mode: str) -> None:
        self.x, self.mode = x, "padded" if mode == "padded" else "exact"
        wire = torch.bfloat16 if mode == "bf16_wire" else None
        self.ctx = fluxlike.create_sparse_all_reduce_context(x.shape, x._nnz(), x.dtype, wire_dtype=wire)

    def reduce(self) -> tuple[torch.Tensor, torch.Tensor]:
        y = fluxlike.sparse_all_reduce(self.x, mode=self.mode, ctx=self.ctx)
        return y._indices()[0], y._values()

    @property
    def last_path(self) -> str:
        return str(self.ctx.last_path)

    def check(self) -> None:
        self.ctx.check()

    def close(self) -> None:
        self.ctx.close()

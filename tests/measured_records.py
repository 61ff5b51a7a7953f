"""The records of docs/measured, as `performance_tables` reads them: medians, paths, commits; and cells of its tables."""

import json
import statistics
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT / "docs" / "measured"
OPS = ("gemm_rs", "ag_gemm")
COLLECTIVES = ("all_reduce", "resnet50", "gemm_ar", "reduce_scatter", "all_gather", "reduce", "broadcast")
#: Machines with the headline suite: their records of an op, eager and in graphs.
HEADLINE = {
    "4×H100": ("2026-11-26-{}-headline-H100-R4.json", "2026-11-26-{}-headline-H100-R4-graph.json"),
    "4×H200": ("2026-11-22-{}-headline-R4.json", "2026-11-22-{}-headline-R4-graph.json"),
    "2×H200": ("2026-11-29-{}-headline-R2.json", "2026-11-29-{}-headline-R2-graph.json"),
    "2×H100": ("2026-11-25-{}-timed-H100-R2.json", "2026-11-25-{}-timed-H100-R2-graph.json"),
}
#: Those whose later records are in the table above.
EARLIER = {"2×H100,-five-rounds": ("2026-11-25-{}-table-H100-R2.json", "2026-11-25-{}-table-H100-R2-graph.json")}
EARLIER |= {"2×H200,-27-November": ("2026-11-27-{}-headline-R2.json", "2026-11-27-{}-headline-R2-graph.json")}
#: Other suites, and runs with every schedule: "2×H200," and these.
OTHERS = {f"2×H200,-{name}": (f"2026-11-29-{{}}-{record}-R2.json", f"2026-11-29-{{}}-{record}-R2-graph.json") for name, record in (
    ("attention", "attention"),
    ("attention,-all-schedules", "attention-schedules"),
    ("headline,-all-schedules", "headline-schedules"),
    ("one-kernel-with-fewer-programs", "narrow"),
    ("attention-in-half-tiles,-all-schedules", "attention-half-tiles"),
    ("attention-in-half-tiles", "attention-again"),
    ("hidden-size-5120,-all-schedules", "5120-schedules"),
    ("hidden-size-5120", "5120"),
)}  # fmt: skip
#: gemm_rs only, of the day after.
OTHERS |= {f"2×H200,-{name}": (f"2026-11-30-{{}}-{record}-R2.json", f"2026-11-30-{{}}-{record}-R2-graph.json") for name, record in (
    ("long-products,-all-schedules", "long-schedules"),
    ("long-products", "long"),
    ("as-the-model-cuts,-schedules", "parts"),
)}  # fmt: skip
#: What was run, by what the record calls it or by its name, if it is another commit: the pages say so.
CODE_OF = {"a151d77bcb52 with changes": "97fb9a3, which the records call a151d77 with changes"}
CODE_OF |= {f"2026-11-25-{op}-again-H100-R2.json": "ecd09a9" for op in OPS}
CODE_OF |= {f"2026-11-26-{name}-H100-R2.json": "29ae4f5" for name in ("gemm_rs-out", "ag_gemm-out", "ag_gemm-out-short")}
CODE_OF |= {f"2026-11-26-{name}-R2{mode}.json": "3069af8" for name in COLLECTIVES for mode in ("", "-graph")}
CODE_OF |= {f"2026-11-26-{name}-sets-R2{mode}.json": "deecd1c" for name in COLLECTIVES for mode in ("", "-graph")}
CODE_OF |= {f"2026-11-26-{op}-large-R2.json": "7bc2ac2" for op in OPS}
CODE_OF |= {f"2026-11-26-all_reduce-ahead-{turns}-R2-graph.json": "e529838 but for what auto takes" for turns in (1, 2)}
CODE_OF |= {f"2026-11-25-{op}-said-{model}-H100-R2.json": "0be2ba4" for op in OPS for model in ("8b", "70b")}
#: Machine and record of an op with few rows, by commit.
FEW = {
    "41ce960": ("4×H200", "2026-11-22-{}-small-m-words-R4-graph.json"),
    "42973eb": ("4×H200", "2026-11-22-{}-small-m-R4-graph.json"),
    "2ac2636": ("2×H200", "2026-11-27-{}-small-m-R2-graph.json"),
}
CODE_OF |= {f"2026-11-27-{op}-headline-R2{mode}.json": "2ac2636" for op in OPS for mode in ("", "-graph")}
CODE_OF |= dict.fromkeys([*map(FEW["2ac2636"][1].format, OPS), "2026-11-27-ag_gemm-llama-8b-R2.json"], "2ac2636")
MODES = ("", "-graph")
CODE_OF |= {f"2026-11-29-{name}-schedules-R2{mode}.json": "7614589" for name in (
    "gemm_rs-headline", "ag_gemm-headline", "ag_gemm-attention"
) for mode in MODES}  # fmt: skip
CODE_OF |= {f"2026-11-29-{op}-narrow-R2{mode}.json": "d0ee90a but for what one kernel makes" for op in OPS for mode in MODES}
for _name in ("headline", "attention"):
    CODE_OF |= {f"2026-11-29-{op}-{_name}-R2{mode}.json": "d0ee90a" for op in OPS for mode in MODES}
CODE_OF |= {f"2026-11-30-gemm_rs-{name}-R2{mode}.json": "35e0a99" for name in ("long-schedules", "parts") for mode in MODES}
CODE_OF |= {f"2026-11-30-gemm_rs-long-R2{mode}.json": "f6ea4f0" for mode in MODES}
CODE_OF |= {f"2026-11-30-{op}-triton-{of}-R2-graph.json": "35e0a99" for op in OPS for of in (36, 38)}
for _when, _commit in (("before", "3ffddb7"), ("after", "70e1e27 but for the versions that it admits")):
    CODE_OF |= {f"2026-11-30-all_reduce-registers-{_when}-{turn}-R2-graph.json": _commit for turn in (1, 2)}
    _sparse = (f"2026-11-30-sparse_all_reduce-registers-{few}{_when}-{turn}-R2.json" for few in ("", "few-") for turn in (1, 2))
    CODE_OF |= dict.fromkeys(_sparse, _commit)
HALF_TILES = {"ag_gemm-attention-half-tiles": "998b663", "ag_gemm-5120-schedules": "998b663", "ag_gemm-attention-again": "998b663"}
HALF_TILES |= {"gemm_rs-5120-schedules": "998b663 but for how gemm_rs's kernel addresses partials"}
HALF_TILES |= {f"{op}-5120": "998b663" for op in OPS}
CODE_OF |= {f"2026-11-29-{name}-R2{mode}.json": commit for name, commit in HALF_TILES.items() for mode in MODES}
FUSED = tuple(
    f"2026-11-27-{op}-{how}-R2{mode}.json" for op in ("gemm_rs", "gemm_ar") for how in ("fused", "unfused") for mode in MODES
)
CODE_OF |= dict.fromkeys(FUSED, "727500b")
CODE_OF |= {f"2026-11-27-ag_gemm-{how}-R2{mode}.json": "3846498" for how in ("fused", "unfused") for mode in MODES}
#: Few rows by torch's product and in one kernel, in one run: machines' records of an op, and what was run.
SIDE_BY_SIDE = {"2×H200": ("2026-11-28-{}-few-R2{}.json", "808ecbb"), "2×H100": ("2026-11-28-{}-few-H100-R2{}.json", "9822d0f")}
SIDE_BY_SIDE["wide"] = "2026-11-28-{}-wide-R2{}.json", "0f1ae78"  # and more rows, on two H200s
SIDE_BY_SIDE["4×H200"] = "2026-11-28-{}-few-R4{}.json", "e08e55c"
SIDE_BY_SIDE["bounds"] = "2026-11-28-{}-bounds-R2{}.json", "e3ced63"
SIDE_BY_SIDE["waits"] = "2026-11-28-{}-waits-R2{}.json", "c46002b"
SIDE_BY_SIDE["parts"] = "2026-11-28-{}-parts-R2{}.json", "c49fa8c"
SIDE_BY_SIDE["warps"] = "2026-11-28-{}-warps-R2{}.json", "857dbdf"
#: Two nodes of one GPU each, by which calls.
NODES = {what: f"2026-11-28-{{}}-nodes-{what}{{}}.json" for what in ("2x1", "few-2x1")}
CODE_OF |= {name.format(op, mode): "c49fa8c" for name in NODES.values() for op in OPS for mode in MODES}
CODE_OF |= {"2026-11-28-all_reduce-waits-before-R2-graph.json": "e3ced63", "2026-11-28-all_reduce-waits-R2-graph.json": "c46002b"}
for _name, _commit in SIDE_BY_SIDE.values():
    CODE_OF |= {_name.format(op, mode): _commit for op in (*OPS, "gemm_ar") for mode in MODES}
#: E is told where torch exposes more than this part of the product's time; below, it is mostly noise.
EXPOSED = 0.05
NONE = "–"


class Record(NamedTuple):
    """Medians in µs and, by the same keys, the paths that calls took; of the host, too."""

    name: str
    commit: str
    times: dict[str, dict[str, float]]
    paths: dict[str, str]
    host: dict[str, dict[str, float]]

    @property
    def link(self) -> str:
        return f"measured/{self.name}"


@cache
def read(name: str) -> Record:
    path = MEASURED / name
    if not path.exists():  # of this one the JSON is lost, and a page has what bench printed
        return printed(path.with_suffix(".md"))
    data = json.loads(path.read_text())
    commit = data["environment"]["commit"] or ""
    times, paths, host = {}, {}, {}
    for shape in data["shapes"]:
        methods = shape["methods"]
        where = str(shape["nbytes"] if "nbytes" in shape else len(shape.get("keys", ())))
        if "m" in shape:
            where = f"{shape['m']}×{shape['n']}×{shape['k']}"
        times[where] = {method: facts["ms"]["median"] * 1e3 for method, facts in methods.items() if facts["ms"]}
        paths[where] = methods["auto"]["path"].split("/")[0] if "auto" in methods else ""
        host[where] = {method: facts["host_us"] for method, facts in methods.items() if facts["host_us"] is not None}
    commit = CODE_OF.get(name) or CODE_OF.get(commit, commit[:7] + " with changes" * commit.endswith("with changes"))
    return Record(name, commit, times, paths, host)


def printed(path: Path) -> Record:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in path.read_text().splitlines() if line.startswith("|")]
    methods = rows[0][1:]
    times = {row[0]: {method: float(cell.split()[0]) for method, cell in zip(methods, row[1:], strict=True)} for row in rows[2:]}
    json_of = json.loads(path.with_name(path.name.replace("-graph.md", ".json")).read_text())
    return Record(path.name, CODE_OF[json_of["environment"]["commit"]], times, dict.fromkeys(times, NONE), {})


def headline(machine: str, op: str) -> tuple[Record, Record]:
    eager, graph = (read(name.format(op)) for name in (HEADLINE | EARLIER | OTHERS)[machine])
    assert eager.commit == graph.commit
    return eager, graph


def us(value: float | None) -> str:
    return NONE if value is None else f"{value:.0f}" if value >= 99.95 else f"{value:.1f}"


def table(heads: str, rows: list[list[str]], words: int = 1) -> str:
    """Of which the first columns are of ``words``, and the others of numbers."""
    names = heads.split(" | ")
    lines = [names, ["---"] * words + ["--:"] * (len(names) - words), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def linked(op: str, record: Record, rows: list[list[str]]) -> str:
    """The op, with its record where ``rows`` do not have that yet."""
    link = f"[{op}]({record.link})"
    return op if any(row[0] == link for row in rows) else link


def spread(ratios: list[float]) -> str:
    return f"{min(ratios):.2f} / {statistics.median(ratios):.2f} / {max(ratios):.2f}"


def ratios(record: Record, peer: str) -> list[float]:
    return [times[peer] / times["auto"] for times in record.times.values()]


def hidden(times: dict[str, float]) -> str:
    """E, where there is something to hide."""
    gemm, torch = times["gemm"], times["torch"]
    return f"{1 - (times['auto'] - gemm) / (torch - gemm):.2f}" if torch - gemm > EXPOSED * gemm else NONE

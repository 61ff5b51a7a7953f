"""What bench says, writes and draws of what it has measured."""

import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch

import fluxlike

pytest.importorskip("rich")

from fluxlike.runtime.wording import counted
from fluxlike.tools import bench_bursts, bench_collectives, bench_reduce, bench_report, bench_sparse
from fluxlike.tools.bench_bursts import Burst
from fluxlike.tools.bench_reduce import Size
from fluxlike.tools.bench_report import Report, Result, Row, Shape, Voice

ROOT = Path(__file__).resolve().parents[1]

BIG = Shape(8192, 8192, 28672)


def made_up(**changes):
    rows = [
        Row("gemm", rounds_ms=[1.3, 1.4, 1.5], error=0.001, allowed=0.002),
        Row("torch", rounds_ms=[1.7, 1.8, 1.9], host_us=31.0),
        Row("async_tp", status="failed", note="every rank: RuntimeError: [bold]not here[/bold]"),
        Row("in_kernel", status="WRONG", note="error nan", error=math.nan, allowed=0.002),
        Row("auto", rounds_ms=[2.0, 1.99, 2.01], path="copy_engine/tma", **changes),
    ]
    stamp = {"gpu": "a GPU", "date": "today"}
    left_out = [{"shape": "1×1×1", "why": "too small"}]
    return Report("gemm_rs", "custom", 4, "eager", "bfloat16", 2, {"rounds": 3}, stamp, [Result(BIG, rows)], left_out)


def test_the_table_is_whole_in_a_log(capsys):
    voice = Voice(loud=True)
    voice.report([made_up()], None)
    said = capsys.readouterr().out
    assert "…" not in said
    line = next(line for line in said.splitlines() if re.match(r"\s+auto ", line))
    cells = ("2", "1.99–2.01", "0.90", "-0.50", "1.43", "copy_engine/tma; behind the best peer (0.90×)")
    assert all(cell in line for cell in cells), line
    assert re.search(r"gemm .* 1\.4 +1\.3–1\.5 .* 0\.50", said)
    assert re.search(r"in_kernel +WRONG .*error nan", said)
    assert "RuntimeError: [bold]not here[/bold]" in said
    assert "at least 0.98× on 0 of 1 shape, worst 0.90× at 8192×8192×28672" in said
    assert "WRONG: in_kernel at 8192×8192×28672" in said and "left out: 1×1×1: too small" in said


def test_only_rank_0_speaks(capsys):
    voice = Voice(loud=False)
    voice.say("something")
    with voice.progress(3) as advance:
        advance()
    assert capsys.readouterr().out == ""


def test_json(tmp_path):
    report = made_up(host_us=55.5)
    path = report.save(tmp_path)
    assert path.name == "gemm_rs-custom-R4-eager.json" and list(tmp_path.iterdir()) == [path]
    read = json.loads(path.read_text())
    [shape] = read["shapes"]
    assert (shape["m"], shape["n"], shape["k"], shape["limit_ms"]) == (*BIG, 1.4)
    auto = shape["methods"]["auto"]
    assert auto["ms"] == {"median": 2.0, "min": 1.99, "max": 2.01, "rounds": [2.0, 1.99, 2.01]}
    assert auto["speedup"] == pytest.approx(0.9) and auto["host_us"] == 55.5
    wrong = shape["methods"]["in_kernel"]
    assert wrong["status"] == "WRONG" and wrong["error"] is None and wrong["ms"] is None
    assert read["environment"]["gpu"] == "a GPU" and read["left_out"][0]["why"] == "too small"


def test_no_run_writes_over_the_record_of_another(tmp_path):
    """The dtype, nodes and ranks on a GPU are of the command line, too, and of the name where they are not the usual ones."""
    report = made_up()
    split, shared = {"variables": {"FLUXLIKE_VIRTUAL_NODES": "2"}}, {"variables": {"FLUXLIKE_RANKS_PER_GPU": "2"}}
    stamps = ({}, split, split | {"nodes": 4}, {"nodes": 1}, shared, shared | {"gpu": None})
    names = []
    for report.dtype in ("bfloat16", "float32"):
        for report.environment in stamps:
            names.append(report.save(tmp_path).stem)
    ranks = [f"R4{nodes}{dtype}" for dtype in ("", "-float32") for nodes in ("", "-nodes2", "-nodes4", "", "-shared2", "")]
    assert names == [f"gemm_rs-custom-{one}-eager" for one in ranks]


def test_what_stood_in_the_place_of_a_record_is_told(tmp_path, capsys):
    for said in ("", ", in place of the one that was there"):
        voice = Voice(loud=True)
        voice.save(made_up(), tmp_path)  # as behind each shape
        voice.report([made_up()], tmp_path)
        assert f"written: {tmp_path / made_up().name}.json{said}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "method"),
    [(Report, "auto"), (bench_collectives.Report, "auto"), (bench_bursts.Report, "list"), (bench_sparse.Report, "exact")],
)
def test_the_method_that_is_behind_is_told_so(kind, method):
    said = {name: bench_report._note(Row(name), 0.33, kind.judged) for name in ("torch", "auto", "list", "exact")}
    assert said.pop(method) == "behind the best peer (0.33×)" and not any(said.values())


def test_the_stamp():
    stamp = bench_report.environment(["gemm_rs", "--shapes", "a b"])
    assert stamp["fluxlike"] == fluxlike.__version__
    assert stamp["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert stamp["command"] == "python -m fluxlike bench gemm_rs --shapes 'a b'"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", stamp["date"])


def test_the_stamp_tells_no_paths(monkeypatch):
    monkeypatch.setenv("FLUXLIKE_LOG", "INFO")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/some/where")
    assert bench_report.environment([])["variables"].get("FLUXLIKE_LOG") == "INFO"
    assert "/some/where" not in json.dumps(bench_report.environment([]))


def test_plot(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    bars, marks = [], []
    from matplotlib.axes import Axes

    draw, mark = Axes.bar, Axes.hlines
    monkeypatch.setattr(Axes, "bar", lambda self, x, h, *a, **k: (bars.append((k["label"], h)), draw(self, x, h, *a, **k))[1])
    monkeypatch.setattr(Axes, "hlines", lambda self, y, *a, **k: (marks.append(y), mark(self, y, *a, **k))[1])
    assert bench_report.plot(made_up(), path) is None
    assert path.read_bytes().startswith(b"\x89PNG")
    assert bars == [("auto", [pytest.approx(0.9)])] and marks == [pytest.approx(1.8 / 1.4)]


def test_no_plot(tmp_path, monkeypatch):
    report = made_up()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "matplotlib is missing" in bench_report.plot(report, tmp_path / "plot.png")
    report.results[0].rows[1].rounds_ms = []
    assert "times of torch" in bench_report.plot(report, tmp_path / "plot.png")
    assert not list(tmp_path.iterdir())


def latencies():
    """A report of all_reduce on four ranks: auto takes the wrong algorithm for the first size, and is slow at the second."""
    times = {"torch": (20, 64), "torch_two_shot": (10, 51), "one_shot": (5, 90), "bulk": (8, 40), "auto": (8, 80)}
    results = [
        Result(size, [Row(name, rounds_ms=[t[i] / 1e3], path="bulk" if name == "auto" else "") for name, t in times.items()])
        for i, size in enumerate((Size(128 << 10), Size(8 << 20)))
    ]
    return bench_reduce.Report("all_reduce", "custom", 4, "graph", "bfloat16", 2, {}, {"gpu": "a GPU"}, results)


def test_latencies(capsys, tmp_path):
    report = latencies()
    Voice(loud=True).report([report], tmp_path)
    said = capsys.readouterr().out
    first, second = (line for line in said.splitlines() if re.match(r"\s+auto ", line))
    assert all(cell in first for cell in (" 8 ", "2.50", "1.25", " 25 ", "bulk")) and "behind" not in first, first
    assert all(cell in second for cell in (" 80 ", "0.80", "157", "behind the best peer (0.64×)")), second
    assert "at least 0.98× on 1 of 2 sizes, worst 0.64× at 8 MB" in said
    assert "within 1.05× on 0 of 2 sizes, worst 2.00× at 8 MB" in said
    assert "\nT/T*: time over the least that product and wire take; error/allowed: above 1 is WRONG; docs/performance.md" in said
    report.environment["gpu"] = None
    assert bench_report.summary(report)[0].startswith("no GPU: results were checked")
    read = json.loads((tmp_path / "all_reduce-custom-R4-graph.json").read_text())
    assert [shape["nbytes"] for shape in read["shapes"]] == [128 << 10, 8 << 20]
    assert read["shapes"][0]["methods"]["auto"]["over_best"] == pytest.approx(10 / 8)
    assert read["shapes"][0]["limit_ms"] == pytest.approx(1.5 * (128 << 10) / 360e9 * 1e3)
    pytest.importorskip("matplotlib")
    assert (tmp_path / "all_reduce-custom-R4-graph.png").read_bytes().startswith(b"\x89PNG")
    for result in report.results:
        result.rows = [Row("auto")]
    assert bench_report.plot(report, tmp_path / "other.png") == "no plot: it needs times"


def test_times_of_bursts(capsys, tmp_path):
    times = {"torch": (10, 400), "torch_coalesced": (12, 150), "each": (5, 300), "list": (5, 100)}
    results = [
        Result(burst, [Row(name, rounds_ms=[us[i] / 1e3]) for name, us in times.items()])
        for i, burst in enumerate((Burst((512,)), Burst((1000, 2 << 20))))
    ]
    report = bench_bursts.Report("all_reduce", "resnet50", 4, "graph", "bfloat16", 2, {}, {"gpu": "a GPU"}, results)
    Voice(loud=True).report([report], tmp_path)
    said = capsys.readouterr().out
    assert "list at 1 of 512 elements: 2.00× torch, 2.40× torch_coalesced, 1.00× each" in said
    assert "list at 2 of 2,098,152 elements: 4.00× torch, 1.50× torch_coalesced, 3.00× each" in said
    read = json.loads((tmp_path / "all_reduce-resnet50-R4-graph.json").read_text())
    second = read["shapes"][1]
    assert second["keys"] == [1000, 2 << 20] and second["methods"]["list"]["over_best"] == pytest.approx(1.5)
    assert second["limit_ms"] == pytest.approx(1.5 * 2 * (1000 + (2 << 20)) / 360e9 * 1e3)
    pytest.importorskip("matplotlib")
    assert (tmp_path / "all_reduce-resnet50-R4-graph.png").read_bytes().startswith(b"\x89PNG")


def test_numbers_in_messages():
    assert [counted(number, "rank") for number in range(3)] == ["0 ranks", "1 rank", "2 ranks"]
    assert [counted(number, "entry", "entries") for number in (1, 2)] == ["1 entry", "2 entries"]
    assert bench_report.headline([Row("auto")]) == "1 method right"

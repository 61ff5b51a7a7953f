"""`bench sparse_all_reduce`: tables, bytes, plots, and that every way to compute it is right and a wrong one is found."""

import json
import sys

import pytest
import ranks
import torch

pytest.importorskip("rich")

import fluxlike
from fluxlike.tools import bench, bench_records, bench_report, bench_sparse, sparse_baselines
from fluxlike.tools.bench_peers import Peers
from fluxlike.tools.bench_report import Result, Row
from fluxlike.tools.bench_sparse import Table, parse_tables, traffic

EVERY = ("horovod", "searchsorted", "gloo", "dense", "v1", "v2", "v3", "v4", "v5", "v6", "exact", "padded", "bf16_wire")


def test_tables():
    assert parse_tables("50x8×9, 5x1x2:zipf") == [Table(50, 8, 9), Table(5, 1, 2, "zipf")]
    for wrong in ("5x8", "5x8x0", "5x8x2:normal", "x"):
        with pytest.raises(ValueError, match="is no table"):
            parse_tables(wrong)
    for table in (Table(1000, 1, 4000), Table(1000, 1, 4000, "zipf")):
        ids = table.ids(1)
        assert torch.equal(ids, table.ids(1)) and not torch.equal(ids, table.ids(2)) and ids.min() >= 0 and ids.max() < 1000
        assert ((ids < 10).sum() > 800) == (table.sampling == "zipf")


def test_default_methods():
    asked = bench.parse(["sparse_all_reduce"], cuda=True)
    assert asked.methods == ["horovod", "searchsorted", "v6", "v5", "exact", "padded", "bf16_wire"]
    assert bench.parse(["sparse_all_reduce", "--methods", "dense,exact"], cuda=True).methods == ["exact", "dense"]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_traffic(count):
    """Against the same, id by id."""
    table = Table(60, 1, 25)
    sets = [set(table.ids(rank).tolist()) for rank in range(count)]
    union = sorted(set().union(*sets))
    least, come, go = [0] * count, [0] * count, [0] * count
    for place, one in enumerate(union):
        has = [rank for rank in range(count) if one in sets[rank]]
        owner = has[place % len(has)] if count > 2 and len(has) > 1 else None
        for rank in range(count):
            least[rank] += any(other != rank for other in has)
            for other in has:
                if other != rank and owner in (None, rank):
                    come[rank] += 1
                    go[other] += 1
            if owner is not None and rank != owner:
                come[rank] += 1
                go[owner] += 1
    assert traffic(table, count) == (len(union), max(least), max(come), max(go))


def test_report():
    table = Table(60, 10, 25)
    rows = [Row("horovod", rounds_ms=[2.0]), Row("exact", rounds_ms=[1.0]), Row("padded")]
    report = bench_sparse.Report("sparse_all_reduce", "custom", 4, "eager", "float32", 4, {}, {}, [Result(table, rows)])
    moved = traffic(table, 4)
    derived = report.derived(report.results[0])
    assert derived["exact"].speedup == 2 and derived["padded"] == bench_sparse.Reached()
    assert derived["exact"].gb_s == pytest.approx(moved.bound * 40 / 1e-3 / 1e9)
    assert derived["exact"].over_limit == pytest.approx(1e-3 / (moved.bound * 40 / 360e9))
    assert report.behind(report.results[0]) == 2
    said = report.as_json()["shapes"][0]
    assert said["union"] == moved.union and said["bytes"]["rows_in"] == 40 * moved.rows_in
    assert f"{moved.union} ids in all" in report.compared()[0]


def test_bf16_on_the_wire_is_measured_by_what_it_sends():
    table = Table(60, 10, 25)
    rows = [Row("exact", rounds_ms=[1.0]), Row("bf16_wire", rounds_ms=[1.0])]
    for dtype, itemsize in (("float32", 4), ("bfloat16", 2)):
        report = bench_sparse.Report("sparse_all_reduce", "custom", 4, "eager", dtype, itemsize, {}, {}, [Result(table, rows)])
        exact, wire = report.derived(report.results[0]).values()
        assert wire.gb_s == pytest.approx(traffic(table, 4).bound * 20 / 1e-3 / 1e9)
        assert wire.over_limit == pytest.approx(exact.over_limit * itemsize / 2)


def swept(ranks, factor=1.0):
    """A report on tables of which two differ by their entries only; "padded" failed on the larger."""
    results = [
        Result(Table(500, 4, entries), [Row("horovod", rounds_ms=[entries * factor]), Row("exact", rounds_ms=[factor])])
        for entries in (40, 20)
    ]
    results[1].rows.append(Row("padded", rounds_ms=[0.5]))
    results.append(Result(Table(60, 4, 20), [Row("exact", rounds_ms=[3.0])]))
    how = "sparse_all_reduce", "sparsity", ranks, "eager", "float32", 4, {}, {"gpu": "a GPU"}
    return bench_sparse.Report(*how, results)


def drawn_lines(monkeypatch):
    """What `Axes.plot` is called with from here on: label: points."""
    axes = pytest.importorskip("matplotlib.axes").Axes
    draw, lines = axes.plot, {}

    def plot(self, x, y, *style, label, **how):
        lines[label] = list(zip(x, y, strict=True))
        return draw(self, x, y, *style, label=label, **how)

    monkeypatch.setattr(axes, "plot", plot)
    return lines


def test_time_over_sparsity(tmp_path, monkeypatch):
    lines, report = drawn_lines(monkeypatch), swept(4)
    assert bench_report.plot(report, tmp_path / "plot.png") is None
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    limit = lines.pop("limit T*")
    assert lines == {"horovod": [(20, 20), (40, 40)], "exact": [(20, 1), (40, 1)], "padded": [(20, 0.5)]}
    assert limit == [(entries, traffic(Table(500, 4, entries), 4).bound * 16 / 360e9 * 1e3) for entries in (20, 40)]


def test_no_order_of_tables(tmp_path):
    report = swept(4)
    del report.results[1]
    assert "--suite sparsity" in bench_report.plot(report, tmp_path / "plot.png")
    report = swept(4)
    for row in report.results[0].rows:
        row.rounds_ms = []
    assert "it needs times" in bench_report.plot(report, tmp_path / "plot.png") and not list(tmp_path.iterdir())


MORE = ("--suite decode", "--shapes 512", "--graph", "--rounds 3", "--iters 2", "--dtype float16", "--seconds 9")


@pytest.mark.parametrize("more", MORE)
def test_records_are_drawn_as_they_are(more, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)  # of several ranks, the first says it
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit) as leaving:
        bench.main(["all_reduce", "--plot-records", "x.json", *more.split()])
    assert leaving.value.code == 2
    assert f"--plot-records measures nothing, so it takes no {more.split()[0]};" in capsys.readouterr().err


def plot_records(paths, out):
    return bench.main(["sparse_all_reduce", "--out", str(out), "--plot-records", *map(str, paths)])


def test_time_over_ranks(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)  # of several ranks, the first does it
    paths = [swept(4, 2.0).save(tmp_path), swept(2).save(tmp_path)]
    lines = drawn_lines(monkeypatch)
    assert plot_records(paths, tmp_path / "new") == 0
    assert (tmp_path / "new" / "sparse_all_reduce-ranks.png").read_bytes().startswith(b"\x89PNG")
    last_panels = {"horovod": [(2, 20), (4, 40)], "exact": [(2, 3), (4, 3)], "padded": [(2, 0.5), (4, 0.5)]}
    assert lines == last_panels
    found = bench_records.panels(bench_records.read("sparse_all_reduce", paths))
    assert list(found) == [f"{table}×uniform, float32, eager, a GPU" for table in ("500×4×40", "500×4×20", "60×4×20")]
    assert found["500×4×40×uniform, float32, eager, a GPU"] == {"horovod": [(2, 40), (4, 80)], "exact": [(2, 1), (4, 2)]}


def test_no_line_joins_machines_that_differ():
    """Four ranks of the one and two of the other are no order of ranks."""
    four, two = swept(4).as_json(), swept(2).as_json()
    assert bench_records.panels([four, two])
    for other in ({"gpu": "another"}, {"gpu": "a GPU", "nodes": 2}, {"gpu": "a GPU", "variables": {"FLUXLIKE_VIRTUAL_NODES": "2"}}):
        assert not bench_records.panels([four, two | {"environment": other}])
    (name, *_) = bench_records.panels([report | {"environment": {"gpu": None, "nodes": 2}} for report in (four, two)])
    assert name.endswith(", eager, no GPU, 2 nodes")


def test_records_that_do_not_fit(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    path = swept(4).save(tmp_path)
    both = [path, swept(2).save(tmp_path)]
    (tmp_path / "a folder" / "sparse_all_reduce-ranks.png").mkdir(parents=True)
    assert plot_records(both, tmp_path / "a folder") == 1
    assert "a folder/sparse_all_reduce-ranks.png cannot be written" in capsys.readouterr().err
    assert plot_records([path], tmp_path) == 1 and "two numbers of ranks" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    assert plot_records([path, swept(4, 2.0).save(tmp_path / "other")], tmp_path) == 2
    assert "two records have times of horovod at 500×4×40×uniform on 4 ranks" in capsys.readouterr().err
    other = tmp_path / "other.json"
    heads = {"op": "sparse_all_reduce", "ranks": 2, "mode": "eager", "dtype": "float32", "environment": {"gpu": None}}
    wrong = [json.dumps(heads | {"shapes": shapes}) for shapes in ([{}], [{"methods": []}], [{"methods": {"exact": {}}}], 5)]
    for text, said in (*((text, "is no record") for text in ("{", "[]", *wrong)), (json.dumps({"op": "gemm_rs"}), "of 'gemm_rs'")):
        other.write_text(text)
        assert plot_records([path, other], tmp_path) == 2 and said in capsys.readouterr().err
    assert plot_records([tmp_path / "none.json"], tmp_path) == 2 and "none.json is no record" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert plot_records([path, swept(2).save(tmp_path)], tmp_path) == 1
    assert "matplotlib is missing" in capsys.readouterr().err and not list(tmp_path.glob("*.png"))


def measured(group, wrong):
    """Every method on a small table; ``wrong``: what the operation returns is not the sum, and what the others do is."""
    right = fluxlike.sparse_all_reduce
    if wrong:
        fluxlike.sparse_all_reduce = lambda x, **how: (right(x, **how) * 1.5).coalesce()
    every = ("horovod", "gloo", "dense", "v6", "exact", "padded", "bf16_wire") if wrong else EVERY
    try:
        asked = bench.parse(["sparse_all_reduce", "--dtype", "float32", "--rounds", "1", "--methods", ",".join(every)], cuda=False)
        run = bench.Bench(asked, Peers(), ranks.device())
        found = run.shape(Table(30, 3, 10))["eager"]
        return {row.method: row.status for row in found.rows}, run.bad
    finally:
        fluxlike.sparse_all_reduce = right


@pytest.mark.skipif(ranks.TORCHRUN, reason="gloo alone has all of them")
@pytest.mark.parametrize("wrong", [pytest.param(False, marks=pytest.mark.slow), True])
def test_every_method(wrong):
    for statuses, bad in ranks.run_ranks(measured, ranks.POOL_SIZE, makes_groups=True, wrong=wrong):
        ours = {"exact", "padded", "bf16_wire"}
        assert bad == wrong and (wrong or set(statuses) == set(EVERY))
        assert {name for name, status in statuses.items() if status == "WRONG"} == (ours if wrong else set())


def places(group):
    """Lists longer than a tile, ids before, at and behind the first tile in which they can be."""
    union = torch.arange(0, 3000, 3, device=ranks.device())
    for ids in (union[5::7], union[-3:], union[:1], union[::300], union[:0]):
        for name, find in sparse_baselines.versions().items():
            if name != "v2" or len(ids) < 5:
                assert torch.equal(union[find(ids, union)], ids), name


def test_places():
    ranks.run_ranks(places, 1)

"""`python -m fluxlike tune`: what it measures, keeps and says, and tables out of records. `test_tune` has the files."""

import contextlib
import importlib
import io
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks import run_fresh

import fluxlike
from fluxlike.ops import choice, tuned, tuning
from fluxlike.ops.choice import Problem
from fluxlike.ops.tuned import Machine

ROOT = Path(__file__).resolve().parents[1]
H200 = Machine("NVIDIA H200", (9, 0), 132)
BF16 = torch.bfloat16


def on_h200(op, m, n, k, ranks=4):
    return Problem(op, (9, 0), 132, ranks, BF16, m, n, k)


def run_tool(group, argv, sabotage):
    from fluxlike.tools import bench_problems, tune

    judge = bench_problems.Problem.judge

    def judged(problem, method, result):
        error, allowed = judge(problem, method, result)
        return (float("nan") if method.startswith(sabotage) else error), allowed

    if sabotage:
        bench_problems.Problem.judge = judged
    return tune.main(argv), fluxlike.is_initialized()


def tool(argv, sabotage="", **env):
    pytest.importorskip("rich")
    outcomes = run_fresh(run_tool, 2, {"FLUXLIKE_TIMEOUT_S": "30", **env}, argv=argv, sabotage=sabotage)
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
    return [outcome.value for outcome in outcomes]


def test_the_tool_tunes_the_toy_shapes(tmp_path):
    out = tmp_path / "tables" / "toy.json"
    assert tool(["ag_gemm", "--suite", "toy", "--rounds", "1", "--most", "2", "--out", str(out)]) == [(0, False)] * 2
    data = json.loads(out.read_text())
    assert data["machine"]["gpu"] == "shm" and data["software"] == tuned.software()
    assert {(e["m"], e["n"], e["k"]) for e in data["entries"]} == {(128, 64, 96), (64, 48, 64), (8, 128, 32)}
    assert all(e["us"] > 0 and e["usual_us"] > 0 and e["ranks"] == 2 for e in data["entries"])
    # the same file is heard as a shipped one, and as the cache of this machine
    machine = Machine("shm", (0, 0), data["machine"]["multiprocessors"])
    assert len(tuned._choices(out, machine, "ag_gemm", BF16, 2, strict=True)) == 3


def test_times_of_the_interpreter_are_not_kept_in_the_cache(tmp_path):
    argv = ["gemm_rs", "--shapes", "8x8x8", "--rounds", "1", "--most", "2"]
    assert tool(argv, FLUXLIKE_CACHE_DIR=str(tmp_path)) == [(0, False)] * 2
    assert not list(tmp_path.rglob("*.json"))


def test_the_lines_of_a_shape():
    """µs, and how many times as fast as the first; the one that is kept, and what was wrong."""
    pytest.importorskip("rich")
    from fluxlike.tools import tune

    first, fast, wrong = choice.candidates(on_h200("gemm_rs", 8192, 8192, 8192))[:3]
    rows = [tune.Row("a", rounds_ms=[3.0, 2.0, 1.0]), tune.Row("b", rounds_ms=[1.25]), tune.Row("c", status="WRONG", note="off")]
    lines = tune.table([tune.Trial(made, 7.5, row) for made, row in zip((first, fast, wrong), rows, strict=True)])
    assert [line.replace(str(made), "").split(maxsplit=6) for line, made in zip(lines, (first, fast, wrong), strict=True)] == [
        ["2000.0", "µs,", "expected", "7.5,", "1.000x"],
        ["1250.0", "µs,", "expected", "7.5,", "1.600x", "best"],
        ["–", "µs,", "expected", "7.5,", "–", "WRONG:", "off"],
    ]


@pytest.mark.parametrize("options", (["--shapes", "3x8x8"], ["--shapes", "8x8x8", "--budget", "0"]))
def test_a_run_that_keeps_nothing_fails(options, tmp_path):
    out = tmp_path / "none.json"
    assert tool(["gemm_rs", *options, "--out", str(out)]) == [(1, False)] * 2 and not out.exists()


def test_a_choice_that_is_wrong_is_not_kept(tmp_path):
    out = tmp_path / "toy.json"
    argv = ["gemm_rs", "--shapes", "32x32x32", "--rounds", "1", "--most", "3", "--out", str(out)]
    assert tool(argv, sabotage="in_kernel") == [(1, False)] * 2
    (one,) = json.loads(out.read_text())["entries"]
    assert one["choice"]["transport"] == "copy_engine" and one["usual_us"] is None
    argv[4] = "0"
    with pytest.raises(SystemExit):
        from fluxlike.tools import tune

        tune.main(argv)


@pytest.mark.parametrize("options", (["--shapes", "64x64"], ["--rounds", "0"], ["--suite", "nosuch"]))
def test_a_complaint_shows_the_usage_of_what_was_asked_for(options, monkeypatch, capsys):
    from fluxlike.tools import tune

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as end:
        tune.parse(["gemm_rs", *options], False)
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.startswith("usage: python -m fluxlike tune gemm_rs [-h]") and options[0] in said


ON_NODES = {name: ["gemm_rs", "--shapes", "32x32x32"] for name in ("tune", "trace")}
ON_NODES |= {"soak": ["--minutes", "0.1"], "links": ["nvswitch-2", "--sizes", "1024"]}


@pytest.mark.parametrize("tool", ON_NODES)
def test_ranks_on_several_nodes_are_told_at_once(tool, tmp_path):
    """What these tools look into is the making of calls on one node."""
    pytest.importorskip("rich")
    option = {"links": "--json"}.get(tool, "--out")
    argv = [*ON_NODES[tool], option, str(tmp_path / "out")]
    outcomes = run_fresh(run_on_nodes, 2, {"FLUXLIKE_VIRTUAL_NODES": "2"}, tool=tool, argv=argv)
    first, second = (outcome.value if outcome.ok else outcome for outcome in outcomes)
    assert first[::2] == (2, False) and second == (2, "", False), (first, second)
    assert first[1].startswith(f"{tool}: the ranks are on 2 nodes, and {tool} works on one; start it") and first[1].count("\n") == 1


def run_on_nodes(group, tool, argv):
    """(exit status, what was said, whether fluxlike was left initialised)"""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        status = importlib.import_module(f"fluxlike.tools.{tool}").main(argv)
    return status, said.getvalue(), fluxlike.is_initialized()


def run_with_a_failure(group, argv):
    """The exit status, and what came of each choice, where rank 1 does not make the first call of the warm-up."""
    from fluxlike.tools import bench, tune

    made, warm_up, table, rows, fails = tune.PROBLEMS["gemm_rs"], bench.Bench.warm_up, tune.table, [], []

    class GemmRS(made):
        def ours(self, context):
            if fails:
                raise RuntimeError(fails.pop())
            return super().ours(context)

    def warmed_up(self, *what):
        fails.extend(["out of ideas"] * self.peers.rank)
        return warm_up(self, *what)

    tune.PROBLEMS["gemm_rs"], bench.Bench.warm_up = GemmRS, warmed_up
    tune.table = lambda trials: rows.extend(trials) or table(trials)
    return tune.main(argv), [(trial.row.status, trial.row.note) for trial in rows]


def test_a_choice_that_fails_late_leaves_the_others_whole(tmp_path):
    """All choices share a context, which must be made anew whenever the ranks may have made different calls on it."""
    pytest.importorskip("rich")
    argv = ["gemm_rs", "--shapes", "32x32x32", "--rounds", "1", "--most", "3", "--out", str(tmp_path / "toy.json")]
    for outcome in run_fresh(run_with_a_failure, 2, {"FLUXLIKE_TIMEOUT_S": "3"}, argv=argv):
        assert outcome.ok, outcome
        status, ((first, why), *others) = outcome.value
        assert status == 1 and first == "failed" and why.startswith("rank 1: RuntimeError: out of ideas")
        assert others and others == [("ok", "")] * len(others)


def test_the_tool_s_choices_take_turns(monkeypatch):
    """As methods of bench do: each stands behind another one in every round."""
    pytest.importorskip("rich")
    from fluxlike.tools import tune

    made = choice.candidates(on_h200("gemm_rs", 8192, 8192, 8192))[:4]
    asked = tune.parse(["gemm_rs", "--shapes", "8192x8192x8192", "--rounds", "4", "--most", "4"], cuda=True)
    peers = SimpleNamespace(rank=0, size=4, attempt=lambda action: action())
    tuner, timed = tune.Tuner(asked, peers, torch.device("cpu")), []
    tuner.bench.rounds, tuner.context = 4, SimpleNamespace(problem=lambda *shape: on_h200("gemm_rs", *shape))
    for name in ("first", "check", "warm_up"):
        monkeypatch.setattr(tuner.bench, name, lambda *args: None)
    monkeypatch.setattr(tuner.bench, "time", lambda method, calls: timed.append(method.name) or 1.0)
    for name in ("_renew", "_close"):
        monkeypatch.setattr(tuner, name, lambda *args: None)
    monkeypatch.setitem(tune.PROBLEMS, "gemm_rs", lambda *args: SimpleNamespace(know_torch=None, spoil=None))
    monkeypatch.setattr(peers, "attempt", lambda action: action() if action else None)
    monkeypatch.setattr(tuning, "shortlist", lambda problem, most: made)
    _, trials = tuner.shape(bench_shape(8192, 8192, 8192))
    expected = [choice.predict(on_h200("gemm_rs", 8192, 8192, 8192), trial.choice) * 1e6 for trial in trials]
    assert [trial.predicted_us for trial in trials] == expected and len(set(expected)) > 1
    names = [str(trial.choice) for trial in trials]
    assert timed == [name for turn in range(4) for name in tuning.in_turn(names, turn)] and timed[0] != timed[len(names)]


@pytest.mark.parametrize(("first", "usual_us"), (("ok", 3000.0), ("WRONG", None)))
def test_what_is_kept_of_a_shape(first, usual_us, tmp_path, monkeypatch):
    """The best choice with its time, and beside it the time of the one without a table, if that one was right."""
    pytest.importorskip("rich")
    from fluxlike.tools import tune

    problem, out = on_h200("gemm_rs", 8192, 8192, 8192), tmp_path / "table.json"
    rows = [tune.Row("a", rounds_ms=[3.0]), tune.Row("b", rounds_ms=[2.0]), tune.Row("c", rounds_ms=[1.25])]
    if first != "ok":
        rows[0] = tune.Row("a", status=first)
    trials = [tune.Trial(made, 7.5, row) for made, row in zip(choice.candidates(problem), rows, strict=False)]
    asked = tune.parse(["gemm_rs", "--shapes", "8192x8192x8192", "--out", str(out)], cuda=True)
    tuner = tune.Tuner(asked, SimpleNamespace(rank=0, size=4), torch.device("cpu"))
    monkeypatch.setattr(tune.world, "current", lambda: SimpleNamespace(executor=None))
    monkeypatch.setattr(tuned, "machine_of", lambda executor: H200)
    assert tuner._keep(problem, trials) == f"written to {out}"
    (kept,) = json.loads(out.read_text())["entries"]
    assert kept["choice"] == trials[2].choice.as_json() and (kept["us"], kept["usual_us"]) == (1250.0, usual_us)


def bench_shape(m, n, k):
    from fluxlike.tools.bench_report import Shape

    return Shape(m, n, k)


def test_tables_from_records(tmp_path, capsys):
    from fluxlike.tools import tune

    out = tmp_path / "table.json"
    for shipped in sorted(tuned.TABLES.glob("*.json")):
        names = json.loads(shipped.read_text())["source"]
        assert tune.main(["from-records", *(str(ROOT / "docs" / "measured" / name) for name in names), "--out", str(out)]) == 0
        assert out.read_text() == shipped.read_text(), "the shipped table is not what its sources say"
        commits = {json.loads((ROOT / "docs" / "measured" / name).read_text())["environment"]["commit"] for name in names}
        assert set(json.loads(out.read_text())["software"]["commit"].split(", ")) == commits
    old = ROOT / "docs" / "measured" / "2026-11-21-ag_gemm-headline-R2.json"
    assert tune.main(["from-records", str(old), "--out", str(out)]) == 0
    kept = {(entry["m"], entry["n"], entry["k"]) for entry in json.loads(out.read_text())["entries"]}
    assert len(kept) == 6 and (512, 57344, 8192) not in kept, "sequential, which it has not, is expected to be much faster there"
    (tmp_path / "bad.json").write_text("{}")
    before = out.read_text()
    assert tune.main(["from-records", str(tmp_path / "bad.json"), "--out", str(out)]) == 2
    assert "environment" in capsys.readouterr().err and out.read_text() == before


RECORD = ROOT / "docs" / "measured" / "2026-11-22-gemm_rs-headline-R4.json"


def test_what_a_table_would_replace_is_kept_until_it_is_made(tmp_path, monkeypatch):
    """An error behind the reading of the records leaves the old table; older entries are not in the new one."""
    from fluxlike.tools import tune

    out = tmp_path / "table.json"
    assert tune.from_records([RECORD], out) == 9
    before = out.read_text()
    with monkeypatch.context() as patched:
        patched.setattr(tune, "_fastest", lambda *what: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tune.from_records([RECORD], out)
    assert out.read_text() == before and list(tmp_path.iterdir()) == [out]
    short = json.loads(RECORD.read_text())
    short["shapes"] = short["shapes"][:1]
    (tmp_path / "short.json").write_text(json.dumps(short))
    assert tune.from_records([tmp_path / "short.json"], out) == 1 and len(json.loads(out.read_text())["entries"]) == 1


def test_a_table_is_written_to_what_a_link_points_to(tmp_path):
    from fluxlike.tools import tune

    (tmp_path / "there").mkdir()
    link, target = tmp_path / "link.json", tmp_path / "there" / "table.json"
    link.symlink_to(target)
    for _ in range(2):  # where it points to nothing, and to a file
        assert tune.main(["from-records", str(RECORD), "--out", str(link)]) == 0
        assert link.is_symlink() and len(json.loads(target.read_text())["entries"]) == 9


def test_an_out_that_would_be_lost_is_refused(tmp_path, capsys):
    """A record, also by another name of its, and what is no file."""
    from fluxlike.tools import tune

    record, link, pipe = tmp_path / "record.json", tmp_path / "link.json", tmp_path / "pipe"
    record.write_bytes(RECORD.read_bytes())
    link.symlink_to(record)
    os.mkfifo(pipe)
    whole = ["from-records", str(record), "--out"]
    for argv in ([*whole, str(record)], [*whole, str(link)], [*whole, str(pipe)], ["gemm_rs", "--out", str(pipe)]):
        with pytest.raises(SystemExit, match="2"):
            tune.main(argv)
        said = "is no regular file" if argv[-1] == str(pipe) else f"--out {argv[-1]} is the record {record}, which it would replace"
        assert said in capsys.readouterr().err
    assert record.read_bytes() == RECORD.read_bytes() and link.is_symlink() and pipe.is_fifo()


def test_a_record_is_judged_by_the_memory_of_its_gpu():
    from fluxlike.tools import tune

    data = json.loads((ROOT / "docs" / "measured" / "2026-11-24-gemm_rs-headline-H100-R2.json").read_text())
    h100 = Machine(data["environment"]["gpu"], H200.capability, H200.multiprocessors)
    assert [tune._problem(data, data["shapes"][0], machine).memory for machine in (h100, H200)] == [2.95e12, 4e12]


def broken_records():
    """What may be wrong with a record, as a change of one of the package's."""
    for name, value in (("ranks", 0), ("mode", []), ("dtype", "nn"), ("shapes", []), ("environment", [])):
        yield f"{name} {value!r}", lambda record, name=name, value=value: record.update({name: value})
    for value in (0, None, "132", True):
        yield f"multiprocessors {value!r}", lambda record, value=value: record["environment"].update(multiprocessors=value)
    for name, value in (("m", 0), ("n", 10**12), ("k", float("inf"))):
        yield f"{name} {value!r}", lambda record, name=name, value=value: record["shapes"][0].update({name: value})
    first = {"op": lambda: "gemm_ar", "dtype": lambda: "bfloat17", "shapes": lambda: [{}], "environment": dict, "ranks": None}
    for key, made in first.items():
        yield key, lambda record, key=key, made=made: record.pop(key) if made is None else record.update({key: made()})
    yield "gpu", lambda record: record["environment"].update(gpu="NVIDIA H1")
    yield "methods", lambda record: record["shapes"][0].update(methods=[])
    yield "median", lambda record: record["shapes"][0]["methods"]["in_kernel"]["ms"].update(median="1")


@pytest.mark.parametrize("change", [pytest.param(change, id=key) for key, change in broken_records()])
def test_a_broken_record_is_told_with_its_name(change, tmp_path, capsys):
    from fluxlike.tools import tune

    whole = ROOT / "docs" / "measured" / "2026-11-22-gemm_rs-headline-R4.json"
    record = json.loads(whole.read_text())
    change(record)
    (tmp_path / "broken.json").write_text(json.dumps(record))
    out = tmp_path / "table.json"
    assert tune.main(["from-records", str(whole), str(tmp_path / "broken.json"), "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"tune: {tmp_path / 'broken.json'} is no record of bench") and not out.exists()


@pytest.mark.parametrize("content", (b"{", b"\xff\xfe", b"[]", None))
def test_what_is_no_record_is_told_with_its_name(content, tmp_path, capsys):
    from fluxlike.tools import tune

    path = tmp_path / "broken.json"
    if content is not None:
        path.write_bytes(content)
    assert tune.main(["from-records", str(path), "--out", str(tmp_path / "table.json")]) == 2
    assert capsys.readouterr().err.startswith(f"tune: {path} is no record of bench")


def test_two_records_of_one_shape(tmp_path, capsys):
    """Eager calls and graphs count alike, each by how many times as long it takes; two of one kind are refused."""
    from fluxlike.tools import tune

    eager, graph, again, out = (tmp_path / f"{name}.json" for name in ("eager", "graph", "again", "table"))
    record = json.loads((ROOT / "docs" / "measured" / "2026-11-22-gemm_rs-headline-R4.json").read_text())
    methods = record["shapes"][0]["methods"]
    record["shapes"] = record["shapes"][:1]
    for path, mode, times in (
        (eager, "eager", (2.0, 1.0, 1.5, 3.0)), (graph, "graph", (2.0, 4.0, 1.7, None)), (again, "eager", (2.0, 1.0, 1.5, 3.0)),
    ):  # fmt: skip
        for name, ms in zip(("copy_engine", "in_kernel", "decomposed", "sequential"), times, strict=True):
            methods[name] = {"status": "ok" if ms else "WRONG", "ms": ms and {"median": ms}}
        path.write_text(json.dumps(record | {"mode": mode}))

    def entry(*records):
        assert tune.main(["from-records", *map(str, records), "--out", str(out)]) == 0
        (entry,) = json.loads(out.read_text())["entries"]
        return entry["choice"]["transport"], entry["us"]

    assert entry(eager) == ("in_kernel", 1000.0) and entry(graph) == ("decomposed", 1700.0)
    assert entry(eager, graph) == entry(graph, eager) == ("decomposed", 1596.9)
    before = out.read_text()
    assert tune.main(["from-records", str(eager), str(graph), str(again), "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert f"{again} and {eager} both have 8192x8192x28672, eager; give one record of each" in said and out.read_text() == before


@pytest.mark.parametrize(
    "change", ({"nodes": 2}, {"variables": {"FLUXLIKE_VIRTUAL_NODES": "2"}}, {"variables": {"FLUXLIKE_RANKS_PER_GPU": "2"}})
)
def test_a_record_of_several_nodes_or_of_shared_gpus_makes_no_table(change, tmp_path, capsys):
    from fluxlike.tools import tune

    record = json.loads((ROOT / "docs" / "measured" / "2026-11-22-gemm_rs-headline-R4.json").read_text())
    record["environment"].update(change)
    (tmp_path / "record.json").write_text(json.dumps(record))
    assert tune.main(["from-records", str(tmp_path / "record.json"), "--out", str(tmp_path / "table.json")]) == 2
    assert "record.json were on several nodes or shared GPUs; give records of one node" in capsys.readouterr().err
    assert not (tmp_path / "table.json").exists()


def test_a_table_has_what_was_measured_and_not_what_is_usual_since(tmp_path, capsys):
    """Where a record says how calls were made; two that differ in it are no two of one, and what no call can be says nothing."""
    from fluxlike.tools import tune

    eager, graph, out = (tmp_path / f"{name}.json" for name in ("eager", "graph", "table"))
    record = json.loads((ROOT / "docs" / "measured" / "2026-11-22-gemm_rs-headline-R4.json").read_text())
    record["shapes"] = record["shapes"][:1]
    (shape,) = record["shapes"]
    problem = on_h200("gemm_rs", shape["m"], shape["n"], shape["k"])
    usual = choice.usual(problem, "copy_engine")
    other = replace(usual, subs=4, tile=replace(usual.tile, group_m=16))
    assert other != usual
    copies, times = shape["methods"]["copy_engine"], {"copy_engine": 1.0, "in_kernel": 2.0, "decomposed": 3.0}
    for name, facts in shape["methods"].items():
        facts["ms"] = {"median": times.get(name, 9.0)}

    def entry(eagerly, in_graphs):
        for path, mode, made in ((eager, "eager", eagerly), (graph, "graph", in_graphs)):
            copies["choice"] = made
            path.write_text(json.dumps(record | {"mode": mode}))
        assert tune.main(["from-records", str(eager), str(graph), "--out", str(out)]) == 0
        return [entry["choice"] for entry in json.loads(out.read_text())["entries"]]

    assert entry(None, None) == entry(usual.as_json(), None) == [usual.as_json()]
    assert entry(other.as_json(), other.as_json()) == [other.as_json()] and not capsys.readouterr().err
    in_kernel = choice.usual(problem, "in_kernel").as_json()
    for none in (replace(other, subs=3).as_json(), in_kernel, {}):
        assert entry(none, none) == [], "of copy_engine nothing is known then, and without it there is no entry"
        said = f"gemm_rs {shape['m']}x{shape['n']}x{shape['k']} by copy_engine is left out, as the choice in the record is none of"
        assert capsys.readouterr().err.count(said) == 2
    assert entry(other.as_json(), usual.as_json()) == []


def test_a_method_without_a_time_in_a_record(tmp_path):
    """Bench writes null for the times of what was wrong or failed."""
    from fluxlike.tools import tune

    record = json.loads((ROOT / "docs" / "measured" / "2026-11-22-gemm_rs-headline-R4.json").read_text())
    record["shapes"][0]["methods"]["decomposed"].update(status="WRONG", ms=None)
    (tmp_path / "record.json").write_text(json.dumps(record))
    out = tmp_path / "table.json"
    assert tune.main(["from-records", str(tmp_path / "record.json"), "--out", str(out)]) == 0
    assert len(json.loads(out.read_text())["entries"]) == 9

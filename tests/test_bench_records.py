"""Records of `bench` as tune from-records, model --check and bench --plot-records read them: all that it writes, and no more."""

import copy
import json

import pytest
from ranks import ROOT

from fluxlike.tools import bench, bench_records, model, topo, tune

MEASURED = ROOT / "docs" / "measured"
PLAIN = json.loads((MEASURED / "2026-11-22-gemm_rs-headline-R4.json").read_text())
#: By field: values that bench never writes.
NONSENSE = {
    "ranks": (0, -4, 4.5, "4", True, None, 10**6),
    "mode": ([], "fast", None),
    "dtype": ("nn", "float64", None, ["bfloat16"]),
    "shapes": ([], {}, None),
    "shapes[0]": (5, [5]),
    "environment": ([], "H200"),
    "environment.multiprocessors": (0, "132", 1.5),
    "environment.nodes": (-1, "2"),
    "environment.gpu": (5,),
    "shapes[0].m": (0, -5, None, "8192", 10**12, 8192.0),
    "shapes[0].k": (float("inf"), float("nan")),
    "shapes[0].methods": ([], None),
    "shapes[0].methods.torch": (1.0, None),
    "shapes[0].methods.torch.ms": (1.0, []),
    "shapes[0].methods.torch.choice": (1.0, [], "copy_engine"),
    "shapes[0].methods.torch.ms.median": (0, -1, float("inf"), float("nan"), "1", None, True, 1e-300),
}
TOOLS = {
    "tune": lambda path, out: tune.main(["from-records", path, "--out", str(out / "table.json")]),
    "model": lambda path, out: model.main(["gemm_rs", "--check", path]),
    "bench": lambda path, out: bench.main(["gemm_rs", "--out", str(out), "--plot-records", path]),
}


def altered(field: str, value: object) -> dict:
    """A record with another value in one field."""
    record = copy.deepcopy(PLAIN)
    *way, last = (int(name) if name.isdecimal() else name for name in field.replace("[0]", ".0").split("."))
    inside = record
    for name in way:
        inside = inside[name]
    inside[last] = value
    return record


def test_all_records_of_bench_pass():
    passed = 0
    for path in sorted(MEASURED.glob("*.json")):
        record = json.loads(path.read_text())
        if "shapes" in record:
            bench_records.check(record)
            passed += 1
    assert passed > 150


@pytest.mark.parametrize("field", NONSENSE)
def test_a_field_that_bench_never_writes_so(field):
    for value in NONSENSE[field]:
        with pytest.raises(ValueError) as said:
            bench_records.check(altered(field, value))
        assert str(said.value).startswith(f"{field} is "), (value, said.value)


@pytest.mark.parametrize("tool", TOOLS)
def test_every_tool_that_reads_records_looks_at_them(tool, tmp_path, capsys, monkeypatch):
    """Also in JSON that Python reads and nobody writes, and of more levels than it follows."""
    monkeypatch.delenv("RANK", raising=False)  # of several ranks, the first does it
    path, out = tmp_path / "record.json", tmp_path / "out"
    wrong = [json.dumps(altered("shapes[0].k", 10**12)), json.dumps(altered("shapes[0].methods.gemm.ms.median", float("nan")))]
    for text in (*wrong, json.dumps(PLAIN).replace('"ranks": 4', '"ranks": 1e400'), "[" * 10**5):
        path.write_text(text)
        assert TOOLS[tool](str(path), out) == 2
        said = capsys.readouterr()
        assert f"{tool}: {path} is no record of bench: " in said.out + said.err and not list(out.glob("*"))


@pytest.mark.parametrize("rank", ("0", "1"))
def test_one_rank_reads_records(rank, tmp_path, capsys, monkeypatch):
    """The others would say the same, or write the same file."""
    monkeypatch.setenv("RANK", rank)
    assert TOOLS["bench"](str(tmp_path / "none.json"), tmp_path) == (0 if rank == "1" else 2)
    said = capsys.readouterr()
    assert not said.out and said.err.count("is no record of bench") == (rank == "0")


def test_json_has_no_word_for_nan(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        topo.write(str(tmp_path / "a.json"), {"rows": [{"seconds": float("nan")}]})
    assert not list(tmp_path.iterdir())


def test_a_table_needs_a_number_of_multiprocessors(tmp_path, capsys):
    """Which records of a machine without GPUs do not have."""
    bench_records.check(altered("environment.multiprocessors", None))
    (tmp_path / "record.json").write_text(json.dumps(altered("environment.multiprocessors", None)))
    assert TOOLS["tune"](str(tmp_path / "record.json"), tmp_path) == 2
    assert "record.json is no record of bench: multiprocessors is None" in capsys.readouterr().err

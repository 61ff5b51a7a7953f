"""`tools.turns`: how ways take turns, and what is written of them; what tutorial 8 writes, and what 11 and 12 refuse."""

import argparse
import importlib.util
import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import run_fresh

import fluxlike
from fluxlike.tools import once, turns

ROOT = Path(__file__).parent.parent


class Alone:
    """The peers of one rank."""

    def barrier(self):
        pass

    def slowest(self, action):
        return action()


@pytest.mark.parametrize("cuda", (False, True))
def test_ways_take_turns(monkeypatch, cuda):
    """Another one is first each round, and a slow one is called less often in a timing; without GPUs each runs once, untimed."""
    made, seconds = [], {"slow": 0.5, "quick": 0.01}

    def timed(way, calls, on_gpu, settle):
        assert on_gpu == cuda
        settle()
        made.append((way(), calls))
        return seconds[made[-1][0]]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(turns, "Peers", Alone)
    monkeypatch.setattr(turns.tuning, "timed", timed)
    found = turns.in_turns({"slow": lambda: "slow", "quick": lambda: "quick"}, 2)
    assert made[:2] == [("slow", 1), ("quick", 1)]
    if not cuda:
        assert len(made) == 2 and found == {"slow": [], "quick": []} and turns.median(found["slow"]) is None
        return
    assert found == {"slow": [500.0, 500.0], "quick": [10.0, 10.0]} and turns.median(found["quick"]) == 10.0
    assert sorted(made[2:]) == [("quick", 20)] * 3 + [("slow", 1)] * 3, "a round that does not count, and two that do"
    assert made[4][0] != made[6][0], "the same one was first in both rounds that count"


@pytest.mark.parametrize(("ranks", "said"), [("", ""), ("2", "--nproc 2 ")])
def test_a_record_has_the_environment(tmp_path, monkeypatch, ranks, said):
    monkeypatch.setattr(sys, "argv", ["x.py", "--layers", "2"])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks) if ranks else monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    turns.record(tmp_path / "new" / "x.json", "tutorials/x.py", {"ms": {"ours": 1.5}})
    found = json.loads((tmp_path / "new" / "x.json").read_text())
    assert found["ms"] == {"ours": 1.5}
    assert found["environment"]["command"] == f"bash scripts/launch.sh {said}tutorials/x.py --layers 2"
    assert found["environment"]["versions"]["torch"] and found["environment"]["fluxlike"]


def tutorial(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tutorials" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("11_prefill_70b", ["--kv_heads", "4"], "3 ranks do not divide all of --kv_heads 4, --tokens 48, --inner 96; give others"),
        ("12_async_tp", ["--kv_heads", "4"], "3 ranks do not divide all of --kv_heads 4, --tokens 48, --inner 96; give others"),
        (
            "11_prefill_70b",
            ["--hidden", "66", "--heads", "6", "--kv_heads", "3", "--layers", "0"],
            "--layers 0: 0 is as many as a GPU has memory for; without",
        ),
        ("11_prefill_70b", ["--kv_heads", "3"], "--hidden 64 of --heads 8 of --kv_heads 3: each must be above 0 and a multiple of"),
        ("12_async_tp", ["--kv_heads", "3"], "--hidden 32 of --heads 8 of --kv_heads 3: each must be above 0 and a multiple of"),
        ("12_async_tp", ["--kv_heads", "0"], "--hidden 32 of --heads 8 of --kv_heads 0: each must be above 0 and a multiple of"),
    ],
)
def test_sizes_that_tutorials_refuse(name, arguments, said, monkeypatch, capsys):
    """Before ranks meet, and by one of them."""
    refused(name, ["--tokens", "48", "--inner", "96", *arguments], said, monkeypatch, capsys)


#: Sizes for three ranks.
PREFILL = ["--kv_heads", "3", "--heads", "3", "--hidden", "6", "--tokens", "48", "--inner", "96"]
FITTING = {"11_prefill_70b": PREFILL, "12_async_tp": PREFILL}
FITTING["08_train_a_llama"] = ["--heads", "6", "--inner", "6", "--vocabulary", "6", "--tokens", "6"]
BELOW_ONE = [
    ("03_gemm_reduce_scatter", "m", 0), ("03_gemm_reduce_scatter", "iters", 0), ("04_all_gather_gemm", "n", -1),
    ("05_mlp", "tokens", 0), ("05_mlp", "inner", -4), ("07_use_in_a_model", "steps", 0), ("07_use_in_a_model", "tokens", 0),
    ("08_train_a_llama", "steps", 0), ("09_trees", "elements", 0), ("10_word2vec", "batch", 0), ("11_prefill_70b", "rounds", 0),
    ("12_async_tp", "layers", 0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "option", "value"), BELOW_ONE)
def test_numbers_below_one_that_tutorials_refuse(name, option, value, monkeypatch, capsys):
    if name == "08_train_a_llama":
        pytest.importorskip("transformers")
    arguments = [*FITTING.get(name, []), f"--{option}", str(value)]
    refused(name, arguments, f"--{option} {value} is below 1; give at least one", monkeypatch, capsys)


@pytest.mark.parametrize("name", ("08_train_a_llama", "09_trees", "10_word2vec", "11_prefill_70b", "12_async_tp"))
def test_a_place_that_tutorials_cannot_write_to(name, tmp_path, monkeypatch, capsys):
    """Said before anything is trained or measured."""
    if name == "08_train_a_llama":
        pytest.importorskip("transformers")
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out"
    monkeypatch.setenv("RANK", "0")
    refused(name, [*FITTING.get(name, []), "--out", str(out)], f"--out {out}: ", monkeypatch, capsys)


@pytest.mark.parametrize(
    ("arguments", "said"),
    ((["--tokens", "16"], "3 ranks do not divide all of --tokens 16;"), (["--tokens", "48"], "3 ranks do not divide the 8 heads;")),
)
def test_ranks_that_tutorial_7_refuses(arguments, said, monkeypatch, capsys):
    refused("07_use_in_a_model", arguments, said, monkeypatch, capsys)


def refused(name, arguments, said, monkeypatch, capsys):
    """By the first of three ranks, in words, and by the second without."""
    monkeypatch.setattr(once, "GRACE_S", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.setenv("WORLD_SIZE", "3")
    for local in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", local)
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / "tutorials" / f"{name}.py"), run_name="__main__")
        err = capsys.readouterr().err
        assert end.value.code == 2 and (f": error: {said}" in err if local == "0" else err == ""), err


def prefilled(group):
    fluxlike.init(heap="shm")
    try:
        prefill = tutorial("11_prefill_70b")
        return prefill.main(argparse.Namespace(**prefill.CPU, out=None))
    finally:
        fluxlike.finalize()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the tutorial would take the sizes for GPUs")
def test_tutorial_11_on_two_ranks():
    """Where two of its weights have one shape, one gathers and the other scatters."""
    assert [outcome.value for outcome in run_fresh(prefilled, 2)] == [0, 0]


def test_what_tutorial_8_takes_for_wrong():
    """A gradient that is off by more than three times the noise of its own parameter, however small its part of all."""
    llama = tutorial("08_train_a_llama")

    def run(large, small):
        grads = {"large": torch.full((8,), large), "small": torch.full((8,), small)}
        return SimpleNamespace(gradients=lambda: grads)

    exact, plain = run(100.0, 1e-3), run(100.0 * 1.01, 1e-3 * 1.01)

    def faults(*ours):
        before, dist.get_rank = dist.get_rank, lambda: 1
        try:
            return llama.gradient_faults({"sharded": run(*ours), "plain": plain, "exact": exact})
        finally:
            dist.get_rank = before

    assert faults(100.0 * 1.02, 1e-3 * 0.98) == []
    (fault,) = faults(100.0, 1e-3 * 1.04)
    assert "small" in fault and "0.04" in fault
    assert len(faults(float("nan"), 2e-3)) == 2


def test_what_tutorial_8_writes(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    llama = tutorial("08_train_a_llama")
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    runs = {name: SimpleNamespace(losses=[4.0 + i, 3.0, 2.0]) for i, name in enumerate(("sharded", "plain", "exact"))}
    args = SimpleNamespace(dtype="bfloat16", **llama.CPU)
    llama.record(runs, args, {"noise": 0.5}, tmp_path)
    found = json.loads((tmp_path / "llama-bfloat16-R4.json").read_text())
    assert found["losses"]["plain"] == [5.0, 3.0, 2.0] and found["noise"] == 0.5 and found["sizes"] == llama.CPU
    assert (tmp_path / "llama-bfloat16-R4.png").stat().st_size > 10000

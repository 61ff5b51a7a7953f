"""One process as one rank of several: right results, and nobody is waited for."""

import errno
import json

import pytest
import torch

import fluxlike
from fluxlike.runtime import alone, world
from fluxlike.runtime.cuda import CudaExecutor
from fluxlike.tools import alone as tool


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """As the tool is started, also where these tests are ranks."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("op", ("gemm_rs", "ag_gemm"))
def test_results_are_those_of_the_rank(op, tmp_path, capsys):
    path = tmp_path / "record.json"
    assert tool.main([op, "--shapes", "96x64x64,130x96x80", "--ranks", "3", "--rounds", "2", "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    assert [row["shape"] for row in record["results"]] == [[96, 64, 64], [130, 96, 80]] and record["ranks"] == 3
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == f"written: {path}"
    assert ("one rank" if torch.cuda.is_available() else "96×64×64: right") in said and not world.is_initialized()


def test_its_copies_are_part_of_no_graph():
    """A GPU's executor asks that of what a call has beside it, before each call."""
    with alone.playing(2), fluxlike.create_gemm_rs_context(16, 16, schedule="copy_engine") as ctx:
        assert not CudaExecutor.is_beside_capture(ctx.world.executor, ctx.engine)


def test_figures_that_cannot_be_written(monkeypatch, tmp_path, capsys):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tool.Path, "write_text", full)
    assert tool.main(["gemm_rs", "--shapes", "16x16x16", "--rounds", "1", "--json", str(tmp_path / "record.json")]) == 1
    said = "alone: the figures could not be written: [Errno 28] No space left on device; name another file with --json\n"
    assert capsys.readouterr().err == said


def test_a_wrong_result_is_told(monkeypatch, capsys):
    """Also one that lacks a peer's part."""
    right = {op: getattr(fluxlike, op) for op in ("gemm_rs", "ag_gemm")}
    monkeypatch.setattr(fluxlike, "gemm_rs", lambda x, w, ctx: right["gemm_rs"](x, w, ctx) - (4 if ctx.size > 1 else 0))
    monkeypatch.setattr(fluxlike, "ag_gemm", lambda x, w, ctx, m: right["ag_gemm"](x, w, ctx, m=m) * (1 if ctx.size == 1 else 1.1))
    for op in right:
        assert tool.main([op, "--shapes", "96x64x4", "--rounds", "1"]) == 1
        assert f"96×64×4: {op} by copy_engine: the result is" in capsys.readouterr().err


def test_signals_are_waited_for(monkeypatch):
    """Without those that are given beforehand a call ends in the time-out: the kernels are those that look."""
    monkeypatch.setenv("FLUXLIKE_TIMEOUT_S", "0.3")
    with alone.playing(2) as device:
        operand = torch.ones(64, 64, device=device, dtype=torch.bfloat16)
        ctx = tool.context("gemm_rs", tool.Shape(64, 64, 128), torch.bfloat16, "in_kernel")
        with pytest.raises(fluxlike.PeerTimeout):
            fluxlike.gemm_rs(operand, operand, ctx)
            ctx.check()


@pytest.mark.parametrize("op", ("gemm_rs", "ag_gemm"))
@pytest.mark.parametrize("schedule", tool.SCHEDULES)
def test_what_tiles_take(op, schedule, monkeypatch):
    """By the times that the kernel writes down, of the call that is asked about and no other."""
    monkeypatch.setattr(tool, "TRACED", 2)
    monkeypatch.setattr(tool, "BURST", 1)
    shape, alike = tool.Shape(192, 96, 192), {"own products", "own end", "others' products", "others' end", "call"}
    with alone.playing(3) as device:
        x, weight = tool.operands(op, shape, 3, device, torch.bfloat16)
        ctx = tool.context(op, shape, torch.bfloat16, schedule)
        call = tool.call_of(op, ctx, x, weight, shape.m)
        found = tool.tile_times(ctx, call)
        assert found.keys() == alike and all(us > 0 for us in found.values())
        assert all(found["call"] > us for name, us in found.items() if name != "call")
        tool.check(op, ctx, call, x, weight)
    text = tool.line(shape, {"gemm": 10.0, schedule: 12.0, "tiles": {schedule: {"own end": 3.25, "call": 40.0}}})
    assert text.splitlines() == ["| 192×96×192 | 10.0 | 12.0 (+20.0%) |", f"tiles, {schedule}: own end 3.2, call 40.0"]


@pytest.mark.parametrize("op", ("gemm_rs", "ag_gemm"))
def test_each_tile(op, monkeypatch, capsys):
    """Each method in each tile that it could have, and its result compared; a row a tile."""
    made, check = [], tool.check

    def checked(op, ctx, *call):
        made.append((ctx.size, ctx.schedule, str(ctx._used.tile)))
        check(op, ctx, *call)

    monkeypatch.setattr(tool, "check", checked)
    m = 384 if torch.cuda.is_available() else 192  # so many that there are several on sm_90 and in the interpreter
    assert tool.main([op, "--shapes", f"{m}x96x192", "--ranks", "3", "--rounds", "2", "--each-tile"]) == 0
    assert f"{m}×96×192" in capsys.readouterr().out
    shape = tool.Shape(m, 96, 192)
    with alone.playing(3):
        ctx = tool.context(op, shape, torch.bfloat16, "in_kernel")
        tiles = [str(one.tile) for one in tool.tilings(ctx, shape)]
        several = ctx.problem(m, 96, 192).capability in ((0, 0), (9, 0))
    assert len(set(tiles)) == len(tiles) >= 1 + several
    assert made[-2 * len(tiles) :] == [(3, schedule, tile) for schedule in tool.SCHEDULES for tile in tiles]
    assert {size for size, _, _ in made[: -2 * len(tiles)]} == {1}
    us = {"gemm": 10.0, "one rank, a": 11.0, "one rank, b": 9.0, "in_kernel, a": 12.0, "in_kernel, b": 15.0}
    rows = tool.line(tool.Shape(8, 8, 8), us)
    assert rows == "| 8×8×8, a | 10.0 | 11.0 (+10.0%) | 12.0 (+20.0%) |\n| 8×8×8, b | 10.0 | 9.0 (-10.0%) | 15.0 (+50.0%) |"


def test_a_rank_is_not_played_in_a_world(monkeypatch):
    monkeypatch.setattr(world, "_world", object())
    with pytest.raises(RuntimeError, match="is a rank of fluxlike already"), alone.playing(2):
        pass


def test_what_is_asked_for(capsys):
    for wrong, says in (("--ranks", "give two ranks or more"), ("--rounds", "give one round or more")):
        with pytest.raises(SystemExit):
            tool.main(["gemm_rs", wrong, "0"])
        assert f"{wrong} 0: {says}" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        tool.main(["gemm_rs", "--ranks", "1025"])
    says = "--ranks 1025 is above 1024, the most that records of bench may say; give that or less"
    assert end.value.code == 2 and says in capsys.readouterr().err and tool.parse(["gemm_rs", "--ranks", "1024"]).ranks == 1024


def test_several_at_once_are_refused(monkeypatch, capsys):
    """They would all measure the one GPU, and each write the file."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as end:
        tool.main(["gemm_rs", "--shapes", "16x16x16", "--rounds", "1"])
    said = capsys.readouterr()
    assert end.value.code == 2 and said.out == ""
    assert "alone plays its rank in one process, and WORLD_SIZE=2; start it by python, without scripts/launch.sh" in said.err


def test_what_is_refused_says_why():
    x, w = torch.ones(8, 8), torch.ones(8, 8)
    with alone.playing(2) as device:
        with pytest.raises(ValueError, match="their second sizes"):
            fluxlike.gemm_rs(x.to(device), torch.ones(8, 7, device=device))
        with fluxlike.create_gemm_rs_context(8, 8, 16, torch.float32) as ctx, pytest.raises(ValueError, match="float16"):
            fluxlike.gemm_rs(x.half().to(device), w.half().to(device), ctx)

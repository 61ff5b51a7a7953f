"""The program that compute-sanitizer runs on GPUs, in the interpreter: it launches every kernel, and its results are right."""

import os
import subprocess
import sys

import pytest
from ranks import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("nodes, ranks", (("1", 4), ("2", 2)))
def test_sanitizer_case(nodes, ranks, tmp_path):
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "TRITON_INTERPRET")}
    env |= {"FLUXLIKE_PYTHON": sys.executable, "FLUXLIKE_VIRTUAL_NODES": nodes, "CUDA_VISIBLE_DEVICES": ""}
    sanitizer = tmp_path / "compute-sanitizer"  # writes down how it was called and runs the program
    sanitizer.write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/called\nshift 6\nexec "$@"\n')
    sanitizer.chmod(0o700)
    command = ["bash", "scripts/launch.sh", "--nproc", str(ranks), "tests/sanitizer_case.py", str(sanitizer), "racecheck"]
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    for rank in range(ranks):
        assert f"rank {rank}: sanitizer case passed" in ended.stdout
    called = "--tool racecheck --report-api-errors no --error-exitcode 9"
    case = f"{sys.executable} {ROOT}/tests/sanitizer_case.py"
    assert (tmp_path / "called").read_text().splitlines() == [f"{called} {case}"] * ranks

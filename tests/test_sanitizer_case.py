"""The program that compute-sanitizer runs on GPUs, in the interpreter: it launches every kernel, and its results are right."""

import os
import subprocess
import sys

import pytest
from ranks import ROOT


@pytest.mark.parametrize("nodes", ("1", "2"))
def test_sanitizer_case(nodes):
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "TRITON_INTERPRET")}
    env |= {"FLUXLIKE_PYTHON": sys.executable, "FLUXLIKE_VIRTUAL_NODES": nodes, "CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", "scripts/launch.sh", "--nproc", "2", "tests/sanitizer_case.py"]
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    for rank in range(2):
        assert f"rank {rank}: sanitizer case passed" in ended.stdout

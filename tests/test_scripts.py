"""The scripts: nothing of theirs reaches the program that they start, and nothing that the caller exported is taken for theirs."""

import json
import os
import re
import subprocess
import sys

import pytest
from ranks import ROOT

SCRIPTS = sorted((ROOT / "scripts").glob("*.sh"))
#: Meant for the programs, and set only where the caller has not; for one command; or added to.
MEANT = {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GLOO_SOCKET_IFNAME", "FLUXLIKE_PYTHON", "FLUXLIKE_TEST_HEAP", "COVERAGE_CORE"}
MEANT |= {"IFS", "PATH", "CDPATH", "FLUXLIKE_VIRTUAL_NODES", "PYTHONPATH"}
ASSIGNED = (
    r"(?:^|[\s;({])(\w+)\+?=",  # name=…, export name=…, (name=…)
    r"\$\{(\w+):=",
    r"\bfor (?:\(\()?(\w+)(?= in\b| =)",
    r"\b(?:local|read)((?: (?:-\w|\w+))+)",
)


def assigned(script: str) -> set[str]:
    """The variables that a script sets, by what stands outside comments and here-documents."""
    code = re.sub(r"<<'?(\w+)'?\n.*?\n\1\n", "\n", script, flags=re.DOTALL)
    code = re.sub(r"^\s*#.*|\s# .*", "", code, flags=re.MULTILINE)
    return {name for way in ASSIGNED for names in re.findall(way, code) for name in re.findall(r"(?<!-)\b[A-Za-z_]\w*", names)}


@pytest.mark.parametrize(
    ("code", "names"),
    (
        ("a=1 b+=(2)\n", {"a", "b"}),
        ("f() { local c d=3\n", {"c", "d"}),
        ("IFS=, read -r -a e <<<x\nread -r f g < <(h --i=1)\n", {"IFS", "e", "f", "g"}),
        ('for j in 1; do for ((k = 0; k < 2; k++)); do : "${l:=1}"; done; done\n', {"j", "k", "l"}),
        ("# m=1\necho --n=1 # o=1\ncat <<E\np=1\nE\n[ a = b ]\n", set()),
    ),
)
def test_the_search_itself(code, names):
    assert assigned(code) == names


def test_variables_of_the_scripts_have_names_of_their_own():
    assert {script.name for script in SCRIPTS} >= {"env.sh", "launch.sh", "test.sh"}
    for script in SCRIPTS:
        strange = {name for name in assigned(script.read_text()) if not name.startswith("fx_")} - MEANT
        assert not strange, f"{script.name} sets {strange}: begin them with fx_, as a caller may have exported them"


def test_launch_is_short():
    assert len((ROOT / "scripts" / "launch.sh").read_text().splitlines()) < 60


def test_what_the_caller_exported_reaches_the_program_as_it_was(tmp_path):
    names = {name.removeprefix("fx_") for script in SCRIPTS for name in assigned(script.read_text())} - {"IFS", "PATH", "CDPATH"}
    names |= {name.upper() for name in names}
    given = dict.fromkeys(names - {"PYTHONPATH", "FLUXLIKE_PYTHON", "COVERAGE_CORE"}, "7")
    assert {"nproc", "GPUS", "PYTHON", "EXTRA", "target", "OMP_NUM_THREADS"} <= given.keys()
    program = tmp_path / "program.py"
    program.write_text("import json, os, sys\nopen(sys.argv[1] + os.environ['RANK'], 'w').write(json.dumps(dict(os.environ)))\n")
    (tmp_path / "scripts").mkdir()  # where CDPATH would lead
    env = {**os.environ, **given, "FLUXLIKE_PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "CDPATH": str(tmp_path)}
    command = ["bash", "scripts/launch.sh", str(program), f"{tmp_path}/said"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [json.loads(file.read_text()) for file in tmp_path.glob("said*")]
    assert len(said) == 4, "without GPUs there are 4 ranks"
    for seen in said:
        assert {name: seen.get(name) for name in given} == given
        assert seen["CDPATH"] == str(tmp_path)
        paths = seen.get("PYTHONPATH", "").split(os.pathsep)
        assert set(paths) <= {str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}


CHECKS = [f"{nodes} {tool}" for nodes in (1, 2) for tool in ("memcheck", "racecheck", "synccheck")]


@pytest.mark.parametrize("case", ("found", "found in CUDA_HOME", "faults", "not found", "one GPU", "some tests"))
def test_the_gpu_tests_end_with_compute_sanitizer(tmp_path, case):
    """test.sh gpu with stand-ins for Python, which writes down what it is to run, for the sanitizer, and for two GPUs."""
    if case == "not found" and os.path.exists("/usr/local/cuda/bin/compute-sanitizer"):
        pytest.skip("compute-sanitizer is installed where it is looked for")
    home = tmp_path / "cuda"
    (home / "bin").mkdir(parents=True)
    sanitizer = (home / "bin" if case == "found in CUDA_HOME" else tmp_path) / "compute-sanitizer"
    gpus = "GPU 0: a" if case == "one GPU" else "GPU 0: a\nGPU 1: b"
    fails = "*synccheck" if case == "faults" else "nothing"
    python = f"""case "$2" in
      torch.distributed.run) echo "launch $FLUXLIKE_VIRTUAL_NODES $*" >>{tmp_path}/ran; case "$*" in {fails}) exit 1 ;; esac ;;
      pytest) echo "pytest $*" >>{tmp_path}/ran ;;
      *) exec {sys.executable} "$@" ;;
    esac"""
    for name, text in (("nvidia-smi", f"echo '{gpus}'"), ("python", python), (sanitizer, "exit 3")):
        if name != sanitizer or case != "not found":
            (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
            (tmp_path / name).chmod(0o700)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("FLUXLIKE_", "CUDA_"))}
    env |= {"PATH": f"{tmp_path}:/usr/bin:/bin", "CUDA_HOME": str(home), "FLUXLIKE_PYTHON": str(tmp_path / "python")}
    command = ["bash", "scripts/test.sh", "gpu", *(["-k", "some"] if case == "some tests" else [])]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == (case == "faults"), done.stdout + done.stderr
    ran = (tmp_path / "ran").read_text().splitlines()
    assert "pytest -q" in ran.pop(0)
    if case != "some tests":
        assert "tests/test_faults_processes.py" in ran.pop(0)
    if case in ("not found", "one GPU", "some tests"):
        assert ran == []
        assert ("compute-sanitizer was not run" in done.stdout) == (case != "some tests")
    else:
        assert [f"{line.split()[1]} {line.split()[-1]}" for line in ran] == CHECKS, ran
        assert all("--nproc-per-node=2 " in line and f"-- tests/sanitizer_case.py {sanitizer} " in line for line in ran)

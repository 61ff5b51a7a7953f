"""The scripts: nothing of theirs reaches the program that they start, and nothing that the caller exported is taken for theirs."""

import functools
import importlib.util
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import conftest
import pytest
import slow
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


def with_stand_ins(tmp_path, programs):
    """The environment of a script that finds these programs, bash scripts by name or path, first; "python" is its Python."""
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o700)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("FLUXLIKE_", "CUDA_"))}
    return env | {"PATH": f"{tmp_path}:/usr/bin:/bin", "FLUXLIKE_PYTHON": str(tmp_path / "python")}


@pytest.mark.parametrize(
    "case",
    ("found", "found in CUDA_HOME", "faults", "not found", "one GPU", "one GPU for two", "five GPUs", "some tests", "side by side"),
)
def test_the_gpu_tests_end_with_compute_sanitizer(tmp_path, case):
    """test.sh gpu with stand-ins for Python, which writes down what it is to run, for the sanitizer, and for GPUs."""
    if case == "not found" and os.path.exists("/usr/local/cuda/bin/compute-sanitizer"):
        pytest.skip("compute-sanitizer is installed where it is looked for")
    home = tmp_path / "cuda"
    (home / "bin").mkdir(parents=True)
    sanitizer = (home / "bin" if case == "found in CUDA_HOME" else tmp_path) / "compute-sanitizer"
    gpus = "\n".join(["GPU 0: a", "GPU 1: b", "GPU 2: c", "GPU 3: d", "GPU 4: e"][: {"one": 1, "five": 5}.get(case.split()[0], 2)])
    fails = "*synccheck" if case == "faults" else "nothing"
    python = f"""case "$2" in
      */scripts/run.py) echo "launch $FLUXLIKE_VIRTUAL_NODES $*" >>{tmp_path}/ran; case "$*" in {fails}) exit 1 ;; esac ;;
      pytest) echo "pytest $*" >>{tmp_path}/ran; case "$*" in *--shard=1/4*) exit 1 ;; esac ;;
      *) exec {sys.executable} "$@" ;;
    esac"""
    tools = {} if case == "not found" else {sanitizer: "exit 3"}
    env = with_stand_ins(tmp_path, {"nvidia-smi": f"echo '{gpus}'", "python": python, **tools}) | {"CUDA_HOME": str(home)}
    env |= {"FLUXLIKE_RANKS_PER_GPU": "2"} if case == "one GPU for two" else {}
    given = {"some tests": ["-k", "some"], "side by side": ["--jobs", "7"]}.get(case, [])
    command = ["bash", "scripts/test.sh", "gpu", *given]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == (case in ("faults", "side by side")), done.stdout + done.stderr
    ran = (tmp_path / "ran").read_text().splitlines()
    for _ in range(8 if case == "side by side" else 1):
        assert "pytest -q" in ran.pop(0)
    if case != "some tests":
        assert ran.pop(0).split()[-1] == "tests/test_faults_processes.py"
        shards = [f"--shard={i}/4 " for i in range(4)] if case == "side by side" else [""]
        files = "tests/test_nodes.py tests/test_nodes_faults.py"
        assert sorted(ran.pop(0).split("gpu ")[1] for _ in shards) == [f"{shard}{files}" for shard in shards]
        assert ran.pop(0).split()[-1] == "tests/test_alone.py"
    if case in ("not found", "one GPU", "some tests"):
        assert ran == []
        assert ("compute-sanitizer was not run" in done.stdout) == (case != "some tests")
    else:
        assert sorted(f"{line.split()[1]} {line.split()[-1]}" for line in ran) == sorted(CHECKS), ran  # three side by side
        ranks = 4 if case == "five GPUs" else 2
        assert all(f"--nproc-per-node={ranks} " in line and f"-- tests/sanitizer_case.py {sanitizer} " in line for line in ran)


@pytest.mark.parametrize(("given", "launches"), (((), 3), (("--jobs", "2"), 9), (("-x",), 1)))
def test_the_tests_behind_one_that_fails_run_in_new_ranks(tmp_path, given, launches):
    """test.sh gpu with a stand-in for Python, whose first two tests fail wherever they run, the second by a crash."""
    first, second = "tests/test_a.py::test_it[of two words]", "tests/test_b.py::test_it"
    python = f"""case "$2" in
      */scripts/run.py)
        echo "$*" >>{tmp_path}/ran
        while [ "${{1#--at=}}" = "$1" ]; do shift; done
        case "$*" in
          *"--behind={second}"*) ;;
          *"--behind={first}"*) printf '%s' "{second}" >"${{1#--at=}}"; exit 139 ;;
          *) printf '%s' "{first}" >"${{1#--at=}}"; exit 1 ;;
        esac ;;
      pytest) ;;
      *) exec {sys.executable} "$@" ;;
    esac"""
    env = with_stand_ins(tmp_path, {"nvidia-smi": "echo 'GPU 0: a'", "python": python})
    command = ["bash", "scripts/test.sh", "gpu", *given, "-k", "some"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == (1 if launches == 1 else 139), done.stdout + done.stderr
    ran = (tmp_path / "ran").read_text().splitlines()
    assert len(ran) == launches and all(" -x " in line and line.endswith(" -k some") for line in ran), ran
    parts = 3 if "--jobs" in given else 1
    for name in (first, second) if launches > 1 else ():
        assert sum(f"--behind={name} " in line for line in ran) == parts, ran


@pytest.mark.parametrize(
    ("has_tests", "jobs", "status"), (("not alone", "2", 0), ("alone", "2", 0), ("nothing", "2", 5), ("nothing", "1", 5))
)
def test_a_part_without_tests_is_no_failure_where_another_has_some(tmp_path, has_tests, jobs, status):
    python = f"""case "$2" in
      */scripts/run.py)
        case "$*" in *" -m {has_tests} "*) ;; *) exit 5 ;; esac
        while [ "${{1#--at=}}" = "$1" ]; do shift; done
        printf '%s' a_test >"${{1#--at=}}" ;;
      *) exec {sys.executable} "$@" ;;
    esac"""
    env = with_stand_ins(tmp_path, {"nvidia-smi": "echo 'GPU 0: a'", "python": python})
    command = ["bash", "scripts/test.sh", "gpu", "--jobs", jobs, "-k", "some"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == status, done.stdout + done.stderr


@pytest.mark.parametrize(("given", "started"), slow.behind(1, [(("--jobs", "2"), 2), ((), 1)]))
@pytest.mark.parametrize(("how", "status"), ((signal.SIGTERM, 143), (signal.SIGINT, 130)))
def test_no_rank_outlives_the_gpu_tests(tmp_path, given, started, how, status):
    """A signal that only the script gets, with a stand-in for Python whose ranks stand for a minute."""
    python = f"""case "$2" in
      */scripts/run.py) sleep 60 & echo $! >>{tmp_path}/ranks; wait ;;
      *) exec {sys.executable} "$@" ;;
    esac"""
    env = with_stand_ins(tmp_path, {"nvidia-smi": "echo 'GPU 0: a'", "python": python})
    script = subprocess.Popen(["bash", "scripts/test.sh", "gpu", *given, "-k", "some"], cwd=ROOT, env=env)
    ranks, deadline = tmp_path / "ranks", time.monotonic() + 60
    while len(found := ranks.read_text().split() if ranks.exists() else []) < started:
        assert time.monotonic() < deadline and script.poll() is None
        time.sleep(0.05)
    script.send_signal(how)
    assert script.wait(20) == status
    while alive := [pid for pid in found if os.path.exists(f"/proc/{pid}")]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)


@pytest.mark.parametrize(("heap", "status"), (("", 2), ("nvshmem", 2), ("shm", 0)))
def test_the_gpu_tests_without_a_gpu(tmp_path, heap, status):
    """Said once, before a rank begins; with the other heap they run on the CPU."""
    python = f'case "$2" in */scripts/run.py | pytest) echo "$*" >>{tmp_path}/ran ;; *) exec {sys.executable} "$@" ;; esac'
    env = with_stand_ins(tmp_path, {"nvidia-smi": "echo 'GPU 0: a'", "python": python})
    env |= {"CUDA_VISIBLE_DEVICES": "-1", "FLUXLIKE_TEST_HEAP": heap}
    command = ["bash", "scripts/test.sh", "gpu", "-k", "some"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == status and (tmp_path / "ran").exists() == (status == 0), done
    said = "test.sh: gpu needs a GPU and there is none (CUDA_VISIBLE_DEVICES is '-1'); leave gpu out"
    assert not status or (done.stderr.startswith(said) and done.stderr.count("\n") == 1)


def test_what_launch_refuses():
    env = {**os.environ, "FLUXLIKE_PYTHON": sys.executable}
    ports = ((["--nnodes", "2", "--rdzv", f"a:{port}"], f"not 'a:{port}'") for port in ("", "0", "00", "65536", "99999", "1e3"))
    no_number = (["--nproc="], "--nproc= needs a number"), (["--nproc", ""], "--nproc needs a number")
    for given, why in ((["--rdzv", "a:1"], "--rdzv needs --nnodes HOSTS"), *no_number, *ports):
        command = ["bash", "scripts/launch.sh", *given, "tests/nodes_case.py"]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
        assert done.returncode == 2 and why in done.stderr


@pytest.mark.parametrize(
    ("python", "said"),
    (
        ("exit 0", "does not run as a Python from 3.11 on; set it"),
        ("echo Python; exit 0", "does not run as a Python from 3.11 on; set it"),
        ("exit 1", "does not run as a Python from 3.11 on; set it"),
        (f'exec {sys.executable} -S "$@"', "lacks torch triton numpy; install that there"),
    ),
)
def test_a_python_that_is_given_and_of_no_use(tmp_path, python, said):
    """Not one of another program that runs nothing and ends well, nor one whose first import fails in every rank."""
    env = with_stand_ins(tmp_path, {"python": python})
    env.pop("PYTHONPATH", None)
    command = ["bash", "scripts/launch.sh", "--nproc", "1", "-m", "this"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"launch.sh: FLUXLIKE_PYTHON={tmp_path}/python {said}")


def test_the_scripts_are_found_by_a_link(tmp_path):
    for script in ("launch.sh", "test.sh"):
        (tmp_path / script).symlink_to(ROOT / "scripts" / script)
        done = subprocess.run(["bash", str(tmp_path / script), "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0 and done.stdout.startswith(f"usage: {script}") and not done.stderr


@pytest.mark.parametrize(
    ("how", "status", "said"),
    (
        ("sys.exit(7)", 7, "rank 1 ended with status 7; what it said is above"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 1 was killed by SIGKILL"),
        ("os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)", 143, "ended by SIGTERM"),
    ),
)
def test_launch_ends_as_the_rank_did(tmp_path, how, status, said):
    """Nothing stands between what a rank says and the line that says which it was, as a traceback of torchrun's would."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, sys, time\nassert not sys.flags.safe_path\n"
        f"if os.environ['RANK'] == '1':\n    print('why', file=sys.stderr)\n    {how}\ntime.sleep(60)\n"
    )
    folder = tmp_path / "temporary"
    folder.mkdir()
    env = {**os.environ, "FLUXLIKE_PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(folder)}
    command = ["bash", "scripts/launch.sh", "--nproc", "2", str(program)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == status, done.stderr
    assert not list(folder.iterdir()), "torchrun leaves what it makes there"
    lines = [line for line in done.stderr.splitlines() if "death signal" not in line]  # torchrun's own, of one that it gets
    assert lines == ["why", f"launch.sh: {said}"]


@pytest.mark.parametrize("early", slow.behind(1, [True, False]))
def test_ctrl_c_prints_no_traceback(tmp_path, early):
    """While torch is imported, and while ranks run."""
    program = tmp_path / "program.py"
    program.write_text("import time\nprint('runs', flush=True)\ntime.sleep(60)\n")
    command = ["bash", "scripts/launch.sh", "--nproc", "2", "-m", "fluxlike", "racecheck", str(program)]
    env = {**os.environ, "FLUXLIKE_PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    heeds = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, env=env, text=True, preexec_fn=heeds, **pipes) as it:
        while early and "torch" not in Path(f"/proc/{it.pid}/maps").read_text():
            time.sleep(0.01)
        assert early or it.stdout.readline() == it.stdout.readline() == "runs\n"
        it.send_signal(signal.SIGINT)
        said = it.communicate(timeout=60)[1]
    lines = [line for line in said.splitlines() if "death signal" not in line]  # torchrun's own
    assert (it.returncode, lines) == (130, ["launch.sh: ended by SIGINT"])


@pytest.mark.parametrize(("tool", "full"), slow.behind(1, [("bench", False), ("links", False), ("bench", True)]))
def test_ranks_that_cannot_print(tmp_path, tool, full):
    """To a reader that leaves, as `| head` does, or a full disk: they end in order, early if they have much to do."""
    pytest.importorskip("rich")
    given = {"bench": ["gemm_rs", "--shapes", "8x8x8,8x8x16", "--methods", "copy_engine", "--rounds", "1", "--out", str(tmp_path)]}
    given["links"] = ["nvswitch-2", "--sizes", "1K", "--algos", "one_shot"]
    if full:
        writes = os.open("/dev/full", os.O_WRONLY)
    else:
        reads, writes = os.pipe()
        os.close(reads)
    command = ["bash", "scripts/launch.sh", "--nproc", "2", "-m", "fluxlike", tool, *given[tool]]
    env = {**os.environ, "FLUXLIKE_PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=writes, stderr=subprocess.PIPE, text=True, timeout=200)
    os.close(writes)
    lines = ["what this prints cannot be written: No space left on device; direct it to where there is room"]
    lines += ["launch.sh: rank 0 ended with status 1; what it said is above"]
    assert (done.returncode, done.stderr.splitlines()) == ((1, lines) if full else (128 + signal.SIGPIPE, [])), done.stderr
    if tool == "bench":
        record = json.loads((tmp_path / "gemm_rs-custom-R2-eager.json").read_text())
        left = {"shape": "8×8×16", "why": "what this prints cannot be written any more"}
        assert len(record["shapes"]) == 1 and record["left_out"] == [left]


@pytest.mark.parametrize("given", (["--nproc", "2"], ["--nproc=2"]))
def test_an_option_of_launch_behind_the_program(tmp_path, given):
    program = tmp_path / "program.py"
    program.write_text("import os\nassert os.environ['WORLD_SIZE'] == '1'\n")
    env = {**os.environ, "FLUXLIKE_PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", "scripts/launch.sh", "--nproc", "1", str(program), *given]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stderr == f"launch.sh: --nproc is given to {program}; to be launch.sh's it must stand before it\n"


@pytest.mark.parametrize(
    "program",
    slow.behind(2, [["tutorials/03_gemm_reduce_scatter.py"], ["-m", "fluxlike", "racecheck"], ["-m", "fluxlike"]]),
)
@pytest.mark.parametrize("given", slow.behind(1, [["--m", "many"], ["--help"]]))
def test_what_the_arguments_are_is_said_once(program, given):
    env = {**os.environ, "FLUXLIKE_PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", "scripts/launch.sh", "--nproc", "2", *program, *given]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == (0 if given == ["--help"] else 2)
    assert (done.stdout + done.stderr).count("usage:") == 1 and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("extra", "configured", "answers", "added"),
    (("cpu", "", 0, True), ("cpu", "global.index-url='https://mirror'", 0, False), ("cpu", "", 1, False), ("cu13", "", 0, False)),
)
def test_torch_without_cuda_for_machines_without_gpus(tmp_path, extra, configured, answers, added):
    """make_venv with a stand-in for Python, whose venv has a stand-in for pip that writes down what it is to install."""
    python = f"""case "$*" in
      "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
      "-m pip config list") echo "{configured}" ;;
      "-m pip index versions torch "*) exit {answers} ;;
      "-m pip install "*) echo "$*" >>{tmp_path}/ran ;;
      *) exec {sys.executable} "$@" ;;
    esac"""
    env = with_stand_ins(tmp_path, {"python3": python})
    script = f". scripts/env.sh; fx_venv={tmp_path}/venv fx_mark=$fx_venv/mark fx_stamp=$fx_venv/stamp fx_extra={extra}; make_venv"
    done = subprocess.run(["bash", "-euc", script], cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    ran = (tmp_path / "ran").read_text()
    assert f".[{extra},test]" in ran and ("--extra-index-url=https://download.pytorch.org/whl/cpu" in ran) == added
    assert ("torch==2.11.*" in ran) == (extra == "cu13"), "what GPUs have run with"


@pytest.mark.parametrize("lacks", ("pytest", "torch"))
def test_a_python_without_what_the_tests_need_is_named(tmp_path, lacks):
    """What launch.sh takes and test.sh does not; one that neither takes is not worth a word."""
    python = f"""case "$*" in
      "-P - "*{lacks}*) exit 1 ;;
      *) exec {sys.executable} "$@" ;;
    esac"""
    env = with_stand_ins(tmp_path, {"python3": python})
    env.pop("FLUXLIKE_PYTHON")
    env |= {"CUDA_VISIBLE_DEVICES": ""}
    script = f". scripts/env.sh; fx_venv={tmp_path}/venv; ensure_venv() {{ :; }}; find_python pytest pytest_timeout"
    done = subprocess.run(["bash", "-euc", script], cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    said = f"fluxlike: {tmp_path}/python3 lacks some of pytest pytest_timeout, so .venv is used, whose torch may be another; "
    assert done.stderr == (f"{said}to use the former: python3 -m pip install pytest pytest-timeout\n" if lacks == "pytest" else "")


def test_parts_of_the_gpu_tests_begin_at_different_places():
    items = list(range(100))
    parts = [conftest.turned(items[first::7], first, 7) for first in range(7)]
    assert sorted(itertools.chain(*parts)) == items and parts[0] == items[::7]
    begins = [part[0] for part in parts]
    assert begins == sorted(begins) and all(10 <= b - a <= 20 for a, b in itertools.pairwise(begins))


@pytest.mark.slow
def test_pytest_takes_what_the_gpu_tests_give_it():
    """pytest looks for its own options' conftest.py beside whatever is a path among the arguments: it must be none of ours."""
    env = {**os.environ, "FLUXLIKE_PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "FLUXLIKE_TEST_HEAP": "shared"}
    env["PYTEST_ADDOPTS"] = "--collect-only --ignore-glob=*/test_[b-z]*"  # few of those that are not named
    command = ["bash", "scripts/test.sh", "gpu", "--nproc", "1", "--jobs", "2"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    # two parts side by side, those that run alone, and three files that are none of torchrun's, one of them in two parts
    assert done.stdout.count("tests collected") == 7, done.stdout


@pytest.fixture
def address(monkeypatch):
    """scripts/address.py on a machine 10.0.0.1 (eth0) and 192.168.7.1 (ib0), whose default route is by eth0."""
    spec = importlib.util.spec_from_file_location("address", ROOT / "scripts" / "address.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names = {"head": ["127.0.1.1"], "both": ["127.0.1.1", "10.0.0.1"], "mine": ["10.0.0.1"], "other": ["192.168.7.9"]}
    routes = {"192.168.7.9": "192.168.7.1", "192.0.2.1": "10.0.0.1", "10.0.0.1": "10.0.0.1"}
    interfaces = {"eth0": "10.0.0.1", "ib0": "192.168.7.1", "lo": "127.0.0.1"}

    def looked_up(host, *how):
        if host not in names:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", (found, 0)) for found in names[host]]

    monkeypatch.setattr(module.socket, "getaddrinfo", looked_up)
    monkeypatch.setattr(module, "towards", routes.__getitem__)
    monkeypatch.setattr(module, "of_interface", interfaces.__getitem__)
    monkeypatch.setattr(module.socket, "if_nameindex", lambda: list(enumerate(interfaces)))
    module.routes = routes
    return module


@pytest.mark.parametrize(
    ("host", "interface", "found"),
    (
        ("head", "", ("10.0.0.1", True)),  # Debian's /etc/hosts, on the head itself
        ("head", "ib0", ("192.168.7.1", True)),
        ("both", "", ("10.0.0.1", True)),
        ("mine", "", ("10.0.0.1", True)),
        ("other", "", ("192.168.7.1", False)),
        ("other", "eth0", ("192.168.7.1", False)),
    ),
)
def test_the_address_that_the_others_are_told(address, host, interface, found):
    assert address.find(host, interface) == found
    assert address.interface_of(found[0]) == {"10.0.0.1": "eth0", "192.168.7.1": "ib0"}[found[0]]
    assert address.interface_of("10.9.9.9") == ""


@pytest.mark.parametrize("host", ("127.0.0.1", "localhost", "localhost.localdomain"))
def test_a_host_that_is_everywhere_is_refused(address, host):
    with pytest.raises(ValueError, match=f"{host} is another host for each that asks"):
        address.find(host, "")


def test_a_loopback_address_is_told_to_nobody(address):
    with pytest.raises(ValueError, match=r"knows head by 127\.0\.1\.1 only, and lo has 127\.0\.0\.1"):
        address.find("head", "lo")
    address.routes["192.0.2.1"] = "127.0.0.1"
    with pytest.raises(ValueError, match="only, and its default route has"):
        address.find("head", "")


def test_launch_asks_for_an_address(tmp_path):
    """The real thing, as far as one machine shows it: what it asks the system, and how launch.sh ends."""
    env = {**os.environ, "FLUXLIKE_PYTHON": sys.executable}
    for host, why in (("localhost", "is another host for each"), ("no-such-host.invalid", "no address by which")):
        options = ["--nnodes=2", f"--rdzv={host}:29400"] if host == "localhost" else ["--nnodes", "2", "--rdzv", f"{host}:29400"]
        command = ["bash", "scripts/launch.sh", *options, "tests/nodes_case.py"]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
        assert done.returncode == 2 and f"--rdzv {host}" in done.stderr and why in done.stderr
        assert "give an address of that host" in done.stderr
    script = "import address; print(address.towards('127.0.0.1'), address.of_interface('lo'))"
    done = subprocess.run([sys.executable, "-Bc", script], cwd=ROOT / "scripts", capture_output=True, text=True, timeout=100)
    assert done.stdout == "127.0.0.1 127.0.0.1\n", done.stderr

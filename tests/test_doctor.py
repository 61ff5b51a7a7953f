"""The doctor: run as a user runs it, on machines that lack things. Its judgement on made-up facts: tests/test_doctor_facts.py."""

import functools
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import slow
from test_doctor_facts import healthy, whats
from test_lint_signals import living

import fluxlike
from fluxlike.__main__ import TOOLS
from fluxlike.runtime import env
from fluxlike.tools import doctor, machine
from fluxlike.tools.machine import parse_topology

ROOT = Path(__file__).resolve().parents[1]

TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tNV18\tSYS\tPIX\t0-31\t0\t\tN/A
GPU1\tNV18\t X \tNV18\tSYS\tSYS\t0-31\t0\t\tN/A
GPU2\tNV18\tNV18\t X \tSYS\tSYS\t32-63\t1\t\tN/A
GPU3\tSYS\tSYS\tSYS\t X \tSYS\t32-63\t1\t\tN/A
NIC0\tPIX\tSYS\tSYS\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""
CELLS = [
    ["X", "NV18", "NV18", "SYS"],
    ["NV18", "X", "NV18", "SYS"],
    ["NV18", "NV18", "X", "SYS"],
    ["SYS", "SYS", "SYS", "X"],
]

# Runs in every Python that the test starts, the doctor's own child included. `hide` makes a module unimportable; `end`
# ends the process that imports it, as libraries in C do.
SITECUSTOMIZE = """
import os, sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ.get("TEST_END"):
            os._exit(77)
        if name.partition(".")[0] in os.environ.get("TEST_HIDE", "").split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
"""


def run_doctor(tmp_path, *options, path=None, **environ):
    """The doctor in a process of its own; nvidia-smi is only what `path` has."""
    (tmp_path / "site").mkdir(exist_ok=True)
    (tmp_path / "site" / "sitecustomize.py").write_text(SITECUSTOMIZE)
    (tmp_path / "empty").mkdir(exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if name not in ("PATH", "PYTHONPATH", "TRITON_INTERPRET")}
    # The machine's own packages stay findable when they came through PYTHONPATH.
    places = [str(tmp_path / "site"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = kept | {"PATH": str(path or tmp_path / "empty"), "PYTHONPATH": os.pathsep.join(places)} | environ
    command = [sys.executable, "-m", "fluxlike", "doctor", *options]
    return subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=200)


def report(done):
    """The JSON report as (values by (section, name), statements of problems, heap)."""
    parsed = json.loads(done.stdout)
    assert set(parsed) == {"rows", "problems", "heap"}
    assert all(problem["what"] and problem["remedy"].endswith(".") for problem in parsed["problems"])
    rows = {(row["section"], row["name"]): row["value"] for row in parsed["rows"]}
    return rows, [problem["what"] for problem in parsed["problems"]], parsed["heap"]


# A torch that does what TEST_CUDA says when it is asked for GPUs.
FAKE_TORCH = """
import os
__version__ = "2.13.0"
class version:
    hip = os.environ.get("TEST_HIP")
    cuda = None if hip else "13.0"
class cuda:
    def is_available():
        exec(os.environ["TEST_CUDA"])
        return False
"""


def run_with_fake_torch(tmp_path, code, path=None, **environ):
    (tmp_path / "site" / "torch").mkdir(parents=True)
    (tmp_path / "site" / "torch" / "__init__.py").write_text(FAKE_TORCH)
    return report(run_doctor(tmp_path, "--json", path=path, TEST_CUDA=code, TEST_HIDE="pynvml", **environ))


def test_text(tmp_path):
    done = run_doctor(tmp_path, FLUXLIKE_TEST_VALUE="17")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "heap: " in done.stdout
    for line in ("FLUXLIKE_TEST_VALUE", "memfd_create", "/dev/shm", "nvshmem4py-cu13"):
        assert sum(row.split()[:1] == [line] for row in done.stdout.splitlines()) == 1, line
    assert str(ROOT) in done.stdout


def test_settings(tmp_path):
    """What init would refuse, names that nobody reads, and no word of those that scripts and tests read."""
    wrong = {"FLUXLIKE_TIMEOUT_S": "abc", "FLUXLIKE_HEAP_BYTES": "1;2", "FLUXLIKE_TIMEOUTS": "3", "FLUXLIKE_NONSENSICAL": "1"}
    wrong |= {"FLUXLIKE_TOPOLOGY": "none.json", "FLUXLIKE_FOO": "1", "FLUXLIKE_PYTHN": "python3"}
    right = {"FLUXLIKE_PYTHON": "python3", "FLUXLIKE_TEST_HEAP": "shm", "FLUXLIKE_TUNE": "off"}
    done = run_doctor(tmp_path, "--json", **wrong, **right, CUDA_VISIBLE_DEVICES="")
    why = "fluxlike.init refuses FLUXLIKE_TIMEOUT_S='abc' is no number of seconds above 0 and below 1000000"
    assert done.returncode == 1 and json.loads(done.stdout)["heap"] == {"name": None, "why": why}
    found = {problem["what"]: problem["remedy"] for problem in json.loads(done.stdout)["problems"]}
    said = {what: remedy for what, remedy in found.items() if what.startswith("FLUXLIKE_")}
    assert said == {
        "FLUXLIKE_TIMEOUT_S='abc' is no number of seconds above 0 and below 1000000": "Unset it for 120.",
        "FLUXLIKE_HEAP_BYTES='1;2' is not a size": "Write bytes, or 64K, 512M, 4G.",
        "FLUXLIKE_TIMEOUTS is no variable of fluxlike": "Write FLUXLIKE_TIMEOUT_S if you mean that, else unset it.",
        "FLUXLIKE_PYTHN is no variable of fluxlike": "Write FLUXLIKE_PYTHON if you mean that, else unset it.",
        "FLUXLIKE_NONSENSICAL is no variable of fluxlike": "Unset it: docs/reference.md lists them all.",
        "FLUXLIKE_FOO is no variable of fluxlike": "Unset it: docs/reference.md lists them all.",
        "FLUXLIKE_TOPOLOGY='none.json': the topology 'none.json' cannot be read: No such file or directory": (
            "Name a JSON file or a preset."
        ),
    }


@pytest.mark.parametrize("variable", env.TABLE, ids=lambda variable: variable.name)
def test_every_setting_is_checked(variable, monkeypatch):
    """But for the cache's path, which may be any text, and the topology, at which doctor looks itself."""
    monkeypatch.setenv(variable.name, "-nonsense-")
    said = [complaint for complaint in env.complaints() if complaint.startswith(variable.name)]
    assert len(said) == (variable.name not in ("FLUXLIKE_CACHE_DIR", "FLUXLIKE_TOPOLOGY"))


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    """Told with what to do, and nothing is made by the looking."""
    (tmp_path / "file").write_text("")
    (tmp_path / "shared" / "tuned").mkdir(parents=True)
    (tmp_path / "shared" / "tuned").chmod(0o777)
    for place, why in (("/proc/x", "no file can be made in /proc: "), ("file", "Not a directory; set "), ("shared", "go-w")):
        monkeypatch.setenv("FLUXLIKE_CACHE_DIR", str(tmp_path / place))
        (said,) = machine.unkept()
        assert said.startswith("tuned choices ") and why in said and "; " in said
    for good in (tmp_path, tmp_path / "new" / "below"):
        monkeypatch.setenv("FLUXLIKE_CACHE_DIR", str(good))
        assert not machine.unkept()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "shared"]
    monkeypatch.setenv("FLUXLIKE_CACHE_DIR", "/proc/x")
    facts = machine.Facts()
    machine._look_at_settings(facts)
    (problem,) = [problem for problem in doctor.diagnose(facts) if "/proc/x/tuned" in problem.what]
    assert problem.remedy.startswith("Set FLUXLIKE_CACHE_DIR to a folder that you may write")


def test_the_scripts_and_tests_variables_are_known():
    known = {variable.name for variable in env.TABLE}.union(env.ELSEWHERE)
    for path in (*ROOT.glob("scripts/*.sh"), *ROOT.glob("tests/*.py")):
        if path != Path(__file__):
            assert set(re.findall(r"FLUXLIKE_[A-Z_]*[A-Z]", path.read_text())) <= known, path.name


def test_json_says_what_runs(tmp_path):
    import torch
    import triton

    done = run_doctor(tmp_path, "--json", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    rows, _, heap = report(done)
    assert torch.__version__ in rows["packages", "torch"]
    assert rows["packages", "torch"].endswith("imports") or "imports as" in rows["packages", "torch"]
    assert triton.__version__ in rows["packages", "triton"]
    assert rows["environment", "CUDA_VISIBLE_DEVICES"] == ""
    assert heap["name"] == "shm" and "no CUDA GPU" in heap["why"]


def test_a_reader_that_leaves(tmp_path):
    """As `doctor --json | head -1` does, which ends when it has its line."""
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "fluxlike", "doctor", "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=writes, stderr=subprocess.PIPE, text=True, timeout=200)
    os.close(writes)
    assert done.returncode == 128 + signal.SIGPIPE and "Error" not in done.stderr, done.stderr


@pytest.mark.parametrize("tool", ["doctor --json", "topo p3.16xlarge", "model gemm_rs --nodes 1 --shapes 512x512x512"])
@pytest.mark.parametrize("unbuffered", slow.behind(1, ["", "1"]))
def test_a_disk_that_is_full(tool, unbuffered):
    command = [sys.executable, "-m", "fluxlike", *tool.split()]
    with open("/dev/full", "w") as full:
        environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=200, env=environment)
    says = f"python -m fluxlike {tool.split()[0]}: what it prints cannot be written: No space left on device\n"
    assert done.returncode == 1 and done.stderr == says, done


def test_ctrl_c():
    """The tool ends by the signal, which a shell knows as status 130 and ends its loops by, and says nothing."""
    command = [sys.executable, "-m", "fluxlike", "topo", "--all", "--random", "500"]
    heeds = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=ROOT, text=True, preexec_fn=heeds, **pipes)
    assert process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == "" and process.returncode == -signal.SIGINT


@pytest.mark.parametrize(("closed", "status"), [(">&-", 0), ("2>&-", 0), (">&- 2>&-", 0), ("--no-such 2>&-", 2)])
def test_a_stream_that_is_closed(closed, status):
    """Then Python has None in its place, and a tool says what it says to nobody."""
    command = f'exec "$0" -m fluxlike topo p3.16xlarge {closed}'
    done = subprocess.run(["bash", "-c", command, sys.executable], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == status and not done.stderr, done
    assert ("minmax" in done.stdout) == (closed == "2>&-")


@pytest.mark.parametrize("module", slow.behind(1, ["torch", "triton", "numpy"]))
def test_hidden_module(tmp_path, module):
    done = run_doctor(tmp_path, "--json", TEST_HIDE=module, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1, done.stdout + done.stderr
    _, problems, heap = report(done)
    assert heap["name"] is None and module in heap["why"]
    assert any(what.startswith(module) and "No module named" in what for what in problems)


def test_hidden_module_in_text(tmp_path):
    done = run_doctor(tmp_path, TEST_HIDE="torch,triton")
    assert done.returncode == 1
    assert "heap: none (" in done.stdout
    assert done.stdout.count("problem: t") == done.stdout.count("   mend: Reinstall it") == 2


def test_import_that_ends_the_process(tmp_path):
    import torch

    done = run_doctor(tmp_path, "--json", TEST_END="triton", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1, done.stdout + done.stderr
    rows, problems, heap = report(done)
    # torch 2.14 imports Triton itself
    first = "torch" if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14) else "triton"
    assert heap["why"] == f"{first} cannot be imported{'' if first == 'triton' else '; triton not tried after that'}"
    assert ("imports" in rows["packages", "torch"]) == (first == "triton")
    assert [what for what in problems if first in what and "ended the process with status 77" in what]


def test_fake_nvidia_smi(tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "topology").write_text(TOPOLOGY)
    line = "FakeChip, 9.0, 144384 MiB, 580.65.06"
    script = folder / "nvidia-smi"
    script.write_text(
        f"""#!/bin/sh
case "$*" in
  --query-gpu=name,*) for i in 0 1 2 3; do echo "{line}"; done ;;
  "topo -m") while IFS= read -r line; do printf '%s\\n' "$line"; done <"{folder}/topology" ;;
  "") echo "| NVIDIA-SMI 580.65.06    Driver Version: 580.65.06    CUDA Version: 13.0 |" ;;
  *) exit 9 ;;
esac
"""
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    # pynvml would answer for the real machine.
    done = run_doctor(tmp_path, "--json", path=folder, TEST_HIDE="pynvml", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    rows, problems, _ = report(done)
    assert rows["GPUs", "driver"] == "580.65.06 (CUDA 13.0)"
    assert rows["GPUs", "GPU 3 (nvidia-smi)"] == "FakeChip, 9.0, 144384 MiB"
    links = {name: value.split() for (section, name), value in rows.items() if section.startswith("links, ")}
    assert links == {"": list("0123")} | {f"GPU {i}": row for i, row in enumerate(CELLS)}
    assert any("4 GPU(s)" in what for what in problems)


def test_nvidia_smi_that_fails(tmp_path):
    script = tmp_path / "bin" / "nvidia-smi"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\necho Failed to initialize NVML: Driver/library version mismatch\necho more\nexit 18\n")
    script.chmod(0o755)
    rows, problems, _ = report(run_doctor(tmp_path, "--json", path=script.parent, TEST_HIDE="pynvml", CUDA_VISIBLE_DEVICES=""))
    said = "fails: exit status 18, Failed to initialize NVML: Driver/library version mismatch"
    assert f"nvidia-smi {said}" in problems and rows["GPUs", "nvidia-smi"] == said


def test_a_driver_without_gpus(tmp_path, monkeypatch):
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\necho No devices were found\nexit 6\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    facts = machine.Facts()
    machine.look_at_driver(facts, tmp_path)
    assert facts.smi_error is None and not facts.smi_gpus


def test_no_nvidia_smi(tmp_path):
    rows, problems, _ = report(run_doctor(tmp_path, "--json", TEST_HIDE="pynvml", CUDA_VISIBLE_DEVICES=""))
    assert not [name for section, name in rows if "nvidia-smi" in name or section.startswith("links, ")]
    assert not [what for what in problems if "nvidia-smi" in what]
    assert list(Path("/dev").glob("nvidia[0-9]*")) or not [what for what in problems if "GPU(s)" in what]


def test_the_version():
    done = subprocess.run([sys.executable, "-m", "fluxlike", "--version"], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.stdout == f"fluxlike {fluxlike.__version__}\n"


@pytest.mark.parametrize(("arguments", "status"), (([], 2), (["--help"], 0)))
def test_the_tools_are_listed(arguments, status):
    done = subprocess.run([sys.executable, "-m", "fluxlike", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=100)
    said, nothing = (done.stderr, done.stdout) if status else (done.stdout, done.stderr)
    assert done.returncode == status and not nothing
    assert all(f"\n  {name} " in said and what in said for name, what in TOOLS.items())


def test_unknown_option_and_tool():
    for arguments in (["doctor", "--nope"], ["nope"]):
        done = subprocess.run([sys.executable, "-m", "fluxlike", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=100)
        assert done.returncode == 2 and "usage: python -m fluxlike" in done.stderr


def test_topology():
    assert parse_topology(TOPOLOGY) == CELLS
    assert parse_topology("\tGPU0\tCPU Affinity\nGPU0\t X \t0-31\n") == [["X"]]
    assert parse_topology("No devices were found") == []


def test_torch_that_crashes_at_the_gpus(tmp_path):
    rows, problems, heap = run_with_fake_torch(tmp_path, "import signal; os.kill(os.getpid(), signal.SIGSEGV)")
    said = "torch fails to look at the GPUs: it ended the process with status -11"
    assert said in problems and not [what for what in problems if "triton" in what]
    assert heap == {"name": None, "why": f"{said}; triton not tried after that"}
    assert rows["GPUs", "torch's CUDA"] == "unknown"


def test_torch_that_fails_at_the_gpus(tmp_path):
    rows, problems, heap = run_with_fake_torch(tmp_path, "raise RuntimeError('no properties')")
    said = "torch fails to look at the GPUs: RuntimeError: no properties"
    assert said in problems and rows["GPUs", "torch's CUDA"] == "unknown"
    assert heap["name"] == "shm" and heap["why"].startswith("only if asked") and heap["why"].endswith(said)


def test_torch_that_warns_of_the_driver(tmp_path):
    _, problems, heap = run_with_fake_torch(tmp_path, "import warnings; warnings.warn('CUDA initialization: Error 802\\nmore')")
    assert "torch sees no GPU and says: CUDA initialization: Error 802" in problems
    assert heap["name"] == "shm"


@pytest.mark.parametrize(("code", "said"), [(22907, "2.29.7"), (2804, "2.8.4"), (None, None)])
def test_nccl_is_asked_itself(monkeypatch, code, said):
    """Not torch, which knows only what it was built with; and nothing is said where no libnccl is loaded."""

    def answer(pointer):
        pointer._obj.value = code
        return 0

    monkeypatch.setattr(machine, "_mapped", lambda: {"libnccl": ["/lib/libnccl.so.2"]} if code else {})
    monkeypatch.setattr("ctypes.CDLL", lambda path: SimpleNamespace(ncclGetVersion=answer))
    torch = SimpleNamespace(
        cuda=SimpleNamespace(
            is_available=lambda: True,
            device_count=lambda: 1,
            get_device_properties=lambda i: SimpleNamespace(name="H", major=9, minor=0, total_memory=1),
            nccl=SimpleNamespace(version=lambda: (2, 1, 0)),
        ),
        distributed=SimpleNamespace(is_nccl_available=lambda: True),
        version=SimpleNamespace(cuda="13.0", hip=None),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    found = machine._torch_cuda()
    assert found["nccl"] == said and found["peers"] == [[True]]


def test_torch_for_rocm(tmp_path):
    rows, problems, _ = run_with_fake_torch(tmp_path, "pass", TEST_HIP="6.4")
    assert [what for what in problems if "ROCm 6.4" in what] and rows["GPUs", "torch's CUDA"] == "built for ROCm 6.4"
    facts = healthy()
    facts.torch_cuda, facts.torch_hip = None, "6.4"
    del facts.loaded["nvshmem.core"]
    assert whats(facts) == ["torch is built for ROCm 6.4, and fluxlike needs NVIDIA GPUs"]
    heap = doctor.choose_heap(facts)
    assert heap.name == "shm" and heap.why.startswith("only if asked") and "NVIDIA" in heap.why


def test_nothing_outlives_a_doctor_that_a_signal_ends(tmp_path):
    """Its child tries imports, which may hang: that is what it is for."""
    begun = tmp_path / "begun"
    (tmp_path / "triton.py").write_text(f"import time\nopen({str(begun)!r}, 'w')\ntime.sleep(100)\n")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen([sys.executable, "-m", "fluxlike", "doctor"], cwd=ROOT, env=env, start_new_session=True)
    until = time.monotonic() + 60
    while not begun.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert len(living(process.pid)) == 2
    process.terminate()
    assert process.wait(30) == 128 + signal.SIGTERM and not living(process.pid)

"""The doctor: run as a user runs it, on machines that lack things; and its judgement on made-up facts."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_lint_signals import living

from fluxlike.runtime import env
from fluxlike.tools import doctor, machine
from fluxlike.tools.machine import NOT_TRIED, Facts, Gpu, look_at_driver, look_at_network, parse_topology

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


def healthy(gpus=2):
    """A machine with GPUs on which all is well."""
    return Facts(
        installed={"numpy": "2.3.1", "torch": "2.13.0", "triton": "3.7.1", "nvshmem4py-cu13": "0.3.1"},
        loaded={
            "numpy": "2.3.1",
            "torch": "2.13.0+cu130",
            "triton": "3.7.1",
            "nvshmem.core": "True",
            "cuda.bindings": "13.0.3",
            "cuda.core": "1.2.2",
        },
        torch_cuda="13.0",
        gpus=[Gpu("H", (9, 0), 141 << 30) for _ in range(gpus)],
        peers=[[True] * gpus for _ in range(gpus)],
        smi_gpus=[["H", "9.0", "144384 MiB", "580.65.06"] for _ in range(gpus)],
        driver="580.65.06",
        driver_cuda="13.0",
        memfd=True,
        shm=(64 << 30, 64 << 30),
    )


def healthy_cpu():
    facts = healthy(0)
    facts.smi_gpus = facts.driver = facts.driver_cuda = facts.torch_cuda = None
    del facts.installed["nvshmem4py-cu13"], facts.loaded["nvshmem.core"]
    return facts


def whats(facts):
    return [problem.what for problem in doctor.diagnose(facts)]


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
    wrong |= {"FLUXLIKE_TOPOLOGY": "none.json", "FLUXLIKE_FOO": "1"}
    right = {"FLUXLIKE_PYTHON": "python3", "FLUXLIKE_TEST_HEAP": "shm", "FLUXLIKE_TUNE": "off"}
    done = run_doctor(tmp_path, "--json", **wrong, **right, CUDA_VISIBLE_DEVICES="")
    found = {problem["what"]: problem["remedy"] for problem in json.loads(done.stdout)["problems"]}
    said = {what: remedy for what, remedy in found.items() if what.startswith("FLUXLIKE_")}
    assert said == {
        "FLUXLIKE_TIMEOUT_S='abc' is no number of seconds above 0 and below 1000000": "Unset it for 120.",
        "FLUXLIKE_HEAP_BYTES='1;2' is not a size": "Write bytes, or 64K, 512M, 4G.",
        "FLUXLIKE_TIMEOUTS is no variable of fluxlike": "Write FLUXLIKE_TIMEOUT_S if you mean that, else unset it.",
        "FLUXLIKE_NONSENSICAL is no variable of fluxlike": "Unset it: README.md lists them all.",
        "FLUXLIKE_FOO is no variable of fluxlike": "Unset it: README.md lists them all.",
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
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_disk_that_is_full(tool, unbuffered):
    command = [sys.executable, "-m", "fluxlike", *tool.split()]
    with open("/dev/full", "w") as full:
        environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=200, env=environment)
    says = f"python -m fluxlike {tool.split()[0]}: what it prints cannot be written: No space left on device\n"
    assert done.returncode == 1 and done.stderr == says, done


@pytest.mark.parametrize(("closed", "status"), [(">&-", 0), ("2>&-", 0), (">&- 2>&-", 0), ("--no-such 2>&-", 2)])
def test_a_stream_that_is_closed(closed, status):
    """Then Python has None in its place, and a tool says what it says to nobody."""
    command = f'exec "$0" -m fluxlike topo p3.16xlarge {closed}'
    done = subprocess.run(["bash", "-c", command, sys.executable], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == status and not done.stderr, done
    assert ("minmax" in done.stdout) == (closed == "2>&-")


@pytest.mark.parametrize("module", ["torch", "triton", "numpy"])
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
    done = run_doctor(tmp_path, "--json", TEST_END="triton", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1, done.stdout + done.stderr
    rows, problems, heap = report(done)
    assert heap["why"] == "triton cannot be imported"
    assert "imports" in rows["packages", "torch"]
    assert [what for what in problems if "triton" in what and "ended the process with status 77" in what]


@pytest.mark.parametrize("python", ["/bin/false", "/nowhere/python"])
def test_child_that_does_not_begin(monkeypatch, python):
    monkeypatch.setattr(sys, "executable", python)
    facts = healthy_cpu()
    facts.loaded.clear()
    machine._look_at_imports(facts)
    assert len(whats(facts)) == 1 and whats(facts)[0].startswith("the process that tries the imports ends before the first: it")
    heap = doctor.choose_heap(facts)
    assert heap.name is None and heap.why.endswith("ends before the first; numpy and torch and triton not tried after that")


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


def test_devices_that_torch_does_not_see(tmp_path, monkeypatch):
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    (tmp_path / "nvidia-smi").touch(0o644)  # cannot be run, as one in a folder that cannot be read
    monkeypatch.setenv("PATH", str(tmp_path))
    facts = healthy(0)
    facts.smi_gpus = None
    look_at_driver(facts, tmp_path)
    assert facts.smi_error is None and whats(facts) == ["the machine has 2 GPU(s), but torch sees none"]


def test_no_nvidia_smi(tmp_path):
    rows, problems, _ = report(run_doctor(tmp_path, "--json", TEST_HIDE="pynvml", CUDA_VISIBLE_DEVICES=""))
    assert not [name for section, name in rows if "nvidia-smi" in name or section.startswith("links, ")]
    assert not [what for what in problems if "nvidia-smi" in what]
    assert list(Path("/dev").glob("nvidia[0-9]*")) or not [what for what in problems if "GPU(s)" in what]


def test_unknown_option_and_tool():
    for arguments in (["doctor", "--nope"], ["nope"], []):
        done = subprocess.run([sys.executable, "-m", "fluxlike", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=100)
        assert done.returncode == 2 and "usage: python -m fluxlike" in done.stderr


def test_topology():
    assert parse_topology(TOPOLOGY) == CELLS
    assert parse_topology("\tGPU0\tCPU Affinity\nGPU0\t X \t0-31\n") == [["X"]]
    assert parse_topology("No devices were found") == []


def test_healthy_machines():
    assert whats(healthy()) == []
    assert doctor.choose_heap(healthy()).name == "nvshmem"
    assert whats(healthy_cpu()) == []
    assert doctor.choose_heap(healthy_cpu()).name == "shm"


def test_old_gpu():
    facts = healthy()
    facts.gpus[1] = Gpu("V100", (7, 0), 16 << 30)
    assert [what for what in whats(facts) if "sm_80" in what and "1 (V100, sm_70)" in what and "0 (" not in what]
    assert doctor.choose_heap(facts).name == "shm"
    facts.gpus[1] = Gpu("A100", (8, 0), 80 << 30)
    assert whats(facts) == []


def test_no_peer_access():
    facts = healthy(3)
    facts.peers[2][0] = False
    assert whats(facts) == ["no peer access between GPUs 2->0"]
    assert doctor.choose_heap(facts).name == "shm"
    values = [row.value.split() for row in doctor.describe(facts) if row.section == "peer access"]
    assert values == [["0", "1", "2"], ["yes"] * 3, ["yes"] * 3, ["NO", "yes", "yes"]]


def test_no_nvshmem_on_gpus():
    facts = healthy()
    del facts.loaded["nvshmem.core"]
    facts.broken["nvshmem.core"] = "it ended the process with status 255"
    assert len(whats(facts)) == 1 and "nvshmem.core" in whats(facts)[0] and "status 255" in whats(facts)[0]
    assert "[cu13]" in doctor.diagnose(facts)[0].remedy
    heap = doctor.choose_heap(facts)
    assert heap.name == "shm" and "heap='shm'" in heap.why


def test_what_was_not_tried_is_not_blamed():
    facts = Facts(installed={"triton": "3.7.1"}, loaded={"numpy": "2.3.1"}, memfd=True)
    facts.broken = {"torch": "it ended the process with status -11", "triton": f"{NOT_TRIED} after torch"}
    assert [what.split()[0] for what in whats(facts)] == ["torch"]
    assert doctor.choose_heap(facts) == doctor.Heap(None, "torch cannot be imported; triton not tried after that")


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


def test_no_memfd():
    facts = healthy_cpu()
    facts.memfd = False
    assert doctor.choose_heap(facts).name is None
    assert len(whats(facts)) == 1 and "memfd_create" in whats(facts)[0]
    facts = healthy()
    facts.memfd = False
    assert doctor.choose_heap(facts).name == "nvshmem" and whats(facts) == []


def test_an_environment_that_is_there_is_told_of(tmp_path):
    """Who ran launch.sh once and then another Python."""
    assert "Run pip install 'triton>=3.6'" in doctor._how_to_have("triton>=3.6", tmp_path)
    (tmp_path / "fluxlike-ready").touch()
    assert f"{tmp_path}/bin/python -m fluxlike doctor" in doctor._how_to_have("triton>=3.6", tmp_path)
    made = Path(sys.prefix)
    assert "Run pip install" in doctor._how_to_have("triton>=3.6", made)


def test_old_python():
    facts = healthy_cpu()
    facts.python = (3, 10)
    facts.loaded.clear()
    facts.broken = dict.fromkeys(doctor.NEEDED, f"{NOT_TRIED} after that")
    assert doctor.choose_heap(facts) == doctor.Heap(None, "this Python is too old")
    assert whats(facts) == ["Python 3.10 is older than 3.11"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda f: f.loaded.update(torch="2.9.1"), "torch 2.9.1 is outside the tested range"),
        (lambda f: f.loaded.update(triton="3.8.0"), "triton 3.8.0 is outside the tested range"),
        (lambda f: f.loaded.update(torch="2.12.0"), "torch 2.13.0 is installed, but the import finds 2.12.0"),
        (lambda f: f.installed.update({"nvshmem4py-cu12": "0.3.1"}), "both installed"),
        (lambda f: setattr(f, "torch_cuda", "12.8"), "nvshmem4py-cu13 does not fit torch"),
        (lambda f: setattr(f, "driver_cuda", "12.4"), "the driver supports CUDA 12.4"),
        (lambda f: f.libraries.update(libcudart=["/a/libcudart.so.12", "/b/libcudart.so.13"]), "2 copies of libcudart"),
        (
            lambda f: (
                f.installed.update({"nvidia-nvshmem-cu13": "3.4.5"}),
                f.folders.update({"nvidia-nvshmem-cu13": "/env/lib"}),
                f.libraries.update(libnvshmem_host=["/usr/local/libnvshmem_host.so.3"]),
            ),
            "loaded from elsewhere: /usr/local",
        ),
        (
            lambda f: (f.installed.update({"nvidia-nccl-cu13": "2.29.7"}), setattr(f, "nccl", "2.20.5")),
            "nvidia-nccl-cu13 2.29.7 is installed, but the libnccl that is loaded is 2.20.5",
        ),
        (lambda f: setattr(f, "shm", (64 << 20, 64 << 20)), "/dev/shm has 0.06 GiB"),
        (lambda f: f.installed.update({"nvshmem4py-cu13": "0.3.0"}), "nvshmem4py-cu13 0.3.0 is not >=0.3.1,<0.4"),
        (lambda f: f.installed.update({"nvidia-nvshmem-cu13": "3.7.1"}), "nvidia-nvshmem-cu13 3.7.1 is not >=3.4.5,<3.7"),
        (lambda f: f.installed.update({"cuda-bindings": "12.9.4"}), "cuda-bindings 12.9.4 is not >=13,<14"),
        (lambda f: setattr(f, "shm", (64 << 30, 64 << 20)), "/dev/shm has 0.06 GiB free"),
        (lambda f: setattr(f, "shm", None), "/dev/shm is missing"),
        (lambda f: f.environ.update(TRITON_INTERPRET="1"), "TRITON_INTERPRET is set"),
        (lambda f: f.environ.update(CUDA_LAUNCH_BLOCKING="1"), "CUDA_LAUNCH_BLOCKING is set"),
    ],
)
def test_disagreements(change, said):
    facts = healthy()
    change(facts)
    assert [what for what in whats(facts) if said in what], whats(facts)
    assert doctor.choose_heap(facts).name == "nvshmem"


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


def test_nccl_of_a_later_packaging_is_the_same():
    facts = healthy()
    facts.installed["nvidia-nccl-cu13"], facts.nccl = "2.29.7.post1", "2.29.7"
    assert whats(facts) == [] and ("libnccl says", "2.29.7") in [(row.name, row.value) for row in doctor.describe(facts)]


def test_pins_are_those_of_the_extras():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for cuda, pins in doctor.PINS.items():
        wanted = [pin for pin in extras[f"cu{cuda}"] if not pin.startswith(("torch", "triton"))]
        assert sorted(wanted) == sorted(name + pin for name, pin in pins.items())


def test_torch_for_rocm(tmp_path):
    rows, problems, _ = run_with_fake_torch(tmp_path, "pass", TEST_HIP="6.4")
    assert [what for what in problems if "ROCm 6.4" in what] and rows["GPUs", "torch's CUDA"] == "built for ROCm 6.4"
    facts = healthy()
    facts.torch_cuda, facts.torch_hip = None, "6.4"
    del facts.loaded["nvshmem.core"]
    assert whats(facts) == ["torch is built for ROCm 6.4, and fluxlike needs NVIDIA GPUs"]
    heap = doctor.choose_heap(facts)
    assert heap.name == "shm" and heap.why.startswith("only if asked") and "NVIDIA" in heap.why


def test_library_in_its_place_is_fine():
    facts = healthy()
    facts.installed["nvidia-nvshmem-cu13"] = "3.4.5"
    facts.folders["nvidia-nvshmem-cu13"] = "/env/lib"
    facts.libraries["libnvshmem_host"] = ["/env/lib/nvidia/nvshmem/lib/libnvshmem_host.so.3"]
    assert whats(facts) == []


def network(root, cards, release="6.8.0-45-generic", driver="NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06"):
    """A machine's /sys and /proc. ``cards``: (device, port, driver, link layer, state, rate)."""
    (root / "sys/class/infiniband").mkdir(parents=True)
    for device, port, name, *values in cards:
        place = root / "sys/class/infiniband" / device / "ports" / port
        place.mkdir(parents=True)
        for file, value in zip(("link_layer", "state", "rate"), values, strict=True):
            (place / file).write_text(value + "\n")
        if name:
            (root / "drivers" / name).mkdir(parents=True, exist_ok=True)
            (root / "sys/class/infiniband" / device / "device").mkdir(exist_ok=True)
            (root / "sys/class/infiniband" / device / "device/driver").symlink_to(root / "drivers" / name)
    for path, text in (("proc/sys/kernel/osrelease", release), ("proc/driver/nvidia/version", driver)):
        (root / path).parent.mkdir(parents=True)
        (root / path).write_text(text + "\n")
    return root


def network_rows(facts):
    return [(row.name, row.value) for row in doctor.describe(facts) if row.section == "network between nodes"]


IB = ("mlx5_10", "1", "mlx5_core", "InfiniBand", "4: ACTIVE", "400 Gb/sec (4X NDR)")
ROCE = ("mlx5_9", "1", "mlx5_core", "Ethernet", "1: DOWN", "100 Gb/sec (4X EDR)")
EFA = ("rdmap16s27", "1", "efa", "Unspecified", "4: ACTIVE", "100 Gb/sec (4X EDR)")


def test_network_cards(tmp_path):
    facts = healthy()
    look_at_network(facts, network(tmp_path, [IB, ROCE, EFA]))
    (tmp_path / "sys/module/nvidia_peermem").mkdir(parents=True)
    assert network_rows(facts) == [
        ("mlx5_9 port 1", "RoCE, DOWN, 100 Gb/sec (4X EDR), driver mlx5_core"),
        ("mlx5_10 port 1", "InfiniBand, ACTIVE, 400 Gb/sec (4X NDR), driver mlx5_core"),
        ("rdmap16s27 port 1", "EFA, ACTIVE, 100 Gb/sec (4X EDR), driver efa"),
        ("peermem", "not loaded (nvidia_peermem)"),
        ("dma-buf", "NVIDIA's open kernel modules, Linux 6.8"),
    ]
    look_at_network(facts, tmp_path)
    assert ("peermem", "nvidia_peermem") in network_rows(facts) and doctor.diagnose(facts) == []


def test_no_network_cards(tmp_path):
    """What is missing is said, and is no problem: one node needs no network."""
    facts = healthy()
    look_at_network(facts, tmp_path)
    assert network_rows(facts)[0] == ("RDMA cards", "none (there is no /sys/class/infiniband)")
    look_at_network(facts, network(tmp_path, [(*IB[:2], None, *IB[3:])], release="5.4.0", driver="NVIDIA UNIX x86_64"))
    assert network_rows(facts)[0] == ("mlx5_10 port 1", "InfiniBand, ACTIVE, 400 Gb/sec (4X NDR), driver unknown")
    assert facts.dmabuf is None and network_rows(facts)[-1][1].startswith("no (") and doctor.diagnose(facts) == []
    facts.ports = []
    assert network_rows(facts)[0] == ("RDMA cards", "none in /sys/class/infiniband") and doctor.diagnose(facts) == []


@pytest.mark.parametrize(
    ("cards", "environ", "said"),
    [
        ([], {"NVSHMEM_REMOTE_TRANSPORT": "ibrc"}, ["NVSHMEM_REMOTE_TRANSPORT='ibrc' asks for network cards, and"]),
        ([IB], {"NVSHMEM_REMOTE_TRANSPORT": "ibrc"}, []),
        ([], {"NVSHMEM_REMOTE_TRANSPORT": "none"}, []),
        ([IB], {"NVSHMEM_HCA_LIST": "mlx5_10:1"}, ["NVSHMEM_HCA_LIST is set, but NVSHMEM does not look at it"]),
        ([IB], {"NVSHMEM_HCA_LIST": "mlx5_10:1", "NVSHMEM_ENABLE_NIC_PE_MAPPING": "1"}, []),
        ([IB], {"NVSHMEM_HCA_LIST": "^mlx5_0", "NVSHMEM_ENABLE_NIC_PE_MAPPING": "true"}, []),
        ([IB], {"NVSHMEM_HCA_PE_MAPPING": "mlx5_10:1:2,mlx5_0:1:2", "NVSHMEM_ENABLE_NIC_PE_MAPPING": "1"},
         ["NVSHMEM_HCA_PE_MAPPING names mlx5_0:1:2, which this machine has not"]),
    ],
)  # fmt: skip
def test_network_settings(tmp_path, cards, environ, said):
    facts = healthy()
    look_at_network(facts, network(tmp_path, cards))
    facts.environ = environ
    found = whats(facts)
    assert len(found) == len(said) and all(what.startswith(start) for what, start in zip(found, said, strict=True)), found


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

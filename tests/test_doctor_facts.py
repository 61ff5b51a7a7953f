"""The doctor's judgement on made-up facts."""

import sys
import tomllib
from pathlib import Path

import pytest

from fluxlike.tools import doctor, machine
from fluxlike.tools.machine import NOT_TRIED, Facts, Gpu, look_at_driver, look_at_network

ROOT = Path(__file__).resolve().parents[1]
IB = ("mlx5_10", "1", "mlx5_core", "InfiniBand", "4: ACTIVE", "400 Gb/sec (4X NDR)")
ROCE = ("mlx5_9", "1", "mlx5_core", "Ethernet", "1: DOWN", "100 Gb/sec (4X EDR)")
EFA = ("rdmap16s27", "1", "efa", "Unspecified", "4: ACTIVE", "100 Gb/sec (4X EDR)")


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


@pytest.mark.parametrize("python", ["/bin/false", "/nowhere/python"])
def test_child_that_does_not_begin(monkeypatch, python):
    monkeypatch.setattr(sys, "executable", python)
    facts = healthy_cpu()
    facts.loaded.clear()
    machine._look_at_imports(facts)
    assert len(whats(facts)) == 1 and whats(facts)[0].startswith("the process that tries the imports ends before the first: it")
    heap = doctor.choose_heap(facts)
    assert heap.name is None and heap.why.endswith("ends before the first; numpy and torch and triton not tried after that")


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
        (lambda f: f.loaded.update(triton="3.10.0"), "triton 3.10.0 is outside the tested range"),
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


def test_nccl_of_a_later_packaging_is_the_same():
    facts = healthy()
    facts.installed["nvidia-nccl-cu13"], facts.nccl = "2.29.7.post1", "2.29.7"
    assert whats(facts) == [] and ("libnccl says", "2.29.7") in [(row.name, row.value) for row in doctor.describe(facts)]


def test_pins_are_those_of_the_extras():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for cuda, pins in doctor.PINS.items():
        wanted = [pin for pin in extras[f"cu{cuda}"] if not pin.startswith(("torch", "triton"))]
        assert sorted(wanted) == sorted(name + pin for name, pin in pins.items())


def test_one_range_of_torch_and_triton_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    admitted, extra = project["dependencies"], project["optional-dependencies"]["cu13"]
    assert doctor._tested("torch") in admitted and doctor._tested("triton") in extra
    assert f"<{doctor._tested('torch').partition('<')[2]}" in next(pin for pin in extra if pin.startswith("torch"))
    asked = " and ".join(f'{low} <= release("{name}") < {high}' for name, (low, high) in doctor.TESTED.items())
    assert f"good = {asked}\n" in (ROOT / "scripts/env.sh").read_text()
    assert f"pip install '{doctor._tested('triton')}'" in (ROOT / "fluxlike/runtime/world.py").read_text()


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

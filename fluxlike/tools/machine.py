"""What this machine has, looked up without taking anything for granted: the facts behind `doctor`.

Every import happens in a child process, which tells what it found line by line: a library that ends the process that
loads it ends only the child, and the parent knows at which step. No NVSHMEM function is ever called, since before
NVSHMEM's initialisation most of them end the process.

Standard library only, and no import of torch in this process.
"""

import contextlib
import csv
import ctypes
import importlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

PACKAGES = (
    "fluxlike",
    "numpy",
    "torch",
    "triton",
    *(f"{name}-cu{cuda}" for name in ("nvshmem4py", "nvidia-nvshmem", "nvidia-nccl") for cuda in (12, 13)),
    "cuda-bindings",
    "cuda-core",
    "cuda-python",
    "nvidia-ml-py",
)
NOT_TRIED = "not tried"  # how the reason begins where an earlier step ended the child
LIBRARIES = ("libnvshmem_host", "libcudart", "libnccl")
DMABUF_KERNEL = (5, 12)  # the first Linux whose RDMA takes dma-bufs
VARIABLES = (
    "FLUXLIKE_", "NVSHMEM_", "NCCL_", "TRITON_", "TORCH_SYMM_MEM_", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING",
    "LD_LIBRARY_PATH",
)  # fmt: skip


@dataclass
class Gpu:
    name: str
    capability: tuple[int, int]
    memory: int


@dataclass
class Port:
    """One of a network card that does RDMA. ``layer``: "InfiniBand" or "Ethernet" (RoCE), or "Unspecified" (EFA)."""

    device: str
    port: str
    driver: str
    layer: str
    state: str
    rate: str


@dataclass
class Facts:
    """What `collect` found; the defaults are a machine about which nothing could be learnt."""

    python: tuple[int, int] = sys.version_info[:2]
    installed: dict[str, str] = field(default_factory=dict)  # package: version by its record
    folders: dict[str, str] = field(default_factory=dict)  # package: where it is installed
    loaded: dict[str, str] = field(default_factory=dict)  # module: version by itself
    broken: dict[str, str] = field(default_factory=dict)  # module: why its import failed
    child_error: str | None = None  # why there was no process to try them
    libraries: dict[str, list[str]] = field(default_factory=dict)  # library: files mapped after the imports
    torch_cuda: str | None = None
    torch_hip: str | None = None  # ROCm's, whose GPUs torch calls CUDA's
    nccl: str | None = None  # what the libnccl that is loaded says of itself
    gpus: list[Gpu] = field(default_factory=list)  # those that torch sees
    peers: list[list[bool]] = field(default_factory=list)
    cuda_error: str | None = None  # how torch fails when it is asked for them
    cuda_warning: str | None = None  # what torch says besides
    smi_gpus: list[list[str]] | None = None  # None: no nvidia-smi that answers
    smi_error: str | None = None  # what is wrong with an nvidia-smi that is there
    devices: list[str] = field(default_factory=list)  # /dev/nvidia0 and so on
    driver: str | None = None
    driver_cuda: str | None = None
    links: list[list[str]] = field(default_factory=list)
    links_from: str = "unknown"
    memfd: bool = False
    shm: tuple[int, int] | None = None  # size, free
    memory: int | None = None
    cores: int = 1
    ports: list[Port] | None = None  # of network cards for RDMA; None: the machine has no /sys/class/infiniband
    peermem: str | None = None  # the kernel module that lets them reach the memory of GPUs
    dmabuf: str | None = None  # why they can reach it without that
    environ: dict[str, str] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)  # of fluxlike's own variables
    refused: str | None = None  # what `init` would say of one of them


def _version(module: str) -> object:
    return getattr(importlib.import_module(module), "__version__", "unknown")


def _nccl() -> str | None:
    """The version of the libnccl that is mapped; torch.cuda.nccl.version() is that of the headers torch was built with."""
    paths, code = _mapped().get("libnccl", []), ctypes.c_int()
    with contextlib.suppress(OSError, AttributeError):
        if len(paths) == 1 and ctypes.CDLL(paths[0]).ncclGetVersion(ctypes.byref(code)) == 0:
            scale = 10000 if code.value >= 10000 else 1000  # the latter before 2.9
            return f"{code.value // scale}.{code.value % scale // 100}.{code.value % 100}"
    return None


def _torch_cuda() -> object:
    import torch

    # Of a driver that is too old, or of NVSwitches that are not ready, torch only warns.
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [torch.cuda.get_device_properties(i) for i in range(count)]
    return {
        "build": torch.version.cuda,
        "hip": torch.version.hip,
        "warning": next((str(warning.message).strip().partition("\n")[0] for warning in said), None),
        "nccl": _nccl(),
        "gpus": [(gpu.name, (gpu.major, gpu.minor), gpu.total_memory) for gpu in gpus],
        "peers": [[i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)] for i in range(count)],
    }


def _nvlink() -> object:
    import pynvml

    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    caps = pynvml.NVML_P2P_CAPS_INDEX_NVLINK

    def cell(a: object, b: object) -> str:
        if a is b:
            return "X"
        linked = pynvml.nvmlDeviceGetP2PStatus(a, b, caps) == pynvml.NVML_P2P_STATUS_OK
        return "NV" if linked else "-"

    return [[cell(a, b) for b in handles] for a in handles]


def _mapped() -> dict[str, list[str]]:
    found: dict[str, set[str]] = {}
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")[2]
            stem = os.path.basename(path).partition(".so")[0]
            if stem in LIBRARIES:
                found.setdefault(stem, set()).add(f"/{path}")
    return {name: sorted(paths) for name, paths in found.items()}


# In this order: torch brings the libraries that the later ones must share.
STEPS: dict[str, Callable[[], object]] = {
    "numpy": lambda: _version("numpy"),
    "torch": lambda: _version("torch"),
    "torch.cuda": _torch_cuda,
    "triton": lambda: _version("triton"),
    "cuda.bindings": lambda: _version("cuda.bindings"),
    "cuda.core": lambda: _version("cuda.core"),
    "nvshmem.core": lambda: bool(importlib.import_module("nvshmem.core")),
    "pynvml": _nvlink,
}


def _child() -> None:
    """Take every step and say one JSON line before and one after it; the parent learns from a line that is missing."""
    # The lines get a file of their own, since an import may print.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name, step in STEPS.items():
        print(json.dumps([name, "begin", None]), file=out, flush=True)
        try:
            line = [name, "done", step()]
        except BaseException as error:  # an import that calls sys.exit is a finding, too
            line = [name, "failed", f"{type(error).__name__}: {error}".splitlines()[0]]
        print(json.dumps(line), file=out, flush=True)
        print(json.dumps(["libraries", "done", _mapped()]), file=out, flush=True)
    os._exit(0)  # no library gets the chance to fail in its exit handler


def _run(*command: str, timeout: float = 30) -> tuple[str | None, str | None]:
    """The command's output, and what is wrong with it; neither where there is no such command."""
    if not shutil.which(command[0]):  # starting it would say the same of a folder of PATH that cannot be read
        return None, None
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout)
    except OSError as error:
        return None, f"it cannot be started: {error}"
    except subprocess.TimeoutExpired:
        return None, f"it did not return within {timeout:.0f} s"
    if done.returncode == 0:
        return done.stdout, None
    said = (done.stdout.strip() or done.stderr.strip() or "nothing said").splitlines()[0]
    return None, f"exit status {done.returncode}, {said}"


def try_imports(timeout: float = 300) -> dict[str, tuple[str, object]]:
    """{step: ("done", value) | ("failed", reason)} for every step that a child process began."""
    # -P keeps this file's folder off the child's path, where tools named like standard modules would hide those.
    command = [sys.executable, "-P", __file__, "--child"]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=timeout)
        text, end = done.stdout, f"it ended the process with status {done.returncode}"
    except subprocess.TimeoutExpired as late:
        raw = late.stdout or b""
        text, end = raw.decode() if isinstance(raw, bytes) else raw, f"it did not return within {timeout:.0f} s"
    except OSError as error:
        text, end = "", f"it cannot be started: {error}"
    found: dict[str, tuple[str, object]] = {}
    last = "the process that tries the imports did not begin"
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            name, state, value = json.loads(line)
            found[name] = ("failed", end) if state == "begin" else (state, value)
            last = name if name in STEPS else last
    if not found:
        found["child"] = ("failed", end)
    for name in STEPS:
        found.setdefault(name, ("failed", f"{NOT_TRIED} after {last}: {end}"))
    return found


def parse_topology(text: str) -> list[list[str]]:
    """The GPU part of `nvidia-smi topo -m`: a square of cells such as X, NV18, PIX, SYS."""
    rows = [line.split() for line in text.splitlines() if re.match(r"GPU\d+\s", line)]
    rows = [row[1:] for row in rows if "X" in row]  # the header has none
    return [row[: len(rows)] for row in rows]


def _memory() -> int | None:
    """What this process may use: the machine's memory or, in a container, its limit."""
    sizes = []
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            sizes.append(int(Path(limit).read_text()))
    return min(sizes, default=None)


def _memfd() -> bool:
    with contextlib.suppress(OSError, AttributeError):
        os.close(os.memfd_create("fluxlike-doctor"))
        return True
    return False


def _look_at_packages(facts: Facts) -> None:
    for name in PACKAGES:
        with contextlib.suppress(Exception):
            record = importlib.metadata.distribution(name)
            facts.installed[name] = record.version
            facts.folders[name] = os.path.realpath(str(record.locate_file("")))


def _look_at_imports(facts: Facts) -> None:
    for name, (state, value) in try_imports().items():
        if state == "failed":
            facts.broken[name] = str(value)
        elif name == "torch.cuda" and isinstance(value, dict):
            facts.torch_cuda, facts.nccl, facts.peers = value["build"], value["nccl"], value["peers"]
            facts.cuda_warning, facts.torch_hip = value["warning"], value["hip"]
            facts.gpus = [Gpu(gpu, (major, minor), memory) for gpu, (major, minor), memory in value["gpus"]]
        elif name == "libraries" and isinstance(value, dict):
            facts.libraries = value
        elif name == "pynvml" and isinstance(value, list):
            facts.links, facts.links_from = value, "NVML"
        else:
            facts.loaded[name] = str(value)
    # Failing because torch failed is no news, and pynvml is a nicety.
    facts.cuda_error = facts.broken.pop("torch.cuda", None) if "torch" not in facts.broken else None
    for name in ("torch.cuda", "pynvml"):
        facts.broken.pop(name, None)
    facts.child_error = facts.broken.pop("child", None)


def look_at_driver(facts: Facts, root: Path = Path("/")) -> None:
    """The driver, and the GPUs that it knows. ``root``: where /dev and /proc are."""
    facts.devices = sorted(map(str, root.glob("dev/nvidia[0-9]*")))
    fields = "--query-gpu=name,compute_cap,memory.total,driver_version"
    query, facts.smi_error = _run("nvidia-smi", fields, "--format=csv,noheader")
    if "No devices were found" in (facts.smi_error or ""):  # the driver is well
        facts.smi_error = None
    if query is not None:
        rows = [[cell.strip() for cell in row] for row in csv.reader(query.splitlines())]
        facts.smi_gpus = [row for row in rows if len(row) == 4]
        facts.driver = next((row[3] for row in facts.smi_gpus), None)
        head = re.search(r"CUDA[A-Za-z ]*Version *: *(\d+\.\d+)", _run("nvidia-smi")[0] or "")
        facts.driver_cuda = head[1] if head else None
        if not facts.links:
            facts.links = parse_topology(_run("nvidia-smi", "topo", "-m")[0] or "")
            facts.links_from = "nvidia-smi" if facts.links else "unknown"
    else:
        with contextlib.suppress(OSError):
            found = re.search(r"\b(\d{3,}\.\d+[.\d]*)", (root / "proc/driver/nvidia/version").read_text())
            facts.driver = found[1] if found else None


def _look_at_host(facts: Facts) -> None:
    facts.memfd, facts.memory = _memfd(), _memory()
    facts.cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError):
        usage = shutil.disk_usage("/dev/shm")
        facts.shm = usage.total, usage.free
    facts.environ = {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)}


def _look_at_settings(facts: Facts) -> None:
    from ..runtime import env  # not above: in the child process this file belongs to no package
    from ..topology import matrix

    facts.complaints = env.complaints() + unkept()
    try:
        env.check()
    except ValueError as error:
        facts.refused = str(error)
    try:
        matrix.named()
    except ValueError as error:
        facts.complaints.append(str(error))


def unkept() -> list[str]:
    """Why tuned choices could not be kept, if so, and what to do; makes nothing."""
    from ..runtime import env, files

    place = env.cache_dir() / "tuned"
    there = next(path for path in (place, *place.parents) if os.path.exists(path))
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        what = f"tuned choices cannot be kept in {place}, as no file can be made in {there}: {error.strerror}"
        return [f"{what}; set FLUXLIKE_CACHE_DIR to a folder that you may write, or unset it for one in ~/.cache"]
    try:
        if there == place:
            files.refuse_shared(place)
    except PermissionError as error:  # which says what to do
        return [f"tuned choices are not kept: {error}"]
    return []


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return "unknown"


def look_at_network(facts: Facts, root: Path = Path("/")) -> None:
    """Network cards for RDMA, and how they reach the memory of GPUs. ``root``: where /sys and /proc are."""
    cards = root / "sys/class/infiniband"
    if cards.is_dir():
        facts.ports = []
        for port in sorted(cards.glob("*/ports/*"), key=_by_number):
            card = port.parent.parent
            driver = (card / "device/driver").resolve().name if (card / "device/driver").exists() else "unknown"
            # "4: ACTIVE", of which the number says nothing more
            state = _read(port / "state").rpartition(": ")[2]
            facts.ports.append(Port(card.name, port.name, driver, _read(port / "link_layer"), state, _read(port / "rate")))
    modules = (name for name in ("nvidia_peermem", "nv_peer_mem") if (root / "sys/module" / name).is_dir())
    facts.peermem = next(modules, None)
    kernel = _release_of(_read(root / "proc/sys/kernel/osrelease"))
    if "Open Kernel Module" in _read(root / "proc/driver/nvidia/version") and kernel >= DMABUF_KERNEL:
        facts.dmabuf = f"NVIDIA's open kernel modules, Linux {kernel[0]}.{kernel[1]}"


def _by_number(path: Path) -> list[tuple[int, str]]:
    """A key that puts mlx5_10 behind mlx5_9."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", str(path))]


def _release_of(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def collect() -> tuple[Facts, list[str]]:
    """The facts, and what went wrong in looking for them."""
    facts, failures = Facts(), []
    looks = (_look_at_packages, _look_at_imports, look_at_driver, _look_at_host, look_at_network, _look_at_settings)
    for look in looks:
        try:
            look(facts)
        except Exception as error:  # half a report is better than none
            failures.append(f"{look.__name__} failed with {type(error).__name__}: {error}")
    return facts, failures


if __name__ == "__main__" and sys.argv[1:] == ["--child"]:
    _child()

"""`python -m fluxlike doctor [--json]`: what this machine has, which heap fluxlike would use on it, and what to mend.

It is for machines on which something is wrong, so it needs the standard library only. `machine.collect` looks at the
machine; `describe`, `diagnose` and `choose_heap` turn the facts into rows, problems and a verdict (so that each can be
tried with made-up facts); `render` prints them.
"""

import itertools
import json
import os
import platform
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .. import __version__
from . import once
from .machine import LIBRARIES, NOT_TRIED, PACKAGES, Facts, Port, collect

OLDEST_PYTHON = (3, 11)
TESTED = {"torch": ((2, 10), (2, 15)), "triton": ((3, 6), (3, 10))}  # from the first to below the second
# torch's CUDA: what pyproject's extra for it asks of the packages beside torch and Triton
PINS = {
    cuda: {
        f"nvidia-nvshmem-cu{cuda}": ">=3.4.5,<3.7",
        f"nvshmem4py-cu{cuda}": ">=0.3.1,<0.4",
        "cuda-core": ">=0.7,<2",
        "cuda-bindings": bindings,
    }
    for cuda, bindings in ((12, ">=12.9,<13"), (13, ">=13,<14"))
}
OLDEST_GPU = (8, 0)
NEEDED = ("numpy", "torch", "triton")
GIB = 1 << 30
# package: the module whose __version__ must agree with the package's record
MODULES = {
    "numpy": "numpy",
    "torch": "torch",
    "triton": "triton",
    "cuda-bindings": "cuda.bindings",
    "cuda-core": "cuda.core",
}


@dataclass(frozen=True)
class Row:
    section: str
    name: str
    value: str


@dataclass(frozen=True)
class Problem:
    what: str
    remedy: str


@dataclass(frozen=True)
class Heap:
    """The heap that fluxlike would use (None: it cannot run), and why."""

    name: str | None
    why: str


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _major(version: str | None) -> int | None:
    return _release(version)[0] if version and _release(version) else None


def old_gpus(facts: Facts) -> list[str]:
    return [
        f"{i} ({gpu.name}, sm_{gpu.capability[0]}{gpu.capability[1]})"
        for i, gpu in enumerate(facts.gpus)
        if gpu.capability < OLDEST_GPU
    ]


def unreachable(facts: Facts) -> list[tuple[int, int]]:
    return [(i, j) for i, row in enumerate(facts.peers) for j, reached in enumerate(row) if not reached]


def _missing(facts: Facts) -> str:
    """What there is none of, and what became unknown with it."""
    missing = [name for name in NEEDED if name not in facts.loaded]
    untried = [name for name in missing if facts.broken.get(name, "").startswith(NOT_TRIED)]
    failed = [name for name in missing if name not in untried]
    why = [f"{' and '.join(failed)} cannot be imported"] if failed else []
    if facts.child_error:
        why.append("the process that tries the imports ends before the first")
    if facts.cuda_error:
        why.append(f"torch fails to look at the GPUs: {facts.cuda_error}")
    if untried:
        why.append(f"{' and '.join(untried)} not tried after that")
    return "; ".join(why)


def choose_heap(facts: Facts) -> Heap:
    """NVSHMEM where its conditions hold, else shared memory where its do, else none."""
    if facts.python < OLDEST_PYTHON:
        return Heap(None, "this Python is too old")
    if any(name not in facts.loaded for name in NEEDED):
        return Heap(None, _missing(facts))
    if facts.refused:
        return Heap(None, f"fluxlike.init refuses {facts.refused.partition(';')[0]}")
    if facts.cuda_error:
        against = f"torch fails to look at the GPUs: {facts.cuda_error}"
    elif not facts.gpus:
        against = "no CUDA GPU is visible to torch"
    elif facts.torch_hip:
        against = "torch is built for ROCm and fluxlike needs NVIDIA GPUs"
    elif old_gpus(facts):
        against = f"GPU {old_gpus(facts)[0]} is older than sm_80"
    elif "nvshmem.core" not in facts.loaded:
        against = "nvshmem4py cannot be imported"
    elif unreachable(facts):
        i, j = unreachable(facts)[0]
        against = f"GPU {i} cannot access the memory of GPU {j}"
    else:
        return Heap("nvshmem", f"{len(facts.gpus)} GPU(s) with peer access between all of them, and nvshmem4py")
    if not facts.memfd:
        return Heap(None, f"{against}, and memfd_create, which makes the shared-memory heap, does not work")
    if facts.gpus or facts.cuda_error:
        return Heap("shm", f"only if asked for with init(heap='shm'), to run on the CPU, for {against}")
    return Heap("shm", f"{against}; the kernels run in Triton's interpreter on the CPU")


def _extra(facts: Facts) -> str:
    """What to install for the CUDA of this machine."""
    cuda = _major(facts.torch_cuda) or _major(facts.driver_cuda) or 13
    return f"pip install -e '.[cu{min(max(cuda, 12), 13)}]' at the root of the repository"


def _how_to_have(wanted: str, made: Path) -> str:
    """A package that this Python lacks; ``made``: where scripts/launch.sh sets up an environment with all of them."""
    if (made / "fluxlike-ready").exists() and Path(sys.prefix) != made:
        return f"Use the environment that scripts/launch.sh has set up: {made}/bin/python -m fluxlike doctor."
    return f"Run pip install '{wanted}', or scripts/launch.sh, which sets up an environment that has it."


def _import_problems(facts: Facts) -> Iterable[Problem]:
    if facts.python < OLDEST_PYTHON:
        what = "Python {}.{} is older than 3.11".format(*facts.python)
        yield Problem(what, "Make an environment with Python 3.11 or 3.12.")
    elif facts.child_error:
        what = f"the process that tries the imports ends before the first: {facts.child_error}"
        yield Problem(what, f"See what it says: {sys.executable} -P {Path(__file__).with_name('machine.py')} --child.")
    for name, wanted in (("numpy", "numpy"), *((name, _tested(name)) for name in TESTED)):
        reason = facts.broken.get(name, "unknown")
        if name in facts.loaded or reason.startswith(NOT_TRIED):
            continue
        if name in facts.installed:
            what = f"{name} {facts.installed[name]} is installed, but its import fails: {reason}"
            yield Problem(what, f"Reinstall it: pip install --force-reinstall {name}=={facts.installed[name]}.")
        else:
            yield Problem(f"{name} is not installed: {reason}", _how_to_have(wanted, Path(__file__).parents[2] / ".venv"))
    if not facts.gpus or facts.torch_hip:
        return
    for name, package in (
        ("nvshmem.core", "nvshmem4py"),
        ("cuda.bindings", "cuda-bindings"),
        ("cuda.core", "cuda-core"),
    ):
        reason = facts.broken.get(name, "unknown")
        if name not in facts.loaded and not reason.startswith(NOT_TRIED):
            what = f"there are GPUs, but {name} of {package} cannot be imported: {reason}"
            yield Problem(what, f"Install the packages for NVSHMEM: {_extra(facts)}.")


def _tested(name: str) -> str:
    """What pip is asked for."""
    low, high = (".".join(map(str, release)) for release in TESTED[name])
    return f"{name}>={low},<{high}"


def _version_problems(facts: Facts) -> Iterable[Problem]:
    for name, (low, high) in TESTED.items():
        version = facts.loaded.get(name)
        if version and not low <= _release(version) < high:
            yield Problem(f"{name} {version} is outside the tested range", f"Install a tested one: pip install '{_tested(name)}'.")
    build = _major(facts.torch_cuda)
    for name, pin in PINS.get(build, {}).items() if build and facts.gpus else ():
        version, (least, bound) = facts.installed.get(name), map(_release, pin.split(","))
        if version and not least <= _release(version) < bound:
            yield Problem(f"{name} {version} is not {pin}", f"Install one that is: pip install '{name}{pin}'.")
    for name, module in MODULES.items():
        record, itself = facts.installed.get(name), facts.loaded.get(module)
        if record and itself and record.partition("+")[0] != itself.partition("+")[0]:
            yield Problem(
                f"{name} {record} is installed, but the import finds {itself}",
                f"Remove the other copy: python -c 'import {module} as m; print(m.__file__)' says where it is.",
            )


def _cuda_problems(facts: Facts) -> Iterable[Problem]:
    pairs = [name[:-5] for name in facts.installed if name.endswith("-cu12") and f"{name[:-5]}-cu13" in facts.installed]
    if pairs:
        names = " ".join(f"{name}-cu12 {name}-cu13" for name in pairs)
        yield Problem(
            f"the CUDA 12 and 13 packages of {', '.join(pairs)} are both installed and overwrite each other's files",
            f"Remove both (pip uninstall {names}), then install the one that fits torch's CUDA.",
        )
    build, driver = _major(facts.torch_cuda), _major(facts.driver_cuda)
    for name in ("nvshmem4py", "nvidia-nvshmem"):
        for other in {12, 13} - {build} if build else ():
            if f"{name}-cu{other}" in facts.installed and f"{name}-cu{build}" not in facts.installed:
                remedy = f"Replace it: pip uninstall {name}-cu{other}, then pip install {name}-cu{build}."
                yield Problem(f"{name}-cu{other} does not fit torch, which is built for CUDA {build}", remedy)
    if build and driver and driver < build:
        yield Problem(
            f"the driver supports CUDA {facts.driver_cuda}, but torch is built for CUDA {facts.torch_cuda}",
            f"Update the driver, or use a torch for CUDA {driver}: the extra cu{driver} of pyproject.toml brings one.",
        )


def _sight_problems(facts: Facts) -> Iterable[Problem]:
    """Why nvidia-smi or torch sees no GPU where there are some."""
    if facts.smi_error:
        remedy = "Restart the machine if its driver was updated, else install the driver anew; on the CPU it is fine."
        yield Problem(f"nvidia-smi fails: {facts.smi_error}", remedy)
    count = len(facts.smi_gpus or facts.devices)
    if facts.cuda_error:
        what = f"torch fails to look at the GPUs: {facts.cuda_error}"
        yield Problem(what, "Check the driver with nvidia-smi; to run on the CPU, set CUDA_VISIBLE_DEVICES to nothing.")
    elif facts.torch_hip:
        remedy = f"On NVIDIA GPUs install a torch for CUDA: {_extra(facts)}; on others use init(heap='shm'), which runs on the CPU."
        yield Problem(f"torch is built for ROCm {facts.torch_hip}, and fluxlike needs NVIDIA GPUs", remedy)
    elif facts.cuda_warning and not facts.gpus:
        remedy = "If the driver is too old, update it or take an older torch; with NVSwitches, start nvidia-fabricmanager."
        yield Problem(f"torch sees no GPU and says: {facts.cuda_warning}", remedy)
    elif count and not facts.gpus and "torch" in facts.loaded:
        hidden, machine = facts.environ.get("CUDA_VISIBLE_DEVICES"), f"the machine has {count} GPU(s), but"
        if hidden is not None:
            what = f"{machine} CUDA_VISIBLE_DEVICES={hidden!r} leaves none"
            remedy = "Unset it to use the GPUs; to run on the CPU it is fine."
        elif not facts.torch_cuda:
            what = f"{machine} this torch is built without CUDA"
            remedy = f"Install one with CUDA: {_extra(facts)}."
        else:
            what = f"{machine} torch sees none"
            remedy = "Check that the driver works (nvidia-smi) and is new enough for torch's CUDA."
        yield Problem(what, remedy)


def _library_problems(facts: Facts) -> Iterable[Problem]:
    for name, paths in facts.libraries.items():
        if len({os.path.realpath(path) for path in paths}) > 1:
            what = f"{len(paths)} copies of {name} are loaded in one process: {', '.join(paths)}"
            yield Problem(what, "Leave one: look at LD_LIBRARY_PATH, and at packages for two versions of CUDA.")
    packages = {"libnvshmem_host": "nvidia-nvshmem", "libnccl": "nvidia-nccl"}
    for name, package in packages.items():
        homes = {facts.folders[full] for full in facts.folders if full.startswith(f"{package}-cu")}
        for path in facts.libraries.get(name, ()):
            if homes and not any(os.path.realpath(path).startswith(home + os.sep) for home in homes):
                what = f"{package} is installed with pip, but {name} was loaded from elsewhere: {path}"
                yield Problem(what, "Take its folder out of LD_LIBRARY_PATH, so that the installed one is found.")
    for full, version in facts.installed.items():
        alone = sum(other.startswith("nvidia-nccl-cu") for other in facts.installed) == 1
        if full.startswith("nvidia-nccl-cu") and alone and facts.nccl and not f"{version}.".startswith(f"{facts.nccl}."):
            what = f"{full} {version} is installed, but the libnccl that is loaded is {facts.nccl}"
            yield Problem(what, "Take the other NCCL out of LD_LIBRARY_PATH and LD_PRELOAD.")


def _gpu_problems(facts: Facts) -> Iterable[Problem]:
    if old_gpus(facts):
        what = f"older than sm_80, which the kernels need: GPU {', '.join(old_gpus(facts))}"
        yield Problem(what, "Hide the old ones with CUDA_VISIBLE_DEVICES, or run on the CPU with it empty.")
    if unreachable(facts):
        pairs = ", ".join(f"{i}->{j}" for i, j in unreachable(facts))
        remedy = "Use GPUs that reach each other (CUDA_VISIBLE_DEVICES), or enable peer access: IOMMU and ACS off."
        yield Problem(f"no peer access between GPUs {pairs}", remedy)
    if facts.gpus and not facts.shm:
        yield Problem("/dev/shm is missing; NCCL needs it", "Mount a tmpfs there; in a container: docker run --shm-size=1g.")
    elif facts.gpus and facts.shm and facts.shm[0] < GIB // 2:
        what = f"/dev/shm has {facts.shm[0] / GIB:.2f} GiB; NCCL fails in small ones"
        yield Problem(what, "Give the container more: docker run --shm-size=1g.")
    elif facts.gpus and facts.shm and facts.shm[1] < GIB // 8:
        what = f"/dev/shm has {facts.shm[1] / GIB:.2f} GiB free; NCCL fails in full ones"
        yield Problem(what, "Remove from it what programs that ended have left: ls -l /dev/shm.")
    if facts.gpus and facts.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y"):
        what = "TRITON_INTERPRET is set, so kernels run on the CPU though there are GPUs"
        yield Problem(what, "Unset it: fluxlike turns to the interpreter by itself where there is no GPU.")
    if len(facts.gpus) > 1 and facts.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        what = "CUDA_LAUNCH_BLOCKING is set, and kernels of schedule copy_engine wait for copies queued behind their launch"
        yield Problem(what, "Unset it, or make contexts with schedule='in_kernel': with copy_engine calls end in PeerTimeout.")


def _network_problems(facts: Facts) -> Iterable[Problem]:
    """What contradicts itself; one node needs no network, so that something is missing is none."""
    said, devices = facts.environ, {port.device for port in facts.ports or ()}
    transport = said.get("NVSHMEM_REMOTE_TRANSPORT", "none")
    if transport.startswith("ib") and not devices:
        what = f"NVSHMEM_REMOTE_TRANSPORT={transport!r} asks for network cards, and /sys/class/infiniband has none"
        yield Problem(what, "Unset it for one node; for several, load the cards' drivers, and give containers their devices.")
    listed = [name for name in ("NVSHMEM_HCA_LIST", "NVSHMEM_HCA_PE_MAPPING") if said.get(name)]
    if listed and said.get("NVSHMEM_ENABLE_NIC_PE_MAPPING", "0")[:1].lower() in ("", "0", "n", "f"):
        remedy = f"Set NVSHMEM_ENABLE_NIC_PE_MAPPING=1, too; without {listed[0]} each GPU takes the card that is nearest."
        yield Problem(f"{listed[0]} is set, but NVSHMEM does not look at it", remedy)
    for name in listed:
        entries = [entry for entry in said[name].split(",") if not entry.startswith("^")]
        wrong = [entry for entry in entries if entry.partition(":")[0] not in devices]
        if wrong and devices:
            yield Problem(f"{name} names {wrong[0]}, which this machine has not", f"It has {', '.join(sorted(devices))}.")


def _setting_problems(facts: Facts) -> Iterable[Problem]:
    for complaint in facts.complaints:
        what, _, remedy = complaint.rpartition("; ")
        yield Problem(what, f"{remedy[:1].upper()}{remedy[1:]}.")


JUDGES = (
    _import_problems,
    _version_problems,
    _cuda_problems,
    _sight_problems,
    _library_problems,
    _gpu_problems,
    _network_problems,
    _setting_problems,
)


def diagnose(facts: Facts) -> list[Problem]:
    problems = list(itertools.chain.from_iterable(judge(facts) for judge in JUDGES))
    if not facts.gpus and not facts.memfd:
        remedy = "Run on Linux 3.17 or later, with a Python built for it, and outside sandboxes that forbid the call."
        problems.append(Problem("memfd_create does not work, and the shared-memory heap is made with it", remedy))
    return problems


def _size(size: int | None) -> str:
    return "unknown" if size is None else f"{size / GIB:.1f} GiB"


def _matrix(section: str, cells: Sequence[Sequence[str]]) -> list[Row]:
    width = max((len(cell) for row in cells for cell in row), default=1)
    lines = [("", [str(i) for i in range(len(cells))]), *((f"GPU {i}", row) for i, row in enumerate(cells))]
    return [Row(section, name, " ".join(f"{cell:<{width}}" for cell in row).rstrip()) for name, row in lines]


def _network_rows(facts: Facts) -> list[Row]:
    found = [(f"{p.device} port {p.port}", f"{_kind(p)}, {p.state}, {p.rate}, driver {p.driver}") for p in facts.ports or ()]
    if not found:
        why = "none (there is no /sys/class/infiniband)" if facts.ports is None else "none in /sys/class/infiniband"
        found = [("RDMA cards", why)]
    found.append(("peermem", facts.peermem or "not loaded (nvidia_peermem)"))
    found.append(("dma-buf", facts.dmabuf or "no (it takes NVIDIA's open kernel modules, and Linux 5.12)"))
    return [Row("network between nodes", name, value) for name, value in found]


def _kind(port: Port) -> str:
    if port.driver.startswith("efa"):
        return "EFA"
    return {"Ethernet": "RoCE"}.get(port.layer, port.layer)


def describe(facts: Facts) -> list[Row]:
    recorded = facts.installed.get("fluxlike")
    differs = "" if recorded in (None, __version__) else f" (pip's record says {recorded})"
    rows = [
        Row("this", "fluxlike", f"{__version__}{differs} in {Path(__file__).resolve().parents[2]}"),
        Row("this", "Python", f"{platform.python_version()} ({sys.executable})"),
        Row("this", "system", f"{platform.platform()} {platform.machine()}"),
    ]
    for name in PACKAGES[1:]:
        module = "nvshmem.core" if name.startswith("nvshmem4py") else MODULES.get(name, name)
        value = facts.installed.get(name, "not installed")
        if module in facts.loaded and (name in facts.installed or module == name):
            itself = facts.loaded[module]
            value += ", imports" if itself in ("True", "unknown", value) else f", imports as {itself}"
        elif name in facts.installed and module in facts.broken:
            value += f", import fails: {facts.broken[module]}"
        rows.append(Row("packages", name, value))
    rows += [Row("libraries loaded", name, ", ".join(facts.libraries.get(name, ())) or "not loaded") for name in LIBRARIES]
    if facts.nccl:
        rows.append(Row("libraries loaded", "libnccl says", facts.nccl))
    no_cuda = f"built for ROCm {facts.torch_hip}" if facts.torch_hip else "built without CUDA"
    no_cuda = no_cuda if "torch" in facts.loaded and not facts.cuda_error else "unknown"
    rows += [
        Row("GPUs", "torch's CUDA", facts.torch_cuda or no_cuda),
        Row("GPUs", "driver", f"{facts.driver or 'none found'} (CUDA {facts.driver_cuda or 'unknown'})"),
    ]
    if facts.smi_error:
        rows.append(Row("GPUs", "nvidia-smi", f"fails: {facts.smi_error}"))
    for i, gpu in enumerate(facts.gpus):
        value = f"{gpu.name}, sm_{gpu.capability[0]}{gpu.capability[1]}, {_size(gpu.memory)}"
        rows.append(Row("GPUs", f"GPU {i}", value))
    if not facts.gpus:
        rows += [Row("GPUs", f"GPU {i} (nvidia-smi)", ", ".join(row[:3])) for i, row in enumerate(facts.smi_gpus or [])]
    if facts.peers:
        rows += _matrix("peer access", [["yes" if ok else "NO" for ok in row] for row in facts.peers])
    if facts.links:
        rows += _matrix(f"links, all GPUs of the machine ({facts.links_from})", facts.links)
    elif facts.gpus or facts.smi_gpus:
        rows.append(Row("links", "NVLink", "unknown (neither nvidia-ml-py nor nvidia-smi topo answers)"))
    shm = f"{_size(facts.shm[0])}, free {_size(facts.shm[1])}" if facts.shm else "missing"
    rows += [
        Row("host", "cores", str(facts.cores)),
        Row("host", "memory", _size(facts.memory)),
        Row("host", "/dev/shm", shm),
        Row("host", "memfd_create", "works" if facts.memfd else "does not work"),
    ]
    rows += _network_rows(facts)
    rows += [Row("environment", name, value) for name, value in facts.environ.items()]
    return rows


def render(rows: Sequence[Row], problems: Sequence[Problem], heap: Heap) -> str:
    width = max(len(row.name) for row in rows)
    lines: list[str] = []
    for section, group in itertools.groupby(rows, key=lambda row: row.section):
        lines += [section, *(f"  {row.name:<{width}}  {row.value}".rstrip() for row in group), ""]
    lines += [f"heap: {heap.name or 'none'} ({heap.why})", ""]
    for problem in problems:
        lines += [f"problem: {problem.what}", f"   mend: {problem.remedy}"]
    if not problems:
        lines.append("no problems found")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = once.Parser(
        prog="python -m fluxlike doctor",
        description="Says what this machine has, which heap fluxlike would use, and what to mend.",
        epilog="Exit status: 0 if fluxlike can run here, on GPUs or on the CPU; 1 if it cannot.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object: rows, problems, heap")
    asked = parser.parse_args(argv)
    with once.ends_what_it_began():  # a child tries the imports, of which one may hang
        facts, failures = collect()
    rows, heap, problems = describe(facts), choose_heap(facts), diagnose(facts)
    for failure in failures:
        problems.append(Problem(f"doctor itself: {failure}", "Report it as a bug of fluxlike, with this output."))
    if asked.json:
        parts = {"rows": [asdict(row) for row in rows], "problems": [asdict(problem) for problem in problems]}
        print(json.dumps(parts | {"heap": asdict(heap)}, indent=1))
    else:
        print(render(rows, problems, heap))
    return 0 if heap.name else 1

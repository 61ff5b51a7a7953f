"""How the GPUs of this machine are linked, by sources that check each other.

Three are asked: torch's DMA connectivity (NVLinks for each pair), NVML (each link of each GPU: is it up, where does it lead), and
CUDA's peer access. No one is trusted: CUDA 9.2 gave every pair the rank of PCIe, torch counts links that are down, and both count
links between GPUs that may not reach each other. Where they disagree the weaker counts, and the matrix' notes say so; peer access
has the last word. `look` asks, `merge` judges; only `look` needs a GPU.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..runtime.wording import counted
from .matrix import NVLINK, PCIE, LinkMatrix

#: NVML's number of an NVLink version: GB/s of a link in one direction.
RATES = {1: 20.0, 2: 25.0, 3: 25.0, 4: 25.0, 5: 25.0, 6: 25.0, 7: 50.0}
REMEDY = "name a topology by FLUXLIKE_TOPOLOGY"


class Wire(NamedTuple):
    """A link of a GPU that is up. ``peer``: the GPU at its other end, None for a switch and for what is not visible."""

    switch: bool
    peer: int | None
    version: int


@dataclass
class Found:
    """What each source said of n GPUs; None where it could not be asked, for which ``failures`` has the reason."""

    n: int
    peers: list[list[bool]]
    counts: list[list[int]] | None = None
    wires: list[list[Wire]] | None = None
    name: str = ""
    failures: list[str] = field(default_factory=list)


def detect(remedy: str = REMEDY) -> LinkMatrix:
    """The links of the GPUs that CUDA shows this process. RuntimeError if there are none, or none that can be looked at.

    ``remedy``: what the caller can do without GPUs, for that error.
    """
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available() or not torch.cuda.device_count():
        raise RuntimeError(f"torch sees no CUDA GPU, so there are no links to detect; {remedy}")
    return merge(look(torch, lambda: importlib.import_module("cuda.bindings.nvml")))


# asking


def look(torch: Any, load_nvml: Callable[[], Any]) -> Found:
    """Ask all sources. ``load_nvml`` returns the module cuda.bindings.nvml or raises."""
    n = torch.cuda.device_count()
    peers = [[i == j or bool(torch.cuda.can_device_access_peer(i, j)) for j in range(n)] for i in range(n)]
    found = Found(n, peers, name=f"{n} × {torch.cuda.get_device_name(0)}")
    try:
        found.counts = _torch_counts(torch, n)
    except Exception as error:  # a private function of torch: whatever it does, the others can still answer
        found.failures.append(f"torch's DMA connectivity cannot be asked ({type(error).__name__}: {error})")
    try:
        uuids = [f"GPU-{str(torch.cuda.get_device_properties(i).uuid).removeprefix('GPU-')}" for i in range(n)]
        found.wires = _nvml_wires(load_nvml(), uuids)
    except Exception as error:  # no driver library, no such function, no permission
        found.failures.append(f"NVML cannot be asked ({type(error).__name__}: {error})")
    return found


def _torch_counts(torch: Any, n: int) -> list[list[int]]:
    cuda = torch._C._autograd.DeviceType.CUDA
    matrix = torch._C._distributed_c10d._detect_dma_connectivity(cuda, "nvlink").matrix
    if [len(row) for row in matrix] != [n] * n:
        raise ValueError(f"it knows {counted(len(matrix), 'GPU')}, and CUDA shows {n}")
    return [list(map(int, row)) for row in matrix]


def _nvml_wires(nvml: Any, uuids: Sequence[str]) -> list[list[Wire]]:
    """The links of each GPU. GPUs are found by UUID, since NVML numbers them in its own way."""
    nvml.init_v2()
    try:
        handles = [nvml.device_get_handle_by_uuid(uuid) for uuid in uuids]
        where = {_bus(nvml.device_get_pci_info_v3(handle)): i for i, handle in enumerate(handles)}
        return [_wires(nvml, handle, where) for handle in handles]
    finally:
        nvml.shutdown()


def _wires(nvml: Any, handle: Any, where: dict[str, int]) -> list[Wire]:
    wires = []
    for link in range(nvml.NVLINK_MAX_LINKS):
        try:
            up = nvml.device_get_nvlink_state(handle, link) == nvml.EnableState.ENABLED
        except nvml.NvmlError:
            up = False  # the GPU has no link of this number
        if not up:
            continue
        try:
            remote = nvml.device_get_nvlink_remote_device_type(handle, link)
            switch = remote == nvml.IntNvLinkDeviceType.SWITCH
            version = int(nvml.device_get_nvlink_version(handle, link))
            known = not switch and remote == nvml.IntNvLinkDeviceType.GPU
            peer = where.get(_bus(nvml.device_get_nvlink_remote_pci_info_v2(handle, link))) if known else None
        except nvml.NvmlError:
            switch, peer, version = False, None, 0  # up, and nobody says where it leads: it leads nowhere
        wires.append(Wire(switch, peer, version))
    return wires


def _bus(info: Any) -> str:
    """Domain, bus and device: NVML writes the domain with four or with eight digits."""
    text = info.bus_id.decode() if isinstance(info.bus_id, bytes) else str(info.bus_id)
    domain, bus, device = text.rstrip("\0").rsplit(":", 2)
    return f"{int(domain, 16):x}:{int(bus, 16):x}:{device.lower()}"


# judging


def merge(found: Found) -> LinkMatrix:
    """The weakest of what the sources said, and notes on what they disagree on."""
    n = found.n
    notes = [f"{failure}; the links are those that the others see" for failure in found.failures]
    if found.counts is None and found.wires is None:
        notes.append("no source counts NVLinks: pairs with peer access are taken for PCIe")
    told = [_pairs(count, n) for count in (found.counts, _counted(found.wires)) if count is not None]
    rates, unknown = _rates(found.wires, n)
    if unknown:
        notes.append(f"NVLinks of version {unknown} by NVML's numbers are counted as {NVLINK:g} GB/s")
    switched = _switched(found, told, notes)
    bandwidth = [[0.0] * n for _ in range(n)]
    kind = [[""] * n for _ in range(n)]
    disputes: dict[str, list[str]] = {}
    for i in range(n):
        for j in range(i):
            links = min((count[i][j] for count in told), default=0)
            counts = [count[i][j] for count in told]
            reached = found.peers[i][j] and found.peers[j][i]
            if len(set(counts)) > 1:
                dispute = f"torch counts {counts[0]} NVLinks and NVML {counts[1]}; {links} are taken"
                disputes.setdefault(dispute, []).append(f"{j}-{i}")
            if any(counts) and not reached:
                disputes.setdefault("NVLinks and no peer access; taken for paths through the host", []).append(f"{j}-{i}")
            if not reached:
                what, rate = "host", PCIE
            elif links:
                what, rate = ("nvswitch" if switched[i] and switched[j] else "nvlink"), links * min(rates[i], rates[j])
            else:
                what, rate = "pcie", PCIE
            bandwidth[i][j] = bandwidth[j][i] = rate
            kind[i][j] = kind[j][i] = what
    notes += [f"GPUs {', '.join(pairs)}: {what}" for what, pairs in disputes.items()]
    return LinkMatrix(tuple(map(tuple, bandwidth)), tuple(map(tuple, kind)), name=found.name, notes=tuple(notes))


def _counted(wires: list[list[Wire]] | None) -> list[list[int]] | None:
    """NVLinks for each pair: those that lead to the other, and the lesser of both's links to switches."""
    if wires is None:
        return None
    direct = [[sum(wire.peer == j for wire in mine) for j in range(len(wires))] for mine in wires]
    switch = [sum(wire.switch for wire in mine) for mine in wires]
    return [[direct[i][j] + min(switch[i], switch[j]) for j in range(len(wires))] for i in range(len(wires))]


def _pairs(count: list[list[int]], n: int) -> list[list[int]]:
    return [[min(count[i][j], count[j][i]) if i != j else 0 for j in range(n)] for i in range(n)]


def _rates(wires: list[list[Wire]] | None, n: int) -> tuple[list[float], list[int]]:
    """GB/s of each GPU's slowest link, and the versions that are not known."""
    versions = [{wire.version for wire in mine if wire.switch or wire.peer is not None} for mine in wires or [[]] * n]
    unknown = sorted(set().union(*versions) - set(RATES))
    return [min((RATES.get(version, NVLINK) for version in mine), default=NVLINK) for mine in versions], unknown


def _switched(found: Found, told: list[list[list[int]]], notes: list[str]) -> list[bool]:
    """For each GPU, whether its links lead to switches, where they share what the GPU has."""
    if found.wires is not None:
        return [any(wire.switch for wire in mine) for mine in found.wires]
    alike = bool(told) and found.n > 2 and len({told[0][i][j] for i in range(found.n) for j in range(i)} - {0}) == 1
    alike = alike and all(told[0][i][j] for i in range(found.n) for j in range(i))
    if alike:
        notes.append("all pairs have as many NVLinks, and only NVML could tell a switch from wires: taken for a switch, the weaker")
    return [alike] * found.n

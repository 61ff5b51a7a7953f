"""Machines by name. Facts about p3.16xlarge are those of MXNet; the others are made from what their makers publish."""

import re
from collections.abc import Callable, Iterable

from .matrix import NVLINK, PCIE, LinkMatrix

P3 = ("02233111", "20321311", "23031121", "32301112", "31110223", "13112032", "11212303", "11123230")
#: GB/s in one direction that a GPU has to the switches: 18 NVLinks 4.
NVSWITCH = 18 * NVLINK


def _codes(rows: Iterable[str]) -> list[list[int]]:
    return [[int(code) for code in row] for row in rows]


def _p3(name: str) -> LinkMatrix:
    return LinkMatrix.from_array(_codes(P3), name)


def _p3_8xlarge(name: str) -> LinkMatrix:
    return LinkMatrix.from_array(_codes(row[:4] for row in P3[:4]), name)


def _flat(name: str) -> LinkMatrix:
    """CUDA 9.2 gives every pair the rank of PCIe: MXNet then takes a link for every pair with peer access."""
    return LinkMatrix.from_array([[min(code, 2) for code in row] for row in _codes(P3)], name)


def _lost(name: str) -> LinkMatrix:
    """CUDA 9.2's ranks as they are."""
    return LinkMatrix.from_array([[min(code, 1) for code in row] for row in _codes(P3)], name)


def _without(a: int, b: int, links: int) -> Callable[[str], LinkMatrix]:
    def make(name: str) -> LinkMatrix:
        codes = _codes(P3)
        codes[a][b] = codes[b][a] = codes[a][b] - links
        return LinkMatrix.from_array(codes, name)

    return make


def _joined(n: int, edges: Iterable[tuple[int, int]], name: str) -> LinkMatrix:
    """Single NVLinks at the edges, the host for all other pairs."""
    codes = [[int(i != j) for j in range(n)] for i in range(n)]
    for i, j in edges:
        codes[i][j] = codes[j][i] = 2
    return LinkMatrix.from_array(codes, name)


def _ring(n: int, name: str) -> LinkMatrix:
    return _joined(n, [(i, (i + 1) % n) for i in range(n)], name)


def _misdetected_ring(name: str) -> LinkMatrix:
    """The ring of 8 that MXNet found on a machine of gluon-nlp's issue 520, where it then ended the process."""
    return _joined(8, [(0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)], name)


def _pcie_4_4(name: str) -> LinkMatrix:
    """Two switches with four GPUs each, peer access within a switch only."""
    bandwidth = [[PCIE * (i != j) for j in range(8)] for i in range(8)]
    kind = [["" if i == j else "pcie" if i // 4 == j // 4 else "host" for j in range(8)] for i in range(8)]
    return LinkMatrix(tuple(map(tuple, bandwidth)), tuple(map(tuple, kind)), name=name)


def _mesh(n: int, links: int, name: str) -> LinkMatrix:
    return LinkMatrix(tuple(tuple(links * NVLINK * (i != j) for j in range(n)) for i in range(n)), name=name)


def _nvswitch(n: int, name: str) -> LinkMatrix:
    bandwidth = tuple(tuple(NVSWITCH * (i != j) for j in range(n)) for i in range(n))
    kind = tuple(tuple("nvswitch" if i != j else "" for j in range(n)) for i in range(n))
    return LinkMatrix(bandwidth, kind, name=name)


_MAKERS: dict[str, Callable[[str], LinkMatrix]] = {
    "p3.16xlarge": _p3,
    "p3.16xlarge-cuda9.2": _flat,
    "p3.16xlarge-cuda9.2-raw": _lost,
    "p3.8xlarge": _p3_8xlarge,
    "dgx-1-dead-link": _without(0, 1, 1),
    "dgx-1-half-link": _without(0, 3, 1),
    "nvswitch-4": lambda name: _nvswitch(4, name),
    "nvswitch-8": lambda name: _nvswitch(8, name),
    "nvswitch-16": lambda name: _nvswitch(16, name),
    "mesh-4": lambda name: _mesh(4, 4, name),
    "pcie-4+4": _pcie_4_4,
    "ring-8": _misdetected_ring,
}
#: The presets that are listed, and how those are called that work for other numbers, too.
NAMES = tuple(_MAKERS)
NUMBERED = ("nvswitch-1 to nvswitch-999", "ring-3 to ring-999")
_NUMBERED: dict[str, Callable[[int, str], LinkMatrix]] = {"nvswitch": _nvswitch, "ring": _ring}


def make(name: str) -> LinkMatrix:
    """The preset with this name; ValueError if there is none."""
    if isinstance(name, str) and name in _MAKERS:
        return _MAKERS[name](name)
    numbered = re.fullmatch(r"(nvswitch|ring)-([1-9]\d{0,2})", name) if isinstance(name, str) else None
    if numbered is None or (numbered[1] == "ring" and int(numbered[2]) < 3):
        known = ", ".join((*NAMES, *NUMBERED))
        raise ValueError(f"no topology is called {name!r}; there are {known}, and files whose names end in .json")
    return _NUMBERED[numbered[1]](int(numbered[2]), name)

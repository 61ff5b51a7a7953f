"""How the GPUs of a host are linked: the input of the planner. Standard library only."""

import json
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..runtime import env, files
from ..runtime.wording import counted

#: Fastest first; a plan uses a kind only where the kinds in front of it do not connect all GPUs.
#: "nvlink" and "nvswitch": wires between two GPUs, wires to a switch. "pcie": peer access without NVLink. "host": through the
#: memory of the host.
KINDS = ("nvlink", "nvswitch", "pcie", "host")
#: GB/s in one direction: of one NVLink 2, 3 or 4, of PCIe 3 x16 with what goes through the host. The second is the one measured
#: by the authors of MXNet's trees on p3.16xlarge.
NVLINK = 25.0
PCIE = 10.0
MAX_GPUS = 1024
MAX_BYTES = 1 << 22
#: GB/s that a link can have, a million times more and less than today's.
SLOWEST, FASTEST = 1e-3, 1e6


@dataclass(frozen=True)
class LinkMatrix:
    """GB/s in one direction between every two of n GPUs, all symmetric.

    ``bandwidth``: [n][n], 0 where there is no link and on the diagonal. ``kind``: [n][n] of `KINDS`, "" where there is no link; by
    default "nvlink". ``port``: [n], what a GPU can send to all others at once; by default the sum of its NVLinks, the fastest of
    its paths over a switch, and the fastest over PCIe or the host. ``unit``: GB/s that count as one link; by default those of the
    slowest NVLink, else PCIe, else path through the host. ``notes``: what a reader must know of where this comes from.

    Raises ValueError for what is no such matrix.
    """

    bandwidth: tuple[tuple[float, ...], ...]
    kind: tuple[tuple[str, ...], ...] = ()
    port: tuple[float, ...] = ()
    unit: float = 0.0
    name: str = ""
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "bandwidth", _square(self.bandwidth, "bandwidth", _check_rate))
        try:
            put(self, "kind", _kinds(self.kind, self.bandwidth))
            put(self, "port", _ports(self.port, self.bandwidth, self.kind))
            put(self, "unit", _unit(self.unit, self.bandwidth, self.kind))
            put(self, "notes", tuple(map(str, self.notes)))
        except TypeError as error:
            raise ValueError(f"kind has rows of names, port is a list of numbers, and unit is one: {error}") from error
        put(self, "name", str(self.name))

    def __len__(self) -> int:
        """The number of GPUs."""
        return len(self.bandwidth)

    @classmethod
    def from_array(cls, codes: Sequence[Sequence[int]], name: str = "") -> "LinkMatrix":
        """A matrix out of codes: 0 for a GPU with itself or without a link, 1 for a path through the host, 2 for one NVLink, 3 for
        two.

        These are MXNet's, CUDA's performance rank plus one. ValueError for other codes, and for an array that is not square,
        not symmetric, or not 0 on the diagonal.
        """
        square = _square(codes, "codes", _check_code)
        bandwidth = tuple(tuple((0.0, PCIE, NVLINK, 2 * NVLINK)[int(code)] for code in row) for row in square)
        kind = tuple(tuple(("", "host", "nvlink", "nvlink")[int(code)] for code in row) for row in square)
        linked = any(code > 1 for row in square for code in row)
        return cls(bandwidth, kind, unit=NVLINK if linked else PCIE, name=name)

    @classmethod
    def preset(cls, name: str) -> "LinkMatrix":
        """A matrix by name, such as "p3.16xlarge" or "nvswitch-8"; `presets.NAMES` lists them. ValueError for others."""
        from . import presets

        return presets.make(name)

    @classmethod
    def from_file(cls, path: str | Path) -> "LinkMatrix":
        """What `save` wrote, or a JSON object with "codes" in place of "bandwidth".

        ValueError if it is neither, OSError if it cannot be read.
        """
        where = Path(path)
        try:
            return cls._from_json(json.loads(files.read(where, MAX_BYTES)), where.stem)
        except (ValueError, RecursionError) as error:
            reason = "it nests too deep" if isinstance(error, RecursionError) else error
            raise ValueError(f"{where} is no link matrix: {reason}; docs/topology.md says what belongs in one") from error

    @classmethod
    def _from_json(cls, data: Any, name: str) -> "LinkMatrix":
        if not isinstance(data, dict) or ("codes" in data) == ("bandwidth" in data):
            raise ValueError('it must be a JSON object with either "bandwidth" or "codes"')
        strange = sorted(set(data) - {"name", "codes", "bandwidth", "kind", "port", "unit", "notes"})
        if strange or ("codes" in data and {"kind", "port", "unit"} & set(data)):
            raise ValueError(f"{strange or ['kind', 'port', 'unit']} do not belong here")
        for key in set(data) - {"name", "unit"}:
            if not isinstance(data[key], list):
                raise ValueError(f"{key} is {data[key]!r}, not a list")
        name = str(data.get("name", name))
        if "codes" in data:
            return replace(cls.from_array(data["codes"], name), notes=tuple(data.get("notes", ())))
        rest = {key: tuple(data[key]) for key in ("kind", "port", "notes") if key in data}
        return cls(data["bandwidth"], unit=data.get("unit", 0.0), name=name, **rest)

    @classmethod
    def detect(cls) -> "LinkMatrix":
        """The GPUs that CUDA shows this process; its notes say what the sources disagree on. RuntimeError without GPUs."""
        from . import detect

        return detect.detect()

    def as_json(self) -> dict[str, Any]:
        """Plain data, as a file of FLUXLIKE_TOPOLOGY has it; `from_file` reads it."""
        return {
            "name": self.name,
            "bandwidth": [list(row) for row in self.bandwidth],
            "kind": [list(row) for row in self.kind],
            "port": list(self.port),
            "unit": self.unit,
            "notes": list(self.notes),
        }

    def save(self, path: str | Path) -> None:
        """Write it as JSON, a row a line, for `from_file` and FLUXLIKE_TOPOLOGY."""
        rows = {key: value for key, value in self.as_json().items() if key in ("bandwidth", "kind")}
        parts = [f' "{key}": [\n  ' + ",\n  ".join(json.dumps(row) for row in value) + "\n ]" for key, value in rows.items()]
        parts += [f' "{key}": {json.dumps(value)}' for key, value in self.as_json().items() if key not in rows]
        Path(path).write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")

    def relabelled(self, order: Sequence[int]) -> "LinkMatrix":
        """The same machine with GPU ``order[i]`` as number i. ValueError unless each is there once."""
        part = self.part(order)
        if len(part) != len(self):
            raise ValueError(f"order {list(order)} does not name each of the {len(self)} GPUs once")
        return part

    def part(self, order: Sequence[int]) -> "LinkMatrix":
        """Some of the GPUs, ``order[i]`` as number i, and the links between them. ValueError for a number that is none of one, or
        comes twice."""
        try:
            order = [operator.index(number) for number in order]
        except TypeError as error:
            raise ValueError(f"order {order!r} is no list of numbers of GPUs: {error}") from error
        if not order or len(set(order)) < len(order) or not set(order) <= set(range(len(self))):
            raise ValueError(f"order {order} must name different GPUs, of 0 to {len(self) - 1}")
        bandwidth = tuple(tuple(self.bandwidth[i][j] for j in order) for i in order)
        kind = tuple(tuple(self.kind[i][j] for j in order) for i in order)
        port = tuple(min(self.port[i], FASTEST * len(order)) for i in order)  # among fewer, a smaller one is no limit either
        return replace(self, bandwidth=bandwidth, kind=kind, port=port)


def named() -> LinkMatrix | None:
    """The matrix that FLUXLIKE_TOPOLOGY names, None where it is not set. ValueError if it names nothing."""
    name = env.get("FLUXLIKE_TOPOLOGY")
    try:
        return load(name) if name else None
    except ValueError as error:
        raise ValueError(f"FLUXLIKE_TOPOLOGY={name!r}: {error}") from error


def current(size: int | None = None) -> LinkMatrix:
    """The matrix to plan for: the preset or file that FLUXLIKE_TOPOLOGY names, else that of this machine's GPUs.

    ``size``: how many GPUs it must have. ValueError if it has another number, or if the variable names nothing; RuntimeError if
    there is neither a variable nor a GPU.
    """
    matrix = named() or LinkMatrix.detect()
    if size is not None and len(matrix) != size:
        name = env.get("FLUXLIKE_TOPOLOGY")
        what = f"FLUXLIKE_TOPOLOGY={name!r}" if name else "this machine"
        has = f"{what} has {counted(len(matrix), 'GPU')} for {counted(size, 'rank')}"
        raise ValueError(f"{has}; name a topology of as many GPUs by FLUXLIKE_TOPOLOGY")
    return matrix


def names_file(name: str) -> bool:
    """Whether `load` takes ``name`` for a file, and not for a preset."""
    return name.endswith(".json") or "/" in name


def load(name: str) -> LinkMatrix:
    """A preset, or a file, by name; whatever ends in .json or has a slash is a file. ValueError if it is neither."""
    if names_file(name):
        try:
            return LinkMatrix.from_file(name)
        except OSError as error:
            raise ValueError(f"the topology {name!r} cannot be read: {error.strerror}; name a JSON file or a preset") from error
    return LinkMatrix.preset(name)


def _square(rows: Any, what: str, check: Callable[[float, str], None]) -> tuple[tuple[float, ...], ...]:
    """The rows as floats, if they are a symmetric square with nothing on the diagonal and ``check`` of each raises nothing."""
    try:
        square = tuple(tuple(_number(cell) for cell in row) for row in rows)
    except TypeError as error:
        raise ValueError(f"{what} is no list of rows of numbers: {error}") from error
    n = len(square)
    if not 1 <= n <= MAX_GPUS:
        raise ValueError(f"{what} has {counted(n, 'row')}; a machine has 1 to {MAX_GPUS} GPUs")
    for i, row in enumerate(square):
        if len(row) != n:
            entries = counted(len(row), "entry", "entries")
            raise ValueError(f"{what} has {counted(n, 'row')}, and {entries} in row {i}; it must be a square")
        for j, cell in enumerate(row):
            check(cell, f"{what}[{i}][{j}]")
            if i == j and cell:
                raise ValueError(f"{what}[{i}][{i}] is {cell:g}; a GPU has no link to itself, so write 0")
    for i in range(n):
        for j in range(i):
            if square[i][j] != square[j][i]:
                raise ValueError(f"{what}[{i}][{j}] is {square[i][j]:g} and [{j}][{i}] is {square[j][i]:g}; links go both ways")
    return square


def _number(cell: Any) -> float:
    if isinstance(cell, (str, bytes, bool)) or cell is None:
        raise TypeError(f"{cell!r} is no number")
    try:
        return float(cell)
    except OverflowError:  # a whole number of hundreds of digits
        return math.inf if cell > 0 else -math.inf


def _check_code(code: float, what: str) -> None:
    if code not in (0, 1, 2, 3):
        raise ValueError(f"{what} is {code:g}, which is none of 0, 1, 2, 3; give GB/s as LinkMatrix(bandwidth)")


def _check_rate(rate: float, what: str, most: float = FASTEST) -> None:
    if not (rate == 0 or SLOWEST <= rate <= most):
        raise ValueError(f"{what} is {rate:g}; it must be 0, or GB/s from {SLOWEST:g} to {most:g}")


def _kinds(rows: Any, bandwidth: tuple[tuple[float, ...], ...]) -> tuple[tuple[str, ...], ...]:
    n = len(bandwidth)
    kind = () if rows is None else tuple(map(tuple, rows))  # an array is neither true nor false
    if not kind:
        return tuple(tuple("nvlink" if cell else "" for cell in row) for row in bandwidth)
    if [len(row) for row in kind] != [n] * n:
        raise ValueError(f"kind has rows of {[len(row) for row in kind]} entries; it must be a square of {n}, as bandwidth is")
    for i in range(n):
        for j in range(n):
            known = kind[i][j] in KINDS if bandwidth[i][j] else kind[i][j] == ""
            if not known or kind[i][j] != kind[j][i]:
                rule = f"one of {', '.join(KINDS)}" if bandwidth[i][j] else '"", as there is no link'
                raise ValueError(f"kind[{i}][{j}] is {kind[i][j]!r}; it must be {rule}, and the same both ways")
    return kind


def _ports(given: Any, bandwidth: tuple[tuple[float, ...], ...], kind: tuple[tuple[str, ...], ...]) -> tuple[float, ...]:
    port = () if given is None else tuple(map(_number, given))  # as above
    if port:
        if len(port) != len(bandwidth):
            raise ValueError(f"port is {list(port)}; it must have {len(bandwidth)} numbers, 0 or more")
        for i, row in enumerate(bandwidth):
            _check_rate(port[i], f"port[{i}]", FASTEST * len(port))
            if any(row) and not port[i]:
                raise ValueError(f"port[{i}] is 0, and GPU {i} has links; write what it can send at once")
        return port
    ports = []
    for rates, kinds in zip(bandwidth, kind, strict=True):
        of = {name: [r for r, k in zip(rates, kinds, strict=True) if k == name] for name in KINDS}
        ports.append(sum(of["nvlink"]) + max(of["nvswitch"], default=0.0) + max(of["pcie"] + of["host"], default=0.0))
    return tuple(ports)


def _unit(given: Any, bandwidth: tuple[tuple[float, ...], ...], kind: tuple[tuple[str, ...], ...]) -> float:
    unit = _number(given)
    _check_rate(unit, "unit")
    pairs = [pair for kinds, rates in zip(kind, bandwidth, strict=True) for pair in zip(kinds, rates, strict=True)]
    wires = [rate for what, rate in pairs if what.startswith("nv")]
    peers, host = ([rate for what, rate in pairs if what == name] for name in ("pcie", "host"))
    return unit or min(wires or peers or host, default=1.0)

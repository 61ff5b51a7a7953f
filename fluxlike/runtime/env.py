"""The one table of fluxlike's environment variables; nothing else in the package reads ``os.environ`` for its own settings."""

import difflib
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Variable:
    name: str
    default: str
    help: str


TABLE = (
    Variable("FLUXLIKE_TIMEOUT_S", "120", "seconds that any wait for another rank may last"),
    Variable("FLUXLIKE_HEAP_BYTES", "", "size of the symmetric heap of each rank, as 512M or 4G; init(heap_bytes=) wins"),
    Variable("FLUXLIKE_CPU_PROGRAMS", "2", "programs of a kernel's grid on the CPU heap"),
    Variable("FLUXLIKE_RACECHECK", "0", "1 checks every access to the CPU heap for races, see docs/racecheck.md"),
    Variable("FLUXLIKE_TUNE", "cached", "where schedules and tiles come from: off, cached or on, see docs/tune.md"),
    Variable("FLUXLIKE_TORCH_PRODUCTS", "1", "0 keeps schedule auto to fluxlike's own kernels, see docs/tune.md"),
    Variable("FLUXLIKE_CACHE_DIR", "", "where tuned choices are kept; default $XDG_CACHE_HOME/fluxlike, else ~/.cache/fluxlike"),
    Variable("FLUXLIKE_TOPOLOGY", "", "how the GPUs are linked: a preset or a JSON file, see docs/topology.md; default: detected"),
    Variable("FLUXLIKE_TREE_ARRAY_BOUND", "10000000", "elements up to which one tree carries a whole array, see docs/topology.md"),
    Variable("FLUXLIKE_RANKS_PER_GPU", "1", "ranks that share a GPU, to run more ranks than there are GPUs, see docs/one_gpu.md"),
    Variable("FLUXLIKE_VIRTUAL_NODES", "1", "splits the ranks of a host into so many nodes, see docs/nodes.md"),
    Variable("FLUXLIKE_PUTS", "auto", "who puts to other nodes' GPUs: host, device or auto, see docs/nodes.md"),
    Variable("FLUXLIKE_LOG", "", "level of the logger 'fluxlike', as INFO; default: what the program has set, else WARNING"),
)
#: Those of the scripts and of the tests, which the package never reads.
ELSEWHERE = ("FLUXLIKE_PYTHON", "FLUXLIKE_TEST_FUZZ", "FLUXLIKE_TEST_HEAP", "FLUXLIKE_TEST_SLOW", "FLUXLIKE_TEST_TRITON")
PREFIX = "FLUXLIKE_"
_BY_NAME = {variable.name: variable for variable in TABLE}


def get(name: str) -> str:
    """Value of a variable of the table, or its default."""
    return os.environ.get(name) or _BY_NAME[name].default


def put(name: str, value: str) -> None:
    """Set a variable of the table, for this process and those that it starts."""
    os.environ[_BY_NAME[name].name] = value


def default_timeout_s() -> float:
    """FLUXLIKE_TIMEOUT_S of one who has not set it."""
    return float(_BY_NAME["FLUXLIKE_TIMEOUT_S"].default)


def timeout_s() -> float:
    """FLUXLIKE_TIMEOUT_S, checked."""
    text = get("FLUXLIKE_TIMEOUT_S")
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e6:
        default = _BY_NAME["FLUXLIKE_TIMEOUT_S"].default
        raise ValueError(f"FLUXLIKE_TIMEOUT_S={text!r} is no number of seconds above 0 and below 1000000; unset it for {default}")
    return value


def cpu_programs() -> int:
    """FLUXLIKE_CPU_PROGRAMS, checked."""
    text = get("FLUXLIKE_CPU_PROGRAMS")
    if not text.isdecimal() or not 1 <= int(text) <= 64:
        raise ValueError(f"FLUXLIKE_CPU_PROGRAMS={text!r} is not a whole number from 1 to 64; unset it for 2")
    return int(text)


def _switch(name: str) -> bool:
    text = get(name)
    if text not in ("0", "1"):
        raise ValueError(f"{name}={text!r} is neither 0 nor 1; unset it for {_BY_NAME[name].default}")
    return text == "1"


def racecheck() -> bool:
    """FLUXLIKE_RACECHECK, checked."""
    return _switch("FLUXLIKE_RACECHECK")


def torch_products() -> bool:
    """FLUXLIKE_TORCH_PRODUCTS, checked."""
    return _switch("FLUXLIKE_TORCH_PRODUCTS")


def _count(name: str) -> int:
    text = get(name)
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{name}={text!r} is not a whole number above 0; unset it for {_BY_NAME[name].default}")
    return int(text)


def tune() -> str:
    """FLUXLIKE_TUNE, checked: "off", "cached" or "on"."""
    text = get("FLUXLIKE_TUNE")
    if text not in ("off", "cached", "on"):
        raise ValueError(f"FLUXLIKE_TUNE={text!r} is not one of off, cached, on; unset it for cached")
    return text


def puts() -> str:
    """FLUXLIKE_PUTS, checked: "host", "device" or "auto"."""
    text = get("FLUXLIKE_PUTS")
    if text not in ("host", "device", "auto"):
        raise ValueError(f"FLUXLIKE_PUTS={text!r} is not one of host, device, auto; unset it for auto")
    return text


def log_level() -> str | None:
    """FLUXLIKE_LOG, checked, or None when it is not set: then the program's own level holds."""
    text, levels = get("FLUXLIKE_LOG"), ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
    if text and text not in levels:
        raise ValueError(f"FLUXLIKE_LOG={text!r} is not one of {', '.join(levels)}; unset it for WARNING")
    return text or None


def tree_array_bound() -> int:
    """FLUXLIKE_TREE_ARRAY_BOUND, checked."""
    text = get("FLUXLIKE_TREE_ARRAY_BOUND")
    if not text.isdecimal():
        raise ValueError(f"FLUXLIKE_TREE_ARRAY_BOUND={text!r} is not a number of elements, 0 or more; unset it for 10000000")
    return int(text)


def virtual_nodes() -> int:
    """FLUXLIKE_VIRTUAL_NODES, checked."""
    return _count("FLUXLIKE_VIRTUAL_NODES")


def ranks_per_gpu() -> int:
    """FLUXLIKE_RANKS_PER_GPU, checked."""
    return _count("FLUXLIKE_RANKS_PER_GPU")


def cache_dir() -> Path:
    """FLUXLIKE_CACHE_DIR, or where the XDG rules put it; for a user without a home a place where nothing can be."""
    text = get("FLUXLIKE_CACHE_DIR")
    if text:
        return Path(text).absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # XDG: those do not count
        base = os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base if os.path.isabs(base) else os.devnull) / "fluxlike"


def heap_bytes() -> int | None:
    """FLUXLIKE_HEAP_BYTES in bytes, or None when it is not set."""
    text = get("FLUXLIKE_HEAP_BYTES").strip()
    if not text:
        return None
    scale = {"K": 10, "M": 20, "G": 30}.get(text[-1].upper(), 0)
    digits = text[:-1] if scale else text
    if not digits.isdecimal() or int(digits) == 0:
        raise ValueError(f"FLUXLIKE_HEAP_BYTES={text!r} is not a size; write bytes, or 64K, 512M, 4G")
    return int(digits) << scale


_CHECKS = (
    timeout_s,
    heap_bytes,
    cpu_programs,
    racecheck,
    tune,
    torch_products,
    tree_array_bound,
    ranks_per_gpu,
    virtual_nodes,
    puts,
    log_level,
)


def check() -> None:
    """ValueError if a variable has a value that it cannot have; FLUXLIKE_TOPOLOGY is looked at by who plans for it."""
    for one in _CHECKS:
        one()


def unknown() -> list[str]:
    """What to say of variables that fluxlike does not have, each with what to do behind its last semicolon."""
    said, known = [], [name[len(PREFIX) :] for name in (*_BY_NAME, *ELSEWHERE)]
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in _BY_NAME and name not in ELSEWHERE:
            near = difflib.get_close_matches(name[len(PREFIX) :], known, 1, 0.55)
            remedy = "unset it: docs/reference.md lists them all"
            if near:
                remedy = f"write {PREFIX}{near[0]} if you mean that, else unset it"
            said.append(f"{name} is no variable of fluxlike; {remedy}")
    return said


def complaints() -> list[str]:
    """What the checks say of this environment, and `unknown`."""
    said = []
    for one in _CHECKS:
        try:
            one()
        except ValueError as error:
            said.append(str(error))
    return said + unknown()

"""Measured choices: tables that come with the package, and those that `python -m fluxlike tune` wrote on the user's machine.

A file is JSON: the machine (GPU, compute capability, multiprocessors), the software (Triton, fluxlike, its kernels) and entries,
each a problem (op, ranks, dtype, M, N, K of the whole problem) with the `Choice` that was fastest. A shipped table holds on any
version of the software: what was measured with older kernels still says more than the model. The user's cache holds on the
software that it was measured with only; it lies in $FLUXLIKE_CACHE_DIR, else $XDG_CACHE_HOME/fluxlike or ~/.cache/fluxlike, and
is written whole or not at all.

What is in a file is not trusted: one that cannot be read or does not belong here is ignored with one warning, as is an entry whose
choice is not one of those that could have been measured. A wrong file can make calls slow, and nothing else. The user's cache is
ignored, too, where others could write it, and is not written there.

All ranks of a context must choose alike, and their files may differ, as may the environment. So rank 0 reads, once, when a
context is made, and sends what it found to the others (`agreed`): calls look into the context's table and never at a file, nor do
they meet on the host. A file that changes later changes contexts that are made later. If the ranks' GPUs differ there is no table.
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from .. import __version__
from ..runtime import env, files
from ..runtime.control import ControlGroup
from . import choice, cost, tiling
from .choice import Choice, Problem, Shape

log = logging.getLogger("fluxlike")

TABLES = Path(__file__).parent / "tables"
KERNELS = Path(__file__).parents[1] / "kernels"
FORMAT = 1
#: No more of a file is read; none of ours has as much.
MAX_BYTES = 4 << 20


@dataclass(frozen=True)
class Machine:
    """What a measurement holds for."""

    gpu: str
    capability: tuple[int, int]
    multiprocessors: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"capability": list(self.capability)}

    @property
    def name(self) -> str:
        """For a file."""
        letters = "".join(c if c.isalnum() else "-" for c in self.gpu.lower())
        return f"{letters[:40]}-{self.multiprocessors}"


@dataclass(frozen=True)
class Entry:
    """A measured choice. ``us``: its time; ``usual_us``: that of the choice without a table, None where not measured."""

    problem: Problem
    choice: Choice
    us: float
    usual_us: float | None = None

    def as_json(self) -> dict[str, Any]:
        p = self.problem
        key = {"op": p.op, "ranks": p.ranks, "dtype": str(p.dtype).removeprefix("torch."), "m": p.m, "n": p.n, "k": p.k}
        return key | {"choice": self.choice.as_json(), "us": self.us, "usual_us": self.usual_us}


@dataclass
class Agreed:
    """What the ranks of a context have in common for choosing."""

    mode: str
    torch_products: bool
    #: Of the GPUs the least, by which tiles and schedules are chosen.
    capability: tuple[int, int]
    multiprocessors: int
    #: Bytes a second from memory.
    memory: float
    table: dict[Shape, Choice]


def machine_of(executor: Any) -> Machine:
    gpu = torch.cuda.get_device_name(executor.device) if executor.device.type == "cuda" else executor.name
    return Machine(gpu, tuple(executor.capability), executor.programs)


@functools.cache
def software() -> dict[str, str]:
    """The versions that a measurement of the user's holds for."""
    digest = hashlib.sha256()
    for path in sorted(KERNELS.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return {"triton": triton.__version__, "fluxlike": __version__, "kernels": digest.hexdigest()[:16]}


def cache_file(machine: Machine) -> Path:
    """The user's file for this machine and software; another one without torch's products, where another choice is the fastest."""
    ours = "" if env.torch_products() else "-ours"
    key = json.dumps([machine.as_json(), software()], sort_keys=True).encode()
    return env.cache_dir() / "tuned" / f"{machine.name}{ours}-{hashlib.sha256(key).hexdigest()[:16]}.json"


# reading


def known(machine: Machine, op: str, dtype: torch.dtype, ranks: int) -> dict[Shape, Choice]:
    """The shipped choices for this machine, with the user's own over them. Reads files; warns of those that are no use."""
    found: dict[Shape, Choice] = {}
    for path in sorted(TABLES.glob("*.json")):
        if _read(path).get("machine") == machine.as_json():
            found |= _choices(path, machine, op, dtype, ranks)
    path = cache_file(machine)
    if os.path.lexists(path):
        found |= _choices(path, machine, op, dtype, ranks, strict=True)
    return found


def _choices(
    path: Path, machine: Machine, op: str, dtype: torch.dtype, ranks: int, strict: bool = False
) -> dict[Shape, Choice]:
    """The file's choices for this op, dtype and number of ranks. ``strict``: it must be of this software, and the user's own."""
    data = _read(path, strict)
    if not data:
        return {}
    if data.get("machine") != machine.as_json() or (strict and data.get("software") != software()):
        _warn(path, "it was measured on another machine or with other software")
        return {}
    found: dict[Shape, Choice] = {}
    bad = []
    for entry in data["entries"]:
        try:
            if (entry["op"], entry["dtype"], entry["ranks"]) != (op, str(dtype).removeprefix("torch."), ranks):
                continue
            problem = Problem(op, machine.capability, machine.multiprocessors, ranks, dtype, *_sizes(entry))
            found[problem.shape] = choice.from_json(entry["choice"], problem)
        except (ValueError, TypeError, LookupError) as wrong:
            bad.append(f"{type(wrong).__name__}: {wrong}"[:200])
    if bad:
        _warn(path, f"{len(bad)} of its {len(data['entries'])} entries are no use here, the first: {bad[0]}", "entries of ")
    return found


def _sizes(entry: Any) -> Shape:
    m, n, k = entry["m"], entry["n"], entry["k"]
    if not all(type(size) is int and 0 < size < 2**31 for size in (m, n, k)):
        raise ValueError(f"M, N, K are {m!r}, {n!r}, {k!r}")
    return m, n, k


def _read(path: Path, private: bool = False) -> dict[str, Any]:
    """What stands in a file, or nothing, with a warning, if that is not a table; ``private``: or may be another user's."""
    try:
        data = json.loads(files.read(path, MAX_BYTES, private))
        if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("entries"), list):
            raise ValueError(f"it is no table of format {FORMAT}")
    except (OSError, ValueError, RecursionError) as wrong:
        _warn(path, f"{type(wrong).__name__}: {wrong}"[:200])
        return {}
    return data


_warned: set[tuple[str, str]] = set()


def _warn(path: Path, why: str, part: str = "") -> None:
    """Once a file and process."""
    if (str(path), part) not in _warned:
        _warned.add((str(path), part))
        log.warning("ignoring %s%s: %s; results do not depend on it, `python -m fluxlike tune` makes a new one", part, path, why)


# agreeing


def agreed(control: ControlGroup, op: str, dtype: torch.dtype, executor: Any) -> Agreed:
    """Rank 0's FLUXLIKE_TUNE and what it read, and every rank's FLUXLIKE_TORCH_PRODUCTS. Collective; for the making of a context.

    The parts of a group on its nodes have it in common: contexts on them are made together, and what they may choose says what
    memory they need.

    Choices of torch's products are left out where those are not wanted. Raises ValueError on all ranks if the environment of one
    is wrong or rank 0 cannot look for its cache, or if the ranks differ in FLUXLIKE_TORCH_PRODUCTS.
    """
    here = machine_of(executor)
    everyone, mode, products, error, found = control.whole, "off", True, "", {}
    try:
        products = env.torch_products()
        if everyone.rank == 0:
            mode = env.tune()
            found = known(here, op, dtype, control.size) if mode != "off" else {}
    except ValueError as wrong:
        error = str(wrong)
    except OSError as wrong:
        error = f"{op}: tuned choices cannot be looked for ({wrong}); set FLUXLIKE_CACHE_DIR to a directory by its absolute path"
    sent = [(list(shape), made.as_json()) for shape, made in found.items() if products or made.transport not in choice.TORCH]
    said = everyone.gather((here.as_json(), mode, error, sent, products), f"{op}: tuned choices")
    for error in (theirs[2] for theirs in said):
        if error:
            raise ValueError(error)
    asked = [int(theirs[4]) for theirs in said]
    if len(set(asked)) > 1:
        raise ValueError(f"{op}: FLUXLIKE_TORCH_PRODUCTS is {asked} on the ranks of the group; set it alike on all of them")
    machine, mode, _, sent, products = said[0]
    table: dict[Shape, Choice] = {}
    if all(theirs[0] == machine for theirs in said):
        for (m, n, k), data in sent:
            problem = Problem(op, here.capability, here.multiprocessors, control.size, dtype, m, n, k, products)
            table[problem.shape] = choice.from_json(data, problem)
    elif mode != "off":
        log.warning("%s: the ranks' GPUs differ (%s), so no tuned choices are used", op, [theirs[0] for theirs in said])
    machines = [theirs[0] for theirs in said]
    # tiles of a GPU with much shared memory do not fit another one, whatever its number
    major, minor = min((tuple(theirs["capability"]) for theirs in machines), key=lambda found: (tiling.is_large(found), found))
    memory = min(cost.memory_rate(theirs["gpu"]) for theirs in machines)
    return Agreed(mode, products, (major, minor), min(theirs["multiprocessors"] for theirs in machines), memory, table)


# writing


def store(machine: Machine, entries: Iterable[Entry], path: Path | None = None, *, anew: bool = False, **about: Any) -> Path:
    """Add entries to the user's cache, or to the file ``path``, in place of older ones for the same problems; ``anew``: in place of
    all older ones. Returns its path. A ``path`` that is a link stays one: what it points to is written.

    Whoever reads meanwhile sees the old file or the new one; two writers of the cache wait for each other, both are heard. A file
    that is no table of this machine and software is replaced. ``about``: what else it shall say. OSError if it cannot be written,
    also where others may write to the cache.
    """
    where = Path(os.path.realpath(path)) if path else cache_file(machine)
    where.parent.mkdir(parents=True, exist_ok=True, mode=0o700 if path is None else 0o777)
    if path is None:
        files.refuse_shared(where.parent)
    with _alone(where) if path is None else contextlib.nullcontext():
        old = _read(where, path is None) if os.path.lexists(where) and not anew else {}
        if old.get("machine") != machine.as_json() or old.get("software") != about.get("software", software()):
            old = {}
        kept = {_key(entry): entry for entry in old.get("entries", []) if isinstance(entry, dict)}
        kept |= {_key(entry): entry for entry in (e.as_json() for e in entries)}
        head = {"format": FORMAT, "machine": machine.as_json(), "software": software()} | about
        lines = ",\n".join(json.dumps(entry) for _, entry in sorted(kept.items()))
        text = json.dumps(head, indent=1)[:-2] + f',\n "entries": [\n{lines}\n ]\n}}\n'
        _replace(where, text, 0o600 if path is None else 0o644)
    return where


def _key(entry: dict[str, Any]) -> tuple[str, ...]:
    return tuple(f"{entry.get(name)!s:>12}" for name in ("op", "dtype", "ranks", "n", "k", "m"))


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One writer at a time, on file systems that have locks; on others the last one is heard."""
    lock = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _replace(path: Path, text: str, mode: int) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(handle)
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise

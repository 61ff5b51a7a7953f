"""What a kernel's source has, from Triton's own IR: the operations with an effect before the compiler could lose them."""

import os
import re
from collections import Counter
from collections.abc import Iterator

from . import stub

#: (kind, (file:line, the caller's file:line)): how often.
Effects = Counter[tuple[str, tuple[str, ...]]]

_KINDS = {"release": "release", "acquire": "acquire", "acq_rel": "arrival", "relaxed": "relaxed atomic"}


def effects(ttir: str) -> Effects:
    """Atomics by their order, volatile loads, and inline assembly by its first instruction, with everything inlined."""
    return Counter((kind, where[:2]) for line, where in _lines(ttir) if (kind := _kind(line)))


def scalars(ttir: str, operation: str) -> set[tuple[str, ...]]:
    """Where the source has a "load" or "store" of single numbers, not of blocks."""
    return {where[:2] for line, where in _lines(ttir) if re.search(rf"\btt\.{operation}\b.* : !tt\.ptr<", line)}


def located(ttir: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each line, and where it comes from, if it says so: file:line, innermost first."""
    places = dict(re.findall(r"^#loc(\d*) = loc\((.*)\)$", ttir, re.MULTILINE))
    for line in ttir.splitlines():
        at = re.search(r"loc\(#loc(\d*)\)\s*$", line)
        yield line, _where(at.group(1), places) if at else ()


def _lines(ttir: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each line that says where it comes from."""
    return ((line, where) for line, where in located(ttir) if where)


def _kind(line: str) -> str | None:
    atomic = re.search(r"\btt\.atomic_\w+ (?:\w+, )?(release|acquire|acq_rel|relaxed)\b", line)
    if atomic:
        return _KINDS[atomic.group(1)]
    called = re.search(r'\btt\.extern_elementwise .*symbol = "(\w+)"', line)
    if called:
        return stub.KINDS.get(called.group(1))
    if re.search(r"\btt\.load\b.*isVolatile = true", line):
        return "volatile load"
    assembly = re.search(r'\btt\.elementwise_inline_asm "\W*(?:\.?reg [^;]*;\W*)*(@\S+\s+)?([a-z][\w.:]*).*pure = false', line)
    return f"asm {assembly.group(2)}" if assembly else None


def _where(number: str, places: dict[str, str]) -> tuple[str, ...]:
    place = places.get(number, "")
    call = re.fullmatch(r"callsite\(#loc(\d*) at #loc(\d*)\)", place)
    if call:
        return _where(call.group(1), places) + _where(call.group(2), places)
    named = re.fullmatch(r'"[^"]*"\(#loc(\d*)\)', place)
    if named:
        return _where(named.group(1), places)
    line = re.match(r'"([^"]*)":(\d+)', place)
    return (f"{os.path.basename(line.group(1))}:{line.group(2)}",) if line else ()


_PASS = ("extsi", "splat", "broadcast", "expand_dims", "muli", "addi", "subi", "minsi", "maxsi", "select")


def narrow_offsets(ttir: str, pitches: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Where a pitch and an index are multiplied in 32 bits; ``pitches``: arguments that are a distance in elements.

    Not counted: a pitch times a constant (a rounding), a pitch divided (a number of tiles).
    """
    derived = {f"%{name}" for name in pitches}
    constants = dict(re.findall(r"(%\w+) = arith\.constant (\S+)", ttir))
    found = []
    for line, where in _lines(ttir):
        parsed = re.match(r"\s*(%\w+) = \w+\.(\w+) (.*?) : (.*?)(?: loc\(|$)", line)
        if parsed is None:
            continue
        result, operation, text, kind = parsed.groups()
        used = re.findall(r"%\w+", text)
        mine = [name for name in used if name in derived]
        others = [name for name in used if name not in mine and name not in constants]
        derived.discard(result)  # beside each other, regions number their values alike
        if not mine:
            continue
        if (operation == "muli" and kind.endswith(("i32", "i32>")) and (others or len(mine) > 1)) or operation == "trunci":
            found.append(where[:2])
        if operation in _PASS or (operation == "divsi" and constants.get(used[1]) == "16"):
            derived.add(result)
    return found


def parameters(ttgir: str) -> list[str]:
    """The source's argument of each PTX parameter, in order; a descriptor has several. The compiler's own are not among them."""
    head = re.search(r"tt\.func public @\w+\((.*)", ttgir)
    return re.findall(r'%[\w.]+: .*?loc\("(\w+)', head.group(1)) if head else []

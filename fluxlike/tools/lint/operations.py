"""What an operation of PTX is, and which memory it is of: what `rules` asks of each."""

import re

from .ptx import Op, Ptx


def is_release(op: Op) -> bool:
    return bool(re.match(r"(atom|red|st|multimem\.red)\b.*\.(release|acq_rel)\b", op.name))


def is_acquire(op: Op) -> bool:
    return bool(re.match(r"(ld|atom)\b.*\.(acquire|acq_rel)\b", op.name))


def is_tma_store(op: Op) -> bool:
    return bool(re.match(r"cp\.(reduce\.)?async\.bulk\b.*\.global\.shared", op.name))


def is_tma_load(op: Op) -> bool:
    return bool(re.match(r"cp\.async\.bulk\b.*\.shared\S*\.global\b", op.name))


def is_global_store(op: Op) -> bool:
    return bool(re.match(r"(st|red|atom|multimem\.\w+)\b.*\.global\b", op.name))


def is_plain_load(op: Op) -> bool:
    """From global memory, also asynchronously into shared memory, but not by TMA and no acquire."""
    return bool(re.match(r"ld\b.*\.global\b|cp\.async\.c[ag]\.", op.name)) and not is_acquire(op)


def is_barrier(op: Op, threads: int) -> bool:
    """A barrier of all the program's threads (with a number of threads it may be one of some)."""
    if not re.match(r"(bar|barrier)(\.cta)?\.(sync|red)\b", op.name):
        return False
    count = op.operands.split(",")[1:2]
    return not count or count[0].strip() == str(threads)


_MMA = {"wgmma": "wgmma.mma", "tcgen05": "tcgen05.mma", "mma.sync": "mma.sync", "fma": "fma.rn.f32"}


def mma_of(op: Op) -> str | None:
    return next((name for name, beginning in _MMA.items() if op.name.startswith(beginning)), None)


def touches(ptx: Ptx, op: Op, arguments: tuple[str, ...]) -> bool:
    """Whether the global address of a load, store or atomic was computed from one of these arguments."""
    if not arguments:
        return False
    return not ptx.touches(global_side(op)).isdisjoint(arguments)


def chooses(ptx: Ptx, op: Op, arguments: tuple[str, ...]) -> bool:
    """Whether the address of a load may also come from another pointer, as a branch or selection has it."""
    return bool((ptx.touches(global_side(op)) & ptx.pointers) - set(arguments))


def adds_nothing(ptx: Ptx, op: Op) -> bool:
    """Whether an atomic leaves the word as it is."""
    if not re.search(r"\.(add|or|xor)\.", op.name):
        return False
    given = op.operands.rsplit(",", 1)[-1].strip()
    made = ptx.definitions.get(given, [])
    zero = all(one.name.startswith("mov.") and re.search(r",\s*0$", one.operands) for one in made)
    return given == "0" or (bool(made) and zero)


def global_side(op: Op) -> str:
    """The global address of an operation; of a TMA load its descriptor."""
    both = re.findall(r"\[([^\[\]]*)\]", op.operands)
    return both[1 if op.name.startswith("cp.async") and len(both) > 1 and not is_tma_store(op) else 0] if both else ""

"""Branches at which the threads of a program may part, in front of a barrier that then is not the same for all of them; and words
that those which are ahead overwrite before the others have read them.

What Triton calls a scalar each thread computes for itself. That is all the same while they compute it from the same numbers. But a
word in memory that others write, read by each thread, and the clock, may differ from warp to warp. An atomic's result does not,
where Triton lets one thread make it and tells the others through shared memory; nor does the result of a reduction over warps.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator

from .ptx import REGISTER, Op, Ptx, has_result, split


def partings(ptx: Ptx, is_barrier: Callable[[Op], bool]) -> Iterator[tuple[Op, Op, Op]]:
    """(branch, what its condition came from, a barrier) where warps may go different ways, one of them over a barrier."""
    if ptx.threads <= 32:
        return  # the threads of a warp read together
    causes = _causes(ptx)
    behind = _postdominators(ptx)
    for number, block in enumerate(ptx.blocks):
        if len(block.next) < 2:
            continue
        branch = block.ops[-1]
        cause = next((causes[name] for name in REGISTER.findall(branch.predicate + branch.operands) if name in causes), None)
        if cause is None:
            continue
        for one in sorted(_between(ptx, number, behind[number])):
            barrier = next(filter(is_barrier, ptx.blocks[one].ops), None)
            if barrier is not None:
                yield branch, cause, barrier
                break


def overtaken(ptx: Ptx, loads: set[Op], stores: set[Op], is_barrier: Callable[[Op], bool]) -> Iterator[tuple[Op, Op]]:
    """(store, load in front of it) without a barrier on some way between them: a warp may store before another has loaded."""
    if ptx.threads <= 32:
        return

    def step(op: Op, state: frozenset[Op]) -> frozenset[Op]:
        return state | {op} if op in loads else frozenset() if is_barrier(op) else state

    nothing: frozenset[Op] = frozenset()
    events = {op.line for op in ptx.ops if op in loads or op in stores or is_barrier(op)}
    for op, state in ptx.flow(nothing, events, step, frozenset.union):
        if op in stores and state:
            yield op, min(state, key=lambda load: load.line)


def _is_own(op: Op) -> bool:
    """Whether each thread gets a value of its own, which the others need not get."""
    if re.match(r"(ld\b.*\.(volatile|relaxed|acquire)|atom)\b", op.name):
        return ".shared" not in op.name
    return bool(re.search(r"%(globaltimer|clock)", op.operands))


def _causes(ptx: Ptx) -> dict[str, Op]:
    """The registers that may differ from warp to warp, and the operation that they come from."""
    causes: dict[str, Op] = {}
    edges: list[tuple[list[str], list[str]]] = []
    versions: Counter[str] = Counter()  # of the registers of an inline assembly, which others have by the same name
    for op in ptx.ops:
        if not has_result(op):
            continue
        result, rest = split(op.operands)
        read = _registers(f"{rest} {op.predicate}", versions)
        versions.update(_OWN.findall(result))
        made = _registers(result, versions)
        if _is_own(op):
            causes |= dict.fromkeys(made, op)
        elif not re.match(r"bar(rier)?\b.*\.red\b|ld\b.*\.shared\b", op.name):  # those are the same for all
            edges.append((made, read))
    changed = True
    while changed:
        changed = False
        for made, read in edges:
            cause = next((causes[name] for name in read if name in causes), None)
            new = [name for name in made if name not in causes]
            if cause is not None and new:
                causes |= dict.fromkeys(new, cause)
                changed = True
    return causes


#: A register that an inline assembly has declared for itself.
_OWN = re.compile(r"(?<![%$\w.])[a-z]\w*\b")


def _registers(operands: str, versions: Counter[str]) -> list[str]:
    return REGISTER.findall(operands) + [f"{name} {versions[name]}" for name in _OWN.findall(operands) if name in versions]


def _postdominators(ptx: Ptx) -> list[int]:
    """Of each block, as bits: the blocks that every way from it to the end of the kernel goes through, itself among them."""
    everything = (1 << len(ptx.blocks)) - 1
    behind = [everything if block.next else 1 << number for number, block in enumerate(ptx.blocks)]
    changed = True
    while changed:
        changed = False
        for number in range(len(ptx.blocks) - 1, -1, -1):
            following = ptx.blocks[number].next
            if following:
                common = everything
                for successor, _ in following:
                    common &= behind[successor]
                common |= 1 << number
                changed |= common != behind[number]
                behind[number] = common
    return behind


def _between(ptx: Ptx, start: int, behind: int) -> set[int]:
    """The blocks on the ways from ``start`` that come before all of them meet again; ``start`` itself if a way leads back to it."""
    found: set[int] = set()
    work = [successor for successor, _ in ptx.blocks[start].next]
    while work:
        number = work.pop()
        if number in found or (behind >> number & 1 and number != start):
            continue
        found.add(number)
        work += [successor for successor, _ in ptx.blocks[number].next]
    return found

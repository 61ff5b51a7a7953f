"""PTX text as a program: its operations, where they come from, in which order they run, which arguments they touch.

Just enough of PTX for `tools.ptxlint`: one kernel, branches between labels of LLVM. What a loop of inline assembly jumps to
(the wait of an mbarrier) is not followed: such a loop holds nothing that the rules look at.
"""

import os
import re
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

State = TypeVar("State")

_TARGET = re.compile(r"\$L__BB\w+")
REGISTER = re.compile(r"%[a-z]+\d+")
_FLOATS = re.compile(r"\.(f16|bf16|f32|f64|f16x2|bf16x2|f32x2)$")
_PLACE = re.compile(r"([\w.-]+\.py):(\d+)(?::\d+)?")
_LOC = re.compile(r"\.loc\s+(\d+) (\d+) \d+(?:, function_name \S+, inlined_at (\d+) (\d+) \d+)?(?:\s*// (.*))?")
#: Operations without a result: their first operand is read.
_NO_RESULT = re.compile(
    r"(st|red|bar(rier)?(\.cta|\.warp)?\.(sync|arrive)|cp|fence|bra|brx|ret|mbarrier\.(init|inval)|wgmma|tcgen05\.(st|mma|commit))\b"
)


@dataclass(frozen=True, eq=False)
class Op:
    """One operation. ``line``: of the text, from 1. ``where``: file:line of the source and of its caller, innermost first."""

    line: int
    predicate: str
    name: str
    operands: str
    where: tuple[str, ...]

    @property
    def bits(self) -> int:
        """Width of a load or store, all elements of a vector together."""
        element = re.search(r"\.[busf](8|16|32|64|128)\b", self.name)
        vector = re.search(r"\.v([248])\b", self.name)
        return (int(element.group(1)) if element else 0) * (int(vector.group(1)) if vector else 1)


@dataclass
class Block:
    """Operations that run one after the other, and the blocks that may follow: (number, whether the branch at the end is taken)."""

    ops: list[Op] = field(default_factory=list)
    next: list[tuple[int, bool]] = field(default_factory=list)


class Ptx:
    """The one kernel of a PTX text. ``names``: of the source's arguments, one for each PTX parameter; else they are "param 0", …"""

    def __init__(self, text: str, names: Sequence[str] = ()) -> None:
        self.names = list(names)
        found = re.search(r"\.reqntid\s+(\d+)", text)
        self.threads = int(found.group(1)) if found else 0
        self.pointers = {self._named(name).pop() for name in re.findall(r"\.param \.u64 \.ptr .*?(\w+_param_\d+)", text)}
        ops = _read(text)
        self.blocks = _blocks(ops, text)
        self.ops = [op for op in ops if op.name != "label"]

    def flow(
        self,
        start: State,
        events: Container[int],
        step: Callable[[Op, State], State],
        join: Callable[[State, State], State],
        branch: Callable[[Op, bool, State], State] = lambda op, taken, state: state,
    ) -> Iterator[tuple[Op, State]]:
        """Each event that can be reached with what is known before it, over all ways there.

        Args:
            start: what is known at the beginning. events: the lines of operations that change or use it.
            step: what is known after an event. join: what is known where two ways meet.
            branch: what is known behind a branch that is taken, or not.
        """
        blocks = [[op for op in block.ops if op.line in events] for block in self.blocks]
        entry: dict[int, State] = {0: start}
        work = [0]
        while work:
            number = work.pop()
            state = entry[number]
            for op in blocks[number]:
                state = step(op, state)
            for successor, taken in self.blocks[number].next:
                there = branch(self.blocks[number].ops[-1], taken, state) if self.blocks[number].ops else state
                if successor in entry:
                    there = join(entry[successor], there)
                    if there == entry[successor]:
                        continue
                entry[successor] = there
                work.append(successor)
        for number, state in sorted(entry.items()):
            for op in blocks[number]:
                yield op, state
                state = step(op, state)

    @cached_property
    def loops(self) -> list[list[Op]]:
        """The operations of each natural loop; one with several ways back is one loop."""
        before: list[list[int]] = [[] for _ in self.blocks]
        for number, block in enumerate(self.blocks):
            for successor, _ in block.next:
                before[successor].append(number)
        bodies: dict[int, set[int]] = {}
        for tail, head in self._ways_back():
            body = bodies.setdefault(head, {head})
            work = [tail]
            while work:
                number = work.pop()
                if number not in body:
                    body.add(number)
                    work += before[number]
        return [[op for number in sorted(body) for op in self.blocks[number].ops] for body in bodies.values()]

    def innermost(self, wanted: Callable[[Op], bool]) -> list[list[Op]]:
        """The loops with a wanted operation that have no smaller such loop inside."""
        loops = [loop for loop in self.loops if any(map(wanted, loop))]
        lines = [{op.line for op in loop} for loop in loops]
        return [loop for loop, mine in zip(loops, lines, strict=True) if not any(other < mine for other in lines)]

    def _ways_back(self) -> list[tuple[int, int]]:
        """Edges to a block that is on the way to them: depth-first, without recursion."""
        found, state = [], {0: 1}
        stack = [(0, iter(self.blocks[0].next))]
        while stack:
            number, following = stack[-1]
            successor, _ = next(following, (-1, False))
            if successor < 0:
                state[number] = 2
                stack.pop()
            elif state.get(successor) == 1:
                found.append((number, successor))
            elif successor not in state:
                state[successor] = 1
                stack.append((successor, iter(self.blocks[successor].next)))
        return found

    @cached_property
    def definitions(self) -> dict[str, list[Op]]:
        """Where each register gets its value; more than one place where ways meet."""
        found: dict[str, list[Op]] = {}
        for op in self.ops:
            for register in results(op):
                found.setdefault(register, []).append(op)
        return found

    def touches(self, operands: str) -> set[str]:
        """The arguments from which the registers in ``operands`` were computed; "ctl*": from a value loaded through ctl."""
        found = self._named(operands)
        for register in REGISTER.findall(operands):
            found |= self._origins.get(register, set())
        return found

    def _named(self, operands: str) -> set[str]:
        numbers = map(int, re.findall(r"\w_param_(\d+)\b", operands))
        return {self.names[n] if n < len(self.names) else f"param {n}" for n in numbers}

    @cached_property
    def _origins(self) -> dict[str, set[str]]:
        edges: list[tuple[list[str], set[str], list[str], bool]] = []
        for op in self.ops:
            if not _FLOATS.search(op.name) and (made := results(op)):
                sources = split(op.operands)[1]
                loaded = bool(re.match(r"(ld|atom)\.", op.name)) and not op.name.startswith("ld.param")
                edges.append((made, self._named(sources), REGISTER.findall(sources), loaded))
        origins: dict[str, set[str]] = {}
        changed = True
        while changed:
            changed = False
            for made, found, read, loaded in edges:
                found = found.union(*(origins[register] for register in read if register in origins))
                if loaded:
                    found = {name.rstrip("*") + "*" for name in found}
                for register in made if found else ():
                    if not found <= origins.setdefault(register, set()):
                        origins[register] |= found
                        changed = True
        return origins


def results(op: Op) -> list[str]:
    """The registers that an operation writes."""
    return REGISTER.findall(split(op.operands)[0]) if has_result(op) else []


def has_result(op: Op) -> bool:
    return not _NO_RESULT.match(op.name)


def split(operands: str) -> tuple[str, str]:
    """(result, what is read): the first operand, which may be a vector in braces, and the rest."""
    found = re.match(r"\s*(\{[^}]*\}|[^,]*)(.*)", operands, re.DOTALL)
    return (found.group(1), found.group(2)) if found else ("", operands)


def _read(text: str) -> list[Op]:
    """The operations of the kernel, and its labels as operations named "label"."""
    files = {number: os.path.basename(path) for number, path in re.findall(r'\.file\s+(\d+) "([^"]*)"', text)}
    callers: dict[str, str] = {}
    ops: list[Op] = []
    where: tuple[str, ...] = ()
    inside, assembly, pending, first = False, False, "", 0
    for number, line in enumerate(text.partition("// -- End function")[0].splitlines(), 1):
        assembly = "// begin inline asm" in line or (assembly and "// end inline asm" not in line)
        loc = _LOC.match(line.strip())
        if loc:
            # of inline assembly Triton 3.9 counts the lines on from that of its call
            where = where if assembly else _where(loc, files, callers)
            continue
        line = line.partition("//")[0].strip()
        if not inside:
            inside = line == "{"
            continue
        label = re.fullmatch(r"(\$?\w+):", line)
        if label:
            ops.append(Op(number, "", "label", label.group(1), where))
            continue
        first = first if pending else number
        statements = f"{pending} {line}".split(";")
        pending = statements.pop().strip(" {}\t")
        ops += [op for statement in statements if (op := _operation(statement, first, where)) is not None]
    return ops


def _operation(statement: str, line: int, where: tuple[str, ...]) -> Op | None:
    statement = statement.strip()
    if statement.count("{") != statement.count("}"):
        statement = statement.strip(" {}\t")  # the scope of an inline assembly
    found = re.fullmatch(r"(@!?%?\w+\s+)?([a-z][\w.:]*)\s*(.*)", statement, re.DOTALL)
    if not found:
        return None  # a declaration
    return Op(line, (found.group(1) or "").strip(" @"), found.group(2), found.group(3), where)


def _where(loc: re.Match[str], files: dict[str, str], callers: dict[str, str]) -> tuple[str, ...]:
    """Innermost first. Triton up to 3.8 writes all callers as a comment; 3.9 the next one, and it is followed from there."""
    file, line, at_file, at_line, comment = loc.groups()
    chain = [f"{name}:{number}" for name, number in _PLACE.findall(comment or "")]
    if len(chain) > 1:
        return tuple(chain)
    chain = [f"{files.get(file, '?')}:{line}"]
    if at_file:
        callers[chain[0]] = f"{files.get(at_file, '?')}:{at_line}"
        while chain[-1] in callers and callers[chain[-1]] not in chain:
            chain.append(callers[chain[-1]])
    return tuple(chain)


def _blocks(ops: list[Op], text: str) -> list[Block]:
    """The control flow: cut at LLVM's labels and behind branches."""
    tables = {name: _TARGET.findall(targets) for name, targets in re.findall(r"(\$\w+):\s*\.branchtargets([^;]*);", text)}
    blocks, labels = [Block()], {}
    jumps: list[tuple[Block, list[str], bool]] = []  # from, to, whether it may also go on to the next block
    for op in ops:
        if op.name != "label":
            blocks[-1].ops.append(op)
        targets = _TARGET.findall(op.operands)
        if op.name.startswith("brx"):
            targets = tables[op.operands.rpartition(",")[2].strip()]
        if op.name == "label" and targets:
            labels[op.operands] = len(blocks)
            jumps.append((blocks[-1], [], True))
            blocks.append(Block())
        elif targets or op.name in ("ret", "exit", "trap"):
            jumps.append((blocks[-1], targets, bool(op.predicate)))
            blocks.append(Block())
    for number, (block, targets, goes_on) in enumerate(jumps):
        block.next = [(labels[target], True) for target in targets]
        if goes_on:
            block.next.append((number + 1, False))
    return blocks

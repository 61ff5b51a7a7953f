"""Which ways through a PTX kernel are possible: what its branches say about the predicates of its operations.

A pipelined loop is full of ways that nothing takes: one branch skips the wait of the first tile if there is no tile, and the
load of that tile carries the same condition as a predicate. `Paths` knows comparisons of integers and their combinations.
"""

import operator
import re
from collections.abc import Iterable

from .ptx import REGISTER, Op, Ptx, results

#: ("ge", type, register, number); (other comparison, type, a, b); ("and" | "or", x, y); ("not", x); ("holds", predicate).
Condition = tuple
UNKNOWN: Condition = ("unknown",)
#: What is known on a way: conditions, and whether they hold; (("is", register), number) of a counter.
Facts = frozenset[tuple[Condition, int]]
NOTHING: Facts = frozenset()


class Paths:
    """The conditions of ``loads``, and what is known of them on a way.

    A loop with loads and ``waits`` may wait in some of its turns, as when k is 0. What its branches compare with a number is a
    counter, and followed as long as its value is known: in the first turn.
    """

    def __init__(self, ptx: Ptx, loads: set[Op], waits: set[Op]) -> None:
        self._ptx = ptx
        self._conditions: dict[str, Condition | None] = {}
        self._flags: dict[str, tuple[str, str, int]] = {}  # predicate: what it says of a counter
        counters: set[str] = set()
        for loop in ptx.loops:
            if not loads.isdisjoint(loop) and not waits.isdisjoint(loop):
                counters |= self._count(loop)
        work = list(counters)
        while work:
            for op in ptx.definitions.get(work.pop(), []):
                source = _operands(op)[-1]
                if op.name.startswith("mov.") and REGISTER.fullmatch(source) and source not in counters:
                    counters.add(source)
                    work.append(source)
        self._counters = counters
        self.registers = {register for op in loads for register in _registers(self.of(op))} | counters | set(self._flags)

    def _count(self, loop: Iterable[Op]) -> set[str]:
        """The counters that the branches of a loop look at."""
        found = set()
        for branch in (op for op in loop if op.name.startswith("bra")):
            predicate = branch.predicate.lstrip("!")
            made = self._ptx.definitions.get(predicate, [])
            compared = re.fullmatch(r"setp\.(eq|ne|lt|le|gt|ge)\.[sub]\d+", made[0].name) if len(made) == 1 else None
            if compared:
                _, register, number = _operands(made[0])
                if re.fullmatch(r"-?\d+", number) and len(self._ptx.definitions.get(register, [])) > 1:
                    self._flags[predicate] = compared.group(1), register, int(number)
                    found.add(register)
        return found

    def of(self, op: Op) -> Condition | None:
        """When an operation does something: its predicate, or for an asynchronous copy the one that makes its size 0."""
        if op.predicate:
            condition = self._condition(op.predicate.lstrip("!"))
            return ("not", condition) if condition and op.predicate.startswith("!") else condition
        size = op.operands.rpartition(",")[2].strip()
        if op.name.startswith("cp.async.c") and REGISTER.fullmatch(size):
            made = self._ptx.definitions.get(size, [])
            if len(made) == 1 and made[0].name.startswith("selp"):
                _, _, zero, predicate = _operands(made[0])
                return self._condition(predicate) if zero == "0" else None
        return None

    def value(self, condition: Condition | None, facts: Facts) -> bool | None:
        """Whether a condition holds; None: unknown."""
        if condition is None:
            return None
        kind = condition[0]
        if kind == "not":
            inner = self.value(condition[1], facts)
            return None if inner is None else not inner
        if kind in ("and", "or"):
            decides = kind == "or"
            both = [self.value(part, facts) for part in condition[1:]]
            return decides if decides in both else (None if None in both else not decides)
        for fact, holds in facts:
            if fact == condition:
                return bool(holds)
            same = kind == fact[0] == "ge" and fact[1:3] == condition[1:3]
            if same and (fact[3] >= condition[3] if holds else fact[3] <= condition[3]):
                return bool(holds)
        return None

    def learn(self, condition: Condition | None, holds: bool, facts: Facts) -> Facts | None:
        """``facts`` on a way on which a condition holds, or does not; None: there is no such way."""
        if self.value(condition, facts) is (not holds):
            return None
        if condition is None or condition == UNKNOWN:
            return facts
        kind = condition[0]
        if kind == "not":
            return self.learn(condition[1], not holds, facts)
        if kind in ("and", "or"):
            known: Facts | None = facts
            for part in condition[1:] if holds is (kind == "and") else ():
                known = None if known is None else self.learn(part, holds, known)
            return known
        return facts | {(condition, holds)} if _registers(condition) <= self.registers else facts

    def after(self, op: Op, facts: Facts) -> Facts:
        """``facts`` behind an operation: without those about what it changes, with the value of a counter that it sets."""
        changed = self.registers.intersection(results(op))
        if not changed:
            return facts
        known = {fact[0][1]: fact[1] for fact in facts if fact[0][0] == "is"}
        left = frozenset(fact for fact in facts if changed.isdisjoint(_registers(fact[0])))
        made, source = changed.pop(), _operands(op)[-1]
        if made in self._flags:
            kind, register, number = self._flags[made]
            if register in known:
                return left | {(("holds", made), getattr(operator, kind)(known[register], number))}
        elif made in self._counters and op.name.startswith("mov."):
            value = int(source) if re.fullmatch(r"-?\d+", source) else known.get(source)
            return left if value is None else left | {(("is", made), value)}
        return left

    def _condition(self, register: str) -> Condition | None:
        if register in self._flags:
            return ("holds", register)
        if register not in self._conditions:
            self._conditions[register] = None  # of a loop: unknown
            made = self._ptx.definitions.get(register, [])
            self._conditions[register] = self._made_by(made[0]) if len(made) == 1 else None
        return self._conditions[register]

    def _made_by(self, op: Op) -> Condition | None:
        _, *sources = _operands(op)
        if op.name in ("mov.pred", "not.pred"):
            inner = self._condition(sources[0])
            return ("not", inner) if inner and op.name == "not.pred" else inner
        if op.name in ("and.pred", "or.pred"):
            return self._combined(op.name[:-5], *map(self._condition, sources))
        found = re.fullmatch(r"setp\.(lt|le|gt|ge|eq|ne)\.([sub]\d+)", op.name)
        return self._comparison(*found.groups(), *sources) if found and len(sources) == 2 else None

    @staticmethod
    def _combined(kind: str, a: Condition | None, b: Condition | None) -> Condition | None:
        """An unknown part stays unknown; the other may still decide."""
        if a is None and b is None:
            return None
        return (kind, a or UNKNOWN, b or UNKNOWN)

    def _comparison(self, kind: str, of: str, a: str, b: str) -> Condition | None:
        """As "ge" or "eq", perhaps negated, so that equal conditions look equal."""
        registers = REGISTER.findall(f"{a} {b}")
        if any(len(self._ptx.definitions.get(register, [])) != 1 for register in registers):
            return None
        if kind in ("eq", "ne"):
            condition: Condition = ("eq", of, *sorted((a, b)))
            return condition if kind == "eq" else ("not", condition)
        if re.fullmatch(r"-?\d+", b):
            register, offset = self._base(a)
            condition = ("ge", of, register, int(b) - offset + (kind in ("gt", "le")))
        else:
            condition = ("at least", of, *((a, b) if kind in ("ge", "lt") else (b, a)))
            if kind in ("gt", "le"):  # a > b is not (b >= a)
                return condition if kind == "le" else ("not", condition)
        return condition if kind in ("ge", "gt") else ("not", condition)

    def _base(self, register: str) -> tuple[str, int]:
        """(other register, number) of which a register is the sum."""
        offset = 0
        while len(made := self._ptx.definitions.get(register, [])) == 1 and re.fullmatch(r"add\.s\d+", made[0].name):
            _, other, number = _operands(made[0])
            if not re.fullmatch(r"-?\d+", number) or len(self._ptx.definitions.get(other, [])) != 1:
                break
            register, offset = other, offset + int(number)
        return register, offset


def _operands(op: Op) -> list[str]:
    return [part.strip() for part in op.operands.split(",")]


def _registers(condition: Condition | None) -> set[str]:
    return set(REGISTER.findall(repr(condition)))

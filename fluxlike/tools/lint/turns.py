"""Loads that a loop asks for ahead of their turn, and the waits of that turn, in Triton's GPU IR.

The compiler loads for a later turn of a loop beside the products of an earlier one. A wait in the loop stays ahead of the loads of
its own turn only if they cannot be asked for without it: if where they load from is computed by the branch in which it stands.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from . import ttir

_LOAD = re.compile(r"async_(?:tma_)?copy_global_to_local\b")
#: For what an earlier turn has asked for.
_HAS_COME = re.compile(r"wait_barrier\b|async_wait\b")
_ACQUIRE = re.compile(r"\btt\.atomic_\w+ (?:\w+, )?acquire\b|isVolatile = true")
_NAME = re.compile(r"%[\w.$-]+")


@dataclass(eq=False)
class Op:
    """An operation, what is in it, and what it takes: operations, a loop for what its turns pass on, and names of arguments."""

    text: str
    where: tuple[str, ...]
    parent: "Op | None"
    takes: list["Op | str"] = field(default_factory=list)
    inside: list["Op"] = field(default_factory=list)

    def all(self) -> Iterator["Op"]:
        for op in self.inside:
            yield op
            yield from op.all()

    def is_in(self, other: "Op") -> bool:
        return self.parent is not None and (self.parent is other or self.parent.is_in(other))

    @property
    def waits(self) -> bool:
        return bool(_ACQUIRE.search(self.text)) or any(_ACQUIRE.search(op.text) for op in self.all())


def unwaited(ttgir: str, payload: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Where a loop that waits in a branch asks, for a later turn, for payload whose place does not come from that branch."""
    found = []
    ahead: set[Op] = set()  # loops of which the rest asks for a later turn
    for op in _read(ttgir).all():
        loop = _turns_of(op)
        if loop is None:
            continue
        if _HAS_COME.search(op.text):
            ahead.add(loop)
        if not _LOAD.search(op.text) or loop not in ahead or _begins_another(loop):
            continue
        names, branches = _causes(op, loop)
        waits = any(inner.waits and "scf.if" in inner.text for inner in loop.inside)
        if waits and names & {f"%{name}" for name in payload} and not any(branch.waits for branch in branches):
            found.append(op.where[:2])
    return found


def _begins_another(loop: Op) -> bool:
    """Whether there is a loop in it that loads: what stands in front of that one is of its first turns, and of this turn."""
    return any("scf.for" in op.text and any(_LOAD.search(inner.text) for inner in op.all()) for op in loop.all())


def _turns_of(op: Op) -> Op | None:
    """The innermost loop around an operation."""
    outer = op.parent
    while outer is not None and "scf.for" not in outer.text:
        outer = outer.parent
    return outer


def _causes(op: Op, loop: Op) -> tuple[set[str], set[Op]]:
    """The arguments that an operation in a loop depends on, and the branches in the loop.

    What a turn passes on to the next counts as that of the turn that made it.
    """
    names: set[str] = set()
    branches: set[Op] = set()
    seen, look = {op}, [op]
    while look:
        op = look.pop()
        if op.is_in(loop) and "scf.if" in op.text:
            branches.add(op)
        passed = [inner for inner in op.inside if inner.text.startswith("scf.yield")]
        for taken in [*op.takes, *passed]:
            if isinstance(taken, str):
                names.add(taken)
            elif taken not in seen:
                seen.add(taken)
                look.append(taken)
    return names, branches


def _read(ttgir: str) -> Op:
    """The operations of a module, one in another."""
    root = Op("", (), None)
    at, scopes = root, [dict[str, Op]()]
    for line, where in ttir.located(ttgir):
        text = re.sub(r"\s*loc\(.*$", "", line).strip()
        if not text or text.startswith(("#", "^", "module")):
            continue
        if text.startswith("}"):
            if len(scopes) == 1:  # the module's
                break
            scopes.pop()
            if text.endswith("{"):  # } else {
                scopes.append({})
            else:
                at = at.parent or root
            continue
        made = re.match(r"(%[\w.$-]+)(?::\d+)? = (.*)", text)
        body = made.group(2) if made else text
        op = Op(body, where, at)
        op.takes = [_found(scopes, name) or name for name in _NAME.findall(body)]
        at.inside.append(op)
        if made:
            scopes[-1][made.group(1)] = op
        if text.endswith("{"):
            at = op
            # a loop's own names, of the turn and of what is passed on
            scopes.append(dict.fromkeys(re.findall(r"(%[\w.$-]+) = ", body), op) if "scf.for" in body else {})
    return root


def _found(scopes: list[dict[str, Op]], name: str) -> Op | None:
    return next((scope[name] for scope in reversed(scopes) if name in scope), None)

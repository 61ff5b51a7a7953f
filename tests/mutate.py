"""Mutants of fluxlike's synchronisation, generated from the syntax trees of its sources.

A *site* is a place that orders something: an atomic, a call of a device function that contains one, a fence or barrier in inline
assembly, a store to a control word, a put, a job for the copy engine. Nothing here names a function of the kernels: a new wait, or
a new kernel, has its mutants as soon as it is written.

At every site, what applies of:

========== =========================================================================================================
remove     the statement, or the instruction of the assembly; a condition becomes True or False
sem=…      every weaker memory order: acq_rel → acquire, release, relaxed; acquire or release → relaxed
scope=…    the next narrower scope: sys → gpu → cta; in assembly as well
±1         what is added, set or waited for is off by one
bare       a number as each thread has it, in place of the one that all threads agree on
early      a signal in front of the stores that it announces; memory emptied before all words have come
late       a wait behind the statement that relies on it
swap       two jobs of the copy engine in the other order
lifo       the copy engine takes its youngest job first
========== =========================================================================================================

A mutant is the text of one source file, changed in place: its line numbers are those of the original. `mutant_process.load` puts it
into a fresh process. Which operations reach a site, over which transport, is found by walking the kernels' calls.
"""

import ast
import dataclasses
import difflib
import functools
import itertools
from dataclasses import dataclass

from mutate_reach import (
    DECOMPOSED,
    NUMBERS,
    ORDERING,
    Path_,
    assembly_of,
    assigned,
    blocks,
    condition,
    device_functions,
    is_atomic,
    is_put,
    is_word_store,
    kernels,
    keyword,
    name_of,
    only_compiled,
    orders,
    reach,
    statement_does,
)
from mutate_source import PACKAGE, Edit, Source

WEAKER = {"acq_rel": ("acquire", "release", "relaxed"), "acquire": ("relaxed",), "release": ("relaxed",)}
NARROWER = {"sys": "gpu", "gpu": "cta"}
#: Of instructions that order something, a weaker form of each that has one.
WEAKER_INSTRUCTIONS = {"wait_group 0": "wait_group.read 0", "fence.acq_rel.sys": "fence.acq_rel.gpu"}
#: What the copy engine is told to do; the words of `runtime.cpu.CpuCopyEngine` and of the contexts.
JOBS = ("wait", "write", "copy")


@dataclass(frozen=True)
class Mutant:
    """``name``: file.function.what[#n]:kind, without line numbers, so that it lasts."""

    name: str
    file: str  # below the package
    line: int
    edits: tuple[Edit, ...]
    #: (kernel, transport) of the kernels that reach it
    reached: tuple[Path_, ...]
    #: in code that only a compiler sees
    compiled_only: bool = False
    #: assembly, or a call of a function of nothing but assembly: it does nothing under the interpreter
    assembly: bool = False

    @property
    def site(self) -> str:
        return self.name.rpartition(":")[0]

    def text(self) -> str:
        source = (PACKAGE / self.file).read_bytes()
        for start, end, new in sorted(self.edits, reverse=True):
            source = source[:start] + new.encode() + source[end:]
        return source.decode()

    def difference(self) -> str:
        """From the source to this, to be read."""
        was, now = (text.splitlines() for text in ((PACKAGE / self.file).read_text(), self.text()))
        return "\n".join(difflib.unified_diff(was, now, self.file, self.name, n=2, lineterm=""))


class _Mutations:
    """Collects the mutants of one file."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._found: list[tuple[int, str, str, Mutant]] = []
        self._texts: set[str] = {source.bytes.decode()}

    def add(
        self, function: str, what: str, kind: str, node: ast.AST, *edits: Edit, reached: tuple[Path_, ...], **where: bool
    ) -> None:
        mutant = Mutant(kind, self.source.file, node.lineno, edits, reached, **where)  # type: ignore[attr-defined]
        text = mutant.text()
        if text not in self._texts:  # two kinds may come to the same text
            self._texts.add(text)
            self._found.append((self.source.span(node)[0], function, what, mutant))

    def named(self) -> list[Mutant]:
        """What was found, in the order of the source; places of one name in a function are numbered from the second on."""
        places: dict[tuple[str, str], list[int]] = {}
        for at, function, what, _ in sorted(self._found, key=lambda entry: entry[0]):
            known = places.setdefault((function, what), [])
            if at not in known:
                known.append(at)
        named = []
        for at, function, what, mutant in sorted(self._found, key=lambda entry: entry[0]):
            number = places[function, what].index(at) + 1
            site = f"{self.source.module}.{function}.{what}" + (f"#{number}" if number > 1 else "")
            named.append(dataclasses.replace(mutant, name=f"{site}:{mutant.name}"))
        return named

    def shifted(self, node: ast.expr) -> list[tuple[str, Edit]]:
        """A number one larger and one smaller."""
        text = self.source.segment(node)
        return [("+1", self.source.replace(node, f"({text}) + 1")), ("-1", self.source.replace(node, f"({text}) - 1"))]


class _KernelMutations(_Mutations):
    """The mutants of a file of kernels."""

    def run(self) -> list[Mutant]:
        for name, function in self.source.functions.items():
            if name in device_functions() and orders(name):
                for block in blocks(function):
                    for statement in block:
                        self._statement(name, block, statement)
                for node in ast.walk(function):
                    if isinstance(node, ast.Call):
                        self._call(name, node)
                    elif isinstance(node, ast.Compare):
                        self._compare(name, function, node)
        return self.named()

    def put(self, function: str, what: str, kind: str, node: ast.AST, *edits: Edit) -> None:
        reached, compiled = reach()[id(node)]
        assembly = what == "assembly" or (what in device_functions() and only_compiled(what))
        self.add(function, what, kind, node, *edits, reached=reached, compiled_only=compiled or assembly, assembly=assembly)

    def _statement(self, function: str, block: list[ast.stmt], statement: ast.stmt) -> None:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            call, what = statement.value, name_of(statement.value)
            if is_atomic(call) or is_word_store(call) or is_put(call) or (what in device_functions() and orders(what)):
                self.put(function, what, "remove", call, self.source.remove(statement))
                self._moves(function, block, statement, what, call)
        elif isinstance(statement, ast.If) and (what := self._signalled(statement.test)):
            for value in ("True", "False"):
                self.put(function, what, value, statement.test, self.source.replace(statement.test, value))
            self._moves(function, block, statement, what, statement.test)
        elif isinstance(statement, ast.For | ast.If) and not _condition_of_build(statement):
            what = next((name_of(n) for n in ast.walk(statement) if name_of(n) in device_functions() and orders(name_of(n))), "")
            if what and not (isinstance(statement, ast.For) and statement_does(statement, "stores")):
                self._moves(function, block, statement, f"{type(statement).__name__.lower()} {what}", statement)
        elif isinstance(statement, ast.Assign) and self._looks_again(function, statement):
            call = _inner_call(statement.value)
            self.put(function, name_of(call), "remove", call, self.source.remove(statement))

    def _signalled(self, test: ast.expr) -> str:
        """The device function with a site that a condition asks."""
        return next((name_of(n) for n in ast.walk(test) if name_of(n) in device_functions() and orders(name_of(n))), "")

    def _looks_again(self, function: str, statement: ast.Assign) -> bool:
        """Whether an atomic in a loop looks again at a word."""
        loops = [node for node in ast.walk(device_functions()[function][1]) if isinstance(node, ast.While)]
        return is_atomic(_inner_call(statement.value)) and any(statement in loop.body for loop in loops)

    def _call(self, function: str, call: ast.Call) -> None:
        what = name_of(call)
        if is_atomic(call):
            sem, scope = keyword(call, "sem"), keyword(call, "scope")
            assert sem is not None and scope is not None, f"{self.source.file}:{call.lineno}: an atomic without sem and scope"
            for weaker in WEAKER.get(sem.value, ()):
                self.put(function, what, f"sem={weaker}", call, self.source.replace(sem, f'"{weaker}"'))
            if (narrower := NARROWER.get(scope.value)) is not None:
                self.put(function, what, f"scope={narrower}", call, self.source.replace(scope, f'"{narrower}"'))
        if what == "atomic_add" or is_word_store(call) or (is_atomic(call) and isinstance(call.args[1], ast.Constant)):
            for kind, edit in self.shifted(call.args[1]):
                number = getattr(call.args[1], "value", None)
                # adding 0 is how a word is read; a flag is 0 or not, whatever else it is
                if not (number == 0 if what == "atomic_add" else (kind, number) in (("+1", 1), ("-1", 0))):
                    self.put(function, what, kind, call, edit)
        if what == "put_signal":  # what is put is data: tests/test_messages.py compares all of it
            for kind, edit in self.shifted(call.args[4]):
                self.put(function, what, kind, call, edit)
        if what in device_functions() and any(is_atomic(n) or is_word_store(n) for n in ast.walk(device_functions()[what][1])):
            parameters = [argument.arg for argument in device_functions()[what][1].args.args]
            for parameter, argument in zip(parameters, call.args, strict=True):
                for kind, edit in self.shifted(argument) if parameter in NUMBERS else ():
                    self.put(function, what, f"{parameter}{kind}", call, edit)
        if (text := assembly_of(call)) is not None:
            self._instructions(function, call, text)
        last = device_functions()[what][1].body[-1] if what in device_functions() else None
        if isinstance(last, ast.Return) and assembly_of(last.value) is not None and call.args:
            self.put(function, what, "bare", call, self.source.replace(call, f"({self.source.segment(call.args[0])})"))

    def _instructions(self, function: str, call: ast.Call, text: ast.Constant) -> None:
        parts = text.value.split(";")
        for i, part in enumerate(parts):
            if ORDERING.match(part):
                without = ";".join(parts[:i] + parts[i + 1 :]).strip()
                self.put(function, "assembly", f"remove {part.strip()}", call, self.source.replace(text, f'"{without}"'))
            for strong, weak in WEAKER_INSTRUCTIONS.items():
                if strong in part:
                    weaker = text.value.replace(strong, weak)
                    self.put(function, "assembly", f"{strong} → {weak}", call, self.source.replace(text, f'"{weaker}"'))

    def _compare(self, function: str, root: ast.FunctionDef, compare: ast.Compare) -> None:
        """What an atomic gave, held against a number."""
        given = {
            target.id
            for node in ast.walk(root)
            if isinstance(node, ast.Assign) and is_atomic(_inner_call(node.value))
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        if isinstance(compare.left, ast.Name) and compare.left.id in given:
            for kind, edit in self.shifted(compare.comparators[0]):
                self.put(function, compare.left.id, kind, compare, edit)

    # -- moves ----------------------------------------------------------------------------------------------------------

    def _moves(self, function: str, block: list[ast.stmt], statement: ast.stmt, what: str, node: ast.AST) -> None:
        at = block.index(statement)
        if statement_does(statement, "releases"):
            before = [i for i, earlier in enumerate(block[:at]) if isinstance(earlier, ast.For) or _touches(earlier)]
            if before:
                part = block[before[-1] : at + 1]
                order = [*range(1, len(part)), 0]
                self.put(function, what, "early", node, *self.source.permute(part, order))
            first = statement.value.args[0] if isinstance(statement, ast.Expr) else None  # type: ignore[attr-defined]
            after = [i for i in range(at + 1, len(block)) if isinstance(first, ast.Name) and first.id in assigned(block[i])]
            if after:  # a deferred signal: the next one's word is known now
                part = block[at : after[-1] + 1]
                order = [len(part) - 1, *range(len(part) - 1)]
                self.put(function, what, "early", node, *self.source.permute(part, order))
        if what == "empty":  # words are forgotten that have come since they were looked at
            waits = [i for i, earlier in enumerate(block[:at]) if isinstance(earlier, ast.If)]
            part = block[waits[-1] : at + 1]
            self.put(function, what, "early", node, *self.source.permute(part, [len(part) - 1, *range(len(part) - 1)]))
        # a signal that comes later does no harm
        if statement_does(statement, "acquires") and not statement_does(statement, "releases") and at + 1 < len(block):
            loops = [i for i in range(at + 1, len(block)) if isinstance(block[i], ast.For)]
            part = block[at : (loops[0] if loops else len(block) - 1) + 1]
            self.put(function, what, "late", node, *self.source.permute(part, [*range(1, len(part)), 0]))


def _touches(statement: ast.stmt) -> bool:
    """Whether a statement stores or waits."""
    return any(statement_does(statement, what) for what in ("stores", "acquires"))


def _inner_call(value: ast.expr) -> ast.AST:
    """The atomic in ``tl.atomic_add(…).to(…)``."""
    return next((node for node in ast.walk(value) if is_atomic(node)), value)


def _condition_of_build(statement: ast.stmt) -> bool:
    constants = ("COPY_ENGINE", "is_interp()", "TRACE", "ROOTED", "SCATTER", "GATHER")
    return isinstance(statement, ast.If) and any(condition(statement.test, n) is not None for n in constants)


# the mutants of the copy engine and of its jobs


class _EngineMutations(_Mutations):
    """The jobs that the contexts queue, and the engine that does them."""

    def __init__(self, source: Source, ops: tuple[str, ...]) -> None:
        super().__init__(source)
        self.reached = tuple((f"{op}_kernel", "copy_engine") for op in ops)

    def put(self, function: str, what: str, kind: str, node: ast.AST, *edits: Edit) -> None:
        self.add(function, what, kind, node, *edits, reached=self.reached)

    def jobs(self) -> list[Mutant]:
        """Calls ``….engine.wait(address, value)`` and their like, and ``ctx.copy``."""
        for name, function in self.source.functions.items():
            for block in blocks(function):
                queued = [s for s in block if (call := _job(s)) is not None]
                for statement in queued:
                    call = _job(statement)
                    what = name_of(call)
                    self.put(name, what, "remove", call, self.source.remove(statement))
                    if what in ("wait", "write"):
                        value = call.args[1]
                        number = value.value if isinstance(value, ast.Constant) else None
                        for kind, edit in self.shifted(value):
                            if what == "wait" or number is None or kind == ("-1" if number else "+1"):
                                self.put(name, what, kind, call, edit)
                for first, second in itertools.pairwise(queued):
                    if block.index(second) == block.index(first) + 1:
                        self.put(name, name_of(_job(first)), "swap", first, *self.source.permute([first, second], [1, 0]))
        return self.named()

    def engine(self, name: str) -> list[Mutant]:
        """The class ``name``: what it queues, and what its thread does."""
        node = next(n for n in ast.walk(self.source.tree) if isinstance(n, ast.ClassDef) and n.name == name)
        for method in node.body:
            if not isinstance(method, ast.FunctionDef):
                continue
            for call in ast.walk(method):
                if name_of(call) == "Queue":
                    self.put(method.name, "Queue", "lifo", call, self.source.replace(call, "queue.LifoQueue()"))
            if method.name.lstrip("_") not in (*JOBS, "queue", "met"):
                continue
            for statement in method.body:
                if isinstance(statement, ast.Return):
                    compare = next(n for n in ast.walk(statement) if isinstance(n, ast.Compare))
                    for kind, edit in self.shifted(compare.comparators[0]):
                        self.put(method.name, "compare", kind, compare, edit)
                elif not _is_constant(statement):
                    self.put(method.name, type(statement).__name__.lower(), "remove", statement, self.source.remove(statement))
        return self.named()


class _LaunchMutations(_Mutations):
    """The launches of the schedule that puts its signals around products of torch."""

    def run(self) -> list[Mutant]:
        """Launches, ``plan.sum[slot]((y, y))``, and words, ``_go(ctx, unit)``: taken away, or changed with a neighbour."""
        for name in ("ag_gemm", "gemm_rs"):
            reached = tuple((k, DECOMPOSED) for k in device_functions() if k.startswith(name) and DECOMPOSED in k)
            for block in blocks(self.source.functions[name]):
                for at, statement in enumerate(block):
                    call = statement.value if isinstance(statement, ast.Expr) else None
                    launched = isinstance(call, ast.Call) and [type(given) for given in call.args] == [ast.Tuple]
                    if not launched and name_of(call) != "_go":
                        continue
                    what = ast.unparse(call.func).removeprefix("plan.").removesuffix("[slot]")
                    self.add(name, what, "remove", call, self.source.remove(statement), reached=reached)
                    for other in block[max(at - 1, 0) : at] + block[at + 1 : at + 2]:
                        if isinstance(other, ast.Expr):
                            swapped = self.source.permute([statement, other], [1, 0])
                            self.add(name, what, "swap", call, *swapped, reached=reached)
        return self.named()


def _is_constant(statement: ast.stmt) -> bool:
    """A docstring, or ``name = 5``."""
    return isinstance(getattr(statement, "value", None), ast.Constant)


def _job(statement: ast.stmt) -> ast.Call | None:
    """The call of a statement that queues a job."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        on = ast.unparse(call.func.value)
        if call.func.attr in JOBS and (on.endswith("engine") or (on == "ctx" and call.func.attr == "copy")):
            return call
    return None


@functools.cache
def mutants() -> tuple[Mutant, ...]:
    """All of them, in the order of the sources."""
    found: list[Mutant] = []
    for source in kernels().values():
        found += _KernelMutations(source).run()
    for op in ("gemm_rs", "ag_gemm"):
        found += _EngineMutations(Source(f"ops/{op}.py"), (op,)).jobs()
    both = ("gemm_rs", "ag_gemm")
    found += _LaunchMutations(Source(f"ops/{DECOMPOSED}.py")).run()
    found += _EngineMutations(Source("ops/context.py"), both).jobs()
    found += _EngineMutations(Source("runtime/cpu.py"), both).engine("CpuCopyEngine")
    names = [mutant.name for mutant in found]
    assert len(set(names)) == len(names), sorted(name for name in names if names.count(name) > 1)
    return tuple(found)

"""How the kernels of fluxlike hang together, read from their source: what calls what, and which operations reach it.

For `mutate`, which changes what orders something: this finds it.
"""

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mutate_source import PACKAGE, Source

TRANSPORTS = ("in_kernel", "copy_engine")
STREAM_K = "stream_k"  # with kernels of its own, but for the copy of the gathered input
DECOMPOSED = "decomposed"  # with kernels of its own
ALGORITHMS = ("one_shot", "words", "bulk", "trees", "fused")  # of all_reduce, and of gemm_ar, each a kernel
SPARSE = "sparse"  # rows of sparse tensors, a kernel
MESSAGES = "messages"  # between nodes, with kernels of their own, most of one program, that only GPUs launch
ROOTED = "rooted_"  # the same kernels for what one rank owns, with signals of their own
RELAY = "relay"  # by way of the others, a kernel
#: Instructions of inline assembly that order something.
ORDERING = re.compile(r"\s*(bar\.|barrier\.|fence\.|membar\.|cp\.async\.bulk\.wait_group)")
#: Of `kernels.puts`: a put with a signal, which is a release, and a wait until all are done.
PUTS = ("put_signal", "quiet")
Path_ = tuple[str, str]  # kernel, transport


def name_of(call: ast.AST) -> str:
    """``publish_set`` of publish_set(…), ``atomic_add`` of tl.atomic_add(…); "" of what is no call."""
    target = call.func if isinstance(call, ast.Call) else None
    return getattr(target, "id", None) or getattr(target, "attr", None) or ""


def is_atomic(node: ast.AST) -> bool:
    return name_of(node).startswith("atomic_") and any(k.arg == "sem" for k in node.keywords)  # type: ignore[attr-defined]


def is_word_store(node: ast.AST) -> bool:
    """A store of a single word, as blocks are stored under a mask; in code for the GPU only of a constant: a flag.

    Or of one number to several words: ``tl.zeros(…) + number``.
    """
    if name_of(node) != "store" or ast.unparse(node.func) != "tl.store":  # type: ignore[attr-defined]
        return False
    value = node.args[1]  # type: ignore[attr-defined]
    if node.keywords:  # type: ignore[attr-defined]
        return isinstance(value, ast.BinOp) and name_of(value.left) == "zeros"
    return isinstance(value, ast.Constant) or not reach().get(id(node), ((), True))[1]


def is_put(node: ast.AST) -> bool:
    """A call of NVSHMEM's that orders something."""
    return name_of(node) in PUTS


def assembly_of(node: ast.AST) -> ast.Constant | None:
    """The text of inline assembly that orders something."""
    if name_of(node) == "inline_asm_elementwise":
        text = node.args[0]  # type: ignore[attr-defined]
        if any(ORDERING.match(part) for part in text.value.split(";")):
            return text
    return None


def keyword(call: ast.Call, name: str) -> ast.Constant | None:
    return next((k.value for k in call.keywords if k.arg == name), None)  # type: ignore[misc,return-value]


#: Files whose kernels wait for nobody and signal nothing. Words that they store are data; tests/test_sparse_index.py compares all.
DATA = ("sparse_index",)


@functools.cache
def kernels() -> dict[str, Source]:
    files = sorted((PACKAGE / "kernels").glob("*.py"))
    return {path.stem: Source(f"kernels/{path.name}") for path in files if path.stem not in DATA}


@functools.cache
def device_functions() -> dict[str, tuple[Source, ast.FunctionDef]]:
    """The functions under ``@triton.jit`` of all kernel files; their names are unique."""
    found: dict[str, tuple[Source, ast.FunctionDef]] = {}
    for source in kernels().values():
        for name, function in source.functions.items():
            if any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list):
                assert name not in found, f"two device functions are called {name}"
                found[name] = source, function
    return found


@functools.cache
def orders(name: str) -> bool:
    """Whether a device function holds a site, itself or in what it calls."""
    _, function = device_functions()[name]
    return any(
        is_atomic(node)
        or is_word_store(node)
        or is_put(node)
        or assembly_of(node) is not None
        or (name_of(node) in device_functions() and name_of(node) != name and orders(name_of(node)))
        for node in ast.walk(function)
    )


# who reaches what


def condition(test: ast.expr, name: str) -> bool | None:
    """Whether a test of a constant is that it is set (True) or not set (False); None if it is another test."""
    text = ast.unparse(test)
    return {name: True, f"not {name}": False}.get(text)


@dataclass(frozen=True)
class Step:
    """A node of a kernel's code as a transport reaches it."""

    node: ast.AST
    function: str
    compiled: bool


def _walk(nodes: Iterable[ast.AST], function: str, transport: str, compiled: bool) -> Iterator[Step]:
    """Every node that runs under ``transport``, in order; into what is called, too."""
    for node in nodes:
        yield Step(node, function, compiled)
        if isinstance(node, ast.If):
            copies, interpreted = condition(node.test, "COPY_ENGINE"), condition(node.test, "is_interp()")
            traced = condition(node.test, "TRACE")  # it is not, in the scenes
            rooted = condition(node.test, "ROOTED")
            for branch, taken in ((node.body, True), (node.orelse, False)):
                if rooted is not None and (rooted == taken) != transport.startswith(ROOTED):
                    continue
                if traced != taken and (copies is None or (transport in ("copy_engine", DECOMPOSED)) == (copies == taken)):
                    yield from _walk(branch, function, transport, compiled or (interpreted is not None and interpreted != taken))
            yield from _walk([node.test], function, transport, compiled)
            continue
        called = name_of(node)
        if called in device_functions() and called != function:
            yield from _walk(device_functions()[called][1].body, called, transport, compiled)
        yield from _walk(ast.iter_child_nodes(node), function, transport, compiled)


def _is_entry(name: str) -> bool:
    """A kernel is what no other device function calls and what ops launches."""
    return name.endswith("_kernel")


def transports(kernel: str) -> tuple[str, ...]:
    alone = next((name for name in (STREAM_K, DECOMPOSED, *ALGORITHMS) if name in kernel), None)
    if kernel.startswith((SPARSE, MESSAGES)):
        return (SPARSE,) if kernel.startswith(SPARSE) else (MESSAGES,)
    if kernel.startswith("exchange"):
        return (str(alone), f"{ROOTED}{alone}")
    if kernel.startswith(RELAY):
        return (f"{ROOTED}{RELAY}",)
    return (alone,) if alone else (*TRANSPORTS, STREAM_K) if kernel == "ag_collect_kernel" else TRANSPORTS


@functools.cache
def reach() -> dict[int, tuple[tuple[Path_, ...], bool]]:
    """By node: the kernels and transports that reach it, and whether only a compiler does."""
    paths: dict[int, list[Path_]] = {}
    compiled: dict[int, bool] = {}
    for name, (_, function) in sorted(device_functions().items(), key=lambda item: item[0].startswith(MESSAGES)):
        for transport in transports(name) if _is_entry(name) else ():
            for step in _walk(function.body, name, transport, False):
                known = paths.setdefault(id(step.node), [])
                if transport == MESSAGES and any(other != MESSAGES for _, other in known):
                    continue  # whatever others reach, too, is judged there
                if (name, transport) not in known:
                    known.append((name, transport))
                compiled[id(step.node)] = compiled.get(id(step.node), True) and step.compiled
    return {node: (tuple(known), compiled[node]) for node, known in paths.items()}


def only_compiled(name: str) -> bool:
    """A device function that does nothing under the interpreter."""
    body = [s for s in device_functions()[name][1].body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    return all(isinstance(s, ast.If) and condition(s.test, "is_interp()") is False for s in body)


# the mutants of the kernels


def blocks(function: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(function):
        for name in ("body", "orelse"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                yield block


def assigned(statement: ast.stmt) -> set[str]:
    return {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _used(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


@functools.cache
def _does(name: str, what: str) -> bool:
    """Whether a device function ``acquires``, ``releases`` or ``stores`` under the interpreter, itself or in what it calls."""
    return statement_does(device_functions()[name][1], what)


def statement_does(statement: ast.AST, what: str) -> bool:
    for node in ast.walk(statement):
        called = name_of(node)
        if not called or called == getattr(statement, "name", "") or reach().get(id(node), ((), True))[1]:
            continue  # what a function does itself is found where it stands
        if called in device_functions() and _does(called, what):
            return True
        if (what == "stores" and called == "store") or (what == "releases" and called == "put_signal"):
            return True
        if what != "stores" and is_atomic(node):
            sem = keyword(node, "sem").value  # type: ignore[arg-type,union-attr]
            if sem == "acq_rel" or sem == what.removesuffix("s"):
                return True
    return False


#: Parameters that are counts or call numbers, in functions that hold an atomic or a store to a word.
NUMBERS = ("value", "want", "count", "epoch")

"""A kernel's source as Python that the interpreter can call.

The compiler makes tensors of the numbers that a kernel names or counts, and takes global constants for what they hold. Python does
neither, so the source is rewritten, with the line numbers that it had.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
import weakref
from collections.abc import Callable
from typing import Any

import triton.language as tl


def plain(value: Any) -> Any:
    """A global constexpr as the number it holds: ``constexpr + tensor`` would be a constexpr that holds a tensor."""
    return value.value if isinstance(value, tl.constexpr) else value


class _Rewriter(ast.NodeTransformer):
    """Puts ``assign`` around what a kernel assigns or counts, and `plain` around the constants from outside."""

    def __init__(self, constants: set[str]) -> None:
        self.constants = constants

    @staticmethod
    def _call(name: str, argument: ast.expr) -> ast.Call:
        return ast.Call(func=ast.Name(id=name, ctx=ast.Load()), args=[argument], keywords=[])

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        node.value = self._call("_fluxlike_assign", node.value)
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        # range and tl.range count in tensors, so that ``i.to(tl.int64)`` works; tl.static_range in Python's numbers.
        called = getattr(node.iter, "func", None)
        name = getattr(called, "id", None) or getattr(called, "attr", None)
        if name == "range" and isinstance(node.target, ast.Name):
            counted = self._call("_fluxlike_assign", ast.Name(id=node.target.id, ctx=ast.Load()))
            node.body.insert(0, ast.Assign(targets=[node.target], value=counted))
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        # ``CONSTANT.value`` asks the constexpr itself.
        return node if isinstance(node.value, ast.Name) else self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if isinstance(node.ctx, ast.Load) and node.id in self.constants:
            return self._call("_fluxlike_plain", node)
        return node


#: What is made of each kernel and device function.
rewritten: weakref.WeakKeyDictionary[Callable, Callable] = weakref.WeakKeyDictionary()
#: The code of every rewritten function; its line numbers are those of the source. For reports of where a kernel stands.
kernel_codes: set[types.CodeType] = set()


def interpreted(fn: types.FunctionType, assign: Callable[[Any], Any]) -> Callable:
    """The Python function that stands for ``fn`` under the interpreter; made once, kept while ``fn`` lives.

    ``assign``: what becomes of a value that the kernel gives a name; the same in all calls.
    The helpers reach it as closure variables, so the globals of the kernel's module are used as they are, live and
    unchanged. The kernel's own closure is kept too: a kernel may be defined inside a test.
    """
    if fn in rewritten:
        return rewritten[fn]
    cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
    constants = {name for name in fn.__code__.co_names if isinstance(fn.__globals__.get(name), tl.constexpr)} | {*cells}
    lines, first = inspect.getsourcelines(fn)
    node: Any = ast.parse(textwrap.dedent("".join(lines))).body[0]
    node = _Rewriter(constants).visit(node)
    node.name, node.decorator_list, node.returns = "_fluxlike_body", [], None
    for arg in ast.walk(node.args):
        if isinstance(arg, ast.arg):
            arg.annotation = None
    node.args.defaults = [ast.Constant(value=None) for _ in node.args.defaults]
    node.args.kw_defaults = [default and ast.Constant(value=None) for default in node.args.kw_defaults]
    names = ["_fluxlike_assign", "_fluxlike_plain", *cells]
    module = ast.parse(f"def _fluxlike_factory({', '.join(names)}):\n    return _fluxlike_body")
    factory_node: Any = module.body[0]
    factory_node.body.insert(0, node)
    ast.increment_lineno(node, first - 1)
    namespace: dict[str, Any] = {}
    exec(compile(ast.fix_missing_locations(module), inspect.getfile(fn), "exec"), fn.__globals__, namespace)
    code = namespace["_fluxlike_factory"](assign, plain, *cells).__code__.replace(co_name=fn.__name__)
    cells |= {"_fluxlike_assign": types.CellType(assign), "_fluxlike_plain": types.CellType(plain)}
    closure = tuple(cells[name] for name in code.co_freevars)
    result = types.FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, closure)
    result.__kwdefaults__ = fn.__kwdefaults__
    rewritten[fn] = result
    kernel_codes.add(code)
    return result

"""What the processes of a mutant do; apart from `mutate`, so that they need not make all mutants to run one."""

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import itertools
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from triton.backends.nvidia.compiler import CUDABackend

from fluxlike.runtime import rewriting

KERNELS = (
    "ag_collect_kernel",
    "decomposed_credits_kernel",
    "ag_gemm_decomposed_arrived_kernel",
    "ag_gemm_decomposed_end_kernel",
    "gemm_rs_decomposed_sum_kernel",
    "gemm_rs_stream_k_kernel",
    "ag_gemm_stream_k_kernel",
    "gemm_rs_kernel",
    "ag_gemm_kernel",
    "all_reduce_one_shot_kernel",
    "product_fused_kernel",
    "gather_fused_kernel",
    "exchange_words_kernel",
    "exchange_bulk_kernel",
    "relay_words_kernel",
    "all_reduce_trees_kernel",
    "sparse_all_reduce_kernel",
    "messages_head_kernel",
    "messages_came_kernel",
    "messages_sum_kernel",
    "messages_gather_kernel",
    "messages_end_kernel",
    "messages_put_kernel",
)
OPS = ("gemm_rs", "ag_gemm", "all_reduce")
#: Operations of which there are contexts.
NAMES = (*OPS, "gemm_ar", "reduce_scatter", "reduce", "broadcast", "sparse_all_reduce")
#: How the collectives' kernels are called, by their transports: operation, algorithm, and of the lint's shapes which.
CALLS = {
    "one_shot": ("all_reduce", "one_shot"),
    "words": ("all_reduce", "two_shot"),
    "bulk": ("all_reduce", "bulk"),
    "trees": ("all_reduce", "trees"),
    "rooted_words": ("reduce", "words"),
    "rooted_bulk": ("reduce", "bulk"),
    "rooted_relay": ("reduce", "two_shot"),
    "sparse": ("sparse_all_reduce", "owned"),
    "fused": ("gemm_ar", "two_shot", "few"),
}
#: Those that have more code where they share the last wave of tiles.
SHARING = ("gemm_rs_kernel", "ag_gemm_kernel")
#: Of the GPU for which kernels are compiled.
CAPABILITY = 90


class _Finder(importlib.abc.MetaPathFinder):
    """One module comes from another file."""

    def __init__(self, module: str, path: str) -> None:
        self.module, self.path = module, path

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_file_location(name, self.path) if name == self.module else None


def _codes(path: str) -> dict[str, types.CodeType]:
    """The functions and methods of a source file, by qualified name."""
    found = {}
    todo = [compile(Path(path).read_bytes(), path, "exec")]
    while todo:
        for code in todo.pop().co_consts:
            if isinstance(code, types.CodeType):
                if code.co_flags & inspect.CO_OPTIMIZED:
                    found[code.co_qualname] = code
                else:  # the body of a class
                    todo.append(code)
    return found


def swap(module: str, path: str) -> None:
    """From now on the functions of ``module`` run the code that they have in the file at ``path``, which differs in nothing else.

    The interpreter looks for the source of a function where its code comes from.
    """
    there = importlib.import_module(module)
    before, after = _codes(str(there.__file__)), _codes(path)
    changed = [name for name in after if after[name] != before[name]]
    assert changed or Path(path).read_bytes() == Path(str(there.__file__)).read_bytes(), f"{path} changes no function of {module}"
    for name in changed:
        function = functools.reduce(getattr, name.split("."), there)
        function = getattr(function, "fn", function)  # of a kernel
        function.__code__ = after[name]
        rewriting.rewritten.pop(function, None)


def load(module: str, path: str) -> None:
    """From now on ``module`` of fluxlike is the file at ``path``, for all that this process imports of fluxlike."""
    sys.meta_path.insert(0, _Finder(module, path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "fluxlike"]:
        del sys.modules[name]


def on_ranks(group: Any, module: str, file: str, **how: Any) -> None:
    """A rank: the mutant's code in place of its module's."""
    swap(module, file)
    importlib.import_module("scenes").run(group, **how)


def on_compiler(group: Any, module: str, file: str, reached: Sequence[tuple[str, str]]) -> str:
    """What the lint finds first in the kernels that reach the mutant, as large calls launch them; the small kernel first.

    Down to the PTX, as registers are no matter here and their assembler takes most of the time.
    """
    os.environ["TRITON_CACHE_DIR"] = os.path.join(os.path.dirname(file), "cache")
    load(module, file)
    compiling = importlib.import_module("fluxlike.tools.lint.compiling")
    variants = importlib.import_module("fluxlike.tools.lint.variants")
    between_nodes = [case for op in ("gemm_rs", "ag_gemm") for case in variants.between_nodes(op)]
    CUDABackend.make_cubin = lambda self, *rest: b""
    compiling._run = lambda tool, *arguments: "REG:0 STACK:0"
    for kernel, transport in sorted(reached, key=lambda path: KERNELS.index(path[0])):
        op = next((op for op in OPS if kernel.startswith(op)), "ag_gemm")
        cases = [variants.Case(op, transport, "waves")] if kernel in SHARING else []
        gathering = ("sequential", "few"), ("sequential/fused", "most")
        cases += [variants.Case("ag_gemm", *how) for how in gathering] if kernel == "gather_fused_kernel" else []
        cases = between_nodes if transport == "messages" else [variants.Case(*CALLS.get(transport, (op, transport))), *cases]
        for launch in itertools.chain.from_iterable(variants.launches(case, CAPABILITY) for case in cases):
            if launch.name == kernel:
                built = compiling.build(launch, CAPABILITY)
                for finding in variants.lint_built(built, variants.spec_of(launch, CAPABILITY)):
                    return f"{kernel}, {transport}: {finding}"
    return ""

"""fluxlike: tensor-parallel communication hidden under matrix products, in Triton, over a symmetric heap.

Importing it touches no GPU, no environment and no hook of another library; the names load on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "init": "runtime.world",
    "finalize": "runtime.world",
    "is_initialized": "runtime.world",
    "CallMismatch": "runtime.errors",
    "PeerTimeout": "runtime.errors",
    "create_gemm_rs_context": "ops.gemm_rs",
    "gemm_rs": "ops.gemm_rs",
    "create_ag_gemm_context": "ops.ag_gemm",
    "ag_gemm": "ops.ag_gemm",
    "create_gemm_ar_context": "ops.gemm_ar",
    "gemm_ar": "ops.gemm_ar",
    "all_reduce": "ops.all_reduce",
    "all_reduce_": "ops.all_reduce",
    "reduce_scatter": "ops.collectives",
    "all_gather": "ops.collectives",
    "reduce": "ops.collectives",
    "broadcast": "ops.collectives",
    "create_sparse_all_reduce_context": "ops.sparse_all_reduce",
    "sparse_all_reduce": "ops.sparse_all_reduce",
    "sparse_all_reduce_": "ops.sparse_all_reduce",
    "sparse_allreduce_hook": "ops.sparse_hook",
    "sparse_reduce_scatter": "ops.sparse_all_reduce",
}
_MODULES = {"nn": ".nn", "reference": ".ops.reference", "topology": ".topology"}
__all__ = [
    "CallMismatch",
    "PeerTimeout",
    "__version__",
    "ag_gemm",
    "all_gather",
    "all_reduce",
    "all_reduce_",
    "broadcast",
    "create_ag_gemm_context",
    "create_gemm_ar_context",
    "create_gemm_rs_context",
    "create_sparse_all_reduce_context",
    "finalize",
    "gemm_ar",
    "gemm_rs",
    "init",
    "is_initialized",
    "nn",
    "reduce",
    "reduce_scatter",
    "reference",
    "sparse_all_reduce",
    "sparse_all_reduce_",
    "sparse_allreduce_hook",
    "sparse_reduce_scatter",
    "topology",
]

if TYPE_CHECKING:
    from . import nn, topology
    from .ops import reference
    from .ops.ag_gemm import ag_gemm, create_ag_gemm_context
    from .ops.all_reduce import all_reduce, all_reduce_
    from .ops.collectives import all_gather, broadcast, reduce, reduce_scatter
    from .ops.gemm_ar import create_gemm_ar_context, gemm_ar
    from .ops.gemm_rs import create_gemm_rs_context, gemm_rs
    from .ops.sparse_all_reduce import (
        create_sparse_all_reduce_context,
        sparse_all_reduce,
        sparse_all_reduce_,
        sparse_reduce_scatter,
    )
    from .ops.sparse_hook import sparse_allreduce_hook
    from .runtime.errors import CallMismatch, PeerTimeout
    from .runtime.world import finalize, init, is_initialized


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name], __name__)
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'fluxlike' has no attribute {name!r}")
    value = getattr(import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

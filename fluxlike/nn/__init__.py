"""Layers, styles for torch's parallelize_module, and a pass of torch.compile: tensor-parallel models over gemm_rs and ag_gemm."""

from typing import TYPE_CHECKING, Any

from ..ops import library_collectives  # noqa: F401  registers ops that a saved graph may name
from .embedding import Embedding
from .linear import ColumnParallelLinear, RowParallelLinear
from .styles import ColwiseParallel, RowwiseParallel, SharedGather

if TYPE_CHECKING:
    from .async_tp import AsyncTP

__all__ = [
    "AsyncTP",
    "ColumnParallelLinear",
    "ColwiseParallel",
    "Embedding",
    "RowParallelLinear",
    "RowwiseParallel",
    "SharedGather",
]


def __getattr__(name: str) -> Any:
    if name == "AsyncTP":  # not before it is used: it loads parts of inductor
        from .async_tp import AsyncTP

        return AsyncTP
    raise AttributeError(f"module 'fluxlike.nn' has no attribute {name!r}")

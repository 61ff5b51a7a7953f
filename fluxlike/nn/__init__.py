"""Tensor- and sequence-parallel layers, and styles for torch's parallelize_module, over gemm_rs and ag_gemm."""

from .linear import ColumnParallelLinear, RowParallelLinear
from .styles import ColwiseParallel, RowwiseParallel, SharedGather

__all__ = ["ColumnParallelLinear", "ColwiseParallel", "RowParallelLinear", "RowwiseParallel", "SharedGather"]

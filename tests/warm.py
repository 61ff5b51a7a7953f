"""What the server that ranks are forked from does once, and so no rank again: imports, and the Python functions of all kernels."""

import importlib
import pkgutil

import numpy.ma  # noqa: F401  numpy imports it late
import torch._dynamo  # torch imports it late, for torch.compiler.disable
import torch.distributed.tensor.parallel  # noqa: F401  and that to compare tensors
import triton.experimental.gluon.nvidia.hopper  # noqa: F401  what Triton imports to tell the type of a first argument
from triton.runtime.jit import JITFunction

import fluxlike.kernels
import fluxlike.ops.ag_gemm
import fluxlike.ops.all_reduce
import fluxlike.ops.collectives
import fluxlike.ops.decomposed
import fluxlike.ops.gemm_rs
import fluxlike.ops.trees
from fluxlike.runtime import interpreter, racehooks  # noqa: F401

for _, name, _ in pkgutil.iter_modules(fluxlike.kernels.__path__, "fluxlike.kernels."):
    for member in vars(importlib.import_module(name)).values():
        if isinstance(member, JITFunction):
            interpreter._interpreted(member.fn)
interpreter._patches()

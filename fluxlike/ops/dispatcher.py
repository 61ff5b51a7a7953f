"""Which calls go through torch's dispatcher, as the custom ops of `library`: those that torch must see. It takes time."""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _python_dispatch

# Asked in every call, and so by names that are found at once.
_compiling, _recording, _tracing = torch.compiler.is_compiling, torch.is_grad_enabled, torch._C._is_tracing  # type: ignore
_modes, _Tensor = torch._C._len_torch_dispatch_stack, torch.Tensor  # type: ignore[attr-defined]


def by_op(ctx: Any, out: Any, x: Any, weight: Any, bias: Any) -> bool:
    """Whether a call of gemm_rs, ag_gemm or gemm_ar with these arguments is one for the dispatcher.

    So it is where it is compiled or traced, where an operand wants a gradient, where a mode of dispatch looks on, and where x has a
    shape, but no elements. An op takes neither ``ctx`` nor ``out``: a call with them goes past modes, unless they make a graph.
    """
    if _compiling() or _tracing() or (_recording() and _wants(x, weight, bias)):
        return True
    if _modes() and _seen(ctx is None and out is None):
        return True
    if ctx is not None or out is not None:
        return False
    return isinstance(x, _Tensor) and (x.is_meta or type(x) is FakeTensor)


def makes_graph() -> bool:
    """Whether what is called now is to be found in a graph: it is compiled, or `traced`."""
    return _compiling() or traced()


def traced() -> bool:
    """Whether torch.jit.trace or make_fx looks on: its graph has what goes through the dispatcher, and not what a kernel writes."""
    return _tracing() or (_modes() > 0 and _seen(False))


def _seen(op: bool) -> bool:
    """Whether one of the modes is to see a call, which could be an ``op``.

    Not the race checker's: it sees what a call does by torch, and would not within an op.
    """
    modes = _python_dispatch._get_current_dispatch_mode_stack()
    kinds = [getattr(mode, "_mode_key", None) for mode in modes if not getattr(mode, "looks_into_calls", False)]
    return bool(kinds) if op else torch._C._TorchDispatchModeKey.PROXY in kinds  # type: ignore[attr-defined]


def wants_gradient(x: Any) -> bool:
    """Whether autograd must record a call with this tensor, or with one of this list."""
    return _recording() and _wants(x)


def _wants(*operands: Any) -> bool:
    for t in operands:  # plain and fast
        if isinstance(t, _Tensor):
            if t.requires_grad:
                return True
        elif isinstance(t, (list, tuple)) and _wants(*t):
            return True
    return False

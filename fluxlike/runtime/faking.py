"""Torch's FakeTensorMode, under which new tensors have no memory: nothing there may be given to a kernel, or to gloo.

Nor may what make_fx or torch.jit.trace records, or functionalization holds: its numbers cannot be read. In torch.func's transforms
that differentiate or functionalize new tensors are wrappers without memory, too.
"""

import contextlib
from collections.abc import Iterator

import torch

_mode, _FAKE = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE  # type: ignore[attr-defined]
_PROXY = torch._C._TorchDispatchModeKey.PROXY  # type: ignore[attr-defined]
_FUNCTIONAL = torch._C._TorchDispatchModeKey.FUNCTIONAL  # type: ignore[attr-defined]


_top, _stack = torch._C._functorch.peek_interpreter_stack, torch._C._functorch.get_interpreter_stack
_Kind = torch._C._functorch.TransformType
_WRAPPING = _Kind.Grad, _Kind.Jvp, _Kind.Functionalize


def is_on() -> bool:
    """Whether this thread is under one. Asked in every call."""
    return _mode(_FAKE) is not None


def is_transformed() -> bool:
    """Whether this thread is inside a transform of torch.func. Asked in every call. Dynamo cannot tell, and takes it for none."""
    return not torch.compiler.is_compiling() and _top() is not None


def is_wrapping() -> bool:
    """Whether new tensors are wrapped by a transform, as torch.func.grad, jvp or functionalize; those of vmap are not."""
    return is_transformed() and any(transform.key() in _WRAPPING for transform in _stack() or ())


def off() -> contextlib.AbstractContextManager[object]:
    """A ``with`` in which new tensors have memory and can be read, also under such a mode, one that records, or a transform."""
    if is_on() or is_transformed() or _mode(_PROXY) is not None or _mode(_FUNCTIONAL) is not None or torch._C._is_tracing():  # type: ignore[attr-defined]
        return _off()
    return contextlib.nullcontext()


@contextlib.contextmanager
def _off() -> Iterator[None]:
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    from torch._subclasses.fake_tensor import unset_fake_temporarily  # which is there, if a mode is
    from torch._subclasses.functional_tensor import disable_functional_mode
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    trace = torch._C._get_tracing_state()  # type: ignore[attr-defined]
    with contextlib.ExitStack() as ends:
        if is_on():
            ends.enter_context(unset_fake_temporarily())
        if is_transformed():
            ends.enter_context(temporarily_clear_interpreter_stack())
        ends.enter_context(disable_proxy_modes_tracing())  # also of torch.export's, which `_mode` does not know
        ends.enter_context(disable_functional_mode())
        ends.callback(torch._C._set_tracing_state, trace)  # type: ignore[attr-defined]
        torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
        yield

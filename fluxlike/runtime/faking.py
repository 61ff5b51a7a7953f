"""Torch's FakeTensorMode, under which new tensors have no memory: nothing there may be given to a kernel, or to gloo."""

import contextlib

import torch

_mode, _FAKE = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE  # type: ignore[attr-defined]


def is_on() -> bool:
    """Whether this thread is under one. Asked in every call."""
    return _mode(_FAKE) is not None


def off() -> contextlib.AbstractContextManager[object]:
    """A ``with`` in which new tensors have memory, also under such a mode."""
    if not is_on():
        return contextlib.nullcontext()
    from torch._subclasses.fake_tensor import unset_fake_temporarily  # which is there, if the mode is

    return unset_fake_temporarily()

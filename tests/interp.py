"""What the tests of the interpreter share: builtins that know where they are, schedules, and a compiler."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fluxlike.runtime.interpreter import Schedule, configure, yield_program


class Ended(RuntimeError):
    """Stands for a wait that ran out."""

    fluxlike_passthrough = True


def is_interp(_semantic=None):
    return tl.constexpr(_semantic is None)


def pause(seconds=0.0, _semantic=None):
    """One turn of a wait: others first, a nap if there are none."""
    if not yield_program():
        time.sleep(max(50e-6, float(seconds)))


def end(_semantic=None):
    raise Ended("nobody came")


def interrupt_when(holds: Callable[[], bool], after: float = 0.0, limit_s: float = 30.0) -> threading.Thread:
    """SIGINT to this process, ``after`` seconds from when ``holds()`` is first true; its time is the thread's ``sent_at``."""

    def watch():
        deadline = time.monotonic() + limit_s
        while not holds() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(after)
        thread.sent_at = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


LOG: list[int] = []


def note(value, _semantic=None):
    LOG.append(int(value.handle.data.item()))


for _builtin in (is_interp, pause, end, note):
    _builtin.__triton_builtin__ = True


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16)


def compile_ptx(kernel, signature: dict[str, str], constants: dict, cc: int = 90) -> str:
    source = ASTSource(kernel, signature, constants, {})
    return triton.compile(source, target=GPUTarget("cuda", cc, 32)).asm["ptx"]


@contextlib.contextmanager
def schedule(**how):
    previous = configure(Schedule(**how))
    try:
        yield
    finally:
        configure(previous)

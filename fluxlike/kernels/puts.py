"""Puts that a kernel makes itself, by NVSHMEM's device library, which is linked into it.

Each of them has a meaning under the interpreter, where there is no such library: it tells the hook that a test has installed.
Addresses are those of this rank's own memory; NVSHMEM finds where the same lies on the rank ``pe`` of the world, by NVLink or over
the network. Sources: NVSHMEM's API reference (put-with-signal, quiet, thread-block scope).
"""

import triton.language as tl
from triton.language import core

#: NVSHMEM_SIGNAL_ADD
_ADD = 10

_hook = None


def set_hook(hook) -> None:
    """Install ``hook(to, source, nbytes, signal, add, pe)``, or ``hook()`` for a quiet, for the interpreter."""
    global _hook
    _hook = hook


def library(path) -> dict:
    """The options of a launch of a kernel that uses this module; ``path``: of NVSHMEM's device library."""
    return {"extern_libs": {"libnvshmem_device": str(path)}}


def _called(name, args, kinds, _semantic):
    return core.extern_elementwise("", "", args, {kinds: (name, core.dtype("int32"))}, is_pure=False, _semantic=_semantic)


def put_signal(to, source, nbytes, signal, add, pe, _semantic=None):
    """A put of ``nbytes``, and behind it ``add`` more on the 64-bit word ``signal`` there. By all threads of the program together.

    int64 but for ``pe``, which is int32. Returns before the put is done: ``source`` may be written again behind `quiet`. What other
    threads of the program stored for it needs a barrier in front.
    """
    if _semantic is None:
        _hook(*(int(value.handle.data.item()) for value in (to, source, nbytes, signal, add, pe)))
        return
    i64, u64, i32 = core.dtype("int64"), core.dtype("uint64"), core.dtype("int32")
    how = tl.full((), _ADD, tl.int32, _semantic=_semantic)
    args = [to, source, nbytes, signal, add.to(tl.uint64, _semantic=_semantic), how, pe]
    _called("nvshmemx_putmem_signal_nbi_block", args, (i64, i64, i64, i64, u64, i32, i32), _semantic)


def quiet(_semantic=None):
    """All puts of this rank, by whichever kernel, have left their place, and arrived."""
    if _semantic is None:
        _hook()
        return
    _called("nvshmem_quiet", [], (), _semantic)


for _builtin in (put_signal, quiet):
    _builtin.__triton_builtin__ = True  # type: ignore[attr-defined]

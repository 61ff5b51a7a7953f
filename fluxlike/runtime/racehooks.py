"""Where the race checker notices what a program does: the interpreter's memory operations, the copy engine, launches, the host.

`start` puts the hooks in, the end of the checker takes them out; without them no code of the checker runs. The interpreter's are
set on its builder object, in front of the methods of its class, so an unchecked run does not even pass an ``if``.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import triton.runtime.interpreter as stock

from . import control, interpreter, programs, racecheck, racehost, rewriting, shm
from .control import ControlGroup
from .cpu import CpuCopyEngine, CpuExecutor
from .racecheck import Checker, Done
from .racereport import READ, STORE

_SEM = stock._ir.MEM_SEMANTIC
_ORDER = {_SEM.RELAXED: 0, _SEM.ACQUIRE: 1, _SEM.RELEASE: 2, _SEM.ACQUIRE_RELEASE: 3}
_RANGE = stock._ir.MEM_SYNC_SCOPE
_SCOPE = {_RANGE.CTA: 0, _RANGE.GPU: 1, _RANGE.SYSTEM: 2}
_HERE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

_sites: dict[tuple[CodeType, int, CodeType, int], str] = {}


def _shown(path: str) -> str:
    """A file as people look for it: from the package on, or from where they are."""
    for root in (_HERE, os.getcwd()):
        if path.startswith(root + os.sep):
            return path[len(root) + 1 :]
    return path


def place() -> str:
    """Where the running kernel stands: its line, and of a device function the line that called it in the kernel."""
    frame: FrameType | None = sys._getframe(2)
    inner: tuple[CodeType, int] | None = None
    outer: tuple[CodeType, int] | None = None
    while frame is not None:
        if frame.f_code in rewriting.kernel_codes:
            outer = (frame.f_code, frame.f_lineno)
            inner = inner or outer
        elif outer is not None and frame.f_code is _WORK:
            break
        frame = frame.f_back
    if inner is None or outer is None:
        return _host_place()
    key = (*inner, *outer)
    if key not in _sites:
        text = f"{inner[0].co_name}, {_shown(inner[0].co_filename)}:{inner[1]}"
        if outer != inner:
            text += f", called by {outer[0].co_name}, {_shown(outer[0].co_filename)}:{outer[1]}"
        _sites[key] = text
    return _sites[key]


_WORK = programs.Grid._work.__code__


def _host_place() -> str:
    """The innermost line outside this package's runtime and outside torch, of what the host does."""
    frame: FrameType | None = sys._getframe(3)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(os.path.join(_HERE, "fluxlike", "runtime")) and f"{os.sep}torch{os.sep}" not in path:
            return f"{frame.f_code.co_name}, {_shown(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown place"


def _kept(mask: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Where a mask lets through; it may come as numbers: ``(tl.arange(0, B) >= 0) & (FIXED != n)`` does."""
    return np.broadcast_to(mask.data.astype(np.bool_, copy=False), shape)


def _selected(pointers: Any, mask: Any) -> np.ndarray:
    """The addresses of a block that its mask lets through."""
    addresses = pointers.data.reshape(-1)
    if mask is None:
        return addresses
    keep = _kept(mask, pointers.data.shape).reshape(-1)
    return addresses if keep.all() else addresses[keep]


def _size(pointers: Any) -> int:
    return max(1, pointers.get_element_ty().primitive_bitwidth // 8)


_KINDS = stock._ir.ATOMIC_OP
#: What the atomics leave in a word of integers, of what was there and of what they are given.
_LEFT: dict[Any, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    _KINDS.ADD: np.add, _KINDS.XCHG: lambda before, given: given, _KINDS.AND: np.bitwise_and, _KINDS.OR: np.bitwise_or,
    _KINDS.XOR: np.bitwise_xor, _KINDS.MAX: np.maximum, _KINDS.MIN: np.minimum, _KINDS.UMAX: np.maximum, _KINDS.UMIN: np.minimum,
}  # fmt: skip


def _numbers(op: Any, found: Any, value: Any, keep: Any) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The numbers in the words of ``keep`` before and after an atomic, if they are integers, as signals count."""
    if found.data.dtype.kind not in "iu":
        return None, None
    before = found.data[keep].reshape(-1)
    after = _LEFT[op](before, np.broadcast_to(value.data, found.data.shape)[keep].reshape(-1))
    # of 64 bits without a sign the upper half is beyond what is kept
    return (before.view(np.int64), after.view(np.int64)) if before.dtype == np.uint64 else (before, after)


class _Operations:
    """The builder's memory operations with the checker in front."""

    def __init__(self, checker: Checker, builder: Any) -> None:
        self.checker, self.builder, self.plain = checker, builder, type(builder)

    def create_masked_load(self, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        self.checker.access(_selected(pointers, mask), _size(pointers), READ)
        return self.plain.create_masked_load(self.builder, pointers, mask, *rest, **named)

    def create_masked_store(self, pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        self.checker.access(_selected(pointers, mask), _size(pointers), STORE)
        return self.plain.create_masked_store(self.builder, pointers, value, mask, *rest, **named)

    def create_atomic_rmw(self, op: Any, pointers: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
        poll = interpreter.is_look(op, value)
        programs.before_memory(effect=False, look=poll)  # outside the lock: it may switch to another program

        def act() -> Done:
            found = stock.InterpreterBuilder.create_atomic_rmw(self.builder, op, pointers, value, mask, sem, scope)
            keep = ... if mask is None else _kept(mask, found.data.shape)
            return Done(found, None, *_numbers(op, found, value, keep))

        return self.checker.atomic(_selected(pointers, mask), _size(pointers), _ORDER[sem], _SCOPE[scope], act, poll)

    def create_atomic_cas(self, pointers: Any, compare: Any, value: Any, sem: Any, scope: Any) -> Any:
        programs.before_memory(effect=False)

        def act() -> Done:
            found = stock.InterpreterBuilder.create_atomic_cas(self.builder, pointers, compare, value, sem, scope)
            bits = np.dtype(f"u{found.data.itemsize}")  # bits are compared, not numbers
            wanted = np.broadcast_to(compare.data.astype(found.data.dtype), found.data.shape)
            wrote = found.data.view(bits) == wanted.view(bits)
            return Done(found, wrote.reshape(-1), *_numbers(_KINDS.XCHG, found, value, wrote))

        return self.checker.atomic(_selected(pointers, None), _size(pointers), _ORDER[sem], _SCOPE[scope], act)

    def _window(self, descriptor: Any, indices: list[Any], kind: int, rows: int | None = None) -> None:
        inside, where = interpreter.window(descriptor, indices)
        if inside is None:
            return
        if rows is not None and inside.ndim > 1:  # counted from the first of the block, which may lie outside of the tensor
            inside = inside[..., : max(0, rows - where[-2].start), :]
        if inside.size == 0:
            return
        addresses = np.array(inside.__array_interface__["data"][0], np.int64)
        for extent, stride in zip(inside.shape, inside.strides, strict=True):
            addresses = addresses[..., None] + np.arange(extent) * stride
        self.checker.access(addresses.reshape(-1), inside.itemsize, kind)

    def create_descriptor_load(self, descriptor: Any, indices: list[Any], *rest: Any, **named: Any) -> Any:
        thread = self.checker.current()
        self._window(descriptor, indices, READ, thread.used_rows)
        thread.used_rows = None
        return self.plain.create_descriptor_load(self.builder, descriptor, indices, *rest, **named)

    def create_descriptor_store(self, descriptor: Any, value: Any, indices: list[Any]) -> Any:
        self._window(descriptor, indices, STORE)
        return self.plain.create_descriptor_store(self.builder, descriptor, value, indices)


_HOOKED = [name for name in vars(_Operations) if name.startswith("create_")]


class CheckedCopyEngine(CpuCopyEngine):
    """The copy engine with its jobs checked when they are done, in its thread.

    They may rely on what they wait for, on earlier jobs and on what the host did before the first one, but not on what it did
    before others: a GPU's engine seldom orders them behind the caller's stream (`copy_engine.CudaCopyEngine.fork`).
    """

    def __init__(self, checker: Checker) -> None:
        self._checker, self._begun = checker, False
        super().__init__()

    def _queue(self, job: Callable[[], None]) -> None:
        known = None if self._begun else self._checker.queued()
        self._begun = True

        def ordered() -> None:
            self._checker.begin_job(known)
            job()

        super()._queue(ordered)

    def _met(self, address: int, value: int) -> bool:
        return self._checker.stream_wait(address, value, lambda: super(CheckedCopyEngine, self)._met(address, value))

    def _write(self, address: int, value: int) -> None:
        _written(self._checker, super()._write, address, value)

    def _copy(self, to: int, pitch_to: int, source: int, pitch_source: int, width: int, rows: int) -> None:
        self._checker.span(source, pitch_source, width, rows, READ)
        self._checker.span(to, pitch_to, width, rows, STORE)
        super()._copy(to, pitch_to, source, pitch_source, width, rows)

    def join(self, stuck: Callable[[float], Exception | None]) -> None:
        super().join(stuck)
        self._checker.join_engine()


def _written(checker: Checker, plain: Callable[[int, int], None], address: int, value: int) -> None:
    """A word of 32 bits is set, as the checker sees it."""

    def act() -> int:
        before = int(shm.word(address)[0])
        plain(address, value)
        return before

    checker.stream_write(address, value, act)


#: Collectives of torch.distributed that nobody leaves before everybody has come; some releases have not all of them.
MEETINGS = (
    "barrier",
    "monitored_barrier",
    "all_reduce",
    "all_gather",
    "all_gather_object",
    "all_gather_into_tensor",
    "all_gather_single",
)


def _meeting(checker: Checker, original: Callable, ours: ControlGroup) -> Callable:
    """One of these, told to the checker where its ranks are ranks of fluxlike."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def meeting(*args: Any, **named: Any) -> Any:
        given = signature.bind(*args, **named).arguments
        group = given.get("group") or dist.group.WORLD
        ranks = () if group is dist.GroupMember.NON_GROUP_MEMBER else tuple(dist.get_process_group_ranks(group))
        if given.get("async_op") or dist.get_rank() not in ranks or not set(ranks) <= set(ours.ranks):
            return original(*args, **named)
        if any(isinstance(t, torch.Tensor) and not t.numel() for t in given.values()):
            return original(*args, **named)  # of an empty one gloo's ranks need not wait for each other
        with checker.meeting(ranks):
            return original(*args, **named)

    return meeting


def start(ours: ControlGroup, executor: CpuExecutor) -> None:
    """Check what the ranks of ``ours`` do from now on, until `racecheck.stop`; of torch what this thread does. Collective."""
    checker = racecheck.start(ours)
    builder = interpreter.builder
    operations = _Operations(checker, builder)
    hooks: list[tuple[Any, str, Any]] = [
        (programs, "observer", checker),
        (control, "observer", checker),
        (executor, "copy_engine", functools.partial(CheckedCopyEngine, checker)),
        (executor, "write", functools.partial(_written, checker, executor.write)),
    ]
    hooks += [(dist, name, _meeting(checker, getattr(dist, name), ours)) for name in MEETINGS if hasattr(dist, name)]
    for owner, name, hook in hooks:
        checker.undo.append(functools.partial(setattr, owner, name, getattr(owner, name)))
        setattr(owner, name, hook)
    for name in _HOOKED:
        checker.undo.append(functools.partial(delattr, builder, name))
        setattr(builder, name, getattr(operations, name))
    checker.where = place
    checker.undo.append(racehost.see(checker))

"""What the host does to checked memory by torch: a dispatch mode, through which all operations of a thread go.

`see` turns it on in the thread that calls it. Each operation is looked at before it runs. A tensor that the schema of the operation
says it changes is written, any other is read; making a view, or looking at sizes only, is no access. Of an index with tensors just
the elements that it takes count, of all else the whole tensor does, which after slicing is the slice. What torch computes stays the
same: the operation runs as it would have run.

Not seen: other threads, and what goes past torch's operations (``numpy()``, ``tolist()``, pickles, addresses).
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from . import programs
from .racecheck import Checker
from .racereport import READ, STORE

#: Operations that look at the form of a tensor only, or give the same memory in another form without saying so.
_FORM_ONLY = re.compile(
    r"\w+_like|new_\w+|sym_\w+|is_(same_size|pinned|contiguous)|size|stride|numel|dim|storage_offset|record_stream|_unsafe_view"
)


#: Which elements of its first argument an operation takes, by the arguments that follow.
_TAKEN: dict[str, Callable[..., torch.Tensor]] = {
    "index": torch.ops.aten.index.Tensor,
    "index_put_": lambda elements, indices, *_: torch.ops.aten.index.Tensor(elements, indices),
    "_index_put_impl_": lambda elements, indices, *_: torch.ops.aten.index.Tensor(elements, indices),
    "masked_fill_": lambda elements, mask, *_: elements.masked_select(mask),
    "masked_select": lambda elements, mask: elements.masked_select(mask),
    "index_select": lambda elements, dim, index: elements.index_select(dim, index),
    "index_copy_": lambda elements, dim, index, *_: elements.index_select(dim, index),
    "index_fill_": lambda elements, dim, index, *_: elements.index_select(dim, index),
    "gather": lambda elements, dim, index: elements.gather(dim, index),
    "embedding": lambda elements, indices, *_: elements[indices],
}


@functools.cache
def _kinds(func: Any) -> tuple[tuple[str, int], ...]:
    """Name and kind of the arguments that an operation accesses, in order."""
    schema = getattr(func, "_schema", None)  # operations of a higher order have none, and call others
    if schema is None:
        return ()
    space, name = schema.name.split("::")
    arguments = [argument for argument in schema.arguments if "Tensor" in str(argument.type)]
    marks = [argument.alias_info for argument in arguments]
    changes = any(mark is not None and mark.is_write for mark in marks)
    if _FORM_ONLY.fullmatch(name) or torch.Tag.inplace_view in func.tags or (any(marks) and not changes):
        return ()
    if space == "c10d":  # these do not say what they change: it comes first
        return tuple((a.name, STORE if i == 0 and name.endswith("_") else READ) for i, a in enumerate(arguments))
    written = [mark is not None and mark.is_write for mark in marks]
    return tuple((a.name, STORE if changed else READ) for a, changed in zip(arguments, written, strict=True))


@functools.cache
def _is_made_of_others(func: Any) -> bool:
    """Whether torch has no kernel of its own for it; in inference mode such operations come as one."""
    plain = isinstance(func, torch._ops.OpOverload)
    return plain and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


class _Seen(TorchDispatchMode):
    supports_higher_order_operators = True
    #: For `ops.dispatcher`: what a call does by torch is to come here, and within an op it would not.
    looks_into_calls = True

    def __init__(self, checker: Checker) -> None:
        super().__init__()
        self.checker: Checker | None = checker
        self._process = os.getpid()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not to be wrapped for dynamo: the first operation of a rank would import it, which takes long."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        checker = self.checker
        if checker is None or programs.current() is not None or checker.is_blind() or self._process != os.getpid():
            return func(*args, **kwargs)
        if any(kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for kind in types):
            return NotImplemented  # a tensor that holds others: it takes itself apart, and they come here
        if _is_made_of_others(func):
            with self:
                return func.decompose(*args, **kwargs)
        self._look(checker, func, args, kwargs)
        return func(*args, **kwargs)

    def _look(self, checker: Checker, func: Any, args: Any, kwargs: Any) -> None:
        accesses = _kinds(func)
        if not accesses:
            return
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        for position, (name, kind) in enumerate(accesses):
            for tensor in _tensors(given.get(name)):
                if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.numel() == 0:
                    continue
                start, size = tensor.data_ptr(), tensor.element_size()
                last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
                if not checker.reaches(start, start + (last + 1) * size):
                    continue
                taken = _TAKEN.get(func._schema.name.split("::")[1]) if position == 0 else None
                if taken is None:
                    checker.strided(tensor, kind)
                else:
                    elements = torch.arange(last + 1, device="cpu").as_strided(tensor.shape, tensor.stride())
                    chosen = taken(elements, *args[1:]).reshape(-1)
                    checker.access(start + chosen.numpy().astype("int64") * size, size, kind)


def see(checker: Checker) -> Callable[[], None]:
    """Tell ``checker`` of what this thread does by torch; what comes back ends that."""
    mode = _Seen(checker)
    mode.__enter__()
    return functools.partial(_end, mode)


def _end(mode: _Seen) -> None:
    """Modes lie on each other, and somebody's may lie on this one. A mode of another thread stays, and sees nothing any more."""
    mode.checker = None
    stack = _python_dispatch._get_current_dispatch_mode_stack()  # this thread's
    if mode not in stack:
        return
    above = stack[stack.index(mode) + 1 :]
    for _ in above:
        _python_dispatch._pop_mode()
    mode.__exit__(None, None, None)
    for other in above:
        _python_dispatch._push_mode(other)

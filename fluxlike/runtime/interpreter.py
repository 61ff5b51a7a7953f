"""Run ``@triton.jit`` kernels on CPU tensors, without a GPU, without TRITON_INTERPRET, without a trace left behind.

``run(kernel, grid, *args, **kwargs)`` is the whole interface; `yield_program` is for waits, `configure` for tests.

Triton has an interpreter: it replaces the words of ``triton.language`` by functions that work on numpy arrays, and
calls the kernel as Python. As shipped it cannot serve here, for five reasons, and each has its answer below:

* It must be chosen for the whole process before Triton is imported, and leaves its replacements in ``triton.language``,
  after which nothing compiles. Here every replacement is written down and undone when the call ends (`_patched`).
* Its bfloat16 is wrong: sums and products of the bit patterns, casts that truncate. `_Builder` computes in float32 and
  rounds to nearest even.
* It runs the programs of a grid one after the other, so a program that waits for a later one waits for ever, though
  on a GPU both are resident. `programs.Grid` keeps all programs alive and passes one baton between them.
* A block behind a tensor descriptor is moved element by element through a block of pointers. `_Builder` takes a strided
  view of the memory.
* It adds the names of its own module to the globals of the kernel's module. `rewriting` uses a closure.

Everything else — loads, stores, atomics that are real atomics across processes — is Triton's own code.

``triton.language`` is shared by the process: while one thread is in `run`, others may be so, too, but may not compile or
interpret a kernel by other means.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as stock
from triton.runtime.jit import JITFunction, mangle_type
from triton.tools.tensor_descriptor import TensorDescriptor

from . import programs
from .operands import Semantic, lighter, narrow, operators, widen
from .programs import Schedule, configure, yield_program
from .rewriting import interpreted, plain

__all__ = ["Schedule", "configure", "run", "yield_program"]

# Keywords of a launch that mean something to a compiler only.
_COMPILE_OPTIONS = frozenset(
    {"num_warps", "num_stages", "num_ctas", "maxnreg", "cluster_dims", "launch_cooperative_grid", "launch_cluster"}
    | {"launch_pdl", "ir_override", "ptx_version", "ptx_options", "enable_fp_fusion", "extern_libs", "debug", "arch"}
    | {"sanitize_overflow", "default_dot_input_precision", "waves_per_eu", "matrix_instr_nonkdim", "kpack"}
)
_MISSING = object()
_ONLY_COMPILED = (
    "{} is for compiled kernels, and this one is interpreted on the CPU; put it behind `if not is_interp():` "
    "(fluxlike.kernels.lang), and what it computes, in words of triton.language, behind the other branch"
)


class _NotInterpreted(NotImplementedError, AttributeError):
    """The second for `hasattr`."""


_patch_lock = threading.Lock()
_inside: set[int] = set()  # threads in `run`
_saved: list[tuple[Any, str, Any]] = []  # what was there before they came


def is_look(op: Any, value: Any) -> bool:
    """Whether an atomic writes what is there: it only looks."""
    kinds = stock._ir.ATOMIC_OP
    return op in (kinds.ADD, kinds.OR, kinds.XOR) and not value.data.any()


def _is_bf16(handle: Any) -> bool:
    return handle.dtype.scalar == tl.bfloat16


# the operations


def window(descriptor: Any, indices: list[Any]) -> tuple[np.ndarray | None, tuple[slice, ...]]:
    """The part of a descriptor's block that lies inside the tensor: as memory, and as slices of the block."""
    element = descriptor.base.dtype.element_ty
    size = element.primitive_bitwidth // 8
    offsets = [int(index.data.item()) for index in indices]
    if offsets[-1] * size % 16:
        raise ValueError(f"descriptor access at column {offsets[-1]}: not a multiple of 16 bytes, which TMA requires")
    extents = [int(extent.data.item()) for extent in descriptor.shape]
    strides = [int(stride.data.item()) * size for stride in descriptor.strides]
    low = [max(0, -offset) for offset in offsets]
    high = [min(b, extent - o) for b, extent, o in zip(descriptor.block_shape, extents, offsets, strict=True)]
    if any(h <= l for l, h in zip(low, high, strict=True)):
        return None, ()
    address = int(descriptor.base.data.item())
    address += sum((o + l) * stride for o, l, stride in zip(offsets, low, strides, strict=True))
    shape = [h - l for l, h in zip(low, high, strict=True)]
    layout = {"data": (address, False), "shape": tuple(shape), "strides": tuple(strides), "version": 3}
    layout["typestr"] = stock._get_np_dtype(element).str
    view = np.asarray(types.SimpleNamespace(__array_interface__=layout))  # neither copied nor owned
    return view, tuple(slice(l, h) for l, h in zip(low, high, strict=True))


def _via_float32(name: str) -> Callable:
    """The builder's operation ``name`` with bfloat16 widened before and rounded after: Triton's would take the bits."""

    def operation(self: _Builder, *args: Any) -> Any:
        compute = getattr(super(_Builder, self), name)
        if not _is_bf16(args[0]):
            return compute(*args)
        wide = (stock.TensorHandle(widen(x.data), tl.float32) if hasattr(x, "data") else x for x in args)
        result = compute(*wide).data
        if result.dtype == np.bool_:
            return stock.TensorHandle(result, tl.int1)
        return stock.TensorHandle(narrow(result), tl.bfloat16)

    return operation


def _watched(name: str, effect: bool) -> Callable:
    """The builder's memory operation ``name``, preceded by a look at the schedule."""

    def operation(self: _Builder, *args: Any, **kwargs: Any) -> Any:
        programs.before_memory(effect)
        return getattr(super(_Builder, self), name)(*args, **kwargs)

    return operation


class _Builder(stock.InterpreterBuilder):
    """Triton's numpy operations with bfloat16 put right, descriptors as views, and the schedule asked before memory.

    A subclass, not a patch of the original: another user of Triton's interpreter in this process sees none of it.
    """

    def __init__(self) -> None:
        super().__init__()
        # The check for overflow costs more than the arithmetic it guards; device_assert costs nothing unless written.
        self.options = stock.InterpreterOptions(sanitize_overflow=False, debug=True)

    # Triton keeps these two in the builder; here several programs are alive at once, each in its thread.
    @property
    def grid_idx(self) -> tuple[int, int, int]:
        return programs.running().pid

    @property
    def grid_dim(self) -> tuple[int, int, int]:
        return programs.running().grid.dims

    def get_bf16(self, value: float) -> Any:
        return stock.TensorHandle(narrow(np.array([value])), tl.bfloat16)

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        to = dst_type.scalar
        if _is_bf16(src) and to != tl.bfloat16:
            return stock.TensorHandle(widen(src.data).astype(stock._get_np_dtype(to)), to)
        if to == tl.bfloat16 and not _is_bf16(src):
            return stock.TensorHandle(narrow(src.data), to)
        return super().cast_impl(src, dst_type)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        fp8 = src.dtype.scalar.is_fp8() or dst_type.scalar.is_fp8()
        if fp8 or rounding_mode not in (None, stock._ir.ROUNDING_MODE.RTNE):
            return super().create_fp_to_fp(src, dst_type, rounding_mode)
        return self.cast_impl(src, dst_type)

    binary_op = _via_float32("binary_op")
    unary_op = _via_float32("unary_op")
    create_fma = _via_float32("create_fma")
    _propagating_clampf = _via_float32("create_clampf")

    def create_maxnumf(self, left: Any, right: Any) -> Any:
        """Of a number and NaN the number, as compiled; Triton's gives NaN."""
        return self.binary_op(left, right, np.fmax)

    def create_minnumf(self, left: Any, right: Any) -> Any:
        return self.binary_op(left, right, np.fmin)

    def create_clampf(self, x: Any, low: Any, high: Any, propagate_nan: Any) -> Any:
        if propagate_nan != stock._ir.PROPAGATE_NAN.NONE:
            return self._propagating_clampf(x, low, high, propagate_nan)
        return self.create_minnumf(self.create_maxnumf(x, low), high)

    def create_ashr(self, left: Any, right: Any) -> Any:
        """Triton's makes the operands themselves signed."""
        return super().create_ashr(*(stock.TensorHandle(x.data, x.dtype) for x in (left, right)))

    def create_dot(self, a: Any, b: Any, d: Any, *options: Any) -> Any:
        """Sums in float32 whatever the operands, by float32 BLAS: numpy has no fast product of halves."""
        if a.dtype.scalar not in (tl.bfloat16, tl.float16):
            return super().create_dot(a, b, d, *options)
        left, right = (widen(x.data) if _is_bf16(x) else x.data.astype(np.float32) for x in (a, b))
        product = np.matmul(left, right)
        product += d.data
        return stock.TensorHandle(product.astype(d.data.dtype, copy=False), d.dtype.scalar)

    create_masked_load = _watched("create_masked_load", effect=False)
    create_masked_store = _watched("create_masked_store", effect=True)

    def create_atomic_rmw(self, op: Any, pointers: Any, value: Any, *rest: Any) -> Any:
        programs.before_memory(effect=False, look=is_look(op, value))
        return super().create_atomic_rmw(op, pointers, value, *rest)

    create_atomic_cas = _watched("create_atomic_cas", effect=False)

    def create_descriptor_load(self, desc: Any, indices: list[Any], *policy: Any, **policies: Any) -> Any:
        element = desc.base.dtype.element_ty
        pad_nan = desc.padding == stock._ir.PADDING_OPTION.PAD_NAN
        if pad_nan and element.is_fp8():
            return super().create_descriptor_load(desc, indices, *policy, **policies)
        programs.before_memory(effect=True)
        inside, where = window(desc, indices)
        if inside is not None and inside.shape == tuple(desc.block_shape):
            return stock.TensorHandle(inside.copy(), element)
        fill = 0 if not pad_nan else 0x7FC0 if element == tl.bfloat16 else np.nan
        block = np.full(desc.block_shape, fill, stock._get_np_dtype(element))
        if inside is not None:
            block[where] = inside
        return stock.TensorHandle(block, element)

    def create_descriptor_store(self, desc: Any, value: Any, indices: list[Any]) -> None:
        programs.before_memory(effect=True)
        inside, where = window(desc, indices)
        if inside is not None:
            inside[...] = value.data.reshape(desc.block_shape)[where]

    def create_inline_asm(self, *args: Any) -> Any:
        raise _NotInterpreted(_ONLY_COMPILED.format("inline_asm_elementwise"))

    def __getattr__(self, name: str) -> Any:
        raise _NotInterpreted(_ONLY_COMPILED.format(name))


#: What the interpreter calls for every operation; `racehooks` puts its own in front of some.
builder = _Builder()
_semantic = Semantic(builder)


# kernels as Python functions


def _assign(value: Any) -> Any:
    """What ``name = value`` stores in a kernel: the compiler makes tensors of numbers, so the same is done here."""
    if type(value) is tl.tensor:
        return value
    if type(value) is tuple:
        return tuple(_assign(item) for item in value)
    return _semantic.to_tensor(value, False)


def _interpreted(fn: types.FunctionType) -> Callable:
    return interpreted(fn, _assign)


# triton.language, for the length of a call


class _Recorder:
    """Stands in for Triton's patch scope and writes down what Triton would set, so that setting it later is cheap."""

    def __init__(self) -> None:
        self.values: dict[tuple[int, str], tuple[Any, str, Any]] = {}

    def set_attr(self, owner: Any, name: str, value: Any) -> None:
        self.values[id(owner), name] = (owner, name, value)


def _bind(member: Callable) -> Callable:
    """A builtin of triton.language that works on numpy: the same function, told to build with `builder`."""
    # Triton's interpreter, if somebody used it, leaves a lambda here that has the builtin as a default.
    while not tl.core.is_builtin(member):
        member = (getattr(member, "__kwdefaults__", None) or {})["member"]

    def bound(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = _semantic
        return member(*args, **kwargs)

    return bound


def _in_float32(apply: Callable) -> Callable:
    """A reduction or scan that sees bfloat16 as float32: Triton's would add up the bits."""

    def wrapped(input: Any, axis: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = input if isinstance(input, tuple) else (input,)
        wide = tuple(tl.cast(x, tl.float32) if x.dtype == tl.bfloat16 else x for x in inputs)
        axis = plain(axis)
        if axis is not None and axis < 0:  # Triton's looks for it among 0, 1, …
            axis += len(inputs[0].shape)
        results = apply(wide, axis, *map(plain, args), **{k: plain(v) for k, v in kwargs.items()})
        results = tuple(tl.cast(y, x.dtype) for x, y in zip(inputs, results, strict=True))
        return results if isinstance(input, tuple) else results[0]

    return wrapped


def _call_device_function(function: Any, *args: Any, **kwargs: Any) -> Any:
    """``JITFunction.__call__`` while a kernel is interpreted."""
    return _interpreted(function.fn)(*args, **kwargs)


@functools.cache
def _patches() -> list[tuple[Any, str, Any]]:
    """Every attribute that interpretation needs, as (owner, name, value)."""
    record = _Recorder()
    for owner in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base):
        for name, member in inspect.getmembers(owner):
            leaked = "member" in (getattr(member, "__kwdefaults__", None) or {}) and member.__name__ == "<lambda>"
            if tl.core.is_builtin(member) or leaked:
                record.set_attr(owner, name, _bind(member))
            elif owner is tl.tensor and "_semantic" in getattr(getattr(member, "__signature__", None), "parameters", ()):
                # x.exp(): a copy of the builtin without its mark
                record.set_attr(owner, name, functools.partialmethod(member, _semantic=_semantic))
            elif owner is tl.tensor and isinstance(member, JITFunction | stock.InterpretedFunction):
                # x.sum(): a JITFunction is no Python method, it would not get x.
                record.set_attr(owner, name, functools.partialmethod(_method, member))
    stock._patch_lang_tensor(tl.tensor, record)
    for module in (tl, tl.core):
        stock._patch_lang_core(module, record)
    for module in (tl, tl.core):
        for name in ("reduce", "associative_scan"):
            record.set_attr(module, name, _in_float32(record.values[id(module), name][2]))
    usual = {name: record.values[id(tl.tensor), name][2] for name in vars(tl.tensor) if (id(tl.tensor), name) in record.values}
    for name, operator in operators(usual).items():
        record.set_attr(tl.tensor, name, operator)
    for change in lighter():
        record.set_attr(*change)
    # Triton 3.6 asks int() of a one-element array, which numpy 2.4 no longer answers.
    record.set_attr(tl.tensor, "__index__", lambda self: int(self.handle.data.item()))
    record.set_attr(JITFunction, "__call__", _call_device_function)
    record.set_attr(stock.InterpretedFunction, "__call__", _call_device_function)
    return list(record.values.values())


def _method(tensor: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    return _call_device_function(function, tensor, *args, **kwargs)


def _restore(saved: list[tuple[Any, str, Any]]) -> None:
    try:
        while saved:
            owner, name, value = saved[-1]
            if value is not _MISSING:
                setattr(owner, name, value)
            elif name in vars(owner):
                delattr(owner, name)
            saved.pop()
    except BaseException:  # Ctrl-C here must not leave half of it behind.
        _restore(saved)
        raise


@contextlib.contextmanager
def _patched() -> Iterator[None]:
    """triton.language works on numpy inside; outside everything is the very object it was, last set first restored.

    Of several threads the first sets and the last restores.
    """
    me = threading.get_ident()
    try:
        with _patch_lock:
            for owner, name, value in () if _inside else _patches():
                # From the class itself, not by getattr: an inherited attribute must be deleted, not copied down.
                _saved.append((owner, name, vars(owner).get(name, _MISSING)))
                setattr(owner, name, value)
            _inside.add(me)
        yield
    finally:
        with _patch_lock:
            _inside.discard(me)
            if not _inside:
                _restore(_saved)


def _alone_in_child() -> None:
    """In a forked child the other threads are not there, which would end what they began; one may have held the lock."""
    global _patch_lock
    _patch_lock = threading.Lock()
    _inside.intersection_update({threading.get_ident()})
    if not _inside:
        _restore(_saved)


os.register_at_fork(after_in_child=_alone_in_child)


# the call


def _convert(value: Any) -> Any:
    """A kernel argument as the kernel sees it: numbers and tensors as scalars of the types a launch would give them."""
    if isinstance(value, TensorDescriptor):
        if getattr(value, "round_f32_to_tf32", False):
            raise ValueError("round_f32_to_tf32 is not interpreted: float32 stays float32 here")
        return _semantic.make_tensor_descriptor(
            base=_convert(value.base),
            shape=[_convert(int(extent)) for extent in value.shape],
            strides=[*(_convert(int(stride)) for stride in value.strides[:-1]), tl.constexpr(int(value.strides[-1]))],
            block_shape=[tl.constexpr(extent) for extent in value.block_shape],
            padding_option=value.padding,
        )
    if isinstance(value, tuple):
        items = [_convert(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if hasattr(value, "data_ptr"):
        device = getattr(value, "device", None)
        if device is not None and device.type != "cpu":
            raise ValueError(f"the interpreter works on CPU tensors, got one on {device}")
        kind = tl.str_to_ty(mangle_type(value), None)
        return tl.tensor(stock.TensorHandle(np.array([value.data_ptr()], dtype=np.uint64), kind), kind)
    if isinstance(value, bool):
        return tl.tensor(stock.TensorHandle(np.array([value]), tl.int1), tl.int1)
    if isinstance(value, int | float):
        kind = tl.float32 if isinstance(value, float) else tl.str_to_ty(mangle_type(value), None)
        return tl.tensor(stock.TensorHandle(np.array([value], dtype=stock._get_np_dtype(kind)), kind), kind)
    return value


@functools.lru_cache(maxsize=256)
def _signature(fn: types.FunctionType) -> tuple[inspect.Signature, frozenset[str]]:
    """The signature, and the names of the parameters that are compile-time constants."""
    signature = inspect.signature(fn)
    notes = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    constants = (name for name, note in notes.items() if note is tl.constexpr or "constexpr" in str(note))
    return signature, frozenset(constants)


def run(kernel: Any, grid: int | tuple[int, ...], /, *args: Any, **kwargs: Any) -> None:
    """Interpret ``kernel[grid](*args, **kwargs)`` on CPU tensors and return when every program is done.

    ``kernel`` is an ordinary ``@triton.jit`` function (or what that makes under TRITON_INTERPRET=1); it can be compiled
    before and after. Options for the compiler are accepted and ignored. All programs of the grid are alive together;
    one runs at a time, and changes places with another where it calls `yield_program`.

    An exception in a program stops the others and comes out as a RuntimeError naming kernel and program; exceptions of
    classes that have ``fluxlike_passthrough = True``, and KeyboardInterrupt, come out as they are.
    """
    fn = getattr(kernel, "fn", None)
    if not isinstance(kernel, JITFunction | stock.InterpretedFunction) or fn is None:
        raise TypeError(
            f"run() takes a @triton.jit function, not {type(kernel).__name__}; of one with @triton.autotune or @triton.heuristics "
            "pass kernel.fn, and the values that they would choose"
        )
    programs.refuse_inside("run()")
    dims = tuple(int(extent) for extent in (grid if isinstance(grid, tuple | list) else (grid,)))
    if not 1 <= len(dims) <= 3:
        raise ValueError(f"a grid has one to three dimensions, got {dims}")
    x, y, z = (*dims, 1, 1)[:3]
    signature, constants = _signature(fn)
    ignored = _COMPILE_OPTIONS - signature.parameters.keys()
    bound = signature.bind(*args, **{name: value for name, value in kwargs.items() if name not in ignored})
    bound.apply_defaults()
    if x * y * z <= 0:
        return
    programs._local.inside = True
    try:
        with _patched():
            values = {k: plain(v) if k in constants else _convert(v) for k, v in bound.arguments.items()}
            body = functools.partial(_interpreted(fn), **values)
            programs.run_grid(fn.__name__, body, (x, y, z))
    finally:
        programs._local.inside = False

"""Launches straight through the CUDA driver, of kernels that Triton has compiled and launched once.

Triton looks at every argument of every launch and makes its TMA descriptors anew, on the host some 50 µs for a kernel of ours with
its thirty arguments. Here the parameters lie as the kernel reads them, in one buffer, and a launch writes only what changed: the
addresses of tensors, or their descriptors, which are kept. The layout is asked of the driver (cuFuncGetParamInfo) and compared
with what Triton's signature says; where they differ, as a version of Triton that is not known might have it, `lay_out` says so
and Triton goes on launching.
"""

import ctypes
import functools
import struct
from collections.abc import Sequence
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from .driver import check, library

_FORMATS = {"i1": "?", "u1": "?", "i8": "b", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I", "i64": "q", "u64": "Q"}
_MAP_BYTES = 128
#: CUtensorMapDataType
_MAP_DTYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
_L2_PROMOTION_128B = 2
#: Descriptors kept of one parameter. An eager model has its tensors at a few addresses, again and again.
_KEPT = 256
#: What Triton says of a descriptor.
_DESCRIBED = {"fp4_padded", "elem_size", "block_size", "swizzle"}
_POINTER = struct.Struct("Q")
#: CUlaunchConfig: sizes of the grid and of a block, bytes of shared memory, stream, attributes, their number. Where the stream is.
_CONFIG, _CONFIG_STREAM = struct.Struct("<7I4xQQI4x"), 32


class NotKnown(Exception):
    """The parameters are not laid out as `DirectLaunch` knows it; the text says why."""


class DirectLaunch:
    """``compiled`` over ``programs`` programs, with ``args`` but for the tensors at ``varying``. NotKnown if it cannot be."""

    def __init__(self, compiled: Any, programs: int, args: Sequence[Any], varying: tuple[int, ...], device: torch.device) -> None:
        metadata = compiled.metadata
        for name in ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl"):
            if getattr(metadata, name, 0):
                raise NotKnown(f"the kernel has {name}")
        if metadata.num_ctas != 1:
            raise NotKnown("the kernel has clusters")
        self._device = device.index
        self._compiled, self._function = compiled, compiled.function  # the first keeps the second
        fields: list[tuple[str, Any]] = []
        self._setters: list[tuple[int, int, Any]] = []
        maps = list(getattr(metadata, "tensordesc_meta", None) or [])
        for position, kind in enumerate(compiled.src.signature.values()):
            if kind == "constexpr":
                continue
            if position >= len(args):
                raise NotKnown(f"parameter {position} has no argument")
            if position in varying:
                self._setters.append((varying.index(position), len(fields), self._encoder(args[position], maps)))
            fields += _fields(args[position], kind, maps)
        self._lay_out(fields)
        # As a structure, with four arguments: ctypes takes a microsecond more for the eleven of cuLaunchKernel.
        self._launch = library().cuLaunchKernelEx
        config = _CONFIG.pack(programs, 1, 1, 32 * metadata.num_warps, 1, 1, metadata.shared, 0, 0, 0)
        self._config = (ctypes.c_uint64 * (_CONFIG.size // 8)).from_buffer_copy(config)
        self._config_address, self._stream = ctypes.addressof(self._config), 0

    def _encoder(self, arg: Any, maps: list[dict]) -> Any:
        """Makes the descriptor of a tensor at an address; None for a plain pointer."""
        if not isinstance(arg, TensorDescriptor):
            return None
        if not maps:
            raise NotKnown("a descriptor that is no tensor map")
        return functools.lru_cache(_KEPT)(functools.partial(_encoded, arg.base.dtype, arg.shape, arg.strides, maps[0]))

    def _lay_out(self, fields: list[tuple[str, Any]]) -> None:
        """The buffer of the parameters, with the values of all ``fields``, and where in it the setters write."""
        places = _places(self._function)
        sizes = [_MAP_BYTES if kind == "map" else struct.calcsize(kind) for kind, _ in fields]
        if [size for _, size in places[: len(fields)]] != sizes or any(size != 8 for _, size in places[len(fields) :]):
            raise NotKnown(f"parameters of {[size for _, size in places]} bytes where {sizes} and scratch pointers were expected")
        self._memory = ctypes.create_string_buffer(places[-1][0] + places[-1][1] + 64)
        start = -ctypes.addressof(self._memory) % 64
        self._bytes = memoryview(self._memory).cast("B")[start:]
        for (kind, value), (offset, size) in zip(fields, places, strict=False):
            self._bytes[offset : offset + size] = value if kind == "map" else struct.pack(kind, value)
        self._setters = [(tensor, places[field][0], encode) for tensor, field, encode in self._setters]
        total = ctypes.c_size_t(places[-1][0] + places[-1][1])
        # CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE, CU_LAUNCH_PARAM_END
        address = ctypes.addressof(self._memory) + start
        self._extra = (ctypes.c_void_p * 5)(1, address, 2, ctypes.addressof(total), 0)
        self._extra_address, self._total = ctypes.addressof(self._extra), total

    def __call__(self, tensors: Sequence[torch.Tensor]) -> None:
        """On the current stream of the context's device, which must be current."""
        for tensor, offset, encode in self._setters:
            address = tensors[tensor].data_ptr()
            if encode is None:
                _POINTER.pack_into(self._bytes, offset, address)
            else:
                self._bytes[offset : offset + _MAP_BYTES] = encode(address)
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        if stream != self._stream:
            _POINTER.pack_into(self._config, _CONFIG_STREAM, stream)
            self._stream = stream
        result = self._launch(self._config_address, self._function, None, self._extra_address)
        if result != 0:
            check(result, "cuLaunchKernelEx")


def _fields(arg: Any, kind: str, maps: list[dict]) -> list[tuple[str, Any]]:
    """What a kernel gets for an argument: (format of `struct`, or "map", value). A descriptor takes the first of ``maps``."""
    if kind.startswith("tensordesc"):
        if not maps:
            raise NotKnown("a descriptor that is no tensor map")
        described = _encoded(arg.base.dtype, arg.shape, arg.strides, maps.pop(0), arg.base.data_ptr())
        return [("map", described), *[("i", size) for size in arg.shape], *[("q", step) for step in arg.strides]]
    if kind.startswith("*"):
        return [("Q", arg.data_ptr())]
    if kind not in _FORMATS:
        raise NotKnown(f"an argument of kind {kind}")
    return [(_FORMATS[kind], arg)]


def _places(function: int) -> list[tuple[int, int]]:
    """Offset and size of each parameter of a kernel."""
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    places: list[tuple[int, int]] = []
    while library().cuFuncGetParamInfo(function, len(places), ctypes.byref(offset), ctypes.byref(size)) == 0:
        places.append((offset.value, size.value))
    if not places:
        raise NotKnown("the driver does not tell the parameters of a kernel")
    return places


def _encoded(dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], meta: dict, address: int) -> bytes:
    """The CUtensorMap of a matrix at ``address``, as Triton's own launcher makes it: beyond the sides there are zeros."""
    rank = len(shape)
    if lacking := _DESCRIBED - meta.keys():
        raise NotKnown(f"a descriptor {meta} without {', '.join(sorted(lacking))}")
    if meta["fp4_padded"] or meta["elem_size"] != dtype.itemsize:
        raise NotKnown(f"a descriptor {meta} of {dtype}")
    memory = ctypes.create_string_buffer(_MAP_BYTES + 64)
    at = ctypes.addressof(memory) + -ctypes.addressof(memory) % 64
    sizes = (ctypes.c_uint64 * rank)(*reversed(shape))
    steps = (ctypes.c_uint64 * max(rank - 1, 1))(*[step * dtype.itemsize for step in reversed(strides[:-1])])
    box = (ctypes.c_uint32 * rank)(*reversed(meta["block_size"]))
    ones = (ctypes.c_uint32 * rank)(*[1] * rank)
    places = [ctypes.addressof(field) for field in (sizes, steps, box, ones)]
    result = library().cuTensorMapEncodeTiled(
        at, _MAP_DTYPES[dtype], rank, address, *places, 0, meta["swizzle"], _L2_PROMOTION_128B, 0
    )  # fmt: skip
    check(result, f"cuTensorMapEncodeTiled for {list(shape)} with strides {list(strides)}")
    return ctypes.string_at(at, _MAP_BYTES)

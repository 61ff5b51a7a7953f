"""The calls of the CUDA driver that are made from here, by ctypes.

A call of an operation makes ten to twenty of them, and cuda-bindings takes microseconds more for each: it makes an object of every
number. Structures are packed as cuda.h (CUDA 12 and 13) lays them out; where a function has versions, the newest of those is named.
"""

import ctypes
import functools
import struct
from collections.abc import Callable
from typing import Any

_NUMBER, _POINTER, _SIZE = ctypes.c_uint, ctypes.c_void_p, ctypes.c_size_t
_TYPES: dict[str, list[Any]] = {
    "cuLaunchKernelEx": [_POINTER] * 4,
    "cuFuncGetParamInfo": [_POINTER, _SIZE, _POINTER, _POINTER],
    "cuTensorMapEncodeTiled": [_POINTER, _NUMBER, _NUMBER, *[_POINTER] * 5, *[_NUMBER] * 4],
    "cuMemcpyAsync": [_POINTER, _POINTER, _SIZE, _POINTER],
    "cuMemcpy2DAsync_v2": [_POINTER, _POINTER],
    "cuStreamBatchMemOp_v2": [_POINTER, _NUMBER, _POINTER, _NUMBER],
    "cuStreamWriteValue32_v2": [_POINTER, ctypes.c_uint64, ctypes.c_uint32, _NUMBER],
    "cuEventRecord": [_POINTER, _POINTER],
    "cuStreamWaitEvent": [_POINTER, _POINTER, _NUMBER],
    "cuStreamCreateWithPriority": [_POINTER, _NUMBER, ctypes.c_int],
    "cuStreamSynchronize": [_POINTER],
    "cuStreamIsCapturing": [_POINTER, _POINTER],
    "cuStreamGetCaptureInfo_v2": [_POINTER] * 6,
    "cuStreamDestroy_v2": [_POINTER],
    "cuStreamBeginCapture_v2": [_POINTER, _NUMBER],
    "cuStreamEndCapture": [_POINTER, _POINTER],
    "cuGraphInstantiateWithFlags": [_POINTER, _POINTER, ctypes.c_uint64],
    "cuGraphDestroy": [_POINTER],
    "cuGraphLaunch": [_POINTER, _POINTER],
    "cuGraphExecDestroy": [_POINTER],
    "cuGetErrorName": [_NUMBER, _POINTER],
    "cuCtxGetCurrent": [_POINTER],
    "cuCtxSetCurrent": [_POINTER],
}
NON_BLOCKING, THREAD_LOCAL = 1, 1  # CU_STREAM_NON_BLOCKING, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
#: CUstreamBatchMemOpParams: operation, address, value, flags, alias; 48 bytes.
_MEMORY_OPERATION = struct.Struct("<I4xQQI4xQ8x")
_WAIT_VALUE_32, _WRITE_VALUE_32 = 1, 2  # wait: for at least the value, by flags 0
#: CUDA_MEMCPY2D: x, y, kind of memory, host, device, array, pitch, of the source and then of the destination; bytes of a row, rows.
_COPY_2D = struct.Struct("<QQI4xQQQQQQI4xQQQQQQ")
_UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED


@functools.cache
def library() -> ctypes.CDLL:
    """libcuda, with the types of what is called. Its calls let other threads run."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        for name, types in _TYPES.items():
            getattr(cuda, name).argtypes = types
    except (OSError, AttributeError) as problem:
        why = f"the CUDA driver is missing, or older than that of CUDA 12.4 ({problem}); install a newer one"
        raise RuntimeError(why) from problem
    return cuda


def check(result: int, what: str) -> None:
    """RuntimeError with the name of the error, if it is one."""
    if result != 0:
        name = ctypes.c_char_p()
        library().cuGetErrorName(result, ctypes.byref(name))
        said = name.value.decode() if name.value else f"CUDA error {result}"
        raise RuntimeError(f"{what} failed with {said}; see `python -m fluxlike doctor` for the driver and its versions")


def wait_operation(address: int, value: int) -> bytes:
    """For `batch`: go on once the 32-bit word at ``address`` is at least ``value``."""
    return _MEMORY_OPERATION.pack(_WAIT_VALUE_32, address, value, 0, 0)


def write_operation(address: int, value: int) -> bytes:
    """For `batch`: set the 32-bit word at ``address``, behind all that was queued before."""
    return _MEMORY_OPERATION.pack(_WRITE_VALUE_32, address, value, 0, 0)


def batch(stream: int, operations: list[bytes]) -> None:
    """Queue memory operations, in order. Each is queued once: the driver may write into its memory."""
    check(library().cuStreamBatchMemOp_v2(stream, len(operations), b"".join(operations), 0), "cuStreamBatchMemOp")


def copy(stream: int, to: int, source: int, nbytes: int) -> None:
    """``nbytes`` bytes."""
    check(library().cuMemcpyAsync(to, source, nbytes, stream), "cuMemcpyAsync")


def copy_2d(stream: int, to: int, pitch_to: int, source: int, pitch_source: int, width: int, rows: int) -> None:
    """``rows`` rows of ``width`` bytes."""
    described = _COPY_2D.pack(0, 0, _UNIFIED, 0, source, 0, pitch_source, 0, 0, _UNIFIED, 0, to, 0, pitch_to, width, rows)
    check(library().cuMemcpy2DAsync_v2(described, stream), "cuMemcpy2DAsync")


def write_value(stream: int, address: int, value: int) -> None:
    """Set the 32-bit word at ``address``, behind all that was queued before."""
    check(library().cuStreamWriteValue32_v2(stream, address, value, 0), "cuStreamWriteValue32")


def order(event: int, first: int, then: int) -> None:
    """What the stream ``then`` is given next comes behind what ``first`` holds now; ``event`` is used for it."""
    check(library().cuEventRecord(event, first), "cuEventRecord")
    check(library().cuStreamWaitEvent(then, event, 0), "cuStreamWaitEvent")


def make_stream(priority: int = 0) -> int:
    """A stream of its own, on the current device; not one of torch's, which are shared. A lower ``priority`` goes first."""
    stream = ctypes.c_void_p()
    check(library().cuStreamCreateWithPriority(ctypes.byref(stream), NON_BLOCKING, priority), "cuStreamCreateWithPriority")
    assert stream.value is not None
    return stream.value


def synchronize(stream: int) -> None:
    check(library().cuStreamSynchronize(stream), "cuStreamSynchronize")


def destroy_stream(stream: int) -> None:
    check(library().cuStreamDestroy_v2(stream), "cuStreamDestroy")


def is_capturing(stream: int) -> bool:
    """Whether a stream is being captured, by whichever thread."""
    if stream == 0:  # that of all threads cannot be, and the driver fails where one that it waits for is
        return False
    status = ctypes.c_int()
    check(library().cuStreamIsCapturing(stream, ctypes.byref(status)), "cuStreamIsCapturing")
    return status.value != 0


def capture_of(stream: int) -> int:
    """The number of the capture that a stream is part of, which no other has; 0 where it is part of none."""
    if stream == 0:
        return 0
    status, number = ctypes.c_int(), ctypes.c_uint64()
    found = library().cuStreamGetCaptureInfo_v2(stream, ctypes.byref(status), ctypes.byref(number), None, None, None)
    check(found, "cuStreamGetCaptureInfo")
    return 1 + number.value if status.value else 0


def captured(stream: int, queue: Callable[[], None]) -> int:
    """What ``queue`` queues on ``stream``, not run but as an executable graph; `destroy_graph` frees it."""
    graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
    check(library().cuStreamBeginCapture_v2(stream, THREAD_LOCAL), "cuStreamBeginCapture")
    try:
        queue()
    except BaseException:
        library().cuStreamEndCapture(stream, ctypes.byref(graph))
        if graph.value is not None:  # none of a capture that CUDA has ended
            library().cuGraphDestroy(graph)
        raise
    ended = library().cuStreamEndCapture(stream, ctypes.byref(graph))
    check(ended, "cuStreamEndCapture")
    instantiated = library().cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, 0)
    check(library().cuGraphDestroy(graph), "cuGraphDestroy")
    check(instantiated, "cuGraphInstantiate")
    assert executable.value is not None
    return executable.value


def launch_graph(executable: int, stream: int) -> None:
    check(library().cuGraphLaunch(executable, stream), "cuGraphLaunch")


def destroy_graph(executable: int) -> None:
    check(library().cuGraphExecDestroy(executable), "cuGraphExecDestroy")


def context() -> int:
    """The driver's context of this thread; 0 for none."""
    found = ctypes.c_void_p()
    check(library().cuCtxGetCurrent(ctypes.byref(found)), "cuCtxGetCurrent")
    return found.value or 0


def set_context(known: int) -> None:
    """This thread's calls belong to a context that another one had."""
    check(library().cuCtxSetCurrent(known), "cuCtxSetCurrent")

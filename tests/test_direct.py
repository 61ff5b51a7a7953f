"""Launches through the driver, one that only writes down what it is told: parameters lie where a kernel reads them."""

import contextlib
import ctypes
import re
import struct
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from fluxlike.runtime import cuda, direct
from fluxlike.runtime import driver as driver_module
from fluxlike.runtime.launches import Launch

SIGNATURE = {"x": "*bf16", "w": "tensordesc<bf16[64,32]>", "m": "i32", "big": "i64", "one": "constexpr", "BM": "constexpr"}
#: Offset and size of each parameter: x, the map of w with its sides and pitches, m, big, and two pointers of Triton's own.
PLACES = [(0, 8), (64, 128), (192, 4), (196, 4), (200, 8), (208, 8), (216, 4), (224, 8), (232, 8), (240, 8)]
META = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 32], "fp4_padded": False}


class Driver:
    """Part of libcuda; ``launches``: (shape, stream, the bytes of the parameters)."""

    def __init__(self, places=PLACES):
        self.places, self.launches, self.encoded, self.result = places, [], 0, 0

    def cuFuncGetParamInfo(self, function, index, offset, size):
        assert function == 1234
        if index >= len(self.places):
            return 1
        offset._obj.value, size._obj.value = self.places[index]
        return 0

    def cuTensorMapEncodeTiled(self, at, dtype, rank, address, sizes, steps, box, ones, interleave, swizzle, promotion, fill):
        assert at % 64 == 0 and (dtype, rank, interleave, swizzle, promotion, fill) == (9, 2, 0, 3, 2, 0)
        words = lambda kind, place, count: list((kind * count).from_address(place))  # noqa: E731
        described = words(ctypes.c_uint64, sizes, 2) + words(ctypes.c_uint64, steps, 1) + words(ctypes.c_uint32, box, 2)
        assert words(ctypes.c_uint32, ones, 2) == [1, 1]
        ctypes.memmove(at, struct.pack("6Q", address, *described) + bytes(80), 128)
        self.encoded += 1
        return self.result

    def cuGetErrorName(self, result, name):
        name._obj.value = b"CUDA_ERROR_OF_THE_TEST"
        return 0

    def cuLaunchKernelEx(self, config, function, params, extra):
        *shape, stream, attributes, count = struct.unpack("<7I4xQQI4x", ctypes.string_at(config, 56))
        assert (function, params, attributes, count) == (1234, None, 0, 0)
        one, buffer, two, size, end = (ctypes.c_void_p * 5).from_address(extra)
        assert (one, two, end) == (1, 2, None)
        self.launches.append((shape, stream, ctypes.string_at(buffer, ctypes.c_size_t.from_address(size).value)))
        return self.result


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    for module in (direct, driver_module):
        monkeypatch.setattr(module, "library", lambda: made)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 70 + device, raising=False)
    return made


def matrix(value: float = 0.0) -> torch.Tensor:
    return torch.full((100, 48), value, dtype=torch.bfloat16)


def arguments(x, w):
    return (x, TensorDescriptor(w, [100, 48], [48, 1], [64, 32]), 7, 1 << 40, 1)


def compiled(signature=SIGNATURE, **metadata):
    facts = {"num_ctas": 1, "num_warps": 8, "shared": 4096, "tensordesc_meta": [META], "global_scratch_size": 0} | metadata
    return SimpleNamespace(metadata=SimpleNamespace(**facts), function=1234, src=SimpleNamespace(signature=signature))


def launch(**how) -> direct.DirectLaunch:
    return direct.DirectLaunch(compiled(**how), 132, arguments(matrix(), matrix()), (0, 1), torch.device("cuda", 3))


def test_parameters_lie_where_the_kernel_reads_them(driver):
    run = launch()
    tensors = [(matrix(), matrix()), (matrix(), matrix()), (matrix(), matrix())]
    for pair in tensors:
        run(pair)
    assert len(driver.launches) == 3
    for (x, w), (shape, stream, data) in zip(tensors, driver.launches, strict=True):
        assert shape == [132, 1, 1, 256, 1, 1, 4096] and stream == 73 and len(data) == 248
        assert struct.unpack_from("Q", data, 0) == (x.data_ptr(),)
        # sides and box from the last to the first, the pitch in bytes
        assert struct.unpack_from("6Q", data, 64) == (w.data_ptr(), 48, 100, 96, 32, 64)
        assert struct.unpack_from("ii", data, 192) == (100, 48) and struct.unpack_from("qq", data, 200) == (48, 1)
        assert struct.unpack_from("i", data, 216) == (7,) and struct.unpack_from("q", data, 224) == (1 << 40,)
        assert data[232:] == bytes(16)


def test_descriptors_are_kept(driver):
    run = launch()
    x, first, second = matrix(), matrix(), matrix()
    before = driver.encoded
    for w in (first, second, first, second, first):
        run((x, w))
    assert driver.encoded - before == 2


@pytest.mark.parametrize(
    ("places", "how", "why"),
    (
        ([*PLACES[:2], (192, 8), *PLACES[3:]], {}, "were expected"),  # a side of 64 bits
        (PLACES[:-3], {}, "were expected"),  # fewer than the signature has
        ([*PLACES, (248, 4)], {}, "were expected"),  # something behind that is no pointer
        ([], {}, "does not tell"),
        (PLACES, {"global_scratch_size": 64}, "global_scratch_size"),
        (PLACES, {"num_ctas": 2}, "clusters"),
        (PLACES, {"tensordesc_meta": []}, "no tensor map"),
        (PLACES, {"tensordesc_meta": [META | {"elem_size": 4}]}, "a descriptor"),
        (PLACES, {"tensordesc_meta": [{name: META[name] for name in META if name != "swizzle"}]}, "without swizzle"),
        (PLACES, {"signature": SIGNATURE | {"m": "fp32"}}, "of kind fp32"),
        (PLACES, {"signature": SIGNATURE | {"more": "i32"}}, "no argument"),
    ),
)
def test_what_is_laid_out_otherwise_is_not_launched(driver, places, how, why):
    driver.places = places
    with pytest.raises(direct.NotKnown, match=why):
        launch(**how)
    assert driver.launches == []


def test_a_driver_that_refuses(driver):
    run, w = launch(), matrix()
    run((matrix(), w))
    driver.result = 700
    with pytest.raises(RuntimeError, match="cuLaunchKernelEx failed with CUDA_ERROR_OF_THE_TEST"):
        run((matrix(), w))
    with pytest.raises(RuntimeError, match=r"cuTensorMapEncodeTiled for \[100, 48\] with strides \[48, 1\] failed with CUDA_ERROR"):
        run((matrix(), matrix()))


class Executor:
    """Counts the launches that Triton makes."""

    device = torch.device("cuda", 3)

    def __init__(self):
        self.by_triton = []

    def launch(self, kernel, programs, args, constants, warps, stages):
        self.by_triton.append(args)
        return compiled() if kernel == "known" else compiled(num_ctas=2)

    def is_current(self):
        return True


@pytest.mark.parametrize(("kernel", "by_triton"), (("known", 1), ("strange", 4)))
def test_triton_makes_the_first_launch_or_all(driver, caplog, kernel, by_triton):
    executor = Executor()
    run = cuda.CudaLaunch(executor, kernel, 132, arguments(matrix(), matrix()), {}, 8, 3, (0, 1))
    tensors = [(matrix(), matrix()) for _ in range(4)]
    assert [run(pair) for pair in tensors] == [False, *[by_triton == 1] * 3]
    assert len(executor.by_triton) == by_triton and len(driver.launches) == 4 - by_triton
    for args, (x, w) in zip(executor.by_triton, tensors, strict=False):
        assert args[0] is x and args[1].base is w and args[2:] == (7, 1 << 40, 1)
    assert ("through Triton" in caplog.text) == (kernel == "strange")


@pytest.mark.parametrize("hook", ("launch_enter_hook", "launch_exit_hook"))
def test_who_listens_to_tritons_launches_hears_of_each(driver, hook):
    executor = Executor()
    run = cuda.CudaLaunch(executor, "known", 132, arguments(matrix(), matrix()), {}, 8, 3, (0, 1))
    heard, listen = getattr(knobs.runtime, hook), lambda metadata: None
    made = []
    for turn in range(4):
        heard.add(listen) if turn == 2 else None
        made.append(run((matrix(), matrix())))
    heard.remove(listen)
    assert made == [False, True, False, False] and run((matrix(), matrix()))


def test_a_launch_keeps_no_tensor_alive():
    executor = Executor()
    held = Launch(executor, "known", 1, arguments(matrix(), matrix()), {}, 8, 3, (0, 1))
    assert not any(isinstance(arg, torch.Tensor | TensorDescriptor) for arg in held._args)


def test_a_launch_makes_its_device_current_where_another_one_is(driver, monkeypatch):
    """As in a new thread; a stream of the one, and a kernel of the other, would not go together."""
    executor, on = Executor(), []

    @contextlib.contextmanager
    def device(which):
        on.append(which)
        yield
        on.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    run = cuda.CudaLaunch(executor, "known", 132, arguments(matrix(), matrix()), {}, 8, 3, (0, 1))
    seen, launch = [], driver.cuLaunchKernelEx
    driver.cuLaunchKernelEx = lambda *args: seen.append(list(on)) or launch(*args)
    run((matrix(), matrix()))
    for is_current in (True, False):
        executor.is_current = lambda is_current=is_current: is_current
        run((matrix(), matrix()))
    assert seen == [[], [executor.device]] and on == []


def test_order_of_streams(driver):
    calls = []
    driver.cuEventRecord = lambda *args: calls.append(("record", *args)) or 0
    driver.cuStreamWaitEvent = lambda *args: calls.append(("wait", *args)) or 0
    driver_module.order(3, 7, 5)
    assert calls == [("record", 3, 7), ("wait", 5, 3, 0)]
    for name in ("cuStreamWaitEvent", "cuEventRecord"):
        setattr(driver, name, lambda *args: 700)
        with pytest.raises(RuntimeError, match=f"{name} failed with CUDA_ERROR_OF_THE_TEST"):
            driver_module.order(3, 7, 5)


def test_whether_a_stream_is_captured(driver):
    status = [0]

    def asked(stream, found):
        assert stream == 7
        found._obj.value = status[0]
        return 0

    driver.cuStreamIsCapturing = asked
    for status[0], captured in ((0, False), (1, True), (2, True)):  # none, under way, begun but of no more use
        assert driver_module.is_capturing(7) is captured
    driver.cuStreamIsCapturing = lambda *args: 700
    with pytest.raises(RuntimeError, match="cuStreamIsCapturing failed with CUDA_ERROR_OF_THE_TEST"):
        driver_module.is_capturing(7)
    assert not driver_module.is_capturing(0)


def test_which_capture_a_stream_is_in(driver):
    state = [0, 0]

    def asked(stream, found, number, *others):
        assert stream == 7 and others == (None,) * 3
        found._obj.value, number._obj.value = state
        return 0

    driver.cuStreamGetCaptureInfo_v2 = asked
    seen = []
    for state[:] in ((0, 5), (1, 0), (1, 1), (2, 1)):  # none, two under way, the second of no more use
        seen.append(driver_module.capture_of(7))
    assert seen[0] == 0 and 0 not in seen[1:] and seen[1] != seen[2] == seen[3]
    driver.cuStreamGetCaptureInfo_v2 = lambda *args: 700
    with pytest.raises(RuntimeError, match="cuStreamGetCaptureInfo failed with CUDA_ERROR_OF_THE_TEST"):
        driver_module.capture_of(7)
    assert driver_module.capture_of(0) == 0


HEADER = Path(triton.__file__).parent / "backends/nvidia/include/cuda.h"


def c_type(text):
    """What C calls by ``text``: of 4 bytes for what is a small number or the name of an enumeration, of 8 for the rest."""
    wide = "*" in text or text in ("size_t", "cuuint64_t", "unsigned long long", "CUdeviceptr", "CUarray")
    wide = wide or text in ("CUstream", "CUfunction", "CUgraph", "CUgraphExec", "CUcontext", "CUevent")
    return ctypes.c_uint64 if wide else ctypes.c_uint32


def structure(name):
    """The structure of cuda.h, laid out by ctypes. Its union of two numbers is the wider one."""
    text = re.search(rf"struct {name} {{(.*?)}} ?[A-Z]?\w+;", HEADER.read_text(), re.S)[1]
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S).replace("union {", "")
    fields = [field.strip().rpartition(" ") for field in text.split(";") if field.strip() not in ("", "}")]
    kinds = {what: c_type(kind + ("*" if "*" in what else "")) for kind, _, what in fields}
    if "value64" in kinds:
        kinds = {what: kinds["value64"] if what == "value" else kind for what, kind in kinds.items() if what != "value64"}
    return type(name, (ctypes.Structure,), {"_fields_": [(what.lstrip("*"), kind) for what, kind in kinds.items()]})


def test_structures_are_those_of_cuda_h(driver):
    made = {}
    driver.cuMemcpy2DAsync_v2 = lambda described, stream: made.update(copy=(described, stream)) or 0
    driver.cuStreamBatchMemOp_v2 = lambda *args: made.update(batch=args) or 0
    driver_module.copy_2d(5, 3 << 40, 44, 1 << 40, 22, 55, 66)
    described, stream = made["copy"]
    copy = structure("CUDA_MEMCPY2D_st").from_buffer_copy(described)
    facts = {what: value for what, _ in copy._fields_ if (value := getattr(copy, what))}
    assert len(described) == ctypes.sizeof(copy) and stream == 5
    right = dict(srcMemoryType=4, srcDevice=1 << 40, srcPitch=22, dstMemoryType=4, dstDevice=3 << 40, dstPitch=44)
    assert facts == right | dict(WidthInBytes=55, Height=66)
    operations = [driver_module.wait_operation((1 << 45) + 8, 77), driver_module.write_operation(1 << 46, 2**32 - 1)]
    driver_module.batch(6, operations)
    stream, count, memory, flags = made["batch"]
    assert (stream, count, len(memory), flags) == (6, 2, 2 * 48, 0)
    for at, kind, right in ((0, "Wait", (1, (1 << 45) + 8, 77, 0, 0)), (48, "Write", (2, 1 << 46, 2**32 - 1, 0, 0))):
        one = structure(f"CUstreamMemOp{kind}ValueParams_st").from_buffer_copy(memory, at)
        assert tuple(getattr(one, what) for what, _ in one._fields_) == right
    assert "cuuint64_t pad[6];" in HEADER.read_text(), "an operation of a batch is not of 48 bytes"


def test_functions_and_numbers_are_those_of_cuda_h():
    """Also that each function is the version that C programs get, and takes the numbers at their width."""
    text = HEADER.read_text()
    newest = dict(re.findall(r"# *define (cu[A-Z]\w+) +(?:__CUDA_API_\w+\()?(cu[A-Z]\w+)", text))
    names = {version: name for name, version in newest.items()}
    for function, types in driver_module._TYPES.items():
        name = names.get(function, function)
        assert newest.get(name, name) == function
        taken = re.search(rf"CUresult CUDAAPI {name}\((.*?)\);", text, re.S)[1].split(",")
        kinds = [c_type(one.rpartition("*")[0] + "*" if "*" in one else one.strip().rpartition(" ")[0]) for one in taken]
        assert [ctypes.sizeof(kind) for kind in types] == [ctypes.sizeof(kind) for kind in kinds], function
    for name, value in (
        ("STREAM_NON_BLOCKING", driver_module.NON_BLOCKING),
        ("STREAM_CAPTURE_MODE_THREAD_LOCAL", driver_module.THREAD_LOCAL),
        ("STREAM_WAIT_VALUE_GEQ", 0),
        ("STREAM_WRITE_VALUE_DEFAULT", 0),
        ("STREAM_MEM_OP_WAIT_VALUE_32", 1),
        ("STREAM_MEM_OP_WRITE_VALUE_32", 2),
        ("MEMORYTYPE_UNIFIED", 4),
    ):
        assert int(re.search(rf"\bCU_{name} *= *(\w+)", text)[1], 0) == value, name


def test_words_that_the_executor_writes(driver, monkeypatch):
    """`write` goes to the current stream; `post` to one of the executor's own, and waits for it."""
    calls = []
    driver.cuStreamWriteValue32_v2 = lambda *args: calls.append(args) or 0
    driver.cuStreamSynchronize = lambda stream: calls.append(("synchronize", stream)) or 0
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    executor = object.__new__(cuda.CudaExecutor)
    executor.device, executor._posts = torch.device("cuda", 1), 9
    executor._threads = threading.local()
    executor._threads.known = True
    executor.write(1 << 45, 3)
    executor.post([1 << 46, 8], 2)
    assert calls == [(71, 1 << 45, 3, 0), (9, 1 << 46, 2, 0), (9, 8, 2, 0), ("synchronize", 9)]
    driver.cuStreamWriteValue32_v2 = lambda *args: 700
    with pytest.raises(RuntimeError, match="cuStreamWriteValue32 failed with CUDA_ERROR_OF_THE_TEST"):
        executor.write(8, 1)


def alone(**more):
    """What an executor starts with, of one rank."""
    return SimpleNamespace(nodes=[[0]], ranks=[0], rank=0, gather=lambda said, what: [said], **more)


def test_a_thread_of_the_users_gets_the_context(driver, monkeypatch):
    """The driver does not know the context of a new thread, if the device is the one on which threads start; once is enough."""
    calls = []

    def current(found):
        found._obj.value = 77
        return 0

    driver.cuCtxGetCurrent, driver.cuCtxSetCurrent = current, lambda known: calls.append((threading.get_ident(), known)) or 0
    driver.cuStreamCreateWithPriority = lambda stream, *how: setattr(stream._obj, "value", 9) or 0
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(cuda.nvshmem, "start", lambda *args, **how: None)
    executor = object.__new__(cuda.CudaExecutor)
    executor.device, executor.gpu, executor._threads = torch.device("cuda", 0), "GPU-a", threading.local()
    executor.start(alone())

    def use():
        for _ in range(2):
            with executor.current():
                pass

    use()
    assert calls == []
    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    assert calls == [(thread.ident, 77) for thread in threads]


@pytest.mark.parametrize(("value", "size", "told"), (("1", 2, True), ("0", 2, False), ("", 2, False), ("1", 1, False)))
def test_launches_that_block_are_told_of(driver, monkeypatch, caplog, value, size, told):
    """No copy of another rank's would be queued while its kernel waits for ours."""
    driver.cuCtxGetCurrent = driver.cuStreamCreateWithPriority = lambda found, *flags: setattr(found._obj, "value", 9) or 0
    monkeypatch.setattr(cuda.nvshmem, "start", lambda *args, **how: None)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", value)
    executor = object.__new__(cuda.CudaExecutor)
    executor.device, executor.gpu, executor._threads = torch.device("cuda", 0), "GPU-a", threading.local()
    executor.start(alone(size=size))
    assert ("CUDA_LAUNCH_BLOCKING is set" in caplog.text) == told


@pytest.mark.parametrize("found", (True, False))
def test_a_driver_that_is_missing_or_old(found, monkeypatch):
    driver_module.library.cache_clear()

    def load(name):
        if not found:
            raise OSError(f"{name}: cannot open shared object file")
        return SimpleNamespace()

    monkeypatch.setattr(ctypes, "CDLL", load)
    with pytest.raises(RuntimeError, match=r"missing, or older than that of CUDA 12\.4 .*(libcuda|cuLaunchKernelEx).*; install"):
        driver_module.library()

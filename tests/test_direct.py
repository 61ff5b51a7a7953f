"""Launches through the driver, one that only writes down what it is told: parameters lie where a kernel reads them."""

import ctypes
import struct
from types import SimpleNamespace

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from fluxlike.ops.context import Context
from fluxlike.runtime import cuda, direct
from fluxlike.runtime.launches import Launch

SIGNATURE = {"x": "*bf16", "w": "tensordesc<bf16[64,32]>", "m": "i32", "big": "i64", "one": "constexpr", "BM": "constexpr"}
#: Offset and size of each parameter: x, the map of w with its sides and pitches, m, big, and two pointers of Triton's own.
PLACES = [(0, 8), (64, 128), (192, 4), (196, 4), (200, 8), (208, 8), (216, 4), (224, 8), (232, 8), (240, 8)]
META = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 32], "fp4_padded": False}


class Driver:
    """cuFuncGetParamInfo, cuTensorMapEncodeTiled and cuLaunchKernel; ``launches``: (shape, stream, the bytes of the parameters)."""

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

    def cuLaunchKernel(self, function, *rest):
        *shape, stream, params, extra = rest
        assert function == 1234 and params is None
        one, buffer, two, size, end = (ctypes.c_void_p * 5).from_address(extra)
        assert (one, two, end) == (1, 2, None)
        self.launches.append((shape, stream, ctypes.string_at(buffer, ctypes.c_size_t.from_address(size).value)))
        return self.result


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setattr(direct, "driver", lambda: made)
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
    with pytest.raises(RuntimeError, match="cuLaunchKernel failed with CUDA error 700"):
        run((matrix(), w))
    with pytest.raises(RuntimeError, match=r"cuTensorMapEncodeTiled failed with CUDA error 700 for \[100, 48\]"):
        run((matrix(), matrix()))


class Executor:
    """Counts the launches that Triton makes."""

    device = torch.device("cuda", 3)

    def __init__(self):
        self.by_triton = []

    def launch(self, kernel, programs, args, constants, warps, stages):
        self.by_triton.append(args)
        return compiled() if kernel == "known" else compiled(num_ctas=2)

    def current(self):
        return cuda._AS_IT_IS


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


def test_a_launch_keeps_no_tensor_alive():
    executor = Executor()
    held = Launch(executor, "known", 1, arguments(matrix(), matrix()), {}, 8, 3, (0, 1))
    assert not any(isinstance(arg, torch.Tensor | TensorDescriptor) for arg in held._args)


class Graphs:
    """What the copy engine asks of the driver: ``done`` is what was queued or launched, ``alive`` the graphs that are there."""

    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)

    def __init__(self):
        self.done, self.alive, self.captured, self.made = [], {}, None, 0

    def job(self, name):
        (self.done if self.captured is None else self.captured).append(name)

    def cuStreamBeginCapture(self, stream, mode):
        self.captured = []
        return (0,)

    def cuStreamEndCapture(self, stream):
        graph, self.captured = self.captured, None
        return 0, graph

    def cuGraphInstantiate(self, graph, flags):
        self.made += 1
        self.alive[self.made] = graph
        return 0, self.made

    def cuGraphDestroy(self, graph):
        return (0,)

    def cuGraphLaunch(self, instance, stream):
        self.done.append(("graph", *self.alive[instance]))
        return (0,)

    def cuGraphExecDestroy(self, instance):
        del self.alive[instance]
        return (0,)


@pytest.fixture
def engine(monkeypatch):
    made = object.__new__(cuda.CudaCopyEngine)
    made._cu, made._raw, made._batch, made._graphs, made._once = Graphs(), 0, [], {}, set()
    made.capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    return made


def queue(engine, key, name):
    jobs = lambda: engine._cu.job(name)  # noqa: E731
    engine.queue(key, jobs)
    engine.remember(key, jobs)
    return engine._cu.done.pop()


def test_copies_that_come_again_become_a_graph(engine):
    assert [queue(engine, "a", "a") for _ in range(4)] == ["a", "a", ("graph", "a"), ("graph", "a")]
    assert [queue(engine, None, "b") for _ in range(4)] == ["b"] * 4, "memory that may be gone was put into a graph"
    assert len(engine._cu.alive) == 1 and engine._cu.done == []


def test_no_graph_is_made_or_launched_within_a_capture(engine):
    engine.capturing = True
    assert [queue(engine, "a", "a") for _ in range(3)] == ["a"] * 3
    engine.capturing = False
    assert [queue(engine, "a", "a") for _ in range(3)] == ["a", "a", ("graph", "a")]
    engine.capturing = True
    assert queue(engine, "a", "a") == "a"


def test_a_stamp_is_behind_what_was_queued(engine, monkeypatch):
    engine._stream = "side"
    engine._cu.cuStreamBatchMemOp = lambda raw, count, batch, flags: (engine._cu.job(tuple(batch)), (0,))[1]
    event = SimpleNamespace(record=lambda stream: engine._cu.job(("event", stream)))
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event if enable_timing else None)
    engine._batch += ["write", "wait"]
    assert engine.stamp() is event
    assert engine._cu.done == [("write", "wait"), ("event", "side")] and engine._batch == []


@pytest.mark.parametrize("traced", (False, True))
def test_traced_copies_are_not_made_a_graph(traced):
    """Events inside of a graph have no times."""
    keys = []
    executor = SimpleNamespace(overlapped=lambda engine, launch, key, queue, stuck, then: (keys.append(key), queue()))
    trace = SimpleNamespace(copies=["of the call before"]) if traced else None
    fields = dict(trace=trace, stats={"copies": 3}, world=SimpleNamespace(executor=executor), engine=None, _copies={})
    context = SimpleNamespace(**fields)
    Context.overlapped(context, lambda: None, "key", lambda: context.stats.update(copies=context.stats["copies"] + 2))
    assert keys == [None if traced else "key"] and context.stats["copies"] == 5
    assert not traced or trace.copies == []


def test_graphs_are_bounded_and_freed(engine):
    for key in range(cuda.GRAPHS + 3):
        for _ in range(2):
            queue(engine, key, key)
    assert len(engine._cu.alive) == len(engine._graphs) == cuda.GRAPHS and 0 not in engine._graphs
    engine.close()
    assert engine._cu.alive == {} == engine._graphs

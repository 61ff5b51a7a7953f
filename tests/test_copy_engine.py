"""Copy engines: a GPU's, its graphs, and other streams, with stand-ins for the driver, and a CPU's: no GPU is needed."""

import contextlib
import itertools
import threading
import time
from types import SimpleNamespace
from weakref import WeakKeyDictionary

import pytest
import torch

from fluxlike.ops.context import Context
from fluxlike.runtime import copy_engine, cpu, cuda
from fluxlike.runtime import driver as driver_module


class Graphs:
    """What the copy engine asks of the driver: ``done`` is what was queued or launched, ``alive`` the graphs that are there."""

    def __init__(self):
        self.done, self.alive, self.recorded, self.made = [], {}, None, 0

    def job(self, name):
        (self.done if self.recorded is None else self.recorded).append(name)

    def write_operation(self, address, value):
        return address, value

    def batch(self, stream, operations):
        self.job(tuple(operations))

    def captured(self, stream, jobs):
        self.recorded = []
        jobs()
        self.made += 1
        self.alive[self.made], self.recorded = self.recorded, None
        return self.made

    def launch_graph(self, executable, stream):
        self.done.append(("graph", *self.alive[executable]))

    def destroy_graph(self, executable):
        del self.alive[executable]


@pytest.fixture
def engine(monkeypatch):
    made = object.__new__(copy_engine.CudaCopyEngine)
    made.graphs, made.raw, made._batch, made._graphs, made._once = Graphs(), 0, [], {}, set()
    made._own = SimpleNamespace(stream="side", give_back=lambda: None)
    monkeypatch.setattr(copy_engine, "driver", made.graphs)
    made.capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    return made


def queue(engine, key, name):
    jobs = lambda: engine.graphs.job(name)  # noqa: E731
    engine.queue(key, jobs)
    engine.remember(key, jobs)
    return engine.graphs.done.pop()


def test_copies_that_come_again_become_a_graph(engine):
    assert [queue(engine, "a", "a") for _ in range(4)] == ["a", "a", ("graph", "a"), ("graph", "a")]
    assert [queue(engine, None, "b") for _ in range(4)] == ["b"] * 4, "memory that may be gone was put into a graph"
    assert len(engine.graphs.alive) == 1 and engine.graphs.done == []


def test_no_graph_is_made_or_launched_within_a_capture(engine):
    engine.capturing = True
    assert [queue(engine, "a", "a") for _ in range(3)] == ["a"] * 3
    engine.capturing = False
    assert [queue(engine, "a", "a") for _ in range(3)] == ["a", "a", ("graph", "a")]
    engine.capturing = True
    assert queue(engine, "a", "a") == "a"


def test_what_was_written_last_is_in_the_graph(engine):
    def jobs():
        engine.write(8, 1)

    for _ in range(3):
        engine.queue("a", jobs)
        engine.remember("a", jobs)
    assert engine.graphs.done == [((8, 1),), ((8, 1),), ("graph", ((8, 1),))] and engine._batch == []


def test_a_stamp_is_behind_what_was_queued(engine, monkeypatch):
    event = SimpleNamespace(record=lambda stream: engine.graphs.job(("event", stream)))
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event if enable_timing else None)
    engine._batch += ["write", "wait"]
    assert engine.stamp() is event
    assert engine.graphs.done == [("write", "wait"), ("event", "side")] and engine._batch == []


@pytest.mark.parametrize("pitch, apart", ((0, True), (7, True), (9, False), (2**31 - 1, False), (2**31, True)))
def test_rows_that_a_2d_copy_refuses_go_one_by_one(engine, pitch, apart):
    """Rows that overlap, as of an expanded tensor, or are too far apart."""
    for name in ("copy", "copy_2d"):
        setattr(engine.graphs, name, lambda *args, name=name: engine.graphs.job((name, *args)))
    engine.copy(100, 16, 1000, pitch, 8, 2)
    rows = [("copy", 0, 100, 1000, 8), ("copy", 0, 116, 1000 + pitch, 8)]
    assert engine.graphs.done == (rows if apart else [("copy_2d", 0, 100, 16, 1000, pitch, 8, 2)])


@pytest.mark.parametrize("traced", (False, True))
def test_traced_copies_are_not_made_a_graph(traced):
    """Events inside of a graph have no times."""
    keys = []
    executor = SimpleNamespace(overlapped=lambda engine, launch, key, queue, stuck, then: (keys.append(key), queue()))
    trace = SimpleNamespace(copies=["of the call before"]) if traced else None
    fields = dict(trace=trace, stats={"copies": 3}, world=SimpleNamespace(executor=executor), engine=None)
    context = SimpleNamespace(**fields, _copies=WeakKeyDictionary())
    Context.overlapped(context, lambda: None, "key", lambda: context.stats.update(copies=context.stats["copies"] + 2))
    assert keys == [None if traced else "key"] and context.stats["copies"] == 5
    assert not traced or trace.copies == []


def test_copies_of_a_graph_are_counted_whatever_else_was(engine):
    """As where lengths vary: thousands of kinds of calls, of which one comes often enough for a graph."""
    executor = object.__new__(cuda.CudaExecutor)
    executor.current, engine.fork, engine.join = contextlib.nullcontext, lambda: None, lambda: None
    fields = dict(trace=None, stats={"copies": 0}, world=SimpleNamespace(executor=executor), engine=engine)
    context = SimpleNamespace(**fields, _copies=WeakKeyDictionary())

    def call(key, copies):
        Context.overlapped(context, lambda: None, key, copies)

    def two():
        context.stats["copies"] += 2

    for _ in range(3):
        call("usual", two)
    for key in range(5000):
        call(key, lambda: context.stats.update(copies=context.stats["copies"] + 1))
    before = context.stats["copies"]
    call("usual", two)
    assert "usual" in engine._graphs and context.stats["copies"] == before + 2 == 5000 + 8
    assert len(context._copies) == 1, "counts of plans that are gone are kept"


def test_a_graph_that_cannot_be_made_is_done_without(engine, monkeypatch, caplog):
    """The copies of the call are queued by then: the call is as good as any."""

    def captured(stream, jobs):
        jobs()
        engine.write(8, 1)
        raise RuntimeError("cuStreamEndCapture failed with CUDA_ERROR_STREAM_CAPTURE_INVALIDATED")

    with monkeypatch.context() as patch:
        patch.setattr(engine.graphs, "captured", captured)
        assert [queue(engine, "a", "a") for _ in range(2)] == ["a", "a"]
        assert "longer: cuStreamEndCapture failed" in caplog.text and engine._batch == []
        engine.graphs.done.clear()
    assert [queue(engine, "a", "a") for _ in range(3)] == ["a"] * 3 and len(caplog.records) == 1, "tried and told again"
    assert [queue(engine, "b", "b") for _ in range(3)] == ["b", "b", ("graph", "b")]
    engine.close()
    assert engine._graphs == engine.graphs.alive == {}


def test_nothing_is_captured_while_a_thread_waits_for_the_device(engine, monkeypatch):
    """Either would fail; and who captures is waited for."""
    executor, seen = object.__new__(cuda.CudaExecutor), []
    executor.device = torch.device("cuda", 0)
    queue(engine, "a", "a")

    def synchronize(device):
        seen.append(queue(engine, "a", "a"))
        seen.append(dict(engine._graphs))

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    executor.synchronize()
    assert seen == ["a", {}]
    assert [queue(engine, "a", "a") for _ in range(2)] == ["a", ("graph", "a")]
    held, release = threading.Event(), threading.Event()

    def captured(stream, jobs):
        held.set()
        assert release.wait(20)
        return 1

    monkeypatch.setattr(engine.graphs, "captured", captured)
    queue(engine, "b", "b")
    capturing = threading.Thread(target=lambda: queue(engine, "b", "b"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: seen.append("waited"))
    waiting = threading.Thread(target=executor.synchronize)
    capturing.start()
    assert held.wait(20)
    waiting.start()
    waiting.join(0.2)
    assert "waited" not in seen
    release.set()
    capturing.join(20)
    waiting.join(20)
    assert seen[-1] == "waited" and "b" in engine._graphs


def test_graphs_are_bounded_and_freed(engine):
    for key in range(copy_engine.GRAPHS + 3):
        for _ in range(2):
            queue(engine, key, key)
        queue(engine, ("once", key), key)
    assert len(engine.graphs.alive) == len(engine._graphs) == copy_engine.GRAPHS and 0 not in engine._graphs
    assert 0 < len(engine._once) <= copy_engine.GRAPHS + 1
    engine.close()
    assert engine.graphs.alive == {} == engine._graphs


class Streams:
    """torch's streams, the driver's order of them, and NVSHMEM, which write down what is asked of them."""

    def __init__(self, monkeypatch):
        self.done = []
        said = self.done.append

        class Stream:
            def __init__(self, number, device=None):
                self.cuda_stream = number

        class Event:
            """Of torch's, which is made when it is first recorded."""

            cuda_event = 0

            def record(self, stream):
                self.cuda_event = 3

        def order(event, first, then):
            assert event == 3
            said((then, "waits for", "what", first, "holds"))

        numbers = itertools.count(5, 16)
        monkeypatch.setattr(torch.cuda, "ExternalStream", Stream)
        monkeypatch.setattr(driver_module, "make_stream", lambda priority: next(numbers))
        monkeypatch.setattr(cuda.streams.Own, "_free", {})
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(number=7))
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(driver_module, "order", order)
        queued = (lambda *put: said(("put", *put)), lambda *signal: said(("signal", *signal)), "ADD", "SET")
        monkeypatch.setattr(cuda.nvshmem, "_signals", lambda: queued)
        monkeypatch.setattr(cuda.nvshmem, "quiet", lambda stream: said(("quiet", stream)))


def test_a_side_stream_is_nobody_elses(monkeypatch):
    """Not one of torch's, which it hands out again; once its holder is gone it goes to the next, but not where it may be stuck."""
    Streams(monkeypatch)
    monkeypatch.setattr(torch.cuda, "Stream", None)
    gpu = torch.device("cuda", 0)
    executor = SimpleNamespace(device=gpu)
    engines = [copy_engine.CudaCopyEngine(gpu) for _ in range(40)]
    lanes, puts = cuda.CudaLanes(executor), cuda.CudaPuts(executor)
    held = [lanes.raw, puts.raw, *[made.raw for made in engines]]
    assert len(set(held)) == 42 and cuda.streams.Own(torch.device("cuda", 1)).raw not in held
    engines[0].abandon()
    stuck, free = {engines[0].raw}, {made.raw for made in engines[1:]}
    for ends in ("abandon", "close"):
        other = cuda.CudaPuts(executor)
        (stuck if ends == "abandon" else free).add(other.raw)
        getattr(other, ends)()
        del other
    for made in engines[:20]:  # also of contexts that somebody still holds
        made.close()
    closed = engines[:20]
    del engines, made
    again = [copy_engine.CudaCopyEngine(gpu) for _ in range(41)]
    found = {made.raw for made in again}
    assert len(found) == 41 and free < found and not found & {*stuck, lanes.raw, puts.raw}
    del closed
    assert cuda.streams.Own(gpu, -1).raw not in found, "one that was given back twice"
    again.pop().close()
    assert cuda.streams.Own(gpu).raw not in found, "of another priority"


def test_two_threads_may_order_streams_by_one_event(monkeypatch):
    """A call of one group waits for the ids that another one's thread has begun: none may wait for what the other one recorded."""
    Streams(monkeypatch)
    recorded, wrong = [0], []

    def order(event, first, then):
        recorded[0] = first
        time.sleep(1e-5)  # as the driver's calls let other threads run
        if recorded[0] != first:
            wrong.append((then, first, recorded[0]))

    monkeypatch.setattr(driver_module, "order", order)
    both = cuda.streams.Order(torch.device("cuda", 0))
    threads = [threading.Thread(target=lambda first=n: [both(first, first + 1) for _ in range(300)]) for n in (10, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_copies_begin_behind_the_caller_where_their_waits_are_not_enough(monkeypatch):
    """In the first call, in captures, and behind those: a graph that is replayed sets what a later call's copies wait for."""
    streams = Streams(monkeypatch)
    made = copy_engine.CudaCopyEngine(torch.device("cuda", 0))
    side = made.raw
    behind, joined = (side, "waits for", "what", 7, "holds"), (7, "waits for", "what", side, "holds")
    for capturing, orders in ((0, [behind, joined]), (0, [joined]), (0, [joined]), (1, [behind, joined]), (0, [behind, joined])):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=capturing: bool(now))
        streams.done.clear()
        made.fork()
        made.join()
        assert streams.done == orders


@pytest.mark.parametrize("flushes", (True, False))
def test_the_caller_is_behind_copies_that_an_interrupt_cut_short(monkeypatch, flushes):
    """What they copy from may be freed then; also where what was not queued yet cannot be."""
    streams, executor = Streams(monkeypatch), object.__new__(cuda.CudaExecutor)
    executor.current, done = contextlib.nullcontext, streams.done

    def batch(stream, operations):
        done.append(tuple(operations))
        if not flushes:
            raise RuntimeError("no memory")

    monkeypatch.setattr(driver_module, "write_operation", lambda address, value: address)
    monkeypatch.setattr(driver_module, "batch", batch)
    made = copy_engine.CudaCopyEngine(torch.device("cuda", 0))

    def copies():
        made.write(8, 1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt if flushes else RuntimeError):
        executor.overlapped(made, lambda: done.append("kernel"), None, copies, lambda seconds: None)
    assert done[1:] == ["kernel", (8,), (7, "waits for", "what", made.raw, "holds")]


@pytest.mark.parametrize("current", (0, 1))
def test_no_other_gpu_is_touched_from_a_thread(monkeypatch, current):
    """A thread begins on the first GPU, to which `torch.cuda.stream` returns at its end, and makes a CUDA context there."""
    Streams(monkeypatch)
    done, devices = [], [current]

    @contextlib.contextmanager
    def on(kind, what):
        done.append((kind, what, devices[-1]))
        yield

    @contextlib.contextmanager
    def device(which):
        devices.append(which.index)
        yield
        devices.pop()

    monkeypatch.setattr(torch.cuda, "stream", lambda stream: on("stream", stream))
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "set_device", lambda which: devices.append(which.index))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: devices[-1], raising=False)
    executor = object.__new__(cuda.CudaExecutor)
    executor.device, executor.is_capturing = torch.device("cuda", 1), lambda: False
    executor._threads = SimpleNamespace(known=True)
    monkeypatch.setattr(cuda.streams, "Switched", lambda stream: on("stream", stream))
    lanes = cuda.CudaLanes(executor)
    with lanes.of(0):
        assert done == []
    with lanes.of(1):
        assert done == [("stream", lanes._other, 1)]
    assert executor.lasting(lambda: torch.ones(2)).tolist() == [1, 1]
    assert [index for _, _, index in done] == [1, 1] and devices[-1] == 1


def test_memory_that_the_current_stream_uses_is_said_to_torch(monkeypatch):
    Streams(monkeypatch)
    told, executor = [], object.__new__(cuda.CudaExecutor)
    executor.device = torch.device("cuda", 0)
    executor.in_use(SimpleNamespace(record_stream=lambda stream: told.append(stream.cuda_stream)))
    assert told == [7]


@pytest.mark.parametrize("captured", (False, True))
def test_a_call_on_another_stream_is_behind_the_last_one(monkeypatch, captured):
    """But not where another thread captures that stream by now: the call would become part of its graph."""
    Streams(monkeypatch)
    waits, executor = [], object.__new__(cuda.CudaExecutor)
    executor.device, executor.current, executor.is_capturing = torch.device("cuda", 0), contextlib.nullcontext, lambda: False
    current = SimpleNamespace(wait_stream=waits.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(driver_module, "is_capturing", lambda stream: captured and stream == 9)
    assert executor.on_same_stream(None) == (7, current) == executor.on_same_stream((7, current))
    assert waits == []
    assert executor.on_same_stream((9, "another")) == (7, current)
    assert waits == ([] if captured else ["another"])


def test_puts_between_what_the_current_stream_does(monkeypatch):
    streams, used = Streams(monkeypatch), []
    current = lambda: used.append(1) or contextlib.nullcontext()  # noqa: E731
    executor = SimpleNamespace(device=torch.device("cuda", 0), one_host=True, current=current, far_posts=11)
    puts = cuda.CudaPuts(executor)
    puts.put(100, 200, 64, 300, 256, 3)
    puts.join()
    puts.add(400, 3)
    puts.quiet()
    assert streams.done == [
        (5, "waits for", "what", 7, "holds"),
        ("put", 100, 200, 64, 300, 256, "ADD", 3, 5),
        (7, "waits for", "what", 5, "holds"),
        ("signal", 400, 1, "ADD", 3, 7),
    ]
    assert len(used) == 3, "NVSHMEM, or the driver, was called with whatever device was current"
    executor.one_host = False
    puts.quiet()
    assert streams.done[4:] == [("quiet", 5), ("quiet", 7), ("quiet", 11)]


def test_ranks_of_other_nodes_are_told(monkeypatch):
    streams = Streams(monkeypatch)
    executor = object.__new__(cuda.CudaExecutor)
    executor.far_posts, executor.current = 11, contextlib.nullcontext
    executor.post_to([2, 3], 500, 9)
    assert streams.done == [("signal", 500, 9, "SET", 2, 11), ("signal", 500, 9, "SET", 3, 11)]


class Calls:
    """libcuda, whose calls write down their names and end with an error where ``failing`` says so."""

    def __init__(self, failing):
        self.failing, self.names = failing, []

    def __getattr__(self, name):
        def call(*args):
            self.names.append(name)
            if name == "cuGraphInstantiateWithFlags":
                args[0]._obj.value = 9
            if name == "cuStreamEndCapture" and name not in self.failing:
                args[1]._obj.value = 7
            return 700 if name in self.failing else 0

        return call


CAPTURE = ["cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphInstantiateWithFlags", "cuGraphDestroy"]


@pytest.mark.parametrize(("failing", "calls"), [(None, 4), *zip(CAPTURE, (1, 2, 4, 4), strict=True)])
def test_a_capture_and_its_errors(failing, calls, monkeypatch):
    """The graph is freed also if it cannot be made executable."""
    made = Calls([failing])
    monkeypatch.setattr(driver_module, "library", lambda: made)
    jobs = lambda: made.names.append("jobs")  # noqa: E731
    if failing:
        with pytest.raises(RuntimeError, match=failing.split("WithFlags")[0].removesuffix("_v2") + " failed with CUDA error 700"):
            driver_module.captured(3, jobs)
        made.names.remove("cuGetErrorName")
    else:
        assert driver_module.captured(3, jobs) == 9
    assert made.names == [CAPTURE[0], "jobs", *CAPTURE[1:]][: calls + (calls > 1)]


def test_what_is_captured_raises_its_own_error(monkeypatch):
    """And the capture is over: the stream would be of no use. What there is of a graph is freed."""

    def jobs():
        raise KeyError("mine")

    for failing, freed in (["cuStreamEndCapture"], []), ([], ["cuGraphDestroy"]):
        made = Calls(failing)
        monkeypatch.setattr(driver_module, "library", lambda made=made: made)
        with pytest.raises(KeyError, match="mine"):
            driver_module.captured(3, jobs)
        assert made.names == [*CAPTURE[:2], *freed]


def test_a_cpu_s_copy_engine_is_closed_behind_its_last_copy(monkeypatch):
    """What it writes to is given back when the ranks have met behind that."""
    engine, begun, done = cpu.CpuCopyEngine(), threading.Event(), []

    def copy(*how):
        begun.set()
        time.sleep(0.2)
        done.append(how)

    monkeypatch.setattr(engine, "_copy", copy)
    engine.copy(200, 8, 100, 4, 4, 2)
    assert begun.wait(5)
    engine.close()
    assert done == [(200, 8, 100, 4, 4, 2)]


def test_a_cpu_s_copy_ends_with_the_row_in_which_it_is_cancelled(monkeypatch):
    """As by an interrupt: then the program may free what is copied."""
    engine, moved = cpu.CpuCopyEngine(), []

    def move(*row):
        moved.append(row)
        if len(moved) == 2:
            engine.cancel()

    monkeypatch.setattr(cpu, "ctypes", SimpleNamespace(memmove=move))
    engine.copy(200, 8, 100, 4, 4, 5)
    engine.join(lambda seconds: None)
    engine.close()
    assert moved == [(200, 100, 4), (208, 104, 4)]

"""The schedule "decomposed", beyond what all schedules are put through: what is queued where, what is rounded when, who multiplies.

GPUs need not be there: what is queued is recorded in a dry world, and the streams are ones that write down what they are told.
"""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import TORCHRUN, rows_slice, run_ranks

import fluxlike
from fluxlike.ops import ag_gemm as ag
from fluxlike.ops import gemm_rs as rs
from fluxlike.runtime import cuda, driver, dry, world

# what is queued where


class Recorder:
    """An executor's lanes, products, launches and copies, one line each: "lane: what"."""

    def __init__(self, executor):
        self.lines, self.lane, self.ready = [], "0", 0
        self.executor, self.launch = executor, executor.launch
        executor.lanes, executor.multiply, executor.launch = lambda users: self, self.multiplied, self.launched
        executor.copy_engine, executor.write = lambda: self, self.stream_write

    def note(self, text, lane=None):
        self.lines.append(f"{lane or self.lane}: {text}")

    @contextlib.contextmanager
    def forked(self):
        self.note("fork")
        yield
        self.note("join")

    @contextlib.contextmanager
    def of(self, turn):
        before, self.lane = self.lane, str(turn % 2)
        yield
        self.lane = before

    def multiplied(self, a, w, out, bias):
        self.note(f"multiply {tuple(a.shape)} to {out.dtype} {tuple(out.shape)}")

    def launched(self, kernel, programs, args, constants, warps, stages):
        given = dict(zip(kernel.arg_names, args, strict=False))
        name = kernel.fn.__name__.removesuffix("_kernel").rpartition("_")[2]
        self.note(f"{name} {list(range(given['first'], given['first'] + given['number']))}" if "first" in given else name)

    def stream_write(self, address, value):
        self.note(f"go {(address - self.ready) // 4}: {value}")

    def wait(self, address, value):
        self.note(f"wait {value}", "copies")

    def write(self, address, value):
        self.note(f"write {value}", "copies")

    def copy(self, to, pitch_to, source, pitch_source, width, rows):
        self.note(f"copy {rows} rows", "copies")


FULL, SHORT = (f"multiply ({rows}, 8192) to torch.bfloat16 ({rows}, 14336)" for rows in (500, 201))


def test_the_copies_of_ag_gemm_wait_for_nothing_that_is_queued_behind_them():
    with dry.recording((9, 0), ranks=4, rank=1):
        told = Recorder(world.current().executor)
        with contextlib.closing(ag.create_ag_gemm_context(13, 16, 16, schedule="decomposed")) as ctx:
            told.ready = ctx.ready.data_ptr()
            ag.ag_gemm(dry.tensor((4, 16), torch.bfloat16), dry.tensor((8, 16), torch.bfloat16), ctx, m=13)
        assert ctx.last_path == "decomposed/torch" and ctx.stats["products"] == 4 and ctx.stats["copies"] == 3
    product = "multiply (4, 16) to torch.bfloat16 (4, 8)"
    assert told.lines == [
        "0: fork", "1: credits", "1: go 0: 1", f"0: {product}",
        "copies: wait 1", "copies: write 0", *["copies: copy 4 rows", "copies: write 1"] * 3,
        "1: arrived [2]", f"1: {product}",
        "0: arrived [3]", "0: multiply (1, 16) to torch.bfloat16 (1, 8)",
        "1: arrived [0]", f"1: {product}",
        "0: join", "0: end",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rank", "pieces"),
    (
        (0, ["1: arrived [1, 2]", "1: multiply (701, 8192) to torch.bfloat16 (701, 14336)"]),
        (1, ["1: arrived [2]", f"1: {SHORT}", "0: arrived [0]", f"0: {FULL}"]),
        (2, ["1: arrived [0, 1]", "1: multiply (1000, 8192) to torch.bfloat16 (1000, 14336)"]),
        (3, ["1: arrived [0, 1, 2]", "1: multiply (1201, 8192) to torch.bfloat16 (1201, 14336)"]),
    ),
)
def test_neighbouring_shards_that_come_in_time_are_multiplied_at_once(rank, pieces):
    """The last rank has no rows, the third fewer than the others."""
    m, k, n = 1201, 8192, 14336
    with dry.recording((9, 0), ranks=4, rank=rank):
        told = Recorder(world.current().executor)
        with contextlib.closing(ag.AGGemmContext(4 * 500, k, torch.bfloat16, None, "decomposed", 4 * n)) as ctx:
            x = dry.tensor((max(0, min(500, m - 500 * rank)), k), torch.bfloat16)
            z = [dry.tensor((m, n), torch.bfloat16)]
            ag.rows_of_a_node(ctx, x, [dry.tensor((n, k), torch.bfloat16)], [None], z, None, 500)
    assert [line for line in told.lines if "go" not in line][-len(pieces) - 2 : -2] == pieces


def test_the_copies_of_gemm_rs_wait_for_nothing_that_is_queued_behind_them():
    """And the sum, which may hold the whole GPU while it waits, is behind all that the peers wait for."""
    with dry.recording((9, 0), ranks=4, rank=1):
        told = Recorder(world.current().executor)
        with contextlib.closing(rs.create_gemm_rs_context(13, 16, schedule="decomposed")) as ctx:
            told.ready = ctx.ready.data_ptr()
            rs.gemm_rs(dry.tensor((13, 24), torch.bfloat16), dry.tensor((16, 24), torch.bfloat16), ctx)
        assert ctx.last_path == "decomposed/torch" and ctx.stats["products"] == 4 and ctx.stats["copies"] == 3
    partial = "multiply (4, 24) to torch.bfloat16 (4, 16)"
    assert told.lines == [
        "0: credits", f"0: {partial}", "0: go 0: 1",
        "0: multiply (1, 24) to torch.bfloat16 (1, 16)", "0: go 1: 1",
        f"0: {partial}", "0: go 2: 1",
        *["copies: wait 1", "copies: write 0", "copies: copy 4 rows", "copies: write 1"],
        *["copies: wait 1", "copies: write 0", "copies: copy 1 rows", "copies: write 1"],
        *["copies: wait 1", "copies: write 0", "copies: copy 4 rows", "copies: write 1"],
        f"0: {partial}", "0: sum",
    ]  # fmt: skip


class Streams:
    """torch's streams, by names for numbers, one of which is current; ``said``: what they wait for."""

    def __init__(self, monkeypatch):
        self.said, self.current, self.capture = [], "caller's", {}  # the last of each stream that is captured
        event = SimpleNamespace(record=lambda stream: None, cuda_event=3)
        other = SimpleNamespace(cuda_stream="other", stream_id="other", device_index=0, device_type=1)
        monkeypatch.setattr(torch.cuda, "Event", lambda: event)
        monkeypatch.setattr(torch.cuda, "ExternalStream", lambda raw, device: other)
        monkeypatch.setattr(driver, "make_stream", lambda priority: "other")
        monkeypatch.setattr(cuda.streams.Own, "_free", {})
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capture_of(self.current) != 0)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: self.current, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", lambda index: (self.current, index, 1), raising=False)
        monkeypatch.setattr(torch._C, "_cuda_setStream", self.switch, raising=False)
        monkeypatch.setattr(driver, "order", self.order)
        monkeypatch.setattr(driver, "capture_of", self.capture_of)

    def switch(self, stream_id, device_index, device_type):
        assert (device_index, device_type) == (0, 1), "torch would make another device current"
        self.current = stream_id

    def capture_of(self, stream):
        return self.capture.get(stream, 0)

    def order(self, event, first, then):
        """What waits for a stream of a capture is part of it; CUDA refuses an order of streams of two."""
        assert event == 3
        of = self.capture_of(first)
        assert self.capture_of(then) in (0, of), f"{then} of another capture than {first}"
        if of:
            self.capture[then] = of
        self.said.append(f"{then} waits for what {first} holds")

    @contextlib.contextmanager
    def switched(self, name):
        before, self.current = self.current, name
        yield
        self.current = before


def streams_of(monkeypatch):
    streams, executor = Streams(monkeypatch), object.__new__(cuda.CudaExecutor)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    executor.device, executor._lanes, executor._threads = torch.device("cuda", 0), {}, SimpleNamespace(known=True)
    return streams, executor


def lanes_of(monkeypatch):
    streams, executor = streams_of(monkeypatch)
    lanes = executor.lanes("a group's")
    assert executor.lanes("a group's") is lanes is not executor.lanes("another's")  # contexts that are made anew share the streams
    return streams, lanes


@pytest.mark.parametrize("fails", (False, True))
def test_a_gpus_second_lane_begins_and_ends_with_the_first(monkeypatch, fails):
    streams, lanes = lanes_of(monkeypatch)
    with contextlib.suppress(KeyError), lanes.forked():
        for turn in range(4):
            with lanes.of(turn):
                streams.said.append(streams.current)
        if fails:
            raise KeyError
    assert streams.said == [
        "other waits for what caller's holds", "caller's", "other", "caller's", "other", "caller's waits for what other holds",
    ]
    assert streams.current == "caller's"
    streams.said.clear()
    lanes.wait()
    assert streams.said == ["caller's waits for what other holds"]


def test_memory_of_the_second_lane_is_not_taken_from_who_still_reads_it(monkeypatch):
    """By a call on another stream, which gets what an earlier call's stream has dropped but may not have read yet."""
    streams, lanes = lanes_of(monkeypatch)

    def forked(name, until=None):
        """The streams that the second lane begins behind, but for the caller's; ``until``: where the call ends, if elsewhere."""
        streams.said.clear()
        with streams.switched(name), contextlib.ExitStack() as joined:
            joined.enter_context(lanes.forked())
            assert streams.said[0] == f"other waits for what {name} holds"
            began = [said.removeprefix("other waits for what ").removesuffix(" holds") for said in streams.said[1:]]
            with streams.switched(until or name):
                joined.close()
        return sorted(began)

    assert [forked("a"), forked("a")] == [[], []]
    assert [forked("b"), forked("b")] == [["a"], []]
    assert [forked("c", until="d"), forked("a")] == [["b"], ["c", "d"]]
    streams.capture = {"of a capture": 1, "another of it": 1}
    assert forked("of a capture") == [], "a captured stream waits for one outside of the graph"
    assert [forked("another of it") for _ in range(2)] == [["of a capture"], []]
    streams.capture = {"of a capture": 2}
    assert forked("of a capture") == [], "behind what is in a graph that has ended"
    streams.capture = {}
    assert forked("b") == ["a"]


def test_the_second_lane_stays_out_of_what_another_thread_captures(monkeypatch):
    """On a stream of an earlier call, which the lane would begin behind; it does so when that is captured no more."""
    streams, lanes = lanes_of(monkeypatch)

    def forked(name):
        streams.said.clear()
        with streams.switched(name), lanes.forked():
            return sorted(said.split()[-2] for said in streams.said)

    assert [forked("a"), forked("b")] == [["a"], ["a", "b"]]
    streams.capture = {"b": 1}
    assert [forked("c"), forked("c")] == [["c"], ["c"]]
    streams.capture = {}
    assert [forked("c"), forked("c")] == [["b", "c"], ["c"]]


@pytest.mark.parametrize("capturing", (False, True))
def test_a_call_on_another_stream_is_behind_the_second_lane(monkeypatch, capturing):
    """Whose caller has ordered it behind the first stream already, and cannot do more; a capture has no other edge to it."""
    streams, lanes = lanes_of(monkeypatch)
    streams.capture = {"a": 1, "b": 1} if capturing else {}
    with streams.switched("a"), contextlib.ExitStack() as joined:
        joined.enter_context(lanes.forked())
        with streams.switched("b"):
            joined.close()
    assert streams.said[-2:] == [f"{name} waits for what other holds" for name in ("a", "b")]


@pytest.mark.parametrize(
    ("first", "then", "waits"),
    (
        ({}, {}, True),
        ({"caller's": 1, "other": 1}, {"caller's": 1, "other": 1}, True),
        ({"caller's": 1, "other": 1}, {"caller's": 2}, False),  # the graph that the lane was in has ended
        ({}, {"caller's": 1}, False),  # what began outside of it
        ({"caller's": 1, "other": 1}, {}, True),
    ),
)
def test_no_graph_waits_for_what_is_not_in_it(monkeypatch, first, then, waits):
    """Of a lane that was forked at one time, and is joined, or waited for, at another."""
    streams, lanes = lanes_of(monkeypatch)
    streams.capture = first
    joined = contextlib.ExitStack()
    joined.enter_context(lanes.forked())
    streams.capture = then
    for join in (lanes.wait, joined.close):
        streams.said.clear()
        join()
        assert streams.said == ["caller's waits for what other holds"] * waits


@pytest.mark.parametrize("what", ("lanes", "copy_engine", "puts"))
def test_which_calls_are_beside_a_capture(monkeypatch, what):
    """Those whose side stream another thread's graph has by now; the driver is not asked before a graph has had one."""
    streams, executor = streams_of(monkeypatch)
    monkeypatch.setattr(cuda.nvshmem, "put", lambda *_: None)
    side = executor.lanes("a group's") if what == "lanes" else getattr(executor, what)()

    def used():
        if what == "puts":
            side.put(100, 200, 64, 300, 256, 3)
            side.join()
            return
        with side.forked() if what == "lanes" else contextlib.closing(SimpleNamespace(close=side.join)):
            if what == "copy_engine":
                side.fork()

    used()
    monkeypatch.setattr(driver, "capture_of", None)
    assert not executor.is_beside_capture(side)
    monkeypatch.setattr(driver, "capture_of", streams.capture_of)
    streams.capture = {"caller's": 1, "another's": 2}
    used()
    assert streams.capture["other"] == 1 and not executor.is_beside_capture(side)
    for name in ("of no capture", "another's"):
        with streams.switched(name):
            assert executor.is_beside_capture(side)
    streams.capture = {}
    with streams.switched("of no capture"):
        assert not executor.is_beside_capture(side)


@pytest.mark.parametrize("schedule", ("copy_engine", "decomposed", "in_kernel"))
@pytest.mark.parametrize("op", ("gemm_rs", "ag_gemm"))
def test_calls_beside_a_capture_are_refused(monkeypatch, op, schedule):
    """Before the peers hear of one: neither it nor what is captured is of less use then. Without a side stream it goes on."""
    asked, told, refused = [], [], []
    with dry.recording((9, 0)) as records:
        ctx = getattr(fluxlike, f"create_{op}_context")(64, 32, 64, schedule=schedule)
        monkeypatch.setattr(dry.DryExecutor, "is_beside_capture", lambda self, *sides: asked.append(sides) or True)
        monkeypatch.setattr(dry.DryBoard, "call", lambda self, text: told.append(text))
        monkeypatch.setattr(dry.DryBoard, "refuse", lambda self, op: refused.append(op))
        x, w = dry.tensor((64 if op == "gemm_rs" else 16, 64), torch.bfloat16), dry.tensor((32, 64), torch.bfloat16)
        if schedule == "in_kernel":
            getattr(fluxlike, op)(x, w, ctx)
            assert records and told and not asked
            return
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"{op}: a CUDA graph is being captured of calls that"):
                getattr(fluxlike, op)(x, w, ctx)
        sides = [ctx.engine, ctx.lanes] if (op, schedule) == ("ag_gemm", "decomposed") else [ctx.engine]
        assert asked == [tuple(sides)] * 2 and refused == [op] * 2 and not records and not told
        monkeypatch.undo()
        getattr(fluxlike, op)(x, w, ctx)
        assert records


@pytest.mark.parametrize("fails", (False, True))
def test_a_gpus_copies_are_joined_behind_what_follows(fails):
    said = []

    def then():
        said.append("then")
        if fails:
            raise KeyError

    engine = SimpleNamespace(
        fork=lambda: said.append("fork"), join=lambda: said.append("join"),
        queue=lambda key, jobs: jobs(), remember=lambda key, jobs: said.append(f"remember {key}"),
    )  # fmt: skip
    executor = SimpleNamespace(current=contextlib.nullcontext)
    with contextlib.suppress(KeyError):
        how = (engine, lambda: said.append("launch"), "key", lambda: said.append("copies"), lambda seconds: None, then)
        cuda.CudaExecutor.overlapped(executor, *how)
    assert said == ["fork", "launch", "copies", "then", "join", *(["remember key"] * (not fails))]


# who multiplies, and what is rounded when


def random(shape, seed, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("with_bias", (False, True))
def test_cublas_is_asked_for_what_a_slot_and_a_result_need(with_bias):
    """As on a GPU, with torch's own product on a CPU: an operand and a result whose rows lie apart, a transposed weight."""
    a, w = random((6, 48), 1, torch.float32)[:, :40], random((40, 10), 2, torch.float32).T
    bias = random((10,), 3, torch.float32) if with_bias else None
    around = torch.full((6, 16), 7.0)
    cuda.CudaExecutor.multiply(None, a, w, around[:, :10], bias)
    torch.testing.assert_close(around[:, :10], a @ w.T + (0 if bias is None else bias))
    assert (around[:, 10:] == 7).all()


def rounded_once(group, dtype, autocast):
    """The documented roundings and no others, bit by bit."""
    dtype, size, rank = getattr(torch, dtype), dist.get_world_size(group), dist.get_rank(group)
    m, n, k = 37, 24, 40
    xs = [random((m, k), 10 + r, dtype) for r in range(size)]
    ws = [random((n, k), 20 + r, dtype) for r in range(size)]
    bias = random((n,), 30, dtype)
    mine = rows_slice(m, size, rank)
    product = lambda x, w: torch.mm(x.float(), w.float().T)  # noqa: E731
    total = product(xs[rank][mine], ws[rank])
    total = (total.to(dtype).float() if size > 1 else total) + bias.float()
    for step in range(1, size):
        source = (rank + step) % size
        total += product(xs[source][mine], ws[source]).to(dtype).float()
    with (
        fluxlike.create_gemm_rs_context(m, n, dtype=dtype, group=group, schedule="decomposed") as rs_ctx,
        fluxlike.create_ag_gemm_context(m, n, k, dtype, group, "decomposed") as ag_ctx,
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        y = fluxlike.gemm_rs(xs[rank], ws[rank], rs_ctx, bias=bias)
        z = fluxlike.ag_gemm(xs[0][mine].contiguous(), [ws[rank], ws[0][:7]], ag_ctx, bias=[bias, None], m=m)
        assert rs_ctx.last_path == ag_ctx.last_path == "decomposed/torch"
        assert rs_ctx.stats["products"] == size and ag_ctx.stats["products"] == 2 * size
    assert torch.equal(y, total.to(dtype)), "gemm_rs"
    for r in range(size):
        rows = rows_slice(m, size, r)
        assert torch.equal(z[0][rows], (product(xs[0][rows], ws[rank]) + bias.float()).to(dtype)), f"ag_gemm, shard {r}"
        assert torch.equal(z[1][rows], product(xs[0][rows], ws[0][:7]).to(dtype)), f"ag_gemm, shard {r}, second weight"


@pytest.mark.skipif(TORCHRUN, reason="what cuBLAS does with K is its own affair")
@pytest.mark.parametrize(("world", "dtype", "autocast"), ((3, "bfloat16", False), (2, "float16", True)))
def test_what_is_rounded_when(world, dtype, autocast):
    run_ranks(rounded_once, world, dtype=dtype, autocast=autocast)

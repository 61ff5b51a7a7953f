"""What the host has put between nodes, by whom and from where, and what it makes of the failures that kernels report."""

from pathlib import Path

import pytest
import torch

import fluxlike
from fluxlike.kernels import messages as kernels
from fluxlike.kernels import puts as device
from fluxlike.kernels import sync
from fluxlike.ops.group import GroupContext
from fluxlike.ops.puts import Puts
from fluxlike.runtime import dry, world
from fluxlike.runtime.errors import CallMismatch, PeerTimeout


def puts(op, nodes, rank, library=None):
    """What a rank of four sends in two calls, and its credits: (to, source, nbytes, signal, more, pe), (signal, pe)."""
    with dry.recording((9, 0), 4, rank, nodes, library) as records:
        if op == "gemm_rs":
            ctx = fluxlike.create_gemm_rs_context(64, 32, 64)
        else:
            ctx = fluxlike.create_ag_gemm_context(64, 32, 16)
        for _ in range(2):
            if op == "gemm_rs":
                fluxlike.gemm_rs(dry.tensor((64, 16), torch.bfloat16), dry.tensor((32, 16), torch.bfloat16), ctx)
            else:
                fluxlike.ag_gemm(dry.tensor((16, 16), torch.bfloat16), dry.tensor((32, 16), torch.bfloat16), ctx)
        post = ctx.messages
        heads = [record.args[0].data_ptr() for record in records if record.kernel is kernels.messages_head_kernel]
        if library is None:
            assert type(post) is Puts
            return post._puts.made, post._puts.added, heads, post
        assert not post._puts.made and not post._puts.added and not heads
        made, gave = [], []
        for record in records:
            if record.kernel is kernels.messages_put_kernel:
                box, _, to, head, _, _, _, there, slot, node, peer, _, m, columns, _, nbytes, count, peers, gives = record.args
                assert (m, columns, count) == (64, 32 if op == "gemm_rs" else 16, nodes)
                assert record.constants == {"NEAR": True, **device.library(library)} and there is post._there
                word = head.data_ptr() + 8 * (1 + slot * nodes + node)
                pes = [post._pes[(peer + step) % nodes] for step in range(peers)]
                made += [(to.data_ptr(), box.data_ptr(), 256 + nbytes, word, kernels.SIGNALS.value, pe) for pe in pes]
                heads.append(box.data_ptr())
                gave.append(gives)
        assert post.by_kernels == len(made)
        return made, gave, heads, post


@pytest.mark.parametrize("op", ("gemm_rs", "ag_gemm"))
@pytest.mark.parametrize("nodes", (2, 4))
@pytest.mark.parametrize("library", (None, Path("there")))
def test_who_gets_what(op, nodes, library):
    """Every counterpart gets one message a call, in its slot for this rank, with its signal, and the credit for the one it sent."""
    each = 4 // nodes
    for rank in range(4):
        made, credited, heads, post = puts(op, nodes, rank, library)
        node, others, inbox, head = rank // each, nodes - 1, post.inbox, post.head.data_ptr()
        counterparts = {rank % each + each * other for other in range(nodes)} - {rank}
        assert len(made) == 2 * others and post._pes == [rank % each + each * other for other in range(nodes)]
        by_kernels = [others, *[0] * (others - 1)] if op == "gemm_rs" else [others]  # by the first of a call, for the one before
        assert len(credited) == 2 * others if library is None else credited == 2 * by_kernels
        for call, slot in enumerate((1, 0)):
            mine = made[call * others : (call + 1) * others]
            assert {pe for *_, pe in mine} == counterparts
            assert {to for to, *_ in mine} == {inbox[slot, node].data_ptr()}
            assert {put[3:5] for put in mine} == {(head + 8 * (1 + slot * nodes + node), kernels.SIGNALS.value)}
            if library is None:
                word = head + 8 * (1 + (2 + slot) * nodes + node)
                assert set(credited[call * others : (call + 1) * others]) == {(word, pe) for pe in counterparts}
            sources = [source for _, source, *_ in mine]
            own = heads[call * len(heads) // 2 :][: len(heads) // 2]
            assert sources == own if op == "gemm_rs" else set(sources) == set(own), "each message with a head of its own"
            assert len(set(sources)) == (others if op == "gemm_rs" else 1)
            assert all(nbytes == 256 + 16 * (32 if op == "gemm_rs" else 16) * 2 for _, _, nbytes, *_ in mine)


@pytest.mark.parametrize("op", ("gemm_rs", "ag_gemm"))
@pytest.mark.parametrize("who, near, together, by_kernels", [
    ("auto", True, True, True), ("auto", True, False, False), ("auto", False, True, False), ("device", False, True, True),
    ("device", False, False, True), ("device", True, False, True), ("host", True, True, False),
])  # fmt: skip
def test_who_puts(op, who, near, together, by_kernels, monkeypatch):
    """FLUXLIKE_PUTS; auto: kernels those beside which nothing runs, where one host's GPUs are nodes. From where they are put."""
    monkeypatch.setenv("FLUXLIKE_PUTS", who)
    monkeypatch.setattr(dry.DryExecutor, "one_host", near)
    with dry.recording((9, 0), 2, 0, 2, Path("there")) as records:
        ctx = fluxlike.create_gemm_rs_context(60, 64, 32) if op == "gemm_rs" else fluxlike.create_ag_gemm_context(60, 64, 32)
        ctx.together = together
        x, w = dry.tensor((60 if op == "gemm_rs" else 30, 32), torch.bfloat16), dry.tensor((64, 32), torch.bfloat16)
        for _ in range(3):
            fluxlike.gemm_rs(x, w, ctx) if op == "gemm_rs" else fluxlike.ag_gemm(x, w, ctx)
        post = ctx.messages
        assert getattr(post, "by_kernels", 0) == 3 * by_kernels and len(post._puts.made) == 3 * (not by_kernels)
        launched = [record for record in records if record.kernel is kernels.messages_put_kernel]
        assert len(launched) == 3 * by_kernels
        by_host = who == "host" or (who == "auto" and not near)
        others = {record.kernel: record for record in records}
        if not by_kernels:
            head = others[kernels.messages_head_kernel]
            assert head.constants["GIVES"] == (0 if by_host else 1) and head.args[-1] == 1
        assert len(post._puts.added) == 3 * by_host
        assert {record.constants["NEAR"] for record in launched} <= {near}
        ended = others.get(kernels.messages_end_kernel)
        assert (ended is None) == ((op == "gemm_rs" or together) and (near or by_host))
        assert ended is None or ended.constants["QUIET"] == (not near and not by_host)
        placed = post.place(1, 30, 64 if op == "gemm_rs" else 32, torch.bfloat16)
        for record in launched:
            payload, start, nbytes = record.args[1], record.args[14], record.args[15]
            assert nbytes == placed.numel() * 2
            rows = near and together and op == "gemm_rs"  # the second half of all partial sums
            assert start == (30 * 64 * 2 if rows else 0)
            where = placed if not near or (op == "gemm_rs" and not together) else x
            assert rows or payload.data_ptr() == where.data_ptr()


@pytest.mark.parametrize("op", ("gemm_rs", "ag_gemm"))
def test_payload_that_kernels_cannot_take_from_where_it_lies(op, monkeypatch):
    """It is copied to where messages are sent from: rows that do not begin at 16 bytes, rows that lie apart."""
    with dry.recording((9, 0), 2, 0, 2, Path("there")) as records:
        if op == "gemm_rs":
            ctx, w = fluxlike.create_gemm_rs_context(6, 9, 16), dry.tensor((9, 8), torch.bfloat16)
            calls = [dry.tensor((6, 8), torch.bfloat16)]
        else:
            ctx, w = fluxlike.create_ag_gemm_context(6, 9, 16), dry.tensor((9, 16), torch.bfloat16)
            apart, shifted = dry.tensor((3, 32), torch.bfloat16)[:, :16], dry.tensor((4, 16), torch.bfloat16).view(-1)[1:49]
            calls = [apart, shifted.view(3, 16), dry.tensor((3, 16), torch.bfloat16)]
        ctx.together = True
        for x in calls:
            fluxlike.gemm_rs(x, w, ctx) if op == "gemm_rs" else fluxlike.ag_gemm(x, w, ctx)
        sent = [record.args[1] for record in records if record.kernel is kernels.messages_put_kernel]
        assert len(ctx.messages._puts.made) == (1 if op == "gemm_rs" else 0)
        placed = ctx.messages.outbox.data_ptr() + 256
        assert [t.data_ptr() == placed for t in sent] == ([] if op == "gemm_rs" else [True, True, False])


def test_a_library_that_does_not_link(monkeypatch):
    """It is said why, and what does without; the heap is as it was."""

    def ready(*_):
        raise ValueError("Failed to parse library at there")

    with dry.recording((9, 0), 2, 0, 2, Path("there")):
        monkeypatch.setattr(dry.DryExecutor, "ready", ready)
        with pytest.raises(RuntimeError, match=r"gemm_rs: .*\(ValueError: Failed to parse library.*set FLUXLIKE_PUTS=host"):
            fluxlike.create_gemm_rs_context(64, 32, 32)
        assert world.current().heap.in_use == 0
        monkeypatch.setenv("FLUXLIKE_PUTS", "host")
        with fluxlike.create_gemm_rs_context(64, 32, 32):
            assert world.current().heap.in_use > 0


def test_no_library_to_put_by(monkeypatch, caplog):
    """Asked for, it is missed, by name, and the heap is as it was; auto does without, and says so."""
    with dry.recording((9, 0), 2, 0, 2):
        monkeypatch.setenv("FLUXLIKE_PUTS", "device")
        with pytest.raises(RuntimeError, match=r"FLUXLIKE_PUTS=device.*libnvshmem_device.bc.*\(9, 0\).*pip install.*unset it"):
            fluxlike.create_gemm_rs_context(64, 32, 32)
        assert world.current().heap.in_use == 0
        monkeypatch.setenv("FLUXLIKE_PUTS", "auto")
        with fluxlike.create_gemm_rs_context(64, 32, 32) as ctx:
            assert type(ctx.messages) is Puts
        assert "no libnvshmem_device.bc, so the host puts" in caplog.text and "FLUXLIKE_PUTS=host" in caplog.text
        monkeypatch.setenv("FLUXLIKE_PUTS", "card")
        with pytest.raises(ValueError, match="FLUXLIKE_PUTS='card' is not one of host, device, auto"):
            fluxlike.create_gemm_rs_context(64, 32, 32)


#: Failures as kernels report them: in the context of the node, in what it exchanges with, between nodes; and who is named.
MESSAGE, SLOW, MATE = (sync.WAIT_MESSAGE, 1, 4, 3, 4), (sync.WAIT_PARTIAL, 1, 4, 3, 4), "because rank 1 gave up first"
AWAY, NEAR = "waited 60 s for rank 2 on node 1: its message of call 4", "waited 60 s for rank 1: its partial sums of call 4"
CAUSES = {
    "one of the node has, another node does not come": ((*SLOW, 2), None, (*MESSAGE, 0), AWAY),
    "the same in an exchange": (None, (*SLOW, 2), (*MESSAGE, 0), AWAY),
    "one of the node has, the counterpart has": ((*SLOW, 2), None, (*MESSAGE, 2), "stopped waiting for rank 2 on node 1"),
    "another node's is worth nothing": ((*SLOW, 2), None, (sync.PEER_FAILED, 1, 4, 4, 4, 0), "stopped waiting for rank 2 on"),
    "another call there": ((*SLOW, 2), None, (sync.WRONG_MESSAGE, 1, 8, 6, 4, 0), "CallMismatch"),
    "one of the node does not come": ((*SLOW, 0), None, (sync.NODE_FAILED, 0, 0, 0, 4, 0), NEAR),
    "nor another node": ((*SLOW, 0), None, (*MESSAGE, 2), NEAR),
    "one of the node has": ((*SLOW, 2), None, (sync.NODE_FAILED, 0, 0, 0, 4, 0), MATE),
    "only between nodes": (None, None, (*MESSAGE, 0), AWAY),
}


@pytest.mark.parametrize("how", CAUSES)
@pytest.mark.parametrize("end", ("call", "check", "close"))
def test_of_several_failures_the_cause_is_told(how, end, monkeypatch):
    """By a call, a check or the closing, once; what only says that another rank gave up is of no use where this one knows why."""
    *reports, named = CAUSES[how]
    monkeypatch.setenv("FLUXLIKE_TIMEOUT_S", "60")
    for name, answer in (("diagnose", None), ("freeze", None), ("where", "")):
        monkeypatch.setattr(dry.DryBoard, name, lambda self, *_, answer=answer: answer, raising=False)
    monkeypatch.setattr(dry.DryExecutor, "post", lambda *_: None, raising=False)
    monkeypatch.setattr(dry.DryExecutor, "post_to", lambda *_: None, raising=False)
    monkeypatch.setattr(GroupContext, "gave_up", lambda self: 2)
    with dry.recording((9, 0), 4, 0, 2):
        ctx = fluxlike.create_gemm_rs_context(64, 32, 64)
        for report, said in zip((ctx.inner.report, ctx.inner.inner[-1].report, ctx.messages._report), reports, strict=True):
            if said is not None:
                report[1:7] = torch.tensor([said[0].value, *said[1:]])
                report[0] = 1
        x, w = dry.tensor((64, 16), torch.bfloat16), dry.tensor((32, 16), torch.bfloat16)
        act = {"call": lambda: fluxlike.gemm_rs(x, w, ctx), "check": ctx.check, "close": ctx.close}[end]
        with pytest.raises((PeerTimeout, CallMismatch)) as raised:
            act()
        assert named in f"{type(raised.value).__name__}: {raised.value}"
        ctx.close()  # it has been said


@pytest.mark.parametrize("op", ("gemm_rs", "ag_gemm"))
@pytest.mark.parametrize(("joins", "puts"), ((True, True), (False, True), (True, False)))
def test_what_is_put_is_joined_where_a_call_ends_in_the_middle(op, joins, puts, monkeypatch, caplog):
    """Else a capture of the call ends with what CUDA says of work that is not joined. The call's own error stands in any case."""
    joined = []

    def join(self):
        joined.append(len(self.made))
        if not joins:
            raise RuntimeError("cuEventRecord failed with CUDA_ERROR_STREAM_CAPTURE_INVALIDATED")

    def put(self, *what):
        self.made.append(what)
        if not puts:  # the side stream is forked by now
            raise KeyError("mine")

    def ends(ctx, *_):
        if ctx.messages._puts.made:
            raise KeyError("mine")

    monkeypatch.setattr(dry.DryPuts, "put", put)
    monkeypatch.setattr(dry.DryPuts, "join", join)
    monkeypatch.setattr(dry.DryExecutor, "post", lambda *_: None, raising=False)
    monkeypatch.setattr(dry.DryExecutor, "post_to", lambda *_: None, raising=False)
    with dry.recording((9, 0), 4, 0, 2) as records:
        ctx = fluxlike.create_gemm_rs_context(64, 32, 64) if op == "gemm_rs" else fluxlike.create_ag_gemm_context(64, 32, 16)
        ctx.together, launch = False, world.current().executor.launch
        monkeypatch.setattr(world.current().executor, "launch", lambda *launched: (ends(ctx), launch(*launched)), raising=False)
        with pytest.raises(KeyError, match="mine"):
            if op == "gemm_rs":
                fluxlike.gemm_rs(dry.tensor((64, 16), torch.bfloat16), dry.tensor((32, 16), torch.bfloat16), ctx)
            else:
                fluxlike.ag_gemm(dry.tensor((16, 16), torch.bfloat16), dry.tensor((32, 16), torch.bfloat16), ctx)
        assert records and joined == [1]
        assert ("are not joined: cuEventRecord failed" in caplog.text) is not joins
        with pytest.raises(RuntimeError, match="an earlier call of this context was ended by KeyError"):
            ctx.raise_if_failed()


def test_the_stream_of_puts_of_a_context_that_ends(monkeypatch):
    """Of one that is closed, the next context may have it; not where the device fails, or it cannot be closed."""
    said = []
    for name in ("close", "abandon"):
        monkeypatch.setattr(dry.DryPuts, name, lambda self, name=name: said.append(name))
    with dry.recording((9, 0), 4, 0, 2):
        fluxlike.create_gemm_rs_context(64, 32, 64).close()
        assert said == ["close"]
        ctx = fluxlike.create_gemm_rs_context(64, 32, 64)
        monkeypatch.setattr(dry.DryExecutor, "synchronize", lambda self: (_ for _ in ()).throw(RuntimeError("the device fails")))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the device fails"):
                ctx.close()
        assert said == ["close"] and ctx in world.current().contexts
        ctx.abandon()
        assert said == ["close", "abandon"] and ctx.closed


def test_a_call_beside_a_capture_is_refused_once(monkeypatch):
    """Before the ranks of other nodes can hear of it; and counted once."""
    with dry.recording((9, 0), 4, 0, 2) as records:
        ctx = fluxlike.create_gemm_rs_context(64, 32, 64)
        x, w = dry.tensor((64, 16), torch.bfloat16), dry.tensor((32, 16), torch.bfloat16)
        with monkeypatch.context() as patch:
            patch.setattr(dry.DryExecutor, "is_beside_capture", lambda self, *sides: ctx.messages._puts in sides)
            with pytest.raises(RuntimeError, match="gemm_rs: a CUDA graph is being captured of calls"):
                fluxlike.gemm_rs(x, w, ctx)
        assert ctx.control.between == ctx.control.refused == 1 and not records
        fluxlike.gemm_rs(x, w, ctx)
        assert ctx.control.between == 2 and records

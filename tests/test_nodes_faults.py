"""Groups that span nodes: what goes wrong on one of them, every rank of both is told."""

import contextlib
import os
import re
import time

import pytest
import slow
import torch
import torch.distributed as dist
from emulated_puts import start
from faults import told
from ranks import device, run_fresh

import fluxlike
from fluxlike.ops.messages import Letters
from fluxlike.runtime import world
from fluxlike.runtime.errors import CallMismatch


def lacks_messages(group):
    """The last rank cannot make what sends messages: what the ranks have of the context by then is given back."""
    fluxlike.init(heap="shm", heap_bytes=1 << 20)
    this = world.current()
    before = this.heap.in_use, len(this.contexts)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="of the test"):
        if dist.get_rank() == 1:
            patch.setattr(Letters, "__init__", fails)
        fluxlike.create_gemm_rs_context(16, 16, dtype=torch.float32)
    assert (this.heap.in_use, len(this.contexts)) == before
    fluxlike.finalize()


def fails(*_):
    raise RuntimeError("of the test")


def test_a_rank_without_messages():
    for outcome in run_fresh(lacks_messages, 2, {"FLUXLIKE_VIRTUAL_NODES": "2"}):
        assert outcome.ok, str(outcome)


def wrong(group, how, op, schedule, puts):
    """The last rank, on node 1, does something else, or nothing: every rank is told, by its own node or by the other."""
    start(puts)
    call = getattr(fluxlike, op)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    guilty = rank == size - 1
    if op == "gemm_rs":
        ctx = None if how == "other" else fluxlike.create_gemm_rs_context(16, 16, dtype=torch.float32, schedule=schedule)
    else:
        ctx = fluxlike.create_ag_gemm_context(16, 16, 8, dtype=torch.float32, schedule=schedule)
    full = 16 if op == "gemm_rs" else 16 // size
    x, w = torch.ones(full, 8, device=device()), torch.ones(16, 8, device=device())
    call(x, w, ctx)
    if how != "other":
        ctx.check()
    dist.barrier()  # a rank still in its check would be told of what the others meet next
    since, said = time.monotonic(), ""
    if guilty and how == "absent":
        time.sleep(4)
    elif guilty and how == "dead":
        os._exit(3)
    try:
        if not (guilty and how == "absent"):
            call(x[: 3 * full // 4] if guilty else x, w, ctx)
            call(x, w, ctx)
            if how != "other":
                ctx.check()
    except (RuntimeError, ValueError) as error:
        said = f"{type(error).__name__}: {error}"
        if ctx is None:  # the context that was kept is made anew
            assert (fluxlike.gemm_rs(x, w) == 8 * size).all()
        else:
            with pytest.raises(type(error)):
                call(x, w, ctx)
    took = time.monotonic() - since
    with contextlib.suppress(CallMismatch):  # of a rank that made fewer calls
        fluxlike.finalize()
    return said, took


WRONG = [(how, 4, "shm", "letters", "gemm_rs", "auto") for how in ("absent", "dead", "other", "sizes")]
AG_WRONG = (("absent", "auto"), ("dead", "auto"), ("dead", "sequential"))
WRONG += [pytest.param(how, 4, "shm", "letters", "ag_gemm", schedule, marks=pytest.mark.slow) for how, schedule in AG_WRONG]
WRONG += [
    pytest.param(how, ranks, "nvshmem", puts, op, "auto", marks=pytest.mark.gpu)
    for how, op in (("absent", "gemm_rs"), ("dead", "gemm_rs"), ("sizes", "gemm_rs"), ("absent", "ag_gemm"), ("dead", "ag_gemm"))
    for ranks in (2, 4)
    for puts in ("host", "auto")
]


@pytest.mark.parametrize(("how", "ranks", "heap", "puts", "op", "schedule"), WRONG)
def test_what_goes_wrong(how, ranks, heap, puts, op, schedule):
    limit = 2 if how == "absent" else 10 if heap == "shm" else 4
    env, last = {"FLUXLIKE_VIRTUAL_NODES": "2", "FLUXLIKE_TIMEOUT_S": str(limit)}, ranks - 1
    dead = [last] if how == "dead" else []
    what = {"how": how, "op": op, "schedule": schedule, "puts": puts}
    outcomes = run_fresh(wrong, ranks, env=env, heap=heap, timeout=100, expect_dead=dead, **what)
    said = {outcome.rank: outcome.value for outcome in outcomes if outcome.value is not None}
    assert set(said) == set(range(last if how == "dead" else ranks)), [str(outcome) for outcome in outcomes]
    told = "PeerTimeout" if how in ("absent", "dead") else "CallMismatch"
    for rank in range(last):
        assert said[rank][0].startswith((told, "PeerTimeout")), said
        assert said[rank][1] < 9, said
    assert any(text.startswith(told) for text, _ in said.values()), said
    assert any(f"rank {last} on node 1" in text for text, _ in said.values()), said


def refusing(group, op, puts, who):
    """The ranks in ``who`` refuse the third of some calls, and go on: no call is taken for another one, and all ranks are told."""
    this = start(puts)
    rank, size, give_up_s = dist.get_rank(group), dist.get_world_size(group), 9
    shape = (16, 16) if op == "gemm_rs" else (16, 16, 8)
    w = torch.ones(16, 8, device=device())
    for _ in range(2):  # also where a context has been left behind by then
        ctx = getattr(fluxlike, f"create_{op}_context")(*shape, dtype=torch.float32)
        seen, said, since = [], "", time.monotonic()
        for value in range(1, 9):
            x = torch.full((16 if op == "gemm_rs" else 16 // size, 8), float(value), device=device())
            try:
                y = getattr(fluxlike, op)(x.double() if value == 3 and rank in who else x, w, ctx)
                this.executor.synchronize()
                seen.append((value, y))
            except ValueError as error:
                if isinstance(error, CallMismatch):
                    said = str(error)
                    break
                assert "float64" in str(error) and value == 3 and rank in who, error
            except fluxlike.PeerTimeout as error:
                said = str(error)
                break
        assert time.monotonic() - since < give_up_s
        with contextlib.suppress(RuntimeError, ValueError):
            ctx.close()
        if said and device().type == "cuda":
            seen.pop()  # what a kernel found out is raised by the call behind it
        for value, y in seen:
            assert (y == value * 8 * (size if op == "gemm_rs" else 1)).all(), f"call {value} is of another: {y}"
    fluxlike.finalize()
    return said


# Emulated puts cannot fail: what a kernel does about that is for compilers.
REFUSED = [("one", ranks, op, "shm", "letters") for ranks in (2, 4) for op in ("gemm_rs", "ag_gemm")]
REFUSED += [("node", 4, "gemm_rs", "shm", "letters"), ("all", 2, "gemm_rs", "shm", "host"), ("all", 4, "ag_gemm", "shm", "auto")]
REFUSED += [
    pytest.param(*case, "nvshmem", puts, marks=pytest.mark.gpu)
    for puts in ("host", "auto")
    for case in (("one", 2, "gemm_rs"), ("one", 4, "ag_gemm"), ("node", 4, "gemm_rs"), ("all", 2, "ag_gemm"))
]


@pytest.mark.parametrize(("who", "ranks", "op", "heap", "puts"), REFUSED)
def test_calls_that_are_refused(who, ranks, op, heap, puts):
    env = {"FLUXLIKE_VIRTUAL_NODES": "2", "FLUXLIKE_TIMEOUT_S": "5"}
    who = {"one": [ranks - 1], "node": list(range(ranks // 2, ranks)), "all": list(range(ranks))}[who]
    outcomes = run_fresh(refusing, ranks, env=env, heap=heap, timeout=100, op=op, puts=puts, who=who)
    assert all(outcome.ok for outcome in outcomes), [str(outcome) for outcome in outcomes]
    said = [outcome.value for outcome in outcomes]
    assert all(said) or (len(who) == ranks and not any(said)), said
    if len(who) < ranks:
        assert any("having refused 1 before" in text or "that this rank refused" in text for text in said), said


def apart(group, how):
    """What ranks of one node see at once is a wait that runs out between nodes; what it says to do works."""
    start()
    rank = dist.get_rank(group)
    x, w = torch.ones(16, 8, device=device()), torch.ones(16, 8, device=device())
    rs, ag = fluxlike.create_gemm_rs_context(16, 16, dtype=x.dtype), fluxlike.create_ag_gemm_context(16, 16, 8, dtype=x.dtype)
    fluxlike.gemm_rs(x, w, rs), fluxlike.ag_gemm(x[:8], w, ag, m=16)
    acts = {
        "another operation": lambda: fluxlike.ag_gemm(x[:8], w, ag, m=16),
        "raises": lambda: [leaves(rs), fluxlike.gemm_rs(x, w)],
        "closes": lambda: [rs.close(), fluxlike.gemm_rs(x, w)],
        "finalizes": fluxlike.finalize,
    }
    since, said = time.monotonic(), ""
    try:
        acts[how]() if rank == 1 else fluxlike.gemm_rs(x, w, rs)
    except fluxlike.PeerTimeout as error:
        said = str(error)
    assert time.monotonic() - since < 9
    fluxlike.finalize()
    start()
    assert (fluxlike.gemm_rs(x, w) == 16).all() and (fluxlike.ag_gemm(x[:8], w, m=16) == 8).all()
    fluxlike.finalize()
    return said


def leaves(context):
    with contextlib.suppress(KeyError), context:
        raise KeyError("of the caller")


@pytest.mark.parametrize("how", slow.behind(2, ["another operation", "finalizes", "raises", "closes"]))
def test_nodes_that_are_apart_begin_again(how):
    outcomes = run_fresh(apart, 2, {"FLUXLIKE_VIRTUAL_NODES": "2", "FLUXLIKE_TIMEOUT_S": "3"}, heap="shm", timeout=60, how=how)
    for outcome in outcomes:
        assert outcome.ok, str(outcome)
    for word in ("rank 0 waited ", " s for rank 1 on node 1", "To go on, call fluxlike.finalize and fluxlike.init on all ranks"):
        assert word in outcomes[0].value, outcomes[0].value


#: Arguments that no context can have, of gemm_rs or ag_gemm, and what is wrong, in the caller's words.
NO_CONTEXTS = (
    ("gemm_rs", {"max_m": True}, "max_m=True is not a whole number above 0"),
    ("gemm_rs", {"max_m": 2**31}, f"max_m={2**31} is more than"),
    ("gemm_rs", {"k": "many"}, "k='many' is not a whole number above 0"),
    ("gemm_rs", {"n": None}, "n=None is not a whole number above 0"),
    ("gemm_rs", {"max_m": 65, "schedule": "sequential/fused"}, "max_m up to 64, not for max_m=65"),
    ("ag_gemm", {"n": -1}, "n=-1 is not a whole number above 0"),
    ("ag_gemm", {"n": 2.5}, "n=2.5 is not a whole number above 0"),
    ("ag_gemm", {"max_m": 257, "schedule": "sequential/fused"}, "max_m up to 256, not for max_m=257"),
)


def arguments(group):
    """What a context is made for is looked at as the caller says it, not as a node's part of it, which is rounded up."""
    start()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for op, wrong, what in NO_CONTEXTS:
        with pytest.raises(ValueError, match=f"{op}: .*{re.escape(what)}"):
            getattr(fluxlike, f"create_{op}_context")(**{"max_m": 16, "n": 16, "k": 16} | wrong)
    fused = {"dtype": torch.bfloat16, "schedule": "sequential/fused"}
    x, w = torch.ones(128, 16, dtype=torch.bfloat16), torch.ones(16, 16, dtype=torch.bfloat16)
    with fluxlike.create_gemm_rs_context(64, 16, **fused) as rs, fluxlike.create_ag_gemm_context(128, 16, 16, **fused) as ag:
        assert (fluxlike.gemm_rs(x[:64], w, rs) == 16 * size).all()
        assert (fluxlike.ag_gemm(x[43 * rank : 43 * rank + 43], w, ag, m=128) == 16).all()
    fluxlike.finalize()


def test_contexts_that_cannot_be():
    for outcome in run_fresh(arguments, 3, {"FLUXLIKE_VIRTUAL_NODES": "3", "FLUXLIKE_TIMEOUT_S": "9"}, heap="shm", timeout=60):
        assert outcome.ok, str(outcome)


def unfit(group):
    """A call that ends in the middle, on all ranks, as no node can make its part of it: the next is told that it was another."""
    start()
    x, w = torch.ones(8, 16, dtype=torch.bfloat16), torch.ones(1024, 16, dtype=torch.bfloat16)
    with fluxlike.create_gemm_rs_context(8, 1024, schedule="sequential/fused") as ctx:
        assert (fluxlike.gemm_rs(x, w, ctx) == 64).all()
        ctx.together = False
        with pytest.raises(ValueError, match=r"and the part of a rank, .* make one with schedule='sequential' or 'auto'"):
            fluxlike.gemm_rs(x[:1], w, ctx)
        with pytest.raises(RuntimeError, match=r"an earlier call of this context was ended by ValueError \(gemm_rs: .* new one"):
            fluxlike.gemm_rs(x, w, ctx)
    fluxlike.finalize()


def test_a_call_behind_one_that_ended():
    for outcome in run_fresh(unfit, 4, {"FLUXLIKE_VIRTUAL_NODES": "2", "FLUXLIKE_TIMEOUT_S": "9"}, heap="shm", timeout=60):
        assert outcome.ok, str(outcome)


def closes_another(group):
    """Contexts that ranks of different nodes close in another order: all are told, as those of one node are."""
    start()
    rank, made = dist.get_rank(), [fluxlike.create_gemm_rs_context(8, 8, 16, torch.float32) for _ in range(2)]
    said = r"rank 0 is at 'closing context 1 over .*' and rank 1 at 'closing context 2 over "
    with pytest.raises(fluxlike.CallMismatch, match=said):
        made[rank].close()
    assert made[rank].closed and made[rank].inner.closed
    fluxlike.finalize()


def test_contexts_that_nodes_close_in_another_order():
    for outcome in run_fresh(closes_another, 2, {"FLUXLIKE_VIRTUAL_NODES": "2", "FLUXLIKE_TIMEOUT_S": "9"}, heap="shm", timeout=60):
        assert outcome.ok, str(outcome)


def ends_in_between(group):
    """Ctrl-C in finalize, with a context open: it is closed then, as one of a single node is."""
    start()
    ctx, x = fluxlike.create_gemm_rs_context(8, 8, 16, torch.float32), torch.ones(8, 8)

    def interrupted(*_):
        raise KeyboardInterrupt

    world.World._close_contexts = interrupted
    with pytest.raises(KeyboardInterrupt):
        fluxlike.finalize()
    assert ctx.closed and ctx.inner.closed
    ctx.close()
    for act in (ctx.check, lambda: fluxlike.gemm_rs(x, x, ctx)):
        with pytest.raises(RuntimeError, match=r"this context is closed|not initialised"):
            act()


def test_an_interrupted_finalize():
    for outcome in run_fresh(ends_in_between, 2, {"FLUXLIKE_VIRTUAL_NODES": "2", "FLUXLIKE_TIMEOUT_S": "9"}, timeout=60):
        assert outcome.ok, str(outcome)


def ends_before_its_node(group):
    """Rank 0 fails before its part of a call inside its node, in which the other rank of that waits for it; nobody waits on."""
    start()
    ctx, x, w = fluxlike.create_gemm_rs_context(16, 16, 32, torch.float32), torch.ones(16, 8), torch.ones(16, 8)
    assert (fluxlike.gemm_rs(x, w, ctx) == 32).all()
    dist.barrier()
    if dist.get_rank() == 0:
        ctx.messages.begin = fails
    said, took = told(lambda: fluxlike.gemm_rs(x, w, ctx), RuntimeError)
    dist.barrier()
    ctx.close()
    fluxlike.finalize()
    return said, took


def test_a_rank_that_fails_before_its_node_begins():
    env = {"FLUXLIKE_VIRTUAL_NODES": "2", "FLUXLIKE_TIMEOUT_S": "20"}
    outcomes = run_fresh(ends_before_its_node, 4, env, heap="shm", timeout=90)
    told_by = "rank 0 gave up first", "rank 0 on node 0, because that one gave up first", "gave up first"
    for outcome, word in zip(outcomes, ("of the test", *told_by), strict=True):
        assert outcome.ok, str(outcome)
        said, took = outcome.value
        assert word in said and took < 10, outcome.value

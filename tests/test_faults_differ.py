"""Ranks that meet on the host for different things: each is told what, in the same words, and nobody waits for another. Also behind
a call that was refused."""

import time

import pytest
import torch
import torch.distributed as dist
from faults import told
from ranks import device, run_fresh, run_ranks

import fluxlike
from fluxlike.runtime import world


def same_on_all(group, act, *says):
    """All ranks raise CallMismatch with the same words in ``act``, and nobody waits for another meanwhile."""
    message, took = told(act, fluxlike.CallMismatch)
    assert message and took < 5, f"{message!r} after {took:.1f} s"
    for part in says:
        assert part in message, message
    heard_by = [None] * dist.get_world_size(group)
    dist.all_gather_object(heard_by, message, group=group)
    assert set(heard_by) == {message}, heard_by
    return message


def meets_for_something_else(group, first, second):
    """The first calls of ranks differ, of which nothing is made: they meet in the making, and differ in what they came for."""
    fluxlike.init(heap="shm")
    x, w, other = torch.ones(4, 8), torch.ones(8, 8), dist.get_rank() == dist.get_world_size() - 1
    calls = {
        "all_reduce": lambda: fluxlike.all_reduce(x),
        "all_gather": lambda: fluxlike.all_gather(x),
        "gemm_rs": lambda: fluxlike.gemm_rs(x, w),
        "ag_gemm": lambda: fluxlike.ag_gemm(x, w),
        "sparse": lambda: fluxlike.sparse_all_reduce(x.to_sparse(1)),
        "finalize": fluxlike.finalize,
    }
    if second == "finalize":
        act, kinds = (fluxlike.finalize, ()) if other else (calls[first], (fluxlike.CallMismatch,))
        message, took = told(act, *kinds)
        assert took < 5 and ("fluxlike.finalize" in message) != other, f"{message!r} after {took:.1f} s"
    else:
        same_on_all(group, calls[second if other else first], "rank 0 is at '", "calls without a context work again after")
        for _ in range(2):  # until a program makes or closes a context
            same_on_all(group, calls[first], "rank 0 is at '")
        fluxlike.create_gemm_rs_context(8, 8).close()
        assert torch.equal(fluxlike.all_reduce(x), dist.get_world_size() * x)
    fluxlike.finalize()
    fluxlike.init(heap="shm")
    assert torch.equal(fluxlike.all_reduce(x), dist.get_world_size() * x)
    fluxlike.finalize()


@pytest.mark.parametrize(
    ("first", "second", "ranks"),
    (
        ("all_reduce", "all_gather", 2),
        ("gemm_rs", "ag_gemm", 3),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("sparse", "all_reduce", 2), ("gemm_rs", "finalize", 2), ("all_reduce", "finalize", 3))
        ),
    ),
)
def test_first_calls_that_differ(first, second, ranks):
    outcomes = run_fresh(meets_for_something_else, ranks, env={"FLUXLIKE_TIMEOUT_S": "20"}, first=first, second=second)
    assert all(outcome.ok for outcome in outcomes), [str(outcome) for outcome in outcomes]


def agrees_on_nothing(group):
    """Calls without a context that need another one than there is, and for which ranks would make different ones."""
    rank, w, this = dist.get_rank(group), torch.ones(8, 8, device=device()), world.current()
    for kept in [key for key in this.cached if this.control_of(group).name in key]:  # of other tests
        this.cached.pop(kept).close()

    def call(op, m, dtype=torch.float32):
        rows = m // 2 if op == "ag_gemm" else m
        return getattr(fluxlike, op)(torch.ones(rows, 8, dtype=dtype, device=device()), w.to(dtype), group=group)

    for op in ("gemm_rs", "ag_gemm", "gemm_ar"):
        kinds = torch.float32, torch.bfloat16
        same_on_all(group, lambda: call(op, 4, kinds[rank]), f"{op}: rank ", "torch.float32", "torch.bfloat16")  # noqa: B023
        made = call(op, 4)
        same_on_all(group, lambda: call(op, (10, 40)[rank]), f"{op}: rank ", "M=10", "M=40")  # noqa: B023
        assert torch.equal(call(op, 4), made)  # which has not been closed for one that they do not agree on
    same_on_all(
        group,
        lambda: fluxlike.create_gemm_rs_context(8, 8 << rank, group=group),
        "create_gemm_rs_context: rank ",
        "the same arguments",
    )
    assert torch.equal(call("gemm_rs", 4), 2 * 8 * torch.ones(2, 8, device=device()))


def test_ranks_that_would_make_different_contexts():
    run_ranks(agrees_on_nothing, 2)


def closes_crosswise(group):
    """Ranks close contexts in another order: neither can give back the memory, which the other may use, and both are told."""
    rank, before = dist.get_rank(group), world.current().heap.in_use
    contexts = [fluxlike.create_gemm_rs_context(16, 16, group=group) for _ in range(2)]
    held = world.current().heap.in_use - before
    message = same_on_all(group, contexts[rank].close, "at 'closing context")
    assert held > 0 and contexts[rank].closed and world.current().heap.in_use == before + held, message
    same_on_all(group, contexts[1 - rank].close, "at 'closing context")
    assert world.current().heap.in_use == before + held
    with fluxlike.create_gemm_rs_context(16, 16, group=group) as ctx:
        x = torch.ones(16, 16, device=device(), dtype=ctx.dtype)
        assert (fluxlike.gemm_rs(x, x, ctx) == 32).all()
    assert world.current().heap.in_use == before + held


def test_contexts_that_are_closed_in_another_order():
    run_ranks(closes_crosswise, 2)


def differs_behind(group, late):
    """Both refuse a call, and then one makes another and one a context: that they differ is told to both, and at once."""
    fluxlike.init(heap="shm", heap_bytes=8 << 20)
    rank, x, w = group.rank(), torch.ones(8, 16), torch.ones(8, 16)

    def make():
        return fluxlike.create_gemm_rs_context(8, 8, 16, torch.float32)

    ctx = make()
    with pytest.raises(ValueError, match="float64"):
        fluxlike.gemm_rs(x.double(), w, ctx)
    dist.barrier(group)
    if rank == late:
        time.sleep(0.5)
    said, took = told(lambda: make() if rank == 0 else fluxlike.gemm_rs(x, w, ctx), fluxlike.CallMismatch)
    assert "at 'create_gemm_rs_context'" in said and took < 5, said
    assert torch.equal(fluxlike.gemm_rs(x, w, make()), torch.full((4, 8), 32.0))
    fluxlike.finalize()


@pytest.mark.parametrize("late", [0, 1])
def test_what_differs_behind_a_refused_call(late):
    for outcome in run_fresh(differs_behind, 2, {"FLUXLIKE_TIMEOUT_S": "30"}, late=late):
        assert outcome.ok, str(outcome)


def makes_one_behind(group):
    """Rank 0 refuses a call and makes one that waits for nobody; then rank 1 makes the first: that they differ is told to both."""
    x, w = (torch.ones(8, 16, device=device()) for _ in range(2))

    def make():
        return fluxlike.create_gemm_rs_context(8, 8, 16, torch.float32, group)

    ctx = make()
    if dist.get_rank(group) == 0:
        with pytest.raises(ValueError, match="float64"):
            fluxlike.gemm_rs(x.double(), w, ctx)
        ctx.record(M=0, N=8)
    dist.barrier(group)
    said, _ = told(make if dist.get_rank(group) == 0 else lambda: fluxlike.gemm_rs(x, w, ctx), ValueError)
    assert "CallMismatch" in said and "this rank refused" in said, said
    with make() as ctx:
        assert fluxlike.gemm_rs(x, w, ctx).eq(32).all()


def test_a_call_behind_one_that_was_refused():
    run_ranks(makes_one_behind, 2)

"""Ranks that do different things, or nothing, in a call: all are told what and by whom, soon, and can go on.

Nothing here ends a process, so the same tests run on GPUs under torchrun. A wait may last a minute; that errors come in a part of
it shows that nobody waited for them.
"""

import os
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from cases import TRANSPORTS
from faults import LIMIT_S, OPS, call, make_context, told, works
from ranks import LARGEST, device, run_fresh, run_ranks

import fluxlike
from fluxlike.kernels import sync
from fluxlike.ops import choice
from fluxlike.ops.gemm_rs import GemmRSContext
from fluxlike.runtime import calls, world

SOON_S = 30.0


def empty(ctx, n: int = 128) -> None:
    """A call without rows: no launch, no wait."""
    x, w = torch.zeros(0, 64, device=ctx.device), torch.zeros(n, 64, device=ctx.device)
    fluxlike.gemm_rs(x, w, ctx) if ctx.op == "gemm_rs" else fluxlike.ag_gemm(x, w, ctx, m=0)


RS, AG, RS16 = ("gemm_rs", torch.float32), ("ag_gemm", torch.float32), ("gemm_rs", torch.bfloat16)
#: name: the contexts, what one rank does with them, what the others do, and words of both that all messages have
DISAGREEMENTS = {
    "another operation": ((RS, AG), lambda r, a: call(r, 5), lambda r, a: call(a, 5), "(gemm_rs, float", "(ag_gemm, float"),
    "another M of gemm_rs": ((RS,), lambda r: call(r, 5, m=33), lambda r: call(r, 5, m=34), "M=33, N=128", "M=34, N=128"),
    "another N of gemm_rs": ((RS,), lambda r: call(r, 5, n=64), lambda r: call(r, 5), "N=64", "N=128"),
    "another M of ag_gemm": ((AG,), lambda a: call(a, 5, m=65), lambda a: call(a, 5, m=63), "M=65, K=64", "M=63, K=64"),
    "another K of ag_gemm": ((AG,), lambda a: call(a, 5, k=48), lambda a: call(a, 5), "K=48", "K=64"),
    "another dtype": ((RS, RS16), lambda r, h: call(r, 5), lambda r, h: call(h, 5), "gemm_rs, float32", "gemm_rs, bfloat16"),
    "no rows": ((RS,), lambda r: (empty(r), call(r, 6)), lambda r: call(r, 5), "M=0, N=128", "N=128"),
    "another order": (
        (RS, AG),
        lambda r, a: (call(r, 5), call(a, 6)),
        lambda r, a: (call(a, 6), call(r, 5)),
        "(gemm_rs, float",
        "(ag_gemm, float",
    ),
    "one call more": ((RS,), lambda r: call(r, 5), lambda r: None, "call 2 of context", "closing context"),
    "one call less": ((AG,), lambda a: None, lambda a: call(a, 5), "closing context", "call 2 of context"),
}


def disagree(group, late):
    """Each disagreement in turn; ``late``: who comes later, so that each side is once in its wait and once in front of it."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    odd = size - 1
    for name, (kinds, one, others, *words) in DISAGREEMENTS.items():
        made = [make_context(op, TRANSPORTS[i % 2], group, dtype) for i, (op, dtype) in enumerate(kinds)]
        for ctx in made:
            call(ctx, 1)
        dist.barrier(group)
        if (rank == odd) == (late == "the odd one"):
            time.sleep(0.3)
        said, took = told(lambda: (one if rank == odd else others)(*made), ValueError)  # noqa: B023
        again = [told(partial(call, ctx, 7), ValueError)[0] for ctx in made] if said else []
        assert all(text == said for text in again), f"{name}: {said}, but other contexts of the group: {again}"
        for ctx in made:
            closing, seconds = told(ctx.close, ValueError)
            assert not (said and closing), f"{name}: told twice, {said} and {closing}"
            said, took = said or closing, took + seconds
        for word in (*words, f"rank {odd} ", "the same calls, with the same sizes, in the same order", "make new ones"):
            assert word in said, f"{name}: {word!r} is not in: {said}"
        assert took < SOON_S, f"{name}: told after {took:.1f} s: {said}"
    works(group)


@pytest.mark.parametrize("late", ("the odd one", "the others"))
@pytest.mark.parametrize("ranks", (2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)))
def test_ranks_that_make_different_calls(ranks, late):
    run_ranks(disagree, ranks, late=late, timeout=240)


def meets_alone(group, alone):
    """Some ranks make a context while the others call; nobody comes to a meeting before all have been told."""
    rank = dist.get_rank(group)
    ctx = make_context("gemm_rs", "in_kernel", group)
    for late in (0, 0.5):
        call(ctx, 1)
        dist.barrier(group)
        if (rank == 0) == alone:
            said, took = told(partial(make_context, "ag_gemm", "copy_engine", group), ValueError)
        else:
            time.sleep(late)
            said, took = told(partial(call, ctx, 2), ValueError)
        dist.barrier(group)
        for word in ("CallMismatch: ", " at 'create_ag_gemm_context'", " at 'call 2 of context ", "make new ones"):
            assert word in said, said
        assert took < SOON_S, f"told after {took:.1f} s: {said}"
        ctx.close()
        works(group)
        ctx = make_context("gemm_rs", "in_kernel", group)
    ctx.close()


@pytest.mark.parametrize(("ranks", "alone"), ((2, True), (3, True), (3, False)))
def test_a_meeting_to_which_some_ranks_do_not_come(ranks, alone):
    run_ranks(meets_alone, ranks, alone=alone, timeout=200)


def kept_contexts(group):
    """Without a context of the caller's: the sizes decide whether one rank grows it while the others call."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)

    def act(m):
        x, w = torch.ones(m, 8, device=device()), torch.ones(16, 8, device=device())
        y = fluxlike.gemm_rs(x, w, group=group)
        now = world.current()
        now.cached[GemmRSContext, now.control_of(group).name, torch.float32].check()  # a GPU says only here that a wait ran out
        assert y.eq(8 * size).all()

    act(24)
    for m in (16, 4096):
        ctx = make_context("gemm_rs", "in_kernel", group) if m == 16 else None
        dist.barrier(group)
        time.sleep(0.3 if (rank == 0) == (m == 16) else 0)
        said, took = told(lambda: act(m if rank == 0 else 24), ValueError)  # noqa: B023
        assert f"M={m}, N=16" in said or "making a context for gemm_rs" in said, said
        assert "M=24, N=16" in said and took < SOON_S, f"after {took:.1f} s: {said}"
        dist.barrier(group)
        again, took = told(lambda: act(m if rank == 0 else 24), ValueError)  # noqa: B023
        dist.barrier(group)  # nobody waits in a meeting for who comes no more
        assert again == said and took < SOON_S, f"after {took:.1f} s, of ranks that were all told: {again}"
        works(group) if ctx is None else ctx.close()  # the ranks meet here, with contexts of their own
        act(24)
        assert "a failure" not in world.current().control_of(group).board.where(1 - rank), "it is over"


def test_contexts_that_are_kept():
    run_ranks(kept_contexts, 2)


def first_calls(group):
    """A first call without a context: both are told of the call that they made, and what to do, before anything is made."""
    rank, this = dist.get_rank(group), world.current()
    w = torch.ones(16, 8, device=device(), dtype=torch.float16)
    for kept in [key for key in this.cached if torch.float16 in key and this.control_of(group).name in key]:  # of other tests
        this.cached.pop(kept).close()
    for op, rows, said_m, words in (
        ("gemm_rs", (32, 40), ("M=32, N=16", "M=40, N=16"), "the same on all ranks"),
        ("gemm_ar", (0, 4), ("M=0, N=16", "M=4, N=16"), "the same on all ranks"),
        ("ag_gemm", (0, 24), ("M=0, K=8", "M=48, K=8"), "pass m= where ranks have different rows"),
    ):
        x = torch.ones(rows[rank], 8, device=device(), dtype=torch.float16)
        said, took = told(lambda: getattr(fluxlike, op)(x, w, group=group), ValueError)  # noqa: B023
        first, second = dist.get_process_group_ranks(group)
        expected = f"CallMismatch: {op}: rank {first} calls it with {said_m[0]}, torch.float16 and rank {second} with {said_m[1]}, "
        assert expected in said and words in said and took < SOON_S, said
    works(group)


def test_first_calls_of_different_sizes():
    run_ranks(first_calls, 2)


def by_different_ways(group):
    """The same sizes by another transport, as where one rank alone wants a gradient: told at once, not after the limit."""
    rank = dist.get_rank(group)
    with fluxlike.create_gemm_rs_context(64, 32, 32, torch.float32, group) as ctx:
        ctx.use(choice.choose(ctx.problem(64, 32, 32, 32), ("in_kernel", "copy_engine")[rank], {}))
        x, w = torch.ones(64, 16, device=device()), torch.ones(32, 16, device=device())
        # who comes first has made its call on a GPU, and is told where it asks
        said, took = told(lambda: (fluxlike.gemm_rs(x, w, ctx), ctx.check()), ValueError)
        assert "CallMismatch" in said and "by=in_kernel" in said and "by=copy_engine" in said and took < SOON_S, said
    works(group)


def test_ranks_that_make_a_call_by_different_transports():
    run_ranks(by_different_ways, 2)


def late_difference(group):
    """Entries that differ in what is cut off, as those of long lists may; and equal ones that are as long."""
    rank = dist.get_rank(group)
    ctx, text = make_context("gemm_rs", "in_kernel", group), "call of a list of " + "64 " * calls.RING
    ctx.board.call(text)
    dist.barrier(group)
    said, _ = told(lambda: ctx.board.call(f"{text}and {rank}"), ValueError)
    dist.barrier(group)  # who came first has seen nothing yet
    said = said or told(lambda: ctx.board.call(text), ValueError)[0]
    assert "CallMismatch" in said and said.count("at 'call of a list of 64 64") == 2, said
    ctx.close()
    works(group)


def test_entries_that_differ_in_what_is_cut_off():
    run_ranks(late_difference, 2)


def wrap(group):
    """More calls than the ring has entries; then a difference, and one that is overwritten when the other rank comes."""
    rank = dist.get_rank(group)
    ctx = make_context("gemm_rs", "in_kernel", group)
    for _ in range(calls.RING + 7):
        empty(ctx)
    call(ctx, 1)
    dist.barrier(group)
    said, _ = told(partial(call, ctx, 3, m=30 + rank), ValueError)
    assert "M=30, N=128" in said and "M=31, N=128" in said, said
    ctx.close()
    ctx = make_context("gemm_rs", "in_kernel", group)
    for number in range(2 * calls.RING if rank == 0 else 0):
        empty(ctx, 127 if number == 0 else 128)
    dist.barrier(group)
    if rank == 1:
        said, _ = told(lambda: [empty(ctx) for _ in range(2 * calls.RING)], ValueError)
        assert "ranks 1 and 0 have made different calls before 'call " in said, said
    dist.barrier(group)
    ctx.close()  # rank 0 is too far ahead to be told, and made no call that anyone missed
    works(group)


def test_more_calls_than_the_board_has_entries():
    run_ranks(wrap, 2)


_groups: list = []


def two_groups(group):
    """The ranks of one group fall out of step; another group of the same ranks, and one of some of them, do not notice."""
    if not _groups:
        _groups.extend([dist.new_group([0, 1, 2, 3]), dist.new_group([0, 1])])
    rank = dist.get_rank()
    broken = make_context("gemm_rs", "in_kernel", group)
    fine = [make_context(op, "copy_engine", g) for g in _groups for op in OPS if rank in dist.get_process_group_ranks(g)]
    for ctx in fine:
        call(ctx, 1)
    said, _ = told(partial(call, broken, 2, m=20 + rank // 2), ValueError)
    assert "M=20" in said and "M=21" in said, said
    for ctx in fine:
        call(ctx, 2)
    assert said == told(partial(call, broken, 3), ValueError)[0]
    for ctx in (broken, *fine):
        ctx.close()
    works(group)


def test_another_group_goes_on():
    run_ranks(two_groups, 4, makes_groups=True)


def raises_in_the_middle(group):
    """One rank leaves a ``with`` by an exception of its own, which comes out as it is; the others learn that it has left."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    def act():
        with make_context("gemm_rs", "in_kernel", group) as ctx:
            call(ctx, 1)
            dist.barrier(group)  # who is still in this call would hear of it there
            if rank == size - 1:
                time.sleep(0.3)
                raise KeyError("of the caller")
            call(ctx, 2)

    said, took = told(act, KeyError, ValueError)
    if rank == size - 1:
        assert said == "KeyError: 'of the caller'"
    else:
        for word in (f"rank {size - 1} ", "'closing context", "'call 2"):
            assert word in said, said
        assert took < SOON_S
    works(group)


@pytest.mark.parametrize("ranks", (2, 4))
def test_a_rank_that_raises_an_exception(ranks):
    run_ranks(raises_in_the_middle, ranks)


def shards_that_differ(group):
    """Whoever is told that another rank has another M also reads what may have been left out, once."""
    rank = dist.get_rank(group)
    w = torch.ones(4, 8, device=device())
    with pytest.raises(fluxlike.CallMismatch, match="pass m= where ranks have different rows") as first:
        fluxlike.ag_gemm(torch.ones(4 - rank, 8, device=device()), w, group=group)  # makes the context that is kept
    assert not hasattr(first.value, "__notes__")
    for rows, k, noted in ((4 - rank, 8, True), (4, 8 - rank, False)):
        ctx = fluxlike.create_ag_gemm_context(16, 8, 8, dtype=torch.float32, group=group)
        with pytest.raises(fluxlike.CallMismatch) as told_so:
            for _ in range(3):  # on a GPU who calls first is told by a later call
                fluxlike.ag_gemm(torch.ones(rows, k, device=device()), w[:, :k].contiguous(), ctx)
                world.current().executor.synchronize()
        notes = getattr(told_so.value, "__notes__", [])
        assert ["pass m=" in note for note in notes] == [True] * noted, (str(told_so.value), notes)
        ctx.close()


def test_shards_that_differ_without_m():
    run_ranks(shards_that_differ, 2)


def passes_on(group, op):
    """A rank gave up in a call that this one ended without waiting for it: what this one has may be wrong, and `check` says so."""
    ctx, rank = make_context(op, "in_kernel", group), dist.get_rank(group)
    call(ctx, 1)
    ctx.check()
    dist.barrier(group)
    if rank == 1:
        world.current().executor.post([ctx.block.addresses[0] + 8 * sync.ABORT.value], 2)
    dist.barrier(group)
    if rank == 0:
        with pytest.raises(fluxlike.PeerTimeout, match=r"what rank 0 has .* may be wrong, because rank 1 gave up first"):
            ctx.check()
        with pytest.raises(fluxlike.PeerTimeout, match="because rank 1 gave up first"):
            call(ctx, 2)
    else:
        ctx.check()
    ctx.close()
    works(group)


@pytest.mark.parametrize("op", OPS)
def test_what_a_rank_that_gave_up_passed_on(op):
    run_ranks(passes_on, 2, op=op)


def closes_unseen(group, op):
    """What a kernel reported and no call raised comes when the context is closed, but not in place of an error of the ``with``."""
    rank = dist.get_rank(group)

    def life(*ends):
        with make_context(op, "in_kernel", group) as ctx:
            call(ctx, 1)
            if rank == 0:
                ctx.report[1:7] = torch.tensor([2, 1, 7, 6, 7, 0])
                ctx.report[0] = 1
            for end in ends:
                raise end
        assert rank

    said, _ = told(life, fluxlike.PeerTimeout)
    assert said.startswith(f"PeerTimeout: {op}: rank 0 waited 60 s for rank 1: ") == (rank == 0), said
    works(group)
    said, _ = told(partial(life, KeyError("of the caller")), fluxlike.PeerTimeout, KeyError)
    assert said == "KeyError: 'of the caller'"
    works(group)


@pytest.mark.parametrize("op", OPS)
def test_a_failure_that_no_call_has_raised(op):
    run_ranks(closes_unseen, 2, op=op)


def outgrown_unseen(group):
    """The same where a call outgrows a context that was kept: all ranks are told before the new one is made."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)

    def act(m):
        y = fluxlike.gemm_rs(torch.ones(m, 8, device=device()), torch.ones(16, 8, device=device()), group=group)
        assert y.eq(8 * size).all()

    act(24)
    now = world.current()
    ctx = now.cached[GemmRSContext, now.control_of(group).name, torch.float32]
    if rank == 0:
        ctx.report[1:7] = torch.tensor([2, 1, 7, 6, 7, 0])
        ctx.report[0] = 1
    said, took = told(partial(act, 4 * ctx.max_m), fluxlike.PeerTimeout)
    assert "gemm_rs: rank 0 waited 60 s for rank 1: " in said and took < SOON_S, f"after {took:.1f} s: {said}"
    assert ("rank 0 failed, so no rank goes on" in said) == (rank > 0), said
    act(24)
    act(4 * ctx.max_m)
    works(group)


def test_a_failure_that_no_call_has_raised_of_a_context_that_is_outgrown():
    run_ranks(outgrown_unseen, 3)


def loses_a_copy_signal(group, op):
    """The flag behind a copy does not arrive, on GPUs either: a time-out within its limit, and new contexts work."""
    rank = dist.get_rank(group)
    before = os.environ["FLUXLIKE_TIMEOUT_S"]
    # Its own waits fail as a consequence; with more patience it leaves the first word to the one who met the cause.
    os.environ["FLUXLIKE_TIMEOUT_S"] = str(LIMIT_S if rank else 4 * LIMIT_S)
    try:
        ctx = make_context(op, "copy_engine", group)
        call(ctx, 1)
        dist.barrier(group)
        if rank == 0:
            write = ctx.engine.write
            ctx.engine.write = lambda address, value: write(address, value) if value == 0 else None
        said, took = told(lambda: [call(ctx, seed) for seed in (2, 3, 4)], fluxlike.PeerTimeout)
    finally:
        os.environ["FLUXLIKE_TIMEOUT_S"] = before
    assert f"{op}: rank {rank} " in said and took < SOON_S, f"after {took:.1f} s: {said!r}"
    ctx.close()
    works(group)
    return said if rank != 0 else ""


@pytest.mark.parametrize("op", OPS)
def test_a_lost_signal_of_the_copy_engine(op):
    said = run_ranks(loses_a_copy_signal, 2, op=op)[1]
    for word in (f"waited {LIMIT_S:g} s for rank 0", "expected", "saw", "Rank 0 ", "FLUXLIKE_TIMEOUT_S"):
        assert word in said, said


def limited_when_made(group):
    """The limit of a context's waits is the one that its messages name: that of its making, whatever the environment says later."""
    with make_context("gemm_rs", "in_kernel", group) as ctx:
        before = os.environ["FLUXLIKE_TIMEOUT_S"]
        os.environ["FLUXLIKE_TIMEOUT_S"] = "0.01"
        try:
            if ctx.rank == 1:
                time.sleep(1)
            call(ctx, 1)
        finally:
            os.environ["FLUXLIKE_TIMEOUT_S"] = before
        assert ctx.limit_s == float(before)


def test_a_limit_is_that_of_the_context_s_making():
    run_ranks(limited_when_made, 2)


def exhausts(group):
    """More than the heap has, for a group that cannot make it grow: refused on all its ranks, and nothing is taken."""
    before = world.current().heap.in_use
    for _ in range(2):
        said, took = told(lambda: fluxlike.create_gemm_rs_context(1 << 20, 4096, group=group), RuntimeError)
        for word in ("MiB free for the group of ranks [0, 1]", "larger heap_bytes", "FLUXLIKE_HEAP_BYTES", "close contexts"):
            assert word in said, said
        assert took < SOON_S
    assert world.current().heap.in_use == before
    works(group)


def grows_by_turns(group):
    """Many rows of few columns, few of many: a context for the most of both has no room, and one for each call has."""
    fluxlike.init(heap="shm", heap_bytes=8 << 20)
    pair = dist.new_group([0, 1])  # for which the heap does not grow
    for m, n in ((4096, 16), (16, 512)) * 2 if dist.get_rank() < 2 else ():
        assert fluxlike.gemm_rs(torch.ones(m, 4), torch.ones(n, 4), group=pair).eq(8).all(), (m, n)
    dist.barrier()
    fluxlike.finalize()


def test_kept_contexts_that_cannot_grow_in_both_sizes():
    for outcome in run_fresh(grows_by_turns, 3):
        assert outcome.ok, str(outcome)


def test_an_exhausted_heap():
    if LARGEST < 3:
        pytest.skip("a group of two is the world here, for which the heap grows")
    run_ranks(exhausts, 2)

"""An error in the middle of a call, or of making a context, as for want of memory, that the program catches: no rank goes on with
another call's data, and nothing is left of a context that nobody has.
"""

import contextlib
from functools import partial

import pytest
import torch
import torch.distributed as dist
from faults import told, works
from ranks import LARGEST, device, run_ranks

import fluxlike
from fluxlike.ops import all_reduce, exchange, tiling
from fluxlike.runtime import world
from fluxlike.runtime.heap import free_on_all

SOON_S = 30.0


class OutOfMemory(RuntimeError):
    """As torch's of a GPU."""


@contextlib.contextmanager
def failing(where, name, kind=OutOfMemory):
    """Once."""
    kept = getattr(where, name)

    def fails(*args, **how):
        setattr(where, name, kept)
        raise kind("of the test")

    setattr(where, name, fails)
    try:
        yield
    finally:
        setattr(where, name, kept)


def matrix(rows, columns, value):
    return torch.full((rows, columns), float(value), device=device())


def products(op, schedule, dtype=torch.float32):
    def make(group):
        if op == "gemm_rs":
            return fluxlike.create_gemm_rs_context(8, 8, 8, dtype, group, schedule)
        if op == "gemm_ar":
            return fluxlike.create_gemm_ar_context(8, 8, dtype, group)
        return fluxlike.create_ag_gemm_context(8, 8, 9, dtype, group, schedule)

    def call(ctx, value):
        x, w = matrix(8, 9, value).to(dtype), matrix(8, 9, 1).to(dtype)
        if op == "ag_gemm":
            return fluxlike.ag_gemm(x[::2], w, ctx)
        return getattr(fluxlike, op)(x, w, ctx)

    return make, call


def of_sparse():
    def make(group):
        return fluxlike.create_sparse_all_reduce_context((8, 4), 4, torch.float32, group)

    def call(ctx, value):
        x = torch.sparse_coo_tensor(torch.arange(4, device=device())[None], matrix(4, 4, value), (8, 4), check_invariants=True)
        return fluxlike.sparse_all_reduce(x, ctx=ctx).to_dense()

    return make, call


#: name: how a context is made and called, and what fails.
CASES = {
    "gemm_rs, padded": (products("gemm_rs", "in_kernel"), lambda ctx: (tiling, "padded")),
    "ag_gemm, padded": (products("ag_gemm", "in_kernel"), lambda ctx: (tiling, "padded")),
    "gemm_rs, product": (products("gemm_rs", "sequential"), lambda ctx: (ctx.world.executor, "multiply")),
    "ag_gemm, product": (products("ag_gemm", "sequential"), lambda ctx: (ctx.world.executor, "multiply")),
    "gemm_ar, product": (products("gemm_ar", None), lambda ctx: (ctx.world.executor, "multiply")),
    "gemm_rs, stream": (products("gemm_rs", "in_kernel"), lambda ctx: (ctx.world.executor, "on_same_stream")),
    "ag_gemm, board": (products("ag_gemm", "in_kernel"), lambda ctx: (ctx.board, "_look")),  # behind the entry
    "gemm_rs, decomposed": (products("gemm_rs", "decomposed", torch.float16), lambda ctx: (ctx, "overlapped")),
    "ag_gemm, decomposed": (products("ag_gemm", "decomposed", torch.float16), lambda ctx: (ctx.lanes, "forked")),
    "sparse_all_reduce, ids": (of_sparse(), lambda ctx: (ctx._lanes, "forked")),
    "sparse_all_reduce, result": (of_sparse(), lambda ctx: (ctx, "run")),
}


def caught(group, name):
    """Rank 0 fails in its third call and would make a fourth, which the others would take for the third."""
    (make, call), fails = CASES[name]
    ctx, rank = make(group), dist.get_rank(group)
    right = [call(ctx, value) for value in (1, 2)]
    ctx.check()
    dist.barrier(group)
    results = []

    def goes_on(*values):
        for value in values:
            results.append(call(ctx, value))
            ctx.check()

    if rank == 0:
        with failing(*fails(ctx)), pytest.raises(OutOfMemory):
            call(ctx, 1)
        said, took = told(lambda: goes_on(2), RuntimeError)
        assert "an earlier call of this context was ended by OutOfMemory (of the test)" in said, said
    else:
        said, took = told(lambda: goes_on(1, 2), fluxlike.PeerTimeout)
        assert "because rank 0 gave up first" in said, said
        assert len(results) < 2 or torch.equal(results[0], right[0]), "the data of another call"
    assert took < SOON_S, said
    ctx.close()
    works(group)


@pytest.mark.parametrize("name", CASES)
def test_an_error_that_a_program_catches(name):
    run_ranks(caught, 2, name=name)


class Late:
    """The lock of a group, which is interrupted as it is released behind the entry of a call on the board."""

    def __init__(self, control):
        self.control, self.lock, self.before = control, control.lock, control.board._number

    def __enter__(self):
        return self.lock.__enter__()

    def __exit__(self, *error):
        self.lock.__exit__(*error)
        if self.control.lock is self and self.control.board._number > self.before:
            self.control.lock = self.lock
            raise KeyboardInterrupt


def late(group):
    """As `caught`, by an interrupt behind the last that writes the entry."""
    make, call = products("gemm_rs", "in_kernel")
    ctx, rank = make(group), dist.get_rank(group)
    call(ctx, 1)
    ctx.check()
    dist.barrier(group)
    if rank == 0:
        ctx.control.lock = Late(ctx.control)
        with pytest.raises(KeyboardInterrupt):
            call(ctx, 1)
        said, took = told(lambda: call(ctx, 2), RuntimeError)
        assert "an earlier call of this context was ended by KeyboardInterrupt" in said, said
    else:
        said, took = told(lambda: (call(ctx, 1), ctx.check()), fluxlike.PeerTimeout)
        assert "because rank 0 gave up first" in said, said
    assert took < SOON_S, said
    ctx.close()
    works(group)


def test_an_interrupt_behind_the_entry_of_a_call():
    run_ranks(late, 2)


# making a context


#: What the executor gives a rank for itself: memory, words of the host that kernels write to, threads, streams.
OWN = ("lasting", "report", "copy_engine", "lanes")


@contextlib.contextmanager
def lacking(call):
    """The ``call``-th time that this rank asks for something of its own, there is none. Gives what was asked for."""
    executor, asked = world.current().executor, []

    def counted(name, give, *args):
        asked.append(name)
        if len(asked) == call:
            raise MemoryError if call == 1 else OutOfMemory("of the test")
        return give(*args)

    with pytest.MonkeyPatch.context() as patch:
        for name in OWN:
            patch.setattr(executor, name, partial(counted, name, getattr(executor, name)))
        yield asked


def interrupted_in_the_making(group):
    """Rank 0 is interrupted in front of where a context is counted. Of those that follow all ranks have the same number."""
    make = partial(fluxlike.create_gemm_rs_context, 8, 8, 8, torch.float32, group, "in_kernel")
    if dist.get_rank(group) == 0:
        with failing(world.current().executor, "synchronize", KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            make()
    said, took = told(make, ValueError)
    assert "at 'create_gemm_rs_context'" in said and "at 'making context " in said and took < SOON_S, said
    works(group)


def test_an_interrupt_in_the_making_of_a_context():
    run_ranks(interrupted_in_the_making, 2)


def held():
    this = world.current()
    return this.heap.in_use, len(this.contexts), len(this.control.board.members)


MAKING = {
    "gemm_rs": lambda group: fluxlike.create_gemm_rs_context(64, 32, 48, torch.bfloat16, group),
    "ag_gemm": lambda group: fluxlike.create_ag_gemm_context(64, 32, 48, torch.bfloat16, group),
    "gemm_ar": lambda group: fluxlike.create_gemm_ar_context(64, 32, torch.bfloat16, group),
    "all_reduce": lambda group: exchange.ExchangeContext(all_reduce.KIND, world.current().control_of(group), 1, 1),
    "sparse_all_reduce": lambda group: fluxlike.create_sparse_all_reduce_context((64, 8), 16, torch.float32, group),
}


def lacks_memory(group, op):
    make = MAKING[op]
    works(group)
    before = held()
    with lacking(0) as asked, make(group):
        assert held() > before
    assert len(asked) >= 3, f"{op} has nothing of its own but {asked}"
    for call, what in enumerate(asked, 1):
        if dist.get_rank(group) == 1:
            with lacking(call), pytest.raises(RuntimeError, match=r"of the test|take no more memory"):
                make(group)
        else:
            said, took = told(lambda: make(group), RuntimeError)
            assert "rank 1 failed, so no rank goes on: " in said and took < SOON_S, f"{what}: {said}"
            assert ("this process can take no more memory" if call == 1 else "of the test") in said, f"{what}: {said}"
        assert held() == before, what
    with make(group):
        assert held() > before
    assert held() == before
    works(group)


@pytest.mark.parametrize("op", MAKING)
def test_a_rank_without_memory_for_a_context(op):
    run_ranks(lacks_memory, 2, op=op)


@contextlib.contextmanager
def one_range(group):
    """Of what is free on all ranks only the largest range: others may be in it, as it has grown in several segments."""
    heap, control = world.current().heap, world.current().control_of(group)
    common = free_on_all(control.gather(heap._free, "what is free"))
    sizes = sorted((size for free in common for _, size in free), reverse=True)
    largest, *others = [heap.allocate(size, control, world.current().indices(control)) for size in sizes]
    heap.free(largest)
    try:
        yield heap, largest.nbytes
    finally:
        for block in others:
            heap.free(block)


def half_made(group):
    """The heap has room for the first of two blocks only, for a group that cannot make it grow."""
    with one_range(group) as (heap, room):
        half_made_in(heap, group, room)


def half_made_in(heap, group, room):
    before = held()
    columns = (room - (8 << 20)) // 4096  # of 4 KiB in the slots for 1024 rows of two ranks; the exchange takes 20 MiB and more
    assert told(lambda: fluxlike.create_gemm_rs_context(1024, columns, 1024, torch.bfloat16, group, "sequential"), RuntimeError)[0]
    assert held() == before
    with fluxlike.create_gemm_rs_context(1024, columns // 2, 1024, torch.bfloat16, group, "sequential") as ctx:
        assert ctx.inner and heap.in_use - before[0] > room // 2
    assert held() == before


def test_a_heap_with_room_for_half_a_context():
    if LARGEST < 3:
        pytest.skip("a group of two is the world here, for which the heap grows")
    run_ranks(half_made, 2)


def ahead(group):
    """A call of rank 0 ends when the other rank, which need not wait in calls without rows, is one further on; both close then."""
    ctx, w = fluxlike.create_gemm_rs_context(8, 8, 8, torch.float32, group), matrix(8, 8, 1)
    call = partial(fluxlike.gemm_rs, matrix(0, 8, 1), w, ctx)
    if dist.get_rank(group) == 0:
        with failing(ctx.board, "_look"), pytest.raises(OutOfMemory):
            call()
    else:
        call(), call()
    dist.barrier(group)
    ctx.close()
    works(group)


def test_who_has_failed_is_not_said_to_differ_from_who_went_on():
    run_ranks(ahead, 2)

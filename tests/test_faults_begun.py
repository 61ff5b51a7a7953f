"""An error in the middle of a call, as for want of memory, that the program catches: no rank goes on with another call's data."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from faults import told, works
from ranks import device, run_ranks

import fluxlike
from fluxlike.ops import tiling

SOON_S = 30.0


class OutOfMemory(RuntimeError):
    """As torch's of a GPU."""


@contextlib.contextmanager
def failing(where, name):
    """Once."""
    kept = getattr(where, name)

    def fails(*args, **how):
        setattr(where, name, kept)
        raise OutOfMemory("of the test")

    setattr(where, name, fails)
    try:
        yield
    finally:
        setattr(where, name, kept)


def matrix(rows, columns, value):
    return torch.full((rows, columns), float(value), device=device())


def products(op, schedule):
    def make(group):
        if op == "gemm_rs":
            return fluxlike.create_gemm_rs_context(8, 8, 8, torch.float32, group, schedule)
        if op == "gemm_ar":
            return fluxlike.create_gemm_ar_context(8, 8, torch.float32, group)
        return fluxlike.create_ag_gemm_context(8, 8, 9, torch.float32, group, schedule)

    def call(ctx, value):
        if op == "ag_gemm":
            return fluxlike.ag_gemm(matrix(8, 9, value)[::2], matrix(8, 9, 1), ctx)
        return getattr(fluxlike, op)(matrix(8, 9, value), matrix(8, 9, 1), ctx)

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

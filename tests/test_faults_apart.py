"""Ranks that go on behind an error of one of them: a call apart they never are, and where no call was left out nobody is told.

Nothing here ends a process, so what is not of fresh processes runs on GPUs under torchrun, too.
"""

import time
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from faults import make_context, told
from ranks import device, run_fresh, run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import fluxlike
from fluxlike.runtime import world
from fluxlike.runtime.errors import heard


def call_of(op, group, value, wants, broken=False):
    """A call without a context whose result is ``value`` times what ones give; ``broken``: one that is refused."""
    x, w = torch.full((4, 8), float(value), device=device()), torch.ones(8, 8, device=device(), requires_grad=wants)
    if op in ("gemm_rs", "ag_gemm", "gemm_ar"):
        return getattr(fluxlike, op)(x.half() if broken else x, w, group=group)
    more = {"reduce": (0,), "broadcast": (0,)}.get(op, ())
    return getattr(fluxlike, op)(x.to_sparse() if broken else x, *more, group=group)


def refuses_and_goes_on(group, op, wants, late):
    """One rank leaves out a call that it refuses. No call of the others is taken for another one, and all are told."""
    rank, settle = dist.get_rank(group), world.current().executor.synchronize
    ones = call_of(op, group, 1, wants)
    ones = ones.detach() if isinstance(ones, torch.Tensor) else ones
    for attempt in range(2):  # also of calls that are known by then
        seen = []
        for value in range(2, 10):  # a rank that only sends may be some calls ahead
            if value == 3 and rank == late:
                time.sleep(0.3)
            try:
                y = call_of(op, group, value, wants, broken=value == 3 and rank == 1)
                settle()
                seen.append((value, y))
            except ValueError as error:
                if not isinstance(error, fluxlike.CallMismatch):
                    assert value == 3 and rank == 1, f"{op}: {error}"
                    continue
                assert "rank 1" in str(error) and f"a call of {op} that this rank refused" in str(error), f"{op}: {error}"
                break
        else:
            raise AssertionError(f"{op}, attempt {attempt}: rank {rank} was told nothing")
        if device().type == "cuda" and seen:
            seen.pop()  # what a kernel found out is raised by the call behind it
        for value, y in seen:
            assert y is None or torch.equal(y, ones * value), f"{op}: call {value} is of another: {y}"
        while told(lambda: fluxlike.create_gemm_rs_context(8, 8, group=group).close(), ValueError)[0]:
            pass
        again = call_of(op, group, 1, wants)
        assert again is None or torch.equal(again, ones)


REFUSED = ("gemm_rs", "ag_gemm", "gemm_ar", "all_reduce", "reduce_scatter", "all_gather", "reduce", "broadcast")


@pytest.mark.parametrize("op", REFUSED)
def test_a_rank_that_refuses_a_call_and_goes_on(op):
    for wants in (False, True)[: 2 if "gemm" in op else 1]:
        for late in range(2):
            run_ranks(refuses_and_goes_on, 2, op=op, wants=wants, late=late)


def no_memory(*_, **__):
    raise torch.OutOfMemoryError("no memory is left")


def interrupt(*_, **__):
    raise KeyboardInterrupt


def without(call, how, *names):
    """``call`` where what has these names raises: no memory for a new tensor, as behind others like it, or a Ctrl-C."""

    def broken():
        with pytest.MonkeyPatch.context() as patch:
            for where, name in names:
                patch.setattr(where, name, how)
            return call(3)

    return broken


def operations(group, op, why):
    """A call of ``op`` for a value, and one that raises before it has begun."""
    ops, call = fluxlike.ops, partial(call_of, op, group, wants=False)
    x, w = torch.full((4, 8), 3.0, device=device()), torch.ones(8, 8, device=device())
    if why == "memory":
        return call, without(call, no_memory, (torch.Tensor, "new_empty_strided"), (torch.Tensor, "new_empty"))
    if why == "interrupt":
        checks = [(ops.validate, name) for name in ("operands", "gathered_operands")]
        return call, without(call, interrupt, *checks, (ops.again, "results"))
    if why == "list":
        return call, lambda: fluxlike.ag_gemm(x, w, group=group, bias=[None, None])
    if why == "context":
        other = make_context("ag_gemm" if op == "gemm_rs" else "gemm_rs", "in_kernel", group)
        return call, lambda: getattr(fluxlike, op)(x, w, other)
    if why == "warning":
        return call, partial(warned_of, lambda: getattr(fluxlike, op)(x.requires_grad_(), group=group))
    more = (0,) if op == "reduce" else ()
    return call, lambda: getattr(fluxlike, op)(x, *more, group=group, op=dist.ReduceOp.PRODUCT)


def warned_of(act):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return act()


def lists(group, op, why):
    def call(value):
        xs = [torch.full((4, 8), float(value), device=device()) for _ in range(2)]
        return torch.cat(getattr(fluxlike, op)(xs, group))

    whole = torch.full((6, 8), 3.0, device=device())
    if why == "overlap":
        return call, lambda: fluxlike.all_reduce_([whole[:4], whole[2:]], group)
    return call, without(call, no_memory, (torch.Tensor, "new_empty"), (torch, "empty_like"))


def sparse(group, op, why):
    def call(value):
        return fluxlike.sparse_all_reduce(of(value), group=group).to_dense()

    def of(value):
        return torch.sparse_coo_tensor([[0, 2]], torch.full((2, 8), float(value)), (4, 8), device=device())

    if why == "context":
        other = make_context("gemm_rs", "in_kernel", group)
        return call, lambda: fluxlike.sparse_all_reduce(of(3), ctx=other)
    how = interrupt if why == "interrupt" else no_memory
    return call, without(call, how, (fluxlike.ops.sparse_all_reduce, "check"))


def layers(group, op, why):
    """Of `fluxlike.nn`, given an input of another dtype; and by the styles, with a plain tensor for the weight."""
    kind = {"gemm_rs": fluxlike.nn.RowParallelLinear, "ag_gemm": fluxlike.nn.ColumnParallelLinear}[op]
    whole = (16, 8) if op == "gemm_rs" else (8, 16)
    torch.manual_seed(0)
    if why == "style":
        style = fluxlike.nn.RowwiseParallel if op == "gemm_rs" else fluxlike.nn.ColwiseParallel
        mesh = DeviceMesh.from_group(group, device().type)
        layer = parallelize_module(torch.nn.Linear(*whole, bias=False, device=device()), mesh, style())
        right = layer.weight
    else:
        layer = kind(*whole, bias=False, group=group, device=device())

    @torch.no_grad()
    def call(value, dtype=torch.float32):
        return layer(torch.full((2, 2, 8), float(value), dtype=dtype, device=device()))

    def plain():
        layer.weight = torch.nn.Parameter(torch.ones(8, 8, device=device()))
        try:
            return call(3)
        finally:
            layer.weight = right

    return call, plain if why == "style" else lambda: call(3, torch.float64)


def backward(group, op, why):
    """Backward passes that follow each other, whose forward passes have been made. What one saved may be computed anew in it, and
    that come to a mismatch of another group, of which the ranks of this one have not heard.
    """
    xs = [torch.ones(4, 8, device=device(), requires_grad=True) for _ in range(10)]
    w, elsewhere = torch.ones(8, 8, device=device()), []

    def unpack(t):
        if elsewhere:
            raise elsewhere.pop()
        return t

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        ys = [getattr(fluxlike, op)(x, w, group=group) for x in xs]

    def call(value):
        ys[value].backward(torch.full_like(ys[value], value))
        return xs[value].grad

    def differs():
        error = fluxlike.CallMismatch("of another group")
        heard(error, "another")
        elsewhere.append(error)
        return call(3)

    return call, differs if why == "another group" else without(call, no_memory, (torch.Tensor, "contiguous"))


#: What makes the calls, of which operations, how one raises before it has begun, and what.
LEFT_OUT = [
    (operations, ("gemm_rs", "ag_gemm", "gemm_ar"), "memory", RuntimeError),
    (operations, ("gemm_rs", "ag_gemm", "gemm_ar"), "interrupt", KeyboardInterrupt),
    (operations, ("gemm_rs", "ag_gemm", "gemm_ar"), "context", ValueError),
    (operations, ("ag_gemm",), "list", ValueError),
    (operations, ("all_reduce", "reduce_scatter", "reduce"), "reduction", ValueError),
    (operations, ("all_reduce", "all_gather"), "warning", UserWarning),
    (lists, ("all_reduce_",), "overlap", ValueError),
    (lists, ("all_reduce",), "memory", RuntimeError),
    (sparse, ("sparse_all_reduce",), "memory", RuntimeError),
    (sparse, ("sparse_all_reduce",), "interrupt", KeyboardInterrupt),
    (sparse, ("sparse_all_reduce",), "context", ValueError),
    (layers, ("gemm_rs", "ag_gemm"), "dtype", ValueError),
    (layers, ("gemm_rs", "ag_gemm"), "style", ValueError),
    (backward, ("gemm_rs", "ag_gemm"), "memory", RuntimeError),
    (backward, ("gemm_rs", "ag_gemm"), "another group", fluxlike.CallMismatch),
]


def leaves_out_and_goes_on(group, kind, op, why, caught):
    rank = dist.get_rank(group)
    for _ in range(2):
        seen, said, (call, broken) = [], "", kind(group, op, why)
        ones = call(1)
        for value in range(2, 10):
            try:
                if value == 3 and rank == 1:
                    with pytest.raises(caught):
                        broken()
                    continue
                seen.append((value, call(value)))
                world.current().executor.synchronize()
            except fluxlike.CallMismatch as error:
                said = str(error)
                break
        assert "that this rank refused by an error of its own" in said, f"{op}, rank {rank}: {said!r}"
        for value, y in seen[: -1 if device().type == "cuda" else None]:
            assert y is None or torch.allclose(y, ones * value), f"{op}: call {value} is of another: {y}"
        while told(lambda: fluxlike.create_gemm_rs_context(8, 8, group=group).close(), ValueError)[0]:
            pass
        again = kind(group, op, why)[0](1)
        assert again is None or torch.allclose(again, ones)


@pytest.mark.parametrize(
    ("kind", "op", "why", "caught"),
    [pytest.param(kind, op, why, caught, id=f"{op}-{kind.__name__}-{why}") for kind, ops, why, caught in LEFT_OUT for op in ops],
)
def test_a_call_that_a_rank_leaves_out_is_not_taken_for_its_next(kind, op, why, caught):
    run_ranks(leaves_out_and_goes_on, 2, kind=kind, op=op, why=why, caught=caught)


def refused_first(group, op, nodes):
    """The last rank refuses the first of some calls, of which nothing has been made: all that follow are errors."""
    fluxlike.init(heap="shm")
    size, w = dist.get_world_size(), torch.ones(8, 8)
    refuses = dist.get_rank() == size - 1

    def call(value, broken=False):
        x = torch.full((4, 8), float(value))
        if op == "all_reduce":
            return fluxlike.all_reduce(x, op=dist.ReduceOp.PRODUCT if broken else "sum") / size
        if op == "layer":
            return layer(x.double() if broken else x) / 8
        return getattr(fluxlike, op)(x.double() if broken else x, w) / (8 * size if op == "gemm_rs" else 8)

    layer = fluxlike.nn.ColumnParallelLinear(8, 24, bias=False)
    nn.init.ones_(layer.weights[0]).requires_grad_(False)
    for value in range(1, 6):
        try:
            y = call(value, value == 1 and refuses)
        except ValueError as error:
            assert isinstance(error, fluxlike.CallMismatch) or (value == 1 and refuses), error
            continue
        except RuntimeError as error:  # of one that another node's ranks have told
            assert nodes and "gave up first" in str(error), error
            continue
        raise AssertionError(f"call {value} came to {y.tolist()}, {'' if (y == value).all() else 'of another call, '}and no error")
    if not nodes:  # a program that makes a context brings the ranks into step
        while told(lambda: fluxlike.create_gemm_rs_context(8, 8).close(), ValueError)[0]:
            pass
        assert (call(7) == 7).all()
    told(fluxlike.finalize, ValueError, RuntimeError)
    fluxlike.init(heap="shm")
    assert (call(7) == 7).all()
    fluxlike.finalize()


@pytest.mark.parametrize(
    ("op", "ranks", "nodes"),
    [("gemm_rs", 3, 0), ("all_reduce", 2, 0), ("layer", 2, 0), ("gemm_rs", 4, 2), ("ag_gemm", 2, 2), ("layer", 4, 2)],
)
def test_a_refused_call_of_which_nothing_was_made(op, ranks, nodes):
    env = {"FLUXLIKE_TIMEOUT_S": "10"} | ({"FLUXLIKE_VIRTUAL_NODES": str(nodes)} if nodes else {})
    outcomes = run_fresh(refused_first, ranks, env=env, timeout=100, op=op, nodes=nodes)
    assert all(outcome.ok for outcome in outcomes), [str(outcome) for outcome in outcomes]


def behind_the_call(group):
    """A backward whose call has been made, and that has no memory for the gradient of the weight."""
    w = torch.ones(8, 8, device=device(), requires_grad=True)

    def call(value, broken):
        x = torch.full((4, 8), float(value), device=device(), requires_grad=True)
        y = fluxlike.ag_gemm(x, w, group=group)
        with pytest.MonkeyPatch.context() as patch:
            if broken:
                patch.setattr(torch.Tensor, "__matmul__", no_memory)
            y.sum().backward()
        return y[0, 0] / 8

    return call


def without_a_call(group):
    """A backward that has all it needs, and cannot bring back what it saved."""
    w, broken_now = torch.ones(8, 8, device=device(), requires_grad=True), []

    def unpack(t):
        return no_memory() if broken_now else t

    def call(value, broken):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            y, _ = fluxlike.ag_gemm(torch.full((4, 8), float(value), device=device()), w, group=group, return_gathered=True)
        broken_now.extend([True] * broken)
        try:
            y.sum().backward()
        finally:
            broken_now.clear()
        return y[0, 0] / 8

    return call


def taken_from_a_gather(group):
    """The second of two layers that share a gather, called with another tensor than the first: it makes no call."""

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.Linear(8, 4, bias=False, device=device()) for _ in range(2))

        def forward(self, x, other):
            return self.a(x)[0, 0] + 0 * self.b(other)[0, 0]

    pair = Pair().requires_grad_(False)
    nn.init.ones_(pair.a.weight)
    mesh = DeviceMesh.from_group(group, device().type)
    pair = parallelize_module(pair, mesh, {"": fluxlike.nn.SharedGather("a", "b", input_layouts=Shard(0))})

    def call(value, broken):
        x = torch.full((4, 8), float(value), device=device())
        return pair(x, x.clone() if broken else x) / 8

    return call


def a_failed_context(group):
    """A context that failed on all ranks, in a call that has been told of long since, is called again."""
    failed, rank = fluxlike.create_gemm_rs_context(8, 8, 8, torch.float32, group, "copy_engine"), dist.get_rank(group)
    x, w = (torch.ones(8, 8, device=device()) for _ in range(2))

    def use():
        return fluxlike.gemm_rs(x, w, failed)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(failed, "overlapped", no_memory)
        assert told(lambda: (use(), use()), RuntimeError)[0]
    other = fluxlike.create_ag_gemm_context(8, 8, 8, torch.float32, group)

    def call(value, broken):
        if value == 3:  # on both: it says so, on one by its own error and on the other by PeerTimeout
            assert told(use, RuntimeError)[0]
        return fluxlike.ag_gemm(torch.full((4, 8), float(value), device=device()), w, other)[0, 0] / 8

    call.close = lambda: (failed.close(), other.close())
    return call


def goes_on(group, kind):
    """Rank 1 fails in the third of some calls; where none is left out all the others are right, on both ranks."""
    call, rank = kind(group), dist.get_rank(group)
    for value in range(1, 7):
        broken = value == 3 and rank == 1 and kind is not a_failed_context
        if broken:
            with pytest.raises((RuntimeError, ValueError), match=r"no memory is left|was called with another tensor"):
                call(value, True)
        else:
            assert call(value, False) == value, f"call {value}"
    getattr(call, "close", lambda: None)()


@pytest.mark.parametrize("kind", [behind_the_call, without_a_call, taken_from_a_gather, a_failed_context])
def test_nobody_is_told_where_no_call_is_left_out(kind):
    run_ranks(goes_on, 2, kind=kind)


def handles(group, late, own):
    """One handler for all ranks, of any error of a call: new contexts. It runs once on each, whoever was first at the call."""
    rank, x, w = dist.get_rank(group), *(torch.ones(8, 16, device=device()) for _ in range(2))
    settle = world.current().executor.synchronize

    def make():
        return fluxlike.create_gemm_rs_context(8, 8, 16, torch.float32, group)

    ctx, right = make() if own else None, fluxlike.gemm_rs(x, w, group=group)
    for turn in range(3):
        if rank == late:
            settle()
            time.sleep(0.3)
        if ctx is not None:
            assert torch.equal(fluxlike.gemm_rs(x, w, ctx), right)
        with pytest.raises(ValueError, match="float64" if rank == 0 else "this rank refused"):
            fluxlike.gemm_rs(x if rank else x.double(), w, ctx, group=group)
            settle()
            fluxlike.gemm_rs(x, w, ctx, group=group)  # on GPUs who calls first is told in the next call
        if ctx is not None and turn == 1:
            ctx.close()
        old, ctx = ctx, make()
        if turn != 1 and old is not None:
            assert "CallMismatch" in told(lambda: fluxlike.gemm_rs(x, w, old), ValueError)[0], "it is of no more use"  # noqa: B023
        for made in (ctx, None):
            assert torch.equal(fluxlike.gemm_rs(x, w, made, group=group), right), f"turn {turn}"
    told(ctx.close, ValueError)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("late", [None, 0, 1])
def test_the_same_handler_on_all_ranks(late, own):
    run_ranks(handles, 2, late=late, own=own)


def refuses_the_first(group, late, close):
    """As above, where the call that one rank refuses would have made the context for such calls, and so begun with a meeting."""
    fluxlike.init(heap="shm", heap_bytes=8 << 20)
    rank, x, w = group.rank(), torch.ones(8, 16), torch.ones(8, 16)
    ctx = fluxlike.create_gemm_rs_context(8, 8, 16, torch.float32)
    if rank == late:
        time.sleep(0.5)
    with pytest.raises(ValueError, match="float64" if rank == 0 else "this rank refused"):
        fluxlike.gemm_rs(x if rank else x.double(), w)
    if close:
        ctx.close()
    ctx = fluxlike.create_gemm_rs_context(8, 8, 16, torch.float32)
    for made in (ctx, None):
        assert torch.equal(fluxlike.gemm_rs(x, w, made), torch.full((4, 8), 32.0))
    fluxlike.finalize()


@pytest.mark.parametrize("close", [True, False])
@pytest.mark.parametrize("late", [0, 1])
def test_the_same_handler_where_a_first_call_is_refused(late, close):
    for outcome in run_fresh(refuses_the_first, 2, {"FLUXLIKE_TIMEOUT_S": "30"}, late=late, close=close):
        assert outcome.ok, str(outcome)


def an_unknown_id(group):
    """Rank 1 looks up an id that its table does not have, in a forward pass that begins the exchange of ids."""
    if device().type == "cuda":
        pytest.skip("an id that is not there ends the process's use of a GPU")
    rank, seen, said = dist.get_rank(group), [], ""
    table = fluxlike.nn.Embedding(8, 4, max_ids=4, group=group)

    def call(id):
        table.zero_grad()
        table(torch.tensor([id])).sum().backward()
        return fluxlike.sparse_all_reduce(table.weight.grad, ctx=table.context).indices().tolist()

    for id in range(6):
        try:
            if id == 2 and rank == 1:
                with pytest.raises(IndexError):
                    call(99)
                continue
            seen.append((id, call(id)))
        except fluxlike.CallMismatch as error:
            said = str(error)
            break
    assert "a call of sparse_all_reduce that this rank refused" in said, said
    assert all(ids == [[id]] for id, ids in seen), f"ids of another call: {seen}"
    told(table.close, ValueError)


def test_an_id_that_one_rank_does_not_have():
    run_ranks(an_unknown_id, 2)

"""Ranks that go on behind an error of one of them: a call apart they never are, and where no call was left out nobody is told."""

import pytest
import torch
import torch.distributed as dist
from faults import told
from ranks import device, run_fresh, run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import fluxlike


def refused_first(group, op, nodes):
    """The last rank refuses the first of some calls, of which nothing has been made: each of the others is right, or an error."""
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
        except RuntimeError as error:  # of two that meet at different things, or of one that another node's ranks have told
            assert any(word in str(error) for word in ("must make the same collective calls", "gave up first")), error
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


def no_memory(*_, **__):
    raise MemoryError("no memory is left")


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
        assert told(lambda: (use(), use()), MemoryError, RuntimeError)[0]
    other = fluxlike.create_ag_gemm_context(8, 8, 8, torch.float32, group)

    def call(value, broken):
        if value == 3:  # on both: it says so, on one by its own error and on the other by PeerTimeout
            assert told(use, RuntimeError)[0]
        if broken:
            raise MemoryError
        return fluxlike.ag_gemm(torch.full((4, 8), float(value), device=device()), w, other)[0, 0] / 8

    call.close = lambda: (failed.close(), other.close())
    return call


def goes_on(group, kind):
    """Rank 1 fails in the third of some calls; where none is left out all the others are right, on both ranks."""
    call, rank = kind(group), dist.get_rank(group)
    for value in range(1, 7):
        broken = value == 3 and rank == 1 and kind is not a_failed_context
        if broken:
            with pytest.raises((MemoryError, ValueError), match=r"no memory is left|was called with another tensor"):
                call(value, True)
        else:
            assert call(value, False) == value, f"call {value}"
    getattr(call, "close", lambda: None)()


@pytest.mark.parametrize("kind", [behind_the_call, without_a_call, taken_from_a_gather, a_failed_context])
def test_nobody_is_told_where_no_call_is_left_out(kind):
    run_ranks(goes_on, 2, kind=kind)


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

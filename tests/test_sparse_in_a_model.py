"""Sparse gradients in a model: the hook of DistributedDataParallel, and an Embedding whose ids go ahead of their gradient."""

import contextlib
import copy
import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from ranks import TORCHRUN, device, run_fresh, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fluxlike
from fluxlike.nn import embedding as embedding_file
from fluxlike.ops.sparse_hook import CONTEXT


class Words(nn.Module):
    """A sparse table, and a dense layer behind it."""

    def __init__(self, table):
        super().__init__()
        self.table, self.out = table, nn.Linear(4, 2)

    def forward(self, ids):
        return self.out(self.table(ids).mean(1))


def trained(group, make, optimizer, hook):
    """Weights after steps on data that differ between the ranks; in the third step gradients are accumulated."""
    torch.manual_seed(0)
    rank = dist.get_rank(group)
    model = Words(make())
    ddp = DistributedDataParallel(model, process_group=group)
    if hook:
        ddp.register_comm_hook(group, fluxlike.sparse_allreduce_hook)
    steps = [optimizer(model.table.parameters()), torch.optim.SGD(model.out.parameters(), lr=0.1)]
    for step in range(4):
        for _ in range(1 + (step == 2)):
            ids = torch.randint(0, 20, (3, 5), generator=torch.Generator().manual_seed(10 * step + rank))
            with ddp.no_sync() if step == 2 and not _ else contextlib.nullcontext():
                ddp(ids).square().sum().backward()
        for each in steps:
            each.step()
            each.zero_grad()
    return [p.detach().clone() for p in model.parameters()], model


def trains(group):
    """SparseAdam and SGD with momentum come to the weights that they come to with gloo, with ids ahead and with ids behind."""
    for optimizer in (lambda p: torch.optim.SparseAdam(p, 0.05), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)):
        right, _ = trained(group, lambda: nn.Embedding(20, 4, sparse=True), optimizer, False)
        plain, _ = trained(group, lambda: nn.Embedding(20, 4, sparse=True), optimizer, True)
        ahead, model = trained(group, lambda: fluxlike.nn.Embedding(20, 4, 30, group), optimizer, True)
        for a, b, c in zip(right, plain, ahead, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-7)
            assert torch.equal(c, b)
        assert model.table.context.stats["calls"] == 4 and model.table.context._pending is None
        model.table.close()


@pytest.mark.skipif(TORCHRUN, reason="compares with gloo")
def test_training():
    run_ranks(trains, 2)


def in_order(table, ddp, order, zero):
    """Steps of a schedule: forward of a batch, or backward of one, with its reduction. The gradients, as dense tables."""
    rank, found, losses = dist.get_rank(), [], {}
    for step in order:
        if step[0] == "f":
            name = step[1]
            ids = torch.tensor([ord(name) % 7, ord(name) % 5 + rank], device=device())
            losses[name] = ddp(ids).square().sum()
        elif step[0] == "z":
            zero()
        else:
            sum(losses.pop(one) for one in step[1:]).backward()
            found.append(table.weight.grad.to_dense().clone())
            zero()
    return found


#: f: forward, b: backward of these together, z: zero_grad only. And how many of the reductions found ids that had gone ahead.
ORDERS = {
    "in turn": (("fa", "ba", "fb", "bb", "fc", "bc"), 3),
    "one forward ahead": (("fa", "fb", "ba", "fc", "bb", "fd", "bc", "bd", "fe", "be"), 1),
    "two together": (("fa", "fb", "bab", "fc", "bc"), 1),
    "zeroed between": (("fa", "ba", "fb", "z", "fc", "bbc", "fd", "bd"), 2),
    "one that is dropped": (("fa", "ba", "fx", "fb", "bb", "fc", "bc", "fd", "bd", "fe", "be"), 2),
}


def orders(group, which, tie):
    order, ahead = ORDERS[which]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedding_file, "FORGOTTEN", 3)
        in_both(group, order, ahead, tie)


def in_both(group, order, ahead, tie):
    results, started = [], []
    for ours in (False, True):
        torch.manual_seed(0)
        kind, how = (fluxlike.nn.Embedding, dict(max_ids=16, group=group)) if ours else (nn.Embedding, dict(sparse=True))
        kind = functools.partial(kind, 20, 4, device=device(), **how)
        table, out = kind(), nn.Linear(4, 2).to(device())
        model = nn.Sequential(table, out)
        if tie:  # by weight: each forward goes through the other one of the two
            other = kind()
            other.weight = table.weight
            model = Turns(table, other, out)
        ddp = DistributedDataParallel(model, process_group=group)
        ddp.register_comm_hook(group, fluxlike.sparse_allreduce_hook)
        if ours:
            pending_of = table.context.pending_of

            def noted(*args, context=table.context, pending_of=pending_of):
                started.append(context._pending is not None)
                return pending_of(*args)

            table.context.pending_of = noted
        results.append(in_order(table, ddp, order, lambda ddp=ddp: ddp.zero_grad()))
    assert len(results[0]) == len(results[1])
    for plain, mine in zip(*results, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-6, atol=1e-7)
    assert sum(started) == ahead, started
    table.close()
    ddp(torch.tensor([1, 2], device=device())).sum().backward()  # its ids go with the values now
    assert table.weight.grad._nnz() > 0


def averages_over_all(group):
    """The hook without a group: over all ranks, as torch's for dense buckets, though fluxlike knows fewer."""
    rank = dist.get_rank()
    alone = [dist.new_group([r]) for r in range(dist.get_world_size())][rank]
    fluxlike.init(alone, heap="shm", heap_bytes=16 << 20)

    def gradient():
        ddp = DistributedDataParallel(nn.Embedding(4, 1, sparse=True))
        ddp.register_comm_hook(None, fluxlike.sparse_allreduce_hook)
        ddp(torch.tensor([rank])).sum().backward()
        return ddp.module.weight.grad.to_dense().flatten().tolist()

    with pytest.raises(ValueError, match=r"outside the group given to fluxlike\.init"):
        gradient()
    fluxlike.finalize()
    fluxlike.init(heap="shm", heap_bytes=16 << 20)
    assert gradient() == [0.5, 0.5, 0, 0]
    fluxlike.finalize()


@pytest.mark.skipif(TORCHRUN, reason="it begins fluxlike anew")
def test_the_hook_without_a_group_averages_over_all_ranks():
    for outcome in run_fresh(averages_over_all, 2):
        assert outcome.ok, str(outcome)


class Turns(nn.Module):
    """Embeddings that take turns, and what is behind them."""

    def __init__(self, one, other, out):
        super().__init__()
        self.one, self.other, self.out, self._turn = one, other, out, itertools.cycle((one, other))

    def forward(self, ids):
        return self.out(next(self._turn)(ids))


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("which", ORDERS)
def test_ids_go_ahead_only_of_their_own_gradient(which, tie):
    run_ranks(orders, 2, which=which, tie=tie)


def replaced(group):
    """A state that replaces the parameter: ids go ahead as before."""
    table = fluxlike.nn.Embedding(20, 4, 16, group)
    table.load_state_dict({"weight": torch.ones(20, 4, device=device())}, assign=True)
    for _ in range(3):
        table(torch.tensor([1, 2], device=device())).sum().backward()
        assert table.context._pending is not None
        fluxlike.sparse_all_reduce_(table.weight.grad, "avg", group, ctx=getattr(table.weight, CONTEXT))
        table.weight.grad = None
    for _ in range(100):  # that are never reduced are counted, and not kept
        table(torch.tensor([1], device=device()))
    assert len(table.context.ahead._open) == 1
    with pytest.raises(TypeError, match="make one, with max_ids, and load the weights"):
        fluxlike.nn.Embedding.from_pretrained(torch.zeros(4, 2))
    table.load_state_dict({"weight": torch.ones(20, 4, dtype=torch.bfloat16, device=device())}, assign=True)
    table(torch.tensor([1], device=device())).sum().backward()
    assert not hasattr(table.weight, CONTEXT), "the memory is for another dtype"
    table.close()


def test_embedding_of_another_tensor():
    run_ranks(replaced, 2)


def compiled(group):
    """A compiled model starts the ids in its forward; that is left out of what is compiled, and it is not compiled anew."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    table = fluxlike.nn.Embedding(16, 4, 8, group, device=device())
    fast = torch.compile(lambda ids: table(ids).sum(), backend="aot_eager")
    for step in range(6):
        ids = torch.arange(5, device=device()) + step + dist.get_rank(group)
        fast(ids).backward()
        assert table.context._pending.ids.tolist() == ids.tolist()
        x = fluxlike.sparse_all_reduce_(table.weight.grad, "avg", group, ctx=table.context)
        assert x.indices()[0].tolist() == list(range(step, step + 4 + dist.get_world_size(group)))
        table.weight.grad = None
    assert len(counters["graph_break"]) <= 1 and counters["stats"]["unique_graphs"] <= 3, counters
    table.close()


def test_embedding_in_a_compiled_model():
    run_ranks(compiled, 2)


def forwards(group):
    """When ids go ahead: not in evaluation; once a gradient; without what is padding; not if there are no such rows."""
    table = fluxlike.nn.Embedding(9, 2, 8, group, padding_idx=3, device=device())
    ids = torch.tensor([1, 3, 2, 3], device=device())
    with torch.no_grad():
        table(ids)
    assert table.context._pending is None
    table(ids)  # no gradient comes of it, which is not known before it is forgotten
    for _ in range(embedding_file.FORGOTTEN):
        table(ids).sum().backward()
        assert table.context._pending is None
        fluxlike.sparse_all_reduce_(table.weight.grad, "avg", group, ctx=table.context)
        table.weight.grad = None
    table(ids).sum().backward()
    assert table.context._pending.ids.tolist() == [1, 2]
    x = fluxlike.sparse_all_reduce_(table.weight.grad, "avg", group, ctx=table.context)
    assert x.indices().tolist() == [[1, 2]] and (x.values() == 1).all()
    table(torch.tensor([5, 3, 1], device=device())).sum().backward()  # added to what was reduced: entries beside those of the ids
    assert table.context._pending is None
    x = fluxlike.sparse_all_reduce_(table.weight.grad, "avg", group, ctx=table.context)
    assert x.indices().tolist() == [[1, 2, 5]] and x.values()[:, 0].tolist() == [2, 1, 1]
    table.zero_grad(set_to_none=False)  # what is kept has no entries
    table(ids).sum().backward()
    assert table.context._pending.ids.tolist() == [1, 2]
    x = fluxlike.sparse_all_reduce_(table.weight.grad, "avg", group, ctx=table.context, wire_dtype="fp32")  # as the context has it
    assert x.indices().tolist() == [[1, 2]] and (x.values() == 1).all()
    table.weight.grad = None
    with pytest.raises(TypeError, match="cannot be copied or pickled; make another one, and load the state_dict of this one"):
        copy.deepcopy(table)
    with pytest.raises(ValueError, match=r"would become torch\.float16; make it with dtype=torch\.float16, or close it first"):
        nn.Sequential(table).half()
    assert table.weight.dtype == table.float().weight.dtype == torch.float32
    table.eval()(ids)  # as one rank alone may do it
    assert table.context._pending is None
    table.train()
    if device().type == "cpu":  # GPUs do not survive it
        with pytest.raises(IndexError):
            table(torch.tensor([1, 9]))
        assert table.context._pending is None
    # no ids on one rank; many dimensions, and only padding; two forward passes before one backward pass
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    many = torch.tensor([[8, 3], [0, 8], [5, 3]], device=device())
    for batches in ([many.T if rank else many[:0]], [many if rank else many[:, :0] + 3], [ids[:2], many[::2].int()]):
        table.weight.grad = None
        sum(table(each).sum() for each in batches).backward()
        assert (table.context._pending is None) == (len(batches) > 1)
        right = table.weight.grad.to_dense()
        dist.all_reduce(right, group=group)
        x = fluxlike.sparse_all_reduce_(table.weight.grad, "avg", group, ctx=table.context)
        assert torch.equal(x.to_dense(), right / size)
    table.weight.grad = None
    with pytest.raises(ValueError, match="9 ids are more than max_ids=8; make the Embedding with a larger max_ids"):
        table(torch.arange(9, device=device()).where(torch.arange(9, device=device()) != 3, 0))
    table.close()
    assert table.half().weight.dtype == torch.float16, "no memory is left that it would have to fit"
    with pytest.raises(ValueError, match="max_nnz=0: all sizes must be whole numbers above 0"):
        fluxlike.nn.Embedding(9, 2, 0, group, device=device())
    # what torch refuses on one rank, all hear of
    for wrong in (dict(embedding_dim=-1), dict(dtype=torch.int32), dict(padding_idx=9), dict(embedding_dim="2")):
        options = dict(num_embeddings=9, embedding_dim=2) | (wrong if rank == 1 else {})
        with pytest.raises(ValueError, match="Embedding: " if rank == 1 else "rank 1 failed, so no rank goes on: Embedding: "):
            fluxlike.nn.Embedding(**options, max_ids=8, group=group)


def test_embedding():
    run_ranks(forwards, 2)


def test_a_forward_that_is_differentiated_twice_is_one():
    ahead, x = embedding_file._Ahead(), torch.ones((), requires_grad=True)
    twice, not_yet = 2 * x, 3 * x
    ahead.forward(twice, 0)
    for _ in range(2):
        twice.backward(retain_graph=True)
    ahead.forward(not_yet, 0)
    assert not ahead.is_first(1), "the second time was taken for the other one"
    not_yet.backward()
    assert ahead.is_first(1)

"""sparse_all_reduce: what is refused, by one rank or by all, and what the others are told; ids other than were started."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from faults import told
from ranks import TORCHRUN, device, run_fresh, run_ranks
from test_sparse_all_reduce import DTYPES, gradient, same

import fluxlike
from fluxlike.ops import sparse_index
from fluxlike.runtime import world


class Late:
    """What the device reports of ids, as the host of a GPU sees it: once it has waited for the device."""

    def __init__(self, ctx):
        self.word, self.there = ctx._differed, False
        ctx._differed = self

    @property
    def value(self):
        return self.word.value if self.there else 0

    def wait(self):
        self.there = True


def other_ids_last(group):
    """Rank 1's gradient has other ids than were started, and nothing asks for it but the end: that end raises, on rank 1 only."""
    fluxlike.init(heap="shm")
    executor, ids, shape = world.current().executor, [1, 2, 1], (5, 4)
    for look in ("check", "close", "a right call, then close", "with", "with an exception", "finalize"):
        ctx = fluxlike.create_sparse_all_reduce_context(shape, 3)
        executor.synchronize = Late(ctx).wait

        def call(started):
            ctx.start_indices(torch.tensor(started))  # noqa: B023
            fluxlike.sparse_all_reduce(gradient(ids, shape), ctx=ctx)  # noqa: B023

        def leaves(error):
            with ctx:  # noqa: B023
                if error is not None:
                    raise error

        call([1, 2, 1 + group.rank()])
        if look.startswith("a right call"):
            call(ids)
        check = ctx.check if group.rank() else lambda: None
        act = {"check": check, "with": lambda: leaves(None), "with an exception": lambda: leaves(KeyError("of the caller"))}
        said, _ = told(fluxlike.finalize if look == "finalize" else act.get(look, ctx.close), ValueError, KeyError)
        if look == "with an exception":
            assert said == "KeyError: 'of the caller'", said
        elif group.rank() == 1:
            assert "ValueError: sparse_all_reduce: a gradient had other ids than were started" in said, f"{look}: {said}"
        else:
            assert not said, f"{look}: {said}"
        if look == "check":
            dist.barrier(group)
            assert told(ctx.check, ValueError, RuntimeError)[0], "nobody has told this rank that its result is wrong"
            ctx.close()
        assert ctx.closed, look
        del executor.synchronize
    assert not fluxlike.is_initialized()


@pytest.mark.skipif(TORCHRUN, reason="makes its own ranks")
def test_other_ids_in_the_last_call():
    for outcome in run_fresh(other_ids_last, 2, grace=10):
        assert outcome.ok, str(outcome)


def other_ids_on_a_gpu(group):
    """Without a word from the host in the call, and a right call behind it."""
    ids = torch.arange(300, device=device())
    ctx = fluxlike.create_sparse_all_reduce_context((5000, 64), 300, group=group)
    x = gradient(ids.tolist(), (5000, 64))

    def call(started):
        ctx.start_indices(started)
        fluxlike.sparse_all_reduce(x, "sum", group, "padded", ctx=ctx)

    call(ids)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(1 << 28)  # the host is ahead
        call(ids + 1)
        call(ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(ValueError, match="other ids than were started"):
        ctx.close()


@pytest.mark.gpu
def test_other_ids_in_the_last_call_on_a_gpu():
    run_ranks(other_ids_on_a_gpu, 1)


@pytest.mark.parametrize("name", ["fast", "reference"])
def test_wires_by_name(name):
    run_ranks(wires, 2, name=name)


def wires(group, name):
    """A wire by its name is the wire."""
    one, x = (fluxlike if name == "fast" else fluxlike.reference).sparse_all_reduce, gradient([1, 1, 2], (5, 4))
    for short, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        same(one(x, group=group, wire_dtype=short), one(x, group=group, wire_dtype=dtype), short)


def reference_disagrees(group):
    """What one rank does wrong, or otherwise than the rest, is an error of all, before torch's collectives, which could not end."""
    one, odd = fluxlike.reference.sparse_all_reduce, dist.get_rank(group) == 1
    x = gradient([1, 1, 2], (5, 4))
    for act, word in (
        (lambda: one(gradient([1], (5, 3)) if odd else x, group=group), "(5, 3)"),
        (lambda: one(x.half() if odd else x, group=group), "torch.float16"),
        (lambda: one(x, "avg" if odd else "sum", group=group), "'avg'"),
        (lambda: one(x, wire_dtype="bf16" if odd else None, group=group), "torch.bfloat16"),
        (lambda: one(x, "max" if odd else "sum", group=group), "op='max' is not one of"),
        (lambda: one(x.to_dense() if odd else x, group=group), "it must be torch.sparse_coo"),
    ):
        said, took = told(act, ValueError)
        assert word in said and took < 30, f"{word}: {said!r}"
    same(one(x, group=group), fluxlike.sparse_all_reduce(x, group=group))


def test_a_reference_on_which_ranks_disagree():
    run_ranks(reference_disagrees, 2)


def crowd(entries):
    """So many entries, in the memory of one."""
    row, value = torch.zeros(1, 1, dtype=torch.int64, device=device()), torch.ones(1, device=device())
    return torch.sparse_coo_tensor(row.expand(1, entries), value.expand(entries), (5,), check_invariants=False)


def refusals(group, name):
    x = gradient([1, 1, 2], (5, 4))
    one = (fluxlike if name == "fast" else fluxlike.reference).sparse_all_reduce
    scattered = fluxlike.sparse_reduce_scatter
    large = torch.sparse_coo_tensor([[3, 2**63 - 1]], [1.0, 1.0], (2**63 - 1,), check_invariants=False).to(device())
    with fluxlike.create_sparse_all_reduce_context((5, 4), 3, group=group) as ctx:
        for wrong, says in (
            (lambda: one(x.to_dense(), group=group), "torch.strided, it must be torch.sparse_coo; use fluxlike.all_reduce_"),
            (lambda: one(x.to_dense().to_sparse_csr(), group=group), "torch.sparse_csr, it must be torch.sparse_coo; use x.to_"),
            (lambda: one([x], group=group), "x is list, it must be a sparse COO tensor"),
            (lambda: one(x.double(), group=group), "x has dtype torch.float64"),
            (lambda: one(x, "max", group), "op='max' is not one of 'sum', 'avg'"),
            (lambda: one(x, mode="fast", group=group), "mode='fast' is not one of 'exact', 'padded'"),
            (lambda: one(x, mode="padded", group=group), "needs max_nnz"),
            (lambda: one(x, mode="padded", max_nnz=0, group=group), "max_nnz=0 is not"),
            (lambda: one(x, mode="padded", max_nnz=2, group=group), "3 entries are more than max_nnz=2"),
            (lambda: one(x, wire_dtype=torch.int8, group=group), "wire_dtype=torch.int8 is not torch.bfloat16"),
            (lambda: one(x, wire_dtype="int8", group=group), "wire_dtype='int8' is not torch.bfloat16, torch.float16 or"),
            (lambda: one(gradient([1] * 4, (5, 4)), ctx=ctx), "4 entries are more than max_nnz=3"),
            (lambda: one(gradient([1], (5, 3)), ctx=ctx), "the context is for 5 rows of 4 elements"),
            (lambda: one(x.to("meta"), group=group), "x is on meta"),
            (lambda: one(gradient([0], (5, 0)), group=group), "have no elements"),
            (lambda: one(gradient([], (0, 4)), group=group), "x is (0, 4) with sparse_dim=1, it has no rows"),
            (lambda: one(gradient([], (0, 4)), mode="padded", max_nnz=2, group=group), "it has no rows"),
            (lambda: scattered(gradient([], (0, 4)), group=group), "sparse_reduce_scatter: x is (0, 4) with sparse_dim=1"),
            (lambda: scattered(x.double(), group=group), "sparse_reduce_scatter: x has dtype torch.float64"),
            (lambda: scattered(x, mode="padded", max_nnz=2, group=group), "sparse_reduce_scatter: 3 entries are more than"),
            (lambda: one(crowd(2**32 + 3), group=group), "x has 4294967299 entries, more than 1073741824"),
            (lambda: one(x, ctx=group), "must come from fluxlike.create_sparse_all_reduce_context"),
            (lambda: one(x, ctx=ctx, max_nnz=3), "are those of the context"),
            (lambda: ctx.start_indices(torch.ones(2, device=device())), "ids are torch.float32"),
            (lambda: fluxlike.create_sparse_all_reduce_context((5,), 0, group=group), "max_nnz=0: all sizes"),
            (lambda: fluxlike.create_sparse_all_reduce_context((5, 4), 2, torch.int8, group), "dtype torch.int8"),
            (lambda: fluxlike.create_sparse_all_reduce_context((5, 4), 2, "float32", group), "dtype='float32' is not"),
            (lambda: fluxlike.create_sparse_all_reduce_context((2**63, 4), 2, group=group), "a table has 9223372036854775806 rows"),
            (lambda: one(large, group=group), "sparse_dim=1: a table has 9223372036854775806 rows at most"),
        ):
            said, _ = told(wrong, ValueError)
            assert says in said, said
        same(one(x, ctx=ctx), fluxlike.reference.sparse_all_reduce(x, group=group))  # nobody is out of step


@pytest.mark.parametrize("name", ["fast", "reference"])
def test_bad_calls(name):
    run_ranks(refusals, 2, name=name)


def differ(group):
    """Ranks whose tables, dtypes or options are not alike, or one of which has too many entries: all are told, and none waits."""
    fluxlike.init(heap="shm")
    rank = group.rank()
    one = fluxlike.sparse_all_reduce
    ids = [1, 2, 1]

    def too_many(start):
        with fluxlike.create_sparse_all_reduce_context((5, 4), 3) as ctx:
            if start:
                ctx.start_indices(torch.tensor([1, 2, 1]))
            one(gradient(ids + [1] * (rank == 1), (5, 4)), ctx=ctx)

    def other_ids():
        with fluxlike.create_sparse_all_reduce_context((5, 4), 3) as ctx:
            ctx.start_indices(torch.tensor([1, 2, 1 + rank]))
            one(gradient(ids, (5, 4)), ctx=ctx)

    for number, call in enumerate((
        lambda: one(gradient(ids, (5 + rank, 4))),
        lambda: one(gradient(ids, (5, 4 + rank))),
        lambda: one(gradient(ids, (5, 4), DTYPES[rank])),
        lambda: one(gradient(ids, (5, 4)), ("sum", "avg")[rank]),
        lambda: one(gradient(ids, ((20, 4), (20, 2, 2))[rank])),
        lambda: one(gradient(ids, (5, 4)), mode="padded", max_nnz=16 + 16 * rank),
        lambda: one(gradient(ids + [1] * (rank == 1), (5, 4)), mode="padded", max_nnz=3),
        lambda: too_many(False),
        lambda: too_many(True),
        other_ids,
    )):  # fmt: skip
        said, seconds = told(call, ValueError, RuntimeError)
        assert said and seconds < 15, f"{number}: {said} after {seconds}"
        assert said.startswith(("CallMismatch", "RuntimeError", "ValueError", "PeerTimeout")), said
        # where the ranks meet again, and one that has refused its call is told that the others made it
        while told(lambda: fluxlike.create_sparse_all_reduce_context((7, 3), 3).close(), ValueError, RuntimeError)[0]:
            assert rank == 1
        x = gradient(ids, (7, 3), seed=rank)
        same(one(x), fluxlike.reference.sparse_all_reduce(x))


@pytest.mark.skipif(TORCHRUN, reason="makes its own ranks")
def test_ranks_that_differ():
    for outcome in run_fresh(differ, 2, {"FLUXLIKE_TIMEOUT_S": "20"}):
        assert outcome.ok, str(outcome)


#: Tensors that one rank brings, and what it is told.
REFUSED = (
    (lambda x: x.to_dense().to_sparse_csr(), "torch.sparse_csr, it must be torch.sparse_coo"),
    (lambda x: x.to_dense(), "torch.strided, it must be torch.sparse_coo"),
    (lambda x: x.double(), "x has dtype torch.float64"),
    (lambda x: gradient([1], (5, 9)), "the context is for 5 rows of 4 elements"),
    (lambda x: gradient([[1, 1]], (5, 4), dims=2), "with sparse_dim=2"),
    (lambda x: x.to("meta"), "x is on meta"),
    (lambda x: gradient([1, 1, 1, 2], (5, 4)), "4 entries are more than max_nnz=3"),
)


def one_refuses(group):
    """One rank refuses its tensor and does nothing more; the others, in that call, are told that it did. Or all refuse theirs."""
    fluxlike.init(heap="shm")
    one, x, rank = fluxlike.sparse_all_reduce, gradient([1, 2, 1], (5, 4)), group.rank()
    ids = torch.tensor([1, 2, 1])

    def told_of(act, right, says):
        said, seconds = told(act if rank == 1 else right, ValueError)
        assert (says if rank == 1 else "rank 1 at 'a call of sparse_all_reduce that this rank refused") in said, f"{says}: {said}"
        assert seconds < 30, f"{says}: {seconds}"
        dist.barrier(group)

    for broken, says in REFUSED:
        with contextlib.suppress(ValueError), fluxlike.create_sparse_all_reduce_context((5, 4), 3) as ctx:
            one(x, ctx=ctx)
            said, _ = told(lambda: one(REFUSED[rank][0](x), ctx=ctx), ValueError)
            assert REFUSED[rank][1] in said, said
            one(x, ctx=ctx)  # where all refuse, each for its reason, nobody is out of step
            told_of(lambda: one(broken(x), ctx=ctx), lambda: one(x, ctx=ctx), says)  # noqa: B023
    for bad, says in ((ids.float(), "ids are torch.float32"), ([1], "ids are list"), (torch.ones(4).long(), "4 entries are more")):
        with contextlib.suppress(ValueError), fluxlike.create_sparse_all_reduce_context((5, 4), 3) as ctx:
            told_of(lambda: ctx.start_indices(bad), lambda: (ctx.start_indices(ids), one(x, ctx=ctx)), says)  # noqa: B023
    one(x)
    one(x)
    told_of(lambda: one(x.int()), lambda: one(x), "x has dtype torch.int32")


@pytest.mark.skipif(TORCHRUN, reason="makes its own ranks")
def test_a_tensor_that_one_rank_refuses():
    for outcome in run_fresh(one_refuses, 2, {"FLUXLIKE_TIMEOUT_S": "60"}, timeout=240, grace=10):
        assert outcome.ok, str(outcome)


def ends_forks(group):
    """Ids that are of another gradient, and an exchange that fails, leave no stream that nobody is behind."""
    ctx, ahead, joined = fluxlike.create_sparse_all_reduce_context((8, 4), 4, torch.float32, group), world.current().ahead, []
    ids, before = torch.arange(3, device=device()), len(ahead)
    ctx.start_indices(ids[:2])
    with pytest.raises(ValueError, match="ids that were started: 2, entries of the gradient: 3"):
        fluxlike.sparse_all_reduce(gradient([0, 1, 2], (8, 4)), ctx=ctx)
    assert len(ahead) == before

    @contextlib.contextmanager
    def forked():
        yield
        joined.append("the stream")  # and not where it is thrown away

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ctx._lanes, "forked", forked)
        patch.setattr(sparse_index, "local", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            ctx.start_indices(ids)
    assert joined and len(ahead) == before
    told(ctx.close, RuntimeError)


def test_an_exchange_of_ids_that_ends_early():
    run_ranks(ends_forks, 2)


def ids_outside(group):
    """Ids that the table does not have, on one rank: an error on all, also for those that 32 bits would take for others."""
    one, x = fluxlike.sparse_all_reduce, gradient([1, 2, 1], (5, 4))
    for act in (one, fluxlike.sparse_reduce_scatter):
        for wrong in (-1, 5, 6, 2**31 - 1, 2**32 + 1, -(2**40)):
            with torch.sparse.check_sparse_tensor_invariants(False):
                ids = torch.tensor([[1, wrong, 1]], device=device())
                bad = torch.sparse_coo_tensor(ids, x._values(), (5, 4), check_invariants=False)
            mine = bad if dist.get_rank(group) == 1 else x
            said, _ = told(lambda: act(mine, group=group), ValueError)  # noqa: B023
            assert f"{act.__name__}: rank 1 has ids below 0 or not below 5, the rows of the table" in said, f"{wrong}: {said}"
            act(mine, group=group, mode="padded", max_nnz=16)  # nobody looks, and it does no harm
            if act is one:
                with pytest.raises(ValueError, match="rank 1 has ids below 0 or not below 5"):
                    fluxlike.reference.sparse_all_reduce(mine, group=group)
    for wrong in ([0, 4], [1, -1], [3, 0], [-1, 4], [2**62, 0]):  # of two dimensions, where the sum may well be another row's
        bad = torch.sparse_coo_tensor([[0, wrong[0]], [0, wrong[1]]], [1.0, 1.0], (3, 4), check_invariants=False).to(device())
        mine = bad if dist.get_rank(group) == 1 else gradient([[1, 1]], (3, 4), dims=2)
        said, _ = told(lambda: one(mine, group=group), ValueError)  # noqa: B023
        assert "rank 1 has ids below 0 or not below 12, the rows of the table" in said, f"{wrong}: {said}"
    same(one(x, group=group), fluxlike.reference.sparse_all_reduce(x, group=group))


@pytest.mark.parametrize("ranks", [2, 3])
def test_ids_outside_of_the_table(ranks):
    run_ranks(ids_outside, ranks)

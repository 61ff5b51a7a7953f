"""sparse_all_reduce: bit by bit against the reference; ids of all kinds, dtypes, modes. `test_sparse_in_a_model` trains."""

import functools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import TORCHRUN, device, divided, rows_slice, run_fresh, run_ranks

import fluxlike
from fluxlike.ops import sparse_all_reduce as op_file
from fluxlike.runtime import programs, world

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def gradient(ids, shape, dtype=torch.float32, seed=0, dims=1):
    """Entries at ``ids`` with random values, as autograd leaves them: in any order, ids more than once."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn((len(ids), *shape[dims:]), generator=generator).to(dtype)
    indices = torch.tensor([ids], dtype=torch.int64) if dims == 1 else torch.tensor(ids).reshape(len(ids), dims).T
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True).to(device())


def bits(t):
    return t.contiguous().view({2: torch.int16, 4: torch.int32}[t.dtype.itemsize])


def same(got, right, what=""):
    assert got.is_coalesced() and got.shape == right.shape and got.dtype == right.dtype, what
    assert torch.equal(got.indices(), right.indices()), what
    assert torch.equal(bits(got.values()), bits(right.values())), what


def same_padded(got, right, entries, what=""):
    """The result of mode="padded" against that of "exact"."""
    union = right._nnz()
    ids, values = got._indices(), got._values()
    assert got._nnz() == entries and not got.is_coalesced(), what
    assert torch.equal(ids[:, :union], right.indices()) and torch.equal(bits(values[:union]), bits(right.values())), what
    assert not values[union:].any() and (ids[:, union:] == (ids[:, union - 1 : union] if union else 0)).all(), what


FINE = dict(TILE=32, COLUMNS=8, CHUNK=4, UNIT=8)


def fine(body):
    """Small tiles for contexts that are made in a body: so a few rows are many chunks."""

    @functools.wraps(body)
    def run(group, **how):
        before = {name: getattr(op_file, name) for name in FINE}
        vars(op_file).update(FINE)
        try:
            return body(group, **how)
        finally:
            vars(op_file).update(before)

    return run


def small(group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    ids = [[3, 1, 3, 7, 1, 3], [], [7, 0, 3], [3, 3, 9]][rank]
    x = gradient(ids, (10, 5), seed=rank)
    y = fluxlike.sparse_all_reduce(x, group=group)
    same(y, fluxlike.reference.sparse_all_reduce(x, group=group))
    assert y.indices().tolist() == [[1, 3, 7], [1, 3, 7], [0, 1, 3, 7], [0, 1, 3, 7, 9]][size - 1 : size]
    assert fluxlike.sparse_all_reduce_(x, "avg", group) is x
    assert torch.equal(x.values(), divided(y.values(), size))
    context = world.current().cached[op_file.NAME, world.current().control_of(group).name, 5, x.dtype, x.dtype]
    assert context.last_path == ("owned" if size > 2 else "direct")


def in_inference(group):
    """In place a tensor stays what it is: made in inference mode or not, wherever the call is."""
    made = {}
    for mode in (True, False):
        with torch.inference_mode(mode):
            made[mode] = [gradient([2, 2, 0], (4, 3)) for _ in range(2)]
    right = fluxlike.reference.sparse_all_reduce(made[False][0], group=group)
    for mode, tensors in made.items():
        for where, x in zip((True, False), tensors, strict=True):
            version = 0 if mode else x._version
            with torch.inference_mode(where):
                assert fluxlike.sparse_all_reduce_(x, group=group) is x
            what = f"made in {mode}, called in {where}"
            assert mode or x._version > version, "autograd, which may have saved it, is not told that it was written"
            assert x.is_inference() == x.values().is_inference() == mode, what
            assert "nnz=2" in repr(x), what
            same(x, right, what)


def test_inference_mode():
    run_ranks(in_inference, 2)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_small(ranks):
    run_ranks(small, ranks)


def kinds(group):
    """Dtypes, operations, wires, one and several dimensions of ids and of values."""
    rank = dist.get_rank(group)
    many = [[2, 5, 2, 2, 8], [8, 5], [5, 2, 2, 0, 8]][rank]
    shapes = [((9,), many, 1), ((9, 2, 3), many, 1), ((3, 4, 5), [[i % 3, i % 4] for i in many], 2)]
    for seed, (dtype, (shape, ids, dims)) in enumerate(zip(DTYPES, shapes, strict=True)):
        for op, wire in (("avg", None), ("sum", torch.bfloat16), ("sum", "fp32")):
            x = gradient(ids, shape, dtype, 10 * seed + rank, dims)
            right = fluxlike.reference.sparse_all_reduce(x, op, group, wire_dtype=wire)
            what = f"{dtype} {shape} {op} {wire}"
            same(fluxlike.sparse_all_reduce(x, op, group, wire_dtype=wire), right, what)
            if seed != 1:
                y = fluxlike.sparse_all_reduce(x, op, group, "padded", max_nnz=7, wire_dtype=wire)
                same_padded(y, right, 7 * dist.get_world_size(group), what)


@pytest.mark.parametrize("ranks", [2, 3])
def test_kinds(ranks):
    run_ranks(kinds, ranks)


def hot(group):
    """Ids that come once, up to HOT times, just above it and much more often; hot slots side by side and apart, in blocks of 4."""
    rank, before = dist.get_rank(group), (op_file.SUM_COLUMNS, op_file.SUM_SLOTS)
    op_file.SUM_COLUMNS, op_file.SUM_SLOTS = 32, 4
    try:
        times = [1, op_file.HOT, op_file.HOT + 1, 3 * op_file.HOT + 5, 2, 1, 1, 1, 1, 70 + rank, 1, op_file.HOT + 2]
        ids = torch.arange(len(times)).repeat_interleave(torch.tensor(times))
        ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(rank))].tolist()
        for dtype, width in ((torch.float32, 70), (torch.bfloat16, 3)):
            x = gradient(ids, (12, width), dtype, rank)
            x._values()[ids.index(3)] = -0.0
            same(fluxlike.sparse_all_reduce(x, "avg", group), fluxlike.reference.sparse_all_reduce(x, "avg", group), str(dtype))
        x = gradient([11] * (op_file.HOT + 1), (12, 2))  # minus zero is what sums of it are
        x._values().fill_(-0.0)
        assert torch.signbit(fluxlike.sparse_all_reduce(x, "sum", group).values()).all()
    finally:
        op_file.SUM_COLUMNS, op_file.SUM_SLOTS = before


@pytest.mark.parametrize("ranks", [1, 3])
def test_ids_that_come_often(ranks):
    run_ranks(hot, ranks)


def truth():
    """The reference against a sum that anybody can read."""
    x = torch.sparse_coo_tensor([[4, 1, 4]], [[1.0, 2.0], [4.0, -0.0], [0.5, 8.0]], (6, 2), check_invariants=True)
    ids, rows = fluxlike.reference.sequential_sum(x._indices()[0], x._values())
    assert ids.tolist() == [1, 4] and rows.tolist() == [[4.0, 0.0], [1.5, 10.0]]
    assert torch.signbit(rows[0, 1])


def test_reference():
    truth()


#: Tables of one row, of some, and of more than 32 bits count.
TABLES = st.sampled_from([1, 5, 90, 2**33])
WIDTHS = st.sampled_from([0, 1, 3, 16, 70])


@st.composite
def calls(draw, most):
    """Rows and width of a table, and the ids of each rank; some of them in common, some ranks without any."""
    rows, width = draw(TABLES), draw(WIDTHS)
    ids = st.integers(0, rows - 1) | st.integers(0, min(rows, 6) - 1)
    lists = st.lists(ids, max_size=most) | st.just([])
    return dict(shape=(rows, width) if width else (rows,), ids=draw(st.lists(lists, min_size=4, max_size=4)))


@fine
def any_ids(group, shape, ids, op, seed):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    x = gradient(ids[rank], shape, seed=seed + rank)
    right = fluxlike.reference.sparse_all_reduce(x, op, group)
    y = fluxlike.sparse_all_reduce(x, op, group)
    same(y, right)
    same(fluxlike.sparse_all_reduce(x.coalesce(), op, group), fluxlike.reference.sparse_all_reduce(x.coalesce(), op, group))
    same_padded(fluxlike.sparse_all_reduce(x, op, group, "padded", max_nnz=41), right, 41 * size)
    return y.indices().tolist(), bits(y.values()).tolist()


@settings(max_examples=8, derandomize=True)
@given(call=calls(40), ranks=st.integers(1, 4), op=st.sampled_from(["sum", "avg"]), seed=st.integers(0, 1000))
def test_any_ids(call, ranks, op, seed):
    results = run_ranks(any_ids, ranks, op=op, seed=seed, **call)
    assert all(result == results[0] for result in results)


@fine
def mixed(group, count, jitter=True):
    """Calls back to back, with ids and tables that change, and ranks that are late; repeats have the same bits."""
    rank = dist.get_rank(group)
    previous = programs.configure(programs.Schedule(seed=rank + 1, jitter=0.02, delay=1e-3) if jitter else None)
    try:
        for call in range(count):
            generator = torch.Generator().manual_seed(10 * call + rank)
            entries = int(torch.randint(0, 40, (), generator=generator))
            ids = torch.randint(0, (30, 200)[call % 2], (entries,), generator=generator).tolist()
            x = gradient(ids, (200, (3, 9)[call % 3 // 2]), seed=call)
            mode = dict(mode="padded", max_nnz=64) if call % 4 == 3 else {}
            results = [fluxlike.sparse_all_reduce(x, group=group, **mode) for _ in range(2)]
            assert torch.equal(bits(results[0]._values()), bits(results[1]._values())), call
            right = fluxlike.reference.sparse_all_reduce(x, group=group)
            same_padded(results[0], right, 64 * group.size()) if mode else same(results[0], right, call)
    finally:
        programs.configure(previous)


def test_calls_back_to_back():
    run_ranks(mixed, 3, count=4)


def grows(group):
    """One rank has more ids than there is room for; another has many entries of few ids, for which there is."""
    rank = dist.get_rank(group)
    rows = []
    for entries, distinct in ((5, 5), (70, 70), (300, 90), (7, 7)):
        ids = [i % distinct for i in range(entries)] if rank == 1 else [3, 3]
        x = gradient(ids, (100, 2), seed=rank)
        same(fluxlike.sparse_all_reduce(x, group=group), fluxlike.reference.sparse_all_reduce(x, group=group))
        cached = world.current().cached
        rows.append(cached[op_file.NAME, world.current().control_of(group).name, 2, x.dtype, x.dtype].rows)
    assert rows[1:] == [128, 128, 128] and rows[0] <= 128, rows


def test_growth():
    run_ranks(grows, 2)


def embedding(ids, weight, seed):
    """The gradient of a weighted sum of an embedding's rows."""
    rows = torch.nn.functional.embedding(ids, weight, sparse=True)
    (rows * torch.randn(rows.shape, generator=torch.Generator().manual_seed(seed)).to(device())).sum().backward()
    x, weight.grad = weight.grad, None
    return x


def ahead(group):
    """A context for a table: ids go ahead of the gradient; a forward without backward; what does not fit is told."""
    rank = dist.get_rank(group)
    weight = torch.zeros(50, 4, device=device(), requires_grad=True)
    with fluxlike.create_sparse_all_reduce_context(weight.shape, 12, group=group) as ctx:
        ctx.data.fill_(0xFF)  # NaN where nobody has written
        ctx.check()
        dist.barrier(group)
        for call in range(4):
            ids = torch.randint(0, 50, (3, 4), generator=torch.Generator().manual_seed(10 * call + rank)).to(device())
            ctx.start_indices(ids)
            if call == 1:
                with pytest.raises(ValueError, match="started already"):
                    ctx.start_indices(ids)
                ctx.cancel_indices()
            x = embedding(ids, weight, call)
            right = fluxlike.reference.sparse_all_reduce(x, group=group)
            if call == 2:
                same_padded(fluxlike.sparse_all_reduce(x, group=group, mode="padded", ctx=ctx), right, ctx.size * ctx.rows)
            else:
                same(fluxlike.sparse_all_reduce_(x, group=group, ctx=ctx), right)
            assert ctx._pending is None


def test_ids_ahead():
    run_ranks(ahead, 3)


def checked(group):
    fluxlike.init(heap="shm")
    mixed(group, count=3, jitter=False)
    ahead(group)
    fluxlike.finalize()


@pytest.mark.skipif(TORCHRUN, reason="makes its own ranks")
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_no_race(ranks):
    for outcome in run_fresh(checked, ranks, {"FLUXLIKE_RACECHECK": "1"}, measure="kernels"):
        assert outcome.ok, str(outcome)


def captured(group):
    """mode="padded" without a word from the host, and in a CUDA graph, replayed with other ids."""
    rank = dist.get_rank(group)
    weight = torch.zeros(5000, 64, device=device(), requires_grad=True)
    with fluxlike.create_sparse_all_reduce_context(weight.shape, 300, group=group) as ctx:
        inputs = torch.zeros(300, dtype=torch.int64, device=device())
        values = torch.randn(300, 64, generator=torch.Generator().manual_seed(rank)).to(device())

        def call():
            ctx.start_indices(inputs)
            x = torch.sparse_coo_tensor(inputs[None], values, weight.shape, check_invariants=False)
            return fluxlike.sparse_all_reduce(x, "avg", group, "padded", ctx=ctx)

        call()  # compiles
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = call()
        for seed in range(3):
            inputs.copy_(torch.randint(0, 5000, (300,), generator=torch.Generator().manual_seed(10 * seed + rank)))
            values.add_(1)
            graph.replay()
            ctx.check()
            x = torch.sparse_coo_tensor(inputs[None], values, weight.shape)
            same_padded(y, fluxlike.reference.sparse_all_reduce(x, "avg", group), ctx.size * ctx.rows, seed)


@pytest.mark.gpu
def test_padded_waits_for_nothing():
    run_ranks(captured, 2)


@fine
def scatters(group):
    """Rows of a table that are split evenly, unevenly, and so that the last ranks have none."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for seed, shape in enumerate([(12, 3), (13,), (2, 3)]):
        ids = torch.randint(0, shape[0], (9 * (rank != 1),), generator=torch.Generator().manual_seed(10 * seed + rank)).tolist()
        x = gradient(ids, shape, seed=seed + rank)
        whole = fluxlike.reference.sparse_all_reduce(x, "avg", group)
        rows = rows_slice(shape[0], size, rank)
        mine = (whole.indices()[0] >= rows.start) & (whole.indices()[0] < rows.stop)
        y = fluxlike.sparse_reduce_scatter(x, "avg", group)
        assert y.is_coalesced() and y.shape == (rows.stop - rows.start, *shape[1:])
        assert torch.equal(y.indices() + rows.start, whole.indices()[:, mine])
        assert torch.equal(bits(y.values()), bits(whole.values()[mine]))
        z = fluxlike.sparse_reduce_scatter(x, "avg", group, "padded", max_nnz=10)
        assert torch.equal(z.to_dense(), y.to_dense()) and z._nnz() == (10 * size if y.shape[0] else 0)
    assert world.current().cached[op_file.NAME, world.current().control_of(group).name, 3, x.dtype, x.dtype].last_path == "scatter"
    with pytest.raises(ValueError, match="sparse_dim=2; it must be 1"):
        fluxlike.sparse_reduce_scatter(torch.zeros(2, 2, device=device()).to_sparse(), group=group)


@pytest.mark.parametrize("ranks", [2, 3])
def test_reduce_scatter(ranks):
    run_ranks(scatters, ranks)

"""all_reduce: algorithms, operations, dtypes, sizes, places, lists, bit by bit against sums in the order of the ranks; faults."""

import re
import warnings
import zlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from faults import told
from ranks import LARGE_WORLDS, TORCHRUN, device, divided, run_fresh, run_ranks

import fluxlike
from fluxlike.ops import all_reduce as ops
from fluxlike.ops import exchange, lists
from fluxlike.ops.all_reduce import ALGORITHMS
from fluxlike.ops.exchange import WORDS
from fluxlike.runtime import dry, programs, world

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def numbers(size, dtype, seed):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device())


def expected(parts, op="sum"):
    """In fp32, in the order of the ranks, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = torch.maximum(total, part.float()) if op == "max" else total + part.float()
    return (divided(total, len(parts)) if op == "avg" else total).to(parts[0].dtype)


def context(group):
    return world.current().cached["all_reduce", world.current().control_of(group).name]


def numbers_of_all(group, sizes, dtype, seed):
    """What each rank has: a list of tensors for each."""
    return [[numbers(n, dtype, seed + 10 * r + i) for i, n in enumerate(sizes)] for r in range(dist.get_world_size(group))]


def reduces(group, dtype, algo, sizes):
    rank = dist.get_rank(group)
    for seed, n in enumerate(sizes):
        for op in ops.OPS:
            (parts,) = zip(*numbers_of_all(group, [n], dtype, 100 * seed), strict=True)
            y = fluxlike.all_reduce(parts[rank], group, op, algo)
            assert torch.equal(y, expected(parts, op)), f"{n} {op}"
            assert context(group).last_path == algo


@pytest.mark.parametrize("algo", ALGORITHMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("ranks", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow), *LARGE_WORLDS])
def test_sizes(ranks, dtype, algo):
    block = 4 // dtype.itemsize * WORDS if algo != "bulk" else exchange.BULK // dtype.itemsize
    run_ranks(reduces, ranks, dtype=dtype, algo=algo, sizes=(1, 3, block, 2 * block + 1))


def of_lists(group, algo):
    rank = dist.get_rank(group)
    sizes = (5, 0, 2 * WORDS, 1, 2 * WORDS + 7)
    for dtype in DTYPES[:2]:
        for seed, some in enumerate((sizes, sizes[:2], (8, 16), sizes)):
            given = numbers_of_all(group, some, dtype, 1000 * seed)
            before = context(group).stats["launches"] if seed else 0
            ys = fluxlike.all_reduce(given[rank], group, "sum", algo)
            assert not seed or context(group).stats["launches"] == before + 1
            for i, y in enumerate(ys):
                assert torch.equal(y, expected([tensors[i] for tensors in given])), f"{dtype} {some} {i}"
            assert fluxlike.all_reduce_(given[rank], group, algo=algo) is given[rank]
            assert all(torch.equal(x, y) for x, y in zip(given[rank], ys, strict=True))


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_lists(algo):
    run_ranks(of_lists, 3, algo=algo)


def places(group, algo):
    """Tensors that begin anywhere, that are not contiguous, that hold what is no number; in place."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for dtype in DTYPES:
        for offset in (0, 1, 3):
            parts = [numbers(700, dtype, 5 * offset + r) for r in range(size)]
            x = torch.zeros(710, dtype=dtype, device=device())
            x[offset : offset + 700] = parts[rank]
            assert torch.equal(fluxlike.all_reduce(x[offset : offset + 700], group, algo=algo), expected(parts))
            fluxlike.all_reduce_(x[offset : offset + 700], group, algo=algo)
            assert torch.equal(x[offset : offset + 700], expected(parts))
            assert not x[:offset].any() and not x[offset + 700 :].any()
        parts = [numbers(24, dtype, r).view(4, 6) for r in range(size)]
        y = fluxlike.all_reduce(parts[rank].T, group, algo=algo)
        assert y.is_contiguous() and torch.equal(y, expected(parts).T)
        odd = torch.tensor([[1.0, torch.inf], [torch.nan, -torch.inf], [torch.nan, 2.0]][rank % 3], dtype=dtype, device=device())
        if size == 2:
            assert torch.equal(fluxlike.all_reduce(odd, group, "max", algo).isnan(), torch.tensor([True, False]).to(device()))
            assert fluxlike.all_reduce(odd, group, "sum", algo).isnan().all()
        none = torch.full((8,), -1, dtype=torch.int16, device=device()).view(dtype)  # NaN, of the bits of a word that has not come
        got = fluxlike.all_reduce(none, group, "max", algo)
        bits = fluxlike.all_gather(got.view(torch.int16)[None], group)
        assert got.isnan().all() and torch.equal(bits, bits[:1].expand_as(bits))
    assert fluxlike.all_reduce(torch.zeros(3, 0, device=device()), group).shape == (3, 0)


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_places(algo):
    run_ranks(places, 2, algo=algo)


def in_and_out_of_inference_mode(group):
    """What a context keeps for lists is made in one mode and written to in another."""
    size, alive = dist.get_world_size(group), []
    for n, first in ((3, True), (4, False)):
        for mode in (first, not first, first):
            with torch.inference_mode(mode):
                xs = [torch.full((n * i,), float(i), device=device()) for i in (1, 2)]
                ys = fluxlike.all_reduce(xs, group)
            alive += xs  # so that the next ones lie elsewhere
            assert all(y.eq(size * i).all() for i, y in enumerate(ys, 1)), (n, mode)


def test_lists_in_and_out_of_inference_mode():
    run_ranks(in_and_out_of_inference_mode, 2)


def mixed(group, calls, jitter=False):
    """Algorithms and sizes change from call to call, so that words of one meet those of another."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    previous = programs.configure(programs.Schedule(seed=rank + 1, jitter=0.05, delay=2e-3) if jitter else None)
    exchange.SET, usual = 8 << 10, exchange.SET
    try:
        for call in range(calls):
            n, algo = (3000, 20, 5000, 1)[call % 4], ALGORITHMS[call // 2 % 3]
            parts = [numbers(n, torch.bfloat16, 7 * call + r) for r in range(size)]
            assert torch.equal(fluxlike.all_reduce(parts[rank], group, algo=algo), expected(parts)), call
    finally:
        exchange.SET = usual
        programs.configure(previous)


@pytest.mark.parametrize("jitter", [False, True], ids=["", "jitter"])
def test_calls_back_to_back(jitter):
    run_ranks(mixed, 3, calls=18, jitter=jitter)


def refusals(group):
    x = torch.zeros(4, device=device())
    for wrong, says in (
        (lambda: fluxlike.all_reduce(x, group, "prod"), "'prod' is not one of 'sum', 'avg', 'max'"),
        (lambda: fluxlike.all_reduce(x, group, algo="ring"), "'ring' is not one of 'auto', 'one_shot', 'two_shot', 'bulk'"),
        (lambda: fluxlike.all_reduce([x, x.half()], group), "reduce tensors of one dtype at a time"),
        (lambda: fluxlike.all_reduce([1.0], group), "all_reduce: x[0] is float, it must be a tensor"),
        (lambda: fluxlike.all_reduce_([x, x.int()], group), "all_reduce_: x[1] has dtype torch.int32, it must be bfloat16"),
        (lambda: fluxlike.all_reduce_([x, None], group), "all_reduce_: x[1] is None; leave out parameters without a gradient"),
        (lambda: fluxlike.all_reduce_(x, group, "prod"), "all_reduce_: op='prod' is not one of"),
        (lambda: fluxlike.all_reduce_(torch.zeros(4, 4, device=device()).T, group), "must be contiguous, or use all_reduce"),
        (lambda: fluxlike.all_reduce_(x[:1].expand(4), group), "x has strides (0,); it must be contiguous, or use all_reduce"),
        (lambda: fluxlike.all_reduce_([x, x], group), "x[0] and x[1] overlap in memory (x[1] begins 0 bytes behind"),
        (lambda: fluxlike.all_reduce_([x[2:], x[:0], x[:3]], group), "x[2] and x[0] overlap in memory (x[0] begins 8 bytes"),
        (lambda: fluxlike.all_reduce_([x[:2], x.view(2, 2)[:1]], group), "name memory once, or use all_reduce"),
    ):
        said, _ = told(wrong, ValueError)
        assert says in said, said
    if device().type == "cpu":  # a buffer that others have filled, from an odd byte on
        odd = torch.frombuffer(bytearray(40), dtype=torch.float32, offset=5, count=8)
        weight = torch.zeros(2, 4)
        for act in (
            lambda: fluxlike.all_reduce([odd, x], group), lambda: fluxlike.all_reduce_([x, odd], group),
            lambda: fluxlike.broadcast(odd, 0, group), lambda: fluxlike.gemm_ar(odd.view(2, 4), weight, group=group),
        ):  # fmt: skip
            said, _ = told(act, ValueError)
            assert re.search(r"no multiple of the 4 bytes of its elements; use x(\[[01]\])?\.clone\(\)", said), said
        assert torch.equal(fluxlike.all_gather(odd.view(torch.uint8), group).view(torch.float32), torch.zeros(16))
    size = float(dist.get_world_size(group))
    assert torch.equal(fluxlike.all_reduce(x + 1, group), torch.full_like(x, size))
    for named, value in ((dist.ReduceOp.SUM, size), (dist.ReduceOp.AVG, 1.0), (dist.ReduceOp.MAX, 1.0)):
        for y in (fluxlike.all_reduce(x + 1, group, named), fluxlike.all_reduce_(x + 1, group, op=named)):
            assert y.eq(value).all(), (named, y)
        assert fluxlike.reduce_scatter(x + 1, group, named).eq(value).all()
    sparse = fluxlike.sparse_all_reduce((x + 1).to_sparse(), dist.ReduceOp.AVG, group)
    assert torch.equal(sparse.to_dense(), x + 1)
    said, _ = told(lambda: fluxlike.all_reduce(x, group, dist.ReduceOp.PRODUCT), ValueError)
    assert "PRODUCT" in said and "is not one of 'sum', 'avg', 'max'" in said, said
    fluxlike.all_reduce_([x[3:].fill_(1), x[3:3], x[:2].fill_(2)], group)  # parts of one memory, side by side and apart
    assert x.tolist() == [2 * size, 2 * size, 0, size]


def test_bad_calls():
    run_ranks(refusals, 2)


def ones(*sizes):
    return [torch.ones(n) for n in sizes]


MANY = tuple(range(1, 60))


def long(end):
    """What a board has of a text that it does not hold; said in front of a call that waits."""
    return f"xxx..{zlib.crc32(('x' * 200 + end).encode()):08x}"


def say(end):
    world.current().control.board.call("x" * 200 + end)
    fluxlike.all_reduce(torch.ones(1))


#: What differs, as rank 0 has it and as rank 1 does: the call, and words of both messages.
DIFFERENT = (
    (lambda: fluxlike.all_reduce(torch.ones(8)), "elements=8", lambda: fluxlike.all_reduce(torch.ones(9)), "elements=9"),
    (lambda: fluxlike.all_reduce(ones(3, 5)), "sizes=3+5", lambda: fluxlike.all_reduce(ones(5, 3)), "sizes=5+3"),
    (lambda: fluxlike.all_reduce(ones(*MANY)), "sizes=1+2+3", lambda: fluxlike.all_reduce(ones(*MANY[::-1])), "sizes=59+58+57"),
    (lambda: fluxlike.all_reduce(torch.ones(8), op="avg"), "op=avg", lambda: fluxlike.all_reduce(torch.ones(8)), "op=sum"),
    (lambda: fluxlike.all_reduce_(torch.ones(8)), "float32", lambda: fluxlike.all_reduce_(torch.ones(8).half()), "float16"),
    *((lambda one=one: fluxlike.all_reduce(torch.ones(8), algo=one), f"algo={one}",
       lambda other=other: fluxlike.all_reduce(torch.ones(8), algo=other), f"algo={other}")
      for one, other in (("one_shot", "two_shot"), ("bulk", "auto"), ("trees", "one_shot"))),
    *((lambda act=act: act("words"), "algo=words", lambda act=act: act("bulk"), "algo=bulk") for act in (
        lambda algo: fluxlike.reduce_scatter(torch.ones(8), algo=algo), lambda algo: fluxlike.all_gather(torch.ones(8), algo=algo),
        lambda algo: fluxlike.reduce(torch.ones(8), 0, algo=algo), lambda algo: fluxlike.broadcast(torch.ones(8), 0, algo=algo),
    )),
    (lambda: say("a"), long("a"), lambda: say("b"), long("b")),
    (lambda: fluxlike.reduce(torch.ones(8), 0, op="max"), "op=max", lambda: fluxlike.reduce(torch.ones(8), 0), "op=sum"),
)  # fmt: skip


def differ(group):
    """Each difference once both ranks have all that they need, and of algorithms also on the first call, when memory is made."""
    fluxlike.init(heap="shm")
    for number, (one, here, other, there) in enumerate(DIFFERENT):
        for known in (True, False)[: 1 + ("algo" in here)]:
            for act in (one, other) if known else ():
                act()
            act = other if group.rank() else one
            said, seconds = told(lambda act=act: [act() for _ in range(4)], ValueError)  # who only sends may be two calls ahead
            assert here in said and there in said and seconds < 30, f"{number} {known}: {said} after {seconds}"
            assert said.startswith("CallMismatch") or not known, said
            told(lambda: fluxlike.create_gemm_ar_context(8, 8).close(), ValueError)  # where the ranks meet again
            for key in [key for key, ctx in world.current().cached.items() if ctx.op != "gemm_ar"]:
                world.current().cached.pop(key).close()


def test_ranks_that_make_different_calls():
    for outcome in run_fresh(differ, 2, {"FLUXLIKE_TIMEOUT_S": "60", "FLUXLIKE_TOPOLOGY": "nvswitch-2"}, timeout=240):
        assert outcome.ok, str(outcome)


def lonely(group):
    fluxlike.init(heap="shm")
    fluxlike.all_reduce(torch.ones(8), group)
    if group.rank() != 1:
        fluxlike.all_reduce(torch.ones(8), group)


def test_a_rank_that_does_not_come():
    outcomes = run_fresh(lonely, 3, {"FLUXLIKE_TIMEOUT_S": "2"}, grace=10)
    late = [outcomes[0], outcomes[2]]
    assert all(outcome.error == "PeerTimeout" for outcome in late), list(map(str, outcomes))
    assert any("waited 2 s for rank 1: its partial sums of call 2 (expected 1, saw 0)" in outcome.message for outcome in late)


def checked(group):
    fluxlike.init(heap="shm")
    mixed(group, 6)
    fluxlike.finalize()


@pytest.mark.skipif(TORCHRUN, reason="makes its own ranks")
def test_no_race():
    for outcome in run_fresh(checked, 3, {"FLUXLIKE_RACECHECK": "1"}, measure="kernels"):
        assert outcome.ok, str(outcome)


@pytest.mark.parametrize(
    ("ranks", "nbytes", "algo"),
    [
        (2, 1 << 18, "one_shot"), (4, 1 << 18, "one_shot"), (8, 1 << 14, "one_shot"),
        (4, 1 << 19, "two_shot"), (8, 1 << 18, "two_shot"), (4, 1 << 25, "two_shot"),
        (2, 1 << 21, "one_shot"), (2, 1 << 22, "two_shot"),
    ],
)  # fmt: skip
def test_choice(ranks, nbytes, algo):
    """Everything to everybody where a trip costs more than bytes."""
    assert ops.choose(nbytes, ranks) == algo


def versions(group):
    """Autograd learns of each call in place that something was written, also of one that comes again."""
    for x in (numbers(8, torch.float32, 1), [numbers(8, torch.float32, 2), numbers(3, torch.float32, 3)]):
        first = x if isinstance(x, torch.Tensor) else x[0]
        for _ in range(4):
            before = first._version
            fluxlike.all_reduce_(x, group)
            assert first._version > before


def test_calls_in_place_count_as_changes():
    run_ranks(versions, 2)


def test_lists_are_cut_into_launches():
    spans = lists.cut([3, 10, 1], 4, 16, 4)
    assert spans == [(0, 0, 0, 3), (1, 1, 0, 4), (1, 1, 4, 8), (1, 2, 8, 1)]
    x, y, z = torch.arange(3), torch.arange(10), torch.arange(1)
    pieces = [[piece.tolist() for piece in span.of([x, y, z])] for span in spans]
    assert pieces == [[[0, 1, 2]], [[0, 1, 2, 3]], [[4, 5, 6, 7]], [[8, 9], [0]]]
    assert [span.places([100, 200, 300], 4) for span in spans] == [[100], [200], [216], [232, 300]]


def test_a_table_that_a_graph_fills_is_filled_anew_by_each_eager_call():
    filled, capturing = [], [False]
    executor = SimpleNamespace(is_capturing=lambda: capturing[0], in_use=lambda t: None)
    executor.fill = lambda words, given: filled.append(given)
    table = lists.Table(executor, torch.zeros(3, dtype=torch.int64), [7], [])
    for addresses, captured in (([1, 2], 0), ([1, 2], 0), ([3, 4], 0), ([3, 4], 1), ([3, 4], 0), ([3, 4], 0)):
        capturing[0] = bool(captured)
        table.set(addresses)
    assert filled == [[1, 2, 7], *[[3, 4]] * 4]


def test_a_small_tensor_counts_as_the_block_that_it_takes():
    """Of memory, and of what is sent."""
    most = ops.most_bytes(2, "two_shot")
    spans = lists.cut([1] * 10000, 4, most, exchange.BULK)
    assert [span.first for span in spans] == [0, spans[0].last + 1] and spans[-1].last == 9999
    for span in spans:
        for algo, block in (("one_shot", 4 * exchange.WORDS), ("two_shot", 4 * exchange.WORDS), ("bulk", exchange.BULK)):
            blocks = ops.blocks_of([1] * (span.last - span.first + 1), algo, torch.float32, 1)
            assert blocks * block <= most
    with dry.recording((9, 0), 8) as records:
        small = dry.tensor((16,), torch.float32)
        fluxlike.all_reduce([small] * 1000)  # 64 KB, for which one_shot would send 2 MB to each of seven
        fluxlike.all_reduce(dry.tensor((16 << 10,), torch.float32))
        assert [record.kernel.fn.__name__ for record in records] == ["exchange_words_kernel", "all_reduce_one_shot_kernel"]


def past_gradients(group):
    """A result that gradients do not come through is told of, also one that is written in place; nothing else is."""
    x = torch.ones(4, device=device(), requires_grad=True)
    with pytest.warns(UserWarning, match="fluxlike.all_reduce makes no gradients, and x wants one, which does not come through"):
        assert not fluxlike.all_reduce(x, group).requires_grad
    for make in (lambda: x * 2, lambda: [x.detach(), x * 2]):
        with pytest.warns(UserWarning, match="fluxlike.all_reduce_ makes no gradients, and x wants one, which goes past the call"):
            fluxlike.all_reduce_(make(), group)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fluxlike.all_reduce_([x, x.detach() * 2], group)
        fluxlike.all_reduce_((x * 2).detach(), group)
        with torch.no_grad():
            fluxlike.all_reduce_(x * 2, group)


def test_gradients_that_go_past_a_call_are_told_of():
    run_ranks(past_gradients, 2)

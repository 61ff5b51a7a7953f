"""reduce_scatter, all_gather, reduce, broadcast: dtypes, sizes, places, roots, many calls; bit by bit; faults."""

import re

import pytest
import test_trees
import torch
import torch.distributed as dist
from faults import told
from ranks import LARGE_WORLDS, LARGEST, TORCHRUN, device, divided, rows_slice, run_fresh, run_ranks

import fluxlike
from fluxlike.ops import collectives, exchange, keeping
from fluxlike.ops.collectives import ALGORITHMS, BROADCAST, REDUCE, ROOTED
from fluxlike.runtime import programs, world

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Of which a word holds a part, one, or which take several.
ANY = (torch.uint8, torch.bfloat16, torch.complex64)


def numbers(shape, dtype, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device())


def of_all(group, shape, dtype, seed):
    return [numbers(shape, dtype, seed + 10 * rank) for rank in range(dist.get_world_size(group))]


def expected(parts, op="sum"):
    """In fp32, in the order of the ranks, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = torch.maximum(total, part.float()) if op == "max" else total + part.float()
    return (divided(total, len(parts)) if op == "avg" else total).to(parts[0].dtype)


def context(name, group):
    return world.current().cached[name, world.current().control_of(group).name]


def reduces(group, dtype, algo):
    """Rows that divide evenly, that do not, fewer than ranks, none; of one element and of several blocks in all parts."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    block = exchange.block(algo, dtype.itemsize)
    for seed, shape in enumerate([(size, 3), (2 * size + 1, 5), (1,), (0, 4), (3 * size - 1, block // 2 + 3)]):
        for op in exchange.OPS if seed < 3 else ("sum",):
            parts = of_all(group, shape, dtype, 100 * seed)
            right = expected(parts, op)
            if algo in ALGORITHMS:
                y = fluxlike.reduce_scatter(parts[rank], group, op, algo)
                assert torch.equal(y, right[rows_slice(shape[0], size, rank)]), f"{shape} {op}"
                assert y.is_contiguous() and context("reduce_scatter", group).last_path == algo
            root = (seed + 1) % size
            y = fluxlike.reduce(parts[rank], root, group, op, algo)
            assert torch.equal(y, right) if rank == root else y is None, f"{shape} {op} at {root}"
            assert size == 1 or context("reduce", group).last_path == algo


def gathers(group, dtype, algo):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    block = exchange.block(algo, dtype.itemsize)
    for seed, shape in enumerate([(size, 3), (2 * size + 1, 5), (1,), (0, 4), (3 * size - 1, block // 2 + 3)]):
        whole = (10 * numbers(shape, torch.float32, seed)).to(dtype)
        mine = whole[rows_slice(shape[0], size, rank)]
        if algo in ALGORITHMS:
            assert torch.equal(fluxlike.all_gather(mine, group, shape[0], algo), whole), f"{shape}"
            if shape[0] % size == 0:
                assert torch.equal(fluxlike.all_gather(mine, group, algo=algo), whole), f"{shape}"
            assert not seed or context("all_gather", group).last_path == algo
        root = (seed + 1) % size
        y = fluxlike.broadcast(whole if rank == root else torch.zeros_like(whole), root, group, algo)
        assert torch.equal(y, whole), f"{shape} from {root}"


@pytest.mark.parametrize("algo", ROOTED)
@pytest.mark.parametrize("ranks", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow), *LARGE_WORLDS])
def test_sizes(ranks, algo):
    for dtype in DTYPES if ranks == 2 else DTYPES[1:2]:
        run_ranks(reduces, ranks, dtype=dtype, algo=algo)
    for dtype in DTYPES if algo != "bulk" else ANY if ranks == 2 else ANY[::2]:
        run_ranks(gathers, ranks, dtype=dtype, algo=algo)


def places(group, algo):
    """Tensors that begin anywhere, that are not contiguous, with what is no number."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for dtype in (torch.float32, torch.bfloat16) + (torch.uint8,) * (algo == "bulk"):
        for offset in (1, 3):
            parts = [(10 * numbers(700, torch.float32, offset + r)).to(dtype) for r in range(size)]
            x = torch.zeros(710, dtype=dtype, device=device())
            x[offset * rank : offset * rank + 700] = parts[rank]
            x = x[offset * rank : offset * rank + 700]
            assert torch.equal(fluxlike.broadcast(x, 1, group, algo=algo), parts[1])
            if algo in ALGORITHMS:
                assert torch.equal(fluxlike.all_gather(x, group, algo=algo), torch.cat(parts))
            if dtype.is_floating_point:
                rows = rows_slice(700, size, rank)
                if algo in ALGORITHMS:
                    assert torch.equal(fluxlike.reduce_scatter(x, group, algo=algo), expected(parts)[rows])
                y = fluxlike.reduce(x, 0, group, algo=algo)
                assert rank or torch.equal(y, expected(parts))
    parts = of_all(group, (4, 6), torch.bfloat16, 0)
    assert torch.equal(fluxlike.broadcast(parts[rank].T, 1, group, algo), parts[1].T)
    if algo in ALGORITHMS:
        assert torch.equal(fluxlike.reduce_scatter(parts[rank].T, group, algo=algo), expected(parts).T[rows_slice(6, size, rank)])
        assert torch.equal(fluxlike.all_gather(parts[rank].T, group, algo=algo), torch.cat([part.T for part in parts]))
    strange = torch.tensor([0x7FC1, 0xFFFF, 0x8000, 0x7F80, 0xFFFF, 0xFFFF], dtype=torch.uint16).view(torch.bfloat16).to(device())
    gathered = fluxlike.all_gather(strange, group, algo=algo).chunk(size) if algo in ALGORITHMS else ()
    for got in (fluxlike.broadcast(strange, 0, group, algo), *gathered):
        same = got.view(torch.int16) == strange.view(torch.int16)
        assert same[:4].all()  # every bit of what is no number
        # but for these, which as a word say that there is none
        assert got[4:].isnan().all() and bool(same[4:].all()) == (algo == "bulk")


def roots(group):
    """The flags of a block, by the rank that writes them, after broadcasts of two roots."""
    for root in (0, 1, 0, 1, 1):
        fluxlike.broadcast(torch.ones(5, device=device()), root, group, "bulk")
    ctx = context("broadcast", group)
    ctx.check()
    return ctx.flags.view(dist.get_world_size(group), -1)[:, 0].tolist()


def test_no_two_roots_write_one_flag():
    """The flag of one could come behind that of the next, and set it back: stores to two ranks are in no order."""
    counts = run_ranks(roots, 3)
    last = max(map(max, counts))
    assert counts[0][1] == counts[2][1] == last and counts[1][0] == counts[2][0] == last - 2


@pytest.mark.parametrize("algo", ROOTED)
def test_places(algo):
    run_ranks(places, 3 if algo == "two_shot" and LARGEST > 2 else 2, algo=algo)


def mixed(group, calls, jitter=False):
    """Operations, algorithms, roots and sizes change from call to call; large ones go in several launches."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    previous = programs.configure(programs.Schedule(seed=rank + 1, jitter=0.05, delay=2e-3) if jitter else None)
    exchange.SET, usual = 4 << 10, exchange.SET
    try:
        for call in range(calls):
            n, algo, root = (3000, 20, 5001, 1)[call % 4], ALGORITHMS[call % 3 // 2], call % size
            rooted = ("words", "two_shot", "bulk", "two_shot")[call % 4]
            parts = of_all(group, n, torch.bfloat16, 7 * call)
            whole, rows = expected(parts), rows_slice(n, size, rank)
            assert torch.equal(fluxlike.broadcast(parts[rank], root, group, rooted), parts[root]), call
            assert torch.equal(fluxlike.reduce_scatter(parts[rank], group, "sum", algo), whole[rows]), call
            y = fluxlike.reduce(parts[rank], root, group, "sum", rooted)
            assert torch.equal(y, whole) if rank == root else y is None, call
            assert torch.equal(fluxlike.all_gather(whole[rows], group, n, algo), whole), call
        ctx = context("reduce", group)
        assert ctx.stats["launches"] == ctx.stats["calls"] > calls
    finally:
        exchange.SET = usual
        programs.configure(previous)


def test_calls_back_to_back():
    run_ranks(mixed, 3, calls=9, jitter=True)


@pytest.mark.parametrize("op", (REDUCE, BROADCAST))
@pytest.mark.parametrize("ranks", (2, 3, 4, 8))
@pytest.mark.parametrize("size", (1, 511, 512 * 21 + 5, 1 << 20, 40 << 20))
def test_pieces_of_two_trips(op, ranks, size, monkeypatch):
    """Every element is in one part of one launch, whose rows fit into a set, of the memory that its context is asked for."""
    monkeypatch.setattr(exchange, "SET", 64 << (10 if size < 1 << 20 else 20))
    seen, block = 0, exchange.block("two_shot", 2)
    for start, parts in exchange.pieces(op, size, 0, size, "two_shot", 2, ranks):
        assert start == seen and start % block == 0 and parts.chunk == parts.width == parts.blocks * block
        assert parts.chunk * (ranks - 1) >= parts.n > 0
        seen += parts.n
        room = exchange.blocks_of_row(op, "two_shot", parts.blocks, ranks) * op.rows(ranks, "two_shot")
        assert (ranks - 1) * parts.blocks <= room <= exchange.SET // (4 * exchange.WORDS)
    assert seen == size


@pytest.mark.parametrize("kind", (REDUCE, BROADCAST))
def test_auto_takes_two_trips_where_bytes_cost_more(kind):
    for ranks in (3, 4, 8):
        chosen = [collectives._chosen(kind, 1 << power, ranks) for power in range(10, 31)]
        assert chosen == sorted(chosen, reverse=True) and {chosen[0], chosen[-1]} == {"words", "two_shot"}
    assert collectives._chosen(kind, 1 << 30, 2) == "words", "with nobody to pass it on the other trip gains nothing"
    assert collectives._chosen(collectives.ALL_GATHER, 1 << 30, 8) == "words"


#: Medians in µs, of 16 KB, 1 and 16 MB in one trip and of 1, 4 and 16 MB in two on four H100s (docs/measured/2026-11-26-relay.md).
@pytest.mark.parametrize(
    "kind, one, two", ((REDUCE, (5.7, 9.0, 134), (13.9, 26.1, 69.0)), (BROADCAST, (6.6, 15.4, 147), (11.5, 18.4, 56.6)))
)
def test_what_a_root_s_call_is_expected_to_take(kind, one, two):
    assert [1e6 * exchange.rooted_seconds(kind, n, 4) for n in (16 << 10, 1 << 20, 16 << 20)] == pytest.approx(one, rel=0.2)
    assert [1e6 * exchange.relay_seconds(kind, n << 20) for n in (1, 4, 16)] == pytest.approx(two, rel=0.15)


#: Of the sizes there, those at which two trips took less.
@pytest.mark.parametrize("kind, least", ((REDUCE, 4 << 20), (BROADCAST, 512 << 10)))
def test_auto_takes_what_was_faster(kind, least):
    for nbytes in (1 << power for power in (14, 16, 18, 19, 20, 21, 22, 23, 24, 26, 28)):
        assert collectives._chosen(kind, nbytes, 4) == ("two_shot" if nbytes >= least else "words"), nbytes


def chosen_by_auto(group):
    """Of one element, and of 80 KB where bytes cost a hundred times as much as they do."""
    x = torch.ones(40_000, device=device(), dtype=torch.bfloat16)
    size, paths, usual = dist.get_world_size(group), [], (exchange.WORD_RATE, exchange.ROOT_RATE)
    exchange.WORD_RATE, exchange.ROOT_RATE = (rate / 100 for rate in usual)
    try:
        for n in (1, len(x)):
            y, z = fluxlike.reduce(x[:n], 0, group), fluxlike.broadcast(x[:n], size - 1, group)
            assert torch.equal(z, x[:n]) and (y is None or torch.equal(y, size * x[:n]))
            paths += [context(op, group).last_path for op in ("reduce", "broadcast")]
    finally:
        exchange.WORD_RATE, exchange.ROOT_RATE = usual
    return paths


@pytest.mark.skipif(LARGEST < 3, reason="two ranks have nobody to pass it on")
def test_auto_of_reduce_and_broadcast():
    assert run_ranks(chosen_by_auto, 3)[0] == ["words", "words", "two_shot", "two_shot"]


def refusals(group):
    x = torch.zeros(4, 2, device=device())
    rank = dist.get_rank(group)
    for wrong, says in (
        (lambda: fluxlike.reduce_scatter(x, group, "prod"), "reduce_scatter: op='prod' is not one of 'sum', 'avg', 'max'"),
        (lambda: fluxlike.reduce_scatter(x, group, ["sum"]), "reduce_scatter: op=['sum'] is not one of 'sum', 'avg', 'max'"),
        (lambda: fluxlike.all_gather(x.int(), group, algo="words"), "all_gather: algo='words' is for bfloat16, float16"),
        (lambda: fluxlike.all_gather(x, group, algo="two_shot"), "algo='two_shot' is not one of 'auto', 'words', 'bulk'"),
        (lambda: fluxlike.reduce(x, 0, group, algo="ring"), "algo='ring' is not one of 'auto', 'words', 'two_shot', 'bulk'"),
        (lambda: fluxlike.broadcast(x.int(), 0, group, "two_shot"), "broadcast: algo='two_shot' is for bfloat16, float16"),
        (lambda: fluxlike.broadcast(x, 2, group), "broadcast: root=2 is no rank of the group"),
        (lambda: fluxlike.reduce(x, True, group), "reduce: root=True is no rank of the group"),
        (lambda: fluxlike.all_gather(x, group, 6 + 4 * rank), "4 rows, which are not those of rank"),
        (lambda: fluxlike.all_gather(x, group, -1), "m=-1 rows"),
        (lambda: fluxlike.reduce_scatter(x[0, 0], group), "no dimensions"),
        (lambda: fluxlike.all_gather(x.to(torch.complex64).conj(), group), "use x.resolve_conj()"),
    ):
        said, _ = told(wrong, ValueError)
        assert says in said, said
    assert torch.equal(fluxlike.broadcast(x + rank, 1, group), torch.ones_like(x))


def test_bad_calls():
    run_ranks(refusals, 2)


#: What no operation of the family takes, what those that add up do not, and what the message says; made of a float32 matrix.
NEVER = (
    (lambda x: None, "x is NoneType, it must be a tensor; use torch.tensor"),
    (lambda x: x.cpu().numpy(), "x is ndarray, it must be a tensor; use torch.tensor"),
    (lambda x: x.to("meta"), "x is on meta, this rank's heap is on"),
    (lambda x: x.to_sparse(), "x has layout torch.sparse_coo, it must be dense (torch.strided); use x.to_dense()"),
    (lambda x: x.to_sparse_csr(), "x has layout torch.sparse_csr, it must be dense (torch.strided); use x.to_dense()"),
    (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "x is a quantized tensor (torch.qint8)"),
    (lambda x: torch.nested.nested_tensor([x, x[:1]]), "x is a nested tensor (torch.float32)"),
    (lambda x: torch._neg_view(x), "use x.resolve_neg()"),
)
NOT_ADDED = (
    *((lambda x, dtype=dtype: x.to(dtype), f"x has dtype {dtype}, it must be bfloat16, float16 or float32; use x.to(torch.float32)")
      for dtype in (torch.bool, torch.int32, torch.uint8, torch.int64, torch.float64)),
    (lambda x: x.to(torch.complex64), "x has dtype torch.complex64, it must be bfloat16, float16 or float32; use torch.view_as"),
)  # fmt: skip
FAMILY = {
    "all_reduce": lambda x, group: fluxlike.all_reduce(x, group),
    "all_reduce of a list": lambda x, group: fluxlike.all_reduce([x], group),
    "all_reduce in place": lambda x, group: fluxlike.all_reduce_(x, group),
    "reduce_scatter": lambda x, group: fluxlike.reduce_scatter(x, group),
    "all_gather": lambda x, group: fluxlike.all_gather(x, group),
    "reduce": lambda x, group: fluxlike.reduce(x, 0, group),
    "broadcast": lambda x, group: fluxlike.broadcast(x, 0, group),
    "gemm_ar": lambda x, group: fluxlike.gemm_ar(x, torch.ones(2, 4, device=device()), group=group),
}


def bad_tensors(group):
    for name, act in FAMILY.items():
        for number, (broken, says) in enumerate(NEVER + (() if name in ("all_gather", "broadcast") else NOT_ADDED)):
            said, _ = told(lambda: act(broken(torch.ones(4, 4, device=device())), group), ValueError, TypeError)  # noqa: B023
            if name == "gemm_ar":  # whose x has two dimensions and whose remedies are others
                says = says.partition(",")[0].replace("; use", "").partition(" it must")[0]
                if says == "x is on meta":  # where a call may be, with all its operands
                    assert f"gemm_ar: weight is on {device().type}" in said and "x on meta; they must be on the same" in said, said
                    continue
            elif name in ("all_reduce", "all_reduce in place"):
                says = says.replace("a tensor; use", "a tensor or a list of tensors; use")
            called, x = ("all_reduce_" if name == "all_reduce in place" else name.split()[0]), "x"
            if name == "all_reduce of a list":
                x, says = "x[0]", "x[0] is None; leave out" if number == 0 else re.sub(r"\bx(?=[ .])", "x[0]", says)
            assert said.startswith(f"ValueError: {called}: {x} ") and says in said, f"{name} {number}: {said}"
    for empty in ([], ()):
        said, _ = told(lambda: fluxlike.all_reduce(empty, group), ValueError)  # noqa: B023
        assert f"x is a {type(empty).__name__} without tensors; pass at least one" in said, said
    x = torch.ones(4, device=device())
    for several in ((t for t in [x]), {"x": x}, {"x": x}.values()):
        said, _ = told(lambda: fluxlike.all_reduce(several, group), ValueError)  # noqa: B023
        assert f"x is {type(several).__name__}, it must be a tensor or a list of tensors; use" in said, said
    assert fluxlike.all_reduce(torch.ones(1, device=device()), group).item() == dist.get_world_size(group)


def test_bad_tensors():
    run_ranks(bad_tensors, 2)


def one_bad_rank(group):
    """As with the other operations: refused where it is, the others are told so, and new calls work."""
    rank, settle = dist.get_rank(group), world.current().executor.synchronize
    for name, act in FAMILY.items():
        works = lambda: act(torch.ones(4, 4, device=device()), group)  # noqa: B023, E731
        works()
        if rank == 1:
            said, _ = told(lambda: act(torch.ones(4, 4, device=device()).to_sparse(), group), ValueError)  # noqa: B023
            assert " has layout torch.sparse_coo" in said, said
        else:
            # on a GPU what a kernel found out is raised by a call behind it
            said, seconds = told(lambda: [(works(), settle()) for _ in range(4)], ValueError)  # noqa: B023
            assert "that this rank refused by an error of its own" in said and seconds < 30, f"{name}: {said} after {seconds}"
        while told(lambda: fluxlike.create_gemm_rs_context(8, 8, group=group).close(), ValueError)[0]:
            assert rank == 1  # who has not been told before
        works()


def test_a_bad_tensor_on_one_rank():
    run_ranks(one_bad_rank, 2)


def differ(group, calls, unsaid):
    """Shards of different sizes in the first call, or behind others; without m= who is told reads that it may be missing."""
    fluxlike.init(heap="shm")
    for _ in range(calls):
        fluxlike.all_gather(torch.ones(8), group)
    try:
        fluxlike.all_gather(torch.ones(8 + group.rank()), group, None if unsaid else 16 + 2 * group.rank())
    except ValueError as error:
        assert not unsaid or error.__notes__ == [keeping.M_UNSAID]
        assert unsaid or not hasattr(error, "__notes__")
        raise


@pytest.mark.parametrize("unsaid", (True, False))
@pytest.mark.parametrize("calls", (0, 1))
def test_shards_of_different_sizes(calls, unsaid):
    outcomes = run_fresh(differ, 2, {"FLUXLIKE_TIMEOUT_S": "20"}, calls=calls, unsaid=unsaid)
    assert any("elements=18" in outcome.message for outcome in outcomes)
    for outcome in outcomes:
        assert outcome.error == "CallMismatch", str(outcome)


def lonely(group):
    """The root of a broadcast need not wait for the others, but to be two calls ahead."""
    fluxlike.init(heap="shm")
    fluxlike.broadcast(torch.ones(8), 0, group)
    if group.rank() == 0:
        for _ in range(3):
            fluxlike.broadcast(torch.ones(8), 0, group)


def test_a_rank_that_does_not_come():
    first, _ = run_fresh(lonely, 2, {"FLUXLIKE_TIMEOUT_S": "2"}, grace=10)
    says = "broadcast: rank 0 waited 2 s for rank 1: the credit that its slots may be written again of call 4 (expected 2, saw 1)"
    assert first.error == "PeerTimeout" and says in first.message, str(first)


def checked(group):
    """All of the family but all_reduce itself, which is checked with its tests."""
    fluxlike.init(heap="shm")
    mixed(group, 4)
    test_trees.mixed(group, "ring-8", 3)
    fluxlike.finalize()


@pytest.mark.skipif(TORCHRUN, reason="makes its own ranks")
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_no_race(ranks):
    for outcome in run_fresh(checked, ranks, {"FLUXLIKE_RACECHECK": "1"}, measure="kernels"):
        assert outcome.ok, str(outcome)


def by_auto(group):
    """Words where there are any; of none but floats there are."""
    x = torch.ones(64, device=device())
    for way, dtypes in {"words": DTYPES, "bulk": (torch.int32, torch.uint8)}.items():
        for dtype in dtypes:
            fluxlike.all_gather(x.to(dtype), group), fluxlike.broadcast(x.to(dtype), 0, group)
            assert {context(name, group).last_path for name in ("all_gather", "broadcast")} == {way}, dtype
    fluxlike.reduce_scatter(x, group), fluxlike.reduce(x, 0, group)
    assert {context(name, group).last_path for name in ("reduce_scatter", "reduce")} == {"words"}


def test_auto():
    run_ranks(by_auto, 2)


def test_choice():
    times = [exchange.seconds(nbytes, 4) for nbytes in (1 << 10, 1 << 16, 1 << 18, 1 << 20)]
    assert times == sorted(times) and times[0] == pytest.approx(exchange.START + exchange.TRIP, rel=0.01)

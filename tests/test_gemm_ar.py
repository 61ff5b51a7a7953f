"""gemm_ar: equality on small whole numbers, pieces, gradients, what is refused."""

import re
from types import SimpleNamespace

import pytest
import slow
import torch
import torch.distributed as dist
from cases import make_weight, same
from ranks import TORCHRUN, device, exact, ints, run_fresh, run_ranks

import fluxlike
from fluxlike.ops import all_reduce, exchange
from fluxlike.ops import fused as few
from fluxlike.runtime import world

SIZES = ((64, 96, 32), (37, 70, 50), (1, 7, 3), (5, 1, 1), (130, 65, 33))
EMPTY = ((0, 8, 8), (8, 0, 8), (8, 8, 0))


def inputs(m, n, k, dtype, seed, rank, transposed=False):
    x = ints((m, k), dtype, seed * 100 + rank).to(device())
    return x, make_weight(n, k, dtype, seed * 100 + 50 + rank, transposed), ints((n,), dtype, seed, -4, 4, 1.0).to(device())


def truth(m, n, k, dtype, seed, ranks, bias):
    total = torch.zeros(m, n, dtype=torch.float64, device=device())
    for rank in range(ranks):
        x, w, b = (t.double() for t in inputs(m, n, k, dtype, seed, rank))
        exact(x.abs() @ w.abs().T)
        total += x @ w.T
    total = total + b if bias else total
    exact(total)
    return total.cpu()


def matrix(group, dtype):
    dtype, size, rank = getattr(torch, dtype), dist.get_world_size(group), dist.get_rank(group)
    for algo in ("auto", *all_reduce.ALGORITHMS):
        with fluxlike.create_gemm_ar_context(130, 96, dtype, group, algo) as ctx:
            for seed, (m, n, k) in enumerate(SIZES + EMPTY):
                x, w, b = inputs(m, n, k, dtype, seed, rank, transposed=bool(seed % 2))
                bias = b if seed % 3 else None
                y = fluxlike.gemm_ar(x, w, ctx, bias=bias)
                assert y.dtype == dtype and y.is_contiguous()
                expected = truth(m, n, k, dtype, seed, size, bias is not None)
                same(y, expected, f"gemm_ar {m}×{n}×{k} {algo}")
                same(fluxlike.reference.gemm_ar(x, w, bias=bias, group=group), expected, "reference")
                if m and n:
                    chosen = all_reduce.choose(y.nbytes, size) if algo == "auto" else algo
                    assert ctx.last_path == f"{chosen}/torch", ctx.last_path
            assert ctx.stats["calls"] == len(SIZES) + 1 and ctx.stats["products"] == len(SIZES)
            assert ctx.stats["launches"] == (len(SIZES) + 1) * (size > 1)


@pytest.mark.parametrize(("world", "dtype"), ((1, "float32"), (2, "bfloat16"), (3, "float32"), (4, "float16")))
def test_sizes(world, dtype):
    run_ranks(matrix, world, dtype=dtype)


def alone(group):
    with fluxlike.create_gemm_ar_context(4096, 8192, group=group) as ctx:
        assert ctx.block.nbytes < 1 << 20


def test_one_rank_takes_no_memory_to_exchange():
    run_ranks(alone, 1)


def fused_sizes():
    """In one and several pieces and programs, M·N whole blocks: the last with as many rows as there may be."""
    return (1, 1024, 16), (32, 96, 32), (16, 64, 80), (20, 256, 48), (64, 64 * (world.current().executor.programs // 2 + 1), 144)


def two_shot_sizes(size):
    """Each rank's part of whole blocks, of several rows and of one; the last with as many rows and programs as there may be."""
    programs = world.current().executor.programs
    most = 64 // size // 16 * 16 * size, 64 * (programs // 2 + 1), 144
    return (size, 1024, 16), (8 * size, 128, 80), (4 * size, 256, 48), (8 * size, 384, 32), most


def fused(group, dtype, algo):
    """Small whole numbers, with and without a bias; the same bits again; nothing left in memory for the call behind it."""
    dtype, size, rank = getattr(torch, dtype), dist.get_world_size(group), dist.get_rank(group)
    sizes = fused_sizes() if algo == "one_shot" else two_shot_sizes(size)
    with fluxlike.create_gemm_ar_context(64, max(n for _, n, _ in sizes), dtype, group, algo, product="fused") as ctx:
        for seed, (m, n, k) in enumerate(sizes):
            x, w, b = inputs(m, n, k, dtype, seed, rank)
            bias = b if seed % 2 else None
            for out in (None, torch.full((m, n), 7.0, dtype=dtype, device=device())):
                y = fluxlike.gemm_ar(x, w, ctx, bias=bias, out=out)
                same(y, truth(m, n, k, dtype, seed, size, bias is not None), f"gemm_ar {m}×{n}×{k} fused")
                assert ctx.last_path == f"{algo}/fused" and (out is None or y is out)
        assert ctx.stats["launches"] == ctx.stats["calls"] == 2 * len(sizes) and ctx.stats["products"] == 0
        x = torch.randn(8 * size, 144, generator=torch.Generator().manual_seed(rank)).to(device(), dtype)
        w = torch.randn(1024, 144, generator=torch.Generator().manual_seed(rank + 9)).to(device(), dtype)
        first, again = (fluxlike.gemm_ar(x, w, ctx) for _ in range(2))
        assert torch.equal(first, again)
        exact_sum = x.double() @ w.double().T
        dist.all_reduce(exact_sum, group=group)
        theirs = fluxlike.reference.gemm_ar(x, w, group=group)
        error, allowed = ((t.double() - exact_sum).square().mean().sqrt() for t in (first, theirs))
        assert error <= 1.5 * allowed
        x[3, 5] = float("nan") if rank == 0 else 1.0
        y = fluxlike.gemm_ar(x, w, ctx)
        assert y[3].isnan().all() and not y[:3].isnan().any() and torch.equal(y[4:], first[4:])


@pytest.mark.parametrize("algo", ("one_shot", "two_shot"))
@pytest.mark.parametrize(("world", "dtype"), slow.behind(2, [(2, "bfloat16"), (3, "float16"), (4, "bfloat16")]))
def test_fused(world, dtype, algo):
    run_ranks(fused, world, dtype=dtype, algo=algo)


def mixed(group, algo):
    """A weight that one rank stores otherwise is its own affair: it multiplies by torch, the others in one kernel."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(few, "is_usual", lambda ctx: True)  # not so on a CPU
        one_shot, of_parts = ((32, 96, 32), (1, 1024, 16), (16, 64, 48)), two_shot_sizes(size)[:3]
        with fluxlike.create_gemm_ar_context(64, 1024, torch.bfloat16, group, algo) as ctx:
            for seed, (m, n, k) in enumerate(one_shot if algo == "one_shot" else of_parts):
                for transposed in (0, seed % size, seed % size):
                    x, w, b = inputs(m, n, k, torch.bfloat16, seed, rank, transposed=rank == transposed)
                    y = fluxlike.gemm_ar(x, w, ctx, bias=b)
                    same(y, truth(m, n, k, torch.bfloat16, seed, size, True), f"gemm_ar {m}×{n}×{k}")
                    assert ctx.last_path == f"{algo}/{'torch' if rank == transposed else 'fused'}"


@pytest.mark.parametrize("algo", ("one_shot", "two_shot"))
@pytest.mark.parametrize("ranks", (2, 3))
def test_one_rank_by_torch_and_the_others_in_one_kernel(ranks, algo):
    run_ranks(mixed, ranks, algo=algo)


def many_turns(group):
    """A part that takes the other kernel more than two turns: its third waits for sums of which the fused one lacks words."""
    fluxlike.init()
    rank, dtype = dist.get_rank(group), torch.bfloat16
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(few, "is_usual", lambda ctx: True)
        with fluxlike.create_gemm_ar_context(64, 4096, dtype, group, "two_shot") as ctx:
            x, w, _ = inputs(64, 4096, 16, dtype, 5, rank, transposed=rank == 1)
            same(fluxlike.gemm_ar(x, w, ctx), truth(64, 4096, 16, dtype, 5, 2, False), "gemm_ar of many turns")
            assert ctx.last_path == "two_shot/torch"
    ctx = fluxlike.create_gemm_ar_context(64, 4096, dtype, group, "two_shot", "fused")
    with ctx, pytest.raises(ValueError, match=r"the part of a rank, \[32, 4096\], has more than 8192 elements; make"):
        fluxlike.gemm_ar(x, w, ctx)
    fluxlike.finalize()


@pytest.mark.skipif(TORCHRUN, reason="makes its own ranks")
def test_many_turns():
    for outcome in run_fresh(many_turns, 2, env={"FLUXLIKE_CPU_PROGRAMS": "1", "FLUXLIKE_TIMEOUT_S": "10"}):
        assert outcome.ok, str(outcome)


def test_tiles():
    """Of each call all programs run at once, and fit into the shared memory that they are given."""
    for capability, programs in (((9, 0), 132), ((9, 0), 66), ((8, 0), 108), ((8, 9), 128), ((10, 0), 148), ((12, 0), 170)):
        for m in (1, 16, 17, 32, 48, 64, 65, 128, 129, 256, 257):
            for n in (64, 1024, 2880, 4096, 5120, 8192, 12288, 16384, 1 << 20):
                tile = few.tile_of(capability, m, n, programs)
                if tile is None:
                    assert m > 32 or n > 8192 or capability == (8, 9)
                    continue
                tiles = -(-n // tile.bn)
                over = -(-tiles // programs)
                assert m <= tile.bm + tile.rest and tile.tma == (m > 64) and (tile.tma or tile.bm <= tile.bn)
                assert over <= exchange.OVER and tile.stages > 1
                shared = over * tile.stages * (tile.bm + tile.rest + tile.bn) * tile.bk * 2
                assert shared <= few.SHARED.get(capability, few.SMALL)
    assert few.tile_of((9, 0), 16, 8192, 132) == few.Tile(16, 64, 128, 4, 8)
    assert few.tile_of((9, 0), 16, 4096, 132) == few.Tile(16, 32, 128, 4, 8)
    assert few.tile_of((9, 0), 64, 8192, 132) == few.Tile(64, 64, 128, 4, 6)
    assert few.tile_of((9, 0), 64, 4096, 132) is None
    assert few.tile_of((9, 0), 65, 14336, 132) == few.Tile(128, 128, 64, 8, 6, True)
    assert few.tile_of((9, 0), 128, 7168, 132) == few.Tile(128, 64, 128, 4, 4, True)
    assert few.tile_of((9, 0), 129, 14336, 132) == few.Tile(128, 128, 64, 4, 5, True, 32)
    assert few.tile_of((9, 0), 256, 7168, 132) == few.Tile(128, 64, 64, 8, 5, True, 128)
    assert few.tile_of((9, 0), 128, 4224, 132) is None is few.tile_of((9, 0), 128, 16897, 132)
    assert few.tile_of((8, 0), 65, 14336, 108) is None


@pytest.mark.parametrize("capability", ((9, 0), (8, 0), (10, 0), (12, 0), (0, 0)))
@pytest.mark.parametrize("programs", (4, 108, 132))
def test_the_error_tells_which_sizes_have_tiles(capability, programs):
    executor = SimpleNamespace(capability=capability, programs=programs)
    ctx = SimpleNamespace(kind=exchange.Kind("ag_gemm", gather=True), world=SimpleNamespace(executor=executor))
    says = few._unread(ctx, 300, torch.empty(16, 16, dtype=torch.bfloat16, device="meta"), ())
    found = re.search(r"up to 32 rows, 64 of N above (\d+), and N up to (\d+)(?:; 256 rows of N above (\d+), up to (\d+))?$", says)
    assert found, says
    above, most, wide_above, wide_most = (None if n is None else int(n) for n in found.groups())
    for n in {*range(16, 40000, 16), most, most + 16}:
        for m, fits in ((32, n <= most), (64, above < n <= most), (65, False), (256, False)):
            if m > 64 and wide_most is not None:
                fits = wide_above < n <= wide_most
            assert (few.tile_of(capability, m, n, programs) is not None) == fits, f"{m}×{n}: {says}"


def not_fused(group):
    """What a fused call cannot be is an error of a context that is asked for one, and goes by torch otherwise."""
    rank, dtype = dist.get_rank(group), torch.bfloat16
    x, w, _ = inputs(32, 96, 32, dtype, 1, rank)
    wide, aside = x.repeat(1, 2)[:, 8:40], torch.cat([w.view(-1)[:1], w.view(-1)])[1:].view_as(w)
    cases = (
        (x[:5], w, None, r"the part of a rank, \[5, 96\], is no multiple of 1024 elements"),
        (x[:, :24], w[:, :24], None, "N=96 and K=24 of this rank are no multiples of 16"),
        (x, w.T.contiguous().T, None, r"strides \(1, 96\) of weight are not a multiple of 16 and 1"),
        (x.new_zeros(32, 40)[:, :32], w, None, r"strides \(40, 1\) of x are not a multiple of 16 and 1"),
        (x, aside, None, "does not lie at a multiple of 16 bytes"),
    )
    kinds = [fluxlike.create_gemm_ar_context(32, 96, dtype, group, product=product) for product in ("fused", "auto")]
    for x_, w_, bias, says in cases:
        with pytest.raises(ValueError, match=rf"gemm_ar: this context has product='fused', and .*{says}.*; make one with"):
            fluxlike.gemm_ar(x_, w_, kinds[0], bias=bias)
        total = x_.double() @ w_.double().T
        dist.all_reduce(total, group=group)
        same(fluxlike.gemm_ar(x_, w_, kinds[1], bias=bias), total.cpu(), says)
        assert kinds[1].last_path == "one_shot/torch"
    assert wide.stride() == (64, 1)
    same(fluxlike.gemm_ar(wide, w, kinds[0]), _sum(wide.double() @ w.double().T, group), "rows that lie apart")
    for ctx in kinds:
        ctx.close()
    few = 64 * (max(world.current().executor.programs, 2) // 2)
    with fluxlike.create_gemm_ar_context(64, few + 16, dtype, group, product="fused") as ctx:
        x, w = x.new_ones(64, 32), w.new_ones(few + 16, 32)
        if world.current().executor.programs > 1:
            with pytest.raises(ValueError, match=f"M=64, N={few} are not for it here: .* up to 32 rows, 64 of N above {few}, and"):
                fluxlike.gemm_ar(x, w[:few], ctx)
        for m, n in ((64, few + 16), (32, few)):
            same(fluxlike.gemm_ar(x[:m], w[:n], ctx), torch.full((m, n), 64.0, dtype=torch.float64), f"{m}×{n}, as it says")
    for how, says in (
        (dict(product="kernel"), "product='kernel' is not one of 'auto', 'torch', 'fused'"),
        (dict(algo="bulk"), "product='fused' has algo='one_shot' or 'two_shot', not 'bulk'"),
        (dict(dtype=torch.float32), "for 16 bits, and max_m up to 64, not for torch.float32"),
        (dict(max_m=65), "for 16 bits, and max_m up to 64, not for max_m=65"),
    ):
        with pytest.raises(ValueError, match=says):
            fluxlike.create_gemm_ar_context(**(dict(max_m=32, n=96, group=group, product="fused") | how))


def _sum(t, group):
    dist.all_reduce(t, group=group)
    return t.cpu()


def test_what_cannot_be_fused():
    run_ranks(not_fused, 2)


def without_a_context(group):
    """One that is kept and grows; results into out, and in pieces."""
    rank, size, usual = dist.get_rank(group), dist.get_world_size(group), exchange.SET
    exchange.SET = 2 * exchange.BULK
    try:
        for seed, (m, n, k) in enumerate(((4, 16, 8), (70, 96, 16), (33, 96, 16))):
            x, w, _ = inputs(m, n, k, torch.float32, seed, rank)
            out = torch.full((m, n), 7.0, device=device())
            assert fluxlike.gemm_ar(x, w, group=group, out=out) is out
            same(out, truth(m, n, k, torch.float32, seed, size, False), f"gemm_ar {m}×{n}×{k} in pieces")
    finally:
        exchange.SET = usual


def test_without_a_context():
    run_ranks(without_a_context, 2)


def test_room():
    """For whatever algorithm auto takes for any size up to the largest."""
    for ranks in (2, 3, 4, 8):
        for elements in (1, 1000, 300_000, 1 << 22, 1 << 26):
            words, bulk = all_reduce.room(elements, torch.bfloat16, ranks, "auto")
            most = min(elements, all_reduce.most_bytes(ranks, "auto") // 2)
            for n in {max(1, most * i // 64) for i in range(65)}:
                algo = all_reduce.choose(2 * n, ranks)
                blocks = all_reduce.blocks_of([n], algo, torch.bfloat16, ranks)
                assert blocks <= (bulk if algo == "bulk" else words), (ranks, n, algo)
        large = [all_reduce.room(1 << 26, torch.bfloat16, ranks, algo) for algo in ("auto", "two_shot")]
        assert large[0] == large[1], "one_shot, which is for small ones, would take the ranks times as much"


class Layer(torch.nn.Module):
    def forward(self, x, weight, bias):
        return fluxlike.gemm_ar(x, weight, bias=bias).square().sum()


def gradients(group, compiled):
    """As of the whole product in one place, with a loss that all ranks compute from the same y."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    generator = torch.Generator().manual_seed(3)
    xs, ws = torch.randn(size, 12, 10, generator=generator), torch.randn(size, 14, 10, generator=generator)
    bias = torch.randn(14, generator=generator)
    mine = [t.clone().to(device()).requires_grad_() for t in (xs[rank], ws[rank], bias)]
    layer = torch.compile(Layer(), backend="aot_eager", fullgraph=True) if compiled else Layer()
    layer(*mine).backward()
    whole = [t.clone().requires_grad_() for t in (xs, ws, bias)]
    (torch.einsum("rmk,rnk->mn", *whole[:2]) + whole[2]).square().sum().backward()
    for got, wanted in zip(mine, (whole[0].grad[rank], whole[1].grad[rank], whole[2].grad), strict=True):
        torch.testing.assert_close(got.grad.cpu(), wanted, rtol=2e-5, atol=2e-3)


@pytest.mark.parametrize("compiled", (False, True))
def test_gradients(compiled):
    run_ranks(gradients, 4, compiled=compiled)  # the world that fluxlike was given, as no group is named


def refused(group):
    rank = dist.get_rank(group)
    x, w, b = inputs(8, 16, 4, torch.float32, 1, rank)
    with fluxlike.create_gemm_ar_context(8, 16, torch.float32, group) as ctx:
        for call, says in (
            (lambda: fluxlike.gemm_ar(x.repeat(2, 1), w, ctx), "M=16 is more than the context's max_m=8"),
            (lambda: fluxlike.gemm_ar(x, w.repeat(2, 1), ctx), "N=32 is more than the context's n=16"),
            (lambda: fluxlike.gemm_ar(x[:, :2], w, ctx), r"their second sizes \(K\) must be equal"),
            (lambda: fluxlike.gemm_ar(x.half(), w.half(), ctx), "x has dtype torch.float16 and the context torch.float32"),
            (lambda: fluxlike.gemm_ar(x, w, ctx, out=x), "out is"),
            (lambda: fluxlike.gemm_ar(x, w, object()), "it must come from fluxlike.create_gemm_ar_context"),
            (lambda: fluxlike.gemm_ar(x.requires_grad_(), w, ctx), "ctx= is given to a call that autograd records"),
        ):
            with pytest.raises(ValueError, match=says):
                call()
        x = x.detach()
        expected = truth(8, 16, 4, torch.float32, 1, dist.get_world_size(group), True)
        same(fluxlike.gemm_ar(x, w, ctx, bias=b), expected, "behind these")
    for how, says in ((dict(max_m=0), "max_m=0"), (dict(dtype=torch.int8), "dtype=torch.int8"), (dict(algo="ring"), "'ring'")):
        with pytest.raises(ValueError, match=says):
            fluxlike.create_gemm_ar_context(**(dict(max_m=8, n=8, group=group) | how))
    with pytest.raises(RuntimeError, match=r"this context is closed; make a new one with fluxlike\.create_gemm_ar_context"):
        fluxlike.gemm_ar(x, w, ctx)


def test_what_is_refused():
    run_ranks(refused, 2)

"""The schedule "sequential", beyond what all schedules are put through: memory, pieces, what is rounded when, what fails."""

import contextlib
import math

import pytest
import slow
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from cases import AGCase, RSCase, same
from faults import fresh, make_context, start, told
from ranks import TORCHRUN, device, rows_slice, run_ranks

import fluxlike
from fluxlike.kernels import exchange as kernels
from fluxlike.kernels import fused as kernels_fused
from fluxlike.ops import exchange, fused, tiling
from fluxlike.ops import gemm_rs as products
from fluxlike.runtime import env, programs, world

M, N, K = 67, 96, 80


@contextlib.contextmanager
def contexts(group, dtype=torch.float32):
    with (
        fluxlike.create_gemm_rs_context(M, N, None, dtype, group, "sequential") as rs,
        fluxlike.create_ag_gemm_context(M, N, K, dtype, group, "sequential") as ag,
    ):
        yield rs, ag


def fails_inside(group):
    """What the exchange came to is raised by who closes the context, if no call has; that a peer gave up in it, by `check`."""
    ctx = fluxlike.create_gemm_rs_context(M, N, None, torch.float32, group, "sequential")
    ctx.exchange._error = fluxlike.PeerTimeout("of the exchange")
    assert told(ctx.close, fluxlike.PeerTimeout)[0] == "PeerTimeout: of the exchange" and ctx.exchange.closed
    with fluxlike.create_gemm_rs_context(M, N, None, torch.float32, group, "sequential") as ctx:
        if dist.get_rank(group) == 1:
            ctx.exchange._release()
        dist.barrier(group)
        said = told(ctx.check, fluxlike.PeerTimeout)[0]
        assert "may be wrong, because rank 1 gave up first" in said, said


def test_a_failure_of_the_exchange_that_no_call_has_raised():
    run_ranks(fails_inside, 2)


def in_pieces(group):
    """Exchanges too large for one launch, each trip a part of the block that a launch takes at most."""
    size, usual = dist.get_world_size(group), exchange.SET
    exchange.SET = 1024
    try:
        with contexts(group) as (rs, ag):
            for ctx, columns in ((rs, N), (ag, K)):
                case = RSCase(M, N, [8] * size, torch.float32, 1) if ctx is rs else AGCase(M, [N] * size, K, torch.float32, 2)
                x, w, _ = case.inputs(ctx.rank)
                for _ in range(3):
                    y = fluxlike.gemm_rs(x, w, rs) if ctx is rs else fluxlike.ag_gemm(x, w, ag, m=M)
                same(y, case.expected(ctx.rank) if ctx is rs else case.whole()[1][ctx.rank], f"{ctx.op} in pieces")
                of_a_part = -(-M // size) * columns * 4
                launches = -(-of_a_part // (4 * exchange.WORDS))
                assert ctx.stats["launches"] == 3 * launches and launches > 1 and ctx.last_path == "sequential/torch"
                assert ctx.stats["products"] == 3 and ctx.stats["calls"] == 3
    finally:
        exchange.SET = usual


def test_in_pieces():
    run_ranks(in_pieces, 2)


def rounded(group, dtype):
    """gemm_rs: every partial sum once, a bias within the owner's, then their sum in the order of the ranks."""
    dtype, size, rank = getattr(torch, dtype), dist.get_world_size(group), dist.get_rank(group)
    generator = torch.Generator().manual_seed(7)
    xs, ws = torch.randn(size, M, K, generator=generator).to(dtype), torch.randn(size, N, K, generator=generator).to(dtype)
    bias, mine = torch.randn(N, generator=generator).to(dtype), rows_slice(M, size, rank)
    with contexts(group, dtype) as (rs, _):
        y = fluxlike.gemm_rs(xs[rank].to(device()), ws[rank].to(device()), rs, bias=bias.to(device()))
    total = torch.zeros(mine.stop - mine.start, N)
    for source in range(size):
        product = xs[source][mine].float() @ ws[source].float().T
        total += (product + bias.float() if source == rank else product).to(dtype).float()
    assert torch.equal(y, total.to(dtype))


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.skipif(TORCHRUN, reason="cuBLAS adds in an order of its own")
def test_what_is_rounded(dtype):
    run_ranks(rounded, 3, dtype=dtype)


def memory(group):
    """Of an explicit schedule as much as its largest call needs, or a piece; of auto on a CPU none; given back with the context."""
    heap = world.current().heap
    before = heap.in_use
    with contexts(group) as (rs, ag):
        assert rs.exchange.words == -(-(-(-M // rs.size) * N * 4) // (4 * exchange.WORDS)) and ag.exchange.bulk == 1
        assert rs.scratch.numel() == rs.size * -(-M // rs.size) * N
    assert rs.exchange.closed and heap.in_use == before
    with fluxlike.create_gemm_rs_context(M, N, group=group) as auto:
        assert auto.exchange is None or device().type == "cuda"


def test_memory():
    run_ranks(memory, 3)


def fits(m, n):
    executor = world.current().executor
    return fused.tile_of(executor.capability, m, n, executor.programs) is not None


def in_one_kernel(group, dtype):
    """gemm_rs of few rows; by torch on a rank whose weight the kernel does not read, while the others go on in one kernel."""
    dtype, size, rank = getattr(torch, dtype), dist.get_world_size(group), dist.get_rank(group)
    with pytest.MonkeyPatch.context() as patch, fluxlike.create_gemm_rs_context(64, 1024, None, dtype, group, "sequential") as ctx:
        patch.setattr(fused, "is_usual", lambda ctx: True)  # not so on a CPU
        for seed, (each, n, k) in enumerate(((1, 1024, 16), (8, 128, 48), (16, 192, 80), (64 // size, 128, 16))):
            m = each * size
            case = RSCase(m, n, [k] * size, dtype, seed, bias=bool(seed % 2))
            x, w, bias = case.inputs(rank)
            for unlike in (None, seed % size, seed % size):
                weight = w.T.contiguous().T if rank == unlike else w
                y = fluxlike.gemm_rs(x, weight, ctx, bias=bias)
                same(y, case.expected(rank), f"{m}×{n}×{k}, {unlike}")
                possible = each * n % 1024 == 0 and fits(m, n) and rank != unlike
                assert ctx.last_path == f"sequential/{'fused' if possible else 'torch'}"
        for m in (1, size + 1):
            case = RSCase(m, 1024, [16] * size, dtype, 9)
            same(fluxlike.gemm_rs(*case.inputs(rank)[:2], ctx), case.expected(rank), f"{m} rows, uneven")
            assert ctx.last_path == "sequential/torch"
        # of a node among several: one rank has all rows, or one as many as each would have of even ones
        for m, full in ((4, 4), (size, max(size - 1, 2))):
            case = RSCase(m, 1024, [16] * size, dtype, 10)
            (x, w, _), rows = case.inputs(rank), len(range(rank * full, min((rank + 1) * full, m)))
            y = torch.full((rows, 1024), 7.0, dtype=dtype, device=device())
            products.run(ctx, x, w, None, y, full)
            whole = torch.cat([case.expected(source) for source in range(size)])
            same(y, whole[rank * full :][:rows], f"{m} rows, {full} a chunk")
            assert ctx.last_path == "sequential/torch"


@pytest.mark.parametrize(("ranks", "dtype"), slow.behind(2, [(2, "bfloat16"), (3, "float16"), (4, "bfloat16")]))
def test_few_rows_in_one_kernel(ranks, dtype):
    run_ranks(in_one_kernel, ranks, dtype=dtype)


def gathered_in_one_kernel(group, dtype):
    """ag_gemm of few rows, uneven ones too, of one weight and of several; and with a rank that goes on as before."""
    dtype, size, rank = getattr(torch, dtype), dist.get_world_size(group), dist.get_rank(group)
    with pytest.MonkeyPatch.context() as patch, fluxlike.create_ag_gemm_context(257, 192, 2048, dtype, group, "sequential") as ctx:
        patch.setattr(fused, "is_usual", lambda ctx: True)  # not so on a CPU
        wide = 128 * world.current().executor.programs
        sizes = (size, 32, 2048), (8 * size - 1, 96, 48), (1, 192, 1040), (64, 192, 80)
        sizes += (65, wide - 16, 48), (255, wide // 2, 80), (161, wide, 48), (257, wide, 16)
        # one program that exchanges several blocks at once, in turns of which the last is shorter; and several of them
        sizes += ((9 if size == 2 else 5) * size - 1, 32, 2048), (255, wide // 2, 2048)
        for seed, (m, n, k) in enumerate(sizes):
            case = AGCase(m, [n] * size, k, dtype, seed, bias=bool(seed % 2))
            x, w, bias = case.inputs(rank)
            whole, results = case.whole()
            for unlike, several in ((None, False), (seed % size, False), (None, True)):
                weight = w.T.contiguous().T if rank == unlike else w
                weights = [weight, w[: n // 2]] if several else weight
                biases = [bias, bias[: n // 2]] if several and bias is not None else bias
                before = ctx.stats["launches"], ctx.stats["products"]
                z, rows = fluxlike.ag_gemm(x, weights, ctx, bias=biases, m=m, return_gathered=True)
                same(rows, whole, "gathered")
                for i, found in enumerate(z if several else [z]):
                    same(found, results[rank][:, : n // (i + 1)], f"{m}×{n}×{k}, {unlike}, weight {i}")
                possible = fits(m, n) and rank != unlike
                assert ctx.last_path == f"sequential/{'fused' if possible else 'torch'}"
                made = ctx.stats["launches"] - before[0], ctx.stats["products"] - before[1]
                assert made == (1, 1 + several - possible)


@pytest.mark.parametrize(("ranks", "dtype"), slow.behind(2, [(2, "bfloat16"), (3, "float16"), (4, "bfloat16")]))
def test_few_rows_are_gathered_in_one_kernel(ranks, dtype):
    run_ranks(gathered_in_one_kernel, ranks, dtype=dtype)


def test_which_gathers_are_fused():
    """The more rows, the smaller the weight that is worth it."""
    for m, most in ((1, 256), (64, 256), (65, 128), (256, 128)):
        for rows, expected in ((most << 10, True), ((most << 10) + 1, False)):
            weight = torch.empty(rows, 512, dtype=torch.bfloat16, device="meta")  # of 1 KiB a row
            assert fused.gains(m, weight) is expected, f"{m}, {weight.nbytes}"
    assert not fused.gains(257, torch.empty(16, 16, dtype=torch.bfloat16, device="meta"))


def rows_to_read(group):
    """Rows that contexts have memory for, for calls of so many; and that wide tiles read, by which descriptor."""
    executor = world.current().executor
    if not fused.has_wide(executor.capability):
        pytest.skip("reads no more than 64 rows in one kernel")
    size, wide, seen, real = dist.get_world_size(group), 128 * executor.programs, [], tiling.descriptor
    for most, rows in {64: 64, 65: 128, 96: 128, 128: 128, 129: 160, 161: 192, 193: 256, 256: 256, 257: 258}.items():
        for schedule in ("sequential", "sequential/torch"):
            with fluxlike.create_ag_gemm_context(most, wide * size, 48, torch.bfloat16, group, schedule) as ctx:
                found = len(ctx.scratch) // 48
                assert found == (rows if schedule == "sequential" else most + most % size), f"{most}, {schedule}: {found} rows"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiling, "descriptor", lambda t, box: (seen.append((t.data_ptr(), len(t), box)), real(t, box))[1])
        for most, m, parts in ((130, 70, [128]), (130, 130, [128, 32]), (180, 180, [128, 64]), (96, 96, [128])):
            with fluxlike.create_ag_gemm_context(most, wide * size, 48, torch.bfloat16, group, "sequential/fused") as ctx:
                x, w = (torch.ones(n, 48, dtype=torch.bfloat16, device=device()) for n in (m // size, wide))
                fluxlike.ag_gemm(x, w, ctx)
                found = [(at - ctx.scratch.data_ptr(), n, box[0]) for at, n, box in seen[:-1]]
                assert found == [(sum(parts[:i]) * 96, rows, rows) for i, rows in enumerate(parts)], f"{m}: {found}"
            seen.clear()


def test_wide_tiles_read_rows_in_bounds():
    """No row is out of a descriptor's bounds, where TMA would take longer."""
    run_ranks(rows_to_read, 2)


def demanded(group):
    """Schedules that say how `sequential` multiplies: the one is what it says, also where auto would not; the other is refused."""
    dtype, size, rank = torch.bfloat16, dist.get_world_size(group), dist.get_rank(group)
    kinds = {"gemm_rs": fluxlike.create_gemm_rs_context, "ag_gemm": fluxlike.create_ag_gemm_context}
    for op, make in kinds.items():
        if op == "gemm_rs":
            few = RSCase(32, 128, [64] * size, dtype, 1, bias=True)
            expected = few.expected(rank)
        else:
            few = AGCase(32, [128] * size, 64, dtype, 2, bias=True)
            expected = few.whole()[1][rank]
        x, w, bias = few.inputs(rank)
        call = getattr(fluxlike, op)
        with (
            pytest.MonkeyPatch.context() as patch,
            make(64, 128, 64, dtype, group, "sequential/torch") as by_torch,
            make(64, 128, 64, dtype, group, "sequential/fused") as by_ours,
        ):
            patch.setattr(fused, "gains", lambda m, weight: False)
            patch.setattr(fused, "is_usual", lambda ctx: True)
            same(call(x, w, by_torch, bias=bias), expected, f"{op} by torch")
            assert by_torch.last_path == "sequential/torch" and "sequential/torch" in repr(by_torch)
            patch.setattr(fused, "is_usual", lambda ctx: False)
            same(call(x, w, by_ours, bias=bias), expected, f"{op} in one kernel")
            assert by_ours.last_path == "sequential/fused"
            refused = (w.T.contiguous().T, r"strides \(1, 128\) of weight"), (w[:, :56].contiguous(), "K=56 of this rank")
            for changed, says in refused:
                with pytest.raises(ValueError, match=f"{op}: this context has schedule='sequential/fused', and .*{says}.*; make"):
                    call(x[:, : changed.shape[1]], changed, by_ours)
            same(call(x, w, by_ours, bias=bias), expected, f"{op}, after what was refused")
        most = 64 if op == "gemm_rs" else 256
        for how, says in ((dict(dtype=torch.float32), "torch.float32"), (dict(max_m=most + 1), f"max_m={most + 1}")):
            with pytest.raises(ValueError, match=f"='sequential/fused' is for 16 bits, and max_m up to {most}, not for {says}"):
                make(**(dict(max_m=32, n=96, k=64, group=group, schedule="sequential/fused") | how))
        if op == "ag_gemm" and fused.has_wide(world.current().executor.capability):  # the most rows, of a wide weight
            wide = 128 * world.current().executor.programs
            with make(256, wide * size, 48, dtype, group, "sequential/fused") as ctx:
                for m, n in ((256, wide), (65, wide - 16), (129, wide // 2), (180, wide)):
                    case = AGCase(m, [n] * size, 48, dtype, m, bias=True)
                    x, w, bias = case.inputs(rank)
                    ctx.scratch.fill_(math.nan)  # tiles read rows behind those that are gathered, of which nothing may come
                    same(fluxlike.ag_gemm(x, w, ctx, bias=bias, m=m), case.whole()[1][rank], f"{m}×{n} in one kernel")
                    assert ctx.last_path == "sequential/fused"
                least = 64 * (world.current().executor.programs // 2)
                x, narrow = x.new_zeros(128 // size, 48), w.new_zeros(least, 48)
                with pytest.raises(ValueError, match=rf"N={least} are not for it here: .*; 256 rows of N above {least}, up"):
                    fluxlike.ag_gemm(x, narrow, ctx)
                apart = w.new_zeros(48 + 32 * wide)[: 48 + 32 * (wide - 1)].as_strided((wide, 48), (32, 1))  # rows that overlap
                with pytest.raises(ValueError, match=r"strides \(32, 1\) of weight are not a multiple of 16 from K on and 1"):
                    fluxlike.ag_gemm(x, apart, ctx)
        with pytest.raises(ValueError, match=r"schedule='sequential/kernel' is not one of 'auto', .* 'sequential/fused'"):
            make(32, 96, 64, dtype, group, "sequential/kernel")


@pytest.mark.parametrize("ranks", (2, 4))
def test_one_kernel_is_demanded_or_forbidden(ranks):
    run_ranks(demanded, ranks)


@triton.jit
def put_nothing(start, words, B: tl.constexpr):
    pass


@triton.jit
def put_nothing_at(pointers, mask, words):
    pass


def lost(group, op):
    """What rank 0 hears of a call in which rank 1 sends nothing, and of the next one; then all is well in a new context."""
    start()
    put, act, limit = kernels.put, {"gemm_rs": gemm_rs, "ag_gemm": ag_gemm}[op], env.get("FLUXLIKE_TIMEOUT_S")
    env.put("FLUXLIKE_TIMEOUT_S", "3")
    with make_context(op, "sequential") as ctx:
        kernels.put = put_nothing if ctx.rank == 1 else put
        said, _ = told(lambda: (act(ctx), ctx.check()), fluxlike.PeerTimeout)
        kernels.put = put
        dist.barrier(group)
        again, _ = told(lambda: act(ctx), fluxlike.PeerTimeout)
    env.put("FLUXLIKE_TIMEOUT_S", limit)
    with make_context(op, "sequential") as ctx:
        act(ctx)
        ctx.check()
    fluxlike.finalize()
    return said, again


def lost_to_those_who_wait_for_others(group):
    """What rank 0 hears of fused calls in which rank 1 sends nothing, and most programs have nothing to receive."""
    start()
    said, put = [], kernels_fused.put_at
    env.put("FLUXLIKE_TIMEOUT_S", "1")
    x, w = (torch.ones(rows, 1024, dtype=torch.bfloat16, device=device()) for rows in (1, 512))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "is_usual", lambda ctx: True)
        for seed in (None, 1, 2):  # a program that waits for another one begins first, or not
            programs.configure(programs.Schedule(seed=seed))
            with fluxlike.create_ag_gemm_context(2, 512, 1024, torch.bfloat16, group, "sequential") as ctx:
                kernels_fused.put_at = put_nothing_at if ctx.rank == 1 else put
                said.append(told(lambda ctx=ctx: (fluxlike.ag_gemm(x, w, ctx), ctx.check()), fluxlike.PeerTimeout)[0])
                assert ctx.last_path == "sequential/fused"
    return said


@pytest.mark.skipif(TORCHRUN, reason="makes its own ranks")
def test_who_waits_for_its_own_programs_tells_of_the_peer():
    first, second = fresh(lost_to_those_who_wait_for_others, 2)
    assert first.ok and second.ok, f"{first}\n{second}"
    for said in first.value:
        assert "rank 0 waited 1 s for rank 1: its part of the result of call 1 (expected 1, saw 0)" in said, said


def gemm_rs(ctx):
    return fluxlike.gemm_rs(torch.ones(64, 16, device=device()), torch.ones(128, 16, device=device()), ctx)


def ag_gemm(ctx):
    return fluxlike.ag_gemm(torch.ones(32, 16, device=device()), torch.ones(128, 16, device=device()), ctx)


@pytest.mark.skipif(TORCHRUN, reason="makes its own ranks")
@pytest.mark.parametrize("op", ("gemm_rs", "ag_gemm"))
def test_a_lost_signal(op):
    first, second = fresh(lost, 2, op=op)
    assert first.ok and second.ok, f"{first}\n{second}"
    said, again = first.value
    what = "its partial sums" if op == "gemm_rs" else "its part of the result"
    assert said.startswith(f"PeerTimeout: {op}: rank 0 waited 3 s for rank 1: {what} of call 1 (expected 1, saw 0)"), said
    assert again == said

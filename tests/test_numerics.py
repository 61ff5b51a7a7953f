"""Rounding: random data, the error against float64 held to that of torch's own path in the same dtype.

The rule: at most 1.5 times the error of torch.matmul and a reduce-scatter, or an all-gather and torch.matmul, on the
same data. On GPUs the collectives are NCCL's. Gloo has no reduce-scatter for all dtypes, so on a CPU its arithmetic is
written out: each rank's product is rounded to the dtype, and the sum over ranks is made in the dtype, one rank after the
other along the ring, which is what a ring reduce-scatter does.
"""

import pytest
import torch
import torch.distributed as dist
from cases import launches, schedules
from ranks import device, rows_slice, run_ranks

import fluxlike

FACTOR = 1.5


def normal(shape, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device())


def errors(result: torch.Tensor, right: torch.Tensor) -> tuple[float, float]:
    """Root mean square and largest, relative to the root mean square of the right values."""
    off = result.double() - right
    scale = right.square().mean().sqrt()
    return (off.square().mean().sqrt() / scale).item(), (off.abs().max() / scale).item()


def too_large(what: str, ours: torch.Tensor, torchs: torch.Tensor, right: torch.Tensor) -> list[str]:
    """What breaks the rule. Said when all calls are made: the other ranks wait for each of them."""
    found = []
    for kind, our, its in zip(("rms", "largest"), errors(ours, right), errors(torchs, right), strict=True):
        if not our <= FACTOR * its:
            found.append(f"{what}: {kind} error {our:.3e}, torch's {its:.3e}, ratio {our / its:.2f}")
        if not its > 0:
            found.append(f"{what}: the yardstick has no error, so the test shows nothing")
    return found


def reduce_scatter(partials: list[torch.Tensor], group) -> torch.Tensor:
    """This rank's rows of the sum of all ranks' partials, as torch has it."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    mine = rows_slice(len(partials[0]), size, rank)
    if device().type == "cuda" and len(partials[0]) % size == 0:
        out = torch.empty_like(partials[rank][mine])
        dist.reduce_scatter_tensor(out, partials[rank].contiguous(), group=group)
        return out
    total = partials[(rank + 1) % size][mine]
    for step in range(2, size + 1):
        total = total + partials[(rank + step) % size][mine]
    return total


def gemm_rs(group, dtype, m, n, k):
    dtype, size, rank = getattr(torch, dtype), dist.get_world_size(group), dist.get_rank(group)
    xs = [normal((m, k), 2 * source, dtype) for source in range(size)]
    ws = [normal((n, k), 2 * source + 1, dtype) for source in range(size)]
    right = sum(x.double() @ w.double().T for x, w in zip(xs, ws, strict=True))[rows_slice(m, size, rank)]
    torchs = reduce_scatter([x @ w.T for x, w in zip(xs, ws, strict=True)], group)
    found = []
    for schedule in schedules(dtype):
        with fluxlike.create_gemm_rs_context(m, n, dtype=dtype, group=group, schedule=schedule) as ctx:
            ours = fluxlike.gemm_rs(xs[rank], ws[rank], ctx)
            found += too_large(f"gemm_rs {m, n, k} {dtype} {schedule} rank {rank} of {size}", ours, torchs, right)
            assert ctx.last_path.startswith(schedule)
            assert ctx.stats["launches"] == launches("gemm_rs", schedule, m, size, rank)
    found += too_large(f"reference.gemm_rs {dtype}", fluxlike.reference.gemm_rs(xs[rank], ws[rank], group=group), torchs, right)
    assert not found, "\n".join(found)


def ag_gemm(group, dtype, m, n, k):
    dtype, size, rank = getattr(torch, dtype), dist.get_world_size(group), dist.get_rank(group)
    x, w = normal((m, k), 100, dtype), normal((n, k), 101 + rank, dtype)
    shard = x[rows_slice(m, size, rank)].contiguous()
    right, torchs = x.double() @ w.double().T, x @ w.T
    found: list[str] = []
    for schedule in schedules(dtype):
        with fluxlike.create_ag_gemm_context(m, n, k, dtype, group, schedule) as ctx:
            ours, gathered = fluxlike.ag_gemm(shard, w, ctx, m=m, return_gathered=True)
            found += too_large(f"ag_gemm {m, n, k} {dtype} {schedule} rank {rank} of {size}", ours, torchs, right)
            assert torch.equal(gathered, x), f"gathered {dtype} {schedule}: a copy has no rounding"
            assert ctx.last_path.startswith(schedule)
            assert ctx.stats["launches"] == launches("ag_gemm", schedule, m, size, rank, True)
    found += too_large(f"reference.ag_gemm {dtype}", fluxlike.reference.ag_gemm(shard, w, group=group, m=m), torchs, right)
    assert not found, "\n".join(found)


DTYPES = ("bfloat16", *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in ("float16", "float32")))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("world", "m"), ((2, 128), (3, 97), (4, 96)))
def test_gemm_rs_error(world, m, dtype):
    run_ranks(gemm_rs, world, dtype=dtype, m=m, n=80, k=200)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("world", "m"), ((1, 64), (4, 97)))
def test_ag_gemm_error(world, m, dtype):
    run_ranks(ag_gemm, world, dtype=dtype, m=m, n=80, k=500)

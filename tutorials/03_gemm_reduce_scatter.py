"""Tutorial 3: GEMM + ReduceScatter, the row-parallel layer of a tensor-parallel model.

Each of R ranks holds a part of K: x [M, K/R] and weight [N, K/R]. Their product is a *partial sum* of the whole result, and
rank r wants the sum of all partial sums, for its own rows only:

    y [M/R, N]  =  rows of r of  sum over ranks of  x · weightᵀ

Torch does it in two steps: first the tensor cores work and the wires rest, then the other way round. fluxlike is one kernel:

    torch      | x · weightᵀ                                     | reduce_scatter           |
    fluxlike   | rows of r+1 | rows of r+2 | … | own rows, + add |
    the wire                 | to r+1      | to r+2 … |             at any time, no two ranks send to the same one

The rows of the others are computed first and sent while the next are computed. The tiles of the own rows come last: the
partial sums of the others have arrived by then, are added in fp32 in a fixed order, and the sum is rounded once. The signals:

    signal (A): a tile or chunk is in its owner's slot  --->  wait (A): the owner's tile, before it adds
    signal (B): `finish`, the call's slots are read     --->  wait (B): `wait_credits`, before the slots are written again

`--schedule copy_engine` lets the GPU's copy engines carry the chunks beside the kernel, `in_kernel` stores the tiles to the peer
from the kernel itself. `auto` decides by size, and may also leave the product to torch (cuBLAS), in one piece for few rows or a
chunk at a time; few rows on a GPU may also be multiplied and exchanged by another kernel of ours (…/fused). `ctx.last_path` says
which it was and who multiplied: …/tma and …/pointer are the kernel's two ways to load its operands, …/torch is torch.
kernels/gemm_rs.py has the details.

The checks: with integers so small that every sum is exact, every bit must agree; with random numbers, the error against fp64
may be at most 1.5 times that of torch's own path; on repeats no bit may change, whichever rank is late.

Run: bash scripts/launch.sh tutorials/03_gemm_reduce_scatter.py [--m 16384 --n 12288 --k 49152] [--schedule in_kernel] …
M, N and K are those of the whole problem, and may be any: ranks share rows and K as torch.chunk would.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import fluxlike
from fluxlike.kernels.tiles import chunk_rows, rows_of
from fluxlike.tools.once import Parser, positive

GPU, CPU = {"m": 8192, "n": 8192, "k": 28672}, {"m": 256, "n": 192, "k": 256}
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # torch 2.13 renamed it


def unfused(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The two steps in torch: all of the product, then all of the communication."""
    m, size = x.shape[0], dist.get_world_size()
    full = chunk_rows(m, size)
    partial = x @ w.T
    if m < full * size:  # its rows must be the same on all ranks
        partial = F.pad(partial, (0, 0, 0, full * size - m))
    y = partial.new_empty(full, w.shape[0])
    reduce_scatter(y, partial)
    return y[: rows_of(m, size, dist.get_rank())]


def is_exact(x: torch.Tensor, w: torch.Tensor, k: int, ctx: Any) -> bool:
    """±1 in w, and so few ±1 in x (0 elsewhere) that no sum of K products leaves what 16 bits hold exactly."""
    x, w = torch.sign(x) * (torch.rand_like(x, dtype=torch.float32) < 1300 / k), torch.sign(w)
    return torch.equal(fluxlike.gemm_rs(x, w, ctx), fluxlike.reference.gemm_rs(x, w))


def errors(results: list[torch.Tensor], x: torch.Tensor, w: torch.Tensor) -> list[float]:
    """Largest error of each result against fp64, over all ranks, on some 32 rows a rank (0 for a rank without rows)."""
    m, size, rank = x.shape[0], dist.get_world_size(), dist.get_rank()
    full = chunk_rows(m, size)
    some = [list(range(0, rows_of(m, size, r), 1 + rows_of(m, size, r) // 32)) for r in range(size)]
    exact = x[[r * full + i for r in range(size) for i in some[r]]].double() @ w.T.double()
    dist.all_reduce(exact)
    mine = exact.split([len(rows) for rows in some])[rank]
    worst = torch.stack([F.pad((y[some[rank]].double() - mine).abs().flatten(), (0, 1)).amax() for y in results])
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.tolist()


def milliseconds(calls: list[Callable[[], torch.Tensor]], iters: int) -> list[float]:
    """Of each call: median of ten rounds, slowest rank. The calls take turns, so that all meet the same clocks."""
    rounds: list[list[float]] = [[] for _ in calls]
    for turn in range(12):
        for call, times in zip(calls, rounds, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            dist.barrier()
            start.record()
            for _ in range(iters):
                call()
            end.record()
            end.synchronize()
            if turn >= 2:  # the first rounds warm up
                times.append(start.elapsed_time(end) / iters)
    slowest = torch.tensor([statistics.median(times) for times in rounds])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist()


def path(ctx: Any) -> str:
    """How the last call was made, and by whom: torch multiplies where the path ends with its name."""
    return f"path {ctx.last_path}, {'torch' if ctx.last_path.endswith('/torch') else 'fluxlike'} multiplied"


def main(args: argparse.Namespace) -> int:
    m, n, k, rank, size = args.m, args.n, args.k, dist.get_rank(), dist.get_world_size()
    faults = []
    with fluxlike.create_gemm_rs_context(m, n, dtype=getattr(torch, args.dtype), schedule=args.schedule) as ctx:
        generator = torch.Generator(ctx.device).manual_seed(rank)
        make = {"generator": generator, "device": ctx.device, "dtype": ctx.dtype}
        part = rows_of(k, size, rank)  # this rank's part of K
        x, w = torch.randn(m, part, **make), torch.randn(n, part, **make)
        y = fluxlike.gemm_rs(x, w, ctx)  # <- all that a model would have to write
        if rank == 0:
            print(f"{size} ranks, x {list(x.shape)} · weight {list(w.shape)}ᵀ -> y {list(y.shape)}, {path(ctx)}")
        if not args.no_check:
            if not is_exact(x, w, k, ctx):
                faults.append("integers are not exact")
            ours, torchs = errors([y, unfused(x, w)], x, w)
            if not ours <= 1.5 * torchs:
                faults.append(f"error {ours:.3g} is more than 1.5 × torch's {torchs:.3g}")
            if not all(torch.equal(fluxlike.gemm_rs(x, w, ctx), y) for _ in range(3)):
                faults.append("a repeat gave other bits")
            if rank == 0:
                print(f"largest error against fp64: {ours:.3g} here, {torchs:.3g} with torch's two steps")
        if ctx.device.type == "cuda":
            fused, two_steps = milliseconds([lambda: fluxlike.gemm_rs(x, w, ctx), lambda: unfused(x, w)], args.iters)
            if rank == 0:
                work = 2e-9 * m * n * k / size  # so that work / ms is TFLOP/s of each GPU
                print(f"fluxlike      {fused:8.3f} ms  {work / fused:6.1f} TFLOP/s a GPU, {path(ctx)}")
                print(f"torch + NCCL  {two_steps:8.3f} ms  {work / two_steps:6.1f} TFLOP/s a GPU")
                print(f"speed-up      {two_steps / fused:8.3f} ×")
        elif rank == 0:
            print("no GPU: the interpreter's times mean nothing, so none is given")
        ctx.check()  # a wait that ran out on a GPU is known only now
    said: list[list[str]] = [[] for _ in range(size)]
    dist.all_gather_object(said, faults)
    found = "; ".join(f"rank {r}: {fault}" for r, theirs in enumerate(said) for fault in theirs)
    if rank == 0:
        done = "nothing, as asked" if args.no_check else "exact on integers, error within the rule, same bits on repeats"
        print(f"check FAILED: {found}" if found else f"check passed: {done}")
    return int(bool(found))


if __name__ == "__main__":
    parser = Parser()
    for name, default in (GPU if torch.cuda.is_available() else CPU).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--schedule", choices=["auto", "copy_engine", "in_kernel"], default="auto")
    parser.add_argument("--iters", type=int, default=10, help="calls in a timed round")
    parser.add_argument("--no-check", action="store_true")
    args = parser.parse_args()
    positive(parser, args, ("m", "n", "k", "iters"))
    fluxlike.init()
    try:
        status = main(args)
    finally:
        fluxlike.finalize()
    sys.exit(status)

"""Tutorial 4: AllGather + GEMM, the column-parallel layer of a tensor-parallel model.

Each of R ranks holds some rows of the input (its part of the sequence) and some columns of the result:

    z [M, N/R]  =  (x_shard [M/R, K] of all ranks, one below the other) · weight [N/R, K]ᵀ

Torch gathers all rows first and multiplies then. fluxlike begins with the rows that it has; the others arrive meanwhile:

    torch      | all_gather           | x · weightᵀ                                   |
    fluxlike   | own rows · weightᵀ | rows of r+1 | rows of r+2 | …                  |
    the wire   | from r+1 | from r+2 | …                           every owner s sends to s-1 first, then to s-2, …

The order in which shards are sent is the order in which they are needed, so a tile seldom waits. That is by copy engines; with
`--schedule in_kernel` some programs of the kernel push to all peers at once. The signals:

    signal (A): a shard, or rows of it, has arrived     --->  wait (A): each tile, for just the rows that it reads
    signal (B): `finish`, the call's slots are read     --->  wait (B): `wait_credits`, before the slots are written again

Nothing is lost that the two steps offer:

* *several weights for one input* (query, key and value; gate and up): give a list, the input is gathered once;
* *the gathered input itself* (for a residual or for the backward pass): `return_gathered=True`.

Where the rows do not divide evenly, ranks hold them as torch.chunk splits them, and `m` says how many there are in all. The
last rank may have fewer rows than the others, or none. kernels/ag_gemm.py has the protocol with all details. The checks are
those of tutorial 3, which also says what a path is.

Run: bash scripts/launch.sh tutorials/04_all_gather_gemm.py [--m 16384 --n 49152 --k 12288] [--schedule in_kernel] …
M, N and K are those of the whole problem, and may be any.
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

GPU, CPU = {"m": 8192, "n": 28672, "k": 8192}, {"m": 256, "n": 192, "k": 256}
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renamed it


def gather(x: torch.Tensor, m: int) -> torch.Tensor:
    """The shards of all ranks, by torch."""
    size = dist.get_world_size()
    full = chunk_rows(m, size)
    if x.shape[0] < full or m < full * size:  # the shards must be the same on all ranks
        x = F.pad(x, (0, 0, 0, full - x.shape[0]))
    gathered = x.new_empty(full * size, x.shape[1])
    all_gather(gathered, x)
    return gathered[:m]


def unfused(x: torch.Tensor, w: torch.Tensor, m: int) -> torch.Tensor:
    """The two steps in torch: all of the communication, then all of the product."""
    return gather(x, m) @ w.T


def is_exact(x: torch.Tensor, w: torch.Tensor, m: int, ctx: Any) -> bool:
    """Integers whose sums 16 bits hold exactly: two weights in one call, and the gathered input, against plain torch."""
    x, w = torch.sign(x) * (torch.rand_like(x, dtype=torch.float32) < 1300 / x.shape[1]), torch.sign(w)
    gate, up = w.tensor_split(2)  # about as many columns of the result each
    (a, b), gathered = fluxlike.ag_gemm(x, [gate, up], ctx, m=m, return_gathered=True)
    (a0, b0), gathered0 = fluxlike.reference.ag_gemm(x, [gate, up], m=m, return_gathered=True)
    return torch.equal(a, a0) and torch.equal(b, b0) and torch.equal(gathered, gathered0)


def errors(results: list[torch.Tensor], gathered: torch.Tensor, w: torch.Tensor) -> list[float]:
    """Largest error of each result against fp64, over all ranks, on about 128 rows."""
    step = 1 + gathered.shape[0] // 128
    exact = gathered[::step].double() @ w.T.double()
    # a rank may have no columns, so a zero is added
    worst = torch.stack([F.pad((z[::step].double() - exact).abs().flatten(), (0, 1)).amax() for z in results])
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.tolist()


def milliseconds(calls: list[Callable[[], Any]], iters: int) -> list[float]:
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
    with fluxlike.create_ag_gemm_context(m, n, k, dtype=getattr(torch, args.dtype), schedule=args.schedule) as ctx:
        generator = torch.Generator(ctx.device).manual_seed(rank)
        make = {"generator": generator, "device": ctx.device, "dtype": ctx.dtype}
        x, w = torch.randn(rows_of(m, size, rank), k, **make), torch.randn(rows_of(n, size, rank), k, **make)
        z, gathered = fluxlike.ag_gemm(x, w, ctx, m=m, return_gathered=True)
        if rank == 0:
            print(f"{size} ranks, x {list(x.shape)}, weight {list(w.shape)} -> z {list(z.shape)}, {path(ctx)}")
        if not args.no_check:
            if not is_exact(x, w, m, ctx):
                faults.append("integers are not exact")
            whole = gather(x, m)
            if not torch.equal(gathered, whole):
                faults.append("the gathered input is not torch's")
            ours, torchs = errors([z, whole @ w.T], whole, w)
            if not ours <= 1.5 * torchs:
                faults.append(f"error {ours:.3g} is more than 1.5 × torch's {torchs:.3g}")
            if not all(torch.equal(fluxlike.ag_gemm(x, w, ctx, m=m), z) for _ in range(3)):
                faults.append("a repeat gave other bits")
            if rank == 0:
                print(f"largest error against fp64: {ours:.3g} here, {torchs:.3g} with torch's two steps")
        if ctx.device.type == "cuda":
            calls = [lambda: fluxlike.ag_gemm(x, w, ctx, m=m), lambda: unfused(x, w, m)]
            fused, two_steps = milliseconds(calls, args.iters)
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

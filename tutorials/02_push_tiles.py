"""Tutorial 2: push a matrix to a neighbour, tile by tile.

Tutorial 1 sent one word. Here every rank sends a matrix x [M, N] to its right neighbour, which adds it to its own:

    y = x + (x of the left neighbour)

The matrix travels in tiles, and every tile has a flag of its own: the neighbour adds the first before the last is sent. This
hides communication: `gemm_rs` has a matrix product in front of the store, `ag_gemm` has one behind the wait.

    rank r                                                  rank r+1
    for each tile:                                          for each tile:
      load it from x
      store it into slot set `slot` of r+1
      signal (A): flag[tile] at r+1 = epoch    ------->       wait (A): flag[tile] >= epoch
                                                              load it from the own slot set, add, store to y
    wait (B): r+1 has read call epoch-2        <-------     signal (B): `finish`, after its last tile

*Pushing* (a store to the peer) beats pulling (a load from it): a store needs no answer, so nothing waits for the distance.

*Slots.* The matrix of call n must not overwrite what the neighbour still reads of call n-1. So there are two slot sets, used
in turn (the parity of the epoch), and each rank tells its peers when it has read a call: the *credit* (B), one word a peer
that only grows. `wait_credits` asks for the call that used this slot set last, the last but one: it has almost always been
read, so the wait does not wait. A fast rank may run ahead by a call, and nobody needs a barrier.

*No deadlock.* Every program sends all its tiles before it waits for one. Besides, `ctx.programs` gives no more programs
than the GPU has multiprocessors, so all of them run at the same time and none waits for one that has not begun.

Run: bash scripts/launch.sh tutorials/02_push_tiles.py [--m M] [--n N] [--calls C]
"""

import argparse
import sys
import time

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import fluxlike
from fluxlike.kernels import sync
from fluxlike.kernels.blocks import load_a, store_block
from fluxlike.kernels.sync import EPOCH, WAIT_SIGNAL, finish, is_last_program, peer_address, publish_set, wait, wait_credits
from fluxlike.kernels.tiles import cdiv
from fluxlike.ops.context import Context
from fluxlike.ops.group import resolve
from fluxlike.ops.tiling import Tiling
from fluxlike.tools.once import Parser

GPU, CPU = {"m": 8192, "n": 8192, "calls": 6}, {"m": 200, "n": 300, "calls": 6}
TILE = Tiling(bm=64, bn=128, bk=1, group_m=1, warps=4, stages=1, tma=False)


@triton.jit(do_not_specialize=["rank"])
def push_kernel(x, y, data, flags, ctl, M, N, slot_stride, rank, R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    epoch = tl.load(ctl + EPOCH) + 1
    slot = (epoch & 1).to(tl.int32)
    left = (rank + R - 1) % R
    right = (rank + 1) % R
    here = data + slot.to(tl.int64) * slot_stride
    there = peer_address(data, ctl, rank, right) + slot.to(tl.int64) * slot_stride
    flags_there = peer_address(flags, ctl, rank, right)
    tiles_n = tl.cdiv(N, BN)
    tiles = tl.cdiv(M, BM) * tiles_n

    wait_credits(ctl, slot, rank, R)  # wait (B): this slot set has been read
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = tile // tiles_n * BM
        column = tile % tiles_n * BN
        block = load_a(x, row, column, M, N, N, BM, BN, False)
        store_block(there, block, row, column, M, N, N, BM, BN)
        publish_set(flags_there + tile, epoch, False)  # signal (A)

    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = tile // tiles_n * BM
        column = tile % tiles_n * BN
        block = load_a(x, row, column, M, N, N, BM, BN, False)
        wait(flags + tile, epoch, ctl, rank, WAIT_SIGNAL, left, R)  # wait (A)
        block += load_a(here, row, column, M, N, N, BM, BN, False)
        store_block(y, block, row, column, M, N, N, BM, BN)

    if is_last_program(ctl, False):
        finish(ctl, slot, rank, epoch, R)  # signal (B): this call's slots have been read; EPOCH = epoch


def push(ctx: Context, x: torch.Tensor) -> torch.Tensor:
    """x of this rank plus x of its left neighbour."""
    y = torch.empty_like(x)
    args = (x, y, ctx.data, ctx.flags, ctx.ctl, *x.shape, ctx.set_elements, ctx.rank)
    with ctx.start("in_kernel", TILE):
        ctx.launch(push_kernel, ctx.programs(ctx.max_flags), args, {"R": ctx.size, "BM": TILE.bm, "BN": TILE.bn}, TILE)
    return y


def gigabytes_per_second(ctx: Context, x: torch.Tensor) -> float:
    """What leaves each GPU, and comes in at the same time: median call, slowest rank."""
    times: list[float] = []
    while len(times) < 20:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        push(ctx, x)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    slowest = torch.tensor(sorted(times)[10])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return x.numel() * x.element_size() / float(slowest) / 1e6


def main(args: argparse.Namespace) -> int:
    m, n, dtype = args.m, args.n, torch.bfloat16
    flags = cdiv(m, TILE.bm) * cdiv(n, TILE.bn)
    with Context("push", resolve(None), dtype, "in_kernel", flags=flags, data=m * n) as ctx:
        rank, size = ctx.rank, ctx.size

        def matrix(owner: int, call: int) -> torch.Tensor:
            generator = torch.Generator(ctx.device).manual_seed(1000 * call + owner)
            return torch.randint(-64, 65, (m, n), generator=generator, device=ctx.device).to(dtype)  # sums are exact

        good = True
        for call in range(1, args.calls + 1):
            mine, theirs = matrix(rank, call), matrix((rank - 1) % size, call)
            if rank == call % size:
                time.sleep(0.2)  # somebody is late: the others wait for their tiles, not for their turn
            y = push(ctx, mine)
            good &= torch.equal(y, mine + theirs)
            if rank == 0:
                epoch, used = int(ctx.ctl[sync.EPOCH.value]), [int(ctx.ctl[sync.LAST_USE.value + p]) for p in (0, 1)]
                print(f"call {call}: epoch {epoch}, slot set {epoch % 2}, slot sets last used by calls {used}")
        if ctx.device.type == "cuda":
            speed = gigabytes_per_second(ctx, mine)
            if rank == 0:
                print(f"{m}×{n} {dtype}: {speed:.0f} GB/s from each GPU to the next, the addition included")
        ctx.check()
    failed = torch.tensor([not good], dtype=torch.int32)
    dist.all_reduce(failed)
    if rank == 0:
        print(f"check FAILED: on {int(failed)} ranks" if failed else "check passed: every tile of every call is exact")
    return int(failed > 0)


def counted(text: str) -> int:
    """A size or a number of calls, as the type of an argument: none would show nothing."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a whole number above 0")
    return number


if __name__ == "__main__":
    parser = Parser()
    for name, default in (GPU if torch.cuda.is_available() else CPU).items():
        parser.add_argument(f"--{name}", type=counted, default=default)
    args = parser.parse_args()
    fluxlike.init()
    try:
        status = main(args)
    finally:
        fluxlike.finalize()
    sys.exit(status)

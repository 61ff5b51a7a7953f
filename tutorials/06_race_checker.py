"""Tutorial 6: find the missing order with the race checker.

Your first kernel on the symmetric heap gives right results. Is it right? A signal that does not order the data before it hardly
ever goes wrong: the data is on its way first, and mostly there first. On another GPU, with another load on the link, it is not.

Here every rank smooths its part of a long ring of numbers, and needs the last number of its left neighbour for that:

    y[i] = (x[i-1] + x[i]) / 2          x[-1] is the left neighbour's x[N-1]

    rank r                                                  rank r+1
    store x[N-1] into `halo` of r+1
    signal (A): flag at r+1 = epoch          ------->       wait (A): flag >= epoch
                                                            load it from the own `halo`
    wait (B): r+1 has read call epoch-2      <-------       signal (B): `finish`

The signal is written by hand, and there is a bug in it: `sem="relaxed"` sets the flag, but says nothing of the store before it.
(`publish_set` of fluxlike.kernels.sync has the right order, and on a GPU waits for the program's other threads.)

Part 1 runs it: all results are right. No test that looks at results will find this bug on this machine.

Part 2 runs the same program with the race checker. It does not look at results. It follows what orders what: a release by one
program, an acquire of the same word by another, launches, barriers of the host. Two accesses to the same bytes, one of them a
write, which nothing orders, are a race, however far apart they came. It reports the first and stops:

* `first` and `second`: who touched the same bytes, and in which line;
* `Its next signal`: what could have ordered them. It was `relaxed`, "which publishes nothing".

Part 3 has `sem="release"`, and the checker has nothing to say.

You need not change a program for this. Any program that runs on the CPU heap is checked by

    bash scripts/launch.sh -m fluxlike racecheck my_program.py

docs/racecheck.md tells what it sees, what not, and how to name your own buffers. On GPUs only the mended kernel is run.

Run: bash scripts/launch.sh tutorials/06_race_checker.py
"""

import os
import sys

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import fluxlike
from fluxlike.kernels.lang import drain_stores
from fluxlike.kernels.sync import EPOCH, WAIT_SIGNAL, finish, is_last_program, peer_address, wait, wait_credits
from fluxlike.ops.context import Context
from fluxlike.ops.group import resolve
from fluxlike.ops.tiling import Tiling
from fluxlike.runtime.errors import RaceError

ONE_PROGRAM = Tiling(bm=1, bn=1, bk=1, group_m=1, warps=4, stages=1, tma=False)
N, CALLS = 1000, 5


@triton.jit(do_not_specialize=["rank"])
def smooth_kernel(x, y, halo, flag, ctl, N, rank, R: tl.constexpr, BLOCK: tl.constexpr, ORDER: tl.constexpr):
    epoch = tl.load(ctl + EPOCH) + 1
    slot = (epoch & 1).to(tl.int32)  # two places in turn, as in tutorial 2
    left = (rank + R - 1) % R
    right = (rank + 1) % R

    wait_credits(ctl, slot, rank, R)  # wait (B)
    tl.store(peer_address(halo, ctl, rank, right) + slot, tl.load(x + N - 1))
    drain_stores(False)
    tl.atomic_xchg(peer_address(flag, ctl, rank, right), epoch, sem=ORDER, scope="sys")  # signal (A)

    i = tl.arange(0, BLOCK)
    here = tl.load(x + i, mask=i < N, other=0.0)
    before = tl.load(x + i - 1, mask=(i > 0) & (i < N), other=0.0)
    wait(flag, epoch, ctl, rank, WAIT_SIGNAL, left, R)  # wait (A)
    before = tl.where(i == 0, tl.load(halo + slot), before)
    tl.store(y + i, (before + here) / 2, mask=i < N)

    if is_last_program(ctl, False):
        finish(ctl, slot, rank, epoch, R)  # signal (B)


def smooth(ctx: Context, x: torch.Tensor, order: str) -> torch.Tensor:
    """The mean of each number and the one before it, round the ring of all ranks."""
    y = torch.empty_like(x)
    args = (x, y, ctx.data, ctx.flags, ctx.ctl, len(x), ctx.rank)
    with ctx.start("in_kernel", ONE_PROGRAM):
        ctx.launch(smooth_kernel, 1, args, {"R": ctx.size, "BLOCK": 1024, "ORDER": order}, ONE_PROGRAM)
    return y


def run(order: str) -> bool:
    """Some calls, one after the other; whether all results of this rank are right."""
    good = True
    with Context("halo", resolve(None), torch.float32, "in_kernel", flags=1, data=2) as ctx:
        for call in range(CALLS):
            ring = torch.arange(N * ctx.size, device=ctx.device, dtype=torch.float32) + call
            mine = slice(N * ctx.rank, N * (ctx.rank + 1))
            y = smooth(ctx, ring[mine].clone(), order)
            good &= torch.equal(y, ((ring.roll(1) + ring) / 2)[mine])
        ctx.check()
    return good


def checked(order: str) -> str:
    """`run` on a new heap that is checked: the report of the first race, "" if there is none, "wrong" if a result is."""
    os.environ["FLUXLIKE_RACECHECK"] = "1"  # read by init; -m fluxlike racecheck sets it, too
    fluxlike.init(heap="shm")
    try:
        return "" if run(order) else "wrong"
    except RaceError as error:
        return str(error)
    finally:
        fluxlike.finalize()


def everyone(good: bool) -> bool:
    """Whether it is so on every rank."""
    failed = torch.tensor([not good], dtype=torch.int32)
    dist.all_reduce(failed)
    return int(failed) == 0


def planted_and_mended() -> bool:
    """The three parts, on the CPU."""
    first = dist.get_rank() == 0
    os.environ["FLUXLIKE_RACECHECK"] = "0"
    fluxlike.init(heap="shm")
    unseen = everyone(run("relaxed"))
    fluxlike.finalize()
    if first:
        print(f"part 1: relaxed, not checked: {'all results are right' if unseen else 'some results are wrong'}")

    report = checked("relaxed")
    found = everyone("race on halo.data" in report and "(relaxed, sys;" in report)
    if first:
        print(f"part 2: relaxed, checked:\n{report}")

    report = checked("release")
    clean = everyone(report == "")
    if first:
        print(f"part 3: release, checked: {'no race, all results are right' if clean else report}")
    return found and clean


def mended_only(why: str) -> bool:
    """The kernel with the right order, not checked."""
    fluxlike.init()
    if dist.get_rank() == 0:
        print(f"{why}; here the mended kernel runs, unchecked")
    good = everyone(run("release"))
    fluxlike.finalize()
    return good


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit("start the program with scripts/launch.sh or torchrun, which make the ranks")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    proof = "the mended kernel is right"
    if torch.cuda.is_available():
        passed = mended_only("the race checker works on the CPU heap only, on a machine without GPUs")
    elif size == 1:
        passed = mended_only("one rank has no neighbour to race with, start two or more (--nproc 2)")
    else:
        dist.init_process_group("gloo")  # here and not in fluxlike.init, because it outlives three of those
        passed = planted_and_mended()
        dist.barrier()  # nobody leaves while a peer still talks to it
        dist.destroy_process_group()
        proof = "the race was found, and is gone with the right order"
    if rank == 0:
        print(f"check passed: {proof}" if passed else "check FAILED")
    sys.exit(not passed)

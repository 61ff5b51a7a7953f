"""Tutorial 1: the symmetric heap, and signals.

A *symmetric heap* is memory that every rank allocates in the same way and that every rank has mapped. An object has the
same offset in every rank's block, so an address on this rank turns into the address on a peer by adding a difference:

              rank 0            rank 1            rank 2         block.addresses, as mapped on this rank
            +---------+       +---------+       +---------+  <-  base of rank i
  offset 0  | signals |       | signals |       | signals |
            | flags   |       | flags   |       | flags   |      peer's address = own address - own base + peer's base
            | data    |       | data    |       | data    |
            +---------+       +---------+       +---------+

On GPUs the blocks come from NVSHMEM and a peer's address goes over NVLink; on a CPU they are memory that the processes
share, and Triton's interpreter runs the kernel. The kernel cannot tell.

Part 1 writes to a neighbour from the host. Nothing tells the neighbour that the data is there, so the host must do it: wait
for the device, then a barrier of all ranks. That costs more than many a kernel, and is what signals do away with.

Part 2 sends a token round the ring, r -> r+1, in one kernel launch a lap. Every rank appends its number to the token:

    writer, rank r                                        reader, rank r+1
    store the token into the memory of r+1
    signal (A): publish_set(flag at r+1, epoch)  ----->   wait (A): until its flag >= epoch
                                                          load the token

* *Release and acquire.* The signal is a release: who sees it sees all that was stored before it. The wait is an acquire:
  nothing after it is read early. Leave out either and the token may arrive after its flag.
* *Epochs.* The flag holds the number of the call and is never reset. A wait for ">= 5" cannot be fooled by what call 4 left
  behind, and no call needs a memset or a barrier. The number is kept in device memory (the context's control block `ctl`)
  and the kernel itself advances it (`finish`), so it is right when a CUDA graph replays the launch, too.
* *May the token be overwritten before it is read?* Rank r writes in lap n+1 only after it got the token of that lap; the
  token started at rank 0 after lap n had come back there, so after everybody had read it. A chain of signals is a proof; the
  kernels of later tutorials have no such chain, and ask for *credits* instead.

Part 3 loses a signal on purpose. A wait without a deadline would hang the GPU, and a stuck job says nothing. Here every wait
is bounded: it gives up, tells the peers, and the host raises `fluxlike.PeerTimeout`: who waited for whom, and for what.

Run: bash scripts/launch.sh tutorials/01_symmetric_heap.py
"""

import functools
import os
import sys

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import fluxlike
from fluxlike.kernels.sync import EPOCH, WAIT_SIGNAL, finish, is_last_program, peer_address, publish_set, wait
from fluxlike.ops.context import Context
from fluxlike.ops.group import resolve
from fluxlike.ops.tiling import Tiling

ONE_WARP = Tiling(bm=1, bn=1, bk=1, group_m=1, warps=1, stages=1, tma=False)
LAPS = 5


# rank and lost_at change from process to process: not specialised, so that a value of 1 stays a number like any other
@triton.jit(do_not_specialize=["rank", "lost_at"])
def ring_kernel(token, flag, got, ctl, rank, lost_at, R: tl.constexpr):
    """One lap: rank 0 starts a token with the call number, each rank appends a digit, rank 0 waits for it to come back."""
    epoch = tl.load(ctl + EPOCH) + 1
    left = (rank + R - 1) % R
    right = (rank + 1) % R
    token_there = peer_address(token, ctl, rank, right)
    flag_there = peer_address(flag, ctl, rank, right)

    wait(flag, tl.where(rank > 0, epoch, 0), ctl, rank, WAIT_SIGNAL, left, R)  # wait (A); rank 0 starts: 0 never waits
    value = tl.where(rank > 0, tl.load(token), epoch)
    tl.store(token_there, value * 10 + rank)
    if rank != lost_at:
        publish_set(flag_there, epoch, False)  # signal (A) to the right neighbour
    wait(flag, tl.where(rank == 0, epoch, 0), ctl, rank, WAIT_SIGNAL, left, R)  # wait (A) of rank 0: the lap is over
    if rank == 0:  # the others have read it already, and may not again: rank 0 is perhaps in the next lap
        value = tl.load(token)
    tl.store(got, value)
    if is_last_program(ctl, False):
        finish(ctl, (epoch & 1).to(tl.int32), rank, epoch, R)  # this call is over: EPOCH = epoch


def open_ring() -> Context:
    """A word for the token and a flag, on every rank. Collective."""
    return Context("ring", resolve(None), torch.int64, "in_kernel", flags=1, data=1)


def lap(ctx: Context, lost_at: int = -1) -> torch.Tensor:
    """Send the token round once; returns what this rank received (after `check`, on a GPU)."""
    got = torch.zeros(1, dtype=torch.int64, device=ctx.device)
    with ctx.start("in_kernel", ONE_WARP):
        ctx.launch(ring_kernel, 1, (ctx.data, ctx.flags, got, ctx.ctl, ctx.rank, lost_at), {"R": ctx.size}, ONE_WARP)
    return got


def write_from_the_host(ctx: Context) -> bool:
    """Part 1: the peers' views, and what it takes without signals."""
    data = slice(ctx.offsets["data"], ctx.offsets["data"] + 8)
    right, left = (ctx.rank + 1) % ctx.size, (ctx.rank - 1) % ctx.size
    theirs = ctx.block.view(right)[data].view(torch.int64)  # the neighbour's memory, as a tensor of this process
    theirs.copy_(torch.tensor([100 + ctx.rank]))
    ctx.world.executor.synchronize()
    ctx.control.barrier("tutorial 1: the data has arrived")
    return int(ctx.data[0]) == 100 + left


def lose_a_signal() -> bool:
    """Part 3: the last rank forgets its signal, and rank 0 waits for it in vain, but not for ever."""
    os.environ["FLUXLIKE_TIMEOUT_S"] = "1"  # read when a context is made; the default is two minutes
    said = ""
    with open_ring() as ctx:
        try:
            lap(ctx, lost_at=ctx.size - 1)
            ctx.check()  # on a GPU the launch returned at once: wait for it, and see whether a wait ran out
        except fluxlike.PeerTimeout as error:
            said = str(error)
        if ctx.rank == 0:
            print(f"  {said}")
    return bool(said) or ctx.rank > 0


def main() -> int:
    with open_ring() as ctx:
        rank, size = ctx.rank, ctx.size
        good = write_from_the_host(ctx)
        if rank == 0:
            print(f"{size} ranks, heap '{ctx.world.executor.name}', blocks at {[hex(a) for a in ctx.block.addresses]}")
            print(f"part 1: rank 0 found {int(ctx.data[0])}, from its left neighbour")
        ctx.control.barrier("tutorial 1: everyone has looked")  # part 2 writes to the same word
        laps = [lap(ctx) for _ in range(LAPS)]  # no synchronisation between the laps
        ctx.check()
        for epoch, got in enumerate(laps, 1):
            good &= int(got) == functools.reduce(lambda value, hop: value * 10 + hop, range(rank or size), epoch)
            if rank == 0:
                print(f"part 2: lap {epoch} came back as {int(got)}")
    if rank == 0:
        print("part 3: a signal is lost")
    good &= lose_a_signal()
    failed = torch.tensor([not good], dtype=torch.int32)
    dist.all_reduce(failed)
    if rank == 0:
        print(f"check FAILED: on {int(failed)} ranks" if failed else f"check passed: {LAPS} laps of {size} ranks, 1 lost signal")
    return int(failed > 0)


if __name__ == "__main__":
    fluxlike.init()
    try:
        status = main()
    finally:
        fluxlike.finalize()
    sys.exit(status)

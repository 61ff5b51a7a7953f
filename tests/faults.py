"""What the tests of faults share: contexts and calls that check themselves, and that nothing is left behind."""

import gc
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import IN_FP32, AGCase, RSCase, same
from ranks import RANKS_PER_GPU, TORCHRUN, Outcome, run_fresh

import fluxlike

WORLD = 3
GUILTY = 1
LIMIT_S = 3.0
HEAP = 16 << 20
OPS = ("gemm_rs", "ag_gemm")
#: For tests whose processes are new: on the CPU, and, where pytest is started plainly with ``-m gpu``, on one GPU each.
HEAPS = ("shm", pytest.param("nvshmem", marks=pytest.mark.gpu))

_pids: list[int | None] = []


def _files() -> set[str]:
    """What lies in /dev/shm, but for the semaphores of Python programs that run beside the tests.

    And but for what CUDA and NVSHMEM keep there for processes that share a GPU, and leave where one is killed.
    """
    theirs = ("sem.mp-", *(("cuda.shm.", "mps_shm_") if RANKS_PER_GPU > 1 else ()))
    return {name for name in os.listdir("/dev/shm") if not name.startswith(theirs)}


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """No file in /dev/shm and no process that was not there before. For a test file to import."""
    before = _files()
    _pids.clear()
    yield
    if TORCHRUN:  # NCCL and others keep files there
        return
    left = sorted(_files() - before)
    assert not left, f"files in /dev/shm: {left}"
    deadline = time.monotonic() + 5
    while alive := [pid for pid in _pids if os.path.exists(f"/proc/{pid}")]:
        assert time.monotonic() < deadline, f"processes {alive} are still there"
        time.sleep(0.05)


def fresh(body, world=WORLD, env=None, **how) -> list[Outcome]:
    outcomes = run_fresh(body, world, env, **how)
    _pids.extend(outcome.pid for outcome in outcomes)
    return outcomes


def start(heap_bytes: int = HEAP) -> None:
    """fluxlike.init in a process of `fresh`, on the heap that the test asked for."""
    fluxlike.init(heap=os.environ["FLUXLIKE_TEST_HEAP"], heap_bytes=heap_bytes)


def make_context(op: str, schedule: str, group=None, dtype=None):
    """For calls of `call` in worlds up to `WORLD` ranks, or of the group's size if it is larger; in fp32 where there is that."""
    dtype = dtype or (torch.float32 if schedule in IN_FP32 else torch.bfloat16)
    m = 64 * max(WORLD, dist.get_world_size(group))
    if op == "gemm_rs":
        return fluxlike.create_gemm_rs_context(m, 128, None, dtype, group, schedule)
    return fluxlike.create_ag_gemm_context(m, 128, 64, dtype, group, schedule)


def call(ctx, seed: int, *, m: int | None = None, n: int = 128, k: int = 64) -> None:
    """A call, by default of two tiles a chunk, with its result checked."""
    m, size, rank = 64 * ctx.size if m is None else m, ctx.size, ctx.rank
    if ctx.op == "gemm_rs":
        case = RSCase(m, n, [k] * size, ctx.dtype, seed)
        result, expected = fluxlike.gemm_rs(*case.inputs(rank)[:2], ctx), case.expected(rank)
    else:
        other = AGCase(m, [n] * size, k, ctx.dtype, seed)
        result, expected = fluxlike.ag_gemm(*other.inputs(rank)[:2], ctx, m=m), other.whole()[1][rank]
    ctx.check()  # on a GPU a wait that ran out shows here, and the result means nothing
    same(result, expected, f"{ctx.op} {seed}")


def works(group) -> None:
    """New contexts of both operations, and their results."""
    for op, schedule in zip(OPS, ("in_kernel", "copy_engine"), strict=True):
        with make_context(op, schedule, group) as ctx:
            call(ctx, 1)
            call(ctx, 2)


def told(act, *kinds: type[BaseException]) -> tuple[str, float]:
    """The message of the error that ``act()`` raises, "" if none, and how long it took."""
    since, message = time.monotonic(), ""
    try:
        act()
    except kinds as error:
        message = f"{type(error).__name__}: {error}"
    return message, time.monotonic() - since


def held() -> tuple[int, int, int]:
    """Open files, threads, and mappings of fluxlike's shared memory, of this process."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), maps.count("memfd:fluxlike")

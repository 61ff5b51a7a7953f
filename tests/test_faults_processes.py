"""Processes that are killed, end, stop, are interrupted or leave: what the other ranks are told, how soon, and how they go on.

Every test makes its processes: on the CPU and, with ``python -m pytest -m gpu tests/test_faults_processes.py`` started plainly on a
machine with four GPUs, on one GPU each. On the CPU heap a wait may last a minute, since a rank there sees how its peers fare; on
GPUs the host cannot look while a kernel waits, so some faults show only when the wait runs out.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from faults import (  # noqa: F401
    GUILTY,
    HEAPS,
    LIMIT_S,
    call,
    fresh,
    held,
    make_context,
    nothing_left_behind,
    start,
    told,
    works,
)
from ranks import ROOT, TORCHRUN

import fluxlike

SOON_S = 30.0


def limit_s(heap: str, seen_at_once: bool = True) -> dict[str, str]:
    """A limit that is never reached where the fault shows without, so that the time tells which it was."""
    return {"FLUXLIKE_TIMEOUT_S": "60" if heap == "shm" and seen_at_once else str(LIMIT_S)}


def ends(group, how):
    """One rank's process ends; a group of the others, made before, goes on working."""
    start()
    rank = dist.get_rank()
    pair = dist.new_group([0, 2])
    ctx = make_context("gemm_rs", "in_kernel")
    call(ctx, 1)
    other = make_context("ag_gemm", "copy_engine", pair) if rank != GUILTY else None
    dist.barrier()
    if rank == GUILTY:
        os.kill(os.getpid(), signal.SIGKILL) if how == "killed" else os._exit(3)
    said, took = told(lambda: [call(ctx, 2), call(ctx, 3)], fluxlike.PeerTimeout)
    call(other, 4)
    works(pair)
    other.close()
    _, ending = told(fluxlike.finalize)
    return said, took, ending


@pytest.mark.parametrize("how", ("killed", "exits"))
@pytest.mark.parametrize("heap", HEAPS)
def test_a_process_that_ends(heap, how):
    outcomes = fresh(ends, env=limit_s(heap), heap=heap, timeout=100, expect_dead=[GUILTY], how=how)
    assert outcomes[GUILTY].exit == (-signal.SIGKILL if how == "killed" else 3)
    survivors = [outcome for outcome in outcomes if outcome.rank != GUILTY]
    for outcome in survivors:
        assert outcome.ok, str(outcome)
        said, took, ending = outcome.value
        assert said and took < SOON_S and ending < SOON_S, outcome.value
    words = (f"rank(s) {GUILTY} died", f"Rank {GUILTY}, whose process has ended")
    assert any(word in outcome.value[0] for outcome in survivors for word in words), [o.value for o in survivors]


def stops(group, seconds):
    """One rank is stopped for less, or for more than the limit, and goes on after that."""
    start()
    rank = dist.get_rank()
    ctx = make_context("gemm_rs", "copy_engine")
    call(ctx, 1)
    pids: list = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    if rank == GUILTY:
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 0:
        deadline = time.monotonic() + SOON_S
        while Path(f"/proc/{pids[GUILTY]}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline, "it has not stopped itself"
            time.sleep(0.01)
    if rank == 0 and seconds < LIMIT_S:
        time.sleep(seconds)
        os.kill(pids[GUILTY], signal.SIGCONT)
    said, took = told(lambda: [call(ctx, 2), call(ctx, 3)], fluxlike.PeerTimeout)
    if rank == 0 and seconds > LIMIT_S:
        os.kill(pids[GUILTY], signal.SIGCONT)
    _, ending = told(fluxlike.finalize)
    start()
    works(group)
    fluxlike.finalize()
    return said, took, ending


@pytest.mark.slow
@pytest.mark.parametrize("seconds", (LIMIT_S / 3, LIMIT_S * 2), ids=("shortly", "too-long"))
@pytest.mark.parametrize("heap", HEAPS)
def test_a_process_that_is_stopped_and_continued(heap, seconds):
    outcomes = fresh(stops, env=limit_s(heap, False), heap=heap, timeout=100, seconds=seconds)
    for outcome in outcomes:
        assert outcome.ok, str(outcome)
        said, took, ending = outcome.value
        assert bool(said) == (seconds > LIMIT_S), outcome.value
        assert took < SOON_S and ending < SOON_S, outcome.value
    if seconds > LIMIT_S:
        assert any(f"Rank {GUILTY}, whose process is stopped by a signal or a debugger," in o.value[0] for o in outcomes)


def leaves(group):
    """One rank ends fluxlike while the others make a call: all are told at once, and all can begin again."""
    start()
    rank = dist.get_rank()
    ctx = make_context("ag_gemm", "in_kernel")
    call(ctx, 1)
    dist.barrier()
    said, took = "", 0.0
    if rank != GUILTY:
        said, took = told(partial(call, ctx, 2), ValueError)
    else:
        time.sleep(0.5)
    ending, seconds = told(fluxlike.finalize, ValueError)
    assert not (said and ending), f"told twice, {said} and {ending}"
    assert not fluxlike.is_initialized() and ctx.closed
    dist.barrier()
    start()
    works(group)
    fluxlike.finalize()
    return said or ending, took + seconds


@pytest.mark.parametrize("heap", HEAPS)
def test_a_rank_that_leaves_early(heap):
    for outcome in fresh(leaves, env={"FLUXLIKE_TIMEOUT_S": "60"}, heap=heap, timeout=100):
        assert outcome.ok, str(outcome)
        said, took = outcome.value
        for word in (f"rank {GUILTY} ", "'closing context 1 (ag_gemm", "'call 2 of context 1 (ag_gemm", "in the same order"):
            assert word in said, said
        assert took < SOON_S, f"told after {took:.1f} s: {said}"


def interrupted(group, everybody):
    """SIGINT while ranks wait in a call for one that sleeps: to one of them, or to all as a terminal sends it."""
    start()
    rank = dist.get_rank()
    ctx = make_context("gemm_rs", "in_kernel")
    call(ctx, 1)
    pids: list = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    if rank == GUILTY:
        time.sleep(0.5)
        # a terminal sends it to all at once: none goes on, and tells the others that it gave up, before all have it
        others = [pids[0], pids[2]] if everybody else pids[:1]
        for what in (signal.SIGSTOP, signal.SIGINT, signal.SIGCONT):
            for pid in others:
                os.kill(pid, what)
        if everybody:
            os.kill(pids[GUILTY], signal.SIGINT)
        time.sleep(0.5)
    said, took = told(lambda: [call(ctx, seed) for seed in range(2, 9)], fluxlike.PeerTimeout)
    _, ending = told(fluxlike.finalize)
    return said, took, ending


@pytest.mark.slow
@pytest.mark.parametrize("everybody", (False, True), ids=("one", "all"))
@pytest.mark.parametrize("heap", HEAPS)
def test_an_interrupt(heap, everybody):
    since, dead = time.monotonic(), range(3) if everybody else [0]
    outcomes = fresh(interrupted, env=limit_s(heap), heap=heap, timeout=100, expect_dead=dead, everybody=everybody)
    assert time.monotonic() - since < 2 * SOON_S
    for outcome in outcomes:
        if outcome.rank in dead:
            assert outcome.exit == 1 and "KeyboardInterrupt" in outcome.trace, str(outcome)
            continue
        assert outcome.ok, str(outcome)
        said, took, ending = outcome.value
        assert "rank 0 gave up first" in said or "rank(s) 0 died" in said or heap == "nvshmem", said
        assert said and took < SOON_S and ending < SOON_S, outcome.value


def children(pid: int) -> set[int]:
    """The processes below ``pid``."""
    found: set[int] = set()
    with contextlib.suppress(OSError):  # the process has ended since
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # the thread has
                for child in map(int, (task / "children").read_text().split()):
                    found |= {child} | children(child)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("heap", HEAPS)
def test_an_interrupted_torchrun(heap, tmp_path):
    """Ctrl-C in the terminal of a program that does nothing about it: every process of it ends by itself."""
    if TORCHRUN:
        pytest.skip("starts a torchrun of its own")
    script, output = tmp_path / "endless.py", tmp_path / "output"
    script.write_text(ENDLESS)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "FLUXLIKE_TEST_HEAP": heap, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--local-addr=127.0.0.1"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", str(script)]
    with open(output, "w") as log:
        torchrun = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 100
        while output.read_text().count("calling") < 2:
            assert time.monotonic() < deadline and torchrun.poll() is None, output.read_text()
            time.sleep(0.1)
        everyone = children(torchrun.pid)
        since = time.monotonic()
        os.killpg(torchrun.pid, signal.SIGINT)
        assert torchrun.wait(90) != 0  # after 30 s it would kill its ranks, and say so
        while alive := [pid for pid in everyone if os.path.exists(f"/proc/{pid}")]:
            assert time.monotonic() - since < 90, f"{alive} are still there: {output.read_text()}"
            time.sleep(0.1)
        assert "Sending process" not in output.read_text() or "SIGKILL" not in output.read_text(), output.read_text()
    finally:
        if torchrun.poll() is None:
            left = children(torchrun.pid)  # of sessions of their own
            os.killpg(torchrun.pid, signal.SIGKILL)
            torchrun.wait(10)
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(TORCHRUN, reason="starts a launcher of its own")
def test_a_program_that_ends_without_finalize(tmp_path):
    """Its results are said and nothing is left; gloo may end a process by SIGABRT, which is torch's."""
    program = tmp_path / "program.py"
    program.write_text(UNFINISHED)
    env = {**os.environ, "FLUXLIKE_PYTHON": sys.executable}
    command = ["bash", "scripts/launch.sh", "--nproc", "2", str(program)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 or "terminate called without an active exception" in done.stderr, done.stderr
    assert done.stdout.count("called") == 2


UNFINISHED = """
import torch, fluxlike
fluxlike.init(heap="shm", heap_bytes=16 << 20)
x = torch.ones(64, 32)
fluxlike.gemm_rs(x, x)
print("called", flush=True)
"""

ENDLESS = """
import os, torch, fluxlike
fluxlike.init(heap=os.environ["FLUXLIKE_TEST_HEAP"], heap_bytes=16 << 20)
ctx = fluxlike.create_gemm_rs_context(128, 128, dtype=torch.float32, schedule="copy_engine")
x = torch.ones(128, 64, device=ctx.device)
fluxlike.gemm_rs(x, x, ctx)
ctx.check()
print("calling", flush=True)
while True:
    fluxlike.gemm_rs(x, x, ctx)
    ctx.check()
"""


def lives(group):
    """init and finalize again and again, with contexts open, one of them failed: nothing is held more each time."""
    counts = []
    for life in range(4):
        start()
        left = [make_context("gemm_rs", "copy_engine"), make_context("ag_gemm", "in_kernel")]
        for ctx in left:
            call(ctx, life)
        if life == 2:
            dist.barrier()  # who is late would learn it from check(), above
            said, _ = told(partial(call, left[0], 5, m=40 + dist.get_rank()), ValueError)
            assert said.count("M=4") == 2, said
        fluxlike.finalize()
        assert all(ctx.closed for ctx in left)
        del left, ctx
        dist.barrier()
        counts.append(held())
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("heap", HEAPS)
def test_lives_leave_nothing(heap):
    for outcome in fresh(lives, heap=heap, timeout=100):
        assert outcome.ok, str(outcome)
        first, *_, last = outcome.value
        assert heap == "nvshmem" or (first == last and last[2] == 0), outcome.value  # CUDA keeps what it likes
        assert last[2] == 0



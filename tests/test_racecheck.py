"""The race checker: silent on what is right, loud on every planted bug of order, whatever the timing.

A planted bug of memory order changes no result on this machine; that it is found shows that the checker judges the order and
not what happened.
"""

import importlib
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import slow
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from cases import AGCase, RSCase
from ranks import Outcome, run_fresh

import fluxlike
from fluxlike.kernels import sync
from fluxlike.kernels.blocks import load_a, store_block
from fluxlike.kernels.sync import ARRIVED, CONSUMED, EPOCH, LAST_USE, WAIT_CREDIT, WAIT_SIGNAL, head_of, peer_address
from fluxlike.ops.context import Context
from fluxlike.ops.group import resolve
from fluxlike.ops.tiling import Tiling
from fluxlike.runtime import cpu, env, interpreter, racecheck

ENV = {"FLUXLIKE_RACECHECK": "1", "FLUXLIKE_TIMEOUT_S": "20"}


# what is right is silent


def every_operation(group: Any) -> int:
    """Both operations, by each transport and with products by torch: five calls, back to back, shapes that change, uneven chunks,
    a late rank each time."""
    fluxlike.init(heap="shm")
    rank, ranks, calls = group.rank(), group.size(), 0
    generator = np.random.default_rng(5)
    for transport in ("in_kernel", "copy_engine", "decomposed", "sequential"):
        half = transport == "decomposed" or (transport == "in_kernel") == (ranks == 3)
        dtype = torch.bfloat16 if half else torch.float32
        with (
            fluxlike.create_gemm_rs_context(80, 96, dtype=dtype, schedule=transport) as rs,
            fluxlike.create_ag_gemm_context(80, 96, 64, dtype=dtype, schedule=transport) as ag,
        ):
            for call in range(5):
                m, n, k = (int(generator.integers(low, high)) for low, high in ((1, 81), (8, 97), (8, 65)))
                k = k // 8 * 8 if call % 2 else k  # by descriptors, by pointers
                if call % ranks == rank:
                    time.sleep(0.05)
                case = RSCase(m, n, [k] * ranks, dtype, call, bias=bool(call % 2))
                x, w, b = case.inputs(rank)
                y = fluxlike.gemm_rs(x, w, rs, bias=b)
                assert torch.equal(y.double(), case.expected(rank))
                gathered = AGCase(m, [n] * ranks, k, dtype, call)
                shard, w, _ = gathered.inputs(rank)
                more = [w, w[: n // 2]] if call % 2 else [w]
                results, whole = fluxlike.ag_gemm(shard, more, ag, m=m, return_gathered=True)
                x, expected = gathered.whole()
                assert torch.equal(results[0].double(), expected[rank]) and torch.equal(whole.double(), x)
                calls += 2
    fluxlike.finalize()
    assert racecheck.active() is None and "create_masked_load" not in vars(interpreter.builder)
    return calls


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.slow(slow.ALWAYS)) for ranks in (3, 4))])
def test_the_operations_are_clean(ranks: int) -> None:
    for outcome in run_fresh(every_operation, ranks, ENV, timeout=120, measure="kernels"):
        assert outcome.ok and outcome.value == 40, str(outcome)


# kernels of users

TILE = Tiling(bm=16, bn=16, bk=1, group_m=1, warps=1, stages=1, tma=False)


@triton.jit(do_not_specialize=["rank"])
def push_kernel(x, y, data, flags, ctl, M, N, slot_stride, rank, R: tl.constexpr, BM: tl.constexpr, BUG: tl.constexpr):
    """Each rank's matrix to its right neighbour, tile by tile; BUG names what is wrong with it."""
    epoch = tl.load(ctl + EPOCH) + 1
    slot = (epoch & 1).to(tl.int32)
    right = (rank + 1) % R
    here = data + slot.to(tl.int64) * slot_stride
    there = peer_address(data, ctl, rank, right) + slot.to(tl.int64) * slot_stride
    there_flags = peer_address(flags, ctl, rank, right)
    tiles = tl.cdiv(M, BM)
    if BUG != "no credit":
        sync.wait_credits(ctl, slot, rank, R)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        block = load_a(x, tile * BM, 0, M, N, N, BM, BM, False)
        if BUG == "early":
            sync.publish_set(there_flags + tile, epoch, False)
        store_block(there, block, tile * BM, 0, M, N, N, BM, BM)  # the planted line
        if BUG == "plain flag":
            tl.store(there_flags + tile, epoch)
        elif BUG != "early":
            sync.publish_set(there_flags + tile, epoch, False)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        block = load_a(x, tile * BM, 0, M, N, N, BM, BM, False)
        if BUG == "plain wait":
            while tl.load(flags + tile) < epoch:
                tl.debug_barrier()
        elif BUG == "wrong flag":
            sync.wait(flags + (tile + 1) % tiles, epoch, ctl, rank, WAIT_SIGNAL, right, R)
        else:
            sync.wait(flags + tile, epoch, ctl, rank, WAIT_SIGNAL, right, R)
        block += load_a(here, tile * BM, 0, M, N, N, BM, BM, False)
        store_block(y, block, tile * BM, 0, M, N, N, BM, BM)
    if sync.is_last_program(ctl, False):
        sync.finish(ctl, slot, rank, epoch, R)


def push(group: Any, bug: str, calls: int = 5) -> bool:
    """The kernel above; a matrix of 40 columns of 16, so that tiles are uneven and rows of bfloat16 lie close."""
    fluxlike.init(heap="shm")
    rank, ranks, good = group.rank(), group.size(), True
    m, n = 40, 15
    with Context("push", resolve(None), torch.bfloat16, "in_kernel", flags=3, data=m * n) as ctx:
        for call in range(calls):
            mine, theirs = (torch.full((m, n), float(call + r % ranks), dtype=torch.bfloat16) for r in (rank, rank + ranks - 1))
            y = torch.empty_like(mine)
            args = (mine, y, ctx.data, ctx.flags, ctx.ctl, m, n, ctx.set_elements, rank)
            with ctx.start("in_kernel", TILE):
                ctx.launch(push_kernel, 2, args, {"R": ranks, "BM": 16, "BUG": bug}, TILE)
            good &= torch.equal(y, mine + theirs)
    fluxlike.finalize()
    return good


def host_writes(group: Any, ordered: bool) -> None:
    """The host of rank 1 writes into the slots of rank 0, whose kernel has just read them."""
    fluxlike.init(heap="shm")
    ctx = fluxlike.create_gemm_rs_context(40, 48, dtype=torch.float32, schedule="in_kernel")
    fluxlike.gemm_rs(torch.ones(40, 32), torch.ones(48, 32), ctx)
    store = dist.distributed_c10d._get_default_store()  # which orders nothing for the checker
    store.set("has read", "") if group.rank() == 0 else store.wait(["has read"])
    if ordered:
        dist.barrier()
    if group.rank() == 1:
        racecheck.host_write(ctx.block.view(0)[ctx.offsets["data"] :])
    if ordered:
        dist.barrier()
    fluxlike.gemm_rs(torch.ones(40, 32), torch.ones(48, 32), ctx)
    fluxlike.finalize()


def _races(outcomes: list[Outcome]) -> str:
    """The report; every rank ended with it, one of them as the one that found it."""
    assert all(outcome.error == "RaceError" for outcome in outcomes), [str(outcome) for outcome in outcomes]
    found = [outcome.message for outcome in outcomes if outcome.message.startswith("race on ")]
    assert found, [outcome.message for outcome in outcomes]
    for outcome in outcomes:
        assert found[0] in outcome.message or outcome.message in found
    return found[0]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_kernel_of_a_user_is_clean(ranks: int) -> None:
    for outcome in run_fresh(push, ranks, ENV, measure="kernels", bug=""):
        assert outcome.ok and outcome.value, str(outcome)


@pytest.mark.parametrize("bug", ["early", "plain flag", "plain wait", "no credit", "wrong flag"])
def test_a_bug_in_a_kernel_of_a_user_is_found(bug: str) -> None:
    report = _races(run_fresh(push, 3, ENV, bug=bug))
    assert ("push.flags" if "plain" in bug else "push.data") in report


def test_a_write_by_the_host_is_found() -> None:
    report = _races(run_fresh(host_writes, 2, ENV, ordered=False))
    assert "write by rank 1, the host" in report and "host_writes, tests/test_racecheck.py:" in report


def test_a_write_by_the_host_between_barriers_is_clean() -> None:
    for outcome in run_fresh(host_writes, 2, ENV, ordered=True):
        assert outcome.ok, str(outcome)


# bugs planted in the library


@triton.jit
def reset_not(full, slot, R: tl.constexpr):
    pass


@triton.jit
def add_relaxed(counter, count, TMA: tl.constexpr):
    tl.atomic_add(counter, count, sem="relaxed", scope="sys")


@triton.jit
def add_gpu(counter, count, TMA: tl.constexpr):
    tl.atomic_add(counter, count, sem="release", scope="gpu")


@triton.jit
def set_relaxed(signal, value, TMA: tl.constexpr):
    tl.atomic_xchg(signal, value, sem="relaxed", scope="sys")


@triton.jit
def set_gpu(signal, value, TMA: tl.constexpr):
    tl.atomic_xchg(signal, value, sem="release", scope="gpu")


@triton.jit
def wait_not(signal, want, ctl, rank, what: tl.constexpr, peer, R: tl.constexpr):
    pass


@triton.jit
def spin_relaxed(signal, want, ctl, rank, what: tl.constexpr, peer, R: tl.constexpr):
    seen = tl.atomic_add(signal, 0, sem="relaxed", scope="sys").to(tl.int64)
    turns = 0
    while seen < want:
        sync.spin(want, seen, what, peer, ctl, turns)
        turns += 1
        seen = tl.atomic_add(signal, 0, sem="relaxed", scope="sys").to(tl.int64)


@triton.jit
def spin_gpu(signal, want, ctl, rank, what: tl.constexpr, peer, R: tl.constexpr):
    seen = tl.atomic_add(signal, 0, sem="acquire", scope="gpu").to(tl.int64)
    turns = 0
    while seen < want:
        sync.spin(want, seen, what, peer, ctl, turns)
        turns += 1
        seen = tl.atomic_add(signal, 0, sem="acquire", scope="gpu").to(tl.int64)


@triton.jit
def credits_not(ctl, slot, rank, R: tl.constexpr):
    pass


@triton.jit
def credits_relaxed(ctl, slot, rank, R: tl.constexpr):
    last = tl.load(ctl + LAST_USE + slot)
    for step in tl.static_range(1, R):
        peer = (rank + step) % R
        spin_relaxed(head_of(ctl, rank) + CONSUMED + peer, last, ctl, rank, WAIT_CREDIT, peer, R)


@triton.jit
def finish_relaxed(ctl, slot, rank, epoch, R: tl.constexpr):
    tl.store(ctl + ARRIVED, 0)
    tl.store(ctl + LAST_USE + slot, epoch)
    tl.store(ctl + EPOCH, epoch)
    for step in tl.static_range(1, R):
        tl.atomic_xchg(head_of(ctl, (rank + step) % R) + CONSUMED + rank, epoch, sem="relaxed", scope="sys")


@triton.jit
def last_relaxed(ctl, TMA: tl.constexpr):
    return tl.atomic_add(ctl + ARRIVED, 1, sem="relaxed", scope="gpu") == tl.num_programs(0) - 1


@triton.jit
def last_release_only(ctl, TMA: tl.constexpr):
    return tl.atomic_add(ctl + ARRIVED, 1, sem="release", scope="gpu") == tl.num_programs(0) - 1


#: (operation, transport, what is replaced, by what): the region that races.
PLANTED = {
    ("gemm_rs", "copy_engine", "publish_add", "add_relaxed"): "gemm_rs.local",
    ("gemm_rs", "copy_engine", "publish_add", "add_gpu"): "gemm_rs.local",
    ("gemm_rs", "copy_engine", "wait", "spin_relaxed"): "gemm_rs.data",
    ("gemm_rs", "copy_engine", "wait", "wait_not"): "gemm_rs.data",
    ("gemm_rs", "copy_engine", "engine", "wait"): "gemm_rs.local",
    ("gemm_rs", "copy_engine", "reset", "reset_not"): "gemm_rs.data",
    ("gemm_rs", "copy_engine", "is_last_program", "last_relaxed"): "gemm_rs.",
    ("gemm_rs", "in_kernel", "publish_set", "set_relaxed"): "gemm_rs.data",
    ("gemm_rs", "in_kernel", "publish_set", "set_gpu"): "gemm_rs.data",
    ("gemm_rs", "in_kernel", "wait", "spin_relaxed"): "gemm_rs.data",
    ("gemm_rs", "in_kernel", "wait", "spin_gpu"): "gemm_rs.data",
    ("gemm_rs", "in_kernel", "wait", "wait_not"): "gemm_rs.data",
    ("gemm_rs", "in_kernel", "wait_credits", "credits_not"): "gemm_rs.data",
    ("gemm_rs", "in_kernel", "wait_credits", "credits_relaxed"): "gemm_rs.data",
    ("gemm_rs", "in_kernel", "finish", "finish_relaxed"): "gemm_rs.data",
    ("gemm_rs", "in_kernel", "is_last_program", "last_relaxed"): "gemm_rs.ctl",
    ("gemm_rs", "in_kernel", "is_last_program", "last_release_only"): "gemm_rs.ctl",
    ("ag_gemm", "copy_engine", "publish_set", "set_relaxed"): "ag_gemm.data",
    ("ag_gemm", "copy_engine", "engine", "wait"): "ag_gemm.data",
    ("ag_gemm", "copy_engine", "wait", "spin_relaxed"): "ag_gemm.data",
    ("ag_gemm", "copy_engine", "reset", "reset_not"): "ag_gemm.data",
    ("ag_gemm", "copy_engine", "wait_credits", "credits_relaxed"): "ag_gemm.data",
    ("ag_gemm", "in_kernel", "publish_set", "set_relaxed"): "ag_gemm.data",
    ("ag_gemm", "in_kernel", "wait", "spin_relaxed"): "ag_gemm.data",
    ("ag_gemm", "in_kernel", "wait_credits", "credits_not"): "ag_gemm.data",
}


#: What lets the copy engines of ag_gemm go carries the credits to them.
AG_GO = {("ag_gemm", "copy_engine", "publish_set"), ("ag_gemm", "copy_engine", "engine")}


def planted(group: Any, op: str, transport: str, what: str, by: str, m: int) -> None:
    """Five calls with one function replaced.

    With two rows for three ranks nobody waits for rank 2 but by the credits.
    """
    if what == "engine":
        setattr(cpu.CpuCopyEngine, by, lambda self, *args: None)
    else:
        module = importlib.import_module(f"fluxlike.kernels.{op}")
        assert hasattr(module, what)
        setattr(module, what, globals()[by])
    fluxlike.init(heap="shm")
    rank, ranks = group.rank(), group.size()
    create: Any = fluxlike.create_gemm_rs_context if op == "gemm_rs" else fluxlike.create_ag_gemm_context
    ctx = create(max_m=40, n=160, k=32, dtype=torch.float32, schedule=transport)
    for _ in range(5):
        if op == "gemm_rs":
            fluxlike.gemm_rs(torch.ones(m, 32), torch.ones(160, 32), ctx)
        else:
            fluxlike.ag_gemm(torch.ones(m, 32).chunk(ranks)[rank] if rank < m else torch.ones(0, 32), torch.ones(160, 32), ctx, m=m)
    fluxlike.finalize()


#: One of each operation for the quick run: what the reader forgot, and what the writer forgot.
QUICK = {("gemm_rs", "in_kernel", "wait", "wait_not"), ("ag_gemm", "copy_engine", "publish_set", "set_relaxed")}
assert PLANTED.keys() > QUICK


@pytest.mark.parametrize(
    "key", [pytest.param(key, id="-".join(key), marks=() if key in QUICK else pytest.mark.slow) for key in PLANTED]
)
def test_a_bug_in_the_library_is_found(key: tuple[str, str, str, str]) -> None:
    op, transport, what, by = key
    only_credits = what in ("wait_credits", "finish") or key[:3] in AG_GO
    ranks, m = (3, 2) if only_credits else (2, 40)
    report = _races(run_fresh(planted, ranks, ENV, op=op, transport=transport, what=what, by=by, m=m, measure="nothing"))
    assert report.startswith(f"race on {PLANTED[key]}"), report


# the report


def _line_of(text: str) -> int:
    """The first line of this file with ``text``."""
    return next(i for i, line in enumerate(Path(__file__).read_text().splitlines(), 1) if text in line)


def test_the_report_names_both_accesses_and_the_signal() -> None:
    report = _races(run_fresh(planted, 2, ENV, op="gemm_rs", transport="in_kernel", what="publish_set", by="set_relaxed", m=40))
    assert re.match(r"race on gemm_rs\.data of rank \d, bytes \d+ to \d+\n", report)
    assert re.search(r"(read|write) by rank \d, program \d, \w+, fluxlike/kernels/\w+\.py:\d+, called by gemm_rs_kernel, ", report)
    line = _line_of("tl.atomic_xchg(signal, value, sem")
    assert f"(relaxed, sys; set_relaxed, tests/test_racecheck.py:{line}, called by gemm_rs_kernel" in report, report


def test_the_report_names_the_line_of_the_kernel() -> None:
    report = _races(run_fresh(push, 2, ENV, bug="early"))
    line = _line_of("# the planted line")
    assert f"called by push_kernel, tests/test_racecheck.py:{line}" in report, report


# the switch


def test_the_variable_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLUXLIKE_RACECHECK", "yes")
    with pytest.raises(ValueError, match="FLUXLIKE_RACECHECK='yes'"):
        env.racecheck()
    monkeypatch.delenv("FLUXLIKE_RACECHECK")
    assert not env.racecheck() and racecheck.active() is None

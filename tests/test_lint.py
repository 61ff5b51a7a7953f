"""The lint itself: each known-bad pattern is found and its good form is not: as text, in tiny kernels, in the shipped ones."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import compiled
import pytest
import torch
import triton
import triton.language as tl

from fluxlike.kernels.lang import any_thread, cta_barrier, drain_stores, globaltimer, tma_acquire
from fluxlike.kernels.sync import publish_set
from fluxlike.tools import lint
from fluxlike.tools.lint import rules
from fluxlike.tools.lint.compiling import Launch, build
from fluxlike.tools.lint.ptx import Ptx
from fluxlike.tools.lint.rules import Spec
from fluxlike.tools.lint.variants import Case

ROOT = Path(__file__).resolve().parents[1]
VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])

# ---- PTX text ---------------------------------------------------------------------------------------------------------------

#: Arguments of the text kernels below, in the order of their PTX parameters.
NAMES = ("slots", "flag", "other", "desc", "n")
SPEC = Spec(payload=("slots", "desc"), signals=("flag",), bases=("other",))
HEAD = """
.visible .entry k(
    .param .u64 .ptr .global .align 1 k_param_0,
    .param .u64 .ptr .global .align 1 k_param_1,
    .param .u64 .ptr .global .align 1 k_param_2,
    .param .align 64 .b8 k_param_3[128],
    .param .u32 k_param_4
)
.reqntid 128
{
    ld.param.b64 %rd1, [k_param_0];
    ld.param.b64 %rd2, [k_param_1];
    ld.param.b64 %rd3, [k_param_2];
    mov.b64 %rd4, k_param_3;
    ld.param.b32 %r4, [k_param_4];
    mov.u32 %r9, %tid.x;
    setp.eq.b32 %p1, %r9, 0;
    add.s64 %rd5, %rd1, 64;
"""
STORE = "st.global.v4.b32 [%rd5], {%r1, %r2, %r3, %r4};\n"
TMA_STORE = "@%p1 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd4, {%r1, %r2}], [%r3];\ncp.async.bulk.commit_group;\n"
BARRIER = "bar.sync 0;\n"
DRAIN = "cp.async.bulk.wait_group 0; fence.proxy.async; bar.sync 0; mov.u32 %r5, 0;\n"
RELEASE = "@%p1 atom.global.release.sys.exch.b32 %r6, [%rd2], 1;\n"
ACQUIRE = "@%p1 ld.global.sys.acquire.b32 %r7, [%rd2 + 0];\n"
FENCE = "fence.proxy.async; mov.u32 %r8, 0;\n"
LOAD = "ld.global.v4.b32 {%r11, %r12, %r13, %r14}, [%rd5];\n"
TMA_LOAD = "@%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r15], [%rd4, {%r1, %r2}], [%r16];\n"
PEER = "ld.global.b64 %rd10, [%rd3];\n@%p1 atom.global.sys.relaxed.exch.b32 %r6, [%rd10], 1;\n"
#: A wait with its loop: thread 0 looks, all learn, the clock is read.
WAIT = f"{ACQUIRE}{BARRIER}$L__BB0_8:\nmov.u64 %rd8, %globaltimer;\n{ACQUIRE}{BARRIER}@%p2 bra $L__BB0_8;\n"
#: What may come first, the atomic, what it is given.
SPIN = "$L__BB0_8:\n{}@%p1 atom.global.sys.acq_rel.{}.b32 %r6, [%rd3], {};\nsetp.lt.s32 %p2, %r6, %r4;\n@%p2 bra $L__BB0_8;\n"
#: Whether the clock stands beyond something, as each thread sees it.
CLOCK = "mov.u64 %rd8, %globaltimer;\nsetp.gt.s64 %p6, %rd8, 0;\n"
#: Only with tiles (n > 0) is there a wait, and a load.
IF_TILES = "setp.lt.s32 %p3, %r4, 1;\nsetp.gt.s32 %p4, %r4, 0;\n@%p3 bra $L__BB0_9;\n"


def verdict(body: str, spec: Spec = SPEC) -> list[str]:
    """The rules that a kernel of this text breaks."""
    return [finding.rule for finding in rules.lint(Ptx(f"{HEAD}{body}ret;\n}}\n", NAMES), spec)]


GOOD = {
    "store": STORE + BARRIER + RELEASE,
    "tma store": TMA_STORE + DRAIN + RELEASE,
    "both": STORE + TMA_STORE + DRAIN + RELEASE,
    "barrier of all by number": STORE + "barrier.sync 1, 128;\n" + RELEASE,
    "deferred": STORE + BARRIER + RELEASE + RELEASE,
    "slot read": WAIT + LOAD + BARRIER + RELEASE,
    "wait": WAIT + LOAD,
    "wait, tma": WAIT + FENCE + TMA_LOAD,
    "wait, fence of global memory": WAIT + "fence.proxy.async.global;\n" + TMA_LOAD,
    "no tiles, no wait": IF_TILES + WAIT + FENCE + "$L__BB0_9:\n" + TMA_LOAD.replace("%p1", "%p4"),
    "no tiles, no wait, and of some": (
        IF_TILES + WAIT + FENCE + "$L__BB0_9:\nand.pred %p5, %p4, %p1;\n" + TMA_LOAD.replace("%p1", "%p5")
    ),
    "wait in the first turn": (
        "mov.b32 %r20, 0;\n$L__BB0_1:\nsetp.ne.b32 %p3, %r20, 0;\n@%p3 bra $L__BB0_9;\n" + WAIT + "$L__BB0_9:\n" + LOAD
        + "add.s32 %r20, %r20, 1;\nsetp.lt.s32 %p6, %r20, %r4;\n@%p6 bra $L__BB0_1;\n"
    ),
    "own rows are elsewhere": (
        "mov.b64 %rd9, %rd3;\n@%p6 bra $L__BB0_9;\n" + WAIT + "mov.b64 %rd9, %rd5;\n$L__BB0_9:\n" + LOAD.replace("rd5", "rd9")
    ),
    "a count of arrivals": (
        "$L__BB0_1:\n" + STORE + BARRIER + "@%p1 atom.global.acq_rel.sys.add.u32 %r6, [%rd3], 1;\n@%p6 bra $L__BB0_1;\n"
    ),
    "a count of arrivals, by a register": SPIN.format("mov.b32 %r19, 1;\n", "add", "%r19"),
    "what nobody sends": "ld.global.b32 %r5, [%rd3];\n" + WAIT,
    "a kernel that does not wait": LOAD,
    "a peer's word": PEER,
    "the clock, no barrier before all meet again": (
        CLOCK + "@%p6 bra $L__BB0_9;\nadd.s32 %r20, %r4, 1;\n$L__BB0_9:\n" + BARRIER
    ),
    "the clock of one, told to all": (
        CLOCK.replace("mov", "@%p1 mov") + "@%p1 st.shared.b64 [%r21], %rd8;\n" + BARRIER
        + "ld.shared.b64 %rd9, [%r21];\nsetp.gt.s64 %p7, %rd9, 0;\n@%p7 bra $L__BB0_9;\n" + BARRIER + "$L__BB0_9:\n"
    ),
    "the clocks of all, told to all": (
        CLOCK + "selp.s32 %r20, 1, 0, %p6;\n{ .reg .pred p; setp.ne.s32 p, %r20, 0; bar.red.or.pred p, 0, p; "
        + "selp.s32 %r21, 1, 0, p; }\n"
        + "setp.ne.s32 %p7, %r21, 0;\n@%p7 bra $L__BB0_9;\n" + BARRIER + "$L__BB0_9:\n"
    ),
    "a word of this gpu": "@%p1 atom.global.gpu.relaxed.exch.b32 %r6, [%rd3], 1;\n",
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_good_text(name: str) -> None:
    assert verdict(GOOD[name]) == []


BAD = {
    "no barrier": (STORE + RELEASE, "release"),
    "barrier of some": (STORE + "bar.sync 1, 64;\n" + RELEASE, "release"),
    "barrier too early": (BARRIER + STORE + RELEASE, "release"),
    "barrier on one way only": (STORE + "@%p1 bra $L__BB0_1;\n" + BARRIER + "$L__BB0_1:\n" + RELEASE, "release"),
    "store of the turn before": (
        "$L__BB0_1:\n" + RELEASE + BARRIER + STORE + "@%p1 bra $L__BB0_1;\n",
        "release",
    ),
    "an arrival": (STORE + RELEASE.replace("release.sys", "acq_rel.gpu").replace("rd2", "rd3"), "release"),
    "added to a slot": ("red.global.add.v4.f32 [%rd5], {%f1, %f2, %f3, %f4};\n" + RELEASE, "release"),
    "slot read, no barrier": (WAIT + LOAD + RELEASE, "release"),
    "tma store not drained": (TMA_STORE + BARRIER + RELEASE, "release"),
    "tma store only read": (TMA_STORE + DRAIN.replace("wait_group", "wait_group.read") + RELEASE, "release"),
    "tma store, some drained": (TMA_STORE + DRAIN.replace("wait_group 0", "wait_group 1") + RELEASE, "release"),
    "tma store, drained behind the barrier": (
        TMA_STORE + BARRIER + "cp.async.bulk.wait_group 0;\n" + RELEASE,
        "release",
    ),
    "tma add not drained": (
        TMA_STORE.replace("cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor") + BARRIER + RELEASE,
        "release",
    ),
    "load before the wait": (LOAD + WAIT, "acquire"),
    "wait on one way only": ("@%p6 bra $L__BB0_9;\n" + WAIT + "$L__BB0_9:\n" + LOAD, "acquire"),
    "wait for the tile after": (
        "$L__BB0_1:\n" + LOAD + WAIT + "@%p6 bra $L__BB0_1;\n",
        "acquire",
    ),
    "only one thread waits": (ACQUIRE + LOAD, "acquire"),
    "wait on another condition": (
        IF_TILES + WAIT + FENCE + "$L__BB0_9:\nsetp.gt.s32 %p7, %r4, -1;\n" + TMA_LOAD.replace("%p1", "%p7"),
        "acquire",
    ),
    "no proxy fence": (WAIT + TMA_LOAD, "acquire"),
    "proxy fence too early": (FENCE + WAIT + TMA_LOAD, "acquire"),
    "proxy fence of shared memory": (WAIT + "fence.proxy.async.shared::cta;\n" + TMA_LOAD, "acquire"),
    "relaxed signal": ("@%p1 atom.global.relaxed.sys.exch.b32 %r6, [%rd2], 1;\n", "signal"),
    "signal of the gpu only": (BARRIER + RELEASE.replace("sys", "gpu"), "signal"),
    "a peer's word, of the gpu only": (PEER.replace("sys", "gpu"), "signal"),
    "a word of one program": ("@%p1 atom.global.cta.relaxed.exch.b32 %r6, [%rd3], 1;\n", "signal"),
    "volatile wait": ("ld.volatile.global.b32 %r7, [%rd2];\n", "signal"),
    "a barrier by the clock": (CLOCK + "@%p6 bra $L__BB0_9;\n" + BARRIER + "$L__BB0_9:\n", "parted"),
    "a barrier by what a word became": (
        "ld.volatile.global.b32 %r20, [%rd3];\nadd.s32 %r21, %r20, 1;\nsetp.ne.s32 %p6, %r21, 0;\n@!%p6 bra $L__BB0_9;\n"
        + BARRIER
        + "$L__BB0_9:\n",
        "parted",
    ),
    "a loop with a barrier, by the clock": ("$L__BB0_1:\n" + BARRIER + CLOCK + "@%p6 bra $L__BB0_1;\n", "parted"),
    "a barrier by an atomic of each thread": (
        "atom.global.gpu.relaxed.add.u32 %r20, [%rd3], 1;\nsetp.ne.s32 %p6, %r20, 0;\n@%p6 bra $L__BB0_9;\n"
        + BARRIER
        + "$L__BB0_9:\n",
        "parted",
    ),
    "the clock in a register of the assembly": (
        CLOCK
        + "selp.s32 %r20, 1, 0, %p6;\n{ .reg .pred p; setp.ne.s32 p, %r20, 0; selp.s32 %r21, 1, 0, p; }\n"
        + "setp.ne.s32 %p7, %r21, 0;\n@%p7 bra $L__BB0_9;\n"
        + BARRIER
        + "$L__BB0_9:\n",
        "parted",
    ),
    "endless": (WAIT.replace("mov.u64 %rd8, %globaltimer;\n", ""), "bounded"),
    "endless, in Triton's default order": (SPIN.format("mov.b32 %r19, 0;\n", "add", "%r19"), "bounded"),
    "endless, by a compare-and-swap": (SPIN.format("", "cas", "1, 0"), "bounded"),
}


def test_the_threads_of_one_warp_read_together() -> None:
    text = HEAD.replace("128\n{", "32\n{") + BAD["a barrier by the clock"][0] + "ret;\n}\n"
    assert rules.lint(Ptx(text, NAMES), SPEC) == []


@pytest.mark.parametrize("name", BAD)
def test_bad_text(name: str) -> None:
    body, rule = BAD[name]
    assert verdict(body) == [rule]


MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1}, {%r1}, {%r2}, {%f1};\n"
COPY = "cp.async.cg.shared.global [%r15], [%rd3], 16;\n"


@pytest.mark.parametrize(
    ("copy", "wait", "found"),
    [
        (COPY, "cp.async.wait_group 2;\n", []),
        (COPY, "cp.async.wait_group 0;\n", ["pipeline"]),
        ("ld.global.b32 %r1, [%rd3];\n", "", ["pipeline"]),
    ],
)
def test_loops_of_products(copy: str, wait: str, found: list[str]) -> None:
    text = f"$L__BB0_1:\n{copy}{wait}{MMA}@%p6 bra $L__BB0_1;\n"
    assert verdict(text, Spec(mma="mma.sync", loops=1, buffers=2)) == found
    assert verdict(text, Spec(mma="mma.sync", loops=2, buffers=1)) == ["pipeline"], "one loop is missing"
    assert verdict(text, Spec(mma="wgmma", loops=1, buffers=1)) == ["pipeline"], "other products than asked for"


def test_a_finding_says_where_and_what_to_do() -> None:
    text = (
        '.file 1 "/x/mine.py"\n'
        + HEAD
        + ".loc 1 7 0\n"
        + STORE
        + ".loc 1 8 0 // mine.py:8:3 @[ mine.py:20:1 ]\n"
        + RELEASE
        + "ret;\n}\n"
    )
    (finding,) = rules.lint(Ptx(text, NAMES), SPEC)
    assert finding.where == "mine.py:8 in mine.py:20" and text.splitlines()[finding.line - 1] + "\n" == RELEASE
    assert "st.global.v4.b32 at mine.py:7" in str(finding) and "cta_barrier()" in str(finding)


# ---- tiny kernels -------------------------------------------------------------------------------------------------------------


@triton.jit
def plain_signal(slots, flag, FIXED: tl.constexpr):
    """Section 5 of the hazards: `store; atomic(release)`."""
    tl.store(slots + tl.arange(0, 1024), tl.arange(0, 1024).to(tl.bfloat16))
    if FIXED:
        cta_barrier()
    tl.atomic_xchg(flag, 1, sem="release", scope="sys")


@triton.jit
def tma_signal(desc, flag, FIXED: tl.constexpr):
    """The same with a TMA store: Triton waits until it is read, not until it is written."""
    desc.store([0, 0], tl.full((64, 64), 1.0, tl.bfloat16))
    if FIXED:
        drain_stores(True)
    else:
        cta_barrier()
    tl.atomic_xchg(flag, 1, sem="release", scope="sys")


@triton.jit
def tma_wait(desc, flag, other, FIXED: tl.constexpr):
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") == 0:
        tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    if FIXED:
        tma_acquire(True)
    block = desc.load([0, 0])
    tl.store(other + tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :], block)


@triton.jit
def volatile_wait(slots, flag, other, FIXED: tl.constexpr):
    seen = tl.zeros((), tl.int32)
    while seen == 0:
        tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
        if FIXED:
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        else:
            seen = tl.load(flag, volatile=True)
    tl.store(other, tl.load(slots))


@triton.jit
def late_sum(slots, other, FIXED: tl.constexpr):
    """A sum over all threads, or not, by what each of them sees on the clock."""
    late = globaltimer() > 1000
    if FIXED:
        late = any_thread(late) != 0
    total = tl.zeros((), tl.float32)
    if late:
        total = tl.sum(tl.load(slots + tl.arange(0, 1024)).to(tl.float32))
    tl.store(other, total.to(tl.bfloat16))


@triton.jit
def peer_store(slots, shift, FIXED: tl.constexpr):
    """A peer's address is computed from numbers that were loaded: nothing says that it is aligned."""
    there = (slots.to(tl.int64, bitcast=True) + tl.load(shift)).to(slots.dtype, bitcast=True)
    if FIXED:
        there = tl.multiple_of(there, 16)
    tl.store(there + tl.arange(0, 1024), tl.arange(0, 1024).to(tl.bfloat16))


@triton.jit
def product(x, w, flag, other, M, K, FIXED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Tiles of x · wᵀ, a signal for each; without FIXED by a debug_barrier, which loses the pipeline of a flattened loop."""
    for tile in tl.range(tl.program_id(0), M // BM, tl.num_programs(0), flatten=True):
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(K // BK):
            acc = tl.dot(x.load([tile * BM, k * BK]), w.load([0, k * BK]).T, acc)
        at = other + (tile * BM + tl.arange(0, BM)[:, None]).to(tl.int64) * BN + tl.arange(0, BN)[None, :]
        tl.store(at, acc.to(tl.bfloat16))
        if FIXED:
            publish_set(flag + tile, 1, False)
        else:
            tl.debug_barrier()
            tl.atomic_xchg(flag + tile, 1, sem="release", scope="sys")


@triton.jit
def biased(x, w, flag, other, M, K, FIXED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Without FIXED a branch changes the accumulator: ptxas then lets each product wait for the one before."""
    for tile in tl.range(tl.program_id(0), M // BM, tl.num_programs(0), flatten=True):
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(K // BK):
            acc = tl.dot(x.load([tile * BM, k * BK]), w.load([0, k * BK]).T, acc)
        columns = tl.arange(0, BN)
        if FIXED:
            acc += tl.load(other + columns, mask=columns < M * K, other=0.0).to(tl.float32)[None, :]
        else:
            if tl.load(flag) != 0:
                acc += tl.load(other + columns).to(tl.float32)[None, :]
        at = other + (tile * BM + tl.arange(0, BM)[:, None]).to(tl.int64) * BN + columns[None, :]
        tl.store(at, acc.to(tl.bfloat16))


@triton.jit
def spin(flag):
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") == 0:
        tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    tma_acquire(True)


@triton.jit
def arriving(desc, w, flag, other, M, K, FIXED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Products of tiles that arrive, in one loop. Without FIXED a later tile is asked for in front of the wait for it."""
    k_tiles = K // BK
    columns = tl.arange(0, BN)[None, :]
    if FIXED:
        for tile in tl.range(tl.program_id(0), M // BM, tl.num_programs(0), flatten=True):
            spin(flag + tile)
            acc = tl.zeros((BM, BN), tl.float32)
            for k in range(k_tiles):
                acc = tl.dot(desc.load([tile * BM, k * BK]), w.load([0, k * BK]).T, acc)
            tl.store(other + (tile * BM + tl.arange(0, BM)[:, None]).to(tl.int64) * BN + columns, acc.to(tl.bfloat16))
    else:
        spin(flag)
        acc = tl.zeros((BM, BN), tl.float32)
        for step in range(M // BM * k_tiles):
            tile = step // k_tiles
            k = step % k_tiles
            if k == 0:
                spin(flag + tile)
            acc = tl.dot(desc.load([tile * BM, k * BK]), w.load([0, k * BK]).T, tl.where(k == 0, 0.0, acc))
            if k == k_tiles - 1:
                tl.store(other + (tile * BM + tl.arange(0, BM)[:, None]).to(tl.int64) * BN + columns, acc.to(tl.bfloat16))


@triton.jit
def specialised(slots, other, out, flag, M, N, K, FIXED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """On Hopper the warp specialisation deletes atomics and inline assembly behind the loop over K."""
    x = tl.make_tensor_descriptor(slots, [M, K], [K, 1], [BM, BK])
    w = tl.make_tensor_descriptor(other, [N, K], [K, 1], [BN, BK])
    z = tl.make_tensor_descriptor(out, [M, N], [N, 1], [BM, BN])
    for tile in tl.range(tl.program_id(0), M // BM, tl.num_programs(0), flatten=False, warp_specialize=True):
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(K // BK):
            acc = tl.dot(x.load([tile * BM, k * BK]), w.load([0, k * BK]).T, acc)
        z.store([tile * BM, 0], acc.to(tl.bfloat16))
        if not FIXED:
            tl.inline_asm_elementwise("cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
            tl.atomic_xchg(flag + tile, 1, sem="release", scope="sys")


TYPES = {"desc": "tensordesc<bf16[64, 64]>", "shift": "*i64", "flag": "*i32", "M": "i32", "N": "i32", "K": "i32"}


def findings(kernel, fixed: bool, warps: int = 4, stages: int = 1, spec: Spec = SPEC, **constants) -> list[str]:
    """The rules that a tiny kernel breaks on sm_90."""
    tile = constants.get("BM", 128), constants.get("BN", 128), constants.get("BK", 64)
    types = TYPES | {"x": f"tensordesc<bf16[{tile[0]}, {tile[2]}]>", "w": f"tensordesc<bf16[{tile[1]}, {tile[2]}]>"}
    constants["FIXED"] = fixed
    signature = {name: "constexpr" if name in constants else types.get(name, "*bf16") for name in kernel.arg_names}
    aligned = frozenset(name for name, kind in signature.items() if kind[0] in "*i")
    built = build(Launch(kernel, signature, constants, aligned, warps, stages), 90)
    return [finding.rule for finding in rules.lint_built(built, spec)]


@pytest.mark.parametrize(
    ("kernel", "rule", "until"),
    [
        (plain_signal, "release", (3, 9)),  # 3.9 puts the barrier in front of the atomic itself
        (tma_signal, "release", (3, 8)),  # 3.8 waits for the whole of a TMA store
        (tma_wait, "acquire", None),
        (volatile_wait, "signal", None),
        (late_sum, "parted", None),
    ],
)
def test_tiny_kernels(kernel, rule: str, until: tuple[int, int] | None) -> None:
    assert findings(kernel, True) == []
    bad = findings(kernel, False)
    assert set(bad) == ({rule} if until is None or until > VERSION else set())


def test_an_address_that_may_be_odd() -> None:
    spec = Spec(payload=("slots",), vectors=True)
    assert findings(peer_store, True, spec=spec) == []
    assert findings(peer_store, False, spec=spec) == ["vectors"]


TILE = dict(BM=128, BN=128, BK=64)
OPERANDS = ((128, 64), (128, 64))


def test_a_debug_barrier_loses_the_pipeline() -> None:
    spec = Spec(signals=("flag",), mma="wgmma", loops=1, buffers=3, operands=OPERANDS)
    assert findings(product, True, 8, 3, spec, **TILE) == []
    lost = findings(product, False, 8, 3, spec, **TILE)
    assert "pipeline" in lost


def test_a_later_tile_is_not_asked_for_in_front_of_its_wait() -> None:
    tile = dict(BM=64, BN=128, BK=64)
    assert findings(arriving, True, 4, 3, **tile) == []
    assert findings(arriving, False, 4, 3, **tile) == ["acquire"]


def test_a_branch_on_the_accumulator_serialises_the_products() -> None:
    wide, spec = TILE | {"BN": 256}, Spec(mma="wgmma", loops=1, buffers=3)
    assert findings(biased, True, 8, 3, spec, **wide) == []
    assert findings(biased, False, 8, 3, spec, **wide) == ["pipeline"]


def test_one_stage_is_no_pipeline() -> None:
    spec = Spec(mma="wgmma", loops=1, buffers=3, operands=OPERANDS)
    assert "pipeline" in findings(product, True, 8, 1, spec, **TILE)


def test_a_tile_that_does_not_fit_in_registers() -> None:
    wide = TILE | {"BN": 256}
    spec = Spec(mma="wgmma", loops=1, buffers=3)
    assert findings(product, True, 8, 3, spec, **wide) == []
    assert findings(product, True, 4, 3, spec, **wide) == ["pipeline", "spill"]  # ptxas says that registers are too few


def test_warp_specialisation_drops_operations() -> None:
    assert findings(specialised, True, 4, 3, Spec(), **TILE) == []
    assert findings(specialised, False, 4, 3, Spec(), **TILE) == ["dropped", "dropped"]


@pytest.fixture(scope="module", autouse=True)
def _compile_ahead(request: pytest.FixtureRequest) -> None:
    compiled.begin(request.session)


# ---- the shipped kernels with something taken away -----------------------------------------------------------------------------

RS, AG = Case("gemm_rs", "in_kernel"), Case("ag_gemm", "in_kernel")
RS_COPY, AG_COPY = Case("gemm_rs", "copy_engine"), Case("ag_gemm", "copy_engine")
DRAINED = r"cp\.async\.bulk\.wait_group 0; fence\.proxy\.async; bar\.sync 0;"
#: 3.9 waits for stores and has a barrier in front of an atomic by itself: that the source's are gone is all there is to find.
UNORDERED = "release" if VERSION < (3, 9) else "dropped"
MUTANTS = [
    (RS_COPY, DRAINED, "cp.async.bulk.wait_group.read 0; fence.proxy.async; bar.sync 0;", UNORDERED),
    (RS_COPY, DRAINED, "cp.async.bulk.wait_group 0; fence.proxy.async;", "release" if VERSION < (3, 9) else ""),
    (RS_COPY, r"acquire", "relaxed", "dropped"),
    (RS_COPY, r"(global\.sys)\.release\.add", r"\1.relaxed.add", "dropped"),
    (RS, r"bar\.sync 0; mov", "mov", UNORDERED),
    (RS, r"(global\.sys)\.release", r"\1.relaxed", "dropped"),
    (RS, r"(global)\.sys\.release", r"\1.gpu.release", "signal"),
    (RS, r"mov\.u64 (\S+), %globaltimer", r"mov.u64 \1, 0", "bounded"),
    (AG, r"bar\.sync 0; mov", "mov", UNORDERED),
    (AG, r"fence\.proxy\.async; mov", "mov", "acquire"),
    (AG, r"ld\.global\.sys\.acquire", "ld.volatile.global", "dropped"),
    (AG_COPY, r"fence\.proxy\.async; mov", "mov", "acquire"),
    (AG_COPY, DRAINED, "mov.u32 %r0, 0;", "release" if VERSION < (3, 8) else "dropped"),  # 3.8 waits for the store by itself
]


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(i, marks=() if rule not in [rule for *_, rule in MUTANTS[:i]] else pytest.mark.slow)
        for i, (*_, rule) in enumerate(MUTANTS)
    ],
)
def test_mutants_of_the_machine_code(number: int) -> None:
    case, what, by, rule = MUTANTS[number]
    built = compiled.built(case, 90)
    text, count = re.subn(what, by, built.ptx)
    assert count > 0, "nothing was taken away"
    found = {finding.rule for finding in compiled.judge(built, ptx=text)}
    assert rule in found if rule else not found


def test_counts_are_of_the_protocol() -> None:
    built = compiled.built(RS, 90)
    less = re.sub(r"[^\n]*tt\.atomic_rmw exch, release, sys[^\n]*\n", "", built.ttir, count=1)
    assert [finding.rule for finding in compiled.judge(built, ttir=less)] == ["count"]


# ---- the tool ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_program_of_a_user() -> None:
    command = ["bash", "scripts/launch.sh", "--nproc", "2", "-m", "fluxlike", "lint", "--sm", "90", "tutorials/02_push_tiles.py"]
    command += ["--m", "64", "--n", "256", "--calls", "2"]
    environment = os.environ | {"FLUXLIKE_PYTHON": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "check passed" in done.stdout and "1 kernel compiled, 0 findings" in done.stdout and "sm_90 push_kernel" in done.stdout


def test_findings_are_the_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    bad = lint.Report("case", "kernel", 90, 255, 1000, 3, (rules.Finding("spill", 0, "", "too many"),))
    monkeypatch.setattr(lint, "check_all", lambda *asked: iter([bad]))
    assert lint.main([]) == 1
    said = capsys.readouterr().out
    assert "3 spills" in said and "[spill] too many" in said and "1 kernel compiled, 1 finding" in said


@pytest.mark.parametrize("jobs", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_the_shipped_kernels_from_the_command_line(jobs: str, capsys: pytest.CaptureFixture) -> None:
    assert lint.main(["--sm", "90", "--case", "gemm_rs-in_kernel-large", "--jobs", jobs, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["triton"] == triton.__version__
    assert [(one["case"], one["kernel"], one["capability"], one["findings"]) for one in said["reports"]] == [
        (str(case), "gemm_rs_kernel", 90, []) for case in (RS, Case("gemm_rs", "in_kernel", dtype=torch.float32))
    ]


def test_json_of_a_program_is_json_alone(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "x.py").write_text("")
    monkeypatch.setattr(lint, "launches_of", lambda file, args: (print("what the program says"), (0, []))[1])
    assert lint.main(["--sm", "90", "--json", str(tmp_path / "x.py")]) == 2  # it launched no kernel
    said = capsys.readouterr()
    assert json.loads(said.out)["reports"] == [] and "what the program says" in said.err


@pytest.mark.parametrize("more", (["--case", "gemm_rs"], ["--jobs", "2"]))
def test_what_is_not_for_a_program(tmp_path, more, capsys) -> None:
    (tmp_path / "x.py").write_text("")
    with pytest.raises(SystemExit) as leaving:
        lint.main([*more, str(tmp_path / "x.py")])
    assert leaving.value.code == 2 and "are for the kernels of fluxlike; leave them out with a FILE" in capsys.readouterr().err


def test_a_missing_file_is_said() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fluxlike", "lint", "no_such.py"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 2 and "there is no file no_such.py" in done.stderr

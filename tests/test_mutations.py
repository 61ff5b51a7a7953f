"""With any single signal or wait taken away, a result is wrong or a readable time-out says so. CPU heap.

Each mutant replaces one function of `kernels.sync`, as one operation sees it, or one job of the copy engine. A fault of order may
be survived by luck, so every mutant has a scene in which it cannot: ranks that come late, and a rank without rows, for which
nobody waits and which only the credits hold back.
"""

import importlib
import time
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from cases import rows_slice
from ranks import Outcome, run_fresh

import fluxlike
from fluxlike.kernels.sync import ARRIVED, EPOCH, LAST_USE
from fluxlike.runtime import cpu


@triton.jit
def publish_add(counter, TMA: tl.constexpr):
    pass


@triton.jit
def publish_set(signal, value, TMA: tl.constexpr):
    pass


@triton.jit
def wait(signal, want, ctl, rank, what: tl.constexpr, peer, R: tl.constexpr):
    pass


@triton.jit
def wait_credits(ctl, slot, rank, R: tl.constexpr):
    pass


@triton.jit
def reset(full, slot, R: tl.constexpr):
    pass


@triton.jit
def finish(ctl, slot, rank, epoch, R: tl.constexpr):
    """All of the original but the credits."""
    tl.store(ctl + ARRIVED, 0)
    tl.store(ctl + LAST_USE + slot, epoch)
    tl.store(ctl + EPOCH, epoch)


DEVICE = {function.fn.__name__: function for function in (publish_add, publish_set, wait, wait_credits, reset, finish)}

M, N, K = 40, 48, 32
EMPTY_M = 2  # of three ranks the last has no rows

#: (operation, transport, mutant): the scene in which it must show.
MUTANTS = {
    ("gemm_rs", "copy_engine", "publish_add"): "late",
    ("gemm_rs", "copy_engine", "wait"): "late",
    ("gemm_rs", "copy_engine", "wait_credits"): "empty",
    ("gemm_rs", "copy_engine", "reset"): "late",
    ("gemm_rs", "copy_engine", "finish"): "late",
    ("gemm_rs", "copy_engine", "engine.wait"): "late",
    ("gemm_rs", "copy_engine", "engine.write full"): "late",
    ("gemm_rs", "copy_engine", "engine.write ready"): "late",
    ("gemm_rs", "copy_engine", "engine.copy"): "late",
    ("gemm_rs", "in_kernel", "publish_set"): "late",
    ("gemm_rs", "in_kernel", "wait"): "late",
    ("gemm_rs", "in_kernel", "wait_credits"): "empty",
    ("gemm_rs", "in_kernel", "finish"): "late",
    ("ag_gemm", "copy_engine", "publish_set"): "late",
    ("ag_gemm", "copy_engine", "wait"): "late",
    ("ag_gemm", "copy_engine", "wait_credits"): "empty",
    ("ag_gemm", "copy_engine", "reset"): "late",
    ("ag_gemm", "copy_engine", "finish"): "late",
    ("ag_gemm", "copy_engine", "engine.wait"): "empty",
    ("ag_gemm", "copy_engine", "engine.write full"): "late",
    ("ag_gemm", "copy_engine", "engine.write ready"): "empty",
    ("ag_gemm", "copy_engine", "engine.copy"): "late",
    ("ag_gemm", "in_kernel", "publish_set"): "late",
    ("ag_gemm", "in_kernel", "wait"): "late",
    ("ag_gemm", "in_kernel", "wait_credits"): "empty",
    ("ag_gemm", "in_kernel", "finish"): "late",
}


def _mutate(op: str, mutant: str) -> None:
    if mutant in DEVICE:
        module = importlib.import_module(f"fluxlike.kernels.{op}")
        assert hasattr(module, mutant), f"{op} has no {mutant} to take away"
        setattr(module, mutant, DEVICE[mutant])
    elif mutant.startswith("engine."):
        job, _, which = mutant.removeprefix("engine.").partition(" ")
        original = getattr(cpu.CpuCopyEngine, job)

        def without(self: Any, *args: int) -> None:
            # flags at the peers are written with 1, counters on this rank reset with 0
            if which and (args[1] == 1) != (which == "full"):
                original(self, *args)

        setattr(cpu.CpuCopyEngine, job, without)


def _call(op: str, ctx: Any, m: int, rank: int, ranks: int, seed: int) -> bool:
    """One call on new small integers; whether the result is right."""
    generator = torch.Generator().manual_seed(seed)
    if op == "gemm_rs":
        xs = torch.randint(-2, 3, (ranks, m, K), generator=generator).float()
        ws = torch.randint(-2, 3, (ranks, N, K), generator=generator).float()
        result = fluxlike.gemm_rs(xs[rank], ws[rank], ctx)
        right = torch.einsum("rmk,rnk->mn", xs, ws)[rows_slice(m, ranks, rank)]
    else:
        x = torch.randint(-2, 3, (m, K), generator=generator).float()
        w = torch.randint(-2, 3, (N, K), generator=generator).float()
        result = fluxlike.ag_gemm(x[rows_slice(m, ranks, rank)], w, ctx, m=m)
        right = x @ w.T
    return torch.equal(result, right)


def scene(group: Any, op: str, transport: str, mutant: str, kind: str) -> list[bool]:
    """Six calls; "late": another rank is late each time; "empty": a rank that nobody waits for is far ahead or behind."""
    _mutate(op, mutant)
    fluxlike.init(heap="shm")
    rank, ranks = group.rank(), group.size()
    m = EMPTY_M if kind == "empty" else M
    create = fluxlike.create_gemm_rs_context if op == "gemm_rs" else fluxlike.create_ag_gemm_context
    args = (M, N) if op == "gemm_rs" else (M, N, K)
    ctx = create(*args, dtype=torch.float32, schedule=transport)
    # gemm_rs: the rank without rows waits for nobody, so the others are behind; ag_gemm: nobody waits for it, so it is behind
    behind = {0, 1} if op == "gemm_rs" else {2}
    right = []
    for call in range(6):
        if kind == "empty" and call == 0 and rank in behind:
            time.sleep(0.7)
        if kind == "late" and call % ranks == rank:
            time.sleep(0.3)
        right.append(_call(op, ctx, m, rank, ranks, seed=call))
    return right


def _run(op: str, transport: str, mutant: str, kind: str) -> list[Outcome]:
    return run_fresh(
        scene,
        3,
        env={"FLUXLIKE_TIMEOUT_S": "2" if mutant else "20"},
        timeout=60,
        op=op,
        transport=transport,
        mutant=mutant,
        kind=kind,
    )


@pytest.mark.parametrize("kind", ["late", "empty"])
@pytest.mark.parametrize("transport", ["copy_engine", "in_kernel"])
@pytest.mark.parametrize("op", ["gemm_rs", "ag_gemm"])
def test_nothing_taken_away(op: str, transport: str, kind: str) -> None:
    for outcome in _run(op, transport, "", kind):
        assert outcome.ok and all(outcome.value), str(outcome)


@pytest.mark.parametrize("key", MUTANTS, ids="-".join)
def test_a_mutant_is_seen(key: tuple[str, str, str]) -> None:
    op, transport, mutant = key
    outcomes = _run(op, transport, mutant, MUTANTS[key])
    wrong = [outcome.rank for outcome in outcomes if outcome.ok and not all(outcome.value)]
    timeouts = [outcome for outcome in outcomes if outcome.error == "PeerTimeout"]
    assert wrong or timeouts, f"nobody noticed that {mutant} is gone: {[str(outcome) for outcome in outcomes]}"
    for outcome in timeouts:
        assert (
            op in outcome.message
            and f"rank {outcome.rank}" in outcome.message
            and "FLUXLIKE_TIMEOUT_S" in outcome.message + ("FLUXLIKE_TIMEOUT_S" if "gave up first" in outcome.message else "")
        )
    others = [str(outcome) for outcome in outcomes if not outcome.ok and outcome.error != "PeerTimeout"]
    assert not others, others

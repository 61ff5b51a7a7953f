"""The terms of the model of `ops.cost` one by one, where one bounds a call. `test_choice` holds it to what was measured."""

from dataclasses import replace

import pytest
import torch

from fluxlike.ops import choice, cost, tiling
from fluxlike.ops.choice import Choice, Problem

BF16 = torch.bfloat16


def on_h200(op, m, n, k, ranks=4):
    return Problem(op, (9, 0), 132, ranks, BF16, m, n, k)


def test_one_rank_waits_for_nobody():
    """By either way of torch's it is a product of torch's, and nothing beside."""
    for op in ("gemm_rs", "ag_gemm"):
        alone = on_h200(op, 4096, 8192, 2048, ranks=1)
        for transport in choice.TORCH:
            assert choice.predict(alone, choice.usual(alone, transport)) == cost.torch_seconds(alone, 4096)


def test_what_bounds_a_call_where_its_product_does_not(monkeypatch):
    """Few columns behind much to gather, or few steps in front of much to send: the terms of the model one by one."""
    gather = on_h200("ag_gemm", 16384, 1024, 16384, ranks=2)
    nbytes, wide = 8192 * 16384 * 2, tiling.WIDE
    pushed = {n: choice.predict(gather, Choice("in_kernel", wide, pushers=n)) for n in choice.PUSHERS}
    slow = nbytes * (1 / (16 * cost.PUSHER_RATE) - 1 / cost.STORE_RATE)
    assert pushed[16] - pushed[24] == pytest.approx(slow) and pushed[24] == pushed[32]
    idle = on_h200("ag_gemm", 512, 1024, 16384, ranks=2)  # four tiles of the own shard: the programs without one push, too
    assert len({choice.predict(idle, Choice("in_kernel", wide, pushers=n)) for n in choice.PUSHERS}) == 1
    whole, halves = (choice.predict(gather, Choice("copy_engine", wide, subs=subs)) for subs in (1, 2))
    copy, cut = nbytes / cost.COPY_RATE + cost.COPY, nbytes / cost.COPY_RATE + 2 * cost.COPY
    assert whole - halves == pytest.approx(copy - cut / 2), "the tiles of a shard begin with its first part"
    send = on_h200("gemm_rs", 8192, 16384, 64 * 4)
    stored = choice.predict(send, Choice("in_kernel", wide))
    assert stored > cost.CALL + 3 * 2048 * 16384 * 2 / cost.STORE_RATE
    monkeypatch.setattr(cost, "torch_seconds", lambda problem, rows: 1e-3)
    slow, fast = (replace(on_h200("gemm_rs", 8192, 8192, 8192), memory=memory) for memory in (2e12, 4e12))
    summed = [choice.predict(problem, choice.usual(problem, "decomposed")) for problem in (slow, fast)]
    assert summed[0] - summed[1] == pytest.approx(5 * 2048 * 8192 * 2 / 4e12), "four parts are read and one is written"


def test_tiles_of_torch_are_those_of_half_types(monkeypatch):
    """What cuBLAS does with few tiles was fitted to bf16, and says nothing of fp32."""
    problem = on_h200("gemm_rs", 1024, 8192, 64)  # two waves
    before = [cost.torch_seconds(replace(problem, dtype=dtype), 1024) for dtype in (BF16, torch.float32)]
    monkeypatch.setattr(cost, "TORCH_TILE_END", 1.0)
    after = [cost.torch_seconds(replace(problem, dtype=dtype), 1024) for dtype in (BF16, torch.float32)]
    assert after[0] > before[0] and after[1] == before[1]


def test_what_shares_its_last_wave():
    """What stands behind a whole one; in gemm_rs no tile that has no registers for it, whatever the height of its group."""
    half, made = on_h200("ag_gemm", 1408, 1536, 1 << 16, ranks=1), Choice("copy_engine", tiling.WIDE)
    assert choice.predict(half, made) > cost.GATHERING * cost.tile_seconds(half, made, half.k)
    for group_m in choice.GROUPS:
        tile = replace(tiling.HALF, group_m=group_m)
        assert cost.sharing("gemm_rs", "in_kernel", tile) == float("inf") > cost.sharing("ag_gemm", "in_kernel", tile)

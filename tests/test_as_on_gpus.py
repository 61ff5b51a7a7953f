"""What only GPUs decide, in the interpreter: ranks that choose kernels and tiles as GPUs do meet on the wire, however each chooses.

A rank goes by what is its own: where its operands lie and how, how many multiprocessors its GPU has. So calls are drawn in which
that differs from rank to rank, one makes them in one kernel and another by torch's product, and all must be right.
"""

import random

import pytest
import slow
import torch
import torch.distributed as dist
from cases import AGCase, RSCase, same
from ranks import TORCHRUN, run_ranks

import fluxlike
from fluxlike.ops import tiling
from fluxlike.runtime import world

CALLS = 40
#: Multiprocessors of the ranks' GPUs, few, as calls are small.
PROGRAMS = (6, 4, 5, 8)


def moved(t, own, *more):
    """The same matrix as a rank may have it: most often as it is, or with gaps between its rows, off its alignment, or ``more``."""
    how = own.choice((*["as it is"] * 6, "gaps of 16", "gaps of 3", "off by 8", "off by 1", *more))
    rows, columns = t.shape
    if how == "transposed":
        return t.T.contiguous().T
    if how.startswith("gaps"):
        wide = t.new_full((rows, columns + int(how.split()[-1])), float("nan"))[:, :columns]
        return wide.copy_(t)
    if how.startswith("off"):
        start = int(how.split()[-1])
        return t.new_empty(start + t.numel())[start:].view(rows, columns).copy_(t)
    return t


def drawn(group, seed, capability):
    """Calls of few rows, of which many are made in one kernel. Returns the operation of each, and how it was made."""
    size, rank, executor = dist.get_world_size(group), dist.get_rank(group), world.current().executor
    common, own, took = random.Random(seed), random.Random(100 * seed + rank), []
    dtype = common.choice((torch.bfloat16, torch.float16))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "capability", capability)
        patch.setattr(executor, "programs", PROGRAMS[rank])
        patch.setattr(tiling, "push_rows", lambda tile, x: 16 * tile.warps // x.element_size())
        with (
            fluxlike.create_gemm_rs_context(80, 512, None, dtype, group, "sequential") as rs,
            fluxlike.create_ag_gemm_context(260, 512, 512, dtype, group, "sequential") as ag,
            fluxlike.create_gemm_ar_context(80, 512, dtype, group) as ar,
        ):
            for call in range(CALLS):
                m = common.choice((1, 8 * size, 8 * size, 16 * size, 16 * size, common.randint(1, 80)))
                n, k, bias = common.choice((128, 256, 512)), 16 * common.randint(1, 8), bool(common.randint(0, 1))
                what, op = f"seed {seed}, call {call}", common.choice((rs, ag, ar))
                if op is ag:
                    m = common.choice((m, 65, 128, 200, 256, 257))
                    case: AGCase | RSCase = AGCase(m, [n] * size, k, dtype, call, bias)
                else:
                    case = RSCase(m, n, [k] * size, dtype, call, bias and op is rs)
                x, w, b = case.inputs(rank)
                x, w = moved(x, own), moved(w, own, "transposed")
                if op is ag:
                    y, expected = fluxlike.ag_gemm(x, w, ag, bias=b, m=m), case.whole()[1][rank]
                elif op is rs:
                    y, expected = fluxlike.gemm_rs(x, w, rs, bias=b), case.expected(rank)
                else:
                    y, expected = fluxlike.gemm_ar(x, w, ar), torch.cat([case.expected(r) for r in range(size)])
                same(y, expected, f"{what}: {op.op} {m}×{n}×{k}")
                took.append((op.op, op.last_path.split("/")[-1]))
    return took


@pytest.mark.skipif(TORCHRUN, reason="GPUs decide for themselves")
@pytest.mark.parametrize(("ranks", "capability"), slow.behind(2, [(3, (8, 0)), (4, (9, 0)), (2, (9, 0)), (3, (10, 0))]))
def test_ranks_that_choose_otherwise_meet(ranks, capability):
    """Each operation in one kernel on some ranks, while others make it by torch, is among what is drawn."""
    took = run_ranks(drawn, ranks, seed=ranks, capability=capability)
    calls = {(of_all[0][0], frozenset(path for _, path in of_all)) for of_all in zip(*took, strict=True)}
    assert {(op, frozenset(("fused", "torch"))) for op in ("gemm_rs", "ag_gemm", "gemm_ar")} <= calls

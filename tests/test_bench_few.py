"""`bench` on shapes of few rows or values: what is right passes, and what is wrong does not."""

from types import SimpleNamespace

import pytest
import ranks
import slow
import torch

import fluxlike

pytest.importorskip("rich")

from fluxlike.tools import bench, bench_arguments, bench_problems
from fluxlike.tools.bench_peers import Peers
from fluxlike.tools.bench_reduce import Size
from fluxlike.tools.bench_report import Shape
from fluxlike.tools.bench_sparse import Table

#: Fewer rows than ranks, and fewer values than say what errors are usual; with those of gemm_rs a rounding more passed for wrong.
FEW = [("gemm_ar", Shape(1, 64, 64)), ("gemm_ar", Shape(3, 8, 64)), ("gemm_ar", Shape(1, 1, 64))]
FEW += [("gemm_rs", Shape(2, 2, k)) for k in (54, 62)] + [("ag_gemm", Shape(2, 2, 62)), ("all_reduce", Size(4))]
FEW += [("sparse_all_reduce", Table(1, 1, 1)), ("sparse_all_reduce", Table(3, 1, 1))]


def judged_of_few(group, wrong):
    """By operation and shape: the rows, where gemm_ar leaves out the other rank's part, if ``wrong``."""
    fluxlike.init(heap="shm")
    if wrong:
        fluxlike.gemm_ar = lambda x, weight, ctx, out: torch.matmul(x, weight.T, out=out)
    found = {}
    for op, shape in FEW[:3] if wrong else FEW:
        run = bench.Bench(bench.parse([op], cuda=False), Peers(), torch.device("cpu"))
        run.rounds = 1
        found[op, shape] = {row.method: row.status for row in run.shape(shape)["eager"].rows}
    fluxlike.finalize()
    return found


@pytest.mark.parametrize("wrong", slow.behind(1, [True, False]))
def test_few_values(wrong):
    for outcome in ranks.run_fresh(judged_of_few, 2, timeout=120, wrong=wrong):
        assert outcome.ok, outcome
        found = outcome.value
        assert len(found) == (3 if wrong else len(FEW))
        for which, statuses in found.items():
            ours = set(bench_arguments.KINDS[which[0]].OURS)
            assert {name for name, status in statuses.items() if status != "ok"} == (ours if wrong else set()), which


def test_a_sample_of_all_rows_where_they_are_nobody_s():
    """Of three rows on two ranks each is looked at."""
    rows = []
    problem = SimpleNamespace(choice=torch.Generator().manual_seed(5), device="cpu", peers=SimpleNamespace(size=2))
    for kind in (bench_problems.GemmAR, bench_problems.GemmRS):
        kind.pick_rows(problem, 3 if kind is bench_problems.GemmAR else 4)
        rows.append((sorted(problem.rows.tolist()), len(problem.picked)))
    assert rows == [([0, 1, 2], 3), ([0, 1, 2, 3], 2)]

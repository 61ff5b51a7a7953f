"""Programs of collectives drawn at random: each gives what torch gives in float64, whatever came before it on the same memory.

The calls of a program follow each other at once; results are looked at behind the last one. The same programs on every run, or
others in a hunt, see test_fuzz.
"""

import contextlib
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from fuzz_calls import DTYPES, SIZES, SPECIAL, W_KINDS, X_KINDS, Layout, layouts, product
from hypothesis import given
from hypothesis import strategies as st
from ranks import divided, rows_slice, run_ranks
from test_fuzz import equal, fuzz
from test_trees import MACHINES, machine

import fluxlike
from fluxlike.ops import all_reduce, collectives, exchange

REDUCES = ("all_reduce", "all_reduce_", "reduce_scatter", "reduce")
MOVES = ("all_gather", "broadcast")
ALGORITHMS = dict.fromkeys(("all_reduce", "all_reduce_"), ("auto", *all_reduce.ALGORITHMS, "trees"))
#: Dtypes that are only moved.
MOVED = ("uint8", "int32", "float64")


@dataclass(frozen=True)
class Step:
    """One call. ``shapes``: of the tensors, several of a list; ``layouts``: one a rank; gemm_ar: x is [m, k of the rank]."""

    op: str
    dtype: str
    algo: str
    how: str
    shapes: tuple[tuple[int, int], ...]
    layouts: tuple[Layout, ...]
    w_layout: Layout
    ks: tuple[int, ...]
    bias: bool
    pass_m: bool
    root: int
    seed: int
    planted: tuple[tuple[int, int, float], ...]  # (rank, place, value)

    @property
    def world(self) -> int:
        return len(self.layouts)

    def tensors(self, rank: int) -> list[torch.Tensor]:
        """What this rank passes; the values depend on the step and the rank only."""
        dtype, seed = getattr(torch, self.dtype), 100 * self.seed + 10 * rank
        layout, made = self.layouts[rank], []
        for i, (rows, columns) in enumerate(self.shapes):
            if self.op == "all_gather":
                rows = len(range(rows)[rows_slice(rows, self.world, rank)])
            made.append(layout.place(rows, self.ks[rank] if self.op == "gemm_ar" else columns, torch.float32, seed + i))
        for who, place, value in self.planted:
            if who % self.world == rank and made[0].numel() and dtype.is_floating_point:
                flat = place % made[0].numel()
                made[0][flat // made[0].shape[1], flat % made[0].shape[1]] = value
        if self.op == "gemm_ar":
            n = self.shapes[0][1]
            made.append(self.w_layout.place(n, self.ks[rank], torch.float32, seed + 8))
            made.append(Layout().place(1, n, torch.float32, 100 * self.seed)[0])
        return [self._cast(t, dtype) for t in made]

    def _cast(self, t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The same layout in another dtype, where there are NaN around it."""
        if not dtype.is_floating_point:
            return t.abs().to(dtype)
        at = t.storage_offset()
        return t.as_strided((t.untyped_storage().nbytes() // 4,), (1,), 0).to(dtype).as_strided(t.shape, t.stride(), at)

    def run(self, group: dist.ProcessGroup, xs: list[torch.Tensor]) -> list[torch.Tensor | None]:
        match self.op:
            case "all_reduce" | "all_reduce_":
                y = getattr(fluxlike, self.op)(xs if len(xs) > 1 else xs[0], group, self.how, self.algo)
                assert self.op == "all_reduce" or y is (xs if len(xs) > 1 else xs[0])
                return y if len(xs) > 1 else [y]
            case "reduce_scatter":
                return [fluxlike.reduce_scatter(xs[0], group, self.how, self.algo)]
            case "all_gather":
                return [fluxlike.all_gather(xs[0], group, self.shapes[0][0] if self.pass_m else None, self.algo)]
            case "reduce":
                return [fluxlike.reduce(xs[0], self.root, group, self.how, self.algo)]
            case "broadcast":
                return [fluxlike.broadcast(xs[0], self.root, group, self.algo)]
        return [fluxlike.gemm_ar(xs[0], xs[1], bias=xs[2] if self.bias else None, group=group)]

    def expected(self, rank: int) -> list[torch.Tensor | None]:
        """What this rank shall get, in float64; whole numbers are exact in whatever order they are added."""
        parts = [[t.double().cpu() for t in self.tensors(source)] for source in range(self.world)]
        if self.op == "all_gather":
            return [torch.cat([part for (part,) in parts])]
        if self.op == "broadcast":
            return parts[self.root]
        if self.op == "gemm_ar":
            total = sum(product(x, w) for x, w, _ in parts)
            return [total + parts[0][2] if self.bias else total]
        totals: list[torch.Tensor | None] = [self._reduced(torch.stack(tensors)) for tensors in zip(*parts, strict=True)]
        if self.op == "reduce":
            return totals if rank == self.root else [None]
        rows = rows_slice(self.shapes[0][0], self.world, rank)
        return [totals[0][rows]] if self.op == "reduce_scatter" else totals

    def _reduced(self, parts: torch.Tensor) -> torch.Tensor:
        if self.how == "max":
            return parts.amax(0)  # of NaN it is NaN
        total = parts.sum(0)
        return divided(total.float(), self.world).to(getattr(torch, self.dtype)).double() if self.how == "avg" else total


@st.composite
def steps(draw, world: int) -> Step:
    op = draw(st.sampled_from((*REDUCES, "all_reduce", *MOVES, "gemm_ar")))
    rooted = op in ("reduce", "broadcast")
    others = ("auto", *(collectives.ROOTED if rooted else collectives.ALGORITHMS))
    algo = draw(st.sampled_from(ALGORITHMS.get(op, others)))
    count = draw(st.integers(1, 5)) if op.startswith("all_reduce") and draw(st.booleans()) else 1
    shapes = [(draw(SIZES), draw(SIZES)) for _ in range(count)]
    pass_m = draw(st.booleans())
    if op == "all_gather" and not pass_m:
        shapes = [(rows // world * world, columns) for rows, columns in shapes]
    moved = op in MOVES and algo not in ("words", "two_shot") and draw(st.booleans())
    kinds = X_KINDS if op == "gemm_ar" else W_KINDS
    contiguous = st.builds(Layout, offset=st.sampled_from((0, 1, 3, 16)))
    places = [draw(contiguous if op == "all_reduce_" else layouts(kinds)) for _ in range(world)]
    return Step(
        op=op,
        dtype=draw(st.sampled_from(MOVED if moved else DTYPES)),
        algo=algo,
        how=draw(st.sampled_from(tuple(exchange.OPS))),
        shapes=tuple(shapes),
        layouts=tuple(places),
        w_layout=draw(layouts(W_KINDS)),
        ks=tuple(draw(SIZES) for _ in range(world)),
        bias=draw(st.booleans()),
        pass_m=pass_m,
        root=draw(st.integers(0, world - 1)),
        seed=draw(st.integers(0, 99)),
        planted=tuple(draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 999), st.sampled_from(SPECIAL)), max_size=2))),
    )


@st.composite
def programs(draw) -> tuple[int, int, int, list[Step]]:
    """Ranks, bytes of a set at most, elements of a tree at most, and the calls."""
    world = draw(st.sampled_from((2, 3)))
    most, bound = draw(st.sampled_from((exchange.SET, 8 << 10))), draw(st.sampled_from((0, 200)))
    return world, most, bound, draw(st.lists(steps(world), min_size=2, max_size=8))


def gives_the_results(group, most: int, bound: int, calls: list[Step]) -> None:
    rank = dist.get_rank(group)
    usual, exchange.SET = exchange.SET, most
    trees = any(step.algo == "trees" for step in calls)
    try:
        with machine(group, MACHINES[group.size()][0], bound, min(most, 4 << 20)) if trees else contextlib.nullcontext():
            given = [step.tensors(rank) for step in calls]
            results = [step.run(group, xs) for step, xs in zip(calls, given, strict=True)]
            for number, (step, xs, ys) in enumerate(zip(calls, given, results, strict=True)):
                what = f"call {number}, rank {rank}, {step}"
                expected = step.expected(rank)
                assert len(ys) == len(expected), what
                for y, right in zip(ys, expected, strict=True):
                    assert (y is None) == (right is None), what
                    if y is not None:
                        assert y.dtype == xs[0].dtype and y.is_contiguous(), what
                        equal(y, right, what)
                for x, was in zip(xs, step.tensors(rank), strict=True):
                    if step.op != "all_reduce_":
                        equal(x, was.double().cpu(), f"an input was written to, {what}")
    finally:
        exchange.SET = usual


@fuzz(8)
@given(program=programs())
def test_programs(program):
    world, most, bound, calls = program
    run_ranks(gives_the_results, world, most=most, bound=bound, calls=calls)


@pytest.mark.slow
@fuzz(60)
@given(program=programs())
def test_more_programs(program):
    world, most, bound, calls = program
    run_ranks(gives_the_results, world, most=most, bound=bound, calls=calls)

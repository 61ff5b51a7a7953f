"""One call of `soak`: its operands from a data seed, the digest of its results, and the comparison with the reference."""

import math
import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import fluxlike

from ..kernels.tiles import chunk_rows, rows_of
from ..runtime.control import ControlGroup
from .bench_problems import allowed_error
from .soak_plan import COLLECTIVES, SPARSE, Signature

#: What the reference is compared on, at most.
SAMPLE_ROWS, SAMPLE_COLUMNS = 128, 256
#: The largest deviation may be so many times torch's largest; of thousands of random samples some differ that much by chance.
LARGEST = 3.0
_PART = 1 << 24  # words that a digest takes at a time, which bounds its memory


class Operands:
    """The tensors of one call on one rank. Their values come from `fill`; every rank has its own.

    gemm_rs, gemm_ar: x [M, K_r], weight [N, K_r], bias [N]. ag_gemm: x [rows of this rank, K], weights [N_r, K], biases [N_r]; of
    several weights each is half as high as the one before, and only every other has a bias. Collectives: x [M, N], of all_gather
    [rows of this rank, N]; ``xs``: x and the other tensors of a list, each with half as many rows as the one before.
    sparse_all_reduce: x [entries, N] and ``ids`` [1, entries], of rows of [M, N]. ``whole``: K (gemm_rs), N (ag_gemm)
    of all ranks.
    """

    def __init__(self, signature: Signature, ranks: int, rank: int, device: torch.device) -> None:
        dtype = getattr(torch, signature.dtype)
        step = 16 if signature.uneven else 0
        extra = step * rank
        self.whole = 0
        heights: list[int] = []
        if signature.op == SPARSE:
            rows, k = signature.ids * rank // (ranks - 1) if signature.uneven and ranks > 1 else signature.ids, signature.n
        elif signature.op in COLLECTIVES:
            rows, k = rows_of(signature.m, ranks, rank) if signature.op == "all_gather" else signature.m, signature.n
        elif signature.op == "ag_gemm":
            rows, k = rows_of(signature.m, ranks, rank), signature.k
            every = [[max(1, (signature.n // ranks + step * r) >> i) for i in range(signature.weights)] for r in range(ranks)]
            heights, self.whole = every[rank], sum(map(sum, every))
        else:
            rows, k, heights = signature.m, signature.k // ranks + extra, [signature.n]
            self.whole = sum(signature.k // ranks + step * r for r in range(ranks))
        self.xs = [
            torch.empty(max(1, rows >> i) if i else rows, k, dtype=dtype, device=device)
            for i in range(1 if heights else signature.weights)
        ]
        self.x = self.xs[0]
        self._stored = [torch.empty((k, n) if signature.transposed else (n, k), dtype=dtype, device=device) for n in heights]
        self.weights = [w.T if signature.transposed else w for w in self._stored]
        self.biases = [
            torch.empty(n, dtype=dtype, device=device) if signature.bias and i % 2 == 0 else None for i, n in enumerate(heights)
        ]

        self.ids = torch.zeros(1, rows if signature.op == SPARSE else 0, dtype=torch.int64, device=device)
        self._result, self._table = (rows_of(rows, ranks, rank), signature.n), signature.m

    def room(self) -> torch.Tensor:
        """A tensor for the result of gemm_rs, of NaN."""
        return torch.full(self._result, math.nan, dtype=self.x.dtype, device=self.x.device)

    def fill(self, generator: torch.Generator, seed: int) -> None:
        """Normal random numbers and random rows; the same for the same seed."""
        generator.manual_seed(seed)
        self.ids.random_(0, self._table, generator=generator)
        for t in (*self.xs, *self._stored, *self.biases):
            if t is not None:
                t.normal_(generator=generator)


def call(
    signature: Signature, operands: Operands, ctx: Any, group: dist.ProcessGroup, out: torch.Tensor | None
) -> list[torch.Tensor]:
    """One call of the operation: all tensors that it returns. Without ``ctx`` on the context that the library keeps."""
    where = group if ctx is None else None
    if signature.op in COLLECTIVES:
        return _collective(signature, operands, group)
    if signature.op == SPARSE:
        x = torch.sparse_coo_tensor(operands.ids, operands.x, (signature.m, signature.n), check_invariants=False)
        y = fluxlike.sparse_all_reduce(x, signature.reduction, group, signature.schedule, max_nnz=signature.ids)
        return [y._indices(), y._values()]
    if signature.op == "gemm_ar":
        return [fluxlike.gemm_ar(operands.x, operands.weights[0], ctx, bias=operands.biases[0], group=where)]
    said = operands.whole if signature.index % 2 else None
    if signature.op == "gemm_rs":
        return [fluxlike.gemm_rs(operands.x, operands.weights[0], ctx, bias=operands.biases[0], group=where, out=out, k=said)]
    several = len(operands.weights) > 1
    result = fluxlike.ag_gemm(
        operands.x, operands.weights if several else operands.weights[0], ctx, m=signature.m, group=where,
        bias=operands.biases if several else operands.biases[0], return_gathered=signature.gathered, n=said,
    )  # fmt: skip
    products, gathered = (result[0], [result[1]]) if signature.gathered else (result, [])
    return [*(products if several else [products]), *gathered]


def _collective(signature: Signature, operands: Operands, group: dist.ProcessGroup) -> list[torch.Tensor]:
    x, op, algo = operands.x, signature.reduction, signature.schedule
    if signature.op == "all_reduce":
        return fluxlike.all_reduce(operands.xs, group, op, algo)  # type: ignore[no-any-return]
    if signature.op == "reduce_scatter":
        return [fluxlike.reduce_scatter(x, group, op, algo)]
    if signature.op == "all_gather":
        return [fluxlike.all_gather(x, group, signature.m, algo)]
    root = signature.index % dist.get_world_size(group)
    if signature.op == "broadcast":
        return [fluxlike.broadcast(x, root, group, algo)]
    y = fluxlike.reduce(x, root, group, op, algo)
    return [x.new_empty(0) if y is None else y]


def digest(results: Sequence[torch.Tensor]) -> torch.Tensor:
    """int64 [2] on the device, from all bits of ``results``: their sum, and their sum with weights by position.

    The words have 32 bits and the weights are odd numbers of 64, all different: a change of one word is always seen, and changes
    of several cancel with a probability of about 2⁻³² at worst. The order of a sum modulo 2⁶⁴ does not matter.
    """
    found = torch.zeros(2, dtype=torch.int64, device=results[0].device)
    first = 1
    for result in results:
        raw = result.reshape(-1).view(torch.uint8)
        if raw.numel() % 4:
            raw = torch.nn.functional.pad(raw, (0, -raw.numel() % 4))
        for part in raw.view(torch.int32).split(_PART):
            odd = torch.arange(first, first + 2 * part.numel(), 2, device=part.device)
            words = part.to(torch.int64)
            found += torch.stack((words.sum(), (words * (odd * -0x61C8864680B583EB)).sum()))  # the golden ratio · 2⁶⁴, signed
            first += 2 * part.numel()
    return found


def judge(
    signature: Signature, operands: Operands, results: Sequence[torch.Tensor], control: ControlGroup, seed: int
) -> tuple[float, float, float, float]:
    """(error, allowed, largest, allowed) of a sample, as shares of the size of the true values. Collective; the same on all ranks.

    Truth is fp64. The root mean square error may be 1.5 times that of torch's own path on the same data (`allowed_error`, as in
    `bench`), the largest `LARGEST` times torch's. torch's path: the product in the dtype and, for gemm_rs, the sum over ranks
    in the dtype, one rank after the other along the ring. Samples of all ranks count together: those of one may be few. What is
    only moved, or is a maximum, must be equal.
    """
    compare = {"gemm_rs": _gemm, "gemm_ar": _gemm, "ag_gemm": _ag_gemm, SPARSE: _rows}.get(signature.op, _elements)
    k, pairs = compare(signature, operands, results, control, random.Random(seed))
    squares = [0.0, 0.0, 0.0]
    largest = [0.0, 0.0]
    for ours, torchs, truth in pairs:
        if truth.numel():
            off = [(t.double() - truth).abs() for t in (ours, torchs)]
            squares = [squares[0] + truth.numel(), *(s + o.square().sum().item() for s, o in zip(squares[1:], off, strict=True))]
            largest = [max(a, o.max().item()) for a, o in zip(largest, off, strict=True)]
    said = control.gather((squares, largest), "soak: judging a result")
    count, our, its = (sum(theirs[i] for theirs, _ in said) for i in range(3))
    size = math.sqrt(k)  # of sums of k products of normal numbers
    our, its = (math.sqrt(total / max(count, 1)) / size for total in (our, its))
    most, torchs_most = (max(theirs[i] for _, theirs in said) / size for i in range(2))  # a NaN shows in the squares
    allowed = allowed_error(its, getattr(torch, signature.dtype), control.size, k)
    return our, allowed, most, LARGEST * max(torchs_most, allowed)


Pair = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _sample(rng: random.Random, signature: Signature, n: int) -> tuple[list[int], list[int]]:
    """Rows of the whole result and columns of n."""
    rows = sorted(rng.sample(range(signature.m), min(signature.m, SAMPLE_ROWS)))
    return rows, sorted(rng.sample(range(n), min(n, SAMPLE_COLUMNS)))


def _gemm(
    signature: Signature, operands: Operands, results: Sequence[torch.Tensor], control: ControlGroup, rng: random.Random
) -> tuple[int, list[Pair]]:
    rows, columns = _sample(rng, signature, signature.n)
    x, w, bias = operands.x[rows], operands.weights[0], operands.biases[0]
    # torch's with all rows, as a call has them: with fewer cuBLAS may cut K otherwise, and be the more exact
    exact, rounded = x.double() @ w[columns].double().T, (operands.x @ w.T)[rows][:, columns]
    added = None if bias is None else bias[columns].cpu()
    said = control.gather((exact.cpu(), rounded.cpu(), x.shape[1], added), "soak: partial sums of a sample")
    full, rank = chunk_rows(signature.m, control.size), control.rank
    first, mine = 0, list(range(len(rows)))
    if signature.op == "gemm_rs":
        first, mine = rank * full, [i for i in mine if rows[i] // full == rank]
    else:
        added = said[0][3]
    truth = torch.stack([exact for exact, *_ in said]).sum(0)[mine]
    torchs = _around([rounded for _, rounded, *_ in said], rank)[mine]
    if added is not None:
        truth, torchs = truth + added.double(), torchs + added
    ours = results[0][[rows[i] - first for i in mine]][:, columns].cpu()
    return sum(k for _, _, k, _ in said), [(ours, torchs, truth)]


def _around(parts: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    """Their sum in their dtype, one after the other along the ring, this rank's last."""
    total = parts[(rank + 1) % len(parts)]
    for step in range(2, len(parts) + 1):
        total = total + parts[(rank + step) % len(parts)]
    return total


def _elements(
    signature: Signature, operands: Operands, results: Sequence[torch.Tensor], control: ControlGroup, rng: random.Random
) -> tuple[int, list[Pair]]:
    """Of a collective: a sample of the rows and columns of each tensor. Averages are compared as sums."""
    pairs, size, rank = [], control.size, control.rank
    gathers, full = signature.op == "all_gather", chunk_rows(signature.m, control.size)
    for x, y in zip(operands.xs, results, strict=True):
        height = signature.m if gathers else x.shape[0]
        rows = sorted(rng.sample(range(height), min(height, SAMPLE_ROWS)))
        columns = sorted(rng.sample(range(x.shape[1]), min(x.shape[1], SAMPLE_COLUMNS)))
        here = [row - rank * full for row in rows if row // full == rank] if gathers else rows
        parts = control.gather(x[here][:, columns].cpu(), "soak: a sample of a collective")
        mine = list(range(len(rows)))
        if signature.op == "reduce_scatter":
            mine = [i for i in mine if rows[i] // full == rank]
            here = [rows[i] - rank * full for i in mine]
        elif gathers:
            here = rows
        elif y.numel() == 0:  # of reduce, not on the root
            mine, here, y = [], [], x
        ours = y[here][:, columns].cpu()
        if gathers:
            pairs.append(_same(ours, torch.cat(parts)))
        elif signature.op == "broadcast":
            pairs.append(_same(ours, parts[signature.index % size]))
        elif signature.reduction == "max":
            pairs.append(_same(ours, torch.stack(parts).amax(0)[mine]))
        else:
            truth = torch.stack([part.double() for part in parts]).sum(0)[mine]
            pairs.append((ours.double() * (size if signature.reduction == "avg" else 1), _around(parts, rank)[mine], truth))
    return size, pairs


def _rows(
    signature: Signature, operands: Operands, results: Sequence[torch.Tensor], control: ControlGroup, rng: random.Random
) -> tuple[int, list[Pair]]:
    """Of a sparse sum: a sample of the table's rows and columns. An average is compared as a sum."""
    rows, columns = _sample(rng, signature, signature.n)

    def table(ids: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        whole = torch.zeros(signature.m, len(columns), dtype=dtype)
        return whole.index_add_(0, ids[0].cpu(), values[:, columns].cpu().to(dtype))[rows]

    said = control.gather(
        [table(operands.ids, operands.x, dtype) for dtype in (torch.float64, operands.x.dtype)], "soak: rows of a sparse sum"
    )
    ours = table(results[0], results[1], torch.float64) * (control.size if signature.reduction == "avg" else 1)
    truth = torch.stack([exact for exact, _ in said]).sum(0)
    most = max(1, control.size * signature.ids // signature.m)  # entries of a row, about
    return most, [(ours, _around([rounded for _, rounded in said], control.rank), truth)]


def _same(ours: torch.Tensor, truth: torch.Tensor) -> Pair:
    """What must be equal: without an error, or with an endless one."""
    nothing = torch.zeros(1, 1, dtype=torch.float64)
    return nothing if torch.equal(ours, truth) else nothing + math.inf, nothing, nothing


def _ag_gemm(
    signature: Signature, operands: Operands, results: Sequence[torch.Tensor], control: ControlGroup, rng: random.Random
) -> tuple[int, list[Pair]]:
    rows, _ = _sample(rng, signature, 1)
    full = chunk_rows(signature.m, control.size)
    mine = [row - control.rank * full for row in rows if row // full == control.rank]
    gathered = torch.cat(control.gather(operands.x[mine].cpu(), "soak: rows of a sample")).to(operands.x.device)
    pairs, whole = [], gathered.new_zeros(signature.m, gathered.shape[1])
    whole[rows] = gathered  # torch's with all rows, as in `_gemm`
    for z, w, bias in zip(results, operands.weights, operands.biases, strict=False):
        columns = sorted(rng.sample(range(w.shape[0]), min(w.shape[0], SAMPLE_COLUMNS)))
        truth = gathered.double() @ w[columns].double().T
        if bias is not None:
            truth = truth + bias[columns].double()
        # with the bias in the product, as layers of torch have it: cuBLAS takes other kernels for that, in fp32 less exact ones
        torchs = torch.nn.functional.linear(whole, w, bias)[rows][:, columns]
        pairs.append((z[rows][:, columns], torchs, truth))
    if signature.gathered:
        pairs.append(_same(results[-1][rows], gathered))
    return signature.k, pairs

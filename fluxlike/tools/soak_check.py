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
from .soak_plan import Signature

#: What the reference is compared on, at most.
SAMPLE_ROWS, SAMPLE_COLUMNS = 128, 256
#: The largest deviation may be so many times torch's largest; of thousands of random samples some differ that much by chance.
LARGEST = 3.0
_PART = 1 << 24  # words that a digest takes at a time, which bounds its memory


class Operands:
    """The tensors of one call on one rank. Their values come from `fill`; every rank has its own.

    gemm_rs: x [M, K_r], weight [N, K_r], bias [N]. ag_gemm: x [rows of this rank, K], weights [N_r, K], biases [N_r]; of several
    weights each is half as high as the one before, and only every other has a bias.
    """

    def __init__(self, signature: Signature, ranks: int, rank: int, device: torch.device) -> None:
        dtype = getattr(torch, signature.dtype)
        extra = 16 * rank if signature.uneven else 0
        if signature.op == "gemm_rs":
            rows, k, heights = signature.m, signature.k // ranks + extra, [signature.n]
        else:
            n = signature.n // ranks + extra
            rows, k = rows_of(signature.m, ranks, rank), signature.k
            heights = [max(1, n >> i) for i in range(signature.weights)]
        self.x = torch.empty(rows, k, dtype=dtype, device=device)
        self._stored = [torch.empty((k, n) if signature.transposed else (n, k), dtype=dtype, device=device) for n in heights]
        self.weights = [w.T if signature.transposed else w for w in self._stored]
        self.biases = [
            torch.empty(n, dtype=dtype, device=device) if signature.bias and i % 2 == 0 else None for i, n in enumerate(heights)
        ]

        self._result = rows_of(rows, ranks, rank), heights[0]

    def room(self) -> torch.Tensor:
        """A tensor for the result of gemm_rs, of NaN."""
        return torch.full(self._result, math.nan, dtype=self.x.dtype, device=self.x.device)

    def fill(self, generator: torch.Generator, seed: int) -> None:
        """Normal random numbers; the same for the same seed."""
        generator.manual_seed(seed)
        for t in (self.x, *self._stored, *self.biases):
            if t is not None:
                t.normal_(generator=generator)


def call(
    signature: Signature, operands: Operands, ctx: Any, group: dist.ProcessGroup, out: torch.Tensor | None
) -> list[torch.Tensor]:
    """One call of the operation: all tensors that it returns. Without ``ctx`` on the context that the library keeps."""
    where = group if ctx is None else None
    if signature.op == "gemm_rs":
        return [fluxlike.gemm_rs(operands.x, operands.weights[0], ctx, bias=operands.biases[0], group=where, out=out)]
    several = len(operands.weights) > 1
    result = fluxlike.ag_gemm(
        operands.x, operands.weights if several else operands.weights[0], ctx, m=signature.m, group=where,
        bias=operands.biases if several else operands.biases[0], return_gathered=signature.gathered,
    )  # fmt: skip
    products, gathered = (result[0], [result[1]]) if signature.gathered else (result, [])
    return [*(products if several else [products]), *gathered]


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
    in the dtype, one rank after the other along the ring. Samples of all ranks count together: those of one may be few.
    """
    compare = _gemm_rs if signature.op == "gemm_rs" else _ag_gemm
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


def _gemm_rs(
    signature: Signature, operands: Operands, results: Sequence[torch.Tensor], control: ControlGroup, rng: random.Random
) -> tuple[int, list[Pair]]:
    rows, columns = _sample(rng, signature, signature.n)
    x, w, bias = operands.x[rows], operands.weights[0], operands.biases[0]
    exact, rounded = x.double() @ w[columns].double().T, (x @ w.T)[:, columns]
    said = control.gather((exact.cpu(), rounded.cpu(), x.shape[1]), "soak: partial sums of a sample")
    full, rank, size = chunk_rows(signature.m, control.size), control.rank, control.size
    mine = [i for i, row in enumerate(rows) if row // full == rank]
    truth = torch.stack([exact for exact, _, _ in said]).sum(0)[mine]
    torchs = said[(rank + 1) % size][1][mine]
    for step in range(2, size + 1):
        torchs = torchs + said[(rank + step) % size][1][mine]
    if bias is not None:
        truth, torchs = truth + bias[columns].double().cpu(), torchs + bias[columns].cpu()
    ours = results[0][[rows[i] - rank * full for i in mine]][:, columns].cpu()
    return sum(k for _, _, k in said), [(ours, torchs, truth)]


def _ag_gemm(
    signature: Signature, operands: Operands, results: Sequence[torch.Tensor], control: ControlGroup, rng: random.Random
) -> tuple[int, list[Pair]]:
    rows, _ = _sample(rng, signature, 1)
    full = chunk_rows(signature.m, control.size)
    mine = [row - control.rank * full for row in rows if row // full == control.rank]
    gathered = torch.cat(control.gather(operands.x[mine].cpu(), "soak: rows of a sample")).to(operands.x.device)
    pairs = []
    for z, w, bias in zip(results, operands.weights, operands.biases, strict=False):
        columns = sorted(rng.sample(range(w.shape[0]), min(w.shape[0], SAMPLE_COLUMNS)))
        truth, torchs = gathered.double() @ w[columns].double().T, (gathered @ w.T)[:, columns]
        if bias is not None:
            truth, torchs = truth + bias[columns].double(), torchs + bias[columns]
        pairs.append((z[rows][:, columns], torchs, truth))
    if signature.gathered and not torch.equal(results[-1][rows], gathered):
        nothing = torch.zeros(1, 1, dtype=torch.float64, device=gathered.device)
        pairs.append((nothing + math.inf, nothing, nothing))  # a copy has no rounding
    return signature.k, pairs

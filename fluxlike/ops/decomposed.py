"""The schedule "decomposed": products by cuBLAS, one a chunk, beside the copy engine. This docstring is its design record.

Method: Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models", ASPLOS
2023 (Looped CollectiveEinsum), as torch has it under the name async tensor parallelism. The collective is cut into one copy a
rank, the product into one a rank, and each product runs beside the copies that are not its own. No kernel of ours multiplies: it is
for sizes at which cuBLAS is faster, and where the wire is slow beside the product.

Rank r of R queues, beside the copies, which have the copy engine's stream::

    ag_gemm   lane 1   credits, go
              lane 0   x_r · Wᵀ
              copies   wait for go; x_r to r-1, its ``full`` word; x_r to r-2, …
              lanes    by turns, 1 first: arrived(r+1), x_{r+1} · Wᵀ; arrived(r+2), x_{r+2} · Wᵀ; …; or, where all shards are
                       expected before the own product ends (`cost.gathered_beside`): arrived(r+1 … R-1), their product;
                       arrived(0 … r-1), theirs, since one product of many rows is faster than many of few
              both     end

    gemm_rs            credits; partial of chunk r+1 → ``local``, go(0); of r+2, go(1); …; of r-1, go(R-2); of the own chunk
              copies   wait for go(0); ``local`` of r+1 to slot r of rank r+1, its ``full`` word; wait for go(1); …
                       sum

The two *lanes* of ag_gemm (`runtime.launches.Lanes`) are the caller's stream and a second one, which take turns, so that a product
begins on the multiprocessors that the last tiles of the one before leave idle. gemm_rs has one stream: on two, a GPU computes two
products at a time, which end together, and then the copies of both are left over: 1010 µs, not 885, at 8192×8192×8192 on two GPUs.

"credits", "arrived", "end" and "sum" are the kernels of `kernels.decomposed`; "go" is a word that the stream itself writes, since
a kernel behind a product would have to find a place beside the next one, which fills the GPU. Three things differ from the paper
and torch. Owners push where torch pulls, so nothing is copied into the heap first, and the copies, all in one stream, do not wait
for products. Signals in memory are in place of barriers. And where the paper passes accumulators on in a ring, here each partial
sum goes straight to its owner, into a slot of its own: as many bytes, but no product waits for a copy, no sum is rounded on the
way, and the order of the sum is fixed.

Protocol, that of the copy engine in `kernels.gemm_rs` and `kernels.ag_gemm` with one part a chunk; (C) and (D) live in
`kernels.sync`:

* (A) go(unit): ``ready[unit] = 1`` (a stream's write releases) → stream wait of the copy engine, which resets it to 0.
* (B) ``full[slot, r, 0] = 1`` at the peer, by the copy engine after its copy → ``wait`` of the arrived or the sum kernel. The
  last kernel of the call resets the words of its slot set, when all of them have been seen.
* (C) the credits, waited for by the credits kernel: each peer has ended the call that last used this slot set.
* (D) the end of the call, by the end or the sum kernel: the epoch advances, the peers get their credits.

Why it is sound.

* A peer's slot is written behind (A), the first of which is behind (C), and the copies follow each other: its last reader, a
  product or the sum of an earlier call, was done before the kernel that gave the credit began. It is read behind (B), so after
  its writer is done. Words are reset before (D) and set again behind (C) of a later call.
* ``local`` is read by copies behind (A), so behind the product that wrote it: go follows it in its lane. It is written again by the
  next call, which begins behind the join of the copies' stream and of both lanes. The same join keeps the caller's x, which
  ag_gemm's copies read.
* Each wait ends. Those in kernels are bounded and name the peer (PeerTimeout); the copy engine waits for words of this rank's
  streams only, queued before it is told to wait and have only such kernels and products in front of them. Nothing waits for what
  is queued later, on this rank or, as all ranks queue alike, on another: any number of streams may run at a time.
* Who waits keeps nobody from working. The sum may hold all multiprocessors while it waits for the peers; it begins behind all
  products, and no multiprocessor copies. Beside it only kernels of one program wait.
* CUDA graphs: call numbers are on the device, the slot set is frozen at capture, as with schedule "copy_engine". The second lane
  is forked from the captured stream and joined to it.

Numerics. Products accumulate in fp32: on GPUs as cuBLAS does with torch's settings (``torch.backends.cuda.matmul``: by default it
may add the parts of a split K in bf16 or fp16), on CPUs by torch.mm in fp32.
ag_gemm rounds once, behind the bias. gemm_rs: every partial sum is rounded to the dtype, the own one, too (kept in fp32 it
took cuBLAS 2 % longer to write and the sum a sixth longer to read); sum in fp32 in the order own, bias, r+1, r+2, …, rounded once.
Operands in fp32 are refused. cuBLAS has other kernels for the fewer rows of one rank: in fp32 the largest error of a gathered
product was up to 2.7 times, its root mean square up to 1.7 times, that of torch's product of all rows, and 1.5 is what every
schedule keeps to. With K cut into parts of 128, which are added, it is 1.8 and 1.3 times, in three times as long
(docs/measured/2026-11-22-fp32-rows-R1.md).
Nothing depends on the order of arrival: repeats give the same bits wherever torch.mm does.

Measured: docs/performance.md.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..kernels.decomposed import (
    ag_gemm_decomposed_arrived_kernel,
    ag_gemm_decomposed_end_kernel,
    decomposed_credits_kernel,
    gemm_rs_decomposed_sum_kernel,
)
from ..kernels.tiles import cdiv, rows_of
from ..runtime import racecheck
from . import cost, tiling
from .group import Prepared, Told
from .refusals import beside_capture

if TYPE_CHECKING:
    from .ag_gemm import AGGemmContext
    from .context import Context
    from .gemm_rs import GemmRSContext

NAME = "decomposed"
#: How kernels of one program are compiled.
_ONE = tiling.Tiling(0, 0, 0, 1, 1, 1, False)
#: The blocks of a sum, and how many programs a multiprocessor has for them: that many loads keep its memory busy.
_SUM = tiling.Tiling(16, 256, 0, 1, 8, 1, False)
_SUMS = 4


def _credits(ctx: "Context", slot: int) -> Prepared:
    return ctx.prepare(decomposed_credits_kernel, 1, (ctx.ctl, slot, ctx.rank), {"R": ctx.size}, _ONE, ())


def _go(ctx: "Context", unit: int) -> None:
    """(A), behind what the lane holds."""
    ctx.world.executor.write(ctx.ready.data_ptr() + 4 * unit, 1)


class Piece(NamedTuple):
    """Shards of other ranks that ag_gemm multiplies at once."""

    #: Waits until they are there.
    arrived: Prepared
    #: They, and the row of the gathered input at which they begin.
    shards: torch.Tensor
    start: int


class Gather(NamedTuple):
    """What ag_gemm launches in calls of one kind; each for the two slot sets."""

    credits: list[Prepared]
    copies: list[Callable[[torch.Tensor], None]]
    pieces: list[list[Piece]]
    end: list[Prepared]
    #: The first row of this rank in the gathered input.
    start: int
    call: Told


def _sources(rank: int, ranks: int, holding: int, merged: bool) -> list[tuple[int, int]]:
    """(first, number) of the shards in each piece, in the order of their arrival; ranks from ``holding`` on hold no rows."""
    if merged:
        pieces = [(rank + 1, holding - rank - 1), (0, min(rank, holding))]
    else:
        pieces = [((rank + step) % ranks, int((rank + step) % ranks < holding)) for step in range(1, ranks)]
    return [(first, number) for first, number in pieces if number > 0]


def gather(
    ctx: "AGGemmContext", rows: int, m: int, k: int, full: int, copies: Callable[..., Callable[[torch.Tensor], None]]
) -> Gather:
    """For calls with ``rows`` of ``m`` on this rank, ``full`` in a full chunk; ``copies`` of `ops.ag_gemm`."""
    call = ctx.telling(NAME, None, M=m, K=k)
    if ctx.size == 1:
        return Gather([], [], [], [], 0, call)
    ld, rank, ranks, R = tiling.round_up(k, 16), ctx.rank, ctx.size, {"R": ctx.size}
    merged = cost.gathered_beside(ctx.problem(m, ctx.n, k, full))
    plan = Gather([], [], [], [], rank * full, call)
    for slot, data in enumerate(ctx.data.view(2, -1)):
        slots = data[: ranks * full * ld].view(ranks * full, ld)
        pieces = []
        for first, number in _sources(rank, ranks, cdiv(m, full), merged):
            args = (ctx.full, ctx.ctl, slot, rank, first, number)
            arrived = ctx.prepare(ag_gemm_decomposed_arrived_kernel, 1, args, R, _ONE, ())
            pieces.append(Piece(arrived, slots[first * full : min((first + number) * full, m), :k], first * full))
        plan.pieces.append(pieces)
        plan.credits.append(_credits(ctx, slot))
        plan.copies.append(copies(ctx, rows, full, ld, 1, full, slot))
        plan.end.append(ctx.prepare(ag_gemm_decomposed_end_kernel, 1, (ctx.full, ctx.ctl, m, full, slot, rank), R, _ONE, ()))
    return plan


def ag_gemm(
    ctx: "AGGemmContext",
    plan: Gather,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: list[torch.Tensor | None],
    results: list[torch.Tensor],
    gathered: torch.Tensor | None,
) -> None:
    """A call of `ops.ag_gemm`."""

    def consume(rows: torch.Tensor, start: int) -> None:
        for w, bias, z in zip(weights, biases, results, strict=True):
            ctx.multiply(rows, w, z[start : start + len(rows)], bias)
        if gathered is not None:
            racecheck.host_read(rows)
            gathered[start : start + len(rows)].copy_(rows)

    beside_capture(ctx.op, ctx.world.executor, ctx.engine, ctx.lanes)
    with ctx.start(plan.call) as slot:
        if ctx.size == 1:
            consume(x, 0)
            return

        def begin() -> None:
            with ctx.lanes.of(1):
                plan.credits[slot](())
                _go(ctx, 0)
            consume(x, plan.start)

        def rest() -> None:
            for turn, piece in enumerate(plan.pieces[slot], 1):
                with ctx.lanes.of(turn):
                    piece.arrived(())
                    consume(piece.shards, piece.start)

        with ctx.lanes.forked():
            ctx.overlapped(begin, None, lambda: plan.copies[slot](x), rest)
        plan.end[slot](())


class Scatter(NamedTuple):
    """What gemm_rs launches in calls of one kind; ``credits``, ``copies`` and ``sum`` for the two slot sets."""

    credits: list[Prepared]
    copies: list[Callable[[], None]]
    sum: list[Prepared]
    #: Where the partial sums go: (first row of the chunk, those), from rank r+1 on, and last the own ones.
    partials: list[tuple[int, torch.Tensor]]
    call: Told


def scatter(
    ctx: "GemmRSContext", m: int, bias: torch.Tensor | None, y: torch.Tensor, full: int, queue_copies: Callable[..., None]
) -> Scatter:
    """For calls with ``m`` rows in all, ``full`` in a full chunk; ``queue_copies`` of `ops.gemm_rs`."""
    (rows, n), rank, ranks = y.shape, ctx.rank, ctx.size
    call = ctx.telling(NAME, None, M=m, N=n)
    if ctx.size == 1:
        return Scatter([], [], [], [], call)
    ld = tiling.round_up(n, 16)
    local = ctx.local[: ranks * full * ld].view(ranks, full, ld)
    args = (
        local[rank], ctx.data, y if bias is None else bias, y, ctx.full, ctx.ctl,
        n, ld, ctx.set_elements, full, rows, rank,
    )  # fmt: skip
    columns = 32 if ctx.world.executor.capability == tiling.CPU else _SUM.bn  # small ones there have several programs, too
    constants = dict(R=ranks, BM=_SUM.bm, BN=columns, VEC=n % 16 == 0, BIAS=bias is not None)
    constants["maxnreg"] = tiling.registers(_SUM.warps, _SUMS)
    blocks = cdiv(rows, _SUM.bm) * cdiv(n, columns)
    plan = Scatter([], [], [], [], call)
    for slot in (0, 1):
        plan.credits.append(_credits(ctx, slot))
        plan.copies.append(partial(queue_copies, ctx, m, full, full, ld, 1, full, 1, slot))
        programs = min(max(blocks, 1), _SUMS * ctx.programs(blocks))
        plan.sum.append(ctx.prepare(gemm_rs_decomposed_sum_kernel, programs, (*args, slot), constants, _SUM, (2, 3)))
    for step in range(1, ranks + 1):
        owner = (rank + step) % ranks
        plan.partials.append((owner * full, local[owner, : rows_of(m, ranks, owner, full), :n]))
    return plan


def gemm_rs(
    ctx: "GemmRSContext",
    number: int,
    plan: Scatter,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
) -> None:
    """A call of `ops.gemm_rs`, as plan ``number`` has it."""

    def product(step: int) -> None:
        start, out = plan.partials[step - 1]
        ctx.multiply(x[start : start + len(out)], weight, out)

    beside_capture(ctx.op, ctx.world.executor, ctx.engine)
    with ctx.start(plan.call) as slot:
        if ctx.size == 1:
            ctx.multiply(x, weight, y, bias)
            return

        def begin() -> None:
            plan.credits[slot](())
            for step in range(1, ctx.size):
                product(step)
                _go(ctx, step - 1)

        ctx.overlapped(begin, (number, slot), plan.copies[slot], lambda: product(ctx.size))
        plan.sum[slot]((y if bias is None else bias, y))

"""The schedule "decomposed": products by cuBLAS, one a chunk, beside the copy engine. This docstring is its design record.

Method: Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models", ASPLOS
2023 (Looped CollectiveEinsum), as torch has it under the name async tensor parallelism. The collective is cut into one copy a
rank, the product into one a rank, and each product runs beside the copies that are not its own. No kernel of ours multiplies, so
it is a baseline for those that do, and works where they are slow.

Two *lanes* (`runtime.launches.Lanes`): the caller's stream and a second one, which take turns, so that a product begins on the
multiprocessors that the last tiles of the one before leave idle. The copies have the copy engine's stream. Rank r of R queues::

    ag_gemm   lane 1   credits, go
              lane 0   x_r · Wᵀ
              copies   wait for go; x_r to r-1, its ``full`` word; x_r to r-2, …
              lanes    by turns, 1 first: arrived(r+1), x_{r+1} · Wᵀ; arrived(r+2), x_{r+2} · Wᵀ; …
              both     end

    gemm_rs   lanes    by turns, 1 first: credits, partial of chunk r+1 → ``local``, go(0); of r+2, go(1); …; of r-1, go(R-2)
              copies   wait for go(0); ``local`` of r+1 to slot r of rank r+1, its ``full`` word; wait for go(1); …
              lanes    the own chunk → ``own`` (fp32)
              both     sum

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
  ag_gemm's copies read, and puts the sum behind the product that wrote ``own``.
* Each wait ends. Those in kernels are bounded and name the peer (PeerTimeout); the copy engine waits for words of this rank's lanes
  only, which are queued before it is told to wait and have only such kernels and products in front of them. Nothing waits for what
  is queued later, on this rank or, as all ranks queue alike, on another: any number of streams may run at a time.
* Who waits keeps nobody from working. The sum may hold all multiprocessors while it waits for the peers; it begins behind the join,
  so behind all products and copies that the peers wait for. Beside it only kernels of one program wait.
* CUDA graphs: call numbers are on the device, the slot set is frozen at capture, as with schedule "copy_engine". The second lane
  is forked from the captured stream and joined to it.

Numerics. Products accumulate in fp32: on GPUs as cuBLAS does with torch's settings (``torch.backends.cuda.matmul``: by default it
may add the parts of a split K in bf16 or fp16; fp32 as ``torch.set_float32_matmul_precision`` says), on CPUs by torch.mm in fp32.
ag_gemm rounds once, behind the bias. gemm_rs: the own partial stays in fp32, the others are rounded to the dtype for the way; sum
in fp32 in the order own, bias, r+1, r+2, …, rounded once. Nothing depends on the order of arrival: repeats give the same bits
wherever torch.mm does.

Measured: ahead of the other schedules for the largest ag_gemm only, and held up by the host in eager calls; docs/performance.md.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..kernels.decomposed import (
    ag_gemm_decomposed_arrived_kernel,
    ag_gemm_decomposed_end_kernel,
    decomposed_credits_kernel,
    gemm_rs_decomposed_sum_kernel,
)
from ..kernels.tiles import cdiv, rows_of
from ..runtime import racecheck
from . import tiling

if TYPE_CHECKING:
    from .context import Context
    from .group import Prepared

NAME = "decomposed"
#: How kernels of one program are compiled.
_ONE = tiling.Tiling(0, 0, 0, 1, 1, 1, False)


def _credits(ctx: "Context", slot: int) -> "Prepared":
    return ctx.prepare(decomposed_credits_kernel, 1, (ctx.ctl, slot, ctx.rank), {"R": ctx.size}, _ONE, ())


def _go(ctx: "Context", unit: int) -> None:
    """(A), behind what the lane holds."""
    ctx.world.executor.write(ctx.ready.data_ptr() + 4 * unit, 1)


class _Gather(NamedTuple):
    """What ag_gemm launches in calls of one M and K. Each for the two slot sets; the inner lists from rank r+1 on."""

    credits: list["Prepared"]
    arrived: list[list["Prepared"]]
    end: list["Prepared"]
    #: Where the shards arrive.
    shards: list[list[torch.Tensor]]


def _gather(ctx: "Context", m: int, k: int, full: int) -> _Gather:
    ld, rank, ranks, R = tiling.round_up(k, 16), ctx.rank, ctx.size, {"R": ctx.size}
    plan = _Gather([], [], [], [])
    for slot, data in enumerate(ctx.data.view(2, -1)):
        slots = data[: ranks * full * ld].view(ranks, full, ld)
        sources = [(rank + step) % ranks for step in range(1, ranks)]
        waits = [(ctx.full, ctx.ctl, slot, rank, source) for source in sources]
        plan.credits.append(_credits(ctx, slot))
        plan.arrived.append([ctx.prepare(ag_gemm_decomposed_arrived_kernel, 1, wait, R, _ONE, ()) for wait in waits])
        plan.end.append(ctx.prepare(ag_gemm_decomposed_end_kernel, 1, (ctx.full, ctx.ctl, m, full, slot, rank), R, _ONE, ()))
        plan.shards.append([slots[source, : rows_of(m, ranks, source, full), :k] for source in sources])
    return plan


def ag_gemm(
    ctx: "Context",
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    results: list[torch.Tensor],
    gathered: torch.Tensor | None,
    full: int,
    queue_copies: Callable[..., None],
) -> None:
    """A call of `ops.ag_gemm`, whose ``queue_copies`` tells the copy engine."""
    (rows, k), m, ranks = x.shape, results[0].shape[0], ctx.size
    ld = tiling.round_up(k, 16)
    _, plan = ctx.plan((m, k, full), lambda: _gather(ctx, m, k, full))
    slot = ctx.start(NAME, None, M=m, K=k)

    def consume(shard: torch.Tensor, source: int) -> None:
        start = source * full
        for w, bias, z in zip(weights, biases, results, strict=True):
            ctx.multiply(shard, w, z[start : start + len(shard)], bias)
        if gathered is not None:
            racecheck.host_read(shard)
            gathered[start : start + len(shard)].copy_(shard)

    def begin() -> None:
        if ranks > 1:
            with ctx.lanes.of(1):
                plan.credits[slot](())
                _go(ctx, 0)
        consume(x, ctx.rank)

    def rest() -> None:
        for step, (arrived, shard) in enumerate(zip(plan.arrived[slot], plan.shards[slot], strict=True), 1):
            if len(shard) > 0:
                with ctx.lanes.of(step):
                    arrived(())
                    consume(shard, (ctx.rank + step) % ranks)

    with ctx.lanes.forked():
        ctx.overlapped(begin, None, lambda: queue_copies(ctx, rows, full, ld, 1, full, slot, x) if ranks > 1 else None, rest)
    plan.end[slot](())


class _Scatter(NamedTuple):
    """What gemm_rs launches in calls of one kind; ``credits`` and ``sum`` for the two slot sets."""

    credits: list["Prepared"]
    sum: list["Prepared"]
    #: Where the partial sums of the others' chunks go, from rank r+1 on, and that of the own one.
    partials: list[torch.Tensor]
    own: torch.Tensor


def _scatter(ctx: Any, m: int, bias: torch.Tensor | None, y: torch.Tensor, full: int) -> _Scatter:
    (rows, n), rank, ranks = y.shape, ctx.rank, ctx.size
    ld = tiling.round_up(n, 16)
    on_cpu = ctx.world.executor.capability == tiling.CPU
    tile = tiling.Tiling(64, 128, 0, 1, 1, 1, False) if on_cpu else tiling.Tiling(16, 128, 0, 1, 8, 1, False)
    args = (
        ctx.own, ctx.data, y if bias is None else bias, y, ctx.full, ctx.ctl,
        n, ld, ctx.set_elements, full, rows, int(bias is not None), rank,
    )  # fmt: skip
    constants = dict(R=ranks, BM=tile.bm, BN=tile.bn, VEC=n % 16 == 0)
    programs = ctx.programs(cdiv(rows, tile.bm) * cdiv(n, tile.bn))
    plan = _Scatter([], [], [], ctx.own[: full * ld].view(full, ld)[:rows, :n])
    for slot in (0, 1):
        plan.credits.append(_credits(ctx, slot))
        plan.sum.append(ctx.prepare(gemm_rs_decomposed_sum_kernel, programs, (*args, slot), constants, tile, (2, 3)))
    for step in range(1, ranks):
        owner = (rank + step) % ranks
        local = ctx.local[: ranks * full * ld].view(ranks, full, ld)
        plan.partials.append(local[owner, : rows_of(m, ranks, owner, full), :n])
    return plan


def gemm_rs(
    ctx: Any,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    full: int,
    queue_copies: Callable[..., None],
) -> None:
    """A call of `ops.gemm_rs`, whose ``queue_copies`` tells the copy engine."""
    m, n, ranks = x.shape[0], y.shape[1], ctx.size
    ld = tiling.round_up(n, 16)
    number, plan = ctx.plan((m, full, tiling.kind(bias), tiling.kind(y)), lambda: _scatter(ctx, m, bias, y, full))
    slot = ctx.start(NAME, None, M=m, N=n)

    def product(owner: int, out: torch.Tensor) -> None:
        ctx.multiply(x[owner * full : owner * full + len(out)], weight, out)

    def begin() -> None:
        for step, partial in enumerate(plan.partials, 1):
            with ctx.lanes.of(step):
                if step == 1:
                    plan.credits[slot](())
                product((ctx.rank + step) % ranks, partial)
                _go(ctx, step - 1)

    def rest() -> None:
        with ctx.lanes.of(ranks):
            product(ctx.rank, plan.own)

    with ctx.lanes.forked():
        ctx.overlapped(begin, (number, slot), lambda: queue_copies(ctx, m, full, full, ld, 1, full, 1, slot), rest)
    plan.sum[slot]((y if bias is None else bias, y))

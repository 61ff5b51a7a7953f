"""Products of few rows that are exchanged by the kernel that makes them (`kernels.fused`): which calls, in what tiles, launches."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..kernels.fused import gather_fused_kernel, product_fused_kernel
from ..kernels.tiles import cdiv
from . import again, exchange, tiling
from .group import Prepared

#: Rows up to which a call may be fused, and elements of which its sizes and strides must be multiples.
ROWS, WHOLE = 64, 16
#: Rows of a call that gathers them, on GPUs with TMA, and of the first of two products that make more.
GATHERED_ROWS, FIRST = 256, 128
#: Bytes of shared memory that programs of such a kernel may take of a multiprocessor; on GPUs that are not named, `SMALL`.
SHARED, SMALL = {(8, 0): 160 << 10, (9, 0): 200 << 10, (10, 0): 200 << 10, (10, 3): 200 << 10}, 96 << 10
WARPS = 4
REGISTERS = tiling.registers(WARPS, exchange.OVER)
#: Words that a thread holds while what is gathered is exchanged, where that is more than one block: more take too many registers.
WORDS_A_THREAD = 64
#: Bytes of a weight up to which what is gathered is multiplied in the same kernel, by up to `ROWS` rows and by more: larger ones
#: cuBLAS reads faster, and calls with smaller ones wait for the host (docs/measured/2026-11-27-fused.md, 2026-11-28-four-h200.md).
GATHERED, GATHERED_WIDE = 256 << 20, 128 << 20


class Tile(NamedTuple):
    """Rows that a program has room for, its columns, the depth of a step, and how it is compiled.

    ``tma``: it reads by TMA. ``rest``: rows behind the first ones, which are a product of their own.
    """

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    tma: bool = False
    rest: int = 0


def tile_of(capability: tuple[int, int], m: int, n: int, programs: int) -> Tile | None:
    """The tile for M rows and N columns on a GPU with so many multiprocessors; None where the kernels are not for such a call.

    Wide tiles read x less often, and narrow ones are at least half as many as there are multiprocessors; with more rows than
    columns, x would come from the L2 cache for longer than W from memory (docs/measured/2026-11-27-fused.md). More than two
    programs on a multiprocessor would not all run at once, which `kernels.fused` relies on.
    """
    if m > ROWS:
        return _wide(capability, m, n, programs)
    rows, _ = _rows(m)
    columns = 64 if 2 * cdiv(n, 64) > programs else 32
    if cdiv(n, columns) > exchange.OVER * programs:
        columns = 128
    tiles = cdiv(n, columns)
    if rows > columns or tiles > exchange.MOST or (tiles > exchange.OVER * programs and capability != tiling.CPU):
        return None
    return _tile(capability, m, columns, 1 if tiles <= programs else exchange.OVER)


def _rows(m: int) -> tuple[int, int]:
    """Rows of a tile for M rows, and of the one behind it, if there are more than `FIRST`: powers of two."""
    rest = max(m - FIRST, 0)
    return max(16, 1 << (min(m, FIRST) - 1).bit_length()), max(32, 1 << (rest - 1).bit_length()) if rest else 0


def _wide(capability: tuple[int, int], m: int, n: int, programs: int) -> Tile | None:
    """The same for more than `ROWS` rows: more than half of the multiprocessors have a program, which has one to itself.

    The columns were the faster ones of 64 and 128 at both sizes that were tried (docs/measured/2026-11-28-wide.md).
    """
    columns = 64 if cdiv(n, 64) <= programs else 128
    tiles = cdiv(n, columns)
    if m > GATHERED_ROWS or tiles > programs or 2 * tiles <= programs or not has_wide(capability):
        return None
    return _tile(capability, m, columns, 1)


def has_wide(capability: tuple[int, int]) -> bool:
    """Whether more than `ROWS` rows have tiles there."""
    return capability == tiling.CPU or tiling.is_large(capability)


def _tile(capability: tuple[int, int], m: int, columns: int, over: int) -> Tile | None:
    """``over``: programs on a multiprocessor."""
    (rows, rest), wide = _rows(m), m > ROWS
    if capability == tiling.CPU:  # where all programs are alive together
        return Tile(rows, columns, 64, 1, 1, wide, rest)
    room = SHARED.get(capability, SMALL) // over // (2 * (rows + rest + columns))
    depth = 128 if room >= (4 if wide else 3) * 128 else 64
    # of eight, a thread has only 8 bytes of a block; and with few rows behind the first they take 7 to 8 % longer
    # (docs/measured/2026-11-28-more-rows.md)
    warps = 2 * WARPS if rest in (0, FIRST) and (rows + rest) * columns > 128 * 64 else WARPS
    return Tile(rows, columns, depth, warps, min(room // depth, 8), wide, rest) if room >= 2 * depth else None


def misfit(dtype: torch.dtype, max_m: int, most: int = ROWS) -> str | None:
    """Why a context for such calls, of ``most`` rows, cannot ask that they be fused."""
    wrong = "torch.float32" if dtype == torch.float32 else f"max_m={max_m}" if max_m > most else None
    return wrong and f"is for 16 bits, and max_m up to {most}, not for {wrong}"


def is_usual(ctx: exchange.ExchangeContext) -> bool:
    """Whether calls that can be fused are, where nothing else is asked for: not on a CPU, where torch's products are faster."""
    return bool(ctx.world.executor.capability != tiling.CPU)


def unfit(
    ctx: exchange.ExchangeContext, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor, full: int
) -> str | None:
    """Why a product that is then exchanged in words, y on this rank, cannot be fused. What comes first is alike on all ranks.

    ``full``: rows of the largest part, or all in one shot; what y has would not do, as it may be all rows, or their mean number.
    """
    m, n, block = len(x), len(weight), 2 * exchange.WORDS
    parts = 1 if ctx.kind.gather and full == m else ctx.size
    if full * parts != m or full * n % block:  # other kernels send whole blocks, and wait for them
        return f"the part of a rank, [{full}, {n}], is no multiple of {block} elements, or not the same on all"
    most = 2 * ctx.programs(exchange.MOST, exchange.OF_WORDS.over) * block  # two turns of other kernels
    if ctx.kind.gather and parts > 1 and full * n > most:
        return f"the part of a rank, [{full}, {n}], has more than {most} elements"
    if m > ROWS:
        return f"M={m} rows are more than {ROWS}"
    if m > 1 and x.stride(0) % WHOLE:
        return f"strides {x.stride()} of x are not a multiple of {WHOLE} and 1"
    return _unread(ctx, m, weight, (x, bias, y))


def gains(m: int, weight: torch.Tensor) -> bool:
    """Whether calls that gather so many rows take the gather and the first product in one kernel, where nothing else is asked for.

    Up to `ROWS` they are within 5 % so in a graph, and faster without. With more rows they are up to 18 % slower in a graph, but
    ahead of torch and NCCL there, too, and without one, where the host decides, they would be behind these by torch's product, or
    up to 18 % ahead (docs/measured/2026-11-28-waits.md, 2026-11-28-more-rows.md). One way for both, as a call has the same bits
    in a graph and outside.
    """
    return m <= GATHERED_ROWS and weight.nbytes <= (GATHERED if m <= ROWS else GATHERED_WIDE)


def gather_unfit(
    ctx: exchange.ExchangeContext, gathered: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, z: torch.Tensor
) -> str | None:
    """The same of a product of what has been gathered."""
    return _unread(ctx, len(gathered), weight, (gathered, bias, z))


def _unread(ctx: exchange.ExchangeContext, m: int, weight: torch.Tensor, others: Sequence[torch.Tensor | None]) -> str | None:
    """Why kernels of ours do not read a weight, for so many rows, or the other operands."""
    (n, k), executor = weight.shape, ctx.world.executor
    if weight.dtype == torch.float32:
        return "it is of torch.float32"
    tile = tile_of(executor.capability, m, n, executor.programs)
    if tile is None:
        tiles = exchange.MOST if executor.capability == tiling.CPU else min(exchange.MOST, exchange.OVER * executor.programs)
        wide = 64 * (executor.programs // 2)
        says = f"M={m}, N={n} are not for it here: it takes up to 32 rows, {ROWS} of N above {wide}, and N up to {128 * tiles}"
        more = f"; {GATHERED_ROWS} rows of N above {wide}, up to {128 * executor.programs}"
        return says + (more if has_wide(executor.capability) and not ctx.kind.scatter else "")
    if k == 0 or n % WHOLE or k % WHOLE:
        return f"N={n} and K={k} of this rank are no multiples of {WHOLE}"
    if weight.stride(1) != 1 or weight.stride(0) % WHOLE or (tile.tma and weight.stride(0) < k):
        return f"strides {weight.stride()} of weight are not a multiple of {WHOLE}{' from K on' * tile.tma} and 1"
    if any(t.data_ptr() % again.ALIGNED or t.is_neg() for t in (weight, *others) if t is not None):
        return f"an operand is a view that negates, or does not lie at a multiple of {again.ALIGNED} bytes"
    return None


def launch(
    ctx: exchange.ExchangeContext, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor, full: int
) -> Prepared:
    """The launch of a call that is not `unfit`, planned at most once. It takes x, weight and y and, if there is one, the bias.

    In an exchange that gathers, y is all rows, and the bias for the first rank only.
    """
    (m, k), n, executor = x.shape, len(weight), ctx.world.executor
    tile = tile_of(executor.capability, m, n, executor.programs)
    assert tile is not None
    constants = dict(R=ctx.size, S=1 << (ctx.size - 1).bit_length(), BM=tile.bm, BN=tile.bn, BK=tile.bk)
    constants |= dict(B=min(exchange.WORDS, tile.bm * tile.bn // 2), WORDS=exchange.WORDS)
    constants |= dict(SCATTER=full < m, GATHER=ctx.kind.gather, BIAS=bias is not None, MOST=exchange.MOST, maxnreg=REGISTERS)
    stride = x.stride(0) if m > 1 else k  # that of a single row says nothing
    args = (x, weight, y, ctx.ctl if bias is None else bias, ctx.epochs, ctx.ctl)
    sizes = (m, n, k, stride, weight.stride(0), ctx.words, ctx.offsets["slots"], ctx.rank)
    varying = (0, 1, 2) if bias is None else (0, 1, 2, 3)

    def make() -> Prepared:
        return ctx.prepare(product_fused_kernel, cdiv(n, tile.bn), (*args, *sizes), constants, tile, varying)

    made: Prepared = ctx.plan(("fused", x.dtype, *sizes[:5], full, bias is None), make)[1]
    return made


def rows_read(max_m: int) -> int:
    """Rows that the tiles of calls of up to ``max_m`` read of what is gathered, where they read more than there are."""
    return sum(_rows(max_m)) if ROWS < max_m <= GATHERED_ROWS else 0


def gather_launch(
    ctx: exchange.ExchangeContext, part: torch.Tensor, memory: torch.Tensor, m: int, weight: torch.Tensor,
    bias: torch.Tensor | None, z: torch.Tensor, parts: exchange.Parts,
) -> Prepared:  # fmt: skip
    """The launch of a call that is not `gather_unfit`. It takes the own part of what is gathered, weight and z, and a bias.

    ``memory``: the context's, for the ``m`` rows that are gathered.
    """
    (n, k), executor = weight.shape, ctx.world.executor
    tile = tile_of(executor.capability, m, n, executor.programs)
    assert tile is not None
    programs, sources = cdiv(n, tile.bn), 1 << (ctx.size - 2).bit_length()
    lot = min(cdiv(parts.blocks, programs), max(WORDS_A_THREAD * 32 * tile.warps // (sources * exchange.WORDS), 1))
    room = exchange.WORDS << (lot - 1).bit_length()
    constants = dict(R=ctx.size, S=sources, BM=tile.bm, REST=tile.rest, BN=tile.bn, BK=tile.bk, B=room, WORDS=exchange.WORDS)
    constants |= dict(TMA=tile.tma, BIAS=bias is not None, MOST=exchange.MOST, maxnreg=REGISTERS)
    operands: tuple = memory, memory, weight
    if tile.tma:
        # Rows of no call behind the m, if memory has them: out of a descriptor's bounds they cost a product up to 90 % more
        # (docs/measured/2026-11-28-waits.md)
        rows = min(tile.bm + tile.rest, len(memory) // k)
        read = memory[: rows * k].view(rows, k)
        first = tiling.descriptor(read[: tile.bm], [tile.bm, tile.bk])
        behind = tiling.descriptor(read[tile.bm :], [tile.rest, tile.bk]) if tile.rest else first
        operands = first, behind, tiling.descriptor(weight, [tile.bn, tile.bk])
    args = (part, memory, *operands, z, ctx.ctl if bias is None else bias, ctx.flags[ctx.rank * ctx.bulk :])
    args += (ctx.arrived, ctx.epochs, ctx.ctl)
    sizes = (*parts, lot, m, n, k, weight.stride(0), ctx.words, ctx.offsets["slots"], ctx.rank)
    varying = (0, 4, 5) if bias is None else (0, 4, 5, 6)
    return ctx.prepare(gather_fused_kernel, programs, (*args, *sizes), constants, tile, varying)

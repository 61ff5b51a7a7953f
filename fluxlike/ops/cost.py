"""What a call is expected to take: a model in seconds from a few constants, good enough to rank the schedules.

The constants are those of an H200 beside others on NVLink, bf16: fitted by hand and by least squares to the calls of
docs/measured/2026-11-2{1,2}-*-R4.json, which tests/test_choice.py holds the model to (every schedule within 35 % of its median,
most within a tenth; the schedule that it picks within 2 % of the best one, but for one). What is not about four ranks is of two
H100s (few rows and the shared wave, docs/measured/2026-11-24-two-h100.md), of one (fp32), of two H200s (ag_gemm's costs for each
peer, docs/measured/2026-11-29-attention.md) or of one, as constants say; for other GPUs nothing has been measured.

* A product is waves of tiles: ``programs`` tiles at a time, each `TILE_RATE` operations a second and `TILE_END` for its end. Where
  the last wave is shared (`waves`), it takes its part of that, and `SHARING`. Beside it the weight is read from memory, once for
  each group of rows of tiles; with few rows that takes about as long, and neither hides the other wholly (`_beside`).
* gemm_rs, copy_engine: copies begin when their part is computed, one after the other. The own chunk is last; a tile of it
  ends when the partial sums are there, and the tiles that its program still has come behind it. Parts of a chunk share less in
  the L2 cache (`CUT`).
* gemm_rs, in_kernel: tiles of one wave are stored to the peers at the same time, for which the product waits; after some waves
  the programs have drifted apart and one computes while another stores (`DRIFT`), which still costs something (`BESIDE`).
* ag_gemm, copy_engine: the shards arrive one after the other; what is left of the product comes behind the last.
* sequential: torch's product, then or before an exchange (`exchange.seconds`), in which ranks meet whose products end apart.
* decomposed: torch's products, one a chunk, and copies as above; gemm_rs then adds up the partial sums from memory. Whether a
  call is in a graph is not known, so it takes as long as the host does at least.
* ag_gemm, in_kernel: the pushers' programs are missing to the product, and all shards arrive together.

Not in the model: clocks that fall under load (5 %), L2 cache, other work on the machine.
"""

from collections.abc import Callable
from dataclasses import replace
from math import log2
from typing import TYPE_CHECKING

import torch

from ..kernels.tiles import cdiv
from . import exchange
from .tiling import CPU, HALF, Tiling, rate

if TYPE_CHECKING:
    from .choice import Choice, Problem

#: Operations a second of a bf16 product by cuBLAS on the whole GPU, measured; and, one after the other, of those so long (665 to
#: 690 from 0.3 ms on, 750 below 0.1 ms).
GEMM_RATE = 730e12
LONG, LONG_RATE = 0.25e-3, 690e12
#: Sides of cuBLAS's tiles, the other one 128; operations a second of a multiprocessor inside one, and seconds of its end. Fitted to
#: what 31 products of up to two and a half waves took on H200s (docs/measured/2026-11-29-tiles.md).
TORCH_SIDES, TORCH_TILE_RATE, TORCH_TILE_END = (128, 144, 160, 192, 256), 6.1e12, 1e-6
#: Bytes a second that a copy engine pushes to a peer beside a GEMM, measured.
COPY_RATE = 340e9
#: Bytes a second that stores of kernels bring to the peers together: 64 programs on an idle GPU moved 335 GB/s, measured.
STORE_RATE = 330e9
#: Bytes a second of in-kernel pushing on which `ag_gemm` plans its head start, measured.
PUSH_RATE = 300e9
#: Of them, of one program beside a product; fitted.
PUSHER_RATE = 18e9
#: Operations a second of a multiprocessor inside a tile of 128×256; fitted.
TILE_RATE = 5.5e12
#: Seconds from the last product of a tile of 128×256 to the first of the next; fitted.
TILE_END = 2e-6
#: Seconds that a call takes longer where its last wave is shared: medians of what two H100s took, and ag_gemm's of one H200 that
#: plays one rank of four, which takes 25 to 79 for gemm_rs, reckoned alike (docs/measured/2026-11-24-two-h100.md).
SHARING = {
    ("ag_gemm", "copy_engine"): 25e-6,
    ("ag_gemm", "in_kernel"): 25e-6,
    ("gemm_rs", "copy_engine"): 130e-6,
    ("gemm_rs", "in_kernel"): 57e-6,
}
#: Bytes a second from the GPU's memory, which a product with few rows reads its weight at, and seconds that a product of torch's
#: takes beside, measured: with 64 rows, H200s took 32.1 and 61.9 µs for weights of 117 and 235 MB, and H100s with 16 rows 80.8,
#: 161 and 294 for 235, 470 and 872 MB. Other GPUs are taken for the first.
MEMORY_RATES = {"NVIDIA H200": 4e12, "NVIDIA H100 80GB HBM3": 2.95e12}
MEMORY_RATE = MEMORY_RATES["NVIDIA H200"]
TORCH = 2.5e-6
#: How well products and the reading of the weight hide each other, of torch and of our kernels: see `_beside`. Fitted to H100s.
TORCH_HIDES, OURS_HIDE = 4, 3
#: In fp32: the rate of torch's product against bf16, and operations a second of a multiprocessor inside a tile of ours. One H100,
#: 51.5 and 17.3e12 in all (docs/measured/2026-11-26-fp32.md).
TORCH_FP32 = 0.071
TILE_FP32 = 0.131e12
#: Seconds of any call; of a copy. Fitted.
CALL = 4e-6
COPY = 5e-6
#: Seconds of a side stream's fork, join and signals, for each peer and at most; of the flags of an in-kernel gather, for each peer.
#: Fitted.
COPIES_PEER, COPIES = {"gemm_rs": 13e-6, "ag_gemm": 9e-6}, 40e-6
GATHER_PEER = 4e-6
#: How many times as long as its tiles a product of ag_gemm's takes; fitted (docs/measured/2026-11-29-attention.md).
GATHERING = 1.03
#: Of the product of chunks that are halved, for each time: 8192×8192×28672 1488, 1532, 1561 µs with 1, 2 and 4 parts, measured.
CUT = 0.025
#: Waves after which stores to the peers are hidden, and the part of them that costs time even then; fitted, the latter to long
#: products on two H200s (docs/measured/2026-11-30-parts.md).
DRIFT = 5.0
BESIDE = 0.3
#: What torch's product takes longer for each rank beyond two where they meet in every call, and half of it for each rank where they
#: meet right behind it; fitted.
UNEQUAL = 0.034
#: Of a call of `decomposed` with its signals, of gemm_rs and of ag_gemm; fitted, the latter to two H200s.
SUMMED, GATHERED = 43e-6, 38e-6
#: Seconds that the host takes for such a call, and for each rank's part of it: medians of slow hosts, of 208 to 269 and 333 µs
#: (gemm_rs, two and four ranks), 324 to 444 and 426 to 492 (ag_gemm).
HOST = {"gemm_rs": (150e-6, 45e-6), "ag_gemm": (320e-6, 40e-6)}
#: Seconds that it takes longer where the call is one of those that a call between nodes is made of, with its share of the messages.
#: Two nodes of two GPUs, slow hosts: 0.32 to 0.57 ms for each of two, measured.
HOST_BETWEEN = 0.3e-3
#: Bytes a second of a GPU to other nodes: an assumption, a card of 400 Gb/s for each.
NETWORK_RATE = 50e9
#: Seconds from a put to the end of the wait for it, of an empty message: by the host; by a kernel, on one host. Fitted.
PUT, PUT_BY_KERNEL = 22e-6, 10e-6
#: Seconds for each node of what is launched around its product, and of what puts rows in order where a call of all nodes' rows is
#: made together; two H100s as two nodes, fitted.
AROUND, ARRANGED = 7e-6, {"gemm_rs": 2e-6, "ag_gemm": 14e-6}
#: K of a context that does not know it.
LARGE_K = 32768


def memory_rate(gpu: str) -> float:
    """Bytes a second from the memory of a GPU of this name."""
    return MEMORY_RATES.get(gpu, MEMORY_RATE)


def may_share(capability: tuple[int, int], dtype: torch.dtype) -> bool:
    """Whether the last wave may be shared: on GPUs other than Hopper, and in fp32, the kernels would spill registers."""
    return capability == CPU or (capability == (9, 0) and dtype != torch.float32)


def sharing(op: str, transport: str, tile: Tiling) -> float:
    """Seconds that sharing the last wave costs. Of smaller tiles the parts are smaller, too.

    gemm_rs has no registers for it where four warps have a tile: without end.
    """
    if op == "gemm_rs" and tile == replace(HALF, group_m=tile.group_m):
        return float("inf")
    return SHARING[op, transport] * (tile.bm * tile.bn / (128 * 256)) ** 0.5


def step_seconds(tile: Tiling, dtype: torch.dtype) -> float:
    """Of one step of a product, of the depth of the tile."""
    return 2 * tile.bm * tile.bn * tile.bk / (TILE_FP32 if dtype == torch.float32 else TILE_RATE)


def tile_seconds(problem: "Problem", choice: "Choice", depth: int, faster: float = 1.0) -> float:
    """Of one tile, on a GPU that multiplies so much faster than an H200."""
    tile = choice.tile
    operations = faster * (TILE_FP32 if problem.dtype == torch.float32 else TILE_RATE * rate(tile))
    return 2 * tile.bm * tile.bn * depth / operations + TILE_END * tile.bm * tile.bn / (128 * 256)


def _beside(first: float, second: float, order: int) -> float:
    """Seconds of two things that hide each other, all the better the higher ``order`` is; without a limit it is the longer one."""
    return float((first**order + second**order) ** (1 / order))


def _groups(height: int, choice: "Choice") -> float:
    """Of so many rows of tiles: groups of `tiles.grouped`, in which a column of the weight is read once."""
    return max(1.0, height / choice.tile.group_m)


def _product(problem: "Problem", choice: "Choice", tiles: int, seconds: float, groups: float, depth: int) -> float:
    """Seconds of a product of so many tiles of so many seconds, in so many groups of rows, ``depth`` deep.

    The last wave is shared if that is faster.
    """
    waves, behind = divmod(tiles, problem.programs)
    last = seconds if behind else 0.0
    if waves and may_share(problem.capability, problem.dtype):
        last = min(last, behind / problem.programs * seconds + sharing(problem.op, choice.transport, choice.tile))
    passes = max(1.0, min(groups, tiles / problem.programs))  # tiles of one wave read it together
    read = passes * problem.columns * depth * problem.dtype.itemsize / problem.memory
    return _beside(waves * seconds + last, read, OURS_HIDE)


def _reduce_scatter(problem: "Problem", choice: "Choice") -> tuple[int, int, float]:
    """Tiles of a part of a chunk, rows of it, seconds of a tile."""
    height = cdiv(cdiv(problem.rows, choice.tile.bm), choice.subs)
    depth = cdiv(problem.k or LARGE_K, problem.ranks)
    return height * cdiv(problem.n, choice.tile.bn), height * choice.tile.bm, tile_seconds(problem, choice, depth)


def cut_costs(problem: "Problem", choice: "Choice") -> float:
    """What a tile takes, on average, of what it takes where chunks are whole. gemm_rs's own chunk is computed as if it were."""
    cut = (problem.ranks - 1) / problem.ranks if problem.op == "gemm_rs" else 1.0
    return 1 + CUT * log2(choice.subs) * cut


def _side(problem: "Problem") -> float:
    """Seconds of a side stream's fork, join and signals, with copies to all peers."""
    return min(COPIES, max(problem.ranks - 1, 1) * COPIES_PEER[problem.op])


def gemm_rs_copies(problem: "Problem", choice: "Choice") -> float:
    ranks, subs = problem.ranks, choice.subs
    unit, rows, own = _reduce_scatter(problem, choice)
    depth, height = cdiv(problem.k or LARGE_K, ranks), rows // choice.tile.bm
    groups = (ranks - 1) * subs * _groups(height, choice) + _groups(height * subs, choice)
    tile = own * (1 + CUT * log2(subs))
    end = _product(problem, choice, unit * subs * ranks, own * cut_costs(problem, choice), groups, depth)
    sent, copy = 0.0, rows * problem.n * problem.dtype.itemsize / COPY_RATE + COPY
    for part in range((ranks - 1) * subs):
        sent = max(sent, cdiv(unit * (part + 1), problem.programs) * tile) + copy
        if part >= (ranks - 2) * subs:  # the last peer's to this rank: tiles of the own chunk wait for it, in whole groups
            first = (part - (ranks - 2) * subs) * height // choice.tile.group_m * choice.tile.group_m
            behind = (height * subs - first) * (unit // height) - 1
            end = max(end, sent + behind // problem.programs * own)
    return CALL + _side(problem) + end


def gemm_rs_stores(problem: "Problem", choice: "Choice") -> float:
    ranks, itemsize = problem.ranks, problem.dtype.itemsize
    unit, rows, tile = _reduce_scatter(problem, choice)
    depth = cdiv(problem.k or LARGE_K, ranks)
    wave = problem.programs * choice.tile.bm * choice.tile.bn * itemsize / STORE_RATE
    product = _product(problem, choice, unit * ranks, tile, ranks * _groups(rows // choice.tile.bm, choice), depth)
    waves = unit * (ranks - 1) / problem.programs
    stored = (min(waves, DRIFT) + BESIDE * max(waves - DRIFT, 0)) * wave
    wire = (ranks - 1) * problem.rows * problem.n * itemsize / STORE_RATE
    return CALL + max(product + stored, wire + tile)


def _gather(problem: "Problem", choice: "Choice") -> tuple[int, int, float, float]:
    """Tiles of a shard, rows of tiles in it, seconds of a tile; groups of all shards, in which those of the peers are together."""
    height = cdiv(problem.rows, choice.tile.bm)
    groups = _groups(height, choice) + (_groups(height * (problem.ranks - 1), choice) if problem.ranks > 1 else 0.0)
    tile = GATHERING * tile_seconds(problem, choice, problem.k)
    return height * cdiv(problem.columns, choice.tile.bn), height, tile, groups


def ag_gemm_copies(problem: "Problem", choice: "Choice") -> float:
    ranks, subs = problem.ranks, choice.subs
    unit, _, tile, groups = _gather(problem, choice)
    end = _product(problem, choice, unit * ranks, tile * cut_costs(problem, choice), groups, problem.k)
    copy = problem.rows * problem.k * problem.dtype.itemsize / COPY_RATE + COPY * subs
    for shard in range(1, ranks):
        # the tiles of a shard begin with its first part
        there = copy * (shard - 1 + 1 / subs)
        end = max(end, there + cdiv(unit * (ranks - shard), problem.programs) * tile)
    return CALL + _side(problem) + end


def ag_gemm_pushes(problem: "Problem", choice: "Choice") -> float:
    ranks, programs = problem.ranks, problem.programs
    unit, height, tile, groups = _gather(problem, choice)
    product = _product(problem, choice, unit * ranks, tile, groups, problem.k)
    if ranks == 1:
        return CALL + product
    # as `waves.gather`: programs without a tile of their own push, too
    wanted = min(max(choice.pushers, programs - unit), max(1, programs // 2))
    pushers = min(wanted, max(1, height * cdiv(wanted, max(1, height))))
    push = (ranks - 1) * problem.rows * problem.k * problem.dtype.itemsize / min(STORE_RATE, pushers * PUSHER_RATE)
    behind = cdiv(unit * (ranks - 1), programs) * tile
    return CALL + (ranks - 1) * GATHER_PEER + max(product + pushers / programs * push, push + behind)


def torch_seconds(problem: "Problem", rows: int) -> float:
    """Of torch's product with so many rows."""
    depth = problem.k if problem.op == "ag_gemm" else cdiv(problem.k or LARGE_K, problem.ranks)
    operations = 2 * rows * problem.columns * depth / (TORCH_FP32 if problem.dtype == torch.float32 else 1.0)
    seconds = operations / (LONG_RATE if operations > LONG * GEMM_RATE else GEMM_RATE)
    waves = cdiv(rows, 128) * cdiv(problem.columns, 256) / problem.programs
    if 0.5 < waves < 2.5 and problem.dtype != torch.float32:  # fewer tiles are split, and of more the last wave is less
        seconds = max(seconds, _torch_waves(problem, rows, depth))
    return TORCH + _beside(seconds, problem.columns * depth * problem.dtype.itemsize / problem.memory, TORCH_HIDES)


def _torch_waves(problem: "Problem", rows: int, depth: int) -> float:
    """Of its waves, with the tiles for which they are shortest, in either direction."""
    ways = [(a, b, side) for a, b in ((rows, problem.columns), (problem.columns, rows)) for side in TORCH_SIDES]
    return min(
        cdiv(cdiv(a, 128) * cdiv(b, side), problem.programs) * (2 * 128 * side * depth / TORCH_TILE_RATE + TORCH_TILE_END)
        for a, b, side in ways
    )


def slowest_seconds(problem: "Problem", rows: int) -> float:
    """Of torch's product where all ranks make it and meet in every call."""
    return torch_seconds(problem, rows) * (1 + UNEQUAL * max(problem.ranks - 2, 0))


def sequential(problem: "Problem", choice: "Choice") -> float:
    product = torch_seconds(problem, problem.ranks * problem.rows)
    if problem.ranks == 1:
        return product
    return product * (1 + UNEQUAL * problem.ranks / 2) + exchange.seconds(problem.exchanged // problem.ranks, problem.ranks)


def _chunk_copy(problem: "Problem") -> float:
    """Seconds of the copy of a chunk."""
    return problem.exchanged // problem.ranks / COPY_RATE + COPY


def _host(problem: "Problem") -> float:
    """Seconds of the host for a call of decomposed."""
    whole, part = HOST[problem.op]
    return whole + problem.ranks * part + (HOST_BETWEEN if problem.part_of > 1 else 0.0)


def gemm_rs_decomposed(problem: "Problem", choice: "Choice") -> float:
    ranks, product, sent = problem.ranks, slowest_seconds(problem, problem.rows), 0.0
    if ranks == 1:
        return product
    for part in range(1, ranks):
        sent = max(sent, part * product) + _chunk_copy(problem)
    # the partial sums are read, the own one, too, and the result is written
    added = (ranks + 1) * problem.exchanged / ranks / problem.memory
    return max(CALL + SUMMED + max(ranks * product, sent) + added, _host(problem))


def gathered_beside(problem: "Problem") -> bool:
    """ag_gemm: whether the product of a rank's own shard is expected to outlast the arrival of all others."""
    return (problem.ranks - 1) * _chunk_copy(problem) <= torch_seconds(problem, problem.rows)


def ag_gemm_decomposed(problem: "Problem", choice: "Choice") -> float:
    ranks, rows, end = problem.ranks, problem.rows, slowest_seconds(problem, problem.rows)
    if ranks == 1:
        return end
    if gathered_beside(problem):  # in the middle there is a piece on either side
        sides = [side for side in (ranks // 2, ranks - 1 - ranks // 2) if side]
        end += sum(slowest_seconds(problem, rows * side) for side in sides)
    else:
        for shard in range(1, ranks):
            end = max(end, shard * _chunk_copy(problem)) + slowest_seconds(problem, rows)
    return max(CALL + GATHERED + end, _host(problem))


#: The model of each operation and transport.
MODELS: dict[tuple[str, str], Callable[["Problem", "Choice"], float]] = {
    ("gemm_rs", "copy_engine"): gemm_rs_copies,
    ("gemm_rs", "in_kernel"): gemm_rs_stores,
    ("gemm_rs", "sequential"): sequential,
    ("gemm_rs", "decomposed"): gemm_rs_decomposed,
    ("ag_gemm", "copy_engine"): ag_gemm_copies,
    ("ag_gemm", "in_kernel"): ag_gemm_pushes,
    ("ag_gemm", "sequential"): sequential,
    ("ag_gemm", "decomposed"): ag_gemm_decomposed,
}

"""How a call is made: which transport, which tiles, how its chunks are cut. One `Choice` a call, found in one place.

The knobs are those that the kernels have, no more: every schedule pushes (none pulls), gemm_rs computes the own chunk last and
ag_gemm first. What is chosen:

* ``transport``: who carries the data, one of `TRANSPORTS`; with those of `TORCH` nothing else, as torch multiplies. The size of
  what is signalled on its own goes with it: in_kernel a tile (gemm_rs) or a row of tiles (ag_gemm), copy_engine a chunk or one of
  its ``subs`` parts.
* ``tile``: the tile of C with its order (``group_m``), depth, warps and stages: one of `tiles`.
* ``subs``: parts of a chunk that a copy engine sends, each with its own signal.
* ``pushers``: programs that push the shard while the others compute (ag_gemm, in_kernel).

What must be the same on all ranks. The transport, ``subs``, and of the tile ``bm`` (gemm_rs: and ``bn``) say which signal
belongs to which part of the data, so a rank that chose otherwise would wait for signals that nobody gives. So `choose` looks only
at a `Problem`, whose every field the ranks have in common (for gemm_rs K, for ag_gemm N are what all ranks say, else the context's,
because their own may differ), and at a table that the ranks agreed on when the context was made (`tuned.agreed`). ag_gemm's ``bn``
is each rank's own affair (`for_columns`).

A choice out of a table is used if it is one of those that could have been measured here (`why_not`). So a wrong table can make
calls slow and nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from ..kernels.tiles import cdiv, chunk_rows
from . import cost, sequential, tiling, waves
from .tiling import CPU, SMALL_ROWS, Tiling

#: `ops.decomposed`, which looks at this module.
DECOMPOSED = "decomposed"
#: The transports of each operation. Where two are expected to take equally long, the earlier one is used.
TRANSPORTS: dict[str, tuple[str, ...]] = {
    "gemm_rs": ("copy_engine", "in_kernel", sequential.NAME, DECOMPOSED),
    "ag_gemm": ("copy_engine", "in_kernel", sequential.NAME, DECOMPOSED),
}
#: Of them, those whose products are torch's.
TORCH = (sequential.NAME, DECOMPOSED)
#: Parts of a chunk; a power of two not above `tiling.MAX_SUBS`, so that slots sized for whole tiles hold every cut.
SUBS = (1, 2, 4)
#: Heights of a group of tiles.
GROUPS = (4, 8, 16)
#: ag_gemm in_kernel. Eight fill an idle wire of an H200 (316 GB/s), but not beside a GEMM; more than 16 cost the product more
#: than they brought at 8192×57344×8192.
PUSHERS = (16, 24, 32)

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Problem:
    """What a choice depends on: the same on all ranks. ``m``, ``n``, ``k`` of the whole problem, ``k`` = 0 for one not known."""

    op: str
    capability: tuple[int, int]
    #: Programs that run at a time, one a multiprocessor.
    programs: int
    ranks: int
    dtype: torch.dtype
    m: int
    n: int
    k: int
    #: Whether auto may leave products to torch, as FLUXLIKE_TORCH_PRODUCTS has it.
    torch_products: bool = True
    #: Calls like this one of which a call is made: one for each node that a group spans (`ops.nodes`).
    part_of: int = 1
    #: Bytes a second from the GPU's memory.
    memory: float = cost.MEMORY_RATE

    @property
    def shape(self) -> Shape:
        return self.m, self.n, self.k

    @property
    def rows(self) -> int:
        """Of a chunk."""
        return chunk_rows(self.m, self.ranks)

    @property
    def columns(self) -> int:
        """Of the result of a rank."""
        return self.n if self.op == "gemm_rs" else cdiv(self.n, self.ranks)

    @property
    def exchanged(self) -> int:
        """Bytes of all chunks."""
        return self.ranks * self.rows * (self.n if self.op == "gemm_rs" else self.k) * self.dtype.itemsize


@dataclass(frozen=True)
class Choice:
    """How a call is made; see the module."""

    transport: str
    tile: Tiling
    subs: int = 1
    pushers: int = 0

    def __str__(self) -> str:
        parts = [self.transport, str(self.tile), f"group {self.tile.group_m}"]
        parts += [f"cut in {self.subs}"] * (self.subs > 1) + [f"{self.pushers} push"] * (self.pushers > 0)
        return ", ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """Plain data, without ``tma``, which follows from the machine."""
        tile = {f.name: getattr(self.tile, f.name) for f in fields(Tiling) if f.name != "tma"}
        return {"transport": self.transport, **tile, "subs": self.subs, "pushers": self.pushers}


def from_json(data: Any, problem: Problem) -> Choice:
    """The choice that `Choice.as_json` wrote, as this problem's. ValueError if it is none, or not one for this problem."""
    if not isinstance(data, dict) or not isinstance(data.get("transport"), str):
        raise ValueError("a choice is an object with the key 'transport'")
    numbers = {key: value for key, value in data.items() if key != "transport"}
    wanted = {f.name for f in fields(Tiling)} - {"tma"} | {"subs", "pushers"}
    if numbers.keys() != wanted or not all(type(value) is int for value in numbers.values()):
        raise ValueError(f"a choice has the whole numbers {', '.join(sorted(wanted))}")
    subs, pushers = numbers.pop("subs"), numbers.pop("pushers")
    tma = tiles(problem.capability, problem.dtype)[0].tma
    choice = Choice(data["transport"], Tiling(**numbers, tma=tma), subs, pushers)
    if choice.transport in TORCH:
        choice = usual(problem, choice.transport)  # its tiles are torch's, whatever stood there by the rules of then
    why = why_not(problem, choice)
    if why is not None:
        raise ValueError(why)
    return choice


def tiles(capability: tuple[int, int], dtype: torch.dtype) -> tuple[Tiling, ...]:
    """The tiles that kernels may be compiled with, in the group height of `tiling.fitting`.

    A closed list, because each must fit into the registers and the shared memory of the GPU: those for compute capability 9.0 have
    been compiled for it (the slow test of tests/test_choice.py does).
    """
    if capability == CPU:
        return tuple(Tiling(bm, bn, 64, 4, 1, 1, True) for bm in (32, 64) for bn in (32, 64))
    if dtype == torch.float32:
        return (tiling.FP32,)
    if tiling.is_large(capability):
        low = Tiling(64, 128, 128, 8, 4, 4, True), Tiling(64, 256, 64, 8, 4 if capability == (9, 0) else 8, 4, True)
        columns = (256, 255) if capability == (9, 0) else (256,)
        return *(tile for n in columns for tile in tiling.fitting(capability, dtype, tiling.MAX_SIZE, n)), *low
    depth = 64 if capability == (8, 0) else 32
    return Tiling(128, 128, depth, 8, 8, 3, False), Tiling(64, 128, depth, 8, 8, 3, False)


def why_not(problem: Problem, choice: Choice) -> str | None:
    """Why calls of this problem cannot be made so, if they cannot."""
    tile, tma = choice.tile, tiling.is_large(problem.capability)
    if choice.transport not in TRANSPORTS[problem.op]:
        return f"{problem.op} has no transport {choice.transport!r}"
    if choice.transport in TORCH:
        if choice != usual(problem, choice.transport):
            return "its tiles are torch's"
        if choice.transport == sequential.NAME and problem.exchanged > sequential.limit(problem.dtype):
            return f"{problem.exchanged} bytes, of which it takes {sequential.limit(problem.dtype)} at most"
        if choice.transport == DECOMPOSED and problem.dtype == torch.float32:
            return "in fp32 cuBLAS is less exact with the rows of one rank than with all"
        return why_not_torch(problem.capability, problem.torch_products)
    known = (replace(t, group_m=tile.group_m) for t in tiles(problem.capability, problem.dtype))
    if tile.group_m not in GROUPS or tile not in known:
        return f"no tile {tile} for compute capability {problem.capability} and {problem.dtype}"
    if tma and problem.rows <= SMALL_ROWS and tile.bm > SMALL_ROWS:
        return f"tiles of {tile.bm} rows for chunks of {problem.rows}, which operands that TMA cannot address read by pointers"
    if not fits_columns(tile, problem.columns):
        return f"tiles of {tile.bn} columns for {problem.columns} of them"
    copies = choice.transport == "copy_engine"
    rows_of_tiles = cdiv(problem.rows, tile.bm)
    if choice.subs not in SUBS or (choice.subs > 1 and not copies):
        return f"{choice.subs} parts of a chunk"
    # Here every part must have rows, as all are waited for, and none may reach into the next shard.
    if problem.op == "ag_gemm" and rows_of_tiles % choice.subs:
        return f"{choice.subs} parts of {rows_of_tiles} rows of tiles"
    if choice.pushers not in (PUSHERS if problem.op == "ag_gemm" and choice.transport == "in_kernel" else (0,)):
        return f"{choice.pushers} programs that push"
    return None


def why_not_torch(capability: tuple[int, int], allowed: bool) -> str | None:
    """Why auto makes no calls by torch's product, if it does not. ``allowed``: by FLUXLIKE_TORCH_PRODUCTS."""
    if not allowed:
        return "FLUXLIKE_TORCH_PRODUCTS=0 keeps auto to kernels of ours"
    if capability == CPU:
        return "the CPU heap is for kernels of ours"
    return None


def fits_columns(tile: Tiling, columns: int) -> bool:
    """Element-wise stores of a ragged result spill registers at 256 columns, and where a thread has 128 elements of the tile."""
    if columns % 16 == 0:
        return tile.bn <= 128 or columns > 128
    return tile.bn <= 128 and (tile.warps == 1 or tile.bm * tile.bn <= 64 * 32 * tile.warps)  # one warp: on a CPU


def usual(problem: Problem, transport: str) -> Choice:
    """What a call gets without a table: the tile whose launch is planned to be the shortest, the cut of which `cost` expects most.

    What cuts gain and cost in µs, with 1, 2 and 4 parts: on two H200s 8192×16384×16384 3726, 3421, 3417, 16384×4096×14336 1602,
    1491, 1496 (docs/measured/2026-11-30-parts.md); on four 8192×8192×8192 572, 514, 527, 8192×8192×28672 1522, 1515, 1514
    (docs/measured/2026-11-22-gemm_rs-parts-R4.md).
    """
    pushers = PUSHERS[0] if problem.op == "ag_gemm" and transport == "in_kernel" else 0
    made = Choice(transport, _tile(problem, transport, pushers, problem.columns), pushers=pushers)
    if problem.op != "gemm_rs" or transport != "copy_engine":
        return made
    return min((replace(made, subs=subs) for subs in SUBS), key=lambda cut: predict(problem, cut))


def _tile(problem: Problem, transport: str, pushers: int, columns: int) -> Tiling:
    """The tile whose steps are expected to take the least time, one after the other."""
    options = tiling.fitting(problem.capability, problem.dtype, problem.rows, columns)
    if len(options) == 1 or transport in TORCH:
        return options[0]
    return min(options, key=lambda tile: waves.steps(problem, tile, transport, pushers, columns) * tile.bn / tiling.rate(tile))


def predict(problem: Problem, choice: Choice) -> float:
    """Seconds that a call is expected to take, by `cost`."""
    return cost.MODELS[problem.op, choice.transport](problem, choice)


def candidates(problem: Problem) -> list[Choice]:
    """Every choice that is possible, those first that are expected to be fast."""
    found = []
    for transport in TRANSPORTS[problem.op]:
        for tile in tiles(problem.capability, problem.dtype):
            for group_m in dict.fromkeys((tile.group_m, *GROUPS)):
                for subs in SUBS:
                    for pushers in (0, *PUSHERS):
                        choice = Choice(transport, replace(tile, group_m=group_m), subs, pushers)
                        if why_not(problem, choice) is None:
                            found.append(choice)
    return sorted(found, key=lambda choice: predict(problem, choice))  # stable: the usual group height first


def choose(problem: Problem, schedule: str, table: Mapping[Shape, Choice]) -> Choice:
    """How calls of this problem are made: as the table says, else by the usual choice of the transport that costs least.

    ``schedule``: "auto", or the transport that the caller wants.
    """
    known = table.get(problem.shape)
    if known is not None and problem.part_of > 1 and known.transport == DECOMPOSED:
        known = None  # measured alone, where the host has less to do
    if known is not None and schedule in ("auto", known.transport) and why_not(problem, known) is None:
        return known
    options = usuals(problem) if schedule == "auto" else [usual(problem, schedule)]
    if problem.ranks == 1:  # nothing to hide: a product of torch's, where torch may multiply
        options = [option for option in options if option.transport == DECOMPOSED] or options
    return min(options, key=lambda choice: predict(problem, choice))


def usuals(problem: Problem) -> list[Choice]:
    """What auto chooses from without a table."""
    options = [usual(problem, transport) for transport in TRANSPORTS[problem.op]]
    return [option for option in options if option.transport not in TORCH or why_not(problem, option) is None]


def for_columns(problem: Problem, made: Choice, columns: int) -> Tiling:
    """ag_gemm: the tile of a rank whose weights are ``columns`` wide, as high as that of the choice, on which the ranks agree."""
    tile = made.tile
    if columns == problem.columns:
        return tile
    rule = _tile(problem, made.transport, made.pushers, columns)
    same = [t for t in tiles(problem.capability, problem.dtype) if t.bm == tile.bm and fits_columns(t, columns)]
    return replace(rule if rule in same else same[0], group_m=tile.group_m)

"""What `soak` does, drawn from its seed: the same list of steps on every rank, before anything runs. Pure Python.

A *signature* is all that decides the bits of a result besides the data: group, operation, schedule, dtype, shape, operands.
There are 67 of them on two GPUs and 109 on four, so that each comes back again and again and nothing is compiled after a warm-up.
A *step* is one signature on one of a few sets of data, called in one mode a few times; a *burst* is some steps whose calls are
queued back to back.

Values are dealt from shuffled decks and not drawn one by one, so a short run, too, has some of everything.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

#: "kept": a call without a context, on the one that the library keeps; the others are the schedules of a context.
SCHEDULES = ("auto", "copy_engine", "in_kernel", "sequential", "stream_k", "decomposed", "kept")
#: The operations that overlap, and those that are given no context here, whose schedules are algorithms or modes.
OVERLAPPED = ("gemm_rs", "ag_gemm")
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "reduce", "broadcast")
SPARSE = "sparse_all_reduce"
#: Calls of gemm_ar that auto makes in one kernel on GPUs, if the ranks divide K.
FEW = "few"
#: The host waits in it, so no graph can hold it.
WAITS = (SPARSE, "exact")
#: Every operation with its schedules.
OPS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(OVERLAPPED, SCHEDULES),
    "gemm_ar": ("auto", "one_shot", "two_shot", "bulk", "kept", FEW),
    "all_reduce": ("auto", "one_shot", "two_shot", "bulk", "trees"),
    **dict.fromkeys(COLLECTIVES[1:], ("auto", "words", "bulk")),
    SPARSE: ("exact", "padded"),
}
#: Of them, those with a choice of the reduction.
SUMS = ("all_reduce", "reduce_scatter", "reduce")
#: "graph": replays of a captured graph; "mixed": eager calls and replays by turns; "stream": each call on another stream.
MODES = ("eager", "graph", "mixed", "stream")
GRAPH_MODES = ("graph", "mixed")
DTYPES = ("bfloat16", "bfloat16", "bfloat16", "bfloat16", "float16", "float32")
#: One step in so many is compared with the reference, beside the bits of all.
REFERENCE_EVERY = 10

Shape = tuple[int, int, int]
#: (place, op, schedule, dtype): what a context is for.
ContextKey = tuple[int, str, str, str]


@dataclass(frozen=True)
class Profile:
    """What suits a kind of machine.

    ``shapes``: M, N, K of the whole problem, by class (or class and operation). ``world``, ``half``: for each schedule of the
    operations that overlap, in the world or in a half, one signature an entry, of one of the classes named there; for the other
    operations always ``half``.
    """

    shapes: dict[str, tuple[Shape, ...]]
    world: tuple[tuple[str, ...], ...]
    half: tuple[tuple[str, ...], ...]
    modes: tuple[str, ...]
    delays: tuple[tuple[str, float], ...]  # where the late rank waits ("host", "device"; "" nowhere), and how many seconds
    loads: tuple[int, ...]  # large products in front of a step
    data: int  # sets of data a signature
    longest: int  # steps of a burst, at most
    remake_every: int  # bursts from one context closed and made again to the next
    ballast: int  # rows, at most, of the context that moves a new one to another place on the heap


# m of 1 to 5 leaves ranks without rows of four; the ragged ones are odd in all ways that matter to tiles and to TMA
GPU = Profile(
    shapes={
        "large gemm_rs": ((8192, 8192, 28672), (4096, 8192, 28672), (8192, 4096, 14336), (2048, 8192, 28672), (8192, 8192, 8192)),
        "large ag_gemm": ((8192, 28672, 8192), (4096, 57344, 8192), (8192, 28672, 4096), (2048, 57344, 8192), (8192, 16384, 8192)),
        "middle": (
            (1024, 4096, 4096), (2048, 2048, 4096), (512, 4096, 2048), (1536, 3072, 1024), (2048, 1024, 2048), (256, 4096, 4096)
        ),
        "ragged": ((2047, 1037, 1312), (1000, 999, 1004), (777, 1031, 643), (130, 72, 1000), (515, 384, 260), (1021, 2050, 2052)),
        "small": (
            (1, 4096, 4096), (2, 512, 1024), (3, 256, 512), (5, 1024, 2048), (16, 4096, 4096), (64, 2048, 4096), (128, 4096, 2048)
        ),
        FEW: ((1, 4096, 4608), (7, 5120, 2304), (16, 8192, 9216), (32, 4096, 2304), (64, 8192, 4608)),
    },
    world=(("large",), ("middle",), ("ragged", "small")),
    half=(("middle", "ragged", "small"),),
    modes=("eager", "eager", "graph", "mixed", "stream"),
    delays=(("", 0.0),) * 4 + (("host", 0.001), ("host", 0.01), ("device", 0.001), ("device", 0.02)),
    loads=(0, 0, 0, 2, 6),
    data=3,
    longest=6,
    remake_every=8,
    ballast=4096,
)  # fmt: skip
CPU = Profile(
    shapes={
        "even": ((64, 48, 64), (32, 64, 32), (96, 32, 64)),
        "ragged": ((61, 41, 52), (37, 20, 30), (70, 33, 45)),
        "small": ((1, 64, 16), (3, 32, 24), (5, 24, 16)),
        FEW: ((1, 1024, 48), (16, 64, 96)),
    },
    world=(("even", "ragged", "small"),),
    half=(("even", "ragged", "small"),),
    modes=("eager",),
    delays=(("", 0.0),) * 3 + (("host", 0.002), ("host", 0.02)),
    loads=(0, 0, 1),
    data=2,
    longest=4,
    remake_every=3,
    ballast=64,
)


@dataclass(frozen=True)
class Signature:
    """All that decides the bits of a result besides the data. m, n, k are of the whole problem, which the ranks split.

    ``place``: the group, an index of `groups`. ``weights``: products of one gather, or tensors of a list of all_reduce.
    ``uneven``: K (gemm_rs, gemm_ar) or N (ag_gemm) grows by 16 from rank to rank, and `ids` from none. ``graphed``: a graph of
    ``graph_calls`` calls is kept for it (that does not change the bits). ``reduction``: of a collective, whose tensors are [m, n]
    without k, or of rows of a sparse [m, n].
    """

    index: int
    place: int
    op: str
    schedule: str
    dtype: str
    m: int
    n: int
    k: int
    bias: bool
    transposed: bool
    uneven: bool
    weights: int
    gathered: bool
    graphed: bool
    reduction: str = "sum"

    @property
    def graph_calls(self) -> int:
        """Odd and even: a graph of an odd number of calls begins its replays in changing slot sets."""
        return 1 + self.index % 3

    @property
    def ids(self) -> int:
        """Entries that a rank brings to a sparse sum, at most; each may come several times."""
        return max(1, self.k // 8)

    @property
    def context(self) -> ContextKey | None:
        without = self.schedule == "kept" or self.op in (*COLLECTIVES, SPARSE)
        return None if without else (self.place, self.op, self.schedule, self.dtype)


@dataclass(frozen=True)
class Step:
    """``repeats`` calls (or replays) of a signature on data set ``data``; rank ``late`` of the group comes late."""

    number: int
    signature: Signature
    data: int
    mode: str = "eager"
    repeats: int = 1
    late: int = 0
    delay: tuple[str, float] = ("", 0.0)
    load: int = 0
    given: bool = False  # gemm_rs writes into a tensor of the caller
    reference: bool = False

    @property
    def calls(self) -> int:
        """How many calls of the operation that are."""
        replayed = self.repeats * self.signature.graph_calls if self.mode in GRAPH_MODES else 0
        eager = {"graph": 0, "mixed": self.repeats + 1}.get(self.mode, self.repeats)
        return eager + replayed


@dataclass(frozen=True)
class Burst:
    """Steps whose calls are queued back to back. Before them ``remake``, if any, is closed and made again."""

    name: str
    steps: tuple[Step, ...]
    remake: ContextKey | None = None
    ballast: int = 0


class Deck:
    """Deals ``values`` in random order, all of them before any comes again."""

    def __init__(self, rng: random.Random, values: Sequence[Any]) -> None:
        self._rng, self._values = rng, list(values)
        self._left: list[Any] = []

    def deal(self) -> Any:
        if not self._left:
            self._left = self._rng.sample(self._values, len(self._values))
        return self._left.pop()


def groups(ranks: int) -> list[list[int]]:
    """The places of a signature: the world and, from four ranks on, its two halves."""
    everyone = list(range(ranks))
    return [everyone, everyone[: ranks // 2], everyone[ranks // 2 :]] if ranks >= 4 else [everyone]


def kinds(place: int) -> list[tuple[str, str]]:
    """The operations and schedules of a place: all in the world; in a half of those that do not overlap one schedule each."""
    some = {op: schedules if op in OVERLAPPED or not place else schedules[:1] for op, schedules in OPS.items()}
    return [(op, schedule) for op, schedules in some.items() for schedule in schedules]


def signatures(seed: int, ranks: int, profile: Profile) -> list[Signature]:
    """The pool: for every place, operation and schedule as many as the profile says, one of them with a graph."""
    rng = random.Random(f"signatures {seed}")
    decks = {name: Deck(rng, shapes) for name, shapes in profile.shapes.items()}
    yes, seldom = Deck(rng, (True, False)), Deck(rng, (True, False, False))
    dtypes, weights, gathered = Deck(rng, DTYPES), Deck(rng, (1, 1, 2, 3)), Deck(rng, (True, False))
    narrow = Deck(rng, [dtype for dtype in DTYPES if dtype != "float32"])  # for what has no other
    transposed, reductions = Deck(rng, (True, False)), Deck(rng, ("sum", "avg", "max"))
    means, unlike = Deck(rng, ("sum", "avg")), Deck(rng, (True, False))
    classes = {entry: Deck(rng, entry) for entry in (*profile.world, *profile.half)}
    pool: list[Signature] = []
    for place, op, schedule in [(number, *kind) for number in range(len(groups(ranks))) for kind in kinds(number)]:
        entries = profile.half if place or op not in OVERLAPPED else profile.world
        graphed = rng.randrange(len(entries))
        for i, entry in enumerate(entries):
            kind = classes[entry].deal() if schedule != FEW else FEW
            m, n, k = decks[kind if kind in decks else f"{kind} {op}"].deal()
            ag, gemm, dtype = op == "ag_gemm", op not in (*COLLECTIVES, SPARSE), "bfloat16"
            if kind != "large":
                dtype = (narrow if schedule in ("decomposed", FEW) else dtypes).deal()
            several = op == "all_reduce" or (ag and kind != "large")
            pool.append(
                Signature(
                    len(pool), place, op, schedule, dtype, m, n, k,
                    bias=gemm and yes.deal(), transposed=gemm and schedule != FEW and transposed.deal(),
                    uneven=(gemm and seldom.deal()) or (op == SPARSE and unlike.deal()),
                    weights=weights.deal() if several else 1, gathered=ag and gathered.deal(),
                    graphed=i == graphed and (op, schedule) != WAITS and any(mode in GRAPH_MODES for mode in profile.modes),
                    reduction=means.deal() if op == SPARSE else reductions.deal() if op in SUMS else "sum",
                )
            )  # fmt: skip
    return pool


def context_sizes(pool: Sequence[Signature]) -> dict[ContextKey, Shape]:
    """The contexts that a pool needs, each as large as its largest call, in the order in which they are made."""
    sizes: dict[ContextKey, Shape] = {}
    for signature in pool:
        key = signature.context
        if key is not None:
            m, n, k = sizes.get(key, (1, 1, 1))
            sizes[key] = max(m, signature.m), max(n, signature.n), max(k, signature.k)
    return dict(sorted(sizes.items()))


def warm_up(pool: Sequence[Signature], profile: Profile) -> Iterator[Burst]:
    """Every signature on every set of data, alone: the results that all later ones must repeat. One of each is judged."""
    for signature in pool:
        steps = tuple(Step(-1, signature, data, reference=data == 0) for data in range(profile.data))
        yield Burst(f"warm-up of signature {signature.index}", steps)


def bursts(seed: int, ranks: int, profile: Profile) -> Iterator[Burst]:
    """The endless list of bursts. Steps are numbered through."""
    rng = random.Random(f"bursts {seed}")
    pool = signatures(seed, ranks, profile)
    every = Deck(rng, pool)
    graphed = Deck(rng, [signature for signature in pool if signature.graphed])
    modes, delays, loads = (Deck(rng, values) for values in (profile.modes, profile.delays, profile.loads))
    remakes, sizes = Deck(rng, list(context_sizes(pool))), [len(group) for group in groups(ranks)]
    number = burst = 0
    while True:
        steps: list[Step] = []
        replayed: set[int] = set()
        for _ in range(rng.randint(1, profile.longest)):
            mode = modes.deal()
            signature: Signature = (graphed if mode in GRAPH_MODES else every).deal()
            if mode in GRAPH_MODES and signature.index in replayed:
                mode = "eager"  # a graph has one set of operands, which must last until the burst is checked
            elif mode in GRAPH_MODES:
                replayed.add(signature.index)
            steps.append(
                Step(
                    number, signature, rng.randrange(profile.data), mode, rng.randint(1, 4), rng.randrange(sizes[signature.place]),
                    delays.deal(), loads.deal(), given=signature.op == "gemm_rs" and mode not in GRAPH_MODES and rng.random() < 0.5,
                    reference=number % REFERENCE_EVERY == 0,
                )
            )  # fmt: skip
            number += 1
        burst += 1
        remake = remakes.deal() if burst % profile.remake_every == 0 else None
        yield Burst(f"burst {burst}", tuple(steps), remake, rng.randint(1, profile.ballast))


def find(seed: int, ranks: int, profile: Profile, number: int) -> Step:
    """Step ``number`` of the plan."""
    for burst in bursts(seed, ranks, profile):
        if burst.steps[-1].number >= number:
            return burst.steps[number - burst.steps[0].number]
    raise AssertionError("the plan has no end")

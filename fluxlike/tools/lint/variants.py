"""The kernels of fluxlike's operations, as calls launch them, and what each must have."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from ...ops import ag_gemm as ag_gemm_op
from ...ops import collectives
from ...ops import gemm_rs as gemm_rs_op
from ...ops.all_reduce import ALGORITHMS, all_reduce
from ...ops.gemm_ar import create_gemm_ar_context, gemm_ar
from ...ops.sparse_all_reduce import NARROW, create_sparse_all_reduce_context
from ...runtime import dry, env, world
from . import stub
from .compiling import Built, Launch, build, launch_of
from .rules import Finding, Spec, lint_built

CAPABILITIES = (80, 90, 100)
RANKS = 4

#: Spills that are allowed where the products are plain multiply-adds: ptxas keeps one program more on a multiprocessor instead;
#: for words, of which a thread has several ranks' at once, with four programs on a multiprocessor. Where the last wave is shared, a
#: number or two that only this needs wait in local memory while the products run.
FEW = 12
PITCHES = ("stride_x", "stride_w", "ld", "set_elements", "room", "N", "K")

#: Sizes of a call (M, N, K on a rank): whole tiles; few rows; few rows that TMA cannot address; a width that is no vector; so
#: many bytes that gemm_rs sends its chunks in parts; tiles of 256 columns, in chunks that are whole; so many of those that the last
#: wave is worth sharing, and of those of 128 columns; few rows, in tiles of 64 columns and of 32, and the most that are fused, with
#: a K of which programs gather several blocks at once; more that are gathered so, by eight warps and by four, and the most of
#: those, in tiles of 64 columns and of 128, and fewer of them. The collectives take M×K elements, all_reduce also two tensors of so
#: many.
SHAPES = {
    "large": (1024, 512, 512),
    "small": (64, 512, 512),
    "pointer": (64, 512, 513),
    "ragged": (1024, 515, 512),
    "parts": (8192, 8192, 2048),
    "wide": (2048, 8192, 2048),
    "waves": (1024, 8704, 32768),
    "halves": (1024, 2560, 32768),
    "list": (1024, 512, 512),
    "narrow": (1024, 1, 1),
    "slim": (1024, 64, 64),
    "few": (16, 8192, 512),
    "fewer": (2, 4096, 512),
    "rows": (64, 8192, 512),
    "deep": (64, 8192, 28672),
    "gathered": (128, 14336, 4096),
    "slender": (128, 7168, 4096),
    "most": (256, 7168, 4096),
    "widest": (256, 14336, 4096),
    "between": (160, 14336, 4096),
    "narrower": (160, 7168, 4096),
    "below": (192, 14336, 4096),
}


PUTS = ("host", "auto", "device", "far")
COLLECTIVES = ("reduce", "broadcast", "reduce_scatter", "all_gather")


@dataclass(frozen=True)
class Case:
    """A call. ``kn``: the weight is stored as [K, N]. ``nodes``: on which the ranks are. ``bias``: of the products.

    ``puts``: who makes those between nodes, of `PUTS`: FLUXLIKE_PUTS, or "far" for "device" over a network.
    """

    op: str
    schedule: str
    shape: str = "large"
    dtype: torch.dtype = torch.bfloat16
    kn: bool = False
    nodes: int = 1
    bias: bool = False
    puts: str = "host"

    def __str__(self) -> str:
        dtype = "" if self.dtype == torch.bfloat16 else f"-{str(self.dtype).removeprefix('torch.')}"
        nodes = f"-{self.nodes}nodes-{self.puts}" if self.nodes > 1 else ""
        return f"{self.op}-{self.schedule}-{self.shape}{dtype}{'-kn' if self.kn else ''}{'-bias' if self.bias else ''}{nodes}"


@dataclass(frozen=True)
class Report:
    """What came of one launch of a case."""

    case: str
    kernel: str
    capability: int
    registers: int
    shared: int
    local: int
    findings: tuple[Finding, ...]


def between_nodes(op: str) -> list[Case]:
    """Calls that reach all that is launched for messages; of "auto" one with many rows, as the host puts those."""
    found = [Case(op, "decomposed", "parts" if puts == "auto" else "large", nodes=2, puts=puts) for puts in PUTS]
    return found if op == "gemm_rs" else [*found, Case(op, "decomposed", "small", nodes=4)]


def cases(capability: int) -> list[Case]:
    """Calls that reach every branch of the kernels that this compute capability can reach, each launch once."""
    found = []
    for algo in (*ALGORITHMS, "trees"):
        found += [Case("all_reduce", algo), Case("all_reduce", algo, dtype=torch.float32)]
        if capability == 90:
            found.append(Case("all_reduce", algo, "list"))
    for algo in collectives.ALGORITHMS:  # with those of all_reduce: every branch of their kernels
        found += [Case(op, algo) for op in (COLLECTIVES if capability == 90 else COLLECTIVES[:1])]
    found += [Case(op, "two_shot") for op in COLLECTIVES[:2]]
    found += [Case("sparse_all_reduce", way) for way in ("owned", "direct")]
    found += [Case("gemm_ar", "one_shot", "few"), Case("gemm_ar", "two_shot", "few"), Case("ag_gemm", "sequential/fused", "deep")]
    if capability >= 90:
        found.append(Case("ag_gemm", "sequential/fused", "widest"))
    if capability == 90:
        found.append(Case("ag_gemm", "sequential", "few"))
        found += [Case("gemm_ar", "one_shot", "fewer", torch.float16), Case("gemm_ar", "one_shot", "rows", bias=True)]
        found.append(Case("gemm_ar", "two_shot", "rows", bias=True))
        found.append(Case("gemm_rs", "sequential", "few", bias=True))
        found.append(Case("ag_gemm", "sequential", "rows", torch.float16, bias=True))
        found.append(Case("ag_gemm", "sequential/fused", "gathered", torch.float16, bias=True))
        found += [Case("ag_gemm", "sequential/fused", shape) for shape in ("slender", "most", "between", "narrower", "below")]
    if capability == 90:
        found += [Case("sparse_all_reduce", "owned", shape, torch.float32) for shape in ("large", "pointer", "narrow", "slim")]
    for op in ("gemm_rs", "ag_gemm"):
        for schedule in ("copy_engine", "in_kernel"):
            found.append(Case(op, schedule))
            if capability >= 90:
                found.append(Case(op, schedule, "pointer"))
        found.append(Case(op, "in_kernel", dtype=torch.float32))
        found.append(Case(op, "decomposed"))
        found += between_nodes(op)
        found += [Case(op, "stream_k"), Case(op, "stream_k", "small"), Case(op, "stream_k", dtype=torch.float32)]
        if capability == 90:
            found += [Case(op, "stream_k", "pointer"), Case(op, "stream_k", "ragged"), Case(op, "stream_k", kn=True, bias=True)]
        if capability == 90 and op == "gemm_rs":
            found += [Case(op, "copy_engine", "parts"), Case(op, "copy_engine", "wide"), Case(op, "decomposed", bias=True)]
            found += [Case(op, "copy_engine", "wide", bias=True), Case(op, "decomposed", bias=True, nodes=2)]
        if capability == 90:
            found += [Case(op, "in_kernel", "wide"), Case(op, "in_kernel", "wide", bias=True)]
            found += [Case(op, "copy_engine", "waves"), Case(op, "in_kernel", "waves", bias=True)]
            found += [Case(op, "copy_engine", "halves"), Case(op, "in_kernel", "halves", bias=True)]
        if capability == 90:
            found.append(Case(op, "copy_engine", "ragged"))
            found.append(Case(op, "copy_engine", kn=True, bias=True))
            found.append(Case(op, "in_kernel", "small", torch.float16))
    return found


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = env.get(name)
    env.put(name, value)
    try:
        yield
    finally:
        env.put(name, before)


@contextmanager
def _world(case: Case, capability: tuple[int, int]) -> Iterator[list[dry.Record]]:
    """For trees links are given: there may be no GPU that could be looked at."""
    with (
        _variable("FLUXLIKE_TOPOLOGY", f"nvswitch-{RANKS}"),
        _variable("FLUXLIKE_PUTS", "device" if case.puts == "far" else case.puts),
        dry.recording(capability, RANKS, nodes=case.nodes, library=stub.LIBRARY) as records,
    ):
        world.current().executor.one_host = case.puts != "far"
        yield records


def launches(case: Case, capability: int) -> list[Launch]:
    """What the call launches on a GPU of this compute capability, each different kernel once."""
    m, n, k = SHAPES[case.shape]

    def operand(*shape: int) -> torch.Tensor:
        return dry.tensor(shape, case.dtype)

    weight = operand(k, n).T if case.kn else operand(n, k)
    bias = operand(n) if case.bias else None
    with _world(case, (capability // 10, capability % 10)) as records:
        if case.op == "gemm_rs":
            with closing(gemm_rs_op.create_gemm_rs_context(m, n, k * RANKS, dtype=case.dtype, schedule=case.schedule)) as rs:
                gemm_rs_op.gemm_rs(operand(m, k), weight, rs, bias=bias)
        elif case.op == "all_reduce":
            all_reduce([operand(m, k)] * 2 if case.shape == "list" else operand(m, k), algo=case.schedule)
        elif case.op == "sparse_all_reduce":  # m entries of k elements; fp32 on the wire has no owners
            wire = case.dtype if case.schedule == "owned" else torch.float32
            with closing(create_sparse_all_reduce_context((m, k), m, case.dtype, wire_dtype=wire)) as sparse:
                sparse.run(sparse.pending_of(dry.tensor((m,), torch.int64), m, m), operand(m, k), m, "avg", sparse.owned, True)
        elif case.op == "gemm_ar":
            with closing(create_gemm_ar_context(m, n, case.dtype, algo=case.schedule, product="fused")) as ar:
                gemm_ar(operand(m, k), weight, ar, bias=bias)
        elif case.op in COLLECTIVES:
            root = {"root": 0} if case.op in ("reduce", "broadcast") else {}
            getattr(collectives, case.op)(operand(m, k), algo=case.schedule, **root)
        else:
            collect = case.shape == "large" and case.dtype == torch.bfloat16 and not case.kn
            with closing(ag_gemm_op.create_ag_gemm_context(m, n, k, dtype=case.dtype, schedule=case.schedule)) as ag:
                ag_gemm_op.ag_gemm(operand(m // RANKS, k), weight, ag, bias=bias, return_gathered=collect)
        return list({launch.key: launch for launch in (launch_of(*record) for record in records)}.values())


#: What waits for messages between nodes.
COME = ("messages_came_kernel", "messages_sum_kernel", "messages_gather_kernel")


def _counts(
    name: str, waits: int, releases: int, arrivals: int, peers: int, owned_words: int, pieces: int, last: bool, mates: bool
) -> dict[str, int]:
    """Operations in the source of a kernel, whatever it is compiled for.

    Of messages between nodes, ``last``: those that it waits for end a call; ``mates``: this rank's node has others.
    """
    # waits for words: for everything at once, by pieces of a tile, and for the results of each
    looks = {"all_reduce_one_shot_kernel": 1, "product_fused_kernel": pieces, "gather_fused_kernel": 1}.get(name, 0)
    looks += {"exchange_words_kernel": owned_words, "relay_words_kernel": peers + 1}.get(name, 0)
    # a wait looks at its signal twice in the source, first and in its loop; the loop looks at two words and then at a third
    counts = {"release": releases, "arrival": arrivals, "acquire": 2 * waits}
    counts["volatile load"] = 3 * waits + 5 * looks  # words are their own flag, so a look is a plain one that may not be left out
    counts["asm fence.acq_rel.sys"] = waits + looks  # a record of a failure is complete before the host is told of it
    # what a message says, what has failed and who gave up are looked at anew in each call; most of these kernels make such records
    came = name in COME
    ended = int(last or name == "messages_end_kernel")
    counts["volatile load"] += 5 * (name in ("messages_head_kernel", "messages_put_kernel")) + (5 + mates) * came + 6 * ended
    counts["volatile load"] += mates * (name == "messages_gather_kernel")
    counts["asm fence.acq_rel.sys"] += came + ended
    return counts


def spec_of(launch: Launch, capability: int) -> Spec:
    """What a launch of one of fluxlike's kernels must have. KeyError for other kernels."""
    given = launch.constants
    shared = int(given.get("SHARED", False))
    peers, copies = given.get("R", 1) - 1, given.get("COPY_ENGINE", False)
    scatter, gather, rooted = (int(given.get(name, False)) for name in ("SCATTER", "GATHER", "ROOTED"))
    owners = 1 if rooted else peers  # but this rank
    owned, last = int(given.get("OWNED", False)), int(given.get("LAST", False))
    readers = (owners if scatter else peers) * rooted
    waits, releases, arrivals, loops = {
        # credits and partials; the two publications, in the loop and behind it, and the credits, which are one release; where the
        # last wave is shared, partials once more and parts, and a part
        "gemm_rs_kernel": (2 * peers + (peers + 1) * shared, 3 + shared, 1, 2 + shared),
        # credits, parts, and partials with the own one; a part, a tile, and the credits
        "gemm_rs_stream_k_kernel": (2 * peers + 2, 3, 1, 1),
        # credits, shards (the first, and more) and parts of other shards' tiles, parts of own ones; flags, parts, and the credits
        "ag_gemm_stream_k_kernel": (peers + 4, peers + 4, 2, 2),
        # credits and shards, at the end all of them; the word for the side stream, or the peers' flags, and the credits; where the
        # last wave is shared, shards and parts once more, and a part
        "ag_gemm_kernel": (
            peers + (2 if copies else 1) + 2 * shared,
            (2 if copies else peers + 1) + shared,
            1 if copies else 2,
            2 + shared,
        ),
        "ag_collect_kernel": (1, 1, 1, 0),
        # credits
        "decomposed_credits_kernel": (peers, 0, 0, 0),
        # a shard
        "ag_gemm_decomposed_arrived_kernel": (1, 0, 0, 0),
        # all shards; the credits
        "ag_gemm_decomposed_end_kernel": (1, 1, 1, 0),
        # partials; the credits
        "gemm_rs_decomposed_sum_kernel": (peers, 1, 1, 0),
        # no signals but words, see below; if one rank owns all, credits
        "all_reduce_one_shot_kernel": (0, 0, 0, 0),
        "product_fused_kernel": (0, 0, 0, 1),
        # the gate
        "gather_fused_kernel": (1, 1, 0, 1),
        # a child's sum and the result; the sum to the parent, and the result to a child
        "all_reduce_trees_kernel": (2, 2, 0, 0),
        "exchange_words_kernel": (readers, rooted, rooted, 0),
        # such credits
        "relay_words_kernel": (peers, 1, 1, 0),
        # parts and results of each, and such credits; each block is released once for all
        "exchange_bulk_kernel": (
            peers * scatter + owners * gather + readers,
            scatter + gather + rooted,
            rooted,
            0,
        ),
        # parts, by reducers and drainers, and results of owners, of each the first and more; the two kinds of chunks
        "sparse_all_reduce_kernel": (6 if owned else 2, 1 + owned, 0, 0),
        # credits, and those that it may give; messages
        "messages_head_kernel": (1, int(given.get("GIVES", 0) > 0), 0, 0),
        "messages_came_kernel": (1, 0, 0, 0),
        # messages, by the first program and the others; the end of the call
        "messages_sum_kernel": (2, 0, last, 0),
        "messages_gather_kernel": (2, 0, last, 0),
        "messages_end_kernel": (0, 0, 0, 0),
        # credits; those that it gives, and the puts
        "messages_put_kernel": (1, 2, 0, 0),
        # what the stream orders needs no signals
        "sparse_sums_kernel": (0, 0, 0, 0),
        "sparse_index_count_kernel": (0, 0, 0, 0),
        "sparse_index_slots_kernel": (0, 0, 0, 0),
        "sparse_index_rows_kernel": (0, 0, 0, 0),
        "sparse_index_owners_kernel": (0, 0, 0, 0),
    }[launch.name]
    pieces = 0  # of a tile, whose words are waited for, and those of the sums
    if launch.name == "product_fused_kernel":
        pieces = given["BM"] * given["BN"] // 2 // given["B"] * (1 + scatter * gather)
    words, mates = scatter + owners * gather, given.get("L", 1) > 1
    counts = _counts(launch.name, waits, releases, arrivals, peers, words, pieces, bool(last), mates)
    payload = launch.payload
    if launch.name == "gather_fused_kernel":  # not on the heap, but others have stored it in front of a signal
        payload += ("read",)
    spec = Spec(payload, launch.signals, launch.bases, counters=("epochs", "arrived"), pitches=PITCHES, counts=counts)
    if not loops:
        of_blocks = {
            "exchange_words_kernel": replace(spec, local=FEW),
            "relay_words_kernel": replace(spec, local=FEW),
            "exchange_bulk_kernel": replace(spec, vectors=True),
            "all_reduce_trees_kernel": replace(spec, vectors=True),
            "sparse_all_reduce_kernel": replace(spec, vectors=given.get("D", 0) > NARROW),
        }
        return of_blocks.get(launch.name, spec)
    rows, columns, depth = given["BM"], given["BN"], given["BK"]
    tma, vec = given.get("TMA", False), given.get("VEC", True)
    fp32 = any("fp32" in launch.signature[name] for name in launch.payload)
    mma = "fma" if fp32 else {8: "mma.sync", 9: "wgmma", 10: "tcgen05"}.get(capability // 10, "mma.sync")
    if "fused" in launch.name and columns < 64:  # of which the products of whole warpgroups take 64
        mma = "mma.sync"
    ahead = launch.stages if mma in ("wgmma", "tcgen05") else launch.stages - 1  # one is being multiplied
    return replace(
        spec,
        # gemm_rs: slots have a pitch of their own, which is always a multiple of 16
        vectors=not copies and (vec or launch.name.startswith("gemm_rs")),
        loops=loops,
        mma=mma,
        buffers=ahead if tma or vec else 1,
        local=FEW if fp32 or shared else 0,
        operands=((rows, depth), (columns, depth) if tma and not given.get("W_IS_KN", False) else (depth, columns)),
    )


def check(case: Case, capability: int, modules: tuple[ModuleType, ...] = ()) -> list[Report]:
    """Compile what a case launches and lint it.

    ``modules``: where a kernel is taken from if one of them has it by its name, in place of the shipped one; so a copy of
    `kernels.gemm_rs` with something taken away can be judged.
    """
    return [report for _, report in checked(case, capability, modules)]


def checked(case: Case, capability: int, modules: tuple[ModuleType, ...] = ()) -> Iterator[tuple[Built, Report]]:
    """`check`, with what was compiled."""
    for launch in launches(case, capability):
        kernel: Any = next((vars(module)[launch.name] for module in modules if launch.name in vars(module)), launch.kernel)
        built = build(replace(launch, kernel=kernel), capability)
        findings = lint_built(built, spec_of(launch, capability))
        yield built, Report(str(case), launch.name, capability, built.registers, built.shared, built.local, tuple(findings))

"""What a mutant of the synchronisation is put through, on three ranks of the CPU heap under the race checker.

A fault of order may be survived by luck, so there is a scene in which it cannot:

close  calls back to back, of changing shapes; ag_gemm with so many columns in one that each piece of a shard has some; the last
       ones share their last wave of tiles
empty  a rank without rows, for which nobody waits and which only the credits hold back, is two calls ahead, or far behind
late   another rank is late in each call; in ag_gemm one without columns of the weight waits only to end the call
slow   another rank takes its time in each call, so that its peers are in the next one before it has ended this one; in ag_gemm one
       without columns is about to end it before the copies of the slow one are there

For all_reduce, which has no engine, no columns and no context to be made, the same: calls of changing sizes and data, ranks that
are late or slow. For gemm_ar in one kernel, and for reduce and broadcast, too; of those, in "empty" and "late" data goes one way
only. And for one_shot and gemm_ar:

overtaken  a rank reads what it was sent in a call only when its peers have sent what belongs to the next one

The kernels of messages between nodes, which only GPUs launch, do on rank 0 what tests/test_messages.py asks of them.

In all of them the copy engine resets a word only once it is set, if it ever is: a reset in front of the wait clears what was meant
for the wait.

A wrong number raises `Wrong`; the race checker and a wait that runs out raise for themselves.
"""

import collections
import contextlib
import importlib
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import triton
import triton.language as tl
import triton.runtime.interpreter as stock
from cases import IN_FP32
from mutant_process import CALLS as COLLECTIVES
from ranks import rows_slice

import fluxlike.kernels.ag_gemm
import fluxlike.kernels.all_reduce
import fluxlike.kernels.exchange
import fluxlike.kernels.fused
import fluxlike.kernels.gemm_rs
import fluxlike.kernels.trees
from fluxlike.kernels import lang, sync, words
from fluxlike.ops import fused, gemm_ar, sparse_all_reduce
from fluxlike.runtime import env, interpreter, programs, shm, world

RANKS = 3
M, N, K = 40, 160, 32
CUT_K = 192  # three steps of k a tile, so that tiles are cut: those of stream_k, and elsewhere those of the last wave
WIDE_K = 800  # in ag_gemm four pieces of a shard, of 256 columns at most
EMPTY_M = 2  # of three ranks the last has no rows
HEAP_BYTES = 4 << 20
CALLS = {"close": 4, "empty": 5, "overtaken": 4, "late": 6, "slow": 6}
#: Calls of ag_gemm in which rank 0 has no columns of the weight.
COLUMNLESS = {"late": (0, 1, 4, 5), "slow": (2, 4)}
#: A rank that is slow sleeps before some of its memory operations, and in those calls before each copy.
SLOW, SLOW_COPY = programs.Schedule(jitter=0.2, delay=0.02), 0.3
#: Seconds until a reset of a word that nobody sets.
RESET = 5.0


class Wrong(AssertionError):
    """A result that is not what it should be."""

    fluxlike_passthrough = True  # out of a kernel as it is


def _gemm_rs(ctx: Any, kind: str, call: int) -> bool:
    (m, n), k = _shape(kind, call), _depth(ctx, kind, call)
    generator = torch.Generator().manual_seed(call)
    xs = torch.randint(-2, 3, (ctx.size, m, k), generator=generator).float()
    ws = torch.randint(-2, 3, (ctx.size, n, k), generator=generator).float()
    y = fluxlike.gemm_rs(xs[ctx.rank].to(ctx.dtype), ws[ctx.rank].to(ctx.dtype), ctx)
    return torch.equal(y.float(), _exact(torch.einsum("rmk,rnk->mn", xs, ws))[rows_slice(m, ctx.size, ctx.rank)])


def _ag_gemm(ctx: Any, kind: str, call: int) -> bool:
    """Every other call with the gathered input, so that another kernel ends it; every third with two weights."""
    (m, n), k = _shape(kind, call), _depth(ctx, kind, call)
    if (kind, call) == ("close", 1):
        k = WIDE_K
    if ctx.rank == 0 and call in COLUMNLESS.get(kind, ()):
        n = 0
    generator = torch.Generator().manual_seed(call)
    x = torch.randint(-2, 3, (m, k), generator=generator).float()
    w = torch.randint(-2, 3, (n, k), generator=generator).float()
    shard = x[rows_slice(m, ctx.size, ctx.rank)].to(ctx.dtype)
    weights = [part.to(ctx.dtype) for part in ([w, w[: n // 2]] if call % 3 == 2 else [w])]
    if call % 2:
        z, gathered = fluxlike.ag_gemm(shard, weights, ctx, m=m, return_gathered=True)
    else:
        z, gathered = fluxlike.ag_gemm(shard, weights, ctx, m=m), x
    return torch.equal(z[0].float(), _exact(x @ w.T)) and torch.equal(gathered.float(), x)


def _exact(right: torch.Tensor) -> torch.Tensor:
    """What is right, which float16 must hold, too."""
    assert right.numel() == 0 or right.abs().max() <= 2048, f"the scene is wrong: {right.abs().max():g} is not exact in float16"
    return right


def _shape(kind: str, call: int) -> tuple[int, int]:
    """Rows and columns of a call."""
    if kind == "empty":
        return EMPTY_M, N
    return M - 7 * (call % 2), N - 40 * (call % 2) if kind == "close" else N


def _depth(ctx: Any, kind: str, call: int) -> int:
    """K of a call: with one step there is nothing to share."""
    return CUT_K if ctx.schedule == "stream_k" or (kind == "close" and call >= 2) else K


def _context(op: str, transport: str) -> Any:
    dtype = torch.float32 if transport in IN_FP32 else torch.float16
    if op == "gemm_rs":
        return fluxlike.create_gemm_rs_context(M, N, dtype=dtype, schedule=transport)
    return fluxlike.create_ag_gemm_context(M, N, WIDE_K, dtype=dtype, schedule=transport)


def _hold(op: str, kind: str, call: int, rank: int, name: str) -> None:
    """Before a call: the delay that the scene wants of this rank."""
    if kind == "late" and call % RANKS == rank:
        time.sleep(0.3)
    if op == "ag_gemm" and kind == "slow" and rank == 0 and call in COLUMNLESS[kind]:
        time.sleep(SLOW_COPY / 2)  # its credits are taken by then; the copies of the slow rank are not here yet
    if kind != "empty":
        return
    store = dist.distributed_c10d._get_default_store()
    if op == "gemm_rs":
        # The rank without rows waits for nobody: as there are two slot sets it has made two calls, and is in the one that must wait
        # for credits, when the others begin. Had they begun before, it could have learnt on the way what they have read.
        if rank == 2 and call == 2:
            store.set(f"{name} ahead", "")
        if rank < 2 and call == 0:
            store.wait([f"{name} ahead"])
            time.sleep(0.3)
    if op == "ag_gemm":
        # Nobody waits for it, so it is behind: it begins when the others are in call 3. Had it finished a call earlier, they
        # could have learnt of that in their call 2, and all would be ordered.
        if rank == 2 and call == 0:
            store.wait([f"{name} of 0", f"{name} of 1"])
        if rank < 2 and call == 2:
            store.set(f"{name} of {rank}", "")


_overtakings = itertools.count()


@contextlib.contextmanager
def _overtaken(group: Any) -> Iterator[None]:
    """Rank 0 begins to read in call 1 only when the others have sent all of call 2."""
    store, scene = dist.distributed_c10d._get_default_store(), next(_overtakings)

    def held(read: Any, at: int) -> Any:
        """``at``: which argument says what is read. Each is read once a call; of a product partial sums, of a gather results."""
        calls: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)

        def late(*args: Any) -> Any:
            what = str(args[at])
            call, sent = next(calls[what]), f"scene {scene}, {read.__name__} {what}, sent by"
            if group.rank() == 0 and call == 1:
                store.wait([f"{sent} {peer}" for peer in range(1, RANKS)])
            if group.rank() > 0 and call == 2:
                store.set(f"{sent} {group.rank()}", "")
            return read(*args)

        return late

    def put(receive: Any, take_words: Any) -> None:
        fluxlike.kernels.all_reduce.receive = fluxlike.kernels.exchange.receive = receive
        fluxlike.kernels.fused.take_words = take_words

    put(held(words.receive, 5), held(words.take_words, 6))
    try:
        yield
    finally:
        put(words.receive, words.take_words)


def _collective(group: Any, transport: str, kind: str, call: int) -> None:
    """One call; of several blocks, or of one word."""
    n, rank = 3000 if call % 3 and kind != "overtaken" else 1, group.rank()
    algo = COLLECTIVES[transport][1]
    parts = torch.randint(-9, 10, (group.size(), n), generator=torch.Generator().manual_seed(call)).float()
    if transport == "fused":
        right = _fused(group.size(), rank, call, n > 1, kind)
    elif transport == "sparse":
        right = _sparse(group.size(), rank, kind, call)
    elif transport.startswith("rooted"):
        right = _rooted(parts, rank, kind, call, algo)
    elif (transport, kind) == ("words", "overtaken"):  # half of it, as in two trips nobody is overtaken
        part = parts.repeat(1, RANKS)
        right = torch.equal(fluxlike.reduce_scatter(part[rank], algo="words"), parts.sum(0))
    else:
        right = torch.equal(fluxlike.all_reduce(parts[rank], algo=algo), parts.sum(0))
    if not right:
        raise Wrong(f"{transport}, scene {kind}: call {call + 1} gave wrong numbers")


def _fused(ranks: int, rank: int, call: int, several: bool, kind: str) -> bool:
    """gemm_ar in one kernel: three programs with several pieces each, or one with one. Then in two trips, and ag_gemm, of
    several blocks or one, whose words are not lost; the first of them read as descriptors."""
    fused.is_usual = lambda ctx: True
    generator = torch.Generator().manual_seed(call)

    def one(algo: str, m: int, n: int) -> bool:
        known = (ctx for ctx in world.current().contexts if isinstance(ctx, gemm_ar.GemmARContext) and ctx.algo == algo)
        ctx = next(known, None) or fluxlike.create_gemm_ar_context(64, 192, torch.float16, algo=algo, product="fused")
        x = torch.randint(-2, 3, (ranks, m, 32), generator=generator).half()
        w = torch.randint(-2, 3, (ranks, n, 32), generator=generator).half()
        y = fluxlike.gemm_ar(x[rank], w[rank], ctx)
        return torch.equal(y.float(), _exact(torch.einsum("rmk,rnk->mn", x.float(), w.float())))

    n = 192 if several else 32
    right = one("one_shot", 64 if several else 32, n)
    if kind not in ("lost", "overtaken"):
        right &= one("two_shot", *((48, 192) if several else (24, 128)))
    if kind == "lost" or (kind == "overtaken" and call < CALLS[kind] - 1):  # the gathers follow one another, and wait for all
        return right
    made = (ctx for ctx in world.current().contexts if ctx.op == "ag_gemm" and hasattr(ctx, "schedule"))
    ag = next(made, None) or fluxlike.create_ag_gemm_context(72, 192, 192, torch.float16, schedule="sequential")
    for _ in range(CALLS[kind] if kind == "overtaken" else 2):
        rows = torch.randint(-2, 3, (ranks, 24 if several else 1, 192), generator=generator).half()
        w = torch.randint(-2, 3, (n, 192), generator=generator).half()
        z = fluxlike.ag_gemm(rows[rank], w, ag)
        assert ag.last_path == "sequential/fused"
        right &= torch.equal(z.float(), _exact(rows.reshape(-1, 192).float() @ w.float().T))
    return right


def _sparse(ranks: int, rank: int, kind: str, call: int) -> bool:
    """Ids of one, two and all ranks, in several chunks; in some calls a rank has none, and may run ahead of the others."""
    sparse_all_reduce.TILE, sparse_all_reduce.COLUMNS, sparse_all_reduce.CHUNK, sparse_all_reduce.UNIT = 8, 2, 4, 8
    generator = torch.Generator().manual_seed(call)
    whole = torch.zeros(16, 2)
    for source in range(ranks):
        entries = 0 if kind == "empty" and call % ranks == source else 9
        ids = torch.randint(0, 16, (entries,), generator=generator)
        values = torch.randint(-9, 10, (entries, 2), generator=generator).float()
        whole.index_add_(0, ids, values)
        if source == rank:
            x = torch.sparse_coo_tensor(ids[None], values, whole.shape, check_invariants=True)
    return torch.equal(fluxlike.sparse_all_reduce(x).to_dense(), whole)


def _rooted(parts: torch.Tensor, rank: int, kind: str, call: int, algo: str) -> bool:
    """What one rank owns: to it and back; or one way only, so that some can be ahead of those to whom they send."""
    root, right = 0 if kind in ("late", "empty") else call % len(parts), True
    if kind in ("close", "empty"):
        y = fluxlike.reduce(parts[rank], root, algo=algo)
        right = torch.equal(y, parts.sum(0)) if rank == root else y is None
    if kind != "empty":
        right &= torch.equal(fluxlike.broadcast(parts[rank], root, algo=algo), parts[root])
    return right


def _nap(_semantic: Any = None) -> None:
    """Until the root begins the call that writes where this one reads, and it has had time to."""
    dist.distributed_c10d._get_default_store().wait(["root in call 5"])
    time.sleep(1.0)


_nap.__triton_builtin__ = True  # type: ignore[attr-defined]


@triton.jit
def _receive_late(row, source, ctl, rank, what: tl.constexpr, R: tl.constexpr, B: tl.constexpr):
    _nap()
    return words.receive_from(row, source, ctl, rank, what, R, B)


def collectives(group: Any, transport: str, kind: str) -> None:
    """The calls of one scene. In one of a root that is ahead, rank 1 reads so late that only the credit keeps what it reads."""
    late = kind == "late" or (transport.startswith("rooted") and kind == "empty")
    store = dist.distributed_c10d._get_default_store()
    with _overtaken(group) if kind == "overtaken" else contextlib.nullcontext():
        for call in range(CALLS[kind]):
            if (transport, kind, call) == ("rooted_bulk", "empty", 1):  # the root reads before rank 1 sends, on a busy machine, too
                if group.rank() == 0:
                    store.set("root in call 1", "")
                if group.rank() == 1:
                    store.wait(["root in call 1"])
                    time.sleep(0.7)
            _hold("all_reduce", "late" if late else "", call, group.rank(), "")
            programs.configure(SLOW if kind == "slow" and call % RANKS == group.rank() else None)
            in_words = transport in ("rooted_words", "rooted_relay")
            if in_words and (kind, call, group.rank()) == ("late", 5, 0):
                store.set("root in call 5", "")
            reads_late = in_words and (kind, call, group.rank()) == ("late", 3, 1)
            for kernels in (fluxlike.kernels.exchange, fluxlike.kernels.relay):
                kernels.receive_from = _receive_late if reads_late else words.receive_from
            _collective(group, transport, kind, call)
        programs.configure(None)


def scene(op: str, transport: str, kind: str) -> None:
    """The calls of one scene, in a context of its own; after a failure it stays open, since closing waits for the others."""
    ctx = _context(op, transport)
    copy, write, pause = ctx.engine._copy, ctx.engine._write, 0.0

    def paused(*job: int) -> None:
        time.sleep(pause)
        copy(*job)

    def late(address: int, value: int) -> None:
        until = time.monotonic() + RESET
        while value == 0 and not shm.word(address)[0] and time.monotonic() < until:
            time.sleep(1e-3)
        write(address, value)

    ctx.engine._copy, ctx.engine._write = paused, late
    for call in range(CALLS[kind]):
        _hold(op, kind, call, ctx.rank, f"{op} {transport}")
        slow = kind == "slow" and call % RANKS == ctx.rank
        pause = SLOW_COPY if slow and call in COLUMNLESS[kind] else 0.0
        programs.configure(SLOW if slow else None)
        if not (_gemm_rs if op == "gemm_rs" else _ag_gemm)(ctx, kind, call):
            raise Wrong(f"{op}, {transport}, scene {kind}: call {call + 1} gave wrong numbers")
        ctx.check()
    ctx.close()


def messages(group: Any, reached: Sequence[str]) -> None:
    """Each of their kernels of those that are ``reached``; an error of any kind is a finding, as an edit has no other cause."""
    kernels = importlib.import_module("test_messages")
    kernels.HALF = True
    for body, names in kernels.BODIES.items() if group.rank() == 0 else ():
        if not any(f"messages_{name}_kernel" in reached for name in names):
            continue
        try:
            body(group)
        except Exception as error:
            raise Wrong(f"messages, {body.__name__}: {type(error).__name__}: {error}") from error


# the code that only a compiler sees, interpreted


class _Result:
    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def get_result(self, _: int) -> Any:
        return self.handle


_ends = math.inf  # when all waits must be over


def _assembly(text: str, _: str, values: list[Any], *__: Any) -> _Result:
    """The clock, which a waiting program looks at: the place to let others run. Fences and barriers do nothing here.

    A program is one thread, so that what any of its threads says is what it says itself.
    """
    if "globaltimer" in text:
        if time.monotonic() > _ends:
            raise Wrong("a wait goes on after it has run out")
        if not programs.yield_program():
            time.sleep(1e-3)
        return _Result(stock.TensorHandle(np.array([time.monotonic_ns()]), tl.int64))
    said = values[0].data if "bar.red" in text else np.array([0], np.int32)
    return _Result(stock.TensorHandle(said, tl.int32))


def _no(_semantic: Any = None) -> tl.constexpr:
    return tl.constexpr(False)


_no.__triton_builtin__ = True  # type: ignore[attr-defined]


def as_compiled() -> None:
    """From now on the kernels take the branch of the GPU in every wait and barrier."""
    sync.is_interp, lang.is_interp = _no, _no
    interpreter.builder.create_inline_asm = _assembly


@triton.jit
def _publish_nothing(signal, value, TMA: tl.constexpr):
    pass


@triton.jit
def _put_nothing(start, words, B: tl.constexpr):
    pass


@triton.jit
def _put_nothing_at(pointers, mask, words):
    """For `words.put_at`."""


@triton.jit
def _publish_nothing_to_all(signal, value, ctl, rank, R: tl.constexpr, S: tl.constexpr):
    pass


@triton.jit
def _push_nothing(slot, block, flag, number, ctl, rank, peer, B: tl.constexpr):
    pass


def lost_words(group: Any, algo: str) -> None:
    """Rank 1 sends nothing. Rank 0 soon gives up and says why; rank 2, which would wait for long, follows it at once.

    Without the checker, which takes what the GPU does with words for races.
    """
    global _ends
    exchange = fluxlike.kernels.exchange
    kernels, sends, nothing = {
        "one_shot": (fluxlike.kernels.all_reduce, "put", _put_nothing),
        "fused": (fluxlike.kernels.fused, "put_at", _put_nothing_at),
        "words": (exchange, "put", _put_nothing),
        "bulk": (exchange, "publish_set_to_all", _publish_nothing_to_all),
        "trees": (fluxlike.kernels.trees, "push", _push_nothing),
    }[algo]
    rank, sent, interpreted = group.rank(), getattr(kernels, sends), words.is_interp
    env.put("FLUXLIKE_RACECHECK", "0")
    words.is_interp = _no
    fluxlike.init(heap="shm", heap_bytes=HEAP_BYTES)
    limit = env.get("FLUXLIKE_TIMEOUT_S")
    env.put("FLUXLIKE_TIMEOUT_S", "3" if rank == 0 else "1000")
    if rank == 1:
        setattr(kernels, sends, nothing)
    _ends = time.monotonic() + 20
    said = ""
    try:
        for call in (1, 2):  # of one size, as making a larger context is a meeting
            _collective(group, algo, "lost", call)
    except (fluxlike.PeerTimeout, Wrong) as error:
        said = str(error)
    try:
        world.current().contexts[-1].check()
    except fluxlike.PeerTimeout as error:
        said = str(error)
    op = "gemm_ar" if algo == "fused" else "all_reduce"
    first = f"{op}: rank {rank} " + ("waited 3 s for rank 1" if rank == 0 else "stopped waiting for rank")
    if rank != 1 and not said.startswith(first):
        raise Wrong(f"a wait ran out, and rank {rank} said {said!r}")
    if rank == 0 and "its partial sums of call 1 (expected 1, saw 0)" not in said:
        raise Wrong(f"rank 0 said {said!r}")
    _ends = math.inf
    setattr(kernels, sends, sent)
    words.is_interp = interpreted
    fluxlike.finalize()
    env.put("FLUXLIKE_TIMEOUT_S", limit)
    env.put("FLUXLIKE_RACECHECK", "1")


def lost(group: Any) -> None:
    """Rank 1 gives no signals. Rank 0 soon gives up and says why; the others, who would wait for long, follow it at once.

    Without the checker, since who has given up goes on with what is there.
    """
    global _ends
    rank, publish_set, said = group.rank(), fluxlike.kernels.gemm_rs.publish_set, ""
    env.put("FLUXLIKE_RACECHECK", "0")
    fluxlike.init(heap="shm", heap_bytes=HEAP_BYTES)
    limit = env.get("FLUXLIKE_TIMEOUT_S")
    env.put("FLUXLIKE_TIMEOUT_S", "3" if rank == 0 else "1000")
    if rank == 1:
        fluxlike.kernels.gemm_rs.publish_set = _publish_nothing
    with _context("gemm_rs", "in_kernel") as ctx:
        _ends = time.monotonic() + 20
        try:
            for call in range(1 if rank == 0 else 2):  # in its second call rank 1 has nothing to wait for but the others
                _gemm_rs(ctx, "late", call)
                ctx.check()
        except fluxlike.PeerTimeout as error:
            said = str(error)
        waited = "gemm_rs: rank 0 waited 3 s for rank 1: its partial sums of call 1 (expected 1, saw 0)."
        of = {1: "rank 2 (its partial sums, call 2)", 2: "rank 1 (its partial sums, call 1)"}
        if rank:
            waited = f"gemm_rs: rank {rank} stopped waiting for {of[rank]} because rank 0 gave up first"
        if not said.startswith(waited):
            raise Wrong(f"a wait ran out, and rank {rank} said {said!r}")
        _ends = math.inf
    fluxlike.finalize()
    fluxlike.kernels.gemm_rs.publish_set = publish_set
    env.put("FLUXLIKE_TIMEOUT_S", limit)
    env.put("FLUXLIKE_RACECHECK", "1")


def run(group: Any, plan: list[tuple[str, str]], compiled: bool, limit: str, reached: Sequence[str]) -> None:
    """The scenes of the (operation, transport) in ``plan``; ``compiled``: with the branches of the GPU, which are the waits' only.

    ``limit``: seconds of a wait in a kernel; the ranks may take longer to start. ``reached``: the kernels that an edit is in.
    """
    env.put("FLUXLIKE_TOPOLOGY", "ring-3")
    programs.longest_nap = 20e-3  # most ranks wait most of the time, and several mutants share the cores
    if compiled:
        as_compiled()
        if any(op in ("gemm_rs", "ag_gemm") for op, _ in plan):
            lost(group)
        for op, algo in plan:
            if op == "all_reduce" and not algo.startswith(("rooted", "sparse")):
                lost_words(group, algo)
    fluxlike.init(heap="shm", heap_bytes=HEAP_BYTES)
    env.put("FLUXLIKE_TIMEOUT_S", limit)
    env.put("FLUXLIKE_TREE_ARRAY_BOUND", "1000")
    # Neither all scenes of the first pair first, nor all pairs in the first scene: what will be caught is so before long.
    kinds = ["close"] if compiled else list(CALLS)
    order = sorted(itertools.product(range(len(plan)), range(len(kinds))), key=sum)
    for kind, (op, transport) in ((kinds[k], plan[p]) for p, k in order):
        if kind == "overtaken" and transport not in ("one_shot", "words", "fused"):
            continue
        if op == "messages":
            if kind == "close" and not compiled:  # the waits' code for GPUs is judged with the others
                messages(group, reached)
        elif op == "all_reduce":
            collectives(group, transport, kind)
        else:
            scene(op, transport, kind)

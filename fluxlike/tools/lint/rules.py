"""What is wrong with a compiled kernel: memory order, dropped operations, lost pipelines, spilled registers. See docs/lint.md.

Results of a kernel cannot show these faults: a signal that overtakes its data loses a race once in a million, and a loop without
its pipeline is only slow. All of them are visible in what the compiler made, on a machine without a GPU.
"""

import functools
import inspect
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from ...kernels import sync, trace
from . import ttir, turns
from .compiling import Built
from .operations import (
    adds_nothing,
    chooses,
    global_side,
    is_acquire,
    is_barrier,
    is_global_store,
    is_plain_load,
    is_release,
    is_tma_load,
    is_tma_store,
    mma_of,
    touches,
)
from .parting import overtaken, partings
from .paths import NOTHING, Facts, Paths
from .ptx import Op, Ptx

_UNDRAINED, _UNORDERED = 2, 1  # a store before a release: still on its way, or complete for its own thread only
_UNSEEN, _SEEN, _SHARED, _FENCED = range(4)  # a signal before a load: by nobody, by one thread, by all, and by TMA as well


@dataclass(frozen=True)
class Finding:
    """``rule``: its name in docs/lint.md. ``line``: of the PTX, 0 for all of it. ``where``: file:line of the source."""

    rule: str
    line: int
    where: str
    message: str

    def __str__(self) -> str:
        place = " ".join(part for part in (self.where, f"(PTX line {self.line})" if self.line else "") if part)
        return f"[{self.rule}] {place + ': ' if place else ''}{self.message}"


@dataclass(frozen=True)
class Spec:
    """What is expected of a kernel; what is not said is not checked.

    Attributes:
        payload: arguments that hold data which peers write or which goes to peers (pointers and descriptors).
        signals: arguments that hold the words on which ranks wait.
        bases: arguments through which the addresses of peers are loaded.
        vectors: blocks are stored to payload in at least 16 bytes a thread.
        loops: loops of matrix products. mma: what they use, "wgmma", "tcgen05", "mma.sync" or "fma".
        buffers: shared memory buffers of each operand in such a loop; 1 where loads cannot be asynchronous.
        operands: shapes of the blocks of such a loop's operands in shared memory.
        counters: arguments that hold numbers of calls, which all threads of a program read and the program advances.
        pitches: arguments that are distances in elements, between rows or parts of memory.
        counts: operations in the source, as {"release": 5, "arrival": 1, "acquire": 12}; an arrival is acquire and release.
        local: instructions that move registers to and from local memory (spills) which are allowed.
    """

    payload: tuple[str, ...] = ()
    signals: tuple[str, ...] = ()
    bases: tuple[str, ...] = ()
    vectors: bool = False
    loops: int | None = None
    mma: str | None = None
    buffers: int | None = None
    operands: tuple[tuple[int, int], ...] = ()
    counters: tuple[str, ...] = ()
    pitches: tuple[str, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)
    local: int = 0


def lint(ptx: Ptx, spec: Spec) -> list[Finding]:
    """All that can be said from the PTX alone; `lint_built` knows more."""
    in_order = [*releases(ptx, spec), *acquires(ptx, spec), *signals(ptx, spec)]
    return [*in_order, *bounded(ptx), *parted(ptx, spec), *main_loops(ptx, spec)]


def releases(ptx: Ptx, spec: Spec) -> list[Finding]:
    """Rule "release": what was stored (or read from a slot) before a release is complete, and all threads know it."""
    State = dict[Op, int]  # stores and loads before, and how far they are
    pending = {op: _UNDRAINED for op in ptx.ops if is_tma_store(op)}
    pending |= {op: _UNORDERED for op in ptx.ops if is_global_store(op) and not is_release(op)}
    pending |= {op: _UNORDERED for op in ptx.ops if is_plain_load(op) and touches(ptx, op, spec.payload)}

    def step(op: Op, state: State) -> State:
        if op in pending:
            return state | {op: pending[op]}
        if op.name == "cp.async.bulk.wait_group" and op.operands == "0":
            return dict.fromkeys(state, _UNORDERED)
        if is_barrier(op, ptx.threads):
            return {one: stage for one, stage in state.items() if stage > _UNORDERED}
        return state

    def join(a: State, b: State) -> State:
        return {op: max(a.get(op, 0), b.get(op, 0)) for op in a | b}

    events = {op.line for op in ptx.ops if op in pending or is_release(op) or re.match(r"bar|cp\.async\.bulk\.wait", op.name)}
    found = []
    nothing: State = {}
    for op, state in ptx.flow(nothing, events, step, join):
        if not is_release(op):
            continue
        for stage, said in ((_UNDRAINED, _NOT_DRAINED), (_UNORDERED, _NO_BARRIER)):
            guilty = [one for one, at in state.items() if at == stage]
            if guilty:
                first = min(guilty, key=lambda one: one.line)
                found.append(_finding("release", op, said.format(first=_at(first), name=first.name)))
    return found


_NOT_DRAINED = (
    "the TMA store at {first} may still be on its way when this signal is sent: `.read` waits speak of its source only; call "
    "drain_stores(True), or publish_…(…, TMA=True), before the signal"
)
_NO_BARRIER = (
    "{name} at {first} by other threads of the program is not ordered before this signal, which one thread sends: call "
    "cta_barrier() or drain_stores(…) between them"
)


def acquires(ptx: Ptx, spec: Spec) -> list[Finding]:
    """Rule "acquire": payload is loaded behind a wait for a signal, by TMA behind a proxy fence as well."""
    waits = {op for op in ptx.ops if is_acquire(op) and touches(ptx, op, spec.signals)}
    loads = {op for op in ptx.ops if (is_plain_load(op) or is_tma_load(op)) and touches(ptx, op, spec.payload)}
    if not waits:
        return []  # a kernel that never waits is ordered by its launch, or by nothing: the race checker knows
    paths = Paths(ptx, loads, waits)
    State = frozenset[tuple[int, Facts]]  # for each way here: how much of the signal is known, and what its branches said

    def step(op: Op, state: State) -> State:
        return frozenset((_known(op, known, waits, ptx.threads), paths.after(op, facts)) for known, facts in state)

    def join(a: State, b: State) -> State:
        # a way with more facts than another goes nowhere where that one does not; without this they double with each condition
        found: list[tuple[int, Facts]] = []
        for known, facts in sorted(a | b, key=lambda way: len(way[1])):
            if not any(one == known and fewer <= facts for one, fewer in found):
                found.append((known, facts))
        return frozenset(found)

    def branch(op: Op, taken: bool, state: State) -> State:
        condition = paths.of(op) if op.name.startswith("bra") else None
        ways = ((known, paths.learn(condition, taken, facts)) for known, facts in state)
        return frozenset((known, facts) for known, facts in ways if facts is not None)

    events = {op.line for op in ptx.ops if op in waits or op in loads or re.match(r"bar|fence", op.name)}
    events |= {op.line for register in paths.registers for op in ptx.definitions.get(register, [])}
    found = []
    for op, state in ptx.flow(frozenset({(_UNSEEN, NOTHING)}), events, step, join, branch):
        if op not in loads:
            continue
        ways = {known for known, facts in state if paths.value(paths.of(op), facts) is not False}
        if max(ways, default=_UNSEEN) > _SEEN and chooses(ptx, op, spec.payload):
            ways -= {_UNSEEN}  # the address may be another argument's, on the ways that do not wait
        worst = min(ways, default=_FENCED)
        if worst < (_FENCED if is_tma_load(op) else _SHARED):
            found.append(_finding("acquire", op, _WAITS[worst]))
    return found


def _known(op: Op, known: int, waits: set[Op], threads: int) -> int:
    """How much is known of a signal behind ``op``."""
    if op in waits:
        return _SEEN
    if known == _SEEN and is_barrier(op, threads):
        return _SHARED
    if known == _SHARED and op.name in ("fence.proxy.async", "fence.proxy.async.global"):
        return _FENCED
    return known


_WAITS = {
    _UNSEEN: "data of a peer is loaded on a way through the kernel that has not waited for its signal: wait(…) before the load",
    _SEEN: "data of a peer is loaded without a barrier after the wait, so only the waiting thread knows that it is there: "
    "use wait(…), which tells all threads",
    _SHARED: "data of a peer is loaded by TMA without a proxy fence after the wait: call tma_acquire(True) between them",
}


def signals(ptx: Ptx, spec: Spec) -> list[Finding]:
    """Rule "signal": atomics on the words between ranks order something, for every rank; no volatile load stands for a wait.

    No atomic on any word is at cta scope, since what one program has for itself needs none; on a peer's it is at system scope.
    """
    found = []
    for op in ptx.ops:
        scope = _too_narrow(ptx, op, spec)
        if scope:
            found.append(_finding("signal", op, f"{op.name} {scope}"))
            continue
        if not touches(ptx, op, spec.signals):
            continue
        if re.match(r"ld\.volatile", op.name):
            found.append(_finding("signal", op, "a volatile load of a signal orders nothing after it: use wait(…), an acquire"))
        elif re.match(r"(atom|red)\.|ld\..*(acquire|relaxed)", op.name):
            if not re.search(r"acquire|release|acq_rel", op.name):
                found.append(_finding("signal", op, f"{op.name} on a signal orders nothing: use publish_…(…) or wait(…)"))
            elif not re.search(r"\.sys\b", op.name):
                found.append(_finding("signal", op, f"{op.name} on a signal {_NOT_SYS}"))
    return found


_NOT_SYS = "does not reach other GPUs or the copy engine: its scope must be sys"


def _too_narrow(ptx: Ptx, op: Op, spec: Spec) -> str:
    """What is wrong with the scope of an atomic, wherever it is."""
    if not re.match(r"(atom|red)\b", op.name) or ".shared" in op.name:
        return ""
    if re.search(r"\.cta\b", op.name):
        return "is for the threads of one program: its scope must be gpu or sys"
    peers = tuple(f"{name}*" for name in spec.bases)
    return f"on a word of a peer {_NOT_SYS}" if touches(ptx, op, peers) and not re.search(r"\.sys\b", op.name) else ""


def bounded(ptx: Ptx) -> list[Finding]:
    """Rule "bounded": a loop that waits for another rank looks at the clock."""

    def looks(op: Op) -> bool:  # and does not send, as one that counts arrivals does; Triton's default order is both
        if ".sys" not in op.name or not is_acquire(op):
            return False
        return not is_release(op) or ".cas." in op.name or adds_nothing(ptx, op)

    found = []
    for loop in ptx.innermost(looks):
        if not any("%globaltimer" in op.operands or "%clock" in op.operands for op in loop):
            first = next(filter(looks, loop))
            found.append(
                _finding("bounded", first, "a signal that does not come is waited for for ever: use wait(…), which gives up")
            )
    return found


def parted(ptx: Ptx, spec: Spec) -> list[Finding]:
    """Rule "parted": no branch in front of a barrier is on what the warps of a program may see differently; numbers of calls are
    advanced when all of them have read them.
    """
    barrier = functools.partial(is_barrier, threads=ptx.threads)
    numbers = [op for op in ptx.ops if touches(ptx, op, spec.counters)]
    loads, stores = set(filter(is_plain_load, numbers)), set(filter(is_global_store, numbers))
    found = [
        _finding("parted", branch, _PARTED.format(name=cause.name, at=_at(cause), there=_at(where)))
        for branch, cause, where in partings(ptx, barrier)
    ]
    late = overtaken(ptx, loads, stores, barrier)
    return found + [_finding("parted", store, _OVERTAKEN.format(at=_at(load))) for store, load in late]


_PARTED = (
    "this branch is on what each thread has for itself from {name} at {at}; warps that go different ways come to other barriers "
    "(one is at {there}), and the program may hang: let all threads have one answer, by lang.any_thread(…) or an atomic"
)
_OVERTAKEN = (
    "the number of the call, which every thread loads at {at}, is overwritten before all have: one that is late has that of the "
    "next call; call cta_barrier() in front of the store"
)


def main_loops(ptx: Ptx, spec: Spec) -> list[Finding]:
    """Rule "pipeline": the loops of matrix products, what they use, and loads that run ahead."""
    kinds = {kind for op in ptx.ops if (kind := mma_of(op))}
    mma = spec.mma or next((kind for kind in ("wgmma", "tcgen05", "mma.sync") if kind in kinds), None)
    if mma is None:
        return []
    if mma not in kinds:
        return [Finding("pipeline", 0, "", f"the products use {', '.join(sorted(kinds)) or 'nothing'} instead of {mma}")]
    loops = ptx.innermost(lambda op: mma_of(op) == mma)
    found = []
    if spec.loops is not None and len(loops) != spec.loops:
        message = f"{len(loops)} loops of matrix products where the source has {spec.loops}: one was merged, unrolled or dropped"
        found.append(Finding("pipeline", 0, "", message))
    for loop in loops if spec.buffers and spec.buffers > 1 else []:
        product = next(op for op in loop if mma_of(op) == mma)
        tma, copies = any(map(is_tma_load, loop)), any(re.match(r"cp\.async\.c[ag]\.", op.name) for op in loop)
        ahead = [int(op.operands) for op in loop if re.fullmatch(r"cp\.async\.wait_group", op.name)]
        if not tma and not copies:
            found.append(_finding("pipeline", product, "this loop loads its operands when it needs them: " + _LOST))
        elif copies and not any(ahead):
            found.append(_finding("pipeline", product, "this loop waits for the loads that it has just begun: " + _LOST))
    return found


_LOST = (
    "the software pipeline is lost. Known causes: tl.debug_barrier in the loop (use cta_barrier), num_stages=1, loads of less than "
    "four bytes (say which sizes are multiples of 16: blocks.sixteens)"
)


# -- what needs more than the PTX -------------------------------------------------------------------------------------------


def lint_built(built: Built, spec: Spec) -> list[Finding]:
    """All findings of a compiled launch."""
    ptx = Ptx(built.ptx, ttir.parameters(built.ttgir))
    source = ttir.effects(built.ttir)
    found = [*lint(ptx, spec), *plain(ptx, spec, built.ttir), *dropped(ptx, source), *counts(source, spec.counts)]
    if spec.vectors:
        found += narrow(ptx, spec, ttir.scalars(built.ttir, "store"))
    if built.serialised:
        found.append(Finding("pipeline", 0, "", _SERIALISED.format(why=built.serialised)))
    found += [Finding("acquire", 0, " in ".join(where), _AHEAD) for where in turns.unwaited(built.ttgir, spec.payload)]
    return [*found, *offsets(built.ttir, spec), *buffers(built.ttgir, spec), *resources(built, spec)]


_AHEAD = (
    "payload is asked for while an earlier turn of the loop computes, and where it lies does not come from the branch that waits: "
    "the wait of its turn comes later; compute the place of the load beside the wait, as the body of a flattened outer loop does"
)


_SERIALISED = (
    "each product waits for the one before, which ptxas says is due to {why}. Known causes: a branch behind the loop over K that "
    "changes the accumulator (use a mask or tl.where), a tile too large for its warps"
)


def dropped(ptx: Ptx, source: ttir.Effects) -> list[Finding]:
    """Rule "dropped": each operation of the source that has an effect is in the PTX.

    A pipelined or unrolled loop has copies of an operation, so there may be more.
    """
    made: ttir.Effects = Counter((kind, op.where[:2]) for op in ptx.ops for kind in kinds_of(op))
    return [
        Finding("dropped", 0, " in ".join(where), _DROPPED.format(lost=count - made[kind, where], count=count, kind=kind))
        for (kind, where), count in sorted(source.items())
        if made[kind, where] < count
    ]


_DROPPED = (
    "{lost} of {count} operations '{kind}' of the source are not in the machine code, the compiler dropped or merged them. Known "
    "cause: warp_specialize=True with atomics or inline assembly in the loop"
)


def kinds_of(op: Op) -> Iterator[str]:
    """What `ttir.effects` may call the operation."""
    if is_release(op) and is_acquire(op):
        yield "arrival"
    elif is_release(op):
        yield "release"
    elif is_acquire(op):
        yield "acquire"
    elif re.match(r"(atom|red)\b.*\.relaxed\b", op.name):
        yield "relaxed atomic"
    elif op.name.startswith("ld.volatile"):
        yield "volatile load"
    yield f"asm {op.name}"


def counts(source: ttir.Effects, expected: dict[str, int]) -> list[Finding]:
    """Rule "count": the source has as many signals and waits as its protocol."""
    have: Counter[str] = Counter()
    for (kind, _), count in source.items():
        have[kind] += count
    return [
        Finding("count", 0, "", f"the source has {have[kind]} operations '{kind}', the protocol of this variant {count}")
        for kind, count in expected.items()
        if have[kind] != count
    ]


def narrow(ptx: Ptx, spec: Spec, scalars: set[tuple[str, ...]]) -> list[Finding]:
    """Rule "vectors": blocks go to peers in 16 bytes a thread; ``scalars``: where the source stores single numbers."""
    found: dict[str, Finding] = {}
    for op in ptx.ops:
        if op.name.startswith("st.") and op.bits < 128 and touches(ptx, op, spec.payload) and op.where[:2] not in scalars:
            found.setdefault(_at(op), _finding("vectors", op, _NARROW.format(bytes=op.bits // 8)))
    return list(found.values())


#: Where words between ranks are stored plainly, and why that is right.
PLAIN = {
    sync.reset: "by the last program, behind all waits for these words; what sets them again comes after its credits, a release",
    sync._give_up: "the record of a failure, in host memory: a fence stands in front of the word that the host looks at",
    trace.note: "times for the host, which looks at them when the kernel has ended",
}


def plain(ptx: Ptx, spec: Spec, text: str) -> list[Finding]:
    """Rule "plain": words between ranks are neither loaded nor stored plainly; ``text``: the source as Triton's IR.

    They are what signal arguments point to, and single numbers at an address that was loaded through a base.
    """
    peers = {f"{name}*" for name in spec.bases}
    numbers = ttir.scalars(text, "load") | ttir.scalars(text, "store")
    found = []
    for op in ptx.ops:
        access = re.match(r"(ld|st)\b.*\.global\b|cp\.async\.c[ag]\.", op.name)
        if not access or re.search(r"\.(volatile|relaxed|acquire|release)\b", op.name) or _allowed() & set(op.where[:1]):
            continue
        touched = ptx.touches(global_side(op))
        through = not touched.isdisjoint(peers) and touched.isdisjoint(ptx.pointers) and op.where[:2] in numbers
        if through or not touched.isdisjoint(spec.signals):
            found.append(_finding("plain", op, _PLAIN_STORE if op.name.startswith("st") else _PLAIN_LOAD))
    return found


_PLAIN_STORE = "a plain store to a word between ranks is not ordered behind what was stored before: use publish_…(…)"
_PLAIN_LOAD = "a plain load of a word between ranks orders nothing behind it, and a loop may make it only once: use wait(…)"


@functools.cache
def _allowed() -> set[str]:
    """file:line of what stands in `PLAIN`."""
    found = set()
    for helper in PLAIN:
        lines, first = inspect.getsourcelines(helper.fn)
        found |= {f"{os.path.basename(inspect.getfile(helper.fn))}:{first + number}" for number in range(len(lines))}
    return found


_NARROW = (
    "a block goes to a peer in stores of {bytes} bytes, several times slower than of 16: the compiler must see that address, sizes "
    "and strides are multiples of 16 (peer_address says so of the address; blocks.sixteens of a size)"
)


def offsets(text: str, spec: Spec) -> list[Finding]:
    """Rule "offset": offsets into matrices are 64-bit."""
    return [Finding("offset", 0, " in ".join(where), _NARROW_OFFSET) for where in ttir.narrow_offsets(text, spec.pitches)]


_NARROW_OFFSET = "an index times a pitch in 32 bits is wrong from 2**31 elements on: make the index 64-bit, .to(tl.int64), first"


def buffers(ttgir: str, spec: Spec) -> list[Finding]:
    """Rule "pipeline": each operand of each loop of products has its buffers in shared memory."""
    if not spec.loops or not spec.buffers or spec.buffers < 2:
        return []
    have = Counter(re.findall(r"ttg\.local_alloc[^\n]*memdesc<(\d+x\d+x\d+)x", ttgir))
    need = Counter(f"{spec.buffers}x{rows}x{columns}" for rows, columns in spec.operands)
    return [
        Finding("pipeline", 0, "", f"{have[ring]} of {spec.loops * count} rings of {ring} elements are in shared memory: {_LOST}")
        for ring, count in need.items()
        if have[ring] < spec.loops * count
    ]


def resources(built: Built, spec: Spec) -> list[Finding]:
    """Rules "spill" and "shared": registers and shared memory suffice."""
    found = []
    if built.local > spec.local:
        message = (
            f"{built.local} instructions move registers to or from local memory ({built.stack} bytes a thread, {built.registers} "
            f"registers used, {spec.local} allowed): use a smaller tile or more warps"
        )
        found.append(Finding("spill", 0, "", message))
    limit = SHARED[built.capability]
    if built.shared > limit:
        message = f"{built.shared} bytes of shared memory, sm_{built.capability} has {limit}: use fewer stages or a smaller tile"
        found.append(Finding("shared", 0, "", message))
    return found


#: Most shared memory of a program, in bytes, by the compute capabilities that Triton compiles for, those of GPUs that there are.
SHARED = {
    80: 166_912, 86: 101_376, 87: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 103: 232_448, 120: 101_376, 121: 101_376,
}  # fmt: skip


def _finding(rule: str, op: Op, message: str) -> Finding:
    return Finding(rule, op.line, _at(op), message)


def _at(op: Op) -> str:
    return " in ".join(op.where) or f"PTX line {op.line}"

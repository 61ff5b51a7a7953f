"""Signals between ranks: the control block, the wait, the credits, the end of a call.

Every context owns, on each rank, a *control block* (local memory, int64 words) and a *signal head* at the start of its
block of the symmetric heap. Signals only grow, so no call needs a reset, a memset or a barrier, and a CUDA graph may
replay calls: the call number (*epoch*) lives in the control block and the kernel itself advances it.

Control block, words (see `ops.group` for who fills it)::

    EPOCH       calls finished by this rank; a running call has number EPOCH + 1
    LAST_USE+p  the call that last used slot set p (0 or 1), 0 for never
    ARRIVED     programs of the running call that are done
    FAILED      1 once a wait of this rank has run out; later waits then end when they look at it
    TIMEOUT     nanoseconds that a wait may last
    REPORT      address of the failure record (host memory that the device can write)
    SCRATCH     a word that may be signalled in vain (the first deferred signal of a program goes there)
    TIMES       address of the times that a traced kernel writes down (`trace`)
    BASES+i     address, as mapped on this rank, of rank i's block of the symmetric heap

Signal head of the symmetric block, int64 words: word 0 is the abort word (1 + the rank that gave up first), word
``CONSUMED + s`` is the last call whose data rank s has finished reading out of *its* slots: the *credit* that allows this
rank to write into the slot set that call used.

Memory order, each edge once:

* ``publish`` (release, system scope) in the writer pairs with ``wait`` (acquire, system scope) in the reader of the slot.
* ``finish``: every program's reads happen before its arrival (acq_rel, GPU scope); the last arrival happens before the
  credits (release, system scope), which pair with ``wait_credits`` (acquire, system scope) in the next writer.
* a wait that runs out writes the failure record, then the abort words; nothing is ordered by them.
"""

import triton
import triton.language as tl

from .lang import any_thread, awaits, drain_stores, globaltimer, is_interp, spin

EPOCH = tl.constexpr(0)
LAST_USE = tl.constexpr(1)
ARRIVED = tl.constexpr(3)
FAILED = tl.constexpr(4)
TIMEOUT = tl.constexpr(5)
REPORT = tl.constexpr(6)
SCRATCH = tl.constexpr(7)
TIMES = tl.constexpr(8)
BASES = tl.constexpr(9)

ABORT = tl.constexpr(0)
CONSUMED = tl.constexpr(1)

#: At most so many sub-chunks a chunk, and so the stride of the copy engines' flags: calls that cut their chunks otherwise may
#: overlap in time, and must agree on which word belongs to which slot set.
MAX_SUBS = tl.constexpr(4)

# What a wait was waiting for, as it stands in the failure record; `ops.group` has the words for people.
WAIT_CREDIT = tl.constexpr(1)
WAIT_PARTIAL = tl.constexpr(2)
WAIT_SHARD = tl.constexpr(3)
WAIT_SIGNAL = tl.constexpr(4)  # for kernels of others
WAIT_PART = tl.constexpr(5)
WAIT_RESULT = tl.constexpr(6)
WAIT_MESSAGE = tl.constexpr(7)
# no waits: what came is of another call; its sender had given up; a rank of this node had
WRONG_MESSAGE = tl.constexpr(8)
PEER_FAILED = tl.constexpr(9)
NODE_FAILED = tl.constexpr(10)
WAIT_GATHERED = tl.constexpr(11)
#: Waits for programs of the same launch, which may be waiting for peers, one after the other: they last R + 1 times as long.
OWN = (WAIT_PART.value, WAIT_GATHERED.value)


@triton.jit
def peer_address(pointer, ctl, rank, peer):
    """The address on ``peer`` of the symmetric object at ``pointer`` on this rank (same offset in the context's block).

    The hint of 16 bytes holds for a region, as every one starts at 256; without it stores fall apart into two-byte ones. It must
    stand where the address is computed: on what a call returns it is lost.
    """
    shift = tl.load(ctl + BASES + peer) - tl.load(ctl + BASES + rank)
    moved = (pointer.to(tl.int64, bitcast=True) + shift).to(pointer.dtype, bitcast=True)
    return tl.multiple_of(moved, 16)


@triton.jit
def at_peer(pointer, ctl, rank, peer):
    """`peer_address` of any word."""
    shift = tl.load(ctl + BASES + peer) - tl.load(ctl + BASES + rank)
    return (pointer.to(tl.int64, bitcast=True) + shift).to(pointer.dtype, bitcast=True)


@triton.jit
def head_of(ctl, peer):
    """Pointer to the signal head of ``peer`` as mapped here."""
    return tl.load(ctl + BASES + peer).to(tl.pointer_type(tl.int64))


@triton.jit
def _give_up(ctl, rank, what, peer, want, seen, R: tl.constexpr):
    """Record the first failure of this rank for the host and tell every peer. GPU only."""
    if tl.atomic_xchg(ctl + FAILED, 1, sem="relaxed", scope="gpu") == 0:
        record = tl.load(ctl + REPORT).to(tl.pointer_type(tl.int64))
        abort = tl.load(head_of(ctl, rank) + ABORT, volatile=True)
        tl.store(record + 1, what)
        tl.store(record + 2, peer)
        tl.store(record + 3, want)
        tl.store(record + 4, seen)
        tl.store(record + 5, tl.load(ctl + EPOCH) + 1)
        tl.store(record + 6, abort)
        tl.inline_asm_elementwise("fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        tl.store(record, 1)
        if abort == 0:
            for other in range(R):
                tl.atomic_xchg(head_of(ctl, other) + ABORT, (rank + 1).to(tl.int64), sem="relaxed", scope="sys")


@triton.jit
def wait(signal, want, ctl, rank, what: tl.constexpr, peer, R: tl.constexpr):
    """Spin until ``*signal >= want``; acquire at system scope. ``want = 0`` never waits.

    Bounded: after TIMEOUT, or at once when this or another rank has given up, the failure is recorded and the kernel runs
    on with whatever data is there; the host raises. All threads give up in the same turn (`any_thread`). Written as a loop
    without a branch around it, because an ``if`` in front of the spin slowed the pipelined loop of the prototypes.

    Of the waits in OWN the limit is longer: those that they wait for run out first, and tell who did not come.
    """
    limits: tl.constexpr = R + 1 if (what == WAIT_PART or what == WAIT_GATHERED) else 1
    want = (want + tl.zeros((), tl.int64)).to(tl.int64)
    if is_interp():
        awaits(signal, want)
    seen = tl.atomic_add(signal, 0, sem="acquire", scope="sys").to(tl.int64)
    if is_interp():
        turns = 0
        while seen < want:
            spin(want, seen, what, peer, ctl, turns)
            turns += 1
            seen = tl.atomic_add(signal, 0, sem="acquire", scope="sys").to(tl.int64)
    else:
        since = tl.zeros((), tl.int64)
        while seen < want:
            now = globaltimer()
            since = tl.where(since == 0, now, since)
            aborted = tl.load(head_of(ctl, rank) + ABORT, volatile=True) != 0
            failed = tl.load(ctl + FAILED, volatile=True) != 0
            late = any_thread(aborted | failed | (now - since > limits * tl.load(ctl + TIMEOUT))) != 0
            if late:
                _give_up(ctl, rank, what, peer, want, seen, R)
            seen = tl.atomic_add(signal, 0, sem="acquire", scope="sys").to(tl.int64)
            want = tl.where(late, tl.minimum(seen, want), want)


@triton.jit
def wait_credits(ctl, slot, rank, R: tl.constexpr):
    """Wait until every peer has read what this rank's call LAST_USE[slot] wrote to it: slot set ``slot`` is then free there.

    With two slot sets in turn this asks for the call before the last, which peers have almost always finished.
    """
    last = tl.load(ctl + LAST_USE + slot)
    head = head_of(ctl, rank)
    for step in tl.static_range(1, R):
        peer = (rank + step) % R
        wait(head + CONSUMED + peer, last, ctl, rank, WAIT_CREDIT, peer, R)


@triton.jit
def publish_add(counter, count, TMA: tl.constexpr):
    """Release: what this program stored so far is complete, then ``*counter += count``."""
    drain_stores(TMA)
    tl.atomic_add(counter, count, sem="release", scope="sys")


@triton.jit
def publish_set(signal, value, TMA: tl.constexpr):
    """Release: what this program stored so far is complete, then ``*signal = value``."""
    drain_stores(TMA)
    tl.atomic_xchg(signal, value, sem="release", scope="sys")


@triton.jit
def publish_set_to_all(signal, value, ctl, rank, R: tl.constexpr, S: tl.constexpr):
    """`publish_set` of every other rank's ``signal``, by one release, which costs a trip.

    S: R rounded up to a power of two.
    """
    drain_stores(False)
    peer = tl.arange(0, S)
    others = (peer != rank) & (peer < R)
    theirs = at_peer(signal, ctl, rank, tl.where(others, peer, rank))
    tl.atomic_xchg(theirs, tl.zeros((S,), tl.int64) + value, mask=others, sem="release", scope="sys")


@triton.jit
def push(slot, block, flag, number, ctl, rank, peer, B: tl.constexpr):
    """Store a block [B] to ``slot`` on ``peer``, then release: its ``flag`` is ``number``. Both are named by this rank's memory."""
    tl.store(tl.multiple_of(peer_address(slot, ctl, rank, peer) + tl.arange(0, B), 16), block)
    publish_set(at_peer(flag, ctl, rank, peer), number, False)


@triton.jit
def pull(slot, flag, number, ctl, rank, what: tl.constexpr, peer, R: tl.constexpr, B: tl.constexpr):
    """The block [B] at ``slot`` that ``peer`` pushes, once its ``flag`` is ``number`` or more: acquire."""
    wait(flag, number, ctl, rank, what, peer, R)
    return tl.load(tl.multiple_of(slot + tl.arange(0, B), 16))


@triton.jit
def full_flag(full, slot, source, sub, R: tl.constexpr):
    """The copy engine's flag, 32 bits, for sub-chunk ``sub`` of ``source`` in a slot set; as `Context.peer_full` on the host."""
    return full + (slot * R + source) * MAX_SUBS + sub


@triton.jit
def reset(full, slot, R: tl.constexpr):
    """Take back the copy engines' flags of a slot set, in a call that has seen all of them; before its credits."""
    for word in range(R * MAX_SUBS):
        tl.store(full_flag(full, slot, 0, word, R), 0)


@triton.jit
def is_last_program(ctl, TMA: tl.constexpr):
    """True in exactly one program of the call: the one that arrives when all the others are done with their reads."""
    drain_stores(TMA)
    arrived = tl.atomic_add(ctl + ARRIVED, 1, sem="acq_rel", scope="gpu")
    return arrived == tl.num_programs(0) - 1


@triton.jit
def finish(ctl, slot, rank, epoch, R: tl.constexpr):
    """Close call ``epoch`` of this rank: by the last program only, after its last read. Gives the credits to the peers."""
    tl.store(ctl + ARRIVED, 0)
    tl.store(ctl + LAST_USE + slot, epoch)
    tl.store(ctl + EPOCH, epoch)
    if R > 1:  # all by one release: nothing hides the trips of several at the end of a call
        publish_set_to_all(head_of(ctl, rank) + CONSUMED + rank, epoch, ctl, rank, R, triton.next_power_of_2(R))

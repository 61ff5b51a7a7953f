"""Words that are their own flag: 32 bits of payload, and memory that is `EMPTY` until a word comes.

An aligned word of 32 bits is written and read whole, so who sees that it is not `EMPTY` has it: no release, no acquire, no signal
beside the data, one trip over the wire, and no byte but the payload's. Who has read a word empties it for a later call, which must
not write it before that; `exchange` says why none does. Compared bit by bit, never as floats.

`EMPTY` is all bits set: two elements of 16 bits that are NaN, or one of 32. A payload of just these bits is sent as other NaNs
(`sendable`), so words are for floats only. (TensorRT-LLM's Lamport all-reduce has -0 in this place, and three sets of memory.)

Under the interpreter words are exchanged by relaxed atomics, block by block, so that the race checker knows that they may meet.
"""

import triton
import triton.language as tl

from .elements import row_from
from .lang import any_thread, globaltimer, is_interp, spin
from .sync import ABORT, FAILED, TIMEOUT, _give_up, head_of

EMPTY = tl.constexpr(-1)
#: NaN, in one element or in both.
NAN = tl.constexpr(0x7FFF7FFF)
#: Looks at words for one at the clock and at what has failed; one for each took longer (docs/measured/2026-11-28-waits.md).
LOOKS = tl.constexpr(16)


@triton.jit
def sendable(payload):
    """Words that none takes for no word, out of int32 payload."""
    return tl.where(payload == EMPTY, NAN, payload)


@triton.jit
def put(start, words, B: tl.constexpr):
    """Store a block of B words. ``start`` is a multiple of 16 bytes, as are those of all blocks here."""
    pointers = tl.multiple_of(start + tl.arange(0, B), 16)
    if is_interp():
        tl.atomic_xchg(pointers, words, sem="relaxed", scope="sys")
    else:
        tl.store(pointers, words)


@triton.jit
def put_at(pointers, mask, words):
    """`put` of the words that are not masked, to where they belong each."""
    if is_interp():
        tl.atomic_xchg(pointers, words, mask=mask, sem="relaxed", scope="sys")
    else:
        tl.store(pointers, words, mask=mask)


@triton.jit
def look(pointers, mask, own):
    """What stands at ``pointers`` now; ``own`` where masked."""
    if is_interp():
        words = tl.where(mask, tl.atomic_add(pointers, tl.zeros_like(own), mask=mask, sem="relaxed", scope="sys"), own)
    else:
        words = tl.load(pointers, mask=mask, other=own, volatile=True)
    return words


@triton.jit
def empty(pointers, mask, words):
    """Make room where ``words`` have been read. All threads have, as each wait ends with a maximum over all of them."""
    none = tl.zeros_like(words) + EMPTY
    if is_interp():
        tl.atomic_xchg(pointers, none, mask=mask, sem="relaxed", scope="sys")
    else:
        tl.store(pointers, none, mask=mask)


@triton.jit
def missing(words, mask, source):
    """1 + a rank of ``source``, which is a block like ``words``, whose words are not all there; 0 if all are."""
    return tl.max(tl.where((words == EMPTY) & mask, source + 1, 0).to(tl.int32))


@triton.jit
def has_failed(since, looks, ctl, rank):
    """Whether a wait that began at ``since`` must end: it has run out, or a rank has given up. All threads agree. GPU only.

    It is looked at each LOOKS-th time.
    """
    failed = tl.zeros((), tl.int32)
    if looks % LOOKS == 0:
        aborted = tl.load(head_of(ctl, rank) + ABORT, volatile=True) != 0
        here = tl.load(ctl + FAILED, volatile=True) != 0
        failed = any_thread(aborted | here | (globaltimer() - since > tl.load(ctl + TIMEOUT))).to(tl.int32)
    return failed != 0


@triton.jit
def take_words(pointers, mask, own, source, ctl, rank, what: tl.constexpr, R: tl.constexpr):
    """The words at ``pointers``, once all are there, and ``own`` where masked; they are emptied. Bounded as `sync.wait` is."""
    words = look(pointers, mask, own)
    lacking = missing(words, mask, source)
    if is_interp():
        turns = 0
        while lacking > 0:
            spin(1, 0, what, lacking - 1, ctl, turns)
            turns += 1
            words = look(pointers, mask, own)
            lacking = missing(words, mask, source)
    else:
        since = globaltimer()
        looks = 1
        while lacking > 0:
            late = has_failed(since, looks, ctl, rank)
            if late:
                _give_up(ctl, rank, what, lacking - 1, 1, 0, R)
            words = look(pointers, mask, own)
            looks += 1
            lacking = tl.where(late, 0, missing(words, mask, source))
    empty(pointers, mask, words)
    return words


@triton.jit
def receive(row, pitch, own, ctl, rank, what: tl.constexpr, R: tl.constexpr, S: tl.constexpr, B: tl.constexpr):
    """The words [B, S] of all ranks: those of the others in rows ``pitch`` apart from ``row`` on, in the order of the ranks, and
    this rank's are ``own`` [B].

    S: R rounded up to a power of two; columns from R on are ``own``, too.
    """
    source = tl.arange(0, S)[None, :]
    mask = (tl.arange(0, B)[:, None] >= 0) & (source != rank) & (source < R)
    own = tl.broadcast_to(own[:, None], (B, S))
    pointers = tl.multiple_of(row + row_from(source, rank) * pitch + tl.arange(0, B)[:, None], [16, 1])
    return take_words(pointers, mask, own, tl.broadcast_to(source, (B, S)), ctl, rank, what, R)


@triton.jit
def receive_from(row, source, ctl, rank, what: tl.constexpr, R: tl.constexpr, B: tl.constexpr):
    """The words [B] of rank ``source``, at ``row``."""
    pointers = tl.multiple_of(row + tl.arange(0, B), 16)
    none = tl.zeros((B,), tl.int32)
    return take_words(pointers, none == 0, none, tl.zeros((B,), tl.int32) + source, ctl, rank, what, R)

"""Words that carry their own flag: 32 bits of payload and, above them, the number of the call that wrote them.

A word of 64 bits is written and read whole, so who sees the number sees the payload: no release, no acquire, no signal beside the
data, and one trip over the wire instead of two. It doubles the bytes, so it is for small messages. (NCCL's protocol LL is this.)
Stores go out as vectors of two words; what makes it right is that each aligned word by itself is never torn.

Under the interpreter words are exchanged by relaxed atomics, block by block, so that the race checker knows that they may meet.
"""

import triton
import triton.language as tl

from .lang import globaltimer, is_interp, spin
from .sync import ABORT, EPOCH, FAILED, TIMEOUT, _give_up, head_of

PAYLOAD = tl.constexpr(0xFFFFFFFF)


@triton.jit
def number_of(epoch):
    """What stands above the payload in words of call ``epoch``: its low 32 bits, with their sign."""
    return (epoch << 32) >> 32


@triton.jit
def with_number(payload, epoch):
    """Words of call ``epoch`` out of int32 payload."""
    return (payload.to(tl.int64) & PAYLOAD) | (epoch << 32)


@triton.jit
def put(start, words, B: tl.constexpr):
    """Store a block of B words. ``start`` is a multiple of 16 bytes, as are those of all blocks here."""
    pointers = tl.multiple_of(start + tl.arange(0, B), 16)
    if is_interp():
        tl.atomic_xchg(pointers, words, sem="relaxed", scope="sys")
    else:
        tl.store(pointers, words)


@triton.jit
def look(pointers, mask, own):
    """What stands at ``pointers`` now; ``own`` where masked."""
    if is_interp():
        words = tl.where(mask, tl.atomic_add(pointers, tl.zeros_like(own), mask=mask, sem="relaxed", scope="sys"), own)
    else:
        words = tl.load(pointers, mask=mask, other=own, volatile=True)
    return words


@triton.jit
def missing(words, epoch, source):
    """1 + a rank of ``source``, which is a block like ``words``, whose words are not all of call ``epoch``; 0 if all are."""
    return tl.max(tl.where((words >> 32) == number_of(epoch), 0, source + 1).to(tl.int32))


@triton.jit
def oldest(words):
    """The smallest number of these words."""
    return tl.min(words >> 32)


@triton.jit
def has_failed(since, ctl, rank):
    """Whether a wait that began at ``since`` must end: it has run out, or this or another rank has given up. GPU only."""
    aborted = tl.load(head_of(ctl, rank) + ABORT, volatile=True) != 0
    failed = tl.load(ctl + FAILED, volatile=True) != 0
    return aborted | failed | (globaltimer() - since > tl.load(ctl + TIMEOUT))


@triton.jit
def await_words(pointers, mask, own, source, epoch, ctl, rank, what: tl.constexpr, R: tl.constexpr):
    """The words of call ``epoch`` at ``pointers``, once all are there, and ``own`` where masked. Bounded as `sync.wait` is."""
    words = look(pointers, mask, own)
    lacking = missing(words, epoch, source)
    if is_interp():
        turns = 0
        while lacking > 0:
            spin(ctl + EPOCH, epoch, oldest(words), what, lacking - 1, ctl, turns)
            turns += 1
            words = look(pointers, mask, own)
            lacking = missing(words, epoch, source)
    else:
        since = globaltimer()
        while lacking > 0:
            late = has_failed(since, ctl, rank)
            if late:
                _give_up(ctl, rank, what, lacking - 1, epoch, oldest(words), R)
            words = look(pointers, mask, own)
            lacking = tl.where(late, 0, missing(words, epoch, source))
    return words


@triton.jit
def receive(row, pitch, own, epoch, ctl, rank, what: tl.constexpr, R: tl.constexpr, S: tl.constexpr, B: tl.constexpr):
    """The words [B, S] of call ``epoch`` of all ranks: that of rank s at ``row`` + s · ``pitch``, this rank's are ``own`` [B].

    S: R rounded up to a power of two; columns from R on are ``own``, too.
    """
    source = tl.arange(0, S)[None, :]
    mask = (tl.arange(0, B)[:, None] >= 0) & (source != rank) & (source < R)
    own = tl.broadcast_to(own[:, None], (B, S))
    pointers = tl.multiple_of(row + source * pitch + tl.arange(0, B)[:, None], [16, 1])
    return await_words(pointers, mask, own, tl.broadcast_to(source, (B, S)), epoch, ctl, rank, what, R)


@triton.jit
def receive_from(row, source, epoch, ctl, rank, what: tl.constexpr, R: tl.constexpr, B: tl.constexpr):
    """The words [B] of call ``epoch`` of rank ``source``, at ``row``."""
    pointers = tl.multiple_of(row + tl.arange(0, B), 16)
    none = tl.zeros((B,), tl.int64)
    return await_words(pointers, none == 0, none, tl.zeros((B,), tl.int32) + source, epoch, ctl, rank, what, R)

"""What a GPU does about messages between nodes: it waits for them, and sees what they are. `ops.messages` has the record."""

import triton
import triton.language as tl

from .sync import EPOCH, FAILED, LAST_USE, WAIT_CREDIT, WAIT_MESSAGE, WRONG_MESSAGE, _give_up, wait

#: Words of a signal head: the abort word; for each of two slots and J nodes the messages that came; as many for those read there.
CAME = tl.constexpr(1)
#: int64 words in front of a message's payload, of which two are used, so that the payload begins as TMA wants it.
HEADER = tl.constexpr(32)


@triton.jit(do_not_specialize=["slot", "node", "m", "columns", "number", "pitch"])
def messages_begin_kernel(outbox, head, ctl, slot, node, m, columns, number, pitch, J: tl.constexpr):
    """The slot set is free on all nodes, and ``number`` messages, ``pitch`` words apart, say what call they are of. One program."""
    used = tl.load(ctl + LAST_USE + slot)
    for step in tl.static_range(1, J):  # (A)
        peer = (node + step) % J
        wait(head + CAME + (2 + slot) * J + peer, used, ctl, node, WAIT_CREDIT, peer, 0)
    for message in range(number):
        at = outbox + message.to(tl.int64) * pitch
        tl.store(at, m.to(tl.int64))
        tl.store(at + 1, columns.to(tl.int64))


@triton.jit(do_not_specialize=["slot", "node", "first", "number", "last", "m", "columns", "pitch"])
def messages_came_kernel(inbox, head, ctl, slot, node, first, number, last, m, columns, pitch, J: tl.constexpr):
    """What the stream holds behind this may read the messages of ``number`` nodes from ``first`` on, which are of this call.

    ``last``: they are the last of the call. One program.
    """
    used = tl.load(ctl + LAST_USE + slot)
    for step in range(number):
        peer = (first + step) % J
        wait(head + CAME + slot * J + peer, used + 1, ctl, node, WAIT_MESSAGE, peer, 0)  # (B)
        at = inbox + (slot * J + peer).to(tl.int64) * pitch
        theirs = tl.load(at, volatile=True) * 4294967296 + tl.load(at + 1, volatile=True)
        ours = m.to(tl.int64) * 4294967296 + columns.to(tl.int64)
        if (theirs != ours) & (tl.load(ctl + FAILED, volatile=True) == 0):
            _give_up(ctl, node, WRONG_MESSAGE, peer, ours, theirs, 0)
    if last == 1:
        tl.store(ctl + LAST_USE + slot, used + 1)
        tl.store(ctl + EPOCH, tl.load(ctl + EPOCH) + 1)

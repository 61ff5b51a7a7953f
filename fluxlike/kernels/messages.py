"""What a GPU does about messages between nodes: it waits for them, sees what they are, and may send them itself. `ops.messages` has
the record.
"""

import triton
import triton.language as tl

from .lang import cta_barrier
from .puts import put_signal, quiet
from .sync import (
    ABORT,
    ARRIVED,
    BASES,
    EPOCH,
    FAILED,
    LAST_USE,
    NODE_FAILED,
    PEER_FAILED,
    WAIT_CREDIT,
    WAIT_MESSAGE,
    WRONG_MESSAGE,
    _give_up,
    wait,
)

#: Words of a signal head: the abort word; for each of two slots and J nodes the messages that came; as many for those read there.
CAME = tl.constexpr(1)
#: int64 words in front of a message's payload, so that the payload begins as TMA wants it, and which of them are used.
HEADER = tl.constexpr(32)
ROWS, COLUMNS, BAD = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
#: What a message adds to its word: as much by one put as by several, each of a part.
SIGNALS = tl.constexpr(256)
#: Of the control block: 1 + the slot of the last call, whose messages have all been read. Nothing here counts arrivals.
OWED = ARRIVED


@triton.jit
def _failed(ctl):
    """Whether a wait by this control block has run out."""
    return tl.load(ctl + FAILED, volatile=True) != 0


@triton.jit
def _given_up(ctl, rank):
    """`_failed`, or another rank of that context has given up: what it published since then is worth nothing.

    A rank that gives up says so before it publishes anything more, so behind an acquire of that this sees it.
    """
    head = tl.load(ctl + BASES + rank).to(tl.pointer_type(tl.int64))
    return _failed(ctl) | (tl.load(head + ABORT, volatile=True) != 0)


@triton.jit(do_not_specialize=["slot", "node", "peer", "rank", "m", "columns", "gives"])
def messages_head_kernel(
    box, head, ctl, inner, other, pes, slot, node, peer, rank, m, columns, gives,
    J: tl.constexpr, PEERS: tl.constexpr, GIVES: tl.constexpr
):  # fmt: skip
    """The head of a message whose payload is there: what call it is of, and whether the payload is worth anything. One program.

    What the stream holds behind this may put the message into the slot on node ``peer``, and on the PEERS - 1 behind it.
    ``inner``, ``other``: control blocks of contexts of the node, of which this is ``rank``, on which the payload depends.
    GIVES: `_give_credits` to ``gives`` nodes, 1 on one host and 2 over a network; 0: the host does.
    """
    if GIVES > 0:
        _give_credits(head, ctl, pes, node, J, gives, GIVES == 1)
    _wait_for_credits(head, ctl, slot, node, peer, J, PEERS)
    _write_head(box, ctl, inner, other, rank, m, columns)


@triton.jit
def _give_credits(head, ctl, pes, node, nodes, gives, near: tl.constexpr):
    """To ``gives`` other nodes, for what came from them in the last call. Never behind a wait: they may wait for these first.

    pes [nodes]: of the counterparts. Over a network puts are of something, here of a word that nobody reads.
    """
    owed = tl.load(ctl + OWED)
    if owed != 0:
        word, spare = (head + CAME + (1 + owed) * nodes + node).to(tl.int64), (head + CAME + 4 * nodes).to(tl.int64)
        nbytes, one = tl.full((), 0 if near else 8, tl.int64), tl.full((), 1, tl.int64)
        for step in range(1, 1 + gives):
            put_signal(spare, spare, nbytes, word, one, tl.load(pes + (node + step) % nodes))


@triton.jit
def _wait_for_credits(head, ctl, slot, node, peer, J, peers):
    """Of node ``peer`` and the peers - 1 behind it."""
    used = tl.load(ctl + LAST_USE + slot)
    for step in range(peers):  # (A)
        receiver = (peer + step) % J
        wait(head + CAME + (2 + slot) * J + receiver, used, ctl, node, WAIT_CREDIT, receiver, 0)


@triton.jit
def _write_head(box, ctl, inner, other, rank, m, columns):
    bad = _failed(ctl) | _given_up(inner, rank) | _given_up(other, rank)
    tl.store(box + ROWS, m.to(tl.int64))
    tl.store(box + COLUMNS, columns.to(tl.int64))
    tl.store(box + BAD, bad.to(tl.int64))


@triton.jit(do_not_specialize=["slot", "node", "peer", "rank", "m", "columns", "start", "nbytes", "nodes", "peers", "gives"])
def messages_put_kernel(
    box, payload, to, head, ctl, inner, other, pes, slot, node, peer, rank, m, columns, start, nbytes, nodes, peers, gives,
    NEAR: tl.constexpr
):  # fmt: skip
    """`messages_head_kernel`, and the puts that it is for, to ``peers`` nodes.

    ``nbytes`` of payload go behind their head ``to`` the own place in the slot. NEAR, on one host: they lie ``start`` bytes behind
    ``payload``; the last program gives the credits, the one before puts the head and the others a part of them each. Else they lie
    behind the head in ``box``, and there is one program.
    """
    if NEAR:
        parts = tl.num_programs(0) - 2
        program = tl.program_id(0)
        if program > parts:
            _give_credits(head, ctl, pes, node, nodes, gives, True)
        else:
            _wait_for_credits(head, ctl, slot, node, peer, nodes, peers)
            last = program == parts
            if last:
                _write_head(box, ctl, inner, other, rank, m, columns)
            part = tl.cdiv(tl.cdiv(nbytes.to(tl.int64), parts), 256) * 256
            first = tl.minimum(program * part, nbytes)
            source = tl.where(last, box.to(tl.int64), payload.to(tl.int64) + start + first)
            target = to.to(tl.int64) + tl.where(last, 0, 8 * HEADER + first)
            size = tl.where(last, 8 * HEADER, tl.minimum(part, nbytes - first))
            add = tl.where(last, SIGNALS // 2, SIGNALS // 2 // parts)
            _put(source, target, size, add, head, pes, slot, node, peer, nodes, peers)
    else:
        _give_credits(head, ctl, pes, node, nodes, gives, False)
        _wait_for_credits(head, ctl, slot, node, peer, nodes, peers)
        _write_head(box, ctl, inner, other, rank, m, columns)
        size = 8 * HEADER + nbytes.to(tl.int64)
        _put(box.to(tl.int64), to.to(tl.int64), size, SIGNALS, head, pes, slot, node, peer, nodes, peers)


@triton.jit
def _put(source, target, size, add, head, pes, slot, node, peer, nodes, peers):
    """To node ``peer`` and the peers - 1 behind it, the last of them first: this one is behind that."""
    cta_barrier()  # the head is there for all threads
    word = (head + CAME + slot * nodes + node).to(tl.int64)
    add = (add + tl.zeros((), tl.int64)).to(tl.int64)
    for step in range(peers):
        receiver = (peer + peers - 1 - step) % nodes
        put_signal(target, source, size, word, add, tl.load(pes + receiver))  # (B)


@triton.jit(do_not_specialize=["slot", "node", "peer", "m", "columns", "pitch", "rank"])
def messages_came_kernel(
    inbox, head, ctl, inner, other, slot, node, peer, rank, m, columns, pitch,
    J: tl.constexpr, L: tl.constexpr, PEERS: tl.constexpr, LAST: tl.constexpr
):  # fmt: skip
    """What the stream holds behind this may read the messages of node ``peer`` and of the PEERS - 1 behind it, which are of this
    call. One program.

    If there is none, or it is worth nothing, the other ranks of the node know that before this one can pass anything on.
    ``inner``, ``other``: control blocks of contexts of the node, of whose L ranks this is ``rank``. LAST: none of these has more to
    do in the call, so that it ends here.
    """
    ours = m.to(tl.int64) * 4294967296 + columns.to(tl.int64)
    for step in range(PEERS):
        sender = (peer + step) % J
        want = (tl.load(ctl + LAST_USE + slot) + 1) * SIGNALS
        wait(head + CAME + slot * J + sender, want, ctl, node, WAIT_MESSAGE, sender, 0)  # (B)
        box = inbox + (slot * J + sender).to(tl.int64) * pitch
        theirs = tl.load(box + ROWS, volatile=True) * 4294967296 + tl.load(box + COLUMNS, volatile=True)
        bad = tl.load(box + BAD, volatile=True)
        if ((theirs != ours) | (bad != 0)) & (_failed(ctl) == 0):
            what = tl.where(bad != 0, PEER_FAILED, WRONG_MESSAGE)
            _give_up(ctl, node, what, sender, ours, theirs, 0)
    if _failed(ctl):
        for step in range(1, L):
            mate = tl.load(inner + BASES + (rank + step) % L).to(tl.pointer_type(tl.int64))
            tl.atomic_xchg(mate + ABORT, (rank + 1).to(tl.int64), sem="relaxed", scope="sys")
    if LAST:
        _end(ctl, inner, other, slot, node, rank)


@triton.jit(do_not_specialize=["slot", "node", "rank"])
def messages_end_kernel(ctl, inner, other, slot, node, rank, QUIET: tl.constexpr):
    """The call ends, where something of it came behind the last `messages_came_kernel`. One program.

    QUIET: what kernels put over a network may still be on its way, and the next call writes the places that it is put from.
    """
    if QUIET:
        quiet()
    _end(ctl, inner, other, slot, node, rank)


@triton.jit
def _end(ctl, inner, other, slot, node, rank):
    """The slot set was used once more, and if a rank of this node gave up in the call, it failed."""
    if (_given_up(inner, rank) | _given_up(other, rank)) & (_failed(ctl) == 0):
        _give_up(ctl, node, NODE_FAILED, node, 0, 0, 0)
    tl.store(ctl + LAST_USE + slot, tl.load(ctl + LAST_USE + slot) + 1)
    tl.store(ctl + EPOCH, tl.load(ctl + EPOCH) + 1)
    tl.store(ctl + OWED, slot.to(tl.int64) + 1)

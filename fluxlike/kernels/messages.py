"""What a GPU does about messages between nodes: it may send them itself, waits for them, sees what they are, puts them together.
`ops.puts` has the record.
"""

import triton
import triton.language as tl

from .lang import any_thread, cta_barrier, is_interp
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
    SCRATCH,
    WAIT_CREDIT,
    WAIT_MESSAGE,
    WRONG_MESSAGE,
    _give_up,
    is_last_program,
    wait,
)

#: Words of a signal head: the abort word; for each of two slots and J nodes the messages that came; as many for those read there.
CAME = tl.constexpr(1)
#: int64 words in front of a message's payload, so that the payload begins as TMA wants it, and which of them are used.
HEADER = tl.constexpr(32)
ROWS, COLUMNS, BAD = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
#: What a message adds to its word: as much by one put as by several, each of a part.
SIGNALS = tl.constexpr(256)
#: Of the control block: 1 + the slot of the last call, whose messages have all been read. Nothing here signals in vain.
OWED = SCRATCH


@triton.jit
def _agreed(condition):
    """The same answer for all threads: what each reads of a word that others write may differ."""
    if not is_interp():
        condition = any_thread(condition) != 0
    return condition


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
    ``payload``; the first program gives the credits, as it runs even if there is no room for all, the last one puts the head and
    the others a part of them each. Else they lie behind the head in ``box``, and there is one program.
    """
    if NEAR:
        parts = tl.num_programs(0) - 2
        program = tl.program_id(0) - 1
        if program < 0:
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
def messages_came_kernel(inbox, head, ctl, inner, slot, node, peer, rank, m, columns, pitch, J: tl.constexpr, L: tl.constexpr):
    """What the stream holds behind this may read the message of node ``peer``, which is of this call. One program.

    ``inner``: control block of a context of the node, of whose L ranks this is ``rank``.
    """
    _came(inbox, head, ctl, inner, slot, node, peer, 1, rank, m, columns, pitch, tl.load(ctl + LAST_USE + slot), J, L)


@triton.jit(do_not_specialize=["slot", "node", "m", "columns", "box_pitch", "rank"])
def messages_sum_kernel(
    parts, own, bias, out, number, width, pitch, inbox, head, ctl, inner, other, slot, node, rank, m, columns, box_pitch,
    J: tl.constexpr, B: tl.constexpr, BIAS: tl.constexpr, L: tl.constexpr, LAST: tl.constexpr
):  # fmt: skip
    """out [number] = the sum of the messages of all other nodes, which this waits for, and ``own``; in fp32, rounded once.

    In the order of the nodes; with BIAS that [width] is added last, in each row of so many elements. The messages are ``pitch``
    elements apart in ``parts``. ``inner``, ``other``: control blocks of contexts of the node. LAST: these have no more to do in the
    call, so that it ends here.
    """
    epoch, used = tl.load(ctl + EPOCH), tl.load(ctl + LAST_USE + slot)
    _all_came(inbox, head, ctl, inner, other, slot, node, rank, m, columns, box_pitch, used, J, L, LAST)
    pitch = pitch // 16 * 16  # a multiple, so that the compiler sees it
    for block in range(tl.program_id(0), tl.cdiv(number, B), tl.num_programs(0)):
        at = block.to(tl.int64) * B + tl.arange(0, B)
        inside = at < number
        acc = tl.zeros((B,), tl.float32)
        for sender in tl.static_range(J):
            row = tl.where(sender == node, own, parts + tl.full((), sender, tl.int64) * pitch)
            acc += tl.load(row + at, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            acc += tl.load(bias + at % width, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)
    if LAST:
        if is_last_program(ctl, False):
            _end(ctl, slot, epoch, used)


@triton.jit(do_not_specialize=["slot", "node", "m", "columns", "box_pitch", "rank", "full"])
def messages_gather_kernel(
    parts, own, out, number, pitch, full, inbox, head, ctl, inner, other, slot, node, rank, m, columns, box_pitch,
    J: tl.constexpr, B: tl.constexpr, L: tl.constexpr, LAST: tl.constexpr
):  # fmt: skip
    """out [J, number] = the messages of all other nodes, which this waits for, and ``own``, in the order of the nodes.

    ``number`` elements are ``full`` rows; what a chunk has less of is 0. The messages are ``pitch`` elements apart in ``parts``.
    """
    epoch, used = tl.load(ctl + EPOCH), tl.load(ctl + LAST_USE + slot)
    _all_came(inbox, head, ctl, inner, other, slot, node, rank, m, columns, box_pitch, used, J, L, LAST)
    pitch = pitch // 16 * 16  # a multiple, so that the compiler sees it
    blocks, width = tl.cdiv(number, B), (number // full).to(tl.int64)  # of a row; ``columns`` may have more in it than their number
    for block in range(tl.program_id(0), J * blocks, tl.num_programs(0)):
        sender = block // blocks
        at = (block % blocks).to(tl.int64) * B + tl.arange(0, B)
        rows = tl.minimum(tl.maximum(m - (sender * L + rank) * full, 0), full)
        row = tl.where(sender == node, own, parts + sender.to(tl.int64) * pitch)
        values = tl.load(row + at, mask=at < rows * width, other=0.0)
        tl.store(out + sender.to(tl.int64) * number + at, values, mask=at < number)
    _tell_mates(ctl, inner, rank, L)  # each program, as one's wait may run out, and the first one's not
    if LAST:
        if is_last_program(ctl, False):
            _end(ctl, slot, epoch, used)


@triton.jit
def _all_came(
    inbox, head, ctl, inner, other, slot, node, rank, m, columns, pitch, used, J: tl.constexpr, L: tl.constexpr, LAST: tl.constexpr
):  # fmt: skip
    """The messages of all other nodes are there, for this program. The first one looks at what they are; the others go on.

    LAST: also whether a rank of this node has given up in the call.
    """
    if tl.program_id(0) == 0:
        _came(inbox, head, ctl, inner, slot, node, (node + 1) % J, J - 1, rank, m, columns, pitch, used, J, L)
        if LAST:
            _look_back(ctl, inner, other, node, rank)
    else:
        for step in range(1, J):
            sender = (node + step) % J
            wait(head + CAME + slot * J + sender, (used + 1) * SIGNALS, ctl, node, WAIT_MESSAGE, sender, 0)  # (B)


@triton.jit
def _came(inbox, head, ctl, inner, slot, node, peer, peers, rank, m, columns, pitch, used, J: tl.constexpr, L: tl.constexpr):
    """The messages of node ``peer`` and the peers - 1 behind it are there, and of this call; the slot was ``used`` so often before.

    If there is none, or it is worth nothing, the other ranks of the node know that before this one can pass anything on.
    """
    ours = m.to(tl.int64) * 4294967296 + columns.to(tl.int64)
    for step in range(peers):
        sender = (peer + step) % J
        wait(head + CAME + slot * J + sender, (used + 1) * SIGNALS, ctl, node, WAIT_MESSAGE, sender, 0)  # (B)
        box = inbox + (slot * J + sender).to(tl.int64) * pitch
        theirs = tl.load(box + ROWS, volatile=True) * 4294967296 + tl.load(box + COLUMNS, volatile=True)
        bad = tl.load(box + BAD, volatile=True)
        if _agreed(((theirs != ours) | (bad != 0)) & (_failed(ctl) == 0)):
            what = tl.where(bad != 0, PEER_FAILED, WRONG_MESSAGE)
            _give_up(ctl, node, what, sender, ours, theirs, 0)
    _tell_mates(ctl, inner, rank, L)


@triton.jit
def _tell_mates(ctl, inner, rank, L: tl.constexpr):
    """The other ranks of the node, if a wait of this one has run out."""
    if L > 1:
        if _agreed(_failed(ctl)):
            for step in range(1, L):
                mate = tl.load(inner + BASES + (rank + step) % L).to(tl.pointer_type(tl.int64))
                tl.atomic_xchg(mate + ABORT, (rank + 1).to(tl.int64), sem="relaxed", scope="sys")


@triton.jit(do_not_specialize=["slot", "node", "rank"])
def messages_end_kernel(ctl, inner, other, slot, node, rank, QUIET: tl.constexpr):
    """The call ends, where something of it came behind its last wait for messages. One program.

    QUIET: what kernels put over a network may still be on its way, and the next call writes the places that it is put from.
    """
    if QUIET:
        quiet()
    _look_back(ctl, inner, other, node, rank)
    _end(ctl, slot, tl.load(ctl + EPOCH), tl.load(ctl + LAST_USE + slot))


@triton.jit
def _look_back(ctl, inner, other, node, rank):
    """If a rank of this node gave up in the call, it failed."""
    if _agreed((_given_up(inner, rank) | _given_up(other, rank)) & (_failed(ctl) == 0)):
        _give_up(ctl, node, NODE_FAILED, node, 0, 0, 0)


@triton.jit
def _end(ctl, slot, epoch, used):
    """The slot set was used once more. By one program, when no other has anything more to read."""
    tl.store(ctl + LAST_USE + slot, used + 1)
    tl.store(ctl + EPOCH, epoch + 1)
    tl.store(ctl + OWED, slot.to(tl.int64) + 1)
    tl.store(ctl + ARRIVED, 0)

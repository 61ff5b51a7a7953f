"""The kernels of messages between nodes, which only GPUs launch: each of their waits and stores, under the interpreter.

The puts are tested on GPUs by tests/test_nodes.py. What the kernels do with something taken away, tests/test_mutations.py judges by
`BODIES`. And what the host makes of the failures that kernels report.
"""

import contextlib
import itertools
from pathlib import Path

import pytest
import scenes
import torch
from ranks import TORCHRUN, run_ranks

import fluxlike
from fluxlike.kernels import lang, sync
from fluxlike.kernels import messages as kernels
from fluxlike.kernels import puts as device
from fluxlike.ops.group import GroupContext
from fluxlike.ops.messages import Puts
from fluxlike.runtime import dry, interpreter, world
from fluxlike.runtime.errors import CallMismatch, PeerTimeout

USED, PITCH, RANK = 5, 72, 2
#: What the word of a slot's messages is when it was used so often before.
CAME = USED * kernels.SIGNALS.value
NOT_THERE = -7


class Waits(Exception):
    """A kernel would wait: for which word, of whom, for what, until it is how large."""

    fluxlike_passthrough = True


class Memory:
    """Of a rank of one of J nodes, with a slot that was used before, the other one less often; and of two contexts of its node."""

    def __init__(self, nodes: int, node: int, slot: int) -> None:
        self.nodes, self.node, self.slot = nodes, node, slot
        self.head = torch.full((1 + 4 * nodes,), NOT_THERE, dtype=torch.int64)
        self.head[sync.ABORT.value] = 0
        self.ctl = torch.zeros(sync.BASES.value + nodes, dtype=torch.int64)
        self.ctl[sync.LAST_USE.value + slot], self.ctl[sync.LAST_USE.value + 1 - slot] = USED, NOT_THERE
        self.ctl[sync.BASES.value + node] = self.head.data_ptr()
        self.record = torch.zeros(8, dtype=torch.int64)
        self.ctl[sync.REPORT.value] = self.record.data_ptr()
        self.boxes = torch.full((2, nodes, PITCH), NOT_THERE, dtype=torch.int64)
        self.others = [(node + step) % nodes for step in range(1, nodes)]
        #: Of the contexts of the node: heads and control blocks.
        self.heads = [torch.zeros(4, dtype=torch.int64) for _ in range(2)]
        self.inner = [torch.zeros(sync.BASES.value + 3, dtype=torch.int64) for _ in range(2)]
        for ctl, head in zip(self.inner, self.heads, strict=True):
            ctl[sync.BASES.value + RANK] = head.data_ptr()

    def came(self, peer: int) -> int:
        return 1 + self.slot * self.nodes + peer

    def read(self, peer: int) -> int:
        return 1 + (2 + self.slot) * self.nodes + peer

    def run(self, kernel, *args, arrives=None, programs=1, **constants: int) -> tuple | None:
        """What the kernel waits for; None if it ends. ``arrives``: lets come what it waits for."""

        def spin(addresses, want, seen, what, peer, ctl, spins):
            assert ctl == self.ctl.data_ptr()
            if arrives is not None and spins == 0:
                return arrives()
            raise Waits((addresses[0] - self.head.data_ptr()) // 8, peer, what, want, seen)

        before, lang._spin_hook = lang._spin_hook, spin
        try:
            world.current().executor.launch(kernel, programs, args, constants, 1, 1)
        except Waits as waits:
            return waits.args
        finally:
            lang._spin_hook = before
        return None


def cases():
    for nodes, slot in itertools.product((2, 3), (0, 1)):
        for node in range(nodes):
            yield Memory(nodes, node, slot)


@contextlib.contextmanager
def assembly():
    """To give up takes some; one program runs here, so barriers and fences have nothing to do."""
    before = vars(interpreter.builder).get("create_inline_asm")
    interpreter.builder.create_inline_asm = scenes._assembly
    try:
        yield
    finally:
        del interpreter.builder.create_inline_asm
        if before is not None:
            interpreter.builder.create_inline_asm = before


def heads(this, peer, count, box, gives=0, how=0):
    """The arguments of a message for so many nodes."""
    where = box, this.head, this.ctl, *this.inner, numbers(this), this.slot, this.node, peer, RANK, 70, 90, gives
    return (kernels.messages_head_kernel, *where), dict(J=this.nodes, PEERS=count, GIVES=how)


def numbers(this):
    """Of the counterparts in the world."""
    return torch.tensor([10 * node + 3 for node in range(this.nodes)], dtype=torch.int32)


def comer(this, peer):
    """The arguments of a wait for the message of one node."""
    where = this.boxes, this.head, this.ctl, this.inner[0], this.slot, this.node, peer, RANK, 70, 90, PITCH
    return (kernels.messages_came_kernel, *where), dict(J=this.nodes, L=3)


def comers(this, kind, last=False, columns=90, full=0, own=None, bias=None, out=None):
    """The arguments of what waits for the messages of all, and adds or gathers so many rows of theirs."""
    parts = this.boxes.view(torch.bfloat16)[this.slot, :, 4 * kernels.HEADER.value :]
    own = parts if own is None else own
    where = this.boxes, this.head, this.ctl, *this.inner, this.slot, this.node, RANK, 70, columns, PITCH
    constants = dict(J=this.nodes, B=16, L=3, LAST=last)
    out = out if out is not None else torch.zeros(1)
    if kind == "gather":
        return (kernels.messages_gather_kernel, parts, own, out, full * columns, 4 * PITCH, full, *where), constants
    beside = out if bias is None else bias
    args = parts, own, beside, out, full * columns, columns, 4 * PITCH
    return (kernels.messages_sum_kernel, *args, *where), dict(BIAS=bias is not None, **constants)


def ending(this, quiet=False):
    return (kernels.messages_end_kernel, this.ctl, *this.inner, this.slot, this.node, RANK), dict(QUIET=quiet)


@contextlib.contextmanager
def putting(look=lambda: None):
    """The puts that kernels make; ``look``: is called in each."""
    made: list[tuple[int, ...]] = []

    def put(*what):
        look()
        made.append(what)

    device.set_hook(put)
    try:
        yield made
    finally:
        device.set_hook(None)


def waits_for_credits(group):
    """A head waits for the credit of each node that the message goes to, and of nobody else."""
    for this in cases():
        for peer, count in [(peer, 1) for peer in this.others] + [(this.others[0], len(this.others))]:
            args, constants = heads(this, peer, count, this.boxes[0, 0])
            this.head[1:] = NOT_THERE
            for receiver in [peer] if count == 1 else this.others:
                assert this.run(*args, **constants) == (this.read(receiver), receiver, sync.WAIT_CREDIT.value, USED, NOT_THERE)
                this.head[this.read(receiver)] = USED - 1
                assert this.run(*args, **constants) == (this.read(receiver), receiver, sync.WAIT_CREDIT.value, USED, USED - 1)
                assert (this.boxes == NOT_THERE).all()
                this.head[this.read(receiver)] = USED
            head, ctl = this.head.clone(), this.ctl.clone()
            assert this.run(*args, **constants) is None
            assert torch.equal(this.head, head) and torch.equal(this.ctl, ctl)
            this.boxes[0, 0] = NOT_THERE


def puts_it(group):
    """Behind the credits of all that get it the message, head and all, in parts that signal as much as one would."""
    sizes = [(False, 1, nbytes) for nbytes in (0, 300, 50000)] + [(True, 1, 0), (True, 1, 300), (True, 4, 300), (True, 16, 50000)]
    every = [(this, *size) for this in cases() for size in sizes]
    for this, near, parts, nbytes in [*every, (Memory(2, 0, 1), True, kernels.SIGNALS.value // 2, 50000)]:
        there, programs, start = numbers(this), parts + 2 * near, 48
        box, payload = torch.full((6400,), NOT_THERE, dtype=torch.int64), torch.zeros(4, dtype=torch.bfloat16)
        to = this.boxes[this.slot, this.node]
        where = box, payload, to, this.head, this.ctl, *this.inner, there, this.slot, this.node
        for peer, count in [(peer, 1) for peer in this.others] + [(this.others[0], len(this.others))]:
            receivers = [peer] if count == 1 else this.others[::-1]  # the nearest behind this one first
            args = kernels.messages_put_kernel, *where, peer, RANK, 70, 90, start, nbytes, this.nodes, count, 0
            for receiver in receivers:
                this.head[1:] = USED
                this.head[this.read(receiver)] = USED - 1
                with putting() as made:
                    want = this.read(receiver), receiver, sync.WAIT_CREDIT.value, USED, USED - 1
                    assert this.run(*args, programs=programs, NEAR=near) == want
                    assert not made
            this.head[1:] = USED
            heads: list = []
            with putting(lambda box=box, heads=heads: heads.append(box[:4].tolist())) as made:
                assert this.run(*args, programs=programs, NEAR=near) is None
            assert (box[3:] == NOT_THERE).all() and len(made) == (parts + near) * count
            assert {word for *_, word, _, _ in made} == {this.head.data_ptr() + 8 * this.came(this.node)}
            first = [put[-1] for put in made if put[0] == to.data_ptr()]
            assert first == [there[receiver] for receiver in receivers]
            for receiver in receivers:
                mine = sorted(put for put in made if put[-1] == there[receiver])
                assert sum(add for *_, add, _ in mine) == kernels.SIGNALS.value
                assert all(heads[made.index(put)] == [70, 90, 0, NOT_THERE] for put in mine if put[1] == box.data_ptr())
                whole = [(0, box.data_ptr(), 256)]  # where to, from where, bytes
                if not near:
                    whole = [(0, box.data_ptr(), 256 + nbytes)]
                elif nbytes:
                    whole.append((256, payload.data_ptr() + start, nbytes))
                assert joined([(put[0] - to.data_ptr(), *put[1:3]) for put in mine if put[2]]) == whole
                assert all(put[1] % 16 == 0 and put[0] % 16 == to.data_ptr() % 16 for put in mine if put[2])


def joined(pieces):
    """(to, from, bytes) of what lies behind each other, in both places; the head is apart."""
    found = [pieces[0]]
    for at, source, size in pieces[1:]:
        to, came, before = found[-1]
        if to + before == at != 256 and came + before == source:
            found[-1] = to, came, before + size
        else:
            found.append((at, source, size))
    return found


def gives_credits(group):
    """For the messages of the last call, whichever slot it used, to all that are to get them, and before any wait; or to nobody."""
    for this, near, slot in itertools.product(cases(), (False, True), (0, 1)):
        box, to = torch.full((640,), NOT_THERE, dtype=torch.int64), this.boxes[this.slot, this.node]
        where = box, box, to, this.head, this.ctl, *this.inner, numbers(this), this.slot, this.node, this.others[0], RANK, 70, 90
        spare, given = this.head.data_ptr() + 8 * (1 + 4 * this.nodes), 0 if near else 8
        word = this.head.data_ptr() + 8 * (1 + (2 + slot) * this.nodes + this.node)
        for owed, gives in itertools.product((0, 1 + slot), (0, this.nodes - 1)):
            expected = [(spare, spare, given, word, 1, 10 * other + 3) for other in this.others] if owed and gives else []
            put = (kernels.messages_put_kernel, *where, 0, 64, this.nodes, 1, gives), dict(NEAR=near, programs=3 if near else 1)
            for args, constants in (put, heads(this, this.others[0], 1, box, gives, 1 if near else 2)):
                this.ctl[kernels.OWED.value] = owed
                ctl = this.ctl.clone()
                for credit in (USED - 1, USED):
                    this.head[1:] = credit
                    with putting() as made:
                        waited = this.run(*args, **constants)
                    assert (waited is None) == (credit == USED)
                    assert [what for what in made if what[3] != this.head.data_ptr() + 8 * this.came(this.node)] == expected
                assert torch.equal(this.ctl, ctl)


def says(group):
    """The head of a message: the sizes, and that it is bad in each of five cases."""
    this = Memory(2, 1, 0)
    this.head[1:] = USED
    for bad in (None, (this.ctl, sync.FAILED), *[(ctl, sync.FAILED) for ctl in this.inner], *[(h, sync.ABORT) for h in this.heads]):
        if bad is not None:
            bad[0][bad[1].value] = 1
        boxes = this.boxes[1, 1], this.boxes[1, 0], this.boxes[0, 1]
        itself = *boxes, this.head, this.ctl, *this.inner, numbers(this), 0, 1, 0, RANK, 70, 90, 0, 256, 2, 1, 0
        by_itself = [((kernels.messages_put_kernel, *itself), dict(NEAR=near, programs=1 + 2 * near)) for near in (False, True)]
        for args, constants in (heads(this, 0, 1, this.boxes[1, 1]), *by_itself):
            box = this.boxes[1, 1].fill_(NOT_THERE)
            with putting():
                assert this.run(*args, **constants) is None
            assert box[:4].tolist() == [70, 90, int(bad is not None), NOT_THERE] and (box[3:] == NOT_THERE).all()
            assert (this.boxes.view(-1)[:-PITCH] == NOT_THERE).all()
        if bad is not None:
            bad[0][bad[1].value] = 0


def comes(group):
    """What waits for the messages of one node or of all looks at each only then, and changes nothing."""
    for this in cases():
        this.boxes[this.slot, :, :3] = torch.tensor([70, 90, 0])
        mates = [torch.zeros(4, dtype=torch.int64) for _ in range(3)]
        for number, mate in enumerate(mates):
            this.inner[0][sync.BASES.value + number] = mate.data_ptr()
            this.inner[1][sync.BASES.value + number] = mate.data_ptr()
        ctl = this.ctl.clone()
        for peer, every in itertools.product(this.others, ("", "sum", "gather")):

            def run(this=this, peer=peer, every=every, **how):
                args, constants = comers(this, every) if every else comer(this, peer)
                return this.run(*args, **constants, **how)

            want = CAME + kernels.SIGNALS.value
            this.head[1:] = want
            this.head[this.came(peer)] = want - 1
            assert run() == (this.came(peer), peer, sync.WAIT_MESSAGE.value, want, want - 1)
            if not every:
                this.head[1:] = NOT_THERE

            def arrives(this=this, peer=peer, want=want):
                this.boxes[this.slot, peer, 1] = 90
                this.head[this.came(peer)] = want

            this.boxes[this.slot, peer, 1] = 91  # of a call before
            with assembly():  # was it looked at too soon?
                assert run(arrives=arrives) is None
            assert torch.equal(this.ctl, ctl)
            assert run() is None
            assert torch.equal(this.ctl, ctl) and not any(mate.any() for mate in mates)
            this.ctl[sync.FAILED.value] = 1  # also by an earlier wait: the others of the node are told, this rank knows
            assert run() is None
            assert [mate[sync.ABORT.value].item() for mate in mates] == [RANK + 1, RANK + 1, 0]
            assert not any(mate[1:].any() for mate in mates)
            this.ctl.copy_(ctl)
            for mate in mates:
                mate.zero_()


def adds(group):
    """The messages of all nodes and the own rows, in fp32 and the order of the nodes, behind them the bias; once they are there."""
    rows, columns = 2, 15
    for this, biased in itertools.product(cases(), (False, True)):
        numbers = torch.randn(this.nodes, rows * columns, generator=torch.Generator().manual_seed(this.nodes)).bfloat16()
        own, numbers[this.node] = numbers[this.node].clone(), 1000.0
        bias = torch.arange(columns).bfloat16() if biased else None
        total = torch.zeros(rows * columns)
        for node in range(this.nodes):
            total += own if node == this.node else numbers[node]
        wanted = (total.view(rows, columns) + (bias if biased else 0)).bfloat16()
        _all_of(this, "sum", dict(columns=columns, full=rows, own=own, bias=bias), numbers, torch.empty_like(wanted), wanted)


def gathers(group):
    """The messages of all nodes and the own rows, in the order of the nodes, filled up with zeros; once they are there."""
    columns = 2
    for this, full in itertools.product(cases(), (5, 14, 15, 40)):  # of 70 rows: whole chunks, the last is short, some are empty
        rows = [min(max(70 - (node * 3 + RANK) * full, 0), full) for node in range(this.nodes)]
        numbers = torch.arange(1.0, 1 + this.nodes * full * columns).view(this.nodes, -1).bfloat16()
        own, numbers[this.node] = numbers[this.node].clone(), -1.0
        wanted = torch.zeros(this.nodes, full * columns, dtype=torch.bfloat16)
        for node, count in enumerate(rows):
            wanted[node, : count * columns] = (own if node == this.node else numbers[node])[: count * columns]
        _all_of(this, "gather", dict(columns=columns, full=full, own=own), numbers, torch.empty_like(wanted), wanted)


def _all_of(this, kind, how, numbers, out, wanted):
    """Before the last message is there ``out`` is left alone; then it is as wanted, by one program or several, which all wait."""
    head = 4 * kernels.HEADER.value
    this.boxes.view(torch.bfloat16)[this.slot, :, head : head + numbers.shape[1]] = numbers
    this.boxes[this.slot, :, :3] = torch.tensor([70, how["columns"], 0])
    ctl = this.ctl.clone()
    for programs, last, late in itertools.product((1, 3), (False, True), (*this.others, None)):
        this.ctl.copy_(ctl)
        this.head[1:] = CAME + kernels.SIGNALS.value
        out.fill_(NOT_THERE)
        args, constants = comers(this, kind, last, out=out, **how)
        if late is not None:
            this.head[this.came(late)] -= 1
        awaited: list = []
        before = lang._awaits_hook
        lang.set_awaits_hook(lambda *what, awaited=awaited: awaited.append(what))
        try:
            waited = this.run(*args, programs=programs, **constants)
        finally:
            lang.set_awaits_hook(before)
        if late is not None:
            assert waited[1] == late and (out == NOT_THERE).all() and torch.equal(this.ctl, ctl)
            continue
        assert waited is None
        want = CAME + kernels.SIGNALS.value
        assert awaited == [(this.head.data_ptr() + 8 * this.came(peer), want) for peer in this.others] * programs
        assert torch.equal(out, wanted), (out, wanted)
        uses = int(ctl[sync.LAST_USE.value + this.slot])
        assert this.ctl[sync.LAST_USE.value + this.slot] == uses + last and this.ctl[sync.ARRIVED.value] == 0
    this.ctl.copy_(ctl)


def ends(group):
    """The slot was used once more, also where the wait for the messages is the end: by one program, when all others are done."""
    for this, how, programs in itertools.product(cases(), ("alone", "sum", "gather"), (1, 3)):
        this.ctl[sync.LAST_USE.value + this.slot] = USED
        this.boxes[this.slot, :, :3], this.head[1:] = torch.tensor([70, 90, 0]), CAME + kernels.SIGNALS.value
        ctl, inner = this.ctl.clone(), [each.clone() for each in this.inner]
        alone, (args, constants) = how == "alone", comers(this, how, last=True)
        if alone:
            args, constants = ending(this, quiet=this.nodes == 2)
        epochs: list = []
        with putting(lambda this=this, epochs=epochs: epochs.append(int(this.ctl[sync.EPOCH.value]))) as made:
            assert this.run(*args, programs=1 if alone else programs, **constants) is None
        assert made == [()] * (alone and this.nodes == 2) and epochs == [int(ctl[sync.EPOCH.value])] * len(made)
        ctl[sync.LAST_USE.value + this.slot] += 1
        ctl[sync.EPOCH.value] += 1
        ctl[kernels.OWED.value] = 1 + this.slot  # credits are owed for these messages
        assert torch.equal(this.ctl, ctl) and all(map(torch.equal, this.inner, inner))


def gives_up(group):
    """A message of another call, or of a node that had given up, and an end after a rank of this node has: told, once."""
    for this in cases():
        this.boxes[:], this.head[1:], this.ctl[sync.EPOCH.value] = 0, 2 * CAME, 11
        record, peer = this.record, this.others[-1]
        this.inner[0][sync.BASES.value : sync.BASES.value + 3] = this.heads[0].data_ptr()

        def failed(kernel, *args, this=this, record=record, **constants):
            record.zero_()
            this.ctl[sync.FAILED.value] = 0
            with assembly():
                assert this.run(kernel, *args, **constants) is None
                said, told = record[:7].tolist(), int(this.heads[0][sync.ABORT.value])
                assert this.run(kernel, *args, **constants) is None
            assert record[:7].tolist() == said, "the first failure is what is told"
            assert this.ctl[sync.FAILED.value] == said[0]
            return said, told

        kinds = comer(this, peer), comers(this, "sum"), comers(this, "gather"), comers(this, "sum", last=True)
        for *sizes, bad in ((70, 90, 0), (70, 91, 0), (71, 90, 0), (70, 90, 1), (7, 9, 1)):
            this.boxes[this.slot, :, :3] = torch.tensor([70, 90, 0])
            this.boxes[this.slot, peer, :3] = torch.tensor([*sizes, bad])
            seen, what = sizes[0] * 2**32 + sizes[1], sync.PEER_FAILED if bad else sync.WRONG_MESSAGE
            right = (*sizes, bad) == (70, 90, 0)
            for args, constants in kinds:
                this.ctl[sync.EPOCH.value], this.ctl[sync.LAST_USE.value + this.slot] = 11, USED  # some end a call
                this.heads[0].zero_()
                wanted = (
                    [1, what.value, peer, 70 * 2**32 + 90, seen, 12, 0],
                    RANK + 1,
                )  # the others of the node are told in the same call
                assert failed(*args, **constants) == (([0] * 7, 0) if right else wanted)
        this.boxes[this.slot, :, :3] = torch.tensor([70, 90, 0])
        with_messages = comers(this, "sum", last=True), comers(this, "gather", last=True)
        for words, word in [(ctl, sync.FAILED) for ctl in this.inner] + [(head, sync.ABORT) for head in this.heads]:
            for args, constants in (ending(this), *with_messages):
                this.heads[0].zero_()
                words[word.value] = 1
                this.ctl[sync.EPOCH.value], this.head[1:] = 11, 99 * CAME  # of the calls that are tried here
                assert failed(*args, **constants)[0] == [1, sync.NODE_FAILED.value, this.node, 0, 0, 12, 0]
                words[word.value] = 0
        for args, constants in with_messages:  # it does so while a message is waited for

            def arrives(this=this, peer=peer):
                this.heads[1][sync.ABORT.value], this.head[this.came(peer)] = 1, 99 * CAME

            for head in this.heads:
                head.zero_()
            this.ctl[sync.EPOCH.value], this.head[this.came(peer)] = 11, 0
            assert failed(*args, arrives=arrives, **constants)[0] == [1, sync.NODE_FAILED.value, this.node, 0, 0, 12, 0]


BODIES = (waits_for_credits, puts_it, says, comes, adds, gathers, ends, gives_credits, gives_up)


@pytest.mark.skipif(TORCHRUN, reason="the kernels run under the interpreter, whatever the heap of the ranks")
@pytest.mark.parametrize("body", BODIES)
def test_a_kernel_does_what_it_says(body):
    run_ranks(body, 1)


def puts(op, nodes, rank, library=None):
    """What a rank of four sends in two calls, and its credits: (to, source, nbytes, signal, more, pe), (signal, pe)."""
    with dry.recording((9, 0), 4, rank, nodes, library) as records:
        if op == "gemm_rs":
            ctx = fluxlike.create_gemm_rs_context(64, 32, 64)
        else:
            ctx = fluxlike.create_ag_gemm_context(64, 32, 16)
        for _ in range(2):
            if op == "gemm_rs":
                fluxlike.gemm_rs(dry.tensor((64, 16), torch.bfloat16), dry.tensor((32, 16), torch.bfloat16), ctx)
            else:
                fluxlike.ag_gemm(dry.tensor((16, 16), torch.bfloat16), dry.tensor((32, 16), torch.bfloat16), ctx)
        post = ctx.messages
        heads = [record.args[0].data_ptr() for record in records if record.kernel is kernels.messages_head_kernel]
        if library is None:
            assert type(post) is Puts
            return post._puts.made, post._puts.added, heads, post
        assert not post._puts.made and not post._puts.added and not heads
        made, gave = [], []
        for record in records:
            if record.kernel is kernels.messages_put_kernel:
                box, _, to, head, _, _, _, there, slot, node, peer, _, m, columns, _, nbytes, count, peers, gives = record.args
                assert (m, columns, count) == (64, 32 if op == "gemm_rs" else 16, nodes)
                assert record.constants == {"NEAR": True, **device.library(library)} and there is post._there
                word = head.data_ptr() + 8 * (1 + slot * nodes + node)
                pes = [post._pes[(peer + step) % nodes] for step in range(peers)]
                made += [(to.data_ptr(), box.data_ptr(), 256 + nbytes, word, kernels.SIGNALS.value, pe) for pe in pes]
                heads.append(box.data_ptr())
                gave.append(gives)
        assert post.by_kernels == len(made)
        return made, gave, heads, post


@pytest.mark.parametrize("op", ("gemm_rs", "ag_gemm"))
@pytest.mark.parametrize("nodes", (2, 4))
@pytest.mark.parametrize("library", (None, Path("there")))
def test_who_gets_what(op, nodes, library):
    """Every counterpart gets one message a call, in its slot for this rank, with its signal, and the credit for the one it sent."""
    each = 4 // nodes
    for rank in range(4):
        made, credited, heads, post = puts(op, nodes, rank, library)
        node, others, inbox, head = rank // each, nodes - 1, post.inbox, post.head.data_ptr()
        counterparts = {rank % each + each * other for other in range(nodes)} - {rank}
        assert len(made) == 2 * others and post._pes == [rank % each + each * other for other in range(nodes)]
        by_kernels = [others, *[0] * (others - 1)] if op == "gemm_rs" else [others]  # by the first of a call, for the one before
        assert len(credited) == 2 * others if library is None else credited == 2 * by_kernels
        for call, slot in enumerate((1, 0)):
            mine = made[call * others : (call + 1) * others]
            assert {pe for *_, pe in mine} == counterparts
            assert {to for to, *_ in mine} == {inbox[slot, node].data_ptr()}
            assert {put[3:5] for put in mine} == {(head + 8 * (1 + slot * nodes + node), kernels.SIGNALS.value)}
            if library is None:
                word = head + 8 * (1 + (2 + slot) * nodes + node)
                assert set(credited[call * others : (call + 1) * others]) == {(word, pe) for pe in counterparts}
            sources = [source for _, source, *_ in mine]
            own = heads[call * len(heads) // 2 :][: len(heads) // 2]
            assert sources == own if op == "gemm_rs" else set(sources) == set(own), "each message with a head of its own"
            assert len(set(sources)) == (others if op == "gemm_rs" else 1)
            assert all(nbytes == 256 + 16 * (32 if op == "gemm_rs" else 16) * 2 for _, _, nbytes, *_ in mine)


@pytest.mark.parametrize("op", ("gemm_rs", "ag_gemm"))
@pytest.mark.parametrize("who, near, together, by_kernels", [
    ("auto", True, True, True), ("auto", True, False, False), ("auto", False, True, False), ("device", False, True, True),
    ("device", False, False, True), ("device", True, False, True), ("host", True, True, False),
])  # fmt: skip
def test_who_puts(op, who, near, together, by_kernels, monkeypatch):
    """FLUXLIKE_PUTS; auto: kernels those beside which nothing runs, where one host's GPUs are nodes. From where they are put."""
    monkeypatch.setenv("FLUXLIKE_PUTS", who)
    monkeypatch.setattr(dry.DryExecutor, "one_host", near)
    with dry.recording((9, 0), 2, 0, 2, Path("there")) as records:
        ctx = fluxlike.create_gemm_rs_context(60, 64, 32) if op == "gemm_rs" else fluxlike.create_ag_gemm_context(60, 64, 32)
        ctx.together = together
        x, w = dry.tensor((60 if op == "gemm_rs" else 30, 32), torch.bfloat16), dry.tensor((64, 32), torch.bfloat16)
        for _ in range(3):
            fluxlike.gemm_rs(x, w, ctx) if op == "gemm_rs" else fluxlike.ag_gemm(x, w, ctx)
        post = ctx.messages
        assert getattr(post, "by_kernels", 0) == 3 * by_kernels and len(post._puts.made) == 3 * (not by_kernels)
        launched = [record for record in records if record.kernel is kernels.messages_put_kernel]
        assert len(launched) == 3 * by_kernels
        by_host = who == "host" or (who == "auto" and not near)
        others = {record.kernel: record for record in records}
        if not by_kernels:
            head = others[kernels.messages_head_kernel]
            assert head.constants["GIVES"] == (0 if by_host else 1) and head.args[-1] == 1
        assert len(post._puts.added) == 3 * by_host
        assert {record.constants["NEAR"] for record in launched} <= {near}
        ended = others.get(kernels.messages_end_kernel)
        assert (ended is None) == ((op == "gemm_rs" or together) and (near or by_host))
        assert ended is None or ended.constants["QUIET"] == (not near and not by_host)
        placed = post.place(1, 30, 64 if op == "gemm_rs" else 32, torch.bfloat16)
        for record in launched:
            payload, start, nbytes = record.args[1], record.args[14], record.args[15]
            assert nbytes == placed.numel() * 2
            rows = near and together and op == "gemm_rs"  # the second half of all partial sums
            assert start == (30 * 64 * 2 if rows else 0)
            where = placed if not near or (op == "gemm_rs" and not together) else x
            assert rows or payload.data_ptr() == where.data_ptr()


@pytest.mark.parametrize("op", ("gemm_rs", "ag_gemm"))
def test_payload_that_kernels_cannot_take_from_where_it_lies(op, monkeypatch):
    """It is copied to where messages are sent from: rows that do not begin at 16 bytes, rows that lie apart."""
    with dry.recording((9, 0), 2, 0, 2, Path("there")) as records:
        if op == "gemm_rs":
            ctx, w = fluxlike.create_gemm_rs_context(6, 9, 16), dry.tensor((9, 8), torch.bfloat16)
            calls = [dry.tensor((6, 8), torch.bfloat16)]
        else:
            ctx, w = fluxlike.create_ag_gemm_context(6, 9, 16), dry.tensor((9, 16), torch.bfloat16)
            apart, shifted = dry.tensor((3, 32), torch.bfloat16)[:, :16], dry.tensor((4, 16), torch.bfloat16).view(-1)[1:49]
            calls = [apart, shifted.view(3, 16), dry.tensor((3, 16), torch.bfloat16)]
        ctx.together = True
        for x in calls:
            fluxlike.gemm_rs(x, w, ctx) if op == "gemm_rs" else fluxlike.ag_gemm(x, w, ctx)
        sent = [record.args[1] for record in records if record.kernel is kernels.messages_put_kernel]
        assert len(ctx.messages._puts.made) == (1 if op == "gemm_rs" else 0)
        placed = ctx.messages.outbox.data_ptr() + 256
        assert [t.data_ptr() == placed for t in sent] == ([] if op == "gemm_rs" else [True, True, False])


def test_a_library_that_does_not_link(monkeypatch):
    """It is said why, and what does without; the heap is as it was."""

    def ready(*_):
        raise ValueError("Failed to parse library at there")

    with dry.recording((9, 0), 2, 0, 2, Path("there")):
        monkeypatch.setattr(dry.DryExecutor, "ready", ready)
        with pytest.raises(RuntimeError, match=r"gemm_rs: .*\(ValueError: Failed to parse library.*set FLUXLIKE_PUTS=host"):
            fluxlike.create_gemm_rs_context(64, 32, 32)
        assert world.current().heap.in_use == 0
        monkeypatch.setenv("FLUXLIKE_PUTS", "host")
        with fluxlike.create_gemm_rs_context(64, 32, 32):
            assert world.current().heap.in_use > 0


def test_no_library_to_put_by(monkeypatch, caplog):
    """Asked for, it is missed, by name, and the heap is as it was; auto does without, and says so."""
    with dry.recording((9, 0), 2, 0, 2):
        monkeypatch.setenv("FLUXLIKE_PUTS", "device")
        with pytest.raises(RuntimeError, match=r"FLUXLIKE_PUTS=device.*libnvshmem_device.bc.*\(9, 0\).*pip install.*unset it"):
            fluxlike.create_gemm_rs_context(64, 32, 32)
        assert world.current().heap.in_use == 0
        monkeypatch.setenv("FLUXLIKE_PUTS", "auto")
        with fluxlike.create_gemm_rs_context(64, 32, 32) as ctx:
            assert type(ctx.messages) is Puts
        assert "no libnvshmem_device.bc, so the host puts" in caplog.text and "FLUXLIKE_PUTS=host" in caplog.text
        monkeypatch.setenv("FLUXLIKE_PUTS", "card")
        with pytest.raises(ValueError, match="FLUXLIKE_PUTS='card' is not one of host, device, auto"):
            fluxlike.create_gemm_rs_context(64, 32, 32)


#: Failures as kernels report them: in the context of the node, in what it exchanges with, between nodes; and who is named.
MESSAGE, SLOW, MATE = (sync.WAIT_MESSAGE, 1, 4, 3, 4), (sync.WAIT_PARTIAL, 1, 4, 3, 4), "because rank 1 gave up first"
AWAY, NEAR = "waited 60 s for rank 2 on node 1: its message of call 4", "waited 60 s for rank 1: its partial sums of call 4"
CAUSES = {
    "one of the node has, another node does not come": ((*SLOW, 2), None, (*MESSAGE, 0), AWAY),
    "the same in an exchange": (None, (*SLOW, 2), (*MESSAGE, 0), AWAY),
    "one of the node has, the counterpart has": ((*SLOW, 2), None, (*MESSAGE, 2), "stopped waiting for rank 2 on node 1"),
    "another node's is worth nothing": ((*SLOW, 2), None, (sync.PEER_FAILED, 1, 4, 4, 4, 0), "stopped waiting for rank 2 on"),
    "another call there": ((*SLOW, 2), None, (sync.WRONG_MESSAGE, 1, 8, 6, 4, 0), "CallMismatch"),
    "one of the node does not come": ((*SLOW, 0), None, (sync.NODE_FAILED, 0, 0, 0, 4, 0), NEAR),
    "nor another node": ((*SLOW, 0), None, (*MESSAGE, 2), NEAR),
    "one of the node has": ((*SLOW, 2), None, (sync.NODE_FAILED, 0, 0, 0, 4, 0), MATE),
    "only between nodes": (None, None, (*MESSAGE, 0), AWAY),
}


@pytest.mark.parametrize("how", CAUSES)
@pytest.mark.parametrize("end", ("call", "check", "close"))
def test_of_several_failures_the_cause_is_told(how, end, monkeypatch):
    """By a call, a check or the closing, once; what only says that another rank gave up is of no use where this one knows why."""
    *reports, named = CAUSES[how]
    monkeypatch.setenv("FLUXLIKE_TIMEOUT_S", "60")
    for name, answer in (("diagnose", None), ("freeze", None), ("where", "")):
        monkeypatch.setattr(dry.DryBoard, name, lambda self, *_, answer=answer: answer, raising=False)
    monkeypatch.setattr(dry.DryExecutor, "post", lambda *_: None, raising=False)
    monkeypatch.setattr(dry.DryExecutor, "post_to", lambda *_: None, raising=False)
    monkeypatch.setattr(GroupContext, "gave_up", lambda self: 2)
    with dry.recording((9, 0), 4, 0, 2):
        ctx = fluxlike.create_gemm_rs_context(64, 32, 64)
        for report, said in zip((ctx.inner.report, ctx.inner.inner[-1].report, ctx.messages._report), reports, strict=True):
            if said is not None:
                report[1:7] = torch.tensor([said[0].value, *said[1:]])
                report[0] = 1
        x, w = dry.tensor((64, 16), torch.bfloat16), dry.tensor((32, 16), torch.bfloat16)
        act = {"call": lambda: fluxlike.gemm_rs(x, w, ctx), "check": ctx.check, "close": ctx.close}[end]
        with pytest.raises((PeerTimeout, CallMismatch)) as raised:
            act()
        assert named in f"{type(raised.value).__name__}: {raised.value}"
        ctx.close()  # it has been said

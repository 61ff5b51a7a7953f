"""The kernels of messages between nodes, which only GPUs launch: each of their waits and stores, under the interpreter.

What the kernels do with something taken away, tests/test_mutations.py judges by `BODIES`. Whole calls are tests/test_nodes.py's,
with puts that are emulated or, on GPUs, NVSHMEM's; what the host queues, and says of failures, is test_puts.py's.
"""

import contextlib
import itertools

import pytest
import scenes
import torch
from ranks import TORCHRUN, run_ranks

from fluxlike.kernels import lang, sync
from fluxlike.kernels import messages as kernels
from fluxlike.kernels import puts as device
from fluxlike.runtime import interpreter, world

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
        #: The heads of the other ranks of the node, which a kernel tells only if something failed.
        self.mates = torch.zeros(4, dtype=torch.int64)
        for ctl, head in zip(self.inner, self.heads, strict=True):
            ctl[sync.BASES.value :] = self.mates.data_ptr()
            ctl[sync.BASES.value + RANK] = head.data_ptr()

    def came(self, peer: int) -> int:
        return 1 + self.slot * self.nodes + peer

    def read(self, peer: int) -> int:
        return 1 + (2 + self.slot) * self.nodes + peer

    def run(self, kernel, *args, arrives=None, programs=1, **constants: int) -> tuple | None:
        """What the kernel waits for; None if it ends. ``arrives``: lets come what it waits for."""
        self.awaited: list[tuple[int, int]] = []

        def spin(want, seen, what, peer, ctl, spins):
            assert ctl == self.ctl.data_ptr()
            if arrives is not None and spins == 0:
                return arrives()
            raise Waits((self.awaited[-1][0] - self.head.data_ptr()) // 8, peer, what, want, seen)

        before = lang._spin_hook, lang._awaits_hook
        lang.set_spin_hook(spin)
        lang.set_awaits_hook(lambda *what: self.awaited.append(what))
        try:
            world.current().executor.launch(kernel, programs, args, constants, 1, 1)
        except Waits as waits:
            return waits.args
        finally:
            lang._spin_hook, lang._awaits_hook = before
        return None


def cases():
    for nodes, slot in itertools.product((2, 3), (0, 1)):
        for node in range(nodes):
            yield Memory(nodes, node, slot)


#: Whether what takes long takes each node with one of the slots only: set for mutants, of which each goes through all bodies.
HALF = False


def most():
    """`cases`, or half of them, for what takes long."""
    return (this for this in cases() if not HALF or this.slot == this.node % 2)


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


def comers(this, kind, last=False, columns=90, full=0, own=None, bias=None, out=None, refused=0):
    """The arguments of what waits for the messages of all, and adds or gathers so many rows of theirs; all have refused calls."""
    parts = this.boxes.view(torch.bfloat16)[this.slot, :, 4 * kernels.HEADER.value :]
    own = parts if own is None else own
    where = this.boxes, this.head, this.ctl, *this.inner, this.slot, this.node, RANK, 70, columns + refused * 2**24, PITCH
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
    every = [(this, *size) for this in most() for size in sizes]
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
    for this, near, slot in itertools.product(most(), (False, True), (0, 1)):
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
    for this, biased in itertools.product(most(), (False, True)):
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
    # of 70 rows: whole chunks, the last is short, some are empty; and what is said beside the columns is not their number
    for this, (full, refused) in itertools.product(most(), ((5, 0), (13, 0), (15, 0), (40, 0), (13, 3))):
        rows = [min(max(70 - (node * 3 + RANK) * full, 0), full) for node in range(this.nodes)]
        numbers = torch.arange(1.0, 1 + this.nodes * full * columns).view(this.nodes, -1).bfloat16()
        own, numbers[this.node] = numbers[this.node].clone(), -1.0
        wanted = torch.zeros(this.nodes, full * columns, dtype=torch.bfloat16)
        for node, count in enumerate(rows):
            wanted[node, : count * columns] = (own if node == this.node else numbers[node])[: count * columns]
        how = dict(columns=columns, full=full, own=own, refused=refused)
        _all_of(this, "gather", how, numbers, torch.empty_like(wanted), wanted)


def _all_of(this, kind, how, numbers, out, wanted):
    """Before the last message is there ``out`` is left alone; then it is as wanted, by one program or several, which all wait."""
    head = 4 * kernels.HEADER.value
    this.boxes.view(torch.bfloat16)[this.slot, :, head : head + numbers.shape[1]] = numbers
    this.boxes[this.slot, :, :3] = torch.tensor([70, how["columns"] + how.get("refused", 0) * 2**24, 0])
    ctl = this.ctl.clone()
    for programs, last, late in itertools.product((1, 3), (False, True), (*this.others, None)):
        this.ctl.copy_(ctl)
        this.head[1:] = CAME + kernels.SIGNALS.value
        out.fill_(NOT_THERE)
        args, constants = comers(this, kind, last, out=out, **how)
        if late is not None:
            this.head[this.came(late)] -= 1
        waited = this.run(*args, programs=programs, **constants)
        if late is not None:
            assert waited[1] == late and (out == NOT_THERE).all() and torch.equal(this.ctl, ctl)
            continue
        assert waited is None
        want = CAME + kernels.SIGNALS.value
        assert this.awaited == [(this.head.data_ptr() + 8 * this.came(peer), want) for peer in this.others] * programs
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
    for this in most():
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


#: By what they launch; those that take least first, as a mutant goes through all that reach it until one catches it.
BODIES = {
    says: ("head", "put"),
    waits_for_credits: ("head",),
    ends: ("end", "sum", "gather"),
    comes: ("came", "sum", "gather"),
    adds: ("sum",),
    gathers: ("gather",),
    puts_it: ("put",),
    gives_credits: ("head", "put"),
    gives_up: ("came", "sum", "gather", "end"),
}


def launches(group, name):
    """What a body asks of the kernels, and which it launches."""
    body = globals()[name]
    launched, run = set(), Memory.run
    Memory.run = lambda this, kernel, *args, **named: launched.add(kernel.fn.__name__) or run(this, kernel, *args, **named)
    try:
        body(group)
    finally:
        Memory.run = run
    assert launched == {f"messages_{name}_kernel" for name in BODIES[body]}


@pytest.mark.skipif(TORCHRUN, reason="the kernels run under the interpreter, whatever the heap of the ranks")
@pytest.mark.parametrize("body", BODIES)
def test_a_kernel_does_what_it_says(body):
    run_ranks(launches, 1, name=body.__name__)

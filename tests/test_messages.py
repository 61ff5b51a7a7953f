"""The kernels of messages between nodes, which only GPUs launch: each of their waits and stores, under the interpreter.

What a wrong message leads to, and the puts, are tested on GPUs by tests/test_nodes.py.
"""

import itertools

import pytest
import torch
from ranks import run_ranks

from fluxlike.kernels import lang, sync
from fluxlike.kernels import messages as kernels
from fluxlike.runtime import world

USED, PITCH = 5, 40
NOT_THERE = -7


class Waits(Exception):
    """A kernel would wait: for which word, of whom, for what, until it is how large."""

    fluxlike_passthrough = True


class Memory:
    """Of a rank of one of J nodes, with a slot that was used before, and the other one less often."""

    def __init__(self, nodes: int, node: int, slot: int) -> None:
        self.nodes, self.node, self.slot = nodes, node, slot
        self.head = torch.full((1 + 4 * nodes,), NOT_THERE, dtype=torch.int64)
        self.head[sync.ABORT.value] = 0
        self.ctl = torch.zeros(sync.BASES.value + nodes, dtype=torch.int64)
        self.ctl[sync.LAST_USE.value + slot], self.ctl[sync.LAST_USE.value + 1 - slot] = USED, NOT_THERE
        self.ctl[sync.BASES.value + node] = self.head.data_ptr()
        self.boxes = torch.full((2, nodes, PITCH), NOT_THERE, dtype=torch.int64)
        self.others = [(node + step) % nodes for step in range(1, nodes)]

    def came(self, peer: int) -> int:
        return 1 + self.slot * self.nodes + peer

    def read(self, peer: int) -> int:
        return 1 + (2 + self.slot) * self.nodes + peer

    def run(self, kernel, *numbers: int) -> tuple | None:
        """What the kernel waits for; None if it ends."""

        def spin(addresses, want, seen, what, peer, ctl, spins):
            assert ctl == self.ctl.data_ptr()
            raise Waits((addresses[0] - self.head.data_ptr()) // 8, peer, what, want, seen)

        before, lang._spin_hook = lang._spin_hook, spin
        try:
            args = (self.boxes, self.head, self.ctl, self.slot, self.node, *numbers)
            world.current().executor.launch(kernel, 1, args, {"J": self.nodes}, 1, 1)
        except Waits as waits:
            return waits.args
        finally:
            lang._spin_hook = before
        return None


def begins(group):
    """It waits for the credit of each other node, and of nobody else, and says in each message what the call is."""
    for nodes, slot in itertools.product((2, 3), (0, 1)):
        for node in range(nodes):
            this = Memory(nodes, node, slot)
            args = (kernels.messages_begin_kernel, 70, 90, nodes - 1, PITCH)
            for peer in this.others:
                assert this.run(*args) == (this.read(peer), peer, sync.WAIT_CREDIT.value, USED, NOT_THERE)
                assert (this.boxes == NOT_THERE).all()
                this.head[this.read(peer)] = USED - 1
                assert this.run(*args) == (this.read(peer), peer, sync.WAIT_CREDIT.value, USED, USED - 1)
                this.head[this.read(peer)] = USED
            head, ctl = this.head.clone(), this.ctl.clone()
            assert this.run(*args) is None
            right = torch.full((2 * nodes, PITCH), NOT_THERE)
            right[: nodes - 1, :2] = torch.tensor([70, 90])
            assert torch.equal(this.boxes.view(-1, PITCH), right)
            assert torch.equal(this.head, head) and torch.equal(this.ctl, ctl)


def comes(group):
    """It waits for the messages that it is told to, and after the last one the slot was used once more."""
    for nodes, slot in itertools.product((2, 3), (0, 1)):
        for node in range(nodes):
            this = Memory(nodes, node, slot)
            this.boxes[slot, :, :2] = torch.tensor([70, 90])
            for number, peer in itertools.product(range(1, nodes), this.others):
                if number == 2 and peer != this.others[0]:
                    continue
                asked = [(peer + step) % nodes for step in range(number)]
                this.head[1:] = NOT_THERE
                for waited in asked:
                    args = (kernels.messages_came_kernel, peer, number, 0, 70, 90, PITCH)
                    this.head[this.came(waited)] = USED
                    assert this.run(*args) == (this.came(waited), waited, sync.WAIT_MESSAGE.value, USED + 1, USED)
                    this.head[this.came(waited)] = USED + 1
                ctl = this.ctl.clone()
                assert this.run(*args) is None
                assert torch.equal(this.ctl, ctl)
            assert this.run(kernels.messages_came_kernel, this.others[0], nodes - 1, 1, 70, 90, PITCH) is None
            ctl[sync.LAST_USE.value + slot] += 1
            ctl[sync.EPOCH.value] += 1
            assert torch.equal(this.ctl, ctl)


@pytest.mark.parametrize("body", (begins, comes))
def test_a_kernel_waits_for_what_it_says(body):
    run_ranks(body, 1)

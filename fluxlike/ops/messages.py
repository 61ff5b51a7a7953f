"""Messages between counterparts on different nodes, by puts of NVSHMEM on GPUs, by gloo over TCP on CPUs: what both have in common.

A rank has a counterpart on every other node, and sends each one message a call. This is what both kinds do::

    begin(m, columns)                   a call begins; its counterparts must be at one of the same sizes
    place(node, rows, columns, dtype)   where the payload for a node is to be written
    send(place, node)                   it is on its way, beside what follows; the place is left alone until the call ends
    send_rows(whole, first, rows, node) the same of rows that are elsewhere; nothing runs beside
    send_to_all(x, alone)               the same payload to all others, the one before this first; alone: nothing runs beside
    places(rows, columns, dtype)        [J, rows, columns]: where the payloads of all nodes come, and a place for the own one
    receive(node, place)                what follows may read the payload of this node
    total(parts, own, y, bias)          all of them are waited for and added; no call inside the node follows
    gather(x, rows, full)               all of them are waited for and put together; what follows may read only that
    read(node)                          what follows does not read it any more
    end()                               all that was sent has left its place
    join()                              the same of a call that ends in the middle: the stream has no work beside it any more

*Puts.* See `puts`, and where kernels put and give the credits `kernel_puts`.

*Letters.* Before its payload a rank sends what it is calling: number, operation, sizes. One that receives something else raises
CallMismatch, one that waits too long PeerTimeout.

*Refused calls* have no number, so both kinds also say how many this rank has refused: else who went on behind one would be taken
for who makes it.

Source: hierarchical exchange between counterparts is how NCCL and Triton-distributed's inter-node GEMM+ReduceScatter cross the
network.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..runtime.control import ControlGroup
from ..runtime.errors import CallMismatch, PeerTimeout
from ..runtime.wording import counted
from . import cost, tiling
from .context import Context

OPS = ("gemm_rs", "ag_gemm")
#: The number of a call that will not come.
GAVE_UP = -1


class Messages:
    """What both kinds know: who this rank's counterparts are. ``bytes``: of payloads sent so far; ``inner``: the node's context.

    As expected: ``rate``, bytes a second from this rank to other nodes; ``latency``, seconds that a message takes beside that, and
    ``latency_alone``, where nothing runs beside it.
    """

    #: Side streams of calls.
    sides: tuple[Any, ...] = ()
    rate = cost.NETWORK_RATE
    latency = latency_alone = cost.PUT

    def __init__(self, op: str, control: ControlGroup, inner: Context) -> None:
        self.op, self.control, self.bytes, self._inner = op, control, 0, inner
        self.node, self.nodes = control.node, control.nodes
        self._refused_before = control.refused
        count = len(self.nodes)
        #: The other nodes, from the next one on, and from the one before on.
        self.next = [(self.node + distance) % count for distance in range(1, count)]
        self.before = self.next[::-1]

    def refused(self) -> int:
        """Calls that this rank has refused since its ranks met to make this."""
        return self.control.refused - self._refused_before

    def peer(self, node: int) -> int:
        """The place in the group of this rank's counterpart on a node."""
        return self.nodes[node][self.control.local.rank]

    def join(self) -> None:
        """What is sent beside the current stream has left its place behind this on it; of nothing beside it, nothing is to do."""

    def abandon(self) -> None:
        """As `Held.abandon`."""

    def named(self, node: int) -> str:
        return f"rank {self.control.ranks[self.peer(node)]} on node {node}"

    def me(self) -> str:
        return f"rank {self.control.ranks[self.control.rank]}"

    def differ(self, node: int, ours: str, theirs: str) -> CallMismatch:
        return CallMismatch(
            f"{self.me()} is at call {ours} and {self.named(node)} at call {theirs}; all ranks of a group must make the same "
            f"calls, with the same sizes, in the same order. {self._inner.remedy}"
        )

    def gave_up(self, node: int) -> PeerTimeout:
        return PeerTimeout(
            f"{self.op}: {self.me()} stopped waiting for {self.named(node)}, because that one gave up first; its message names the "
            f"cause. {self._inner.remedy}",
            told=1,
        )


class Letters(Messages):
    """Over TCP, by gloo, for tensors of CPUs."""

    def __init__(self, op: str, control: ControlGroup, nbytes: int, sending: int, inner: Context) -> None:
        """``nbytes``, ``sending``, ``inner``: see `Puts`; letters need no memory that is made before."""
        super().__init__(op, control, inner)
        #: Of its messages: what a failed context has left unread is not for the next one.
        self._tag = 2 * control.spanning
        self._number = 0
        self._sent: list[Callable[[], None]] = []
        #: Keeps messages that nobody waits for until they are sent.
        self._last_words: list[Any] = []

    def begin(self, m: int, columns: int) -> None:
        self._number += 1
        self.header = torch.tensor([self._number, OPS.index(self.op), m, columns, self.refused()], device="cpu")
        self._sent.clear()

    def place(self, node: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=dtype, device="cpu")

    def places(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        number, count = rows * columns, len(self.nodes)
        places = torch.empty(count, tiling.round_up(number, 16), dtype=dtype, device="cpu")
        return places[:, :number].view(count, rows, columns)

    def send(self, place: torch.Tensor, node: int) -> None:
        # as one dimension first: a single column may have any stride, and is no less contiguous to torch
        for tag, message in enumerate((self.header, place.view(-1).view(torch.uint8))):
            if message.numel():
                self._sent.append(self.control.send(message, self.peer(node), self._tag + tag, self.op))
        self.bytes += place.numel() * place.element_size()

    def send_rows(self, whole: torch.Tensor, first: int, rows: int, node: int) -> None:
        self.send(whole[first : first + rows], node)

    def send_to_all(self, x: torch.Tensor, alone: bool) -> None:
        x = x.contiguous()
        for node in self.before:
            self.send(x, node)

    def total(self, parts: torch.Tensor, own: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None) -> None:
        """y = the sum of ``parts`` [J, rows, N] over the nodes (+ bias), with ``own`` [rows, N] for that of this one."""
        for node in self.next:
            self.receive(node, parts[node])
        total = torch.zeros(y.shape, dtype=torch.float32, device=y.device)
        for node in range(len(self.nodes)):
            total += own if node == self.node else parts[node]
        y.copy_(total if bias is None else total + bias)

    def gather(self, x: torch.Tensor, rows: Sequence[int], full: int) -> torch.Tensor:
        """[J · full, K]: ``rows[j]`` of node j, filled up with zeros; x [rows, K] are those of this one."""
        shards = {node: self.place(node, rows[node], x.shape[1], x.dtype) for node in self.next}
        for node, shard in shards.items():
            self.receive(node, shard)
        shards[self.node] = x
        return torch.cat([filled(shards[node], full) for node in range(len(self.nodes))])

    def receive(self, node: int, place: torch.Tensor) -> None:
        source, theirs = self.peer(node), torch.empty_like(self.header)
        self.control.receive(theirs, source, self._tag, self.op)
        if theirs[0] == GAVE_UP:
            raise self.gave_up(node)
        if not torch.equal(theirs, self.header):
            raise self.differ(node, _said(self.header), _said(theirs))
        if place.numel():
            self.control.receive(place.view(-1).view(torch.uint8), source, self._tag + 1, self.op)

    def read(self, node: int) -> None:
        """Its memory is of this call only."""

    def end(self) -> None:
        for sent in self._sent:
            sent()

    def give_up(self) -> None:
        """Let the counterparts know that nothing more comes."""
        self.header = torch.tensor([GAVE_UP, 0, 0, 0, 0], device="cpu")
        for node in self.next:
            with contextlib.suppress(RuntimeError):  # of one that is gone
                self._last_words.append(self.control.send(self.header, self.peer(node), self._tag, self.op))

    def failure(self) -> Exception | None:
        """Failures are raised where they happen."""
        return None

    def quiet(self) -> None:
        """Who closes has received what was sent."""

    def close(self, everyone: bool) -> None:
        """No memory of its own."""


def filled(x: torch.Tensor, rows: int) -> torch.Tensor:
    """x with so many rows."""
    return x if len(x) == rows else torch.cat([x, x.new_zeros(rows - len(x), x.shape[1])])


def _said(header: torch.Tensor) -> str:
    number, op, m, columns, refused = header.tolist()
    return f"{number} of {OPS[op]} with {sizes_said(m, columns, refused)}"


def sizes_said(m: int, columns: int, refused: int) -> str:
    before = f", having refused {refused} before by errors of its own" if refused else ""
    return f"M={m} and {counted(columns, 'column')}{before}"

"""Messages between counterparts on different nodes by NVSHMEM's puts. Their design record; see `messages` for what they are for.

On each rank a block of the symmetric heap holds two slots of J messages to receive, those to send, and a head of words.
A message is 256 bytes, the head, and the payload behind it; one put takes both. A CUDA graph freezes the slot
and the sizes, and no number of a call: the words are counters, by ADD, and what they are compared with is counted on the device.

* (A) the credit: the receiver's stream adds one to the word (slot, receiver) of the sender behind the last kernel that reads the
  message → ``wait`` of the kernel that writes the head, for as many as the slot was used before. The counterpart's own message of
  the call between would say as much if slots took turns; but in a graph of one call each replay uses the same slot.
* (B) put-with-signal: NVSHMEM adds `SIGNALS` to the word (slot, sender) of the receiver behind the payload → ``wait`` of the
  kernel that reads it, or lets others, for that more than the slot's uses before made, which then looks at the head. So a message
  may be put in parts, and the receiver need not know in how many.

*What is worth nothing.* A kernel whose wait runs out goes on with whatever is there. So the head says the sizes of the call, and
whether, up to the payload, a wait of the sender ran out or a rank of its node had given up. The receiver reports either, and
tells the ranks of its node before it passes anything on; and the end of a call reports that one of them has given up by then. So
who gets such a result is told. Two windows are left, in which only a later call raises: another program of a rank that gives up may
publish what is worth nothing just before the abort words are out; and a rank whose wait for a credit ran out still puts its
message, into a slot that a peer, late by more than the limit, may be reading.

*Few launches*, as each takes the host some microseconds, which limit short calls: (A) is waited for where the head is written, not
by a kernel of its own; where all messages are needed at once, each program of the kernel that adds them, or puts them together,
waits for them. If no call inside the node can fail behind it, its last program to arrive ends the call: in gemm_rs, and where nodes
have one rank each in an ag_gemm that is made together. Else ``messages_end_kernel`` does.

Puts go by a stream of their own, each behind the kernel that writes its head, which waits for (A). The next call writes the places
to send from behind ``end``, which joins that stream. Waits are bounded, and name the rank and its node: NVSHMEM's own waits of
streams are not, so none is used but where kernels put over a network (`kernel_puts`). Whose wait runs out, or whose call raises,
sets the abort words of its counterparts.

Where kernels put and give the credits, see `kernel_puts`. Source: NVSHMEM's API reference (put-with-signal, on streams).
"""

import ctypes
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from ..kernels import messages as kernels
from ..kernels import sync
from ..kernels.tiles import cdiv
from ..runtime import env, world
from ..runtime.control import ControlGroup
from ..runtime.errors import PeerTimeout
from . import cost, tiling
from .context import Context
from .group import PLANS, REPORT_WORDS
from .making import taking
from .messages import Messages, sizes_said

#: A kernel compares two numbers of a message, each of 31 bits: rows, and columns up to this with refused calls, modulo this, above.
_COLUMNS, _COUNTED = 2**24 - 1, 128
#: Kernel, programs, arguments, constants, and how it is compiled.
Launch = tuple[Any, int, tuple, dict[str, Any], tiling.Tiling]
#: In front of a payload.
HEADER_BYTES = 8 * kernels.HEADER.value
#: How a kernel of one program is compiled that waits and signals.
ONE = tiling.Tiling(0, 0, 0, 1, 1, 1, False)
#: The same of those that go over all payloads, in blocks of so many elements: as few programs as keep the memory busy, since each
#: looks at the same word until the messages are there.
_OVER, _BLOCK = tiling.Tiling(0, 0, 0, 1, 8, 1, False), 4096


class Puts(Messages):
    """By NVSHMEM, for tensors of GPUs. Calls may be captured in CUDA graphs."""

    #: What is data that signals order, and what is signals; for the lint.
    payload: tuple[str, ...] = ("inbox", "outbox")
    signals: tuple[str, ...] = ("head",)

    def __init__(self, op: str, control: ControlGroup, nbytes: int, sending: int, inner: Context) -> None:
        """Collective. ``nbytes``: of the largest payload; ``sending``: payloads of a call that differ; ``inner``: launches."""
        super().__init__(op, control, inner)
        self._world, count = world.current(), len(self.nodes)
        executor = self._world.executor
        if executor.one_host:
            self.rate = cost.COPY_RATE
        self._pitch = HEADER_BYTES + tiling.round_up(nbytes, 256)
        self._sending = sending
        words = self._words = tiling.round_up(1 + 4 * count, 32)
        total = 8 * words + (2 * count + sending) * self._pitch
        indices = self._world.indices(control)
        self._pes = [indices[self.peer(node)] for node in range(count)]
        self._block = self._world.heap.allocate(total, control, indices)
        self._slot, self._stream, self._sizes = 0, None, (0, 0)
        #: How heads of messages give credits, and ends of calls wait for puts; and the nodes that are still to get theirs.
        self._giving: dict[str, Any] = {"GIVES": 0}
        self._ending: dict[str, Any] = {"QUIET": False}
        self._owed = 0
        #: Whether a put of this call is still to be joined.
        self._beside = False
        #: Launches, and places of payloads, of calls made before.
        self._made: dict[Hashable, Any] = {}
        try:
            with taking(f"{op}, messages between nodes", control):
                self.take()
                executor.synchronize()
        except BaseException:
            self.close(True)
            raise

    def take(self) -> None:
        """What this rank has for itself; see `GroupContext.take`."""
        executor, local, count, words = self._world.executor, self._block.local, len(self.nodes), self._words
        self.head = local[: 8 * words].view(torch.int64)
        self.head.zero_()
        self.inbox = local[8 * words :][: 2 * count * self._pitch].view(2, count, self._pitch)
        self.outbox = local[8 * words + 2 * count * self._pitch :][: self._sending * self._pitch].view(self._sending, self._pitch)
        self._report = executor.report(REPORT_WORDS)
        self._reported = ctypes.c_int64.from_address(self._report.data_ptr())  # read in every call, and a tensor is slow to read
        self._limit_s = env.timeout_s()
        ctl = [0] * (sync.BASES.value + count)
        ctl[sync.TIMEOUT.value], ctl[sync.REPORT.value] = int(self._limit_s * 1e9), self._report.data_ptr()
        ctl[sync.BASES.value + self.node] = self.head.data_ptr()
        self.ctl = executor.lasting(lambda: torch.tensor(ctl, dtype=torch.int64, device=self._world.device))
        self._there = executor.lasting(lambda: torch.tensor(self._pes, dtype=torch.int32, device=self._world.device))
        self._puts = executor.puts()
        self.sides = (self._puts,)

    # -- what is made once, as it takes the host long -------------------------------------------------------------------

    def _once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        found = self._made.get(key)
        if found is None:
            if len(self._made) >= 8 * len(self.nodes) * PLANS:
                self._made.clear()
            found = self._made[key] = make()
        return found

    def _run(
        self, key: Hashable, make: Callable[[], Launch], varying: tuple[int, ...] = (), tensors: Sequence[torch.Tensor] = ()
    ) -> None:
        """A launch that is the same whenever ``key`` is, but for ``tensors`` at the places ``varying`` of its arguments."""
        self._once(key, lambda: self._inner.prepare(*make(), varying))(tensors)

    def _of_node(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The control blocks of the contexts of this node: of the operation, and of what it exchanges by schedule "sequential"."""
        return self._inner.ctl, self._inner.inner[-1].ctl if self._inner.inner else self._inner.ctl

    def _index(self, node: int) -> int:
        """Which of the messages to send is for a node."""
        return self.next.index(node) % self._sending

    def _payload(self, boxes: torch.Tensor, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """[…, rows, columns] of messages […, bytes]."""
        nbytes = rows * columns * dtype.itemsize
        payload = boxes[..., HEADER_BYTES : HEADER_BYTES + nbytes].view(dtype)
        return payload.view(*boxes.shape[:-1], rows, columns)

    def _word(self, index: int) -> int:
        """The address of a counter, as this rank names it and its counterparts' ones."""
        return self.head.data_ptr() + 8 * (kernels.CAME.value + index)

    # -- a call ---------------------------------------------------------------------------------------------------------

    def begin(self, m: int, columns: int) -> None:
        self._stream = self._world.executor.on_same_stream(self._stream)
        self._slot ^= 1
        self._sizes = m, columns + self.refused() % _COUNTED * (_COLUMNS + 1)
        self._ended, self._owed = False, len(self.nodes) - 1

    def place(self, node: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        index = self._index(node)
        make = lambda: self._payload(self.outbox[index], rows, columns, dtype)  # noqa: E731
        return self._once(("place", index, rows, columns, dtype), make)  # type: ignore[no-any-return]

    def places(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        slot = self._slot
        make = lambda: self._payload(self.inbox[slot], rows, columns, dtype)  # noqa: E731
        return self._once(("places", slot, rows, columns, dtype), make)  # type: ignore[no-any-return]

    def send(self, place: torch.Tensor, node: int) -> None:
        self._head(node, 1)
        self._put(place, node)

    def _head(self, first: int, count: int) -> None:
        """The head of a message for so many nodes, and their credits."""
        gives = self._gives()
        key = "head", self._slot, first, self._sizes, gives
        self._run(key, lambda: self._head_launch(first, count, gives))

    def _head_launch(self, first: int, count: int, gives: int) -> Launch:
        box = self.outbox[self._index(first)].view(torch.int64)
        where = box, self.head, self.ctl, *self._of_node(), self._there, self._slot, self.node, first
        constants = {"J": len(self.nodes), "PEERS": count, **self._giving}
        return kernels.messages_head_kernel, 1, (*where, self._inner.rank, *self._sizes, gives), constants, ONE

    def _gives(self) -> int:
        """To how many nodes the next kernel gives credits for the last call: the first one of a call to all."""
        gives, self._owed = self._owed, 0
        return gives

    def _put(self, place: torch.Tensor, node: int) -> None:
        def addresses() -> tuple[int, int, int]:
            came = self._word(self._slot * len(self.nodes) + self.node)
            return self.inbox[self._slot, self.node].data_ptr(), self.outbox[self._index(node)].data_ptr(), came

        to, source, came = self._once(("put", self._slot, node), addresses)
        nbytes = place.numel() * place.element_size()
        self._beside = True  # also where it fails behind the fork
        self._puts.put(to, source, HEADER_BYTES + nbytes, came, kernels.SIGNALS.value, self._pes[node])
        self.bytes += nbytes

    def send_rows(self, whole: torch.Tensor, first: int, rows: int, node: int) -> None:
        place = self.place(node, rows, whole.shape[1], whole.dtype)
        place.copy_(whole[first : first + rows])
        self.send(place, node)

    def send_to_all(self, x: torch.Tensor, alone: bool) -> None:
        place = self.place(self.next[0], x.shape[0], x.shape[1], x.dtype)
        place.copy_(x)
        self._head(self.next[0], len(self.next))
        for node in self.before:
            self._put(place, node)

    def receive(self, node: int, place: torch.Tensor) -> None:
        self._run(("came", self._slot, node, self._sizes), lambda: self._came_launch(node))

    def _came_launch(self, node: int) -> Launch:
        where = self.inbox.view(torch.int64), self.head, self.ctl, self._inner.ctl, self._slot, self.node, node
        args = *where, self._inner.rank, *self._sizes, self._pitch // 8
        return kernels.messages_came_kernel, 1, args, {"J": len(self.nodes), "L": self._inner.size}, ONE

    def _ends(self, last: bool) -> None:
        """The next kernel waits for all messages; ``last``: nothing behind it can fail, so that it ends the call, if it can."""
        self._ended = last and not self._ending["QUIET"]

    def _all_came(self) -> tuple[tuple, dict[str, Any]]:
        """Arguments and constants of that kernel."""
        where = self.inbox.view(torch.int64), self.head, self.ctl, *self._of_node(), self._slot, self.node
        args = *where, self._inner.rank, *self._sizes, self._pitch // 8
        return args, {"J": len(self.nodes), "B": _BLOCK, "L": self._inner.size, "LAST": self._ended}

    def _over(self, number: int) -> int:
        """Programs that go over so many elements."""
        return int(self._inner.programs(cdiv(number, _BLOCK)))

    def total(self, parts: torch.Tensor, own: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None) -> None:
        tensors = parts, own, y if bias is None else bias, y
        self._ends(True)

        def launch() -> Launch:
            came, constants = self._all_came()
            args = *tensors, y.numel(), y.shape[1], parts.stride(0), *came
            return kernels.messages_sum_kernel, self._over(y.numel()), args, {"BIAS": bias is not None, **constants}, _OVER

        key = "sum", self._slot, self._sizes, bias is None, *_aligned(tensors)
        self._run(key, launch, (0, 1, 2, 3), tensors)

    def gather(self, x: torch.Tensor, rows: Sequence[int], full: int) -> torch.Tensor:
        parts, x = self.places(full, x.shape[1], x.dtype), x.contiguous()
        whole = x.new_empty(len(self.nodes) * full, x.shape[1])
        tensors = parts, x, whole
        self._ends(self._inner.size == 1)

        def launch() -> Launch:
            came, constants = self._all_came()
            args = *tensors, full * x.shape[1], parts.stride(0), full, *came
            return kernels.messages_gather_kernel, self._over(whole.numel()), args, constants, _OVER

        self._run(("gather", self._slot, self._sizes, *_aligned(tensors)), launch, (0, 1, 2), tensors)
        return whole

    def read(self, node: int) -> None:
        word = self._once(("read", self._slot), lambda: self._word((2 + self._slot) * len(self.nodes) + self.node))
        self._puts.add(word, self._pes[node])

    def end(self) -> None:
        if not self._ended:
            self._run(("end", self._slot), self._end_launch)
        self.join()

    def _end_launch(self) -> Launch:
        args = self.ctl, *self._of_node(), self._slot, self.node, self._inner.rank
        return kernels.messages_end_kernel, 1, args, self._ending, ONE

    def join(self) -> None:
        """What the host had put in this call has left its place, behind this on the stream."""
        if self._beside:
            self._puts.join()
            self._beside = False

    def give_up(self) -> None:
        """Let the counterparts know that nothing more comes."""
        pes = [self._pes[node] for node in self.next]
        try:
            self._world.executor.post_to(pes, self.head.data_ptr() + 8 * sync.ABORT.value, self.node + 1)
        except RuntimeError as problem:  # a GPU in this state has an error of its own to report
            world.log.warning("%s cannot tell its counterparts that it gave up: %s", self.me(), problem)

    def failure(self) -> Exception | None:
        """The error of a wait of an earlier call, if one is known by now."""
        if not self._reported.value:
            return None
        what, node, want, seen, call, abort = (int(word) for word in self._report[1:7])
        if what == sync.WRONG_MESSAGE.value:
            return self.differ(node, *(f"{call} of {self.op} with {_unpacked(packed)}" for packed in (want, seen)))
        if abort or what == sync.PEER_FAILED.value:
            return self.gave_up(node if what == sync.PEER_FAILED.value else abort - 1)
        if what == sync.NODE_FAILED.value:
            return PeerTimeout(
                f"{self.op}: a rank of node {node} gave up in call {call}; its message names the cause. {self._inner.remedy}",
                told=2,
            )
        thing = "its message" if what == sync.WAIT_MESSAGE.value else "the credit that its slot may be written again"
        return PeerTimeout(
            f"{self.op}: {self.me()} waited {self._limit_s:g} s for {self.named(node)}: {thing} of call {call} (expected {want}, "
            f"saw {seen}). All ranks must be alive, reach each other and make the same calls in the same order; FLUXLIKE_TIMEOUT_S "
            f"sets the limit. {self._inner.remedy}"
        )

    def quiet(self) -> None:
        """Queue a wait for what was put, and for credits: behind it they are where they belong."""
        self._puts.quiet()

    def abandon(self) -> None:
        self._puts.abandon()

    def close(self, everyone: bool) -> None:
        """The device is done; if ``everyone`` is, too, the memory may be used again."""
        if hasattr(self, "_puts"):  # of what is half made, too
            self._puts.close()
        if everyone:
            self._world.heap.free(self._block)


def _aligned(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """What a kernel is compiled for, of addresses."""
    return tuple(t.data_ptr() % 16 for t in tensors)


def _unpacked(packed: int) -> str:
    return sizes_said(packed >> 32, packed & _COLUMNS, (packed & 0xFFFFFFFF) // (_COLUMNS + 1))

"""Messages between nodes that kernels put, by NVSHMEM's device library: `FLUXLIKE_PUTS`. Their design record.

The protocol is that of `messages.Puts`, and so are the words: a counterpart does not know who puts. What differs is on this rank.

* One kernel waits for the credits, writes the head and puts. Nothing is put beside what the stream holds, and no stream is ordered
  behind another. On one host, where a put is stores over NVLink, several programs put a part each, and the stream goes on when they
  are done: for messages that are small, or that nothing hides anyway. Over a network one program gives all to the network card,
  and the stream goes on at once.
* The credits of all messages of a call are given at its end, by the kernel that ends it.

``auto`` is by kernels where one host's GPUs are nodes (`FLUXLIKE_VIRTUAL_NODES`), for messages up to `LARGEST` bytes, and by
the host otherwise, since no network was measured.
"""

from pathlib import Path

import torch

from ..kernels import messages as kernels
from ..kernels import puts
from ..runtime import env, world
from ..runtime.control import ControlGroup
from . import tiling
from .group import GroupContext
from .messages import HEADER_BYTES, ONE, Letters, Places, Puts

#: Bytes of the largest payload that ``auto`` leaves to kernels.
LARGEST = 1 << 20
#: Bytes of a message from which one more program puts a part of it, on one host.
_PART = 16 << 10
#: As many threads as there can be: each has 16 bytes on their way.
_PUT = tiling.Tiling(0, 0, 0, 32, 1, 1, False)


class KernelPuts(Puts):
    """Up to ``largest`` bytes of payload; larger messages are put by the host, as `Puts` does."""

    largest = LARGEST

    def _prepare(self) -> None:
        executor = self._world.executor
        #: Messages that kernels have put.
        self.by_kernels = 0
        self._linked = puts.library(_library())
        self._there = executor.lasting(lambda: torch.tensor(self._pes, dtype=torch.int32, device=self._world.device))
        self._sizes = 0, 0
        for kernel, _, args, constants, tile, _ in (self._put_launch(self.next[0], 1, 0), self._credits_launch()):
            executor.ready(kernel, args, constants, tile.warps, tile.stages)

    def send(self, place: torch.Tensor, node: int) -> None:
        if not self._by_kernel(place, node, 1):
            super().send(place, node)

    def _send_to_all(self, place: torch.Tensor) -> None:
        if not self._by_kernel(place, self.next[0], len(self.next)):
            super()._send_to_all(place)

    def _by_kernel(self, place: torch.Tensor, first: int, count: int) -> bool:
        """A kernel puts the message to so many nodes, if it is not too large."""
        nbytes = place.numel() * place.element_size()
        if nbytes > self.largest:
            return False
        key = "by kernel", self._slot, first, self._sizes, nbytes
        self._once(key, lambda: self._inner.prepare(*self._put_launch(first, count, nbytes)))(())
        self.by_kernels += count
        self.bytes += count * nbytes
        return True

    def _put_launch(self, first: int, count: int, nbytes: int) -> tuple:
        """What `GroupContext.prepare` takes."""
        box, to = self.outbox[self._index(first)].view(torch.int64), self.inbox[self._slot, self.node].view(torch.int64)
        where = box, to, self.head, self.ctl, *self._of_node(), self._there, self._slot, self.node, first
        args = *where, self._inner.rank, *self._sizes, HEADER_BYTES + nbytes, len(self.nodes), count
        programs = 1
        while self._world.executor.one_host and programs < kernels.SIGNALS.value and 2 * programs * _PART <= nbytes:
            programs *= 2
        return kernels.messages_put_kernel, programs, args, self._linked, _PUT, ()

    def _credits_launch(self) -> tuple:
        args = self.ctl, *self._of_node(), self.head, self._there, self._slot, self.node, self._inner.rank, len(self.nodes)
        constants = {"QUIET": not self._world.executor.one_host, **self._linked}
        return kernels.messages_credits_kernel, 1, args, constants, ONE, ()

    def receive(self, nodes: list[int], places: Places, last: bool) -> None:
        super().receive(nodes, places, last=False)

    def read(self, node: int) -> None:
        """`end` gives the credit."""

    def end(self) -> None:
        self._once(("credits", self._slot), lambda: self._inner.prepare(*self._credits_launch()))(())
        self.join()


class LargeKernelPuts(KernelPuts):
    """By kernels whatever the size, as FLUXLIKE_PUTS=device asks for."""

    largest = 1 << 62


def _library() -> Path:
    executor = world.current().executor
    path = executor.device_puts()
    if path is None:
        raise RuntimeError(
            f"FLUXLIKE_PUTS=device, and the package nvidia-nvshmem has no libnvshmem_device.bc for compute capability "
            f"{executor.capability}; pip install -e '.[cu13]' (or cu12) at the root of the repository, or unset it"
        )
    return path


def messages(op: str, control: ControlGroup, nbytes: int, sending: int, inner: GroupContext) -> Letters | Puts:
    """Those of a context; collective. See `Puts`."""
    executor, who = world.current().executor, env.puts()
    kind: type[Letters | Puts] = Puts
    if executor.name == "shm":
        kind = Letters
    elif who == "device":
        kind = LargeKernelPuts
    elif who == "auto" and executor.one_host and executor.device_puts() is not None:
        kind = KernelPuts
    return kind(op, control, nbytes, sending, inner)

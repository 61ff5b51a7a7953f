"""Messages between nodes that kernels put, by NVSHMEM's device library: `FLUXLIKE_PUTS`. Their design record.

The protocol is that of `puts.Puts`, and so are the words: a counterpart does not know who puts. What differs is on this rank.

* One kernel waits for the credits, writes the head and puts; no stream is ordered behind another, and nothing is put beside what
  the stream holds. Between GPUs of one host a put is stores over NVLink: many programs put a part each, straight from where the
  payload lies, and the stream goes on when they are done. Over a network one program gives head and payload to the network card,
  from where NVSHMEM knows the memory, and the stream goes on at once.
* The credits for the messages of a call go with the first message of the next one, also where the host puts that, by a word of the
  control block that says which slot they are of. Who waits for one would wait for that message anyway. They are given to all nodes
  at once and before any wait: one by one with each message, three nodes could wait for each other in a ring, where calls use one
  slot after itself.

What has no bound: over a network the end of a call waits for what was put by NVSHMEM's own quiet, so if the network fails in
between, it may last for ever. Between GPUs of one host there is no such wait.

``auto``: by kernels where one host's GPUs are nodes (`FLUXLIKE_VIRTUAL_NODES`) and nothing runs beside the message, which is then
there some 10 µs sooner; else by the host, whose copies are beside products, and since no network was measured.
"""

from pathlib import Path

import torch

from ..kernels import messages as kernels
from ..kernels import puts
from ..runtime import world
from . import cost, tiling
from .puts import Launch, Puts

#: Bytes of a payload for each program that puts a part of it, and the most of these.
_PART, _PARTS = 8 << 10, kernels.SIGNALS.value // 2
#: So many threads that each has 16 bytes of a part on their way.
_PUT = tiling.Tiling(0, 0, 0, 16, 1, 1, False)


class KernelPuts(Puts):
    """Kernels put the messages beside which nothing runs, and the host the others; the credits of all are by kernels."""

    #: Whether kernels put all of them.
    every = False

    def take(self) -> None:
        super().take()
        executor = self._world.executor
        self._near = executor.one_host
        if self._near:
            self.latency_alone = cost.PUT_BY_KERNEL
        #: Messages that kernels have put.
        self.by_kernels = 0
        self._linked = puts.library(_library())
        self._giving = {"GIVES": 1 if self._near else 2, **self._linked}
        self._ending = {"QUIET": not self._near, **({} if self._near else self._linked)}
        some, node, receivers = self.outbox.view(self._inner.dtype), self.next[0], 1 if self.op == "gemm_rs" else len(self.next)
        launches = [self._put_launch(some, 0, 0, node, 1, 0), self._head_launch(node, receivers, 0)]
        try:
            for kernel, _, args, constants, tile in launches if self._near else [*launches, self._end_launch()]:
                executor.ready(kernel, args, constants, tile.warps, tile.stages)
        except Exception as problem:  # of Triton, whose linker may be too old for the library, or of NVSHMEM
            why = f"{type(problem).__name__}: {problem}"
            said = f"{self.op}: kernels that put to other nodes cannot be made ({why}); set FLUXLIKE_PUTS=host"
            raise RuntimeError(said) from problem

    def send(self, place: torch.Tensor, node: int) -> None:
        if self.every:
            self._by_kernel(place, 0, place.numel() * place.element_size(), node, 1)
        else:
            super().send(place, node)

    def send_rows(self, whole: torch.Tensor, first: int, rows: int, node: int) -> None:
        pitch = whole.shape[1] * whole.element_size()
        if not self._near or (whole.data_ptr() + first * pitch) % 16:
            super().send_rows(whole, first, rows, node)
        else:
            self._by_kernel(whole, first * pitch, rows * pitch, node, 1)

    def send_to_all(self, x: torch.Tensor, alone: bool) -> None:
        if not (alone or self.every):
            super().send_to_all(x, alone)
            return
        if not self._near or not x.is_contiguous() or x.data_ptr() % 16:
            given, x = x, self.place(self.next[0], x.shape[0], x.shape[1], x.dtype)
            x.copy_(given)
        self._by_kernel(x, 0, x.numel() * x.element_size(), self.next[0], len(self.next))

    def _by_kernel(self, whole: torch.Tensor, start: int, nbytes: int, first: int, count: int) -> None:
        """A kernel puts ``nbytes`` of ``whole`` to ``count`` nodes from ``first`` on; if not near, they are in their place."""
        gives = self._gives()
        key = "by kernel", self._slot, start, nbytes, first, self._sizes, gives
        self._run(key, lambda: self._put_launch(whole, start, nbytes, first, count, gives), (1,), (whole,))
        self.by_kernels += count
        self.bytes += count * nbytes

    def _put_launch(self, whole: torch.Tensor, start: int, nbytes: int, first: int, count: int, gives: int) -> Launch:
        box, to = self.outbox[self._index(first)].view(torch.int64), self.inbox[self._slot, self.node].view(torch.int64)
        where = box, whole, to, self.head, self.ctl, *self._of_node(), self._there, self._slot, self.node, first
        args = *where, self._inner.rank, *self._sizes, start, nbytes, len(self.nodes), count, gives
        parts = 1
        while parts < _PARTS and 2 * parts * _PART <= nbytes:
            parts *= 2
        constants = {"NEAR": self._near, **self._linked}
        return kernels.messages_put_kernel, parts + 2 if self._near else 1, args, constants, _PUT

    def read(self, node: int) -> None:
        """The next call gives the credit."""


class AllKernelPuts(KernelPuts):
    """As FLUXLIKE_PUTS=device asks for."""

    every = True


def _library() -> Path:
    executor = world.current().executor
    path = executor.device_library()
    if path is None:
        raise RuntimeError(
            f"FLUXLIKE_PUTS=device, and the package nvidia-nvshmem has no libnvshmem_device.bc for compute capability "
            f"{executor.capability}; pip install -e '.[cu13]' (or cu12) at the root of the repository, or unset it"
        )
    return path

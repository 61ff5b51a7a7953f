"""Shared-memory segments: the symmetric heap of a machine without GPUs, one process a rank.

Each rank makes an anonymous file in memory (memfd) and its peers map it through /proc/<pid>/fd/<n>. The file has no name,
so nothing is left behind when a rank is killed at any moment, it is not bound by the size of /dev/shm (64 MB in a default
container), and stale files of a dead run cannot exist. ``posix_fallocate`` reserves the pages at once: a machine without
the memory says so here and not with a SIGBUS inside a kernel. Who may reach it: `memfd`.
"""

import mmap
import os

import numpy as np
import torch

from . import memfd
from .control import ControlGroup

DEFAULT_BYTES = 64 << 20


class ShmSegment:
    """``nbytes`` of every rank's memory, mapped by all ranks of ``control``; making and closing it is collective."""

    def __init__(self, nbytes: int, control: ControlGroup) -> None:
        self.nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._pids: list[int] = []
        # before any rank reserves: the kernel ends processes rather than refuse the last page
        control.agree("room for the shared-memory heap", self.nbytes, self._no_room(control.size))
        fd, error = -1, None
        try:
            fd = memfd.make("fluxlike-heap", self.nbytes, reserve=True)
        except OSError as problem:
            error = self._cannot_reserve(str(problem))
        control.agree("making the shared-memory heap", self.nbytes, error)
        opened = control.gather((os.getpid(), fd), "sharing the heap")
        self._pids = [pid for pid, _ in opened]
        self._views: list[torch.Tensor] = []
        try:
            for index, (pid, number) in enumerate(opened):
                theirs = fd if index == control.rank else memfd.open_peer(pid, number, self.nbytes)
                self._views.append(memfd.mapped(theirs, self.nbytes))
                if theirs != fd:
                    os.close(theirs)
        except (OSError, RuntimeError) as problem:
            error = RuntimeError(
                f"cannot map the heap of another rank ({problem}); all ranks must run on one host, as one user, in one process "
                "namespace with /proc"
            )
        control.agree("mapping the shared-memory heap", self.nbytes, error)
        os.close(fd)
        self.local = self._views[control.rank]
        self.addresses = [view.data_ptr() for view in self._views]

    def _no_room(self, ranks: int) -> RuntimeError | None:
        need, room = self.nbytes * ranks, memfd.room()
        if need <= room:
            return None
        return self._cannot_reserve(f"{ranks} ranks need {need >> 20} MiB and this machine has {room >> 20} MiB left")

    def _cannot_reserve(self, why: str) -> RuntimeError:
        return RuntimeError(
            f"cannot reserve {self.nbytes >> 20} MiB of shared memory for the symmetric heap ({why}); free memory, or pass a "
            "smaller heap_bytes to fluxlike.init"
        )

    def view(self, index: int) -> torch.Tensor:
        """All bytes of the segment of rank ``index`` of the world."""
        return self._views[index]

    def dead_ranks(self) -> list[int]:
        """World indices whose process is gone or a zombie."""
        return [index for index, pid in enumerate(self._pids) if _is_dead(pid)]

    def close(self) -> None:
        """Unmap. Views that the caller still holds keep their mapping alive until they go."""
        self._views.clear()
        self.local = torch.empty(0, dtype=torch.uint8)


def _is_dead(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def words(address: int, count: int, dtype: type[np.generic] = np.int64) -> np.ndarray:
    """A live numpy view of ``count`` words at ``address`` of this process: for signals that the host reads or writes."""
    import ctypes

    size = np.dtype(dtype).itemsize * count
    return np.frombuffer(memoryview((ctypes.c_char * size).from_address(address)), dtype=dtype)

"""Shared-memory segments: the symmetric heap of a machine without GPUs, one process a rank.

Each rank makes an anonymous file in memory (memfd) and its peers map it through /proc/<pid>/fd/<n>. The file has no name,
so nothing is left behind when a rank is killed at any moment, it is not bound by the size of /dev/shm (64 MB in a default
container), and stale files of a dead run cannot exist. ``posix_fallocate`` reserves the pages at once: a machine without
the memory says so here and not with a SIGBUS inside a kernel.
"""

import mmap
import os

import numpy as np
import torch

from .control import ControlGroup

DEFAULT_BYTES = 64 << 20


class ShmSegment:
    """``nbytes`` of every rank's memory, mapped by all ranks of ``control``; making and closing it is collective."""

    def __init__(self, nbytes: int, control: ControlGroup) -> None:
        self.nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._pids: list[int] = []
        fd, error = -1, None
        try:
            fd = self._reserve()
        except OSError as problem:
            error = RuntimeError(
                f"cannot reserve {self.nbytes >> 20} MiB of shared memory for the symmetric heap ({problem}); free memory, or "
                "pass a smaller heap_bytes to fluxlike.init"
            )
        control.agree("making the shared-memory heap", self.nbytes, error)
        opened = control.gather((os.getpid(), fd), "sharing the heap")
        self._pids = [pid for pid, _ in opened]
        self._maps: list[mmap.mmap] = []
        try:
            for index, (pid, number) in enumerate(opened):
                theirs = fd if index == control.rank else os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
                self._maps.append(mmap.mmap(theirs, self.nbytes))
                if theirs != fd:
                    os.close(theirs)
        except OSError as problem:
            error = RuntimeError(
                f"cannot map the heap of another rank ({problem}); all ranks must run on one host, as one user, in one process "
                "namespace with /proc"
            )
        control.agree("mapping the shared-memory heap", self.nbytes, error)
        os.close(fd)
        self._views = [torch.frombuffer(m, dtype=torch.uint8) for m in self._maps]
        self.local = self._views[control.rank]
        self.addresses = [view.data_ptr() for view in self._views]

    def _reserve(self) -> int:
        fd = os.memfd_create("fluxlike-heap", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, self.nbytes)
        except OSError:
            os.close(fd)
            raise
        return fd

    def view(self, index: int) -> torch.Tensor:
        """All bytes of the segment of rank ``index`` of the world."""
        return self._views[index]

    def dead_ranks(self) -> list[int]:
        """World indices whose process is gone or a zombie."""
        return [index for index, pid in enumerate(self._pids) if _is_dead(pid)]

    def close(self) -> None:
        """Unmap. Views that the caller still holds keep their mapping alive until they go."""
        self._views.clear()
        self._maps.clear()
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

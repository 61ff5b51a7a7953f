"""Shared-memory segments: the symmetric heap of a machine without GPUs, one process a rank.

Each rank makes an anonymous file in memory (memfd) and its peers map it through /proc/<pid>/fd/<n>. The file has no name,
so nothing is left behind when a rank is killed at any moment, it is not bound by the size of /dev/shm (64 MB in a default
container), and stale files of a dead run cannot exist. ``posix_fallocate`` reserves the pages at once, and what the machine does
not have is not asked for: it says so here, and not with a SIGBUS inside a kernel or by killing a process.
"""

import contextlib
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
        fd, error = -1, None
        self._maps: list[mmap.mmap] = []
        room = _room() if control.rank == 0 else None  # one looks, before any takes
        if room is not None and self.nbytes * control.size > room:
            error = self._cannot_reserve(f"{control.size} ranks share {room >> 20} MiB")
        control.agree("room for the shared-memory heap", self.nbytes, error)
        try:
            try:
                fd = self._reserve()
            except OSError as problem:
                error = self._cannot_reserve(problem)
            control.agree("making the shared-memory heap", self.nbytes, error)
            opened = control.gather((os.getpid(), fd), "sharing the heap")
            try:
                for index, (pid, number) in enumerate(opened):
                    self._maps.append(_map(fd if index == control.rank else None, pid, number, self.nbytes))
            except OSError as problem:
                error = _cannot_map("the heap of another rank", problem)
            control.agree("mapping the shared-memory heap", self.nbytes, error)
        finally:
            if fd >= 0:
                os.close(fd)
        self._views = [torch.frombuffer(m, dtype=torch.uint8) for m in self._maps]
        self.local = self._views[control.rank]
        self.addresses = [view.data_ptr() for view in self._views]

    def _cannot_reserve(self, why: OSError | str) -> RuntimeError:
        return RuntimeError(
            f"cannot reserve {self.nbytes >> 20} MiB of shared memory a rank for the symmetric heap ({why}); free memory, pass a "
            "smaller heap_bytes to fluxlike.init, or make smaller contexts"
        )

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

    def close(self) -> None:
        """Unmap. Views that the caller still holds keep their mapping alive until they go."""
        self._views.clear()
        self._maps.clear()
        self.local = torch.empty(0, dtype=torch.uint8)


def share(nbytes: int, control: ControlGroup, what: str) -> tuple[mmap.mmap, int]:
    """Zeroed memory that all ranks of ``control`` map, made by the first, and a descriptor of it. Collective.

    Pages are taken as they are touched. ``what`` it is: for the agreement of the ranks and for errors.
    """
    fd, error, memory = -1, None, None
    try:
        if control.rank == 0:
            try:
                fd = os.memfd_create("fluxlike-shared", os.MFD_CLOEXEC)
                os.ftruncate(fd, nbytes)
            except OSError as problem:
                error = RuntimeError(f"cannot make shared memory for {what} ({problem}); free memory, or allow more open files")
        control.agree(f"making {what}", nbytes, error)
        pid, number = control.gather((os.getpid(), fd), f"sharing {what}")[0]
        try:
            if control.rank != 0:
                fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
            memory = mmap.mmap(fd, nbytes)
        except OSError as problem:
            error = _cannot_map(what, problem)
        control.agree(f"mapping {what}", nbytes, error)
        assert memory is not None
        return memory, fd
    except BaseException:
        if fd >= 0:
            os.close(fd)
        raise


def _room() -> int | None:
    """Bytes that this machine has free, or that its container may use at most; None if it does not say."""
    room = []
    with contextlib.suppress(OSError), open("/proc/meminfo") as file:
        room += [int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:")]
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError), open(limit) as file:  # "max": no limit
            room.append(int(file.read()))
    return min(room, default=None)


def _map(mine: int | None, pid: int, number: int, nbytes: int) -> mmap.mmap:
    """The memory behind a descriptor of this process, or else behind descriptor ``number`` of process ``pid``."""
    if mine is not None:
        return mmap.mmap(mine, nbytes)
    fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
    try:
        return mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)


def _cannot_map(what: str, problem: OSError) -> RuntimeError:
    return RuntimeError(
        f"cannot map {what} ({problem}); all ranks must run on one host, as one user, in one process namespace with /proc, and "
        "may not be set undumpable (prctl)"
    )


def words(address: int, count: int, dtype: type[np.generic] = np.int64) -> np.ndarray:
    """A live numpy view of ``count`` words at ``address`` of this process: for signals that the host reads or writes."""
    import ctypes

    size = np.dtype(dtype).itemsize * count
    return np.frombuffer(memoryview((ctypes.c_char * size).from_address(address)), dtype=dtype)

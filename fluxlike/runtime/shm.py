"""Shared-memory segments: the symmetric heap of a machine without GPUs, one process a rank.

Each rank makes an anonymous file in memory (memfd) and its peers map it through /proc/<pid>/fd/<n>. The file has no name,
so nothing is left behind when a rank is killed at any moment, it is not bound by the size of /dev/shm (64 MB in a default
container), and stale files of a dead run cannot exist. ``posix_fallocate`` reserves the pages at once, and what the machine does
not have is not asked for: it says so here, and not with a SIGBUS inside a kernel or by killing a process. Who may reach it is
said in `memfd`.
"""

import ctypes
import mmap
import os

import numpy as np
import torch

from . import memfd
from .control import ControlGroup
from .heap import shown
from .wording import counted

DEFAULT_BYTES = 64 << 20


class ShmSegment:
    """``nbytes`` of every rank's memory, mapped by all ranks of ``control``; making and closing it is collective."""

    def __init__(self, nbytes: int, control: ControlGroup) -> None:
        self.nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        # before any rank reserves: the kernel ends processes rather than refuse the last page
        control.agree("room for the shared-memory heap", self.nbytes, self._no_room(control.size))
        fd, error = -1, None
        self._views: list[torch.Tensor] = []
        try:
            try:
                fd = memfd.make("fluxlike-heap", self.nbytes, reserve=True)
            except OSError as problem:
                error = self._cannot_reserve(str(problem))
            control.agree("making the shared-memory heap", self.nbytes, error)
            opened = control.gather((os.getpid(), fd), "sharing the heap")
            try:
                for index, (pid, number) in enumerate(opened):
                    mine = index == control.rank
                    self._views.append(memfd.mapped(fd, self.nbytes) if mine else _mapped_peer(pid, number, self.nbytes))
            except (OSError, RuntimeError) as problem:
                error = _cannot_map("the heap of another rank", problem)
            control.agree("mapping the shared-memory heap", self.nbytes, error)
        finally:
            if fd >= 0:
                os.close(fd)
        self.local = self._views[control.rank]
        self.addresses = [view.data_ptr() for view in self._views]

    def _no_room(self, ranks: int) -> RuntimeError | None:
        need, room = self.nbytes * ranks, memfd.room()
        if need <= room:
            return None
        needed = f"{counted(ranks, 'rank')} need{'s' if ranks == 1 else ''} {shown(need)}"
        return self._cannot_reserve(f"{needed} and this machine has {shown(room)} left")

    def _cannot_reserve(self, why: str) -> RuntimeError:
        return RuntimeError(
            f"cannot reserve {shown(self.nbytes)} of shared memory a rank for the symmetric heap ({why}); free memory, pass a "
            "smaller heap_bytes to fluxlike.init, or make smaller contexts"
        )

    def view(self, index: int) -> torch.Tensor:
        """All bytes of the segment of rank ``index`` of the world."""
        return self._views[index]

    def close(self) -> None:
        """Unmap. Views that the caller still holds keep their mapping alive until they go."""
        self._views.clear()
        self.local = torch.empty(0, dtype=torch.uint8, device="cpu")


def share(nbytes: int, control: ControlGroup, what: str) -> tuple[memoryview, int]:
    """Zeroed memory that all ranks of ``control`` map, made by the first, and a descriptor of it. Collective.

    Pages are taken as they are touched. ``what`` it is: for the agreement of the ranks and for errors.
    """
    fd, error, memory = -1, None, None
    try:
        if control.rank == 0:
            try:
                fd = memfd.make("fluxlike-shared", nbytes, reserve=False)
            except OSError as problem:
                error = RuntimeError(f"cannot make shared memory for {what} ({problem}); free memory, or allow more open files")
        control.agree(f"making {what}", nbytes, error)
        pid, number = control.gather((os.getpid(), fd), f"sharing {what}")[0]
        try:
            if control.rank != 0:
                fd = memfd.open_peer(pid, number, nbytes)
            memory = memoryview(memfd.mapped(fd, nbytes).numpy())  # type: ignore[arg-type]
        except (OSError, RuntimeError) as problem:
            error = _cannot_map(what, problem)
        control.agree(f"mapping {what}", nbytes, error)
        assert memory is not None
        return memory, fd
    except BaseException:
        if fd >= 0:
            os.close(fd)
        raise


def _mapped_peer(pid: int, number: int, nbytes: int) -> torch.Tensor:
    """The memory behind descriptor ``number`` of process ``pid``."""
    fd = memfd.open_peer(pid, number, nbytes)
    try:
        return memfd.mapped(fd, nbytes)
    finally:
        os.close(fd)


def _cannot_map(what: str, problem: Exception) -> RuntimeError:
    return RuntimeError(
        f"cannot map {what} ({problem}); all ranks must run on one host, as one user, in one process namespace with /proc, and "
        "may not be set undumpable (prctl)"
    )


def word(address: int, dtype: type[np.generic] = np.int32) -> np.ndarray:
    """A live numpy view [1] of the word at ``address`` of this process: for signals that the host reads or writes."""
    size = np.dtype(dtype).itemsize
    return np.frombuffer(memoryview((ctypes.c_char * size).from_address(address)), dtype=dtype)

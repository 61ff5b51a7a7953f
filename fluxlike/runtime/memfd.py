"""Memory that processes of one user on one host share, without a name: anonymous files (memfd) reached through /proc/<pid>/fd.

Nobody can guess a name, since there is none; opening /proc/<pid>/fd/<n> takes the rights to trace the process, and the file is
readable and writable for its owner only. It is sealed: no process that maps it can shrink it, which would end the others by SIGBUS.
"""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import suppress

import torch

MODE = 0o600
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
#: Of Linux 6.3: never to be executed, which brings a seal of its own. Where vm.memfd_noexec is set, every file gets that.
_NOEXEC = 0x8
#: What control groups of the first and of the second kind call their limit, what they use, and sums over those below.
_FIRST = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
_SECOND = "memory.max", "memory.current", ""


def make(name: str, nbytes: int, reserve: bool) -> int:
    """A descriptor of ``nbytes`` zeroed bytes; ``reserve``: take the pages now, or OSError. ``name`` is for /proc/<pid>/maps."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create(name, flags | _NOEXEC)
    except OSError:  # of an older kernel, which does not know the flag; whatever else it is, is raised again
        fd = os.memfd_create(name, flags)
    try:
        os.fchmod(fd, MODE)
        if reserve:
            os.posix_fallocate(fd, 0, nbytes)
        else:
            os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:  # what a signal's handler raises, too: to reserve pages takes a while
        os.close(fd)
        raise
    return fd


def open_peer(pid: int, number: int, nbytes: int) -> int:
    """A descriptor of what `make` made in another process. OSError if it cannot be had or is something else.

    A process number of another namespace leads to a stranger's descriptor; a file that is not sealed may shrink.
    """
    path = f"/proc/{int(pid)}/fd/{int(number)}"
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        sealed = _seals(fd) & _SEALS == _SEALS  # and maybe by the kernel's own: see `_NOEXEC`
        if found.st_size != nbytes or found.st_uid != os.geteuid() or found.st_mode & 0o777 != MODE or not sealed:
            raise OSError(errno.EINVAL, "it is not memory that a rank of this job and user made for sharing", path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _seals(fd: int) -> int:
    with suppress(OSError):  # not a memfd at all
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    return 0


def mapped(fd: int, nbytes: int) -> torch.Tensor:
    """The bytes behind a descriptor, uint8 [nbytes]; they stay mapped as long as the tensor lives, without the descriptor."""
    return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=nbytes, dtype=torch.uint8)


def room(proc: str = "/proc", groups: str = "/sys/fs/cgroup") -> int:
    """Bytes of memory that this host, or this container, can still give at most. ``groups``: where control groups are mounted."""
    with open(f"{proc}/meminfo") as file:
        have = {line.split(":")[0]: int(line.split()[1]) << 10 for line in file}
    return min([have["MemAvailable"] + have.get("SwapFree", 0), *_rooms(proc, groups)])


def _rooms(proc: str, groups: str) -> Iterator[int]:
    """What the control groups of this process, and those above them, have left; what they keep of files can be given back."""
    with suppress(OSError), open(f"{proc}/self/cgroup") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root, names = (f"{groups}/memory", _FIRST) if controllers else (groups, _SECOND)
            parts = [part for part in path.split("/") if part not in ("", "..")]
            for depth in range(len(parts) + 1):  # in a container the path may be the host's, and only the root be there
                yield from _left("/".join([root, *parts[:depth]]), *names)


def _left(group: str, limit: str, used: str, files: str) -> Iterator[int]:
    with suppress(OSError, ValueError):  # "max" where there is no limit
        most = int(_read(f"{group}/{limit}"))
        lines = [line.split() for line in _read(f"{group}/memory.stat").splitlines()]
        kept = sum(int(line[1]) for line in lines if line[0] in (f"{files}inactive_file", f"{files}active_file"))
        yield max(0, most - max(0, int(_read(f"{group}/{used}")) - kept))


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()

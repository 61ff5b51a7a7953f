"""What the machine may refuse on the CPU heap: memory, /dev/shm, looking into a process. An error with a remedy, on all ranks."""

import ctypes
import errno
import os
import resource
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from faults import GUILTY, fresh, held, make_context, nothing_left_behind, start, told, works  # noqa: F401

import fluxlike
from fluxlike.runtime import memfd

_libc = ctypes.CDLL(None, use_errno=True)


def both(outcomes, *words):
    """All ranks are told, the others who it was; all words are in all messages."""
    for outcome in outcomes:
        assert outcome.ok, str(outcome)
        for said in outcome.value:
            who = () if outcome.rank == GUILTY else (f"rank {GUILTY} failed, so no rank goes on",)
            for word in (*words, *who):
                assert word in said, f"{word!r} is not in: {said}"


def no_memory(group):
    """One rank may not make files (these have no name, but count) of more than 32 MiB: neither heap nor context beyond that."""
    rank, soft = dist.get_rank(), resource.getrlimit(resource.RLIMIT_FSIZE)
    start()
    fluxlike.finalize()
    before = held()
    if rank == GUILTY:
        resource.setrlimit(resource.RLIMIT_FSIZE, (32 << 20, soft[1]))
    said = [told(lambda: start(40 << 20), RuntimeError)[0]]
    assert not fluxlike.is_initialized()
    dist.barrier()
    assert held() == before, f"{held()}, before {before}"
    start()
    works(group)
    said.append(told(lambda: fluxlike.create_gemm_rs_context(1 << 16, 256, dtype=torch.float32), RuntimeError)[0])
    works(group)
    resource.setrlimit(resource.RLIMIT_FSIZE, soft)
    fluxlike.create_gemm_rs_context(1 << 14, 256, dtype=torch.float32).close()  # 32 MiB a rank: the heap grows
    fluxlike.finalize()
    return said


def test_no_memory_for_the_heap():
    both(fresh(no_memory), "cannot reserve", "MiB of shared memory", os.strerror(errno.EFBIG), "smaller heap_bytes")


def too_much(group):
    """More than the machine has, for the heap and for a context: said before it is taken, which would kill processes."""
    said = [told(lambda: start(1 << 50), RuntimeError)[0]]
    start()
    said.append(told(lambda: fluxlike.create_ag_gemm_context(1 << 30, 1, 1 << 20, torch.float32), RuntimeError)[0])
    works(group)
    fluxlike.finalize()
    return said


GIB = 1 << 30
SECOND, FIRST = ("memory.max", "memory.current", ""), ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
#: The line of /proc/self/cgroup; of each group its limit, what it uses and what of that are files; what is left in GiB.
ROOMS = {
    "no groups": ("", {}, SECOND, 64),
    "no limit": ("0::/", {"": ("max", 9, 0)}, SECOND, 64),
    "its own": ("0::/job/step", {"job/step": (8, 5, 1)}, SECOND, 4),
    "above it": ("0::/job/step", {"job/step": ("max", 5, 0), "job": (6, 5, 0)}, SECOND, 1),
    "of a container": ("0::/docker/17", {"": (3, 2, 2)}, SECOND, 3),
    "of the first kind": ("4:cpu,memory:/job", {"memory/job": (8, 6, 0), "memory": (1 << 30, 9, 0)}, FIRST, 2),
    "of something else": ("4:cpu:/job", {"memory/job": (8, 6, 0)}, FIRST, 64),
    "more than there may be": ("0::/job", {"job": (2, 3, 0)}, SECOND, 0),
}


@pytest.mark.parametrize("what", ROOMS)
def test_room_in_control_groups(what, tmp_path):
    line, limits, (limit, used, files), left = ROOMS[what]
    proc, root = tmp_path / "proc", tmp_path / "groups"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {60 << 20} kB\nSwapFree: {4 << 20} kB\n")
    if line:
        (proc / "self" / "cgroup").write_text(f"9:pids:/\n{line}\n")
    for name, (most, now, kept) in limits.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name / limit).write_text(f"{most if most == 'max' else most * GIB}\n")
        (root / name / used).write_text(f"{now * GIB}\n")
        (root / name / "memory.stat").write_text(f"anon 1\n{files}inactive_file {kept * GIB}\n{files}active_file 0\n")
    assert memfd.room(str(proc), str(root)) == left * GIB


def test_more_memory_than_there_is():
    for outcome in fresh(too_much):
        assert outcome.ok, str(outcome)
        for said in outcome.value:
            for word in ("cannot reserve", "MiB of shared memory a rank", "3 ranks need", "smaller heap_bytes"):
                assert word in said, said


def no_files(group, call, code):
    """A machine without memfd_create, or without room for the call boards, which are made before the heap."""
    original = getattr(os, call)

    def fails(*args, **how):
        raise OSError(code, os.strerror(code))

    if dist.get_rank() == 0:
        setattr(os, call, fails)
    said = told(start, RuntimeError)[0]
    setattr(os, call, original)
    start()
    works(group)
    fluxlike.finalize()
    return said


def test_no_shared_memory():
    for call, code in (("memfd_create", errno.ENOSYS), ("memfd_create", errno.EMFILE), ("ftruncate", errno.ENOSPC)):
        for outcome in fresh(no_files, 2, call=call, code=code):
            assert outcome.ok, str(outcome)
            for word in ("cannot make shared memory for the call boards", os.strerror(code), "allow more open files"):
                assert word in outcome.value, outcome.value


def become_nobody() -> None:
    """A process that others of its user may not look into, as after a setuid or under a hardened kernel."""
    if os.getuid() == 0:
        directory = Path(os.readlink("/proc/self/fd/1")).parent  # of the ranks, with torch's store in it
        for path in (directory, *directory.iterdir()):
            os.chmod(path, 0o777)
        dist.barrier()
        os.setresgid(54321, 54321, 54321)
        os.setresuid(54321, 54321, 54321)
    assert _libc.prctl(4, 0, 0, 0, 0) == 0  # PR_SET_DUMPABLE


def no_permission(group):
    become_nobody()
    dist.barrier()
    said = told(start, RuntimeError)[0]
    assert not fluxlike.is_initialized()
    return said


def test_no_permission_to_map():
    for outcome in fresh(no_permission):
        assert outcome.ok, str(outcome)
        for word in ("cannot map the call boards", os.strerror(errno.EACCES), "one host, as one user", "undumpable"):
            assert word in outcome.value, outcome.value


def no_dev_shm(group):
    """/dev/shm full and read-only, where this process may do that to itself; and nothing of the process lies there."""
    if os.getuid() == 0 and _libc.unshare(0x20000) == 0:  # CLONE_NEWNS
        assert _libc.mount(b"none", b"/", None, 0x44000, None) == 0  # MS_REC | MS_PRIVATE
        assert _libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 1, b"size=4k") == 0  # MS_RDONLY
        assert told(lambda: open("/dev/shm/x", "w"), OSError)[0]  # noqa: SIM115
    start()
    with make_context("gemm_rs", "copy_engine"):
        works(group)
        files = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]
        assert "/dev/shm" not in Path("/proc/self/maps").read_text() and not any("/dev/shm" in file for file in files)
        assert Path("/proc/self/maps").read_text().count("memfd:fluxlike") >= dist.get_world_size()
    fluxlike.finalize()


def test_dev_shm_is_not_used():
    for outcome in fresh(no_dev_shm):
        assert outcome.ok, str(outcome)


def dies(group):
    start()
    make_context("gemm_rs", "in_kernel")
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_dead_run_leaves_no_files():
    """All ranks are killed with the heap open: no file, nothing mapped by anyone, and the next run does not meet them."""
    for outcome in fresh(dies, expect_dead=range(3)):
        assert outcome.exit == -signal.SIGKILL
    for outcome in fresh(no_dev_shm):
        assert outcome.ok, str(outcome)

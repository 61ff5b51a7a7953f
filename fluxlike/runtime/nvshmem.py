"""NVSHMEM segments: the symmetric heap of GPUs, through nvshmem4py, bootstrapped by unique id over the torch group.

On one node every peer's memory is mapped, so kernels use plain Triton loads, stores and TMA on peer addresses and need no
NVSHMEM device code; to other nodes there are puts and signals, which streams make. An NVSHMEM allocation is collective over all
processing elements, not over a sub-group; so a segment belongs to the world, and `heap.SymmetricHeap` cuts contexts out of it.
"""

import contextlib
import fcntl
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import env
from .control import ControlGroup
from .errors import PeerTimeout
from .heap import shown

log = logging.getLogger("fluxlike")

DEFAULT_BYTES = 1 << 30

# What the library chooses unless the user has chosen: no communicator of NVSHMEM's own; for one host no network transport, no proxy
# thread. All are read when NVSHMEM starts.
_DEFAULTS = {"NVSHMEM_DISABLE_NCCL": "1"}
_ONE_HOST = {
    "NVSHMEM_REMOTE_TRANSPORT": "none",
    "NVSHMEM_DISABLE_LOCAL_ONLY_PROXY": "1",
    "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "lo",
}


#: Settings that `start` made: the next one may be for other ranks.
_set: dict[str, str] = {}


def _take_back() -> None:
    while _set:
        name, value = _set.popitem()
        if os.environ.get(name) == value:  # else the user has set another since
            del os.environ[name]


_SHARED = "/dev/shm"


@contextlib.contextmanager
def _turn(how: int) -> Iterator[None]:
    """In turn with other programs of this host whose ranks share GPUs, by a lock of fcntl's kind ``how``; waits for half the limit.

    Ranks that share a GPU exchange events through a file in /dev/shm, which NVSHMEM gives the same name in all programs. One that
    starts beside another would open the other's events, and end with status 255; one that stops removes the file.
    """
    with contextlib.ExitStack() as held:
        if env.ranks_per_gpu() > 1 and os.access(_SHARED, os.R_OK):
            lock = os.open(_SHARED, os.O_RDONLY | os.O_CLOEXEC)
            held.callback(os.close, lock)  # which gives the lock back
            end = time.monotonic() + env.timeout_s() / 2
            while True:
                try:
                    fcntl.flock(lock, how | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > end:
                        log.warning(
                            "another program has held its lock on %s for half of FLUXLIKE_TIMEOUT_S, and this one goes on; should "
                            "it end with status 255, start programs whose ranks share a GPU one after the other", _SHARED,
                        )  # fmt: skip
                        break
                    time.sleep(0.01)
        yield


def start(device: torch.device, control: ControlGroup, one_host: bool) -> None:
    """Start NVSHMEM on ``device``; collective over the world. Settings that the user made in the environment stay."""
    error: Exception | None = None
    for name, value in (_DEFAULTS | (_ONE_HOST if one_host else {})).items():
        if name not in os.environ:
            os.environ[name] = _set[name] = value
    try:
        try:
            import nvshmem.core as nvshmem
            from cuda.core import Device

            cuda_device = Device(device.index)
            cuda_device.set_current()
            unique = nvshmem.get_unique_id(empty=control.rank != 0)
        except ImportError as problem:
            error = RuntimeError(
                f"the NVSHMEM heap needs nvshmem4py and cuda-core ({problem}); pip install -e '.[cu13]' (or cu12) at the "
                "root of the repository, or fluxlike.init(heap='shm') with CPU tensors"
            )
        except Exception as problem:  # of the driver's or NVSHMEM's own kinds; the other ranks must not wait for this one
            said = f"{type(problem).__name__}: {problem}"
            error = RuntimeError(f"NVSHMEM cannot be started ({said}); see `python -m fluxlike doctor`")
            error.__cause__ = problem
        control.agree("starting NVSHMEM", None, error)
        raw = unique._data.view(np.uint8)  # of numpy; what it holds travels as numbers
        with _turn(fcntl.LOCK_EX) if control.rank == 0 else contextlib.nullcontext():  # the others wait for what it says
            raw[:] = control.gather(raw.tolist(), "starting NVSHMEM")[0]
            nvshmem.init(device=cuda_device, uid=unique, rank=control.rank, nranks=control.size, initializer_method="uid")
    except BaseException:
        _take_back()
        raise


def stop() -> None:
    """Stop NVSHMEM; collective over the world, so only when every rank is known to be there."""
    import nvshmem.core as nvshmem

    try:
        with _turn(fcntl.LOCK_SH):  # of the ranks of a program, all at once
            nvshmem.finalize()
    finally:
        _take_back()


#: Threads may call on two groups at once, and NVSHMEM is started for one thread.
_one_at_a_time = threading.Lock()


@functools.cache
def _signals() -> tuple[Any, Any, int, int]:
    """What queues puts and signals, and the numbers of their operations."""
    from nvshmem.bindings import nvshmem as bindings

    how = bindings.Signal_op
    return bindings.putmem_signal_on_stream, bindings.signal_op_on_stream, int(how.SIGNAL_ADD), int(how.SIGNAL_SET)


def put(to: int, source: int, nbytes: int, signal: int, more: int, pe: int, stream: int) -> None:
    """Queue a put of ``nbytes`` to the rank ``pe`` of the world, and behind it ``more`` on its 64-bit word at ``signal``.

    ``to`` and ``signal`` are symmetric, named by this rank's memory; ``source`` may be written again behind this on the stream.
    """
    queue, _, add, _ = _signals()
    with _one_at_a_time:
        queue(to, source, nbytes, signal, more, add, pe, stream)


def signal(address: int, value: int, pe: int, stream: int, add: bool) -> None:
    """Queue: the symmetric 64-bit word at ``address`` is set to ``value`` on rank ``pe`` of the world, or that is added to it."""
    _, queue, adding, setting = _signals()
    with _one_at_a_time:
        queue(address, value, adding if add else setting, pe, stream)


def quiet(stream: int) -> None:
    """Queue a wait until what the stream has put, and signalled, is complete on other nodes."""
    from nvshmem.bindings import nvshmem as bindings

    with _one_at_a_time:
        bindings.quiet_on_stream(stream)


def device_library(capability: tuple[int, int]) -> Path | None:
    """NVSHMEM's functions for kernels, as bitcode, beside the library of this process; None if it is not there.

    Wheels have it as libnvshmem_device.bc, or from 3.7 on by compute capability.
    """
    found = find_spec("nvidia.nvshmem")
    folders = [Path(place) / "lib" for place in (found.submodule_search_locations or ())] if found else []
    names = "libnvshmem_device.bc", f"libnvshmem_device_sm_{capability[0]}{capability[1]}.bc"
    return next((folder / name for folder in folders for name in names if (folder / name).is_file()), None)


def make_known(module: int) -> None:
    """From now on the kernels of a module of the driver's may call NVSHMEM, which has started."""
    from nvshmem.bindings import nvshmem as bindings

    bindings.cumodule_init(module)


class NvshmemSegment:
    """``nbytes`` on every GPU of the world, each mapped by those of its node; making and closing it is collective.

    ``addresses``: where they are mapped here, 0 for those of other nodes, also where they could be mapped. ``current``: a ``with``
    in which this rank's device is current, as NVSHMEM goes by that and a caller, or a thread of one, may have another.
    """

    def __init__(self, nbytes: int, control: ControlGroup, current: Callable[[], AbstractContextManager[Any]]) -> None:
        import nvshmem.core as nvshmem
        from nvshmem.bindings import ptr

        self.nbytes = -(-nbytes // 512) * 512
        self._rank, self._current = control.rank, current
        error: Exception | None = None
        try:
            with current():
                self.local: torch.Tensor = nvshmem.tensor((self.nbytes,), dtype=torch.uint8)
        except Exception as problem:  # nvshmem4py raises several kinds; each means that the memory is not to be had
            error = RuntimeError(
                f"cannot allocate {shown(self.nbytes)} on the NVSHMEM heap ({problem}); free GPU memory, or pass a smaller "
                "heap_bytes to fluxlike.init"
            )
        control.agree("allocating on the NVSHMEM heap", self.nbytes, error)
        mine = self.local.data_ptr()
        self.addresses = [0] * control.size
        for pe in control.nodes[control.node]:
            self.addresses[pe] = mine if pe == control.rank else int(ptr(mine, pe))
        unreachable = [pe for pe in control.nodes[control.node] if self.addresses[pe] == 0]
        error = None
        if unreachable:
            error = RuntimeError(
                f"rank {control.rank} cannot reach the memory of ranks {unreachable} (no P2P); fluxlike needs peer access "
                "between the GPUs of a host: see `python -m fluxlike doctor`"
            )
        try:
            control.agree("reaching the peers' memory", None, error)
        except PeerTimeout:  # to free is collective, and has no deadline
            raise
        except RuntimeError:  # on all ranks alike
            self.close()
            raise

    def view(self, index: int) -> torch.Tensor:
        """All bytes of the segment of rank ``index`` of the world."""
        import nvshmem.core as nvshmem

        return self.local if index == self._rank else nvshmem.get_peer_tensor(self.local, index)

    def close(self) -> None:
        import nvshmem.core as nvshmem

        with self._current():
            nvshmem.free_tensor(self.local)

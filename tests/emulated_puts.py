"""Puts between nodes on a machine without GPUs: `ops.puts.Puts` and `KernelPuts` as they are, interpreted, over shared memory.

What NVSHMEM does on GPUs is done by a thread, which takes its time, so that a receiver that does not wait reads what was there
before; what kernels put, at once, by the hook of `kernels.puts`.
"""

import ctypes
import os
import queue
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import fluxlike
from fluxlike.kernels import lang, puts
from fluxlike.ops import spinning
from fluxlike.runtime import cpu, programs, shm, world

LATE_S, LIMIT_S = 0.002, 60.0


class Stuck(Exception):
    """A message or a credit does not come."""

    fluxlike_passthrough = True


def _there(address: int, pe: int) -> int:
    """Where rank ``pe`` of the world has what this rank has at ``address``."""
    for segment in world.current().heap.segments:
        inside = address - segment.local.data_ptr()
        if 0 <= inside < segment.nbytes:
            return segment.addresses[pe] + inside
    raise AssertionError(f"{address:#x} is not of the symmetric heap")


def _put(to: int, source: int, nbytes: int, signal: int, more: int, pe: int) -> None:
    if nbytes:
        ctypes.memmove(_there(to, pe), source, nbytes)
    shm.word(_there(signal, pe), np.int64)[0] += more  # of which only this rank makes more


class LatePuts:
    """As `cuda.CudaPuts`: in their order, beside what the rank does."""

    def __init__(self) -> None:
        self._jobs: queue.Queue[Callable[[], None]] = queue.Queue()
        self._random = random.Random(world.current().rank)
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            time.sleep(self._random.random() * LATE_S)
            job()
            self._jobs.task_done()

    def put(self, *what: int) -> None:
        self._jobs.put(lambda: _put(*what))

    def add(self, address: int, pe: int) -> None:
        _put(0, 0, 0, address, 1, pe)

    def join(self) -> None:
        self._jobs.join()

    quiet = close = abandon = join


class Executor(cpu.CpuExecutor):
    name, one_host = "emulated", True

    def puts(self) -> LatePuts:
        return LatePuts()

    def device_library(self) -> Path:
        return Path("of nobody")

    def ready(self, *launch: object) -> None:
        """Kernels are interpreted."""

    def post_to(self, pes: list[int], address: int, value: int) -> None:
        for pe in pes:
            shm.word(_there(address, pe), np.int64)[0] = value


def install() -> None:
    """From the next `fluxlike.init` of this process on."""
    cpu.CpuExecutor = Executor  # type: ignore[misc]
    puts.set_hook(lambda *what: _put(*what) if what else None)
    inside, since = spinning.on_spin, {}

    def spin(want, seen, what, peer, ctl, turn):
        if ctl in spinning.by_ctl:  # of a context inside the node
            inside(want, seen, what, peer, ctl, turn)
            return
        me = threading.get_ident()
        since[me] = since.get(me, time.monotonic()) if turn else time.monotonic()
        if time.monotonic() - since[me] > LIMIT_S:
            raise Stuck(f"waits for node {peer}, of kind {what}: {seen} where {want} is wanted")
        if not programs.yield_program():
            time.sleep(1e-4)

    lang.set_spin_hook(spin)


def start(who="letters"):
    """fluxlike.init; ``who`` puts: nobody, "host", "auto", or "far", the kernels, as if to a host far away."""
    os.environ["FLUXLIKE_PUTS"] = {"letters": "auto", "far": "device"}.get(who, who)
    if os.environ["FLUXLIKE_TEST_HEAP"] == "shm" and who != "letters":
        install()
    fluxlike.init(heap=os.environ["FLUXLIKE_TEST_HEAP"], heap_bytes=16 << 20)
    if who == "far":
        world.current().executor.one_host = False
    return world.current()

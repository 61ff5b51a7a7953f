"""Streams by their numbers, ordered straight through the driver: torch's objects of them take a slow host 10 to 20 µs each time."""

import threading
from typing import ClassVar, Protocol

import torch

from . import driver


def current(device: torch.device) -> int:
    """torch's current stream of a device."""
    return torch._C._cuda_getCurrentRawStream(device.index)


class Own:
    """A side stream that nobody else queues on, as long as this object is there. To be made with the device current.

    torch's are 32 of a priority, which all of a process share. On one of those a kernel of NCCL's could stand before our copies
    and wait for a rank whose kernel waits for these; what another thread queues while copies are captured would be captured, too;
    and memory that belongs to the stream could be had by somebody whom nothing orders behind its readers.
    """

    #: Of each device and priority those that nobody has any more. None is destroyed: torch may hold memory that belongs to it.
    _free: ClassVar[dict[tuple[int, int], list[int]]] = {}

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self._back: list[int] | None = self._free.setdefault((device.index, priority), [])
        try:
            self.raw = self._back.pop()
        except IndexError:
            self.raw = driver.make_stream(priority)
        #: As torch's object.
        self.stream = torch.cuda.ExternalStream(self.raw, device=device)

    def keep(self) -> None:
        """What it holds may never be done, so nobody is to have it again."""
        self._back = []

    def give_back(self) -> None:
        """To the next holder, as soon as this one needs it no more: a context may be long gone before Python takes it away."""
        if self._back is not None:
            self._back.append(self.raw)
            self._back = None

    def __del__(self) -> None:
        if hasattr(self, "raw"):
            self.give_back()


class Side(Protocol):
    """What has a stream of its own."""

    #: The stream's number; asked for only where a graph has been captured of it, so stand-ins without a stream need none.
    raw: int
    #: Whether a graph has been captured of it.
    captured: bool


class Switched:
    """A ``with`` in which ``stream``, of the current device, is torch's current one, as `torch.cuda.stream` has it."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._index, self._stream = stream.device_index, (stream.stream_id, stream.device_index, stream.device_type)

    def __enter__(self) -> None:
        self._before = torch._C._cuda_getCurrentStream(self._index)
        _make_current(*self._stream)

    def __exit__(self, *error: object) -> None:
        _make_current(*self._before)


def _make_current(stream_id: int, device_index: int, device_type: int) -> None:
    torch._C._cuda_setStream(stream_id=stream_id, device_index=device_index, device_type=device_type)


class Order:
    """``order(first, then)``: what the stream ``then`` is given next comes behind what ``first`` holds now.

    With the device current; in a capture, too. Two threads may share one, as a call waits for the ids that another one has begun.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event()  # torch makes it when it is first recorded, and frees it
        self._number, self._lock = 0, threading.Lock()

    def __call__(self, first: int, then: int) -> None:
        with self._lock:  # else another thread could record the event before this one has waited for it
            if self._number == 0:
                self._event.record(torch.cuda.current_stream(self._device))
                self._number = self._event.cuda_event
            driver.order(self._number, first, then)

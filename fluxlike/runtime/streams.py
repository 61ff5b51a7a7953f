"""Streams by their numbers, ordered straight through the driver: torch's objects of them take a slow host 10 to 20 µs each time."""

import torch

from . import driver


def current(device: torch.device) -> int:
    """torch's current stream of a device."""
    return torch._C._cuda_getCurrentRawStream(device.index)


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

    For one thread at a time, with the device current; in a capture, too.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event()  # torch makes it when it is first recorded, and frees it
        self._number = 0

    def __call__(self, first: int, then: int) -> None:
        if self._number == 0:
            self._event.record(torch.cuda.current_stream(self._device))
            self._number = self._event.cuda_event
        driver.order(self._number, first, then)

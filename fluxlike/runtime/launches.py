"""A launch that is made again and again, with other tensors of the same shapes, strides and alignment."""

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor


class Form(NamedTuple):
    """A TMA descriptor without its tensor."""

    shape: list[int]
    strides: list[int]
    block: list[int]


class Lanes:
    """Two streams that take turns: the caller's, and one that begins and ends with it.

    As a machine without streams has them, which does everything at once and in order.
    """

    @contextlib.contextmanager
    def forked(self) -> Iterator[None]:
        """The other stream begins behind what the caller's holds now; what follows on the caller's is behind both."""
        yield

    def of(self, turn: int) -> contextlib.AbstractContextManager[Any]:
        """Where what is queued goes to the caller's stream, or to the other one if ``turn`` is odd. Inside `forked`."""
        return contextlib.nullcontext()

    def wait(self) -> None:
        """What follows on the current stream is behind what the other one holds now, without the end of `forked`."""


class Streamless:
    """What an executor has where there are no streams, no graphs that capture them, and no memory but the host's and torch's."""

    def lanes(self, users: Hashable) -> Lanes:
        return Lanes()

    def lasting(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        return make()

    def report(self, words: int) -> torch.Tensor:
        return torch.zeros(words, dtype=torch.int64, device="cpu")

    def is_capturing(self) -> bool:
        return False

    def capture(self) -> int:
        return 0

    def is_beside_capture(self, *sides: Any) -> bool:
        return False

    def on_same_stream(self, last: Any) -> Any:
        return None


class Launch:
    """``kernel`` over ``programs`` programs; of ``args``, those at the positions ``varying`` are given anew for each launch.

    It keeps none of those tensors alive.
    """

    def __init__(
        self, executor: Any, kernel: Any, programs: int, args: Sequence[Any], constants: dict[str, Any], warps: int, stages: int,
        varying: tuple[int, ...],
    ) -> None:  # fmt: skip
        self._executor, self._kernel, self._programs = executor, kernel, programs
        self._constants, self._warps, self._stages, self.varying = constants, warps, stages, varying
        self._args = [_form(arg) if position in varying else arg for position, arg in enumerate(args)]

    def arguments(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """All arguments, with ``tensors``, as they are stored, at the varying positions."""
        args = list(self._args)
        for position, t in zip(self.varying, tensors, strict=True):
            form = args[position]
            args[position] = t if form is None else TensorDescriptor(t, form.shape, form.strides, form.block)
        return args

    def launched(self, tensors: Sequence[torch.Tensor]) -> Any:
        """One launch by the executor, and what that returns."""
        args = tuple(self.arguments(tensors))
        return self._executor.launch(self._kernel, self._programs, args, self._constants, self._warps, self._stages)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> bool:
        """One launch; whether it went straight to the driver."""
        self.launched(tensors)
        return False


def _form(arg: Any) -> Form | None:
    if isinstance(arg, TensorDescriptor):
        return Form(list(arg.shape), list(arg.strides), list(arg.block_shape))
    return None

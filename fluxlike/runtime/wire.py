"""What ranks tell each other on the host, as bytes: plain data in JSON, so that what a peer sends is read and never executed."""

import base64
import json
import math
from collections.abc import Callable
from typing import Any

import torch

#: No agreement of ranks needs more; a length beyond it is not one of ours.
MAX_BYTES = 64 << 20
#: Bytes of a message that come with its length; most have no more.
ROOM = 1016
_LENGTH = 8  # bytes of an int64
_DTYPES = {
    str(dtype): dtype for dtype in (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32)
} | {"torch.float64": torch.float64}
_REMEDY = "all ranks must run the same version, and nobody else may use their torch store"


def exchange(value: Any, ranks: list[int], all_gather: Callable[[torch.Tensor], list[torch.Tensor]]) -> list[Any]:
    """Every rank's ``value``. ``all_gather`` gives the tensors of all ranks, of one shape, in the order of ``ranks``.

    It is called once, and once more if a message is longer than `ROOM`: each call costs the ranks a few trips.
    RuntimeError if a rank sends what `pack` does not make.
    """
    mine = pack(value)
    head = torch.zeros(_LENGTH + ROOM, dtype=torch.uint8, device="cpu")
    head[:_LENGTH].view(torch.int64)[0] = len(mine)
    head[_LENGTH : _LENGTH + len(mine)] = mine[:ROOM]
    heads = all_gather(head)
    sizes = [int(theirs[:_LENGTH].view(torch.int64)) for theirs in heads]
    for rank, size in zip(ranks, sizes, strict=True):
        if not 0 < size <= MAX_BYTES:  # before anything is allocated for it
            raise RuntimeError(f"rank {rank} announced a message of {size} bytes and one has 1 to {MAX_BYTES}; {_REMEDY}")
    parts = [theirs[_LENGTH:] for theirs in heads]
    if max(sizes) > ROOM:
        rest = torch.zeros(max(sizes) - ROOM, dtype=torch.uint8, device="cpu")
        rest[: max(len(mine) - ROOM, 0)] = mine[ROOM:]
        parts = [torch.cat(both) for both in zip(parts, all_gather(rest), strict=True)]
    return [unpack(part[:size], rank) for part, size, rank in zip(parts, sizes, ranks, strict=True)]


def pack(value: Any) -> torch.Tensor:
    """``value`` as uint8 [bytes]: None, numbers, text, CPU tensors, and tuples, lists and dicts of those; else TypeError."""
    return torch.frombuffer(bytearray(json.dumps(_tagged(value)).encode()), dtype=torch.uint8)


def unpack(data: torch.Tensor, sender: int) -> Any:
    """The value in the bytes that rank ``sender`` packed. RuntimeError if they hold none."""
    try:
        return json.loads(data.numpy().tobytes(), object_hook=_untagged)
    except (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError) as problem:
        raise RuntimeError(f"rank {sender} sent {len(data)} bytes that are no message of ours ({problem}); {_REMEDY}") from problem


def _tagged(value: Any) -> Any:
    """JSON has no tuples, no dicts with other keys than text, and no tensors: an object with one key says which it is."""
    if isinstance(value, tuple):
        return {"tuple": [_tagged(item) for item in value]}
    if isinstance(value, list):
        return [_tagged(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[_tagged(key), _tagged(item)] for key, item in value.items()]}
    if isinstance(value, torch.Tensor):
        raw = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {"tensor": [str(value.dtype), list(value.shape), base64.b64encode(raw).decode()]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__} is not plain data; ranks exchange numbers, text, tensors, tuples, lists and dicts")


def _untagged(found: dict[str, Any]) -> Any:
    ((kind, content),) = found.items()
    if kind == "tuple":
        return tuple(content)
    if kind == "dict":
        return dict(content)
    if kind != "tensor":
        raise ValueError(f"unknown kind {kind!r}")
    name, shape, text = content
    dtype, raw = _DTYPES[name], bytearray(base64.b64decode(text, validate=True))
    if len(raw) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(raw)} bytes for {dtype} {shape}")
    return torch.frombuffer(raw, dtype=dtype).reshape(shape) if raw else torch.empty(shape, dtype=dtype, device="cpu")

"""How the ranks of `bench` agree: over gloo, beside the measured streams, so that a failure on one rank is known to all."""

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..runtime import env, wire


class Failed(Exception):
    """An action raised on at least one rank; all ranks get this. ``everywhere``: on all of them."""

    def __init__(self, errors: Sequence[str | None]) -> None:
        said = [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error]
        said.sort(key=lambda text: "PeerTimeout" in text)  # who waited in vain is not the cause
        self.everywhere = len(said) == len(errors)
        same = self.everywhere and len(set(errors)) == 1
        super().__init__(f"every rank: {errors[0]}" if same else said[0] + (f" (and {len(said) - 1} more)" if said[1:] else ""))


class Lost(Exception):
    """Some ranks are stuck in a collective that the others will never join; the run cannot go on."""


class Peers:
    """Agreement on the host, over gloo; its deadline outlasts fluxlike's own, so that a wait that runs out can be told."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=2 * env.timeout_s() + 60))

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``, plain data as `runtime.wire` has it."""
        return wire.exchange(value, list(range(self.size)), self._all_gather)

    def _all_gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine, group=self.group)
        return parts

    def barrier(self) -> None:
        dist.barrier(group=self.group)

    def add(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, where ``values`` are."""
        total = values.to("cpu", copy=True)
        dist.all_reduce(total, group=self.group)
        return total.to(values.device)

    def attempt(self, action: Callable[[], Any]) -> Any:
        """What ``action`` returns on this rank, or Failed on every rank if it raised on any."""
        value, error = _try(action)
        errors = self.gather(error)
        if any(errors):
            raise Failed(errors)
        return value

    def slowest(self, action: Callable[[], float]) -> float:
        """The largest of the ranks' numbers, or Failed on every rank."""
        value, error = _try(action)
        worst = torch.tensor([math.inf if value is None else value], dtype=torch.float64)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=self.group)
        if math.isinf(worst.item()):
            raise Failed(self.gather(error))
        return worst.item()


def _try(action: Callable[[], Any]) -> tuple[Any, str | None]:
    try:
        return action(), None
    except Exception as problem:  # told to all ranks, which then go on together
        text = str(problem).strip()
        return None, f"{type(problem).__name__}: {text.splitlines()[0] if text else 'no message'}"[:200]

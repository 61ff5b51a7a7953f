"""Agreement of the ranks of a group on the host, with a deadline: at creation and closing, never inside a call.

Each torch group gets a twin with the gloo backend, so that host agreement works beside NCCL without touching a stream, and
has fluxlike's deadline and not torch's half hour.
"""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from . import env
from .errors import PeerTimeout


class ControlGroup:
    """The ranks of one torch group: who they are, and how they agree."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks: list[int] = dist.get_process_group_ranks(group)
        self.rank: int = self.ranks.index(dist.get_rank())
        self.size: int = len(self.ranks)
        self.name: str = group.group_name
        self.group = group
        self._twin = dist.new_group(
            self.ranks, backend="gloo", timeout=timedelta(seconds=env.timeout_s()), use_local_synchronization=True
        )

    def gather(self, value: Any, what: str) -> list[Any]:
        """Every rank's ``value`` (picklable), in group order. PeerTimeout if a rank does not come."""
        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, value, group=self._twin)
        except RuntimeError as error:
            raise PeerTimeout(
                f"{what}: not every rank of {self.ranks} came within {env.timeout_s():g} s ({str(error).splitlines()[0]}); "
                "all ranks of the group must make this call and be alive; FLUXLIKE_TIMEOUT_S sets the limit"
            ) from error
        return values

    def agree(self, what: str, arguments: Any, error: Exception | None = None) -> None:
        """Raise on all ranks together if one has an ``error`` or if the ranks' ``arguments`` differ."""
        said = self.gather((arguments, None if error is None else (type(error).__name__, str(error))), what)
        for index, (_, failure) in enumerate(said):
            if failure is None:
                continue
            if error is not None:
                raise error
            kind = ValueError if failure[0] == "ValueError" else RuntimeError
            raise kind(f"rank {self.ranks[index]} failed, so no rank goes on: {failure[1]}")
        for index, (theirs, _) in enumerate(said):
            if theirs != said[0][0]:
                raise ValueError(
                    f"{what}: rank {self.ranks[0]} has {said[0][0]} and rank {self.ranks[index]} has {theirs}; "
                    "every rank of the group must pass the same arguments"
                )

    def barrier(self, what: str) -> None:
        """Wait for every rank of the group, bounded."""
        self.gather(None, what)

    def close(self) -> None:
        dist.destroy_process_group(self._twin)

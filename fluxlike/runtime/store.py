"""Torch's store, for who waits in it beside others."""

import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist


class PollingStore(dist.Store):  # type: ignore[name-defined]
    """A store that asks and naps where torch's own would wait in its connection, which all threads of a rank share.

    That serves one request at a time. While a thread waited there for what another rank will say, nothing that this rank has to
    say got out; and if ranks connect several groups at once, each may wait for just that. Gloo waits in whatever it is given.
    """

    def __init__(self, store: Any, limit: float) -> None:
        """``limit``: seconds of a wait without a limit of its own."""
        super().__init__()
        self._store, self._limit = store, limit

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)  # type: ignore[no-any-return]

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)  # type: ignore[no-any-return]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit = self._limit if timeout is None else timeout.total_seconds()
        deadline, pause = time.monotonic() + limit, 1e-4
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                raise RuntimeError(f"wait for {keys} in the store timed out after {limit:g} s")
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)

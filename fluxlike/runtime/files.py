"""Reading files whose names come from the environment: at once or not at all, and where it matters only the user's own."""

import os
import stat
from pathlib import Path


def read(path: str | Path, limit: int, private: bool = False) -> bytes:
    """The bytes of a plain file of at most ``limit`` bytes; whoever may write into a pipe that lies there is not waited for.

    ``private``: nobody else may have written it or may replace it. OSError if it cannot be opened, PermissionError if it is not
    private, ValueError if it is no plain file or too large.
    """
    if private:
        refuse_shared(Path(path).parent)
    with open(path, "rb", opener=_at_once) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is no plain file")
        if private:
            refuse_shared(path, found)
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"it has more than {limit} bytes")
    return data


def _at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def refuse_shared(path: str | Path, found: os.stat_result | None = None) -> None:
    """PermissionError if another user than root may have made a file or directory, or may write there. ``found``: its stat."""
    found = os.stat(path) if found is None else found
    mode, owner, user = stat.S_IMODE(found.st_mode), found.st_uid, os.geteuid()
    if owner not in (0, user):
        raise PermissionError(f"{path} belongs to user {owner} and not to you, user {user}; make one of your own in its place")
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{path} has mode {mode:04o}, so others may write there; run chmod go-w on it")

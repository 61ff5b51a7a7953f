"""Agreement of the ranks of a group on the host, with a deadline: at creation and closing, never inside a call.

Each torch group gets gloo connections of fluxlike's own over torch's store, so that host agreement works beside NCCL without
touching a stream, has fluxlike's deadline and not torch's half hour, and fails at once when a rank is gone. They are made
without ``torch.distributed.new_group``: that is collective over the whole world, and its local form names groups by how many
each rank has made, which differs between ranks of overlapping groups.
"""

import contextlib
import ctypes
import functools
import logging
import math
import os
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from . import env, faking, wire
from .errors import CallMismatch, PeerTimeout, heard, mismatch
from .store import PollingStore

if TYPE_CHECKING:
    from .calls import CallBoard

log = logging.getLogger("fluxlike")

#: The number of this rank's last attempt to connect these ranks by a key; they agree on the next one, see `ControlGroup._attempt`.
_made: Counter[tuple[str, tuple[int, ...]]] = Counter()
_counting = threading.Lock()


#: Seconds that an exchange lasts at most whose ranks have not come in time.
BRIEF_S = 0.05

#: Seconds between two looks at what the others do, once they are known to be late.
LATE_S = 0.02

#: What all ranks raise where one does; of others RuntimeError.
_RAISED = {kind.__name__: kind for kind in (ValueError, CallMismatch, PeerTimeout)}

#: What a rank brings to `ControlGroup.part` whose device does.
_FAILS = "the device fails"

#: The race checker, while there is one: ranks that agree on the host are ordered by that.
observer: Any = None


def pauses() -> Iterator[bool]:
    """Pauses between two looks at what the others do, each twice as long as the last, up to `LATE_S`; True once they are that long.

    They have no end: whoever looks says how long.
    """
    pause = 1e-4
    while True:
        time.sleep(pause)
        pause = min(2 * pause, LATE_S)
        yield pause == LATE_S


_kept: weakref.WeakSet[Any] = weakref.WeakSet()


def keep_in_children(thing: Any) -> None:
    """No destructor of ``thing``, or of what it holds, runs in a forked child, where its ``is_forked`` becomes True, if it has one,
    and its ``lock`` another.

    Gloo's would wait for threads that are not there; torch's, of memory that streams used, ends a process that cannot use the GPU.
    """
    _kept.add(thing)
    _watch_forks()


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_keep)


def _keep() -> None:
    for thing in _kept:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
        if hasattr(thing, "is_forked"):
            thing.is_forked = True
        if hasattr(thing, "lock"):  # which a thread may hold that is not there
            thing.lock = threading.RLock()


class Devices:
    """Gloo's of this process, which all its groups use: each has a thread that wakes a hundred times a second."""

    is_forked = False

    def __init__(self) -> None:
        kind: Any = dist.ProcessGroupGloo  # by the interfaces that torch's own groups would go by
        names = filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
        # all at once, also where TORCH_GLOO_LAZY_INIT has them connect when they are used: a device that does serves one group only
        self._gloo = [kind.create_device(interface=name, lazy_init=False) for name in names] or [
            kind.create_default_device(lazy_init=False)
        ]

    def options(self, timeout: timedelta) -> Any:
        """Of a group that uses them; else as by default."""
        made = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        made._timeout, made._devices, made._threads = timeout, self._gloo, 2 * len(self._gloo)
        return made


_devices: weakref.ReferenceType[Devices] | None = None
_sharing = threading.Lock()


def devices() -> Devices:
    """Those of the groups that are open, or new ones: they end with the last of these."""
    global _devices
    with _sharing:
        found = _devices() if _devices is not None else None
        if found is None or found.is_forked:
            found = Devices()
            keep_in_children(found)
            _devices = weakref.ref(found)
        return found


def _said(error: Exception) -> str:
    """What gloo says happened, without where in its sources and without its advice, which are in the cause."""
    first = re.sub(r"^\[[^]]*:\d+\] *", "", str(error).splitlines()[0]) if str(error) else type(error).__name__
    return first.partition(". This is typically")[0]


def key_of(group: dist.ProcessGroup) -> str:
    """Which of the torch groups of its ranks a group is, counted as they were made: an order that torch asks all ranks to keep.

    Names of split groups are not for that: they say how many groups this rank is in (pytorch issue 190396).
    """
    ranks, known = dist.get_process_group_ranks(group), dist.distributed_c10d._world.pg_group_ranks
    alike = [other.group_name for other in list(known) if dist.get_process_group_ranks(other) == ranks]
    return str(alike.index(group.group_name))


class ControlGroup:
    """The ranks of one torch group, or those of it on one node: who they are, and how they agree.

    Making it is collective over them. ``group``: the torch group of these ranks; None for a part of one. ``key``: tells it from
    other groups of the same ranks, and is the same on all of them, as torch's names are not; see `key_of`.
    """

    #: This process is a child of the rank: what it writes to memory that ranks share would be taken for the rank's.
    is_forked = False

    def __init__(self, ranks: list[int], name: str, group: dist.ProcessGroup | None, key: str) -> None:
        self.ranks, self.name, self.group, self.key = ranks, name, group, key
        self.rank: int = self.ranks.index(dist.get_rank())
        self.size: int = len(self.ranks)
        #: The places in the group of the ranks of each node, and which node is this rank's; see `nodes`.
        self.nodes: list[list[int]] = [list(range(self.size))]
        self.node = 0
        #: How many contexts between nodes have been made, the same number on all ranks.
        self.spanning = 0
        #: How many calls this rank has refused; see `ops.refusals`.
        self.refused = 0
        #: How many calls between nodes it has made or refused since a context for them was made.
        self.between = 0
        #: The ranks of the group on this node; this itself where that is all of them.
        self.local: ControlGroup = self
        #: The group whose ranks on this node these are; this itself where they are all of one.
        self.whole: ControlGroup = self
        #: Held for a whole call or meeting: threads of one rank take turns on a group, as its ranks must all see one order.
        self.lock = threading.RLock()
        #: What the ranks do, for comparison; None until it is made, and where they are on several nodes.
        self.board: CallBoard | None = None
        #: What this rank said at a meeting that it has left with an error, while the others may still come; see `_rejoin`.
        self._left: Any = None
        #: The beginning of a meeting: the exchange of gloo's, where it puts what the ranks say, and when it began.
        self._begun: tuple[Any, list[torch.Tensor], float] | None = None
        #: Whether a rank did not come when this one wanted to leave, and the seconds that it waits for one from now on, at most.
        self.missed, self.longest = False, math.inf
        self._devices: Devices | None = None
        self._store: PollingStore | None = None  # kept, as gloo may connect as late as it sends, and keeps no part in Python
        self._gloo: Any = self._connect()
        keep_in_children(self)
        keep_in_children(self._gloo)

    def _connect(self) -> Any:
        """Gloo's connections, over torch's store: under a number of the attempt, as addresses of one that failed stay there."""
        prefix = f"fluxlike/{'-'.join(map(str, self.ranks))}/{self.key}"  # each rank may connect another group of them first
        store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]
        since = time.monotonic()
        try:
            numbered = dist.PrefixStore(str(self._attempt(store)), store)  # type: ignore[attr-defined]
            since = time.monotonic()
            self._store = PollingStore(numbered, self.patience())
            self._devices = devices()
            how = self._devices.options(timedelta(seconds=self.patience()))
            return dist.ProcessGroupGloo(self._store, self.rank, self.size, how)
        except PeerTimeout:
            raise
        except RuntimeError as error:
            raise self._nobody("connecting the ranks of a group", error, since) from error
        finally:
            with contextlib.suppress(RuntimeError):  # the store may be what has failed
                store.set(f"at/{self.rank}", "0")

    def _attempt(self, store: Any) -> int:
        """The number of this attempt to connect, once all ranks are at it. PeerTimeout if one does not come.

        A rank has waited alone, or is a new process, so the ranks' own counts differ: each says its next one in the store, and 0
        when it has left, and the highest is a number that no rank has used.
        """
        keys, which = [f"at/{rank}" for rank in range(self.size)], (self.key, tuple(self.ranks))
        with _counting:
            _made[which] += 1
            number = _made[which]
        store.set(keys[self.rank], str(number))
        deadline, pause = time.monotonic() + self.patience(), pauses()
        while True:
            said = [int(store.get(key)) for key in keys] if store.check(keys) else [0]
            if max(said) > number:
                with _counting:
                    number = _made[which] = max(said)
                store.set(keys[self.rank], str(number))
            elif min(said) == number:
                return number
            elif time.monotonic() > deadline:
                here = [store.check([key]) and store.get(key) != b"0" for key in keys]
                missing = [rank for rank, there in zip(self.ranks, here, strict=True) if not there]
                raise PeerTimeout(
                    f"connecting the ranks of a group: not every rank of {self.ranks} came within {self.patience():g} s, "
                    f"{f'not ranks {missing}' if missing else 'or some left again'}; all ranks of the group must make this call "
                    "and be alive; FLUXLIKE_TIMEOUT_S sets the limit"
                )
            next(pause)

    @property
    def spans(self) -> bool:
        """Whether the ranks are on several nodes."""
        return len(self.nodes) > 1

    @staticmethod
    def limit() -> float:
        """Seconds for a message to come, as the environment has it now."""
        try:
            return env.timeout_s()
        except ValueError:  # the ranks must meet to learn that one of them cannot read its environment
            return env.default_timeout_s()

    def patience(self) -> float:
        """Seconds for the ranks to come to a meeting: one may come only when its wait in a call, just as long, has run out."""
        limit = self.limit()
        return min(self.longest, limit + max(2.0, limit / 10))

    def _nobody(self, what: str, error: Exception, since: float) -> PeerTimeout:
        passed, limit = time.monotonic() - since, self.patience()
        # gloo ends connections with the first wait that fails: whoever tries again would be told of them for ever
        then = ". To go on, call fluxlike.finalize and fluxlike.init on all ranks" if hasattr(self, "_gloo") else ""
        if passed > 0.9 * limit:
            sets = "FLUXLIKE_TIMEOUT_S sets the limit" if self.longest == math.inf else "so short as one has not come before"
            return PeerTimeout(
                f"{what}: not every rank of {self.ranks} came within {limit:g} s; all ranks of the group must make this call and "
                f"be alive; {sets}{then}"
            )
        return PeerTimeout(
            f"{what}: the connections of ranks {self.ranks} failed after {passed:.1f} s ({_said(error)}); all ranks of the group "
            f"must be alive and reach each other: see what the others say{then}"
        )

    def gather(self, value: Any, what: str) -> list[Any]:
        """Every rank's ``value`` as `wire` has it, in group order. PeerTimeout if a rank does not come.

        CallMismatch if the ranks were not in step before, or came for different things, then with this rank's contexts ended and
        the ranks in step again.
        """
        with self.lock, faking.off():
            told = self.board is not None and self.board.frozen
            try:
                said = self._meet(value, what)
            except CallMismatch:
                if not told and not (self.board is not None and self.board.knows):
                    raise
                said = self._meet(value, what)  # this rank has raised before: it waits for those that raise only now
        if any(theirs != what for theirs, *_ in said):
            raise self._elsewhere([theirs for theirs, *_ in said], [value == _FAILS for _, value, *_ in said])
        if observer is not None:
            observer.learn([clock for _, _, clock, _ in said])
        return [value for _, value, _, _ in said]

    def _elsewhere(self, whats: list[str], fails: list[bool]) -> CallMismatch:
        """The error of ranks that have met and came for different things; the same on all of them.

        ``fails``: for each rank, whether it says in `part` that its device does, for which it may have left out other meetings.
        """
        one = fails.index(True) if any(fails) else 0
        other = next(index for index, theirs in enumerate(whats) if theirs != whats[one])
        why = ", as its device fails," if fails[one] else ""
        what = f"rank {self.ranks[one]} is at '{whats[one]}'{why} and rank {self.ranks[other]} at '{whats[other]}'"
        error = mismatch(what, self.ranks)
        error.met = True
        heard(error, self.name)
        if self.board is not None:
            self.board.stop(error)
        return error

    def _meet(self, value: Any, what: str) -> list[Any]:
        """What every rank came for, its value, its clocks and its state. CallMismatch if a rank must be told that they differ."""
        try:
            self._rejoin()
            state = None if self.board is None else self.board.state()
            if self.board is not None:
                self.board.meet(what)
            known = None if observer is None else observer.publish().tolist()
            return self._exchange((what, value, known, state))
        except (PeerTimeout, CallMismatch) as error:
            heard(error, self.name)
            raise

    def catch_up(self) -> None:
        """`_rejoin`, of a rank that will not come to another meeting, if one waits for it there and has not been told why.

        It waits as long as what has begun lasts, for which `_start` has set a limit.
        """
        pause = pauses()
        with self.lock, contextlib.suppress(PeerTimeout):
            while self._begun is not None and self.board is not None and not self._begun[0].is_completed():
                if self.board.all_told():
                    return
                next(pause)
            self._rejoin()

    def _rejoin(self) -> None:
        """End a meeting that this rank has left: the others come to it first, and learn there what this one has raised."""
        message, self._left = self._left, None
        if message is not None:
            with contextlib.suppress(CallMismatch):
                self._exchange(message)

    def _exchange(self, message: tuple[Any, ...]) -> list[Any]:
        """What every rank says at a meeting to which this one brings ``message``. CallMismatch as `_meet`."""
        steps = iter((self._first, self._all_gather))  # of `wire.exchange`
        try:
            said = wire.exchange(message, self.ranks, lambda mine: next(steps)(message[0], mine))
        except BaseException:  # an interrupt, too
            self._left = message if self._begun is not None else None
            raise
        if self.board is not None:
            self.board.settle([theirs[3] for theirs in said], {theirs[0] for theirs in said})
        return said

    def _first(self, what: str, mine: torch.Tensor) -> list[torch.Tensor]:
        """As `_all_gather`. CallMismatch when a rank makes a call instead of coming; what has begun is left for `_rejoin`.

        Both of its waits have one limit, `patience` from when this rank came: `_await_others` keeps it, and what has begun then
        is completed when it is over, come who may, as `_start` has told gloo.
        """
        if self._begun is None:
            since = time.monotonic()
            try:
                self._await_others(since)
            except CallMismatch:
                raise
            except BaseException:  # an interrupt: the others come, see `_rejoin`
                self._begun = self._start(what, mine, since)
                raise
            self._begun = self._start(what, mine, since)
        work, pause = self._begun[0], pauses()
        while self.board is not None and not work.is_completed():
            error = self.board.absence() if next(pause) else None  # a rank that is here soon need not be looked for
            if error is not None:
                raise error
        begun, self._begun = self._begun, None
        return self._end(what, begun)

    def _await_others(self, since: float) -> None:
        """The others are here, as far as the board says, or one has died or left, or the time is over. CallMismatch as `_first`.

        Gloo ends its connections when what has begun takes too long, also if this rank left it long ago, as one that makes
        another call than its peers does, and goes on with other things before it meets them again.
        """
        pause = pauses()
        while self.board is not None and self.board.awaits() and time.monotonic() - since < self.patience():
            if next(pause) and self.board.gone():
                return
        error = None if self.board is None else self.board.absence()
        if error is not None:
            raise error

    def _all_gather(self, what: str, mine: torch.Tensor) -> list[torch.Tensor]:
        return self._end(what, self._start(what, mine, time.monotonic()))

    def _start(self, what: str, mine: torch.Tensor, since: float) -> tuple[Any, list[torch.Tensor], float]:
        """``since``: when this rank came. What begins is completed, if by an error of gloo's, when its `patience` is over."""
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        how = dist.distributed_c10d.AllgatherOptions()  # type: ignore[attr-defined]
        how.timeout = timedelta(seconds=max(self.patience() - (time.monotonic() - since), BRIEF_S))
        try:
            return self._gloo.allgather([parts], [mine], how), parts, since
        except RuntimeError as error:
            raise self._nobody(what, error, since) from error

    def _end(self, what: str, begun: tuple[Any, list[torch.Tensor], float]) -> list[torch.Tensor]:
        work, parts, since = begun
        try:
            work.wait()
        except RuntimeError as error:
            raise self._nobody(what, error, since) from error
        return parts

    def send(self, message: torch.Tensor, to: int, tag: int, what: str) -> Callable[[], None]:
        """Queue a message for a rank of the group. What comes back waits until it has been sent, and keeps its memory till then."""
        work = self._message(lambda: self._gloo.send([message], to, tag), to, f"{what}: sending")

        def sent(kept: torch.Tensor = message) -> None:
            self._message(lambda: work.wait(timedelta(seconds=self.limit())), to, f"{what}: sending")

        return sent

    def receive(self, message: torch.Tensor, source: int, tag: int, what: str) -> None:
        """Wait for a message. PeerTimeout if it does not come."""
        wait = timedelta(seconds=self.limit())
        self._message(lambda: self._gloo.recv([message], source, tag).wait(wait), source, f"{what}: receiving")

    def _message(self, step: Callable[[], Any], peer: int, what: str) -> Any:
        since = time.monotonic()
        try:
            return step()
        except RuntimeError as error:
            passed = time.monotonic() - since
            limited = "; FLUXLIKE_TIMEOUT_S sets the limit" if passed > 0.9 * self.limit() else f" ({_said(error)})"
            node = next(node for node, places in enumerate(self.nodes) if peer in places)
            raise PeerTimeout(
                f"{what}: rank {self.ranks[self.rank]} waited {passed:.1f} s for rank {self.ranks[peer]} on node {node}{limited}. "
                "All ranks must be alive, reach each other and make the same calls in the same order. To go on, call "
                "fluxlike.finalize and fluxlike.init on all ranks: the connections between the nodes are no more"
            ) from error

    def agree(self, what: str, arguments: Any, error: Exception | None = None) -> None:
        """Raise on all ranks together if one has an ``error`` or if the ranks' ``arguments`` differ."""
        said = self.gather((repr(arguments), None if error is None else (type(error).__name__, str(error))), what)
        for index, (_, failure) in enumerate(said):
            if failure is None:
                continue
            if error is None:
                kind: type[Exception] = _RAISED.get(failure[0], RuntimeError)
                error = kind(f"rank {self.ranks[index]} failed, so no rank goes on: {failure[1]}")
            heard(error, self.name)
            raise error
        for index, (theirs, _) in enumerate(said):
            if theirs != said[0][0]:
                differ = CallMismatch(
                    f"{what}: rank {self.ranks[0]} has {said[0][0]} and rank {self.ranks[index]} has {theirs}; "
                    "every rank of the group must pass the same arguments"
                )
                differ.met = True
                heard(differ, self.name)
                raise differ

    def close(self) -> None:
        """Drop the connections now, and torch's group, which then ends when torch ends it, though this be kept or part of a cycle.

        Gloo's threads must not be left to the end of the interpreter, which some do not survive: one may end it
        with SIGABRT. Nor does the board's mapping wait for the garbage collector, where no context is kept.
        """
        if self.board is not None:
            self.board.leave()
        self._gloo = self._begun = self._left = self.group = self._devices = self._store = self.board = None

    def barrier(self, what: str) -> None:
        """Wait for every rank of the group, bounded."""
        self.gather(None, what)

    def part(self, what: str, able: bool = True) -> tuple[bool, CallMismatch | None]:
        """The barrier before ranks go apart, which those out of step meet at, too: whether all came, and what they must be told.

        The error is one that this rank learns of here: it belongs raised, but after the leaving. ``able``: whether this rank's
        device is done with what they leave; where one's is not, it is as if that rank had not come.
        """
        differ, told = None, self.board is not None and self.board.frozen
        for _ in range(3):  # once found, told to the ranks that do not know, in step again
            try:
                said = self.gather(None if able else _FAILS, what)
                fails = [rank for rank, theirs in zip(self.ranks, said, strict=True) if theirs == _FAILS]
                if fails:
                    log.warning("rank %d: %s: the device of ranks %s fails", self.ranks[self.rank], what, fails)
                return not fails, differ
            except CallMismatch as error:
                if error.met:
                    return False, error
                differ = differ or (None if told else error)
            except RuntimeError as error:
                self.missed = self.missed or isinstance(error, PeerTimeout)
                log.warning("rank %d: %s", self.ranks[self.rank], error)
                return False, differ
        return False, differ

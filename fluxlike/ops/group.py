"""What the contexts of all operations share: memory on the symmetric heap, failure of a wait, closing.

A context belongs to a torch group. Making and closing it is collective over the group; calls on it are collective too but
meet only through signals in memory (`kernels.sync`), never through the host. Those of operations with a product are in `context`.
"""

import ctypes
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from ..kernels import sync
from ..runtime import env, programs, racecheck, world
from ..runtime.calls import CallBoard
from ..runtime.control import ControlGroup
from ..runtime.errors import CallMismatch, PeerTimeout, RaceError, heard, untraced
from . import again, spinning
from .making import Held, taking

REGION_ALIGN = 256
REPORT_WORDS = 8
#: Kinds of calls that a context keeps plans for.
PLANS = 256

#: A launch that `prepare` made: it takes the tensors that vary.
Prepared = Callable[[Sequence[torch.Tensor]], None]
_WHAT = {
    sync.WAIT_CREDIT.value: "the credit that its slots may be written again",
    sync.WAIT_PARTIAL.value: "its partial sums",
    sync.WAIT_SHARD.value: "its shard",
    sync.WAIT_SIGNAL.value: "its signal",
    sync.WAIT_PART.value: "the rest of a tile",
    sync.WAIT_GATHERED.value: "the rows that it gathers",
    sync.WAIT_RESULT.value: "its part of the result",
}


class Told(NamedTuple):
    """How a call is made, and what of it the peers are told; made once for calls that come again."""

    path: str
    sizes: str


def told(path: str, **sizes: Any) -> Told:
    return Told(path, ", ".join([f"{name}={value}" for name, value in sizes.items()]))


class HowCompiled(Protocol):
    """How a kernel is compiled, as a `tiling.Tiling` says it among other things."""

    @property
    def warps(self) -> int: ...

    @property
    def stages(self) -> int: ...


class GroupContext(Held):
    """Memory and signals of one operation on one group.

    Attributes for people and tests: ``last_path`` (how the last call was made), ``stats`` (calls, kernel launches, those of them
    that went straight to the driver, …), ``group_ranks``, ``rank``, ``size``.
    """

    #: What makes one, for messages.
    maker = "fluxlike.ops.group.GroupContext"
    #: Tensors that the race checker watches.
    watched: tuple[str, ...] = ("head", "ctl")
    #: What of these is data that signals order, and what is signals; for the lint.
    payload: tuple[str, ...] = ()
    signals: tuple[str, ...] = ("head",)
    #: Whether the peers know of the call that the next one is a part of.
    known = False

    def __init__(self, op: str, control: ControlGroup, sizes: dict[str, int]) -> None:
        """Collective. ``sizes``: bytes of each region of the heap; all begin as zero but "data", which comes last if there is one.

        A subclass sets before what its `take` needs; `made` ends the making.
        """
        self.op, self.world = op, world.current()
        self.control, self.rank, self.size, self.group_ranks = control, control.rank, control.size, control.ranks
        one_node(op, control)
        assert control.board is not None
        self.board: CallBoard = control.board
        self.device = self.world.device
        self.stats = {"calls": 0, "launches": 0, "direct": 0, "products": 0}
        self.last_path = ""
        #: Whether a call is being made.
        self._calling = False
        self.closed = False
        #: Whether a CUDA graph holds calls of it, as far as `kept` knows.
        self.captured = False
        #: Contexts that are of this one, and end with it.
        self.inner: list[GroupContext] = []
        #: What has failed, never raised itself; see `errors.untraced`.
        self._error: Exception | None = None
        self._seen = False
        self._stream: Any = None
        self._plans: dict[Hashable, tuple[int, Any]] = {}
        self._planned = 0
        self._again: dict[Hashable, again.Known] = {}
        self._sizes = {"head": 8 * (1 + self.size), **sizes}
        self.offsets: dict[str, int] = {}
        total = 0
        for name, nbytes in self._sizes.items():
            self.offsets[name] = total
            total += -(-nbytes // REGION_ALIGN) * REGION_ALIGN
        self.block = self.world.heap.allocate(total, control, self.world.indices(control))
        with taking(op, control):
            self.take()

    def take(self) -> None:
        """What this rank has for itself: its view of the block, and memory, streams and threads, of which it may have too few."""
        executor = self.world.executor
        signals = self.block.local[: self.offsets.get("data")]
        racecheck.host_write(signals)
        signals.zero_()
        self.head = self.region("head", torch.int64)
        self.report = executor.report(REPORT_WORDS)
        self._reported = ctypes.c_int64.from_address(self.report.data_ptr())  # read in every call, and a tensor is slow to read
        words = [0] * sync.BASES.value
        #: Seconds that a wait of a kernel may last.
        self.limit_s = env.timeout_s()
        words[sync.TIMEOUT.value] = int(self.limit_s * 1e9)
        words[sync.REPORT.value] = self.report.data_ptr()
        words += self.block.addresses
        self.ctl = executor.lasting(lambda: torch.tensor(words, dtype=torch.int64, device=self.device))

    def lasting(self, *shape: int, dtype: torch.dtype, make: Callable[..., torch.Tensor] = torch.empty) -> torch.Tensor:
        """Memory of this rank alone, which stays with the context."""
        return self.world.executor.lasting(lambda: make(shape, dtype=dtype, device=self.device))

    def region(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """This rank's part of the heap that is called so."""
        start = self.offsets[name]
        return self.block.local[start : start + self._sizes[name]].view(dtype)

    def made(self, kind: str) -> None:
        """The end of the making: all ranks are here, and calls may begin. Collective. ``kind``: of context, for messages."""
        for name in self.watched:
            racecheck.watch(f"{self.op}.{name}", getattr(self, name))
        self.world.executor.synchronize()
        self._calls = 0
        self.board.made += 1
        self._mended = self.board.mended
        self.label = f"context {self.board.made} ({kind})"
        spinning.by_ctl[self.ctl.data_ptr()] = self
        self.world.contexts.append(self)
        self.board.members.append(self)
        self.control.barrier(f"making {self.label}")
        self.board.apart = None

    # -- a call ---------------------------------------------------------------------------------------------------------

    def record(self, **sizes: Any) -> None:
        """Let the peers know of a call with ``sizes``, which must be the same on all ranks; also of one that needs no launch.

        Raises what is known to have failed, and CallMismatch if another rank does something else. Under a graph capture it is
        the capture that is known to the peers, not the replays.
        """
        self._record(told("", **sizes).sizes)

    def _record(self, shown: str) -> None:
        self.raise_if_failed()
        if self.known:
            return
        try:
            with self.control.lock:
                self._calls += 1
                self.board.call(f"call {self._calls} of {self.label}{shown and ' with '}{shown}")
        except CallMismatch:
            raise
        except BaseException as error:  # the peers may have seen it; an interrupt may come as late as with the lock's release
            self._broken(error)
            raise

    def begin(self, path: str | Told, **sizes: Any) -> "Begun":
        """A ``with`` around a call: on entry it is recorded and ordered behind the last one, also behind what waits for peers on
        other streams of ours. A kernel with a program on every multiprocessor waits for peers, too: if one GPU began with the one
        and another with the other, each would wait for what the other has no room for.

        What ends the call in the middle, as no memory, ends this context: the peers have seen that this rank makes it. If it went
        on, they would take its next call for this one.

        ``path``: how the call is made, and the sizes if they were `told`.
        """
        return Begun(self, path if isinstance(path, Told) else told(path, **sizes))

    def _enter(self, call: Told) -> None:
        self._record(call.sizes)
        try:
            self._stream = self.world.executor.on_same_stream(self._stream)
            for wait in tuple(self.world.ahead):
                wait()
            self.stats["calls"] += 1
            self.last_path, self._calling = call.path, True
        except BaseException as error:  # the peers have seen it
            self._broken(error)
            raise

    def programs(self, tiles: int) -> int:
        """Programs of a persistent launch: one a multiprocessor, or fewer where there are fewer tiles."""
        return max(1, min(self.world.executor.programs, tiles))

    def plan(self, key: Hashable, make: Callable[[], Any]) -> tuple[int, Any]:
        """What ``make`` makes for calls of one kind, kept for all that follow, and a number that no other has."""
        known = self._plans.get(key)
        if known is None:
            if len(self._plans) >= PLANS:
                self._plans.clear()
            self._planned += 1
            known = self._plans[key] = self._planned, make()
        return known

    def recall(self, key: Hashable) -> again.Known | None:
        """What is known of calls with this key."""
        return self._again.get(key)

    def remember(self, key: Hashable, known: again.Known) -> None:
        """What came of the call that has just been made; it stays as long as the plans."""
        if len(self._again) >= PLANS:
            self._again.clear()
        self._again[key] = known

    def multiply(self, a: torch.Tensor, w: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """out = a · wᵀ (+ bias) by torch, on the current stream; see Numerics in `decomposed`."""
        if out.numel() > 0:
            racecheck.host_read(a)
            racecheck.host_write(out)
            self.world.executor.multiply(a, w, out, bias)
            self.stats["products"] += 1

    def launch(self, kernel: Any, programs: int, args: Sequence[Any], constants: dict, tile: HowCompiled) -> None:
        """One persistent launch, of a kernel that is launched now and then; `prepare` is for calls that come again.

        RuntimeError outside of a call: its peers would not know of it, and nothing would order it behind the one before.
        """
        if not self._calling:
            raise RuntimeError(f"{self.op}: a launch outside of a call of its context; make it in `with ctx.start(...)`")
        self.stats["launches"] += 1
        self.world.executor.launch(kernel, programs, args, constants, tile.warps, tile.stages)

    def prepare(
        self, kernel: Any, programs: int, args: Sequence[Any], constants: dict, tile: HowCompiled, varying: tuple[int, ...]
    ) -> Prepared:
        """A persistent launch, to be made with the tensors of each call at the positions ``varying`` of ``args``."""
        run = self.world.executor.prepare(kernel, programs, args, constants, tile.warps, tile.stages, varying)

        def launch(tensors: Sequence[torch.Tensor]) -> None:
            self.stats["launches"] += 1
            try:
                self.stats["direct"] += run(tensors)
            except BaseException as error:
                self._broken(error)
                raise

        return launch

    # -- failure --------------------------------------------------------------------------------------------------------

    def raise_if_failed(self) -> None:
        """Raise what is known now, without waiting for the device."""
        # twice in every call, also for what it is made of: plain and fast
        if self.world.is_forked or self.closed or self.failure() is not None:
            self._raise()
        for context in self.inner:
            context.raise_if_failed()

    def _raise(self) -> None:
        self.world.raise_if_forked()
        if self.closed:
            raise RuntimeError(f"{self.op}: this context is closed; make a new one with {self.maker}")
        for context in (self, *self.inner):
            context._seen = True
        assert self._error is not None
        heard(self._error, self.control.name)  # who was to be told has been, when it happened
        raise untraced(self._error)

    def failure(self) -> Exception | None:
        """The error of a call of this context, if one is known by now and whether or not it was raised."""
        if self._error is None and self._reported.value != 0:
            with self.control.lock:
                words = [int(word) for word in self.report[1:7]]
                self._error = self.board.diagnose() or self._timeout("", *words)
                self.board.freeze()
        return self._error

    def fits(self, sizes: dict[str, int]) -> bool:
        """Whether calls up to ``sizes`` can use it. The same on all ranks: not what failed, but what was made before a failure."""
        return self.in_step() and all(getattr(self, name) >= size for name, size in sizes.items())

    def in_step(self) -> bool:
        return not self.closed and self._mended == self.board.mended

    def stop(self, error: Exception) -> None:
        """The ranks of the group are out of step, as ``error`` says: this context fails, and no rank need wait in it any more."""
        if self._error is None:
            self._error, self._seen = error, True
        self._release()

    def _release(self) -> None:
        """End the waits of this context on all ranks; they name this one."""
        addresses = [address + 8 * sync.ABORT.value for address in self.block.addresses]
        try:
            self.world.executor.post(addresses, self.rank + 1)
        except RuntimeError as problem:  # a GPU in this state has an error of its own to report
            world.log.warning("rank %d cannot tell its peers that it gave up: %s", self.group_ranks[self.rank], problem)

    def _broken(self, error: BaseException) -> None:
        """A call was ended by ``error``: the context is of no more use, and the peers need not wait for the rest of the call."""
        self._seen = True
        self.board.freeze()
        heard(error, self.control.name)
        if self._error is not None:
            return
        if isinstance(error, (PeerTimeout, CallMismatch, RaceError)):
            self._error = untraced(error)
            return
        self._error = RuntimeError(
            f"{self.op}: an earlier call of this context was ended by {type(error).__name__} ({error}). {self.remedy}"
        )
        for context in (self, *self.inner):  # whose kernels may be in the middle of the same call
            context._seen = True
            context._release()

    def check(self) -> None:
        """Wait for the device and raise PeerTimeout if a wait of an earlier call ran out, on this rank or another.

        A rank whose wait runs out goes on with whatever is there, and in some operations passes that on: what the calls before
        gave is right where this does not raise.
        """
        self.world.raise_if_forked()
        self.world.executor.synchronize()
        self.look_at_peers()
        self.raise_if_failed()

    def gave_up(self) -> int:
        """1 + the rank of the group that gave up first, or 0. It may come at any time, and is no race."""
        with racecheck.unseen():
            return int(self.head[sync.ABORT.value])

    def look_at_peers(self) -> None:
        """The device is done: fail if another rank gave up. Its abort word was there before what it passed on."""
        for context in self.inner:
            context.look_at_peers()
        if self.closed or self.failure() is not None:
            return
        gave_up = self.gave_up()
        if gave_up:
            me, other = self.group_ranks[self.rank], self.group_ranks[gave_up - 1]
            with self.control.lock:
                self._error = self.board.diagnose() or PeerTimeout(
                    f"{self.op}: what rank {me} has of the calls of this context may be wrong, because rank {other} gave up first; "
                    f"the message of rank {other} names the cause. {self.remedy}",
                    told=2,
                )
                self.board.freeze()

    def limit_of(self, what: int) -> float:
        """Seconds that such a wait may last."""
        return self.limit_s * (self.size + 1 if what in sync.OWN else 1)

    def _timeout(
        self, before: str, what: int, peer: int, want: int, seen: int, call: int, abort: int, after: float | None = None
    ) -> PeerTimeout:
        """``after``: seconds after which the wait was ended, where that was before the limit."""
        me, them = self.group_ranks[self.rank], self.group_ranks[peer]
        if abort and abort - 1 != self.rank:
            other = self.group_ranks[abort - 1]
            return PeerTimeout(
                f"{before}{self.op}: rank {me} stopped waiting for rank {them} ({_WHAT[what]}, call {call}) because rank {other} "
                f"gave up first; the message of rank {other} names the cause. {self.remedy}",
                told=2,
            )
        waited, limit = f"{self.limit_of(what):g}", "; FLUXLIKE_TIMEOUT_S sets the limit"
        if after is not None:
            waited, limit = f"{after:.1f}", ""
        return PeerTimeout(
            f"{before}{self.op}: rank {me} waited {waited} s for rank {them}: {_WHAT[what]} of call {call} (expected {want}, saw "
            f"{seen}). {self.board.where(peer)} All ranks must be alive and make the same calls in the same order{limit}. "
            f"{self.remedy}"
        )

    def give_up(self, what: int, peer: int, want: int, seen: int, cause: str = "", after: float | None = None) -> Exception:
        """CPU heap: the error of a wait that cannot be met, after telling every peer. ``after``: see `_timeout`."""
        mismatch = self.board.diagnose()
        if mismatch is not None:
            return mismatch
        abort = self.gave_up()
        if abort == 0:
            self._release()
        with racecheck.unseen():
            call = int(self.ctl[sync.EPOCH.value]) + 1
        return self._timeout(cause, what, peer, want, seen, call, abort, after)

    # -- closing --------------------------------------------------------------------------------------------------------

    def unseen_failure(self) -> Exception | None:
        """A failure that no call has raised, which whoever closes the context raises now; after the device is done."""
        failure = None if self._seen else self.failure()
        self._seen = self._seen or failure is not None
        unseen = None if failure is None else untraced(failure)
        for context in self.inner:
            found = None if context.closed else context.unseen_failure()
            unseen = unseen or found
        return unseen

    def close(self) -> None:
        """Give the memory back; collective over the group, and harmless when called again.

        Waits until every rank is done with its calls, those of other threads, too. If one does not come, this rank keeps the
        memory (nobody may use what the missing rank may still write to) and goes on. In a forked child it does nothing: the
        memory is the parent's.

        Raises, when all is done: CallMismatch if this rank learns only here that the ranks are out of step; what a call of this
        context came to, as PeerTimeout, if no call has raised it.
        """
        if self.world.is_forked:
            return
        programs.refuse_inside(f"close() of {self.label}")
        with self.control.lock:  # a thread may be in a call
            if not self.closed:
                self._close()

    def _close(self) -> None:
        self.world.executor.synchronize()
        together = [context for context in (self, *self.inner) if not context.closed]
        unseen = self.unseen_failure()
        for context in together:
            context._end()
        everyone, mismatch = self.control.part(f"closing {self.label}")
        if everyone:
            self.board.apart = None
        for context in together:
            self.board.members.remove(context)
            if everyone:
                self.world.heap.free(context.block)
        if mismatch is not None or unseen is not None:
            raise mismatch or unseen  # type: ignore[misc]

    def keep(self) -> None:
        for context in self.inner:
            context.keep()
        super().keep()

    def unmake(self) -> None:
        for context in (*getattr(self, "inner", ()), self):
            if hasattr(context, "block"):  # with all that comes before it
                context.world.executor.synchronize()
                context._end()
                if context in context.board.members:
                    context.board.members.remove(context)
                context.world.heap.free(context.block)

    def abandon(self) -> None:
        self.closed = True
        if hasattr(self, "ctl"):
            spinning.by_ctl.pop(self.ctl.data_ptr(), None)

    def _end(self) -> None:
        """No call comes any more, and the device is done. Of one that is half made, too."""
        self.closed = True
        if hasattr(self, "ctl"):
            spinning.by_ctl.pop(self.ctl.data_ptr(), None)
        if self in self.world.contexts:
            self.world.contexts.remove(self)
        self.drop()
        for name in self.watched:
            if hasattr(self, name):
                racecheck.unwatch(getattr(self, name))

    def drop(self) -> None:
        """Give up what is not memory of the heap; the device is done."""
        # they know this context, which shall go with its last user and not wait for the garbage collector
        self._plans.clear()
        self._again.clear()


class Begun:
    """See `GroupContext.begin`."""

    __slots__ = ("_call", "context")

    def __init__(self, context: Any, call: Told) -> None:
        self.context, self._call = context, call

    def __enter__(self) -> Any:
        self.context._enter(self._call)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.context._calling = False
        if error is not None:
            self.context._broken(error)


def resolve(group: dist.ProcessGroup | ControlGroup | None) -> ControlGroup:
    return group if isinstance(group, ControlGroup) else world.current().control_of(group)


def one_node(op: str, control: ControlGroup) -> None:
    """ValueError if the group of an operation that stays on one node spans several."""
    if control.spans:
        raise ValueError(
            f"{op}: ranks {control.ranks} are on {len(control.nodes)} nodes, and only gemm_rs and ag_gemm go from node to node; "
            "use a group of ranks of one node"
        )

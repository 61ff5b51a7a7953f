"""What the contexts of all operations share: their memory, their signals, how a failed wait becomes an error, closing.

A context belongs to a torch group. Making and closing it is collective over the group; calls on it are collective too but
meet only through signals in memory (`kernels.sync`), never through the host.
"""

import ctypes
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..kernels import lang, sync
from ..runtime import env, programs, racecheck, world
from ..runtime.calls import CallBoard
from ..runtime.control import ControlGroup
from ..runtime.errors import CallMismatch, PeerTimeout, RaceError
from ..runtime.launches import Lanes
from . import choice, tiling, tuned
from .trace import Trace

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: What a caller may ask for: what auto chooses from, and what it does not choose, as it has not been measured.
SCHEDULES = ("auto", *dict.fromkeys(name for names in choice.TRANSPORTS.values() for name in names), "stream_k", "decomposed")
REGION_ALIGN = 256
REPORT_WORDS = 8
#: Kinds of calls that a context keeps plans for.
PLANS = 256

#: A launch that `Context.prepare` made: it takes the tensors that vary.
Prepared = Callable[[Sequence[torch.Tensor]], None]
_WHAT = {
    sync.WAIT_CREDIT.value: "the credit that its slots may be written again",
    sync.WAIT_PARTIAL.value: "its partial sums",
    sync.WAIT_SHARD.value: "its shard",
    sync.WAIT_SIGNAL.value: "its signal",
    sync.WAIT_PART.value: "the rest of a tile",
}


def check_arguments(op: str, sizes: dict[str, Any], dtype: Any, schedule: str) -> Exception | None:
    """The error in the arguments of a context's creation, if any; raised by all ranks together."""
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            return ValueError(f"{op}: {name}={value!r} is not a whole number above 0")
        if value > tiling.MAX_SIZE:
            return ValueError(f"{op}: {name}={value} is more than {tiling.MAX_SIZE}, up to which kernels count; split the calls")
    if dtype not in DTYPES:
        return ValueError(f"{op}: dtype={dtype} is not supported; use torch.bfloat16, torch.float16 or torch.float32")
    if schedule not in SCHEDULES:
        return ValueError(f"{op}: schedule={schedule!r} is not one of {', '.join(map(repr, SCHEDULES))}")
    return None


class Context:
    """Memory and signals of one operation on one group; made by ``fluxlike.create_…_context``.

    Attributes for people and tests: ``last_path`` (transport and loads of the last call, as "copy_engine/tma"; "decomposed/torch"
    where torch multiplied), ``stats`` (calls, kernel launches, those of them that went straight to the driver, copies queued,
    products by torch), ``group_ranks``, ``rank``, ``size``.
    """

    #: What makes one, for messages.
    maker = "fluxlike.ops.context.Context"
    #: Tensors that the race checker watches.
    watched: tuple[str, ...] = ("head", "full", "flags", "data", "ctl", "ready", "work", "parts")

    def __init__(self, op: str, control: ControlGroup, dtype: torch.dtype, schedule: str, flags: int, data: int) -> None:
        """Collective. ``flags``: in-kernel flags a source has at most; ``data``: elements of one of the two slot sets."""
        self.op, self.dtype, self.schedule = op, dtype, schedule
        self.world = world.current()
        self.control, self.rank, self.size, self.group_ranks = control, control.rank, control.size, control.ranks
        assert control.board is not None
        self.board: CallBoard = control.board
        self.device, executor = self.world.device, self.world.executor
        self.stats = {"calls": 0, "launches": 0, "direct": 0, "copies": 0, "products": 0}
        self.last_path = ""
        self.closed = False
        self._error: Exception | None = None
        self._seen = False
        self._stream: Any = None
        self._set = 0
        #: What calls are made of instead of what `choice.choose` says, and the plans of each such choice.
        self._used: choice.Choice | None = None
        self._plans_of: dict[choice.Choice | None, dict[Hashable, tuple[int, Any]]] = {}
        self._planned = 0
        #: FLUXLIKE_TUNE, the programs of a GPU and the measured choices: the same on all ranks.
        self.tuned = tuned.agreed(control, op, dtype, executor)
        self.use(None)
        self._copies: dict[Hashable, int] = {}
        #: What the kernels of the calls write their times to (`trace.begin`); None: they are compiled without.
        self.trace: Trace | None = None
        ranks = self.size
        self.max_flags = flags
        self.set_elements = tiling.round_up(data, 128)
        itemsize = dtype.itemsize
        sizes = {
            "head": 8 * (1 + ranks),
            "full": 4 * 2 * ranks * tiling.MAX_SUBS,
            "flags": 8 * ranks * flags,
            "data": 2 * self.set_elements * itemsize,
        }
        self.offsets: dict[str, int] = {}
        total = 0
        for name, nbytes in sizes.items():
            self.offsets[name] = total
            total += tiling.round_up(nbytes, REGION_ALIGN)
        self.block = self.world.heap.allocate(total, control, self.world.indices(control))
        signals = self.block.local[: self.offsets["data"]]
        racecheck.host_write(signals)
        signals.zero_()

        def region(name: str, dtype: torch.dtype) -> torch.Tensor:
            start = self.offsets[name]
            return self.block.local[start : start + sizes[name]].view(dtype)

        self.head, self.full = region("head", torch.int64), region("full", torch.int32)
        self.flags, self.data = region("flags", torch.int64), region("data", dtype)
        self.report = executor.report(REPORT_WORDS)
        self._reported = ctypes.c_int64.from_address(self.report.data_ptr())  # read in every call, and a tensor is slow to read
        words = [0] * sync.BASES.value
        words[sync.TIMEOUT.value] = int(env.timeout_s() * 1e9)
        words[sync.REPORT.value] = self.report.data_ptr()
        self.ctl = torch.tensor(words + self.block.addresses, dtype=torch.int64, device=self.device)
        self.ready = torch.zeros(ranks * tiling.MAX_SUBS, dtype=torch.int32, device=self.device)
        # of stream_k: parts of tiles, and the words that say that they are there
        places = 2 * executor.programs if schedule == "stream_k" else 1
        self.work = torch.empty(places * tiling.PART, dtype=torch.float32, device=self.device)
        self.parts = torch.zeros(places, dtype=torch.int64, device=self.device)
        for name in Context.watched:
            racecheck.watch(f"{op}.{name}", getattr(self, name))
        self.engine = executor.copy_engine()
        self.lanes = executor.lanes() if schedule == "decomposed" else Lanes()
        executor.synchronize()
        self._calls = 0
        self.board.made += 1
        self._mended = self.board.mended
        self.label = f"context {self.board.made} ({op}, {str(dtype).removeprefix('torch.')}, {schedule})"
        _by_ctl[self.ctl.data_ptr()] = self
        self.world.contexts.append(self)
        self.board.members.append(self)
        control.barrier(f"making {self.label}")

    # -- a call ---------------------------------------------------------------------------------------------------------

    def record(self, **sizes: int) -> None:
        """Let the peers know of a call with ``sizes``, which must be the same on all ranks; also of one that needs no launch.

        Raises what is known to have failed, and CallMismatch if another rank does something else. Under a graph capture it is
        the capture that is known to the peers, not the replays.
        """
        self.raise_if_failed()
        shown = ", ".join([f"{name}={value}" for name, value in sizes.items()])
        with self.control.lock:
            self._calls += 1
            self.board.call(f"call {self._calls} of {self.label}{shown and ' with '}{shown}")

    def begin(self, transport: str, tile: tiling.Tiling | None, **sizes: int) -> int:
        """Start a call: `record` it, order it behind the last one, choose the slot set. ``tile``: None where torch multiplies."""
        self.record(**sizes)
        self._stream = self.world.executor.on_same_stream(self._stream)
        self.stats["calls"] += 1
        self.last_path = f"{transport}/{'torch' if tile is None else 'tma' if tile.tma else 'pointer'}"
        self._set ^= 1
        return self._set

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

    def forget_plans(self) -> None:
        """Calls of every kind are planned anew from now on."""
        self._plans_of.clear()
        self.use(self._used)

    def launch(self, kernel: Any, programs: int, args: Sequence[Any], constants: dict, tile: tiling.Tiling) -> None:
        """One persistent launch, of a kernel that is launched now and then; `prepare` is for calls that come again."""
        self.stats["launches"] += 1
        try:
            self.world.executor.launch(kernel, programs, args, constants, tile.warps, tile.stages)
        except BaseException as error:
            self._broken(error)
            raise

    def prepare(
        self, kernel: Any, programs: int, args: Sequence[Any], constants: dict, tile: tiling.Tiling, varying: tuple[int, ...]
    ) -> Prepared:  # fmt: skip
        """A persistent launch, to be made with the tensors of each call at the positions ``varying`` of ``args``."""
        before = None if self.trace is None else self.trace.prepared(kernel, programs, args, constants)
        run = self.world.executor.prepare(kernel, programs, args, constants, tile.warps, tile.stages, varying)

        def launch(tensors: Sequence[torch.Tensor]) -> None:
            self.stats["launches"] += 1
            try:
                if before is not None:
                    before()
                self.stats["direct"] += run(tensors)
            except BaseException as error:
                self._broken(error)
                raise

        return launch

    def overlapped(
        self, launch: Callable[[], None], key: Hashable, queue: Callable[[], None], then: Callable[[], None] = lambda: None
    ) -> None:
        """``launch`` and ``then``, with the copies that ``queue`` queues beside them; the copies may wait for ``launch`` only.

        They are the same ones whenever ``key`` is the same, in this context's memory; None for copies of a caller's tensor.
        """

        def stuck(seconds: float) -> Exception | None:
            gave_up = int(self.head[sync.ABORT.value]) not in (0, self.rank + 1)
            if gave_up or seconds > env.timeout_s():
                return self.give_up(sync.WAIT_SIGNAL.value, self.rank, 1, 0)
            return None

        def counted() -> None:
            before = self.stats["copies"]
            queue()
            if len(self._copies) > 16 * PLANS:
                self._copies.clear()
            self._copies[key] = self.stats["copies"] - before

        if self.trace is not None:
            self.trace.copies.clear()
            key = None  # the copies of a graph have no times
        before = self.stats["copies"]
        try:
            self.world.executor.overlapped(self.engine, launch, key, counted, stuck, then)
        except BaseException as error:
            self._broken(error)
            raise
        self.stats["copies"] = before + self._copies[key]

    def copy(self, to: int, pitch_to: int, source: int, pitch_source: int, width: int, rows: int, flag: int) -> None:
        """Queue a copy of ``rows`` rows of ``width`` bytes to a peer, then its flag there."""
        begun = None if self.trace is None else self.engine.stamp()
        self.engine.copy(to, pitch_to, source, pitch_source, width, rows)
        self.engine.write(flag, 1)
        if self.trace is not None:
            self.trace.copied(flag, width * rows, begun, self.engine.stamp())
        self.stats["copies"] += 1

    def peer_data(self, peer: int, element: int) -> int:
        """Address of element ``element`` of ``peer``'s data region, as mapped here."""
        return self.block.addresses[peer] + self.offsets["data"] + element * self.dtype.itemsize

    def peer_full(self, peer: int, slot: int, sub: int) -> int:
        """Address of ``peer``'s flag for a sub-chunk of this rank; `sync.full_flag` is the same on the device."""
        index = (slot * self.size + self.rank) * tiling.MAX_SUBS + sub
        return self.block.addresses[peer] + self.offsets["full"] + 4 * index

    def told_by(self, flag: int) -> tuple[int, int]:
        """(peer, sub-chunk) of a flag's address, as `peer_full` gives it."""
        places = [(flag - address - self.offsets["full"]) // 4 for address in self.block.addresses]
        peer = next(peer for peer, place in enumerate(places) if 0 <= place < self.full.numel())
        return peer, places[peer] % tiling.MAX_SUBS

    def problem(self, m: int, n: int, k: int) -> choice.Problem:
        """A call, as far as its ranks have it in common; sizes of the whole problem."""
        capability = self.world.executor.capability
        return choice.Problem(self.op, capability, self.tuned.multiprocessors, self.size, self.dtype, m, n, k)

    def choose(self, problem: choice.Problem) -> choice.Choice:
        """How calls of this problem are made; all ranks come to the same."""
        if self._used is None:
            return choice.choose(problem, self.schedule, self.tuned.table)
        why = choice.why_not(problem, self._used)
        if why is not None or self.schedule not in ("auto", self._used.transport):
            why = why or f"schedule={self.schedule!r}"
            raise ValueError(f"{self.op}: {self._used} is no choice for {problem}: {why}; use one of choice.candidates")
        return self._used

    def use(self, made: choice.Choice | None) -> None:
        """Make the calls that follow as ``made`` says, None: as is best. For tuning and tests; on all ranks alike."""
        self._used, self._plans = made, self._plans_of.setdefault(made, {})

    # -- failure --------------------------------------------------------------------------------------------------------

    def raise_if_failed(self) -> None:
        """Raise what is known now, without waiting for the device."""
        self.world.raise_if_forked()
        if self.closed:
            raise RuntimeError(f"{self.op}: this context is closed; make a new one with {self.maker}")
        if self.failure() is not None:
            self._seen = True
            raise self._error  # type: ignore[misc]

    def failure(self) -> Exception | None:
        """The error of a call of this context, if one is known by now and whether or not it was raised."""
        if self._error is None and self._reported.value != 0:
            with self.control.lock:
                words = [int(word) for word in self.report[1:7]]
                self._error = self.board.diagnose() or PeerTimeout(self._describe(*words))
                self.board.freeze()
        return self._error

    def fits(self, sizes: dict[str, int]) -> bool:
        """Whether calls up to ``sizes`` can use it. The same on all ranks: not what failed, but what was made before a failure."""
        in_step = not self.closed and self._mended == self.board.mended
        return in_step and all(getattr(self, name) >= size for name, size in sizes.items())

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
        if self._error is not None:
            return
        if isinstance(error, (PeerTimeout, CallMismatch, RaceError)):
            self._error = error
            return
        self._error = RuntimeError(
            f"{self.op}: an earlier call of this context was ended by {type(error).__name__} ({error}); close the context and make "
            "a new one"
        )
        self._release()

    def check(self) -> None:
        """Wait for the device and raise PeerTimeout if a wait of an earlier call ran out."""
        self.world.raise_if_forked()
        self.world.executor.synchronize()
        self.raise_if_failed()

    def _describe(self, what: int, peer: int, want: int, seen: int, call: int, abort: int) -> str:
        me = self.group_ranks[self.rank]
        if abort and abort - 1 != self.rank:
            other = self.group_ranks[abort - 1]
            return (
                f"{self.op}: rank {me} stopped waiting for rank {self.group_ranks[peer]} ({_WHAT[what]}, call {call}) because rank "
                f"{other} gave up first; the message of rank {other} names the cause. Close the context and make a new one"
            )
        return (
            f"{self.op}: rank {me} waited {env.timeout_s():g} s for rank {self.group_ranks[peer]}: {_WHAT[what]} of call {call} "
            f"(expected {want}, saw {seen}). {self.board.where(peer)} All ranks must be alive and make the same calls in the same "
            "order; FLUXLIKE_TIMEOUT_S sets the limit. Close the context and make a new one"
        )

    def give_up(self, what: int, peer: int, want: int, seen: int, cause: str = "") -> Exception:
        """CPU heap: the error of a wait that cannot be met, after telling every peer."""
        mismatch = self.board.diagnose()
        if mismatch is not None:
            return mismatch
        abort = int(self.head[sync.ABORT.value])
        if abort == 0:
            self._release()
        message = self._describe(what, peer, want, seen, int(self.ctl[sync.EPOCH.value]) + 1, abort)
        return PeerTimeout(f"{cause}{message}")

    # -- closing --------------------------------------------------------------------------------------------------------

    def unseen_failure(self) -> Exception | None:
        """A failure that no call has raised yet; for finalize, after the device is done."""
        return None if self._seen else self.failure()

    def close(self) -> None:
        """Give the memory back; collective over the group, and harmless when called again.

        Waits until every rank is done with its calls. If one does not come, this rank keeps the memory (nobody may use what
        the missing rank may still write to) and goes on. In a forked child it does nothing: the memory is the parent's.

        Raises CallMismatch, when all is done, if this rank learns only here that the ranks are out of step.
        """
        if self.closed or self.world.is_forked:
            return
        self.closed = True
        self.world.executor.synchronize()
        _by_ctl.pop(self.ctl.data_ptr(), None)
        if self in self.world.contexts:
            self.world.contexts.remove(self)
        if hasattr(self.engine, "close"):
            self.engine.close()
        self._plans.clear()  # they know this context, which shall go with its last user and not wait for the garbage collector
        self._plans_of.clear()
        for name in self.watched:
            racecheck.unwatch(getattr(self, name))
        everyone, mismatch = self.control.part(f"closing {self.label}")
        self.board.members.remove(self)
        if everyone:
            self.world.heap.free(self.block)
        if mismatch is not None:
            raise mismatch

    def __enter__(self) -> "Context":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            self.close()
        except CallMismatch as mismatch:
            if error is None:
                raise
            world.log.warning("rank %d: %s", self.group_ranks[self.rank], mismatch)  # beside the error that is on its way


_by_ctl: dict[int, Context] = {}
#: When the wait that a thread is in began.
_waits: dict[int, float] = {}


def _on_spin(addresses: list[int], want: int, seen: int, what: int, peer: int, ctl: int, turn: int) -> None:
    """One turn of a failed wait on the CPU heap: let others run, and end the wait when it cannot be met."""
    context = _by_ctl[ctl]
    me = threading.get_ident()
    if turn == 0:
        _waits[me] = time.monotonic()
    if not programs.yield_program():
        time.sleep(min(5e-5 * (turn + 1), 1e-3))
    if int(context.head[sync.ABORT.value]) not in (0, context.rank + 1):
        raise context.give_up(what, peer, want, seen)
    if turn % 64 == 63:
        mismatch = context.board.diagnose()
        if mismatch is not None:
            raise mismatch
        gone = ", ".join(str(context.group_ranks[rank]) for rank in context.board.gone())
        if gone:
            raise context.give_up(what, peer, want, seen, f"rank(s) {gone} died. ")
    if time.monotonic() - _waits[me] > env.timeout_s():
        raise context.give_up(what, peer, want, seen)


lang.set_spin_hook(_on_spin)
lang.set_used_rows_hook(racecheck.used_rows)


def resolve(group: dist.ProcessGroup | None) -> ControlGroup:
    return world.current().control_of(group)


def wants_gradient(*operands: Any) -> bool:
    """Whether autograd must record a call with these tensors, or lists of them."""
    if torch.is_grad_enabled():
        for t in operands:  # in every call: plain and fast
            if isinstance(t, torch.Tensor):
                if t.requires_grad:
                    return True
            elif isinstance(t, (list, tuple)) and wants_gradient(*t):
                return True
    return False


def kept(
    kind: Any, control: ControlGroup, dtype: torch.dtype, sizes: dict[str, int], group: dist.ProcessGroup | None, **hints: int
) -> Any:
    """The context that a call without one uses: one for each (kind, group, dtype), made or grown collectively.

    Sizes are rounded up to a power of two, so that a model with changing lengths settles quickly. Growing synchronises with the
    other ranks and allocates, which a graph capture cannot: RuntimeError with the remedy.
    """
    this = world.current()
    key = (kind, control.name, dtype)
    context = this.cached.get(key)
    if context is not None and context.fits(sizes):
        return context
    if this.executor.is_capturing():
        raise RuntimeError(
            f"a context for {sizes} must be made, which a CUDA graph capture cannot do; run this call once before the capture, or "
            "pass a context of fluxlike.create_…_context"
        )
    wanted = {name: min(1 << max(size - 1, 0).bit_length(), tiling.MAX_SIZE) for name, size in sizes.items()}
    if context is not None and not context.closed:
        wanted = {name: max(size, getattr(context, name)) for name, size in wanted.items()}
        control.agree(f"replacing {context.label}", wanted)
        context.close()
    this.cached[key] = context = kind(**wanted, **hints, dtype=dtype, group=group, schedule="auto")
    return context

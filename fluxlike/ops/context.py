"""The contexts of operations with a product: their slots and flags, the copies beside a launch, how a call is made.

What all contexts share, failure and closing among it, is in `group`.
"""

from collections.abc import Callable, Hashable, MutableMapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ..kernels import sync
from ..kernels.tiles import cdiv, chunk_rows
from ..runtime import world
from ..runtime.control import ControlGroup
from ..runtime.launches import Lanes
from . import choice, cost, fused, keeping, sequential, tiling, tuned
from .exchange import ExchangeContext
from .group import Begun, GroupContext, HowCompiled, Prepared, Told, told
from .trace import Trace

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: What a caller may ask for: what auto chooses from, and what it does not choose.
SCHEDULES = ("auto", *dict.fromkeys(name for names in choice.TRANSPORTS.values() for name in names), "stream_k")


def check_arguments(op: str, sizes: dict[str, Any], dtype: Any, schedule: str) -> Exception | None:
    """The error in the arguments of a context's creation, if any; raised by all ranks together."""
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            return ValueError(f"{op}: {name}={value!r} is not a whole number above 0")
        if value > tiling.MAX_SIZE:
            return ValueError(f"{op}: {name}={value} is more than {tiling.MAX_SIZE}, up to which kernels count; split the calls")
    if dtype not in DTYPES:
        return ValueError(f"{op}: dtype={dtype} is not supported; use torch.bfloat16, torch.float16 or torch.float32")
    known = *SCHEDULES, sequential.TORCH, sequential.FUSED
    if schedule not in known:
        return ValueError(f"{op}: schedule={schedule!r} is not one of {', '.join(map(repr, known))}")
    most = fused.GATHERED_ROWS if op == "ag_gemm" else fused.ROWS
    misfit = fused.misfit(dtype, sizes.get("max_m", 1), most) if schedule == sequential.FUSED else None
    if misfit:
        return ValueError(f"{op}: schedule={schedule!r} {misfit}; use schedule={sequential.NAME!r} or 'auto'")
    if schedule == choice.DECOMPOSED and dtype == torch.float32:
        return ValueError(
            f"{op}: schedule={schedule!r} is not for dtype={dtype}, in which cuBLAS is less exact with the rows of one rank than "
            "with all; use schedule='auto' or another one, or torch.bfloat16 or torch.float16"
        )
    return None


class Context(GroupContext):
    """Memory and signals of one operation on one group; made by ``fluxlike.create_…_context``.

    ``last_path``: transport and loads of the last call, as "copy_engine/tma"; "…/torch" where torch multiplied, "…/fused" where
    one kernel did that and exchanged. ``stats`` also counts the copies queued, and products by torch.
    """

    maker = "fluxlike.ops.context.Context"
    shown = ("max_m", "n", "k", "dtype", "schedule")
    watched: tuple[str, ...] = ("head", "full", "flags", "data", "ctl", "ready", "work", "parts", "scratch")
    payload = ("data",)
    signals = ("head", "full", "flags", "ready")
    #: Calls of it of which one is made: several in a group that spans nodes.
    part_of = 1

    def __init__(
        self, op: str, control: ControlGroup, dtype: torch.dtype, schedule: str, flags: int, data: int, exchanged: int = 0
    ) -> None:
        """Collective. ``flags``: in-kernel flags a source has at most; ``data``: elements of one of the two slot sets;
        ``exchanged``: elements of what all ranks bring to the largest call with schedule "sequential".
        """
        self.dtype, self.schedule, ranks = dtype, schedule, control.size
        #: "auto", or who carries the data: the schedule but for how `sequential` is to multiply.
        self.transport = schedule.partition("/")[0]
        self.max_flags = flags
        self.set_elements = tiling.round_up(data, 128)
        regions = {
            "full": 4 * 2 * ranks * tiling.MAX_SUBS,
            "flags": 8 * ranks * flags,
            "data": 2 * self.set_elements * dtype.itemsize,
        }
        #: FLUXLIKE_TUNE and FLUXLIKE_TORCH_PRODUCTS, capability and programs of a GPU, measured choices: the same on all ranks.
        self.tuned = tuned.agreed(control, op, dtype, world.current().executor)
        #: What calls are made of instead of what `choice.choose` says, and the plans of each such choice.
        self._used: choice.Choice | None = None
        self._plans_of: dict[choice.Choice | None, dict[Hashable, tuple[int, Any]]] = {}
        self._exchanged = self._bytes_of(exchanged)
        super().__init__(op, control, regions)
        self.stats["copies"] = 0
        self._set = 0
        self.use(None)
        #: How many copies each queue makes: where a graph repeats them, nobody counts. A queue is there as long as its plan.
        self._copies: MutableMapping[Callable[[], None], int] = WeakKeyDictionary()
        #: What the kernels of the calls write their times to (`trace.begin`); None: they are compiled without.
        self.trace: Trace | None = None
        #: Of the schedule "sequential": memory for its exchanges; `scratch` lies between these and the products.
        self.exchange: ExchangeContext | None = None
        self.made(f"{op}, {str(dtype).removeprefix('torch.')}, {schedule}")
        if self._exchanged and self.size > 1:
            self.exchange = sequential.memory(op, control, cdiv(self._exchanged, self.size))
            self.exchange.stats = self.stats
            self.inner.append(self.exchange)

    def take(self) -> None:
        super().take()
        executor, schedule = self.world.executor, self.transport
        self.full, self.flags = self.region("full", torch.int32), self.region("flags", torch.int64)
        self.data = self.region("data", self.dtype)
        self.engine = executor.copy_engine()
        self.lanes = Lanes()
        if schedule in ("auto", choice.DECOMPOSED):
            self.lanes = executor.lanes(("products", self.control.name))
        self.ready = self.lasting(self.size * tiling.MAX_SUBS, dtype=torch.int32, make=torch.zeros)
        # parts of tiles, and the words that say that they are there; stream_k shares twice a call, others as all GPUs together may
        shares = schedule not in choice.TORCH and cost.may_share(self.tuned.capability, self.dtype)
        places = 2 * executor.programs if schedule == "stream_k" else executor.programs if shares else 1
        self.work = self.lasting(places * tiling.PART, dtype=torch.float32)
        self.parts = self.lasting(places, dtype=torch.int64, make=torch.zeros)
        self.scratch = self.lasting(max(16, self.between()), dtype=self.dtype)

    def between(self) -> int:
        """Elements that lie between the products and the exchanges of the schedule "sequential"; 0 if no call has it."""
        return self._exchanged // self.dtype.itemsize

    def telling(self, transport: str, tile: tiling.Tiling | None, **sizes: Any) -> Told:
        """Of a call by ``transport``, for `start`. ``tile``: None where torch multiplies.

        Ranks that make a call of the same sizes by different transports would wait for each other, so they are told that, too.
        """
        return told(f"{transport}/{'torch' if tile is None else 'tma' if tile.tma else 'pointer'}", **sizes, by=transport)

    def start(self, call: Told | str, tile: tiling.Tiling | None = None, **sizes: Any) -> "_Started":
        """`begin` a call, one that is told already or what `telling` makes of the arguments, with the slot set that it has."""
        return _Started(self, call if isinstance(call, Told) else self.telling(call, tile, **sizes))

    def _bytes_of(self, exchanged: int) -> int:
        """Bytes of the largest call with schedule "sequential"; 0 if there is none."""
        nbytes = exchanged * self.dtype.itemsize
        if self.schedule == "auto" and choice.why_not_torch(self.tuned.capability, self.tuned.torch_products) is None:
            return min(nbytes, sequential.limit(self.dtype))
        return nbytes if self.transport == sequential.NAME else 0

    def forget_plans(self) -> None:
        """Calls of every kind are planned anew from now on."""
        self._plans_of.clear()
        self.use(self._used)

    def prepare(
        self, kernel: Any, programs: int, args: Sequence[Any], constants: dict, tile: HowCompiled, varying: tuple[int, ...]
    ) -> Prepared:
        """As `GroupContext.prepare`; a traced launch first sees to where its kernel writes."""
        launch = super().prepare(kernel, programs, args, constants, tile, varying)
        if self.trace is None:
            return launch
        before = self.trace.prepared(kernel, programs, args, constants)

        def traced(tensors: Sequence[torch.Tensor]) -> None:
            try:
                before()
            except BaseException as error:
                self._broken(error)
                raise
            launch(tensors)

        return traced

    def overlapped(
        self, launch: Callable[[], None], key: Hashable, queue: Callable[[], None], then: Callable[[], None] = lambda: None
    ) -> None:
        """``launch`` and ``then``, with the copies that ``queue`` queues beside them; the copies may wait for ``launch`` only.

        They are the same ones whenever ``key`` is the same, then by the same ``queue``, in this context's memory; None for copies
        of a caller's tensor.
        """

        def stuck(seconds: float) -> Exception | None:
            if self.gave_up() not in (0, self.rank + 1) or seconds > self.limit_s:
                return self.give_up(sync.WAIT_SIGNAL.value, self.rank, 1, 0)
            return None

        def counted() -> None:
            before = self.stats["copies"]
            queue()
            self._copies[queue] = self.stats["copies"] - before

        if self.trace is not None:
            self.trace.copies.clear()
            key = None  # the copies of a graph have no times
        before = self.stats["copies"]
        self.world.executor.overlapped(self.engine, launch, key, queue if key is None else counted, stuck, then)
        if key is not None:  # else they were queued one by one, and counted
            self.stats["copies"] = before + self._copies[queue]

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

    def problem(self, m: int, n: int, k: int, full: int | None = None) -> choice.Problem:
        """A call, as far as its ranks have it in common; sizes of the whole problem.

        ``full``: rows of a full chunk. Where they are more than m has a rank, as on the last of several nodes, the call is taken
        for one of that many on each: memory is for chunks, and signals are by their place in one.
        """
        agreed = self.tuned
        if full is not None and full != chunk_rows(m, self.size):
            m = full * self.size
        return choice.Problem(
            self.op, agreed.capability, agreed.multiprocessors, self.size, self.dtype, m, n, k, agreed.torch_products, self.part_of,
            agreed.memory,
        )  # fmt: skip

    def choose(self, problem: choice.Problem) -> choice.Choice:
        """How calls of this problem are made; all ranks come to the same."""
        if self.transport == "stream_k":
            raise ValueError(f"{self.op}: schedule='stream_k' makes every call in one way, so its contexts have no choice")
        if self._used is None:
            return choice.choose(problem, self.transport, self.tuned.table)
        why = choice.why_not(problem, self._used)
        if why is not None or self.transport not in ("auto", self._used.transport):
            why = why or f"schedule={self.schedule!r}"
            raise ValueError(f"{self.op}: {self._used} is no choice for {problem}: {why}; use one of choice.candidates")
        return self._used

    def use(self, made: choice.Choice | None) -> None:
        """Make the calls that follow as ``made`` says, None: as is best. For tuning and tests; on all ranks alike."""
        self._used, self._plans = made, self._plans_of.setdefault(made, {})
        self._again.clear()

    def abandon(self) -> None:
        super().abandon()
        if hasattr(self, "engine"):  # of one that is half made, too
            self.engine.abandon()

    def drop(self) -> None:
        if hasattr(self, "engine") and hasattr(self.engine, "close"):  # of one that is half made, too
            self.engine.close()
        super().drop()
        self._plans_of.clear()


def kept(
    op: str,
    kind: Any,
    control: ControlGroup,
    dtype: torch.dtype,
    sizes: dict[str, int],
    group: dist.ProcessGroup | None,
    **hints: int,
) -> Any:
    """`keeping.kept` of an operation with a product: one context for each (kind, group, dtype), with schedule "auto"."""

    def make(wanted: dict[str, int]) -> Any:
        return kind(**wanted, **hints, dtype=dtype, group=group)

    def agree() -> None:
        keeping.alike(op, control, sizes, dtype)

    return keeping.kept((kind, control.name, dtype), control, sizes, make, tiling.MAX_SIZE, agree)


class _Started(Begun):
    """See `Context.start`."""

    __slots__ = ()

    def __enter__(self) -> int:
        super().__enter__()
        self.context._set ^= 1
        return self.context._set  # type: ignore[no-any-return]

"""The world of this process: which ranks, which heap, which device. Made by init, ended by finalize, both collective."""

import importlib.util
import logging
import operator
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from . import env, faking, nodes, programs, racecheck
from .calls import CallBoard
from .control import ControlGroup, keep_in_children, key_of
from .errors import PeerTimeout
from .heap import Segment, SymmetricHeap

log = logging.getLogger("fluxlike")

#: Seconds of a meeting in finalize when a rank did not come to an earlier one.
HURRY_S = 0.1


def check_group(group: Any) -> None:
    """ValueError for what is no torch group of this rank's."""
    if isinstance(group, dist.ProcessGroup):
        return
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"group={group!r} is what torch.distributed.new_group gives to a rank that is not in the group, and this rank, "
            f"{dist.get_rank()}, is not; only the ranks of a group make its calls"
        )
    remedy = "pass what torch.distributed.new_group or mesh.get_group returns, or leave it out for the group given to fluxlike.init"
    if isinstance(group, DeviceMesh):
        names = group.mesh_dim_names or range(group.ndim)
        remedy = f"pass mesh.get_group({names[0]!r})" + " or that of another dimension" * (group.ndim > 1)
    elif isinstance(group, (dist.ReduceOp, dist.ReduceOp.RedOpType)) or str(group) in ("sum", "avg", "max"):
        remedy += "; if it is the operation that you mean, name it, as op='avg'"
    raise ValueError(f"group={group!r} is a {type(group).__name__}, it must be a torch process group; {remedy}")


def ranks_of(group: dist.ProcessGroup) -> list[int]:
    """The ranks of a torch group, which torch says with a bare KeyError that it has not."""
    try:
        return dist.get_process_group_ranks(group)
    except KeyError:
        raise RuntimeError(
            f"the torch group {group.group_name!r} has ended, by torch.distributed.destroy_process_group; pass one that is there, "
            "and end groups behind their last calls"
        ) from None


class Closable(Protocol):
    control: ControlGroup

    def unseen_failure(self) -> Exception | None: ...
    def close(self) -> None: ...
    def abandon(self) -> None: ...


class World:
    """What `current` returns between init and finalize."""

    #: This process is a child of the rank, and has its memory but neither its threads nor its connections.
    is_forked = False

    def __init__(self, group: dist.ProcessGroup, heap: str, heap_bytes: int | None, owns_torch: bool) -> None:
        keep_in_children(self)
        self.owns_torch = owns_torch
        self._process = os.getpid()
        self._connecting: dict[str, threading.Lock] = {}
        self.control = ControlGroup(ranks_of(group), group.group_name, group, key_of(group))
        self.rank, self.size = self.control.rank, self.control.size
        self.contexts: list[Closable] = []
        self.cached: dict[Any, Any] = {}
        #: For what waits for peers on a stream of ours: lets the current stream wait for it. See `GroupContext.begin`.
        self.ahead: list[Callable[[], None]] = []
        self._controls: dict[str, ControlGroup] = {group.group_name: self.control}
        self._started = False
        try:
            self._begin(heap, heap_bytes)
        except BaseException as error:
            self._abandon(error)
            raise

    def _begin(self, heap: str, heap_bytes: int | None) -> None:
        #: For each rank of the world, the number of its node.
        self.node_of = nodes.find(self.control)
        self._divide(self.control)
        executor: Any = None
        error: Exception | None = None
        nbytes = 0
        try:
            env.check()
            executor = make_executor(heap)
            nbytes = _heap_size(heap_bytes) or executor.default_heap_bytes
        except (RuntimeError, ValueError) as problem:
            error = problem
        self.control.agree("fluxlike.init", (heap, getattr(executor, "name", None), nbytes), error)
        level = env.log_level()
        if level is not None:
            log.setLevel(level)
        if self.rank == 0:
            for complaint in env.unknown():
                log.warning("%s", complaint)
        self.executor = executor
        self.device: torch.device = executor.device
        executor.start(self.control)
        self._started = True
        self._check_races()
        #: The ranks that have the heap together.
        self.sharing = self.control.local if executor.name == "shm" else self.control
        self.heap = SymmetricHeap(self._make_segment, self.sharing, nbytes, self._connect_heap)

    def _abandon(self, error: BaseException) -> None:
        """End what was begun before ``error``, so that init can be called again. NVSHMEM ends on all ranks, or on none."""
        racecheck.stop()
        try:
            if self._started and isinstance(error, (RuntimeError, ValueError)) and not isinstance(error, PeerTimeout):
                everyone, _ = self.control.part("the end of a failed fluxlike.init")
                if everyone:
                    self.executor.stop()
        finally:
            self._disconnect()

    def _disconnect(self) -> None:
        for control in self._controls.values():
            control.local.close()
            control.close()

    def _divide(self, control: ControlGroup) -> None:
        """Tell a group which of its ranks are on which node, and connect the ranks of each; collective."""
        control.nodes = nodes.of_group([self.node_of[self.control.ranks.index(rank)] for rank in control.ranks], control.ranks)
        control.node = next(node for node, places in enumerate(control.nodes) if control.rank in places)
        if control.spans:
            ranks = [control.ranks[place] for place in control.nodes[control.node]]
            part = f"node {control.node}"
            control.local = ControlGroup(ranks, f"{control.name}/{part}", None, f"{control.key}/{part}")
            control.local.whole = control
        control.local.board = CallBoard(control.local)

    def _check_races(self) -> None:
        """Start the race checker, if this run is to be checked."""
        checked = env.racecheck()
        error = ValueError("FLUXLIKE_RACECHECK=1 checks the ranks of one node; start it on one, without FLUXLIKE_VIRTUAL_NODES")
        spans = checked and self.control.spans
        self.control.agree("fluxlike.init: FLUXLIKE_RACECHECK", checked, error if spans else None)
        if checked:
            from . import racehooks  # imports the interpreter, which a GPU does not need

            racehooks.start(self.control, self.executor)

    def _connect_heap(self) -> ControlGroup:
        """Connections of the heap's own; collective over the ranks that share it."""
        control = ControlGroup(self.sharing.ranks, f"{self.sharing.name}/heap", None, f"{self.sharing.key}/heap")
        control.nodes, control.node = self.sharing.nodes, self.sharing.node
        self._controls[control.name] = control
        return control

    @property
    def group(self) -> dist.ProcessGroup:
        """Torch's group of these ranks. Only the control group keeps it, and drops it at the end; see `ControlGroup.close`."""
        assert self.control.group is not None, "fluxlike has ended"
        return self.control.group

    def _make_segment(self, nbytes: int, control: ControlGroup) -> Segment:
        segment = self.executor.make_segment(nbytes, control)
        racecheck.add_segment(segment, control)
        return segment

    def control_of(self, group: dist.ProcessGroup | None) -> ControlGroup:
        """The control group of a torch group; the first call for a group is collective over it.

        ValueError for what is no group, RuntimeError for one that has ended, or that torch has made since in place of another.
        """
        if group is None or group is self.control.group:
            return self.control
        check_group(group)
        name = group.group_name
        known = self._controls.get(name)
        if known is None:
            if self.group not in dist.distributed_c10d._world.pg_map:
                raise self._made_since(group)
            ranks = ranks_of(group)
            outside = [rank for rank in ranks if rank not in self.control.ranks]
            if outside:
                raise ValueError(f"ranks {outside} of the group are outside the group given to fluxlike.init; init with all ranks")
            with self._connecting.setdefault(name, threading.Lock()), faking.off():
                known = self._controls.get(name)
                if known is None:
                    known = ControlGroup(ranks, name, group, key_of(group))
                    try:
                        self._divide(known)
                    except BaseException:
                        known.local.close()
                        known.close()
                        raise
                    self._controls[name] = known
        if known.group is not group:  # torch gives names again once its groups have ended
            raise self._made_since(group)
        return known

    def _made_since(self, group: dist.ProcessGroup) -> RuntimeError:
        return RuntimeError(
            f"the torch group {group.group_name!r} of ranks {ranks_of(group)} was made after groups that "
            "fluxlike knows had ended; call fluxlike.finalize() before torch.distributed.destroy_process_group(), and "
            "fluxlike.init() when the new groups are there"
        )

    def raise_if_forked(self) -> None:
        if self.is_forked:
            raise RuntimeError(
                f"process {os.getpid()} was forked from rank {self.control.ranks[self.rank]} (process {self._process}), which "
                "has initialised fluxlike, and cannot use it; start processes with multiprocessing.get_context('spawn'), or fork "
                "before fluxlike.init"
            )

    def indices(self, control: ControlGroup) -> list[int]:
        """The ranks of a group as indices of those that have the heap together."""
        return [self.sharing.ranks.index(rank) for rank in control.ranks]

    def let_calls_end(self) -> None:
        """Those that other threads are in: they look for this world, and for what it has, until they are done."""
        for control in tuple(self._controls.values()):
            with control.lock:
                pass

    def close(self) -> None:
        """End the contexts, then the heap if every rank is still there; a dead rank must not make the others hang.

        Whatever is raised in here, an interrupt, too, the connections end: the peers see that, and need not wait.
        """
        unseen: list[Exception] = []
        try:
            done = self._close_contexts(unseen)
            everyone, mismatch = self.control.part("fluxlike.finalize", done)
            if mismatch is not None:
                self._note(mismatch, unseen)
            if everyone:
                self.heap.close()
                self.executor.stop()
        finally:
            self._disconnect()
            for context in tuple(self.contexts):  # what could not be closed
                context.abandon()
            self.cached.clear()  # their mappings shall go now, and not wait for the garbage collector
        if unseen:
            raise unseen[0]

    def _close_contexts(self, unseen: list[Exception]) -> bool:
        """Whether this rank's device is done, so that it may end the heap; adds to ``unseen`` what nobody has raised yet."""
        done = True
        try:
            self.executor.synchronize()
        except Exception as error:  # as of a kernel of the program's own; the peers must not wait for this rank
            unseen.append(error)
            done = False
        for context in self.contexts:
            try:
                failure = context.unseen_failure()
            except Exception as error:
                failure = error
            unseen += [] if failure is None else [failure]
        # Threads of each rank make contexts of different groups in an order of their own; those of one group have one on all ranks.
        for context in sorted(self.contexts, key=lambda context: (context.control.whole.ranks, context.control.key)):
            try:
                context.close()
            except Exception as error:  # whatever it is, the others, the heap and the connections must be closed, too
                self._note(error, unseen)
            if context.control.missed or context.control.whole.missed:
                self._hurry()
        return done

    def _note(self, error: Exception, unseen: list[Exception]) -> None:
        """For `finalize` to raise; but of ranks that end at different places, as where one has failed, a warning will do."""
        if getattr(error, "met", False):
            log.warning("rank %d: %s", self.control.ranks[self.rank], error)
        else:
            unseen.append(error)

    def _hurry(self) -> None:
        """A rank did not come, so the heap cannot end: for what is left to close, who is not there is not waited for again."""
        for control in self._controls.values():
            control.longest = control.local.longest = HURRY_S


def _heap_size(heap_bytes: int | None) -> int | None:
    """What the caller or the environment says, checked."""
    if heap_bytes is None:
        return env.heap_bytes()
    try:
        size = -1 if isinstance(heap_bytes, bool) else operator.index(heap_bytes)  # numpy's whole numbers, too
    except TypeError:
        size = -1
    if size < 1:
        raise ValueError(f"heap_bytes={heap_bytes!r} is not a whole number of bytes above 0; leave it out for the default")
    return size


def make_executor(heap: str) -> Any:
    """The executor for ``heap``: "nvshmem", "shm", or "auto" (nvshmem if this process sees a GPU)."""
    if heap not in ("auto", "nvshmem", "shm"):
        raise ValueError(f"heap={heap!r} is not one of 'auto', 'nvshmem', 'shm'")
    if heap == "auto":
        heap = "nvshmem" if torch.cuda.is_available() else "shm"
    if heap == "shm":
        from .cpu import CpuExecutor

        return CpuExecutor()
    if not torch.cuda.is_available():
        raise RuntimeError(
            "heap='nvshmem' needs a CUDA GPU and torch sees none; use heap='auto' or 'shm', or see `python -m fluxlike doctor`"
        )
    from .cuda import CudaExecutor

    return CudaExecutor(torch.device("cuda", torch.cuda.current_device()))


#: How the message begins of a process that no launcher has started, nor the program itself joined to others.
NOT_LAUNCHED = "torch.distributed is not initialised and"
#: What to do then, and where the launcher's variables cannot be read.
_LAUNCH = (
    "start the program with scripts/launch.sh or torchrun, or call torch.distributed.init_process_group before fluxlike.init"
)
_world: World | None = None
#: Numbers for the torch groups that init makes, the same on all ranks.
_groups_made = 0


def init(group: dist.ProcessGroup | None = None, heap: str = "auto", heap_bytes: int | None = None) -> None:
    """Start fluxlike on the ranks of ``group``. Collective over them.

    Args:
        group: the ranks that share a symmetric heap; the default group if None. If torch.distributed is not initialised it is
            initialised from torchrun's environment (and `finalize` ends it).
        heap: "nvshmem" (GPUs), "shm" (shared memory and Triton's interpreter, no GPU), or "auto": nvshmem where torch sees a GPU.
        heap_bytes: size of the symmetric heap on each rank; default FLUXLIKE_HEAP_BYTES, else 1 GiB on GPUs and 64 MiB on
            CPUs. Contexts of the whole world grow it, also where it spans nodes; contexts of sub-groups must fit.

    Raises:
        RuntimeError: called twice, or the machine cannot (the message says what to do).
        ValueError: unknown heap, no torch process group, an environment that cannot be read, or ranks that disagree. After an
            error nothing is left of the call, and it can be made again.
        PeerTimeout: a rank does not come within FLUXLIKE_TIMEOUT_S (where the call initialises torch.distributed, 60 s at least).
    """
    global _world
    if importlib.util.find_spec("triton") is None:
        raise RuntimeError(
            "fluxlike needs Triton 3.6 to 3.9, which this Python does not have; run: pip install 'triton>=3.6,<3.10', or look at "
            "`python -m fluxlike doctor`"
        )
    if _world is not None:
        _world.raise_if_forked()
        raise RuntimeError("fluxlike.init was called already; call fluxlike.finalize first to start again")
    if group is not None:
        check_group(group)
    owns_torch = not dist.is_initialized()
    try:
        if owns_torch:
            _init_torch(heap)
        with torch.inference_mode(False):  # the heap's tensors last, and calls outside of it write to them, too
            _world = World(group or dist.distributed_c10d._get_default_group(), heap, heap_bytes, owns_torch)
    except BaseException:
        if owns_torch and dist.is_initialized():
            dist.destroy_process_group()
        raise


def _init_torch(heap: str) -> None:
    global _groups_made
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        names = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set"
        raise RuntimeError(f"{NOT_LAUNCHED} {names}; {_LAUNCH}")
    _check_launcher()
    on_gpus = heap != "shm" and torch.cuda.is_available()
    if on_gpus:
        torch.cuda.set_device(_local_gpu())
        if env.ranks_per_gpu() > 1:
            # NCCL refuses two ranks of one host on one GPU. Told that they are on hosts of their own, it goes by sockets.
            os.environ.setdefault("NCCL_HOSTID", f"fluxlike rank {os.environ['RANK']}")
    # torchrun's store outlives the group, and what the ranks of an earlier one said of where they are reached is still in it
    store, rank, size = next(iter(rendezvous("env://")))
    store = dist.PrefixStore(f"fluxlike.init {_groups_made}", store)  # type: ignore[attr-defined]
    _await_all(store, rank, size)
    _groups_made += 1  # not where a rank did not come: it may yet, to the next attempt
    if on_gpus:
        # Without device_id: with it a DeviceMesh of several dimensions splits this group by names that torch counts on each rank by
        # itself, and hangs if there was a group before that not all ranks are in (pytorch issues 145376 and 190396).
        dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=size)
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def _check_launcher() -> None:
    """ValueError for what no launcher gives: torch says of it that int() failed, or waits for a rank that there is not."""
    size = os.environ["WORLD_SIZE"]
    _check_number("WORLD_SIZE", 1, None, "above 0")
    _check_number("RANK", 0, int(size), f"below {size}, the WORLD_SIZE")
    _check_number("MASTER_PORT", 0, 1 << 16, "from 0 to 65535")


def _check_number(name: str, least: int, end: int | None, rule: str) -> None:
    text = os.environ[name]
    digits = text.strip()  # torch takes them with blanks around
    if not digits.isdecimal() or int(digits) < least or (end is not None and int(digits) >= end):
        raise ValueError(f"{name}={text!r} is not a whole number {rule}; {_LAUNCH}")


#: Seconds that the processes of a job get to start, at least: imports take some of them much longer than others.
STARTING_S = 60.0


def _await_all(store: Any, rank: int, size: int) -> None:
    """All ranks are here, or PeerTimeout. Torch waits for half an hour, or for what is the limit of all that the program does."""
    try:
        limit = max(env.timeout_s(), STARTING_S)
    except ValueError:  # which all ranks are told, when they have met
        limit = STARTING_S
    store.set(f"here {rank}", "")
    since, pause = time.monotonic(), 1e-3
    while not store.check([f"here {peer}" for peer in range(size)]):
        if time.monotonic() - since > limit:
            missing = [peer for peer in range(size) if not store.check([f"here {peer}"])]
            store.delete_key(f"here {rank}")  # or one that comes later would take it for waiting
            raise PeerTimeout(
                f"fluxlike.init: not every rank of {size} came within {limit:g} s, not ranks {missing}; all ranks of the launcher "
                f"must call it and be alive; FLUXLIKE_TIMEOUT_S sets the limit, from {STARTING_S:g} on"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def _local_gpu() -> int:
    """LOCAL_RANK, which the launcher sets, checked."""
    text, gpus, sharing = os.environ.get("LOCAL_RANK", "0"), torch.cuda.device_count(), env.ranks_per_gpu()
    if not text.isdecimal() or int(text) >= gpus * sharing:
        count = f"{gpus}, the GPUs that torch sees here" if sharing == 1 else f"{gpus * sharing}, {sharing} for each of {gpus} GPUs"
        raise ValueError(
            f"LOCAL_RANK={text!r} is not a whole number below {count}; start one process a GPU, as scripts/launch.sh and torchrun "
            "do, and look at CUDA_VISIBLE_DEVICES; FLUXLIKE_RANKS_PER_GPU lets ranks share a GPU, for tests; or use "
            "fluxlike.init(heap='shm') with CPU tensors"
        )
    return int(text) // sharing


def current() -> World:
    """The world, or RuntimeError before init and in a forked child."""
    if _world is None:
        raise RuntimeError("fluxlike is not initialised on this rank; call fluxlike.init() on every rank first")
    if _world.is_forked:
        _world.raise_if_forked()
    return _world


def is_initialized() -> bool:
    """Whether this process is between init and finalize."""
    return _world is not None and not _world.is_forked


def finalize() -> None:
    """End fluxlike: close every context and the heap. Collective; safe after an error, and without init it does nothing.

    Raises the error of a context whose failure nobody has seen yet, after everything is closed. In a forked child it does nothing:
    what is open belongs to the parent. In a ``finally`` behind an exception it says first what that was, as the others may be long.
    """
    global _world
    if _world is not None and _world.is_forked:
        return
    world = _world
    if world is None:
        return
    programs.refuse_inside("fluxlike.finalize")
    error = sys.exc_info()[1]
    exits = isinstance(error, SystemExit) and error.code in (None, 0)
    if error is not None and world.control.size > 1 and not exits:
        log.error(  # torch's groups may have ended before, so nothing is asked of them
            "rank %d: %s: %s; before this rank goes on, fluxlike.finalize waits up to %g s (FLUXLIKE_TIMEOUT_S) for the others",
            world.control.ranks[world.rank], type(error).__name__, error, world.control.patience(),
        )  # fmt: skip
    world.let_calls_end()
    if _world is not world:  # another thread has ended it meanwhile
        return
    _world = None
    try:
        world.close()
    finally:
        racecheck.stop()
        if world.owns_torch and dist.is_initialized():
            dist.destroy_process_group()

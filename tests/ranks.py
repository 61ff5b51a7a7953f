"""Runs the body of a test on several ranks; the same test files serve on a CPU and, under torchrun, on GPUs.

A *body* is a function at the top level of a test file, ``body(group, **kwargs)``: it runs on every rank of ``group``
and its result (anything that pickles) comes back. Arguments are plain values, so that a body can be run anywhere.

Two modes, told apart by the environment:

* pytest started plainly: `run_ranks` serves bodies from a pool of `POOL_SIZE` processes with the shared-memory heap.
  They start once. Smaller worlds are sub-groups of the first ranks, the others idle, so every test of 1, 2 or 3 ranks
  is also a test of sub-groups. After a failure the ranks may be out of step: the pool is killed, the next use makes a
  new one.
* pytest started by torchrun, in each rank (``scripts/launch.sh --nproc 4 -m pytest``): all ranks come by the same tests
  in the same order, the members run the body with the arguments of rank 0, and all exchange how it went, so that all
  pass or fail together.

`run_fresh` is for tests that break a rank: new processes for one call, and an outcome per rank instead of an exception.
"""

import contextlib
import dataclasses
import faulthandler
import importlib
import math
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import cover
import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
TORCHRUN = "RANK" in os.environ and "WORLD_SIZE" in os.environ
TORCHRUN_RANK = int(os.environ["RANK"]) if TORCHRUN else 0
POOL_SIZE = 4
#: The most ranks that a test can have.
LARGEST = int(os.environ["WORLD_SIZE"]) if TORCHRUN else POOL_SIZE
#: The world of torchrun itself, where it is larger than the worlds that every test runs on.
LARGE_WORLDS = (int(os.environ["WORLD_SIZE"]),) if TORCHRUN and int(os.environ["WORLD_SIZE"]) > POOL_SIZE else ()
HEAP_BYTES = 256 << 20
RANKS_PER_GPU = int(os.environ.get("FLUXLIKE_RANKS_PER_GPU", "1"))
#: Where a rank speaks while pytest captures what it prints; conftest has one made before.
STDERR = 2
#: Seconds that a wait of a rank may last in these tests, unless the environment or the test says otherwise.
TIMEOUT_S = "60"
#: Seconds that the other ranks get to end by themselves after one has failed.
_GRACE = 6.0
_START_TIMEOUT = 120.0


@dataclasses.dataclass
class Outcome:
    """How one rank of a `run_fresh` ended: one of ``value``, ``error`` (a class name) with ``message``, ``exit``."""

    rank: int
    value: Any = None
    error: str = ""
    message: str = ""
    trace: str = ""
    #: Why the body skips its test.
    skipped: str = ""
    #: Exit code of a process that ended without an answer, negative for a signal; None for one that answered.
    exit: int | None = None
    #: Seconds from the start of the body to its end.
    seconds: float = math.nan
    pid: int | None = None

    @property
    def ok(self) -> bool:
        return not self.error and self.exit is None

    def __str__(self) -> str:
        if self.ok:
            return f"rank {self.rank}: ok"
        if self.exit is not None:
            return f"rank {self.rank}: the process ended with {self.exit} (a negative number is a signal); {self.trace}"
        return f"rank {self.rank}: {self.error}: {self.message}\n{self.trace}"


def _attempt(rank: int, body: Callable, group: Any, kwargs: dict[str, Any]) -> Outcome:
    """The body, and its exception as data."""
    since = time.monotonic()
    try:
        outcome = Outcome(rank, value=body(group, **kwargs))
        pickle.dumps(outcome)
    except pytest.skip.Exception as skip:  # told to the ranks without a part in the body, too: they wait for all outcomes
        outcome = Outcome(rank, skipped=str(skip))
    except Exception as error:
        outcome = Outcome(rank, error=type(error).__name__, message=str(error), trace=traceback.format_exc())
    outcome.seconds = time.monotonic() - since
    return outcome


def _values(body: Callable, outcomes: Sequence[Outcome]) -> list[Any]:
    """What the body returned on every rank; where it failed on one, the test fails, and where one skips it, all do."""
    if not all(outcome.ok for outcome in outcomes):
        pytest.fail(_report(body, outcomes), pytrace=False)
    for outcome in outcomes:
        if outcome.skipped:
            pytest.skip(outcome.skipped)
    return [outcome.value for outcome in outcomes]


def _report(body: Callable, outcomes: Sequence[Outcome]) -> str:
    """What every rank has to say, the failures in full."""
    failed = [str(outcome) for outcome in outcomes if not outcome.ok]
    fine = [outcome.rank for outcome in outcomes if outcome.ok]
    return "\n".join([f"{body.__qualname__}: ranks {fine} ended well, {len(failed)} did not", *failed])


# processes of this machine without GPUs


def _settle(rank: int, directory: str, env: dict[str, str]) -> None:
    """What every new process does first: its environment, one thread, what it prints into a file of its own."""
    nobodys = {"FLUXLIKE_CACHE_DIR": os.path.join(directory, "cache"), "FLUXLIKE_TUNE": "cached"}  # not what the user has tuned
    nobodys["FLUXLIKE_TORCH_PRODUCTS"] = "1"
    os.environ.update({"FLUXLIKE_TIMEOUT_S": os.environ.get("FLUXLIKE_TIMEOUT_S", TIMEOUT_S), **nobodys, **env})
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        os.environ.pop(name, None)
    output = os.open(os.path.join(directory, f"rank{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    faulthandler.register(signal.SIGUSR1)  # for `_say_where`
    torch.set_num_threads(1)


def _join_world(rank: int, size: int, directory: str) -> None:
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=120))


def _find(module: str, qualname: str) -> Callable:
    found: Any = importlib.import_module(module)
    for name in qualname.split("."):
        found = getattr(found, name)
    return found


class _Gloo(dist.ProcessGroupGloo):
    """Torch's, but all groups of a rank share a device of gloo's: each has a thread that wakes a hundred times a second."""

    devices: ClassVar[Any]

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **_: Any) -> None:
        super().__init__(store, rank, size, self.devices.options(timeout))


def _pool_rank(rank: int, size: int, directory: str, connection: Any) -> None:
    """A process of the pool: serve bodies until the other end of the pipe is closed."""
    import fluxlike
    from fluxlike.runtime import control

    _settle(rank, directory, {})
    _Gloo.devices = control.Devices()
    dist.distributed_c10d.ProcessGroupGloo = _Gloo
    _join_world(rank, size, directory)
    groups = {n: dist.new_group(list(range(n))) for n in range(1, size)}
    groups[size] = dist.group.WORLD
    fluxlike.init(heap="shm", heap_bytes=HEAP_BYTES)
    connection.send_bytes(pickle.dumps(Outcome(rank)))
    with contextlib.suppress(EOFError):
        while True:
            module, qualname, world, kwargs = pickle.loads(connection.recv_bytes())
            connection.send_bytes(pickle.dumps(_attempt(rank, _find(module, qualname), groups[world], kwargs)))


def _fresh_rank(rank: int, size: int, directory: str, env: dict[str, str], connection: Any) -> None:
    """A process for one body. The body gets the world's group and calls fluxlike.init itself if it wants it."""
    _settle(rank, directory, env)
    try:
        if env["FLUXLIKE_TEST_HEAP"] == "nvshmem":
            torch.cuda.set_device(rank // RANKS_PER_GPU)
        _join_world(rank, size, directory)
        module, qualname, kwargs = pickle.loads(connection.recv_bytes())
        outcome = _attempt(rank, _find(module, qualname), dist.group.WORLD, kwargs)
    except Exception as error:
        outcome = Outcome(rank, error=type(error).__name__, message=str(error), trace=traceback.format_exc())
    connection.send_bytes(pickle.dumps(outcome))
    # A rank that is done stays until all are: its exit would tear the connections of those still at work.
    with contextlib.suppress(EOFError):
        connection.recv_bytes()
    # No clean-up by the interpreter: after a broken body it may wait for ranks that are gone.
    os._exit(0)


def _measured(target: Callable, config: str, measure: str, rank: int, *args: Any) -> None:
    """Where coverage is measured, the lines of ranks 0 and 1 count: the others run the same ones, and tracing takes time."""
    if measure != "nothing" and rank < 2:
        cover.begin(config, measure == "kernels")
    target(rank, *args)


class _Processes:
    """Ranks started together, each with a pipe; killed together."""

    def __init__(self, target: Callable, size: int, *args: Any, measure: str = "kernels") -> None:
        self.directory = tempfile.mkdtemp(prefix="fluxlike-test-")
        context = _forkserver()
        self.connections, self.processes = [], []
        self.answered: set[int] = set()
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (target, cover.request(), measure, rank, size, self.directory, *args, theirs)
            process = context.Process(target=_measured, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def ask(self, ranks: range, job: Any) -> None:
        self.answered -= set(ranks)
        for rank in ranks:
            with contextlib.suppress(BrokenPipeError):
                self.connections[rank].send_bytes(pickle.dumps(job))

    def collect(self, ranks: range, timeout: float, grace: float) -> list[Outcome]:
        """An outcome per rank: what it answered, how it died, or that it did not answer.

        ``grace``: seconds that the others get after a rank has failed; infinite for all of ``timeout``.
        """
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout
        while len(outcomes) < len(ranks):
            waiting = {rank: self.connections[rank] for rank in ranks if rank not in outcomes}
            ready = multiprocessing.connection.wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank, connection in waiting.items():
                if connection in ready:
                    try:
                        outcomes[rank] = pickle.loads(connection.recv_bytes())
                        self.answered.add(rank)
                    except (EOFError, ConnectionResetError):
                        self.processes[rank].join(10)
                        outcomes[rank] = Outcome(rank, exit=self.processes[rank].exitcode)
                    if not outcomes[rank].ok:
                        deadline = min(deadline, time.monotonic() + grace)
        silent = [rank for rank in ranks if rank not in outcomes]
        if silent and all(outcome.ok for outcome in outcomes.values()):
            self._say_where(silent)
        for rank in ranks:
            late = Outcome(rank, error="NoAnswer", message=f"no answer; {self._last_words(rank)}")
            outcomes.setdefault(rank, late)
            if outcomes[rank].exit is not None:
                outcomes[rank].trace = self._last_words(rank)
            outcomes[rank].pid = self.processes[rank].pid
        return [outcomes[rank] for rank in ranks]

    def _say_where(self, silent: Sequence[int]) -> None:
        """Ranks that nothing else explains print where their threads stand."""
        for process in [self.processes[rank] for rank in silent]:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1)

    def _last_words(self, rank: int) -> str:
        with contextlib.suppress(FileNotFoundError):
            return "it printed: …" + Path(self.directory, f"rank{rank}.log").read_text(errors="replace")[-6000:]
        return "it printed nothing"

    def kill(self) -> None:
        for connection in self.connections:
            connection.close()
        if cover.is_measured():  # who has answered ends at the end of its pipe, and saves what it has measured
            deadline = time.monotonic() + _GRACE
            for rank in self.answered:
                self.processes[rank].join(max(0.0, deadline - time.monotonic()))
        for process in self.processes:
            if process.is_alive() and process.pid is not None:
                with contextlib.suppress(ProcessLookupError):  # it ended just now
                    # SIGKILL, not terminate: a rank may be stopped, or waiting in C for one that is gone.
                    os.kill(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.join(10)
        shutil.rmtree(self.directory, ignore_errors=True)


def _forkserver() -> Any:
    """Processes forked from one that has imported torch and Triton, which takes seconds and would be paid per rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "torch", "warm", "scenes"])
    with _starting:
        _start_server()
    return context


_starting = threading.Lock()  # tests may make processes from several threads


def _start_server() -> None:
    """The server keeps the environment that it is started with. More threads than cores only wait for each other."""
    tests = str(Path(__file__).parent)
    wanted = {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        # inductor's C++ by plain loops, which takes the compiler 40 % less time
        "TORCHINDUCTOR_VEC_ISA_OK": os.environ.get("TORCHINDUCTOR_VEC_ISA_OK", "0"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), tests, *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


_pool: _Processes | None = None


def _run_in_pool(body: Callable, world: int, timeout: float, kwargs: dict[str, Any]) -> list[Any]:
    global _pool
    if _pool is None:
        _pool = _Processes(_pool_rank, POOL_SIZE)
        started = _pool.collect(range(POOL_SIZE), _START_TIMEOUT, _GRACE)
        if not all(outcome.ok for outcome in started):
            close_pool()
            pytest.fail("the pool of ranks did not start\n" + "\n".join(map(str, started)), pytrace=False)
    _pool.ask(range(world), (body.__module__, body.__qualname__, world, kwargs))
    outcomes = _pool.collect(range(world), timeout, _GRACE)
    if not all(outcome.ok for outcome in outcomes):
        close_pool()
    return _values(body, outcomes)


def close_pool() -> None:
    """End the pool; the next `run_ranks` makes a new one."""
    global _pool
    if _pool is not None:
        _pool.kill()
        _pool = None


# ranks of torchrun


class _Torchrun:
    """This rank's end of a torchrun: the groups, and the exchange of how a body went."""

    def __init__(self) -> None:
        import fluxlike

        os.environ.setdefault("FLUXLIKE_TIMEOUT_S", TIMEOUT_S)
        if RANKS_PER_GPU > 1:  # a GPU has no links to itself, over which trees could be planned
            os.environ.setdefault("FLUXLIKE_TOPOLOGY", f"nvswitch-{os.environ['WORLD_SIZE']}")
        fluxlike.init(heap=os.environ.get("FLUXLIKE_TEST_HEAP", "auto"))
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # Every rank makes every group, in this order, whether it is a member or not.
        self.groups = {n: dist.new_group(list(range(n))) for n in range(1, self.size)}
        self.groups[self.size] = dist.group.WORLD
        self.exchange = dist.new_group(backend="gloo", timeout=timedelta(minutes=15))

    def of_rank_0(self, *said: Any) -> tuple[Any, ...]:
        """What rank 0 says, on all ranks."""
        box = [said]
        dist.broadcast_object_list(box, 0, group=self.exchange)
        return box[0]

    def run(self, body: Callable, world: int, kwargs: dict[str, Any]) -> list[Any]:
        mine = Outcome(self.rank)
        if self.rank < world:
            mine = _attempt(self.rank, body, self.groups[world], kwargs)
            if not mine.ok:  # now: the others may wait for this rank in what has no limit, as NCCL
                os.write(STDERR, f"{mine}\n".encode())
        outcomes: list[Any] = [None] * self.size
        dist.all_gather_object(outcomes, mine, group=self.exchange)
        return _values(body, outcomes)[:world]


_torchrun: _Torchrun | None = None


def close_torchrun() -> None:
    """End fluxlike at the end of the session; collective."""
    global _torchrun
    if _torchrun is not None:
        import fluxlike

        _torchrun = None
        fluxlike.finalize()


# what tests use


def run_ranks(
    body: Callable, world: int = POOL_SIZE, *, timeout: float = 240, makes_groups: bool = False, **kwargs: Any
) -> list[Any]:
    """The results of ``body(group, **kwargs)`` on ranks 0 … world-1; a failure on any rank fails the test on all.

    ``timeout``: seconds for the whole body, in the pool; under torchrun the waits of the library are what is bounded.
    ``makes_groups``: the body calls torch.distributed.new_group, so there may be no rank that does not run it.
    """
    global _torchrun
    if not TORCHRUN:
        assert not makes_groups or world == POOL_SIZE
        return _run_in_pool(body, world, timeout, kwargs)
    if _torchrun is None:
        _torchrun = _Torchrun()
    # What hypothesis draws depends on the modules that are loaded, which are not the same on all ranks.
    world, kwargs = _torchrun.of_rank_0(world, kwargs)
    if world > _torchrun.size or (makes_groups and world != _torchrun.size):
        pytest.skip(f"needs {world} ranks, torchrun started {_torchrun.size}")
    return _torchrun.run(body, world, kwargs)


def run_fresh(
    body: Callable,
    world: int = 2,
    env: dict[str, str] | None = None,
    *,
    heap: str = "shm",
    timeout: float = 150,
    grace: float = math.inf,
    expect_dead: Sequence[int] = (),
    measure: str = "host",
    **kwargs: Any,
) -> list[Outcome]:
    """How ``body(group, **kwargs)`` ended on each of ``world`` processes made for this call. Leaves none behind.

    fluxlike is not initialised; the body does what it needs. ``expect_dead``: ranks that are meant to die; those that
    do without being meant to are reported as such in their outcome's ``error``. ``heap``: what the body finds in
    FLUXLIKE_TEST_HEAP; with "nvshmem" each process gets a GPU. ``grace``: seconds that the others get to end by themselves after a
    rank has failed. ``measure``: which lines count where coverage is measured: "host", all but kernels'; "kernels", these, too,
    which slows first launches; "nothing", for bodies in which it matters who is ahead.
    """
    if TORCHRUN:
        pytest.skip("breaks ranks, so it makes its own; run it without torchrun")
    if heap == "nvshmem" and torch.cuda.device_count() * RANKS_PER_GPU < world:
        pytest.skip(f"needs {world} GPUs, torch sees {torch.cuda.device_count()}, for {RANKS_PER_GPU} ranks each")
    processes = _Processes(_fresh_rank, world, {**(env or {}), "FLUXLIKE_TEST_HEAP": heap}, measure=measure)
    try:
        processes.ask(range(world), (body.__module__, body.__qualname__, kwargs))
        outcomes = processes.collect(range(world), timeout, grace)
    finally:
        processes.kill()
    for outcome in outcomes:
        if outcome.exit is not None and outcome.rank not in expect_dead:
            outcome.error, outcome.message = "Died", f"exit code {outcome.exit}; {outcome.trace}"
        elif outcome.skipped:
            pytest.skip(outcome.skipped)
    return outcomes


def divided(total: torch.Tensor, by: int) -> torch.Tensor:
    """``total`` over a whole number, rounded once: by a number of the host's, torch multiplies with its reciprocal on GPUs."""
    return total / torch.tensor(by, dtype=total.dtype, device=total.device)


def device() -> torch.device:
    """Where the tensors of this rank belong."""
    from fluxlike.runtime import world

    return world.current().device


def ints(
    shape: Sequence[int], dtype: torch.dtype, seed: int, low: int = -1, high: int = 1, density: float | None = None
) -> torch.Tensor:
    """A CPU tensor of small whole numbers, the same on every rank for the same seed.

    Sums of products over K columns and a few ranks shall stay within ±256, where every whole number is exact in
    bfloat16, in whatever order they are added. ``density``: the share of entries that may be other than 0; the default
    makes 256 eight standard deviations of a sum over four ranks. `exact` checks what came out.
    """
    if density is None:
        density = min(1.0, 24 / math.sqrt(max(1, shape[-1])))
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(low, high + 1, tuple(shape), generator=generator)
    keep = torch.rand(tuple(shape), generator=generator) < density
    return (values * keep).to(dtype)


def exact(*sums: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> None:
    """Fails when a test's own whole numbers are too large to be compared with equality in ``dtype``."""
    most = 2 / torch.finfo(dtype).eps
    for total in sums:
        assert total.numel() == 0 or total.abs().max() <= most, f"the test is wrong: a sum of {total.abs().max():g} in {dtype}"


def rows_slice(m: int, ranks: int, rank: int) -> slice:
    """The rows of ``rank`` when m rows are split as torch.chunk splits; found by asking torch.chunk."""
    parts = torch.arange(m).chunk(ranks) if m else ()
    if rank >= len(parts):
        return slice(m, m)
    return slice(int(parts[rank][0]), int(parts[rank][-1]) + 1)

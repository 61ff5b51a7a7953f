"""The context of a group that spans nodes: that of this rank's node, and messages to the others. `nodes` is the design record."""

from collections.abc import Hashable
from typing import Any

import torch

from ..kernels.tiles import cdiv, chunk_rows
from ..runtime import env, programs, world
from ..runtime.control import ControlGroup
from ..runtime.errors import CallMismatch, PeerTimeout, heard, untraced
from . import again, choice, cost, sequential
from .context import check_arguments
from .kernel_puts import AllKernelPuts, KernelPuts
from .making import Held
from .messages import Letters
from .puts import Puts
from .refusals import beside_capture

#: Rows up to which there is memory to make a call of all nodes' rows together.
TOGETHER = 1024


class NodesContext(Held):
    """A context of this rank's node, and what its calls have in common with those of the other nodes.

    Attributes for people and tests: ``inner`` (of the node), ``last_path``, ``stats`` (calls, bytes sent to other nodes), and
    ``together``, which may be set, on all ranks alike.
    """

    inner: Any
    messages: Any
    shown = ("max_m", "n", "k", "dtype", "schedule")

    def __init__(
        self, op: str, control: ControlGroup, dtype: torch.dtype, schedule: str, here: int = 0, **sizes: int | None
    ) -> None:
        """Collective. ``sizes``: those of ``fluxlike.create_…_context``, of the whole problem.

        ``here``: K of gemm_rs, or N of ag_gemm, on this rank, where sizes leave it out; ranks may differ in that.
        """
        self.op, self.control, self.dtype, self.schedule = op, control, dtype, schedule
        self.rank, self.size, self.group_ranks = control.rank, control.size, control.ranks
        self.node, self.nodes = control.node, control.nodes
        self.closed, self.captured, self._seen = False, False, False
        #: Whether calls are made together; None: as the model has it.
        self.together: bool | None = None
        #: By rows of a full chunk, and the size that a call may say: whether that is expected to be faster.
        self._faster: dict[tuple[int, int | None], bool] = {}
        self._error: Exception | None = None
        self.last_path, self.stats = "", {"calls": 0, "bytes": 0}
        self.world = world.current()
        self.device = self.world.device
        what, optional = f"create_{op}_context", "k" if op == "gemm_rs" else "n"
        # in the caller's numbers: those of a node are others
        given = {name: 1 if size is None and name == optional else size for name, size in sizes.items()}
        error = check_arguments(op, given, dtype, schedule)
        try:
            env.puts()
        except ValueError as problem:
            error = error or problem
        with control.lock:
            control.agree(what, (sizes, str(dtype), schedule), error)
            control.spanning += 1
            self.inner, self.messages = None, None
            try:
                for part, make in (("the nodes", self._make), ("their messages", self._make_messages)):
                    try:
                        make(here, **sizes)
                    except (RuntimeError, ValueError) as problem:
                        error = problem
                    control.agree(f"{what}: {part}", None, error)
            except BaseException:
                self._drop()
                raise
        self.max_m, self.n, self.k = sizes["max_m"], sizes.get("n"), sizes.get("k")
        control.between = 0
        kind = f"{op}, {str(dtype).removeprefix('torch.')}, {schedule}"
        self.label = f"context {control.spanning} over {len(self.nodes)} nodes ({kind})"
        self.world.contexts.insert(self.world.contexts.index(self.inner), self)  # which is closed before what is in it

    def keep(self) -> None:
        self.inner.keep()
        super().keep()

    def _drop(self) -> None:
        """What was made before a rank failed; no call has used it."""
        if self.messages is not None:
            self.messages.close(True)
        if self.inner is not None:
            self.inner.close()

    def _make(self, here: int, max_m: Any, n: Any = None, k: Any = None) -> None:
        """The context of this node, for the rows of a node at a time."""
        from .ag_gemm import AGGemmContext
        from .gemm_rs import GemmRSContext

        local = self.control.local
        full = chunk_rows(max_m, self.size)
        # chunks that are filled up may be more rows than a schedule is for
        most = max_m if self.schedule == sequential.FUSED else TOGETHER
        rows = max(local.size * full, min(self.size * full, most))
        if self.op == "gemm_rs":
            whole = None if k is None else cdiv(k, len(self.nodes))
            self.inner = GemmRSContext(rows, n, self.dtype, local, self.schedule, whole, here)
        else:
            whole = None if n is None else cdiv(n, len(self.nodes))
            self.inner = AGGemmContext(rows, k, self.dtype, local, self.schedule, whole, here)
        self.inner.part_of = len(self.nodes)

    def _make_messages(self, here: int, max_m: Any, n: Any = None, k: Any = None) -> None:
        """gemm_rs has something else for each node; ag_gemm the same for all."""
        columns, sending = (n, len(self.nodes) - 1) if self.op == "gemm_rs" else (k, 1)
        nbytes = chunk_rows(max_m, self.size) * columns * self.dtype.itemsize
        self.messages = self._kind_of_messages()(self.op, self.control, nbytes, sending, self.inner)

    def _kind_of_messages(self) -> type[Letters | Puts]:
        executor, who = self.world.executor, env.puts()
        if executor.name == "shm":
            return Letters
        if who == "device":
            return AllKernelPuts
        if who == "host" or not executor.one_host:
            return Puts
        if executor.device_library() is not None:
            return KernelPuts
        if self.rank == 0:
            world.log.warning(
                "%s: the package nvidia-nvshmem has no libnvshmem_device.bc, so the host puts messages to other nodes that kernels "
                "would put sooner; install it by the extra cu13 (or cu12), or set FLUXLIKE_PUTS=host", self.op,
            )  # fmt: skip
        return Puts

    # -- a call ---------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A call begins. Raises what is known to have failed."""
        beside_capture(self.op, self.world.executor, *self.messages.sides, self.inner.engine)
        self.control.between += 1
        self.raise_if_failed()
        self.stats["calls"] += 1

    def recall(self, key: Hashable) -> again.Known | None:
        """What is known of calls with this key: that they need no checks."""
        return self.inner.recall(key)  # type: ignore[no-any-return]

    def remember(self, key: Hashable, known: again.Known) -> None:
        self.inner.remember(key, known)

    def in_step(self) -> bool:
        """Whether calls without a context use it as it is."""
        return self.fits({})

    def is_together(self, m: int, full: int, whole: int | None) -> bool:
        """Whether a call of ``m`` rows, ``full`` in a full chunk, is made with one product of all rows, as `together` says.

        ``whole``: K (gemm_rs) or N (ag_gemm) of the node, where it is not the context's.
        """
        if m == 0 or self.size * full > self.inner.max_m:
            return False
        if self.together is not None:
            return self.together
        if self.schedule == "stream_k":  # of which there is no model
            return False
        known = self._faster.get((full, whole))
        if known is None:
            count = len(self.nodes)
            one = self._expected(full, whole)
            message = self.messages.latency + self._nbytes(full) / self.messages.rate
            apart = count * (one + cost.AROUND) + max(0.0, message - one)  # the last of them has one product to hide under
            known = self._faster[full, whole] = self._expected(full * count, whole) + self._exposed(full) < apart
        return known

    def _nbytes(self, full: int) -> int:
        """Of a message."""
        columns = self.inner.n if self.op == "gemm_rs" else self.inner.k
        return int(full * columns * self.dtype.itemsize)

    def _expected(self, full: int, whole: int | None) -> float:
        """Seconds of a call inside the node with so many rows a rank."""
        inner = self.inner
        n, k = inner.n or cost.LARGE_K, inner.k  # N of ag_gemm may not be known
        if whole is not None:
            n, k = (n, whole) if self.op == "gemm_rs" else (whole, k)
        problem = inner.problem(full * inner.size, n, k, full)
        return choice.predict(problem, inner.choose(problem))

    def _exposed(self, full: int) -> float:
        """Seconds of what a call that is made together does beside its call inside the node."""
        nbytes, others = self._nbytes(full), len(self.nodes) - 1
        sent = self.messages.latency_alone + others * nbytes / self.messages.rate
        return cost.ARRANGED[self.op] + sent + 2 * self.size * nbytes / self.inner.tuned.memory

    def broken(self, error: BaseException) -> None:
        """A call was ended by ``error``: no rank need wait in it any more, on this node or another."""
        heard(error, self.control.name)
        self._join()
        if self._error is None:
            if isinstance(error, (PeerTimeout, CallMismatch)):
                self._error = untraced(error)
            else:  # what it says is of that call
                ended = f"an earlier call of this context was ended by {type(error).__name__} ({error}). {self.remedy}"
                self._error = RuntimeError(f"{self.op}: {ended}")
            self._seen = True
            for context in (self.inner, *self.inner.inner):  # the latter of schedule "sequential"
                context.stop(self._error)
            self.inner.unseen_failure()  # what this node has found is not raised beside it
            self.inner.board.freeze()
            self.messages.give_up()

    def _join(self) -> None:
        """A call ends in the middle: a capture that has it ends with what the call raises, and not because of puts beside it."""
        try:
            self.messages.join()
        except RuntimeError as problem:  # a capture that has failed, or a GPU, has an error of its own to report
            world.log.warning("rank %d: puts of a call that failed are not joined: %s", self.group_ranks[self.rank], problem)

    def raise_if_failed(self) -> None:
        if self.world.is_forked or self.closed or self._error is not None or self._cause() is not None:  # in every call
            self._raise()

    def _raise(self) -> None:
        self.world.raise_if_forked()
        if self.closed:
            raise RuntimeError(f"{self.op}: this context is closed; make a new one with fluxlike.create_{self.op}_context")
        if self._error is not None:
            self._seen = True
            heard(self._error, self.control.name)  # who was to be told has been, when it happened
            raise untraced(self._error)
        cause = self._cause()
        assert cause is not None
        try:
            raise untraced(cause)
        except BaseException as error:
            self.broken(error)
            raise

    def _cause(self) -> Exception | None:
        """What is known by now to have failed, on this node or between nodes: of several errors the one nearest to the cause."""
        found = [context.failure() for context in (self.inner, *self.inner.inner)] + [self.messages.failure()]
        errors = [error for error in found if error is not None]
        return min(errors, key=lambda error: getattr(error, "told", 0)) if errors else None

    def check(self) -> None:
        """Wait for the device and raise if a wait of an earlier call ran out; as `GroupContext.check`."""
        self.world.raise_if_forked()
        self.world.executor.synchronize()
        if not self.closed:
            self.inner.look_at_peers()
        self.raise_if_failed()

    def fits(self, sizes: dict[str, int]) -> bool:
        """Whether calls up to ``sizes`` can use it. The same on all ranks.

        On CPUs they are all told of a failure in the call that fails, and the next makes it anew. On GPUs each learns of it in
        another call, so it is kept, and raises.
        """
        usable = not self.closed and (self._error is None or self.world.executor.name != "shm")
        return usable and all(getattr(self, name) >= size for name, size in sizes.items())

    def unseen_failure(self) -> Exception | None:
        failure = None if self._seen else self._error or self._cause()
        self._seen = self._seen or failure is not None
        self.inner.unseen_failure()  # is raised here, if at all
        return None if failure is None else untraced(failure)

    def abandon(self) -> None:
        self.closed = True  # `inner`, which has the memory, is abandoned by itself
        if getattr(self, "messages", None) is not None:  # of one that is half made, too
            self.messages.abandon()

    def close(self) -> None:
        """Collective over the group; harmless when called again. As `GroupContext.close`, it raises what no call has raised."""
        if self.world.is_forked:
            return
        programs.refuse_inside(f"close() of {self.label}")
        with self.control.lock:  # as there
            if not self.closed:
                self._close()

    def _close(self) -> None:
        # what calls on other streams and replays of graphs have put is on its way only when they are done
        self.world.executor.synchronize()
        self.messages.quiet()
        self.world.executor.synchronize()
        self.closed = True  # not where that raises: then finalize abandons it
        if self in self.world.contexts:
            self.world.contexts.remove(self)
        unseen = self.unseen_failure()
        everyone, mismatch = self.control.part(f"closing {self.label}")
        self.messages.close(everyone)
        self.inner.close()
        if mismatch is not None or unseen is not None:
            raise mismatch or unseen  # type: ignore[misc]

"""gemm_rs and ag_gemm of a group that spans nodes: the operations of one node, and messages between nodes. Their design record.

R ranks are J nodes of L: rank (j, l) is place j · L + l of the group. Each operation of one node hides its traffic over NVLink
under its product, as ever; here they follow each other, one for each node, and what crosses the network does so under the next.

    gemm_rs   for j = i+1, i+2, …, i:  partial_j = gemm_rs of node i (x[rows of node j], W)         [rows of (j, l), N]
                                       j ≠ i: sent to (j, l)
              y = Σ over nodes of the partials, in fp32, in the order of the nodes, rounded once
    ag_gemm   own shard sent to (i-1, l), (i-2, l), …
              for j = i, i+1, …:       z[rows of node j] = ag_gemm of node i (shard of (j, l), W)

So the nearest comes first in ag_gemm and last in gemm_rs. Or, with few rows, *together*, as each of J products reads the weight::

    gemm_rs   partials = gemm_rs of node i (x, its rows in the order of (l, j), W)                 [rows of (0, l), (1, l), …; N]
              sent and added as above
    ag_gemm   own shard sent as above; all of them waited for
              z, its rows in the order of (l, j) = ag_gemm of node i (shards of (0, l), (1, l), …, W)

There is one product then, of all rows, and nothing hides the network. What the model expects to be faster is taken (`is_together`),
on which the ranks of a node agree; other nodes need not: messages are the same. Chunks that are short are filled up to be equal.

Each row of partial sums crosses the network once for each other node and not once for each rank of it: 1/L of the bytes. Each
shard crosses once for each other node, and there spreads over NVLink.

*Rows.* M rows are split as torch.chunk splits them over all R ranks: chunks of c = ⌈M/R⌉ rows. The rows of a node are those of its
ranks, and its operation splits them by c, too (``full``), which is not what torch.chunk would do with them alone.

*Messages.* A rank whose counterpart makes another call raises CallMismatch; if nothing comes, PeerTimeout names the rank and its
node. Either way the waits of this node end, and those of its counterparts.

*Numerics.* Those of the operation on one node, then one more rounding of each node's sum of gemm_rs to the dtype; the bias is added
to the sum over nodes. The same bits on every repeat.

Messages are sent from where the operation of a node writes its result, and read from where they come; `messages` has their record.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist

from ..kernels.tiles import cdiv, chunk_rows, rows_of
from ..runtime import env, world
from ..runtime.control import ControlGroup
from ..runtime.errors import CallMismatch, PeerTimeout, heard, untraced
from . import again, choice, cost, keeping, sequential, validate
from .context import check_arguments
from .kernel_puts import AllKernelPuts, KernelPuts
from .making import Held
from .messages import Letters, filled
from .puts import Puts

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
        self.label = f"{what} over {len(self.nodes)} nodes"
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

    def begin(self, m: int, columns: int, whole: int | None) -> "_Call":
        """``whole``: K (gemm_rs) or N (ag_gemm) of all ranks, if the caller says it. Raises what is known to have failed."""
        self.control.between += 1
        self.raise_if_failed()
        self.stats["calls"] += 1
        return _Call(self, m, columns, None if whole is None else cdiv(whole, len(self.nodes)))

    def recall(self, key: Hashable) -> again.Known | None:
        """What is known of calls with this key: that they need no checks."""
        return self.inner.recall(key)  # type: ignore[no-any-return]

    def remember(self, key: Hashable, known: again.Known) -> None:
        self.inner.remember(key, known)

    def in_step(self) -> bool:
        """Whether calls without a context use it as it is."""
        return self.fits({})

    def is_together(self, m: int, full: int, whole: int | None = None) -> bool:
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

    def close(self) -> None:
        """Collective over the group; harmless when called again. As `GroupContext.close`, it raises what no call has raised."""
        if self.world.is_forked:
            return
        with self.control.lock:  # as there
            if not self.closed:
                self._close()

    def _close(self) -> None:
        self.closed = True
        if self in self.world.contexts:
            self.world.contexts.remove(self)
        # what calls on other streams and replays of graphs have put is on its way only when they are done
        self.world.executor.synchronize()
        self.messages.quiet()
        self.world.executor.synchronize()
        unseen = self.unseen_failure()
        everyone, _ = self.control.part(f"closing {self.label}")
        self.messages.close(everyone)
        self.inner.close()
        if unseen is not None:
            raise unseen


class _Call:
    """A call between nodes: its rows, and an end in which all ranks are told of an error.

    ``whole``: K (gemm_rs) or N (ag_gemm) of the node, if the caller says it.
    """

    def __init__(self, ctx: NodesContext, m: int, columns: int, whole: int | None) -> None:
        self.ctx, self.m, self.full, self.whole = ctx, m, chunk_rows(m, ctx.size), whole
        self.together = ctx.is_together(m, self.full, whole)
        self._sizes = m, columns

    def __enter__(self) -> Self:
        self.ctx.inner.known = False
        self._step(lambda: self.ctx.messages.begin(*self._sizes))
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self._step(self.ctx.messages.end)
        else:
            self.ctx.broken(error)

    def _step(self, step: Callable[[], None]) -> None:
        try:
            step()
        except BaseException as problem:
            self.ctx.broken(problem)
            raise

    def rows(self, node: int) -> slice:
        """The rows of a node's ranks."""
        each = self.ctx.control.local.size * self.full
        return slice(min(node * each, self.m), min((node + 1) * each, self.m))

    def rows_of_peer(self, node: int) -> int:
        """Rows of this rank's counterpart on a node."""
        return rows_of(self.m, self.ctx.size, self.ctx.messages.peer(node), self.full)

    def by_rank(self, x: torch.Tensor) -> torch.Tensor:
        """All chunks, filled up to be whole, in the order of (l, j)."""
        local, height = self.ctx.inner.size, self.ctx.size * self.full
        if local == 1:
            return filled(x, height)
        chunks = filled(x, height).unflatten(0, (len(self.ctx.nodes), local, self.full))
        return chunks.transpose(0, 1).reshape(height, x.shape[1])

    def by_node(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks, in the order of (j, l), of whole chunks in that of (l, j)."""
        chunks = x.unflatten(0, (self.ctx.inner.size, len(self.ctx.nodes), self.full))
        return chunks.transpose(0, 1).reshape(x.shape)[: self.m]

    def told(self, nbytes: int) -> None:
        """What the context says of it; ``nbytes``: sent to other nodes so far."""
        self.ctx.stats["bytes"] = nbytes
        self.ctx.last_path = f"nodes/{self.ctx.inner.last_path}{'/together' if self.together else ''}"


def gemm_rs(
    control: ControlGroup,
    ctx: Any,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup | None,
    out: torch.Tensor | None,
    whole: int | None,
    seen: again.Signature | None,
) -> torch.Tensor:
    """A call of `ops.gemm_rs` whose group spans nodes."""
    m, n = x.shape[0], weight.shape[0]
    with control.lock:
        ctx = ctx or _kept("gemm_rs", control, x.dtype, {"max_m": m, "n": n}, x.shape[1])
        validate.call("gemm_rs", ctx, group, x, {"M": (m, ctx.max_m, "max_m"), "N": (n, ctx.n, "n")})
        y = validate.output("gemm_rs", out, (rows_of(m, ctx.size, ctx.rank), n), x, weight, bias)
        make_gemm_rs(ctx, x, weight, bias, y, whole)
        again.remember(ctx, seen, (x, weight, bias, out), (0, None), [y])
    return y


def make_gemm_rs(
    ctx: NodesContext, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor, whole: int | None
) -> None:
    """A call that is checked."""
    from . import gemm_rs as local

    m, n = x.shape[0], weight.shape[0]
    with ctx.begin(m, n, whole) as call:
        post = ctx.messages
        rows = y.shape[0]
        parts, full = post.places(rows, n, x.dtype), call.full
        if call.together:
            height = len(ctx.nodes) * full
            partials = x.new_empty(height, n)
            local.run(ctx.inner, call.by_rank(x), weight, None, partials, height, call.whole)
            for node in post.next:
                post.send_rows(partials, node * full, call.rows_of_peer(node), node)
            start = ctx.node * full
            own = partials[start : start + rows]
        else:
            for node in post.next:
                place = post.place(node, call.rows_of_peer(node), n, x.dtype)
                local.run(ctx.inner, x[call.rows(node)], weight, None, place, full, call.whole)
                ctx.inner.known = True  # what follows in the node needs no telling
                post.send(place, node)
            own = parts[ctx.node]
            local.run(ctx.inner, x[call.rows(ctx.node)], weight, None, own, full, call.whole)
        post.total(parts, own, y, bias)
        for node in post.next:
            post.read(node)
    call.told(post.bytes)


def ag_gemm(
    control: ControlGroup,
    ctx: Any,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    group: dist.ProcessGroup | None,
    results: list[torch.Tensor],
    gathered: torch.Tensor | None,
    whole: int | None,
    outs: Sequence[torch.Tensor],
    seen: again.Signature | None,
) -> None:
    """A call of `ops.ag_gemm` whose group spans nodes. ``outs``: those of the results that the caller gave."""
    m, k = results[0].shape[0], x.shape[1]
    with control.lock:
        here = sum(w.shape[0] for w in weights)
        ctx = ctx or _kept("ag_gemm", control, x.dtype, {"max_m": m, "k": k}, here)
        validate.call("ag_gemm", ctx, group, x, {"M": (m, ctx.max_m, "max_m"), "K": (k, ctx.k, "k")})
        make_ag_gemm(ctx, x, weights, biases, results, gathered, whole)
        every = results if gathered is None else [*results, gathered]
        again.remember(ctx, seen, (x, *weights, *biases, *outs), (0, None), every)


def make_ag_gemm(
    ctx: NodesContext,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    results: list[torch.Tensor],
    gathered: torch.Tensor | None,
    whole: int | None,
) -> None:
    """A call that is checked."""
    with ctx.begin(results[0].shape[0], x.shape[1], whole) as call:
        ctx.messages.send_to_all(x, alone=call.together)
        (_together if call.together else _one_by_one)(call, x, weights, biases, results, gathered)
        call.told(ctx.messages.bytes)


def _one_by_one(
    call: _Call,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    results: list[torch.Tensor],
    gathered: torch.Tensor | None,
) -> None:
    """The rest of a call of `ag_gemm`, whose shard is sent: the rows of each node when they are there."""
    from . import ag_gemm as local

    ctx, post = call.ctx, call.ctx.messages
    for node in (ctx.node, *post.next):
        shard = x
        if node != ctx.node:
            shard = post.places(call.rows_of_peer(node), x.shape[1], x.dtype)[node]
            post.receive(node, shard)
        rows = call.rows(node)
        part = None if gathered is None else gathered[rows]
        local.rows_of_a_node(ctx.inner, shard, weights, biases, [z[rows] for z in results], part, call.full, call.whole)
        ctx.inner.known = True  # what follows in the node needs no telling
        if node != ctx.node:
            post.read(node)


def _together(
    call: _Call,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    results: list[torch.Tensor],
    gathered: torch.Tensor | None,
) -> None:
    """The same for all rows together."""
    from . import ag_gemm as local

    post, count, height = call.ctx.messages, len(call.ctx.nodes), call.ctx.size * call.full
    all_rows = post.gather(x, [call.rows_of_peer(node) for node in range(count)], call.full)
    for node in post.next:
        post.read(node)
    wanted = [*results, *([] if gathered is None else [gathered])]
    # by rank and node, not by node and rank
    made = wanted if call.ctx.inner.size == 1 and height == call.m else [t.new_empty(height, t.shape[1]) for t in wanted]
    rows_too = None if gathered is None else made[-1]
    local.rows_of_a_node(
        call.ctx.inner, all_rows, weights, biases, made[: len(results)], rows_too, count * call.full, call.whole
    )
    if made is not wanted:
        for t, z in zip(made, wanted, strict=True):
            z.copy_(call.by_node(t))


def _kept(op: str, control: ControlGroup, dtype: torch.dtype, sizes: dict[str, int], here: int) -> Any:
    """The context of calls without one."""

    def make(wanted: dict[str, int]) -> NodesContext:
        keeping.alike(op, control, sizes)
        keeping.as_many(op, control)
        return NodesContext(op, control, dtype, "auto", here, **wanted)

    return keeping.kept((op, control.name, dtype), control, sizes, make, 1 << 30)

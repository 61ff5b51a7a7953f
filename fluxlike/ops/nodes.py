"""gemm_rs and ag_gemm of a group that spans nodes: the operations of one node, and messages between nodes. Their design record.

R ranks are J nodes of L: rank (j, l) is place j · L + l of the group. Each operation of one node hides its traffic over NVLink
under its product, as ever; here they follow each other, one for each node, and what crosses the network does so under the next.

    gemm_rs   for j = i+1, i+2, …, i:  partial_j = gemm_rs of node i (x[rows of node j], W)         [rows of (j, l), N]
                                       j ≠ i: sent to (j, l)
              y = Σ over nodes of the partials, in fp32, in the order of the nodes, rounded once
    ag_gemm   own shard sent to (i-1, l), (i-2, l), …
              for j = i, i+1, …:       z[rows of node j] = ag_gemm of node i (shard of (j, l), W)

So the nearest comes first in ag_gemm and last in gemm_rs. Each row of partial sums crosses the network once for each other node and
not once for each rank of it: 1/L of the bytes. Each shard crosses once for each other node, and there spreads over NVLink.

*Rows.* M rows are split as torch.chunk splits them over all R ranks: chunks of c = ⌈M/R⌉ rows. The rows of a node are those of its
ranks, and its operation splits them by c, too (``full``), which is not what torch.chunk would do with them alone.

*Messages.* Before its payload a rank sends what it is calling: number, operation, M, the columns. A rank that receives something
else raises CallMismatch; if nothing comes, PeerTimeout names the rank and its node. Either way the waits of this node end.

*Numerics.* Those of the operation on one node, then one more rounding of each node's sum of gemm_rs to the dtype. The same bits on
every repeat.

Shown on the CPU heap; messages are gloo's, over TCP, and are sent from where they are while the next operation runs.
"""

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.distributed as dist

from ..kernels.tiles import cdiv, chunk_rows, rows_of
from ..runtime import world
from ..runtime.control import ControlGroup
from ..runtime.errors import CallMismatch, PeerTimeout
from . import validate
from .group import kept as group_kept

_OPS = ("gemm_rs", "ag_gemm")
#: The number of a call that will not come.
GAVE_UP = -1


class NodesContext:
    """A context of this rank's node, and what its calls have in common with those of the other nodes.

    Attributes for people and tests: ``inner`` (of the node), ``last_path``, ``stats`` (calls, bytes sent to other nodes).
    """

    def __init__(
        self, op: str, control: ControlGroup, dtype: torch.dtype, schedule: str, here: int = 0, **sizes: int | None
    ) -> None:
        """Collective. ``sizes``: those of ``fluxlike.create_…_context``, of the whole problem.

        ``here``: K of gemm_rs, or N of ag_gemm, on this rank, where sizes leave it out; ranks may differ in that.
        """
        self.op, self.control, self.dtype, self.schedule = op, control, dtype, schedule
        self.rank, self.size, self.group_ranks = control.rank, control.size, control.ranks
        self.node, self.nodes = control.node, control.nodes
        self.closed, self._seen = False, False
        self._error: Exception | None = None
        self._numbers = itertools.count(1)
        #: Keeps messages that nobody waits for until they are sent.
        self.last_words: list[Any] = []
        control.spanning += 1
        #: Of its messages: what a failed context has left unread is not for the next one.
        self.tag = 2 * control.spanning
        self.last_path, self.stats = "", {"calls": 0, "bytes": 0}
        self.world = world.current()
        error: Exception | None = None
        if self.world.executor.name != "shm":
            error = RuntimeError(f"{op}: groups that span nodes work on the CPU heap only so far; use a group of one node's ranks")
        what = f"create_{op}_context"
        with control.lock:
            control.agree(what, (sizes, str(dtype), schedule), error)
            self.inner: Any = None
            try:
                self.inner = self._make(here, **sizes)
            except (RuntimeError, ValueError) as problem:
                error = problem
            try:
                control.agree(f"{what}: the nodes", None, error)
            except BaseException:
                if self.inner is not None:
                    self.inner.close()
                raise
        self.max_m, self.n, self.k = sizes["max_m"], sizes.get("n"), sizes.get("k")
        self.label = f"{what} over {len(self.nodes)} nodes"
        self.world.contexts.insert(self.world.contexts.index(self.inner), self)  # which is closed before what is in it

    def _make(self, here: int, max_m: Any, n: Any = None, k: Any = None) -> Any:
        """The context of this node, for the rows of a node at a time."""
        from .ag_gemm import AGGemmContext
        from .gemm_rs import GemmRSContext

        local = self.control.local
        rows = max_m if not isinstance(max_m, int) or max_m < 1 else local.size * chunk_rows(max_m, self.size)
        if self.op == "gemm_rs":
            return GemmRSContext(rows, n, self.dtype, local, self.schedule, None if k is None else cdiv(k, len(self.nodes)), here)
        return AGGemmContext(rows, k, self.dtype, local, self.schedule, None if n is None else cdiv(n, len(self.nodes)), here)

    # -- a call ---------------------------------------------------------------------------------------------------------

    def begin(self, m: int, columns: int) -> "_Call":
        self.raise_if_failed()
        self.stats["calls"] += 1
        return _Call(self, m, columns)

    def peer(self, node: int) -> int:
        """The place in the group of this rank's counterpart on a node."""
        return self.nodes[node][self.control.local.rank]

    def broken(self, error: BaseException) -> None:
        """A call was ended by ``error``: no rank of this node need wait in it any more."""
        if self._error is None:
            ended = RuntimeError(f"{self.op}: an earlier call was ended by {type(error).__name__}; make a new context")
            self._error, self._seen = error if isinstance(error, Exception) else ended, True
            self.inner.stop(self._error)
            self.inner.board.freeze()

    def raise_if_failed(self) -> None:
        self.world.raise_if_forked()
        if self.closed:
            raise RuntimeError(f"{self.op}: this context is closed; make a new one with fluxlike.create_{self.op}_context")
        if self._error is not None:
            raise self._error
        self.inner.raise_if_failed()

    def check(self) -> None:
        """Wait for the device and raise if a wait of an earlier call ran out."""
        self.inner.check()
        self.raise_if_failed()

    def fits(self, sizes: dict[str, int]) -> bool:
        """Whether calls up to ``sizes`` can use it. The same on all ranks, which are all told of a failure."""
        usable = not self.closed and self._error is None
        return usable and all(getattr(self, name) >= size for name, size in sizes.items())

    def unseen_failure(self) -> Exception | None:
        return None if self._seen else self._error or self.inner.unseen_failure()

    def close(self) -> None:
        """Collective over the group; harmless when called again."""
        if self.closed or self.world.is_forked:
            return
        self.closed = True
        if self in self.world.contexts:
            self.world.contexts.remove(self)
        self.inner.close()
        self.control.part(f"closing {self.label}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class _Call:
    """The messages of one call."""

    def __init__(self, ctx: NodesContext, m: int, columns: int) -> None:
        self.ctx, self.m, self.columns, self.full = ctx, m, columns, chunk_rows(m, ctx.size)
        self.header = torch.tensor([next(ctx._numbers), _OPS.index(ctx.op), m, columns])
        self._sent: list[Any] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            for sent in self._sent if error is None else ():
                sent()
        except BaseException as problem:
            self._give_up(problem)
            raise
        if error is not None:
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        """Let the counterparts on the other nodes know that nothing more comes."""
        self.ctx.broken(error)
        self.header[0] = GAVE_UP
        for node in _others(self.ctx, 1):
            with contextlib.suppress(RuntimeError):  # of one that is gone
                last = self.ctx.control.send(self.header.clone(), self.ctx.peer(node), self.ctx.tag, self.ctx.op)
                self.ctx.last_words.append(last)

    def rows(self, node: int) -> slice:
        """The rows of a node's ranks."""
        each = self.ctx.control.local.size * self.full
        return slice(min(node * each, self.m), min((node + 1) * each, self.m))

    def rows_of_peer(self, node: int) -> int:
        """Rows of this rank's counterpart on a node."""
        return rows_of(self.m, self.ctx.size, self.ctx.peer(node), self.full)

    def send(self, payload: torch.Tensor, node: int) -> None:
        """To this rank's counterpart there; ``payload`` must stay as it is until the call ends."""
        for tag, message in enumerate((self.header, payload.contiguous().view(torch.uint8))):
            if message.numel():
                self._sent.append(self.ctx.control.send(message, self.ctx.peer(node), self.ctx.tag + tag, self.ctx.op))
        self.ctx.stats["bytes"] += payload.numel() * payload.element_size()

    def receive(self, payload: torch.Tensor, node: int) -> torch.Tensor:
        """From this rank's counterpart there."""
        ctx, source, theirs = self.ctx, self.ctx.peer(node), torch.empty_like(self.header)
        ctx.control.receive(theirs, source, ctx.tag, ctx.op)
        if theirs[0] == GAVE_UP:
            raise PeerTimeout(
                f"{ctx.op}: rank {ctx.group_ranks[ctx.rank]} stopped waiting for rank {ctx.group_ranks[source]} on node {node}, "
                "because that one gave up first; its message names the cause. Close the context and make a new one"
            )
        if not torch.equal(theirs, self.header):
            raise CallMismatch(
                f"rank {ctx.group_ranks[ctx.rank]} is at call {_said(self.header)} and rank {ctx.group_ranks[source]} on node "
                f"{node} at call {_said(theirs)}; all ranks of a group must make the same calls, with the same sizes, in the same "
                "order. Close the context and make a new one"
            )
        if payload.numel():
            ctx.control.receive(payload.view(torch.uint8), source, ctx.tag + 1, ctx.op)
        return payload


def _said(header: torch.Tensor) -> str:
    number, op, m, columns = header.tolist()
    return f"{number} of {_OPS[op]} with M={m} and {columns} columns"


def gemm_rs(
    control: ControlGroup,
    ctx: Any,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """A call of `ops.gemm_rs` whose group spans nodes."""
    from . import gemm_rs as local

    m, n = x.shape[0], weight.shape[0]
    with control.lock:
        ctx = ctx or _kept("gemm_rs", control, x.dtype, {"max_m": m, "n": n}, x.shape[1])
        validate.call("gemm_rs", ctx, group, x, {"M": (m, ctx.max_m, "max_m"), "N": (n, ctx.n, "n")})
        y = validate.output("gemm_rs", out, (rows_of(m, ctx.size, ctx.rank), n), x, weight, bias)
        with ctx.begin(m, n) as call:
            for node in _others(ctx, 1):
                partial = local.call(x[call.rows(node)], weight, ctx.inner, full=call.full)
                call.send(partial, node)
            own = local.call(x[call.rows(ctx.node)], weight, ctx.inner, bias, full=call.full)
            sums = [own if node == ctx.node else call.receive(torch.empty_like(own), node) for node in range(len(ctx.nodes))]
            total = sums[0].float()
            for partial in sums[1:]:
                total += partial
            y.copy_(total)
        ctx.last_path = f"nodes/{ctx.inner.last_path}"
    return y


def ag_gemm(
    control: ControlGroup,
    ctx: Any,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor | None],
    group: dist.ProcessGroup | None,
    results: list[torch.Tensor],
    gathered: torch.Tensor | None,
) -> None:
    """A call of `ops.ag_gemm` whose group spans nodes."""
    from . import ag_gemm as local

    m, k = results[0].shape[0], x.shape[1]
    with control.lock:
        here = sum(w.shape[0] for w in weights)
        ctx = ctx or _kept("ag_gemm", control, x.dtype, {"max_m": max(m, 1), "k": max(k, 1)}, here)
        validate.call("ag_gemm", ctx, group, x, {"M": (m, ctx.max_m, "max_m"), "K": (k, ctx.k, "k")})
        with ctx.begin(m, k) as call:
            for node in _others(ctx, -1):
                call.send(x, node)
            for node in (ctx.node, *_others(ctx, 1)):
                shard = x
                if node != ctx.node:
                    shard = call.receive(x.new_empty(call.rows_of_peer(node), k), node)
                rows = call.rows(node)
                part = None if gathered is None else gathered[rows]
                local.rows_of_a_node(ctx.inner, shard, weights, biases, [z[rows] for z in results], part, call.full)
        ctx.last_path = f"nodes/{ctx.inner.last_path}"


def _others(ctx: NodesContext, step: int) -> Sequence[int]:
    """The other nodes, from the next one on, up or down."""
    return [(ctx.node + step * distance) % len(ctx.nodes) for distance in range(1, len(ctx.nodes))]


def _kept(op: str, control: ControlGroup, dtype: torch.dtype, sizes: dict[str, int], here: int) -> Any:
    """The context of calls without one."""

    def make(wanted: dict[str, int]) -> NodesContext:
        return NodesContext(op, control, dtype, "auto", here, **wanted)

    return group_kept((op, control.name, dtype), control, sizes, make, 1 << 30)

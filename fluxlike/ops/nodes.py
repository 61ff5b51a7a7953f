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

Messages are sent from where the operation of a node writes its result, and read from where they come; `messages` has their record,
`nodes_context` what they and the operations of the node need.
"""

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist

from ..kernels.tiles import cdiv, chunk_rows, rows_of
from ..runtime.control import ControlGroup
from . import again, keeping, tiling, validate
from .messages import filled
from .nodes_context import NodesContext


class _Call:
    """A call between nodes: its rows, and an end in which all ranks are told of an error.

    ``whole``: K (gemm_rs) or N (ag_gemm): that of all ranks, if the caller says it, and kept as that of the node.
    """

    def __init__(self, ctx: NodesContext, m: int, columns: int, whole: int | None) -> None:
        ctx.begin()
        self.ctx, self.m, self.full = ctx, m, chunk_rows(m, ctx.size)
        self.whole = None if whole is None else cdiv(whole, len(ctx.nodes))
        self.together = ctx.is_together(m, self.full, self.whole)
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
    with _Call(ctx, m, n, whole) as call:
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
    with _Call(ctx, results[0].shape[0], x.shape[1], whole) as call:
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
        return NodesContext(op, control, dtype, "auto", here, **wanted)

    def agree() -> None:
        keeping.alike(op, control, sizes, dtype)
        keeping.as_many(op, control)

    return keeping.kept((op, control.name, dtype), control, sizes, make, tiling.MAX_SIZE, agree)

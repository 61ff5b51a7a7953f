"""Finding collectives next to products in an FX graph, and putting ``torch.ops.fluxlike.*`` in their place.

The graphs are those that inductor passes on after autograd: aten ops without mutation, and ``_c10d_functional`` collectives, which
gather and scatter along dimension 0 only. Along another dimension d the ranks' parts come as chunks that are concatenated anew::

    gather along d:   wait(all_gather(shard)) -> R chunks along 0 -> cat along d = G
    scatter along d:  P -> R chunks along d -> cat along 0 -> wait(reduce_scatter)

Products are of two dimensions. Between them and G or P may be any reshapes that keep the last dimension: rows stay rows, in their
order, and that is all that matters here. ag_gemm and gemm_rs have the ranks' rows one rank after the other; where G or P has them
otherwise (d > 0 and a batch), one copy brings them in order, as the cat did.
"""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.fx
from torch._higher_order_ops.effects import _EffectType, _get_effect
from torch._inductor import inductor_prims
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node

from ..ops import library
from ..ops.context import DTYPES
from ..runtime import world
from .patterns import (
    CAST,
    GATHER,
    SCATTER,
    SPLITS,
    WAIT,
    Left,
    Product,
    arguments,
    aten,
    check_writes,
    chunks,
    equal,
    in_group,
    keeps_rows,
    known,
    prims,
    product_of,
    same,
    shape,
    unlike_ours,
    value,
    with_effects,
)

#: What a product is that has factors, or another bias.
OTHERWISE = "is scaled, or has a bias that is not one number for each column"
#: Torch's einsum of a weight is a bmm, of which neither this nor torch's own pass takes any.
NO_PRODUCT = "no product takes what is gathered, of those that nn.Linear and matmul of a weight with two dimensions make"
#: DTensor pads parts to one length, and a graph does not tell which rows are no one's.
CUT = "what is gathered is cut behind that, as where the ranks do not divide the sequence"
PADDED = "is padded, as where the ranks do not divide the sequence"
RECAST = "is a product in another dtype, as in front of what autocast left in float32"
#: What `merging.wait_once` leaves apart.
SEVERAL = "what it gathers is made whole several times, and the program gets more than one of these, or one is written to"


class Rewrite:
    """A graph, what is put into it, and where. ``even``: see `AsyncTP`."""

    def __init__(self, graph: torch.fx.Graph, even: bool = False) -> None:
        self.graph, self.even = graph, even
        fakes = (n.meta["val"] for n in graph.nodes if isinstance(n.meta.get("val"), torch.Tensor))
        self.mode: FakeTensorMode = next(fakes).fake_mode  # type: ignore[attr-defined]
        #: What has been put in for the collective at hand.
        self.added: list[Node] = []

    def add(self, target: Callable, *args: Any, **kwargs: Any) -> Node:
        """A call at the graph's insertion point, with the fake result that later passes look at."""
        node = self.graph.call_function(target, args, kwargs)
        self.added.append(node)
        given, named = torch.fx.map_arg((args, kwargs), value)
        with self.mode:
            node.meta["val"] = target(*given, **named)
        return node

    def call(self, op: Any, *args: Any) -> Node:
        """A call of an op with an ordered effect; `thread` gives it its token."""
        return self.add(operator.getitem, self.add(with_effects, self.add(prims._make_token.default), op._opoverload, *args), 1)

    def rows(self, x: Node) -> Node:
        """x [M, K] in rows that lie one after the other: inductor is free to lay out what it computes, and the op has a rule."""
        (columns,) = known(shape(x)[1:])
        if columns < 0:
            raise Left("the number of columns is dynamic")
        return self.add(inductor_prims.force_stride_order, x, [columns, 1])

    def reshaped(self, x: Node, sizes: Sequence[Any]) -> Node:
        return x if same(shape(x), sizes) else self.add(aten.reshape.default, x, self.sizes(x, sizes))

    def sizes(self, x: Node, wanted: Sequence[Any]) -> list[Any]:
        """Sizes as a reshape of ``x`` takes them, which has as many rows and features: -1 stands for one that is not known.

        It does not follow where there are no features; then it is made of the one that is not known of ``x``.
        """
        found: list[Any] = [*known(wanted)]
        if 0 not in found or -1 not in found:
            return found
        given = known(shape(x))
        rows = self.add(operator.mul, self.add(aten.sym_size.int, x, given.index(-1)), math.prod(n for n in given if n > 0))
        found[found.index(-1)] = self.add(operator.floordiv, rows, math.prod(n for n in found if n > 0))
        return found

    def weight(self, right: Node) -> Node:
        """The right side [K, N] of a product as the weight [N, K] of a call, which copies one that lies otherwise than it takes."""
        if right.target is aten.permute.default and right.args[1] == [1, 0]:
            return right.args[0]  # type: ignore[return-value]
        return self.add(aten.permute.default, right, [1, 0])

    def bias(self, product: Product) -> Node:
        """The bias of a call, which takes one for each weight or none: zeros for a product that has none."""
        if product.bias is None:
            (columns,) = known(shape(product.node)[1:])
            if columns < 0:
                raise Left("the number of columns is dynamic")
            like = value(product.node)
            return self.add(aten.full.default, [columns], 0, dtype=like.dtype, device=like.device)
        return product.bias

    def of_all(self, features: Sequence[Any], ranks: int) -> int | None:
        """What a call says of the features of all ranks, of which this one has these."""
        sizes = known(features)
        return ranks * sum(sizes) if self.even and min(sizes) >= 0 else None

    def whole(self, rows: Node, sizes: Sequence[Any], dim: int, ranks: int) -> Node:
        """Rows of all ranks, one after the other, as the whole of ``sizes`` [… features], spread along ``dim``."""
        *front, last = sizes
        if all(equal(size, 1) for size in front[:dim]):
            return self.reshaped(rows, sizes)
        parts = self.reshaped(rows, [ranks, *front[:dim], front[dim] // ranks, *front[dim + 1 :], last])
        order = [*range(1, dim + 1), 0, *range(dim + 1, len(sizes) + 1)]
        return self.reshaped(self.add(aten.permute.default, parts, order), sizes)

    def spread(self, rows: Node, sizes: Sequence[Any], dim: int, ranks: int) -> Node:
        """The inverse: rows of the whole of ``sizes`` as rows of the ranks, one after the other."""
        *front, last = sizes
        if all(equal(size, 1) for size in front[:dim]):
            return rows
        parts = [*front[:dim], ranks, front[dim] // ranks, *front[dim + 1 :], last]
        order = [dim, *range(dim), *range(dim + 1, len(parts))]
        return self.reshaped(self.add(aten.permute.default, self.reshaped(rows, parts), order), shape(rows))

    def thread(self) -> None:
        """One token through all calls with an ordered effect, those that were there and those put in, in the graph's order."""
        calls = [n for n in self.graph.nodes if n.target is with_effects and _get_effect(n.args[1]) is _EffectType.ORDERED]
        with self.graph.inserting_before(next(iter(self.graph.nodes))):
            token = self.add(prims._make_token.default)
        ends = []
        for call in calls:
            before, call.args = call.args[0], (token, *call.args[1:])
            if before.target is prims._make_token.default and not before.users:
                self.graph.erase_node(before)
            taken = [n for n in call.users if n.target is operator.getitem and n.args[1] == 0]
            with self.graph.inserting_after(call):
                token = taken[0] if taken else self.add(operator.getitem, call, 0)
            ends.append(token)
        sinks = [n for n in self.graph.nodes if n.target is prims._sink_tokens.default]
        others = [t for sink in sinks for t in sink.args[0] if t not in ends]
        for sink in sinks:
            self.graph.erase_node(sink)
        with self.graph.inserting_before(next(iter(reversed(self.graph.nodes)))):
            self.add(prims._sink_tokens.default, [*others, token])

    def replace(self, collective: Node, group: str | None) -> int:
        """The collective and its products by a call; how many products. Raises Left, and leaves the graph as it was, but for who is
        asked for sizes.

        ``group``: the name of the one group whose collectives are replaced; None for any.
        """
        _, of = in_group(collective)
        if group not in (None, of):
            raise Left(f"it is one of group {of!r}, not of {group!r}")
        _check_group(of)
        self.added = []
        try:
            return (replace_gather if collective.target is GATHER else replace_scatter)(self, collective)
        except Left:
            self.erase(self.added[::-1])
            raise

    def erase(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            if not node.users:
                self.graph.erase_node(node)


def _check_group(name: str) -> None:
    """A group with ranks that fluxlike does not span is one of something else, as data parallelism."""
    if world.is_initialized():
        known = world.current().control.ranks
        outside = [rank for rank in dist.get_process_group_ranks(library.group_of(name)) if rank not in known]
        if outside:
            raise Left(f"ranks {outside} of its group {name!r} are outside the group given to fluxlike.init")


# -- all_gather -> products --------------------------------------------------------------------------------------------------


def replace_gather(rewrite: Rewrite, gather: Node) -> int:
    """ag_gemm for an all_gather and the products of what it gathers; how many products. Raises Left."""
    (shard, ranks), group = in_group(gather)
    _sizes_of_shard(rewrite, gather, shard, ranks)
    chain, dim = _gathered(gather, ranks)
    wait, whole = chain[1], chain[-1]
    views, products = _products(whole)
    casts = [user for user in whole.users if user.target is CAST]
    if not products and len(casts) == len(whole.users) == 1 and not _elsewhere(chain):  # cast before the gather is the same
        whole = casts[0]
        chain.append(whole)
        views, products = _products(whole)
    if not products:
        other = next((user for node in (whole, *views) for user in node.users if unlike_ours(user)), None)
        cut = [user for user in whole.users if user.target is aten.slice.Tensor and arguments(user)[2] in (None, 0)]
        raise Left(f"the product {other} {OTHERWISE}" if other else CUT if cut == list(whole.users) else NO_PRODUCT)
    if dim == value(whole).dim() - 1:
        raise Left("it gathers the features, along which the product sums")
    order = {node: i for i, node in enumerate(rewrite.graph.nodes)}
    check_writes(gather, max((p.node for p in products), key=order.__getitem__))
    ready, reasons, early = [], [], set()
    for product in sorted(products, key=lambda p: order[p.node]):
        try:
            _check_dtypes(product, value(whole))
            early |= _needed(product, set(chain), order, order[wait])
            ready.append(product)
        except Left as left:
            reasons.append(str(left))
    if not ready:
        raise Left(reasons[0])
    for node in sorted(early, key=order.__getitem__):
        wait.prepend(node)
    with rewrite.graph.inserting_before(wait):
        _put_ag_gemm(rewrite, shard, ready, chain, dim, ranks, group)
    rewrite.erase([*reversed(views), *reversed(chain)])
    return len(ready)


def _put_ag_gemm(
    rewrite: Rewrite, shard: Node, products: list[Product], chain: list[Node], dim: int, ranks: int, group: str
) -> None:
    whole, sizes = chain[-1], shape(chain[-1])
    if whole.target is CAST:
        shard = rewrite.add(CAST, shard, whole.args[1])
    # a number of rows that is known is said: of a tensor without elements it does not follow
    rows = rewrite.rows(rewrite.reshaped(shard, [math.prod(shape(shard)[:-1]), sizes[-1]]))
    weights = [rewrite.weight(p.right) for p in products]
    biases = [rewrite.bias(p) for p in products] if any(p.bias is not None for p in products) else []
    beside = _elsewhere(chain)
    keep = beside or not set(_users(whole)) <= {p.node for p in products}
    n = rewrite.of_all([shape(p.right)[1] for p in products], ranks)
    results = rewrite.call(library.ag_gemm_op, rows, weights, biases, library.EVEN, keep, group, n)
    news = []
    for i, product in enumerate(products):
        z = rewrite.add(operator.getitem, results, i)
        z = rewrite.whole(z, [*sizes[:-1], shape(z)[1]], dim, ranks)
        news.append(rewrite.reshaped(z, shape(product.node)))
    if keep:
        gathered = rewrite.add(operator.getitem, results, len(products))
        # beside what is gathered, a whole of the same rows is a copy to the program, which may write to either: it stays one
        if not (beside and all(equal(size, 1) for size in sizes[:dim])):
            whole.replace_all_uses_with(rewrite.whole(gathered, sizes, dim, ranks))
        if beside:
            chain[1].replace_all_uses_with(rewrite.reshaped(gathered, shape(chain[1])))
    for product, new in zip(products, news, strict=True):
        product.node.replace_all_uses_with(new)
        rewrite.graph.erase_node(product.node)


def _sizes_of_shard(rewrite: Rewrite, gather: Node, shard: Node, ranks: int) -> None:
    """Who asks for a dynamic size of what is gathered is told by the shard: the gather has fewer users then, and may go."""
    for node in (gather, *(user for user in gather.users if user.target is WAIT)):
        for asked in [user for user in node.users if user.target is aten.sym_size.int]:
            with rewrite.graph.inserting_before(gather):
                size = rewrite.add(aten.sym_size.int, shard, asked.args[1])
                if asked.args[1] == 0:
                    size = rewrite.add(operator.mul, size, ranks)
            asked.replace_all_uses_with(size)
            rewrite.graph.erase_node(asked)


def _users(whole: Node) -> list[Node]:
    """What takes a tensor, itself or reshaped with its rows kept."""
    return [u for user in whole.users for u in (_users(user) if keeps_rows(user) and user.users else [user])]


def _elsewhere(chain: list[Node]) -> bool:
    """Whether what is gathered, or a part of it, has users beside the whole tensor at the end of the chain."""
    return not {user for node in chain[1:-1] for user in node.users} <= set(chain)


def _gathered(gather: Node, ranks: int) -> tuple[list[Node], int]:
    """The nodes from an all_gather to the whole tensor, and the dimension along which it is gathered."""
    waits = [user for user in gather.users if user.target is WAIT]
    if len(waits) != 1 or len(gather.users) != 1:
        raise Left("its result is taken before it has been waited for")
    wait = waits[0]
    splits = [user for user in wait.users if user.target in SPLITS]
    parts = [n for user in wait.users for n in (user.users if user in splits else [user])]
    cats = {cat for part in parts for cat in part.users if cat.target is aten.cat.default}
    wholes = [cat for cat in cats if chunks(arguments(cat)[0], ranks) == (wait, 0)]
    if len(wholes) == 1:
        (cat,) = wholes
        parts, dim = arguments(cat)
        return [gather, wait, *splits, *parts, cat], dim % value(cat).dim()
    if len(wholes) > 1 and not _products(wait)[1]:
        raise Left(SEVERAL)
    return [gather, wait], 0


def _products(whole: Node) -> tuple[list[Node], list[Product]]:
    """The reshapes of a tensor that keep its rows, and the products whose left side they are."""
    views: list[Node] = []
    products: list[Product] = []
    look = [whole]
    while look:
        node = look.pop()
        for user in node.users:
            if keeps_rows(user):
                views.append(user)
                look.append(user)
            elif (product := product_of(user)) and product.left is node and product.right is not node:
                products.append(product)
    return views, products


def _check_dtypes(product: Product, x: torch.Tensor) -> None:
    dtypes = {x.dtype, *(value(n).dtype for n in (product.node, product.right, product.bias) if n is not None)}
    if len(dtypes) > 1 or x.dtype not in DTYPES:
        raise Left(f"the product {product.node} has dtypes {sorted(map(str, dtypes))}, not one of bfloat16, float16 and float32")


def _needed(product: Product, banned: set[Node], order: dict[Node, int], since: int) -> set[Node]:
    """What comes after ``since`` and must come before, for the weight and the bias of a product to be there."""
    needed: set[Node] = set()
    look = [n for n in (product.right, product.bias) if n is not None]
    while look:
        node = look.pop()
        if node in banned:
            raise Left(f"the other side of the product {product.node} comes from what is gathered")
        if order[node] < since or node in needed:
            continue
        if node.is_impure() or node.target in (GATHER, SCATTER, with_effects):
            raise Left(f"the other side of the product {product.node} waits for {node}, which cannot come before the gather")
        needed.add(node)
        look += node.all_input_nodes
    return needed


# -- products -> reduce_scatter ----------------------------------------------------------------------------------------------


def replace_scatter(rewrite: Rewrite, scatter: Node) -> int:
    """gemm_rs for a reduce_scatter and the product, or the sum of products, that it sums; how many products. Raises Left."""
    (source, operation, ranks), group = in_group(scatter)
    waits = [user for user in scatter.users if user.target is WAIT]
    if len(waits) != 1:
        raise Left("its result is never waited for")
    cat, dim, between = source, 0, []
    if source.target is aten.cat.default and arguments(source)[1] == 0:
        found = chunks(arguments(source)[0], ranks)
        if found is not None:
            source, dim = found
            between = [cat, *cat.all_input_nodes, *(n.args[0] for n in cat.all_input_nodes if n.target is operator.getitem)]  # type: ignore
    for node in between:
        if not set(node.users) <= {scatter, *between}:
            raise Left(f"{node} is not only scattered, but used elsewhere, too")
    products: list[Product] = []
    path = _summed(source, {scatter, *between}, products)
    if operation not in ("sum", "avg"):
        raise Left(f"it reduces by {operation!r}, not by 'sum' or 'avg'")
    if dim == value(source).dim() - 1:
        raise Left("it scatters the features")
    for product in products:
        _check_dtypes(product, value(source))
    if operation == "avg" and value(source).dtype == torch.float16:
        raise Left("it is a mean in torch.float16, in which the sum behind it may overflow")
    order = {node: i for i, node in enumerate(rewrite.graph.nodes)}
    check_writes(min((p.node for p in products), key=order.__getitem__), scatter)
    with rewrite.graph.inserting_before(scatter):
        left = _joined(rewrite, [p.left for p in products], 1)
        right = _joined(rewrite, [p.right for p in products], 0)
        x = rewrite.rows(rewrite.spread(left, [*shape(source)[:-1], shape(left)[1]], dim, ranks))
        bias, k = _bias(rewrite, products, group), rewrite.of_all([shape(left)[1]], ranks)
        y = rewrite.call(library.gemm_rs_op, x, rewrite.weight(right), bias, group, k)
        if operation == "avg":
            y = rewrite.add(aten.div.Tensor, y, ranks)
        y = rewrite.reshaped(y, shape(waits[0]))
    waits[0].replace_all_uses_with(y)
    scatter.replace_all_uses_with(y, delete_user_cb=lambda user: user is not waits[0])
    rewrite.erase([waits[0], scatter, *dict.fromkeys(between), *path])
    return len(products)


def _summed(node: Node, users: set[Node], products: list[Product]) -> list[Node]:
    """Collects the products of which ``node`` is the sum; the nodes from it down to them. Only ``users`` may take it."""
    product = product_of(node)
    if product is None and not keeps_rows(node):
        added = node.target is aten.add.Tensor and not node.kwargs and all(isinstance(n, Node) for n in node.args)
        if not added or not all(same(shape(n), shape(node)) for n in node.args):  # type: ignore[arg-type]
            raise Left(f"what it scatters, {node}, {_unlike_a_sum(node)}")
    if not set(node.users) <= users:
        raise Left(f"{node} is not only scattered, but used elsewhere, too")
    if product is not None:
        products.append(product)
        return [node]
    path = [node]
    inputs = node.args[:1] if keeps_rows(node) else node.args
    if len(set(inputs)) < len(inputs):
        raise Left(f"{node} adds one product to itself")
    for n in inputs:
        path += _summed(n, {node}, products)  # type: ignore[arg-type]
    return path


def _unlike_a_sum(node: Node) -> str:
    """Why a node is no product, and no sum of products."""
    if node.target is CAST and product_of(node.args[0]) is not None:  # type: ignore[arg-type]
        return RECAST
    if node.target is aten.cat.default and any(
        getattr(part, "target", None) is aten.constant_pad_nd.default for part in arguments(node)[0]
    ):
        return PADDED
    return OTHERWISE if unlike_ours(node) else "is neither a product nor a sum of products"


def _bias(rewrite: Rewrite, products: list[Product], group: str) -> Node | None:
    """The biases of all ranks, summed up: the graph adds each rank's, which may be another one, and gemm_rs one that all have.

    Each rank gathers them: it is a row a rank, and a call that, unlike an all_reduce of torch, keeps its place among the others.
    """
    biases = [p.bias for p in products if p.bias is not None]
    if not biases:
        return None
    own = rewrite.rows(_joined(rewrite, [rewrite.reshaped(b, [1, *shape(b)]) for b in biases], 0))
    gathered = rewrite.add(operator.getitem, rewrite.call(library.ag_gemm_op, own, [], [], library.EVEN, True, group, None), 0)
    return rewrite.add(CAST, rewrite.add(aten.sum.dim_IntList, gathered, [0], dtype=torch.float32), value(own).dtype)


def _joined(rewrite: Rewrite, parts: list[Node], dim: int) -> Node:
    return parts[0] if len(parts) == 1 else rewrite.add(aten.cat.default, parts, dim)

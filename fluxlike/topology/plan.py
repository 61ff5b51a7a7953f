"""Trees over which data is reduced and broadcast, planned for the links of a machine."""

import numbers
import operator
from collections.abc import Iterable, Sequence
from typing import Any

from ..runtime import env
from . import minmax, mxnet
from .canonical import canonical
from .cheapest import Edge
from .graph import Graph
from .matrix import LinkMatrix
from .tree import Tree

OBJECTIVES = ("minmax", "mxnet")
#: Searches are exponential in the number of GPUs. Where all pairs are alike, there is nothing to search.
MOST = 16


def plan_trees(
    matrix: LinkMatrix,
    k: int | None = None,
    objective: str = "minmax",
    link_usage_penalty: float = 0.7,
    backtrack: bool = False,
    seed: int = 0,
    *,
    roots: Sequence[int] | None = None,
) -> list[Tree]:
    """k trees, each to carry a k-th part of the data; by default one for each GPU.

    Tree i is rooted at GPU i mod n, or at ``roots[i]``.

    Every tree spans all GPUs, uses existing links only, of the fastest kinds that connect all GPUs, and has as few levels as a tree
    with its root can have: ⌈log2 n⌉ where the links allow that.

    objective: "minmax": then the highest load of a link or port over all trees is as low as can be found, then their weight as
    large. "mxnet": the method of MXNet's trees; with ``backtrack`` each tree has the largest weight, and the weight of a link is
    multiplied by ``link_usage_penalty`` for each tree that uses it.

    The same arguments give the same trees; GPUs numbered in another way give trees of the same cost.
    ValueError for links that do not connect all GPUs, for more than 16 GPUs that are not on one switch, and for bad arguments.
    """
    if not isinstance(matrix, LinkMatrix):
        raise ValueError(f"matrix is a {type(matrix).__name__}; make a LinkMatrix of it, such as by LinkMatrix.from_array")
    if objective not in OBJECTIVES:
        raise ValueError(f"objective={objective!r} is none of {', '.join(OBJECTIVES)}")
    penalty: Any = link_usage_penalty
    if not (isinstance(penalty, numbers.Real) and 0 < float(penalty) <= 1):
        raise ValueError(f"link_usage_penalty={link_usage_penalty!r} is not above 0 and at most 1; leave it out for 0.7, MXNet's")
    whole = _whole(seed)
    if whole is None:  # of None, random numbers would be others each time
        raise ValueError(f"seed={seed!r} is not a whole number; leave it out, or name one")
    at = _roots(len(matrix), k, roots)
    graph = Graph(matrix)
    n = graph.n
    even = objective == "minmax" and len({at.count(root) for root in range(n)}) == 1
    if graph.is_switch() and (even or n > MOST):
        return [_made(graph, root, turned(n, root)) for root in at]
    if n > MOST:
        raise ValueError(
            f"the matrix has {n} GPUs, and plans are made for up to {MOST}, or for more on one switch, where all pairs and all "
            "ports have one rate; plan for parts of the machine"
        )
    # Plans are made for one numbering of all, so that another numbering of the same machine costs the same.
    order = canonical(_colours(graph, at), _labels(graph))
    place = {v: i for i, v in enumerate(order)}
    sorted_roots = sorted(place[root] for root in at)
    mine = Graph(matrix.relabelled(order))
    if objective == "minmax":
        plans = minmax.plan(mine, sorted_roots, whole)
    else:
        plans = mxnet.plan(mine, sorted_roots, link_usage_penalty, backtrack, whole)
    made: dict[int, list[Tree]] = {}
    for root, edges in zip(sorted_roots, plans, strict=True):
        tree = _made(graph, order[root], [(order[a], order[b], level) for a, b, level in edges])
        made.setdefault(tree.root, []).append(tree)
    return [made[root].pop(0) for root in at]


def trees_for(matrix: LinkMatrix, elements: int, **options: object) -> list[Tree]:
    """The trees for an array: one rooted at GPU 0 up to FLUXLIKE_TREE_ARRAY_BOUND elements, beyond one for each GPU and slice.

    ``options`` are `plan_trees`', but for its k.
    """
    if elements < 1:
        raise ValueError(f"elements={elements} is below 1")
    large = elements > env.tree_array_bound()
    return plan_trees(matrix, len(matrix) if large else 1, **options)  # type: ignore[arg-type]


def turned(n: int, root: int) -> list[Edge]:
    """A binomial tree turned to its root: over all roots each GPU has the same number of edges, 2 (n - 1)."""
    edges = []
    for level in range(1, (n - 1).bit_length() + 1):
        informed = 1 << (level - 1)
        edges += [((i + root) % n, (i + informed + root) % n, level) for i in range(min(informed, n - informed))]
    return edges


def _roots(n: int, k: int | None, roots: Sequence[int] | None) -> list[int]:
    if roots is None:
        count = n if k is None else _whole(k)
        if count is None or count < 1:
            raise ValueError(f"k={k!r} is not a whole number of trees, 1 or more")
        return [i % n for i in range(count)]
    given = list(roots) if isinstance(roots, Iterable) else [roots]
    at = [root for root in map(_whole, given) if root is not None and 0 <= root < n]
    if not at or len(at) < len(given):
        raise ValueError(f"roots={given} must name GPUs, from 0 to {n - 1}, one at least")
    if k is not None and k != len(at):
        raise ValueError(f"k={k} trees cannot have the {len(at)} roots {at}; leave out k")
    return at


def _whole(value: object) -> int | None:
    """A whole number of any kind, as numpy's, as one of Python's."""
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _colours(graph: Graph, roots: Sequence[int]) -> list[tuple[int, float]]:
    return [(roots.count(v), graph.port_cost[v]) for v in range(graph.n)]


def _labels(graph: Graph) -> list[list[tuple[float, float]]]:
    return [[(graph.cost[i][j], graph.weight[i][j]) for j in range(graph.n)] for i in range(graph.n)]


def _made(graph: Graph, root: int, edges: Sequence[Edge]) -> Tree:
    by_level = sorted(edges, key=lambda edge: (edge[2], edge[0]))
    pairs = [(parent, child) for parent, child, _ in by_level]
    return Tree(root, pairs, [level for *_, level in by_level], sum(graph.weight[a][b] for a, b in pairs))

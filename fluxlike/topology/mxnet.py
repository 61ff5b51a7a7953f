"""MXNet's planner: a balanced binary tree of large weight for each root, one after the other.

Clusters are halved by Kernighan and Lin's heuristic. The root links to the GPU of the other half to which it has the best link,
and each half goes on with its own root. A link that a tree uses counts less for the next. Where a half has no link to the other's
root, and with ``backtrack`` always, the heaviest tree of least depth is searched, exactly up to 8 GPUs.

What differs from the original: that search knows all trees, where the original's knew complete binary ones, and ended the process
if there was none; a cluster of one or two keeps its root while others are still halved, so odd numbers of GPUs need no
search; the random numbers are Python's.
"""

import random
from collections.abc import Sequence

from .cheapest import Cheapest, Edge
from .graph import Graph

Weights = list[list[float]]


def plan(graph: Graph, roots: Sequence[int], penalty: float, backtrack: bool, seed: int) -> list[list[Edge]]:
    """The edges of a tree for each root."""
    weight = [row[:] for row in graph.weight]
    cheapest = Cheapest(graph, beam=64 if graph.n <= 8 else 8)
    plans = []
    for root in roots:
        edges = None if backtrack else clustered(weight, root, random.Random(seed))
        if edges is None:
            edges = cheapest.tree(root, graph.depth(root), [[-w for w in row] for row in weight])
            assert edges is not None  # no price is infinite
        for parent, child, _ in edges:
            weight[parent][child] *= penalty
            weight[child][parent] = weight[parent][child]
        plans.append(edges)
    return plans


def clustered(weight: Weights, root: int, rng: random.Random) -> list[Edge] | None:
    """A tree of ⌈log2 n⌉ levels by halving clusters, or None where a half has no link to the root of the other."""
    edges: list[Edge] = []
    clusters = [(list(range(len(weight))), root)]
    level = 0
    while any(len(members) > 1 for members, _ in clusters):
        level += 1
        finer: list[tuple[list[int], int]] = []
        for members, parent in clusters:
            if len(members) == 1:
                finer.append((members, parent))
                continue
            near, far = halves(weight, members, rng)
            if parent in far:
                near, far = far, near
            most = max(weight[parent][v] for v in far)
            if most <= 0:
                return None
            child = rng.choice([v for v in far if weight[parent][v] == most])
            edges.append((parent, child, level))
            finer += [(near, parent), (far, child)]
        clusters = finer
    return edges


def halves(weight: Weights, members: Sequence[int], rng: random.Random) -> tuple[list[int], list[int]]:
    """A cluster in two parts with little weight between them: Kernighan and Lin's exchanges, from a random start."""
    shuffled = list(members)
    rng.shuffle(shuffled)
    side = {v: 1 if i < len(members) // 2 else -1 for i, v in enumerate(shuffled)}
    for _ in range(len(members) + 1):
        gain, exchanged = _exchanges(weight, dict(side))
        if gain <= 0:
            break
        for a, b in exchanged:
            side[a], side[b] = side[b], side[a]
    return [v for v in members if side[v] > 0], [v for v in members if side[v] < 0]


def _exchanges(weight: Weights, side: dict[int, int]) -> tuple[float, list[tuple[int, int]]]:
    """The exchanges that gain most together, each the best of those that are left; each GPU moves once."""
    best: tuple[float, list[tuple[int, int]]] = (0.0, [])
    total, made = 0.0, list[tuple[int, int]]()
    free = set(side)
    while free:
        outward = {v: -side[v] * sum(weight[v][u] * side[u] for u in side) for v in free}
        pairs = [(a, b) for a in sorted(free) for b in sorted(free) if side[a] > 0 > side[b]]
        gains = [outward[a] + outward[b] - 2 * weight[a][b] for a, b in pairs]
        if not pairs or max(gains) <= 0:
            break
        a, b = pairs[gains.index(max(gains))]
        total += max(gains)
        made.append((a, b))
        side[a], side[b] = side[b], side[a]
        free -= {a, b}
        if total > best[0]:
            best = (total, made[:])
    return best

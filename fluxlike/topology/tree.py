"""What a plan is: trees, and what they cost."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from .graph import Graph, least_load
from .matrix import LinkMatrix


@dataclass(frozen=True)
class Tree:
    """A spanning tree with an order. A level is a step in which each GPU takes part in one transfer at most.

    ``edges``: (parent, child), by level, in the order of a broadcast. ``levels``: the level of each edge, from 1. A broadcast goes
    through the levels upwards and sends from parent to child; a reduction goes downwards and sends from child to parent.
    ``weight``: the sum of the edges' weights, in MXNet's codes: 2 for one link, 3 for two.
    """

    root: int
    edges: list[tuple[int, int]]
    levels: list[int]
    weight: float = 0.0

    @property
    def depth(self) -> int:
        """The number of levels."""
        return max(self.levels, default=0)

    @cached_property
    def height(self) -> int:
        """The most hops between the root and a GPU."""
        hops = {self.root: 0}
        for parent, child in self.edges:
            hops[child] = hops[parent] + 1
        return max(hops.values())

    @property
    def steps(self) -> list[list[tuple[int, int]]]:
        """The edges of each level, in the order of a broadcast."""
        steps: list[list[tuple[int, int]]] = [[] for _ in range(self.depth)]
        for edge, level in zip(self.edges, self.levels, strict=True):
            steps[level - 1].append(edge)
        return steps


@dataclass(frozen=True)
class Cost:
    """What trees cost that carry a slice of the same size each.

    ``load``: uses of the link or port that is used most, over its capacity, where a link of the matrix' unit has capacity 1; a use
    is one slice in each direction. ``bottlenecks``: where that is. ``least``: no trees at these roots have a lower load than this,
    so a plan with ``load == least`` is optimal; it need not be reachable. ``gb_s``: GB of the array in a second of a pipelined
    all-reduce, on paper. ``ports``: edges at each GPU.
    """

    depth: int
    load: float
    least: float
    weight: float
    gb_s: float
    bottlenecks: list[str] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)

    @property
    def optimal(self) -> bool:
        return self.load <= self.least * (1 + 1e-9)


def measure(matrix: LinkMatrix, trees: Sequence[Tree]) -> Cost:
    """What ``trees`` cost on ``matrix``. ValueError if they use a link that a plan for it may not."""
    graph, trees = Graph(matrix), tuple(trees)
    links: Counter[tuple[int, int]] = Counter()
    ports: Counter[int] = Counter()
    for tree in trees:
        for parent, child in tree.edges:
            if not (parent < graph.n and graph.adjacent[parent] >> child & 1):
                raise ValueError(f"the tree at {tree.root} has the edge {parent}-{child}, where the matrix has no usable link")
            links[min(parent, child), max(parent, child)] += 1
            ports.update((parent, child))
    loads = {f"link {i}-{j}": uses * graph.cost[i][j] for (i, j), uses in links.items()}
    loads |= {f"port {i}": uses * graph.port_cost[i] for i, uses in ports.items()}
    load = max(loads.values(), default=0.0)
    least = least_load(graph, [tree.root for tree in trees]) if trees else 0.0
    return Cost(
        depth=max((tree.depth for tree in trees), default=0),
        load=load,
        least=least,
        weight=sum(tree.weight for tree in trees),
        gb_s=len(trees) * graph.unit / load if load else 0.0,
        bottlenecks=[name for name, one in loads.items() if one > load * (1 - 1e-9)],
        ports=[ports[i] for i in range(graph.n)],
    )

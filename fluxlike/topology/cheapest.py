"""The tree with the lowest sum of prices among those of a given depth."""

from collections.abc import Sequence

from .graph import Graph, bits

#: (parent, child, level)
Edge = tuple[int, int, int]
#: Edges so far, last one first.
Chain = tuple[Edge, "Chain"] | None
Way = tuple[float, Chain]
Prices = Sequence[Sequence[float]]
INFINITE = float("inf")


class Cheapest:
    """Finds trees by informed sets: after each level, for each set of GPUs that know, the cheapest way to get there.

    Exact while no more than ``beam`` sets are kept a level, as up to 8 GPUs with a beam of 128. ``work`` counts steps of about the
    same length, so that effort can be limited without a clock.
    """

    def __init__(self, graph: Graph, beam: int) -> None:
        self.graph, self.beam, self.work = graph, beam, 0
        self._members: dict[int, tuple[int, ...]] = {}

    def tree(self, root: int, depth: int, price: Prices) -> list[Edge] | None:
        """A tree of at most ``depth`` levels, its edges by level; None if infinite prices leave none.

        There is one for finite prices if ``graph.can(1 << root, depth)``.
        """
        graph = self.graph
        # What a GPU must cost at least is taken off, so that ways to large and to small sets compare.
        least = [min((price[v][u] for u in bits(graph.adjacent[v])), default=0.0) for v in range(graph.n)]
        if INFINITE in least:
            return None
        extra = [[p - low for p, low in zip(row, least, strict=True)] for row in price]
        frontier: dict[int, Way] = {1 << root: (0.0, None)}
        for level in range(1, depth + 1):
            found: dict[int, Way] = {}
            for informed, way in frontier.items():
                for new, longer in self._tell(informed, level, depth - level, way, extra).items():
                    state = informed | new
                    if state not in found or longer[0] < found[state][0]:
                        found[state] = longer
            frontier = {}
            for state in sorted(found, key=lambda state: (found[state][0], state)):
                if graph.can(state, depth - level):
                    frontier[state] = found[state]
                    if len(frontier) == self.beam:
                        break
        self.work += graph.n**2
        return _unrolled(frontier[graph.full][1]) if graph.full in frontier else None

    def _tell(self, informed: int, level: int, left: int, way: Way, price: Prices) -> dict[int, Way]:
        """For every set that can be told in this level, the cheapest way. Those from which no tree can be finished are left out."""
        graph, members = self.graph, self._members
        needed = -(-graph.n >> left) - informed.bit_count()
        tellers = [i for i in bits(informed) if graph.adjacent[i] & ~informed]
        ways = {0: way}
        for position, i in enumerate(tellers):
            missing = needed - (len(tellers) - position - 1)
            wider = {new: one for new, one in ways.items() if new.bit_count() >= missing}
            prices, targets = price[i], graph.adjacent[i] & ~informed
            for new, (so_far, path) in ways.items():
                if new.bit_count() + 1 < missing:
                    continue
                open_to = targets & ~new
                if open_to not in members:
                    members[open_to] = tuple(bits(open_to))
                self.work += open_to.bit_count() + 1
                for v in members[open_to]:
                    more = so_far + prices[v]
                    told = new | 1 << v
                    known = wider.get(told)
                    if more < (known[0] if known else INFINITE):
                        wider[told] = (more, ((i, v, level), path))
            ways = wider
        return {new: one for new, one in ways.items() if new.bit_count() >= needed}


def _unrolled(chain: Chain) -> list[Edge]:
    edges: list[Edge] = []
    while chain is not None:
        edge, chain = chain
        edges.append(edge)
    return edges[::-1]

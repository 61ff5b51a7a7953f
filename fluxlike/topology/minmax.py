"""Trees of least depth whose busiest link or port is used as little as can be found.

Negotiated congestion, as routers of circuits do it: one tree after the other is taken out and put back as the cheapest tree
there is, where the price of an edge is what it adds to the sum of (load / target)^2 over links and ports. After each round those
above the target get dearer for good, so that trees which can do without them leave. It ends at a load that is
provably least, or when its effort is spent. Then weight is gained where the load allows it.
"""

import random
from collections.abc import Sequence

from .cheapest import INFINITE, Cheapest, Edge
from .graph import Graph, bits, least_load

#: Of the weight, in a price: enough to choose between edges of the same load.
TASTE = 1e-3
#: Steps of `Cheapest`, each about a microsecond, that a plan may take: up to 8 GPUs, and beyond. A first round is made anyway.
EFFORT_8, EFFORT_16 = 150_000, 1_000_000
#: Rounds without a better plan after which none is expected; p3.16xlarge took up to 50.
PATIENCE = 100
BEAM_8, BEAM_16 = 128, 6
EVEN = 1e-9


class Loads:
    """How often each link and port is used."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.link = [[0] * graph.n for _ in range(graph.n)]
        self.port = [0] * graph.n
        self.link_blame = [[1.0] * graph.n for _ in range(graph.n)]
        self.port_blame = [1.0] * graph.n

    def add(self, edges: Sequence[Edge], times: int = 1) -> None:
        for a, b, _ in edges:
            self.link[a][b] += times
            self.link[b][a] += times
            self.port[a] += times
            self.port[b] += times

    @property
    def most(self) -> float:
        graph = self.graph
        links = max((self.link[i][j] * graph.cost[i][j] for i, j in graph.links), default=0.0)
        return max(links, *(uses * cost for uses, cost in zip(self.port, graph.port_cost, strict=True)))

    def prices(self, target: float) -> list[list[float]]:
        """What one more use of each link costs."""
        graph, square = self.graph, target * target

        def dearer(uses: int, cost: float, blame: float) -> float:
            return (2 * uses + 1) * cost * cost / square * blame

        port = list(map(dearer, self.port, graph.port_cost, self.port_blame))
        price = [[INFINITE] * graph.n for _ in range(graph.n)]
        for i, j in graph.links:
            link = dearer(self.link[i][j], graph.cost[i][j], self.link_blame[i][j])
            price[i][j] = price[j][i] = link + port[i] + port[j] - TASTE * graph.weight[i][j]
        return price

    def blame(self, target: float) -> None:
        """Make what is above the target dearer."""
        graph = self.graph
        for i, j in graph.links:
            self.link_blame[i][j] += max(0.0, self.link[i][j] * graph.cost[i][j] / target - 1)
        for i in range(graph.n):
            self.port_blame[i] += max(0.0, self.port[i] * graph.port_cost[i] / target - 1)


class Search:
    def __init__(self, graph: Graph, roots: Sequence[int], seed: int) -> None:
        self.graph, self.roots = graph, roots
        self.rng = random.Random(seed)
        depth = {root: graph.depth(root) for root in sorted(set(roots))}
        self.depths = [depth[root] for root in roots]
        small = graph.n <= 8
        self.cheapest = Cheapest(graph, BEAM_8 if small else BEAM_16)
        self.effort = EFFORT_8 if small else EFFORT_16
        self.least = least_load(graph, roots)
        self.loads = Loads(graph)
        self.plans: list[list[Edge]] = [[] for _ in roots]
        self.best: tuple[float, float, list[list[Edge]]] = (INFINITE, 0.0, [])

    def run(self) -> list[list[Edge]]:
        if self.graph.n == 1:
            return self.plans
        waited, before = 0, INFINITE
        while self.best[0] > self.least * (1 + EVEN):
            waited, before = (waited + 1 if self.best[0] == before else 0), self.best[0]
            if self.best[2] and (waited >= PATIENCE or self.cheapest.work >= self.effort):
                break
            for i in self.rng.sample(range(len(self.roots)), len(self.roots)):
                self.put(i)
            self.loads.blame(self.least)
        self.gain_weight()
        return self.best[2]

    def put(self, i: int) -> None:
        """Put tree i where it costs least beside the others."""
        self.loads.add(self.plans[i], -1)
        new = self.cheapest.tree(self.roots[i], self.depths[i], self.loads.prices(self.least))
        assert new is not None  # Graph.depth says that there is one
        self.plans[i] = new
        self.loads.add(new)
        self.remember()

    def remember(self) -> None:
        """Keep the trees if they are the best so far."""
        if all(self.plans):
            key = (self.loads.most, -sum(map(self.weight, self.plans)))
            if key[0] < self.best[0] * (1 - EVEN) or (key[0] <= self.best[0] * (1 + EVEN) and key[1] < self.best[1]):
                self.best = (*key, self.plans[:])

    def weight(self, edges: Sequence[Edge]) -> float:
        return sum(self.graph.weight[a][b] for a, b, _ in edges)

    def gain_weight(self) -> None:
        """Replace trees by heavier ones as long as the load stays."""
        graph = self.graph
        if len({graph.weight[i][j] for i, j in graph.links}) < 2:
            return
        self.plans, self.loads = self.best[2][:], Loads(graph)
        for edges in self.plans:
            self.loads.add(edges)
        allowed = self.best[0] * (1 + EVEN)
        gained, enough = True, self.cheapest.work + self.effort
        while gained and self.cheapest.work < enough:
            gained = False
            for i in range(len(self.roots)):
                old = self.plans[i]
                self.loads.add(old, -1)
                price = [[INFINITE] * graph.n for _ in range(graph.n)]
                for a in range(graph.n):
                    for b in bits(graph.adjacent[a]):
                        if (self.loads.link[a][b] + 1) * graph.cost[a][b] <= allowed:
                            price[a][b] = -graph.weight[a][b]
                new = self.cheapest.tree(self.roots[i], self.depths[i], price)
                if new is None or self.weight(new) <= self.weight(old) * (1 + EVEN):
                    new = old
                self.loads.add(new)
                if self.loads.most > allowed:
                    self.loads.add(new, -1)
                    self.loads.add(old)
                    new = old
                self.plans[i] = new
                gained |= new is not old
                self.remember()


def plan(graph: Graph, roots: Sequence[int], seed: int) -> list[list[Edge]]:
    """The edges of a tree for each root."""
    return Search(graph, roots, seed).run()

"""What the planner sees of a LinkMatrix: the links that a plan may use, what a use of each costs, how deep trees must be."""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property

from .matrix import KINDS, LinkMatrix


def bits(mask: int) -> Iterator[int]:
    """The numbers in a set that is an int."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class Graph:
    """The links of the fastest kinds that connect all GPUs; ValueError if no kinds do.

    ``adjacent``: for each GPU the set of those that it has a link to, as bits. ``cost[i][j]`` and ``port_cost[i]``: the load that
    one use brings, 1 for a link of ``unit`` GB/s. ``weight[i][j]``: MXNet's code, 2 for such a link, 3 for twice as much.
    Paths through the host share it, so each counts as the n-th part, in bandwidth and in weight.
    """

    def __init__(self, matrix: LinkMatrix) -> None:
        n = self.n = len(matrix)
        self.full = (1 << n) - 1
        self.kinds: tuple[str, ...] = ()
        self.adjacent = [0] * n
        for kind in KINDS:
            if self.reach(1, n) == self.full:
                break
            self.kinds += (kind,)
            for i, row in enumerate(matrix.kind):
                self.adjacent[i] |= sum(1 << j for j, k in enumerate(row) if k == kind)
        if self.reach(1, n) != self.full:
            raise ValueError(_parted(matrix, self))
        rate = [[matrix.bandwidth[i][j] if self.adjacent[i] >> j & 1 else 0.0 for j in range(n)] for i in range(n)]
        self.unit = matrix.unit
        self.cost = [[0.0] * n for _ in range(n)]
        self.weight = [[0.0] * n for _ in range(n)]
        for i in range(n):
            for j in bits(self.adjacent[i]):
                shared = matrix.kind[i][j] == "host"
                self.cost[i][j] = self.unit / rate[i][j] * (n if shared else 1)
                self.weight[i][j] = 1 / n if shared else 1 + rate[i][j] / self.unit
        self.port_cost = [self.unit / port if port else 0.0 for port in matrix.port]
        self._memo: dict[tuple[int, int], bool] = {}
        self._twins = [mask for mask in self._twin_classes() if mask.bit_count() > 1]

    @property
    def links(self) -> list[tuple[int, int]]:
        return [(i, j) for i in range(self.n) for j in bits(self.adjacent[i]) if i < j]

    @cached_property
    def shallowest(self) -> int:
        """⌈log2 n⌉: no tree has fewer levels."""
        return (self.n - 1).bit_length()

    def is_switch(self) -> bool:
        """All GPUs are alike, and their ports bind, not the pairs."""
        flat = {*(self.cost[i][j] for i in range(self.n) for j in range(self.n) if i != j), *self.port_cost}
        return self.n > 1 and all(mask.bit_count() == self.n - 1 for mask in self.adjacent) and len(flat) == 1

    def reach(self, informed: int, steps: int) -> int:
        """The GPUs at most ``steps`` links away from those in ``informed``."""
        for _ in range(steps):
            wider = informed
            for i in bits(informed):
                wider |= self.adjacent[i]
            if wider == informed:
                break
            informed = wider
        return informed

    # how deep

    def depth(self, root: int) -> int:
        """The least number of levels in which all GPUs can hear of what ``root`` knows, each in one transfer a level."""
        levels = max(self.shallowest, self._serial(root))
        while not self.can(1 << root, levels):
            levels += 1
        return levels

    def _serial(self, root: int) -> int:
        """A bound from below: the farthest GPU is so far away, and one that alone leads to m parts must tell them one by one."""
        bound, ball, distance = 0, 0, 0
        border = 1 << root
        while border:
            ball |= border
            bound = max(bound, *(distance + self._parts_behind(v, root) for v in bits(border)))
            border, distance = self.reach(ball, 1) & ~ball, distance + 1
        return bound

    def _parts_behind(self, v: int, root: int) -> int:
        left, parts = self.full & ~(1 << v), 0
        while left:
            part, wider = 0, left & -left
            while wider != part:
                part = wider
                wider = self.reach(part, 1) & ~(1 << v)
            parts += not part >> root & 1
            left &= ~part
        return parts

    def can(self, informed: int, levels: int) -> bool:
        """Whether the others can be told in ``levels`` levels when those in ``informed`` know. Exact; remembers its answers."""
        informed = self._smallest(informed, self.full)
        if informed == self.full:
            return True
        if informed.bit_count() << levels < self.n:
            return False
        key = (informed, levels)
        if key not in self._memo:
            self._memo[key] = self.reach(informed, levels) == self.full and self._try(informed, levels)
        return self._memo[key]

    def _try(self, informed: int, levels: int) -> bool:
        # Telling more never hurts, and all sets that can be told in one level and not enlarged have one size.
        first = self._most(informed)
        size = first.bit_count()
        if levels == 1 or (informed.bit_count() + size) << (levels - 1) < self.n:
            return informed | first == self.full
        if self.can(informed | first, levels - 1):
            return True
        rest = sorted(self._all_largest(informed, size), key=lambda new: (-self.reach(informed | new, 1).bit_count(), new))
        return any(self.can(informed | new, levels - 1) for new in rest)

    def _most(self, informed: int) -> int:
        """A largest set that can be told in one level: a matching by augmenting paths, those with most neighbours to tell first."""
        teller: dict[int, int] = {}

        def place(i: int, seen: set[int]) -> bool:
            for v in sorted(bits(self.adjacent[i] & ~informed), key=lambda v: -(self.adjacent[v] & ~informed).bit_count()):
                if v not in seen:
                    seen.add(v)
                    if v not in teller or place(teller[v], seen):
                        teller[v] = i
                        return True
            return False

        for i in bits(informed):
            place(i, set())
        return sum(1 << v for v in teller)

    def _all_largest(self, informed: int, size: int) -> set[int]:
        tellers = [i for i in bits(informed) if self.adjacent[i] & ~informed]
        sets = {0}
        for position, i in enumerate(tellers):
            left = len(tellers) - position - 1
            wider = {new for new in sets if new.bit_count() + left >= size}
            for new in sets:
                if new.bit_count() + 1 + left >= size:
                    for v in bits(self.adjacent[i] & ~informed & ~new):
                        wider.add(self._smallest(new | 1 << v, self.full & ~informed))
            sets = wider
        return sets

    def _twin_classes(self) -> list[int]:
        """GPUs that can be exchanged without changing which links there are."""
        classes: dict[tuple[bool, int], int] = {}
        for own in (False, True):
            for i in range(self.n):
                key = (own, self.adjacent[i] | (own << i))
                classes[key] = classes.get(key, 0) | 1 << i
        return list(classes.values())

    def _smallest(self, chosen: int, among: int) -> int:
        """Of the sets that twins make alike, the one with the lowest numbers; only those in ``among`` are exchanged."""
        for twins in self._twins:
            movable = twins & among
            count = (chosen & movable).bit_count()
            if count and count < movable.bit_count():
                chosen &= ~movable
                for _ in range(count):
                    low = movable & -movable
                    chosen |= low
                    movable ^= low
        return chosen


def _parted(matrix: LinkMatrix, graph: Graph) -> str:
    part = sorted(bits(graph.reach(1, graph.n)))
    rest = sorted(set(range(graph.n)) - set(part))
    named = f"{matrix.name}: " if matrix.name else ""
    return f"{named}no links join GPUs {part} with GPUs {rest}; a tree needs a connected matrix, so add the paths through the host"


def least_load(graph: Graph, roots: Sequence[int]) -> float:
    """A load that no trees at these roots go below: each has n - 1 edges and crosses every cut, and each link is used a whole
    number of times, at most once a tree."""
    n, k = graph.n, len(roots)
    if n == 1:
        return 0.0

    def uses(load: float, cost: float) -> int:
        return min(k * n, math.floor(load / cost + 1e-9)) if cost else k * n

    def enough(load: float) -> bool:
        link = [[min(k, uses(load, cost)) if cost else 0 for cost in row] for row in graph.cost]
        ports = [uses(load, cost) for cost in graph.port_cost]
        if sum(map(sum, link)) < 2 * k * (n - 1) or sum(ports) < 2 * k * (n - 1) or min(ports) < k:
            return False
        return _smallest_cut(link) >= k

    steps = {use * cost for row in graph.cost for cost in row if cost for use in range(1, k + 1)}
    steps |= {use * cost for cost in graph.port_cost for use in range(k, k * (n - 1) + 1)}
    loads = sorted(steps)
    low, high = 0, len(loads) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(loads[middle]) else (middle + 1, high)
    return loads[low]


def _smallest_cut(capacity: list[list[int]]) -> int:
    """Of all ways to part the vertices in two, the least capacity between the parts: Stoer and Wagner's method."""
    merged = [row[:] for row in capacity]
    left = list(range(len(merged)))
    least = sum(map(sum, merged))
    while len(left) > 1:
        towards = {v: merged[left[0]][v] for v in left[1:]}
        last, before = left[0], left[0]
        while towards:
            before, last = last, max(towards, key=lambda v: towards[v])
            cut = towards.pop(last)
            for v in towards:
                towards[v] += merged[last][v]
        least = min(least, cut)
        for v in left:
            merged[before][v] += merged[last][v]
            merged[v][before] = merged[before][v]
        left.remove(last)
    return least

"""One numbering for all numberings of a machine, so that a plan costs the same however the GPUs are numbered."""

from collections.abc import Hashable, Sequence
from typing import Any

Labels = Sequence[Sequence[Any]]
#: Numberings that are looked at, at most. Machines of up to 16 GPUs that are as regular as any need some dozens.
LIMIT = 4000


def canonical(colours: Sequence[Hashable], labels: Labels) -> list[int]:
    """An order of the vertices of a complete graph with labels on vertices and edges, the same for relabelled graphs but for
    vertices that can be exchanged without a difference.

    Refinement of colours, and where it ends a choice of one vertex, all choices tried but those that known symmetries make alike.
    Labels and colours must be sortable.
    """
    search = _Search(labels)
    search.descend(_refine(_ranks(colours), labels), [])
    return search.best


def _ranks(keys: Sequence[Any]) -> list[int]:
    rank = {key: i for i, key in enumerate(sorted(set(keys)))}
    return [rank[key] for key in keys]


def _refine(colour: list[int], labels: Labels) -> list[int]:
    """Vertices that see different colours over different labels get different colours, until nothing changes."""
    n = len(colour)
    while True:
        seen = [(colour[v], sorted((labels[v][u], colour[u]) for u in range(n) if u != v)) for v in range(n)]
        keys = [(own, tuple(others)) for own, others in seen]
        finer = _ranks(keys)
        if len(set(finer)) == len(set(colour)):
            return finer
        colour = finer


class _Search:
    def __init__(self, labels: Labels) -> None:
        self.labels, self.n = labels, len(labels)
        self.best: list[int] = []
        self.certificate: list[Any] | None = None
        self.path: list[int] = []  # the choices that led to the best
        self.symmetries: list[list[int]] = []
        self.leaves = 0

    def descend(self, colour: list[int], chosen: list[int]) -> int:
        """Search below some choices; returns how many of them hold on, fewer than all when a symmetry was found."""
        cells: dict[int, list[int]] = {}
        for v, c in enumerate(colour):
            cells.setdefault(c, []).append(v)
        open_cells = [cell for _, cell in sorted(cells.items()) if len(cell) > 1]
        if not open_cells:
            return self._leaf([cells[c][0] for c in sorted(cells)], chosen)
        cell = min(open_cells, key=len)
        tried: list[int] = []
        for v in cell[:1] if self._twins(cell) else cell:
            if self.leaves >= LIMIT:
                break
            if not tried or v not in self._orbit(tried, chosen):
                split = [2 * c + (c == colour[v] and u != v) for u, c in enumerate(colour)]
                back = self.descend(_refine(_ranks(split), self.labels), [*chosen, v])
                tried.append(v)
                if back < len(chosen):
                    return back
        return len(chosen)

    def _leaf(self, order: list[int], chosen: list[int]) -> int:
        self.leaves += 1
        found = [self.labels[i][j] for i in order for j in order]
        if self.certificate is None or found < self.certificate:
            self.best, self.certificate, self.path = order, found, chosen
        elif found == self.certificate:
            symmetry = [0] * self.n
            for mine, other in zip(self.best, order, strict=True):
                symmetry[mine] = other
            self.symmetries.append(symmetry)
            # All below the first choice that differs looks like what lies below the best one's.
            return next((i for i, (a, b) in enumerate(zip(self.path, chosen, strict=False)) if a != b), len(chosen))
        return len(chosen)

    def _twins(self, cell: list[int]) -> bool:
        """Any two of the cell can be exchanged and nothing else moves."""
        first, rest = cell[0], cell[1:]
        inside = {self.labels[a][b] for a in cell for b in cell if a != b}
        outside = [u for u in range(self.n) if u not in cell]
        return len(inside) == 1 and all(self.labels[v][u] == self.labels[first][u] for v in rest for u in outside)

    def _orbit(self, start: list[int], chosen: list[int]) -> set[int]:
        """Where the symmetries that leave the choices in place take the start."""
        useful = [s for s in self.symmetries if all(s[v] == v for v in chosen)]
        orbit, todo = set(start), list(start)
        while todo:
            v = todo.pop()
            for s in useful:
                for image in (s[v], s.index(v)):
                    if image not in orbit:
                        orbit.add(image)
                        todo.append(image)
        return orbit

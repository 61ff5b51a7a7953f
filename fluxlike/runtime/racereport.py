"""The words of the race checker: what raced, who, where, and what would have ordered it. All of it from the shared tables."""

from dataclasses import dataclass

from .raceshadow import CLOCK, GRANULE, KIND, PROGRAM, RING, SITE, TID, Shadow

HOST, ENGINE, FIRST_PROGRAM = range(3)  # threads of a rank
READ, STORE, ATOMIC = range(3)
VERBS = ("read", "write", "atomic")
ORDERS = ("relaxed", "acquire", "release", "acq_rel")
SCOPES = ("cta", "gpu", "sys")

#: area, first and last byte within a rank, name
Name = tuple[int, int, int, str]


@dataclass(frozen=True)
class Access:
    tid: int
    program: int
    kind: int
    site: int


class _Words:
    """What the numbers of one report mean."""

    def __init__(self, shadow: Shadow, ranks: list[int], names: list[Name]) -> None:
        self.shadow, self.ranks, self.names = shadow, ranks, names

    def who(self, access: Access) -> str:
        rank, number = self.shadow.rank_of(access.tid), self.shadow.number_of(access.tid)
        actor = {HOST: "the host", ENGINE: "the copy engine"}.get(number, f"program {access.program}")
        return f"{VERBS[access.kind]} by rank {self.ranks[rank]}, {actor}, {self.shadow.site_text(access.site)}"

    def region(self, area: int, byte: int) -> tuple[str, int]:
        """Name and rank of the region of a byte of the area, and the byte where it begins on that rank."""
        rank, first = divmod(byte, self.shadow.areas[area].granules_each * GRANULE)
        for known, start, end, name in reversed(self.names):
            if known == area and start <= first <= end:
                return f"{name} of rank {self.ranks[rank]}", byte - first + start
        return f"{'local memory' if area == 0 else 'the heap'} of rank {self.ranks[rank]}", byte - first

    def hint(self, record: tuple[int, ...], other: int) -> str:
        """The first signal of the first thread after its access that ``other`` could have waited for."""
        given, lost = self.shadow.ring[record[TID]], ""
        if self.shadow.signals[record[TID]] > RING and given[:, 2].min() > record[CLOCK]:
            lost = f"Its next signals are not kept, as more than {RING} followed. "
        later = sorted((row.tolist() for row in given if row[2] >= record[CLOCK]), key=lambda row: row[2])
        mine, their_rank = self.shadow.rank_of(record[TID]), self.shadow.rank_of(other)
        if mine != their_rank:  # another rank cannot see local words
            later = [row for row in later if row[0]]
            theirs = [row for row in later if row[1] // self.shadow.areas[row[0]].granules_each == their_rank]
            later = theirs or later  # waits are for words of the own rank
        if not later:
            return "The first has given no signal since; it would have been ordered by one, and a wait on it."
        area, granule, _, order, site = later[0]
        region, start = self.region(area, granule * GRANULE)
        how, scope = ORDERS[order % 4], SCOPES[order // 4]
        word = f"{region}, byte {granule * GRANULE - start}"
        said = f"{lost}Its next {'known ' if lost else ''}signal was {word} ({how}, {scope}; {self.shadow.site_text(site)})"
        if order % 4 < 2:
            return f"{said}, which publishes nothing: with release it would have been ordered by a wait on that word."
        return f"{said}: the second would have been ordered by a wait (acquire) on that word, at a scope that reaches both."


def text(
    shadow: Shadow, ranks: list[int], names: list[Name], area: int, low: int, high: int, record: tuple[int, ...], second: Access
) -> str:
    """The report of a race at bytes ``low`` to ``high`` of an area: ``record`` came first. The shadow is locked."""
    words = _Words(shadow, ranks, names)
    region, start = words.region(area, low)
    first = Access(record[TID], record[PROGRAM], record[KIND], record[SITE])
    return (
        f"race on {region}, bytes {low - start} to {high - start}\n"
        f"  first:  {words.who(first)}\n"
        f"  second: {words.who(second)}\n"
        f"  Nothing orders the second after the first. {words.hint(record, second.tid)}"
    )

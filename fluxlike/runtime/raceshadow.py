"""The shared memory of the race checker: what every rank must see of every other's accesses. Nothing here judges.

*Cells.* Memory that is checked is divided into granules of 2 bytes, the size of a bfloat16: smaller ones would double the cost,
larger ones would mix neighbouring elements of two tiles. Each granule has a cell of four numbers: the last plain write, the
plain reads and the atomics since then, and the clocks of the signal that begins there. Cells lie in *areas*: one for each segment
of the heap, with the granules of all ranks one after the other, and one for the local buffers of all ranks.

*Single bytes.* Elements of one byte may touch half a granule only. From then on the granules around it, a *chunk* of them, have two
cells each, one for each byte.

*Records.* The first three numbers of a cell lead to records (who, when, where in the source), chained where an access found others
that it does not follow. All granules of one operation share a record, so a cell is small and a judgement is made once for each
distinct record instead of once for each granule; and no reader is ever forgotten in favour of another, as in checkers that keep
only the last. A chain holds a thread at most once. When records run out, those that no cell leads to are used again.

*Signals.* A word that atomics use has vector clocks: one published at system scope, one for each rank at GPU scope; and, at system
scope, those of its last values (`racepast`).

*Banks.* A clock counts every thread, and nearly always a rank has few. So threads come in banks of 18 a rank: the host, the copy
engine and 16 programs, then 18 programs more in each. Clocks reach as far as the banks in use, which grow with the largest grid.

All of it is sparse anonymous memory, taken page by page as memory is touched: 8 bytes for each byte of the heap in use, 16 where
single bytes are accessed.
One lock guards it: a file lock between the processes, which dies with its holder, and a thread lock within each.
"""

import fcntl
import os
import threading
from collections.abc import Iterator

import numpy as np

from . import racepast
from .control import ControlGroup, log
from .shm import share

GRANULE = 2
#: Threads of a rank in a bank, and how many banks there may be.
WIDTH, BANKS = 18, 57
RECORDS = 1 << 19
SIGNALS = 1 << 16
SITES, SITE_BYTES = 8192, 320
RING = 64  # the last signals of each thread, for the hint of a report
MEETINGS = 4096
MESSAGE = 4096
#: Local buffers of a rank that can be watched at the same time.
LOCAL_BYTES = 256 << 20
_CHUNK = 4096  # cells; what the search for records in use looks at or skips

EVEN, ODD, BOTH = 1, 2, 3  # bytes of a granule
_TOUCHED, _SPLIT = 1, 2  # of a chunk
WRITE, READS, ATOMICS, SIGNAL = range(4)  # of a cell
TID, CLOCK, SITE, NEXT, PROGRAM, KIND = range(6)  # of a record

#: Cells: the table, the numbers of the granules in it, and for which bytes of each they stand.
Part = tuple[np.ndarray, np.ndarray, tuple[int, ...]]


class Area:
    """The cells of some memory, ``bytes_each`` of each rank."""

    def __init__(self, bytes_each: int, control: ControlGroup) -> None:
        self.granules_each = -(-bytes_each // GRANULE)
        count = self.granules_each * control.size
        chunks = -(-count // _CHUNK)
        memory, fd = share(32 * count + chunks, control, "the race checker's cells")
        os.close(fd)
        everything = np.frombuffer(memory, np.uint8)
        self.cells, self._odd = everything[: 32 * count].view(np.uint32).reshape(2, count, 4)
        self._state = everything[32 * count :]

    def parts(self, granules: np.ndarray, halves: int) -> list[Part]:
        """The cells of ``halves`` of these granules, which are touched now."""
        state = self._state[int(granules.min()) // _CHUNK : int(granules.max()) // _CHUNK + 1]
        if halves == BOTH and not (state & _SPLIT).any():
            state |= _TOUCHED
            return [(self.cells, granules, (0, 1))]
        chunks = granules // _CHUNK
        if halves != BOTH:
            for chunk in np.unique(chunks):
                self._split(int(chunk))
            return [(self.cells, granules, (0,)) if halves == EVEN else (self._odd, granules, (1,))]
        state |= _TOUCHED
        split = self._state[chunks] & _SPLIT != 0
        found: list[Part] = [
            (self.cells, granules[~split], (0, 1)),
            (self.cells, granules[split], (0,)),
            (self._odd, granules[split], (1,)),
        ]
        return [part for part in found if len(part[1])]

    def _split(self, chunk: int) -> None:
        """The bytes of each granule of a chunk go their own ways from here on."""
        if not self._state[chunk] & _SPLIT:
            part = slice(chunk * _CHUNK, (chunk + 1) * _CHUNK)
            self._odd[part] = self.cells[part]
            self._state[chunk] = _TOUCHED | _SPLIT

    def forget(self, first: int, count: int) -> np.ndarray:
        """Granules get a new owner: they have no history. Their signals, which are to be forgotten as well."""
        self.cells[first : first + count, :SIGNAL] = 0
        for chunk in range(first // _CHUNK, (first + count - 1) // _CHUNK + 1):
            if self._state[chunk] & _SPLIT:
                self._odd[max(first, chunk * _CHUNK) : min(first + count, (chunk + 1) * _CHUNK), :SIGNAL] = 0
        return np.unique(self.cells[first : first + count, SIGNAL])

    def used(self) -> Iterator[np.ndarray]:
        """The cells that may not be zero, in parts."""
        for table, state in ((self.cells, _TOUCHED), (self._odd, _SPLIT)):
            for chunk in np.flatnonzero(self._state & state):
                yield table[chunk * _CHUNK : (chunk + 1) * _CHUNK]


class Shadow(racepast.Past):
    """The tables, as this process maps them. All methods are called with `lock` held."""

    def __init__(self, control: ControlGroup) -> None:
        ranks = control.size
        #: Threads of all ranks in a bank.
        self.width = ranks * WIDTH
        threads = BANKS * self.width
        fields: list[tuple[str, type, tuple[int, ...]]] = [
            # next record, next signal, next site, generation of records, 1 + rank of the first race, whether a kernel was checked,
            # banks in use
            ("header", np.int64, (8,)),
            ("message", np.uint8, (MESSAGE,)),
            ("records", np.int32, (RECORDS, 6)),
            ("taken", np.uint8, (RECORDS,)),  # records that the last search found in use
            ("system", np.int32, (BANKS, SIGNALS, self.width)),  # clocks
            ("gpu", np.int32, (ranks, BANKS, SIGNALS, self.width)),
            *racepast.fields(SIGNALS, self.width),
            ("sites", np.uint8, (SITES, SITE_BYTES)),
            ("ring", np.int64, (threads, RING, 5)),  # area, granule, clock, order, site of the last signals
            ("signals", np.int64, (threads,)),  # how many each thread has given
            ("meetings", np.int64, (MEETINGS, 2)),  # who meets, by a checksum, and the number of a signal
        ]
        sizes = [-(-int(np.prod(shape)) * np.dtype(kind).itemsize // 64) * 64 for _, kind, shape in fields]
        memory, self._fd = share(sum(sizes), control, "the race checker's tables")
        everything = np.frombuffer(memory, np.uint8)
        start = 0
        for (name, kind, shape), size in zip(fields, sizes, strict=True):
            nbytes = int(np.prod(shape)) * np.dtype(kind).itemsize
            setattr(self, name, everything[start : start + nbytes].view(kind).reshape(shape))
            start += size
        self.areas: list[Area] = []
        self._within, self._holder = threading.Lock(), 0
        self._site_numbers: dict[str, int] = {}
        if control.rank == 0:
            self.header[:3] = self.header[6] = 1  # 0 means none
        control.barrier("starting the race checker")

    message: np.ndarray
    records: np.ndarray
    taken: np.ndarray
    gpu: np.ndarray
    sites: np.ndarray
    ring: np.ndarray
    signals: np.ndarray
    meetings: np.ndarray

    def __enter__(self) -> None:
        self._within.acquire()
        try:
            self._holder = threading.get_ident()
            fcntl.lockf(self._fd, fcntl.LOCK_EX)
        except BaseException:  # an interrupt, too, which comes when it is locked
            self.__exit__()
            raise

    def __exit__(self, *exc: object) -> None:
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)
        finally:
            self._holder = 0
            self._within.release()

    @property
    def is_mine(self) -> bool:
        """Whether this thread has it: then what it does now is done by a signal's handler, or a destructor, in the middle of the
        checker's own work, and cannot be looked at.
        """
        return self._holder == threading.get_ident()

    def close(self) -> None:
        os.close(self._fd)

    # -- threads --------------------------------------------------------------------------------------------------------

    def thread(self, rank: int, number: int) -> int:
        """The number among all threads of thread ``number`` of ``rank``."""
        return number // WIDTH * self.width + rank * WIDTH + number % WIDTH

    def rank_of(self, tid: int) -> int:
        return tid % self.width // WIDTH

    def number_of(self, tid: int) -> int:
        """The number of a thread among those of its rank."""
        return tid // self.width * WIDTH + tid % WIDTH

    @property
    def counted(self) -> int:
        """How many threads clocks count by now."""
        return int(self.header[6]) * self.width

    def count(self, number: int) -> None:
        """A rank has thread ``number``."""
        self.header[6] = max(int(self.header[6]), number // WIDTH + 1)

    # -- records --------------------------------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """Changes when record numbers change their meaning: a number kept by a process is worth nothing then."""
        return int(self.header[3])

    def reserve(self, count: int) -> None:
        """Make sure that the next ``count`` records exist, so that a search does not come between them."""
        if int(self.header[0]) + count < RECORDS and not self.taken[int(self.header[0]) :][:count].any():
            return
        if RECORDS - int(self.header[0]) - int(self.taken[int(self.header[0]) :].sum()) <= count:
            self._collect()

    def record(self, values: tuple[int, ...]) -> int:
        """A new record; `reserve` came before."""
        number = int(self.header[0])
        while self.taken[number]:
            number += 1
        self.header[0] = number + 1
        self.records[number] = values
        return number

    def chain(self, number: int) -> list[tuple[int, ...]]:
        """The records that a number of a cell leads to."""
        found: list[tuple[int, ...]] = []
        while number:
            found.append(tuple(self.records[number].tolist()))
            number = found[-1][NEXT]
        return found

    def _collect(self) -> None:
        """Find the records in use; the others are free again. If hardly any are, all history is forgotten."""
        self.taken[:] = 0
        for area in self.areas:
            for cells in area.used():
                self.taken[np.unique(cells[:, :3])] = 1
        front = np.flatnonzero(self.taken)
        while len(front):  # along the chains
            following = np.unique(self.records[front, NEXT])
            front = following[self.taken[following] == 0]
            self.taken[front] = 1
        if int(self.taken.sum()) > RECORDS * 3 // 4:
            log.warning(
                "the race checker forgets what was accessed so far, as more accesses than it keeps (%d) matter still: a race with "
                "one of those is not found; check a smaller problem: fewer tiles, fewer programs",
                RECORDS,
            )
            self.taken[:] = 0
            for area in self.areas:
                for cells in area.used():
                    cells[:, :3] = 0
        self.taken[0] = 1
        self.header[0] = 1
        self.header[3] += 1

    # -- signals and sites ----------------------------------------------------------------------------------------------

    def withdraw_signals(self, numbers: np.ndarray) -> None:
        """Nothing is published there any more; a wait may still have met an earlier value."""
        banks = int(self.header[6])
        self.system[:banks, numbers] = 0
        self.gpu[:, :banks, numbers] = 0

    def forget_signals(self, numbers: np.ndarray) -> None:
        """Who acquires these from now on acquires nothing."""
        self.withdraw_signals(numbers)
        self.kept[numbers] = 0

    def signal_numbers(self, area: Area, granules: np.ndarray) -> np.ndarray:
        """The signals at ``granules``, new ones where there are none."""
        numbers = area.cells[granules, SIGNAL].astype(np.int64)
        missing = np.flatnonzero(numbers == 0)
        if len(missing):
            numbers[missing] = self._new_signals(len(missing))
            area.cells[granules[missing], SIGNAL] = numbers[missing]
        return numbers

    def _new_signals(self, count: int) -> np.ndarray:
        first = int(self.header[1])
        if first + count > SIGNALS:
            raise RuntimeError(
                f"the race checker keeps {SIGNALS} words that atomics use, and the program uses more; check a smaller problem: "
                "fewer tiles, fewer contexts between fluxlike.init and finalize"
            )
        self.header[1] = first + count
        return np.arange(first, first + count)

    def meeting_word(self, who: int) -> np.ndarray:
        """The signal of those who meet, the same on all ranks."""
        known = np.flatnonzero(self.meetings[:, 0] == who)
        if len(known) == 0:
            known = np.flatnonzero(self.meetings[:, 1] == 0)[:1]
            if len(known) == 0:
                raise RuntimeError(
                    f"the race checker follows the collectives of {MEETINGS // 2} sets of ranks, and the program has more; make "
                    "fewer groups, or fluxlike.finalize and init in between"
                )
            self.meetings[known] = (who, int(self._new_signals(1)[0]))
        return self.meetings[known, 1]

    def site(self, text: str) -> int:
        """The number of a place in a program."""
        number = self._site_numbers.get(text)
        if number is None:
            number = int(self.header[2])
            if number >= SITES:
                return 0
            self.header[2] = number + 1
            data = text.encode()[: SITE_BYTES - 1]
            self.sites[number, : len(data)] = np.frombuffer(data, np.uint8)
            self._site_numbers[text] = number
        return number

    def site_text(self, number: int) -> str:
        return bytes(self.sites[number]).split(b"\0")[0].decode(errors="replace") if number else "an unknown place"

    # -- the first race, for those who did not see it -------------------------------------------------------------------

    @property
    def kernels_seen(self) -> bool:
        """Whether a program of any rank has touched memory that is checked."""
        return bool(self.header[5])

    @property
    def stopped_by(self) -> int:
        """1 + the rank that found a race, or 0."""
        return int(self.header[4])

    def stop(self, rank: int, message: str) -> None:
        if not self.stopped_by:
            data = message.encode()[: MESSAGE - 1]
            self.message[: len(data)] = np.frombuffer(data, np.uint8)
            self.header[4] = rank + 1

    def stop_text(self) -> str:
        return bytes(self.message).split(b"\0")[0].decode(errors="replace")

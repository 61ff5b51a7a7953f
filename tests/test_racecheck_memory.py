"""The race checker's tables by themselves: grids of many programs, ranges and single bytes, records that are used again."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from race_ranks import (
    A0,
    A1,
    ACQUIRE,
    B0,
    B1,
    BYTES,
    DATA,
    GPU,
    HOST_A,
    HOST_B,
    OTHER_WORD,
    RELEASE,
    WORD,
    Ranks,
    checked_alone,
)

from fluxlike.runtime import interpreter, racecheck, racememory, raceshadow, racethreads
from fluxlike.runtime.errors import RaceError
from fluxlike.runtime.racecheck import Done
from fluxlike.runtime.racereport import READ, STORE
from fluxlike.runtime.raceshadow import BOTH, EVEN, ODD

# large grids


@pytest.mark.parametrize("distance", [16, 18, 1008])
def test_no_two_programs_of_a_grid_pass_for_one(distance):
    ranks = Ranks(2)
    for rank in range(2):
        ranks.launch(rank, racethreads.MAX_PROGRAMS)
    last = racethreads.MAX_PROGRAMS - 1
    ranks.write((0, last), 1)
    ranks.signal((0, last), 1, RELEASE)
    ranks.wait((1, last - distance), 1, ACQUIRE)
    ranks.read((1, last - distance), 1)  # ordered
    ranks.write((0, last), 0, DATA + 128)
    with pytest.raises(RaceError, match=rf"(?s)write by rank 0, program {last},.*read by rank 0, program {last - distance},"):
        ranks.read((0, last - distance), 0, DATA + 128)
    ranks.close()


def test_ranks_whose_grids_differ_in_size_know_of_each_other():
    """Clocks grow while others, shorter ones, are in use: of programs that run, of hosts, of signals and of the copy engine."""
    ranks = Ranks(2)
    ranks.launch(0)
    ranks.signal(A0, 0, RELEASE, GPU, OTHER_WORD)
    ranks.write(HOST_A, 0, DATA + 128)
    known = ranks.checkers[0].queued()
    ranks.launch(1, 40)
    ranks.write((1, 39), 1)
    ranks.signal((1, 39), 0)
    ranks.wait(A1, 0)
    ranks.read(A1, 1)
    with ranks.acting(0, 1) as checker:  # on a word that is not checked
        checker.atomic(np.array([64], np.uint64), 8, RELEASE, GPU, lambda: Done(None))
    ranks.end(0)
    ranks.read(HOST_A, 1)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(ranks.checkers[0].begin_job, known).result()
        pool.submit(ranks.checkers[0].span, ranks.at(0, DATA + 128), 32, 16, 2, READ).result()
        assert pool.submit(ranks.checkers[0].stream_wait, ranks.at(0, WORD), 1, lambda: True).result()
        pool.submit(ranks.checkers[0].span, ranks.at(1, DATA), 32, 16, 2, READ).result()
    clocks = [ranks.checkers[0].publish().tolist()]
    ranks.end(1)
    ranks.checkers[1].learn(clocks)
    ranks.read(HOST_B, 0, DATA + 128)
    with pytest.raises(RaceError, match="the copy engine"):
        ranks.write(HOST_B, 1)
    ranks.close()


@triton.jit
def spread_kernel(x, SAME: tl.constexpr):
    """Each program stores a word; with SAME the last stores that of the first."""
    program = tl.program_id(0) + 20 * tl.program_id(1)
    tl.store(x + (program % SAME), 1)


def test_a_grid_of_more_programs_than_a_bank_has():
    with checked_alone():
        x = torch.zeros(48, dtype=torch.int32)
        racecheck.watch("x", x)
        interpreter.run(spread_kernel, (20, 2), x, SAME=40)
        with pytest.raises(RaceError, match=r"(?s)bytes 0 to 3.*rank 0, program 0,.*rank 0, program 32,"):
            interpreter.run(spread_kernel, (20, 2), x, SAME=32)


@pytest.mark.parametrize("which", ("LOCK_EX", "LOCK_UN"))
def test_an_interrupt_at_the_checker_s_lock(monkeypatch, which):
    """It comes when the system call has been made; the lock is free behind it, for this thread and for others."""
    real, how = raceshadow.fcntl.lockf, getattr(raceshadow.fcntl, which)

    def interrupted(fd, asked):
        real(fd, asked)
        if asked == how:
            monkeypatch.setattr(raceshadow.fcntl, "lockf", real)
            raise KeyboardInterrupt

    with checked_alone():
        shadow = racecheck.active().shadow
        monkeypatch.setattr(raceshadow.fcntl, "lockf", interrupted)
        with pytest.raises(KeyboardInterrupt), shadow:
            pass
        assert not shadow.is_mine and not shadow._within.locked()
        with shadow:
            assert shadow.is_mine


def test_a_grid_that_is_too_large_says_so():
    with checked_alone():
        x = torch.zeros(1, dtype=torch.int32)
        most = racethreads.MAX_PROGRAMS
        assert most == 1024
        with pytest.raises(
            RuntimeError, match=f"at most {most} programs of a grid, and spread_kernel is launched with {most + 1}; "
        ):
            interpreter.run(spread_kernel, most + 1, x, SAME=1)


def test_grids_that_two_threads_launch_at_once():
    """Programs of the same number are two, each by its own number in reports; numbers of a grid that is over are used again."""
    ranks, most = Ranks(1), racethreads.MAX_PROGRAMS
    ranks.launch(0)
    first = ranks.grids[0]
    for _ in range(2):
        ranks.launch(0, most - 2)
        second = ranks.grids[0]
        with pytest.raises(RuntimeError, match=f"kernel is launched with {most - 2}, beside those of other threads;"):
            ranks.launch(0, most - 2)
        ranks.grids[0] = second
        ranks.end(0)
    ranks.grids[0] = first
    ranks.launch(0, 3)
    second = ranks.grids[0]
    ranks.write((0, 1), 0)
    ranks.grids[0] = first
    with pytest.raises(RaceError, match=r"(?s)write by rank 0, program 1,.*read by rank 0, program 1,"):
        ranks.read(A1, 0)
    ranks.close()


# ranges and granules


def test_locate(two):
    checker = two.checkers[0]
    start, end = two.segment.addresses[0], two.segment.addresses[0] + BYTES

    def found(addresses, size):
        places = checker.locate(np.array(addresses, np.uint64), size)
        assert size == 1 or all(place.halves == BOTH for place in places)
        shown = {BOTH: "", EVEN: "even", ODD: "odd"}
        return [(p.known.rank, (p.granules - p.known.granule).tolist(), *filter(None, [shown[p.halves]])) for p in places]

    assert found([start, start + 2], 2) == [(0, [0, 1])]
    assert found([start, start + 8], 8) == [(0, [0, 1, 2, 3, 4, 5, 6, 7])]
    assert found([start - 4, start, end - 4, end], 4) == [(0, [0, 1, BYTES // 2 - 2, BYTES // 2 - 1])]
    assert found([end, end + 64], 4) == []
    assert found([two.segment.addresses[1] + 4, start + 4], 4) == [(1, [2, 3]), (0, [2, 3])]
    assert found([1 << 40, start], 4) == [(0, [0, 1])]  # backwards, from above all that is checked
    assert found([start, start + 1, start + 1, start + 2, start + 5], 1) == [(0, [0]), (0, [1], "even"), (0, [2], "odd")]
    assert found([], 4) == []


def test_neighbours_of_two_bytes_do_not_race(two):
    two.write(A0, 0, DATA, 2, element=2)
    two.write(B0, 0, DATA + 2, 2, element=2)
    with pytest.raises(RaceError):
        two.write(B0, 0, DATA, 2, element=2)


@pytest.mark.parametrize(("first", "second", "where"), [((0, 1), (1, 1), ""), ((0, 1), (0, 2), "0"), ((1, 1), (0, 2), "1")])
@pytest.mark.parametrize("how", [("write", "write"), ("read", "write"), ("write", "read")])
@pytest.mark.parametrize("turned", [False, True])
def test_bytes_of_a_granule_are_two(two, first, second, where, how, turned):
    """Places are (byte, number of bytes). Two programs may own one byte of a granule each, but not the same."""
    places = (second, first) if turned else (first, second)
    two.write(A0, 0, DATA + 2048, 1, element=1)  # in the same chunk
    match = where and f"bytes {DATA + int(where)} to {DATA + int(where)}\n"
    for program, (byte, count), access in zip((A0, B0), places, how, strict=True):
        with pytest.raises(RaceError, match=match) if where and program == B0 else contextlib.nullcontext():
            getattr(two, access)(program, 0, DATA + byte, count, element=count)


def test_what_was_before_the_bytes_parted_counts(two):
    two.write(A0, 0, DATA, 64)
    two.write(A0, 0, DATA + 3, 1, element=1)
    with pytest.raises(RaceError, match=f"bytes {DATA + 5} to {DATA + 5}\n"):
        two.read(B0, 0, DATA + 5, 1, element=1)


def test_a_signal_stays_one_beside_single_bytes(two):
    two.write(A0, 0, WORD + 16, 1, element=1)
    two.write(A0, 0)
    two.signal(A0, 0)
    two.wait(B0, 0)
    two.read(B0, 0)
    with pytest.raises(RaceError, match=f"bytes {WORD} to {WORD + 7}\n"):
        two.write(B1, 0, WORD, 8, element=8)


@pytest.mark.parametrize("byte", [0, 1])
def test_a_single_byte_stored_over_a_signal_ends_what_was_published(two, byte):
    two.write(A0, 0)
    two.signal(A0, 0, RELEASE, GPU, OTHER_WORD)
    two.write(A0, 0, OTHER_WORD + byte, 1, element=1)
    number = two.checkers[0].shadow.areas[1].cells[OTHER_WORD // 2, raceshadow.SIGNAL]
    assert number and not two.checkers[0].shadow.gpu[0, 0, number].any()


def test_records_of_single_bytes_are_not_lost(monkeypatch):
    monkeypatch.setattr(raceshadow, "RECORDS", 64)
    ranks = Ranks(2)
    for rank in range(2):
        ranks.launch(rank)
    ranks.write(A0, 0, DATA + 1, 1, element=1)
    for turn in range(80):
        ranks.signal(B0, 1)
        ranks.write(B0, 1, DATA + turn % 2, 1, element=1)
    assert ranks.checkers[0].shadow.generation > 0, "there was no need to search for free records"
    with pytest.raises(RaceError, match=r"(?s)first:  write by rank 0, program 0"):
        ranks.read(B1, 0)
    ranks.close()


@pytest.mark.parametrize("shift", [0, 1])
def test_buffers_of_odd_lengths_at_odd_addresses(shift):
    ranks = Ranks(1)
    ranks.launch(0)
    checker, one, other = ranks.checkers[0], *(torch.zeros(8, dtype=torch.int8)[shift:][:3] for _ in range(2))
    checker.watch("before", one)
    with ranks.acting(0, 0):
        checker.span(one.data_ptr(), 0, 3, 1, STORE)
    checker.unwatch(one)
    checker.watch("one", one)  # what was before is forgotten
    checker.watch("other", other)

    def touch(program, byte, pitch, rows, kind):
        with ranks.acting(0, program):
            checker.span(one.data_ptr() + byte, pitch, 1, rows, kind)

    touch(0, 0, 2, 2, STORE)  # bytes 0 and 2
    touch(1, 1, 1, 1, STORE)
    with pytest.raises(RaceError, match="race on one of rank 0, bytes 2 to 2\n"):
        touch(1, 2, 0, 1, READ)
    ranks.close()


@triton.jit
def bytes_kernel(x, N: tl.constexpr, STEP: tl.constexpr):
    """Each program stores every other byte; with a STEP of 1 they meet."""
    i = tl.program_id(0) + tl.arange(0, N) * STEP
    tl.store(x + i, tl.zeros((N,), tl.int8).to(x.dtype.element_ty))


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8, torch.bool])
def test_kernels_that_store_bytes(kind):
    with checked_alone():
        x = torch.zeros(40, dtype=kind)
        racecheck.watch("x", x)
        interpreter.run(bytes_kernel, 2, x, N=16, STEP=2)
        with pytest.raises(RaceError, match="race on x of rank 0, bytes 2 to 15\n"):
            interpreter.run(bytes_kernel, 2, x, N=16, STEP=1)


def test_a_local_buffer_is_checked_under_its_name_until_it_is_given_up():
    ranks = Ranks(1)
    ranks.launch(0)
    buffer = torch.zeros(8)
    checker = ranks.checkers[0]

    def access(program, kind):
        with ranks.acting(0, program):
            checker.access(buffer.data_ptr() + np.arange(0, 32, 4, dtype=np.uint64), 4, kind)

    access(0, STORE)
    access(1, STORE)  # nobody has asked
    checker.watch("scratch", buffer)
    access(0, STORE)
    checker.unwatch(buffer)
    access(1, STORE)
    checker.watch("other", torch.zeros(8))
    checker.watch("scratch", buffer)
    access(1, READ)  # what was before is forgotten
    with pytest.raises(RaceError, match="race on scratch of rank 0, bytes 0 to 31"):
        access(0, STORE)
    ranks.close()


def test_watching_too_much_says_so(monkeypatch):
    monkeypatch.setattr(racememory, "LOCAL_BYTES", 1 << 20)
    ranks = Ranks(1)
    with pytest.raises(RuntimeError, match=r"watch\('large'\): .*at most 1 MiB of local buffers.*; unwatch what is done with"):
        ranks.checkers[0].watch("large", torch.empty(1 << 20))
    ranks.close()


def test_what_cannot_be_watched_says_so():
    """It was taken for as many bytes from its beginning on, or for watched to its end."""
    ranks = Ranks(1)
    checker, buffer = ranks.checkers[0], torch.zeros(8, 8)
    with pytest.raises(ValueError, match=r"watch\('column'\): .* and strides \(8,\); watch the buffer that it is a view"):
        checker.watch("column", buffer[:, 0])
    with pytest.raises(ValueError, match=r"this one is on meta"):
        checker.watch("elsewhere", torch.zeros(8, device="meta"))
    checker.watch("middle", buffer[2:4])
    checker.watch("row", buffer[3])  # another name for a part
    for part in (buffer, buffer[3:5], buffer[1:3]):
        with pytest.raises(ValueError, match=r"watch\('more'\): .* are watched already.*; unwatch the buffer that has those first"):
            checker.watch("more", part)
    checker.unwatch(buffer[2:4])
    checker.watch("more", buffer)
    ranks.close()


def test_more_groups_than_fit_say_so(monkeypatch):
    monkeypatch.setattr(raceshadow, "MEETINGS", 4)
    ranks = Ranks(1)
    with pytest.raises(RuntimeError, match="collectives of 2 sets of ranks, and the program has more; make fewer groups"):
        for last in range(5):
            with ranks.checkers[0].meeting((0, last)):
                pass
    ranks.close()


# records


def test_records_are_used_again_and_nothing_in_use_is_lost(monkeypatch):
    monkeypatch.setattr(raceshadow, "RECORDS", 256)
    ranks = Ranks(2)
    for rank in range(2):
        ranks.launch(rank)
    shadow = ranks.checkers[0].shadow
    ranks.write(A0, 0)  # must be known to the end
    for _ in range(600):
        ranks.write(A0, 0, DATA + 64)
        ranks.signal(A0, 0, RELEASE, offset=OTHER_WORD)
        ranks.wait(B0, 0, offset=OTHER_WORD)
        ranks.read(B0, 0, DATA + 64)
        ranks.signal(B0, 1)
        ranks.wait(A0, 1)
    assert shadow.generation > 2, "there was no need to search for free records"
    with pytest.raises(RaceError, match=r"(?s)first:  write by rank 0, program 0"):
        ranks.write(B1, 0)
    ranks.close()


@pytest.mark.parametrize("live", [16, 60])
def test_what_is_forgotten_is_said(monkeypatch, caplog, live):
    """Where so many records are in use that a search finds hardly any free."""
    monkeypatch.setattr(raceshadow, "RECORDS", 64)
    ranks = Ranks(1)
    ranks.launch(0)
    for turn in range(100):
        ranks.write((0, 0), 0, DATA + 64 * (turn % live))
        ranks.signal((0, 0), 0)
    said = [record for record in caplog.records if "forgets what was accessed so far" in record.getMessage()]
    assert bool(said) == (live > 48) and ranks.checkers[0].shadow.generation > 0
    ranks.close()


def test_chains_keep_each_thread_once():
    ranks = Ranks(3)
    for rank in range(3):
        ranks.launch(rank, 4)
    for _ in range(3):
        for rank in range(3):
            for program in range(4):
                ranks.read((rank, program), 0)
    shadow = ranks.checkers[0].shadow
    area = shadow.areas[1]
    chain = shadow.chain(int(area.cells[DATA // 2, raceshadow.READS]))
    assert len(chain) == 12 and len({record[raceshadow.TID] for record in chain}) == 12
    ranks.close()


def test_more_signals_than_fit_say_so(monkeypatch):
    monkeypatch.setattr(raceshadow, "SIGNALS", 4)
    ranks = Ranks(1)
    with pytest.raises(RuntimeError, match=r"keeps 4 words that atomics use, .*; check a smaller problem"):
        for word in range(5):
            ranks.signal((0, None), 0, RELEASE, offset=8 * word)
    ranks.close()

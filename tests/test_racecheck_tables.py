"""The race checker's tables by themselves, told of accesses by `race_ranks`: clocks, scopes, ranges, records."""

import ast
import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from race_ranks import ACQ_REL, ACQUIRE, BYTES, CTA, DATA, GPU, OTHER_WORD, RELAXED, RELEASE, SYS, WORD, Ranks, checked_alone
from triton.tools.tensor_descriptor import TensorDescriptor

import fluxlike
from fluxlike.kernels.lang import is_interp, used_rows
from fluxlike.ops import context  # noqa: F401  (installs the hook of used_rows)
from fluxlike.runtime import interpreter, racecheck, racememory, raceshadow
from fluxlike.runtime.errors import RaceError
from fluxlike.runtime.racereport import READ, STORE
from fluxlike.runtime.raceshadow import BOTH, EVEN, ODD


@pytest.fixture
def two():
    """Two ranks with two programs each."""
    ranks = Ranks(2)
    for rank in range(2):
        ranks.launch(rank)
    yield ranks
    ranks.close()


A0, A1, B0, B1 = (0, 0), (0, 1), (1, 0), (1, 1)  # programs of rank 0 and of rank 1
HOST_A, HOST_B = (0, None), (1, None)

# what races


@pytest.mark.parametrize(("first", "second"), [("write", "read"), ("read", "write"), ("write", "write")])
def test_unordered_accesses_race(two, first, second):
    getattr(two, first)(A0, 0)
    with pytest.raises(RaceError, match=f"(?s){first} by rank 0, program 0.*{second} by rank 1, program 1"):
        getattr(two, second)(B1, 0)


def test_the_programs_of_a_rank_race_too(two):
    two.write(A0, 0)
    with pytest.raises(RaceError):
        two.read(A1, 0)


def test_what_does_not_race(two):
    two.read(A0, 0)
    two.read(B0, 0)  # two reads
    two.write(A0, 0, DATA + 64)
    two.read(A0, 0, DATA + 64)  # one thread
    two.write(B0, 0, DATA + 128)  # a neighbour
    two.write(B0, 1, DATA)  # another rank's memory
    two.signal(A0, 0, RELAXED)
    two.signal(B0, 0, RELAXED)  # two atomics


@pytest.mark.parametrize("access", ["read", "write"])
@pytest.mark.parametrize("atomic_first", [True, False])
def test_an_atomic_and_a_plain_access_race(two, atomic_first, access):
    steps = [lambda: two.signal(A0, 0, RELEASE), lambda: getattr(two, access)(B0, 0, WORD, 8)]
    first, second = steps if atomic_first else reversed(steps)
    first()
    with pytest.raises(RaceError):
        second()


def test_no_reader_is_forgotten(two):
    two.read(A0, 0)
    two.read(B0, 0)
    two.signal(A0, 0)
    two.wait(B1, 0)  # B1 knows of the read of A0, not of that of its own rank's other program
    with pytest.raises(RaceError, match=r"(?s)first:  read by rank 1, program 0"):
        two.write(B1, 0)


def test_the_rank_that_did_not_see_it_stops_as_well(two):
    two.write(A0, 0)
    with pytest.raises(RaceError, match="race on the heap of rank 0, bytes 1024 to 1087"):
        two.read(B0, 0)
    with pytest.raises(RaceError, match=r"(?s)rank 0 stops, because of this race:.race on"):
        two.read(A0, 0, DATA + 512)


# clocks


def test_release_and_acquire_order(two):
    two.write(A0, 0)
    two.signal(A0, 1)
    two.wait(B0, 1)
    two.read(B0, 0)
    with pytest.raises(RaceError):
        two.read(B1, 0)  # the other program has not waited


@pytest.mark.parametrize(("release", "acquire"), [(RELAXED, ACQUIRE), (RELEASE, RELAXED), (ACQUIRE, ACQUIRE), (RELEASE, RELEASE)])
def test_half_an_edge_orders_nothing(two, release, acquire):
    two.write(A0, 0)
    two.signal(A0, 1, release)
    two.wait(B0, 1, acquire)
    with pytest.raises(RaceError):
        two.read(B0, 0)


def test_what_comes_after_the_release_is_not_ordered(two):
    two.signal(A0, 1)
    two.write(A0, 0)
    two.wait(B0, 1)
    with pytest.raises(RaceError):
        two.read(B0, 0)


def test_another_word_orders_nothing(two):
    two.write(A0, 0)
    two.signal(A0, 1)
    two.wait(B0, 1, offset=OTHER_WORD)
    with pytest.raises(RaceError):
        two.read(B0, 0)


def test_a_relaxed_atomic_does_not_hide_an_earlier_release(two):
    two.write(A0, 0)
    two.signal(A0, 1)
    two.signal(A1, 1, RELAXED)
    two.wait(B0, 1)
    two.read(B0, 0)


def test_a_plain_store_ends_what_was_published(two):
    two.write(A0, 0)
    two.signal(A0, 1)
    two.write(A0, 1, WORD, 8)
    with two.acting(*B0) as checker, pytest.raises(RaceError):  # the wait itself: an atomic on a word stored to
        checker.atomic(np.array([two.at(1, WORD)], np.uint64), 8, ACQUIRE, SYS, lambda: (None, None), True)


def test_a_count_hands_on_what_all_have_done(two):
    """As the arrival of programs at the end of a call: each acquires the earlier ones, the last signals for all."""
    two.write(A0, 0)
    two.signal(A0, 0, ACQ_REL, GPU, OTHER_WORD)
    two.write(A1, 0, DATA + 64)
    two.signal(A1, 0, ACQ_REL, GPU, OTHER_WORD)
    two.signal(A1, 1)
    two.wait(B0, 1)
    two.read(B0, 0, DATA, 128)


@pytest.mark.parametrize("order", [ACQUIRE, RELEASE, RELAXED])
def test_a_count_needs_both(two, order):
    two.write(A0, 0)
    two.signal(A0, 0, order, GPU, OTHER_WORD)
    two.signal(A1, 0, order, GPU, OTHER_WORD)
    two.signal(A1, 1)
    two.wait(B0, 1)
    with pytest.raises(RaceError):
        two.read(B0, 0)


@pytest.mark.parametrize("release", [RELEASE, ACQ_REL])
@pytest.mark.parametrize("met", [True, False])
def test_a_compare_and_swap_publishes_if_it_writes(two, met, release):
    """One that fails has only read the word (PTX memory model: there is no write to be a release)."""
    two.write(A0, 0)
    two.swap(A0, 1, met, release)
    two.wait(B0, 1)
    with contextlib.nullcontext() if met else pytest.raises(RaceError, match="The first has given no signal since"):
        two.read(B0, 0)


@pytest.mark.parametrize("met", [True, False])
def test_a_compare_and_swap_acquires_whether_it_writes_or_not(two, met):
    two.write(A0, 0)
    two.signal(A0, 1)
    two.swap(B0, 1, met)
    two.read(B0, 0)
    two.swap(B1, 1, met, RELEASE)
    with pytest.raises(RaceError):
        two.read(B1, 0)


@triton.jit
def lock_kernel(word, data, HELD: tl.constexpr, N: tl.constexpr):
    """Program 0 writes the data and swaps N words that hold 0, program 1 acquires the first of them and reads."""
    if tl.program_id(0) == 0:
        tl.store(data, 1)
        held = tl.full((N,), HELD, word.dtype.element_ty)
        tl.atomic_cas(word + tl.arange(0, N), held, held + 7, sem="acq_rel", scope="gpu")
    else:
        tl.atomic_add(word, 0, sem="acquire", scope="gpu")
        tl.load(data)


@pytest.mark.parametrize("words", [1, 2])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_a_compare_and_swap_of_a_kernel(kind, words):
    with checked_alone():
        word, data = torch.zeros(words, dtype=kind), torch.zeros(1)
        racecheck.watch("word", word)
        racecheck.watch("data", data)
        interpreter.run(lock_kernel, 2, word, data, HELD=0, N=words)
        assert word.tolist() == [7] * words
        with pytest.raises(RaceError, match=r"(?s)race on data of rank 0, bytes 0 to 3.*program 0.*program 1"):
            interpreter.run(lock_kernel, 2, word, data, HELD=0, N=words)  # they hold 7 by now


# scopes


@pytest.mark.parametrize(
    ("scope", "other_program", "other_rank"),
    [(CTA, False, False), (GPU, True, False), (SYS, True, True)],
    ids=["cta", "gpu", "sys"],
)
@pytest.mark.parametrize("weak_side", ["release", "acquire"])
def test_scopes(two, scope, other_program, other_rank, weak_side):
    release, acquire = (scope, SYS) if weak_side == "release" else (SYS, scope)
    for reader, ordered in ((A1, other_program), (B0, other_rank)):
        two.write(A0, 0)
        two.signal(A0, 0, RELEASE, release)
        two.wait(reader, 0, ACQUIRE, acquire)
        known = two.grids[reader[0]].queue[reader[1]].checked.clock
        mine = two.grids[0].queue[0].checked
        assert (known[mine.tid] >= mine.clock[mine.tid] - 1) == ordered


def test_a_release_at_gpu_scope_does_not_reach_the_copy_engine(two):
    for scope, ordered in ((GPU, False), (SYS, True)):
        two.write(A0, 0)
        two.signal(A0, 0, RELEASE, scope, OTHER_WORD)
        checker = two.checkers[0]
        assert checker.stream_wait(two.at(0, OTHER_WORD), lambda: True)
        mine = two.grids[0].queue[0].checked
        assert (checker.engine.clock[mine.tid] >= mine.clock[mine.tid] - 1) == ordered


# launches, hosts, copy engines


def test_a_launch_orders_both_ways():
    ranks = Ranks(1)
    ranks.write((0, None), 0)
    ranks.launch(0)
    ranks.read((0, 0), 0)
    ranks.write((0, 1), 0, DATA + 64)
    ranks.end(0)
    ranks.write((0, None), 0, DATA, 128)
    ranks.launch(0)
    ranks.write((0, 0), 0, DATA, 128)
    ranks.close()


def test_the_host_does_not_see_a_running_kernel(two):
    two.write(A0, 0)
    with pytest.raises(RaceError, match=r"(?s)program 0.*second: read by rank 0, the host"):
        two.read(HOST_A, 0)


def test_host_agreement_orders_hosts(two):
    for rank in range(2):
        two.end(rank)
    two.write(HOST_A, 1)
    clocks = [checker.publish() for checker in two.checkers]
    for checker in two.checkers:
        checker.learn(clocks)
    two.read(HOST_B, 1)
    two.write(HOST_A, 1, DATA + 64)
    with pytest.raises(RaceError):
        two.read(HOST_B, 1, DATA + 64)


@pytest.mark.parametrize("fault", ["", "copy before it may", "no wait", "read while it copies"])
def test_a_copy_and_its_signals(two, fault):
    """A program's counter → stream wait → copy → stream write → the reader at the peer."""
    engine = two.checkers[0]
    known = engine.queued()
    two.write(A0, 0)
    two.signal(A0, 0, RELEASE, SYS, OTHER_WORD)

    def job():
        engine.begin_job(known)
        if fault != "copy before it may":
            assert not engine.stream_wait(two.at(0, OTHER_WORD), lambda: False)
            assert engine.stream_wait(two.at(0, OTHER_WORD), lambda: True)
        engine.span(two.at(0, DATA), 32, 16, 2, READ)
        engine.span(two.at(1, DATA), 32, 16, 2, STORE)
        engine.stream_write(two.at(1, WORD), lambda: None)

    def everything():
        with ThreadPoolExecutor(1) as pool:  # the engine is a thread of its own
            pool.submit(job).result()
        if fault != "no wait":
            two.wait(B0, 1)
        two.read(B0, 1, DATA, 48)
        if fault == "read while it copies":
            two.write(A0, 0)
        engine.join_engine()
        two.end(0)
        two.write(HOST_A, 0)

    with pytest.raises(RaceError, match="the copy engine") if fault else contextlib.nullcontext():
        everything()


def test_a_span_has_gaps(two):
    two.write(A0, 0, DATA + 16, 16)
    two.checkers[1].span(two.at(0, DATA), 32, 16, 4, READ)  # 16 bytes of every 32
    with pytest.raises(RaceError, match="bytes 1040 to 1041"):
        two.checkers[1].span(two.at(0, DATA), 32, 18, 4, READ)


# large grids


@pytest.mark.parametrize("distance", [16, 18, 1008])
def test_no_two_programs_of_a_grid_pass_for_one(distance):
    ranks = Ranks(2)
    for rank in range(2):
        ranks.launch(rank, racecheck.MAX_PROGRAMS)
    last = racecheck.MAX_PROGRAMS - 1
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
        checker.atomic(np.array([64], np.uint64), 8, RELEASE, GPU, lambda: (None, None))
    ranks.end(0)
    ranks.read(HOST_A, 1)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(ranks.checkers[0].begin_job, known).result()
        pool.submit(ranks.checkers[0].span, ranks.at(0, DATA + 128), 32, 16, 2, READ).result()
        assert pool.submit(ranks.checkers[0].stream_wait, ranks.at(0, WORD), lambda: True).result()
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


def test_a_grid_that_is_too_large_says_so():
    with checked_alone():
        x = torch.zeros(1, dtype=torch.int32)
        most = racecheck.MAX_PROGRAMS
        assert most == 1024
        with pytest.raises(
            RuntimeError, match=f"at most {most} programs of a grid, and spread_kernel is launched with {most + 1}; "
        ):
            interpreter.run(spread_kernel, most + 1, x, SAME=1)


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


# descriptors, under the interpreter


@triton.jit
def blocks_kernel(source, to, first_row, STORED: tl.constexpr, USED: tl.constexpr):
    """Program 0 stores rows 0 to 7; program 1 loads 8 rows from ``first_row`` on, or stores them."""
    if tl.program_id(0) == 0:
        to.store([0, 0], tl.zeros((8, 8), tl.float32))
    else:
        if STORED:
            source.store([first_row, 0], tl.zeros((8, 8), tl.float32))
        else:
            if USED > 0 and is_interp():
                used_rows(first_row * 0 + USED)
            source.load([first_row, 0])


def _blocks(first_row, stored=False, used=0, rows=20, columns=8):
    """Run the kernel above on one matrix of 20 rows, watched, by two descriptors of it."""
    with checked_alone():
        matrix = torch.zeros(20, 16)
        racecheck.watch("matrix", matrix)
        descriptor = TensorDescriptor(matrix, [rows, columns], [16, 1], [8, 8])
        interpreter.run(blocks_kernel, 2, descriptor, descriptor, first_row, STORED=stored, USED=used)
    assert "create_masked_load" not in vars(interpreter.builder) and racecheck.active() is None


@pytest.mark.parametrize("stored", [False, True])
def test_blocks_of_descriptors(stored):
    _blocks(8, stored)
    _blocks(-8, stored)  # all of it outside
    with pytest.raises(RaceError, match="race on matrix of rank 0, bytes 448 to"):
        _blocks(7, stored)
    with pytest.raises(RaceError, match="bytes 0 to 95"):  # the rows inside, and 8 of the 16 columns
        _blocks(-6, stored)


def test_only_the_rows_that_are_used_count():
    with pytest.raises(RaceError, match="race on matrix"):
        _blocks(-6, used=0)
    _blocks(-4 + 12, used=8)
    with pytest.raises(RaceError, match="race on matrix"):
        _blocks(4, used=8)


# the house


def test_the_runtime_does_not_import_in_a_circle():
    """Not inside functions either; what only a type checker reads is no import."""
    imports = {}
    for path in Path(fluxlike.__file__).parent.joinpath("runtime").glob("*.py"):
        found = imports.setdefault(path.stem, set())
        tree = ast.parse(path.read_text())
        unread = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
        for node in ast.walk(ast.Module([node for node in tree.body if node not in unread], [])):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                found |= {node.module} if node.module else {alias.name for alias in node.names}

    def reached(name):
        found, ahead = set(), [name]
        while ahead:
            new = imports.get(ahead.pop(), set()) - found
            found |= new
            ahead += new
        return found

    assert [name for name in imports if name in reached(name)] == []

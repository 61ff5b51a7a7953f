"""The race checker's tables by themselves, told of accesses by `race_ranks`: clocks, scopes, launches, descriptors."""

import ast
import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from race_ranks import (
    A0,
    A1,
    ACQ_REL,
    ACQUIRE,
    B0,
    B1,
    CTA,
    DATA,
    GPU,
    HOST_A,
    HOST_B,
    OTHER_WORD,
    RELAXED,
    RELEASE,
    SYS,
    WORD,
    Ranks,
    checked_alone,
)
from triton.tools.tensor_descriptor import TensorDescriptor

import fluxlike
from fluxlike.kernels.lang import is_interp, used_rows
from fluxlike.ops import context  # noqa: F401  (installs the hook of used_rows)
from fluxlike.runtime import cpu, interpreter, racecheck, racehooks
from fluxlike.runtime.errors import RaceError
from fluxlike.runtime.racecheck import Done
from fluxlike.runtime.racereport import READ, STORE

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
        checker.atomic(np.array([two.at(1, WORD)], np.uint64), 8, ACQUIRE, SYS, lambda: Done(None), True)


def test_a_count_hands_on_what_all_have_done(two):
    """As the arrival of programs at the end of a call: each acquires the earlier ones, the last signals for all."""
    two.write(A0, 0)
    two.signal(A0, 0, ACQ_REL, GPU, OTHER_WORD)
    two.write(A1, 0, DATA + 64)
    two.signal(A1, 0, ACQ_REL, GPU, OTHER_WORD)
    two.signal(A1, 1)
    two.wait(B0, 1)
    two.read(B0, 0, DATA, 128)


def test_what_acquires_and_releases_at_once_hands_on(two):
    """Also to where the first release does not reach."""
    two.write(A0, 0)
    two.signal(A0, 0, RELEASE, GPU)
    two.signal(A1, 0, ACQ_REL, SYS)
    two.wait(B0, 0)
    two.read(B0, 0)


@pytest.mark.parametrize("order", [ACQUIRE, RELEASE, RELAXED])
def test_a_count_needs_both(two, order):
    two.write(A0, 0)
    two.signal(A0, 0, order, GPU, OTHER_WORD)
    two.signal(A1, 0, order, GPU, OTHER_WORD)
    two.signal(A1, 1)
    two.wait(B0, 1)
    with pytest.raises(RaceError):
        two.read(B0, 0)


@pytest.mark.parametrize("order", [RELEASE, ACQ_REL])
def test_a_look_at_a_word_may_be_a_release(two, order):
    """Adding 0 with Triton's default order, as a loop of a user's may: it publishes what came before it, not what follows."""
    two.write(A0, 0)
    two.atomic(A0, 1, order, poll=True)
    two.write(A0, 0, DATA + 64)
    two.wait(B0, 1)
    two.read(B0, 0)
    with pytest.raises(RaceError, match="race on the heap of rank 0, bytes 1088 to 1151"):
        two.read(B0, 0, DATA + 64)


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


@triton.jit
def flags_kernel(words, data, RELEASE: tl.constexpr):
    """Program 0 writes the data and sets all words at once; program 1, which runs behind it, looks at all of them and reads."""
    at = tl.arange(0, 4)
    if tl.program_id(0) == 0:
        tl.store(data + at, 1)
        tl.atomic_xchg(words + at, at + 1, sem=RELEASE, scope="gpu")
    else:
        tl.atomic_add(words + 3 - at, at * 0, mask=at > 1, sem="acquire", scope="gpu")
        tl.load(data + at)


@pytest.mark.parametrize("watched", [True, False])
def test_a_block_of_words_orders(watched):
    """Also of words that are not checked."""
    with checked_alone():
        words, data = torch.zeros(4, dtype=torch.int32), torch.zeros(4)
        racecheck.watch("data", data)
        if watched:
            racecheck.watch("words", words)
        interpreter.run(flags_kernel, 2, words, data, RELEASE="release")
        with pytest.raises(RaceError, match="race on data of rank 0, bytes 0 to 15"):
            interpreter.run(flags_kernel, 2, words, data, RELEASE="relaxed")


@triton.jit
def masked_kernel(data, n, PART: tl.constexpr):
    """Program 0 writes; program 1 reads, unless ``n`` is PART, by a mask that the interpreter has as numbers."""
    at = tl.arange(0, 8)
    if tl.program_id(0) == 0:
        tl.store(data + at, 1, mask=at < 4)
    else:
        tl.load(data + at, mask=(at < 3) & (PART != n), other=0)  # noqa: SIM300


def test_a_mask_of_numbers_lets_through_what_it_does_on_a_gpu():
    with checked_alone():
        data = torch.zeros(8)
        racecheck.watch("data", data)
        interpreter.run(masked_kernel, 2, data, 5, PART=5)
        with pytest.raises(RaceError, match="race on data of rank 0, bytes 0 to 11"):
            interpreter.run(masked_kernel, 2, data, 5, PART=6)


@pytest.mark.parametrize("later", [1, 70])
def test_a_hint_says_if_it_does_not_know_the_next_signal(two, later):
    two.write(A0, 0)
    two.signal(A0, 1, RELAXED)
    for _ in range(later):
        two.signal(A0, 1, RELEASE, offset=OTHER_WORD)
    lost = "Its next signals are not kept, as more than 64 followed. Its next known signal was the heap of rank 1, byte 8 (release"
    with pytest.raises(RaceError) as raised:
        two.read(B0, 0)
    assert (lost if later > 64 else "Its next signal was the heap of rank 1, byte 0 (relaxed") in str(raised.value)


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
        assert checker.stream_wait(two.at(0, OTHER_WORD), 1, lambda: True)
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
            assert not engine.stream_wait(two.at(0, OTHER_WORD), 1, lambda: False)
            assert engine.stream_wait(two.at(0, OTHER_WORD), 1, lambda: True)
        engine.span(two.at(0, DATA), 32, 16, 2, READ)
        engine.span(two.at(1, DATA), 32, 16, 2, STORE)
        engine.stream_write(two.at(1, WORD), 1, lambda: 0)

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


def test_a_copy_behind_the_join_of_earlier_ones_is_not_ordered_by_it():
    """A job of the next call that copies before it has signalled anything, and a program that does not wait for it."""
    ranks = Ranks(1)
    engine = ranks.checkers[0]

    def copy(offset):
        engine.begin_job(known)
        engine.span(ranks.at(0, offset), 64, 64, 1, STORE)

    with ThreadPoolExecutor(1) as pool:  # the engine is a thread of its own
        known = engine.queued()
        pool.submit(copy, DATA).result()
        engine.join_engine()
        ranks.launch(0)
        ranks.read(A0, 0)
        known = engine.queued()
        pool.submit(copy, DATA + 64).result()
    with pytest.raises(RaceError, match=r"(?s)write by rank 0, the copy engine.*read by rank 0, program 0"):
        ranks.read(A0, 0, DATA + 64)
    ranks.close()


@pytest.mark.parametrize("waits", (True, False))
def test_copies_of_a_second_call_are_not_behind_what_the_host_did(monkeypatch, waits):
    """Those of the first are: a GPU's engine is ordered behind the caller's stream once, and goes by its waits from then on."""
    monkeypatch.setattr(cpu.CpuCopyEngine, "_copy", lambda *args: None)  # there is no memory
    ranks = Ranks(1)
    engine = racehooks.CheckedCopyEngine(ranks.checkers[0])
    try:
        for call in range(2):
            ranks.write(HOST_A, 0)
            ranks.launch(0)
            ranks.signal(A0, 0, RELEASE, SYS, OTHER_WORD)
            ranks.end(0)
            if waits:  # a met wait for what the program has set
                engine._queue(lambda: ranks.checkers[0].stream_wait(ranks.at(0, OTHER_WORD), 1, lambda: True))
            engine.copy(ranks.at(0, DATA + 4096), 64, ranks.at(0, DATA), 64, 64, 1)
            if call == 0 or waits:
                engine.join(lambda seconds: None)
            else:
                with pytest.raises(RaceError, match=r"(?s)write by rank 0, the host.*read by rank 0, the copy engine"):
                    engine.join(lambda seconds: None)
    finally:
        engine.close()
        ranks.close()


def test_a_span_has_gaps(two):
    two.write(A0, 0, DATA + 16, 16)
    two.checkers[1].span(two.at(0, DATA), 32, 16, 4, READ)  # 16 bytes of every 32
    with pytest.raises(RaceError, match="bytes 1040 to 1041"):
        two.checkers[1].span(two.at(0, DATA), 32, 18, 4, READ)


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
    _blocks(-6, used=6)  # of the block, all of them outside of the matrix
    with pytest.raises(RaceError, match="bytes 0 to 31"):
        _blocks(-6, used=7)
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

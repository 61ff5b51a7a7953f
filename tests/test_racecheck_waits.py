"""The race checker and waits that say what they wait for: what they rely on does not depend on what came early."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from race_ranks import A0, A1, B0, DATA, GPU, HOST_A, OTHER_WORD, RELAXED, WORD, checked_alone

from fluxlike.kernels.lang import awaits, is_interp
from fluxlike.ops import context  # noqa: F401  (installs the hook of awaits)
from fluxlike.runtime import interpreter, racecheck
from fluxlike.runtime.errors import RaceError
from fluxlike.runtime.racepast import DEPTH


@pytest.mark.parametrize(("want", "ordered"), [(0, False), (1, False), (2, True), (3, True)])
def test_a_later_signal_is_no_promise(two, want, ordered):
    """The word was 0 at the start, which ends a wait for 0 and publishes nothing."""
    two.count(A0, 1, 1)
    two.write(A0, 0)
    two.count(A0, 1, 2)
    two.count(A0, 1, 3)
    assert two.wait_for(B0, 1, want)
    if ordered:
        two.read(B0, 0)
    else:
        with pytest.raises(RaceError):
            two.read(B0, 0)


def test_a_look_that_does_not_end_the_wait_tells_nothing(two):
    two.write(A0, 0)
    two.count(A0, 1, 1)
    assert not two.wait_for(B0, 1, 2)
    with pytest.raises(RaceError):
        two.read(B0, 0)


def test_a_wait_says_what_it_waits_for_once(two):
    """A look behind it, at the same word, takes over all that is published, as it does of words that nobody spoke of."""
    two.count(A0, 1, 1)
    two.write(A0, 0)
    two.count(A0, 1, 2)
    assert two.wait_for(B0, 1, 1)
    two.wait(B0, 1)
    two.read(B0, 0)


def test_programs_that_count_together(two):
    """Two programs add to a word; what a wait for the first promises is that of the one that was first, and of no other."""
    two.write(A0, 0)
    two.count(A0, 1, 1)
    two.write(A1, 0, DATA + 64)
    two.count(A1, 1, 2)
    assert two.wait_for(B0, 1, 2)
    two.read(B0, 0)
    two.read(B0, 0, DATA + 64)


def test_a_relaxed_signal_in_between_carries_what_came_before(two):
    two.write(A0, 0)
    two.count(A0, 1, 1)
    two.count(A1, 1, 2, RELAXED)
    assert two.wait_for(B0, 1, 2)
    two.read(B0, 0)


def test_a_word_that_is_lowered_begins_anew(two):
    two.count(A0, 1, 1)
    two.count(A0, 1, 0)
    two.write(A0, 0)
    two.count(A0, 1, 1)
    assert two.wait_for(B0, 1, 1)
    two.read(B0, 0)


@pytest.mark.parametrize("reset", [True, False])
def test_a_flag_of_the_copy_engine_that_is_not_taken_back(two, reset):
    """A stale flag is met whenever the wait comes, also where the new one has come as well."""
    engine = two.checkers[0]
    two.words[1, WORD] = 1
    engine.begin_job(engine.queued())
    engine.stream_write(two.at(1, WORD), 1, lambda: 0)
    if reset:
        engine._on_engine.yes = False
        assert two.wait_for(B0, 1, 1)
        two.write(B0, 1, WORD, 8)
        two.signal(B0, 0, offset=OTHER_WORD)
        assert engine.stream_wait(two.at(0, OTHER_WORD), 1, lambda: True)
        engine._on_engine.yes = True
    engine.span(two.at(0, DATA), 64, 64, 1, racecheck.STORE)
    engine.stream_write(two.at(1, WORD), 1, lambda: 0 if reset else 1)
    engine._on_engine.yes = False
    assert two.wait_for(B0, 1, 1)
    if reset:
        two.read(B0, 0)
    else:
        with pytest.raises(RaceError, match="first:  write by rank 0, the copy engine"):
            two.read(B0, 0)


@pytest.mark.parametrize(("value", "ordered"), [(1, False), (2, True)])
def test_a_stream_wait_relies_on_its_value(two, value, ordered):
    two.count(A0, 1, 1)
    two.write(A0, 0)
    two.count(A0, 1, 2)
    engine = two.checkers[1]
    assert engine.stream_wait(two.at(1, WORD), value, lambda: True)
    engine._on_engine.yes = True
    if ordered:
        engine.span(two.at(0, DATA), 64, 64, 1, racecheck.READ)
    else:
        with pytest.raises(RaceError):
            engine.span(two.at(0, DATA), 64, 64, 1, racecheck.READ)


def test_more_values_than_are_kept(two):
    """Nothing is reported that is ordered; what is too long ago counts as published with the oldest that is kept."""
    for value in range(1, 3 * DEPTH):
        two.write(A0, 0, DATA + 64 * value)
        two.count(A0, 1, value)
    assert two.wait_for(B0, 1, 3)
    two.read(B0, 0, DATA + 64 * 3)
    last = 3 * DEPTH - 1
    assert two.wait_for(B0, 1, last - 1)
    two.read(B0, 0, DATA + 64 * (last - 1))
    with pytest.raises(RaceError):
        two.read(B0, 0, DATA + 64 * last)


def test_where_the_past_is_not_known_all_that_is_published_counts(two):
    """After a release at gpu scope, and after a value that nobody was seen to write."""
    two.write(A0, 0)
    two.count(A0, 0, 1, scope=GPU)
    assert two.wait_for(A1, 0, 1)
    two.read(A1, 0)
    two.count(A0, 1, 1)
    two.words[1, WORD] = 7
    two.write(A0, 0, DATA + 64)
    two.count(A0, 1, 8)
    assert two.wait_for(B0, 1, 7)
    two.read(B0, 0)


@pytest.mark.parametrize("programs", [2, 40])
def test_after_a_large_grid_waits_rely_on_as_little_as_before(two, programs):
    """It is only of a large grid's later programs that no past is kept."""
    two.end(0)
    two.launch(0, programs)
    two.end(0)
    two.launch(0)
    two.count(A0, 1, 1)
    two.write(A0, 0)
    two.count(A0, 1, 2)
    assert two.wait_for(B0, 1, 1)
    with pytest.raises(RaceError):
        two.read(B0, 0)


def test_programs_of_a_large_grid_signal(two):
    two.end(0)
    two.launch(0, 40)
    two.write((0, 39), 0)
    two.count((0, 39), 1, 1)
    assert two.wait_for(B0, 1, 1)
    two.read(B0, 0)


@triton.jit
def kinds_kernel(word, data, HOW: tl.constexpr):
    """As `early_kernel`, by another atomic; in front of it one that changes nothing."""
    if tl.program_id(0) == 0:
        if HOW == "max":
            tl.atomic_max(word, 1, sem="release", scope="sys")
            tl.atomic_max(word, 0, sem="release", scope="sys")
        elif HOW == "or":
            tl.atomic_or(word, 1, sem="release", scope="sys")
            tl.atomic_or(word, 1, sem="release", scope="sys")
        else:
            tl.atomic_xchg(word, 1, sem="release", scope="sys")
        tl.store(data, 5)
        tl.atomic_xchg(word, 3, sem="release", scope="sys")
    else:
        if HOW == "look":
            tl.atomic_or(word, 0, sem="relaxed", scope="sys")
        if is_interp():
            awaits(word, 1)
        seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
        tl.store(data + 1, tl.load(data) + seen.to(tl.int32))


@pytest.mark.parametrize("kind", [torch.int64, torch.uint64, torch.int32])
@pytest.mark.parametrize("how", ["max", "or", "look"])
def test_whatever_atomic_sets_a_word(how, kind):
    with checked_alone():
        word, data = torch.zeros(1, dtype=kind), torch.zeros(2, dtype=torch.int32)
        racecheck.watch("word", word)
        racecheck.watch("data", data)
        with pytest.raises(RaceError, match="race on data of rank 0, bytes 0 to 3"):
            interpreter.run(kinds_kernel, 2, word, data, HOW=how)


@triton.jit
def large_kernel(word, number):
    tl.atomic_xchg(word, number, sem="release", scope="sys")
    tl.atomic_add(word, 1, sem="release", scope="sys")


def test_words_of_64_bits_without_a_sign():
    with checked_alone():
        word = torch.zeros(1, dtype=torch.uint64)
        racecheck.watch("word", word)
        for _ in range(2):
            interpreter.run(large_kernel, 1, word, 2**63)
        assert word.tolist() == [2**63 + 1]


@pytest.mark.parametrize("count", [1, 200])
def test_numbers_that_are_summed_by_relaxed_atomics_are_no_signals(two, count):
    """The tables have room for many signals, but not for every number of a large buffer."""
    checker = two.checkers[0]
    words, zeros = np.array([two.at(1, DATA + 8 * i) for i in range(count)], np.uint64), np.zeros(count, np.int64)
    before = int(checker.shadow.header[1])
    with two.acting(*A0):
        checker.atomic(words, 8, RELAXED, GPU, lambda: racecheck.Done(None, None, zeros, zeros + 1))
    assert int(checker.shadow.header[1]) == before


def test_a_relaxed_sum_of_many_words_makes_what_a_signal_promised_unknown(two):
    """A block too large to be followed word by word: a wait takes over all that is published, as one that says nothing does."""
    two.count(A0, 1, 1)
    two.write(A0, 0)
    two.count(A0, 1, 2)
    words, ones = np.array([two.at(1, WORD + 8 * i) for i in range(100)], np.uint64), np.ones(100, np.int64)
    with two.acting(*A0):
        two.checkers[0].atomic(words, 8, RELAXED, GPU, lambda: racecheck.Done(None, None, ones, ones + 1))
    assert two.wait_for(B0, 1, 1)
    two.read(B0, 0)


def test_memory_that_is_given_to_another_has_no_past(two):
    """The word of a host buffer, watched again."""
    buffer = torch.zeros(16, dtype=torch.int64)
    checker = two.checkers[0]
    for again in range(2):
        checker.watch("words", buffer)
        word = np.array([buffer.data_ptr()], np.uint64)
        if not again:
            two.write(A0, 0)
            with two.acting(*A0):
                done = racecheck.Done(None, None, np.array([0]), np.array([1]))
                checker.atomic(word, 8, 2, 2, lambda done=done: done)
        checker.unwatch(buffer)
    checker.watch("words", buffer)
    with two.acting(*HOST_A):
        checker.current().awaits = (buffer.data_ptr(), 1)
        seen = racecheck.Done(None, None, np.array([1]), np.array([1]))
        checker.atomic(word, 8, 1, 2, lambda: seen, True)
    with pytest.raises(RaceError):
        two.read(HOST_A, 0)


@triton.jit
def early_kernel(word, data, SAYS: tl.constexpr, WANT: tl.constexpr):
    """Program 0 signals 1, stores, signals 2; program 1, when both are there, waits for WANT, and loads."""
    if tl.program_id(0) == 0:
        tl.atomic_xchg(word, 1, sem="release", scope="sys")
        tl.store(data, 5)
        tl.atomic_xchg(word, 2, sem="release", scope="sys")
    else:
        while tl.atomic_add(word, 0, sem="relaxed", scope="sys") < 2:
            pass
        if is_interp() and SAYS:
            awaits(word, WANT)
        seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
        tl.store(data + 1, tl.load(data) + seen.to(tl.int32))


@pytest.mark.parametrize(("says", "want", "ordered"), [(True, 1, False), (True, 2, True), (False, 1, True)])
def test_in_a_kernel(says, want, ordered):
    with checked_alone():
        word, data = torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
        racecheck.watch("word", word)
        racecheck.watch("data", data)
        if ordered:
            interpreter.run(early_kernel, 2, word, data, SAYS=says, WANT=want)
            assert data.tolist() == [5, 7]
        else:
            with pytest.raises(RaceError, match=r"race on data of rank 0, bytes 0 to 3"):
                interpreter.run(early_kernel, 2, word, data, SAYS=says, WANT=want)

"""Waits on the CPU heap, turn by turn."""

import itertools
from types import SimpleNamespace

import pytest

from fluxlike.kernels import sync
from fluxlike.ops import spinning
from fluxlike.ops.group import GroupContext
from fluxlike.runtime import programs
from fluxlike.runtime.errors import PeerTimeout


def test_a_signal_that_came_before_its_rank_gave_up(monkeypatch):
    """Who learns that a peer has given up looks at its word once more: it may have been set since the last look."""
    context = SimpleNamespace(rank=0, gave_up=lambda: 2, give_up=lambda *_: PeerTimeout("rank 1 gave up first"))
    monkeypatch.setitem(spinning.by_ctl, 7, context)

    def turn(number):
        spinning.on_spin(1, 0, 4, 1, 7, number)

    for _ in range(2):  # each wait anew
        turn(0)
        with pytest.raises(PeerTimeout, match="gave up first"):
            turn(1)


def clock(monkeypatch):
    """A time that only sleeping makes pass; how long it was each time."""
    slept = []
    time = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(programs, "time", time)
    monkeypatch.setattr(spinning, "time", time)
    return slept


def test_a_wait_looks_less_often_the_longer_it_lasts(monkeypatch):
    """Soon after a signal that comes soon; a long wait leaves the machine to others, ends in time, and sees a peer that died."""
    slept, looked = clock(monkeypatch), []
    board = SimpleNamespace(diagnose=lambda: looked.append(sum(slept)), gone=list)
    context = SimpleNamespace(
        rank=0, gave_up=lambda: 0, group_ranks=[0, 1], limit_of=lambda what: 10.0, board=board,
        give_up=lambda *_: PeerTimeout("ran out"),
    )  # fmt: skip
    monkeypatch.setitem(spinning.by_ctl, 7, context)
    turn = 0
    with pytest.raises(PeerTimeout, match="ran out"):
        while turn < 2000:
            spinning.on_spin(1, 0, 4, 1, 7, turn)
            turn += 1
    assert 300 < turn < 1000 and 10 < sum(slept) < 10.03
    assert slept[0] == 50e-6 and all(nap <= max(50e-6, sum(slept[:i]) / 4) for i, nap in enumerate(slept))
    assert max(later - before for before, later in itertools.pairwise(looked)) < 0.7


def test_a_wait_for_what_waits_for_peers_lasts_longer():
    """So that those run out first, which know who did not come."""
    context = SimpleNamespace(limit_s=2.0, size=3)
    limits = {what: GroupContext.limit_of(context, what) for what in (sync.WAIT_SIGNAL.value, *sync.OWN)}
    assert limits == {sync.WAIT_SIGNAL.value: 2.0} | dict.fromkeys(sync.OWN, 8.0)


def test_longer_naps_may_be_asked_for(monkeypatch):
    slept = clock(monkeypatch)
    monkeypatch.setattr(programs, "longest_nap", 0.1)
    assert [programs.nap(waited) for waited in (0.0, 0.04, 10.0)] == [50e-6, 0.01, 0.1] == slept

"""Waits on the CPU heap, turn by turn."""

from types import SimpleNamespace

import pytest

from fluxlike.ops import spinning
from fluxlike.runtime.errors import PeerTimeout


def test_a_signal_that_came_before_its_rank_gave_up(monkeypatch):
    """Who learns that a peer has given up looks at its word once more: it may have been set since the last look."""
    context = SimpleNamespace(rank=0, gave_up=lambda: 2, give_up=lambda *_: PeerTimeout("rank 1 gave up first"))
    monkeypatch.setitem(spinning.by_ctl, 7, context)

    def turn(number):
        spinning.on_spin([0], 1, 0, 4, 1, 7, number)

    for _ in range(2):  # each wait anew
        turn(0)
        with pytest.raises(PeerTimeout, match="gave up first"):
            turn(1)

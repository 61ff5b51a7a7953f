"""`slow`: which slow tests a run has."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import slow
from ranks import ROOT

NAMES = [f"tests/test_x.py::test_y[{i}]" for i in range(300)]


def due(commits, n=3):
    return {name for name in NAMES if slow.is_due(name, n, commits)}


def test_of_n_commits_each_has_other_tests():
    lots = [due(commits) for commits in (5, 6, 7)]
    assert set.union(*lots) == set(NAMES) and sum(map(len, lots)) == len(NAMES)
    assert all(70 < len(lot) < 130 for lot in lots)
    assert due(8) == lots[0] and due(5, 1) == set(NAMES)


def test_what_a_change_is_about():
    changed = ("README.md", "fluxlike/kernels/sync.py")
    for files in (("fluxlike/kernels/sync.py",), ("tests/none.py", "fluxlike/*.py")):
        assert slow.is_about(files, changed)
    assert not slow.is_about(("tests/test_x.py",), changed)


class Item(SimpleNamespace):
    """Of a test file that no commit has."""

    path = Path(ROOT, "tests/test_x.py")
    __hash__ = object.__hash__

    def iter_markers(self, name):
        return self.marks


def made(numbers, *marks):
    return [Item(nodeid=NAMES[number], marks=marks) for number in numbers]


def test_a_run_leaves_out_slow_ones_alone(monkeypatch):
    quick, some = made(range(100)), made(range(100, 200), pytest.mark.slow.mark)
    always = made(range(200, 300), pytest.mark.slow.mark, pytest.mark.slow(slow.ALWAYS).mark)
    monkeypatch.setattr(slow, "MOST", 100)
    monkeypatch.setattr(slow, "history", lambda: (5, ("README.md",)))
    monkeypatch.delenv("FLUXLIKE_TEST_SLOW", raising=False)
    assert not slow.others(quick + some + always)
    monkeypatch.setenv("FLUXLIKE_TEST_SLOW", "3")
    left = {one.nodeid for one in slow.others(quick + some + always)}
    assert left == {one.nodeid for one in some} - due(5) and 50 < len(left) < 80
    monkeypatch.setattr(slow, "history", lambda: (5, ("tests/test_x.py",)))
    assert not slow.others(some), "the file of the test itself"
    monkeypatch.setattr(slow, "MOST", 50)
    half = {one.nodeid for one in slow.others(some + always)}
    assert half == {one.nodeid for one in some} - due(5, 2) and 30 < len(half) < 70, "each second of twice as many"
    monkeypatch.setattr(slow, "MOST", 1)
    assert {one.nodeid for one in slow.others(some + always)} == left, "of ever so many no fewer than else"
    monkeypatch.setattr(slow, "history", lambda: None)
    assert not slow.others(some), "nobody knows what was changed"


@pytest.mark.parametrize("given", ["0", "-1", "third", "1.5"])
def test_a_share_that_is_none_is_refused(given, monkeypatch):
    monkeypatch.setenv("FLUXLIKE_TEST_SLOW", given)
    with pytest.raises(pytest.UsageError, match=f"FLUXLIKE_TEST_SLOW='{given}' must be a whole number"):
        slow.others([])


def test_what_git_says():
    known = slow.history()
    if known is None:
        pytest.skip("git says nothing of this folder")
    commits, changed = known
    assert commits > 0 and all(isinstance(name, str) and not name.startswith("/") for name in changed)

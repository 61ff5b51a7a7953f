"""Tuned choices: their files, broken, foreign and hostile; how ranks of several machines choose alike; FLUXLIKE_TUNE.
`test_tune_ranks` has what ranks make of them, `test_tune_tool` the tool, `test_choice` the candidates and the model."""

import contextlib
import json
import logging
import os
import re
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fluxlike.ops import choice, gemm_rs, tuned
from fluxlike.ops.choice import Problem
from fluxlike.ops.context import Context
from fluxlike.ops.tuned import Entry, Machine
from fluxlike.runtime import cpu, dry, env

ROOT = Path(__file__).resolve().parents[1]
H200 = Machine("NVIDIA H200", (9, 0), 132)
HERE = Machine("shm", (0, 0), 2)
BF16 = torch.bfloat16


def on_h200(op, m, n, k, ranks=4):
    return Problem(op, (9, 0), 132, ranks, BF16, m, n, k)


# files


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The file of the user's cache for this machine, nowhere near the real one."""
    monkeypatch.setenv("FLUXLIKE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuned, "_warned", set())
    path = tuned.cache_file(HERE)
    path.parent.mkdir(parents=True, mode=0o700)
    return path


def test_the_cache_is_its_user_s(tmp_path, monkeypatch):
    monkeypatch.setenv("FLUXLIKE_CACHE_DIR", str(tmp_path / "new"))
    path = tuned.store(HERE, [entry()])
    assert path.parent == tmp_path / "new" / "tuned"
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700


def entry(m=64, n=64, k=64, op="gemm_rs", ranks=2, us=5.0, **changes):
    problem = Problem(op, HERE.capability, HERE.multiprocessors, ranks, BF16, m, n, k)
    return Entry(problem, replace(choice.usual(problem, "copy_engine"), **changes), us)


def loaded(caplog, ranks=2):
    """What is loaded, twice, and the warnings."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "fluxlike"):
        found = tuned.known(HERE, "gemm_rs", BF16, ranks)
        assert tuned.known(HERE, "gemm_rs", BF16, ranks) == found
    return found, [record.getMessage() for record in caplog.records]


def test_what_is_stored_is_loaded(cache, caplog):
    assert loaded(caplog) == ({}, [])
    assert tuned.store(HERE, [entry(), entry(k=32, subs=2)]) == cache
    assert tuned.store(HERE, [entry(us=3.0, subs=4), entry(ranks=3)]) == cache
    found, said = loaded(caplog)
    assert {shape: made.subs for shape, made in found.items()} == {(64, 64, 64): 4, (64, 64, 32): 2} and not said
    assert len(json.loads(cache.read_text())["entries"]) == 3
    assert sorted(path.name for path in cache.parent.iterdir()) == [f".{cache.name}.lock", cache.name]


def test_the_user_s_cache_is_over_the_shipped_table(cache):
    problem = on_h200("gemm_rs", 8192, 8192, 28672)
    shipped = tuned.known(H200, "gemm_rs", BF16, 4)
    mine = replace(choice.usual(problem, "copy_engine"), subs=4)
    assert shipped[problem.shape] != mine
    tuned.store(H200, [Entry(problem, mine, 1400.0)])
    assert tuned.known(H200, "gemm_rs", BF16, 4) == shipped | {problem.shape: mine}


def a_table(**changes):
    return {"format": 1, "machine": HERE.as_json(), "software": tuned.software(), "entries": []} | changes


FILES = {
    "empty": b"",
    "no JSON": b"\x00\xff\xfe not JSON",
    "cut off": json.dumps(a_table()).encode()[:-9],
    "deep": b"[" * 100_000,
    "a list": b"[]",
    "a number": b"1" * 10_000,
    "another format": json.dumps(a_table(format=2)).encode(),
    "entries are no list": json.dumps(a_table(entries={"a": 1})).encode(),
    "entries are a number": json.dumps(a_table(entries=1)).encode(),
    "no entries": json.dumps({key: value for key, value in a_table().items() if key != "entries"}).encode(),
    "large": b" " * (tuned.MAX_BYTES + 1),
    "another machine": json.dumps(a_table(machine=H200.as_json())).encode(),
    "stale": json.dumps(a_table(software=tuned.software() | {"kernels": "0" * 16})).encode(),
    "no software": json.dumps({"format": 1, "machine": HERE.as_json(), "entries": []}).encode(),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_no_use_is_ignored_with_one_warning(name, cache, caplog):
    cache.write_bytes(FILES[name])
    found, said = loaded(caplog)
    assert found == {} and len(said) == 1 and str(cache) in said[0] and "ignoring" in said[0]
    assert (f"it has more than {tuned.MAX_BYTES} bytes" in said[0]) == (name == "large")
    tuned.store(HERE, [entry()])
    assert loaded(caplog) == ({(64, 64, 64): entry().choice}, [])


held = []
NO_FILES = {
    "a pipe": os.mkfifo,
    "a pipe that somebody holds open": lambda path: [os.mkfifo(path), held.append(os.open(path, os.O_RDWR))],
    "a directory": os.mkdir,
    "a device": lambda path: os.symlink("/dev/zero", path),
    "a circle": lambda path: os.symlink(path, path),
}


@pytest.mark.parametrize("name", NO_FILES)
def test_what_is_no_file_is_ignored_with_one_warning(name, cache, caplog):
    NO_FILES[name](cache)
    before = len(os.listdir("/proc/self/fd"))
    found, said = loaded(caplog)
    assert found == {} and len(said) == 1
    assert len(os.listdir("/proc/self/fd")) == before
    while held:
        os.close(held.pop())


def test_a_file_that_may_not_be_read_is_ignored(cache, caplog, monkeypatch):
    tuned.store(HERE, [entry()])

    def refused(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refused)
    assert loaded(caplog)[0] == {}


OPEN = {
    "a directory of all": (lambda path: path.parent, 0o777, None),
    "a directory of the group": (lambda path: path.parent, 0o770, None),
    "another's directory": (lambda path: path.parent, 0o755, 12345),
    "a file of all": (lambda path: path, 0o646, None),
    "another's file": (lambda path: path, 0o644, 12345),
}


@pytest.mark.parametrize("name", OPEN)
def test_what_others_could_write_is_ignored_with_one_warning(name, cache, caplog, monkeypatch):
    tuned.store(HERE, [entry()])
    which, mode, owner = OPEN[name]
    if owner and os.geteuid():
        pytest.skip("only root can give a file away")
    which(cache).chmod(mode)
    if owner:
        os.chown(which(cache), owner, owner)
    found, said = loaded(caplog)
    assert found == {} and len(said) == 1 and str(cache) in said[0]
    assert ("belongs to user 12345 and not to you" if owner else "run chmod go-w") in said[0]
    if which(cache) == cache:  # in a directory of his own a user can mend that
        tuned.store(HERE, [entry(k=32)])
        assert loaded(caplog) == ({(64, 64, 32): entry(k=32).choice}, []) and cache.stat().st_mode & 0o777 == 0o600
    else:
        before = cache.read_bytes()
        with pytest.raises(PermissionError, match=re.escape(str(cache.parent))):
            tuned.store(HERE, [entry(k=32)])
        assert cache.read_bytes() == before


def test_what_was_opened_is_looked_at(cache, caplog, monkeypatch):
    """By its name it may be another file by then."""
    tuned.store(HERE, [entry()])
    private, stat = os.stat(cache), os.stat
    cache.chmod(0o646)
    monkeypatch.setattr(os, "stat", lambda path, **how: private if str(path) == str(cache) else stat(path, **how))
    found, said = loaded(caplog)
    assert found == {} and "run chmod go-w" in said[0]


def test_what_root_has_made_is_read(cache, caplog, monkeypatch):
    tuned.store(HERE, [entry()])
    if os.geteuid() == 0:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert loaded(caplog) == ({(64, 64, 64): entry().choice}, [])


def test_the_lock_follows_no_link(cache, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("do not empty me")
    lock = cache.with_name(f".{cache.name}.lock")
    lock.symlink_to(precious)
    with pytest.raises(OSError, match="symbolic links"):
        tuned.store(HERE, [entry()])
    assert precious.read_text() == "do not empty me" and not cache.exists()
    lock.unlink()
    tuned.store(HERE, [entry()])
    assert lock.stat().st_mode & 0o777 == 0o600


GOOD = entry().as_json()
ENTRIES = {
    "no object": 17,
    "text": "gemm_rs",
    "nothing": {},
    "no choice": {name: value for name, value in GOOD.items() if name != "choice"},
    "no size": GOOD | {"m": None},
    "no rows": GOOD | {"m": 0},
    "a negative size": GOOD | {"m": -64},
    "true": GOOD | {"m": True},
    "a huge size": GOOD | {"m": 10**30},
    "half a choice": GOOD | {"choice": {"transport": "copy_engine"}},
    "more than a choice": GOOD | {"choice": GOOD["choice"] | {"more": 1}},
    "a list for a transport": GOOD | {"choice": GOOD["choice"] | {"transport": ["copy_engine"]}},
    "an unknown transport": GOOD | {"choice": GOOD["choice"] | {"transport": "small\nand false"}},
    "an unknown tile": GOOD | {"choice": GOOD["choice"] | {"bm": 48}},
    "a tile too large": GOOD | {"choice": GOOD["choice"] | {"bm": 1 << 40}},
    "a number as text": GOOD | {"choice": GOOD["choice"] | {"bm": "64"}},
    "a fraction": GOOD | {"choice": GOOD["choice"] | {"bm": 64.0}},
    "no warps": GOOD | {"choice": GOOD["choice"] | {"warps": 0}},
    "three parts": GOOD | {"choice": GOOD["choice"] | {"subs": 3}},
    "pushers without a push": GOOD | {"choice": GOOD["choice"] | {"pushers": 16}},
}


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_that_is_no_use_is_ignored_and_the_others_are_not(name, cache, caplog):
    cache.write_text(json.dumps(a_table(entries=[ENTRIES[name], entry(k=32).as_json()])))
    found, said = loaded(caplog)
    assert found == {(64, 64, 32): entry(k=32).choice}
    assert len(said) == 1 and "1 of its 2 entries" in said[0] and "\n" not in said[0]


@pytest.mark.parametrize(
    "other", ({"machine": H200.as_json()}, {"software": tuned.software() | {"kernels": "0" * 16}}), ids=("machine", "software")
)
def test_what_was_measured_elsewhere_is_not_kept_beside_what_is_new(other, tmp_path):
    path = tmp_path / "table.json"
    for old, kept in (({}, [32, 64]), (other, [64])):
        path.write_text(json.dumps(a_table(entries=[entry(k=32).as_json()], **old)))
        tuned.store(HERE, [entry()], path)
        assert [found["k"] for found in json.loads(path.read_text())["entries"]] == kept
        assert path.stat().st_mode & 0o777 == 0o644, "a file that is named is for others, too"


def test_two_writers_and_a_reader(cache, caplog):
    """Nothing is lost and whoever reads sees a whole file."""
    done, torn = threading.Event(), []

    def write(which):
        for i in range(15):
            tuned.store(HERE, [entry(m=64 * (1 + 2 * i + which))])

    def read():
        while not done.is_set():
            with contextlib.suppress(FileNotFoundError):
                try:
                    json.loads(cache.read_text())
                except ValueError as error:
                    torn.append(error)

    writers, reader = [threading.Thread(target=write, args=(which,)) for which in (0, 1)], threading.Thread(target=read)
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    reader.join()
    assert not torn and {m for m, _, _ in loaded(caplog)[0]} == {64 * (1 + i) for i in range(30)}


def test_a_write_that_fails_leaves_the_old_file_and_no_other(cache, monkeypatch):
    tuned.store(HERE, [entry()])
    before = cache.read_bytes(), sorted(cache.parent.iterdir())

    def full(*args):
        raise OSError(28, "No space left on device")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            with pytest.raises(OSError, match="No space"):
                tuned.store(HERE, [entry(k=32)])
        assert (cache.read_bytes(), sorted(cache.parent.iterdir())) == before


def test_the_key_holds_what_matters(cache, monkeypatch, tmp_path):
    files = {tuned.cache_file(m) for m in (HERE, H200, replace(H200, gpu="NVIDIA H100"), replace(H200, multiprocessors=114))}
    versions = tuned.software()
    assert set(versions) == {"triton", "fluxlike", "kernels"} and len(versions["kernels"]) == 16
    for name in versions:
        monkeypatch.setattr(tuned, "software", lambda name=name: versions | {name: "other"})
        files.add(tuned.cache_file(HERE))
    assert len(files) == 7
    monkeypatch.setenv("FLUXLIKE_TORCH_PRODUCTS", "0")  # of which the fastest may be another
    assert tuned.cache_file(HERE) not in files
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    (kernels / "a.py").write_text("one")
    monkeypatch.undo()
    monkeypatch.setattr(tuned, "KERNELS", kernels)
    digests = set()
    for text in ("one", "two"):
        (kernels / "a.py").write_text(text)
        tuned.software.cache_clear()
        digests.add(tuned.software()["kernels"])
    (kernels / "a.py").rename(kernels / "b.py")
    tuned.software.cache_clear()
    digests.add(tuned.software()["kernels"])
    tuned.software.cache_clear()
    assert len(digests) == 3
    monkeypatch.undo()
    assert {"ag_gemm.py", "gemm_rs.py", "tiles.py"} <= {path.name for path in tuned.KERNELS.glob("*.py")}


# the environment


def test_tune_is_off_cached_or_on(monkeypatch):
    monkeypatch.delenv("FLUXLIKE_TUNE", raising=False)
    assert env.tune() == "cached"
    for value in ("off", "cached", "on"):
        monkeypatch.setenv("FLUXLIKE_TUNE", value)
        assert env.tune() == value
    for value in ("1", "ON", "always"):
        monkeypatch.setenv("FLUXLIKE_TUNE", value)
        with pytest.raises(ValueError, match=r"FLUXLIKE_TUNE=.*off, cached, on"):
            env.tune()


def test_tables_without_torch_s_products(cache, monkeypatch):
    """What the shipped table says of torch's is left out, so that FLUXLIKE_TUNE=on measures it."""
    monkeypatch.setattr(tuned, "machine_of", lambda executor: H200)
    for value, some in (("1", True), ("0", False)):
        monkeypatch.setenv("FLUXLIKE_TORCH_PRODUCTS", value)
        found = tuned.agreed(Alike(), "ag_gemm", BF16, None)
        assert found.torch_products == some and len(found.table) > 3
        assert any(made.transport in choice.TORCH for made in found.table.values()) == some


def test_where_the_cache_is(monkeypatch):
    monkeypatch.setenv("FLUXLIKE_CACHE_DIR", "/a/b")
    assert env.cache_dir() == Path("/a/b")
    monkeypatch.delenv("FLUXLIKE_CACHE_DIR")
    monkeypatch.setenv("HOME", "/home/somebody")
    for xdg, expected in (("/x", "/x/fluxlike"), ("x", "/home/somebody/.cache/fluxlike"), ("", "/home/somebody/.cache/fluxlike")):
        monkeypatch.setenv("XDG_CACHE_HOME", xdg)
        assert env.cache_dir() == Path(expected)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # no home
    with pytest.raises(OSError, match="dev/null"):
        tuned.store(HERE, [entry()])


# ranks


class Alike:
    """A `ControlGroup` of four that say the same."""

    rank, size = 0, 4
    whole = property(lambda self: self)

    def gather(self, value, what):
        return [value] * self.size


class Peers:
    """A `ControlGroup` of two, seen from rank 0; the other one's machine is ``other``."""

    rank, size = 0, 2
    whole = property(lambda self: self)

    def __init__(self, other):
        self.other = other

    def gather(self, value, what):
        return [value, (self.other, *value[1:])]


def test_ranks_on_different_machines_use_no_table(cache, caplog):
    tuned.store(HERE, [entry()])
    here = cpu.CpuExecutor()
    assert here.programs == HERE.multiprocessors
    for other, table in ((HERE, {(64, 64, 64): entry().choice}), (H200, {}), (replace(HERE, multiprocessors=1), {})):
        caplog.clear()
        found = tuned.agreed(Peers(other.as_json()), "gemm_rs", BF16, here)
        assert (found.mode, found.table) == ("cached", table)
        assert found.multiprocessors == min(2, other.multiprocessors) and found.capability == (0, 0)
        assert bool(caplog.records) == (not table)


@pytest.mark.parametrize("op", ("gemm_rs", "ag_gemm"))
@pytest.mark.parametrize("nodes", (False, True))
def test_ranks_on_gpus_of_two_kinds_choose_alike(op, nodes):
    """An H100 and an A100: each rank chooses by the lesser of them, as tiles of other heights have other signals.

    On two nodes as well, as what a node may choose says what memory it needs, and nodes allocate together.
    """
    gpus = {(9, 0): Machine("NVIDIA H100", (9, 0), 132), (8, 0): Machine("NVIDIA A100", (8, 0), 108)}
    chosen = []
    for here, other in ((9, 0), (8, 0)), ((8, 0), (9, 0)):
        executor = SimpleNamespace(
            device=torch.device("cpu"), name=gpus[here].gpu, capability=here, programs=gpus[here].multiprocessors
        )
        ctx = SimpleNamespace(op=op, size=2, dtype=BF16, part_of=1 + nodes, world=SimpleNamespace(executor=executor))
        peers = Peers(gpus[other].as_json())
        ctx.tuned = tuned.agreed(SimpleNamespace(whole=peers, size=2) if nodes else peers, op, BF16, executor)
        chosen.append(choice.choose(Context.problem(ctx, 8192, 8192, 8192), "auto", ctx.tuned.table))
    assert chosen[0] == chosen[1]


@pytest.mark.parametrize(
    ("pair", "least"),
    ((((9, 0), (10, 0)), (9, 0)), (((9, 0), (12, 0)), (12, 0)), (((8, 0), (12, 0)), (8, 0))),
)
def test_tiles_are_those_that_fit_each_gpu(pair, least):
    """One of compute capability 12 has less shared memory than a Hopper."""
    for here, other in (pair, pair[::-1]):
        executor = SimpleNamespace(device=torch.device("cpu"), name="one", capability=here, programs=132)
        assert tuned.agreed(Peers(Machine("other", other, 132).as_json()), "gemm_rs", BF16, executor).capability == least


def test_what_may_be_shared_has_memory(monkeypatch):
    """Of a Blackwell beside a Hopper, too: its last wave is shared as by that one, which needs a place for each program."""
    found = tuned.agreed
    monkeypatch.setattr(tuned, "agreed", lambda *args: replace(found(*args), capability=(9, 0)))
    x, weight = dry.tensor((1024, 32768), BF16), dry.tensor((8704, 32768), BF16)
    with dry.recording((10, 0), 4) as records:
        ctx = gemm_rs.create_gemm_rs_context(1024, 8704, 4 * 32768, schedule="in_kernel")
        gemm_rs.gemm_rs(x, weight, ctx)
        places, programs = len(ctx.parts), ctx.world.executor.programs
    assert any(record.constants["SHARED"] for record in records) and places == programs


def test_memory_is_taken_for_as_fast_as_the_slowest_gpu_s():
    """As a GPU has it that was measured, also where one rank has another; H200s are the measure of those that were not."""
    h100, a100 = replace(H200, gpu="NVIDIA H100 80GB HBM3"), Machine("NVIDIA A100", (8, 0), 108)
    found = {}
    for here, other in ((h100, h100), (h100, H200), (H200, h100), (H200, H200), (a100, a100)):
        executor = SimpleNamespace(
            device=torch.device("cpu"), name=here.gpu, capability=here.capability, programs=here.multiprocessors
        )
        ctx = SimpleNamespace(op="gemm_rs", size=2, dtype=BF16, part_of=1, world=SimpleNamespace(executor=executor))
        ctx.tuned = tuned.agreed(Peers(other.as_json()), "gemm_rs", BF16, executor)
        found[here.gpu[7:11], other.gpu[7:11]] = Context.problem(ctx, 256, 16384, 53248).memory
    assert found == {("H100", "H100"): 2.95e12, ("H100", "H200"): 2.95e12, ("H200", "H100"): 2.95e12} | dict.fromkeys(
        (("H200", "H200"), ("A100", "A100")), 4e12
    )

"""What SECURITY.md promises: memory that only its user reaches, messages that are data, nothing run that was read."""

import ast
import errno
import fcntl
import json
import mmap
import os
import pickle
import subprocess
import sys
import threading
import types
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_fresh

import fluxlike
from fluxlike.runtime import memfd, nvshmem, shm, wire, world

PACKAGE = Path(fluxlike.__file__).parent


# shared memory


def mode(fd: int) -> int:
    return os.fstat(fd).st_mode & 0o777


@pytest.fixture
def shared():
    fd = memfd.make("fluxlike-test", mmap.PAGESIZE, reserve=True)
    yield fd
    os.close(fd)


def test_shared_memory_is_for_its_owner_and_cannot_be_resized(shared):
    assert mode(shared) == 0o600
    assert not os.get_inheritable(shared), "a program that a rank starts would have it"
    for size in (0, mmap.PAGESIZE - 1, 2 * mmap.PAGESIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(shared, size)
    assert os.fstat(shared).st_size == mmap.PAGESIZE
    with pytest.raises(PermissionError):  # nor can the seals be changed
        fcntl.fcntl(shared, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    again = memfd.open_peer(os.getpid(), shared, mmap.PAGESIZE)
    memfd.mapped(again, mmap.PAGESIZE)[7] = 9
    os.close(again)
    assert memfd.mapped(shared, mmap.PAGESIZE)[7] == 9


@pytest.mark.parametrize("noexec", (False, True), ids=("older kernel", "vm.memfd_noexec"))
def test_kernels_that_seal_more_or_know_less(monkeypatch, noexec):
    """Where vm.memfd_noexec is set the kernel adds a seal of its own, F_SEAL_EXEC; before Linux 6.3 it refuses the flag for it."""
    real = os.memfd_create

    def create(name, flags):
        if noexec:
            return real(name, flags | 0x8)
        if flags & ~(os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(name, flags)

    monkeypatch.setattr(os, "memfd_create", create)
    try:
        fd = memfd.make("fluxlike-test", mmap.PAGESIZE, reserve=True)
    except OSError as problem:
        if noexec and problem.errno == errno.EINVAL:
            pytest.skip("this kernel does not know the seal")
        raise
    again = memfd.open_peer(os.getpid(), fd, mmap.PAGESIZE)
    memfd.mapped(again, mmap.PAGESIZE)[7] = 9
    assert memfd.mapped(fd, mmap.PAGESIZE)[7] == 9
    os.close(again)
    os.close(fd)


def test_sparse_memory_is_made_the_same_way():
    fd = memfd.make("fluxlike-test", 1 << 40, reserve=False)
    assert mode(fd) == 0o600 and os.fstat(fd).st_blocks == 0
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    os.close(fd)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user; the mode is tested for all")
def test_another_user_cannot_open_it(shared):
    attempt = "import os, sys\ntry: os.open(sys.argv[1], os.O_RDONLY)\nexcept PermissionError: print('refused')"
    # the interpreter of a virtual environment may lie where that user cannot look
    for path in (f"/proc/{os.getpid()}/fd/{shared}", f"/proc/{os.getpid()}/fd"):
        done = subprocess.run(["/usr/bin/env", "python3", "-c", attempt, path], user=65534, capture_output=True, text=True, cwd="/")
        assert done.stdout == "refused\n", done


def test_what_is_not_ours_is_not_mapped(shared, tmp_path, monkeypatch):
    """The descriptor of a stranger, as a process number of another namespace leads to: a file, memory that may shrink."""
    unsealed = os.memfd_create("fluxlike-heap", os.MFD_CLOEXEC)
    os.fchmod(unsealed, 0o600)
    os.ftruncate(unsealed, mmap.PAGESIZE)
    open_to_all = memfd.make("fluxlike-heap", mmap.PAGESIZE, reserve=False)
    os.fchmod(open_to_all, 0o666)
    file = tmp_path / "precious"
    file.write_bytes(bytes(mmap.PAGESIZE))
    file.chmod(0o600)
    plain = os.open(file, os.O_RDWR)
    here = os.getpid()
    before = len(os.listdir("/proc/self/fd"))
    for pid, number, nbytes in (
        (here, unsealed, mmap.PAGESIZE),
        (here, open_to_all, mmap.PAGESIZE),
        (here, plain, mmap.PAGESIZE),
        (here, shared, 2 * mmap.PAGESIZE),
        (here, 9999, mmap.PAGESIZE),
        (2**22 + 1, shared, mmap.PAGESIZE),
    ):
        with pytest.raises(OSError, match=r"made for sharing|No such file"):
            memfd.open_peer(pid, number, nbytes)
    with pytest.raises(ValueError, match="invalid literal"):
        memfd.open_peer("1/../../etc", shared, mmap.PAGESIZE)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="made for sharing"):
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)  # as root may open what another user has made
        memfd.open_peer(here, shared, mmap.PAGESIZE)
    assert len(os.listdir("/proc/self/fd")) == before, "a descriptor was left open"
    for fd in (unsealed, open_to_all, plain):
        os.close(fd)


@pytest.mark.parametrize("reserve", (False, True))
def test_an_interrupt_leaves_no_descriptor(shared, monkeypatch, reserve):
    """Python runs a signal's handler while the system reserves pages, which takes it a while."""

    def interrupted(*_):
        raise KeyboardInterrupt

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "posix_fallocate" if reserve else "ftruncate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        memfd.make("fluxlike-heap", mmap.PAGESIZE, reserve)
    monkeypatch.setattr(os, "fstat", interrupted)
    with pytest.raises(KeyboardInterrupt):
        memfd.open_peer(os.getpid(), shared, mmap.PAGESIZE)
    monkeypatch.undo()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("step", ("making", "sharing", "mapping"))
def test_memory_that_a_rank_cannot_have_leaves_no_descriptor(step):
    def agree(what, *_):
        if what == f"{step} it":
            raise ValueError("of the test")

    control = types.SimpleNamespace(rank=0, agree=agree, gather=lambda value, what: agree(what) or [value])
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="of the test"):
        shm.share(mmap.PAGESIZE, control, "it")
    assert len(os.listdir("/proc/self/fd")) == before


def memfds() -> tuple[int, int]:
    """Descriptors of shared memory that this process has open, and places where it is mapped."""
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:fluxlike" in link for link in links), sum("memfd:fluxlike-heap" in line for line in maps)


def attached(group):
    before = set(os.listdir("/dev/shm"))
    fluxlike.init(heap="shm", heap_bytes=1 << 20)
    with fluxlike.create_gemm_rs_context(512, 512, dtype=torch.float32) as ctx:  # grows the heap
        fluxlike.gemm_rs(torch.ones(8, 8), torch.ones(8, 8), ctx)
        segments = len(world.current().heap.segments)
        assert segments > 1
        assert memfds() == (0, 2 * segments), "what is mapped needs no descriptor"
        assert set(os.listdir("/dev/shm")) <= before
    del ctx
    fluxlike.finalize()
    assert memfds() == (0, 0)


def test_no_name_and_no_descriptor_is_left_once_all_have_mapped_it():
    for outcome in run_fresh(attached, 2):
        assert outcome.ok, str(outcome)


# messages

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
TENSORS = st.builds(
    lambda shape, dtype: (torch.arange(int(np.prod(shape))) % 2).to(dtype).reshape(shape),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(DTYPES),
)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.tuples(st.integers()), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(derandomize=True, database=None)
@given(PLAIN)
def test_a_message_arrives_as_it_was(value):
    assert wire.unpack(wire.pack(value), 0) == value
    assert repr(wire.unpack(wire.pack(value), 0)) == repr(value), "a tuple is a tuple, 1 is not 1.0"


@settings(derandomize=True, database=None)
@given(TENSORS)
def test_a_tensor_arrives_as_it_was(tensor):
    found = wire.unpack(wire.pack({"a": (tensor, 1)}), 0)["a"][0]
    assert found.dtype == tensor.dtype and found.shape == tensor.shape and torch.equal(found, tensor)


@pytest.mark.parametrize("value", (object(), {1, 2}, b"x", torch.float32, types.SimpleNamespace(), [print]))
def test_only_plain_data_is_sent(value):
    with pytest.raises(TypeError, match="plain data"):
        wire.pack(value)


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


def bytes_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@pytest.mark.parametrize(
    "data",
    (
        pickle.dumps(("what", 1, None)),
        b"\xff\xfe",
        b"{",
        b"[" * 200_000,
        b'{"call": ["os.system", "true"]}',
        b'{"tuple": 3}',
        b'{"tuple": [], "dict": []}',
        b'{"dict": [[{"dict": []}, 1]]}',
        b'{"tensor": ["torch.load", [1], "AA=="]}',
        b'{"tensor": ["torch.uint8", [4096], "AA=="]}',
        b'{"tensor": ["torch.uint8", [1], "%%"]}',
        b'{"tensor": ["torch.uint8"]}',
        b'{"tensor": ["torch.float32", [4], ""]}',  # of memory that nobody has written
    ),
)
def test_bytes_that_are_no_message_are_refused(data):
    with pytest.raises(RuntimeError, match=r"rank 3 sent \d+ bytes that are no message.*same version"):
        wire.unpack(bytes_of(data), 3)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(("torch.uint8", "AA==", "torch.int64")),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(("tuple", "dict", "tensor", "x")), inner, max_size=2)
        | st.fixed_dictionaries({"tensor": st.tuples(st.just("torch.uint8"), st.lists(st.integers(), max_size=2), st.just(""))})
    ),
)


@settings(derandomize=True, database=None, max_examples=300)
@given(st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()))
def test_whatever_a_peer_sends_is_read_or_refused(data):
    with suppress(RuntimeError):
        wire.unpack(bytes_of(data or b" "), 3)


@pytest.mark.parametrize("size", (0, -1, wire.MAX_BYTES + 1, 2**62))
def test_a_length_that_no_message_has_is_refused(size):
    calls = []

    def all_gather(mine):
        calls.append(len(mine))
        theirs = mine.clone()
        theirs[:8].view(torch.int64)[0] = size
        return [mine, theirs]

    with pytest.raises(RuntimeError, match=rf"rank 7 announced a message of {size} bytes"):
        wire.exchange(1, [5, 7], all_gather)
    assert len(calls) == 1, "memory was taken for it"


@pytest.mark.parametrize("longest", (wire.ROOM - 1, wire.ROOM, wire.ROOM + 1, 3 * wire.ROOM))
@pytest.mark.parametrize("other", (3, wire.ROOM, 2 * wire.ROOM))
def test_messages_of_all_lengths_arrive_in_as_few_trips_as_can_be(longest, other):
    """Two threads for two ranks; a text of n letters is packed into n + 2 bytes."""
    values = ["a" * (longest - 2), "b" * (other - 2)]
    assert len(wire.pack(values[0])) == longest
    meeting, trips, told = threading.Barrier(2, timeout=20), [[], []], [None, None]

    def run(rank):
        def all_gather(mine):
            trips[rank].append(mine.clone())
            trip = len(trips[rank]) - 1
            meeting.wait()
            return [trips[other][trip].clone() for other in range(2)]

        told[rank] = wire.exchange(values[rank], [4, 6], all_gather)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told == [values, values]
    assert [len(made) for made in trips] == [1 if max(longest, other) <= wire.ROOM else 2] * 2


def hostile(group, path):
    """Rank 1 answers an agreement with a pickle that makes a file when it is loaded."""
    fluxlike.init(heap="shm", heap_bytes=1 << 20)
    control = world.current().control
    if control.rank == 0:
        with pytest.raises(RuntimeError, match=r"rank 1 sent .* no message"):
            control.gather(1, "x")
    else:
        mine = bytes_of(pickle.dumps(Evil(path)))
        assert len(mine) <= wire.ROOM
        length = torch.tensor([len(mine)]).view(torch.uint8)
        control.board.meet("x")  # or rank 0 would wait for it
        control._all_gather("x", torch.cat((length, mine, torch.zeros(wire.ROOM - len(mine), dtype=torch.uint8))))
    with suppress(ValueError):  # rank 0 has met here and rank 1 has not, in fluxlike's eyes
        fluxlike.finalize()
    assert not fluxlike.is_initialized()


def test_a_peer_cannot_have_code_run(tmp_path):
    pickle.loads(pickle.dumps(Evil(tmp_path / "it works")))
    for outcome in run_fresh(hostile, 2, path=str(tmp_path / "made")):
        assert outcome.ok, str(outcome)
    assert os.listdir(tmp_path) == ["it works"]


@pytest.mark.parametrize("rank", (0, 1))
def test_the_nvshmem_id_travels_as_numbers(monkeypatch, rank):
    """The bytes of rank 0's identifier reach the other ranks' by numpy, so no object of nvshmem4py is pickled."""
    layout = np.dtype([("version", np.int32), ("internal", np.int8, (124,))])
    said, started = [], []

    class Unique:
        def __init__(self, empty):
            self._data = np.frombuffer(bytes(128) if empty else bytes(range(128)), layout).copy().view(np.recarray)

    class Control:
        size = 2

        def agree(self, what, arguments, error=None):
            assert error is None

        def gather(self, value, what):
            said.append(wire.unpack(wire.pack(value), 0))
            return [list(range(128)), said[-1]]

    def init(**how):
        started.append(how["uid"])

    core = types.SimpleNamespace(get_unique_id=lambda empty=False: Unique(empty), init=init)
    device = types.SimpleNamespace(Device=lambda index: types.SimpleNamespace(set_current=lambda: None))
    for name, module in {"nvshmem": types.SimpleNamespace(core=core), "nvshmem.core": core, "cuda.core": device}.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in (*nvshmem._DEFAULTS, *nvshmem._ONE_HOST):
        monkeypatch.setenv(name, "")
    control = Control()
    control.rank = rank
    nvshmem.start(torch.device("cuda", 0), control, one_host=True)
    assert started[0]._data.tobytes() == bytes(range(128))
    assert said == [list(range(128)) if rank == 0 else [0] * 128]


# the source

FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "yaml", "code", "codeop", "runpy", "pty"}
#: torch's collectives of objects pickle; torch.load and numpy.load do or may.
FORBIDDEN_CALLS = {
    "eval", "exec", "compile", "__import__", "load", "system", "popen", "all_gather_object", "gather_object",
    "broadcast_object_list", "scatter_object_list", "send_object_list", "recv_object_list", "literal_eval",
}  # fmt: skip
#: Where one is right, and why.
ALLOWED = {
    ("runtime/rewriting.py", "exec"): "a kernel's own source, rewritten",
    ("runtime/rewriting.py", "compile"): "the same",
    ("tools/runfile.py", "runpy"): "the program that the user asks it to run",
    ("tools/topo.py", "load"): "a topology: a preset, or a file of JSON, whose every part is checked",
    ("topology/matrix.py", "load"): "the same",
    ("tools/links.py", "load"): "the same",
    ("*", "tl.load"): "a kernel's load",
    ("*", "x.load"): "a kernel's load by descriptor",
    ("kernels/fused.py", "behind.load"): "the same",
    ("*", "w.load"): "the same",
    ("*", "stage.load"): "the same",
    ("*", "gathered.load"): "the same",
}


def offences(path: str, source: str) -> list[str]:
    """Names in a file of the package that could run what was read."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            heads = {name.split(".")[0] for name in names} & FORBIDDEN_MODULES
            found += [f"{path}:{node.lineno}: import {name}" for name in heads if (path, name) not in ALLOWED]
            from_torch = isinstance(node, ast.ImportFrom) and str(node.module).startswith("torch")
            found += [f"{path}:{node.lineno}: {name}" for name in names if from_torch and name in FORBIDDEN_CALLS]
        elif isinstance(node, ast.Call):
            text = ast.unparse(node.func)
            forbidden = text in FORBIDDEN_CALLS or (isinstance(node.func, ast.Attribute) and node.func.attr in FORBIDDEN_CALLS)
            harmless = text in ("re.compile", "triton.compile")
            if forbidden and not harmless and not {(path, text), ("*", text)} & ALLOWED.keys():
                found.append(f"{path}:{node.lineno}: {text}()")
            if any(word.arg == "shell" for word in node.keywords):
                found.append(f"{path}:{node.lineno}: {text}(shell=)")
    return found


def test_nothing_that_was_read_is_executed():
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 30
    found = [line for file in files for line in offences(str(file.relative_to(PACKAGE)), file.read_text())]
    assert found == []


@pytest.mark.parametrize(
    "source",
    (
        "import pickle", "from marshal import loads", "torch.load('x')", "dist.all_gather_object(a, b)", "eval('1')",
        "from torch.distributed import broadcast_object_list", "os.system('ls')", "subprocess.run('ls', shell=True)",
        "importlib.__import__('x')", "exec('1')",
    ),
)  # fmt: skip
def test_the_search_itself(source):
    assert offences("runtime/x.py", source), source


def test_importing_reads_no_file_of_the_working_directory(tmp_path):
    """No settings file, no cache, no plug-in is picked up from where a program is started."""
    for name in ("fluxlike.json", "fluxlike.toml", ".fluxlike", "sitecustomize_fluxlike.py"):
        (tmp_path / name).write_text("raise SystemExit('was run')")
    script = "import fluxlike, fluxlike.ops.gemm_rs, fluxlike.ops.ag_gemm, os; print(sorted(os.listdir('.')))"
    env = {**os.environ, "PYTHONPATH": f"{PACKAGE.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-P", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "was run" not in done.stdout + done.stderr, done
    assert done.stdout.strip() == str(sorted(p.name for p in tmp_path.iterdir())), "importing left a file behind"

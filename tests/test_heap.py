"""The symmetric heap: who gets which range, and that all ranks see one another's bytes in it."""

import contextlib
import fcntl
import itertools
import os
import sys
import threading
import time
from types import SimpleNamespace

import numpy
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import device, run_fresh, run_ranks

import fluxlike
from fluxlike.runtime import calls, cuda, nvshmem, world
from fluxlike.runtime.errors import PeerTimeout
from fluxlike.runtime.heap import ALIGN, SymmetricHeap, first_fit, give, shown, take

SIZE = 64


def covered(free):
    return {byte for start, size in free for byte in range(start, start + size)}


def well_formed(free):
    """Sorted, not empty, not touching one another."""
    ends = [(start, start + size) for start, size in free]
    return all(size > 0 for _, size in free) and all(a[1] < b[0] for a, b in itertools.pairwise(ends))


@given(st.lists(st.tuples(st.integers(0, SIZE - 1), st.integers(1, 12)), max_size=12))
def test_take_and_give_are_inverse(wishes):
    free, held = [(0, SIZE)], []
    for offset, nbytes in wishes:
        if not set(range(offset, offset + nbytes)) <= covered(free):
            continue
        before = covered(free)
        free = take(free, offset, nbytes)
        held.append((offset, nbytes))
        assert covered(free) == before - set(range(offset, offset + nbytes))
        assert well_formed(free)
    for block in held[::2] + held[1::2]:
        before = covered(free)
        free = give(free, *block)
        assert covered(free) == before | set(range(block[0], sum(block)))
        assert well_formed(free)
    assert free == [(0, SIZE)]


def test_sizes_for_people():
    sizes = (0, 1, 1024, 1025, (1 << 20) - 1, 1 << 20, 5 << 19)
    assert [shown(size) for size in sizes] == ["0 KiB", "1 KiB", "1 KiB", "2 KiB", "1024 KiB", "1 MiB", "2 MiB"]


ORDERS = st.lists(
    st.tuples(st.sampled_from(((0, 1, 2, 3), (0, 1), (2, 3), (0, 2), (1, 3), (2,))), st.integers(1, 30), st.booleans()),
    max_size=25,
)


@given(orders=ORDERS, segments=st.integers(1, 3))
def test_groups_share_a_heap_without_overlap(orders, segments):
    """Groups allocate and free in any order: one block per byte of a rank, the same place on all ranks of a group."""
    ranks = range(4)
    free = {rank: [[(0, SIZE)] for _ in range(segments)] for rank in ranks}
    held = []
    for group, nbytes, release in orders:
        mine = [block for block in held if block[0] == group]
        if release and mine:
            _, index, offset, size = block = mine[0]
            held.remove(block)
            for rank in group:
                free[rank][index] = give(free[rank][index], offset, size)
            continue
        views = [[free[rank] for rank in group] for _ in group]
        places = [first_fit(view, nbytes) for view in views]
        assert all(place == places[0] for place in places)
        room = [set.intersection(*(covered(free[rank][index]) for rank in group)) for index in range(segments)]
        fits = any(set(range(at, at + nbytes)) <= left for left in room for at in range(SIZE - nbytes + 1))
        assert (places[0] is not None) == fits
        if places[0] is None:
            continue
        index, offset = places[0]
        for rank in group:
            free[rank][index] = take(free[rank][index], offset, nbytes)
        held.append((group, index, offset, nbytes))
    for rank, index in itertools.product(ranks, range(segments)):
        used = [range(o, o + n) for g, i, o, n in held if rank in g and i == index]
        taken = [byte for one in used for byte in one]
        assert len(taken) == len(set(taken)), f"rank {rank} has one byte in two blocks"
        assert covered(free[rank][index]) == set(range(SIZE)) - set(taken)
    for group, index, offset, nbytes in held:
        for rank in group:
            free[rank][index] = give(free[rank][index], offset, nbytes)
    assert all(free[rank] == [[(0, SIZE)]] * segments for rank in ranks)


def test_first_fit_takes_the_first_segment_and_offset():
    free = [[[(0, 4), (8, 8)], [(0, 99)]], [[(2, 14)], [(0, 99)]]]
    assert first_fit(free, 2) == (0, 2)
    assert first_fit(free, 3) == (0, 8)
    assert first_fit(free, 9) == (1, 0)
    assert first_fit(free, 100) is None
    # A rank that knows of fewer segments bounds the search.
    assert first_fit([free[0], free[1][:1]], 9) is None


def peers(group):
    """Each rank writes into each other's block through the view, and reads what the others wrote into its own."""
    now = world.current()
    control = now.control_of(group)
    rank, size = control.rank, control.size
    block = now.heap.allocate(1000, control, now.indices(control))
    other = now.heap.allocate(10, control, now.indices(control))
    assert block.nbytes == 1024 and block.nbytes % ALIGN == 0 and block.offset % ALIGN == 0
    assert block.local.numel() == block.nbytes and block.local.device == device()
    assert len(block.addresses) == size
    assert block.addresses[rank] == block.local.data_ptr()
    assert len(set(block.addresses)) == size
    assert all(a - b for a, b in zip(block.addresses, other.addresses, strict=True)), "two blocks in one place"
    block.local.fill_(0)
    now.executor.synchronize()
    dist.barrier(group)
    for peer in range(size):
        view = block.view(peer)
        assert view.data_ptr() == block.addresses[peer] and view.numel() == block.nbytes
        view.view(torch.int64)[rank] = 100 * rank + peer
    now.executor.synchronize()
    dist.barrier(group)
    seen = block.local.view(torch.int64)[:size].tolist()
    assert seen == [100 * source + rank for source in range(size)], f"rank {rank} sees {seen}"
    dist.barrier(group)
    offsets = [None] * size
    dist.all_gather_object(offsets, (block.segment_index, block.offset), group=group)
    assert len(set(offsets)) == 1, f"offsets differ: {offsets}"
    now.heap.free(other)
    now.heap.free(block)
    again = now.heap.allocate(1000, control, now.indices(control))
    assert (again.segment_index, again.offset) == (block.segment_index, block.offset), "freed space is not used again"
    now.heap.free(again)
    return block.offset


def test_peers_see_writes():
    for size in (1, 2, 3, 4):
        offsets = run_ranks(peers, size)
        assert len(set(offsets)) == 1


def half_taken(group):
    """Rank 1 cannot hear whether all have taken a range: nobody keeps it."""
    fluxlike.init(heap="shm", heap_bytes=1 << 20)
    heap, control = world.current().heap, world.current().control
    before, gather = heap.in_use, control.gather

    def fails(value, what):
        if what == "taking it":
            raise OSError("of the test")
        return gather(value, what)

    if control.rank == 1:
        control.gather = fails
    with pytest.raises((OSError, RuntimeError, ValueError)):
        heap.allocate(1000, control, [0, 1])
        control.barrier("behind it")
    return heap.in_use - before


def test_a_range_that_was_taken_for_nothing():
    first, second = run_fresh(half_taken, 2, {"FLUXLIKE_TIMEOUT_S": "3"}, grace=10)
    assert first.value == second.value == 0, f"{first}\n{second}"


def nobody_died(group):
    assert world.current().control.board.gone() == []


@pytest.fixture
def alone():
    """A heap of one rank, of 4 KiB."""
    control = SimpleNamespace(ranks=[0], gather=lambda value, what: [value])
    control.whole = control
    return SymmetricHeap(lambda nbytes, _: SimpleNamespace(nbytes=nbytes, addresses=[1 << 20]), control, 1 << 12)


def test_a_heap_grows_by_no_less_than_it_began_with(alone):
    """Else each of many small contexts would have a segment, which all ranks make together."""
    for _ in range(12):
        alone.allocate(1 << 10, alone._sharing, [0])
    assert [segment.nbytes for segment in alone.segments] == [1 << 12] * 3


def test_what_another_rank_could_not_do_is_known(alone):
    others = SimpleNamespace(gather=lambda value, what: [value, "no memory there"])
    assert str(alone._try_to_grow(1 << 12, others)) == "no memory there"


def test_what_another_thread_has_taken_is_not_taken_again(alone):
    assert [alone._take(0, 512, nbytes) for nbytes in (1024, 1024, 512)] == [True, False, False] and alone.in_use == 1024


def test_living_ranks_are_not_taken_for_dead():
    run_ranks(nobody_died, 4)


def test_a_process_that_has_got_the_number_of_a_dead_rank():
    board, head = object.__new__(calls.CallBoard), [0, os.getpid(), calls._process(os.getpid())[1], 0]
    board._heads = [head]
    assert board._process_state(0) != ""
    head[calls._SINCE] -= 1
    assert board._process_state(0) == ""


@pytest.mark.parametrize("begun_on", (0, 1))
def test_nvshmem_is_called_on_the_device_of_the_rank(monkeypatch, begun_on):
    """Whatever device the caller's thread has by then, as where a call grows the heap or another thread ends the world."""
    now, on = [begun_on], []

    @contextlib.contextmanager
    def device(wanted):
        before, now[0] = now[0], wanted.index
        yield
        now[0] = before

    def called(name, result=None):
        return lambda *args, **how: on.append((name, now[0])) or result

    core = SimpleNamespace(tensor=called("malloc", torch.zeros(512, dtype=torch.uint8)), free_tensor=called("free"))
    core.finalize = called("finalize")
    modules = {"nvshmem": SimpleNamespace(core=core), "nvshmem.core": core, "nvshmem.bindings": SimpleNamespace(ptr=None)}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: now[0], raising=False)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(cuda.driver, "destroy_stream", called("destroy"))
    executor = object.__new__(cuda.CudaExecutor)
    executor.device, executor._posts, executor.far_posts = torch.device("cuda", 1), 8, 9
    executor._threads = threading.local()
    executor._threads.known = True
    control = SimpleNamespace(rank=0, size=1, nodes=[[0]], node=0, agree=lambda *args: None)
    segment = executor.make_segment(512, control)
    segment.close()
    executor.stop()
    assert on == [(name, 1) for name in ("malloc", "free", "destroy", "destroy", "finalize")] and now == [begun_on]


@pytest.mark.parametrize(("error", "freed"), ((RuntimeError, 1), (PeerTimeout, 0)))
def test_a_segment_that_a_rank_cannot_reach_is_freed(monkeypatch, error, freed):
    """By all ranks, as to free is collective: so not where one of them may be gone."""
    done = []
    tensor = torch.zeros(512, dtype=torch.uint8)
    core = SimpleNamespace(tensor=lambda shape, dtype: tensor, free_tensor=done.append)
    modules = {"nvshmem": SimpleNamespace(core=core), "nvshmem.core": core}
    modules["nvshmem.bindings"] = SimpleNamespace(ptr=lambda address, pe: 0)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)

    def agree(what, arguments, mine):
        if what == "reaching the peers' memory":
            assert "cannot reach the memory of ranks [1]" in str(mine)
            raise error("said together")

    control = SimpleNamespace(rank=0, size=2, nodes=[[0, 1]], node=0, agree=agree)
    with pytest.raises(error, match="said together"):
        nvshmem.NvshmemSegment(512, control, contextlib.nullcontext)
    assert len(done) == freed


def test_without_nvshmem_it_says_what_to_install(monkeypatch):
    """From the repository: fluxlike is on no index."""
    monkeypatch.setitem(sys.modules, "nvshmem", None)

    def agree(what, value, error):
        raise error

    with pytest.raises(RuntimeError, match=r"pip install -e '\.\[cu13\]' \(or cu12\) at the root of the repository"):
        nvshmem.start(torch.device("cuda", 0), SimpleNamespace(agree=agree), one_host=True)


def raises(what, arguments, error=None):
    """`ControlGroup.agree` of one rank."""
    if error is not None:
        raise error


def pretend(monkeypatch, core):
    """``core`` in the place of nvshmem.core; returns what is in that of cuda.core."""
    devices = SimpleNamespace(Device=lambda index: SimpleNamespace(set_current=lambda: None))
    for package, inside in (("nvshmem", core), ("cuda", devices)):
        monkeypatch.setitem(sys.modules, package, SimpleNamespace(core=inside))
        monkeypatch.setitem(sys.modules, f"{package}.core", inside)
    return devices


def empty_id(empty):
    return SimpleNamespace(_data=numpy.zeros(4, numpy.uint8))


def test_nvshmem_that_does_not_start_on_a_rank(monkeypatch):
    """The other ranks learn of it where they meet."""

    def no_interface(empty):
        raise OSError("no interface is up")

    pretend(monkeypatch, SimpleNamespace(get_unique_id=no_interface))
    with pytest.raises(RuntimeError, match=r"cannot be started \(OSError: no interface is up\); see `python -m fluxlike doctor`"):
        nvshmem.start(torch.device("cuda", 0), SimpleNamespace(rank=0, agree=raises), one_host=True)
    assert not nvshmem._set


def test_settings_of_nvshmem_are_those_of_one_start(monkeypatch):
    """A start for one host, then for several: what the first one set would keep the second from the network."""
    seen = []
    core = SimpleNamespace(get_unique_id=empty_id, finalize=lambda: None)
    core.init = lambda **how: seen.append({name: os.environ.get(name) for name in nvshmem._ONE_HOST})
    devices = pretend(monkeypatch, core)
    for name in (*nvshmem._ONE_HOST, *nvshmem._DEFAULTS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "mine")
    control = SimpleNamespace(rank=0, size=1, agree=raises, gather=lambda value, what: [value])
    before = dict(os.environ)
    nvshmem.start(torch.device("cuda", 0), control, one_host=True)
    nvshmem.stop()
    assert dict(os.environ) == before
    with pytest.raises(RuntimeError, match="no device"), monkeypatch.context() as patch:
        patch.setattr(devices, "Device", lambda index: (_ for _ in ()).throw(RuntimeError("no device")))
        nvshmem.start(torch.device("cuda", 0), control, one_host=True)
    assert dict(os.environ) == before
    nvshmem.start(torch.device("cuda", 0), control, one_host=True)
    os.environ["NVSHMEM_REMOTE_TRANSPORT"] = "ibrc"  # by the user, meanwhile
    nvshmem.stop()
    assert dict(os.environ) == before | {"NVSHMEM_REMOTE_TRANSPORT": "ibrc"}
    del os.environ["NVSHMEM_REMOTE_TRANSPORT"]
    with pytest.raises(RuntimeError, match="no end"), monkeypatch.context() as patch:
        nvshmem.start(torch.device("cuda", 0), control, one_host=True)
        patch.setattr(core, "finalize", lambda: (_ for _ in ()).throw(RuntimeError("no end")))
        nvshmem.stop()
    assert dict(os.environ) == before
    seen.pop()
    nvshmem.start(torch.device("cuda", 0), control, one_host=False)
    mine = {"NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "mine"}
    assert seen[:2] == [nvshmem._ONE_HOST | mine] * 2 and seen[2] == dict.fromkeys(nvshmem._ONE_HOST) | mine
    nvshmem.stop()


def is_free(folder, how):
    """Whether another program could have the lock."""
    file = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    return True


@pytest.mark.parametrize(("ranks", "rank"), ((1, 0), (2, 0), (2, 1)))
def test_programs_whose_ranks_share_gpus_start_nvshmem_in_turn(monkeypatch, tmp_path, ranks, rank):
    """NVSHMEM gives the file through which their ranks meet the same name in all of them."""
    seen = []

    def now(*_, **__):
        seen.append((is_free(tmp_path, fcntl.LOCK_EX), is_free(tmp_path, fcntl.LOCK_SH)))

    pretend(monkeypatch, SimpleNamespace(get_unique_id=empty_id, init=now, finalize=now))
    monkeypatch.setattr(nvshmem, "_SHARED", str(tmp_path))
    monkeypatch.setenv("FLUXLIKE_RANKS_PER_GPU", str(ranks))
    control = SimpleNamespace(rank=rank, size=2, agree=raises, gather=lambda value, what: (now(), [value])[1])
    nvshmem.start(torch.device("cuda", 0), control, one_host=True)
    assert seen == [(ranks == 1 or rank == 1,) * 2] * 2  # rank 0 has it before it says the id without which nobody starts
    now()
    nvshmem.stop()
    assert seen[2:] == [(True, True), (ranks == 1, True)]
    now()
    assert seen[-1] == (True, True) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("limit", (0.2, 20))
def test_a_turn_is_waited_for_no_longer_than_ranks_wait(monkeypatch, caplog, tmp_path, limit):
    """A lock that another program holds on to is gone past behind half of the limit, and that is told; one given up is taken."""
    monkeypatch.setattr(nvshmem, "_SHARED", str(tmp_path))
    monkeypatch.setenv("FLUXLIKE_RANKS_PER_GPU", "2")
    monkeypatch.setenv("FLUXLIKE_TIMEOUT_S", str(limit))
    other = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    if limit > 1:
        threading.Timer(0.1, os.close, (other,)).start()
    start = time.monotonic()
    with nvshmem._turn(fcntl.LOCK_EX):
        assert 0.09 < time.monotonic() - start < 9
        assert not is_free(tmp_path, fcntl.LOCK_SH)
    assert ("status 255, start programs whose ranks share a GPU one after the other" in caplog.text) == (limit < 1)
    if limit < 1:
        os.close(other)
    assert is_free(tmp_path, fcntl.LOCK_EX)

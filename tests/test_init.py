"""fluxlike.init leaves nothing behind when it fails, and says what is wrong; and where it runs. What it refuses: test_errors."""

import contextlib
import gc
import logging
import os
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import RSCase
from ranks import rows_slice, run_fresh
from test_errors import refuses

import fluxlike
from fluxlike.runtime import cuda, racecheck, world
from fluxlike.runtime.control import ControlGroup

TOO_LARGE = {"heap": "shm", "heap_bytes": 1 << 50}


def failing_inits(group, port, checked):
    """Of a torch.distributed that it starts itself, too: nothing is left, no connection and no checker, and the next one works."""
    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.destroy_process_group()
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", FLUXLIKE_LOG="loud")
    refuses(fluxlike.init, ValueError, "FLUXLIKE_LOG='loud'", "WARNING")
    assert not dist.is_initialized()
    del os.environ["FLUXLIKE_LOG"]
    os.environ["FLUXLIKE_RACECHECK"] = str(int(checked))
    # found with the connections made, and with the checker running
    for how, kind, word in (({"heap": "disk"}, ValueError, "'disk'"), (TOO_LARGE, RuntimeError, "smaller heap_bytes")):
        refuses(partial(fluxlike.init, **how), kind, word)
        assert not fluxlike.is_initialized() and not dist.is_initialized() and racecheck.active() is None
        assert not [thing for thing in gc.get_objects() if type(thing) is ControlGroup and thing._gloo is not None]
    fluxlike.init(heap="shm", heap_bytes=4 << 20)
    assert (racecheck.active() is not None) == checked
    with fluxlike.create_gemm_rs_context(24, 12, dtype=torch.float32) as ctx:
        RSCase(23, 12, [8] * 2, torch.float32, 1).check(ctx, None, ctx.choose(ctx.problem(23, 12, 0)).transport)
    fluxlike.finalize()
    assert not dist.is_initialized()


def comes_late(group, port):
    """Rank 1 comes to the second attempt of rank 0, which the first has told who was missing, and when."""
    rank = dist.get_rank()
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.destroy_process_group()
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True")
    world.STARTING_S = 1.0 if rank == 0 else 60.0
    if rank == 0:
        since = time.monotonic()
        refuses(lambda: fluxlike.init(heap="shm"), fluxlike.PeerTimeout, "not every rank of 2 came within 1 s, not ranks [1];")
        assert time.monotonic() - since < 20 and not dist.is_initialized()
        world.STARTING_S = 60.0
    else:
        time.sleep(4)
    fluxlike.init(heap="shm", heap_bytes=4 << 20)
    assert fluxlike.all_reduce(torch.ones(2)).tolist() == [2.0, 2.0]
    fluxlike.finalize()


def test_a_rank_that_never_comes():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for outcome in run_fresh(comes_late, 2, {"FLUXLIKE_TIMEOUT_S": "1"}, port=store.port):
        assert outcome.ok, str(outcome)


def test_who_has_given_up_is_not_taken_for_waiting(monkeypatch):
    monkeypatch.setattr(world, "STARTING_S", 0.1)
    monkeypatch.setenv("FLUXLIKE_TIMEOUT_S", "0.1")
    store = dist.HashStore()
    for rank in range(2):
        refuses(lambda: world._await_all(store, rank, 2), fluxlike.PeerTimeout, f"not ranks [{1 - rank}];")  # noqa: B023


@pytest.mark.parametrize("checked", (False, True))
def test_init_works_after_inits_that_failed(checked):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun has it: one for all that comes
    for outcome in run_fresh(failing_inits, 2, {"FLUXLIKE_TIMEOUT_S": "60"}, port=store.port, checked=checked):
        assert outcome.ok, str(outcome)


LAUNCHER = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
NO_NUMBERS = (
    ("MASTER_PORT", ("x", "65536", "-1", "1.5"), "from 0 to 65535"),
    ("RANK", ("one", "2", "-1"), "below 2, the WORLD_SIZE"),
    ("WORLD_SIZE", ("two", "0", "-2"), "above 0"),
)


@pytest.mark.parametrize(("name", "values", "rule"), NO_NUMBERS)
def test_numbers_of_a_launcher_that_are_none(monkeypatch, name, values, rule):
    for other, value in LAUNCHER.items():
        monkeypatch.setenv(other, value)
    monkeypatch.setattr(world, "rendezvous", None)
    for value in values:
        monkeypatch.setenv(name, value)
        remedies = "scripts/launch.sh or torchrun", "torch.distributed.init_process_group before fluxlike.init"
        refuses(lambda: world._init_torch("shm"), ValueError, f"{name}={value!r} is not a whole number {rule}; ", *remedies)
    monkeypatch.setenv(name, "")
    refuses(lambda: world._init_torch("shm"), RuntimeError, f"and {name} is not set; ", *remedies)


def test_numbers_of_a_launcher_with_blanks_are_taken(monkeypatch):
    """As torch takes them."""
    for name, value in LAUNCHER.items():
        monkeypatch.setenv(name, f" {value} ")
    world._check_launcher()


@pytest.mark.parametrize(("local_rank", "takes"), (("1", 1), (None, 0), ("2", None), ("one", None), ("-1", None)))
def test_local_rank_is_a_gpu(monkeypatch, local_rank, takes):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("FLUXLIKE_RANKS_PER_GPU", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    if takes is None:
        refuses(world._local_gpu, ValueError, f"LOCAL_RANK={local_rank!r}", "below 2", "CUDA_VISIBLE_DEVICES")
    else:
        assert world._local_gpu() == takes


SHARING = (("2", "3", 1), ("2", "2", 1), ("2", "1", 0), ("2", "4", "below 4"), ("0", "0", "above 0"))


@pytest.mark.parametrize(("sharing", "local_rank", "takes"), SHARING)
def test_ranks_that_share_a_gpu(monkeypatch, sharing, local_rank, takes):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("FLUXLIKE_RANKS_PER_GPU", sharing)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    if isinstance(takes, str):
        refuses(world._local_gpu, ValueError, takes)
    else:
        assert world._local_gpu() == takes


TWO_AND_ONE = [("GPU-a", 1), ("GPU-b", 1), ("GPU-a", 1)]
TOLD = ("ranks [4, 8] are on one GPU (GPU-a)", "FLUXLIKE_RANKS_PER_GPU is 1", "set_device(LOCAL_RANK)", "FLUXLIKE_RANKS_PER_GPU=2")


def test_ranks_on_one_gpu_that_do_not_say_so(caplog):
    """As where a program does not choose its GPU: all are on the first, and kernels of one would keep out the other's copies."""
    refuses(lambda: cuda.check_places([4, 6, 8], TWO_AND_ONE), ValueError, *TOLD)
    cuda.check_places([4, 6, 8], [(gpu, 2) for gpu, _ in TWO_AND_ONE])
    cuda.check_places([4, 6], TWO_AND_ONE[:2])
    cuda.warn_of_places(TWO_AND_ONE[:2])
    cuda.warn_of_places([("GPU-a", 2), ("GPU-a", 2), ("GPU-b", 2)])
    assert not caplog.records
    cuda.warn_of_places([("GPU-a", 2), ("GPU-b", 2)])
    assert "is 2 and every rank has a GPU to itself" in caplog.text
    differ = [("GPU-a", 2), ("GPU-a", 2), ("GPU-b", 1)]
    refuses(lambda: cuda.check_places([4, 6, 8], differ), ValueError, "is 2 on rank 4 and 1 on rank 8", "set one on all")


def elsewhere(group, schedules):
    """A default device is for what a program makes itself: here "meta", as "cuda" would be beside what we hold on the CPU.

    So is a default dtype; and with deterministic algorithms new memory is NaN.
    """
    rank, ranks = group.rank(), group.size()
    x, w, t = (torch.arange(rows * 8).reshape(rows, 8).float() % 5 - 2 for rows in (6, 8, 6))
    rows = rows_slice(6, ranks, rank)
    shard, ids = x[rows], torch.tensor([1, 4, 1])
    sparse = torch.sparse_coo_tensor(ids[None], t[:3], (6, 8))
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    with torch.device("meta"):
        fluxlike.init(heap="shm")
        products = []
        for schedule in schedules:
            with (
                fluxlike.create_gemm_rs_context(6, 8, dtype=torch.float32, schedule=schedule) as rs,
                fluxlike.create_ag_gemm_context(6, 8 * ranks, 8, torch.float32, schedule=schedule) as ag,
            ):
                products += [(fluxlike.gemm_rs(x, w, rs), fluxlike.ag_gemm(shard, w, ag, m=6)) for _ in range(2)]
        pairs = [(fluxlike.gemm_rs(x, w), fluxlike.reference.gemm_rs(x, w))]
        pairs += [(fluxlike.ag_gemm(shard, w, m=6), fluxlike.reference.ag_gemm(shard, w, m=6))]
        if schedules != ("auto",):  # across nodes there are two operations
            for algo in ("one_shot", "two_shot", "bulk", "trees"):
                pairs += [(y, ranks * t) for y in fluxlike.all_reduce([t, t], algo=algo)]
            pairs += [(fluxlike.all_gather(shard, m=6), x), (fluxlike.broadcast(t, 1), t)]
            pairs += [(fluxlike.reduce_scatter(t), ranks * t[rows])]
            pairs += [(fluxlike.gemm_ar(x, w), ranks * (x @ w.T))]
            for mode in ("exact", "padded"):
                pairs += [(fluxlike.sparse_all_reduce(sparse, mode=mode, max_nnz=3).to_dense(), ranks * sparse.to_dense())]
            pairs += [(fluxlike.reference.sparse_all_reduce(sparse).to_dense(), ranks * sparse.to_dense())]
        fluxlike.finalize()
    pairs += [(y, (ranks * x @ w.T)[rows]) for y, _ in products] + [(z, x @ w.T) for _, z in products]
    for number, (got, right) in enumerate(pairs):
        assert got.device.type == "cpu" and torch.equal(got, right), number


@pytest.mark.parametrize("nodes", (1, 2))
def test_another_default_device(nodes):
    schedules = ("copy_engine", "in_kernel", "sequential", "stream_k") if nodes == 1 else ("auto",)
    env = {"FLUXLIKE_RACECHECK": str(2 - nodes), "FLUXLIKE_TOPOLOGY": "nvswitch-2", "FLUXLIKE_VIRTUAL_NODES": str(nodes)}
    for outcome in run_fresh(elsewhere, 2, env, schedules=schedules):
        assert outcome.ok, str(outcome)


def inside(group):
    """The program is in inference mode when it begins, as a server is; calls are made inside and outside of it."""
    x, w = torch.ones(8, 8), torch.ones(8, 8)
    with torch.inference_mode():
        fluxlike.init(heap="shm", heap_bytes=4 << 20)
        for _ in range(2):
            y = fluxlike.gemm_rs(x, w), fluxlike.ag_gemm(x[:4], w)
            assert y[0].is_inference() and torch.equal(y[0], 2 * (x @ w)[:4]) and torch.equal(y[1], x @ w)
        large = fluxlike.create_gemm_rs_context(4096, 512, dtype=torch.float32)  # for which the heap grows
    for ctx in (None, large):
        assert torch.equal(fluxlike.gemm_rs(x, w, ctx), 2 * (x @ w)[:4])
    fluxlike.finalize()


@pytest.mark.parametrize("nodes", (1, 2))
def test_in_inference_mode(nodes):
    for outcome in run_fresh(inside, 2, {"FLUXLIKE_VIRTUAL_NODES": str(nodes)}):
        assert outcome.ok, str(outcome)


def exits(group, code):
    """What finalize logs in the ``finally`` of a program that ends by sys.exit."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("fluxlike").addHandler(handler)
    fluxlike.init(heap="shm", heap_bytes=4 << 20)
    with pytest.raises(SystemExit):
        try:
            sys.exit(code)
        finally:
            fluxlike.finalize()
    return said


@pytest.mark.parametrize("code", (None, 0, 3, "a wrong argument"))
def test_what_finalize_says_when_a_program_exits(code):
    for outcome in run_fresh(exits, 2, code=code):
        assert outcome.ok, str(outcome)
        if not code:
            assert outcome.value == []
        else:
            (line,) = outcome.value
            assert f"SystemExit: {code}; before this rank goes on, fluxlike.finalize waits up to" in line


#: In the names of threads of a group; before torch 2.11 they have none of their own, and no other thread comes or goes here.
GLOO = "" if torch.__version__ < "2.11" else "gloo"


def gloo_threads(of=GLOO):
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended since
            names.append(Path(f"/proc/self/task/{task}/comm").read_text())
    return sum(of in name for name in names)


def shares(group):
    """How many threads that wake a hundred times a second there are more with each of three groups, and with all closed."""
    groups, x = [dist.new_group() for _ in range(3)], torch.ones(6, 8)
    found = [gloo_threads("gloo_tcp")]
    fluxlike.init(group, heap="shm", heap_bytes=4 << 20)
    for other in (*groups, None):
        fluxlike.all_reduce(x, group=other)
        found.append(gloo_threads("gloo_tcp"))
    fluxlike.finalize()
    return [count - found[0] for count in (*found[1:], gloo_threads("gloo_tcp"))]


def uneven(group):
    """Threads of gloo that a refused group leaves, and descriptors."""
    other = dist.new_group([0, 1, 2])
    fluxlike.init(heap="shm", heap_bytes=4 << 20)
    gc.collect()
    gc.disable()
    before = gloo_threads(), len(os.listdir("/proc/self/fd"))
    for _ in range(3 if group.rank() < 3 else 0):
        with pytest.raises(ValueError, match="as many ranks"):
            fluxlike.all_reduce(torch.ones(3), group=other)
    left = gloo_threads() - before[0], len(os.listdir("/proc/self/fd")) - before[1]
    fluxlike.finalize()
    return left


def test_nothing_is_left_of_a_group_that_is_refused():
    for outcome in run_fresh(uneven, 4, {"FLUXLIKE_VIRTUAL_NODES": "2"}):
        assert outcome.ok and outcome.value == (0, 0), str(outcome)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="gloo's threads have no names before torch 2.13")
def test_groups_share_a_thread_of_gloo():
    for outcome in run_fresh(shares, 2):
        assert outcome.ok and outcome.value == [1, 1, 1, 1, 0], str(outcome)


def ends(group, how):
    """Torch's groups end when torch ends them, whatever of fluxlike is still there: what a user keeps, cycles, a failed call."""
    before, kept = gloo_threads(), []
    gc.disable()
    whole, other = dist.new_group(), dist.new_group()
    assert gloo_threads() > before
    fluxlike.init(whole, heap="shm", heap_bytes=4 << 20)
    x, w = torch.ones(6, 8), torch.ones(8, 8)
    kept += [world.current(), fluxlike.create_gemm_rs_context(6, 8, dtype=torch.float32)]
    for _ in range(2):
        kept += [fluxlike.gemm_rs(x, w, kept[1]), fluxlike.gemm_rs(x, w, group=other), fluxlike.all_reduce(x, group=other)]
    if how == "failed":
        with pytest.raises(ValueError, match="make the same calls") as error:
            fluxlike.gemm_rs(torch.ones(4 + 2 * group.rank(), 8), w, kept[1])
        kept.append(error.value)
    fluxlike.finalize()
    whole = other = dist.destroy_process_group(whole) or dist.destroy_process_group(other)
    return gloo_threads() - before


@pytest.mark.parametrize("how", ("well", "failed", "checked"))
def test_nothing_keeps_torch_groups_alive(how):
    for outcome in run_fresh(ends, 2, {"FLUXLIKE_RACECHECK": str(int(how == "checked"))}, how=how):
        assert outcome.ok and outcome.value == 0, str(outcome)


def mapped_after_finalize(group):
    """Mappings of boards and of the heap, before and after finalize, where Python collects no garbage between."""
    found = []
    gc.collect()
    gc.disable()
    for calls in (False, True):
        fluxlike.init(heap="shm", heap_bytes=4 << 20)
        ctx = fluxlike.create_gemm_rs_context(24, 12, dtype=torch.float32)
        if calls:
            fluxlike.gemm_rs(*[torch.ones(4, 4, device="cpu") for _ in range(2)])
        ctx.close()
        del ctx
        found.append(Path("/proc/self/maps").read_text().count("fluxlike-"))
        fluxlike.finalize()
        found.append(Path("/proc/self/maps").read_text().count("fluxlike-"))
    return found


def test_mappings_go_with_finalize():
    """Not with the next collection of garbage: the heap may be large."""
    for outcome in run_fresh(mapped_after_finalize, 2):
        assert outcome.value and outcome.value[1::2] == [0, 0] and min(outcome.value[::2]) > 0, str(outcome)


def test_a_python_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(RuntimeError, match=r"needs Triton 3.6 to 3.9, .* pip install 'triton>=3.6,<3.10'"):
        fluxlike.init()

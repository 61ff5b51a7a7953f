"""What a program does to its own rank: closing twice, forking, threads, an interrupt that is caught. On GPUs under torchrun."""

import contextlib
import gc
import os
import signal
import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from cases import TRANSPORTS
from faults import OPS, call, make_context, told, works
from interp import interrupt_when
from ranks import TORCHRUN, device, run_fresh, run_ranks

import fluxlike
from fluxlike.ops import making
from fluxlike.ops.spinning import _waits as waits
from fluxlike.runtime import calls, programs, world

SOON_S = 30.0


def closes_twice(group):
    """Also inside the ``with`` that closes it, and after the end of it."""
    for op in OPS:
        with make_context(op, "copy_engine", group) as ctx:
            call(ctx, 1)
            ctx.close()
            ctx.close()
            for act in (partial(call, ctx, 2), ctx.check, partial(ctx.record, M=1), ctx.begin("mine").__enter__):
                said, _ = told(act, RuntimeError)
                assert f"{op}: this context is closed" in said and f"create_{op}_context" in said, said
        ctx.close()
    works(group)


def test_a_context_closed_twice():
    run_ranks(closes_twice, 3)


class Closing(making.Held):
    group_ranks, rank = (0,), 0

    def close(self):
        raise ValueError("the ranks differ")


def test_what_closing_finds_out_hides_no_error(caplog):
    with pytest.raises(KeyError), Closing():
        raise KeyError
    assert caplog.messages == ["rank 0: the ranks differ"]
    with pytest.raises(ValueError, match="the ranks differ"), Closing():
        pass


def launches_outside(group):
    """A kernel of the program's own is launched in a call, of which the peers know, or not at all."""
    with make_context("gemm_rs", "in_kernel", group) as ctx:
        ctx.start("in_kernel")  # no `with`, so it begins nothing
        said, _ = told(lambda: ctx.launch(None, 1, (), {}, None), RuntimeError)
        assert "gemm_rs: a launch outside of a call" in said and "`with ctx.start(...)`" in said and not ctx.stats["launches"], said
        call(ctx, 1)
        assert ctx.stats["calls"] == 1
    works(group)


def test_a_launch_outside_of_a_call():
    run_ranks(launches_outside, 2)


def wait_for(pid: int) -> int:
    """The exit code of a child, which must end within `SOON_S`."""
    deadline = time.monotonic() + SOON_S
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError("the forked child did not end")
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(ended[1])


def in_a_child(act) -> None:
    """``act()`` in a forked child. What it says goes to the parent."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            act()
            os.write(theirs, b"fine")
        except BaseException as error:
            os.write(theirs, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(theirs)
    try:
        assert wait_for(pid) == 0
        said = os.read(ours, 10000).decode()
    finally:
        os.close(ours)
    assert said == "fine", f"in the child: {said}"


@contextlib.contextmanager
def held_by_a_thread(lock):
    """As by one that is in a call."""
    begun, done = threading.Event(), threading.Event()

    def hold():
        with lock:
            begun.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()


def on_the_board(ctx) -> bytes:
    """What this rank has told the others."""
    start = ctx.board._starts[ctx.board._me]
    return bytes(ctx.board._memory[start : start + calls._BOARD])


def forks(group):
    """A child can use nothing, and neither closing nor dropping what it got frees, ends or hangs anything."""
    gc.collect()  # what other tests left: torch's destructor of a CUDA graph would end the child that collects it
    ctx, parent = make_context("gemm_rs", "copy_engine", group), os.getpid()
    x = torch.ones(8, 64, device=device())
    call(ctx, 1)

    def refused():
        assert not fluxlike.is_initialized()
        acts = (
            lambda: fluxlike.gemm_rs(x, x, ctx),
            lambda: fluxlike.ag_gemm(x, x, group=group),
            lambda: make_context("gemm_rs", "in_kernel", group),
            lambda: ctx.begin("in_kernel").__enter__(),
            ctx.check,
            fluxlike.init,
        )
        for act in acts:
            said, _ = told(act, RuntimeError)
            forked = f"process {os.getpid()} was forked from rank {dist.get_rank()} (process {parent})"
            for word in (forked, "get_context('spawn')"):
                assert word in said, said

    def closed():
        with ctx:
            pass
        ctx.close()
        fluxlike.finalize()

    def dropped():
        nonlocal ctx
        fluxlike.finalize()
        world._world = ctx = None
        gc.collect()

    for act in (refused, closed, dropped):
        said = on_the_board(ctx)
        with held_by_a_thread(ctx.control.lock):  # which in the child nobody gives back
            in_a_child(act)
        assert on_the_board(ctx) == said, "the child said something in the name of the rank"
        call(ctx, 2)
    assert fluxlike.is_initialized()
    ctx.close()
    works(group)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child():
    run_ranks(forks, 2)


def at_once(*acts) -> list[BaseException]:
    """Every act in a thread of its own, started in this order, and what they raised."""
    errors: list[BaseException] = []

    def run(act):
        try:
            act()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(act,), daemon=True) for act in acts]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join(90)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    return errors


def share_a_context(group, schedule):
    """Threads of each rank make the same calls on one context, and without one: they take turns."""
    with make_context("gemm_rs", schedule, group) as ctx:
        before = ctx.stats["calls"]
        errors = at_once(*[lambda: [call(ctx, 7) for _ in range(4)]] * 3)
        assert not errors, errors
        assert ctx.stats["calls"] - before == 12
    x, size = torch.ones(8, 16, device=device()), dist.get_world_size(group)

    def without():
        for _ in range(3):
            y = fluxlike.gemm_rs(x, x, group=group)
            assert y.eq(16 * size).all()

    errors = at_once(without, without)
    assert not errors, errors


@pytest.mark.parametrize("schedule", TRANSPORTS)
def test_threads_on_one_context(schedule):
    run_ranks(share_a_context, 2, schedule=schedule)


_groups: list = []


def one_group_each(group):
    """Each thread has a group, and every other rank starts them the other way round: none waits for another's turn."""
    if not _groups:
        _groups.extend([dist.new_group([0, 1, 2, 3]), dist.new_group([0, 1, 2, 3])])
    made = [make_context(op, schedule, g) for op, schedule, g in zip(OPS, TRANSPORTS, _groups, strict=True)]
    acts = [lambda ctx=ctx: [call(ctx, seed) for seed in range(5)] for ctx in made]
    errors = at_once(*(acts if dist.get_rank() % 2 else reversed(acts)))
    assert not errors, errors

    def life(g, op):
        for seed in range(3):
            with make_context(op, "in_kernel", g) as ctx:
                call(ctx, seed)

    errors = at_once(partial(life, _groups[0], "gemm_rs"), partial(life, _groups[1], "ag_gemm"))
    assert not errors, errors
    for ctx in made:
        ctx.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels that take all of a GPU run in one order, which the ranks must share")
def one_new_group(group):
    """Two threads of each rank make the first call on a group."""
    fluxlike.init(heap="shm", heap_bytes=1 << 20)
    both, found = dist.new_group(), []
    time.sleep(0.5 * dist.get_rank())  # the first rank's threads have both begun
    assert not at_once(*[lambda: found.append(world.current().control_of(both))] * 2)
    fluxlike.finalize()
    return found[0] is found[1]


def test_threads_that_connect_one_group():
    for outcome in run_fresh(one_new_group, 2, {"FLUXLIKE_TIMEOUT_S": "5"}):
        assert outcome.ok and outcome.value, str(outcome)


def test_threads_on_two_groups():
    run_ranks(one_group_each, 4, makes_groups=True)


def another_order(group):
    """Two threads, two contexts of one group, and the ranks begin with different ones: an error on all, no wrong result."""
    made = [make_context(op, "in_kernel", group) for op in OPS]
    for ctx in made:
        call(ctx, 1)
    dist.barrier(group)
    acts = [partial(call, ctx, 2) for ctx in (made if dist.get_rank(group) == 0 else reversed(made))]
    board = made[0].board
    since, before = time.monotonic(), board._number

    def second():
        while board._number == before and time.monotonic() - since < SOON_S:
            time.sleep(0.01)
        acts[1]()

    errors = at_once(acts[0], second)
    assert time.monotonic() - since < SOON_S
    assert len(errors) == 2 and all(isinstance(error, ValueError) for error in errors), errors
    for error in errors:
        for word in ("(gemm_rs, float32", "(ag_gemm, float32", "in the same order"):
            assert word in str(error), str(error)
    for ctx in made:
        ctx.close()
    works(group)


def test_threads_in_another_order():
    run_ranks(another_order, 2)


def interrupted_meeting(group):
    """Ctrl-C while a rank waits for the others to make a context, caught: at once, and the ranks come into step again."""
    rank = dist.get_rank(group)
    works(group)
    if rank == 0:
        control = world.current().control_of(group)
        interrupt = interrupt_when(lambda: control.board.awaits(), after=0.3)
        said, _ = told(partial(make_context, "gemm_rs", "in_kernel", group), KeyboardInterrupt)
        assert said.startswith("KeyboardInterrupt") and time.monotonic() - interrupt.sent_at < 3
    dist.barrier(group)
    if rank != 0:
        time.sleep(1)  # rank 0 has begun to meet again
    turns = [told(partial(works, group), RuntimeError, ValueError) for _ in range(4)]
    assert not turns[-1][0] and all(took < SOON_S for _, took in turns), turns


def test_an_interrupt_in_a_meeting():
    run_ranks(interrupted_meeting, 2)


def catches(group):
    """Ctrl-C in a wait, caught: this context is of no more use, the peers are told, new ones work."""
    rank = dist.get_rank(group)
    ctx = make_context("ag_gemm", "copy_engine", group)
    call(ctx, 1)
    dist.barrier(group)
    if rank == 0:
        before = dict(waits)
        interrupt_when(lambda: waits != before, after=0.1)
        said, took = told(partial(call, ctx, 2), KeyboardInterrupt)
        dist.barrier(group)
        assert said.startswith("KeyboardInterrupt") and took < SOON_S
        said, _ = told(partial(call, ctx, 2), RuntimeError)
        assert "ag_gemm: an earlier call of this context was ended by KeyboardInterrupt" in said, said
    else:
        dist.barrier(group)
        said, took = told(lambda: [call(ctx, seed) for seed in (2, 3, 4)], RuntimeError)  # call 2 may have all it needs
        assert "because rank 0 gave up first" in said and took < SOON_S, said
    assert "make a new one" in said
    ctx.close()
    works(group)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's host waits for a kernel in CUDA, where Python cannot interrupt it")
def test_a_caught_interrupt():
    run_ranks(catches, 2)


def handles_signals(group):
    """A signal comes within the kernel of a call, and its handler makes another, or a context, or takes away what the kernel works
    with. All of it is refused, and the ranks stay in step."""
    x, said, grid = torch.ones(64), [], programs.run_grid
    fluxlike.all_reduce(x, group)
    ctx = fluxlike.create_gemm_rs_context(8, 8, group=group)
    acts = {
        "all_reduce": lambda: fluxlike.all_reduce(x, group),
        f"close() of {ctx.label}": ctx.close,
        "fluxlike.finalize": fluxlike.finalize,
        "the making of a GemmRSContext": lambda: fluxlike.create_gemm_rs_context(8, 8, group=group),
    }

    def handler(number, frame):
        said.append([told(act, RuntimeError)[0] for act in acts.values()])

    def ringing(*args):
        signal.raise_signal(signal.SIGUSR1)
        grid(*args)

    before = signal.signal(signal.SIGUSR1, handler)
    programs.run_grid = ringing if dist.get_rank(group) == 0 else grid
    try:
        for _ in range(3):
            assert torch.equal(fluxlike.all_reduce(x, group), torch.full_like(x, 2.0))
    finally:
        programs.run_grid = grid
        signal.signal(signal.SIGUSR1, before)
    assert len(said) == 3 * (dist.get_rank(group) == 0)
    for each in said:
        for name, message in zip(acts, each, strict=True):
            assert f"RuntimeError: {name} was called from inside a kernel" in message and "handler of a signal" in message, message
    ctx.close()
    works(group)


@pytest.mark.skipif(TORCHRUN, reason="of kernels that are interpreted")
def test_the_handler_of_a_signal():
    run_ranks(handles_signals, 2)


def nobody_s_context(group):
    """A call without a context fails: no program has what could be closed, and it is told what helps, which does."""
    fluxlike.init(heap="shm")
    x, rank = torch.ones(64, 64), dist.get_rank(group)
    right = fluxlike.gemm_rs(x, x)
    dist.barrier(group)
    if rank == 0:
        for _ in range(2):
            said, took = told(lambda: fluxlike.gemm_rs(x, x), fluxlike.PeerTimeout)
            assert "waited 1 s for rank 1" in said and "Call fluxlike.finalize and fluxlike.init on all ranks" in said, said
            assert took < SOON_S and "Close the context" not in said, said
    dist.barrier(group)
    told(fluxlike.finalize, RuntimeError, ValueError)
    fluxlike.init(heap="shm")
    assert torch.equal(fluxlike.gemm_rs(x, x), right)


def test_what_is_said_where_no_program_has_the_context():
    outcomes = run_fresh(nobody_s_context, 2, {"FLUXLIKE_TIMEOUT_S": "1"})
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))

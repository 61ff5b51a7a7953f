"""finalize when something is wrong: everything is ended all the same, and nobody waits for longer than is said."""

import contextlib
import copy
import gc
import logging
import os
import pickle
import threading
import time
import traceback
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from faults import fresh, held, make_context, nothing_left_behind, start, told, works  # noqa: F401

import fluxlike
from fluxlike.runtime import world
from fluxlike.runtime.control import ControlGroup
from fluxlike.runtime.cpu import CpuCopyEngine
from fluxlike.runtime.errors import heard, is_heard, untraced

#: Of a meeting 3 s.
LIMIT = {"FLUXLIKE_TIMEOUT_S": "1"}


def engines() -> int:
    """Threads of copy engines that do not end by themselves: one that is abandoned is not waited for."""
    threads = [thread for thread in threading.enumerate() if thread.name == "fluxlike-copy-engine"]
    for thread in threads:
        thread.join(2 / len(threads))
    return sum(thread.is_alive() for thread in threads)


def logged() -> list[str]:
    """What is logged from now on."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("fluxlike").addHandler(handler)
    return lines


def device_fails(group, error, who):
    """Ranks cannot wait for their device, as after a bad kernel, or are interrupted there; contexts are open."""
    start()
    works(group)
    before = make_context("gemm_rs", "copy_engine"), fluxlike.all_reduce(torch.ones(8))
    if dist.get_rank() in who:

        def fails():
            raise error("an illegal memory access")

        world.current().executor.synchronize = fails
    world.current().heap.close = world.current().executor.stop = lambda: os._exit(4)  # collective, without a deadline
    lines = logged()
    said, took = told(fluxlike.finalize, RuntimeError, KeyboardInterrupt)
    assert len(who) < 2 or any("fluxlike.finalize: the device of ranks [0, 1] fails" in line for line in lines), lines
    alone = len(who) == 1 and error is RuntimeError
    assert not alone or any("rank 0 is at 'fluxlike.finalize', as its device fails, and rank 1" in line for line in lines), lines
    assert not fluxlike.is_initialized()
    del before
    _, _, maps = held()
    left = maps, engines()
    start()
    works(group)
    fluxlike.finalize()
    return said, took, left


def test_a_device_that_fails():
    for error, who in ((RuntimeError, (0,)), (RuntimeError, (0, 1)), (KeyboardInterrupt, (0,))):
        outcomes = fresh(device_fails, 2, LIMIT, error=error, who=who)
        for outcome in outcomes:
            assert outcome.ok, str(outcome)
            said, took, left = outcome.value
            assert took < 1 and left == (0, 0), outcome.value
            assert (said == f"{error.__name__}: an illegal memory access") == (outcome.rank in who), said


def device_fails_elsewhere(group):
    """The device of one rank fails in its finalize, while the others close a context: they are told why it does not."""
    start()
    ctx = make_context("gemm_rs", "in_kernel")
    fails = dist.get_rank() == 1

    def synchronize():
        raise RuntimeError("an illegal memory access")

    if fails:
        world.current().executor.synchronize = synchronize
    said, took = told(fluxlike.finalize if fails else ctx.close, RuntimeError, ValueError)
    if not fails:
        fluxlike.finalize()
    return said, took


def test_a_rank_whose_device_fails_is_named_to_those_that_close_a_context():
    for outcome in fresh(device_fails_elsewhere, 3, LIMIT):
        assert outcome.ok, str(outcome)
        said, took = outcome.value
        assert took < 1, outcome.value
        if outcome.rank == 1:
            assert said == "RuntimeError: an illegal memory access"
        else:
            there = "CallMismatch: rank 1 is at 'fluxlike.finalize', as its device fails, and rank 0 at 'closing context 1 ("
            assert said.startswith(there), said


def torch_ends_first(group):
    """In a ``finally`` behind an exception, torch's groups are ended before fluxlike."""
    start()
    works(group)
    try:
        raise KeyError("no such layer")
    except KeyError:
        dist.destroy_process_group()
        said, _ = told(fluxlike.finalize, Exception)
    return said, held()[2], engines()


def test_torch_s_groups_that_end_before_fluxlike():
    for outcome in fresh(torch_ends_first, 2, LIMIT):
        assert outcome.ok, str(outcome)
        assert outcome.value == ("", 0, 0), outcome.value


def makes_anew(group, store):
    """torch's groups end and others are made, by the same names, with fluxlike going on; then as it should be."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    start()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    fluxlike.all_reduce(torch.ones(8), group=pairs[rank // 2])
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    x = torch.full((8,), 10.0**rank)
    said, took = told(lambda: fluxlike.all_reduce(x, group=pairs[rank % 2]), RuntimeError)
    fluxlike.finalize()
    start()
    y = fluxlike.all_reduce(x, group=pairs[rank % 2])
    fluxlike.finalize()
    return said, took, y.tolist()


def test_groups_that_torch_has_made_anew(tmp_path):
    for outcome in fresh(makes_anew, 4, LIMIT, store=str(tmp_path / "store")):
        assert outcome.ok, str(outcome)
        said, took, y = outcome.value
        assert "was made after groups that fluxlike knows had ended; call fluxlike.finalize()" in said and took < 1, said
        assert y == [101.0 if outcome.rank % 2 == 0 else 1010.0] * 8


def uses_ended(group):
    """What is said of groups that torch has ended: never used, beside a context, of a layer, in training, and given to init."""
    start()
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    ctx = fluxlike.create_gemm_rs_context(8, 8, dtype=torch.float32)
    layer = fluxlike.nn.RowParallelLinear(8, 8, group=groups[1])
    x, h = torch.ones(8, 8), torch.ones(8, 4)
    y = layer(h)
    for one in groups:
        dist.destroy_process_group(one)
    acts = [lambda: fluxlike.all_reduce(x, groups[0]), lambda: fluxlike.gemm_rs(x, x, ctx, group=groups[0])]
    acts += [partial(copy.deepcopy, layer), partial(layer, h), y.sum().backward]
    said = [told(act, Exception)[0] for act in acts]
    works(group)
    fluxlike.finalize()
    return [*said, told(partial(fluxlike.init, groups[1], "shm"), Exception)[0]]


def test_groups_that_have_ended():
    for outcome in fresh(uses_ended, 2, LIMIT):
        assert outcome.ok, str(outcome)
        for said in outcome.value:
            assert said.startswith("RuntimeError: the torch group '") and "has ended, by torch.distributed" in said, outcome.value


def waits(group):
    """Rank 1 is busy elsewhere when rank 0 ends fluxlike, with contexts of four groups open."""
    start()
    groups = [dist.new_group([0, 1]) for _ in range(3)]
    for one in (None, *groups):
        fluxlike.all_reduce(torch.ones(8), group=one)
    dist.barrier()
    lines = logged()
    said, took = told(fluxlike.finalize, RuntimeError) if dist.get_rank() == 0 else ("", 0)
    limits = ["FLUXLIKE_TIMEOUT_S sets the limit" in line for line in lines]
    dist.barrier()
    fluxlike.finalize()
    start()
    works(group)
    fluxlike.finalize()
    return said, took, limits


def test_finalize_waits_once():
    for outcome in fresh(waits, 2, LIMIT):
        assert outcome.ok, str(outcome)
        said, took, limits = outcome.value
        assert limits == ([True, False, False, False, False] if outcome.rank == 0 else [])
        assert not said and (3 <= took < 4.5 or outcome.rank == 1), outcome.value


def ends_in_the_making(group, how):
    """A context is half made, its copy engine, too, when the program is interrupted or a peer dies."""
    start()
    rank, agree = dist.get_rank(), ControlGroup.agree

    def ends(self, what, *more):
        if what == "gemm_rs: memory of each rank":
            if how == "dies" and rank == 1:
                os._exit(3)
            agree(self, what, *more)
            raise KeyboardInterrupt
        agree(self, what, *more)

    ControlGroup.agree = ends
    said, _ = told(lambda: make_context("gemm_rs", "copy_engine"), KeyboardInterrupt, fluxlike.PeerTimeout)
    ControlGroup.agree = agree
    gc.collect()
    deadline = time.monotonic() + 2
    while engines() and time.monotonic() < deadline:
        time.sleep(0.01)
    left = engines()
    if how == "interrupt":
        works(group)
    assert world.current().heap.in_use, "memory was given back to which a peer may still write"
    fluxlike.finalize()
    return said.partition(":")[0], left, held()[2]


@pytest.mark.parametrize("how", ("interrupt", "dies"))
def test_a_making_that_ends_leaves_no_thread(how):
    for outcome in fresh(ends_in_the_making, 2, LIMIT, expect_dead=[1] if how == "dies" else [], how=how):
        if how == "dies" and outcome.rank == 1:
            continue
        assert outcome.ok, str(outcome)
        assert outcome.value == ("PeerTimeout" if how == "dies" else "KeyboardInterrupt", 0, 0), outcome.value


def ends_beside(group):
    """Rank 0 closes a context, then ends fluxlike, while another thread of it waits in a call for rank 1, which comes later."""
    start()
    x, said = torch.ones(8, 8), []
    fluxlike.gemm_rs(x, x)
    for ctx in (fluxlike.create_gemm_rs_context(8, 8, dtype=x.dtype), None):

        def call(ctx=ctx):
            said.append(fluxlike.gemm_rs(x, x, ctx)[0, 0].item())

        thread = threading.Thread(target=call)
        if dist.get_rank():
            time.sleep(0.4)
        thread.start()
        if dist.get_rank():
            thread.join()
        else:
            time.sleep(0.2)
        fluxlike.finalize() if ctx is None else ctx.close()
        thread.join()
    return said


def test_what_ends_while_another_thread_is_in_a_call():
    for outcome in fresh(ends_beside, 2):  # nobody waits in vain
        assert outcome.ok and outcome.value == [16, 16], str(outcome)


def ends_at_once(group):
    """Two threads end fluxlike at a time."""
    start()
    said = []
    threads = [threading.Thread(target=lambda: said.append(told(fluxlike.finalize, Exception)[0])) for _ in range(2)]
    with world.current().control.lock:  # both have begun
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        assert fluxlike.is_initialized(), "a call that a thread is in may look for the world"
    for thread in threads:
        thread.join()
    return said


def test_two_threads_that_end_fluxlike():
    for outcome in fresh(ends_at_once, 2, LIMIT):
        assert outcome.ok and outcome.value == ["", ""], str(outcome)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of the CPU heap's copy engine")
def test_an_interrupt_while_a_copy_engine_is_made(monkeypatch):
    """Ctrl-C behind the beginning of its thread, which nobody has then to end it."""
    start_thread = threading.Thread.start

    def interrupted(thread):
        start_thread(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            CpuCopyEngine()
    deadline = time.monotonic() + 5
    while engines():
        assert time.monotonic() < deadline, "the thread is still there"
        time.sleep(0.01)


class OfTwo(RuntimeError):
    """Of which a copy cannot be made by its args."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")
        self.two = two


def raised(error, cause=None):
    """``error`` as it is behind its raising."""
    try:
        raise error from cause
    except type(error) as same:
        return same


def test_a_copy_of_an_error_that_has_not_been_raised():
    errors = fluxlike.PeerTimeout("late", told=2), fluxlike.CallMismatch("another"), OfTwo("this", "that"), OSError(2, "none")
    for error in errors:
        error.add_note("a note")
        heard(error, "a group")
        raised(error, raised(KeyError("why"), raised(ValueError("first"))))
        made = untraced(error)
        assert type(made) is type(error) and made.args == error.args and str(made) == str(error)
        assert vars(made) == vars(error) and is_heard(made, "a group")
        causes = made.__cause__, made.__cause__.__cause__
        assert [type(cause) for cause in causes] == [KeyError, ValueError] and causes[1].__cause__ is None
        assert not any(each.__traceback__ for each in (made, *causes)) and error.__traceback__ is not None
        made.add_note("of the copy")
        heard(made, "another group")
        assert error.__notes__ == ["a note"] and not is_heard(error, "another group")
    late = pickle.loads(pickle.dumps(untraced(fluxlike.PeerTimeout("late", told=2))))
    assert (late.args, late.told) == (("late",), 2)
    own = ValueError("its own cause")
    assert untraced(raised(own, own)).__cause__ is None


def keeps(group, how):
    """Tensors of callers that are still there behind calls that fail, and the lengths of the tracebacks of two of these."""
    start()
    ctx = None if how == "kept" else fluxlike.create_gemm_rs_context(8, 8, dtype=torch.float32)
    fluxlike.all_reduce(torch.ones(8, 8))
    there, lengths = [], []

    def attempt(rows):
        x = torch.ones(rows, 8)
        there.append(weakref.ref(x))
        fluxlike.all_reduce(x) if ctx is None else fluxlike.gemm_rs(x, torch.ones(8, 8), ctx)

    for rows in (8 - 2 * dist.get_rank(), 8, 8, 8):
        try:
            attempt(rows)
        except fluxlike.CallMismatch as error:
            lengths.append(len(traceback.extract_tb(error.__traceback__)))
    gc.collect()
    left = sum(each() is not None for each in there)
    dist.barrier()
    with contextlib.suppress(fluxlike.PeerTimeout):
        fluxlike.finalize()
    return left, lengths


def test_what_callers_had_goes_behind_calls_that_fail():
    for how in ("kept", "context"):
        for outcome in fresh(keeps, 2, LIMIT, how=how):
            assert outcome.ok, str(outcome)
            left, lengths = outcome.value
            assert left == 0 and len(lengths) == 4 and lengths[1] == lengths[3], outcome.value

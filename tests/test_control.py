"""How the ranks of a group connect, and what they agree on before they have anything in common."""

import concurrent.futures
import ctypes
import logging
import os
import re
import resource
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from faults import told
from ranks import run_fresh

import fluxlike
from fluxlike.runtime import control, store, world

LIMIT = {"FLUXLIKE_TIMEOUT_S": "0.5"}  # of a meeting 2.5 s
HEAP = 4 << 20


def init() -> None:
    fluxlike.init(heap="shm", heap_bytes=HEAP)


def adds(group=None) -> None:
    assert fluxlike.all_reduce(torch.ones(8), group=group).tolist() == [dist.get_world_size(group)] * 8


def waits_alone(group, where):
    """Rank 0 waits in vain, for the world or for another group of its ranks; then both are there, three times."""
    alone = dist.get_rank() == 0
    message = ""
    if where == "world" and alone:
        message, _ = told(init, RuntimeError)
    if where == "group":
        init()
        other = dist.new_group([0, 1])
        message, _ = told(lambda: adds(other), RuntimeError) if alone else ("", 0)
    dist.barrier()
    for _ in range(3):
        fluxlike.finalize()
        init()
        adds()
        adds(dist.new_group([0, 1]) if where == "world" else other)
    fluxlike.finalize()
    return message


def test_a_rank_that_has_waited_alone():
    for where in ("world", "group"):
        outcomes = run_fresh(waits_alone, 2, LIMIT, where=where)
        for outcome in outcomes:
            assert outcome.ok, str(outcome)
        message = outcomes[0].value
        assert "PeerTimeout: connecting the ranks of a group: not every rank of [0, 1] came within 2.5 s, not ranks [1]" in message


def connects_late(group):
    """As TORCH_GLOO_LAZY_INIT has it, connections are there only when something goes over them, of several groups, too."""
    init()
    adds()
    for ranks in ([0, 1], [0, 1, 2], [1, 2]):
        other = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            adds(other)
    fluxlike.finalize()


def test_connections_that_are_made_when_they_are_used():
    for _ in range(2):
        for outcome in run_fresh(connects_late, 3, {"TORCH_GLOO_LAZY_INIT": "1", "FLUXLIKE_TIMEOUT_S": "5"}):
            assert outcome.ok, str(outcome)


def connects_crosswise(group):
    """Threads of each rank connect two groups, and each rank is inside another one first; its store serves one thread at a time."""
    rank = dist.get_rank()
    store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False) if rank == 0 else None
    port = [getattr(store, "port", None)]
    dist.broadcast_object_list(port, 0)
    dist.destroy_process_group()
    store = store or dist.TCPStore("127.0.0.1", port[0], 2, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    init()
    attempt = control.ControlGroup._attempt

    def late(self, store):
        number = attempt(self, store)
        time.sleep(0.3 * (self.key == str(1 + rank)))
        return number

    control.ControlGroup._attempt = late
    since = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        list(threads.map(adds, groups))
    seconds = time.monotonic() - since
    fluxlike.finalize()
    return seconds


def test_threads_that_connect_groups_in_another_order():
    for outcome in run_fresh(connects_crosswise, 2, {"FLUXLIKE_TIMEOUT_S": "3"}):
        assert outcome.ok, str(outcome)
        assert outcome.value < 3, outcome.value


def begins_anew(group):
    """As where the process of a rank is replaced: the new one knows of no attempt of the others."""
    for _ in range(2):
        init()
        fluxlike.finalize()
    if dist.get_rank() == 1:
        control._made.clear()
    since = time.monotonic()
    init()
    adds()
    fluxlike.finalize()
    return time.monotonic() - since


def test_a_rank_that_begins_anew():
    for outcome in run_fresh(begins_anew, 2, LIMIT):
        assert outcome.ok, str(outcome)
        assert outcome.value < 2, outcome.value


WRONG = {
    "FLUXLIKE_LOG": ("info", "is not one of DEBUG, INFO"),
    "FLUXLIKE_PUTS": ("gpu", "is not one of host, device, auto"),
    "FLUXLIKE_TREE_ARRAY_BOUND": ("-1", "0 or more"),
    "FLUXLIKE_VIRTUAL_NODES": ("none", "whole number"),
}


def test_a_store_is_waited_in_for_no_longer_than_is_said():
    polling = store.PollingStore(dist.HashStore(), 0.05)
    for wait, seconds in ((lambda: polling.get("a"), 0.05), (lambda: polling.wait(["a"], timedelta(milliseconds=20)), 0.02)):
        assert f"timed out after {seconds:g} s" in told(wait, RuntimeError)[0]


def cannot_read(group):
    """One rank's environment has values that there are not: all are told, and nobody waits."""
    said = {}
    for name, (value, _) in WRONG.items():
        if dist.get_rank() == 1:
            os.environ[name] = value
        said[name] = told(init, ValueError)
        os.environ.pop(name, None)
    init()
    adds()
    fluxlike.finalize()
    return said


def test_a_variable_that_one_rank_cannot_read():
    for outcome in run_fresh(cannot_read, 2, LIMIT):
        assert outcome.ok, str(outcome)
        for name, (message, seconds) in outcome.value.items():
            value, words = WRONG[name]
            assert f"{name}={value!r}" in message and words in message and seconds < 2, outcome.value


MISSPELT = "FLUXLIKE_" + "TIMEOUT"


def misspelt(group):
    """What is logged of variables that there are not, and the level of a program that has set one."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("fluxlike")
    logger.addHandler(handler)
    init()
    fluxlike.finalize()
    logger.setLevel("ERROR")
    init()
    fluxlike.finalize()
    before = logger.level
    os.environ["FLUXLIKE_LOG"] = "INFO"
    init()
    fluxlike.finalize()
    return said[:1], len(said), before, logger.level


def test_a_misspelt_variable():
    outcomes = run_fresh(misspelt, 2, {MISSPELT: "5", "FLUXLIKE_TEST_FUZZ": "1"})
    for outcome in outcomes:
        assert outcome.ok, str(outcome)
        assert outcome.value[2:] == (logging.ERROR, logging.INFO)
    warning = f"{MISSPELT} is no variable of fluxlike; write FLUXLIKE_TIMEOUT_S if you mean that, else unset it"
    assert outcomes[0].value[:2] == ([warning], 2)
    assert outcomes[1].value[:2] == ([], 0)


def named(group):
    """A program whose name the kernel cuts within a character, after 15 bytes."""
    ctypes.CDLL(None).prctl(15, "обучение.py".encode(), 0, 0, 0)  # PR_SET_NAME
    init()
    adds()
    fluxlike.finalize()


def test_a_program_with_a_long_name_that_is_not_ascii():
    for outcome in run_fresh(named, 2, LIMIT):
        assert outcome.ok, str(outcome)


def loses(group, how):
    """A peer that dies, one that does not come, or no descriptors left: what the other is told."""
    init()
    dist.barrier()
    if dist.get_rank() == 1:
        if how == "dies":
            os._exit(3)
        time.sleep(3.5)
        return ""
    if how != "files":
        return told(lambda: world.current().control.barrier("a meeting"), fluxlike.PeerTimeout)[0]
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))  # none above those of the shell: how many threads hold open changes
    ones = told(lambda: control.ControlGroup([0], "alone", None, "alone"), fluxlike.PeerTimeout)[0]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    return ones


@pytest.mark.parametrize("how", ("dies", "waits", "files"))
def test_what_is_said_of_connections_that_fail(how):
    """The limit only where it ran out, the time that passed, and of gloo's words what says what happened."""
    first = run_fresh(loses, 2, LIMIT, expect_dead=[1] if how == "dies" else [], how=how)[0]
    assert first.ok, str(first)
    said = first.value
    if how == "waits":
        assert "a meeting: not every rank of [0, 1] came within 2.5 s; " in said and "FLUXLIKE_TIMEOUT_S" in said, said
    else:
        words = {"dies": r"a meeting: the connections of ranks \[0, 1\]", "files": r"connecting .* of ranks \[0\]"}[how]
        assert re.search(words + r" failed after [01]\.\d s \(.{8,120}\); all ranks", said), said
        assert "FLUXLIKE_TIMEOUT_S" not in said and ".cc:" not in said and "typically" not in said, said


def comes_too_late(group):
    """Rank 1 comes to the making of a context when rank 0 has left: all attempts fail until both begin anew, as they are told."""
    init()
    adds()
    ctx = fluxlike.create_gemm_rs_context(8, 8, dtype=torch.float32)
    if dist.get_rank() == 1:
        time.sleep(3.5)
    said = []
    for _ in range(2):
        said.append(told(lambda: fluxlike.create_gemm_rs_context(8, 8, dtype=torch.float32), fluxlike.PeerTimeout)[0])
        dist.barrier()
    before = world.current().heap.in_use
    ctx.close()
    assert world.current().heap.in_use == before, "memory was given back to which a rank that has not come may write"
    fluxlike.finalize()
    init()
    fluxlike.create_gemm_rs_context(8, 8, dtype=torch.float32).close()
    adds()
    fluxlike.finalize()
    return said


def test_a_rank_that_comes_too_late_to_a_meeting():
    outcomes = run_fresh(comes_too_late, 2, LIMIT)
    for outcome in outcomes:
        assert outcome.ok, str(outcome)
        for said in outcome.value:
            assert said.endswith("To go on, call fluxlike.finalize and fluxlike.init on all ranks"), said
    assert "create_gemm_rs_context: not every rank of [0, 1] came within 2.5 s; " in outcomes[0].value[0], outcomes[0].value


def begins_alone(group):
    """Rank 1, as if it were stopped, does not come to two meetings that have begun: rank 0 is in one, and catches up with one."""
    init()
    other = dist.new_group([0, 1])
    adds(other)
    if dist.get_rank() == 1:
        dist.barrier()
        return "", 0, 0
    here, there = world.current().control, world.current().control_of(other)
    here.board.awaits = lambda: False
    there._begun = there._start("a meeting", torch.zeros(8, dtype=torch.uint8), time.monotonic())
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        later = thread.submit(told, there.catch_up)
        said, took = told(lambda: here.barrier("a meeting"), fluxlike.PeerTimeout)
    dist.barrier()
    return said, took, later.result()[1]


def test_what_has_begun_ends_when_its_limit_is_over():
    first = run_fresh(begins_alone, 2, LIMIT)[0]
    assert first.ok, str(first)
    said, *took = first.value
    assert "a meeting: not every rank of [0, 1] came within 2.5 s; " in said, said
    assert all(2.4 < seconds < 20 for seconds in took), took


def goes_on_later(group, how):
    """Ranks that were told of each other's calls, or waited in vain in one, meet again when the limit of a meeting is long over."""
    init()
    rank, x = dist.get_rank(), torch.ones(8, 8)
    ctx = fluxlike.create_gemm_rs_context(8, 8, dtype=torch.float32)
    fluxlike.gemm_rs(x, x, ctx)
    dist.barrier()
    if how == "a meeting":  # of the others, while rank 1 makes a call
        act = lambda: fluxlike.gemm_rs(x, x, ctx) if rank == 1 else fluxlike.create_gemm_rs_context(8, 8)  # noqa: E731
        time.sleep(0.3 if rank == 1 else 0)
        said, took = told(act, fluxlike.CallMismatch)
        assert "'create_gemm_rs_context'" in said and "'call 2 of context 1" in said and took < 2, said
    elif rank != 1:
        assert "waited 1 s" in told(lambda: fluxlike.gemm_rs(x, x, ctx), fluxlike.PeerTimeout)[0]
    time.sleep(3.5)
    if how == "a call" and rank == 1:  # which learns only here that there was one
        assert "at 'call 2 of context 1" in told(ctx.close, fluxlike.CallMismatch)[0]
    ctx.close()
    with fluxlike.create_gemm_rs_context(8, 8, dtype=torch.float32) as ctx:
        assert fluxlike.gemm_rs(x, x, ctx).eq(8 * dist.get_world_size()).all()
    adds()
    fluxlike.finalize()


@pytest.mark.parametrize(("ranks", "how"), ((2, "a meeting"), (3, "a meeting"), (2, "a call")))
def test_ranks_that_have_failed_go_on_later(ranks, how):
    for outcome in run_fresh(goes_on_later, ranks, {"FLUXLIKE_TIMEOUT_S": "1"}, how=how):  # of a meeting 3 s
        assert outcome.ok, str(outcome)

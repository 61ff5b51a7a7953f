"""How the ranks of a group connect, and what they agree on before they have anything in common."""

import ctypes
import os
import time

import torch
import torch.distributed as dist
from faults import told
from ranks import run_fresh

import fluxlike
from fluxlike.runtime import control

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


def cannot_read(group):
    """One rank's environment has a level that there is not: all are told, and nobody waits."""
    if dist.get_rank() == 1:
        os.environ["FLUXLIKE_LOG"] = "info"
    message, seconds = told(init, ValueError)
    os.environ.pop("FLUXLIKE_LOG", None)
    init()
    adds()
    fluxlike.finalize()
    return message, seconds


def test_a_level_that_one_rank_cannot_read():
    for outcome in run_fresh(cannot_read, 2, LIMIT):
        assert outcome.ok, str(outcome)
        message, seconds = outcome.value
        assert "FLUXLIKE_LOG='info' is not one of DEBUG, INFO" in message and seconds < 2, outcome.value


def named(group):
    """A program whose name the kernel cuts within a character, after 15 bytes."""
    ctypes.CDLL(None).prctl(15, "обучение.py".encode(), 0, 0, 0)  # PR_SET_NAME
    init()
    adds()
    fluxlike.finalize()


def test_a_program_with_a_long_name_that_is_not_ascii():
    for outcome in run_fresh(named, 2, LIMIT):
        assert outcome.ok, str(outcome)

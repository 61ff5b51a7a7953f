"""Ranks that are late, silent or dead: the others end soon, with an error naming the cause, and can finalize.

Each test makes processes of its own, breaks one of them, and looks at how all of them ended. On the CPU heap only:
there a signal can be taken out of a kernel, since it is interpreted from its source.
"""

import logging
import operator
import os
import random
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from cases import TRANSPORTS
from faults import GUILTY, HEAP, LIMIT_S, OPS, WORLD, call, fresh, make_context, nothing_left_behind, start, told, works  # noqa: F401
from ranks import run_ranks

import fluxlike
from fluxlike.kernels import ag_gemm, ag_gemm_stream_k, decomposed, gemm_rs, gemm_rs_stream_k
from fluxlike.kernels.sync import finish, publish_add, publish_set
from fluxlike.runtime import interpreter, world

KERNELS = {"gemm_rs": (gemm_rs, gemm_rs_stream_k, decomposed), "ag_gemm": (ag_gemm, ag_gemm_stream_k, decomposed)}

# A builtin of the interpreter that counts: from which publication of this rank on all go wrong, and how. A single flag
# that is lost may be made up for by the next call's, which is larger.
_countdown: list[int] = []
_kill: list[int] = []


def strikes(_semantic=None):
    """True from the publication that was chosen; or the end of the process, if that was chosen."""
    if not _countdown:
        return False
    _countdown[0] -= 1
    if _countdown[0] > 0:
        return False
    if _kill:
        os.kill(os.getpid(), signal.SIGKILL)
    return True


strikes.__triton_builtin__ = True


@triton.jit
def publish_set_or_not(signal, value, TMA: tl.constexpr):
    if not strikes():
        publish_set(signal, value, TMA)


@triton.jit
def publish_add_or_not(counter, count, TMA: tl.constexpr):
    if not strikes():
        publish_add(counter, count, TMA)


@triton.jit
def finish_without_credits(ctl, slot, rank, epoch, R: tl.constexpr):
    finish(ctl, slot, rank, epoch, 1)


def sabotage(ctx, what: str, at: int) -> None:
    """Takes signals of this rank away, from the one numbered ``at`` on."""
    if what in ("copy", "go"):  # of the copy engine, or to it
        writer = ctx.engine if what == "copy" else ctx.world.executor
        write, left = writer.write, [at]

        def write_or_not(address: int, value: int) -> None:
            left[0] -= value == 1
            if left[0] > 0 or value != 1:
                write(address, value)

        writer.write = write_or_not
    elif what == "credits":
        for kernels in KERNELS[ctx.op]:
            kernels.finish = finish_without_credits
    else:
        _countdown[:] = [at]
        for kernels in KERNELS[ctx.op]:
            kernels.publish_set, kernels.publish_add = publish_set_or_not, publish_add_or_not


def survive(ctx, calls: int) -> tuple[str, float, int]:
    """Calls until one fails: its message, how long it took, and its number. A failed context goes on refusing."""
    for number in range(1, calls + 1):
        since = time.monotonic()
        try:
            call(ctx, number)
        except fluxlike.PeerTimeout as error:
            took = time.monotonic() - since
            try:
                call(ctx, number)
            except fluxlike.PeerTimeout as again:
                assert str(again) == str(error), f"the second time another message: {again}"
            else:
                raise AssertionError("a context whose wait ran out made another call") from error
            return str(error), took, number
    return "", 0.0, calls + 1


def a_new_start(group, op: str, schedule: str) -> None:
    """After an error: end, begin again, and all is well."""
    for kernels in (*KERNELS["gemm_rs"], *KERNELS["ag_gemm"]):
        kernels.finish, kernels.publish_set, kernels.publish_add = finish, publish_set, publish_add
    since = time.monotonic()
    fluxlike.finalize()
    assert time.monotonic() - since < 3 * LIMIT_S, f"finalize took {time.monotonic() - since:.1f} s"
    dist.barrier(group)
    start()
    with make_context(op, schedule) as ctx:
        for seed in range(3):
            call(ctx, seed)
    fluxlike.finalize()


def lose_a_signal(group, op, schedule, what, at):
    start()
    ctx = make_context(op, schedule)
    call(ctx, 0)
    dist.barrier(group)
    if dist.get_rank() == GUILTY:
        sabotage(ctx, what, at)
        # Its own waits fail as a consequence; with more patience it leaves the first word to those who met the cause.
        ctx.limit_s = 4 * LIMIT_S
    told = survive(ctx, 5)
    a_new_start(group, op, schedule)
    return told


#: op, schedule, which signal of the guilty rank is lost, from which one on (the first of a program goes to a word that
#: nobody reads), what the others wait for.
LOSSES = (
    ("gemm_rs", "in_kernel", "publication", 2, "partial sums"),
    ("gemm_rs", "copy_engine", "copy", 1, "partial sums"),
    ("gemm_rs", "copy_engine", "publication", 2, "partial sums"),
    ("gemm_rs", "in_kernel", "credits", 0, "credit"),
    ("gemm_rs", "copy_engine", "credits", 0, "credit"),
    ("ag_gemm", "in_kernel", "publication", 2, "shard"),
    ("ag_gemm", "copy_engine", "copy", 1, "shard"),
    ("ag_gemm", "copy_engine", "publication", 1, "shard"),
    ("ag_gemm", "in_kernel", "credits", 0, "credit"),
    ("ag_gemm", "copy_engine", "credits", 0, "credit"),
    ("gemm_rs", "stream_k", "publication", 2, "partial sums"),
    ("gemm_rs", "stream_k", "credits", 0, "credit"),
    ("ag_gemm", "stream_k", "publication", 1, "shard"),
    ("ag_gemm", "stream_k", "credits", 0, "credit"),
    ("gemm_rs", "decomposed", "copy", 1, "partial sums"),
    ("gemm_rs", "decomposed", "go", 1, "partial sums"),
    ("gemm_rs", "decomposed", "credits", 0, "credit"),
    ("ag_gemm", "decomposed", "copy", 1, "shard"),
    ("ag_gemm", "decomposed", "go", 1, "shard"),
    ("ag_gemm", "decomposed", "credits", 0, "credit"),
)


@pytest.mark.parametrize(
    ("op", "schedule", "what", "at", "missed"),
    [pytest.param(*loss, marks=pytest.mark.slow if number % 5 else ()) for number, loss in enumerate(LOSSES)],
)
def test_a_lost_signal_is_an_error_on_all_ranks(op, schedule, what, at, missed):
    how = {"op": op, "schedule": schedule, "what": what, "at": at}
    env = {"FLUXLIKE_TIMEOUT_S": str(LIMIT_S)}
    if what == "credits":
        # One program waits for credits first. Of two the other would wait for a shard of a rank that waits for the same credit, and
        # on a busy machine its wait may begin, and run out, first.
        env["FLUXLIKE_CPU_PROGRAMS"] = "1"
    told, first = met_the_loss(env, missed, how)
    innocent = [rank for rank in range(len(told)) if rank != GUILTY]
    if not first and any(f"Rank {rank} has not come this far" in said for said, *_ in told for rank in innocent):
        # one of them had no processor for as long as the limit, and another waited for it in vain, which is as true: once more
        told, first = met_the_loss(env, missed, how)
    assert first, told
    for _, message in first:
        for word in ("expected", "saw", "FLUXLIKE_TIMEOUT_S", f"rank {GUILTY}"):
            assert word in message, f"{word!r} is not in: {message}"


def met_the_loss(env, missed, how):
    """What ranks were told, and those that met the loss themselves.

    At least one should: it says for whom and what it waited, what it expected and what it saw. Of a word that the guilty rank's own
    copies wait for, that may be this rank: its wait begins about when the others' do.
    """
    outcomes = fresh(lose_a_signal, env=env, timeout=30, **how)
    for outcome in outcomes:
        assert outcome.ok, str(outcome)
    told = [outcome.value for outcome in outcomes]
    for rank, (message, took, _) in enumerate(told):
        assert message.startswith(f"{how['op']}: rank {rank} "), f"rank {rank}: {message!r}"
        assert took < 2 * LIMIT_S, f"rank {rank} needed {took:.1f} s: {message}"
    return told, [
        (rank, message)
        for rank, (message, *_) in enumerate(told)
        if f"waited {LIMIT_S:g} s for rank {GUILTY}" in message
        and (missed in message if rank != GUILTY else how["what"] == "go" and "its signal" in message)
    ]


def lose_a_signal_and_leave(group):
    """Whoever lost the signal waits for nobody and closes the context at once; the others come when their waits have run out."""
    start()
    ctx = make_context("gemm_rs", "in_kernel")
    call(ctx, 0)
    dist.barrier(group)
    if dist.get_rank() == GUILTY:
        sabotage(ctx, "publication", 2)
    said, _ = told(lambda: call(ctx, 1), fluxlike.PeerTimeout)
    if said:
        time.sleep(0.5)  # what a program does with an error, and a busy machine
    ctx.close()
    for kernels in (*KERNELS["gemm_rs"], *KERNELS["ag_gemm"]):
        kernels.finish, kernels.publish_set, kernels.publish_add = finish, publish_set, publish_add
    works(None)
    fluxlike.finalize()
    return said


def test_who_waited_in_vain_still_meets_those_who_wait_for_it_meanwhile():
    outcomes = fresh(lose_a_signal_and_leave, env={"FLUXLIKE_TIMEOUT_S": str(LIMIT_S)}, timeout=60)
    for outcome in outcomes:
        assert outcome.ok, str(outcome)
        assert (outcome.value == "") == (outcome.rank == GUILTY), outcome.value


def kill_one(group, op, schedule, at, inside):
    start()
    ctx = make_context(op, schedule)
    if dist.get_rank() == GUILTY:
        if inside:
            _kill.append(1)
            sabotage(ctx, "publication", at)
        for seed in range(at if not inside else 100):
            call(ctx, seed + 1)
        os.kill(os.getpid(), signal.SIGKILL)
    told = survive(ctx, 100)
    since = time.monotonic()
    fluxlike.finalize()
    return (*told, time.monotonic() - since)


@pytest.mark.parametrize("inside", (False, True), ids=("between-calls", "inside-a-kernel"))
@pytest.mark.parametrize("schedule", TRANSPORTS)
@pytest.mark.parametrize("op", OPS)
def test_a_killed_rank_is_noticed_within_seconds(op, schedule, inside):
    how = {"op": op, "schedule": schedule, "at": 3, "inside": inside}
    env = {"FLUXLIKE_TIMEOUT_S": "60"}
    outcomes = fresh(kill_one, env=env, timeout=55, expect_dead=[GUILTY], **how)
    assert outcomes[GUILTY].exit == -signal.SIGKILL
    survivors = [outcome for outcome in outcomes if outcome.rank != GUILTY]
    for outcome in survivors:
        assert outcome.ok, str(outcome)
        message, took, _, ending = outcome.value
        assert message, f"rank {outcome.rank} made all its calls with a dead peer"
        assert took < 10, f"rank {outcome.rank} needed {took:.1f} s to notice: {message}"
        assert ending < 20, f"rank {outcome.rank} needed {ending:.1f} s to finalize"
    said = [outcome.value[0] for outcome in survivors if f"rank(s) {GUILTY} died" in outcome.value[0]]
    assert said, [outcome.value for outcome in survivors]
    # with the time that passed, and not with the limit, which did not; who sees at once that another has given up names that one
    waited = [bool(re.search(r" waited \d\.\d s for rank", message)) for message in said]
    named = [bool(re.search(r" stopped waiting for rank \d .* because rank \d gave up first; the message of", m)) for m in said]
    assert any(waited) and all(map(operator.xor, waited, named)), said
    assert not any("FLUXLIKE_TIMEOUT_S" in message for message in said), said


def make_no_call(group, op, schedule):
    """The guilty rank is silent until the others have given up; its own next step tells it so."""
    start()
    ctx = make_context(op, schedule)
    if dist.get_rank() != GUILTY:
        outcome = survive(ctx, 3)
        dist.barrier(group)
    else:
        dist.barrier(group)
        outcome = told(ctx.close, ValueError)
    a_new_start(group, op, schedule)
    return outcome


@pytest.mark.parametrize("schedule", TRANSPORTS)
@pytest.mark.parametrize("op", OPS)
def test_a_rank_that_never_makes_the_call(op, schedule):
    env = {"FLUXLIKE_TIMEOUT_S": str(LIMIT_S)}
    outcomes = fresh(make_no_call, env=env, timeout=60, op=op, schedule=schedule)
    for outcome in outcomes:
        assert outcome.ok, str(outcome)
        message, took, *number = outcome.value
        assert took < 4 * LIMIT_S
        if outcome.rank != GUILTY:
            assert number == [1] and f"{op}: rank {outcome.rank} " in message, outcome.value
        else:
            assert "rank 1 is at 'closing context 1" in message and "at 'call 1 of context 1" in message, message
    first = [outcome.value[0] for outcome in outcomes if f"waited {LIMIT_S:g} s for rank {GUILTY}" in outcome.value[0]]
    assert first
    for message in first:
        assert f"Rank {GUILTY} has not come this far; the last that it did on this group: 'making context 1" in message, message


def fail_at_creation(group):
    """One rank cannot make the context, for a reason of its own: no rank gets one, and all can go on."""
    start()
    rank, errors = dist.get_rank(), []
    for make in (fluxlike.create_gemm_rs_context, fluxlike.create_ag_gemm_context):
        try:
            make(16 if rank != GUILTY else -16, 16, 16, torch.float32)
        except ValueError as error:
            errors.append(str(error))
    assert not world.current().contexts
    with make_context("gemm_rs", "in_kernel") as ctx:
        call(ctx, 1)
    fluxlike.finalize()
    return errors


def test_an_error_at_creation_is_everybodys():
    for outcome in fresh(fail_at_creation):
        assert outcome.ok, str(outcome)
        assert len(outcome.value) == 2 and all("max_m=-16" in message for message in outcome.value), outcome.value


def leave_early(group):
    """One rank finalizes while the others still want to make a context: they are told, and end as well."""
    start()
    told = ""
    if dist.get_rank() != GUILTY:
        try:
            make_context("gemm_rs", "in_kernel")
        except fluxlike.CallMismatch as error:
            told = str(error)
    fluxlike.finalize()
    return told


def raise_by_itself(group):
    """One rank raises between calls, while the others wait for it in a collective of torch's."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append((time.monotonic(), record.getMessage()))
    logging.getLogger("fluxlike").addHandler(handler)
    start()
    try:
        try:
            if dist.get_rank() == GUILTY:
                raise KeyError("no such layer")
            time.sleep(2 * LIMIT_S)
        finally:
            since = time.monotonic()
            fluxlike.finalize()
    except KeyError:
        pass
    return [(at - since, message) for at, message in said if "no such layer" in message]


def test_who_raises_says_so_before_it_waits_for_the_others():
    for outcome in fresh(raise_by_itself, env={"FLUXLIKE_TIMEOUT_S": str(LIMIT_S)}, timeout=40):
        assert outcome.ok, str(outcome)
        if outcome.rank != GUILTY:
            assert not outcome.value
            continue
        ((after, message),) = outcome.value
        assert after < LIMIT_S / 2
        assert f"rank {GUILTY}: KeyError: 'no such layer'; before this rank goes on," in message
        assert f"fluxlike.finalize waits up to {LIMIT_S + 2:g} s" in message


def test_creation_without_one_rank_does_not_hang():
    for outcome in fresh(leave_early, env={"FLUXLIKE_TIMEOUT_S": str(LIMIT_S)}, timeout=40):
        assert outcome.ok, str(outcome)
        assert outcome.seconds < 6 * LIMIT_S
        assert ("create_gemm_rs_context" in outcome.value) == (outcome.rank != GUILTY), outcome.value


def late(group, op):
    """Another rank is late each time, before its call or in the middle of it, by a second or more."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    choose = random.Random(5)  # the same choices on every rank
    for schedule in TRANSPORTS:
        with make_context(op, schedule, group) as ctx:
            for seed in range(5):
                who, seconds, inside = choose.randrange(size), choose.uniform(1, 1.5), choose.random() < 0.5
                how = None
                if rank == who and inside:
                    how = interpreter.Schedule(seed=seed, jitter=0.02, delay=seconds / 2)
                elif rank == who:
                    time.sleep(seconds)
                previous = interpreter.configure(how)
                try:
                    call(ctx, seed)
                finally:
                    interpreter.configure(previous)
            assert ctx.last_path.startswith(schedule) and ctx.stats["calls"] == 5


@pytest.mark.slow  # sleeps for more than a second, ten times
@pytest.mark.parametrize("op", OPS)
def test_late_ranks(op):
    run_ranks(late, WORLD, op=op)

"""Measuring which of the candidates is fastest: FLUXLIKE_TUNE=on; `tools.tune` does it for lists of shapes, with checks of results.

A call may not wait for other ranks on the host, so nothing is measured in calls. With "on" the making of a context, which is
collective anyway, measures the largest problem that the context is for: M = max_m, and N and K as given to
``create_…_context``, if the schedule is "auto" and no table knows that problem. Contexts that calls without one make for
themselves are not tuned: their sizes are rounded up, and who made the call did not ask for a pause of a second.
"""

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..runtime import world
from ..runtime.errors import PeerTimeout
from . import choice, tuned
from .choice import Choice, Problem
from .making import taking

if TYPE_CHECKING:
    from .context import Context

#: Choices that are measured; those expected to take longer than so many times the best are not.
MOST = 12
HOPELESS = 1.5
ROUNDS = 5
#: How much faster than the usual one a choice must be.
BETTER = 1.01
#: Seconds of one timing on GPUs, and calls in it.
TIMING, FEWEST, MOST_CALLS = 0.01, 3, 50

Call = Callable[[], Any]
Some = TypeVar("Some")


def shortlist(problem: Problem, most: int = MOST) -> list[Choice]:
    """The candidates that are worth measuring: what is used without a table first, then those expected to be fast."""
    usual = choice.usuals(problem)
    usual.sort(key=lambda made: choice.predict(problem, made))
    groups = {tile.group_m for tile in choice.tiles(problem.capability, problem.dtype)}
    possible = choice.candidates(problem)
    plain = [made for made in possible if made.tile.group_m in groups]
    ours = next(made for made in usual if made.transport not in choice.TORCH)  # torch's tiles are not for us to choose
    others = [replace(ours, tile=replace(ours.tile, group_m=group)) for group in choice.GROUPS]
    limit = HOPELESS * choice.predict(problem, usual[0])
    order = dict.fromkeys([*usual, *plain[: max(most - len(usual) - len(others) + 1, 0)], *others, *plain])
    return [made for made in order if made in usual or (made in possible and choice.predict(problem, made) <= limit)][:most]


def fastest(times: dict[Choice, float], usual: Choice) -> Choice:
    """The choice with the smallest time; the usual one unless another is faster by more than what two runs differ."""
    best = min(times, key=lambda made: times[made])
    return usual if usual in times and times[usual] < BETTER * times[best] else best


def in_turn(methods: Sequence[Some], turn: int) -> list[Some]:
    """The order of a round: within as many rounds as methods, each stands behind every other one once.

    What runs before a method takes from its clocks, or gives them back: behind the same one in most rounds, equal methods differed
    by up to 7 %. The order is that of E. J. Williams (1949), for an even number; of an odd number, as if there were one more,
    so that here and there one stands twice behind another.
    """
    places = len(methods) + len(methods) % 2
    zigzag = [(-i if i % 2 else i) // 2 % places for i in range(places)]
    return [methods[place] for first in zigzag if (place := (first + turn) % places) < len(methods)]


def timed(call: Call, calls: int, cuda: bool, settle: Call) -> float:
    """Seconds a call, back to back; on GPUs between two events, after one call more."""
    if not cuda:
        since = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - since) / calls
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    start.record()
    for _ in range(calls):
        call()
    end.record()
    settle()
    return start.elapsed_time(end) / calls * 1e-3


def context(make: Callable[[], Any], shape: tuple[int, int | None, int | None], sample: Callable[[Any], Call]) -> Any:
    """The context that ``make`` makes, with a choice for ``shape``, measured if FLUXLIKE_TUNE=on asks for it. Collective.

    ``sample`` makes a call of that shape on a context. What is found goes into the user's cache, too.
    """
    ctx: Context = make()
    m, n, k = shape
    if ctx.tuned.mode != "on" or ctx.schedule != "auto" or n is None or k is None or (m, n, k) in ctx.tuned.table:
        return ctx
    problem = ctx.problem(m, n, k)
    trials = _Trials(ctx, make, sample)
    try:
        times = trials.measure(shortlist(problem))
    except PeerTimeout:
        raise
    except (RuntimeError, ValueError):  # on all ranks: nobody else has the context
        with contextlib.suppress(ValueError, PeerTimeout):
            trials.ctx.close()
        raise
    trials.ctx.close()  # it has made calls, and its memory holds what they left
    ctx = make()
    if times:
        before = choice.choose(problem, "auto", {})
        best = fastest(times, before)
        ctx.tuned.table[problem.shape] = best
        if ctx.rank == 0:
            usual = times.get(before)
            entry = tuned.Entry(problem, best, times[best] * 1e6, None if usual is None else usual * 1e6)
            try:
                tuned.store(tuned.machine_of(ctx.world.executor), [entry])
            except OSError as error:
                world.log.warning("%s: the tuned choice for M, N, K = %s is not kept: %s", ctx.op, problem.shape, error)
    return ctx


class _Trials:
    """Measurements on a context, which is replaced when a choice breaks it."""

    def __init__(self, ctx: "Context", make: Callable[[], Any], sample: Callable[[Any], Call]) -> None:
        self.ctx, self._make, self._sample = ctx, make, sample
        self._call: Call = lambda: None
        self._cuda = ctx.device.type == "cuda"
        #: Where `timed` looks at the clock.
        self._there: Any = torch.cuda.device(ctx.device) if self._cuda else contextlib.nullcontext()

    def _everywhere(self, action: Call) -> list[float] | None:
        """What the ranks' actions return, or None if one raised: then with a new context. Collective."""
        value, error = 0.0, ""
        try:
            value = action() or 0.0
        except Exception as problem:  # told to all ranks, which go on with the next choice
            error = f"{type(problem).__name__}: {problem}"
        said = self.ctx.control.gather((value, error), f"tuning {self.ctx.op}")
        wrong = [theirs for _, theirs in said if theirs]
        if not wrong:
            return [theirs for theirs, _ in said]
        world.log.warning("%s: a choice that was to be measured failed: %s", self.ctx.op, wrong[0])
        with contextlib.suppress(ValueError, PeerTimeout):  # a rank may learn only here of what went wrong
            self.ctx.close()
        self.ctx = self._make()
        self._prepare()
        return None

    def _prepare(self) -> None:
        """Operands for calls on the context; an error of one rank, as no memory, is raised on all. Collective."""
        with taking(self.ctx.op, self.ctx.control):
            self._call = self._sample(self.ctx)

    def _time(self, made: Choice, calls: int) -> float | None:
        """Seconds a call on the slowest rank, or None if it failed on one."""
        self.ctx.use(made)
        with self._there:
            said = self._everywhere(lambda: timed(self._call, calls, self._cuda, self.ctx.check))
        return None if said is None else max(said)

    def measure(self, choices: list[Choice]) -> dict[Choice, float]:
        """The median seconds of a call of each choice that works; they take turns. Collective."""
        self._prepare()
        rounds: dict[Choice, list[float]] = {}
        calls = {}
        for made in choices:
            first = self._time(made, 1)  # compiles
            again = None if first is None else self._time(made, 1)
            if again is not None:
                calls[made] = min(MOST_CALLS, max(FEWEST, round(TIMING / max(again, 1e-6)))) if self._cuda else 1
                rounds[made] = []
        for turn in range(ROUNDS if self._cuda else 1):
            for made in in_turn(list(rounds), turn):
                seconds = self._time(made, calls[made])
                if seconds is None:
                    del rounds[made]
                else:
                    rounds[made].append(seconds)
        return {made: statistics.median(times) for made, times in rounds.items()}


def random(device: torch.device, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """Makes operands of normal random numbers, as small ones would draw less power; not from the caller's generator."""
    generator = torch.Generator(device=device).manual_seed(1234)
    return functools.partial(torch.randn, generator=generator, device=device, dtype=dtype)

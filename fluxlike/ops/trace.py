"""Tracing of a context's calls: where their kernels write what happened when, and the times of the copies beside them.

What the numbers are stands in `kernels.trace`; what people see of them in `tools.trace`.
"""

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..kernels import sync
from ..kernels import trace as kernel
from ..kernels.tiles import cdiv

if TYPE_CHECKING:
    from .context import Context

#: Questions to a GPU's clock; the one that was answered fastest counts.
ROUNDS = 64
#: Nanoseconds that the GPU waits for a question, and the host for an answer.
PATIENCE = 1_000_000_000
#: Arguments and constants of a launch without which its times mean nothing.
FACTS = ("M", "N", "K", "chunk_rows", "rows", "rank", "R", "S", "BM", "BN", "BK", "GROUP_M", "COPY_ENGINE")

#: Arguments that say how tiles are dealt; 0 where a kernel has none of the name.
DEALT = ("pushers", "pieces", "head_start", "cut", "lanes", "late", "lag")


class Clock(NamedTuple):
    """How the times of a rank relate to the host's ``time.monotonic_ns``, which all ranks share. All in nanoseconds.

    ``offset``: what the kernels' clock is ahead of the host's, give or take ``error``. ``copies_error``: the same of the times of
    copies against those of kernels.
    """

    offset: int
    error: int
    copies_error: int


class Traced(NamedTuple):
    """The last call of a rank, as plain data.

    ``facts``: `FACTS` of its launch, `DEALT`, ``op`` and ``programs``. ``times``: the words [rows, WIDTH + R] of `kernels.trace`.
    ``copies``: (peer, sub-chunk, bytes, begin, end) of each, by the kernels' clock.
    """

    facts: dict[str, Any]
    times: torch.Tensor
    copies: list[tuple[int, int, int, int, int]]
    clock: Clock


class Trace:
    """What a context notes of its calls from `begin` on: of the last launch, so of several weights the last."""

    def __init__(self, context: "Context") -> None:
        self._context = context
        self._known: dict[tuple, torch.Tensor] = {}
        self._times: torch.Tensor | None = None
        #: The number of the call that they are of.
        self._call = 0
        self.facts: dict[str, Any] = {}
        #: (flag, bytes, stamp of the beginning, stamp of the end) of each copy of the last call.
        self.copies: list[tuple[int, int, Any, Any]] = []

    def prepared(self, launched: Any, programs: int, args: Sequence[Any], constants: dict[str, Any]) -> Callable[[], None]:
        """What must be called before each launch of a kernel that the context is going to make."""
        if not constants.get("TRACE"):
            return lambda: None
        given = dict(zip(launched.arg_names, args, strict=False)) | constants
        facts = {name: int(given[name]) for name in FACTS} | {"op": self._context.op, "programs": programs}
        facts |= {name: int(given.get(name, 0)) for name in DEALT}
        rows = tile_count(facts) + programs + task_count(facts) + (programs if facts["cut"] else 0)
        key = tuple(facts.values())
        if key not in self._known:
            with torch.inference_mode(False):  # calls outside of it write to them, too
                times = torch.zeros(rows, kernel.WIDTH.value + facts["R"], dtype=torch.int64, device=self._context.device)
            self._known[key] = times
        times = self._known[key]
        executor = self._context.world.executor

        def before() -> None:
            if executor.is_capturing():
                raise RuntimeError(f"{facts['op']}: a traced call cannot be part of a CUDA graph; capture calls of another context")
            if self._times is not times:
                self._context.ctl[sync.TIMES.value] = times.data_ptr()
            self._times, self.facts, self._call = times, facts, self._context.stats["calls"]
            times.zero_()  # which task of a push signals is chance

        return before

    def copied(self, flag: int, nbytes: int, begun: Any, ended: Any) -> None:
        """A copy was queued whose peer learns of it by the word at ``flag``."""
        self.copies.append((flag, nbytes, begun, ended))

    def read(self) -> Traced:
        """The last call, when the device is done with it. RuntimeError if it was not traced. PeerTimeout if a wait ran out."""
        context = self._context
        context.check()
        if self._times is None or self._call != context.stats["calls"]:
            where = "since `begin`" if self._times is None else "in the last call"
            raise RuntimeError(
                f"{context.op}: no kernel that can be traced was launched {where}, so there are no times (the last call: "
                f"{context.last_path or 'none'}); make a call with schedule copy_engine or in_kernel"
            )
        executor = context.world.executor
        clock, reference, at = _clock(executor)
        copies = []
        for flag, nbytes, begun, ended in self.copies if self.facts["COPY_ENGINE"] else ():
            peer, sub = context.told_by(flag)
            begin, end = (at - executor.nanoseconds(stamp, reference) for stamp in (begun, ended))
            copies.append((peer, sub, nbytes, begin, end))
        return Traced(self.facts, self._times.cpu(), copies, clock)


def begin(context: "Context") -> Trace:
    """Trace the calls of ``context`` on this rank from now on. Its kernels are compiled anew, with `kernels.trace` in them.

    ``recorder = trace.begin(ctx)``, then calls, then ``recorder.read()``: see docs/trace.md.

    Args:
        context: of `create_gemm_rs_context` or `create_ag_gemm_context`, on one node, of any dtype. What is noted: of a call by
            schedule "copy_engine" or "in_kernel", as 64-bit words [rows, WIDTH + R] on its device, a row for each tile, program,
            task of a push and part of a shared tile.

    Returns:
        Where to `Trace.read` the last call: times in nanoseconds of the kernels' clock, and what relates it to the host's.

    Raises:
        ValueError: ``context`` is of another kind, or of ranks on several nodes. A call that is captured in a CUDA graph, and
        `Trace.read` of one that was not traced, are a RuntimeError.
    """
    if not hasattr(context, "forget_plans"):  # which only contexts have whose kernels can note times
        raise ValueError(
            f"trace.begin: {context!r} cannot be traced; give a context of create_gemm_rs_context or create_ag_gemm_context, of "
            "ranks on one node"
        )
    context.forget_plans()
    context.trace = Trace(context)
    return context.trace


def tile_count(facts: dict[str, Any]) -> int:
    """Tiles of all chunks of a call, whether or not they have rows."""
    tiles_m = cdiv(cdiv(facts["chunk_rows"], facts["BM"]), facts["S"]) * facts["S"]
    return tiles_m * cdiv(facts["N"], facts["BN"]) * facts["R"]


def task_count(facts: dict[str, Any]) -> int:
    """Tasks of a push by the kernel."""
    return cdiv(facts["rows"], facts["BM"]) * facts["pieces"]


# clocks


def _clock(executor: Any) -> tuple[Clock, Any, int]:
    """The clock of a rank, a stamp of `executor.stamp`, and what the kernels' clock said at that stamp."""
    if executor.device.type == "cpu":  # kernels, copies and all ranks read the same
        stamp = executor.stamp()
        return Clock(0, 0, 0), stamp, stamp[0]
    offset, error = _against_host(executor)
    best: tuple[int, Any, int] | None = None
    words = executor.report(2)
    for _ in range(ROUNDS):
        words.copy_(torch.tensor([1, 0], device="cpu"))  # asked already
        before = executor.stamp()
        executor.launch(kernel.read_clocks, 1, (words.data_ptr(),), {"ROUNDS": 1, "PATIENCE": PATIENCE}, 1, 1)
        after = executor.stamp()
        executor.synchronize()
        gap = executor.nanoseconds(before, after)
        if best is None or gap < best[0]:
            best = gap, before, int(words[1]) - gap // 2
    assert best is not None
    gap, stamp, at = best
    return Clock(offset, error, cdiv(gap, 2)), stamp, at


def _against_host(executor: Any) -> tuple[int, int]:
    """What the GPU's clock is ahead of the host's, and by how much that may be wrong: half of the fastest answer's way."""
    words = executor.report(1 + ROUNDS)
    seen = (ctypes.c_int64 * (1 + ROUNDS)).from_address(words.data_ptr())
    executor.launch(kernel.read_clocks, 1, (words.data_ptr(),), {"ROUNDS": ROUNDS, "PATIENCE": PATIENCE}, 1, 1)
    answers = []
    for i in range(1, 1 + ROUNDS):
        asked = time.monotonic_ns()
        seen[0] = i
        answered = asked
        while seen[i] == 0 and answered - asked < PATIENCE:
            answered = time.monotonic_ns()
        answered = time.monotonic_ns()
        answers.append((answered - asked, seen[i] - (asked + answered) // 2))
    executor.synchronize()
    way, offset = min(answers)
    if way >= PATIENCE:
        raise RuntimeError(f"the GPU did not answer within {PATIENCE / 1e9:g} s when it was asked for its time; see `doctor`")
    return offset, cdiv(way, 2)

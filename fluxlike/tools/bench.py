"""`python -m fluxlike bench OP`: how fast an operation is, against what, how near the limit. Start it with launch.sh.

OP: gemm_rs, ag_gemm, gemm_ar, all_reduce, reduce_scatter, all_gather, reduce, broadcast, sparse_all_reduce.

Protocol
* Shapes M×N×K are of the whole problem: gemm_rs x [M, K/R], weight [N, K/R]; ag_gemm x [M/R, K], weight [N/R, K]. Operands are
  normal random numbers of full scale: zeros or small integers draw less power, and the clocks would flatter everyone.
* Right before fast. On up to 256 rows × 512 columns, the same on every rank, the last of three calls in a row is compared with
  an fp64 product of the same operands, summed over the ranks. The root mean square of the deviation may be 1.5 × that of torch's
  own path (or of one rounding of the result, if torch happens to be better; of fewer than 64 values, what is usual of torch's,
  and not what it happens to be); after the timing one more call is compared. A
  method that fails on any rank is WRONG, is not timed, and makes the exit status 1.
* Methods: `gemm` = torch.matmul on the unsplit local product, no communication; `torch` = matmul and reduce_scatter_tensor or
  all_reduce, or all_gather_into_tensor and matmul; `async_tp` = torch.ops.symm_mem.fused_…; each schedule of fluxlike, and `auto`.
  Buffers and contexts are made once a shape, so nobody pays for allocation. Some must be named (`--help` has all):
  `sequential/torch` and `sequential/fused`, few rows by torch's product or in one kernel; `said` and `unsaid`, calls without a
  context, which say K (gemm_rs) or N (ag_gemm) of all ranks, or let them be those of the first shape, or of a
  larger one behind it; `anew`, `auto` with each call checked and planned as if it were the first; and `apart` and `together`,
  `auto` of ranks on several nodes, made node by node or for all of them at once.
* A chip that has just idled runs faster than a busy one. So every shape begins with at least three calls a method and 300 ms of
  work in all, and the methods take turns: in each round each is timed once, behind another one. Synchronise, barrier, one untimed
  call, then an event pair around `iters` calls back to back (about 20 ms, 5 to 50 of them); a round's time is that of the slowest
  rank. The figure is the median over the rounds (7); smallest and largest stand beside it.
* Long calls bring a GPU to its limit of power, where its clock swings: seen on H100s by 10 % with a period of 0.9 s, in the first
  second by twice that. If the fastest call takes 0.5 ms or more, warming up takes 1 s, therefore, and there are as many rounds as
  fill 2 s, unless --rounds says how many.
* `--graph`: the same, where a call is a replay of a CUDA graph of ten calls; times are still per call.
* Host time: 30 calls without synchronising, by the host's clock, slowest rank.
* t_gemm is the time of `gemm`, wire the bytes that a rank must send: (R−1)/R·M·N (gemm_rs), (R−1)/R·M·K (ag_gemm), 2·(R−1)/R·M·N
  (gemm_ar) elements.
  Limit T* = max(t_gemm, wire / 360 GB/s). Overlap efficiency E = 1 − (t − t_gemm) / (t_torch − t_gemm).
* On the CPU heap the same path runs, with one call for each timing, and times are not reported: an interpreter's mean nothing.

Ranks agree over gloo, beside the measured streams: on every first call, on each time, on whether the next shape begins.
This file: the run. bench_arguments: the command line. bench_problems: shapes, operands, truth. bench_reduce: the same for
all_reduce, and its report; bench_collectives: for reduce_scatter, all_gather, reduce and broadcast; bench_bursts: for many
reductions at once; bench_sparse: for sparse_all_reduce. bench_peers: agreement. bench_report: output; bench_records: the
plot over the number of ranks.
"""

import argparse
import contextlib
import functools
import gc
import importlib.util
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..ops import tuning
from ..runtime import world
from ..runtime.errors import PeerTimeout
from . import bench_records, bench_report, command
from .bench_arguments import GRAPH_CALLS, ROUNDS, kind_of, parse
from .bench_peers import Failed, Lost, Peers
from .bench_problems import SAMPLE_COLUMNS, SAMPLE_ROWS, TOLERANCE, Call, Problem, judged
from .bench_report import Report, Result, Row, Voice

HOST_CALLS = 30
TARGET_MS, FEWEST, MOST = 20.0, 5, 50
WARM_CALLS, WARM_MS = 3, 300.0
#: Calls from so many ms on are warmed up and timed for so many at least.
LONG_MS, WARM_LONG_MS, TIMED_LONG_MS = 0.5, 1000.0, 2000.0


def auto_iters(ms: float) -> int:
    """How many calls of ``ms`` fill one timing."""
    return min(MOST, max(FEWEST, round(TARGET_MS / max(ms, 1e-6))))


class Budget:
    """No new shape once ``seconds`` have passed, or nothing can be printed any more; None: no end of them."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._since, self._seconds = clock, clock(), seconds

    def spent(self) -> str:
        """Why there is to be no new shape, if so."""
        if command.Outlet.left:
            return "what this prints cannot be written any more"
        over = self._seconds is not None and self._clock() - self._since >= self._seconds
        return f"{self._seconds:g} seconds have passed" if over else ""


@dataclass
class Method:
    name: str
    row: Row
    context: Any = None
    call: Call | None = None
    spoil: Callable[[], Any] | None = None
    graph: Any = None
    unbounded: bool = False
    #: What all ranks do once it has failed, so that its failure is not that of others, too.
    mend: Callable[[], None] | None = None

    def failed(self, failure: Failed) -> None:
        if self.unbounded and not failure.everywhere:
            raise Lost(f"{self.name} failed on some ranks only, and the others wait for them: {failure}") from failure
        self.row.status, self.row.note, self.row.rounds_ms = "failed", str(failure), []
        if self.mend is not None:
            self.mend()


class Bench:
    """One run: every shape, every method, in each mode."""

    def __init__(self, asked: argparse.Namespace, peers: Peers, device: torch.device) -> None:
        self.asked, self.peers, self.device = asked, peers, device
        self.cuda = device.type == "cuda"
        self.dtype = getattr(torch, asked.dtype)
        self.rounds = (asked.rounds or ROUNDS) if self.cuda else min(asked.rounds or ROUNDS, 2)
        self.bad = False
        self.kind = kind_of(asked.op, asked.suite)
        self.budget = Budget(asked.seconds)
        if "async_tp" in asked.methods:
            with contextlib.suppress(ImportError):  # without it the call raises, and its row says so
                importlib.import_module("torch.distributed._symmetric_memory")

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def free(self) -> None:
        """Give the memory of the last shape back."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    # one shape

    def shape(self, shape: Any) -> dict[str, Result]:
        """The results of every mode, or Failed if the operands cannot be made."""
        problem = judged(self.kind, shape, self.dtype, self.device, self.peers)
        methods = [Method(name, Row(name), spoil=problem.spoil, unbounded=name in problem.UNBOUNDED) for name in self.asked.methods]
        for method in methods:
            try:
                if method.name in (*problem.OURS, *problem.ON_REQUEST):
                    method.context = self.peers.attempt(functools.partial(problem.context, method.name))
                method.call = problem.call(method.name, method.context)
                self.first(method)
                self.check(problem, method, 3)
            except Failed as failure:
                method.failed(failure)
                if method.context is not None:
                    self.begin_again(problem, methods)
        found = {mode: Result(shape, self.measure(mode, problem, methods)) for mode in self.asked.modes}
        for method in methods:
            if method.context is not None:
                method.context.close()
        rows = [row for result in found.values() for row in result.rows]
        ours = *problem.OURS, *problem.ON_REQUEST
        self.bad |= any(row.status == "WRONG" or (row.status == "failed" and row.method in ours) for row in rows)
        return found

    def begin_again(self, problem: Problem, methods: Sequence[Method]) -> None:
        """The ranks may have made different calls, after which no context of theirs is of use: new ones for the methods so far."""
        for method in methods:
            if method.context is not None:
                with contextlib.suppress(ValueError, PeerTimeout):  # a rank may learn only here that they did
                    method.context.close()
                method.context = None
                if method.row.status == "ok":
                    method.context = self.peers.attempt(functools.partial(problem.context, method.name))
                    method.call = problem.call(method.name, method.context)

    def first(self, method: Method) -> None:
        """The first call, agreed on twice: that it could be made, and (a rank may be waiting for another) that it ended."""
        assert method.call is not None
        self.peers.attempt(method.call)
        self.peers.attempt(lambda: self.settle(method))

    def settle(self, method: Method) -> None:
        self.synchronize()
        if method.context is not None:
            method.context.check()

    def check(self, problem: Problem, method: Method, calls: int = 1) -> None:
        """Compare the last of ``calls`` calls in a row; the row says what came of it."""
        call, spoil = method.call, method.spoil
        assert call is not None and spoil is not None

        def judged() -> tuple[float, float]:
            spoil()
            for _ in range(calls):
                result = call()
            self.settle(method)
            if method.graph is None:  # else it is what the last call was that the host has made, of this method or another
                method.row.path = getattr(method.context, "last_path", "")
            return problem.judge(method.name, result)

        said = self.peers.gather(self.peers.attempt(judged))
        method.row.choice = problem.chosen(method.context)
        wrong = [rank for rank, (error, allowed) in enumerate(said) if not error <= allowed]
        method.row.error, method.row.allowed = max(said, key=lambda s: math.inf if math.isnan(s[0]) else s[0] / s[1])
        if wrong:
            method.row.status, method.row.rounds_ms = "WRONG", []
            method.row.note = f"error {method.row.error:.2g}, allowed {method.row.allowed:.2g}, on ranks {wrong}"

    # the times of one mode

    def measure(self, mode: str, problem: Problem, methods: Sequence[Method]) -> list[Row]:
        """The rows of a mode; what is wrong or failed in one keeps its own row and leaves the others in step.

        But for an exception on some ranks only, in one of our methods: with that the others of ours fail, too, and say so.
        """
        measured = [replace(method, row=replace(method.row, rounds_ms=[])) for method in methods]
        per_call = GRAPH_CALLS if mode == "graph" else 1
        for method in self.alive(measured):
            with self.guard(method):
                if mode == "graph":
                    self.capture(method)
                    self.check(problem, method)
        self.take_turns(measured, per_call)
        for method in self.alive(measured):
            with self.guard(method):
                if mode == "eager" and self.cuda:
                    method.row.host_us = self.host_us(method)
                self.check(problem, method)
        for method in measured:
            if method.graph is not None:
                method.graph.reset()
            if not self.cuda:
                method.row.rounds_ms = []
        return [method.row for method in measured]

    def take_turns(self, methods: Sequence[Method], per_call: int) -> None:
        """The rounds, of which each call is ``per_call`` calls of the operation."""
        long = self.warm_up(self.alive(methods), per_call)
        turn, worked, enough = 0, 0.0, TIMED_LONG_MS if long and not self.asked.rounds else 0.0
        while self.alive(methods) and (turn < self.rounds or worked < enough):
            for method in tuning.in_turn(self.alive(methods), turn):
                with self.guard(method):
                    ms = self.time(method, method.row.iters)
                    method.row.rounds_ms.append(ms / per_call)
                    worked += ms * (method.row.iters + 1)
            turn += 1

    @staticmethod
    def alive(methods: Sequence[Method]) -> list[Method]:
        return [method for method in methods if method.row.status == "ok"]

    @contextlib.contextmanager
    def guard(self, method: Method) -> Any:
        try:
            yield
        except Failed as failure:
            method.failed(failure)

    def capture(self, method: Method) -> None:
        """Make the method's call a replay of GRAPH_CALLS calls, which returns the result of the last of them."""
        call = method.call
        assert call is not None

        def captured() -> Any:
            graph = torch.cuda.CUDAGraph()
            method.graph = graph
            with torch.cuda.graph(graph):
                for _ in range(GRAPH_CALLS):
                    result = call()
            return result

        self.peers.attempt(lambda: self.settle(method))
        result = self.peers.attempt(captured)
        method.row.path = getattr(method.context, "last_path", "")
        graph = method.graph
        spoil = method.spoil

        def spoil_both() -> None:
            if result is not None:  # of reduce only root has one
                result.fill_(math.nan)
            if spoil is not None:  # behind it, as it gives back what is computed in place
                spoil()

        method.spoil = spoil_both

        def replay() -> Any:
            graph.replay()
            return result

        method.call = replay

    def warm_up(self, methods: Sequence[Method], per_call: int) -> bool:
        """Calls until the clocks have settled, and how many calls a timing takes. Whether all take long; alike on all ranks."""
        cost: list[tuple[Method, float]] = []
        for method in methods:
            with self.guard(method):
                ms = self.time(method, WARM_CALLS if self.cuda else 1)
                method.row.iters = (self.asked.iters or auto_iters(ms)) if self.cuda else 1
                cost.append((method, ms))
        long = self.cuda and bool(cost) and min(ms for _, ms in cost) >= LONG_MS * per_call
        worked, enough = 0.0, WARM_LONG_MS if long else WARM_MS
        while self.cuda and cost and worked < enough:
            for method, ms in cost:
                if method.row.status == "ok":
                    with self.guard(method):
                        self.time(method, method.row.iters)
                worked += max(ms, 1e-3) * (method.row.iters + 1)
        return long

    def time(self, method: Method, calls: int) -> float:
        """ms a call, back to back, on the slowest rank."""
        call = method.call
        assert call is not None

        self.synchronize()
        self.peers.barrier()
        return self.peers.slowest(lambda: tuning.timed(call, calls, self.cuda, lambda: self.settle(method)) * 1e3)

    def host_us(self, method: Method) -> float:
        """µs of the host a call, on the slowest rank."""
        call = method.call
        assert call is not None

        def timed() -> float:
            since = time.perf_counter()
            for _ in range(HOST_CALLS):
                call()
            spent = time.perf_counter() - since
            self.settle(method)
            return spent / HOST_CALLS * 1e6

        self.synchronize()
        self.peers.barrier()
        return self.peers.slowest(timed)

    # all shapes

    def run(self, arguments: Sequence[str]) -> int:
        """Everything; the exit status. Rank 0 speaks and writes."""
        asked, loud = self.asked, self.peers.rank == 0
        voice = Voice(loud)
        out: Path | None = Path(asked.out) if asked.out and loud else None
        self.peers.attempt(lambda: out.mkdir(parents=True, exist_ok=True) if out else None)
        protocol = {
            "rounds": self.rounds, "iters": asked.iters or "auto", "calls_per_graph": GRAPH_CALLS,
            "wire_gb_s": bench_report.WIRE_GB_S, "sample": [SAMPLE_ROWS, SAMPLE_COLUMNS], "tolerance": TOLERANCE,
        }  # fmt: skip
        stamp = bench_report.environment(arguments) if loud else {}
        suite, itemsize = "custom" if asked.shapes else asked.suite, self.dtype.itemsize
        reports: dict[str, Report] = {
            mode: self.kind.REPORT(asked.op, suite, self.peers.size, mode, asked.dtype, itemsize, protocol, stamp)
            for mode in asked.modes
        }
        for report in reports.values():
            report.left_out += [{"shape": f"{name} at every shape", "why": why} for name, why in asked.left_out.items()]
        shapes: list[Any] = asked.shapes or list(self.kind.SUITES[asked.suite])
        with voice.progress(len(shapes)) as advance:
            for i, shape in enumerate(shapes):
                begun = time.monotonic()
                why = self.kind.unfit(shape, self.peers.size)
                if why is None:
                    why = self.peers.gather(self.budget.spent())[0] or None
                text = f"skipped: {why}"
                if why is None:
                    try:
                        found = self.shape(shape)
                        text = "; ".join(f"{mode}: {bench_report.headline(result.rows)}" for mode, result in found.items())
                        for mode, result in found.items():
                            reports[mode].results.append(result)
                    except Failed as failure:
                        self.bad, why = True, str(failure)
                        text = f"failed: {why}"
                for report in reports.values():
                    if why is not None:
                        report.left_out.append({"shape": str(shape), "why": why})
                    if out:
                        voice.save(report, out)
                voice.say(f"[{i + 1}/{len(shapes)}] {asked.op} {shape} ({time.monotonic() - begun:.1f} s) {text}")
                advance()
                self.free()
        if loud:
            stamp["clocks_after"] = bench_report.clocks()
            self.bad |= not voice.report(reports.values(), out)
        rows = [row for report in reports.values() for result in report.results for row in result.rows]
        measured = any(row.status == "ok" for row in rows)
        if not measured:
            voice.say("nothing was measured")
        return 1 if self.bad or not measured else 0


def main(argv: list[str] | None = None) -> int:
    asked = parse(argv, torch.cuda.is_available())
    if asked.plot_records:
        return bench_records.plot(asked.op, asked.plot_records, asked.out or ".") if os.environ.get("RANK", "0") == "0" else 0
    if command.lacks_rich("bench", "rich matplotlib"):
        return 2

    def work() -> int:
        return Bench(asked, Peers(), world.current().device).run(command.arguments(argv))

    return command.run("bench", work, command.lost)

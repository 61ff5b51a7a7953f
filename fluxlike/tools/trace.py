"""`python -m fluxlike trace {gemm_rs,ag_gemm}`: what every program of every rank does when, in one call. See docs/trace.md."""

import argparse
import contextlib
import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..ops import trace as tracing
from ..runtime import world
from ..runtime.errors import PeerTimeout
from . import command, trace_events, trace_report
from .bench_peers import Failed, Peers
from .bench_problems import PROBLEMS, Problem, judged
from .bench_report import Shape, environment

#: Whose kernels write down their times: those of stream_k do not.
SCHEDULES = ("auto", "copy_engine", "in_kernel")
#: The first shapes of bench's headline suite.
GPU_SHAPES = {"gemm_rs": Shape(8192, 8192, 28672), "ag_gemm": Shape(8192, 57344, 8192)}


def cpu_shape(op: str, ranks: int) -> Shape:
    """Two rows and two columns of tiles a chunk, for the interpreter."""
    return Shape(128 * ranks, 128, 64 * ranks) if op == "gemm_rs" else Shape(128 * ranks, 128 * ranks, 64)


class Tracer:
    """The traces of one run."""

    def __init__(self, asked: argparse.Namespace, peers: Peers, device: torch.device) -> None:
        self.asked, self.peers, self.device = asked, peers, device
        self.calls = asked.calls or (20 if device.type == "cuda" else 2)

    def shape(self, shape: Shape) -> tuple[str, dict[str, float], list[tracing.Traced]]:
        """The path of the last call, µs a call with and without tracing, and what each rank has written down of the last one.

        Failed if a result is wrong.
        """
        make, dtype = PROBLEMS[self.asked.op], getattr(torch, self.asked.dtype)
        problem = judged(make, shape, dtype, self.device, self.peers)
        context = self.peers.attempt(functools.partial(problem.context, self.asked.schedule))
        try:
            took = {"untraced": self.time(problem, context)}
            trace = tracing.begin(context)
            took["traced"] = self.time(problem, context)
            traced = self.peers.attempt(trace.read)
            path = context.last_path
        except Failed:  # on all ranks, which go on with the next shape
            with contextlib.suppress(ValueError, PeerTimeout):
                context.close()
            raise
        context.close()
        told = self.peers.gather(traced)
        return path, took, [tracing.Traced(facts, times, copies, tracing.Clock(*clock)) for facts, times, copies, clock in told]

    def time(self, problem: Problem, context: Any) -> float:
        """µs a call, back to back, on the slowest rank; of calls whose last result is right, or Failed."""
        seconds = 0.0

        def called(calls: int) -> torch.Tensor:
            nonlocal seconds
            problem.spoil()
            since = time.perf_counter()
            for _ in range(calls):
                result = problem.ours(context)
            context.check()
            seconds = time.perf_counter() - since
            return result

        def right(result: torch.Tensor) -> None:
            error, allowed = problem.judge(self.asked.schedule, result)
            if not error <= allowed:
                raise ValueError(f"a wrong result: error {error:.2g}, allowed {allowed:.2g}")

        self.peers.attempt(lambda: called(1))  # which compiles
        self.peers.barrier()
        result = self.peers.attempt(lambda: called(self.calls))
        self.peers.attempt(lambda: right(result))
        return self.peers.slowest(lambda: seconds) / self.calls * 1e6

    def run(self, arguments: Sequence[str]) -> int:
        """Every shape; the exit status. Rank 0 speaks and writes."""
        asked, loud = self.asked, self.peers.rank == 0
        out = Path(asked.out)
        self.peers.attempt(lambda: out.mkdir(parents=True, exist_ok=True) if loud else None)
        stamp = environment(arguments, "trace") if loud else {}
        status = 0
        for shape in asked.shapes or [GPU_SHAPES[asked.op] if self.device.type == "cuda" else cpu_shape(asked.op, self.peers.size)]:
            try:
                found = self.shape(shape)
                self.peers.attempt(functools.partial(self.report, shape, *found, stamp, out) if loud else lambda: None)
            except Failed as failure:
                status = 1
                if loud:
                    print(f"{asked.op} {shape}: {failure}", file=sys.stderr)
        return status

    def report(
        self, shape: Shape, path: str, took: dict[str, float], ranks: list[tracing.Traced], stamp: dict[str, Any], out: Path
    ) -> None:
        """Tell of a shape, and write its files."""
        lines, clocks = [trace_events.timeline(one) for one in ranks], [one.clock for one in ranks]
        report = trace_report.Report(self.asked.op, shape, self.asked.dtype, path, lines, clocks, took, stamp)
        print("\n".join(report.lines()))
        print(f"written: {report.save(out)}")
        picture = out / f"{report.name}.png"
        print(trace_report.plot(report, picture) or f"written: {picture}", flush=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.Parser(
        prog="python -m fluxlike trace",
        description="Writes what every program of every rank did in one call, for ui.perfetto.dev and as a picture. Start it with "
        "scripts/launch.sh.",
        epilog="Exit status: 1 if a result is wrong, or nothing was traced, as where auto leaves the product to torch; 2 for wrong "
        "arguments, as sizes that the ranks do not divide, or ranks on several nodes. What the lanes mean, and what it costs: "
        "docs/trace.md.",
    )
    parser.add_argument("op", choices=list(PROBLEMS))
    parser.add_argument("--shapes", help="MxNxK,MxNxK… of the whole problem (GPUs: the first of bench's headline suite)")
    parser.add_argument("--schedule", choices=SCHEDULES, default="auto", help="who carries the data (auto)")
    command.add_dtype(parser)
    parser.add_argument("--calls", type=int, help="calls back to back, of which the last is shown (GPUs 20, CPU 2)")
    parser.add_argument("--out", metavar="DIR", default="build/trace", help="where JSON and PNG go (build/trace)")
    asked = parser.parse_args(argv)
    if asked.calls is not None and asked.calls < 1:
        parser.error(f"--calls {asked.calls} is below 1; make at least one call")
    command.read_shapes(parser, asked)
    cuda, kind = torch.cuda.is_available(), PROBLEMS[asked.op]
    command.refuse_large(parser, asked.shapes or (), cuda, kind)
    command.refuse_uneven(parser, asked.shapes or ([GPU_SHAPES[asked.op]] if cuda else []), kind)  # any ranks divide `cpu_shape`
    command.writable(parser, asked.out)
    return asked


def main(argv: list[str] | None = None) -> int:
    asked = parse(argv)

    def work() -> int:
        if command.spans_nodes("trace"):
            return 2
        return Tracer(asked, Peers(), world.current().device).run(command.arguments(argv))

    return command.run("trace", work, command.lost)

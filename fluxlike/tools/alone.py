"""`python -m fluxlike alone {gemm_rs,ag_gemm}`: what a call costs beside its product, on one GPU that plays one rank of several.

Needs one GPU and no launcher. Rank 0's peers are its own memory, all signals are there and nothing is copied (`runtime.alone`). So
nothing shows of how fast links are, nor of ranks that begin apart; what shows is what the kernel does besides cuBLAS's product.

Protocol: shapes M×N×K of the whole problem on R ranks, normal random operands and partial sums. First each method's result is
compared with torch's of the same operands and one number for all that peers bring. Then calls inside CUDA graphs of ten: the
methods take turns (`ops.tuning.in_turn`) after half a second of work, and the figure is the median over the rounds, µs a call.
`gemm` is torch.mm of what this rank multiplies; `one rank` our kernel in a group of one, so without signals. Each call, of torch's
as well, stands behind a launch that fills a few words: with copy_engine those are the flags, which a call takes back. Without a
GPU results are compared, and no time is reported.

With ``--each-tile`` each of them is made in every tile that it could have (`tilings`), in turns, too.

With ``--tiles`` it also says what tiles take: medians over those of some calls that write their times down (`kernels.trace`), each
the last of 30 back to back. That is some milliseconds of work, in which clocks are not down yet, so calls take less than above.
"""

import argparse
import collections
import dataclasses
import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import fluxlike

from ..kernels import sync
from ..kernels.tiles import rows_of
from ..ops import choice, trace, tuning
from ..ops.ag_gemm import create_ag_gemm_context
from ..ops.gemm_rs import create_gemm_rs_context
from ..runtime import alone
from . import bench_report, command, once, trace_events
from .bench_problems import PROBLEMS, SUITES
from .bench_records import MOST_RANKS
from .bench_report import Shape

SCHEDULES = ("copy_engine", "in_kernel")
CALLS, WARM_S = 10, 0.5
#: Calls that are traced for what tiles take, and how many are made for each.
TRACED, BURST = 6, 30
#: Larger than the number of any call.
EVERY_CALL = 1 << 40

Call = Callable[[], Any]


def operands(op: str, shape: Shape, ranks: int, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """What rank 0 brings to a call: gemm_rs x [M, K/R] and weight [N, K/R], ag_gemm x [M/R, K] and weight [N/R, K]."""
    operand = tuning.random(device, dtype)
    if op == "gemm_rs":
        return operand(shape.m, -(-shape.k // ranks)), operand(shape.n, -(-shape.k // ranks))
    return operand(rows_of(shape.m, ranks, 0), shape.k), operand(-(-shape.n // ranks), shape.k)


def context(op: str, shape: Shape, dtype: torch.dtype, schedule: str) -> Any:
    make = create_gemm_rs_context if op == "gemm_rs" else create_ag_gemm_context
    return make(shape.m, shape.n, shape.k, dtype, schedule=schedule)


def call_of(op: str, ctx: Any, x: torch.Tensor, weight: torch.Tensor, m: int) -> Call:
    """A call behind the credits and flags that it waits for; the slots hold random numbers."""
    ctx.head[sync.CONSUMED.value :] = EVERY_CALL
    ctx.flags.fill_(EVERY_CALL)
    ctx.data.normal_()

    def call() -> torch.Tensor:
        ctx.full.fill_(1)
        return fluxlike.gemm_rs(x, weight, ctx) if op == "gemm_rs" else fluxlike.ag_gemm(x, weight, ctx, m=m)  # type: ignore

    return call


def check(op: str, ctx: Any, call: Call, x: torch.Tensor, weight: torch.Tensor) -> None:
    """The result, where all that the peers have brought is one number. Raises RuntimeError if it is not torch's."""
    before = ctx.data.clone()
    brought = 2.0 ** round(math.log2(4 * x.shape[1] ** 0.5)) if op == "gemm_rs" else 1.0  # no less than the own part
    ctx.data.fill_(brought)
    got, weight = call().double(), weight.double()
    if op == "gemm_rs":
        wanted = x[: got.shape[0]].double() @ weight.T + brought * (ctx.size - 1)
    else:
        wanted = torch.cat([x.double() @ weight.T, weight.sum(1).expand(got.shape[0] - x.shape[0], -1)])
    ctx.check()
    ctx.data.copy_(before)
    error, most = (got - wanted).abs().max().item(), wanted.abs().max().item()
    if not error <= 0.02 * most:
        raise RuntimeError(f"{op} by {ctx.schedule}: the result is {error:.3g} off, and its largest element {most:.3g}")


def times(methods: dict[str, Call], rounds: int) -> dict[str, float]:
    """µs a call of each method, inside a CUDA graph."""
    graphs = {}
    for name, call in methods.items():
        call()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for _ in range(CALLS):
                call()
    since = time.monotonic()
    while time.monotonic() - since < WARM_S:
        for graph in graphs.values():
            graph.replay()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {name: [] for name in methods}
    for turn in range(rounds):
        for name in tuning.in_turn(list(methods), turn):
            found[name].append(tuning.timed(graphs[name].replay, 1, True, torch.cuda.synchronize) / CALLS * 1e6)
    return {name: statistics.median(values) for name, values in found.items()}


def tile_times(ctx: Any, call: Call) -> dict[str, float]:
    """Medians, µs: a traced call; tiles of the own chunk and of others', to the last product ("products") and from there ("end").

    Waits are left out.
    """
    recorder, spans, calls = trace.begin(ctx), collections.defaultdict[str, list[int]](list), []
    for _ in range(TRACED):
        for _ in range(BURST):
            call()
        line = trace_events.timeline(recorder.read())
        calls.append(max(program.end for program in line.programs) - line.begin)
        for program in line.programs:
            for span in program.spans:
                if span.chunk is not None:
                    whose = "own" if span.chunk == line.rank else "others'"
                    spans[f"{whose} {'products' if span.kind == 'compute' else 'end'}"].append(span.end - span.begin)
    return {name: statistics.median(found) / 1e3 for name, found in (*spans.items(), ("call", calls))}


def tilings(ctx: Any, shape: Shape) -> list[choice.Choice]:
    """The usual choice of the context's schedule in each tile of as many rows, without regard to groups."""
    problem = ctx.problem(shape.m, shape.n, shape.k)
    usual = choice.usual(problem, ctx.schedule)
    options = [dataclasses.replace(usual, tile=tile) for tile in choice.tiles(problem.capability, problem.dtype)]
    return [made for made in options if made.tile.bm == usual.tile.bm and choice.why_not(problem, made) is None]


def measure(
    op: str, shape: Shape, ranks: int, dtype: torch.dtype, rounds: int, tiles: bool = False, each: bool = False
) -> dict[str, Any]:
    """µs of each method, and "tiles": `tile_times` of each schedule, if asked for; nothing without a GPU.

    ``each``: each method in each of its `tilings`, "method, tile". RuntimeError if a method is wrong.
    """
    methods: dict[str, Call] = {}
    contexts: dict[str, Any] = {}

    def add(method: str, schedule: str, problem: Shape, x: torch.Tensor) -> None:
        make = functools.partial(context, op, problem, dtype, schedule)
        for made in tilings(make(), problem) if each else [None]:
            name = f"{method}, {made.tile}" if made else method
            contexts[name] = ctx = make()
            ctx.use(made)
            methods[name] = call_of(op, ctx, x, weight, shape.m)
            check(op, ctx, methods[name], x, weight)

    with alone.playing(1) as device:
        x, weight = operands(op, shape, ranks, device, dtype)
        whole = x if op == "gemm_rs" else tuning.random(device, dtype)(shape.m, shape.k)
        out, words = whole.new_empty(shape.m, weight.shape[0]), torch.zeros(32, dtype=torch.int32, device=device)

        def gemm() -> None:
            words.fill_(1)
            torch.mm(whole, weight.T, out=out)

        methods["gemm"] = gemm
        add("one rank", SCHEDULES[0], Shape(shape.m, *weight.shape), whole)
        with alone.playing(ranks):
            for schedule in SCHEDULES:
                add(schedule, schedule, shape, x)
            if device.type != "cuda":
                return {}
            found: dict[str, Any] = times(methods, rounds)
            if tiles:
                found["tiles"] = {name: tile_times(contexts[name], methods[name]) for name in SCHEDULES}
            return found


def line(shape: Shape, found: dict[str, Any]) -> str:
    """A shape's times, and what they are beside cuBLAS's, as a row of Markdown; what tiles take, below it."""
    if not found:
        return f"{shape}: right, by {' and '.join(SCHEDULES)}; no GPU, so nothing was timed"
    found = dict(found)
    tiles, gemm = found.pop("tiles", {}), found.pop("gemm")
    below = [f"tiles, {schedule}: {', '.join(f'{name} {us:.1f}' for name, us in took.items())}" for schedule, took in tiles.items()]
    rows: dict[str, list[str]] = {}  # one, or one a tile
    for name, us in found.items():
        rows.setdefault(name.partition(", ")[2], []).append(f"{us:.1f} ({us / gemm - 1:+.1%})")
    return "\n".join(
        [f"| {shape}{', ' * bool(tile)}{tile} | {gemm:.1f} | {' | '.join(cells)} |" for tile, cells in rows.items()] + below
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.Parser(
        prog="python -m fluxlike alone",
        description="What a call costs beside its product, on one GPU that plays one rank of several (protocol: the module).",
        epilog="Exit status: 1 if a result is wrong or its file could not be made after all; 2 for wrong arguments, such as a "
        "path where no file can be made, or under a launcher.",
    )
    parser.add_argument("op", choices=("gemm_rs", "ag_gemm"))
    command.add_shapes(parser, suites=SUITES)
    parser.add_argument("--ranks", type=int, default=4, help="ranks that the shapes are spread over (4)")
    parser.add_argument("--rounds", type=int, default=15, help="timings of each method (15)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--each-tile", action="store_true", help="each method in every tile that it could have")
    how.add_argument("--tiles", action="store_true", help="also what tiles take, of calls that write their times down")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, with the machine's")
    command.add_dtype(parser)
    asked = parser.parse_args(argv)
    once.by_itself(parser, "alone plays its rank")
    if asked.ranks < 2:
        parser.error(f"--ranks {asked.ranks}: give two ranks or more")
    if asked.ranks > MOST_RANKS:
        parser.error(f"--ranks {asked.ranks} is above {MOST_RANKS}, the most that records of bench may say; give that or less")
    if asked.rounds < 1:
        parser.error(f"--rounds {asked.rounds}: give one round or more")
    command.choose_suite(parser, asked, torch.cuda.is_available(), PROBLEMS[asked.op])
    command.writable(parser, asked.json, "--json", file=True)
    return asked


def main(argv: list[str] | None = None) -> int:
    asked = parse(argv)
    cuda, rows = torch.cuda.is_available(), []
    stamp = bench_report.environment(command.arguments(argv), "alone")
    if cuda:
        print(f"{asked.op} of {asked.ranks} ranks, µs (beside the product alone)")
        print(f"| M×N×K | gemm | one rank | {' | '.join(SCHEDULES)} |")
        print(f"|{'---|' * (3 + len(SCHEDULES))}")
    for shape in asked.shapes or SUITES[asked.suite][asked.op]:
        try:
            found = measure(asked.op, shape, asked.ranks, getattr(torch, asked.dtype), asked.rounds, asked.tiles, asked.each_tile)
        except (RuntimeError, ValueError) as error:
            print(f"alone: {shape}: {error}", file=sys.stderr)
            return 1
        rows.append({"shape": list(shape), "us": found})
        print(line(shape, found), flush=True)
    if asked.json:
        how = {name: getattr(asked, name) for name in ("op", "ranks", "dtype", "rounds")}
        try:
            Path(asked.json).write_text(json.dumps(how | {"results": rows, "environment": stamp}, indent=1) + "\n")
        except OSError as error:
            print(f"alone: the figures could not be written: {error}; name another file with --json", file=sys.stderr)
            return 1
        print(f"written: {asked.json}")
    return 0

"""`python -m fluxlike tune {gemm_rs,ag_gemm}`: find the fastest way to make calls, and keep it. Start it with launch.sh.

For each shape the candidates that `ops.tuning.shortlist` expects to be fast are made calls of, on `bench`'s operands and by its
protocol: each is first compared with the truth (one that is wrong is not timed and makes the exit status 1), all are warmed up,
and then take turns. The one with the smallest median goes into the user's cache or into --out FILE; what calls got before, unless
another is 1 % faster. Contexts that are made from then on find it (docs/tune.md).

`tune from-records FILE…` makes such a table of what `bench` has written: the faster one of the schedules it measured, made
as the rules of `ops.choice` make it. That is how the tables that come with the package were made.

On the CPU heap all of it runs, and times are those of an interpreter: they mean nothing, no context is to choose by them, and they
are written only with --out.
"""

import argparse
import contextlib
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..ops import choice, cost, tuned, tuning
from ..ops.choice import Choice
from ..ops.tuned import Entry, Machine
from ..runtime import env, world
from ..runtime.errors import PeerTimeout
from ..runtime.wording import counted
from . import command, once
from .bench import Bench, Budget, Method
from .bench_peers import Failed, Peers
from .bench_problems import PROBLEMS, Problem, judged
from .bench_records import check, record_in, recorded, told
from .bench_report import Row, Shape, Voice, nodes_of, sharing_of

ROUNDS = 5


@dataclass
class Trial:
    """A choice, and what came of it."""

    choice: Choice
    predicted_us: float
    row: Row

    @property
    def us(self) -> float | None:
        return None if self.row.ms is None else self.row.ms * 1e3


class Tuner:
    """One run: every shape, its candidates in turns."""

    def __init__(self, asked: argparse.Namespace, peers: Peers, device: torch.device) -> None:
        how = {"op": asked.op, "suite": asked.suite, "dtype": asked.dtype, "rounds": asked.rounds}
        self.asked, self.peers = asked, peers
        self.bench = Bench(argparse.Namespace(**how, iters=None, methods=[], seconds=None), peers, device)
        self.budget = Budget(asked.budget)
        self.context: Any = None

    def shape(self, shape: Shape) -> tuple[choice.Problem, list[Trial]]:
        """What is measured of one shape, the choice without a table first. Failed if no operands or context can be made."""
        bench, peers = self.bench, self.peers
        problem = judged(PROBLEMS[self.asked.op], shape, bench.dtype, bench.device, peers)
        self._renew(problem)
        asked = self.context.problem(*shape)
        usual = choice.choose(asked, "auto", {})
        made = [usual, *(c for c in tuning.shortlist(asked, self.asked.most) if c != usual)]
        trials = [Trial(c, choice.predict(asked, c) * 1e6, Row(str(c))) for c in made]
        methods = [self._method(problem, trial) for trial in trials]
        for method in methods:
            with bench.guard(method):
                bench.first(method)
                bench.check(problem, method, 3)
        bench.take_turns(methods, 1)
        for method in bench.alive(methods):
            with bench.guard(method):
                bench.check(problem, method)
        self._close()
        return asked, trials

    def _method(self, problem: Problem, trial: Trial) -> Method:
        def call() -> torch.Tensor:
            self.context.use(trial.choice)
            return problem.ours(self.context)

        # every choice uses the one context, of which the ranks may have made different calls when a call has failed, at any time
        return Method(str(trial.choice), trial.row, self, call, problem.spoil, mend=lambda: self._renew(problem))

    def _renew(self, problem: Problem) -> None:
        """A new context: the first, or in place of one that a choice has broken."""
        self._close()
        self.context = self.peers.attempt(lambda: problem.context("auto"))

    def _close(self) -> None:
        if self.context is not None:
            with contextlib.suppress(ValueError, PeerTimeout):  # a rank may learn only here of what went wrong
                self.context.close()
        self.context = None

    # what `Bench` asks of a method's context, of the one that there is

    def check(self) -> None:
        self.context.check()

    @property
    def last_path(self) -> str:
        return str(self.context.last_path)

    def run(self) -> int:
        """Everything; the exit status. Rank 0 speaks and writes."""
        asked, peers = self.asked, self.peers
        voice, bad, kept = Voice(peers.rank == 0), False, False
        shapes: list[Shape] = asked.shapes or list(PROBLEMS[asked.op].SUITES[asked.suite])
        for i, shape in enumerate(shapes):
            why = PROBLEMS[asked.op].unfit(shape, peers.size)
            if why is None:
                why = peers.gather(self.budget.spent())[0] or None
            head = f"[{i + 1}/{len(shapes)}] {asked.op} {shape} {asked.dtype} R={peers.size}"
            if why is not None:
                voice.say(f"{head}: skipped, {why}")
                continue
            try:
                problem, trials = self.shape(shape)
                where = peers.attempt(lambda p=problem, t=trials: self._keep(p, t))  # type: ignore[misc]
            except Failed as failure:
                self._close()
                bad, where, trials = True, f"failed: {failure}", []
            voice.say(f"{head}: {where}")
            for line in table(trials):
                voice.say(line)
            bad |= any(trial.row.status != "ok" for trial in trials)
            kept |= fastest(trials) is not None
            self.bench.free()
        if not self.bench.cuda:
            kept_where = "are" if asked.out else "are kept only with --out, as they are"
            voice.say(f"times {kept_where} those of Triton's interpreter and mean nothing on a GPU")
        if not kept:
            voice.say("nothing was tuned")
        return 1 if bad or not kept else 0

    def _keep(self, problem: choice.Problem, trials: Sequence[Trial]) -> str:
        """Write the best one down, on rank 0; where it went."""
        best = fastest(trials)
        if best is None or best.us is None or self.peers.rank:
            return "no choice worked"
        out = Path(self.asked.out) if self.asked.out else None
        if out is None and not self.bench.cuda:
            return "kept nowhere"
        entry = Entry(problem, best.choice, best.us, trials[0].us)
        return f"written to {tuned.store(tuned.machine_of(world.current().executor), [entry], out)}"


def fastest(trials: Sequence[Trial]) -> Trial | None:
    """The one with the smallest median, the first unless another is clearly faster; what was wrong or failed has no time."""
    times = {trial.choice: trial.us for trial in trials if trial.us is not None}
    best = tuning.fastest(times, trials[0].choice) if times else None
    return next((trial for trial in trials if trial.choice == best), None)


def table(trials: Sequence[Trial]) -> list[str]:
    """Lines for people: choice, µs, µs expected, gain over the first, which is what calls get without a table."""
    best, lines = fastest(trials), []
    for trial in trials:
        gain = f"{trials[0].us / trial.us:7.3f}x" if trial.us and trials[0].us else f"{'–':>8}"
        us = f"{trial.us:9.1f}" if trial.us is not None else f"{'–':>9}"
        mark = "best" if trial is best else "" if trial.row.status == "ok" else f"{trial.row.status}: {trial.row.note}"
        lines.append(f"  {trial.choice!s:<58} {us} µs, expected {trial.predicted_us:9.1f}, {gain} {mark}".rstrip())
    return lines


# tables of what bench wrote

#: ms of what was measured of a shape.
Times = dict[choice.Choice, float]
#: How much faster a schedule that a record does not have must be expected to be, for the record to say nothing.
MISSED = 1.1


def from_records(records: Sequence[Path], out: Path) -> int:
    """Write the table of the faster schedule of each shape; the number of shapes.

    A shape may have two records, one of eager calls and one of graphs, which then count alike. ValueError names a record that is
    no use, and two of one shape that are of the same kind: which of them counts is not for their order to say.
    """
    found: dict[choice.Problem, dict[str, tuple[Path, Times]]] = {}
    machines, sources, measured = set(), [], []
    for path in records:
        with told(path):
            data = record_in(path)
            stamp, mode = data["environment"], data["mode"]
            if data["op"] not in PROBLEMS:
                raise ValueError(f"it is of {data['op']!r}, and tables are of {' and '.join(PROBLEMS)}")
            check(data)
            if stamp["multiprocessors"] is None:
                raise ValueError("multiprocessors is None, and a table is of a number of them")
            elsewhere = nodes_of(stamp) > 1 or sharing_of(stamp) > 1
            machine = Machine(stamp["gpu"], _capability(stamp["gpu"]), stamp["multiprocessors"])
            machines.add(machine)
            sources.append(path.name)
            measured.append({"triton": stamp["versions"]["triton"], "fluxlike": stamp["fluxlike"], "commit": stamp["commit"]})
            problems = [_problem(data, shape, machine) for shape in data["shapes"]]
            times = {problem: _times(problem, shape) for problem, shape in zip(problems, data["shapes"], strict=True)}
        if elsewhere:
            where = "on several nodes or shared GPUs"
            raise ValueError(f"the ranks of {path} were {where}; give records of one node with a GPU for each")
        for problem, its in times.items():
            modes = found.setdefault(problem, {})
            if mode in modes:
                shape = f"{problem.m}x{problem.n}x{problem.k}"
                raise ValueError(f"{path} and {modes[mode][0]} both have {shape}, {mode}; give one record of each")
            modes[mode] = path, its
    if len(machines) != 1:
        raise ValueError(f"the records are of {len(machines)} kinds of machine, {sorted(map(str, machines))}; a table is of one")
    entries = [_fastest(problem, [times for _, times in modes.values()]) for problem, modes in found.items()]
    kept = [entry for entry in entries if entry is not None]
    about = "the faster schedule of each shape, with the tiles and cuts that it was measured with or that the rules give it"
    if any(len(modes) > 1 for modes in found.values()):
        about += "; us: geometric mean of eager calls and graphs where both were"
    # of every record: the table is of all of them
    software = {key: ", ".join(dict.fromkeys(str(one[key]) for one in measured if one[key])) for key in measured[0]}
    tuned.store(machines.pop(), kept, out, anew=True, software=software, source=sources, about=about)
    return len(kept)


def _problem(data: dict[str, Any], shape: dict[str, Any], machine: Machine) -> choice.Problem:
    dtype, sizes = getattr(torch, data["dtype"]), (shape["m"], shape["n"], shape["k"])
    memory = cost.memory_rate(machine.gpu)
    return choice.Problem(data["op"], machine.capability, machine.multiprocessors, data["ranks"], dtype, *sizes, memory=memory)


def _times(problem: choice.Problem, shape: dict[str, Any]) -> Times:
    """The median of each schedule of a shape, in ms, by how its calls were made; none of what was wrong or failed.

    Records up to 2026-11-30 do not say how: they are taken for what is usual today. What no call can be any more says nothing.
    """
    found = {}
    for usual in choice.usuals(problem):
        facts = shape["methods"].get(usual.transport, {})
        if facts.get("ms"):
            made = recorded(facts, usual, problem)
            if made is not None:
                found[made] = facts["ms"]["median"]
    return found


def _fastest(problem: choice.Problem, measured: Sequence[Times]) -> Entry | None:
    """The way of the least ``measured`` time, if copy_engine and another schedule were timed. Of several times the geometric mean
    counts: twice as long in a graph is as much as twice as long without, where the host makes few rows take several times as long.

    None where a schedule that was not timed is expected to be `MISSED` times as fast: then calls had better go by the model.
    """
    ways = [made for made in measured[0] if all(made in one for one in measured)]
    times = {made: statistics.geometric_mean(one[made] for one in measured) for made in ways}
    timed = {made.transport for made in ways}
    if "copy_engine" not in timed or len(timed) < 2:
        return None
    best = min(ways, key=lambda made: times[made])
    missing = [choice.predict(problem, usual) for usual in choice.usuals(problem) if usual.transport not in timed]
    if missing and times[best] * 1e-3 > MISSED * min(missing):
        return None
    usual = min(ways, key=lambda made: choice.predict(problem, made))
    return Entry(problem, best, round(times[best] * 1e3, 1), round(times[usual] * 1e3, 1))


#: Records do not say it.
_CAPABILITIES = {"NVIDIA H200": (9, 0), "NVIDIA H100": (9, 0), "NVIDIA H100 80GB HBM3": (9, 0)}


def _capability(gpu: Any) -> tuple[int, int]:
    if gpu not in _CAPABILITIES:
        raise ValueError(f"the compute capability of {gpu!r} is not known here, but that of {', '.join(_CAPABILITIES)}")
    return _CAPABILITIES[gpu]


# the command line


def parse(argv: Sequence[str] | None, cuda: bool) -> argparse.Namespace:
    """The arguments, with ``shapes`` made ready; ends the process if they are no use."""
    parser = command.Parser(
        prog="python -m fluxlike tune",
        description="Measures how calls of some shapes are made fastest, and keeps it. Start it with scripts/launch.sh.",
        epilog="Exit status: 1 if a candidate failed or was wrong, or nothing was tuned or could be written; 2 for wrong "
        "arguments, records that are no use, ranks on several nodes, or where the package rich is missing. See docs/tune.md.",
    )
    ops = parser.add_subparsers(dest="op", required=True)
    for op in PROBLEMS:
        one = ops.add_parser(op, help=f"tune {op}")
        command.add_shapes(one, "shapes of bench; ")
        command.add_dtype(one)
        one.add_argument("--out", metavar="FILE", help="write there instead of into the cache, to which only GPUs write")
        one.add_argument("--budget", type=command.seconds, metavar="SECONDS", help="begin no new shape after so many seconds")
        one.add_argument("--rounds", type=int, default=ROUNDS, help=f"timings of each choice ({ROUNDS})")
        one.add_argument("--most", type=int, default=tuning.MOST, help=f"choices that are measured of a shape ({tuning.MOST})")
    records = ops.add_parser("from-records", help="make a table of what bench wrote; runs on one process without a GPU")
    records.add_argument("records", nargs="+", type=Path, metavar="RECORD")
    records.add_argument("--out", type=Path, required=True, metavar="FILE")
    asked = parser.parse_args(argv)
    parser = ops.choices[asked.op]  # whose usage a complaint shows
    if asked.op == "from-records":
        for record in asked.records:
            if asked.out.exists() and record.exists() and record.samefile(asked.out):
                parser.error(f"--out {asked.out} is the record {record}, which it would replace; name another file")
        command.writable(parser, str(asked.out), file=True, replaced=True)
        return asked
    once.positive(parser, asked, ["rounds", "most"])
    command.choose_suite(parser, asked, cuda, PROBLEMS[asked.op])
    command.writable(parser, asked.out, file=True, replaced=True)
    return asked


def main(argv: list[str] | None = None) -> int:
    asked = parse(argv, torch.cuda.is_available())
    if asked.op == "from-records":
        try:
            written = from_records(asked.records, asked.out)
        except (OSError, ValueError) as error:
            print(f"tune: {error}", file=sys.stderr)
            return 2 if isinstance(error, ValueError) else 1
        print(f"{counted(written, 'shape')} written to {asked.out}")
        return 0
    if command.lacks_rich("tune"):
        return 2
    env.put("FLUXLIKE_TUNE", "off")  # what is compared with is what calls get without a table

    def work() -> int:
        return 2 if command.spans_nodes("tune") else Tuner(asked, Peers(), world.current().device).run()

    return command.run("tune", work, command.lost)

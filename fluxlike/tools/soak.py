"""`python -m fluxlike soak --minutes N`: random calls for a long time, every result checked. Start it with launch.sh; docs/soak.md.

What is done is drawn from the seed (`soak_plan`), so it can be done again, in whole or one step of it (``--only``).

* Warm-up: every signature on every set of data, one call at a time. The digests of the results are what all later calls must give
  again, bit for bit; one result of each signature is compared with the reference (`soak_check`). Then the graphs are captured.
* Then bursts: operands of all steps are made, all calls are queued back to back, and only then the host waits and compares, so that
  a race between calls has its chance. Every tenth step is compared with the reference as well. A result is filled with NaN before
  its memory goes back, so that no call passes with what an earlier one left.
* Ranks agree once a burst, over gloo: on the failures so far, on the time (rank 0's clock), on whether to take a memory sample.
* A wrong result is told and the run goes on; an exception on any rank ends the run on all of them. Ctrl-C ends it behind the burst.

This file: the run and the command line. soak_plan: what to do. soak_check: operands, digest, reference. soak_machine: what the
GPU is asked for, and the memory. soak_report: what comes of it.
"""

import argparse
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fluxlike

from ..runtime import env, world
from ..runtime.wording import counted
from . import bench_report, command, soak_plan
from .soak_check import Operands, call, digest, judge
from .soak_machine import Gpu, Graph, Machine, Sample, compiled
from .soak_plan import GRAPH_MODES, Burst, Profile, Signature, Step
from .soak_report import growth, save, table, worst_of

#: Room for the contexts of the GPU pool on four ranks, and to move them about.
GPU_HEAP_BYTES = 4 << 30
PROGRESS_S, CLOCKS_S = 10.0, 60.0
#: Of a plan that is made and not run.
STEPS_A_SECOND = 250_000


@dataclass
class Work:
    """A step while its burst runs: its operands, and what its calls gave."""

    step: Step
    operands: Operands
    given: list[torch.Tensor] = field(default_factory=list)
    results: list[list[torch.Tensor]] = field(default_factory=list)  # of eager calls
    digests: list[tuple[str, torch.Tensor]] = field(default_factory=list)  # which call, and its digest


#: (step, which call, what is wrong)
Found = tuple[Step, str, str]


class Soak:
    """One run on this rank."""

    def __init__(self, asked: argparse.Namespace, machine: Machine, profile: Profile) -> None:
        this = world.current()
        self.asked, self.machine, self.profile, self.control = asked, machine, profile, this.control
        self.rank, self.ranks = self.control.rank, self.control.size
        if machine.device.type == "cpu" and not env.get("FLUXLIKE_TOPOLOGY"):  # there are no links that could be detected
            env.put("FLUXLIKE_TOPOLOGY", "p3.16xlarge" if self.ranks <= 8 else f"ring-{self.ranks}")
        self.pool = soak_plan.signatures(asked.seed, self.ranks, self.profile)
        self.sizes = soak_plan.context_sizes(self.pool)
        self.members = soak_plan.groups(self.ranks)
        # every rank makes every group, whether it is a member or not
        self.groups: list[Any] = [this.group, *(dist.new_group([this.control.ranks[i] for i in m]) for m in self.members[1:])]
        self.contexts: dict[soak_plan.ContextKey, Any] = {}
        self.graphs: dict[int, Graph] = {}
        self.known: dict[tuple[int, int], list[int]] = {}
        self.doing = "setting up"
        self.interrupted = False
        self.found: list[Found] = []  # wrong on this rank in this burst
        self.failures: list[dict[str, Any]] = []  # of all ranks
        self.samples: list[Sample] = []
        self.sample_s = min(5.0, asked.minutes)  # seconds from one to the next: 60 of them, or more
        self.clocks: list[Any] = []
        self.launched = 0  # by contexts that are closed, and by replays
        self.reset()

    def reset(self) -> None:
        """Count from here on."""
        self.begun = time.monotonic()
        self.calls: Counter[tuple[str, str, str]] = Counter()
        self.steps = self.bursts = self.judged = self.remade = 0
        self.compiled_before, self.launched_before = compiled(), self.launches()

    def launches(self) -> int:
        """Kernels of the library that this rank has launched or replayed."""
        counts = {id(ctx.stats): ctx.stats for ctx in world.current().contexts}  # type: ignore[attr-defined]  # inner ones share theirs
        return self.launched + sum(stats["launches"] for stats in counts.values())

    def seconds(self) -> float:
        return time.monotonic() - self.begun

    # contexts and graphs

    def mine(self, place: int) -> bool:
        return self.rank in self.members[place]

    def make_context(self, key: soak_plan.ContextKey) -> None:
        place, op, schedule, name = key
        sizes, dtype, group = self.sizes[key], getattr(torch, name), self.groups[place]
        if op == "gemm_ar":
            algo = "auto" if schedule == soak_plan.FEW else schedule
            self.contexts[key] = fluxlike.create_gemm_ar_context(*sizes[:2], dtype, group, algo)
        else:
            self.contexts[key] = getattr(fluxlike, f"create_{op}_context")(*sizes, dtype, group, schedule)

    def remake(self, key: soak_plan.ContextKey, ballast: int) -> None:
        """Close a context and make it again at another place of the heap; its graphs, too."""
        self.doing = f"making the context {key} again"
        dead = [signature for signature in self.pool if signature.context == key and signature.index in self.graphs]
        for signature in dead:
            self.graphs.pop(signature.index).reset()
        old = self.contexts.pop(key)
        self.launched += old.stats["launches"]
        old.close()
        with fluxlike.create_ag_gemm_context(ballast, 64, 64, group=self.groups[key[0]], schedule="in_kernel"):
            self.make_context(key)
        for signature in dead:
            self.capture(signature)

    def capture(self, signature: Signature) -> None:
        self.doing = f"capturing {signature}"
        operands = self.operands(signature, 0)
        again = partial(call, signature, operands, self.context(signature), self.groups[signature.place], None)
        before = self.launches()
        graph = self.graphs[signature.index] = Graph(operands, signature.graph_calls, again)
        graph.launches = self.launches() - before
        self.launched -= graph.launches  # captured, not launched

    def context(self, signature: Signature) -> Any:
        return None if signature.context is None else self.contexts[signature.context]

    def operands(self, signature: Signature, data: int) -> Operands:
        """New ones, filled."""
        members = self.members[signature.place]
        made = Operands(signature, len(members), members.index(self.rank), self.machine.device)
        self.fill(made, signature, data)
        return made

    def fill(self, operands: Operands, signature: Signature, data: int) -> None:
        seed = ((self.asked.seed * 1000 + signature.index) * 100 + data) * 1000 + self.rank
        operands.fill(self.machine.generator, seed % (1 << 63))

    # a burst

    def prepare(self, step: Step) -> Work:
        """Operands, and NaN where results will be."""
        self.doing = f"preparing {step}"
        if step.mode in GRAPH_MODES:
            graph = self.graphs[step.signature.index]
            self.fill(graph.operands, step.signature, step.data)
            return Work(step, graph.operands)
        operands = self.operands(step.signature, step.data)
        return Work(step, operands, [operands.room() for _ in range(step.repeats if step.given else 0)])

    def queue(self, work: Work) -> None:
        """The calls of a step, back to back."""
        step, signature = work.step, work.step.signature
        self.doing = f"calling {step}"
        ctx, group = self.context(signature), self.groups[signature.place]

        def eager(turn: int) -> None:
            out = work.given[turn] if work.given else None
            work.results.append(call(signature, work.operands, ctx, group, out))

        with self.machine.stream(0):
            if self.members[signature.place][step.late] == self.rank:
                self.machine.delay(*step.delay)
            self.machine.work(step.load)
        for turn in range(step.repeats):
            with self.machine.stream(1 + turn % 2 if step.mode == "stream" else 0):
                if step.mode != "graph":
                    eager(turn)
                if step.mode in GRAPH_MODES:
                    self.replay(work, turn)
        if step.mode == "mixed":
            with self.machine.stream(0):
                eager(step.repeats)

    def replay(self, work: Work, turn: int) -> None:
        """One replay. What it gave is digested at once, since the next one writes over it."""
        graph = self.graphs[work.step.signature.index]
        spoil(graph.results)
        graph.replay()
        self.launched += graph.launches
        work.digests += [(f"replay {turn}, call {i} of the graph", digest(results)) for i, results in enumerate(graph.results)]

    def play(self, burst: Burst) -> None:
        """A burst up to the agreement on it; what is wrong on this rank goes to ``found``."""
        if burst.remake is not None and self.mine(burst.remake[0]):
            self.remake(burst.remake, burst.ballast)
        with self.machine.stream(0):
            works = [self.prepare(step) for step in burst.steps if self.mine(step.signature.place)]
        for work in works:
            self.queue(work)
        with self.machine.stream(0):
            for work in works:
                work.digests += [(f"eager call {i}", digest(results)) for i, results in enumerate(work.results)]
            for work in works:
                if work.step.reference:
                    self.judge(work)
            for work in works:
                self.compare(work)
                spoil(work.results)
        self.machine.settle()
        for ctx in world.current().contexts:
            ctx.raise_if_failed()  # type: ignore[attr-defined]

    def compare(self, work: Work) -> None:
        """The digests with those of the first time."""
        self.doing = f"comparing {work.step}"
        assert len(work.digests) == work.step.calls, (work.step, len(work.digests))
        got: list[list[int]] = torch.stack([value for _, value in work.digests]).tolist()
        first = self.known.setdefault((work.step.signature.index, work.step.data), got[0])
        for (which, _), value in zip(work.digests, got, strict=True):
            if value != first:
                self.found.append((work.step, which, f"its bits are not those of the first run (digest {value}, first {first})"))

    def judge(self, work: Work) -> None:
        """The first result (of a graph: of the last replay) with the reference."""
        self.doing = f"judging {work.step}"
        signature = work.step.signature
        results = work.results[0] if work.results else self.graphs[signature.index].results[0]
        control = world.current().control_of(self.groups[signature.place])
        error, allowed, largest, most = judge(signature, work.operands, results, control, work.step.number + 1)
        if not (error <= allowed and largest <= most):
            text = f"error {error:.3g} (allowed {allowed:.3g}), largest {largest:.3g} (allowed {most:.3g}), ranks together"
            self.found.append((work.step, "against the reference", text))

    def agree(self, burst: Burst, over: bool, sample: bool) -> tuple[bool, bool]:
        """Count the burst, tell its failures; what rank 0 says of the time. Collective."""
        self.doing = f"agreeing on {burst.name}"
        found = [(burst.steps.index(step), which, what) for step, which, what in self.found]
        self.found = []
        said = self.control.gather((found, over, sample), f"soak: {burst.name}")
        self.bursts += 1
        self.remade += burst.remake is not None
        for step in burst.steps:
            self.steps += 1
            self.judged += step.reference
            self.calls[step.signature.op, step.signature.schedule, step.mode] += step.calls
        wrong: dict[tuple[Step, str], dict[int, str]] = {}
        for rank, (theirs, _, _) in enumerate(said):
            for place, which, what in theirs:
                wrong.setdefault((burst.steps[place], which), {})[rank] = what
        for (step, which), ranks in wrong.items():
            failure = {"burst": burst.name, "step": asdict(step), "which": which, "ranks": ranks, "again": self.again(step)}
            self.failures.append(failure)
            self.say(f"FAILURE {len(self.failures)}, {burst.name}: {which}, on ranks {list(ranks)}: {next(iter(ranks.values()))}")
            self.say(f"  {step}\n  again: {failure['again']}")
        return said[0][1:]

    def again(self, step: Step) -> str:
        """The command that repeats a step alone; one of the warm-up runs in every warm-up."""
        which = f"--only {step.number} --minutes 0.5" if step.number >= 0 else "--minutes 0.1"
        return f"bash scripts/launch.sh --nproc {self.ranks} -m fluxlike soak --seed {self.asked.seed} {which}"

    # the run

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(f"soak: {text}", flush=True)

    def plan(self) -> Iterator[Burst]:
        if self.asked.only is None:
            return soak_plan.bursts(self.asked.seed, self.ranks, self.profile)
        if self.asked.only > STEPS_A_SECOND:
            self.say(f"making the plan as far as step {self.asked.only}, which takes some {self.asked.only / STEPS_A_SECOND:.0f} s")
        step = replace(soak_plan.find(self.asked.seed, self.ranks, self.profile, self.asked.only), reference=True)
        self.pool = [self.pool[step.signature.index]]
        return repeat(Burst(f"step {step.number}, three times", (step, step, step)))

    def warm_up(self) -> dict[str, Any]:
        """The contexts, the first results, the graphs; what that took."""
        for key in self.sizes:
            if self.mine(key[0]):
                self.doing = f"making the context {key}"
                self.make_context(key)
        for burst in soak_plan.warm_up(self.pool, self.profile):
            self.play(burst)
            self.agree(burst, False, False)
        for signature in self.pool:
            if signature.graphed and self.mine(signature.place):
                self.capture(signature)
        self.machine.settle()
        seconds, calls, kernels = self.seconds(), self.calls.total(), compiled()
        self.say(
            f"{counted(len(self.pool), 'signature')} on {self.profile.data} sets of data; rank 0 has "
            f"{counted(len(self.contexts), 'context')} and {counted(len(self.graphs), 'graph')}; warm after {seconds:.0f} s: "
            f"{counted(calls, 'call')}, {counted(kernels, 'kernel')} compiled"
        )
        return {"seconds": seconds, "calls": calls, "judged": self.judged, "kernels compiled": kernels}

    def soak(self, plan: Iterable[Burst]) -> None:
        """Bursts until rank 0 says that the time is up or that it is to end, or too much was wrong."""
        with command.wishes_to_end() as wishes:
            self._soak(plan, wishes)
        self.interrupted = bool(wishes)

    def _soak(self, plan: Iterable[Burst], wishes: Sequence[int]) -> None:
        self.reset()
        sampled = told = 0.0
        clocked = -CLOCKS_S
        for burst in plan:
            self.play(burst)
            now = self.seconds()
            over = bool(wishes or command.Outlet.left) or now >= self.asked.minutes * 60
            over, due = self.agree(burst, over, now - sampled >= self.sample_s)
            if due:
                sampled = now
                self.samples.append({"seconds": round(now, 1)} | self.machine.sample())
            if self.rank == 0 and now - told >= PROGRESS_S:
                told = now
                memory = ", ".join(f"{name} {value:.0f}" for name, value in self.samples[-1].items() if "MiB" in name)
                numbers = {"burst": self.bursts, "step": self.steps, "call": self.calls.total(), "failure": len(self.failures)}
                counts = ", ".join(counted(number, noun) for noun, number in numbers.items())
                self.say(f"{now:.0f} s, {counts}; {memory}")
            if self.rank == 0 and now - clocked >= CLOCKS_S:
                clocked = now
                self.clocks.append({"seconds": round(now, 1), "gpus": bench_report.clocks()})
            if over or len(self.failures) >= self.asked.limit:
                break

    def run(self, arguments: Sequence[str]) -> int:
        """Everything; the exit status."""
        stamp = bench_report.environment(arguments, "soak") if self.rank == 0 else {}
        plan = self.plan()
        warm = self.warm_up()
        self.soak(plan if self.asked.minutes else ())
        status = self.report(stamp, warm)
        while self.graphs:
            self.graphs.popitem()[1].reset()
        return status

    def report(self, stamp: dict[str, Any], warm: dict[str, Any]) -> int:
        """What came of it, told and written by rank 0; collective."""
        mine = growth([{name: value for name, value in sample.items() if name != "seconds"} for sample in self.samples])
        anew = compiled() - self.compiled_before
        said = self.control.gather((mine, self.launches() - self.launched_before, anew), "soak: the end")
        memory = worst_of([theirs for theirs, _, _ in said])
        grown = [name for name, found in memory.items() if found["last"] > found["first"] + found["allowed"]]
        calls = self.calls.total()
        bad = bool(self.failures or grown or not calls)
        result = {
            "ranks": self.ranks, "heap": world.current().executor.name, "seed": self.asked.seed, "only": self.asked.only,
            "minutes": self.seconds() / 60, "interrupted": self.interrupted, "warm_up": warm,
            "bursts": self.bursts, "steps": self.steps, "calls": calls,
            "calls_by_kind": {"/".join(kind): count for kind, count in sorted(self.calls.items())},
            "launches": sum(launched for _, launched, _ in said), "compiled_after_warm_up": sum(anew for *_, anew in said),
            "compared_bitwise": calls, "compared_with_reference": self.judged, "contexts_remade": self.remade,
            "failures": self.failures, "memory": memory, "grown": grown, "samples_of_rank_0": self.samples, "clocks": self.clocks,
            "ok": not bad, "environment": stamp,
        }  # fmt: skip
        if self.rank == 0:
            print(table(result, self.profile.modes), flush=True)
            if self.asked.out:
                try:
                    self.say(f"written: {save(result, Path(self.asked.out))}")
                except OSError as error:
                    bad = True
                    print(f"soak: no file was written: {error}; name another folder with --out", file=sys.stderr, flush=True)
        return int(bad)


def spoil(calls: Sequence[Sequence[torch.Tensor]]) -> None:
    """NaN over results, so that what was not written cannot pass for what was."""
    for results in calls:
        for result in results:
            result.fill_(torch.nan if result.is_floating_point() else -1)


# the command line


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.Parser(
        prog="python -m fluxlike soak",
        description="Random calls for a long time, every result checked. Start it with scripts/launch.sh. See docs/soak.md.",
        epilog="Exit status: 1 if anything was wrong, if memory grew, if a rank failed, if no call was made or its file could "
        "not be made after all; 2 for wrong arguments, such as a path where no file can be made, or ranks on several nodes.",
    )
    parser.add_argument("--minutes", type=float, required=True, help="how long, after the warm-up")
    parser.add_argument("--seed", type=int, default=0, help="of the steps and of the data (0)")
    parser.add_argument("--only", type=int, metavar="STEP", help="repeat this step of the seed's plan, and nothing else")
    parser.add_argument("--limit", type=int, default=20, help="end after so many failures (20)")
    parser.add_argument("--out", metavar="DIR", help="write soak-R<ranks>.json there")
    asked = parser.parse_args(argv)
    if not 0 <= asked.minutes < 1e5:
        parser.error(f"--minutes {asked.minutes:g} is not a number of minutes from 0 on")
    for name, least in (("limit", 1), ("seed", 0), ("only", 0)):
        value = getattr(asked, name)
        if value is not None and value < least:
            parser.error(f"--{name} {value} must be {least} or more")
    command.writable(parser, asked.out)
    return asked


def main(argv: list[str] | None = None) -> int:
    asked, soak = parse(argv), None

    def work() -> int:
        nonlocal soak
        if command.spans_nodes("soak"):
            return 2
        device = world.current().device
        on_gpu = device.type == "cuda"
        soak = Soak(asked, Gpu(device) if on_gpu else Machine(device), soak_plan.GPU if on_gpu else soak_plan.CPU)
        return soak.run(command.arguments(argv))

    def explain(_: BaseException) -> str:
        where = f"rank {dist.get_rank()}, {soak.doing if soak else 'setting up'}"
        so_far = f" after {counted(soak.steps, 'step')} and {counted(soak.calls.total(), 'call')}" if soak else ""
        return f"{where}{so_far} (seed {asked.seed}):\n{traceback.format_exc()}"

    heap_bytes = env.heap_bytes() or (GPU_HEAP_BYTES if torch.cuda.is_available() else None)
    return command.run("soak", work, explain, heap_bytes)

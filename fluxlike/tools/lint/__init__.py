"""`python -m fluxlike lint`: compile kernels for GPUs that are not there and look at the machine code. See docs/lint.md.

    python -m fluxlike lint                                                            fluxlike's own kernels
    bash scripts/launch.sh --nproc 2 -m fluxlike lint tutorials/02_push_tiles.py       the kernels that a program launches

Needs no GPU. From Python: `check_all`, or `variants.check` for one call; `rules.lint_built` for a compiled launch.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict
from typing import Any

import triton

from ...runtime import cpu, world
from ...runtime.wording import counted
from .. import once, runfile
from .compiling import Launch, build, launch_of
from .rules import SHARED, Spec, lint_built
from .variants import CAPABILITIES, Report, cases, check


def check_all(capabilities: Sequence[int] = CAPABILITIES, named: str = "", jobs: int | None = None) -> Iterator[Report]:
    """`variants.check` of the cases with ``named`` in their names, in ``jobs`` processes (default: one a core)."""
    work = [(case, capability) for capability in capabilities for case in cases(capability) if named in str(case)]
    jobs = min(jobs or len(os.sched_getaffinity(0)), len(work))
    if jobs < 2:
        for case, capability in work:
            yield from check(case, capability)
        return
    with tempfile.TemporaryDirectory(prefix="fluxlike-lint-") as folder:
        others = set(multiprocessing.active_children())
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _begin, (folder,)) as pool:
            try:
                for coming in _submitted(pool, work):
                    yield from coming.result()
            except BaseException:  # also where nobody wants the rest, which takes minutes
                for process in set(multiprocessing.active_children()) - others:
                    process.terminate()
                raise


def _submitted(pool: ProcessPoolExecutor, work: Sequence[Any]) -> list[Future[Sequence[Report]]]:
    """`check` of all this, begun. The processes of the pool do not see Ctrl-C, which a terminal sends to them, too: the parent ends
    them, and they would each say a traceback. They start here, and have what is blocked from the thread that starts them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return [pool.submit(check, *one) for one in work]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(folder: str) -> None:
    """Of a process of the pool: its temporary files go to where the parent removes them, and it ends with that, if killed, too."""

    def end_with(parent: Any) -> None:
        parent.join()
        os._exit(1)

    tempfile.tempdir = folder
    threading.Thread(target=end_with, args=(multiprocessing.parent_process(),), daemon=True).start()


def launches_of(file: str, args: list[str]) -> tuple[int, list[Launch]]:
    """Run a program on the CPU heap: its exit status, and each different launch of its own kernels (of rank 0; all do the same)."""
    seen: dict[tuple, Launch] = {}

    def observe(kernel: Any, arguments: tuple, constants: dict, warps: int, stages: int) -> None:
        if not kernel.fn.__module__.startswith("fluxlike."):  # those have other tiles on GPUs; `check_all` has them
            launch = launch_of(kernel, arguments, constants, warps, stages, world.current().contexts)
            seen.setdefault((launch.key, launch.payload, launch.signals, launch.bases), launch)

    cpu.observer = observe
    try:
        status = runfile.run(file, args, "lint")
    finally:
        cpu.observer = None
    return status, list(seen.values()) if os.environ.get("RANK", "0") == "0" else []


def check_launch(launch: Launch, capability: int) -> Report:
    """Compile a launch and lint it for what is true of every kernel."""
    spec = Spec(launch.payload, launch.signals, launch.bases, vectors=True, buffers=2 if launch.stages > 1 else 1)
    built = build(launch, capability)
    findings = tuple(lint_built(built, spec))
    return Report("", launch.name, capability, built.registers, built.shared, built.local, findings)


def describe(report: Report) -> str:
    """One line, and one for each finding."""
    name = f"{report.kernel} {report.case}".strip()
    spilled = f", {counted(report.local, 'spill')}" if report.local else ""
    head = f"sm_{report.capability} {name}: {report.registers} registers{spilled}, {report.shared} bytes of shared memory"
    return "\n".join([head, *(f"  {finding}" for finding in report.findings)])


def main(argv: list[str]) -> int:
    parser = once.Parser(
        prog="python -m fluxlike lint",
        description="Compiles kernels for GPUs that are not there, and finds what is wrong in the machine code. See docs/lint.md.",
        epilog="Exit status: 1 if anything is found; 2 if there was nothing to look at, for wrong arguments, or where the ranks of "
        "a program are on several nodes.",
    )
    sm = f"compute capabilities, some of {', '.join(map(str, SHARED))} (default: %(default)s)"
    parser.add_argument("--sm", default=",".join(map(str, CAPABILITIES)), help=sm)
    parser.add_argument("--case", default="", help="only calls with this in their names, as gemm_rs-in_kernel")
    parser.add_argument("--jobs", type=int, help="processes (default: one a core)")
    parser.add_argument("--json", action="store_true", help="reports as JSON")
    runfile.arguments(parser, nargs="?")
    asked = parser.parse_args(argv)
    unknown = [number for number in asked.sm.split(",") if number not in map(str, SHARED)]
    if unknown:
        known = ", ".join(map(str, SHARED))
        parser.error(f"--sm {asked.sm}: {unknown[0]!r} is no compute capability that can be compiled for; name some of {known}")
    if asked.jobs is not None and asked.jobs < 1:
        parser.error(f"--jobs {asked.jobs} is below 1; leave it out for one a core")
    if asked.file is not None and (asked.case or asked.jobs):
        parser.error("--case and --jobs are for the kernels of fluxlike; leave them out with a FILE")
    capabilities = list(dict.fromkeys(map(int, asked.sm.split(","))))
    status = 0
    if asked.file is None:
        _say_left_out(asked.case, capabilities)
        coming = check_all(capabilities, asked.case, asked.jobs)
    elif os.path.isfile(asked.file):
        once.on_one_node(parser, "lint of a program")
        with contextlib.redirect_stdout(sys.stderr) if asked.json else contextlib.nullcontext():
            status, launches = launches_of(asked.file, asked.args)
        coming = (check_launch(launch, capability) for launch in launches for capability in capabilities)
    else:
        parser.error(f"there is no file {asked.file}")
    reports = []
    with once.ends_what_it_began(), contextlib.closing(_each(coming)) as closed:
        for report in closed:
            reports.append(report)
            if not asked.json:
                print(describe(report), flush=True)
    found = sum(len(report.findings) for report in reports)
    if asked.json:
        print(json.dumps({"triton": triton.__version__, "reports": [asdict(report) for report in reports]}))
    elif reports:
        print(f"Triton {triton.__version__}: {counted(len(reports), 'kernel')} compiled, {counted(found, 'finding')}")
    if not reports and os.environ.get("RANK", "0") == "0":  # of a program, the other ranks have none
        print(f"lint: {_nothing(asked, capabilities)}", file=sys.stderr)
        status = status or 2
    return status or int(found > 0)


def _each(reports: Iterable[Report]) -> Generator[Report]:
    """The same, and an end of it before all have come is one of what they come from."""
    yield from reports


def _having(named: str, capabilities: Iterable[int]) -> list[int]:
    """Those for which there are cases with ``named`` in their names."""
    return [capability for capability in capabilities if any(named in str(case) for case in cases(capability))]


def _compiled_for(named: str, capabilities: Iterable[int]) -> str:
    return f"calls with {named!r} in their names are compiled for {_listed(capabilities)} only"


def _listed(capabilities: Iterable[int]) -> str:
    return ", ".join(f"sm_{capability}" for capability in capabilities)


def _say_left_out(named: str, capabilities: Sequence[int]) -> None:
    """Said before the rest is compiled, which takes minutes; where all would be left out, `_nothing` says so."""
    looked_at = _having(named, capabilities)
    left_out = [capability for capability in capabilities if capability not in looked_at]
    if looked_at and left_out:
        print(f"lint: {_compiled_for(named, _having(named, SHARED))}; left out: {_listed(left_out)}", file=sys.stderr, flush=True)


def _nothing(asked: argparse.Namespace, capabilities: Sequence[int]) -> str:
    """Why no kernel was compiled."""
    if asked.file is not None:
        return f"{asked.file} launched no kernel of its own, so nothing was looked at; lint a program that does"
    others = _having(asked.case, SHARED)
    if others:
        return f"{_compiled_for(asked.case, others)}; name one of them with --sm"
    known = sorted({f"{case.op}-{case.schedule}" for capability in capabilities for case in cases(capability)})
    return f"no call has {asked.case!r} in its name, so nothing was looked at; names begin with one of {', '.join(known)}"

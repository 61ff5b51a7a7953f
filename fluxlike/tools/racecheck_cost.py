"""`python -m fluxlike racecheck --cost`: what the race checker costs, as docs/racecheck.md has it.

Processor seconds of a rank for a call of each operation and transport, checker off and on: the median of `CALLS` calls behind one
that does not count, each behind a barrier, of the rank where it is larger. Off and on take turns, each time in new processes, as
the checker is of a whole process; the figures are the medians over the rounds, whose times are in the record, too.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import fluxlike

from ..runtime import world
from . import command, once, topo

RANKS, CALLS = 2, 7
#: Operations and transports, in the order of the table.
CASES = [(op, schedule) for op in ("gemm_rs", "ag_gemm") for schedule in ("in_kernel", "copy_engine")]


def measure(size: int) -> list[float]:
    """Processor seconds of a call of each of `CASES`, M = N = K = ``size``, bf16, on the slower rank. Collective."""
    this = world.current()
    share, found = size // this.size, []
    for op, schedule in CASES:
        whole = (size, share) if op == "gemm_rs" else (share, size)
        x, weight = (torch.randn(*whole, dtype=torch.bfloat16) for _ in range(2))
        with getattr(fluxlike, f"create_{op}_context")(size, size, size, torch.bfloat16, schedule=schedule) as ctx:
            took = []
            for _ in range(1 + CALLS):
                this.control.barrier("what the race checker costs")
                since = time.process_time()
                getattr(fluxlike, op)(x, weight, ctx)
                took.append(time.process_time() - since)
            found.append(max(this.control.gather(statistics.median(took[1:]), "what the race checker costs")))
    return found


def launched(size: int, checked: bool) -> list[float]:
    """`measure` on new processes. RuntimeError if one fails."""
    environ = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"} | {
        "FLUXLIKE_RACECHECK": str(int(checked)), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }  # fmt: skip
    where = ["--nnodes=1", "--local-addr=127.0.0.1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "seconds.json"
        ranks = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", *where]
        done = run([*ranks, "-m", __spec__.name, str(size), str(path)], environ)
        if done.returncode or not path.exists():
            raise RuntimeError(f"the ranks ended with status {done.returncode}:\n{done.stderr}")
        seconds: list[float] = json.loads(path.read_text())
    return seconds


def run(command: list[str], environ: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    """A launcher, which is told where this process is to end before it: other than a kill, that ends its ranks, too."""
    with subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as launcher:
        try:
            _, said = launcher.communicate()
        except BaseException:
            launcher.terminate()
            launcher.communicate()
            raise
    return subprocess.CompletedProcess(command, launcher.returncode, "", said)


def rows(off: Sequence[Sequence[float]], on: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
    """A row a case, of the rounds' `measure`."""
    found = []
    for case, plain, checked in zip(CASES, zip(*off, strict=True), zip(*on, strict=True), strict=True):
        without, with_it = statistics.median(plain), statistics.median(checked)
        figures = {"off": round(without, 4), "on": round(with_it, 4), "ratio": round(with_it / without, 2)}
        runs = {"off_runs": [round(s, 4) for s in plain], "on_runs": [round(s, 4) for s in checked]}
        found.append({"op": case[0], "schedule": case[1]} | figures | runs)
    return found


def table(found: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown, as in docs/racecheck.md."""
    lines = ["| operation, schedule | off | on | ratio |", "|---|---|---|---|"]
    return lines + [f"| {r['op']}, {r['schedule']} | {r['off']:.3f} | {r['on']:.3f} | {r['ratio']:.1f} |" for r in found]


def main(argv: list[str]) -> int:
    parser = command.Parser(
        prog="python -m fluxlike racecheck --cost",
        description=f"Measures what the race checker costs, on {RANKS} ranks that it starts itself; two or three minutes.",
    )
    parser.add_argument("--size", type=int, default=512, help="M = N = K of the calls (512)")
    parser.add_argument("--rounds", type=int, default=3, help="runs with the checker, and without (3)")
    parser.add_argument("--out", metavar="DIR", help="write racecheck-cost.json there")
    asked = parser.parse_args(argv)
    once.positive(parser, asked, ["rounds"])
    if asked.size < 1 or asked.size % RANKS:
        parser.error(f"--size {asked.size} is not a multiple of {RANKS} above 0; give one")
    if "RANK" in os.environ:
        parser.error("it starts its ranks itself; call it without scripts/launch.sh")
    once.on_one_node(parser, "racecheck")
    command.writable(parser, asked.out)
    stamp = topo.stamp(["--cost", *argv], "racecheck")
    off, on = [], []
    try:
        with once.ends_what_it_began():
            for _ in range(asked.rounds):
                off.append(launched(asked.size, False))
                on.append(launched(asked.size, True))
    except RuntimeError as error:
        print(f"racecheck: {error}", file=sys.stderr)
        return 1
    found = rows(off, on)
    print("\n".join(table(found)))
    if asked.out:
        what = (
            f"processor seconds of a rank for a call, M = N = K = {asked.size}, bfloat16, {RANKS} ranks; the slower rank's median "
            f"of {CALLS} calls after one, behind a barrier each; FLUXLIKE_RACECHECK 0 and 1, each in processes of its own, by "
            f"turns; medians of {asked.rounds} such runs, and the runs"
        )
        try:
            topo.write(str(Path(asked.out) / "racecheck-cost.json"), {"environment": stamp, "what": what, "rows": found})
        except OSError as error:
            print(f"racecheck: the figures could not be written: {error}; name another folder with --out", file=sys.stderr)
            return 1
    return 0


def rank(argv: Sequence[str]) -> None:
    """One of the processes that `launched` starts: SIZE and the file for the seconds."""
    fluxlike.init(heap="shm")
    found = measure(int(argv[0]))
    if world.current().rank == 0:
        Path(argv[1]).write_text(json.dumps(found))
    fluxlike.finalize()


if __name__ == "__main__":
    rank(sys.argv[1:])

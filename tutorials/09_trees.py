"""Tutorial 9: trees for a machine whose GPUs are not all alike, from the link matrix to the picture to the run.

The eight GPUs of a p3.16xlarge are linked by NVLink, but not each with each. GPU 0 has one link to 1 and 2, two to 3 and 4, and
none to 5, 6 and 7, which it reaches through the host only::

        GPU     0  1  2  3  4  5  6  7        0  itself
          0     0  2  2  3  3  1  1  1        1  through the host, 10 GB/s
          1     2  0  3  2  1  3  1  1        2  one NVLink, 25 GB/s
          2     2  3  0  3  1  1  2  1        3  two NVLinks, 50 GB/s
          …                                   the codes are those of the authors of MXNet's trees

Whatever sends to everybody (a two-shot all-reduce) waits for the slowest pair. A *tree* need not use it: sums go up from child to
parent over links that are there, the result comes down the same way.

Part 1, the plan. `plan_trees` makes one tree rooted at each GPU, each for an eighth of the data. Three figures tell a plan:

* *depth*, the number of levels. In a level a GPU takes part in one transfer at most, so eight GPUs need three levels at least.
* *load*, the trees that use a link over the links that there are, of the busiest. Eight trees have 56 edges; at a load of 2 the
  machine has room for 48 (a single link for 2, a double one for 4), so 2.5 is the least there is, and "minmax" finds it.
* *bound*, what no plan can go below. It need not be reachable; where it is reached the plan is known to be the best.

"mxnet" is the method that this comes from: halve the GPUs again and again (Kernighan and Lin), join the halves by the best link,
and let 0.7 of a link's weight be left after each use. It looks for heavy trees, one after the other, and ends with a load of 4:
it needs 1.6 times as long, on paper.

Part 2, the picture: the links, the busiest in red, then each tree with the levels at its edges. Give --out DIR to have it.

Part 3, the run: `all_reduce(x, algo="trees")`. One kernel takes blocks of 8 KB over the trees in turn: half of its programs climb,
half come down, so blocks follow each other and links are busy both ways. FLUXLIKE_TOPOLOGY names the machine; rank i is its GPU i,
and with fewer ranks the plan is one for those GPUs. So any machine's plan runs anywhere, here on as many ranks as there are: the
links are yours, only the way is p3.16xlarge's. The check is the one that MXNet's authors had, ones in and the number of GPUs out,
and then random numbers against a sum in fp64.

Do not take trees where all pairs are alike: on NVSwitch a tree of eight has six hops where others have one or two, so it is slower,
and `algo="auto"` never takes it. `bash scripts/launch.sh --nproc 8 -m fluxlike links` emulates the links of both machines, and
docs/all_reduce.md has the times.

Run: bash scripts/launch.sh tutorials/09_trees.py [--out DIR] [--elements N]
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import fluxlike
from fluxlike.ops.trees import TreeContext
from fluxlike.runtime import world
from fluxlike.tools.once import Parser, positive, writable
from fluxlike.tools.topo import planned
from fluxlike.tools.topo_report import draw, matrix_lines, plan_lines
from fluxlike.topology import LinkMatrix, current

GPU, CPU = 5_000_000, 24_000
#: More elements than these take one tree a rank; fewer take one tree in all, as its hops are what costs then.
BOUND = 10_000
DTYPES = (torch.float32, torch.bfloat16)
#: How far sums in fp32 of some numbers of about 1 may be off; the one rounding of the result comes on top.
SUMS = 1e-5


def show_plans(matrix: LinkMatrix, out: str | None) -> bool:
    """Parts 1 and 2, on one rank; whether minmax is as good as MXNet's method or better."""
    print("part 1: the links, and the trees that are planned for them")
    print("\n".join(matrix_lines(matrix)))
    loads = {}
    for objective in ("minmax", "mxnet"):
        trees, cost, seconds = planned(matrix, objective=objective)
        loads[objective] = cost.load
        print(f"{objective}: depth {cost.depth}, highest load {cost.load:g}, bound {cost.least:g}, {cost.gb_s:.1f} GB/s on paper")
        if objective == "minmax":
            print("\n".join(plan_lines(objective, trees, cost, seconds)[3:]))
            best = trees, cost
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
        path = Path(out) / "trees.png"
        print(f"part 2: {draw(matrix, *best, path) or path}")
    else:
        print("part 2: no picture; --out DIR draws one")
    return loads["minmax"] <= loads["mxnet"]


def trees_of_this_run() -> TreeContext:
    """What the calls over trees have made: the plan on which the ranks agreed, and memory."""
    return next(ctx for ctx in world.current().contexts if isinstance(ctx, TreeContext))


def reduces_ones(n: int) -> bool:
    """MXNet's own test: ones in, the number of ranks out."""
    ranks = dist.get_world_size()
    y = fluxlike.all_reduce(torch.ones(n, device=world.current().device), algo="trees")
    return torch.equal(y, torch.full_like(y, ranks))


def reduces_numbers(n: int, dtype: torch.dtype) -> tuple[bool, float]:
    """(whether it is right on this rank and has the same bits on all, how far it is off) for random numbers."""
    rank, ranks, device = dist.get_rank(), dist.get_world_size(), world.current().device
    parts = [torch.randn(n, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(ranks)]
    y = fluxlike.all_reduce(parts[rank].to(device), algo="trees").cpu()
    exact = torch.stack(parts).double().sum(0)
    off = (y.double() - exact).abs()
    right = bool((off <= SUMS + exact.abs() * torch.finfo(dtype).eps / 2).all())
    everybodys = [torch.empty_like(y) for _ in range(ranks)]
    dist.all_gather(everybodys, y)
    return right and all(torch.equal(y, other) for other in everybodys), float(off.max())


def main(args: argparse.Namespace) -> int:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    good = True
    if rank == 0:
        good = show_plans(current(), args.out)
        print(f"part 3: all_reduce over trees, on {ranks} ranks, heap '{world.current().executor.name}'")
    for n in (BOUND // 10, args.elements):
        good &= reduces_ones(n)
        used = trees_of_this_run()
        plan = used.plans[n > used.bound]
        good &= used.last_path == "trees"
        for dtype in DTYPES:
            right, off = reduces_numbers(n, dtype)
            good &= right
            if rank == 0:
                print(f"{n} elements, {dtype}: {len(plan)} tree{'s'[: len(plan) > 1]}, off by {off:.1e}")
    used.check()
    if rank == 0:
        for tree in used.plans[1]:
            print(f"  root {tree.root}: " + " | ".join(" ".join(f"{a}→{b}" for a, b in step) for step in tree.steps))
    failed = torch.tensor([not good], dtype=torch.int32)
    dist.all_reduce(failed)
    if rank == 0:
        passed = f"check passed: ones add up to {ranks}, and the sums of random numbers are the same bits on all ranks"
        print(f"check FAILED: on {int(failed)} ranks" if failed else passed)
    return int(failed > 0)


if __name__ == "__main__":
    os.environ.setdefault("FLUXLIKE_TOPOLOGY", "p3.16xlarge")
    os.environ.setdefault("FLUXLIKE_TREE_ARRAY_BOUND", str(BOUND))  # both are read when the first call over trees is made
    parser = Parser()
    parser.add_argument("--out", metavar="DIR", help="draw the picture there; needs matplotlib")
    parser.add_argument("--elements", type=int, default=GPU if torch.cuda.is_available() else CPU)
    args = parser.parse_args()
    positive(parser, args, ("elements",))
    writable(parser, args.out)
    fluxlike.init()
    try:
        status = main(args)
    finally:
        fluxlike.finalize()
    sys.exit(status)

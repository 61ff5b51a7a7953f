"""A small case of every kernel and transport for compute-sanitizer, which wraps one process a rank.

``scripts/test.sh gpu`` ends with it; by hand, on two GPUs::

    bash scripts/launch.sh --nproc 2 tests/sanitizer_case.py /usr/local/cuda/bin/compute-sanitizer memcheck

and the same with ``racecheck`` and ``synccheck``; once more with FLUXLIKE_VIRTUAL_NODES=2 for the kernels that go
from node to node. It fails if a kernel was left out, or no wave shared. torch speaks gloo here: NCCL's own start-up takes minutes
under the sanitizer. Without GPUs it runs in the interpreter, started by test_sanitizer_case.py.
"""

import importlib
import itertools
import os
import pkgutil
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from triton.runtime import JITFunction
from triton.runtime.interpreter import InterpretedFunction

import fluxlike
from fluxlike import kernels
from fluxlike.ops import cost, fused
from fluxlike.runtime import env, world

#: By the host, and by kernels.
BETWEEN_NODES = {f"messages_{what}_kernel" for what in ("head", "came", "sum", "gather", "end", "put")}
KERNELS = (JITFunction, InterpretedFunction)
launched: set[str] = set()


def every_kernel() -> set[str]:
    found: set[str] = set()
    for module in pkgutil.iter_modules(kernels.__path__):
        named = vars(importlib.import_module(f"{kernels.__name__}.{module.name}"))
        found |= {name for name, f in named.items() if name.endswith("_kernel") and isinstance(f, KERNELS)}
    return found


def watch_launches(executor: Any) -> None:
    launch = executor.launch

    def watched(kernel: Any, *args: Any, **named: Any) -> Any:
        launched.add(kernel.fn.__name__)
        return launch(kernel, *args, **named)

    executor.launch = watched


def rows_of(n: int, rank: int, ranks: int) -> slice:
    return slice(rank * -(-n // ranks), (rank + 1) * -(-n // ranks))


def exchanges(rank: int, ranks: int, device: torch.device) -> None:
    """all_reduce and its kin: every kernel, tensors of a part of a block and of several."""
    for n in (37, 9001) if device.type == "cuda" else (37,):
        parts = [torch.randint(-3, 4, (n, 3), generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(ranks)]
        x, total = parts[rank].to(device), torch.stack(parts).float().sum(0).bfloat16()
        rows = rows_of(n, rank, ranks)
        for algo in ("one_shot", "two_shot", "bulk", "trees"):
            for _ in range(3):
                several = fluxlike.all_reduce([x, x[:5]], algo=algo)
            assert torch.equal(several[0].cpu(), total) and torch.equal(several[1].cpu(), total[:5]), f"all_reduce {algo} {n}"
        for algo in ("words", "two_shot", "bulk"):
            for _ in range(3):
                first, theirs = fluxlike.reduce(x, 0, algo=algo), fluxlike.broadcast(x, 1, algo=algo)
            assert first is None or torch.equal(first.cpu(), total), f"reduce {algo} {n}"
            assert torch.equal(theirs.cpu(), parts[1]), f"broadcast {algo} {n}"
        for algo in ("words", "bulk"):
            for _ in range(3):
                mine, whole = fluxlike.reduce_scatter(x, algo=algo), fluxlike.all_gather(x[rows], m=n, algo=algo)
            assert torch.equal(mine.cpu(), total[rows]), f"reduce_scatter {algo} {n}"
            assert torch.equal(whole.cpu(), torch.cat([part[rows_of(n, r, ranks)] for r, part in enumerate(parts)])), f"{algo} {n}"
        y = fluxlike.gemm_ar(x, torch.eye(3).to(device).bfloat16())
        assert torch.equal(y.cpu(), total), f"gemm_ar {n}"
    several = torch.randint(-3, 4, (ranks, 32, 16), generator=torch.Generator().manual_seed(1)).bfloat16()
    for algo in ("one_shot", "two_shot"):
        with fluxlike.create_gemm_ar_context(32, 256, algo=algo, product="fused") as ctx:
            for n in (256, 128, 256):
                y = fluxlike.gemm_ar(several[rank].to(device), torch.eye(16).repeat(n // 16, 1).to(device).bfloat16(), ctx)
                assert torch.equal(y.cpu(), several.float().sum(0).bfloat16().repeat(1, n // 16)), f"gemm_ar {algo} fused {n}"
    usual, fused.is_usual = fused.is_usual, lambda ctx: True  # in the interpreter, too
    shards = several[:, :8].repeat(1, 1, 128)  # a program exchanges several blocks at once; of more than two ranks in turns
    with fluxlike.create_ag_gemm_context(8 * ranks, 96, 2048, schedule="sequential") as ctx:
        for n in (96, 32, 96):
            z = fluxlike.ag_gemm(shards[rank].to(device), torch.eye(2048)[:n].to(device).bfloat16(), ctx)
            assert torch.equal(z.cpu(), shards.flatten(0, 1)[:, :n]), f"ag_gemm fused {n}"
            assert ctx.last_path == "sequential/fused"
    wide = 64 * world.current().executor.programs
    with fluxlike.create_ag_gemm_context(144, wide * ranks, 16, schedule="sequential") as ctx:
        for most in (80, 144, 80):  # in one product, and in two
            rows = several.repeat(1, 3, 1)[:, : most // ranks]
            z = fluxlike.ag_gemm(rows[rank].to(device), torch.eye(16).repeat(wide // 16, 1).to(device).bfloat16(), ctx)
            assert torch.equal(z.cpu(), rows.reshape(-1, 16).repeat(1, wide // 16)), "ag_gemm fused, of more rows"
            assert ctx.last_path == "sequential/fused" or not fused.has_wide(world.current().executor.capability)
    fused.is_usual = usual


def sparse(rank: int, ranks: int, device: torch.device) -> None:
    """Both modes, few rows of many and most of them, several blocks of columns."""
    for table, width, nnz in ((1000, 300, 40), (64, 3, 90)):
        for mode in ("exact", "padded"):
            for call in range(3):
                made = torch.Generator().manual_seed(10 * call + rank)
                ids = torch.randint(0, table, (1, nnz), generator=made)
                values = torch.randint(-3, 4, (nnz, width), generator=made).float()
                x = torch.sparse_coo_tensor(ids, values, (table, width)).to(device)
                total = x.to_dense().cpu()
                dist.all_reduce(total)
                y = fluxlike.sparse_all_reduce(x, mode=mode, max_nnz=nnz)
                assert torch.equal(y.to_dense().cpu(), total), f"sparse_all_reduce {mode} {table} {call}"
        rows = fluxlike.sparse_reduce_scatter(x)
        assert torch.equal(rows.to_dense().cpu(), total[rows_of(table, rank, ranks)]), f"sparse_reduce_scatter {table}"


def products(
    rank: int, ranks: int, device: torch.device, schedule: str, sizes: Sequence[tuple[int, int, int]], shared: bool = False
) -> None:
    """``shared``: programs are so few that each call shares its last wave of tiles.

    Between nodes calls are made node by node and together in turn, so that each of the two slots has both.
    """
    nodes = env.virtual_nodes() > 1
    for m, n, k in sizes:
        with (
            fluxlike.create_gemm_rs_context(m, n, schedule=schedule) as rs,
            fluxlike.create_ag_gemm_context(m, n, k, schedule=schedule) as ag,
        ):
            generator = torch.Generator().manual_seed(m)
            x, w = (torch.randint(-1, 2, (rows, k), generator=generator) for rows in (m, n))
            product = (x @ w.T).to(torch.bfloat16)
            x, w = x.to(device).bfloat16(), w.to(device).bfloat16()
            rows = rows_of(m, rank, ranks)
            for call in range(4 if nodes else 3):
                if nodes:
                    rs.together = ag.together = call in (1, 2)
                y = fluxlike.gemm_rs(x, w, rs)
                z, gathered = fluxlike.ag_gemm(x[rows], w, ag, m=m, return_gathered=True)
            rs.check()
            ag.check()
            assert torch.equal(y.cpu(), product[rows] * ranks), f"gemm_rs {schedule} {m}"
            assert torch.equal(z.cpu(), product) and torch.equal(gathered, x), f"ag_gemm {schedule} {m}"
            assert not shared or (rs.parts.any() and ag.parts.any()), f"{schedule}: nothing was shared"


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if torch.cuda.is_available():
        torch.cuda.set_device(rank // env.ranks_per_gpu())
    if torch.cuda.device_count() < ranks:
        os.environ["FLUXLIKE_TOPOLOGY"] = os.environ.get("FLUXLIKE_TOPOLOGY") or f"nvswitch-{ranks}"
    fluxlike.init(heap_bytes=64 << 20)
    device, heap, nodes = world.current().device, world.current().executor.name, env.virtual_nodes()
    watch_launches(world.current().executor)
    wanted = BETWEEN_NODES if nodes > 1 else every_kernel() - BETWEEN_NODES
    if nodes == 1:
        exchanges(rank, ranks, device)
        sparse(rank, ranks, device)
    elif device.type != "cuda":
        wanted = set()  # there the host sends and adds them
    schedules = ("copy_engine", "in_kernel", "sequential", "stream_k", "decomposed") if nodes == 1 else ("auto", "in_kernel")
    for schedule, puts in itertools.product(schedules, ("host",) if nodes == 1 else ("host", "device")):
        env.put("FLUXLIKE_PUTS", puts)
        products(rank, ranks, device, schedule, ((272, 160, 96), (131, 72, 40)))
    if nodes == 1:
        # tiles of which some are left behind a whole wave; a CPU's are smaller
        world.current().executor.programs = 2 * ranks - 1
        rows, columns = (128, 480) if device.type == "cuda" else (64, 96)
        cost.SHARING = dict.fromkeys(cost.SHARING, 0.0)
        if device.type != "cuda":
            cost.PUSH_RATE = 1e12  # who pushes is not too late for a share
        for schedule in ("copy_engine", "in_kernel"):
            products(rank, ranks, device, schedule, ((rows * ranks, columns, 320),), shared=True)
    fluxlike.finalize()
    assert wanted <= launched, f"not launched: {sorted(wanted - launched)}"
    print(f"rank {rank}: sanitizer case passed, {len(launched)} kernels on heap {heap}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:]:  # the path of compute-sanitizer and the name of its tool: this process becomes it
        sanitizer, tool = sys.argv[1:]
        how = ["--tool", tool, "--report-api-errors", "no", "--error-exitcode", "9"]
        os.execv(sanitizer, [sanitizer, *how, sys.executable, __file__])
    main()

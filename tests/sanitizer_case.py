"""A small case of every kernel and transport for compute-sanitizer, which wraps one process a rank. On GPUs::

    torchrun --standalone --nproc-per-node=2 --no-python compute-sanitizer --tool memcheck --report-api-errors no \\
        --error-exitcode 9 python tests/sanitizer_case.py

and the same with ``--tool racecheck``. torch speaks gloo here: NCCL's own start-up takes minutes under the sanitizer.
"""

import torch
import torch.distributed as dist

import fluxlike


def rows_of(n: int, rank: int, ranks: int) -> slice:
    return slice(rank * -(-n // ranks), (rank + 1) * -(-n // ranks))


def exchanges(rank: int, ranks: int) -> None:
    """all_reduce and its kin: every kernel, tensors of a part of a block and of several."""
    for n in (37, 9001):
        parts = [torch.randint(-3, 4, (n, 3), generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(ranks)]
        x, total = parts[rank].cuda(), torch.stack(parts).float().sum(0).bfloat16()
        rows = rows_of(n, rank, ranks)
        for algo in ("one_shot", "two_shot", "bulk", "trees"):
            for _ in range(3):
                several = fluxlike.all_reduce([x, x[:5]], algo=algo)
            assert torch.equal(several[0].cpu(), total) and torch.equal(several[1].cpu(), total[:5]), f"all_reduce {algo} {n}"
        for algo in ("words", "bulk"):
            for _ in range(3):
                mine, first = fluxlike.reduce_scatter(x, algo=algo), fluxlike.reduce(x, 0, algo=algo)
                whole, theirs = fluxlike.all_gather(x[rows], m=n, algo=algo), fluxlike.broadcast(x, 1, algo=algo)
            assert torch.equal(mine.cpu(), total[rows]) and (first is None or torch.equal(first.cpu(), total)), f"{algo} {n}"
            assert torch.equal(theirs.cpu(), parts[1]), f"broadcast {algo} {n}"
            assert torch.equal(whole.cpu(), torch.cat([part[rows_of(n, r, ranks)] for r, part in enumerate(parts)])), f"{algo} {n}"
        y = fluxlike.gemm_ar(x, torch.eye(3).cuda().bfloat16())
        assert torch.equal(y.cpu(), total), f"gemm_ar {n}"


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    fluxlike.init(heap="nvshmem", heap_bytes=64 << 20)
    exchanges(rank, ranks)
    for schedule in ("copy_engine", "in_kernel", "sequential", "stream_k", "decomposed"):
        for m, n, k in ((272, 160, 96), (131, 72, 40)):
            with (
                fluxlike.create_gemm_rs_context(m, n, schedule=schedule) as rs,
                fluxlike.create_ag_gemm_context(m, n, k, schedule=schedule) as ag,
            ):
                generator = torch.Generator().manual_seed(m)
                x, w = (torch.randint(-1, 2, (rows, k), generator=generator) for rows in (m, n))
                product = (x @ w.T).to(torch.bfloat16)
                x, w = x.cuda().bfloat16(), w.cuda().bfloat16()
                rows = rows_of(m, rank, ranks)
                for _ in range(3):
                    y = fluxlike.gemm_rs(x, w, rs)
                    z, gathered = fluxlike.ag_gemm(x[rows], w, ag, m=m, return_gathered=True)
                rs.check()
                ag.check()
                assert torch.equal(y.cpu(), product[rows] * ranks), f"gemm_rs {schedule} {m}"
                assert torch.equal(z.cpu(), product) and torch.equal(gathered, x), f"ag_gemm {schedule} {m}"
    fluxlike.finalize()
    print(f"rank {rank}: sanitizer case passed", flush=True)


if __name__ == "__main__":
    main()

"""A small case of every kernel and transport for compute-sanitizer, which wraps one process a rank. On GPUs::

    torchrun --standalone --nproc-per-node=2 --no-python compute-sanitizer --tool memcheck --report-api-errors no \\
        --error-exitcode 9 python tests/sanitizer_case.py

and the same with ``--tool racecheck``. torch speaks gloo here: NCCL's own start-up takes minutes under the sanitizer.
"""

import torch
import torch.distributed as dist

import fluxlike


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    fluxlike.init(heap="nvshmem", heap_bytes=64 << 20)
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
                rows = slice(rank * -(-m // ranks), (rank + 1) * -(-m // ranks))
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

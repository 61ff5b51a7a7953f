"""gemm_rs and ag_gemm over all ranks, wherever they are, against torch; for test_nodes_network, which starts it on two hosts."""

import os

import torch
import torch.distributed as dist

import fluxlike
from fluxlike.runtime import world


def main() -> None:
    fluxlike.init(heap="shm")
    rank, size, this = dist.get_rank(), dist.get_world_size(), world.current()
    for call, m in enumerate((64, 61, 5, 64)):
        make = torch.Generator().manual_seed(10 * call + rank)
        x, w = (torch.randint(-2, 3, shape, generator=make).bfloat16() for shape in ((m, 32), (48, 32)))
        y = fluxlike.gemm_rs(x, w)
        assert torch.equal(y, fluxlike.reference.gemm_rs(x, w)), f"rank {rank}: gemm_rs M={m}"
        z = fluxlike.ag_gemm(y.contiguous(), torch.eye(48).bfloat16(), m=m)
        assert torch.equal(z, fluxlike.reference.ag_gemm(y, torch.eye(48).bfloat16(), m=m)), f"rank {rank}: ag_gemm M={m}"
    print(f"rank {rank} of {size} on node {this.control.node} of {len(this.control.nodes)}: check passed", flush=True)
    if rank == int(os.environ.get("NODES_CASE_DIES", "-1")):
        os._exit(7)
    if "NODES_CASE_DIES" in os.environ:
        try:
            for _ in range(3):
                fluxlike.gemm_rs(x, w)
        except RuntimeError as error:
            print(f"rank {rank} was told: {error}", flush=True)
    fluxlike.finalize()


if __name__ == "__main__":
    main()

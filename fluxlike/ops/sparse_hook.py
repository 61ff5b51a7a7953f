"""A communication hook of DistributedDataParallel for models with sparse gradients."""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from .sparse_all_reduce import sparse_all_reduce

#: Attribute of a parameter with the context for its gradient, as `fluxlike.nn.Embedding` sets it.
CONTEXT = "sparse_all_reduce_context"


def sparse_allreduce_hook(
    group: dist.ProcessGroup | None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """The average over the ranks of a bucket of gradients: of a sparse one by `sparse_all_reduce`, of dense ones by torch.

    ``ddp.register_comm_hook(group, fluxlike.sparse_allreduce_hook)``; DistributedDataParallel then calls it, on all ranks, in each
    backward.

    Args:
        group: that of ``ddp``; None is that of all ranks, also where fluxlike.init was given another.
        bucket: of one parameter whose gradient is sparse: COO, [N, D] of an embedding, bfloat16, float16 or float32, of one shape
            on all ranks, with any ids. If the parameter has a context (`fluxlike.nn.Embedding`), its ids may have gone ahead. Or
            of dense gradients: flat, of any dtype that torch's own hook takes.

    Returns:
        A future of the averages, of the shape and dtype of ``bucket.buffer()``; sparse ones are coalesced, and the future is done.

    Raises:
        What `sparse_all_reduce_` raises, in ``backward()``; ValueError also where ranks of ``group`` are not in fluxlike's group.
    """
    x = bucket.buffer()
    if not x.is_sparse:
        return allreduce_hook(group, bucket)  # type: ignore[arg-type, no-any-return]
    (parameter,) = bucket.parameters()
    ctx = getattr(parameter, CONTEXT, None)
    if ctx is not None and ctx.closed:  # by all ranks, so all go on without
        ctx = None
    # as torch's hook for dense buckets, not the group given to fluxlike.init
    y = sparse_all_reduce(x, "avg", dist.group.WORLD if group is None else group, ctx=ctx)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[y.device] if y.is_cuda else None)
    done.set_result(y)
    return done

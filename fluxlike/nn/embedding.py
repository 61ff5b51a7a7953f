"""An embedding with sparse gradients, whose ids go to the other ranks in the forward pass."""

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from ..ops.group import resolve
from ..ops.sparse_all_reduce import create_sparse_all_reduce_context
from ..ops.sparse_arguments import refuse
from ..ops.sparse_hook import CONTEXT


class Embedding(nn.Embedding):
    """``torch.nn.Embedding(…, sparse=True)`` for data parallelism with `fluxlike.sparse_allreduce_hook`.

    A forward pass that will have a gradient begins the exchange of its ids, beside what follows; the hook then sends values only.
    If there is a second forward pass before the gradient is reduced (shared tables, accumulated gradients, checkpointing), or a
    reduced gradient to which the next one is added, ids go with the values, as they do in evaluation (``eval``), where nothing
    begins and a rank may be alone. Making it is collective over ``group``, and needs fluxlike.init; `close` gives its memory back.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, max_ids: int, group: dist.ProcessGroup | None = None, **options: Any
    ) -> None:
        """``max_ids``: ids of a rank's gradient at most. ``options``: those of torch.nn.Embedding, but ``sparse``.

        Raises ValueError on all ranks if one passes sizes or a dtype that are not legal, or other ones than the rest.
        """
        control = resolve(group)
        error: Exception | None = None
        try:
            super().__init__(num_embeddings, embedding_dim, sparse=True, **options)
        except Exception as problem:  # torch says no by errors of many kinds
            error = ValueError(f"Embedding: {problem}")
            error.__cause__ = problem
        control.agree("fluxlike.nn.Embedding", (num_embeddings, embedding_dim, max_ids), error)
        self.context = create_sparse_all_reduce_context(self.weight.shape, max_ids, self.weight.dtype, group)
        setattr(self.weight, CONTEXT, self.context)
        self._started_for = -1

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: int64 or int32, of any shape. Raises what torch.nn.Embedding raises, and ValueError of more ids than max_ids."""
        rows = super().forward(ids)  # first, as it checks the ids
        if self.training and torch.is_grad_enabled() and self.weight.requires_grad and not self.context.closed:
            self._start(ids)
        return rows

    @torch.compiler.disable  # else dynamo goes into the launches, and compiles anew for each number of calls
    def _start(self, ids: torch.Tensor) -> None:
        calls = self.context.stats["calls"]
        self.context.cancel_indices()
        grad = self.weight.grad  # what comes is added to it, and reduced again with it, as by DDP without no_sync
        kept_on = grad is not None and grad.is_sparse and grad._nnz() > 0
        if self._started_for != calls and not kept_on:  # the first forward pass since the last gradient was reduced
            self._started_for = calls
            kept = ids if self.padding_idx is None else ids[ids != self.padding_idx]  # as the gradient has them
            if kept.numel() > self.context.rows:
                most = f"max_ids={self.context.rows}; make the Embedding with a larger max_ids"
                refuse(self.context.control, f"Embedding: {kept.numel()} ids are more than {most}")
            self.context.start_indices(kept)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """What `to`, `half` and the like do, unless the context would not fit the weight that they make."""
        dtype = fn(self.weight.detach()[:0]).dtype
        if not self.context.closed and dtype != self.context.dtype:
            raise ValueError(
                f"fluxlike.nn.Embedding: its memory that the ranks share is for {self.context.dtype}, and its weight would become "
                f"{dtype}; make it with dtype={dtype}, or close it first"
            )
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "fluxlike.nn.Embedding: it has memory that the ranks share, so it cannot be copied or pickled; make another one, and "
            "load the state_dict of this one"
        )

    def close(self) -> None:
        """Give the memory back; collective."""
        self.context.close()

"""An embedding with sparse gradients, whose ids go to the other ranks in the forward pass."""

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from ..ops.dispatcher import traced
from ..ops.group import resolve
from ..ops.refusals import Refusing
from ..ops.sparse_all_reduce import create_sparse_all_reduce_context
from ..ops.sparse_arguments import NAME
from ..ops.sparse_hook import CONTEXT
from ..runtime import faking

#: Reductions after which a forward pass that was never differentiated keeps ids from going ahead no more.
FORGOTTEN = 32


class Embedding(nn.Embedding):
    """``torch.nn.Embedding(…, sparse=True)`` for data parallelism with `fluxlike.sparse_allreduce_hook`.

    A forward pass that will have a gradient begins the exchange of its ids, beside what follows; the hook then sends values only.
    If there is a second forward pass before the gradient is reduced (shared tables, accumulated gradients, checkpointing), an
    earlier one that has not been differentiated yet (pipelines; one that never is counts for `FORGOTTEN` reductions), or a reduced
    gradient to which the next one is added (call ``zero_grad`` in front of the forward pass), ids go with the values. So they do in
    evaluation (``eval``), where nothing begins and a rank may be alone; in training the ranks make the same forward passes between
    two reductions. What others compute from the same weight, as by torch's Embedding, is not seen: use this class for all of them.
    A graph of torch.export, torch.jit.trace or make_fx has the rows only, as torch.nn.Embedding's: no ids, and no check of max_ids.

    Making it is collective over ``group``, and needs fluxlike.init; `close` gives its memory back, and then ids go with the values.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, max_ids: int, group: dist.ProcessGroup | None = None, **options: Any
    ) -> None:
        """``max_ids``: entries of a rank's gradient at most, as it is when it is reduced: of all forward passes that are added up
        in it, and of the reduced one that they are added to. ``options``: those of torch.nn.Embedding, but ``sparse``.

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
        #: Of what is computed from the weight: see `_Ahead`. It lies with the context, which tied weights share.
        self.context.ahead = _Ahead()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: int64 or int32, of any shape. Raises what torch.nn.Embedding raises, and ValueError of more ids than max_ids."""
        # a graph, or a transform, would have the rows only; the flag itself, as dynamo of torch 2.11 takes is_exporting() for true
        if torch.compiler._is_exporting_flag or (not torch.compiler.is_compiling() and (traced() or faking.is_transformed())):
            return super().forward(ids)
        tells = not torch.compiler.is_compiling() and self._begins()
        with Refusing(NAME, self.context.control) if tells else contextlib.nullcontext():
            rows = super().forward(ids)  # first, as it checks the ids
        if self.training and torch.is_grad_enabled() and self.weight.requires_grad:
            self._start(ids, rows)
        return rows

    def _begins(self) -> bool:
        """Whether the ids of a forward pass go ahead."""
        context, grad = getattr(self.weight, CONTEXT, self.context), self.weight.grad
        if not (self.training and torch.is_grad_enabled() and self.weight.requires_grad):
            return False
        if context.closed or context.dtype != self.weight.dtype:
            return False
        # what comes is added to it, and reduced again with it, as by DDP without no_sync
        kept_on = grad is not None and grad.is_sparse and grad._nnz() > 0
        return not kept_on and context.ahead.is_first(context.stats["calls"])

    @torch.compiler.disable  # else dynamo goes into the launches, and compiles anew for each number of calls
    def _start(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        context = getattr(self.weight, CONTEXT, self.context)
        if context.closed or context.dtype != self.weight.dtype:
            return
        setattr(self.weight, CONTEXT, context)  # another tensor may have been put in its place, as by load_state_dict(assign=True)
        context.cancel_indices()
        begins = self._begins()
        context.ahead.forward(rows, context.stats["calls"])
        if begins:
            with Refusing(NAME, context.control):
                kept = ids if self.padding_idx is None else ids[ids != self.padding_idx]  # as the gradient has them
                if kept.numel() > context.rows:
                    most = f"max_ids={context.rows}; make the Embedding with a larger max_ids"
                    raise ValueError(f"Embedding: {kept.numel()} ids are more than {most}")
                context.start_indices(kept)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """What `to`, `half` and the like do, unless the context would not fit the weight that they make."""
        dtype = fn(self.weight.detach()[:0]).dtype
        if not self.context.closed and dtype != self.context.dtype:
            raise ValueError(
                f"fluxlike.nn.Embedding: its memory that the ranks share is for {self.context.dtype}, and its weight would become "
                f"{dtype}; make it with dtype={dtype}, or close it first"
            )
        return super()._apply(fn, recurse)

    @classmethod
    def from_pretrained(cls, *_: Any, **__: Any) -> Self:
        """Not available, TypeError: max_ids must be said, which torch's has no place for."""
        raise TypeError("fluxlike.nn.Embedding: make one, with max_ids, and load the weights into it by load_state_dict")

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "fluxlike.nn.Embedding: it has memory that the ranks share, so it cannot be copied or pickled; make another one, and "
            "load the state_dict of this one"
        )

    def close(self) -> None:
        """Give the memory back; collective."""
        self.context.close()


class _Ahead:
    """Whether the next gradient of a weight will be that of one forward pass: known from forward and backward passes alone, and so
    the same on all ranks that make the same ones.
    """

    def __init__(self) -> None:
        #: How many forward passes have not been differentiated, by how many reductions there had been at each.
        self._open: Counter[int] = Counter()
        self._reduced = -1  # at the last forward pass

    def is_first(self, reduced: int) -> bool:
        """Whether a forward pass, after so many reductions, is the first since the last, and no other is open."""
        return self._reduced != reduced and not self._still_open(reduced)

    def _still_open(self, reduced: int) -> Counter[int]:
        return Counter({since: count for since, count in self._open.items() if count and reduced - since < FORGOTTEN})

    def forward(self, rows: torch.Tensor, reduced: int) -> None:
        """A forward pass gives ``rows``, after so many reductions."""
        self._open, self._reduced = self._still_open(reduced), reduced
        self._open[reduced] += 1
        open_since = [reduced]

        def differentiated(_: torch.Tensor) -> None:
            if open_since:  # with retain_graph it may be once more
                self._open[open_since.pop()] -= 1

        rows.register_hook(differentiated)

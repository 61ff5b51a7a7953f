"""Linear layers whose weight is spread over the ranks of a group, between activations whose sequence is.

    x [B, S/R, in] -- ColumnParallelLinear: ag_gemm --> [B, S, out/R]      gathers the sequence
    x [B, S, in/R] -- RowParallelLinear:    gemm_rs --> [B, S/R, out]      sums over ranks, scatters the sequence

Tokens are rows to the operations, and a rank's rows lie together: its part of the sequence, for every sequence of the batch. With
``sequence_dim=0`` ([S, B, …], or tokens [T, …]) or B = 1 that is how the whole lies in memory, too; otherwise one copy on the side
of the whole brings rows from rank-major to batch-major order, or back.
"""

import copy
from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from ..ops.ag_gemm import ag_gemm
from ..ops.gemm_rs import gemm_rs
from ..ops.library import group_of
from ..ops.refusals import leaving_out
from ..runtime import world


def arrived(x: torch.Tensor) -> torch.Tensor:
    """x, once a collective of torch's that it comes from has been waited for: without gradients torch leaves that to its user.

    With them an op waits by itself; ``wait`` would cut x off from what it was computed of.
    """
    if isinstance(x, AsyncCollectiveTensor) and not (x.requires_grad and torch.is_grad_enabled()):
        return x.wait()  # type: ignore[no-any-return]
    return x


def rows_of_shard(x: torch.Tensor) -> torch.Tensor:
    """[…, features] as rows."""
    rows = x.flatten(0, -2)  # also where there are no features, of which reshape(-1, 0) could not tell the rows
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def whole_from_rows(rows: torch.Tensor, shape: Sequence[int], dim: int, ranks: int) -> torch.Tensor:
    """Rank-major rows of all ranks as the whole of shards of ``shape`` [… features], spread along ``dim``."""
    if len(shape) == 2:
        return rows
    parts = rows.unflatten(0, (ranks, *shape[:-1]))
    # laid out as nn.Linear's result: flatten gives a view where a rank has one step of the sequence
    return parts.movedim(0, dim).flatten(dim, dim + 1).contiguous()


def rows_from_whole(x: torch.Tensor, dim: int, ranks: int) -> torch.Tensor:
    """The inverse: rank-major rows of a whole."""
    if x.dim() > 2:
        x = x.unflatten(dim, (ranks, -1)).movedim(dim, 0)
    return rows_of_shard(x)


def check_sequence(layer: str, x: torch.Tensor, dim: int, ranks: int | None) -> None:
    """x has features and a dimension of tokens before it, which the ranks share evenly if there are more dimensions."""
    if x.dim() < 2 or (x.dim() > 2 and not 0 <= dim < x.dim() - 1):
        raise ValueError(
            f"{layer}: the input is {tuple(x.shape)} and sequence_dim={dim}; it must be [tokens, features], or have more "
            "dimensions, of which sequence_dim is one before the last"
        )
    if ranks is not None and x.dim() > 2 and x.shape[dim] % ranks:
        raise ValueError(
            f"{layer}: dimension {dim} of the input {tuple(x.shape)}, the sequence, is not a multiple of the {ranks} ranks of the "
            "group; pad the sequence, or pass tokens as [tokens, features], which may be any number"
        )


def check_divides(layer: str, name: str, size: int, ranks: int) -> None:
    if size % ranks:
        raise ValueError(
            f"{layer}: {name}={size} is not a multiple of the {ranks} ranks of the group; pad it to "
            f"{-(-size // ranks) * ranks}, or use a group whose size divides it"
        )


def check_input(layer: str, x: torch.Tensor, weight: torch.Tensor, ranks: int) -> None:
    """x fits this rank's part of the weight, of which the layer spreads the features over ``ranks`` (1: it does not)."""
    size = weight.shape[1]
    if x.shape[-1] != size:
        part = "" if ranks == 1 else f", of which each of the {ranks} ranks takes {size}"
        raise ValueError(
            f"{layer}: the input is {tuple(x.shape)} and in_features={ranks * size}{part}; its last size must be {size}"
        )
    if x.dtype != weight.dtype:
        raise ValueError(
            f"{layer}: the input has dtype {x.dtype} and the layer's weight {weight.dtype}; they must be the same, use "
            f"x.to({weight.dtype}), or make the layer with dtype={x.dtype}"
        )


def is_linear(module: Any) -> bool:
    """Whether a module's forward is that of nn.Linear, which is what a layer of ours has in its place."""
    if not isinstance(module, nn.Linear) or "forward" in vars(module):
        return False
    return type(module).forward is nn.Linear.forward and type(module).__call__ is nn.Linear.__call__


def kind_of(module: Any) -> str:
    own = isinstance(module, nn.Module) and "forward" in vars(module)
    return f"{type(module).__name__}{' with a forward of its own' if own else ''}"


def check_linears(layer: str, linears: Sequence[Any]) -> None:
    for linear in linears:
        if not is_linear(linear):
            remedy = "; pass several as from_linear(*layers)" if isinstance(linear, (list, tuple)) else ""
            raise ValueError(
                f"{layer}: a layer is a {kind_of(linear)}, it must be an nn.Linear with nn.Linear's own forward{remedy}"
            )
        check_made(layer, linear)
        if what := _besides(linear):
            raise ValueError(f"{layer}: a layer has {what}, which the one made of it, of this rank's part, would not")


def _besides(linear: nn.Linear) -> str:
    """What changes a layer's results, or gradients, and is not in its weights."""
    if parametrize.is_parametrized(linear):
        return "parametrizations (torch.nn.utils.parametrize.remove_parametrizations takes them off)"
    kinds = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
    of_weights = "_backward_hooks", "_post_accumulate_grad_hooks"
    if any(getattr(linear, kind) for kind in kinds) or any(getattr(p, kind) for p in linear.parameters() for kind in of_weights):
        return "hooks (take them off, and register them behind this where they are right for a part)"
    return ""


def check_made(layer: str, linear: Any) -> None:
    if is_lazy(linear.weight) or hasattr(linear, "_initialize_hook"):
        raise ValueError(f"{layer}: a layer is a {type(linear).__name__} without weights; call it once before")


def autocast(x: torch.Tensor, *others: torch.Tensor | None) -> list[Any]:
    """The operands in the dtype that torch.autocast wants of a linear layer, if it is on."""
    kind = x.device.type
    if not _casts(kind):
        return [x, *others]
    return [t if t is None else t.to(autocast_dtype(t, kind)) for t in (x, *others)]


def autocast_dtype(t: torch.Tensor, kind: str) -> torch.dtype:
    """That dtype, of an operand of a layer whose input is on a device of this kind.

    As torch.autocast, it leaves alone doubles and what has no floating point: of complex numbers a cast would drop a part.
    """
    cast = _casts(kind) and t.is_floating_point() and t.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if cast else t.dtype


def _casts(kind: str) -> bool:
    return kind != "meta" and torch.is_autocast_enabled(kind)


def fill(parameter: nn.Parameter, part: torch.Tensor) -> None:
    """Write this rank's part of what was drawn; of a parameter under FSDP2 that is spread once more."""
    if isinstance(parameter, DTensor):
        part = distribute_tensor(part, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.data.copy_(part)


def column_forward(
    layer: str,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    group: dist.ProcessGroup | None,
    ranks: int,
    dim: int,
    m: int | None,
    save_gathered: bool,
) -> list[torch.Tensor]:
    """What the layers and the styles do: one gather, a result for each weight."""
    with leaving_out("ag_gemm", group):
        check_sequence(layer, x, dim, None)
        if m is not None and x.dim() > 2:
            raise ValueError(
                f"{layer}: m={m} is for inputs [tokens, features], and this one is {list(x.shape)}; flatten it to tokens, or pad "
                "the sequence so that all ranks have as many"
            )
        x, *operands = autocast(arrived(x), *weights, *biases)
        weights, biases = operands[: len(weights)], operands[len(weights) :]
        check_input(layer, x, weights[0], 1)
        rows = rows_of_shard(x)
    keep = save_gathered and torch.is_grad_enabled()
    n = ranks * sum(w.shape[0] for w in weights)  # evenly split: `check_divides`
    results = ag_gemm(rows, weights, bias=biases, group=group, m=m, return_gathered=keep, n=n)
    if keep:
        results, _ = results
    return [whole_from_rows(z, (*x.shape[:-1], z.shape[-1]), dim, ranks) for z in results]


def row_forward(
    layer: str, x: torch.Tensor, weight: torch.Tensor, bias: Any, group: dist.ProcessGroup | None, ranks: int, dim: int
) -> torch.Tensor:
    with leaving_out("gemm_rs", group):
        check_sequence(layer, x, dim, ranks)
        x, weight, bias = autocast(arrived(x), weight, bias)
        check_input(layer, x, weight, ranks)
        rows = rows_from_whole(x, dim, ranks)
    k = ranks * weight.shape[1]  # evenly split: `check_divides`
    y = gemm_rs(rows, weight, bias=bias, group=group, k=k)
    if x.dim() == 2:
        return y
    return y.unflatten(0, [size // ranks if i == dim else size for i, size in enumerate(x.shape[:-1])])


class InGroup(nn.Module):
    """A layer of a group. A copy, or a pickle, names the group, as the group itself cannot be copied."""

    group: dist.ProcessGroup

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()  # without what `compile` has made of it, which has this one's parameters
        return state | {"group": (self.group.group_name, world.ranks_of(self.group), dist.get_rank(self.group))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """ValueError if the group of that name, which torch counts up, is not of the same ranks here, or this is another rank."""
        name, ranks, *place = state["group"]  # older ones have no place
        try:
            group = group_of(name)
            here = dist.get_process_group_ranks(group)
        except (RuntimeError, ValueError):
            here = None
        if here != ranks:
            found = "not there" if here is None else f"one of ranks {here}"
            raise ValueError(
                f"{type(self).__name__}: it was pickled with the group {name!r} of ranks {ranks}, which is {found} in this job; "
                "make the groups in the same order, or load a state_dict into a layer of this job"
            )
        if place and dist.get_rank(group) != place[0]:
            raise ValueError(
                f"{type(self).__name__}: rank {place[0]} of its group has pickled it, whose part of the weights it has, and this "
                f"is rank {dist.get_rank(group)}; let each rank pickle its own, and load that"
            )
        super().__setstate__(state | {"group": group})

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Of the same group, as it is the same job. A parametrization, which takes the pickle away, would copy the group, too."""
        world.ranks_of(self.group)  # it may have ended
        copied = memo[id(self)] = self.__new__(type(self))
        memo[id(self.group)] = self.group
        nn.Module.__setstate__(copied, copy.deepcopy(super().__getstate__(), memo))
        return copied


class _Layer(InGroup):
    """What the layers of this file have in common."""

    def __init__(self, group: dist.ProcessGroup | None, sequence_dim: int) -> None:
        super().__init__()
        self.group = group if group is not None else world.current().group
        world.check_group(self.group)
        if not isinstance(sequence_dim, int) or isinstance(sequence_dim, bool) or sequence_dim < 0:
            raise ValueError(
                f"{type(self).__name__}: sequence_dim={sequence_dim!r} is not a dimension of the input, counted from 0"
            )
        self.tp_size, self.tp_rank = self.group.size(), self.group.rank()
        self.sequence_dim = sequence_dim

    def extra_repr(self) -> str:
        return f"tp_size={self.tp_size}, sequence_dim={self.sequence_dim}"

    def _part(self, t: torch.Tensor, dim: int) -> nn.Parameter:
        part = t.detach().chunk(self.tp_size, dim)[self.tp_rank]
        return nn.Parameter(part.clone(memory_format=torch.contiguous_format), requires_grad=t.requires_grad)


class ColumnParallelLinear(_Layer):
    """``nn.Linear`` with its rows of weight spread over the ranks, on an input whose sequence is: gathers it under the product.

    Args:
        in_features, bias, device, dtype: as nn.Linear. out_features: of all ranks together, a multiple of their number. A sequence
            of them makes several weights that share one gather (gate and up; q, k and v), and the result a tuple.
        group: the tensor-parallel group; the one given to fluxlike.init if None.
        sequence_dim: the dimension of an input of three or more that is spread over the ranks; of [tokens, features] it is 0.
        save_gathered: keep the gathered input for the backward, which then need not gather it again. Costs R times the
            memory; by default the shard is kept.

    Parameters: ``weights`` and ``biases``, this rank's rows [out_features / R, in_features] and [out_features / R] for each of
    out_features. They are drawn as nn.Linear draws the whole ones: with one seed on all ranks the layer is that nn.Linear. A
    state_dict has this rank's part, so a checkpoint needs a file for each rank (docs/model.md); `from_linear` takes whole layers.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        bias: bool = True,
        *,
        group: dist.ProcessGroup | None = None,
        sequence_dim: int = 1,
        save_gathered: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group, sequence_dim)
        several = isinstance(out_features, Sequence)
        sizes: Sequence[int] = out_features if isinstance(out_features, Sequence) else [out_features]
        for size in sizes:
            check_divides("ColumnParallelLinear", "out_features", size, self.tp_size)
        self._take([nn.Linear(in_features, size, bias, device=device, dtype=dtype) for size in sizes], several, save_gathered)

    @classmethod
    def from_linear(
        cls, *linears: nn.Linear, group: dist.ProcessGroup | None = None, sequence_dim: int = 1, save_gathered: bool = False
    ) -> "ColumnParallelLinear":
        """This rank's part of whole layers, which all ranks have alike; of several the result is a tuple."""
        self = cls.__new__(cls)
        _Layer.__init__(self, group, sequence_dim)
        check_linears("ColumnParallelLinear", linears)
        for linear in linears:
            check_divides("ColumnParallelLinear", "out_features", linear.out_features, self.tp_size)
        self._take(linears, len(linears) > 1, save_gathered)
        return self

    def _take(self, linears: Sequence[nn.Linear], several: bool, save_gathered: bool) -> None:
        inputs = [linear.in_features for linear in linears]
        if len(set(inputs)) != 1:
            raise ValueError(
                f"ColumnParallelLinear: {len(linears)} layers with in_features {inputs}; give one layer or more, all with the same "
                "in_features, as they share their input"
            )
        self.in_features, self.out_features = linears[0].in_features, tuple(linear.out_features for linear in linears)
        self.several, self.save_gathered = several, save_gathered
        self.weights = nn.ParameterList([self._part(linear.weight, 0) for linear in linears])
        self.biases = nn.ParameterList([self._part(linear.bias, 0) for linear in linears if linear.bias is not None])
        if len(self.biases) not in (0, len(linears)):
            raise ValueError("ColumnParallelLinear: some of the layers have a bias and some have none; give them all one, or none")

    def reset_parameters(self) -> None:
        """Draw the parameters anew as nn.Linear draws the whole ones, from one seed on all ranks."""
        for i, (size, weight) in enumerate(zip(self.out_features, self.weights, strict=True)):
            whole = nn.Linear(self.in_features, size, len(self.biases) > 0, device=weight.device, dtype=weight.dtype)
            fill(weight, self._part(whole.weight, 0))
            if whole.bias is not None:
                fill(self.biases[i], self._part(whole.bias, 0))

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {super().extra_repr()}"

    def forward(self, x: torch.Tensor, m: int | None = None) -> Any:
        """x: this rank's part of the sequence, […, in_features]; the result has all of it, […, out_features / R].

        ``m``: for [tokens, features], the tokens of all ranks, if the ranks have different numbers, split as torch.chunk splits.
        """
        weights, biases = list(self.weights), list(self.biases) or [None] * len(self.weights)
        results = column_forward(
            "ColumnParallelLinear", x, weights, biases, self.group, self.tp_size, self.sequence_dim, m, self.save_gathered
        )
        return tuple(results) if self.several else results[0]


class RowParallelLinear(_Layer):
    """``nn.Linear`` with its columns of weight spread over the ranks: sums over them and scatters the sequence under the product.

    Args:
        in_features: of all ranks together, a multiple of their number. out_features, bias, device, dtype: as nn.Linear.
        group, sequence_dim: as of ColumnParallelLinear.

    Parameters: ``weight`` [out_features, in_features / R] and ``bias`` [out_features], the same on all ranks: it is added once, and
    every rank gets its whole gradient. They are drawn as nn.Linear draws the whole ones. A state_dict has this rank's part, so a
    checkpoint needs a file for each rank (docs/model.md).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: dist.ProcessGroup | None = None,
        sequence_dim: int = 1,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group, sequence_dim)
        check_divides("RowParallelLinear", "in_features", in_features, self.tp_size)
        self._take(nn.Linear(in_features, out_features, bias, device=device, dtype=dtype))

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, group: dist.ProcessGroup | None = None, sequence_dim: int = 1
    ) -> "RowParallelLinear":
        """This rank's part of a whole layer, which all ranks have alike."""
        self = cls.__new__(cls)
        _Layer.__init__(self, group, sequence_dim)
        check_linears("RowParallelLinear", [linear])
        check_divides("RowParallelLinear", "in_features", linear.in_features, self.tp_size)
        self._take(linear)
        return self

    def _take(self, linear: nn.Linear) -> None:
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = self._part(linear.weight, 1)
        bias = linear.bias
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)

    def reset_parameters(self) -> None:
        """Draw the parameters anew as nn.Linear draws the whole ones, from one seed on all ranks."""
        weight = self.weight
        whole = nn.Linear(self.in_features, self.out_features, self.bias is not None, device=weight.device, dtype=weight.dtype)
        fill(weight, self._part(whole.weight, 1))
        if self.bias is not None:
            fill(self.bias, whole.bias.detach())

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {super().extra_repr()}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: the whole sequence, […, in_features / R]; the result is this rank's part of it, […, out_features]."""
        return row_forward("RowParallelLinear", x, self.weight, self.bias, self.group, self.tp_size, self.sequence_dim)

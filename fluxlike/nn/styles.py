"""Styles for ``torch.distributed.tensor.parallel.parallelize_module`` that put an nn.Linear on gemm_rs or ag_gemm.

They do to the parameters what torch's styles of the same names do (DTensors: weight and bias sharded along dimension 0, or weight
along 1 and bias replicated), so checkpoints, optimizers, FSDP2 and gradient clipping see what they know. What they change is the
forward: torch gathers, then multiplies, or multiplies, then scatters; these do both at once.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from ..ops.refusals import leaving_out
from ..runtime import world
from .linear import (
    InGroup,
    autocast_dtype,
    check_divides,
    check_made,
    check_sequence,
    column_forward,
    is_linear,
    kind_of,
    row_forward,
)


class _Style(ParallelStyle):
    """``sequence``: the layout of the activations that are spread along the sequence."""

    def __init__(self, sequence: Placement, features: Placement, use_local_output: bool) -> None:
        super().__init__()
        name = type(self).__name__
        if not isinstance(sequence, Shard) or sequence.dim < 0:
            raise ValueError(
                f"fluxlike.nn.{name}: {sequence} is not Shard(d) of the sequence dimension d; for other layouts use "
                f"torch.distributed.tensor.parallel.{name}"
            )
        if features != Shard(-1):
            raise ValueError(f"fluxlike.nn.{name}: {features} is not Shard(-1), the features; use torch's {name} for other layouts")
        self.sequence, self.use_local_output = sequence, use_local_output

    def _check(self, module: nn.Module, mesh: DeviceMesh, size: str, parameters: Iterable[str]) -> None:
        """ValueError for what is no linear layer that this style can take."""
        name = f"fluxlike.nn.{type(self).__name__}"
        if not is_linear(module):
            raise ValueError(
                f"{name}: the module is a {kind_of(module)}; it must be an nn.Linear with nn.Linear's own forward, which is "
                "what is replaced; name its linear layers in the plan"
            )
        check_made(name, module)
        if mesh.ndim != 1:
            raise ValueError(f'{name}: the mesh has {mesh.ndim} dimensions; pass the one of tensor parallelism, as mesh["tp"]')
        check_divides(name, size, getattr(module, size), mesh.size())
        if others := [parameter for parameter in parameters if parameter not in module._parameters]:
            raise ValueError(
                f"{name}: {', '.join(others)} of the module is no parameter of its own, as under a parametrization, weight_norm, "
                "spectral_norm or pruning; take that off before (parametrize.remove_parametrizations, prune.remove). A module "
                "that is sharded may have a parametrization that makes each element of the weight of that element alone"
            )

    def _take(self, module: nn.Module, mesh: DeviceMesh, kind: type, size: str, layouts: dict[str, Placement]) -> nn.Module:
        """Shard the parameters of a linear layer, and give it the forward of ``kind``."""
        self._check(module, mesh, size, layouts)
        for parameter, layout in layouts.items():
            whole = getattr(module, parameter)
            if whole is not None:
                part = distribute_tensor(whole, mesh, [layout], src_data_rank=self.src_data_rank)
                module.register_parameter(parameter, nn.Parameter(part, requires_grad=whole.requires_grad))
        module.__class__ = _class(kind, type(module))
        module.tp_mesh, module.group = mesh, mesh.get_group()  # type: ignore[assignment]
        module.sequence, module.use_local_output = self.sequence, self.use_local_output  # type: ignore[assignment]
        return module


class ColwiseParallel(_Style):
    """An nn.Linear by ag_gemm: input spread along the sequence, gathered under the product; output spread along its features.

    Args:
        input_layouts: ``Shard(d)``, d the sequence dimension of an input of three or more; [tokens, features] is spread along 0
            whatever d is. A plain tensor is taken to be this rank's part; a DTensor of another layout is redistributed, and one
            over other ranks than the layer's is refused.
        output_layouts: ``Shard(-1)``. use_local_output: return this rank's part as a plain tensor, not a DTensor.
    """

    def __init__(
        self, *, input_layouts: Placement | None = None, output_layouts: Placement | None = None, use_local_output: bool = True
    ) -> None:
        super().__init__(input_layouts or Shard(1), output_layouts or Shard(-1), use_local_output)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._take(module, device_mesh, _Colwise, "out_features", {"weight": Shard(0), "bias": Shard(0)})
        module.shared = None  # type: ignore[assignment]
        return module


class SharedGather(ColwiseParallel):
    """`ColwiseParallel` for linear layers of one module that are called with the same input: they share one gather.

    ``parallelize_module(model, mesh, {"attention": SharedGather("wq", "wk", "wv"), "attention.wo": RowwiseParallel()})``

    Args:
        names: the layers, from the module that the plan names. The first to be called makes the products of all, and the others
            take theirs; so all must be called in each forward, with the very same tensor, unchanged (which nobody looks for in
            what is compiled, nor of tensors of torch.inference_mode), under one state of autocast, and in one checkpoint if in
            any. Other arguments: as ColwiseParallel's.
    """

    def __init__(self, *names: str, **layouts: Any) -> None:
        super().__init__(**layouts)
        if len(names) < 2:
            raise ValueError(f"fluxlike.nn.SharedGather: {len(names)} names; name two or more, or use ColwiseParallel for one")
        self.names = names

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        known = dict(module.named_modules(remove_duplicate=False))
        missing = [name for name in self.names if name not in known]
        if missing:
            raise ValueError(
                f"fluxlike.nn.SharedGather: {type(module).__name__} has no {', '.join(map(repr, missing))}; names are of layers in "
                "the module that the plan's key names"
            )
        found = [known[name] for name in self.names]
        widths = [getattr(layer, "in_features", None) for layer in found]  # of what is no linear layer the next line tells
        for name, width in zip(self.names, widths, strict=True):
            if None not in (width, widths[0]) and width != widths[0]:
                raise ValueError(
                    f"fluxlike.nn.SharedGather: {self.names[0]} has in_features={widths[0]} and {name} in_features={width}; layers "
                    "that share a gather have one input, else give each a ColwiseParallel of its own"
                )
        for i, layer in enumerate(found):
            first = next(j for j, other in enumerate(found) if other is layer)
            if first < i:
                raise ValueError(
                    f"fluxlike.nn.SharedGather: {self.names[first]} and {self.names[i]} are one layer, which would be called "
                    "twice; name each layer once"
                )
        for layer in found:  # all of them, before the first is changed
            self._check(layer, device_mesh, "out_features", ("weight", "bias"))
        layers = [super(SharedGather, self)._apply(layer, device_mesh) for layer in found]
        shared = _Shared(layers, self.names)
        for layer in shared.layers:
            layer.shared = shared  # type: ignore[assignment]
        # what a layer that was called alone has left is of the weights of that time
        module.register_forward_pre_hook(shared.drop)
        return module


class RowwiseParallel(_Style):
    """An nn.Linear by gemm_rs: input spread along its features; output summed over ranks and spread along the sequence.

    Args:
        input_layouts: ``Shard(-1)``; a DTensor of another layout is redistributed.
        output_layouts: ``Shard(d)``, as input_layouts of `ColwiseParallel`. use_local_output: as there.
    """

    def __init__(
        self, *, input_layouts: Placement | None = None, output_layouts: Placement | None = None, use_local_output: bool = True
    ) -> None:
        super().__init__(output_layouts or Shard(1), input_layouts or Shard(-1), use_local_output)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self._take(module, device_mesh, _Rowwise, "in_features", {"weight": Shard(1), "bias": Replicate()})


_classes: dict[tuple[type, type], type] = {}


def _class(kind: type, of: type) -> type:
    """Modules of class ``of`` with the forward of ``kind``: one class, as torch.compile makes code for each."""
    if (kind, of) not in _classes:
        _classes[kind, of] = type(f"{kind.__name__}{of.__name__}", (kind, of), {})
    return _classes[kind, of]


def _blank(kind: type, of: type) -> Any:
    made: Any = _class(kind, of)
    return made.__new__(made)


class _Linear(InGroup):
    """A linear layer whose parameters are DTensors and whose forward is ours."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    tp_mesh: DeviceMesh
    sequence: Shard
    use_local_output: bool
    style: str

    def __reduce_ex__(self, protocol: Any) -> Any:
        bases = type(self).__bases__
        if _Linear not in bases[0].__bases__:  # somebody has changed its class since
            return super().__reduce_ex__(protocol)
        return _blank, bases, self.__getstate__()  # its class has no name that a pickle could look up

    def _part(self, name: str, layout: Placement) -> Any:
        """This rank's part of a parameter. What has been put in the place of the style's DTensor would give wrong results."""
        parameter = getattr(self, name)
        if parameter is None:
            return None
        if not isinstance(parameter, DTensor) or parameter.placements != (layout,):
            found = parameter.placements if isinstance(parameter, DTensor) else "a plain tensor"
            if isinstance(parameter, DTensor) and parameter.device_mesh.ndim > 1:
                raise ValueError(
                    f"{self.style}: {name} is still spread as FSDP2 spreads it, {found}; call fully_shard on a module that holds "
                    "all layers which share a gather, not on one of them, and call the layers through it"
                )
            remedy = "take off what makes it of other parameters, as weight_norm (parametrize.remove_parametrizations)"
            if name in self._parameters:
                how = "torch.distributed.checkpoint.state_dict.set_model_state_dict with full_state_dict=True"
                remedy = f"load a plain model's state by {how}"
            raise ValueError(
                f"{self.style}: {name} is {found}, it must be a DTensor of layout {layout}, as the style has made it; {remedy}"
            )
        self._check_mesh(name, parameter.device_mesh)
        return parameter.to_local()

    def _check_mesh(self, name: str, mesh: DeviceMesh) -> None:
        """A DTensor is spread over the ranks of this layer. Over others its layout may be the same, and its parts other ones."""
        if mesh != self.tp_mesh and (mesh.ndim != 1 or world.ranks_of(mesh.get_group()) != world.ranks_of(self.group)):
            raise ValueError(
                f"{self.style}: {name} is a DTensor on {mesh}, and the layer is on {self.tp_mesh}; they must have the same ranks: "
                "pass this rank's part, as .to_local() gives it, or DTensor.from_local(part, mesh, layout) of the layer's mesh"
            )

    def _dim(self, x: torch.Tensor) -> int:
        return 0 if x.dim() == 2 else self.sequence.dim

    def _input(self, x: torch.Tensor, layout: Placement) -> torch.Tensor:
        """This rank's part of x."""
        if isinstance(x, DTensor):
            self._check_mesh("the input", x.device_mesh)
            return x.redistribute(x.device_mesh, [layout]).to_local()
        return x

    def _output(self, y: torch.Tensor, layout: Placement, shape: tuple[Any, ...]) -> torch.Tensor:
        if self.use_local_output:
            return y
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(y, self.tp_mesh, [layout], run_check=False, shape=torch.Size(shape), stride=stride)


class _Colwise(_Linear):
    style = "fluxlike.nn.ColwiseParallel"
    shared: "_Shared | None"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.products(x, [self])[0] if self.shared is None else self.shared.take(self, x)

    def products(self, x: torch.Tensor, layers: Sequence["_Colwise"]) -> list[torch.Tensor]:
        """Of one gather of x, which is laid out as this layer's input."""
        with leaving_out("ag_gemm", self.group):
            dim, m = self._dim(x), None
            if isinstance(x, DTensor):
                check_sequence(self.style, x, dim, self.tp_mesh.size())
                m = x.shape[0] if x.dim() == 2 else None
            x = self._input(x, Shard(dim))
            weights, biases = ([layer._part(p, Shard(0)) for layer in layers] for p in ("weight", "bias"))
        zs = column_forward(self.style, x, weights, biases, self.group, self.tp_mesh.size(), dim, m, False)
        _watch(self.style, x, layers, zs)
        return [
            self._output(z, Shard(z.dim() - 1), (*z.shape[:-1], layer.weight.shape[0]))
            for z, layer in zip(zs, layers, strict=True)
        ]


class _Shared:
    """Layers that share a gather, and what those that have not been called yet will take."""

    def __init__(self, layers: Sequence[Any], names: Sequence[str]) -> None:
        self.layers, self.names = list(layers), list(names)
        self.input: torch.Tensor | None = None
        #: For each layer, of the input and its parameters, when the products were made.
        self.states: dict[str, list[_State]] = {}
        #: Whether gradients were recorded then.
        self.recorded = False
        self.first = ""
        self.waiting: dict[str, torch.Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Without what a forward that was ended in between has left: results of a graph cannot be copied."""
        return vars(self) | {"input": None, "waiting": {}, "states": {}}

    def drop(self, *_: Any) -> None:
        """Nothing waits any more."""
        self.input, self.waiting, self.states = None, {}, {}

    def take(self, layer: _Colwise, x: torch.Tensor) -> torch.Tensor:
        name = next((name for name, other in zip(self.names, self.layers, strict=True) if other is layer), None)
        if name is None:
            raise ValueError(
                f"fluxlike.nn.SharedGather: a layer was called that is none of {', '.join(self.names)}, which share a gather, but "
                "holds on to it, as a copy by copy.copy does; use copy.deepcopy, on the module that holds them all"
            )
        # the layer that began begins again: a checkpoint's second forward may end before all have taken theirs
        if not self.waiting or name == self.first:
            self.waiting = {}
            self.waiting = dict(zip(self.names, layer.products(x, self.layers), strict=True))
            self.input, self.first, self.recorded = x, name, torch.is_grad_enabled()
            self.states = {name: _states(x, layer) for name, layer in zip(self.names, self.layers, strict=True)}
        elif (how := self._unlike_first(layer, name, x)) is not None:
            self.drop()
            raise ValueError(
                f"fluxlike.nn.SharedGather: {name} was called {how}; layers that share a gather must all be called once with the "
                "same tensor, which no hook of one of them may replace, else give each a ColwiseParallel of its own"
            )
        result = self.waiting.pop(name)
        if not self.waiting:
            self.drop()
        return result

    def _unlike_first(self, layer: _Colwise, name: str, x: torch.Tensor) -> str | None:
        """How a layer is called otherwise than the one that made the products, so that it cannot have what waits."""
        if self.input is not x:
            return f"with another tensor than {self.first}"
        if name not in self.waiting:
            return f"again, before {', '.join(self.waiting)} took theirs"
        changed = [now.is_unlike(then) for now, then in zip(_states(x, layer), self.states[name], strict=False)]
        if any(changed[:1]):
            return f"with a tensor that was changed since {self.first} was called with it"
        if any(changed):
            return f"with weights that were changed since {self.first} was called"
        if self.recorded != torch.is_grad_enabled():
            return f"with gradients on or off, unlike {self.first}"
        if self.waiting[name].dtype != autocast_dtype(x, x.device.type):
            return f"with torch.autocast on or off, or of another dtype, unlike {self.first}"
        return None


class _State(NamedTuple):
    """A tensor, whether it wants a gradient, and what torch counts up when something is written into it."""

    tensor: torch.Tensor | None
    wants: bool
    version: int | None

    def is_unlike(self, other: "_State") -> bool:
        return self.tensor is not other.tensor or self[1:] != other[1:]


def _states(x: torch.Tensor, layer: nn.Module) -> list[_State]:
    """Of the input of a layer and of its parameters; nothing in what is compiled."""
    tensors = [x, *layer._parameters.values()]
    states = zip(tensors, _versions(tensors), strict=False)
    return [_State(t, t is not None and t.requires_grad, version) for t, version in states]


def _versions(tensors: Sequence[torch.Tensor | None]) -> list[int | None]:
    """What torch counts up when something is written into each, None where it does not; nothing in what is compiled."""
    if torch.compiler.is_compiling():
        return []
    return [None if t is None or t.is_inference() else t._version for t in tensors]


def _watch(style: str, x: torch.Tensor, layers: Sequence[_Linear], results: Sequence[torch.Tensor]) -> None:
    """Let the backward of ``results`` raise where a weight that it reads has been changed in place by then.

    torch sees to that for what an operation keeps. Here it keeps this rank's part, and changes count on the DTensor; those by an
    optimizer's foreach=True do not count there either. As torch, this does not look where something else keeps what is kept, as
    checkpoints do.
    """
    if not x.requires_grad or torch.compiler.is_compiling():
        return
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return
    # a view's own node goes when something is added to it in place
    nodes = {(y._base if y._is_view() else y).grad_fn for y in results} - {None}  # type: ignore[union-attr]
    weights = [layer._parameters.get("weight") for layer in layers] if nodes else []
    read = [w for w in weights if w is not None and autocast_dtype(w, x.device.type) == w.dtype]  # of what is cast a copy is kept
    before = _versions(read)

    def check(_: Any) -> None:
        now = _versions(read)
        if now and now != before:
            raise RuntimeError(
                f"{style}: a weight was changed in place between a forward and its backward, which would read the new values; "
                "change weights, as an optimizer's step does, behind the backward, or make the forward again"
            )

    for node in nodes:
        node.register_prehook(check)  # type: ignore[union-attr]


class _Rowwise(_Linear):
    style = "fluxlike.nn.RowwiseParallel"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with leaving_out("gemm_rs", self.group):
            dim, shape = self._dim(x), (*x.shape[:-1], self.weight.shape[0])
            x = self._input(x, Shard(x.dim() - 1))
            weight, bias = self._part("weight", Shard(1)), self._part("bias", Replicate())
        y = row_forward(self.style, x, weight, bias, self.group, self.tp_mesh.size(), dim)
        _watch(self.style, x, [self], [y])
        return self._output(y, Shard(dim), shape)

"""What the nodes of a graph of inductor's are: a product, a reshape that keeps rows, a chunk of a whole."""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten, prims, c10d = torch.ops.aten, torch.ops.prims, torch.ops._c10d_functional
with_effects = torch.ops.higher_order.with_effects

RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)
PRODUCTS = (aten.mm.default, aten.addmm.default)
CAST = prims.convert_element_type.default
GATHER, SCATTER, WAIT = c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default, c10d.wait_tensor.default


class Left(Exception):
    """Why a collective stays as it is."""


@dataclasses.dataclass
class Product:
    """``left [M, K] @ right [K, N] + bias [N]``"""

    node: Node
    left: Node
    right: Node
    bias: Node | None


def value(node: Any) -> Any:
    """The fake tensor or symbolic size that a node stands for."""
    return node.meta["val"] if isinstance(node, Node) else node


def shape(node: Node) -> torch.Size:
    return value(node).shape


def equal(a: Any, b: Any) -> bool:
    """Whether two sizes are the same, for all that is known without a guard."""
    return statically_known_true(value(a) == value(b))


def same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))


def known(sizes: Sequence[Any]) -> list[int]:
    """Sizes as a reshape takes them: -1 stands for one that is not known."""
    found = [size if isinstance(size, int) else -1 for size in sizes]
    if found.count(-1) > 1:
        raise Left(f"more than one of the sizes {list(sizes)} is dynamic")
    return found


def arguments(node: Node) -> list[Any]:
    """All arguments of a call in order, also those that are given by name or not at all."""
    names = node.target._schema.arguments  # type: ignore[union-attr]
    return [*node.args, *(node.kwargs.get(a.name, a.default_value) for a in names[len(node.args) :])]


def in_group(collective: Node) -> tuple[list[Any], str]:
    """The arguments of a collective, and the name of its group, which is the last of them."""
    *given, group = arguments(collective)
    if isinstance(group, Node):
        raise Left("its group is an input of the graph")
    return given, group if isinstance(group, str) else group.group_name


def product_of(node: Any) -> Product | None:
    if not isinstance(node, Node) or node.target not in PRODUCTS:
        return None
    if node.target is aten.mm.default:
        left, right = arguments(node)
        return Product(node, left, right, None)
    bias, left, right, *factors = arguments(node)
    if factors != [1, 1] or value(bias).dim() != 1 or not equal(shape(bias)[0], shape(node)[1]):
        return None
    return Product(node, left, right, bias)


def unlike_ours(node: Any) -> bool:
    """Whether a node is a product that calls do not compute."""
    return isinstance(node, Node) and node.target in PRODUCTS and product_of(node) is None


def keeps_rows(node: Any) -> bool:
    """Whether a node is a reshape whose rows, of the last dimension, are those of its input."""
    if not isinstance(node, Node) or node.target not in RESHAPES:
        return False
    before, after = shape(arguments(node)[0]), shape(node)
    return len(before) > 0 and len(after) > 0 and equal(before[-1], after[-1])


def chunks(parts: Any, ranks: int) -> tuple[Node, int] | None:
    """The tensor and the dimension of which ``parts`` are the chunks of all ranks, in their order."""
    if not isinstance(parts, (list, tuple)) or len(parts) != ranks:
        return None
    found = [_chunk(part) for part in parts]
    if any(f is None for f in found):
        return None
    source, dim, _ = found[0]  # type: ignore[misc]
    part = shape(parts[0])[dim]
    for i, (of, along, start) in enumerate(found):  # type: ignore[misc]
        if of is not source or along != dim or not equal(start, part * i) or not equal(shape(parts[i])[dim], part):
            return None
    return (source, dim) if equal(shape(source)[dim], part * ranks) else None


def _chunk(part: Any) -> tuple[Any, Any, Any] | None:
    """Of what a node is a part, along which dimension, and where it begins."""
    target = getattr(part, "target", None)
    if target == operator.getitem and part.args[0].target in SPLITS:
        split, index = part.args
        source, _, dim = arguments(split)
        dim = dim % value(source).dim()
        return source, dim, sum(t.shape[dim] for t in value(split)[:index])
    if target is aten.slice.Tensor:
        source, dim, start, _, step = arguments(part)
        return (source, dim % value(source).dim(), 0 if start is None else value(start)) if step == 1 else None
    return None


def is_mutable(node: Node) -> bool:
    """Whether a node writes to what it takes."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def check_writes(first: Node, last: Node) -> None:
    """Raises Left if something is written to in place meanwhile: a call reads at one time what the graph reads at several."""
    node = first
    while node is not last:
        if is_mutable(node):
            raise Left(f"{node} writes in place between {first} and {last}")
        node = node.next

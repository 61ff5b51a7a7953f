"""What the nodes of a graph of inductor's are: a product, a reshape that keeps rows, a chunk of a whole."""

import dataclasses
import itertools
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
PAD = aten.constant_pad_nd.default
CAST = prims.convert_element_type.default
GATHER, SCATTER, WAIT = c10d.all_gather_into_tensor.default, c10d.reduce_scatter_tensor.default, c10d.wait_tensor.default


class Left(Exception):
    """Why a collective stays as it is."""


@dataclasses.dataclass
class Product:
    """``left [M, K] @ right [K, N] + bias [N]``

    ``node`` is what it results in, ``product`` the mm or addmm. Between them and the sides are pads and slices where inductor
    multiplies in sizes that suit the hardware; ``nodes`` are all of them, from the result to the pads.
    """

    node: Node
    product: Node
    left: Node
    right: Node
    bias: Node | None
    nodes: list[Node]


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
    """The product whose result a node is, also one that inductor has padded.

    Inductor pads where a measurement says so, and each rank measures for itself. Ranks that took only a product as it was
    written would not all make the same calls.
    """
    slices: list[Node] = []
    while isinstance(node, Node) and (begun := begins(node)) is not None:
        slices.append(node)
        node = begun
    if not isinstance(node, Node) or node.target not in PRODUCTS:
        return None
    bias = None
    if node.target is aten.mm.default:
        left, right = arguments(node)
    else:
        bias, left, right, *factors = arguments(node)
        if factors != [1, 1] or value(bias).dim() != 1 or not equal(shape(bias)[0], shape(node)[1]):
            return None
    if not slices and not any(unpadded(n) for n in (left, right)):
        return Product(node, node, left, right, bias, [node])
    return _padded(slices, node, left, right, bias)


def _padded(slices: list[Node], node: Node, left: Node, right: Node, bias: Node | None) -> Product | None:
    """A product of padded sides, of whose result the ``slices``, the last one first, leave what the sides without pads have."""
    result = slices[0] if slices else node
    bare_left, bare_right, bare_bias = unpadded(left) or left, unpadded(right) or right, bias
    if bias is not None and bias.target is aten.cat.default:  # so inductor pads a bias; what is behind it goes with the slices
        bare_bias = arguments(bias)[0][0]
    rows, columns = shape(bare_left)[0], shape(bare_right)[1]
    if (
        not equal(shape(bare_left)[1], shape(bare_right)[0])
        or not same(shape(result), [rows, columns])
        or (bare_bias is not None and not same(shape(bare_bias), [columns]))
    ):
        return None if slices else Product(node, node, left, right, bias, [node])  # the program's own pads, if any
    if any(list(n.users) != [after] for after, n in itertools.pairwise([*slices, node])):
        return None
    pads = [n for n, bare in ((left, bare_left), (right, bare_right), (bias, bare_bias)) if n is not None and n is not bare]
    return Product(result, node, bare_left, bare_right, bare_bias, [*slices, node, *dict.fromkeys(pads)])


def results(product: Node) -> list[Node]:
    """A product and, one after the other, the slices that leave its first rows or columns and are all that takes it."""
    found = [product]
    while len(found[-1].users) == 1 and begins(user := next(iter(found[-1].users))) is not None:
        found.append(user)
    return found


def begins(node: Node) -> Node | None:
    """Of what a node is the first rows or columns."""
    chunk = _chunk(node) if node.target is aten.slice.Tensor else None
    return chunk[0] if chunk is not None and equal(chunk[2], 0) else None


def unpadded(node: Node) -> Node | None:
    """What a node has with zeros behind its rows and columns."""
    if node.target is not PAD:
        return None
    source, pads, fill = arguments(node)
    return source if fill == 0 and all(equal(n, 0) for n in pads[::2]) else None


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
        return (source, dim % value(source).dim(), value(start) or 0) if step == 1 else None
    return None


def check_writes(first: Node, last: Node) -> None:
    """Raises Left if something is written to in place meanwhile: a call reads at one time what the graph reads at several."""
    node = first
    while node is not last:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            raise Left(f"{node} writes in place between {first} and {last}")
        node = node.next

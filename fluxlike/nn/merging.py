"""What a program gathers or scatters several times over, in a graph of inductor's: waited for, and made whole, once.

`rewrite` then finds one collective with one whole, as it would have been written.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch.fx import Node

from .patterns import GATHER, SCATTER, SPLITS, WAIT, aten, is_mutable, keeps_rows


def wait_once(graph: torch.fx.Graph) -> None:
    """One wait for what a collective brings, and one whole of it, where there are several: torch 2.14 has those of each use.

    Not of what the program gets, which may write to one and read another. Inductor says what that is, of a forward.
    """
    *_, output = graph.nodes
    returned = output.args[0]
    shown = [returned[i] for i in output.meta.get("user_visible_output_idxs", ())] or output.all_input_nodes
    got = {_storage(node) for node in shown}
    written = {_storage(given) for node in graph.nodes if is_mutable(node) for given in node.all_input_nodes}
    for collective in [node for node in graph.nodes if node.target in (GATHER, SCATTER)]:
        waits = _in_order(collective, lambda user: user.target is WAIT)
        for wait in waits[1:]:
            wait.replace_all_uses_with(waits[0])
            graph.erase_node(wait)
        if len(waits) > 1:
            _merge_alike(waits[0], got, written)


def _merge_alike(source: Node, got: set[int], written: set[int]) -> None:
    """Of what is made of a tensor by splits, concatenation and reshapes that keep rows, each thing once.

    Not two wholes whose memory the program gets, both of it, nor any that is written to.
    """
    kept: dict[tuple[Any, ...], Node] = {}
    for user in _in_order(source, lambda user: user.target in (*SPLITS, operator.getitem, aten.cat.default) or keeps_rows(user)):
        first = kept.setdefault((user.target, str(user.args), str(user.kwargs)), user)
        if first is user:
            continue
        if user.target is aten.cat.default:
            both = {_storage(user), _storage(first)}
            if both & written or both <= got:
                continue
            got |= both if both & got else set()
        user.replace_all_uses_with(first)
        source.graph.erase_node(user)
    for user in kept.values():
        _merge_alike(user, got, written)


def _storage(node: Node) -> int:
    """Which memory a tensor has; 0 of what is none."""
    tensor = node.meta.get("val")
    return tensor.untyped_storage()._cdata if isinstance(tensor, torch.Tensor) else 0


def _in_order(node: Node, which: Callable[[Node], bool]) -> list[Node]:
    """Users, as they stand in the graph."""
    users = {user for user in node.users if which(user)}
    return [user for user in node.graph.nodes if user in users] if len(users) > 1 else list(users)

"""What `all_reduce` over trees needs: a plan on which the ranks agree, memory, launches.

Read with `kernels/trees.py`, which holds the protocol, and docs/topology.md.
"""

import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..kernels.trees import all_reduce_trees_kernel
from ..runtime import env, world
from ..runtime.control import ControlGroup
from ..topology import LinkMatrix, Tree, current, plan_trees
from .exchange import BULK, MOST, OF_BULK, OPS, EpochContext
from .group import Prepared, one_node
from .keeping import kept

#: Bytes of payload that one launch takes at most: each rank has room for them and, in fp32, for those of its children.
PIECE = 4 << 20
#: With what the key of the context begins that `keeping.kept` has.
KEPT_AS = "all_reduce over trees"


class TreeContext(EpochContext):
    """The trees of a group, and memory for what goes up and down them.

    ``blocks``: those that it has room for. ``plans``: one tree for small arrays, and one for each rank for large ones.
    """

    def __init__(self, control: ControlGroup, blocks: int) -> None:
        """Collective. Raises ValueError or RuntimeError on all ranks if one has no plan or they differ."""
        self.blocks = blocks
        one_node("all_reduce", control)  # trees are planned for the links of one
        self.plans, self.bound = agreed(control)
        tables = [[children_of(tree, control.size) for tree in plan] for plan in self.plans]
        #: The most children that a rank has in a tree.
        self.most = max(len(each) for plan in tables for tree in plan for each in tree)
        regions = {"flags": (self.most + 1) * blocks * 8, "data": (2 * self.most + 1) * blocks * BULK}
        self._words = [self._steps(plan, control.rank) for plan in tables]
        super().__init__("all_reduce", control, regions)
        self.made("all_reduce over trees")

    def take(self) -> None:
        super().take()
        tables = [partial(torch.tensor, words, dtype=torch.int64, device=self.device) for words in self._words]
        self.steps = [self.world.executor.lasting(table) for table in tables]
        up = 2 * self.most * self.blocks * BULK
        self.partials, self.results = self.data[:up].view(torch.float32), self.data[up:]

    def _steps(self, plan: list[list[list[int]]], me: int) -> list[int]:
        """What rank ``me`` does in each tree; see the kernel."""
        words: list[int] = []
        for children in plan:
            parent = next((rank for rank, each in enumerate(children) if me in each), -1)
            mine = children[me]
            at_parent = children[parent].index(me) if parent >= 0 else 0
            words += [parent, at_parent, len(mine), *mine, *[-1] * (self.most - len(mine))]
        return words

    def prepared(
        self, x: torch.Tensor, y: torch.Tensor, several: bool, blocks: int, op: str, vector: int, tensors: int,
        table: torch.Tensor | None,
    ) -> Prepared:  # fmt: skip
        """A launch over one tree, or over ``several``; it takes tensors in place of x and y, and of a list a table."""
        constants = dict(R=self.size, C=self.most, OP=OPS[op], B=BULK // x.element_size(), MANY=table is not None)
        constants |= dict(VEC=vector, MOST=MOST, maxnreg=OF_BULK.registers)
        args: tuple[Any, ...] = (x, y, self.ctl if table is None else table, self.steps[several], self.partials)
        args += (self.results.view(x.dtype), self.flags, self.epochs, self.ctl)
        args += (len(self.plans[several]), tensors, x.numel(), blocks, self.blocks, self.rank)
        half = max(1, min(MOST, self.world.executor.programs) // 2)
        return self.prepare(all_reduce_trees_kernel, 2 * min(half, blocks), args, constants, OF_BULK, (0, 1))


def context(control: ControlGroup, blocks: int, said: dict[str, Any]) -> TreeContext:
    """The context of a group, with room for so many blocks; see `kept`. ``said``: of the call's record."""

    def make(wanted: dict[str, int]) -> TreeContext:
        control.agree("fluxlike.all_reduce", [f"{name}={value}" for name, value in said.items()])
        return TreeContext(control, **wanted)

    return kept((KEPT_AS, control.name), control, {"blocks": blocks}, make, 1 << 31)


def agreed(control: ControlGroup) -> tuple[tuple[list[Tree], list[Tree]], int]:
    """One tree, and one for each rank; and elements up to which one is used. Collective; the same on all ranks, or an error."""
    # a named topology has the ranks as they are in the world, a detected one as their GPUs are
    named, bound, this = env.get("FLUXLIKE_TOPOLOGY"), 0, world.current()
    gpus = control.gather(None if named else this.device.index, "finding the GPUs of a group")
    if None in gpus:
        gpus = this.indices(control)
    plans: tuple[list[Tree], list[Tree]] = [], []
    error: Exception | None = None
    try:
        bound = env.tree_array_bound()
        plans = planned(control.size, gpus)
    except (ValueError, RuntimeError) as problem:
        error = problem
    shown = dict(FLUXLIKE_TOPOLOGY=named, trees=f"{zlib.crc32(repr(plans).encode()):08x}", FLUXLIKE_TREE_ARRAY_BOUND=bound)
    control.agree("all_reduce over trees", shown, error)
    return plans, bound


def planned(size: int, gpus: Sequence[int]) -> tuple[list[Tree], list[Tree]]:
    """One tree, and one for each of ``size`` ranks, which are the GPUs ``gpus`` of the topology, if it has those."""
    if size == 1:
        return [Tree(0, [], [])], [Tree(0, [], [])]
    matrix: LinkMatrix = current()
    if len(set(gpus)) == size and max(gpus) < len(matrix):  # ranks that share a GPU take the machine as it is
        # errors of the planner count the GPUs of the group from 0
        matrix = replace(matrix.part(gpus), name=f"{matrix.name or 'links'}, its GPUs {list(gpus)} as 0 to {size - 1}")
    if len(matrix) != size:
        matrix = current(size)  # which says what is wrong
    return plan_trees(matrix, 1), plan_trees(matrix)


def children_of(tree: Tree, ranks: int) -> list[list[int]]:
    """Of each rank its children, in the order of a broadcast."""
    return [[child for parent, child in tree.edges if parent == rank] for rank in range(ranks)]

"""How GPUs are linked, and trees planned for that. See docs/topology.md. Importing it needs the standard library only."""

from .matrix import LinkMatrix, current, load
from .plan import plan_trees, trees_for
from .tree import Cost, Tree, measure

__all__ = ["Cost", "LinkMatrix", "Tree", "current", "load", "measure", "plan_trees", "trees_for"]

"""AsyncTP: a pass of torch.compile that puts a tensor-parallel model on ag_gemm and gemm_rs, without a change to the model."""

import dataclasses
import hashlib
import logging
from pathlib import Path
from typing import Any

import torch.fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from .. import __version__
from ..ops import library
from . import rewrite

log = logging.getLogger("fluxlike")


@dataclasses.dataclass
class GraphReport:
    """What was found in one graph, and what became of it."""

    kind: str
    gathers: int = 0
    scatters: int = 0
    replaced_gathers: int = 0
    replaced_scatters: int = 0
    #: Products that are computed by the calls put in.
    products: int = 0
    #: Products that were in the graph.
    products_before: int = 0
    #: For each collective that stays: its name in the graph, and why.
    left: dict[str, str] = dataclasses.field(default_factory=dict)
    beside: bool = False

    @property
    def found(self) -> int:
        return self.gathers + self.scatters

    @property
    def replaced(self) -> int:
        return self.replaced_gathers + self.replaced_scatters

    def __str__(self) -> str:
        lines = [
            f"{self.kind}: {self.replaced_gathers} of {self.gathers} all_gather and {self.replaced_scatters} of {self.scatters} "
            f"reduce_scatter replaced, with {self.products} of {self.products_before} products"
        ]
        return "\n".join(lines + [f"  {name} stays: {why}" for name, why in self.left.items()])


class AsyncTP(CustomGraphPass):
    def __init__(self) -> None:
        self.graphs: list[GraphReport] = []

    @property
    def options(self) -> dict[str, Any]:
        return {"post_grad_custom_pre_pass": self}

    def __call__(self, graph: torch.fx.Graph) -> None:
        report = GraphReport(_kind(graph))
        nodes = list(graph.nodes)
        report.products_before = sum(n.target in rewrite.PRODUCTS for n in nodes)
        self.graphs.append(report)
        gathers = [n for n in nodes if n.target is rewrite.GATHER]
        scatters = [n for n in nodes if n.target is rewrite.SCATTER]
        report.gathers, report.scatters = len(gathers), len(scatters)
        if not report.found:
            return
        work = rewrite.Rewrite(graph)
        for node in gathers + scatters:
            gather = node.target is rewrite.GATHER
            name = node.name
            try:
                report.products += (rewrite.replace_gather if gather else rewrite.replace_scatter)(work, node)
            except rewrite.Left as left:
                report.left[name] = str(left)
                report.beside |= left.beside
            else:
                report.replaced_gathers += gather
                report.replaced_scatters += not gather
        if report.replaced:
            work.thread()
            graph.lint()

    def uuid(self) -> Any:
        digest = hashlib.sha256(__version__.encode())
        for module in (__file__, rewrite.__file__, library.__file__):
            digest.update(Path(module).read_bytes())
        return digest.digest()


def _kind(graph: torch.fx.Graph) -> str:
    names = [str(n.target) for n in graph.nodes if n.op == "placeholder"]
    if any(name.startswith("tangents") for name in names):
        return "backward"
    return "forward" if any(name.startswith("primals") for name in names) else "inference"

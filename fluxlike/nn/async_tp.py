"""AsyncTP: a pass of torch.compile that puts a tensor-parallel model on ag_gemm and gemm_rs, without a change to the model.

Inductor calls the pass on the graph of the forward and on that of the backward, each after autograd has made it. So the calls that
are put in need no gradients of their own, and what the forward keeps for the backward has been settled before: it is the gathered
input, as without the pass, and ag_gemm returns it.

Other ranks wait for each call. The pass comes after the point where torch.compile threads a token through calls with an effect on
others, so it threads the token itself, as torch would have: `rewrite.Rewrite.thread`. For inductor each call then depends on the
one before it; none is dropped, merged or moved past another, whatever inductor does to the order of the rest. All ranks compile
the same model, so they make the same calls in the same order; if they do not, the calls themselves find out and raise.
"""

import dataclasses
import hashlib
import logging
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist
import torch.fx
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

from .. import __version__
from ..ops import library
from ..runtime import world
from . import merging, patterns, rewrite

log = logging.getLogger("fluxlike")

#: Devices for which inductor pads products.
PADDED_ON = ("cuda", "xpu")


@dataclasses.dataclass
class GraphReport:
    """What was found in one graph, and what became of it.

    ``kind``: "forward", "backward", or "inference", without gradients. ``gathers``, ``scatters``: all_gather and
    reduce_scatter found, and replaced. ``products``: matrix products found, and computed by the calls put in. ``left``: why each
    collective stays that does, by its name in the graph.
    """

    kind: str
    gathers: int
    scatters: int
    products: int
    replaced_gathers: int = 0
    replaced_scatters: int = 0
    replaced_products: int = 0
    left: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def found(self) -> int:
        return self.gathers + self.scatters

    @property
    def replaced(self) -> int:
        return self.replaced_gathers + self.replaced_scatters

    def __str__(self) -> str:
        lines = [
            f"{self.kind}: {self.replaced_gathers} of {self.gathers} all_gather and {self.replaced_scatters} of {self.scatters} "
            f"reduce_scatter replaced, with {self.replaced_products} of {self.products} products"
        ]
        return "\n".join(lines + [f"    {name} stays: {why}" for name, why in self.left.items()])


class AsyncTP(CustomGraphPass):
    """Finds all_gather → products and products → reduce_scatter in compiled graphs, and replaces them by ag_gemm and gemm_rs.

    ::

        async_tp = fluxlike.nn.AsyncTP(even=True)
        model = torch.compile(model, options=async_tp.options)
        model(x).sum().backward()
        print(async_tp)                 # for each graph: what was found, what replaced, and why not the rest

    The model is any whose compiled graphs have functional collectives of a group that fluxlike.init spans, as those have that
    torch's ColwiseParallel, RowwiseParallel and SequenceParallel make. With further options: ``options={**async_tp.options, …}``.
    Where the call of torch.compile is not yours, set ``torch._inductor.config.post_grad_custom_pre_pass`` to the pass, and
    ``torch._inductor.config.shape_padding`` to False, as the options do: on GPUs inductor pads products of odd sizes where each
    rank's own measurement says that it is faster, a padded one is not found, and ranks would come to make different calls.

    Args:
        group: the tensor-parallel group; collectives of others stay. If None, those of any group whose ranks are all among those
            of fluxlike.init, so name it where those of data parallelism are, too.
        even: whether all ranks hold as many features of every layer, as they do where the ranks divide them. Then calls say K
            (gemm_rs) and N (ag_gemm) of all ranks, and each is made as suits these; else as suits the first one on the group. A
            graph does not tell. Where it is not so, the ranks raise CallMismatch if a kernel of fluxlike multiplies; where torch
            does, it makes no difference.

    A graph with products, or collectives, in which nothing was replaced is warned of, through the logger "fluxlike". What
    inductor finds in its cache of graphs is not compiled anew, so there is no report of it: ``cached`` and ``print`` say that there
    were such graphs. The pass is part of the key.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, even: bool = False) -> None:
        library.name_of(group)  # raises for what is no group
        self.group, self.even = group, even
        #: A report for each graph with collectives or products, in the order in which they were compiled.
        self.graphs: list[GraphReport] = []
        self._hits_before: int | None = None
        self._warned = False

    @property
    def options(self) -> dict[str, Any]:
        """For ``torch.compile(…, options=…)``."""
        return {"post_grad_custom_pre_pass": self, "shape_padding": False}

    @property
    def found(self) -> int:
        """Collectives found, in all graphs that were compiled, not `cached`."""
        return sum(report.found for report in self.graphs)

    @property
    def replaced(self) -> int:
        """Collectives replaced, in all graphs that were compiled, not `cached`."""
        return sum(report.replaced for report in self.graphs)

    @property
    def cached(self) -> bool:
        """Whether inductor has taken graphs from its caches since it first asked for the key of this pass.

        Some of them may have been of this model, with what an earlier pass put in; nobody counts them.
        """
        return self._hits_before is not None and _hits() != self._hits_before

    def __str__(self) -> str:
        lines = [str(report) for report in self.graphs]
        if self.cached:
            lines.append(
                "graphs came from inductor's cache, with what this pass made of them when they were compiled, which is not known "
                "here; TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 compiles them anew"
            )
        return "\n".join(lines) or "no graph has been compiled with this pass"

    def __call__(self, graph: torch.fx.Graph) -> None:
        gathers, scatters, products = (
            [n for n in graph.nodes if n.target in targets]
            for targets in ([patterns.GATHER], [patterns.SCATTER], patterns.PRODUCTS)
        )
        report = GraphReport(_kind(graph), len(gathers), len(scatters), len(products))
        if gathers or scatters:
            self._warn_of_pads(gathers + scatters)
            merging.wait_once(graph)
            work = rewrite.Rewrite(graph, self.even)
            report.replaced_gathers = self._replace(work, gathers, report)
            report.replaced_scatters = self._replace(work, scatters, report)
            if report.replaced:
                work.thread()
                graph.lint()
        self._tell(report)

    def _warn_of_pads(self, collectives: list[torch.fx.Node]) -> None:
        on_gpus = any(patterns.value(node).device.type in PADDED_ON for node in collectives)
        if on_gpus and config.shape_padding and not self._warned:
            self._warned = True
            log.warning(
                "AsyncTP: inductor may pad products, each rank by a measurement of its own, and collectives beside a padded one "
                "stay: ranks may come to make different calls. Set torch._inductor.config.shape_padding = False, or compile with "
                "options=async_tp.options"
            )

    def _replace(self, work: rewrite.Rewrite, collectives: list[torch.fx.Node], report: GraphReport) -> int:
        replaced = 0
        for node in collectives:
            name = node.name
            try:
                report.replaced_products += work.replace(node, library.name_of(self.group) or None)
                replaced += 1
            except patterns.Left as left:
                report.left[name] = str(left)
        return replaced

    def _tell(self, report: GraphReport) -> None:
        if not report.found and not report.products:
            return
        log.info("AsyncTP: %s", report)
        # of graphs without collectives only until one had, or may have had, some: a model may have parts that are not parallel
        if not report.replaced and (report.found or not (self.replaced or self.cached)):
            why = f"\n{report}" if report.found else ": no all_gather and no reduce_scatter is in it; is the model sharded?"
            log.warning("AsyncTP: nothing was replaced in the graph of %s with %d products%s", report.kind, report.products, why)
        self.graphs.append(report)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself: torch copies its settings, whatever they hold, for each graph, and a group cannot be copied."""
        return self

    def uuid(self) -> bytes:
        """For inductor's cache: changes with the library, what the pass is made of, its arguments and the groups."""
        if self._hits_before is None:
            self._hits_before = _hits()
        ranks = [world.current().control.ranks] if world.is_initialized() else []
        digest = hashlib.sha256(f"{__version__} {library.name_of(self.group)} {self.even} {ranks} {_groups(self.group)}".encode())
        for module in (__file__, merging.__file__, patterns.__file__, rewrite.__file__, library.__file__):
            digest.update(Path(module).read_bytes())
        return digest.digest()


def _groups(group: dist.ProcessGroup | None) -> list[tuple[str, list[int]]]:
    """Names and ranks: of ``group``, or of all that this rank is in. A graph has names only, which other programs may have, too."""
    known = [group] if group is not None else dist.distributed_c10d._world.pg_map if dist.is_initialized() else []
    return sorted((one.group_name, dist.get_process_group_ranks(one)) for one in known)


def _hits() -> int:
    """Graphs that this process has taken from inductor's caches."""
    return counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]


def _kind(graph: torch.fx.Graph) -> str:
    """What torch names the inputs after."""
    names = [str(n.target) for n in graph.nodes if n.op == "placeholder"]
    if any(name.startswith("tangents") for name in names):
        return "backward"
    return "forward" if any(name.startswith("primals") for name in names) else "inference"

"""The arguments of `bench`: what it measures, by which methods, how."""

import argparse
from collections.abc import Sequence

import torch

from ..ops.context import check_arguments
from . import bench_collectives, command, once
from .bench_bursts import Bursts
from .bench_problems import PROBLEMS, GemmAR, Problem
from .bench_reduce import AllReduce
from .bench_sparse import SparseAllReduce

KINDS: dict[str, type[Problem]] = {
    **PROBLEMS, "gemm_ar": GemmAR, "all_reduce": AllReduce, **bench_collectives.KINDS, "sparse_all_reduce": SparseAllReduce
}  # fmt: skip
#: Suites whose shapes are of a kind of their own.
OTHERS: dict[tuple[str, str | None], type[Problem]] = {("all_reduce", suite): Bursts for suite in Bursts.SUITES}
ROUNDS = 7
GRAPH_CALLS = 10


def kind_of(op: str, suite: str | None) -> type[Problem]:
    """What an operation measures in a suite."""
    return OTHERS.get((op, suite), KINDS[op])


def methods(kind: type[Problem], cuda: bool) -> tuple[str, ...]:
    """All that an operation is computed with on a machine with GPUs, or without."""
    return (*(kind.ON_GPUS if cuda else kind.ON_CPUS), *kind.OURS)


def more(kind: type[Problem] | None, cuda: bool) -> str:
    """For the help: what else may be named, in brackets."""
    if kind is None:
        return ""
    names = [name for name in (*kind.ON_REQUEST, *kind.PEERS_ON_REQUEST) if name not in methods(kind, cuda)]
    return f"[,{','.join(names)}]" if names else ""


def parse(argv: Sequence[str] | None, cuda: bool) -> argparse.Namespace:
    """The arguments, with ``modes``, ``methods``, ``shapes`` and ``iters`` made ready; ends the process if they are no use."""
    parser = command.Parser(
        prog="python -m fluxlike bench",
        description="Compares fluxlike with cuBLAS alone, torch + NCCL and torch's async TP. Start it with scripts/launch.sh.",
        epilog="Exit status: 1 if a result is wrong, a schedule of fluxlike failed, nothing was measured or a file could not be "
        "made after all; 2 for wrong arguments, such as a path where no file can be made, records that cannot be read, ranks on "
        "nodes that the operation or a method is not for, or where the package rich is missing. The protocol is in the module's "
        "docstring.",
    )
    parser.add_argument("op", choices=list(KINDS))
    suites = dict.fromkeys(name for kind in (*KINDS.values(), *OTHERS.values()) for name in kind.SUITES)
    written = "MxNxK,MxNxK… of the whole problem; of all_reduce, reduce_scatter, all_gather, reduce and broadcast bytes, as 16K,1M"
    written += "; of sparse_all_reduce NxDxk[:zipf],… (rows, columns, ids of a rank)"
    command.add_shapes(parser, suites=suites, written=written)
    parser.add_argument("--eager", action="store_true", help="time plain calls (the default, unless --graph is given)")
    parser.add_argument("--graph", action="store_true", help=f"time calls inside a CUDA graph of {GRAPH_CALLS}")
    parser.add_argument("--rounds", type=int, help=f"timings of each method ({ROUNDS}, of long calls what fills 2 s)")
    parser.add_argument("--iters", default="auto", help="calls, or graph replays, of one timing (auto: about 20 ms)")
    kinds: dict[str, type[Problem]] = {**KINDS, "all_reduce --suite resnet50": Bursts}
    several = "; ".join(f"{op}: {','.join(methods(kind, cuda))}{more(KINDS.get(op), cuda)}" for op, kind in kinds.items())
    parser.add_argument("--methods", help=f"some of {several} (all but those in brackets)")
    parser.add_argument("--out", metavar="DIR", help="write JSON and PNG there")
    records = "measure nothing: draw time over the number of ranks, from records of several runs, into --out"
    parser.add_argument("--plot-records", nargs="+", metavar="JSON", help=records)
    command.add_dtype(parser)
    parser.add_argument("--seconds", type=command.seconds, help="begin no new shape after so many seconds")
    asked = parser.parse_args(argv)
    if asked.plot_records:
        of_runs = ("shapes", "suite", "eager", "graph", "rounds", "iters", "methods", "dtype", "seconds")
        given = [f"--{name}" for name in of_runs if getattr(asked, name) != parser.get_default(name)]
        if given:
            parser.error(f"--plot-records measures nothing, so it takes no {', '.join(given)}; leave out the one or the others")
        command.writable(parser, asked.out)
        return asked
    if asked.rounds is not None and asked.rounds < 1:
        parser.error(f"--rounds {asked.rounds} is below 1; give at least one round")
    if asked.iters != "auto" and not (asked.iters.isdecimal() and int(asked.iters) > 0):
        parser.error(f"--iters {asked.iters} is neither auto nor a whole number above 0")
    asked.iters = None if asked.iters == "auto" else int(asked.iters)
    if asked.graph and not cuda:
        parser.error("--graph needs GPUs: the CPU heap has no CUDA graphs; leave it out")
    asked.modes = [mode for mode in ("eager", "graph") if getattr(asked, mode)] or ["eager"]
    kind = kind_of(asked.op, asked.suite)
    command.choose_suite(parser, asked, cuda, kind)
    choose_methods(parser, asked, cuda, kind)
    command.writable(parser, asked.out)
    return asked


def choose_methods(parser: argparse.ArgumentParser, asked: argparse.Namespace, cuda: bool, kind: type[Problem]) -> None:
    """``asked.methods`` from text to those that are measured, and ``left_out``; ends the process if these ranks cannot do them."""
    usual = methods(kind, cuda)
    possible = tuple(dict.fromkeys((*usual, *kind.ON_REQUEST, *kind.PEERS_ON_REQUEST)))
    names = [name.strip() for name in asked.methods.split(",")] if asked.methods is not None else list(usual)
    unknown = [name for name in names if name not in possible]
    if unknown:
        elsewhere = "is for machines without GPUs; give some" if cuda else "needs a GPU; give some"
        why = elsewhere if all(name in methods(kind, not cuda) for name in unknown) else "is not one"
        parser.error(f"--methods: {', '.join(map(repr, unknown))} {why} of {', '.join(possible)}, the methods of this machine")
    between = [name for name in names if name in kind.BETWEEN_NODES]
    if asked.op not in PROBLEMS:
        once.on_one_node(parser, f"bench {asked.op}")
    elif between and once.nodes(parser) == 1:
        split = "start it over --nnodes, or with FLUXLIKE_VIRTUAL_NODES=2, which splits those of a host"
        parser.error(f"--methods: {', '.join(map(repr, between))} is for ranks on several nodes, and these are on one; {split}")
    asked.left_out = {}
    if asked.op in PROBLEMS:  # whose methods are schedules
        errors = {name: check_arguments(asked.op, {}, getattr(torch, asked.dtype), name) for name in names if name in kind.OURS}
        asked.left_out = {name: str(error) for name, error in errors.items() if error is not None}
    asked.methods = [name for name in possible if name in names and name not in asked.left_out]
    if not asked.methods:
        parser.error(f"--methods: {'; '.join(asked.left_out.values())}")

"""Nodes: ranks that can map each other's memory, and ranks that reach each other over a network only.

A node is known by what decides whether memory can be shared: the boot of the machine, the namespace of its processes, and the
torchrun agent that started them. FLUXLIKE_VIRTUAL_NODES splits the ranks of each node further, so that what runs between nodes can
be run, and tested, on one host.
"""

import os
from pathlib import Path

from . import env
from .control import ControlGroup
from .wording import counted


def _identity() -> str:
    """What ranks have in common that can share memory."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino} {os.environ.get('GROUP_RANK', '0')}"


def find(control: ControlGroup) -> list[int]:
    """The node of each rank, numbered in the order of their first ranks. Collective; ValueError on all ranks together."""
    error, parts = None, 1
    try:
        parts = env.virtual_nodes()
    except ValueError as problem:
        error = problem
    control.agree("fluxlike.init: FLUXLIKE_VIRTUAL_NODES", parts, error)
    launcher = os.environ.get("LOCAL_WORLD_SIZE", ""), os.environ.get("WORLD_SIZE", "")
    said = control.gather((_identity(), *launcher), "fluxlike.init: nodes")
    identities = [identity for identity, _, _ in said]
    for rank, (identity, local, world) in zip(control.ranks, said, strict=True):
        compare(rank, local, identities.count(identity), world == str(len(said)))
    return number(identities, parts)


def compare(rank: int, local: str, found: int, everyone: bool) -> None:
    """ValueError if a rank's launcher says that other ranks are on its host than the ``found`` that can share memory there, or says
    no number.

    ``local``: its LOCAL_WORLD_SIZE, "" if not set. ``everyone``: all ranks of the launcher are counted; of some there may be less.
    """
    if local and not local.isdecimal():
        raise ValueError(
            f"fluxlike.init: LOCAL_WORLD_SIZE={local!r} on rank {rank} is not a whole number; start all ranks of a host by one "
            "torchrun, which sets it, or unset it"
        )
    if local and not (found == int(local) if everyone else found <= int(local)):
        raise ValueError(
            f"fluxlike.init: LOCAL_WORLD_SIZE={local!r} on rank {rank}, which shares memory with {counted(found - 1, 'other rank')}"
            f"; {'that makes another number' if everyone else 'those are more'}: start all ranks of a host by one torchrun, in one "
            "process namespace, or unset LOCAL_WORLD_SIZE where it is left from another launcher"
        )


def number(identities: list[str], parts: int) -> list[int]:
    """Numbers of the nodes of ranks with these identities, each split into ``parts`` of consecutive ranks."""
    numbers: dict[tuple[str, int], int] = {}
    found = []
    for rank, identity in enumerate(identities):
        together = identities.count(identity)
        if together % parts:
            raise ValueError(
                f"FLUXLIKE_VIRTUAL_NODES={parts} does not divide the {together} ranks of a host; start a multiple of it, or unset "
                "it"
            )
        place = identities[:rank].count(identity) // (together // parts)
        found.append(numbers.setdefault((identity, place), len(numbers)))
    return found


def of_group(node_of: list[int], ranks: list[int]) -> list[list[int]]:
    """The places in a group of the ranks of each node; ``node_of``: the node of each of its ``ranks``.

    ValueError unless the ranks of a node follow each other and all nodes have as many.
    """
    order = list(dict.fromkeys(node_of))
    places = [[place for place, node in enumerate(node_of) if node == which] for which in order]
    if node_of != [node for node in order for _ in places[0]]:
        raise ValueError(
            f"a group of ranks {ranks} has ranks of nodes {node_of}; a group that spans nodes must have as many ranks on each, one "
            "node after the other"
        )
    return places

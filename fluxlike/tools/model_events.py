"""Calls of gemm_rs and ag_gemm on machines that are not there, as discrete events: what `python -m fluxlike model` computes with.

A call is tiles, copies and messages, in the orders in which the library makes them: tiles as `kernels.tiles` deals them to the
programs of a persistent kernel, copies as `ops.gemm_rs` and `ops.ag_gemm` queue them on the side stream, the products of nodes and
their messages as `ops.nodes` has them. What each takes is `ops.cost`'s, which was fitted to calls on H200s.

* A `Signal` is a word that somebody waits for. A `Wire` moves one thing after the other, each when it is ready: NVLink and the
  network have one for each GPU and direction. `Programs` compute tiles, each program its own in turn.
* All nodes do the same at the same time, so one is simulated. So do all ranks of a node, and one of them is, unless the order of
  the copies tells them apart (`flat` over several nodes). What a rank receives is what its like on another node sends.
* *flat*: one group of all ranks. Each rank sends every other one its chunk, to those on other nodes over the network, which works
  beside NVLink. So each row of partial sums, and each shard, crosses the network once for every rank of a node.
* *hierarchical*: `ops.nodes`. Once for every node.

Not in it: the last wave of tiles as all programs share it (`ops.waves`), of which there is no record of several GPUs, but for what
`ops.cost` has of it where a call is not simulated; networks that are shared or busy, what messages cost the host beyond
`Cluster.message`, whether memory suffices.
"""

import heapq
import importlib.util
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from types import ModuleType

import torch

from ..kernels.tiles import cdiv, chunk_rows, py_own_tile, py_remote_tile
from ..ops import choice, cost, exchange
from ..ops.choice import Choice, Problem

OPS, SCHEDULES = ("gemm_rs", "ag_gemm"), ("flat", "hierarchical")
#: Of the rate of a copy, what NCCL's collectives reach, and seconds of one without bytes. By hand to torch − gemm of the records.
COLLECTIVE, COLLECTIVE_START = 0.75, 30e-6
#: Seconds of a copy_engine call beside its tiles and copies. gemm_rs: less than `cost.COPIES`, where that has the signals, which
#: are simulated here, each given a tile late, as it was when the records were made (`kernels.gemm_rs` gives them sooner since); by
#: hand to the records.
SIDE_STREAM = {"gemm_rs": 30e-6, "ag_gemm": cost.COPIES}
#: Seconds of a look at a message that is there, of a kernel that looks at all of a call: an assumption.
LOOK = 1e-6
#: Bytes of an element of bf16, and of a float of a sum.
ITEM, FLOAT = 2, 4


@dataclass(frozen=True)
class Cluster:
    """``nvlink``, ``net``: bytes a second of a GPU in one direction; ``rate``: operations a second of a GPU's product."""

    nodes: int = 1
    gpus: int = 8  # of a node
    nvlink: float = cost.COPY_RATE
    net: float = 50e9
    rate: float = cost.LONG_RATE
    programs: int = 132
    message: float = 10e-6  # seconds of a message between nodes without its bytes: an assumption

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus

    @property
    def faster(self) -> float:
        """Than an H200, at products."""
        return self.rate / cost.LONG_RATE


@dataclass(frozen=True)
class Call:
    """Sizes of the whole problem."""

    op: str
    m: int
    n: int
    k: int

    #: One for each node, where it is a part of a call between nodes.
    part_of: int = 1

    def problem(self, cluster: Cluster, ranks: int) -> Problem:
        """As `ops` chooses by, on Hopper and in bf16."""
        sizes = self.m, self.n, self.k
        return Problem(self.op, (9, 0), cluster.programs, ranks, torch.bfloat16, *sizes, part_of=self.part_of)


@dataclass(frozen=True)
class Prediction:
    """Seconds; ``path``: schedule of a call inside a node; ``network``: bytes that a rank sends to other nodes."""

    schedule: str
    path: str
    seconds: float
    gemm: float
    torch: float
    network: float

    @property
    def exposed(self) -> float:
        return self.seconds - self.gemm

    @property
    def efficiency(self) -> float | None:
        """E of the Flux paper: 1 is communication fully hidden, 0 is torch. None where torch exchanges nothing."""
        return 1 - self.exposed / (self.torch - self.gemm) if self.torch > self.gemm else None


# the simulator


class Clock:
    """What happens when."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()  # of things at the same time the first asked for comes first

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + seconds, next(self._number), do))

    def run(self) -> float:
        """Until nothing is left to do; returns when that was."""
        while self._heap:
            self.now, _, do = heapq.heappop(self._heap)
            do()
        return self.now


class Signal:
    """Given ``count`` times before those who wait go on."""

    def __init__(self, count: int = 1) -> None:
        self.left = count
        self._waiting: list[Callable[[], None]] = []

    def give(self) -> None:
        self.left -= 1
        if self.left == 0:
            for do in self._waiting:
                do()

    def wait(self, do: Callable[[], None]) -> None:
        if self.left <= 0:
            do()
        else:
            self._waiting.append(do)


class Wire:
    """Moves one thing after the other, in the order of `send`, each once it is ready."""

    def __init__(self, clock: Clock, rate: float, start: float) -> None:
        self.clock, self.rate, self.start, self.bytes = clock, rate, start, 0.0
        self._queue: deque[tuple[Signal | None, float, Signal]] = deque()
        self._busy = False

    def send(self, nbytes: float, ready: Signal | None, there: Signal) -> None:
        self.bytes += nbytes
        self._queue.append((ready, self.start + nbytes / self.rate, there))
        self._next()

    def _next(self) -> None:
        if self._busy or not self._queue:
            return
        self._busy = True
        ready, seconds, there = self._queue.popleft()

        def sent() -> None:
            self._busy = False
            there.give()
            self._next()

        if ready is None:
            self.clock.after(seconds, sent)
        else:
            ready.wait(lambda: self.clock.after(seconds, sent))


@dataclass(frozen=True)
class Tile:
    """``before``: awaited before it is computed; ``behind``: before it ends; ``gives``: at its end."""

    before: Signal | None = None
    behind: Signal | None = None
    gives: Signal | None = None


class Programs:
    """A persistent kernel: program p takes tiles p, p + programs, …, one after the other."""

    def __init__(self, clock: Clock, programs: int, tiles: list[Tile], seconds: float) -> None:
        self.clock, self.tiles, self.seconds = clock, tiles, seconds
        self.programs = min(programs, len(tiles))
        for program in range(self.programs):
            self._begin(program)

    def _begin(self, at: int) -> None:
        before = self.tiles[at].before
        if before is None:
            self._compute(at)
        else:
            before.wait(lambda: self._compute(at))

    def _compute(self, at: int) -> None:
        self.clock.after(self.seconds, lambda: self._computed(at))

    def _computed(self, at: int) -> None:
        tile = self.tiles[at]
        if tile.gives is not None and at >= self.programs:  # gemm_rs gave the signal of a tile behind the next one's products
            _give(self.tiles[at - self.programs])
        if tile.behind is None:
            self._end(at)
        else:
            tile.behind.wait(lambda: self._end(at))

    def _end(self, at: int) -> None:
        following = at + self.programs
        if following >= len(self.tiles) or self.tiles[following].gives is None:
            _give(self.tiles[at])
        if following < len(self.tiles):
            self._begin(following)


def _give(tile: Tile) -> None:
    if tile.gives is not None:
        tile.gives.give()


# a group's call


@lru_cache(maxsize=64)
def _units(ranks: int, height: int, width: int, subs: int, group_m: int) -> tuple[list[int], list[int]]:
    """Of each tile, in the order of the kernels: its unit among the other ranks' chunks; its part of the own chunk."""
    each = height * subs * width
    others = range(each * (ranks - 1))
    remote = [py_remote_tile(tile, 0, height, width, ranks, subs, group_m, False)[3] for tile in others]
    return remote, [py_own_tile(tile, height, width, subs, group_m)[2] for tile in range(each)]


class Group:
    """A call by copies of one group of all ranks of a cluster."""

    def __init__(self, clock: Clock, cluster: Cluster, problem: Problem, made: Choice) -> None:
        self.clock, self.cluster, self.problem, self.made = clock, cluster, problem, made
        self.height = cdiv(cdiv(problem.rows, made.tile.bm), made.subs)
        self.width = cdiv(problem.columns, made.tile.bn)
        #: Ranks that are simulated: on one node they differ in nothing.
        self.places = cluster.gpus if cluster.nodes > 1 else 1
        self.nvlink = [Wire(clock, cluster.nvlink, cost.COPY) for _ in range(self.places)]
        self.net = [Wire(clock, cluster.net, cluster.message) for _ in range(self.places)]

    def begin(self) -> None:
        orders = _units(self.problem.ranks, self.height, self.width, self.made.subs, self.made.tile.group_m)
        make = self._reduce_scatter if self.problem.op == "gemm_rs" else self._gather
        for tiles in make(*orders):
            Programs(self.clock, self.problem.programs, tiles, self._tile_seconds())

    def _tile_seconds(self) -> float:
        problem, made = self.problem, self.made
        depth = cdiv(problem.k, problem.ranks) if problem.op == "gemm_rs" else problem.k
        seconds = cost.tile_seconds(problem, made, depth, self.cluster.faster) * cost.cut_costs(problem, made)
        turns = cdiv(self.height * made.subs * self.width * problem.ranks, problem.programs)
        return max(seconds, problem.columns * depth * ITEM / cost.MEMORY_RATE / turns)

    def _rows(self, part: int) -> int:
        """Of one of the ``subs`` parts of a chunk; the last may have fewer or none."""
        each = self.height * self.made.tile.bm
        return max(0, min(each, self.problem.rows - part * each))

    def _send(self, place: int, to: int, nbytes: float, ready: Signal | None, there: Signal) -> None:
        near = self.cluster.nodes == 1 or to < self.cluster.gpus
        (self.nvlink if near else self.net)[place].send(nbytes, ready, there)

    def _reduce_scatter(self, remote: list[int], own: list[int]) -> list[list[Tile]]:
        """`kernels.gemm_rs` and the copies of `ops.gemm_rs._queue_copies`."""
        ranks, subs, places = self.problem.ranks, self.made.subs, range(self.places)
        sizes = [self._rows(part) * self.problem.n * ITEM for part in range(subs)]
        arrived = [[Signal(ranks - 1 if nbytes else 0) for nbytes in sizes] for _ in places]
        ready = [[Signal(self.height * self.width) for _ in range((ranks - 1) * subs)] for _ in places]
        for place in places:
            for unit, counted in enumerate(ready[place]):
                owner, part = (place + 1 + unit // subs) % ranks, unit % subs
                if sizes[part]:
                    self._send(place, owner, sizes[part], counted, arrived[owner % self.places][part])
        found = []
        for place in places:
            others, mine = [Tile(gives=signal) for signal in ready[place]], [Tile(behind=signal) for signal in arrived[place]]
            found.append([others[unit] for unit in remote] + [mine[part] for part in own])
        return found

    def _gather(self, remote: list[int], own: list[int]) -> list[list[Tile]]:
        """`kernels.ag_gemm` and the copies of `ops.ag_gemm._copies`."""
        ranks, subs, places = self.problem.ranks, self.made.subs, range(self.places)
        arrived = [[Signal() for _ in range((ranks - 1) * subs)] for _ in places]
        for place in places:
            for unit in range((ranks - 1) * subs):
                peer = (place - 1 - unit // subs) % ranks
                nbytes = self._rows(unit % subs) * self.problem.k * ITEM
                self._send(place, peer, nbytes, None, arrived[peer % self.places][unit])
        found = []
        for place in places:
            others = [Tile(before=signal) for signal in arrived[place]]
            found.append([Tile()] * len(own) + [others[unit] for unit in remote])
        return found


@lru_cache(maxsize=8)
def rates(nvlink: float, faster: float) -> ModuleType:
    """`ops.cost` with the rates of a `Cluster`: a copy of the module, as its constants are also what `ops` chooses by."""
    spec = importlib.util.find_spec(cost.__name__)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    for name in ("GEMM_RATE", "LONG_RATE", "TILE_RATE"):
        setattr(found, name, getattr(cost, name) * faster)
    for name in ("COPY_RATE", "STORE_RATE"):
        setattr(found, name, getattr(cost, name) * nvlink / cost.COPY_RATE)
    return found


def group_call(
    cluster: Cluster, call: Call, schedule: str = "auto", made: choice.Choice | None = None
) -> tuple[str, float, float]:
    """A call of one group of all ranks: its transport, seconds, bytes of a rank to other nodes.

    ``made``: how it is made; else as ``schedule`` says, without a table.
    Calls by copies are simulated. Other schedules store to peers from kernels or let torch multiply, and are for one node; they are
    given the time of `ops.cost`.
    """
    problem = call.problem(cluster, cluster.ranks)
    if cluster.nodes > 1:
        schedule = "copy_engine"
    made = made or choice.choose(problem, schedule, {})
    if made.transport == "sequential" and problem.ranks > 1:
        nbytes = problem.exchanged // problem.ranks * cost.COPY_RATE / cluster.nvlink
        return made.transport, gemm_seconds(cluster, call) + exchange.seconds(int(nbytes), problem.ranks), 0.0
    if made.transport != "copy_engine":
        return made.transport, rates(cluster.nvlink, cluster.faster).MODELS[call.op, made.transport](problem, made), 0.0
    clock = Clock()
    group = Group(clock, cluster, problem, made)
    group.begin()
    seconds = clock.run() + cost.CALL + (SIDE_STREAM[call.op] if problem.ranks > 1 else 0.0)
    return made.transport, seconds, group.net[0].bytes


# a group that spans nodes


def hierarchical(cluster: Cluster, call: Call) -> tuple[str, float, float]:
    """As `ops.nodes`: the node's calls one after the other, messages between counterparts beside them. As `group_call`."""
    node, nodes = replace(cluster, nodes=1), cluster.nodes
    rows = chunk_rows(call.m, cluster.ranks)
    part = replace(call, m=cluster.gpus * rows, part_of=nodes)
    part = replace(part, k=cdiv(call.k, nodes)) if call.op == "gemm_rs" else replace(part, n=cdiv(call.n, nodes))
    path, seconds, _ = group_call(node, part)
    clock = Clock()
    net = Wire(clock, cluster.net, cluster.message)
    columns = call.n if call.op == "gemm_rs" else call.k
    nbytes, there = rows * columns * ITEM, [Signal() for _ in range(nodes)]
    if call.op == "gemm_rs":
        _scatter_nodes(clock, net, nbytes, seconds, there)
        # of the sum: fp32 made of the first partial, each other one added to it, and rounded
        passes = (ITEM + FLOAT) + (nodes - 1) * (ITEM + 2 * FLOAT) + (FLOAT + ITEM)
        end = clock.run() + rows * columns * passes / cost.MEMORY_RATE + 2 * cost.TORCH + (nodes - 1) * LOOK
    else:
        _gather_nodes(clock, net, nbytes, seconds, there)
        end = clock.run()
    return f"nodes/{path}", end, net.bytes


def _scatter_nodes(clock: Clock, net: Wire, nbytes: float, seconds: float, there: list[Signal]) -> None:
    """The other nodes' rows, each sent when it is computed; the own ones last."""
    computed = [Signal() for _ in there]
    for done, arrived in zip(computed[:-1], there[1:], strict=True):
        net.send(nbytes, done, arrived)
    _follow(clock, seconds, [None] * len(there), computed)


def _gather_nodes(clock: Clock, net: Wire, nbytes: float, seconds: float, there: list[Signal]) -> None:
    """The own shard to all; the own node's rows, then those whose shard has come, the next node's first."""
    for arrived in there[1:]:
        net.send(nbytes, None, arrived)
    _follow(clock, seconds, [None, *there[1:]], [Signal() for _ in there])


def _follow(clock: Clock, seconds: float, before: list[Signal | None], done: list[Signal], at: int = 0) -> None:
    """Calls one after the other, each once what it needs is there."""

    def ended() -> None:
        done[at].give()
        if at + 1 < len(done):
            _follow(clock, seconds, before, done, at + 1)

    needed = before[at]
    if needed is None:
        clock.after(seconds, ended)
    else:
        needed.wait(lambda: clock.after(seconds, ended))


# what it is compared with


def gemm_seconds(cluster: Cluster, call: Call) -> float:
    """torch's product on a rank, which takes at least as long as its operands and its result take to memory and back."""
    problem = call.problem(cluster, cluster.ranks)
    n, k = (call.n, cdiv(call.k, cluster.ranks)) if call.op == "gemm_rs" else (problem.columns, call.k)
    moved = (call.m * k + n * k + call.m * n) * ITEM
    seconds: float = rates(cluster.nvlink, cluster.faster).torch_seconds(problem, call.m)
    return max(seconds, cost.TORCH + moved / cost.MEMORY_RATE)


def torch_seconds(cluster: Cluster, call: Call) -> float:
    """torch's product, and NCCL's collective before or behind it, at the rate of the slower links: rings that cross from node to
    node by the network of all GPUs of a node at once. Without the steps of a ring, which are to torch's favour."""
    if cluster.ranks == 1:
        return gemm_seconds(cluster, call)
    nbytes = call.m * (call.n if call.op == "gemm_rs" else call.k) * ITEM * (cluster.ranks - 1) / cluster.ranks
    rate = cluster.nvlink if cluster.gpus > 1 else cluster.net
    if cluster.nodes > 1:
        rate = min(rate, cluster.net * cluster.gpus)
    return gemm_seconds(cluster, call) + COLLECTIVE_START + nbytes / (COLLECTIVE * rate)


def predict(cluster: Cluster, call: Call, schedule: str) -> Prediction:
    """ValueError for a schedule that is none."""
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule {schedule!r} is not one of {', '.join(SCHEDULES)}")
    made = hierarchical if schedule == "hierarchical" and cluster.nodes > 1 else group_call
    path, seconds, network = made(cluster, call)
    return Prediction(schedule, path, seconds, gemm_seconds(cluster, call), torch_seconds(cluster, call), network)

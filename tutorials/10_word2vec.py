"""Tutorial 10: word vectors (word2vec) from a real text, data-parallel, with gradients that stay sparse.

Each word has a row in two tables, as a centre and as the context of others. A batch is of pairs of words that stand within four
words of each other; the loss (skip-gram with negative sampling, a form of noise-contrastive estimation) draws their rows together
and pushes those of random words, drawn by their number to the power 0.75, apart. So a step touches the rows of a few thousand
words, whatever the size of the tables, and the gradients that the ranks must average are sparse. Four ways to do that:

    gloo      torch.distributed's all-reduce of sparse tensors; it is on the host, so GPUs copy there and back
    dense     to_dense, then an all-reduce of a whole table, zeros and all (NCCL, on GPUs)
    horovod   all-gather ids and values, and add up what has the same id
    ours      `fluxlike.sparse_all_reduce_`; `fluxlike.nn.Embedding` sends the ids ahead in the forward pass

All train from the same weights on the same batches. DistributedDataParallel would call "ours" by itself (`sparse_allreduce_hook`,
in docs/sparse_all_reduce.md); here each is a function from a gradient to the average, and the loop is the same for all.

The check: after all steps each word's vectors are those of "dense", and those of "gloo" are, too. The ways differ in the order in
which they add up in fp32. An addition is off by 2⁻²⁴ = 6e-8 of its result at most, sums of many by some times that, and the steps
that follow carry it on: 300 steps of gloo and dense on the CPU come to 3e-7 of the largest weight. TOLERANCE is 1e-4 of it, as a
large batch has a word thousands of times. Adagrad begins with a sum of squares of 1, not 0, or it would make a full step of a
gradient that is but rounding, and would be blind to a wrong factor ("sum" for "avg"). And all ranks have the same bits.

The text: tutorials/data/README.md. Real words are few; with --vocabulary above them, the tables have rows of made-up words, which
come as negatives only, ever rarer. That is the table of a larger text, as far as transfers know.

Without GPUs, times are those of an interpreter and mean nothing. Few steps are made there, so "dense" goes on for --more steps from
the weights that "ours" has, until words have neighbours that make sense.

Run: bash scripts/launch.sh tutorials/10_word2vec.py [--vocabulary N] [--width D] [--steps N] [--batch B] [--out DIR]
"""

import argparse
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fluxlike
from fluxlike.runtime import world
from fluxlike.tools import sparse_baselines
from fluxlike.tools.once import Parser, positive, writable

TEXT = Path(__file__).parent / "data" / "genesis.txt"
#: What the flags are with GPUs and without.
GPU = dict(vocabulary=1_000_000, width=256, steps=300, more=0, batch=8192, negatives=4096)
CPU = dict(vocabulary=400, width=32, steps=6, more=200, batch=256, negatives=64)
#: Words between the two of a pair, at most; negatives that one pair counts for.
WINDOW, WEIGHT = 4, 5
#: Words more frequent than these are left out, the more the more frequent they are.
FREQUENT = 1e-3
RATE = 0.2
#: Of the largest weight; the docstring says why.
TOLERANCE = 1e-4
#: Steps of each training that are not timed.
WARM = 3
ASKED = "god sons hundred wife sarah earth day brother"


#: Centres [B] of one rank; their contexts, and then the negatives [B + K].
Step = tuple[torch.Tensor, torch.Tensor]


class Text(NamedTuple):
    """names: the words that have a row, the most frequent first. counts: of each row, also of made-up words. pairs: [P, 2] rows."""

    names: list[str]
    counts: torch.Tensor
    pairs: torch.Tensor


def read(path: Path, vocabulary: int) -> Text:
    words = re.findall(r"[a-z]+(?:'[a-z]+)?", path.read_text(encoding="utf-8").lower())
    common = Counter(words).most_common(vocabulary)
    rows = {word: row for row, (word, _) in enumerate(common)}
    counts = torch.tensor([count for _, count in common], dtype=torch.float64)
    tokens = torch.tensor([rows[word] for word in words if word in rows])
    keep = (FREQUENT * counts.sum() / counts).sqrt()
    tokens = tokens[torch.rand(len(tokens), generator=torch.Generator().manual_seed(0)) < keep[tokens]]
    ahead = torch.cat([torch.stack([tokens[:-far], tokens[far:]], 1) for far in range(1, WINDOW + 1)])
    made_up = counts[-1] * len(counts) / torch.arange(len(counts) + 1, vocabulary + 1)
    return Text([word for word, _ in common], torch.cat([counts, made_up]), torch.cat([ahead, ahead.flip(1)]))


def batches(text: Text, args: argparse.Namespace, device: torch.device) -> list[Step]:
    """This rank's, of each step."""
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    noise = text.counts**0.75
    made = []
    for _ in range(args.steps + args.more):
        pairs = text.pairs[torch.randint(len(text.pairs), (args.batch,), generator=generator)]
        negatives = torch.multinomial(noise, args.negatives, True, generator=generator)
        made.append((pairs[:, 0].to(device), torch.cat([pairs[:, 1], negatives]).to(device)))
    return made


def loss_of(centres: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """centres [B, D], others [B + K, D]: the sum over pairs, each against all negatives, which count as WEIGHT of them."""
    right = (centres * others[: len(centres)]).sum(1)
    wrong = centres @ others[len(centres) :].T
    return -F.logsigmoid(right).sum() - WEIGHT * F.logsigmoid(-wrong).mean(1).sum()


class Way(NamedTuple):
    """table: (rows, columns, ids of a step at most, device=) to an embedding. average: its gradient's over the ranks."""

    table: Callable[..., nn.Embedding]
    average: Callable[[Any], torch.Tensor]


def ways() -> dict[str, Way]:
    hosts = dist.new_group(backend="gloo")

    def plain(rows: int, columns: int, ids: int, device: torch.device) -> nn.Embedding:
        return nn.Embedding(rows, columns, sparse=True, device=device)

    def averaged(found: sparse_baselines.Found, like: torch.Tensor) -> torch.Tensor:
        ids, values = found
        return torch.sparse_coo_tensor(ids[None], values / dist.get_world_size(), like.shape, is_coalesced=True)

    def ours(table: fluxlike.nn.Embedding) -> torch.Tensor:
        return fluxlike.sparse_all_reduce_(table.weight.grad, "avg", ctx=table.context)

    return {
        "gloo": Way(plain, lambda table: averaged(sparse_baselines.gloo(table.weight.grad, hosts), table.weight)),
        "dense": Way(plain, lambda table: averaged(sparse_baselines.dense(table.weight.grad), table.weight)),
        "horovod": Way(plain, lambda table: averaged(sparse_baselines.horovod(table.weight.grad), table.weight)),
        "ours": Way(fluxlike.nn.Embedding, ours),
    }


class Trained(NamedTuple):
    weights: list[torch.Tensor]
    losses: list[float]
    ms: float


def train(way: Way, steps: list[Step], args: argparse.Namespace, start: list[torch.Tensor] | None = None) -> Trained:
    """The two tables after all steps, the losses (of a pair, over all ranks), and the median time of a step on the slowest rank.

    ``start``: weights to begin with; random ones if None, the same on all ranks and for every way.
    """
    device = steps[0][0].device
    sizes = args.batch, args.batch + args.negatives
    tables = [way.table(args.vocabulary, args.width, ids, device=device) for ids in sizes]
    generator = torch.Generator(device=device).manual_seed(2)
    for i, table in enumerate(tables):
        nn.init.uniform_(table.weight, -0.5, 0.5, generator=generator)
        if start is not None:
            table.weight.data.copy_(start[i])
    optimizer = torch.optim.Adagrad([table.weight for table in tables], lr=RATE, initial_accumulator_value=1)
    losses, times = [], []
    for centres, others in steps:
        synchronize()
        since = time.perf_counter()
        loss = loss_of(tables[0](centres), tables[1](others))
        loss.backward()
        for table in tables:
            table.weight.grad = way.average(table)
        optimizer.step()
        optimizer.zero_grad()
        synchronize()
        times.append(time.perf_counter() - since)
        losses.append(loss.detach() / len(centres))
    measured = torch.stack([torch.tensor(times, device=device).float(), torch.stack(losses).float()])
    every = [torch.empty_like(measured) for _ in range(dist.get_world_size())]
    dist.all_gather(every, measured)
    slowest, average = torch.stack(every)[:, 0].amax(0).tolist(), torch.stack(every)[:, 1].mean(0).tolist()
    weights = [table.weight.detach().clone() for table in tables]
    for table in tables:
        if isinstance(table, fluxlike.nn.Embedding):
            table.close()
    return Trained(weights, average, statistics.median(slowest[min(WARM, len(slowest) - 1) :]) * 1e3)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def same_on_all_ranks(weights: list[torch.Tensor]) -> bool:
    """Whether rank 0 has these bits."""
    first = [weight.clone() for weight in weights]
    for weight in first:
        dist.broadcast(weight, 0)
    return all(torch.equal(mine, other) for mine, other in zip(weights, first, strict=True))


def shown(steps: int) -> list[int]:
    """Some of so many steps, and the last."""
    return sorted({*range(0, steps, max(1, steps // 5)), steps - 1})


def neighbours(names: list[str], vectors: torch.Tensor) -> list[str]:
    """A line for each of ASKED: the words whose vectors have the most nearly the same direction."""
    vectors = F.normalize(vectors[: len(names)])
    lines = []
    for word in ASKED.split():
        if word in names:
            nearest = (vectors @ vectors[names.index(word)]).topk(min(6, len(names))).indices.tolist()
            lines.append(f"  {word}: " + " ".join(names[row] for row in nearest if names[row] != word))
    return lines


def draw(found: dict[str, Trained], gpus: bool, path: Path) -> str:
    """Step times and losses as a picture; what came of it."""
    if find_spec("matplotlib") is None:
        return "no picture: matplotlib is missing; python -m pip install matplotlib"
    from matplotlib.figure import Figure

    path.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.bar(list(found), [trained.ms for trained in found.values()])
    left.set_ylabel("ms a step")
    left.set_title(torch.cuda.get_device_name() if gpus else "on an interpreter: these times mean nothing", fontsize=9)
    for (name, trained), style in zip(found.items(), ("-", "--", "-.", ":"), strict=True):
        right.plot(trained.losses, style, label=name)
    right.set_xlabel("step")
    right.set_ylabel("loss")
    right.legend()
    figure.savefig(path, dpi=150)
    return f"picture: {path}"


def main(args: argparse.Namespace) -> int:
    rank, ranks, device = dist.get_rank(), dist.get_world_size(), world.current().device
    say = print if rank == 0 else lambda *_: None
    torch.sparse.check_sparse_tensor_invariants.disable()  # or Adagrad has torch warn that they are
    text = read(TEXT, args.vocabulary)
    steps = batches(text, args, device)
    used = [len(ids.unique()) for ids in steps[0]]
    say(f"{ranks} ranks, heap '{world.current().executor.name}', {len(text.pairs)} pairs of {len(text.names)} words")
    say(f"tables {args.vocabulary}×{args.width}; in the first step rank 0 uses {used[0]} and {used[1]} of their rows")
    by = ways()
    found = {name: train(way, steps[: args.steps], args) for name, way in by.items()}
    ours, dense = found["ours"], found["dense"]
    for step in shown(args.steps):
        say(f"step {step}: loss {ours.losses[step]:.4f}, with dense {dense.losses[step]:.4f}")
    last = ours
    if args.more:
        last = train(by["dense"], steps[args.steps :], args, ours.weights)
        for step in shown(args.more):
            say(f"step {args.steps + step}, from here on dense alone: loss {last.losses[step]:.4f}")
    say("words that are near each other:")
    say("\n".join(neighbours(text.names, last.weights[0])))
    largest = max(float(weight.abs().max()) for weight in dense.weights)
    if device.type != "cuda":
        say("the times are those of an interpreter and mean nothing")
    say("method    ms a step   × ours   weights off by")
    off = {}
    for name, trained in found.items():
        pairs = zip(trained.weights, dense.weights, strict=True)
        off[name] = float(torch.stack([(mine - right).abs().max() for mine, right in pairs]).max()) / largest  # NaN, too
        say(f"{name:<8} {trained.ms:>10.3f} {trained.ms / ours.ms:>8.2f}   {off[name]:.1e}")
    if args.out is not None and rank == 0:
        say(draw(found, device.type == "cuda", Path(args.out) / "word2vec.png"))
    good = off["ours"] <= TOLERANCE and off["gloo"] <= TOLERANCE and same_on_all_ranks(ours.weights)
    good &= statistics.mean(last.losses[-5:]) < ours.losses[0]
    failed = torch.tensor([not good], dtype=torch.int32, device=device)
    dist.all_reduce(failed)
    passed = f"check passed: after {args.steps} steps on {ranks} ranks the weights are those of gloo and dense, off by "
    passed += f"{off['ours']:.1e} of the largest (up to {TOLERANCE:g} is the order of sums), and the same bits on all ranks"
    say(f"check FAILED: on {int(failed)} ranks" if failed else passed)
    return int(failed > 0)


def arguments() -> argparse.Namespace:
    parser = Parser()
    for name, default in (GPU if torch.cuda.is_available() else CPU).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", metavar="DIR", help="draw the picture there; needs matplotlib")
    args = parser.parse_args()
    if args.steps < 1 or args.more < 0 or args.steps + args.more < 6:
        parser.error(f"--steps {args.steps} --more {args.more}: the last five losses are held to the first; make 6 steps or more")
    positive(parser, args, CPU.keys() - {"more"})
    writable(parser, args.out)
    return args


if __name__ == "__main__":
    args = arguments()
    fluxlike.init()
    try:
        status = main(args)
    finally:
        fluxlike.finalize()
    sys.exit(status)

"""Without any one wait, signal, scope or fence of the kernels a check fails: the mutants of `mutate`, each in processes of its own.

What a mutant is put through is in `scenes`: results, time-outs and the race checker on three ranks of the CPU heap. Assembly does
nothing there, so it is judged from what a compiler makes of it. A mutant that nothing catches must stand in `SURVIVORS`, with the
reason why it is no fault; one that stands there and is caught fails as well.

    pytest tests/test_mutations.py -k "sync.wait and relaxed"
"""

import concurrent.futures
import fnmatch
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mutate
import mutate_reach
import mutate_source
import pytest
import slow
from mutant_process import CALLS, KERNELS, NAMES, on_compiler, on_ranks
from mutate import Mutant
from ranks import ROOT, Outcome, run_fresh

#: The first of them waits for others.
pytestmark = pytest.mark.timeout(1500)

RANKS = 3
#: Mutants at a time, of three ranks each, which wait for each other most of the time; other tests run beside them.
WORKERS = 3
#: What mutants are judged by or lean on: on the heap, by the lint.
ON_RANKS = (
    "tests/scenes.py", "tests/mut*.py", "fluxlike/kernels/sync.py", "fluxlike/kernels/lang.py",
    *(f"fluxlike/runtime/{name}.py" for name in ("race*", "interpreter*", "programs", "operands", "rewriting")),
)  # fmt: skip
ON_COMPILER = ("tests/mut*.py", "fluxlike/tools/lint/*.py", "fluxlike/kernels/sync.py", "fluxlike/kernels/lang.py")
#: Seconds that a wait may last: of what will be caught, perhaps by just that; of what must not be. Short enough not to wait for
#: long, long enough that no rank of a right program takes as much to come, or a mutant that is no fault passes for one. Of the
#: sources as they are: rank 0 does the scenes of messages by itself, 8 s of them and more, and beside all other tests minutes.
SHORT, LONG, WHOLE = "5", "60", "600"
#: The scenes leave little to chance, but a busy machine may put the ranks in an order in which a fault does not show.
TRIES = 3
OF_PRODUCTS = (*mutate_reach.TRANSPORTS, mutate_reach.STREAM_K, mutate_reach.DECOMPOSED)
PAIRS = [(op, transport) for op in ("gemm_rs", "ag_gemm") for transport in OF_PRODUCTS]
PAIRS += [("all_reduce", transport) for transport in CALLS]
PAIRS += [("messages", mutate_reach.MESSAGES)]

#: Mutants that are no faults, by name or pattern: why not.
SURVIVORS: dict[str, str] = {
    "ag_gemm.push_shard.drain_stores:remove": (
        "the barrier that ends Triton's pipelined loads stands at the same place in what is compiled today; nothing promises it"
    ),
    "ag_gemm.push_shard.atomic_add:scope=gpu": (
        "the counter is for programs of one GPU; what they order goes on to the peers with the flag, at system scope"
    ),
    "ag_gemm.push_shard.for publish_set:early": (
        "the flags before the reset of the counter, which is this rank's own: nobody adds to it any more in this call"
    ),
    "ag_gemm.ag_gemm_kernel.publish_set:value+1": "the side stream waits for 1 or more, and then sets the word to 0",
    "ag_gemm_stream_k.ag_gemm_stream_k_kernel.shares:early": (
        "the own tiles, which wait for no other rank, before the push: slower, for the peers wait longer for this shard"
    ),
    "ag_gemm.ag_gemm_kernel.if share_tiles:early": "shared tiles before whole ones: slower, but every wait is met",
    "gemm_rs.gemm_rs_kernel.if share_own_tiles:early": "shared tiles before whole ones: slower, but every wait is met",
    "decomposed.gemm_rs_decomposed_sum_kernel.finish:epoch+1": "all ranks count calls by twos, in all that is compared",
    "ag_gemm_stream_k.ag_gemm_stream_k_kernel.shares#2:early": (
        "the other shards' tiles before the own ones: slower, but every wait is met, as each rank pushes before its first tile"
    ),
    "ag_gemm_stream_k.wait_tile.wait:late": "the same waits for the shards of one tile, in another order",
    "elements.advance.store:*": "only the call's number in the message of a time-out, at which tests/test_all_reduce.py looks",
    "words.*:scope=gpu": "the interpreter's; the compiled store has no scope, as what orders the words is that each is whole",
    "trees.all_reduce_trees_kernel.advance:epoch+1": "all ranks count calls by twos, in all that is compared",
    "lang.drain_stores.assembly:remove fence.proxy.async": (
        "by PTX, whoever has waited for a TMA store knows it without a fence between the proxies; this one is for safety"
    ),
    "sparse_all_reduce._wait_chunks.wait:late": "the same waits for chunks, in another order",
    "sparse_all_reduce._drain._wait_chunks:late": "the waits for reduced rows before those for others: the same ones",
    "sparse_all_reduce.sparse_all_reduce_kernel.advance:epoch+1": "all ranks count calls by twos, in all that is compared",
    "messages.messages_*_kernel.if is_last_program:early": (
        "all programs have seen that the messages came; what they still read is left alone until the next launch, behind this one"
    ),
    "sync.finish.publish_set_to_all:value-1": "a credit that says too little: who waits for it waits for the next one, which comes",
    "sync.finish.if publish_set_to_all:early": "the call's number is for this rank's next launch, which begins behind this one",
    "sync.finish.store#2:+1": "one too large asks for the credit of a later call, which the peers also give: it waits longer",
}


def why_not(mutant: Mutant) -> str:
    """The reason why a mutant is no fault, or ""."""
    return next((reason for pattern, reason in SURVIVORS.items() if fnmatch.fnmatchcase(mutant.name, pattern)), "")


def is_linted(mutant: Mutant) -> bool:
    return mutant.compiled_only or mutant.file == "kernels/messages.py"


def about(mutant: Mutant) -> list[str]:
    """The files whose change asks for a judgement anew."""
    judges = ON_RANKS * (not mutant.assembly) + ON_COMPILER * is_linted(mutant)
    return [f"{mutate_source.PACKAGE.name}/{mutant.file}", *judges]


# what they say


def judge(mutant: Mutant, directory: Path) -> str:
    """What caught a mutant, in `TRIES` tries; "" if nothing did. A mutant that is no program fails the test."""
    tries = 1 if why_not(mutant) else TRIES
    return next((found for _ in range(tries) if (found := judge_once(mutant, directory))), "")


def judge_once(mutant: Mutant, directory: Path) -> str:
    file = directory / f"mutant{mutate.mutants().index(mutant)}.py"
    file.write_text(mutant.text())
    where = {"module": "fluxlike." + mutant.file.removesuffix(".py").replace("/", "."), "file": str(file)}
    checks = []
    if not mutant.assembly:
        limit = LONG if why_not(mutant) else SHORT
        reached = sorted({kernel for kernel, _ in mutant.reached})
        checks.append(lambda: on_the_heap(plan(mutant), mutant.compiled_only, limit, reached, **where))
    if is_linted(mutant):
        checks.insert(0 if "scope=" in mutant.name else 1, lambda: on_the_lint(to_lint(mutant), **where))
    return next((found for check in checks if (found := check())), "")


def to_lint(mutant: Mutant) -> list[tuple[str, str]]:
    """The (kernel, transport) that the lint looks at; of one that is no fault, and so is compiled to the end, one an operation."""
    if not why_not(mutant):
        return list(mutant.reached)
    simplest = sorted(mutant.reached, key=lambda path: len(path[0]), reverse=True)
    return list({next(op for prefix, op in OF.items() if path[0].startswith(prefix)): path for path in simplest}.values())


def on_the_lint(reached: Sequence[tuple[str, str]], **where: str) -> str:
    """What the lint says of a mutant in the (kernel, transport) that reach it."""
    (outcome,) = run_fresh(on_compiler, 1, timeout=480, measure="nothing", reached=reached, **where)
    assert outcome.ok, str(outcome)
    return outcome.value and f"lint: {outcome.value}"


def plan(mutant: Mutant) -> list[tuple[str, str]]:
    """The (operation, transport) that reach a mutant; of one that is no fault, and so runs to the end, one an operation."""
    reached = set(mutant.reached)
    found = [(op, transport) for op, transport in PAIRS if any((kernel, transport) in reached for kernel in kernels_of(op))]
    if mutant.file in ("kernels/exchange.py", "kernels/trees.py"):
        return found
    later = mutate_reach.ROOTED, "trees", mutate_reach.SPARSE, mutate_reach.MESSAGES
    first = [pair for pair in found if not pair[1].startswith(later)]
    pairs = first or found  # what the others share they show sooner
    return list({pair[0]: pair for pair in reversed(pairs)}.values())[::-1] if why_not(mutant) else pairs


#: By the beginnings of kernels' names, the operations that launch them; others are for several.
OF = {"gemm_rs": "gemm_rs", "ag_": "ag_gemm", "messages": "messages"}
OF |= dict.fromkeys(("all_reduce", "exchange", "relay", "sparse", "product", "gather"), "all_reduce")


def kernels_of(op: str) -> tuple[str, ...]:
    """The kernels that calls of an operation launch."""
    others = [prefix for prefix, of in OF.items() if of != op]
    return tuple(kernel for kernel in KERNELS if not kernel.startswith(tuple(others)))


def on_the_heap(
    pairs: list[tuple[str, str]], compiled: bool, limit: str, reached: Sequence[str], timeout: float = 240, **where: Any
) -> str:
    """What the ranks say of a mutant in the scenes of ``pairs``, which is in the kernels ``reached``."""
    # four programs, so that two of them push the shards of ag_gemm
    environment = {"FLUXLIKE_RACECHECK": "1", "FLUXLIKE_TIMEOUT_S": LONG, "FLUXLIKE_CPU_PROGRAMS": "4"}
    where |= {"plan": pairs, "compiled": compiled, "limit": limit, "reached": reached}
    outcomes = run_fresh(on_ranks, RANKS, environment, timeout=timeout, grace=0.3, measure="nothing", **where)
    if all(outcome.ok for outcome in outcomes):
        return ""
    said = [found for outcome in outcomes if (found := _caught(outcome))]
    assert said, "nobody says what is wrong:\n" + "\n".join(map(str, outcomes))
    return said[0]


def _caught(outcome: Outcome) -> str:
    """What a rank found, if it is a finding: a race, a wrong number, or a wait that ran out and says so."""
    message = outcome.message
    if outcome.error == "RaceError":
        return f"race checker: {message}"
    if outcome.error == "Wrong":
        return f"result: {message}"
    ran_out = ("waited" in message and "FLUXLIKE_TIMEOUT_S" in message) or "gave up first" in message
    if outcome.error == "PeerTimeout" and message.startswith(tuple(f"{name}: rank" for name in NAMES)) and ran_out:
        return f"time-out: {message}"
    return ""


def judge_sources(how: str, directory: Path) -> str:
    """What is found in the sources as they are: in all scenes, "interpreted" or "as compiled", or by the lint, "compiled"."""
    source, module = mutate_source.PACKAGE / "kernels/sync.py", "fluxlike.kernels.sync"
    if how == "compiled":
        copied = directory / "sync.py"
        copied.write_bytes(source.read_bytes())
        # the variants of each are for test_ptx
        reached = [(kernel, mutate_reach.transports(kernel)[0]) for kernel in KERNELS]
        return on_the_lint(reached, module=module, file=str(copied))
    return on_the_heap(PAIRS, how == "as compiled", WHOLE, KERNELS, timeout=1100, module=module, file=str(source))


# the tests


@pytest.fixture(scope="module")
def judged(request, tmp_path_factory) -> Iterator[dict[str, concurrent.futures.Future]]:
    """What caught each mutant that this session asks for; they are judged a few at a time, ahead of the tests.

    The sources as they are come first, as they take longest.
    """
    directory = tmp_path_factory.mktemp("mutants")
    whole = [item.callspec.params["how"] for item in request.session.items if item.originalname == "test_nothing_taken_away"]
    wanted = [item.callspec.params["mutant"] for item in request.session.items if item.originalname == "test_a_mutant_is_caught"]
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        sources = {how: pool.submit(judge_sources, how, directory) for how in whole}
        yield sources | {mutant.name: pool.submit(judge, mutant, directory) for mutant in wanted}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize(
    "mutant", [pytest.param(mutant, id=mutant.name, marks=pytest.mark.slow(*about(mutant))) for mutant in mutate.mutants()]
)
def test_a_mutant_is_caught(mutant: Mutant, judged) -> None:
    found = judged[mutant.name].result()
    if why_not(mutant):
        assert not found, f"{mutant.name} stands among the survivors, but is caught; take it out: {found}"
    else:
        assert found, f"nobody noticed this; improve a check, or say in SURVIVORS why it is no fault:\n{mutant.difference()}"


@pytest.mark.slow(slow.ALWAYS)
@pytest.mark.parametrize("how", ["interpreted", "as compiled", "compiled"])
def test_nothing_taken_away(how: str, judged) -> None:
    """The scenes, and the waits as a compiler sees them, with the sources as they are."""
    assert judged[how].result() == ""


@pytest.mark.parametrize("name", mutate_reach.DATA)
def test_a_file_without_mutants_has_no_signals(name: str) -> None:
    text = (mutate_source.PACKAGE / "kernels" / f"{name}.py").read_text()
    assert "@triton.jit" in text and not re.search(r"from \.|atomic_|asm|barrier|while ", text.partition('"""\n\nimport')[2])


def test_what_judges_is_there() -> None:
    assert all(list(ROOT.glob(pattern)) for pattern in (*ON_RANKS, *ON_COMPILER))


def test_survivors_are_mutants() -> None:
    for pattern in SURVIVORS:
        assert fnmatch.filter((mutant.name for mutant in mutate.mutants()), pattern), f"there is no mutant {pattern} any more"

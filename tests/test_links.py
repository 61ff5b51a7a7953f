"""Emulated links: what they do to a transfer, that the kernels push what the paper says, and who wins where."""

import itertools
import json
import time
from dataclasses import replace
from unittest import mock

import pytest
import ranks
import torch

import fluxlike
from fluxlike.ops import exchange
from fluxlike.ops.exchange import SIGNAL, TRIP
from fluxlike.tools import links, links_wires
from fluxlike.topology import LinkMatrix, plan_trees

#: Of p3.16xlarge: a ring of single and double links, and the host between opposite corners.
CORNERS = (0, 1, 4, 5)


def slower(matrix, factor):
    """The same machine with slower links: few bytes, which the interpreter can move, behave as many."""
    rates = tuple(tuple(rate / factor for rate in row) for row in matrix.bandwidth)
    return replace(matrix, bandwidth=rates, port=(), unit=0.0)


# on paper


@pytest.mark.parametrize("algo", links.ALGORITHMS)
@pytest.mark.parametrize("itemsize", (2, 4))
def test_what_is_pushed(algo, itemsize):
    matrix = LinkMatrix.preset("p3.16xlarge")
    plan = plan_trees(matrix, 1 if algo == "tree" else None)
    table = links.pushed(algo, 8000, itemsize, 8, plan)
    total = sum(map(sum, table))
    sums = 4 / itemsize  # trees send those in fp32
    want = {"one_shot": 56, "two_shot": 2 * 7, "bulk": 2 * 7, "tree": (1 + sums) * 7, "trees": (1 + sums) * 7}[algo] * 8000
    assert total == pytest.approx(want)
    assert all(table[i][j] == 0 or matrix.bandwidth[i][j] > 10 for i in range(8) for j in range(8)) == (algo in links.BOUNDS)


def test_seconds_on_paper():
    p3, switch = LinkMatrix.preset("p3.16xlarge"), LinkMatrix.preset("nvswitch-8")
    trips = 2 * (TRIP + SIGNAL)
    # bulk: a GPU has three others beyond its host port, each takes an eighth twice
    assert links.on_paper(p3, "bulk", 1e6, 4, []) == pytest.approx(6 / 8 * 1e6 / 10e9 + trips)
    assert links.on_paper(switch, "bulk", 1e6, 4, []) == pytest.approx(14 / 8 * 1e6 / 450e9 + trips)
    assert links.on_paper(switch, "one_shot", 1e6, 4, []) == pytest.approx(7e6 / 450e9 + TRIP)
    plan = plan_trees(p3)
    # as much as the plan says at best; on a link both directions are not used alike
    busiest = links.on_paper(p3, "trees", 1e6, 4, plan) - 6 * (TRIP + SIGNAL)
    assert busiest == pytest.approx(2.5 / 8 * 1e6 / 25e9)


def test_on_paper_trees_win_only_where_links_differ():
    """Where bytes matter, against the better of the others; on a switch at no size."""
    for name, size, wins in (("p3.16xlarge", 1 << 20, True), ("p3.16xlarge", 1 << 14, False), ("pcie-4+4", 1 << 24, False)):
        matrix = LinkMatrix.preset(name)
        plan = plan_trees(matrix)
        times = {algo: links.on_paper(matrix, algo, size, 4, plan) for algo in ("one_shot", "two_shot", "bulk", "trees")}
        assert (min(times, key=times.__getitem__) == "trees") == wins, (name, times)
    switch = LinkMatrix.preset("nvswitch-8")
    for size in (1 << power for power in range(12, 31, 3)):
        for itemsize, algo in itertools.product((2, 4), links.BOUNDS):
            plan = plan_trees(switch, 1 if algo == "tree" else None)
            trees, bulk = (links.on_paper(switch, name, size, itemsize, plan) for name in (algo, "bulk"))
            assert trees > bulk, (size, itemsize, algo)


# what links do


def arrivals(group):
    """When what this rank sends is there, in units of what one packet takes on a double link, and when it began."""
    rank, unit = group.rank(), 0.05
    found = {}
    for name, matrix in (("p3", LinkMatrix.preset("p3.16xlarge").part(CORNERS)), ("switch", LinkMatrix.preset("nvswitch-4"))):
        rate = max(map(max, matrix.bandwidth)) * 1e9
        since, slowdown = {}, unit * rate / 1_000_000
        with links_wires.slowed(matrix, slowdown) as wires:
            begun = time.monotonic()
            trip, signal = TRIP * slowdown, SIGNAL * slowdown

            def note(what, since=since):
                since[what] = time.monotonic() / unit

            if name == "p3" and rank == 0:
                for number in range(3):
                    wires.send(2, 1_000_000, False, lambda number=number: note(("double", number)))
                    wires.send(1, 1_000_000, False, lambda number=number: note(("single", number)))
                wires.send(3, 1_000_000, False, lambda: note(("host", 0)))
                wires.send(2, 0, True, lambda: note(("flag", 0)))
            elif name == "switch" and rank > 0:
                wires.send(0, 2_000_000, False, lambda: note(("incast", rank)))
        assert not any(hook in vars(links_wires.interpreter.builder) for hook in links_wires._HOOKED)
        found[name] = {what: at - begun / unit for what, at in since.items()}, begun / unit, trip / unit, signal / unit, wires.sent
    return found


def test_links_are_shared_and_ports_too():
    found = ranks.run_ranks(arrivals, 4)
    since, _, trip, signal, sent = found[0]["p3"]
    for number in range(3):
        assert since["double", number] >= number + 1 + trip
        assert since["single", number] >= 2 * (number + 1) + trip
    assert since["host", 0] >= 5 + trip
    assert since["flag", 0] >= 3 + trip + signal
    assert since["double", 2] < since["single", 2], "two links are not one"
    assert sent == [0, 3_000_000, 3_000_000, 1_000_000]
    runs = [each["switch"] for each in found]
    first, trip = min(begun for _, begun, *_ in runs), runs[0][2]
    incast = sorted(begun + since["incast", rank] - first for rank, (since, begun, *_) in enumerate(runs) if rank)
    assert all(there >= 2 * (number + 1) + trip for number, there in enumerate(incast)), f"one port takes one at a time: {incast}"


def refused(group):
    """What is said instead of beginning."""
    matrix = LinkMatrix.preset("nvswitch-4")
    broken = replace(matrix, bandwidth=((0.0,) * 4,) * 4, kind=(("",) * 4,) * 4, port=())
    said = []
    for wrong in (LinkMatrix.preset("nvswitch-8"), broken):
        with pytest.raises(ValueError) as error, links_wires.slowed(wrong, 1.0):
            pass
        said.append(str(error.value))
    watched = mock.patch.object(links_wires.racecheck, "active", lambda: object())
    with watched, pytest.raises(RuntimeError) as error, links_wires.slowed(matrix, 1.0):
        pass
    return [*said, str(error.value)]


def test_what_cannot_be_emulated():
    for rank, said in enumerate(ranks.run_ranks(refused, 4)):
        assert (
            "8 GPUs for 4 ranks" in said[0] and f"no path from GPU {rank} to" in said[1] and "unset FLUXLIKE_RACECHECK" in said[2]
        )


def timed(group):
    """What a call took, where rank 1 takes longer."""
    late = torch.distributed.get_rank(group) == 1
    x, machine = torch.ones(4), object.__new__(links.Emulation)
    with mock.patch.object(links.fluxlike, "all_reduce", lambda y, algo: time.sleep(0.3 * late) or y):
        return machine.call(x, "bulk", x)


def test_a_call_takes_as_long_as_the_slowest_rank():
    first, *others = ranks.run_ranks(timed, 4)
    assert first >= 0.3 and set(others) == {first}


# the kernels


def raced(group, machines, nbytes, out):
    """Rows of some algorithms on each machine; before that the tool as it is called, which writes its own to ``out``.

    Those whose times are compared go three rounds, the fastest of which other processes have disturbed least.
    """
    assert links.main(["nvswitch-4", "--sizes", "1K", "--algos", "tree", "--share", "1", "--programs", "8", "--json", out]) == 0
    fluxlike.init(heap="shm")
    rows = {}
    for name, path in machines.items():
        once, often = (links.Emulation(path, share=0.25, rounds=rounds, dtype=torch.float32) for rounds in (1, 3))
        rows[name] = {algo: once.row(algo, nbytes) for algo in ("one_shot", "two_shot")}
        rows[name] |= {algo: often.row(algo, nbytes) for algo in ("bulk", "trees")}
    fluxlike.finalize()
    return rows


@pytest.mark.slow
def test_trees_win_where_links_differ_and_lose_on_a_switch(tmp_path):
    """The shipped kernels; and what they push, to each byte but the flags, is what the paper says."""
    nbytes, machines, out = 64 << 10, {}, tmp_path / "links.json"
    for name, matrix in (("p3", LinkMatrix.preset("p3.16xlarge").part(CORNERS)), ("switch", LinkMatrix.preset("nvswitch-4"))):
        machines[name] = str(tmp_path / f"{name}.json")
        slower(matrix, 32).save(machines[name])
    outcomes = ranks.run_fresh(raced, 4, timeout=240, machines=machines, nbytes=nbytes, out=str(out))
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
    for rows in (outcome.value for outcome in outcomes):
        took = {name: {algo: min(row.rounds_us) for algo, row in each.items()} for name, each in rows.items()}
        assert took["p3"]["trees"] < took["p3"]["bulk"] and took["switch"]["trees"] > took["switch"]["bulk"], rows
        for name, path in machines.items():
            for algo, row in rows[name].items():
                table = links.pushed(algo, nbytes, 4, 4, plan_trees(LinkMatrix.from_file(path)))
                flags = 8 / exchange.BULK
                assert max(map(max, table)) <= row.busiest_bytes <= max(map(max, table)) * (1 + 1.01 * flags), (name, row)
                assert row.emulated_us >= 0.5 * row.paper_us, "the links were not slow"
                assert row.slowdown == pytest.approx(row.interpreter_s / (0.25 * row.paper_us * 1e-6))
    written = json.loads(out.read_text())
    (row,) = written["rows"]
    assert row["slowdown"] == pytest.approx(row["interpreter_s"] / (row["paper_us"] * 1e-6)), "--share is not 1"
    assert [(row["topology"], row["algo"], row["nbytes"]) for row in written["rows"]] == [("nvswitch-4", "tree", 1024)]
    assert written["protocol"]["ranks"] == 4 and written["environment"]["command"].startswith("python -m fluxlike links nvswitch-4")


# the command line


@pytest.mark.parametrize(
    ("options", "says"),
    (
        (["--algos", "bulk,magic"], "'magic' is not one of one_shot"),
        (["--sizes", "64Q"], "'64Q' is not a size"),
        (["--sizes", "1K,6"], "6 bytes are no multiple of 4"),
        (["--share", "0"], "--share 0 is not above 0"),
        (["--share", "nan"], "--share nan is not above 0"),
        (["--rounds", "0"], "--rounds 0 is below 1"),
        (["--programs", "0"], "--programs 0 is not from 1 to 64"),
        (["--programs", "65"], "--programs 65 is not from 1 to 64"),
        (["nosuch"], "no topology is called 'nosuch'"),
        (["nvswitch-16", "nvswitch-1"], "nvswitch-1 has 1 GPU for "),
        (["nvswitch-16", "./apart.json"], "apart has no path from GPU 1 to 0; all ranks must reach all others"),
    ),
)
def test_a_useless_command_line(options, says, capsys, monkeypatch, tmp_path):
    """It ends before the first machine is measured, whichever is wrong, and once a host."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(links.command, "ranks", lambda: 4)
    monkeypatch.chdir(tmp_path)
    LinkMatrix.from_array([[0] * 4] * 4, "apart").save("apart.json")
    with pytest.raises(SystemExit) as end:
        links.parse(options)
    assert end.value.code == 2 and says in capsys.readouterr().err


def test_one_rank_has_no_links(capsys, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(links.command, "ranks", lambda: 1)
    with pytest.raises(SystemExit) as end:
        links.parse([])
    assert end.value.code == 2 and "start two or more: bash scripts/launch.sh --nproc 2" in capsys.readouterr().err


def test_table():
    rows = [links.Row("p3", 64 << 10, algo, 1.0, us, [us], 1e5, 0.1, 9) for algo, us in (("bulk", 12.64), ("trees", 8.0))]
    rows.append(links.Row("switch", 64 << 10, "trees", 2.0, 3.0, [3.0], 1e5, 0.1, 9))
    assert links.table(rows)[2:] == ["| p3, 64 KB | 12.6 (1.0) | 8.0 (1.0) |", "| switch, 64 KB |  | 3.0 (2.0) |"]

"""`python -m fluxlike model`: the simulator by hand, calls whose time follows from a sum, the model against what was measured."""

import json
import math
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from fluxlike.kernels.tiles import py_remote_tile
from fluxlike.ops import choice, cost, tiling
from fluxlike.tools import model
from fluxlike.tools import model_events as events
from fluxlike.tools.model_events import Call, Clock, Cluster, Programs, Signal, Tile, Wire

ROOT = Path(__file__).resolve().parents[1]
#: Records of calls on one host. The constants were fitted to those of four GPUs; of two, the fixed times were looked at.
RECORDS = [ROOT / f"docs/measured/2026-11-21-{op}-headline-R{ranks}.json" for op in events.OPS for ranks in (2, 4)]
RS, AG = Call("gemm_rs", 4096, 12288, 49152), Call("ag_gemm", 4096, 49152, 12288)
FAST = 1e30


def compared():
    return [one for path in RECORDS for one in model.compare(json.loads(path.read_text()), Cluster())]


@pytest.mark.parametrize("name", ["copy_engine", "gemm", "torch"])
def test_the_model_is_within_a_tenth_of_what_was_measured(name, monkeypatch):
    """Every headline shape at 2 and 4 GPUs, in the tiles and parts that they were measured with; most within a twentieth."""
    monkeypatch.setattr(tiling, "fitting", lambda *problem: (tiling.WIDE,))
    usual = choice.usual

    def then(problem, transport):
        made = usual(problem, transport)
        cut = problem.k == 8192 and problem.ranks == 4 and made.subs > 1
        return replace(made, subs=4) if cut else made

    monkeypatch.setattr(choice, "usual", then)
    found = [one for one in compared() if one.name == name]
    assert len(found) == 32 and {one.ranks for one in found} == {2, 4}
    assert max(abs(one.off) for one in found) < 0.10, max(found, key=lambda one: abs(one.off))
    assert sum(abs(one.off) < 0.05 for one in found) >= 24
    assert abs(statistics.mean(one.off for one in found)) < 0.02, "off to one side"


def test_a_record_that_says_how_calls_were_made_is_modelled_so():
    """Else as they are made today; of what no call can be any more nothing is said."""
    record = json.loads(RECORDS[1].read_text())
    call, where = Call("gemm_rs", 8192, 8192, 8192), "copy_engine"
    record["shapes"] = [shape for shape in record["shapes"] if (shape["m"], shape["k"]) == (8192, 8192)]
    (shape,) = record["shapes"]
    usual = choice.usual(call.problem(Cluster(), 4), where)

    def expected(made):
        shape["methods"][where]["choice"] = made and made.as_json()
        return [one.model for one in model.compare(record, Cluster()) if one.name == where]

    (today,), (four,) = expected(None), expected(replace(usual, subs=4))
    assert expected(usual) == [today] != [four] and expected(replace(usual, subs=3)) == []


# the simulator


def test_a_wire_moves_one_thing_after_the_other():
    """In the order of sending: what is ready waits for what is not in front of it."""
    clock, late, told = Clock(), Signal(2), []
    wire = Wire(clock, rate=10.0, start=0.5)
    for number, (nbytes, ready) in enumerate([(10, None), (20, late), (10, None)]):
        there = Signal()
        there.wait(lambda number=number: told.append((number, clock.now)))
        wire.send(nbytes, ready, there)
    clock.after(1.0, late.give)
    clock.after(4.0, late.give)
    assert clock.run() == 8.0
    assert told == [(0, 1.5), (1, 6.5), (2, 8.0)] and wire.bytes == 40


def ends(clock, signals):
    """When each is given, in a list that is filled as they are."""
    found = [math.inf] * len(signals)
    for at, signal in enumerate(signals):
        signal.wait(lambda at=at: found.__setitem__(at, clock.now))
    return found


def test_programs_take_tiles_in_turn_and_wait_for_what_they_need():
    clock, shard = Clock(), Signal()
    # two programs: tiles 0, 2 and 1, 3; program 1 waits for the shard, which comes at 5
    Programs(clock, 2, [Tile(), Tile(before=shard), Tile(), Tile()], 2.0)
    clock.after(5.0, shard.give)
    assert clock.run() == 9.0
    # a tile is published behind the products of the next one; the last of a program at its end; the own one waits
    clock, partial = Clock(), Signal()
    given = [Signal() for _ in range(3)]
    found = ends(clock, given)
    Programs(clock, 2, [*(Tile(gives=signal) for signal in given), Tile(behind=partial)], 2.0)
    clock.after(7.0, partial.give)
    assert clock.run() == 7.0
    assert found == [4.0, 2.0, 4.0]


# one group


def test_tiles_come_in_the_order_of_the_kernels():
    """Every unit has all its tiles, one unit after the other, but for the own chunk, whose groups reach over its parts.

    ag_gemm begins with the own shard, gemm_rs ends with it.
    """
    remote, own = events._units(4, 3, 5, 2, 8)
    assert remote == sorted(remote) and [remote.count(unit) for unit in range(6)] == [15] * 6
    assert own == ([0] * 3 + [1] * 3) * 5 and events._units(4, 8, 5, 2, 8)[1] == [0] * 40 + [1] * 40
    for call in (RS, AG):
        problem = call.problem(Cluster(gpus=4), 4)
        group = events.Group(Clock(), Cluster(gpus=4), problem, choice.usual(problem, "copy_engine"))
        each = group.height * group.made.subs * group.width
        make = group._reduce_scatter if call is RS else group._gather
        (tiles,) = make(*events._units(4, group.height, group.width, group.made.subs, 8))
        assert len(tiles) == 4 * each
        needs = [tile.before is not None or tile.behind is not None for tile in tiles]
        assert needs == [False] * (3 * each) + [True] * each if call is RS else needs == [False] * each + [True] * (3 * each)


@pytest.mark.parametrize("call", [RS, AG], ids=lambda call: call.op)
def test_copies_go_to_the_owners_in_the_order_of_the_kernels(call, monkeypatch):
    """gemm_rs: as the chunks are computed. ag_gemm: so that each rank gets its next neighbour's shard first."""
    cluster, sent = Cluster(2, 3), []
    monkeypatch.setattr(events.Group, "_send", lambda self, place, to, *what: sent.append((place, to)))
    problem = call.problem(cluster, 6)
    group = events.Group(Clock(), cluster, problem, choice.usual(problem, "copy_engine"))
    subs, each = group.made.subs, group.height * group.made.subs * group.width
    group.begin()
    for place in range(3):
        tiles = [py_remote_tile(tile, place, group.height, group.width, 6, subs, 8, False) for tile in range(5 * each)]
        computed = list(dict.fromkeys(tile[0] for tile in tiles))
        mine = [to for by, to in sent if by == place]
        assert mine == [to for to in (computed if call is RS else computed[::-1]) for _ in range(subs)]


@pytest.mark.parametrize("call", [RS, AG], ids=lambda call: call.op)
def test_with_fast_links_only_the_product_is_left(call):
    cluster = Cluster(gpus=4, nvlink=FAST)
    problem = call.problem(cluster, 4)
    made = choice.usual(problem, "copy_engine")
    group = events.Group(Clock(), cluster, problem, made)
    waves = math.ceil(group.height * made.subs * group.width * 4 / 132)
    left = waves * group._tile_seconds() + cost.CALL + events.SIDE_STREAM[call.op]
    path, seconds, network = events.group_call(cluster, call, "copy_engine")
    assert path == "copy_engine" and network == 0
    assert left <= seconds <= left + 3 * cost.COPY * made.subs + group._tile_seconds()


@pytest.mark.parametrize("call", [RS, AG], ids=lambda call: call.op)
def test_with_slow_links_only_the_copies_are_left(call):
    cluster = Cluster(gpus=4, nvlink=1e9)
    wire = 3 / 4 * call.m * (call.n if call is RS else call.k) * 2 / 1e9
    seconds = events.group_call(cluster, call, "copy_engine")[1]
    assert wire < seconds < wire + events.gemm_seconds(cluster, call) + 1e-3


@pytest.mark.parametrize("call", [RS, AG], ids=lambda call: call.op)
def test_it_is_all_the_same_to_a_group_where_its_ranks_are(call):
    """Nodes of one GPU over a network like NVLink are a node of as many; and so is any number where links cost nothing."""
    one, like = Cluster(1, 4), dict(net=cost.COPY_RATE, message=cost.COPY)
    alone = events.group_call(one, call, "copy_engine")
    apart = events.group_call(Cluster(4, 1, **like), call)
    assert apart[:2] == alone[:2] and apart[2] > alone[2] == 0
    free = dict(nvlink=FAST, net=FAST, message=cost.COPY)
    several = events.group_call(Cluster(2, 2, **free), call)[1]
    assert several == pytest.approx(events.group_call(replace(one, **free), call, "copy_engine")[1], abs=3 * cost.COPY)
    assert events.group_call(Cluster(2, 2), call)[1] > alone[1], "a slower network"


def test_rates_are_of_the_cluster_and_not_of_what_ops_choose_by():
    before = {name: value for name, value in vars(cost).items() if name.isupper()}
    slow = events.rates(cost.COPY_RATE / 2, 1 / 4)
    assert slow.STORE_RATE == cost.STORE_RATE / 2 and slow.TILE_RATE == cost.TILE_RATE / 4
    small = replace(RS, m=1024, k=6144)  # in_kernel by choice, sequential with fewer rows
    for call in (small, replace(small, m=512)):
        normal, slower = (events.group_call(cluster, call) for cluster in (Cluster(), Cluster(nvlink=cost.COPY_RATE / 8)))
        assert normal[0] == slower[0] and normal[0] != "copy_engine" and 2 * normal[1] < slower[1] < 9 * normal[1]
    assert before == {name: value for name, value in vars(cost).items() if name.isupper()}


# nodes


@pytest.mark.parametrize("call", [RS, AG], ids=lambda call: call.op)
def test_flat_sends_as_many_times_the_bytes_as_a_node_has_gpus(call):
    cluster = Cluster(4, 2)
    chunk = call.m // 8 * (call.n if call is RS else call.k) * 2
    flat, tiers = (events.predict(cluster, call, schedule) for schedule in events.SCHEDULES)
    assert flat.network == 6 * chunk == 2 * tiers.network
    assert flat.seconds > 1.2 * tiers.seconds and (flat.gemm, flat.torch) == (tiers.gemm, tiers.torch)
    assert tiers.efficiency == pytest.approx(1 - (tiers.seconds - tiers.gemm) / (tiers.torch - tiers.gemm))


def test_nodes_follow_each_other_and_messages_go_beside():
    """The time of a node's calls where the network is fast, of its messages where it is slow; gemm_rs then adds up."""
    for call in (RS, AG):
        node = replace(call, m=call.m // 4, part_of=4, **({"k": call.k // 4} if call is RS else {"n": call.n // 4}))
        each = events.group_call(Cluster(1, 2), node)[1]
        fast = events.predict(Cluster(4, 2, net=FAST, message=0.0), call, "hierarchical").seconds
        summed = fast - 4 * each
        # 6 + 3 · 10 + 6 bytes of each element, 2 kernels, 3 messages
        passes = 42 * 512 * call.n / cost.MEMORY_RATE + 2 * cost.TORCH + 3 * events.LOOK
        assert summed == pytest.approx(passes if call is RS else 0.0, abs=1e-12)
        message = 512 * (call.n if call is RS else call.k) * 2 / 1e8 + 1e-3
        slow = events.predict(Cluster(4, 2, net=1e8, message=1e-3), call, "hierarchical").seconds
        assert slow == pytest.approx(each + 3 * message + summed)


def test_one_node_has_one_schedule_and_one_gpu_no_exchange():
    cluster = Cluster(1, 4)
    rows = list(model.predicted(cluster, [1, 2], [RS]))
    assert [(row.cluster.ranks, row.made.schedule) for row in rows] == [(4, "flat"), (8, "flat"), (8, "hierarchical")]
    assert events.predict(cluster, RS, "hierarchical").path == rows[0].made.path == "copy_engine"
    alone = events.predict(Cluster(1, 1), RS, "flat")
    assert alone.efficiency is None and alone.torch == alone.gemm and alone.network == 0
    with pytest.raises(ValueError, match="'ring' is not one of flat, hierarchical"):
        events.predict(cluster, RS, "ring")


def test_a_ring_crosses_nodes_by_all_their_cards_at_once():
    few, many = Cluster(2, 2, net=20e9), Cluster(2, 8, net=20e9)
    for cluster, rate in ((few, 40e9), (many, 160e9), (replace(many, net=1e12), cost.COPY_RATE), (Cluster(4, 1), 50e9)):
        nbytes = RS.m * RS.n * 2 * (cluster.ranks - 1) / cluster.ranks
        exchanged = events.torch_seconds(cluster, RS) - events.gemm_seconds(cluster, RS)
        assert exchanged == pytest.approx(events.COLLECTIVE_START + nbytes / (events.COLLECTIVE * rate))


def test_a_thousand_gpus():
    for call, schedule in ((AG, "flat"), (AG, "hierarchical"), (RS, "hierarchical")):
        made = events.predict(Cluster(128, 8), call, schedule)
        assert made.seconds > max(made.gemm, made.network / Cluster.net) and made.efficiency < 1


def test_the_speed_ups_beside_the_published_ones():
    """docs/nodes.md's row is what the command above it gives."""
    cluster = Cluster(2, 8, nvlink=150e9)
    made = [events.predict(cluster, call, "hierarchical") for call in model.published("gemm_rs")]
    row = " | ".join(f"{one.torch / one.seconds:.2f}" for one in made)
    assert f"| the model of ours | {row} |" in (ROOT / "docs/nodes.md").read_text()


@pytest.mark.slow
def test_the_table_of_more_nodes(capsys):
    """docs/nodes.md's is what its command gives."""
    text = (ROOT / "docs/nodes.md").read_text()
    (arguments,) = re.findall(r"python -m fluxlike model (.*?) +# the table below", text)
    assert model.main(arguments.split()) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| 16384×12288×49152 |")]
    assert len(rows) == 11 and [line for line in text.splitlines() if line.startswith("| 16384×12288×49152 |")] == rows


# the tool


def test_sizes_that_a_call_may_have():
    """Fewer rows or columns than ranks, of which some have none; and what only the parts of a rank must fit."""
    most = 2147418112
    assert [call.m for call in model.parse(["gemm_rs", "--shapes", f"1x1x1,3x1x2,{most}x8x{8 * most}"]).calls] == [1, 3, most]
    (call,) = model.parse(["ag_gemm", "--nodes", "2", "--shapes", f"{most}x{16 * most}x8"]).calls
    assert call.n == 16 * most
    for sizes, said in (((most + 1, 8, 8), "M"), ((8, 8, most + 1), "K"), ((8, 16 * most + 1, 8), "N/R")):
        with pytest.raises(ValueError, match=f"{said}={most + 1} is more than {most}, up to which kernels count; split the call"):
            model.possible(Call("ag_gemm", *sizes), 16)
    assert events.predict(Cluster(1, 8), Call("gemm_rs", 3, 1, 2), "flat").seconds > 0


def test_table_json_and_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    files = ["--json", str(tmp_path / "m.json"), "--plot", str(tmp_path / "m.png")]
    speeds = ["--nvlink-gbps", "1600", "--net-gbps", "200", "--net-us", "5", "--tflops", "500"]
    asked = ["ag_gemm", "--nodes", "1,2", "--gpus-per-node", "2", "--shapes", "4096x4096x4096,8192x4096x4096"]
    assert model.main([*asked, *speeds, *files]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "ag_gemm by the model: NVLink 200 GB/s, network 25 GB/s a GPU, 500 TFLOP/s"
    assert printed[-2:] == [f"written: {tmp_path / name}" for name in ("m.json", "m.png")]
    assert len(printed) == 3 + 6 + 2 and printed[3].startswith("| 4096×4096×4096 | 1 | 2 | one node |")
    data = json.loads((tmp_path / "m.json").read_text())
    cluster = Cluster(1, 2, nvlink=200e9, net=25e9, rate=500e12, message=5e-6)
    wanted = [
        model.as_json(row) for row in model.predicted(cluster, [1, 2], [Call("ag_gemm", m, 4096, 4096) for m in (4096, 8192)])
    ]
    assert data["rows"] == wanted and [row["gpus"] for row in wanted] == [2, 4, 4] * 2
    assert (tmp_path / "m.png").read_bytes()[:4] == b"\x89PNG"


def test_published_cases_are_the_default():
    asked = model.parse(["gemm_rs"])
    assert [call.m for call in asked.calls] == [4096, 8192, 16384, 32768, 65536] and asked.calls[0] == RS
    assert model.parse(["ag_gemm"]).calls[0] == AG and asked.nodes == [1, 2, 4, 8]


def test_no_matplotlib(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert model.main(["gemm_rs", "--nodes", "1", "--shapes", "512x512x512", "--plot", str(tmp_path / "m.png")]) == 1
    assert "matplotlib is missing" in capsys.readouterr().err and not (tmp_path / "m.png").exists()


def test_the_lines_of_a_check():
    """The model's time over the measured one, and E of both; no E where torch exposes nothing."""
    call = Call("gemm_rs", 8, 8, 8)
    measured, modelled = {"gemm": 1.0, "torch": 2.0, "copy_engine": 1.25}, {"gemm": 1.1, "torch": 1.6, "copy_engine": 1.35}
    rows = [model.Compared(4, call, name, measured[name] * 1e-3, modelled[name] * 1e-3) for name in measured]
    (line, *offs) = model.check_lines(rows)[2:]
    assert line == "| 4, 8×8×8 | 1000 (1100, +10.0%) | 2000 (1600, -20.0%) | 1250 (1350, +8.0%) | 0.75 (0.50) |"
    assert offs[0] == "gemm: off by 10.0% in the median of 1 shape, by 10.0% at most"
    level = [replace(row, measured=1e-3) if row.name == "torch" else row for row in rows]
    assert model.check_lines(level)[2].endswith("| – (0.50) |")


def test_check(capsys):
    assert model.main(["ag_gemm", "--check", *map(str, RECORDS)]) == 0
    said = capsys.readouterr()
    passed = [f"model: {path} is passed over: it is of gemm_rs, not of ag_gemm" for path in RECORDS[:2]]
    printed = said.out.splitlines()
    assert said.err.splitlines() == passed and len(printed) == 2 + 14 + 3 and printed[-1].startswith("copy_engine: off by ")
    assert model.main(["gemm_rs", "--check", str(RECORDS[2])]) == 2
    assert "no record of gemm_rs with times in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"dtype": "float16"}, "is of float16, and the model's product of bfloat16; give records of bfloat16"),
        ({"environment": {"nodes": 2}}, "was measured on 2 nodes, and --check is of calls in one; give records of one node"),
    ],
)
def test_records_of_what_is_not_modelled(facts, said, capsys, tmp_path):
    path = tmp_path / "record.json"
    path.write_text(json.dumps(json.loads(RECORDS[0].read_text()) | facts))
    assert model.main(["gemm_rs", "--check", str(path)]) == 2
    assert capsys.readouterr().err == f"model: {path} {said}\n"
    split = ROOT / "docs/measured/2026-11-22-gemm_rs-nodes-2x1.json"
    assert model.main(["gemm_rs", "--check", str(split)]) == 2 and "on 2 nodes" in capsys.readouterr().err


BROKEN = [
    json.dumps({"op": "gemm_rs", "dtype": "bfloat16", "environment": {}, "ranks": 4, "shapes": [shape]})
    for shape in ({}, {"m": 8, "n": 8, "k": 8, "methods": []}, {"m": 8, "n": 8, "k": 8, "methods": {"gemm": {"status": "ok"}}})
]


@pytest.mark.parametrize("text", (None, "{}", "[1]", "no JSON", *BROKEN))
def test_what_is_no_record(text, capsys, tmp_path):
    path = tmp_path / "record.json"
    if text is not None:
        path.write_text(text)
    assert model.main(["gemm_rs", "--check", str(path)]) == 2
    assert f"model: {path} is no record of bench" in capsys.readouterr().err


def test_a_record_without_times_is_none_to_check(capsys, tmp_path):
    """Of the CPU heap bench writes null for all of them."""
    record = json.loads(RECORDS[2].read_text())
    for shape in record["shapes"]:
        for method in shape["methods"].values():
            method["ms"] = None
    (tmp_path / "record.json").write_text(json.dumps(record))
    assert model.main(["ag_gemm", "--check", str(tmp_path / "record.json")]) == 2
    assert "no record of ag_gemm with times in" in capsys.readouterr().err


def test_a_picture_of_a_kind_that_there_is_not(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit) as end:
        model.main(["gemm_rs", "--nodes", "1", "--shapes", "512x512x512", "--plot", str(tmp_path / "m.what")])
    assert end.value.code == 2 and "m.what': matplotlib writes no .what; take one of " in capsys.readouterr().err


def test_no_picture_without_an_exchange(capsys, tmp_path):
    """Of one GPU there is no E; where only one node is without, the others are drawn."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "one.png"
    asked = ["gemm_rs", "--gpus-per-node", "1", "--shapes", "512x512x512", "--plot", str(path)]
    assert model.main([*asked, "--nodes", "1"]) == 1
    assert capsys.readouterr().err.startswith("model: no plot: there is no E") and not path.exists()
    assert model.main([*asked, "--nodes", "1,2"]) == 0 and path.exists()


def test_series_without_points_are_left_out(monkeypatch, tmp_path):
    """matplotlib would take the style for the data, and its letters for a scale."""
    axes_module = pytest.importorskip("matplotlib.axes")
    drawn, plot = [], axes_module.Axes.plot
    monkeypatch.setattr(axes_module.Axes, "plot", lambda self, *points, **how: drawn.append(points) or plot(self, *points, **how))
    rows = list(model.predicted(Cluster(1, 1), [1, 2], [RS]))
    assert model.draw([rows[0], rows[2]], tmp_path / "m.png") is None
    assert drawn == [((2,), (rows[2].made.efficiency,), "-")]


@pytest.mark.parametrize("option", ("--json", "--plot"))
def test_a_file_that_cannot_be_written(option, capsys, tmp_path):
    """Said before anything is predicted; 1 where it shows only then. A folder that is not there is made."""
    if option == "--plot":
        pytest.importorskip("matplotlib")
    (tmp_path / "file").touch()
    asked = ["gemm_rs", "--nodes", "1,2", "--shapes", "512x512x512", option]
    with pytest.raises(SystemExit) as end:
        model.main([*asked, str(tmp_path / "file" / "file.png")])
    printed = capsys.readouterr()
    assert end.value.code == 2 and not printed.out and f"{option} {tmp_path / 'file' / 'file.png'}: " in printed.err

    def full(*_):
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fluxlike.tools.topo.write", full)
        patch.setattr(model, "draw", full)
        assert model.main([*asked, str(tmp_path / "file.png")]) == 1
    printed = capsys.readouterr()
    assert "512×512×512" in printed.out and printed.err.startswith("model: ") and "No space left" in printed.err
    assert model.main([*asked, str(tmp_path / "new" / "file.png")]) == 0 and (tmp_path / "new" / "file.png").stat().st_size


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nodes", "1,x"], "--nodes '1,x' is no list of numbers"),
        (["--nodes", "129"], "--nodes 129 of 8 GPUs are not 1 to 1024 GPUs"),
        (["--nodes", "0"], "--nodes 0 of 8 GPUs"),
        (["--gpus-per-node", "-1"], "--gpus-per-node -1 must be above 0"),
        (["--net-gbps", "nan"], "--net-gbps nan must be above 0"),
        (["--net-us", "-1"], "--net-us -1 must not be below 0"),
        (["--net-us", "nan"], "--net-us nan must not be below 0"),
        (["--tflops", "inf"], "--tflops inf must be above 0 and finite"),
        *(
            ([f"--{name}", value], f"--{name} {float(value):g} is of no machine; give one from 1e-06 to 1e+09")
            for name, value in (("tflops", "1e-300"), ("net-gbps", "1e-320"), ("nvlink-gbps", "1e308"))
        ),
        (["--net-us", "1e10"], "--net-us 1e+10 is of no machine; give one from 0 to 1e+09"),
        (["--json", "a.png", "--plot", "./a.png"], "--json and --plot are both ./a.png; name a file for each"),
        (["--shapes", ""], "--shapes: "),
        (["--shapes", "1x2"], "--shapes: '1x2' is not a shape"),
        (["--shapes", "2147418113x8x8"], "2147418113x8x8: M=2147418113 is more than 2147418112, up to which kernels count; split"),
        (["--shapes", "8x2147418113x8"], "8x2147418113x8: N=2147418113 is more than"),
        (["--nodes", "2,1", "--shapes", "8x8x17179344897"], "8x8x17179344897: K/R=2147418113 is more than"),
        (["--plot", "noext"], "argument --plot: 'noext' is without a format; name a file, such as noext.png"),
        (["--check", "r.json", "--nodes", "1"], "--check prints how records of one node compare; leave out --nodes"),
        (["--check", "r.json", "--gpus-per-node", "4"], "leave out --gpus-per-node"),
        (["--check", "r.json", "--json", "x.json"], "leave out --json"),
        (["--check", "r.json", "--plot", "x.png"], "leave out --plot"),
        (["--check", "r.json", "--shapes", "8x8x8"], "leave out --shapes"),
    ],
)
def test_wrong_arguments(arguments, said, capsys):
    with pytest.raises(SystemExit) as end:
        model.parse(["gemm_rs", *arguments])
    assert end.value.code == 2 and said in capsys.readouterr().err

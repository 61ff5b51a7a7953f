"""Detection with made-up sources: torch, NVML and peer access that agree, disagree, fail and lie; the probe with a made-up clock.

No test here needs a GPU, so none shows that the real torch and NVML answer as these do."""

import io
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from fluxlike.__main__ import TOOLS
from fluxlike.__main__ import main as fluxlike_main
from fluxlike.tools import topo, topo_report
from fluxlike.topology import LinkMatrix, detect, measure, minmax, plan_trees, presets, probe
from fluxlike.topology.matrix import load

P3 = [[max(0, int(code) - 1) for code in row] for row in presets.P3]  # NVLinks


class NvmlError(Exception):
    pass


class FakeNvml:
    """cuda.bindings.nvml of a machine whose GPU i has the wires ``wires[i]``: ("gpu", bus), ("switch",), ("down",) or ("mute",).

    NVML numbers the GPUs backwards, so that whoever took its numbers for CUDA's would be wrong.
    """

    NVLINK_MAX_LINKS = 18
    NvmlError = NvmlError
    EnableState = SimpleNamespace(DISABLED=0, ENABLED=1)
    IntNvLinkDeviceType = SimpleNamespace(GPU=0, IBMNPU=1, SWITCH=2, UNKNOWN=255)

    def __init__(self, wires, version=6):
        self.wires, self.version, self.inits = wires, version, 0

    def init_v2(self):
        self.inits += 1

    def shutdown(self):
        self.inits -= 1

    def device_get_handle_by_uuid(self, uuid):
        assert uuid.startswith("GPU-uuid") and self.inits
        return 1000 - int(uuid.removeprefix("GPU-uuid"))

    def wire(self, handle, link):
        mine = self.wires[1000 - handle]
        if link >= len(mine):
            raise NvmlError("not supported")
        return mine[link]

    def device_get_pci_info_v3(self, handle):
        return SimpleNamespace(bus_id=f"00000000:{0x1A + 1000 - handle:02X}:00.0")

    def device_get_nvlink_state(self, handle, link):
        return int(self.wire(handle, link)[0] != "down")

    def device_get_nvlink_remote_device_type(self, handle, link):
        what = self.wire(handle, link)[0]
        if what == "mute":
            raise NvmlError("no permission")
        return {"gpu": 0, "switch": 2}[what]

    def device_get_nvlink_remote_pci_info_v2(self, handle, link):
        return SimpleNamespace(bus_id=f"0000:{0x1A + self.wire(handle, link)[1]:02x}:00.0")

    def device_get_nvlink_version(self, handle, link):
        return self.version


def fake_torch(counts, n=None, peers=None):
    n = len(counts) if n is None else n

    def connectivity(device_type, connection):
        assert (device_type, connection) == ("CUDA", "nvlink")
        if counts is None:
            raise RuntimeError("DMA connectivity detector for cuda over nvlink is not available")
        return SimpleNamespace(matrix=counts)

    cuda = SimpleNamespace(
        is_available=lambda: n > 0,
        device_count=lambda: n,
        can_device_access_peer=lambda i, j: peers is None or peers[i][j],
        get_device_name=lambda i: "Fake",
        get_device_properties=lambda i: SimpleNamespace(uuid=f"uuid{i}"),
    )
    inner = SimpleNamespace(
        _autograd=SimpleNamespace(DeviceType=SimpleNamespace(CUDA="CUDA")),
        _distributed_c10d=SimpleNamespace(_detect_dma_connectivity=connectivity),
    )
    return SimpleNamespace(cuda=cuda, _C=inner)


def wired(counts):
    return [[("gpu", j) for j, links in enumerate(row) for _ in range(links)] for row in counts]


def found(torch, nvml):
    def load():
        if nvml is None:
            raise ModuleNotFoundError("No module named 'cuda'")
        return nvml

    return detect.merge(detect.look(torch, load))


def all_pairs(n, links):
    return [[links * (i != j) for j in range(n)] for i in range(n)]


def test_sources_that_agree():
    nvml = FakeNvml(wired(P3))
    matrix = found(fake_torch(P3), nvml)
    like = LinkMatrix.preset("p3.16xlarge")
    assert nvml.inits == 0 and matrix.notes == () and matrix.name == "8 × Fake"
    assert matrix.bandwidth == like.bandwidth
    assert [[kind or "" for kind in row] for row in matrix.kind] == [[k.replace("host", "pcie") for k in row] for row in like.kind]
    assert measure(matrix, plan_trees(matrix)).load == 2.5


def test_a_switch_is_told_from_wires():
    switch = found(fake_torch(all_pairs(8, 18)), FakeNvml([[("switch",)] * 18] * 8))
    assert (switch.bandwidth, switch.kind, switch.port) == (
        LinkMatrix.preset("nvswitch-8").bandwidth, LinkMatrix.preset("nvswitch-8").kind, (450.0,) * 8
    )  # fmt: skip
    mesh = found(fake_torch(all_pairs(4, 4)), FakeNvml(wired(all_pairs(4, 4))))
    assert mesh.kind[0][1] == "nvlink" and mesh.port == (300.0,) * 4 and not switch.notes + mesh.notes


def test_without_nvml_equal_pairs_are_taken_for_a_switch():
    matrix = found(fake_torch(all_pairs(4, 4)), None)
    assert matrix.kind[0][1] == "nvswitch" and matrix.port == (100.0,) * 4
    assert [note for note in matrix.notes if "NVML cannot be asked (ModuleNotFoundError" in note]
    assert [note for note in matrix.notes if "taken for a switch" in note]
    unlike = found(fake_torch(P3), None)
    assert unlike.kind[0][1] == "nvlink" and not [note for note in unlike.notes if "switch" in note]


def test_the_weaker_source_counts_and_the_notes_say_so():
    """A link that is down, which torch counts; and CUDA 9.2's kind of lie, a source that sees no links at all."""
    wires = wired(P3)
    wires[0][wires[0].index(("gpu", 3))] = ("down",)
    matrix = found(fake_torch(P3), FakeNvml(wires))
    assert matrix.bandwidth[0][3] == matrix.bandwidth[3][0] == 25 and matrix.bandwidth[0][4] == 50
    assert matrix.notes == ("GPUs 0-3: torch counts 2 NVLinks and NVML 1; 1 are taken",)
    blind = found(fake_torch(all_pairs(8, 0)), FakeNvml(wired(P3)))
    assert {kind for row in blind.kind for kind in row} == {"", "pcie"}
    assert [note for note in blind.notes if "torch counts 0 NVLinks and NVML 2; 0 are taken" in note]
    assert not measure(blind, plan_trees(blind)).depth > 3


def test_peer_access_has_the_last_word():
    peers = [[i // 4 == j // 4 for j in range(8)] for i in range(8)]
    matrix = found(fake_torch(P3, peers=peers), FakeNvml(wired(P3)))
    assert (matrix.kind[0][4], matrix.kind[0][1], matrix.bandwidth[0][4]) == ("host", "nvlink", 10)
    assert "GPUs 0-4, 1-5, 2-6, 3-7: NVLinks and no peer access; taken for paths through the host" in matrix.notes
    one_way = [[(i, j) != (0, 1) for j in range(8)] for i in range(8)]
    assert found(fake_torch(P3, peers=one_way), FakeNvml(wired(P3))).kind[1][0] == "host"


def test_with_torch_or_nvml_alone_and_with_neither():
    no_torch = found(fake_torch(None, n=8), FakeNvml(wired(P3)))
    assert no_torch.bandwidth == LinkMatrix.preset("p3.16xlarge").bandwidth
    assert [note for note in no_torch.notes if note.startswith("torch's DMA connectivity cannot be asked (RuntimeError")]
    nothing = found(fake_torch(None, n=8), None)
    assert {kind for row in nothing.kind for kind in row} == {"", "pcie"}
    assert len(nothing.notes) == 3 and "no source counts NVLinks" in nothing.notes[2]
    strange = found(fake_torch(all_pairs(4, 1), n=8), FakeNvml(wired(P3)))
    assert [note for note in strange.notes if "it knows 4 GPUs, and CUDA shows 8" in note]


def test_links_that_lead_nowhere_do_not_count():
    """To a GPU that CUDA does not show, to what NVML does not tell, and unequal ends of switches."""
    wires = [[("gpu", 1), ("gpu", 5)], [("gpu", 0), ("mute",)]]
    assert found(fake_torch(all_pairs(2, 1)), FakeNvml(wires)).bandwidth[0][1] == 25
    uneven = found(
        fake_torch(all_pairs(3, 9)), FakeNvml([[("switch",)] * 18, [("switch",)] * 18, [("switch",)] * 9 + [("down",)] * 9])
    )
    assert (uneven.bandwidth[0][1], uneven.bandwidth[0][2]) == (225, 225) and uneven.port == (225,) * 3
    assert len(uneven.notes) == 1 and "0-1: torch counts 9 NVLinks and NVML 18" in uneven.notes[0]


@pytest.mark.parametrize(("version", "rate"), ((1, 20), (2, 25), (6, 25), (7, 50), (99, 25)))
def test_the_rate_of_a_version(version, rate):
    matrix = found(fake_torch(all_pairs(2, 1)), FakeNvml(wired(all_pairs(2, 1)), version))
    assert matrix.bandwidth[0][1] == rate and bool(matrix.notes) == (version == 99)
    both = FakeNvml(wired(all_pairs(2, 1)))
    both.device_get_nvlink_version = lambda handle, link: (version, 7)[1000 - handle]
    assert found(fake_torch(all_pairs(2, 1)), both).bandwidth[0][1] == rate, "a link is as fast as its slower end"


def test_without_gpus(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", fake_torch(None, n=0))
    for name in ("FLUXLIKE_TOPOLOGY", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match=r"no CUDA GPU.*FLUXLIKE_TOPOLOGY"):
        LinkMatrix.detect()
    named = "name a topology by FLUXLIKE_TOPOLOGY, or name a preset: python -m fluxlike topo p3.16xlarge"
    unprobed = "leave out --probe, which measures copies between the GPUs of a machine"  # of no topology that is named
    for options, remedy in (([], named), (["--probe"], unprobed)):
        assert topo.main(options) == 1
        assert capsys.readouterr().err == f"topo: torch sees no CUDA GPU, so there are no links to detect; {remedy}\n"


def test_a_machine_that_is_too_large_is_refused_before_it_is_shown(capsys):
    assert topo.main(["ring-17"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "plans are made for up to 16" in said.err
    with pytest.raises(SystemExit):
        topo.main(["--help"])
    assert "trees are planned for up to 16 GPUs" in " ".join(capsys.readouterr().out.split())


def test_detection_is_what_is_used_without_a_name(monkeypatch, capsys):
    monkeypatch.delenv("FLUXLIKE_TOPOLOGY", raising=False)
    monkeypatch.setitem(sys.modules, "torch", fake_torch(P3))
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvml", FakeNvml(wired(P3)))
    assert topo.main(["--k", "1"]) == 0
    assert "8 × Fake: 8 GPUs" in (said := capsys.readouterr().out) and "root 0, weight 20" in said


# the probe


class Machine:
    """Copies as fast as a matrix says, the first of each pair slow, one direction of one pair slower."""

    def __init__(self, rates):
        self.rates, self.seen = rates, set()

    def __call__(self, source, target, nbytes):
        slow = 100 if (source, target) not in self.seen else 1
        self.seen.add((source, target))
        return slow * nbytes / self.rates[source][target] / 1e9


def test_several_probes_at_once_are_refused(monkeypatch, capsys):
    """Their copies would share the links, and the matrix would have what is left to each."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(topo, "probed", lambda: LinkMatrix.preset("nvswitch-4"))
    with pytest.raises(SystemExit) as end:
        topo.main(["--probe"])
    assert end.value.code == 2 and "--probe copies in one process, and WORLD_SIZE=2" in capsys.readouterr().err
    assert topo.main(["p3.8xlarge"]) == 0


def test_a_probe_takes_the_slower_direction_of_warm_copies():
    rates = [[0, 23.0, 9.0], [22.0, 0, 47.0], [9.0, 49.0, 0]]
    measured = probe.probe(Machine(rates), 3, nbytes=1 << 20, repeats=1)
    assert [[round(rate, 6) for rate in row] for row in measured] == [[0, 22, 9], [22, 0, 47], [9, 47, 0]]


def test_what_a_probe_changes():
    matrix = LinkMatrix.from_array([[0, 2, 1], [2, 0, 3], [1, 3, 0]])
    usual = probe.probed(matrix, [[0, 22, 12.34], [22, 0, 47], [12.34, 47, 0]])
    assert usual.bandwidth == ((0, 25, 12), (25, 0, 50), (12, 50, 0)) and usual.notes == () and usual.port == (37, 75, 62)
    broken = probe.probed(matrix, [[0, 22, 9], [22, 0, 11], [9, 11, 0]])
    assert broken.bandwidth[1][2] == 11 and broken.notes == (
        "GPUs 1 and 2: 11 GB/s measured where 50 are nominal; the measured ones are taken",
    )
    with pytest.raises(ValueError, match="square of 3"):
        probe.probed(matrix, [[0]])


@pytest.mark.parametrize(
    ("machine", "pair", "least"),
    (("dgx-1-dead-link", (0, 4), 50), ("ring-8", (0, 1), 20), ("p3.16xlarge", (0, 4), 50), ("nvswitch-4", (1, 2), 40)),
)
def test_a_link_that_is_nearly_dead_is_not_preferred_for_its_kind(machine, pair, least):
    """It would save levels, for which a plan takes any link of the fastest kinds."""
    matrix = load(machine)
    measured = [[matrix.bandwidth[i][j] for j in range(len(matrix))] for i in range(len(matrix))]
    measured[pair[0]][pair[1]] = measured[pair[1]][pair[0]] = 0.5
    bad = probe.probed(matrix, measured)
    assert bad.kind[pair[0]][pair[1]] == bad.kind[pair[1]][pair[0]] == "host"
    assert bad.notes[-1].endswith("taken, and as that is what a path through the host may have, it counts as such a path")
    trees = plan_trees(bad)
    assert not any({a, b} == set(pair) for tree in trees for a, b in tree.edges)
    assert measure(bad, trees).gb_s >= least


# the tool


def test_the_tool_prints_plan_and_matrix(capsys, tmp_path, monkeypatch):
    saved, written = tmp_path / "m.json", tmp_path / "plan.json"
    arguments = ["pcie-4+4", "--k", "2", "--objective", "mxnet", "--save", str(saved), "--json", str(written)]
    assert "topo" in TOOLS and fluxlike_main(["topo", *arguments]) == 0
    said = capsys.readouterr().out
    assert "pcie-4+4: 8 GPUs" in said and "GPU7" in said and "PCIe 10" in said and "mxnet: 2 trees of depth 3" in said
    data = json.loads(written.read_text())
    assert (
        data["options"]["objective"] == "mxnet"
        and [tree["root"] for tree in data["trees"]] == [0, 1]
        and data["environment"]["date"]
    )
    monkeypatch.setenv("FLUXLIKE_TOPOLOGY", str(saved))
    assert topo.main(["--roots", "3"]) == 0
    said = capsys.readouterr().out
    assert "pcie-4+4: 8 GPUs" in said and "root 3, weight 12.125: 3→" in said


def test_the_tool_makes_the_table(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(presets, "NAMES", ("p3.8xlarge", "nvswitch-4"))
    monkeypatch.setattr(minmax, "EFFORT_16", 2_000)
    assert topo.main(["--all", "--random", "1", "--json", str(tmp_path / "all.json")]) == 0
    said = capsys.readouterr().out
    assert "| p3.8xlarge | minmax | 2 | 1.5 | 1.5 |" in said and "| nvswitch-4 | mxnet, backtrack | 2 |" in said
    data = json.loads((tmp_path / "all.json").read_text())
    assert len(data["rows"]) == 6 and [row["gpus"] for row in data["random"]] == [8, 16] and data["environment"]["machine"]
    assert (
        all(row["plan_s_max"] > 0 and row["load_over_bound_max"] >= 1 for row in data["random"]) and "gpus 16, machines 1" in said
    )


def test_a_path_that_is_no_text(tmp_path, capsys):
    """Bytes that are not UTF-8, as a file system has them; the record has them, too, among the arguments."""
    path = tmp_path / "\udcff.json"
    assert fluxlike_main(["topo", "p3.8xlarge", "--json", str(path)]) == 0
    assert json.loads(path.read_text())["environment"]["command"].count(str(path)) == 1
    assert "written: " in capsys.readouterr().out


def test_a_reader_that_leaves_is_no_error_of_the_tool(monkeypatch):
    """The program's end sees to that, whichever tool it is."""

    def prints(*_):
        print("a line", flush=True)

    reads, writes = os.pipe()
    os.close(reads)
    monkeypatch.setattr(topo, "one", prints)
    with open(os.dup(writes), "wb", buffering=0) as unread, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(unread, write_through=True))
        with pytest.raises(BrokenPipeError):
            topo.main(["p3.8xlarge"])
    os.close(writes)


def test_the_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "x.png"
    assert topo.main(["p3.8xlarge", "--png", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG") and f"written: {path}" in capsys.readouterr().out


def test_without_matplotlib_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    matrix = LinkMatrix.preset("p3.8xlarge")
    trees = plan_trees(matrix)
    why = topo_report.draw(matrix, trees, measure(matrix, trees), tmp_path / "y.png")
    assert "pip install matplotlib" in (why or "") and not (tmp_path / "y.png").exists()
    assert topo.main(["p3.8xlarge", "--png", str(tmp_path / "y.png")]) == 1, "a file that was asked for and is not there"
    assert capsys.readouterr().err == f"topo: {why}\n"


def test_a_terminal_that_knows_ascii_only():
    command = [sys.executable, "-m", "fluxlike", "topo", "p3.8xlarge"]
    environ = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stdout and "?" in done.stdout, done.stderr


@pytest.mark.parametrize(
    "arguments",
    (
        ["--all", "--k", "1"], ["--random", "2"], ["p3.8xlarge", "--probe"], ["--roots", "a"], ["--objective", "best"],
        ["p3.8xlarge", "--backtrack"], ["p3.8xlarge", "--link-usage-penalty", "0.5"], ["p3.8xlarge", "--roots", ""],
        ["p3.8xlarge", "--save", "./a.json", "--json", "a.json"], ["p3.8xlarge", "--json", "./a.png", "--png", "a.png"],
    ),
)  # fmt: skip
def test_arguments_that_make_no_sense(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        topo.main(arguments)
    assert end.value.code == 2 and "error: " in capsys.readouterr().err


@pytest.mark.parametrize("more", ([], ["--all"]))
def test_a_number_of_machines_that_is_none(more, capsys):
    with pytest.raises(SystemExit):
        topo.main([*more, "--random", "-1"])
    assert "--random -1 is below 0; give a number of machines" in capsys.readouterr().err


def test_more_trees_than_anybody_needs(capsys):
    """Several for each GPU are planned, though; how many the search can have is said before it has begun."""
    for option, given, says in (
        ("--k", "1025", "--k 1025 is above 1024 trees; give that or less, or leave it out for one for each GPU"),
        ("--roots", ",".join(["0"] * 1025), "--roots names 1025, above 1024 trees; name that many or fewer"),
    ):
        with pytest.raises(SystemExit) as end:
            topo.main(["nvswitch-4", option, given])
        assert end.value.code == 2 and says in capsys.readouterr().err
    for option, given in (("--k", "1024"), ("--roots", ",".join(["0"] * 1024))):
        assert topo.main(["nvswitch-2", option, given]) == 0 and "minmax: 1024 trees" in capsys.readouterr().out


def test_pictures_are_files_with_a_format(capsys, tmp_path):
    """Said before anything is planned, and not the name of a file that would be another."""
    for name, why in (("", "is a folder"), ("/new/", "is a folder"), ("/x", "is without a format"), ("/x.", "is without a format")):
        path = f"{tmp_path}{name}"
        with pytest.raises(SystemExit):
            topo.main(["p3.8xlarge", "--png", path])
        said = capsys.readouterr()
        assert f"argument --png: {path!r} {why}; name a file, such as {tmp_path}" in said.err and not said.out
    assert not list(tmp_path.iterdir())


def test_a_matrix_is_saved_where_it_is_found(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        topo.main(["nvswitch-4", "--save", "mine"])
    said = capsys.readouterr().err
    assert "FLUXLIKE_TOPOLOGY would take 'mine' for a preset; name it mine.json, or ./mine" in said
    for name in ("mine.json", "./mine"):
        assert topo.main(["nvswitch-4", "--save", name]) == 0
        monkeypatch.setenv("FLUXLIKE_TOPOLOGY", name)
        assert topo.main(["--k", "1"]) == 0 and "nvswitch-4: 4 GPUs" in capsys.readouterr().out


def test_errors_are_lines(capsys, tmp_path):
    """The status is 2 where what was asked for is wrong, and 1 where a file that could be written then is not."""
    with pytest.raises(SystemExit) as end:
        topo.main(["p3.8xlarge", "--save", str(tmp_path)])
    said = capsys.readouterr()
    assert end.value.code == 2 and "it is a folder; name a file" in said.err and not said.out

    def full(*_):
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LinkMatrix, "save", full)
        assert topo.main(["p3.8xlarge", "--save", str(tmp_path / "full.json")]) == 1
    assert "No space left" in capsys.readouterr().err
    assert topo.main(["p3.8xlarge", "--save", str(tmp_path / "new" / "p3.json")]) == 0 and (tmp_path / "new" / "p3.json").exists()
    capsys.readouterr()
    assert topo.main(["p4d"]) == 2
    assert topo.main(["p3.8xlarge", "--k", "0"]) == topo.main(["p3.8xlarge", "--roots", "9"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("topo: no topology is called 'p4d'")
    assert said[1:] == [
        "topo: k=0 is not a whole number of trees, 1 or more",
        "topo: roots=[9] must name GPUs, from 0 to 3, one at least",
    ]


def test_a_picture_of_a_kind_that_there_is_not(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit) as end:
        topo.main(["p3.8xlarge", "--png", str(tmp_path / "x.what")])
    said = capsys.readouterr()
    assert end.value.code == 2 and "x.what': matplotlib writes no .what; take one of " in said.err and ", png, " in said.err
    assert not said.out and topo.main(["p3.8xlarge", "--png", str(tmp_path / "x.PNG")]) == 0


@pytest.mark.parametrize("tool", ("topo", "model"))
def test_help_says_the_exit_statuses(tool, capsys):
    with pytest.raises(SystemExit) as end:
        fluxlike_main([tool, "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0 and "Exit status: 1 if " in said and "; 2 for wrong arguments, such as " in said


@pytest.mark.parametrize("more", (["--objective", "mxnet"], ["--backtrack"], ["--link-usage-penalty", "0.5"], ["--k", "0"]))
def test_all_presets_take_no_options_of_one_plan(more, capsys):
    with pytest.raises(SystemExit) as end:
        topo.main(["--all", *more])
    assert end.value.code == 2 and "--all plans the presets as they are" in capsys.readouterr().err

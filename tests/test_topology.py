"""Link matrices, presets, files, and the planner of trees: its properties on random machines, its figures on known ones."""

import itertools
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import networkx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fluxlike.topology import LinkMatrix, Tree, current, load, measure, minmax, mxnet, plan_trees, presets, trees_for
from fluxlike.topology.canonical import canonical
from fluxlike.topology.graph import Graph, _smallest_cut, least_load
from fluxlike.topology.matrix import MAX_BYTES

ROOT = Path(__file__).resolve().parents[1]
P3 = presets.P3
METHODS = ({}, {"objective": "mxnet"}, {"objective": "mxnet", "backtrack": True})


@pytest.fixture
def little_effort(monkeypatch):
    """Properties hold however long the search is."""
    monkeypatch.setattr(minmax, "EFFORT_8", 2_000)
    monkeypatch.setattr(minmax, "EFFORT_16", 2_000)
    monkeypatch.setattr(minmax, "BEAM_16", 2)


def joined(n, edges):
    """A matrix of single and double NVLinks; edges are (a, b) or (a, b, code)."""
    codes = [[0] * n for _ in range(n)]
    for a, b, *code in edges:
        codes[a][b] = codes[b][a] = code[0] if code else 2
    return LinkMatrix.from_array(codes)


@st.composite
def machines(draw, most=16):
    """Connected: a random tree, and other links of a random density."""
    n = draw(st.integers(2, most))
    rng = random.Random(draw(st.integers(0, 2**32)))
    density = draw(st.sampled_from((0.0, 0.1, 0.3, 0.6, 1.0)))
    edges = [(rng.randrange(i), i, rng.choice((2, 3))) for i in range(1, n)]
    edges += [(a, b, rng.choice((2, 3))) for a in range(n) for b in range(a) if rng.random() < density]
    return joined(n, edges).relabelled(rng.sample(range(n), n))


def check(matrix, tree, shallow=None):
    """Everything that makes a tree one: spanning, acyclic, rooted, in order, over links that exist."""
    n, graph = len(matrix), Graph(matrix)
    assert len(tree.edges) == len(tree.levels) == n - 1
    known = {tree.root}
    for level, step in enumerate(tree.steps, 1):
        busy = [gpu for edge in step for gpu in edge]
        assert step and len(set(busy)) == len(busy), f"a GPU has two transfers in level {level}"
        for parent, child in step:
            assert parent in known and child not in known, "a GPU sends what it does not know, or hears twice"
            assert matrix.bandwidth[parent][child] > 0 and graph.adjacent[parent] >> child & 1
        known |= set(busy)
    assert known == set(range(n)) and tree.depth == max(tree.levels, default=0) <= max(1, n - 1)
    assert tree.weight == pytest.approx(sum(graph.weight[a][b] for a, b in tree.edges))
    assert tree.height <= tree.depth
    if shallow is not None:
        assert tree.depth == shallow


def naive_depth(matrix, root):
    """The least number of levels, by trying every set of transfers."""
    n = len(matrix)
    links = [[j for j in range(n) if matrix.bandwidth[i][j]] for i in range(n)]

    def tellings(tellers, informed):
        if not tellers:
            yield informed
            return
        yield from tellings(tellers[1:], informed)
        for j in links[tellers[0]]:
            if j not in informed:
                yield from tellings(tellers[1:], informed | {j})

    level, sets = 0, {frozenset([root])}
    while not any(len(informed) == n for informed in sets):
        sets = {more for informed in sets for more in tellings(sorted(informed), informed)}
        level += 1
    return level


# the planner's properties


@settings(max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(matrix=machines(), seed=st.integers(0, 3), method=st.sampled_from(METHODS), k=st.sampled_from((None, 1, 3)))
def test_trees_are_trees_and_cost_the_same_under_other_numbers(little_effort, matrix, seed, method, k):
    n = len(matrix)
    roots = [i % n for i in range(k or n)]
    trees = plan_trees(matrix, k, seed=seed, **method)
    assert [tree.root for tree in trees] == roots
    least = {root: Graph(matrix).depth(root) for root in set(roots)}
    for tree in trees:
        shallow = least[tree.root]
        if method.get("objective") == "mxnet" and not method.get("backtrack"):
            shallow = max(shallow, (n - 1).bit_length())
        check(matrix, tree, shallow)
    cost = measure(matrix, trees)
    assert cost.load >= cost.least * (1 - 1e-9)
    assert trees == plan_trees(matrix, k, seed=seed, **method), "the same call, other trees"
    order = random.Random(seed).sample(range(n), n)
    place = [order.index(root) for root in roots]
    other = measure(matrix.relabelled(order), plan_trees(matrix.relabelled(order), seed=seed, roots=place, **method))
    assert (other.depth, sorted(other.ports)) == (cost.depth, sorted(cost.ports))
    assert (other.load, other.weight) == pytest.approx((cost.load, cost.weight))


@settings(max_examples=25, derandomize=True)
@given(matrix=machines(most=7), data=st.data())
def test_depth_is_the_least_there_is(matrix, data):
    root = data.draw(st.integers(0, len(matrix) - 1))
    assert Graph(matrix).depth(root) == naive_depth(matrix, root)


@pytest.mark.parametrize("n", (9, 12, 15, 16))
@pytest.mark.parametrize("more", (0, 6))
def test_a_hidden_tree_of_least_depth_is_found(n, more, little_effort):
    """The only ways to ⌈log2 n⌉ levels in a sparse graph."""
    rng = random.Random(n + more)
    order = rng.sample(range(n), n)
    edges = [(order[i], order[i + half]) for half in (1, 2, 4, 8) for i in range(min(half, n - half))]
    edges += [tuple(rng.sample(range(n), 2)) for _ in range(more)]
    matrix = joined(n, edges)
    for method in METHODS:
        check(matrix, plan_trees(matrix, roots=order[:1], **method)[0], 4)


SHAPES = {
    "star": joined(16, [(0, i) for i in range(1, 16)]),
    "path": joined(16, [(i, i + 1) for i in range(15)]),
    "ring": joined(16, [(i, (i + 1) % 16) for i in range(16)]),
    "grid 3×2": joined(6, [(0, 1), (1, 2), (3, 4), (4, 5), (0, 3), (1, 4), (2, 5)]),
    "two hubs": joined(16, [(hub, i) for hub in (0, 1) for i in range(2, 16)]),
    "two cliques": joined(12, [(a, b) for a in range(12) for b in range(a) if a // 6 == b // 6] + [(0, 6)]),
    "pairs": joined(12, [(a, b, 3 if a == b + 1 and a % 2 else 2) for a in range(12) for b in range(a)]),
    "one": LinkMatrix(((0.0,),)),
}
DEPTHS = {"star": 15, "path": 15, "ring": 8, "grid 3×2": 3, "two hubs": 8, "two cliques": 5, "pairs": 4, "one": 0}


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_that_have_few_trees(shape, little_effort):
    for method in METHODS:
        trees = plan_trees(SHAPES[shape], **method)
        for tree in trees:
            check(SHAPES[shape], tree)
        assert max(tree.depth for tree in trees) == DEPTHS[shape]


def regular_graphs():
    """Where refinement alone tells nothing: with many symmetries, with few, with none."""
    for matrix in (SHAPES["pairs"], SHAPES["two cliques"], LinkMatrix.preset("ring-16")):
        yield [list(row) for row in matrix.bandwidth]
    mixed = networkx.disjoint_union_all([networkx.complete_graph(4), networkx.complete_graph(4), networkx.cubical_graph()])
    for graph in (mixed, networkx.frucht_graph(), *(networkx.random_regular_graph(3, 14, seed) for seed in range(4))):
        yield [[int(graph.has_edge(i, j)) for j in graph] for i in graph]


@pytest.mark.parametrize("labels", list(regular_graphs()))
def test_a_regular_machine_has_one_numbering(labels):
    n = len(labels)
    first = canonical([0] * n, labels)
    for seed in range(6):
        order = random.Random(seed).sample(range(n), n)
        mine = [[labels[i][j] for j in order] for i in order]
        again = canonical([0] * n, mine)
        assert [[labels[i][j] for j in first] for i in first] == [[mine[i][j] for j in again] for i in again]


def test_links_that_do_not_connect():
    apart = joined(5, [(0, 1), (1, 2), (3, 4)])
    for method in METHODS:
        with pytest.raises(ValueError, match=r"no links join GPUs \[0, 1, 2\] with GPUs \[3, 4\].*connected"):
            plan_trees(apart, **method)


def test_slow_links_are_for_what_fast_ones_do_not_reach():
    p3 = Graph(LinkMatrix.preset("p3.16xlarge"))
    assert p3.kinds == ("nvlink",) and len(p3.links) == 16
    halves = Graph(LinkMatrix.preset("pcie-4+4"))
    assert halves.kinds == ("nvlink", "nvswitch", "pcie", "host")
    assert {halves.weight[0][3], halves.weight[0][4]} == {2.0, 1 / 8}
    for tree in plan_trees(LinkMatrix.preset("pcie-4+4")):
        assert sum(a // 4 != b // 4 for a, b in tree.edges) == 1, "the path between the halves is for one edge a tree"


@pytest.mark.parametrize(
    ("wrong", "why"),
    (
        ({"k": 0}, "k=0"), ({"k": 2.0}, "k=2.0"), ({"k": True}, "k=True"), ({"objective": "best"}, "objective='best'"),
        ({"link_usage_penalty": 0}, "link_usage_penalty=0"), ({"roots": [8]}, r"roots=\[8\]"), ({"roots": []}, "roots"),
        ({"k": 2, "roots": [1]}, "k=2"), ({"roots": [0.0]}, r"roots=\[0\.0\]"), ({"link_usage_penalty": "0.7"}, "penalty='0.7'"),
        ({"seed": None}, "seed=None"), ({"seed": [1]}, r"seed=\[1\]"),
    ),
)  # fmt: skip
def test_wrong_arguments(wrong, why):
    with pytest.raises(ValueError, match=why):
        plan_trees(LinkMatrix.preset("p3.16xlarge"), **wrong)


def test_numbers_and_arrays_of_numpy():
    matrix = LinkMatrix.preset("p3.16xlarge")
    assert plan_trees(matrix, np.int64(2), seed=np.int32(1)) == plan_trees(matrix, 2, seed=1)
    assert plan_trees(matrix, roots=np.array([3, 0]))[0].root == 3
    again = LinkMatrix(np.array(matrix.bandwidth), np.array(matrix.kind), np.array(matrix.port), name=matrix.name)
    assert again == matrix


def test_a_part_of_any_matrix_is_one():
    """A port may be as large as all links together, of which a part has fewer."""
    bandwidth = [[1e6 * (i != j) for j in range(8)] for i in range(8)]
    for matrix in (LinkMatrix(bandwidth), LinkMatrix(bandwidth, port=[8e6] * 8)):
        part = matrix.part([5, 2])
        assert len(part) == 2 and max(part.port) <= 2e6 and len(plan_trees(part)) == 2


def test_what_is_no_matrix_and_what_is_too_large():
    with pytest.raises(ValueError, match="from_array"):
        plan_trees([[0, 2], [2, 0]])
    with pytest.raises(ValueError, match="17 GPUs, and plans are made for up to 16"):
        plan_trees(LinkMatrix.preset("ring-17"))
    matrix = LinkMatrix.preset("nvswitch-72")
    trees = plan_trees(matrix)
    check(matrix, trees[71], 7)
    assert measure(matrix, trees).ports == [2 * 71] * 72


# figures


@pytest.mark.parametrize("seed", range(3))
def test_p3_16xlarge_is_planned_at_the_optimum(seed):
    matrix = LinkMatrix.preset("p3.16xlarge")
    cost = measure(matrix, plan_trees(matrix, seed=seed))
    assert (cost.depth, cost.load, cost.least, cost.gb_s) == (3, 2.5, 2.5, 80.0)
    assert cost.weight == 152  # of any optimal plan, as it fills every link: 8 singles twice, 8 doubles five times


@pytest.mark.parametrize("method", METHODS[::2], ids=str)
def test_p3_16xlarge_single_trees_have_weight_20(method):
    matrix = LinkMatrix.preset("p3.16xlarge")
    for root in range(8):
        (tree,) = plan_trees(matrix, roots=[root], **method)
        check(matrix, tree, 3)
        assert tree.weight == 20


def test_the_seed_s_method_is_not_at_the_optimum():
    matrix = LinkMatrix.preset("p3.16xlarge")
    loads = [measure(matrix, plan_trees(matrix, objective="mxnet", seed=seed)).load for seed in range(5)]
    assert min(loads) > 2.5, loads


@pytest.mark.parametrize("n", (4, 8, 16))
def test_a_switch_gives_every_gpu_the_same_edges(n):
    matrix = LinkMatrix.preset(f"nvswitch-{n}")
    trees = plan_trees(matrix)
    for tree in trees:
        check(matrix, tree, n.bit_length() - 1)
    cost = measure(matrix, trees)
    assert cost.ports == [2 * (n - 1)] * n and cost.optimal and cost.load == 2 * (n - 1)


@pytest.mark.parametrize("name", presets.NAMES)
def test_every_preset_is_planned_as_well_as_can_be(name):
    """Presets are small enough for proof; and their weights are those of the record, or better."""
    matrix = LinkMatrix.preset(name)
    trees = plan_trees(matrix)
    for tree in trees:
        check(matrix, tree)
    cost = measure(matrix, trees)
    (row,) = (row for row in recorded() if (row["preset"], row["method"]) == (name, "minmax"))
    assert cost.optimal and cost.weight >= row["weight"] - 1e-3


def recorded():
    return json.loads((ROOT / "docs/measured/2026-11-21-topology.json").read_text())["rows"]


def test_the_recorded_figures_are_those_of_the_recorded_trees():
    assert {row["preset"] for row in recorded()} == set(presets.NAMES)
    for row in recorded():
        matrix = LinkMatrix.preset(row["preset"])
        weight = Graph(matrix).weight
        trees = []
        for one in row["trees"]:
            edges = [(a, b) for step in one["levels"] for a, b in step]
            levels = [level for level, step in enumerate(one["levels"], 1) for _ in step]
            trees.append(Tree(one["root"], edges, levels, sum(weight[a][b] for a, b in edges)))
            check(matrix, trees[-1])
        cost = measure(matrix, trees)
        found = (cost.depth, cost.load, cost.least, cost.weight, max(cost.ports))
        assert found == pytest.approx(tuple(row[key] for key in ("depth", "load", "least", "weight", "most_edges_at_a_gpu")))


@settings(max_examples=30, derandomize=True)
@given(machines(most=7), st.integers(1, 9))
def test_no_load_is_below_the_bound(matrix, k):
    """`least_load` against all cuts and the count of edges, one by one."""
    graph, n = Graph(matrix), len(matrix)
    bound = least_load(graph, [0] * k)
    for load_ in [half / 2 for half in range(1, 4 * k)]:
        use = {(i, j): min(k, math.floor(load_ / graph.cost[i][j] + 1e-9)) for i, j in graph.links}
        cuts = itertools.chain.from_iterable(itertools.combinations(range(n), size) for size in range(1, n))
        fits = sum(use.values()) >= k * (n - 1) and all(
            sum(u for (i, j), u in use.items() if (i in cut) != (j in cut)) >= k for cut in cuts
        )
        if bound <= load_:
            assert fits
        elif max(graph.port_cost) * k * (n - 1) < bound:  # no port can bind
            assert not fits


def test_a_bridge_bounds_the_load():
    assert least_load(Graph(SHAPES["two cliques"]), range(12)) == 12


@settings(max_examples=20, derandomize=True)
@given(machines(most=10))
def test_the_smallest_cut_is_networkx_s(matrix):
    capacity = [[int(cell) for cell in row] for row in matrix.bandwidth]
    graph = networkx.Graph()
    graph.add_weighted_edges_from((i, j, capacity[i][j]) for i in range(len(matrix)) for j in range(i) if capacity[i][j])
    assert _smallest_cut(capacity) == networkx.stoer_wagner(graph)[0]


def test_kernighan_and_lin_part_what_is_apart():
    """Two groups with strong links inside, from any start; and the parts of p3.16xlarge's cut of 10."""
    weight = [[0 if a == b else 5 if a % 2 == b % 2 else 1 for b in range(10)] for a in range(10)]
    p3 = Graph(LinkMatrix.preset("p3.16xlarge")).weight
    for seed in range(10):
        near, far = mxnet.halves(weight, range(10), random.Random(seed))
        assert {tuple(near), tuple(far)} == {(0, 2, 4, 6, 8), (1, 3, 5, 7, 9)}
    parts = [mxnet.halves(p3, range(8), random.Random(seed)) for seed in range(20)]
    cuts = [sum(p3[a][b] for a in near for b in far) for near, far in parts]
    assert min(cuts) == 10 and cuts.count(10) > 15  # of the 35 parts of this size, the other cuts weigh more


def test_the_penalty_makes_trees_use_other_links():
    matrix = LinkMatrix.preset("p3.16xlarge")
    plain = plan_trees(matrix, objective="mxnet", backtrack=True, link_usage_penalty=1.0)
    assert [tree.weight for tree in plain] == [20] * 8
    assert measure(matrix, plain).load > measure(matrix, plan_trees(matrix, objective="mxnet", backtrack=True)).load


# matrices


def test_codes():
    matrix = LinkMatrix.from_array([[0, 1, 2], [1, 0, 3], [2, 3, 0]])
    assert matrix.bandwidth == ((0, 10, 25), (10, 0, 50), (25, 50, 0))
    assert matrix.kind == (("", "host", "nvlink"), ("host", "", "nvlink"), ("nvlink", "nvlink", ""))
    assert matrix.port == (35, 60, 75) and matrix.unit == 25 and len(matrix) == 3
    doubles = LinkMatrix.from_array([[0, 3], [3, 0]])
    assert doubles.unit == 25 and plan_trees(doubles)[0].weight == 3 and measure(doubles, plan_trees(doubles)).load == 1


@pytest.mark.parametrize(
    ("codes", "why"),
    (
        ([[0, 4], [4, 0]], r"codes\[0\]\[1\] is 4"), ([[0, 0.5], [0.5, 0]], "is 0.5"), ([[0, 2], [1, 0]], "both ways"),
        ([[1]], "itself"), ([[0, 2], [3, 0]], "links go"),
        ([[0, 2]], "square"), ([], "0 rows"), ([[0, "2"], ["2", 0]], "no number"), ("02", "no number"), (None, "list of rows"),
        ([[0, -2], [-2, 0]], "is -2"), ([[0, math.nan], [math.nan, 0]], "nan"),
    ),
)  # fmt: skip
def test_what_is_no_array_of_codes(codes, why):
    with pytest.raises(ValueError, match=why):
        LinkMatrix.from_array(codes)


@pytest.mark.parametrize(
    ("changes", "why"),
    (
        ({"kind": [["", "wifi"], ["wifi", ""]]}, "wifi"), ({"kind": [["", ""], ["", ""]]}, "one of"),
        ({"kind": [[""]]}, "square of 2"), ({"port": [1]}, "2 numbers"), ({"port": [1, math.inf]}, "inf"),
        ({"port": [1, 0]}, r"port\[1\] is 0"), ({"unit": -1}, "unit"), ({"unit": None}, "None is no number"),
    ),
)  # fmt: skip
def test_what_is_no_matrix(changes, why):
    with pytest.raises(ValueError, match=why):
        LinkMatrix(((0, 5), (5, 0)), **changes)


def test_files(tmp_path):
    matrix = LinkMatrix.preset("pcie-4+4")
    path = tmp_path / "mine.json"
    matrix.save(path)
    assert LinkMatrix.from_file(path) == matrix == load(str(path))
    path.write_text(json.dumps({"codes": [[int(c) for c in row] for row in P3], "notes": ["by hand"]}))
    again = LinkMatrix.from_file(path)
    assert again.bandwidth == LinkMatrix.preset("p3.16xlarge").bandwidth and (again.name, again.notes) == ("mine", ("by hand",))


@pytest.mark.parametrize(
    "text",
    (
        "", "[]", "{}", "not JSON", "[" * 100_000, '{"codes": 3}', '{"codes": [[0]], "bandwidth": [[0]]}',
        '{"codes": [[0]], "port": [1]}', '{"bandwidth": [[0, 1], [1, 0]], "speed": 1}', '{"bandwidth": [[0, NaN], [NaN, 0]]}',
        '{"bandwidth": [[0]], "kind": "nvlink"}',
        '{"bandwidth": [[0, 1], [1, 0]], "unit": "fast"}', '{"bandwidth": [[0, 1], [1, 0]], "kind": [1, 2]}',
        '{"bandwidth": [[0, 1], [1, 0]], "port": [{}, 1]}', '{"bandwidth": [[0, 1], [1, 0]], "kind": [["", []], [[], ""]]}',
    ),
)  # fmt: skip
def test_files_that_are_no_matrix(tmp_path, text):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"bad\.json is no link matrix: "):
        load(str(path))


HUGE = ("NaN", "Infinity", "-1", "1e400", "1e30", f"1{'0' * 30}", f"1{'0' * 400}", f"-1{'0' * 400}", "1e-30", "1e-320")


@pytest.mark.parametrize("number", HUGE)
def test_numbers_that_no_machine_has_are_refused_by_their_place(tmp_path, number):
    path = tmp_path / "bad.json"
    for text, place in (
        ('{"bandwidth": [[0, 1, 1], [1, 0, N], [1, N, 0]]}', r"bandwidth\[1\]\[2\]"),
        ('{"bandwidth": [[0, 1], [1, 0]], "port": [1, N]}', r"port\[1\]"),
        ('{"bandwidth": [[0, 1], [1, 0]], "unit": N}', "unit"),
    ):
        path.write_text(text.replace("N", number))
        with pytest.raises(ValueError, match=rf"bad\.json is no link matrix: {place} is .*0\.001 to \de\+06"):
            load(str(path))
    path.write_text(f'{{"codes": [[0, {number}], [{number}, 0]]}}')
    with pytest.raises(ValueError, match=r"bad\.json is no link matrix: codes\[0\]\[1\] is .*none of 0, 1, 2, 3"):
        load(str(path))


def test_what_is_no_plain_file_is_refused_at_once(tmp_path):
    pipe, large = tmp_path / "pipe.json", tmp_path / "large.json"
    os.mkfifo(pipe)
    large.write_bytes(b" " * (MAX_BYTES + 1))
    for name, why in ((pipe, "it is no plain file"), ("/dev/zero", "it is no plain file"), (large, f"more than {MAX_BYTES} bytes")):
        with pytest.raises(ValueError, match=rf"{name} is no link matrix: .*{why}"):
            load(str(name))
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        load(f"{tmp_path}/")


def test_a_topology_by_name(monkeypatch, tmp_path):
    monkeypatch.setenv("FLUXLIKE_TOPOLOGY", "p3.8xlarge")
    assert current() == current(4) == LinkMatrix.preset("p3.8xlarge")
    with pytest.raises(ValueError, match=r"FLUXLIKE_TOPOLOGY='p3.8xlarge' has 4 GPUs for 8 ranks"):
        current(8)
    monkeypatch.setenv("FLUXLIKE_TOPOLOGY", str(tmp_path / "none.json"))
    with pytest.raises(ValueError, match=r"none\.json' cannot be read: No such file"):
        current()
    for name in ("p4", "nvswitch-0", "ring-2", "ring-1000", "nvswitch-1000"):
        with pytest.raises(ValueError, match=f"called '{name}'.*p3.16xlarge.*nvswitch-1 to nvswitch-999, ring-3 to ring-999"):
            load(name)
    with pytest.raises(ValueError, match=r"no topology is called \['p4'\]"):
        LinkMatrix.preset(["p4"])
    assert [len(load(name)) for name in ("nvswitch-1", "nvswitch-999", "ring-3")] == [1, 999, 3]
    assert len(load("nvswitch-3")) == 3 and len(load("ring-5")) == 5


def test_small_arrays_take_one_tree(monkeypatch):
    matrix = LinkMatrix.preset("p3.8xlarge")
    assert [tree.root for tree in trees_for(matrix, 10_000_000)] == [0]
    assert [tree.root for tree in trees_for(matrix, 10_000_001)] == [0, 1, 2, 3]
    monkeypatch.setenv("FLUXLIKE_TREE_ARRAY_BOUND", "7")
    assert (len(trees_for(matrix, 7)), len(trees_for(matrix, 8, objective="mxnet"))) == (1, 4)
    with pytest.raises(ValueError, match="elements=0"):
        trees_for(matrix, 0)
    for value in ("-1", "many", "1e7"):
        monkeypatch.setenv("FLUXLIKE_TREE_ARRAY_BOUND", value)
        with pytest.raises(ValueError, match="FLUXLIKE_TREE_ARRAY_BOUND"):
            trees_for(matrix, 8)


def test_trees_of_another_machine_are_not_measured():
    with pytest.raises(ValueError, match="edge 0-5"):
        measure(LinkMatrix.preset("p3.16xlarge"), [Tree(0, [(0, 5)], [1])])


def test_importing_it_brings_the_standard_library_only():
    code = "import sys, fluxlike.topology; print(sorted({name.split('.')[0] for name in sys.modules} - sys.stdlib_module_names))"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "['__main__', 'fluxlike']", done.stderr

"""all_reduce over trees: plans of all kinds of machines, the seed's own test and random data, lists, many calls; faults."""

import contextlib
import itertools

import pytest
import torch
import torch.distributed as dist
from ranks import TORCHRUN, device, divided, run_ranks

import fluxlike
from fluxlike.ops import exchange, trees
from fluxlike.ops.all_reduce import choose
from fluxlike.runtime import env, programs, world
from fluxlike.topology import LinkMatrix, plan_trees

#: Of ranks, machines; those with more GPUs stand for their first ones.
MACHINES = {
    2: ("nvswitch-2", "p3.16xlarge"),
    3: ("ring-3", "ring-8", "p3.16xlarge-cuda9.2-raw"),
    4: ("p3.8xlarge", "nvswitch-4", "pcie-4+4", "dgx-1-dead-link"),
}


def numbers(size, dtype, seed):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device())


def forget(group):
    """The next call makes the trees anew."""
    control = world.current().control_of(group)
    ctx = world.current().cached.pop(("all_reduce over trees", control.name), None)
    if ctx is not None:
        ctx.close()


@contextlib.contextmanager
def machine(group, name, bound=0, piece=trees.PIECE):
    """On the machine ``name``; more than ``bound`` elements over several trees, at most ``piece`` bytes a launch."""
    before = {key: env.get(key) for key in ("FLUXLIKE_TOPOLOGY", "FLUXLIKE_TREE_ARRAY_BOUND")}
    usual, trees.PIECE = trees.PIECE, piece
    forget(group)
    env.put("FLUXLIKE_TOPOLOGY", name)
    env.put("FLUXLIKE_TREE_ARRAY_BOUND", str(bound))
    try:
        yield
    finally:
        trees.PIECE = usual
        for key, value in before.items():
            env.put(key, value)
    forget(group)


def context(group):
    return world.current().cached["all_reduce over trees", world.current().control_of(group).name]


def in_order(parts, plan, op, block):
    """What the kernel computes: block after block over the trees in turn, in fp32, children from the last to the first."""

    def total(tree, rank, cut):
        value = parts[rank][cut].float()
        for child in reversed(trees.children_of(tree, len(parts))[rank]):
            theirs = total(tree, child, cut)
            value = torch.maximum(value, theirs) if op == "max" else value + theirs
        return value

    cuts = [slice(start, start + block) for start in range(0, parts[0].numel(), block)]
    whole = torch.cat([total(plan[i % len(plan)], plan[i % len(plan)].root, cut) for i, cut in enumerate(cuts)])
    return (divided(whole, len(parts)) if op == "avg" else whole).to(parts[0].dtype)


def reduces(group, names, dtypes):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for number, name in enumerate(names):
        with machine(group, name, bound=100):
            for dtype in dtypes:
                block = exchange.BULK // dtype.itemsize
                for n in (1, size * block + 3):
                    ones = torch.ones(n, dtype=dtype, device=device())  # the seed's own test
                    assert torch.equal(fluxlike.all_reduce(ones, group, algo="trees"), ones * size), f"{name} {n}"
                    op = ("sum", "avg", "max")[number % 3]
                    parts = [numbers(n, dtype, 10 * number + r) for r in range(size)]
                    y = fluxlike.all_reduce(parts[rank], group, op, "trees")
                    ctx = context(group)
                    assert ctx.last_path == "trees" and len(ctx.plans[0]) == 1 and len(ctx.plans[1]) == size
                    assert torch.equal(y, in_order(parts, ctx.plans[n > 100], op, block)), f"{name} {n} {op}"
                    exact = torch.stack(parts).double()
                    exact = exact.amax(0) if op == "max" else exact.sum(0) / (size if op == "avg" else 1)
                    error = (y.double() - exact).abs().max() / exact.abs().max()
                    assert error < {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 6e-4}[dtype], f"{name} {error}"


@pytest.mark.parametrize("ranks", [1, *MACHINES])
def test_machines(ranks):
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    run_ranks(reduces, ranks, names=MACHINES.get(ranks, ("",)), dtypes=dtypes if ranks == 2 else dtypes[1:2])


def places(group, name):
    """Lists; in place; anywhere in memory; one tree and several in turn; what goes in several launches."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    with machine(group, name, bound=5000, piece=12 << 10):
        for call in range(4):
            sizes = [(5, 0, 4096, 1, 4103), (20,), (9000,), (300, 8)][call]
            given = [[numbers(n, torch.bfloat16, 100 * call + 10 * r + i) for i, n in enumerate(sizes)] for r in range(size)]
            ys = fluxlike.all_reduce(given[rank], group, algo="trees")
            right = [sum(tensors[i].double() for tensors in given) for i in range(len(sizes))]
            for y, exact in zip(ys, right, strict=True):
                torch.testing.assert_close(y.double(), exact, rtol=8e-3, atol=1e-3)
            again = fluxlike.all_reduce(given[rank], group, algo="trees")
            assert all(torch.equal(a, b) for a, b in zip(again, ys, strict=True))
            theirs, mine = [None] * size, [y.cpu() for y in ys]
            dist.all_gather_object(theirs, mine, group=group)
            assert all(torch.equal(a, b) for other in theirs for a, b in zip(other, mine, strict=True)), "other bits"
            x = torch.zeros(sizes[-1] + 9, dtype=torch.bfloat16, device=device())
            x[3 : 3 + sizes[-1]] = given[rank][-1]
            part = x[3 : 3 + sizes[-1]]
            assert fluxlike.all_reduce_(part, group, algo="trees") is part
            torch.testing.assert_close(part.double(), right[-1], rtol=8e-3, atol=1e-3)
            assert not x[:3].any() and not x[3 + sizes[-1] :].any()
        assert context(group).stats["launches"] > 4 * 3


def test_places():
    run_ranks(places, 3, name="ring-3")


def mixed(group, name, calls, jitter=False):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    with machine(group, name, bound=3000, piece=16 << 10):
        previous = programs.configure(programs.Schedule(seed=rank + 1, jitter=0.05, delay=2e-3) if jitter else None)
        try:
            for call in range(calls):
                n = (9000, 20, 6000)[call % 3]
                parts = torch.randint(-9, 10, (size, n), generator=torch.Generator().manual_seed(call)).to(torch.bfloat16)
                y = fluxlike.all_reduce(parts[rank].to(device()), group, algo="trees")
                assert torch.equal(y, parts.float().sum(0).to(torch.bfloat16).to(device())), call
        finally:
            programs.configure(previous)


def test_calls_back_to_back():
    run_ranks(mixed, 4, name="dgx-1-dead-link", calls=6, jitter=True)


def refused(group):
    """What a call over trees says; all ranks say it, and go on."""
    x = torch.ones(8, device=device())
    said = {}
    for case in ("too small", "none", "differ", "one cannot"):
        mine = {"too small": "ring-3", "none": "", "differ": ("ring-4", "mesh-4")[group.rank() % 2]}.get(case)
        with machine(group, mine or ("p3.8xlarge" if group.rank() != 2 else "nowhere") if case != "none" else ""):
            with pytest.raises((ValueError, RuntimeError)) as error:
                fluxlike.all_reduce(x, group, algo="trees")
            said[case] = f"{type(error.value).__name__}: {error.value}"
    with machine(group, "ring-4"):
        assert torch.equal(fluxlike.all_reduce(x, group, algo="trees"), 4 * x)
    return said


@pytest.mark.skipif(TORCHRUN, reason="GPUs are detected there")
def test_ranks_without_a_common_plan():
    for rank, said in enumerate(run_ranks(refused, 4)):
        assert "FLUXLIKE_TOPOLOGY='ring-3' has 3 GPUs for 4 ranks" in said["too small"]
        assert said["none"].startswith("RuntimeError") and "FLUXLIKE_TOPOLOGY" in said["none"]
        assert said["differ"].startswith("CallMismatch: all_reduce over trees: rank 0 has"), said
        assert "'ring-4'" in said["differ"] and "'mesh-4'" in said["differ"]
        assert "no topology is called 'nowhere'" in said["one cannot"], said
        assert rank == 2 or "rank 2 failed" in said["one cannot"]


def test_steps_are_the_plan():
    """Each rank but the root has one parent, which has it among its children; in the order of a broadcast."""
    for matrix in (LinkMatrix.preset("p3.16xlarge"), LinkMatrix.preset("ring-8"), LinkMatrix.preset("nvswitch-8")):
        for tree in plan_trees(matrix):
            children = trees.children_of(tree, 8)
            assert sorted(itertools.chain(*children)) == [rank for rank in range(8) if rank != tree.root]
            level = dict(zip(tree.edges, tree.levels, strict=True))
            for parent, each in enumerate(children):
                assert [level[parent, child] for child in each] == sorted(level[parent, child] for child in each)


def test_auto_takes_no_trees():
    assert {choose(1 << size, ranks) for size in range(4, 30) for ranks in (2, 4, 8)} == {"one_shot", "two_shot"}


def test_ranks_have_their_gpus_in_any_order(monkeypatch):
    """Detected links are those of GPUs, and ranks may have these in another order; each tree goes over links that there are."""
    ring = LinkMatrix.from_array([[0, 2, 0, 2], [2, 0, 2, 0], [0, 2, 0, 2], [2, 0, 2, 0]])
    monkeypatch.setattr(LinkMatrix, "detect", lambda: ring)
    monkeypatch.delenv("FLUXLIKE_TOPOLOGY", raising=False)
    gpus = [0, 2, 1, 3]
    for plan in trees.planned(4, gpus):
        for tree in plan:
            assert all(ring.bandwidth[gpus[parent]][gpus[child]] for parent, child in tree.edges), tree


def test_errors_of_a_part_name_the_gpus_of_the_machine(monkeypatch):
    """A chain joins its first GPU with its second, but not with its third."""
    chain = LinkMatrix.from_array([[0, 2, 0], [2, 0, 2], [0, 2, 0]], name="chain")
    monkeypatch.setattr(LinkMatrix, "detect", lambda: chain)
    monkeypatch.delenv("FLUXLIKE_TOPOLOGY", raising=False)
    with pytest.raises(ValueError, match=r"chain, its GPUs \[0, 2\] as 0 to 1: no links join GPUs \[0\] with GPUs \[1\]"):
        trees.planned(2, [0, 2])


def test_part_of_a_machine():
    whole = LinkMatrix.preset("p3.16xlarge")
    assert whole.part(range(4)).bandwidth == LinkMatrix.preset("p3.8xlarge").bandwidth
    assert whole.part([5, 1]).bandwidth == ((0.0, 50.0), (50.0, 0.0))
    for wrong in ([0, 0], [8], [-1], []):
        with pytest.raises(ValueError, match="must name different GPUs, of 0 to 7"):
            whole.part(wrong)
    for wrong in ([0.0], ["0"], None, 3):
        with pytest.raises(ValueError, match="is no list of numbers of GPUs"):
            whole.part(wrong)
    with pytest.raises(ValueError, match=r"order \[0, 1\] does not name each of the 8 GPUs once"):
        whole.relabelled([0, 1])

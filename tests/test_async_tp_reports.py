"""AsyncTP: which groups it replaces, what it reports and warns of, and inductor's cache."""

import contextlib
import copy
import logging
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from async_tp_graphs import GRAPHS, K, N, gathered, scattered
from ranks import run_ranks
from test_async_tp import as_list, calls, close, compilable, operands, traced
from torch._higher_order_ops.effects import with_effects
from torch._inductor import config

import fluxlike
from fluxlike.nn import async_tp
from fluxlike.nn.async_tp import AsyncTP


def of_a_group(group):
    """Only collectives of the group that is named are replaced, or of all groups that fluxlike spans."""
    other = dist.group.WORLD

    def program(x, w, v, u, b, group):
        return gathered(x, 0, group) @ w.T, gathered(x, 0, other) @ w.T

    given, tps = operands("rows", group), [AsyncTP(group), AsyncTP()]
    for tp in tps:
        tp(traced(program, given, group).graph)
    assert [tp.replaced for tp in tps] == [1, 2] and tps[0].uuid() != tps[1].uuid()
    assert list(tps[0].graphs[0].left.values()) == [f"it is one of group {other.group_name!r}, not of {group.group_name!r}"]
    control, tp = fluxlike.runtime.world.current().control, AsyncTP()
    ranks, control.ranks = control.ranks, dist.get_process_group_ranks(group)
    try:
        tp(traced(program, given, group).graph)
        key = tp.uuid()
    finally:
        control.ranks = ranks
    assert key != tp.uuid()
    named = [(one.group_name, dist.get_process_group_ranks(one)) for one in (group, other)]
    assert async_tp._groups(group) == named[:1] and all(one in async_tp._groups(None) for one in named)
    assert tp.replaced == 1 and "are outside the group given to fluxlike.init" in str(tp), str(tp)


@pytest.mark.skipif(os.environ.get("WORLD_SIZE") == "2", reason="the group of two ranks is the world here")
def test_one_group():
    run_ranks(of_a_group, 2)


def compiled_for_a_group(group):
    """A pass that names its group can be among the options of a compiler, which copies them; its reports stay its own."""

    def program(x, w):
        return scattered(gathered(x, 0, group) @ w.T @ w, 0, group)

    compilable()
    (x, w, *_), tp = operands("rows", group), AsyncTP(group)
    with torch.no_grad(), calls() as made:
        close(torch.compile(program, options=tp.options)(x, w), program(x, w), "compiled for a group")
    assert made == ["ag_gemm", "gemm_rs"] and tp.replaced == 2, str(tp)
    assert copy.deepcopy(tp.options)["post_grad_custom_pre_pass"] is tp


def test_a_pass_for_one_group_is_compiled_with():
    run_ranks(compiled_for_a_group, 2, timeout=300)


@contextlib.contextmanager
def warnings():
    """What the logger warns of meanwhile."""
    logger, said = logging.getLogger("fluxlike"), []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def told(group):
    """What the log says: that nothing was replaced, and why; nothing of models that are replaced, even if not everywhere."""

    def plain(x, w, v, u, b, group):
        return x @ w.T

    def neither(x, w, v, u, b, group):
        return x + 1

    def batched(x, w, v, u, b, group):  # what torch.einsum makes of a linear layer
        return torch.bmm(gathered(x, 0, group)[None], w.T[None])

    tp = AsyncTP()
    with warnings() as said, config.patch(shape_padding=False):  # of pads there is a word of its own, on GPUs
        for function in (GRAPHS["of doubles"][1], plain, neither, GRAPHS["rows"][1], plain, GRAPHS["features"][1], batched):
            given = operands("features" if function is GRAPHS["features"][1] else "rows", group)
            tp(traced(function, given, group).graph)
    assert len(said) == 4, said
    assert all("nothing was replaced in the graph of inference with 1 products" in text for text in said[:3])
    assert "graph of inference with 0 products" in said[3] and "of those that nn.Linear and matmul" in said[3]
    assert "all_gather_into_tensor stays: the product mm has dtypes ['torch.float64']" in said[0]
    assert "is the model sharded?" in said[1] and "it gathers the features" in said[2]
    assert [(r.gathers, r.replaced_gathers) for r in tp.graphs] == [(1, 0), (0, 0), (1, 1), (0, 0), (1, 0), (1, 0)]
    assert str(tp).splitlines()[0] == "inference: 0 of 1 all_gather and 0 of 0 reduce_scatter replaced, with 0 of 1 products"


def test_what_is_logged():
    run_ranks(told, 2)


def cached(group, directory):
    """A model in two parts, the second without collectives; the first comes from inductor's caches when it is compiled again."""
    from unittest import mock

    import torch._functorch.config

    def first(x, w):
        return gathered(x, 0, group) @ w.T

    def second(x, w):
        return x @ w.T

    compilable()
    directory = os.path.join(directory, str(dist.get_rank(group)))  # a rank may not find what another has just compiled
    x, w, *_ = operands("rows", group)
    expected, reports = first(x, w), []
    with (
        torch.no_grad(), calls() as made, warnings() as said, mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=directory),
        config.patch(fx_graph_cache=True), torch._functorch.config.patch(enable_autograd_cache=True),
    ):  # fmt: skip
        for again in (False, True):
            torch._dynamo.reset()
            tp = AsyncTP()
            parts = [torch.compile(part, fullgraph=True, options=tp.options) for part in (first, second)]
            close(parts[0](x, w), expected, f"again={again}")
            reports.append(str(tp))
            if again:
                assert not tp.graphs, f"{tp} was not in the cache"
                parts[1](x, w)
    assert made == ["ag_gemm"] * 2 and not said, f"{made} {said}"
    assert "1 of 1 all_gather" in reports[0] and "cache" not in reports[0], reports
    assert "no graph has been compiled" not in reports[1] and "came from inductor's cache" in reports[1], reports
    assert str(tp).splitlines()[0].startswith("inference: 0 of 0 all_gather") and "came from inductor's cache" in str(tp), str(tp)


def test_graphs_from_a_cache(tmp_path):
    run_ranks(cached, 2, directory=str(tmp_path))


def test_the_key_for_the_cache(monkeypatch, tmp_path):
    key = AsyncTP().uuid()
    assert key == AsyncTP().uuid() and isinstance(key, bytes)
    changed = tmp_path / "rewrite.py"
    changed.write_text(Path(async_tp.rewrite.__file__).read_text() + "#")
    with monkeypatch.context() as patch:
        patch.setattr(async_tp.rewrite, "__file__", str(changed))
        assert AsyncTP().uuid() != key
    with monkeypatch.context() as patch:
        patch.setattr(async_tp, "_groups", lambda group: [("1", [0, 1])])
        assert AsyncTP().uuid() != key
    assert AsyncTP(even=True).uuid() != key
    monkeypatch.setattr(async_tp, "__version__", "0")
    assert AsyncTP().uuid() != key
    assert fluxlike.nn.AsyncTP is AsyncTP and str(AsyncTP()) == "no graph has been compiled with this pass"


def said(group):
    """What the calls put in say of the features of all ranks, and that they give the same with it."""
    wanted = {"rows": [N], "twice": [N, N], "there and back": [N, N], "a sum of products": [2 * K]}
    for name, here in wanted.items():
        _, function, *_ = GRAPHS[name]
        given, results = operands(name, group), []
        for even in (False, True):
            module = traced(function, given, group)
            AsyncTP(group, even=even)(module.graph)
            put_in = [node.args for node in module.graph.nodes if node.target is with_effects]
            assert [args[-1] for args in put_in] == [group.size() * size if even else None for size in here], (name, even, put_in)
            module.recompile()
            with torch.no_grad():
                results.append(as_list(module(*(t.clone() for t in given))))
        for a, b in zip(*results, strict=True):
            close(a, b, name)


def test_sizes_of_all_ranks():
    run_ranks(said, 2)

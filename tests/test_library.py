"""torch.ops.fluxlike: schemas, fakes, gradients, and what a compiler may do with calls that other ranks wait for."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import same
from ranks import device, ints, rows_slice, run_ranks

import fluxlike


def numbers(shape, seed, dtype=torch.float32):
    """Whole numbers whose products and sums in these tests are exact in float32."""
    return ints(shape, dtype, seed, -2, 2, 1.0).to(device())


def leaf(t):
    return t.clone().requires_grad_()


# gradients


def rs_gradients(group, cases):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for seed, (m, n, k, wants) in enumerate(cases):
        mine = rows_slice(m, size, rank)
        xs = [numbers((m, k), seed * 100 + r) for r in range(size)]
        ws = [numbers((n, k), seed * 100 + 10 + r) for r in range(size)]
        b, dy = numbers((n,), seed * 100 + 20), numbers((m, n), seed * 100 + 21)
        whole = [leaf(t.double()) for t in (torch.cat(xs, 1), torch.cat(ws, 1), b)]
        F.linear(*whole).backward(dy.double())
        part = slice(rank * k, rank * k + k)
        expected = [whole[0].grad[:, part], whole[1].grad[:, part], whole[2].grad]
        inputs = [t.requires_grad_(w in wants) for t, w in zip((xs[rank].clone(), ws[rank].clone(), b.clone()), "xwb", strict=True)]
        y = fluxlike.gemm_rs(inputs[0], inputs[1], bias=inputs[2], group=group)
        assert y.requires_grad == bool(wants)
        with torch.no_grad():
            same(y, F.linear(*whole).cpu()[mine], f"y, {m, n, k} {wants}")
            assert torch.equal(y, fluxlike.gemm_rs(inputs[0], inputs[1], bias=inputs[2], group=group))
        y.backward(dy[mine])
        for name, t, grad in zip("xwb", inputs, expected, strict=True):
            assert (t.grad is not None) == (name in wants)
            if t.grad is not None:
                same(t.grad, grad.cpu(), f"gradient of {name}, {m, n, k} {wants}")


def ag_gradients(group, cases):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for seed, (m, ns, k, wants, gathered) in enumerate(cases):
        mine = rows_slice(m, size, rank)
        x = numbers((m, k), seed * 100)
        ws = [[numbers((n, k), seed * 100 + 10 * i + r + 1) for i, n in enumerate(ns)] for r in range(size)]
        bs = [[numbers((n,), seed * 100 + 50 + 10 * i + r) for i, n in enumerate(ns)] for r in range(size)]
        dzs = [[numbers((m, n), seed * 100 + 80 + 5 * i + r) for i, n in enumerate(ns)] for r in range(size)]
        whole_x = leaf(x.double())
        whole = [[(leaf(w.double()), leaf(b.double())) for w, b in zip(ws[r], bs[r], strict=True)] for r in range(size)]
        for r in range(size):
            for (w, b), dz in zip(whole[r], dzs[r], strict=True):
                F.linear(whole_x, w, b).backward(dz.double())
        shard = x[mine].clone().requires_grad_("x" in wants)
        mine_w = [w.clone().requires_grad_("w" in wants) for w in ws[rank]]
        mine_b = [b.clone().requires_grad_("b" in wants) for b in bs[rank]]
        zs = fluxlike.ag_gemm(shard, mine_w, bias=mine_b, group=group, m=m, return_gathered=gathered)
        if gathered:
            zs, all_of_x = zs
            assert torch.equal(all_of_x, x) and not all_of_x.requires_grad
        torch.autograd.backward(zs, dzs[rank])
        what = f"{m, ns, k} {wants} gathered={gathered}"
        assert (shard.grad is not None) == ("x" in wants), what
        if "x" in wants:
            same(shard.grad, whole_x.grad[mine].cpu(), f"gradient of x, {what}")
        for (w, b), t, u in zip(whole[rank], mine_w, mine_b, strict=True):
            assert (t.grad is not None) == ("w" in wants) and (u.grad is not None) == ("b" in wants), what
            if "w" in wants:
                same(t.grad, w.grad.cpu(), f"gradient of w, {what}")
            if "b" in wants:
                same(u.grad, b.grad.cpu(), f"gradient of b, {what}")


@pytest.mark.parametrize("world", (1, 2, 3, 4))
def test_gradients_of_gemm_rs(world):
    cases = [(24, 20, 16, "xwb"), (37, 17, 9, "xwb"), (3, 8, 5, "xwb"), (16, 8, 8, "x"), (10, 8, 8, "w"), (12, 8, 8, "b")]
    cases.append((0, 4, 4, "xw"))
    run_ranks(rs_gradients, world, cases=cases[: 7 if world == 4 else 3])


@pytest.mark.parametrize("world", (1, 2, 3, 4))
def test_gradients_of_ag_gemm(world):
    cases = [
        (24, [20], 16, "xwb", False), (37, [17, 6], 9, "xwb", False), (3, [8], 5, "xwb", True), (18, [4, 4, 8], 8, "xw", True),
        (16, [8], 8, "x", False), (10, [8], 8, "w", False), (12, [8], 8, "b", False), (0, [4], 4, "xw", False),
    ]  # fmt: skip
    run_ranks(ag_gradients, world, cases=cases[: 8 if world == 4 else 3])

"""What a recorded call hands on of its arguments, to the kernels and to its backward, and what it refuses of them."""

import pytest
import torch
import torch.distributed as dist
from ranks import device, run_ranks

import fluxlike
from fluxlike.ops import library


def sizes_of_all(group):
    """The size that the ranks have together, by which a schedule is chosen, is said to the call and to the ones of its backward."""
    size, said = dist.get_world_size(group), []
    x, w = (torch.ones(rows, 8, device=device()) for rows in (2 * size, 6))
    calls = library.rs.call, library.ag.call
    library.rs.call = lambda *args, **how: said.append(("gemm_rs", how["k"])) or calls[0](*args, **how)
    library.ag.call = lambda *args: said.append(("ag_gemm", args[7])) or calls[1](*args)
    try:
        for k in (None, 8 * size):
            fluxlike.gemm_rs(x.clone().requires_grad_(), w, group=group, k=k).sum().backward()
            assert said == [("gemm_rs", k), ("ag_gemm", k)], "its columns are what x has"
            said.clear()
        for n in (None, 6 * size):
            for learns in (False, True):
                for keeps in (False, True):
                    weight = w.clone().requires_grad_(learns)
                    z = fluxlike.ag_gemm(x.clone().requires_grad_(), weight, group=group, n=n, return_gathered=keeps)
                    (z[0] if keeps else z).sum().backward()
                    assert said == [("ag_gemm", n), ("gemm_rs", n)], (learns, keeps)
                    said.clear()
    finally:
        library.rs.call, library.ag.call = calls
    x.requires_grad_()
    for m, why in ((0, "of m=0 rows"), (True, "m=True is not a number of rows"), (2 * size, f"of m={2 * size} rows")):
        with pytest.raises(ValueError, match=why):
            fluxlike.ag_gemm(x, w, group=group, m=m)
    with fluxlike.create_ag_gemm_context(2 * size * size, 6, 8, x.dtype, group) as ctx:
        for given in ({"ctx": ctx}, {"out": x.new_empty(2 * size * size, 6)}):
            with pytest.raises(ValueError, match=f"ag_gemm: {next(iter(given))}= is given to a call that autograd records"):
                fluxlike.ag_gemm(x, w, group=group, **given)
    assert torch.equal(fluxlike.ag_gemm(x, w, group=group), x.new_full((2 * size * size, 6), 8.0))


def test_sizes_of_all_ranks_go_with_a_call_and_its_backward():
    run_ranks(sizes_of_all, 2)

"""sparse_all_reduce: bit by bit against the reference; ids of all kinds, dtypes, modes, many calls; faults."""

import pytest
import torch
import torch.distributed as dist
from ranks import device, run_ranks

import fluxlike


def gradient(ids, shape, dtype=torch.float32, seed=0, dims=1):
    """Entries at ``ids`` with random values, as autograd leaves them: in any order, ids more than once."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn((len(ids), *shape[dims:]), generator=generator).to(dtype)
    indices = torch.tensor([ids]) if dims == 1 else torch.tensor(ids).T.reshape(dims, len(ids))
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True).to(device())


def same(got, right, what=""):
    assert got.is_coalesced() and got.shape == right.shape and got.dtype == right.dtype, what
    assert torch.equal(got.indices(), right.indices()), what
    bits = {2: torch.int16, 4: torch.int32}[got.dtype.itemsize]
    assert torch.equal(got.values().view(bits), right.values().view(bits)), what


def small(group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    ids = [[3, 1, 3, 7, 1, 3], [], [7, 0, 3], [3, 3, 9]][rank]
    x = gradient(ids, (10, 5), seed=rank)
    y = fluxlike.sparse_all_reduce(x, group=group)
    same(y, fluxlike.reference.sparse_all_reduce(x, group=group))
    assert y.indices().tolist() == [[1, 3, 7], [1, 3, 7], [0, 1, 3, 7], [0, 1, 3, 7, 9]][size - 1 : size]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_small(ranks):
    run_ranks(small, ranks)

"""torch.ops.fluxlike: schema, fakes, gradients and what a compiler may do with calls that other ranks wait for."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import fluxlike


def opchecks(group):
    from fluxlike.ops import library

    rank, size = dist.get_rank(group), dist.get_world_size(group)
    name = library.name_of(group)
    make = torch.Generator().manual_seed(rank)
    new = lambda *shape: torch.randn(*shape, generator=make).requires_grad_()
    torch.library.opcheck(library.gemm_rs_op, (new(4 * size, 8), new(6, 8), new(6), name))


def test_opcheck():
    run_ranks(opchecks, 2)

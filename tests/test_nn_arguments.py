"""What layers and styles hand on to the operations, keep of their own arguments, and refuse of them."""

import pytest
import torch
import torch.distributed as dist
from ranks import device, run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import fluxlike
from fluxlike.nn import linear


def handed_on(group):
    """The size that all ranks have together, and whether the gathered input is kept, of layers made in either way."""
    size, said = dist.get_world_size(group), []
    mesh = DeviceMesh.from_group(group, device().type)
    layers, calls = fluxlike.nn, (linear.ag_gemm, linear.gemm_rs)
    linear.ag_gemm = lambda *args, **how: said.append((how["n"], how["return_gathered"])) or calls[0](*args, **how)
    linear.gemm_rs = lambda *args, **how: said.append(how["k"]) or calls[1](*args, **how)
    with device():
        plain = [nn.Linear(8, 4 * size), nn.Linear(8, 6 * size), nn.Linear(4 * size, 8)]
        x, narrow = torch.ones(3, 8), torch.ones(3 * size, 4)
        column = layers.ColumnParallelLinear
        makes = {
            "of sizes": lambda keeps: column(8, [4 * size, 6 * size], group=group, save_gathered=keeps),
            "of layers": lambda keeps: column.from_linear(*plain[:2], group=group, save_gathered=keeps),
        }
        try:
            for how, make in makes.items():
                for keeps in (False, True):
                    made = make(keeps)
                    for records in (True, False):  # without gradients nothing is kept
                        with torch.set_grad_enabled(records):
                            made(x)
                        assert said.pop() == (10 * size, keeps and records), (how, keeps, records)
            row = layers.RowParallelLinear.from_linear(plain[2], group=group)
            rowwise = parallelize_module(plain[2], mesh, layers.RowwiseParallel())
            for made in (row, rowwise):
                made(narrow)
                assert said.pop() == 4 * size
            parallelize_module(plain[0], mesh, layers.ColwiseParallel())(x)
            assert said.pop() == (4 * size, False) and not said
            pair = nn.ModuleDict({"gate": nn.Linear(8, 2 * size), "up": nn.Linear(8, 2 * size)})
            parallelize_module(pair, mesh, layers.SharedGather("gate", "up"))
            pair["gate"](x)
            with pytest.raises(ValueError, match=r"the input has dtype torch\.float64"):
                pair["gate"](x.double())
            assert said.pop() == (4 * size, False) and not pair["up"].shared.waiting, "what a call before has left is kept"
        finally:
            linear.ag_gemm, linear.gemm_rs = calls
    for kind in (layers.ColumnParallelLinear, layers.RowParallelLinear):
        with pytest.raises(ValueError, match=f"{kind.__name__}: sequence_dim=True is not a dimension of the input"):
            kind(2 * size, 2 * size, group=group, sequence_dim=True)


def test_what_layers_hand_on():
    run_ranks(handed_on, 2)


@pytest.mark.parametrize("style", ("ColwiseParallel", "RowwiseParallel"))
def test_a_sequence_is_counted_from_the_front(style):
    """From the back, the dimension of the sequence would be another one for what a layer has beside it."""
    name = {"ColwiseParallel": "input_layouts", "RowwiseParallel": "output_layouts"}[style]
    with pytest.raises(ValueError, match=rf"{style}: S\(-2\) is not Shard\(d\) of the sequence dimension d|{style}: Shard"):
        getattr(fluxlike.nn, style)(**{name: Shard(-2)})
    assert getattr(fluxlike.nn, style)(**{name: Shard(0)}).sequence == Shard(0)

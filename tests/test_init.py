"""fluxlike.init that fails leaves nothing behind, and says what of its environment is wrong. What else it refuses: test_errors."""

import gc
import os
from functools import partial

import pytest
import torch
import torch.distributed as dist
from cases import RSCase
from ranks import run_fresh
from test_errors import refuses

import fluxlike
from fluxlike.runtime import racecheck, world
from fluxlike.runtime.control import ControlGroup

TOO_LARGE = {"heap": "shm", "heap_bytes": 1 << 50}


def failing_inits(group, port, checked):
    """Of a torch.distributed that it starts itself, too: nothing is left, no connection and no checker, and the next one works."""
    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.destroy_process_group()
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", FLUXLIKE_LOG="loud")
    refuses(fluxlike.init, ValueError, "FLUXLIKE_LOG='loud'", "WARNING")
    assert not dist.is_initialized()
    del os.environ["FLUXLIKE_LOG"]
    os.environ["FLUXLIKE_RACECHECK"] = str(int(checked))
    # found with the connections made, and with the checker running
    for how, kind, word in (({"heap": "disk"}, ValueError, "'disk'"), (TOO_LARGE, RuntimeError, "smaller heap_bytes")):
        refuses(partial(fluxlike.init, **how), kind, word)
        assert not fluxlike.is_initialized() and not dist.is_initialized() and racecheck.active() is None
        assert not [thing for thing in gc.get_objects() if type(thing) is ControlGroup and thing._gloo is not None]
    fluxlike.init(heap="shm", heap_bytes=4 << 20)
    assert (racecheck.active() is not None) == checked
    with fluxlike.create_gemm_rs_context(24, 12, dtype=torch.float32) as ctx:
        RSCase(23, 12, [8] * 2, torch.float32, 1).check(ctx, None, ctx.choose(ctx.problem(23, 12, 0)).transport)
    fluxlike.finalize()
    assert not dist.is_initialized()


@pytest.mark.parametrize("checked", (False, True))
def test_init_works_after_inits_that_failed(checked):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun has it: one for all that comes
    for outcome in run_fresh(failing_inits, 2, {"FLUXLIKE_TIMEOUT_S": "60"}, port=store.port, checked=checked):
        assert outcome.ok, str(outcome)


@pytest.mark.parametrize(("local_rank", "takes"), (("1", 1), (None, 0), ("2", None), ("one", None), ("-1", None)))
def test_local_rank_is_a_gpu(monkeypatch, local_rank, takes):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    if takes is None:
        refuses(world._local_gpu, ValueError, f"LOCAL_RANK={local_rank!r}", "below 2", "CUDA_VISIBLE_DEVICES")
    else:
        assert world._local_gpu() == takes

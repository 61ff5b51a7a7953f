"""The race checker: silent on what is right, loud on every planted bug of order, whatever the timing."""

from typing import Any

import torch
from ranks import run_fresh

import fluxlike

ENV = {"FLUXLIKE_RACECHECK": "1", "FLUXLIKE_TIMEOUT_S": "20"}


def first_slice(group: Any, op: str, transport: str) -> bool:
    from cases import AGCase, RSCase
    fluxlike.init(heap="shm")
    n = group.size()
    if op == "gemm_rs":
        ctx = fluxlike.create_gemm_rs_context(80, 96, dtype=torch.float32, schedule=transport)
        for call in range(5):
            RSCase(40 + call, 48, [32] * n, torch.float32, call).check(ctx, group, transport)
    else:
        ctx = fluxlike.create_ag_gemm_context(80, 96, 64, dtype=torch.float32, schedule=transport)
        for call in range(5):
            AGCase(40 + call, [48] * n, 32, torch.float32, call).check(ctx, group, transport, True)
    fluxlike.finalize()
    return True

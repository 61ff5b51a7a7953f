"""Calls drawn at random: each gives the float64 result or is refused by an error that says what is wrong and what to do.

The same examples on every run. ``FLUXLIKE_TEST_FUZZ=5000`` hunts: so many examples a test, others on every run.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import poison
from fuzz_calls import FAULTS, LIMIT, Call, Layout, calls
from hypothesis import HealthCheck, Phase, given, settings
from ranks import TORCHRUN, device, run_ranks

import fluxlike

HUNT = int(os.environ.get("FLUXLIKE_TEST_FUZZ", "0"))
HUGE = 2**31 + 7
#: What a remedy sounds like.
REMEDY = ("use ", "pass ", "make ", "leave ", "give ", "split ", "must ")

_contexts: dict[Any, Any] = {}


def fuzz(examples: int) -> Callable:
    """The same examples each time, or many new ones in a hunt. A failure prints the call, so nothing is shrunk or kept."""
    return settings(
        max_examples=HUNT or (examples // 6 if TORCHRUN else examples),  # GPUs compile nearly every one
        derandomize=not HUNT or TORCHRUN,  # as many on each rank of torchrun, of which rank 0's are run
        database=None,
        phases=(Phase.generate,),
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )


def context(group, op: str, schedule: str, dtype: torch.dtype):
    """One context a kind for all examples: what a call leaves behind is found by the next."""
    key = (op, schedule, dtype, tuple(dist.get_process_group_ranks(group)))
    if key not in _contexts:
        _contexts[key] = make_context(group, op, schedule, dtype)
        poison(_contexts[key], group)
    return _contexts[key]


def make_context(group, op: str, schedule: str | None, dtype: torch.dtype):
    if op == "gemm_rs":
        return fluxlike.create_gemm_rs_context(LIMIT, LIMIT, dtype=dtype, group=group, schedule=schedule)
    return fluxlike.create_ag_gemm_context(LIMIT, LIMIT, LIMIT, dtype, group, schedule)


def arguments(call: Call, group) -> tuple[list[Any], dict[str, Any]]:
    """The call of this rank: (x, weight, ctx) and the keywords."""
    rank = dist.get_rank(group)
    ctx = None if call.schedule is None else context(group, call.op, call.schedule, call.torch_dtype)
    weights, biases = call.weights(rank), call.bias(rank)
    args = [call.x(rank), weights if call.as_list else weights[0], ctx]
    how: dict[str, Any] = {"bias": biases if call.as_list else biases[0]}
    if ctx is None:
        how["group"] = group
    if call.op == "ag_gemm":
        how |= {"return_gathered": call.gathered} | ({"m": call.m} if call.pass_m else {})
    if call.out:
        mine = slice(call.m) if call.op == "ag_gemm" else call.rows(rank)
        layout = Layout(offset=3 if call.out == "offset" else 0)
        outs = [layout.place(len(range(call.m)[mine]), call.ns[rank], call.torch_dtype, 1).fill_(7) for _ in weights]
        how["out"] = outs if call.as_list else outs[0]
    if call.says:
        how |= {"k": sum(call.ks)} if call.op == "gemm_rs" else {"n": sum(call.ns) * len(weights)}
    if call.gradient and ctx is None and not call.out:  # what autograd records has contexts and results of its own
        for t in (args[0], *weights):
            t.requires_grad_()
    return args, how


def equal(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    got = actual.detach().double().cpu()
    assert got.shape == expected.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(expected.shape)}"
    # NaN and Inf where torch has them, and everything else to the bit
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{what}: {text}")


def gives_the_result(group, call: Call) -> None:
    rank = dist.get_rank(group)
    expected = call.expected(rank)
    for where in (fluxlike, fluxlike.reference):
        args, how = arguments(call, group)
        before = [t.clone() for t in (args[0], *call.weights(rank))]
        result = getattr(where, call.op)(*args, **how)
        what = f"{where.__name__}, rank {rank}"
        if call.op == "gemm_rs":
            results = [result]
            assert "out" not in how or result is how["out"], what
        else:
            result, gathered = result if call.gathered else (result, None)
            assert isinstance(result, list) == call.as_list, what
            results = result if call.as_list else [result]
            assert "out" not in how or [*map(id, results)] == [*map(id, how["out"] if call.as_list else [how["out"]])], what
            if gathered is not None:
                equal(gathered, call.whole(), f"gathered, {what}")
        assert len(results) == len(expected), what
        for i, (y, right) in enumerate(zip(results, expected, strict=True)):
            assert y.dtype == call.torch_dtype and y.device == device() and y.is_contiguous(), what
            equal(y, right, f"weight {i}, {what}")
        weights = args[1] if call.as_list else [args[1]]
        for t, was in zip((args[0], *weights), before, strict=True):
            equal(t, was.detach().double().cpu(), f"an input was written to, {what}")


def right(group, call: Call) -> None:
    try:
        gives_the_result(group, call)
    except Exception:
        _contexts.clear()  # nobody uses them again: the pool of ranks ends
        raise


@fuzz(25)
@given(call=calls(faulty=False))
def test_right_calls(call):
    run_ranks(right, call.world, call=call)


@pytest.mark.slow
@fuzz(120)
@given(call=calls(faulty=False))
def test_more_right_calls(call):
    run_ranks(right, call.world, call=call)


def broken(call: Call, group) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call with its fault."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    args, how = arguments(call, group)
    x, weights = args[0], call.weights(rank)
    w, n, k = weights[0], call.ns[rank], call.ks[rank]
    rows = len(range(call.m)[call.rows(rank)])
    what, _, fault = call.fault.partition(" ")
    if what == "x":
        args[0] = broken_tensor(x, fault, call.place)
    elif what == "weight":
        bad = broken_tensor(w, fault, call.place)
        at = call.place % len(weights)
        args[1] = [*weights[:at], bad, *weights[at + 1 :]] if call.as_list else bad
    elif what == "bias":
        how["bias"] = broken_bias(n, call.torch_dtype, fault, device())
    elif what == "out":
        how["out"] = broken_out(call, args, how, (call.m if call.op == "ag_gemm" else rows, n))
    match call.fault:
        case "no weights":
            args[1], how["bias"] = (), None
        case "more biases than weights":
            how["bias"] = [None] * (len(weights) + 1)
        case "more results than weights":
            how["out"] = [x.new_ones(call.m, n) for _ in (*weights, w)]
        case "two results in one memory":
            args[1], how["bias"], how["out"] = [w, w], None, [x.new_ones(call.m, n)] * 2
        case "m does not fit":
            how["m"] = (rows + 1 + call.place) * size
        case "m is negative":
            how["m"] = -1
        case "m is a float":
            how["m"] = float(rows * size)
        case "m is a bool":
            how["m"] = True
        case "m is a string":
            how["m"] = "8"
        case "context of the other operation":
            other = "ag_gemm" if call.op == "gemm_rs" else "gemm_rs"
            args[2] = context(group, other, "in_kernel", call.torch_dtype)
        case "context is a string":
            args[2] = "ctx"
        case "context has another dtype":
            args[2] = context(group, call.op, "auto", torch.float32 if call.dtype != "float32" else torch.float16)
        case "too large for the context":
            args[2] = context(group, call.op, "copy_engine", call.torch_dtype)
            args[0] = x.new_ones(LIMIT + 1, k)
            how.pop("m", None)
        case "over 2**31 rows":
            args[0] = x.new_ones(1, k).expand(HUGE, k)
            how.pop("m", None)
        case "over 2**31 columns":
            bad = x.new_ones(1, k).expand(HUGE, k)
            args[1], how["bias"] = [bad] if call.as_list else bad, None
        case "over 2**31 of K":
            # stride 0 along K is not for x to have; without rows it has no strides
            args[0], args[1] = x.new_ones(0, HUGE), x.new_ones(0, HUGE)
            how |= {"m": 0} if call.op == "ag_gemm" else {}
            how["bias"] = None
    return args, how


def broken_tensor(t: torch.Tensor, fault: str, place: int) -> Any:
    wide = t.new_ones(t.shape[0], 2 * t.shape[1] + 2)
    match fault:
        case "is a vector":
            return t[0]
        case "is a number":
            return 1.5
        case "is missing":
            return None
        case "is on meta":
            return t.to("meta")
        case "is sparse":
            return t.to_sparse_csr() if place % 2 else t.to_sparse()
        case "has no memory":
            return torch._efficientzerotensor(tuple(t.shape), dtype=t.dtype, device=t.device)
        case "is a negative view":
            return torch._neg_view(t)
        case "has another dtype":
            return t.double()
        case "is of integers":
            return t.int()
        case "is 3-D":
            return t[None]
        case "is a string":
            return "weight"
        case "has another K":
            return wide[:, : t.shape[1] + 1 + place % 2].contiguous()
        case "has strides along K" | "has strides along both":
            return wide[:, : 2 * t.shape[1] : 2]
        case "is transposed":
            return t.T.contiguous().T
    raise AssertionError(f"the test is wrong: {fault}")


def broken_bias(n: int, dtype: torch.dtype, fault: str, there: torch.device) -> Any:
    bias = torch.ones(n, dtype=dtype, device=there)
    match fault:
        case "is a matrix":
            return bias[None]
        case "is long":
            return torch.ones(n + 1, dtype=dtype, device=there)
        case "has strides":
            return torch.ones(3 * n, dtype=dtype, device=there)[::3]
        case "is expanded":
            return bias[:1].expand(n)
        case "is on meta":
            return bias.to("meta")
        case "has another dtype":
            return bias.double()
        case "is a number":
            return 1
    raise AssertionError(f"the test is wrong: {fault}")


def broken_out(call: Call, args: list[Any], how: dict[str, Any], shape: tuple[int, int]) -> Any:
    """What is given as ``out``; for a list of weights a list, of which one is broken."""
    if not call.as_list:
        return broken_result(call, args, how, shape)
    one = [args[0], args[1][0]]
    outs = [args[0].new_ones(shape) for _ in args[1]]
    outs[call.place % len(outs)] = broken_result(call, one, how, shape)
    args[0], args[1] = one[0], [one[1], *args[1][1:]]
    return outs


def broken_result(call: Call, args: list[Any], how: dict[str, Any], shape: tuple[int, int]) -> Any:
    (rows, n), dtype = shape, call.torch_dtype
    out = torch.ones(rows, n, dtype=dtype, device=device())
    match call.fault:
        case "out has another shape":
            return torch.ones(rows + 1, n, dtype=dtype, device=device())
        case "out has another dtype":
            return out.double()
        case "out has strides":
            return torch.ones(n, rows, dtype=dtype, device=device()).T
        case "out is expanded":
            return out[:1].expand(rows, n)
        case "out is on meta":
            return out.to("meta")
        case "out is a list":
            return out.tolist()
        case "out wants a gradient":
            return out.requires_grad_()
    # one memory for out and an operand: they share one element, or the whole of the smaller one
    which = call.fault.removeprefix("out is ")
    operand = {"x": args[0], "weight": args[1], "bias": torch.ones(n, dtype=dtype, device=device())}[which]
    memory = torch.ones(operand.numel() + out.numel(), dtype=dtype, device=device())
    start = (0, operand.numel() - 1, operand.numel() // 2)[call.place % 3]
    shared = memory[: operand.numel()].view(operand.shape)
    if which == "bias":
        how["bias"] = shared
    else:
        args[["x", "weight"].index(which)] = shared
    return memory[start : start + out.numel()].view(rows, n)


def refused(group, call: Call) -> None:
    """The same on every rank: ValueError, the words of the fault, a remedy; and the context still works."""
    for where in (fluxlike, fluxlike.reference):
        args, how = broken(call, group)
        what = f"{where.__name__}, rank {dist.get_rank(group)}, {call.fault}"
        with pytest.raises(Exception) as caught:
            getattr(where, call.op)(*args, **how)
        said = str(caught.value)
        assert type(caught.value) is ValueError, f"{what}: {type(caught.value).__name__}: {said}"
        assert said.startswith(f"{call.op}: "), f"{what}: {said}"
        for word in FAULTS[call.op][call.fault]:
            assert word in said, f"{what}: {word!r} not in: {said}"
        assert any(word in said for word in REMEDY), f"{what}: no remedy in: {said}"
    good = Call(
        call.op, call.world, call.schedule, call.dtype, 3, (2,) * call.world, (3,) * call.world, call.seed,
        (Layout(),) * call.world, (Layout(),), (True,), pass_m=call.op == "ag_gemm",
    )  # fmt: skip
    gives_the_result(group, good)


@fuzz(25)
@given(call=calls(faulty=True))
def test_bad_calls(call):
    run_ranks(refused, call.world, call=call)


@pytest.mark.slow
@fuzz(100)
@given(call=calls(faulty=True))
def test_more_bad_calls(call):
    run_ranks(refused, call.world, call=call)


def one_bad_rank(group, call: Call, guilty: int) -> None:
    """The bad input is refused where it is; the others, who wait for it, are told so, and new contexts work."""
    rank = dist.get_rank(group)
    broken_args, broken_how = broken(call, group)
    args, how = arguments(call, group)
    ctx = make_context(group, call.op, call.schedule, call.torch_dtype)
    if rank == guilty:
        broken_args[2] = ctx
        with pytest.raises(ValueError, match=f"^{call.op}: "):
            getattr(fluxlike, call.op)(*broken_args, **broken_how)
    args[2] = ctx
    with pytest.raises(fluxlike.CallMismatch, match="that this rank refused by an error of its own"):
        getattr(fluxlike, call.op)(*args, **how)
        ctx.check()
    ctx.close()
    for key in [key for key, other in _contexts.items() if other.control is ctx.control]:
        _contexts.pop(key).close()  # they ended with it
    gives_the_result(group, replace(call, fault=""))


@pytest.mark.parametrize(
    ("op", "schedule", "fault", "guilty"),
    (
        ("gemm_rs", "copy_engine", "out is weight", 0),
        ("ag_gemm", "copy_engine", "weight has another K", 2),
        ("ag_gemm", "in_kernel", "x is transposed", 1),
    ),
)
def test_a_bad_call_on_one_rank(op, schedule, fault, guilty):
    call = Call(
        op, 3, schedule, "float32", 12, (10,) * 3, (8,) * 3, 1, (Layout(),) * 3, (Layout(),), (True,), fault=fault,
    )  # fmt: skip
    run_ranks(one_bad_rank, 3, call=call, guilty=guilty)

"""The interpreter: arithmetic against torch, kernels as the compiler takes them, programs that wait for each other."""

import contextlib
import ctypes
import inspect
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from typing import NamedTuple

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as stock
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from fluxlike.runtime.interpreter import Schedule, configure, run, yield_program

OFFSET = tl.constexpr(3)


class Ended(RuntimeError):
    """Stands for a wait that ran out."""

    fluxlike_passthrough = True


def is_interp(_semantic=None):
    return tl.constexpr(_semantic is None)


def pause(seconds=0.0, _semantic=None):
    """One turn of a wait: others first, a nap if there are none."""
    if not yield_program():
        time.sleep(max(50e-6, float(seconds)))


def end(_semantic=None):
    raise Ended("nobody came")


LOG: list[int] = []


def note(value, _semantic=None):
    LOG.append(int(value.handle.data.item()))


for _builtin in (is_interp, pause, end, note):
    _builtin.__triton_builtin__ = True


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16)


def compile_ptx(kernel, signature: dict[str, str], constants: dict, cc: int = 90) -> str:
    source = ASTSource(kernel, signature, constants, {})
    return triton.compile(source, target=GPUTarget("cuda", cc, 32)).asm["ptx"]


@contextlib.contextmanager
def schedule(**how):
    previous = configure(Schedule(**how))
    try:
        yield
    finally:
        configure(previous)


# 1 kernels, arguments, nested functions


@triton.jit
def add_constant(x, BY: tl.constexpr):
    half: tl.constexpr = BY // 2
    return x + half + half


@triton.jit
def add_twice(x, BY: tl.constexpr):
    x = add_constant(x, BY)
    return add_constant(x, BY)


@triton.jit
def nested_kernel(x, out, n, scale, flag, BLOCK: tl.constexpr, BY: tl.constexpr = 2):
    index = tl.arange(0, BLOCK)
    mask = index < n
    value = tl.load(x + index, mask=mask, other=0.0)
    value = add_twice(value, BY) * scale + tl.zeros((BLOCK,), tl.float32) + tl.cdiv(n, 2)
    if flag:
        value = value + OFFSET
    tl.store(out + index, value, mask=mask)
    if tl.program_id(0) == 0:
        tl.store(out + BLOCK, tl.sum(tl.where(mask, value, 0.0)))
        tl.store(out + BLOCK + 1, value.max(0))
    place = (OFFSET + n).to(tl.int64)
    tl.store(out + BLOCK - 2 + place - n, n)


@pytest.mark.parametrize("flag", [False, True])
def test_arguments_defaults_and_nested_functions(flag):
    x, out = torch.arange(8.0), torch.zeros(12)
    run(nested_kernel, 1, x, out, 6, 0.5, flag, BLOCK=8, num_warps=4, num_stages=3)
    expect = (x[:6] + 4) * 0.5 + 3 + 3 * flag
    assert torch.equal(out[:6], expect)
    assert out[6:].tolist() == [0, 0, expect.sum(), 6, 0, 0]


def test_unknown_keyword_and_wrong_kernel_are_refused():
    with pytest.raises(TypeError, match="BLOK"):
        run(nested_kernel, 1, torch.zeros(8), torch.zeros(12), 6, 0.5, True, BLOCK=8, BLOK=4)
    with pytest.raises(TypeError, match="jit"):
        run(lambda x: None, 1, torch.zeros(8))


class Pair(NamedTuple):
    left: torch.Tensor
    right: int


@triton.jit
def tuple_kernel(pair, both, out, KIND: tl.constexpr):
    tl.store(out, tl.load(pair.left) + pair.right)
    tl.store(out + 1, tl.load(both[0] + both[1]))
    first, second = 1, 2
    tl.store(out + 2, first.to(tl.float32) + second.to(tl.float32))
    tl.store(out + 3, tl.load(both[0]).to(KIND).to(tl.float32))


def test_tuples_and_dtype_constants():
    x, out = torch.tensor([1 / 3, 7.0]), torch.zeros(4)
    run(tuple_kernel, 1, Pair(x, 2), (x, 1), out, tl.constexpr(tl.bfloat16))
    assert out.tolist() == [x[0] + 2, 7, 3, x[0].bfloat16().float()]


def test_kernel_in_a_closure_and_grid_order():
    step = tl.constexpr(10)

    @triton.jit
    def kernel(out):
        here = tl.program_id(0) + 2 * (tl.program_id(1) + 3 * tl.program_id(2))
        tl.store(out + here, here * step + tl.num_programs(2))

    out = torch.zeros(24, dtype=torch.int32)
    run(kernel, (2, 3, 4), out)
    assert out.tolist() == [10 * i + 4 for i in range(24)]


def test_interpreted_function_of_triton_is_accepted():
    x, out = torch.arange(8.0), torch.zeros(12)
    run(stock.InterpretedFunction(nested_kernel.fn), 1, x, out, 6, 0.5, True, BLOCK=8)
    assert out[0] == 8


def test_under_the_switch_for_the_whole_process():
    """With TRITON_INTERPRET=1 every @triton.jit makes an InterpretedFunction, also those of Triton itself."""
    this = "test_arguments_defaults_and_nested_functions or bit_for_bit or dot_sums or reductions or restored or stops_the"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", this, __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    assert "14 passed" in done.stdout


# 2 nothing is left behind


def state_of_triton() -> dict:
    owners = [tl, tl.core, tl.math, tl.standard, tl.tensor, tl.dtype, tl.core.tensor_descriptor_base, JITFunction]
    owners += [
        stock,
        stock.InterpreterBuilder,
        stock.InterpretedFunction,
        inspect.getmodule(test_tuples_and_dtype_constants),
    ]
    owners += [owner for owner in (getattr(tl, "condition", None),) if owner is not None]
    return {(id(owner), name): value for owner in owners for name, value in vars(owner).items()}


def same(before: dict, after: dict) -> None:
    assert before.keys() == after.keys(), before.keys() ^ after.keys()
    changed = [key for key, value in before.items() if after[key] is not value]
    assert not changed


@triton.jit
def failing_kernel(x):
    tl.static_assert(tl.load(x) > 0, "not positive")


def test_everything_is_restored():
    x, out = torch.arange(8.0), torch.zeros(12)
    run(nested_kernel, 1, x, out, 6, 0.5, True, BLOCK=8)  # the first run may fill caches
    before = state_of_triton()
    run(nested_kernel, 2, x, out, 6, 0.5, True, BLOCK=8)
    same(before, state_of_triton())
    with pytest.raises(RuntimeError, match="not positive"):
        run(failing_kernel, 3, x)
    same(before, state_of_triton())
    if isinstance(tl.cdiv, JITFunction):
        with pytest.raises(RuntimeError, match="outside of the scope"):
            tl.cdiv(3, 2)


def test_compile_before_between_and_after():
    signature = {
        "x": "*fp32",
        "out": "*fp32",
        "n": "i32",
        "scale": "fp32",
        "flag": "i1",
        "BLOCK": "constexpr",
        "BY": "constexpr",
    }
    constants = {"BLOCK": 8, "BY": 2}
    first = compile_ptx(nested_kernel, signature, constants)
    x, out = torch.arange(8.0), torch.zeros(12)
    run(nested_kernel, 1, x, out, 6, 0.5, True, BLOCK=8)
    assert compile_ptx(nested_kernel, signature, constants) == first
    assert compile_ptx(nested_kernel, signature, constants | {"BLOCK": 16}) != first
    run(nested_kernel, 1, x, out, 6, 0.5, True, BLOCK=8)
    assert out[0] == 8


def test_after_triton_leaked_its_own_patches():
    scope = stock._patch_lang(nested_kernel.fn)
    try:
        before = state_of_triton()
        from fluxlike.runtime import interpreter

        interpreter._patches.cache_clear()
        out = torch.zeros(12)
        run(nested_kernel, 1, torch.arange(8.0), out, 6, 0.5, True, BLOCK=8)
        same(before, state_of_triton())
    finally:
        scope.restore()
        interpreter._patches.cache_clear()
    assert out[0] == 8


# 3 arithmetic


@triton.jit
def bf16_kernel(x, y, out, fout, iout, compared, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    a = tl.load(x + i)
    b = tl.load(y + i)
    tl.store(out + i, a + b)
    tl.store(out + n + i, a - b)
    tl.store(out + 2 * n + i, a * b)
    tl.store(out + 3 * n + i, tl.maximum(a, b))
    tl.store(out + 4 * n + i, a * 0.1)
    tl.store(out + 5 * n + i, tl.where(a < b, a, b))
    tl.store(out + 6 * n + i, tl.abs(a))
    tl.store(out + 7 * n + i, tl.full((BLOCK,), 0.1, tl.bfloat16))
    tl.store(fout + i, a.to(tl.float32))
    tl.store(fout + n + i, a.to(tl.float16).to(tl.float32))
    tl.store(iout + i, (a * 8).to(tl.int32))
    tl.store(iout + n + i, ((a < b) & (b > 0)).to(tl.int32))
    tl.store(compared + i, (a < b).to(tl.int8))
    tl.store(compared + n + i, (a == b).to(tl.int8))
    tl.store(compared + 2 * n + i, (a >= b).to(tl.int8))


def test_bf16_elementwise_is_torch_bit_for_bit():
    n = 1024
    x, y = torch.randn(2, n, generator=torch.Generator().manual_seed(1)).bfloat16()
    y[::7] = x[::7]
    out, fout, iout = torch.empty(8, n, dtype=torch.bfloat16), torch.empty(2, n), torch.empty(2, n, dtype=torch.int32)
    compared = torch.empty(3, n, dtype=torch.int8)
    run(bf16_kernel, 1, x, y, out, fout, iout, compared, n, BLOCK=n)
    tenth = torch.tensor(0.1).bfloat16()
    expect = [x + y, x - y, x * y, torch.maximum(x, y), x * tenth, torch.where(x < y, x, y), x.abs(), tenth.expand(n)]
    for got, want in zip(out, expect, strict=True):
        assert torch.equal(bits(got), bits(want))
    assert torch.equal(fout, torch.stack([x.float(), x.half().float()]))
    assert torch.equal(iout, torch.stack([(x * 8).int(), ((x < y) & (y > 0)).int()]))
    assert torch.equal(compared, torch.stack([x < y, x == y, x >= y]).to(torch.int8))


@triton.jit
def cast_kernel(x, i, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at)
    tl.store(out + at, value.to(tl.bfloat16))
    tl.store(out + BLOCK + at, value.to(tl.bfloat16, fp_downcast_rounding="rtne"))
    tl.store(out + 2 * BLOCK + at, value.to(tl.float16).to(tl.bfloat16))
    tl.store(out + 3 * BLOCK + at, tl.load(i + at).to(tl.bfloat16))
    tl.store(out + 4 * BLOCK + at, value)  # a store casts by itself
    tl.store(out + 5 * BLOCK + at, value.to(tl.bfloat16, fp_downcast_rounding="rtz"))


def test_casts_to_bf16_round_to_nearest_even():
    ties = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x00000001], dtype=torch.int32).view(torch.float32)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 1e-40, -65504.0, 3e38])
    x = torch.cat([ties, special, torch.randn(1012, generator=torch.Generator().manual_seed(2))])
    i = torch.randint(-(2**31), 2**31 - 1, (1024,), dtype=torch.int32)
    out = torch.empty(6, 1024, dtype=torch.bfloat16)
    run(cast_kernel, 1, x, i, out, BLOCK=1024)
    for got, want in zip(out, [x.bfloat16(), x.bfloat16(), x.half().bfloat16(), i.bfloat16(), x.bfloat16()], strict=False):
        assert torch.equal(bits(got), bits(want))
    truncated = (x[12:].view(torch.int32) >> 16).to(torch.int16)
    assert torch.equal(bits(out[5, 12:]), truncated)
    nan = torch.full((1024,), float("nan"))
    run(cast_kernel, 1, nan, i, out, BLOCK=1024)
    assert out[0].isnan().all()


@triton.jit
def dot_kernel(a, b, c, d, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows = tl.arange(0, M)[:, None]
    columns = tl.arange(0, N)[None, :]
    left = tl.load(a + rows * K + tl.arange(0, K)[None, :])
    right = tl.load(b + columns * K + tl.arange(0, K)[:, None])
    acc = tl.zeros((M, N), tl.float32)
    acc = tl.dot(left, right, acc, input_precision="ieee")
    acc = tl.dot(left, right, acc, input_precision="ieee")
    tl.store(c + rows * N + columns, acc)
    tl.store(d + rows * N + columns, acc.to(d.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dot_sums_in_float32(dtype):
    M, N, K = 32, 64, 128
    generator = torch.Generator().manual_seed(3)
    a, b = torch.randn(M, K, generator=generator).to(dtype), torch.randn(N, K, generator=generator).to(dtype)
    c, d = torch.empty(M, N), torch.empty(M, N, dtype=dtype)
    run(dot_kernel, 1, a, b, c, d, M, N, K)
    exact = 2 * a.double() @ b.double().T
    bound = 2 * K * 2.0**-24 * 2 * (a.double().abs() @ b.double().abs().T)  # any order of summation
    assert ((c - exact).abs() <= bound).all()
    assert torch.equal(d, c.to(dtype))
    assert (c - exact).abs().max() < 1e-3


def test_dot_into_float16_rounds_once():
    @triton.jit
    def kernel(out, K: tl.constexpr):
        twos = tl.where(tl.arange(0, K)[None, :] == 0, 2.0, tl.full((16, K), 1.0, tl.float32)).to(tl.float16)
        ones = tl.full((K, 16), 1.0, tl.float16)
        total = tl.dot(twos, ones, tl.full((16, 16), 1.0, tl.float16), out_dtype=tl.float16)
        tl.store(out + tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :], total)

    out = torch.empty(16, 16, dtype=torch.float16)
    run(kernel, 1, out, 2048)  # 2049 + 1; in float16 2049 is 2048, and 2048 + 1 is 2048
    assert out.eq(2050).all()


@triton.jit
def reduce_kernel(x, out, BLOCK: tl.constexpr):
    value = tl.load(x + tl.arange(0, BLOCK))
    tl.store(out, tl.sum(value))
    tl.store(out + 1, tl.max(value))
    tl.store(out + 2, value.sum())
    tl.store(out + 8 + tl.arange(0, BLOCK), tl.cumsum(value))


def test_reductions_of_bf16():
    x = torch.arange(-4, 12).bfloat16() / 8
    out = torch.zeros(24, dtype=torch.bfloat16)
    run(reduce_kernel, 1, x, out, BLOCK=16)
    assert out[:3].tolist() == [x.float().sum(), x.max(), x.float().sum()]
    assert torch.equal(out[8:], x.float().cumsum(0).bfloat16())


# 4 programs that wait for each other


@triton.jit
def last_first_kernel(flag, out):
    here = tl.program_id(0)
    last = tl.num_programs(0) - 1
    if here < last:
        while tl.atomic_add(flag + here + 1, 0, sem="acquire", scope="sys") < 1:
            pause()
    tl.store(out + here, tl.load(out + last) + here)
    tl.atomic_xchg(flag + here, 1, sem="release", scope="sys")


@pytest.mark.parametrize("how", [{}, {"seed": 1}, {"seed": 2, "jitter": 0.5}, {"jitter": 0.3}])
def test_a_program_may_wait_for_a_later_one(how):
    flag, out = torch.zeros(6, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
    out[5] = 100
    with schedule(**how):
        run(last_first_kernel, 6, flag, out)
    assert out.tolist() == [105, 106, 107, 108, 109, 105]
    assert threading.active_count() == 1


def test_program_zero_waits_for_program_three():
    @triton.jit
    def kernel(flag, out):
        if tl.program_id(0) == 0:
            while tl.atomic_add(flag, 0, sem="acquire", scope="gpu") < 3:
                pause()
            tl.store(out, 42)
        else:
            tl.atomic_add(flag, 1, sem="release", scope="gpu")

    flag, out = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    run(kernel, 4, flag, out)
    assert out.item() == 42


def test_a_grid_without_waits_needs_no_thread(monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", lambda self: pytest.fail("a thread was started"))
    out = torch.zeros(500, dtype=torch.int32)

    @triton.jit
    def kernel(out):
        tl.store(out + tl.program_id(0), tl.program_id(0))

    run(kernel, 500, out)
    assert out.tolist() == list(range(500))


@triton.jit
def await_kernel(flag, turns):
    count = 0
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") == 0:
        count += 1
        pause(0.001)
    tl.store(turns + tl.program_id(0), count)


@pytest.mark.parametrize("programs", [1, 4])
def test_a_grid_that_only_waits_leaves_the_core_alone(programs):
    flag, turns = torch.zeros(1, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    address = flag.data_ptr()
    timer = threading.Timer(0.6, lambda: ctypes.c_int32.from_address(address).__setattr__("value", 1))
    timer.start()
    used = time.process_time()
    run(await_kernel, programs, flag, turns)
    used = time.process_time() - used
    timer.join()
    assert turns[:programs].min() > 10
    assert used < 0.45, used


def test_yield_outside_of_a_kernel_has_nobody_to_yield_to():
    assert yield_program() is False


@triton.jit
def order_kernel(x):
    note(tl.program_id(0))
    tl.store(x, tl.load(x) + 1)
    note(tl.program_id(0) + 10)
    tl.store(x, tl.load(x) + 1)
    note(tl.program_id(0) + 20)


def order(x: torch.Tensor) -> list[int]:
    LOG.clear()
    run(order_kernel, 5, x)
    return list(LOG)


def test_random_switches_are_repeatable_and_find_a_lost_update():
    x = torch.zeros(1)
    plain = order(x)
    assert plain == [i + j for i in range(5) for j in (0, 10, 20)]
    assert x.item() == 10
    seen = []
    for seed in (1, 1, 2):
        with schedule(seed=seed, jitter=0.7):
            x.zero_()
            seen.append((order(x), x.item(), order(x)))
    assert seen[0] == seen[1]
    assert seen[0] != seen[2]
    assert seen[0][0] != plain
    assert seen[0][0] != seen[0][2]
    assert min(s[1] for s in seen) < 10  # load and store of different programs came between each other
    assert order(x) == plain


def test_delay_where_nobody_can_be_switched_to():
    with schedule(seed=1, jitter=1.0, delay=0.05):
        start = time.perf_counter()
        run(order_kernel, 1, torch.zeros(1))
        assert time.perf_counter() - start > 0.02


# 5 exceptions


@triton.jit
def wait_or_fail_kernel(flag, out, MODE: tl.constexpr):
    here = tl.program_id(0)
    if here == 2:
        if MODE == "end":
            end()
        if MODE == "assert":
            tl.device_assert(tl.load(flag) > 0, "flag is down")
        if MODE == "value":
            tl.store(out, tl.load(flag) + undefined_name)  # noqa: F821
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") == 0:
        pause()
    tl.store(out, 1)


@pytest.mark.parametrize("how", [{}, {"seed": 3, "jitter": 0.5}])
@pytest.mark.parametrize(
    ("mode", "kind", "text", "cause"),
    [
        ("end", Ended, "^nobody came$", type(None)),
        (
            "assert",
            RuntimeError,
            r"wait_or_fail_kernel, program \(2, 0, 0\): AssertionError: flag is down",
            AssertionError,
        ),
        ("value", RuntimeError, r"wait_or_fail_kernel, program \(2, 0, 0\): NameError", NameError),
    ],
)
def test_an_exception_stops_the_grid(mode, kind, text, cause, how):
    flag, out = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    before = state_of_triton()
    start = time.perf_counter()
    with schedule(**how), pytest.raises(kind, match=text) as caught:
        run(wait_or_fail_kernel, 5, flag, out, mode)
    assert time.perf_counter() - start < 2
    assert isinstance(caught.value.__cause__, cause)
    assert caught.type is kind
    assert out.item() == 0
    assert threading.active_count() == 1
    same(before, state_of_triton())
    flag += 1
    run(last_first_kernel, 2, torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))


def test_errors_of_the_package_pass_through():
    errors = pytest.importorskip("fluxlike.runtime.errors")
    assert errors.PeerTimeout.fluxlike_passthrough
    assert issubclass(errors.PeerTimeout, RuntimeError)


@pytest.mark.parametrize("programs", [1, 4])
def test_ctrl_c_ends_programs_that_wait(programs):
    before = state_of_triton()
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        run(await_kernel, programs, torch.zeros(1, dtype=torch.int32), torch.zeros(4, dtype=torch.int32))
    assert time.perf_counter() - start < 2
    timer.join()
    assert threading.active_count() == 1
    same(before, state_of_triton())


@pytest.mark.parametrize("polite", [True, False])
def test_ctrl_c_when_the_first_program_is_done(polite):
    @triton.jit
    def kernel(begun, flag, POLITE: tl.constexpr):
        if tl.program_id(0) == 0:  # gives way once, then ends, so that its thread waits for the others
            while tl.atomic_add(begun, 0) == 0:
                pause()
        else:
            tl.atomic_add(begun, 1)
            pause()
            while tl.atomic_add(flag, 0) == 0:
                if POLITE:
                    pause()

    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        run(kernel, 3, torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), polite)
    assert time.perf_counter() - start < 2
    assert threading.active_count() == 1


# 6 builtins that know where they are


@triton.jit
def where_kernel(out):
    if is_interp():
        tl.store(out, 1)
    else:
        tl.inline_asm_elementwise("bar.sync 0; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        tl.store(out, 2)


def test_is_interp_is_true_here_and_false_in_a_compilation():
    out = torch.zeros(1, dtype=torch.int32)
    for _ in range(2):
        run(where_kernel, 1, out)
        assert out.item() == 1
        assert "bar.sync" in compile_ptx(where_kernel, {"out": "*i32"}, {})


# 7 descriptors, speed


@triton.jit
def copy_kernel(source, target, row, column, BM: tl.constexpr, BN: tl.constexpr, DEVICE: tl.constexpr):
    if DEVICE:
        source = tl.make_tensor_descriptor(source, shape=[20, 24], strides=[24, 1], block_shape=[BM, BN])
    block = source.load([row, column])
    target.store([row + 1, column + 8], block)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize(("row", "column"), [(0, 0), (8, 8), (-3, -8), (15, 16), (20, 0), (0, 24), (-8, 0), (-4, 16)])
def test_descriptor_blocks_over_the_edges(dtype, device, row, column):
    BM = BN = 8
    x = torch.randn(20, 24, generator=torch.Generator().manual_seed(4)).to(dtype)
    out = torch.full((18, 40), -1.0, dtype=dtype)
    target = TensorDescriptor(out, [18, 26], [40, 1], [BM, BN])
    source = x if device else TensorDescriptor.from_tensor(x, [BM, BN])
    run(copy_kernel, 1, source, target, row, column, BM, BN, device)
    expect = torch.full_like(out, -1.0)
    for i in range(BM):
        for j in range(BN):
            r, c = row + i, column + j
            value = x[r, c] if 0 <= r < 20 and 0 <= c < 24 else 0
            if 0 <= r + 1 < 18 and 0 <= c + 8 < 26:
                expect[r + 1, c + 8] = value
    assert torch.equal(out, expect)


def test_descriptor_column_must_be_aligned_and_nan_padding():
    x = torch.ones(20, 24, dtype=torch.bfloat16)
    out = torch.zeros(32, 40, dtype=torch.bfloat16)
    target = TensorDescriptor.from_tensor(out, [8, 8])
    with pytest.raises(RuntimeError, match="16 bytes"):
        run(copy_kernel, 1, TensorDescriptor.from_tensor(x, [8, 8]), target, 0, 4, 8, 8, False)
    run(copy_kernel, 1, TensorDescriptor.from_tensor(x, [8, 8], padding="nan"), target, 16, 16, 8, 8, False)
    assert out[17:21, 24:32].eq(1).all()
    assert out[21:25, 24:32].isnan().all()


@triton.jit
def slots_kernel(stage, out, slots, BM: tl.constexpr, BN: tl.constexpr):
    total = tl.zeros((BM, BN), tl.float32)
    for slot in range(slots):
        total += tl.reshape(stage.load([slot, 8, 16]), (BM, BN)).to(tl.float32)
    out.store([1, 8, 0], tl.reshape(total, (1, BM, BN)).to(tl.bfloat16))


def test_descriptors_of_rank_three():
    stage = torch.randn(3, 20, 64, generator=torch.Generator().manual_seed(5)).bfloat16()[:, :, :40]
    out = torch.zeros(2, 20, 24, dtype=torch.bfloat16)
    run(
        slots_kernel,
        1,
        TensorDescriptor.from_tensor(stage, [1, 16, 32]),
        TensorDescriptor.from_tensor(out, [1, 16, 32]),
        3,
        16,
        32,
    )
    expect = torch.zeros_like(out)
    expect[1, 8:, :] = stage[:, 8:, 16:].float().sum(0).bfloat16()
    assert torch.equal(out, expect)


@triton.jit
def empty_kernel(x):
    pass


def test_a_launch_costs_little_and_functions_are_rewritten_once(monkeypatch):
    x = torch.zeros(1)
    run(empty_kernel, 1, x)
    run(nested_kernel, 1, torch.zeros(8), torch.zeros(12), 6, 0.5, True, BLOCK=8)
    monkeypatch.setattr(inspect, "getsourcelines", lambda _: pytest.fail("source was read again"))
    times = []
    for _ in range(50):
        start = time.perf_counter()
        run(empty_kernel, 4, x)
        times.append(time.perf_counter() - start)
    run(nested_kernel, 1, torch.zeros(8), torch.zeros(12), 6, 0.5, True, BLOCK=8)
    assert min(times) < 3e-3, min(times)


# 8 the language


@triton.jit
def atomics_kernel(words, seen, n):
    i = tl.arange(0, 4)
    for sem in tl.static_range(2):
        tl.store(seen + sem, tl.atomic_add(words, 5, sem="acq_rel" if sem else "relaxed", scope="gpu"))
    tl.store(seen + 2, tl.atomic_cas(words, 10, 7, sem="acquire", scope="sys"))
    tl.store(seen + 3, tl.atomic_xchg(words, -1, sem="release", scope="cta"))
    tl.atomic_max(words + 1, 9)
    tl.atomic_add(words + 4 + i, i.to(words.dtype.element_ty), mask=i < n, sem="release", scope="sys")
    tl.atomic_xchg(words + 8 + i, tl.full((4,), 3, words.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_atomics_return_what_was_there(dtype):
    words, seen = torch.zeros(12, dtype=dtype), torch.zeros(4, dtype=dtype)
    run(atomics_kernel, 1, words, seen, 3)
    assert seen.tolist() == [0, 5, 10, 7]
    assert words.tolist() == [-1, 9, 0, 0, 0, 1, 2, 0, 3, 3, 3, 3]


@triton.jit
def count_kernel(words, times, TURNS: tl.constexpr):
    i = tl.arange(0, 8)
    for _ in range(TURNS):
        tl.atomic_add(words, 1, sem="relaxed", scope="sys")
        tl.atomic_add(words + 8 + i, tl.full((8,), 1, tl.int64), scope="sys")


def count(words: torch.Tensor) -> None:
    run(count_kernel, 1, words, 0, 400)


def test_atomics_hold_across_processes():
    words = torch.zeros(16, dtype=torch.int64).share_memory_()
    context = multiprocessing.get_context("fork")
    peers = [context.Process(target=count, args=(words,)) for _ in range(3)]
    for peer in peers:
        peer.start()
    for peer in peers:
        peer.join(60)
    assert [peer.exitcode for peer in peers] == [0] * 3
    assert words.tolist() == [1200] + [0] * 7 + [1200] * 8


@triton.jit
def language_kernel(x, out, address, n, BLOCK: tl.constexpr):
    there = address.to(tl.pointer_type(tl.float32))
    there = tl.multiple_of(there, 16)
    tl.assume(n > 0)
    back = (x.to(tl.int64, bitcast=True) + 4).to(x.dtype, bitcast=True)
    tl.store(out, tl.load(there + 1, volatile=True) + tl.load(back))
    total = tl.zeros((), tl.int64)
    for tile in tl.range(tl.program_id(0), n, tl.num_programs(0), flatten=True, num_stages=3):
        total += tile.to(tl.int64) * 1000000007
    tl.store(out + 1, (total // 1000000007).to(tl.float32))
    for k in tl.static_range(3):
        wide = tl.arange(0, 2 * 2**k)  # a constant: arange takes nothing else
        tl.store(out + 2 + k, tl.sum(wide).to(tl.float32))
    block = tl.load(x + tl.arange(0, BLOCK))
    left, right = tl.split(tl.permute(tl.reshape(block, (2, BLOCK // 2)), (1, 0)))
    tl.store(out + 8 + tl.arange(0, BLOCK // 2), left)
    tl.store(out + 8 + BLOCK // 2 + tl.arange(0, BLOCK // 2), right * 2)
    count = 5
    while (count > 0) & (tl.load(out) > -1):
        count -= 1
    if count == 0 and n > 1:
        tl.store(out + 7, -7 // n)
    tl.debug_barrier()


LANGUAGE = {"x": "*fp32", "out": "*fp32", "address": "i64", "n": "i32", "BLOCK": "constexpr"}
DOT = {"a": "*bf16", "b": "*bf16", "c": "*fp32", "d": "*bf16", "M": "constexpr", "N": "constexpr", "K": "constexpr"}
BLOCKS = {"stage": "tensordesc<bf16[1, 16, 32]>", "out": "tensordesc<bf16[1, 16, 32]>", "slots": "i32"}


@pytest.mark.parametrize("cc", [80, 90])
def test_the_kernels_of_these_tests_compile(cc):
    """What is interpreted here is Triton, not just something that happens to run as Python."""
    assert "st.global" in compile_ptx(language_kernel, LANGUAGE, {"BLOCK": 8}, cc)
    assert "mma" in compile_ptx(dot_kernel, DOT, {"M": 32, "N": 64, "K": 128}, cc)
    assert compile_ptx(slots_kernel, BLOCKS | {"BM": "constexpr", "BN": "constexpr"}, {"BM": 16, "BN": 32}, cc)
    assert "atom" in compile_ptx(atomics_kernel, {"words": "*i32", "seen": "*i32", "n": "i32"}, {}, cc)


def test_words_of_the_language():
    x, out = torch.arange(8.0), torch.zeros(16)
    run(language_kernel, 1, x, out, x.data_ptr(), 5, BLOCK=8, num_warps=8)
    assert out[:2].tolist() == [2, 10]
    assert out[2:5].tolist() == [1, 6, 28]
    assert out[7] == -1
    assert out[8:].tolist() == [0, 1, 2, 3, 8, 10, 12, 14]


def test_integers_wrap_silently_and_floats_do_not_warn(recwarn):
    @triton.jit
    def kernel(out, fout, big, zero):
        tl.store(out, big + 1)
        tl.store(out + 1, big.to(tl.int64) + 1)
        tl.store(fout, 1.0 / zero)

    out, fout = torch.zeros(2, dtype=torch.int64), torch.zeros(1)
    run(kernel, 1, out, fout, 2**31 - 1, 0.0)
    assert out.tolist() == [-(2**31), 2**31]
    assert fout.item() == float("inf")
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]


# 9 versions


def test_a_range_over_a_tensor_counts():
    @triton.jit
    def kernel(out, n):
        total = 0
        for i in range(tl.load(n)):
            total += i
        tl.store(out, total)

    out = torch.zeros(1, dtype=torch.int32)
    run(kernel, 1, out, torch.tensor([5], dtype=torch.int32))
    assert out.item() == 10
    assert np.array([3]).item() == 3


# 10 one call at a time


def test_runs_of_several_threads_do_not_mix():
    failures, out = [], torch.zeros(4, 12)

    def work(row):
        try:
            for _ in range(20):
                run(nested_kernel, 1, torch.arange(8.0), out[row], 6, float(row), True, BLOCK=8)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(row,)) for row in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert out[:, 1].tolist() == [5.0 * row + 6 for row in range(4)]


def test_a_run_inside_a_kernel_is_refused():
    def inner(_semantic=None):
        run(empty_kernel, 1, torch.zeros(1))

    inner.__triton_builtin__ = True

    @triton.jit
    def kernel(x):
        inner()

    with pytest.raises(RuntimeError, match="inside a kernel"):
        run(kernel, 1, torch.zeros(1))


def test_a_tensor_of_another_device_is_refused():
    with pytest.raises(ValueError, match="CPU tensors"):
        run(empty_kernel, 1, torch.zeros(1, device="meta"))

"""The interpreter: arithmetic against torch, descriptors, atomics, the words of the language."""

import functools
import multiprocessing
import operator
import os
import signal
import threading
import time

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from interp import bits, compile_ptx, pause
from triton.tools.tensor_descriptor import TensorDescriptor

from fluxlike.runtime import interpreter, programs
from fluxlike.runtime.interpreter import run

# 1 arithmetic


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


# 2 descriptors


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


# 3 the language


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
    there = address.to(tl.int64).to(tl.pointer_type(tl.float32))  # an address may fit in 32 bits
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
    assert "ex2" in compile_ptx(members_kernel, {"x": "*fp32", "u": "*u32", "out": "*fp32", "BLOCK": "constexpr"}, {"BLOCK": 4}, cc)
    for kernel, sizes in ((axes_kernel, {"AXIS": -1}), (nan_kernel, {"BLOCK": 4})):
        assert "max" in compile_ptx(kernel, {"x": "*fp32", "out": "*fp32"} | dict.fromkeys(sizes, "constexpr"), sizes, cc)
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


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def axes_kernel(x, out, AXIS: tl.constexpr):
    at = tl.arange(0, 4)[:, None] * 8 + tl.arange(0, 8)[None, :]
    block = tl.load(x + at)
    tl.store(out + at, tl.associative_scan(block, AXIS, larger))
    tl.store(out + 32 + tl.arange(0, 4), tl.reduce(block, AXIS, larger))
    tl.store(out + 36 + tl.arange(0, 4), tl.xor_sum((block * 8).to(tl.int32), AXIS).to(tl.float32))


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_axis_counted_from_the_end(axis, dtype):
    x, out = torch.randn(4, 8).to(dtype), torch.zeros(40, dtype=dtype)
    run(axes_kernel, 1, x, out, AXIS=axis)
    assert torch.equal(out[:32].view(4, 8), x.cummax(1).values) and torch.equal(out[32:36], x.amax(1))
    xors = [functools.reduce(operator.xor, row) for row in (x * 8).int().tolist()]
    assert torch.equal(out[36:], torch.tensor(xors).to(dtype))


@triton.jit
def nan_kernel(x, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = tl.load(x + i)
    tl.store(out + i, tl.maximum(v, 0.5))
    tl.store(out + BLOCK + i, tl.minimum(v, 0.5))
    tl.store(out + 2 * BLOCK + i, tl.clamp(v, -1.0, 1.0))
    tl.store(out + 3 * BLOCK + i, tl.maximum(v, 0.5, propagate_nan=tl.PropagateNan.ALL))
    tl.store(out + 4 * BLOCK + i, tl.clamp(v, -1.0, 1.0, propagate_nan=tl.PropagateNan.ALL))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_a_number_and_nan_the_number(dtype):
    """As maxNum of PTX has it, unless the kernel asks for the NaN."""
    x, out = torch.tensor([torch.nan, 2.0, -2.0, 0.25], dtype=dtype), torch.zeros(5, 4, dtype=dtype)
    run(nan_kernel, 1, x, out, BLOCK=4)
    assert out[:3].tolist() == [[0.5, 2, 0.5, 0.5], [0.5, 0.5, -2, 0.25], [-1, 1, -1, 0.25]]
    assert out[3:].isnan().tolist() == [[True, False, False, False]] * 2
    assert out[3, 1:].tolist() == [2, 0.5, 0.5] and out[4, 1:].tolist() == [1, -1, 0.25]


@triton.jit
def members_kernel(x, u, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = tl.load(x + i)
    tl.store(out + i, v.exp() + v.abs().sqrt())
    shift = tl.load(u + i)
    tl.store(out + BLOCK + i, (v.to(tl.int32) >> shift).to(tl.float32))
    tl.store(out + 2 * BLOCK + i, (shift > 3).to(tl.float32))


def test_methods_and_shifts_by_numbers_without_a_sign():
    """A shift leaves what it shifts by as it was."""
    x, u, out = torch.tensor([-7.0, 0, 3, 12]), torch.tensor([1, 2**32 - 1, 0, 2], dtype=torch.uint32), torch.zeros(3, 4)
    run(members_kernel, 1, x, u, out, BLOCK=4)
    assert torch.allclose(out[0], x.exp() + x.abs().sqrt())
    assert out[1, [0, 2, 3]].tolist() == [-4, 3, 3] and out[2].tolist() == [0, 1, 0, 0]


@triton.jit
def assembly_kernel(out):
    tl.store(out, tl.inline_asm_elementwise("mov.u32 $0, 1;", "=r", [], dtype=tl.int32, is_pure=True, pack=1))


def test_what_only_a_gpu_has_is_named():
    said = r"inline_asm_elementwise is for compiled kernels.*put it behind `if not is_interp\(\):`"
    with pytest.raises(RuntimeError, match=said):
        run(assembly_kernel, 1, torch.zeros(1))


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


# 4 versions


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


# 5 forked children, and handlers of signals


@triton.jit
def until_kernel(begun, flag):
    tl.atomic_add(begun, 1)
    while tl.atomic_add(flag, 0) == 0:
        pause()


def counts(load) -> bool:
    """Whether triton.language is as it was, and kernels run."""
    words = torch.zeros(16, dtype=torch.int64)
    unchanged = tl.load is load
    run(count_kernel, 1, words, 0, 1)
    return unchanged and tl.load is load and words[0].item() == 1


def test_a_child_forked_while_another_thread_is_in_a_kernel():
    load, begun, flag = tl.load, torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    thread = threading.Thread(target=run, args=(until_kernel, 1, begun, flag))
    thread.start()
    while not begun.item():
        time.sleep(0.001)
    with interpreter._patch_lock:  # as another thread may hold it
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            os._exit(0 if counts(load) else 1)
    flag += 1
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert counts(load)


def ring(_semantic=None):
    signal.raise_signal(signal.SIGUSR1)


ring.__triton_builtin__ = True


@triton.jit
def ringing_kernel(words):
    tl.atomic_add(words, 1)
    ring()
    tl.atomic_add(words, tl.load(words))


class RingingLock:
    """A signal comes while this thread has it."""

    def __init__(self):
        self.lock = threading.Lock()

    def __enter__(self):
        self.lock.acquire()
        ring()

    def __exit__(self, *error):
        self.lock.release()


@pytest.mark.parametrize("where", ["kernel", "grid", "lock"])
def test_a_handler_of_a_signal_that_runs_a_kernel(where, monkeypatch):
    """It is refused, wherever the signal comes, and what it has interrupted goes on."""
    said = []

    def handler(number, frame):
        with pytest.raises(RuntimeError, match=r"run\(\) was called from inside a kernel .* the call behind the one") as caught:
            run(count_kernel, 1, torch.zeros(16, dtype=torch.int64), 0, 1)
        said.append(caught.value)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        load, words, grid = tl.load, torch.zeros(1, dtype=torch.int64), programs.run_grid
        if where == "grid":
            monkeypatch.setattr(programs, "run_grid", lambda *args: (ring(), grid(*args)))
        if where == "lock":
            monkeypatch.setattr(interpreter, "_patch_lock", RingingLock())
        run(ringing_kernel, 1, words)
    finally:
        signal.signal(signal.SIGUSR1, before)
    monkeypatch.undo()
    assert len(said) == {"kernel": 1, "grid": 2, "lock": 3}[where]
    assert words.item() == 2 and counts(load)

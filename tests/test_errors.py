"""What goes wrong is said: the kind of error, the value, the remedy; and afterwards the process still works."""

import copy
import inspect
import os
import pickle
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import AGCase, RSCase
from ranks import TORCHRUN, device, run_fresh, run_ranks
from torch.distributed.device_mesh import init_device_mesh

import fluxlike
from fluxlike.ops import tiling
from fluxlike.runtime import env

F32, BF16 = torch.float32, torch.bfloat16
MAKERS = (fluxlike.create_gemm_rs_context, fluxlike.create_ag_gemm_context)


def refuses(call: Callable, kind: type[Exception], *words: object) -> None:
    """``call()`` raises exactly ``kind``, and its message has all the words."""
    try:
        call()
    except Exception as error:
        assert type(error) is kind, f"{type(error).__name__} and not {kind.__name__}: {error}"
        missing = [str(word) for word in words if str(word) not in str(error)]
        assert not missing, f"{missing} not in: {error}"
        return
    raise AssertionError(f"nothing was raised; expected {kind.__name__} with {words}")


def works(group, rs=None, ag=None) -> None:
    """Both operations still do, on the contexts that are given or on new ones."""
    size = dist.get_world_size(group)
    rs = rs or fluxlike.create_gemm_rs_context(24, 12, dtype=F32, group=group, schedule="copy_engine")
    ag = ag or fluxlike.create_ag_gemm_context(24, 12, 8, F32, group, "copy_engine")
    RSCase(23, 12, [8] * size, F32, 1).check(rs, group, rs.schedule)
    AGCase(23, [12] * size, 8, F32, 1).check(ag, group, ag.schedule, False)


def here(*shape, dtype=F32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=device())


def refuses_operands(op: str, call: Callable, f: torch.Tensor) -> None:
    """``call(f, weight)`` is fine; everything that can be wrong with the tensors of such a call."""
    elsewhere, name = torch.device("meta"), f"{op}: "
    w, b = here(12, 8), here(12)
    refuses(lambda: call(f[0], w), ValueError, name, "x", (8,), "2 dimensions", "reshape")
    refuses(lambda: call(f, b), ValueError, name, "weight", (12,), "2 dimensions")
    refuses(lambda: call(f, w, bias=here(1, 12)), ValueError, name, "bias", (1, 12), "1 dimension")
    refuses(lambda: call(f, "w"), ValueError, name, "weight", "str", "tensor")
    refuses(lambda: call(None, w), ValueError, name, "x", "None", "tensor")
    refuses(lambda: call(f, None), ValueError, name, "weight", "None", "tensor")
    refuses(lambda: call(f.to(elsewhere), w), ValueError, name, "x", "meta", device(), ".to(")
    refuses(lambda: call(f, w.to(elsewhere)), ValueError, name, "weight", "meta", device(), ".to(")
    refuses(lambda: call(f, w, bias=b.to(elsewhere)), ValueError, name, "bias", "meta", ".to(")
    refuses(lambda: call(f.double(), w.double()), ValueError, name, "x", "float64", "bfloat16", "float32")
    refuses(lambda: call(f.int(), w.int()), ValueError, name, "int32", "bfloat16")
    refuses(lambda: call(f, w.half()), ValueError, name, "weight", "float16", "float32", ".to(")
    refuses(lambda: call(f, w, bias=b.bfloat16()), ValueError, name, "bias", "bfloat16", ".to(")
    refuses(lambda: call(f, here(8, 12)), ValueError, name, (8, 12), tuple(f.shape), "[N, K]", "weight.T")
    refuses(lambda: call(f, w, bias=here(13)), ValueError, name, "bias", (13,), "[12]")
    refuses(lambda: call(f, w, bias=here(24)[::2]), ValueError, name, "bias", "stride (2,)", "contiguous")
    wide = here(f.shape[0], 16)[:, ::2]
    refuses(lambda: call(wide, w), ValueError, name, "x", wide.stride(), "contiguous()")
    refuses(lambda: call(f, here(12, 16)[:, ::2]), ValueError, name, "weight", (16, 2), "contiguous()")


def bad_operands(group):
    x, shard = here(24, 8), here(24 // dist.get_world_size(group), 8)
    with (
        fluxlike.create_gemm_rs_context(24, 12, dtype=F32, group=group, schedule="in_kernel") as rs,
        fluxlike.create_ag_gemm_context(24, 12, 8, F32, group, "copy_engine") as ag,
    ):
        refuses_operands("gemm_rs", lambda x, w, **how: fluxlike.gemm_rs(x, w, rs, **how), x)
        refuses_operands("ag_gemm", lambda x, w, **how: fluxlike.ag_gemm(x, w, ag, **how), shard)
        refuses_operands("gemm_rs", partial(fluxlike.reference.gemm_rs, group=group), x)
        refuses_operands("ag_gemm", partial(fluxlike.reference.ag_gemm, group=group), shard)
        works(group, rs, ag)


@pytest.mark.parametrize("world", (1, 3))
def test_bad_operands(world):
    run_ranks(bad_operands, world)


def bad_out(group):
    x, w = here(24, 8), here(12, 8)
    rows = 24 // dist.get_world_size(group)
    with fluxlike.create_gemm_rs_context(24, 12, dtype=F32, group=group, schedule="in_kernel") as rs:
        for op in (fluxlike.gemm_rs, fluxlike.reference.gemm_rs):
            for out in (here(rows + 1, 12), here(rows, 12, dtype=BF16), here(rows, 24)[:, ::2], here(12, rows).T):
                words = ("out", tuple(out.shape), out.dtype, out.stride(), (rows, 12))
                refuses(partial(op, x, w, rs, out=out), ValueError, *words)
        works(group, rs)
    shard = here(rows, 8)
    with fluxlike.create_ag_gemm_context(24, 12, 8, F32, group, "copy_engine") as ag:
        for op in (fluxlike.ag_gemm, fluxlike.reference.ag_gemm):
            for out in (here(rows, 12), here(24, 12, dtype=BF16), here(24, 24)[:, ::2], here(12, 24).T):
                words = ("out", tuple(out.shape), out.dtype, out.stride(), (24, 12))
                refuses(partial(op, shard, w, ag, out=out), ValueError, *words)
                refuses(partial(op, shard, [w, w], ag, out=[here(24, 12), out]), ValueError, *words)
            refuses(partial(op, shard, w, ag, out=[here(24, 12)]), ValueError, "out is a list of 1", "a tensor, as weight is one")
            for out in (here(24, 12), [here(24, 12)] * 3, []):
                refuses(partial(op, shard, [w, w], ag, out=out), ValueError, "out is a ", "a list of 2, one a weight")
        works(group, None, ag)


def test_bad_out():
    run_ranks(bad_out, 2)


def bad_calls(group):
    """The call does not fit its context."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    x, w = here(24, 8), here(12, 8)
    shard = here(24 // size, 8)
    alone = fluxlike.create_gemm_rs_context(24, 12, dtype=F32, group=group, schedule="copy_engine")
    ag = fluxlike.create_ag_gemm_context(24, 12, 8, F32, group, "in_kernel")
    halves = ("float16", "float32", "dtype=torch.float16")
    longer = here(24 // size + 1, 8)
    for gemm_rs, ag_gemm in ((fluxlike.gemm_rs, fluxlike.ag_gemm), (fluxlike.reference.gemm_rs, fluxlike.reference.ag_gemm)):
        refuses(partial(gemm_rs, x, w, ag), ValueError, "gemm_rs", "ag_gemm", "create_gemm_rs_context")
        refuses(partial(ag_gemm, shard, w, alone), ValueError, "ag_gemm", "gemm_rs", "create_ag_gemm_context")
        refuses(partial(gemm_rs, x, w, "ctx"), ValueError, "gemm_rs", "str", "create_gemm_rs_context")
        refuses(partial(gemm_rs, x, w, here(12)), ValueError, "'Tensor'", "create_gemm_rs_context; pass a bias as bias=")
        refuses(partial(ag_gemm, shard, w, group), ValueError, "create_ag_gemm_context; pass a group as group=")
        refuses(partial(gemm_rs, x.half(), w.half(), alone), ValueError, *halves)
        refuses(partial(ag_gemm, shard.half(), w.half(), ag), ValueError, *halves)
        refuses(partial(gemm_rs, here(25, 8), w, alone), ValueError, "M=25", "max_m=24", "context", "max_m=25")
        refuses(partial(gemm_rs, x, here(13, 8), alone), ValueError, "N=13", "n=12", "n=13")
        refuses(partial(ag_gemm, longer, w, ag), ValueError, f"M={24 + size}", "max_m=24")
        refuses(partial(ag_gemm, here(24 // size, 9), here(12, 9), ag), ValueError, "K=9", "k=8", "k=9")
        refuses(partial(ag_gemm, shard, w, ag, m=26), ValueError, 24 // size, "m=26", "torch.chunk", f"rank {rank}")
        refuses(partial(ag_gemm, shard[:0], w, ag, m=-1), ValueError, "0 of m=-1 rows", "torch.chunk")
        refuses(partial(ag_gemm, shard, [], ag), ValueError, "0 weights", "at least one")
        refuses(partial(gemm_rs, x, w, alone, k=7), ValueError, "gemm_rs: k=7", "the 8 of this rank", "K of all ranks")
        refuses(partial(ag_gemm, shard, [w, w], ag, n=23), ValueError, "ag_gemm: n=23", "the 24 of this rank", "N of all ranks")
        for k in ("many", 8.0, True):
            refuses(partial(gemm_rs, x, w, alone, k=k), ValueError, f"k={k!r}", "whole number", "leave it out")
        refuses(partial(gemm_rs, x, w, alone, k=1 << 31), ValueError, f"k={1 << 31}", "up to which kernels count")
        refuses(partial(ag_gemm, shard, [w, w], ag, bias=[None]), ValueError, "2 weights", "1 biases")
    works(group, alone, ag)
    refuses(lambda: copy.deepcopy({"ctx": ag}), TypeError, "AGGemmContext", "cannot be copied")
    refuses(lambda: pickle.dumps(alone), TypeError, "GemmRSContext", "state_dict")
    alone.close()
    ag.close()
    refuses(lambda: fluxlike.gemm_rs(x, w, alone), RuntimeError, "gemm_rs", "closed", "create_gemm_rs_context")
    refuses(lambda: fluxlike.ag_gemm(shard, w, ag), RuntimeError, "ag_gemm", "closed", "create_ag_gemm_context")
    refuses(lambda: fluxlike.reference.ag_gemm(shard, w, ag), RuntimeError, "ag_gemm", "closed", "create_ag_gemm_context")
    refuses(alone.check, RuntimeError, "closed")
    works(group)


@pytest.mark.parametrize("world", (2, 4))
def test_calls_that_do_not_fit_the_context(world):
    run_ranks(bad_calls, world)


def another_group(group):
    x, w = here(24, 8), here(12, 8)
    single = dist.new_group([0])  # by all ranks: with NCCL one alone would wait for the others
    with fluxlike.create_gemm_rs_context(24, 12, dtype=F32, schedule="in_kernel") as ctx:
        if dist.get_rank() == 0:
            refuses(lambda: fluxlike.gemm_rs(x, w, ctx, group=single), ValueError, "group", [0], ctx.group_ranks)
        else:  # each refuses a call, so they stay in step
            refuses(lambda: fluxlike.gemm_rs(x.half(), w, ctx), ValueError, "float16")
        # The same ranks are the same group, whatever the object.
        case = RSCase(20, 12, [8] * ctx.size, F32, 2)
        x, w, _ = case.inputs(ctx.rank)
        y = fluxlike.gemm_rs(x, w, ctx, group=group)
        assert torch.equal(y.double().cpu(), case.expected(ctx.rank))


def test_a_group_that_is_not_the_context_s():
    run_ranks(another_group, 4, makes_groups=True)


def with_group() -> dict[str, Callable]:
    """Everything public that takes a group: a call that is right but for that."""
    x, w, table = here(24, 8), here(12, 8), torch.sparse_coo_tensor([[1]], here(1, 2), (4, 2))
    bucket = SimpleNamespace(buffer=lambda: table, parameters=lambda: [None])
    sparse = dict.fromkeys(("sparse_all_reduce", "sparse_all_reduce_", "sparse_reduce_scatter"), (table,))
    rooted = dict.fromkeys(("reduce", "broadcast"), (x, 0))
    plain = dict.fromkeys(("all_reduce", "all_reduce_", "reduce_scatter", "all_gather"), (x,))
    products = dict.fromkeys(("gemm_rs", "ag_gemm", "gemm_ar"), (x, w))
    contexts = {"create_gemm_rs_context": (8, 8), "create_gemm_ar_context": (8, 8), "create_ag_gemm_context": (8, 8, 8)}
    contexts["create_sparse_all_reduce_context"] = ((4, 2), 2)
    layers = {"ColumnParallelLinear": (8, 8), "RowParallelLinear": (8, 8), "Embedding": (8, 2, 4), "AsyncTP": ()}
    known = {**sparse, **rooted, **plain, **products, **contexts, **layers}
    found = {}
    reference = [name for name in dir(fluxlike.reference) if name in products or name == "sparse_all_reduce"]
    everything = ((fluxlike, fluxlike.__all__), (fluxlike.nn, fluxlike.nn.__all__), (fluxlike.reference, reference))
    for module, name in ((home, name) for home, names in everything for name in names):
        act = getattr(module, name)
        code = act.__init__ if isinstance(act, type) else act
        if inspect.isfunction(code) and name != "init" and "group" in inspect.signature(code).parameters:
            how = {"bucket": bucket} if name == "sparse_allreduce_hook" else {}
            found[f"{module.__name__}.{name}"] = partial(act, *known.get(name, ()), **how)
    return found


def no_groups(group):
    mesh = init_device_mesh(device().type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    bad = {
        "tp": ("group='tp' is a str", "get_group"),
        0: ("group=0 is a int", "new_group"),
        dist.ReduceOp.AVG: ("is a RedOpType", "name it, as op='avg'"),
        mesh: ("is a DeviceMesh", "pass mesh.get_group('tp')"),
        dist.GroupMember.NON_GROUP_MEMBER: ("not in the group", f"this rank, {dist.get_rank()}"),
    }
    calls = with_group()
    assert len(calls) > 20
    for act in calls.values():
        for wrong, words in bad.items():
            refuses(partial(act, group=wrong), ValueError, *words)
    x, w = here(24, 8).requires_grad_(), here(12, 8)
    for act in (fluxlike.gemm_rs, fluxlike.ag_gemm, fluxlike.gemm_ar):
        refuses(partial(act, x, w, group="tp"), ValueError, *bad["tp"])
    with fluxlike.create_gemm_rs_context(24, 12, dtype=F32, group=group, schedule="in_kernel") as ctx:
        refuses(partial(fluxlike.gemm_rs, x.detach(), w, ctx, group=mesh), ValueError, *bad[mesh])
        works(group, ctx)


def test_what_is_no_group():
    run_ranks(no_groups, 4, makes_groups=True)


def bad_contexts(group):
    rs, ag = MAKERS
    for make in MAKERS:
        for place, name in ((0, "max_m"), (1, "n"), (2, "k")):
            for value in (0, -3, True, 2.0, "8"):
                sizes = [16, 16, 16]
                sizes[place] = value
                refuses(partial(make, *sizes, F32, group), ValueError, f"{name}={value!r}", "whole number above 0")
            sizes[place] = tiling.MAX_SIZE + 1
            refuses(partial(make, *sizes, F32, group), ValueError, f"{name}={2**31 - 2**16 + 1}", "more than", "split")
        refuses(partial(make, 16, 16, 16, torch.float64, group), ValueError, "torch.float64", "torch.bfloat16")
        refuses(partial(make, 16, 16, 16, "bf16", group), ValueError, "bf16", "torch.bfloat16")
        refuses(partial(make, 16, 16, 16, F32, group, "fast"), ValueError, "'fast'", "'copy_engine'", "'in_kernel'")
    refuses(lambda: rs(None, 16, dtype=F32, group=group), ValueError, "max_m", "None")
    refuses(lambda: ag(16, 16, None, F32, group), ValueError, "k", "None")
    works(group)


def test_bad_arguments_of_a_context():
    run_ranks(bad_contexts, 2)


def more_than_the_machine_has(group):
    """Refused before a page is taken: the kernel would end ranks rather than refuse the last one."""
    for make in MAKERS:
        refuses(partial(make, 2**30, 2**30, 2**30, F32, group), RuntimeError, "MiB", "heap_bytes", "ranks need", "free memory")
    w = here(1, 1).expand(2**20, 1)
    refuses(lambda: fluxlike.gemm_rs(here(1, 1).expand(2**28, 1), w, group=group), RuntimeError, "heap_bytes", "free memory")
    works(group)


@pytest.mark.skipif(TORCHRUN, reason="NVSHMEM's own limit is not known")
def test_a_heap_larger_than_the_machine():
    run_ranks(more_than_the_machine_has, 4)


def disagreement(group):
    """One rank asks for something else: every rank is told, with both values, and the next context is made."""
    odd = dist.get_rank(group) == 1
    for make in MAKERS:
        for good, other in (
            ((16, 16, 16, F32), (24, 16, 16, F32)),
            ((16, 16, 16, F32), (16, 17, 16, F32)),
            ((16, 16, 16, F32), (16, 16, 18, F32)),
            ((16, 16, 16, F32), (16, 16, 16, BF16)),
        ):
            sizes = other if odd else good
            differs = next(i for i in range(4) if good[i] != other[i])
            refuses(partial(make, *sizes, group), fluxlike.CallMismatch, good[differs], other[differs], "rank", "same arguments")
        odd_one = partial(make, 16, 16, 16, F32, group, "in_kernel" if odd else "copy_engine")
        refuses(odd_one, fluxlike.CallMismatch, "in_kernel", "copy_engine", "same arguments")
    ref = fluxlike.reference
    for act, x, w, shown in (
        (ref.gemm_rs, here(24 + odd, 8), here(12, 8), "(25, 12, 'torch.float32')"),
        (ref.gemm_ar, here(24, 8), here(12 + odd, 8), "(24, 13, 'torch.float32')"),
        (ref.ag_gemm, here(6, 8 + odd), here(12, 8 + odd), f"({6 * dist.get_world_size(group)}, 9, 'torch.float32')"),
        (ref.gemm_rs, *(here(12, 8, dtype=BF16 if odd else F32) for _ in range(2)), "(12, 12, 'torch.bfloat16')"),
    ):
        refuses(partial(act, x, w, group=group), fluxlike.CallMismatch, f"reference.{act.__name__}", shown, "same arguments")
        words = ["(K) must be equal"] + ["rank 1 failed"] * (not odd)
        refuses(partial(act, here(6, 8), here(12, 8 + odd), group=group), ValueError, *words)
    works(group)


@pytest.mark.parametrize("world", (2, 4))
def test_ranks_that_disagree_on_a_context(world):
    run_ranks(disagreement, world)


def one_bad_rank(group):
    """A bad argument on one rank fails on all: there with its own message, elsewhere with the rank and the message."""
    rank = dist.get_rank(group)
    for make in MAKERS:
        for guilty in range(dist.get_world_size(group)):
            sizes = (-5 if rank == guilty else 16, 16, 16)
            words = ["max_m=-5", "whole number"]
            if rank != guilty:
                words.append(f"rank {guilty}")
            refuses(partial(make, *sizes, F32, group), ValueError, *words)
            dtype, words[:2] = F32 if rank == guilty else BF16, ["'decomposed' is not for dtype=torch.float32", "'auto'"]
            refuses(partial(make, 16, 16, 16, dtype, group, "decomposed"), ValueError, *words)
    works(group)


def test_a_bad_argument_on_one_rank():
    run_ranks(one_bad_rank, 3)


def second_init(group):
    refuses(fluxlike.init, RuntimeError, "already", "finalize")
    refuses(lambda: fluxlike.init(heap="nonsense"), RuntimeError, "already", "finalize")
    assert fluxlike.is_initialized()
    works(group)


def test_init_twice():
    run_ranks(second_init, 2)


def life(group):
    """Before init, after a failed init, between two lives, after the last: always an error that names init."""
    x, w = torch.ones(8, 4), torch.ones(4, 4)
    calls = [
        lambda: fluxlike.gemm_rs(x, w),
        lambda: fluxlike.ag_gemm(x, w),
        lambda: fluxlike.reference.gemm_rs(x, w),
        lambda: fluxlike.reference.ag_gemm(x, w),
        lambda: fluxlike.create_gemm_rs_context(8, 4),
        lambda: fluxlike.create_ag_gemm_context(8, 4, 4),
    ]

    def all_refuse():
        assert not fluxlike.is_initialized()
        for call in calls:
            refuses(call, RuntimeError, "fluxlike.init")

    all_refuse()
    fluxlike.finalize()
    all_refuse()
    refuses(lambda: fluxlike.init(group="tp"), ValueError, "group='tp' is a str", "get_group")
    refuses(lambda: fluxlike.init(heap="disk"), ValueError, "'disk'", "'nvshmem'", "'shm'")
    if not torch.cuda.is_available():
        refuses(lambda: fluxlike.init(heap="nvshmem"), RuntimeError, "nvshmem", "CUDA", "doctor", "'shm'")
    all_refuse()
    odd = dist.get_rank() == 1
    refuses(lambda: fluxlike.init(heap="shm", heap_bytes=(1 << 20) + odd * 4096), fluxlike.CallMismatch, "same arguments", 1 << 20)
    refuses(lambda: fluxlike.init(heap="disk" if odd else "shm"), ValueError, "'disk'")
    all_refuse()
    for _ in range(2):
        fluxlike.init(heap="shm", heap_bytes=4 << 20)
        left_open = fluxlike.create_gemm_rs_context(8, 4, dtype=F32)
        works(group)
        fluxlike.finalize()
        assert left_open.closed, "finalize closes the contexts"
        all_refuse()
        refuses(partial(fluxlike.gemm_rs, x, w, left_open), RuntimeError, "fluxlike.init")
        left_open.close()
        assert dist.is_initialized(), "finalize ended a torch.distributed that it had not started"


def test_before_and_after_init():
    for outcome in run_fresh(life, 2, timeout=100):
        assert outcome.ok, str(outcome)


def heap_sizes(group):
    for value in (-1, 0, 1.5, "1G", True, np.int64(0), np.float64(1)):
        refuses(partial(fluxlike.init, heap="shm", heap_bytes=value), ValueError, "heap_bytes", repr(value))
    fluxlike.init(heap="shm", heap_bytes=np.int64(4 << 20))
    works(group)
    fluxlike.finalize()


def test_heap_bytes_that_are_no_size():
    for outcome in run_fresh(heap_sizes, 2):
        assert outcome.ok, str(outcome)


def bad_environment(group, name, value):
    """A variable that cannot be read fails init on all ranks, also when only one rank has it so."""
    for who in (range(2), (1,)):
        before = os.environ.get(name)
        if dist.get_rank() in who:
            os.environ[name] = value
        refuses(lambda: fluxlike.init(heap="shm"), ValueError, name, repr(value))
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
    fluxlike.init(heap="shm", heap_bytes=4 << 20)
    works(group)
    fluxlike.finalize()


@pytest.mark.parametrize(
    ("name", "value"),
    (("FLUXLIKE_TIMEOUT_S", "soon"), ("FLUXLIKE_HEAP_BYTES", "12 parsecs"), ("FLUXLIKE_CPU_PROGRAMS", "0")),
)
def test_an_environment_that_cannot_be_read(name, value):
    for outcome in run_fresh(bad_environment, 2, {"FLUXLIKE_TIMEOUT_S": "20"}, name=name, value=value):
        assert outcome.ok, str(outcome)


@pytest.mark.parametrize(
    ("read", "name", "good", "bad"),
    (
        (env.timeout_s, "FLUXLIKE_TIMEOUT_S", {"3": 3, "0.5": 0.5, "": 120}, ("0", "-1", "soon", "nan", "inf", "1e7")),
        (env.cpu_programs, "FLUXLIKE_CPU_PROGRAMS", {"1": 1, "64": 64, "": 2}, ("0", "65", "-2", "1.5", "many", "²")),
        (
            env.heap_bytes,
            "FLUXLIKE_HEAP_BYTES",
            {"4096": 4096, "64K": 64 << 10, "512M": 512 << 20, "2g": 2 << 30, "": None},
            ("0", "-4G", "G", "1T", "1.5G", "0K", "²"),
        ),
    ),
)
def test_environment_variables(monkeypatch, read, name, good, bad):
    for text, value in good.items():
        monkeypatch.setenv(name, text)
        assert read() == value, f"{name}={text!r}"
    for text in bad:
        monkeypatch.setenv(name, text)
        refuses(read, ValueError, name, repr(text), *(["below 1000000"] if text == "1e7" else []))
    monkeypatch.delenv(name)
    assert read() == good[""]


def without_torchrun(group):
    """torch.distributed not initialised, and nothing in the environment to do it from."""
    dist.destroy_process_group()
    refuses(fluxlike.init, RuntimeError, "RANK", "WORLD_SIZE", "MASTER_ADDR", "launch.sh", "init_process_group")
    assert not fluxlike.is_initialized() and not dist.is_initialized()
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    fluxlike.init(heap="shm", heap_bytes=4 << 20)
    works(None)
    fluxlike.finalize()
    assert not dist.is_initialized(), "what init started, finalize ends"


def test_init_without_torchrun():
    for outcome in run_fresh(without_torchrun, 1):
        assert outcome.ok, str(outcome)


def sub_world(group):
    """init for some ranks only; a group that reaches outside is refused."""
    inner = dist.new_group([0, 1])
    outer = dist.new_group([0, 2])
    if dist.get_rank() < 2:
        fluxlike.init(group=inner, heap="shm", heap_bytes=4 << 20)
        works(inner)
        if dist.get_rank() == 0:
            make = partial(fluxlike.create_gemm_rs_context, 8, 8, group=outer)
            refuses(make, ValueError, [2], "outside", "fluxlike.init")
        fluxlike.finalize()


def test_init_for_a_part_of_the_ranks():
    for outcome in run_fresh(sub_world, 3, {"FLUXLIKE_TIMEOUT_S": "20"}):
        assert outcome.ok, str(outcome)


def failure_nobody_has_seen(group):
    """On GPUs a wait runs out after the call has returned: what the kernel recorded is raised by the next one to look."""
    for look in ("call", "check", "finalize"):
        fluxlike.init(heap="shm", heap_bytes=4 << 20)
        works(group)
        ctx = fluxlike.create_gemm_rs_context(8, 8, dtype=F32)
        # what `kernels.sync._give_up` writes: what was awaited, of whom, expected, seen, the call, no one else's abort
        ctx.report[1:7] = torch.tensor([2, 1 - dist.get_rank(), 7, 6, 7, 0])
        ctx.report[0] = 1
        words = ("gemm_rs", f"rank {1 - dist.get_rank()}", "partial sums", "call 7", "expected 7", "saw 6", "FLUXLIKE_TIMEOUT_S")
        if look == "call":
            refuses(lambda: fluxlike.gemm_rs(here(8, 8), here(8, 8), ctx), fluxlike.PeerTimeout, *words)  # noqa: B023
        elif look == "check":
            refuses(ctx.check, fluxlike.PeerTimeout, *words)
        if look == "finalize":
            refuses(fluxlike.finalize, fluxlike.PeerTimeout, *words)
        else:
            fluxlike.finalize()
        assert ctx.closed and not fluxlike.is_initialized(), look


def test_a_failure_that_nobody_has_seen_is_raised():
    for outcome in run_fresh(failure_nobody_has_seen, 2):
        assert outcome.ok, str(outcome)

"""The checks of a call's tensors: each error says what is wrong, the value, the rule and the remedy."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from ..kernels.tiles import cdiv, rows_of
from ..runtime import faking, world
from ..runtime.control import ControlGroup
from ..runtime.wording import counted
from . import tiling
from .context import DTYPES
from .dispatcher import makes_graph
from .exchange import OPS

#: What a caller names a way to reduce by; see `reduction`.
Reduction = str | dist.ReduceOp | dist.ReduceOp.RedOpType


def context(op: str, ctx: Any, kind: type[Any] | tuple[type[Any], ...]) -> None:
    """ctx is None or a context of this operation."""
    found = getattr(ctx, "op", type(ctx).__name__)
    if ctx is not None and (not isinstance(ctx, kind) or found != op):
        remedy = ""
        if isinstance(ctx, torch.Tensor) and not op.startswith("sparse"):
            remedy = "; pass a bias as bias="
        elif isinstance(ctx, dist.ProcessGroup):
            remedy = "; pass a group as group="
        raise ValueError(f"{op}: ctx is of {found!r}, it must come from fluxlike.create_{op}_context{remedy}")


def listed(weight: Any, bias: Any) -> tuple[list[Any], list[Any]]:
    """The weights of ag_gemm, and a bias or None for each, as lists."""
    if not isinstance(weight, (torch.Tensor, list, tuple)):
        raise ValueError(f"ag_gemm: weight is {type(weight).__name__}, it must be a tensor, or a list or tuple of tensors")
    weights = list(weight) if isinstance(weight, (list, tuple)) else [weight]
    biases = list(bias) if isinstance(bias, (list, tuple)) else [bias] * len(weights)
    if not weights or len(biases) != len(weights):
        raise ValueError(
            f"ag_gemm: {len(weights)} weights and {len(biases)} biases; give at least one weight, and a bias or None for each"
        )
    return weights, biases


def gathered_operands(
    x_shard: torch.Tensor, weight: Any, bias: Any, m: int | None, control: ControlGroup
) -> tuple[list[torch.Tensor], list[torch.Tensor | None], int]:
    """The operands of ag_gemm: the weights and biases as lists of one length, and M, which the shard must fit."""
    weights, biases = listed(weight, bias)
    for w, b in zip(weights, biases, strict=True):
        operands("ag_gemm", x_shard, w, b)
    rows, ranks = x_shard.shape[0], control.size
    m = rows * ranks if m is None else m
    if not isinstance(m, int) or isinstance(m, bool):
        untraced("ag_gemm")
        raise ValueError(f"ag_gemm: m={m!r} is not a whole number; pass the rows of all ranks, or leave it out if all have as many")
    if m < 0 or rows_of(m, ranks, control.rank) != rows:
        raise ValueError(
            f"ag_gemm: this rank holds {rows} of m={m} rows, and torch.chunk gives rank {control.rank} of {ranks} "
            f"{rows_of(max(m, 0), ranks, control.rank)}; split the rows as torch.chunk does and pass m, the rows of all ranks"
        )
    countable("ag_gemm", "M", m)
    return weights, biases, m


def operands(op: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """x [M, K], weight [N, K], bias [N]: dtypes, devices, shapes and strides."""
    device = world.current().device
    readable(op, "x", x, 2, device)
    readable(op, "weight", weight, 2, device)
    if bias is not None:
        readable(op, "bias", bias, 1, device)
    if x.dtype not in DTYPES:
        remedy = "a product for the real and one for the imaginary part" if x.is_complex() else "x.to(torch.bfloat16)"
        raise ValueError(f"{op}: x has dtype {x.dtype}, it must be bfloat16, float16 or float32; use {remedy}")
    no_tangents(op, (("x", x), ("weight", weight), ("bias", bias)))
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.dtype != x.dtype:
            raise ValueError(f"{op}: {name} has dtype {t.dtype}, x {x.dtype}; they must be the same, use {name}.to({x.dtype})")
    (m, k), (n, depth) = x.shape, weight.shape
    if k != depth:
        raise ValueError(
            f"{op}: x is {tuple(x.shape)} and weight {tuple(weight.shape)}, their second sizes (K) must be equal; weight is "
            "[N, K] as in torch.nn.Linear, so pass weight.T if it is [K, N]"
        )
    if bias is not None:
        one_row(op, bias, n)
    in_rows(op, x)
    in_rows_or_columns(op, weight)
    for name, size in (("M", m), ("N", n), ("K", k)):
        countable(op, name, size)


def one_row(op: str, bias: torch.Tensor, n: int) -> None:
    if bias.shape[0] != n or not is_one_row(bias):
        raise ValueError(f"{op}: bias is {tuple(bias.shape)} with stride {bias.stride()}; it must be [{n}] (N), contiguous")


def is_one_row(bias: torch.Tensor) -> bool:
    return bias.stride(0) == 1 or bias.shape[0] <= 1


def in_rows_or_columns(op: str, weight: torch.Tensor) -> None:
    if not is_in_rows_or_columns(weight):
        raise ValueError(
            f"{op}: weight has strides {weight.stride()}, it must be row-major or the transposed view of a row-major tensor; use "
            "weight.contiguous()"
        )


def is_in_rows_or_columns(weight: torch.Tensor) -> bool:
    return tiling.is_row_major(weight) or weight.stride(0) == 1 or weight.shape[0] <= 1


def whole(op: str, name: str, size: Any, here: int) -> None:
    """``size`` is one of all ranks together, of which this one has ``here``; or None, where the caller does not say it."""
    if size is None:
        return
    if not isinstance(size, (int, torch.SymInt)) or isinstance(size, bool):
        untraced(op)
        raise ValueError(f"{op}: {name}={size!r} is not a whole number; pass {name.upper()} of all ranks, or leave it out")
    if size < here:
        raise ValueError(
            f"{op}: {name}={size} is less than the {here} of this rank alone; pass {name.upper()} of all ranks together, the same "
            "on each, or leave it out"
        )
    countable(op, name, size)


def untraced(op: str) -> None:
    """Why a size is a tensor that nobody has passed as one."""
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        raise ValueError(f"{op}: torch.jit.trace makes tensors of sizes that a call must know; use torch.compile or torch.export")


def in_rows(op: str, x: torch.Tensor) -> None:
    """The rows of x lie as kernels read them."""
    if x.stride(1) != 1 and x.shape[1] > 1 and x.numel():
        raise ValueError(f"{op}: x has strides {x.stride()}, its rows must be contiguous (stride 1 along K); use x.contiguous()")


def no_tangents(op: str, named: Sequence[tuple[str, torch.Tensor | None]]) -> None:
    """No operand carries a derivative that only torch's own products would pass on."""
    if forward_ad._current_level < 0:
        return
    for name, t in named:
        if t is not None and forward_ad.unpack_dual(t).tangent is not None:
            raise ValueError(f"{op}: {name} has a tangent of forward-mode AD, which would be lost; use reverse mode (backward)")


def no_transforms(op: str, named: Sequence[tuple[str, torch.Tensor | None]]) -> None:
    """No operand of a recorded call belongs to a transform of torch.func, of which torch's custom ops know nothing."""
    for name, t in named:
        if t is not None and torch._C._functorch.is_functorch_wrapped_tensor(t):
            raise ValueError(
                f"{op}: {name} is inside of a transform of torch.func (as grad, vjp or vmap), which torch's custom ops do not "
                "support; use loss.backward() or torch.autograd.grad"
            )


def no_batch(op: str, grad: torch.Tensor) -> None:
    """A gradient is one, and not several at once, for which torch looks for a rule that ops of lists cannot have."""
    if torch._C._functorch.is_legacy_batchedtensor(grad):
        raise ValueError(
            f"{op}: several gradients at once (is_grads_batched=True, vectorize=True) do not go through it; ask for one after the "
            "other"
        )


def readable(op: str, name: str, t: Any, dims: int | None, device: torch.device) -> None:
    """t is a tensor of ``dims`` dimensions, or any, whose elements lie in this device's memory as its strides say."""
    if isinstance(t, torch.Tensor) and (t.is_quantized or t.is_nested):
        kind, remedy = ("quantized", "dequantize()") if t.is_quantized else ("nested", "to_padded_tensor(0.0)")
        raise ValueError(f"{op}: {name} is a {kind} tensor ({t.dtype}), it must be a plain one; use {name}.{remedy}")
    if not isinstance(t, torch.Tensor) or (dims is not None and t.dim() != dims):
        found, remedy = type(t).__name__, "pass one"
        if isinstance(t, torch.Tensor):
            found, remedy = str(tuple(t.shape)), "use .reshape or .flatten"
        wanted = "a tensor; use torch.tensor" if dims is None else f"a tensor of {counted(dims, 'dimension')}; {remedy}"
        raise ValueError(f"{op}: {name} is {found}, it must be {wanted}")
    if t.device != device:
        raise ValueError(f"{op}: {name} is on {t.device}, this rank's heap is on {device}; use {name}.to({str(device)!r})")
    if t.layout is not torch.strided:
        raise ValueError(f"{op}: {name} has layout {t.layout}, it must be dense (torch.strided); use {name}.to_dense()")
    if t.is_neg():
        raise ValueError(f"{op}: {name} is a lazily negated view, whose memory has the other sign; use {name}.resolve_neg()")
    address = _address(t)
    if address == 0 and t.numel():
        raise ValueError(
            f"{op}: {name} is a {type(t).__name__} with no memory of its own that a kernel could read; pass a plain tensor, of a "
            f"DTensor {name}.to_local(), of an AsyncCollectiveTensor {name}.wait(), and outside of transforms of torch.func as vmap"
        )
    new_tensors_have_memory(op)
    if t.dtype in DTYPES and address % t.element_size():  # as of a buffer that others have filled
        raise ValueError(
            f"{op}: {name} begins at address {address:#x}, no multiple of the {t.element_size()} bytes of its elements; use "
            f"{name}.clone()"
        )


def new_tensors_have_memory(op: str) -> None:
    """ValueError where the call would be made with tensors that have no memory, even if those that it is given have."""
    if faking.is_wrapping():
        raise ValueError(
            f"{op}: it was called inside a transform of torch.func (as grad, jvp or functionalize), where new tensors have no "
            "memory that a kernel could write to; call it outside of that, or use loss.backward() or torch.autograd.grad"
        )
    if faking.is_on():
        traces = "" if op == "reduce" or op.startswith("sparse") else ", or use torch.compile, which traces it"
        raise ValueError(
            f"{op}: it was called under a FakeTensorMode of torch, where new tensors have no memory that a kernel could write to; "
            f"call it outside of that{traces}"
        )


def outside_of_traces(op: str) -> None:
    """Nothing looks on that would make a graph, in which the call would not be, as it is no custom op."""
    if makes_graph():
        raise ValueError(
            f"{op}: torch.export, torch.jit.trace and make_fx would make a graph without it, as it is no custom op; call it "
            "outside of what is traced"
        )


def _address(t: torch.Tensor) -> int:
    try:
        return t.data_ptr()
    except RuntimeError:  # a wrapper, as torch.func's
        return 0


def summable(op: str, x: torch.Tensor, name: str = "x") -> None:
    """x has a dtype in which sums over the ranks are made."""
    if x.dtype not in DTYPES:
        remedy = f"torch.view_as_real({name})" if x.is_complex() else f"{name}.to(torch.float32)"
        raise ValueError(f"{op}: {name} has dtype {x.dtype}, it must be bfloat16, float16 or float32; use {remedy}")


def some(op: str, x: Any) -> list[Any]:
    """A tensor, or those of a list, as a list."""
    if isinstance(x, torch.Tensor):
        return [x]
    if not isinstance(x, (list, tuple)):
        wanted = "a tensor or a list of tensors; use torch.tensor, or list for what yields tensors"
        raise ValueError(f"{op}: x is {type(x).__name__}, it must be {wanted}")
    if not x:
        raise ValueError(f"{op}: x is a {type(x).__name__} without tensors; pass at least one, as many on all ranks")
    return list(x)


def contiguous(op: str, x: torch.Tensor) -> None:
    """What is written in place lies there row after row."""
    if not x.is_contiguous():
        raise ValueError(f"{op}: x has strides {x.stride()}; it must be contiguous, or use all_reduce")


def named(op: Any) -> Any:
    """torch.distributed's way to reduce by its name here, if it has one; anything else as it is."""
    if isinstance(op, dist.ReduceOp):
        return next((name for name in OPS if op == getattr(dist.ReduceOp, name.upper())), op)
    return op


def reduction(op: str, name: Any) -> str:
    """The name of a way to reduce, which may be given as torch.distributed's."""
    name = named(name)
    if name not in tuple(OPS):  # also what cannot be looked up
        raise ValueError(f"{op}: op={name!r} is not one of {', '.join(map(repr, OPS))}")
    return name  # type: ignore[no-any-return]


def countable(op: str, name: str, size: int | torch.SymInt) -> None:
    """A size that the kernels' 32-bit arithmetic holds."""
    if size > tiling.MAX_SIZE:
        raise ValueError(
            f"{op}: {name}={size} is more than {tiling.MAX_SIZE}, up to which kernels count; split the call along {name}"
        )


def countable_steps(op: str, m: int, n: int, k: int, tile: tiling.Tiling) -> None:
    """Steps of all tiles along K, which stream_k counts in 32 bits, and up to as many again for those that push."""
    steps = cdiv(m, tile.bm) * cdiv(n, tile.bn) * cdiv(k, tile.bk)
    if steps >= 1 << 30:
        raise ValueError(
            f"{op}: M={m}, N={n}, K={k} are {steps} steps of {tile.bm}x{tile.bn}x{tile.bk}, and schedule='stream_k' counts less "
            f"than {1 << 30}; use another schedule, or split the call"
        )


def call(op: str, ctx: Any, group: dist.ProcessGroup | None, x: torch.Tensor, sizes: dict[str, tuple[int, int, str]]) -> None:
    """The call fits the context: state, group, dtype, and each size (value, limit, name of the limit)."""
    ctx.raise_if_failed()
    same_group(op, ctx, group)
    if x.dtype != ctx.dtype:
        raise ValueError(f"{op}: x has dtype {x.dtype} and the context {ctx.dtype}; make a context with dtype={x.dtype}")
    for name, (value, limit, argument) in sizes.items():
        if value > limit:
            raise ValueError(
                f"{op}: {name}={value} is more than the context's {argument}={limit}; make a context with {argument}={value}"
            )


def same_group(op: str, ctx: Any, group: Any) -> None:
    """``group``, where it is given beside a context, has the ranks of that."""
    if group is None:
        return
    world.check_group(group)
    ranks = world.ranks_of(group)
    if ranks != ctx.group_ranks:
        raise ValueError(
            f"{op}: group has ranks {ranks} and the context {ctx.group_ranks}; pass one of them, or a context of that group"
        )


def output(
    op: str, out: Any, shape: tuple[int, int], x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """``out`` checked, or a new tensor like x."""
    if out is None:
        return x.new_empty(shape)
    _writable(op, out, shape, x, (("x", x), ("weight", weight), ("bias", bias)))
    increment_version(out)  # a kernel writes to it, and autograd, which may have saved it, does not see that
    return out  # type: ignore[no-any-return]


def listed_out(out: Any, weight: Any) -> Sequence[Any]:
    """``out`` of ag_gemm as a list: one a weight, or none at all."""
    if out is None:
        return ()
    many = isinstance(weight, (list, tuple))
    if isinstance(out, (list, tuple)) != many or (many and len(out) != len(weight)):
        found = f"a {type(out).__name__}" + (f" of {len(out)}" if isinstance(out, (list, tuple)) else "")
        wanted = f"a list of {len(weight)}, one a weight" if many else "a tensor, as weight is one"
        raise ValueError(f"ag_gemm: out is {found}, it must be {wanted}; leave it out to get new tensors")
    return list(out) if many else [out]


def outputs(
    outs: Sequence[Any], m: int, x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    """What ag_gemm writes its results to: ``outs`` checked, which are one a weight, or new tensors like x."""
    if not outs:
        return [x.new_empty(m, w.shape[0]) for w in weights]
    read: list[tuple[str, torch.Tensor | None]] = [("x", x), *(("weight", w) for w in weights), *(("bias", b) for b in biases)]
    for i, (out, w) in enumerate(zip(outs, weights, strict=True)):
        _writable("ag_gemm", out, (m, w.shape[0]), x, (*read, *(("another out", z) for z in outs[:i])))
    increment_version(outs)  # as above
    return list(outs)


def _writable(
    op: str, out: Any, shape: tuple[int, int], x: torch.Tensor, others: Sequence[tuple[str, torch.Tensor | None]]
) -> None:
    """``out`` is a matrix of this shape, like x, that has no byte of the ``others``."""
    readable(op, "out", out, 2, x.device)
    if tuple(out.shape) != shape or out.dtype != x.dtype or not out.is_contiguous():
        raise ValueError(
            f"{op}: out is {tuple(out.shape)} {out.dtype} with strides {out.stride()}, it must be {shape} {x.dtype}, row-major; "
            "leave it out to get a new tensor"
        )
    if out.requires_grad:
        raise ValueError(f"{op}: out has requires_grad, and what is written into it has no gradient; use out.detach()")
    for name, t in others:
        if t is not None and overlaps(out, t):
            raise ValueError(
                f"{op}: out overlaps {name} in memory, and is written while that is in use; give it memory of its own"
            )


def overlaps(dense: torch.Tensor, t: torch.Tensor) -> bool:
    """Whether a contiguous tensor has a byte in common with a matrix, or vector, that `operands` lets pass."""
    if dense.numel() == 0 or t.numel() == 0:
        return False
    rows = t[None] if t.dim() == 1 else tiling.stored(t)[0]
    step = rows.stride(0) * t.element_size() if rows.shape[0] > 1 else 0
    width = rows.shape[1] * t.element_size()
    start = dense.data_ptr() - t.data_ptr()
    end = start + dense.numel() * dense.element_size()
    # the first row that ends behind the start of the dense one
    first = max(0, (start - width) // step + 1) if step else 0
    return first < rows.shape[0] and first * step < end and start < first * step + width

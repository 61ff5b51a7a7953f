"""Calls for the fuzzer as plain data, and how they become tensors: every rank can build the operands of all ranks.

A `Call` says everything: sizes, layouts in memory, what is planted, and at most one fault. A call without a fault must give the
float64 result; one with a fault must be refused.
"""

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from ranks import device, ints, rows_slice

from fluxlike.ops.tiling import MAX_SIZE

#: The largest call that fits the contexts that are kept for the fuzzer.
LIMIT = 72
DTYPES = ("bfloat16", "float16", "float32")
#: Sizes around the edges of tiles, of 16-byte rows, of chunks.
SIZES = st.sampled_from((0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 70)) | st.integers(0, LIMIT - 2)
#: Elements of NaN behind every operand: whoever reads too far shows it.
TAIL = 64


@dataclass(frozen=True)
class Layout:
    """How a matrix lies in memory. kind: rows one after the other ("rows"), the same row again and again ("expanded"), rows
    that overlap ("overlapping"), the transpose stored row by row ("transposed"); "one column" and "one row" have strides that
    only such a matrix may have, and are "rows" else.

    gap: elements between rows; offset: elements before the first.
    """

    kind: str = "rows"
    gap: int = 0
    offset: int = 0

    def place(self, rows: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
        """A [rows, columns] view in this layout; the values depend on the arguments only. All other memory is NaN."""
        down, right = self.strides(rows, columns)
        places = (torch.arange(rows)[:, None] * down + torch.arange(columns) * right).unique()
        values = ints((len(places),), dtype, seed, density=0.4)
        memory = torch.full((self.offset + (int(places[-1]) + 1 if len(places) else 0) + TAIL,), math.nan, dtype=dtype)
        memory[self.offset + places] = values
        return memory.to(device()).as_strided((rows, columns), (down, right), self.offset)

    def strides(self, rows: int, columns: int) -> tuple[int, int]:
        pitch = columns + self.gap
        match self.kind:
            case "expanded":
                return 0, 1
            case "overlapping":
                return max(1, columns // 2), 1
            case "transposed":
                return 1, rows + self.gap
            case "one column" if columns <= 1:
                return pitch, 3
            case "one row" if rows <= 1:
                return 5, 2
        return pitch, 1


@st.composite
def layouts(draw, kinds: tuple[str, ...]) -> Layout:
    # half of them as TMA wants them: the other path of the kernels
    kind = draw(st.sampled_from(kinds))
    if draw(st.booleans()):
        return Layout(kind, 0, draw(st.sampled_from((0, 0, 16))))
    return Layout(kind, draw(st.sampled_from((0, 1, 3, 8, 16))), draw(st.sampled_from((0, 1, 2, 8))))


X_KINDS = ("rows", "rows", "rows", "expanded", "overlapping", "one column")
W_KINDS = (*X_KINDS, "transposed", "transposed", "one row")
SPECIAL = (math.nan, math.inf, -math.inf, -0.0)

#: Faults that every rank has: fault → words that the message must have. `broken` makes them.
OPERAND_FAULTS = {
    "x is a vector": ("x is (", "2 dimensions"),
    "x is a number": ("x is float", "2 dimensions"),
    "x is missing": ("x is NoneType",),
    "x is on meta": ("x", "on meta", ".to("),  # or the weight is on another device than x on meta
    "x is sparse": ("x", "sparse", "to_dense"),
    "x has no memory": ("x", "no memory"),
    "x is a negative view": ("x", "resolve_neg"),
    "x has another dtype": ("x has dtype torch.float64", "bfloat16"),
    "x is of integers": ("x has dtype torch.int32", "bfloat16"),
    "x has strides along K": ("x has strides", "contiguous()"),
    "x is transposed": ("x has strides", "contiguous()"),
    "weight is 3-D": ("weight is (", "2 dimensions"),
    "weight is a string": ("weight is str",),
    "weight is on meta": ("weight is on meta", ".to("),
    "weight is sparse": ("weight", "sparse", "to_dense"),
    "weight has another dtype": ("weight has dtype", "the same"),
    "weight has another K": ("(K) must be equal",),
    "weight has strides along both": ("weight has strides", "contiguous()"),
    "bias is a matrix": ("bias is (", "1 dimension"),
    "bias is long": ("bias is (", "(N)"),
    "bias has strides": ("bias is (", "stride (3,)", "contiguous"),
    "bias is expanded": ("bias is (", "stride (0,)", "contiguous"),
    "bias is on meta": ("bias is on meta", ".to("),
    "bias has another dtype": ("bias has dtype", "the same"),
    "bias is a number": ("bias is int",),
}
OUT_FAULTS = {
    "out has another shape": ("out is (", "must be"),
    "out has another dtype": ("out is (", "float64"),
    "out has strides": ("out is (", "row-major"),
    "out is expanded": ("out is (", "row-major"),
    "out is on meta": ("out is on meta", ".to("),
    "out wants a gradient": ("out", "requires_grad", "detach()"),
    "out is x": ("out", "overlaps x", "memory of its own"),
    "out is weight": ("out", "overlaps weight", "memory of its own"),
    "out is bias": ("out", "overlaps bias", "memory of its own"),
}
RS_FAULTS = {"out is a list": ("out is list", "tensor")}
AG_FAULTS = {
    "no weights": ("0 weights", "at least one"),
    "more biases than weights": ("biases",),
    "more results than weights": ("out is a list of", "leave it out"),
    "two results in one memory": ("out", "overlaps another out", "memory of its own"),
    "m does not fit": ("torch.chunk",),
    "m is negative": ("m=-1",),
    "m is a float": ("m=", "whole number"),
    "m is a bool": ("m=True", "whole number"),
    "m is a string": ("m='8'", "whole number"),
}
CALL_FAULTS = {
    "context of the other operation": ("ctx is of", "create_"),
    "context is a string": ("ctx is of 'str'",),
    "context has another dtype": ("and the context", "make a context"),
    "too large for the context": ("is more than the context's", "make a context"),
    "over 2**31 rows": ("more than", str(MAX_SIZE)),
    "over 2**31 columns": ("more than", str(MAX_SIZE)),
    "over 2**31 of K": ("more than", str(MAX_SIZE)),
}
FAULTS = {
    "gemm_rs": OPERAND_FAULTS | OUT_FAULTS | RS_FAULTS | CALL_FAULTS,
    "ag_gemm": OPERAND_FAULTS | OUT_FAULTS | AG_FAULTS | CALL_FAULTS,
}


@dataclass(frozen=True)
class Call:
    """One call on all ranks. ``schedule`` None: without a context. Tuples with one entry a rank: ks, ns, x_layouts."""

    op: str
    world: int
    schedule: str | None
    dtype: str
    m: int
    ns: tuple[int, ...]  # gemm_rs: the same on all ranks
    ks: tuple[int, ...]  # ag_gemm: the same on all ranks
    seed: int
    x_layouts: tuple[Layout, ...]
    w_layouts: tuple[Layout, ...]  # one a weight
    biases: tuple[bool, ...]  # one a weight
    as_list: bool = False
    gathered: bool = False
    pass_m: bool = True
    says: bool = False  # K of all ranks (gemm_rs), or N of all ranks and weights (ag_gemm)
    gradient: bool = False
    out: str = ""  # "" none, "rows" contiguous, "offset" at an odd address
    planted: tuple[tuple[str, int, int, float], ...] = ()  # (operand, rank, place, value)
    fault: str = ""
    place: int = 0  # a number to vary the fault

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def rows(self, rank: int) -> slice:
        return rows_slice(self.m, self.world, rank)

    def x(self, rank: int) -> torch.Tensor:
        mine = self.rows(rank)
        rows = self.m if self.op == "gemm_rs" else mine.stop - mine.start
        x = self.x_layouts[rank].place(rows, self.ks[rank], self.torch_dtype, self.seed * 100 + rank)
        return self._plant(x, "x", rank)

    def weights(self, rank: int) -> list[torch.Tensor]:
        out = []
        for i, layout in enumerate(self.w_layouts):
            w = layout.place(self.ns[rank], self.ks[rank], self.torch_dtype, self.seed * 100 + 10 * (i + 1) + rank)
            out.append(self._plant(w, "weight", rank))
        return out

    def bias(self, rank: int) -> list[torch.Tensor | None]:
        same = 0 if self.op == "gemm_rs" else rank
        layout = Layout("rows", 0, self.place % 3)
        out: list[torch.Tensor | None] = []
        for i, there in enumerate(self.biases):
            b = layout.place(1, self.ns[rank], self.torch_dtype, self.seed * 100 + 70 + 10 * i + same)[0] if there else None
            out.append(None if b is None else self._plant(b, "bias", same))
        return out

    def _plant(self, t: torch.Tensor, operand: str, rank: int) -> torch.Tensor:
        for where, who, place, value in self.planted:
            if where == operand and who % self.world == rank and t.numel():
                flat = place % t.numel()
                t[(flat // t.shape[-1], flat % t.shape[-1]) if t.dim() == 2 else flat] = value
        return t

    def expected(self, rank: int) -> list[torch.Tensor]:
        """What this rank shall get, float64, one matrix a weight; products are sums of terms, so no BLAS skips 0 · NaN."""
        if self.op == "ag_gemm":
            gathered = torch.cat([self.x(source).double() for source in range(self.world)])
            biases = self.bias(rank)
            out = [product(gathered, w.double()) for w in self.weights(rank)]
            return [z.cpu() if b is None else (z + b.double()).cpu() for z, b in zip(out, biases, strict=True)]
        total = sum(product(self.x(source).double(), self.weights(source)[0].double()) for source in range(self.world))
        (bias,) = self.bias(rank)
        assert isinstance(total, torch.Tensor)
        total = total if bias is None else total + bias.double()
        return [total[self.rows(rank)].cpu()]

    def whole(self) -> torch.Tensor:
        return torch.cat([self.x(source).double() for source in range(self.world)]).cpu()


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x[:, None, :] * w[None, :, :]).sum(-1)


@st.composite
def calls(draw, faulty: bool) -> Call:
    op, world = draw(st.sampled_from(("gemm_rs", "ag_gemm"))), draw(st.integers(1, 3))
    sizes = st.integers(6, LIMIT // 2) if faulty else SIZES  # some faults need two rows
    m, n, k = (draw(sizes) for _ in range(3))
    ns, ks = [n] * world, [k] * world
    uneven = ks if op == "gemm_rs" else ns
    if draw(st.booleans()):
        uneven[draw(st.integers(0, world - 1))] = draw(sizes)
    count = draw(st.integers(1, 3)) if op == "ag_gemm" else 1
    pass_m = op == "ag_gemm" and draw(st.booleans())
    if faulty or (op == "ag_gemm" and not pass_m):
        m = m // world * world
    fault = draw(st.sampled_from(sorted(FAULTS[op]))) if faulty else ""
    kinds = W_KINDS if not fault else ("rows",)
    x_kinds = X_KINDS if not fault else ("rows",)
    special = st.tuples(
        st.sampled_from(("x", "weight", "bias")), st.integers(0, 2), st.integers(0, LIMIT**2), st.sampled_from(SPECIAL)
    )
    schedule = draw(st.sampled_from(("copy_engine", "in_kernel", "stream_k", "decomposed", "sequential", "auto", None)))
    return Call(
        op=op,
        world=world,
        schedule=schedule,
        dtype=draw(st.sampled_from([name for name in DTYPES if (schedule, name) != ("decomposed", "float32")])),
        m=m,
        ns=tuple(ns),
        ks=tuple(ks),
        seed=draw(st.integers(0, 99)),
        x_layouts=tuple(draw(layouts(x_kinds)) for _ in range(world)),
        w_layouts=tuple(draw(layouts(kinds)) for _ in range(count)),
        biases=tuple(draw(st.booleans()) for _ in range(count)),
        as_list=count > 1 or (op == "ag_gemm" and draw(st.booleans())),
        gathered=op == "ag_gemm" and draw(st.booleans()),
        pass_m=pass_m,
        says=draw(st.booleans()),
        gradient=draw(st.booleans()) and not fault,
        out=draw(st.sampled_from(("", "rows", "offset"))) if not fault else "",
        planted=tuple(draw(st.lists(special, max_size=3))) if not fault else (),
        fault=fault,
        place=draw(st.integers(0, 7)),
    )

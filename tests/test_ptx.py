"""Every kernel compiled for Hopper and Ampere without a GPU: what the design needs stands in the machine code.

A Triton release may lose the software pipeline, drop an atomic or spill without a word; these tests are what would say so.
"""

import compiled
import pytest
import torch
import triton
import triton.language as tl

from fluxlike.kernels.blocks import sixteens
from fluxlike.ops import tiling

LARGE = tiling.choose((9, 0), torch.bfloat16, 2048, 8192)
RAGGED = tiling.choose((9, 0), torch.bfloat16, 2048, 8200)
SMALL = tiling.choose((9, 0), torch.bfloat16, 32, 8192)
POINTER = tiling.readable(SMALL, (9, 0), 32, torch.empty(32, 7))[0]
AMPERE = tiling.choose((8, 0), torch.bfloat16, 2048, 8192)
FP32 = tiling.choose((9, 0), torch.float32, 2048, 8192)
HOPPER_SHARED, AMPERE_SHARED = 232_448, 166_912

# The smallest sets that hold every branch of the kernels.
CASES = {
    "large": dict(tile=LARGE),
    "large-in-kernel": dict(tile=LARGE, transport="in_kernel"),
    "large-kn-subs": dict(tile=LARGE, kn=True, subs=2),
    "ragged-out": dict(tile=RAGGED, tma_out=False, vec=False),
    "small": dict(tile=SMALL, transport="in_kernel", dtype="fp16"),
    "pointer": dict(tile=POINTER, transport="in_kernel"),
    "pointer-ragged": dict(tile=POINTER, vec=False),
    "ampere": dict(tile=AMPERE, capability=80),
    "fp32": dict(tile=FP32, dtype="fp32", transport="in_kernel"),
}
BUILDERS = {"gemm_rs": compiled.gemm_rs, "ag_gemm": compiled.ag_gemm}
BOTH = [pytest.param(op, name, id=f"{op}-{name}") for op in BUILDERS for name in CASES]


@pytest.mark.parametrize(("op", "name"), BOTH)
def test_what_the_design_needs(op: str, name: str) -> None:
    case = CASES[name]
    tile, copies = case["tile"], case.get("transport", "copy_engine") == "copy_engine"
    kernel = BUILDERS[op](**case)
    assert compiled.lint(kernel.ptx) == []
    assert kernel.stack == 0, "registers are spilled"
    assert kernel.shared <= (AMPERE_SHARED if case.get("capability") == 80 else HOPPER_SHARED)
    if tile.tma:
        # a buffer a stage in shared memory, for the products of both phases
        assert compiled.pipelines(kernel, tile, tile.stages) == 2, "a loop over K is not pipelined"
        assert kernel.count(r"wgmma\.mma_async") > 0 and kernel.count(r"cp\.async\.bulk\.tensor\S*shared\S*global") > 0
        # a TMA load after an acquire is ordered by a proxy fence
        assert kernel.count(r"fence\.proxy\.async") > 0
    elif case.get("dtype") != "fp32" and case.get("vec", True):
        buffers = tile.stages if case.get("capability", 90) >= 90 else tile.stages - 1
        assert compiled.pipelines(kernel, tile, buffers) == 2, "a loop over K is not pipelined"
        assert kernel.count(r"cp\.async\.cg") > 0
    # every wait spins on an acquire and looks at the clock
    acquires = kernel.count(r"(ld|atom)\.\S*acquire\.?\S*sys|ld\.global\.sys\.acquire|atom\.\S*sys\.acquire")
    assert acquires > 0 and kernel.count(r"%globaltimer") > 0
    # releases: what is published in the loop and behind it (or to the copy engine), and a credit for each peer
    releases = kernel.count(r"(atom|red|st)\.\S*release")
    expected = {("gemm_rs", True): 2 + 3, ("gemm_rs", False): 2 + 3, ("ag_gemm", True): 1 + 3, ("ag_gemm", False): 1 + 3}
    assert releases >= expected[op, copies], "a release of the source is not in the code"
    pushed = (op, copies) == ("ag_gemm", False)  # pieces of the shard are counted
    assert kernel.count(r"atom\S*acq_rel") == 1 + pushed, "the arrival of a program at the end of the call"


@pytest.mark.parametrize(("op", "name"), BOTH)
def test_offsets_are_64_bit(op: str, name: str) -> None:
    """An operand, or the heap, may hold more than 2**31 elements."""
    assert compiled.narrow_offsets(BUILDERS[op](**CASES[name]).ttir) == []


@pytest.mark.parametrize(("op", "name"), [("gemm_rs", "large-in-kernel"), ("ag_gemm", "large-in-kernel"), ("gemm_rs", "pointer")])
def test_peers_get_whole_vectors(op: str, name: str) -> None:
    kernel = BUILDERS[op](**CASES[name])
    assert kernel.count(r"st\.global\S*\.v4") > 0
    assert kernel.count(r"st\.global\.b(8|16)\b") == 0


def test_copy_engine_store_is_drained_before_it_is_counted() -> None:
    kernel = compiled.gemm_rs(LARGE)
    assert kernel.count(r"cp\.async\.bulk\.wait_group\s+0") >= 2


@pytest.mark.parametrize("transport", ["copy_engine", "in_kernel"])
def test_collect(transport: str) -> None:
    kernel = compiled.ag_collect(LARGE, transport)
    assert compiled.lint(kernel.ptx) == []
    assert compiled.narrow_offsets(kernel.ttir) == []
    assert kernel.stack == 0 and kernel.count(r"st\.global\S*\.v4") > 0
    assert kernel.count(r"(atom|red|st)\.\S*release") == 3 and kernel.count(r"%globaltimer") > 0


GOOD = """
    st.global.v4.b32 [%rd1], {%r1, %r2, %r3, %r4};
    bar.sync 0;
    atom.global.release.sys.add.u32 %r5, [%rd2], 1;
"""
TMA = """
    cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r1, %r2}], [%r3];
    cp.async.bulk.wait_group 0;
    bar.sync 0;
    atom.global.release.sys.add.u32 %r5, [%rd2], 1;
"""


@pytest.mark.parametrize(
    ("ptx", "problem"),
    [
        (GOOD, None),
        (TMA, None),
        (GOOD.replace("    bar.sync 0;\n", ""), "barrier"),
        (TMA.replace("    bar.sync 0;\n", ""), "barrier"),
        (TMA.replace("wait_group 0", "wait_group.read 0"), "drained"),
        (GOOD.replace("release", "acq_rel").replace("    bar.sync 0;\n", ""), "barrier"),
    ],
)
def test_the_lint_itself(ptx: str, problem: str | None) -> None:
    found = compiled.lint(ptx)
    assert (found == []) if problem is None else (len(found) == 1 and problem in found[0])


@triton.jit
def _copy_block(x, out, ld, K, WIDE: tl.constexpr):
    rows = tl.arange(0, 16)[:, None]
    at = rows.to(tl.int64) * ld if WIDE else (rows * sixteens(ld)).to(tl.int64)
    columns = tl.arange(0, 16)[None, :]
    tl.store(out + at + columns, tl.load(x + at + columns, mask=columns < K))


@pytest.mark.parametrize("wide", (True, False))
def test_a_narrow_offset_would_be_seen(wide: bool) -> None:
    signature = {"x": "*bf16", "out": "*bf16", "ld": "i32", "K": "i32"}
    kernel = compiled.compile_kernel(_copy_block, signature, {"WIDE": wide}, 90, POINTER)
    assert len(compiled.narrow_offsets(kernel.ttir)) == (0 if wide else 1)


def test_a_lost_pipeline_would_be_seen() -> None:
    """The same kernel compiled with one stage must fail the check of `test_what_the_design_needs`."""
    flat = tiling.Tiling(**{**LARGE.__dict__, "stages": 1})
    kernel = compiled.gemm_rs(flat)
    assert compiled.pipelines(kernel, LARGE, LARGE.stages) == 0

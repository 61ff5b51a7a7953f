"""Kernels compiled for a GPU that is not there: Triton's own compiler, down to the machine code, and what can be read off it."""

import functools
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fluxlike.kernels.ag_gemm import ag_collect_kernel, ag_gemm_kernel
from fluxlike.kernels.gemm_rs import gemm_rs_kernel
from fluxlike.ops.tiling import Tiling

_CUOBJDUMP = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
_BITS = {"bf16": 16, "fp16": 16, "fp32": 32}


@dataclass(frozen=True)
class Compiled:
    ptx: str
    ttir: str
    ttgir: str
    shared: int
    registers: int
    stack: int

    def count(self, pattern: str) -> int:
        return len(re.findall(pattern, self.ptx))


def compile_kernel(kernel, signature: dict, constants: dict, capability: int, tile: Tiling) -> Compiled:
    """``signature``: argument → Triton type; pointers are taken as 16-byte aligned, as fluxlike's launches see to."""
    full = {name: "constexpr" if name in constants else signature[name] for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if full[name].startswith("*")}
    fixed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=full, constexprs=fixed, attrs=aligned)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        usage = subprocess.run([_CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{word}:(\d+)", usage).group(1)) for word in ("REG", "STACK"))
    return Compiled(built.asm["ptx"], built.asm["ttir"], built.asm["ttgir"], built.metadata.shared, registers, stack)


def pipelines(kernel: Compiled, tile: Tiling, buffers: int) -> int:
    """Loops over K whose left operand has ``buffers`` buffers in shared memory; both of a kernel's, or one has lost its own."""
    shapes = re.findall(r"ttg\.local_alloc[^\n]*memdesc<(\d+x\d+x\d+)x", kernel.ttgir)
    found = shapes.count(f"{buffers}x{tile.bm}x{tile.bk}")
    same = tile.tma and tile.bn == tile.bm  # then the right operand [BN, BK] is counted with it
    return found // 2 if same else found


def _block(dtype: str, *shape: int) -> str:
    return f"tensordesc<{dtype}[{', '.join(map(str, shape))}]>"


@functools.cache
def gemm_rs(tile: Tiling, transport: str = "copy_engine", dtype: str = "bf16", capability: int = 90, **choices) -> Compiled:
    """`gemm_rs_kernel` as `ops.gemm_rs` launches it. ``choices``: ranks, subs, tma_out, vec, kn."""
    kn, copies = choices.get("kn", False), transport == "copy_engine"
    tma_out = choices.get("tma_out", tile.tma)
    pointer, number = f"*{dtype}", "i32"
    signature = dict.fromkeys(gemm_rs_kernel.arg_names, number) | {
        "x": _block(dtype, tile.bm, tile.bk) if tile.tma else pointer,
        "w": _block(dtype, *((tile.bk, tile.bn) if kn else (tile.bn, tile.bk))) if tile.tma else pointer,
        "local": _block(dtype, tile.bm, tile.bn) if tile.tma and copies else pointer,
        "stage": _block(dtype, 1, tile.bm, tile.bn // 2) if tile.tma else pointer,
        "out": _block(dtype, tile.bm, tile.bn // 2) if tma_out else pointer,
        "bias": pointer, "stage_ptr": pointer, "ready": "*i32", "full": "*i32", "flags": "*i64", "ctl": "*i64",
    }  # fmt: skip
    constants = dict(
        R=choices.get("ranks", 4), S=choices.get("subs", 1), BM=tile.bm, BN=tile.bn, BK=tile.bk, GROUP_M=tile.group_m,
        COPY_ENGINE=copies, TMA=tile.tma, TMA_OUT=tma_out, VEC=choices.get("vec", True), W_IS_KN=kn,
    )  # fmt: skip
    return compile_kernel(gemm_rs_kernel, signature, constants, capability, tile)


@functools.cache
def ag_gemm(tile: Tiling, transport: str = "copy_engine", dtype: str = "bf16", capability: int = 90, **choices) -> Compiled:
    """`ag_gemm_kernel` as `ops.ag_gemm` launches it. ``choices``: ranks, subs, tma_out, vec, kn."""
    kn, copies = choices.get("kn", False), transport == "copy_engine"
    tma_out = choices.get("tma_out", tile.tma)
    pointer, number = f"*{dtype}", "i32"
    signature = dict.fromkeys(ag_gemm_kernel.arg_names, number) | {
        "x": _block(dtype, tile.bm, tile.bk) if tile.tma else pointer,
        "gathered": _block(dtype, 1, tile.bm, tile.bk) if tile.tma else pointer,
        "w": _block(dtype, *((tile.bk, tile.bn) if kn else (tile.bn, tile.bk))) if tile.tma else pointer,
        "out": _block(dtype, tile.bm, tile.bn) if tma_out else pointer,
        "x_ptr": pointer, "gathered_ptr": pointer, "bias": pointer,
        "go": "*i32", "pushed": "*i32", "full": "*i32", "flags": "*i64", "ctl": "*i64",
    }  # fmt: skip
    constants = dict(
        R=choices.get("ranks", 4), S=choices.get("subs", 1), BM=tile.bm, BN=tile.bn, BK=tile.bk, GROUP_M=tile.group_m,
        PUSH_BM=16 * tile.warps * 8 // _BITS[dtype], PUSH_BK=256, COPY_ENGINE=copies, TMA=tile.tma, TMA_OUT=tma_out,
        VEC=choices.get("vec", True), W_IS_KN=kn,
    )  # fmt: skip
    return compile_kernel(ag_gemm_kernel, signature, constants, capability, tile)


@functools.cache
def ag_collect(tile: Tiling, transport: str = "copy_engine", dtype: str = "bf16", capability: int = 90, **choices) -> Compiled:
    """`ag_collect_kernel` as `ops.ag_gemm` launches it. ``choices``: ranks, subs, vec."""
    pointer = f"*{dtype}"
    signature = dict.fromkeys(ag_collect_kernel.arg_names, "i32") | {
        "x": pointer, "gathered": pointer, "out": pointer, "full": "*i32", "flags": "*i64", "ctl": "*i64",
    }  # fmt: skip
    constants = dict(
        R=choices.get("ranks", 4), S=choices.get("subs", 1), BM=tile.bm, COPY_BM=64, COPY_BK=256,
        COPY_ENGINE=transport == "copy_engine", VEC=choices.get("vec", True),
    )  # fmt: skip
    return compile_kernel(ag_collect_kernel, signature, constants, capability, tile)


#: Arguments that are the distance between two rows, or two slot sets: elements, so a product with an index needs 64 bits.
_PITCHES = ("stride_x", "stride_w", "ld", "set_elements", "N", "K")
_PASS = ("extsi", "splat", "broadcast", "expand_dims", "muli", "addi", "subi", "minsi", "maxsi", "select")


def narrow_offsets(ttir: str) -> list[str]:
    """Products of a pitch and an index that are made in 32 bits, so that a matrix of 2**31 elements breaks them.

    Not counted: a pitch times a constant (a rounding) or a 0 or 1 (has_bias), a pitch divided (a number of tiles).
    """
    arguments = dict(re.findall(r"%(\w+): (i32|i64|!tt)", ttir.split("tt.func public", 1)[1].split("{\n", 1)[0]))
    pitches = {f"%{name}" for name in _PITCHES if name in arguments}
    assert {"%K", "%ld"} & pitches, f"no pitch among {list(arguments)}"
    constants = dict(re.findall(r"(%\w+) = arith\.constant (\S+)", ttir))
    found = []
    for line in ttir.splitlines():
        parsed = re.match(r"\s*(%\w+) = \w+\.(\w+) (.*?) : (.*?)(?: loc\(|$)", line)
        if parsed is None:
            continue
        result, operation, text, kind = parsed.groups()
        used = re.findall(r"%\w+", text)
        mine = [name for name in used if name in pitches]
        others = [name for name in used if name not in mine and name not in constants and name != "%has_bias"]
        if not mine:
            continue
        products = operation == "muli" and kind.endswith(("i32", "i32>")) and (others or len(mine) > 1)
        if products or operation == "trunci":
            found.append(line.strip())
        if operation in _PASS or (operation == "divsi" and constants.get(used[1]) == "16"):
            pitches.add(result)
    return found


def lint(ptx: str) -> list[str]:
    """What is wrong with the order of stores and releases in a PTX text; empty when nothing is.

    A release by one thread orders the other threads' stores only behind a CTA barrier, and a TMA store only once the issuing
    thread has waited for the whole of it (``wait_group 0``; the ``.read`` form speaks of its source alone). Stores under the
    predicate of the release are its own thread's.
    """
    problems: list[str] = []
    stored: set[str] = set()  # the predicates of stores since the last barrier
    undrained = False
    for line in (text.strip() for text in ptx.splitlines()):
        predicate = line.split()[0] if line.startswith("@") else ""
        if re.search(r"\b(atom|red|st)\.\S*(release|acq_rel)", line):
            if stored - {predicate or None}:
                problems.append(f"stores are not behind a CTA barrier: {line}")
            if undrained:
                problems.append(f"a TMA store is not drained: {line}")
        elif re.search(r"cp\.async\.bulk\.tensor\.\S*\.global\.shared", line):
            undrained = True
            stored.add("TMA")
        elif re.search(r"\bst\.(volatile\.|relaxed\.\w+\.)?global", line):
            stored.add(predicate)
        elif re.search(r"cp\.async\.bulk\.wait_group\s+0", line):
            undrained = False
        elif re.search(r"\bbar(rier)?\.(cta\.)?sync", line):
            stored.clear()
    return problems

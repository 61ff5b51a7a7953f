"""Kernels compiled for a GPU that is not there: Triton's own compiler, down to the machine code."""

import contextlib
import io
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

_TOOLS = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
_TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64", torch.bool: "i1",
    torch.int8: "i8", torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
    torch.uint16: "u16", torch.uint32: "u32", torch.uint64: "u64", torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5",
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """A kernel as one launch compiles it.

    ``signature``: argument → Triton's type; "constexpr" for those in ``constants``. ``aligned``: multiples of 16, as Triton
    specialises. ``payload``, ``signals``, ``bases``: see `rules.Spec`. ``options``: more for the compiler, as maxnreg=128.
    """

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    aligned: frozenset[str]
    warps: int
    stages: int
    payload: tuple[str, ...] = ()
    signals: tuple[str, ...] = ()
    bases: tuple[str, ...] = ()
    options: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__

    @property
    def key(self) -> tuple:
        """Equal for launches that compile to the same."""
        made = (self.signature, self.constants, sorted(self.aligned), self.warps, self.stages, self.options)
        return (self.name, *map(repr, made))


@dataclass(frozen=True)
class Built:
    """What came of a launch.

    ``local``: instructions that load or store registers in local memory. ``serialised``: why ptxas lets each of the asynchronous
    products wait for the one before; empty if it does not.
    """

    launch: Launch
    capability: int
    ptx: str
    ttir: str
    ttgir: str
    shared: int
    registers: int
    stack: int
    local: int
    serialised: str


def launch_of(kernel: Any, args: tuple, constants: dict[str, Any], warps: int, stages: int, contexts: Iterable[Any] = ()) -> Launch:
    """The launch of ``kernel[grid](*args, **constants, num_warps=…, num_stages=…)``, specialised as Triton does it.

    ``contexts``: of `ops.group`; an argument in a context's heap block is payload or a signal, its control block has the bases.
    """
    signature, fixed, aligned = {}, dict(constants), set()
    options = {name: fixed.pop(name) for name in constants if name not in kernel.arg_names}
    roles: dict[str, list[str]] = {"payload": [], "signals": [], "bases": []}
    for parameter, value in zip(kernel.params, args, strict=False):
        name = parameter.name
        kind = _type_of(value)
        specialised = not getattr(parameter, "do_not_specialize", False)
        if kind == "constexpr" or (specialised and value is not True and isinstance(value, int) and value == 1):
            fixed[name] = value
            continue
        signature[name] = kind
        number = value.data_ptr() if isinstance(value, torch.Tensor) else value
        if isinstance(number, int) and number % 16 == 0 and (specialised or isinstance(value, torch.Tensor)):
            aligned.add(name)
        role = _role(value, contexts)
        if role:
            roles[role].append(name)
    full = {name: "constexpr" if name in fixed else signature[name] for name in kernel.arg_names}
    known = {role: tuple(names) for role, names in roles.items()}
    return Launch(kernel, full, fixed, frozenset(aligned), warps, stages, **known, options=options)


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"*{_TYPES[value.dtype]}"
    if hasattr(value, "block_shape"):
        return f"tensordesc<{_TYPES[value.base.dtype]}[{', '.join(map(str, value.block_shape))}]>"
    if value is None:
        return "constexpr"
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


def _role(value: Any, contexts: Iterable[Any]) -> str | None:
    """What an argument is for the ranks, by where its memory is."""
    tensor = value.base if hasattr(value, "block_shape") else value
    if not isinstance(tensor, torch.Tensor):
        return None
    for context in contexts:
        context = getattr(context, "messages", context)  # of one between nodes
        for role, names in (("payload", context.payload), ("signals", context.signals)):
            if any(_inside(tensor, getattr(context, name)) for name in names):
                return role
        if _inside(tensor, context.ctl):
            return "bases"
    return None


def _inside(tensor: torch.Tensor, region: torch.Tensor) -> bool:
    if tensor.untyped_storage()._cdata != region.untyped_storage()._cdata:
        return False
    start = tensor.storage_offset() * tensor.itemsize - region.storage_offset() * region.itemsize
    return 0 <= start < region.numel() * region.itemsize


def build(launch: Launch, capability: int, **options: Any) -> Built:
    """Compile for compute capability ``capability`` (90 for 9.0). ``options``: in front of the launch's own."""
    names = launch.kernel.arg_names
    source = ASTSource(
        fn=launch.kernel,
        signature=launch.signature,
        constexprs={(names.index(name),): value for name, value in launch.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in launch.aligned},
    )
    options = {"num_warps": launch.warps, "num_stages": launch.stages, **launch.options, **options}
    made, said = _compile(source, capability, options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = _run("cuobjdump", "--dump-resource-usage", file.name)
        registers, stack = (int(number) for number in re.findall(r"\b(?:REG|STACK):(\d+)", usage)[:2])
        local = len(re.findall(r"\b(?:LDL|STL)\b", _run("nvdisasm", "-c", file.name))) if stack else 0
    ptx, shared = made.asm["ptx"], made.metadata.shared
    found = _SERIALISED.search(said or _ptxas(ptx, capability))
    why = found.group(1) if found else ""
    return Built(launch, capability, ptx, made.asm["ttir"], made.asm["ttgir"], shared, registers, stack, local, why)


_SERIALISED = re.compile(r"wgmma\.mma_async instructions are serialized due to (.*?) in (?:the )?function")


def _compile(source: ASTSource, capability: int, options: dict[str, Any]) -> tuple[Any, str]:
    """What Triton makes of it, and what ptxas says; "" if Triton took it from its cache."""
    said = io.StringIO()
    with knobs.nvidia.scope():
        knobs.nvidia.dump_ptxas_log = True  # to stdout
        try:
            with contextlib.redirect_stdout(said):
                return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options), said.getvalue()
        except BaseException:
            print(said.getvalue(), end="")
            raise


def _ptxas(ptx: str, capability: int) -> str:
    """What ptxas says of a kernel that Triton had in its cache; asked only if there are asynchronous products.

    Triton has more than one ptxas, and which of them takes the PTX of an architecture depends on its release.
    """
    if "wgmma.mma_async" not in ptx:
        return ""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        return _run(get_ptxas(capability).path, f"--gpu-name=sm_{capability}a", file.name, "-o", os.devnull)


def _run(tool: str, *arguments: str) -> str:
    """What a tool of Triton's, or one by its path, says; errors behind the rest."""
    done = subprocess.run([os.path.join(_TOOLS, tool), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{tool} of Triton {triton.__version__} ended with status {done.returncode}: {done.stderr.strip()}")
    return done.stdout + done.stderr

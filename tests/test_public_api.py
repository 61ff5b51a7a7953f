"""The names and signatures that users rely on, and what importing the package does not do."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fluxlike

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fluxlike"

SIGNATURES = {
    "init": "(group=None, heap='auto', heap_bytes=None)",
    "finalize": "()",
    "is_initialized": "()",
    "create_gemm_rs_context": "(max_m, n, k=None, dtype=torch.bfloat16, group=None, schedule='auto')",
    "gemm_rs": "(x, weight, ctx=None, *, bias=None, group=None, out=None)",
    "create_ag_gemm_context": "(max_m, n, k, dtype=torch.bfloat16, group=None, schedule='auto')",
    "ag_gemm": "(x_shard, weight, ctx=None, *, bias=None, group=None, return_gathered=False, m=None)",
}


def bare(function) -> str:
    """The signature without the annotations."""
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def test_all():
    assert sorted(fluxlike.__all__) == sorted(["PeerTimeout", "__version__", "reference", *SIGNATURES])
    assert set(dir(fluxlike)) >= set(fluxlike.__all__)
    for name in fluxlike.__all__:
        assert getattr(fluxlike, name) is not None
    with pytest.raises(AttributeError, match="gemm_sr"):
        fluxlike.gemm_sr  # noqa: B018
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", fluxlike.__version__)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    assert bare(getattr(fluxlike, name)) == SIGNATURES[name]


@pytest.mark.parametrize("name", ("gemm_rs", "ag_gemm"))
def test_the_reference_has_the_same_signature(name):
    assert bare(getattr(fluxlike.reference, name)) == bare(getattr(fluxlike, name))


@pytest.mark.parametrize("name", (*SIGNATURES, "PeerTimeout", "reference"))
def test_docstrings(name):
    text = inspect.getdoc(getattr(fluxlike, name)) or ""
    assert name == "is_initialized" or len(text) > 20, f"{name} has no docstring"
    function = getattr(fluxlike, name)
    if callable(function) and not inspect.isclass(function):
        assert inspect.signature(function).return_annotation is not inspect.Signature.empty, f"{name} is not typed"


def test_every_public_function_has_a_docstring():
    missing = []
    for name in fluxlike.__all__:
        thing = getattr(fluxlike, name)
        if callable(thing) and not (thing.__doc__ or "").strip():
            missing.append(name)
    for name, thing in vars(fluxlike.reference).items():
        if inspect.isfunction(thing) and thing.__module__ == fluxlike.reference.__name__ and not thing.__doc__:
            missing.append(f"reference.{name}")
    assert not missing, f"without a docstring: {missing}"


def test_peer_timeout_is_a_runtime_error():
    assert issubclass(fluxlike.PeerTimeout, RuntimeError)


def test_typed():
    assert (PACKAGE / "py.typed").exists()


IMPORT = """
import logging, os, sys
before = dict(os.environ), set(sys.meta_path), sys.excepthook, list(logging.root.handlers), sys.getswitchinterval()
import fluxlike
dir(fluxlike)
fluxlike.__version__
assert (dict(os.environ), set(sys.meta_path), sys.excepthook, list(logging.root.handlers), sys.getswitchinterval()) == before
assert not [name for name in sys.modules if name.split(".")[0] in ("torch", "triton", "numpy", "nvshmem", "cuda")]
assert not logging.getLogger("fluxlike").handlers
# The operations bring torch and Triton, and still change nothing of the process.
environment = dict(os.environ)
import torch, triton
hooks = triton.knobs.runtime.jit_post_compile_hook, triton.knobs.runtime.launch_enter_hook, triton.runtime.driver._active
after_torch = dict(os.environ)
for name in fluxlike.__all__:
    getattr(fluxlike, name)
assert dict(os.environ) == after_torch
assert hooks == (
    triton.knobs.runtime.jit_post_compile_hook, triton.knobs.runtime.launch_enter_hook, triton.runtime.driver._active
)
assert not torch.cuda.is_initialized()
assert not logging.getLogger("fluxlike").handlers
assert not fluxlike.is_initialized()
print("clean")
"""


def test_import_does_nothing():
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", IMPORT], env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.strip() == "clean", done.stderr


def test_only_env_reads_the_library_s_variables():
    """Every FLUXLIKE_* name in the code is in the table, and only runtime/env.py gets at the environment for them."""
    from fluxlike.runtime import env

    known = {variable.name for variable in env.TABLE}
    assert len(known) == len(env.TABLE)
    for variable in env.TABLE:
        assert variable.help and variable.name.startswith("FLUXLIKE_")
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        where = str(path.relative_to(ROOT))
        assert set(re.findall(r"FLUXLIKE_[A-Z_]*[A-Z]", text)) <= known, f"{where} has a name that the table lacks"
        if path == PACKAGE / "runtime" / "env.py":
            continue
        reads = re.findall(r"(?:environ|getenv)[^\n]*FLUXLIKE_\w+", text)
        assert not reads, f"{where} reads {reads} past runtime/env.py"


def test_kernels_know_nothing_of_processes():
    """Arrows go down only: kernels import neither torch nor the runtime, the runtime no kernels and no operations."""
    for path in (PACKAGE / "kernels").glob("*.py"):
        imports = re.findall(r"^\s*(?:from|import)\s+(\S+)", path.read_text(), re.M)
        assert not [name for name in imports if name.startswith(("torch", "..", "fluxlike"))], path.name
    for path in (PACKAGE / "runtime").glob("*.py"):
        imports = re.findall(r"^\s*(?:from|import)\s+(\S+)", path.read_text(), re.M)
        assert not [name for name in imports if name.startswith(("..", "fluxlike"))], path.name

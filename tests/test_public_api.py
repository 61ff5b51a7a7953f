"""The names and signatures that users rely on, and what importing the package does not do."""

import ast
import importlib
import inspect
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
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
    "gemm_rs": "(x, weight, ctx=None, *, bias=None, group=None, out=None, k=None)",
    "create_gemm_ar_context": "(max_m, n, dtype=torch.bfloat16, group=None, algo='auto', product='auto')",
    "gemm_ar": "(x, weight, ctx=None, *, bias=None, group=None, out=None)",
    "create_ag_gemm_context": "(max_m, n, k, dtype=torch.bfloat16, group=None, schedule='auto')",
    "ag_gemm": "(x_shard, weight, ctx=None, *, bias=None, group=None, return_gathered=False, m=None, n=None, out=None)",
    "all_reduce": "(x, group=None, op='sum', algo='auto')",
    "all_reduce_": "(x, group=None, op='sum', algo='auto')",
    "reduce_scatter": "(x, group=None, op='sum', algo='auto')",
    "all_gather": "(x, group=None, m=None, algo='auto')",
    "reduce": "(x, root, group=None, op='sum', algo='auto')",
    "broadcast": "(x, root, group=None, algo='auto')",
    "create_sparse_all_reduce_context": "(shape, max_nnz, dtype=torch.float32, group=None, wire_dtype=None)",
    "sparse_all_reduce": "(x, op='sum', group=None, mode='exact', *, ctx=None, max_nnz=None, wire_dtype=None)",
    "sparse_allreduce_hook": "(group, bucket)",
    "sparse_reduce_scatter": "(x, op='sum', group=None, mode='exact', *, max_nnz=None, wire_dtype=None)",
    "sparse_all_reduce_": "(x, op='sum', group=None, mode='exact', *, ctx=None, max_nnz=None, wire_dtype=None)",
}


def bare(function) -> str:
    """The signature without the annotations."""
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def test_all():
    others = ["CallMismatch", "PeerTimeout", "__version__", "nn", "reference", "topology"]
    assert sorted(fluxlike.__all__) == sorted([*others, *SIGNATURES])
    assert set(dir(fluxlike)) >= set(fluxlike.__all__)
    for name in fluxlike.__all__:
        assert getattr(fluxlike, name) is not None
    with pytest.raises(AttributeError, match="gemm_sr"):
        fluxlike.gemm_sr  # noqa: B018
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", fluxlike.__version__)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    assert bare(getattr(fluxlike, name)) == SIGNATURES[name]


@pytest.mark.parametrize("name", ("gemm_rs", "gemm_ar", "ag_gemm", "sparse_all_reduce"))
def test_the_reference_has_the_same_signature(name):
    assert bare(getattr(fluxlike.reference, name)) == bare(getattr(fluxlike, name))


def test_every_public_name_has_a_docstring_and_types():
    public = {name: getattr(fluxlike, name) for name in fluxlike.__all__ if name != "__version__"}
    references = ("gemm_rs", "gemm_ar", "ag_gemm", "sparse_all_reduce")
    public |= {f"reference.{name}": getattr(fluxlike.reference, name) for name in references}
    assert not [name for name, thing in public.items() if not (thing.__doc__ or "").strip()]
    functions = {name: inspect.signature(thing) for name, thing in public.items() if inspect.isfunction(thing)}
    assert not [name for name, s in functions.items() if s.return_annotation is inspect.Signature.empty]
    assert not [
        f"{name}({p.name})"
        for name, s in functions.items()
        for p in s.parameters.values()
        if p.annotation is inspect.Parameter.empty
    ]


def test_peer_timeout_is_a_runtime_error():
    assert issubclass(fluxlike.PeerTimeout, RuntimeError) and issubclass(fluxlike.CallMismatch, ValueError)


def test_typed():
    assert (PACKAGE / "py.typed").exists()


def test_what_is_packaged(tmp_path):
    """In both kinds of archive the package, all files of it; no tests, which setuptools packs without their helpers."""
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path / "source"
    for folder in ("fluxlike", "tests"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file() and path.name != ".git":
            shutil.copy(path, source)
    build = "from setuptools import build_meta as b; print(b.build_sdist('dist')); print(b.build_wheel('dist'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    with tarfile.open(next((source / "dist").glob("*.tar.gz"))) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(next((source / "dist").glob("*.whl"))) as wheel:
        wheeled = {name for name in wheel.namelist() if ".dist-info/" not in name}
    wanted = {str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert wheeled == wanted and "fluxlike/py.typed" in wanted
    assert wanted | {"README.md", "LICENSE", "pyproject.toml"} <= inside
    assert not [name for name in inside if name.startswith("tests")]


IMPORT = """
import logging, os, sys

def process():
    return dict(os.environ), list(sys.meta_path), sys.excepthook, list(logging.root.handlers), sys.getswitchinterval()

def heavy():
    return {name for name in sys.modules if name.split(".")[0] in ("torch", "triton", "numpy", "nvshmem", "cuda")}

before, there = process(), heavy()  # cuda-bindings begins with every Python that has it
import fluxlike
dir(fluxlike)
fluxlike.__version__
assert process() == before
assert heavy() == there
assert not logging.getLogger("fluxlike").handlers
# The operations bring torch and Triton, and still change nothing of the process.
import torch, triton, triton.language as tl

def hooks():
    return process(), triton.knobs.runtime.jit_post_compile_hook, triton.knobs.runtime.launch_enter_hook, dict(vars(tl))

before = hooks()
for name in fluxlike.__all__:
    getattr(fluxlike, name)
assert hooks() == before
assert not torch.cuda.is_initialized()
assert not logging.getLogger("fluxlike").handlers
assert not fluxlike.is_initialized()
print("clean")
"""


def test_import_does_nothing():
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", IMPORT], env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.strip() == "clean", done.stderr


def test_ops_that_saved_graphs_name():
    names = ("gemm_rs", "ag_gemm", "gemm_ar", "all_reduce", "reduce_scatter", "all_gather", "broadcast")
    code = f"import torch, fluxlike.nn; [getattr(torch.ops.fluxlike, name).default for name in {names}]"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)


def test_only_env_reads_the_library_s_variables():
    """Every FLUXLIKE_* name in the code is in env's lists, and only runtime/env.py gets at the environment for them."""
    from fluxlike.runtime import env

    known = {variable.name for variable in env.TABLE}
    assert len(known) == len(env.TABLE)
    known.update(env.ELSEWHERE)
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


@pytest.mark.parametrize("path", sorted((ROOT / "tutorials").glob("*.py")), ids=lambda path: path.stem)
def test_what_tutorials_import_is_there(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fluxlike"):
            module = importlib.import_module(node.module)
            # a module of a package is there before anybody has imported it
            parts = [found.name for found in pkgutil.iter_modules(getattr(module, "__path__", ()))]
            missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
            assert [name for name in missing if name not in parts] == [], node.module

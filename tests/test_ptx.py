"""Every kernel, as the operations launch it, compiled for Ampere, Hopper and Blackwell without a GPU: the lint finds nothing.

A Triton release may lose the software pipeline, drop an atomic or spill without a word; these tests are what would say so. Other
releases: FLUXLIKE_TEST_TRITON=/path/a:/path/b, each a directory made by `pip install --no-deps --target /path/a triton==…`.
"""

import ast
import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import compiled
import mutate_source
import pytest
import slow
import torch
from triton.backends.nvidia.compiler import CUDABackend

from fluxlike.kernels import elements
from fluxlike.tools import lint
from fluxlike.tools.lint import compiling, variants
from fluxlike.tools.lint.variants import Case

ROOT = Path(__file__).resolve().parents[1]
OTHER_TRITONS = [path for path in os.environ.get("FLUXLIKE_TEST_TRITON", "").split(":") if path]


#: Each operation, transport and architecture once, for the quick run; the first two are compiled for test_lint anyway.
QUICK = (
    (Case("gemm_rs", "copy_engine"), 90),
    (Case("gemm_rs", "in_kernel"), 90),
    (Case("ag_gemm", "in_kernel"), 80),
    (Case("ag_gemm", "copy_engine"), 100),
)
assert set(QUICK) <= set(compiled.ALL)


def is_plain(case: Case) -> bool:
    """Whether a case is compiled whatever was changed: each kernel, in the variant that most calls take."""
    usual = Case(case.op, case.schedule, case.shape, nodes=case.nodes, puts=case.puts)
    return case == usual and (case.shape in ("large", "few", "deep") or case.puts == "auto")


#: What decides what the other cases compile to: the kernels, their launches, the list of cases, and the Triton that is asked for.
MADE_BY = ("fluxlike/kernels/*.py", "fluxlike/ops/*.py", "fluxlike/tools/lint/variants.py", "pyproject.toml")
assert all(list(ROOT.glob(pattern)) for pattern in MADE_BY)


def marks(case: Case, sm: int) -> tuple:
    about = [slow.ALWAYS] if is_plain(case) else MADE_BY
    return () if (case, sm) in QUICK else (pytest.mark.slow(*about),)


@pytest.fixture(scope="module", autouse=True)
def _compile_ahead(request):
    compiled.begin(request.session)


@pytest.mark.parametrize(
    ("case", "capability"),
    [pytest.param(case, sm, id=f"sm_{sm}-{case}", marks=marks(case, sm)) for case, sm in compiled.ALL],
)
def test_nothing_is_found(case: Case, capability: int) -> None:
    for report in compiled.reports(case, capability):
        assert not report.findings, lint.describe(report)
        assert report.registers <= 255


@pytest.mark.slow
@pytest.mark.parametrize("capability", [86, 120])
@pytest.mark.parametrize("case", [Case("gemm_rs", "copy_engine", "parts"), Case("ag_gemm", "in_kernel")], ids=str)
def test_gpus_with_less_shared_memory(case: Case, capability: int) -> None:
    for report in compiled.reports(case, capability):
        assert not report.findings, lint.describe(report)
        assert report.shared <= 99 << 10


def test_words_of_a_fused_call_move_in_vectors() -> None:
    """As those of one_shot do; what is loaded goes to shared memory without registers between."""
    for algo, more in (("one_shot", 0), ("two_shot", 1)):
        built = compiled.built(Case("gemm_ar", algo, "few"), 90)
        peers = variants.RANKS - 1
        sent, emptied, results = peers + more * peers, variants.RANKS + more, 1 + more
        assert built.ptx.count("st.global.v4.b32") == sent + emptied + results
        assert built.ptx.count("ld.volatile.global.v4") == 2 * (variants.RANKS + more)  # first and in the loop
        assert "cp.async.cg.shared.global" in built.ptx and "ld.global.v4" not in built.ptx


@pytest.mark.parametrize("algo", ["one_shot", "two_shot"])
def test_words_move_in_vectors(algo: str) -> None:
    built = compiled.built(Case("all_reduce", algo), 90)
    peers = built.launch.constants["R"] - 1
    taken = 1 + peers + (0 if algo == "one_shot" else peers)  # four words of each rank, or of one, by each wait
    sent = peers if algo == "one_shot" else 2 * peers
    assert built.ptx.count("st.global.v4.b32") == sent + taken + (1 if algo == "one_shot" else 1 + peers)  # and emptied; the result
    assert built.ptx.count("ld.volatile.global.v4.b32") == 2 * taken


def test_the_cases_reach_every_kernel_by_every_way() -> None:
    ways, shared, plain = set(), set(), set()
    for case, capability in compiled.ALL:
        for launch in variants.launches(case, capability):
            plain |= {(capability, launch.name)} if is_plain(case) else set()
            given = launch.constants
            dtype = "fp32" if case.dtype == torch.float32 else "half"
            ways.add((capability, launch.name, given.get("COPY_ENGINE"), given.get("TMA"), dtype))
            if given.get("SHARED"):
                shared.add((capability, launch.name, given["COPY_ENGINE"]))
    assert plain == {(capability, name) for capability, name, *_ in ways}
    # what `cost.SHARING` says decides whether these share their last wave
    assert shared == {(90, name, copies) for name in ("gemm_rs_kernel", "ag_gemm_kernel") for copies in (True, False)}
    for capability in (80, 90, 100):
        for name in ("gemm_rs_kernel", "ag_gemm_kernel"):
            for copies in (True, False):
                assert (capability, name, copies, False, "half") in ways
                assert ((capability, name, copies, True, "half") in ways) == (capability >= 90)
            assert (capability, name, False, False, "fp32") in ways
        assert (capability, "gemm_rs_stream_k_kernel", None, capability >= 90, "half") in ways
        assert (capability, "gemm_rs_stream_k_kernel", None, False, "fp32") in ways
        assert {(capability, "ag_collect_kernel", copies, None, "half") for copies in (True, False)} <= ways


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("path", OTHER_TRITONS)
def test_other_tritons(path: str) -> None:
    environment = os.environ | {"PYTHONPATH": f"{path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", "fluxlike", "lint", "--json"], capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    result = json.loads(done.stdout)
    found = [f"sm_{one['capability']} {one['case']}: {one['findings']}" for one in result["reports"] if one["findings"]]
    assert not found, "\n".join([result["triton"], *found])
    assert len(result["reports"]) >= len(compiled.ALL)


# tracing


def untraced(name: str, directory) -> Any:
    """The module of kernels ``name`` without any of its calls that trace; all else stays on its line."""
    source = mutate_source.Source(f"kernels/{name}.py")
    text, removed = source.bytes, 0
    calls = [n for n in ast.walk(source.tree) if re.match(r"record\w*\(", ast.unparse(n))]
    for call in sorted((n for n in calls if isinstance(n, ast.Expr)), key=lambda n: -n.lineno):
        start, end, new = source.remove(call)
        text, removed = text[:start] + new.encode() + text[end:], removed + 1
    assert removed >= 10
    file = directory / f"{name}.py"
    file.write_bytes(text)
    spec = importlib.util.spec_from_file_location(f"fluxlike.kernels.untraced_{name}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code(ptx: str) -> str:
    """PTX without what names source files."""
    return re.sub(r"(?m)^\s*(\.loc|//|\.file).*$|//.*$", "", ptx.split(".section")[0])


def to_ptx(monkeypatch, directory) -> None:
    """`compiling.build` comes no further."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(directory / "cache"))
    monkeypatch.setattr(CUDABackend, "make_cubin", lambda self, *rest: b"")
    monkeypatch.setattr(compiling, "_run", lambda tool, *arguments: "REG:0 STACK:0")


def test_averages_are_rounded_once(tmp_path, monkeypatch) -> None:
    """Also over three ranks: div.full, which Triton makes of a division, is off by up to two units in the last place."""
    to_ptx(monkeypatch, tmp_path)
    launches = [launch for case in variants.cases(90) for launch in variants.launches(case, 90)]
    given = [(launch, launch.constants) for launch in launches if "OP" in launch.constants]
    reducing = {one.name: one for one, has in given if has.get("SCATTER", True) and has.get("REDUCE", True)}
    assert len(reducing) >= 6
    for name, launch in reducing.items():
        constants = launch.constants | {"R": 3, "S": 4, "OP": elements.AVG.value}
        kept = {key: value for key, value in constants.items() if key in launch.constants}
        ptx = compiling.build(dataclasses.replace(launch, constants=kept), 90).ptx
        assert re.search(r"div\.(full|approx)", ptx) is None and "div.rn.f32" in ptx, name


@pytest.mark.parametrize("schedule", ("copy_engine", pytest.param("in_kernel", marks=pytest.mark.slow(slow.ALWAYS))))
@pytest.mark.parametrize("op", ("gemm_rs", "ag_gemm"))
def test_without_tracing_the_machine_code_is_as_if_there_were_none(op, schedule, tmp_path, monkeypatch) -> None:
    to_ptx(monkeypatch, tmp_path)
    launch = next(one for one in variants.launches(Case(op, schedule), 90) if "TRACE" in one.constants)
    assert launch.constants["TRACE"] is False
    shipped = compiling.build(launch, 90)
    plain = compiling.build(dataclasses.replace(launch, kernel=vars(untraced(op, tmp_path))[launch.name]), 90)
    assert "bar.sync" in code(shipped.ptx) and code(shipped.ptx) == code(plain.ptx)


@pytest.mark.slow
@pytest.mark.parametrize("capability", variants.CAPABILITIES)
def test_traced_kernels_are_as_good(capability) -> None:
    """The loops keep their pipelines, nothing spills, and what is stored for the trace does not overtake a signal."""
    for op in ("gemm_rs", "ag_gemm"):
        for schedule in ("copy_engine", "in_kernel"):
            case = Case(op, schedule)
            launch = next(one for one in variants.launches(case, capability) if "TRACE" in one.constants)
            traced = compiling.build(dataclasses.replace(launch, constants=launch.constants | {"TRACE": True}), capability)
            assert traced.ptx.count("%globaltimer") > 2 * launch.constants["R"]
            assert variants.lint_built(traced, variants.spec_of(launch, capability)) == [], str(case)

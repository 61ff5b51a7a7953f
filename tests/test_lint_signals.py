"""The lint's rule "plain", in known-bad tiny kernels: words between ranks that are loaded or stored plainly; numbers of calls that
are advanced before all threads have read them; a lint of nothing, and one that a signal ends.
"""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import slow
import triton
import triton.language as tl
from ranks import ROOT

from fluxlike.kernels.lang import cta_barrier, globaltimer
from fluxlike.kernels.sync import BASES, CONSUMED, EPOCH, at_peer, head_of, reset
from fluxlike.kernels.trace import note
from fluxlike.tools import lint
from fluxlike.tools.lint import rules
from fluxlike.tools.lint.compiling import Launch, build
from fluxlike.tools.lint.rules import Spec

SPEC = Spec(payload=("slots",), signals=("flag",), bases=("ctl",), counters=("epochs",))
TYPES = {"epochs": "*i64", "flag": "*i64", "ctl": "*i64", "full": "*i32", "slots": "*bf16", "rank": "i32"}


def findings(kernel, fixed: bool, spec: Spec = SPEC) -> list[rules.Finding]:
    signature = {name: TYPES.get(name, "constexpr") for name in kernel.arg_names}
    aligned = frozenset(name for name, kind in signature.items() if kind[0] == "*")
    constants = {"FIXED": fixed, "R": 2, "TRACE": True}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    return rules.lint_built(build(Launch(kernel, signature, constants, aligned, 4, 1), 90), spec)


@triton.jit
def poll(slots, flag, ctl, rank, FIXED: tl.constexpr):
    """A wait by plain loads."""
    seen = tl.zeros((), tl.int64)
    while seen == 0:
        globaltimer()
        if FIXED:
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        else:
            seen = tl.load(flag)


@triton.jit
def poll_a_credit(slots, flag, ctl, rank, FIXED: tl.constexpr):
    """The same of a word in a head, whose address comes out of the control block."""
    word = head_of(ctl, rank) + CONSUMED + 1
    last = tl.load(ctl + EPOCH)
    seen = tl.zeros((), tl.int64)
    while seen < last:
        globaltimer()
        if FIXED:
            seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
        else:
            seen = tl.load(word)


@triton.jit
def look_at_all(slots, flag, ctl, rank, FIXED: tl.constexpr):
    """All flags at once; who reads words that only this rank writes needs no wait: they are no signals."""
    words = tl.load(flag + tl.arange(0, 32)) if not FIXED else tl.load(ctl + BASES + tl.arange(0, 32))
    tl.store(slots + tl.arange(0, 32), words.to(tl.bfloat16))


@triton.jit
def send(slots, flag, ctl, rank, FIXED: tl.constexpr):
    """A signal to a peer by a plain store."""
    there = at_peer(flag, ctl, rank, 1 - rank)
    if FIXED:
        tl.atomic_xchg(there, 1, sem="release", scope="sys")
    else:
        tl.store(there, 1)


@triton.jit
def give_a_credit(slots, flag, ctl, rank, FIXED: tl.constexpr):
    word = head_of(ctl, 1 - rank) + CONSUMED + rank
    if FIXED:
        tl.atomic_xchg(word, 1, sem="release", scope="sys")
    else:
        tl.store(word, 1)


@pytest.mark.parametrize("kernel", (poll, poll_a_credit, look_at_all, send, give_a_credit), ids=lambda kernel: kernel.fn.__name__)
def test_plain_accesses_to_words_between_ranks(kernel):
    assert findings(kernel, True) == []
    found = findings(kernel, False)
    assert {one.rule for one in found} == {"plain"}
    assert found[0].where.startswith("test_lint_signals.py:")
    assert ("publish_" in found[0].message) == (kernel in (send, give_a_credit)), "what is to be used instead"


@triton.jit
def take_back(full, ctl, FIXED: tl.constexpr, R: tl.constexpr, TRACE: tl.constexpr):
    """What may be stored plainly, by the helpers that may, and by hand."""
    if FIXED:
        reset(full, 0, R)
        note(ctl, 0, 0, globaltimer(), R, TRACE)
    else:
        for word in range(8):
            tl.store(full + word, 0)


def test_the_helpers_that_may_store_plainly():
    spec = Spec(signals=("full",), bases=("ctl",))
    assert findings(take_back, True, spec) == []
    assert {one.rule for one in findings(take_back, False, spec)} == {"plain"}
    assert all(rules.PLAIN.values()), "each with its reason"


def test_each_exception_is_needed(monkeypatch):
    """Without its line in the table the lint finds what a helper does."""
    rules._allowed.cache_clear()
    monkeypatch.setattr(rules, "PLAIN", {})
    try:
        spec = Spec(signals=("full",), bases=("ctl",))
        assert {one.where.split(":")[0] for one in findings(take_back, True, spec)} == {"sync.py", "trace.py"}
    finally:
        monkeypatch.undo()
        rules._allowed.cache_clear()


@triton.jit
def count_calls(epochs, rank, FIXED: tl.constexpr):
    """Only some programs have something to do in which their threads meet."""
    epoch = tl.load(epochs + tl.program_id(0)) + 1
    if rank > 0:
        cta_barrier()
    if FIXED:
        cta_barrier()
    tl.store(epochs + tl.program_id(0) + tl.num_programs(0) * tl.arange(0, 512), tl.zeros((512,), tl.int64) + epoch)


def test_numbers_of_calls_are_advanced_when_all_threads_have_read_them():
    assert findings(count_calls, True) == []
    (found, *rest) = findings(count_calls, False)
    assert {one.rule for one in (found, *rest)} == {"parted"}
    assert found.where.startswith("test_lint_signals.py:") and "overwritten before all have" in found.message


def test_a_lint_of_no_call_fails(capsys):
    assert lint.main(["--case", "gemm_sr"]) == 2
    said = capsys.readouterr().err
    assert "no call has 'gemm_sr' in its name" in said and "gemm_rs-in_kernel, " in said


@pytest.mark.slow
def test_a_lint_of_a_program_without_kernels_fails(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("print('no kernels')\n")
    command = [sys.executable, "-m", "fluxlike", "lint", str(program)]
    for rank, code in (("0", 2), ("1", 0)):
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"RANK": rank}, timeout=200)
        assert done.returncode == code, done
        assert ("launched no kernel of its own" in done.stderr) == (code == 2)


PROGRAM = """import sys, torch, triton, triton.language as tl, fluxlike
from fluxlike.ops.context import Context
from fluxlike.ops.exchange import Compiled
from fluxlike.ops.group import resolve

@triton.jit
def kernel(flag):
    tl.store(flag, 1)

fluxlike.init()
with Context("mine", resolve(None), torch.float32, "in_kernel", flags=16, data=64) as ctx:
    first = torch.zeros(ctx.flags.numel(), dtype=ctx.flags.dtype)
    for flags in ([first] if "warm" in sys.argv else []) + [ctx.flags]:
        with ctx.begin("mine"):
            ctx.launch(kernel, 1, (flags,), {}, Compiled(warps=4))
fluxlike.finalize()
"""


@pytest.mark.parametrize("argument", ([], pytest.param(["warm"], marks=pytest.mark.slow)))
def test_a_launch_on_other_memory_first_hides_nothing(tmp_path, argument):
    """The same code, of which only the heap's signals show what is wrong: they are set by a plain store."""
    (tmp_path / "program.py").write_text(PROGRAM)
    command = ["bash", "scripts/launch.sh", "--nproc", "1", "-m", "fluxlike", "lint", "--sm", "90"]
    command += [str(tmp_path / "program.py"), *argument]
    env = os.environ | {"FLUXLIKE_PYTHON": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=200)
    assert done.returncode == 1 and "[plain]" in done.stdout, done
    assert f"{'2 kernels' if argument else '1 kernel'} compiled, 1 finding\n" in done.stdout


def living(session: int) -> list[str]:
    """The states of processes of a session that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, its = path.read_text().rpartition(")")[2].split()[:4]
            found += [state] if its == str(session) and state not in "ZX" else []
    return found


@pytest.mark.parametrize("number", slow.behind(2, [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL]))
def test_nothing_outlives_a_lint_that_a_signal_ends(number, tmp_path):
    """Neither its processes, though they compile, nor its temporary files, which only a killed one leaves. Ctrl-C all get."""
    killed, typed = number == signal.SIGKILL, number == signal.SIGINT
    command = [sys.executable, "-m", "fluxlike", "lint", "--sm", "90", "--case", "gemm_rs", "--jobs", "2"]
    env = os.environ | {"TMPDIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}  # of which 3.9 warns that it will change
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    default = signal.default_int_handler if typed else signal.SIG_DFL
    as_ever = functools.partial(signal.signal, number, default)  # under nohup these tests ignore one, as all that they start
    as_ever = None if killed else as_ever
    process = subprocess.Popen(command, cwd=ROOT, env=env, text=True, start_new_session=True, preexec_fn=as_ever, **pipes)
    assert process.stdout.readline().startswith("sm_90 ") and len(living(process.pid)) > 2 and list(tmp_path.iterdir())
    os.killpg(process.pid, number) if typed else process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, killed or said) == (-number if killed or typed else 128 + number, killed or "")
    until = time.monotonic() + 20  # of the workers' own: what tracks their semaphores, and a compiler that ends its file
    while living(process.pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not living(process.pid) and (killed or not list(tmp_path.iterdir()))


@pytest.mark.parametrize("arguments", (*(["--sm", given] for given in ("x", "70", "85", "90,81", "110", "")), ["--jobs", "0"]))
def test_wrong_arguments(arguments, capsys):
    """Status 2: 1 would say that something was found."""
    with pytest.raises(SystemExit) as end:
        lint.main([*arguments, "--case", "nothing"])
    assert end.value.code == 2 and f"error: {arguments[0]} " in capsys.readouterr().err


@pytest.mark.parametrize("sm", ("80", "87,100"))
def test_a_case_of_another_architecture(sm, capsys):
    assert lint.main(["--sm", sm, "--case", "gemm_rs-copy_engine-waves"]) == 2
    said = "lint: calls with 'gemm_rs-copy_engine-waves' in their names are compiled for sm_90 only; name one of them with --sm\n"
    assert capsys.readouterr().err == said


def test_architectures_that_a_case_does_not_have_are_named(monkeypatch, capsys):
    """Nobody is to take for looked at what was not; said beside the reports, which may be JSON."""
    report = lint.Report("case", "kernel", 90, 32, 1000, 0, ())
    monkeypatch.setattr(lint, "check_all", lambda *asked: iter([report]))
    for sm, left in (("80,90,100", "sm_80, sm_100"), ("100,90", "sm_100"), ("90", "")):
        assert lint.main(["--sm", sm, "--case", "gemm_rs-copy_engine-waves", "--json"]) == 0
        said = capsys.readouterr()
        line = f"lint: calls with 'gemm_rs-copy_engine-waves' in their names are compiled for sm_90 only; left out: {left}\n"
        assert said.err == (line if left else "") and json.loads(said.out)["reports"]
    assert lint.main(["--sm", "80,90", "--case", "gemm_rs"]) == 0 and not capsys.readouterr().err


def test_the_architectures_that_may_be_named():
    """Triton compiles for each of them, and the rule "shared" has its limit."""

    @triton.jit
    def kernel(x):
        tl.store(x, 1)

    for capability in rules.SHARED:
        built = build(Launch(kernel, {"x": "*i32"}, {}, frozenset(), 1, 1), capability)
        assert not rules.resources(built, Spec()) and f"sm_{capability}" in built.ptx

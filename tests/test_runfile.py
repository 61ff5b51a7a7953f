"""The tools that run a program: it runs as under Python itself, and with what the tool is for switched on."""

import contextlib
import errno
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import ranks

from fluxlike.runtime import raceverdict
from fluxlike.tools import once, racecheck, racecheck_cost, runfile


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Writes a program, beside a module of its own; the interpreter's state and the variable are put back afterwards."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("FLUXLIKE_RACECHECK", "0")
    (tmp_path / "beside_the_program.py").write_text("here = True\n")

    def write(text):
        (tmp_path / "program.py").write_text(text)
        return str(tmp_path / "program.py")

    yield write
    sys.modules.pop("beside_the_program", None)


def test_a_program_sees_what_python_would_show_it(program, capsys):
    file = program("import sys, beside_the_program\nprint(__name__, sys.argv[1:], __file__ == sys.argv[0])\n")
    assert runfile.run(file, ["--calls", "3"]) == 0
    assert capsys.readouterr().out == "__main__ ['--calls', '3'] True\n"


@pytest.mark.parametrize(
    ("end", "status", "said"),
    (("pass", 0, ""), ("raise SystemExit", 0, ""), ("raise SystemExit(3)", 3, ""), ("raise SystemExit('no room')", 1, "no room\n")),
)
def test_the_exit_status_is_the_program_s(program, capsys, end, status, said):
    assert runfile.run(program(end), []) == status
    assert capsys.readouterr().err == said


def test_racecheck_leaves_triton_to_the_program(program):
    """Which may set variables that count when Triton is imported."""
    file = program("import sys\nsys.exit(9 if 'triton' in sys.modules else 3)\n")
    assert subprocess.run([sys.executable, "-m", "fluxlike", "racecheck", file], capture_output=True, timeout=100).returncode == 3


def test_an_exception_is_not_swallowed(program):
    with pytest.raises(ZeroDivisionError):
        runfile.run(program("1 / 0"), [])


@pytest.mark.parametrize("tool", ("racecheck", "lint"))
def test_a_syntax_error_is_shown_as_python_shows_it(program, tool, monkeypatch, capsys):
    file = program("def f(:\n")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as left:
        importlib.import_module(f"fluxlike.tools.{tool}").main([file])
    python = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=100)
    assert left.value.code == python.returncode == 1 and capsys.readouterr().err == python.stderr


def test_a_syntax_error_of_what_a_program_imports_has_its_frames(program, tmp_path):
    (tmp_path / "beside_the_program.py").write_text("def f(:\n")
    with pytest.raises(SyntaxError):
        runfile.run(program("import beside_the_program\n"), [])


@pytest.mark.parametrize(("end", "status"), (("", 1), ("raise SystemExit(3)", 3)))
def test_racecheck_runs_the_program_with_the_race_checker_on(program, capsys, monkeypatch, end, status):
    # other tests check here, too
    for name, value in {"_open": None, "_started": False, "_kernels": False, "_report": "", "_said": False}.items():
        monkeypatch.setattr(raceverdict, name, value)
    file = program(f"import sys\nfrom fluxlike.runtime import env\nprint(env.racecheck(), sys.argv[1:])\n{end}\n")
    assert racecheck.main([file, "--calls", "3"]) == status
    said = capsys.readouterr()
    assert said.out == "True ['--calls', '3']\n" and os.environ["FLUXLIKE_RACECHECK"] == "1"
    assert "nothing was checked: the program never called fluxlike.init" in said.err


#: One rank whose two programs store to one word, or to a word each.
CHECKED = """
import sys
import torch, triton, triton.language as tl
import torch.distributed as dist
import fluxlike
from fluxlike.runtime import interpreter, racecheck
from fluxlike.runtime.errors import RaceError

@triton.jit
def stores(x, APART: tl.constexpr):
    tl.store(x + tl.program_id(0) * APART, 1)

what = sys.argv[1]
if what != "never begun":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    fluxlike.init(heap="shm", heap_bytes=1 << 20)
    words = torch.zeros(2, dtype=torch.int32)
    if what != "nothing":
        racecheck.watch("words", words)
    try:
        interpreter.run(stores, 2, words, APART=int(what != "caught"))
    except RaceError:
        print("caught")
    racecheck.unwatch(words)
    fluxlike.finalize()
    dist.destroy_process_group()
sys.exit(0)
"""

#: What the program does, and how it is started: what it says, "" if it ends with status 0.
ENDS = {
    ("caught", "tool"): "the program went on after a race:\nrace on words of rank 0, bytes 0 to 3\n",
    ("caught", "variable"): "the program went on after a race:\nrace on words of rank 0, bytes 0 to 3\n",
    ("nothing", "variable"): "nothing was checked: no kernel of any rank touched memory that is checked",
    ("never begun", "variable"): "nothing was checked: the program never called fluxlike.init in this process",
    ("clean", "tool"): "",
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """Status and standard error of each, all run beside each other."""
    file = tmp_path_factory.mktemp("checked") / "program.py"
    file.write_text(CHECKED)
    with contextlib.ExitStack() as running:
        started = {}
        for what, how in ENDS:
            tool = ["-m", "fluxlike", "racecheck"] if how == "tool" else []
            environment = {**os.environ, "RANK": "0", "FLUXLIKE_RACECHECK": str(int(how == "variable"))}
            command = [sys.executable, *tool, str(file), what]
            started[what, how] = running.enter_context(
                subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
        said = {key: process.communicate(timeout=600) for key, process in started.items()}
        return {key: (started[key].returncode, out, err) for key, (out, err) in said.items()}


@pytest.mark.parametrize("key", ENDS, ids=", by the ".join)
def test_a_race_that_is_caught_and_a_run_without_checks_are_no_success(ends, key):
    status, out, err = ends[key]
    out = "".join(line for line in out.splitlines(True) if not line.startswith("[Gloo] "))  # of torch 2.10
    assert out == {"caught": "caught\n", "clean": "racecheck: no race found\n"}.get(key[0], "")
    assert status == int(bool(ENDS[key])) and ENDS[key] in err, err
    assert ("fluxlike racecheck: " in err) == bool(ENDS[key])


@pytest.mark.parametrize(("tool", "options"), (("racecheck", []), ("lint", ["--sm", "90"])))
def test_a_program_without_ranks_is_told_so_in_a_line(program, tool, options):
    file = program("import fluxlike\nfluxlike.init()\n")
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    command = [sys.executable, "-m", "fluxlike", tool, *options, file]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(f"{tool}: torch.distributed is not initialised and RANK, ") and " are not set; " in done.stderr


@pytest.mark.parametrize(("nodes", "says"), (("2", "the ranks are on 2 nodes, and"), ("two", "'two' is not a whole number")))
@pytest.mark.parametrize("tool", ("racecheck", "lint"))
def test_a_program_of_several_nodes_is_refused(program, tool, nodes, says, monkeypatch, capsys):
    """Before it begins: its ranks would each end by an exception in the middle of it."""
    monkeypatch.setenv("FLUXLIKE_VIRTUAL_NODES", nodes)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as left:
        importlib.import_module(f"fluxlike.tools.{tool}").main([program("print('runs')")])
    said = capsys.readouterr()
    assert left.value.code == 2 and says in said.err and not said.out


@pytest.mark.parametrize("tool", ("bench gemm_rs", "soak --minutes 0"))
def test_a_tool_without_ranks_says_how_it_is_started(tool):
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    command = [sys.executable, "-m", "fluxlike", *tool.split()]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    name = tool.split()[0]
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert f"{name} runs on all ranks; start it by bash scripts/launch.sh -m fluxlike {name} …" in done.stderr


def test_racecheck_names_a_missing_file(capsys):
    with pytest.raises(SystemExit) as leaving:
        racecheck.main(["no_such.py"])
    assert leaving.value.code == 2 and "there is no file no_such.py" in capsys.readouterr().err


# --cost


def cost_measured(group):
    import fluxlike
    from fluxlike.runtime import racecheck as checker

    fluxlike.init(heap="shm")
    found = racecheck_cost.measure(16), checker.active() is not None
    fluxlike.finalize()
    return found


@pytest.mark.parametrize("checked", ("0", "1"))
def test_what_is_measured_of_the_cost(checked):
    outcomes = ranks.run_fresh(cost_measured, 2, {"FLUXLIKE_RACECHECK": checked})
    assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
    (first, active), second = outcomes[0].value, outcomes[1].value
    assert second == (first, active) and active == (checked == "1"), "the ranks agree on the slower one"
    assert len(first) == len(racecheck_cost.CASES) == 4 and min(first) > 0


def cost_main(*options):
    return racecheck.main(["--cost", "--size", "16", *options])


def test_the_cost_is_the_median_of_rounds_by_turns(monkeypatch, tmp_path, capsys):
    begun = []

    def run(command, env):
        begun.append(env["FLUXLIKE_RACECHECK"])
        number = float(len(begun))
        with open(command[-1], "w") as file:
            json.dump([number, 1.0, 2.0, 4.0], file)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.delenv("RANK", raising=False)
    with monkeypatch.context() as patched:
        patched.setattr(racecheck_cost.topo, "stamp", lambda arguments, tool: {"command": [tool, *arguments]})
        patched.setattr(racecheck_cost, "run", run)
        assert cost_main("--rounds", "3", "--out", str(tmp_path / "new")) == 0
    assert begun == ["0", "1"] * 3
    record = json.loads((tmp_path / "new" / "racecheck-cost.json").read_text())
    first = record["rows"][0]
    assert first == {
        "op": "gemm_rs", "schedule": "in_kernel", "off": 3.0, "on": 4.0, "ratio": 1.33,
        "off_runs": [1.0, 3.0, 5.0], "on_runs": [2.0, 4.0, 6.0],
    }  # fmt: skip
    assert record["environment"]["command"][:2] == ["racecheck", "--cost"] and "M = N = K = 16" in record["what"]
    assert "| ag_gemm, copy_engine | 4.000 | 4.000 | 1.0 |" in capsys.readouterr().out


def test_a_cost_that_cannot_be_written(monkeypatch, tmp_path, capsys):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.delenv("RANK", raising=False)
    with monkeypatch.context() as patched:
        patched.setattr(racecheck_cost.topo, "stamp", lambda arguments, tool: {})
        patched.setattr(racecheck_cost, "launched", lambda size, checked: [1.0] * len(racecheck_cost.CASES))
        patched.setattr(racecheck_cost.topo, "write", full)
        assert cost_main("--rounds", "1", "--out", str(tmp_path)) == 1
    said = "racecheck: the figures could not be written: [Errno 28] No space left on device; name another folder with --out\n"
    assert capsys.readouterr().err == said


def test_the_cost_where_the_ranks_fail(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    failed = subprocess.CompletedProcess([], 3, "", "what went wrong")
    with monkeypatch.context() as patched:
        patched.setattr(racecheck_cost.topo, "stamp", lambda arguments, tool: {})
        patched.setattr(racecheck_cost, "run", lambda *args: failed)
        assert cost_main() == 1
    assert capsys.readouterr().err == "racecheck: the ranks ended with status 3:\nwhat went wrong\n"


LAUNCHER = """
import os, signal, subprocess, sys, time
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
signal.signal(signal.SIGTERM, lambda *_: (rank.terminate(), rank.wait(), sys.exit(1)))
open(sys.argv[1], "w").write(str(rank.pid))
os.rename(sys.argv[1], sys.argv[2])
time.sleep(60)
"""


@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGHUP))
def test_the_ranks_of_the_cost_end_with_it(number, tmp_path):
    """A launcher's stand-in, which ends its rank where it is told to, and not where it is killed."""
    part, pid = tmp_path / "part", tmp_path / "pid"

    def end():
        while not pid.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    ever = signal.signal(number, signal.SIG_DFL)  # under nohup it is ignored, and then not heeded
    killer = threading.Thread(target=end)
    killer.start()
    with pytest.raises(SystemExit) as left, once.ends_what_it_began():
        racecheck_cost.run([sys.executable, "-c", LAUNCHER, str(part), str(pid)], dict(os.environ))
    killer.join()
    assert left.value.code == 128 + number and signal.signal(number, ever) == signal.SIG_DFL
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


@pytest.mark.parametrize(
    ("options", "says"),
    ((["--rounds", "0"], "--rounds 0 is below 1"), (["--size", "3"], "--size 3 is not"), ([], "without scripts/launch.sh")),
)
def test_a_useless_command_line_for_the_cost(options, says, monkeypatch, capsys):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as end:
        cost_main(*options)
    assert end.value.code == 2 and says in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(ranks.TORCHRUN, reason="starts its own ranks")
def test_the_cost_on_ranks_of_its_own(monkeypatch, tmp_path):
    monkeypatch.delenv("RANK", raising=False)
    assert cost_main("--size", "128", "--rounds", "1", "--out", str(tmp_path)) == 0
    record = json.loads((tmp_path / "racecheck-cost.json").read_text())
    assert len(record["rows"]) == 4 and all(row["off"] > 0 and row["on"] > 0 for row in record["rows"])

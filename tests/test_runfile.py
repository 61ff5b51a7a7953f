"""The tools that run a program: it runs as under Python itself, and with what the tool is for switched on."""

import os
import sys

import pytest

from fluxlike.tools import racecheck, runfile


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


def test_an_exception_is_not_swallowed(program):
    with pytest.raises(ZeroDivisionError):
        runfile.run(program("1 / 0"), [])


def test_racecheck_runs_the_program_with_the_race_checker_on(program, capsys):
    file = program("import sys\nfrom fluxlike.runtime import env\nprint(env.racecheck(), sys.argv[1:])\n")
    assert racecheck.main([file, "--calls", "3"]) == 0
    assert capsys.readouterr().out == "True ['--calls', '3']\n" and os.environ["FLUXLIKE_RACECHECK"] == "1"


def test_racecheck_names_a_missing_file(capsys):
    with pytest.raises(SystemExit) as leaving:
        racecheck.main(["no_such.py"])
    assert leaving.value.code == 2 and "there is no file no_such.py" in capsys.readouterr().err

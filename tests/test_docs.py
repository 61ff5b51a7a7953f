"""What the documents name is there: files, headings, records, tests, options of the tools, variables and their defaults."""

import importlib
import re
from functools import cache

import pytest
from ranks import ROOT

from fluxlike.__main__ import TOOLS
from fluxlike.runtime import env, errors

DOCUMENTS = sorted([ROOT / "README.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md")])
PAGES = [path for path in DOCUMENTS if path.parent.name != "measured"]
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


@cache
def sources() -> str:
    """All Python of the repository, and the tables that name records."""
    files = [path for folder in ("fluxlike", "tests", "tutorials") for path in (ROOT / folder).rglob("*.*")]
    return "\n".join(path.read_text() for path in files if path.suffix in (".py", ".json"))


def anchors(path) -> set[str]:
    headings = re.findall(r"^#+ (.*)", FENCED.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_links(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        place = (path.parent / name).resolve() if name else path
        assert place.exists(), target
        assert not anchor or anchor in anchors(place), target


def test_records_are_named():
    """Each by a document or by the code: a record that nobody names is one that nobody can judge."""
    text = "\n".join(path.read_text() for path in DOCUMENTS) + sources()
    patterns = [re.sub(r"\\\*", ".*", re.escape(name)) for name in re.findall(r"`(2026-[\w-]+\*[\w.*-]*)`", text)]
    patterns += [re.sub(r"\\\{\w+\\\}", ".*", re.escape(name)) for name in re.findall(r"measured/(2026-[\w-]*\{[\w{}.-]+)\"", text)]
    names = [path.name for path in (ROOT / "docs" / "measured").iterdir()]
    assert names
    assert [name for name in names if name not in text and not any(re.fullmatch(pattern, name) for pattern in patterns)] == []


def test_tests_are_named_as_they_are():
    for path in PAGES:
        for name in re.findall(r"\btest_\w+\b(?!\.py)", path.read_text()):
            assert f"def {name}(" in sources() or (ROOT / "tests" / f"{name}.py").exists(), f"{path.name}: {name}"


def test_variables():
    """The table of docs/reference.md is that of `env`, with its defaults, but for those that depend on the machine."""
    rows = dict(re.findall(r"^\| `(FLUXLIKE_\w+)` \| ([^|]+) \|", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE))
    assert [name for name in rows if name not in env.ELSEWHERE] == [variable.name for variable in env.TABLE]
    assert [v.name for v in env.TABLE if v.default and rows[v.name] != v.default] == []
    known = set(rows).union(env.ELSEWHERE)
    for path in PAGES:
        assert set(re.findall(r"FLUXLIKE_[A-Z_]*[A-Z]", path.read_text())) <= known, path.name


def options(tool: str, capsys) -> set[str]:
    said = ""
    more = {"tune": (["gemm_rs"], ["from-records"]), "racecheck": (["--cost"],)}
    for arguments in ([], *more.get(tool, ())):
        with pytest.raises(SystemExit):
            importlib.import_module(f"fluxlike.tools.{tool}").main([*arguments, "--help"])
        said += capsys.readouterr().out
    return set(re.findall(r"(?<!\w)--[a-z][a-z-]*", said))


@pytest.mark.parametrize("tool", TOOLS)
def test_commands(tool, capsys):
    """The options of a tool's commands, as the documents have them."""
    pytest.importorskip("rich")
    named = set()
    for path in PAGES:
        for command in re.findall(rf"-m fluxlike {tool}\b([^`\n]*)", path.read_text()):
            if tool in ("racecheck", "lint"):  # what stands behind the program is the program's
                command = command.partition(".py")[0]
            named |= set(re.findall(r"(?<!\w)--[a-z][a-z-]*", command.partition("#")[0]))
    assert named <= options(tool, capsys)


def test_kinds_of_errors():
    """`X (a Y)`, `X is a Y`: in documents and docstrings."""
    kinds = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    text = "\n".join(path.read_text() for path in PAGES) + sources()
    said = re.findall(rf"`?({'|'.join(kinds)})`? (?:\(|is )an? `?(\w+Error)`?", text)
    assert len(said) >= 3
    for name, base in said:
        assert base in [parent.__name__ for parent in kinds[name].__mro__], f"{name} is no {base}"


def test_files_are_named_as_they_are():
    for path in PAGES:
        for name in re.findall(r"(?<![\w/])((?:fluxlike|tests|scripts|tutorials)/[\w./]+\.\w+)", path.read_text()):
            assert (ROOT / name).exists() or name.startswith("fluxlike/ops/tables/"), f"{path.name}: {name}"

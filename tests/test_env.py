"""The table of variables, without init: what each may be, its default, and what is refused. `test_errors` has those of sizes and
seconds, and what init does."""

import os
import re
from pathlib import Path

import pytest

from fluxlike.runtime import env

COUNTS = {"1": 1, "12": 12, "": 1}, ("0", "-1", "1.5", "many", "²")
#: For each variable what reads it, values and what they mean, and values that are refused.
READ = {
    "FLUXLIKE_RACECHECK": (env.racecheck, {"0": False, "1": True, "": False}, ("2", "yes", "01")),
    "FLUXLIKE_TORCH_PRODUCTS": (env.torch_products, {"0": False, "1": True, "": True}, ("2", "no", "-1")),
    "FLUXLIKE_TREE_ARRAY_BOUND": (env.tree_array_bound, {"0": 0, "7": 7, "": 10**7}, ("-1", "1e3", "²")),
    "FLUXLIKE_RANKS_PER_GPU": (env.ranks_per_gpu, *COUNTS),
    "FLUXLIKE_VIRTUAL_NODES": (env.virtual_nodes, *COUNTS),
    "FLUXLIKE_PUTS": (env.puts, {"host": "host", "device": "device", "auto": "auto", "": "auto"}, ("gpu", "Host", "0")),
    "FLUXLIKE_LOG": (env.log_level, {"DEBUG": "DEBUG", "CRITICAL": "CRITICAL", "": None}, ("info", "0", "WARN")),
    "FLUXLIKE_TIMEOUT_S": (env.timeout_s, {"999999": 999999, "1e-3": 1e-3, "": 120}, ("0", "1e6", "-1e-3", "nan")),
    "FLUXLIKE_HEAP_BYTES": (env.heap_bytes, {" 64k\n": 64 << 10, "  ": None, "1": 1, "": None}, ("0", "0G", "4 G", "K", "1T")),
}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No variable but those that a test sets."""
    for name in [name for name in os.environ if name.startswith(env.PREFIX)]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize("name", READ)
def test_what_a_variable_may_be(name, monkeypatch):
    """init looks at each of them, also where nothing of the kind is asked for later."""
    read, good, bad = READ[name]
    for text, value in good.items():
        monkeypatch.setenv(name, text)
        assert read() == value, (name, text)
        env.check()
    for text in bad:
        monkeypatch.setenv(name, text)
        for look in (read, env.check):
            with pytest.raises(ValueError, match=re.escape(f"{name}={text!r} is ")):
                look()
        assert [said.partition("=")[0] for said in env.complaints()] == [name]


def test_the_limit_of_one_who_has_not_set_it(monkeypatch):
    for text in ("3", "soon"):
        monkeypatch.setenv("FLUXLIKE_TIMEOUT_S", text)
        assert env.default_timeout_s() == 120


def test_a_cache_beside_the_program(monkeypatch, tmp_path):
    """It stays where it is if the program goes elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLUXLIKE_CACHE_DIR", "here")
    assert env.cache_dir() == Path(tmp_path) / "here"


def test_only_what_is_in_the_table_can_be_put(monkeypatch):
    monkeypatch.setenv("FLUXLIKE_PUTS", "host")
    env.put("FLUXLIKE_PUTS", "device")
    assert env.puts() == "device"
    with pytest.raises(KeyError):
        env.put("FLUXLIKE_PUTS"[:-1], "device")

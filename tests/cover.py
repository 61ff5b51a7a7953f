"""Line coverage without its price: a tracer looks at each call in Triton's interpreter, which nearly doubles the time of the tests.

The C tracer of Python 3.11 cannot leave a module out. So a rank traces the programs of a kernel in the first launch of each variant
of it (transport, TMA, …) only, and a rank of `ranks.run_fresh` in none unless asked. What a test starts as a program is not
measured at all: tracing makes its imports, most of its time, a fifth longer, and tests of programs up to a half. From Python 3.12
on coverage can use sys.monitoring, which is switched off line by line, and none of this is needed.
"""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

#: How coverage tells the processes that a program starts to measure themselves; they are told by `begin`, or not at all.
_CONFIG = "COVERAGE_PROCESS_CONFIG"
_config = os.environ.pop(_CONFIG, "")

_seen: set[Any] = set()


def is_measured() -> bool:
    """Whether coverage is on in this process."""
    coverage = sys.modules.get("coverage")
    return coverage is not None and coverage.Coverage.current() is not None


def request() -> str:
    """What `begin` needs in another process; empty where nothing is measured."""
    return _config


def begin(config: str, kernels: bool) -> None:
    """Measure this process, first launches of kernels too or not; what it has measured is saved when it ends by os._exit."""
    global _config
    if config:
        import coverage

        os.environ[_CONFIG] = _config = config
        coverage.process_startup()
        del os.environ[_CONFIG]
        quiet(kernels)


def quiet(kernels: bool = True) -> None:
    """From now on kernels run untraced in this process, but for first launches where asked, and Triton compiles so, by lines of its
    own; needs nothing where nobody traces."""
    if not is_measured() or sys.gettrace() is None:
        return
    import triton

    from fluxlike.runtime import programs

    compile_ = triton.compile
    triton.compile = lambda *args, **named: _untraced(lambda: compile_(*args, **named))
    run_grid = programs.run_grid

    def quieter(name: str, body: Callable, dims: tuple) -> None:
        # its choices, not its sizes: those lead to the same lines
        values = getattr(body, "keywords", {})
        variant = (name, values.get("R") == 1, *sorted((k, v) for k, v in values.items() if isinstance(v, bool)))
        run_grid(name, functools.partial(_untraced, body) if variant in _seen or not kernels else body, dims)
        _seen.add(variant)

    programs.run_grid = quieter


def _untraced(body: Callable) -> Any:
    before = sys.gettrace()
    sys.settrace(None)
    try:
        return body()
    finally:
        sys.settrace(before)

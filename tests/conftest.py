"""What all test files share: which tests can run here, the same seed for each, one voice under torchrun."""

import faulthandler
import os
import signal
import sys
import time
from pathlib import Path

import cover
import pytest
import ranks
import slow
import torch

#: Files that need no ranks, or make their own, or a CPU: under torchrun every rank would run the same, so they belong to the other
#: layer.
WITHOUT_TORCHRUN = ("alone", "bench", "choice", "copy_engine", "cost", "direct", "docs", "doctor", "env", "exchange", "init")
WITHOUT_TORCHRUN += ("interpreter", "interpreter_language", "links", "lint", "lint_signals", "model", "mutations", "nodes")
WITHOUT_TORCHRUN += ("nodes_faults", "nodes_network", "offsets", "performance_tables", "ptx", "public_api", "racecheck")
WITHOUT_TORCHRUN += ("racecheck_host", "racecheck_memory", "racecheck_tables", "racecheck_waits", "runfile", "sanitizer_case")
WITHOUT_TORCHRUN += ("scripts", "security", "slow", "soak", "tiles", "topology", "topology_detect", "tune", "tune_ranks")
WITHOUT_TORCHRUN += ("tune_tool", "turns", "validate", "waits")

try:
    from hypothesis import settings
except ImportError:  # the files that need it say so
    pass
else:  # how long one example takes says how busy the machine is
    settings.register_profile("fluxlike", deadline=None)
    settings.load_profile("fluxlike")

#: Seconds that a test may take under torchrun, where the slowest took 87 beside thirteen pytests: waits that are not ours, as
#: NCCL's, have no limit. pytest-timeout could not end them, and need not be there.
LIMIT_S = 240
#: Seconds between a failure on one rank and the end of all, in which others that fail, too, can say so; rank 0 ends sooner.
APART_S = 10
#: Whether a test failed on this rank.
FAILED = pytest.StashKey[bool]()


def pytest_addoption(parser):
    parser.addoption("--shard", metavar="I/N", help="of the tests, every Nth from the Ith on, counted from 0")
    parser.addoption("--behind", metavar="TEST", help="of these, those behind this one")
    parser.addoption("--at", metavar="FILE", help="where rank 0 of torchrun writes which test it is at")


def pytest_ignore_collect(collection_path):
    if ranks.TORCHRUN and collection_path.stem in {f"test_{name}" for name in WITHOUT_TORCHRUN}:
        return True
    return None


@pytest.hookimpl(trylast=True)  # the reporter is registered by then
def pytest_configure(config):
    ranks.STDERR = os.dup(2)  # not captured yet
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell starts what runs in the background: no Ctrl-C would arrive
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if ranks.TORCHRUN_RANK > 0:
        # Ranks mostly pass and fail together, so rank 0 says it for all; of what fails elsewhere, see pytest_runtest_logreport.
        loud = config.pluginmanager.unregister(name="terminalreporter")
        quiet = type(loud)(config, open(os.devnull, "w"))  # noqa: SIM115
        config.pluginmanager.register(quiet, "terminalreporter")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Ends a rank whose test hangs, and says where it stands; torchrun ends the others."""
    if (at := item.config.getoption("--at")) and ranks.TORCHRUN_RANK <= 0:
        Path(at).write_text(item.nodeid)
    if not ranks.TORCHRUN:
        return (yield)
    faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=ranks.STDERR)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_runtest_logreport(report):
    if ranks.TORCHRUN and report.failed:
        # now, and not only at the end: a run on GPUs may be stopped by its limit of time
        said = report.longreprtext[-3000:] if ranks.TORCHRUN_RANK == 0 else report.longreprtext[-300:]
        print(f"\n{report.nodeid} failed on rank {ranks.TORCHRUN_RANK}:\n{said}", file=sys.__stderr__, flush=True)


def pytest_sessionstart(session):
    cover.quiet()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    if session.config.getoption("--behind") and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK  # the last one was the one that failed
    session.config.stash[FAILED] = session.testsfailed > 0


def pytest_unconfigure(config):
    """A rank whose test failed ends here, and torchrun the others, which may have passed, and wait for it in the next test."""
    if ranks.TORCHRUN and config.stash.get(FAILED, False):
        if ranks.TORCHRUN_RANK > 0:
            time.sleep(APART_S)
        sys.stdout.flush()
        os._exit(pytest.ExitCode.TESTS_FAILED)


def turned(items, first, step):
    """The same in a ring, from another place on in each of ``step`` parts; this is the one numbered ``first``.

    So tests that need the same kernels come at different times, and what one part has compiled, the others find in Triton's cache.
    """
    start = len(items) * first // step
    return items[start:] + items[:start]


@pytest.hookimpl(tryfirst=True)  # before -m is looked at
def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.path.stem.startswith("test_faults"):
            item.add_marker("alone")
    others = slow.others(items)
    config.hook.pytest_deselected(items=list(others))
    items[:] = [item for item in items if item not in others]
    if shard := config.getoption("--shard"):
        first, step = map(int, shard.split("/"))
        config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % step != first])
        items[:] = turned(items[first::step], first, step)
    if behind := config.getoption("--behind"):
        number = [item.nodeid for item in items].index(behind) + 1
        config.hook.pytest_deselected(items=items[:number])
        del items[:number]
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="torch sees no CUDA GPU"))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _end_of_ranks(request):
    yield
    ranks.close_pool()
    if not request.session.testsfailed:  # all ranks meet in it
        ranks.close_torchrun()


@pytest.fixture
def two():
    """Two ranks with two programs each, for the tables of the race checker."""
    from race_ranks import Ranks

    ranks = Ranks(2)
    for rank in range(2):
        ranks.launch(rank)
    yield ranks
    ranks.close()

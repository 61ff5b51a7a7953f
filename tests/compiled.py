"""The lint's verdicts on compiled variants, shared by the test files: two processes compile while the tests ask one by one."""

import atexit
import dataclasses
import functools
import multiprocessing
import os
from concurrent.futures import Future, ProcessPoolExecutor

import pytest

from fluxlike.tools.lint import rules, variants
from fluxlike.tools.lint.compiling import Built
from fluxlike.tools.lint.variants import Case, Report

ALL = [(case, capability) for capability in variants.CAPABILITIES for case in variants.cases(capability)]


@functools.cache
def _pool() -> ProcessPoolExecutor:
    pool = ProcessPoolExecutor(min(4, len(os.sched_getaffinity(0))), multiprocessing.get_context("spawn"))
    atexit.register(pool.shutdown, wait=False, cancel_futures=True)
    pool.submit(int)  # starts all of them
    return pool


@functools.cache
def _submitted(case: Case, capability: int) -> Future:
    return _pool().submit(variants.check, case, capability)


def begin(session: pytest.Session) -> None:
    """Compile in the background what the chosen tests are going to ask for, in their order: none waits for what comes later."""
    asked = [item.callspec.params for item in session.items if hasattr(item, "callspec")]
    asked = [params for params in asked if {"case", "capability"} <= params.keys()]
    for params in asked:
        _submitted(params["case"], params["capability"])


def reports(case: Case, capability: int) -> list[Report]:
    """What came of each launch of the case."""
    return _submitted(case, capability).result()


@functools.cache
def built(case: Case, capability: int) -> Built:
    """What the first launch of the case compiled to; by then it is in Triton's cache."""
    reports(case, capability)
    return next(variants.checked(case, capability))[0]


def judge(built: Built, **changes: str) -> list[rules.Finding]:
    """The findings of what was compiled, with some of its text replaced."""
    spec = variants.spec_of(built.launch, built.capability)
    return rules.lint_built(dataclasses.replace(built, **changes), spec)

"""The race checker and the host: what torch does to checked memory, and which meetings of the hosts order it."""

import contextlib
import signal
import threading
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from race_ranks import checked_alone, host_scenes
from ranks import run_fresh
from torch.utils._python_dispatch import TorchDispatchMode

from fluxlike.ops import dispatcher
from fluxlike.runtime import interpreter, programs, racecheck, racehost
from fluxlike.runtime.racereport import READ, STORE


@pytest.fixture
def seen():
    """A watched buffer of 8 times 8 numbers, and what the checker is told of it: (kind, first byte, bytes) of each span."""
    with checked_alone():
        buffer = torch.zeros(8, 8)
        racecheck.watch("buffer", buffer)
        checker: Any = racecheck.active()
        told: list[tuple[int, list[int]]] = []

        def access(addresses, size, kind):
            bytes_ = (addresses[:, None] + range(size)).reshape(-1) - buffer.data_ptr()
            told.append((kind, sorted(set(bytes_.tolist()))))

        checker.access = access
        yield buffer, told


def _bytes(buffer, part):
    """The bytes of a view."""
    numbers = torch.arange(buffer.numel()).view(buffer.shape)[part].reshape(-1)
    return sorted(4 * int(number) + i for number in numbers for i in range(4))


ALL = slice(None)
COLUMN = (ALL, 3)
LIST = ([1, 5],)
MASK = (torch.eye(8, dtype=torch.bool),)

#: What is done to the buffer: the kind of access, and to what.
DONE = {
    "fill_": (lambda t: t.fill_(1), STORE, ALL),
    "copy_": (lambda t: t.copy_(torch.ones(8, 8)), STORE, ALL),
    "add_": (lambda t: t.add_(1), STORE, ALL),
    "out=": (lambda t: torch.mm(torch.ones(8, 2), torch.ones(2, 8), out=t), STORE, ALL),
    "an element": (lambda t: t.__setitem__((2, 3), 1), STORE, (2, 3)),
    "a row": (lambda t: t.__setitem__(3, 1), STORE, 3),
    "a column": (lambda t: t.__setitem__(COLUMN, 1), STORE, COLUMN),
    "rows by numbers": (lambda t: t.__setitem__(LIST, 1), STORE, LIST),
    "a mask": (lambda t: t.__setitem__(MASK, 1), STORE, MASK),
    "masked_fill_": (lambda t: t.masked_fill_(MASK[0], 1), STORE, MASK),
    "index_copy_": (lambda t: t.index_copy_(0, torch.tensor([1, 5]), torch.ones(2, 8)), STORE, LIST),
    "clone": (lambda t: t.clone(), READ, ALL),
    "clone of a column": (lambda t: t[:, 3].clone(), READ, COLUMN),
    "turned": (lambda t: t.T.contiguous(), READ, ALL),
    "expanded": (lambda t: t[3].expand(4, 8).sum(), READ, 3),
    "item": (lambda t: float(t[2, 3]), READ, (2, 3)),
    "operand": (lambda t: torch.ones(8, 8) @ t, READ, ALL),
    "source": (lambda t: torch.zeros(8, 8).copy_(t), READ, ALL),
    "many": (lambda t: torch.cat([torch.ones(8, 8), t]), READ, ALL),
    "by numbers": (lambda t: t[LIST], READ, LIST),
    "by a mask": (lambda t: t[MASK], READ, MASK),
    "index_select": (lambda t: t.index_select(0, torch.tensor([1, 5])), READ, LIST),
    "gather": (lambda t: t.gather(1, torch.full((8, 1), 3)), READ, COLUMN),
    "embedding": (lambda t: torch.nn.functional.embedding(torch.tensor([1, 5]), t), READ, LIST),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", DONE)
def test_what_torch_does_is_seen(seen, name, inference):
    buffer, told = seen
    do, kind, part = DONE[name]
    with torch.inference_mode(inference):
        do(buffer)
    assert told == [(kind, _bytes(buffer, part))]


@pytest.mark.parametrize("inference", [False, True])
def test_what_does_not_touch_memory_is_no_access(seen, inference):
    buffer, told = seen
    with torch.inference_mode(inference):
        for view in (buffer[2:4], buffer.T, buffer.view(-1), buffer.reshape(4, 16), buffer.expand(2, 8, 8), buffer.detach()):
            assert view.untyped_storage().data_ptr() == buffer.data_ptr()
        made = torch.empty_like(buffer), torch.zeros_like(buffer), buffer.new_empty(3), torch.ones(3) + 1
    assert not told and len(made) == 4


def test_the_product_of_autograd_is_seen(seen):
    buffer, told = seen
    x = torch.ones(8, 8, requires_grad=True)
    (x * buffer).sum().backward()
    assert [kind for kind, _ in told] == [READ, READ] and torch.equal(x.grad, buffer)


def test_collectives_of_torch_access_what_they_are_given():
    c10d, kinds = torch.ops.c10d, racehost._kinds
    assert kinds(c10d.allgather_.default) == (("output_tensors", STORE), ("input_tensors", READ))
    assert kinds(c10d.allreduce_.default)[0] == ("tensors", STORE)
    assert kinds(c10d.send.default) == (("tensors", READ),)


class Wrapped(torch.Tensor):
    """As DTensor and its like: what holds the numbers is another tensor."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*[arg.inner if isinstance(arg, Wrapped) else arg for arg in args], **(kwargs or {}))


def test_a_tensor_that_holds_another_is_seen(seen):
    buffer, told = seen
    assert torch.equal(Wrapped(buffer) + 1, buffer.new_ones(8, 8))
    assert told == [(READ, _bytes(buffer, ALL))]


class Plain(torch.Tensor):
    """A subclass that leaves operations as they are."""


@pytest.mark.parametrize("kind", [Plain, torch.nn.Parameter])
def test_a_tensor_of_another_class_is_seen(seen, kind):
    buffer, told = seen
    other = torch.nn.Parameter(buffer, requires_grad=False) if kind is torch.nn.Parameter else buffer.as_subclass(kind)
    assert float(other.detach().sum()) == 0 and float(other.data.sum()) == 0
    assert told == [(READ, _bytes(buffer, ALL))] * 2


def test_what_the_checker_need_not_see(seen):
    buffer, told = seen
    with racecheck.unseen(), racecheck.unseen():
        buffer.fill_(1)
    assert not told
    buffer.fill_(2)
    assert len(told) == 1


class Counting(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_modes_of_others_are_left_as_they_are():
    stack = torch.utils._python_dispatch._get_current_dispatch_mode_stack
    with Counting() as outer:
        checked = contextlib.ExitStack()
        checked.enter_context(checked_alone())
        with Counting() as inner:
            before = outer.calls
            torch.ones(1).add_(1)
            checked.close()
            assert stack() == [outer, inner]
            torch.ones(1).add_(1)
        assert inner.calls == outer.calls - before == 4
        assert stack() == [outer]
    assert stack() == [] and not torch.utils._python_dispatch.is_in_torch_dispatch_mode()


def test_calls_are_no_ops_because_of_the_checker(seen):
    """Within an op, what a call does by torch would not be seen; for another's mode it is one."""
    operands = None, None, torch.ones(2, 2), torch.ones(2, 2), None
    assert torch.utils._python_dispatch.is_in_torch_dispatch_mode() and not dispatcher.by_op(*operands)
    with Counting():
        assert dispatcher.by_op(*operands)


def test_the_end_in_another_thread_leaves_nothing_that_sees():
    with checked_alone():
        buffer = torch.zeros(8)
        racecheck.watch("buffer", buffer)
        checker: Any = racecheck.active()
        end = checker.undo[-1]
        thread = threading.Thread(target=end)
        thread.start()
        thread.join()
        checker.access = None  # would be called
        assert buffer.add_(1).sum() == 8
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []


@triton.jit
def idle_kernel(x):
    tl.load(x)


def test_torch_inside_a_program_is_the_program_s(seen, monkeypatch):
    """A hook of the interpreter, as that of a wait, may use torch; the host does not run then."""
    buffer, told = seen
    monkeypatch.setattr(programs, "before_memory", lambda effect: [buffer.fill_(1)])
    interpreter.run(idle_kernel, 1, buffer)
    assert [kind for kind, _ in told] == [READ]


def test_large_tensors_are_judged_in_parts(monkeypatch):
    monkeypatch.setattr(racecheck, "_PART", 64)
    with checked_alone():
        buffer = torch.zeros(7, 50, dtype=torch.int8)
        racecheck.watch("buffer", buffer)
        checker: Any = racecheck.active()
        touched: list[int] = []
        checker.access = lambda addresses, size, kind: touched.extend(
            int(address) + i - buffer.data_ptr() for address in addresses for i in range(size)
        )
        for part in (buffer, buffer[:, 1:4], buffer[:, ::2], buffer[1:3].T):
            touched.clear()
            part.zero_()
            numbers = torch.arange(350).view(7, 50).as_strided(part.shape, part.stride(), part.storage_offset())
            assert sorted(touched) == sorted(numbers.reshape(-1).tolist())


def test_the_handler_of_a_signal_may_touch_what_is_checked():
    """It runs in the middle of anything, of the checker's own work as well."""
    calls: list[Any] = []

    def interrupted(text):
        if not calls:
            calls.append(text)
            signal.raise_signal(signal.SIGUSR1)
        return site(text)

    with checked_alone():
        word, other = torch.zeros(1, dtype=torch.int64), torch.zeros(1)
        racecheck.watch("word", word)
        racecheck.watch("other", other)
        checker: Any = racecheck.active()
        site, checker.shadow.site = checker.shadow.site, interrupted
        before = signal.signal(signal.SIGUSR1, lambda *_: calls.append(racecheck.host_read(other)))
        try:
            word.fill_(1)
        finally:
            signal.signal(signal.SIGUSR1, before)
    assert calls[1:] == [None] and word.item() == 1


# ranks

SCENES = {
    "fill_, unordered": "second: write by rank 1, the host",
    "item, unordered": "second: read by rank 1, the host",
    **dict.fromkeys(
        ("barrier", "monitored_barrier", "all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor"), ""
    ),
    # which gloo does not wait with
    "all_reduce of nothing": "second: write by rank 1, the host",
    "all_gather of nothing": "second: write by rank 1, the host",
    "async": "second: write by rank 1, the host",
    "sub-group": "",
    "a group of another": "second: write by rank 1, the host",
}


@pytest.fixture(scope="module")
def scenes() -> dict[str, list[str]]:
    """What each scene came to on two ranks."""
    outcomes = run_fresh(host_scenes, 2, {"FLUXLIKE_TIMEOUT_S": "300"}, timeout=500, names=list(SCENES))
    assert all(outcome.ok for outcome in outcomes), [str(outcome) for outcome in outcomes]
    return {name: [outcome.value[name] for outcome in outcomes] for name in SCENES}


@pytest.mark.parametrize("name", SCENES)
def test_hosts_of_ranks(scenes, name):
    said = scenes[name]
    if SCENES[name]:
        assert said[1].startswith("race on words.data of rank 0, bytes 0 to 3\n") and SCENES[name] in said[1], said
        assert said[1].count("the host, _scene, tests/race_ranks.py:") == 2, said
    else:
        assert said == ["", ""]

"""The few words that stock Triton lacks, each with a GPU and an interpreter meaning.

Kernels are plain ``@triton.jit`` functions, compiled for a GPU or walked by Triton's interpreter on a CPU.
Where the two must differ, the branch is taken at compile time with ``if is_interp():``. A builtin gets
``_semantic`` from the compiler and nothing from the interpreter, which is how it knows where it is.
"""

import triton
import triton.language as tl

#: Called by a spinning wait under the interpreter; ops installs it (`set_spin_hook`), kernels only call it.
_spin_hook = None


def set_spin_hook(hook) -> None:
    """Install ``hook(want, seen, what, peer, ctl, spins)``, which yields, sleeps or raises."""
    global _spin_hook
    _spin_hook = hook


def is_interp(_semantic=None):
    """constexpr: True under the interpreter, False when compiled."""
    return tl.constexpr(_semantic is None)


def _number(value) -> int:
    """What a kernel's number is under the interpreter; of a block the largest."""
    if isinstance(value, tl.tensor):
        return int(value.handle.data.reshape(-1).max())
    return int(getattr(value, "value", value))


def spin(want, seen, what, peer, ctl, spins, _semantic=None):
    """One turn of a failed wait under the interpreter. Never reached when compiled."""
    if _spin_hook is not None:
        _spin_hook(*(_number(value) for value in (want, seen, what, peer, ctl, spins)))


#: Told of loads that take more than they use; ops installs it (`set_used_rows_hook`), for the race checker.
_used_rows_hook = None


def set_used_rows_hook(hook) -> None:
    """Install ``hook(rows)``."""
    global _used_rows_hook
    _used_rows_hook = hook


def used_rows(rows, _semantic=None):
    """Of the next descriptor load of this program only the first ``rows`` rows are used. For ``if is_interp():``.

    A descriptor load takes a whole block, at the end of a shard also rows that another rank may be writing. They come to
    nothing, because a row of a product depends on that row only; without this word the race checker would report them.
    """
    if _used_rows_hook is not None:
        _used_rows_hook(int(rows.handle.data.item()))


#: Told what a wait waits for; ops installs it (`set_awaits_hook`), for the race checker.
_awaits_hook = None


def set_awaits_hook(hook) -> None:
    """Install ``hook(address, want)``."""
    global _awaits_hook
    _awaits_hook = hook


def awaits(signal, want, _semantic=None):
    """This program now looks at the word ``signal`` until it is ``want`` or more, and relies on no more. For ``if is_interp():``.

    A later signal may be there already, but need not be: without this word the race checker would take what that one published
    for known, and whether it finds a race would depend on who was early.
    """
    if _awaits_hook is not None:
        _awaits_hook(_number(signal), _number(want))


for _builtin in (is_interp, spin, used_rows, awaits):
    _builtin.__triton_builtin__ = True  # type: ignore[attr-defined]


@triton.jit
def globaltimer():
    """Nanoseconds of the GPU's wall clock. GPU only."""
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def any_thread(condition):
    """1 for all threads of the program if ``condition``, a scalar, is not 0 for one of them, else 0. A barrier. GPU only.

    Each thread computes scalars for itself. Where they come from the clock, or from a word that others write meanwhile, warps may
    differ, and those that then branch differently meet the wrong barriers: the program hangs, or takes one result for another.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $1, 0; bar.red.or.pred p, 0, p; selp.s32 $0, 1, 0, p; }",
        "=r,r", [condition.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def cta_barrier():
    """Barrier of the program's threads, as inline assembly.

    ``tl.debug_barrier()`` in a flattened persistent loop silently turns off software pipelining (seen in Triton 3.6 to
    3.9: three stages become one); the same instruction inside inline assembly does not.
    """
    if not is_interp():
        tl.inline_asm_elementwise("bar.sync 0; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def drain_stores(TMA: tl.constexpr):
    """Every earlier store of this program is complete in memory, and all its threads know it.

    A TMA store that Triton emits has been waited for only with ``wait_group.read`` (its shared memory may be reused,
    nothing is said of the destination), so a signal after it needs ``wait_group 0`` by the issuing thread first. The
    barrier then covers the plain stores of the other threads: a release by one thread orders what the barrier ordered.
    """
    if not is_interp():
        if TMA:
            tl.inline_asm_elementwise(
                "cp.async.bulk.wait_group 0; fence.proxy.async; bar.sync 0; mov.u32 $0, 0;",
                "=r", [], dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        else:
            cta_barrier()


@triton.jit
def tma_acquire(TMA: tl.constexpr):
    """Order TMA loads (async proxy) after an acquire (generic proxy) of data that a peer or the copy engine wrote."""
    if not is_interp():
        if TMA:
            tl.inline_asm_elementwise("fence.proxy.async; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)

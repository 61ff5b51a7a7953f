"""Times of a traced call: what every program did when, written down by the kernels themselves. `ops.trace` reads them.

A kernel with TRACE writes to int64 words [rows, WIDTH + R], whose address is in the control block. A row belongs to a tile, a
program or a task of a push, so each event has a word of its own and is written once a call: programs share no counter. TRACE is
a compile-time constant; without it nothing of this is in the machine code.

Rows of a kernel with P programs and T tiles (those of all R chunks, whether or not they have rows)::

    0 … T-1     tiles, numbered in the order in which they are dealt to the programs
    T … T+P-1   programs
    T+P …       tasks of a push; behind them, where the last wave is shared, P rows of parts: of the one that a program gives to
                that which finishes the tile, where it gives one

Columns; a word that stays 0 did not happen::

    BEGIN     of a program, task or part; of a tile: its first load is about to be issued, which a pipelined loop does before the
              tile in front of it is done
    PLACE     of a tile, task or part: its program + 1 (of a shared tile, that which finishes it); of a program: its
              multiprocessor + 1
    COMPUTED  of a tile or part: its products are done
    STORED    of a tile, task or part: its stores are issued
    SIGNAL    of a tile or task: they are complete, and the word that says so is set; it may say so of earlier ones, too
    WAITS+i   of a tile or part: the signal is there that it waits for as number i = 1 …; it waits from COMPUTED on, or from BEGIN
              if that comes later than the wait (the products need what is waited for)
    CREDITS   of a program: the peers have given their credits
    GO        of a program: it lets the copy engine begin
    ENDING    of a program: its last tile is done; only the end of the call is left
    END       of a program

What it costs: a time is read by all threads and stored by one, some tens of nanoseconds for each event, outside the loop over K.
Times are nanoseconds, of the GPU's ``globaltimer`` or, under the interpreter, of ``time.monotonic_ns``.
"""

import time

import triton
import triton.language as tl

from .lang import globaltimer, is_interp
from .sync import TIMES

BEGIN = tl.constexpr(0)
PLACE = tl.constexpr(1)
COMPUTED = tl.constexpr(2)
STORED = tl.constexpr(3)
SIGNAL = tl.constexpr(4)
WAITS = tl.constexpr(4)
CREDITS = tl.constexpr(2)
GO = tl.constexpr(3)
ENDING = tl.constexpr(4)
END = tl.constexpr(5)
#: A row has so many words and R more.
WIDTH = tl.constexpr(5)


def host_time(_semantic=None):
    """Nanoseconds of the host's clock. Never reached when compiled."""
    return time.monotonic_ns()


host_time.__triton_builtin__ = True  # type: ignore[attr-defined]


@triton.jit
def now():
    """Nanoseconds of the clock that all programs of this rank share."""
    if is_interp():
        return host_time()
    else:
        return globaltimer()


@triton.jit
def multiprocessor():
    """Number of the multiprocessor that runs this program; 0 under the interpreter."""
    if is_interp():
        return 0
    else:
        return tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def note(ctl, row, column, value, R: tl.constexpr, TRACE: tl.constexpr):
    """``value`` into a word of the times; no row is below 0. A mask, which keeps a branch out of the pipelined loops."""
    if TRACE:
        times = tl.load(ctl + TIMES).to(tl.pointer_type(tl.int64))
        tl.store(times + row * (WIDTH + R) + column, value, mask=row >= 0)


@triton.jit
def record(ctl, row, column, R: tl.constexpr, TRACE: tl.constexpr):
    """The event ``column`` of ``row`` is now."""
    if TRACE:
        note(ctl, row, column, now(), R, TRACE)


@triton.jit
def record_begin(ctl, row, place, R: tl.constexpr, TRACE: tl.constexpr):
    """``row`` begins now, at ``place``: the program of a tile or task, the multiprocessor of a program."""
    if TRACE:
        note(ctl, row, PLACE, place + 1, R, TRACE)
        note(ctl, row, BEGIN, now(), R, TRACE)


@triton.jit
def record_program(ctl, row, R: tl.constexpr, TRACE: tl.constexpr):
    """This program begins now."""
    if TRACE:
        record_begin(ctl, row, multiprocessor(), R, TRACE)


@triton.jit
def read_clocks(asked, ROUNDS: tl.constexpr, PATIENCE: tl.constexpr):
    """Answers the host ``ROUNDS`` times: when the word at ``asked`` is i + 1 or more, the time goes to the word i + 1 behind it.

    ``asked``: address of int64 words that host and device see. After PATIENCE nanoseconds without a question it ends. GPU only.
    """
    words = asked.to(tl.pointer_type(tl.int64))
    for i in range(ROUNDS):
        since = globaltimer()
        while (tl.load(words, volatile=True) <= i) & (globaltimer() - since < PATIENCE):
            pass
        tl.store(words + 1 + i, globaltimer())

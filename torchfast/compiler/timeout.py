"""A limit on the time that a call may take, for calls that nobody else can stop.

A compiler can hang: in an endless symbolic rewriting, or waiting for a worker that has died. The
call is interrupted by an exception that is raised in the middle of it, `CallTimeoutError`, which
is no ``Exception``, so that the call's own handlers let it pass. If it is caught all the same, it
comes again each second.

In the main thread a thread of ours sends a signal, which also ends a wait: for a lock, a future, a
process, a sleep. It is one of the real-time signals that nobody uses, for the time of the call
only, so ``SIGALRM`` and its timers stay the program's. In other threads, and where there are no
such signals, the interpreter is asked to raise at the next line of Python, which a wait does not
reach until it is over.

An exception must not come anywhere. C++ that calls Python to look something up (guards, dispatch
rules, weak references, destructors) ends the process if that raises, what the garbage collector
calls raises to nobody, and a ``with`` block that is being entered or left would leave a lock or a
setting behind. So the call is interrupted only where it is in plain Python: in the tracer, in the
code generator, in a wait, in code that is not torch's. Elsewhere it is looked at again shortly
after.

What cannot be stopped: C++ that does not return to Python, such as LLVM inside a Triton compile or
a kernel that hangs in autotuning. The call ends when that returns, and counts as too long.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import math
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar, final

R = TypeVar("R")

_AGAIN_S = 1.0
_SOON_S = 0.02
# After so long nowhere but at places that are not known to be plain, it is raised there too.
_PATIENCE_S = 30.0
_FRAGILE_FUNCTIONS = frozenset(("__enter__", "__exit__", "__del__", "_remove"))
_FRAGILE_FILES = (
    "/torch/_dynamo/guards.py",
    "/torch/_library/",
    "/torch/_ops.py",
    "/weakref.py",
    "/_weakrefset.py",
    "<frozen importlib",
)
_PLAIN_PARTS_OF_TORCH = (
    "/torch/_dynamo/symbolic_convert.py",
    "/torch/_dynamo/variables/",
    "/torch/_inductor/",
    "/torch/fx/",
    "/torch/utils/_sympy/",
)


class CallTimeoutError(BaseException):
    """Raised inside of a call that has taken too long."""


def call_within(seconds: float, function: Callable[..., R], *args: Any) -> R:
    """Call a function and interrupt it after so many seconds.

    Args:
        seconds: The limit; infinity for none.
        function: What is called, in this thread.
        *args: With what.

    Raises:
        CallTimeoutError: The call was interrupted.

    Example:
        >>> call_within(10.0, max, 1, 2)
        2
    """
    if math.isinf(seconds):
        return function(*args)
    if seconds <= 0:
        raise CallTimeoutError
    watch = _Watch(seconds)
    try:
        # Interruptions are a second apart: one that comes between the call and the end of the
        # inner block leaves the outer block time to clean up.
        try:
            return function(*args)
        finally:
            watch.is_over = True
    finally:
        watch.stop()


@final
class _Watch:
    """A thread that interrupts the thread in which it was made.

    Args:
        seconds: When, from now.
    """

    def __init__(self, seconds: float) -> None:
        self.is_over = False
        self._seconds = seconds
        self._end = self._next = time.monotonic() + seconds
        self._wake = threading.Event()
        self._has_raised = False
        self._thread_id = threading.get_ident()
        self._signal = _unused_signal()
        if self._signal is not None:
            signal.signal(self._signal, self._on_signal)
        self._thread = threading.Thread(
            target=self._run, name="torchfast-compile-timeout", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End the thread; no interruption comes after."""
        self.is_over = True
        while self._thread.is_alive():
            try:
                self._wake.set()
                self._thread.join()
            except CallTimeoutError:  # it was on its way
                continue
        if self._signal is None:
            if self._has_raised:
                _settle()
            return
        # Ignoring discards one that is on its way; by default it would end the process.
        signal.signal(self._signal, signal.SIG_IGN)
        signal.signal(self._signal, signal.SIG_DFL)

    def _run(self) -> None:
        wait_s = self._seconds
        while not self._wake.wait(min(wait_s, threading.TIMEOUT_MAX)):
            if self.is_over:
                return
            if self._signal is not None:
                # The handler decides, by the frame in which it finds the thread.
                signal.pthread_kill(self._thread_id, self._signal)
                wait_s = _SOON_S
            elif self._may_raise(sys._current_frames().get(self._thread_id)):
                self._has_raised = True
                _raise_in(self._thread_id)
                wait_s = _AGAIN_S
            else:
                wait_s = _SOON_S

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if not self.is_over and time.monotonic() >= self._next and self._may_raise(frame):
            self._next = time.monotonic() + _AGAIN_S
            raise CallTimeoutError

    def _may_raise(self, frame: FrameType | None) -> bool:
        """Whether an exception in a frame does no harm, or less than to wait on."""
        if frame is None or not (self._is_plain(frame) or self._is_impatient()):
            return False
        collecting = [*map(_code_of, gc.callbacks)]
        while frame is not None and frame.f_code is not call_within.__code__:
            code = frame.f_code
            if code.co_name in _FRAGILE_FUNCTIONS or code in collecting:
                return False
            if any(part in code.co_filename for part in _FRAGILE_FILES):
                return False
            frame = frame.f_back
        return True

    @staticmethod
    def _is_plain(frame: FrameType) -> bool:
        file = frame.f_code.co_filename
        return "/torch/" not in file or any(part in file for part in _PLAIN_PARTS_OF_TORCH)

    def _is_impatient(self) -> bool:
        return time.monotonic() > self._end + _PATIENCE_S


def _code_of(function: Any) -> CodeType | None:
    """Return what runs where something is called; None if it is not Python."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None)
    if code is None and callable(function):
        code = getattr(type(function).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None


def _unused_signal() -> signal.Signals | int | None:
    """Return a real-time signal that nobody handles; None outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return None
    first, last = getattr(signal, "SIGRTMIN", None), getattr(signal, "SIGRTMAX", None)
    if first is None or last is None:
        return None
    numbers = range(int(first), int(last) + 1)
    return next((n for n in numbers if signal.getsignal(n) is signal.SIG_DFL), None)


def _raise_in(thread_id: int) -> None:
    """Have a thread raise at its next line of Python; what it was to raise before is replaced."""
    error = ctypes.py_object(CallTimeoutError)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), error)


def _settle() -> None:
    """Catch what this thread was told to raise and may not have raised yet.

    It could be taken back, but Python 3.11 then looks for it for ever after: each call takes a
    little longer, and under a profiler (`sys.setprofile`, cProfile) none ever begins.
    """
    try:
        _raise_in(threading.get_ident())
        while True:  # it comes at the next turn at the latest
            time.sleep(0)
    except CallTimeoutError:
        pass

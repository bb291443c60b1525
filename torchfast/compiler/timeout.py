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

What cannot be stopped: C++ that does not return to Python, such as LLVM inside a Triton compile or
a kernel that hangs in autotuning. The call ends when that returns, and counts as too long.
"""

from __future__ import annotations

import ctypes
import math
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar, final

R = TypeVar("R")

_AGAIN_S = 1.0


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
        self._wake = threading.Event()
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
            _raise_in(self._thread_id, None)
            return
        # Ignoring discards one that is on its way; by default it would end the process.
        signal.signal(self._signal, signal.SIG_IGN)
        signal.signal(self._signal, signal.SIG_DFL)

    def _run(self) -> None:
        wait_s = self._seconds
        while not self._wake.wait(min(wait_s, threading.TIMEOUT_MAX)):
            wait_s = _AGAIN_S
            if self.is_over:
                return
            if self._signal is not None:
                signal.pthread_kill(self._thread_id, self._signal)
            else:
                _raise_in(self._thread_id, CallTimeoutError)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if not self.is_over:
            raise CallTimeoutError


def _unused_signal() -> signal.Signals | int | None:
    """Return a real-time signal that nobody handles; None outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return None
    first, last = getattr(signal, "SIGRTMIN", None), getattr(signal, "SIGRTMAX", None)
    if first is None or last is None:
        return None
    numbers = range(int(first), int(last) + 1)
    return next((n for n in numbers if signal.getsignal(n) is signal.SIG_DFL), None)


def _raise_in(thread_id: int, error: type[BaseException] | None) -> None:
    """Have an exception raised in a thread at its next line of Python; None takes it back."""
    value = ctypes.py_object(error) if error is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), value)

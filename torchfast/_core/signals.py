"""Ending a loop between two steps when a signal asks for it."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, final

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# What a cluster's scheduler sends some time before it ends a job; Windows has none.
_WARNING = getattr(signal, "SIGUSR1", None)


@final
class StopSignals:
    """Notes SIGINT and SIGTERM while it is entered; the loop polls `received`.

    A second signal does at once what it would have done without us: the old handlers are put
    back and the signal is sent again. Outside the main thread, where Python allows no handlers,
    nothing is installed.

    Args:
        with_usr1: Note SIGUSR1 too, unless the program has a handler of its own for it.
    """

    def __init__(self, *, with_usr1: bool = False) -> None:
        self._numbers = list(_SIGNALS)
        if with_usr1 and _WARNING and signal.getsignal(_WARNING) is signal.SIG_DFL:
            self._numbers.append(_WARNING)
        self._pid = os.getpid()
        self.received: str | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                # What the process was started to ignore, as a background job is, stays ignored.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if os.getpid() != self._pid:
            # A process that was forked meanwhile, which whoever forked it means to end. A
            # terminal's Ctrl-C reaches it too, and is its parent's to act on.
            if number != signal.SIGINT:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        name = signal.Signals(number).name
        # Schedulers warn first and terminate later: that is not asking twice. Where both come at
        # once, two threads may take them in the other order.
        if self.received is not None and {self.received, name} != {"SIGUSR1", "SIGTERM"}:
            self._restore()
            os.kill(os.getpid(), number)
            return
        self.received = "SIGTERM" if self.received == "SIGTERM" else name

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            # None stands for a handler that was not installed from Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}

"""The lines that the user's code is at, added to a trace.

torch.profiler notes calls with ``with_stack=True``, but those of all code and of every thread, for
which it takes on the state of one thread after another when it begins; which line made a call is
only in a tree of events that torch does not document, and what is no call (``tokens[mask]``,
``a @ b``) has no line at all. Here Python's own hook for debuggers notes the lines of one thread,
the one that makes the steps, and only within the user's code. They are written into the trace as
events of their own: any viewer shows them, and `torchfast` reads them back to say which line made
the host wait.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, TypeAlias, final

from torchfast.profiling.added_events import add_events
from torchfast.profiling.places import is_users
from torchfast.profiling.trace import LINE

TraceFunction: TypeAlias = Callable[[FrameType, str, Any], Any]

# A loop in Python over numbers could fill any file, and leave no room for the lines that wait.
_MOST: Final = 300_000
_MOST_OF_A_FUNCTION: Final = 20_000


@final
class UserLines:
    """Which line of the user's code this thread is at, from when to when.

    It stands where `sys.settrace` has one place, so a debugger that is there already is left
    alone, and nothing is noted. Times are those of the clock of the system, as in the trace. A line
    that was begun before is not noted: all that is seen happens in it.

    Attributes:
        left_out: The functions, by file and first line, of which some lines are not noted since
            there are very many.
        is_full: Whether there was no room for more, so that later ones are missing.
    """

    def __init__(self) -> None:
        self.left_out: list[str] = []
        self.is_full = False
        self._noted: list[tuple[str, int, int, int]] = []  # file, line, begin and end in ns
        self._open: dict[FrameType, tuple[str, int, int]] = {}  # file, line and begin
        self._entered: list[FrameType] = []  # that ran already at the start
        self._begun: FrameType | None = None  # the last that began, until it is at a line
        self._files: dict[CodeType, str | None] = {}
        self._counts: Counter[CodeType] = Counter()
        self._left: list[FrameType] = []  # of functions that have too many lines
        self._prefixes = _prefixes()
        self._is_on = False
        self._thread = threading.get_native_id()
        self._process = os.getpid()

    def start(self) -> bool:
        """Begin; return whether there was room for it."""
        if sys.gettrace() is not None:
            return False
        self._is_on = True
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if self._file_of(frame.f_code) is not None and frame.f_trace is None:
                frame.f_trace = self._note
                self._entered.append(frame)
            frame = frame.f_back
        sys.settrace(self._enter)
        return True

    def stop(self) -> None:
        """End; a line that is not over by now is not noted."""
        if not self._is_on:
            return
        self._is_on = False
        # Where another thread ends it, or a debugger took the place, the hook ends by itself.
        if sys.gettrace() == self._enter:
            sys.settrace(None)
        for frame in self._entered:
            if frame.f_trace == self._note:
                frame.f_trace = None
        for frame in self._left:
            frame.f_trace_lines = True
        self._entered.clear()
        self._left.clear()
        self._open.clear()

    def write_into(self, path: Path) -> int:
        """Write the lines into the trace of the same steps, in place and not compressed.

        Returns:
            How many were written; 0 if the trace does not end as a trace does.
        """
        return add_events(path, lambda base: (self._event(*noted, base) for noted in self._noted))

    def _event(self, file: str, line: int, begin: int, end: int, base: int) -> dict[str, Any]:
        return {
            "ph": "X",
            "cat": LINE,
            "name": f"{file}:{line}",
            "pid": self._process,
            "tid": self._thread,
            "ts": (begin - base) / 1e3,
            "dur": (end - begin) / 1e3,
        }

    def _enter(self, frame: FrameType, event: str, _: object) -> TraceFunction | None:
        """Look at a frame that begins, of whosever code; lines are told of the user's only."""
        if self._file_of(frame.f_code) is not None:
            return self._note(frame, event, None)
        if not self._is_on:
            sys.settrace(None)
        return None

    def _note(self, frame: FrameType, event: str, _: object) -> TraceFunction | None:
        """Note that a frame goes to another line, or ends."""
        now = time.time_ns()
        if not self._is_on:
            sys.settrace(None)
            return None
        if event == "exception":  # what handles it has a line, or the frame ends
            return self._note
        was = self._open.pop(frame, None)
        # A frame begins at its `def`, and a generator goes on where it stands: then a line follows.
        if was is not None and not (frame is self._begun and event == "line"):
            self._noted.append((*was, now))
            if len(self._noted) >= _MOST:
                self._end_full(now)
                return None
            self._counts[frame.f_code] += 1
            if self._counts[frame.f_code] >= _MOST_OF_A_FUNCTION:
                self._leave_out(frame)
        self._begun = frame if event == "call" else None
        if event != "return" and (file := self._file_of(frame.f_code)) is not None:
            self._open[frame] = (file, frame.f_lineno, time.time_ns())
        return self._note

    def _end_full(self, now: int) -> None:
        """Note no more lines at all.

        Those that are open end here: the long one that all others ran in is what is looked for.
        """
        self.is_full = True
        self._noted += [(*opened, now) for opened in self._open.values()]
        self.stop()

    def _leave_out(self, frame: FrameType) -> None:
        """Note no more lines of a function that has very many: its caller's stands for them."""
        code = frame.f_code
        if (file := self._files[code]) is not None:
            self.left_out.append(f"{file}:{code.co_firstlineno}")
        self._files[code] = None
        frame.f_trace_lines = False  # or this would be called at each, which takes its time
        self._left.append(frame)

    def _file_of(self, code: CodeType) -> str | None:
        """Return the file of the user's code as traces name it; None for that of a library."""
        try:
            return self._files[code]
        except KeyError:
            # A worker that was forked in these steps runs code that was not seen before.
            self._is_on = self._is_on and os.getpid() == self._process
            file = code.co_filename
            for prefix in self._prefixes:
                if file.startswith(prefix):
                    file = file[len(prefix) :]
                    break
            self._files[code] = found = file if is_users(file) else None
            return found


def _prefixes() -> list[str]:
    """Return what torch.profiler leaves out at the beginning of a file's name, longest first."""
    folders = {path if path.endswith(os.sep) else path + os.sep for path in sys.path if path}
    return sorted(folders, key=len, reverse=True)

"""The lines of the user's own calls, added to a trace.

torch.profiler notes calls with ``with_stack=True``, but those of all code and of every thread, for
which it takes on the state of one thread after another when it begins; which line made a call is
only in a tree of events that torch does not document. Here Python's own hook notes the calls of one
thread, the one that makes the steps, and of these only what the user's code calls. The lines are
written into the trace as events of their own: any viewer shows them, and `torchfast` reads them
back to say which line made the host wait.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, final

from torchfast.profiling.places import is_users
from torchfast.profiling.trace import LINE
from torchfast.profiling.trace_file import TraceFile

logger = logging.getLogger(__name__)

# A loop in Python that makes a call for each number could fill any file.
_MOST: Final = 300_000
# What follows the events: the name of the trace, which may be a long path, and the clock.
_TAIL: Final = 1 << 16


@final
class CallLines:
    """What the user's code calls on this thread: from which line, and from when to when.

    It stands where `sys.setprofile` has one place, so a profiler that is there already is left
    alone, and nothing is noted. Times are those of the clock of the system, as in the trace.
    """

    def __init__(self) -> None:
        self._noted: list[tuple[str, int, int, int]] = []  # file, line, begin and end in ns
        # The calls that have not returned; without a file where the caller is not the user's.
        self._open: list[tuple[str | None, int, int]] = []
        self._files: dict[CodeType, str | None] = {}
        self._prefixes = _prefixes()
        self._is_on = False
        self._thread = threading.get_native_id()
        self._process = os.getpid()

    def start(self) -> bool:
        """Begin; return whether there was room for it."""
        if sys.getprofile() is not None:
            return False
        self._is_on = True
        sys.setprofile(self._note)
        return True

    def stop(self) -> None:
        """End; a call that has not returned by now is not noted."""
        if not self._is_on:
            return
        self._is_on = False
        # Where another thread ends it, or another profiler took the place, the hook ends by itself.
        if sys.getprofile() == self._note:
            sys.setprofile(None)

    def write_into(self, path: Path) -> int:
        """Write the lines into the trace of the same steps, in place and not compressed.

        Returns:
            How many were written; 0 if the trace does not end as a trace does.
        """
        file = TraceFile(path)
        next(file.events(), None)
        base = int(file.header.get("baseTimeNanoseconds", 0))
        if not self._noted:
            return 0
        with path.open("r+b") as stream:
            size = stream.seek(0, os.SEEK_END)
            begin = max(0, size - _TAIL)
            stream.seek(begin)
            tail = stream.read()
            at = _end_of_events(tail)
            if at < 0:
                logger.debug("%s does not end as a trace does; no lines are added", path)
                return 0
            stream.seek(begin + at)
            for noted in self._noted:
                stream.write(b",\n" + json.dumps(self._event(*noted, base)).encode())
            stream.write(b"\n" + tail[at:])
            stream.truncate()
        return len(self._noted)

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

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        """Note a call or its end; this runs at each of either, of whosever code."""
        if not self._is_on:
            sys.setprofile(None)
            return
        if event == "call" or event == "c_call":
            caller = frame if event == "c_call" else frame.f_back
            file = None if caller is None else self._file_of(caller.f_code)
            if file is None or caller is None:
                self._open.append((None, 0, 0))
            else:
                self._open.append((file, caller.f_lineno, time.time_ns()))
            return
        # What was called before the start returns as well, and only when nothing else is open.
        if not self._open:
            return
        file, line, begin = self._open.pop()
        if file is None:
            return
        self._noted.append((file, line, begin, time.time_ns()))
        if len(self._noted) >= _MOST:
            self._is_on = False
            sys.setprofile(None)

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


def _end_of_events(tail: bytes) -> int:
    """Return where the list of events ends; -1 if that is not found.

    It is the first bracket after which there is the rest of one object and nothing else. A bracket
    within an event is followed by more than that, one within a name of a file by less.
    """
    at = tail.find(b"]")
    while at >= 0:
        try:
            following = json.loads(b'{"":0' + tail[at + 1 :])
        except (ValueError, RecursionError):
            following = None
        # A short file is all tail, and has other lists before the events.
        if following is not None and "traceEvents" not in following:
            return at
        at = tail.find(b"]", at + 1)
    return -1

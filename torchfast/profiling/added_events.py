"""Events of one's own, added to a trace that torch.profiler has written."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from torchfast.profiling.trace_file import TraceFile

logger = logging.getLogger(__name__)

# What follows the events: the name of the trace, which may be a long path, and the clock.
_TAIL: Final = 1 << 16


def add_events(path: Path, make: Callable[[int], Iterable[dict[str, Any]]]) -> int:
    """Add events to the end of a trace, in place and not compressed.

    Args:
        path: The trace.
        make: Returns the events; it is given the moment from which the trace counts, in
            nanoseconds of the clock of the system.

    Returns:
        How many were written; 0 if the trace does not end as a trace does.
    """
    file = TraceFile(path)
    next(file.events(), None)
    number = 0
    with path.open("r+b") as stream:
        size = stream.seek(0, os.SEEK_END)
        begin = max(0, size - _TAIL)
        stream.seek(begin)
        tail = stream.read()
        at = _end_of_events(tail)
        if at < 0:
            logger.debug("%s does not end as a trace does; no events are added", path)
            return 0
        stream.seek(begin + at)
        for event in make(int(file.header.get("baseTimeNanoseconds", 0))):
            stream.write(b",\n" + json.dumps(event).encode())
            number += 1
        stream.write(b"\n" + tail[at:])
        stream.truncate()
    return number


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

"""The lines of the user's own calls, added to a trace.

torch.profiler with ``with_stack=True`` writes a frame for each call of a Python function, named by
where the function is defined. Which line of the caller made the call it knows too, and keeps it in
its tree of events, but does not write it. Here those lines are taken from the tree, for calls made
by the user's code alone, and written into the file as events of their own. Any viewer shows them;
`torchfast` reads them back to say which line made the host wait.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from torchfast.profiling.places import is_users
from torchfast.profiling.trace import LINE, STEP
from torchfast.profiling.trace_file import TraceFile

logger = logging.getLogger(__name__)

# A loop in Python that makes a call for each number could fill any file.
_MOST: Final = 300_000
# What follows the events: the name of the trace, which may be a long path, and the clock.
_TAIL: Final = 1 << 16


def add_lines(path: Path, tree: list[Any]) -> int:
    """Write the lines of a tree of events into the trace that was exported of it.

    Args:
        path: The trace, not compressed; it is changed in place.
        tree: What ``kineto_results.experimental_event_tree()`` returns.

    Returns:
        How many were written; 0 if the trace does not say when its clock began.
    """
    file = TraceFile(path)
    next(file.events(), None)
    base = file.header.get("baseTimeNanoseconds", 0)
    lines = list(_lines_of(tree, int(base)))
    if not lines:
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
        for line in lines:
            stream.write(b",\n" + json.dumps(line).encode())
        stream.write(b"\n" + tail[at:])
        stream.truncate()
    return len(lines)


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


def _lines_of(tree: list[Any], base: int) -> Iterator[dict[str, Any]]:
    main = _main_thread(tree)
    process, thread = os.getpid(), threading.get_native_id()
    number = 0
    waiting = list(tree)
    while waiting and number < _MOST:
        event = waiting.pop()
        waiting.extend(event.children)
        caller = getattr(event.extra_fields, "caller", None)
        # Threads of the user's own have numbers here that the trace does not use.
        if caller is None or event.start_tid != main or not is_users(caller.file_name):
            continue
        if event.end_time_ns <= event.start_time_ns:
            continue
        number += 1
        yield {
            "ph": "X",
            "cat": LINE,
            "name": f"{caller.file_name}:{caller.line_number}",
            "pid": process,
            "tid": thread,
            "ts": (event.start_time_ns - base) / 1e3,
            "dur": (event.end_time_ns - event.start_time_ns) / 1e3,
        }


def _main_thread(tree: list[Any]) -> int:
    """Return the number of the thread that makes the steps."""
    waiting, first = list(tree), -1
    while waiting:
        event = waiting.pop()
        if STEP.match(event.name):
            return int(event.start_tid)
        first = event.start_tid if first < 0 else first
        waiting.extend(event.children)
    return int(first)

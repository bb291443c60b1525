"""Whether this is the process in which something began, without asking the system each time.

A thread does not come along into a fork, so what relies on one has to know. ``os.getpid()`` would
tell, but it is a call of the system, which takes long where those are watched (in a sandbox). So
Python tells the fork, once, before anything else runs there.
"""

from __future__ import annotations

import functools
import os
from typing import final


@final
class Process:
    """A process.

    Attributes:
        pid: Its number.
        is_here: Whether it is the one that runs this; False in what was forked from it.
    """

    __slots__ = ("is_here", "pid")

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.is_here = True

    def leave(self) -> None:
        """Note that this runs in a fork."""
        self.is_here = False
        this_process.cache_clear()


@functools.cache  # what is registered stays so for the life of a process
def this_process() -> Process:
    """Return the process that runs this."""
    process = Process()
    if hasattr(os, "register_at_fork"):  # elsewhere nothing forks
        os.register_at_fork(after_in_child=process.leave)
    return process

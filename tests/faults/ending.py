"""Ends this process with a real SIGKILL at one of its system calls."""

from __future__ import annotations

import fcntl
import itertools
import os
import signal

# Everything through which a save changes a disk, or waits for one.
CALLS = (
    (os, "open"),
    (os, "write"),
    (os, "fsync"),
    (os, "mkdir"),
    (os, "rename"),
    (os, "replace"),
    (os, "unlink"),
    (os, "rmdir"),
    (os, "close"),
    (fcntl, "flock"),
)


def die_at(number):
    """End the process before call ``number``, which is after the one before it.

    In the middle of it, if it is a write: half of the bytes are there.
    """
    counter = itertools.count()  # its next() is one step for all threads

    def wrapped(original, name):
        def call(*args, **kwargs):
            if next(counter) == number:
                if name == "write":
                    descriptor, data = args
                    original(descriptor, memoryview(data)[: len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return call

    for module, name in CALLS:
        setattr(module, name, wrapped(getattr(module, name), name))

"""Turns of processes that measure on one machine: work beside others, timings alone.

A file is locked, shared by whoever works and by one process alone while it times. The system gives
a lock back when its process ends, however it ends.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


class Turns:
    """A process's turns.

    Args:
        path: The file of all processes of a run; it is made if it is not there.
        tell: Called with True before the process has to wait for others, with False afterwards.
    """

    def __init__(self, path: Path, tell: Callable[[bool], None] = lambda _: None) -> None:
        self._path = path
        self._tell = tell

    @contextmanager
    def beside_others(self) -> Iterator[None]:
        """Hold the lock with others, so that nobody times meanwhile."""
        with self._held(fcntl.LOCK_SH):
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the lock alone, so that nobody works meanwhile."""
        with self._held(fcntl.LOCK_EX):
            yield

    @contextmanager
    def _held(self, kind: int) -> Iterator[None]:
        with self._path.open("a") as file:
            self._lock(file, kind)
            yield  # closing the file gives the lock back

    def _lock(self, file: IO[str], kind: int) -> None:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            self._tell(True)
            fcntl.flock(file, kind)
            self._tell(False)

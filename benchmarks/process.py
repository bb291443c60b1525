"""A method in a process of its own, seen from the process that gives it its turns."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import time
from typing import Any

from benchmarks import worker
from benchmarks.worker import Order

# From <sys/personality.h>.
ADDR_NO_RANDOMIZE = 0x0040000


def steady_layout() -> None:
    """Let the processes to come lay out their memory and hash strings alike, each time.

    Python code runs some per cent faster or slower by where its objects happen to lie.
    """
    os.environ["PYTHONHASHSEED"] = "0"
    if sys.platform == "linux":
        ctypes.CDLL(None).personality(ADDR_NO_RANDOMIZE)  # some containers refuse: no harm


class MethodFailed(Exception):  # noqa: N818 - a result, not an error of the harness
    """Why a method gave no figures."""


class Process:
    """Runs one method; answers come in the order of requests.

    Args:
        order: What it runs.
    """

    def __init__(self, order: Order) -> None:
        self.method = order.method
        self.alive = True
        # Not a fork: libraries that have looked at CUDA do not survive one, and compilers in a fork
        # are not what a user has.
        context = multiprocessing.get_context("spawn")
        self._pipe, far_end = context.Pipe()
        self._process = context.Process(target=worker.run, args=(order, far_end))
        self._process.start()
        far_end.close()

    def send(self, request: object) -> None:
        """Send a request and go on."""
        with contextlib.suppress(BrokenPipeError):  # the other end says why, when it is read
            self._pipe.send(request)

    def answer(self, limit_s: float, asked_at: float | None = None) -> dict[str, Any]:
        """Return the answer to a request that was sent now, or at a time of `time.monotonic`.

        Raises:
            MethodFailed: The method raised, its process died, or the time is over.
        """
        waited_s = 0.0 if asked_at is None else time.monotonic() - asked_at
        if not self._pipe.poll(max(limit_s - waited_s, 0.0)):
            raise MethodFailed(f"not done in {limit_s:.0f} s")
        try:
            answer: dict[str, Any] = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(5)
            raise MethodFailed(f"its process ended with {self._process.exitcode}") from None
        if "failed" in answer:
            raise MethodFailed(answer["failed"])
        return answer

    def stop(self) -> None:
        """End the process, with the compilers and loaders that it has started."""
        if not self.alive:
            return
        self.alive = False
        # The worker leads a group of its own once it runs; the group may have outlived it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._pipe.close()

"""One piece of work on a thread that is never lost: neither its end nor its error.

The thread is no daemon, so the interpreter, before it exits, waits for it. An error is kept until
somebody asks. If nobody has by the time the owner is gone or the interpreter exits, it is logged:
the run may have ended well in every other respect, and its last checkpoint is not there.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import final

logger = logging.getLogger(__name__)


@final
class Background:
    """Runs one callable at a time beside the caller.

    Args:
        what: What it does, for the message about an error that nobody asked for.
    """

    def __init__(self, what: str) -> None:
        self._thread: threading.Thread | None = None
        self._outcome = _Outcome()
        self._report = weakref.finalize(self, _report, self._outcome, what, os.getpid())

    @property
    def has_failed(self) -> bool:
        """Whether an error waits to be raised."""
        return self._outcome.error is not None

    def start(self, work: Callable[[], None]) -> None:
        """Start ``work``; the work before it must have been waited for."""
        outcome = self._outcome

        def run() -> None:
            try:
                work()
            except BaseException as error:
                outcome.error = error

        self._thread = threading.Thread(target=run, name="torchfast-checkpoint", daemon=False)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the end, and raise what the work raised, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._outcome.error = self._outcome.error, None
        if error is not None:
            raise error


@final
class _Outcome:
    def __init__(self) -> None:
        self.error: BaseException | None = None


def _report(outcome: _Outcome, what: str, pid: int) -> None:
    # A forked child has a copy of this, and nothing to say.
    if outcome.error is not None and os.getpid() == pid:
        logger.error("%s failed, and nothing waited for it: %s", what, outcome.error)

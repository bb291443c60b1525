"""Whether the host looks once more behind a launch, found out by the loop's own time.

A glance at a model of many parameters and modules reads a megabyte here and there, and the launch
of its graph drives that from the processor's caches. Read from memory it takes three times as long,
and where a loop waits for the device in each step, to read its loss, the device waits for the
glance. A look behind the launch, while the device is at work, has the next one find all in the
caches. What it sees counts for nothing.

In a loop that does not wait, such a look is the host's time and gains nothing. Which kind a loop is
cannot be seen from within a step: the device is through before the next launch in either, where the
host sets the pace. So blocks of steps with and without the look take turns, each timed from launch
to launch with all that the loop does in between. It is kept while it pays.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, final

# Steps of a block, pairs of blocks, and of how many of them the look has to win.
BLOCK: Final = 8
PAIRS: Final = 5
_WON: Final = 4
# So many steps it stays as it was found before it is found out anew, twice as many each time.
KEPT: Final = 2_000
_MOST_KEPT: Final = 64_000


@final
class LookAhead:
    """Says behind each launch whether to look once more.

    Args:
        clock: Seconds.

    Attributes:
        pays: What was found out the last time; None before.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.pays: bool | None = None
        self._kept = KEPT
        self._begin_trial()

    def _begin_trial(self) -> None:
        self._is_trial, self._looks = True, False
        self._began: float | None = None
        self._left = 0  # steps, until it is asked what comes next
        self._took: dict[bool, list[float]] = {False: [], True: []}

    def is_wanted(self) -> bool:
        """Whether to look behind the launch that was just made."""
        if self._left:
            self._left -= 1
            return self._looks
        if not self._is_trial:
            self._begin_trial()
        now = self._clock()
        if self._began is not None:
            self._took[self._looks].append(now - self._began)
        if min(map(len, self._took.values())) >= PAIRS:
            return self._decide()
        self._looks = not self._looks
        self._began, self._left = now, BLOCK - 1
        return self._looks

    def _decide(self) -> bool:
        pairs = zip(self._took[True], self._took[False], strict=False)
        self._looks = self.pays = sum(looks < does_not for looks, does_not in pairs) >= _WON
        self._is_trial, self._left = False, self._kept - 1
        self._kept = min(2 * self._kept, _MOST_KEPT)
        return self._looks

    def interrupt(self) -> None:
        """Say that something else went on: the block that it was in tells nothing."""
        if self._is_trial:
            self._began, self._left = None, 0

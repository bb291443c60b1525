"""Schedule: steps a learning rate's scheduler after each update, and finds who else does."""

from __future__ import annotations

import warnings
from typing import Any, Final, final

# So many updates in a row: once or twice it may be meant.
_IN_A_ROW: Final = 3


@final
class Schedule:
    """Steps a scheduler once after each update.

    A loop that steps it as well, as plain loops do, runs through the schedule twice as fast, and
    nothing fails. So what the scheduler counts is compared with where it was left. Whoever sets it
    back, loads it or skips ahead does not do so by one before each of several updates in a row.

    Args:
        scheduler: With a method ``step``. One without torch's ``last_epoch`` is not compared.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._left_at: int | None = None
        self._num_in_a_row = 0

    def step(self) -> None:
        """Step it; warns once where somebody else has, too."""
        if self._left_at is not None:
            is_ahead = self._count() == self._left_at + 1
            self._num_in_a_row = self._num_in_a_row + 1 if is_ahead else 0
            if self._num_in_a_row == _IN_A_ROW:
                warnings.warn(
                    f"lr_scheduler ({type(self._scheduler).__name__}) is stepped twice for each "
                    "update, by this step and by somebody else, so the schedule runs twice as "
                    "fast; drop scheduler.step() from the loop, or leave out lr_scheduler=",
                    stacklevel=2,
                )
        self._scheduler.step()
        self._left_at = self._count()

    def _count(self) -> int | None:
        count = getattr(self._scheduler, "last_epoch", None)
        return count if isinstance(count, int) else None

"""How a loader's batches are handed out: one by one, or those of a step or of several together."""

from __future__ import annotations

import time
from typing import Any, final

from torchfast._core.arguments import check_int
from torchfast._core.batches import MicroBatches, StepBatches
from torchfast.data.feed import Feed
from torchfast.data.position import Position
from torchfast.data.statistics import Counters

Taken = tuple[Any, Position]


@final
class Grouping:
    """Takes batches from a feed, as many as are handed out together.

    The last group of an epoch may be shorter, in its last step too; none crosses an epoch.

    Args:
        accumulate: Micro-batches in a step.
        unroll: Steps whose batches are handed out together; None hands out those of one.
        are_even: Whether all ranks get as many in each step.

    Attributes:
        size: Batches that are handed out together.

    Raises:
        TypeError: No integer.
        ValueError: Below 1.
    """

    def __init__(self, accumulate: int, unroll: int | None, *, are_even: bool) -> None:
        self.accumulate = check_int("accumulate", accumulate, minimum=1)
        self.unroll = None if unroll is None else check_int("unroll", unroll, minimum=1)
        self.size = self.accumulate * (self.unroll or 1)
        self._are_even = are_even

    def take(self, feed: Feed, counters: Counters) -> Taken | None:
        """Return what is handed out next, with the position behind it; None at the end.

        Args:
            feed: Where batches come from.
            counters: Written to.
        """
        batches: list[Any] = []
        position: Position | None = None
        while len(batches) < self.size and (taken := feed.take()) is not None:
            batch, position, num_bytes = taken
            counters.handed_out(time.perf_counter(), num_bytes)
            batches.append(batch)
        if position is None:
            return None
        steps = batches
        if self.accumulate > 1:
            starts = range(0, len(batches), self.accumulate)
            steps = [
                MicroBatches(batches[at : at + self.accumulate], are_even=self._are_even)
                for at in starts
            ]
        return steps[0] if self.unroll is None else StepBatches(steps), position

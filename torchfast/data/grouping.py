"""How a loader's batches are handed out: one by one, or those of a step or of several together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, final

from torchfast._core.arguments import check_int
from torchfast._core.batches import MicroBatches, StepBatches
from torchfast.data.feed import Feed
from torchfast.data.position import Position
from torchfast.data.samplers import UNSIZED
from torchfast.data.statistics import Counters

AtOnce = Callable[[], int]  # says before a group of how many steps it is at most
Taken = tuple[Any, list[Position]]  # what is handed out, and the position behind each step of it


@final
class Grouping:
    """Takes batches from a feed, as many as are handed out together.

    The last group of an epoch may be shorter, in its last step too; none crosses an epoch.

    Args:
        accumulate: Micro-batches in a step.
        unroll: Steps whose batches are handed out together; None hands out those of one.
        are_even: Whether all ranks get as many in each step.

    Attributes:
        size: Batches that are handed out together, at most.

    Raises:
        TypeError: No integer.
        ValueError: Below 1.
    """

    def __init__(self, accumulate: int, unroll: int | None, *, are_even: bool) -> None:
        self.accumulate = check_int("accumulate", accumulate, minimum=1)
        self.unroll = None if unroll is None else check_int("unroll", unroll, minimum=1)
        self.size = self.accumulate * (self.unroll or 1)
        self._are_even = are_even

    def steps_in_epoch(self, loader: Iterable[Any]) -> int:
        """Return for how many steps the loader has batches; TypeError where it has no length."""
        try:
            return -(-len(loader) // self.accumulate)  # type: ignore[arg-type]
        except UNSIZED as error:
            raise TypeError(
                f"the loader ({type(loader).__name__}) has no length; give steps=, or count "
                "what it yields"
            ) from error

    def take(
        self,
        feed: Feed,
        counters: Counters,
        left: int | None = None,
        at_once: AtOnce | None = None,
    ) -> Taken | None:
        """Return what is handed out next; None at the end.

        Args:
            feed: Where batches come from.
            counters: Written to.
            left: Of how many steps more the batches are wanted; None if of all.
            at_once: Under ``unroll``, says of how many now.
        """
        if self.size == 1 and self.unroll is None:
            if (taken := feed.take()) is None:
                return None
            batch, position, num_bytes = taken
            counters.handed_out(time.perf_counter(), num_bytes)
            return batch, [position]
        batches: list[Any] = []
        positions: list[Position] = []
        size = self.size
        if self.unroll is not None:
            most = self.unroll if at_once is None else at_once()
            size = min(size, self.accumulate * (most if left is None else min(most, left)))
        while len(batches) < size and (taken := feed.take()) is not None:
            batch, position, num_bytes = taken
            counters.handed_out(time.perf_counter(), num_bytes)
            batches.append(batch)
            positions.append(position)
        if not batches:
            return None
        counters.num_together = len(batches)
        steps = batches
        if self.accumulate > 1:
            starts = range(0, len(batches), self.accumulate)
            steps = [
                MicroBatches(batches[at : at + self.accumulate], are_even=self._are_even)
                for at in starts
            ]
            positions = [*positions[self.accumulate - 1 : -1 : self.accumulate], positions[-1]]
        return steps[0] if self.unroll is None else StepBatches(steps), positions

"""The next epoch, begun while the last batches of this one are consumed.

An epoch's beginning is slow: worker processes start, the first batch is decoded, and the device has
nothing to do. Begun ahead, that happens beside the last steps. But it draws random numbers, for the
shuffle and for the workers' seeds, before the training has drawn its last of this epoch. So the
draw is isolated: the generators are put back as they were, and when the epoch is asked for and
nobody has drawn meanwhile, they are set to what they would be in a plain loop. If somebody has, the
epoch is as good, and only not the one that a plain loop would have drawn; the report counts these.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch

from torchfast._core.decisions import Decision
from torchfast._core.rng import RNGState, get_rng_state, same_rng_state, set_rng_state
from torchfast.data.feed import RingFeed
from torchfast.data.position import PositionedLoader
from torchfast.data.stager import Fetching

CPU = torch.device("cpu")


@final
class EpochAhead:
    """Holds at most one epoch that was begun ahead.

    Args:
        upstream: The loader.
        fetching: Told when generators are set here.

    Attributes:
        epoch: Its number, if epochs have one.
        feed: Where its batches come from.
    """

    def __init__(self, upstream: PositionedLoader, fetching: Fetching) -> None:
        self._upstream = upstream
        self._fetching = fetching
        self._error: Exception | None = None
        self._before: RNGState | None = None
        self._after: RNGState | None = None
        self._num_begun = 0
        self._num_isolated = 0
        self.epoch: int | None = None
        self.feed: RingFeed | None = None

    @property
    def has_begun(self) -> bool:
        """Whether there is one."""
        return self._before is not None

    @contextmanager
    def beginning(self) -> Iterator[EpochAhead]:
        """Isolate what the body draws to begin the epoch, which it sets here.

        An error stays here until that epoch is asked for.
        """
        self._before = get_rng_state(CPU)
        self._upstream.announce()
        self._num_begun += 1
        try:
            yield self
        except Exception as error:
            self._error = error
        finally:
            self._after = get_rng_state(CPU)
            with self._fetching.setting_generators():
                set_rng_state(self._before, CPU)

    def take(self, epoch: int | None) -> RingFeed | None:
        """Return the epoch if it is ``epoch`` that begins now; otherwise it is dropped."""
        if self._before is None or self._after is None:
            return None
        if self._upstream.will_resume or self.epoch not in (None, epoch):
            self.drop()
            return None
        if same_rng_state(get_rng_state(CPU), self._before):
            with self._fetching.setting_generators():
                set_rng_state(self._after, CPU)  # as if it had drawn now
        else:
            self._num_isolated += 1
        self._upstream.arrive()
        feed, error = self.feed, self._error
        self._forget()
        if error is not None:
            raise error
        return feed

    def drop(self) -> bool:
        """Take it back; return whether there was one."""
        if self._before is None:
            return False
        feed = self.feed
        self._forget()
        if feed is not None:
            feed.close()
        self._upstream.recall()
        return True

    def decision(self, num_ranks: int = 1) -> Decision:
        """Return what became of ``across_epochs``."""
        if num_ranks > 1:
            return Decision(
                lever="across_epochs",
                outcome="stepped aside",
                detail="ranks end an epoch together, so none of them begins the next one alone",
            )
        if self._upstream.carries_state:
            return Decision(
                lever="across_epochs",
                outcome="stepped aside",
                detail="the loader carries its own state, which would be that of the next epoch; "
                "its own prefetching serves",
            )
        detail = f"{self._num_begun} epochs were begun ahead"
        if self._num_isolated:
            detail += (
                f"; before {self._num_isolated} of them the training drew from the host's "
                "generators, so a plain loop would have shuffled them otherwise"
            )
        return Decision(lever="across_epochs", outcome="applied", detail=detail)

    def _forget(self) -> None:
        self.feed = self.epoch = self._error = self._before = self._after = None

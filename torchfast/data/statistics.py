"""What a loader's time went into, and the verdict: is the device fed?

Counting costs nothing that a step would notice: the host's clock is read where the host waits
anyway, and one batch in sixteen (later one in 64) is timed on the device, by events that nobody
waits for.

The host's waiting alone says little. A host that runs ahead of the device waits in every healthy
loop, for a slot to become free. The device starves only if, when the batch came at last, it had
finished all that was enqueued before. That is what is counted, and the time that the consumer's
stream itself stood still for a copy.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from dataclasses import dataclass, field
from typing import Literal, final

Verdict = Literal["fed", "supply-bound", "transfer-bound", "unknown"]

# Of the loop's time: less than this is noise, and nobody would change a loader for it.
NOTEWORTHY = 0.02
# Batches whose times on the bus are told one by one.
LATEST = 256


@final
@dataclass(frozen=True, kw_only=True)
class LoaderStatistics:
    """What was counted since the loader was made.

    Attributes:
        num_batches: Batches that were handed out; micro-batches under accumulation.
        num_bytes: Bytes that crossed to the device.
        elapsed_s: Time from the first batch to the end of the last iteration, or to the last
            batch where the loop broke off; without the time between two iterations.
        consumer_wait_s: Time in which the loop waited for a batch, the device idle or not.
        starved_s: The part of it after which the device had nothing left to do. On a device
            without a copy stream, the CPU, all time spent loading.
        stager_wait_s: Time in which loading waited for a free slot, in the thread or in the loop
            without one: the reserve.
        fetch_s: Time spent in the loader that was given.
        copy_ms: Mean time of a batch on the bus, by the device's clock; NaN if not timed.
        stall_ms: Mean time that the device waited for a copy, a batch; NaN if not timed.
        copies_ms: What the latest of the batches that were timed took on the bus.
        num_unseen: Batches whose step was not timed, since the loop broke off behind them.
    """

    num_batches: int
    num_bytes: int
    elapsed_s: float
    consumer_wait_s: float
    starved_s: float
    stager_wait_s: float
    fetch_s: float
    copy_ms: float
    stall_ms: float
    copies_ms: tuple[float, ...] = field(default=(), repr=False)
    num_unseen: int = 0

    @property
    def starved(self) -> float:
        """The share of the time in which the device waited for the loader."""
        return min(1.0, self.starved_s / self.elapsed_s) if self.elapsed_s > 0 else 0.0

    @property
    def stalled(self) -> float:
        """The share of the time in which the device waited for the bus."""
        if math.isnan(self.stall_ms) or self.elapsed_s <= 0:
            return 0.0
        return min(1.0, self.stall_ms / 1e3 * self.num_batches / self.elapsed_s)

    @property
    def supply_over_demand(self) -> float:
        """Batches that could be loaded over batches that would be consumed, in the same time.

        NaN before there is anything to say. Of a loader with worker processes it is an upper bound
        as long as they are ahead: what lies ready takes no time to load.
        """
        demand_s = max(0.0, self.elapsed_s - self.starved_s)
        return demand_s / self.fetch_s if self.fetch_s > 0 and self.num_batches > 1 else math.nan

    @property
    def verdict(self) -> Verdict:
        """What limits the loop, as far as data go."""
        if self.num_batches - self.num_unseen < 3:
            return "unknown"
        if max(self.starved, self.stalled) < NOTEWORTHY:
            return "fed"
        return "supply-bound" if self.starved >= self.stalled else "transfer-bound"

    def to_dict(self) -> dict[str, float | int | str | None]:
        """Return the figures and the verdict as JSON-ready builtins; None for what is not known."""
        figures: dict[str, float | int | str] = {
            **{n: v for n, v in dataclasses.asdict(self).items() if n != "copies_ms"},
            "supply_over_demand": self.supply_over_demand,
            "verdict": self.verdict,
        }
        return {name: None if value != value else value for name, value in figures.items()}


@final
class Counters:
    """The running figures behind `LoaderStatistics`; one thread at a time writes each.

    The first batch of all is not counted: starting workers says nothing about the loop.
    """

    def __init__(self) -> None:
        self.num_batches = 0
        self.num_bytes = 0
        self.consumer_wait_s = 0.0
        self.starved_s = 0.0
        self.stager_wait_s = 0.0
        self.fetch_s = 0.0
        self._elapsed_s = 0.0  # of the iterations before this one
        self._since: float | None = None
        self._last = 0.0
        self.num_together = 1  # batches that are handed out together
        self._num_before = 0  # batches when the last iteration began or came to its end
        self._num_unseen = 0
        self._copies, self._waits = _Times(), _Times()

    def begin(self, now: float) -> None:
        """Note that an iteration asks for its first batch."""
        self._elapsed_s = self._elapsed()
        # When the loop broke off behind a batch, nobody can tell when its step came to an end.
        if self.num_batches > self._num_before:
            self._num_unseen += self.num_together
        self._num_before = self.num_batches
        self._since = now if self.num_batches else None
        self._last = now

    def fetched(self, seconds: float) -> None:
        """Count what a batch took to load."""
        if self.num_batches:
            self.fetch_s += seconds

    def waited(self, seconds: float, *, starved: bool) -> None:
        """Count a wait of the loop for a batch, and whether the device waited too."""
        if self.num_batches:
            self.consumer_wait_s += seconds
            self.starved_s += seconds if starved else 0.0

    def handed_out(self, now: float, num_bytes: int) -> None:
        """Count a batch, and the time until now."""
        self.num_batches += 1
        self.num_bytes += num_bytes
        if self._since is None:
            self._since = now
        self._last = now

    def end(self, now: float) -> None:
        """Note that the loop has come back from its last step, and found the iteration's end."""
        self._last = now
        self._num_before = self.num_batches

    def _elapsed(self) -> float:
        return self._elapsed_s + (0.0 if self._since is None else self._last - self._since)

    def note_times(self, copies_ms: list[float], waits_ms: list[float]) -> None:
        """Add what the device's clock said."""
        self._copies.add(copies_ms)
        self._waits.add(waits_ms)

    def snapshot(self) -> LoaderStatistics:
        """Return the figures as they are."""
        return LoaderStatistics(
            num_batches=self.num_batches,
            num_bytes=self.num_bytes,
            elapsed_s=self._elapsed(),
            consumer_wait_s=self.consumer_wait_s,
            starved_s=self.starved_s,
            stager_wait_s=self.stager_wait_s,
            fetch_s=self.fetch_s,
            copy_ms=self._copies.mean,
            stall_ms=self._waits.mean,
            copies_ms=tuple(self._copies.latest),
            num_unseen=self._num_unseen,
        )


@final
class _Times:
    """Times whose mean is of all of them, though only the latest are kept."""

    def __init__(self) -> None:
        self.latest: deque[float] = deque(maxlen=LATEST)
        self._total, self._count = 0.0, 0

    def add(self, times_ms: list[float]) -> None:
        self.latest += times_ms
        self._total += sum(times_ms)
        self._count += len(times_ms)

    @property
    def mean(self) -> float:
        return self._total / self._count if self._count else math.nan

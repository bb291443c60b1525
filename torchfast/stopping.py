"""When a loop ends, and that all ranks end it at the same step.

A signal reaches one rank before another, a callback may ask for the end on one rank only, and a
rank that ends alone leaves the others waiting for it in the next collective. So each rank says
after every step whether it wants to end; what all have said is known one step later, and counts.
It goes over the ranks' group on the host, in the background, and costs a step nothing.
"""

from __future__ import annotations

from typing import final

from torchfast._core.rank_group import Least, RankGroup
from torchfast._core.signals import StopSignals

# In the order of precedence: a number goes from rank to rank, and the least of them counts.
_REASONS = ("nonfinite", "SIGINT", "SIGTERM", "SIGUSR1", "callback")
_NONE = len(_REASONS)


@final
class Stopping:
    """Whether to end the loop, and why.

    Args:
        signals: What signals this process got.
        group: The ranks.
    """

    def __init__(self, signals: StopSignals, group: RankGroup) -> None:
        self._signals, self._group = signals, group
        self._own: str | None = None
        self._agreed: str | None = None
        self._pending: Least | None = None

    @property
    def signal(self) -> str | None:
        """The signal that ends the loop, once all ranks know of it."""
        if self._group.size == 1:
            return self._signals.received
        reason = self._agreed or ""
        return reason if reason.startswith("SIG") else None

    @property
    def is_asked_here(self) -> bool:
        """Whether a signal has reached this process, whatever the others know."""
        return self._signals.received is not None

    def ask(self, reason: str) -> None:
        """Ask for the end of the loop."""
        self._own = self._own or reason

    def after_step(self) -> str | None:
        """Return why to end now; called after each step, by all ranks alike."""
        own = self._signals.received or self._own
        if self._group.size == 1:
            return own
        self.settle()
        if self._agreed is None:
            self._pending = self._group.least(_NONE if own is None else _REASONS.index(own))
        return self._agreed

    def at_once(self) -> str | None:
        """Return why to end, where all ranks ask now and none takes a further step."""
        asked = self.after_step()
        self.settle()
        return self._agreed if self._group.size > 1 else asked

    def settle(self) -> None:
        """Wait for what was said last, so that nothing is on its way."""
        pending, self._pending = self._pending, None
        if pending is not None and (found := pending.wait()) < _NONE:
            self._agreed = self._agreed or _REASONS[found]

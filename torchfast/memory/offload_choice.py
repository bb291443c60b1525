"""Which activations go to the host so that their copies hide behind the computation.

What hides is a question of when. The moments at which storages are saved and used are known from a
step that was looked at (`StepTiming`), and so is the bus; `offload_schedule` finds what it carries
in time, or no later than is allowed.

Then a step is looked at that follows the choice. If the computation waits for copies, the next step
is looked at too, the first time, since whatever else the machine does may make a wait. If that one
waits as well, the bus is taken to be slower and there is another choice, a few times. What is found
for one sequence of sizes stays; a graph holds what was known when it was captured.

Where the computation may wait, that comes second, and is measured by the step that hides all its
copies: only of that one it is known how long the computation takes. A step that waits takes longer
by more than the waits that can be seen, and what it takes would be taken for computation, beside
which still more seems to hide. So more is sent only as long as forward and backward together take
no longer than they may. If they take longer, less goes, as if each byte more than hides took as
long as any other; in the end the choice is what hides.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, final

from torchfast.memory.offload_schedule import choose
from torchfast.memory.offload_timeline import StepTiming

_TRUSTED: Final = 0.9  # of a measured rate: copies come at their fastest only beside nothing else
_SLOWER: Final = 0.75  # what is left of that trust after a step that waited
_LESS: Final = 0.75  # at most of what more goes than hides, after a step that took too long
_HIDDEN: Final = 0.01  # of the time of forward and backward; less than that is noise
_MOST_LOOKS: Final = 6  # for one sequence of sizes


@final
@dataclass(frozen=True, kw_only=True)
class OffloadChoice:
    """What goes to the host of each forward, and what that is based on.

    Attributes:
        saved_bytes: What a forward saves of what may go.
        sent_bytes: How much of it goes.
        out_bytes_per_s: How fast copies to the host were.
        back_bytes_per_s: How fast copies back were.
        compute_ms: What forward and backward take without waiting for copies.
        waited_ms: How much longer a step took that followed the choice; None before one did.
        is_settled: Whether it stays as it is.
        max_slowdown: The part of ``compute_ms`` for which the computation may wait.

    Example:
        >>> choice = OffloadChoice(
        ...     saved_bytes=4_000_000,
        ...     sent_bytes=3_000_000,
        ...     out_bytes_per_s=50e9,
        ...     back_bytes_per_s=50e9,
        ...     compute_ms=10.0,
        ...     waited_ms=0.0,
        ...     is_settled=True,
        ... )
        >>> choice.share, choice.is_hidden, choice.is_allowed
        (0.75, True, True)
    """

    saved_bytes: int
    sent_bytes: int
    out_bytes_per_s: float
    back_bytes_per_s: float
    compute_ms: float
    waited_ms: float | None
    is_settled: bool
    max_slowdown: float = 0.0

    @property
    def share(self) -> float:
        """How much of what may go does."""
        return self.sent_bytes / self.saved_bytes if self.saved_bytes else 0.0

    @property
    def is_hidden(self) -> bool | None:
        """Whether the copies hid behind the computation; None before a step followed the choice."""
        return None if self.waited_ms is None else self.waited_ms <= _HIDDEN * self.compute_ms

    @property
    def is_allowed(self) -> bool | None:
        """Whether they were waited for no longer than they may be, but for noise; None before."""
        most_ms = (self.max_slowdown + _HIDDEN) * self.compute_ms
        return None if self.waited_ms is None else self.waited_ms <= most_ms

    def __str__(self) -> str:
        """Return it in words."""
        seen = "not seen in a step yet"
        if self.waited_ms is not None:
            seen = f"{self._found}{self.waited_ms:.2f} ms of waits"
            if self.max_slowdown:
                seen += f", {self.max_slowdown * self.compute_ms:.2f} ms allowed"
        return (
            f"{self.sent_bytes:,} of {self.saved_bytes:,} bytes of a forward ({self.share:.0%}) "
            f"at {self.out_bytes_per_s / 1e9:.1f} GB/s to the host and "
            f"{self.back_bytes_per_s / 1e9:.1f} GB/s back, beside {self.compute_ms:.2f} ms of "
            f"forward and backward ({seen})"
        )

    @property
    def _found(self) -> str:
        if self.is_hidden:
            return "hidden: "
        if self.is_allowed:
            return ""  # to wait was asked for, so it is no fault
        return "more than allowed: " if self.max_slowdown else "not all hidden: "


@final
class KindOfForward:
    """Forwards that save storages of the same sizes, in the same order.

    Args:
        sizes: Those.
        max_slowdown: The part of its time for which the computation may wait for their copies.

    Attributes:
        choice: What was chosen for them; None before.
    """

    def __init__(self, sizes: tuple[int, ...], max_slowdown: float = 0.0) -> None:
        self.sizes, self._max_slowdown = sizes, max_slowdown
        self.choice: OffloadChoice | None = None
        self.is_settled = False
        self._chosen: frozenset[int] = frozenset()
        self._is_from_steady = False
        self._trusted, self._num_looks = _TRUSTED, 0
        self._may_look_again = True  # once: there are few looks
        self._last_look = _MOST_LOOKS
        self._most_bytes = sys.maxsize  # allowed, with room on the host, and not found too slow
        self._hiding: _Hiding | None = None

    def sends(self, index: int, *, is_capture: bool = False) -> bool:
        """Whether a storage goes to the host; before a choice, and beyond its end, all do.

        Args:
            index: Its number.
            is_capture: Whether a graph is captured, which takes nothing that was not seen yet to
                take no longer than it may.
        """
        if self.choice is None or index >= len(self.sizes):
            return True
        if is_capture and self._hiding is not None and not self.is_settled:
            return index in self._hiding.chosen
        return index in self._chosen

    def settle(self) -> None:
        """Let the choice stay as it is, or as it was last seen to be right."""
        if self._hiding is not None and not self.is_settled:
            self._take_hiding(self._hiding)
        self.is_settled = True
        if self.choice is not None:
            self.choice = replace(self.choice, is_settled=True)

    def learn(
        self,
        timing: StepTiming,
        rates: tuple[float, float],
        *,
        window_bytes: int,
        max_bytes: int | None,
        room_bytes: int | None = None,
        was_followed: bool,
        is_steady: bool,
    ) -> None:
        """Take in a step that was looked at.

        Args:
            timing: What was seen.
            rates: Bytes per second to the host and back.
            window_bytes: The window that the step had.
            max_bytes: The most to send.
            room_bytes: What the host had room for; None if that was all that was to go.
            was_followed: Whether the step followed the choice.
            is_steady: Whether it pinned no memory.
        """
        # The first forward of its kind also warms up libraries and the allocator.
        is_steady = is_steady and self._num_looks > 0 and room_bytes is None
        for limit in (max_bytes, room_bytes):
            self._most_bytes = min(self._most_bytes, sys.maxsize if limit is None else limit)
        self._num_looks += 1
        is_last = self._num_looks >= self._last_look
        if self._hiding is not None:
            self._try(self._hiding, timing, rates, was_followed and is_steady, is_last=is_last)
            return
        waited_ms = None
        if was_followed and (is_last or (is_steady and self._is_from_steady)):
            waited_ms = timing.waited_s * 1e3
            hides = timing.waited_s <= _HIDDEN * timing.compute_s
            if not (hides or is_last) and self._may_look_again:
                self._may_look_again = False
                return
            self.is_settled = is_last or hides
            self._trusted *= 1.0 if self.is_settled else _SLOWER
            if hides and self._max_slowdown:
                self._hiding = _Hiding(timing, self._chosen, window_bytes, rates)
        self.is_settled |= is_last
        if not self.is_settled:
            self._chosen = self._found(timing, rates, window_bytes)
            self._is_from_steady = is_steady
            waited_ms = None
        self._note(timing.compute_s, waited_ms, rates)
        if self._hiding is not None:
            self._begin_to_try(self._hiding, rates)

    def _begin_to_try(self, hiding: _Hiding, rates: tuple[float, float]) -> None:
        """Send more than hides, if any more may be waited for."""
        chosen = self._found(hiding.timing, rates, hiding.window_bytes, self._max_slowdown)
        if chosen == hiding.chosen:
            return  # as it is settled already
        self._chosen, self.is_settled = chosen, False
        self._last_look = self._num_looks + _MOST_LOOKS
        self._note(hiding.timing.compute_s, None, rates)

    def _try(
        self,
        hiding: _Hiding,
        timing: StepTiming,
        rates: tuple[float, float],
        is_followed: bool,
        *,
        is_last: bool,
    ) -> None:
        """Take in a step that sends more than hides."""
        compute_s = hiding.timing.compute_s
        longer_s = max(0.0, timing.compute_s + timing.waited_s - compute_s)
        if is_followed and longer_s <= (self._max_slowdown + _HIDDEN) * compute_s:
            self.is_settled = True
            self._note(compute_s, longer_s * 1e3, rates)
        elif is_last:
            self._take_hiding(hiding)
        elif is_followed:
            # As if each byte more than hides took as long as the others.
            share = min(_LESS, self._max_slowdown * compute_s / longer_s)
            hiding_bytes = self._num_bytes(hiding.chosen)
            more = self._num_bytes(self._chosen) - hiding_bytes
            self._most_bytes = hiding_bytes + int(share * more)
            found = self._found(hiding.timing, rates, hiding.window_bytes, self._max_slowdown)
            # Of a bus that is taken for slow there may be less than what hid.
            self._chosen = max(found, hiding.chosen, key=self._num_bytes)
            self._note(compute_s, None, rates)

    def _take_hiding(self, hiding: _Hiding) -> None:
        self._chosen, self.is_settled = hiding.chosen, True
        self._note(hiding.timing.compute_s, hiding.timing.waited_s * 1e3, hiding.rates)

    def _found(
        self,
        timing: StepTiming,
        rates: tuple[float, float],
        window_bytes: int,
        max_slowdown: float = 0.0,
    ) -> frozenset[int]:
        out, back = (self._trusted * rate for rate in rates)
        return choose(
            timing,
            window_bytes=window_bytes,
            out_bytes_per_s=out,
            back_bytes_per_s=back,
            max_bytes=self._most_bytes,
            max_slowdown=max_slowdown,
        )

    def _note(self, compute_s: float, waited_ms: float | None, rates: tuple[float, float]) -> None:
        self.choice = OffloadChoice(
            saved_bytes=sum(self.sizes),
            sent_bytes=self._num_bytes(self._chosen),
            out_bytes_per_s=rates[0],
            back_bytes_per_s=rates[1],
            compute_ms=compute_s * 1e3,
            waited_ms=waited_ms,
            is_settled=self.is_settled,
            max_slowdown=self._max_slowdown,
        )

    def _num_bytes(self, storages: frozenset[int]) -> int:
        return sum(self.sizes[index] for index in storages)


class _Hiding(NamedTuple):
    """A step that followed a choice, and did not wait.

    Attributes:
        timing: What was seen of it.
        chosen: What it sent.
        window_bytes: The window that it had.
        rates: Bytes per second to the host and back, as they were known by then.
    """

    timing: StepTiming
    chosen: frozenset[int]
    window_bytes: int
    rates: tuple[float, float]

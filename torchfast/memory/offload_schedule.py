"""Which copies are made in a step of known times, and how long the computation waits for them.

A storage leaves once enough newer ones are there; its copy is to be through when the computation
would wait for it, and back before the backward uses it. The copies of a step are gone through here
in their order, first those to the host, then those back, and each is made only if it is in time,
with those that were chosen before it. Of a bus that is too slow for all, every so many-th goes, as
many as it carries; the last ones stay, since their backward comes at once.

Where the computation may wait for so much of its time, "in time" means so much later. A wait delays
all that comes behind it, the next copies too, so it is not waited twice for what is late alike: of
each direction the longest delay of a copy is all that it waits for. Which direction is the narrower
one depends on the bus and on the computation, and mostly it is the forward, which is the shorter
half. So all of the allowance is the forward's first; then the backward has what is left of it, and
as much more as the forward gives back by sending only what comes back in time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from typing import Final, NamedTuple, final

from torchfast.memory.offload_timeline import StepTiming

_PARTS: Final = 4  # of what is allowed, since a limit may be reached with less than all of it
_HALVINGS: Final = 6  # of what the two ways share, to a sixtieth of what is allowed


def choose(
    timing: StepTiming,
    *,
    window_bytes: int,
    out_bytes_per_s: float,
    back_bytes_per_s: float,
    max_bytes: int | None = None,
    max_slowdown: float = 0.0,
) -> frozenset[int]:
    """Return the storages whose copies hide, and those that may be waited for.

    Args:
        timing: When they are saved and used.
        window_bytes: What may be on its way to the host, and what is fetched ahead.
        out_bytes_per_s: The rate of copies to the host.
        back_bytes_per_s: The rate of copies back.
        max_bytes: The most to send; None for all.
        max_slowdown: The part of the computation's time for which it may wait in addition.
    """
    limit = float("inf") if max_bytes is None else max_bytes
    bus = _Bus(timing, window_bytes, out_bytes_per_s, back_bytes_per_s, limit)
    best, is_full = bus.within(0.0)
    for part in range(1, _PARTS + 1) if max_slowdown else ():
        if is_full:
            break  # waiting would only send the earlier ones in place of the later ones
        found, is_full = bus.within(part / _PARTS * max_slowdown * timing.compute_s)
        best = max(best, found, key=bus.num_bytes)  # of equals the first, which waits less
    return best


class _Chosen(NamedTuple):
    """What goes and comes back, and whether ``limit_bytes`` alone left out some."""

    storages: frozenset[int]
    is_full: bool


class _Sent(NamedTuple):
    """What goes one way, how long that is waited for, and whether ``limit_bytes`` left out some."""

    storages: frozenset[int]
    waited_s: float
    is_full: bool = False


@final
class _Bus:
    """The copies of a step, both ways.

    Args:
        timing: When storages are saved and used.
        window_bytes: What may be on its way to the host, and what is fetched ahead.
        out_bytes_per_s: The rate of copies to the host.
        back_bytes_per_s: The rate of copies back.
        limit_bytes: The most to send.
    """

    def __init__(
        self,
        timing: StepTiming,
        window_bytes: int,
        out_bytes_per_s: float,
        back_bytes_per_s: float,
        limit_bytes: float,
    ) -> None:
        self._timing, self._window_bytes, self._limit_bytes = timing, window_bytes, limit_bytes
        self._out, self._back = out_bytes_per_s, back_bytes_per_s
        self._landings = _landings(timing, window_bytes)
        self._first_use, self._last_use = dict[int, float](), dict[int, int]()
        for place, (index, second) in enumerate(timing.used):
            self._first_use.setdefault(index, second)
            self._last_use[index] = place

    def num_bytes(self, storages: frozenset[int]) -> int:
        """Return what they come to."""
        return sum(self._timing.sizes[index] for index in storages)

    def within(self, allowed_s: float) -> _Chosen:
        """Return what goes if the computation may wait so long, forward and backward together."""
        out = self._sent_out(range(len(self._timing.sizes)), allowed_s)
        least, most = max(0.0, allowed_s - out.waited_s), allowed_s
        best = self._brought_back(out.storages, least).storages
        if best == out.storages:
            return _Chosen(best, out.is_full)
        for _ in range(_HALVINGS if least < most else 0):
            middle = (least + most) / 2
            back = self._brought_back(out.storages, middle)
            if back.waited_s + self._sent_out(back.storages, allowed_s).waited_s <= allowed_s:
                least, best = middle, max(best, back.storages, key=self.num_bytes)
            else:
                most = middle
        return _Chosen(best, is_full=False)

    def _sent_out(self, wanted: Container[int], allowed_s: float) -> _Sent:
        """Return what of these is on the host no later than so long behind its moment."""
        sizes, left, is_full = self._timing.sizes, self._limit_bytes, False
        waited_s = free_s = 0.0
        sent, flying = set[int](), deque[tuple[float, float]]()  # when it lands, and could
        for index, second in self._timing.pushed:
            while flying and flying[0][0] <= second:
                landing_s, done_s = flying.popleft()
                waited_s = max(waited_s, done_s - landing_s)
            done_s = max(free_s, second + waited_s) + sizes[index] / self._out
            lands_s = self._landings.get(index)
            if index not in wanted or lands_s is None or done_s > lands_s + allowed_s:
                continue
            if sizes[index] > left:
                is_full = True
                continue
            sent.add(index)
            flying.append((lands_s, done_s))
            free_s, left = done_s, left - sizes[index]
        late = (done_s - landing_s for landing_s, done_s in flying)
        return _Sent(frozenset(sent), max(waited_s, *late, 0.0), is_full)

    def _brought_back(self, wanted: frozenset[int], allowed_s: float) -> _Sent:
        """Return what of these is back no later than so long behind its first use."""
        # All of it is on the host by then: the forward has waited for it.
        kept, back_s = set(wanted), dict[int, float]()
        waited_s = free_s = 0.0
        for place, (used, second) in enumerate(self._timing.used):
            ahead = self._window_bytes
            for index in range(used, -1, -1):
                if self._last_use.get(index, place) < place:
                    continue  # the backward is through with it
                if index in kept and index not in back_s:
                    done_s = max(free_s, second + waited_s) + self._timing.sizes[index] / self._back
                    if done_s <= self._first_use.get(index, done_s) + allowed_s:
                        back_s[index] = free_s = done_s
                    else:
                        kept.discard(index)
                if index == used:
                    waited_s = max(waited_s, back_s.get(used, second) - second)
                else:
                    ahead -= self._timing.sizes[index]
                    if ahead <= 0:
                        break
        return _Sent(frozenset(kept), waited_s)


def _landings(timing: StepTiming, window_bytes: int) -> dict[int, float]:
    """Return when the computation waits for the copy of each storage; of the last ones never.

    A storage larger than the window is none of them: it would be waited for in full, at once.
    """
    # As `Lane.land` has it.
    flights, flying, found = deque[int](), 0, dict[int, float]()
    for index, second in timing.pushed:
        flights.append(index)
        flying += timing.sizes[index]
        while flying > window_bytes:
            oldest = flights.popleft()
            flying -= timing.sizes[oldest]
            if timing.sizes[oldest] <= window_bytes:
                found[oldest] = second
    return found

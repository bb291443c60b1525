"""How much of the idle time is there only because the host had waited for the device.

A host that never waits runs ahead: while the device computes, it launches what comes next, and a
slow stretch of Python costs nothing as long as the queue lasts. A wait empties the queue, and from
there on each launch may come late. Such a gap looks like any that a slow host makes; only without
the wait it would not be there.

So the launches are played again on a model of the device, in which a piece of work begins when it
has been launched and what came before it has ended: once as they were, and once each earlier by as
long as the host had waited until then. What the device is idle less is what the waits cost.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from itertools import accumulate

from torchfast.profiling.intervals import union
from torchfast.profiling.projection import Launched
from torchfast.profiling.trace import HostCall


def idle_by_waits(launched: Sequence[Launched], waits: Iterable[HostCall]) -> float:
    """Return by how much less a device would be idle, in us, if the host never waited for it.

    Args:
        launched: The work of one device.
        waits: The calls in which the host waited, of all threads that launch.
    """
    waited = union((call.start, call.end) for call in waits)
    ends = [end for _, end in waited]
    before = [0.0, *accumulate(end - start for start, end in waited)]
    as_it_was: list[tuple[float, float]] = []
    without: list[tuple[float, float]] = []
    origin = min((each.work.start for each in launched), default=0.0)
    reached = float("-inf")
    for each in sorted(launched, key=lambda e: e.work.start):
        work, call = each.work, each.call
        # Of what runs beside other work, only what outlasts it takes the device's time.
        us = max(0.0, work.end - max(work.start, reached))
        reached = max(reached, work.end)
        # What has no launch here was launched before, and was ready.
        moment = 0.0 if call is None else call.start - origin
        earlier = 0.0 if call is None else before[bisect.bisect_right(ends, call.start)]
        as_it_was.append((moment, us))
        without.append((moment - earlier, us))
    return max(0.0, _idle(as_it_was) - _idle(without))


def _idle(work: Sequence[tuple[float, float]]) -> float:
    """Return how long a device has nothing to do, given when work is launched and what it takes."""
    free = idle = 0.0
    for moment, us in work:
        idle += max(0.0, moment - free)
        free = max(free, moment) + us
    return idle

"""What the device is idle for at the host's own pace, and what of it the waits of the host cost.

Two things in a trace mislead. A host that never waits runs ahead: while the device computes, it
launches what comes next, and a slow stretch of Python costs nothing as long as the queue lasts. A
wait empties the queue, and from there on each launch may come late, by a gap that looks like any
that a slow host makes. And a profiler that notes operators, shapes and memory makes the host
slower, on some machines twice as slow, so that it is late where without a profiler it is not.

So the host's calls are played again on a model of the device, in which a piece of work begins when
it has been launched and what came before it has ended, and in which a wait ends when what it waited
for has. First with everything the host did between its waits taking a share of its time, the
`pace`, such that a step takes what it took before the profiler began; time in which the host waited
for a batch is left as it is. Steps are not all alike: one in ten may wait for the device, to log.
So a usual step is held against a usual one, and not the mean of all. Then the same is played
without the waits and the operators that made them: what the device is idle less is what the waits
cost.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Final, NamedTuple, final

from torchfast.profiling.intervals import Interval, intersection, length, union
from torchfast.profiling.projection import Launched
from torchfast.profiling.trace import HostCall

# A profiler that makes the host less slower than this is no matter.
_SAME_PACE: Final = 0.97
# And one that made it so much slower is not known: beyond that it is something else.
_LEAST_PACE: Final = 0.2
# What an event of the host is.
_LAUNCH, _WAIT, _STEP = range(3)
# The clocks of host and device are matched to about this.
_CLOCKS_US: Final = 1.0


class Wait(NamedTuple):
    """A call in which the host waits for the device, and the operator that makes it."""

    call: HostCall
    operator: Interval


class Played(NamedTuple):
    """What came of playing a trace.

    Attributes:
        pace: What the host's own work takes of the time that it took under the profiler.
        elapsed_us: From the first launch to the end of the last work or call.
        idle_us: When the device had nothing to do because nothing was launched.
        without_waits_us: The same if the host did not wait.
    """

    pace: float
    elapsed_us: float
    idle_us: float
    without_waits_us: float


def usual(steps_us: Sequence[float]) -> float:
    """Return what a step takes that waits for no more than most do: the lower quartile."""
    return sorted(steps_us)[len(steps_us) // 4]


class _Event(NamedTuple):
    """A launch, the end of a wait, or that of a step, in the order of the host."""

    moment: float
    kind: int
    work: int  # its number in the order of the device; of a wait, that of what it waited for
    own_us: float  # what the host needs for a wait for nothing


@final
class Playback:
    """The calls of the host and the work of a device, to be played at one pace or another.

    Args:
        launched: The work of one device.
        waits: The waits of all threads that launch.
        data_waits: When the host waited for a batch.
        steps: When each step begins on the host, and when the last ends; without, all is one step.
    """

    def __init__(
        self,
        launched: Sequence[Launched],
        waits: Sequence[Wait],
        data_waits: Iterable[Interval] = (),
        steps: Sequence[float] = (),
    ) -> None:
        run = sorted(launched, key=lambda each: each.work.start)
        reached = float("-inf")
        ends: list[float] = []
        self._us: list[float] = []
        for each in run:
            # Of what runs beside other work, only what outlasts it takes the device's time.
            self._us.append(max(0.0, each.work.end - max(each.work.start, reached)))
            reached = max(reached, each.work.end)
            ends.append(reached)
        events = [
            _Event(each.call.start, _LAUNCH, index, 0.0)
            for index, each in enumerate(run)
            if each.call is not None
        ]
        begin = min((event.moment for event in events), default=0.0)
        for wait in waits:
            index = bisect.bisect_right(ends, wait.call.end + _CLOCKS_US) - 1
            over = wait.call.start if index < 0 else max(wait.call.start, ends[index])
            own_us = max(0.0, wait.call.end - over)
            if wait.call.end >= begin:
                events.append(_Event(wait.call.end, _WAIT, index, own_us))
        events += [_Event(moment, _STEP, -1, 0.0) for moment in steps]
        self._events = sorted(events)
        # Time begins with the first launch, though the step around it began before.
        self._first = next((i for i, e in enumerate(self._events) if e.kind != _STEP), 0)
        moments = [event.moment for event in self._events]
        calls = union((wait.call.start, wait.call.end) for wait in waits)
        around = union(wait.operator for wait in waits)
        data = union(data_waits)
        self._as_it_was = _host_time(moments, calls, data)
        self._without = _host_time(moments, around, data)

    def played(self, slowdown: float = 1.0) -> Played:
        """Return for how long the device is idle, with and without the waits of the host.

        Args:
            slowdown: How much longer a step took under the profiler than before it began, a usual
                one.
        """
        part = 1.0 / slowdown
        pace = self._own_pace(part) if part < _SAME_PACE else 1.0
        elapsed, idle, _ = self._play(pace, waits=True)
        return Played(pace, elapsed, idle, self._play(pace, waits=False)[1])

    def _own_pace(self, part: float) -> float:
        """Return what the host's own work has to take so that all takes a part of the time.

        Waits do not become shorter by themselves, so that it is less than that part. If no host is
        fast enough for that, the device was slower as well, and the part is all that is known.
        """
        wanted = part * self._play(1.0, waits=True)[2]
        if self._play(_LEAST_PACE, waits=True)[2] > wanted:
            return max(part, _LEAST_PACE)
        low, high = _LEAST_PACE, 1.0
        for _ in range(20):
            middle = (low + high) / 2
            if self._play(middle, waits=True)[2] > wanted:
                high = middle
            else:
                low = middle
        return high

    def _play(self, pace: float, *, waits: bool) -> tuple[float, float, float]:
        """Return the time in all, the device's idle time, and the host's for a usual step."""
        times = self._as_it_was if waits else self._without
        us = self._us
        ready = [0.0] * len(us)  # what has no launch here was launched before
        ends = [0.0] * len(us)
        free = idle = 0.0
        done = 0
        ended: list[float] = []
        before = times[0] if times else (0.0, 0.0)
        begin = times[self._first] if times else before
        host = pace * (before[0] - begin[0]) + before[1] - begin[1]
        for event, (own, data) in zip(self._events, times, strict=True):
            host += pace * (own - before[0]) + data - before[1]
            before = own, data
            if event.kind == _LAUNCH:
                ready[event.work] = host
            elif event.kind == _STEP:
                ended.append(host)
            elif waits:
                # Work is done in the order of the device, of which this is the last that ended.
                while done <= event.work:
                    idle += max(0.0, ready[done] - free)
                    free = max(free, ready[done]) + us[done]
                    ends[done] = free
                    done += 1
                host = max(host, ends[event.work] if event.work >= 0 else 0.0)
                host += pace * event.own_us
        for index in range(done, len(us)):
            idle += max(0.0, ready[index] - free)
            free = max(free, ready[index]) + us[index]
        steps_us = [after - before for before, after in pairwise(ended)]
        return max(host, free), idle, usual(steps_us or [host])


def _host_time(
    moments: Sequence[float], left_out: list[Interval], data: list[Interval]
) -> list[tuple[float, float]]:
    """Return what the host had worked, and waited for batches, until each of some moments."""
    waited = _until(moments, left_out)
    # What lies in both is left out.
    both = _until(moments, intersection(data, left_out))
    batches = [a - b for a, b in zip(_until(moments, data), both, strict=True)]
    return [
        (moment - out - batch, batch)
        for moment, out, batch in zip(moments, waited, batches, strict=True)
    ]


def _until(moments: Sequence[float], busy: Sequence[Interval]) -> list[float]:
    """Return how much of a busy list lies before each of some moments."""
    starts = [start for start, _ in busy]
    sums = [0.0, *accumulate(length([each]) for each in busy)]
    found = []
    for moment in moments:
        at = bisect.bisect_right(starts, moment)
        over = max(0.0, busy[at - 1][1] - moment) if at else 0.0
        found.append(sums[at] - over)
    return found

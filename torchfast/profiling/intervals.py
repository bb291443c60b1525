"""Sets of moments, as lists of intervals: what is busy, what is idle, what lies in what.

Everything is in microseconds. A *busy list* is sorted and its intervals neither touch nor overlap.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

Interval = tuple[float, float]


class HasTimes(Protocol):
    """Something with a beginning and an end."""

    @property
    def start(self) -> float:
        """When it begins."""
        ...

    @property
    def end(self) -> float:
        """When it ends."""
        ...


S = TypeVar("S", bound=HasTimes)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the busy list of intervals in any order.

    Example:
        >>> union([(4, 6), (0, 2), (1, 3)])
        [(0, 3), (4, 6)]
    """
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            if end > joined[-1][1]:
                joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def length(busy: Iterable[Interval]) -> float:
    """Return how long a busy list is in all."""
    return sum(end - start for start, end in busy)


def gaps(busy: Sequence[Interval]) -> list[Interval]:
    """Return what lies between the intervals of a busy list.

    Example:
        >>> gaps([(0, 3), (4, 6)])
        [(3, 4)]
    """
    return [(busy[i][1], busy[i + 1][0]) for i in range(len(busy) - 1)]


def intersection(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the busy list of what is in both.

    Example:
        >>> intersection([(0, 3), (4, 6)], [(2, 5)])
        [(2, 3), (4, 5)]
    """
    common: list[Interval] = []
    i = j = 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            common.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return common


def overlap(busy: Sequence[Interval], start: float, end: float) -> float:
    """Return how much of a busy list lies between two moments."""
    at = max(0, bisect.bisect_right(busy, (start, float("inf"))) - 1)
    total = 0.0
    while at < len(busy) and busy[at][0] < end:
        total += max(0.0, min(end, busy[at][1]) - max(start, busy[at][0]))
        at += 1
    return total


def enclosing(spans: Iterable[S], moments: Sequence[float]) -> Iterator[tuple[S, ...]]:
    """Yield for each of the sorted moments the spans around it, outermost first.

    Spans of one thread nest, so those that have begun and not ended are a stack. Some do not (an
    annotation that one thread begins and another ends), so what has ended is looked for anywhere.
    """
    waiting = sorted(spans, key=lambda span: (span.start, -span.end))
    at = 0
    open_spans: list[S] = []
    ends: list[float] = []
    current: tuple[S, ...] = ()
    for moment in moments:
        changed = False
        while at < len(waiting) and waiting[at].start <= moment:
            if waiting[at].end >= moment:
                open_spans.append(waiting[at])
                heapq.heappush(ends, waiting[at].end)
                changed = True
            at += 1
        if ends and ends[0] < moment:
            open_spans = [span for span in open_spans if span.end >= moment]
            ends = [span.end for span in open_spans]
            heapq.heapify(ends)
            changed = True
        if changed:
            current = tuple(open_spans)
        yield current

"""What one way costs beside another, by single steps that alternate, where the host is noisy.

A host that is slower for some milliseconds, be it by a neighbour or by where its threads happen to
run, makes whole turns of steps slower, and no median within a turn sees that. So the ways take
turns step by step: a block has one step of each, in random order, and what counts is the difference
within a block. Steps may be of kinds, as those that a timer samples are; each kind has its own
median, and the medians are added up by how often each kind comes, so that the few dear steps are
neither lost nor left to chance.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Final, NamedTuple

# Blocks that are drawn anew together: what lasts longer than a block lies in them as a whole.
RUN: Final = 16
# How often they are drawn anew.
RESAMPLED: Final = 400


class Timed(NamedTuple):
    """A step.

    Attributes:
        ms: What it took.
        kind: Which sort of step it was.
        counts: Whether it is to be compared: not if something came into it that is no part of it.
    """

    ms: float
    kind: Hashable = None
    counts: bool = True


def usual_ms(steps: Sequence[Timed]) -> float:
    """Return what the usual step takes: the medians of the kinds by how often each comes."""
    by_kind: dict[Hashable, list[float]] = defaultdict(list)
    for step in steps:
        if step.counts:
            by_kind[step.kind].append(step.ms)
    return _weighted(by_kind)


def paired_cost(
    ours: Sequence[Timed], others: Sequence[Timed], run: int = RUN
) -> tuple[float, list[float]]:
    """Return what a step costs more than another's, as a share, and the interval of 95 in 100.

    Args:
        ours: The step of each block.
        others: That of what it is held against, of the same blocks.
        run: So many blocks are drawn anew together.
    """
    pairs = list(zip(ours, others, strict=True))
    runs = [
        [(one, other) for one, other in pairs[begin : begin + run] if one.counts and other.counts]
        for begin in range(0, len(pairs), run)
    ]
    draws = random.Random(0)
    costs = sorted(_cost(draws.choices(runs, k=len(runs))) for _ in range(RESAMPLED))
    aside = len(costs) // 40
    return _cost(runs), [costs[aside], costs[-1 - aside]]


def runs_ms(steps: Sequence[Timed]) -> list[float]:
    """Return the mean step of each run of blocks, whatever came into it."""
    return [
        statistics.mean(step.ms for step in steps[begin : begin + RUN])
        for begin in range(0, len(steps), RUN)
    ]


def _cost(runs: Sequence[Sequence[tuple[Timed, Timed]]]) -> float:
    longer: dict[Hashable, list[float]] = defaultdict(list)
    base: dict[Hashable, list[float]] = defaultdict(list)
    for run in runs:
        for ours, other in run:
            kinds = ours.kind, other.kind
            longer[kinds].append(ours.ms - other.ms)
            base[kinds].append(other.ms)
    return _weighted(longer) / _weighted(base)


def _weighted(by_kind: dict[Hashable, list[float]]) -> float:
    total = sum(map(len, by_kind.values()))
    return sum(statistics.median(values) * len(values) for values in by_kind.values()) / total


def cost_against(
    limit: float,
    ours: Callable[[], float],
    other: Callable[[], float],
    seconds: float,
    fewest: int = 20 * RUN,
) -> tuple[float, list[float]]:
    """Alternate two ways until it is clear on which side of a limit their difference lies.

    Args:
        limit: The share that is in question.
        ours: Does one step and returns what it took, in milliseconds.
        other: The same of what it is held against.
        seconds: When to be content with what there is.
        fewest: Blocks that there are at least.
    """
    order, begun = random.Random(0), time.perf_counter()
    found: dict[Callable[[], float], list[Timed]] = {ours: [], other: []}
    while True:
        for _ in range(fewest):
            for way in order.sample((ours, other), 2):
                found[way].append(Timed(way()))
        cost, (low, high) = paired_cost(found[ours], found[other])
        if not low <= limit <= high or time.perf_counter() - begun > seconds:
            return cost, [low, high]

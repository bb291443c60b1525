"""What the collectives of a step take, and for how long the step stands still for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from torchfast._core.collectives import Observation
from torchfast._core.reading import Mark
from torchfast.profiling.intervals import Interval, intersection, length, union


class CommunicationTime(NamedTuple):
    """Times of one step.

    Attributes:
        total_ms: In which any collective runs; a moment counts once where several do.
        exposed_ms: In which the step stands still for some; None where that is not known.
    """

    total_ms: float
    exposed_ms: float | None


def communication_time(
    observed: Observation, in_step: Iterable[Interval], at_ms: Callable[[Mark], float]
) -> CommunicationTime:
    """Return the times of a step whose moments have passed.

    Args:
        observed: The collectives that it issued.
        in_step: When others ran that it issued in its own queue, in the time of ``at_ms``.
        at_ms: When a moment was.
    """
    waits = [(at_ms(w.begin), None if w.end is None else at_ms(w.end), w) for w in observed.waits]
    # Where the step goes on, what it waited for is done, though who said so came late: on the CPU
    # the end is noted by another thread.
    done_by = {id(each): end for _, end, w in waits if end is not None for each in w.collectives}
    ran: dict[int, Interval] = {}
    for each in observed.collectives:
        assert each.end is not None
        begin, done = at_ms(each.begin), at_ms(each.end)
        ran[id(each)] = begin, max(begin, min(done, done_by.get(id(each), done)))
    stood = [*in_step, *(ran[id(each)] for each in observed.collectives if each.is_in_step)]
    total = union([*ran.values(), *stood])
    for begin, gone_on, wait in waits:
        done = max(ran[id(each)][1] for each in wait.collectives)
        if (until := done if gone_on is None else gone_on) > begin:
            stood.append((begin, until))
    # A step that goes on later than it could has waited for something else at last.
    exposed = intersection(union(stood), total)
    return CommunicationTime(length(total), length(exposed) if observed.knows_waits else None)

"""What memory was taken for, over time.

The trace notes each time that the allocator hands out memory and takes it back. What it is for is
told by when it was taken: in the forward pass activations, in the backward pass gradients and what
the pass needs, in the update the optimizer's state, before and between them batches. What was taken
before the trace began (as a rule the parameters, and the state of an optimizer that has run) is one
category, "before".
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

from torchfast.profiling.intervals import Interval, union
from torchfast.profiling.projection import phase_of
from torchfast.profiling.trace import MemoryEvent, Trace

CATEGORIES: Final = ("before", "inputs", "activations", "gradients", "update")
_BY_PHASE: Final = {
    "data_wait": "inputs",
    "h2d": "inputs",
    "forward": "activations",
    "backward": "gradients",
    "communication": "gradients",
    "update": "update",
}
# More points than this a drawing does not show.
_MOST_POINTS: Final = 400


@final
@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """The memory of one device over the trace.

    Attributes:
        device: ``"cuda:0"`` or ``"cpu"``.
        peak_bytes: The most that was taken at a time.
        at_peak: What of it was taken for what; adds up to `peak_bytes`.
        reserved_bytes: The most that the allocator held.
        times_us: Moments of the trace.
        by_category: The bytes of each category at those moments.
    """

    device: str
    peak_bytes: int
    at_peak: dict[str, int]
    reserved_bytes: int
    times_us: list[float] = field(default_factory=list)
    by_category: dict[str, list[int]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the peak as JSON has it; the course is in the page."""
        return {
            "device": self.device,
            "peak_bytes": self.peak_bytes,
            "at_peak": self.at_peak,
            "reserved_bytes": self.reserved_bytes,
        }


def memory_use(trace: Trace) -> list[MemoryUse]:
    """Return the use of each device that the trace has memory events of; CUDA devices first."""
    by_device: dict[str, list[MemoryEvent]] = defaultdict(list)
    for event in trace.memory:
        by_device[event.device].append(event)
    phases = _Phases(trace)
    return [
        _use(device, by_device[device], phases)
        for device in sorted(by_device, key=lambda name: (name == "cpu", name))
    ]


def _use(device: str, events: Sequence[MemoryEvent], phases: _Phases) -> MemoryUse:
    first = events[0]
    taken = dict.fromkeys(CATEGORIES, 0)
    # What the allocator had handed out before its first event here. (The CPU counts from zero.)
    taken["before"] = max(0, first.allocated - first.num_bytes)
    owners: dict[int, tuple[str, int]] = {}
    peak, at_peak = 0, dict(taken)
    course: list[tuple[float, dict[str, int]]] = []
    every = max(1, len(events) // _MOST_POINTS)
    for number, event in enumerate(events):
        if event.num_bytes >= 0:
            category = _BY_PHASE.get(phases.at(event.time), "activations")
            owners[event.address] = (category, event.num_bytes)
            taken[category] += event.num_bytes
        else:
            category, num = owners.pop(event.address, ("before", -event.num_bytes))
            taken[category] -= min(num, taken[category])
        total = sum(taken.values())
        if total > peak:
            peak, at_peak = total, dict(taken)
        if number % every == 0:
            course.append((event.time, dict(taken)))
    return MemoryUse(
        device=device,
        peak_bytes=peak,
        at_peak={name: num for name, num in at_peak.items() if num},
        reserved_bytes=max(event.reserved for event in events),
        times_us=[time for time, _ in course],
        by_category={name: [now[name] for _, now in course] for name in CATEGORIES},
    )


class _Phases:
    """The phase of the main thread at a moment; forward, where none is annotated."""

    def __init__(self, trace: Trace) -> None:
        found: dict[str, list[Interval]] = defaultdict(list)
        for span in trace.spans:
            if span.kind in ("annotation", "op") and (phase := phase_of(span)):
                found[phase].append((span.start, span.end))
        self._busy = {phase: union(each) for phase, each in found.items()}

    def at(self, time: float) -> str:
        for phase in ("data_wait", "h2d", "update", "backward", "communication"):
            busy = self._busy.get(phase)
            if busy:
                index = bisect.bisect_right(busy, (time, float("inf"))) - 1
                if index >= 0 and busy[index][1] >= time:
                    return phase
        return "forward"

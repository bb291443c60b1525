"""Which line of the user's code the host was at while the device had nothing to do.

The steps that are measured have no lines, and those with lines are slow: their gaps are others. So
a gap is looked up by the work that ends it. In a step with lines the same work comes at the same
place, and what the host did there before it launched that work is what it was late with: the line
that waited, that asked for a batch, that ran Python, or that launched. Where the device was not
ready though the host was, no line is to blame, and none is named.

A wait or a launch of the backward pass has the line of the forward that it is the backward of.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, final

from torchfast.profiling.figures import Figures, inside_steps
from torchfast.profiling.gaps import Gap, IdleStretches, is_allocation, is_compile
from torchfast.profiling.intervals import Interval
from torchfast.profiling.places import Origins, Places, most_common
from torchfast.profiling.projection import Launched, host_stacks, phase_of, project
from torchfast.profiling.trace import HostCall, HostSpan, Trace
from torchfast.profiling.waits import waits_of

# What has a line of the host's; "device" and "unknown" have none.
_OF_THE_HOST: Final = frozenset({"data", "sync", "launch", "python", "compile", "allocation"})
# Without steps each piece of work is a place of its own; the longest gaps are looked up first.
_MOST: Final = 5000


class _Place(NamedTuple):
    """Where a piece of work comes in a step: the how-manieth of its name."""

    name: str
    number: int


class _GapPlace(NamedTuple):
    """What gaps of different steps have in common that have one line."""

    cause: str
    work: _Place
    is_last: bool  # part of a gap, up to the work; else it ends with the wait for a batch


class LineIdle(NamedTuple):
    """The idle time of one cause that one line is at fault for, over all steps."""

    cause: str
    line: str
    total_us: float
    num: int


def gaps_with_lines(trace: Trace, figures: Figures, lined: Trace) -> list[Gap]:
    """Return the gaps of a device, each with its line as far as that is known.

    Args:
        trace: The trace that they are of.
        figures: Its figures.
        lined: A trace of the same loop with lines; may be `trace`.
    """
    gaps, launched = figures.gaps, figures.launched
    if not gaps or not (places := Places(lined)):
        return gaps
    lined_work: Sequence[Launched] = launched
    if lined is not trace:
        inside = inside_steps(lined, project(lined))
        lined_work = [e for e in inside if e.work.device == figures.device]
    host = _LinedHost(lined, places, lined_work)
    following: dict[float, tuple[Launched, _Place]] = {}
    for each, place in _placed(trace, launched):
        following.setdefault(each.work.start, (each, place))
    starts = sorted(following)
    alike: dict[_Place, list[Launched]] = defaultdict(list)
    for each, place in _placed(lined, lined_work):
        alike[place].append(each)

    def place_of(gap: Gap) -> _GapPlace:
        # What was divided at a wait for a batch has parts that end before the work begins.
        begins = starts[bisect.bisect_left(starts, gap.end)]
        return _GapPlace(gap.cause, following[begins][1], begins == gap.end)

    def look_up(gap: Gap) -> str | None:
        at = place_of(gap)
        if lined is trace:
            each, _ = following[starts[bisect.bisect_left(starts, gap.end)]]
            return host.line(at, each, gap.start, gap.end)
        return most_common(host.line(at, other) for other in alike[at.work])

    return _looked_up(gaps, place_of, look_up)


def idle_by_line(gaps: Iterable[Gap]) -> list[LineIdle]:
    """Return what lines cost in idle time, those that cost most first."""
    total: dict[tuple[str, str], float] = defaultdict(float)
    number: Counter[tuple[str, str]] = Counter()
    for gap in gaps:
        if gap.line is not None:
            total[gap.cause, gap.line] += gap.length
            number[gap.cause, gap.line] += 1
    rows = [LineIdle(*key, us, number[key]) for key, us in total.items()]
    return sorted(rows, key=lambda row: -row.total_us)


def _looked_up(
    gaps: Sequence[Gap],
    place_of: Callable[[Gap], _GapPlace],
    look_up: Callable[[Gap], str | None],
) -> list[Gap]:
    """Look up one gap of those that are alike, the longest."""
    known: dict[_GapPlace, str | None] = {}
    for gap in sorted(gaps, key=lambda gap: -gap.length):
        if gap.cause in _OF_THE_HOST and len(known) < _MOST and (at := place_of(gap)) not in known:
            known[at] = look_up(gap)
    return [
        gap._replace(line=known.get(place_of(gap))) if gap.cause in _OF_THE_HOST else gap
        for gap in gaps
    ]


def _placed(trace: Trace, launched: Sequence[Launched]) -> Iterable[tuple[Launched, _Place]]:
    starts = [step.start for step in trace.steps]
    seen: Counter[tuple[int, str]] = Counter()
    for each in launched:
        step = bisect.bisect_right(starts, (each.call or each.work).start)
        seen[step, each.work.name] += 1
        yield each, _Place(each.work.name, seen[step, each.work.name])


class _Wait(NamedTuple):
    """A wait for the device, with what stands around it."""

    call: HostCall
    stack: Sequence[HostSpan]


def _end_of(wait: _Wait) -> float:
    return wait.call.end


@final
class _LinedHost:
    """What the host did before a launch, in a trace with lines."""

    def __init__(self, lined: Trace, places: Places, work: Sequence[Launched]) -> None:
        self._places, self._origins = places, Origins(lined, places)
        self._main = lined.main_thread()
        self._idle = IdleStretches(lined)
        waits = waits_of(lined)
        stacks = host_stacks(lined, waits)
        self._waits = sorted((_Wait(c, stacks.get(c, ())) for c in waits), key=_end_of)
        # A thread that only copies launches beside the step, and nobody waits for it.
        threads = {e.call.thread for e in work if e.call and e.work.kind == "kernel"}
        calls = {e.call for e in work if e.call and e.call.thread in threads | {self._main}}
        self._ends = sorted(call.end for call in calls)
        self._spans: dict[str, Sequence[HostSpan | HostCall]] = {
            "data": [s for s in lined.spans if phase_of(s) == "data_wait"],
            "compile": [s for s in lined.spans if is_compile(s)],
            "allocation": [c for c in lined.calls if is_allocation(c)],
        }

    def line(
        self,
        gap: _GapPlace,
        each: Launched,
        since: float | None = None,
        until: float | None = None,
    ) -> str | None:
        """Return the line that made a launch late.

        Args:
            gap: The gap, or the part of it, that is looked at.
            each: The work that ended it, in this trace.
            since: When it began, if it is one of this trace; else the launch before counts.
            until: When it ended.
        """
        call = each.call
        if call is None:
            return None
        late = call.start if until is None else min(call.start, until)
        if gap.cause == "launch" and gap.is_last:
            return self._origins.of(each.stack) or self._places.at(call.thread, call.start)
        begun = self._launch_before(late) if since is None else since
        if gap.cause == "sync":
            # It may lie before the wait for a batch that the gap was divided at.
            return self._of_wait(call.thread, begun if since is None else float("-inf"), late)
        if since is None and gap.cause != "data":
            begun, late = self._beside_data(begun, late, is_last=gap.is_last)
        if gap.cause == "launch":
            # Operators before a wait for a batch: the launch behind that is not their line's.
            return self._places.at(call.thread, (begun + late) / 2)
        if gap.cause == "python":
            return self._of_python(call.thread, begun, late)
        return self._of_longest(self._spans[gap.cause], {call.thread, self._main}, begun, late)

    def _launch_before(self, late: float) -> float:
        """Return when the host had made the launch before."""
        at = bisect.bisect_right(self._ends, late) - 1
        return self._ends[at] if at >= 0 else float("-inf")

    def _beside_data(self, since: float, late: float, *, is_last: bool) -> Interval:
        """Return what lies behind the waits for batches in a stretch, or before them."""
        data = self._spans["data"]
        inside = [s for s in data if s.thread == self._main and s.start < late and s.end > since]
        if not inside:
            return since, late
        if is_last:
            return max(since, min(late, max(s.end for s in inside))), late
        return since, max(since, min(s.start for s in inside))

    def _wait(self, thread: str, since: float, late: float) -> _Wait | None:
        """Return the wait that ended last in a stretch."""
        at = bisect.bisect_right(self._waits, late, key=_end_of)
        for wait in reversed(self._waits[max(0, at - 20) : at]):
            if wait.call.thread in (thread, self._main):
                return wait if wait.call.end >= since else None
        return None

    def _of_wait(self, thread: str, since: float, late: float) -> str | None:
        if (wait := self._wait(thread, since, late)) is None:
            return None
        middle = (wait.call.start + wait.call.end) / 2
        return self._origins.of(wait.stack) or self._places.at(wait.call.thread, middle)

    def _of_python(self, thread: str, since: float, late: float) -> str | None:
        wait = self._wait(thread, since, late)
        begin = since if wait is None else max(since, wait.call.end)
        return self._places.near(thread, *self._idle.longest(thread, begin, late))

    def _of_longest(
        self,
        found: Sequence[HostSpan | HostCall],
        threads: set[str],
        since: float,
        late: float,
    ) -> str | None:
        inside = [s for s in found if s.thread in threads and s.start < late and s.end > since]
        if not inside:
            return None
        longest = max(inside, key=lambda s: min(s.end, late) - max(s.start, since))
        # At its start the line is that of the `for`; what a data set does has lines of its own.
        return self._places.at(longest.thread, max(longest.start, since))

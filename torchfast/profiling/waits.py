"""Where the host waits for the device, and which line makes it.

A line such as ``loss.item()`` needs a number that the device has not computed yet. The host stops
until the queue is empty, and the device then stops until the host has launched again. Each wait is
named by its *site*: the call of the driver and the operator around it, which are the same in every
step and in the steps that were taken with lines.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Final, NamedTuple

from torchfast.profiling.gaps import Gap, is_compile, is_sync
from torchfast.profiling.intervals import Interval, union
from torchfast.profiling.kernels import copy_direction, is_pageable_copy
from torchfast.profiling.places import Origins, Places, most_common
from torchfast.profiling.playback import Wait
from torchfast.profiling.projection import Launched, host_stacks
from torchfast.profiling.trace import HostCall, HostSpan, Trace

# Operators whose result has a size that only the numbers tell, so they wait to allocate it.
_SIZED_BY_NUMBERS: Final = (
    "aten::nonzero",
    "aten::masked_select",
    "aten::unique",
    "aten::_unique2",
    "aten::unique_consecutive",
    "aten::argwhere",
    "aten::bincount",
    "aten::repeat_interleave",
)


# An operator of the host's that takes longer computes something; it does not only make a view.
_COMPUTED_US: Final = 50.0


class WaitSite(NamedTuple):
    """All waits of one kind.

    Attributes:
        operator: The outermost operator around them, such as ``aten::item``.
        call: The call of the runtime.
        line: ``file:line``, None where the trace has no lines.
        num: How many there were.
        host_us: How long the host stood in them.
        idle_us: How long the device was idle after them.
        sized_by_numbers: They are there to learn the size of a result.
        num_bytes: What the same operator copied to the host.
    """

    operator: str
    call: str
    line: str | None
    num: int
    host_us: float
    idle_us: float
    sized_by_numbers: bool
    num_bytes: int


class Site(NamedTuple):
    """What a wait is, wherever it is."""

    operator: str
    sized_by_numbers: bool


class CopySite(NamedTuple):
    """All copies from pageable memory of one kind."""

    name: str
    line: str | None
    num: int
    num_bytes: int
    device_us: float


def wait_sites(
    trace: Trace,
    gaps: Sequence[Gap],
    launched: Sequence[Launched] = (),
    lined: Trace | None = None,
    *,
    cost_us: float | None = None,
) -> list[WaitSite]:
    """Return the places where the host waits, those that cost the device most first.

    Args:
        trace: The trace.
        gaps: When a device was idle.
        launched: The device's work.
        lined: A trace of the same steps with lines.
        cost_us: What idle time all of them cost together; None for the gaps that follow them at
            once. What they cost beyond those is divided by how long the host stood there.
    """
    waits = _waits(trace)
    copied = _bytes_to_host(launched)
    waited_us = sum(call.end - call.start for call, _ in waits)
    lines: dict[Site, list[str | None]] = defaultdict(list)
    if lined is not None and (places := Places(lined)):
        origins = Origins(lined, places)
        calls = waits_of(lined)
        stacks = host_stacks(lined, calls)
        for call in calls:
            stack = stacks.get(call, ())
            line = origins.of(stack) or places.at(call.thread, (call.start + call.end) / 2)
            lines[_site(call, stack)].append(line)
    idle: dict[Site, float] = defaultdict(float)
    by_start = {(call.thread, call.start): site for call, site in waits}
    for gap in gaps:
        if gap.cause == "sync" and (at := by_start.get((gap.thread, gap.moment))):
            idle[at] += gap.length
    at_once = sum(idle.values())
    cost = at_once if cost_us is None else cost_us
    beyond = max(0.0, cost - at_once) / waited_us if waited_us else 0.0
    part = min(1.0, cost / at_once) if at_once else 0.0
    grouped: dict[Site, list[HostCall]] = defaultdict(list)
    for call, site in waits:
        grouped[site].append(call)
    found = [
        WaitSite(
            operator=site.operator,
            call=_longest(calls),
            line=most_common(lines.get(site, [])),
            # An operator that copies and then synchronizes waits once.
            num=max(Counter(call.name for call in calls).values()),
            host_us=_length(calls),
            idle_us=idle[site] * part + _length(calls) * beyond,
            sized_by_numbers=site.sized_by_numbers,
            num_bytes=copied[site.operator],
        )
        for site, calls in grouped.items()
    ]
    return sorted(found, key=lambda s: (-s.idle_us, -s.host_us))


def _length(calls: Sequence[HostCall]) -> float:
    return sum(call.end - call.start for call in calls)


def _longest(calls: Sequence[HostCall]) -> str:
    """Return the call in which most of the time passes."""
    spent: Counter[str] = Counter()
    for call in calls:
        spent[call.name] += round(1e3 * (call.end - call.start))
    return spent.most_common(1)[0][0]


def _bytes_to_host(launched: Sequence[Launched]) -> Counter[str]:
    """Return what was copied to the host, by the outermost operator of the copy."""
    copied: Counter[str] = Counter()
    for each in launched:
        if each.call is not None and copy_direction(each.work.name) == "DtoH":
            copied[_site(each.call, each.stack).operator] += each.work.num_bytes
    return copied


def _waits(trace: Trace) -> list[tuple[HostCall, Site]]:
    """Return the waits inside of the steps, each with its site."""
    calls = waits_of(trace)
    stacks = host_stacks(trace, calls)
    return [(call, _site(call, stacks.get(call, ()))) for call in calls]


def waits_of(trace: Trace) -> list[HostCall]:
    """Return the calls inside of the steps in which a thread that launches waits.

    Those of torch.compile's, which times kernels while it compiles, are part of the compilation.
    """
    steps = trace.steps
    # torch.profiler itself waits when it begins and ends.
    begin = steps[0].start if steps else float("-inf")
    end = steps[-1].end if steps else float("inf")
    inside = [c for c in trace.calls if begin <= c.start <= end]
    # A thread that only copies, to pinned memory or to the device, may wait: it makes nobody late.
    done = {work.correlation for work in trace.work if work.kind == "kernel"}
    working = {c.thread for c in inside if c.correlation in done} | {trace.main_thread()}
    # A copy to memory that is not pinned is called asynchronous and yet returns when it is done.
    pageable = {
        work.correlation
        for work in trace.work
        if is_pageable_copy(work.name) and copy_direction(work.name) == "DtoH"
    }
    calls = [c for c in inside if (is_sync(c) or c.correlation in pageable) and c.thread in working]
    compiles = _compiles(trace)
    calls = [c for c in calls if not _covers(compiles.get(c.thread, ()), c.start)]
    return calls if steps else [c for c in calls if c.name != "cudaDeviceSynchronize"]


def _compiles(trace: Trace) -> dict[str, list[Interval]]:
    """Return when torch.compile was at work, by thread."""
    found: dict[str, list[Interval]] = defaultdict(list)
    for span in filter(is_compile, trace.spans):
        found[span.thread].append((span.start, span.end))
    return {thread: union(spans) for thread, spans in found.items()}


def _covers(spans: Sequence[Interval], moment: float) -> bool:
    at = bisect.bisect_right(spans, (moment, float("inf"))) - 1
    return at >= 0 and moment <= spans[at][1]


def waits_to_play(trace: Trace) -> list[Wait]:
    """Return the waits inside of the steps, each with the operator without which it were not.

    That is the outermost of torch's own: a matrix that is indexed by a mask waits while it looks
    for what the mask selects, and who keeps the size fixed does without the whole of it. What the
    host then computes of what it has fetched, before it launches again, goes with it.
    """
    calls = waits_of(trace)
    stacks = host_stacks(trace, calls)
    on_host = _OnHost(trace)
    found = []
    for call in calls:
        around = [s for s in _operators(call, stacks.get(call, ())) if s.name.startswith("aten::")]
        span = (around[0].start, around[0].end) if around else (call.start, call.end)
        end = on_host.until(call.thread, max(span[1], call.end))
        found.append(Wait(call, (min(span[0], call.start), end)))
    return found


class _OnHost:
    """When the host computes by itself: operators that take long and launch nothing.

    A compilation is none of them, and not what a wait was for.
    """

    def __init__(self, trace: Trace) -> None:
        launches: dict[str, list[float]] = defaultdict(list)
        for thread, spans in _compiles(trace).items():
            launches[thread] += [start for start, _ in spans]
        done = {work.correlation for work in trace.work}
        for call in trace.calls:
            if call.correlation in done:
                launches[call.thread].append(call.start)
        self._launches = {thread: sorted(starts) for thread, starts in launches.items()}
        long: dict[str, list[Interval]] = defaultdict(list)
        for span in trace.spans:
            if span.kind == "op" and span.end - span.start >= _COMPUTED_US:
                long[span.thread].append((span.start, span.end))
        self._long = {thread: sorted(spans) for thread, spans in long.items()}

    def until(self, thread: str, moment: float) -> float:
        """Return when the last of them ends that the next launch of a thread comes after."""
        launches, long = self._launches.get(thread, []), self._long.get(thread, [])
        at = bisect.bisect_left(launches, moment)
        following = launches[at] if at < len(launches) else float("inf")
        found = moment
        at = bisect.bisect_left(long, (moment, 0.0))
        while at < len(long) and long[at][1] <= following:
            found = max(found, long[at][1])
            at += 1
        return found


def _operators(call: HostCall, stack: Sequence[HostSpan]) -> list[HostSpan]:
    own = [s for s in stack if s.kind == "op" and s.thread == call.thread]
    return [s for s in own if not s.name.startswith("autograd::engine")]


def _site(call: HostCall, stack: Sequence[HostSpan]) -> Site:
    operators = [s.name for s in _operators(call, stack)]
    sized = any(n.startswith(_SIZED_BY_NUMBERS) for n in operators)
    return Site(operators[0] if operators else "", sized)


def pageable_copies(
    launched: Sequence[Launched], lined: Trace | None, lined_work: Sequence[Launched]
) -> list[CopySite]:
    """Return the copies between the device and memory that is not pinned, longest first."""
    lines: dict[str, list[str | None]] = defaultdict(list)
    if lined is not None and (places := Places(lined)):
        for each in lined_work:
            if is_pageable_copy(each.work.name) and each.call is not None:
                lines[each.work.name].append(places.at(each.call.thread, each.call.start))
    grouped: dict[str, list[Launched]] = defaultdict(list)
    for each in launched:
        if is_pageable_copy(each.work.name):
            grouped[each.work.name].append(each)
    found = [
        CopySite(
            name,
            most_common(lines.get(name, [])),
            len(those),
            sum(e.work.num_bytes for e in those),
            sum(e.work.end - e.work.start for e in those),
        )
        for name, those in grouped.items()
    ]
    return sorted(found, key=lambda c: -c.device_us)

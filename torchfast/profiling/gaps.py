"""Why the device had nothing to do, gap by gap.

A gap is a stretch in which no kernel, copy or fill ran on a device. It ends with the work that
comes next, and the question is why that did not begin earlier:

- it had been launched before the gap began, so the device itself was not ready: it waited for
  another stream, or took its few microseconds from one kernel to the next (``"device"``);
- the host launched it late. Then what the host did from the beginning of the gap up to the launch
  is the cause: it waited for a batch (``"data"``), compiled (``"compile"``), took or gave back
  memory from the driver (``"allocation"``), had waited for the device and so had nothing queued
  (``"sync"``), was busy launching operators (``"launch"``), or ran Python without any operator
  (``"python"``).

A wait for the device is no idle time while it lasts: the device works then. Its price comes after
it, when the queue is empty and the host has to catch up. So a gap in which a wait ended counts for
that wait, unless the host then ran Python without any operator for most of it.

A host that waits for a batch does nothing else, so that a gap is divided there: what it did before
and behind that is not the loader's.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

from torchfast.profiling.intervals import Interval, gaps, intersection, length, overlap, union
from torchfast.profiling.kernels import is_pageable_copy
from torchfast.profiling.projection import Launched, phase_of
from torchfast.profiling.trace import HostCall, HostSpan, Trace

CAUSES: Final = ("data", "sync", "launch", "python", "compile", "allocation", "device", "unknown")
# The clocks of host and device are matched to about this.
_CLOCKS_US: Final = 1.0
# A wait that ended a little before the gap still emptied the queue: the last kernel may outlast the
# one that was waited for.
_JUST_BEFORE_US: Final = 20.0
# A host that makes no operator for longer is not on its way to the next launch.
_PYTHON_US: Final = 50.0
_SYNCS: Final = ("Synchronize", "cudaMemcpy(", "cuMemcpyDtoH_v2")
_ALLOCATIONS: Final = (
    "cudaMalloc",
    "cudaFree",
    "cudaHostAlloc",
    "cudaMallocHost",
    "cuMemCreate",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemRelease",
    "cudaHostRegister",
    "cudaHostUnregister",
)

T = TypeVar("T", HostSpan, HostCall)


class Gap(NamedTuple):
    """A stretch in which a device had nothing to do, or a part of one with a cause of its own.

    Attributes:
        start: Its beginning.
        end: Its end: something begins to run, or the host begins or ends to wait for a batch.
        cause: One of ``CAUSES``.
        what: The call, operator or annotation that says so; empty where no single one does.
        thread: The thread of the host that was late, if one was.
        moment: When the host was at it.
        line: ``file:line`` of the user's code that the host was at; None where it was not late, or
            where no trace of the loop has lines.
    """

    start: float
    end: float
    cause: str
    what: str
    thread: str
    moment: float
    line: str | None = None

    @property
    def length(self) -> float:
        """How long it is."""
        return self.end - self.start


def is_sync(call: HostCall) -> bool:
    """Return whether a call makes the host wait for the device."""
    return any(text in call.name for text in _SYNCS) or call.name == "cudaMemcpy"


def is_compile(span: HostSpan) -> bool:
    """Return whether a span is work of torch.compile's: its tuning of kernels is, too."""
    return span.name.endswith("(dynamo_timed)") or "compile_fx" in span.name


def is_allocation(call: HostCall) -> bool:
    """Return whether a call takes memory from the driver or gives it back."""
    return call.name.startswith(_ALLOCATIONS)


def busy_of(launched: Sequence[Launched]) -> list[Interval]:
    """Return when a device worked."""
    return union((each.work.start, each.work.end) for each in launched)


def find_gaps(trace: Trace, launched: Sequence[Launched]) -> list[Gap]:
    """Return each gap between the first and the last work of one device, with its cause."""
    host = _Host(trace, launched)
    begins: dict[float, Launched] = {}
    for each in launched:
        begins.setdefault(each.work.start, each)
    return [
        part
        for start, end in gaps(busy_of(launched))
        for part in host.explain(start, end, begins.get(end))
    ]


class _Host:
    """What the host did, looked up by time."""

    def __init__(self, trace: Trace, launched: Sequence[Launched]) -> None:
        pageable = {e.call for e in launched if e.call and is_pageable_copy(e.work.name)}
        # A copy to or from pageable memory is called asynchronous and yet waits.
        syncs = [c for c in trace.calls if is_sync(c) or c in pageable]
        self._syncs = _by_thread(syncs)
        self._sync_ends = {t: sorted((c.end, c) for c in cs) for t, cs in self._syncs.items()}
        self._main = trace.main_thread()
        self._data = _Kind(trace.spans, lambda s: phase_of(s) == "data_wait")
        self._compile = _Kind(trace.spans, is_compile)
        self._allocations = _Kind(trace.calls, is_allocation)
        self._idle = IdleStretches(trace)

    def explain(self, start: float, end: float, following: Launched | None) -> list[Gap]:
        call = following.call if following else None
        if call is None:
            return [Gap(start, end, "unknown", "", "", start)]
        if call.start <= start + _CLOCKS_US:
            return [Gap(start, end, "device", call.name, "", start)]
        return self._late(start, end, call)

    def _late(self, start: float, end: float, call: HostCall) -> list[Gap]:
        """Divide a gap at the waits for batches; what is too short to tell goes with them."""
        late = min(call.start, end)
        # The caller waits in the main thread while autograd's threads launch, so both count.
        threads = {call.thread, self._main}
        if found := self._data.most(threads, start, late):
            whole = Gap(start, end, "data", *found)
        else:
            whole = self._busy(start, end, late, call, start)
        parts: list[Gap] = []
        reached = start
        for part in self._data.parts(threads, start, late, _PYTHON_US):
            begin = max(part.start, reached)
            if begin - reached >= _PYTHON_US:
                parts.append(self._busy(reached, begin, begin, call, reached))
                reached = begin
            if part.end > reached:
                parts.append(Gap(reached, part.end, "data", part.name, part.thread, begin))
                reached = part.end
        if not parts:
            return [whole]
        if late - reached < _PYTHON_US:
            return [*parts[:-1], parts[-1]._replace(end=end)]
        # A wait for the device before that is the cause of what comes behind a short wait only.
        since = reached if whole.cause == "data" else start
        return [*parts, self._busy(reached, end, late, call, since)]

    def _busy(
        self, start: float, end: float, late: float, call: HostCall, waited_since: float
    ) -> Gap:
        """Say what else a host did that was late with a call."""
        threads = {call.thread, self._main}
        if found := self._compile.most(threads, start, late):
            return Gap(start, end, "compile", *found)
        wait = self._wait_before(threads, waited_since, late)
        # What the host does once it has waited is its own: a wait does not make Python slow.
        since = start if wait is None else max(start, wait.end)
        idle = self._idle.longest(call.thread, since, late)
        is_python = idle[1] - idle[0] >= max(_PYTHON_US, (late - start) / 2)
        if wait is not None and not is_python:
            return Gap(start, end, "sync", wait.name, wait.thread, wait.start)
        if found := self._allocations.most(threads, start, late):
            return Gap(start, end, "allocation", *found)
        if is_python:
            return Gap(start, end, "python", "", call.thread, (idle[0] + idle[1]) / 2)
        if late < call.start:  # the part ends with a wait for a batch, and the call is behind that
            return Gap(start, end, "launch", "", call.thread, (start + late) / 2)
        return Gap(start, end, "launch", call.name, call.thread, call.start)

    def _wait_before(self, threads: set[str], start: float, late: float) -> HostCall | None:
        """Return the wait for the device that ended last in the gap, or just before it."""
        latest: HostCall | None = None
        for thread in threads:
            ends = self._sync_ends.get(thread, [])
            at = bisect.bisect_right(ends, late, key=lambda each: each[0]) - 1
            if at >= 0 and ends[at][0] >= start - _JUST_BEFORE_US:
                found = ends[at][1]
                latest = found if latest is None or found.end > latest.end else latest
        return latest


class IdleStretches:
    """When a thread of the host was in no operator and in no call of the driver, waits aside."""

    def __init__(self, trace: Trace) -> None:
        self._main = trace.main_thread()
        busy: dict[str, list[Interval]] = defaultdict(list)
        for span in trace.spans:
            if span.kind == "op":
                busy[span.thread].append((span.start, span.end))
        for call in trace.calls:
            if not is_sync(call):
                busy[call.thread].append((call.start, call.end))
        self._work = {thread: union(each) for thread, each in busy.items()}
        self._joined: dict[str, list[Interval]] = {}

    def longest(self, thread: str, start: float, late: float) -> Interval:
        """Return the longest stretch in which neither a thread nor the main one did work."""
        busy = self._work_of(thread)
        at = max(0, bisect.bisect_right(busy, (start, float("inf"))) - 1)
        reached, longest = start, (start, start)
        while at < len(busy) and busy[at][0] < late:
            begin, finish = busy[at]
            if begin - reached > longest[1] - longest[0]:
                longest = (reached, begin)
            reached = max(reached, finish)
            at += 1
        return (reached, late) if late - reached > longest[1] - longest[0] else longest

    def _work_of(self, thread: str) -> list[Interval]:
        """Return when a thread or the main one, which may wait for it, was in operators."""
        if thread not in self._joined:
            both = [*self._work.get(thread, []), *self._work.get(self._main, [])]
            self._joined[thread] = union(both)
        return self._joined[thread]


class _Part(NamedTuple):
    """A part of a stretch, and what took it up."""

    start: float
    end: float
    name: str
    thread: str


class _Kind(Generic[T]):
    """The calls or spans of one kind, by thread."""

    def __init__(self, events: Sequence[T], wanted: Callable[[T], bool]) -> None:
        self._events: dict[str, list[T]] = _by_thread([each for each in events if wanted(each)])
        self._busy = {t: union((e.start, e.end) for e in es) for t, es in self._events.items()}

    def parts(self, threads: set[str], start: float, end: float, least: float) -> list[_Part]:
        """Return the parts of a stretch that were taken up, those that are not too short."""
        found: list[_Part] = []
        for thread in threads:
            busy = self._busy.get(thread, [])
            if overlap(busy, start, end) >= least:
                for begin, finish in intersection(busy, [(start, end)]):
                    found.append(_Part(begin, finish, self._at(thread, begin).name, thread))
        return sorted(part for part in found if part.end - part.start >= least)

    def most(self, threads: set[str], start: float, end: float) -> tuple[str, str, float] | None:
        """Return name, thread and moment of what took at least half of a stretch, if it did."""
        for thread in threads:
            busy = self._busy.get(thread)
            if not busy or overlap(busy, start, end) < (end - start) / 2:
                continue
            inside = length(intersection(busy, [(start, end)]))
            event = self._at(thread, end, start)
            if inside > 0:
                return event.name, thread, max(start, event.start)
        return None

    def _at(self, thread: str, moment: float, since: float | None = None) -> T:
        """Return the last to begin by a moment of those that have not ended before another."""
        events = self._events[thread]
        at = bisect.bisect_right(events, moment, key=lambda each: each.start) - 1
        while at > 0 and events[at].end <= (moment if since is None else since):
            at -= 1
        return events[max(at, 0)]


def _by_thread(events: Sequence[T]) -> dict[str, list[T]]:
    found: dict[str, list[T]] = defaultdict(list)
    for event in events:
        found[event.thread].append(event)
    return found

"""What a trace says, as objects: work of the device, calls and operators of the host.

torch.profiler writes one list of events of many kinds. Those that tell where the time goes are:

- *device work*: kernels, copies and fills, each on a stream of a device;
- *launches*: the calls of the CUDA runtime or driver that the host made; ``correlation`` joins a
  launch to the work that it started, which may be many kernels when it launched a graph;
- *operators* of the host (``aten::mm``), *annotations* (``record_function``, the optimizer, the
  data loader, ``ProfilerStep#3``) and *frames* of Python, each on a thread;
- *lines*: calls made by the user's own code, which `torchfast.profile` adds to the file.

Times are in microseconds since the first event, so that a float holds a nanosecond of them.
"""

from __future__ import annotations

import bisect
import math
import os
import re
import sys
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, final

from torchfast._core.errors import TraceError
from torchfast.profiling.trace_file import TraceFile

# An event takes some 400 bytes here, and 20 us to look at. More are not kept: a window of steps is
# chosen instead.
MOST_EVENTS: Final = 600_000
# A file below this cannot hold so many.
_SURELY_SMALL_BYTES: Final = 100_000_000
# The category of the events that torchfast adds, see torchfast/profiling/lines.py.
LINE: Final = "torchfast_line"
STEP: Final = re.compile(r"ProfilerStep#?\s*(\d+)")

_DEVICE: Final = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
_CALLS: Final = frozenset({"cuda_runtime", "cuda_driver", "hip_runtime"})
_SPANS: Final = {
    "cpu_op": "op",
    "user_annotation": "annotation",
    "python_function": "frame",
    LINE: "line",
    # How versions before 1.12 called them.
    "Operator": "op",
    "operator": "op",
}

_FACTS: Final = ("Input Dims", "Input type")
# A sample of this many is enough to know how the events lie in time.
_SAMPLE: Final = 200_000
# What a number of an event can be; what lies beyond is none that a profiler wrote.
_LARGEST: Final = 1 << 63


class DeviceWork(NamedTuple):
    """A kernel, a copy or a fill."""

    name: str
    kind: str
    device: int
    stream: int
    start: float
    end: float
    correlation: int
    num_bytes: int = 0


class HostCall(NamedTuple):
    """A call of the CUDA runtime or driver."""

    name: str
    start: float
    end: float
    thread: str
    correlation: int


class HostSpan(NamedTuple):
    """An operator, an annotation, a frame or a line of the host.

    ``facts`` holds the shapes and types of an operator's inputs, where the trace has them.
    """

    name: str
    kind: str
    start: float
    end: float
    thread: str
    facts: Mapping[str, Any] | None = None


class MemoryEvent(NamedTuple):
    """Memory taken (or, if negative, given back) on a device, and what is taken after it."""

    time: float
    device: str
    num_bytes: int
    allocated: int
    reserved: int
    address: int
    thread: str


@final
@dataclass(kw_only=True)
class Trace:
    """The events of a trace, each kind sorted by time.

    Attributes:
        name: The name of the file.
        device_names: By index.
        properties: What the trace says of each device.
        remarks: What was left out or is missing.
        num_events: How many events the file holds.
    """

    name: str
    work: list[DeviceWork] = field(default_factory=list)
    calls: list[HostCall] = field(default_factory=list)
    spans: list[HostSpan] = field(default_factory=list)
    memory: list[MemoryEvent] = field(default_factory=list)
    properties: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    num_events: int = 0

    @property
    def device_names(self) -> list[str]:
        """The names of the devices, by index."""
        return [_text(each.get("name", "?")) for each in self.properties]

    @property
    def steps(self) -> list[HostSpan]:
        """The steps that were annotated as such, in order, each once."""
        found = [s for s in self.spans if s.kind == "annotation" and STEP.match(s.name)]
        return sorted({s.name: s for s in found}.values(), key=lambda s: s.start)

    def keep_steps(self, number: int) -> None:
        """Forget the annotations of the steps after the first ones, such as one that was cut."""
        extra = {step.name for step in self.steps[number:]}
        self.spans = [s for s in self.spans if s.name not in extra]

    def main_thread(self) -> str:
        """Return the thread that makes the steps; of a trace without, the one with most events."""
        steps = self.steps
        if steps:
            return steps[0].thread
        annotated = Counter(s.thread for s in self.spans if s.kind in ("annotation", "line"))
        every = annotated or Counter(s.thread for s in self.spans)
        return every.most_common(1)[0][0] if every else ""


def read_trace(path: str | os.PathLike[str], *, most_events: int = MOST_EVENTS) -> Trace:
    """Read a trace, or as many steps of it as `most_events` events hold.

    Args:
        path: A file of torch.profiler's, ``.json`` or ``.json.gz``.
        most_events: The most that is kept, which bounds the memory taken.

    Raises:
        TraceError: The file is empty, no trace, or one without any event of torch.profiler.
        OSError: It cannot be read.
    """
    file = TraceFile(path)
    window = _Window()
    remarks = []
    # Packed by gzip a trace is about a twentieth.
    size = file.path.stat().st_size * (20 if file.path.suffix == ".gz" else 1)
    if size > _SURELY_SMALL_BYTES or most_events < MOST_EVENTS:
        window, remark = _window(file, most_events)
        remarks += [remark] if remark else []
    trace = Trace(name=file.path.name)
    for event in file.events():
        trace.num_events += 1
        _keep(trace, event, window)
    trace.remarks = remarks + file.remarks
    properties = file.header.get("deviceProperties")
    properties = properties if isinstance(properties, list) else []
    trace.properties = [p for p in properties if isinstance(p, dict)]
    trace.facts = {k: v for k, v in file.header.items() if isinstance(v, (str, int, float))}
    if not (trace.work or trace.calls or trace.spans):
        raise TraceError(
            f"{file.path} has {trace.num_events} events but none of torch.profiler's (kernel, "
            "cuda_runtime, cpu_op, user_annotation, python_function): it is a trace of another "
            "tool, or nothing ran while it was taken; take one with torchfast.profile()"
        )
    _settle(trace)
    if file.remarks:  # cut short, or damaged: what is missing may be the work of the last steps
        _leave_out_unread(trace, file)
    return trace


def _leave_out_unread(trace: Trace, file: TraceFile) -> None:
    """Forget the steps whose work of the device does not stand in what was read of a file."""
    if not trace.calls and not trace.work:
        return  # a trace of the host alone
    done = {work.correlation for work in trace.work}
    last = max((c.start for c in trace.calls if c.correlation in done), default=-math.inf)
    steps = trace.steps
    whole = sum(1 for step in steps if step.end <= last)
    if last < 0 or (steps and not whole):
        raise TraceError(
            f"{file.path} was read only in part ({file.remarks[0]}), and that part has the work of "
            "the device of no whole step: nothing can be said of the steps; take the trace again"
        )
    if whole < len(steps):
        trace.keep_steps(whole)
        trace.remarks.append(
            f"{whole} of the {len(steps)} steps that were read are looked at: of the others the "
            "work of the device is missing, or may be"
        )


class _Window:
    """The stretch of time that is kept.

    Work of the device belongs to the moment of its *launch*: a host that is ahead launches the
    last steps of the stretch long before the device comes to them.
    """

    def __init__(
        self, begin: float = -math.inf, end: float = math.inf, launches: _Launches | None = None
    ) -> None:
        self.begin, self.end = begin, end
        self._kept: set[int] = set()
        self._known: list[int] | array[int] = []
        if launches is not None:
            self._kept = {n for n, start in launches.all() if begin <= start <= end}
            self._known = array("q", sorted(launches.numbers))

    def has(self, time: float) -> bool:
        """Return whether a moment is kept."""
        return self.begin <= time <= self.end

    def has_work(self, start: float, correlation: int) -> bool:
        """Return whether work of the device is kept: by its launch, without one by its start."""
        if correlation in self._kept:
            return True
        at = bisect.bisect_left(self._known, correlation)
        is_known = at < len(self._known) and self._known[at] == correlation
        return not is_known and self.has(start)


class _Launches:
    """When each launch was made, in as little memory as that takes."""

    def __init__(self) -> None:
        self.numbers = array("q")
        self.starts = array("d")

    def add(self, number: int, start: float) -> None:
        if number > 0:
            self.numbers.append(number)
            self.starts.append(start)

    def all(self) -> Iterator[tuple[int, float]]:
        return zip(self.numbers, self.starts, strict=True)


def _window(file: TraceFile, most: int) -> tuple[_Window, str]:
    """Return the stretch of time to keep, and a remark if it is not all of it."""
    steps: dict[str, tuple[float, float]] = {}
    launches = _Launches()
    sample: list[tuple[float, int]] = []  # start, and of work of the device its launch
    number, every = 0, 1
    for event in file.events():
        start, end = _times(event)
        if event.get("name") == "[memory]":
            start = end = _moment(event)
        if math.isnan(start):
            continue
        number += 1
        category, correlation = _category(event), 0
        if category == "user_annotation" and STEP.match(str(event.get("name"))):
            steps[str(event["name"])] = (start, end)
        elif category in _CALLS:
            launches.add(_correlation(event), start)
        elif category in _DEVICE:
            correlation = _correlation(event)
        if number % every == 0:
            sample.append((start, correlation))
            if len(sample) > _SAMPLE:
                sample, every = sample[::2], every * 2
    if number <= most:
        return _Window(), ""
    asked = {correlation for _, correlation in sample}
    launched = {n: start for n, start in launches.all() if n in asked}
    starts = sorted(launched.get(correlation, start) for start, correlation in sample)
    ordered = sorted(steps.values())
    begin = ordered[0][0] if ordered else starts[0]
    inside = [t for t in starts if t >= begin]
    limit = inside[min(len(inside) - 1, int(most / every))]
    whole = [end for _, end in ordered if end <= limit]
    end = whole[-1] if whole else limit
    what = f"its first {len(whole)} of {len(ordered)} steps" if whole else "its beginning"
    return _Window(
        begin, end, launches
    ), f"{file.path.name} has {number} events; {what} are looked at"


def _times(event: Mapping[str, Any]) -> tuple[float, float]:
    if event.get("ph") != "X":
        return math.nan, math.nan
    try:
        start = float(event["ts"])
        end = start + max(0.0, float(event.get("dur") or 0.0))
    except (KeyError, TypeError, ValueError, OverflowError):
        return math.nan, math.nan
    return (start, end) if math.isfinite(end) else (math.nan, math.nan)


def _moment(event: Mapping[str, Any]) -> float:
    """Return the time of an event that has no length, NaN if it has none."""
    try:
        time = float(event["ts"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return math.nan
    return time if math.isfinite(time) else math.nan


def _category(event: Mapping[str, Any]) -> str:
    category = event.get("cat")
    return category if isinstance(category, str) else ""


def _args(event: Mapping[str, Any]) -> dict[str, Any]:
    args = event.get("args")
    return args if isinstance(args, dict) else {}


def _correlation(event: Mapping[str, Any]) -> int:
    args = _args(event)
    return _int(args.get("correlation", args.get("External id")))


def _keep(trace: Trace, event: dict[str, Any], window: _Window) -> None:
    category, args = _category(event), _args(event)
    if event.get("name") == "[memory]":
        _keep_memory(trace, event, args, window)
        return
    start, end = _times(event)
    if math.isnan(start):
        return
    name = _text(event.get("name", ""))
    if category in _DEVICE:
        correlation = _correlation(event)
        if not window.has_work(start, correlation):
            return
        trace.work.append(
            DeviceWork(
                sys.intern(name),
                _DEVICE[category],
                _int(args.get("device", event.get("pid"))),
                _int(args.get("stream", event.get("tid"))),
                start,
                end,
                correlation,
                _int(args.get("bytes"), 0),
            )
        )
        return
    if not window.has(start):
        return
    thread = _text(f"{event.get('pid')}/{event.get('tid')}")
    if category in _CALLS:
        correlation = _correlation(event)
        trace.calls.append(HostCall(sys.intern(name), start, end, sys.intern(thread), correlation))
    elif category in _SPANS:
        kind = _SPANS[category]
        facts = {k: args[k] for k in _FACTS if args.get(k)} if kind == "op" else None
        trace.spans.append(
            HostSpan(sys.intern(name), kind, start, end, sys.intern(thread), facts or None)
        )


def _keep_memory(
    trace: Trace, event: Mapping[str, Any], args: Mapping[str, Any], window: _Window
) -> None:
    time = _moment(event)
    if math.isnan(time) or not window.has(time):
        return
    # The type is the number of c10::DeviceType: 0 is the CPU, 1 CUDA, 20 a backend of its own.
    kind = _int(args.get("Device Type"), 0)
    device = "cpu" if kind == 0 else f"cuda:{_int(args.get('Device Id'), 0)}"
    trace.memory.append(
        MemoryEvent(
            time,
            device,
            _int(args.get("Bytes"), 0),
            _int(args.get("Total Allocated"), 0),
            _int(args.get("Total Reserved"), 0),
            _int(args.get("Addr"), 0),
            _text(f"{event.get('pid')}/{event.get('tid')}"),
        )
    )


def _settle(trace: Trace) -> None:
    """Sort what was read and count time from the first event."""
    everything = (trace.work, trace.calls, trace.spans)
    zero = min(event.start for events in everything for event in events)
    trace.work = _shifted(trace.work, zero)
    trace.calls = _shifted(trace.calls, zero)
    trace.spans = _shifted(trace.spans, zero)
    trace.memory = sorted(
        (event._replace(time=event.time - zero) for event in trace.memory),
        key=lambda event: event.time,
    )


def _shifted(events: list[Any], zero: float) -> list[Any]:
    moved: Iterator[Any] = (
        e._replace(start=round(e.start - zero, 3), end=round(e.end - zero, 3)) for e in events
    )
    return sorted(moved, key=lambda event: (event.start, -event.end))


def _int(value: Any, default: int = -1) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return default
    return number if -_LARGEST <= number < _LARGEST else default


def _text(value: Any) -> str:
    """Return a name as text that can be written: half of a surrogate pair cannot."""
    text = str(value)
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")

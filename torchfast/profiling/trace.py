"""What a trace says, as objects: work of the device, calls and operators of the host.

torch.profiler writes one list of events of many kinds. Those that tell where the time goes are:

- *device work*: kernels, copies and fills, each on a stream of a device;
- *launches*: the calls of the CUDA runtime or driver that the host made; ``correlation`` joins a
  launch to the work that it started, which may be many kernels when it launched a graph;
- *operators* of the host (``aten::mm``), *annotations* (``record_function``, the optimizer, the
  data loader, ``ProfilerStep#3``) and *frames* of Python, each on a thread;
- *lines*: when the user's own code is at which, and *held* memory: which blocks are parameters,
  gradients, state of an optimizer or a batch; `torchfast.profile` adds both to the file.

Times are in microseconds since the first event, so that a float holds a nanosecond of them.
"""

from __future__ import annotations

import gc
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, final

from torchfast._core.errors import TraceError
from torchfast.profiling.trace_events import LINE as LINE
from torchfast.profiling.trace_events import STEP as STEP
from torchfast.profiling.trace_events import DeviceWork as DeviceWork
from torchfast.profiling.trace_events import HeldBlock as HeldBlock
from torchfast.profiling.trace_events import HostCall as HostCall
from torchfast.profiling.trace_events import HostSpan as HostSpan
from torchfast.profiling.trace_events import MemoryEvent as MemoryEvent
from torchfast.profiling.trace_file import TraceFile
from torchfast.profiling.trace_window import TraceWindow, text_of

# An event takes some 400 bytes here. More are not kept: a window of steps is chosen instead.
MOST_EVENTS: Final = 600_000


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
    held: list[HeldBlock] = field(default_factory=list)
    properties: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    num_events: int = 0

    @property
    def device_names(self) -> list[str]:
        """The names of the devices, by index."""
        return [text_of(each.get("name", "?")) for each in self.properties]

    @property
    def steps(self) -> list[HostSpan]:
        """The steps that were annotated as such, in order, each once.

        Where two profilers annotate them, as one of the script's own does even when it is off, the
        steps of one overlap those of the other: they are those of whose came first.
        """
        found = [s for s in self.spans if s.kind == "annotation" and STEP.match(s.name)]
        steps: dict[str, HostSpan] = {}
        end = -math.inf
        for span in sorted(found, key=lambda s: s.start):
            if span.start >= end:
                steps[span.name], end = span, span.end
        return sorted(steps.values(), key=lambda s: s.start)

    def keep_steps(self, number: int) -> None:
        """Forget the annotations of the steps after the first ones, such as one that was cut."""
        kept = {id(step) for step in self.steps[:number]}
        self.spans = [
            s
            for s in self.spans
            if s.kind != "annotation" or not STEP.match(s.name) or id(s) in kept
        ]

    def main_thread(self) -> str:
        """Return the thread that makes the steps; of a trace without, the one with most events."""
        steps = self.steps
        if steps:
            return steps[0].thread
        annotated = Counter(s.thread for s in self.spans if s.kind in ("annotation", "line"))
        every = annotated or Counter(s.thread for s in self.spans)
        return every.most_common(1)[0][0] if every else ""


def read_trace(
    path: str | os.PathLike[str],
    *,
    most_events: int = MOST_EVENTS,
    progress: Callable[[float], None] | None = None,
) -> Trace:
    """Read a trace, or as many steps of it as `most_events` events hold.

    A file is read once, however long it is; twice only where there is no more room when its first
    step is found.

    Args:
        path: A file of torch.profiler's, ``.json`` or ``.json.gz``.
        most_events: The most that is kept, which bounds the memory taken.
        progress: Told now and then which part of the file is read, from 0 to 1.

    Raises:
        TraceError: The file is empty, no trace, or one without any event of torch.profiler.
        OSError: It cannot be read.
    """
    with _without_collecting():
        return _read_trace(TraceFile(path), most_events, progress)


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Look for no cycles in what is kept: there are none, and to look takes as long as to read."""
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_collecting:
            gc.enable()


def _read_trace(
    file: TraceFile, most_events: int, progress: Callable[[float], None] | None
) -> Trace:
    chosen = _read(file, most_events, progress)
    trace = Trace(name=file.path.name, num_events=chosen.num_events)
    remark = chosen.choose(file.path.name)
    trace.work, trace.calls = chosen.work, chosen.calls
    trace.spans, trace.memory, trace.held = chosen.spans, chosen.memory, chosen.held
    trace.remarks = ([remark] if remark else []) + file.remarks
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


def _read(
    file: TraceFile, most_events: int, progress: Callable[[float], None] | None
) -> TraceWindow:
    chosen = TraceWindow(most_events)
    for events in file.event_lists():
        chosen.add(events)
        if progress is not None:
            progress(file.part_read)
    return _read_again(file, chosen) if chosen.lacks_beginning else chosen


def _read_again(file: TraceFile, before: TraceWindow) -> TraceWindow:
    chosen = TraceWindow(before.most, begin=before.first_step)
    for events in file.event_lists():
        chosen.add(events)
    return chosen


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


def _settle(trace: Trace) -> None:
    """Sort what was read and count time from the first event."""
    everything = (trace.work, trace.calls, trace.spans)
    zero = min(event.start for events in everything for event in events)
    trace.work = _shifted(trace.work, zero)
    trace.calls = _shifted(trace.calls, zero)
    trace.spans = _shifted(trace.spans, zero)
    trace.memory = _counted_from(trace.memory, zero)
    trace.held = _counted_from(trace.held, zero)


def _counted_from(events: list[Any], zero: float) -> list[Any]:
    moved = (event._replace(time=event.time - zero) for event in events)
    return sorted(moved, key=lambda event: event.time)


def _shifted(events: list[Any], zero: float) -> list[Any]:
    if not events:
        return events
    kind = type(events[0])
    at = kind._fields.index("start")  # and behind it the end; _replace takes twice as long
    moved: Iterator[Any] = (
        kind._make((*e[:at], round(e[at] - zero, 3), round(e[at + 1] - zero, 3), *e[at + 2 :]))
        for e in events
    )
    return sorted(moved, key=lambda event: (event.start, -event.end))

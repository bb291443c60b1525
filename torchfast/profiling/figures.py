"""The figures of a trace: what was busy, what was idle and why, and what the kernels were.

The window is the time from the first work of the device to the end of the last. What was launched
before the first step or after the last is left out, and so is the idle time at either end, which is
the profiler's and not the loop's.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, final

from torchfast.profiling import kernels
from torchfast.profiling.gaps import Gap, busy_of, find_gaps
from torchfast.profiling.intervals import Interval, intersection, length, union
from torchfast.profiling.playback import Playback, usual
from torchfast.profiling.projection import Launched, PhaseTime, phase_of, phase_times, project
from torchfast.profiling.trace import HostSpan, Trace
from torchfast.profiling.waits import waits_to_play

_CASTS: Final = ("aten::_to_copy",)
# The causes of idle time that lie with the host; what is left is the device's own, or unknown.
BY_HOST: Final = ("data", "sync", "launch", "python", "compile", "allocation")


class Row(NamedTuple):
    """A kernel or an operator, over all steps."""

    name: str
    kind: str
    total_us: float
    num: int
    tensor_cores: str = "unknown"


class Copies(NamedTuple):
    """The copies of one kind, such as ``Memcpy HtoD (Pageable -> Device)``."""

    name: str
    num: int
    num_bytes: int
    total_us: float
    hidden_us: float


@final
@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one device did; times in microseconds over all steps.

    Attributes:
        device: The index of the device, -1 without one.
        num_devices: How many the trace has work on.
        num_steps: How many steps were annotated; 1 if none was.
        window_us: From the first work to the end of the last; on the host without a device.
        step_us: The time of one step: from the first work of the first step to the first work of
            the last, over the steps between, on the stream that works most: copies on a stream of
            their own may be steps ahead. Of one step alone its annotation, or its work if that
            takes longer.
        busy_us: When any kernel, copy or fill ran.
        idle_us: The rest of the window.
        idle_by_cause: The idle time by the causes of torchfast/profiling/gaps.py.
        waits_us: What of the idle time is there because the host had waited for the device, at the
            host's own pace; see torchfast/profiling/playback.py. Its share of the window is that
            which it has without the profiler, and ``own_ms`` tells its time.
        late_us: What of it is there because the host was late all the same, likewise.
        untraced_us: What a step took before the profiler began; None where nobody looked.
        pace: What the host's own work takes of the time that it took under the profiler.
        own_time: What all together takes at that pace, likewise.
        gaps: Every gap.
        phases: The time of each phase on the device.
        host_phases: The time of each phase on the main thread of the host.
        top_kernels: The kernels that took most time, first.
        top_operators: The operators whose kernels took most time, first.
        copies: The copies by kind.
        kernel_us: All kernels added up.
        num_kernels: How many there were.
        num_launches: The launches of the host; a graph is one.
        num_tiny: The kernels below ``kernels.TINY_US``.
        num_replayed: The kernels of replays of CUDA graphs.
        by_category: Kernel time by what the kernels do.
        cast_us: Kernel time that changes one type into another.
        arithmetic_us: Kernel time of products, convolutions and attention.
        tensor_core_us: What of it ran on tensor cores.
        no_tensor_core_us: What of it did not; of the rest the name does not tell.
        fp32_product_us: What of it was float32 without tensor cores.
        communication_us: When a collective ran.
        exposed_communication_us: When a collective ran and nothing else.
        exposed_h2d_us: When batches were copied to the device and nothing else ran.
        num_compiles: How often torch.compile compiled in the steps.
    """

    device: int = -1
    num_devices: int = 0
    num_steps: int = 1
    window_us: float = 0.0
    step_us: float = 0.0
    busy_us: float = 0.0
    idle_us: float = 0.0
    idle_by_cause: dict[str, float] = field(default_factory=dict)
    waits_us: float = 0.0
    late_us: float = 0.0
    untraced_us: float | None = None
    pace: float = 1.0
    own_time: float = 1.0
    gaps: list[Gap] = field(default_factory=list)
    busy: list[Interval] = field(default_factory=list)
    launched: list[Launched] = field(default_factory=list)
    phases: list[PhaseTime] = field(default_factory=list)
    host_phases: dict[str, float] = field(default_factory=dict)
    top_kernels: list[Row] = field(default_factory=list)
    top_operators: list[Row] = field(default_factory=list)
    copies: list[Copies] = field(default_factory=list)
    kernel_us: float = 0.0
    num_kernels: int = 0
    num_launches: int = 0
    num_tiny: int = 0
    num_replayed: int = 0
    by_category: dict[str, float] = field(default_factory=dict)
    cast_us: float = 0.0
    arithmetic_us: float = 0.0
    tensor_core_us: float = 0.0
    no_tensor_core_us: float = 0.0
    fp32_product_us: float = 0.0
    communication_us: float = 0.0
    exposed_communication_us: float = 0.0
    exposed_h2d_us: float = 0.0
    num_compiles: int = 0

    def share(self, us: float) -> float:
        """Return a time as a part of the window."""
        return us / self.window_us if self.window_us else 0.0

    @property
    def own_part(self) -> float:
        """What counts of the idle time of a late host: what a wait or the profiler made is not."""
        late = sum(self.idle_by_cause.get(cause, 0.0) for cause in BY_HOST if cause != "sync")
        return min(1.0, self.late_us / late) if late else 1.0

    def of_kernels(self, us: float) -> float:
        """Return a time as a part of the time of all kernels."""
        return us / self.kernel_us if self.kernel_us else 0.0

    def per_step_ms(self, us: float) -> float:
        """Return a time as milliseconds a step."""
        return us / 1e3 / self.num_steps

    def own_ms(self, us: float) -> float:
        """Return what a wait or a late host costs as milliseconds a step, without the profiler."""
        return self.per_step_ms(us) * self.own_time


def measure_trace(trace: Trace, untraced_us: float | None = None) -> Figures:
    """Return the figures of the busiest device of a trace, or of the host if there is none.

    Args:
        trace: The trace.
        untraced_us: What a step took the host before the profiler began, if that is known.
    """
    host = replace(_host_figures(trace), untraced_us=untraced_us)
    launched = inside_steps(trace, project(trace))
    if not launched:
        return host
    by_device: dict[int, list[Launched]] = defaultdict(list)
    for each in launched:
        by_device[each.work.device].append(each)
    device = max(by_device, key=lambda d: length(busy_of(by_device[d])))
    return _device_figures(trace, by_device[device], device, len(by_device), host)


def inside_steps(trace: Trace, launched: Sequence[Launched]) -> list[Launched]:
    """Return the work that the steps launched; all of it, where no steps are annotated."""
    steps = trace.steps
    if not steps:
        return list(launched)
    begin, end = steps[0].start, steps[-1].end
    return [e for e in launched if begin <= (e.call or e.work).start <= end]


def _device_figures(
    trace: Trace, launched: list[Launched], device: int, num_devices: int, host: Figures
) -> Figures:
    busy = busy_of(launched)
    window, busy_us = busy[-1][1] - busy[0][0], length(busy)
    gaps = find_gaps(trace, launched)
    idle: dict[str, float] = defaultdict(float)
    for gap in gaps:
        idle[gap.cause] += gap.length
    run = [e for e in launched if e.work.kind == "kernel"]
    times = [e.work.end - e.work.start for e in run]
    by_category: dict[str, float] = defaultdict(float)
    by_cores: dict[str, float] = defaultdict(float)
    fp32 = casts = 0.0
    for each, time in zip(run, times, strict=True):
        name = each.work.name
        by_category[kernels.category(name)] += time
        if kernels.category(name) in kernels.ARITHMETIC:
            by_cores[kernels.tensor_cores(name)] += time
        fp32 += time if is_fp32_product(each) else 0.0
        casts += time if is_cast(each) else 0.0
    waits_us, late_us, pace, own_time = _at_own_pace(trace, launched, idle, host)
    talk = [e for e in run if kernels.category(e.work.name) == "communication"]
    batches = [e for e in launched if e.phase == "h2d"]
    return Figures(
        device=device,
        num_devices=num_devices,
        num_steps=host.num_steps,
        window_us=window,
        step_us=_step_us(trace, launched, window),
        busy_us=busy_us,
        idle_us=window - busy_us,
        idle_by_cause=dict(idle),
        waits_us=waits_us,
        late_us=late_us,
        untraced_us=host.untraced_us,
        pace=pace,
        own_time=own_time,
        gaps=gaps,
        busy=busy,
        launched=launched,
        phases=phase_times(launched),
        host_phases=host.host_phases,
        top_kernels=_top_kernels(run),
        top_operators=_top_operators(run),
        copies=_copies(launched),
        kernel_us=sum(times),
        num_kernels=len(run),
        num_launches=len({e.work.correlation for e in launched}),
        num_tiny=sum(map(is_tiny, run)),
        num_replayed=sum(each.phase == "replay" for each in run),
        by_category=dict(sorted(by_category.items(), key=lambda item: -item[1])),
        cast_us=casts,
        arithmetic_us=sum(by_cores.values()),
        tensor_core_us=by_cores["yes"],
        no_tensor_core_us=by_cores["no"],
        fp32_product_us=fp32,
        communication_us=length(busy_of(talk)),
        exposed_communication_us=_exposed(talk, launched),
        exposed_h2d_us=_exposed(batches, launched),
        num_compiles=host.num_compiles,
    )


def _at_own_pace(
    trace: Trace,
    launched: Sequence[Launched],
    idle: dict[str, float],
    host: Figures,
) -> tuple[float, float, float, float]:
    """Return what waits and what else of the host cost the device, and `pace` and `own_time`."""
    by_host = sum(idle.get(cause, 0.0) for cause in BY_HOST)
    main, steps = trace.main_thread(), trace.steps
    # A thread that fetches ahead waits for batches all the time, and nobody for it.
    own = [s for s in trace.spans if s.thread == main]
    data = [(s.start, s.end) for s in own if phase_of(s) == "data_wait"]
    slowdown = 1.0
    if host.untraced_us and steps:
        slowdown = max(1.0, usual([s.end - s.start for s in steps]) / host.untraced_us)
    ends = [*(s.start for s in steps), steps[-1].end] if steps else []
    playback = Playback(launched, waits_to_play(trace), data, ends)
    found = playback.played(slowdown)
    as_traced = found if found.pace == 1.0 else playback.played()
    own_time = found.elapsed_us / as_traced.elapsed_us if as_traced.elapsed_us else 1.0
    if not as_traced.idle_us:
        return 0.0, by_host, found.pace, own_time
    # The model knows nothing of what the device takes from one kernel to the next, so that its
    # idle time under the profiler is not quite the one that was seen.
    seen = by_host / as_traced.idle_us / own_time
    waits_us = max(0.0, found.idle_us - found.without_waits_us) * seen
    return waits_us, found.idle_us * seen - waits_us, found.pace, own_time


def _exposed(some: Sequence[Launched], launched: Sequence[Launched]) -> float:
    """Return how long some work ran and nothing else did."""
    own = {id(each) for each in some}
    times, rest = busy_of(some), busy_of([e for e in launched if id(e) not in own])
    return length(times) - length(intersection(times, rest))


def _step_us(trace: Trace, launched: Sequence[Launched], window: float) -> float:
    """Return the time of one step; a window has a step's end too few to be divided by the steps."""
    steps = trace.steps
    starts = [step.start for step in steps]
    on_stream: dict[int, float] = defaultdict(float)
    firsts: dict[int, dict[int, float]] = defaultdict(dict)
    for each in launched:
        stream, start = each.work.stream, each.work.start
        on_stream[stream] += each.work.end - start
        number = bisect.bisect_right(starts, (each.call or each.work).start) - 1
        firsts[stream][number] = min(firsts[stream].get(number, math.inf), start)
    # What works in one step only, such as the copies of a checkpoint, tells of no step.
    main = max(on_stream, key=lambda stream: (len(firsts[stream]) >= 2, on_stream[stream]))
    first = firsts[main]
    if len(first) >= 2:
        begin, end = min(first), max(first)
        return (first[end] - first[begin]) / (end - begin)
    return max(window, steps[0].end - steps[0].start) if len(steps) == 1 else window


def is_cast(each: Launched) -> bool:
    """Return whether a kernel does nothing but to change the type of its input."""
    if kernels.category(each.work.name) == "cast":
        return True
    copies = kernels.category(each.work.name) == "copy"
    return copies and any(span.name in _CASTS for span in each.stack)


def is_tiny(each: Launched) -> bool:
    """Return whether a kernel takes less time than its launch."""
    return each.work.end - each.work.start < kernels.TINY_US


def is_fp32_product(each: Launched) -> bool:
    """Return whether a kernel multiplies in float32 without tensor cores."""
    name = each.work.name
    return kernels.category(name) in kernels.ARITHMETIC and kernels.is_fp32_product(name)


def _top_kernels(run: Sequence[Launched]) -> list[Row]:
    totals: dict[str, list[float]] = defaultdict(list)
    for each in run:
        totals[each.work.name].append(each.work.end - each.work.start)
    rows = [
        Row(name, kernels.category(name), sum(t), len(t), kernels.tensor_cores(name))
        for name, t in totals.items()
    ]
    return sorted(rows, key=lambda row: -row.total_us)


def _top_operators(run: Sequence[Launched]) -> list[Row]:
    totals: dict[str, list[float]] = defaultdict(list)
    for each in run:
        operators = [s.name for s in each.stack if s.kind == "op"]
        # The innermost is what torch.profiler's own table counts the kernel for.
        name = operators[-1] if operators else (each.call.name if each.call else "(no launch)")
        totals[name].append(each.work.end - each.work.start)
    rows = [Row(name, "operator", sum(t), len(t)) for name, t in totals.items()]
    return sorted(rows, key=lambda row: -row.total_us)


def _copies(launched: Sequence[Launched]) -> list[Copies]:
    computing = union((e.work.start, e.work.end) for e in launched if e.work.kind == "kernel")
    by_name: dict[str, list[Launched]] = defaultdict(list)
    for each in launched:
        if each.work.kind == "memcpy":
            by_name[each.work.name].append(each)
    found = []
    for name, those in by_name.items():
        times = union((e.work.start, e.work.end) for e in those)
        found.append(
            Copies(
                name,
                len(those),
                sum(e.work.num_bytes for e in those),
                length(times),
                length(intersection(times, computing)),
            )
        )
    return sorted(found, key=lambda copies: -copies.total_us)


def _host_figures(trace: Trace) -> Figures:
    main, steps = trace.main_thread(), trace.steps
    own = [s for s in trace.spans if s.thread == main and s.kind in ("op", "annotation")]
    if steps:
        begin, end = steps[0].start, steps[-1].end
    else:
        begin = min((s.start for s in own), default=0.0)
        end = max((s.end for s in own), default=0.0)
    # An annotation may end a little after the step that it began in.
    own = [s._replace(end=min(s.end, end)) for s in own if begin <= s.start < end]
    phases: dict[str, list[Interval]] = defaultdict(list)
    for span in own:
        if phase := phase_of(span):
            phases[phase].append((span.start, span.end))
    times = {phase: length(union(each)) for phase, each in phases.items()}
    named = length(union(i for each in phases.values() for i in each))
    times["rest"] = end - begin - named
    inside = [s for s in own if not s.name.startswith("ProfilerStep")]
    compiles = [s for s in inside if s.name == "_compile.compile_inner (dynamo_timed)"]
    return Figures(
        num_steps=max(1, len(steps)),
        window_us=end - begin,
        step_us=(end - begin) / max(1, len(steps)),
        host_phases=times,
        top_operators=_self_times([s for s in inside if s.kind == "op"]),
        num_compiles=len(compiles),
    )


def _self_times(ops: Sequence[HostSpan]) -> list[Row]:
    """Return the operators by the time that the host spent in them and in nothing they called."""
    totals: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    stack: list[HostSpan] = []
    for span in sorted(ops, key=lambda s: (s.start, -s.end)):
        while stack and stack[-1].end <= span.start:
            stack.pop()
        if stack:
            totals[stack[-1].name] -= span.end - span.start
        totals[span.name] += span.end - span.start
        counts[span.name] += 1
        stack.append(span)
    rows = [Row(name, "operator", total, counts[name]) for name, total in totals.items()]
    return sorted(rows, key=lambda row: -row.total_us)

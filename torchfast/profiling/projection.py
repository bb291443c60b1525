"""From the kernels of the device back to the phases of the step on the host.

A kernel runs long after the host has launched it, so what the host does while it runs says nothing
of it. What counts is where the host stood when it *launched* it. A trace joins the two by a number,
``correlation``; the annotations and operators around the launch, on the thread that made it, then
say which phase it belongs to. The backward pass is launched by threads of autograd's own, on which
none of the caller's annotations stand: there, autograd's operators say so, and otherwise what the
main thread was in at that moment.

Three figures for a phase: ``kernel_us`` adds up its kernels; ``busy_us`` counts a moment once where
several ran at the same time; ``elapsed_us`` divides all the time of the device among the phases, an
idle moment counting for the phase of the work that it waited for. The last is what CUDA events
around a phase measure when the host is ahead.

All kernels of a CUDA graph come from one launch, so they are one phase, "replay": to see its parts,
profile the step without the graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from torchfast.profiling.intervals import enclosing, length, union
from torchfast.profiling.kernels import category, copy_direction
from torchfast.profiling.trace import DeviceWork, HostCall, HostSpan, Trace

PHASES: Final = (
    "data_wait",
    "h2d",
    "forward",
    "backward",
    "communication",
    "update",
    "replay",
    "d2h",
)
_OWN: Final = "torchfast."
_BACKWARD_OP: Final = "autograd::engine::evaluate_function"


class Launched(NamedTuple):
    """Work of the device with where it came from.

    Attributes:
        work: The kernel, copy or fill.
        call: The call that launched it; None where the trace lacks it.
        stack: The operators and annotations around the launch, outermost first.
        phase: One of `PHASES`.
    """

    work: DeviceWork
    call: HostCall | None
    stack: tuple[HostSpan, ...]
    phase: str


class PhaseTime(NamedTuple):
    """The time of a phase on the device; see the module."""

    phase: str
    kernel_us: float
    busy_us: float
    elapsed_us: float
    num_launches: int


def project(trace: Trace) -> list[Launched]:
    """Return the work of the device, in order of time, each with its launch and its phase."""
    launches = {c.correlation: c for c in trace.calls if c.correlation > 0}
    needed = {w.correlation for w in trace.work}
    stacks = host_stacks(trace, [c for n, c in launches.items() if n in needed])
    main = trace.main_thread()
    launched = []
    for work in trace.work:
        call = launches.get(work.correlation)
        stack = stacks.get(call, ()) if call else ()
        launched.append(Launched(work, call, stack, _phase(work, call, stack, main)))
    return launched


def host_stacks(trace: Trace, calls: Iterable[HostCall]) -> dict[HostCall, tuple[HostSpan, ...]]:
    """Return what stands around each call on its own thread, and on the main one for others."""
    spans: dict[str, list[HostSpan]] = defaultdict(list)
    for span in trace.spans:
        if span.kind in ("op", "annotation"):
            spans[span.thread].append(span)
    by_thread: dict[str, list[HostCall]] = defaultdict(list)
    for call in calls:
        by_thread[call.thread].append(call)
    main = trace.main_thread()
    annotations = [s for s in spans[main] if s.kind == "annotation"]
    found: dict[HostCall, tuple[HostSpan, ...]] = {}
    for thread, those in by_thread.items():
        those.sort(key=lambda call: call.start)
        moments = [call.start for call in those]
        around = enclosing(spans[thread], moments)
        if thread == main:
            found.update(zip(those, around, strict=True))
            continue
        # The caller's annotations stand outside of what autograd's own thread does meanwhile.
        for call, outer, inner in zip(those, enclosing(annotations, moments), around, strict=True):
            found[call] = outer + inner
    return found


def _phase(work: DeviceWork, call: HostCall | None, stack: Sequence[HostSpan], main: str) -> str:
    if work.kind == "kernel" and category(work.name) == "communication":
        return "communication"
    if call is not None and "GraphLaunch" in call.name:
        return "replay"
    direction = copy_direction(work.name)
    for span in reversed(stack):
        phase = phase_of(span)
        # An annotation of the main thread's around autograd's thread is looked at last, since it
        # is the outermost; so is "update", in whose hooks there may be a backward.
        if phase:
            return phase
    if direction in ("HtoD", "DtoH"):
        return direction.lower().replace("to", "2")
    if call is not None and call.thread != main:
        return "backward"
    return "forward"


def phase_of(span: HostSpan) -> str:
    """Return the phase that an annotation or operator stands for, or an empty string."""
    name = span.name
    if name.startswith(_OWN):
        phase = name.removeprefix(_OWN)
        return phase if phase in PHASES else ""
    if name.startswith(("Optimizer.step#", "Optimizer.zero_grad#")):
        return "update"
    if name.startswith("enumerate(DataLoader)#"):
        return "data_wait"
    if name.startswith(_BACKWARD_OP):
        return "backward"
    if name.startswith(("nccl:", "c10d::")):
        return "communication"
    return ""


def phase_times(launched: Sequence[Launched]) -> list[PhaseTime]:
    """Return the time of each phase that has any work on the device, in the order of `PHASES`."""
    by_phase: dict[str, list[Launched]] = defaultdict(list)
    for each in launched:
        by_phase[each.phase].append(each)
    elapsed = _elapsed(launched)
    return [
        PhaseTime(
            phase,
            sum(e.work.end - e.work.start for e in by_phase[phase]),
            length(union((e.work.start, e.work.end) for e in by_phase[phase])),
            elapsed[phase],
            len({e.work.correlation for e in by_phase[phase]}),
        )
        for phase in PHASES
        if phase in by_phase
    ]


def _elapsed(launched: Sequence[Launched]) -> dict[str, float]:
    """Divide the time from the first work to the end of the last among the phases."""
    shares: dict[str, float] = defaultdict(float)
    reached = None
    for each in sorted(launched, key=lambda e: e.work.start):
        # Up to where the work before it ended, the time is spent; the rest is this one's.
        begin = each.work.start if reached is None else reached
        if each.work.end > begin:
            shares[each.phase] += each.work.end - begin
            reached = each.work.end
    return shares

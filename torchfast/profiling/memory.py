"""What memory was taken for, over time.

The trace notes each time that the allocator hands out memory and takes it back. What it is for is
told by when it was taken, and by whether it outlives that: what the forward pass takes and leaves
is activations, what the backward pass leaves gradients, what the update leaves the state of the
optimizer; what is given back before the next of them begins is temporary. Batches are what is taken
while the loop waits for data, and what is copied to the device.

What was taken before the trace began is known where `torchfast.profile` took the trace: it adds
where parameters, gradients and states of optimizers lie, see held_memory.py beside this. The rest,
and in a trace of somebody else's all of it, is "other": on a CUDA device as much as the allocator's
own total holds more, on a CPU nothing, since torch counts the memory of the host only from the
first event on.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, final

from torchfast.profiling.intervals import Interval, union
from torchfast.profiling.kernels import copy_direction
from torchfast.profiling.projection import Launched, phase_of
from torchfast.profiling.trace import HeldBlock, MemoryEvent, Trace

PARAMETERS: Final = "parameters"
OPTIMIZER_STATE: Final = "optimizer state"
GRADIENTS: Final = "gradients"
INPUTS: Final = "inputs"
ACTIVATIONS: Final = "activations"
TEMPORARY: Final = "temporary"
OTHER: Final = "other"
# From what stays to what goes, as the page stacks them.
CATEGORIES: Final = (
    OTHER,
    PARAMETERS,
    OPTIMIZER_STATE,
    INPUTS,
    GRADIENTS,
    ACTIVATIONS,
    TEMPORARY,
)
# What a phase leaves behind.
_LEFT_BY: Final = {
    "data_wait": INPUTS,
    "h2d": INPUTS,
    "forward": ACTIVATIONS,
    "backward": GRADIENTS,
    "communication": GRADIENTS,
    "update": OPTIMIZER_STATE,
}
# Those which a loop runs one after the other; loaders and collectives may run beside them.
_IN_TURN: Final = ("forward", "backward", "update")
# The operators that make a tensor on the device of one on the host.
_TO_DEVICE: Final = frozenset({"aten::to", "aten::_to_copy"})
# More points than this a drawing does not show.
_MOST_POINTS: Final = 400


@final
@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """The memory of one device over the trace.

    Attributes:
        device: ``"cuda:0"`` or ``"cpu"``.
        peak_bytes: The most that was taken at a time.
        peak_us: When that was.
        peak_phase: In which phase of the step.
        at_peak: What of it was taken for what; adds up to `peak_bytes`.
        most: The most that each category had at a time.
        least: The least that it had.
        reserved_bytes: The most that the allocator held; 0 on a CPU, which has no such pool.
        times_us: Moments of the trace.
        by_category: The bytes of each category at those moments.
    """

    device: str
    peak_bytes: int
    peak_us: float
    peak_phase: str
    at_peak: dict[str, int]
    most: dict[str, int]
    least: dict[str, int]
    reserved_bytes: int
    times_us: list[float] = field(default_factory=list)
    by_category: dict[str, list[int]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "device": self.device,
            "peak_bytes": self.peak_bytes,
            "peak_ms": self.peak_us / 1e3,
            "peak_phase": self.peak_phase,
            "at_peak": self.at_peak,
            "most": self.most,
            "least": self.least,
            "reserved_bytes": self.reserved_bytes,
            "over_time": {
                "ms": [round(time / 1e3, 3) for time in self.times_us],
                "bytes": self.by_category,
            },
        }


def memory_use(trace: Trace, launched: Sequence[Launched] = ()) -> list[MemoryUse]:
    """Return the use of each device that the trace has memory events of; CUDA devices first.

    Args:
        trace: The trace.
        launched: Its work of the device, which tells what was copied to it.
    """
    by_device: dict[str, list[MemoryEvent]] = defaultdict(list)
    for event in trace.memory:
        by_device[event.device].append(event)
    held: dict[str, list[HeldBlock]] = defaultdict(list)
    for block in trace.held:
        held[block.device].append(block)
    phases = _Phases(trace, launched)
    return [
        _Account(device, by_device[device], held[device], phases).use()
        for device in sorted(by_device, key=lambda name: (name == "cpu", name))
    ]


@dataclass(slots=True)
class _Block:
    """Memory that was taken once."""

    num_bytes: int
    what: str
    phase: str = ""
    run: int = -1
    number: int = -1


class _Account:
    """The blocks of one device: first what each is, then what there is of each over time."""

    def __init__(
        self,
        device: str,
        events: Sequence[MemoryEvent],
        held: Sequence[HeldBlock],
        phases: _Phases,
    ) -> None:
        self._device = device
        self._events = events
        self._phases = phases
        # What happens to blocks, in order: when, how many bytes more, and to which.
        self._changes: list[tuple[float, int, _Block, MemoryEvent | None]] = []
        self._living: dict[int, _Block] = {}
        self._batch: dict[int, _Block] = {}  # of the last batch, what the trace has not seen taken
        self._run, self._phase = 0, ""
        merged: list[MemoryEvent | HeldBlock] = [*held, *events]
        merged.sort(key=lambda each: each.time)
        notes: list[HeldBlock] = []
        for each in merged:
            # The blocks of one batch are noted at one time.
            if notes and (isinstance(each, MemoryEvent) or each.time != notes[0].time):
                self._note(notes)
                notes = []
            if isinstance(each, HeldBlock):
                notes.append(each)
            elif each.num_bytes >= 0:
                self._take(each)
            else:
                self._give_back(each)
        self._note(notes)

    def _take(self, event: MemoryEvent) -> None:
        phase = self._phases.at(event.time)
        if phase != self._phase:
            self._run, self._phase = self._run + 1, phase
        number = self._phases.number_at(event.time)
        block = _Block(event.num_bytes, _LEFT_BY[phase], phase, self._run, number)
        before = self._living.pop(event.address, None)
        if before is not None:  # given back while nobody looked
            self._changes.append((event.time, -before.num_bytes, before, None))
        self._living[event.address] = block
        self._changes.append((event.time, block.num_bytes, block, event))

    def _give_back(self, event: MemoryEvent) -> None:
        # An update with fused kernels takes nothing, so that no run begins with it.
        number = self._phases.number_at(event.time)
        block = self._living.pop(event.address, None)
        if block is None:
            block = _Block(0, OTHER)
        elif block.what != INPUTS and block.run == self._run and block.number == number:
            block.what = TEMPORARY
        self._changes.append((event.time, -block.num_bytes, block, event))

    def _note(self, notes: Sequence[HeldBlock]) -> None:
        if any(note.what == INPUTS for note in notes):
            for address, old in self._batch.items():
                if self._living.get(address) is old:
                    del self._living[address]
                    self._changes.append((notes[0].time, -old.num_bytes, old, None))
            self._batch = {}
        for note in notes:
            what = note.what if note.what in CATEGORIES else OTHER
            block = self._living.get(note.address)
            if not note.what:
                if block is not None and block.run < 0:
                    del self._living[note.address]
                    self._changes.append((note.time, -block.num_bytes, block, None))
            elif block is None:
                made = self._living[note.address] = _Block(note.num_bytes, what)
                if what == INPUTS:
                    self._batch[note.address] = made
                self._changes.append((note.time, made.num_bytes, made, None))
            elif block.run >= 0:
                block.what = what

    def use(self) -> MemoryUse:
        """Add up."""
        now = dict.fromkeys(CATEGORIES, 0)
        most: dict[str, int] = {}
        least: dict[str, int] = {}
        peak: tuple[int, float, dict[str, int]] = (-1, 0.0, now)
        course: list[tuple[float, int, dict[str, int]]] = []
        every = max(1, len(self._events) // _MOST_POINTS)
        number = 0
        for time, num_bytes, block, event in self._changes:
            now[block.what] += num_bytes
            if event is None:
                continue
            known = sum(now.values()) - now[OTHER]
            # A CPU's total is of what torch has seen since it first looked, and of no use.
            now[OTHER] = 0 if self._device == "cpu" else max(0, event.allocated - known)
            if not course:
                most, least = dict(now), dict(now)
            for name in (block.what, OTHER):
                most[name] = max(most[name], now[name])
                least[name] = min(least[name], now[name])
            total = known + now[OTHER]
            if total > peak[0]:
                peak = (total, time, dict(now))
            # Of the moments that fall together the one with most is drawn, so that the peak is.
            if number % every == 0:
                course.append((time, total, dict(now)))
            elif total > course[-1][1]:
                course[-1] = (time, total, dict(now))
            number += 1
        return MemoryUse(
            device=self._device,
            peak_bytes=peak[0],
            peak_us=peak[1],
            peak_phase=self._phases.at(peak[1]),
            at_peak={name: num for name, num in peak[2].items() if num},
            most={name: num for name, num in most.items() if num},
            least={name: least[name] for name, num in most.items() if num},
            reserved_bytes=max(event.reserved for event in self._events),
            times_us=[time for time, _, _ in course],
            by_category={
                name: [values[name] for _, _, values in course] for name, num in most.items() if num
            },
        )


class _Phases:
    """The phase of the main thread at a moment; forward, where none is annotated."""

    def __init__(self, trace: Trace, launched: Sequence[Launched]) -> None:
        found: dict[str, list[Interval]] = defaultdict(list)
        for span in trace.spans:
            if span.kind in ("annotation", "op") and (phase := phase_of(span)):
                found[phase].append((span.start, span.end))
        for each in launched:
            if each.phase == "h2d" and copy_direction(each.work.name) == "HtoD":
                around = [s for s in each.stack if s.name in _TO_DEVICE]
                found["h2d"] += [(span.start, span.end) for span in around[:1]]
        self._busy = {phase: union(each) for phase, each in found.items()}
        begins = sorted((begin, p) for p in _IN_TURN for begin, _ in self._busy.get(p, ()))
        # The operators of one backward are spans of their own, with gaps between.
        self._begins = [next(each)[0] for _, each in groupby(begins, key=itemgetter(1))]

    def at(self, time: float) -> str:
        for phase in ("data_wait", "h2d", "update", "backward", "communication"):
            busy = self._busy.get(phase)
            if busy:
                index = bisect.bisect_right(busy, (time, float("inf"))) - 1
                if index >= 0 and busy[index][1] >= time:
                    return phase
        return "forward"

    def number_at(self, time: float) -> int:
        """Return how many of the annotated phases in which a step goes on had begun by then."""
        return bisect.bisect_right(self._begins, time)

"""Which events of a trace are kept: of a long one as many whole steps as there is room for.

How long a trace is, and where its steps are, is known when it has been read; to read a large file
twice takes long. So events are kept as they come, and when there are too many the window of time
is made shorter and what lies behind it is dropped. It only ever becomes shorter, so nothing that
was dropped is missed.

Work of the device belongs to the moment of its *launch*: a host that is ahead launches the last
steps of the window long before the device comes to them. A launch is noted by a bit, also one that
was dropped: its work is dropped when it comes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final, final

from torchfast.profiling.trace_events import (
    FORWARD_THREAD,
    HELD,
    LINE,
    SEQUENCE,
    STEP,
    DeviceWork,
    HeldBlock,
    HostCall,
    HostSpan,
    MemoryEvent,
)

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
_FACTS: Final = ("Input Dims", "Input type", SEQUENCE, FORWARD_THREAD)
# Of these the numbers among their inputs too: stride, padding, the type of the result.
_TOLD_BY_NUMBERS: Final = ("convolution", "convolution_backward", "_scaled_mm")
# What a number of an event can be; what lies beyond is none that a profiler wrote.
_LARGEST: Final = 1 << 63
# As many more than are to be kept are held, so that the window is made shorter a few times only.
_SPARE: Final = 1.5


@final
class TraceWindow:
    """The events that are kept, by kind, in the order of the file.

    Args:
        most: The most that is kept at the end.
        begin: Nothing before this is kept.

    Attributes:
        num_events: All events that were seen.
        first_step: When the first step begins; infinite where none is annotated.
    """

    def __init__(self, most: int, *, begin: float = -math.inf) -> None:
        self.most = most
        self.work: list[DeviceWork] = []
        self.calls: list[HostCall] = []
        self.spans: list[HostSpan] = []
        self.memory: list[MemoryEvent] = []
        self.held: list[HeldBlock] = []
        self.num_events = 0
        self.first_step = math.inf
        self._begin, self._end = begin, math.inf
        self._texts: dict[str, str] = {}  # names come again and again
        self._num_in_time = 0
        self._steps_seen = 0
        self._dropped = _Numbers()  # launches
        self._most_held = int(most * _SPARE)

    @property
    def lacks_beginning(self) -> bool:
        """Whether the first step is not kept whole: its annotation came after the room was gone."""
        return math.isfinite(self.first_step) and not self._begin <= self.first_step <= self._end

    def add(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Keep what lies in the window."""
        for event in events:
            self.num_events += 1
            if event.get("name") == "[memory]":
                self._add_memory(event)
            elif event.get("cat") == HELD:
                self._add_held(event)
            elif event.get("ph") == "X":
                category = event.get("cat")
                try:
                    start = float(event["ts"])
                    end = start + max(0.0, float(event.get("dur") or 0.0))
                except (KeyError, TypeError, ValueError, OverflowError):
                    continue
                if not math.isfinite(end) or not math.isfinite(start):
                    continue
                self._num_in_time += 1
                if not isinstance(category, str):
                    continue
                if category in _DEVICE:
                    self._add_work(event, _DEVICE[category], start, end)
                elif category in _CALLS:
                    self._add_call(event, start, end)
                elif (kind := _SPANS.get(category)) is not None and (
                    start <= self._end or kind == "annotation"
                ):
                    self._add_span(event, kind, start, end)
        if self._num_held > self._most_held:
            self._shorten()

    def choose(self, name: str) -> str:
        """Drop all but whole steps, where there are too many events; return a remark on it."""
        if math.isinf(self._end) and self._num_held <= self.most:
            return ""
        steps = {s.name: s for s in self.spans if s.kind == "annotation" and STEP.match(s.name)}
        ordered = sorted(steps.values(), key=lambda step: step.start)
        starts = self._starts()
        begin = ordered[0].start if ordered else starts[0]
        inside = [t for t in starts if t >= begin]
        limit = min(inside[min(len(inside) - 1, self.most)], self._end)
        whole = [step.end for step in ordered if step.end <= limit]
        self._begin, self._end = begin, whole[-1] if whole else limit
        self._drop()
        self._settle()
        of = max(self._steps_seen, len(ordered))
        what = f"its first {len(whole)} of {of} steps" if whole else "its beginning"
        return f"{name} has {self._num_in_time} events; {what} are looked at"

    # --- one event -----------------------------------------------------------------------------

    def _add_work(self, event: Mapping[str, Any], kind: str, start: float, end: float) -> None:
        args = _args(event)
        correlation = _correlation(args)
        if correlation in self._dropped:
            return
        self.work.append(
            DeviceWork(
                self._name(event),
                kind,
                _int(args.get("device", event.get("pid"))),
                _int(args.get("stream", event.get("tid"))),
                start,
                end,
                correlation,
                _int(args.get("bytes"), 0),
            )
        )

    def _add_call(self, event: Mapping[str, Any], start: float, end: float) -> None:
        correlation = _correlation(_args(event))
        if self._begin <= start <= self._end:
            self.calls.append(
                HostCall(self._name(event), start, end, self._thread(event), correlation)
            )
        else:
            self._dropped.add(correlation)

    def _add_span(self, event: Mapping[str, Any], kind: str, start: float, end: float) -> None:
        is_step = kind == "annotation" and STEP.match(str(event.get("name"))) is not None
        if is_step:
            self._steps_seen += 1
            self.first_step = min(self.first_step, start)
        if not self._begin <= start <= self._end:
            return
        name, facts = self._name(event), None
        if kind == "op":
            args = _args(event)
            facts = {k: args[k] for k in _FACTS if args.get(k)}
            if facts and name.endswith(_TOLD_BY_NUMBERS):
                facts["Concrete Inputs"] = args.get("Concrete Inputs")
        self.spans.append(HostSpan(name, kind, start, end, self._thread(event), facts or None))

    def _add_memory(self, event: Mapping[str, Any]) -> None:
        try:
            time = float(event["ts"])
        except (KeyError, TypeError, ValueError, OverflowError):
            return
        if not math.isfinite(time):
            return
        self._num_in_time += 1
        if not self._begin <= time <= self._end:
            return
        args = _args(event)
        # The type is the number of c10::DeviceType: 0 is the CPU, 1 CUDA, 20 one of its own.
        is_host = _int(args.get("Device Type"), 0) == 0
        self.memory.append(
            MemoryEvent(
                time,
                "cpu" if is_host else f"cuda:{_int(args.get('Device Id'), 0)}",
                _int(args.get("Bytes"), 0),
                _int(args.get("Total Allocated"), 0),
                _int(args.get("Total Reserved"), 0),
                _int(args.get("Addr"), 0),
                self._thread(event),
            )
        )

    def _add_held(self, event: Mapping[str, Any]) -> None:
        args = _args(event)
        try:
            time = float(event["ts"])
            pairs = [(_int(at, 0), max(0, _int(num, 0))) for at, num in args.get("blocks") or ()]
        except (KeyError, TypeError, ValueError, OverflowError):
            return
        if not math.isfinite(time):
            return
        what, device = text_of(args.get("what", "")), text_of(args.get("device", "cpu"))
        self.held += [HeldBlock(time, what, device, *pair) for pair in pairs]

    def _thread(self, event: Mapping[str, Any]) -> str:
        key = f"{event.get('pid')}/{event.get('tid')}"
        return self._texts.get(key) or self._text(key)

    def _name(self, event: Mapping[str, Any]) -> str:
        name = event.get("name", "")
        if type(name) is str and name in self._texts:
            return self._texts[name]
        return self._text(str(name))

    def _text(self, text: str) -> str:
        self._texts[text] = sys.intern(text_of(text))
        return self._texts[text]

    # --- the window ----------------------------------------------------------------------------

    @property
    def _num_held(self) -> int:
        return len(self.work) + len(self.calls) + len(self.spans) + len(self.memory)

    def _launches(self) -> dict[int, float]:
        return {call.correlation: call.start for call in self.calls if call.correlation > 0}

    def _starts(self) -> list[float]:
        """Return the moment to which each event belongs, sorted."""
        launched = self._launches()
        starts = [call.start for call in self.calls]
        starts += [span.start for span in self.spans]
        starts += [event.time for event in self.memory]
        starts += [
            launched.get(work.correlation, work.start)
            for work in self.work
            if work.correlation not in self._dropped
        ]
        starts.sort()
        return starts

    def _shorten(self) -> None:
        """Let the window end where there is no more room, counted from the first step."""
        if math.isinf(self._begin) and math.isfinite(self.first_step):
            self._begin = self.first_step
        inside = [t for t in self._starts() if t >= self._begin]
        if len(inside) > self.most:
            self._end = min(self._end, inside[self.most])
        self._drop()
        # Work whose launch has not come yet may stay; it must not be looked at for every event.
        self._most_held = max(int(self.most * _SPARE), int(self._num_held * 1.25))

    def _drop(self) -> None:
        begin, end = self._begin, self._end
        for call in self.calls:
            if not begin <= call.start <= end:
                self._dropped.add(call.correlation)
        self.calls = [c for c in self.calls if begin <= c.start <= end]
        self.spans = [s for s in self.spans if begin <= s.start <= end]
        self.memory = [m for m in self.memory if begin <= m.time <= end]
        self.work = [w for w in self.work if w.correlation not in self._dropped]

    def _settle(self) -> None:
        """Drop work without a launch that lies outside of the window."""
        launched = self._launches()
        self.work = [
            w for w in self.work if w.correlation in launched or self._begin <= w.start <= self._end
        ]


@final
class _Numbers:
    """A set of whole numbers, most of them small and dense: a bit each."""

    _MOST_BITS: Final = 1 << 28

    def __init__(self) -> None:
        self._bits = bytearray()
        self._others: set[int] = set()

    def add(self, number: int) -> None:
        if number <= 0:
            return  # no launch's
        if number >= self._MOST_BITS:
            self._others.add(number)
            return
        at = number >> 3
        if at >= len(self._bits):
            self._bits.extend(bytes(at + 1 - len(self._bits) + len(self._bits) // 2))
        self._bits[at] |= 1 << (number & 7)

    def __contains__(self, number: int) -> bool:
        if number <= 0:
            return False
        if number >= self._MOST_BITS:
            return number in self._others
        at = number >> 3
        return at < len(self._bits) and bool(self._bits[at] & (1 << (number & 7)))


def text_of(value: Any) -> str:
    """Return a name as text that can be written: half of a surrogate pair cannot."""
    text = str(value)
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _args(event: Mapping[str, Any]) -> dict[str, Any]:
    args = event.get("args")
    return args if isinstance(args, dict) else {}


def _correlation(args: Mapping[str, Any]) -> int:
    return _int(args.get("correlation", args.get("External id")))


def _int(value: Any, default: int = -1) -> int:
    if type(value) is int and -_LARGEST <= value < _LARGEST:
        return value
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return default
    return number if -_LARGEST <= number < _LARGEST else default

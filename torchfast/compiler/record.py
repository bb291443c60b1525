"""What torch.compile really did: graphs, breaks, recompiles, limits, caches, seconds.

torch.compile falls back in silence. A line that it cannot follow cuts the graph in two, a function
that it cannot follow at all runs eagerly, an argument that changes compiles everything again, and
after eight versions it compiles no more; the loss is right all the while, and the step is no faster
or slower than before. `CompileRecord` notes what happened from when it was made, and
`CompileSummary` says it with the user's own lines and with what to do.

It listens only while something is compiled: a call of compiled code runs nothing of it. It changes
no setting and no log level of torch's. Several records do not disturb each other, and neither
``torch._dynamo.reset()`` nor a clearing of torch's counters makes one forget.

What is compiled in the whole process is noted, whoever asked for it. `CompileSummary.of` takes from
it what belongs to one function.
"""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, final

from torchfast._core.arguments import check_callable
from torchfast._core.closing import Closing
from torchfast._core.user_code import is_library
from torchfast.compiler.breaks import (
    CANNOT_FOLLOW,
    is_apart,
    read_break,
    shortened,
    why_given_up,
)
from torchfast.compiler.events import (
    REGION,
    BackwardEvent,
    CacheUse,
    CodePlace,
    Events,
    FrameEvent,
    FrameOutcome,
    GraphBreak,
    LimitReached,
    Recompile,
)
from torchfast.compiler.nearest import cause_of
from torchfast.compiler.recompiles import Change, as_counter
from torchfast.compiler.summary import CompileSummary
from torchfast.compiler.torch_events import CodeKey, TorchEvents, callers

# What torch raises at code that it cannot follow; all else is a failure of its own.
_REST = re.compile(r"torch_dynamo_resume_in_(.+)_at_\d+$")


class _Function(NamedTuple):
    """A function that torch tried: where it stands, what had called it, and its name for torch."""

    code: CodePlace
    within: tuple[str, ...]
    key: CodeKey


_UNKNOWN = _Function(CodePlace("an unknown function", "", 0), (), CodeKey("", "", 0))


@final
class CompileRecord(Closing):
    """Notes what torch.compile does in this process, from now until it is closed.

    Args:
        before: Called before a compilation, in the thread that compiles; of several that overlap
            torch tells the first alone.

    Example:
        >>> import torch
        >>> with CompileRecord() as record:
        ...     double = torch.compile(lambda x: x * 2, backend="eager")
        ...     _ = double(torch.ones(3))
        >>> summary = record.summary()
        >>> summary.num_graphs, len(summary.graph_breaks)
        (1, 0)
    """

    def __init__(self, *, before: Callable[[], object] = lambda: None) -> None:
        check_callable("before", before, "before()")
        self._called_before = before
        # The callback of a lazy backward runs in autograd's thread, `summary` in the user's.
        self._lock = threading.RLock()
        self._events = Events()
        self._within: tuple[str, ...] = ()
        self._within_by_id: dict[str, tuple[str, ...]] = {}
        self._reasons_by_id: dict[str, list[str]] = {}
        self._functions: dict[str, _Function] = {}  # by the id of their frame
        self._counters: set[tuple[CodeKey, str]] = set()
        self._is_closed = False
        self._torch = TorchEvents(self._before, self._after)

    def has_news(self) -> bool:
        """Whether anything was compiled, or refused, since the last look at it.

        It is made for being asked at each step: it costs about half a microsecond.
        """
        if self._is_closed:
            return False
        self._torch.attach()
        return self._torch.has_news()

    @property
    def num_noted(self) -> int:
        """How many tries to compile were noted; it only grows."""
        return len(self._events.frames) + len(self._events.backwards)

    def summary(self) -> CompileSummary:
        """Return what has happened so far."""
        self._look()
        with self._lock:
            events = self._events
            total = _seconds([(start, end) for start, end, _ in events.spans])
            backward = _seconds([(start, end) for start, end, is_bw in events.spans if is_bw])
            return CompileSummary(
                frames=tuple(events.frames),
                backwards=tuple(events.backwards),
                graph_breaks=tuple(events.breaks),
                recompiles=tuple(events.recompiles),
                limits=tuple(events.limits),
                caches=CacheUse(**self._torch.counts),
                forward_s=max(total - backward, 0.0),
                backward_s=backward,
                is_complete=events.is_complete,
            )

    def close(self) -> None:
        """Listen no more; what was noted stays."""
        self._look()
        self._is_closed = True
        self._torch.detach()

    def __repr__(self) -> str:
        return f"CompileRecord({self.summary().headline})"

    def _look(self) -> None:
        if self._is_closed:
            return
        with self._lock:
            self._torch.attach()
            self._note()

    def _before(self, compile_id: str) -> None:
        self._called_before()
        with self._lock:
            self._note()  # what came before belongs to the functions that were being run then
            self._within = callers()
            if compile_id:
                self._within_by_id[compile_id] = self._within
                # Now, since those of the next compilation come behind them.
                self._reasons_by_id[compile_id] = self._torch.reasons(compile_id)

    def _after(self) -> None:
        with self._lock:
            self._note()

    def _note(self) -> None:
        fresh = self._torch.take()
        self._events.is_complete &= not fresh.lost
        for reason in fresh.breaks:
            self._note_break(reason)
        for entry in fresh.metrics:
            self._note_entry(entry)

    def _note_break(self, raw: Any) -> None:
        if is_apart(str(raw.reason)):
            return
        stack = [CodePlace(f.name, f.filename, f.lineno or 0) for f in raw.user_stack]
        own = [place for place in stack if not is_library(place.file) and not _is_ours(place)]
        place = (own or stack or [CodePlace("", "", 0)])[-1]
        reading = read_break(str(raw.reason))
        within = (*self._within, *(p.name for p in stack if p in own or _is_ours(p)))
        self._add_break(GraphBreak(place=place, within=within, **reading._asdict()))

    def _add_break(self, new: GraphBreak) -> None:
        breaks = self._events.breaks
        for index, known in enumerate(breaks):
            same = (known.place[1:], known.kind, known.gave_up)
            if same == (new.place[1:], new.kind, new.gave_up):
                names = (*known.within, *(n for n in new.within if n not in known.within))
                breaks[index] = dataclasses.replace(known, within=names, times=known.times + 1)
                return
        breaks.append(new)

    def _note_entry(self, entry: Any) -> None:
        if getattr(entry, "is_runtime", False):
            return  # measured while a step ran, such as the autotuning of a kernel
        start, end = entry.start_time_us or 0, entry.end_time_us or 0
        seconds = max(end - start, 0) / 1e6
        is_backward = entry.is_forward is False
        self._events.spans.append((start, end, is_backward))
        version = str(entry.compile_id or "")
        frame_id = version.rpartition("/")[0]
        if is_backward:
            self._within_by_id.pop(version, None)  # of the backward; the function's own is known
            self._reasons_by_id.pop(version, None)
            known = self._functions.get(frame_id, _UNKNOWN)
            self._events.backwards.append(
                BackwardEvent(code=known.code, within=known.within, seconds=seconds)
            )
        elif entry.co_name is None:
            known = self._functions.get(frame_id) or self._find(frame_id) or _UNKNOWN
            self._note_refusal(entry, known, seconds)
        else:
            within = self._within_by_id.pop(version, ()) or _stack_of(entry)
            known = self._functions[frame_id] = _function_of(entry, within)
            self._note_frame(entry, known, seconds)

    def _note_frame(self, entry: Any, function: _Function, seconds: float) -> None:
        code, within, key = function
        num_ops = entry.graph_op_count or 0
        outcome: FrameOutcome = "compiled" if num_ops else "no graph"
        reason, at_break = "", False
        # What stops at a region that others compile, in a loop, is left alone as it is meant to be.
        if entry.fail_type is not None and not is_apart(str(entry.fail_reason)):
            outcome, num_ops = "given up", 0
            reason, at_break = self._note_failure(entry, code, within)
        lookups = sum(
            getattr(entry, f"inductor_fx_local_cache_{name}_count", 0) or 0
            for name in ("hit", "miss")
        )
        self._events.frames.append(
            FrameEvent(
                code=code,
                within=within,
                outcome=outcome,
                num_ops=num_ops,
                # One frame is one graph: a second look into the cache was for its backward.
                has_backward=outcome == "compiled" and lookups > 1,
                seconds=seconds,
                reason=reason,
                at_break=at_break,
                is_rest=bool(_REST.match(entry.co_name)),
            )
        )
        reasons = self._reasons_of(entry)
        if reasons:
            change, guard = self._read(reasons, entry, key)
            if change.kind == "backend" and any(map(REGION.match, (code.name, *within))):
                return  # a region's own first version, of a function that others compiled too
            self._events.recompiles.append(
                Recompile(
                    code=code,
                    within=within,
                    change=change,
                    guard=guard,
                    seconds=seconds,
                )
            )

    def _note_failure(
        self, entry: Any, code: CodePlace, within: tuple[str, ...]
    ) -> tuple[str, bool]:
        """Return why a function was given up, and whether at a graph break, which is noted."""
        message = str(entry.fail_reason or "")
        if entry.fail_type not in CANNOT_FOLLOW:
            return shortened(f"{entry.fail_type}: {message}"), False
        reading = read_break(message)
        if reading.kind == "raises":
            return reading.reason, False
        place = code
        file, line = entry.fail_user_frame_filename, entry.fail_user_frame_lineno
        if file and line and not is_library(file):
            place = CodePlace(code.name if file == code.file else "", file, line)
        self._add_break(
            GraphBreak(place=place, within=(*within, code.name), gave_up=True, **reading._asdict())
        )
        reason = f"{reading.reason}, at {place.file}:{place.line}; torch cannot go on after it, "
        return reason + why_given_up(message), True

    def _note_refusal(self, entry: Any, function: _Function, seconds: float) -> None:
        """Note a try that torch refused before it began: only its limits do that."""
        code, within, key = function
        message = str(entry.fail_reason or "")
        name = re.search(r"(\w*(?:recompile|cache_size)_limit)", message)
        reasons = self._reasons_of(entry)
        limit = self._torch.setting(name[1] if name else "recompile_limit", len(reasons))
        is_limit = name or entry.recompile_reason or "RecompileLimit" in str(entry.fail_type)
        reason = f"{limit} was reached" if is_limit else shortened(f"{entry.fail_type}: {message}")
        outcome: FrameOutcome = "limit reached" if is_limit else "given up"
        self._events.frames.append(
            FrameEvent(code=code, within=within, outcome=outcome, seconds=seconds, reason=reason)
        )
        if is_limit:
            change = self._read(reasons, entry, key)[0] if reasons else None
            self._events.limits.append(
                LimitReached(code=code, within=within, limit=limit, change=change)
            )

    def _reasons_of(self, entry: Any) -> list[str]:
        """Return why each version did not fit; empty where there was none."""
        version = str(entry.compile_id or "")
        known = self._reasons_by_id.pop(version, [])
        if not entry.recompile_reason:
            return []
        first = str(entry.recompile_reason)
        reasons = known or self._torch.reasons(version)
        return reasons if first in reasons else [first]

    def _read(self, reasons: list[str], entry: Any, key: CodeKey) -> tuple[Change, str]:
        version = str(entry.compile_id or "")
        change, guard = cause_of(reasons, version, self._torch.versions(key))
        # Once a number was seen to count, its next change is of the same kind.
        counter = (key, change.source)
        if change.kind == "counter":
            self._counters.add(counter)
        elif change.kind == "value" and counter in self._counters:
            change = as_counter(change)
        return change, guard

    def _find(self, frame_id: str) -> _Function | None:
        """Return the function of a frame that was compiled before the record began."""
        for entry in reversed(self._torch.all_metrics()):
            if entry.co_name and str(entry.compile_id or "").rpartition("/")[0] == frame_id:
                return _function_of(entry, _stack_of(entry))
        return None


def _function_of(entry: Any, within: tuple[str, ...]) -> _Function:
    rest = _REST.match(entry.co_name)
    name = rest[1] if rest else entry.co_name
    place = CodePlace(name, entry.co_filename or "", entry.co_firstlineno or 0)
    return _Function(place, within, CodeKey(entry.co_name, *place[1:]))


def _stack_of(entry: Any) -> tuple[str, ...]:
    """Return the functions around one from what torch noted; it leaves out the innermost."""
    names = []
    for line in (getattr(entry, "stack_trace", None) or ())[:-1]:
        found = re.search(r"Name: (.+?), Filename: (.+)$", str(line))
        if found and not is_library(found[2]):
            rest = _REST.match(found[1])
            names.append(rest[1] if rest else found[1])
    return tuple(names)


def _is_ours(place: CodePlace) -> bool:
    return place.file.startswith(__file__.rpartition("record.py")[0])


def _seconds(spans: list[tuple[int, int]]) -> float:
    """Return the length of the union of spans in microseconds, in seconds."""
    total, reached = 0, 0
    for start, end in sorted(spans):
        total += max(end - max(start, reached), 0)
        reached = max(reached, end)
    return total / 1e6

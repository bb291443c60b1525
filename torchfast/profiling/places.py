"""Which line of the user's code the host was in.

A trace with Python frames names functions, not lines. `torchfast.profile` therefore takes a few
steps more with Python frames, and adds the lines of the user's own code to that trace (see
torchfast/profiling/lines.py). Frames make the host slow, so times are never taken from those steps:
a wait is looked up there by what it is (which call, in which operator), not by when it was.
"""

from __future__ import annotations

import bisect
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from typing import Final, final

from torchfast._core.user_code import is_compiled
from torchfast.profiling.trace import HostSpan, Trace
from torchfast.profiling.trace_events import FORWARD_THREAD, SEQUENCE

_FRAME: Final = re.compile(r"^(?P<file>.+)\((?P<line>\d+)\): ")
# Packages whose frames are not the user's; the paths in a trace begin at the package.
_LIBRARIES: Final = frozenset(
    {"torch", "torchfast", "torchvision", "torchaudio", "torchao", "torchdata", "triton", "numpy"}
    | {"accelerate", "lightning", "transformers", "pytorch_lightning", "_pytest", "pluggy", "tqdm"}
    # What torch is made with: a compilation runs hundreds of thousands of their lines.
    | {"sympy", "mpmath", "networkx", "jinja2", "markupsafe", "filelock", "fsspec", "packaging"}
    | {"typing_extensions", "setuptools", "optree", "yaml", "psutil"}
)


def is_users(path: str) -> bool:
    """Return whether a path in a trace is the user's code rather than a library's.

    Example:
        >>> is_users("train.py"), is_users("torch/nn/modules/module.py"), is_users("runpy.py")
        (True, False, False)
    """
    if path.startswith("<") or "site-packages" in path or "dist-packages" in path:
        return False
    if is_compiled(path):
        return False
    parts = path.replace("\\", "/").lstrip("./").split("/")
    top = parts[0].removesuffix(".py")
    if top in _LIBRARIES:
        return False
    library = f"python{sys.version_info.major}."
    if any(part.startswith(library) for part in parts[:-1]):
        return False
    # A user's script may be called like a module of the standard library only at its own risk.
    return path.startswith("/") or top not in sys.stdlib_module_names


@final
class Places:
    """The user's lines by thread and time."""

    def __init__(self, trace: Trace) -> None:
        self._main = trace.main_thread()
        self._spans: dict[str, list[HostSpan]] = defaultdict(list)
        lines = [s for s in trace.spans if s.kind == "line"]
        # The last frame before a library is the best there is, where no lines were added.
        frames = [s for s in trace.spans if s.kind == "frame" and _users_frame(s.name)]
        for span in lines or frames:
            self._spans[span.thread].append(span)
        self._starts = {t: [s.start for s in spans] for t, spans in self._spans.items()}

    def __bool__(self) -> bool:
        return bool(self._spans)

    def at(self, thread: str, moment: float) -> str | None:
        """Return ``"file:line"`` of the innermost call there, on the main thread if need be."""
        for each in dict.fromkeys((thread, self._main)):
            if (span := self._innermost(each, moment)) is not None:
                return place_of(span)
        return None

    def near(self, thread: str, start: float, end: float) -> str | None:
        """Return the line of a stretch in which no operator ran.

        The innermost call around its middle, if that is about as long as the stretch. One that is
        much longer is only what the code is inside of; then the last call before says more: it
        stands above the line that took the time.
        """
        middle = (start + end) / 2
        for each in dict.fromkeys((thread, self._main)):
            span = self._innermost(each, middle)
            if span is not None and span.end - span.start <= 3 * (end - start):
                return place_of(span)
            at = bisect.bisect_right(self._starts.get(each, []), middle) - 1
            if at >= 0:
                return place_of(self._spans[each][at])
        return None

    def _innermost(self, thread: str, moment: float) -> HostSpan | None:
        spans = self._spans.get(thread, [])
        at = bisect.bisect_right(self._starts.get(thread, []), moment) - 1
        # Spans nest, so the innermost is the last to begin of those that have not ended. Siblings
        # that have ended lie in between; a few hundred are looked at.
        for index in range(at, max(-1, at - 2000), -1):
            if spans[index].end >= moment:
                return spans[index]
        return None


@final
class Origins:
    """The lines of the forward, for what the backward of one of its operators does."""

    def __init__(self, trace: Trace, places: Places) -> None:
        self._places = places
        # An operator without a gradient has the number of the next that has: the last is it.
        self._forward: dict[str, HostSpan] = {}
        for span in trace.spans:
            if span.facts and FORWARD_THREAD not in span.facts and SEQUENCE in span.facts:
                self._forward[str(span.facts[SEQUENCE])] = span

    def of(self, stack: Iterable[HostSpan]) -> str | None:
        """Return the line of the operator whose backward is in a stack; None if none is."""
        for span in stack:
            if span.facts and FORWARD_THREAD in span.facts:
                made = self._forward.get(str(span.facts.get(SEQUENCE)))
                return self._places.at(made.thread, made.start) if made else None
        return None


def place_of(span: HostSpan) -> str:
    """Return ``"file:line"`` of a line or a frame."""
    found = _FRAME.match(span.name)
    return f"{found['file']}:{found['line']}" if found else span.name


def most_common(places: Iterable[str | None]) -> str | None:
    """Return the place named most often, None if there is none."""
    return heaviest((place, 1) for place in places)


def heaviest(weighted: Iterable[tuple[str | None, float]]) -> str | None:
    """Return the place whose weights are the most together, None if there is none."""
    totals: dict[str, float] = defaultdict(float)
    for place, weight in weighted:
        if place:
            totals[place] += weight
    return max(totals, key=lambda place: totals[place], default=None)


def _users_frame(name: str) -> bool:
    found = _FRAME.match(name)
    return bool(found) and is_users(found["file"]) if found else False

"""When the phases of a step begin and end inside of its replays.

A replay runs no Python, so nobody can note when its forward ends; but an event that is recorded in
the capture as an external one is recorded anew by each replay. Two things follow.

It is work of the device like any other: some 2 us each, four of them in a plain step
(``benchmarks/graph_events.py``), a few per cent of a step that takes a tenth of a millisecond. So
it is asked for, and not there by default.

And the next replay writes over what this one has noted. From its launch on, the device says of the
events that they have not passed, until they have; so times are read before the next launch, if the
device is through by then, and when the loop has come to its end. A host that is far ahead, since
the steps are long, reads few of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol, TypeAlias, final

from torchfast._core.phases import start_watching, stop_watching

# One replay in so many is read, where that is possible: to ask takes the host a microsecond.
EVERY: Final = 16

Times: TypeAlias = dict[str, float]


class Moment(Protocol):
    """A place in captured work, which each replay passes."""

    def record(self) -> None:
        """Put it behind what was captured so far."""

    def has_passed(self) -> bool:
        """Whether the latest replay that was launched has come to it."""

    def ms_since(self, earlier: Moment) -> float | None:
        """Return the time from an earlier one; None if either is still to come."""


@final
class PhaseMoments:
    """The phases of one graph, and what they took in some of its replays.

    Args:
        new: Makes a moment.
        times: Where what was read is added: milliseconds by phase, one dictionary for a replay.

    Synchronizes: Never.
    """

    def __init__(self, new: Callable[[], Moment], times: deque[Times]) -> None:
        self._new, self._times = new, times
        self._phases: list[tuple[str, Moment, Moment]] = []
        self._open: list[tuple[str, Moment | None]] = []
        self._last: Moment | None = None
        self._since_read = 0
        self._is_fresh = False  # replayed since it was read

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note the phases that this thread goes through in the body, a capture's."""
        start_watching(self)
        try:
            yield
        finally:
            stop_watching(self)
            self._open.clear()

    def begin(self, name: str) -> None:
        """Note that a phase begins; one within a phase of the same name is part of that."""
        is_inner = any(name == outer for outer, _ in self._open)
        self._open.append((name, None if is_inner else self._now()))

    def end(self, _: object) -> None:
        """Note that the innermost ends."""
        if self._open:
            name, begun = self._open.pop()
            if begun is not None:
                self._phases.append((name, begun, self._now()))

    def _now(self) -> Moment:
        self._last = self._new()
        self._last.record()
        return self._last

    def before_replay(self) -> None:
        """Read the last replay, if it is time for that and the device is through with it."""
        self._since_read += 1
        if self._since_read >= EVERY:
            self.read()

    def replayed(self) -> None:
        """Say that a replay was launched."""
        self._is_fresh = True

    def read(self) -> None:
        """Read the last replay, unless that was done or the device is not through with it."""
        if not self._is_fresh or self._last is None or not self._last.has_passed():
            return
        found: Times = {}
        for name, begun, ended in self._phases:
            ms = ended.ms_since(begun)
            if ms is None or ms < 0.0:  # of two replays
                return
            found[name] = found.get(name, 0.0) + ms
        self._since_read, self._is_fresh = 0, False
        self._times.append(found)

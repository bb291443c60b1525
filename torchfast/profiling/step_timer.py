"""StepTimer: what the parts of a step take, measured all the time, without a wait.

Events are put into the device's queue where a phase begins and where it ends, and are compared some
steps later, when the device has passed them. So nobody waits; but to record one takes the host some
microseconds, and a step has a dozen. So steps are sampled: the first ones, which are eager where a
graph is to be captured, and from then on one in `EVERY`, or fewer where that would cost more than
`BUDGET` of a step.

The times are the device's: between two events lies what was enqueued between them, and the time
in which the queue ran empty. ``data_wait`` is therefore not how long the host waited for a batch,
which in a healthy loop is ahead and waits often, but how long the device did.

A replay runs no Python, so nothing can be recorded in it: told are ``data_wait``, what it takes as
a whole, and what of the step is left outside. Its forward, backward and update are those of the
eager steps before the capture, and are labelled so; they are longer where the host was the limit.
With ``CUDAGraphOptions(time_phases=True)`` the graph itself says, and they are those of replays.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from typing import Final, Literal, final

import torch

from torchfast._core.collectives import Collectives, Observation
from torchfast._core.phases import (
    BACKWARD,
    CAPTURE,
    COMMUNICATION,
    DATA_WAIT,
    EXPOSED_COMMUNICATION,
    FORWARD,
    H2D,
    OTHER,
    REPLAY,
    UPDATE,
    start_recording,
    stop_recording,
)
from torchfast._core.reading import Mark, Marks
from torchfast._core.step_times import PhaseTimes, Source, StepTimes
from torchfast.profiling.communication_times import communication_time

# One step in so many is taken apart, at most.
EVERY: Final = 16
# At the beginning each is, but the very first, in which libraries load and allocate.
NUM_FIRST: Final = 8
# Of the time of all steps, what the host may spend on sampling. The device spends less.
BUDGET: Final = 0.0025
# Samples that are on their way at a time: a host may be far ahead.
MOST_PENDING: Final = 8
# Percentiles are over so many samples, the latest ones; of whole steps over four times as many.
WINDOW: Final = 256
# After so many samples without a replay, steps are no longer said to be replays.
RECENT: Final = 16

# Rows that the table has of its own: a phase of a user's that is called so gets another name.
_TAKEN: Final = ("step", OTHER, EXPOSED_COMMUNICATION, str(CAPTURE), str(REPLAY))
_MEASURED: Final[Source] = "measured"
_FROM_WARM_UP: Final[Source] = "from warm-up"
ORDER: Final = (
    DATA_WAIT,
    H2D,
    REPLAY,
    FORWARD,
    BACKWARD,
    COMMUNICATION,
    EXPOSED_COMMUNICATION,
    UPDATE,
)


@dataclass(eq=False, slots=True)
class _Part:
    """One phase of one sampled step."""

    name: str
    sample: _Sample
    around: _Part | None
    start: Mark
    stop: Mark | None = None

    def enclosing(self) -> Iterator[_Part]:
        """Yield the phases that this one lies in, as far as they came to their end."""
        part = self.around
        while part is not None:
            if part.stop is not None:
                yield part
            part = part.around


@dataclass(eq=False, slots=True)
class _Sample:
    """A step that is taken apart, or several that a replay has done at once."""

    start: Mark
    stop: Mark | None = None
    num_steps: int = 1
    is_first: bool = False
    kind: Literal["eager", "replay"] = "eager"
    parts: list[_Part] = field(default_factory=list)
    innermost: _Part | None = None
    collectives: Observation | None = None
    is_void: bool = False
    spent_s: float = 0.0

    def marks(self) -> list[Mark]:
        """Return all moments that were noted."""
        found = [self.start, self.stop, *(m for p in self.parts for m in (p.start, p.stop))]
        beside = [] if self.collectives is None else self.collectives.marks()
        return [*beside, *(mark for mark in found if mark is not None)]

    def leave_out(self) -> None:
        """Note nothing more of it: a step of its own kind, of which there are few."""
        self.is_void = True
        if self.collectives is not None:
            self.collectives.end()


@final
class StepTimer:
    """Times the phases of the steps of a loop.

    Args:
        device: Where the steps run.
        marks: What notes moments there.
        collectives: Those that the steps issue, beside what their phases hold.

    Numerics: Exact.
    Synchronizes: Never.

    Example:
        >>> import torch
        >>> from torchfast._core.phases import phase
        >>> timer = StepTimer(torch.device("cpu"))
        >>> with timer.session():
        ...     for _ in range(4):
        ...         timer.begin_step()
        ...         with phase("forward"):
        ...             pass
        ...         timer.end_step()
        >>> timer.times()["forward"].num_samples
        3
    """

    def __init__(
        self,
        device: torch.device,
        marks: Marks | None = None,
        collectives: Collectives | None = None,
    ) -> None:
        self._marks = Marks(device) if marks is None else marks
        self._collectives = Collectives() if collectives is None else collectives
        self._every = EVERY
        self._costs: deque[float] = deque(maxlen=NUM_FIRST)  # of samples, in steps
        self._sample: _Sample | None = None
        self._pending: deque[_Sample] = deque()
        self._num_steps = 0  # of this session
        self._until_next = 0
        # Of a session's first steps; each later one takes the place of one of them.
        self._first: deque[dict[str, float]] = deque(maxlen=NUM_FIRST - 1)
        self._eager: deque[dict[str, float]] = deque(maxlen=WINDOW)
        self._replays: deque[dict[str, float]] = deque(maxlen=WINDOW)
        self._since_replay = RECENT
        self._talks = False  # whether steps issue collectives beside themselves
        self._steps_ms: deque[float] = deque(maxlen=4 * WINDOW)
        self._copies_ms: Sequence[float] = ()
        self._inside: Sequence[dict[str, float]] = ()
        self._thread: int | None = None  # which begins and ends steps, and alone takes up samples
        # What a log record is told, and of what it was made.
        self._num_read = self._num_new_steps = 0
        self._known_rows: list[PhaseTimes] = []
        self._known_step: list[PhaseTimes] = []
        self._rows_of: tuple[object, ...] | None = None

    # -- What the loop says ------------------------------------------------------------------------

    @contextmanager
    def session(self) -> Iterator[None]:
        """Time the steps in the body; what was measured before is kept."""
        self._num_steps = 0
        self._until_next = EVERY
        try:
            yield
        finally:
            self.cancel_step()

    def begin_step(self) -> None:
        """Say that the next batch is about to be asked for."""
        self._thread = get_ident()
        if self._sample is not None:
            self.cancel_step()
        is_first = 0 < self._num_steps < NUM_FIRST
        if not is_first and self._until_next > 1:
            return
        self._take_up()
        started = time.perf_counter()
        if len(self._pending) >= MOST_PENDING or self._marks.is_capturing:
            return
        self._sample = sample = _Sample(self._marks.now(), is_first=is_first)
        start_recording(self)
        if self._collectives.are_any:
            sample.collectives = Observation(self._marks)
            self._collectives.observe(sample.collectives)
        sample.spent_s += time.perf_counter() - started

    def end_step(self, num_steps: int = 1) -> None:
        """Say that the step is enqueued, and take up what has been measured by now.

        Args:
            num_steps: How many it was, in one replay; each is told as that part of it.
        """
        sample, self._sample = self._sample, None
        self._num_steps += num_steps
        self._until_next -= num_steps
        if sample is not None:
            sample.num_steps = num_steps
            self._until_next = self._every
            self._stop_recording(sample)
            started = time.perf_counter()
            if sample.is_void or self._marks.is_capturing:
                self._marks.give_back(sample.marks())
            else:
                sample.stop = self._marks.now()
                sample.spent_s += time.perf_counter() - started
                self._pending.append(sample)
        if self._pending:
            self._take_up()

    def cancel_step(self) -> None:
        """Forget the step that has begun, if there is one: there was no batch for it."""
        sample, self._sample = self._sample, None
        if sample is not None:
            self._stop_recording(sample)
            self._marks.give_back(sample.marks())

    def _stop_recording(self, sample: _Sample) -> None:
        stop_recording(self)
        if sample.collectives is not None:
            started = time.perf_counter()
            self._collectives.observe(None)
            sample.collectives.end()
            sample.spent_s += time.perf_counter() - started

    def note_steps(self, times_ms: Sequence[float]) -> None:
        """Add what whole steps took, sampled or not."""
        self._steps_ms += times_ms
        self._num_new_steps += len(times_ms)

    def note_copies(self, times_ms: Sequence[float]) -> None:
        """Say what the latest copies to the device took, of those that run beside the steps."""
        self._copies_ms = times_ms

    def note_replays(self, times_ms: Sequence[dict[str, float]]) -> None:
        """Say what the phases inside of the latest replays took, if the graph tells."""
        self._inside = times_ms

    # -- What phases say ---------------------------------------------------------------------------

    def begin(self, name: str) -> _Part | None:
        """Note that a phase begins; returns what `end` is to be given."""
        sample = self._sample
        if sample is None or sample.is_void:
            return None
        started = time.perf_counter()
        if name is CAPTURE or self._marks.is_capturing:
            sample.leave_out()
            return None
        if name is REPLAY:
            sample.kind = "replay"
        else:
            name = _told_apart(name)
        part = _Part(name, sample, sample.innermost, self._marks.now())
        sample.parts.append(part)
        sample.innermost = part
        sample.spent_s += time.perf_counter() - started
        return part

    def end(self, begun: _Part | None) -> None:
        """Note that it ends; one of an earlier step, left open by a generator, is no matter."""
        sample = self._sample
        if begun is None or sample is not begun.sample or sample.is_void:
            return
        started = time.perf_counter()
        begun.stop = self._marks.now()
        if sample.innermost is begun:
            sample.innermost = begun.around
        sample.spent_s += time.perf_counter() - started

    # -- What came of it ---------------------------------------------------------------------------

    def times(self) -> StepTimes:
        """Return the percentiles of what has been measured by now."""
        return StepTimes(phases=tuple(sorted([*self._rows(), *self._step_row()], key=_place)))

    def recent_times(self) -> StepTimes:
        """Return the same for a log record: cheaper, and the whole steps perhaps some steps old."""
        if self._rows_of != (now := (self._num_read, self._copies_ms, self._inside)):
            self._known_rows, self._rows_of = self._rows(), now
        if self._num_new_steps >= max(1, len(self._steps_ms) // 8):
            self._known_step, self._num_new_steps = self._step_row(), 0
        return StepTimes(phases=tuple(sorted([*self._known_rows, *self._known_step], key=_place)))

    def _step_row(self) -> list[PhaseTimes]:
        return [PhaseTimes.of("step", list(self._steps_ms))] if self._steps_ms else []

    def _rows(self) -> list[PhaseTimes]:
        if self._thread in (None, get_ident()):
            self._take_up()
        is_replayed = bool(self._replays) and self._since_replay < RECENT
        eager = [*list(self._first)[len(self._eager) :], *self._eager]
        sources: dict[str, Source] = {COMMUNICATION: "beside the step"} if self._talks else {}
        rows = _rows(list(self._replays) if is_replayed else eager, sources)
        if is_replayed:
            inside = [{_told_apart(n): ms for n, ms in t.items()} for t in self._inside]
            if self._talks:  # a graph tells of those only that are in the step's own queue
                inside = [{n: ms for n, ms in t.items() if n != COMMUNICATION} for t in inside]
            for samples, source in ((inside, _MEASURED), (eager, _FROM_WARM_UP)):
                known = {row.name for row in rows}
                rows += [row for row in _rows(samples, {}, source) if row.name not in known]
        if self._copies_ms and all(row.name != H2D for row in rows):
            rows.append(PhaseTimes.of(H2D, self._copies_ms, "copy stream"))
        return rows

    def _take_up(self) -> None:
        """Read the samples that the device has passed."""
        while self._pending:
            started = time.perf_counter()
            sample = self._pending[0]
            if not self._has_passed(sample):
                sample.spent_s += time.perf_counter() - started
                return
            self._pending.popleft()
            self._read(sample, started)

    def _has_passed(self, sample: _Sample) -> bool:
        assert sample.stop is not None
        if sample.collectives is not None and not sample.collectives.is_complete:
            return False
        # Alone at first: of a device that is behind each step asks this, and one moment is enough.
        if not self._marks.has_passed(sample.stop):
            return False
        # A phase may have been on a stream that nobody waits for, so each is asked.
        return all(map(self._marks.has_passed, sample.marks()))

    def _read(self, sample: _Sample, started: float) -> None:
        assert sample.stop is not None
        between = self._marks.between_ms
        total_ms = between(sample.start, sample.stop)
        self._num_read += 1
        times = {DATA_WAIT: 0.0}
        inside_ms = 0.0
        talks = sample.collectives is not None and bool(sample.collectives.collectives)
        for part in sample.parts:
            if part.stop is None or (talks and part.name == COMMUNICATION):
                continue
            around = {enclosing.name for enclosing in part.enclosing()}
            spent_ms = between(part.start, part.stop)
            if part.name not in around:
                times[part.name] = times.get(part.name, 0.0) + spent_ms
            if not around:
                inside_ms += spent_ms
        if talks:
            times |= self._communication(sample)
            self._talks = True
        times[OTHER] = max(0.0, total_ms - inside_ms)
        times = {name: spent_ms / sample.num_steps for name, spent_ms in times.items()}
        total_ms /= sample.num_steps
        if sample.kind == "replay":
            self._replays.append(times)
            self._since_replay = 0
        else:
            (self._first if sample.is_first else self._eager).append(times)
            self._since_replay += 1
        self._marks.give_back(sample.marks())
        spent_s = sample.spent_s + (sample.collectives.spent_s if sample.collectives else 0.0)
        spent_s += time.perf_counter() - started  # asking and reading take as long as noting
        if total_ms > 0:
            # The median: a host that is interrupted once has not become slow.
            self._costs.append(spent_s * 1e3 / total_ms)
            self._every = max(EVERY, math.ceil(statistics.median(self._costs) / BUDGET))

    def _communication(self, sample: _Sample) -> dict[str, float]:
        """Return what collectives take in a step that issues some beside itself.

        Those within it are among them: they are no time of their own, and lie in ``other`` or in
        the phase around them.
        """
        assert sample.collectives is not None
        since_start = partial(self._marks.between_ms, sample.start)
        in_step = [
            (since_start(part.start), since_start(part.stop))
            for part in sample.parts
            if part.name == COMMUNICATION and part.stop is not None
        ]
        found = communication_time(sample.collectives, in_step, since_start)
        times = {COMMUNICATION: found.total_ms}
        if found.exposed_ms is not None:
            times[EXPOSED_COMMUNICATION] = found.exposed_ms
        return times


def _rows(
    samples: Sequence[dict[str, float]], sources: Mapping[str, Source], usual: Source = _MEASURED
) -> list[PhaseTimes]:
    names = dict.fromkeys(name for times in samples for name in times)
    return [
        PhaseTimes.of(name, [t.get(name, 0.0) for t in samples], sources.get(name, usual))
        for name in names
    ]


def _told_apart(name: str) -> str:
    """Return how the phase of a step is called in the table, which has rows of its own."""
    return f"{name} (yours)" if name in _TAKEN else name


def _place(row: PhaseTimes) -> tuple[int, int]:
    """Return where a row stands: the step, its phases, the user's own, and what is left."""
    if row.name in ORDER:
        return 1, ORDER.index(row.name)
    return {"step": 0, OTHER: 3}.get(row.name, 2), 0

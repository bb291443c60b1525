"""Eager steps that are watched and not, one of each in turns, and what is spent within them.

Whose turn it is, is set by a callback between two steps, and a step's time is from where the
callback ends to where it is called again: setting is no part of it. What one arm leaves behind must
not be paid by another:

- each arm that is timed has a `StepTimer` of its own, which counts, samples and reads in the arm's
  steps alone, as it would in a fit by itself. The loop's calls are led to it, in all arms alike,
  so that no class is changed between two steps;
- the replacements of a SyncGuard are in place for the whole fit, for to put them there lets Python
  forget what it knew of the attributes of tensors. The arms differ by whether the guard is entered.
  What replacements cost that nobody listens to is counted (``held``), and added to the difference;
- a guard is entered in front of each step, and left again where the arm is another.

A step in which a record is written, as is due after ten steps, is compared with nothing.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import torch

from benchmarks.paired_steps import RUN, Timed
from benchmarks.watching_within import Passed, Spent, passed_calls
from torchfast import FitEvent, SyncGuard, Trainer
from torchfast._core.step_times import StepTimes
from torchfast._core.syncs import WATCH
from torchfast.profiling import StepTimer
from torchfast.profiling.step_timer import EVERY, NUM_FIRST

ARMS: Final = ("no times", "as it is", "guard", "again")
# Arms of which there is no time: in one the timer is clocked, in the other calls are counted.
WITHIN, COUNTED = "within", "counted"
# A timer takes the first steps apart, each of them.
WARM_UP_STEPS: Final = NUM_FIRST + 4
# So many steps of the clocked timer.
WITHIN_STEPS: Final = 20 * EVERY
# What a loop says to its timer.
SAID: Final = ("begin_step", "end_step", "note_steps", "recent_times")


class StepWatchers:
    """What watches a trainer's steps, put in and taken out between any two of them.

    Attributes:
        spent: What the clocked timer spent in its latest step.
        passed: What the guard was asked in the step that was counted.
    """

    def __init__(self, trainer: Trainer, device: str) -> None:
        self._syncs = trainer._step.syncs
        self._kind: Any = device
        self._guard = SyncGuard("record", device=self._kind)
        self._said = {name: getattr(StepTimer, name) for name in SAID}
        self._stack, self._counting = ExitStack(), ExitStack()
        self.spent, self.passed = Spent(), Passed({}, {}, [], [])
        self._timers = {arm: StepTimer(torch.device(device)) for arm in (*ARMS, WITHIN)}
        self._calls = {arm: self._calls_of(arm) for arm in self._timers}
        self._be("no times")
        self._is_sampled = self._is_told = False
        self._num_read = 0

    def _calls_of(self, arm: str) -> tuple[Callable[..., Any], ...]:
        timer = self._timers[arm]
        if arm == "no times":
            nothing = lambda *_: None  # noqa: E731
            return nothing, nothing, nothing, StepTimes
        bound = [partial(function, timer) for function in self._said.values()]
        if arm != WITHIN:
            return tuple(bound)
        timer.begin = self.spent.clocked(timer.begin)  # type: ignore[method-assign]
        timer.end = self.spent.clocked(timer.end)  # type: ignore[method-assign]
        return tuple(map(self.spent.clocked, bound))

    def open(self) -> None:
        """Lead what the loop says to the timers of the arms, and put replacements in place."""
        for timer in self._timers.values():
            self._stack.enter_context(timer.session())
        WATCH.hold(self._kind)
        self._stack.callback(WATCH.release)
        self._stack.callback(self._guard.close)

        def begin_step(_: StepTimer) -> None:
            self._begin_step()
            self._is_sampled = self._timer._sample is not None

        def recent_times(_: StepTimer) -> Any:
            self._is_told = True
            return self._recent_times()

        said: list[Callable[..., Any]] = [
            begin_step,
            lambda _: self._end_step(),
            lambda _, times_ms: self._note_steps(times_ms),
            recent_times,
        ]
        for name, ours in zip(SAID, said, strict=True):
            self._stack.callback(setattr, StepTimer, name, self._said[name])
            setattr(StepTimer, name, ours)

    def be(self, arm: str) -> None:
        """Let the step to come be watched as this arm is."""
        self._leave()
        self._be("guard" if arm == COUNTED else arm)
        self._is_sampled = self._is_told = False
        self._num_read, self.spent.ms = self._timer._num_read, 0.0
        self._guard.__enter__()  # as `fit` does around its loop
        if arm in ("guard", COUNTED):
            self._syncs._guard = self._guard
        else:
            self._guard.__exit__(None, None, None)
        if arm == COUNTED:
            self.passed = self._counting.enter_context(passed_calls())

    def _be(self, arm: str) -> None:
        self._timer = self._timers[arm]
        self._begin_step, self._end_step, self._note_steps, self._recent_times = self._calls[arm]

    def timed(self, ms: float) -> Timed:
        """Return the step that is over, with what its timer did in it."""
        self._counting.close()
        has_read = self._timer._num_read != self._num_read
        return Timed(ms, (self._is_sampled, has_read), counts=not self._is_told)

    def within(self) -> Timed:
        """Return what the clocked timer spent in the step that is over."""
        has_read = self._timer._num_read != self._num_read
        return Timed(self.spent.ms, (self._is_sampled, has_read, self._is_told))

    def num_samples(self) -> dict[str, int]:
        """Return how often the timer of ``as it is`` has measured each phase."""
        found = self._timers["as it is"].times()
        return {phase.name: phase.num_samples for phase in found.phases if phase.name != "step"}

    def _leave(self) -> None:
        if self._syncs._guard is not None:
            self._syncs._guard = None
            if self._guard._depth:  # `fit` has left it where an error ended a step
                self._guard.__exit__(None, None, None)

    def close(self) -> None:
        """Watch as `fit` does."""
        self._counting.close()
        self._leave()
        self._stack.close()


class Alternation:
    """A callback that gives each arm a step of every block, in random order, and ends the fit.

    Attributes:
        steps: By arm its step of each block.
        within: What the clocked timer spent in its steps.
    """

    def __init__(self, watchers: StepWatchers, seconds: float) -> None:
        self.steps: dict[str, list[Timed]] = {arm: [] for arm in ARMS}
        self.within: list[Timed] = []
        self._watchers, self._seconds = watchers, seconds
        self._script = self._measure()
        self._watchers.be(next(self._script))
        self._begun = time.perf_counter()

    def __call__(self, event: FitEvent) -> None:
        """End a step and begin the next one."""
        if event.kind != "step":
            return
        ended = time.perf_counter()
        timed = self._watchers.timed((ended - self._begun) * 1e3)
        try:
            arm = self._script.send(timed)
        except StopIteration:
            event.stop()
            arm = "no times"  # `fit` leaves the guard that it finds at its end
        self._watchers.be(arm)
        self._begun = time.perf_counter()

    def _measure(self) -> Generator[str, Timed]:
        """Yield whose step is next; the step that it was is sent."""
        for _ in range(WARM_UP_STEPS):
            for arm in ARMS:
                yield arm
        order = random.Random(0)
        begun = time.perf_counter()
        fewest = 2 * RUN
        while fewest > 0 or time.perf_counter() - begun < self._seconds:
            fewest -= 1
            block = {}
            for arm in order.sample(ARMS, len(ARMS)):
                block[arm] = yield arm
            for arm, timed in block.items():
                self.steps[arm].append(timed)
        for _ in range(WARM_UP_STEPS):
            yield WITHIN
        for _ in range(WITHIN_STEPS):
            yield WITHIN
            self.within.append(self._watchers.within())
        yield "guard"
        yield COUNTED

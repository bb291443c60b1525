"""A device that is behind, on which a timer of steps marks its moments."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import torch

from torchfast import phase
from torchfast._core import phases
from torchfast._core.phases import CAPTURE, REPLAY
from torchfast.profiling import step_timer
from torchfast.profiling.step_timer import StepTimer

CPU = torch.device("cpu")


class Event:
    """A moment of the device below."""

    def __init__(self):
        self.at = None


class SimulatedQueue:
    """Stands in for `Marks` on a device that is behind: a moment has passed when it is let.

    Time is told: `spend` enqueues work of so many milliseconds.
    """

    def __init__(self):
        self.at_ms = 0.0
        self.passed_ms = -1.0
        self.num_made = 0
        self.spare = []
        self.is_capturing = False
        self.beside_ms = 0.0
        self.name = "the step's"

    def spend(self, ms):
        self.at_ms += ms

    def let_pass(self):
        self.passed_ms = self.at_ms

    def now(self):
        return self._at(self.at_ms)

    def _at(self, ms):
        assert not self.is_capturing, "an event in a capture can never be asked"
        if not self.spare:
            self.num_made += 1
            self.spare.append(Event())
        event = self.spare.pop()
        event.at = ms
        return event

    def queue(self):
        return self.name

    def beside(self):
        self.beside_ms = max(self.beside_ms, self.at_ms)
        return self._at(self.beside_ms)

    def behind(self, work, note):
        """`work` takes so many milliseconds, behind what runs beside already."""
        if work == "unknown":
            return False
        self.beside_ms += work
        note(self._at(self.beside_ms))
        return True

    def has_passed(self, event):
        return event.at <= self.passed_ms

    def between_ms(self, before, after):
        assert self.has_passed(before), "the host would have to wait"
        assert self.has_passed(after), "the host would have to wait"
        return after.at - before.at

    def give_back(self, events):
        for event in events:
            assert event not in self.spare, "given back twice"
            self.spare.append(event)


@contextmanager
def timed(queue, collectives=None):
    """Yield a timer that listens; behind it nobody listens any more.

    The host takes no time: how often the timer samples depends on what that costs, which on a busy
    machine is seldom the same twice.
    """
    host = SimpleNamespace(perf_counter=lambda: 0.0)
    with mock.patch.object(step_timer, "time", host):
        timer = StepTimer(CPU, queue, collectives)
        with timer.session():
            yield timer
    assert phases._recorders == {}


# What an engine gives, by identity: a phase of the user's that is called so is another.
OF_GRAPHS = {"replay": REPLAY, "capture": CAPTURE}


def run_step(timer, queue, **spent):
    """Run a step whose phases take what is told; ``between`` is in none of them."""
    timer.begin_step()
    for name, ms in spent.items():
        if name == "between":
            queue.spend(ms)
            continue
        with phase(OF_GRAPHS.get(name, name)):
            queue.spend(ms)
    timer.end_step()


def skip_first(timer, queue):
    run_step(timer, queue)


def percentiles(timer, name):
    found = timer.times()[name]
    return found.p50_ms, found.p90_ms, found.p99_ms

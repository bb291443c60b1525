"""The time that is spent inside of what watches: counted there, so that no neighbour disturbs it.

On CUDA it is a lower bound of what watching costs: what it drives out of the caches, and what it
makes the device wait, is not in it. The step timer's methods are clocked. A SyncGuard's are too
short for that: its calls of one step are counted, and each kind is timed by itself, with the
arguments that it had, in front of a function that does nothing. (A guard for the CPU is told of
every number that is read there, and asks whose line it is, which takes longer or shorter than in
the step.)
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, Final, NamedTuple

import torch

from torchfast import SyncGuard
from torchfast._core.sync_calls import SyncCall
from torchfast._core.syncs import WATCH, SyncWatch

# Calls of a name whose arguments are kept, and how often one of them is timed.
EXAMPLES: Final = 8
BELOW: Final = "below: "
REPEATED: Final = 1000


class Spent:
    """Adds up what clocked functions take.

    Attributes:
        ms: What they took since it was last set to nothing.
    """

    def __init__(self) -> None:
        self.ms = 0.0
        self._clock_ms = clock_ms()

    def clocked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, clocked."""

        def clocked(*args: Any) -> Any:
            begun = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.ms += (time.perf_counter() - begun) * 1e3 - self._clock_ms

        return clocked


def clock_ms() -> float:
    """Return what the clock sees between two readings with nothing between them."""
    now = time.perf_counter
    return statistics.median(-(now() - now()) * 1e3 for _ in range(REPEATED))


class Passed(NamedTuple):
    """What a guard is asked in one step.

    Attributes:
        calls: By name, how often a function runs that stands in the place of one of torch's; of
            operators of the net beneath them with a word for that in front.
        examples: Some of them, with their arguments.
        entered: How often a listener is entered.
        during: How often it is said what the loop does.
    """

    calls: dict[str, int]
    examples: dict[str, list[tuple[SyncCall, tuple[Any, ...], dict[str, Any]]]]
    entered: list[None]
    during: list[None]


class GuardWithin(NamedTuple):
    """What that takes.

    Attributes:
        calls: How many calls pass through in a step.
        watched_ms: What a guard that is entered spends within a step.
        held_ms: What one that is in place and not entered spends in it.
    """

    calls: int
    watched_ms: float
    held_ms: float


@contextmanager
def passed_calls() -> Iterator[Passed]:
    """Count what a guard that is in place is asked in the body, in this thread."""
    found = Passed(defaultdict(int), defaultdict(list), [], [])
    listening = torch.Tensor.cpu.__code__  # all replacements share it
    below, enter = SyncWatch.run_below.__code__, SyncWatch.enter.__code__
    during: Any = SyncWatch.during
    during = during.__wrapped__.__code__

    def see(frame: FrameType, event: str, _arg: Any) -> None:
        if event != "call":
            return
        if frame.f_code in (listening, below):
            told = frame.f_locals
            name = told["call"].name if frame.f_code is listening else f"{BELOW}{told['call'].name}"
            found.calls[name] += 1
            if len(found.examples[name]) < EXAMPLES:
                found.examples[name].append((told["call"], told["args"], told["options"]))
        elif frame.f_code is enter:
            found.entered.append(None)
        elif frame.f_code is during:  # it is called, and called on where the body ends
            found.during.append(None)

    sys.setprofile(see)
    try:
        yield found
    finally:
        sys.setprofile(None)


def guard_within(passed: Passed, device: str) -> GuardWithin:
    """Return what a guard spends on what was counted; no guard may be in place any more."""
    gc.collect()  # guards that nobody has any more let go
    assert not WATCH._holders, "a guard is still in place"
    kind: Any = device
    watched = held = 0.0
    for name, times in passed.calls.items():
        if name.startswith(BELOW):
            costs = [_passing_below_ms(kind)]
        else:
            costs = [_passing_ms(*example, kind) for example in passed.examples[name]]
        watched += times * statistics.mean(cost[0] for cost in costs)
        held += times * statistics.mean(cost[1] for cost in costs)
    guard = SyncGuard("record", device=kind)
    with guard, guard:  # as around the loop of `fit`, and within its steps
        nothing_ms = _call_ms(lambda: None)
        enter_ms = _call_ms(partial(_enter, guard)) - nothing_ms
        during_ms = _call_ms(_say_what_is_done) - nothing_ms
    guard.close()
    watched += len(passed.entered) * enter_ms + len(passed.during) / 2 * during_ms
    return GuardWithin(sum(passed.calls.values()), watched, held)


def _enter(guard: SyncGuard) -> None:
    with guard:
        pass


def _say_what_is_done() -> None:
    with WATCH.during("loader"):
        pass


def _nothing(*_args: Any, **_options: Any) -> None:
    pass


def _passing_ms(
    call: SyncCall, args: tuple[Any, ...], options: dict[str, Any], device: Any
) -> tuple[float, float]:
    """Return what passing through one call takes, with a listener and without."""
    owner: Any = type("Owner", (), {call.name: _nothing})
    run = lambda: getattr(owner, call.name)(*args, **options)  # noqa: E731
    watch, ear = SyncWatch([call._replace(owner=owner)]), SyncGuard("record", device=device)._ear
    plain_ms = _call_ms(run)
    watch.hold(device)
    try:
        held_ms = _call_ms(run)
        watch.enter(ear)
        try:
            watched_ms = _call_ms(run)
        finally:
            watch.leave(ear)
    finally:
        watch.release()
    return max(0.0, watched_ms - plain_ms), max(0.0, held_ms - plain_ms)


def _passing_below_ms(device: Any) -> tuple[float, float]:
    """Return the same of an operator of the net, whose kernel in Python torch calls from C++.

    It is measured where it is, by a number that is read of the device: of one on the host a guard
    for CUDA hears nothing.
    """
    number, guard = torch.ones((), device=device), SyncGuard("record", device=device)
    run = lambda: torch._C.TensorBase.item(number)  # noqa: E731
    plain_ms = _call_ms(run)
    with guard:
        watched_ms = _call_ms(run)
        WATCH.leave(guard._ear)
        held_ms = _call_ms(run)
        WATCH.enter(guard._ear)
    return max(0.0, watched_ms - plain_ms), max(0.0, held_ms - plain_ms)


def _call_ms(function: Callable[[], Any]) -> float:
    """Return what a call takes at its quickest."""
    found = []
    for _ in range(5):
        begun = time.perf_counter()
        for _ in range(REPEATED // 5):
            function()
        found.append((time.perf_counter() - begun) / (REPEATED // 5) * 1e3)
    return min(found)

"""Whether a whole step is faster with the recipes that were measured shape by shape.

A shape that is faster alone can be slower in its step: the compiler fuses its casts otherwise, or
no longer what stood around it; an eager product is timed with launches that a graph saves. And one
that is slower alone can be faster there, with casts that cost nothing where they are fused. So once
the recipes are chosen, forward and backward of the first batch run in bf16, with those layers in
float8, and with all that were measured, in turns, as the plan compiles them. What is fastest stays;
what is not at least as fast as bf16, within 2 %, goes back to bf16 as a whole.

Where a graph will hold the step, launches do not count (see `_core/device_stopwatch`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import nn

from torchfast._core.decisions import Decision
from torchfast._core.device_stopwatch import DeviceStopwatch
from torchfast._core.measure import Measurement, measure
from torchfast._core.untouched import untouched

logger = logging.getLogger(__name__)

PLAIN: Final = "bf16"
FLOAT8: Final = "float8"
ALL: Final = "all in float8"
# A part more than which a step in float8 may not take.
MOST: Final = 0.02
# Of long steps so many of each are timed, whatever the budget is: fewer have no interval.
_LEAST_ROUNDS: Final = 8

Work = Callable[[], object]
Around = Callable[[str], AbstractContextManager[object]]
StepTimer = Callable[[Mapping[str, Work], torch.device, float, Around], Measurement]


@final
@dataclass(frozen=True, kw_only=True)
class StepCheck:
    """Forward and backward of a step in float8 beside bf16.

    Attributes:
        times_ms: The median of each.
        name: The faster of the ways in float8.
        ratio: Of that to bf16, the median over rounds.
        low: The lower bound of its interval at 99 %.
        high: The upper one.
        is_kept: Whether float8 stays.
    """

    times_ms: Mapping[str, float]
    name: str
    ratio: float
    low: float
    high: float
    is_kept: bool

    @property
    def takes_all(self) -> bool:
        """Whether layers stay in float8 that alone are not faster so."""
        return self.is_kept and self.name == ALL

    def __str__(self) -> str:
        part = f"{self.ratio:.3f} ({self.low:.3f} to {self.high:.3f})"
        return f"forward and backward of the whole step took {part} of the time of bf16"

    def decision(self) -> Decision:
        """Say what was found."""
        times = ", ".join(f"{name} {ms:.4g} ms" for name, ms in self.times_ms.items())
        then = "" if self.is_kept else f"; more than {1 + MOST:.2f} is not taken: all is in bf16"
        if self.takes_all:
            then = "; layers that alone are slower in float8 are not so here"
        outcome: Any = "applied" if self.is_kept else "left alone"
        return Decision(lever="float8 step", outcome=outcome, detail=f"{self}: {times}{then}")


def check_step(
    work: Work,
    left: Callable[[], AbstractContextManager[None]],
    model: nn.Module,
    device: torch.device,
    *,
    widened: Callable[[], AbstractContextManager[None]] | None = None,
    budget_s: float,
    in_graph: bool,
    timer: StepTimer | None = None,
) -> StepCheck:
    """Time a step in float8 and in bf16, in turns.

    Args:
        work: Its forward and backward on a batch, as the plan runs them.
        left: Returns a context in which the model is in bf16.
        model: As it trains; it is put back behind this.
        device: Where.
        widened: Returns a context in which more layers are in float8; None where there are none.
        budget_s: Most seconds, compilation aside; more for steps of seconds.
        in_graph: Whether a graph will hold the step.
        timer: What times them, by default on the device.

    Numerics: State, gradients and generators are as before (see `untouched`).
    Synchronizes: Often.
    """
    forms: dict[str, Callable[[], AbstractContextManager[Any]]] = {PLAIN: left, FLOAT8: nullcontext}
    if widened is not None:
        forms[ALL] = widened

    def around(name: str) -> AbstractContextManager[object]:
        return forms[name]()

    with untouched(model, device, work):
        for name in list(forms):
            try:
                _warm_up(work, around(name))
            except Exception as error:  # other kinds of kernels may not run, or not fit
                if name != ALL:
                    raise
                logger.info("all layers in float8 are not timed: %s", error)
                del forms[name]
        works: dict[str, Work] = dict.fromkeys(forms, work)
        clock = (_of_graphs if in_graph else _on_device) if timer is None else timer
        found = clock(works, device, budget_s, around)
    ratios = {name: found.ratio(name) for name in works if name != PLAIN}
    # One that the time did not suffice for is no number.
    best = min(ratios, key=lambda name: (not ratios[name].num_rounds, ratios[name].ratio))
    ratio = ratios[best]
    timings = {name: found.timing(name) for name in works}
    return StepCheck(
        times_ms={name: timing.median_ms for name, timing in timings.items() if timing},
        name=best,
        ratio=ratio.ratio,
        low=ratio.low,
        high=ratio.high,
        is_kept=ratio.verdict != "slower" and ratio.ratio <= 1 + MOST,
    )


def _warm_up(work: Work, around: AbstractContextManager[object]) -> None:
    """Run a step twice, since the first compiles."""
    with around:
        for _ in range(2):
            work()


def _on_device(
    works: Mapping[str, Work],
    device: torch.device,
    budget_s: float,
    around: Around,
    stopwatch: DeviceStopwatch | None = None,
) -> Measurement:
    return measure(
        works,
        reference=PLAIN,
        device=device,
        budget_s=budget_s,
        smallest=MOST,
        least_rounds=_LEAST_ROUNDS,
        around=around,
        stopwatch=stopwatch,
    )


def _of_graphs(
    works: Mapping[str, Work], device: torch.device, budget_s: float, around: Around
) -> Measurement:
    return _on_device(works, device, budget_s, around, DeviceStopwatch(device))

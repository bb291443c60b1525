"""What steps take that recompute in different ways, turn by turn.

Each way runs a few steps, as it would in training, and all of them take turns, since a machine's
pace wanders. The steps of a turn follow one another without a wait, as in training, where the host
runs ahead of the device: waits around each step make it longer with recompute and without alike,
and so recompute look cheaper. Where a graph will hold the step, what is timed are replays of graphs
of forward and backward: launched kernel by kernel, a model of small kernels waits for the host,
which has the second forward to launch too, and recompute looks much dearer than it will be.

Only where a step does not fit into the device is its time estimated, from what the blocks' forwards
take.
"""

from __future__ import annotations

import gc
import logging
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from torchfast._core.errors import CaptureError
from torchfast.memory.block_forward import BlockForward
from torchfast.memory.failure import cause_of, let_go
from torchfast.memory.recompute_probe import BlockProbe

logger = logging.getLogger(__name__)

Step = Callable[[Any], object]
Run = Callable[[int], None]  # runs that many steps
Arm = list[BlockForward]


class Graphs(Protocol):
    """What captures a step as it is done at the time."""

    def capture(self) -> Callable[[], object]:
        """Capture it; return what replays it.

        Raises:
            CaptureError: It cannot be captured.
        """

    def close(self) -> None:
        """Let go of all that was captured."""


MakeGraphs = Callable[[Step, Any], Graphs | None]  # None on a device that has no graphs

# A turn is as many steps as take so long, within these bounds.
_TURN_MS = 200.0
_FEWEST_STEPS, _MOST_STEPS = 2, 8


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """What steps take.

    Attributes:
        by_way: The time of each way, in ms; None where it did not fit.
        by_call: What the forward of each call of a block takes; empty if nothing is estimated.
        plain_ms: What a step without recompute would take, where that did not fit.
        is_eager: Whether steps were launched, and not replayed.
    """

    by_way: list[float | None]
    by_call: list[float]
    plain_ms: float
    is_eager: bool


def timed(
    step: Step,
    batch: Any,
    arms: list[Arm],
    probe: BlockProbe,
    device: torch.device,
    repeats: int,
    graphs: MakeGraphs | None,
) -> StepTimes:
    """Return what steps take.

    Args:
        step: Runs forward and backward of a batch, with gradients made anew.
        batch: The batch.
        arms: What stands in the way of blocks: nothing in the first, all blocks whole in the last.
        probe: What times blocks one by one.
        device: Where.
        repeats: How many turns of each are timed.
        graphs: Makes what captures the step; None where no graph will hold it.
    """
    captures = None if graphs is None else graphs(step, batch)
    times = None if captures is None else _replayed(captures, arms, device, repeats)
    is_eager = times is None
    if times is None:
        times = _in_turns([_launched(step, batch, arm) for arm in arms], device, repeats)
    if None not in times:
        return StepTimes(by_way=times, by_call=[], plain_ms=0.0, is_eager=is_eager)
    by_call, whole_ms = _of_blocks(step, batch, probe, device, repeats)
    plain_ms = max(whole_ms - sum(by_call), whole_ms / 10)
    # They were launched and waited for one by one. In replays, or in a row, all is shorter in the
    # measure that the step is.
    scale = 1.0 if times[-1] is None else times[-1] / whole_ms
    return StepTimes(
        by_way=times,
        by_call=[ms * scale for ms in by_call],
        plain_ms=plain_ms * scale,
        is_eager=is_eager,
    )


def peak_rises(
    step: Step, batch: Any, model: nn.Module, arms: list[Arm], device: torch.device
) -> list[float | None]:
    """Return by how much memory rises at the peak of an eager step of each way.

    Infinity where the device had not enough, None on one that does not tell. What lives before is
    all but the gradients. Torch's statistics of the peak begin anew.

    Args:
        step: Runs forward and backward of a batch, with gradients made anew.
        batch: The batch.
        model: Whose gradients it makes.
        arms: What stands in the way of blocks.
        device: Where.
    """
    if device.type != "cuda":
        return [None] * len(arms)
    return [_peak_rise(step, batch, model, arm, device) for arm in arms]


def _peak_rise(
    step: Step, batch: Any, model: nn.Module, arm: Arm, device: torch.device
) -> float | None:
    outer = sys.exception()
    try:
        with _standing(arm):
            step(batch)  # in which selective chooses, and libraries make their workspaces
            model.zero_grad(set_to_none=True)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            step(batch)
            return torch.cuda.max_memory_allocated(device) - before or None
    except torch.OutOfMemoryError as error:
        let_go(error, outer)
    gc.collect()
    return math.inf


def device_bytes(device: torch.device) -> int:
    """Return how much memory a device has; 0 where it does not tell."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def _replayed(
    captures: Graphs, arms: list[Arm], device: torch.device, repeats: int
) -> list[float | None] | None:
    """Return what replays take; None if the step cannot be captured, as its graph cannot be."""
    try:
        return _in_turns([_captured(captures, arm) for arm in arms], device, repeats)
    except CaptureError as error:
        logger.warning(
            "plan_recompute times eager steps, since the step could not be captured: %s", error
        )
        return None
    finally:
        captures.close()


def _captured(captures: Graphs, arm: Arm) -> Run | None:
    """Return what replays steps in one way; None if it did not fit."""
    outer = sys.exception()
    try:
        with _standing(arm):
            replay = captures.capture()
    except (torch.OutOfMemoryError, CaptureError) as error:
        if cause_of(error, outer) is None:
            raise
        let_go(error, outer)
    else:
        return partial(_repeated, replay)
    gc.collect()
    return None


def _repeated(replay: Callable[[], object], steps: int) -> None:
    for _ in range(steps):
        replay()


def _launched(step: Step, batch: Any, arm: Arm) -> Run:
    def run(steps: int) -> None:
        with _standing(arm):
            for _ in range(steps):
                step(batch)

    return run


def _in_turns(runs: Sequence[Run | None], device: torch.device, repeats: int) -> list[float | None]:
    """Return what a step of each takes, the first without recompute; None if it did not fit."""
    turns: list[list[float] | None] = [None if run is None else [] for run in runs]

    def turn(number: int, steps: int) -> float | None:
        """Return the ms of a step in a turn; None if it did not fit, now or before."""
        run = runs[number]
        if run is None or turns[number] is None:
            return None
        wait(device)
        start = time.perf_counter()
        try:
            run(steps)
        except torch.OutOfMemoryError:
            turns[number] = None
            return None
        wait(device)
        return (time.perf_counter() - start) * 1e3 / steps

    for number in range(len(runs)):
        turn(number, 1)  # which warms up, and is where selective chooses
    again = (turn(number, 1) for number in range(len(runs)))
    once = next((ms for ms in again if ms is not None), _TURN_MS)  # of the first that fits
    steps = max(_FEWEST_STEPS, min(_MOST_STEPS, round(_TURN_MS / once)))
    for _ in range(repeats):
        for number in range(len(runs)):
            taken, ms = turns[number], turn(number, steps)
            if taken is not None and ms is not None:
                taken.append(ms)
    # By the quotients of turns: it is what stays the same while a machine's pace wanders. Nothing
    # is faster than to recompute nothing; what looks so is noise.
    base = next((taken for taken in turns if taken is not None), [])
    base_ms = statistics.median(base) if base else 0.0
    floor = 1.0 if turns[0] is not None else 0.0
    return [
        None
        if taken is None
        else base_ms
        * max(floor, statistics.median(ms / other for ms, other in zip(taken, base, strict=True)))
        for taken in turns
    ]


@contextmanager
def _standing(blocks: Arm) -> Iterator[None]:
    """Let the blocks recompute in the body."""
    try:
        for block in blocks:
            block.install(blocks[0].kind)
        yield
    finally:
        for block in blocks:
            block.undo()


def _of_blocks(
    step: Step, batch: Any, probe: BlockProbe, device: torch.device, repeats: int
) -> tuple[list[float], float]:
    """Return what blocks' forwards take in steps that recompute all, and what these take."""
    by_call, wholes = [], []
    for _ in range(repeats + 1):
        probe.take_times()
        wait(device)
        start = time.perf_counter()
        with probe.timing():
            step(batch)
        wait(device)
        wholes.append((time.perf_counter() - start) * 1e3)
        by_call.append(probe.take_times())
    # The first one warms up.
    times = [statistics.median(ms) for ms in zip(*by_call[1:], strict=True)]
    return times, statistics.median(wholes[1:])


def wait(device: torch.device) -> None:
    """Let the host wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""What a loop tells of an interval of steps, read late so that the device never waits.

The losses of an interval stay on the device until a record is due. Then their mean, the metrics of
its last step and learning rates that are tensors are staged behind an event, and the record is
made some steps later, when the event has passed. `SkipWatch` reads in the same way whether updates
have been skipped too often.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch import Tensor

from torchfast._core.batches import MicroBatches, count_samples
from torchfast._core.device import memory_peak_bytes
from torchfast._core.reading import Laps, Reading, StepClock
from torchfast.fit_steps import DoneStep
from torchfast.profiling import StepTimer
from torchfast.step import TrainStep

Record = dict[str, Any]


@final
class IntervalRecords:
    """Collects steps, and makes a record of each interval of them.

    Args:
        step: The step that is run; its metrics and learning rates are told.
        count_items: ``batch -> int``; None means the first dimension of the first tensor.
        unit: What is counted.
        flops_per_item: For ``flops_per_s`` and ``mfu``, or None.
        peak_flops: What 100 % is, or None.
        timer: What steps are made of; it is told what they took.

    Raises:
        ValueError: From `arrived`: the ranks have different learning rates.

    Synchronizes: Only `arrived` with ``wait``.
    """

    def __init__(
        self,
        step: TrainStep,
        count_items: Callable[[Any], int] | None,
        unit: str,
        flops_per_item: float | None,
        peak_flops: float | None,
        timer: StepTimer,
    ) -> None:
        self._step = step
        self._count_items = count_items or _samples
        self._unit = unit
        self._flops_per_item = flops_per_item
        self._peak_flops = peak_flops
        self.clock = StepClock(step.device)
        self._timer = timer
        self.mean_step_ms: float | None = None
        self._last: DoneStep | None = None
        self._losses: list[Tensor] = []
        self._items = 0
        self._staged: list[tuple[Record, Reading, Laps, int]] = []

    @property
    def has_steps(self) -> bool:
        """Whether steps were added since the last record was staged."""
        return bool(self._losses)

    @property
    def are_staged(self) -> bool:
        """Whether records are on their way."""
        return bool(self._staged)

    def add(self, done: DoneStep, batch: Any) -> None:
        """Note a step, of which the clock knows, and what it took."""
        self.clock.count()
        self._last = done
        self._losses.append(done.loss)
        if isinstance(batch, MicroBatches):
            self._items += sum(map(self._count_items, batch))
        else:
            self._items += self._count_items(batch)

    def stage(self, record: Record) -> None:
        """Begin to read the interval that ends with the last step, for ``record``."""
        last = self._last
        assert last is not None
        values: dict[str, Tensor | float] = {
            "loss": torch.stack(self._losses).mean(dtype=torch.float32),
            **{f"lr {index}": rate for index, rate in enumerate(last.rates)},
            **{f"metric {name}": value for name, value in last.metrics.items()},
        }
        if self._step.skip_counts is not None:
            skipped = self._step.skip_counts.num_skipped()
            values["skipped"] = skipped - last.num_skipped_behind
        if self._step.ranks.are_many:
            # Where ranks work together: what the step tells is the mean, what it did is the sum.
            told = {n.replace("lr ", "rate "): v for n, v in values.items()}
            values |= self._step.sharding.means({**told, "items": float(self._items)})
        reading = Reading(values, self._step.device)
        self._staged.append((record, reading, self.clock.collect(), self._items))
        self._losses = []
        self._items = 0

    def arrived(self, *, wait: bool) -> Iterator[Record]:
        """Yield the records whose readings have come; with ``wait``, all that are staged."""
        while self._staged and (wait or self._staged[0][1].is_ready):
            record, reading, laps, items = self._staged.pop(0)
            values = reading.read()
            if "items" in values:
                items = round(values.pop("items") * self._step.ranks.world_size)
            self._add_values(record, values)
            self._add_times(record, laps.milliseconds(), items)
            memory = memory_peak_bytes(self._step.device)
            if memory is not None:
                record["memory_bytes"] = memory
            yield record

    def _add_values(self, record: Record, values: dict[str, float]) -> None:
        rates = [value for name, value in values.items() if name.startswith("lr ")]
        means = [value for name, value in values.items() if name.startswith("rate ")]
        if means:
            _check_rates(rates, means)
        metrics = {
            name.removeprefix("metric "): value
            for name, value in values.items()
            if name.startswith("metric ")
        }
        if rates:
            record["lr"] = rates[0] if len(set(rates)) == 1 else rates
        record["loss"] = values["loss"]
        if self._step.max_grad_norm is not None:
            record["grad_norm"] = metrics.pop("grad_norm")
        if "skipped" in values:
            record["skipped"] = int(values["skipped"])
        if metrics:
            record["metrics"] = metrics

    def _add_times(self, record: Record, times: list[float], items: int) -> None:
        total_ms = sum(times)
        ordered = sorted(times)
        self.mean_step_ms = total_ms / len(times)
        record["step_ms"] = {
            "p50": statistics.median(ordered),
            "p90": ordered[min(len(ordered) - 1, int(len(ordered) * 0.9))],
            "max": ordered[-1],
        }
        self._timer.note_steps(times)
        record["phases"] = self._timer.recent_times().to_dict()
        if not items or total_ms <= 0:
            return
        record["items_per_s"] = items / total_ms * 1e3
        record["unit"] = self._unit
        if self._flops_per_item is not None:
            record["flops_per_s"] = record["items_per_s"] * self._flops_per_item
            if self._peak_flops is not None:
                record["mfu"] = record["flops_per_s"] / (
                    self._peak_flops * self._step.ranks.world_size
                )


@final
class SkipWatch:
    """Tells late whether as many updates in a row were skipped as the plan bears.

    One reading is on its way at a time, so the answer is some steps old: up to `EVERY`, or those of
    a replay, and those that the host is ahead of the device. A skipped update changes nothing, so
    that costs time only. Whether the answer comes does not depend on when it is read: a run that
    was long enough counts even if a finite step has ended it.

    Args:
        step: The step that is run.

    Synchronizes: Only `tripped` with ``wait``.
    """

    EVERY = 8

    def __init__(self, step: TrainStep) -> None:
        self._device = step.device
        self._limit = step.plan.nonfinite_options.stop_after
        self._counts = step.skip_counts
        self._reading: Reading | None = None
        self._steps = 0
        if self._counts is not None:
            self._counts.forget_longest()

    def tripped(self, num_steps: int = 1, *, wait: bool = False) -> bool:
        """Whether it is time to stop; called after each step, or so many done in one replay."""
        if self._limit is None or self._counts is None:
            return False
        self._steps += num_steps
        if wait or (self._reading is None and self._steps >= self.EVERY):
            self._reading = Reading({"longest": self._counts.longest()}, self._device)
            self._steps = 0
        if self._reading is None or not (wait or self._reading.is_ready):
            return False
        longest, self._reading = self._reading.read()["longest"], None
        return longest >= self._limit

    def told(self) -> str:
        """Say what was skipped. Synchronizes: Yes."""
        if self._counts is None:
            return ""
        found = self._counts.read()
        steps = ", ".join(map(str, found.last_steps))
        return (
            f"{found.longest} in a row (stop_after={self._limit}), {found.num_skipped} in all, the "
            f"last at steps {steps}; their losses or gradients were not finite"
        )


def _check_rates(own: list[float], means: list[float]) -> None:
    """Raise where this rank's learning rates are not the means of all ranks', which are rounded.

    Raises:
        ValueError: They are others.
    """
    for rate, mean in zip(own, means, strict=True):
        if not math.isclose(rate, mean, rel_tol=1e-5):
            raise ValueError(
                f"the ranks have different learning rates (here {rate:g}, and {mean:g} in the "
                "mean), and train one model together; set the rate, or step the scheduler, alike "
                "on all ranks"
            )


def _samples(batch: Any) -> int:
    return count_samples(batch) or 0

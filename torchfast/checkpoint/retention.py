"""Which checkpoints to keep."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, final

from torchfast._core.arguments import check_choice, check_int

Mode = Literal["min", "max"]


@final
@dataclass(frozen=True, kw_only=True)
class Retention:
    """The arguments of ``CheckpointManager`` about keeping, which documents them; checked here."""

    keep_last: int | None
    keep_every: int | None
    keep_best: int
    monitor: str | None
    mode: Mode

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), minimum=1)
        check_int("keep_best", self.keep_best, minimum=1)
        check_choice("mode", self.mode, ("min", "max"))
        if self.monitor is not None and not isinstance(self.monitor, str):
            raise TypeError(
                f"monitor must be the name of a metric or None, got {self.monitor!r} "
                f"({type(self.monitor).__name__})"
            )
        if self.keep_every is not None and self.keep_last is None:
            raise ValueError(
                f"keep_every={self.keep_every!r} keeps some checkpoints longer than the last "
                "ones, but without keep_last every one is kept; give keep_last too"
            )

    def surplus(self, metrics: Mapping[int, Mapping[str, float]], newest: int) -> list[int]:
        """Return the steps to delete, in order.

        Args:
            metrics: The metrics of each step that may be deleted at all.
            newest: The step just written, which is kept whatever the numbers say.
        """
        if self.keep_last is None:
            return []
        steps = sorted(metrics)
        kept = {newest, *steps[-self.keep_last :]}
        if self.keep_every is not None:
            kept |= {step for step in steps if step % self.keep_every == 0}
        if self.monitor is not None:
            kept |= set(self.best(metrics)[: self.keep_best])
        return [step for step in steps if step not in kept]

    def best(self, metrics: Mapping[int, Mapping[str, float]]) -> list[int]:
        """Return the steps that have the metric that is monitored, the best first."""
        if self.monitor is None:
            raise ValueError(
                "which checkpoint is the best is not known without monitor=...; give "
                "CheckpointManager the name of the metric, or load a step"
            )
        known = {
            step: values[self.monitor]
            for step, values in metrics.items()
            if not math.isnan(values.get(self.monitor, math.nan))
        }
        sign = 1 if self.mode == "min" else -1
        # Of two that are equal, the later one has trained longer.
        return sorted(known, key=lambda step: (sign * known[step], -step))

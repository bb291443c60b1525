"""What the parts of a step take, as percentiles over many steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

Source = Literal["measured", "from warm-up", "copy stream", "beside the step"]


@final
@dataclass(frozen=True, kw_only=True)
class PhaseTimes:
    """What one phase takes in a step.

    Attributes:
        name: The phase; ``"step"`` is all of it, ``"other"`` what is in no phase.
        p50_ms: Half of the steps take no more.
        p90_ms: Nine in ten take no more.
        p99_ms: Ninety-nine in a hundred take no more.
        num_samples: Steps that this was measured in, the latest ones.
        source: ``"measured"`` in steps like the latest; ``"from warm-up"``, in steps that ran
            eagerly before a graph was captured, since no replay can be taken apart; or
            ``"copy stream"`` and, of collectives, ``"beside the step"``, which run next to it and
            are no part of its time.
    """

    name: str
    p50_ms: float
    p90_ms: float
    p99_ms: float
    num_samples: int
    source: Source

    @classmethod
    def of(cls, name: str, times_ms: Sequence[float], source: Source = "measured") -> PhaseTimes:
        """Return the percentiles of some times, of which there is at least one."""
        ordered = sorted(times_ms)
        return cls(
            name=name,
            p50_ms=_percentile(ordered, 50),
            p90_ms=_percentile(ordered, 90),
            p99_ms=_percentile(ordered, 99),
            num_samples=len(ordered),
            source=source,
        )


@final
@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """What steps take and what they are made of; a table as ``str``.

    Attributes:
        phases: ``step`` first, then its phases in their order, the user's own, and ``other``.
            Empty before there is anything to tell.
    """

    phases: tuple[PhaseTimes, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.phases)

    def __getitem__(self, name: str) -> PhaseTimes:
        """Return a phase by its name.

        Raises:
            KeyError: It was not seen.
        """
        for found in self.phases:
            if found.name == name:
                return found
        raise KeyError(
            f"no phase {name!r} was timed; there are {[found.name for found in self.phases]}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return percentiles, number of samples and source by phase, as JSON-ready builtins."""
        return {
            found.name: {
                "p50_ms": round(found.p50_ms, 4),
                "p90_ms": round(found.p90_ms, 4),
                "p99_ms": round(found.p99_ms, 4),
                "num_samples": found.num_samples,
                "source": found.source,
            }
            for found in self.phases
        }

    def __str__(self) -> str:
        """Return a table for a person."""
        if not self.phases:
            return "no step was timed"
        width = max(len("ms a step"), *(len(found.name) for found in self.phases))
        lines = [f"{'ms a step':<{width}}  {'p50':>9}  {'p90':>9}  {'p99':>9}  samples"]
        lines += [
            f"{f.name:<{width}}  {f.p50_ms:9.3f}  {f.p90_ms:9.3f}  {f.p99_ms:9.3f}  "
            f"{f.num_samples:>7}{'' if f.source == 'measured' else f'  {f.source}'}"
            for f in self.phases
        ]
        return "\n".join(lines)


def _percentile(ordered: Sequence[float], percent: int) -> float:
    """Return the smallest value that so many in a hundred do not exceed: one that was measured."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]

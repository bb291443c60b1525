"""What a plan did to a step: decisions, and the report made of them.

Each leaf returns the decisions it took as values and logs nothing. The step warns once, at
construction, of those that stepped aside; the report has them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torchfast._core.step_times import StepTimes

Outcome = Literal["applied", "left alone", "stepped aside"]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One lever of a plan: what was asked, what happened, and why.

    Attributes:
        lever: The Plan field, or the part of the step that decided.
        outcome: ``"applied"``, ``"left alone"`` (the plan asks for nothing) or
            ``"stepped aside"`` (asked for, not possible here).
        detail: What happened and why, and what to do about it when it stepped aside.
    """

    lever: str
    outcome: Outcome
    detail: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a plan did, in words (``str``) and as a dict (``to_dict``)."""

    title: str
    decisions: tuple[Decision, ...]
    counters: Mapping[str, int | float | str] = field(default_factory=dict)
    step_times: StepTimes = field(default_factory=StepTimes)

    @property
    def stepped_aside(self) -> tuple[Decision, ...]:
        """The decisions that did not do what the plan asked for."""
        return tuple(d for d in self.decisions if d.outcome == "stepped aside")

    def to_dict(self) -> dict[str, object]:
        """Return the report as JSON-ready builtins."""
        return {
            "title": self.title,
            "decisions": [
                {"lever": d.lever, "outcome": d.outcome, "detail": d.detail} for d in self.decisions
            ],
            "counters": dict(self.counters),
            **({"step_times": self.step_times.to_dict()} if self.step_times else {}),
        }

    def __str__(self) -> str:
        """Return the report as lines for a person."""
        width = max((len(d.lever) for d in self.decisions), default=0)
        lines = [self.title]
        lines += [f"  {d.lever:<{width}}  {d.outcome}: {d.detail}" for d in self.decisions]
        if self.counters:
            lines.append("  " + ", ".join(f"{k}: {v}" for k, v in self.counters.items()))
        if self.step_times:
            lines += [f"  {line}" for line in str(self.step_times).splitlines()]
        return "\n".join(lines)

"""What a user can say about graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torchfast._core.arguments import (
    check_choice,
    check_flag,
    check_flag_or_auto,
    check_int,
    explain_init_keywords,
)
from torchfast._core.decisions import Decision, Outcome
from torchfast._core.errors import PlanError
from torchfast._core.option_fields import call_of, changed_fields


def graph_decision(outcome: Outcome, detail: str) -> Decision:
    """Return what became of the lever, as a value."""
    return Decision(lever="cuda_graph", outcome=outcome, detail=detail)


@explain_init_keywords
@dataclass(frozen=True, kw_only=True)
class CUDAGraphOptions:
    """How a step is captured.

    Args:
        warm_up_steps: Steps that run as they are before the first capture; later shapes take one.
        max_graphs: Graphs kept; the least recently used goes first.
        new_shapes: ``"capture"`` gives batches of another shape a graph of their own, ``"eager"``
            runs them as they are.
        on_failure: ``"eager"`` runs a step that cannot be captured as it is, with one warning;
            ``"raise"`` raises.
        check: Compare replays with eager steps after each capture.
        host_constants: Take what the step copies from the host for constants if it is the same in
            two steps: a mask or a scale that the forward makes anew each time. ``"auto"`` takes
            what is made of plain numbers, of which a change is noticed, and nothing where
            torch.compile has compiled; True takes all, and what changes later is frozen, so it is
            for you to know; False takes nothing.
        parity: What will do where a model computes another way because it is told of the capture,
            as models of transformers make another attention mask: ``"exact"`` takes a graph only if
            it is the plain step, to the bit; ``"close"`` also one that is exactly what the step
            computes when told, if that is close to the plain one (what it returns within 1 %). With
            ``check=False`` nothing is compared.
            ``"auto"`` is close where the rest of the plan is, which has another precision,
            compilation or form of the optimizer.
        time_phases: Put events into the graph where its phases begin and end, so that the times of
            ``fit`` tell them in replays. Some 2 us of the device for each.

    Raises:
        PlanError: A choice that does not exist.

    Example:
        >>> CUDAGraphOptions(max_graphs=2)
        CUDAGraphOptions(max_graphs=2)
    """

    warm_up_steps: int = 3
    max_graphs: int = 8
    new_shapes: Literal["capture", "eager"] = "capture"
    on_failure: Literal["eager", "raise"] = "eager"
    check: bool = True
    host_constants: bool | Literal["auto"] = "auto"
    parity: Literal["auto", "exact", "close"] = "auto"
    time_phases: bool = False

    def __post_init__(self) -> None:
        check_int("warm_up_steps", self.warm_up_steps, minimum=1)
        check_int("max_graphs", self.max_graphs, minimum=1)
        check_choice("new_shapes", self.new_shapes, ("capture", "eager"), PlanError)
        check_choice("on_failure", self.on_failure, ("eager", "raise"), PlanError)
        check_flag("check", self.check)
        check_flag_or_auto("host_constants", self.host_constants)
        check_choice("parity", self.parity, ("auto", "exact", "close"), PlanError)
        check_flag("time_phases", self.time_phases)

    @property
    def changed(self) -> dict[str, object]:
        """The options that are not as by default."""
        return changed_fields(self)

    def __repr__(self) -> str:
        """Return the call that makes these options, defaults left out."""
        return call_of(self, self.changed)

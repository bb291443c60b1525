"""The allocator's settings as a field of a plan: made first of all, with the truth about the rest.

Most settings count from the next allocation on, so a plan that is applied after the model was moved
to the device changes how later memory is laid out, not what lies there. What came too late is said.
"""

from __future__ import annotations

import torch

from torchfast._core.arguments import check_choice
from torchfast._core.decisions import Decision
from torchfast._core.errors import PlanError
from torchfast.memory.allocator_change import AllocatorChange
from torchfast.memory.allocator_config import PRESETS, AllocatorConfig


def check_allocator(value: object) -> AllocatorConfig | None:
    """Return the settings that a plan's field asks for; None if it asks for none.

    Raises:
        TypeError: Neither a preset's name, an `AllocatorConfig` nor None.
        PlanError: No such preset.
    """
    if value is None or isinstance(value, AllocatorConfig):
        return value
    if not isinstance(value, str):
        raise TypeError(
            f"allocator must be one of {list(PRESETS)}, AllocatorConfig or None, got {value!r} "
            f"({type(value).__name__})"
        )
    check_choice("allocator", value, PRESETS, PlanError)
    return AllocatorConfig.preset(value)  # type: ignore[arg-type]


def apply_allocator(config: AllocatorConfig) -> list[Decision]:
    """Make the settings and say what became of them.

    They belong to the process, and stay when what asked for them is closed.

    Raises:
        PlanError: This torch does not know a setting, or one contradicts what is in force.
        UnsupportedDeviceError: The accelerator of this torch has no such setting.
    """
    has_begun = torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 0
    try:
        change = config.apply()
    except ValueError as error:
        raise PlanError(f"the plan's allocator cannot be set here: {error}") from error
    return [_decision(change, has_begun=has_begun)]


def _decision(change: AllocatorChange, *, has_begun: bool) -> Decision:
    outcomes = {setting.outcome for setting in change.settings}
    said = [f"{s.name}={s.value!r} {s.outcome} ({s.detail})" for s in change.settings]
    if has_begun and "in effect" in outcomes:
        said.append("memory that torch had reserved before stays as it is laid out")
    detail = "; ".join([*said, *change.remarks]) or "no setting is asked for"
    if outcomes & {"too late", "not here"}:
        return Decision(lever="allocator", outcome="stepped aside", detail=detail)
    return Decision(
        lever="allocator", outcome="applied" if outcomes else "left alone", detail=detail
    )

"""Checks on saved training state, made before anything is loaded: a mismatch changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchfast._core.building import at_work
from torchfast._core.errors import StateMismatchError

FORMAT = 1
_KEYS = (
    "format",
    "model",
    "optimizer",
    "lr_scheduler",
    "scaler",
    "num_steps",
    "num_epochs",
    "rng",
    "plan",
)
_GENERATORS = ("python", "numpy", "torch")
_SKIP_COUNTS = ("num_skipped", "in_a_row", "last_steps")  # only where skipping was on
_SHOWN = 10


def check_training_state(
    state: object, model: nn.Module, optimizer: Optimizer, scheduler: Any
) -> None:
    """Raise unless ``state`` fits this model, optimizer and scheduler.

    Raises:
        TypeError: Not a mapping.
        StateMismatchError: A newer format, missing parts, or keys and shapes that differ.
    """
    if not isinstance(state, Mapping):
        raise TypeError(
            f"state must be the mapping that state_dict() returned, got {type(state).__name__}"
        )
    missing = [key for key in _KEYS if key not in state]
    if missing:
        raise StateMismatchError(
            f"state lacks {missing}; load what trainer.state_dict() returned, or load the model "
            "and the optimizer on their own"
        )
    if not isinstance(state["format"], int) or state["format"] > FORMAT:
        raise StateMismatchError(
            f"state has format {state['format']}, this version reads up to {FORMAT}; upgrade "
            "torchfast"
        )
    has_scheduler = scheduler is not None
    if has_scheduler != (state["lr_scheduler"] is not None):
        raise StateMismatchError(
            f"state was saved {'without' if has_scheduler else 'with'} an lr_scheduler, this "
            f"trainer has {'one' if has_scheduler else 'none'}; build the trainer as it was"
        )
    lacking = [name for name in _GENERATORS if name not in state["rng"]]
    if lacking:
        raise StateMismatchError(f"state's 'rng' lacks {lacking}; load what state_dict() returned")
    counts = state.get("nonfinite", dict.fromkeys(_SKIP_COUNTS))
    lacking = [n for n in _SKIP_COUNTS if not isinstance(counts, Mapping) or n not in counts]
    if lacking:
        raise StateMismatchError(
            f"state's 'nonfinite' lacks {lacking}; load what state_dict() returned"
        )
    own = set(getattr(scheduler, "state_dict", dict)())
    saved = set(state["lr_scheduler"] or {})
    if own != saved:
        raise StateMismatchError(
            f"scheduler state has {sorted(saved - own)} and lacks {sorted(own - saved)}, so it was "
            f"saved by another kind of scheduler than {type(scheduler).__name__}"
        )
    check_module_state(state["model"], model)
    _check_optimizer(state["optimizer"], optimizer)


def check_module_state(saved: object, model: nn.Module, name: str = "model") -> None:
    """Raise unless ``saved`` has the keys and the shapes of a module's own state.

    Raises:
        StateMismatchError: It is no mapping, or keys or shapes differ; ``name`` says of what.
    """
    check_tensors(saved, model.state_dict(), name, f" {type(model).__name__}")


def check_tensors(saved: object, own: Mapping[str, Any], name: str, of: str = "") -> None:
    """Raise unless ``saved`` has the keys and the shapes of what it is to be put into.

    Args:
        saved: What was saved.
        own: What is there.
        name: Of what, for the message.
        of: Whose, likewise.

    Raises:
        StateMismatchError: It is no mapping, or keys or shapes differ.
    """
    if not isinstance(saved, Mapping):
        raise StateMismatchError(f"{name} state must be a mapping, got {type(saved).__name__}")
    problems = [f"missing {key!r}" for key in own if key not in saved]
    problems += [f"unexpected {key!r}" for key in saved if key not in own]
    problems += [
        f"{key!r} has shape {tuple(saved[key].shape)}, expected {tuple(value.shape)}"
        for key, value in own.items()
        if isinstance(value, Tensor)
        and isinstance(saved.get(key), Tensor)
        and saved[key].shape != value.shape
    ]
    if problems:
        more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise StateMismatchError(
            f"{name} state does not fit{of} ({len(problems)} keys): "
            f"{'; '.join(problems[:_SHOWN])}{more}"
        )


def _check_optimizer(saved: object, optimizer: Optimizer) -> None:
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= saved.keys():
        raise StateMismatchError(
            "optimizer state must be what optimizer.state_dict() returned, with 'state' and "
            f"'param_groups', got {type(saved).__name__}"
        )
    # What is offloaded loads as it does by itself.
    inner = at_work(optimizer)
    kind, check = type(inner).__name__, getattr(inner, "check_state_dict", None)
    found = [len(group["params"]) for group in saved["param_groups"]]
    expected = [len(group["params"]) for group in optimizer.param_groups]
    if found != expected:
        raise StateMismatchError(
            f"optimizer state has parameter groups of sizes {found}, {kind} "
            f"has {expected}; build the optimizer as it was, with all parameters from the start: "
            "those that are frozen are left alone"
        )
    for index, (theirs, ours) in enumerate(
        zip(saved["param_groups"], optimizer.param_groups, strict=True)
    ):
        # A newer torch adds hyperparameters and fills them in itself; only another kind of
        # optimizer both lacks some and brings others.
        lacking, foreign = sorted(set(ours) - set(theirs)), sorted(set(theirs) - set(ours))
        if lacking and foreign and check is None:
            raise StateMismatchError(
                f"optimizer state has {foreign} and lacks {lacking} in parameter group {index}, so "
                f"it was saved by another kind of optimizer than {kind}"
            )
    if check is not None:
        try:
            check(saved)  # it takes over the state of others, and knows of which
        except ValueError as error:
            raise StateMismatchError(str(error)) from error
    # Positions, not names, tie state to parameters, so shapes are the only check there is.
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for position, entries in saved["state"].items():
        shape = parameters[position].shape
        for key, value in entries.items():
            if isinstance(value, Tensor) and value.dim() and not _may_hold(value, shape):
                raise StateMismatchError(
                    f"optimizer state {key!r} of parameter {position} has shape "
                    f"{tuple(value.shape)}, the parameter has {tuple(shape)}; build the optimizer "
                    "with its parameters in the order they had"
                )


def _may_hold(value: Tensor, shape: torch.Size) -> bool:
    # Factored state (Adafactor's rows and columns) has another shape but the same rank at most.
    return value.shape == shape or value.numel() < shape.numel() or value.numel() == 1

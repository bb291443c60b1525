"""What a user can say about offloading, and what a step does with it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

from torch import nn
from torch.optim import Optimizer

from torchfast._core.arguments import (
    check_choice,
    check_flag,
    check_flag_or_auto,
    check_int,
    explain_init_keywords,
)
from torchfast._core.decisions import Decision
from torchfast._core.errors import PlanError
from torchfast._core.option_fields import call_of, changed_fields

if TYPE_CHECKING:
    from torchfast.memory.activation_offload import ActivationOffload
    from torchfast.memory.optimizer_offload import OffloadedOptimizer


@explain_init_keywords
@dataclass(frozen=True, kw_only=True)
class OffloadOptions:
    """What waits in the host's memory while the device does not need it.

    Args:
        activations: What the forward saves for the backward; ``"auto"`` for as much of it as the
            first steps show to hide behind the computation; see `ActivationOffload`.
        optimizer: The optimizer's state, with its update; see `OffloadedOptimizer`.
        min_bytes: Smaller activations stay.
        window_bytes: The newest activations that stay; None takes what one block saves.
        max_bytes: The most to send of one forward; None sends all.
        max_host_bytes: The most pinned memory for activations, in all graphs together; None takes
            half of the memory of the machine or the container, divided by the ranks that share it.

    Raises:
        TypeError: A value of the wrong type.
        ValueError: A number that is too small, or nothing to offload (`PlanError`).

    Example:
        >>> OffloadOptions(window_bytes=1 << 28)
        OffloadOptions(window_bytes=268435456)
    """

    activations: bool | Literal["auto"] = True
    optimizer: bool = False
    min_bytes: int = 1 << 20
    window_bytes: int | None = None
    max_bytes: int | None = None
    max_host_bytes: int | None = None

    CHOICES: ClassVar[tuple[str, ...]] = ("activations", "auto", "optimizer", "all")

    def __post_init__(self) -> None:
        check_flag_or_auto("activations", self.activations)
        check_flag("optimizer", self.optimizer)
        check_int("min_bytes", self.min_bytes, minimum=1)
        for name in ("window_bytes", "max_bytes", "max_host_bytes"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), minimum=0)
        if not (self.activations or self.optimizer):
            raise PlanError(
                "OffloadOptions(activations=False, optimizer=False) leaves nothing to offload; "
                "offload=None says so"
            )

    @classmethod
    def of(cls, value: object) -> OffloadOptions:
        """Return options from ``"activations"``, ``"auto"``, ``"optimizer"``, ``"all"``."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            check_choice("offload", value, cls.CHOICES, PlanError)
            activations: bool | Literal["auto"] = value != "optimizer"
            return cls(
                activations="auto" if value == "auto" else activations,
                optimizer=value in ("optimizer", "all"),
            )
        raise TypeError(
            f"offload must be None, one of {list(cls.CHOICES)} or OffloadOptions, "
            f"got {value!r} ({type(value).__name__})"
        )

    @property
    def word(self) -> str | None:
        """The word that says the same, or None if there is none."""
        return next((word for word in self.CHOICES if type(self).of(word) == self), None)

    @property
    def changed(self) -> dict[str, Any]:
        """What is not as by default, JSON-ready."""
        return changed_fields(self)

    def __repr__(self) -> str:
        """Return the call that makes these options, defaults left out."""
        return call_of(self, self.changed)


@final
class StepOffload:
    """What a plan's offloading is to a step.

    Args:
        options: What to offload, or None.
    """

    def __init__(self, options: OffloadOptions | None) -> None:
        self._options = options
        self._activations: ActivationOffload | None = None

    @property
    def needs_factory(self) -> str | None:
        """Why the optimizer must be given as a callable; None if it need not."""
        if self._options is None or not self._options.optimizer:
            return None
        return "offload moves the optimizer's state to the host as the optimizer is built"

    def source(self, source: Any) -> Any:
        """Return what makes the optimizer: offloaded, if it is asked for."""
        is_maker = callable(source) and not isinstance(source, type | Optimizer)
        if not (is_maker and self.needs_factory):
            return source
        from torchfast.memory.optimizer_offload import offloaded

        return offloaded(source)

    def begin(self, model: nn.Module) -> None:
        """Take the model, on its device and with its parameters."""
        options = self._options
        if options is None or not options.activations:
            return
        from torchfast.memory.activation_offload import ActivationOffload

        self._activations = ActivationOffload(
            model,
            min_bytes=options.min_bytes,
            window_bytes=options.window_bytes,
            max_bytes=options.max_bytes,
            max_host_bytes=options.max_host_bytes,
            auto=options.activations == "auto",
        )

    def forward(self) -> AbstractContextManager[Any]:
        """Return the context of a forward."""
        return nullcontext() if self._activations is None else self._activations

    def decisions(self, optimizer: Optimizer) -> list[Decision]:
        """Say what was done."""
        if self._options is None:
            detail = "activations and optimizer state stay where they are"
            return [Decision(lever="offload", outcome="left alone", detail=detail)]
        found = [] if self._activations is None else [self._activations.decision]
        return [
            *found,
            *([] if (held := self._held(optimizer)) is None else [held.decision]),
        ]

    def counters(self) -> dict[str, int]:
        """Return what went to the host."""
        return {} if self._activations is None else self._activations.counters()

    def close(self, optimizer: Optimizer) -> None:
        """Let go of the pinned memory of activations, and of hooks."""
        held = self._held(optimizer)
        if held is not None:
            held.close()
        if self._activations is not None:
            self._activations.close()

    def _held(self, optimizer: Optimizer) -> OffloadedOptimizer | None:
        """Return the optimizer, if it was built with its state on the host."""
        if self.needs_factory is None:
            return None
        from torchfast.memory.optimizer_offload import OffloadedOptimizer

        return optimizer if isinstance(optimizer, OffloadedOptimizer) else None

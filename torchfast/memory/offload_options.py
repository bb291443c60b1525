"""What a user can say about offloading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torchfast._core.arguments import (
    check_choice,
    check_flag,
    check_flag_or_auto,
    check_int,
    check_not_negative,
    explain_init_keywords,
)
from torchfast._core.errors import PlanError
from torchfast._core.option_fields import call_of, changed_fields, refuse_unused
from torchfast._core.selection import checked_regions
from torchfast.memory.recompute_options import Regions, ordered
from torchfast.memory.undo import UNDO_BYTES


@explain_init_keywords
@dataclass(frozen=True, kw_only=True)
class OffloadOptions:
    """What waits in the host's memory while the device does not need it.

    Args:
        activations: What the forward saves for the backward; ``"auto"`` for as much of it as the
            first steps show to hide behind the computation; see `ActivationOffload`.
        optimizer: The optimizer's state, with its update; see `OffloadedOptimizer`.
        overlap: Begin that update in the backward, on the guess that gradients stay as they are,
            and take back what was wrong. A step is then not captured in a graph.
        max_undo_bytes: With ``overlap``, the most memory of the host, not pinned, for taking back;
            with 0 gradients are copied in the backward and nothing begins there.
        min_bytes: Smaller activations stay.
        window_bytes: The newest activations that stay; None takes what one block saves.
        max_bytes: The most to send of one forward; None sends all.
        max_host_bytes: The most pinned memory for activations, in all graphs together; None takes
            half of the memory of the machine or the container, divided by the ranks that share it.
        parameters: Blocks whose parameters are on the device for their calls only: ``"blocks"``,
            those that the model repeats, or modules by name: paths, in which ``*`` stands for one
            name, and classes; None for none. See `ParameterOffload`.
        max_resident_blocks: The most of these blocks on the device at a time.
        max_slowdown: With ``activations="auto"``, the part of the time of forward and backward by
            which they may take longer, waiting for copies, so that more goes than hides: 0.05 for
            a twentieth.

    Raises:
        TypeError: A value of the wrong type.
        ValueError: A number that is too small; and as `PlanError`: nothing to offload, a
            ``max_slowdown`` of activations that are not chosen by measurement, an ``overlap`` of
            an update that is not on the host, or ``max_undo_bytes`` without ``overlap``.

    Example:
        >>> OffloadOptions(window_bytes=1 << 28)
        OffloadOptions(window_bytes=268435456)
        >>> OffloadOptions(activations=False, parameters=["layers.*.experts.*"])
        OffloadOptions(activations=False, parameters=('layers.*.experts.*',))
        >>> OffloadOptions(activations="auto", max_slowdown=0.05)
        OffloadOptions(activations='auto', max_slowdown=0.05)
    """

    activations: bool | Literal["auto"] = True
    optimizer: bool = False
    min_bytes: int = 1 << 20
    window_bytes: int | None = None
    max_bytes: int | None = None
    max_host_bytes: int | None = None
    parameters: Regions | None = None
    max_resident_blocks: int = 2
    max_slowdown: float = 0.0
    overlap: bool = False
    max_undo_bytes: int = UNDO_BYTES

    CHOICES: ClassVar[tuple[str, ...]] = ("activations", "auto", "optimizer", "all", "parameters")

    def __post_init__(self) -> None:
        check_flag_or_auto("activations", self.activations)
        check_flag("optimizer", self.optimizer)
        check_int("min_bytes", self.min_bytes, minimum=1)
        for name in ("window_bytes", "max_bytes", "max_host_bytes"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), minimum=0)
        check_int("max_resident_blocks", self.max_resident_blocks, minimum=1)
        slowdown = check_not_negative("max_slowdown", self.max_slowdown)
        object.__setattr__(self, "max_slowdown", slowdown)
        if self.parameters is not None:
            regions = checked_regions(
                ordered(self.parameters), ("blocks",), "parameters=None", "parameters"
            )
            object.__setattr__(self, "parameters", regions)
        if not (self.activations or self.optimizer or self.parameters):
            raise PlanError(
                "OffloadOptions(activations=False, optimizer=False, parameters=None) leaves "
                "nothing to offload; offload=None says so"
            )
        if not self.activations:
            sizes = ("min_bytes", "window_bytes", "max_bytes", "max_host_bytes")
            refuse_unused(self, sizes, "activations")
        if self.parameters is None:
            refuse_unused(self, ("max_resident_blocks",), "parameters")
        check_flag("overlap", self.overlap)
        if self.overlap and not self.optimizer:
            raise PlanError(
                "overlap=True has the update on the host begin in the backward, so it goes with "
                "optimizer=True only, got optimizer=False"
            )
        check_int("max_undo_bytes", self.max_undo_bytes, minimum=0)
        if self.max_undo_bytes != UNDO_BYTES and not self.overlap:
            raise PlanError(
                f"max_undo_bytes={self.max_undo_bytes} bounds what is kept of an update that "
                "begins in the backward, so it goes with overlap=True only, got overlap=False"
            )
        if slowdown and self.activations != "auto":
            raise PlanError(
                f"max_slowdown={slowdown} limits what is chosen by measurement, so it goes with "
                f"activations='auto' only, got activations={self.activations}"
            )

    @classmethod
    def of(cls, value: object) -> OffloadOptions:
        """Return options from one of the words in ``CHOICES``, or as they are."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            check_choice("offload", value, cls.CHOICES, PlanError)
            activations: bool | Literal["auto"] = value not in ("optimizer", "parameters")
            return cls(
                activations="auto" if value == "auto" else activations,
                optimizer=value in ("optimizer", "all"),
                parameters="blocks" if value == "parameters" else None,
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
        """What is not as by default, JSON-ready: classes by name."""
        values = changed_fields(self)
        if isinstance(values.get("parameters"), tuple):
            named = values["parameters"]
            values["parameters"] = [n if isinstance(n, str) else n.__name__ for n in named]
        return values

    def __repr__(self) -> str:
        """Return the call that makes these options, defaults left out."""
        return call_of(self, changed_fields(self))

"""What a user can say about float8 training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torchfast._core.arguments import (
    check_choice,
    check_flag,
    check_int,
    check_positive,
    explain_init_keywords,
)
from torchfast._core.errors import PlanError
from torchfast._core.option_fields import call_of, changed_fields, json_ready

Recipe = Literal["auto", "tensorwise", "rowwise", "rowwise_with_gw_hp"]
RECIPES: tuple[str, ...] = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


@explain_init_keywords
@dataclass(frozen=True, kw_only=True)
class Float8Options:
    """How linear layers compute in float8.

    A scale per tensor (``"tensorwise"``) is fastest to find, and one outlier costs the whole tensor
    its small values. A scale per row (``"rowwise"``) holds an outlier within its row.
    ``"rowwise_with_gw_hp"`` keeps the product that gives the gradient of the weight in bf16.

    Args:
        recipe: One of these for all layers; or ``"auto"``: at the first step each recipe and bf16
            are timed on the shapes of this model, and each shape takes what is fastest. What is not
            faster than bf16 stays bf16, unless the whole step is faster with all in float8; and all
            does where that is slower.
        keep: Layers that stay in bf16, by name or pattern: ``("head", "blocks.0.*")``.
        only: Where given, no other layers are converted, and those that it names by name must be.
        smallest: A layer with fewer inputs or outputs than this stays in bf16, unless its recipe is
            measured: casts take longer there than the product saves.
        vocabulary: Whether the layer that gives the logits of a vocabulary is converted too. It
            decides the loss, and every published recipe leaves it out.
        emulate: Compute in bf16 or fp32 what float8 would give. Slow; for tests without hardware.
        all_gather: Gather the weights of these layers in float8 where ``Plan(shard=...)`` shards
            them: half the bytes of bf16. With ``recipe="tensorwise"`` only.
        watch_at: Before which updates loss and gradient norm are compared with bf16; none: never.
        watch_every: Behind the last of these, before how many updates they are compared once more,
            as long as the run goes; None: no more. Each takes as long as two eager steps.
        loss_drift: Largest relative difference of the loss from bf16 without a warning; none comes
            where that of the gradient norm is no larger than this either, as with a loss near zero.
        norm_drift: The same for the norm of the gradients.
        budget_s: Most seconds that measuring one shape takes, compilation aside. The whole step is
            timed for as long, or longer until each way had eight turns.

    Raises:
        PlanError: A recipe that does not exist, or values that contradict each other.

    Example:
        >>> Float8Options(recipe="tensorwise", keep=("head",))
        Float8Options(recipe='tensorwise', keep=('head',))
    """

    recipe: Recipe = "auto"
    keep: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    smallest: int = 1024
    vocabulary: bool = False
    emulate: bool = False
    all_gather: bool = False
    watch_at: tuple[int, ...] = (1, 10, 100)
    watch_every: int | None = 1000
    loss_drift: float = 0.02
    norm_drift: float = 0.25
    budget_s: float = 4.0

    RECIPES: ClassVar[tuple[str, ...]] = ("auto", *RECIPES)

    def __post_init__(self) -> None:
        check_choice("recipe", self.recipe, self.RECIPES, PlanError)
        for name in ("keep", "only"):
            object.__setattr__(self, name, _names(name, getattr(self, name)))
        check_int("smallest", self.smallest, minimum=0)
        for name in ("vocabulary", "emulate", "all_gather"):
            check_flag(name, getattr(self, name))
        if self.all_gather and self.recipe != "tensorwise":
            raise PlanError(
                f"all_gather=True does not go with recipe={self.recipe!r}: a weight is gathered "
                "once for both products that use it, which takes one scale for the whole of it; "
                "name recipe='tensorwise'"
            )
        object.__setattr__(self, "watch_at", _steps(self.watch_at))
        if self.watch_every is not None:
            check_int("watch_every", self.watch_every, minimum=1)
        for name in ("loss_drift", "norm_drift", "budget_s"):
            check_positive(name, getattr(self, name))
        if math.isinf(self.budget_s):
            raise PlanError(f"budget_s must be finite, got {self.budget_s}")

    @classmethod
    def of(cls, value: object) -> Float8Options | None:
        """Return options from ``"fp8"`` or from options; None for another precision."""
        if isinstance(value, cls):
            return value
        return cls() if value == "fp8" else None

    def watches(self, step: int) -> bool:
        """Whether this update is compared with bf16; the first is 1."""
        if not self.watch_at or step <= self.watch_at[-1]:
            return step in self.watch_at
        return self.watch_every is not None and step % self.watch_every == 0

    @property
    def watched(self) -> str:
        """Which updates are compared, in words."""
        steps = ", ".join(map(str, self.watch_at))
        return steps if self.watch_every is None else f"{steps} and every {self.watch_every:,}"

    @property
    def changed(self) -> dict[str, Any]:
        """What is not as by default, as JSON takes it."""
        return {name: json_ready(value) for name, value in changed_fields(self).items()}

    def __repr__(self) -> str:
        """Return the call that makes these options, defaults left out."""
        return call_of(self, changed_fields(self))


def _names(argument: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, tuple | list):
        raise TypeError(
            f"{argument} must be a tuple of names of layers, as ('head',), got {value!r}"
        )
    if not all(isinstance(name, str) for name in value):
        raise TypeError(f"{argument} must hold names of layers, got {value!r}")
    return tuple(value)


def _steps(value: object) -> tuple[int, ...]:
    if not isinstance(value, tuple | list):
        raise TypeError(
            f"watch_at must be a tuple of numbers of updates, as (1, 10, 100), got {value!r}"
        )
    return tuple(sorted({check_int("watch_at", step, minimum=1) for step in value}))

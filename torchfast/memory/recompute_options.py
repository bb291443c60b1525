"""What a user can say about recompute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import nn

from torchfast._core.arguments import check_flag, check_int, describe, explain_init_keywords
from torchfast._core.decisions import Decision, Outcome
from torchfast._core.errors import PlanError
from torchfast._core.option_fields import call_of, changed_fields, refuse_unused
from torchfast._core.selection import checked_regions

Regions: TypeAlias = (
    Literal["blocks"]
    | tuple[str | type[nn.Module], ...]
    | list[str | type[nn.Module]]
    | set[str | type[nn.Module]]
)

_WORDS = ("blocks", "selective")


def recompute_decision(outcome: Outcome, detail: str) -> Decision:
    """Return what became of the lever, as a value."""
    return Decision(lever="recompute", outcome=outcome, detail=detail)


@explain_init_keywords
@dataclass(frozen=True, kw_only=True)
class RecomputeOptions:
    """What of a forward is computed again in the backward, and not kept until then.

    Args:
        regions: What is recomputed: ``"blocks"``, the blocks that the model repeats, or modules by
            name: paths, in which ``*`` stands for one name (``("layers.*",)``), and classes.
        selective: Keep what is expensive to compute again: the results of attention, matrix
            products and convolutions, as far as ``share`` goes.
        share: With ``selective``, the largest share of what a region saves without recompute that
            its input and the results kept may take.
        every: Recompute one region of so many; 2 is every second.
        budget: Instead of all that, the share of memory that the compiler's own recompute aims at,
            between 0 and 1; with ``compile`` only.

    Raises:
        TypeError: A value of the wrong kind.
        PlanError: A choice that does not exist, or ``budget`` beside another one.

    Example:
        >>> RecomputeOptions.of("selective")
        RecomputeOptions(selective=True)
        >>> RecomputeOptions(regions=["layers.*"], every=2)
        RecomputeOptions(regions=('layers.*',), every=2)
    """

    regions: Regions = "blocks"
    selective: bool = False
    share: float = 0.5
    every: int = 1
    budget: float | None = None

    def __post_init__(self) -> None:
        nothing = "recompute=False to recompute nothing"
        regions = checked_regions(ordered(self.regions), ("blocks",), nothing)
        object.__setattr__(self, "regions", regions)
        check_flag("selective", self.selective)
        object.__setattr__(self, "share", _fraction("share", self.share))
        check_int("every", self.every, minimum=1)
        if not self.selective and self.budget is None:
            refuse_unused(self, ("share",), "selective=True")
        if self.budget is not None:
            object.__setattr__(self, "budget", _fraction("budget", self.budget))
            others = [name for name in changed_fields(self) if name != "budget"]
            if others:
                raise PlanError(
                    "budget leaves it to the compiler what is recomputed, so it cannot stand "
                    f"beside {', '.join(others)}; leave one of them out"
                )

    @classmethod
    def of(cls, value: object) -> RecomputeOptions | None:
        """Return options from what a plan accepts; None for False.

        Raises:
            TypeError: Something else.
            PlanError: A word or number that has no meaning.
        """
        if value is False:
            return None
        if isinstance(value, cls):
            return value
        if isinstance(value, str) and value in _WORDS:
            return cls(selective=value == "selective")
        if isinstance(value, tuple | list | set | frozenset):
            return cls(regions=ordered(value))
        error: type[Exception] = PlanError
        if isinstance(value, int | float) and not isinstance(value, bool):
            if 0.0 < value <= 1.0:
                return cls(budget=float(value))
            got = repr(value)
        elif isinstance(value, str):
            got = f"{value!r}; for one path write ({value!r},)"
        else:
            error, got = TypeError, describe(value)
        raise error(
            f"recompute must be False, one of {list(_WORDS)}, a number between 0 and 1, paths and "
            f"module classes, or RecomputeOptions, got {got}"
        )

    @property
    def shortest(self) -> str | float | RecomputeOptions:
        """The shortest way to write these options, so that equal plans are equal."""
        changed = changed_fields(self)
        if not changed:
            return "blocks"
        if changed == {"selective": True}:
            return "selective"
        return self if self.budget is None else self.budget

    @property
    def changed(self) -> dict[str, object]:
        """The options that are not as by default, JSON-ready: classes by name."""
        values: dict[str, Any] = changed_fields(self)
        if "regions" in values:
            values["regions"] = [n if isinstance(n, str) else n.__name__ for n in values["regions"]]
        return values

    def __repr__(self) -> str:
        """Return the call that makes these options, defaults left out."""
        return call_of(self, changed_fields(self))


# What a `Recompute` takes, and with False a plan.
Setting: TypeAlias = Literal["blocks", "selective"] | float | Regions | RecomputeOptions


def ordered(value: Any) -> Any:
    """Return what names regions in an order of its own, if it has none."""
    # A set has another order in another process.
    return tuple(sorted(value, key=str)) if isinstance(value, set | frozenset) else value


def _fraction(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(
            f"{name} must be a number between 0 and 1, got {value!r} ({type(value).__name__})"
        )
    if not 0 <= float(value) <= 1:
        raise PlanError(f"{name} must be a number between 0 and 1, got {value}")
    return float(value)

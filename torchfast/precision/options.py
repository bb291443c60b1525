"""What a user can say about precision."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

from torchfast._core.arguments import (
    check_choice,
    check_int,
    check_positive,
    explain_init_keywords,
)
from torchfast._core.errors import PlanError
from torchfast.precision.float8_options import Float8Options

Format = Literal["as_given", "auto", "fp32", "tf32", "bf16", "fp16", "fp8"]


@explain_init_keywords
@dataclass(frozen=True, kw_only=True)
class PrecisionOptions:
    """The number format of a step, with the loss scaling that fp16 needs.

    Args:
        format: ``"as_given"`` (nothing is touched), ``"fp32"``, ``"tf32"``, ``"bf16"``,
            ``"fp16"``, ``"fp8"`` (see `Float8Options`), or ``"auto"``: bf16 where the device
            computes it natively, else as given.
        init_scale: First loss scale of fp16 (65536 if None).
        growth_factor: Factor by which the scale grows (2.0 if None).
        backoff_factor: Factor by which it shrinks after a non-finite gradient (0.5 if None).
        growth_interval: Finite steps in a row before it grows (2000 if None).

    Raises:
        PlanError: Unknown format, or loss scaling asked for without fp16.

    Example:
        >>> PrecisionOptions(format="fp16", init_scale=1024.0)
        PrecisionOptions(format='fp16', init_scale=1024.0)
    """

    format: Format = "as_given"
    init_scale: float | None = None
    growth_factor: float | None = None
    backoff_factor: float | None = None
    growth_interval: int | None = None

    FORMATS: ClassVar[tuple[str, ...]] = (
        "as_given",
        "auto",
        "fp32",
        "tf32",
        "bf16",
        "fp16",
        "fp8",
    )

    def __post_init__(self) -> None:
        check_choice("precision", self.format, self.FORMATS, PlanError)
        for name in ("init_scale", "growth_factor", "backoff_factor"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        if self.growth_interval is not None:
            check_int("growth_interval", self.growth_interval, minimum=1)
        if self.init_scale is not None and math.isinf(self.init_scale):
            raise PlanError(f"init_scale must be finite, got {self.init_scale}")
        if self.growth_factor is not None and self.growth_factor <= 1.0:
            raise PlanError(f"growth_factor must be > 1, got {self.growth_factor}")
        if self.backoff_factor is not None and self.backoff_factor >= 1.0:
            raise PlanError(f"backoff_factor must be < 1, got {self.backoff_factor}")
        if self.scaling and self.format != "fp16":
            raise PlanError(
                f"{', '.join(self.scaling)} belongs to loss scaling, which only "
                f"precision='fp16' does, but precision={self.format!r}; drop it, or use fp16"
            )

    @property
    def scaling(self) -> dict[str, float]:
        """The loss-scaling options that were set."""
        names = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
        return {n: getattr(self, n) for n in names if getattr(self, n) is not None}

    @classmethod
    def of(cls, value: object) -> PrecisionOptions:
        """Return options from the scalar form ``"bf16"`` or from options."""
        if isinstance(value, cls):
            return value
        if isinstance(value, Float8Options):
            return cls(format="fp8")
        if isinstance(value, str):
            return cls(format=cast(Format, value))
        raise TypeError(
            f"precision must be one of {list(cls.FORMATS)} or PrecisionOptions "
            f"or Float8Options, got {value!r} ({type(value).__name__})"
        )

    def __repr__(self) -> str:
        """Return the call that makes these options, defaults left out."""
        parts = [f"format={self.format!r}", *(f"{k}={v!r}" for k, v in self.scaling.items())]
        return f"PrecisionOptions({', '.join(parts)})"


def precision_from(**values: Any) -> PrecisionOptions | Float8Options:
    """Return the options that a plan in JSON describes; its format says which."""
    if values.get("format") != "fp8":
        return PrecisionOptions(**values)
    return Float8Options(**{name: value for name, value in values.items() if name != "format"})

"""What a user can say about the average of the weights."""

from __future__ import annotations

from dataclasses import dataclass, fields
from numbers import Real

from torchfast._core.arguments import check_flag, describe, explain_init_keywords


@explain_init_keywords
@dataclass(frozen=True, kw_only=True)
class EMAOptions:
    """How the weights are averaged.

    Args:
        decay: What the average keeps of itself at an update, in [0, 1): 0.999 averages about the
            last thousand updates, 0.9999 the last ten thousand.
        warm_up: Begin with a smaller decay, ``min(decay, (1 + n) / (10 + n))`` after ``n``
            updates, so that the average of a short run is not that of its beginning.
        use_buffers: Average floating-point buffers, such as BatchNorm's statistics, like weights.
            Otherwise they are copied from the model at each update, as integers always are. An
            infinite one, such as a mask, becomes NaN, as in torch's ``AveragedModel``.

    Raises:
        TypeError: A decay that is no number, or a flag that is no bool.
        ValueError: A decay out of range.

    Example:
        >>> EMAOptions(decay=0.9999, warm_up=True)
        EMAOptions(decay=0.9999, warm_up=True)
    """

    decay: float = 0.999
    warm_up: bool = False
    use_buffers: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "decay", _checked_decay("decay", self.decay))
        check_flag("warm_up", self.warm_up)
        check_flag("use_buffers", self.use_buffers)

    @classmethod
    def of(cls, value: object) -> EMAOptions | None:
        """Return options from the scalar form, a decay, or from options; None stays None."""
        if value is None or isinstance(value, cls):
            return value
        return cls(decay=_checked_decay("ema", value))

    def __repr__(self) -> str:
        """Return the call that makes these options, defaults but the decay left out."""
        values = [(f.name, getattr(self, f.name), f.default) for f in fields(self)]
        shown = [f"{n}={v!r}" for n, v, default in values if n == "decay" or v != default]
        return f"EMAOptions({', '.join(shown)})"


def _checked_decay(name: str, value: object) -> float:
    accepted = "a number in [0, 1)" if name == "decay" else "a decay in [0, 1), EMAOptions or None"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be {accepted}, such as 0.999, got {describe(value)}")
    if not 0 <= float(value) < 1:  # NaN neither
        raise ValueError(
            f"{name} must be {accepted}, got {value}: it is what the average keeps of itself at an "
            "update, so 1 would never move; 0.999 averages about the last thousand"
        )
    return float(value)

"""The figures of float8 beside bf16: of each operand, of a step, and over a run.

A run may compare thousands of times, so what is kept of it does not grow: the first comparisons and
the latest, and between these only the operands that did not fit.
"""

from __future__ import annotations

import dataclasses
import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

# More than this part of what an operand has lost, and most of it is not there.
MOST_LOST: Final = 0.5
_FIRST: Final = 3
_LATEST: Final = 29
_SHOWN: Final = 3


@final
@dataclass(frozen=True, kw_only=True)
class LayerNumbers:
    """One operand of a layer, as it was before an update.

    Attributes:
        layer: Its name.
        operand: ``"input"``, ``"weight"`` or ``"gradient"`` (of the output).
        amax: The largest magnitude.
        scale: What brings it to the largest number of the format; of the whole operand, where
            there is one for each row.
        lost: Of its values that are not zero, the part that becomes it.
    """

    layer: str
    operand: str
    amax: float
    scale: float
    lost: float

    @property
    def problem(self) -> str | None:
        """What is wrong with it, or None."""
        if not math.isfinite(self.amax):
            return f"its {self.operand} has values that are not finite, so it has no scale"
        if self.lost > MOST_LOST:
            return (
                f"{self.lost:.0%} of the values of its {self.operand} that are not zero become it "
                f"beside a largest value of {self.amax:.3g}"
            )
        return None


@final
@dataclass(frozen=True, kw_only=True)
class Drift:
    """Loss and gradient norm of one micro-batch, in float8 and in bf16.

    Attributes:
        step: The number of the update before which they were compared.
        loss: In float8.
        plain_loss: In bf16.
        norm: Of the gradients, in float8.
        plain_norm: In bf16.
        layers: The operands of the converted layers.
    """

    step: int
    loss: float
    plain_loss: float
    norm: float
    plain_norm: float
    layers: tuple[LayerNumbers, ...]

    @property
    def loss_drift(self) -> float:
        """Relative difference of the loss."""
        return _relative(self.loss, self.plain_loss)

    @property
    def norm_drift(self) -> float:
        """Relative difference of the gradient norm."""
        return _relative(self.norm, self.plain_norm)

    @property
    def problems(self) -> tuple[LayerNumbers, ...]:
        """The operands that do not fit the format, the worst first."""
        found = [numbers for numbers in self.layers if numbers.problem]
        return tuple(sorted(found, key=lambda n: (math.isfinite(n.amax), -n.lost)))


@final
class DriftHistory:
    """The comparisons of a run: the first, the latest, and the one that was furthest away."""

    def __init__(self) -> None:
        self.kept: list[Drift] = []
        self.num_compared = 0
        self._worst: Drift | None = None

    def add(self, drift: Drift) -> None:
        """Keep a comparison, and let go of what is neither among the first nor the latest."""
        self.num_compared += 1
        if len(self.kept) > _FIRST:
            last = self.kept[-1]
            self.kept[-1] = dataclasses.replace(last, layers=last.problems)
        self.kept.append(drift)
        if len(self.kept) > _FIRST + _LATEST:
            del self.kept[_FIRST]
        if self._worst is None or not abs(drift.loss_drift) <= abs(self._worst.loss_drift):
            self._worst = dataclasses.replace(drift, layers=())

    def __str__(self) -> str:
        first, latest = self.kept[:_SHOWN], self.kept[_SHOWN:][-_SHOWN:]
        between = self.num_compared - len(first) - len(latest)
        parts = [_told(drift) for drift in first]
        if between and self._worst is not None:
            parts.append(f"{between} more, the loss furthest at {_told(self._worst)}")
        return "; ".join([*parts, *(_told(drift) for drift in latest)])


def _told(drift: Drift) -> str:
    return (
        f"update {drift.step}: loss {drift.loss:.6g} ({drift.loss_drift:+.2%}), "
        f"gradient norm {drift.norm:.4g} ({drift.norm_drift:+.2%})"
    )


@torch.no_grad()
def figures(tensor: Tensor, dtype: torch.dtype, *, by_row: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return a tensor's largest magnitude, how many values its scale makes zero, and of how many.

    Zeros do not count: behind a ReLU most values may be.

    Args:
        tensor: An operand.
        dtype: The float8 format.
        by_row: Whether each row has a scale of its own.

    Synchronizes: Never.
    """
    # The operands of a step are bf16 under autocast, which must not catch the arithmetic here.
    context = torch.autocast(tensor.device.type, enabled=False) if tensor.numel() else nullcontext()
    with context:
        magnitude = tensor.detach().float().abs()
        amax = magnitude.amax(-1, keepdim=True) if by_row else magnitude.amax()
        limits = torch.finfo(dtype)
        # Half of the smallest number is rounded to zero, as what lies below it is.
        smallest = limits.smallest_normal * limits.eps / 2
        is_there = magnitude > 0
        is_lost = (magnitude <= amax * (smallest / limits.max)) & is_there
        return magnitude.amax(), is_lost.sum().float(), is_there.sum().float()


def _relative(found: float, expected: float) -> float:
    if found == expected:
        return 0.0
    return (found - expected) / abs(expected) if expected else math.inf

"""What rows count by the weights of their classes."""

from __future__ import annotations

import torch
from torch import Tensor


def count(
    targets: Tensor, class_weight: Tensor | None, ignore_index: int, dtype: torch.dtype
) -> Tensor:
    """Return what the mean divides by, on the device."""
    valid = targets != ignore_index
    if class_weight is None:
        return valid.sum(dtype=dtype)
    counted = class_weight.index_select(0, torch.where(valid, targets, 0))
    return torch.where(valid, counted, 0.0).sum()


def heaviest(
    class_weight: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float
) -> Tensor:
    """Return what the heaviest row counts; a class that is no target counts by smoothing alone."""
    valid = targets != ignore_index
    mass = class_weight.index_select(0, torch.where(valid, targets, 0))
    mass = torch.where(valid, mass, 0.0)
    if label_smoothing:
        mass = (1 - label_smoothing) * mass + label_smoothing * class_weight.mean()
    return largest(mass)


def largest(values: Tensor) -> Tensor:
    """Return the largest magnitude, on the device; 1 where nothing can be divided by it."""
    if not values.numel():
        return values.new_ones(())
    most = values.abs().amax()
    return torch.where((most > 0) & most.isfinite(), most, 1.0)

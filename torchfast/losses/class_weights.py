"""What rows count by the weights of their classes."""

from __future__ import annotations

import torch
from torch import Tensor


def count(
    targets: Tensor, class_weight: Tensor | None, ignore_index: int, dtype: torch.dtype
) -> Tensor:
    """Return what the mean divides by, on the device."""
    if class_weight is None:
        return (targets != ignore_index).sum(dtype=dtype)
    return _of_rows(class_weight, targets, ignore_index).sum()


def heaviest(
    class_weight: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float
) -> Tensor:
    """Return what the heaviest row counts; a class that is no target counts by smoothing alone."""
    mass = _of_rows(class_weight, targets, ignore_index)
    if label_smoothing:
        mass = (1 - label_smoothing) * mass + label_smoothing * class_weight.mean()
    return largest(mass)


def _of_rows(class_weight: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """Return the weight of each row's class; 0 where it is ignored."""
    valid = targets != ignore_index
    found = class_weight.index_select(0, torch.where(valid, targets, 0))
    return torch.where(valid, found, 0.0)


def largest(values: Tensor) -> Tensor:
    """Return the largest magnitude, on the device; 1 where nothing can be divided by it."""
    if not values.numel():
        return values.new_ones(())
    most = values.abs().amax()
    return torch.where((most > 0) & most.isfinite(), most, 1.0)

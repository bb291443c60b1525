"""What a comparison of float8 with bf16 asks of the ranks that train together."""

from __future__ import annotations

from typing import Protocol, final

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm


class WatchedRanks(Protocol):
    """The ranks of a run, and how gradients come about there."""

    @property
    def are_many(self) -> bool:
        """Whether there is more than one."""

    @property
    def is_first(self) -> bool:
        """Whether this is the one that warns."""

    def all_agree(self, yes: bool) -> bool:
        """Return whether all ranks say yes."""

    def gradients(self, loss: Tensor) -> list[Tensor]:
        """Run the backward of a loss, as far as this rank can by itself."""

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the norm of the gradient that the ranks have together."""

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean over the ranks, on the device."""

    def largest(self, value: Tensor) -> Tensor:
        """Return the largest values over the ranks, on the device."""


@final
class Alone:
    """One process that trains by itself.

    Args:
        model: What it trains.
    """

    are_many = False
    is_first = True

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def all_agree(self, yes: bool) -> bool:
        """Return what this process says."""
        return yes

    def gradients(self, loss: Tensor) -> list[Tensor]:
        """Return the gradients of all parameters that took part."""
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        return [gradient for gradient in found if gradient is not None]

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Return their norm."""
        return get_total_norm(gradients)

    def mean(self, value: Tensor) -> Tensor:
        """Return the value."""
        return value

    def largest(self, value: Tensor) -> Tensor:
        """Return the value."""
        return value

"""Learning rates that a graph can read: device tensors inside a step, Python floats outside.

A float is frozen into a graph. A tensor in ``param_groups`` for good would break schedulers (they
drift in fp32 and launch kernels), ``group["lr"] = x`` and saved state. So the floats are the truth:
a tensor per group stands there only while the step runs or is captured, and is filled before a
replay when the float has changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchfast._core.building import optimized
from torchfast._core.errors import CaptureError
from torchfast._core.loss import Number

CHANGED: Final = (
    "the step changes its learning rate; step the scheduler outside the step that is captured, "
    "after it"
)


def rates_of(optimizer: Optimizer) -> list[Number]:
    """Return the learning rates that stand in the parameter groups now, safe to keep.

    A group of an optimizer that calls its rate otherwise has none.
    """
    return [
        rate.clone() if isinstance(rate := group["lr"], Tensor) else rate
        for group in optimizer.param_groups
        if "lr" in group
    ]


@final
class LearningRates:
    """The learning rates of one optimizer, on the device.

    Args:
        optimizer: Its groups are written to inside `on_device`.
        dtype: Of the tensors; what the update takes, and which rounds as the float does, differs.

    Attributes:
        are_changed: Whether what ran between them and the floats has changed one, as a scheduler
            does that is stepped in a hook of the optimizer.

    Numerics: As the optimizer computes with a tensor of this dtype in place of the float.
    Synchronizes: Where a step changes one of them itself.
    """

    def __init__(self, optimizer: Optimizer, dtype: torch.dtype = torch.float32) -> None:
        self.optimizer = optimizer
        self.are_changed = False
        self._dtype = dtype
        device = next(iter(optimized(optimizer))).device
        self._device = device
        # One each: a tensor that two groups share would have the last one's rate in both.
        self._tensors: list[Tensor] = []
        self._filled: list[float] = []
        self.fill()

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups."""
        return self.optimizer.param_groups

    def fill(self) -> None:
        """Bring the tensors to the floats that stand in the groups now."""
        groups = self.optimizer.param_groups
        while len(self._tensors) < len(groups):
            self._tensors.append(torch.zeros((), dtype=self._dtype, device=self._device))
            self._filled.append(0.0)
        for index, group in enumerate(groups):
            rate = group["lr"]
            if rate is not self._filled[index] and not isinstance(rate, Tensor):
                if rate != self._filled[index]:
                    self._tensors[index].fill_(rate)
                self._filled[index] = rate

    def filled(self) -> list[Number]:
        """Return the rates that a replay reads, of each group; safe to keep."""
        rates = zip(self.groups, self._filled, strict=False)
        # One that the user gave on the device is read where it is.
        return [own.clone() if isinstance(own := g["lr"], Tensor) else r for g, r in rates]

    @property
    def cover_groups(self) -> bool:
        """Whether there is a tensor for each group: there may be more groups by now."""
        return len(self._tensors) >= len(self.groups)

    def another(self) -> LearningRates:
        """Return other tensors for the same groups: the rates of another step."""
        return LearningRates(self.optimizer, self._dtype)

    @contextmanager
    def standing_in_for(self, others: LearningRates) -> Iterator[None]:
        """Let the groups hold these tensors where they hold those of ``others``."""
        groups = zip(self.groups, self._tensors, others._tensors, strict=False)
        swapped = [swap for swap in groups if swap[0]["lr"] is swap[2]]
        for group, own, _ in swapped:
            group["lr"] = own
        try:
            yield
        finally:
            for group, own, other in swapped:
                if group["lr"] is own:
                    group["lr"] = other

    @contextmanager
    def on_device(self, *, is_recorded: bool = False) -> Iterator[None]:
        """Let the groups hold the tensors, filled before; a float that the body puts there stays.

        A rate that the body changes in place, as a scheduler does with tensors, or replaces by what
        it computes of it, is a float again behind it: one of float32, which the tensor was.

        Args:
            is_recorded: What the body computes is recorded, and has no value yet.

        Raises:
            CaptureError: The body changed a rate while it was recorded.

        Synchronizes: Where the body changed a rate.
        """
        given: list[tuple[dict[str, Any], Tensor, Any]] = []
        for group, tensor in zip(self.groups, self._tensors, strict=False):
            if not isinstance(group["lr"], Tensor):  # one that the user gave is on the device
                given.append((group, tensor, group["lr"]))
                group["lr"] = tensor
        versions = [tensor._version for _, tensor, _ in given]
        are_changed = False
        try:
            yield
        finally:
            for (group, tensor, rate), version in zip(given, versions, strict=True):
                now = group["lr"]
                if not isinstance(now, Tensor) or now.numel() != 1:
                    continue
                is_kept = now is tensor and tensor._version == version
                are_changed |= not is_kept
                group["lr"] = rate if is_kept or is_recorded else now.item()
            self.are_changed |= are_changed and not is_recorded
        if are_changed and is_recorded:
            raise CaptureError(CHANGED)

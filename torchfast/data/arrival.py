"""What is done to a batch on its way: narrowed before it crosses, transformed behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch

from torchfast._core.batches import map_batch, tensors, to_device
from torchfast._core.syncs import WATCH


@final
@dataclass(frozen=True)
class Finish:
    """What is done to a batch that is on the device: the user's transform, then the layout."""

    device: torch.device
    transform: Callable[[Any], Any] | None
    channels_last: bool

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to do."""
        return self.transform is not None or self.channels_last

    def __call__(self, batch: Any) -> Any:
        """Return the batch as the step gets it."""
        if self.transform is not None:
            batch = WATCH.heard("transform", self.transform, batch)
        return to_device(batch, self.device, channels_last=self.channels_last)


@final
@dataclass(frozen=True)
class DirectMove:
    """Moves a batch on the caller's stream, for devices without a ring."""

    transfer_dtype: torch.dtype | None
    finish: Finish

    def __call__(self, batch: Any) -> tuple[Any, int]:
        """Return the batch on the device, and the bytes that crossed."""
        dtype, device = self.transfer_dtype, self.finish.device
        if dtype is not None:
            batch = map_batch(batch, lambda t: t.to(dtype) if t.is_floating_point() else t)
        moved = self.finish(to_device(batch, device))
        if device.type == "cpu":
            return moved, 0
        return moved, sum(t.numel() * t.element_size() for t in tensors(batch))

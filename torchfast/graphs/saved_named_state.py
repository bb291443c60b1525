"""A copy of all that a step reads and changes, to run the same step more than once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from torchfast._core.compare import parts, same_bits
from torchfast.graphs.host_facts import HostFacts
from torchfast.graphs.named_state import NamedState

# A copy may take this part of the device's free memory; beyond it goes to the host.
_PART_OF_FREE = 0.2


@final
class SavedNamedState:
    """Tensors, numbers and generators of a named state, as they are now.

    Args:
        state: What to save.
        device: Where the step runs.
        others: Tensors to save with it.

    Synchronizes: Yes.
    """

    def __init__(
        self, state: NamedState, device: torch.device, others: Sequence[Tensor] = ()
    ) -> None:
        self._host = HostFacts(state, device)
        self._tensors = [*state.everything(), *others]
        size = sum(t.numel() * t.element_size() for t in self._tensors)
        place = None if _fits_on(device, size) else torch.device("cpu")
        self._values = [_copied(tensor, place) for tensor in self._tensors]

    def put_back(self) -> None:
        """Bring everything to what it was."""
        self._host.put_back()
        with torch.no_grad():
            for tensor, value in zip(self._tensors, self._values, strict=True):
                tensor.copy_(value)

    def tensors(self) -> list[Tensor]:
        """Return the copies, in the order of `NamedState.everything`."""
        return self._values


def distance(first: Tensor, second: Tensor) -> float:
    """Return the largest difference, relative to the largest value; 0 if all bits agree.

    Two NaNs agree, and so do the two zeros.
    """
    near, far = first.detach(), second.detach().to(first.device)
    if near.shape != far.shape or near.dtype != far.dtype:
        return math.inf
    if same_bits(near, far):
        return 0.0
    if not (near.is_floating_point() or near.is_complex()):
        return math.inf
    near, far = parts(near), parts(far)
    both_nan = near.isnan() & far.isnan()
    gap = torch.where(both_nan | (near == far), 0.0, (near - far).abs()).amax()
    size = near.abs().nan_to_num(0.0, 0.0, 0.0).amax()
    ratio = float(gap / size.clamp_min(torch.finfo(torch.float32).tiny))
    return math.inf if math.isnan(ratio) else ratio


def _fits_on(device: torch.device, size: int) -> bool:
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return size < _PART_OF_FREE * free


def _copied(tensor: Tensor, place: torch.device | None) -> Tensor:
    value = tensor.detach()
    return value.clone() if place is None else value.to(place, copy=True)

"""The inputs that a graph reads: memory of its own, filled before each replay."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from torchfast._core.batches import map_batch


@final
class StaticInputs:
    """Nested inputs at fixed addresses on one device.

    They are filled in the stream that replays, behind the replay before and ahead of the next one,
    so neither can read a batch that is half written.

    Args:
        inputs: The inputs of the call to be captured.
        tensors: Its tensors, as `describe` lists them.
        device: Where the graph runs.

    Numerics: Bitwise.
    Synchronizes: Never, for tensors on the device or in pinned memory.
    """

    def __init__(self, inputs: Any, tensors: Sequence[Tensor], device: torch.device) -> None:
        self._tensors = [_like(tensor, device) for tensor in tensors]
        self._needs_gradients = any(tensor.requires_grad for tensor in tensors)
        own = {id(tensor): copy for tensor, copy in zip(tensors, self._tensors, strict=True)}
        self.inputs = map_batch(inputs, lambda tensor: own[id(tensor)])

    def fill(self, tensors: list[Tensor]) -> None:
        """Copy a call's tensors in; one that is our own memory already is left alone."""
        own = self._tensors
        if any(map(operator.is_, own, tensors)):
            pairs = [(a, b) for a, b in zip(own, tensors, strict=True) if a is not b]
            own, tensors = [a for a, _ in pairs], [b for _, b in pairs]
        if not own:
            return
        if self._needs_gradients:
            with torch.no_grad():
                torch._foreach_copy_(own, tensors, non_blocking=True)
        else:
            torch._foreach_copy_(own, tensors, non_blocking=True)

    def versions(self) -> list[int]:
        """Return how often each tensor was written to."""
        return [tensor._version for tensor in self._tensors]

    def has_gradients(self) -> bool:
        """Whether a backward has left a gradient on one of them."""
        return any(tensor.is_leaf and tensor.grad is not None for tensor in self._tensors)


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"an input has layout {tensor.layout}, whose size depends on its values, so no graph "
            "can hold it; make it dense"
        )
    # Dense memory with the strides of the input, where it has dense strides.
    copy = torch.empty_like(tensor, device=device, requires_grad=False)
    return copy.requires_grad_(tensor.requires_grad)

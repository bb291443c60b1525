"""The inputs that a graph reads: memory of its own, filled before each replay."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, Final, final

import torch
from torch import Tensor

from torchfast._core.batches import map_batch

# Gaps of an input are kept up to these, as what lies in them is memory that nobody uses. A batch is
# a view of its own epoch at times: 32 columns of a hundred million.
_LARGEST_WITH_GAPS_BYTES: Final = 64 * 2**20
_LARGEST_WITH_GAPS: Final = 4  # times as large as without


@final
class StaticInputs:
    """Nested inputs at fixed addresses on one device.

    They are filled in the stream that replays, behind the replay before and ahead of the next one,
    so neither can read a batch that is half written.

    They have the strides of the inputs, also where these have gaps (``tokens[:, :-1]``) or repeat a
    value (``expand``): code that was compiled in the warm-up is compiled for these strides, and
    under others it would be compiled again, in the middle of the capture; and a kernel may be
    chosen by them, and with it the order of a sum. Not kept are those of elements that overlap
    otherwise, and gaps that would take far more memory than the values: these inputs get dense
    memory.

    Args:
        inputs: The inputs of the call to be captured.
        tensors: Its tensors, as `describe` lists them.
        device: Where the graph runs.

    Numerics: Bitwise; but a NaN in fp16 or bf16 may come out as another NaN.
    Synchronizes: Never, for tensors on the device or in pinned memory.
    """

    def __init__(self, inputs: Any, tensors: Sequence[Tensor], device: torch.device) -> None:
        self._tensors = [_like(tensor, device) for tensor in tensors]
        self._needs_gradients = any(tensor.requires_grad for tensor in tensors)
        self._repeats = any(_once(tensor, tensor) is not tensor for tensor in self._tensors)
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
        if self._needs_gradients or self._repeats:
            with torch.no_grad():
                if self._repeats:  # nothing is written to a place that several elements share
                    tensors = [_once(b, a) for a, b in zip(own, tensors, strict=True)]
                    own = [_once(tensor, tensor) for tensor in own]
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
    if tensor.is_nested:
        raise TypeError(
            "an input is a nested tensor, whose size depends on its values, so no graph can hold "
            "it; pad it"
        )
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"an input has layout {tensor.layout}, whose size depends on its values, so no graph "
            "can hold it; make it dense"
        )
    if type(tensor) is Tensor and (shape := _shape_in_memory(tensor)) is not None:
        memory = torch.empty_strided(shape, tensor.stride(), dtype=tensor.dtype, device=device)
        copy = memory if memory.shape == tensor.shape else memory.expand(tensor.shape)
    else:  # dense memory, with the strides of the input where it has dense ones
        copy = torch.empty_like(tensor, device=device, requires_grad=False)
    return copy.requires_grad_(tensor.requires_grad)


def _shape_in_memory(tensor: Tensor) -> list[int] | None:
    """Return the shape without what is repeated; None where the strides are not to be kept."""
    sizes = list(tensor.shape)
    extent = 1
    for stride, dimension in sorted((s, d) for d, s in enumerate(tensor.stride())):
        if stride == 0 and sizes[dimension]:
            sizes[dimension] = 1
        if sizes[dimension] <= 1:
            continue
        if stride < extent:
            return None  # elements overlap
        extent += (sizes[dimension] - 1) * stride
    too_large = extent > _LARGEST_WITH_GAPS * math.prod(sizes)
    return None if too_large and extent * tensor.itemsize > _LARGEST_WITH_GAPS_BYTES else sizes


def _once(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a tensor without what another one of its shape has in one place several times."""
    for dimension, (size, stride) in enumerate(zip(like.shape, like.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor

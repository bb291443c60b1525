"""channels_last: 4-d tensors laid out as NHWC.

cuDNN's convolution kernels for 16-bit types and tf32 want this layout; with NCHW they transpose
around every call. Worth it for convolutions, nothing for models without them. Shapes and indexing
do not change, only strides, so the model's code need not know.
"""

from __future__ import annotations

from collections import Counter
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchfast._core.building import optimized
from torchfast._core.decisions import Decision

_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


@final
class ChannelsLast:
    """Lays a model's 4-d parameters out as NHWC, and puts them back.

    Args:
        model: Changed in place: the parameter objects stay, their storage is laid out anew.
        wanted: Whether the plan asks for it.

    Numerics: May differ by rounding: other kernels are chosen.
    Synchronizes: Never.
    """

    def __init__(self, model: nn.Module, wanted: bool) -> None:
        self._changed: list[Tensor] = []
        convolutions = sum(isinstance(module, _CONVOLUTIONS) for module in model.modules())
        self.active = wanted and convolutions > 0
        if self.active:
            tensors = [*model.parameters(), *model.buffers()]
            holders = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors)
            for tensor in tensors:
                # Storage that others look into as well is theirs too: a new one would untie them.
                is_own = holders[tensor.untyped_storage().data_ptr()] == 1
                if is_own and tensor.dim() == 4 and not _is_nhwc(tensor):
                    tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)
                    self._changed.append(tensor)
        self.decision = _decision(wanted, convolutions, len(self._changed))

    def align(self, optimizer: Optimizer) -> None:
        """Lay optimizer state out as its parameters are; fused updates demand it."""
        _align(optimizer, [p for p in optimized(optimizer) if p.dim() == 4])

    def close(self, optimizer: Optimizer) -> None:
        """Put parameters and optimizer state back as they were."""
        for tensor in self._changed:
            tensor.data = tensor.data.contiguous()
        _align(optimizer, self._changed)
        self._changed = []
        self.active = False


def _is_nhwc(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last)


def _align(optimizer: Optimizer, parameters: list[Tensor]) -> None:
    for parameter in parameters:
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            is_moment = isinstance(value, Tensor) and value.shape == parameter.shape
            if is_moment and value.stride() != parameter.stride():
                state[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        if parameter.grad is not None and parameter.grad.shape == parameter.shape:
            parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)


def _decision(wanted: bool, convolutions: int, changed: int) -> Decision:
    if not wanted:
        return Decision(lever="channels_last", outcome="left alone", detail="layouts as given")
    if not convolutions:
        detail = "the model has no 2-d convolution, so there is nothing to gain"
        return Decision(lever="channels_last", outcome="left alone", detail=detail)
    detail = f"{changed} tensors of {convolutions} convolutions, and 4-d batch tensors, as NHWC"
    return Decision(lever="channels_last", outcome="applied", detail=detail)

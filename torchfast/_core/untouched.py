"""A model that is run to be measured, and then is as it was.

Gradients, buffers and random generators are put back. Parameters are not written to by a forward
and a backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from torchfast._core.rng import preserved_rng


@contextmanager
def untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Let the body run forwards and backwards of a model, and put back what they change.

    Args:
        model: The model.
        device: Whose generator is put back beside those of the host.
    """
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [
        (owner, name, buffer, buffer.detach().clone())
        for owner in model.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with preserved_rng(device):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for owner, name, buffer, value in buffers:
                owner._buffers[name] = buffer
                buffer.copy_(value)

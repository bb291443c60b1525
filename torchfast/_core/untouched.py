"""A model that is run to be measured, and then is as it was.

Gradients, buffers, plain numbers in attributes of modules and random generators are put back.
Parameters are not written to by a forward and a backward. What is not found: a generator that only
a global name has, and what objects of a person's own keep besides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torchfast._core.generators import preserved_generators
from torchfast._core.rng import preserved_rng

_NUMBERS = (bool, int, float)


@contextmanager
def untouched(
    model: nn.Module, device: torch.device, function: Callable[..., Any] | None = None
) -> Iterator[None]:
    """Let the body run forwards and backwards of a model, and put back what they change.

    Args:
        model: The model.
        device: Whose generator is put back beside those of the host.
        function: What is run, if it may hold generators of its own.
    """
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [
        (owner, name, buffer, buffer.detach().clone())
        for owner in model.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    numbers = [
        (vars(module), {name: v for name, v in vars(module).items() if type(v) in _NUMBERS})
        for module in model.modules()
    ]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with preserved_rng(device), preserved_generators(model, function):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for attributes, values in numbers:
            attributes.update(values)
        with torch.no_grad():
            for owner, name, buffer, value in buffers:
                owner._buffers[name] = buffer
                buffer.copy_(value)

"""What the tests of offloaded activations share: a chain of operations on a simulated device."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

SIZE = 64
ITEM = 4 * SIZE  # bytes


class Chain(nn.Module):
    """Operations that each save what the one before has made."""

    def __init__(self, depth=6):
        super().__init__()
        self.scales = nn.ParameterList(torch.full((SIZE,), 1.0 + k / 10) for k in range(depth))

    def forward(self, x):
        for scale in self.scales:
            x = (x * scale).sin()
        return x


def reference(model, x):
    loss = model(x.clone().requires_grad_()).sum()
    return torch.autograd.grad(loss, list(model.parameters()))


def start():
    return torch.linspace(0, 1, SIZE)


def stepped(device, model, offload, *, slow=0.0):
    """Return the gradients of a forward and backward on the device."""
    with device:
        x = (start() + 0.0).requires_grad_()
        with offload:
            loss = model(x).sum()
        if slow:
            device.main.sleep(slow)
        return torch.autograd.grad(loss, list(model.parameters()))


def same(device, found, expected):
    with _disable_current_modes():
        return all(torch.equal(device.read(a), b) for a, b in zip(found, expected, strict=True))

"""What the tests of updates on the host share: parameters on a device, and the plain update."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from torchfast.memory import OffloadedOptimizer

MAKERS = {
    "adamw": partial(torch.optim.AdamW, lr=0.1, fused=True),
    "adamw for-loop": partial(torch.optim.AdamW, lr=0.1, foreach=False),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "nadam": partial(torch.optim.NAdam, lr=0.1),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
}
SHAPES = [(8, 8), (16,), (4, 4), (3,)]


def values(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def placed(device):
    return [nn.Parameter(device.place(v)) for v in values()]


def give(device, parameters, seed):
    """Let the main stream compute gradients, late."""
    device.main.sleep(0.01)
    for parameter, value in zip(parameters, values(seed), strict=True):
        parameter.grad = parameter.detach() * 0.0 + value


def groups(parameters):
    return [{"params": parameters[:2], "lr": 0.05}, {"params": parameters[2:]}]


def plain(make, steps=4, lr=None):
    parameters = [nn.Parameter(v) for v in values()]
    optimizer = make(groups(parameters))
    for seed in range(1, steps + 1):
        for parameter, value in zip(parameters, values(seed), strict=True):
            parameter.grad = value
        if lr is not None:
            optimizer.param_groups[1]["lr"] = lr / seed
        optimizer.step()
    return parameters, optimizer


def read(device, tensors):
    with _disable_current_modes():
        return [device.read(t.detach()) for t in tensors]


def equal(found, expected):
    return all(torch.equal(a, b.detach()) for a, b in zip(found, expected, strict=True))


def make_offloaded(device, name="adamw", **options):
    parameters = placed(device)
    return parameters, OffloadedOptimizer(groups(parameters), MAKERS[name], **options)


def backward(device, parameters, seed):
    """A backward whose gradients are the values of a seed, and which calls hooks."""
    device.main.sleep(0.01)
    loss = sum((p * v).sum() for p, v in zip(parameters, values(seed), strict=False))
    loss.backward()

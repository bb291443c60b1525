"""What the tests of offloaded activations share: a chain of operations on a simulated device.

And steps whose times are known.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from simulated_copies import CopyingDevice, TimedCopies
from torchfast.memory import ActivationOffload, activation_offload, host_pool, optimizer_offload
from torchfast.memory.offload_timeline import At, StepTiming

SIZE = 64
ITEM = 4 * SIZE  # bytes
DEPTH = 24
WINDOW = 4 * ITEM
ALL = 2 * DEPTH * ITEM


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


# -- Chosen by measurement -------------------------------------------------------------------------


def on(monkeypatch, side):
    monkeypatch.setattr(activation_offload, "copy_streams_for", lambda _: side)
    return side


def auto(model, **options):
    return ActivationOffload(
        model, **{"min_bytes": ITEM, "window_bytes": WINDOW, "auto": True, **options}
    )


def step(side, model, offload, x=None):
    """Return the gradients of a step and the seconds that it took."""
    before = side.main.now
    with side:
        x = (start() if x is None else x).clone().requires_grad_()
        with offload:
            loss = model(x).sum()
        grads = torch.autograd.grad(loss, list(model.parameters()))
    return grads, side.main.now - before


def settled(side, model, offload, **options):
    """Return how long a step takes once nothing is looked at any more."""
    expected = reference(model, start())
    for _ in range(8):
        grads, took_s = step(side, model, offload, **options)
        assert all(map(torch.equal, grads, expected))
    assert offload.choice.is_settled
    return took_s


def plain_s():
    """Return how long the step takes without copies."""
    side, model = TimedCopies(1e9), Chain(DEPTH)
    with side:
        loss = model(start().requires_grad_()).sum()
        torch.autograd.grad(loss, list(model.parameters()))
    return side.main.now


def timed(sizes, window=2, *, waited_s=0.0, pace=1.0, backward=2.0, last=0.0):
    """Return a step that saves one storage a second, uses each once, and pushes as a window does.

    Backward takes ``backward`` seconds for each, and ``last`` before the first of them.
    """
    pushed, inside = [], 0
    waiting = []
    for index, size in enumerate(sizes):
        waiting.append(index)
        inside += size
        while inside > window and waiting[0] != index:
            oldest = waiting.pop(0)
            inside -= sizes[oldest]
            pushed.append(At(oldest, index * pace))
    end = (len(sizes) - 1) * pace + last
    order = reversed(range(len(sizes)))
    used = [At(index, end + place * backward) for place, index in enumerate(order)]
    compute_s = end + len(sizes) * backward
    return StepTiming(
        sizes=tuple(sizes),
        pushed=tuple(pushed),
        used=tuple(used),
        compute_s=compute_s,
        waited_s=waited_s,
        out_bytes_per_s=None,
        back_bytes_per_s=None,
    )


@contextmanager
def host_apart(monkeypatch):
    """Have a device for offloaded optimizers whose host is apart."""
    device = CopyingDevice()
    device.host_is_apart = True
    monkeypatch.setattr(optimizer_offload, "copy_streams_for", lambda _: device)
    monkeypatch.setattr(host_pool, "SLAB_BYTES", 1 << 14)
    yield device
    device.end()

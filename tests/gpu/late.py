"""A device that is late where a test says so."""

from __future__ import annotations

import torch

SLOW = 20_000_000  # cycles: about 10 ms


class Late(torch.autograd.Function):
    """The identity, before which the device is late, in forward and backward."""

    @staticmethod
    def forward(ctx, x, forward_cycles, backward_cycles):
        ctx.cycles = backward_cycles
        ctx.stream = torch.cuda.current_stream()
        torch.cuda._sleep(forward_cycles)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        assert torch.cuda.current_stream() == ctx.stream
        torch.cuda._sleep(ctx.cycles)
        return gradient.clone(), None, None

"""A kernel of one's own, written in Triton and registered so that torch.compile sees into it.

Where there is no Triton, whoever imports this is skipped.
"""

import pytest
import torch
from torch.library import triton_op, wrap_triton

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

BLOCK = 1024


@triton.jit
def _squared_relu(x, out, count, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < count
    value = tl.maximum(tl.load(x + at, mask=inside), 0.0)
    tl.store(out + at, value * value, mask=inside)


@triton_op("torchfast_tests::squared_relu", mutates_args={})
def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """Return ``relu(x) ** 2`` of a contiguous tensor."""
    out = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), BLOCK),)
    wrap_triton(_squared_relu)[grid](x, out, x.numel(), BLOCK)
    return out


def _backward(ctx, gradient):
    (x,) = ctx.saved_tensors
    return gradient * 2 * x.clamp(min=0)


def _setup_context(ctx, inputs, output):  # called by these names
    ctx.save_for_backward(inputs[0])


squared_relu.register_autograd(_backward, setup_context=_setup_context)

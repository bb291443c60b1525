"""Weights of losses, summed over micro-batches."""

from __future__ import annotations

import pytest
import torch

from torchfast._core.weights import _as_tensor

META = torch.device("meta")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.float32])
def test_sums_of_weights_on_a_device_are_not_those_of_16_bits(dtype):
    """Two of 40,000 are more than float16 has, and bfloat16 counts in hundreds there."""
    assert _as_tensor(torch.ones((), dtype=dtype, device=META), META).dtype == torch.float32


def test_those_of_64_bits_stay_so():
    double = torch.ones((), dtype=torch.float64, device=META)
    assert _as_tensor(double, META).dtype == torch.float64

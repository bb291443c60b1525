"""The codes of moments in low bits on a device, and what a compiled update leaves in between."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchao.optim import quant_utils

from gpu.requirements import requires
from test_low_bit_nearest import entries, hard_values
from torchfast import LowBitAdamW
from torchfast.precision.low_bit_nearest import nearest_code, thresholds

pytestmark = requires(gpus=1)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_the_code_is_that_of_the_search(signed, is_compiled):
    table, values = entries(signed), hard_values(signed)
    function = torch.compile(nearest_code, fullgraph=True) if is_compiled else nearest_code
    found = function(values.cuda(), thresholds(table).cuda(), signed=signed)
    assert torch.equal(found.cpu(), quant_utils.quantize_8bit_with_qmap(values, table))


@pytest.mark.parametrize("kind", ["8bit", "4bit", "fp8"])
def test_a_compiled_update_keeps_little_in_between(kind):
    """Moments and weights in fp32 would be 12 bytes a value and more."""
    weight = nn.Parameter(torch.ones(4096, 4096, device="cuda"))
    optimizer = LowBitAdamW([weight], state=kind)
    weight.grad = torch.randn_like(weight)
    for _ in range(3):
        optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 4 * weight.numel()

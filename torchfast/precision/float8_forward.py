"""The forward of a converted layer, under autocast on any device.

torchao's own asks for the autocast of CUDA alone, by a call that torch has deprecated, and so does
not cast on a CPU, where emulation is tested, and raises where warnings are errors. The product is
torchao's; what stands around it is here.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from torchfast.precision.torchao_modules import torchao_module


@functools.cache  # one class for all layers, so that the compiler compiles one forward
def forward_class(converted: type[nn.Module]) -> type[nn.Module]:
    """Return torchao's class of converted layers with another forward.

    Args:
        converted: The class of a layer that torchao has converted.
    """
    product = torchao_module(
        "torchao.float8.float8_linear", "precision='fp8'"
    ).matmul_with_hp_or_float8_args

    def forward(self: Any, input: Tensor) -> Tensor:
        """Multiply in float8, in the type that autocast says or that the input has."""
        kind = input.device.type
        if torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))
        out: Tensor = product.apply(input, self.weight.t(), self.linear_mm_config, self.config)
        return out if self.bias is None else out + self.bias.to(out.dtype)

    return type("Float8Linear", (converted,), {"forward": forward})

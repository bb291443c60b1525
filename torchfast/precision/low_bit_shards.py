"""Low-bit state of sharded parameters: each rank codes the values that it has.

A sharded parameter is a ``DTensor``, and so must its state be, or whoever saves it takes one rank's
part for the whole. Codes and scales are cut where the parameter is: along the first dimension, in
parts of the same size, each of whole blocks. Where that does not come out even, moments stay fp32.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchfast._core.local import local
from torchfast.precision.low_bit_codes import is_coded


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is spread over ranks."""
    return local(tensor) is not tensor


def can_be_coded(kind: str, parameter: Tensor) -> bool:
    """Whether the moments of a parameter are kept as codes: the same on every rank."""
    if not is_sharded(parameter):
        return is_coded(kind, parameter.numel())
    whole: Any = parameter
    sizes = [
        whole.device_mesh.size(dim)
        for dim, placement in enumerate(whole.placements)
        if not placement.is_replicate()
    ]
    if not all(p.is_replicate() or p.is_shard(0) for p in whole.placements):
        return False
    num_parts = math.prod(sizes)
    is_even = parameter.shape[0] % num_parts == 0 if parameter.dim() else num_parts == 1
    return is_even and is_coded(kind, parameter.numel() // num_parts)


def spread_as(parameter: Tensor, part: Tensor) -> Tensor:
    """Return a rank's part of the state of a parameter as the state of all ranks.

    Args:
        parameter: Whose state it is; where it is not sharded, ``part`` is returned.
        part: As the parameter's own part, or flat, for codes and scales.
    """
    if not is_sharded(parameter):
        return part
    from torch.distributed.tensor import DTensor

    whole: Any = parameter
    shape = parameter.shape
    if part.shape != local(parameter).shape:
        rows = part.shape[0] * parameter.numel() // max(1, local(parameter).numel())
        shape = torch.Size([rows])
    strides = torch.empty(shape, device="meta").stride()
    spread: Tensor = DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=shape, stride=strides
    )
    return spread

"""What rounding alone makes of a step: its parameters are moved by about as much before it runs.

A step in low precision hands most roundings on as nothing, and a few as a value that rounds the
other way, which is ten thousand times as much. How often that comes, and in which tensors, depends
on the model; so it is measured, as stochastic arithmetic does it (Vignes, 1993).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from torchfast._core.storages import is_dense, is_expanded

# Some roundings of float32, as kernels make that add in another order.
SIZE = 2.0**-20
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_AT_A_TIME = 2**24  # elements: the numbers that are drawn for them take memory too


def disturb(parameters: Iterable[Tensor], seed: int) -> None:
    """Multiply each value by one plus or minus a rounding.

    A format that is too coarse for that has some values moved by a whole step, as many as makes the
    same on the average. Tensors of other formats or classes, and such whose elements share memory,
    are left alone.

    Args:
        parameters: Changed in place.
        seed: Of what is drawn; the global generators are not touched. On ranks that hold the same
            values it makes the same of them.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for parameter in parameters:
        if type(parameter) not in (Tensor, nn.Parameter) or parameter.dtype not in _DTYPES:
            continue
        value = parameter.detach()
        if not is_dense(value) or is_expanded(value) or not value.numel():
            continue
        step = max(SIZE, torch.finfo(value.dtype).eps)
        if value.device not in generators:
            generators[value.device] = torch.Generator(value.device).manual_seed(seed)
        rows = max(1, _AT_A_TIME * len(value) // value.numel()) if value.ndim else 1
        for part in value.split(rows) if value.ndim else (value,):
            drawn = torch.empty(part.shape, device=part.device)
            drawn.uniform_(-1.0, 1.0, generator=generators[value.device])
            moves = drawn.sign().mul_(step).mul_(drawn.abs_() < SIZE / step).add_(1.0)
            part.mul_(moves)

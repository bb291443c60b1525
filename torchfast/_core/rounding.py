"""What rounding alone makes of a step: its parameters are moved by about as much before it runs.

A step in low precision hands most roundings on as nothing, and a few as a value that rounds the
other way, which is ten thousand times as much. How often that comes, and in which tensors, depends
on the model; so it is measured, as stochastic arithmetic does it (Vignes, 1993).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from torchfast._core.storages import is_dense, is_expanded, plain_parts

# Some roundings of float32, as kernels make that add in another order.
SIZE = 2.0**-20
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_AT_A_TIME = 2**22  # elements: what is drawn for them takes memory too


def disturb(parameters: Iterable[Tensor], seed: int, size: float = SIZE) -> None:
    """Multiply values by one less a rounding, half of them or more.

    All move towards zero: what is at most one, as a probability, stays so, and nothing overflows.
    In a format that is too coarse for that, some move by a whole step, as many as makes the same on
    the average. Other formats, and tensors whose elements share memory, are left alone.

    Args:
        parameters: Changed in place.
        seed: Of what is drawn; the global generators are not touched. On ranks that hold the same
            values it makes the same of them.
        size: By how much on the average, relative to each.
    """
    parameters = [*parameters]
    for part, _, factors in _moves(parameters, parameters, seed, size):
        part.mul_(factors)


def take_back(parameters: Iterable[Tensor], starts: Iterable[Tensor], seed: int) -> None:
    """Take what `disturb` did from parameters that have changed since.

    Args:
        parameters: Those that it was given, changed in place.
        starts: What they were before it, on any device.
        seed: What it was given.
    """
    for part, start, factors in _moves(parameters, starts, seed):
        was = start.to(part.device)
        part.copy_(part.double().sub_(was * factors).add_(was))


def _moves(
    parameters: Iterable[Tensor], starts: Iterable[Tensor], seed: int, size: float = SIZE
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield parts of parameters, the same of starts, and what the elements are multiplied by."""
    generators: dict[torch.device, torch.Generator] = {}
    for part, start in _parts(parameters, starts):
        step = max(2 * size, torch.finfo(part.dtype).eps)
        if part.device not in generators:
            generators[part.device] = torch.Generator(part.device).manual_seed(seed)
        drawn = torch.empty(part.shape, dtype=torch.float32, device=part.device)
        drawn.uniform_(generator=generators[part.device])
        yield part, start, (drawn < size / step).to(part.dtype).mul_(-step).add_(1.0)


def _parts(tensors: Iterable[Tensor], others: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what can be moved of tensors, as views of few elements, and the same of others."""
    for pair in zip(tensors, others, strict=True):
        for whole, other in zip(*(plain_parts(tensor.detach()) for tensor in pair), strict=True):
            is_moved = whole.dtype in _DTYPES and is_dense(whole) and whole.numel()
            if not is_moved or is_expanded(whole) or whole.is_meta or whole.is_inference():
                continue
            if not whole.ndim:
                yield whole, other
                continue
            longest = max(range(whole.ndim), key=whole.shape.__getitem__)
            length = max(1, _AT_A_TIME * whole.shape[longest] // whole.numel())
            yield from zip(whole.split(length, longest), other.split(length, longest), strict=True)

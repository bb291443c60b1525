"""Which samples of a batch tell whether parts make the whole: those that differ most.

A mean over the tokens that are not padding is a mean over samples as long as all are equally long,
so samples of other lengths have to be among those that are tried. What is padding nobody says.
What it looks like is counted in each sample: labels below zero, zeros and ones of masks, equal
values at the ends, the least and the largest value that the batch has, and what is no number. In a
tensor of one value for each sample, such as its length, its class or its weight, that value is
taken, and whether it is below zero or no number, as that of a sample without a label.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from torchfast._core.batches import map_batch, tensors

# Torch compares them on few devices.
_NOT_COMPARED: Final = (torch.uint16, torch.uint32, torch.uint64)
# Below it what a wrong weight does is of the size of what a check takes for rounding.
SLIGHT: Final = 0.05
# Of so many values at a time it is seen what they are: where a step has run out of memory there is
# none for a copy of the batch.
_MOST_AT_ONCE: Final = 2**22
# So that samples that do not differ are taken from all over the batch.
_WEIGHT_OF_PLACE: Final = 1e-2


def counts_in(batch: Any, num: int) -> Tensor:
    """Return what is counted in each of so many samples, one column each, on the host.

    Args:
        batch: One of which `torchfast.memory.splitting.why_whole` returns None.
        num: How many samples it has.

    Synchronizes: Yes, once.
    """
    columns: list[Tensor] = []
    for tensor in {id(t): t for t in tensors(batch)}.values():
        if tensor.dim() > 0 and tensor.numel() > 0:
            columns += _columns(tensor.detach())
    if not columns:
        return torch.zeros(num, 0)
    devices = {column.device for column in columns}
    if len(devices) > 1:
        columns = [column.cpu() for column in columns]
    return torch.stack([c.to(torch.float32) for c in columns], dim=1).cpu().nan_to_num()


def unevenness(counts: Tensor) -> tuple[float, ...]:
    """Return for each column how far samples are apart in it: 0 if they are equal, 1 at most.

    As a share of the largest, for that is how far their weights in a mean may be apart.
    """
    if not counts.numel():
        return ()
    largest, least = counts.amax(0), counts.amin(0)
    scale = torch.maximum(largest.abs(), least.abs()).clamp(min=1e-30)
    return tuple(((largest - least) / scale).clamp(max=1.0).tolist())


def unlike(counts: Tensor, size: int) -> list[int]:
    """Return the places of so many samples, each as far from those before it as any is.

    Example:
        >>> unlike(torch.tensor([[4.0], [4.0], [1.0], [4.0], [2.0]]), 3)
        [0, 2, 4]
    """
    num = len(counts)
    spread = (counts.amax(0) - counts.amin(0)).clamp(min=1e-30)
    place = torch.linspace(0, _WEIGHT_OF_PLACE, num).unsqueeze(1)
    points = torch.cat([(counts - counts.amin(0)) / spread, place], dim=1)
    chosen = [0]
    distances = (points - points[0]).norm(dim=1)
    while len(chosen) < size:
        distances[chosen] = -1.0
        chosen.append(int(distances.argmax()))
        distances = torch.minimum(distances, (points - points[chosen[-1]]).norm(dim=1))
    return chosen


def samples_at(batch: Any, places: list[int]) -> Any:
    """Return the samples in these places of a batch, in this order."""
    return map_batch(
        batch,
        lambda t: t.index_select(0, torch.tensor(places, device=t.device)) if t.dim() > 0 else t,
    )


def _columns(tensor: Tensor) -> list[Tensor]:
    if tensor.is_complex() or tensor.dtype in _NOT_COMPARED:
        return []
    samples = max(1, _MOST_AT_ONCE * len(tensor) // tensor.numel())
    # The least and the largest value, if they stand there more than once, as what marks padding.
    ends: tuple[Tensor, ...] = ()
    if tensor.dim() > 1 and tensor.dtype != torch.bool:
        least, largest = zip(
            *(_rows(part).aminmax() for part in tensor.split(samples)), strict=True
        )
        ends = torch.stack(least).amin(), torch.stack(largest).amax()
    found = [_columns_of(_rows(part), tensor.dim(), ends) for part in tensor.split(samples)]
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def _rows(tensor: Tensor) -> Tensor:
    """Return a row for each sample, of a type that kernels compare."""
    if tensor.is_floating_point() and tensor.itemsize == 1:
        tensor = tensor.to(torch.float16)  # float8 is compared by few
    return tensor.reshape(len(tensor), -1)


def _columns_of(flat: Tensor, dim: int, ends: tuple[Tensor, ...]) -> list[Tensor]:
    is_float, is_number = flat.is_floating_point(), flat.dtype != torch.bool
    missing = [(flat != flat).sum(1)] if is_float else []  # NaN
    if dim == 1:
        return [flat[:, 0], (flat < 0).sum(1), *missing] if is_number else [flat[:, 0]]
    counts = [(flat == 0).sum(1), *missing]
    if is_number and not is_float:
        counts += [(flat < 0).sum(1), _run(flat), _run(flat.flip(1))]
    # What is left counts as much as what is dropped, and nobody knows which of them is which.
    sides = [side for count in counts for side in (count, flat.shape[1] - count)]
    return [*sides, *(flat.shape[1] - ((flat == end).sum(1) - 1).clamp(min=0) for end in ends)]


def _run(flat: Tensor) -> Tensor:
    """Return how many values of each row are equal, from its first on."""
    differs = flat != flat[:, :1]
    first = differs.to(torch.uint8).argmax(1)
    return torch.where(differs.any(1), first, flat.shape[1])

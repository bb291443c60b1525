"""Copies of thousands of tensors, in few launches and few pieces of memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn

_BLOCK_BYTES: Final = 2**28  # at most, but for a tensor that is larger
_ALIGNMENT_BYTES: Final = 64
# Of which a device copies many in one launch.
_DTYPES: Final = frozenset(
    (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64)
)
# Such a launch would pass these through float32, and a NaN would come out with other bits: what
# somebody has packed into a tensor of such a type would be lost.
_AS_BITS: Final = {torch.float16: torch.int16, torch.bfloat16: torch.int16}


def copies_of(some: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of tensors, detached, each in the layout of its own.

    One by one each would take a launch and a piece of the allocator's memory. Those that lie in
    order and without gaps, as nearly all parameters do, are copied many at a time.
    """
    found: dict[int, Tensor] = {}
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(some):
        if _lies_in_order(tensor):
            groups.setdefault((tensor.device, tensor.dtype), []).append(place)
        else:
            found[place] = tensor.detach().clone()
    with torch.no_grad():
        for places in groups.values():
            tensors = [some[place] for place in places]
            copies = _like(tensors)
            torch._foreach_copy_(_as_bits(copies), _as_bits(tensors))
            found.update(zip(places, copies, strict=True))
    return [found[place] for place in range(len(some))]


def _lies_in_order(tensor: Tensor) -> bool:
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.dtype not in _DTYPES:
        return False
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_neg():
        return False
    return tensor.is_contiguous() and tensor.numel() > 0


def _as_bits(tensors: list[Tensor]) -> list[Tensor]:
    dtype = _AS_BITS.get(tensors[0].dtype)
    return tensors if dtype is None else [tensor.view(dtype) for tensor in tensors]


def _like(tensors: list[Tensor]) -> list[Tensor]:
    """Return memory for tensors of one device and dtype, cut out of blocks."""
    alignment = _ALIGNMENT_BYTES // tensors[0].element_size()
    most = _BLOCK_BYTES // tensors[0].element_size()
    places, sizes = [], [0]  # the block of each and where it begins there; of each block, its size
    for tensor in tensors:
        size = -(-tensor.numel() // alignment) * alignment
        if sizes[-1] and sizes[-1] + size > most:
            sizes.append(0)
        places.append((len(sizes) - 1, sizes[-1]))
        sizes[-1] += size
    blocks = [tensors[0].new_empty(size) for size in sizes]
    pairs = zip(tensors, places, strict=True)
    return [blocks[number].as_strided(t.shape, t.stride(), start) for t, (number, start) in pairs]

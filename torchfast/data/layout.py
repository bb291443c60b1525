"""How the tensors of a batch lie in a slot.

Small tensors are packed into one block, so that a batch of many of them crosses the bus in one
copy. Each large one has a device block of its own: whoever keeps a batch's labels must not keep its
images too. On the host all that is not pinned already shares one block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 512  # bytes, the allocator's own: what kernels that read by 16 bytes rely on
LARGE_BYTES = 2**16

Kind = tuple[torch.dtype, torch.Size, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Place:
    """Where one tensor lies; offsets in elements."""

    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    block: int
    device_offset: int
    host_offset: int | None

    def on_host(self, pinned: Tensor) -> Tensor:
        """Return the tensor's place in pinned memory."""
        assert self.host_offset is not None
        start = self.host_offset * self.dtype.itemsize
        size = self.shape.numel() * self.dtype.itemsize
        return pinned[start : start + size].view(self.dtype).as_strided(self.shape, self.strides)


@dataclass(frozen=True, slots=True)
class Layout:
    """The places of a batch's tensors, and the memory that they need.

    Attributes:
        places: In the order of the tensors.
        block_bytes: The size of each device block; the first is the pack. One has no bytes only
            where no tensor lies in it, not even an empty one.
        host_bytes: The size of the pinned block; the pack is its beginning.
        pack_bytes: How much of it is the pack.
        num_bytes: Of all tensors together.
    """

    places: tuple[Place, ...]
    block_bytes: tuple[int, ...]
    host_bytes: int
    pack_bytes: int
    num_bytes: int


def lay_out(kinds: Sequence[tuple[Kind, bool]]) -> Layout:
    """Return the layout of tensors, each with whether it is copied from where it is."""
    sizes = [shape.numel() * dtype.itemsize for (dtype, shape, _), _ in kinds]
    offsets: list[int] = []
    pack_bytes = 0
    for size, (_, is_direct) in zip(sizes, kinds, strict=True):
        if size < LARGE_BYTES and not is_direct:
            offsets.append(_aligned(pack_bytes))
            pack_bytes = offsets[-1] + size
        else:
            offsets.append(-1)
    places: list[Place] = []
    block_bytes = [max(pack_bytes, 1) if max(offsets, default=-1) >= 0 else 0]
    host_bytes = pack_bytes
    for size, offset, (kind, is_direct) in zip(sizes, offsets, kinds, strict=True):
        dtype = kind[0]
        if offset >= 0:
            element = offset // dtype.itemsize
            places.append(Place(*kind, block=0, device_offset=element, host_offset=element))
            continue
        host_offset = None
        if not is_direct:
            host_offset = _aligned(host_bytes) // dtype.itemsize
            host_bytes = _aligned(host_bytes) + size
        places.append(
            Place(*kind, block=len(block_bytes), device_offset=0, host_offset=host_offset)
        )
        block_bytes.append(max(size, 1))
    return Layout(tuple(places), tuple(block_bytes), host_bytes, pack_bytes, sum(sizes))


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides that ``tensor.to(device)`` would give: its own where it has no gaps."""
    if tensor.is_contiguous():
        return tensor.stride()
    return torch.empty_like(tensor, device="meta").stride()

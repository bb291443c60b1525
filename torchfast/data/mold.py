"""A slot's memory, cut once for all batches of one layout.

Views cost more than what is copied into them where tensors are small, and each call of torch lets
another thread take the interpreter. So they are kept with the slot, until its memory is replaced.
What is handed out is made anew each time: nothing of it may outlive its batch here.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from torchfast.data.layout import Layout, Place


@final
class Mold:
    """Where the tensors of a batch go.

    Args:
        layout: How they lie.
        pinned: The slot's memory on the host.
        blocks: The slot's memory on the device if it stays the slot's; None if it is given away.
    """

    def __init__(self, layout: Layout, pinned: Tensor, blocks: list[Tensor] | None) -> None:
        self.layout = layout
        self._pack = pinned[: layout.pack_bytes] if layout.pack_bytes else None
        self._on_host = [
            None if place.host_offset is None else place.on_host(pinned) for place in layout.places
        ]
        self._targets = [view for view in self._on_host if view is not None]
        self._large = [i for i, place in enumerate(layout.places) if place.block > 0]
        self._empty: dict[torch.dtype, Tensor] = {}
        self._kept = None if blocks is None else [self._cut(p, blocks) for p in layout.places]
        self._kept_pack = None if blocks is None else self._pack_in(blocks)

    def fill(self, tensors: list[Tensor]) -> None:
        """Write the batch's tensors into pinned memory, but those copied from where they are."""
        if len(self._targets) != len(tensors):
            tensors = [
                tensor
                for tensor, view in zip(tensors, self._on_host, strict=True)
                if view is not None
            ]
        if tensors:
            torch._foreach_copy_(self._targets, tensors)  # one call: it gives up the interpreter

    def cut(
        self, blocks: list[Tensor], tensors: list[Tensor]
    ) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
        """Return the tensors on the device, and the copies to make, as (target, source).

        Each is an object of its own, so that none shares a version counter with another.
        """
        if self._kept is None:
            on_device = targets = [self._cut(place, blocks) for place in self.layout.places]
            pack = self._pack_in(blocks)
        else:
            on_device, targets = [tensor.data for tensor in self._kept], self._kept
            pack = self._kept_pack
        copies: list[tuple[Tensor, Tensor]] = []
        if pack is not None and self._pack is not None:
            copies.append((pack, self._pack))
        for i in self._large:
            view = self._on_host[i]
            copies.append((targets[i], tensors[i] if view is None else view))
        return on_device, copies

    def _cut(self, place: Place, blocks: list[Tensor]) -> Tensor:
        block = blocks[place.block]
        empty = self._empty.get(place.dtype)
        if empty is None:
            empty = torch.empty(0, dtype=place.dtype, device=block.device)
            self._empty[place.dtype] = empty
        storage = block.untyped_storage()
        return empty.data.set_(storage, place.device_offset, place.shape, place.strides)

    def _pack_in(self, blocks: list[Tensor]) -> Tensor | None:
        size = self.layout.pack_bytes
        if not size:
            return None
        return blocks[0] if blocks[0].numel() == size else blocks[0][:size]

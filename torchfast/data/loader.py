"""Batches on the device, grouped into micro-batches.

Any iterable of batches goes in; what comes out is what the step takes. Copies are enqueued on the
current stream, in order, one batch at a time: from pinned memory the host goes on at once, from
pageable memory it waits for the copy. Epochs, order and random numbers are the loader's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, final

import torch

from torchfast._core.arguments import check_int, check_iterable
from torchfast._core.batches import MicroBatches, to_device


@final
class DeviceLoader:
    """Iterates over a loader's batches on the device.

    Args:
        loader: Any iterable of batches.
        device: Where the tensors go.
        accumulate: With more than 1, yields `MicroBatches` of so many batches; the last group of
            an epoch may be shorter, and none crosses an epoch.
        channels_last: Lay 4-d tensors out as NHWC.

    Raises:
        TypeError: ``loader`` is not iterable.

    Numerics: Exact.
    Synchronizes: While copying from pageable host memory.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device,
        *,
        accumulate: int = 1,
        channels_last: bool = False,
    ) -> None:
        check_iterable("loader", loader, "batches")
        # Wrapped twice, it would group groups.
        self.loader: Iterable[Any] = loader.loader if isinstance(loader, DeviceLoader) else loader
        self.device = device
        self.accumulate = check_int("accumulate", accumulate, minimum=1)
        self._channels_last = channels_last

    @property
    def is_one_shot(self) -> bool:
        """Whether the loader is an iterator, which serves one epoch only."""
        return hasattr(type(self.loader), "__next__")

    def set_epoch(self, epoch: int) -> None:
        """Tell the loader, its samplers and its data set which epoch starts, where they ask."""
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        holders = (
            self.loader,
            getattr(self.loader, "sampler", None),
            batch_sampler,
            getattr(batch_sampler, "sampler", None),
            getattr(self.loader, "dataset", None),
        )
        seen: set[int] = set()
        for holder in holders:
            if id(holder) not in seen and callable(getattr(holder, "set_epoch", None)):
                holder.set_epoch(epoch)  # type: ignore[union-attr]
            seen.add(id(holder))

    def __len__(self) -> int:
        """Return the number of steps in an epoch; TypeError where the loader has no length."""
        try:
            batches = len(self.loader)  # type: ignore[arg-type]
        except TypeError as error:
            raise TypeError(
                f"the loader ({type(self.loader).__name__}) has no length; give steps=, or count "
                "what it yields"
            ) from error
        return -(-batches // self.accumulate)

    def __iter__(self) -> Iterator[Any]:
        group: list[Any] = []
        for batch in self.loader:
            moved = to_device(batch, self.device, channels_last=self._channels_last)
            if self.accumulate == 1:
                yield moved
                continue
            group.append(moved)
            if len(group) == self.accumulate:
                yield MicroBatches(group)
                group = []
        if group:
            yield MicroBatches(group)

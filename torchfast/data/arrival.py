"""What is done to a batch on its way: narrowed before it crosses, transformed behind it.

Where nothing crosses, on the CPU, the batch that comes out would be upstream's own object. What a
transform or the loop writes into it would be found there in the next epoch, and what upstream
writes, such as a generator that fills one buffer again and again, would be found in batches that
were handed out. So it is copied, as it is on a device, unless a DataLoader has just made it of its
samples: then nobody else holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.utils.data import DataLoader, default_collate

from torchfast._core.arguments import check_callable, check_float_dtype
from torchfast._core.batches import map_batch, tensors, to_device
from torchfast._core.syncs import WATCH
from torchfast.data.padding import PadToLengths
from torchfast.data.sharded_batches import has_own_loop


@final
@dataclass(frozen=True)
class Finish:
    """What is done to a batch that is on the device: the user's transform, then the layout."""

    device: torch.device
    transform: Callable[[Any], Any] | None
    channels_last: bool

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to do."""
        return self.transform is not None or self.channels_last

    def __call__(self, batch: Any) -> Any:
        """Return the batch as the step gets it."""
        if self.transform is not None:
            given, batch = batch, WATCH.heard("transform", self.transform, batch)
            if batch is None and given is not None:
                raise TypeError(
                    f"transform ({getattr(self.transform, '__qualname__', self.transform)!s}) "
                    "returned None; it must return the batch: did you forget `return`?"
                )
        return to_device(batch, self.device, channels_last=self.channels_last)


@final
@dataclass(frozen=True)
class DirectMove:
    """Moves a batch on the caller's stream, for devices without a ring."""

    transfer_dtype: torch.dtype | None
    finish: Finish
    copies: bool  # what is there already, since somebody else may hold it

    def __call__(self, batch: Any) -> tuple[Any, int]:
        """Return the batch on the device, and the bytes that crossed."""
        dtype, device = self.transfer_dtype, self.finish.device
        if dtype is not None:
            batch = map_batch(batch, lambda t: t.to(dtype) if t.is_floating_point() else t)
        moved = self.finish(to_device(batch, device, copies=self.copies))
        if device.type == "cpu":
            return moved, 0
        return moved, sum(t.numel() * t.element_size() for t in tensors(batch))


def move_to(
    loader: Iterable[Any],
    device: torch.device,
    transform: Callable[[Any], Any] | None,
    transfer_dtype: torch.dtype | None,
    channels_last: bool,
    inner: DirectMove | None,
) -> DirectMove:
    """Return what is done to a batch, from a loader's options.

    Args:
        loader: Where it comes from.
        device: Where it goes.
        transform: As `PrefetchingLoader` documents it.
        transfer_dtype: Likewise.
        channels_last: Likewise.
        inner: Of the PrefetchingLoader that this one is made of; its batches stay what they were.

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: One that both loaders have.
    """
    if transform is not None:
        check_callable("transform", transform, "transform(batch)")
    if transfer_dtype is not None:
        check_float_dtype("transfer_dtype", transfer_dtype)
    if inner is not None:
        transform = _only("transform", transform, inner.finish.transform)
        transfer_dtype = _only("transfer_dtype", transfer_dtype, inner.transfer_dtype)
        channels_last |= inner.finish.channels_last
    finish = Finish(device, transform, channels_last)
    return DirectMove(transfer_dtype, finish, copies=not _hands_over(loader))


def _hands_over(loader: Iterable[Any]) -> bool:
    """Whether a loader makes each batch anew, and keeps nothing of it."""
    if not isinstance(loader, DataLoader) or has_own_loop(loader) or loader.batch_sampler is None:
        return False
    # Another one may hand a sample on as it is, or fill one buffer again.
    collate = loader.collate_fn
    return collate is default_collate or isinstance(collate, PadToLengths)


def _only(name: str, own: Any, inner: Any) -> Any:
    if own is not None and inner is not None and own is not inner:
        raise ValueError(
            f"{name} was given here as {own!r}, and the loader is a PrefetchingLoader that has "
            f"{name}={inner!r}; give it to one of them, or wrap the loader that is inside"
        )
    return inner if own is None else own

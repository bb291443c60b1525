"""Batches on the device, grouped into micro-batches.

Any iterable of batches goes in; what comes out is what the step takes. Copies are enqueued on the
current stream, in order, one batch at a time: from pinned memory the host goes on at once, from
pageable memory it waits for the copy. Epochs, order and random numbers are the loader's own. Its
position can be saved at any batch and taken up in another process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, final

import torch

from torchfast._core.arguments import check_int, check_iterable
from torchfast._core.batches import MicroBatches, to_device
from torchfast.data.position import Position, PositionedLoader


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
        # Wrapped twice, it would group groups. The position is one for all that wrap a loader.
        self._upstream: PositionedLoader = (
            loader._upstream if isinstance(loader, DeviceLoader) else PositionedLoader(loader)
        )
        self.loader: Iterable[Any] = self._upstream.loader
        self.device = device
        self.accumulate = check_int("accumulate", accumulate, minimum=1)
        self._channels_last = channels_last
        self._epoch: int | None = None

    @property
    def is_one_shot(self) -> bool:
        """Whether the loader is an iterator, which serves one epoch only."""
        return hasattr(type(self.loader), "__next__")

    def set_epoch(self, epoch: int) -> None:
        """Tell the loader, its samplers and its data set which epoch starts, where they ask."""
        self._epoch = epoch
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
        position: Position | None = None
        for batch, position in self._upstream:
            group.append(to_device(batch, self.device, channels_last=self._channels_last))
            if len(group) == self.accumulate:
                self._upstream.position = position
                yield group[0] if self.accumulate == 1 else MicroBatches(group)
                group = []
        if group:
            self._upstream.position = position
            yield MicroBatches(group)
        self.end_epoch()

    @property
    def will_resume(self) -> bool:
        """Whether the next iteration goes on in the middle or at the end of an epoch."""
        return self._upstream.will_resume

    def end_epoch(self) -> None:
        """Count the epoch as finished, though the loader was not asked for more than its last."""
        self._upstream.position = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that was yielded, for ``torch.save``.

        Save it beside ``trainer.state_dict()``, which has the global random generators.
        """
        return {**self._upstream.state_dict(), "epoch": self._epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a saved position: the next iteration yields the batches that were left.

        A loader that carries state (torchdata's StatefulDataLoader) is given its own. Any other
        begins the epoch again, with the random generators as they were, and drops what had been
        yielded; that takes as long as loading it. A position at the end of an epoch, before the
        loop saw the end, yields nothing and ends.

        Raises:
            TypeError: Not a mapping.
            StateMismatchError: It is the position of another loader: another number of samples,
                batch size, number of workers or replicas.
        """
        self._upstream.load_state_dict(state)
        epoch = state.get("epoch")
        if epoch is not None:
            self.set_epoch(epoch)

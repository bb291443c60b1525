"""What is evaluated dealt out among ranks: each batch once, and as one process makes it.

Training deals out samples, and where they do not come out even some come twice. An evaluation must
not count a sample twice nor leave one out, and its mean is over the batches that one process would
have. So batches are dealt out whole: all ranks see the same batches (of a DataLoader over a
map-style data set only which samples are in them), and rank ``r`` of ``n`` takes the ``r``-th, the
``r + n``-th and so on. Ranks run out at different times, and a forward of a sharded model needs all
of them; so a rank without a batch in the last round is given a stand-in, the first one of that
round, whose result does not count.

That is right only where all ranks see the same batches. What can be told of it at little cost is
noted, and compared at the end.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any, Final, final

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from torchfast.data.digest import digest, digest_of_samples
from torchfast.data.sharded import draw_at_once, is_sharded
from torchfast.data.sharded_batches import has_own_loop, in_order

# These draw once from a global generator, when they begin, and from one of their own thereafter.
_DRAW_AT_ONCE: Final = (SequentialSampler, RandomSampler)


@final
class DealtBatches:
    """The batches that one rank evaluates of those that all ranks are given.

    The loader that is given stays as it is. Nothing is sent between ranks.

    Args:
        batches: A DataLoader, or any other iterable of batches.
        rank: The number of this process.
        world_size: How many there are.

    Attributes:
        loader: Yields this rank's batches; what was given where it is divided already.
        is_dealt: Whether it was not.

    Raises:
        ValueError: It is divided for another rank, or another number of them.
    """

    def __init__(self, batches: Iterable[Any], rank: int, world_size: int) -> None:
        self.loader = batches
        self.is_dealt = not is_sharded(batches, rank, world_size)
        if not self.is_dealt:
            return
        self._dataset: Any = None
        if (
            not isinstance(batches, DataLoader)
            or isinstance(batches.dataset, IterableDataset)
            or has_own_loop(batches)
        ):
            self.loader = self._deal = _Deal(in_order(batches), rank, world_size)
            return
        self._dataset = batches.dataset
        own: Any = batches.batch_sampler
        drawn = own.sampler if type(own) is BatchSampler else own or batches.sampler
        self._deal = _Deal(
            batches.sampler if own is None else own,
            rank,
            world_size,
            may_draw_late=type(drawn) not in _DRAW_AT_ONCE,
        )
        self.loader = copy.copy(batches)
        # A DataLoader refuses another sampler; a new one that has not been iterated can have it.
        parts = vars(self.loader)
        parts["_iterator"] = None
        parts["sampler" if own is None else "batch_sampler"] = self._deal
        parts["in_order"] = True  # so that a stand-in comes last

    @property
    def ends_with_stand_in(self) -> bool:
        """Whether the last batch of the pass that has ended does not count."""
        return self.is_dealt and self._deal.ends_with_stand_in

    def told(self) -> tuple[int, str]:
        """Return how many batches all ranks together had in that pass, and a digest of the data.

        Both are the same on all ranks that were given the same.
        """
        if not self.is_dealt:
            return 0, ""
        return self._deal.count, digest_of_samples(self._dataset, self._deal.first)


@final
class _Deal:
    """Every n-th item, and as many on each rank.

    Attributes:
        count: The items of the last pass on all ranks, stand-ins left out.
        first: What the first of them is known by.
        ends_with_stand_in: Whether the last one that came out was another rank's.
    """

    def __init__(
        self, items: Iterable[Any], rank: int, size: int, *, may_draw_late: bool = False
    ) -> None:
        self._items, self._rank, self._size = items, rank, size
        self._may_draw_late = may_draw_late
        self.count, self.first, self.ends_with_stand_in = 0, "", False

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass."""
        self.count, self.first, self.ends_with_stand_in = 0, "", False
        # What is drawn between batches would differ between ranks, which load different ones.
        items = iter(draw_at_once(self._items) if self._may_draw_late else self._items)
        mine = None
        for item in items:
            if self.count == 0:
                self.first = digest(item)
            place = self.count % self._size
            self.count += 1
            if place == 0 or place == self._rank:
                mine = item  # the first one of a round stands in where this rank's does not come
            if place == self._size - 1:
                yield mine
                mine = None
        place = self.count % self._size
        if place:
            self.ends_with_stand_in = self._rank >= place
            yield mine

    def __len__(self) -> int:
        """Return how many each rank gets, a stand-in included; TypeError where nobody knows."""
        return -(-len(self._items) // self._size)  # type: ignore[arg-type]

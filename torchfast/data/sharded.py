"""Each rank its own part of the data, from the loader that one process would use.

Without it every rank trains on the same batches, and many GPUs compute what one would. A DataLoader
over a map-style data set is dealt out like cards: all ranks draw the same order, and rank ``r`` of
``n`` takes every ``n``-th sample of it, so that the ``i``-th batches of all ranks together are the
``i``-th batch of a loader with ``n`` times the batch size. Nothing is loaded twice, and every epoch
has the same number of batches on all ranks: where the order does not come out even, its first
samples come again at the end, or under ``drop_last`` the rest is left out.

The order must be the same on all ranks, while other random numbers must not be. So what draws it
has a generator of its own: the loader's, if it was given one (seed it alike on all ranks), else one
that is seeded here. It goes on from epoch to epoch, so that a new order comes without
``set_epoch()`` too, and is part of the position that a checkpoint has.

What cannot be dealt out by sample is dealt out by batch: an iterable is read whole by every rank,
which keeps its own batches and drops the others (``sharded_batches.py``). So is a DataLoader of a
class with an ``__iter__`` of its own, which need not ask its sampler. That is right and costs the
time of loading all of them; a data set that divides itself costs less, and says
``is_sharded = True``. A loader that is sharded already, by torch's DistributedSampler or anything
alike, is left as it is.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Final, final

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
)

from torchfast._core.arguments import check_batches, check_int, explain_keywords
from torchfast._core.rng import preserved_rng, seed_host
from torchfast.data.digest import digest, digest_of_samples
from torchfast.data.one_shot import is_iterator
from torchfast.data.samplers import samplers_of
from torchfast.data.sharded_batches import (
    ShardedIterable,
    ShardedIterator,
    carries_state,
    dealt,
    has_own_loop,
    seed_of_epoch,
)
from torchfast.data.worker_seeds import RankedStart

logger = logging.getLogger(__name__)

# What samplers, batch samplers and data sets of libraries call the number of their parts.
_COUNTS: Final = ("num_replicas", "num_processes", "world_size")
_CPU: Final = torch.device("cpu")
# What a sampler without a length may yield where all of it has to be drawn at once: more is taken
# for one that never ends.
_MOST_DRAWN: Final = 1 << 23


@explain_keywords
def shard_loader(
    loader: Iterable[Any], *, rank: int, world_size: int, seed: int = 0
) -> Iterable[Any]:
    """Return a loader that yields this rank's part of what ``loader`` yields.

    The loader that is given stays as it is. All ranks make the same call; nothing is sent between
    them.

    Args:
        loader: A DataLoader, or any other iterable of batches.
        rank: The number of this process.
        world_size: How many there are; with 1 the loader itself is returned.
        seed: Of the order, where the loader has no generator of its own, and of what a stream draws
            from global generators. The same on all ranks.

    Returns:
        A DataLoader of the same class with all its other options the same, whose worker processes
        draw random numbers of their rank; or an iterable; the loader itself where it is sharded
        already.

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: No such rank; or the loader is sharded for another rank, or number of them.

    Numerics: The batches of all ranks together are those of one process with a batch size
        ``world_size`` times as large.
    Synchronizes: Never.

    Example:
        >>> loader = DataLoader(range(8), batch_size=2)
        >>> [batch.tolist() for batch in shard_loader(loader, rank=1, world_size=2)]
        [[1, 3], [5, 7]]
    """
    check_batches("loader", loader)
    world_size = check_int("world_size", world_size, minimum=1)
    rank = check_int("rank", rank, minimum=0)
    check_int("seed", seed, minimum=0)
    if rank >= world_size:
        raise ValueError(f"rank must be below world_size={world_size}, got {rank}")
    if world_size == 1 or is_sharded(loader, rank, world_size):
        return loader
    if (
        not isinstance(loader, DataLoader)
        or isinstance(loader.dataset, IterableDataset)
        or has_own_loop(loader)
    ):
        if rank == 0:
            logger.warning(
                "every rank loads all batches of the %s and keeps one in %d of them; let the data "
                "set divide itself between the ranks and say is_sharded = True, or give a "
                "map-style one in a DataLoader whose class has no __iter__ of its own",
                type(loader).__name__,
                world_size,
            )
        if is_iterator(loader):
            return ShardedIterator(loader, rank, world_size, seed)
        return ShardedIterable(loader, rank, world_size, seed)
    return dealt_by_sample(loader, rank, world_size, seed=seed)


def dealt_by_sample(
    loader: DataLoader[Any], rank: int, world_size: int, *, seed: int = 0
) -> DataLoader[Any]:
    """Return a copy of a loader over a map-style data set that takes its part of the samples."""
    dealing = copy.copy(loader)
    # A DataLoader refuses another sampler; a new one that has not been iterated can have it.
    parts = vars(dealing)
    parts["_iterator"] = None
    own = loader.batch_sampler
    if own is None:
        parts["sampler"] = sampler = ShardedSampler(loader.sampler, rank, world_size, seed=seed)
    elif type(own) is BatchSampler:
        sampler = ShardedSampler(own.sampler, rank, world_size, seed=seed, drop_last=own.drop_last)
        parts["sampler"] = sampler
        parts["batch_sampler"] = BatchSampler(sampler, own.batch_size, own.drop_last)
    else:
        parts["batch_sampler"] = sampler = ShardedSampler(own, rank, world_size, seed=seed)
    sampler.is_saved = not carries_state(loader)
    if rank > 0:  # the first one's workers draw what those of one process draw
        dealing.worker_init_fn = RankedStart(loader.worker_init_fn, rank)
    return dealing


@final
class ShardedSampler(Sampler[Any]):
    """Every n-th of what a sampler yields, which yields the same on all ranks.

    Args:
        sampler: Of samples, or of whole batches.
        rank: The number of this process.
        num_replicas: How many there are.
        seed: Where the sampler has no generator.
        drop_last: Leave out what is not enough for all ranks; otherwise the first ones come again.

    Attributes:
        generator: Draws the order; None where nothing is drawn, or by what knows the epoch.
        dealt_to: As ``num_replicas``, by which a saved position knows its way of dealing.
        first: What the first ones of the last epoch, one of each rank, are known by.
        is_saved: Whether the generator is part of a saved position: not of a loader that carries
            its own state, so there the order follows from the epoch, as soon as one is told.
    """

    def __init__(
        self,
        sampler: Any,
        rank: int,
        num_replicas: int,
        *,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.rank = rank
        self.num_replicas = self.dealt_to = num_replicas
        self.drop_last = drop_last
        self.first = ""
        self.is_saved = True
        self._seed = seed
        self.generator: torch.Generator | None = getattr(sampler, "generator", None)
        self._draws_globally = self._is_own = False
        if self.generator is None and type(sampler) is not SequentialSampler:
            self.generator = torch.Generator().manual_seed(seed)
            self._is_own = True
            if hasattr(sampler, "generator"):
                sampler = copy.copy(sampler)
                sampler.generator = self.generator
            else:
                self._draws_globally = True
        self._sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch."""
        self.first = ""
        return dealt(
            self._all(), self.rank, self.num_replicas, pads=not self.drop_last, note=self._note
        )

    def __len__(self) -> int:
        """Return how many this rank gets, the same on all; TypeError where nobody knows."""
        number = len(self._sampler)
        return number // self.num_replicas if self.drop_last else -(-number // self.num_replicas)

    def set_epoch(self, epoch: int) -> None:
        """Tell the sampler, and those that it takes from, if they ask."""
        if self.generator is not None and self._is_own and not self.is_saved:
            self.generator.manual_seed(seed_of_epoch(self._seed, epoch))
        for sampler in (self._sampler, *samplers_of(self._sampler).values()):
            if callable(getattr(sampler, "set_epoch", None)):
                sampler.set_epoch(epoch)

    @property
    def given(self) -> Any:
        """What is dealt out."""
        return self._sampler

    @property
    def batch_size(self) -> Any:
        """That of a batch sampler."""
        return getattr(self._sampler, "batch_size", None)

    def _note(self, number: int, deal: list[Any]) -> None:
        if number == 0:
            self.first = digest(deal)

    def _all(self) -> Iterator[Any]:
        if not self._draws_globally:
            return iter(self._sampler)
        # It may draw from any global generator, which differ between ranks: these do not.
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=self.generator))
        with preserved_rng(_CPU):
            seed_host(seed)
            return iter(draw_at_once(self._sampler))


def draw_at_once(sampler: Any) -> list[Any]:
    """Return all of what a sampler yields: to draw more later would move generators meanwhile.

    Raises:
        ValueError: It goes on and on.
    """
    try:
        len(sampler)
    except (TypeError, NotImplementedError):  # a batch sampler has a length if its sampler has
        drawn = list(islice(sampler, _MOST_DRAWN + 1))
    else:
        return list(sampler)
    if len(drawn) > _MOST_DRAWN:
        kind = type(getattr(sampler, "sampler", sampler)).__name__
        raise ValueError(
            f"the sampler ({kind}) has no end after {_MOST_DRAWN} samples, no "
            "length, and no generator that all ranks could draw from alike; give it an attribute "
            "generator that it draws from, or divide the data in it and set is_sharded = True on it"
        )
    return drawn


def told_of(loader: Any, number: int) -> str:
    """Return what the data of all ranks are known by, once batch ``number`` of an epoch has come.

    It is the same on ranks that were given the same, and empty of what was divided elsewhere.
    """
    if isinstance(loader, ShardedIterable | ShardedIterator):
        return str(loader.told(number))
    if isinstance(loader, DataLoader):
        for sampler in (loader.batch_sampler, loader.sampler):
            if isinstance(sampler, ShardedSampler):
                return digest_of_samples(loader.dataset, sampler.first, reads_device=False)
    return ""


def is_sharded(loader: Any, rank: int, world_size: int) -> bool:
    """Whether the loader yields a part already.

    Raises:
        ValueError: That of another number of ranks, or of another rank.
    """
    dataset = getattr(loader, "dataset", None)
    holders = {"loader": loader, **samplers_of(loader), "dataset": dataset}
    for name, holder in holders.items():
        if getattr(holder, "is_sharded", None) is True:
            return True
        # What datasets' own division by node leaves behind.
        holder = getattr(holder, "_distributed", None) or holder
        found = next((getattr(holder, each, None) for each in _COUNTS if hasattr(holder, each)), 0)
        if type(found) is not int or found == 0:
            continue
        # One part of one is what a script for a single process makes.
        if found == 1 and not isinstance(holder, DistributedSampler):
            continue
        if found != world_size:
            raise ValueError(
                f"the loader's {name} ({type(holder).__name__}) divides the data by {found}, and "
                f"there are {world_size} ranks; give it num_replicas={world_size}, or no sampler"
            )
        if isinstance(holder, DistributedSampler) and holder.rank != rank:
            raise ValueError(
                f"the loader's {name} ({type(holder).__name__}) has the samples of rank "
                f"{holder.rank}, and this is rank {rank}; give it rank={rank}, or no sampler"
            )
        return True
    return False

"""Each rank its own batches of a loader that all ranks read whole.

So are those dealt out that cannot be dealt out by sample: streams, lists, and DataLoaders of a
class with an ``__iter__`` of its own, which need not ask their sampler what is in a batch. All
ranks must read the same batches in the same order, or some come twice and others never. Two things
would make them differ, and are made alike here. Workers deliver in order, whichever is ready first.
And what is drawn from the host's global generators, which differ between ranks, is drawn while
these are others, the same on all ranks and the loader's own: in ``iter()``, for the first batch,
and for each one if the second is seen to draw. That is right only in the thread that trains, so
`draws_apart` says that no other one may fetch. A loader that draws rarely, in the middle of an
epoch, needs a generator of its own.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, Final, final

import torch
from torch.utils.data import DataLoader

from torchfast._core.rng import (
    RNGState,
    get_rng_state,
    same_rng_state,
    seed_host,
    set_rng_state,
)
from torchfast.data.digest import digest
from torchfast.data.one_shot import begun

# Of how many batches that a rank has one is compared with the other ranks': a stream without an end
# may begin to differ at any time.
EVERY: Final = 256
_KEPT: Final = 8  # of the digests: batches are fetched ahead

_CPU: Final = torch.device("cpu")
_END: Final = object()
# Whose loaders ask the sampler in each iteration, whatever else theirs does.
_KNOWN: Final = ("torch", "torchdata", "torchfast")


def has_own_loop(loader: DataLoader[Any]) -> bool:
    """Whether it is of a class that need not ask its sampler which samples are in a batch."""
    loop = type(loader).__iter__
    return str(getattr(loop, "__module__", None)).partition(".")[0] not in _KNOWN


def in_order(loader: Any) -> Any:
    """Return what yields the same order on each rank: not the one in which workers are ready."""
    if not isinstance(loader, DataLoader) or getattr(loader, "in_order", True):
        return loader
    ordered = copy.copy(loader)
    vars(ordered).update(_iterator=None, in_order=True)
    return ordered


def seed_of_epoch(seed: int, epoch: int) -> int:
    """Return another seed for each epoch."""
    told = hashlib.sha256(f"{seed} {epoch}".encode()).digest()
    return int.from_bytes(told[:7], "big")


def carries_state(loader: Any) -> bool:
    """Whether the loader knows its position by itself."""
    return callable(getattr(loader, "state_dict", None)) and callable(
        getattr(loader, "load_state_dict", None)
    )


def dealt(
    items: Iterator[Any],
    rank: int,
    size: int,
    *,
    pads: bool = False,
    note: Callable[[int, list[Any]], None],
) -> Iterator[Any]:
    """Yield one of each ``size`` items, once all of these are there, so all ranks yield as many.

    Args:
        items: Of all ranks.
        rank: Whose are yielded.
        size: How many ranks there are.
        pads: Let the first ones come again where the last are too few for all ranks.
        note: Called with each number and what all ranks have of it.
    """
    first: list[Any] = []
    number = 0
    while deal := list(islice(items, size)):
        note(number, deal)
        if pads and number == 0:
            first = deal
        number += 1
        if len(deal) < size:
            if pads:
                # Fewer than there are ranks altogether: some come more than once.
                yield (deal + first * size)[rank]
            return
        yield deal[rank]
        del deal  # of an iterable it may be as large as all ranks' batches


@final
class ShardedIterable:
    """Every n-th batch of a loader, of which this rank reads all.

    Its other attributes are the loader's own.

    Args:
        loader: Any iterable of batches.
        rank: The number of this process.
        num_replicas: How many there are.
        seed: Of what the loader draws from global generators.

    Attributes:
        order_generator: Draws the seed of each epoch, and is part of a saved position.
        draws_apart: Whether the loader draws with each batch, while the global generators are
            its own: then it must be asked in the thread that trains.
    """

    def __init__(self, loader: Iterable[Any], rank: int, num_replicas: int, seed: int) -> None:
        self._loader = in_order(loader)
        self.rank = rank
        self.num_replicas = num_replicas
        self.order_generator = torch.Generator().manual_seed(seed)
        self.draws_apart = False
        self._digests: dict[int, str] = {}
        self._seed = seed
        self._epoch: int | None = None
        self._is_known = False  # whether it draws with each batch

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch."""
        draws = _SharedDraws(self._next_seed())
        with draws.taken():
            items = begun(iter(self._loader))
        self._digests.clear()
        return self._parts(dealt(items, self.rank, self.num_replicas, note=self._note), draws)

    def __len__(self) -> int:
        """Return how many batches each rank gets; TypeError where the loader has no length."""
        return len(self._loader) // self.num_replicas

    def set_epoch(self, epoch: int) -> None:
        """Tell the loader, if it asks."""
        self._epoch = epoch
        if callable(getattr(self._loader, "set_epoch", None)):
            self._loader.set_epoch(epoch)

    def told(self, number: int) -> str:
        """Return what this epoch's batches of all ranks are known by, at ``number`` or before."""
        return self._digests.get(number - number % EVERY, "")

    def __getattr__(self, name: str) -> Any:
        """Return the loader's."""
        if name == "_loader":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._loader, name)

    def _parts(self, parts: Iterator[Any], draws: _SharedDraws) -> Iterator[Any]:
        is_first = True
        while True:
            if is_first or self.draws_apart or not self._is_known:
                with draws.taken():
                    part = next(parts, _END)
            else:
                part = next(parts, _END)
            if part is _END:
                return
            if not is_first and not self._is_known:
                self._is_known, self.draws_apart = True, draws.has_moved
            is_first = False
            yield part
            del part  # its memory may be used again

    def _next_seed(self) -> int:
        if self._epoch is not None and carries_state(self._loader):
            # It is all that is saved, so what it does not know must follow from the epoch.
            return seed_of_epoch(self._seed, self._epoch)
        return int(torch.empty((), dtype=torch.int64).random_(generator=self.order_generator))

    def _note(self, number: int, deal: list[Any]) -> None:
        if number % EVERY == 0:
            self._digests[number] = digest(deal, reads_device=False)
            self._digests.pop(number - _KEPT * EVERY, None)


@final
class ShardedIterator:
    """As `ShardedIterable`, of an iterator: it serves one epoch.

    Args:
        iterator: Of batches.
        rank: The number of this process.
        num_replicas: How many there are.
        seed: As there.
    """

    def __init__(self, iterator: Iterable[Any], rank: int, num_replicas: int, seed: int) -> None:
        self._parts = ShardedIterable(iterator, rank, num_replicas, seed)
        self._begun: Iterator[Any] | None = None

    def __iter__(self) -> ShardedIterator:
        return self

    def __next__(self) -> Any:
        if self._begun is None:
            self._begun = iter(self._parts)
        return next(self._begun)

    def __getattr__(self, name: str) -> Any:
        """Return the iterator's."""
        if name == "_parts":
            raise AttributeError(name)
        return getattr(self._parts, name)


class _SharedDraws:
    """The host's global generators of a loader, apart from those of the training.

    Args:
        seed: The same on all ranks.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._state: RNGState | None = None
        self.has_moved = False

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Let the body draw from them; ``has_moved`` says then whether it did."""
        trainings = get_rng_state(_CPU)
        try:
            if self._state is None:
                seed_host(self._seed)
                self._state = get_rng_state(_CPU)
            else:
                set_rng_state(self._state, _CPU)
            yield
        finally:
            before, self._state = self._state, get_rng_state(_CPU)
            self.has_moved = before is None or not same_rng_state(before, self._state)
            set_rng_state(trainings, _CPU)

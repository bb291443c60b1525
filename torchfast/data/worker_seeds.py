"""Worker processes whose random numbers are their rank's own.

A DataLoader draws the seed of its workers from its generator, of which every rank has the same
where it draws the order: so the workers of all ranks would augment alike, each its other samples.
What is drawn from the generator stays the same, and so do the order and a saved position; the rank
is mixed in behind it, in the worker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from torch.utils.data import get_worker_info

from torchfast._core.rng import seed_host
from torchfast.data.sharded_batches import seed_of_epoch


@final
class RankedStart:
    """A ``worker_init_fn`` that gives a worker seeds of its rank before the loader's own runs.

    Args:
        start: The loader's own.
        rank: Whose worker it is.
    """

    def __init__(self, start: Callable[[int], None] | None, rank: int) -> None:
        self._start, self._rank = start, rank

    def __call__(self, worker: int) -> None:
        """Start a worker."""
        info = get_worker_info()
        if info is not None:
            seed = seed_of_epoch(info.seed, self._rank)
            seed_host(seed)
            # Data sets seed generators of their own from it; torch lets nobody set it otherwise.
            object.__setattr__(info, "seed", seed)
        if self._start is not None:
            self._start(worker)

"""One iteration at a time over a DataLoader whose worker processes stay.

With ``persistent_workers`` torch has one iterator for all epochs, and a second ``iter()`` begins it
anew, whoever still takes from it. A loop that evaluates on the data that it trains on would lose
the rest of each epoch, and nobody would hear of it.
"""

from __future__ import annotations

import weakref
from typing import Any, final

from torch.utils.data import DataLoader

from torchfast._core.errors import IterationError

_NAME = "_torchfast_turn"


@final
class Turn:
    """An iteration, which holds this until it is over."""

    def __init__(self) -> None:
        self.is_over = False


def check_free(loader: Any) -> None:
    """Raise IterationError if another iteration goes on over workers that stay."""
    turn = getattr(_staying(loader), _NAME, lambda: None)()
    if turn is not None and not turn.is_over:
        raise IterationError(
            f"the {type(loader).__name__} is being iterated already, and its worker processes stay "
            "(persistent_workers=True), so another iteration would end that one; end that one "
            "first (close() its PrefetchingLoader, or del its iterator), or give each loop a "
            "DataLoader of its own, or persistent_workers=False"
        )


def turn_of(loader: Any) -> Turn:
    """Return the turn of an iteration that has just begun; it says when it is over."""
    turn = Turn()
    iterator = _staying(loader)
    if iterator is not None:
        # Weakly: one that was let go before its first batch is over.
        setattr(iterator, _NAME, weakref.ref(turn))
    return turn


def _staying(loader: Any) -> Any:
    """Return the iterator that all epochs share, of a loader that has one and has begun."""
    # Others may have anything by this name: torchdata's has there the one of the last epoch.
    stays = isinstance(loader, DataLoader) and loader.persistent_workers
    return loader._iterator if stays else None

"""Iterators, which serve one epoch only, told from what an epoch can be begun with again.

What was fetched from an iterator cannot be had again, so a loop that breaks off must not drop it.
What begins anew must be asked to. Both may have a ``__next__``, and both ``iter()`` may return the
same object each time; what tells them apart is whether ``iter()`` can have changed anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter


def is_iterator(loader: Any) -> bool:
    """Whether it is one."""
    return hasattr(type(loader), "__next__")


def is_shared(iterator: Iterator[Any], loader: Any, parts: tuple[Any, ...]) -> bool:
    """Whether a loader hands out one iterator again and again, which goes on where it is.

    Args:
        iterator: What ``iter(loader)`` returned.
        loader: Whose it is.
        parts: What `parts_of` returned before that.
    """
    if isinstance(loader, DataLoader) or not any(iterator is part for part in parts):
        return False
    # What somebody wrote in Python may have been put back to its start.
    return isinstance(iterator, _BaseDataLoaderIter) or not isinstance(
        getattr(type(iterator), "__iter__", None), FunctionType
    )


def parts_of(loader: Any) -> tuple[Any, ...]:
    """Return what the loader holds now."""
    return tuple(getattr(loader, "__dict__", {}).values())

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
    """Whether ``iter()`` returns it and does nothing else.

    The ``__iter__`` of a class may do more, such as begin anew, and then return itself.
    """
    kind = type(loader)
    if not hasattr(kind, "__next__"):
        return False
    return _only_returns_itself(kind)


def begun(iterator: Iterator[Any]) -> Iterator[Any]:
    """Return what no second ``iter()``, such as that of a ``for``, begins anew."""
    return iterator if _only_returns_itself(type(iterator)) else _rest(iterator)


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


def _only_returns_itself(kind: type) -> bool:
    method = getattr(kind, "__iter__", None)
    # Python's own iterators and generators have one that is not written in Python.
    return not isinstance(method, FunctionType) or method.__code__.co_code == _ITSELF


def _rest(iterator: Iterator[Any]) -> Iterator[Any]:
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            return
        yield item
        del item  # its memory may be used again


def _itself(self: Any) -> Any:
    return self


_ITSELF = _itself.__code__.co_code

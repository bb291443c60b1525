"""The batches of a DataLoader without an annotation that nobody reads.

torch names each call of a DataLoader's ``next()`` to its profiler, and that takes longer than the
rest of the call where the data set has its samples in memory: some ten microseconds, which a step
of one short graph feels. So where no profiler listens, what stands within the annotation is done
without it: ask for the data, count it.

That is known of one form of torch's own method. If the method is another, a later torch's or one
that somebody has put there, or the iterator has a ``next()`` of its own, then it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch._C._autograd import _profiler_enabled
from torch.utils.data import _DatasetKind
from torch.utils.data.dataloader import _BaseDataLoaderIter

# All that the method names, in its order, and what it makes a warning of: another one names others.
_NAMES = (
    *("torch", "autograd", "profiler", "record_function", "_profile_name"),
    *("_sampler_iter", "_reset", "_next_data", "_num_yielded"),
    *("_dataset_kind", "_DatasetKind", "Iterable", "_IterableDataset_len_called"),
)
_OF_WARNING = {"_dataset", "_num_workers", "warnings", "warn", "format"}


def unannotated(iterator: Iterator[Any]) -> Iterator[Any]:
    """Return the same batches, from an iterator that is a DataLoader's; any other as it is."""
    return _batches(iterator) if _is_known(iterator) else iterator


def taker(iterator: Iterator[Any]) -> Callable[[], Any]:
    """Return what returns the next of these batches, also behind an error, as ``next()`` does."""
    return partial(_next, iterator) if _is_known(iterator) else iterator.__next__


def _is_known(iterator: Iterator[Any]) -> bool:
    if not isinstance(iterator, _BaseDataLoaderIter):
        return False
    method = _BaseDataLoaderIter.__next__
    names = getattr(getattr(method, "__code__", None), "co_names", ())
    return (
        type(iterator).__next__ is method
        and names[: len(_NAMES)] == _NAMES
        and _OF_WARNING.issuperset(names[len(_NAMES) :])
        # An iterable data set is compared with the length that it has told.
        and (
            iterator._dataset_kind == _DatasetKind.Map
            or iterator._IterableDataset_len_called is None
        )
    )


def _batches(iterator: Any) -> Iterator[Any]:
    while True:
        try:
            batch = _next(iterator)
        except StopIteration:
            return
        yield batch


def _next(iterator: Any) -> Any:
    if _profiler_enabled() or iterator._sampler_iter is None:
        return next(iterator)
    batch = iterator._next_data()
    iterator._num_yielded += 1
    return batch

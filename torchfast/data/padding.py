"""Samples of different lengths in batches of few lengths.

A compiled step is compiled again for another length, and a captured one is captured again. Padded
to the longest sample each batch has a length of its own, so nothing is ever compiled for the last
time; padded to the next of a few lengths, a bucket, the step is compiled and captured once for
each. What it costs is the computation on padding, which narrow buckets keep small; sampling batches
of similar lengths keeps it smaller.

Of several ranks each pads its own batch, and a graph is replayed only where all have the length
that they captured. So there either one length is given, or a ``batch_sampler`` yields batches of
one length to all ranks in a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import default_collate

from torchfast._core.arguments import check_int, explain_keywords


@final
class PadToLengths:
    """A ``collate_fn`` that pads samples to the next of a few lengths.

    Args:
        lengths: The lengths that batches may have. The last one must hold the longest sample.
        values: What to pad with, nested as a sample is: a number for each tensor that is padded
            along its first dimension, None for what is stacked as it is. Pad a mask with 0, and
            labels with the ``ignore_index`` of the loss, -100 by default: then a mean over the
            labels is that of the samples alone.

    Raises:
        TypeError: Lengths that are no integers, values that are no numbers, or a sample that is
            not nested as ``values``.
        ValueError: No lengths, or a sample that is longer than the last one.

    Numerics: Padding counts wherever the model and the loss do not leave it out: in attention
        without a mask, in BatchNorm, in a loss over all positions.

    Example:
        >>> collate = PadToLengths((4, 8), (0, -100))
        >>> one, two = torch.tensor([5, 6]), torch.tensor([7, 8, 9])
        >>> tokens, labels = collate([(one, one), (two, two)])
        >>> tokens.tolist(), labels.tolist()
        ([[5, 6, 0, 0], [7, 8, 9, 0]], [[5, 6, -100, -100], [7, 8, 9, -100]])
    """

    @explain_keywords
    def __init__(self, lengths: Iterable[int], values: Any) -> None:
        if not isinstance(lengths, Iterable):
            raise TypeError(
                f"lengths must be several ints, such as (128, 256, 512), got {lengths!r}"
            )
        self.lengths = tuple(sorted({check_int("lengths", n, minimum=1) for n in lengths}))
        if not self.lengths:
            raise ValueError(
                "lengths is empty; name the lengths that batches may have: (128, 256, 512)"
            )
        _check_values(values)
        self.values = values

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Return a batch of samples, nested as they are."""
        longest = max((n for s in samples for n in _lengths(s, self.values)), default=0)
        length = next((n for n in self.lengths if n >= longest), None)
        if length is None:
            raise ValueError(
                f"lengths={self.lengths} has none for a sample of length {longest}; add one that "
                "holds the longest sample, or cut samples in the data set"
            )
        return _collated(samples, self.values, length)

    def __repr__(self) -> str:
        """Return the call that makes it."""
        return f"PadToLengths({self.lengths}, {self.values!r})"


def _check_values(values: Any) -> None:
    if isinstance(values, Mapping):
        for value in values.values():
            _check_values(value)
    elif isinstance(values, tuple | list):
        for value in values:
            _check_values(value)
    elif values is not None and not isinstance(values, int | float):
        raise TypeError(
            f"values must be numbers and None, nested as a sample is, got {values!r} "
            f"({type(values).__name__})"
        )


def _lengths(sample: Any, values: Any) -> Iterator[int]:
    """Yield the lengths of what is to be padded, and check that a sample is nested as it should."""
    if isinstance(values, Mapping):
        if not isinstance(sample, Mapping) or sample.keys() != values.keys():
            _refuse(sample, values)
        for key, value in values.items():
            yield from _lengths(sample[key], value)
    elif isinstance(values, tuple | list):
        if not isinstance(sample, tuple | list) or len(sample) != len(values):
            _refuse(sample, values)
        for part, value in zip(sample, values, strict=True):
            yield from _lengths(part, value)
    elif values is not None:
        if not isinstance(sample, Tensor) or not sample.dim():
            _refuse(sample, values)
        yield len(sample)


def _refuse(sample: Any, values: Any) -> None:
    raise TypeError(
        f"values has {values!r} where a sample has {type(sample).__name__}; nest values as a "
        "sample is, with a number for each tensor that is padded and None for the rest"
    )


def _collated(samples: Sequence[Any], values: Any, length: int) -> Any:
    if isinstance(values, Mapping):
        return {
            key: _collated([s[key] for s in samples], value, length)
            for key, value in values.items()
        }
    if isinstance(values, tuple | list):
        parts = [
            _collated([s[place] for s in samples], value, length)
            for place, value in enumerate(values)
        ]
        first = samples[0]
        return type(first)(*parts) if hasattr(first, "_make") else type(first)(parts)
    if values is None:
        return default_collate(list(samples))
    # F.pad counts from the last dimension, and the first is what is padded.
    rows = [F.pad(s, [0] * (2 * s.dim() - 1) + [length - len(s)], value=values) for s in samples]
    return torch.stack(rows)

"""A batch in parts along its first dimension, for a step that does not fit into memory as a whole.

What a step needs for activations grows with the batch, so half of it needs about half. The gradient
stays the same: a mean over a batch is the mean over its parts, each weighted by its share of the
samples, and where ``loss_fn`` returns ``(sum, metrics, weight)``, sums and weights are added up.

It is the same only for what is computed sample by sample. BatchNorm in training sees the statistics
of the part; a loss that compares samples with each other sees fewer; a plain sum, or a mean over
something else than samples, such as the tokens that are not padding, is weighted wrongly; and where
the first dimension is time, there are no samples in it. All but the first
`torchfast.memory.split_check` finds.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from torchfast._core.batches import count_samples, map_batch, tensors
from torchfast._core.loss import LossParts, Number, mean_metrics, total
from torchfast._core.weights import weigh

_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


@final
@dataclass(frozen=True)
class SplitBatch:
    """A micro-batch that is run in parts.

    Attributes:
        parts: Nested batches, in the order of their samples.
        shares: What part of the samples each holds; they add up to 1.
    """

    parts: tuple[Any, ...]
    shares: tuple[float, ...]

    def __iter__(self) -> Iterator[tuple[Any, float]]:
        """Yield each part with its share."""
        return zip(self.parts, self.shares, strict=True)

    def merge(self, results: Sequence[LossParts]) -> LossParts:
        """Return what the micro-batch as a whole gives, from what its parts gave.

        Losses that are means must have been multiplied by their share before the backward.
        """
        loss = total([result.loss for result in results])
        weights = weigh(list(results), loss.device)
        metrics = [result.metrics for result in results]
        if weights is not None:
            return LossParts(loss, mean_metrics(metrics, weights), weights.total)
        return LossParts(loss, _by_share(metrics, self.shares), None)


def num_elements(batch: object) -> int:
    """Return how many elements the tensors of a batch have, each once, without scalars."""
    return sum(t.numel() for t in {id(t): t for t in tensors(batch)}.values() if t.dim() > 0)


def split(batch: Any, limit: int) -> Any:
    """Return ``batch`` in parts of fewer than ``limit`` elements each, or of one sample.

    It is halved, and so are the halves, until they are small enough; an odd number makes halves
    that differ by one.

    Args:
        batch: A nested batch of which `why_whole` returns None.
        limit: In elements, as `num_elements` counts them.

    Returns:
        A `SplitBatch`, or ``batch`` itself where it is small enough.

    Example:
        >>> two = split(torch.arange(5), 4)
        >>> [part.tolist() for part in two.parts], two.shares
        ([[0, 1, 2], [3, 4]], (0.6, 0.4))
    """
    num = count_samples(batch) or 1
    sizes = list(_sizes(num, num_elements(batch) / num, limit))
    if len(sizes) == 1:
        return batch
    return split_at(batch, [*itertools.accumulate(sizes)][:-1])


def num_halved(batch: Any, limit: int) -> int:
    """Return in how many parts `split` returns a batch."""
    num = count_samples(batch) or 1
    return sum(1 for _ in _sizes(num, num_elements(batch) / num, limit))


def split_evenly(batch: Any, count: int) -> SplitBatch:
    """Return a batch of at least as many samples in so many parts, which differ by one at most.

    None is larger than the largest of as many parts that `split` returns.
    """
    num = count_samples(batch) or 1
    return split_at(batch, [-(-num * number // count) for number in range(1, count)])


def samples_of(batch: Any, start: int, size: int) -> Any:
    """Return so many samples of a batch of which `why_whole` returns None, beginning at one."""
    return map_batch(batch, lambda t: t.narrow(0, start, size) if t.dim() > 0 else t)


def split_at(batch: Any, places: Sequence[int]) -> SplitBatch:
    """Return a batch in parts that begin at its first sample and at each of ``places``."""
    num = count_samples(batch) or 1
    starts = [0, *places]
    sizes = [b - a for a, b in zip(starts, [*places, num], strict=True)]
    return SplitBatch(
        parts=tuple(samples_of(batch, a, n) for a, n in zip(starts, sizes, strict=True)),
        shares=tuple(size / num for size in sizes),
    )


def parts_of(batch: Any) -> tuple[Any, ...]:
    """Return the parts of a micro-batch; itself, where it is whole."""
    return batch.parts if isinstance(batch, SplitBatch) else (batch,)


def num_parts(pieces: Sequence[Any]) -> int:
    """Return the most parts that one of some micro-batches is in."""
    return max(len(parts_of(piece)) for piece in pieces)


def why_whole(batch: Any) -> str | None:
    """Return why a batch cannot be split, in words; None if it can.

    Every tensor must have the samples in its first dimension, but for scalars, and nothing else in
    the batch may belong to single samples.
    """
    num = count_samples(batch)
    if num is None:
        return "the batch holds no tensor with a first dimension"
    if num < 2:
        return "a single sample does not fit"
    return _why_whole(batch, num, "batch")


def _why_whole(value: Any, num: int, place: str) -> str | None:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_nested:
            return f"{place} is a tensor of layout {value.layout}"
        if value.dim() > 0 and value.shape[0] != num:
            shape = tuple(value.shape)
            return f"{place} has shape {shape}, and other tensors have {num} in dimension 0"
        return None
    if isinstance(value, _SCALARS):
        return None
    items: list[tuple[str, Any]]
    if isinstance(value, PackedSequence):
        return f"{place} is a PackedSequence"
    if isinstance(value, tuple | list):
        if len(value) == num and _may_be_samples(value, place):
            return f"{place} is a {type(value).__name__} of {num}, which may be one for each sample"
        items = [(f"{place}[{index}]", item) for index, item in enumerate(value)]
    elif isinstance(value, Mapping):
        items = [(f"{place}[{key!r}]", item) for key, item in value.items()]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
        items = [(f"{place}.{name}", getattr(value, name)) for name in names]
    else:
        return f"{place} is a {type(value).__name__}"
    return next((why for at, item in items if (why := _why_whole(item, num, at))), None)


def _may_be_samples(value: Sequence[Any], place: str) -> bool:
    """Whether as many items as samples may be theirs: words, or the targets of each image.

    Targets that all have as many boxes as there are images would be cut by boxes. The batch itself
    is inputs and targets, and tensors side by side are told by their own first dimension.
    """
    if not any(_holds_tensors(item) for item in value):
        return True
    return place != "batch" and not any(isinstance(item, Tensor) for item in value)


def _holds_tensors(value: Any) -> bool:
    return next(tensors(value), None) is not None


def _sizes(num: int, elements: float, limit: int) -> Iterator[int]:
    if num == 1 or num * elements < limit:
        yield num
        return
    first = (num + 1) // 2
    yield from _sizes(first, elements, limit)
    yield from _sizes(num - first, elements, limit)


def _by_share(metrics: Sequence[dict[str, Number]], shares: Sequence[float]) -> dict[str, Number]:
    means: dict[str, Number] = {}
    for name in dict.fromkeys(name for held in metrics for name in held):
        pairs = [(m[name], s) for m, s in zip(metrics, shares, strict=True) if name in m]
        means[name] = sum(value * share for value, share in pairs) / sum(s for _, s in pairs)
    return means

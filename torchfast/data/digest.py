"""A little of what data consist of, by which ranks see whether they were given the same.

To compare all of it would take as long as loading it. So of a tensor a few rows are told, of a list
some items, and of what is unknown nothing: what tells the same is most likely the same, and what
does not is not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from itertools import islice
from numbers import Real
from typing import Any, Final

import torch
from torch import Tensor

from torchfast.data.samplers import UNSIZED

_FEW: Final = 8  # of a tensor's rows
_SOME: Final = 64  # of a list's items


def digest(value: object, *, reads_device: bool = True) -> str:
    """Return what a batch, or anything in plain containers, is known by.

    Synchronizes: With a device whose tensors are among it, unless ``reads_device`` is False: then
        only their shapes are told.
    """
    told = hashlib.sha256()
    for each in _told(value, reads_device):
        told.update(each)
    return told.hexdigest()


def digest_of_samples(dataset: Any, first: str, *, reads_device: bool = True) -> str:
    """Return what a map-style data set is known by, with the digest of the first of its order."""
    try:
        length = len(dataset)
    except UNSIZED:  # a sampler may know it instead
        length = None
    # What a data set that somebody divided by hand consists of.
    parts = [getattr(dataset, name, None) for name in ("indices", "tensors")]
    return digest([length, *parts, first], reads_device=reads_device)


def _told(value: object, reads_device: bool) -> Iterator[bytes]:
    """Tell a little of what is in plain containers; of what is unknown, nothing."""
    if isinstance(value, Tensor):
        yield from _told_of_tensor(value.detach(), reads_device)
    elif isinstance(value, Real | str | bytes | None):
        yield repr(value).encode("utf-8", "backslashreplace")
    elif isinstance(value, Mapping):
        for each in islice(value.values(), _SOME):
            yield from _told(each, reads_device)
    elif isinstance(value, list | tuple | range):
        for each in islice(value, _SOME):
            yield from _told(each, reads_device)


def _told_of_tensor(tensor: Tensor, reads_device: bool) -> Iterator[bytes]:
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_meta:
        return
    yield f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    if type(tensor) is not Tensor or tensor.is_complex() or tensor.is_quantized:
        return
    if not (reads_device or tensor.device.type == "cpu"):
        return
    few = (tensor[:_FEW] if tensor.dim() else tensor).cpu()
    yield few.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

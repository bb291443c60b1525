"""The memory that a tensor lies in, be it sharded, float8 or sparse."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors with memory of their own that one consists of."""
    wrapper: Any = tensor
    inner: Iterable[Tensor]
    if is_traceable_wrapper_subclass(wrapper):
        names, _ = wrapper.__tensor_flatten__()
        found = [getattr(wrapper, name) for name in names]
        # Since torch 2.13 a DTensor names its mesh, too.
        inner = [part for part in found if isinstance(part, Tensor)]
    elif tensor.layout is torch.sparse_coo:
        inner = [tensor._indices(), tensor._values()]
    elif tensor.layout is not torch.strided:
        return
    else:
        yield tensor
        return
    for part in inner:
        yield from plain_parts(part)


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements lie between a tensor's first and last one, both included."""
    if 0 in shape:
        return 0
    return 1 + sum([(size - 1) * stride for size, stride in zip(shape, strides, strict=True)])


def is_expanded(tensor: Tensor) -> bool:
    """Whether elements of a strided tensor are one in memory, as ``expand`` leaves them."""
    strides = tensor.stride()
    if 0 not in strides:  # mostly
        return False
    return any(s == 0 and n > 1 for s, n in zip(strides, tensor.shape, strict=True))


def is_dense(tensor: Tensor) -> bool:
    """Whether it has strides: a nested one has none, and may say that it is a strided one."""
    return tensor.layout is torch.strided and not tensor.is_nested


@final
class Memory:
    """Where tensors lie, which ``tensor.data = other`` changes.

    Args:
        tensors: Which; those of a class of their own know by themselves where they lie.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._held = [
            (tensor, tensor.data)
            for tensor in tensors
            if type(tensor) in (Tensor, nn.Parameter) and is_dense(tensor)
        ]

    def has_moved(self) -> bool:
        """Whether one lies elsewhere now."""
        return any(True for _ in self._moved())

    def put_back(self) -> None:
        """Let each lie where it did."""
        for tensor, place in self._moved():
            tensor.data = place

    def _moved(self) -> Iterator[tuple[Tensor, Tensor]]:
        for tensor, place in self._held:
            is_there = tensor.data_ptr() == place.data_ptr() and tensor.shape == place.shape
            if not is_there or tensor.stride() != place.stride() or tensor.dtype != place.dtype:
                yield tensor, place

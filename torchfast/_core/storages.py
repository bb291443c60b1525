"""The memory that a tensor lies in, be it sharded, float8 or sparse."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
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


def is_expanded(tensor: Tensor) -> bool:
    """Whether elements of a strided tensor are one in memory, as ``expand`` leaves them."""
    strides = tensor.stride()
    if 0 not in strides:  # mostly
        return False
    return any(s == 0 and n > 1 for s, n in zip(strides, tensor.shape, strict=True))

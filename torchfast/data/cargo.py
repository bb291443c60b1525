"""A batch, taken apart: what is laid out in a slot, and what goes its own way.

Most batches are builtin containers of ordinary tensors. Such a batch is walked once for its
tensors and once to build it anew. Any other takes the long way, through `map_batch`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torchfast._core.batches import map_batch
from torchfast.data.layout import LARGE_BYTES, dense_strides

# Leaves of which nobody asks whether they move.
SCALARS = frozenset({str, bytes, bool, int, float, complex, type(None)})


class Cargo:
    """A batch, taken apart.

    Args:
        batch: Whatever upstream yielded.
        device: Where it goes.
        dtype: What floating-point tensors cross the bus as; None leaves them.
        trust_pinned: Whether what is pinned already is copied from where it is.

    Attributes:
        is_simple: Whether all of it is plain tensors, each once, in builtin containers.
        batch: What arrives in its structure.
        plain: The tensors that are laid out, in order.
        key: What their layout depends on.
        direct: Those of them that are copied from where they are.
        resident: The ids of tensors that are on the device already.
        has_objects: Whether there are objects with a ``.to`` method.
    """

    __slots__ = (
        *("_device", "_dtype", "batch", "direct", "has_objects", "is_simple", "key"),
        *("plain", "resident"),
    )

    def __init__(
        self, batch: Any, device: torch.device, dtype: torch.dtype | None, trust_pinned: bool
    ) -> None:
        self._device = device
        self._dtype = dtype
        self.resident: set[int] = set()
        self.has_objects = False
        found = simple_tensors(batch)
        self.is_simple = found is not None
        if found is None:
            self.plain: list[Tensor] = []
            # A container that makes tensors on demand comes back as one that holds them.
            self.batch = map_batch(batch, self._sort, self._note_object)
        else:
            self.plain = found
            self.batch = batch
        self.direct: list[Tensor] = []
        key = []
        for tensor in self.plain:
            direct = trust_pinned and tensor.nbytes >= LARGE_BYTES and self._is_direct(tensor)
            if direct:
                self.direct.append(tensor)
            key.append((tensor.dtype, tensor.shape, tensor.stride(), direct))
        self.key = tuple(key)

    def kinds(self) -> list[Any]:
        """Return what `lay_out` takes."""
        return [
            ((self._crosses_as(t), t.shape, dense_strides(t)), is_direct)
            for t, (_, _, _, is_direct) in zip(self.plain, self.key, strict=True)
        ]

    def _crosses_as(self, tensor: Tensor) -> torch.dtype:
        if self._dtype is None or not tensor.is_floating_point():
            return tensor.dtype
        return self._dtype

    def _is_direct(self, tensor: Tensor) -> bool:
        """Whether a large tensor is pinned, and laid out as it is to arrive."""
        return (
            self._crosses_as(tensor) == tensor.dtype
            and tensor.is_pinned()
            and (tensor.is_contiguous() or dense_strides(tensor) == tensor.stride())
        )

    def _sort(self, tensor: Tensor) -> Tensor:
        if tensor.device == self._device and tensor.device.type != "cpu":
            self.resident.add(id(tensor))
        elif is_plain(tensor):
            self.plain.append(tensor)
        elif (dtype := self._crosses_as(tensor)) != tensor.dtype:
            return tensor.to(dtype)
        return tensor

    def _note_object(self, value: Any) -> Any:
        self.has_objects = True
        return value


def simple_tensors(batch: Any) -> list[Tensor] | None:
    """Return the tensors of a batch that is simple; see `Cargo`. None for any other."""
    found: list[Tensor] = []
    if not _collect(batch, found):
        return None
    # One that stands in the batch twice is moved once, and stays one object.
    return found if len(set(map(id, found))) == len(found) else None


def _collect(value: Any, found: list[Tensor]) -> bool:
    kind = type(value)
    if kind is Tensor:
        found.append(value)
        return is_plain(value)
    if kind is dict:
        value = value.values()
    elif kind is not tuple and kind is not list:
        return False
    before = len(found)
    for item in value:
        kind = type(item)
        if kind is Tensor:  # mostly: a call less for each
            found.append(item)
            if not is_plain(item):
                return False
        elif kind not in SCALARS and not _collect(item, found):
            return False
    return len(found) > before  # one without tensors has to stay the object that it is


def put_back(value: Any, arrived: Iterator[Tensor]) -> Any:
    """Return a simple batch built anew, with ``arrived`` in the places of its tensors."""
    kind = type(value)
    if kind is Tensor:
        return next(arrived)
    if kind is dict:
        return {key: put_back(item, arrived) for key, item in value.items()}
    if kind is tuple or kind is list:
        # Mostly they are tensors: a call less for each.
        items = [
            next(arrived) if type(item) is Tensor else put_back(item, arrived) for item in value
        ]
        return items if kind is list else tuple(items)
    return value


def is_plain(tensor: Tensor) -> bool:
    """Whether the elements are all there is to a tensor, so that they can be laid out anew."""
    if type(tensor) is not Tensor or not tensor.is_cpu or tensor.layout is not torch.strided:
        return False
    if tensor.is_nested or tensor.requires_grad or tensor.is_quantized:
        return False
    # Asked only where it can be: these calls let another thread take the interpreter.
    dtype = tensor.dtype
    if dtype.is_complex:
        return not (tensor.is_conj() or tensor.is_neg())
    return not (dtype.is_floating_point and tensor.is_neg())

"""Which memory to store, where several tensors of a state lie in the same.

Tied weights are one tensor under two names; an averaged copy or a flat buffer may be looked at
through views that overlap. Each byte of such memory is stored once, and the views are made on it
again. What is found by address, so it does not matter how the tensors came to share it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor

from torchfast._core.storages import extent
from torchfast.checkpoint.sharded import identity_of, is_sharded

TAG: Final = "$"  # the key that tells what a node of the tree stands for
_MOST_ELEMENT_BYTES: Final = 16  # complex128
_PLAIN: Final = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}


@final
@dataclass
class Leaf:
    """A tensor of the state, where it was found and the node that will stand for it.

    Attributes:
        part: The key of the state under which it was found.
    """

    part: Any
    key: str
    tensor: Tensor
    node: dict[str, Any]


def store(leaves: list[Leaf]) -> dict[str, Tensor]:
    """Decide what to store for each leaf, note it in its node, and return what is stored."""
    stored = _store_sharded([leaf for leaf in leaves if is_sharded(leaf.tensor)])
    for group in _overlapping([leaf for leaf in leaves if not is_sharded(leaf.tensor)]):
        first = group[0]
        views = {_layout(leaf.tensor) for leaf in group}
        simple = not _repeats_itself(first.tensor) and _has_arithmetic(first.tensor.dtype)
        if simple and len(views) == 1:
            stored[first.key] = first.tensor
            for leaf in group:
                leaf.node["key"] = first.key
                if leaf.node[TAG] == "tensor" and _has_order_of_its_own(leaf.tensor):
                    leaf.node["strides"] = list(leaf.tensor.stride())
        else:
            _store_stretch(f"{first.key}~memory", group, stored)
    # In the order of the state, so that one part of it lies in few files.
    return {leaf.node["key"]: stored[leaf.node["key"]] for leaf in leaves}


def _store_sharded(leaves: list[Leaf]) -> dict[str, Tensor]:
    """Store what is sharded: once what is one tensor, everything else as it is."""
    stored: dict[str, Tensor] = {}
    keys: dict[Any, str] = {}
    for leaf in leaves:
        identity = identity_of(leaf.tensor)
        key = leaf.key if identity is None else keys.setdefault(identity, leaf.key)
        leaf.node["key"] = key
        if key == leaf.key:
            stored[key] = leaf.tensor
    return stored


def _overlapping(leaves: list[Leaf]) -> list[list[Leaf]]:
    """Group leaves whose memory overlaps; each group in the order of the state."""
    order = {id(leaf): index for index, leaf in enumerate(leaves)}
    groups: list[list[Leaf]] = []
    end: tuple[str, int] = ("", 0)
    for leaf in sorted(leaves, key=lambda leaf: _memory(leaf.tensor)[:2]):
        device, start, stop = _memory(leaf.tensor)
        if groups and device == end[0] and start < end[1] and start < stop:
            groups[-1].append(leaf)
            end = (device, max(end[1], stop))
        else:
            groups.append([leaf])
            end = (device, stop)
    return [sorted(group, key=lambda leaf: order[id(leaf)]) for group in groups]


def _memory(tensor: Tensor) -> tuple[str, int, int]:
    start = tensor.data_ptr()
    return str(tensor.device), start, start + _span(tensor) * tensor.element_size()


def _span(tensor: Tensor) -> int:
    """Return from its first to its last element, in elements."""
    return extent(tensor.shape, tensor.stride())


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _repeats_itself(tensor: Tensor) -> bool:
    return _span(tensor) < tensor.numel()


def _has_arithmetic(dtype: torch.dtype) -> bool:
    """Whether it is more than a name, as ``uint4`` is: else DCP cannot tell its size."""
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        return True
    try:
        torch.iinfo(dtype)
    except TypeError:
        return False
    return True


def _has_order_of_its_own(tensor: Tensor) -> bool:
    return not tensor.is_contiguous() and _span(tensor) == tensor.numel()


def _store_stretch(key: str, group: list[Leaf], stored: dict[str, Tensor]) -> None:
    owner = group[0].tensor
    storage = owner.untyped_storage()
    start = min(_memory(leaf.tensor)[1] for leaf in group)
    stop = max(_memory(leaf.tensor)[2] for leaf in group)
    # A view may begin only at a multiple of its element size.
    start -= (start - storage.data_ptr()) % _MOST_ELEMENT_BYTES if start < stop else 0
    stretch = torch.empty(0, dtype=torch.uint8, device=owner.device)
    if start < stop:  # a tensor without elements has no address
        stretch.set_(storage, start - storage.data_ptr(), (stop - start,), (1,))
    stored[key] = stretch
    for leaf in group:
        leaf.node.update(
            {
                TAG: "view",
                "key": key,
                "dtype": dtype_name(leaf.tensor.dtype),
                "start": leaf.tensor.data_ptr() - start,
                "shape": list(leaf.tensor.shape),
                "strides": list(leaf.tensor.stride()),
            }
        )


def plain(tensor: Tensor) -> Tensor:
    """Return the same memory as numbers that every kernel can copy, bit by bit.

    torch copies no tensor of its shortest integers, and says that complex32 is experimental.
    """
    return tensor.view(_PLAIN[tensor.element_size()])


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")

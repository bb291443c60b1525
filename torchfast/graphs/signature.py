"""What of a call must be the same for a graph to be replayed in its place.

A graph has fixed addresses, shapes and types, and every host value that the step read is frozen in
it. So two calls share a graph only if their tensors have the same shapes, types and strides, stand
in the same places, and everything that is not a tensor has the same value.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

# Told by value; all else by identity.
_VALUES = (
    *(bool, int, float, complex, str, bytes, type(None), range, enum.Enum),
    *(torch.dtype, torch.device, torch.Size, torch.memory_format, np.generic),
)
_PLAIN = frozenset((bool, int, float, str, type(None)))


@final
class Several(tuple[Any, ...]):
    """The inputs of several steps, in their order, that one call does one after the other."""

    __slots__ = ()


class Call(NamedTuple):
    """One call's inputs.

    Attributes:
        key: Hashable; equal for calls that share a graph.
        tensors: The tensors in order, each object once.
    """

    key: tuple[Any, ...]
    tensors: list[Tensor]


def describe(inputs: Any, by_name: dict[str, Any] | None = None) -> Call:
    """Return the key and the tensors of nested inputs. Reads no tensor's values.

    Args:
        inputs: Of a call, its arguments by position.
        by_name: Its arguments by name.
    """
    key: list[Any] = []
    found: list[Tensor] = []
    seen: dict[int, int] = {}
    _scan(inputs, key, found, seen)
    if by_name:
        _scan(by_name, key, found, seen)
    return Call(tuple(key), found)


def shapes(key: tuple[Any, ...]) -> str:
    """Return a key's tensor shapes in words, such as ``"16x256 int64, 16x256 int64"``."""
    if (number := num_steps(key)) > 1 and (one := single(key)) is not None:
        return f"{number} steps of {shapes(one)}"
    names = [
        f"{'x'.join(map(str, part[1])) or 'scalar'} {str(part[2]).removeprefix('torch.')}"
        for part in only_tensors(key)
    ]
    return ", ".join(names) or "no tensors"


def only_tensors(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the part of a key that tensors make: equal keys differ in other values at most."""
    return tuple(part for part in key if _is_of_tensor(part))


def without_tensors(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the other part."""
    return tuple(part for part in key if not _is_of_tensor(part))


def num_steps(key: tuple[Any, ...]) -> int:
    """Return of how many steps a call's key has the inputs: 1, but for `Several`."""
    head = key[1] if len(key) > 1 else None
    return int(head[1]) if isinstance(head, tuple) and head[0] is Several else 1


def single(key: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return the key of a call of one of `Several` steps; None unless they are all of that kind.

    Nor are they where one tensor stands in the inputs of two steps.
    """
    number = num_steps(key)
    if number == 1:
        return key
    size, rest = divmod(len(key) - 2, number)
    first = key[2 : 2 + size]
    num_tensors = len(only_tensors(first))
    for step in range(1, number):
        before = step * num_tensors  # to which places among all tensors are counted on
        expected = [part + before if type(part) is int else part for part in first]
        if [*key[2 + step * size : 2 + (step + 1) * size]] != expected:
            return None
    return None if rest else (key[0], *first)


def _is_of_tensor(part: Any) -> bool:
    return isinstance(part, tuple) and bool(part) and part[0] is Tensor


@final
class Identity:
    """An object told from others by being it; held, so that its address is not another's."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _scan(value: Any, key: list[Any], found: list[Tensor], seen: dict[int, int]) -> None:
    kind = type(value)
    if kind is Tensor:
        _note(value, key, found, seen)
    elif kind is tuple or kind is list:
        key.append((kind, len(value)))
        for item in value:
            if type(item) is Tensor:  # mostly: a call less for each
                _note(item, key, found, seen)
            else:
                _scan(item, key, found, seen)
    elif kind is dict:
        key.append((kind, *value))
        for item in value.values():
            _scan(item, key, found, seen)
    elif kind in _PLAIN:
        key.append((kind, value))  # with its type, since 1 == True == 1.0
    else:
        _scan_rare(value, key, found, seen)


def _scan_rare(value: Any, key: list[Any], found: list[Tensor], seen: dict[int, int]) -> None:
    kind = type(value)
    items: list[Any]
    if isinstance(value, Tensor):
        _note(value, key, found, seen)
        return
    if isinstance(value, PackedSequence):
        # Its batch_sizes stay on the host and steer the loop over time, so they are values.
        steps = tuple(value.batch_sizes.tolist())
        key.append((kind, steps))
        items = [value.data, value.sorted_indices, value.unsorted_indices]
    elif isinstance(value, tuple | list):
        key.append((kind, len(value)))
        items = list(value)
    elif isinstance(value, Mapping):
        key.append((kind, *value))
        items = list(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
        key.append((kind, *names))
        items = [getattr(value, name) for name in names]
    elif isinstance(value, _VALUES):
        key.append((kind, value))
        return
    else:
        key.append((kind, Identity(value)))
        return
    for item in items:
        _scan(item, key, found, seen)


def _note(tensor: Tensor, key: list[Any], found: list[Tensor], seen: dict[int, int]) -> None:
    number = id(tensor)
    if number in seen:
        key.append(seen[number])  # the same object as the one in that place
        return
    seen[number] = len(found)
    found.append(tensor)
    strides = tensor.stride() if tensor.layout is torch.strided else tensor.layout
    key.append((Tensor, tensor.shape, tensor.dtype, strides, tensor.requires_grad))

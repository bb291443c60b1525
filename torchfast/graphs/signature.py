"""What of a call must be the same for a graph to be replayed in its place.

A graph has fixed addresses, shapes and types, and every host value that the step read is frozen in
it. So two calls share a graph only if their tensors have the same shapes, types and strides, stand
in the same places, and everything that is not a tensor has the same value.

An object that is no container of a known kind is neither taken apart nor copied: a graph reads the
very tensors in it. So it counts by being the same object with the same things in it.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer

from torchfast.graphs.holders import slots_of

# Told by value; all else by identity.
_VALUES = (
    *(bool, int, float, complex, str, bytes, type(None), range, enum.Enum),
    *(torch.dtype, torch.device, torch.Size, torch.memory_format, np.generic),
)
_PLAIN = frozenset((bool, int, float, str, type(None)))
# What changes in these is noticed elsewhere, if they are named.
_NAMED = (nn.Module, Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
_CONTAINERS = (list, tuple, set, frozenset, deque)
_LONGEST_TEXT = 60
_MOST_WITHIN = 256  # objects in an object, and entries in a container: more are data


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


def other_value(key: tuple[Any, ...], before: tuple[Any, ...]) -> str:
    """Return the first value, in words, in which a key differs from another one of its tensors."""
    for part, known in zip(without_tensors(key), without_tensors(before), strict=False):
        if part == known or not (isinstance(part, tuple) and len(part) == 2):
            continue
        kind, value = part
        if isinstance(value, _WeakIdentity):
            return f"an object of {kind.__name__}"
        text = repr(value)
        text = text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."
        return f"{text} ({kind.__name__})"
    return "in another container"


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
class _WeakIdentity:
    """An object told from others by being it, as long as somebody else has it."""

    __slots__ = ("_get", "_number")

    def __init__(self, value: object) -> None:
        self._number = id(value)
        self._get: Callable[[], object]
        try:
            self._get = weakref.ref(value)
        except TypeError:  # its kind cannot be held so
            self._get = lambda: value

    def __eq__(self, other: object) -> bool:
        value = self._get()
        is_alive = value is not None
        return is_alive and isinstance(other, _WeakIdentity) and other._get() is value

    def __hash__(self) -> int:
        return self._number


def _scan(value: Any, key: list[Any], found: list[Tensor], seen: dict[int, int]) -> None:
    kind = type(value)
    while kind is tuple and len(value) == 1:  # mostly: one argument, of one micro-batch
        key.append((tuple, 1))
        (value,) = value
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
        key.append((kind, _WeakIdentity(value)))
        key.extend(_within(value))
        return
    for item in items:
        _scan(item, key, found, seen)


def _within(value: Any) -> Iterator[Any]:
    """Return what an object holds, near and far, as parts of a key."""
    waiting, seen = [value], {id(value)}
    for holder in waiting:  # which grows
        if isinstance(holder, np.ndarray):
            is_small = holder.size <= _MOST_WITHIN and not holder.dtype.hasobject
            yield (np.ndarray, holder.tobytes() if is_small else holder.shape)
            continue
        for item in _items_of(holder):
            if isinstance(item, _VALUES):
                yield (type(item), item)
                continue
            # Containers by what is in them: to hold one would keep a batch for each kind of call.
            is_container = isinstance(item, (Mapping, *_CONTAINERS))
            yield (type(item), len(item)) if is_container else _WeakIdentity(item)
            if id(item) not in seen and len(seen) < _MOST_WITHIN:
                seen.add(id(item))
                waiting.append(item)


def _items_of(holder: Any) -> list[Any]:
    if isinstance(holder, Mapping):
        return [*holder, *holder.values()] if len(holder) <= _MOST_WITHIN else []
    if isinstance(holder, _CONTAINERS):
        return [*holder] if len(holder) <= _MOST_WITHIN else []
    is_told = isinstance(holder, (Tensor, type, *_NAMED)) or inspect.isroutine(holder)
    if is_told or inspect.ismodule(holder):
        return []
    names = slots_of(type(holder))
    held = [getattr(holder, name) for name in names if hasattr(holder, name)]
    table = getattr(holder, "__dict__", None)
    return [*held, *table, *table.values()] if isinstance(table, dict) else held


def _note(tensor: Tensor, key: list[Any], found: list[Tensor], seen: dict[int, int]) -> None:
    number = id(tensor)
    if number in seen:
        key.append(seen[number])  # the same object as the one in that place
        return
    seen[number] = len(found)
    found.append(tensor)
    shape: Any
    strides: Any
    if tensor.is_nested:  # whose shape is none, or another one in each batch
        shape, strides = ("nested",), tensor.layout
    else:
        shape = tensor.shape
        strides = tensor.stride() if tensor.layout is torch.strided else tensor.layout
    key.append((Tensor, shape, tensor.dtype, strides, tensor.requires_grad))

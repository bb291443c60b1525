"""Nested batches: walked, moved to a device, and grouped into micro-batches.

A batch is whatever the user's loader yields: a tensor, or tensors inside tuples, named tuples,
lists, mappings, dataclasses, ``PackedSequence`` and objects with a ``.to`` method, nested at will.
Containers come back as the type they were; a container in which nothing moved comes back as the
same object; everything that is not a tensor passes by identity.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from types import MemberDescriptorType
from typing import Any, Generic, TypeVar, final

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from torchfast._core.phases import H2D, phase

T = TypeVar("T")


@final
class MicroBatches(Generic[T]):
    """The batches of one step under gradient accumulation: 1 to ``accumulate`` of them.

    A type of its own because a batch may itself be a list or a tuple.

    Args:
        batches: The micro-batches, in order; at least one.
        are_even: Whether all ranks get as many in this step, as of `Trainer.prefetch`.

    Raises:
        TypeError: ``batches`` is a tensor or not a sequence.
        ValueError: ``batches`` is empty.

    Example:
        >>> import torch
        >>> group = MicroBatches([torch.zeros(2), torch.ones(2)])
        >>> len(group)
        2
    """

    __slots__ = ("_batches", "are_even")

    def __init__(self, batches: Sequence[T], *, are_even: bool = False) -> None:
        self._batches = _checked(type(self), batches)
        self.are_even = are_even

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[T]:
        return iter(self._batches)

    def __getitem__(self, index: int) -> T:
        return self._batches[index]

    def __repr__(self) -> str:
        return f"MicroBatches({len(self)} x {type(self._batches[0]).__name__})"


@final
class StepBatches(Generic[T]):
    """The batches of several steps, in their order: what ``trainer.steps`` takes.

    A type of its own because a batch may itself be a list or a tuple.

    Args:
        batches: What each step takes; `MicroBatches` each, where a step takes these.

    Raises:
        TypeError: ``batches`` is a tensor or not a sequence.
        ValueError: ``batches`` is empty.

    Example:
        >>> import torch
        >>> len(StepBatches([torch.zeros(2), torch.ones(2)]))
        2
    """

    __slots__ = ("_batches",)

    def __init__(self, batches: Sequence[T]) -> None:
        self._batches = _checked(type(self), batches)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[T]:
        return iter(self._batches)

    def __getitem__(self, index: int) -> T:
        return self._batches[index]

    def __repr__(self) -> str:
        return f"StepBatches({len(self)} x {type(self._batches[0]).__name__})"


def _checked(kind: type, batches: Sequence[T]) -> tuple[T, ...]:
    if isinstance(batches, Tensor | str | Mapping) or not isinstance(batches, Sequence):
        raise TypeError(
            f"{kind.__name__} takes a list or tuple of batches, got {type(batches).__name__}"
        )
    if not batches:
        raise ValueError(f"{kind.__name__} needs at least one batch, got an empty sequence")
    return tuple(batches)


def as_steps(batches: Any, accumulate: int) -> tuple[tuple[Any, ...], ...]:
    """Return the micro-batches of each of several steps.

    Raises:
        TypeError: No `StepBatches`, or a bare batch in it where `MicroBatches` is due.
        ValueError: More micro-batches in a step than ``accumulate``.
    """
    if not isinstance(batches, StepBatches):
        raise TypeError(
            f"steps() takes StepBatches, the batches of several steps, got "
            f"{type(batches).__name__}; iterate over trainer.prefetch(loader, unroll=...), or wrap "
            "them: StepBatches([batch, ...]); step() takes one"
        )
    return tuple([as_group(batch, accumulate) for batch in batches])


def as_group(batch: Any, accumulate: int) -> tuple[Any, ...]:
    """Return the micro-batches of what a step was given.

    Raises:
        TypeError: A bare batch where `MicroBatches` is due.
        ValueError: More micro-batches than ``accumulate``.
    """
    if isinstance(batch, MicroBatches):
        if len(batch) > accumulate:
            raise ValueError(
                f"got {len(batch)} micro-batches in a step, but accumulate={accumulate}; "
                "raise accumulate or give fewer"
            )
        return tuple(batch)
    if isinstance(batch, StepBatches):
        raise TypeError(
            f"a step takes one batch, got the StepBatches of {len(batch)} steps; give them to "
            "trainer.steps(), or leave unroll out of trainer.prefetch()"
        )
    if accumulate > 1:
        raise TypeError(
            f"with accumulate={accumulate} a step takes MicroBatches, got "
            f"{type(batch).__name__}; iterate over trainer.prefetch(loader), or wrap the "
            "batches of a step: MicroBatches([batch, ...])"
        )
    return (batch,)


def to_device(
    batch: T, device: torch.device, *, channels_last: bool = False, copies: bool = False
) -> T:
    """Return ``batch`` with every tensor on ``device``, its structure and types unchanged.

    A tensor object that stands in the batch twice is moved once and stays one object.

    Args:
        batch: A nested batch.
        device: Where tensors go. Copies from pinned memory are asynchronous: do not overwrite
            a pinned batch before the step that took it is done.
        channels_last: Also lay 4-d tensors out as NHWC, on the device.
        copies: Copy tensors of the host that stay there, and rebuild lists, mappings and
            dataclasses, so that nobody who holds ``batch`` sees what is done to the result.

    Returns:
        The same object if nothing had to move or be copied.
    """
    is_there = _is_there(batch, device)
    if is_there and not channels_last and not copies:
        return batch
    with nullcontext() if is_there else phase(H2D):
        return map_batch(
            batch,
            lambda tensor: move_tensor(
                _copied(tensor) if copies and tensor.device == device else tensor,
                device,
                channels_last=channels_last,
            ),
            lambda value: move_object(value, device),
            anew=copies,
        )


def map_batch(
    batch: T,
    fn: Callable[[Tensor], Tensor],
    object_fn: Callable[[Any], Any] | None = None,
    *,
    anew: bool = False,
) -> T:
    """Rebuild ``batch`` with ``fn`` over its tensors, each called once.

    Args:
        batch: A nested batch.
        fn: What becomes of a tensor; one that stands in the batch twice stays one object.
        object_fn: What becomes of an object with a ``.to`` method; None leaves it as it is.
        anew: Rebuild lists, mappings and dataclasses, which somebody may write to, also where
            nothing in them changed.

    Returns:
        The same object if nothing changed.
    """
    # The source is kept beside its result: a tensor that a container makes on demand could
    # otherwise be gone, and its id be another's.
    memo: dict[int, tuple[Tensor, Tensor]] = {}

    def once(tensor: Tensor) -> Tensor:
        if id(tensor) not in memo:
            memo[id(tensor)] = tensor, fn(tensor)
        return memo[id(tensor)][1]

    return _map(batch, once, object_fn, anew)  # type: ignore[no-any-return]


def tensors(batch: object) -> Iterator[Tensor]:
    """Yield the tensors of a nested batch, in order, duplicates included."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _map(batch, note, None)
    return iter(found)


def count_samples(batch: object) -> int | None:
    """Return the first dimension of the first tensor that has one, read without the device."""
    first = batch[0] if type(batch) in (tuple, list) and batch else batch  # type: ignore[index]
    if type(first) is Tensor and first.dim() > 0:  # mostly: all of a batch takes longer
        return int(first.size(0))  # nested tensors have no shape
    return next((int(t.size(0)) for t in tensors(batch) if t.dim() > 0), None)


def _is_there(batch: Any, device: torch.device) -> bool:
    """Whether a batch of plain containers has nothing to move: the steady case, so it is fast."""
    kind = type(batch)
    if kind is Tensor:
        return bool(batch.device == device)
    if kind is tuple or kind is list:
        return all(_is_there(item, device) for item in batch)
    if kind is dict:
        return all(_is_there(item, device) for item in batch.values())
    return batch is None or kind in (str, int, float, bool)


def move_tensor(tensor: Tensor, device: torch.device, *, channels_last: bool = False) -> Tensor:
    """Return ``tensor`` on ``device``, itself if it is there; 4-d ones as NHWC if asked."""
    if tensor.device != device:
        # Towards the host, torch would not wait for the copy, and the step would read too early.
        tensor = tensor.to(device, non_blocking=device.type != "cpu")
    if channels_last and tensor.dim() == 4 and tensor.layout is torch.strided:
        # After the copy: on the host the re-layout would run on one core and unpin the memory.
        tensor = tensor.contiguous(memory_format=torch.channels_last)
    return tensor


def _copied(tensor: Tensor) -> Tensor:
    # What is on a device already is left to who put it there, and of what is trained a copy would
    # be trained in its place.
    if tensor.device.type != "cpu" or isinstance(tensor, nn.Parameter):
        return tensor
    if tensor.requires_grad and tensor.is_leaf:
        return tensor.detach().clone().requires_grad_()
    return tensor.clone()


def move_object(value: Any, device: torch.device) -> Any:
    """Return an object that has a ``.to`` method on ``device``."""
    moved = value.to(device)
    return value if moved is None else moved  # some .to methods work in place


def _map(
    value: Any,
    fn: Callable[[Tensor], Tensor],
    object_fn: Callable[[Any], Any] | None,
    anew: bool = False,
) -> Any:
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, PackedSequence):
        # Its batch_sizes belong on the host.
        old = [value.data, value.sorted_indices, value.unsorted_indices]
        new = [None if tensor is None else fn(tensor) for tensor in old]
        if _same(new, old):
            return value
        kind: Any = type(value)
        return kind(new[0], value.batch_sizes, new[1], new[2])
    if isinstance(value, tuple | list):
        items = [_map(item, fn, object_fn, anew) for item in value]
        is_kept = not (anew and isinstance(value, list)) and _same(items, value)
        return value if is_kept else _rebuild_sequence(value, items)
    if object_fn is not None and _moves_itself(value):
        return object_fn(value)
    if isinstance(value, Mapping):
        mapped = {key: _map(item, fn, object_fn, anew) for key, item in value.items()}
        is_kept = not (anew and isinstance(value, MutableMapping))
        is_kept = is_kept and _same(mapped.values(), value.values())
        return value if is_kept else _rebuild_mapping(value, mapped)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        old = [getattr(value, name) for name in names]
        new = [_map(item, fn, object_fn, anew) for item in old]
        return value if not anew and _same(new, old) else _rebuild_dataclass(value, names, new)
    if object_fn is not None and _has_to(value):
        return object_fn(value)
    return value


def _same(new: Any, old: Any) -> bool:
    return all(a is b for a, b in zip(new, old, strict=True))


def _has_to(value: object) -> bool:
    return not isinstance(value, nn.Module) and callable(getattr(type(value), "to", None))


def _moves_itself(value: object) -> bool:
    """Whether a mapping or dataclass has to be moved as a whole, by its own method.

    As TensorDict, which takes every tensor that it is given to its own device, and its classes,
    whose fields only stand for what another object holds.
    """
    if not _has_to(value):
        return False
    if isinstance(value, Mapping):
        return getattr(value, "device", None) is not None
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return False
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    return not all(_holds(value, name) for name in names)


def _holds(value: object, name: str) -> bool:
    """Whether an attribute lies in the object itself, or is a default of its class."""
    if name in getattr(value, "__dict__", {}):
        return True
    of_class = getattr(type(value), name, None)
    return isinstance(of_class, MemberDescriptorType) or of_class is getattr(value, name)


def _rebuild_sequence(value: Any, items: list[Any]) -> Any:
    kind = type(value)
    if kind is list:
        return items
    if kind is tuple:
        return tuple(items)
    if isinstance(value, list):
        new = copy.copy(value)
        new[:] = items
        return new
    # A named tuple takes its items one by one. Of both a subclass may have attributes.
    made = kind._make(items) if hasattr(value, "_make") else kind(items)
    if attributes := getattr(value, "__dict__", None):
        made.__dict__.update(attributes)
    return made


def _rebuild_mapping(value: Any, mapped: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return mapped
    if isinstance(value, MutableMapping):
        # A copy keeps what the constructor would not take: a default factory, extra attributes.
        new = copy.copy(value)
        kept = dict(value)
        for key, item in mapped.items():
            new[key] = item
        if not _same(value.values(), kept.values()):
            # Its copy shares what it wraps, so the writes above reached the user's own batch.
            for key, item in kept.items():
                value[key] = item
            kind: Any = type(value)
            return kind(mapped)
        return new
    return type(value)(mapped)


def _rebuild_dataclass(value: Any, names: list[str], items: list[Any]) -> Any:
    # Neither __init__ nor __post_init__ runs again; object.__setattr__ serves frozen ones. A field
    # that stands for what another object holds would be hidden by it, and both would be there.
    new = copy.copy(value)
    for name, item in zip(names, items, strict=True):
        if _holds(value, name):
            object.__setattr__(new, name, item)
        else:
            setattr(new, name, item)
    return new

"""What a step reaches beside its named state, as it is before a capture: to be put back.

A capture runs the step's Python once and none of its kernels, and the check of replays runs some
steps more. What that leaves behind in lists, closures and objects would be there for the steps that
follow: a moving average that is some steps ahead, or, where the capture failed, a tensor that
nobody ever computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, final

import torch
from torch import Tensor, nn

from torchfast._core.code_names import Read
from torchfast._core.compare import same_bits
from torchfast._core.proxies import is_dead
from torchfast._core.refilling import REFILLED, refill
from torchfast._core.storages import is_dense, is_expanded
from torchfast.graphs.copies import copies_of
from torchfast.graphs.holders import PLAIN, Kinds, parts_of
from torchfast.graphs.places import CELL, NOTHING, Place, values_in
from torchfast.graphs.value_forms import BUFFERS, bytes_of, is_small_array, put_bytes

# Writes through ``.data`` and of foreach leave no version behind. More than this may be data.
_SMALL_BYTES = 2**26
_MISSING = object()
_COUNTS = (int, float)  # not what is only set, as another thread does to stop this one


@final
class Reached:
    """Values in places, and what is in containers there.

    Args:
        places: Where a step's code reads values.
        read: Which of them.

    Attributes:
        tensors: All that are there, modules' too, each once.
    """

    def __init__(self, places: Iterable[Place], read: Read) -> None:
        self._read = read
        self._values: list[tuple[Place, dict[str, Any]]] = []
        self._buffers: list[tuple[Any, bytes | None]] = []
        contents: dict[int, tuple[Any, Any]] = {}
        tensors: dict[int, Tensor] = {}
        kinds = Kinds()
        for place in places:
            held = dict(values_in(place, read))
            if place.of_library:  # other threads may use it: only what code may count is put back
                held = {n: v for n, v in held.items() if n in read.names and type(v) in _COUNTS}
            if place.read is None or place.read is CELL:
                self._values.append((place, held))
            for value in held.values():
                if kinds[type(value)] == PLAIN:
                    continue
                for part in parts_of(value):
                    if isinstance(part, BUFFERS):
                        self._buffers.append((part, bytes_of(part)))
                    elif type(part) in REFILLED or is_small_array(part):
                        contents[id(part)] = part, part.copy()
                    elif isinstance(part, Tensor):
                        tensors[id(part)] = part
        self._contents = contents
        self.tensors = list(tensors.values())
        self._versions = {id(t): _version(t) for t in self.tensors}

    def put_back(self) -> None:
        """Undo what has been put in, taken out or replaced since."""
        for container, content in self._contents.values():
            refill(container, content)
        for buffer, known in self._buffers:
            put_bytes(buffer, known)
        for place, held in self._values:
            if place.is_module:  # whose attributes are put back as a whole
                continue
            now = dict(values_in(place, self._read))
            for name in now.keys() - held.keys():
                if not place.of_library:
                    place.remove(name)
            for name, value in held.items():
                if now.get(name, _MISSING) is not value:
                    place.write(name, value)

    def written(self) -> list[Tensor]:
        """Return the tensors that were written to since, as far as their versions tell."""
        return [t for t in self.tensors if _is_state(t) and _version(t) != self._versions[id(t)]]

    def notes(self, before: Reached) -> Notes | None:
        """Return what holds tensors and was written since, for others to read; None if nothing.

        Not what was put into a list or taken out: that is none of a replay's to do again. A key
        that has come is written each time, for a loop that clears its dictionary.
        """
        known = {id(p.holder): (p, dict(held)) for p, held in before._values}
        for place, held in before._values:
            known[id(place.holder)][1].update(held)  # in slots and beside
        values = [
            (place, name, value)
            for place, held in self._values
            if id(place.holder) in known
            for name, value in held.items()
            if known[id(place.holder)][1].get(name, _MISSING) is not value and _has_tensors(value)
        ]
        at = {id(v): (p, name) for p, held in self._values for name, v in held.items()}
        items = [
            (container, at.get(identity), key, value)
            for identity, (container, content) in self._contents.items()
            if identity in before._contents
            for key, value in _replaced_in(before._contents[identity][1], content)
            if _has_tensors(value)
        ]
        return Notes(values, items) if values or items else None

    def come(self, before: Reached) -> list[Tensor]:
        """Return the tensors that were not there before."""
        return [t for t in self.tensors if _is_state(t) and id(t) not in before._versions]

    def unsure(self, device: torch.device) -> list[Tensor]:
        """Return small tensors of a device, to which a step may write without a trace."""
        found, num_bytes = [], 0
        for tensor in self.tensors:
            size = tensor.numel() * tensor.element_size()
            is_meant = type(tensor) is Tensor and tensor.device == device and _is_state(tensor)
            if is_meant and num_bytes + size <= _SMALL_BYTES:
                num_bytes += size
                found.append(tensor)
        return found

    def gone(self, now: Reached) -> list[Tensor]:
        """Return the memory of tensors that are not there any more: a graph may read it."""
        there = {id(tensor) for tensor in now.tensors}
        return [tensor.detach() for tensor in self.tensors if id(tensor) not in there]


@final
class Notes:
    """What a step has written to attributes and containers of others', to be written there again.

    A replay computes anew what these tensors hold, and runs no Python: after a step that ran
    eagerly, or another graph's replay, they would not be there.

    Args:
        values: By place and name.
        items: By container, where it lies, and key.
    """

    def __init__(
        self,
        values: list[tuple[Place, str, Any]],
        items: list[tuple[Any, tuple[Place, str] | None, Any, Any]],
    ) -> None:
        self._names = [f"{name!r} of {p.label}" if name else p.label for p, name, _ in values]
        own = [(place, name, _own(value)) for place, name, value in values]
        # Most are attributes of modules, many of a kind, and each replay writes them.
        self._tables = [(p.table, n, v) for p, n, v in own if _has_table(p)]
        self._values = [(p, n, v) for p, n, v in own if not _has_table(p)]
        # A length that became another one has another meaning; of a dictionary any will do.
        self._items = [
            (container, at, len(container) if type(container) is list else None, key, _own(value))
            for container, at, key, value in items
        ]

    def write(self) -> None:
        """Write all to where the step has written it."""
        for table, name, value in self._tables:
            table[name] = value if type(value) not in REFILLED else value.copy()
        for place, name, value in self._values:
            place.write(name, _own(value))
        for container, at, length, key, value in self._items:
            into = container
            if at is not None:  # there may be another one by now: a loop's for each step
                found = _value_at(*at)
                into = found if type(found) is type(container) else container
            if length is None or len(into) == length:
                into[key] = _own(value)

    def names(self) -> list[str]:
        """Return where they are, in words."""
        return self._names + ["entries of lists and dictionaries"] * bool(self._items)


@final
class Copies:
    """Values of tensors, which are written to only if they have changed: a write is a trace.

    Args:
        tensors: Whose.

    Synchronizes: Where they are put back.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        held = list(tensors)
        self._held = [*zip(held, copies_of(held), strict=True)]

    def put_back(self) -> None:
        """Write what has changed."""
        with torch.no_grad():
            for tensor, value in self._held:
                if not same_bits(tensor, value):
                    tensor.copy_(value)


def in_few_words(names: list[str]) -> str:
    """Return the first of many names."""
    more = [f"{len(names) - 3} more"] * (len(names) > 3)
    return " and ".join([", ".join(names[:3]), *more])


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _is_state(tensor: Tensor) -> bool:
    """Whether a step may keep in it what the next one reads, by writing to it in place."""
    if not is_dense(tensor) or tensor.is_inference():
        return False
    if tensor.requires_grad and not tensor.is_leaf:
        return False
    return not is_expanded(tensor)


def _has_table(place: Place) -> bool:
    return place.read is None and not place.in_slots and not isinstance(place.holder, type)


def _value_at(place: Place, name: str) -> Any:
    """Return the value of a name, as it is now; None if there is none."""
    if place.read is not None:
        return next((value for _, value in values_in(place, NOTHING)), None)
    if place.in_slots:
        return getattr(place.holder, name, None)
    return place.table.get(name)


def _own(value: Any) -> Any:
    """Return a container of its own for whoever empties it; any other value itself."""
    return value.copy() if type(value) in REFILLED else value


def _has_tensors(value: Any) -> bool:
    if is_dead(value):
        return False
    inner = vars(value).values() if hasattr(value, "__dict__") else ()
    parts = itertools.chain(parts_of(value), *map(parts_of, inner))
    return not isinstance(value, nn.Module) and any(isinstance(part, Tensor) for part in parts)


def _replaced_in(before: Any, now: Any) -> list[tuple[Any, Any]]:
    """Return entries that are others, by their keys; of a list, if there are as many as before."""
    if isinstance(now, dict):
        return [
            (key, value) for key, value in now.items() if before.get(key, _MISSING) is not value
        ]
    if isinstance(now, list) and len(now) == len(before):
        return [(i, now[i]) for i in range(len(now)) if now[i] is not before[i]]
    return []

"""What a batch is built of, for a loader that is told to be strict about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, final

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from torchfast._core.errors import BatchStructureError
from torchfast.data.position import Position

# Beside what has a .to method: leaves that a step can use.
PLAIN = (Tensor, PackedSequence, str, bytes, bool, int, float, complex, type(None))

Leaves = tuple[tuple[str, str], ...]


@final
class StructureCheck:
    """Lets batches through that are built as the first one was."""

    def __init__(self) -> None:
        self._first: Leaves | None = None

    def checked(self, batches: Iterator[tuple[Any, Position]]) -> Iterator[tuple[Any, Position]]:
        """Yield ``batches``, each once it was looked at.

        Raises:
            TypeError: A leaf that no step can use.
            BatchStructureError: Another structure than the first batch of the loader's life had.
        """
        for batch, position in batches:
            found = structure(batch)
            if self._first is None:
                self._first = found
            elif found != self._first:
                raise BatchStructureError(
                    f"batch {position.num_batches} of the epoch is not built as the first one: "
                    f"{difference(self._first, found)}; build all batches alike, or leave strict "
                    "out"
                )
            yield batch, position


def structure(batch: object) -> Leaves:
    """Return the key path and the type of every leaf, such as ``("batch['x'][0]", "Tensor")``.

    Raises:
        TypeError: A leaf that no step can use as it is, such as a NumPy array.
    """
    return tuple(_leaves(batch, "batch"))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    kind = type(value).__name__
    if isinstance(value, PLAIN):
        yield path, kind
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    elif isinstance(value, Mapping):
        # Two with the same keys are built alike, in whatever order they were filled.
        for key, item in sorted(value.items(), key=lambda pair: repr(pair[0])):
            yield from _leaves(item, f"{path}[{key!r}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                yield from _leaves(getattr(value, field.name), f"{path}.{field.name}")
    elif callable(getattr(type(value), "to", None)):
        yield path, kind
    else:
        raise TypeError(
            f"{path} is of type {kind}, which cannot be moved to a device; make it a tensor in the "
            "data set or in collate_fn, or leave strict out to pass it on as it is"
        )


def difference(expected: Leaves, found: Leaves) -> str:
    """Return the first leaf in which two structures differ, in words."""
    for a, b in zip(expected, found, strict=False):
        if a != b:
            return f"{b[0]} ({b[1]}) stands where {a[0]} ({a[1]}) was"
    if len(found) > len(expected):
        return f"{found[len(expected)][0]} is new"
    return f"{expected[len(found)][0]} is missing"

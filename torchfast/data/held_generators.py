"""Generators of a loader's own that stand in no argument of torch: a sampler's, a data set's.

A DataLoader's ``generator`` and its samplers' have a name that torch gave them. A sampler that a
person wrote draws its order from ``self.rng``, which may be torch's, NumPy's or Python's, and so
may a data set that augments in the training process. Without their states the second epoch of a
run that is taken up again would be another one, though every count is right.

Each is known by where it was found, so that one that is only made as an epoch begins, from a seed
that follows from the epoch, may be there or not. What is deeper inside (a transform's own, the
parts of a ``ConcatDataset``) or on a device is not found.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from torchfast._core.generators import has_state, packed_state

if TYPE_CHECKING:
    from torchfast._core.generators import Generator

# Where a loader has what it draws with. Those with an underscore wrap it for many ranks, and leave
# no trace in the name: a position goes over from one process to many. A batch sampler comes first,
# for what deals its samples out stands beside it too.
_PARTS: Final = ("_loader", "_sampler", "batch_sampler", "sampler", "dataset")


def held_generators(loader: Any, known: Collection[object]) -> dict[str, Generator]:
    """Return the generators in a loader's parts, each once, by where they are.

    Args:
        loader: Any iterable of batches.
        known: Those that are not wanted.
    """
    # The global ones are the training's, and saved with it.
    shared: Any = (torch.default_generator, random.getstate, np.random.get_state)
    seen = {id(getattr(each, "__self__", each)) for each in (*shared, *known)}
    found: dict[str, Generator] = {}
    for path, part in _parts(loader):
        for name, value in list(_own(part).items()):
            if id(value) not in seen and _has_state(value):
                seen.add(id(value))
                found[f"{path}{name}"] = value
    return found


def same_state(state: Any, other: Any) -> bool:
    """Whether two states of one generator are the same."""
    return torch.equal(packed_state(state), packed_state(other))


def _parts(loader: Any) -> Iterator[tuple[str, Any]]:
    """Yield the loader and what it is made of, each once, with the beginning of its names."""
    seen: set[int] = set()
    todo = [("", loader)]
    while todo:
        path, part = todo.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        yield path, part
        for name in reversed(_PARTS):
            step = "" if name.startswith("_") else f"{name}."
            todo.append((path + step, _own(part).get(name)))


def _own(part: Any) -> dict[str, Any]:
    # Not getattr(): a class that answers for every name would have parts without end.
    return getattr(part, "__dict__", {})


def _has_state(value: object) -> bool:
    # A device's is not to be asked while a step is captured.
    is_far = isinstance(value, torch.Generator) and value.device.type != "cpu"
    return not is_far and has_state(value)

"""The generators that a loader and its samplers have under the names that torch gave them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from torchfast._core.generators import set_state, state_of
from torchfast.data.held_generators import held_generators
from torchfast.data.loader_fingerprint import look_up

_PATHS: Final = (
    "generator",
    "sampler.generator",
    "batch_sampler.generator",
    "batch_sampler.sampler.generator",
    "order_generator",
)


def own_generators(loader: Any) -> list[torch.Generator]:
    """Return the generators that the loader and its samplers draw from, each once."""
    found = {id(g): g for g in (look_up(loader, path) for path in _PATHS) if g is not None}
    return list(found.values())


@contextmanager
def preserved_generators(loader: Any) -> Iterator[None]:
    """Put the generators back that a loader and its parts draw from, whatever the body does."""
    own = own_generators(loader)
    generators = [*own, *held_generators(loader, own).values()]
    states = [state_of(generator) for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            set_state(generator, state)

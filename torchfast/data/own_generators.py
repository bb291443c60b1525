"""The generators that a loader and its samplers have under the names that torch gave them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from torchfast.data.held_generators import held_generators
from torchfast.data.loader_fingerprint import look_up

if TYPE_CHECKING:
    from torchfast._core.generators import Generator

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


def every_generator(loader: Any) -> list[Generator]:
    """Return these, and those that its parts hold as attributes of their own."""
    own = own_generators(loader)
    return [*own, *held_generators(loader, own).values()]

"""Generators of random numbers that a block holds itself, beside torch's default ones.

A block that draws from one, ``torch.randn(..., generator=self.generator)``, has to draw the same
numbers when it runs again. Where generators stand in its modules is looked up in its first call,
since to go through all attributes takes longer than some blocks.
"""

from __future__ import annotations

import weakref
from typing import final

import torch
from torch import nn

from torchfast._core.generators import torch_generators_in


@final
class OwnGenerators:
    """Knows in which attributes of a block's modules generators stand."""

    def __init__(self) -> None:
        self._places: list[tuple[weakref.ref[nn.Module], str]] | None = None

    def of(self, module: nn.Module) -> list[torch.Generator]:
        """Return those that stand there now, each once."""
        if self._places is None:
            self._places = [
                (weakref.ref(owner), name)
                for owner in module.modules()
                for name, value in vars(owner).items()
                if any(True for _ in torch_generators_in(value))
            ]
        found: dict[int, torch.Generator] = {}
        for reference, name in self._places:
            owner = reference()
            value = None if owner is None else vars(owner).get(name)
            found.update((id(generator), generator) for generator in torch_generators_in(value))
        return list(found.values())

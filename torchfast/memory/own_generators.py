"""Generators of random numbers that a block draws from, beside torch's default ones.

A block that draws from one of its own, ``torch.randn(..., generator=self.generator)``, or from
Python or NumPy, as in ``if random.random() < self.p``, has to draw the same numbers when it runs
again. Where generators stand in its modules is looked up in its first call, since to go through all
attributes takes longer than some blocks. So does noting where Python's and NumPy's own ones stand:
whether a block draws from these its first call shows.
"""

from __future__ import annotations

import random
import weakref
from typing import Any, final

import numpy as np
from torch import nn

from torchfast._core.generators import generators_in, has_state, same_state, state_of

_States = list[tuple[Any, Any]]


@final
class OwnGenerators:
    """Knows in which attributes of a block's modules generators stand, and which of the host's."""

    def __init__(self) -> None:
        self._places: list[tuple[weakref.ref[nn.Module], str]] | None = None
        self._of_host: list[Any] | None = None

    def of(self, module: nn.Module) -> list[Any]:
        """Return those that it is known to draw from now, each once."""
        if self._places is None:
            self._places = [
                (weakref.ref(owner), name)
                for owner in module.modules()
                for name, value in vars(owner).items()
                if any(True for _ in generators_in(value))
            ]
        found = {id(generator): generator for generator in self._of_host or ()}
        for reference, name in self._places:
            owner = reference()
            value = None if owner is None else vars(owner).get(name)
            found.update((id(generator), generator) for generator in generators_in(value))
        return list(found.values())

    def before(self) -> _States:
        """Return where the host's stand, as long as it is not known whether it draws from them."""
        if self._of_host is not None:
            return []
        # The objects whose methods the modules' functions are.
        methods: tuple[Any, ...] = random.getstate, np.random.get_state
        hosts: list[Any] = [getattr(method, "__self__", None) for method in methods]
        return [(generator, state_of(generator)) for generator in hosts if has_state(generator)]

    def drawn(self, before: _States) -> _States:
        """Return those of them that the call, which has ended, drew from."""
        if self._of_host is not None:
            return []
        drawn = [(one, state) for one, state in before if not same_state(state, state_of(one))]
        self._of_host = [generator for generator, _ in drawn]
        return drawn

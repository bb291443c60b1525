"""Generators of random numbers that a block draws from, beside torch's default ones.

A block that draws from one of its own, ``torch.randn(..., generator=self.generator)``, or from
Python or NumPy, as in ``if random.random() < self.p``, has to draw the same numbers when it runs
again. Where generators stand in its modules is looked up in its first call, since to go through all
attributes takes longer than some blocks. So does noting where Python's and NumPy's own ones stand:
whether a block draws from these its first call shows, or its code, which may do so later, as in
``if self.p > 0 and random.random() < self.p`` with a ``p`` that grows.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
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
        self._named: list[Any] = []

    def of(self, module: nn.Module) -> list[Any]:
        """Return those that it is known to draw from now, each once."""
        if self._places is None:
            self._places = [
                (weakref.ref(owner), name)
                for owner in module.modules()
                for name, value in vars(owner).items()
                if any(True for _ in generators_in(value))
            ]
            self._named = [one for one in _hosts() if any(one is n for n in _named_by(module))]
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
        return [(generator, state_of(generator)) for generator in _hosts()]

    def drawn(self, before: _States) -> _States:
        """Return those of them that the call, which has ended, drew from."""
        if self._of_host is not None:
            return []
        drawn = [(one, state) for one, state in before if not same_state(state, state_of(one))]
        self._of_host = [*self._named, *(generator for generator, _ in drawn)]
        return drawn


def _hosts() -> list[Any]:
    """Return Python's and NumPy's own generators: whose methods the modules' functions are."""
    methods: tuple[Any, ...] = random.getstate, np.random.get_state
    found: list[Any] = [getattr(method, "__self__", None) for method in methods]
    return [generator for generator in found if has_state(generator)]


def _named_by(block: nn.Module) -> Iterator[Any]:
    """Yield those of them that the code of a block names: its methods, and functions of their own.

    It may name one and never draw from it, which costs the note alone.
    """
    of_python, of_numpy = (getattr(m, "__self__", None) for m in (random.random, np.random.rand))
    left = [
        function
        for kind in {type(module) for module in block.modules()}
        for owner in kind.__mro__
        if not owner.__module__.startswith("torch.") and owner is not object
        for function in vars(owner).values()
        if isinstance(function, FunctionType)
    ]
    attributes = (value for module in block.modules() for value in vars(module).values())
    left += [value for value in attributes if type(value) is FunctionType]
    seen: set[CodeType] = set()
    while left:
        function = left.pop()
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        names = set(_names_in(function.__code__))
        values = [function.__globals__[n] for n in names if n in function.__globals__]
        if "random" in names:  # a module, or a function of one that is imported right there
            uses_numpy = any(value is np for value in values) or "numpy" in names
            yield of_numpy if uses_numpy else of_python
        for value in values:
            # By their types, since a proxy of what is gone cannot be asked.
            kind = type(value)
            if issubclass(kind, ModuleType):
                if value is random or value is np.random:
                    yield of_python if value is random else of_numpy
            elif kind is FunctionType:
                if not (value.__module__ or "").startswith("torch."):
                    left.append(value)
            elif kind in (BuiltinFunctionType, MethodType) and any(
                value.__self__ is one for one in (of_python, of_numpy)
            ):
                yield value.__self__


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)

"""Random generators that a person's own objects hold: torch's, NumPy's and Python's."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from torchfast._core.reachable import KINDS, held_of_kinds

if TYPE_CHECKING:  # numpy.random is imported where it is first asked for
    Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


_FEW = 256  # containers of more are data


def of_host() -> tuple[type[Any], ...]:
    """Return the types of Python's and NumPy's generators."""
    return np.random.Generator, np.random.RandomState, random.Random


def has_state(value: object) -> bool:
    """Whether it is a generator whose state can be asked for and brought back."""
    kind = type(value)
    if issubclass(kind, random.Random):  # others' may have none, as the system's, or another form
        return kind.getstate is random.Random.getstate
    if issubclass(kind, np.random.Generator):  # others' may have a state that is no JSON
        return type(value.bit_generator).__module__.startswith("numpy.")  # type: ignore[attr-defined]
    return issubclass(kind, torch.Generator | np.random.RandomState)


def torch_generators_in(value: object) -> Iterator[torch.Generator]:
    """Yield what an attribute holds of torch's: itself, or in a list, a tuple or a dictionary."""
    for part in _parts(value):
        if issubclass(type(part), torch.Generator):
            yield part  # type: ignore[misc]


def generators_in(value: object) -> Iterator[Generator]:
    """Yield what an attribute holds, likewise, of Python's and NumPy's too."""
    for part in _parts(value):
        if has_state(part):
            yield part  # type: ignore[misc]


def _parts(value: object) -> Iterable[object]:
    # By their types, since a proxy of what is gone cannot be asked.
    if issubclass(type(value), list | tuple) and len(value) <= _FEW:  # type: ignore[arg-type]
        return value  # type: ignore[return-value]
    if issubclass(type(value), dict) and len(value) <= _FEW:  # type: ignore[arg-type]
        return value.values()  # type: ignore[attr-defined, no-any-return]
    return (value,)


def state_of(generator: Generator) -> Any:
    """Return the state to which `set_state` brings it back; fast, since it is asked each batch."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.bit_generator.state


def same_state(a: Any, b: Any) -> bool:
    """Whether two states, as `state_of` returns them, are one."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return all(same_state(a[key], b[key]) for key in a)
    return bool(np.all(a == b))


def set_state(generator: Generator, state: Any) -> None:
    """Bring a generator to where `state_of` found it."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        version, words, gauss = state
        generator.setstate((version, tuple(words), gauss))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def packed(states: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return states as a file can have them that is read without pickle."""
    return {name: packed_state(state) for name, state in states.items()}


def set_states(generators: Mapping[str, Generator], states: Mapping[str, Any]) -> None:
    """Bring back each generator of which there is a state, as it is or packed."""
    for name, generator in generators.items():
        if name in states:
            state = states[name]
            if isinstance(state, Tensor) and not isinstance(generator, torch.Generator):
                state = json.loads(bytes(state.tolist()))
            set_state(generator, state)


def packed_state(state: Any) -> Tensor:
    """Return one state so."""
    if isinstance(state, Tensor):
        return state
    return torch.tensor(list(json.dumps(state, default=_plain).encode()), dtype=torch.uint8)


def _plain(value: Any) -> Any:
    return value.tolist()  # NumPy's arrays and numbers


def seed_generator(generator: Generator, seed: int) -> None:
    """Let a generator begin anew from a seed."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random | np.random.RandomState):
        generator.seed(seed % 2**32)
    else:
        generator.bit_generator.state = type(generator.bit_generator)(seed).state


@contextmanager
def put_back(generators: Iterable[Generator]) -> Iterator[None]:
    """Bring generators back to where they were, whatever the body draws."""
    states = [(generator, state_of(generator)) for generator in generators]
    try:
        yield
    finally:
        for generator, state in states:
            set_state(generator, state)


def held_with_generators(function: Callable[..., Any]) -> list[Any]:
    """Return what `held_by` returns, with generators of the host."""
    return held_of_kinds(function, (*KINDS, *of_host()))

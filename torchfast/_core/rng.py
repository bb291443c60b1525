"""Every random generator that a training loop draws from, as one value.

Python's ``random``, NumPy's global generator, torch's CPU generator and the default generator of
the training device. The value holds only tensors, numbers and tuples, so that a file with it
loads under ``weights_only=True``.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from torchfast._core.generators import set_state, state_of

RNGState = dict[str, Any]


def get_rng_state(device: torch.device) -> RNGState:
    """Return the state of every global generator, and of ``device``'s default one."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: RNGState = {
        "python": random.getstate(),
        "numpy": (
            str(name),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ),
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        state[device.type] = getattr(torch, device.type).get_rng_state(device)
    return state


def set_rng_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Put back what `get_rng_state` returned; a device generator that it lacks is left alone."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.cpu().numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"].cpu())
    if device.type in state:
        getattr(torch, device.type).set_rng_state(state[device.type].cpu(), device)


def same_rng_state(a: RNGState, b: RNGState) -> bool:
    """Whether no generator was drawn from between two states."""
    return all(same_generator(a, b, name) for name in a)


def same_generator(a: RNGState, b: RNGState, name: str) -> bool:
    """Whether one generator, by its key in the states, was not drawn from between them."""
    if name == "python":
        return bool(a[name] == b[name])
    if name == "numpy":
        return a[name][2:] == b[name][2:] and torch.equal(a[name][1], b[name][1])
    return torch.equal(a[name], b[name])


@contextmanager
def preserved_rng(device: torch.device) -> Iterator[None]:
    """Leave every generator as it was found, whatever the body draws."""
    state = get_rng_state(device)
    try:
        yield
    finally:
        set_rng_state(state, device)


def seed_everything(seed: int) -> None:
    """Seed every global generator."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_host(seed: int) -> None:
    """Seed the generators of the host only: `seed_everything` seeds those of all devices too."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


class DrawnFrom:
    """Where torch's generators stand, so that the same numbers can be drawn again.

    Cheaper than `get_rng_state`, and safe within the capture of a graph.

    Args:
        devices: Whose default generators count beside the host's.
        generators: Others that count, of torch, Python or NumPy.
    """

    __slots__ = ("_devices", "_host", "_own", "_states")

    def __init__(self, *devices: torch.device, generators: Iterable[Any] = ()) -> None:
        self._devices = devices
        self._host = torch.get_rng_state()
        self._states = [device_rng_state(device) for device in devices]
        self._own = [(generator, state_of(generator)) for generator in generators]

    def add(self, states: Iterable[tuple[Any, Any]]) -> None:
        """Count other generators too, with where they stood."""
        self._own += states

    @contextmanager
    def again(self) -> Iterator[None]:
        """Let the body draw what was drawn from there; what comes behind it goes on as before."""
        now = DrawnFrom(*self._devices, generators=[generator for generator, _ in self._own])
        self.restore()
        try:
            yield
        finally:
            now.restore()

    def restore(self) -> None:
        """Set the generators to there."""
        torch.set_rng_state(self._host)
        for device, state in zip(self._devices, self._states, strict=True):
            set_device_rng_state(device, state)
        for generator, state in self._own:
            set_state(generator, state)


def device_rng_state(device: torch.device) -> torch.Tensor:
    """Return the state of a device's default generator."""
    if device.type == "cuda" and device.index is not None:
        state: torch.Tensor = torch.cuda.default_generators[device.index].get_state()
        return state
    found: torch.Tensor = getattr(torch, device.type).get_rng_state(device)
    return found


def set_device_rng_state(device: torch.device, state: torch.Tensor) -> None:
    """Set a device's default generator."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.default_generators[device.index].set_state(state)
    else:
        getattr(torch, device.type).set_rng_state(state, device)

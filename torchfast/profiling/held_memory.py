"""What the memory is that a loop held before its trace began.

A trace tells when memory is taken and given back. What was taken before it (parameters, the state
of an optimizer, as a rule most of all) is one number there, and on a CPU not even that. So when the
steps that are measured begin, every model and optimizer that is alive is asked where its tensors
lie, and that is added to the trace as events of its own. They are looked for among the objects that
Python's collector knows, and, since ``gc.freeze()`` hides what it freezes, among the variables of
the modules whose code is running. Nothing is kept but addresses.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from torchfast._core.batches import tensors
from torchfast._core.storages import plain_parts
from torchfast.profiling.added_events import add_events
from torchfast.profiling.memory import GRADIENTS, INPUTS, OPTIMIZER_STATE, PARAMETERS
from torchfast.profiling.trace_events import HELD

_MOST_MODELS: Final = 1000

Place = tuple[str, int, int]  # device, address and bytes


@final
class HeldMemory:
    """Which blocks of memory are known, and since when."""

    def __init__(self) -> None:
        self._noted: list[tuple[int, str, list[Place]]] = []
        # Gradients on the host, of which the trace does not say when they are given back.
        self._watched: list[tuple[StorageWeakRef, Place]] = []
        self._step_began = 0
        self._thread = threading.get_native_id()
        self._process = os.getpid()

    def note_all(self) -> None:
        """Note what the models and optimizers that are alive hold, when the first step begins."""
        self._step_began = time.time_ns()
        by_kind: dict[str, list[Place]] = defaultdict(list)
        seen: set[tuple[str, int]] = set()
        for kind, tensor in _held(_living()):
            for storage, place in _places(tensor):
                if place[:2] in seen:
                    continue
                seen.add(place[:2])
                by_kind[kind].append(place)
                if kind == GRADIENTS and place[0] == "cpu":
                    self._watched.append((StorageWeakRef(storage), place))
        self._noted += [(self._step_began, kind, places) for kind, places in by_kind.items()]

    def note_batch(self, batch: object) -> None:
        """Note where a batch lies that the loop is about to be given."""
        with suppress(Exception):  # whatever it is made of, the loop goes on
            places = [place for tensor in tensors(batch) for _, place in _places(tensor)]
            self._noted.append((time.time_ns(), INPUTS, places))

    def note_end_of_step(self) -> None:
        """Note which gradients the step that ends has given back."""
        # Not by its address: the next gradient may lie where this one did.
        gone = [place for storage, place in self._watched if storage.expired()]
        if gone:
            # What a step begins with and has not at its end, it clears before its own backward.
            self._noted.append((self._step_began, "", gone))
            self._watched = [each for each in self._watched if not each[0].expired()]
        self._step_began = time.time_ns()

    def write_into(self, path: Path) -> int:
        """Write what was noted into the trace of the same steps, as `UserLines.write_into` does."""
        return add_events(path, self._events)

    def _events(self, base: int) -> Iterator[dict[str, Any]]:
        for moment, what, places in self._noted:
            by_device: dict[str, list[tuple[int, int]]] = defaultdict(list)
            for device, address, num_bytes in places:
                by_device[device].append((address, num_bytes))
            for device, blocks in by_device.items():
                yield {
                    "ph": "i",
                    "cat": HELD,
                    "name": f"[held] {what or 'given back'}",
                    "pid": self._process,
                    "tid": self._thread,
                    "ts": (moment - base) / 1e3,
                    "args": {"what": what, "device": device, "blocks": blocks},
                }


def _living() -> list[Any]:
    """Return the models and optimizers that are alive, each once."""
    found: dict[int, Any] = {}
    for value in _objects():
        # Not isinstance: an object that claims to be something else may run code of its own.
        if issubclass(type(value), (nn.Module, Optimizer)):
            found[id(value)] = value
    return list(found.values())


def _objects() -> Iterator[Any]:
    yield from gc.get_objects()
    # Those that are frozen are not among these. The variables of a function are left alone: to ask
    # for them makes a copy that lives as long as the function, and with it each tensor in it.
    for names in _globals():
        for value in list(names.values()):
            # A long list is data, and takes its time.
            several = type(value) in (list, tuple) and len(value) <= _MOST_MODELS
            for each in value if several else (value,):
                if issubclass(type(each), nn.Module):
                    yield from each.modules()
                else:
                    yield each


def _globals() -> list[dict[str, Any]]:
    """Return the variables of the modules whose code is running here, each once."""
    found: dict[int, dict[str, Any]] = {}
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        found[id(frame.f_globals)] = frame.f_globals
        frame = frame.f_back
    return list(found.values())


def _held(living: Iterable[Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield what is held, and as what."""
    parameters: dict[int, Tensor] = {}
    for each in living:
        with suppress(Exception):  # half built, or made of scripts: not every one is as the rest
            if isinstance(each, Optimizer):
                for group in each.param_groups:
                    parameters.update((id(p), p) for p in group["params"])
                for state in each.state.values():
                    values = state.values() if isinstance(state, Mapping) else [state]
                    for value in values:
                        for tensor in tensors(value):
                            yield OPTIMIZER_STATE, tensor
            else:
                parameters.update((id(p), p) for p in each._parameters.values() if p is not None)
                for buffer in each._buffers.values():
                    if buffer is not None:
                        yield PARAMETERS, buffer
    for parameter in parameters.values():
        yield PARAMETERS, parameter
        if parameter.is_leaf and parameter.grad is not None:
            yield GRADIENTS, parameter.grad


def _places(tensor: Tensor) -> list[tuple[torch.UntypedStorage, Place]]:
    """Return where a tensor lies; empty where it has no memory of its own."""
    found = []
    with suppress(Exception):  # fake tensors, those freed by hand, those on no device at all
        for plain in plain_parts(tensor):
            storage = plain.untyped_storage()
            if storage.nbytes() and plain.device.type in ("cpu", "cuda"):
                device = plain.device
                name = "cpu" if device.type == "cpu" else f"cuda:{device.index}"
                found.append((storage, (name, storage.data_ptr(), storage.nbytes())))
    return found

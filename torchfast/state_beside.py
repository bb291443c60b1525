"""What training changes and no model has: what the loss function keeps, and generators.

A head or a criterion in the closure of a loss function has buffers that it counts in; an encoder
that follows the model is moved on by hand; a mask is drawn from a generator in an attribute. A run
that is taken up again needs all of it, though it stands in no ``state_dict()``. What is constant (a
frozen teacher, the weights of classes) belongs to the program: it is not saved, so that a program
that was changed keeps what it has now.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torchfast._core.beside import generators_of, modules_beside, tensors_beside
from torchfast._core.building import optimized
from torchfast._core.errors import StateMismatchError
from torchfast._core.generators import packed, set_states, state_of
from torchfast._core.local import local
from torchfast.ema import WeightAverage

BESIDE: Final = "beside"
_HELD: Final = "held"  # within "rng", of which each rank has its own
# Of so many bytes a copy is kept, to see which change; larger ones are told by what torch counts.
_MOST_BYTES: Final = 1 << 26


@final
class StateBeside:
    """The tensors that a loss function keeps and training changes, and the generators of both.

    Args:
        model: What is trained.
        optimizer: Whose parameters are saved as they are, not here.
        loss_fn: As the user gave it.
        average: Of the weights, which are saved with it.

    Synchronizes: At construction, where the loss function keeps tensors on a device.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: Callable[..., Any],
        average: WeightAverage,
    ) -> None:
        self._model, self._optimizer, self._loss_fn = model, optimizer, loss_fn
        self._average = average
        self._changed: set[str] = set()
        self._before: dict[str, Tensor | tuple[int, int]] = {}
        left = _MOST_BYTES
        tensors = self._tensors()
        for name in sorted(tensors, key=lambda name: tensors[name].nbytes):
            tensor = tensors[name]
            left -= tensor.nbytes
            self._before[name] = _marks(tensor) if left < 0 else _copy(tensor)

    def modules(self) -> list[nn.Module]:
        """Return the modules that the loss function uses and the model does not have."""
        return [*modules_beside(self._model, self._loss_fn).values()]

    def save(self) -> dict[str, Tensor]:
        """Return what has changed since this was made, by where it was found. Synchronizes: Yes."""
        tensors = self._tensors()
        self._changed |= {
            name for name, tensor in tensors.items() if self._is_changed(name, tensor)
        }
        return {name: tensor.detach() for name, tensor in tensors.items() if name in self._changed}

    def generators(self) -> dict[str, dict[str, Tensor]]:
        """Return what goes into the state of random generators; empty without any."""
        found = generators_of(self._model, self._loss_fn)
        states = {name: state_of(generator) for name, generator in found.items()}
        return {_HELD: packed(states)} if states else {}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise unless what was saved fits what is here, as far as that is here.

        Raises:
            StateMismatchError: A tensor of another shape, or something else than a mapping.
        """
        given = state.get(BESIDE, {})
        if not isinstance(given, Mapping):
            raise StateMismatchError(
                f"state's {BESIDE!r} must be a mapping, got {type(given).__name__}; load what "
                "state_dict() returned"
            )
        tensors = self._tensors()
        for name, value in given.items():
            if name in tensors and value.shape != tensors[name].shape:
                raise StateMismatchError(
                    f"{name!r} of what the loss function keeps has shape {tuple(value.shape)}, "
                    f"expected {tuple(tensors[name].shape)}; build the loss function as it was"
                )

    def load(self, state: Mapping[str, Any]) -> None:
        """Put back what `save` and `generators` returned; what is here and not there stays."""
        tensors, given = self._tensors(), state.get(BESIDE, {})
        with torch.no_grad():
            for name in given.keys() & tensors.keys():
                tensors[name].copy_(given[name])
        self._changed |= given.keys()
        generators = generators_of(self._model, self._loss_fn)
        states = state["rng"].get(_HELD, {})
        set_states(generators, states)
        gone = [*sorted(given.keys() - tensors.keys()), *sorted(states.keys() - generators.keys())]
        new = sorted(generators.keys() - states.keys())
        if gone or new:
            warnings.warn(
                "the loss function or the model keeps other things beside the parameters than the "
                f"one that was saved: not there any more {gone}, and without a saved state {new}, "
                "which go on from where they are; build both as they were",
                stacklevel=4,
            )

    def _tensors(self) -> dict[str, Tensor]:
        """Return what may change, by where it was found."""
        models = filter(None, (self._model, self._average.current()))
        mine = {id(t) for m in models for t in (*m.parameters(), *m.buffers())}
        mine |= {id(parameter) for parameter in optimized(self._optimizer)}
        found: dict[str, Tensor] = {}
        modules = modules_beside(self._model, self._loss_fn)
        # Where another optimizer trains a part, that is saved with it.
        others = {
            _part(name)
            for name, module in modules.items()
            if any(p.requires_grad and id(p) not in mine for p in module.parameters(recurse=False))
        }
        for name, module in modules.items():
            if module.training and _part(name) not in others:
                found |= {f"{name}.{key}": tensor for key, tensor in _persistent(module)}
        held = tensors_beside(self._loss_fn).items()
        found |= {name: t for name, t in held if t.is_leaf and not t.requires_grad}
        return {
            name: tensor
            for name, tensor in found.items()
            if id(tensor) not in mine and _has_values(tensor)
        }

    def _is_changed(self, name: str, tensor: Tensor) -> bool:
        before = self._before.get(name)
        if isinstance(before, Tensor):
            now = local(tensor).detach().cpu()
            return now.dtype != before.dtype or not torch.equal(now, before)
        return before != _marks(tensor)  # one that is new, too


def _part(name: str) -> str:
    return ".".join(name.split(".")[:2])


def _has_values(tensor: Tensor) -> bool:
    return not is_lazy(tensor) and tensor.layout is torch.strided and not tensor.is_meta


def _copy(tensor: Tensor) -> Tensor:
    return local(tensor).detach().to("cpu", copy=True)


def _persistent(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for table in (module._parameters, module._buffers):
        for name, tensor in table.items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                yield name, tensor


def _marks(tensor: Tensor) -> tuple[int, int]:
    """Return what another value mostly changes: torch's count of writes, and the address."""
    return tensor._version, local(tensor).data_ptr()

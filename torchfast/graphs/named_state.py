"""The state that a step changes in place: what is named can be watched, saved and put back.

A graph reads and writes memory at fixed addresses. So before each replay it is asked whether the
state still lies where it did (`NamedState.moved`) and whether anything that was frozen into the
graph has another value (`NamedState.mode`, `NamedState.hyperparameters`). All of that runs on the
host at every step, so it is written for speed: flat lists, compared by loops in C.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchfast.graphs.learning_rates import LearningRates

_TRAINING = operator.attrgetter("training")
_REQUIRES_GRAD = operator.attrgetter("requires_grad")
# Of a parameter group: what the watch over tensors sees, what is on the device, and what only
# schedulers read.
_NOT_FROZEN = frozenset(
    ("params", "lr", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
)
_SCALER_SETTINGS = operator.attrgetter("_growth_factor", "_backoff_factor", "_growth_interval")

Table = dict[str, Any]


@final
class NamedState:
    """Modules, optimizers, gradient scalers and generators of a step.

    Args:
        holders: They, in any order.

    Raises:
        TypeError: Something else among them.
    """

    def __init__(self, holders: Iterable[object]) -> None:
        self.modules: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.scalers: list[torch.amp.GradScaler] = []
        self.generators: list[torch.Generator] = []
        for position, holder in enumerate(holders):
            if isinstance(holder, nn.Module):
                self.modules.append(holder)
            elif isinstance(holder, Optimizer):
                self.optimizers.append(holder)
            elif isinstance(holder, torch.amp.GradScaler):
                self.scalers.append(holder)
            elif isinstance(holder, torch.Generator):
                self.generators.append(holder)
            else:
                raise TypeError(
                    f"state[{position}] must be a module, an optimizer, a torch.amp.GradScaler or "
                    f"a torch.Generator, got {type(holder).__name__}"
                )
        self.rates: list[LearningRates] = []  # of the optimizers that can read them on the device
        self.refresh()

    def refresh(self) -> None:
        """Take the state as it is now: what comes after is compared with it."""
        every = dict.fromkeys(m for root in self.modules for m in root.modules())
        self.every_module = list(every)
        self._tables: list[Table] = [
            table
            for module in every
            for table in (module._parameters, module._buffers, module._modules)
            if table
        ]
        self._buffers = [
            (module._buffers, name, buffer)
            for module in every
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._groups = [group for o in self.optimizers for group in o.param_groups]
        self._params = [list(group["params"]) for group in self._groups]
        self._states = self._optimizer_states()
        self._state_of: list[dict[Tensor, Table]] = [dict(o.state) for o in self.optimizers]
        self._held = self._holdings()
        of_modules = [value for value in self._held if isinstance(value, Tensor)]
        in_place = {id(t): t for t in chain(of_modules, *self._params)}
        self.tensors = list(in_place.values())
        self.parameters = [t for t in self.tensors if isinstance(t, nn.Parameter)]
        self._addresses = [*map(_address, self.tensors)]

    # -- What a graph depends on -----------------------------------------------------------------

    def mode(self) -> tuple[Any, ...]:
        """Return what steers the step's control flow, hashable: a graph for each value."""
        return (
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cuda"),
            torch.are_deterministic_algorithms_enabled(),
            *map(_TRAINING, self.every_module),
            *map(_REQUIRES_GRAD, self.parameters),
        )

    def hyperparameters(self) -> list[Any]:
        """Return what an update reads on the host, learning rates on the device apart."""
        on_device = {id(group) for rates in self.rates for group in rates.groups}
        values = [
            _frozen(value)
            for group in self._groups
            for key, value in group.items()
            if key not in _NOT_FROZEN or (key == "lr" and id(group) not in on_device)
        ]
        return [*values, *map(_SCALER_SETTINGS, self.scalers)]

    def moved(self) -> str | None:
        """Return what is no longer where it was at the last `refresh`; None if all is."""
        if not _same(self._holdings(), self._held):
            return "a module, parameter, buffer or entry of the optimizer's state was replaced"
        groups = [group for o in self.optimizers for group in o.param_groups]
        if not _same(groups, self._groups):
            return "the optimizer's parameter groups were replaced, or one was added"
        if not all(
            _same(g["params"], known) for g, known in zip(groups, self._params, strict=True)
        ):
            return "the parameters of an optimizer's group were replaced"
        if [*map(_address, self.tensors)] != self._addresses:
            return "the memory of a parameter or buffer was replaced"
        return None

    def _holdings(self) -> list[Any]:
        values = list(chain.from_iterable(map(dict.values, self._tables)))
        if self.optimizers:
            values += self._optimizer_states()
            values += chain.from_iterable(map(dict.values, self._states))
        return values

    def _optimizer_states(self) -> list[Table]:
        return [table for o in self.optimizers for table in o.state.values()]

    # -- What is brought back to its place ---------------------------------------------------------

    def settle_buffers(self) -> None:
        """Write buffers that the step replaced by new tensors to where the old ones lie.

        Captured, the write is part of the graph, so the next replay reads what this one made.
        """
        for table, name, old in self._buffers:
            new = table.get(name)
            if new is not old and isinstance(new, Tensor) and _alike(old, new):
                with torch.no_grad():
                    old.copy_(new)
                table[name] = old

    def settle_loaded(self) -> None:
        """Write optimizer state that was loaded to where the old state lies, if it has its form.

        ``load_state_dict`` puts new tensors in the place of those that a graph reads and writes.
        """
        for optimizer, known in zip(self.optimizers, self._state_of, strict=True):
            now = optimizer.state
            if now.keys() != known.keys() or not all(_fits(known[p], now[p]) for p in known):
                continue
            for parameter, table in known.items():
                for key, value in now[parameter].items():
                    if not isinstance(value, Tensor):
                        table[key] = value
                    elif value is not table[key]:
                        table[key].copy_(value)
            now.clear()
            now.update(known)  # in its order too

    # -- What is saved and put back --------------------------------------------------------------

    def everything(self) -> list[Tensor]:
        """Return every tensor of the state that a step can write to, each once."""
        found = {id(t): t for t in self.tensors if _is_writable(t)}
        for table in self._optimizer_states():
            found.update((id(v), v) for v in table.values() if isinstance(v, Tensor))
        for scaler in self.scalers:
            for tensor in (scaler._scale, scaler._growth_tracker):
                if tensor is not None:
                    found[id(tensor)] = tensor
        return list(found.values())

    @contextmanager
    def rates_on_device(self) -> Iterator[None]:
        """Let the groups hold device tensors as learning rates."""
        with ExitStack() as stack:
            for rates in self.rates:
                stack.enter_context(rates.on_device())
            yield


def _fits(old: Table, new: Table) -> bool:
    """Whether each entry of a loaded table can be written over the old one."""
    return old.keys() == new.keys() and all(
        isinstance(old[key], Tensor) == isinstance(value, Tensor)
        and (not isinstance(value, Tensor) or _alike(old[key], value))
        for key, value in new.items()
    )


def _same(now: list[Any], then: list[Any]) -> bool:
    return len(now) == len(then) and all(map(operator.is_, now, then))


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr()


def _frozen(value: Any) -> Any:
    """Return a hyperparameter as something whose comparison reads no tensor."""
    if isinstance(value, Tensor):
        return id(value)
    return tuple(map(_frozen, value)) if isinstance(value, tuple) else value


def _is_writable(tensor: Tensor) -> bool:
    """Whether torch would let a step write to it in place."""
    if tensor.layout is not torch.strided:
        return True
    return not any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True))


def _alike(old: Tensor, new: Tensor) -> bool:
    return (
        old.shape == new.shape
        and old.dtype == new.dtype
        and old.device == new.device
        and old.layout is new.layout is torch.strided
    )

"""Whether anything has changed that a graph was captured from.

A graph reads and writes memory at fixed addresses, and every number that the host knew is frozen
into it. All of this is looked at before each replay, on the host, so it is written for speed: flat
lists, read and compared by loops in C.

In a steady run nothing has changed, and then every object is the very object that it was. That is
quicker to see than what has become of what, so a `Glance` asks for that alone. Where it is not so,
a look at each thing finds out whether something has changed or only stands for the same.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torchfast._core.compare import same_objects
from torchfast.graphs.attributes import Attributes
from torchfast.graphs.holders import is_own
from torchfast.graphs.named_state import NamedState, Table
from torchfast.graphs.value_forms import contents, is_frozen

# What helps where a value changes too often for a graph that holds it.
FILL = "; keep a value that changes so often in a tensor on the device and fill that"
_TRAINING = operator.attrgetter("training")
_REQUIRES_GRAD = operator.attrgetter("requires_grad")
_PARAMETER_HOOKS = operator.attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
# Of a parameter group: what is watched elsewhere, and what only schedulers read.
NOT_FROZEN = frozenset(
    ("params", "lr", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
)
_END = object()
_STATE_AND_GROUPS = operator.attrgetter("state", "param_groups")
_NUM_HOOKS = operator.attrgetter("next_id")
_RATE = operator.itemgetter("lr")
_OF_C: Any = torch._C
# Settings of the thread and the process by which torch chooses what to run, each by a function of
# C: torch's own in Python take several times as long.
_SURROUNDINGS: tuple[Callable[[], object], ...] = (
    torch.is_grad_enabled,
    _OF_C._get_deterministic_algorithms,
    torch.get_default_dtype,
    _OF_C._get_flash_sdp_enabled,
    _OF_C._get_mem_efficient_sdp_enabled,
    _OF_C._get_math_sdp_enabled,
    _OF_C._get_cudnn_sdp_enabled,
    partial(_OF_C._get_fp32_precision_getter, "cuda", "matmul"),
    partial(_OF_C._get_fp32_precision_getter, "cuda", "conv"),
)
_SCALER_SETTINGS = operator.attrgetter("_growth_factor", "_backoff_factor", "_growth_interval")


@final
class StateWatch:
    """Looks at a named state before each replay.

    Args:
        state: Whose.
        device: Where the step runs.

    Attributes:
        attributes: What else is read on the host.
    """

    def __init__(self, state: NamedState, device: torch.device) -> None:
        self._state, self._device = state, device
        self.attributes = Attributes(state.function, device)
        self.refresh()

    def refresh(self) -> None:
        """Take the state as it is now: what comes after is compared with it."""
        self._take()
        while self._state.take_modules(self.attributes.modules):  # which may lead to more
            self._take()

    def _take(self) -> None:
        state = self._state
        state.refresh()
        modules = state.every_module
        self._tables: list[dict[str, Any]] = [
            table
            for module in modules
            for table in (module._parameters, module._buffers, module._modules)
            if table
        ]
        # Not the groups themselves, which the loading of a state replaces by others.
        self._params = [list(group["params"]) for group in state.groups()]
        self._states = state.optimizer_states()
        self._held = self._holdings()
        # Others, such as sparse and sharded tensors, have no one address; they are told by being
        # the same object.
        self._placed = [
            t
            for t in state.tensors
            if type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided
        ]
        self._addresses = [*map(Tensor.data_ptr, self._placed)]
        self._settings = [_Settings(group) for group in state.own_groups()]
        self._hooks = [getattr(m, name) for m in modules for name in _MODULE_HOOKS]
        hooks = _own_in(*self._hooks, *self._hooks_of_parameters())
        of_updates = [getattr(o, name) for o in state.optimizers for name in _OPTIMIZER_HOOKS]
        self._hooks += of_updates
        self.attributes.refresh(modules, hooks, [*_own_in(*of_updates), *state.optimizers])
        is_beside = self._device.type != "cpu"
        self._on_host = [*filter(is_frozen, state.tensors)] if is_beside else []

    def mode(self) -> tuple[Any, ...]:
        """Return what steers the step's control flow, hashable: a graph for each value."""
        return (
            *map(operator.call, _SURROUNDINGS),
            torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cuda"),
            *map(_TRAINING, self._state.every_module),
            *map(_REQUIRES_GRAD, self._state.parameters),
        )

    def glance(self) -> Glance | None:
        """Return what tells at once that all is as it is now; None if only a closer look can."""
        if not hasattr(RemovableHandle, "next_id"):  # a torch that counts its hooks in another way
            return None
        state = self._state
        on_device = {id(group) for rates in state.rates for group in rates.groups}
        settings, rated = [], []
        for group in state.own_groups():
            names = [name for name in group if name not in NOT_FROZEN]
            rate = group.get("lr")
            if id(group) in on_device and rate is not None and not isinstance(rate, Tensor):
                rated.append(group)  # the rate is brought up to date before each replay
            elif rate is not None:
                names.append("lr")
            settings.append((group, names or ["params"]))
        # What can change and stay the same object is to be compared by what it is.
        of_groups = [group[name] for group, names in settings for name in names if name != "params"]
        is_plain = all(_is_plain(value) or isinstance(value, Tensor) for value in of_groups)
        if is_plain and all("training" in vars(module) for module in state.every_module):
            return Glance(state, self, settings=settings, rated=rated)
        return None

    def frozen(self) -> list[Any]:
        """Return hyperparameters, settings of scalers, and what hooks there are."""
        groups = self._state.own_groups()
        values: list[Any] = []
        try:
            pairs = zip(self._settings, groups, strict=False)
            values += [setting.read(group) for setting, group in pairs]
        except KeyError:
            values.append(None)  # one was taken away
        on_device = {id(group) for rates in self._state.rates for group in rates.groups}
        # Of a rate on the device only whether it is a tensor of the user's.
        values += [
            _frozen(rate) if id(group) not in on_device or isinstance(rate, Tensor) else None
            for group in groups
            if (rate := group.get("lr")) is not None
        ]
        values += map(_SCALER_SETTINGS, self._state.scalers)
        values += map(contents, self._on_host)
        # Of hooks their numbers, which are given once.
        values += map(tuple, filter(None, self._hooks))
        values += map(tuple, self._hooks_of_parameters())
        return values

    def is_frozen_as(self, before: list[Any]) -> bool:
        """Whether what is read on the host is as it was."""
        try:
            return self.frozen() == before
        except (RuntimeError, ValueError):  # a number has become a tensor or an array
            return False

    def unlike(self, before: list[Any]) -> str | None:
        """Return what is read on the host and has changed, in words; None if nothing has."""
        if not self.is_frozen_as(before):
            return "a hyperparameter, a hook or a tensor on the host changed"
        return self.changed_value()

    def changed_value(self) -> str | None:
        """Return which value in attributes is another one, in words; None if none is."""
        name = self.attributes.changed()
        return None if name is None else f"{name} changed"

    def notes(self) -> list[str]:
        """Return what somebody should know of whom a graph serves, in words."""
        num = sum(map(len, [*self._hooks, *self._hooks_of_parameters()]))
        of_hooks = f"{num} hooks: what they launch is replayed, their Python is not run"
        return [of_hooks] * bool(num) + self.attributes.notes()

    def _hooks_of_parameters(self) -> Iterator[Any]:
        return filter(None, chain.from_iterable(map(_PARAMETER_HOOKS, self._state.parameters)))

    def moved(self) -> str | None:
        """Return what is no longer where it was at the last `refresh`; None if all is."""
        if not same_objects(self._holdings(), self._held):
            return "a module, parameter, buffer or entry of the optimizer's state was replaced"
        groups = self._state.groups()
        if len(groups) != len(self._params):
            return "a parameter group was added to the optimizer, or taken away"
        pairs = zip(groups, self._params, strict=True)
        if not all(same_objects(group["params"], known) for group, known in pairs):
            return "the parameters of an optimizer's group were replaced"
        if [*map(Tensor.data_ptr, self._placed)] != self._addresses:
            return "the memory of a parameter or buffer was replaced"
        return None

    def _holdings(self) -> list[Any]:
        values = list(chain.from_iterable(map(dict.values, self._tables)))
        if self._state.optimizers:
            values += self._state.optimizer_states()
            values += chain.from_iterable(map(dict.values, self._states))
        return values


@final
class Glance:
    """A named state as it was, to be told from one that may have changed.

    Each thing is read by a function of C, and all of them by a loop of C.

    Args:
        state: Whose.
        watch: What looks closer.
        settings: Parameter groups with the names of what a graph holds of them.
        rated: Parameter groups whose learning rate may be another one of the same type.
    """

    def __init__(
        self,
        state: NamedState,
        watch: StateWatch,
        *,
        settings: list[tuple[Table, list[str]]],
        rated: list[Table],
    ) -> None:
        optimizers = [*state.optimizers, *state.updated_after]
        hooks = [*watch._hooks, *watch._hooks_of_parameters()]
        params = [group["params"] for group in state.groups()]
        self._no_hooks = [held for held in hooks if not held]
        # What is compared by its value: nothing that could be a tensor.
        self._read, self._of = _unzipped(
            (torch.is_autocast_enabled, "cuda"),
            (torch.get_autocast_dtype, "cuda"),
            (_NUM_HOOKS, RemovableHandle),  # a higher one with each hook, on whatever
            *watch.attributes.sizes(),
            *((len, held) for held in params),
            *((tuple, held) for held in (*state.own_groups(), *filter(None, hooks))),
            *((_SCALER_SETTINGS, scaler) for scaler in state.scalers),
            *((_REQUIRES_GRAD, parameter) for parameter in state.parameters),
            *((Tensor.data_ptr, tensor) for tensor in watch._placed),
            *((contents, tensor) for tensor in watch._on_host),
        )
        # What has to be the very object that it was, in tables as they are now.
        self._tables: list[Iterable[Any]] = [
            *(table.values() for table in (*watch._tables, *watch._states)),
            *(optimizer.state.values() for optimizer in state.optimizers),
            *(optimizer.param_groups for optimizer in optimizers),
            *params,
        ]
        self._take, self._out_of = _unzipped(
            *((operator.itemgetter("params", *names), group) for group, names in settings),
            *((_STATE_AND_GROUPS, optimizer) for optimizer in optimizers),
            (tuple, (_END,)),  # or what is gone at the end would not be missed
        )
        self._rated = rated
        self._attributes = watch.attributes
        self._values, self._objects = self._values_now(), [*self._objects_now()]

    def is_as_it_was(self) -> bool:
        """Whether all is as it was; if not, it may be all the same."""
        try:
            return (
                self._values_now() == self._values
                and not any(self._no_hooks)
                and all(map(operator.is_, self._objects_now(), self._objects))
            )
        except (AttributeError, KeyError, RuntimeError, ValueError):
            return False  # one is gone, or is a tensor or an array now

    def _values_now(self) -> list[Any]:
        return [
            *map(operator.call, _SURROUNDINGS),
            *map(type, map(_RATE, self._rated)),
            *map(operator.call, self._read, self._of),
        ]

    def _objects_now(self) -> Iterator[Any]:
        attributes = self._attributes
        # Theirs as they are noted now: what is noted anew is not what it was.
        of_attributes = map(operator.call, attributes.take, attributes.out_of)
        taken = map(operator.call, self._take, self._out_of)
        return chain.from_iterable(chain(of_attributes, self._tables, taken))


def _own_in(*tables: dict[int, Any]) -> list[Any]:
    """Return the hooks of the user's own."""
    return [hook for table in tables for hook in table.values() if is_own(hook)]


def _unzipped(
    *pairs: tuple[Callable[[Any], Any], Any],
) -> tuple[list[Callable[[Any], Any]], list[Any]]:
    return [function for function, _ in pairs], [value for _, value in pairs]


@final
class _Settings:
    """What of a parameter group is frozen into a graph: read by one call where that tells all.

    Args:
        group: Whose names are taken; its values may change.
    """

    def __init__(self, group: dict[str, Any]) -> None:
        self._entries = [*group]
        self._names = [name for name in group if name not in NOT_FROZEN]
        is_plain = len(self._names) > 1 and all(_is_plain(group[name]) for name in self._names)
        self._get = operator.itemgetter(*self._names) if is_plain else None

    def read(self, group: dict[str, Any]) -> Any:
        """Return the values, and the names where there are others."""
        names = self._names
        if [*group] != self._entries:
            names = [name for name in group if name not in NOT_FROZEN]
        if self._get is None:
            return names, [_frozen(group[name]) for name in self._names]
        values = self._get(group)
        # The comparison of a tensor would make the host wait, and 0.1 equals its float32.
        if Tensor in map(type, values):
            values = tuple(map(_frozen, values))
        return names, values


def _is_plain(value: Any) -> bool:
    """Whether a value is another object if it has changed."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _frozen(value: Any) -> Any:
    """Return a hyperparameter as something whose comparison reads no tensor."""
    if isinstance(value, Tensor):
        return id(value)
    return tuple(map(_frozen, value)) if isinstance(value, tuple | list) else value

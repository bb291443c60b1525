"""The state that a step changes in place: what is named can be watched, saved and put back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchfast._core.batches import tensors
from torchfast._core.generators import torch_generators_in
from torchfast._core.reachable import used_by
from torchfast._core.storages import is_expanded
from torchfast.graphs.holders import TENSOR, UNSURE, Kinds, is_tensor
from torchfast.graphs.learning_rates import LearningRates
from torchfast.graphs.run_ends import digest

Table = dict[str, Any]
_DIGESTED = 2**21  # elements at a time: a step that warms up has little memory to spare
_NEVER = -1  # the version of a tensor that is none of its own


@final
class NamedState:
    """Modules, optimizers, gradient scalers, generators and tensors of a step.

    Generators that stand in attributes of its modules, or in lists, tuples and dictionaries there,
    are part of it too.

    Args:
        holders: They, in any order.
        found: Modules, tensors, generators and schedulers that nobody named, with what
            ``function`` uses, its optimizers too. A tensor among them is watched, but it is saved
            and compared only once the step has written to it: it may be data.
        updated_after: Optimizers that update behind the step: their parameters are part of the
            state, what else they hold is not.
        function: The user's, whose closure and global names are looked through, and whose Python
            values are watched.

    Raises:
        TypeError: Something else among them.
    """

    def __init__(
        self,
        holders: Iterable[object],
        *,
        found: Iterable[object] = (),
        updated_after: Sequence[Optimizer] = (),
        function: object = None,
    ) -> None:
        if not isinstance(holders, Iterable) or isinstance(holders, nn.Module | Tensor):
            raise TypeError(
                f"state must be a list of modules, optimizers and so on, got "
                f"{type(holders).__name__}; write state=[...]"
            )
        self.modules: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.scalers: list[torch.amp.GradScaler] = []
        self.generators: list[torch.Generator] = []  # with those that modules hold now
        self._generators: list[torch.Generator] = []
        self.schedulers: list[LRScheduler] = []  # which a step must leave alone
        self.loose: list[Tensor] = []
        self.updated_after = list(updated_after)
        self.function = function
        for position, holder in enumerate(holders):
            if isinstance(holder, nn.Module):
                self.modules.append(holder)
            elif isinstance(holder, Optimizer):
                self.optimizers.append(holder)
            elif isinstance(holder, torch.amp.GradScaler):
                if holder.is_enabled():  # one that is not holds nothing
                    self.scalers.append(holder)
            elif isinstance(holder, torch.Generator):
                self._generators.append(holder)
            elif isinstance(holder, Tensor):
                self.loose.append(holder)
            else:
                raise TypeError(
                    f"state[{position}] must be a module, an optimizer, a torch.amp.GradScaler, a "
                    f"torch.Generator or a tensor, got {type(holder).__name__}"
                )
        self.found: list[tuple[Tensor, int]] = []
        self._take_found([*found, *self._used()])
        self.rates: list[LearningRates] = []  # of the optimizers that can read them on the device
        self.refresh()

    def refresh(self) -> None:
        """Take modules, parameters and buffers as they are now, of modules used since too."""
        self._take_found(value for value in self._used() if isinstance(value, nn.Module))
        # Scripted modules keep no tables in Python: only their tensors are known.
        every = dict.fromkeys(
            m
            for root in self.modules
            for m in root.modules()
            if not isinstance(m, torch.jit.ScriptModule)
        )
        self.every_module = list(every)
        held = [
            generator
            for module in every
            for value in vars(module).values()
            for generator in torch_generators_in(value)
        ]
        self.generators = list({id(g): g for g in (*self._generators, *held)}.values())
        self._buffers = [
            (module._buffers, name, buffer)
            for module in every
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        found: dict[int, Tensor] = {}
        for module in every:
            for table in (module._parameters, module._buffers):
                found.update((id(t), t) for t in table.values() if t is not None)
        for root in self.modules:
            found.update((id(t), t) for t in (*root.parameters(), *root.buffers()))
        for group in self.groups():
            found.update((id(p), p) for p in group["params"])
        found.update((id(t), t) for t in self.loose)
        found.update((id(t), t) for t, _ in self.found)
        self.tensors = list(found.values())
        self.parameters = [
            t
            for t in self.tensors
            if t.is_leaf and (t.requires_grad or isinstance(t, nn.Parameter))
        ]
        self._state_of: list[dict[Tensor, Table]] = [dict(o.state) for o in self.optimizers]

    def take_modules(self, modules: Iterable[nn.Module]) -> bool:
        """Take modules that only values lead to, as in a list; return whether any is new."""
        every = {*map(id, self.every_module), *map(id, self.modules)}
        # Torch itself cannot go through one that has no hash.
        new = [m for m in modules if id(m) not in every and type(m).__hash__ is not None]
        self._take_found(new)
        return bool(new)

    def _used(self) -> list[object]:
        return [] if self.function is None else used_by(self.function)

    def _take_found(self, values: Iterable[object]) -> None:
        known = {*map(id, self._named()), *(id(tensor) for tensor, _ in self.found)}
        for value in values:
            if id(value) in known:
                continue
            known.add(id(value))
            if isinstance(value, nn.Module):
                self.modules.append(value)
            elif isinstance(value, Optimizer):
                self.optimizers.append(value)
            elif isinstance(value, torch.amp.GradScaler):
                self.scalers += [value] if value.is_enabled() else []
            elif isinstance(value, torch.Generator):
                self._generators.append(value)
            elif isinstance(value, LRScheduler):
                self.schedulers.append(value)
            elif isinstance(value, Tensor) and not value.is_inference():
                self.found.append((value, value._version))

    def _named(self) -> Iterator[object]:
        yield from (*self.modules, *self.optimizers, *self.updated_after, *self.scalers)
        yield from (*self._generators, *self.schedulers, *self.loose)

    def groups(self) -> list[Table]:
        """Return the groups of all optimizers, also of those that update after the step."""
        return [g for o in (*self.optimizers, *self.updated_after) for g in o.param_groups]

    def own_groups(self) -> list[Table]:
        """Return the parameter groups that the step itself reads."""
        return [g for o in self.optimizers for g in o.param_groups]

    def optimizer_states(self) -> list[Table]:
        """Return each parameter's entry in the state of its optimizer."""
        return [table for o in self.optimizers for table in o.state.values()]

    def everything(self) -> list[Tensor]:
        """Return every tensor of the state that a step can write to, each once."""
        found = {id(t): t for t in self.tensors}
        for tensor, version in self.found:
            if tensor._version == version and not tensor.requires_grad:
                del found[id(tensor)]
        kinds = Kinds()
        for module in self.every_module:  # what it keeps without calling it a buffer
            for value in vars(module).values():
                kind = kinds[type(value)]
                if kind == TENSOR or (kind == UNSURE and is_tensor(value)):
                    found[id(value)] = value
        for holder in (*self.optimizer_states(), *self.own_groups()):
            for key, value in holder.items():
                if type(value) is Tensor:  # as nearly all are
                    found[id(value)] = value
                elif key != "params":
                    found.update((id(t), t) for t in tensors(value))
        for scaler in self.scalers:
            for scalar in (scaler._scale, scaler._growth_tracker):
                if scalar is not None:
                    found[id(scalar)] = scalar
        return [tensor for tensor in found.values() if _is_writable(tensor)]

    def names_of(self, values: Iterable[Tensor]) -> list[str]:
        """Return what tensors of the state are called, or which shape they have."""
        names: dict[int, str] = {}
        inner = {m for root in self.modules for m in root.modules() if m is not root}
        roots = [m for m in self.modules if m not in inner]
        # A loss function is not another one of them.
        models = [m for m in roots if any(True for _ in chain(m.parameters(), m.buffers()))]
        for root in roots:
            of = ""
            if len(models) > 1 and root in models:
                of = f" of {type(root).__name__}, model {models.index(root)}"
            for path, value in _held(root):
                names.setdefault(id(value), f"{path}{of}")
        for parameter in self.parameters:
            if parameter.grad is not None:
                names[id(parameter.grad)] = f"the gradient of {_named(parameter, names)}"
        for optimizer in self.optimizers:
            for number, group in enumerate(optimizer.param_groups):
                for key, value in group.items():
                    names[id(value)] = f"{key} of parameter group {number}"
            for owner, table in optimizer.state.items():
                of = _named(owner, names) if isinstance(owner, Tensor) else type(owner).__name__
                for key, value in table.items():
                    names.update((id(one), f"{key} of {of}") for one in tensors(value))
        names.update((id(scaler._scale), "the loss scale") for scaler in self.scalers)
        return [_named(value, names) for value in values]

    @contextmanager
    def noting_writes(self, device: torch.device) -> Iterator[None]:
        """Find out which tensors that nobody named the body, a step, writes to.

        Their versions do not tell of writes through ``.data``, nor of all that foreach does.

        Synchronizes: If there are any on the device.
        """
        unsure = [
            (place, tensor)
            for place, (tensor, version) in enumerate(self.found)
            if tensor._version == version and tensor.device == device and tensor.numel()
            if type(tensor) in (Tensor, nn.Parameter) and _is_writable(tensor)
        ]
        before = [_digest(tensor) for _, tensor in unsure]
        yield
        for (place, tensor), old in zip(unsure, before, strict=True):
            if not torch.equal(old, _digest(tensor)):
                self.found[place] = tensor, _NEVER

    # -- What is brought back to its place ---------------------------------------------------------

    def settle_buffers(self) -> None:
        """Write buffers that the step replaced by new tensors to where the old ones lie.

        Captured, the write is part of the graph, so the next replay reads what this one made.
        """
        replaced = [
            (table, name, old, new)
            for table, name, old in self._buffers
            if (new := table.get(name)) is not old
            and isinstance(new, Tensor)
            and _alike(old, new)
            and _is_writable(old)
        ]
        with torch.no_grad():
            # One may have become what another was, or a view of it: all are read before any write.
            places = {old.untyped_storage().data_ptr() for _, _, old, _ in replaced}
            values = [
                made.clone() if made.untyped_storage().data_ptr() in places else made
                for _, _, _, made in replaced
            ]
            for (table, name, place, _), value in zip(replaced, values, strict=True):
                table[name] = place.copy_(value)

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

    def fill_rates(self) -> None:
        """Bring the learning rates on the device to the floats that stand in the groups."""
        for rates in self.rates:
            rates.fill()

    @property
    def changes_rates(self) -> bool:
        """Whether a step has changed learning rates itself."""
        return any(rates.are_changed for rates in self.rates)

    @contextmanager
    def rates_on_device(self, *, is_recorded: bool = False) -> Iterator[None]:
        """Let the groups hold device tensors as learning rates; see `LearningRates.on_device`."""
        with ExitStack() as stack:
            for rates in self.rates:
                stack.enter_context(rates.on_device(is_recorded=is_recorded))
            yield


def _held(root: nn.Module) -> Iterator[tuple[str, object]]:
    yield from root.named_parameters()
    yield from root.named_buffers()
    for path, module in root.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):
            for name, value in vars(module).items():
                yield f"{path}.{name}" if path else name, value


def _named(tensor: Tensor, names: dict[int, str]) -> str:
    return names.get(id(tensor), f"a tensor of shape {tuple(tensor.shape)}")


def _fits(old: Table, new: Table) -> bool:
    """Whether each entry of a loaded table can be written over the old one."""
    return old.keys() == new.keys() and all(
        isinstance(old[key], Tensor) == isinstance(value, Tensor)
        and (not isinstance(value, Tensor) or _alike(old[key], value))
        for key, value in new.items()
    )


def _digest(tensor: Tensor) -> Tensor:
    return digest(tensor.detach().reshape(-1), _DIGESTED)


def _is_writable(tensor: Tensor) -> bool:
    """Whether torch would let a step write to it in place, and says how it lies."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_inference():
        return False
    return not is_expanded(tensor)


def _alike(old: Tensor, new: Tensor) -> bool:
    return (
        old.shape == new.shape
        and old.dtype == new.dtype
        and old.device == new.device
        and old.layout is new.layout is torch.strided
    )

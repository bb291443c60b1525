"""What a forward and a backward may change, saved on the side and put back bit for bit.

A search runs the user's own step many times before training begins, and a watch some times within
it, so nothing of it may stay:

- gradients: ``None`` or the tensor that was there, with its values;
- buffers (BatchNorm statistics, counters), also such as were replaced by new tensors;
- attributes of modules: what each name stood for, and the contents of tensors, of lists, dicts,
  sets, deques and NumPy arrays, and of what lies in those, to any depth;
- parameters, which most forwards leave alone: not those of an encoder that follows another one, as
  in MoCo and BYOL, nor those that are normalized in place;
- every random generator: Python's, NumPy's, torch's on the host and the device, and those that
  modules keep.

Modules that others keep in plain lists, as a teacher that is not to be trained is kept, are saved
with them. Parameters and gradients are kept on the host, the rest where it is; or, for what is done
every so often, all but buffers is copied when something is about to write to it. Containers are
copied shallowly, each by itself, and nothing is asked of objects of the user's own. So what these
hold is not saved, nor are containers of classes of his own, hooks, files, and the peaks that the
caching allocator counts (after a search they are the search's).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, TypeGuard, TypeVar, final

import numpy as np
import torch
from torch import Tensor, nn

from torchfast._core.compare import same_bits, same_objects
from torchfast._core.generators import has_state, same_state, set_state, state_of
from torchfast._core.kept_writes import KeptWrites
from torchfast._core.refilling import REFILLED, refill
from torchfast._core.rng import get_rng_state, same_rng_state, set_rng_state
from torchfast._core.storages import Memory, is_expanded

T = TypeVar("T")

_MISSING = object()
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
# Values that a forward makes anew, rather than objects that somebody may have put there for good.
_VALUES = (*_PLAIN, Tensor, np.ndarray, tuple, frozenset, *REFILLED)
# By which compiled modules are called: who put it there takes it away.
_NOT_STATE = frozenset(("_compiled_call_impl",))


@final
class SavedModules:
    """The state of modules, tensors and generators at the time of the call.

    Args:
        holders: Modules, tensors and generators; anything else is passed over.
        device: Whose default generator is saved beside those of the host.
        eagerly: Whether all that is run until ``put_back`` is within `keeping_writes` and eager,
            and leaves the gradients that there are alone. Then only buffers are copied beforehand.

    Synchronizes: At construction and in ``put_back``.
    """

    def __init__(
        self, holders: Iterable[object], device: torch.device, *, eagerly: bool = False
    ) -> None:
        holders = list(holders)
        roots = [h for h in holders if isinstance(h, nn.Module)]
        modules, parts = _reached(roots)
        self._modules = [m for m in modules if not _is_scripted(m)]
        self._device = device
        self._tables: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (table, dict(table))
            for module in self._modules
            for table in (module._parameters, module._buffers, module._modules)
        ]
        self._attributes = [(vars(module), _attributes(module)) for module in self._modules]
        self._contents = [(part, part.copy()) for part in parts if _is_refilled(part)]
        self._parameters = [pair for root in roots for pair in root.named_parameters()]
        graded: list[Tensor] = [p for _, p in self._parameters]
        graded += [p for module in modules for p in module.parameters(recurse=False)]
        kept = [value for value in (*holders, *parts) if _is_a(value, Tensor)]
        graded += [tensor for tensor in kept if tensor.is_leaf and tensor.requires_grad]
        self._graded = list(dict.fromkeys(graded))  # by identity
        self._grads = [p.grad for p in self._graded]
        tensors = [*self._graded, *(g for g in self._grads if g is not None)]
        self._writes = KeptWrites([*self._graded, *kept] if eagerly else ())
        copied = () if eagerly else tensors
        self._kept = [(t, _copied(t, host=True), t._version) for t in copied if _is_writable(t)]
        seen = {id(t) for t in tensors}
        # Kernels of normalisation write to buffers without saying so.
        buffers = [b for m in modules for b in m.buffers(recurse=False)]
        for tensor in buffers if eagerly else (*buffers, *kept):
            if id(tensor) not in seen and _is_writable(tensor):
                seen.add(id(tensor))
                self._kept.append((tensor, _copied(tensor, host=False), tensor._version))
        self._memory = Memory([*tensors, *(tensor for tensor, _, _ in self._kept)])
        generators = {id(g): g for g in (*holders, *parts) if has_state(g)}
        self._generators = [(g, state_of(g)) for g in generators.values()]
        self._rng = get_rng_state(device)

    def keeping_writes(self) -> AbstractContextManager[object]:
        """Return a context in which parameters are copied before something writes to them."""
        return self._writes

    def drop_gradients(self) -> None:
        """Take gradients away, as ``zero_grad`` does."""
        for parameter in self._graded:
            parameter.grad = None

    def changed_parameters(self) -> list[str]:
        """Return the names of the parameters that were written to."""
        versions = {id(t): version for t, _, version in self._kept}
        return [n for n, p in self._parameters if versions.get(id(p), p._version) != p._version]

    def has_drawn(self) -> bool:
        """Whether a generator was drawn from."""
        return not same_rng_state(get_rng_state(self._device), self._rng) or any(
            not same_state(state_of(g), state) for g, state in self._generators
        )

    @torch.no_grad()
    def put_back(
        self, *, attributes: bool = True, generators: bool = True, thoroughly: bool = False
    ) -> None:
        """Make everything what it was.

        Args:
            attributes: False leaves what attributes of modules stand for as it is.
            generators: False lets generators go on from where they are.
            thoroughly: Compare parameters bit by bit, which brings each to the host; otherwise
                torch's count of the writes to a tensor is believed.
        """
        for table, saved in self._tables:
            if [*table] != [*saved] or not same_objects([*table.values()], [*saved.values()]):
                table.clear()
                table.update(saved)
        if attributes:
            self._put_back_attributes()
        for container, content in self._contents:
            refill(container, content)
        # First: what lies in the memory of another now would be written there.
        self._memory.put_back()
        self._writes.put_back()
        for index, (tensor, copy, version) in enumerate(self._kept):
            is_far = copy.device != tensor.device and not thoroughly
            if not (is_far and tensor._version == version) and not _is_same(tensor, copy):
                if tensor.shape != copy.shape or tensor.dtype != copy.dtype:
                    tensor.data = copy.to(tensor.device)
                else:
                    tensor.copy_(copy)
            self._kept[index] = (tensor, copy, tensor._version)
        for parameter, gradient in zip(self._graded, self._grads, strict=True):
            parameter.grad = gradient
        if generators:
            set_rng_state(self._rng, self._device)
            for generator, state in self._generators:
                set_state(generator, state)

    def _put_back_attributes(self) -> None:
        for (attributes, saved), module in zip(self._attributes, self._modules, strict=True):
            for name, value in _attributes(module).items():
                if name not in saved and issubclass(type(value), _VALUES):
                    del attributes[name]
            for name, value in saved.items():
                if attributes.get(name, _MISSING) is not value:
                    attributes[name] = value


def _reached(roots: list[nn.Module]) -> tuple[list[nn.Module], list[Any]]:
    """Return modules, with such as they keep in containers, and what all of them keep."""
    modules: dict[nn.Module, None] = {}  # by identity
    parts: dict[int, Any] = {}
    own = vars(nn.Module()).keys()  # tables, which are saved as such, and hooks
    waiting = list(roots)
    while waiting:
        new = [module for module in waiting.pop().modules() if module not in modules]
        modules.update(dict.fromkeys(new))
        kept = [
            value
            for module in new
            if not _is_scripted(module)
            for name, value in _attributes(module).items()
            if name not in own
        ]
        waiting += [part for part in _new_parts(kept, parts) if _is_a(part, nn.Module)]
    return [*modules], [*parts.values()]


def _new_parts(values: list[Any], known: dict[int, Any]) -> list[Any]:
    """Add to what is known, and return, values and what lies in containers among them.

    Plain ones are left out, and what is known is not looked into again.
    """
    found, waiting = [], list(values)
    while waiting:
        value = waiting.pop()
        kind = type(value)
        if id(value) in known or issubclass(kind, _PLAIN):
            continue
        known[id(value)] = value
        found.append(value)
        if kind in REFILLED or issubclass(kind, tuple | frozenset):
            waiting += value.values() if isinstance(value, dict) else value
    return found


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _NOT_STATE}


def _is_scripted(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


def _is_refilled(value: object) -> bool:
    kind = type(value)
    return kind in REFILLED or (kind is np.ndarray and not value.dtype.hasobject)  # type: ignore[attr-defined]


def _is_a(value: object, kind: type[T]) -> TypeGuard[T]:
    """Whether it is of a type; a proxy of what is gone cannot be asked."""
    return issubclass(type(value), kind)


def _is_writable(tensor: Tensor) -> bool:
    if tensor.is_inference() or tensor.is_meta or (tensor.requires_grad and not tensor.is_leaf):
        return False
    return tensor.layout is not torch.strided or tensor.is_nested or not is_expanded(tensor)


def _copied(tensor: Tensor, *, host: bool) -> Tensor:
    tensor = tensor.detach()
    # What a subclass does when it is moved is its own matter.
    if host and type(tensor) is Tensor:
        return tensor.to("cpu", copy=True)
    return tensor.clone()


def _is_same(tensor: Tensor, copy: Tensor) -> bool:
    """Whether no bit has changed; False where that cannot be told."""
    if tensor.shape != copy.shape or tensor.dtype != copy.dtype:
        return False
    if tensor.layout is not torch.strided or type(copy) is not Tensor or tensor.is_nested:
        return False
    try:
        return same_bits(tensor.detach().to(copy.device), copy)
    except RuntimeError:  # a dtype without such a view
        return False

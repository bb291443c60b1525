"""What a forward and a backward may change, saved on the side and put back bit for bit.

A search runs the user's own step many times before training begins, so nothing of it may stay:

- gradients: ``None`` or the tensor that was there, with its values;
- buffers (BatchNorm statistics, counters), also such as were replaced by new tensors, and tensors
  and plain numbers that modules keep as attributes;
- parameters, which forward and backward leave alone unless something is wrong, such as a hook that
  updates them;
- every random generator: Python's, NumPy's, torch's on the host and the device, and those that
  modules keep.

Parameters and gradients are kept on the host, the rest where it is. Not saved: what is reachable
only through containers and objects of the user's own, files, and the peaks that the caching
allocator counts (after a search they are the search's).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

import torch
from torch import Tensor, nn

from torchfast._core.compare import same_bits, same_objects
from torchfast._core.rng import get_rng_state, same_rng_state, set_rng_state

_MISSING = object()
_PLAIN = (bool, int, float, complex, str, bytes, type(None), Tensor)
# By which compiled modules are called: who put it there takes it away.
_NOT_STATE = frozenset(("_compiled_call_impl",))


@final
class SavedModules:
    """The state of modules, tensors and generators at the time of the call.

    Args:
        holders: Modules, tensors and generators; anything else is passed over.
        device: Whose default generator is saved beside those of the host.

    Synchronizes: At construction and in ``put_back``.
    """

    def __init__(self, holders: Iterable[object], device: torch.device) -> None:
        holders = list(holders)
        modules = dict.fromkeys(m for h in holders if isinstance(h, nn.Module) for m in h.modules())
        self._modules = [m for m in modules if not isinstance(m, torch.jit.ScriptModule)]
        self._device = device
        self._tables: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (table, dict(table))
            for module in self._modules
            for table in (module._parameters, module._buffers, module._modules)
        ]
        self._attributes = [(vars(module), _plain(module)) for module in self._modules]
        self._parameters = [
            (name, p)
            for root in holders
            if isinstance(root, nn.Module)
            for name, p in root.named_parameters()
        ]
        leaves = [h for h in holders if isinstance(h, Tensor) and h.is_leaf and h.requires_grad]
        self._graded = list(
            dict.fromkeys([*(p for _, p in self._parameters), *leaves])  # by identity
        )
        self._grads = [p.grad for p in self._graded]
        tensors = [*self._graded, *(g for g in self._grads if g is not None)]
        self._kept = [(t, _copied(t, host=True), t._version) for t in tensors if _is_writable(t)]
        on_device: list[object] = [b for m in modules for b in m.buffers(recurse=False)]
        on_device += [v for _, saved in self._attributes for v in saved.values()]
        on_device += holders
        seen = {id(t) for t in tensors}
        for value in on_device:
            if isinstance(value, Tensor) and id(value) not in seen and _is_writable(value):
                seen.add(id(value))
                self._kept.append((value, _copied(value, host=False), value._version))
        self._generators = [
            (g, g.get_state())
            for g in dict.fromkeys(
                v
                for v in (*holders, *(v for m in self._modules for v in vars(m).values()))
                if isinstance(v, torch.Generator)
            )
        ]
        self._rng = get_rng_state(device)

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
            not torch.equal(g.get_state(), state) for g, state in self._generators
        )

    @torch.no_grad()
    def put_back(
        self, *, attributes: bool = True, generators: bool = True, thoroughly: bool = False
    ) -> None:
        """Make everything what it was.

        Args:
            attributes: False leaves plain attributes of modules as they are.
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
                generator.set_state(state)

    def _put_back_attributes(self) -> None:
        for (attributes, saved), module in zip(self._attributes, self._modules, strict=True):
            for name in _plain(module).keys() - saved.keys():
                del attributes[name]
            for name, value in saved.items():
                if attributes.get(name, _MISSING) is not value:
                    attributes[name] = value


def _plain(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that are values rather than objects."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, _PLAIN) and name not in _NOT_STATE
    }


def _is_writable(tensor: Tensor) -> bool:
    return not (
        (tensor.requires_grad and not tensor.is_leaf) or tensor.is_inference() or tensor.is_meta
    )


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

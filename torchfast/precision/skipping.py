"""An update that a flag on the device calls off, so that the host need not read the flag.

torch.amp.GradScaler reads its flag on the host once a step, which stalls the queue, unless the
optimizer is fused. There are three ways to skip an update here, best first:

1. fused optimizers take the flag in their kernel (SGD with momentum from its second update on:
   torch leaves its buffer uninitialised when the first is skipped);
2. the others run their update, and a select on the device puts parameters and state back where
   the flag is set. It costs a copy of both for the length of the update;
3. where state lives on the host (counters of unknown optimizers; torch's own before their first
   update, when there is no state to put back), the flag is read there, as a plain loop does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.optim import Optimizer

from torchfast._core.decisions import Decision
from torchfast._core.local import local
from torchfast.precision.low_bit_kind import as_low_bit

# Not every kernel takes these, so they are copied as integers of their size.
_RARE_DTYPES = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    **dict.fromkeys(
        (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
        torch.uint8,
    ),
}
# Up to this many elements a launch costs more than the copy, so tensors are joined.
_SMALL = 1 << 14


@final
class Snapshot:
    """A copy of some tensors, put back in place where a flag on the device is set.

    Small tensors are copied, selected and put back a device and dtype at a time, large ones one
    by one: a model has hundreds of statistics and counters of a few bytes each.

    Numerics: Bitwise, in both directions, for every dtype.
    Synchronizes: Where a tensor was resized in place meanwhile, as by the first forward of an
        observer of quantization: it is put back in its old size.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        self._large: list[tuple[Tensor, Tensor]] = []
        with torch.no_grad():
            for tensor in map(local, tensors):
                if tensor.dtype in _RARE_DTYPES:
                    tensor = tensor.view(_RARE_DTYPES[tensor.dtype])
                if tensor.numel() <= _SMALL:
                    groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
                else:
                    self._large.append((tensor, tensor.clone()))
            self._small = [(group, _joined(group)) for group in groups.values()]
        self._shapes = [[t.shape for t in group] for group in groups.values()]

    def put_back(self, flag: Tensor) -> None:
        """Put the tensors back where ``flag`` is not zero; elsewhere leave every bit alone."""
        # where() and not a product: what is thrown away may be NaN, and NaN times 0 is NaN.
        with torch.no_grad():
            set_on = _OnDevices(flag.bool())
            for tensor, old in self._large:
                _choose(flag, set_on, tensor, old)
            for (group, old), shapes in zip(self._small, self._shapes, strict=True):
                if [t.shape for t in group] == shapes:
                    chosen = torch.where(set_on.of(old), old, _flatten_dense_tensors(group))
                    torch._foreach_copy_(group, _unflatten_dense_tensors(chosen, group))
                    continue
                parts = old.split([shape.numel() for shape in shapes])
                for tensor, part, shape in zip(group, parts, shapes, strict=True):
                    _choose(flag, set_on, tensor, part.view(shape))


def _choose(flag: Tensor, set_on: _OnDevices, tensor: Tensor, old: Tensor) -> None:
    if tensor.shape == old.shape:
        torch.where(set_on.of(tensor), old, tensor, out=tensor)
    elif bool(flag):
        tensor.resize_(old.shape).copy_(old)


@final
class SkippableUpdate:
    """Runs an optimizer's update, unless a flag on the device says not to.

    Args:
        optimizer: Whose update it is.

    Numerics: Where the flag is clear, ``optimizer.step()``; where it is set, parameters and state
        keep every bit. State that a skipped first update makes is as that of no update.
    Synchronizes: Never with fused Adam, AdamW and Adagrad. Until it has momentum, with fused SGD;
        until they have state, with the other optimizers; and at every update with those that keep
        state on the host, as `decision` says: on CUDA Adafactor, and Adagrad where torch has no
        fused form of it there (before 2.12).
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._is_torch_optimizer = type(optimizer).__module__.startswith("torch.optim") or (
            as_low_bit(optimizer) is not None
        )
        # An older contract: such a step() wants the whole scaler, and is judged on the host.
        self._wants_scaler = "grad_scaler" in inspect.signature(optimizer.step).parameters

    def __call__(self, flag: Tensor, step: Callable[[], object] | None = None) -> None:
        """Update where ``flag`` (float32, 0 or 1) is 0.

        Args:
            flag: On the device.
            step: Runs an update that is not fused; by default the optimizer's own ``step``.
        """
        step = step if step is not None else self.optimizer.step
        is_fused = self._is_fused()
        if is_fused and not self._lacks_momentum():
            self._in_kernel(flag)
        elif not is_fused and self._can_select():
            self._by_selection(flag, step)
        else:
            self._on_host(flag, step)

    def decision(self, lever: str) -> Decision:
        """Say which of the three ways the update takes."""
        name = type(self.optimizer).__name__
        if self._is_fused():
            detail = "skipped updates are decided inside the fused update"
            return Decision(lever=lever, outcome="applied", detail=detail)
        if self._is_torch_optimizer and not self.optimizer.state and not self._is_stateless():
            detail = f"until {name} has state, each update reads one flag on the host"
            return Decision(lever=lever, outcome="applied", detail=detail)
        if self._can_select() and not self._keeps_state_on_host():
            detail = f"skipped updates of {name} are undone on the device"
            return Decision(lever=lever, outcome="applied", detail=detail)
        detail = (
            f"{name} keeps state on the host, or its state is not known, so each update reads one "
            "flag there; AdamW, Adam and SGD need no such read"
        )
        return Decision(lever=lever, outcome="stepped aside", detail=detail)

    # --- the three ways ---------------------------------------------------------------------

    def _in_kernel(self, flag: Tensor) -> None:
        optimizer: Any = self.optimizer
        # The contract of torch's fused updates, by which GradScaler hands its flag over.
        optimizer.grad_scale = getattr(optimizer, "grad_scale", None)
        optimizer.found_inf = flag
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf

    def _by_selection(self, flag: Tensor, step: Callable[[], object]) -> None:
        changing = [
            tensor
            for group in self.optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
            for tensor in (parameter, *self.optimizer.state.get(parameter, {}).values())
            if isinstance(tensor, Tensor)
        ]
        before = Snapshot(changing)
        step()
        before.put_back(flag)

    def _on_host(self, flag: Tensor, step: Callable[[], object]) -> None:
        if not bool(flag):
            step()
        # A skipped first update would make the next scheduler step warn that the optimizer was
        # never called; the scheduler counts skipped updates on purpose.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]

    # --- which of them is possible ----------------------------------------------------------

    def _is_fused(self) -> bool:
        # Both: a loaded state can take the flag off the groups and leave the attribute.
        supported = getattr(self.optimizer, "_step_supports_amp_scaling", False)
        is_fused = all(group.get("fused") for group in self.optimizer.param_groups)
        return bool(supported) and is_fused and not self._wants_scaler

    def _can_select(self) -> bool:
        """Whether all state that an update changes is there and lies beside its parameter."""
        if not self._is_torch_optimizer:
            return False
        if self._is_stateless():
            return True
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.optimizer.state.get(parameter)
                if not state or not _lies_beside(parameter, state):
                    return False
        return True

    def _keeps_state_on_host(self) -> bool:
        """Whether any state does not lie beside its parameter, of those without gradients too."""
        states = self.optimizer.state.items()
        return not self._is_stateless() and not all(_lies_beside(p, state) for p, state in states)

    def _is_stateless(self) -> bool:
        groups = self.optimizer.param_groups
        is_sgd = isinstance(self.optimizer, torch.optim.SGD)
        return is_sgd and all(group["momentum"] == 0 for group in groups)

    def _lacks_momentum(self) -> bool:
        """Whether fused SGD has yet to make a momentum buffer.

        torch allocates it uninitialised and counts a skipped first update as done, so the next
        one would read whatever the memory held.
        """
        if not isinstance(self.optimizer, torch.optim.SGD):
            return False
        return any(
            parameter.grad is not None
            and self.optimizer.state.get(parameter, {}).get("momentum_buffer") is None
            for group in self.optimizer.param_groups
            if group["momentum"] != 0
            for parameter in group["params"]
        )


def _lies_beside(parameter: Tensor, state: Mapping[str, Any]) -> bool:
    return all(isinstance(v, Tensor) and v.device == parameter.device for v in state.values())


def _joined(tensors: list[Tensor]) -> Tensor:
    """Return the tensors' elements as one new tensor."""
    joined: Tensor = _flatten_dense_tensors(tensors)
    return joined.clone() if len(tensors) == 1 else joined  # of one tensor, torch makes a view


def any_flag(flags: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return one float32 flag on ``device``: 1.0 where any of ``flags`` (0 or 1 each) is."""
    if len(flags) == 1:
        return flags[0].to(device, torch.float32)
    # Not their sum: a fused kernel skips at 1.0 and at nothing else.
    return torch.stack([flag.to(device, torch.float32) for flag in flags]).amax()


@final
class _OnDevices:
    """One flag, copied once to each device that asks."""

    def __init__(self, flag: Tensor) -> None:
        self._flags = {flag.device: flag}
        self._flag = flag

    def of(self, tensor: Tensor) -> Tensor:
        if tensor.device not in self._flags:
            self._flags[tensor.device] = self._flag.to(tensor.device)
        return self._flags[tensor.device]

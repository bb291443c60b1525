"""Loss scaling for fp16, without reading the device from the host.

fp16 gradients underflow, so the loss is multiplied by a scale before the backward and gradients
are divided by it before clipping. A non-finite gradient means the scale was too high: that update
is skipped and the scale shrinks. torch.amp.GradScaler decides this by reading a flag on the host
once a step, which stalls the queue, unless the optimizer is fused. Three ways here, best first:

1. fused optimizers take the flag in their kernel (SGD with momentum from its second update on:
   torch leaves its buffer uninitialised when the first is skipped);
2. the others run their update, and a select on the device puts parameters and state back where
   the flag is set. It costs a copy of both for the length of the update;
3. where state lives on the host (counters of unknown optimizers; torch's own before their first
   update, when there is no state to put back), the flag is read there, as a plain loop does.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchfast._core.decisions import Decision
from torchfast.precision.options import PrecisionOptions


@final
class LossScaler:
    """torch's GradScaler with skipped updates decided and counted on the device.

    Args:
        options: Scale, growth and backoff; what is None is GradScaler's default.
        optimizer: Whose update is skipped when a gradient is not finite.
        device: Where the flag lives.

    Numerics: The update is GradScaler's: same scale, same skipped steps.
    Synchronizes: Never with fused Adam, AdamW and Adagrad. Until it has momentum, with fused SGD;
        until they have state, with the other optimizers; and at every update with those that keep
        state on the host, as `decision` says.
    """

    def __init__(
        self, options: PrecisionOptions, optimizer: Optimizer, device: torch.device
    ) -> None:
        self.optimizer = optimizer
        self.num_skipped = torch.zeros((), dtype=torch.int64, device=device)
        self._scaler = torch.amp.GradScaler(device.type, **options.scaling)  # type: ignore[arg-type]
        self._is_torch_optimizer = type(optimizer).__module__.startswith("torch.optim")

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale."""
        scaled: Tensor = self._scaler.scale(loss)
        return scaled

    def discard(self) -> None:
        """Forget gradients that were unscaled and will not be used."""
        self._scaler._per_optimizer_states.pop(id(self.optimizer), None)

    def unscale(self) -> None:
        """Divide the gradients by the scale and note on the device whether all are finite."""
        self._scaler.unscale_(self.optimizer)

    def step(self) -> None:
        """Update where all gradients are finite; adapt the scale; count a skipped update."""
        found_inf = self._found_inf()
        is_fused = self._is_fused()
        if is_fused and not self._lacks_momentum():
            self._scaler.step(self.optimizer)
        elif not is_fused and self._can_select():
            self._select_step(found_inf)
        else:
            self._step_by_host()
        self._scaler.update()
        self.num_skipped += found_inf > 0

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, the growth counter and the number of skipped updates.

        Synchronizes: Yes.
        """
        return {"scaler": self._scaler.state_dict(), "num_skipped": int(self.num_skipped)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` returned."""
        self._scaler.load_state_dict(state["scaler"])
        self.num_skipped.fill_(state["num_skipped"])

    def decision(self) -> Decision:
        """Say which of the three ways the update takes."""
        name = type(self.optimizer).__name__
        if self._is_fused():
            detail = "skipped updates are decided inside the fused update"
            return Decision(lever="loss scaling", outcome="applied", detail=detail)
        if self._is_torch_optimizer and not self.optimizer.state:
            detail = f"until {name} has state, each update reads one flag on the host"
            return Decision(lever="loss scaling", outcome="applied", detail=detail)
        if self._can_select():
            detail = f"skipped updates of {name} are undone on the device"
            return Decision(lever="loss scaling", outcome="applied", detail=detail)
        detail = (
            f"{name} keeps state on the host, or its state is not known, so each update reads one "
            "flag there; AdamW, Adam and SGD need no such read, nor does precision='bf16'"
        )
        return Decision(lever="loss scaling", outcome="stepped aside", detail=detail)

    def _is_fused(self) -> bool:
        # Both: a loaded state can take the flag off the groups and leave the attribute.
        supported = getattr(self.optimizer, "_step_supports_amp_scaling", False)
        return bool(supported) and all(g.get("fused") for g in self.optimizer.param_groups)

    def _can_select(self) -> bool:
        """Whether all state that an update changes is there and lies beside its parameter."""
        if not self._is_torch_optimizer:
            return False
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.optimizer.state.get(parameter)
                if not state or not all(
                    isinstance(v, Tensor) and v.device == parameter.device for v in state.values()
                ):
                    return False
        return True

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

    def _step_by_host(self) -> None:
        """Let GradScaler read the flag on the host and not call the optimizer where it is set."""
        fused = self.optimizer.__dict__.pop("_step_supports_amp_scaling", None)
        try:
            self._scaler.step(self.optimizer)
        finally:
            if fused is not None:
                self.optimizer._step_supports_amp_scaling = fused  # type: ignore[attr-defined]
        # A skipped first update would make the next scheduler step warn that the optimizer was
        # never called; the scheduler counts skipped updates on purpose.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]

    def _select_step(self, found_inf: Tensor) -> None:
        kept = [
            tensor
            for group in self.optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
            for tensor in (parameter, *self.optimizer.state[parameter].values())
        ]
        with torch.no_grad():
            before = [tensor.clone() for tensor in kept]
            self.optimizer.step()
            skip = found_inf > 0
            for tensor, old in zip(kept, before, strict=True):
                tensor.copy_(torch.where(skip, old, tensor))

    def _found_inf(self) -> Tensor:
        flags: list[Tensor] = list(self._scaler._found_inf_per_device(self.optimizer).values())
        if not flags:
            raise RuntimeError(
                "update() under fp16 found no unscaled gradients: call forward_backward(batch) "
                "before each update()"
            )
        if len(flags) == 1:
            return flags[0]
        device = self.num_skipped.device
        return torch.stack([flag.to(device, non_blocking=True) for flag in flags]).sum()

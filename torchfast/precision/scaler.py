"""Loss scaling for fp16, without reading the device from the host.

fp16 gradients underflow, so the loss is multiplied by a scale before the backward and gradients
are divided by it before clipping. A non-finite gradient means the scale was too high: that update
is skipped and the scale shrinks. How an update is skipped is `SkippableUpdate`'s part.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchfast.precision.options import PrecisionOptions


@final
class LossScaler:
    """torch's GradScaler, with the finding of non-finite gradients left on the device.

    Args:
        options: Scale, growth and backoff; what is None is GradScaler's default.
        optimizer: Whose gradients are unscaled.
        device: Where the scale lives.

    Numerics: The scale is GradScaler's at every step.
    Synchronizes: Only `state_dict`.
    """

    def __init__(
        self, options: PrecisionOptions, optimizer: Optimizer, device: torch.device
    ) -> None:
        self.optimizer = optimizer
        self._scaler = torch.amp.GradScaler(device.type, **options.scaling)  # type: ignore[arg-type]

    @property
    def held(self) -> torch.amp.GradScaler:
        """GradScaler of torch, which holds the scale."""
        return self._scaler

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

    def flags(self) -> list[Tensor]:
        """Return, for each device with gradients, 1.0 where `unscale` found a non-finite one."""
        flags: list[Tensor] = list(self._scaler._found_inf_per_device(self.optimizer).values())
        if not flags:
            raise RuntimeError(
                "update() under fp16 found no unscaled gradients: call forward_backward(batch) "
                "before each update()"
            )
        return flags

    def adapt(self, unless: Tensor | None = None) -> None:
        """Shrink the scale if a gradient was not finite, else let it grow in its time.

        Args:
            unless: A flag; where it is set the scale stays. The loss itself was not finite then,
                and no scale would have helped.
        """
        tensors = (self._scaler._scale, self._scaler._growth_tracker)
        before = [t.clone() for t in tensors if t is not None] if unless is not None else []
        self._scaler.update()
        for tensor, old in zip(tensors, before, strict=False):
            if tensor is not None and unless is not None:
                torch.where(unless.to(tensor.device).bool(), old, tensor, out=tensor)

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and the growth counter. Synchronizes: Yes."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` returned."""
        self._scaler.load_state_dict(state)

"""What the first half of a step changes besides gradients, so that it can be done again.

A forward draws random numbers, and it writes to buffers: BatchNorm's running statistics, the
amaxes of float8, a cache. Parameters and the optimizer's state change in the update only, and
gradients are made anew. What a model keeps in plain attributes, and generators of its own, are not
put back.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from torchfast._core.rng import get_rng_state, set_rng_state
from torchfast._core.storages import is_expanded


@final
class BeforeStep:
    """The global random generators and a model's buffers, as they are now.

    It costs a copy of the buffers and about 0.1 ms of the host.

    Args:
        model: Whose buffers.
        device: Whose generator, besides those of the host.

    Synchronizes: Never.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._rng = get_rng_state(device)
        self._places = [
            (module._buffers, name, buffer)
            for module in model.modules()
            for name, buffer in module._buffers.items()
        ]
        own = {id(b): b for _, _, b in self._places if b is not None and _is_writable(b)}
        self._buffers = list(own.values())
        self._copies = [buffer.detach().clone() for buffer in self._buffers]

    def put_back(self) -> None:
        """Bring all of it to what it was; buffers that were replaced are there again."""
        set_rng_state(self._rng, self._device)
        for holder, name, buffer in self._places:
            holder[name] = buffer
        with torch.no_grad():
            for buffer, copy in zip(self._buffers, self._copies, strict=True):
                buffer.copy_(copy)


def _is_writable(buffer: Tensor) -> bool:
    if buffer.layout is not torch.strided or buffer.is_inference():
        return False
    return not is_expanded(buffer)

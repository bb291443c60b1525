"""What the first half of a step changes besides gradients, so that it can be done again.

A forward draws random numbers, and it writes to buffers: BatchNorm's running statistics, the
amaxes of float8, a cache. So does a loss with state of its own, such as a running center or a
queue. Parameters and the optimizer's state change in the update only, and gradients are made anew.
What modules keep in plain attributes, and generators there, are not put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from torchfast._core.generators import has_state, set_state, state_of
from torchfast._core.rng import get_rng_state, set_rng_state
from torchfast._core.storages import is_expanded

_MOST_BYTES: Final = 2**26  # of tensors that the loss holds


@final
class BeforeStep:
    """The global random generators, a model's buffers and what the loss uses, as they are now.

    It costs a copy of the buffers and about 0.2 ms of the host.

    Args:
        model: Whose buffers.
        device: Whose generator, besides those of the host.
        used: Returns what the loss function uses: of its modules buffers count, and its generators
            and tensors, as far as these are few.

    Synchronizes: Never.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        used: Callable[[], Iterable[Any]] = tuple,
    ) -> None:
        held = list(used())
        self._device = device
        self._rng = get_rng_state(device)
        self._generators = [(each, state_of(each)) for each in held if has_state(each)]
        roots = [model, *(each for each in held if isinstance(each, nn.Module))]
        self._places = [
            (module._buffers, name, buffer)
            for module in dict.fromkeys(m for root in roots for m in root.modules())
            for name, buffer in module._buffers.items()
        ]
        tensors = [b for _, _, b in self._places if b is not None]
        # One in a graph has been computed, and a leaf that is trained changes in the update.
        tensors += _small([t for t in held if isinstance(t, Tensor) and not t.requires_grad])
        own = {id(tensor): tensor for tensor in tensors if _is_writable(tensor)}
        self._buffers = list(own.values())
        self._copies = [buffer.detach().clone() for buffer in self._buffers]

    def put_back(self) -> None:
        """Bring all of it to what it was; buffers that were replaced are there again."""
        set_rng_state(self._rng, self._device)
        for generator, state in self._generators:
            set_state(generator, state)
        for holder, name, buffer in self._places:
            holder[name] = buffer
        with torch.no_grad():
            for buffer, copy in zip(self._buffers, self._copies, strict=True):
                buffer.copy_(copy)


def _small(tensors: list[Tensor]) -> list[Tensor]:
    """Return the smallest ones: the rest is data, and of that each step would make a copy."""
    chosen, left = [], _MOST_BYTES
    for tensor in sorted(tensors, key=lambda tensor: tensor.nbytes):
        if (left := left - tensor.nbytes) < 0:
            break
        chosen.append(tensor)
    return chosen


def _is_writable(buffer: Tensor) -> bool:
    if buffer.layout is not torch.strided or buffer.is_inference():
        return False
    return not is_expanded(buffer)

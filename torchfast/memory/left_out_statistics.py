"""The running statistics of a batch norm that a second run leaves out.

The second run works on copies of what the first one found, and a norm that is left out does not
update them. Few blocks read them; for one that does a `Deferred` stands in the place of each, which
lets the norm run. It may be read when the run is over: then what stands in the module by that time,
which is the training's, is left alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Final, final

import torch
from torch import Tensor, nn

from torchfast.memory.deferred import Deferred, Like

_NAMES: Final = ("running_mean", "running_var", "num_batches_tracked")


@final
class LeftOutStatistics:
    """Those of one call.

    Args:
        module: The norm, in training mode, with the copies that the second run works on.
        compute: Runs it.
    """

    def __init__(self, module: nn.Module, compute: Callable[[], Tensor]) -> None:
        self._module, self._there, self._compute = module, module._buffers, compute
        there = ((name, self._there.get(name)) for name in _NAMES)
        self._former: dict[str, Tensor] = {name: b for name, b in there if b is not None}
        # Weakly: each of them holds this.
        self._standing: dict[str, weakref.ref[Deferred]] = {}
        self._result: Tensor | None = None

    def result(self) -> Tensor:
        """Run the norm, once, with what it found."""
        if self._result is None:
            now = {name: self._there.get(name) for name in self._former}
            self._there.update(self._former)
            was_training, self._module.training = self._module.training, True
            try:
                with torch.no_grad():
                    self._result = self._compute()
            finally:
                self._module.training = was_training
                for name, buffer in now.items():
                    reference = self._standing.get(name)
                    if reference is None or buffer is not reference():
                        self._there[name] = buffer
        return self._result

    def stand(self) -> list[Deferred]:
        """Put what waits for that in the place of each, and return it."""
        made = []
        for name, former in self._former.items():
            updated = partial(self._updated, name)
            one = Deferred(updated, Like.of(former), requires_grad=False)
            self._there[name] = one
            self._standing[name] = weakref.ref(one)
            made.append(one)
        return made

    def _updated(self, name: str) -> Tensor:
        self.result()
        former = self._former[name]
        return former.computed() if isinstance(former, Deferred) else former

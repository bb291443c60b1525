"""The state of parameters as it was, so that an update of them can be taken back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.optim import Optimizer

UNDO_BYTES: Final = 1 << 32  # unless the user says otherwise


@final
class Undo:
    """Keeps what an optimizer knows of parameters.

    The memory for it is asked for once and used again. Parameters themselves are not kept.

    Args:
        max_bytes: The most to keep.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self._num_bytes = max_bytes, 0
        self._buffers: dict[tuple[Tensor, str], Tensor] = {}
        self._kept: dict[Tensor, dict[str, Any] | None] = {}

    def keep(self, optimizer: Optimizer, parameters: Iterable[Tensor]) -> bool:
        """Keep the state of parameters; return False, and keep nothing, where there is no room."""
        entries = {p: optimizer.state.get(p) for p in parameters}
        tensors = {
            (p, key): value
            for p, entry in entries.items()
            for key, value in (entry or {}).items()
            if isinstance(value, Tensor)
        }
        if not self._make_room(tensors):
            return False
        for at, tensor in tensors.items():
            self._buffers[at].copy_(tensor)
        self._kept |= {p: None if entry is None else dict(entry) for p, entry in entries.items()}
        return True

    def take_back(self, optimizer: Optimizer, parameters: Iterable[Tensor] | None = None) -> None:
        """Let the state of parameters be what it was; of all whose state is kept, if left out."""
        for parameter in [*self._kept] if parameters is None else parameters:
            entry = self._kept[parameter]
            if entry is None:
                optimizer.state.pop(parameter, None)
            else:
                for key, value in entry.items():
                    if isinstance(value, Tensor):
                        value.copy_(self._buffers[parameter, key])
                optimizer.state[parameter] = entry
            del self._kept[parameter]  # not before: who is interrupted begins anew

    def forget(self) -> None:
        """Keep nothing any more; the memory stays for the next time."""
        self._kept.clear()

    def _make_room(self, tensors: dict[tuple[Tensor, str], Tensor]) -> bool:
        for at, tensor in tensors.items():
            held = self._buffers.get(at)
            if held is not None and (held.shape, held.dtype) == (tensor.shape, tensor.dtype):
                continue
            before = 0 if held is None else held.nbytes
            if self._num_bytes - before + tensor.nbytes > self.max_bytes:
                return False
            self._buffers[at] = torch.empty_like(tensor)
            self._num_bytes += tensor.nbytes - before
        return True

"""What autograd holds in place of a tensor that it saves, under hooks.

torch does not look under hooks whether a saved tensor was written meanwhile, so that is looked at
here: what is held shares the count of writes with the tensor.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from torchfast.memory.saved_storage import SavedStorage


class PackedTensor:
    """What autograd holds in place of a tensor: this alone, of one that stays on the device."""

    __slots__ = ("_version", "kept")

    def __init__(self, kept: Tensor, version: int) -> None:
        self.kept = kept
        self._version = version

    def check(self) -> None:
        """Raise if it was written since."""
        if self.kept._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: it was saved at version {self._version} and is at version "
                f"{self.kept._version} now; torch.autograd.set_detect_anomaly(True) shows the "
                "operation whose gradient needs it"
            )


@final
class SentTensor(PackedTensor):
    """A view of a storage that may be on the host."""

    __slots__ = ("_dtype", "_offset", "_size", "_stride", "saved")

    def __init__(self, saved: SavedStorage, writes: Tensor, tensor: Tensor) -> None:
        super().__init__(writes, tensor._version)
        self.saved = saved
        self._dtype = tensor.dtype
        self._size, self._stride = tensor.size(), tensor.stride()
        self._offset = tensor.storage_offset()

    def view(self, storage: Tensor) -> Tensor:
        """Return the view that was saved, of its storage."""
        if storage.dtype != self._dtype:
            storage = storage.view(self._dtype)
        return storage.as_strided(self._size, self._stride, self._offset)


def share_count(one: Tensor, other: Tensor) -> bool:
    """Whether a write to one of two tensors is counted for the other as well.

    Parts of one storage that count for themselves, as of ``unsafe_chunk``, may have been written
    equally often, and one of them after the other was copied.
    """
    before = one._version
    with _unsafe_preserve_version_counter(other):
        torch.autograd.graph.increment_version(other)
        return one._version != before

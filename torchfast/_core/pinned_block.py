"""A block of host memory that CUDA copies to and from at full speed."""

from __future__ import annotations

import weakref
from typing import Any, final

import torch

from torchfast._core.pinning import pin_in_place


@final
class PinnedBlock:
    """Host memory, pinned where it stages for a CUDA device, for as long as this object lives.

    Args:
        num_bytes: Its size.
        device: What copies to and from it.

    Attributes:
        memory: The bytes.
        code: What CUDA said to pinning it; 0 where it is pinned, or where nothing is to be pinned.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        self.code = 0
        self._unpin: weakref.finalize[..., Any] | None = None
        if device.type == "cuda" and torch.version.hip is None and num_bytes:
            # Touched by all cores first: the driver would fetch the pages with one.
            self.memory.zero_()
            self.code, unpin = pin_in_place(self.memory.data_ptr(), num_bytes, device)
            if self.code == 0:
                self._unpin = weakref.finalize(self, unpin)
                # At exit the driver may be gone already, and lets go of everything by itself.
                self._unpin.atexit = False

    def release(self) -> None:
        """Unpin; nothing may be on its way any more."""
        if self._unpin is not None:
            self._unpin()

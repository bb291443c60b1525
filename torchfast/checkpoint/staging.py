"""Copies of tensors that training may change while they are written.

A save may return once everything has been copied; writing goes on beside the training. The copies
lie one behind the other in one block of host memory per device, allocated at the first save, which
takes longer for it, and reused by the next ones. It is as large as the state.

For a CUDA device the block is pinned: the copies are queued on the current stream, so they come
after the step that was queued before and before the one that is queued next, and the host waits
once, for that stream. The block is registered with the driver rather than taken from torch's pinned
allocator, which rounds each allocation up to a power of two. Tensors on the CPU are copied too: an
optimizer step changes them in place.

It does not help where the host has no room for a second copy: a blocking save writes from the live
tensors, and takes device memory over tensor by tensor.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, final

import torch
from torch import Tensor

from torchfast.checkpoint.sharing import plain

logger = logging.getLogger(__name__)

_ALIGNMENT: Final = 64
_PORTABLE: Final = 1  # pinned for every device of the process


@final
class Stager:
    """Copies tensors into host memory that it keeps."""

    def __init__(self) -> None:
        self._blocks: dict[torch.device, _Block] = {}

    def stage(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of ``tensors`` by key, valid until the next call.

        Synchronizes: Yes, once per device, with the current stream.
        """
        by_device: dict[torch.device, list[str]] = {}
        for key, tensor in tensors.items():
            by_device.setdefault(tensor.device, []).append(key)
        staged: dict[str, Tensor] = {}
        # A block that was made under inference_mode() could not be written to again outside of it.
        with torch.inference_mode(mode=False), torch.no_grad():
            for device, keys in by_device.items():
                staged |= self._stage_device(device, {key: tensors[key] for key in keys})
        for device in by_device:
            _wait(device)
        return {key: staged[key] for key in tensors}

    def release(self) -> None:
        """Give the memory back; copies that were returned must not be used any more."""
        for block in self._blocks.values():
            block.release()
        self._blocks = {}

    def _stage_device(
        self, device: torch.device, tensors: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        starts: dict[str, int] = {}
        end = 0
        for key, tensor in tensors.items():
            starts[key] = end
            num_bytes = tensor.numel() * tensor.element_size()
            end += num_bytes + -num_bytes % _ALIGNMENT
        memory = self._memory(device, end)
        staged = {}
        for key, tensor in tensors.items():
            num_bytes = tensor.numel() * tensor.element_size()
            piece = memory[starts[key] : starts[key] + num_bytes]
            copy = piece.view(tensor.dtype).view(tensor.shape)
            plain(copy).copy_(plain(tensor), non_blocking=True)
            staged[key] = copy
        return staged

    def _memory(self, device: torch.device, num_bytes: int) -> Tensor:
        block = self._blocks.get(device)
        if block is None or block.memory.numel() < num_bytes:
            if block is not None:
                block.release()
            block = self._blocks[device] = _Block(device, num_bytes)
        return block.memory


@final
class _Block:
    """Host memory, pinned where it stages for CUDA."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self.memory = torch.empty(max(num_bytes, _ALIGNMENT), dtype=torch.uint8, device="cpu")
        self._unpin: weakref.finalize[..., Any] | None = None
        if device.type == "cuda" and torch.version.hip is None:
            # Touched by all cores first: the driver would fetch the pages with one.
            self.memory.zero_()
            address = self.memory.data_ptr()
            code = int(
                torch.cuda.cudart().cudaHostRegister(address, self.memory.numel(), _PORTABLE)
            )
            if code == 0:
                self._unpin = weakref.finalize(self, _unregister, address)
                # At exit the driver may be gone already, and lets go of everything by itself.
                self._unpin.atexit = False
            else:
                # The driver remembers the error, and the next kernel would be blamed for it.
                with suppress(RuntimeError):
                    torch.zeros(1, device=device)
                logger.warning(
                    "staging for checkpoints is not pinned (cudaHostRegister of %d bytes returned "
                    "%d), so each save holds training up longer; raise the limit on locked memory "
                    "(ulimit -l)",
                    self.memory.numel(),
                    code,
                )

    def release(self) -> None:
        """Unpin."""
        if self._unpin is not None:
            self._unpin()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    elif device.type != "cpu":
        torch.accelerator.synchronize(device)


def _unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)

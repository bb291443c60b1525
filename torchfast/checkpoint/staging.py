"""Copies of tensors that training may change while they are written.

A save may return once everything has been copied; writing goes on beside the training. The copies
lie one behind the other in one block of host memory per device, allocated at the first save and
reused by the next ones. It is as large as the state.

For a CUDA device the block is pinned, and the copies are queued on the current stream, so they come
after the step that was queued before and before the one that is queued next. They take one of two
ways. Where the device has room to spare they go to a block on the device first, which takes a
fiftieth of the time that the bus takes; from there they go on to the host on a stream of their own,
while the training does. The writer sends them and waits for them, and the block on the host, which
takes a second for some ten GB, is its business too. Otherwise they cross the bus at once, and the
host waits for that, the first time also for the block.

The pinned block is registered with the driver rather than taken from torch's pinned allocator,
which rounds each allocation up to a power of two. Tensors on the CPU are copied too: an optimizer
step changes them in place.

It does not help where the host has no room for a second copy: a blocking save writes from the live
tensors, and takes device memory over tensor by tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, NamedTuple, final

import torch
from torch import Tensor

from torchfast._core.local import local
from torchfast._core.pinned_block import PinnedBlock
from torchfast.checkpoint.sharded import is_sharded, with_part
from torchfast.checkpoint.sharing import plain

logger = logging.getLogger(__name__)

_ALIGNMENT: Final = 64
# Of the device's free memory a copy may take this part: the training may want some meanwhile.
_PART_OF_FREE: Final = 0.5


# Returns a device's copies on the host when they are there.
_Arrived = Callable[[], dict[str, Tensor]]


class Staged(NamedTuple):
    """Copies of tensors, on the host or on their way there.

    Attributes:
        arrived: Waits for them and returns them by key, valid until the next are made. To be called
            once, in any thread.
    """

    arrived: _Arrived


@final
class Stager:
    """Copies tensors into host memory that it keeps."""

    def __init__(self) -> None:
        self._blocks: dict[torch.device, PinnedBlock] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._spared: dict[torch.device, int] = {}  # bytes of the last block on a device
        if torch.backends.cuda.is_built() and torch.cuda.is_initialized():
            # The first stream of a process makes the host wait for all that is queued; now that is
            # less than at the first save.
            torch.cuda.Stream()

    def stage(self, tensors: Mapping[str, Tensor]) -> Staged:
        """Copy ``tensors``, which may change from then on; of sharded ones, this rank's parts.

        Synchronizes: Once per device, with the current stream; not with a CUDA device whose free
            memory is twice what is copied.
        """
        by_device: dict[torch.device, list[str]] = {}
        parts = {key: local(tensor) for key, tensor in tensors.items()}
        for key, tensor in parts.items():
            by_device.setdefault(tensor.device, []).append(key)
        # A block that was made under inference_mode() could not be written to again outside of it.
        with torch.inference_mode(mode=False), torch.no_grad():
            under_way = [
                self._stage_device(device, {k: parts[k] for k in keys})
                for device, keys in by_device.items()
            ]
        # Held until then; the others are not, and may be freed before their copies arrive.
        sharded = {key: tensor for key, tensor in tensors.items() if is_sharded(tensor)}

        def arrived() -> dict[str, Tensor]:
            staged: dict[str, Tensor] = {}
            try:
                while under_way:  # and what each holds on a device is let go
                    staged |= under_way.pop()()
                return staged | {key: with_part(of, staged[key]) for key, of in sharded.items()}
            finally:  # before they are written; and an error is kept until somebody asks for it
                under_way.clear()
                sharded.clear()

        return Staged(arrived)

    def release(self) -> None:
        """Give the memory back; copies that were returned must not be used any more."""
        for block in self._blocks.values():
            block.release()
        self._blocks = {}

    def _stage_device(self, device: torch.device, tensors: Mapping[str, Tensor]) -> _Arrived:
        """Copy what one device has, and return what waits for the copies."""
        starts: dict[str, int] = {}
        end = 0
        for key, tensor in tensors.items():
            starts[key] = end
            num_bytes = tensor.numel() * tensor.element_size()
            end += num_bytes + -num_bytes % _ALIGNMENT
        places = {
            key: partial(_placed, start=starts[key], dtype=tensor.dtype, shape=tensor.shape)
            for key, tensor in tensors.items()
        }
        first = _memory_to_spare(device, end, self._spared.get(device, 0))
        block = self._memory(device, end) if first is None else first
        for key, tensor in tensors.items():
            plain(places[key](block)).copy_(plain(tensor), non_blocking=True)
        if first is None:
            _wait(device)
            return lambda: {key: place(block) for key, place in places.items()}
        self._spared[device] = end
        send = self._sender(device, first, end)

        def arrived() -> dict[str, Tensor]:
            memory = send()
            return {key: place(memory) for key, place in places.items()}

        return arrived

    def _sender(self, device: torch.device, first: Tensor, num_bytes: int) -> Callable[[], Tensor]:
        """Return what sends a block on the device to the host, beside what is queued next."""
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(device))
        held = [first]

        def send() -> Tensor:
            try:
                memory = self._memory(device, num_bytes)[:num_bytes]
                stream.wait_event(copied)
                # The device too: a thread on another would make CUDA begin there on leaving.
                with torch.cuda.device(device), torch.cuda.stream(stream):
                    memory.copy_(held[0], non_blocking=True)
                # Blocking: the thread that waits sleeps.
                done = torch.cuda.Event(blocking=True)
                done.record(stream)
                done.synchronize()
                return memory
            finally:
                held.clear()  # not before: it goes back to the stream that it was allocated on

        return send

    def _memory(self, device: torch.device, num_bytes: int) -> Tensor:
        block = self._blocks.get(device)
        if block is None or block.memory.numel() < num_bytes:
            if block is not None:
                block.release()
            block = self._blocks[device] = PinnedBlock(max(num_bytes, _ALIGNMENT), device)
            if block.code:
                logger.warning(
                    "staging for checkpoints is not pinned (cudaHostRegister of %d bytes returned "
                    "%d), so each save holds training up longer; raise the limit on locked memory "
                    "(ulimit -l)",
                    block.memory.numel(),
                    block.code,
                )
        return block.memory


def _placed(memory: Tensor, start: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """Return the place of a tensor's copy in a block of bytes."""
    num_bytes = shape.numel() * dtype.itemsize
    return memory[start : start + num_bytes].view(dtype).view(shape)


def _memory_to_spare(device: torch.device, num_bytes: int, spared: int) -> Tensor | None:
    """Return a block on a CUDA device, if so much is left there that nobody will miss it.

    Args:
        device: Where.
        num_bytes: Its size.
        spared: What the last one had, which lies in torch's cache if that was not emptied.
    """
    if device.type != "cuda" or num_bytes == 0:
        return None
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if num_bytes > _PART_OF_FREE * (free + min(spared, cached)):
        return None
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return None


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    elif device.type != "cpu":
        torch.accelerator.synchronize(device)

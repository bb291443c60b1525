"""What offloading asks of a device: streams beside the computation, and pinned memory.

It is here, and small, so that all that offloads can be run against a simulated device, whose
streams are as late as a test likes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol, final

import torch
from torch import Tensor

from torchfast._core.device import is_capturing
from torchfast._core.stream_context import DeviceStreams


class CopyStreams(Protocol):
    """Streams of a device. Each has ``record_event()`` and ``wait_event(event)``."""

    def new(self) -> Any:
        """Return another stream."""

    def current(self) -> Any:
        """Return the stream that this thread enqueues on."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Let the body enqueue on a stream, and allocate from its pool."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies on the device."""

    def pinned(self, num_bytes: int) -> Tensor:
        """Return so much pinned memory of the host, as a uint8 tensor."""

    def is_capturing(self) -> bool:
        """Whether what is enqueued goes into a graph."""

    def mark(self, stream: Any) -> Any:
        """Return this moment of a stream, to be compared with others."""

    def seconds(self, before: Any, after: Any) -> float:
        """Return the time between two moments; waits until both have passed."""


@final
class CUDACopyStreams(DeviceStreams):
    """Streams of a CUDA device.

    Args:
        device: With its index.
    """

    def holds(self, tensor: Tensor) -> bool:
        """Ask the tensor."""
        return tensor.is_cuda and tensor.device == self._device

    def pinned(self, num_bytes: int) -> Tensor:
        """Ask torch's allocator, which asks the driver."""
        # The device is named, since a default device may be set; and what is made in inference
        # mode could not be written outside of it.
        with torch.inference_mode(False):
            return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def is_capturing(self) -> bool:
        """Ask the current stream."""
        return is_capturing()

    def mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Record an event that keeps the time."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def seconds(self, before: torch.cuda.Event, after: torch.cuda.Event) -> float:
        """Ask the events."""
        before.synchronize()
        after.synchronize()
        return float(before.elapsed_time(after)) / 1e3


def copy_streams_for(device: torch.device) -> CopyStreams | None:
    """Return the streams of a device, given with its index; None where copies never run beside."""
    return CUDACopyStreams(device) if device.type == "cuda" else None

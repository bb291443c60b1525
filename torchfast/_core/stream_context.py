"""Streams of a device, and one of them as a context, cheaply."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch


def on_stream(stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
    """Return a context in which a stream, and its device, are the current ones."""
    # An object of its own, since each can be entered once at a time; and torch.cuda.stream() takes
    # ten times as long.
    return torch.cuda.Stream(
        stream_id=stream.stream_id,
        device_index=stream.device_index,
        device_type=stream.device_type,
    )


class DeviceStreams:
    """Streams of a CUDA device.

    Args:
        device: With its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def new(self) -> torch.cuda.Stream:
        """Return the next of torch's streams."""
        return torch.cuda.Stream(self._device)

    def current(self) -> torch.cuda.Stream:
        """Return this thread's stream on the device."""
        return torch.cuda.current_stream(self._device)

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        """Make a stream, and its device, the current one."""
        return on_stream(stream)

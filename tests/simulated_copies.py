"""A simulated device that offloading can use: late streams, memory that is given out again."""

from __future__ import annotations

import contextlib

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from simulated_streams import SimulatedDevice
from torchfast._core.batches import tensors


class PromptCopies:
    """The CPU as a device whose copies are done at once: for bits, dtypes and whole models."""

    class Stream:
        def record_event(self):
            return self

        def wait_event(self, event):
            assert event is not None

        def synchronize(self):
            pass

    def __init__(self):
        self.main = self.Stream()
        self.capturing = False

    def new(self):
        return self.Stream()

    def current(self):
        return self.main

    def on(self, stream):
        return contextlib.nullcontext()

    def holds(self, tensor):
        return tensor.device.type == "cpu"

    def pinned(self, num_bytes):
        return torch.full((num_bytes,), 0xFF, dtype=torch.uint8)

    def is_capturing(self):
        return self.capturing


class CopyingDevice(SimulatedDevice):
    """What `CopyStreams` asks of a device; tensors are float32."""

    def __init__(self):
        super().__init__()
        self.capturing = False
        self.host_is_apart = False  # whether what has no argument on the device is the host's
        self.num_pinned = 0

    # -- The protocol ------------------------------------------------------------------------------

    def holds(self, tensor):
        return tensor.untyped_storage().data_ptr() in self.blocks

    def place(self, tensor):
        """Return a copy of a tensor in memory of the device."""
        with _disable_current_modes():
            there = self.allocate(self.main, tensor.shape)
            there.copy_(tensor)
        return there

    def pinned(self, num_bytes):
        self.num_pinned += 1
        # Full of what nobody may read: every float of it is NaN.
        with _disable_current_modes():
            return torch.from_numpy(np.full(num_bytes, 0xFF, dtype=np.uint8))

    def is_capturing(self):
        return self.capturing

    # ----------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name in ("slice", "select", "unsqueeze", "_unsafe_view", "split"):
            return func(*args, **(kwargs or {}))
        if name == "empty" and args[0] == [0]:
            return func(*args, **(kwargs or {}))
        if self.host_is_apart and not any(map(self.holds, tensors((args, kwargs)))):
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def read(self, value):
        """Return what is in memory when all that is enqueued on the main stream is done."""
        self.main.synchronize()
        with _disable_current_modes():
            return self.raw(value).clone()

    def num_blocks(self):
        """Return how many blocks of memory are in use."""
        return len(self.blocks)

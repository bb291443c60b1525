"""A simulated device that offloading can use: late streams, memory that is given out again."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

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

        def query(self):
            return True

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

    def mark(self, stream):
        return time.perf_counter()

    def seconds(self, before, after):
        return after - before


class Clock:
    """A stream of `TimedCopies`; an event of it is the time at which it passes."""

    def __init__(self):
        self.now = 0.0

    def record_event(self):
        return self.now

    def wait_event(self, event):
        self.now = max(self.now, event)


class TimedCopies(PromptCopies, TorchDispatchMode):
    """Does everything at once, and says how long a device would have taken.

    An operation of the computation takes a second. Copies go with ``out`` and ``back`` bytes in a
    second.
    """

    Stream = Clock
    COMPUTES = ("mul", "sin", "cos")

    def __init__(self, out, back=None):
        TorchDispatchMode.__init__(self)
        PromptCopies.__init__(self)
        self.rates = out, back or out
        self.stack = [self.main]
        self.slabs = {}
        self.num_marks = 0

    def pinned(self, num_bytes):
        with _disable_current_modes():
            slab = super().pinned(num_bytes)
        self.slabs[slab.untyped_storage()._cdata] = slab
        return slab

    def current(self):
        return self.stack[-1]

    @contextlib.contextmanager
    def on(self, stream):
        self.stack.append(stream)
        try:
            yield
        finally:
            self.stack.pop()

    def mark(self, stream):
        self.num_marks += 1
        return stream.now

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, stream = func._schema.name.removeprefix("aten::"), self.current()
        if stream is self.main:
            stream.now += name in self.COMPUTES
        elif name == "copy_":
            goes_back = args[1].untyped_storage()._cdata in self.slabs
            stream.now += args[0].nbytes / self.rates[goes_back]
        return func(*args, **(kwargs or {}))


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

    def mark(self, stream):
        moment = []
        stream.enqueue(lambda: moment.append(time.perf_counter()))
        return stream, moment

    def seconds(self, before, after):
        for stream, moment in (before, after):
            if not moment:
                stream.synchronize()
        return after[1][0] - before[1][0]

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

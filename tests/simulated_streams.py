"""Streams and their allocator on the CPU: work is done late, freed memory is given out again.

Under `SimulatedDevice` every operation that computes is put on a stream, a thread that does it some
time later. Its result has memory from the pool of that stream, full of NaN until it is computed. As
torch's CUDA allocator does, a pool gives freed memory to the next request of its stream at once,
though another stream may still be reading it, unless that stream was recorded for it.
"""

from __future__ import annotations

import contextlib
import time
import weakref

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from simulated_device import Event, Stream

VIEWS = ("view", "t", "transpose", "detach", "alias", "as_strided", "expand")


class Block:
    """Memory of a stream."""

    def __init__(self, stream, size):
        self.stream = stream
        self.memory = np.full(size, np.nan, dtype=np.float32)
        self.used_on = []
        self.pending = []

    @property
    def is_free(self):
        return all(event.query() for event in self.pending)


class LateStream(Stream):
    """With the methods of a CUDA stream that orders itself by events."""

    def record_event(self):
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event):
        event.wait(self)

    def sleep(self, seconds=0.05):
        self.enqueue(lambda: time.sleep(seconds))


class SimulatedDevice(TorchDispatchMode):
    """A device on the CPU, and what `ParallelBranches` asks of one."""

    def __init__(self):
        super().__init__()
        self.main = LateStream()
        self.streams = [self.main]
        self.stack = [self.main]
        self.free = []
        self.blocks = {}  # in use, by address
        self.num_reused = 0

    # -- The protocol of ParallelBranches --------------------------------------------------------

    def new(self):
        self.streams.append(LateStream())
        return self.streams[-1]

    def current(self):
        return self.stack[-1]

    @contextlib.contextmanager
    def on(self, stream):
        self.stack.append(stream)
        try:
            yield
        finally:
            self.stack.pop()

    def fork(self, current, streams):
        ready = current.record_event()
        for stream in streams:
            stream.wait_event(ready)

    def join(self, current, streams):
        for stream in streams:
            current.wait_event(stream.record_event())

    def record(self, tensor, stream):
        block = self.blocks.get(tensor.untyped_storage().data_ptr())
        if block is not None and stream is not block.stream:
            block.used_on.append(stream)

    # -- Operations and memory -------------------------------------------------------------------

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name in VIEWS:
            return func(*args, **kwargs)
        if name.endswith("_"):  # in place
            result = args[0]
        else:
            on_meta = tree_map_only(torch.Tensor, to_meta, (args, kwargs))
            result = self.allocate(self.current(), func(*on_meta[0], **on_meta[1]).shape)
        # The device reads and writes memory, and keeps no tensor alive.
        target = self.raw(result)
        inputs = tree_map_only(torch.Tensor, self.raw, (args, kwargs))

        def work():
            with torch.no_grad():
                target.copy_(func(*inputs[0], **inputs[1]))

        self.current().enqueue(work)
        return result

    def allocate(self, stream, shape):
        size = int(np.prod(shape))
        for block in self.free:
            if block.stream is stream and block.memory.size == size and block.is_free:
                self.free.remove(block)
                self.num_reused += 1
                break
        else:
            block = Block(stream, size)
        block.used_on, block.pending = [], []
        handle = block.memory.view()
        self.blocks[block.memory.ctypes.data] = block
        weakref.finalize(handle, self.give_back, block)
        return torch.from_numpy(handle).view(shape)

    def give_back(self, block):
        del self.blocks[block.memory.ctypes.data]
        block.pending = [stream.record_event() for stream in block.used_on]
        self.free.append(block)

    def raw(self, tensor):
        """Return the same memory, in a tensor that does not keep it from being given out again."""
        block = self.blocks.get(tensor.untyped_storage().data_ptr())
        if block is None:
            return tensor.detach()
        whole = torch.from_numpy(block.memory.view()).view(tensor.dtype)  # float32, or its bits
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def end(self):
        for stream in self.streams:
            stream.end()


def to_meta(tensor):
    return tensor.detach().to("meta")

"""A device on the CPU whose streams are as slow as a test likes.

Each stream is a thread that does what is enqueued, in order, some time later. What a ring forgets
to order therefore happens in another order, as on a GPU: a batch is read before it was copied, or
overwritten while it is read.
"""

from __future__ import annotations

import contextlib
import gc
import queue
import random
import sys
import threading
import time

import torch
from typing_extensions import override

from torchfast._core.batches import tensors
from torchfast.data import loader, stager
from torchfast.data.transport import Slot, Transport


class Event:
    """Passed once the stream has come to where it was last recorded."""

    def __init__(self):
        self._passed = threading.Event()
        self._passed.set()  # never recorded: nothing to wait for

    def record(self, stream):
        self._passed = threading.Event()
        stream.enqueue(self._passed.set)

    def wait(self, stream):
        passed = self._passed  # of the record before this wait, as CUDA has it
        stream.enqueue(lambda: self._reached(passed))

    @staticmethod
    def _reached(passed):
        assert passed.wait(20), "deadlock between streams"

    def synchronize(self):
        self._reached(self._passed)

    def query(self):
        return self._passed.is_set()


class Stream:
    def __init__(self, delay_s=0.0, seed=0):
        self._work = queue.SimpleQueue()
        self._random = random.Random(seed)
        self.delay_s = delay_s
        self.errors = []
        self._thread = threading.Thread(target=self._run, name="stream", daemon=True)
        self._thread.start()

    def enqueue(self, work):
        self._work.put(work)

    def synchronize(self):
        done = threading.Event()
        self.enqueue(done.set)
        assert done.wait(20), "the stream does not come to an end"
        assert not self.errors, self.errors

    def end(self):
        self.enqueue(None)
        self._thread.join(20)
        assert not self.errors, self.errors

    def _run(self):
        while (work := self._work.get()) is not None:
            if self.delay_s:
                time.sleep(self._random.random() * self.delay_s)
            try:
                work()
            except BaseException as error:
                self.errors.append(error)
            del work  # it may hold the last reference to a ring


class PromptStream(Stream):
    """Does at once what is enqueued."""

    def enqueue(self, work):
        if work is None:
            super().enqueue(work)
        else:
            work()


class SimulatedTransport(Transport):
    """Copies on one stream, reads on another; both are late."""

    stream = Stream

    def __init__(self, copy_delay_s=0.0, consumer_delay_s=0.0):
        self.device = torch.device("cpu")
        self.copy_stream = self.stream(copy_delay_s, seed=1)
        self.consumer = self.stream(consumer_delay_s, seed=2)
        self.num_allocations = 0
        self._blocks = {}
        self.num_copies = self.num_copied = 0

    @override
    def slot(self):
        return Slot(ready=Event(), free=Event())

    @override
    def allocate(self, slot, pinned_bytes, block_bytes):
        self.settle(slot)
        self.num_allocations += 1
        # New memory, full of what nobody may read.
        slot.pinned = torch.full((pinned_bytes,), 251, dtype=torch.uint8)
        slot.blocks = [torch.full((size,), 253, dtype=torch.uint8) for size in block_bytes]
        slot.free.record(self.consumer)

    @override
    def renew(self, slot):
        # What the consumer let go comes back at once, though its stream may still read it.
        slot.blocks = [self._block(block.numel()) for block in slot.blocks]

    def _block(self, size):
        for block in self._blocks.setdefault(size, []):
            if (
                sys.getrefcount(block) == 3
                and torch._C._storage_Use_Count(block.untyped_storage()._cdata) <= 2
            ):
                return block
        self._blocks[size].append(torch.full((size,), 253, dtype=torch.uint8))
        return self._blocks[size][-1]

    @override
    def settle(self, slot):
        slot.ready.synchronize()

    @override
    def upload(self, slot, copies, finish):
        slot.free.wait(self.copy_stream)
        for target, source in copies:
            self.num_copies += 1
            self.copy_stream.enqueue(lambda t=target, s=source: self._copy(t, s))
        slot.held = None
        if finish is None:
            slot.ready.record(self.copy_stream)
            return None
        before = torch.get_rng_state()
        try:
            result = finish()  # for what it draws and what it returns
        except BaseException:
            slot.ready.record(self.copy_stream)
            raise
        blocks = {block.untyped_storage().data_ptr() for block in slot.blocks}
        foreign = any(
            not t.is_sparse and t.untyped_storage().data_ptr() not in blocks
            for t in tensors(result)
        )
        if foreign and torch.equal(before, torch.get_rng_state()):
            self._enqueue_again(finish, result)
        slot.ready.record(self.copy_stream)
        return result

    def _copy(self, target, source):
        target.copy_(source)
        self.num_copied += 1

    def _enqueue_again(self, finish, result):
        """Let what ``finish`` computed be computed behind the copies, into the same tensors."""

        def work():
            for old, new in zip(tensors(result), tensors(finish()), strict=True):
                if not old.is_sparse and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self.copy_stream.enqueue(work)

    @override
    def receive(self, slot):
        slot.stream = self.consumer
        slot.ready.wait(self.consumer)

    @override
    def release(self, slot):
        if slot.stream is not None:
            slot.free.record(slot.stream)
            slot.stream = None

    @override
    def clone(self, tensor):
        copy = tensor.clone() if tensor.is_sparse else torch.full_like(tensor, 7)
        self.consumer.enqueue(lambda: copy.detach().copy_(tensor.detach()))
        return copy

    @override
    def is_idle(self, slot):
        return slot.free.query()

    @override
    def follow(self, followed):
        return followed

    @override
    def drain(self):
        for first, second in (
            (self.copy_stream, self.consumer),
            (self.consumer, self.copy_stream),
        ):
            event = Event()
            event.record(first)
            event.wait(second)

    @override
    def take_times(self):
        return [], []

    def end(self):
        for _ in range(3):  # what is done last may let a ring go, which enqueues something more
            self.copy_stream.synchronize()
            self.consumer.synchronize()
        self.copy_stream.end()
        self.consumer.end()


class Prompt(SimulatedTransport):
    """A device that is never late, so that what comes out can be looked at at once."""

    stream = PromptStream


class Reader:
    """A step on the consumer's stream: it notes what it reads, late."""

    def __init__(self, transport):
        self.transport = transport
        self.seen = []

    def __call__(self, batch):
        kept = list(tensors(batch))
        self.transport.consumer.enqueue(
            lambda: self.seen.append([t.unique().tolist() for t in kept])
        )

    def result(self):
        self.transport.consumer.synchronize()
        return self.seen


def read_all(loader, device):
    """Return what a step reads of each batch of ``loader``."""
    reader = None
    for batch in loader:
        reader = reader or Reader(device.transports[0])
        reader(batch)
    return [] if reader is None else reader.result()


def numbered(count, size=64):
    """Batches that tell their number in every element."""
    return [(torch.full((size,), float(i)), torch.full((3,), i)) for i in range(count)]


def stagers():
    """Return the staging threads that run."""
    return [t for t in threading.enumerate() if t.name == "torchfast-stager"]


def wait_until(true, seconds=20):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@contextlib.contextmanager
def simulated(monkeypatch, too_slow_s=0.0):
    """Let every loader run on one simulated device, whose kind and delays a test may set.

    Any fetch takes long enough for a thread, unless ``too_slow_s`` says otherwise.
    """
    made = []

    class Device:
        copy_delay_s = consumer_delay_s = 0.0
        kind = SimulatedTransport
        transports = made

    def transport_for(_):
        if not made:
            made.append(Device.kind(Device.copy_delay_s, Device.consumer_delay_s))
        return made[0]

    monkeypatch.setattr(loader, "transport_for", transport_for)
    monkeypatch.setattr(stager, "TOO_SLOW_S", too_slow_s)
    yield Device
    gc.collect()
    wait_until(lambda: not stagers())
    for transport in made:
        transport.end()


def numbers(batches):
    return [int(x[0]) for x, y in batches]

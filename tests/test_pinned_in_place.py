"""Workers' memory that the device reads where it is, on a simulated device that is late.

Another process is played that waits for the very moment: what is given back is overwritten at once.
"""

from __future__ import annotations

import ctypes
import gc
import time

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from simulated_device import Reader, SimulatedTransport, read_all
from torchfast import MonitoredDataLoader, PrefetchingLoader
from torchfast.data import pool_receiver, ring
from torchfast.data.layout import LARGE_BYTES

NUM_BATCHES = 60
POISON = 0x7B


class Numbered(Dataset):
    """Batches of a large tensor and a small one that tell their number in each element."""

    def __len__(self):
        return 2 * NUM_BATCHES

    def __getitem__(self, index):
        return torch.full((LARGE_BYTES // 8,), index // 2, dtype=torch.int64), index // 2


class Slow(Numbered):
    """Lets the process that trains come first, on a busy machine too."""

    def __getitem__(self, index):
        time.sleep(0.01)
        return super().__getitem__(index)


class Late(SimulatedTransport):
    """Reads sources by their address, as a device does: nothing in a copy holds them."""

    def __init__(self, *delays):
        super().__init__(*delays)
        self.pinned = {}
        self.most_pinned = 0
        self.refuses = False

    def pin(self, address, num_bytes):
        if self.refuses:
            raise RuntimeError("no more memory may be locked")
        assert address not in self.pinned
        self.pinned[address] = num_bytes
        self.most_pinned = max(self.most_pinned, len(self.pinned))
        return lambda: self.pinned.pop(address)

    def is_pinned(self, tensor):
        address = tensor.data_ptr()
        return any(start <= address < start + size for start, size in self.pinned.items())

    def is_copied(self, slot):
        return slot.ready.query()

    def settle_lent(self, slot):
        slot.free.synchronize()

    def upload(self, slot, copies, finish):
        by_address = [(target, unheld(source)) for target, source in copies]
        return super().upload(slot, by_address, finish)


def unheld(source):
    if not source.numel():
        return source
    memory = (ctypes.c_char * source.nbytes).from_address(source.data_ptr())
    return torch.frombuffer(memory, dtype=source.dtype).view(source.shape)


@pytest.fixture
def late(device, monkeypatch):
    device.kind = Late
    device.copy_delay_s = device.consumer_delay_s = 0.002
    monkeypatch.setattr(
        Tensor, "is_pinned", lambda t: bool(device.transports) and device.transports[0].is_pinned(t)
    )

    mapped_for_ever = []  # or who reads too early gets no wrong bytes, but a fault

    def poisoned(mapped):
        mapped_for_ever.append(mapped.block)
        mapped.block.bytes[64:] = POISON
        mapped.block.is_in_use = False

    monkeypatch.setattr(pool_receiver._Mapped, "release", poisoned)
    return device


def recycled(workers=2, *, data=None, **options):
    return MonitoredDataLoader(
        data or Numbered(), 2, num_workers=workers, recycle_memory=True, **options
    )


EXPECTED = [[[i], [i]] for i in range(NUM_BATCHES)]


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 8])
def test_every_byte_is_right(late, depth, reuse):
    upstream = recycled()
    with PrefetchingLoader(upstream, "cpu", depth=depth, reuse=reuse) as loader:
        assert read_all(loader, late) == EXPECTED
        memory = upstream.memory()
        report = str(loader.report())
    assert memory.num_recycled == NUM_BATCHES
    assert memory.num_pinned == memory.num_blocks
    assert "pinned in place" in report


@pytest.mark.parametrize("reuse", [True, False])
def test_with_a_transform_that_comes_late(late, reuse):
    def transform(batch):
        large, small = batch
        return large + 1, small

    with PrefetchingLoader(recycled(), "cpu", reuse=reuse, transform=transform) as loader:
        seen = read_all(loader, late)
    # The first is transformed in the loop's thread at once, where this device is not simulated.
    assert seen[1:] == [[[i + 1], [i]] for i in range(1, NUM_BATCHES)]


@pytest.mark.parametrize("depth", [2, 8])
def test_sources_let_go_when_the_copy_is_enqueued_are_overwritten(late, monkeypatch, depth):
    stage = ring.Ring.stage

    def too_early(self, slot, batch, position):
        staged = stage(self, slot, batch, position)
        slot.sources = None
        return staged

    monkeypatch.setattr(ring.Ring, "stage", too_early)
    with PrefetchingLoader(recycled(), "cpu", depth=depth, reuse=True) as loader:
        assert read_all(loader, late) != EXPECTED


def test_nothing_large_is_staged(late):
    with PrefetchingLoader(recycled(), "cpu", reuse=True) as loader:
        assert read_all(loader, late) == EXPECTED
        assert all(slot.pinned.numel() < LARGE_BYTES for slot in loader._ring.slots)


def test_a_loader_that_closes_waits_for_its_copies(late):
    late.copy_delay_s = 0.05
    upstream = recycled(persistent_workers=True)
    loader = PrefetchingLoader(upstream, "cpu", depth=4)
    batches = iter(loader)
    reader, kept = None, []
    for _ in range(6):
        kept.append(next(batches))
        reader = reader or Reader(late.transports[0])
    reader(kept)  # late: behind the copies, and behind the end of the loader
    loader.close()
    assert reader.result() == [[[i] for number in range(6) for i in (number, number)]]
    assert upstream._iterator is not None
    assert late.transports[0].pinned == {}


def test_without_that_wait_they_read_what_is_not_theirs(late, monkeypatch):
    monkeypatch.setattr(ring, "_settle", lambda transport, slots: None)
    late.copy_delay_s = 0.05
    loader = PrefetchingLoader(recycled(persistent_workers=True), "cpu", depth=4)
    batches = iter(loader)
    kept = [next(batches) for _ in range(6)]
    reader = Reader(late.transports[0])
    reader(kept)
    loader.close()
    loader = batches = None
    gc.collect()
    assert reader.result() != [[[i] for number in range(6) for i in (number, number)]]


def test_a_ring_that_is_dropped_waits_too(late):
    late.copy_delay_s = 0.05
    upstream = recycled(persistent_workers=True)
    batches = iter(PrefetchingLoader(upstream, "cpu", depth=4))
    kept = [next(batches) for _ in range(6)]
    reader = Reader(late.transports[0])
    reader(kept)
    batches.close()
    del batches
    gc.collect()
    assert reader.result() == [[[i] for number in range(6) for i in (number, number)]]


def test_a_plain_consumer_has_nothing_pinned(late):
    upstream = recycled(persistent_workers=True)
    with PrefetchingLoader(upstream, "cpu") as loader:
        for _, batch in zip(range(20), loader, strict=False):
            del batch
        transport = late.transports[0]
        transport.consumer.synchronize()
        assert transport.pinned
        for batch in upstream:  # while the other still lives
            assert not transport.is_pinned(batch[0])
        del batch
        assert upstream.memory().num_pinned == len(transport.pinned)
        # and pinned again for whom it is safe
        assert read_all(loader, late) == EXPECTED
        assert transport.pinned
    assert transport.pinned == {}
    assert transport.most_pinned <= 2 * (2 + 6)


def test_an_iterable_over_it_is_a_plain_consumer(late):
    upstream = recycled()
    generator = (batch for batch in upstream)
    with PrefetchingLoader(generator, "cpu", reuse=True) as loader:
        assert read_all(loader, late) == EXPECTED
    assert late.transports[0].most_pinned == 0


def test_what_cannot_be_pinned_is_staged_and_said_once(late):
    class Refusing(Late):
        def __init__(self, *delays):
            super().__init__(*delays)
            self.refuses = True

    late.kind = Refusing
    upstream = recycled()
    with PrefetchingLoader(upstream, "cpu", reuse=True) as loader:
        assert read_all(loader, late) == EXPECTED
        decision = next(d for d in loader.report().decisions if d.lever == "recycle_memory")
    assert decision.outcome == "stepped aside"
    assert "no more memory may be locked" in decision.detail
    assert upstream.memory().num_pinned == 0
    assert upstream.memory().num_recycled == NUM_BATCHES


def test_memory_is_unpinned_when_its_loader_goes(late):
    upstream = recycled(workers=1)
    with PrefetchingLoader(upstream, "cpu") as loader:
        assert read_all(loader, late) == EXPECTED
        gc.collect()
    gc.collect()
    assert late.transports[0].most_pinned > 0
    assert late.transports[0].pinned == {}
    assert upstream.memory().num_blocks == 0


def test_sources_are_let_go_before_their_slot_comes_again(late):
    late.copy_delay_s = late.consumer_delay_s = 0.0
    upstream = recycled(workers=1, data=Slow())
    with PrefetchingLoader(upstream, "cpu", depth=8, reuse=True) as loader:
        assert read_all(loader, late) == EXPECTED
        # With nine slots that hold theirs for a round it would be all that a worker may have.
        assert upstream.memory().num_ordinary == 0


class Movable:
    """Moves what it holds by itself, without waiting."""

    def __init__(self, held):
        self.held = held

    def to(self, device):
        moved = torch.full_like(self.held, 7)
        source = unheld(self.held)
        DEVICES[0].transports[0].consumer.enqueue(lambda: moved.copy_(source))
        return moved


DEVICES: list = []  # for objects that come out of a pickle


class Objects(Numbered):
    def __getitem__(self, index):
        return [super().__getitem__(index)[0]]


def as_object(samples):
    return [Movable(torch.stack([s[0] for s in samples]))]


@pytest.mark.parametrize("drops", [False, True])
def test_objects_that_move_themselves_are_held_until_the_step_is_done(late, monkeypatch, drops):
    if drops:  # what would be without

        def early(self, slot, batch, position, stage=ring.Ring.stage):
            staged = stage(self, slot, batch, position)
            slot.lent = None
            return staged

        monkeypatch.setattr(ring.Ring, "stage", early)
    late.consumer_delay_s = 0.01
    DEVICES[:] = [late]
    upstream = MonitoredDataLoader(
        Objects(), 2, num_workers=2, recycle_memory=True, collate_fn=as_object
    )
    seen = []
    with PrefetchingLoader(upstream, "cpu", depth=2) as loader:
        for (moved,) in loader:
            late.transports[0].consumer.enqueue(
                lambda moved=moved: seen.append(moved.unique().tolist())
            )
            del moved
        late.transports[0].consumer.synchronize()
    DEVICES.clear()
    assert (seen == [[i] for i in range(NUM_BATCHES)]) != drops

"""Workers' memory that a real device reads where it is, while other processes write there again."""

from __future__ import annotations

import gc
import random

import pytest
import torch
from torch.utils.data import Dataset

from gpu.test_prefetching_on_gpu import Late, LateCopies
from simulated_device import stagers, wait_until
from torchfast import MonitoredDataLoader, PrefetchingLoader, build_dataloader
from torchfast.data import loader as loader_module
from torchfast.data import pool_receiver, ring, stager
from torchfast.data.layout import LARGE_BYTES
from torchfast.data.shared_memory import Block
from torchfast.data.transport import CUDATransport

pytestmark = pytest.mark.requires(gpus=1)

STEPS, FEW = 2_000, 60
SIZE = 2**15  # elements of a sample; two of them are a batch of 512 kB
POISON = 0x7B
LONG = 20_000_000  # cycles: about 10 ms


@pytest.fixture(autouse=True)
def with_a_thread(monkeypatch):
    monkeypatch.setattr(stager, "TOO_SLOW_S", 0.0)
    yield
    gc.collect()
    wait_until(lambda: not stagers())


class Numbered(Dataset):
    """Batches of a large tensor and a small one that tell their number in each element."""

    def __init__(self, steps):
        self.steps = steps

    def __len__(self):
        return 2 * self.steps

    def __getitem__(self, index):
        return torch.full((SIZE,), index // 2), index // 2


def recycled(steps, workers=4, **options):
    return MonitoredDataLoader(
        Numbered(steps), 2, num_workers=workers, recycle_memory=True, **options
    )


def num_wrong(upstream, depth, reuse=True, late_reads=True, read_after=0):
    """Return in how many steps the device read something else than what was sent."""
    lateness = random.Random(1)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    number = -1
    with PrefetchingLoader(upstream, "cuda", depth=depth, reuse=reuse) as loader:
        for number, (x, y) in enumerate(loader):
            if read_after:
                torch.cuda._sleep(read_after)
            elif late_reads and number % 5 == 0:
                torch.cuda._sleep(lateness.randrange(200_000))
            wrong += (x != number).any() | (y != number).any()
        staged = max(slot.pinned.numel() for slot in loader._ring.slots)
        report = loader.report()
    assert number == upstream.dataset.steps - 1
    assert staged < LARGE_BYTES  # only what is small
    decision = next(d for d in report.decisions if d.lever == "recycle_memory")
    assert decision.outcome == "applied", decision.detail
    return int(wrong)


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 8])
def test_two_thousand_batches_arrive_whole_whatever_is_late(monkeypatch, depth, reuse):
    monkeypatch.setattr(loader_module, "transport_for", Late)
    upstream = recycled(STEPS)
    assert num_wrong(upstream, depth, reuse) == 0
    memory = upstream.memory()
    assert memory.not_pinned == ""
    assert memory.num_recycled >= STEPS - 50
    gc.collect()
    assert upstream.memory().num_pinned == 0  # the workers are gone, and their memory


def poisoned(monkeypatch):
    """Let another process be there at once where memory is given back."""
    mapped_for_ever = []

    def release(mapped):
        mapped_for_ever.append(mapped.block)
        mapped.block.bytes[64:] = POISON
        mapped.block.is_in_use = False

    monkeypatch.setattr(pool_receiver._Mapped, "release", release)


@pytest.mark.parametrize("depth", [1, 2, 8])
def test_copies_that_come_late_read_what_was_sent(monkeypatch, depth):
    poisoned(monkeypatch)
    monkeypatch.setattr(loader_module, "transport_for", LateCopies)
    assert num_wrong(recycled(FEW), depth) == 0


@pytest.mark.parametrize("depth", [1, 2, 8])
def test_reads_that_come_late_read_what_was_sent(monkeypatch, depth):
    poisoned(monkeypatch)
    assert num_wrong(recycled(FEW), depth, read_after=LONG) == 0


def test_sources_let_go_when_the_copy_is_enqueued_are_overwritten(monkeypatch):
    stage = ring.Ring.stage

    def too_early(self, slot, batch, position):
        staged = stage(self, slot, batch, position)
        slot.sources = None
        return staged

    poisoned(monkeypatch)
    monkeypatch.setattr(ring.Ring, "stage", too_early)
    monkeypatch.setattr(loader_module, "transport_for", LateCopies)
    assert num_wrong(recycled(FEW), 2) > 0


def test_a_loader_that_closes_waits_for_its_copies(monkeypatch):
    poisoned(monkeypatch)
    monkeypatch.setattr(loader_module, "transport_for", LateCopies)
    upstream = recycled(FEW, persistent_workers=True)
    loader = PrefetchingLoader(upstream, "cuda", depth=4)
    batches = iter(loader)
    kept = [next(batches)[0] for _ in range(6)]
    loader.close()
    assert [batch.unique().tolist() for batch in kept] == [[number] for number in range(6)]


def blocks_of(upstream):
    return [mapped.block for mapped in upstream._iterator.receiver._blocks.values()]


def test_blocks_are_pinned_where_they_are_and_unpinned_at_the_end():
    upstream = recycled(100, persistent_workers=True)
    with PrefetchingLoader(upstream, "cuda") as loader:
        for _ in range(2):
            for batch in loader:
                assert batch[0].is_cuda
        blocks = blocks_of(upstream)
        assert blocks
        assert all(block.bytes.is_pinned() for block in blocks)
        assert upstream.memory().num_pinned == len(blocks)
    assert not any(block.bytes.is_pinned() for block in blocks)
    assert upstream.memory().num_pinned == 0
    for batch in upstream:  # a plain loop, over the same workers
        assert not batch[0].is_pinned()
    del batch
    with PrefetchingLoader(upstream, "cuda") as loader:  # and another one
        assert sum(int(x[0, 0]) for x, _ in loader) == sum(range(100))
        assert all(block.bytes.is_pinned() for block in blocks_of(upstream))


def test_a_plain_loop_between_has_nothing_pinned():
    upstream = recycled(100, persistent_workers=True)
    loader = PrefetchingLoader(upstream, "cuda")
    for batch in loader:
        del batch
    seen = []
    for number, batch in enumerate(upstream):
        assert not batch[0].is_pinned()
        seen.append((number, batch[0].to("cuda", non_blocking=True)))
        del batch
    assert all(bool((x == number).all()) for number, x in seen)
    loader.close()


def test_memory_is_flat():
    upstream = build_dataloader(Numbered(200), 2, num_workers=4, device="cuda")
    assert upstream.recycle_memory
    assert not upstream.pin_memory
    figures = []
    with PrefetchingLoader(upstream, "cuda") as loader:
        for _ in range(6):
            for batch in loader:
                del batch
            torch.cuda.synchronize()
            figures.append(torch.cuda.memory_reserved())
    assert len(set(figures[2:])) == 1, figures
    memory = upstream.memory()
    assert memory.num_ordinary == 0
    assert memory.num_blocks <= 4 * (2 + 4)  # of each worker: ahead, in hand, on its way


def test_what_cuda_refuses_is_an_error_that_nobody_else_sees():
    transport = CUDATransport(torch.device("cuda", 0))
    block = Block.of_size(2**20)
    unpin = transport.pin(block.start, block.num_bytes)
    assert block.bytes.is_pinned()
    with pytest.raises(RuntimeError, match="could not pin 1048576 bytes"):
        transport.pin(block.start, block.num_bytes)  # it is already
    assert torch.ones(3, device="cuda").sum().item() == 3  # no launch is blamed for it
    torch.cuda.synchronize()
    unpin()
    assert not block.bytes.is_pinned()


def test_what_cannot_be_pinned_is_staged(monkeypatch):
    def refused(*_):
        raise RuntimeError("no more memory may be locked")

    monkeypatch.setattr(CUDATransport, "pin", refused)
    upstream = recycled(100)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    with PrefetchingLoader(upstream, "cuda") as loader:
        for number, (x, y) in enumerate(loader):
            wrong += (x != number).any() | (y != number).any()
        decision = next(d for d in loader.report().decisions if d.lever == "recycle_memory")
    assert int(wrong) == 0
    assert decision.outcome == "stepped aside"
    assert "no more memory may be locked" in decision.detail

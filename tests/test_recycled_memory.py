"""A loader whose workers write into the same shared memory again, against one that does not."""

from __future__ import annotations

import collections
import gc
import multiprocessing
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, _utils, get_worker_info

from torchfast import MonitoredDataLoader, PrefetchingLoader, build_dataloader, sweep_workers
from torchfast._core.rng import get_rng_state, same_rng_state
from torchfast.data.pool_receiver import PooledIterator
from torchfast.data.pooled_collate import empty_batch
from torchfast.data.shared_pool import SPARE_BLOCKS

Sample = collections.namedtuple("Sample", "image label name")


class Augmented(Dataset):
    """Draws from all three generators of a worker."""

    def __init__(self, count=23):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        noise = torch.rand(3, 4) + random.random()
        image = noise + torch.from_numpy(np.random.rand(3, 4))
        return Sample(image, index, {"name": str(index), "weights": np.full(2, index)})


class Ragged(Augmented):
    def __getitem__(self, index):
        return torch.full((1 + index * 37 % 11 * 100,), float(index))


class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        for index in range(info.id, 19, info.num_workers):
            yield torch.rand(5), index


class Whole(Dataset):
    """Makes whole batches, in memory of its own or in what it asks for."""

    def __init__(self, asks):
        self.asks = asks

    def __len__(self):
        return 12

    def __getitem__(self, index):
        shape = (4, 6)
        made = empty_batch(shape) if self.asks else torch.empty(shape)
        return {"x": made.fill_(index), "y": [torch.arange(index)]}


class Large(Dataset):
    """Batches of two elements, 400 kB, that tell their number in every byte."""

    def __len__(self):
        return 400

    def __getitem__(self, index):
        return torch.full((50_000,), index // 2, dtype=torch.int32)


def first_is_longest(samples):
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


def seed_more(worker_id):
    random.seed(random.random() + worker_id)


@pytest.fixture(autouse=True)
def nothing_is_left():
    gc.collect()
    before = set(multiprocessing.active_children())
    yield
    gc.collect()
    assert set(multiprocessing.active_children()) == before


def run(loader, epochs=2):
    """Return all batches of some epochs, and the generators after each."""
    torch.manual_seed(3)
    random.seed(4)
    np.random.seed(5)
    found = []
    for _ in range(epochs):
        batches = list(loader)
        found.append((batches, get_rng_state(torch.device("cpu"))))
    del loader
    return found


def assert_same(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.stride()) == (b.dtype, b.stride())
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


CASES = {
    "map": (Augmented(), {"batch_size": 4}),
    "shuffled": (Augmented(), {"batch_size": 4, "shuffle": True}),
    "stays": (Augmented(), {"batch_size": 4, "shuffle": True, "persistent_workers": True}),
    "single": (Augmented(), {"batch_size": None}),
    "drop last": (Augmented(), {"batch_size": 5, "drop_last": True, "prefetch_factor": 1}),
    "init": (Augmented(), {"batch_size": 4, "worker_init_fn": seed_more}),
    "stream": (Stream(), {"batch_size": 3}),
    "stream stays": (Stream(), {"batch_size": 3, "persistent_workers": True}),
    "ragged": (Ragged(), {"batch_size": 3, "collate_fn": first_is_longest}),
    "whole": (Whole(False), {"batch_size": None, "persistent_workers": True}),
    "whole, asked for": (Whole(True), {"batch_size": None, "persistent_workers": True}),
    "spawn": (Augmented(9), {"batch_size": 3, "multiprocessing_context": "spawn"}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_batches_are_those_of_torch_to_the_bit(case):
    dataset, options = CASES[case]
    epochs = 1 if case == "spawn" else 2
    expected = run(DataLoader(dataset, num_workers=2, **options), epochs)
    loader = MonitoredDataLoader(dataset, num_workers=2, recycle_memory=True, **options)
    found = run(loader, epochs)
    for (theirs, state), (ours, our_state) in zip(expected, found, strict=True):
        assert_same(theirs, ours)
        assert same_rng_state(state, our_state)
    assert loader.memory().num_recycled > 0


def test_other_generators_than_the_global_ones():
    def loaded(recycles):
        generator = torch.Generator().manual_seed(1)
        loader = MonitoredDataLoader(
            Augmented(),
            4,
            shuffle=True,
            num_workers=2,
            generator=generator,
            recycle_memory=recycles,
        )
        return list(loader), generator.get_state()

    theirs, state = loaded(False)
    ours, our_state = loaded(True)
    assert_same(theirs, ours)
    assert torch.equal(state, our_state)


@pytest.mark.parametrize("persistent", [True, False])
def test_a_batch_that_is_kept_stays_as_it_is(persistent):
    # Some are dropped at once, some later, in any order; workers are always ahead.
    loader = MonitoredDataLoader(
        Large(), 2, num_workers=2, persistent_workers=persistent, recycle_memory=True
    )
    draw = random.Random(0)
    kept = {}
    for _ in range(2):
        for number, batch in enumerate(loader):
            kept[number] = batch[draw.randrange(2)]  # a view
            del batch
            while len(kept) > draw.randrange(1, 14):
                old = draw.choice(list(kept))
                assert kept.pop(old).unique().tolist() == [old]
    for number, batch in kept.items():
        assert batch.unique().tolist() == [number]
    memory = loader.memory()
    assert memory.num_recycled >= 350
    kept.clear()


def test_a_batch_in_use_that_is_called_free_is_overwritten(monkeypatch):
    # What the test above would see if memory were given back too early.
    from torchfast.data import pool_receiver

    opened = pool_receiver.Receiver.opened

    def too_early(self, message):
        batch = opened(self, message)
        for mapped in self._blocks.values():
            mapped.release()
        return batch

    monkeypatch.setattr(pool_receiver.Receiver, "opened", too_early)
    loader = MonitoredDataLoader(Large(), 2, num_workers=1, recycle_memory=True)
    kept = [batch for _, batch in zip(range(60), loader, strict=False)]
    assert any(batch.unique().tolist() != [number] for number, batch in enumerate(kept))


def test_the_memory_is_bounded_and_used_again():
    loader = MonitoredDataLoader(
        Large(), 2, num_workers=2, persistent_workers=True, recycle_memory=True
    )
    for _ in range(2):
        for batch in loader:
            assert batch.shape == (2, 50_000)
            del batch
    memory = loader.memory()
    assert (memory.num_recycled, memory.num_ordinary) == (400, 0)
    assert memory.num_blocks <= 2 * (2 + 3)
    kept = list(loader)
    memory = loader.memory()
    assert memory.num_blocks == 2 * (2 + SPARE_BLOCKS)
    assert memory.num_ordinary == 200 - memory.num_blocks
    assert [batch[0, 0].item() for batch in kept] == list(range(200))
    assert memory.num_bytes <= memory.num_blocks * 400_000 * 1.3
    del loader
    gc.collect()
    assert kept[3].unique().tolist() == [3]  # they outlive their loader


def test_an_epoch_that_breaks_off_gives_its_memory_back():
    loader = MonitoredDataLoader(
        Large(), 2, num_workers=2, persistent_workers=True, recycle_memory=True
    )
    for _ in range(12):
        assert next(iter(loader)).shape == (2, 50_000)
    assert sum(1 for _ in loader) == 200
    memory = loader.memory()
    assert memory.num_blocks <= 2 * (2 + 3)
    assert memory.num_ordinary == 0
    assert memory.num_recycled >= 212


def test_out_of_order():
    loader = MonitoredDataLoader(Large(), 2, num_workers=2, in_order=False, recycle_memory=True)
    assert sorted(int(batch[0, 0]) for batch in loader) == list(range(200))


def test_torch_s_pinning_copies_what_came(monkeypatch):
    # Here there is nothing to pin for, so its part in it is played.
    def pinned(batch, device):
        assert device == "played"
        return batch.clone() if isinstance(batch, torch.Tensor) else batch.pin_memory()

    monkeypatch.setattr(_utils.pin_memory, "pin_memory", pinned)

    class Played(PooledIterator):
        def _try_get_data(self, timeout=5.0):
            found, data = super()._try_get_data(timeout)
            self._pin_memory_device = "played"
            if found and hasattr(data[1], "pin_memory"):
                data = data[0], pinned(data[1], "played")
            return found, data

    monkeypatch.setattr("torchfast.data.monitored.PooledIterator", Played)
    loader = MonitoredDataLoader(Large(), 2, num_workers=1, recycle_memory=True)
    kept = list(loader)
    assert [int(batch[0, 0]) for batch in kept] == list(range(200))
    assert loader.memory().num_ordinary == 0  # the copies held no block


# -- Around it -------------------------------------------------------------------------------------


def test_the_loader_shows_what_it_was_given():
    loader = build_dataloader(
        Augmented(), 4, num_workers=1, collate_fn=list, worker_init_fn=seed_more
    )
    assert loader.recycle_memory
    iterator = iter(loader)
    assert loader.collate_fn is list
    assert loader.worker_init_fn is seed_more
    del iterator


def test_the_report_tells_it():
    loader = build_dataloader(Large(), 2, num_workers=1)
    assert "used again" in str(loader.report()) or "again into shared" in str(loader.report())
    for _ in loader:
        pass
    counters = loader.report().counters
    assert counters["num_recycled"] == 200
    assert counters["num_bytes"] > 400_000
    assert "num_recycled" not in build_dataloader(Large(), 2, num_workers=0).report().counters


def test_what_is_chosen():
    def chosen(**options):
        loader = build_dataloader(Large(), 2, **options)
        return loader.recycle_memory, loader.pin_memory

    assert chosen(num_workers=2) == (True, False)
    assert chosen(num_workers=0) == (False, False)
    assert chosen(num_workers=2, recycle_memory=False) == (False, False)
    assert chosen(num_workers=2, pin_memory=True) == (False, True)
    assert chosen(num_workers=2, pin_memory=True, recycle_memory=True) == (True, True)
    with pytest.raises(ValueError, match="recycle_memory=True needs worker processes"):
        build_dataloader(Large(), 2, num_workers=0, recycle_memory=True)
    with pytest.raises(TypeError, match="recycle_memory must be 'auto', True or False, got 1"):
        build_dataloader(Large(), 2, num_workers=1, recycle_memory=1)
    with pytest.raises(TypeError, match="recycle_memory must be True or False"):
        MonitoredDataLoader(Large(), 2, recycle_memory="auto")


@pytest.mark.parametrize("recycles", [True, False])
def test_a_sweep_measures_with_it(monkeypatch, recycles):
    seen = []
    found = PooledIterator.__init__

    def noted(self, *args):
        seen.append(True)
        found(self, *args)

    monkeypatch.setattr(PooledIterator, "__init__", noted)
    sweep = sweep_workers(
        Large(), 2, max_workers=1, budget_s=1, device="cpu", recycle_memory=recycles
    )
    assert sweep.measurements[1].batches_per_s
    assert bool(seen) == recycles


def test_through_a_prefetching_loader_with_its_position():
    def loaded(recycles):
        loader = build_dataloader(Augmented(), 4, num_workers=2, recycle_memory=recycles)
        torch.manual_seed(1)
        with PrefetchingLoader(loader, "cpu") as batches:
            iterator = iter(batches)
            first = [next(iterator) for _ in range(3)]
            state = batches.state_dict()
            iterator.close()
        again = build_dataloader(Augmented(), 4, num_workers=2, recycle_memory=recycles)
        with PrefetchingLoader(again, "cpu") as batches:
            batches.load_state_dict(state)
            return first + list(batches)

    assert_same(loaded(False), loaded(True))

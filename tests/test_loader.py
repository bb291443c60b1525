"""The loader of the device: groups, length, random numbers, epochs."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
)

from containers import CPU, META, Ordinary, ones
from models import make_batches
from torchfast import MicroBatches, PrefetchingLoader, Trainer, shard_loader
from torchfast.data.samplers import samplers_of

# --- MicroBatches -------------------------------------------------------------------------------


def test_micro_batches_hold_what_they_were_given():
    batches = make_batches(3)
    group = MicroBatches(batches)
    assert len(group) == 3
    assert list(group) == batches
    assert group[1] is batches[1]
    assert repr(group) == "MicroBatches(3 x tuple)"
    batches.clear()
    assert len(group) == 3


@pytest.mark.parametrize("wrong", [torch.ones(3, 2), "text", {"a": 1}, iter([1]), 3])
def test_micro_batches_take_a_sequence_of_batches(wrong):
    with pytest.raises(TypeError, match=f"list or tuple of batches, got {type(wrong).__name__}"):
        MicroBatches(wrong)


def test_micro_batches_are_never_empty():
    with pytest.raises(ValueError, match="at least one batch, got an empty sequence"):
        MicroBatches([])


# --- PrefetchingLoader --------------------------------------------------------------------------


def test_batches_come_in_order_on_the_device():
    batches = make_batches(3, kind="dict")
    moved = list(PrefetchingLoader(batches, META))
    assert [m["inputs"].device for m in moved] == [META] * 3
    same = list(PrefetchingLoader(batches, CPU))
    assert all(torch.equal(a["inputs"], b["inputs"]) for a, b in zip(same, batches, strict=True))


@pytest.mark.usefixtures("every_way")
@pytest.mark.parametrize(
    ("count", "accumulate", "sizes"), [(6, 3, [3, 3]), (7, 3, [3, 3, 1]), (2, 4, [2]), (0, 2, [])]
)
def test_groups_are_full_but_the_last(count, accumulate, sizes):
    batches = make_batches(count)
    loader = PrefetchingLoader(batches, CPU, accumulate=accumulate)
    groups = list(loader)
    assert [len(group) for group in groups] == sizes
    assert all(type(group) is MicroBatches for group in groups)
    seen = [tensor for group in groups for batch in group for tensor in batch]
    given = [tensor for batch in batches for tensor in batch]
    assert all(torch.equal(a, b) for a, b in zip(seen, given, strict=True))
    assert len(loader) == len(sizes)


@pytest.mark.usefixtures("every_way")
def test_a_group_does_not_cross_an_epoch():
    loader = PrefetchingLoader(make_batches(3), CPU, accumulate=2)
    assert [len(group) for _ in range(2) for group in loader] == [2, 1, 2, 1]


def test_without_accumulation_a_list_is_a_batch():
    batch = [torch.ones(2), torch.ones(2)]
    ((first, second),) = PrefetchingLoader([batch], CPU)
    assert torch.equal(torch.stack([first, second]), torch.stack(batch))


@pytest.mark.usefixtures("every_way")
def test_the_layout_reaches_every_batch():
    loader = PrefetchingLoader([torch.randn(2, 3, 4, 4)] * 3, CPU, accumulate=2, channels_last=True)
    for group in loader:
        assert all(b.is_contiguous(memory_format=torch.channels_last) for b in group)


@pytest.mark.usefixtures("every_way")
def test_a_loader_of_a_loader_keeps_what_becomes_of_a_batch():
    batches = [torch.full((2, 3, 4, 4), i + 1 / 3) for i in range(4)]
    options = {"transform": lambda x: -x, "transfer_dtype": torch.bfloat16, "channels_last": True}
    expected = list(PrefetchingLoader(batches, CPU, **options))
    model = torch.nn.Linear(1, 1)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), lambda m, b: b.sum())
    for outer in (
        PrefetchingLoader(PrefetchingLoader(batches, CPU, **options), CPU),
        trainer.prefetch(PrefetchingLoader(batches, CPU, **options)),
        PrefetchingLoader(PrefetchingLoader(batches, CPU), CPU, **options),
    ):
        found = list(outer)
        assert all(map(torch.equal, found, expected))
        assert found[1].dtype == torch.bfloat16
        assert found[1].is_contiguous(memory_format=torch.channels_last)
        assert float(found[3][0, 0, 0, 0]) < -3


class Unsized(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(4.0))


@pytest.mark.usefixtures("every_way")
@pytest.mark.parametrize(
    ("loader", "name"),
    [((b for b in ()), "generator"), (DataLoader(Unsized()), "DataLoader")],
)
def test_a_length_is_never_guessed(loader, name):
    with pytest.raises(TypeError, match=rf"loader \({name}\) has no length; give steps="):
        len(PrefetchingLoader(loader, CPU))


@pytest.mark.parametrize("loader", [3, None, Ordinary(), torch.nn.ReLU(), len])
def test_what_is_not_iterable_is_refused(loader):
    with pytest.raises(TypeError, match=rf"must be an iterable.*\({type(loader).__name__}\)"):
        PrefetchingLoader(loader, CPU)


@pytest.mark.usefixtures("every_way")
def test_the_old_sequence_protocol_is_iterable():
    class Old:
        def __getitem__(self, index):
            if index == 2:
                raise IndexError
            return torch.full((), float(index))

    assert len(list(PrefetchingLoader(Old(), CPU))) == 2


class Watched:
    """Counts what is done to it."""

    def __init__(self, batches):
        self.batches = batches
        self.calls = []

    def __iter__(self):
        self.calls.append("iter")
        for batch in self.batches:
            self.calls.append("next")
            yield batch

    def __len__(self):
        self.calls.append("len")
        return len(self.batches)


@pytest.mark.usefixtures("every_way")
def test_construction_starts_nothing():
    watched = Watched(make_batches(2))
    loader = PrefetchingLoader(watched, CPU)
    assert not loader.is_one_shot
    assert watched.calls == []
    batches = iter(loader)
    next(batches)
    assert watched.calls == ["iter", "next"]


@pytest.mark.usefixtures("every_way")
def test_construction_draws_no_random_number():
    before = torch.get_rng_state()
    PrefetchingLoader(DataLoader(TensorDataset(ones()), shuffle=True), CPU)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.usefixtures("every_way")
def test_random_numbers_and_order_are_those_of_the_loader():
    data = TensorDataset(torch.arange(10.0))
    torch.manual_seed(3)
    plain = [b for _ in range(2) for (b,) in DataLoader(data, batch_size=3, shuffle=True)]
    after = torch.get_rng_state()
    torch.manual_seed(3)
    loader = PrefetchingLoader(DataLoader(data, batch_size=3, shuffle=True), CPU)
    ours = [b for _ in range(2) for (b,) in loader]
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.usefixtures("every_way")
@pytest.mark.filterwarnings("ignore:.* is used up:UserWarning")
def test_an_iterator_serves_once():
    loader = PrefetchingLoader((b for b in make_batches(2)), CPU)
    assert loader.is_one_shot
    assert [len(list(loader)) for _ in range(2)] == [2, 0]


@pytest.mark.usefixtures("every_way")
def test_an_error_of_the_loader_comes_through_after_the_batches_before_it():
    def failing():
        yield from make_batches(2)
        raise OSError("disk")

    got = []
    with pytest.raises(OSError, match=r"^disk$") as caught:
        got.extend(PrefetchingLoader(failing(), CPU))
    assert len(got) == 2
    assert caught.traceback[-1].name == "failing"


class EpochAware:
    def __init__(self):
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


def test_each_holder_is_told_of_the_epoch_once():
    loader, batch_sampler = EpochAware(), EpochAware()
    loader.__class__ = type("Loader", (EpochAware,), {"__iter__": lambda self: iter(())})
    batch_sampler.sampler = loader.sampler = EpochAware()  # one object in two places
    loader.batch_sampler, loader.dataset = batch_sampler, EpochAware()
    device_loader = PrefetchingLoader(loader, CPU)
    device_loader.set_epoch(2)
    device_loader.set_epoch(3)
    for holder in (loader, loader.sampler, batch_sampler, loader.dataset):
        assert holder.epochs == [2, 3]


def test_a_sampler_is_told_of_the_epoch_wherever_it_stands():
    data = range(8)
    sampler = DistributedSampler(data, 2, 0)
    several = BatchSampler(sampler, 2, drop_last=False)
    for loader in (
        DataLoader(data, 2, sampler=sampler),
        DataLoader(data, batch_sampler=several),
        DataLoader(data, batch_size=None, sampler=several),
        DataLoader(data, batch_size=None, sampler=BatchSampler(several, 2, drop_last=False)),
    ):
        sampler.set_epoch(0)
        PrefetchingLoader(loader, CPU).set_epoch(3)
        assert sampler.epoch == 3


def test_a_sampler_that_is_dealt_out_is_told_too():
    class Order(EpochAware):
        def __iter__(self):
            return iter(range(8))

    sampler = Order()
    several = BatchSampler(sampler, 2, drop_last=False)
    loader = DataLoader(range(8), batch_size=None, sampler=several)
    PrefetchingLoader(shard_loader(loader, rank=0, world_size=2), CPU).set_epoch(3)
    assert sampler.epochs == [3]


def test_what_answers_for_every_name_has_no_samplers_without_end():
    class Anything:
        def __getattr__(self, name):
            return Anything()

    assert len(samplers_of(Anything())) < 100


def test_a_loader_that_asks_for_no_epoch_is_left_alone():
    PrefetchingLoader([1, 2], CPU).set_epoch(1)
    PrefetchingLoader(DataLoader(TensorDataset(ones())), CPU).set_epoch(1)

"""shard_loader: each rank its own part, all of it, the same as one process would have had."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from torchfast import PrefetchingLoader, StateMismatchError, build_dataloader, shard_loader
from torchfast.data import sharded


def parts(make, size, **options):
    """The batches of each rank, as lists, of one epoch; ranks have other global generators."""
    found = []
    for rank in range(size):
        torch.manual_seed(rank)
        found.append(of_epoch(shard_loader(make(), rank=rank, world_size=size, **options)))
    return found


def of_epoch(loader):
    return [batch.tolist() for batch in loader]


def generator(seed=5):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("size", [2, 3])
def test_the_ranks_together_have_what_one_process_has(size):
    def make(batch_size=2):
        return DataLoader(range(24), batch_size, shuffle=True, generator=generator())

    ranks = parts(make, size)
    whole = of_epoch(make(2 * size))
    assert [sorted(itertools.chain(*step)) for step in zip(*ranks, strict=True)] == [
        sorted(batch) for batch in whole
    ]
    # In particular nothing is left out and nothing comes twice.
    assert sorted(itertools.chain(*itertools.chain(*ranks))) == list(range(24))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("number", [0, 1, 2, 7, 11])
def test_every_rank_has_as_many_batches_and_len_says_so(number, drop_last):
    def make():
        return DataLoader(range(number), 2, drop_last=drop_last)

    ranks = parts(make, 3)
    assert len({tuple(map(len, batches)) for batches in ranks}) == 1
    assert len(shard_loader(make(), rank=0, world_size=3)) == len(ranks[0])
    seen = list(itertools.chain(*itertools.chain(*ranks)))
    if drop_last:
        assert len(set(seen)) == len(seen)  # nothing twice
    else:
        assert set(seen) == set(range(number))  # everything, and no more twice than it takes
        assert len(seen) <= number + 2


@pytest.mark.parametrize(
    "kind",
    [
        lambda data: RandomSampler(data),
        lambda data: RandomSampler(data, replacement=True, num_samples=30),
        lambda data: WeightedRandomSampler(range(1, 13), 12, replacement=False),
        lambda data: Homemade(data),
    ],
)
def test_without_a_generator_all_ranks_draw_the_same_order_and_another_each_epoch(kind):
    data = range(12)

    def epochs(rank):
        torch.manual_seed(rank)
        loader = shard_loader(
            DataLoader(data, 1, sampler=kind(data)), rank=rank, world_size=2, seed=3
        )
        before = torch.get_rng_state()
        found = [[batch.item() for batch in loader] for _ in range(3)]
        return found, not torch.equal(before, torch.get_rng_state())

    (first, _), (second, _) = epochs(0), epochs(1)
    wholes = [
        list(itertools.chain(*zip(a, b, strict=True))) for a, b in zip(first, second, strict=True)
    ]
    assert wholes[0] != wholes[1] != wholes[2]
    if "Weighted" in repr(kind(data)) or len(first[0]) == 6:
        assert all(sorted(whole) == list(data) for whole in wholes)


class Homemade:
    """A sampler of a user's, that draws from the global generator and knows no other."""

    def __init__(self, data):
        self._data = data

    def __iter__(self):
        return iter(torch.randperm(len(self._data)).tolist())

    def __len__(self):
        return len(self._data)


def test_batches_of_a_batch_sampler_are_dealt_out_whole():
    def make():
        batches = [[0, 1, 2], [3], [4, 5], [6, 7]]
        return DataLoader(range(8), batch_sampler=batches)

    assert parts(make, 2) == [[[0, 1, 2], [4, 5]], [[3], [6, 7]]]
    assert len(shard_loader(make(), rank=0, world_size=2)) == 2
    by_epoch = DataLoader(range(4), batch_sampler=Epochs())
    loader = PrefetchingLoader(shard_loader(by_epoch, rank=1, world_size=2), "cpu")
    for epoch in (0, 3):
        loader.set_epoch(epoch)
        assert of_epoch(loader) == [[epoch]]


class Epochs(BatchSampler):
    """Batches that depend on the epoch; of torch's class, but not the one that torch makes."""

    def __init__(self):
        super().__init__(SequentialSampler(range(2)), 1, drop_last=False)
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([[0], [self.epoch]])


def test_everything_else_of_a_loader_stays_as_it_was():
    def collate(samples):
        return torch.tensor(samples) * 10

    given = build_dataloader(
        range(8), 2, num_workers=1, persistent_workers=True, collate_fn=collate, timeout=60.0,
        device="cpu", shuffle=True, generator=generator(), drop_last=True,
    )  # fmt: skip
    sharded = shard_loader(given, rank=0, world_size=2)
    changed = {"sampler", "batch_sampler", "_iterator"}
    mine, theirs = (
        {k: v for k, v in vars(x).items() if k not in changed} for x in (sharded, given)
    )
    assert type(sharded) is type(given)
    assert mine == theirs
    assert sharded.batch_sampler.batch_size == 2
    assert sharded.batch_sampler.drop_last
    assert str(sharded.report()) == str(given.report())
    assert type(given.sampler) is RandomSampler
    first, second = of_epoch(sharded), of_epoch(sharded)
    assert first != second
    assert all(sample % 10 == 0 for sample in itertools.chain(*first))
    assert sharded._iterator is not None  # its workers stay
    del sharded._iterator
    unbatched = shard_loader(DataLoader(range(5), batch_size=None), rank=1, world_size=2)
    assert list(unbatched) == [1, 3, 0]


class Divided(IterableDataset):
    is_sharded = True

    def __iter__(self):
        return iter(range(4))


class Wrapping:
    """A batch sampler around another one."""

    def __init__(self, batch_sampler):
        self.batch_sampler = batch_sampler

    def __iter__(self):
        return iter(self.batch_sampler)


def test_what_is_sharded_already_is_not_touched(caplog):
    data = range(8)
    sampler = DistributedSampler(data, 2, 1)
    for loader in (
        DataLoader(data, 2, sampler=sampler),
        DataLoader(data, batch_sampler=BatchSampler(sampler, 2, drop_last=False)),
        DataLoader(data, batch_size=None, sampler=BatchSampler(sampler, 2, drop_last=False)),
        DataLoader(data, batch_sampler=Wrapping(BatchSampler(sampler, 2, drop_last=False))),
        DataLoader(Divided(), 2),
        shard_loader(DataLoader(data, 2), rank=1, world_size=2),
        shard_loader([1, 2], rank=1, world_size=2),
    ):
        assert shard_loader(loader, rank=1, world_size=2) is loader
    plain = DataLoader(data, 2)
    assert shard_loader(plain, rank=0, world_size=1) is plain
    caplog.clear()
    with pytest.raises(ValueError, match="divides the data by 3, and there are 2 ranks"):
        shard_loader(DataLoader(data, sampler=DistributedSampler(data, 3, 1)), rank=0, world_size=2)
    mine = DataLoader(data, 2, sampler=sampler)
    with pytest.raises(ValueError, match="has the samples of rank 1, and this is rank 0"):
        shard_loader(mine, rank=0, world_size=2)
    assert not caplog.records


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class Stateful:
    """A loader that knows where it is."""

    def __init__(self):
        self._done = 0

    def __iter__(self):
        while self._done < 7:
            self._done += 1
            yield torch.tensor(self._done)
        self._done = 0

    def state_dict(self):
        return {"done": self._done}

    def load_state_dict(self, state):
        self._done = state["done"]

    def set_epoch(self, epoch):
        self.epoch = epoch


def test_batches_of_an_iterable_are_dealt_out_with_one_warning(caplog):
    caplog.set_level(logging.WARNING)
    assert parts(lambda: DataLoader(Stream(), 2), 2) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert caplog.text.count("every rank loads all batches of the DataLoader") == 1  # on rank 0
    batches = [torch.tensor(number) for number in range(7)]
    assert parts(lambda: batches, 3) == [[0, 3], [1, 4], [2, 5]]  # as many on every rank
    assert len(shard_loader(batches, rank=0, world_size=3)) == 2
    assert parts(lambda: (each for each in batches), 2) == [[0, 2, 4], [1, 3, 5]]
    one_shot = shard_loader(iter(batches), rank=0, world_size=2)
    assert PrefetchingLoader(one_shot, "cpu").is_one_shot
    with pytest.raises(TypeError, match="has no length"):
        len(PrefetchingLoader(shard_loader(Stateful(), rank=0, world_size=2), "cpu"))
    loader = shard_loader(Stateful(), rank=1, world_size=2)
    loader.set_epoch(4)
    assert loader.epoch == 4


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(range(16), 2, shuffle=True, generator=generator()),
        lambda: DataLoader(range(16), 2, shuffle=True),
        lambda: DataLoader(range(16), 2, sampler=Homemade(range(16))),
        lambda: [torch.tensor([number]) for number in range(8)],
        Stateful,
    ],
)
def test_a_position_is_gone_on_from(make):
    """In the second epoch, in the middle: the rest of it, and the next one."""

    def made():
        return PrefetchingLoader(shard_loader(make(), rank=1, world_size=2), "cpu")

    whole = made()
    expected = [of_epoch(whole) for _ in range(3)]
    first = made()
    of_epoch(first)
    batches = iter(first)
    assert [next(batches).tolist() for _ in range(2)] == expected[1][:2]
    state = first.state_dict()
    second = made()
    second.load_state_dict(state)
    assert [of_epoch(second), of_epoch(second)] == [expected[1][2:], expected[2]]


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_position_goes_over_to_another_number_of_ranks(shuffled):
    """No sample is left out and none comes twice."""

    def made(rank, size, batch_size):
        options = {"shuffle": True, "generator": generator()} if shuffled else {}
        loader = DataLoader(range(48), batch_size, **options)
        return PrefetchingLoader(shard_loader(loader, rank=rank, world_size=size), "cpu")

    def after(num_batches, rank, size, batch_size):
        loader = made(rank, size, batch_size)
        batches = iter(loader)
        seen = [next(batches).tolist() for _ in range(num_batches)]
        return loader.state_dict(), list(itertools.chain(*seen))

    def rest(state, rank, size, batch_size):
        loader = made(rank, size, batch_size)
        loader.load_state_dict(state)
        return list(itertools.chain(*of_epoch(loader)))

    states, seen = zip(*[after(3, rank, 4, 2) for rank in range(4)], strict=True)
    for size, batch_size in ((2, 2), (1, 2), (8, 1), (2, 4), (4, 2), (1, 8)):
        left = [rest(states[rank % 4], rank, size, batch_size) for rank in range(size)]
        assert sorted(itertools.chain(*seen, *left)) == list(range(48)), (size, batch_size)
    with pytest.raises(StateMismatchError, match="build the loader as it was built before"):
        rest(states[0], 0, 5, 2)  # 24 samples are no whole number of steps of 10
    with pytest.raises(StateMismatchError, match="batch_size 2, and this loader has 1"):
        rest(states[0], 0, 4, 1)  # as many ranks
    other = PrefetchingLoader(DataLoader(range(40), 2), "cpu")
    with pytest.raises(StateMismatchError):
        other.load_state_dict(states[0])
    # torch's own sampler deals otherwise, and says nothing of how.
    theirs = DataLoader(range(48), 2, sampler=DistributedSampler(range(48), 2, 0))
    with pytest.raises(StateMismatchError, match="num_replicas"):
        PrefetchingLoader(theirs, "cpu").load_state_dict(states[0])


class Endless:
    """As those of training by steps, where no epoch ends."""

    def __init__(self, generator=None):
        if generator is not None:
            self.generator = generator

    def __iter__(self):
        while True:
            yield from torch.randperm(4, generator=getattr(self, "generator", None)).tolist()


def test_a_sampler_without_an_end(monkeypatch):
    def first(sampler):
        loader = shard_loader(DataLoader(range(4), 2, sampler=sampler), rank=1, world_size=2)
        return [batch.tolist() for batch in itertools.islice(loader, 4)]

    monkeypatch.setattr(sharded, "_MOST_DRAWN", 100)
    with pytest.raises(ValueError, match=r"sampler \(Endless\) has no end after 100 samples"):
        first(Endless())
    assert len(first(Endless(generator()))) == 4
    divided = Endless()
    divided.is_sharded = True
    assert len(first(divided)) == 4
    # One that only does not say how long it is, is drawn to its end.
    monkeypatch.delattr(Homemade, "__len__")
    assert len(first(Homemade(range(4)))) == 1


@pytest.mark.parametrize("kind", [RandomSampler, Homemade])
def test_one_process_goes_on_in_the_order_that_many_drew(kind):
    """Without a generator of the user's, many ranks have one for the order and one process none."""
    data = range(24)

    def made(rank, size):
        loader = DataLoader(data, 2, sampler=kind(data))
        return PrefetchingLoader(shard_loader(loader, rank=rank, world_size=size), "cpu")

    def begun(rank, size, state=None):
        torch.manual_seed(rank)
        loader = made(rank, size)
        if state is not None:
            loader.load_state_dict(state)
        of_epoch(loader) if state is None else None
        batches = iter(loader)
        seen = [next(batches).tolist() for _ in range(2)]
        return loader.state_dict(), list(itertools.chain(*seen))

    states, seen = zip(*[begun(rank, 2) for rank in range(2)], strict=True)
    state, more = begun(0, 1, states[0])  # which saves in its turn
    alone = made(0, 1)
    alone.load_state_dict(state)
    left = list(itertools.chain(*of_epoch(alone)))
    assert sorted(itertools.chain(*seen, more, left)) == list(data)
    # The epochs to come are those of two ranks too.
    theirs = [made(rank, 2) for rank in range(2)]
    for rank, loader in enumerate(theirs):
        loader.load_state_dict(states[rank])
        of_epoch(loader)
    together = zip(*(itertools.chain(*of_epoch(loader)) for loader in theirs), strict=True)
    assert list(itertools.chain(*of_epoch(alone))) == list(itertools.chain(*together))

    plain = made(0, 1)
    next(iter(plain))
    next(iter(plain))
    with pytest.raises(StateMismatchError, match="saved by one process, whose loader drew"):
        made(1, 2).load_state_dict({**plain.state_dict(), "num_batches": 2})


def test_bad_arguments():
    loader = DataLoader(range(4))
    with pytest.raises(TypeError, match="loader must be an iterable"):
        shard_loader(3, rank=0, world_size=2)
    with pytest.raises(ValueError, match="rank must be below world_size=2, got 2"):
        shard_loader(loader, rank=2, world_size=2)
    with pytest.raises(TypeError, match="rank must be an int"):
        shard_loader(loader, rank=0.0, world_size=2)
    with pytest.raises(ValueError, match="world_size must be >= 1"):
        shard_loader(loader, rank=0, world_size=0)
    with pytest.raises(TypeError, match="did you mean 'rank'"):
        shard_loader(loader, ranks=0, world_size=2)

"""Loaders that all ranks read whole: in the same order on each, whatever draws it."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from torchfast import PrefetchingLoader, build_dataloader, shard_loader
from torchfast._core.rng import get_rng_state, same_rng_state, seed_everything
from torchfast.data.sharded import told_of
from torchfast.data.sharded_batches import has_own_loop

CPU = torch.device("cpu")
NUMBER = 12


class AtOnce(IterableDataset):
    """Shuffled when an epoch begins."""

    def __iter__(self):
        order = list(range(NUMBER))
        random.shuffle(order)
        return iter(order)


class Buffered(IterableDataset):
    """Shuffled as long as it lasts."""

    def __iter__(self):
        left = list(range(NUMBER))
        while left:
            place = int(np.random.randint(len(left)) + torch.randint(9, ())) % len(left)
            yield left.pop(place)


class Shuffled(IterableDataset):
    """Shuffled by each worker, in a part of its own."""

    def __iter__(self):
        info = get_worker_info()
        own = torch.arange(info.id, NUMBER, info.num_workers)
        return iter(own[torch.randperm(len(own))].tolist())


class Own(DataLoader):
    """Passes on what torch's own yields."""

    def __iter__(self):
        yield from super().__iter__()


class Cycled(DataLoader):
    """Asks its sampler once for all epochs, as several libraries do to keep workers."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.running = itertools.chain.from_iterable(DataLoader.__iter__(self) for _ in range(99))

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.running)


class Made(DataLoader):
    """Has batches from elsewhere than its sampler."""

    def __iter__(self):
        return (torch.tensor([number]) for number in random.sample(range(NUMBER), NUMBER))


def stream():
    order = list(range(NUMBER))
    random.shuffle(order)
    for number in order:
        yield torch.tensor([number])


MAKERS = {
    "at once": lambda: DataLoader(AtOnce(), 2),
    "buffered": lambda: DataLoader(Buffered(), 2),
    "workers": lambda: DataLoader(Shuffled(), 2, num_workers=2),
    "out of order": lambda: DataLoader(Shuffled(), 2, num_workers=2, in_order=False),
    "own loop": lambda: Own(range(NUMBER), 2, shuffle=True),
    "cycled": lambda: Cycled(range(NUMBER), 2, shuffle=True),
    "made": lambda: Made(range(99), 2),
    "iterator": stream,
}


def of_rank(make, rank, epochs, size=2, **options):
    """Return a rank's epochs, with global generators of its own, and what it told of each."""
    seed_everything(rank)
    loader = PrefetchingLoader(shard_loader(make(), rank=rank, world_size=size, **options), "cpu")
    before = get_rng_state(CPU)
    found, told = [], []
    for _ in range(epochs):
        found.append([batch.tolist() for batch in loader])
        told.append(told_of(loader.loader, 0))
    assert same_rng_state(before, get_rng_state(CPU))  # which the loader does not move
    return found, told


@pytest.mark.parametrize("name", MAKERS)
def test_all_ranks_read_the_same_order(name):
    epochs = 1 if name == "iterator" else 2
    (first, told), (second, others) = (of_rank(MAKERS[name], rank, epochs) for rank in range(2))
    for one, two in zip(first, second, strict=True):
        assert len(one) == len(two)
        assert sorted(itertools.chain(*one, *two)) == list(range(NUMBER))
    assert told == others
    assert "" not in told
    again, other = (of_rank(MAKERS[name], 0, epochs, seed=seed)[0] for seed in (0, 1))
    if name != "workers" and "order" not in name:  # of which a first batch may be the same
        assert again == first != other
    if epochs == 2:
        assert first[0] != first[1]


def test_the_loader_that_was_given_stays_as_it_was():
    given = DataLoader(Shuffled(), 2, num_workers=2, in_order=False)
    before = dict(vars(given))
    shard_loader(given, rank=0, world_size=2)
    assert vars(given) == before
    ordered = DataLoader(Shuffled(), 2, num_workers=2)
    assert shard_loader(ordered, rank=0, world_size=2)._loader is ordered  # whose workers may stay


def test_a_class_that_asks_its_sampler_is_dealt_out_by_sample():
    assert has_own_loop(Own(range(4)))
    for loader in (DataLoader(range(4)), build_dataloader(range(4), 2, device="cpu")):
        assert not has_own_loop(loader)
        assert isinstance(shard_loader(loader, rank=0, world_size=2), type(loader))


def unended():
    return iter(torch.arange(6).split(1))


# "cycled" has lost what it had drawn, in one process too.
@pytest.mark.parametrize("name", [*(name for name in MAKERS if name != "cycled"), "one-shot"])
def test_a_position_is_gone_on_from(name):
    """In the second epoch where there is one, in the middle: the rest, and the next epoch."""
    make = MAKERS.get(name, unended)

    def made():
        return PrefetchingLoader(shard_loader(make(), rank=1, world_size=2), "cpu")

    def rest(loader):
        epochs = 1 if loader.is_one_shot else 2
        return [[batch.tolist() for batch in loader] for _ in range(epochs)]

    seed_everything(3)
    loader = made()
    if not loader.is_one_shot:
        for _ in loader:
            pass
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    expected = [[batch.tolist() for batch in batches]]
    if not loader.is_one_shot:  # which is used up, and says so
        expected += rest(loader)
    seed_everything(99)
    again = made()
    again.load_state_dict(state)
    found = rest(again)
    assert found == expected[: len(found)]


class Carrying:
    """A loader that knows where it is, but not how it will draw the next epochs."""

    def __init__(self):
        self._order, self._done = None, 0

    def __iter__(self):
        if self._order is None:
            self._order, self._done = torch.randperm(NUMBER).tolist(), 0
        while self._done < NUMBER:
            self._done += 1
            yield torch.tensor(self._order[self._done - 1])
        self._order = None

    def state_dict(self):
        return {"order": self._order, "done": self._done}

    def load_state_dict(self, state):
        self._order, self._done = state["order"], state["done"]


class CarryingSamples(DataLoader):
    """The same, of a loader that asks its sampler anew and drops what it had."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._at, self._skip = 0, 0

    def _get_iterator(self):
        skip, self._skip = self._skip, 0
        return self._rest(super()._get_iterator(), skip)

    def _rest(self, batches, skip):
        for self._at, batch in enumerate(batches, start=1):
            if self._at > skip:
                yield batch

    def state_dict(self):
        return {"at": self._at}

    def load_state_dict(self, state):
        self._skip = state["at"]


@pytest.mark.parametrize(
    "make", [Carrying, lambda: CarryingSamples(range(NUMBER), 2, shuffle=True)]
)
def test_a_loader_that_carries_state_draws_by_the_epoch(make):
    def made():
        return PrefetchingLoader(shard_loader(make(), rank=1, world_size=2), "cpu")

    def epoch(loader, number):
        loader.set_epoch(number)
        return [batch.tolist() for batch in loader]

    whole = made()
    expected = [epoch(whole, number) for number in range(4)]
    assert expected[1] != expected[2] != expected[3]
    first = made()
    epoch(first, 0)
    first.set_epoch(1)
    batches = iter(first)
    assert next(batches).tolist() == expected[1][0]
    again = made()
    again.load_state_dict(first.state_dict())
    assert [epoch(again, number) for number in (1, 2, 3)] == [expected[1][1:], *expected[2:]]


def test_a_stream_without_an_end():
    class Endless(IterableDataset):
        def __iter__(self):
            return itertools.count()

    loader = PrefetchingLoader(shard_loader(DataLoader(Endless(), 2), rank=1, world_size=3), "cpu")
    found = [batch.tolist() for batch in loader.iterate(max_steps=3)]
    assert found == [[2, 3], [8, 9], [14, 15]]


@pytest.mark.parametrize("name", ["at once", "buffered"])
def test_what_draws_with_each_batch_is_fetched_where_the_training_draws(device, name):
    """And what does not, is fetched ahead; both have the numbers that they have without."""
    plain = []
    torch.manual_seed(4)
    loader = shard_loader(MAKERS[name](), rank=1, world_size=2)
    for _ in range(2):
        plain += [(batch.tolist(), torch.rand(()).item()) for batch in loader]
    torch.manual_seed(4)
    found = []
    with PrefetchingLoader(
        shard_loader(MAKERS[name](), rank=1, world_size=2), "cpu", background=True
    ) as ahead:
        for _ in range(2):
            for batch in ahead:
                device.transports[0].consumer.synchronize()
                found.append((batch.tolist(), torch.rand(()).item()))
        assert ahead._fetching.where == ("caller" if name == "buffered" else "thread")
    assert found == plain


def test_the_generators_of_devices_are_left_alone(monkeypatch):
    """Else the dropout of all ranks would be the same, and begin anew with each epoch."""

    class Homemade:
        def __iter__(self):
            return iter(torch.randperm(4).tolist())

        def __len__(self):
            return 4

    def seeded(seed):
        raise AssertionError(f"devices were seeded with {seed}")

    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded)
    for loader in (DataLoader(range(4), sampler=Homemade()), DataLoader(AtOnce(), 2)):
        assert len(list(shard_loader(loader, rank=0, world_size=2))) > 1

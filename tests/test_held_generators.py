"""A run goes on with the generators that samplers and data sets hold, whoever made them."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

from torchfast import PrefetchingLoader, shard_loader
from torchfast._core.generators import packed, set_states, state_of
from torchfast.data.held_generators import held_generators

NUM_SAMPLES, BATCH_SIZE, NUM_BATCHES, EPOCHS = 12, 2, 6, 3

MAKERS = {
    "torch": lambda: torch.Generator().manual_seed(3),
    "Python": lambda: random.Random(3),
    "RandomState": lambda: np.random.RandomState(3),
    **{
        kind.__name__: lambda kind=kind: np.random.Generator(kind(3))
        for kind in (
            np.random.PCG64,
            np.random.PCG64DXSM,
            np.random.MT19937,
            np.random.Philox,
            np.random.SFC64,
        )
    },
}


def drawn(generator, number=1):
    if isinstance(generator, torch.Generator):
        return [torch.rand((), generator=generator).item() for _ in range(number)]
    return [generator.random() for _ in range(number)]


def shuffled(generator, number=NUM_SAMPLES):
    keys = drawn(generator, number)
    return sorted(range(number), key=keys.__getitem__)


class Order:
    """A sampler as people write it; ``lazily`` draws as it is asked."""

    def __init__(self, generator, lazily=False):
        self.rng, self.lazily = generator, lazily

    def __len__(self):
        return NUM_SAMPLES

    def __iter__(self):
        if self.lazily:
            return (int(drawn(self.rng)[0] * NUM_SAMPLES) for _ in range(NUM_SAMPLES))
        return iter(shuffled(self.rng))


class Noisy(Dataset):
    def __init__(self, generator=None):
        self.rng = generator

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        return torch.tensor([index, 0.0 if self.rng is None else drawn(self.rng)[0]])


class Stream(IterableDataset):
    def __init__(self, generator):
        self.rng = generator

    def __iter__(self):
        return iter([torch.tensor(i) for i in shuffled(self.rng)])


class MadeAsItBegins(Order):
    """Its generator follows from the epoch, and is not there before the first one."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        self.rng = np.random.default_rng(self.epoch)
        return iter(shuffled(self.rng))


class OwnLoader:
    def __init__(self, generator):
        self.rng = generator

    def __iter__(self):
        return iter([torch.tensor([i]) for i in shuffled(self.rng, NUM_BATCHES)])


class Several(Noisy):
    def __getitem__(self, indices):
        return torch.stack([Noisy.__getitem__(self, index) for index in indices])


LOADERS = {
    "a sampler's": lambda g: DataLoader(Noisy(), BATCH_SIZE, sampler=Order(g)),
    "a sampler's that draws as it is asked": lambda g: DataLoader(
        Noisy(), BATCH_SIZE, sampler=Order(g, lazily=True)
    ),
    "with workers": lambda g: DataLoader(Noisy(), BATCH_SIZE, sampler=Order(g), num_workers=1),
    "a batch sampler's": lambda g: DataLoader(
        Noisy(), batch_sampler=BatchSampler(Order(g), BATCH_SIZE, False)
    ),
    "of a batch sampler as sampler": lambda g: DataLoader(
        Several(), batch_size=None, sampler=BatchSampler(Order(g), BATCH_SIZE, False)
    ),
    "a data set's": lambda g: DataLoader(Noisy(g), BATCH_SIZE),
    "a part of a data set's": lambda g: DataLoader(
        torch.utils.data.Subset(Noisy(g), range(NUM_SAMPLES)), BATCH_SIZE
    ),
    "a stream's": lambda g: DataLoader(Stream(g), BATCH_SIZE),
    "a loader's": OwnLoader,
}


def epochs(loader, log, stop_after=None, until=EPOCHS * NUM_BATCHES):
    """Go through epochs; return whether it came to the place at which to stop."""
    while len(log) < until:
        for batch in loader:
            log.append(batch.tolist())
            if len(log) == stop_after:
                return


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def check_goes_on(make, stop_after):
    whole, log = [], []
    epochs(PrefetchingLoader(make(), "cpu"), whole)
    loader = PrefetchingLoader(make(), "cpu")
    epochs(loader, log, stop_after)
    state = through_a_file(loader.state_dict())
    loader = PrefetchingLoader(make(), "cpu")
    loader.load_state_dict(state)
    epochs(loader, log)
    assert log == whole


@pytest.mark.usefixtures("every_way")
@pytest.mark.parametrize("stop_after", [2, NUM_BATCHES, NUM_BATCHES + 1, 2 * NUM_BATCHES + 3])
@pytest.mark.parametrize("name", LOADERS)
def test_a_run_goes_on_with_a_generator_that_a_part_holds(name, stop_after):
    check_goes_on(lambda: LOADERS[name](MAKERS["PCG64"]()), stop_after)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_run_goes_on_with_every_kind_of_generator(kind):
    check_goes_on(lambda: LOADERS["a sampler's"](MAKERS[kind]()), NUM_BATCHES + 1)


def test_the_order_of_samplers_is_found_where_torch_does_not_look():
    def make():
        sampler = RandomSampler(Noisy(), generator=MAKERS["torch"]())
        several = BatchSampler(sampler, BATCH_SIZE, False)
        return DataLoader(Several(), batch_size=None, sampler=several)

    check_goes_on(make, NUM_BATCHES + 1)


@pytest.mark.usefixtures("every_way")
@pytest.mark.parametrize("name", ["a sampler's that draws as it is asked", "a data set's"])
def test_an_epoch_that_breaks_off_has_drawn_what_a_plain_loop_has(name):
    def broken_off(wrap):
        generator, log = MAKERS["Python"](), []
        loader = wrap(LOADERS[name](generator))
        for stop_after in (2, 3, NUM_BATCHES):
            for number, batch in enumerate(loader, start=1):
                log.append(batch.tolist())
                if number == stop_after:
                    break
        return log, generator.random()

    assert broken_off(lambda loader: PrefetchingLoader(loader, "cpu")) == broken_off(lambda x: x)


def test_a_generator_that_is_made_as_an_epoch_begins_may_be_there_or_not():
    def make():
        return DataLoader(Noisy(), BATCH_SIZE, sampler=MadeAsItBegins())

    begun = PrefetchingLoader(make(), "cpu")
    for epoch in range(2):
        begun.set_epoch(epoch)
        batches = iter(begun)
        next(batches)
        if epoch == 0:
            list(batches)
    state = through_a_file(begun.state_dict())
    rest = [batch.tolist() for batch in batches]
    fresh = PrefetchingLoader(make(), "cpu")
    fresh.load_state_dict(state)
    assert [batch.tolist() for batch in fresh] == rest


def test_the_name_is_the_same_however_many_ranks_there_are():
    for name, make in LOADERS.items():
        one = make(MAKERS["PCG64"]())
        dealt = shard_loader(one, rank=0, world_size=2)
        own = [] if not hasattr(dealt, "order_generator") else [dealt.order_generator]
        own += [getattr(getattr(dealt, "sampler", None), "generator", None)]
        own += [getattr(getattr(dealt, "batch_sampler", None), "generator", None)]
        found = held_generators(dealt, own)
        assert list(found) == list(held_generators(one, ())), name
        assert len(found) == 1, name


class Sequence(random.Random):
    """Numbers that are none by chance, as those of a quasi-random sampler."""

    def getstate(self):
        raise NotImplementedError


def test_global_generators_and_what_has_no_state_are_left_alone():
    parts = [random._inst, np.random.mtrand._rand, torch.default_generator, random.SystemRandom()]
    parts += [Sequence()]
    parts += [random, np.random, 3, None, "rng"]
    loader = [1]
    for part in parts:
        loader = OwnLoader(part)
        assert held_generators(loader, ()) == {}
    known = random.Random(1)
    assert held_generators(OwnLoader(known), [known]) == {}


def test_what_answers_for_every_name_has_no_parts_without_end():
    class Anything:
        def __getattr__(self, name):
            return Anything()

    assert held_generators(Anything(), ()) == {}


@pytest.mark.parametrize("kind", MAKERS)
def test_a_state_is_the_same_from_memory_and_from_a_file(kind):
    generator = MAKERS[kind]()
    if kind in ("Python", "RandomState"):
        generator.gauss(0, 1) if kind == "Python" else generator.normal()  # the other half is kept
    drawn(generator, 3)
    state = {"rng": state_of(generator)}
    expected = drawn(generator, 5)
    set_states({"rng": generator}, state)
    assert drawn(generator, 5) == expected
    fresh = MAKERS[kind]()
    set_states({"rng": fresh}, through_a_file(packed(state)))
    assert drawn(fresh, 5) == expected
